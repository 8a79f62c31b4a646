"""attention: its integers against numpy, its results against float64, masks, windows, faults, transforms."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant._attention import attention, scores_and_values
from jaxquant._attention.scores_and_values import compute_scores, compute_weights, group_queries

from ..oracles.attention_text import (
    attend,
    bound_from_floats,
    find_integer_scores,
    quantize_tokens,
    share_heads,
)

SPECS = {name: jq.QuantSpec(name, jq.PerToken()) for name in ("int8", "int4")}
MOST = {"int8": 127, "int4": 7}
INT8 = SPECS["int8"]


def sample(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(0, 1, shape).astype(np.float32)


def share_codes(codes: Any, heads: int) -> Any:
    return type(codes)(*(share_heads(part, heads) for part in codes))


def see_causally(queries: int, tokens: int, window: int | None = None) -> np.ndarray:
    """Return which of the tokens the newest queries attend to: bool [1, 1, queries, tokens]."""
    place = np.arange(tokens)[None]
    query = tokens - queries + np.arange(queries)[:, None]
    return ((place <= query) & (True if window is None else place > query - window))[None, None]


def check_against_float64(y: Any, operands: Any, visible: np.ndarray, digits: int = 2, bias: Any = 0.0) -> None:
    """Check a result against the attention of the codes of q, k and v with a softmax in float64."""
    q, k, v = operands
    expected = attend(q, k, v, q.codes.shape[-1] ** -0.5, visible, bias, digits)
    magnitude = np.abs(v.values).max(initial=0)
    assert (np.abs(np.asarray(y, np.float64) - expected.output) <= expected.error + 3e-6 * magnitude).all()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "features"), [(4, 2, 3, 8), (2, 2, 1, 5), (3, 1, 1, 16), (1, 1, 4, 7)]
)
@pytest.mark.sample(1)
def test_codes_and_results(
    name: str, heads: int, kv_heads: int, queries: int, features: int, rng: np.random.Generator
) -> None:
    """int32 scores to the last bit, and results within the error that rounded weights allow."""
    tokens, length = 11, 16
    q, k, v = sample(rng, 2, queries, heads, features), *(sample(rng, 2, tokens, kv_heads, features) for _ in "kv")
    spec = SPECS[name]

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        cache = jq.KVCache.create((2, length, kv_heads, features), spec, spec).append(k, v)
        unit = cache.quantized_keys.replace(scale=jnp.ones((1,) * 4))
        codes = jq.quantize(q, INT8)
        grouped = group_queries(codes.replace(scale=jnp.ones((1,) * 4)), kv_heads, 1.0)
        return compute_scores("attention", grouped, unit), [jq.attention(q, cache, weight_digits=n) for n in (1, 2, 3)]

    integers, results = run(q, k, v)
    q_codes = quantize_tokens(q, 127)
    keys, values = (share_codes(quantize_tokens(x, MOST[name]), heads) for x in (k, v))
    integers = np.asarray(integers).reshape(2, heads, queries, length)
    np.testing.assert_array_equal(integers[..., :tokens], find_integer_scores(q_codes, keys))
    visible = see_causally(queries, tokens)
    for digits, y in zip((1, 2, 3), results, strict=True):
        assert y.dtype == np.float32
        check_against_float64(y, (q_codes, keys, values), visible, digits)
    floats = (q, share_heads(k, heads), share_heads(v, heads))
    exact_q, exact_k, exact_v = (type(q_codes)(np.asarray(x, np.float64), np.ones((1,) * 4)) for x in floats)
    reference = attend(exact_q, exact_k, exact_v, features**-0.5, visible).output
    bound = bound_from_floats(q_codes, keys, values, features**-0.5, floats)
    assert (np.abs(np.asarray(results[1], np.float64) - reference) <= bound + 1e-3 * np.abs(v).max()).all()


def split_queries(q: np.ndarray, size: int) -> Any:
    """Return the sum of two codes of 8 bits for each feature of queries, with a scale for each block."""
    cut = q.reshape(*q.shape[:-1], -1, size)
    first = quantize_tokens(cut, 127)
    rest = cut - first.codes.astype(np.float32) * first.scale
    step = first.scale * np.float32(0.5) / np.float32(127)
    second = np.clip(np.rint(rest / step), -127, 127)
    values = first.codes * first.scale.astype(np.float64) + second * step.astype(np.float64)
    return type(first)(values.reshape(q.shape), np.ones((1,) * 4, np.float32))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("queries", "size"), [(1, None), (3, None), (1, 4), (9, 4)])
@pytest.mark.sample(2)
def test_two_codes_for_each_feature_of_a_query(
    name: str, queries: int, size: int | None, rng: np.random.Generator
) -> None:
    """Results against float64, eager and under jit, vmap and scan, in which no bit differs."""
    tokens, features = 9, 8
    granularity = jq.PerToken() if size is None else jq.Blocked(-1, size)
    spec = jq.QuantSpec(name, granularity)
    q, k, v = sample(rng, 2, queries, 4, features) * 4, *(sample(rng, 2, tokens, 2, features) for _ in "kv")
    cache = jq.KVCache.create((2, tokens, 2, features), spec, spec).append(k, v)

    def run(q: Any, cache: Any) -> Any:
        return jq.attention(q, cache, query_digits=2)

    y = run(q, cache)
    keys, values = (share_codes(type(x)(x.codes.reshape(k.shape), np.repeat(x.scale[..., 0], size or features, -1)
                    .reshape(k.shape)), 4) for x in (quantize_tokens(x.reshape(*x.shape[:-1], -1, size or features),
                    MOST[name]) for x in (k, v)))  # fmt: skip
    visible = see_causally(queries, tokens)
    operands = split_queries(q, size or features), keys
    for start in range(0, features, size or features):
        block = slice(start, start + (size or features))
        part = type(values)(values.codes[..., block], values.scale[..., block])
        expected = attend(*operands, part, features**-0.5, visible, 0.0, 2)
        assert (np.abs(np.asarray(y)[..., block] - expected.output) <= expected.error + 3e-6 * np.abs(v).max()).all()
    np.testing.assert_array_equal(jax.jit(run)(q, cache), y)
    np.testing.assert_array_equal(jax.jit(lambda q: run(q * 2.0, cache))(q * np.float32(0.5)), y)
    batched = jax.tree.map(lambda x: x[:, None] if x.ndim else x, cache)
    np.testing.assert_array_equal(jax.vmap(run, in_axes=(0, _list_axes(batched)))(q[:, None], batched)[:, 0], y)
    _, looped = jax.lax.scan(lambda c, q: (c, run(q, c)), cache, jnp.stack([q, -q]))
    np.testing.assert_array_equal(looped[0], y)


def _list_axes(cache: Any) -> Any:
    return jax.tree.map(lambda x: 0 if x.ndim else None, cache)


def test_a_second_code_removes_the_error_of_queries(rng: np.random.Generator) -> None:
    """Keys that are codes: only queries are rounded before the softmax, and the values are read exactly."""
    k = np.eye(8, dtype=np.float32)[None, :, None] * 127
    q = sample(rng, 1, 5, 2, 8)
    cache = jq.KVCache.create((1, 8, 1, 8)).append(k, k)
    positions = np.full((1, 5), 7, np.int32)
    expected = np.exp(q.astype(np.float64)) / np.exp(q.astype(np.float64)).sum(-1, keepdims=True) * 127
    # A score is a feature of the query.
    errors = [
        np.abs(jq.attention(q, cache, query_positions=positions, scale=1 / 127, query_digits=n) - expected).max()
        for n in (1, 2)
    ]
    assert errors[1] < 0.1 * errors[0]
    assert errors[1] < 127 * 1e-4


@pytest.mark.slow
def test_masks_bias_and_positions(rng: np.random.Generator) -> None:
    q, k, v = sample(rng, 2, 3, 4, 8), *(sample(rng, 2, 9, 2, 8) for _ in "kv")
    mask, bias = rng.random((2, 4, 3, 12)) < 0.6, sample(rng, 1, 4, 1, 12)
    mask[0, 1, 2] = False  # a query that sees no token
    bias[0, 0, 0, 2] = -np.inf
    mask[:, 0, :, 0] = True  # of a query that sees the token with this bias alone, the softmax is NaN
    positions = np.array([[8, 3, 0], [1, 11, 8]], np.int32)

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        cache = jq.KVCache.create((2, 12, 2, 8)).append(k, v)
        whole = jq.attention(q, cache, mask=mask, bias=bias, query_positions=positions)
        return whole, jq.attention(q, cache, mask=mask[0, 0]), jq.attention(q, cache, scale=2.0)

    whole, shared, scaled = run(q, k, v)
    codes = [quantize_tokens(q, 127), *(share_codes(quantize_tokens(x, 127), 4) for x in (k, v))]
    visible = mask[..., :9] & (np.arange(9) <= positions[:, None, :, None])
    check_against_float64(whole, codes, visible, bias=bias[..., :9])
    assert not np.asarray(whole)[0, 2, 1].any()
    check_against_float64(shared, codes, mask[0, 0][..., :9] & see_causally(3, 9))
    factor = 2.0 * 8**0.5
    rescaled = codes[0]._replace(scale=codes[0].scale * np.float32(factor))
    check_against_float64(scaled, [rescaled, *codes[1:]], see_causally(3, 9))


@pytest.mark.slow
def test_window(rng: np.random.Generator) -> None:
    """A ring gives the attention of a cache of all tokens with a window, chunk by chunk."""
    window, chunk, tokens = 5, 3, 18
    q, k, v = sample(rng, 1, tokens, 2, 8), *(sample(rng, 1, tokens, 1, 8) for _ in "kv")

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        cache, ys = jq.KVCache.create((1, window + chunk - 1, 1, 8), window=window), []
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            cache = cache.append(k[:, part], v[:, part])
            ys.append(jq.attention(q[:, part], cache))
        return jnp.concatenate(ys, 1)

    codes = [quantize_tokens(q, 127), *(share_codes(quantize_tokens(x, 127), 2) for x in (k, v))]
    check_against_float64(run(q, k, v), codes, see_causally(tokens, tokens, window))
    cache = jq.KVCache.create((1, 7, 1, 8), window=5)
    with pytest.raises(ValueError, match=r"jaxquant.attention: q: expected at most 3 queries.*, got 4"):
        jq.attention(q[:, :4], cache)


def test_prompts_of_different_lengths_in_a_ring(rng: np.random.Generator) -> None:
    """Rows whose tokens wrap around at different calls, int4 values, odd features, a bias and shared heads."""
    batch, length, window, tokens, features = 3, 7, 4, 4, 5
    k, v = (sample(rng, 4, batch, tokens, 2, features) for _ in "kv")
    q, bias = sample(rng, 4, batch, tokens, 4, features), sample(rng, 4, batch, 4, tokens, length)
    counts = rng.integers(0, tokens + 1, (4, batch)).astype(np.int32)
    counts[:, 0] = (4, 4, 3, 4)  # the second call crosses the end of the ring

    @jax.jit
    def run(cache: Any, q: Any, k: Any, v: Any, counts: Any, bias: Any) -> Any:
        positions = cache.index[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
        cache = cache.append(k, v, counts)
        return cache, jq.attention(q, cache, query_positions=positions, bias=bias)

    cache = jq.KVCache.create((batch, length, 2, features), INT8, SPECS["int4"], window=window, per_row=True)
    history: list[tuple[list[Any], list[Any]]] = [([], []) for _ in range(batch)]
    for call in range(4):
        first = np.asarray(cache.index)
        cache, y = run(cache, q[call], k[call], v[call], counts[call], bias[call])
        for row, (keys, values) in enumerate(history):
            count = counts[call, row]
            keys += list(k[call, row, :count])
            values += list(v[call, row, :count])
            if not count:
                continue
            query = first[row] + np.arange(count)[:, None]
            seen = np.arange(len(keys))
            codes = (
                quantize_tokens(q[call, row : row + 1, :count], 127),
                *(share_codes(quantize_tokens(np.stack(x)[None], m), 4) for x, m in ((keys, 127), (values, 7))),
            )
            visible = ((seen <= query) & (seen > query - window))[None, None]
            # The token of position p is in the place p % length.
            token_bias = bias[call, row, :, :count][None][..., seen % length]
            check_against_float64(y[row : row + 1, :count], codes, visible, bias=token_bias)


ASYMMETRIC = jq.QuantSpec("uint8", jq.PerToken(), symmetric=False)
# How queries are quantized, the codes of the cache, the arguments of the call, and the window.
SERVED: dict[str, tuple[jq.QuantSpec, str, dict[str, tuple[int, ...]], int | None]] = {
    "plain": (INT8, "int8", {}, None),
    "int4, mask and bias": (INT8, "int4", {"mask": (2, 4, 6, 6), "bias": (1, 4, 1, 6)}, None),
    "zero points": (ASYMMETRIC, "int8", {"mask": (6, 6)}, None),
    "blocks": (jq.QuantSpec("int4", jq.Blocked(-1, 3)), "int4", {"bias": (2, 1, 6, 6)}, None),
    "window": (INT8, "int8", {"mask": (6,)}, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SERVED))
def test_served_bits_are_those_of_training(name: str, rng: np.random.Generator) -> None:
    """A cache of any length, for a prompt or token by token, gives the bits of the trained attention."""
    query_spec, codes, shapes, window = SERVED[name]
    spec = SPECS[codes]
    q, k, v = sample(rng, 2, 6, 4, 8), *(sample(rng, 2, 6, 2, 8) for _ in "kv")
    arrays: dict[str, Any] = {}
    if "mask" in shapes:
        arrays["mask"] = rng.random(shapes["mask"]) < 0.7
    if "bias" in shapes:
        arrays["bias"] = sample(rng, *shapes["bias"])

    def widen(array: Any, length: int) -> Any:
        padding = [(0, 0)] * (array.ndim - 1) + [(0, length - 6)]
        return np.pad(array, padding, constant_values=True)

    def serve(q: Any, k: Any, v: Any, length: int) -> Any:
        cache = jq.KVCache.create((2, length, 2, 8), spec, spec, window=window).append(k, v)
        return jq.attention(q, cache, spec=query_spec, **{key: widen(x, length) for key, x in arrays.items()})

    def serve_tokens(q: Any, k: Any, v: Any, length: int) -> Any:
        def step(cache: Any, token: Any) -> Any:
            place, *token = token
            cache = cache.append(*(x[:, None] for x in token[1:]))
            more = {}
            for key, x in arrays.items():
                x = jnp.asarray(widen(x, length))
                is_shared = x.ndim < 2 or x.shape[-2] == 1
                more[key] = x if is_shared else jax.lax.dynamic_slice_in_dim(x, place, 1, x.ndim - 2)
            return cache, jq.attention(token[0][:, None], cache, spec=query_spec, **more)[:, 0]

        cache = jq.KVCache.create((2, length, 2, 8), spec, spec, window=window)
        tokens = (jnp.arange(6), *(jnp.moveaxis(x, 1, 0) for x in (q, k, v)))
        return jnp.moveaxis(jax.lax.scan(step, cache, tokens)[1], 0, 1)

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        results = [serve(q, k, v, 8 if window else 6), serve(q, k, v, 37), serve_tokens(q, k, v, 53)]
        trained = jq.quantized_dot_product_attention(
            q, k, v, is_causal=True, query_spec=query_spec, key_spec=spec, value_spec=spec,
            local_window_size=None if window is None else (window - 1, 0), **arrays,
        )  # fmt: skip
        return trained, results

    trained, results = run(q, k, v)
    assert np.asarray(trained).any()
    for served in results:
        np.testing.assert_array_equal(served, trained)


def test_exponentials_of_long_rows_are_those_of_short_ones(rng: np.random.Generator) -> None:
    """XLA:CPU computes sums of long rows in a call of a library, if nothing prevents it (jax 0.12)."""
    scores = np.full((32, 2048), -1e9, np.float32)
    scores[:, :96] = 3 * sample(rng, 32, 96)

    @jax.jit
    def run(scores: jax.Array) -> jax.Array:
        visible = jnp.arange(scores.shape[1])[None] < 96
        scores, visible = (x.reshape(1, 1, 1, *x.shape) for x in (scores, visible))
        return compute_weights(scores, jnp.ones((1,) * 6), visible, 2).exponentials[0, 0, 0]

    np.testing.assert_array_equal(run(scores)[:, :96], run(scores[:, :96]))


@pytest.mark.slow
def test_equals_dot_product_attention_bit_for_bit(rng: np.random.Generator) -> None:
    """What a cache serves is what trained, also called eagerly, each in a program of its own."""
    q, k, v = sample(rng, 2, 6, 4, 8), *(sample(rng, 2, 6, 2, 8) for _ in "kv")
    for spec, length in ((SPECS["int8"], 6), (SPECS["int4"], 9)):
        cache = jq.KVCache.create((2, length, 2, 8), spec, spec).append(k, v)
        served = jq.attention(q, cache)
        trained = jq.quantized_dot_product_attention(q, k, v, is_causal=True, key_spec=spec, value_spec=spec)
        np.testing.assert_array_equal(served, trained)


@pytest.mark.slow
def test_chunks_of_int4_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Int4 codes are unpacked in chunks of tokens, here 4 of 14, and give the bits of int8 codes in one piece."""
    q, k, v = sample(rng, 2, 3, 4, 5), *(sample(rng, 2, 13, 2, 5) for _ in "kv")
    bias = sample(rng, 1, 4, 3, 14)
    small = jq.QuantSpec("int4", jq.PerToken())
    cache = jq.KVCache.create((2, 14, 2, 5), small, small).append(k, v)
    whole = jq.KVCache.create((2, 14, 2, 5))
    whole = dataclasses.replace(
        whole, keys=cache.quantized_keys.codes, values=cache.quantized_values.codes, key_scale=cache.key_scale,
        value_scale=cache.value_scale, index=cache.index,
    )  # fmt: skip
    monkeypatch.setattr(attention, "_CHUNK", 1)
    monkeypatch.setattr(attention, "_FEWEST", 4)
    for spec in (INT8, ASYMMETRIC, jq.QuantSpec("int8", jq.Blocked(-1, 2))):
        chunked = jax.jit(lambda q, cache, spec=spec: jq.attention(q, cache, bias=bias, spec=spec))(q, cache)
        np.testing.assert_array_equal(chunked, jq.attention(q, whole, bias=bias, spec=spec))
    # With the loop over 2**17 tokens, too.
    monkeypatch.setattr(scores_and_values, "_LONGEST", 6)
    chunked, expected = (jax.jit(lambda q, cache: jq.attention(q, cache) + 0)(q, cache) for cache in (cache, whole))
    np.testing.assert_array_equal(chunked, expected)


