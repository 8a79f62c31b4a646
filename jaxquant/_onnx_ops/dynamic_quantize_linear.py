"""ONNX DynamicQuantizeLinear-11, also for int8 and with a scale for each index of an axis."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import ArrayLike, DTypeLike

from .._core import checks, dtypes, entry_point, recording
from .._core.entry_point import compile_entry_point
from .._core.granularity import Granularity, PerAxis, PerTensor, find_reduced_axes, find_slices
from .._core.sharding import place_like
from .._kernels import barriers, division, min_max, rounding
from .._kernels.affine import quantize_affine, sum_to_scale
from . import toolkit_attributes

_NAME = "dynamic_quantize_linear"
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
    range of subnormal numbers, which XLA:CPU treats as 0. For any other range whose scale would be subnormal (below
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
        specified_outputs_name=toolkit_attributes.read_names(_NAME, specified_outputs_name, 3),
    )  # fmt: skip


@compile_entry_point(_NAME)
def _dynamic_quantize_linear(
    x: jax.Array, *,
    dtype: Any, axis: int | None, training: bool, lda_coeff: float, name: str | None,
    specified_outputs_name: tuple[str, ...],
) -> DynamicQuantizeLinearOutput:  # fmt: skip
    dtype, granularity = check_dynamic(_NAME, x, dtype, axis)
    toolkit_attributes.check_attributes(_NAME, training, lda_coeff, name)
    config = _Config(granularity, dtype, bool(training), float(lda_coeff))
    with toolkit_attributes.name_scope(name):
        outputs = toolkit_attributes.name_outputs(_dynamic_quantize(config, x), specified_outputs_name)
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
    _, _, scale, zero_point = find_dynamic_range(x, config.granularity, config.dtype)
    return encode_dynamic(x, scale, zero_point, config.granularity), scale, zero_point


def _dynamic_quantize_fwd(config: _Config, x: jax.Array) -> tuple[_Outputs, Any]:
    toolkit_attributes.refuse_backward(_NAME, config.training)
    x = jnp.asarray(x)
    low, high, scale, zero_point = find_dynamic_range(x, config.granularity, config.dtype)
    return (encode_dynamic(x, scale, zero_point, config.granularity), scale, zero_point), (x, low, high)


def _dynamic_quantize_bwd(config: _Config, residuals: Any, g: _Outputs) -> tuple[jax.Array]:
    granularity = config.granularity
    x, low, high = map(jnp.asarray, residuals)
    qmin, qmax = dtypes.find_narrow_bounds(config.dtype)
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


def _find_range_parts(x: jax.Array, granularity: Granularity, dtype: np.dtype) -> list[Any]:
    axes = find_reduced_axes(granularity, x.ndim)
    shape = tuple(n for axis, n in enumerate(x.shape) if axis not in axes)
    return [(shape, part) for part in (jnp.float32, jnp.float32, jnp.float32, dtype)]


def _batch_range(_: Any, x: jax.Array, granularity: Granularity, dtype: np.dtype) -> Any:
    # A range for each entry of a mapped axis is a range for each index of the first axis.
    return find_dynamic_range(x, PerAxis(0), dtype) if isinstance(granularity, PerTensor) else None


@recording.mark("dynamic_range", _find_range_parts, _batch_range)
def find_dynamic_range(
    x: jax.Array, granularity: Granularity, dtype: np.dtype
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return (low, high, scale, zero_point) of x, where [low, high] is its range extended to 0."""
    axes = find_reduced_axes(granularity, x.ndim)
    low, high = min_max.find_min_max(x, axes)
    qmin, qmax = dtypes.find_narrow_bounds(dtype)
    width = high - low
    # The divisor is an array, because `divide` takes operands of one shape.
    steps = place_like(jnp.full(width.shape, qmax - qmin, jnp.float32), width)
    scale = division.divide(width, steps)
    # XLA:CPU treats subnormal numbers as 0. A maximum in place of the comparison could lose a NaN.
    scale = jnp.where(scale < _TINY, _TINY, scale)
    # XLA:CPU treats a range of subnormal numbers as (0, 0), for which ONNX Runtime uses scale 1.
    scale = jnp.where((high < _TINY) & (low > -_TINY), np.float32(1), scale)
    # From low, as in ONNX Runtime: qmax - high / scale rounds to another zero point in some tensors.
    start = np.float32(qmin) - division.divide(low, scale)
    # ONNX Runtime's clamp turns a NaN into the upper bound.
    start = jnp.where(jnp.isnan(start), np.float32(qmax), start)
    zero_point = rounding.encode_steps(start, None, dtype, (qmin, qmax))
    return low, high, *barriers.compute_once((scale, zero_point))


def encode_dynamic(x: jax.Array, scale: jax.Array, zero_point: jax.Array, granularity: Granularity) -> jax.Array:
    """Return the codes of x for a scale and zero point of `find_dynamic_range`."""
    bounds = dtypes.find_narrow_bounds(zero_point.dtype)
    return quantize_affine(x, scale, zero_point, granularity, zero_point.dtype, dtypes.FLOAT32, bounds=bounds)


def check_dynamic(function: str, x: jax.Array, dtype: Any, axis: int | None) -> tuple[np.dtype, Granularity]:
    """Check the arguments of a dynamic ONNX operator, and return the dtype and the granularity of its codes."""
    checks.check_array(function, "x", x, (dtypes.FLOAT32,))
    code_dtype = checks.check_dtype(function, "dtype", dtype, DTYPES)
    return code_dtype, find_slices(function, axis, x.shape)
