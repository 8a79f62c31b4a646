"""The biases of integer-only networks, when parameters are converted: whether int32 can hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._codes.bias import quantize_bias
from ..._core import checks
from .folding import bind_parameters, find_factor_and_bias, find_feature_axes
from .point import Regions


def check_biases(
    regions: Regions, floats: Sequence[Any], converted: Sequence[Any], find_scale: Callable[[str, str], Any]
) -> None:
    """Raise ContractValueError if a bias has more steps of the product of the scales than int32 can hold.

    Nothing is raised for values that are traced, and for weights that are no whole axes of one parameter.

    Args:
        regions: the program.
        floats: the parameters in floats.
        converted: the parameters with codes.
        find_scale: a function of the name and the place of a static range, which returns its scale; or None for a range
            that is found at each call.
    """
    for point in regions.points:
        axes = None if point.site is None else find_feature_axes(point)
        if axes is None or point.site is None:
            continue
        _, bias = find_factor_and_bias(bind_parameters(regions, floats), point)
        if bias is None:
            continue
        (leaf,) = point.site.leaves
        scale = converted[leaf].scale
        order = [axis for axis in axes if axis is not None]
        rest = [axis for axis in range(scale.ndim) if axis not in order]
        if any(scale.shape[axis] != 1 for axis in rest):
            continue  # one of stacked weights, whose scales are not those of the whole parameter
        lengths = [1 if axis is None else scale.shape[axis] for axis in axes]
        scale = jnp.broadcast_to(lax.transpose(scale, (*rest, *order)).reshape(lengths), bias.shape)
        x_scale = find_scale(*point.find_source())
        if x_scale is not None:
            with checks.prefix_errors(point.site.describe()):
                quantize_bias(bias, x_scale, scale)
