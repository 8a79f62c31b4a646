"""Float operators in the order and with the approximations of ONNX Runtime's kernels for x86-64 with AVX-512.

Two libraries that add in another order differ in the last bits, and a code at a tie then differs by a step. The order
is the same on every machine. ONNX Runtime's own depends on the processor in one of them: with AVX2 and without AVX-512,
its Softmax has 8 partial sums in place of 16.

XLA contracts each product and the sum after it, as these kernels do, if the processor has such an instruction. Where it
does not, as on other processors or along fewer than 16 elements, a result may differ in the last bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._core import recording
from ..._kernels import affine
from ..._kernels.barriers import round_result

# An addition in Eigen has 4 lanes, and a loop adds two of them in turn. The kernel of Softmax for AVX-512 has 16.
_PACKET, _LANES = 4, 16
# Up to this number of rows a program adds them without a loop.
_MOST_UNROLLED = 8
# exp(r) for |r| <= log(2) / 2, the highest power first, and the parts of log(2) (MLAS, compute.cpp).
_EXP = tuple(map(float.fromhex, ("0x1.694p-10", "0x1.125edcp-7", "0x1.555b5ap-5", "0x1.55545p-3", "0x1.fffff6p-2")))
_LOG2_HIGH, _LOG2_LOW = -6.93145752e-1, -1.42860677e-6
_LEAST_EXPONENT = -88.3762626647949
# A sum with 1.5 * 2**23 rounds to an integer, which its last bits are.
_ROUND = 12582912.0
# 2 / pi, the parts of -pi / 2, and polynomials in the square of an angle up to pi / 4 (Eigen, psincos_float). Its other
# reduction of angles above the last number is not repeated here.
_HALF_TURNS = (0.636619746685028076171875, -1.5703125, -4.839897155762e-4, 1.62865035235881805e-7, 5.56443155445e-11)
_COSINE = (2.43722661252832e-05, -1.38865201734006e-03, 4.16666194796562e-02, -0.5, 1.0)
_SINE = (-1.959234114083703e-04, 8.332687365561685e-03, -1.666666203982298e-01)
_LARGE_ANGLE = 18838.0
# Odd numerators and even denominators in the square of x (MLAS, tanh.cpp and logistic.cpp).
_TANH = (
    (
        *(-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08),
        *(1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03),
    ),
    (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03),
)
_LOGISTIC = (
    (4.37031012579801e-11, 1.15627324459942e-07, 6.08574864600143e-05, 8.51377133304701e-03, 2.48287947061529e-01),
    (
        *(6.10247389755681e-13, 5.76102136993427e-09, 6.29106785017040e-06, 1.70198817374094e-03),
        *(1.16817656904453e-01, 9.93151921023180e-01),
    ),
)


def _keep_shape(x: Any, **_: Any) -> tuple[tuple[Any, ...], np.dtype]:
    return x.shape, x.dtype


def _drop_last(x: Any, **_: Any) -> tuple[tuple[Any, ...], np.dtype]:
    return x.shape[:-1], x.dtype


def is_summed_in_lanes(n: int) -> bool:
    """Return whether ONNX Runtime's order is known for sums of n consecutive elements: rows that are aligned."""
    return n >= _PACKET and n % _PACKET == 0


def _map_sum(_: Any, x: Any) -> Any:
    return sum_last(x)  # the mapped dimension comes first


@recording.mark("sum_last", _drop_last, _map_sum)
def sum_last(x: jax.Array) -> jax.Array:
    """Return the sums along the last dimension in the order of ONNX Runtime's ReduceSum, which is Eigen's."""
    return _sum(x)


