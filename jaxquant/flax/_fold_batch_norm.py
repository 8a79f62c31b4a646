"""Batch normalisation, whose running statistics are constants once training is over, as part of the layer before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

from .._core import checks, dtypes

_NAME = "flax.fold_batch_norm"


def fold_batch_norm(
    layer: Mapping[str, Any], norm: Mapping[str, Any], stats: Mapping[str, Any], *, epsilon: float = 1e-5,
    axis: int = -1,
) -> dict[str, Any]:  # fmt: skip
    """kernel = kernel * scale / sqrt(var + epsilon), bias = (bias - mean) * scale / sqrt(var + epsilon) + its bias.

    The layer then returns what the normalisation after it returned, in inference. It needs `use_bias=True`, and the
    module to serve has no normalisation there. Fold before the ranges are observed and before training goes on: weights
    are quantized as they are folded.

    Args:
        layer: the parameters of a `Conv`, a `Dense` or the like: "kernel", float32, float16 or bfloat16, and perhaps
            "bias".
        norm: the parameters of a `BatchNorm` over that axis: "scale" and "bias", each of which may be missing.
        stats: its "batch_stats": "mean" and "var".
        epsilon: Static. That of the `BatchNorm`, not negative.
        axis: Static. The axis of the kernel that becomes the normalised axis of the outputs: -1, the last, for `Dense`,
            `DenseGeneral`, `Conv` and `ConvTranspose`; -2 for `ConvTranspose(transpose_kernel=True)`.

    Returns:
        {"kernel": ..., "bias": ...} in the dtype of the kernel, and partitioned as it is.

    Raises:
        TypeError: epsilon is no number, axis no int, or an entry no array of floats: that of a converted layer, for
            one.
        ValueError: an entry is missing or has no place there, or does not have one element for each feature; epsilon
            is negative; or var + epsilon, where it is known, is not positive.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq, jaxquant.flax
        >>> layer = {"kernel": jnp.array([[1.0, 2.0]]), "bias": jnp.array([0.5, 0.0])}
        >>> stats = {"mean": jnp.array([0.5, 4.0]), "var": jnp.array([0.25, 4.0])}
        >>> norm = {"scale": jnp.array([1.0, 3.0]), "bias": jnp.array([0.0, -1.0])}
        >>> folded = jq.flax.fold_batch_norm(layer, norm, stats, epsilon=0.0)
        >>> folded["kernel"], folded["bias"]
        (Array([[2., 3.]], dtype=float32), Array([ 0., -7.], dtype=float32))

    Source: Jacob et al., arXiv 1712.05877, section 3.2, equation 14.
    """
    checks.check_real(_NAME, "epsilon", epsilon)
    checks.require(epsilon >= 0, _NAME, "epsilon", "a number that is not negative", epsilon)
    kernel = _read_entry("layer", layer, "kernel")
    axis = checks.check_axis(_NAME, axis, kernel.ndim)
    features = (kernel.shape[axis],)
    mean, var = (_read_entry("stats", stats, name, features).astype(jnp.float32) for name in ("mean", "var"))
    _check_variance(var, epsilon)
    expected = 'a mapping with "scale" and "bias", or with less'
    known = isinstance(norm, Mapping) and set(norm) <= {"scale", "bias"}
    checks.require(known, _NAME, "norm", expected, sorted(norm) if isinstance(norm, Mapping) else type(norm).__name__)
    scale = _read_entry("norm", norm, "scale", features, 1.0).astype(jnp.float32)
    offset = _read_entry("norm", norm, "bias", features, 0.0).astype(jnp.float32)
    bias = _read_entry("layer", layer, "bias", default=0.0)
    bias = jnp.zeros(features, jnp.float32) if bias.ndim == 0 else bias.astype(jnp.float32)
    expected = f"shape {features}, with the layer's other features before it"
    checks.require(bias.shape[-1:] == features, _NAME, 'layer["bias"]', expected, f"shape {bias.shape}")
    factor = scale / jnp.sqrt(var + np.float32(epsilon))
    wide = jax.lax.broadcast_in_dim(factor, kernel.shape, (axis,))
    folded = {
        "kernel": (kernel.astype(jnp.float32) * wide).astype(kernel.dtype),
        "bias": ((bias - _spread_like(mean, bias)) * _spread_like(factor, bias) + _spread_like(offset, bias)).astype(
            kernel.dtype
        ),
    }
    boxes = {name: layer[name] for name in folded if isinstance(layer.get(name), meta.AxisMetadata)}
    return {**folded, **{name: meta.replace_boxed(box, folded[name]) for name, box in boxes.items()}}


def _spread_like(part: jax.Array, bias: jax.Array) -> jax.Array:
    return jnp.broadcast_to(part.reshape(*(1,) * (bias.ndim - 1), part.size), bias.shape)


def _check_variance(var: jax.Array, epsilon: float) -> None:
    """Requires variances that have a positive root with epsilon, as far as they are known."""
    if checks.is_traced(var) or not var.is_fully_addressable:
        return
    least, most = (float(v) for v in (np.asarray(var).min(initial=1), np.asarray(var).max(initial=1)))
    expected = "numbers that are not negative"
    checks.require(least >= 0, _NAME, 'stats["var"]', expected, "NaN" if np.isnan(least) else least)
    checks.require(most < np.inf, _NAME, 'stats["var"]', "finite numbers", most)
    expected = "positive numbers where epsilon, as a normal number of float32, is 0"
    # XLA:CPU takes smaller numbers for 0, and would divide by it.
    holds = np.float32(least) + np.float32(epsilon) >= np.finfo(np.float32).tiny
    checks.require(bool(holds), _NAME, 'stats["var"]', expected, least)


def _read_entry(
    argument: str,
    given: Mapping[str, Any],
    name: str,
    shape: tuple[int, ...] | None = None,
    default: float | None = None,
) -> jax.Array:
    is_there = isinstance(given, Mapping) and name in given
    expected = f'a mapping with "{name}"'
    got = sorted(given) if isinstance(given, Mapping) else type(given).__name__
    checks.require(is_there or default is not None, _NAME, argument, expected, got)
    if default is not None and not is_there:
        return jnp.full(shape or (), default, jnp.float32)
    value = meta.unbox(given[name])
    is_array = isinstance(value, jax.Array | np.ndarray)
    checks.require_type(is_array, _NAME, f'{argument}["{name}"]', "an array of floats", type(value).__name__)
    value = jnp.asarray(value)
    checks.check_array(_NAME, f'{argument}["{name}"]', value, dtypes.FLOATS)
    if shape is not None:
        checks.check_shape(_NAME, f'{argument}["{name}"]', value, shape, "one for each feature of the kernel")
    return value
