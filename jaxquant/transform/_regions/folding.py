"""The sums and products with parameters after a contraction, as a factor of its weights and a bias of int32 steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._arrays.quantized_array import QuantizedArray
from ..._codes.bias import compute_largest_sums, derive_free_steps, quantize_added_bias
from ..._core import checks, dtypes
from ..._kernels import affine, barriers
from ..._program import jaxpr, views
from .rounding_points import PointStep, Regions, RoundingPoint
from .statics import StaticValues, combine


def match_feature_axes(point: RoundingPoint) -> tuple[int | None, ...] | None:
    """Return the axis of the parameter for each feature dimension, or None if they are no whole axes of one parameter.

    An axis is None where the dimension has length 1.
    """
    site = point.site
    assert site is not None
    assert site.weight is not None
    origin = site.origins[site.weight]
    if not isinstance(origin, views.View):
        return None
    axes: list[int | None] = []
    for place in list_weight_dimensions(point):
        dimension = origin.dimensions[place]
        size = jaxpr.read_shape(site.equation.invars[site.weight])[place]
        # After a reshape, a view has no axis for a dimension of length 1.
        if not dimension and size == 1:
            axes.append(None)
        elif len(dimension) == 1 and dimension[0].axis is not None and dimension[0].is_whole:
            axes.append(dimension[0].axis)
        else:
            return None
    return tuple(axes) if len({axis for axis in axes if axis is not None}) == len(axes) - axes.count(None) else None


def list_weight_dimensions(point: RoundingPoint) -> tuple[int, ...]:
    """Return the dimension of the weight operand for each feature dimension of the result."""
    site = point.site
    assert site is not None
    assert site.weight is not None
    numbers = site.equation.params["dimension_numbers"]
    if site.operation == "conv_general_dilated":
        return (numbers.rhs_spec[0],)
    contracted, batch = (sides[site.weight] for sides in numbers)
    rank = len(jaxpr.read_shape(site.equation.invars[site.weight]))
    return (*batch, *(axis for axis in range(rank) if axis not in contracted and axis not in batch))


def compute_factor_and_bias(statics: StaticValues, point: RoundingPoint) -> tuple[jax.Array | None, jax.Array | None]:
    """Return what the weights are multiplied by, and the bias, of one shape: the feature dimensions. None is 1 and 0.

    (y + a) * b + c is y * b + (a * b + c). Each operation is rounded once.
    """
    assert point.site is not None
    shape = tuple(statics.graph.get_shape(point.node.outputs[0])[axis] for axis in point.features)
    factor: jax.Array | None = None
    bias: jax.Array | None = None
    for step in point.steps:
        if step.kind != "affine":
            continue
        name = step.node.name
        if name == "neg" or (name == "sub" and step.place == 1):
            ones = jnp.ones(shape, jnp.float32)
            factor = lax.neg(ones if factor is None else factor)
            bias = None if bias is None else lax.neg(bias)
        if name == "neg":
            continue
        other = _read_features(statics, step, shape)
        if name in ("mul", "div"):
            if factor is None and name == "div":
                factor = jnp.ones(shape, jnp.float32)
            factor = other if factor is None else combine(name, factor, other)
            bias = None if bias is None else combine(name, bias, other)
        elif name == "sub" and step.place == 0:
            bias = lax.neg(other) if bias is None else combine("sub", bias, other)
        else:
            bias = other if bias is None else combine("add", bias, other)
    return factor, bias


def _read_features(statics: StaticValues, step: PointStep, shape: Sequence[int]) -> jax.Array:
    """Return the other operand of a step, with the feature dimensions of the contraction."""
    entries = statics.read_entries(step.node.inputs[1 - step.place])
    if entries.ndim == 0:
        return jnp.broadcast_to(entries, shape)
    # A parameter that is added after a transpose has its features in another order.
    places = {label: axis for axis, label in enumerate(step.labels) if label is not None}
    order = [places[label] for label in sorted(places)]
    rest = [axis for axis in range(entries.ndim) if axis not in order]
    lengths = [entries.shape[places[label]] if label in places else 1 for label in range(len(shape))]
    return jnp.broadcast_to(lax.transpose(entries, (*rest, *order)).reshape(lengths), shape)


def bind_parameters(regions: Regions, arrays: Sequence[Any]) -> StaticValues:
    """Return the values of the program for these parameters."""
    assert regions.graph is not None
    return StaticValues(regions.graph, {value: arrays[place] for place, value in regions.inputs.items()})


@dataclasses.dataclass(frozen=True, eq=False)
class Fold:
    """How a parameter is multiplied before it is quantized.

    Attributes:
        regions: the program.
        point: the contraction.
        axes: the axis of the parameter for each feature dimension.
    """

    regions: Regions
    point: RoundingPoint
    axes: tuple[int | None, ...]

    def multiply(self, w: Any, arrays: Sequence[Any]) -> jax.Array:
        """Return the parameter, multiplied by what follows its contraction.

        Args:
            w: the parameter.
            arrays: all parameters.
        """
        # The contraction reads weights of bfloat16 as float32, so their product is not rounded to bfloat16.
        w = jnp.asarray(w).astype(jnp.float32)
        factor, _ = compute_factor_and_bias(bind_parameters(self.regions, arrays), self.point)
        assert factor is not None
        axes = [(axis, place) for place, axis in enumerate(self.axes) if axis is not None]
        order = [place for _, place in sorted(axes)]
        rest = [place for place in range(factor.ndim) if place not in order]
        lengths = {axis: factor.shape[place] for axis, place in axes}
        shape = [lengths.get(axis, 1) for axis in range(w.ndim)]
        wide = jnp.broadcast_to(lax.transpose(factor, (*rest, *order)).reshape(shape), w.shape)
        return barriers.round_result(lax.mul(w, wide))


# Biases, when parameters are converted: larger scales where int32 cannot hold them.

_MOST = 2**31 - 1
_MARGIN = 1.0001  # for what the roundings of codes and of float32 add, as in ONNX Runtime


def enlarge_scales(
    regions: Regions, floats: Sequence[Any], converted: Sequence[Any], compute_scale: Callable[[str, str], Any]
) -> dict[int, jax.Array]:
    """Return the scales of parameters at which every bias fits into int32 together with the products.

    A bias has |bias| / (lhs_scale * scale) steps. Where int32 does not hold these steps beside the products, as for a
    feature with tiny weights, the scale of the feature is enlarged; the other scales do not change. Parameters whose
    scales all stay the same are left out, and so are weights that are no whole axes of one parameter.

    Args:
        regions: the program.
        floats: the parameters in floats.
        converted: the parameters with codes.
        compute_scale: a function of the name and the place of a static range, which returns its scale; or None for a
            range that is found at each call.

    Raises:
        ContractValueError: the product of two scales is less than the least normal float32.
    """
    result: dict[int, jax.Array] = {}
    for leaf, axes, bias, x_scale, describe in _list_biases(regions, floats, converted, compute_scale):
        q = converted[leaf]
        if q.scale.dtype != dtypes.FLOAT32:
            continue
        scale = q.scale if (known := result.get(leaf)) is None else known
        with checks.prefix_errors(describe):
            ratio = _compute_ratio(q, q.scale, axes, bias, x_scale)
            if not checks.is_traced(ratio) and bool((ratio == 1).all()):
                continue
        result[leaf] = barriers.compute_once(jnp.maximum(scale, q.scale * ratio))
    return result


def _compute_ratio(
    q: QuantizedArray, scale: jax.Array, axes: Sequence[int | None], bias: jax.Array, x_scale: jax.Array
) -> jax.Array:
    """Return by how much each scale must grow, 1 or more, in the shape of the scale."""
    places = [axis for axis in axes if axis is not None]
    bias = bias.reshape([q.shape[axis] for axis in places])
    rest = [axis for axis in range(q.ndim) if axis not in places]
    by_feature = lax.transpose(scale, (*rest, *places)).reshape([scale.shape[axis] for axis in places])
    product = jnp.reshape(x_scale, ()) * by_feature
    # `division.divide` has the same bits in a jitted function, as `fake_apply` may be.
    steps = affine.divide(jnp.abs(bias), jnp.broadcast_to(product, bias.shape))
    free = derive_free_steps(q, places)
    if free is not None:
        sums, most = steps, np.float32(float(free) / _MARGIN)
    else:
        # A code that is rounded again may grow by half a step.
        terms = math.prod(q.shape[axis] for axis in rest)
        sums, most = steps + compute_largest_sums(q, places), np.float32((_MOST - terms * 128) / _MARGIN)
    ratio = affine.divide(sums, jnp.full_like(sums, most)) * np.float32(_MARGIN)
    ratio = jnp.where(sums > most, ratio, np.float32(1))
    order = sorted(range(len(places)), key=lambda i: places[i])
    wide = lax.transpose(ratio, order).reshape([n if axis in places else 1 for axis, n in enumerate(q.shape)])
    shared = tuple(axis for axis, n in enumerate(scale.shape) if n == 1 and wide.shape[axis] != 1)
    return jnp.max(wide, axis=shared, keepdims=True) if shared else wide


def check_biases(
    regions: Regions, floats: Sequence[Any], converted: Sequence[Any], compute_scale: Callable[[str, str], Any]
) -> None:
    """Raise ContractValueError if a bias has more steps of the product of the scales than int32 can hold.

    Nothing is raised for values that are traced, and for weights that are no whole axes of one parameter. The arguments
    are the same as in `enlarge_scales`.
    """
    for leaf, axes, bias, x_scale, describe in _list_biases(regions, floats, converted, compute_scale):
        q = converted[leaf]
        places = [axis for axis in axes if axis is not None]
        rest = [axis for axis in range(q.ndim) if axis not in places]
        lengths = [q.scale.shape[axis] for axis in places]
        scale = lax.transpose(q.scale, (*rest, *places)).reshape(lengths)
        bias = bias.reshape([q.shape[axis] for axis in places])
        with checks.prefix_errors(describe):
            scale = scale if scale.size == 1 else jnp.broadcast_to(scale, bias.shape)
            quantize_added_bias("Prepared.convert", bias, x_scale, q, scale, places)


def _list_biases(
    regions: Regions, floats: Sequence[Any], converted: Sequence[Any], compute_scale: Callable[[str, str], Any]
) -> Iterator[tuple[int, tuple[int | None, ...], jax.Array, jax.Array, str]]:
    """Yield the parameter of each contraction with a bias, its axes of features, the bias, and the activations' scale.

    The last element describes the contraction.
    """
    for point in regions.points:
        axes = None if point.site is None else match_feature_axes(point)
        if axes is None or point.site is None:
            continue
        _, bias = compute_factor_and_bias(bind_parameters(regions, floats), point)
        if bias is None:
            continue
        (leaf,) = point.site.leaves
        scale = converted[leaf].scale
        if any(scale.shape[axis] != 1 for axis in range(scale.ndim) if axis not in axes):
            continue  # one of stacked weights, and the whole parameter has other scales
        x_scale = compute_scale(*point.locate_range())
        if x_scale is not None and x_scale.size == 1:
            yield leaf, axes, bias, x_scale, point.site.describe()
