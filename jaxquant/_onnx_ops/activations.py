"""ONNX Runtime's QLinearSigmoid, QLinearLeakyRelu and QLinearSoftmax."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core import checks, recording, sharding
from .._core.entry_point import compile_entry_point
from .._kernels import affine, barriers
from .arithmetic import add_exactly, multiply_add, multiply_exactly, split_bits
from .encodings import (
    Encoding,
    check_eight_bits,
    convert_numbers,
    encode_values,
    infer_one,
    list_values,
    look_up,
    look_up_stored,
    read_encoding,
)

# ONNX Runtime's QLinearSigmoid.


_QLINEAR_SIGMOID = "ops.qlinear_sigmoid"


def qlinear_sigmoid(
    x: ArrayLike,
    x_scale: ArrayLike,
    x_zero_point: ArrayLike | None,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike | None = None,
) -> jax.Array:
    """Apply the logistic function to codes, as ONNX Runtime's QLinearSigmoid does.

    y = saturate(round_half_even(logistic((x - x_zero_point) * x_scale) / y_scale) + y_zero_point).

    The integers equal ONNX Runtime's on x86-64 with FMA: logistic is the quotient of two polynomials
    that it evaluates with fused operations, on values clipped to [-18, 18], and not the exact function.

    Args:
        x: codes, int8 or uint8, of any shape.
        x_scale: value per step of x, float32, a scalar. A Python number becomes float32.
        x_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.
        y_scale: value per step of y, float32, a scalar. A Python number becomes float32.
        y_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.

    Returns:
        The codes, of x's shape and dtype.

    Raises:
        TypeError: an argument has a dtype that the operator does not support.
        ValueError: a scale or a zero point is not a scalar.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> jq.ops.qlinear_sigmoid(jnp.array([-128, -10, 0, 10, 127], jnp.int8), 0.125, 0, 1 / 256, -128)
        Array([-128,  -71,    0,   71,  127], dtype=int8)

    Source: ONNX Runtime's com.microsoft QLinearSigmoid-1.
    """
    x_scale, x_zero_point, y_scale, y_zero_point = convert_numbers(
        _QLINEAR_SIGMOID, x, x_scale=x_scale, x_zero_point=x_zero_point, y_scale=y_scale, y_zero_point=y_zero_point
    )
    return _qlinear_sigmoid(x, x_scale, x_zero_point, y_scale, y_zero_point)


@compile_entry_point(_QLINEAR_SIGMOID)
@recording.mark("qlinear_sigmoid", functools.partial(infer_one, _QLINEAR_SIGMOID))
def _qlinear_sigmoid(
    x: jax.Array, x_scale: jax.Array, x_zero_point: jax.Array | None, y_scale: jax.Array,
    y_zero_point: jax.Array | None,
) -> jax.Array:  # fmt: skip
    dtype = check_eight_bits(_QLINEAR_SIGMOID, "x", x)
    x_encoding = read_encoding(_QLINEAR_SIGMOID, "x", x_scale, x_zero_point, dtype)
    y_encoding = read_encoding(_QLINEAR_SIGMOID, "y", y_scale, y_zero_point, dtype)
    return look_up_stored(encode_values(_compute_logistic(list_values(x_encoding)), y_encoding), x)


# The coefficients of x**11 ... x**1 in the dividend and of x**10 ... x**0 in the divisor.
# From MLAS, logistic.cpp. The leading 0 lets one loop evaluate both polynomials.
_COEFFICIENTS = np.array(
    [
        [0.0, 6.10247389755681e-13],
        [4.37031012579801e-11, 5.76102136993427e-09],
        [1.15627324459942e-07, 6.29106785017040e-06],
        [6.08574864600143e-05, 1.70198817374094e-03],
        [8.51377133304701e-03, 1.16817656904453e-01],
        [2.48287947061529e-01, 9.93151921023180e-01],
    ],
    np.float32,
)
# MLAS clips x to this range (logistic.cpp).
_RANGE = np.float32(18)


def _compute_logistic(x: jax.Array) -> jax.Array:
    """Return ONNX Runtime's approximation of 1 / (1 + exp(-x)) in float32."""
    x = jnp.clip(x, -_RANGE, _RANGE)
    square = jnp.broadcast_to(barriers.round_result(x * x), (2, *x.shape))

    def add_coefficient(value: jax.Array, coefficient: jax.Array) -> tuple[jax.Array, None]:
        return multiply_add(value, square, jnp.broadcast_to(coefficient[:, None], value.shape)), None

    # A loop, because XLA takes seconds to compile all the steps of the fused operations in one piece.
    polynomials, _ = lax.scan(add_coefficient, jnp.zeros_like(square), jnp.asarray(_COEFFICIENTS))
    quotient = affine.divide(barriers.round_result(x * polynomials[0]), polynomials[1])
    return jnp.maximum(quotient + np.float32(0.5), np.float32(0))


