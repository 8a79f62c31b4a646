"""ONNX Runtime's operators of transformers, domain com.microsoft: attention, rotary embeddings, sums of embeddings."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .... import ops
from ...._kernels import barriers
from ..graph import register
from ..interpret import Call
from ..values import Tensor
from .attention import rotate_heads, split_heads
from .normalization import normalize_layer
from .quantized import make_zero, read_scalar

_register = functools.partial(register, domain="com.microsoft")
_HIGHEST = lax.Precision.HIGHEST
_LOWEST = np.float32(np.finfo(np.float32).min)


def _attend(
    call: Call, q: jax.Array, k: jax.Array, v: jax.Array, bias: Any, scale: float | None, sink: Any = None
) -> jax.Array:
    """Return [batch, length, heads * size] of queries, keys and values [batch, heads, length, size]; bias is added."""
    call.reserve((*q.shape[:3], k.shape[2]), q.dtype)
    repeats = q.shape[1] // k.shape[1]
    k, v = (x if repeats == 1 else jnp.repeat(x, repeats, axis=1) for x in (k, v))
    products = jnp.einsum("bhqd,bhkd->bhqk", q, k, precision=_HIGHEST).astype(jnp.float32)
    products = products * np.float32(scale or 1 / math.sqrt(q.shape[3]))
    cap = call.get("softcap", 0.0)
    products = jnp.tanh(products / cap) * cap if cap else products
    products = products if bias is None else products + bias
    # A sink takes a part of the probability, and adds nothing to the result.
    if sink is not None:
        shape = (*products.shape[:3], 1)
        products = jnp.concatenate([products, jnp.broadcast_to(sink.reshape(1, -1, 1, 1), shape)], axis=3)
    weights = jax.nn.softmax(products, axis=-1)[..., : k.shape[2]].astype(q.dtype)
    y = jnp.einsum("bhqk,bhkd->bhqd", weights, v, precision=_HIGHEST)
    return y.transpose(0, 2, 1, 3).reshape(y.shape[0], y.shape[2], -1)


def _join_masks(call: Call, mask: Any, added: Any, is_causal: bool, shape: tuple[int, int, int]) -> Any:
    """Return what is added to the products for a mask of 1 and 0, or of lengths, for each batch; None if nothing is.

    Args:
        call: the node.
        mask: int32 [batch] or [2 * batch], lengths; or 1 where a key counts: [batch, keys] or [batch, queries, keys].
        added: floats to add.
        is_causal: whether a query attends to the keys up to its own only.
        shape: the batch, the number of queries, and the number of keys.
    """
    batch, rows, columns = shape
    filler = np.float32(call.get("mask_filter_value", -10000.0))
    bias = None if added is None else added.astype(jnp.float32)
    if mask is not None:
        order = jnp.arange(columns)
        if mask.ndim == 1:
            ends, starts = mask[:batch, None], mask[batch:, None]
            counts = (order < ends) & (order >= starts) if starts.size else order < ends
        elif mask.ndim == 4:
            raise ValueError("a mask of four dimensions is not supported")
        else:
            counts = mask != 0
        part = jnp.where(counts, np.float32(0), filler).reshape(batch, 1, -1, columns)
        bias = part if bias is None else bias + part
    if is_causal:
        is_seen = jnp.arange(columns) <= jnp.arange(rows)[:, None] + (columns - rows)
        part = jnp.where(is_seen, np.float32(0), _LOWEST)
        bias = part if bias is None else jnp.where(is_seen, bias, _LOWEST)
    return bias


@_register("Attention")
def attend_projected(
    call: Call, x: jax.Array, w: jax.Array, bias: jax.Array | None = None, *inputs: jax.Array
) -> Any:  # fmt: skip
    """ONNX Runtime's Attention: queries, keys and values are the product of one input and one matrix."""
    joint = jnp.matmul(x, w, precision=_HIGHEST)
    return _attend_joint(call, joint if bias is None else joint + bias, *inputs)


@_register("QAttention", keeps=(3, 4, 6, 7))
def attend_projected_codes(
    call: Call, x: jax.Array, w: jax.Array, bias: jax.Array, x_scale: Tensor, w_scale: Tensor, *inputs: Any
) -> Any:
    """ONNX Runtime's QAttention: the product is one of codes, and rounded to floats as MatMulIntegerToFloat's."""
    mask, x_point, w_point, past = [*inputs, *[None] * (4 - len(inputs))]
    x_point, w_point = (make_zero(a.dtype) if p is None else read_scalar(p) for p, a in ((x_point, x), (w_point, w)))
    joint = ops.matmul_integer_to_float(x, w, read_scalar(x_scale), read_scalar(w_scale), x_point, w_point, bias)
    return _attend_joint(call, joint, mask, past)


