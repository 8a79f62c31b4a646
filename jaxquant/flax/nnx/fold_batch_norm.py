"""Folding of a batch normalization into the NNX layer before it."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from ..._core import checks
from ..linen import fold_batch_norm as linen_folding
from .convert import read_feature_axes, require_module

_NAME = "flax.nnx.fold_batch_norm"

Model = TypeVar("Model", bound=nnx.Module)


def fold_batch_norm(layer: Model, norm: nnx.BatchNorm) -> Model:
    """Return a copy of an NNX layer that includes the batch normalization after it.

    kernel = kernel * scale / sqrt(var + epsilon)
    bias = (bias - mean) * scale / sqrt(var + epsilon) + norm's bias

    In inference, the folded layer returns what the normalization returned; remove the normalization from the model.
    Fold before ranges are found, scales are started and training continues, because the folded weights are
    quantized.

    Args:
        layer: A `Linear`, `LinearGeneral`, `Einsum`, `Conv` or `ConvTranspose`, of flax or of this package. A layer
            without a bias gets one.
        norm: The `BatchNorm` over the last axis of the layer's outputs.

    Returns:
        A copy of the layer; both arguments are unchanged.

    Raises:
        TypeError: layer or norm is not of one of these classes.
        ValueError: norm is over a different axis or a different number of features, its variances are negative, the
            layer is converted, or no axis of the kernel is the last axis of the outputs.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> layer, norm = nnx.Linear(1, 2, use_bias=False, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        >>> layer.kernel[...] = jnp.array([[1.0, 2.0]])
        >>> norm.mean[...], norm.var[...], norm.epsilon = jnp.array([0.5, 4.0]), jnp.array([0.25, 4.0]), 0.0
        >>> folded = qnnx.fold_batch_norm(layer, norm)
        >>> folded.kernel[...], folded.bias[...]
        (Array([[2., 1.]], dtype=float32), Array([-1., -2.], dtype=float32))

    Source: Jacob et al., arXiv 1712.05877, section 3.2, equation 14.
    """
    require_module(_NAME, "layer", layer)
    checks.require_type(isinstance(norm, nnx.BatchNorm), _NAME, "norm", "a BatchNorm", type(norm).__name__)
    folded: Any = nnx.clone(layer)
    kernel, bias = getattr(folded, "kernel", None), getattr(folded, "bias", None)
    is_float = isinstance(kernel, nnx.Variable) and isinstance(kernel[...], jax.Array)
    checks.require(is_float, _NAME, "layer", "a layer with a float kernel", type(layer).__name__)
    assert kernel is not None
    weights = kernel[...]
    axis = _read_last_output_axis(layer, weights.ndim)
    checks.require(norm.axis in (-1, (-1,)), _NAME, "norm.axis", "-1, the axis of the features", norm.axis)
    # A bias has all feature axes, not only the one that is normalized.
    axes = read_feature_axes(layer, weights.ndim) or (axis,)
    zeros = jnp.zeros([weights.shape[a] for a in axes], weights.dtype)
    params = {"kernel": weights, "bias": zeros if bias is None else bias[...]}
    learned = {name: v[...] for name in ("scale", "bias") if (v := getattr(norm, name)) is not None}
    stats = {"mean": norm.mean[...], "var": norm.var[...]}
    params = linen_folding.fold_batch_norm(params, learned, stats, epsilon=norm.epsilon, axis=axis)
    kernel.set_value(params["kernel"])
    if bias is not None:
        bias.set_value(params["bias"])
    else:
        folded.bias = nnx.Param(params["bias"])
        folded.use_bias = True
    return folded


def _read_last_output_axis(layer: nnx.Module, rank: int) -> int:
    """Return the axis of a layer's kernel that is the last axis of its outputs, counted from the back."""
    classes = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose)
    expected = "a Linear, LinearGeneral, Einsum, Conv or ConvTranspose"
    checks.require_type(isinstance(layer, classes), _NAME, "layer", expected, type(layer).__name__)
    if not isinstance(layer, nnx.Einsum):
        axes = read_feature_axes(layer, rank)
        assert axes
        return axes[-1]
    operands, _, result = layer.einsum_str.replace(" ", "").partition("->")
    inputs, labels = operands.split(",")
    last = labels.rfind(result[-1:]) if result[-1:].isalpha() else -1
    # If the inputs have the label too, it is a batch axis. An ellipsis after the label would hide its position.
    is_feature = last >= 0 and "..." not in labels[last:] and result[-1] not in inputs
    expected = "an einsum_str with an axis of the kernel alone as the last output axis"
    checks.require(is_feature, _NAME, "layer", expected, repr(layer.einsum_str))
    return last - len(labels)
