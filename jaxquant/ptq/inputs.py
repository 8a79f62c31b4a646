"""The inputs of each contraction with a parameter: as vectors, and as statistics of the parameter's axes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._program.analysis import Site, read_product_numbers
from .._program.views import View
from .moments import Moments

if TYPE_CHECKING:
    from ..transform.session import TracedCall


class Uses(NamedTuple):
    """How one contraction reads a parameter.

    Attributes:
        name: the name of the contraction.
        axis: the axes of the parameter that it keeps: the axes of scans and of groups, and the outputs.
        summed: the axes of the parameter that it sums, in the order of the vectors of inputs.
        groups: the number of runs of outputs with different inputs, iterations of scans included.
        channel: the axes of the parameter with an input for each index, without the axes of a window.
        reason: why the statistics of its inputs cannot be used, or "".
    """

    name: str
    axis: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()
    groups: int = 1
    channel: tuple[int, ...] = ()
    reason: str = ""


def describe_use(site: Site, view: View, shape: Sequence[int]) -> Uses:
    """Return how a contraction reads a parameter of a shape.

    Args:
        site: the contraction.
        view: the view of the parameter that it contracts.
        shape: the shape of the parameter.
    """
    if site.operation == "ragged_dot":
        return Uses(site.name, reason="a ragged product, in which groups of rows have different matrices")
    batch, summed = _split_dimensions(site)
    layers = tuple(range(len(site.lengths)))
    if any(step[0] == "rev" for step in view.history if isinstance(step, tuple)):
        # The statistics have the order of the inputs, which then differs from the order of the axis.
        return Uses(site.name, reason="a parameter in reverse order")
    if len(site.views) > 1:
        return Uses(site.name, reason="parameters that are joined in one array")
    parts = [_list_whole_axes(view, places, shape) for places in (batch, summed)]
    dimensions = range(len(view.dimensions))
    outputs = _list_whole_axes(view, [d for d in dimensions if d not in (*batch, *summed)], shape)
    if any(part is None for part in (*parts, outputs)):
        return Uses(site.name, reason="a part of a parameter, or a parameter with split axes")
    groups, inputs = parts
    assert groups is not None
    assert inputs is not None
    assert outputs is not None
    kept = (*layers, *groups, *outputs)
    whole = {axis for axis, size in enumerate(shape) if size == 1}
    if sorted({*kept, *inputs} | whole) != list(range(len(shape))) or len({*kept, *inputs}) < len((*kept, *inputs)):
        return Uses(site.name, reason="a part of a parameter, or a parameter with repeated axes")
    # An axis of length 1 may belong to any side; the outputs take axes that no side has.
    kept = (*kept, *sorted(whole - {*kept, *inputs}))
    count = math.prod(shape[axis] for axis in (*layers, *groups)) * _count_groups(site)
    if site.operation != "conv_general_dilated":
        return Uses(site.name, kept, tuple(inputs), count, tuple(inputs))
    if site.equation.params["batch_group_count"] > 1:
        return Uses(site.name, reason="a convolution with groups of images")
    (channel,) = (site.equation.params["dimension_numbers"].rhs_spec[1],)
    return Uses(site.name, kept, tuple(inputs), count, tuple(_list_whole_axes(view, [channel], shape) or ()))


def _split_dimensions(site: Site) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dimensions of the parameter operand that are groups, and the summed dimensions, in order."""
    assert site.weight is not None
    numbers = site.equation.params["dimension_numbers"]
    if site.operation == "dot_general":
        return tuple(numbers[1][site.weight]), tuple(numbers[0][site.weight])
    _, *rest = numbers.rhs_spec
    return (), tuple(rest)


def list_output_dimensions(site: Site) -> tuple[int, ...]:
    """Return the dimensions of a contraction's result that are outputs of the parameter, groups included."""
    assert site.weight is not None
    if site.operation == "conv_general_dilated":
        return (site.equation.params["dimension_numbers"].out_spec[1],)
    summed, batch = read_product_numbers(site.equation)
    count, rank = len(batch[0]), len(site.equation.outvars[0].aval.shape)
    free = len(site.equation.invars[site.weight].aval.shape) - count - len(summed[site.weight])
    # The batch dimensions come first, then the dimensions of the first operand, then of the second one.
    start = count if site.weight == 0 else rank - free
    return (*range(count), *range(start, start + free))


def _count_groups(site: Site) -> int:
    return site.equation.params["feature_group_count"] if site.operation == "conv_general_dilated" else 1


def _list_whole_axes(view: View, places: Sequence[int], shape: Sequence[int]) -> list[int] | None:
    """Return the axes of a parameter that some dimensions of a view hold, or None if it holds parts of them."""
    axes = []
    for atom in (atom for place in places for atom in view.dimensions[place]):
        if atom.size == 1 and atom.axis is None:
            continue
        if atom.axis is None or atom.size != shape[atom.axis]:
            return None
        axes.append(atom.axis)
    return axes


def list_uses(call: TracedCall, leaf: int) -> tuple[Uses, ...]:
    """Return how the contractions of a program read a parameter; lookups have no inputs."""
    uses: list[Uses] = []
    shape = call.parameters.arrays[leaf].shape
    for site in call.analysis.sites.values():
        if call.plan.sites[site.name].is_replaced and site.operation != "take":
            uses += [describe_use(site, view, shape) for view in site.views if view.leaf == leaf]
    return tuple(uses)


