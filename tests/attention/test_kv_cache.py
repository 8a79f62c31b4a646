"""KVCache: its codes against `quantize`, its places and positions, its buffers in compiled programs, its errors."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import jaxquant as jq

from ..oracles.attention_text import quantize_tokens
from ..support.hlo import Program

SPECS = {name: jq.QuantSpec(name, jq.PerToken()) for name in ("int8", "int4")}
MOST = {"int8": 127, "int4": 7}


def sample_tokens(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return tokens of various magnitudes; among them one of zeros, and ties."""
    x = rng.normal(0, 1, shape) * 2.0 ** rng.integers(-8, 8, (*shape[:-1], 1))
    x = np.where(rng.random((*shape[:-1], 1)) < 0.1, 0, x)
    ties = rng.integers(-126, 127, shape) + 0.5
    ties[..., 0] = 127
    return np.where(rng.random((*shape[:-1], 1)) < 0.3, ties, x).astype(np.float32)


def read_tokens(cache: jq.KVCache) -> tuple[np.ndarray, ...]:
    """Return codes and scales [batch, length, heads, ...] of keys and values."""
    keys, values = cache.quantized_keys, cache.quantized_values
    codes = (np.transpose(keys.codes, (0, 2, 1, 3)), np.transpose(values.codes, (0, 3, 1, 2)))
    scales = (np.transpose(x.astype(jnp.float32), (0, 2, 1)) for x in (cache.key_scale, cache.value_scale))
    return (*codes, *scales)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("features", [8, 5])
def test_codes_are_those_of_quantize(name: str, features: int, rng: np.random.Generator) -> None:
    spec = SPECS[name]
    k, v = (sample_tokens(rng, 2, 7, 3, features) for _ in "kv")

    @jax.jit
    def fill(k: Any, v: Any) -> Any:
        cache = jq.KVCache.create((2, 9, 3, features), spec, spec).append(k[:, :4], v[:, :4])

        def step(cache: Any, tokens: Any) -> Any:
            return cache.append(*(x[:, None] for x in tokens)), None

        return jax.lax.scan(step, cache, [jnp.moveaxis(x[:, 4:], 1, 0) for x in (k, v)])[0]

    cache = fill(k, v)
    assert int(cache.index) == 7
    assert cache.shape == (2, 9, 3, features)
    key_codes, value_codes, key_scale, value_scale = read_tokens(cache)
    for x, codes, scale in ((k, key_codes, key_scale), (v, value_codes, value_scale)):
        expected = quantize_tokens(x, MOST[name])
        np.testing.assert_array_equal(codes[:, :7], expected.codes)
        np.testing.assert_array_equal(scale[:, :7], expected.scale[..., 0])
        assert not codes[:, 7:].any()
        q = jq.quantize(x, spec)
        np.testing.assert_array_equal(codes[:, :7], np.asarray(q.codes).astype(np.int8))
    dequantized = cache.dequantize()
    np.testing.assert_array_equal(dequantized[0][:, :7], jq.quantize(k, spec).dequantize())
    np.testing.assert_array_equal(dequantized[1][:, :7], jq.quantize(v, spec).dequantize())


@pytest.mark.parametrize(
    ("name", "features", "scale_dtype", "most"),
    [
        *(("int8", features, dtype, 0.27) for features in (64, 128) for dtype in ("float32", "bfloat16")),
        *(("int4", features, dtype, 0.15) for features in (64, 128) for dtype in ("float32", "bfloat16")),
        *(("int8", 32, "bfloat16", 0.27), ("int4", 32, "bfloat16", 0.15)),
    ],
)
def test_bytes(name: str, features: int, scale_dtype: str, most: float) -> None:
    spec = jq.QuantSpec(name, jq.PerToken(), scale_dtype=scale_dtype)
    shape = (2, 16, 4, features)
    cache = jax.eval_shape(lambda: jq.KVCache.create(shape, spec, spec))
    floats = 2 * 4 * np.prod(shape)
    assert cache.nbytes <= most * floats
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert total == cache.nbytes + 4


