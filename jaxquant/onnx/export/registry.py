"""The tables from JAX's primitives, and from jaxquant's marks, to functions that write ONNX nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .graph import ModelGraph
from .values import Spec, Value


class WriterCall(NamedTuple):
    """One equation.

    Attributes:
        name: the primitive or the mark.
        inputs: the operands.
        parameters: the parameters of the primitive, or the arguments of the mark by name.
        outputs: the shapes and dtypes of the results.
    """

    name: str
    inputs: Sequence[Value]
    parameters: dict[str, Any]
    outputs: Sequence[Spec]


Writer = Callable[[ModelGraph, WriterCall], Any]  # returns a Value, or a list of them
PRIMITIVES: dict[str, Writer] = {}
MARKS: dict[str, Writer] = {}


def writes(*names: str) -> Callable[[Writer], Writer]:
    """Return a decorator that registers the writer of primitives."""

    def decorate(writer: Writer) -> Writer:
        PRIMITIVES.update(dict.fromkeys(names, writer))
        return writer

    return decorate


def writes_mark(*names: str) -> Callable[[Writer], Writer]:
    """Return a decorator that registers the writer of marks."""

    def decorate(writer: Writer) -> Writer:
        MARKS.update(dict.fromkeys(names, writer))
        return writer

    return decorate