def _attend_joint(
    call: Call, joint: jax.Array, mask: Any = None, past: Any = None, added: Any = None, length: Any = None
) -> Any:
    """Return the results of Attention for queries, keys and values side by side; `past` has keys and values."""
    if length is not None:
        raise ValueError("a buffer for past keys and values is not supported")
    if call.get("do_rotary", 0):
        raise ValueError("do_rotary is not supported")
    heads, sizes = call.get("num_heads"), call.get("qkv_hidden_sizes")
    ends = np.cumsum(sizes)[:2] if sizes else 3
    q, k, v = (split_heads(part, heads) for part in jnp.split(joint, ends, axis=-1))
    if past is not None:
        k, v = (jnp.concatenate([old, new], axis=2) for old, new in zip(past, (k, v), strict=True))
    shape = joint.shape[0], q.shape[2], k.shape[2]
    bias = _join_masks(call, mask, added, bool(call.get("unidirectional", 0)), shape)
    y = _attend(call, q, k, v, bias, call.get("scale"))
    return (y, jnp.stack([k, v])) if call.has_second_output else y


@_register("MultiHeadAttention")
def attend_heads(call: Call, q: jax.Array, *inputs: Any) -> Any:
    """ONNX Runtime's MultiHeadAttention."""
    k, v, bias, mask, added, past_k, past_v, length = [*inputs, *[None] * (8 - len(inputs))]
    if length is not None or len(inputs) > 8:
        raise ValueError("a buffer for past keys and values is not supported")
    heads = call.get("num_heads")
    if k is None or v is None:
        raise ValueError("queries, keys and values in one array are not supported")
    if bias is not None:
        # Keys and values of four dimensions have been projected before.
        parts = jnp.split(bias, [q.shape[-1], 2 * q.shape[-1]])
        q, k, v = (x + part if x.ndim == 3 else x for x, part in zip((q, k, v), parts, strict=True))
    q, k, v = (split_heads(x, heads) for x in (q, k, v))
    if past_k is not None:
        k, v = (jnp.concatenate([old, new], axis=2) for old, new in ((past_k, k), (past_v, v)))
    shape = q.shape[0], q.shape[2], k.shape[2]
    masks = _join_masks(call, mask, added, bool(call.get("unidirectional", 0)), shape)
    return _attend(call, q, k, v, masks, call.get("scale")), k, v