@pytest.mark.slow
def test_queries_without_tokens_and_old_faults(rng: np.random.Generator) -> None:
    """Queries before the first token, an empty cache, and NaN that a cache which starts again still holds."""
    q, k = sample(rng, 1, 3, 2, 4), sample(rng, 1, 1, 1, 4)
    broken = np.full((1, 5, 1, 4), np.nan, np.float32)

    @jax.jit
    def run(q: Any, k: Any, broken: Any) -> Any:
        empty = jq.KVCache.create((1, 5, 1, 4))
        used = empty.append(broken, broken)
        used = dataclasses.replace(used, index=jnp.zeros_like(used.index))
        return [jq.attention(q, cache) for cache in (empty, used, empty.append(k, k), used.append(k, k))]

    none, again, first, restarted = run(q, k, broken)
    assert not np.asarray(none).any()
    assert not np.asarray(again).any()
    # Of three queries with one token, the first two have negative positions.
    assert not np.asarray(first)[:, :2].any()
    value = np.asarray(jq.quantize(k, INT8).dequantize())
    np.testing.assert_allclose(first[:, 2], np.repeat(value[:, 0], 2, axis=1), rtol=1e-6)
    np.testing.assert_array_equal(restarted, first)


@pytest.mark.slow
def test_each_row_has_its_index_under_vmap(rng: np.random.Generator) -> None:
    """Mapped caches with different numbers of tokens each give the bits of the cache alone."""
    q, k, v = sample(rng, 3, 1, 1, 4, 8), *(sample(rng, 3, 1, 7, 2, 8) for _ in "kv")
    counts = np.array([1, 4, 7], np.int32)

    def run(q: Any, k: Any, v: Any, count: Any) -> Any:
        cache = jq.KVCache.create((1, 9, 2, 8), INT8, SPECS["int4"], per_row=True)
        cache = cache.append(k, v, count[None]).append(k[:, :1], v[:, :1])
        return cache.index, jq.attention(q, cache)

    index, mapped = jax.jit(jax.vmap(run))(q, k, v, counts)
    np.testing.assert_array_equal(index[:, 0], counts + 1)
    alone = jax.jit(run)
    for i in range(3):
        np.testing.assert_array_equal(mapped[i], alone(q[i], k[i], v[i], counts[i])[1])


