"""`jax.lax.conv_general_dilated` of quantized arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._arrays.quantized_array import QuantizedArray, dequantize_checked, unpack_checked
from .._core import checks, dtypes, granularity, recording, sharding
from .._kernels import accumulator, affine, barriers, contraction, signed_codes
from .._kernels.convolution import ConvolutionPlan, arrange_layout
from ..integer import plan_convolution
from . import dot_integer
from .dot import Operand, check_operand
from .output import Epilogue, ScaledSpec, read_epilogue

_NAME = "conv_general_dilated"


def conv_general_dilated(
    lhs: Operand,
    rhs: Operand,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    bias: ArrayLike | None = None,
    output: ScaledSpec | QuantizedArray | None = None,
) -> Any:
    """Convolve two arrays, at least one of them quantized, as `jax.lax.conv_general_dilated` does.

    out = convolution of lhs with rhs.

    If both operands are quantized, this is an integer convolution. acc, the convolution of lhs.codes - lhs.zero_point
    with rhs.codes - rhs.zero_point, is exact in int32, and out = float32(acc) * (lhs.scale * rhs.scale), each product
    rounded once. Padding, and the gaps that `lhs_dilation` makes, count as the real number 0. Operands that cannot be
    convolved in integers raise an error.

    With a bias of integers, out = float32(acc + bias) * (lhs.scale * rhs.scale). With an output, the result is a
    QuantizedArray, and no float tensor lies in between: its codes are
    saturate(round_half_even(float32(acc + bias) * (lhs.scale * rhs.scale / scale)) + zero_point), as in ONNX's
    QLinearConv. acc + bias wraps around.

    If one operand is a float array (weight-only), the other one is dequantized as a whole, and both are convolved in
    float32.

    Args:
        lhs: a QuantizedArray, or an array of float32, float16 or bfloat16, of rank 3 or more. If rhs is quantized too,
            lhs has one scale and one zero point, or one for each image; with groups of images, one zero point.
        rhs: the kernel, of the same types; at least one of the two is a QuantizedArray. If lhs is quantized too, rhs
            has one scale and one zero point, or one for each output feature or each block of output features.
        window_strides: Static. One stride for each spatial dimension.
        padding: Static. "SAME", "SAME_LOWER", "VALID", or (low, high) for each spatial dimension; negative values crop.
        lhs_dilation: Static. The step between neighboring elements of lhs; None means 1.
        rhs_dilation: Static. The step between neighboring elements of the kernel; None means 1.
        dimension_numbers: Static. As in `jax.lax`; None means (NCHW, OIHW, NCHW), with as many spatial dimensions as
            lhs has.
        feature_group_count: Static. The number of groups of channels that are convolved separately.
        batch_group_count: Static. The number of groups of images, each convolved with its own output features.
        precision: Static. As in `jax.lax`, for a float convolution; an integer convolution ignores it.
        preferred_element_type: Static. float32, float16 or bfloat16: the dtype of the result. By default the dtype of
            the operands, or float32 if they differ.
        bias: int32, in steps of lhs.scale * rhs.scale, one for each output feature, if both operands are quantized.
            None means 0.
        output: how the result is quantized, if both operands are: a `Quantizer` with a scale; a QuantizedArray
            that gives its scale and zero point to the result; or None for a float result.

    Returns:
        The convolution, in the layout of the dimension numbers: an array of floats, or with `output` a QuantizedArray.

    Raises:
        TypeError: neither operand is quantized, or an operand has an unsupported dtype. int16, float8, float4 and
            codebooks cannot be convolved in integers.
        ValueError: shapes, windows, groups or dimension numbers do not fit each other; a scale or zero point varies
            along a dimension that is summed; or an output sums so many products of two codes that int32 could overflow.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jq.quantize(jnp.array([[[-16.0, 0.125, 1.0, 47.75]]]), jq.QuantSpec(jnp.uint8))  # 0.125 is half a step
        >>> w = jq.quantize(jnp.array([[[127.0, 1.0]], [[-63.5, 0.25]]]), jq.QuantSpec(jnp.int8, jq.PerAxis(0)))
        >>> x.codes, w.codes  # 0.25 is half a step of the second feature
        (Array([[[  0,  64,  68, 255]]], dtype=uint8), Array([[[ 127,    1]],
               [[-127,    0]]], dtype=int8))
        >>> jq.conv_general_dilated(x, w, (1,), [(0, 1)]).tolist()  # padded with zeros
        [[[-2032.0, 1.0, 174.75, 6064.25], [1016.0, 0.0, -63.5, -3032.125]]]
        >>> jq.conv_general_dilated(jnp.ones((1, 1, 2)), w, (1,), "VALID")  # weight-only
        Array([[[128. ],
                [-63.5]]], dtype=float32)

        >>> output = jq.Quantizer(jq.QuantSpec(jnp.uint8), 16.0, 64)
        >>> jq.conv_general_dilated(x, w, (1,), "VALID", bias=jnp.array([0, 8]), output=output).codes.tolist()
        [[[0, 64, 75], [128, 64, 60]]]

    Source: `jax.lax.conv_general_dilated`; the arithmetic follows ONNX ConvInteger-10 and QLinearConv-10.

    Cotangent of a float operand: as in the convolution with the other operand dequantized. Of a scale: g * acc times
    the other scale, or, if weight-only, the cotangent of the dequantized operand, summed over the elements that
    share the scale. Codes and zero points have none.
    """
    x, w = check_operand(_NAME, "lhs", lhs), check_operand(_NAME, "rhs", rhs)
    if preferred_element_type is not None:
        preferred_element_type = checks.check_dtype(
            _NAME, "preferred_element_type", preferred_element_type, dtypes.FLOATS
        )
    checks.check_precision(_NAME, precision, has_algorithms=False)
    plan = plan_array_convolution(
        _NAME, x, w, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
        batch_group_count,
    )  # fmt: skip
    epilogue = read_epilogue(_NAME, bias, output, preferred_element_type, (x, w))
    if bias is not None and epilogue is not None:
        features = w.shape[plan.numbers.rhs_spec[0]]
        checks.check_shape(_NAME, "bias", epilogue.bias, (features,), "one for each output feature")
    return convolve_checked(_NAME, x, w, plan, precision, preferred_element_type, epilogue)


def plan_array_convolution(
    function: str, lhs: Any, rhs: Any, window_strides: Sequence[int], padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None, rhs_dilation: Sequence[int] | None, dimension_numbers: Any,
    feature_group_count: int, batch_group_count: int,
) -> ConvolutionPlan:  # fmt: skip
    """Check the static arguments of a convolution and return its plan."""
    # Check before jit: its cache of compiled programs cannot tell True, 1 and 1.0 apart.
    ints = functools.partial(checks.check_integers, function)
    return plan_convolution(
        function, lhs, rhs, ints("window_strides", window_strides), ints("padding", padding),
        ints("lhs_dilation", lhs_dilation), ints("rhs_dilation", rhs_dilation), dimension_numbers,
        ints("feature_group_count", feature_group_count), ints("batch_group_count", batch_group_count),
    )  # fmt: skip


def convolve_checked(
    function: str,
    x: Any,
    w: Any,
    plan: ConvolutionPlan,
    precision: lax.PrecisionLike,
    preferred: DTypeLike | None,
    epilogue: Epilogue | None = None,
) -> Any:
    """Return the `conv_general_dilated` of two checked operands, with errors that name `function`."""
    quantized = [isinstance(v, QuantizedArray) for v in (x, w)]
    if not any(quantized):
        got = f"{checks.describe_value(x)} and {checks.describe_value(w)}"
        checks.refuse_type(function, "lhs, rhs", "a QuantizedArray on at least one side", got)
    dtype = preferred or dtypes.choose_wider(x.dtype, w.dtype)
    x, w = (unpack_checked(v) if isinstance(v, QuantizedArray) else v for v in (x, w))
    if not all(quantized):
        return _convolve_weight_only(x, w, plan=plan, precision=precision, dtype=dtype)
    _check_integers(function, x, w, plan)
    y = _convolve_integers(x, w, epilogue, plan=plan, dtype=dtype)
    return y if epilogue is None else epilogue.wrap(y, dtype)


def convolve_floats(lhs: jax.Array, rhs: jax.Array, plan: ConvolutionPlan, precision: lax.PrecisionLike) -> jax.Array:
    """Return the convolution of two float arrays."""
    geometry = plan.geometry
    return lax.conv_general_dilated(
        lhs, rhs, geometry.strides, geometry.padding, geometry.lhs_dilation, geometry.rhs_dilation, plan.numbers,
        feature_group_count=plan.features, batch_group_count=plan.batches, precision=precision,
    )  # fmt: skip


def _check_integers(function: str, lhs: QuantizedArray, rhs: QuantizedArray, plan: ConvolutionPlan) -> None:
    """Check that two arrays convolve as integers: no scale or zero point varies along a dimension that is summed."""
    # Only the batch of lhs and the features of rhs are not summed.
    image, feature = plan.numbers.lhs_spec[0], plan.numbers.rhs_spec[0]
    for argument, q, kept, kept_name in (
        ("lhs", lhs, {"scale": image} if plan.batches > 1 else {"scale": image, "zero_point": image}, "image"),
        ("rhs", rhs, {"scale": feature, "zero_point": feature}, "output feature"),
    ):
        dot_integer.check_integer_array(function, argument, q)
        for name in ("scale", "zero_point"):
            part, axis = getattr(q, name), kept.get(name)
            if part is None or all(n == 1 for a, n in enumerate(part.shape) if a != axis):
                continue
            expected = f"one {name}, " + (f"or one for each {kept_name}, " if name in kept else "")
            got = f"shape {part.shape} for codes of shape {q.shape}"
            checks.refuse(function, f"{argument}.{name}", f"{expected}or {argument}.dequantize()", got)
    terms, limit = math.prod(rhs.shape) // max(rhs.shape[feature], 1), dot_integer.count_exact_terms(lhs, rhs)
    expected = f"a sum of at most {limit} products of two codes, which int32 can hold, or rhs.dequantize()"
    checks.require(terms <= limit, function, "rhs", expected, terms)


@functools.partial(jax.jit, inline=True, static_argnames=("plan", "precision", "dtype"))
def _convolve_weight_only(
    lhs: QuantizedArray | jax.Array, rhs: QuantizedArray | jax.Array, *, plan: ConvolutionPlan,
    precision: lax.PrecisionLike, dtype: np.dtype,
) -> jax.Array:  # fmt: skip
    # Convolve in float32, so that a 16-bit result is rounded only once, at the end.
    lhs, rhs = (
        dequantize_checked(x.astype(jnp.float32)) if isinstance(x, QuantizedArray) else x.astype(jnp.float32)
        for x in (lhs, rhs)
    )
    y = convolve_floats(lhs, rhs, plan, precision)
    return affine.round_to_dtype(y, dtype).astype(dtype)


@functools.partial(jax.jit, static_argnames=("plan", "dtype"))
def _convolve_integers(
    lhs: QuantizedArray, rhs: QuantizedArray, epilogue: Epilogue | None, *, plan: ConvolutionPlan, dtype: np.dtype
) -> jax.Array:
    features = rhs.shape[plan.numbers.rhs_spec[0]]
    lhs_scale, rhs_scale = (dtypes.scale_as_float32(q.scale) for q in (lhs, rhs))
    images = _read_entries(lhs, lhs_scale, plan.numbers.lhs_spec[0]).reshape(-1, 1)
    # Each group of images has its own features, so the scale that applies to an image depends on the feature.
    if plan.batches > 1 and images.size > 1:
        images = jnp.repeat(images.reshape(plan.batches, -1).T, features // plan.batches, axis=1)
    kernels = _read_entries(rhs, rhs_scale, plan.numbers.rhs_spec[0]).reshape(1, -1)
    zero_points = [
        None if q.zero_point is None else _read_entries(q, q.zero_point, spec[0])
        for q, spec in ((lhs, plan.numbers.lhs_spec), (rhs, plan.numbers.rhs_spec))
    ]
    codes, correction = lhs.codes, None
    if zero_points[0] is not None and zero_points[0].size != 1:
        codes, zero_points[0], correction, plan = _move_zero_points(lhs, zero_points[0], rhs, zero_points[1], plan)
    lhs_center, rhs_center = (
        signed_codes.derive_center(zero_point, q.codes.dtype, signed_codes.is_centred(zero_point, q.codes.dtype))
        for zero_point, q in zip(zero_points, (lhs, rhs), strict=True)
    )

    def finish(acc: jax.Array, axis: int) -> jax.Array:
        # The kernel chooses the layout of acc: dimension 0 counts the images, dimension `axis` the features.
        def spread(part: jax.Array) -> jax.Array:
            # A vector has an entry for each feature. Scales that are spread already have the shape of acc.
            if part.ndim > 2 and part.shape == acc.shape:
                return part
            return sharding.place_like(lax.broadcast_in_dim(part, acc.shape, (0, axis)[-part.ndim :]), acc)

        if correction is not None:
            acc = acc - spread(correction)
        if epilogue is not None:
            return epilogue.finish(acc, images, kernels, spread, axis)
        y = barriers.round_result(acc.astype(jnp.float32) * spread(accumulator.multiply_scales(images, kernels)))
        return affine.round_to_dtype(y, dtype).astype(dtype)

    return arrange_layout(codes, rhs.codes, lhs_center, rhs_center, plan, finish)


def _move_zero_points(
    lhs: QuantizedArray, zero_points: jax.Array, rhs: QuantizedArray, rhs_zero_point: jax.Array | None,
    plan: ConvolutionPlan,
) -> tuple[jax.Array, jax.Array | None, jax.Array, ConvolutionPlan]:  # fmt: skip
    """Return images with a zero point each in a form that the kernel takes, which knows one zero point.

    conv(x - z[n], w) = conv(x - z, w) - (z[n] - z) * sum(w), if the images are padded with their own zero points.

    Returns:
        The padded codes, the zero point z that all of them share, or None for 0, the correction (z[n] - z) * sum(w),
        of shape (images, features), and the plan without padding.
    """
    geometry, image = plan.geometry, plan.numbers.lhs_spec[0]
    codes, spatial = lhs.codes, plan.numbers.lhs_spec[2:]
    pads = [(0, 0, 0)] * codes.ndim
    for axis, (low, high), step in zip(spatial, geometry.padding, geometry.lhs_dilation, strict=True):
        pads[axis] = (low, high, step - 1)
    if any(pad != (0, 0, 0) for pad in pads):
        codes = _pad_with_zero_points(codes, zero_points, image, pads)
        ones = (1,) * len(spatial)
        plan = plan._replace(geometry=geometry._replace(padding=((0, 0),) * len(spatial), lhs_dilation=ones))
    # The kernel subtracts 128 from uint8 codes in any case.
    middle = 128 if lhs.codes.dtype == jnp.uint8 else 0
    feature = plan.numbers.rhs_spec[0]
    sums = _sum_kernels(rhs.codes, feature)
    if rhs_zero_point is not None:
        sums = sums - rhs_zero_point.astype(jnp.int32) * np.int32(math.prod(rhs.shape) // max(rhs.shape[feature], 1))
    correction = (zero_points.astype(jnp.int32) - np.int32(middle)).reshape(-1, 1) * sums.reshape(1, -1)
    return codes, jnp.full((1,), middle, lhs.codes.dtype) if middle else None, correction, plan


def _pad_with_zero_points(codes: jax.Array, zero_points: jax.Array, image: int, pads: Sequence[Any]) -> jax.Array:
    """Return images padded with their own zero points: image i with `zero_points[i]`."""
    own = lax.broadcast_in_dim(zero_points.astype(codes.dtype), (codes.shape[image],), (0,))
    zero = np.zeros((), codes.dtype)

    def spread(like: jax.Array) -> jax.Array:
        return sharding.place_like(lax.broadcast_in_dim(own, like.shape, (image,)), like)

    if codes.dtype in dtypes.EIGHT_BITS and not recording.is_recording():
        # The difference and the sum wrap around, so that together they change no code, and XLA needs no mask. Rounding
        # to few codes is a fusion of its own.
        codes = barriers.split_small_fusion(codes, barriers.MOST_ALONE)
        padded = lax.pad(lax.sub(codes, spread(codes)), zero, pads)
        return lax.add(padded, spread(padded))
    shape = tuple(1 if pad == (0, 0, 0) else n for n, pad in zip(codes.shape, pads, strict=True))
    inside = lax.pad(jnp.ones(shape, bool), np.False_, pads)
    padded = lax.pad(codes, zero, pads)
    inside = sharding.place_like(lax.broadcast_in_dim(inside, padded.shape, range(padded.ndim)), padded)
    return jnp.where(inside, padded, spread(padded))


def _sum_kernels(codes: jax.Array, feature: int) -> jax.Array:
    """Return the sum of the codes of each output feature, int32."""
    features = codes.shape[feature]
    length = math.prod(codes.shape) // max(features, 1)
    if recording.is_recording() or sharding.is_placed(codes):
        return jnp.moveaxis(codes, feature, 0).astype(jnp.int32).reshape(features, -1).sum(1, dtype=jnp.int32)
    # A contraction with ones: XLA:CPU has a kernel for it, but compiles three loops for a reduction of int8.
    signed, is_last = signed_codes.convert_to_signed(codes), feature == codes.ndim - 1
    moved = signed if is_last else jnp.moveaxis(signed, feature, 0)
    kernels = moved.reshape((1, length, features) if is_last else (1, features, length))
    sums = contraction.contract_integers(
        contraction.make_ones(1, length), kernels, None, None, transposed=not is_last
    )[0, 0]  # fmt: skip
    return sums + np.int32(length * signed_codes.read_offset(codes.dtype))


def _read_entries(q: QuantizedArray, part: jax.Array, axis: int) -> jax.Array:
    """Return the entries of a scale or zero point along `axis`, its only dimension that may vary: one, or all."""
    if part.size != 1:
        shape = tuple(n if a == axis else 1 for a, n in enumerate(q.shape))
        part = granularity.Aligned(q.block_size).expand(part, jnp.zeros(shape, part.dtype))
    return part.reshape(-1)
