"""A training step and a decoding step of a transformer on one device of a mesh, with its collectives.

The axis `data` cuts the batch and, in training, the matrices (FSDP); the axis `model` cuts heads, hidden features and
the vocabulary (tensor parallelism). A plan only traces these functions.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._arrays.quantize import quantize
from ..._arrays.quantized_array import QuantizedArray
from ..._contractions.dot import matmul
from ..gather import all_gather
from ..reduce import psum
from .sizes import Format, Sizes, list_matrices, make_weight_spec

Tree = dict[str, Any]


# Collectives of one format.


def gather_weight(form: Format, shard: jax.Array, axis: int) -> jax.Array:
    """Return a matrix whose rows or columns the devices of the axis `data` share; the gradient is scattered."""
    shard = shard.astype(form.dtype)
    # The axis `data` leaves few elements along the axis that it cuts: the blocks are along the other one.
    spec = make_weight_spec(form, 1 - axis)
    if spec is None:
        return lax.all_gather(shard, "data", axis=axis, tiled=True)
    return all_gather(shard, "data", spec=spec, axis=axis, tiled=True, backward_spec=form.traffic)


def add_over(form: Format, x: jax.Array, axis_name: str) -> jax.Array:
    """Return the sum of activations over an axis."""
    return lax.psum(x, axis_name) if form.traffic is None else psum(x, axis_name, spec=form.traffic)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_activations(form: Format, x: jax.Array) -> jax.Array:
    """Return the sum over the axis `model`, whose cotangent every device holds."""
    return add_over(form, x, "model")


def _sum_activations_fwd(form: Format, x: jax.Array) -> tuple[jax.Array, None]:
    return sum_activations(form, x), None


def _sum_activations_bwd(form: Format, _: None, g: jax.Array) -> tuple[jax.Array]:
    del form
    return (g,)


sum_activations.defvjp(_sum_activations_fwd, _sum_activations_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def copy_activations(form: Format, x: jax.Array) -> jax.Array:
    """Return activations that every device of the axis `model` uses; their cotangents are added."""
    del form
    return x


def _copy_activations_fwd(form: Format, x: jax.Array) -> tuple[jax.Array, None]:
    return copy_activations(form, x), None


def _copy_activations_bwd(form: Format, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (add_over(form, g, "model"),)


copy_activations.defvjp(_copy_activations_fwd, _copy_activations_bwd)


# Layers.


def normalize(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Return x divided by its root mean square over features, times a gain."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + np.float32(1e-6))
    return (wide * gain.reshape((1,) * (x.ndim - 1) + gain.shape)).astype(x.dtype)


def run_attention(sizes: Sizes, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the attention of heads, [batch, length, heads * head_dim]."""
    batch, length = q.shape[:2]
    q, k, v = (x.reshape(batch, x.shape[1], -1, sizes.head_dim) for x in (q, k, v))
    q = q.reshape(batch, length, k.shape[2], -1, sizes.head_dim)
    scores = jnp.einsum("blkgd,bmkd->bkglm", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores * np.float32(sizes.head_dim**-0.5), np.float32(-1e30))
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkglm,bmkd->blkgd", weights, v).reshape(batch, length, -1)


def feed_forward(x: jax.Array, gate: Any, up: Any, down: Any) -> jax.Array:
    """Return this device's part of the gated feed-forward network."""
    return matmul_any(jax.nn.silu(matmul_any(x, gate)) * matmul_any(x, up), down)


def matmul_any(x: jax.Array, w: Any) -> jax.Array:
    """Return the product with a matrix of floats or of codes, in the dtype of x."""
    return matmul(x, w).astype(x.dtype) if isinstance(w, QuantizedArray) else x @ w


