"""What a model may take: its bytes, its nodes, and the memory of its values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.export import is_symbolic_dim

from ..._core import checks
from ..errors import ModelError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a model may take at most. A model that needs more is refused with a ModelError.

    Attributes:
        file_bytes: the bytes of the file, and those of all its external data.
        memory_bytes: the bytes of all initializers, and of all values that are alive at the same time when the function
            runs, as far as shapes tell.
        nodes: the nodes of the graph, with those of its subgraphs, those of functions once for each call, and those of
            loops that are written out once for each iteration.
        iterations: the iterations of one Loop. Where their number is known only when a compiled program runs, a Loop
            that needs more ends there, and its results are NaN, and the lowest integers.

    Example:
        >>> from jaxquant import onnx as jqonnx
        >>> jqonnx.Limits(memory_bytes=2**30).nodes
        100000
    """

    file_bytes: int = 8 * 2**30
    memory_bytes: int = 8 * 2**30
    nodes: int = 100_000
    iterations: int = 2**20

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            checks.check_integer("onnx.Limits", field.name, value)
            checks.require(value > 0, "onnx.Limits", field.name, "a positive int", value)


def count_bytes(shape: Sequence[Any], dtype: Any) -> int:
    """Return the bytes of an array of this shape, without overflow. A symbolic length counts as 1: nothing runs."""
    return math.prod(1 if is_symbolic_dim(n) else int(n) for n in shape) * np.dtype(dtype).itemsize


def check_memory(limits: Limits, total: int, what: str) -> None:
    """Raise ModelError if `what` takes more bytes than the limits allow."""
    if total > limits.memory_bytes:
        raise ModelError(f"{what} takes {total} bytes, more than Limits.memory_bytes = {limits.memory_bytes}")
