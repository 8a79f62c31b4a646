"""The buffers of a compiled program and the operands of its contractions, parsed from XLA's text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

Shape = tuple[str, tuple[int, ...]]

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (\(.*\)|\S+) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+(?:e\w+)?)\[([\d,]*)\]")
_INNER = re.compile(r"(?:body|condition|to_apply|calls|branch_computations|called_computations)=\{?([^,}\s]+)")
_NO_BUFFERS = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "while", "call", "conditional")


def arrays(text: str) -> list[Shape]:
    """Return the arrays in a type, which may be a tuple."""
    return [(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _ARRAY.findall(text)]


def width(dtype: str) -> int:
    """Return the number of bits of an element."""
    return 8 if dtype == "pred" else int(re.sub(r"\D*(\d+).*", r"\1", dtype))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    results: list[Shape]
    opcode: str
    rest: str
    is_root: bool


def buffers_of(instruction: Instruction) -> list[Shape]:
    """Return the arrays that an instruction writes to memory."""
    return [] if instruction.opcode in _NO_BUFFERS else instruction.results


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A dot or a convolution in any computation."""

    opcode: str
    operands: tuple[Shape, ...]
    result: Shape


class Program:
    """A compiled program, with its computations by name as lists of instructions."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, donate_argnums: Any = ()) -> None:
        """Compile a function. Of the arguments, only shapes and dtypes are used."""
        compiled = jax.jit(function, donate_argnums=donate_argnums).lower(*arguments).compile()
        self.text = compiled.as_text() or ""
        self.memory: Any = compiled.memory_analysis()
        self.computations: dict[str, list[Instruction]] = {}
        current: list[Instruction] = []
        for line in self.text.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations[header[2]] = []
                self.entry = header[2] if header[1] else getattr(self, "entry", "")
            elif match := _INSTRUCTION.match(line):
                current.append(Instruction(match[2], arrays(match[3]), match[4], match[5], bool(match[1])))

    def in_memory(self) -> Iterator[Instruction]:
        """Yield the instructions outside of fusions, in the entry and the bodies of loops and calls."""
        waiting, names = [self.entry], set()
        while waiting:
            name = waiting.pop()
            if name in names or name not in self.computations:
                continue
            names.add(name)
            for instruction in self.computations[name]:
                yield instruction
                if instruction.opcode in ("while", "call", "conditional"):
                    waiting += [n.lstrip("%") for n in _INNER.findall(instruction.rest)]

    def wide_buffers(self) -> list[Shape]:
        """Return the arrays with more than 8 bits per element that the program writes to memory."""
        buffers = [s for i in self.in_memory() for s in buffers_of(i)]
        return [(dtype, shape) for dtype, shape in buffers if width(dtype) > 8]

    def widest(self) -> int:
        """Return the number of elements of the largest wide buffer."""
        return max((math.prod(shape) for _, shape in self.wide_buffers()), default=0)

    def contractions(self) -> list[Contraction]:
        """Return all dots and convolutions."""
        contractions = []
        for body in self.computations.values():
            types = {i.name: i.results for i in body}
            for i in body:
                if i.opcode in ("dot", "convolution"):
                    names = re.findall(r"%([\w.-]+)", i.rest.split(")")[0])
                    operands = tuple(types[n][0] for n in names[:2])
                    contractions.append(Contraction(i.opcode, operands, i.results[0]))
        return contractions

    def count_contracted(self) -> int:
        """Return how many elements the larger operands of all dots and convolutions have."""
        return sum(max(math.prod(shape) for _, shape in c.operands) for c in self.contractions())
