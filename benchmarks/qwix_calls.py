"""qwix's contestants: int8 weights quantized beforehand, activations quantized from float32 in each call, in one jit.

The granularity follows qwix's own rules: one scale per row of the activations (per image in a convolution), and one per
column (output channel) of the weights, or per block of a column.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

from .contest import Call, Missing

_INSTALLED = importlib.util.find_spec("qwix") is not None
_NOT_INSTALLED = Missing("not installed")


def matmul(
    a: np.ndarray, b: np.ndarray, bias: np.ndarray | None = None, block_size: int | None = None
) -> Call | Missing:
    """Return a call that multiplies with int8 on both sides, batches included, or why there is none.

    Args:
        a: float32 activations.
        b: float32 weights.
        bias: added to the product.
        block_size: how many weights along K share a scale; all of a column without it.
    """
    if not _INSTALLED:
        return _NOT_INSTALLED
    import qwix

    last = a.ndim - 1
    weights = _weights(b, jnp.int8, block_size)

    @jax.jit
    def product(a: jax.Array, b: Any, bias: jax.Array | None) -> jax.Array:
        y = qwix.dot_general(qwix.quantize(a, jnp.int8, channelwise_axes=range(last)), b, _contracted(last))
        return y if bias is None else y + bias

    return _try_call(partial(product, *jax.device_put((a, weights, bias))))


def int4_weights(a: np.ndarray, b: np.ndarray, block_size: int) -> Call | Missing:
    """Return a call that multiplies float32 activations with int4 weights, or why there is none."""
    return weight_only(a, b, jnp.int4, block_size)


def weight_only(a: np.ndarray, b: np.ndarray, dtype: Any, block_size: int | None = None) -> Call | Missing:
    """Return a call that multiplies float32 activations with weights of a dtype or "nf4", or why there is none."""
    if not _INSTALLED:
        return _NOT_INSTALLED
    import qwix

    product = jax.jit(lambda a, b: qwix.dot_general(a, b, _contracted(a.ndim - 1)))
    return _try_call(partial(product, jax.device_put(a), _weights(b, dtype, block_size)))


def einsum(subscripts: str, a: np.ndarray, b: np.ndarray) -> Call | Missing:
    """Return a call that contracts int8 with int8, a scale each, or why there is none: a is quantized in it."""
    if not _INSTALLED:
        return _NOT_INSTALLED
    import qwix

    right = jax.block_until_ready(qwix.quantize(jnp.asarray(b), jnp.int8))
    product = jax.jit(lambda a, b: qwix.einsum(subscripts, qwix.quantize(a, jnp.int8), b))
    return _try_call(partial(product, jax.device_put(a), right))


def quantize(x: np.ndarray, granularity: Any) -> Call | Missing:
    """Return a call that quantizes a float32 matrix to int8, with the same granularity as jaxquant."""
    if not _INSTALLED:
        return _NOT_INSTALLED
    import qwix

    shared: dict[str, Any] = {"channelwise_axes": ()}
    if isinstance(granularity, jq.PerAxis):
        shared = {"channelwise_axes": (granularity.axis,)}
    elif isinstance(granularity, jq.Blocked):
        shared = {"channelwise_axes": (0,), "tiled_axes": {1: granularity.size}}
    return _try_call(partial(jax.jit(lambda x: qwix.quantize(x, jnp.int8, **shared)), jax.device_put(x)))


def conv(
    x: np.ndarray, w: np.ndarray, bias: np.ndarray, attributes: dict[str, Any], feature_axis: int = 0
) -> Call | Missing:
    """Return a call that convolves with int8 on both sides, or why there is none.

    Args:
        x: float32 images, batch first.
        w: float32 kernels.
        bias: shaped to be added to the result.
        attributes: the rest of `lax.conv_general_dilated`'s arguments.
        feature_axis: where the kernels have their output channels.
    """
    if not _INSTALLED:
        return _NOT_INSTALLED
    import qwix

    @jax.jit
    def convolved(x: jax.Array, w: Any, bias: jax.Array) -> jax.Array:
        return qwix.conv_general_dilated(qwix.quantize(x, jnp.int8, channelwise_axes=(0,)), w, **attributes) + bias

    weights = qwix.quantize(jnp.asarray(w), jnp.int8, channelwise_axes=(feature_axis,))
    return _try_call(partial(convolved, jax.device_put(x), weights, jax.device_put(bias)))


def _weights(b: np.ndarray, dtype: Any, block_size: int | None) -> Any:
    import qwix

    along_k = b.ndim - 2
    columns = [axis for axis in range(b.ndim) if axis != along_k]
    blocks = None if block_size is None else {along_k: block_size}
    return jax.block_until_ready(qwix.quantize(jnp.asarray(b), dtype, channelwise_axes=columns, tiled_axes=blocks))


def _contracted(last: int) -> Any:
    batch = tuple(range(last - 1))
    return ((last,), (last - 1,)), (batch, batch)


def _try_call(call: Call) -> Call | Missing:
    """Return a call that has run once, or its error: XLA does not have every integer kernel on every backend."""
    try:
        jax.block_until_ready(call())
    except Exception as error:
        return Missing(" ".join(str(error).split())[:60])
    return call
