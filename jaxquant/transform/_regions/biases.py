"""The biases of integer-only networks, when parameters are converted: larger scales where int32 cannot hold them."""

from __future__ import annotations

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
from ..._kernels import barriers, division
from .folding import bind_parameters, find_factor_and_bias, find_feature_axes
from .point import Regions

_MOST = 2**31 - 1
_MARGIN = 1.0001  # for what the roundings of codes and of float32 add, as in ONNX Runtime


def enlarge_scales(
    regions: Regions, floats: Sequence[Any], converted: Sequence[Any], find_scale: Callable[[str, str], Any]
) -> dict[int, jax.Array]:
    """Return the scales of parameters at which every bias fits into int32 together with the products.

    A bias has |bias| / (lhs_scale * scale) steps. Where these exceed what int32 leaves beside the products, as those of
    a feature with tiny weights do, the scale of the feature is enlarged; the other scales do not change. Parameters of
    which no scale changes are left out, and so are weights that are no whole axes of one parameter.

    Args:
        regions: the program.
        floats: the parameters in floats.
        converted: the parameters with codes.
        find_scale: a function of the name and the place of a static range, which returns its scale; or None for a range
            that is found at each call.

    Raises:
        ContractValueError: the product of two scales is less than the least normal float32.
    """
    result: dict[int, jax.Array] = {}
    for leaf, axes, bias, x_scale, describe in _list_biases(regions, floats, converted, find_scale):
        q = converted[leaf]
        if q.scale.dtype != dtypes.FLOAT32:
            continue
        scale = q.scale if (known := result.get(leaf)) is None else known
        with checks.prefix_errors(describe):
            ratio = _find_ratio(q, q.scale, axes, bias, x_scale)
            if not checks.is_traced(ratio) and bool((ratio == 1).all()):
                continue
        result[leaf] = barriers.compute_once(jnp.maximum(scale, q.scale * ratio))
    return result


def _find_ratio(
    q: QuantizedArray, scale: jax.Array, axes: Sequence[int | None], bias: jax.Array, x_scale: jax.Array
) -> jax.Array:
    """Return by how much each scale must grow, 1 or more, in the shape of the scale."""
    places = [axis for axis in axes if axis is not None]
    bias = bias.reshape([q.shape[axis] for axis in places])
    rest = [axis for axis in range(q.ndim) if axis not in places]
    by_feature = lax.transpose(scale, (*rest, *places)).reshape([scale.shape[axis] for axis in places])
    product = jnp.reshape(x_scale, ()) * by_feature
    # `division.divide` has the same bits in a jitted function, as `fake_apply` may be.
    steps = division.divide(jnp.abs(bias), jnp.broadcast_to(product, bias.shape))
    free = derive_free_steps(q, places)
    if free is not None:
        sums, most = steps, np.float32(float(free) / _MARGIN)
    else:
        # A code that is rounded again may grow by half a step.
        terms = math.prod(q.shape[axis] for axis in rest)
        sums, most = steps + compute_largest_sums(q, places), np.float32((_MOST - terms * 128) / _MARGIN)
    ratio = division.divide(sums, jnp.full_like(sums, most)) * np.float32(_MARGIN)
    ratio = jnp.where(sums > most, ratio, np.float32(1))
    order = sorted(range(len(places)), key=lambda i: places[i])
    wide = lax.transpose(ratio, order).reshape([n if axis in places else 1 for axis, n in enumerate(q.shape)])
    shared = tuple(axis for axis, n in enumerate(scale.shape) if n == 1 and wide.shape[axis] != 1)
    return jnp.max(wide, axis=shared, keepdims=True) if shared else wide


def check_biases(
    regions: Regions, floats: Sequence[Any], converted: Sequence[Any], find_scale: Callable[[str, str], Any]
) -> None:
    """Raise ContractValueError if a bias has more steps of the product of the scales than int32 can hold.

    Nothing is raised for values that are traced, and for weights that are no whole axes of one parameter. The arguments
    are those of `enlarge_scales`.
    """
    for leaf, axes, bias, x_scale, describe in _list_biases(regions, floats, converted, find_scale):
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
    regions: Regions, floats: Sequence[Any], converted: Sequence[Any], find_scale: Callable[[str, str], Any]
) -> Iterator[tuple[int, tuple[int | None, ...], jax.Array, jax.Array, str]]:
    """Yield the parameter of each contraction with a bias, its axes of features, the bias, and the activations' scale.

    The last element describes the contraction.
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
        if any(scale.shape[axis] != 1 for axis in range(scale.ndim) if axis not in axes):
            continue  # one of stacked weights, whose scales are not those of the whole parameter
        x_scale = find_scale(*point.find_source())
        if x_scale is not None and x_scale.size == 1:
            yield leaf, axes, bias, x_scale, point.site.describe()
