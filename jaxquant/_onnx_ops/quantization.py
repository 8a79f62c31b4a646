"""ONNX QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import ArrayLike, DTypeLike

from .._core import checks, dtypes, entry_point, recording
from .._core.entry_point import (
    check_float_zero_point,
    compile_entry_point,
    convert_scale_number,
    convert_zero_point_number,
    fit_number,
)
from .._core.granularity import (
    Granularity,
    PerAxis,
    PerTensor,
    check_matching,
    list_reduced_axes,
    resolve_axis,
    resolve_onnx,
)
from .._core.sharding import place_like
from .._kernels import affine, barriers, min_max
from .._kernels.affine import dequantize_affine, quantize_affine, sum_to_scale

# ONNX QuantizeLinear, versions 10 to 28.


_QUANTIZE_LINEAR = "quantize_linear"
_X = (*dtypes.FLOATS, dtypes.INT32)
_SCALE = (*dtypes.FLOATS, dtypes.INT32, dtypes.E8M0)


def quantize_linear(
    x: ArrayLike,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    saturate: bool = True,
    output_dtype: DTypeLike | None = None,
    precision: DTypeLike | None = None,
) -> jax.Array:
    """Quantize an array with a given scale and zero point, as ONNX's QuantizeLinear does.

    y = saturate(round_half_even(x / y_scale) + y_zero_point).

    The integers are ONNX Runtime's: the quotient is a true division, ties round to even, and the zero point is added
    after rounding. Values out of the dtype's range, infinities included, saturate; NaN becomes the lowest code.
    Division by a scale of 0 gives infinity or NaN, which are then handled in the same way. `fake_quantize_linear`,
    which is not an operator of ONNX, instead raises an error for a scale that is known to be 0, negative or NaN.

    The result has no gradient: integers have none in JAX, and the float8 and float4 results of this operator have none
    either. Use `fake_quantize_linear` in training.

    Args:
        x: values, float32, float16, bfloat16 or int32, of any shape; a Python number becomes float32.
        y_scale: value per step, float32, float16, bfloat16, float8_e8m0fnu, or int32 for an int32 x. Per tensor: a
            scalar or one element. Per axis: 1-D, as long as x's `axis`. With `block_size`: x's shape with
            ceil(length / block_size) in place of the length of `axis`. A Python number takes x's dtype.
        y_zero_point: the code of 0.0, of y_scale's shape and the output's dtype. None means 0. An int is converted to
            `output_dtype` and used for every scale. For a float output it must be 0: a concrete value is checked; a
            traced one is ignored, as in ONNX Runtime.
        axis: Static. The axis that is kept; a negative one counts from the back. Ignored if the scale is per tensor.
        block_size: Static. How many elements along `axis` share a scale; the last block may be shorter. 0 means no
            blocks.
        saturate: Static. For float8 only: whether values out of range, infinities included, become the largest finite
            value (True) or whatever the dtype's own conversion gives (False).
        output_dtype: Static. int2, uint2, int4, uint4, int8, uint8, int16, uint16, one of the four float8 or
            float4_e2m1fn. By default y_zero_point's dtype, or uint8 without a zero point, which saturates negative
            values to 0.
        precision: Static. float32, float16 or bfloat16: the dtype of the division. By default y_scale's dtype, or
            float32 for a float8_e8m0fnu scale. ONNX Runtime always divides float16 in float32:
            `precision=jnp.float32` gives its integers.

    Returns:
        The codes, of x's shape, in the output dtype.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: shapes, axis or block_size do not fit each other, or a float output has a zero point.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([-2.5, -0.5, 0.5, 1.5, 300.0])
        >>> jq.quantize_linear(x, 1.0, 1, output_dtype=jnp.uint8)
        Array([  0,   1,   1,   3, 255], dtype=uint8)
        >>> weights = jnp.array([[-1.27, 0.3], [0.635, 6.0]])  # symmetric int8, one scale per column
        >>> scale = jnp.abs(weights).max(axis=0) / 127
        >>> jq.quantize_linear(weights, scale, axis=1, output_dtype=jnp.int8)
        Array([[-127,    6],
               [  64,  127]], dtype=int8)

    Source: ONNX QuantizeLinear-10, -13, -19, -21, -23, -24, -25, -28; for NaN, which the text leaves open, ONNX
    Runtime's CPU kernel.
    """
    if isinstance(y_scale, int | float):
        y_scale = convert_scale_number(_QUANTIZE_LINEAR, "y_scale", y_scale, x)
    # A numpy scalar that has a dtype of codes keeps it, and the output has the same dtype.
    if isinstance(y_zero_point, int | np.integer) and not checks.has_dtype(y_zero_point, dtypes.QUANTIZED):
        dtype = jnp.uint8 if output_dtype is None else output_dtype
        y_zero_point = convert_zero_point_number(_QUANTIZE_LINEAR, "y_zero_point", y_zero_point, dtype, y_scale)
    if y_zero_point is not None:
        # Before jit: only a concrete zero point can be compared with 0.
        check_float_zero_point(_QUANTIZE_LINEAR, "y_zero_point", y_zero_point)
    return _quantize_linear(
        entry_point.convert_number(x), y_scale, y_zero_point,
        axis=axis, block_size=block_size, saturate=saturate, output_dtype=output_dtype, precision=precision,
    )  # fmt: skip


@compile_entry_point(_QUANTIZE_LINEAR)
def _quantize_linear(
    x: jax.Array, y_scale: jax.Array, y_zero_point: jax.Array | None, *,
    axis: int, block_size: int, saturate: bool, output_dtype: DTypeLike | None, precision: DTypeLike | None,
) -> jax.Array:  # fmt: skip
    checks.check_array(_QUANTIZE_LINEAR, "x", x, _X)
    checks.check_array(_QUANTIZE_LINEAR, "y_scale", y_scale, _SCALE)
    checks.check_flag(_QUANTIZE_LINEAR, "saturate", saturate)
    dtype = _read_output_dtype(y_zero_point, output_dtype)
    quotient_dtype = _choose_precision(x, y_scale, precision)
    # The granularity describes scalar, 1-D and blocked scales in one form for the arithmetic below.
    granularity = resolve_onnx(_QUANTIZE_LINEAR, "y_scale", y_scale, x.shape, axis, block_size)
    if y_zero_point is not None:
        check_matching(_QUANTIZE_LINEAR, "y_zero_point", y_zero_point, y_scale, "y_scale")
    # Without stop_gradient JAX would differentiate the conversion to a float8 or float4 result.
    x, y_scale = jax.lax.stop_gradient((x, y_scale))
    return quantize_affine(x, y_scale, y_zero_point, granularity, dtype, quotient_dtype, bool(saturate))


def _read_output_dtype(zero_point: jax.Array | None, output_dtype: DTypeLike | None) -> np.dtype:
    """Check output_dtype and the dtype of the zero point, and return the dtype of the codes."""
    if zero_point is None:
        dtype = jnp.uint8 if output_dtype is None else output_dtype
        return checks.check_dtype(_QUANTIZE_LINEAR, "output_dtype", dtype, dtypes.QUANTIZED)
    checks.check_array(_QUANTIZE_LINEAR, "y_zero_point", zero_point, dtypes.QUANTIZED)
    if output_dtype is not None:
        dtype = checks.check_dtype(_QUANTIZE_LINEAR, "output_dtype", output_dtype, dtypes.QUANTIZED)
        checks.check_same_dtype(_QUANTIZE_LINEAR, "y_zero_point", zero_point, dtype, "output_dtype")
    return zero_point.dtype


def _choose_precision(x: jax.Array, scale: jax.Array, precision: DTypeLike | None) -> np.dtype:
    """Check precision and return the dtype of the division."""
    if precision is not None:
        return checks.check_dtype(_QUANTIZE_LINEAR, "precision", precision, dtypes.FLOATS)
    if scale.dtype == dtypes.INT32:
        expected = "a float dtype, or precision=, because only an int32 x is divided in int32, the dtype of y_scale"
        checks.require_type(
            x.dtype == dtypes.INT32, _QUANTIZE_LINEAR, "y_scale", expected, f"int32 with x of {x.dtype}"
        )
    # float8_e8m0fnu has only powers of two, which few quotients are.
    return dtypes.FLOAT32 if scale.dtype == dtypes.E8M0 else scale.dtype


# ONNX DequantizeLinear, versions 10 to 28.


_DEQUANTIZE_LINEAR = "dequantize_linear"
_CODES = (*dtypes.QUANTIZED, dtypes.INT32)
_CODES_SCALE = (*dtypes.FLOATS, dtypes.E8M0)


def dequantize_linear(
    x: ArrayLike,
    x_scale: ArrayLike,
    x_zero_point: ArrayLike | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Dequantize codes with their scale and zero point, as ONNX's DequantizeLinear does.

    y = (x - x_zero_point) * x_scale.

    The difference is exact; the product is computed in float32 and rounded to the output dtype once, as in ONNX Runtime
    and in ONNX's reference. If an addition follows, the product stays rounded: XLA cannot fuse the two into one
    operation. An int32 x is rounded to float32 first, and its difference wraps around.

    Args:
        x: codes of any shape: int2, uint2, int4, uint4, int8, uint8, int16, uint16, int32, one of the four float8
            or float4_e2m1fn.
        x_scale: value per step, float32, float16, bfloat16, or float8_e8m0fnu together with an `output_dtype`. Per
            tensor: a scalar or one element. Per axis: 1-D, as long as x's `axis`. With `block_size`: x's shape with
            ceil(length / block_size) in place of the length of `axis`. A Python number becomes float32.
        x_zero_point: the code of 0.0, of x_scale's shape and x's dtype. None means 0. An int is converted to x's dtype
            and used for every scale. For a float x it must be 0: a concrete value is checked; a traced one is ignored.
        axis: Static. The axis that is kept; a negative one counts from the back. Ignored if the scale is per tensor.
        block_size: Static. How many elements along `axis` share a scale; the last block may be shorter. 0 means no
            blocks.
        output_dtype: Static. float32, float16 or bfloat16; by default x_scale's dtype.

    Returns:
        The values, of x's shape, in the output dtype.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: shapes, axis or block_size do not fit each other, or a float x has a zero point.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> jq.dequantize_linear(jnp.array([0, 1, 255], jnp.uint8), 0.5, 1)
        Array([ -0.5,   0. , 127. ], dtype=float32)
        >>> scale = jnp.array([[0.5, 4.0]], jnp.bfloat16)
        >>> jq.dequantize_linear(jnp.array([[-8, 7, 7]], jnp.int4), scale, block_size=2)
        Array([[-4, 3.5, 28]], dtype=bfloat16)

    Source: ONNX DequantizeLinear-10, -13, -19, -21, -23, -24, -25, -28.

    Cotangent of x_scale: g * (x - x_zero_point), summed over the elements that share the scale. Of a float x:
    g * x_scale. Integers have none.
    """
    if isinstance(x_scale, int | float):
        x_scale = convert_scale_number(_DEQUANTIZE_LINEAR, "x_scale", x_scale, None)
    # A numpy scalar that has a dtype of codes keeps it, and must match x. Other integers take the dtype of x.
    if isinstance(x_zero_point, int | np.integer) and not checks.has_dtype(x_zero_point, _CODES):
        x_zero_point = _convert_zero_point_number(x_zero_point, x, x_scale)
    if x_zero_point is not None:
        # Before jit: only a concrete zero point can be compared with 0.
        check_float_zero_point(_DEQUANTIZE_LINEAR, "x_zero_point", x_zero_point)
    return _dequantize_linear(x, x_scale, x_zero_point, axis=axis, block_size=block_size, output_dtype=output_dtype)


