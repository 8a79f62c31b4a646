"""What a model may take: its bytes, its nodes and the memory of its values; the error for one that cannot be loaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.export import is_symbolic_dim
from jax.typing import DTypeLike
from onnx import ModelProto

from .._core import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a model may take at most. A model that needs more is refused with a ModelError.

    Attributes:
        file_bytes: the bytes of the file and of all its external data.
        memory_bytes: the bytes of all initializers, and of all values that are alive at the same time when the function
            runs, as far as shapes tell.
        nodes: the nodes of the graph and its subgraphs. The nodes of a function count once for each call, the nodes of
            a loop that is written out once for each iteration.
        iterations: the iterations of one Loop. Where their number is known only when a compiled program runs, a Loop
            that needs more ends there, and its results are NaN, and the lowest integers.

    Example:
        >>> import jaxquant as jq
        >>> jq.onnx.Limits(memory_bytes=2**30).nodes
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


def count_array_bytes(shape: Sequence[Any], dtype: DTypeLike) -> int:
    """Return the bytes of an array of this shape, without overflow. A symbolic length counts as 1: nothing runs."""
    return math.prod(1 if is_symbolic_dim(n) else int(n) for n in shape) * np.dtype(dtype).itemsize


def check_memory(limits: Limits, total: int, what: str) -> None:
    """Raise ModelError if `what` takes more bytes than the limits allow."""
    if total > limits.memory_bytes:
        raise ModelError(f"{what} takes {total} bytes, more than Limits.memory_bytes = {limits.memory_bytes}")


class ModelError(ValueError):
    """The error for a model file that is damaged, unsafe, larger than its limits, or not supported.

    Whatever is wrong with a file, `load` and `check` raise this error, with a text that says what it is.
    """


# The size of models: protobuf writes no message of 2 GB, so the arrays of larger models are kept outside of it.


LARGEST_MESSAGE = 2**31 - 2**20
# Smaller arrays stay in the model, as onnx's functions leave them there.
LARGEST_INNER_ARRAY = 1024


def count_initializer_bytes(model: ModelProto) -> int:
    """Return the bytes of the arrays that a model holds."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def is_large(model: ModelProto) -> bool:
    """Return whether protobuf cannot write a model, because of its arrays."""
    # `ByteSize` fails for a model that is too large, so it tells the size of none that matters.
    return count_initializer_bytes(model) >= LARGEST_MESSAGE


def count_model_bytes(model: ModelProto) -> int:
    """Return the bytes that a model takes in files."""
    if not is_large(model):
        return model.ByteSize()
    rest = ModelProto()
    rest.CopyFrom(model)
    del rest.graph.initializer[:]
    return count_initializer_bytes(model) + rest.ByteSize()