def _look_up_turns(cosines: jax.Array, sines: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return rows of both tables for the heads of each batch, [batch, 1, length, size / 2]."""
    cosines, sines = (jnp.take(table, places, axis=0, mode="clip")[:, None] for table in (cosines, sines))
    return cosines, sines


@_register("GroupQueryAttention", static=(6,))
def attend_groups(call: Call, q: jax.Array, *inputs: Any) -> Any:
    """ONNX Runtime's GroupQueryAttention: causal, with caches of keys and values in which each row has a length."""
    k, v, past_k, past_v, lasts, total, cosines, sines, positions, added, sink, *others = [
        *inputs, *[None] * (11 - len(inputs)),
    ]  # fmt: skip
    is_smooth, cache = call.get("smooth_softmax", 0) > 0, call.get("k_quant_type", "NONE")
    if is_smooth or cache != "NONE" or any(x is not None for x in others):
        raise ValueError("smooth_softmax and quantized caches are not supported")
    heads, kv_heads = call.get("num_heads"), call.get("kv_num_heads")
    if k is None:
        size = q.shape[2] // (heads + 2 * kv_heads)
        q, k, v = jnp.split(q, [heads * size, (heads + kv_heads) * size], axis=-1)
    q, k, v = (split_heads(x, n) for x, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
    rows, count = q.shape[2], int(total.reshape(()))
    # The keys that there are before these: of a prompt none, and none are padding elsewhere.
    before = jnp.zeros_like(lasts) if count == rows else lasts + 1 - rows
    before = before.reshape(-1, 1).astype(jnp.int32)
    places = before + jnp.arange(rows)
    if call.get("do_rotary", 0):
        at = places if positions is None else positions.astype(jnp.int32)
        turns = _look_up_turns(cosines, sines, at)
        is_interleaved = bool(call.get("rotary_interleaved", 0))
        q, k = (rotate_heads(x, *turns, 2 * cosines.shape[1], is_interleaved) for x in (q, k))
    columns = max(count, 0 if past_k is None else past_k.shape[2])
    present = []
    for old, new in ((past_k, k), (past_v, v)):
        call.reserve((*new.shape[:2], columns, new.shape[3]), new.dtype)
        held = jnp.zeros((*new.shape[:2], columns, new.shape[3]), new.dtype)
        if old is not None:
            held = held.at[:, :, : old.shape[2]].set(old)
            held = jnp.where(jnp.arange(columns)[:, None] < before[:, :, None, None], held, 0)
        write = jax.vmap(lambda cache, x, start: lax.dynamic_update_slice(cache, x, (0, start, 0)))
        present.append(write(held, new, before[:, 0]))
    order, window = jnp.arange(columns), call.get("local_window_size", -1)
    is_seen = order <= places[..., None]
    is_seen = is_seen & (order > places[..., None] - window) if window > 0 else is_seen
    bias = jnp.where(is_seen[:, None], np.float32(0), _LOWEST)
    if added is not None:
        widths = [(0, 0)] * 3 + [(0, columns - added.shape[3])]
        bias = jnp.where(is_seen[:, None], jnp.pad(added.astype(jnp.float32), widths), _LOWEST)
    k, v = present
    y = _attend(call, q, k, v, bias, call.get("scale"), None if sink is None else sink.astype(jnp.float32))
    return y, k, v


@_register("RotaryEmbedding")
def rotate_at_positions(
    call: Call, x: jax.Array, positions: jax.Array, cosines: jax.Array, sines: jax.Array
) -> Any:  # fmt: skip
    """ONNX Runtime's RotaryEmbedding of [batch, length, features] or [batch, heads, length, size]."""
    if call.get("is_packed_batching", 0):
        raise ValueError("is_packed_batching is not supported")
    size = call.get("rotary_embedding_dim", 0) or 2 * cosines.shape[1]
    is_partial = bool(call.get("rotary_embedding_dim", 0))
    heads = split_heads(x, call.get("num_heads") if is_partial else x.shape[-1] // size) if x.ndim == 3 else x
    length = heads.shape[2]
    places = positions.reshape(-1, 1) + jnp.arange(length) if positions.ndim == 1 else positions
    turns = _look_up_turns(cosines, sines, places.astype(jnp.int32))
    y = rotate_heads(heads, *turns, size, bool(call.get("interleaved", 0))) * np.asarray(
        call.get("scale", 1.0), x.dtype
    )
    return y if x.ndim == 4 else y.transpose(0, 2, 1, 3).reshape(x.shape)


@_register("EmbedLayerNormalization")
def normalize_embeddings(
    call: Call, tokens: jax.Array, segments: jax.Array | None, words: jax.Array, places: jax.Array, *inputs: Any
) -> Any:
    """ONNX Runtime's EmbedLayerNormalization: the normalized sum of looked-up rows, lengths of a mask, and the sum."""
    kinds, gamma, beta, mask, positions = [*inputs, *[None] * (5 - len(inputs))]
    at = jnp.arange(tokens.shape[1])[None] if positions is None else positions
    total = jnp.take(words, tokens, axis=0, mode="clip") + jnp.take(places, at, axis=0, mode="clip")
    if segments is not None:
        total = total + jnp.take(kinds, segments, axis=0, mode="clip")
    counts = jnp.zeros(tokens.shape[0], jnp.int32) if mask is None else jnp.sum(mask, axis=1, dtype=jnp.int32)
    return normalize_layer(call, total, gamma, beta)[0], counts, total


# The levels of the two codebooks of MatMulBnb4.
_LEVELS = (
    (0, 5.208333333e-03, 0.66666667, 1, 0.33333333, 0.5, 0.16666667, 0.25),
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
)


@_register("MatMulBnb4")
def multiply_by_codebook(call: Call, x: jax.Array, codes: jax.Array, scales: jax.Array) -> Any:
    """ONNX Runtime's MatMulBnb4: a product with the transpose of a matrix of 4-bit codes, nf4 or fp4."""
    k, n = call.get("K"), call.get("N")
    levels = np.array(_LEVELS[call.get("quant_type", 1)], np.float32)
    levels = np.concatenate([levels, -levels])[:16]
    call.reserve((n, k), x.dtype)
    # The first of two codes is in the high bits.
    index = jnp.stack([codes >> 4, codes & 15], axis=-1).reshape(-1)[: n * k]
    each = jnp.repeat(scales, call.get("block_size"))[: n * k]
    w = barriers.round_result(jnp.asarray(levels)[index] * each.astype(jnp.float32)).reshape(n, k)
    return jnp.matmul(x, w.T.astype(x.dtype), precision=_HIGHEST)
