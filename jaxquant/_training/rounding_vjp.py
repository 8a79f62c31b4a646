"""The differentiation rule of fake quantization, shared by all estimators, ONNX operators and contractions."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._arrays import parts, scale_from_range
from .._arrays.quantize import encode_array
from .._arrays.quantized_array import QuantizedArray, dequantize_checked
from .._arrays.scale_rules import encode_ties_toward_zero
from .._arrays.spec import Codebook, QuantSpec
from .._core import checks, dtypes, granularity
from .._kernels import affine, min_max
from .._kernels.affine import dequantize_affine, divide_by_scale
from .estimators import LSQ, PACT, Estimator, LSQPlus, StochasticRounding, StraightThrough

_ZERO, _ONE = np.float32(0), np.float32(1)


# The formulas of the gradient rules: the mask of x, the slopes and factors of scales, and stochastic rounding.


class _CodeFormat(Protocol):
    """The attributes of a QuantSpec that masks and slopes depend on."""

    @property
    def dtype(self) -> Any:
        """The dtype of the codes, a narrow integer or a codebook."""
        ...

    @property
    def carrier(self) -> np.dtype:
        """The dtype in which the codes are held."""
        ...

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest code."""
        ...

    @property
    def codebook(self) -> Codebook | None:
        """The codebook, or None for a dtype."""
        ...

    @property
    def fixed_zero_point(self) -> int | None:
        """The zero point that the codes fix, or None."""
        ...


def _round_stochastically(value: jax.Array, key: jax.Array) -> jax.Array:
    """Return float32 values rounded to an integer: up with a probability equal to their fraction, otherwise down."""
    below = lax.floor(value)
    # The fraction and its product with 2**32 are both exact. An infinity has no fraction; 0 leaves it unchanged.
    fraction = lax.mul(lax.sub(value, below), np.float32(2**32))
    fraction = lax.select(lax.is_finite(fraction), fraction, lax.full_like(fraction, 0))
    # float32 rounds a fraction within 2**-25 of 1 to 1. Its product is 2**32, which a uint32 cannot hold, so such a
    # value is rounded up without a sample.
    is_whole = lax.ge(fraction, np.float32(2**32))
    threshold = lax.convert_element_type(lax.min(fraction, np.float32(2**32 - 2**8)), jnp.uint32)
    rounds_up = lax.bitwise_or(is_whole, lax.lt(jax.random.bits(key, value.shape, jnp.uint32), threshold))
    return lax.select(rounds_up, lax.add(below, np.float32(1)), below)


def compute_mask(rule: Estimator, spec: _CodeFormat, u: jax.Array, center: jax.Array | None) -> jax.Array | None:
    """Return a mask of where the gradient passes to x, False for NaN; or None if it passes everywhere.

    Args:
        rule: Static. The estimator.
        spec: Static. How x is quantized.
        u: x / scale, float32.
        center: the zero point, int32, in u's shape; None for 0.
    """
    if isinstance(rule, StraightThrough | StochasticRounding) and not rule.clip:
        return None
    low, high = (np.float32(b) for b in spec.bounds)
    if isinstance(rule, StraightThrough):
        if spec.codebook is not None:
            return (u >= low) & (u <= high)
        bounds = None if spec.dtype in dtypes.SMALL_FLOATS else (int(low), int(high))
        return affine.mark_in_range(u, center, spec.carrier, bounds)
    # u + z would be rounded. Subtracting z from the bounds is exact, because they are whole numbers.
    least, most = (bound if center is None else bound - center.astype(jnp.float32) for bound in (low, high))
    if isinstance(rule, StochasticRounding):
        return (u >= least) & (u <= most)
    above = u >= least if isinstance(rule, PACT) and low == (spec.fixed_zero_point or 0) else u > least
    return above & (u < most)


