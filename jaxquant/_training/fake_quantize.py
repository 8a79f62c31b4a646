"""`quantize` and `dequantize` in one, float in and float out, under the gradient rule that is asked for."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._arrays import scale_from_range
from .._arrays.quantize import encode_array, find_parameters
from .._arrays.quantized_array import QuantizedArray, dequantize_checked
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, entry_point, granularity, known_values, rounding, small_floats
from .._core.affine import dequantize_affine, divide_by_scale
from .._core.entry_point import compile_entry_point
from . import estimators
from .estimators import Rule, StochasticRounding, StraightThrough

_NAME = "fake_quantize"


def fake_quantize(
    x: ArrayLike,
    spec: QuantSpec,
    scale: ArrayLike | None = None,
    zero_point: ArrayLike | None = None,
    gradient: Rule = StraightThrough(),
) -> jax.Array:
    """y = (saturate(round_half_even(x / scale) + zero_point) - zero_point) * scale, with a gradient.

    The forward pass is `quantize(x, spec).dequantize()` to the last bit, or with a scale that is given, the same under
    that scale. `gradient` says how it comes back. A scale that x gave is a constant to it, and so is its zero point.

    Args:
        x: values, float32, float16 or bfloat16, of any shape; a Python number is float32.
        spec: Static. How to quantize.
        scale: value per step, float32, float16 or bfloat16: one element, or of x's rank with the dimensions that
            `quantize(x, spec).scale` has, or 1 in their place. A Python number is float32. None finds it, and the
            zero point, from x.
        zero_point: steps, likewise: an integer array of `spec.carrier`, or a float32 array to be learned, rounded half
            to even on the way forward. Where it is traced, as it is while it is trained, what rounds to no code of
            the spec is cut to the nearest; where it is known, that is an error. An int stands for an array of it.
            None is the one that a symmetric spec fixes.
        gradient: `StraightThrough()`, `LSQ()`, `LSQPlus()`, `PACT()` or `StochasticRounding(key)`, which rounds
            by chance on the way forward, too. Static, but for the key.

    Returns:
        The values that the codes stand for, in x's shape and dtype.

    Raises:
        TypeError: an argument has a dtype or type that there is not; or StochasticRounding of floats or code books.
        ValueError: a scale or zero point does not fit x; a zero point comes without a scale, or a scale without the
            zero point that the spec does not fix; a known scale is 0, negative, NaN or infinite; or a known float
            zero point does not round to one of the spec's codes. Known is what is not traced, has no more than
            65536 elements and lies in the memory of this host.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x, spec = jnp.array([-5.0, 0.25, 0.75, 1.6, 2.25]), jq.QuantSpec(jnp.int4)
        >>> jq.fake_quantize(x, spec, 0.5)  # 0.25 and 0.75 are ties; -5 saturates at -7 steps
        Array([-3.5,  0. ,  1. ,  1.5,  2. ], dtype=float32)
        >>> jax.grad(lambda x: jq.fake_quantize(x, spec, 0.5).sum())(x)
        Array([0., 1., 1., 1., 1.], dtype=float32)
        >>> jax.grad(lambda scale: jq.fake_quantize(x, spec, scale, gradient=jq.LSQ()).sum())(jnp.float32(0.5)).round(4)
        Array(-1.3015, dtype=float32)

    Source: Jacob et al., arXiv 1712.05877, section 3; the gradients' own are with them.

    Cotangents: those of the rule. Of an integer zero point there is none; of a scale that x gave none either.
    """
    checks.require_type(isinstance(spec, QuantSpec), _NAME, "spec", "a QuantSpec", checks.describe_value(spec))
    scale, zero_point = check_parts(_NAME, ("scale", "zero_point"), scale, zero_point, spec)
    estimators.check_estimator(_NAME, "gradient", gradient, spec, zero_point)
    rule, key = split_key(gradient)
    return _fake_quantize(entry_point.convert_number(x), scale, zero_point, key, spec=spec, rule=rule)


@compile_entry_point(_NAME)
def _fake_quantize(x: Any, scale: Any, zero_point: Any, key: Any, *, spec: QuantSpec, rule: Rule) -> jax.Array:
    found = read_parts(_NAME, ("x", "scale", "zero_point"), x, scale, zero_point, spec)
    return _quantize_and_back(Config(spec, rule), *found, key)


class Config(NamedTuple):
    """What is static in a fake quantization."""

    spec: QuantSpec
    rule: Rule


def split_key(rule: Rule) -> tuple[Rule, Any]:
    """Returns a rule without its key, which then is static, and the key."""
    if isinstance(rule, StochasticRounding):
        return dataclasses.replace(rule, key=None), rule.key
    return rule, None


def check_parts(function: str, names: tuple[str, str], scale: Any, zero_point: Any, spec: QuantSpec) -> tuple[Any, Any]:
    """Requires what is known of a scale and a zero point to fit the spec, and returns them with numbers as arrays."""
    if scale is None and zero_point is None:
        return None, None
    scale = entry_point.convert_number(scale)
    zero_point = convert_zero_point_number(function, names[1], zero_point, spec)
    for argument, part in zip(names, (scale, zero_point), strict=True):
        if not hasattr(part, "__jax_array__"):
            checks.check_readable(function, argument, part)
    known_values.check_positive(function, names[0], scale)
    if zero_point is not None and spec.dtype in dtypes.INTEGERS:
        low, high = spec.bounds
        known_values.check_codes(function, names[1], zero_point, (int(low), int(high)))
    return scale, zero_point


def convert_zero_point_number(function: str, argument: str, value: Any, spec: QuantSpec) -> Any:
    """Returns an int as a zero point in the spec's dtype, which must hold it; anything else as it came."""
    if not isinstance(value, int | np.integer) or checks.has_dtype(value, dtypes.QUANTIZED):
        return entry_point.convert_number(value)
    checks.check_integer(function, argument, value)
    low, high = spec.bounds if spec.dtype in dtypes.INTEGERS else (0, 0)
    if not low <= value <= high:
        expected = f"an int in [{low}, {high}], the codes of the spec"
        checks.require(False, function, argument, expected, value)
    return np.asarray(value, spec.carrier)