def test_faults_stay_with_those_who_see_them(rng: np.random.Generator) -> None:
    """A NaN or an infinity in a token shows in the queries that see the token, and in no others."""
    q, k, v = (sample(rng, 1, 4, 1, 8) for _ in "qkv")
    run = jax.jit(lambda q, k, v: jq.attention(q, jq.KVCache.create((1, 6, 1, 8)).append(k, v)))
    clean = np.asarray(run(q, k, v))
    for operand in range(3):
        for fault in (np.nan, np.inf):
            xs = [q.copy(), k.copy(), v.copy()]
            xs[operand][0, 2, 0, 3] = fault
            y = np.asarray(run(*xs))
            touched = [2] if operand == 0 else [2, 3]
            # A key of infinity may give a score of -inf, and a weight of 0.
            assert (~np.isfinite(y[0, touched])).any(-1).all() or (operand == 1 and fault == np.inf)
            untouched = [row for row in range(4) if row not in touched]
            np.testing.assert_array_equal(y[0, untouched], clean[0, untouched])


@pytest.mark.slow
def test_weights_of_a_long_context(fixed_rng: np.random.Generator) -> None:
    """One token holds half of the weight, 4000 others the rest: two digits keep them, one digit loses them."""
    tokens = 4001
    k = np.zeros((1, tokens, 1, 4), np.float32)
    k[0, 0, 0, 0] = np.log(tokens - 1)
    v = np.ones((1, tokens, 1, 4), np.float32)
    v[0, 0] = -1
    v += fixed_rng.normal(0, 0.01, v.shape).astype(np.float32)
    q = np.zeros((1, 1, 1, 4), np.float32)
    q[..., 0] = 1

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        cache = jq.KVCache.create((1, tokens, 1, 4)).append(k, v)
        return [jq.attention(q, cache, scale=1.0, weight_digits=n) for n in (1, 2, 3)]

    errors = [np.abs(y).max() for y in run(q, k, v)]
    assert errors[0] > 0.4
    assert errors[1] < 0.06
    assert errors[2] < 0.02


