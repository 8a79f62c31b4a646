"""Stacks of caches, one for each layer of a decoder: tokens that are appended to one layer, in place."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq

from ..support.hlo import Program

LAYERS, LENGTH, SHAPE = 3, 8, (2, 8, 2, 16)
BLOCKED = {name: jq.QuantSpec(name, jq.Blocked(-1, 8), scale_dtype="float16") for name in ("int8", "int4")}
SPECS = {name: jq.QuantSpec(name, jq.PerToken()) for name in ("int8", "int4")} | {
    f"{name} blocks": spec for name, spec in BLOCKED.items()
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "ring": {"window": 3}, "rows": {"per_row": True}, "ring of rows": {"window": 3, "per_row": True},
}  # fmt: skip


def create_layers(spec: jq.QuantSpec, options: dict[str, Any], rng: np.random.Generator) -> list[jq.KVCache]:
    """Return caches with different mean keys, smoothing and numbers of tokens, whose keys and values are rotated."""
    caches = []
    for layer in range(LAYERS):
        mean_key, smoothing = rng.normal(0, 1, SHAPE[2:]), 2.0 ** rng.integers(-2, 3, SHAPE[2:])
        arrays = {"mean_key": np.float32(mean_key), "smoothing": np.float32(smoothing)}
        cache = jq.KVCache.create(SHAPE, spec, spec, rotate=True, rotate_values=True, **arrays, **options)
        k, v = (rng.normal(0, 1, (2, layer + 1, 2, 16)).astype(np.float32) for _ in "kv")
        caches.append(cache.append(k, v))
    return caches


def stack(caches: list[jq.KVCache]) -> jq.KVCache:
    return jax.tree.map(lambda *parts: jnp.stack(parts), *caches)


def create_stack(layers: int, *arguments: Any, **options: Any) -> jq.KVCache:
    """Return equal caches, which hold no token."""
    return stack([jq.KVCache.create(*arguments, **options)] * layers)


def check_equal(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("tokens", [1, 4, 0])
@pytest.mark.parametrize("mode", ["eager", "jit", "constant", "x64"])
def test_a_layer_is_the_cache_alone(name: str, kind: str, tokens: int, mode: str, rng: np.random.Generator) -> None:
    """The codes, scales and indices of the layer are those of the cache alone, and other layers do not change."""
    caches = create_layers(SPECS[name], OPTIONS[kind], rng)
    k, v = (rng.normal(0, 1, (2, tokens, 2, 16)).astype(np.float32) for _ in "kv")
    lengths = rng.integers(0, tokens + 1, 2).astype(np.int32) if "rows" in kind else None
    for layer in range(LAYERS):
        expected = stack([x.append(k, v, lengths) if i == layer else x for i, x in enumerate(caches)])
        append: Callable[..., Any] = jq.KVCache.append
        if mode == "constant":
            found = jax.jit(functools.partial(append, layer=layer))(stack(caches), k, v, lengths)
        elif mode == "x64":
            with jax.enable_x64(True):
                found = jax.jit(append)(stack(caches), k, v, lengths, layer=layer)
        else:
            append = jax.jit(append) if mode == "jit" else append
            found = append(stack(caches), k, v, lengths, layer=jnp.int32(layer))
        check_equal(found, expected)
        check_equal(found.take_layer(layer), jax.tree.map(lambda x, layer=layer: x[layer], expected))


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_loop_over_layers(kind: str, rng: np.random.Generator) -> None:
    """A scan that carries the stack, under vmap: the caches and the results of attention of the caches alone."""
    spec, count = SPECS["int8 blocks"], 3
    stacks = [create_layers(spec, OPTIONS[kind], rng) for _ in range(count)]
    k, v = (rng.normal(0, 1, (count, LAYERS, 2, 2, 2, 16)).astype(np.float32) for _ in "kv")

    @jax.jit
    @jax.vmap
    def run(caches: Any, k: Any, v: Any) -> Any:
        def step(carry: Any, tokens: Any) -> Any:
            caches, layer = carry
            caches = caches.append(*tokens, layer=layer)
            return (caches, layer + 1), jq.attention(tokens[0], caches.take_layer(layer))

        (caches, _), y = jax.lax.scan(step, (caches, jnp.int32(0)), (k, v))
        return caches, y

    found, y = run(jax.tree.map(lambda *x: jnp.stack(x), *map(stack, stacks)), k, v)
    alone = jax.jit(lambda cache, k, v: (new := cache.append(k, v), jq.attention(k, new)))
    for i in range(count):
        pairs = [alone(cache, k[i, layer], v[i, layer]) for layer, cache in enumerate(stacks[i])]
        check_equal(jax.tree.map(lambda x, i=i: x[i], found), stack([cache for cache, _ in pairs]))
        np.testing.assert_array_max_ulp(np.asarray(y[i]), np.stack([out for _, out in pairs]), maxulp=8)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["int8", "int4", "int8 blocks"])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_loop_over_layers_writes_in_place(name: str, tokens: int, kind: str) -> None:
    """The donated stack is the result, and the only copies are those of a layer that attention reads."""
    options: dict[str, Any] = {**OPTIONS[kind], **({"window": 1000} if "ring" in kind else {})}
    caches = create_stack(12, (1, 4096, 2, 64), SPECS[name], SPECS[name], **options)
    heads = jax.ShapeDtypeStruct((12, 1, tokens, 2, 64), jnp.float32)

    def run(caches: Any, heads: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            caches, layer = carry
            caches = caches.append(x, x, layer=layer)
            return (caches, layer + 1), jq.attention(x, caches.take_layer(layer))

        (caches, _), y = jax.lax.scan(step, (caches, jnp.int32(0)), heads)
        return caches, y

    memory: Any = Program(run, caches, heads, donate_argnums=0).memory
    assert memory.alias_size_in_bytes >= caches.nbytes
    # A layer of keys and values, its scores, and for int4 a chunk of unpacked codes.
    assert memory.temp_size_in_bytes < 3 * caches.nbytes / 12


def test_layers_beyond_the_ends(rng: np.random.Generator) -> None:
    """A traced layer stands for the nearest one, and a known one is refused."""
    caches = stack(create_layers(SPECS["int8"], {}, rng))
    k = rng.normal(0, 1, (2, 1, 2, 16)).astype(np.float32)
    append, take = jax.jit(jq.KVCache.append), jax.jit(jq.KVCache.take_layer)
    for layer, nearest in ((-1, 0), (LAYERS, LAYERS - 1), (2**31 - 1, LAYERS - 1), (-(2**31), 0)):
        check_equal(append(caches, k, k, layer=layer), append(caches, k, k, layer=nearest))
        check_equal(take(caches, layer), take(caches, nearest))
        text = rf"layer: expected from 0 to 2, because the stack has 3, got {layer}"
        with pytest.raises(ValueError, match="append: " + text):
            caches.append(k, k, layer=layer)
        with pytest.raises(ValueError, match="take_layer: " + text):
            caches.take_layer(layer)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32, np.int64])
def test_layers_of_other_dtypes(dtype: Any, rng: np.random.Generator) -> None:
    caches, k = stack(create_layers(SPECS["int8"], {}, rng)), np.ones((2, 1, 2, 16), np.float32)
    check_equal(caches.append(k, k, layer=dtype(2)), caches.append(k, k, layer=2))
    check_equal(jax.jit(jq.KVCache.take_layer)(caches, dtype(2)), caches.take_layer(2))


def test_a_stack_without_overflow() -> None:
    empty = jax.tree.map(lambda part: part[:0], create_stack(LAYERS, SHAPE))
    assert empty.check() is empty


def test_a_known_overflow_of_a_layer(rng: np.random.Generator) -> None:
    """The layers hold 1, 2 and 3 tokens of 8."""
    caches, k = stack(create_layers(SPECS["int8"], {}, rng)), np.ones((2, 6, 2, 16), np.float32)
    assert caches.append(k, k, layer=1).index.tolist() == [1, 8, 3]
    with pytest.raises(ValueError, match=r"append: k: expected at most 8 tokens in all.*got 9"):
        caches.append(k, k, layer=2)
    # If the layer is not known, neither are the tokens that it holds.
    assert jax.jit(lambda layer: caches.append(k, k, layer=layer).index)(1).tolist() == [1, 8, 3]
    # Traced, the layer overflows, and only its results are NaN.
    found = jax.jit(jq.KVCache.append)(caches, k, k, layer=2)
    assert found.overflowed.tolist() == [False, False, True]
    assert np.isnan(jq.attention(k[:, :1], found.take_layer(2))).all()
    assert np.isfinite(jq.attention(k[:, :1], found.take_layer(1))).all()
    with pytest.raises(ValueError, match="check: cache: expected at most 8 tokens"):
        found.check()


@pytest.mark.slow
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("axis_type", list(AxisType)[:2])
def test_sharded_over_eight_devices(per_row: bool, axis_type: AxisType, rng: np.random.Generator) -> None:
    """Batch and heads sharded, the layers not: no device gets codes, tokens or places of another one."""
    empty = create_stack(LAYERS, (2, 6, 4, 8), per_row=per_row)
    k, v, q = (rng.normal(0, 1, (2, 5, heads, 8)).astype(np.float32) for heads in (4, 4, 8))

    def append(caches: Any, k: Any, v: Any) -> Any:
        return caches.append(k, v, layer=1)

    def attend(caches: Any, q: Any) -> Any:
        return jq.attention(q, caches.take_layer(1))

    caches = jax.jit(append)(empty, k, v)
    y = jax.jit(attend)(caches, q)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)
    specs = empty.partition_specs("data", "model")
    assert specs.keys == PartitionSpec(None, "data", "model")
    assert specs.index == (PartitionSpec(None, "data") if per_row else PartitionSpec())
    with jax.set_mesh(mesh):
        placed = jax.device_put(empty, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
        tokens = NamedSharding(mesh, PartitionSpec("data", None, "model"))
        k, v, q = (jax.device_put(x, tokens) for x in (k, v, q))
        sharded = jax.jit(append)(placed, k, v)
        z = jax.jit(attend)(sharded, q)
        texts = [jax.jit(append).lower(placed, k, v).compile().as_text()]
        texts.append(jax.jit(lambda caches: caches.take_layer(1)).lower(sharded).compile().as_text())
    assert not [
        line for text in texts for line in (text or "").splitlines() if re.search(r"(all|collective)-\w+\(", line)
    ]
    assert sharded.keys.sharding.is_equivalent_to(NamedSharding(mesh, specs.keys), 5)
    check_equal(jax.device_get(sharded), jax.device_get(caches))
    np.testing.assert_array_max_ulp(np.asarray(z), np.asarray(y), maxulp=4)


def test_tokens_that_a_mesh_cuts() -> None:
    mesh = jax.make_mesh((8,), ("tokens",), axis_types=(AxisType.Explicit,))
    caches, k = create_stack(LAYERS, (1, 8, 2, 16)), jnp.ones((1, 1, 2, 16))
    with jax.set_mesh(mesh):
        scale = jax.device_put(caches.key_scale, NamedSharding(mesh, PartitionSpec(None, None, None, "tokens")))
        cut = dataclasses.replace(caches, key_scale=scale)
        with pytest.raises(ValueError, match=r"append: cache: expected tokens that no explicit mesh axis cuts"):
            cut.append(k, k, layer=0)


K = np.ones((2, 1, 2, 16), np.float32)
LAYER = "layer: expected an int or an integer scalar"
ONE = (
    "cache: expected the cache of one layer, as take_layer returns it, whose scales have 3 dimensions, got scales of 4"
)
ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda x: x.append(K, K), ValueError, "KVCache.append: " + LAYER + ", because the cache is a stack.* got None"),
    (lambda x: x.append(K, K, layer=1.0), TypeError, "KVCache.append: " + LAYER + ", got 1.0 .float."),
    (lambda x: x.append(K, K, layer=True), TypeError, "KVCache.append: " + LAYER + ", got"),
    (lambda x: x.append(K, K, layer=[1]), TypeError, "KVCache.append: " + LAYER),
    (lambda x: x.append(K, K, layer=np.array([1])), ValueError, r"KVCache.append: layer: expected a scalar, got shape"),
    (lambda x: x.append(K, K, layer=np.int64(2**40)), ValueError, "KVCache.append: layer: expected from 0 to 2"),
    (lambda x: x.take_layer(np.asarray(2**40)), ValueError, "KVCache.take_layer: layer: expected from 0 to 2"),
    (lambda x: x.append(K[:1], K, layer=1), ValueError, r"KVCache.append: k: expected shape \(2, tokens, 2, 16\)"),
    (lambda x: x.append(K, K, np.ones(2, np.int32), layer=1), ValueError, "KVCache.append: lengths: expected None"),
    (
        lambda x: x.take_layer(0).append(K, K, layer=1),
        *(ValueError, "KVCache.append: cache: expected a stack, .*, or no layer, got scales of 3 dimensions"),
    ),
    (
        lambda x: x.take_layer(0).take_layer(0),
        *(ValueError, "KVCache.take_layer: cache: expected a stack, .* 4 dimensions, got scales of 3 dimensions"),
    ),
    (
        lambda x: jax.tree.map(lambda part: part[None], x).append(K, K, layer=0),
        *(ValueError, "KVCache.append: cache: expected a stack, .* got scales of 5 dimensions"),
    ),
    (
        lambda x: jax.tree.map(lambda part: part[:0], x).append(K, K, layer=0),
        *(ValueError, "KVCache.append: cache: expected a stack with a layer, got one without layers"),
    ),
    (lambda x: x.take_layer(None), ValueError, "KVCache.take_layer: " + LAYER),
    (lambda x: jq.attention(K, x), ValueError, "attention: " + ONE),
    (lambda x: x.dequantize(), ValueError, "KVCache.dequantize: " + ONE),
    (lambda x: x.positions, ValueError, "KVCache.positions: " + ONE),
    (lambda x: x.quantized_keys, ValueError, "KVCache.quantized_keys: " + ONE),
    (lambda x: x.quantized_values, ValueError, "KVCache.quantized_values: " + ONE),
]


@pytest.mark.parametrize(("call", "error", "text"), ERRORS)
def test_errors(call: Any, error: type[Exception], text: str) -> None:
    caches = create_stack(LAYERS, SHAPE)
    with pytest.raises(error, match=r"jaxquant\." + text):
        call(caches)
