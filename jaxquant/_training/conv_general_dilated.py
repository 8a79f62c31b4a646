"""`quantized_conv_general_dilated`: a convolution of floats that the call quantizes, with a gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._contractions.conv import convolve_checked, convolve_floats, plan_array_convolution
from .._contractions.dot import contract_checked
from .._contractions.output import Epilogue
from .._core import checks, dtypes, entry_point
from .._core.dtypes import EIGHT_BITS
from .._kernels.convolution import ConvolutionPlan
from . import contraction_vjp
from .backward import fold_scale_into_gradient, quantize_gradient
from .backward_choices import Backward, FloatBackward
from .fake_quantize import Quantizer

_NAME = "quantized_conv_general_dilated"


def quantized_conv_general_dilated(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    *,
    lhs_spec: QuantSpec | Quantizer | None,
    rhs_spec: QuantSpec | Quantizer | None,
    backward: Backward = FloatBackward(),
    key: jax.Array | None = None,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Convolve two float arrays in integers, with a gradient.

    out = conv_general_dilated(quantize(lhs, lhs_spec), quantize(rhs, rhs_spec))

    The forward pass is `conv_general_dilated` bit for bit: in integers if both operands have a spec, also for grouped
    and depthwise convolutions. The backward pass keeps the same residuals as `quantized_dot_general`.

    Args:
        lhs: the images: float32, float16 or bfloat16, of rank 3 or more.
        rhs: the kernel: the same dtypes and rank.
        window_strides: Static. One stride for each spatial dimension.
        padding: Static. "SAME", "SAME_LOWER", "VALID", or (low, high) for each spatial dimension; negative numbers
            crop.
        lhs_dilation: Static. The distance between neighboring elements of lhs in each spatial dimension; None means 1.
        rhs_dilation: Static. The distance between neighboring elements of the kernel; None means 1.
        dimension_numbers: Static. As in `jax.lax`; None means (NCHW, OIHW, NCHW), with as many spatial dimensions as
            lhs has.
        feature_group_count: Static. The number of groups of channels that are convolved separately.
        batch_group_count: Static. The number of groups of images, each convolved with its own output features.
        lhs_spec: how lhs is quantized: a QuantSpec, which finds the scale from lhs; a `Quantizer`; or None, which
            leaves lhs in floats. If rhs is quantized too, the scale is per tensor or per image.
        rhs_spec: the same for rhs. At least one of the two must not be None. If lhs is quantized too, the scale and the
            zero point are per tensor or per output feature.
        backward: Static. How the gradients are contracted: `FloatBackward()`, or, if both operands are quantized,
            `Int8Backward()`.
        key: a key of `jax.random`, for the gradients of Int8Backward(stochastic_rounding=True); not needed otherwise.
            The result of the forward pass does not depend on it.
        precision: Static. As in `jax.lax`, for float convolutions, in the backward pass too.
        preferred_element_type: Static. The dtype of the result: float32, float16 or bfloat16. None takes the dtype of
            the operands, or float32 if they differ.

    Returns:
        The convolution, in the layout that the dimension numbers state.

    Raises:
        TypeError: an operand, a spec, the key or `backward` has a wrong type or dtype; neither operand has a spec; or
            `conv_general_dilated` would raise a TypeError.
        ValueError: shapes, scales or zero points do not fit each other; `backward` is Int8Backward() but there are
            groups of images, or a gradient cannot be contracted in integers; `backward` rounds stochastically and there
            is no key; or `conv_general_dilated` would raise a ValueError.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x, w = jnp.array([[[-16.0, 0.125, 1.0, 47.75]]]), jnp.array([[[127.0, 1.0]], [[-63.5, 0.25]]])
        >>> specs = {"lhs_spec": jq.QuantSpec(jnp.uint8), "rhs_spec": jq.QuantSpec(jnp.int8, jq.PerAxis(0))}
        >>> conv = lambda x: jq.quantized_conv_general_dilated(x, w, (1,), [(0, 1)], **specs)
        >>> conv(x).tolist()  # 0.125 is half a step, and so is 0.25 in the second feature
        [[[-2032.0, 1.0, 174.75, 6064.25], [1016.0, 0.0, -63.5, -3032.125]]]
        >>> jax.grad(lambda x: conv(x).sum())(x)
        Array([[[63.5, 64.5, 64.5, 64.5]]], dtype=float32)

    Source: `jax.lax.conv_general_dilated`; Jacob et al., arXiv 1712.05877, section 3.

    Cotangents: as for `quantized_dot_general`.
    """
    quantizers, dtype = contraction_vjp.check_options(
        _NAME, {"lhs_spec": lhs_spec, "rhs_spec": rhs_spec}, backward, key, precision, preferred_element_type,
        has_algorithms=False,
    )  # fmt: skip
    lhs, rhs = map(entry_point.unwrap_array, (lhs, rhs))
    lhs, rhs = entry_point.convert_arrays(_NAME, {"lhs": lhs, "rhs": rhs})
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        checks.check_array(_NAME, name, x, dtypes.FLOATS)
    # The plan is computed before the call is compiled: errors then describe the arguments of the user.
    plan = plan_array_convolution(
        _NAME, lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
        batch_group_count,
    )  # fmt: skip
    operation = ConvContraction(plan, precision, dtype)
    expected = "FloatBackward(), because batch_group_count is not 1"
    checks.require(plan.batches == 1 or isinstance(backward, FloatBackward), _NAME, "backward", expected, backward)
    return contraction_vjp.quantize_and_contract(
        (lhs, rhs), tuple(quantizers), key, function=_NAME, names=contraction_vjp.SIDES, operation=operation,
        backward=backward,
    )  # fmt: skip


