"""The contraction of a float array with a quantized one, which is dequantized one chunk at a time on a CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import indexing, quantized_array, weight_only
from .._arrays.quantized_array import QuantizedArray
from .._arrays.weight_only import Cut
from .._core import dtypes, rounding, sharding
from ..integer.dot_general import Role


class _Config(NamedTuple):
    """The static arguments of a weight-only contraction.

    Attributes:
        left: the role of each dimension of lhs.
        right: the role of each dimension of rhs.
        quantized: 0 if lhs is quantized, 1 if rhs is.
        static: the static part of the quantized side, as its `tree_flatten` returns it.
    """

    left: Role
    right: Role
    quantized: int
    static: tuple[Any, Any, Any]
    precision: Any
    out_sharding: Any

    @property
    def role(self) -> Role:
        """The role of the quantized side."""
        return (self.left, self.right)[self.quantized]

    def find_axis(self, codes: jax.Array) -> int | None:
        """Return the longest dimension of the codes that is not contracted, if there is one."""
        return max(self.role.free, key=lambda a: codes.shape[a], default=None)

    def plan_cut(self, codes: jax.Array) -> Cut:
        """Return how the codes are cut into chunks, which end where blocks end."""
        axis = self.find_axis(codes)
        assert axis is not None
        # The product has the batch dimensions, then the free dimensions of lhs, then those of rhs.
        length, frees_before = codes.shape[axis], 0 if self.quantized == 0 else len(self.left.free)
        place = len(self.role.batch) + frees_before + self.role.free.index(axis)
        return Cut(length, codes.size // length, self._unflatten(codes, None, None).block_size or 1, place)

    def arrange_operand(self, x: jax.Array) -> jax.Array:
        """Return the float operand unchanged."""
        return x

    def dequantize_chunk(self, codes: jax.Array, scale: Any, zero_point: Any, chunk: slice, wait: Any) -> jax.Array:
        """Return the dequantized weights of one chunk, with `wait` applied to its scale."""
        q = self._unflatten(codes, scale, zero_point)
        if chunk != slice(None):
            axis = self.find_axis(codes)
            assert axis is not None
            # Indexing also selects the entries of the scale and zero point that belong to the chunk.
            q = indexing.index_array(q, (slice(None),) * axis + (chunk,))
            q = q.replace(scale=wait(q.scale))
        return quantized_array.dequantize_checked(q)

    def contract_chunk(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """Return the product in float32, whatever dtype the operands have."""
        lhs, rhs = (weights, x) if self.quantized == 0 else (x, weights)
        dimensions = ((self.left.contracted, self.right.contracted), (self.left.batch, self.right.batch))
        return lax.dot_general(lhs, rhs, dimensions, self.precision, jnp.float32, out_sharding=self.out_sharding)

    def _unflatten(self, codes: Any, scale: Any, zero_point: Any) -> QuantizedArray:
        return QuantizedArray.tree_unflatten(self.static, (codes, scale, zero_point))


def contract_weight_only(
    lhs: Any, rhs: Any, left: Role, right: Role, precision: Any, preferred: Any, out_sharding: Any
) -> jax.Array:
    """Return the float product of a quantized and a float array."""
    quantized = 0 if isinstance(lhs, QuantizedArray) else 1
    q: Any = (lhs, rhs)[quantized]
    x: Any = (lhs, rhs)[1 - quantized]
    # Convert both sides to one dtype, because JAX refuses to mix dtypes if the user has chosen strict promotion.
    wide = dtypes.find_wider(q.dtype, x.dtype)
    leaves, static = q.astype(wide).tree_flatten()
    config = _Config(left, right, quantized, static, precision, out_sharding)
    is_placed = out_sharding is not None or sharding.is_placed(x) or sharding.is_placed(q.codes)
    # Use chunks only if they pay: their custom gradient rule excludes forward mode and computes every cotangent, even
    # one that is not needed.
    is_whole = q.codes.size <= weight_only.CHUNK or is_placed or config.find_axis(q.codes) is None
    contract = weight_only.contract_at_once if is_whole else weight_only.contract_in_cache
    y: Any = contract(config, x.astype(wide), *leaves)
    dtype = wide if preferred is None else preferred
    return rounding.round_to_dtype(y, dtype).astype(dtype)