# ONNX Runtime's QLinearLeakyRelu.


_QLINEAR_LEAKY_RELU = "ops.qlinear_leaky_relu"


def qlinear_leaky_relu(
    x: ArrayLike,
    x_scale: ArrayLike,
    x_zero_point: ArrayLike | None,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike | None = None,
    *,
    alpha: float = 0.01,
) -> jax.Array:
    """Apply a leaky ReLU to codes, as ONNX Runtime's QLinearLeakyRelu does.

    y = saturate(round_half_even(f((x - x_zero_point) * x_scale) / y_scale) + y_zero_point),
    where f(v) = v if v >= 0, else alpha * v.

    Each product and the quotient are rounded to float32, one after the other.

    Args:
        x: codes, int8 or uint8, of any shape.
        x_scale: value per step of x, float32, a scalar. A Python number becomes float32.
        x_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.
        y_scale: value per step of y, float32, a scalar. A Python number becomes float32.
        y_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.
        alpha: Static. The slope below 0, rounded to float32.

    Returns:
        The codes, of x's shape and dtype.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: a scale or a zero point is not a scalar, or alpha is not finite.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> jq.ops.qlinear_leaky_relu(jnp.array([-128, -6, -2, 1, 127], jnp.int8), 0.5, 0, 0.25, 3, alpha=0.25)
        Array([-61,   0,   2,   5, 127], dtype=int8)

    Source: ONNX Runtime's com.microsoft QLinearLeakyRelu-1.
    """
    x_scale, x_zero_point, y_scale, y_zero_point = convert_numbers(
        _QLINEAR_LEAKY_RELU, x, x_scale=x_scale, x_zero_point=x_zero_point, y_scale=y_scale, y_zero_point=y_zero_point
    )
    checks.check_real(_QLINEAR_LEAKY_RELU, "alpha", alpha)
    return _qlinear_leaky_relu(x, x_scale, x_zero_point, y_scale, y_zero_point, alpha=float(alpha))


@compile_entry_point(_QLINEAR_LEAKY_RELU)
@recording.mark("qlinear_leaky_relu", functools.partial(infer_one, _QLINEAR_LEAKY_RELU))
def _qlinear_leaky_relu(
    x: jax.Array, x_scale: jax.Array, x_zero_point: jax.Array | None, y_scale: jax.Array,
    y_zero_point: jax.Array | None, *, alpha: float,
) -> jax.Array:  # fmt: skip
    dtype = check_eight_bits(_QLINEAR_LEAKY_RELU, "x", x)
    x_encoding = read_encoding(_QLINEAR_LEAKY_RELU, "x", x_scale, x_zero_point, dtype)
    y_encoding = read_encoding(_QLINEAR_LEAKY_RELU, "y", y_scale, y_zero_point, dtype)

    def leak(values: jax.Array) -> jax.Array:
        return jnp.where(values >= 0, values, barriers.round_result(values * np.float32(alpha)))

    # As in ONNX Runtime, a table: the formula runs once for each code, not for each element.
    return look_up(encode_values(leak(list_values(x_encoding)), y_encoding), x)


# ONNX Runtime's QLinearSoftmax.


_QLINEAR_SOFTMAX = "ops.qlinear_softmax"
_OPSET_WITH_ONE_AXIS = 13
# How many codes a word has, how many words of a row one step of the loop adds, and how many rows a tile has.
_BYTES, _WORDS, _TILE = 4, 4, 16
_CODES = 256
# From this length on, a row has a table of its own.
_LONG = 512
# Times this, a difference that is not 0 is more than 1 / 4: the divisors are more than 2**-40, and have 24 bits.
_HUGE = 2.0**100


