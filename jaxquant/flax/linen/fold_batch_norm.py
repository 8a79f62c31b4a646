"""Folding of a batch normalization into the layer before it, once its statistics are constant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

from ..._core import checks, dtypes

_NAME = "flax.fold_batch_norm"


def fold_batch_norm(
    layer: Mapping[str, object], norm: Mapping[str, object], stats: Mapping[str, object], *, epsilon: float = 1e-5,
    axis: int = -1,
) -> dict[str, Any]:  # fmt: skip
    """Return the parameters of a Linen layer that includes the batch normalization after it.

    kernel = kernel * scale / sqrt(var + epsilon)
    bias = (bias - mean) * scale / sqrt(var + epsilon) + norm's bias

    In inference, a layer with these parameters returns what the normalization returned. The layer needs
    `use_bias=True`, and the normalization must be left out of the module that is served. Fold before ranges are
    found and before training continues, because the folded weights are quantized.

    Args:
        layer: The parameters of a layer such as `Dense` or `Conv`, a mapping: "kernel", a float32, float16 or bfloat16
            array, and perhaps "bias".
        norm: The parameters of a `BatchNorm` over the layer's features, a mapping: "scale" and "bias", which may be
            missing, each with one element for each feature.
        stats: The "batch_stats" of the `BatchNorm`, a mapping: "mean" and "var", each with one element for each
            feature.
        epsilon: Static. The epsilon of the `BatchNorm`, a number that is not negative.
        axis: Static. The axis of the kernel that becomes the normalized axis of the outputs: -1, the last, for `Dense`,
            `DenseGeneral`, `Conv` and `ConvTranspose`; -2 for `ConvTranspose(transpose_kernel=True)`.

    Returns:
        {"kernel": ..., "bias": ...} in the dtype of the kernel, partitioned like the entries of `layer`.

    Raises:
        TypeError: epsilon is not a number, axis is not an int, or an entry is not an array of floats, as in a converted
            layer.
        ValueError: an entry is missing, is unknown, or does not have one element for each feature; epsilon is negative;
            or var + epsilon is known (not traced) and not positive.

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
    # The arithmetic is in float32; the results have the kernel's dtype.
    axis = checks.check_axis(_NAME, axis, kernel.ndim)
    features = (kernel.shape[axis],)
    mean, var = (_read_entry("stats", stats, name, features).astype(jnp.float32) for name in ("mean", "var"))
    _check_variance(var, epsilon)
    expected = 'a mapping with "scale" and "bias", or with one of them or neither'
    is_norm = isinstance(norm, Mapping) and set(norm) <= {"scale", "bias"}
    checks.require(is_norm, _NAME, "norm", expected, sorted(norm) if isinstance(norm, Mapping) else type(norm).__name__)
    scale = _read_entry("norm", norm, "scale", features, 1.0).astype(jnp.float32)
    offset = _read_entry("norm", norm, "bias", features, 0.0).astype(jnp.float32)
    bias = _read_entry("layer", layer, "bias", default=0.0)
    # A missing bias was read as the scalar 0.
    bias = jnp.zeros(features, jnp.float32) if bias.ndim == 0 else bias.astype(jnp.float32)
    expected = f"shape {features}, with the layer's other features in front"
    checks.require(bias.shape[-1:] == features, _NAME, 'layer["bias"]', expected, f"shape {bias.shape}")
    factor = scale / jnp.sqrt(var + np.float32(epsilon))
    kernel_factor = jax.lax.broadcast_in_dim(factor, kernel.shape, (axis,))
    mean, bias_factor, offset = (_broadcast_features(part, bias) for part in (mean, factor, offset))
    folded = {
        "kernel": (kernel.astype(jnp.float32) * kernel_factor).astype(kernel.dtype),
        "bias": ((bias - mean) * bias_factor + offset).astype(kernel.dtype),
    }
    # Partitioned parameters are boxed, and stay boxed.
    boxes = {name: layer[name] for name in folded if isinstance(layer.get(name), meta.AxisMetadata)}
    return {**folded, **{name: meta.replace_boxed(box, folded[name]) for name, box in boxes.items()}}


def _broadcast_features(part: jax.Array, bias: jax.Array) -> jax.Array:
    """Return an array [features] broadcast to the shape of a bias [..., features]."""
    return jnp.broadcast_to(part.reshape(*(1,) * (bias.ndim - 1), part.size), bias.shape)


def _check_variance(var: jax.Array, epsilon: float) -> None:
    """Raise ContractValueError unless known variances are finite, and positive once epsilon is added."""
    if checks.is_traced(var) or not var.is_fully_addressable:
        return
    argument, values = 'stats["var"]', np.asarray(var)
    least, most = float(values.min(initial=1)), float(values.max(initial=1))
    expected = "numbers that are not negative"
    checks.require(least >= 0, _NAME, argument, expected, "NaN" if np.isnan(least) else least)
    checks.require(most < np.inf, _NAME, argument, "finite numbers", most)
    expected = "numbers that are normal float32 once epsilon is added, or a larger epsilon"
    # XLA:CPU flushes subnormal numbers to 0, and the square root would divide by 0.
    holds = np.float32(least) + np.float32(epsilon) >= np.finfo(np.float32).tiny
    checks.require(bool(holds), _NAME, argument, expected, least)


def _read_entry(
    argument: str,
    mapping: Mapping[str, object],
    name: str,
    shape: tuple[int, ...] | None = None,
    default: float | None = None,
) -> jax.Array:
    """Return an entry of an argument, and check its dtype and its shape.

    Args:
        argument: the name of the argument, for errors.
        mapping: the argument.
        name: the key of the entry.
        shape: the expected shape, or None for any.
        default: the value of all elements if the entry is missing; None raises an error instead.
    """
    is_present = isinstance(mapping, Mapping) and name in mapping
    got = sorted(mapping) if isinstance(mapping, Mapping) else type(mapping).__name__
    checks.require(is_present or default is not None, _NAME, argument, f'a mapping with "{name}"', got)
    if default is not None and not is_present:
        return jnp.full(shape or (), default, jnp.float32)
    value = meta.unbox(mapping[name])
    is_array = isinstance(value, jax.Array | np.ndarray)
    checks.require_type(is_array, _NAME, f'{argument}["{name}"]', "an array of floats", type(value).__name__)
    value = jnp.asarray(value)
    checks.check_array(_NAME, f'{argument}["{name}"]', value, dtypes.FLOATS)
    if shape is not None:
        checks.check_shape(_NAME, f'{argument}["{name}"]', value, shape, "one for each feature of the kernel")
    return value
