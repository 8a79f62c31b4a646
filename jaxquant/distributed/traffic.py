"""The collectives of a compiled program, and the bytes that they send, parsed from XLA's text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._core import checks

_KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+(?:e\w+)?)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(body|condition|to_apply|calls|called_computations|branch_computations|true_computation|false_computation)"
    r"=(\{[^}]*\}|[^,\s]+)"
)
_TRIPS = re.compile(r"known_trip_count\D*(\d+)")


class Collective(NamedTuple):
    """One collective operation of a compiled program.

    Attributes:
        kind: "all-gather", "all-reduce", "all-to-all", "collective-permute" or "reduce-scatter".
        dtype: XLA's name of the dtype that travels, such as "s8" or "f32".
        shape: the shape of the result on one device.
        devices: the number of devices that take part together.
        calls: how often a run of the program executes it.
        sent_bytes: the bytes that each device sends in all calls, with the algorithms that send the least: an
            all-gather of n devices sends (n - 1) / n of its result, a reduce-scatter (n - 1) times its result, an
            all-reduce both, an all-to-all (n - 1) / n of its result, and a permutation its result.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    devices: int
    calls: int
    sent_bytes: int


def count_traffic(compiled: Any) -> list[Collective]:
    """Return the collectives of a compiled program with the bytes that each device sends.

    A collective in the body of a loop counts once for each of its iterations, if XLA knows their number, and otherwise
    once. Of a conditional, the collectives of all branches count, although a run executes one of them.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` returns, or its text.

    Returns:
        A list of `Collective`, in the order of the program's text. One of several arrays has an entry for each.

    Raises:
        TypeError: `compiled` is neither a compiled program nor a text.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxquant import distributed as jqd
        >>> jqd.count_traffic(jax.jit(jnp.sin).lower(1.0).compile())  # one device sends nothing
        []

    Source: Thakur et al., International Journal of High Performance Computing Applications 19(1), 2005, section 4.
    """
    text = compiled.as_text() if hasattr(compiled, "as_text") else compiled
    got = checks.describe_value(compiled)
    checks.require_type(
        isinstance(text, str), "distributed.count_traffic", "compiled", "a compiled program or its text", got
    )
    computations, entry = _split_computations(text)
    world = _read_number(r"num_partitions=(\d+)", text) * _read_number(r"replica_count=(\d+)", text)
    return list(_walk(computations, entry, 1, world))


class Instruction(NamedTuple):
    """A line of a computation: the text of its type, its name of an operation, and the rest of the line."""

    type: str
    operation: str
    rest: str


def _split_computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Return the instructions of each computation, and the name of the one where the program starts."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            current.append(Instruction(*match.groups()))
    return computations, entry


def _walk(computations: dict[str, list[Instruction]], name: str, calls: int, world: int) -> Iterator[Collective]:
    """Yield the collectives of a computation and of the computations that it calls."""
    for instruction in computations.get(name, []):
        # The "-done" of an asynchronous pair moves nothing, and is not counted.
        kind = instruction.operation.removesuffix("-start")
        # The computation that a collective calls adds two numbers, and contains no other collective.
        if kind in _KINDS:
            yield from _read_collective(instruction, kind, calls, world)
            continue
        trips = 1
        if instruction.operation == "while" and (match := _TRIPS.search(instruction.rest)):
            trips = int(match[1])
        for role, called in _CALLED.findall(instruction.rest):
            # The condition of a loop runs once more than its body.
            times = calls * (trips + (role == "condition" and trips > 1))
            for inner in called.strip("{}").split(","):
                yield from _walk(computations, inner.strip().lstrip("%"), times, world)


def _read_collective(instruction: Instruction, kind: str, calls: int, world: int) -> Iterator[Collective]:
    """Yield an entry for each array of a collective."""
    arrays = _ARRAY.findall(instruction.type)
    if instruction.operation.endswith("-start") and instruction.type.startswith("(") and kind != "all-reduce":
        # An asynchronous start returns its operands, its results, and maybe numbers that identify it.
        arrays = [array for array in arrays if array[1] or kind != "collective-permute"]
        arrays = arrays[len(arrays) // 2 :]
    devices = _count_devices(instruction.rest, kind, world)
    for dtype, dimensions in arrays:
        shape = tuple(int(n) for n in dimensions.split(",") if n)
        sent = count_sent(kind, math.prod(shape) * _read_bits(dtype), devices)
        yield Collective(kind, dtype, shape, devices, calls, calls * sent)


def count_sent(kind: str, bits: int, devices: int) -> int:
    """Return the bytes that a device sends in a collective with a result of this many bits on one device."""
    times, parts = {
        "all-gather": (devices - 1, devices),
        "all-to-all": (devices - 1, devices),
        "all-reduce": (2 * (devices - 1), devices),
        "reduce-scatter": (devices - 1, 1),
        "collective-permute": (1, 1),
    }[kind]
    return bits * times // (8 * parts)


def _count_devices(rest: str, kind: str, world: int) -> int:
    """Return the number of devices in a group; XLA writes groups as lists, as a shape, or as axes of a mesh."""
    if kind == "collective-permute":
        return 2
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(match[2])
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"[\"']?(\w+)[\"']?=(\d+)", match[1]))
        return math.prod(int(sizes.get(name, 1)) for name in re.findall(r"\w+", match[2]))
    return world  # an empty list of groups means all devices


def _read_bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.sub(r"\D*(\d+).*", r"\1", dtype))


def _read_number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 1