@compile_entry_point(_DEQUANTIZE_LINEAR)
def _dequantize_linear(
    x: jax.Array, x_scale: jax.Array, x_zero_point: jax.Array | None, *,
    axis: int, block_size: int, output_dtype: DTypeLike | None,
) -> jax.Array:  # fmt: skip
    checks.check_array(_DEQUANTIZE_LINEAR, "x", x, _CODES)
    checks.check_array(_DEQUANTIZE_LINEAR, "x_scale", x_scale, _CODES_SCALE)
    if output_dtype is None:
        expected = "an output_dtype with it, because float8_e8m0fnu has only powers of two"
        checks.require_type(
            x_scale.dtype != dtypes.E8M0, _DEQUANTIZE_LINEAR, "x_scale", expected, "float8_e8m0fnu alone"
        )
        output_dtype = x_scale.dtype
    dtype = checks.check_dtype(_DEQUANTIZE_LINEAR, "output_dtype", output_dtype, dtypes.FLOATS)
    # The granularity describes scalar, 1-D and blocked scales in one form for the arithmetic below.
    granularity = resolve_onnx(_DEQUANTIZE_LINEAR, "x_scale", x_scale, x.shape, axis, block_size)
    if x_zero_point is not None:
        checks.check_same_dtype(_DEQUANTIZE_LINEAR, "x_zero_point", x_zero_point, x.dtype, "x's")
        check_matching(_DEQUANTIZE_LINEAR, "x_zero_point", x_zero_point, x_scale, "x_scale")
    return dequantize_affine(x, x_scale, x_zero_point, granularity, dtype)


