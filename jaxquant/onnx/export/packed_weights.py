"""ONNX Runtime's MatMulNBits, for products with constant weights of 4 bits, and GatherBlockQuantized."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..._core import dtypes
from .graph import MICROSOFT, ModelGraph
from .registry import WriterCall, writes_mark
from .values import Value

_FOUR_BITS = (np.dtype(jnp.int4), np.dtype(jnp.uint4))
_UINT8 = np.dtype(np.uint8)
# The lengths of blocks that its kernels have. A scale for a whole column is repeated for blocks of this length.
_SHORTEST, _LONGEST, _USUAL = 16, 256, 128


class PackedWeights(NamedTuple):
    """Constant codes with their scale, which the graph also holds as floats.

    Attributes:
        codes: int4 or uint4.
        scale: float32, in a shape that broadcasts to that of the codes.
        zero_point: int32, like the scale, or None.
        sizes: how many indices of each dimension share an entry of the scale.
        hints: the names of the codes, the scale and the zero point among the user's parameters, or None.
    """

    codes: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray | None
    sizes: Sequence[Any]
    hints: Sequence[str | None]


def note_weights(
    graph: ModelGraph, result: Value, codes: Value, parts: Sequence[Value | None], sizes: Sequence[Any]
) -> None:
    """Note that a tensor holds dequantized constants of 4 bits.

    Args:
        graph: the graph.
        result: the tensor.
        codes: the constants.
        parts: the scale and the zero point, in shapes that broadcast to that of the codes.
        sizes: how many indices of each dimension share an entry of the scale.
    """
    is_known = codes.is_known and all(part is None or part.is_known for part in parts)
    if result.name is None or not is_known or codes.dtype not in _FOUR_BITS or result.dtype != dtypes.FLOAT32:
        return
    rank = len(codes.shape)
    scale, point = (None if part is None else _add_dimensions(np.asarray(part.array), rank) for part in parts)
    assert scale is not None
    hints = [None if part is None else part.hint for part in (codes, *parts)]
    graph.weights[result.name] = PackedWeights(np.asarray(codes.array), scale, point, sizes, hints)


def _add_dimensions(array: np.ndarray, rank: int) -> np.ndarray:
    return array.reshape((1,) * (rank - array.ndim) + array.shape)


def multiply_packed(graph: ModelGraph, lhs: Any, rhs: Any) -> str | None:
    """Return the product of floats with noted weights as MatMulNBits, or None if it cannot have them.

    Args:
        graph: the graph.
        lhs: the floats, a Matrix.
        rhs: the weights, a Matrix.
    """
    weights = graph.weights.get(rhs.value.name)
    # MatMulNBits multiplies rows by one matrix of weights for the whole batch.
    if weights is None or lhs.batch or not lhs.free or tuple(weights.codes.shape) != tuple(rhs.shape):
        return None
    block = _find_block(weights, rhs.contracted)
    if block is None or lhs.value.dtype != dtypes.FLOAT32:
        return None
    rows, depth = rhs.count(rhs.free), rhs.count(rhs.contracted)
    a = graph.transpose(graph.store_full(lhs.value, lhs.shape), [*lhs.free, *lhs.contracted])
    free = tuple(lhs.shape[axis] for axis in lhs.free)
    a = a if len(lhs.contracted) == 1 else graph.reshape(a, (*free, depth))
    packed = _pack(weights, rhs, rows, depth, block)
    # The arrays of the parameters themselves have their names.
    hints = [hint and f"{hint}.packed" for hint in weights.hints]
    names = [graph.add_constant(*pair) for pair in zip(packed, hints, strict=False)]
    # Level 1 computes in float32; level 4 would round the other operand to 8 bits.
    attributes = {"K": depth, "N": rows, "bits": 4, "block_size": block, "accuracy_level": 1}
    name = graph.add("MatMulNBits", [a, *names], domain=MICROSOFT, **attributes)
    return name if len(rhs.free) == 1 else graph.reshape(name, (*free, *(rhs.shape[axis] for axis in rhs.free)))


def _find_block(weights: PackedWeights, contracted: Any) -> int | None:
    """Return the length of MatMulNBits's blocks, or None if no length fits the blocks of the scale."""
    parts = [part for part in (weights.scale, weights.zero_point) if part is not None]
    if all(part.shape[axis] == 1 for part in parts for axis in contracted):
        # A block may be longer than the column: codes past K are ignored.
        depth = math.prod(weights.codes.shape[axis] for axis in contracted)
        return min(_USUAL, max(_SHORTEST, 1 << max(depth - 1, 0).bit_length()))
    # The blocks of one of several dimensions are no runs of the merged one.
    if len(contracted) > 1:
        return None
    size = weights.sizes[contracted[0]]
    block = min(size & -size, _LONGEST)  # the largest power of two that divides it
    return block if block >= _SHORTEST else None