def read_parts(
    function: str, names: tuple[str, str, str], x: Any, scale: Any, zero_point: Any, spec: QuantSpec
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Requires what can be quantized, and returns (x, scale, zero_point), the latter two of x's rank."""
    x, scale, zero_point = entry_point.convert_numpy(x, scale, zero_point)
    checks.check_array(function, names[0], x, dtypes.FLOATS)
    if scale is None:
        if zero_point is not None:
            expected = f"None, or a {names[1]} beside it"
            checks.require(False, function, names[2], expected, "a zero point alone")
        return x, *find_parameters(function, lax.stop_gradient(x), spec, None, None)[:2]
    shapes = scale_from_range.find_shapes(function, spec, x.shape)
    checks.check_array(function, names[1], scale, (*dtypes.FLOATS, dtypes.E8M0))
    scale = _expand_rank(function, names[1], scale, shapes[0])
    if zero_point is None:
        expected = "a zero point, for the spec is asymmetric"
        checks.require(bool(spec.symmetric), function, names[2], expected, "None")
        fixed = spec.fixed_zero_point
        return x, scale, jnp.full((1,) * x.ndim, fixed, spec.carrier) if fixed else None
    if spec.dtype not in dtypes.INTEGERS:
        checks.require(False, function, names[2], f"None: {spec.dtype} has no zero point", "an array")
    checks.check_array(function, names[2], zero_point, (spec.carrier, dtypes.FLOAT32))
    return x, scale, _expand_rank(function, names[2], zero_point, shapes[1])


def _expand_rank(function: str, argument: str, part: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if part.ndim == len(shape) and all(n in (1, m) for n, m in zip(part.shape, shape, strict=True)):
        return part
    expected = f"one element, or shape {shape}, with 1 in places of it"
    checks.require(math.prod(part.shape) == 1, function, argument, expected, f"shape {part.shape}")
    return part.reshape((1,) * len(shape))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantize_and_back(config: Config, x: jax.Array, scale: jax.Array, zero_point: Any, key: Any) -> jax.Array:
    """Returns x through its codes and back; every argument has passed its contract."""
    x, scale = jnp.asarray(x), jnp.asarray(scale)  # an inlined jit can hand a Python number through
    spec, points = config.spec, round_zero_point(config.spec, zero_point)
    if spec.codebook is not None:
        return dequantize_checked(make_array(config, x, scale, zero_point, key))
    codes = _find_codes(config, x, scale, points, key)
    return dequantize_affine(codes, scale, points, _align_spec(spec), x.dtype)


def _quantize_and_back_fwd(
    config: Config, x: jax.Array, scale: jax.Array, zero_point: Any, key: Any
) -> tuple[jax.Array, Any]:
    return _quantize_and_back(config, x, scale, zero_point, key), (x, scale, zero_point, key)


def _quantize_and_back_bwd(config: Config, residuals: Any, g: jax.Array) -> tuple[Any, ...]:
    x, scale, zero_point, key = residuals
    return (*find_cotangents(config, x, scale, zero_point, key, g), None)


_quantize_and_back.defvjp(_quantize_and_back_fwd, _quantize_and_back_bwd)


def find_cotangents(
    config: Config, x: Any, scale: Any, zero_point: Any, key: Any, g: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns the cotangents of x, of the scale and of the zero point, None where that is an integer."""
    x, scale = jnp.asarray(x), jnp.asarray(scale)
    spec, rule = config
    aligned, points = _align_spec(spec), round_zero_point(spec, zero_point)
    unit = jnp.ones(scale.shape, jnp.float32)
    if spec.codebook is not None:
        distance = dequantize_checked(
            make_array(config, x, scale, zero_point, key).replace(scale=unit, dtype=jnp.float32)
        )
    else:
        distance = dequantize_affine(_find_codes(config, x, scale, points, key), unit, points, aligned, dtypes.FLOAT32)
    u = divide_by_scale(x, aligned.expand(scale, x), dtypes.FLOAT32)
    expanded = None if points is None else aligned.expand(points, x)
    inside, ds, dz = estimators.find_slopes(rule, spec, u, expanded, distance)
    g, zero = g.astype(jnp.float32), np.float32(0)
    dx = (g if inside is None else jnp.where(inside, g, zero)).astype(x.dtype)
    by = estimators.find_factor(rule, spec, x, scale.shape, points)
    dscale = None if scale.dtype == dtypes.E8M0 else _sum_to_part(aligned, g * ds, scale, by)
    if zero_point is None or zero_point.dtype != dtypes.FLOAT32:
        return dx, dscale, None
    if dz is None:
        return dx, dscale, jnp.zeros_like(zero_point)
    value = aligned.expand(small_floats.decode_small_float(scale) if dscale is None else scale.astype(jnp.float32), x)
    return (
        dx,
        dscale,
        _sum_to_part(
            aligned, g * dz * value, zero_point, estimators.find_factor(rule, spec, x, zero_point.shape, points)
        ),
    )


def make_array(config: Config, x: jax.Array, scale: jax.Array, zero_point: Any, key: Any) -> QuantizedArray:
    """Returns x as codes under a scale and a zero point of its rank."""
    spec, points = config.spec, round_zero_point(config.spec, zero_point)
    size = scale_from_range.find_block_size(spec)
    whole = None if points is None else points.astype(spec.carrier)
    if key is None:
        values = encode_array(x, scale, points, spec)
    else:
        values = _find_codes(config, x, scale, points, key).astype(spec.carrier)
    short = any(n not in (1, m) for part in (scale, points) if part is not None
                for n, m in zip(part.shape, x.shape, strict=True))  # fmt: skip
    return QuantizedArray(
        values, scale, whole, dtype=x.dtype, block_size=size if short else None, codebook=spec.codebook
    )


def round_zero_point(spec: QuantSpec, zero_point: Any) -> jax.Array | None:
    """Returns the zero point in whole steps, int32, or None."""
    if zero_point is None or spec.dtype not in dtypes.INTEGERS:
        return None
    zero_point = jnp.asarray(zero_point)
    if zero_point.dtype == dtypes.FLOAT32:
        low, high = (int(b) for b in spec.bounds)
        return rounding.encode_steps(zero_point, None, spec.carrier, (low, high)).astype(jnp.int32)
    return zero_point.astype(jnp.int32)


def _find_codes(config: Config, x: jax.Array, scale: jax.Array, points: jax.Array | None, key: Any) -> jax.Array:
    """Returns the codes, those of an integer dtype in an int32 that no loop has to pack."""
    spec, aligned = config.spec, _align_spec(config.spec)
    value = divide_by_scale(x, aligned.expand(scale, x), dtypes.FLOAT32)
    if spec.dtype in dtypes.SMALL_FLOATS:
        return small_floats.encode_small_float(value, spec.dtype, True)
    if key is not None:
        value = estimators.round_stochastically(value, key)
    low, high = (int(b) for b in spec.bounds)
    # 16 bits hold the codes of every integer dtype but one.
    carrier = spec.dtype if spec.dtype == jnp.uint16 else np.dtype(jnp.int16)
    expanded = None if points is None else aligned.expand(points, x)
    return rounding.encode_steps(value, expanded, carrier, (low, high)).astype(jnp.int32)


def _align_spec(spec: QuantSpec) -> granularity.Aligned:
    return granularity.Aligned(scale_from_range.find_block_size(spec))


def _sum_to_part(aligned: granularity.Aligned, values: jax.Array, like: jax.Array, by: Any) -> jax.Array:
    """Returns float32 values summed over each entry's elements, times `by`, in the shape and dtype of `like`."""
    return (granularity.sum_to_scale(aligned, values, like) * by).astype(like.dtype)