def _compute_slopes(
    rule: Estimator, spec: _CodeFormat, u: jax.Array, center: jax.Array | None, distance: jax.Array
) -> tuple[jax.Array | None, jax.Array, bool]:
    """Return the mask of x, the summands of dy/dscale, and whether a zero point gets -scale where the mask is False.

    Args:
        rule: Static. The estimator.
        spec: Static. How x is quantized.
        u: x / scale, float32.
        center: the zero point, int32, in u's shape; None for 0.
        distance: the number of steps of y, float32.
    """
    inside = compute_mask(rule, spec, u, center)
    if inside is None:
        return None, distance - u, False
    if isinstance(rule, PACT):
        return inside, jnp.where(inside, _ZERO, distance), False
    # Inside the range the slope is the rounding error; outside it is the number of steps to the end.
    ds = distance - jnp.where(inside, u, _ZERO)
    return inside, ds, not isinstance(rule, LSQ)


def _compute_factor(
    rule: Estimator, spec: QuantSpec, x: jax.Array, shape: tuple[int, ...], center: jax.Array | None
) -> Any:
    """Return the factor of the gradient of a scale: a float32, or one for each entry of `shape`.

    Args:
        rule: Static. The estimator.
        spec: Static. How x is quantized.
        x: the values.
        shape: Static. The shape of the scale or of the zero point.
        center: the zero point, int32; None for 0.
    """
    if not isinstance(rule, LSQ | LSQPlus):
        return _ONE
    count: Any = rule.elements
    if count is None:
        counts = np.maximum(min_max.count_members(x, shape, scale_from_range.derive_block_size(spec)), 1)
        count = counts if counts.size and (counts != counts.flat[0]).any() else counts.max(initial=1)
    most = spec.bounds[1]
    if center is None or isinstance(rule, LSQPlus):
        return np.asarray(1 / np.sqrt(count * most), np.float32)
    # If the zero point is finer than the scale, the largest number of steps among its entries counts.
    shared = tuple(a for a, (n, m) in enumerate(zip(center.shape, shape, strict=True)) if m == 1 != n)
    reach = np.int32(most) - jnp.min(center, axis=shared, keepdims=True)
    return lax.rsqrt(jnp.maximum(reach, 1).astype(jnp.float32) * np.asarray(count, np.float32))


class LinearCodes(NamedTuple):
    """The codes of an ONNX operator, described by attributes that a QuantSpec has, too.

    Attributes:
        dtype: the dtype of the codes.
        bounds: the least and the largest code.
        codebook: None, because ONNX has no codebooks.
        fixed_zero_point: None, because the caller passes the zero point.
    """

    dtype: np.dtype
    bounds: tuple[float, float]
    codebook: Codebook | None = None
    fixed_zero_point: int | None = None

    @property
    def carrier(self) -> np.dtype:
        """The dtype of the codes."""
        return self.dtype


class LinearOptions(NamedTuple):
    """What an ONNX operator adds to a rounding.

    Attributes:
        granularity: which elements share a scale, for scales in the shapes that ONNX gives them.
        training: whether the call may be differentiated.
        lda_coeff: the factor of the cotangent of x.
        function: the name of the operator, for errors.
    """

    granularity: granularity.Granularity
    training: bool
    lda_coeff: float
    function: str


class RoundingConfig(NamedTuple):
    """The static part of a rounding.

    Attributes:
        spec: the codes; with a QuantSpec a scale has x's rank.
        rule: the estimator, without a key.
        linear: the options of an ONNX operator, which divides in the dtype of the scale. None divides in float32.
    """

    spec: QuantSpec | LinearCodes
    rule: Estimator = StraightThrough()
    linear: LinearOptions | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def quantize_and_dequantize(
    config: RoundingConfig, x: jax.Array, scale: jax.Array, zero_point: jax.Array | None, key: jax.Array | None
) -> jax.Array:
    """Return x rounded to the values of its codes, differentiable under the rule of `config`; arguments are checked.

    Args:
        config: Static. The codes, the estimator and the granularity.
        x: float32, float16 or bfloat16.
        scale: the value per step, in a shape that fits the granularity.
        zero_point: an integer array, a float32 array that is learned, or None for 0.
        key: the key of a stochastic rounding, or None.
    """
    x, scale = jnp.asarray(x), jnp.asarray(scale)  # an inlined jit can pass a Python number through
    if config.spec.codebook is not None:
        return dequantize_checked(make_array(config, x, scale, zero_point, key))
    center = round_zero_point(config.spec, zero_point)
    codes = _compute_codes(config, x, scale, center, key)
    return dequantize_affine(codes, scale, center, _derive_granularity(config), x.dtype)