def test_chunks_of_tokens(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """More tokens than int32 can sum are contracted in chunks."""
    q, k, v = sample(rng, 1, 2, 1, 8), *(sample(rng, 1, 11, 1, 8) for _ in "kv")
    monkeypatch.setattr(scores_and_values, "_LONGEST", 4)
    y = jq.quantized_dot_product_attention(q, k, v, scale=0.35)
    monkeypatch.undo()
    codes = [quantize_tokens(x, 127) for x in (q, k, v)]
    rescaled = codes[0]._replace(scale=codes[0].scale * np.float32(0.35 * 8**0.5))
    check_against_float64(y, [rescaled, *codes[1:]], np.ones((1, 1, 2, 11), bool))
    # The longest chunk does not overflow.
    assert scores_and_values._LONGEST * 127 * 128 < 2**31


def test_contractions_are_of_integers() -> None:
    cache = jax.eval_shape(lambda: jq.KVCache.create((1, 64, 2, 32)))
    q = jax.ShapeDtypeStruct((1, 1, 4, 32), jnp.float32)
    text = jax.jit(jq.attention).lower(q, cache).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 2
    assert all(line.count("xi8>") == 2 and "xi32>" in line for line in products), products


@pytest.mark.slow
def test_dtypes_and_transforms(rng: np.random.Generator) -> None:
    q, k, v = sample(rng, 3, 1, 2, 4, 8), *(sample(rng, 3, 1, 5, 2, 8) for _ in "kv")

    def run(q: Any, k: Any, v: Any) -> Any:
        return jq.attention(q, jq.KVCache.create((1, 5, 2, 8), INT8, SPECS["int4"]).append(k, v))

    mapped = jax.jit(jax.vmap(run))(q, k, v)
    shared = jax.jit(jax.vmap(run, in_axes=(0, None, None)))(q, k[0], v[0])
    looped = jax.jit(lambda *xs: jax.lax.map(lambda xs: run(*xs), xs))(q, k, v)
    for i in range(3):
        alone = run(q[i], k[i], v[i])
        np.testing.assert_array_max_ulp(np.asarray(mapped[i]), np.asarray(alone), maxulp=4)
        np.testing.assert_array_max_ulp(np.asarray(looped[i]), np.asarray(alone), maxulp=4)
    np.testing.assert_array_max_ulp(np.asarray(shared[0]), np.asarray(mapped[0]), maxulp=4)
    half = [jnp.asarray(x[0], jnp.bfloat16) for x in (q, k, v)]
    y = run(*half)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, run(*(x.astype(jnp.float32) for x in half)).astype(jnp.bfloat16))