def _convert_zero_point_number(value: Any, x: object, scale: Any) -> Any:
    """Return an int as a zero point of x's dtype and scale's shape."""
    checks.check_integer(_DEQUANTIZE_LINEAR, "x_zero_point", value)
    dtype: Any = getattr(x, "dtype", None)
    if dtype not in _CODES:  # the check of x raises
        return value
    return np.full(np.shape(scale), fit_number(_DEQUANTIZE_LINEAR, "x_zero_point", int(value), dtype))


# ONNX DynamicQuantizeLinear-11, also for int8 and with a scale for each index of an axis.


_DYNAMIC_QUANTIZE_LINEAR = "dynamic_quantize_linear"
_TINY = np.finfo(np.float32).tiny
DTYPES = (np.dtype(jnp.uint8), np.dtype(jnp.int8))


class DynamicQuantizeLinearOutput(NamedTuple):
    """The outputs of `dynamic_quantize_linear`, under ONNX's names."""

    y: jax.Array
    y_scale: jax.Array
    y_zero_point: jax.Array


# Without a registered name jax.export refuses to save a program that returns this class.
export.register_namedtuple_serialization(
    DynamicQuantizeLinearOutput, serialized_name="jaxquant.DynamicQuantizeLinearOutput"
)


def dynamic_quantize_linear(
    x: ArrayLike,
    *,
    dtype: DTypeLike = jnp.uint8,
    axis: int | None = None,
    training: bool = True,
    lda_coeff: float = 1.0,
    name: str | None = None,
    specified_outputs_name: Sequence[str] | None = None,
) -> DynamicQuantizeLinearOutput:
    """Quantize an array with a scale and zero point computed from its range, as ONNX's DynamicQuantizeLinear does.

    y_scale = (max(x, 0) - min(x, 0)) / (qmax - qmin),
    y_zero_point = round_half_even(saturate(qmin - min(x, 0) / y_scale)),
    y = saturate(round_half_even(x / y_scale) + y_zero_point).

    The float32 operations are done in ONNX Runtime's order. For int8 the range [qmin, qmax] is [-127, 127], as in the
    ONNX text.

    For a range of zero (all zeros, or no elements), y_scale is 1, and y_zero_point and y are qmin. The same holds for a
    range of subnormal numbers, which XLA:CPU treats as 0. For any other range with a subnormal scale (below
    3e-36), y_scale is the least normal float32, 2**-126, from which y and y_zero_point follow; ONNX Runtime returns the
    subnormal y_scale instead. An infinity in x makes y_scale infinite. With a NaN in x, y_scale is NaN, y_zero_point is
    qmax and y is qmin. Any other x for which min(x, 0) / y_scale is NaN, -inf for example, also has y_zero_point qmax.

    Args:
        x: values, float32, of any shape; a Python number becomes float32.
        dtype: Static. uint8 or int8.
        axis: Static. None gives one scale for the whole of x. Otherwise the axis that is kept; a negative one counts
            from the back. Each index of it has a scale and a zero point, computed from its own slice.
        training: Static. False stores nothing for the backward pass; differentiating then raises an error.
        lda_coeff: Static. A factor of the gradient with respect to x; 0 stops it, -1 reverses it.
        name: Static. A name for the operation in the lowered program, as with `jax.named_scope`.
        specified_outputs_name: Static. Names for the three outputs in a model that `jaxquant.onnx.export` writes. None
            or an empty list leaves them to the exporter.

    Returns:
        y: the codes, of x's shape, in `dtype`.
        y_scale: value per step, float32, of shape () or as long as `axis`. `dequantize_linear` must be called with the
            same axis; its default is 1.
        y_zero_point: the code of 0.0, in `dtype`, of y_scale's shape.

    Raises:
        TypeError: x is not float32, dtype is neither uint8 nor int8, or a static argument has a wrong type.
        ValueError: axis is out of range, or the call is differentiated with training=False.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> y, y_scale, y_zero_point = jq.dynamic_quantize_linear(jnp.array([-10.0, 3.4, 10.0]))
        >>> y, y_zero_point  # with a reciprocal in place of the division the zero point would be 128
        (Array([  0, 170, 254], dtype=uint8), Array(127, dtype=uint8))
        >>> jq.dynamic_quantize_linear(jnp.array([[-1.0, 1.0], [0.0, 2.0]]), dtype=jnp.int8, axis=0).y
        Array([[-127,  127],
               [-127,  127]], dtype=int8)

    Source: ONNX DynamicQuantizeLinear-11; training, lda_coeff, name and specified_outputs_name from the node
    of Graiphic's Deep Learning Toolkit for LabVIEW.

    Cotangent of x, where g is the cotangent of y_scale: lda_coeff * g / (qmax - qmin) at the largest element if it is
    positive, and minus that at the smallest element if it is negative; several equal extremes share it in equal parts.
    y and y_zero_point are integers and have no gradient.
    """
    return _dynamic_quantize_linear(
        entry_point.convert_number(x), dtype=dtype, axis=axis, training=training, lda_coeff=lda_coeff, name=name,
        specified_outputs_name=read_output_names(_DYNAMIC_QUANTIZE_LINEAR, specified_outputs_name, 3),
    )  # fmt: skip