class ConvContraction(NamedTuple):
    """A `conv_general_dilated` with its static attributes."""

    plan: ConvolutionPlan
    precision: Any
    preferred: Any

    def check_operands(self, *operands: jax.Array) -> None:
        """Do nothing: the plan was made from the operands, and they fit it."""

    def contract_quantized(self, *operands: QuantizedArray | jax.Array, epilogue: Epilogue | None = None) -> Any:
        """Return the convolution of operands, at least one of them quantized."""
        lhs, rhs = operands
        return convolve_checked(_NAME, lhs, rhs, self.plan, self.precision, self.preferred, epilogue)

    def contract_floats(self, *operands: jax.Array) -> jax.Array:
        """Return the convolution of floats."""
        lhs, rhs = operands
        return convolve_floats(lhs, rhs, self.plan, self.precision)

    def compute_integer_cotangent(
        self, index: int, qs: Sequence[QuantizedArray], g: jax.Array | QuantizedArray, key: jax.Array | None
    ) -> jax.Array:
        """Return the float32 cotangent of the operand `index`, computed by integer contractions."""
        assert not isinstance(g, QuantizedArray)  # convolutions have no form for float8
        return (_compute_image_cotangent, _compute_kernel_cotangent)[index](
            self.plan, qs[0], qs[1], g.astype(jnp.float32), key
        )


def _compute_image_cotangent(
    plan: ConvolutionPlan, lhs: QuantizedArray, rhs: QuantizedArray, g: jax.Array, key: jax.Array | None
) -> jax.Array:
    """Return the cotangent of the images: g convolved with the flipped kernel, inputs and outputs swapped per group."""
    numbers, sizes = plan.numbers, _compute_sizes(plan, lhs, rhs, g)
    features, channels, *spatial = numbers.rhs_spec
    dimensions: list[int | None] = [None] * rhs.ndim
    dimensions[features] = numbers.out_spec[1]
    rhs, g = fold_scale_into_gradient(_NAME, rhs, [features, *spatial], g, dimensions)
    values = lax.rev(rhs.codes, spatial)
    if plan.features > 1:  # [groups * out, in] becomes [groups * in, out]
        values = lax.transpose(values, numbers.rhs_spec)
        outs, ins = values.shape[0] // plan.features, values.shape[1]
        grouped = values.reshape(plan.features, outs, ins, *values.shape[2:])
        values = jnp.swapaxes(grouped, 1, 2).reshape(plan.features * ins, outs, *values.shape[2:])
        kernel = tuple(range(values.ndim))
    else:
        kernel = (channels, features, *spatial)
    # The transpose of a convolution swaps strides and dilation, and pads by the span of the kernel minus 1 and minus
    # the padding of the forward pass.
    low = [k - 1 - p[0] for k, p in zip(sizes.kernel, plan.geometry.padding, strict=True)]
    high = [x + k - 1 - y - p for x, k, y, p in zip(sizes.image, sizes.kernel, sizes.out, low, strict=True)]
    geometry = plan.geometry._replace(
        strides=plan.geometry.lhs_dilation, lhs_dilation=plan.geometry.strides,
        padding=tuple(zip(low, high, strict=True)),
    )  # fmt: skip
    swapped = lax.ConvDimensionNumbers(numbers.out_spec, kernel, numbers.lhs_spec)
    per_tensor = (1,) * rhs.ndim
    zero_point = None if rhs.zero_point is None else rhs.zero_point.reshape(per_tensor)
    flipped = rhs.replace(codes=values, scale=rhs.scale.reshape(per_tensor), zero_point=zero_point)
    # Each image keeps a scale: the cotangent of an image does not sum over the images.
    q = quantize_gradient(g, (numbers.out_spec[0],), key)
    return convolve_checked(_NAME, q, flipped, ConvolutionPlan(swapped, geometry, plan.features, 1), None, jnp.float32)