@pytest.mark.slow
def test_bfloat16_scales_and_blocks_of_queries(rng: np.random.Generator) -> None:
    """Stored scales are rounded up; queries may have a scale for each block of features, here of 3 of 8."""
    q, k = sample(rng, 1, 2, 2, 8), sample(rng, 1, 4, 1, 8)
    spec = jq.QuantSpec("int8", jq.PerToken(), scale_dtype="bfloat16")
    cache = jq.KVCache.create((1, 4, 1, 8), spec, spec).append(k, k)
    y = jq.attention(q, cache, spec=jq.QuantSpec("int8", jq.Blocked(-1, 3)))
    values = jq.quantize(k, spec)
    codes = quantize_tokens(q, 127)
    scale = np.asarray(values.scale.astype(jnp.float32))
    keys = share_codes(type(codes)(np.asarray(values.codes, np.int64), scale), 2)
    blocked = np.asarray(jq.quantize(q, jq.QuantSpec("int8", jq.Blocked(-1, 3))).dequantize())
    queries = type(codes)(blocked, np.ones((1, 1, 1, 1), np.float32))
    check_against_float64(y, (queries, keys, keys), see_causally(2, 4))


CACHE = jq.KVCache.create((2, 4, 2, 8))
Q = np.ones((2, 1, 4, 8), np.float32)
ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cache": Q}, TypeError, "cache: expected a KVCache"),
    ({"q": Q.astype(np.int32)}, TypeError, "q: expected dtype float32"),
    ({"q": Q[:1]}, ValueError, r"q: expected shape \(2, queries, a multiple of 2, 8\), because of the cache"),
    ({"q": Q[:, :, :3]}, ValueError, "q: expected shape"),
    ({"mask": np.ones((2, 4, 1, 4), np.float32)}, TypeError, "mask: expected dtype bool"),
    ({"mask": np.ones((2, 4, 1, 3), bool)}, ValueError, r"mask: expected a shape that broadcasts against \(2, 4, 1, 4"),
    ({"bias": np.ones((5,), np.float32)}, ValueError, "bias: expected a shape that broadcasts"),
    ({"query_positions": np.ones((2, 2), np.int32)}, ValueError, r"query_positions: expected shape \(2 or 1, 1\)"),
    ({"spec": "int8"}, TypeError, "spec: expected a QuantSpec"),
    ({"spec": jq.QuantSpec("uint16")}, TypeError, "spec: expected an integer dtype of 8 bits or fewer, got uint16"),
    ({"spec": jq.QuantSpec("int8", jq.PerAxis(-1))}, ValueError, "lhs: expected one scale along the contracted"),
    ({"scale": 0.0}, ValueError, "scale: expected a positive number"),
    ({"weight_digits": 4}, ValueError, "weight_digits: expected 1, 2 or 3, got 4"),
    ({"query_digits": 3}, ValueError, "query_digits: expected 1 or 2, got 3"),
    ({"query_digits": 2.0}, TypeError, "query_digits: expected an int"),
    (
        {"query_digits": 2, "spec": jq.QuantSpec("uint8", jq.PerToken())},
        *(ValueError, "query_digits: expected 1, because the spec of the queries has a zero point, got 2"),
    ),
]


@pytest.mark.parametrize(("changes", "error", "text"), ERRORS)
def test_errors(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=r"jaxquant\.attention: " + text):
        jq.attention(**{"q": Q, "cache": CACHE, **changes})