@compile_entry_point(_DYNAMIC_QUANTIZE_LINEAR)
def _dynamic_quantize_linear(
    x: jax.Array, *,
    dtype: DTypeLike, axis: int | None, training: bool, lda_coeff: float, name: str | None,
    specified_outputs_name: tuple[str, ...],
) -> DynamicQuantizeLinearOutput:  # fmt: skip
    dtype, granularity = check_dynamic(_DYNAMIC_QUANTIZE_LINEAR, x, dtype, axis)
    check_toolkit_attributes(_DYNAMIC_QUANTIZE_LINEAR, training, lda_coeff, name)
    config = _Config(granularity, dtype, bool(training), float(lda_coeff))
    with name_scope(name):
        outputs = name_outputs(_dynamic_quantize(config, x), specified_outputs_name)
        return DynamicQuantizeLinearOutput._make(outputs)


class _Config(NamedTuple):
    granularity: Granularity
    dtype: np.dtype
    training: bool
    lda_coeff: float


_Outputs = tuple[jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dynamic_quantize(config: _Config, x: jax.Array) -> _Outputs:
    # An inlined jit can pass a Python number through unchanged.
    x = jnp.asarray(x)
    _, _, scale, zero_point = compute_dynamic_range(x, config.granularity, config.dtype)
    return encode_dynamic(x, scale, zero_point, config.granularity), scale, zero_point


def _dynamic_quantize_fwd(config: _Config, x: jax.Array) -> tuple[_Outputs, Any]:
    checks.refuse_backward(_DYNAMIC_QUANTIZE_LINEAR, config.training)
    x = jnp.asarray(x)
    low, high, scale, zero_point = compute_dynamic_range(x, config.granularity, config.dtype)
    return (encode_dynamic(x, scale, zero_point, config.granularity), scale, zero_point), (x, low, high)


def _dynamic_quantize_bwd(config: _Config, residuals: Any, g: _Outputs) -> tuple[jax.Array]:
    granularity = config.granularity
    x, low, high = map(jnp.asarray, residuals)
    qmin, qmax = dtypes.derive_narrow_bounds(config.dtype)
    # An end of the range that is 0 does not depend on x: the range always includes 0.
    upper = _share_gradient(x, high, granularity, high <= 0)
    lower = _share_gradient(x, low, granularity, low >= 0)
    slope = granularity.expand(g[1], x) * np.float32(config.lda_coeff / (qmax - qmin))
    return (slope * (upper - lower),)


_dynamic_quantize.defvjp(_dynamic_quantize_fwd, _dynamic_quantize_bwd)


def _share_gradient(x: jax.Array, extreme: jax.Array, granularity: Granularity, is_zero: jax.Array) -> jax.Array:
    """Return each element's share of the gradient of an extreme: 1 / n for the n elements equal to it; 0 if it is 0."""
    equal = (x == granularity.expand(extreme, x)).astype(jnp.float32)
    share = equal / granularity.expand(sum_to_scale(granularity, equal, extreme), x)
    share = jnp.where(granularity.expand(is_zero, x), np.float32(0), share)
    # XLA may turn the product with a mask into a select, which loses the NaN.
    return jnp.where(granularity.expand(jnp.isnan(extreme), x), np.float32(np.nan), share)


def _list_range_parts(x: jax.Array, granularity: Granularity, dtype: np.dtype) -> list[Any]:
    axes = list_reduced_axes(granularity, x.ndim)
    shape = tuple(n for axis, n in enumerate(x.shape) if axis not in axes)
    return [(shape, part) for part in (jnp.float32, jnp.float32, jnp.float32, dtype)]


def _batch_range(_: object, x: jax.Array, granularity: Granularity, dtype: np.dtype) -> Any:
    # A range for each entry of a mapped axis is a range for each index of the first axis.
    return compute_dynamic_range(x, PerAxis(0), dtype) if isinstance(granularity, PerTensor) else None


@recording.mark("dynamic_range", _list_range_parts, _batch_range)
def compute_dynamic_range(
    x: jax.Array, granularity: Granularity, dtype: np.dtype
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return (low, high, scale, zero_point) of x, where [low, high] is its range extended to 0."""
    axes = list_reduced_axes(granularity, x.ndim)
    low, high = min_max.compute_min_max(x, axes)
    qmin, qmax = dtypes.derive_narrow_bounds(dtype)
    width = high - low
    # The divisor is an array, because `divide` takes operands of one shape.
    steps = place_like(jnp.full(width.shape, qmax - qmin, jnp.float32), width)
    scale = affine.divide(width, steps)
    # XLA:CPU treats subnormal numbers as 0. A maximum in place of the comparison could lose a NaN.
    scale = jnp.where(scale < _TINY, _TINY, scale)
    # XLA:CPU treats a range of subnormal numbers as (0, 0), for which ONNX Runtime uses scale 1.
    scale = jnp.where((high < _TINY) & (low > -_TINY), np.float32(1), scale)
    # From low, as in ONNX Runtime: qmax - high / scale rounds to another zero point in some tensors.
    start = np.float32(qmin) - affine.divide(low, scale)
    # ONNX Runtime's clamp turns a NaN into the upper bound.
    start = jnp.where(jnp.isnan(start), np.float32(qmax), start)
    zero_point = affine.encode_steps(start, None, dtype, (qmin, qmax))
    return low, high, *barriers.compute_once((scale, zero_point))


def encode_dynamic(x: jax.Array, scale: jax.Array, zero_point: jax.Array, granularity: Granularity) -> jax.Array:
    """Return the codes of x for a scale and zero point of `compute_dynamic_range`."""
    bounds = dtypes.derive_narrow_bounds(zero_point.dtype)
    return quantize_affine(x, scale, zero_point, granularity, zero_point.dtype, dtypes.FLOAT32, bounds=bounds)


def check_dynamic(function: str, x: jax.Array, dtype: DTypeLike, axis: int | None) -> tuple[np.dtype, Granularity]:
    """Check the arguments of a dynamic ONNX operator, and return the dtype and the granularity of its codes."""
    checks.check_array(function, "x", x, (dtypes.FLOAT32,))
    code_dtype = checks.check_dtype(function, "dtype", dtype, DTYPES)
    return code_dtype, resolve_axis(function, axis, x.shape)


# The parameters of the LabVIEW toolkit's node that ONNX does not have; three operators accept them.


def check_toolkit_attributes(function: str, training: bool, lda_coeff: float, name: str | None) -> None:
    """Raise unless the parameters of the toolkit's node have the right types and values."""
    checks.check_flag(function, "training", training)
    checks.check_real(function, "lda_coeff", lda_coeff)
    checks.check_name(function, name)


def name_scope(name: str | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which JAX names the operations, or one that does nothing if the name is None."""
    return contextlib.nullcontext() if name is None else jax.named_scope(name)


def read_output_names(function: str, names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """Return `specified_outputs_name` as a tuple; raise unless it has a name for each output, or is empty or None."""
    names = () if names is None else names
    argument, expected = "specified_outputs_name", f"{count} distinct names, one for each output, or None"
    is_sequence = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    checks.require_type(is_sequence, function, argument, expected, repr(names))
    is_valid = not names or (len(names) == len(set(names)) == count and all(names))
    checks.require(is_valid, function, argument, expected, repr(names))
    return tuple(names)


def name_outputs(outputs: Sequence[jax.Array], names: tuple[str, ...]) -> tuple[jax.Array, ...]:
    """Return the outputs of an operator, which an exporter gives these names."""
    # Only an exporter reads the names.
    if not names or not recording.is_recording():
        return tuple(outputs)
    return tuple(_name_output(x, name) for x, name in zip(outputs, names, strict=True))


@recording.mark("name_output", lambda x, name: (x.shape, x.dtype), recording.map_elements)
def _name_output(x: jax.Array, name: str) -> jax.Array:
    return x