@pytest.mark.slow
def test_ring(rng: np.random.Generator) -> None:
    """A ring of 6 places holds the last 6 tokens, whatever the sizes of the calls."""
    sizes = (4, 1, 3, 1, 9, 1, 2, 1, 6)
    k = sample_tokens(rng, 1, sum(sizes), 1, 4)

    @jax.jit
    def fill(k: Any) -> Any:
        cache, states, start = jq.KVCache.create((1, 6, 1, 4), window=4), [], 0
        for size in sizes:
            cache = cache.append(k[:, start : start + size], k[:, start : start + size])
            start += size
            states.append((cache, cache.positions, cache.overflowed))
        return states

    q = jq.quantize(k, SPECS["int8"])
    for (cache, positions, overflowed), count in zip(fill(k), np.cumsum(sizes), strict=True):
        assert int(cache.index) == count
        assert not overflowed
        places = np.asarray(positions)[0]
        expected = {int(p) for p in range(max(0, count - 6), count)}
        assert {int(p) for p in places if p >= 0} == expected
        codes = read_tokens(cache)
        for place, position in enumerate(places):
            if position >= 0:
                assert position % 6 == place
                for part in codes[:2]:
                    np.testing.assert_array_equal(part[0, place], np.asarray(q.codes)[0, position])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("window", [None, 3])
def test_rows_of_different_lengths(window: int | None, rng: np.random.Generator) -> None:
    """Each row of `per_row` equals a cache of its own."""
    k, v = (sample_tokens(rng, 3, 6, 2, 4) for _ in "kv")
    lengths = np.array([[4, 0, 1], [1, 2, 0]], np.int32)

    @jax.jit
    def fill(k: Any, v: Any) -> Any:
        cache = jq.KVCache.create((3, 6, 2, 4), window=window, per_row=True)
        for call, start in enumerate((0, 4)):
            cache = cache.append(k[:, start : start + 4], v[:, start : start + 4], lengths[call])
        return cache, cache.positions

    def fill_alone(row: int) -> Any:
        cache = jq.KVCache.create((1, 6, 2, 4), window=window)
        for call, start in enumerate((0, 4)):
            tokens = slice(start, start + int(lengths[call, row]))
            cache = cache.append(k[row : row + 1, tokens], v[row : row + 1, tokens])
        return cache

    cache, positions = fill(k, v)
    np.testing.assert_array_equal(cache.index, lengths.sum(0))
    for row in range(3):
        alone = fill_alone(row)
        np.testing.assert_array_equal(positions[row], alone.positions[0])
        for mine, theirs in zip(read_tokens(cache), read_tokens(alone), strict=True):
            held = np.asarray(alone.positions)[0] >= 0
            np.testing.assert_array_equal(mine[row, held], theirs[0, held])


@pytest.mark.slow
def test_vmap_and_pytree(rng: np.random.Generator) -> None:
    k = sample_tokens(rng, 2, 2, 3, 1, 4)

    def fill(k: Any) -> Any:
        return jq.KVCache.create((2, 4, 1, 4), SPECS["int8"], SPECS["int4"]).append(k, k)

    stacked = jax.jit(jax.vmap(fill))(k)
    for i in range(2):
        alone = fill(k[i])
        for mine, theirs in zip(jax.tree.leaves(stacked), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(mine[i], theirs)
    leaves, tree = jax.tree.flatten(fill(k[0]))
    assert len(leaves) == 5
    assert jax.tree.unflatten(tree, [None] * 5).spec_v == SPECS["int4"]


def count_copies(text: str, cache: jq.KVCache) -> int:
    """Return the number of copies of whole codes in a compiled program."""
    shapes = {f"{x.dtype.str[1]}8[{','.join(map(str, x.shape))}]" for x in (cache.keys, cache.values)}
    shapes = {shape.replace("i8", "s8") for shape in shapes}
    return sum(
        bool(re.search(rf"= {re.escape(shape)}\S* copy\(", line)) for line in text.splitlines() for shape in shapes
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"per_row": True}], ids=["plain", "ring", "rows"])
def test_tokens_are_written_in_place(name: str, options: dict[str, Any]) -> None:
    """The donated buffers are the results, and no temporary is as large as one of them."""
    cache = jax.eval_shape(lambda: jq.KVCache.create((2, 1024, 2, 64), SPECS[name], SPECS[name], **options))
    token = jax.ShapeDtypeStruct((2, 1, 2, 64), jnp.float32)
    compiled = jax.jit(jq.KVCache.append, donate_argnums=0).lower(cache, token, token).compile()
    text = compiled.as_text() or ""
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes
    assert memory.temp_size_in_bytes < cache.keys.size // 4
    assert len(re.findall(r"may-alias|must-alias", text.splitlines()[0])) == 5
    assert count_copies(text, cache) == 0


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"window": 1024}, {"per_row": True}], ids=["plain", "ring", "rows"])
def test_a_loop_of_appends_and_attention_does_not_copy_the_cache(options: dict[str, Any]) -> None:
    cache = jax.eval_shape(lambda: jq.KVCache.create((1, 4096, 2, 64), **options))
    tokens = jax.ShapeDtypeStruct((8, 1, 1, 2, 64), jnp.float32)

    def decode(cache: Any, tokens: Any) -> Any:
        def step(cache: Any, token: Any) -> Any:
            cache = cache.append(token, token)
            return cache, jq.attention(token, cache)

        return jax.lax.scan(step, cache, tokens)

    compiled = jax.jit(decode, donate_argnums=0).lower(cache, tokens).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes
    # What is left are some floats for each token.
    assert memory.temp_size_in_bytes < cache.keys.size // 2
    assert count_copies(compiled.as_text() or "", cache) == 0


