"""ONNX Runtime's QLinearAdd and QLinearMul."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core import recording
from .._core.entry_point import compile_entry_point, read_elements
from .._kernels import accumulator, affine, barriers
from .encodings import Encoding, broadcast_operands, convert_two, infer_two, read_two

# a * b + c rounded once, as the fused instruction of a CPU does, from operations that JAX offers.
#
# XLA may contract a multiplication and a following addition into a fused instruction, or may not; it depends on what it
# fuses. The functions here give the same bits either way, because every product that an addition follows is exact, or
# passes through `barriers.round_result`, which no contraction crosses.


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """Return a * b + c rounded once, for float32 arrays of one shape.

    The algorithm is Boldo and Melquiond's: the exact product and the exact sums of its two parts with c; the two
    smallest terms are added with rounding to odd. The result is right unless a product of parts of a and b leaves
    the range of normal floats, which XLA:CPU flushes to zero.
    """
    product, product_rest = multiply_exactly(a, b)
    low, low_rest = add_exactly(c, product_rest)
    high, high_rest = add_exactly(product, low)
    return high + _add_to_odd(low_rest, high_rest)


def multiply_exactly(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two float32 arrays that add up to a * b: the rounded product and its error (Dekker)."""
    product = barriers.round_result(a * b)
    (a_high, a_low), (b_high, b_low) = split_bits(a), split_bits(b)
    # The products of two halves have 24 bits: none of them is rounded, and neither is any of these sums.
    error = (a_high * b_high - product) + a_high * b_low + a_low * b_high
    return product, error + a_low * b_low


