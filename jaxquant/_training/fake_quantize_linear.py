"""QuantizeLinear and DequantizeLinear in one, float in and float out, with a straight-through gradient."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._core import checks, dtypes, entry_point, known_values, rounding, toolkit_attributes
from .._core.affine import dequantize_affine, divide_by_scale, quantize_affine
from .._core.entry_point import compile_entry_point
from .._core.granularity import Granularity, check_matching, resolve_onnx, sum_to_scale
from .._core.known_values import check_float_zero_point
from .._core.number_arguments import convert_scale_number, convert_zero_point_number

_NAME = "fake_quantize_linear"


def fake_quantize_linear(
    x: ArrayLike,
    scale: ArrayLike,
    zero_point: ArrayLike | None = None,
    *,
    dtype: DTypeLike | None = None,
    axis: int = 1,
    block_size: int = 0,
    training: bool = True,
    lda_coeff: float = 1.0,
    name: str | None = None,
) -> jax.Array:
    """y = (clip(round_half_even(x / scale) + zero_point, qmin, qmax) - zero_point) * scale.

    The forward pass is `dequantize_linear(quantize_linear(x, ...), ..., output_dtype=x.dtype)` to the last bit.
    The backward pass takes rounding for the identity and keeps the clipping: the mask is that of the integers
    themselves, qmin <= round_half_even(x / scale) + zero_point <= qmax, both bounds included.

    Args:
        x: values, float32, float16 or bfloat16, of any shape; a Python number is float32.
        scale: value per step, float32, float16 or bfloat16; the division is done in its dtype. A scalar or one
            element is per tensor; 1-D, as long as x's `axis`, is per axis; with `block_size`, x's shape with
            ceil(length / block_size) in place of the axis. A Python number takes x's dtype.
        zero_point: steps, of scale's shape: None for 0; an integer array of `dtype`; or a float32 array to be
            learned, rounded half to even on the way forward. Where it is traced, as it is while it is trained, what
            rounds to no code of dtype is cut to the nearest; where it is known, that is an error. An int stands for
            an array of it, in `dtype`.
        dtype: Static. int2, uint2, int4, uint4, int8, uint8, int16, uint16, one of the four float8 or
            float4_e2m1fn. By default, as in `quantize_linear`, zero_point's dtype; without one, or with a float32
            one, uint8, which takes negative values to 0. A float dtype has no zero point but 0, saturates, and its
            mask is what rounds to a finite value.
        axis: Static. The axis that is kept, negative from the back; not looked at per tensor.
        block_size: Static. Elements along `axis` that share a scale; the last block may be short. 0 is none.
        training: Static. False keeps nothing for the backward pass; differentiating then raises.
        lda_coeff: Static. Multiplies the gradient that flows back to x; 0 stops it, -1 reverses it.
        name: Static. A name for the operation in the lowered program, as `jax.named_scope` gives it.

    Returns:
        The values that the codes stand for, in x's shape and dtype.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not have.
        ValueError: shapes, axis or block_size do not fit each other; a float dtype has a zero point; the call is
            differentiated with training=False; a known scale is 0, negative, NaN or infinite (`quantize_linear`, the
            operator, computes with all of them, as ONNX Runtime does); or a known float zero point does not round to
            a code of `dtype`. Known is what is not traced, has no more than 65536 elements and lies in the memory of
            this host.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([-1.75, 0.25, 0.3, 6.25, 100.0])
        >>> fake = lambda x, scale: jq.fake_quantize_linear(x, scale, 3, dtype=jnp.uint4)
        >>> fake(x, 0.5)
        Array([-1.5,  0. ,  0.5,  6. ,  6. ], dtype=float32)
        >>> jax.grad(lambda x: fake(x, 0.5).sum())(x)
        Array([0., 1., 1., 1., 0.], dtype=float32)
        >>> jax.grad(lambda scale: fake(x, scale).sum())(jnp.float32(0.5)).round(4)
        Array(8.4, dtype=float32)

    Source: Jacob et al., arXiv 1712.05877, section 3, for fake quantization; Jain et al., arXiv 1903.08066,
    section 3, for the gradient of a scale as that of the formula with rounding taken for the identity; training,
    lda_coeff and name from the node of Graiphic's Deep Learning Toolkit for LabVIEW.

    Cotangents, with u = x / scale, code = the integer, m = the mask (1 or 0), z = the zero point:
    Cotangent of x: lda_coeff * g * m. Of scale: sum over its slice of g * ((code - z) - m * u). Of a float
    zero_point: sum over its slice of -g * (1 - m) * scale. An integer zero_point has none.
    """
    if isinstance(scale, int | float):
        scale = convert_scale_number(_NAME, "scale", scale, x)
    if isinstance(zero_point, int | np.integer) and not checks.has_dtype(zero_point, dtypes.QUANTIZED):
        expected = jnp.uint8 if dtype is None else dtype
        zero_point = convert_zero_point_number(_NAME, "zero_point", zero_point, expected, scale)
    known_values.check_positive(_NAME, "scale", scale)
    if zero_point is not None:
        zero_point = entry_point.convert_number(zero_point)
        found = _find_dtype(zero_point, dtype)
        if found in dtypes.INTEGERS:
            known_values.check_codes(_NAME, "zero_point", zero_point, dtypes.find_bounds(found))
        check_float_zero_point(_NAME, "zero_point", zero_point)
    return _fake_quantize_linear(
        entry_point.convert_number(x), scale, zero_point,
        dtype=dtype, axis=axis, block_size=block_size, training=training, lda_coeff=lda_coeff, name=name,
    )  # fmt: skip


@compile_entry_point(_NAME)
def _fake_quantize_linear(
    x: jax.Array, scale: jax.Array, zero_point: jax.Array | None, *,
    dtype: Any, axis: int, block_size: int, training: bool, lda_coeff: float, name: str | None,
) -> jax.Array:  # fmt: skip
    checks.check_array(_NAME, "x", x, dtypes.FLOATS)
    checks.check_array(_NAME, "scale", scale, dtypes.FLOATS)
    found = _find_dtype(zero_point, dtype)
    toolkit_attributes.check_attributes(_NAME, training, lda_coeff, name)
    granularity = resolve_onnx(_NAME, "scale", scale, x.shape, axis, block_size)
    if zero_point is not None:
        integers = found in dtypes.INTEGERS
        checks.check_array(_NAME, "zero_point", zero_point, (found, dtypes.FLOAT32) if integers else (found,))
        check_matching(_NAME, "zero_point", zero_point, scale, "scale")
    config = Config(granularity, found, None, bool(training), float(lda_coeff), _NAME)
    with toolkit_attributes.name_scope(name):
        return fake_quantize_parts(config, x, scale, zero_point)


def _find_dtype(zero_point: Any, dtype: Any) -> np.dtype:
    """Returns the dtype of the codes: `dtype`, or by `quantize_linear`'s default the zero point's, or uint8."""
    if dtype is not None:
        return checks.check_dtype(_NAME, "dtype", dtype, dtypes.QUANTIZED)
    own = getattr(zero_point, "dtype", None)
    return np.dtype(own) if own in dtypes.QUANTIZED else np.dtype(jnp.uint8)


class Config(NamedTuple):
    """What is static in a fake quantization; `bounds` None is all that the dtype holds."""

    granularity: Granularity
    dtype: np.dtype
    bounds: tuple[int, int] | None
    training: bool
    lda_coeff: float
    function: str


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fake_quantize_parts(config: Config, x: jax.Array, scale: jax.Array, zero_point: jax.Array | None) -> jax.Array:
    """Returns x through its codes and back; every argument has passed its contract."""
    x, scale = jnp.asarray(x), jnp.asarray(scale)  # an inlined jit can hand a Python number through
    steps = _round_zero_point(config, zero_point)
    return dequantize_affine(_find_codes(config, x, scale, steps), scale, steps, config.granularity, x.dtype)


def _fake_quantize_parts_fwd(
    config: Config, x: jax.Array, scale: jax.Array, zero_point: jax.Array | None
) -> tuple[jax.Array, Any]:
    toolkit_attributes.refuse_backward(config.function, config.training)
    return fake_quantize_parts(config, x, scale, zero_point), (x, scale, zero_point)


def _fake_quantize_parts_bwd(config: Config, residuals: Any, g: jax.Array) -> tuple[Any, Any, Any]:
    x, scale = map(jnp.asarray, residuals[:2])
    zero_point = residuals[2] if residuals[2] is None else jnp.asarray(residuals[2])
    granularity = config.granularity
    steps = _round_zero_point(config, zero_point)
    expanded = None if steps is None else granularity.expand(steps, x)
    unit = jnp.ones(scale.shape, jnp.float32)
    distance = dequantize_affine(_find_codes(config, x, scale, steps), unit, steps, granularity, unit.dtype)
    value = divide_by_scale(x, granularity.expand(scale, x), scale.dtype)
    inside = rounding.find_in_range(value, expanded, config.dtype, config.bounds)
    g, zero = g.astype(jnp.float32), np.float32(0)
    dx = np.float32(config.lda_coeff) * jnp.where(inside, g, zero)
    ds = _sum_to_part(granularity, g * (distance - jnp.where(inside, value, zero)), scale)
    if zero_point is None or zero_point.dtype != dtypes.FLOAT32:
        return dx.astype(x.dtype), ds, None
    outside = jnp.where(inside, zero, -g * granularity.expand(scale.astype(jnp.float32), x))
    return dx.astype(x.dtype), ds, _sum_to_part(granularity, outside, zero_point)


fake_quantize_parts.defvjp(_fake_quantize_parts_fwd, _fake_quantize_parts_bwd)


def _round_zero_point(config: Config, zero_point: jax.Array | None) -> jax.Array | None:
    """Returns the zero point in the integer dtype, or None."""
    if zero_point is None or config.dtype in dtypes.SMALL_FLOATS:
        return None
    if zero_point.dtype == dtypes.FLOAT32:
        return rounding.encode_steps(zero_point, None, config.dtype, config.bounds).astype(jnp.int32)
    return zero_point.astype(jnp.int32)


def _find_codes(config: Config, x: jax.Array, scale: jax.Array, steps: jax.Array | None) -> jax.Array:
    if config.dtype in dtypes.SMALL_FLOATS:
        return quantize_affine(x, scale, steps, config.granularity, config.dtype, scale.dtype)
    # 16 bits hold the codes of every integer dtype but one, and no loop has to pack them.
    carrier = config.dtype if config.dtype == jnp.uint16 else np.dtype(jnp.int16)
    bounds = config.bounds or dtypes.find_bounds(config.dtype)
    codes = quantize_affine(x, scale, steps, config.granularity, carrier, scale.dtype, bounds=bounds)
    return codes.astype(jnp.int32)


def _sum_to_part(granularity: Granularity, values: jax.Array, like: jax.Array) -> jax.Array:
    """Returns float32 values summed over each scale's elements, in the shape and dtype of `like`."""
    return sum_to_scale(granularity, values, like).astype(like.dtype)