def _quantize_and_dequantize_fwd(
    config: RoundingConfig, x: jax.Array, scale: jax.Array, zero_point: jax.Array | None, key: jax.Array | None
) -> tuple[jax.Array, Any]:
    if config.linear is not None:
        checks.refuse_backward(config.linear.function, config.linear.training)
    return quantize_and_dequantize(config, x, scale, zero_point, key), (x, scale, zero_point, key)


def _quantize_and_dequantize_bwd(
    config: RoundingConfig, residuals: tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None], g: jax.Array
) -> tuple[Any, ...]:
    x, scale, zero_point, key = residuals
    return (*compute_cotangents(config, x, scale, zero_point, key, g), None)


quantize_and_dequantize.defvjp(_quantize_and_dequantize_fwd, _quantize_and_dequantize_bwd)


def compute_cotangents(
    config: RoundingConfig, x: ArrayLike, scale: ArrayLike, zero_point: jax.Array | None, key: jax.Array | None,
    g: jax.Array,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:  # fmt: skip
    """Return the cotangents of x, scale and zero_point; None for an E8M0 scale and for an integer zero point.

    dx = lda_coeff * g * m, dscale = sum(g * s) * f and dzero_point = sum(-g * (1 - m) * scale) * f, with the mask m,
    the slope s and the factor f of the estimator; a sum is over the elements that share the entry.
    """
    x, scale = jnp.asarray(x), jnp.asarray(scale)
    spec, rule, shared = config.spec, config.rule, _derive_granularity(config)
    center = round_zero_point(spec, zero_point)
    # The backward pass computes the quotient and the codes again, because x is smaller than all of them together.
    u = _divide(config, x, scale)
    expanded = None if center is None else shared.expand(center, x)
    distance = _count_steps(config, x, scale, zero_point, center, key)
    inside, slope, has_offset = _compute_slopes(rule, spec, u, expanded, distance)
    g, zero = g.astype(jnp.float32), np.float32(0)
    dx = g if inside is None else jnp.where(inside, g, zero)
    if config.linear is not None:
        dx = np.float32(config.linear.lda_coeff) * dx
    dx = dx.astype(x.dtype)

    def sum_to_entries(values: jax.Array, like: jax.Array) -> jax.Array:
        factor = np.float32(1)
        if isinstance(spec, QuantSpec):  # ONNX has no estimator with a factor
            factor = _compute_factor(rule, spec, x, like.shape, center)
        return (affine.sum_to_scale(shared, values, like) * factor).astype(like.dtype)

    dscale = None if scale.dtype == dtypes.E8M0 else sum_to_entries(g * slope, scale)
    if zero_point is None or zero_point.dtype != dtypes.FLOAT32:
        return dx, dscale, None
    if inside is None or not has_offset:
        return dx, dscale, jnp.zeros_like(zero_point)
    # Where x saturates, y moves against the zero point by one scale per step.
    values = shared.expand(dtypes.scale_as_float32(scale), x)
    return dx, dscale, sum_to_entries(jnp.where(inside, zero, -g * values), jnp.asarray(zero_point))


def _count_steps(
    config: RoundingConfig,
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    center: jax.Array | None,
    key: jax.Array | None,
) -> jax.Array:
    """Return how many steps the rounded x is away from 0, float32: its codes dequantized with a scale of 1."""
    unit = jnp.ones(scale.shape, jnp.float32)
    if config.spec.codebook is not None:
        codes = make_array(config, x, scale, zero_point, key)
        return dequantize_checked(codes.replace(scale=unit, dtype=jnp.float32))
    codes = _compute_codes(config, x, scale, center, key)
    return dequantize_affine(codes, unit, center, _derive_granularity(config), dtypes.FLOAT32)


def make_array(
    config: RoundingConfig, x: jax.Array, scale: jax.Array, zero_point: jax.Array | None, key: jax.Array | None, *,
    signed_scale: bool = False,
) -> QuantizedArray:  # fmt: skip
    """Return x as codes under a scale and a zero point of its rank; `config` holds a QuantSpec."""
    spec, center = config.spec, round_zero_point(config.spec, zero_point)
    assert isinstance(spec, QuantSpec)
    point = None if center is None else center.astype(spec.carrier)
    if key is None:
        codes = encode_array(x, scale, center, spec)
    else:
        codes = _compute_codes(config, x, scale, center, key).astype(spec.carrier)
    # A dimension no longer than a block has one entry: such an array needs no block size.
    is_cut = any(n not in (1, m) for part in (scale, center) if part is not None
                 for n, m in zip(part.shape, x.shape, strict=True))  # fmt: skip
    size = scale_from_range.derive_block_size(spec) if is_cut else None
    packing = parts.derive_packing(spec.dtype, x.shape, None)
    return QuantizedArray(
        codes, scale, point, dtype=x.dtype, block_size=size, codebook=spec.codebook, packing=packing,
        signed_scale=signed_scale,
    )  # fmt: skip


def round_zero_point(spec: QuantSpec | LinearCodes, zero_point: jax.Array | None) -> jax.Array | None:
    """Return the zero point in whole steps, int32, or None."""
    if zero_point is None or not dtypes.is_integer(spec.dtype):
        return None
    zero_point = jnp.asarray(zero_point)
    if zero_point.dtype == dtypes.FLOAT32:
        low, high = (int(bound) for bound in spec.bounds)
        return affine.encode_steps(zero_point, None, spec.carrier, (low, high)).astype(jnp.int32)
    return zero_point.astype(jnp.int32)


def _compute_codes(
    config: RoundingConfig, x: jax.Array, scale: jax.Array, center: jax.Array | None, key: jax.Array | None
) -> jax.Array:
    """Return the codes of x; integer codes as int32."""
    spec, value = config.spec, _divide(config, x, scale)
    if isinstance(spec, QuantSpec) and spec.ties != "even":
        return encode_ties_toward_zero(value)
    if spec.dtype in dtypes.SMALL_FLOATS:
        return dtypes.encode_small_float(value, spec.dtype, True)
    if key is not None:
        value = _round_stochastically(value, key)
    low, high = (int(bound) for bound in spec.bounds)
    # int16 holds the codes of every integer dtype except uint16, and unlike narrower codes it needs no packing.
    carrier = spec.dtype if spec.dtype == jnp.uint16 else np.dtype(jnp.int16)
    expanded = None if center is None else _derive_granularity(config).expand(center, x)
    return affine.encode_steps(value, expanded, carrier, (low, high)).astype(jnp.int32)


def _divide(config: RoundingConfig, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return x / scale as float32, rounded to the dtype in which the operator divides."""
    precision = dtypes.FLOAT32 if config.linear is None else scale.dtype
    return divide_by_scale(x, _derive_granularity(config).expand(scale, x), precision)


def _derive_granularity(config: RoundingConfig) -> granularity.Granularity:
    if config.linear is not None:
        return config.linear.granularity
    assert isinstance(config.spec, QuantSpec)
    return granularity.Aligned(scale_from_range.derive_block_size(config.spec))
