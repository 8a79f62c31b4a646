"""The contraction of two arrays of small floats: float8 in float32, float4 in integers.

The product of two float8 codes is exact in float32, so an unscaled sum of them has only the errors of its additions. If
no scale varies along a contracted dimension, both are applied to the sum. Otherwise both operands are dequantized, a
chunk at a time on a CPU; with scales that are powers of two that is exact, too.

Twice a float4 code is an integer of at most 12. Two float4 operands are contracted as integers: exactly, and in blocks
with the sum of a block exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._arrays.quantized_array import QuantizedArray, check_form, dequantize_checked, read_entries
from .._core import dtypes, granularity, recording, sharding
from .._kernels import accumulator, affine, barriers, small_float_products
from .._kernels.contraction import Role, spread_outward
from . import dot_integer
from .dot_integer import Axes
from .dot_weight_only import choose_contraction


def has_float_codes(q: object) -> bool:
    """Return whether an operand is quantized to float8 or float4."""
    return isinstance(q, QuantizedArray) and q.codebook is None and q.stored_codes.dtype in dtypes.SMALL_FLOATS


class _FloatProduct(NamedTuple):
    """The static arguments of a contraction of small floats."""

    left: Role
    right: Role
    precision: Any
    out_sharding: Any

    def contract(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """Return the float32 contraction of float32 arrays."""
        dimensions = ((self.left.contracted, self.right.contracted), (self.left.batch, self.right.batch))
        return lax.dot_general(lhs, rhs, dimensions, self.precision, jnp.float32, out_sharding=self.out_sharding)


def contract_small_floats(
    function: str, lhs: QuantizedArray, rhs: QuantizedArray, left: Role, right: Role, precision: lax.PrecisionLike,
    preferred: np.dtype | None, out_sharding: NamedSharding | PartitionSpec | None, caller_axes: Axes | None,
) -> jax.Array:  # fmt: skip
    """Return the contraction of two arrays of small floats, in the dtype `preferred` or in the wider of their dtypes.

    Args:
        function: the name of the public function, for errors.
        lhs: a checked array of float8 or float4 codes.
        rhs: the same.
        left: the role of each dimension of lhs.
        right: the role of each dimension of rhs.
        precision: as in `jax.lax.dot_general`.
        preferred: the dtype of the result, or None.
        out_sharding: the sharding of the result, or None.
        caller_axes: the contracted dimensions of the caller's arrays, for errors.
    """
    dtype = preferred or dtypes.choose_wider(lhs.dtype, rhs.dtype)
    product = _FloatProduct(left, right, precision, out_sharding)
    for argument, q in (("lhs", lhs), ("rhs", rhs)):
        check_form(function, argument, q, ("nested",))
    lhs, rhs = (dot_integer.fill_empty_entries(q.astype(jnp.float32), r) for q, r in ((lhs, left), (rhs, right)))
    nested, (lhs, rhs) = (lhs, rhs), (q.replace(scale=read_entries(q.scale)) for q in (lhs, rhs))
    if recording.is_recording():  # an exporter writes the dequantizations
        y = _contract_dequantized(product, lhs, rhs)
    elif all(q.codes.dtype in dtypes.FLOAT4 for q in (lhs, rhs)) and _has_common_blocks(lhs, rhs, left, right):
        y = _contract_doubled(function, product, lhs, rhs, nested, caller_axes)
    else:
        y = _contract(product, lhs, rhs)
    return affine.round_to_dtype(y, dtype).astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _contract(product: _FloatProduct, lhs: QuantizedArray, rhs: QuantizedArray) -> jax.Array:
    """Return the float32 contraction; it takes the same operands as `_contract_dequantized`."""
    sides = ((lhs, product.left), (rhs, product.right))
    if not all(q.scale.shape[axis] == 1 for q, role in sides for axis in role.contracted):
        return _contract_in_blocks(product, lhs, rhs)
    unit = [q.replace(scale=jnp.ones((1,) * q.ndim, jnp.float32), block_size=None) for q in (lhs, rhs)]

    def contract_decoded(a: jax.Array, b: jax.Array) -> jax.Array:
        return _contract_in_pieces(product, unit[0].replace(codes=a), unit[1].replace(codes=b))

    acc = small_float_products.contract_codes(
        lhs.codes, rhs.codes, product.left, product.right, product.precision, product.out_sharding, contract_decoded
    )
    return _scale_sum(acc, sides)


@_contract.defjvp
def _contract_jvp(product: _FloatProduct, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    _, tangent = jax.jvp(functools.partial(_contract_dequantized, product), primals, tangents)
    return _contract(product, *primals), tangent


def _contract_dequantized(product: _FloatProduct, lhs: QuantizedArray, rhs: QuantizedArray) -> jax.Array:
    return product.contract(dequantize_checked(lhs), dequantize_checked(rhs))


def _contract_in_pieces(product: _FloatProduct, lhs: QuantizedArray, rhs: QuantizedArray) -> jax.Array:
    """Return the float32 contraction, with the larger operand dequantized a chunk at a time on a CPU."""
    # A symbolic size of `jax.export` cannot be compared.
    is_larger = isinstance(lhs.size, int) and isinstance(rhs.size, int) and lhs.size > rhs.size
    operands: tuple[Any, Any] = (lhs, dequantize_checked(rhs)) if is_larger else (dequantize_checked(lhs), rhs)
    contract, arguments, _ = choose_contraction(*operands, *product)
    return contract(*arguments)


def _contract_in_blocks(product: _FloatProduct, lhs: QuantizedArray, rhs: QuantizedArray) -> jax.Array:
    """Return the float32 contraction of operands with a scale that varies along a contracted dimension."""
    return _contract_by_kernel(product, lhs, rhs, functools.partial(_contract_in_pieces, product, lhs, rhs))


def _contract_by_kernel(
    product: _FloatProduct, lhs: QuantizedArray, rhs: QuantizedArray, contract_decoded: Callable[[], jax.Array]
) -> jax.Array:
    """Return the float32 contraction in the kernels that backends have for blocks, or else as the caller does it."""
    if product.out_sharding is not None or sharding.is_placed(lhs.codes) or sharding.is_placed(rhs.codes):
        return contract_decoded()
    operands, factors = [], []
    for q, role in ((lhs, product.left), (rhs, product.right)):
        scale = q.scale
        if isinstance(scale, QuantizedArray):
            if scale.scale.size != 1 or scale.arithmetic != dtypes.FLOAT32:
                return contract_decoded()
            factor = scale.scale.reshape(())
            factors.append(1 / factor if scale.inverse_scale else factor)
            scale = scale.codes
        wide = granularity.expand_along(scale, q.shape, q.block_size, (*role.batch, *role.free))
        if not small_float_products.has_kernel(q.codes, wide, role):
            return contract_decoded()
        operands.append((q.codes, wide))
    factor = functools.reduce(lax.mul, factors) if factors else None
    a, b = operands
    return small_float_products.contract_blocks(a, b, product.left, product.right, factor, contract_decoded)


def _expand_kept(q: QuantizedArray, role: Role) -> jax.Array:
    """Return the scale with an entry for each index of the dimensions that are kept."""
    return granularity.expand_along(q.scale, q.shape, q.block_size, (*role.batch, *role.free))


def _scale_sum(acc: jax.Array, sides: tuple[tuple[QuantizedArray, Role], tuple[QuantizedArray, Role]]) -> jax.Array:
    """Return a float32 sum times the scales of both sides, which do not vary along its contracted dimensions."""
    (_, left), (_, right) = sides
    a, b = (dtypes.scale_as_float32(_expand_kept(q, role)) for q, role in sides)
    a, b = spread_outward(a, left, 0, len(right.free)), spread_outward(b, right, len(left.free), 0)
    if sharding.is_placed(acc):  # the scales of rows and of columns may be sharded differently
        a, b = accumulator.spread_over_product(a, acc), accumulator.spread_over_product(b, acc)
    return accumulator.scale_by_both(acc, a, b)


# Two float4 operands.


def _contract_doubled(
    function: str, product: _FloatProduct, lhs: QuantizedArray, rhs: QuantizedArray,
    nested: tuple[QuantizedArray, QuantizedArray], caller_axes: Axes | None,
) -> jax.Array:  # fmt: skip
    """Return the float32 contraction of two float4 operands, from the integers that are twice their codes.

    `nested` are the same operands, with scales that may be quantized.
    """
    left, right, _, out_sharding = product

    def multiply() -> jax.Array:
        a, b = (q.replace(codes=_double_codes(q.codes)) for q in (lhs, rhs))
        plan = dot_integer.plan_contraction(function, a, b, left, right, out_sharding, caller_axes)
        y = dot_integer.multiply_codes(a, b, plan, dtypes.FLOAT32)
        # A power of two, so that nothing is rounded again.
        return barriers.round_result(y * np.float32(0.25))

    return _contract_by_kernel(product, *nested, multiply)


def _double_codes(codes: jax.Array) -> jax.Array:
    """Return twice the values of float4 codes, int8."""
    return (lax.stop_gradient(codes).astype(jnp.float32) * np.float32(2)).astype(jnp.int8)


def _has_common_blocks(lhs: QuantizedArray, rhs: QuantizedArray, left: Role, right: Role) -> bool:
    """Return whether an integer contraction can be cut into blocks along which no scale varies."""
    cuts = 0
    for axes in zip(left.contracted, right.contracted, strict=True):
        length = lhs.shape[axes[0]]
        runs = []
        for q, axis in zip((lhs, rhs), axes, strict=True):
            sizes = granularity.Aligned(q.block_size).sizes(q.scale.shape, q.shape)
            assert sizes is not None
            if q.scale.shape[axis] != 1 and sizes[axis] == 1:
                return False
            runs.append(sizes[axis])
        shortest = min(runs)
        if not all(run == length or run % shortest == 0 for run in runs):
            return False
        cuts += shortest < length
    return cuts < 2