def find_roots(program: Program, instruction: Any) -> list[str]:
    """Return the opcodes of an instruction or, of a fusion, of what its computation ends with."""
    if instruction.opcode != "fusion":
        return [instruction.opcode]
    name = re.search(r"calls=%?([\w.-]+)", instruction.rest)
    assert name
    return [i.opcode for i in program.computations[name[1]] if i.is_root or i.opcode == "dynamic-update-slice"]


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("loop", [False, True], ids=["step", "scan"])
@pytest.mark.parametrize("options", [{}, {"window": 4000}, {"per_row": True}], ids=["plain", "ring", "rows"])
def test_a_step_holds_one_cache(name: str, loop: bool, options: dict[str, Any]) -> None:
    """A step that appends and attends, and a loop of them: the only arrays of the cache's size are its donated ones.

    There are no floats of its size, no copy and no transposed keys. Of int4, a chunk is unpacked at a time.
    """
    cache = jax.eval_shape(lambda: jq.KVCache.create((1, 16384, 2, 128), SPECS[name], SPECS[name], **options))
    token = jax.ShapeDtypeStruct((*((3,) if loop else ()), 1, 1, 2, 128), jnp.float32)
    query = jax.ShapeDtypeStruct((*token.shape[:-2], 4, 128), jnp.float32)

    def step(cache: Any, tokens: Any) -> Any:
        cache = cache.append(*tokens[1:])
        return cache, jq.attention(tokens[0], cache)

    def decode(cache: Any, tokens: Any) -> Any:
        return jax.lax.scan(step, cache, tokens) if loop else step(cache, tokens)

    program = Program(decode, cache, (query, token, token), donate_argnums=0)
    assert program.memory.alias_size_in_bytes >= cache.nbytes
    # What is left are some floats for each query head and token, and for int4 a chunk of unpacked codes.
    assert program.memory.temp_size_in_bytes < 0.8 * cache.keys.size
    stored = {("u8" if name == "int4" else "s8", x.shape) for x in (cache.keys, cache.values)}
    passed = ("parameter", "tuple", "get-tuple-element", "while", "conditional", "call", "bitcast")
    for instruction in program.in_memory():
        for dtype, shape in instruction.results:
            if np.prod(shape) < cache.keys.size or instruction.opcode in passed:
                continue
            assert (dtype, shape) in stored, (instruction.opcode, dtype, shape)
            roots = find_roots(program, instruction)
            assert "dynamic-update-slice" in roots or "scatter" in roots, (instruction, roots)