def qlinear_softmax(
    x: ArrayLike,
    x_scale: ArrayLike,
    x_zero_point: ArrayLike | None,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike | None = None,
    *,
    axis: int = -1,
    opset: int = 13,
) -> jax.Array:
    """Apply a softmax to codes, as ONNX Runtime's QLinearSoftmax does.

    y = saturate(round_half_even(e[x] * floor(1 / y_scale) / sum(e[x])) + y_zero_point),
    where e[x] = exp((x - max(x)) * x_scale) * u, and u is about the largest float32 divided by 148 and by the number of
    elements of the sum.

    The integers equal ONNX Runtime 1.32's. Its factor is the integer below 1 / y_scale, so that results are too
    small where 1 / y_scale is small and not an integer: by a third for y_scale = 2 / 3. e is a table of float32, and
    the sum adds its elements one by one, each time rounded to float32; the quotient is rounded once, to an integer.
    ONNX Runtime 1.31 rounded e * floor(1 / y_scale) to float32 before the division, which decides other ties, and
    where that product overflowed, with fewer than floor(1 / y_scale) / 148 elements, its codes wrapped around. ONNX
    Runtime evaluates exp in float64, and this function in pairs of float32, with an error of some 2**-43: in about one
    table of 4000, one of the 256 entries differs by its last bit, which changes a code only next to a tie.

    Args:
        x: codes, int8 or uint8, of rank 1 or more.
        x_scale: value per step of x, float32, a scalar. A Python number becomes float32. With a negative one, which
            ONNX Runtime 1.32 refuses, the smallest code has the largest value.
        x_zero_point: the code of 0.0, a scalar in x's dtype; it has no influence. None means 0. An int becomes a scalar
            in x's dtype.
        y_scale: value per step of y, float32, a scalar. A Python number becomes float32.
        y_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.
        axis: Static. The dimension along which the sum is 1; a negative one counts from the back.
        opset: Static. The ONNX opset of the softmax. Below 13, the sum is over all dimensions from `axis` on.

    Returns:
        The codes, of x's shape and dtype.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: a scale or a zero point is not a scalar, or `axis` is out of range.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([[-128, 0, 0, 7], [-128, -128, -128, 127]], jnp.int8)
        >>> jq.ops.qlinear_softmax(x, 0.1, 0, 1 / 256, -128)
        Array([[-128,  -64,  -64,    0],
               [-128, -128, -128,  127]], dtype=int8)
        >>> jq.ops.qlinear_softmax(jnp.array([7, 7], jnp.uint8), 0.1, 0, 1 / 300)
        Array([150, 150], dtype=uint8)

    Source: ONNX Runtime's com.microsoft QLinearSoftmax-1, version 1.32.
    """
    x_scale, x_zero_point, y_scale, y_zero_point = convert_numbers(
        _QLINEAR_SOFTMAX, x, x_scale=x_scale, x_zero_point=x_zero_point, y_scale=y_scale, y_zero_point=y_zero_point
    )
    checks.check_integer(_QLINEAR_SOFTMAX, "axis", axis)
    checks.check_integer(_QLINEAR_SOFTMAX, "opset", opset)
    return _qlinear_softmax(
        x, x_scale, x_zero_point, y_scale, y_zero_point, axis=int(axis), flat=opset < _OPSET_WITH_ONE_AXIS
    )


@compile_entry_point(_QLINEAR_SOFTMAX)
@recording.mark("qlinear_softmax", functools.partial(infer_one, _QLINEAR_SOFTMAX))
def _qlinear_softmax(
    x: jax.Array, x_scale: jax.Array, x_zero_point: jax.Array | None, y_scale: jax.Array,
    y_zero_point: jax.Array | None, *, axis: int, flat: bool,
) -> jax.Array:  # fmt: skip
    dtype = check_eight_bits(_QLINEAR_SOFTMAX, "x", x)
    x_encoding = read_encoding(_QLINEAR_SOFTMAX, "x", x_scale, x_zero_point, dtype)
    y_encoding = read_encoding(_QLINEAR_SOFTMAX, "y", y_scale, y_zero_point, dtype)
    axis = checks.check_axis(_QLINEAR_SOFTMAX, axis, x.ndim)
    # No row has a maximum.
    if x.size == 0:
        return x
    if flat:
        return _normalize_rows(x.reshape(math.prod(x.shape[:axis]), -1), x_encoding, y_encoding).reshape(x.shape)
    rows = jnp.moveaxis(x, axis, -1)
    y = _normalize_rows(rows.reshape(-1, x.shape[axis]), x_encoding, y_encoding)
    return jnp.moveaxis(y.reshape(rows.shape), -1, axis)