def _pack(weights: PackedWeights, rhs: Any, rows: int, depth: int, block: int) -> list[np.ndarray]:
    """Return the bytes of the codes, the scales, and the bytes of the zero points if there are any."""
    blocks = -(-depth // block)
    order = [*rhs.free, *rhs.contracted]
    # The operator has unsigned codes, and a zero point of 8 if none is given.
    shift = 8 if weights.codes.dtype == _FOUR_BITS[0] else 0
    codes = np.zeros((rows, blocks * block), np.uint8)
    codes[:, :depth] = (weights.codes.astype(np.int8) + shift).transpose(order).reshape(rows, depth)
    pairs = codes.reshape(rows, blocks, block // 2, 2)

    def spread(part: np.ndarray) -> np.ndarray:
        full = np.broadcast_to(part, weights.codes.shape).transpose(order)
        return np.ascontiguousarray(full.reshape(rows, depth)[:, ::block])

    scale = spread(weights.scale).astype(np.float32)
    packed = [pairs[..., 0] | (pairs[..., 1] << 4), scale]
    if weights.zero_point is None and shift:
        return packed
    point = 0 if weights.zero_point is None else spread(weights.zero_point)
    # Two zero points share a byte, within a row only.
    points = np.zeros((rows, blocks + blocks % 2), np.uint8)
    points[:, :blocks] = point + shift
    return [*packed, points[:, 0::2] | (points[:, 1::2] << 4)]


@writes_mark("matmul_nbits")
def write_packed_product(graph: ModelGraph, call: WriterCall) -> Value | None:
    """Write MatMulNBits for jaxquant's operator of this name."""
    p, (output,) = call.parameters, call.outputs
    if p["bits"] not in (4, 8) or any(p[name].dtype != dtypes.FLOAT32 for name in ("a", "scales")):
        return None
    shapes = iter(p["input_shapes"])
    parts = [p[name] for name in ("a", "b", "scales", "zero_points", "bias")]
    names = ["" if part is None else graph.store_full(part, next(shapes)) for part in parts]
    names.insert(4, "")  # g_idx
    while not names[-1]:
        names.pop()
    attributes = {name: p[name] for name in ("K", "N", "bits", "block_size")}
    name = graph.add("MatMulNBits", names, domain=MICROSOFT, **attributes, accuracy_level=1)
    return Value(tuple(output.shape), np.dtype(output.dtype), name)


@writes_mark("gather_block_quantized")
def write_packed_lookup(graph: ModelGraph, call: WriterCall) -> Value | None:
    """Write GatherBlockQuantized, or None for codes that are not in bytes: the graph holds those of 4 bits in 8."""
    p, (output,) = call.parameters, call.outputs
    # ONNX Runtime has no kernel of bfloat16, and before 1.32 none of 2 bits.
    if p["data"].dtype != _UINT8 or p["bits"] not in (4, 8) or output.dtype == dtypes.BFLOAT16:
        return None
    parts = [p[name] for name in ("data", "indices", "scales", "zero_points") if p[name] is not None]
    names = [graph.store_full(part, shape) for part, shape in zip(parts, p["input_shapes"], strict=True)]
    attributes = {name: p[name] for name in ("bits", "block_size", "quantize_axis", "gather_axis")}
    name = graph.add("GatherBlockQuantized", names, domain=MICROSOFT, **attributes)
    return Value(tuple(output.shape), np.dtype(output.dtype), name)
