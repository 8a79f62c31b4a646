"""`describe_state`: which array of an optimizer state is stored how, and in how many bytes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from .._arrays import parts
from .._arrays.quantized_array import QuantizedArray
from .._core.granularity import Aligned


@dataclasses.dataclass(frozen=True)
class LeafRow:
    """How an array of a state is stored.

    Attributes:
        path: its place in the state, such as "inner/0/mu/dense/kernel".
        shape: its shape.
        dtype: the dtype in which the transformation computes with it.
        stored: its codes and the elements that share a scale, or its dtype.
        nbytes: its bytes.
        float_nbytes: its bytes in `dtype`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    stored: str
    nbytes: int
    float_nbytes: int


@dataclasses.dataclass(frozen=True)
class StateReport:
    """What `describe_state` returns; `print` shows it as a table.

    Attributes:
        rows: a `LeafRow` for each array.
    """

    rows: tuple[LeafRow, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(row.nbytes for row in self.rows)

    @property
    def float_nbytes(self) -> int:
        """The bytes that all arrays would have without codes."""
        return sum(row.float_nbytes for row in self.rows)

    def __str__(self) -> str:
        """Return a table with a line for each array and one for all."""
        total = LeafRow("total", (), "", "", self.nbytes, self.float_nbytes)
        lines = [("array", "shape", "dtype", "stored as", "bytes", "of float")]
        for row in (*self.rows, total):
            ratio = row.nbytes / row.float_nbytes if row.float_nbytes else 1.0
            shape = "x".join(map(str, row.shape))
            lines.append((row.path, shape, str(row.dtype), row.stored, str(row.nbytes), f"{ratio:.3f}"))
        widths = [max(len(line[column]) for line in lines) for column in range(6)]
        aligned = [[cell.ljust(n) for cell, n in zip(line[:4], widths, strict=False)] for line in lines]
        numbers = [[cell.rjust(n) for cell, n in zip(line[4:], widths[4:], strict=True)] for line in lines]
        return "\n".join("  ".join((*left, *right)).rstrip() for left, right in zip(aligned, numbers, strict=True))


def describe_state(state: Any) -> StateReport:
    """Return which array of an optimizer state is stored how, and in how many bytes.

    Args:
        state: a state, or any other pytree, of arrays or of `jax.ShapeDtypeStruct`, for example from `jax.eval_shape`.

    Returns:
        A report with a row for each array. `print` shows it as a table.

    Raises:
        TypeError: a leaf is neither an array nor a number.

    Example:
        >>> import jax, jax.numpy as jnp, optax, jaxquant as jq
        >>> tx = jq.optim.quantize_state(optax.sgd(0.1, momentum=0.9))
        >>> params = {"kernel": jnp.ones((256, 64)), "bias": jnp.zeros(64)}
        >>> print(jq.optim.describe_state(jax.eval_shape(tx.init, params)))
        array                 shape   dtype    stored as             bytes  of float
        inner/0/trace/bias    64      float32  float32                 256     1.000
        inner/0/trace/kernel  256x64  float32  dynamic, 16x16        16640     0.254
        total                                                        16896     0.257

    Source: Dettmers et al., arXiv 2110.02861, section 2.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, QuantizedArray))
    return StateReport(tuple(_describe_leaf(path, leaf) for path, leaf in leaves))


def _describe_leaf(path: Any, leaf: Any) -> LeafRow:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)  # a Python number
    shape, dtype = tuple(leaf.shape), leaf.dtype
    # A key of jax.random has an extended dtype, which has a size as well.
    float_nbytes = math.prod(shape) * dtype.itemsize
    if not isinstance(leaf, QuantizedArray):
        return LeafRow(name, shape, dtype, str(dtype), float_nbytes, float_nbytes)
    block = "x".join(map(str, _derive_block(leaf)))
    stored = f"{leaf.codebook or leaf.codes.dtype}, {block}"
    nbytes = parts.count_all_bytes(leaf.stored_codes, leaf.scale, leaf.zero_point)
    return LeafRow(name, shape, dtype, stored, nbytes, float_nbytes)


def _derive_block(q: QuantizedArray) -> tuple[int, ...]:
    """Return the lengths of the elements that share a scale."""
    sizes = Aligned(q.block_size).sizes(tuple(q.scale.shape), q.shape)
    return q.shape if sizes is None else sizes