def add_exactly(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two float32 arrays that add up to a + b: the rounded sum and its error (Knuth)."""
    total = barriers.round_result(a + b)
    part = total - a
    return total, (a - (total - part)) + (b - part)


def split_bits(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the first 12 bits of the significand and the rest, two floats of at most 12 bits."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    high = lax.bitcast_convert_type(lax.bitwise_and(bits, np.int32(~0xFFF)), jnp.float32)
    return high, value - high


def _add_to_odd(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a + b rounded to odd: if inexact, the odd neighbor, so that a second rounding sees the rest."""
    total, error = add_exactly(a, b)
    bits = lax.bitcast_convert_type(total, jnp.int32)
    # The bits of floats of one sign, read as integers, sort by magnitude.
    step = jnp.where((error > 0) == (total > 0), np.int32(1), np.int32(-1))
    is_off = (error != 0) & (lax.bitwise_and(bits, np.int32(1)) == 0)
    return lax.bitcast_convert_type(jnp.where(is_off, bits + step, bits), jnp.float32)


# ONNX Runtime's QLinearAdd.


_QLINEAR_ADD = "ops.qlinear_add"
# The positions of the scales among the arguments.
_SCALES = (1, 4, 6)


def qlinear_add(
    a: ArrayLike,
    a_scale: ArrayLike,
    a_zero_point: ArrayLike | None,
    b: ArrayLike,
    b_scale: ArrayLike,
    b_zero_point: ArrayLike | None,
    c_scale: ArrayLike,
    c_zero_point: ArrayLike | None = None,
) -> jax.Array:
    """Add two arrays of codes, as ONNX Runtime's QLinearAdd does.

    c = saturate(round_half_even(fma(a, p, fma(b, q, r)))), where p = a_scale / c_scale, q = b_scale / c_scale and
    r = c_zero_point - fma(p, a_zero_point, q * b_zero_point).

    The integers equal ONNX Runtime's on x86-64 with AVX2: fma(x, y, z) is x * y + z rounded once, every
    other operation is rounded to float32, and the zero point of c is added before rounding. Dequantizing, adding and
    quantizing differs on ties. Where the innermost loop of ONNX Runtime finds a single element of a, because a is
    broadcast along the last dimension longer than 1, or because a and b have one element each, it exchanges a and b,
    and so does this function.

    ONNX Runtime's other kernels, for x86-64 without AVX2 and for ARM, compute other formulas. It converts to int32
    before it saturates, so a sum of more than 2**31 steps becomes the lowest code; here it saturates.

    Args:
        a: codes, int8 or uint8.
        a_scale: value per step of a, float32, a scalar. A Python number becomes float32.
        a_zero_point: the code of 0.0, a scalar in a's dtype. None means 0. An int becomes a scalar in a's dtype.
        b: codes in a's dtype, of a shape that broadcasts against a's.
        b_scale: value per step of b, float32, a scalar. A Python number becomes float32.
        b_zero_point: the code of 0.0, a scalar in a's dtype. None means 0. An int becomes a scalar in a's dtype.
        c_scale: value per step of c, float32, a scalar. A Python number becomes float32.
        c_zero_point: the code of 0.0, a scalar in a's dtype. None means 0. An int becomes a scalar in a's dtype.

    Returns:
        The codes of the sum, in a's dtype.

    Raises:
        TypeError: an argument has a dtype that the operator does not support.
        ValueError: shapes do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> a, b = jnp.array([0, 1, 3, 255], jnp.uint8), jnp.array([0, 0, 0, 255], jnp.uint8)
        >>> jq.ops.qlinear_add(a, 0.5, 0, b, 0.5, 0, 1.0, 1)  # 1, 1.5, 2.5, 256: halves go to even after 1 is added
        Array([  1,   2,   2, 255], dtype=uint8)

    Source: ONNX Runtime's com.microsoft QLinearAdd-1.
    """
    converted = convert_two(_QLINEAR_ADD, a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point)
    return _qlinear_add(*converted, is_aligned=_are_aligned(*(converted[i] for i in _SCALES)))


@compile_entry_point(_QLINEAR_ADD)
@recording.mark("qlinear_add", functools.partial(infer_two, _QLINEAR_ADD))
def _qlinear_add(
    a: jax.Array, a_scale: jax.Array, a_zero_point: jax.Array | None, b: jax.Array, b_scale: jax.Array,
    b_zero_point: jax.Array | None, c_scale: jax.Array, c_zero_point: jax.Array | None, *, is_aligned: bool,
) -> jax.Array:  # fmt: skip
    left, right, result = read_two(
        _QLINEAR_ADD, a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point
    )
    is_exchanged = has_scalar_first(a.shape, b.shape)
    a, b = broadcast_operands(_QLINEAR_ADD, ("a", "b"), (a, b))
    # The first operand to be multiplied is rounded once more than the other, so the order changes codes.
    if is_exchanged:
        a, b, left, right = b, a, right, left
    terms = _compute_terms(left, right, result)
    if is_aligned:
        return affine.encode_steps(_add_aligned(a, b, *terms, _compute_top(*terms[:2])), None, result.dtype)
    return _add_codes(a, b, *terms, result.dtype)


def has_scalar_first(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Return whether ONNX Runtime's loop over a and b finds a single element of a in each of its innermost runs.

    The runs are along the last dimension that both have in which one is longer than 1, or else along the first
    dimension that both have. A scalar counts as one dimension.
    """
    shared = max(min(len(a), len(b)), 1)
    for i in range(1, shared + 1):
        # A symbolic dimension, as in `jax.export`, counts as longer than 1.
        left, right = (i > len(shape) or (isinstance(shape[-i], int) and shape[-i] <= 1) for shape in (a, b))
        if not (left and right):
            return left
    return True


def _compute_terms(left: Encoding, right: Encoding, result: Encoding) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the factor of a, the factor of b, and the constant."""
    p = barriers.round_result(affine.divide(left.scale, result.scale))
    q = barriers.round_result(affine.divide(right.scale, result.scale))
    a_zero, b_zero, c_zero = (encoding.center.astype(jnp.float32) for encoding in (left, right, result))
    # The order of ONNX Runtime's kernel. Another order, or a product rounded before the sum, changes codes at ties.
    offset = multiply_add(p, a_zero, barriers.round_result(q * b_zero))
    return p, q, barriers.round_result(c_zero - offset)


def _add_codes(a: jax.Array, b: jax.Array, p: jax.Array, q: jax.Array, r: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return saturate(round_half_even(fma(a, p, fma(b, q, r)))), by seven float operations if these are exact."""
    top = _compute_top(p, q)
    least = _round_to_power(lax.min(lax.abs(p), lax.abs(q)))
    is_aligned = (least * np.float32(2**15) >= top) & (top <= np.float32(2.0**38))
    # The branch below reads a and b from memory. Without a barrier the fast form would compute them once more, together
    # with everything that they are fused with.
    a, b = lax.optimization_barrier((a, b))
    codes = affine.encode_steps(_add_aligned(a, b, p, q, r, top), None, dtype)

    # The fast form is outside of the condition, because XLA:CPU runs the branches of a condition on one thread.
    def keep(codes: jax.Array, *_: jax.Array) -> jax.Array:
        return codes

    def repeat(_: jax.Array, a: jax.Array, b: jax.Array, p: jax.Array, q: jax.Array, r: jax.Array) -> jax.Array:
        return affine.encode_steps(_add_any(a, b, p, q, r), None, dtype)

    return lax.cond(is_aligned, keep, repeat, codes, a, b, p, q, r)


def _are_aligned(a_scale: jax.Array, b_scale: jax.Array, c_scale: jax.Array) -> bool:
    """Return whether the scales are known, and the fast form is exact with them, with a factor of 2 to spare."""
    known = [read_elements(scale) for scale in (a_scale, b_scale, c_scale)]
    if any(scale is None or scale.size != 1 or scale.dtype != np.float32 for scale in known):
        return False
    a, b, c = (abs(float(np.asarray(scale).reshape(()))) for scale in known)
    return 0 < c < np.inf and min(a, b) / c * 2**13 >= 257 * (1 + (a + b) / c) and a + b < c * 2.0**24


def _compute_top(p: jax.Array, q: jax.Array) -> jax.Array:
    """Return the power of two that `_add_aligned` takes."""
    return _round_to_power(np.float32(257) * (1 + lax.abs(p) + lax.abs(q)))


def _add_any(a: jax.Array, b: jax.Array, p: jax.Array, q: jax.Array, r: jax.Array) -> jax.Array:
    """Return fma(a, p, fma(b, q, r)) for any factors."""
    p, q, r = (jnp.broadcast_to(v, a.shape) for v in (p, q, r))
    return multiply_add(a.astype(jnp.float32), p, multiply_add(b.astype(jnp.float32), q, r))


def _add_aligned(
    a: jax.Array, b: jax.Array, p: jax.Array, q: jax.Array, r: jax.Array, top: jax.Array
) -> jax.Array:  # fmt: skip
    """Return fma(a, p, fma(b, q, r)) if p and q are not smaller than top / 2**15.

    Let top be the power of two with |a * p + b * q + r| < 2 * top for all codes, with a margin of 1/256. Each of p, q
    and r is split into a multiple of the grid top / 2**23 and a rest of at most half the grid. Sums of products of
    codes with the multiples stay below 2**24 grids, so float32 holds them exactly. p, q and r, and everything that
    float32 rounds from them, are multiples of the last bit of p or q, which is top / 2**38 or more. Sums of products of
    codes with the rests stay below 2**9 grids, which are 2**24 of that bit, so float32 holds them exactly, too. What is
    rounded is the sum of both, for b and r and then for all: that is what the two fused operations round.
    """
    grid = top * np.float32(2.0**-23)
    (p_high, p_low), (q_high, q_low), (r_high, r_low) = (_split_at_grid(v, grid) for v in (p, q, r))
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    high, low = r_high + b * q_high, r_low + b * q_low
    inner = high + low
    return (high + a * p_high) + ((inner - high) + a * p_low)


def _split_at_grid(value: jax.Array, grid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the nearest multiple of a power of two, and the rest."""
    high = barriers.round_result(lax.round(value / grid, lax.RoundingMethod.TO_NEAREST_EVEN) * grid)
    return high, barriers.round_result(value - high)


def _round_to_power(value: jax.Array) -> jax.Array:
    """Return the largest power of two that is not larger than a positive normal float."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    return lax.bitcast_convert_type(lax.bitwise_and(bits, np.int32(0x7F800000)), jnp.float32)


# ONNX Runtime's QLinearMul.


_QLINEAR_MUL = "ops.qlinear_mul"


def qlinear_mul(
    a: ArrayLike,
    a_scale: ArrayLike,
    a_zero_point: ArrayLike | None,
    b: ArrayLike,
    b_scale: ArrayLike,
    b_zero_point: ArrayLike | None,
    c_scale: ArrayLike,
    c_zero_point: ArrayLike | None = None,
) -> jax.Array:
    """Multiply two arrays of codes element by element, as ONNX Runtime's QLinearMul does.

    c = saturate(round_half_even((a - a_zero_point) * (b - b_zero_point) * (a_scale * b_scale / c_scale)
    + c_zero_point)).

    The integers equal ONNX Runtime's on x86-64: the scales are multiplied, then divided, in float32; the
    product with them and the sum with the zero point are rounded to float32, one after the other, before the rounding
    to an integer. ONNX Runtime converts to int32 before it saturates, so a product of more than 2**31 steps becomes the
    lowest code; here it saturates.

    Args:
        a: codes, int8 or uint8.
        a_scale: value per step of a, float32, a scalar. A Python number becomes float32.
        a_zero_point: the code of 0.0, a scalar in a's dtype. None means 0. An int becomes a scalar in a's dtype.
        b: codes in a's dtype, of a shape that broadcasts against a's.
        b_scale: value per step of b, float32, a scalar. A Python number becomes float32.
        b_zero_point: the code of 0.0, a scalar in a's dtype. None means 0. An int becomes a scalar in a's dtype.
        c_scale: value per step of c, float32, a scalar. A Python number becomes float32.
        c_zero_point: the code of 0.0, a scalar in a's dtype. None means 0. An int becomes a scalar in a's dtype.

    Returns:
        The codes of the product, in a's dtype.

    Raises:
        TypeError: an argument has a dtype that the operator does not support.
        ValueError: shapes do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> a, b = jnp.array([0, 1, 3, 255], jnp.uint8), jnp.array([1, 1, 1, 255], jnp.uint8)
        >>> jq.ops.qlinear_mul(a, 0.5, 0, b, 1.0, 0, 1.0, 1)  # 1, 1.5, 2.5, 32513.5: halves go to even after 1 is added
        Array([  1,   2,   2, 255], dtype=uint8)

    Source: ONNX Runtime's com.microsoft QLinearMul-1.
    """
    return _qlinear_mul(
        *convert_two(_QLINEAR_MUL, a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point)
    )


@compile_entry_point(_QLINEAR_MUL)
@recording.mark("qlinear_mul", functools.partial(infer_two, _QLINEAR_MUL))
def _qlinear_mul(
    a: jax.Array, a_scale: jax.Array, a_zero_point: jax.Array | None, b: jax.Array, b_scale: jax.Array,
    b_zero_point: jax.Array | None, c_scale: jax.Array, c_zero_point: jax.Array | None,
) -> jax.Array:  # fmt: skip
    left, right, result = read_two(
        _QLINEAR_MUL, a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point
    )
    a, b = broadcast_operands(_QLINEAR_MUL, ("a", "b"), (a, b))
    # The product of two differences of codes has 16 bits, which float32 holds exactly.
    steps = (a.astype(jnp.int32) - left.center) * (b.astype(jnp.int32) - right.center)
    scale = accumulator.compute_multiplier(left.scale, right.scale, result.scale)
    scaled = barriers.round_result(steps.astype(jnp.float32) * scale)
    value = barriers.round_result(scaled + result.center.astype(jnp.float32))
    return affine.encode_steps(value, None, result.dtype)
