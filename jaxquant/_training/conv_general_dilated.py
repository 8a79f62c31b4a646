"""`jax.lax.conv_general_dilated` of floats that are quantized on the way in, with a gradient."""

from __future__ import annotations

import functools
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
from .._core import checks, dtypes, entry_point
from ..integer._conv_geometry import Plan
from ..integer._operands import EIGHT_BITS
from . import contraction_vjp, quantizer
from .backward import Backward, FloatBackward, check_backward, fold_key, quantized_gradient
from .quantizer import Quantizer

_NAME = "quantized_conv_general_dilated"


def quantized_conv_general_dilated(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    *,
    lhs_spec: QuantSpec | Quantizer | None,
    rhs_spec: QuantSpec | Quantizer | None,
    backward: Backward = FloatBackward(),
    key: jax.Array | None = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """out = conv_general_dilated(quantize(lhs, lhs_spec), quantize(rhs, rhs_spec)), floats in and out, with a gradient.

    Forward it is `conv_general_dilated` to the last bit, integers where both sides have a spec: grouped and depthwise
    convolutions, too. What is kept for the way back is as of `quantized_dot_general`.

    Args:
        lhs: float32, float16 or bfloat16, of rank 3 or more.
        rhs: the kernel, likewise.
        window_strides: Static. One for each spatial dimension.
        padding: Static. "SAME", "SAME_LOWER", "VALID", or (low, high) for each spatial dimension; negative crops.
        lhs_dilation: Static. Steps between neighbours of lhs; None is 1.
        rhs_dilation: Static. Steps between neighbours of the kernel; None is 1.
        dimension_numbers: Static. As `jax.lax` has it; None is NCHW, OIHW, NCHW and their like.
        feature_group_count: Static. Groups of channels that do not meet.
        batch_group_count: Static. Groups of images, each with its own features.
        lhs_spec: how lhs is quantized: a QuantSpec, whose scale comes from lhs, a `Quantizer`, or None: not at all.
            Against a quantized rhs a scale for all of it, or one for each image.
        rhs_spec: likewise; one of the two is not None. Against a quantized lhs a scale, and a zero point, for all of
            it, or one for each output feature.
        backward: Static. `FloatBackward()`, or `Int8Backward()` where both sides are quantized.
        key: of `jax.random`: the gradient of Int8Backward(stochastic_rounding=True) draws from it, no result does.
        precision: Static. As `jax.lax` has it, for float convolutions, those of the backward pass included.
        preferred_element_type: Static. float32, float16 or bfloat16: what is returned. By default the dtype of the
            operands, float32 where they differ.

    Returns:
        The convolution, in the layout that the dimension numbers give it.

    Raises:
        TypeError: an operand, a spec or a backward pass is none; or what `conv_general_dilated` refuses.
        ValueError: likewise; Int8Backward with groups of images, or where integers cannot come back.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x, w = jnp.array([[[-16.0, 0.125, 1.0, 47.75]]]), jnp.array([[[127.0, 1.0]], [[-63.5, 0.25]]])
        >>> specs = {"lhs_spec": jq.QuantSpec(jnp.uint8), "rhs_spec": jq.QuantSpec(jnp.int8, jq.PerAxis(0))}
        >>> conv = lambda x: jq.quantized_conv_general_dilated(x, w, (1,), [(0, 1)], **specs)
        >>> conv(x).tolist()  # 0.125 is half a step, and so is 0.25 of the second feature
        [[[-2032.0, 1.0, 174.75, 6064.25], [1016.0, 0.0, -63.5, -3032.125]]]
        >>> jax.grad(lambda x: conv(x).sum())(x)
        Array([[[63.5, 64.5, 64.5, 64.5]]], dtype=float32)

    Source: `jax.lax.conv_general_dilated`; Jacob et al., arXiv 1712.05877, section 3.

    Cotangents: as of `quantized_dot_general`.
    """
    specs = [
        quantizer.read_quantizer(_NAME, name, given) for name, given in (("lhs_spec", lhs_spec), ("rhs_spec", rhs_spec))
    ]
    check_backward(_NAME, backward, key, specs)
    lhs, rhs = map(entry_point.unwrap_array, (lhs, rhs))
    lhs, rhs = entry_point.convert_arrays(_NAME, {"lhs": lhs, "rhs": rhs})
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        checks.check_array(_NAME, name, x, dtypes.FLOATS)
    if preferred_element_type is not None:
        preferred_element_type = checks.check_dtype(
            _NAME, "preferred_element_type", preferred_element_type, dtypes.FLOATS
        )
    checks.check_precision(_NAME, precision, has_algorithms=False)
    plan = plan_array_convolution(
        _NAME, lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
        batch_group_count,
    )  # fmt: skip
    operation = Conv(plan, precision, preferred_element_type)
    expected = "FloatBackward(), for there are groups of images"
    checks.require(plan.batches == 1 or isinstance(backward, FloatBackward), _NAME, "backward", expected, backward)
    return _quantized_conv(lhs, rhs, *specs, key, operation=operation, backward=backward)


@functools.partial(jax.jit, inline=True, static_argnames=("operation", "backward"))
def _quantized_conv(
    lhs: jax.Array, rhs: jax.Array, lhs_spec: Any, rhs_spec: Any, key: Any, *, operation: Conv, backward: Any
) -> jax.Array:
    names = (("lhs", "lhs_spec"), ("rhs", "rhs_spec"))
    return contraction_vjp.contract_with_gradient(
        _NAME, names, operation, (lhs, rhs), (lhs_spec, rhs_spec), backward, key
    )


class Conv(NamedTuple):
    """`conv_general_dilated` with its attributes."""

    plan: Plan
    precision: Any
    preferred: Any

    def forward(self, *operands: Any) -> jax.Array:
        """Returns the convolution of quantized and float operands."""
        lhs, rhs = operands
        return convolve_checked(_NAME, lhs, rhs, self.plan, self.precision, self.preferred)

    def floats(self, *operands: jax.Array) -> jax.Array:
        """Returns the convolution of floats."""
        lhs, rhs = operands
        return convolve_floats(lhs, rhs, self.plan, self.precision)

    def integers(self, which: int, qs: Sequence[QuantizedArray], g: jax.Array, key: Any) -> jax.Array:
        """Returns the cotangent of one operand from an integer convolution."""
        return (_find_image_dimensions, _find_kernel_dimensions)[which](
            self.plan, qs[0], qs[1], g.astype(jnp.float32), key
        )


def _find_image_dimensions(plan: Plan, lhs: QuantizedArray, rhs: QuantizedArray, g: jax.Array, key: Any) -> jax.Array:
    """Returns the convolution of g with the kernel turned round, its inputs and outputs exchanged in each group."""
    numbers, sizes = plan.numbers, _Sizes.of(plan, lhs, rhs, g)
    features, channels, *spatial = numbers.rhs_spec
    places: list[int | None] = [None] * rhs.ndim
    places[features] = numbers.out_spec[1]
    rhs, g = fold_key(_NAME, rhs, [features, *spatial], g, places)
    values = lax.rev(rhs.codes, spatial)
    if plan.features > 1:  # [groups * out, in] becomes [groups * in, out]
        values = lax.transpose(values, numbers.rhs_spec)
        outs, ins = values.shape[0] // plan.features, values.shape[1]
        grouped = values.reshape(plan.features, outs, ins, *values.shape[2:])
        values = jnp.swapaxes(grouped, 1, 2).reshape(plan.features * ins, outs, *values.shape[2:])
        kernel = tuple(range(values.ndim))
    else:
        kernel = (channels, features, *spatial)
    low = [k - 1 - p[0] for k, p in zip(sizes.kernel, plan.geometry.padding, strict=True)]
    high = [x + k - 1 - y - p for x, k, y, p in zip(sizes.image, sizes.kernel, sizes.out, low, strict=True)]
    geometry = plan.geometry._replace(
        strides=plan.geometry.lhs_dilation, lhs_dilation=plan.geometry.strides,
        padding=tuple(zip(low, high, strict=True)),
    )  # fmt: skip
    turned = lax.ConvDimensionNumbers(numbers.out_spec, kernel, numbers.lhs_spec)
    one = (1,) * rhs.ndim
    point = None if rhs.zero_point is None else rhs.zero_point.reshape(one)
    flipped = rhs.replace(codes=values, scale=rhs.scale.reshape(one), zero_point=point)
    q = quantized_gradient(g, (numbers.out_spec[0],), key)
    return convolve_checked(_NAME, q, flipped, Plan(turned, geometry, plan.features, 1), None, jnp.float32)


def _find_kernel_dimensions(plan: Plan, lhs: QuantizedArray, rhs: QuantizedArray, g: jax.Array, key: Any) -> jax.Array:
    """Returns the contractions of g with what each position of the kernel sees: the kernel is small, g is large."""
    if 0 in (g.size, rhs.size):
        return jnp.zeros(rhs.shape, jnp.float32)
    numbers, geometry = plan.numbers, plan.geometry
    image, channels, *spatial = numbers.lhs_spec
    places: list[int | None] = [None] * lhs.ndim
    places[image] = numbers.out_spec[0]
    lhs, g = fold_key(_NAME, lhs, [image, *spatial], g, places)
    images, features, *positions = numbers.out_spec
    g = lax.transpose(g, (images, *positions, features))
    q = _group_channels(quantized_gradient(g, (g.ndim - 1,), key), plan.features)
    holed = _dilate(plan, lhs.transpose(image, *spatial, channels))
    found = []
    for position in itertools.product(*(range(rhs.shape[a]) for a in numbers.rhs_spec[2:])):
        starts = [p * d for p, d in zip(position, geometry.rhs_dilation, strict=True)]
        spans = zip(starts, g.shape[1:-1], geometry.strides, strict=True)
        limits = (holed.shape[0], *(start + (n - 1) * t + 1 for start, n, t in spans), holed.shape[-1])
        seen = lax.slice(holed.codes, (0, *starts, 0), limits, (1, *geometry.strides, 1))
        x = _group_channels(holed.replace(codes=seen), plan.features)
        found.append(contract_checked(_NAME, x, q, (((0,), (0,)), ((1,), (1,))), None, dtypes.FLOAT32))
    d = lax.transpose(jnp.stack(found), (1, 3, 2, 0))  # from [positions, groups, channels, features of a group]
    d = d.reshape([rhs.shape[a] for a in numbers.rhs_spec])
    return lax.transpose(d, [numbers.rhs_spec.index(a) for a in range(rhs.ndim)])


def _dilate(plan: Plan, q: QuantizedArray) -> QuantizedArray:
    """Returns images as the kernel slides over them: with zero points in their padding and in their holes."""
    geometry = plan.geometry
    # Narrower codes are padded and cut as bytes.
    dtype = q.codes.dtype if q.codes.dtype in EIGHT_BITS else jnp.int8
    point = jnp.zeros((), dtype) if q.zero_point is None else q.zero_point.reshape(()).astype(dtype)
    around = [(low, high, hole - 1) for (low, high), hole in zip(geometry.padding, geometry.lhs_dilation, strict=True)]
    values = lax.pad(q.codes.astype(dtype), point, [(0, 0, 0), *around, (0, 0, 0)])
    return q.replace(codes=values, zero_point=None if q.zero_point is None else q.zero_point.astype(dtype))


def _group_channels(q: QuantizedArray, groups: int) -> QuantizedArray:
    """Returns [..., channels] as [all that is added up, groups, channels of a group]. The zero point is one."""
    values, scale = (part.reshape(-1, groups if part.shape[-1] > 1 else 1, max(part.shape[-1] // groups, 1))
                     for part in (q.codes, q.scale))  # fmt: skip
    point = None if q.zero_point is None else q.zero_point.reshape(1, 1, 1)
    return q.replace(codes=values, scale=scale, zero_point=point)


class _Sizes(NamedTuple):
    """The spatial sizes of a convolution, with the holes of dilations and strides in them."""

    image: list[int]
    kernel: list[int]
    out: list[int]

    @classmethod
    def of(cls, plan: Plan, lhs: Any, rhs: Any, g: Any) -> _Sizes:
        """Returns those of an image, a kernel and a result."""
        numbers, geometry = plan.numbers, plan.geometry
        pairs = (
            (lhs, numbers.lhs_spec, geometry.lhs_dilation),
            (rhs, numbers.rhs_spec, geometry.rhs_dilation),
            (g, numbers.out_spec, geometry.strides),
        )
        spread = [
            [max((x.shape[a] - 1) * hole + 1, 0) for a, hole in zip(spec[2:], holes, strict=True)]
            for x, spec, holes in pairs
        ]
        return cls(*spread)