def read_vectors(site: Site, x: jax.Array) -> jax.Array:
    """Return the inputs of a contraction as vectors: [number, groups, inputs]."""
    if site.operation == "conv_general_dilated":
        return _read_windows(site, x)
    assert site.weight is not None
    numbers = read_product_numbers(site.equation)
    place = 1 - site.weight
    batch, summed = tuple(numbers[1][place]), tuple(numbers[0][place])
    free = tuple(axis for axis in range(x.ndim) if axis not in (*batch, *summed))
    groups, inputs = (math.prod(x.shape[axis] for axis in axes) for axes in (batch, summed))
    return x.transpose(*free, *batch, *summed).reshape(-1, groups, inputs)


def read_outputs(site: Site, y: jax.Array) -> jax.Array:
    """Return an array of the shape of a contraction's result as vectors: [number, groups, outputs].

    The vectors are in the order of `read_vectors`.
    """
    outputs = list_output_dimensions(site)
    others = [axis for axis in range(y.ndim) if axis not in outputs]
    if site.operation == "conv_general_dilated":
        spec = site.equation.params["dimension_numbers"].out_spec
        others, groups = [spec[0], *spec[2:]], _count_groups(site)
    else:
        groups = math.prod(y.shape[: len(read_product_numbers(site.equation)[1][0])])
    count = math.prod(y.shape[axis] for axis in outputs)
    return y.transpose(*others, *outputs).reshape(-1, groups, count // groups)


def _read_windows(site: Site, x: jax.Array) -> jax.Array:
    """Return the windows of a convolution; the inputs of a window are in the order (channel, window)."""
    parameters = site.equation.params
    numbers, groups = parameters["dimension_numbers"], parameters["feature_group_count"]
    kernel = site.equation.invars[1].aval.shape
    window = tuple(kernel[axis] for axis in numbers.rhs_spec[2:])
    # Images and channels first: then the patches are [images, channels * window, ...].
    x = x.transpose(numbers.lhs_spec)
    # float16 and bfloat16 are exact in float32.
    # JAX cuts patches by a convolution with ones, which copies the inputs only if no backend rounds its operands.
    patches = lax.conv_general_dilated_patches(
        x.astype(jnp.float32), window, parameters["window_strides"], parameters["padding"],
        parameters["lhs_dilation"], parameters["rhs_dilation"], precision=lax.Precision.HIGHEST,
    )  # fmt: skip
    return jnp.moveaxis(patches, 1, -1).reshape(-1, groups, patches.shape[1] // groups)


def order_inputs(use: Uses, x: jax.Array, shape: Sequence[int], count: int) -> jax.Array:
    """Return an array with the inputs, along its last `count` axes, in the order of the parameter's axes.

    Args:
        use: how a contraction reads the parameter.
        x: the array, in the order in which the contraction reads its inputs.
        shape: the shape of the parameter.
        count: 1 for vectors, 2 for second moments.
    """
    sizes = [shape[axis] for axis in use.summed]
    order = sorted(range(len(sizes)), key=lambda place: use.summed[place])
    if order == list(range(len(sizes))):
        return x
    front = x.ndim - count
    split = x.reshape(*x.shape[:front], *(sizes * count))
    axes = [front + index * len(sizes) + place for index in range(count) for place in order]
    return split.transpose(*range(front), *axes).reshape(x.shape)


def combine_uses(
    uses: Sequence[Uses], moments: Mapping[str, Moments], shape: Sequence[int]
) -> tuple[Uses, Moments] | str:
    """Return how a parameter is read and the statistics of its inputs, or why there are none.

    Args:
        uses: how each contraction reads it.
        moments: the statistics of contractions by name.
        shape: the shape of the parameter.

    Returns:
        The first use, and moments with an axis of groups and inputs in the order of the parameter's axes.
    """
    reasons = [use.reason for use in uses if use.reason]
    if reasons or not uses:
        return reasons[0] if reasons else "a lookup has no inputs"
    first = uses[0]
    # The inputs of a matrix and of its transpose belong to different axes, so that nothing of them can be added.
    if any((set(use.summed), use.axis, use.groups) != (set(first.summed), first.axis, first.groups) for use in uses):
        return "contractions that sum different axes of it"
    parts = [_order_moments(use, moments[use.name], shape) for use in uses]
    total = sum(part.count for part in parts)
    mean = [sum(part[field] * (part.count / total)[..., None] for part in parts) for field in (1, 2)]
    second = sum(part.second * (part.count / total)[..., None, None] for part in parts)
    largest = functools.reduce(jnp.maximum, [part.largest for part in parts])
    return first, Moments(second, *mean, largest, total)  # type: ignore[arg-type]


def _order_moments(use: Uses, moments: Moments, shape: Sequence[int]) -> Moments:
    """Return the moments of one use, with one axis of groups and inputs in the order of the parameter's axes."""
    inputs = moments.mean.shape[-1]
    second = order_inputs(use, moments.second.reshape(-1, inputs, inputs), shape, 2)
    mean, magnitude, largest = (order_inputs(use, x.reshape(-1, inputs), shape, 1) for x in moments[1:4])
    # Each layer of a scan has a count, and all groups of it have the same.
    count = jnp.repeat(moments.count.reshape(-1), len(second) // moments.count.size)
    return Moments(second, mean, magnitude, largest, count)


def read_operand(site: Site, operands: Sequence[Any]) -> Any:
    """Return the operand of a contraction that is not its parameter."""
    assert site.weight is not None
    return operands[1 - site.weight]
