"""The sums and products with parameters after a contraction, as a factor of its weights and a bias."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._core import barriers
from ..._program import views
from .point import Point, Regions, Step
from .statics import StaticValues, combine


def find_feature_axes(point: Point) -> tuple[int | None, ...] | None:
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
    for place in find_weight_places(point):
        dimension = origin.dimensions[place]
        size = site.equation.invars[site.weight].aval.shape[place]
        # After a reshape, a view has no axis for a dimension of length 1.
        if not dimension and size == 1:
            axes.append(None)
        elif len(dimension) == 1 and dimension[0].axis is not None and dimension[0].is_whole:
            axes.append(dimension[0].axis)
        else:
            return None
    return tuple(axes) if len({axis for axis in axes if axis is not None}) == len(axes) - axes.count(None) else None


def find_weight_places(point: Point) -> tuple[int, ...]:
    """Return the dimension of the weight operand for each feature dimension of the result."""
    site = point.site
    assert site is not None
    assert site.weight is not None
    numbers = site.equation.params["dimension_numbers"]
    if site.operation == "conv_general_dilated":
        return (numbers.rhs_spec[0],)
    contracted, batch = (sides[site.weight] for sides in numbers)
    rank = len(site.equation.invars[site.weight].aval.shape)
    return (*batch, *(axis for axis in range(rank) if axis not in contracted and axis not in batch))


def find_factor_and_bias(statics: StaticValues, point: Point) -> tuple[jax.Array | None, jax.Array | None]:
    """Return what the weights are multiplied by, and the bias, of one shape: the feature dimensions. None is 1 and 0.

    (y + a) * b + c is y * b + (a * b + c). Each operation is rounded once.
    """
    assert point.site is not None
    shape = tuple(statics.graph.find_shape(point.node.outputs[0])[axis] for axis in point.features)
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


def _read_features(statics: StaticValues, step: Step, shape: Sequence[int]) -> jax.Array:
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
    point: Point
    axes: tuple[int | None, ...]

    def multiply(self, w: Any, arrays: Sequence[Any]) -> jax.Array:
        """Return the parameter, multiplied by what follows its contraction.

        Args:
            w: the parameter.
            arrays: all parameters.
        """
        # The contraction reads weights of bfloat16 as float32, so their product is not rounded to bfloat16.
        w = jnp.asarray(w).astype(jnp.float32)
        factor, _ = find_factor_and_bias(bind_parameters(self.regions, arrays), self.point)
        assert factor is not None
        axes = [(axis, place) for place, axis in enumerate(self.axes) if axis is not None]
        order = [place for _, place in sorted(axes)]
        rest = [place for place in range(factor.ndim) if place not in order]
        lengths = {axis: factor.shape[place] for axis, place in axes}
        shape = [lengths.get(axis, 1) for axis in range(w.ndim)]
        wide = jnp.broadcast_to(lax.transpose(factor, (*rest, *order)).reshape(shape), w.shape)
        return barriers.round_result(lax.mul(w, wide))
