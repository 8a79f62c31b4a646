"""Caches with a scale for each block of features, rotated keys, a mean key and smoothing: codes, results, programs."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxquant as jq

from ..oracles.attention_text import Codes, attend, quantize_tokens, share_heads
from ..support.hlo import Program

F32 = np.float32
MOST = {"int8": 127, "int4": 7}
FEATURES, BLOCK = 24, 6


def make_spec(dtype: str, size: int | None, scale_dtype: str = "float32") -> jq.QuantSpec:
    granularity = jq.PerToken() if size is None else jq.Blocked(-1, size)
    return jq.QuantSpec(dtype, granularity, scale_dtype=scale_dtype)


class Options(NamedTuple):
    """How a cache holds its tokens: dtypes and sizes of blocks of keys and of values, and what is done to keys."""

    keys: tuple[str, int | None]
    values: tuple[str, int | None]
    rotate: bool = False
    centers: bool = False
    smooths: bool = False

    @property
    def specs(self) -> tuple[jq.QuantSpec, jq.QuantSpec]:
        return make_spec(*self.keys), make_spec(*self.values)


OPTIONS = {
    "int8 blocks": Options(("int8", BLOCK), ("int8", BLOCK)),
    "int8 blocks of keys": Options(("int8", 12), ("int8", None)),
    "int4 blocks, rotated": Options(("int4", BLOCK), ("int4", 8), rotate=True),
    "all options, int8 and int4": Options(("int8", BLOCK), ("int4", 12), True, True, True),
    "no blocks": Options(("int8", None), ("int8", None), True, True, True),
    "centered": Options(("int4", 12), ("int8", 8), centers=True, smooths=True),
}


class Features(NamedTuple):
    """What a cache is made with besides its specs."""

    mean_key: np.ndarray | None
    smoothing: np.ndarray | None


def sample(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(0, 1, shape).astype(F32)


def sample_keys(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return keys with features of various magnitudes, and a mean."""
    loud = F32(2) ** rng.integers(-3, 4, shape[-1]).astype(F32)
    return ((sample(rng, *shape) + sample(rng, *shape[-2:])) * loud).astype(F32)


def sample_features(options: Options, rng: np.random.Generator, heads: int) -> Features:
    mean_key = sample(rng, heads, FEATURES) * 3 if options.centers else None
    smoothing = np.exp(rng.normal(0, 1.5, (heads, FEATURES))).astype(F32) if options.smooths else None
    return Features(mean_key, smoothing)


def make_cache(shape: Any, options: Options, features: Features, **more: Any) -> jq.KVCache:
    return jq.KVCache.create(shape, *options.specs, rotate=options.rotate, **features._asdict(), **more)


# The oracle.