def _add_rows(x: jax.Array, lanes: int) -> jax.Array:
    """Return for each of the lanes the sum of every `lanes`-th element of a row, one after the other."""
    *rest, n = x.shape
    rows = x.reshape(*rest, n // lanes, lanes)
    # XLA cuts a reduction into parts, which changes the order, but it keeps the order of separate sums and of a loop.
    if n // lanes <= _MOST_UNROLLED:
        return functools.reduce(jnp.add, [rows[..., i, :] for i in range(n // lanes)])
    start = jnp.zeros_like(rows[..., 0, :])
    return lax.fori_loop(0, n // lanes, lambda i, total: total + rows[..., i, :], start)


@jax.custom_jvp
@jax.jit
def _sum(x: jax.Array) -> jax.Array:
    n = x.shape[-1]
    pairs = n // (2 * _PACKET)
    total = jnp.zeros((*x.shape[:-1], _PACKET), x.dtype)
    if pairs:
        lanes = _add_rows(x[..., : 2 * pairs * _PACKET], 2 * _PACKET)
        total = lanes[..., :_PACKET] + lanes[..., _PACKET:]
    if n % (2 * _PACKET):
        last = x[..., -_PACKET:]
        total = total + last if pairs else last
    # Eigen adds the halves of a packet first, then what is left.
    return (total[..., 0] + total[..., 2]) + (total[..., 1] + total[..., 3])


@_sum.defjvp
def _sum_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _sum(*primals), jnp.sum(tangents[0], axis=-1)


@jax.custom_jvp
@jax.jit
def divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return a quotient of float32 arrays of the same shape: XLA would replace some by products with reciprocals."""
    return affine.divide(x, y)


@divide.defjvp
def _divide_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    quotient = divide(*primals)
    return quotient, (tangents[0] - quotient * tangents[1]) / primals[1]


def _evaluate(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
    """Return a polynomial by Horner's rule."""
    total = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + np.float32(coefficient)
    return total


def _exponentiate(x: jax.Array) -> jax.Array:
    """Return exp(x) for x <= 0 as the kernel of Softmax approximates it."""
    integer, rest = _reduce_exponent(jnp.maximum(x, np.float32(_LEAST_EXPONENT)))
    power = (integer << 23) + np.int32(0x3F800000)
    return _evaluate((*_EXP, 1.0, 1.0), rest) * lax.bitcast_convert_type(power, jnp.float32)


def _reduce_exponent(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return an integer n and r with x = n * log(2) + r."""
    biased = x * np.float32(np.log2(np.e)) + np.float32(_ROUND)
    # XLA would drop an addition of a float and its subtraction.
    integer = lax.bitcast_convert_type(biased, jnp.int32) - np.float32(_ROUND).view(np.int32)
    count = integer.astype(jnp.float32)
    return integer, count * np.float32(_LOG2_LOW) + (count * np.float32(_LOG2_HIGH) + x)


def _map_softmax(_: Any, x: Any) -> Any:
    return softmax_last(x)


@recording.mark("softmax", _keep_shape, _map_softmax)
def softmax_last(x: jax.Array) -> jax.Array:
    """Return the softmax of float32 along the last dimension, of a known length, as ONNX Runtime computes it."""
    return _softmax(x)


@jax.custom_jvp
@jax.jit
def _softmax(x: jax.Array) -> jax.Array:
    *rest, n = x.shape
    exponentials = _exponentiate(x - jnp.max(x, axis=-1, keepdims=True))
    # Lanes without an element add 0, which does not round.
    padding = [*((0, 0) for _ in rest), (0, -n % _LANES)]
    total = _add_rows(jnp.pad(exponentials, padding), _LANES)
    total = total[..., : _LANES // 2] + total[..., _LANES // 2 :]
    # The last 8 lanes are added in pairs of neighbors, as AVX's horizontal addition does.
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    # The kernel multiplies by the reciprocal of the sum.
    return exponentials * (np.float32(1) / total)


@_softmax.defjvp
def _softmax_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    y, tangent = _softmax(*primals), tangents[0]
    return y, y * (tangent - jnp.sum(y * tangent, axis=-1, keepdims=True))


def _divide_polynomials(x: jax.Array, limit: float, parts: tuple[tuple[float, ...], tuple[float, ...]]) -> jax.Array:
    x = jnp.clip(x, np.float32(-limit), np.float32(limit))
    square = x * x
    return _evaluate(parts[0], square) * x / _evaluate(parts[1], square)


def _approximate(
    name: str, formula: Callable[[jax.Array], jax.Array], differentiate: Callable[[jax.Array, jax.Array], jax.Array]
) -> Callable[[jax.Array], jax.Array]:
    """Return a function of float32 with a mark of this name; `differentiate` maps x and the result to the slope."""
    # The polynomials would give the derivative of the approximation, and 0 where it clips.
    function = jax.custom_jvp(jax.jit(formula))

    @function.defjvp
    def differentiate_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        y = function(*primals)
        return y, tangents[0] * differentiate(primals[0], y)

    @recording.mark(name, _keep_shape, recording.map_elements)
    def approximate(x: jax.Array) -> jax.Array:
        return function(x)

    return approximate


def _divide_tanh(x: jax.Array) -> jax.Array:
    return _divide_polynomials(x, 9, _TANH)


def _divide_logistic(x: jax.Array) -> jax.Array:
    y = _divide_polynomials(x, 18, _LOGISTIC) + np.float32(0.5)
    return jnp.clip(y, np.float32(0), np.float32(1))


def _exponentiate_all(x: jax.Array) -> jax.Array:
    """Return exp(x) as ONNX Runtime's Exp approximates it, in two steps where the result leaves the normal floats."""
    x = jnp.clip(x, np.float32(-103.9720840454), np.float32(88.7762626647950))
    power, rest = _reduce_exponent(x)
    shift = power << 23
    normal = jnp.clip(shift, np.int32(-0x3F000000), np.int32(0x3F800000))
    left, right = (
        lax.bitcast_convert_type(part + np.int32(0x3F800000), jnp.float32) for part in (shift - normal, normal)
    )
    return (_evaluate((*_EXP, 1.0), rest) * (rest * left) + left) * right


def _turn(x: jax.Array, is_sine: bool) -> jax.Array:
    """Return a sine or cosine as Eigen approximates it without fused operations; JAX's own for large angles.

    Eigen computes packets of 4, and what is left of an array by another formula.
    """
    own = jnp.sin(x) if is_sine else jnp.cos(x)
    if math.prod(x.shape) % _PACKET:
        return own
    least = jnp.abs(x)
    biased = round_result(least * np.float32(_HALF_TURNS[0])) + np.float32(_ROUND)
    quarter = lax.bitcast_convert_type(biased, jnp.int32)
    count = (quarter - np.float32(_ROUND).view(np.int32)).astype(jnp.float32)
    rest = least
    for part in _HALF_TURNS[1:]:
        rest = rest + round_result(count * np.float32(part))
    square = round_result(rest * rest)
    cosine = _evaluate_unfused(_COSINE, square)
    sine = rest + round_result(round_result(_evaluate_unfused(_SINE, square) * square) * rest)
    is_even, half = (quarter & 1) == 0, quarter if is_sine else quarter + 1
    y = jnp.where(is_even, sine, cosine) if is_sine else jnp.where(is_even, cosine, sine)
    is_negative = ((half & 2) != 0) ^ (jnp.signbit(x) if is_sine else False)
    return jnp.where(least < np.float32(_LARGE_ANGLE), jnp.where(is_negative, -y, y), own)


def _evaluate_unfused(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
    """Return a polynomial by Horner's rule with a rounding after each product."""
    total = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = round_result(total * x) + np.float32(coefficient)
    return total


# Functions as ONNX Runtime approximates them.
tanh = _approximate("tanh", _divide_tanh, lambda _, y: 1 - y * y)
apply_logistic = _approximate("logistic", _divide_logistic, lambda _, y: y * (1 - y))
exponentiate = _approximate("exp_of_runtime", _exponentiate_all, lambda _, y: y)
compute_sine = _approximate("sin_of_runtime", functools.partial(_turn, is_sine=True), lambda x, _: jnp.cos(x))
compute_cosine = _approximate("cos_of_runtime", functools.partial(_turn, is_sine=False), lambda x, _: -jnp.sin(x))