def test_attention_has_no_gradient(rng: np.random.Generator) -> None:
    """Neither the codes nor their scales: a gradient of the scales alone would be wrong, without a warning."""
    q, k, v = (sample_tokens(rng, 1, 2, 1, 4) for _ in "qkv")

    def run(q: Any, k: Any, v: Any) -> Any:
        return jq.attention(q, jq.KVCache.create((1, 4, 1, 4)).append(k, v)).sum()

    for gradient in jax.jit(jax.grad(run, argnums=(0, 1, 2)))(q, k, v):
        assert not np.asarray(gradient).any()


@pytest.mark.slow
def test_more_tokens_than_a_ring_holds(rng: np.random.Generator) -> None:
    """Of a long prompt the last tokens stay, for each row its own, and the next token wraps around."""
    length, tokens = 5, 12
    k = sample_tokens(rng, 3, tokens, 1, 4)
    lengths = np.array([12, 4, 0], np.int32)

    @jax.jit
    def fill(k: Any, lengths: Any) -> Any:
        cache = jq.KVCache.create((3, length, 1, 4), window=2, per_row=True).append(k, k, lengths)
        cache = cache.append(k[:, :3], k[:, :3])
        return cache, cache.positions

    cache, positions = fill(k, lengths)
    np.testing.assert_array_equal(cache.index, lengths + 3)
    codes, expected = read_tokens(cache), np.asarray(jq.quantize(k, SPECS["int8"]).codes)
    for row, count in enumerate(lengths):
        order = [*range(count), *range(3)]
        for place, position in enumerate(np.asarray(positions)[row]):
            held = [p for p in range(count + 3) if p % length == place]
            assert position == (held[-1] if held else -1)
            if held:
                for part in codes[:2]:
                    np.testing.assert_array_equal(part[row, place], expected[row, order[position]])