def _normalize_rows(x: jax.Array, x_encoding: Encoding, y_encoding: Encoding) -> jax.Array:
    """Return the codes of the softmax along the second of two dimensions."""
    # The barriers keep XLA:CPU from computing an exponential for each element instead of each entry of a table.
    table = lax.optimization_barrier(list_exponentials(jnp.abs(x_encoding.scale), x.shape[1]))
    # ONNX Runtime rounds the reciprocal of y_scale down to an integer, and multiplies before it divides by the sum.
    factor = jnp.floor(affine.divide(jnp.ones((), jnp.float32), y_encoding.scale))
    significand, unit = _split_factor(factor)
    products = lax.optimization_barrier(multiply_exactly(table, jnp.broadcast_to(significand, table.shape)))
    # int8 codes sort as their bits do with the first one flipped, read as uint8. A negative scale reverses
    # the order of the values.
    codes = x if x.dtype == jnp.uint8 else lax.bitcast_convert_type(x, jnp.uint8) ^ np.uint8(128)
    codes = codes ^ jnp.where(x_encoding.scale < 0, np.uint8(255), np.uint8(0))
    shift = np.uint8(255) - codes.max(1, keepdims=True)
    entries = codes + shift
    # Tiles of a symbolic number of rows, or of an array with its sharding in its type, may not be possible.
    is_plain = isinstance(x.shape[0], int) and not sharding.is_placed(x)
    total = _add_entries(table, codes, shift) if is_plain else _add_rows(table, entries.T)
    divisors = total * unit
    if is_plain and x.shape[1] >= _LONG:
        return _look_up_rows(products, divisors, entries, y_encoding)
    high, low = (look_up(product, entries) for product in products)
    return _encode_quotients(high, low, divisors, y_encoding)


def _look_up_rows(
    products: tuple[jax.Array, jax.Array], divisors: jax.Array, entries: jax.Array, encoding: Encoding
) -> jax.Array:  # fmt: skip
    """Return the codes of long rows from a table of 256 codes for each row, which takes fewer quotients."""
    rows = entries.shape[0]
    high, low = (jnp.broadcast_to(product[None], (rows, _CODES)) for product in products)
    # XLA:CPU reads a table of int32 by vector instructions, and one of bytes not.
    table = _encode_quotients(high, low, divisors, encoding).astype(jnp.int32)
    starts = jnp.arange(rows, dtype=jnp.int32)[:, None] * np.int32(_CODES)
    indices = starts + entries.astype(jnp.int32)
    table = lax.optimization_barrier(table).reshape(-1)
    return table.at[indices].get(mode="promise_in_bounds").astype(encoding.dtype)


