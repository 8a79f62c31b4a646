"""Normalization of batches, layers, groups and channels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..graph import register
from ..interpret import Call
from ..values import normalize_axis


def _along_channels(parameter: Any, x: Any) -> Any:
    """Return a parameter for each channel in the rank of x."""
    return parameter.reshape(1, -1, *(1,) * (x.ndim - 2))


def _standardize(x: Any, axes: tuple[int, ...], epsilon: float) -> tuple[Any, Any, Any]:
    """Return x with mean 0 and variance 1 along axes, the mean, and the inverse standard deviation."""
    mean = jnp.mean(x, axes, keepdims=True)
    centered = x - mean
    inverse = 1 / jnp.sqrt(jnp.mean(centered * centered, axes, keepdims=True) + epsilon)
    return centered * inverse, mean, inverse


@register("BatchNormalization")
def normalize_batch(
    call: Call, x: jax.Array, scale: jax.Array, bias: jax.Array, mean: jax.Array, variance: jax.Array
) -> Any:
    """ONNX BatchNormalization; with training_mode, by the statistics of the batch."""
    epsilon = call.get("epsilon", 1e-5)
    running: tuple[Any, ...] = ()
    if call.get("training_mode", 0):
        axes, momentum = (0, *range(2, x.ndim)), call.get("momentum", 0.9)
        batch_mean, batch_variance = jnp.mean(x, axes), jnp.var(x, axes)
        running = tuple(
            momentum * old + (1 - momentum) * new for old, new in ((mean, batch_mean), (variance, batch_variance))
        )
        mean, variance = batch_mean, batch_variance
    factor = scale / jnp.sqrt(variance + epsilon)
    y = (x - _along_channels(mean.astype(x.dtype), x)) * _along_channels(factor.astype(x.dtype), x)
    y = y + _along_channels(bias.astype(x.dtype), x)
    return (y.astype(x.dtype), *running) if running else y.astype(x.dtype)


@register("InstanceNormalization")
def normalize_instance(call: Call, x: jax.Array, scale: jax.Array, bias: jax.Array) -> Any:
    """ONNX InstanceNormalization."""
    y, _, _ = _standardize(x, tuple(range(2, x.ndim)), call.get("epsilon", 1e-5))
    return y * _along_channels(scale, x) + _along_channels(bias, x)


@register("LayerNormalization")
def normalize_layer(call: Call, x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> Any:
    """ONNX LayerNormalization, with the mean and the inverse standard deviation if the graph reads them."""
    axis = normalize_axis(call.get("axis", -1), x.ndim)
    wide = x.astype(jnp.float32) if call.get("stash_type", 1) == 1 else x
    y, mean, inverse = _standardize(wide, tuple(range(axis, x.ndim)), call.get("epsilon", 1e-5))
    y = y.astype(x.dtype) * scale
    return (y if bias is None else y + bias), mean, inverse


@register("RMSNormalization")
def normalize_mean_square(call: Call, x: jax.Array, scale: jax.Array) -> Any:
    """ONNX RMSNormalization."""
    axis = normalize_axis(call.get("axis", -1), x.ndim)
    wide = x.astype(jnp.float32) if call.get("stash_type", 1) == 1 else x
    square = jnp.mean(wide * wide, tuple(range(axis, x.ndim)), keepdims=True)
    return (wide / jnp.sqrt(square + call.get("epsilon", 1e-5))).astype(x.dtype).astype(scale.dtype) * scale


@register("GroupNormalization")
def normalize_group(call: Call, x: jax.Array, scale: jax.Array, bias: jax.Array) -> Any:
    """ONNX GroupNormalization; before opset 21 a scale is for a group, later for a channel."""
    count = call.get("num_groups")
    groups = x.reshape(x.shape[0], count, -1)
    y = _standardize(groups, (2,), call.get("epsilon", 1e-5))[0].reshape(x.shape)
    # Opset 21 replaced parameters for each group by parameters for each channel.
    if call.opset < 21 and scale.shape[0] == count:
        scale, bias = (jnp.repeat(p, x.shape[1] // count) for p in (scale, bias))
    return y * _along_channels(scale, x) + _along_channels(bias, x)


@register("LpNormalization")
def normalize_norm(call: Call, x: jax.Array) -> Any:
    """ONNX LpNormalization."""
    axis, p = normalize_axis(call.get("axis", -1), x.ndim), call.get("p", 2)
    norm = jnp.sum(jnp.abs(x) ** p, axis, keepdims=True) ** (1 / p)
    # The inner condition keeps 0 / 0 out of the gradient.
    return jnp.where(norm == 0, jnp.zeros((), x.dtype), x / jnp.where(norm == 0, 1, norm))


@register("LRN")
def normalize_local(call: Call, x: jax.Array) -> Any:
    """ONNX LRN: by the squares of neighboring channels."""
    size = call.get("size")
    low, high = (size - 1) // 2, size // 2
    ones = (1,) * (x.ndim - 2)
    padding = ((0, 0), (low, high), *((0, 0),) * (x.ndim - 2))
    total = lax.reduce_window(x * x, np.zeros((), x.dtype), lax.add, (1, size, *ones), (1,) * x.ndim, padding)
    return x / (call.get("bias", 1.0) + call.get("alpha", 1e-4) / size * total) ** call.get("beta", 0.75)


@register("MeanVarianceNormalization")
def normalize_mean_variance(call: Call, x: jax.Array) -> Any:
    """ONNX MeanVarianceNormalization."""
    return _standardize(x, tuple(normalize_axis(a, x.ndim) for a in call.get("axes", (0, 2, 3))), 1e-9)[0]