@pytest.mark.slow
def test_overflow() -> None:
    k = jnp.ones((2, 3, 1, 4))
    cache = jq.KVCache.create((2, 4, 1, 4)).append(k, k)
    with pytest.raises(ValueError, match=r"jaxquant.KVCache.append: k: expected at most 4 tokens in all.*, got 6"):
        cache.append(k, k)
    with pytest.raises(ValueError, match=r"jaxquant.KVCache.append: k: expected at most 2 tokens.*, got 3"):
        jax.jit(lambda k: jq.KVCache.create((2, 2, 1, 4)).append(k, k))(k)
    # Traced, the overflow is only known when the program runs.
    over = jax.jit(jq.KVCache.append)(cache, k, k)
    assert bool(over.overflowed)
    assert np.isnan(jq.attention(k[:, :1], over)).all()
    assert not np.isnan(jq.attention(k[:, :1], cache)).any()
    with pytest.raises(ValueError, match=r"jaxquant.KVCache.check: cache: expected at most 4 tokens.*, got 6"):
        over.check()
    assert cache.check() is cache
    with pytest.raises(ValueError, match=r"jaxquant.KVCache.check: cache: expected a cache outside"):
        jax.jit(lambda cache: cache.check())(cache)
    # With an index for each row, only the rows that overflow are lost.
    rows = jq.KVCache.create((2, 4, 1, 4), per_row=True).append(k, k, jnp.array([1, 3], jnp.int32))
    rows = jax.jit(jq.KVCache.append)(rows, k, k)
    np.testing.assert_array_equal(rows.overflowed, [False, True])
    np.testing.assert_array_equal(np.isnan(jq.attention(k[:, :1], rows)).any((1, 2, 3)), [False, True])
    with pytest.raises(ValueError, match="expected at most 4 tokens in all"):
        rows.append(k, k, jnp.array([1, 0], jnp.int32))
    assert int(dataclasses.replace(rows, index=jnp.zeros(2, jnp.int32)).append(k, k).index[0]) == 3


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_sharded_over_eight_devices(name: str, rng: np.random.Generator) -> None:
    """Batch and heads sharded: codes and scales to the last bit, and the result of attention."""
    k, v, q = sample_tokens(rng, 2, 5, 4, 8), sample_tokens(rng, 2, 5, 4, 8), sample_tokens(rng, 2, 2, 8, 8)

    @jax.jit
    def run(cache: Any, k: Any, v: Any, q: Any) -> Any:
        cache = cache.append(k, v)
        return cache, jq.attention(q, cache)

    empty = jq.KVCache.create((2, 6, 4, 8), SPECS[name], SPECS[name])
    cache, y = run(empty, k, v, q)
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))
    specs = empty.partition_specs("data", "model")
    placed = jax.device_put(empty, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    tokens = NamedSharding(mesh, jax.sharding.PartitionSpec("data", None, "model"))
    sharded, z = run(placed, *(jax.device_put(x, tokens) for x in (k, v, q)))
    assert sharded.keys.sharding.is_equivalent_to(NamedSharding(mesh, specs.keys), 4)
    for mine, theirs in zip(jax.tree.leaves(sharded), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_max_ulp(np.asarray(z), np.asarray(y), maxulp=4)


ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda: jq.KVCache.create((1, 2, 3)), TypeError, "create: shape: expected .batch, length"),  # pyright: ignore
    (lambda: jq.KVCache.create((1, 2, 3, 4.0)), TypeError, "create: shape: expected an int"),  # pyright: ignore
    (lambda: jq.KVCache.create((1, -2, 3, 4)), ValueError, "create: shape: expected dimensions of 0 or more"),
    (lambda: jq.KVCache.create((1, 2, 3, 4), jnp.int8), TypeError, "create: spec_k: expected a QuantSpec"),  # pyright: ignore
    (lambda: jq.KVCache.create((1, 2, 3, 4), jq.QuantSpec("int8")), ValueError, "create: spec_k: expected PerToken"),
    (
        lambda: jq.KVCache.create((1, 2, 3, 4), spec_v=jq.QuantSpec("uint8", jq.PerToken())),
        *(TypeError, "create: spec_v: expected dtype int8 or int4, got uint8"),
    ),
    (
        lambda: jq.KVCache.create((1, 2, 3, 4), jq.QuantSpec("int8", jq.PerToken(), symmetric=False)),
        *(ValueError, "create: spec_k: expected a symmetric spec"),
    ),
    (
        lambda: jq.KVCache.create((1, 2, 3, 4), jq.QuantSpec("int8", jq.PerToken(), scale_dtype="float8_e8m0fnu")),
        *(TypeError, "create: spec_k: expected scale_dtype float32, float16"),
    ),
    (lambda: jq.KVCache.create((1, 2, 3, 4), window=3), ValueError, r"create: window: expected an int in \[1, 2\]"),
    (lambda: jq.KVCache.create((1, 2, 3, 4), per_row="no"), TypeError, "create: per_row: expected True"),  # pyright: ignore
    (lambda: make_cache().append(jnp.ones((1, 1, 3)), jnp.ones((1, 1, 3))), ValueError, "append: k: expected shape"),
    (
        lambda: make_cache().append(jnp.ones((1, 1, 3, 4)), jnp.ones((1, 2, 3, 4))),
        *(ValueError, r"append: v: expected shape \(1, 1, 3, 4\), got shape \(1, 2, 3, 4\)"),
    ),
    (
        lambda: make_cache().append(jnp.ones((1, 1, 3, 4), jnp.int32), jnp.ones((1, 1, 3, 4))),
        *(TypeError, "append: k: expected dtype float32"),
    ),
    (
        lambda: make_cache().append(jnp.ones((1, 1, 3, 4)), jnp.ones((1, 1, 3, 4)), jnp.ones(1, jnp.int32)),
        *(ValueError, "append: lengths: expected None, because all rows share an index"),
    ),
]


def make_cache() -> jq.KVCache:
    return jq.KVCache.create((1, 2, 3, 4))


@pytest.mark.parametrize(("call", "error", "text"), ERRORS)
def test_errors(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=r"jaxquant\.KVCache\." + text):
        call()


@pytest.mark.slow
def test_empty_shapes() -> None:
    for shape in ((0, 4, 1, 8), (2, 0, 1, 8), (2, 4, 0, 8), (2, 4, 1, 0)):
        cache = jq.KVCache.create(shape)
        k = jnp.ones((shape[0], 0, *shape[2:]))
        assert cache.append(k, k).shape == shape
    cache = jq.KVCache.create((2, 0, 1, 8))
    np.testing.assert_array_equal(jq.attention(jnp.ones((2, 3, 2, 8)), cache), np.zeros((2, 3, 2, 8)))