def _compute_kernel_cotangent(
    plan: ConvolutionPlan, lhs: QuantizedArray, rhs: QuantizedArray, g: jax.Array, key: jax.Array | None
) -> jax.Array:
    """Return the cotangent of the kernel: for each of its positions, g contracted with the images that position reads.

    One contraction for each position is faster than a convolution with the kernel g, because g is large.
    """
    if 0 in (g.size, rhs.size):
        return jnp.zeros(rhs.shape, jnp.float32)
    numbers, geometry = plan.numbers, plan.geometry
    image, channels, *spatial = numbers.lhs_spec
    dimensions: list[int | None] = [None] * lhs.ndim
    dimensions[image] = numbers.out_spec[0]
    lhs, g = fold_scale_into_gradient(_NAME, lhs, [image, *spatial], g, dimensions)
    # Channels last, so that positions and images can be merged into one contracted dimension.
    images, features, *positions = numbers.out_spec
    g = lax.transpose(g, (images, *positions, features))
    q = _group_channels(quantize_gradient(g, (g.ndim - 1,), key), plan.features)
    dilated = _dilate(plan, lhs.transpose(image, *spatial, channels))
    products = []
    for position in itertools.product(*(range(rhs.shape[a]) for a in numbers.rhs_spec[2:])):
        starts = [p * d for p, d in zip(position, geometry.rhs_dilation, strict=True)]
        spans = zip(starts, g.shape[1:-1], geometry.strides, strict=True)
        # The slice ends after the last position that this kernel offset reads, and so has as many entries as g.
        limits = (dilated.shape[0], *(start + (n - 1) * t + 1 for start, n, t in spans), dilated.shape[-1])
        window = lax.slice(dilated.codes, (0, *starts, 0), limits, (1, *geometry.strides, 1))
        x = _group_channels(dilated.replace(codes=window), plan.features)
        products.append(contract_checked(_NAME, x, q, (((0,), (0,)), ((1,), (1,))), None, dtypes.FLOAT32))
    d = lax.transpose(jnp.stack(products), (1, 3, 2, 0))  # from [positions, groups, channels, features of a group]
    d = d.reshape([rhs.shape[a] for a in numbers.rhs_spec])
    return lax.transpose(d, [numbers.rhs_spec.index(a) for a in range(rhs.ndim)])


def _dilate(plan: ConvolutionPlan, q: QuantizedArray) -> QuantizedArray:
    """Return the images padded and dilated, with the zero point in the padding and in the holes."""
    geometry = plan.geometry
    # XLA is slow to pad and slice codes of fewer than 8 bits, so they are converted to bytes first.
    dtype = q.codes.dtype if q.codes.dtype in EIGHT_BITS else jnp.int8
    zero_point = jnp.zeros((), dtype) if q.zero_point is None else q.zero_point.reshape(()).astype(dtype)
    padding = [(low, high, step - 1) for (low, high), step in zip(geometry.padding, geometry.lhs_dilation, strict=True)]
    values = lax.pad(q.codes.astype(dtype), zero_point, [(0, 0, 0), *padding, (0, 0, 0)])
    return q.replace(codes=values, zero_point=None if q.zero_point is None else q.zero_point.astype(dtype))


def _group_channels(q: QuantizedArray, groups: int) -> QuantizedArray:
    """Return [..., channels] as [positions, groups, channels of a group]; the zero point is per tensor."""
    values, scale = (part.reshape(-1, groups if part.shape[-1] > 1 else 1, max(part.shape[-1] // groups, 1))
                     for part in (q.codes, q.scale))  # fmt: skip
    zero_point = None if q.zero_point is None else q.zero_point.reshape(1, 1, 1)
    return q.replace(codes=values, scale=scale, zero_point=zero_point)


class _SpatialSizes(NamedTuple):
    """The spatial sizes of the images, the kernel and the result, dilated by their dilations and strides."""

    image: list[int]
    kernel: list[int]
    out: list[int]


def _compute_sizes(plan: ConvolutionPlan, lhs: QuantizedArray, rhs: QuantizedArray, g: jax.Array) -> _SpatialSizes:
    """Return the dilated spatial sizes of the images, of the kernel and of the result."""
    numbers, geometry = plan.numbers, plan.geometry
    dilations = (
        (lhs, numbers.lhs_spec, geometry.lhs_dilation),
        (rhs, numbers.rhs_spec, geometry.rhs_dilation),
        (g, numbers.out_spec, geometry.strides),
    )
    sizes = []
    for x, spec, steps in dilations:
        sizes.append([max((x.shape[axis] - 1) * step + 1, 0) for axis, step in zip(spec[2:], steps, strict=True)])
    return _SpatialSizes(*sizes)
