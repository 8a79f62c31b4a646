"""Attention and rotary embeddings."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...model_file import read_onnx_dtype
from ..graph import register
from ..interpret import Call
from ..values import canonicalize_dtype, convert_to_jax

_HIGHEST = lax.Precision.HIGHEST
_WITH_BIAS, _AFTER_SOFTMAX = 2, 3


def split_heads(x: Any, heads: int | None) -> Any:
    """Return [batch, heads, length, size] of [batch, length, heads * size]; rank 4 stays as it is."""
    if x.ndim == 4:
        return x
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


@register("Attention")
def attend(call: Call, q: jax.Array, k: jax.Array, v: jax.Array, *inputs: jax.Array) -> Any:
    """ONNX Attention: the result, the past and present keys and values, and the products if asked for."""
    mask, past_k, past_v, lengths = [*inputs, *[None] * (4 - len(inputs))]
    has_heads = q.ndim == 4
    q = split_heads(q, call.get("q_num_heads"))
    k, v = (split_heads(x, call.get("kv_num_heads")) for x in (k, v))
    k = k if past_k is None else jnp.concatenate([past_k, k], axis=2)
    v = v if past_v is None else jnp.concatenate([past_v, v], axis=2)
    scale = call.get("scale")
    # ONNX multiplies both operands by the root of the scale: a product of unscaled ones may overflow in 16 bits.
    root = np.asarray(math.sqrt(1 / math.sqrt(q.shape[3]) if scale is None else scale)).astype(q.dtype)
    call.reserve((*q.shape[:3], k.shape[2]), q.dtype)
    # With fewer heads of keys than of queries, neighboring queries share one.
    repeats = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x if repeats == 1 else jnp.repeat(x, repeats, axis=1) for x in (k, v))
    products = jnp.einsum("bhqd,bhkd->bhqk", q * root, wide_k * root, precision=_HIGHEST)
    if call.get("softcap", 0.0) > 0:
        raw, cap = products, call.get("softcap")
        products = (jnp.tanh(products / cap) * cap).astype(q.dtype)
        shown = products if call.get("qk_matmul_output_mode", 0) == 1 else raw
    else:
        shown = products
    bias = _make_bias(call, q, k, mask, past_k, lengths)
    weights, biased = _compute_weights(call, products, bias)
    mode = call.get("qk_matmul_output_mode", 0)
    shown = biased if mode == _WITH_BIAS else weights if mode == _AFTER_SOFTMAX else shown
    y = jnp.einsum("bhqk,bhkd->bhqd", weights.astype(q.dtype), wide_v, precision=_HIGHEST)
    if not has_heads:
        y = y.transpose(0, 2, 1, 3).reshape(y.shape[0], y.shape[2], -1)
    return y, k, v, shown.astype(q.dtype)


def _make_bias(call: Call, q: Any, k: Any, mask: Any, past: Any, lengths: Any) -> Any:
    """Return what is added to the products: 0 where a query may attend to a key, -inf where it may not."""
    infinity, zero = np.asarray(-np.inf, q.dtype), np.zeros((), q.dtype)
    rows, columns = q.shape[2], k.shape[2]
    bias = jnp.zeros((rows, columns), q.dtype)
    if mask is not None:
        missing = columns - mask.shape[-1]
        is_bool = mask.dtype == np.bool_
        if missing > 0:
            widths = [(0, 0)] * (mask.ndim - 1) + [(0, missing)]
            mask = jnp.pad(mask, widths, constant_values=False if is_bool else -np.inf)
        bias = bias + (jnp.where(mask, zero, infinity) if is_bool else mask)
    # The position of the first query among the keys.
    if past is None and lengths is not None:
        offset = (lengths.reshape(-1, 1, 1, 1) - rows).astype(jnp.int32)
    else:
        offset = np.int32(0 if past is None else past.shape[2])
    distance = jnp.arange(rows)[:, None] + offset - jnp.arange(columns)
    left, right = call.get("left_window_size", -1), call.get("right_window_size", -1)
    right = min(right, 0) if right >= 0 and call.get("is_causal", 0) else 0 if call.get("is_causal", 0) else right
    # Masks are added one by one: -inf plus -inf is still -inf, and a mask of the model may hold other numbers.
    if left >= 0:
        bias = bias + jnp.where(distance <= left, zero, infinity)
    if right >= 0:
        bias = bias + jnp.where(-distance <= right, zero, infinity)
    if lengths is not None:
        is_valid = jnp.arange(columns) < lengths.reshape(-1, 1, 1, 1)
        bias = bias + jnp.where(is_valid, zero, infinity)
    return bias


def _compute_weights(call: Call, products: Any, bias: Any) -> tuple[Any, Any]:
    """Return the softmax of the products plus the bias, zeros for a query without keys, and that sum."""
    biased = products + bias
    precision = call.get("softmax_precision")
    wide = biased if not precision else biased.astype(canonicalize_dtype(read_onnx_dtype(precision, "Attention")))
    # jax.nn.softmax would give NaN for a query that may attend to no key.
    top = jnp.max(wide, axis=-1, keepdims=True)
    exponentials = jnp.exp(wide - jnp.where(jnp.isneginf(top), 0, top))
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    weights = exponentials / jnp.where(total == 0, 1, total)
    is_masked = jnp.isneginf(jnp.max(bias, axis=-1, keepdims=True))
    return jnp.where(is_masked, 0, weights), biased


@register("FlexAttention", domain="ai.onnx.preview")
def attend_flexibly(call: Call, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """ONNX FlexAttention: subgraphs may change the products, and the probabilities."""
    scale, precision = call.get("scale"), call.get("softmax_precision")
    root = np.asarray(math.sqrt(1 / math.sqrt(q.shape[3]) if scale is None else scale)).astype(q.dtype)
    call.reserve((*q.shape[:3], k.shape[2]), q.dtype)
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    wide = canonicalize_dtype(read_onnx_dtype(precision, call.node.op)) if precision else q.dtype
    wide = wide if wide.itemsize >= 4 or precision else np.dtype(np.float32)
    products = jnp.einsum("bhqd,bhkd->bhqk", q * root, k * root, precision=_HIGHEST).astype(wide)
    for name in ("score_mod", "prob_mod"):
        products = products if name == "score_mod" else jax.nn.softmax(products, axis=-1)
        if call.get(name) is not None:
            products = convert_to_jax(call.run_subgraph(call.get(name), [products])[0]).astype(wide)
    return jnp.einsum("bhqk,bhkd->bhqd", products, v.astype(wide), precision=_HIGHEST).astype(v.dtype)


def rotate_heads(heads: Any, cosines: Any, sines: Any, size: int, is_interleaved: bool) -> Any:
    """Return arrays with pairs of their first `size` features turned; a pair is two neighbors, or one of each half."""
    part, rest = heads[..., :size], heads[..., size:]
    left, right = (part[..., 0::2], part[..., 1::2]) if is_interleaved else jnp.split(part, 2, axis=-1)
    real, imaginary = cosines * left - sines * right, sines * left + cosines * right
    if is_interleaved:
        turned = jnp.stack([real, imaginary], axis=-1).reshape(part.shape)
    else:
        turned = jnp.concatenate([real, imaginary], axis=-1)
    return jnp.concatenate([turned, rest], axis=-1)


@register("RotaryEmbedding")
def rotate_embedding(
    call: Call, x: jax.Array, cosines: jax.Array, sines: jax.Array, positions: jax.Array | None = None
) -> Any:
    """ONNX RotaryEmbedding."""
    shape = x.shape
    heads = x.transpose(0, 2, 1, 3) if x.ndim == 4 else x.reshape(*shape[:2], call.get("num_heads"), -1)
    size = call.get("rotary_embedding_dim", 0) or heads.shape[3]
    if positions is not None:
        index = positions.astype(jnp.int32)
        cosines, sines = (jnp.take(cache, index, axis=0, mode="clip") for cache in (cosines, sines))
    cosines, sines = cosines[:, :, None], sines[:, :, None]
    y = rotate_heads(heads, cosines, sines, size, bool(call.get("interleaved", 0)))
    return y.transpose(0, 2, 1, 3) if len(shape) == 4 else y.reshape(shape)


@register("CausalConvWithState")
def convolve_causally(
    call: Call, x: jax.Array, w: jax.Array, bias: jax.Array | None = None, past: jax.Array | None = None
) -> Any:
    """ONNX CausalConvWithState: a depthwise convolution of what was and what comes, and the state after it."""
    count = w.shape[2] - 1
    before = jnp.zeros((*x.shape[:2], count), x.dtype) if past is None else past
    padded = jnp.concatenate([before, x], axis=2)
    y = lax.conv_general_dilated(
        padded, w, (1,), ((0, 0),), dimension_numbers=("NCH", "OIH", "NCH"), feature_group_count=x.shape[1],
        precision=_HIGHEST,
    )  # fmt: skip
    y = y if bias is None else y + bias[:, None]
    wide = y.astype(jnp.float32)
    y = y if call.get("activation", "none") == "none" else (wide * jax.nn.sigmoid(wide)).astype(x.dtype)
    return y, padded[:, :, padded.shape[2] - count :]


@register("LinearAttention")
def attend_linearly(call: Call, q: jax.Array, k: jax.Array, v: jax.Array, *inputs: jax.Array) -> Any:
    """ONNX LinearAttention, as jax.lax.scan over time."""
    past, decay, beta = [*inputs, *[None] * (3 - len(inputs))]
    heads, kv_heads = call.get("q_num_heads"), call.get("kv_num_heads")
    batch, length = q.shape[:2]
    # [time, batch, heads, size]
    split = [
        x.astype(jnp.float32).reshape(batch, length, n, -1).swapaxes(0, 1)
        for x, n in ((q, heads), (k, kv_heads), (v, kv_heads))
    ]
    rest = []
    for part, n in ((decay, kv_heads), (beta, None)):
        wide = jnp.zeros((batch, length, 1)) if part is None else part.astype(jnp.float32)
        count = n if n is not None else wide.shape[-1]
        count = 1 if part is None else count
        rest.append(wide.reshape(batch, length, count, -1).swapaxes(0, 1))
    size = split[0].shape[-1]
    scale = call.get("scale", 0.0) or 1 / math.sqrt(size)

    def advance(state: Any, parts: Any) -> Any:
        q_t, k_t, v_t, g_t, b_t = parts
        if decay is not None:
            state = state * jnp.exp(g_t)[..., None]
        if beta is not None:
            v_t = b_t * (v_t - jnp.einsum("bhdm,bhd->bhm", state, k_t, precision=_HIGHEST))
        state = state + k_t[..., :, None] * v_t[..., None, :]
        wide = jnp.repeat(state, heads // kv_heads, axis=1)
        return state, scale * jnp.einsum("bhd,bhdm->bhm", q_t, wide, precision=_HIGHEST)

    initial = jnp.zeros((batch, kv_heads, size, split[2].shape[-1])) if past is None else past.astype(jnp.float32)
    state, y = lax.scan(advance, initial, (*split, *rest))
    y = y.transpose(1, 0, 2, 3).reshape(batch, length, -1).astype(q.dtype)
    return y, state.astype(q.dtype if past is None else past.dtype)