def _split_factor(factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a factor as two scalars, f and u, with factor = f / u, |f| < 2 and u a power of two.

    Products with f, and sums times u, do not overflow.
    """
    # A factor of 2**126 gives codes beyond all bounds, and so does a larger one.
    factor = jnp.clip(factor, np.float32(-(2.0**126)), np.float32(2.0**126))
    bits = lax.bitcast_convert_type(factor, jnp.int32)
    one, mask = np.int32(127 << 23), np.int32(255 << 23)
    exponent = jnp.where(factor == 0, one, lax.bitwise_and(bits, mask))
    unit = lax.bitcast_convert_type(2 * one - exponent, jnp.float32)
    return factor * unit, unit


def _encode_quotients(high: jax.Array, low: jax.Array, divisors: jax.Array, encoding: Encoding) -> jax.Array:
    """Return the codes of (high + low) / divisors[:, None], rounded to integers at once, halves to even.

    Args:
        high: float32 [rows, length].
        low: float32 [rows, length], at most half an ulp of high.
        divisors: float32 [rows], positive.
        encoding: the scale and the zero point of the codes.
    """

    def repeat(x: jax.Array) -> jax.Array:
        return sharding.place_like(jnp.broadcast_to(x[:, None], high.shape), high)

    upper, lower = map(repeat, split_bits(divisors))
    # The half, n + 1 / 2, next to the quotient, for which an approximate one will do.
    half = lax.floor(high * repeat(np.float32(1) / divisors)) + np.float32(0.5)
    # Its sign tells on which side of the half the quotient is. Products of a half below 2**11 with 12 bits are exact,
    # and so are differences of nearly equal numbers; where they are not, the sign is clear. A larger half saturates.
    rest = (high - half * upper) - half * lower + low
    side = lax.max(lax.min(rest * np.float32(_HUGE), np.float32(0.25)), np.float32(-0.25))
    zero_point = sharding.place_like(jnp.broadcast_to(encoding.center, high.shape), high)
    return affine.encode_steps(half + side, zero_point, encoding.dtype)


def _add_entries(table: jax.Array, codes: jax.Array, shift: jax.Array) -> jax.Array:
    """Return the sum of table[codes + shift] along the second dimension, one by one.

    A vector of sums needs the codes of several rows in the same column, and a transpose of bytes takes longer than the
    rest of the operator. The codes are therefore transposed as words of four, within tiles of some rows that stay
    in the cache.

    Args:
        table: float32 [256].
        codes: uint8 [rows, length].
        shift: uint8 [rows, 1]; codes + shift is at most 255.
    """
    rows, length = codes.shape
    words, count = length // _BYTES, -(-rows // _TILE)

    def cut_tiles(part: jax.Array) -> jax.Array:
        """Return uint32 rows as [tiles, rows of a tile, columns], with more rows if they fill no tile."""
        padded = lax.pad(part, np.uint32(0), ((0, count * _TILE - rows, 0), (0, 0, 0)))
        return padded.reshape(count, _TILE, part.shape[1])

    packed = lax.bitcast_convert_type(codes[:, : words * _BYTES].reshape(rows, words, _BYTES), jnp.uint32)
    tiles = barriers.pin_layout(cut_tiles(packed).transpose(0, 2, 1))
    # No byte of a sum exceeds 255, so one addition shifts the four codes of a word.
    shifts = lax.optimization_barrier(cut_tiles(shift.astype(jnp.uint32) * np.uint32(0x01010101))[:, :, 0])

    def add_step(step: jax.Array, total: jax.Array, *, size: int) -> jax.Array:
        part = lax.dynamic_slice_in_dim(tiles, step * size, size, 1)
        for i in range(size):
            word = part[:, i] + shifts
            for byte in range(_BYTES):
                index = lax.shift_right_logical(word, np.uint32(8 * byte)) & np.uint32(255)
                total = total + look_up(table, index.astype(jnp.uint8))
        return total

    # XLA would reduce in another order than these loops.
    total = sharding.vary_like(jnp.zeros(shifts.shape, jnp.float32), shifts)
    for size, start, stop in ((_WORDS, 0, words // _WORDS), (1, words - words % _WORDS, words)):
        if stop > start:
            total = lax.fori_loop(start, stop, functools.partial(add_step, size=size), total)
    total = total.reshape(-1)[:rows]
    for i in range(words * _BYTES, length):
        total = total + look_up(table, codes[:, i] + shift[:, 0])
    return total


def _add_rows(table: jax.Array, entries: jax.Array) -> jax.Array:
    """Return the sum of table[entries] along the first dimension, one by one."""

    def add_row(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        return total + look_up(table, row), None

    return lax.scan(add_row, look_up(table, entries[0]), entries[1:], unroll=_BYTES * _WORDS)[0]


# The table of exponentials of QLinearSoftmax, in pairs of float32, because JAX has no float64 by default.
#
# Every product before an addition passes through `round_result`, so that the bits do not depend on what XLA contracts.


_LARGEST = np.finfo(np.float32).max
# exp(5) = 148 keeps the sum of the exponentials below the largest float32.
_RESERVE = 5
# exp(v) = 2**k * exp(j / 32) * exp(rest) with |rest| <= 1 / 64, and |j| <= 12 because |v - k * log(2)| is at most 0.35.
_PARTS = 32
_MOST_PARTS = 12
_LEAST_EXPONENT = np.float32(-126 * math.log(2))  # of the smallest normal float32


def list_exponentials(scale: jax.Array, length: int) -> jax.Array:
    """Return exp((i - 255) * scale + shift) for i = 0 ... 255, float32.

    shift is as large as a float32 sum of `length` of them allows: log(largest float32 / length) - 5, or 0 if that is
    negative. The logarithm is a float32, as in ONNX Runtime.
    """
    logarithm = np.float32(math.log(np.float32(_LARGEST / np.float32(length))))
    shift = max(0.0, float(logarithm) - _RESERVE)
    steps = jnp.arange(-255, 1, dtype=jnp.float32)
    return _raise_e(*multiply_exactly(steps, jnp.broadcast_to(scale, steps.shape)), shift)


def _raise_e(high: jax.Array, low: jax.Array, shift: float) -> jax.Array:
    """Return exp(high + low + shift), 0 where that is below the normal floats, with an error of some 2**-43."""
    estimate = high + np.float32(shift)
    twos = lax.round(estimate * np.float32(1 / math.log(2)), lax.RoundingMethod.TO_NEAREST_EVEN)
    twos = jnp.clip(twos, np.float32(-126), np.float32(127))
    rest = estimate - barriers.round_result(twos * np.float32(math.log(2)))
    rest = lax.round(rest * _PARTS, lax.RoundingMethod.TO_NEAREST_EVEN)
    parts = jnp.clip(rest, np.float32(-_MOST_PARTS), np.float32(_MOST_PARTS))
    # What is left of the exponent: its two parts, shift, -twos * log(2) and -parts / 32, none of them rounded off.
    high, low = _add_pairs((high, low), _split_float64(np.full((), shift)))
    for factor, count in ((-math.log(2), twos), (-1 / _PARTS, parts)):
        product = _multiply_by_constant(count, factor)
        high, low = _add_pairs((high, low), product)
    value = _scale_pair(_add_exponential(high, low), parts)
    exponent = lax.bitcast_convert_type((twos.astype(jnp.int32) + 127) << 23, jnp.float32)
    return jnp.where(estimate < _LEAST_EXPONENT, np.float32(0), value * exponent)


def _add_exponential(high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return exp(high + low) for at most 1 / 64 as a pair of float32: 1 + r + r**2 / 2 exactly, the rest in float32."""
    square, square_rest = multiply_exactly(high, high)
    tail = jnp.full_like(high, np.float32(1 / 720))
    for divisor in (120, 24, 6):
        tail = np.float32(1 / divisor) + barriers.round_result(high * tail)
    # The last bits of r**2 / 2 and of r, and r**3 / 6 + ...
    small = barriers.round_result(high * low) + barriers.round_result(high * square * tail)
    small = np.float32(0.5) * square_rest + low + small  # halves are exact
    total = add_exactly(high, np.float32(0.5) * square)
    total = _add_pairs(total, (small, jnp.zeros_like(small)))
    return _add_pairs((jnp.ones_like(high), jnp.zeros_like(high)), total)


def _scale_pair(pair: tuple[jax.Array, jax.Array], parts: jax.Array) -> jax.Array:
    """Return a pair times exp(parts / 32), rounded to float32."""
    powers = np.exp(np.arange(-_MOST_PARTS, _MOST_PARTS + 1) / _PARTS)
    entries = parts.astype(jnp.int32) + np.int32(_MOST_PARTS)
    power_high, power_low = (table.at[entries].get(mode="promise_in_bounds") for table in _split_float64(powers))
    product, rest = multiply_exactly(pair[0], power_high)
    rest = barriers.round_result(pair[0] * power_low) + barriers.round_result(pair[1] * power_high) + rest
    return barriers.round_result(product + rest)


def _multiply_by_constant(count: jax.Array, factor: float) -> tuple[jax.Array, jax.Array]:
    """Return a small integer times a float64 number as a pair of float32."""
    high, low = (jnp.broadcast_to(part, count.shape) for part in _split_float64(np.full((), factor)))
    product, rest = multiply_exactly(count, high)
    return add_exactly(product, barriers.round_result(count * low) + rest)


def _add_pairs(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the sum of two pairs of float32 as a pair."""
    total, rest = add_exactly(*jnp.broadcast_arrays(a[0], b[0]))
    low, low_rest = add_exactly(*jnp.broadcast_arrays(a[1], b[1]))
    total, rest = add_exactly(total, barriers.round_result(rest + low))
    return add_exactly(total, barriers.round_result(rest + low_rest))


def _split_float64(value: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return the first 24 bits of float64 numbers and the next 24 as float32 arrays."""
    high = value.astype(np.float32)
    return jnp.asarray(high), jnp.asarray((value - high).astype(np.float32))