def multiply_hadamard(x: np.ndarray, halvings: int) -> np.ndarray:
    """Return the fast Walsh-Hadamard transform of runs of the largest power of 2, each sum in float32."""
    size = x.shape[-1] & -x.shape[-1]
    runs = x.astype(F32).reshape(-1, size).copy()
    step = 1
    while step < size:
        pairs = runs.reshape(-1, size // (2 * step), 2, step)
        runs = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(-1, size)
        step *= 2
    return (runs * F32(2.0**-halvings)).reshape(x.shape)


def make_hadamard(size: int) -> np.ndarray:
    """Return Sylvester's matrix in float64."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def find_halvings(features: int) -> tuple[int, int]:
    """Return the powers of 2 by which keys and queries are divided."""
    bits = (features & -features).bit_length() - 1
    return -(-bits // 2), bits // 2


def change(x: np.ndarray, options: Options, features: Features, is_key: bool) -> np.ndarray:
    """Return keys or queries as they are quantized, with the heads of the keys."""
    if is_key and features.mean_key is not None:
        x = x - features.mean_key
    if features.smoothing is not None:
        factors = F32(2) ** np.rint(np.log2(features.smoothing.astype(np.float64))).astype(F32)
        factors = np.repeat(factors, x.shape[2] // len(factors), axis=0)
        x = x / factors if is_key else x * factors
    return multiply_hadamard(x, find_halvings(x.shape[-1])[not is_key]) if options.rotate else x


def restore(x: np.ndarray, options: Options, features: Features) -> np.ndarray:
    """Return the keys that quantized ones stand for, in float64."""
    if options.rotate:
        size = x.shape[-1] & -x.shape[-1]
        x = (x.reshape(-1, size) @ make_hadamard(size)).reshape(x.shape) * 2.0 ** -find_halvings(x.shape[-1])[1]
    if features.smoothing is not None:
        x = x * 2.0 ** np.rint(np.log2(features.smoothing.astype(np.float64)))
    return x if features.mean_key is None else x + features.mean_key


def quantize_blocks(x: np.ndarray, most: int, size: int | None) -> Codes:
    """Return codes with a scale for each block of features, repeated for each feature."""
    cut = quantize_tokens(x.reshape(*x.shape[:-1], -1, size or x.shape[-1]), most)
    scale = np.broadcast_to(cut.scale, cut.codes.shape)
    return Codes(cut.codes.reshape(x.shape), scale.reshape(x.shape))


def share_codes(codes: Codes, heads: int) -> Codes:
    return Codes(*(share_heads(part, heads) for part in codes))


def check_against_float64(y: Any, operands: Any, size: int | None, visible: np.ndarray) -> None:
    """Check a result against the attention of the codes, with a softmax in float64; each block has its own weights."""
    q, k, v = operands
    size = size or FEATURES
    for start in range(0, FEATURES, size):
        block = Codes(*(part[..., start : start + size] for part in v))
        expected = attend(q, k, block, FEATURES**-0.5, visible)
        error = np.abs(np.asarray(y, np.float64)[..., start : start + size] - expected.output)
        # The scores are rounded to float32 after each block.
        assert (error <= expected.error + 2e-5 * np.abs(block.values).max()).all()


def read_codes(cache: jq.KVCache) -> tuple[np.ndarray, ...]:
    """Return the codes and scales [batch, length, heads, ...] of keys and of values."""
    keys, values = cache.quantized_keys, cache.quantized_values
    parts = (np.asarray(x.astype(jnp.float32)) for x in (keys.codes, keys.scale, values.codes, values.scale))
    orders = ((0, 2, 1, 3), (0, 2, 1, 3), (0, 3, 1, 2), (0, 3, 1, 2))
    return tuple(np.transpose(x, order) for x, order in zip(parts, orders, strict=True))


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_codes_and_results(name: str, rng: np.random.Generator) -> None:
    """A prompt, then tokens in a loop: codes and scales to the last bit, and results against float64."""
    options = OPTIONS[name]
    features = sample_features(options, rng, 2)
    tokens, queries = 9, 3
    k, v = sample_keys(rng, 2, tokens, 2, FEATURES), sample_keys(rng, 2, tokens, 2, FEATURES)
    q = sample(rng, 2, queries, 4, FEATURES)

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        cache = make_cache((2, 11, 2, FEATURES), options, features).append(k[:, :5], v[:, :5])

        def step(cache: Any, token: Any) -> Any:
            return cache.append(*(x[:, None] for x in token)), None

        cache, _ = jax.lax.scan(step, cache, [jnp.moveaxis(x[:, 5:], 1, 0) for x in (k, v)])
        return cache, jq.attention(q, cache), jq.attention(q[:, -1:], cache), cache.dequantize()

    cache, prompt, newest, dequantized = run(q, k, v)
    expected = [
        quantize_blocks(x, MOST[dtype], size)
        for x, (dtype, size) in ((change(k, options, features, True), options.keys), (v, options.values))
    ]
    parts = read_codes(cache)
    for codes, (found, scale) in zip(expected, (parts[:2], parts[2:]), strict=True):
        np.testing.assert_array_equal(found[:, :tokens], codes.codes)
        assert not found[:, tokens:].any()
        scale = np.repeat(scale[:, :tokens], FEATURES // scale.shape[-1], axis=-1)
        np.testing.assert_array_equal(scale, codes.scale)
    queries_codes = quantize_blocks(change(q, options, features, False), 127, options.keys[1])
    operands = (queries_codes, *(share_codes(x, 4) for x in expected))
    place = np.arange(tokens)[None]
    visible = (place <= tokens - queries + np.arange(queries)[:, None])[None, None]
    check_against_float64(prompt, operands, options.values[1], visible)
    np.testing.assert_array_equal(newest[:, 0], prompt[:, -1])
    restored = restore(expected[0].values, options, features)
    # Sums of the rotation are rounded before a feature is multiplied by its smoothing.
    reach = 1 if features.smoothing is None else 2 * features.smoothing
    assert (np.abs(dequantized[0][:, :tokens] - restored) <= 2e-5 * reach * np.abs(expected[0].values).max()).all()
    np.testing.assert_allclose(dequantized[1][:, :tokens], expected[1].values, rtol=1e-6)


def test_a_rotation_is_exact_for_integers(rng: np.random.Generator) -> None:
    """The product with the Hadamard matrix of Sylvester, in float64, for sizes that are powers of 2 and others."""
    for features in (2, 8, 12, 40, 256):
        size = features & -features
        whole = np.kron(np.eye(features // size), make_hadamard(size))
        k = rng.integers(-1000, 1000, (1, 3, 1, features)).astype(F32)
        cache = jq.KVCache.create((1, 3, 1, features), rotate=True).append(k, k)
        rotated = (k.astype(np.float64) @ whole) * 2.0 ** -find_halvings(features)[0]
        expected = quantize_tokens(rotated, 127)
        np.testing.assert_array_equal(cache.quantized_keys.codes[:, 0], expected.codes[:, :, 0])
        assert np.abs(np.asarray(cache.dequantize()[0]) - k).max() <= 4 * features**0.5 * 1000 / 127


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rotated_values(dtype: str, rng: np.random.Generator) -> None:
    """All bits are those of a cache of values that numpy has rotated, whose results numpy rotates back."""
    spec = make_spec(dtype, BLOCK)
    q, k, v = sample(rng, 2, 6, 4, FEATURES), *(sample_keys(rng, 2, 6, 2, FEATURES) for _ in "kv")
    before, after = find_halvings(FEATURES)

    def create(batch: int = 2, **options: Any) -> jq.KVCache:
        return jq.KVCache.create((batch, 9, 2, FEATURES), spec, spec, rotate=True, **options)

    plain = create().append(k, multiply_hadamard(v, before))
    expected = multiply_hadamard(np.asarray(jq.attention(q, plain)), after)

    def serve(q: Any, k: Any, v: Any) -> Any:
        cache = create(len(q), rotate_values=True).append(k, v)
        return cache, jq.attention(q, cache)

    def step(cache: Any, token: Any) -> Any:
        q, *new = (x[:, None] for x in token)
        cache = cache.append(*new)
        return cache, jq.attention(q, cache)[:, 0]

    tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v)]
    scanned, y = jax.jit(lambda xs: jax.lax.scan(step, create(rotate_values=True), xs))(tokens)
    for cache, found in (serve(q, k, v), jax.jit(serve)(q, k, v), (scanned, jnp.moveaxis(y, 0, 1))):
        for mine, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(plain), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_array_equal(found, expected)
    mapped = jax.vmap(lambda *xs: serve(*(x[None] for x in xs))[1][0])(q, k, v)
    np.testing.assert_array_equal(mapped, expected)
    assert scanned.nbytes == plain.nbytes
    assert "rotate_values=True" in repr(scanned)
    rotated = np.asarray(plain.dequantize()[1])
    np.testing.assert_array_equal(scanned.dequantize()[1], multiply_hadamard(rotated, after))


def test_all_codes_of_4_bits(rng: np.random.Generator) -> None:
    """Without a narrow range a step reaches from -8 to 7: codes against numpy, results against float64, less error."""
    q, k, v = sample(rng, 2, 3, 4, FEATURES), *(sample(rng, 2, 9, 2, FEATURES) for _ in "kv")
    errors = {}
    for most, sizes in ((7, (12, 6)), (8, (12, 6))):
        specs = [dataclasses.replace(make_spec("int4", size), narrow_range=most == 7) for size in sizes]
        cache = jax.jit(lambda k, v, specs=specs: jq.KVCache.create((2, 9, 2, FEATURES), *specs).append(k, v))(k, v)
        parts, expected = read_codes(cache), []
        for x, size, found, scale in zip((k, v), sizes, parts[::2], parts[1::2], strict=True):
            cut = x.reshape(*x.shape[:-1], -1, size)
            ends = (-cut.min(-1, initial=0) / F32(most), cut.max(-1, initial=0) / F32(7))
            steps = np.maximum(*ends).astype(F32)
            codes = np.clip(np.rint(cut / steps[..., None]), -most, 7).reshape(x.shape)
            np.testing.assert_array_equal(scale, steps)
            np.testing.assert_array_equal(found, codes)
            expected.append(Codes(codes.astype(np.int64), np.repeat(steps, size, -1)))
        operands = quantize_blocks(q, 127, sizes[0]), *(share_codes(x, 4) for x in expected)
        visible = (np.arange(9)[None] <= 6 + np.arange(3)[:, None])[None, None]
        check_against_float64(jq.attention(q, cache), operands, sizes[1], visible)
        errors[most] = sum(np.square(c.values - x).sum() for c, x in zip(expected, (k, v), strict=True))
    assert errors[8] < errors[7]


def test_rotated_values_lose_less_to_outliers(rng: np.random.Generator) -> None:
    """One feature of 32 is 30 times as large as the others."""
    q, k, v = sample(rng, 1, 4, 2, 32), *(sample(rng, 1, 20, 1, 32) for _ in "kv")
    v[..., 5] *= 30
    expected = np.asarray(jax.nn.dot_product_attention(q, k, v))
    spec, queries = make_spec("int4", None), np.full((1, 4), 19, np.int32)

    def find_error(is_rotated: bool) -> float:
        cache = jq.KVCache.create((1, 20, 1, 32), spec_v=spec, rotate_values=is_rotated).append(k, v)
        return float(np.linalg.norm(jq.attention(q, cache, query_positions=queries) - expected))

    assert find_error(is_rotated=True) < 0.8 * find_error(is_rotated=False)


def test_the_mean_and_the_smoothing_change_no_weight(rng: np.random.Generator) -> None:
    """Keys with a mean 100 times as large as what differs, and features of magnitudes from 1/64 to 64."""
    loud = F32(2) ** rng.integers(-6, 7, 32).astype(F32)
    q, v = sample(rng, 1, 4, 2, 32) / loud, sample(rng, 1, 20, 1, 32)
    k = (sample(rng, 1, 20, 1, 32) + 100 * sample(rng, 1, 1, 1, 32)) * loud
    mean_key, smoothing = jq.KVCache.find_smoothing(q, k)
    expected = np.asarray(jax.nn.dot_product_attention(*(x.astype(np.float64) for x in (q, k, v))))

    def find_error(**options: Any) -> float:
        cache = jq.KVCache.create((1, 20, 1, 32), **options).append(k, v)
        positions = np.full((1, 4), 19, np.int32)
        return float(np.abs(jq.attention(q, cache, query_positions=positions) - expected).max())

    with jax.enable_x64(False):
        plain = find_error()
        both = find_error(rotate=True, mean_key=mean_key, smoothing=smoothing)
    assert plain > 0.3
    assert both < 0.1


def test_smoothing_against_its_formula(rng: np.random.Generator) -> None:
    q, k = sample(rng, 2, 5, 4, 8) * F32(3), sample_keys(rng, 2, 30, 2, 8)
    q[..., 5] = 0
    k[..., 6] = 1.25
    mean_key, smoothing = jax.jit(jq.KVCache.find_smoothing)(q, k)
    keys, queries = k.astype(np.float64), q.astype(np.float64).reshape(2, 5, 2, 2, 8)
    np.testing.assert_allclose(mean_key, keys.mean((0, 1)), rtol=1e-5, atol=1e-5)
    spreads = [keys.var((0, 1)), np.square(queries).mean((0, 1, 3))]
    spreads = [np.maximum(x, x.mean(-1, keepdims=True) / 2**12) for x in spreads]
    np.testing.assert_allclose(smoothing, (spreads[0] / spreads[1]) ** 0.25, rtol=1e-4)
    # Halfway between powers of 2, on a logarithmic scale.
    near = np.array([[1.4142, 1.4143, 0.7071, 0.70711, 3.0, 1.0, 8.0, 2.0**-30]], F32)
    cache = jq.KVCache.create((1, 1, 1, 8), smoothing=near)
    np.testing.assert_array_equal(cache.smoothing[0, 0], [1, 2, 0.5, 1, 4, 1, 8, 2.0**-30])


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_served_bits_are_those_of_training(name: str, rng: np.random.Generator) -> None:
    """A prompt, tokens one by one, a longer cache, a ring, and vmap: all bits are those of the trained attention."""
    options = OPTIONS[name]
    features = sample_features(options._replace(smooths=False), rng, 2)
    q, k, v = sample(rng, 2, 6, 4, FEATURES), *(sample_keys(rng, 2, 6, 2, FEATURES) for _ in "kv")
    key_spec, value_spec = options.specs

    def train(q: Any, k: Any, v: Any, window: int | None = None) -> Any:
        centered = k if features.mean_key is None else k - features.mean_key[None, None]
        return jq.quantized_dot_product_attention(
            q, centered, v, is_causal=True, key_spec=key_spec, value_spec=value_spec, rotate=options.rotate,
            local_window_size=None if window is None else (window - 1, 0),
        )  # fmt: skip

    def serve(q: Any, k: Any, v: Any, length: int) -> Any:
        return jq.attention(q, make_cache((len(q), length, 2, FEATURES), options, features).append(k, v))

    def serve_tokens(q: Any, k: Any, v: Any, length: int, **more: Any) -> Any:
        def step(cache: Any, token: Any) -> Any:
            q, *new = (x[:, None] for x in token)
            cache = cache.append(*new)
            return cache, jq.attention(q, cache)[:, 0]

        cache = make_cache((2, length, 2, FEATURES), options, features, **more)
        tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v)]
        return jnp.moveaxis(jax.lax.scan(step, cache, tokens)[1], 0, 1)

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        mapped = jax.vmap(lambda q, k, v: serve(q[None], k[None], v[None], 9)[0])(q, k, v)
        served = [serve(q, k, v, 6), serve(q, k, v, 33), serve_tokens(q, k, v, 7), mapped]
        return train(q, k, v), served, train(q, k, v, 3), serve_tokens(q, k, v, 4, window=3)

    trained, served, windowed, ring = run(q, k, v)
    assert np.asarray(trained).any()
    for y in served:
        np.testing.assert_array_equal(y, trained)
    np.testing.assert_array_equal(ring, windowed)
    np.testing.assert_array_equal(serve(q, k, v, 6), trained)  # eagerly, each operation a program of its own


@pytest.mark.slow
def test_a_prompt_longer_than_the_ring_and_rows_of_different_lengths(rng: np.random.Generator) -> None:
    """Each row equals a cache of its own that holds all tokens, with the same window."""
    options, window = OPTIONS["all options, int8 and int4"], 3
    features = sample_features(options, rng, 1)
    q, k, v = sample(rng, 2, 10, 2, FEATURES), *(sample_keys(rng, 2, 10, 1, FEATURES) for _ in "kv")
    lengths = np.array([10, 7], np.int32)

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        cache = make_cache((2, 5, 1, FEATURES), options, features, window=window, per_row=True)
        cache = cache.append(k, v, lengths)
        return jq.attention(q[:, :1], cache, query_positions=lengths[:, None] - 1)

    rings = run(q, k, v)
    for row, count in enumerate(lengths):
        cache = make_cache((1, 10, 1, FEATURES), options, features, window=window)
        cache = cache.append(*(x[row : row + 1, :count] for x in (k, v)))
        alone = jq.attention(q[row : row + 1, :1], cache)
        np.testing.assert_array_equal(rings[row], alone[0])


def test_a_prefix_that_prompts_share(rng: np.random.Generator) -> None:
    """The cache of a prefix, repeated for each prompt: all bits are those of whole prompts."""
    options = OPTIONS["all options, int8 and int4"]
    features = sample_features(options, rng, 1)
    prefix = [sample_keys(rng, 1, 4, 1, FEATURES) for _ in "kv"]
    rest = [sample_keys(rng, 3, 2, 1, FEATURES) for _ in "kv"]
    q = sample(rng, 3, 2, 2, FEATURES)
    shared = make_cache((1, 8, 1, FEATURES), options, features).append(*prefix)
    repeated = jax.tree.map(lambda x: jnp.repeat(x, 3, axis=0) if x.ndim else x, shared)
    whole = make_cache((3, 8, 1, FEATURES), options, features)
    whole = whole.append(*(np.concatenate([np.repeat(a, 3, 0), b], 1) for a, b in zip(prefix, rest, strict=True)))
    np.testing.assert_array_equal(jq.attention(q, repeated.append(*rest)), jq.attention(q, whole))


@pytest.mark.slow
def test_queries_in_other_blocks_than_keys(rng: np.random.Generator) -> None:
    """Blocks of queries that are shorter or longer than those of keys, one scale, and zero points."""
    options = Options(("int8", 12), ("int8", None))
    q, k, v = sample(rng, 1, 3, 2, FEATURES), *(sample_keys(rng, 1, 5, 1, FEATURES) for _ in "kv")
    cache = make_cache((1, 5, 1, FEATURES), options, Features(None, None)).append(k, v)
    codes = [quantize_blocks(x, 127, size) for x, size in ((k, 12), (v, None))]
    visible = (np.arange(5)[None] <= 2 + np.arange(3)[:, None])[None, None]
    for size in (4, 6, 12, None):
        y = jq.attention(q, cache, spec=make_spec("int8", size))
        operands = (quantize_blocks(q, 127, size), *(share_codes(x, 2) for x in codes))
        check_against_float64(y, operands, None, visible)
    spec = jq.QuantSpec("uint8", jq.Blocked(-1, 6), symmetric=False)
    values = np.asarray(jq.quantize(q, spec).dequantize())
    y = jq.attention(q, cache, spec=spec)
    check_against_float64(y, (Codes(values, np.ones(1)), *(share_codes(x, 2) for x in codes)), None, visible)
    long = make_cache((1, 5, 1, FEATURES), Options(("int8", 4), ("int8", None)), Features(None, None)).append(k, v)
    keys = quantize_blocks(k, 127, 4)
    y = jq.attention(q, long, spec=make_spec("int8", 12))
    check_against_float64(
        y, (quantize_blocks(q, 127, 12), share_codes(keys, 2), share_codes(codes[1], 2)), None, visible
    )
    with pytest.raises(ValueError, match=r"jaxquant\.attention: spec: expected blocks of features that end where"):
        jq.attention(q, long, spec=make_spec("int8", 6))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [None, BLOCK])
def test_gradients_of_blocks(size: int | None, rng: np.random.Generator) -> None:
    """The gradient is that of attention over the dequantized operands, in floats."""
    spec = make_spec("int8", size)
    q, k, v = sample(rng, 1, 4, 2, FEATURES), *(sample(rng, 1, 4, 1, FEATURES) for _ in "kv")
    g = sample(rng, *q.shape)

    def attend_in_integers(*xs: Any) -> Any:
        y = jq.quantized_dot_product_attention(
            *xs, is_causal=True, key_spec=spec, value_spec=spec, rotate=True, weight_digits=3
        )
        return (y * g).sum()

    def attend_in_floats(*xs: Any) -> Any:
        return (jax.nn.dot_product_attention(*xs, is_causal=True) * g).sum()

    mine = jax.jit(jax.grad(attend_in_integers, argnums=(0, 1, 2)))(q, k, v)
    floats = jax.grad(attend_in_floats, argnums=(0, 1, 2))(q, k, v)
    for a, b in zip(mine, floats, strict=True):
        assert np.abs(a - b).max() <= 0.08 * np.abs(b).max()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["int8 blocks", "int4 blocks, rotated", "all options, int8 and int4"])
def test_sharded_over_eight_devices(name: str, rng: np.random.Generator) -> None:
    """Batch and heads sharded: all bits of the cache and of the attention."""
    options = OPTIONS[name]
    features = sample_features(options, rng, 4)
    q, k, v = sample(rng, 2, 2, 8, FEATURES), *(sample_keys(rng, 2, 5, 4, FEATURES) for _ in "kv")

    @jax.jit
    def run(cache: Any, k: Any, v: Any, q: Any) -> Any:
        cache = cache.append(k, v)
        return cache, jq.attention(q, cache)

    empty = make_cache((2, 6, 4, FEATURES), options, features)
    cache, y = run(empty, k, v, q)
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))
    specs = empty.partition_specs("data", "model")
    placed = jax.device_put(empty, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    tokens = NamedSharding(mesh, PartitionSpec("data", None, "model"))
    sharded, z = run(placed, *(jax.device_put(x, tokens) for x in (k, v, q)))
    assert sharded.keys.sharding.is_equivalent_to(NamedSharding(mesh, specs.keys), 4)
    for mine, theirs in zip(jax.tree.leaves(sharded), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(z, y)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_step_holds_one_cache(name: str) -> None:
    """A step with blocks has no floats, no copy and no transposed codes of the size of the cache."""
    spec = jq.QuantSpec(name, jq.Blocked(-1, 32), scale_dtype="bfloat16")
    make = lambda: jq.KVCache.create((1, 16384, 2, 128), spec, spec, rotate=True)  # noqa: E731
    cache = jax.eval_shape(make)
    token = jax.ShapeDtypeStruct((1, 1, 2, 128), jnp.float32)
    query = jax.ShapeDtypeStruct((1, 1, 4, 128), jnp.float32)

    def step(cache: Any, tokens: Any) -> Any:
        cache = cache.append(*tokens[1:])
        return cache, jq.attention(tokens[0], cache)

    program = Program(step, cache, (query, token, token), donate_argnums=0)
    assert program.memory.alias_size_in_bytes >= cache.nbytes
    # What is left are some numbers for each query head, block and token, and for int4 a chunk of unpacked codes.
    assert program.memory.temp_size_in_bytes < 1.5 * cache.keys.size
    stored = {("u8" if name == "int4" else "s8", x.shape) for x in (cache.keys, cache.values)}
    passed = ("parameter", "tuple", "get-tuple-element", "while", "conditional", "call", "bitcast")
    for instruction in program.in_memory():
        for dtype, shape in instruction.results:
            if np.prod(shape) >= cache.keys.size and instruction.opcode not in passed:
                assert (dtype, shape) in stored, (instruction.opcode, dtype, shape)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_bytes_of_blocks(dtype: str, head_dim: int) -> None:
    """With scales of 16 bits, blocks of 32 take at most a tenth more than one float32 scale for a token and head."""
    spec = make_spec(dtype, 32, "bfloat16")
    blocks = jax.eval_shape(lambda: jq.KVCache.create((2, 16, 4, head_dim), spec, spec, rotate=True))
    plain = make_spec(dtype, None)
    whole = jax.eval_shape(lambda: jq.KVCache.create((2, 16, 4, head_dim), plain, plain))
    assert blocks.nbytes <= 1.1 * whole.nbytes
    assert blocks.shape == whole.shape == (2, 16, 4, head_dim)
    assert dataclasses.replace(blocks, rotate=False).nbytes == blocks.nbytes


def create(**options: Any) -> Any:
    return jq.KVCache.create((1, 2, 3, 4), **options)


ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda: create(spec_k=make_spec("int8", 3)), ValueError, "create: spec_k: expected blocks of a size that divides"),
    (lambda: create(spec_v=jq.QuantSpec("int8", jq.Blocked(1, 2))), ValueError, "create: spec_v: expected PerToken"),
    (
        lambda: create(spec_v=jq.QuantSpec("int8", jq.Blocked((-2, -1), (1, 2)))),
        *(ValueError, "create: spec_v: expected PerToken"),
    ),
    (lambda: create(rotate="no"), TypeError, "create: rotate: expected True or False"),
    (
        lambda: jq.KVCache.create((1, 2, 3, 5), rotate=True),
        *(ValueError, "create: rotate: expected False, because a head of 5 features has no pairs"),
    ),
    (lambda: create(rotate_values="no"), TypeError, "create: rotate_values: expected True or False"),
    (
        lambda: jq.KVCache.create((1, 2, 3, 5), rotate_values=True),
        *(ValueError, "create: rotate_values: expected False, because a head of 5 features has no pairs"),
    ),
    (
        lambda: create(mean_key=np.ones(4, F32)),
        *(ValueError, r"create: mean_key: expected shape \(3, 4\) or \(1, 3, 4\), got shape \(4,\)"),
    ),
    (lambda: create(mean_key=np.ones((3, 4), np.int32)), TypeError, "create: mean_key: expected dtype float32"),
    (lambda: create(smoothing=np.zeros((3, 4), F32)), ValueError, "create: smoothing: expected positive, finite"),
    (
        lambda: jq.KVCache.find_smoothing(np.ones((1, 2, 2, 4), F32), np.ones((1, 2, 3, 4), F32)),
        *(ValueError, r"find_smoothing: q: expected shape \(1, queries, a multiple of 3, 4\)"),
    ),
    (
        lambda: jq.KVCache.find_smoothing(np.ones((1, 2, 3, 4), F32), np.ones((1, 0, 3, 4), F32)),
        *(ValueError, "find_smoothing: k: expected rank 4"),
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), ERRORS)
def test_errors(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=r"jaxquant\.KVCache\." + text):
        call()


def test_rotating_an_odd_head_is_an_error() -> None:
    x = np.ones((1, 2, 1, 5), F32)
    with pytest.raises(ValueError, match=r"jaxquant\.quantized_dot_product_attention: rotate: expected False"):
        jq.quantized_dot_product_attention(x, x, x, rotate=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_saved_step_takes_a_batch_of_any_size(name: str, per_row: bool, rng: np.random.Generator) -> None:
    """The program that `jax.export` wrote has the bits of the one that is compiled from the function."""
    options = OPTIONS[name]
    features = sample_features(options, rng, 2)

    @jax.jit
    def step(q: jax.Array, k: jax.Array, v: jax.Array, cache: jq.KVCache) -> tuple[jax.Array, jq.KVCache]:
        cache = cache.append(k, v)
        positions = jnp.reshape(cache.index, (-1, 1)) - 1
        return jq.attention(q, cache, query_positions=positions), cache

    def make_shape(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *x.shape[1:]) if x.ndim else (), x.dtype)

    (batch,) = jax.export.symbolic_shape("batch")
    cache = make_cache((1, 8, 2, FEATURES), options, features, per_row=per_row)
    tokens = [sample(rng, 1, 1, heads, FEATURES) for heads in (4, 2, 2)]
    program = jax.export.export(step)(*jax.tree.map(make_shape, (*tokens, cache)))
    program = jax.export.deserialize(program.serialize())
    for rows in (1, 3):
        cache = expected = make_cache((rows, 8, 2, FEATURES), options, features, per_row=per_row)
        for _ in range(3):
            tokens = [sample(rng, rows, 1, heads, FEATURES) for heads in (4, 2, 2)]
            y, cache = program.call(*tokens, cache)
            same, expected = step(*tokens, expected)
            np.testing.assert_array_equal(y, same)
        assert jax.tree.structure(cache) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, cache, expected)