def look_up(form: Format, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the embeddings of tokens from a table whose rows the axis `model` cuts."""
    first = lax.axis_index("model") * table.shape[0]
    local = tokens - first
    is_here = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.where(is_here, local, 0)]
    return sum_activations(form, jnp.where(is_here[..., None], rows, jnp.zeros((), rows.dtype)))


# Training.


def find_loss(sizes: Sizes, form: Format, params: Tree, tokens: jax.Array) -> jax.Array:
    """Return the loss of this device's batch; the layers are recomputed in the backward pass."""
    x = look_up(form, gather_weight(form, params["embed"], 1), tokens)
    length = tokens.shape[1]
    mask = jnp.tril(jnp.ones((length, length), bool)).reshape(1, 1, 1, length, length)

    @jax.checkpoint
    def apply_layer(x: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        w = {n: gather_weight(form, layer[n], 1 - cut) for n, (_, cut) in list_matrices(sizes).items()}
        h: Any = copy_activations(form, normalize(x, layer["norm1"]))
        q, k, v = (h @ w[n] for n in ("query", "key", "value"))
        out = run_attention(sizes, q, k, v, mask) @ w["out"]
        added: Any = sum_activations(form, out)
        x = x + added
        h = copy_activations(form, normalize(x, layer["norm2"]))
        added = sum_activations(form, feed_forward(h, w["gate"], w["up"], w["down"]))
        return x + added, None

    x, _ = lax.scan(apply_layer, x, params["layers"])

    @jax.checkpoint
    def find_token_losses(x: jax.Array, norm: jax.Array, shard: jax.Array) -> jax.Array:
        h: Any = copy_activations(form, normalize(x, norm))
        logits = jnp.matmul(h, gather_weight(form, shard, 0), preferred_element_type=jnp.float32)
        top = lax.stop_gradient(lax.pmax(lax.stop_gradient(jnp.max(logits, axis=-1)), "model"))
        total = _sum_over_model(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1))
        local = jnp.roll(tokens, -1, 1) - lax.axis_index("model") * logits.shape[-1]
        is_here = (local >= 0) & (local < logits.shape[-1])
        picked = jnp.take_along_axis(logits, jnp.where(is_here, local, 0)[..., None], axis=-1)[..., 0]
        return jnp.log(total) + top - _sum_over_model(jnp.where(is_here, picked, np.float32(0)))

    return jnp.mean(find_token_losses(x, params["norm"], params["unembed"]))


def _sum_over_model(x: jax.Array) -> jax.Array:
    # One number for each token: not worth quantizing.
    return sum_activations(Format("float32", jnp.float32), x)


def train(sizes: Sizes, form: Format, params: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree]:
    """Return the loss and the gradients of this device's parameters."""
    loss, grads = jax.value_and_grad(functools.partial(find_loss, sizes, form))(params, tokens)
    # The gains are on every device; the gradients of matrices have been scattered.
    gains = [grads["norm"], grads["layers"]["norm1"], grads["layers"]["norm2"]]
    grads["norm"], grads["layers"]["norm1"], grads["layers"]["norm2"] = lax.psum(gains, "data")
    return lax.pmean(loss, "data"), grads


# Decoding.


def decode(sizes: Sizes, form: Format, params: Tree, cache: Tree, tokens: jax.Array, step: jax.Array) -> Any:
    """Return the logits of the next tokens and the cache with the present ones."""
    x = look_up(form, params["embed"], tokens)

    def apply_layer(x: jax.Array, layer_and_cache: Any) -> tuple[jax.Array, Tree]:
        w, old = layer_and_cache
        h = normalize(x, w["norm1"])
        q, k, v = (matmul_any(h, w[n]) for n in ("query", "key", "value"))
        new = {name: append(form, old[name], value, step) for name, value in (("key", k), ("value", v))}
        keys, values = (read_cache(new[name]) for name in ("key", "value"))
        length = keys.shape[1]
        mask = (jnp.arange(length) <= step).reshape(1, 1, 1, 1, length)
        keys, values = (part.reshape(*part.shape[:2], -1) for part in (keys, values))
        x = x + add_over(form, matmul_any(run_attention(sizes, q, keys, values, mask), w["out"]), "model")
        h = normalize(x, w["norm2"])
        return x + add_over(form, feed_forward(h, w["gate"], w["up"], w["down"]), "model"), new

    x, cache = lax.scan(apply_layer, x, (params["layers"], cache))
    logits = matmul_any(normalize(x, params["norm"]), params["unembed"])
    return lax.all_gather(logits.astype(jnp.float32), "model", axis=2, tiled=True), cache


def append(form: Format, cache: Any, x: jax.Array, step: jax.Array) -> Any:
    """Return a cache, [batch, length, heads, head_dim], with the keys or values of one step."""
    x = x.reshape(x.shape[0], 1, *cache.shape[2:])
    entry = x if form.cache is None else quantize(x, form.cache)
    zero = jnp.int32(0)
    return jax.tree.map(lambda old, new: lax.dynamic_update_slice(old, new, (zero, step, zero, zero)), cache, entry)


def read_cache(cache: Any) -> jax.Array:
    """Return keys or values as floats."""
    return cache.dequantize() if isinstance(cache, QuantizedArray) else cache
