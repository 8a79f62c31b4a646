"""A transformer block with quantized weights in FSDP and tensor-parallel layouts: codes are gathered, never floats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import distributed as jqd

P = PartitionSpec
WIDTH, HIDDEN, HEADS = 64, 128, 8
TOKENS = jq.QuantSpec(jnp.int8, jq.PerToken())
SPECS = {
    "int8": jq.QuantSpec(jnp.int8, jq.PerAxis(1)),
    "int4 blocks": jq.QuantSpec(jnp.int4, jq.Blocked(0, 8), scale_dtype=jnp.bfloat16),
}
SHAPES = {
    "query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH), "value": (WIDTH, WIDTH), "out": (WIDTH, WIDTH),
    "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
}  # fmt: skip
ROWS_ARE_CUT = ("out", "down")


def make_mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((8,), ("d",), axis_types=(kind,))


def multiply(x: jax.Array, w: Any, is_dynamic: bool) -> jax.Array:
    lhs = jq.quantize(x, TOKENS) if is_dynamic else x
    return jq.matmul(lhs, w)


def apply_block(params: Any, x: jax.Array, is_dynamic: bool) -> jax.Array:
    """Return the outputs of a block of attention and a feed-forward network, [batch, length, WIDTH]."""
    batch, length, _ = x.shape
    q, k, v = (multiply(x, params[n], is_dynamic).reshape(batch, length, HEADS, -1) for n in ("query", "key", "value"))
    scores = jax.nn.softmax(jnp.einsum("blhd,bmhd->bhlm", q, k), axis=-1)
    x = x + multiply(jnp.einsum("bhlm,bmhd->blhd", scores, v).reshape(x.shape), params["out"], is_dynamic)
    return x + multiply(jax.nn.relu(multiply(x, params["up"], is_dynamic)), params["down"], is_dynamic)


def make_block(rng: np.random.Generator, spec: jq.QuantSpec) -> tuple[Any, np.ndarray]:
    params = {n: jq.quantize(rng.normal(size=s).astype(np.float32) / 8, spec) for n, s in SHAPES.items()}
    return params, rng.normal(size=(8, 4, WIDTH)).astype(np.float32)


def place(params: Any, mesh: Mesh, find_axis: Callable[[str], int]) -> Any:
    """Return weights cut along an axis; a scale that all devices share is on each of them."""

    def put(axis: int, part: jax.Array) -> jax.Array:
        names = ["d" if i == axis and n % 8 == 0 else None for i, n in enumerate(part.shape)]
        return jax.device_put(part, NamedSharding(mesh, P(*names)))

    return {n: jax.tree.map(lambda part, n=n: put(find_axis(n), part), q) for n, q in params.items()}


def list_gathers(compiled: Any) -> set[str]:
    """Return the dtypes of all-gathers of at least as many elements as the smallest matrix has bytes in 4 bits."""
    return {
        c.dtype for c in jqd.count_traffic(compiled)
        if c.kind in ("all-gather", "all-to-all", "all-reduce") and np.prod(c.shape) >= WIDTH * WIDTH // 2
    }  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_fsdp_under_jit(rng: np.random.Generator, name: str, is_dynamic: bool) -> None:
    """A sharding constraint on a QuantizedArray gathers its codes; the results equal one device's."""
    mesh, (params, x) = make_mesh(), make_block(rng, SPECS[name])
    cut = place(params, mesh, lambda n: 0)
    whole = NamedSharding(mesh, P())

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return apply_block(jax.lax.with_sharding_constraint(params, whole), x, is_dynamic)

    batch = NamedSharding(mesh, P("d"))
    run = jax.jit(apply, out_shardings=batch)
    dtypes = list_gathers(run.lower(cut, jax.device_put(x, batch)).compile())
    assert dtypes <= {"s8", "u8", "s4"}
    assert dtypes, "expected weights to be gathered"
    # With jax 0.10, a compiled program itself refuses 4-bit integers that jax.jit takes.
    actual = run(cut, jax.device_put(x, batch))
    expected = jax.jit(apply_block, static_argnums=2)(params, x, is_dynamic)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_tensor_parallel_under_jit(rng: np.random.Generator, is_dynamic: bool) -> None:
    """Heads and hidden features are cut: no weights travel, only activations."""
    mesh, (params, x) = make_mesh(), make_block(rng, SPECS["int8"])
    cut = place(params, mesh, lambda n: 0 if n in ROWS_ARE_CUT else 1)
    run = jax.jit(apply_block, static_argnums=2, out_shardings=NamedSharding(mesh, P()))
    x_whole = jax.device_put(x, NamedSharding(mesh, P()))
    compiled = run.lower(cut, x_whole, is_dynamic).compile()
    weights = {(n, m) for n, m in SHAPES.values()}
    shapes = [c.shape for c in jqd.count_traffic(compiled)]
    assert shapes
    assert not [shape for shape in shapes if shape in weights]
    expected = jax.jit(apply_block, static_argnums=2)(params, x, is_dynamic)
    np.testing.assert_allclose(compiled(cut, x_whole), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_fsdp_under_shard_map(rng: np.random.Generator) -> None:
    """`all_gather` of each weight where it is used."""
    mesh, (params, x) = make_mesh(), make_block(rng, SPECS["int4 blocks"])

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return apply_block(jqd.all_gather(params, "d", tiled=True), x, True)

    mapped = jax.jit(jax.shard_map(apply, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d")))
    compiled = mapped.lower(params, x).compile()
    assert list_gathers(compiled) == {"u8"}
    expected = jax.jit(apply_block, static_argnums=2)(params, x, True)
    np.testing.assert_allclose(mapped(params, x), expected, rtol=1e-4, atol=1e-4)


def test_fsdp_with_explicit_shardings(rng: np.random.Generator) -> None:
    """`jax.sharding.reshard` of a QuantizedArray gathers its codes."""
    mesh, (params, x) = make_mesh(AxisType.Explicit), make_block(rng, SPECS["int8"])
    up = place({"up": params["up"]}, mesh, lambda n: 0)["up"]

    def apply(w: jq.QuantizedArray, x: jax.Array) -> jax.Array:
        return multiply(x, jax.tree.map(lambda part: jax.sharding.reshard(part, P()), w), True)

    with jax.set_mesh(mesh):
        x = jax.device_put(x[:, 0], NamedSharding(mesh, P("d")))
        compiled = jax.jit(apply).lower(up, x).compile()
        actual = compiled(up, x)
    assert list_gathers(compiled) == {"s8"}
    assert actual.sharding.spec[0] == "d"
    expected = jax.jit(multiply, static_argnums=2)(np.asarray(x), params["up"], True)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.slow
def test_fsdp_training(rng: np.random.Generator) -> None:
    """Weights are gathered and their gradients scattered as codes, with 0.28 of the bytes of floats."""
    mesh, (quantized, x) = make_mesh(), make_block(rng, SPECS["int8"])
    params = {n: q.dequantize() for n, q in quantized.items()}
    forward, backward = jq.QuantSpec(jnp.int8, jq.Blocked(1, 64)), jq.QuantSpec(jnp.int8, jq.Blocked(-1, 128))

    def gather_codes(shard: jax.Array) -> jax.Array:
        return jqd.all_gather(shard, "d", spec=forward, tiled=True, backward_spec=backward)

    def gather_floats(shard: jax.Array) -> jax.Array:
        return jax.lax.all_gather(shard, "d", tiled=True)

    def gather_rounded(shard: jax.Array) -> jax.Array:
        return gather_floats(jq.fake_quantize(shard, forward))

    def make_step(gather: Callable[[jax.Array], jax.Array]) -> Any:
        def find_loss(shards: Any, x: jax.Array) -> jax.Array:
            w = {n: gather(shard) for n, shard in shards.items()}
            scores = jax.nn.softmax(x @ w["query"] @ (x @ w["key"]).swapaxes(1, 2), axis=-1)
            y = x + scores @ (x @ w["value"]) @ w["out"]
            return jnp.mean((y + jax.nn.relu(y @ w["up"]) @ w["down"]) ** 2)

        return jax.jit(jax.shard_map(jax.grad(find_loss), mesh=mesh, in_specs=P("d"), out_specs=P("d")))

    codes, floats = (make_step(gather).lower(params, x).compile() for gather in (gather_codes, gather_floats))
    traffic, expected = jqd.count_traffic(codes), jqd.count_traffic(floats)
    assert sum(c.sent_bytes for c in traffic) <= 0.28 * sum(c.sent_bytes for c in expected)
    sent = {dtype: sum(c.sent_bytes for c in traffic if c.dtype == dtype) for dtype in {c.dtype for c in traffic}}
    assert set(sent) == {"s8", "f32"}
    assert sent["f32"] <= sent["s8"] * 4 / 64, "expected no floats but scales"
    assert {c.kind for c in traffic} == {"all-gather", "all-to-all"}
    # With the same weights, the gradients differ by the quantization of what eight devices send.
    actual = codes(params, x)
    for name, grad in make_step(gather_rounded)(params, x).items():
        error = np.abs(actual[name] - grad).max()
        assert 0 < error <= 0.1 * np.abs(grad).max(), name


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["w8a8_dynamic", "weight_only_int8"])
def test_fsdp_of_a_converted_function(rng: np.random.Generator, recipe: str) -> None:
    """The weights of `Prepared.convert`: cut over devices, gathered as codes by a constraint."""
    mesh, (quantized, x) = make_mesh(), make_block(rng, SPECS["int8"])
    params = {n: quantized[n].dequantize() for n in ("up", "down")}

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ params["up"]) @ params["down"]

    prepared = jq.prepare(apply, params, x, rules=getattr(jq.recipes, recipe)())
    converted = prepared.convert(params)
    cut, whole = place(converted.params, mesh, lambda n: 0), NamedSharding(mesh, P())
    batch = NamedSharding(mesh, P("d"))

    def apply_cut(params: Any, x: jax.Array) -> Any:
        return prepared.apply(jq.QuantizedTree(jax.lax.with_sharding_constraint(params, whole)), x)

    run = jax.jit(apply_cut, out_shardings=batch)
    assert list_gathers(run.lower(cut, jax.device_put(x, batch)).compile()) == {"s8"}
    actual, expected = run(cut, jax.device_put(x, batch)), jax.jit(prepared.apply)(converted, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_attention_with_queries_on_devices(rng: np.random.Generator) -> None:
    """An explicit mesh axis may cut the queries of a row, whose keys and values each device has."""
    mesh = make_mesh(AxisType.Explicit)
    query, key = (rng.normal(size=(2, 8, 4, 16)).astype(np.float32) for _ in range(2))

    def attend(query: jax.Array, key: jax.Array) -> jax.Array:
        return jq.quantized_dot_product_attention(query, key, -key)

    expected = jax.jit(attend)(query, key)
    with jax.set_mesh(mesh):
        y = jax.jit(attend)(jax.device_put(query, NamedSharding(mesh, P(None, "d"))), key)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_attention_with_explicit_shardings(rng: np.random.Generator) -> None:
    """Under jax.jit, with the sharding in the type of the result, and inside of jax.shard_map: as on one device."""
    mesh = make_mesh(AxisType.Explicit)
    query, key = (rng.normal(size=(8, 5, 4, 16)).astype(np.float32) for _ in range(2))

    def attend(query: jax.Array, key: jax.Array, cache: jq.KVCache) -> Any:
        cache = cache.append(key, -key)
        y, pull = jax.vjp(lambda q, k: jq.quantized_dot_product_attention(q, k, k, is_causal=True), query, key)
        return jq.attention(query, cache), y, *pull(y)

    empty = jq.KVCache.create((8, 7, 4, 16))
    specs, rows = empty.partition_specs("d"), NamedSharding(mesh, P("d"))
    with jax.set_mesh(mesh):
        cache = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), empty, specs)
        placed = (*(jax.device_put(x, rows) for x in (query, key)), cache)
        mapped = jax.shard_map(attend, in_specs=(P("d"), P("d"), specs), out_specs=P("d"))
        results = [jax.jit(f)(*placed) for f in (attend, mapped)]
    expected = jax.jit(attend)(query, key, empty)
    for actual in results:
        for a, b in zip(actual, expected, strict=True):
            assert a.sharding.spec[0] == "d"
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def cut_tokens(cache: jq.KVCache, mesh: Mesh) -> jq.KVCache:
    """Return a cache that is cut along its tokens."""
    tokens = NamedSharding(mesh, P(None, None, "d"))
    values = jax.device_put(cache.values, NamedSharding(mesh, P(None, None, None, "d")))
    keys, key_scale, value_scale = jax.device_put((cache.keys, cache.key_scale, cache.value_scale), tokens)
    index = jax.device_put(cache.index, NamedSharding(mesh, P()))
    return dataclasses.replace(
        cache, keys=keys, values=values, key_scale=key_scale, value_scale=value_scale, index=index
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_attention_over_a_cache_that_is_cut_along_its_tokens(rng: np.random.Generator, dtype: str) -> None:
    """The bits equal one device's; no codes or scores travel, only their maxima and sums."""
    spec, mesh = jq.QuantSpec(dtype, jq.PerToken()), make_mesh(AxisType.Auto)
    query, key = rng.normal(size=(2, 3, 8, 16)).astype(np.float32), rng.normal(size=(2, 31, 2, 16)).astype(np.float32)
    cache = jq.KVCache.create((2, 32, 2, 16), spec, spec).append(key, -key)
    cut, attend = cut_tokens(cache, mesh), jax.jit(jq.attention)
    np.testing.assert_array_equal(attend(query, cut), attend(query, cache))
    assert {c.kind for c in jqd.count_traffic(attend.lower(query, cut).compile())} == {"all-reduce"}
    one = key[:, :1]
    for a, b in zip(jax.tree.leaves(cut.append(one, one)), jax.tree.leaves(cache.append(one, one)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_explicit_axes_that_cut_tokens_are_reported(rng: np.random.Generator) -> None:
    mesh = make_mesh(AxisType.Explicit)
    x = rng.normal(size=(2, 8, 2, 16)).astype(np.float32)
    cut = cut_tokens(jq.KVCache.create((2, 8, 2, 16)), mesh)
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, NamedSharding(mesh, P(None, "d")))
        for name, call in (
            ("attention: cache", lambda: jq.attention(x, cut)),
            ("KVCache.append: cache", lambda: cut.append(x, x)),
            ("quantized_dot_product_attention: key", lambda: jq.quantized_dot_product_attention(x, rows, x)),
            ("quantized_dot_product_attention: value", lambda: jq.quantized_dot_product_attention(x, x, rows)),
        ):
            with pytest.raises(ValueError, match=f"{name}: expected tokens that no explicit mesh axis cuts .*over 'd'"):
                call()


@pytest.mark.slow
def test_converted_functions_and_convolutions_with_explicit_shardings(rng: np.random.Generator) -> None:
    """With the batch sharded, the results equal one device's, and are sharded as the batch is."""
    mesh = make_mesh(AxisType.Explicit)
    x = rng.normal(size=(16, 8, 6, 6)).astype(np.float32)
    shapes = {"kernel": (8, 8, 3, 3), "w": (8, 4)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    def apply(params: Any, x: jax.Array) -> jax.Array:
        x = jax.lax.conv_general_dilated(x, params["kernel"], (1, 1), "SAME")
        return jax.nn.relu(x).mean((2, 3)) @ params["w"]

    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("d")))
        for recipe in (jq.recipes.w8a8_dynamic(), jq.recipes.w8a8_static(), jq.recipes.weight_only_int8()):
            prepared = jq.prepare(apply, params, x, rules=recipe)
            ranges = prepared.calibrate(params, [x])
            converted = prepared.convert(params, ranges)
            actual = jax.jit(prepared.apply)(converted, placed)
            assert actual.sharding.spec[0] == "d"
            np.testing.assert_allclose(actual, jax.jit(prepared.apply)(converted, x), rtol=1e-4, atol=1e-4)


def test_collectives_of_arrays_that_stay_explicit(rng: np.random.Generator) -> None:
    """JAX refuses to flatten an array that is sharded over an explicit axis, which jax.shard_map was not given."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    spec = jq.QuantSpec(jnp.int8)
    with jax.set_mesh(mesh):
        add = jax.shard_map(lambda x: jqd.psum(x, "a", spec=spec), in_specs=P("a"), out_specs=P(), axis_names={"a"})
        shape = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("a", "b")))
        with pytest.raises(Exception, match=r"This reshape is not supported"):
            jax.eval_shape(add, shape)
