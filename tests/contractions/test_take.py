"""`take`: the rows of a table that never becomes floats, in every format and with every sharing of entries."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq

from ..support.equality import same_bits
from ..support.hlo import Program
from ..support.quantized_arrays import dequantized, expanded

SPECS = {
    "int8 per row": jq.QuantSpec(jnp.int8, jq.PerAxis(0)),
    "uint8 per tensor": jq.QuantSpec(jnp.uint8, scale_dtype=jnp.bfloat16),
    "int4 in blocks of rows": jq.QuantSpec(jnp.int4, jq.Blocked(0, 4)),
    "uint4 in blocks of columns": jq.QuantSpec(jnp.uint4, jq.Blocked(-1, 5), zero_point_granularity=jq.PerTensor()),
    "uint2 per column": jq.QuantSpec(jnp.uint2, jq.PerAxis(1)),
    "nf4 in blocks": jq.QuantSpec(jq.nf4, jq.Blocked(-1, 4), scale_dtype=jnp.float16),
    "float8_e4m3fn": jq.QuantSpec(jnp.float8_e4m3fn, jq.Blocked(0, 3), scale_dtype=jnp.float8_e8m0fnu),
    "float4_e2m1fn": jq.QuantSpec(jnp.float4_e2m1fn, jq.PerAxis((0, 1))),
}


def take_rows(table: np.ndarray, indices: np.ndarray, axis: int, mode: str | None) -> np.ndarray:
    """numpy's take, with the modes that JAX has for floats."""
    n = table.shape[axis]
    inside = (indices >= -n) & (indices < n)
    if mode in ("clip", "wrap"):
        return np.take(table, indices, axis=axis, mode=mode)
    rows = np.take(table, np.where(inside, indices, 0), axis=axis)
    leading_rank = axis % table.ndim
    wide = inside.reshape(*(1,) * leading_rank, *inside.shape, *(1,) * (table.ndim - leading_rank - 1))
    return np.where(wide, rows, np.asarray(np.nan, rows.dtype))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(SPECS))
def test_the_slices_of_the_table(name: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((10, 12)).astype(np.float32) * 3 + 1
    q = jq.quantize(x, SPECS[name]).astype(jnp.float32)
    if name in ("nf4 in blocks", "uint8 per tensor"):
        q = q.astype(jnp.bfloat16)
    table = dequantized(q)
    same_bits(q.dequantize(), table)
    for axis, mode, shape in ((0, None, (2, 3)), (-1, "clip", (7,)), (1, "wrap", ()), (-2, "fill", (1, 4))):
        length = table.shape[axis]
        indices = rng.integers(-2 * length, 2 * length, shape).astype(np.int32)
        want = take_rows(table, indices, axis, mode)
        same_bits(jq.take(q, indices, axis, mode=mode), want)
        if mode is None:
            same_bits(jax.jit(jq.take)(q, jnp.asarray(indices)), want)


@pytest.mark.slow
def test_jax_takes_the_same(rng: np.random.Generator) -> None:
    """jnp.take of the dequantized table, narrow and unsigned indices included: int8 cannot count to 200."""
    q = jq.quantize(rng.standard_normal((200, 3)).astype(np.float32), SPECS["int4 in blocks of rows"])
    table = q.dequantize()
    for dtype in (np.int8, np.uint8, np.int16, np.uint32, np.int32):
        info = np.iinfo(dtype)
        ends = np.array([info.min, info.max, 0, min(199, info.max), min(200, info.max)], dtype)
        for mode in (None, "clip", "wrap"):
            wide = ends if dtype == np.uint32 else ends.astype(np.int32)
            same_bits(jq.take(q, ends, mode=mode), np.asarray(jnp.take(table, wide, axis=0, mode=mode)))


def test_an_int_is_an_index(rng: np.random.Generator) -> None:
    q = jq.quantize(rng.standard_normal((4, 6)).astype(np.float32), SPECS["int8 per row"])
    table = dequantized(q)
    same_bits(jq.take(q, -1), table[-1])
    same_bits(jq.take(q, 2, 1), table[:, 2])
    same_bits(jq.take(q, np.array([3, 0])), table[[3, 0]])  # numpy's own 64 bits
    same_bits(jq.take(q, np.zeros((0, 2), np.int32), 1), np.zeros((4, 0, 2), np.float32))
    same_bits(
        jq.take(jq.quantize(np.zeros((0, 3), np.float32), SPECS["int8 per row"]), np.zeros(0, np.int32)), table[:0, :3]
    )


def test_no_float_array_of_the_table_s_size(rng: np.random.Generator) -> None:
    """Read off the program as it is handed to XLA, and off what XLA makes of it."""
    x = rng.standard_normal((1024, 96)).astype(np.float32)
    indices = jnp.asarray(rng.integers(0, 1024, 7), jnp.int32)
    for spec in (SPECS["int4 in blocks of rows"], jq.QuantSpec(jq.nf4, jq.Blocked(-1, 32))):
        q = jq.quantize(x, spec)
        lowered = jax.jit(jq.take).lower(q, indices).as_text()
        assert "7x96xf32" in lowered
        assert "1024x96xf32" not in lowered
        assert Program(jq.take, q, indices).widest() <= max(7 * 96, q.scale.size)
        naive = jax.jit(lambda q, i: jnp.take(q.dequantize(), i, axis=0)).lower(q, indices).as_text()
        assert "1024x96xf32" in naive, "this test can see one"


def test_under_vmap(rng: np.random.Generator) -> None:
    tables = rng.standard_normal((3, 6, 8)).astype(np.float32)
    indices = rng.integers(-7, 7, (3, 5)).astype(np.int32)
    spec = jq.QuantSpec(jnp.uint4, jq.Blocked(-1, 4))
    q = jax.vmap(lambda x: jq.quantize(x, spec))(tables)
    arrays = [jq.quantize(x, spec) for x in tables]
    want = np.stack([take_rows(dequantized(array), i, 0, None) for array, i in zip(arrays, indices, strict=True)])
    same_bits(jax.vmap(jq.take)(q, indices), want)
    shared = np.stack([take_rows(dequantized(arrays[0]), i, 1, "clip") for i in indices])
    same_bits(jax.vmap(lambda i: jq.take(arrays[0], i, 1, mode="clip"))(indices), shared)


def test_the_cotangent_of_the_scale(rng: np.random.Generator) -> None:
    """Each row adds to the entry of its block, as often as it is taken; what is out of range adds nothing."""
    q = jq.quantize(rng.standard_normal((10, 3)).astype(np.float32), jq.QuantSpec(jnp.uint8, jq.Blocked(0, 4)))
    indices = np.array([0, 9, 9, -1, 3, 10, -11, 5], np.int32)
    g = rng.standard_normal((8, 3)).astype(np.float32)
    _, pull = jax.vjp(lambda scale: jq.take(q.replace(scale=scale), indices), q.scale)
    steps = np.asarray(q.codes, np.float64) - expanded(q.zero_point, q.shape, q.block_size)
    want = np.zeros(q.scale.shape)
    for row, index in zip(g.astype(np.float64), indices, strict=True):
        if -10 <= index < 10:
            want[index % 10 // 4] += row * steps[index]
    np.testing.assert_allclose(pull(jnp.asarray(g))[0], want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_sharded(kind: AxisType, rng: np.random.Generator) -> None:
    """Cut into rows or columns; of explicitly cut rows JAX wants to be told where the result lies."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    q = jq.quantize(rng.standard_normal((16, 8)).astype(np.float32), SPECS["int8 per row"])
    indices = rng.integers(-16, 17, 12).astype(np.int32)
    want = take_rows(dequantized(q), indices, 0, None)
    for partition in ((None, "d"), ("d", None))[: 2 if kind == AxisType.Auto else 1]:
        place = NamedSharding(mesh, PartitionSpec(*partition))
        placed = q.replace(
            codes=jax.device_put(q.codes, place), scale=jax.device_put(q.scale, NamedSharding(mesh, PartitionSpec()))
        )
        same_bits(jax.jit(jq.take)(placed, indices), want)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_floats_are_taken_as_by_jax(dtype: Any, rng: np.random.Generator) -> None:
    """The same arguments give the entries of a float table, with the same modes."""
    table = jnp.asarray(rng.normal(size=(5, 6)), dtype)
    for axis, mode, shape in ((0, None, (2, 3)), (-1, "clip", (7,)), (1, "wrap", ()), (-2, "fill", (1, 4))):
        length = table.shape[axis]
        indices = rng.integers(-2 * length, 2 * length, shape).astype(np.int32)
        want = take_rows(np.asarray(table), indices, axis, mode)
        same_bits(jq.take(table, indices, axis, mode=mode), want)
        same_bits(jnp.take(table, indices, axis, mode=mode), want)
        same_bits(jax.jit(lambda t, i, axis=axis, mode=mode: jq.take(t, i, axis, mode=mode))(table, indices), want)
    same_bits(jq.take(table, 3), np.asarray(table)[3])
    same_bits(
        jax.vmap(jq.take, (0, None))(table, jnp.array([1, 9])), take_rows(np.asarray(table), np.array([1, 9]), 1, None)
    )
    gradient = jax.grad(lambda t: jq.take(t, jnp.array([1, 1, -1, 9]))[:3].astype(jnp.float32).sum())(table)
    same_bits(gradient, np.outer([0, 2, 0, 0, 1], np.ones(6)).astype(dtype))


def test_floats_on_an_explicit_mesh(rng: np.random.Generator) -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    table = rng.normal(size=(8, 4)).astype(np.float32)
    indices = np.array([7, 0, 9, -1], np.int32)
    with jax.set_mesh(mesh):
        rows = jax.device_put(table, NamedSharding(mesh, PartitionSpec("d", None)))
        with pytest.raises(
            ValueError, match=r"jaxquant\.take: out_sharding: expected a NamedSharding or PartitionSpec"
        ):
            jq.take(rows, jnp.asarray(indices))
        for place in (PartitionSpec("d", None), PartitionSpec(None, None)):
            taken = jax.jit(lambda t, i, place=place: jq.take(t, i, out_sharding=place))(rows, jnp.asarray(indices))
            assert jax.typeof(taken).sharding.spec == place
            same_bits(taken, take_rows(table, indices, 0, None))


def test_a_plain_network_runs_on_floats_and_on_codes(rng: np.random.Generator) -> None:
    """A lookup that is scaled, a layer and a tied head: one function, a tree of floats and a tree of codes."""

    def network(params: Any, tokens: jax.Array) -> jax.Array:
        x = jq.take(params["table"], tokens) * 8.0
        x = x + jax.nn.relu(x @ params["up"]) @ params["down"]
        return x @ params["table"].T

    shapes = {"table": (32, 16), "up": (16, 24), "down": (24, 16)}
    params = {name: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32) for name, shape in shapes.items()}
    tokens = jnp.array([[3, 31, 0]])
    specs = {name: jq.QuantSpec(jnp.int8, jq.PerAxis(0 if name == "table" else 1)) for name in params}
    quantized = {name: jq.quantize(w, specs[name]) for name, w in params.items()}
    for tree in (params, quantized):
        table, up, down = (
            np.asarray(w if isinstance(w, jax.Array) else dequantized(w), np.float64)
            for w in (tree[name] for name in shapes)
        )
        x = table[np.asarray(tokens)] * 8.0
        want = (x + np.maximum(x @ up, 0) @ down) @ table.T
        for run in (network, jax.jit(network), lambda p, t: jax.vmap(network, (None, 0))(p, t)):
            np.testing.assert_allclose(run(tree, tokens), want, 1e-4, 1e-3)
    # The float function is also one that `prepare` converts: the lookup is one.
    rows = jq.prepare(network, params, tokens, rules=jq.recipes.weight_only_int8(), strict=True).coverage.rows
    assert [row.form for row in rows] == ["lookup", "weight-only", "weight-only", "weight-only"]


def test_arithmetic_on_a_lookup_names_take() -> None:
    for compute in (lambda x: x * 8.0, lambda x: 8.0 * x, lambda x: x + x):
        with pytest.raises(TypeError, match=r"jq\.take\(q, indices\) looks up floats, in place of q\[indices\]"):
            compute(Q[ONE])


Q = jq.quantize(np.ones((3, 4), np.float32), jq.QuantSpec(jnp.int8))
ONE = np.zeros(1, np.int32)
take: Any = jq.take  # what it refuses is what its types refuse
REFUSALS = [
    (
        functools.partial(take, np.ones((3, 4), np.int32), ONE),
        TypeError,
        "q: expected dtype float32, float16 or bfloat16, got int32",
    ),
    (
        functools.partial(take, Q, np.zeros(1, np.float32)),
        TypeError,
        "indices: expected an array of integers, got .*float32",
    ),
    (
        functools.partial(take, Q, np.zeros(1, np.bool_)),
        TypeError,
        "indices: expected an array of integers, got .*bool",
    ),
    (functools.partial(take, Q, [0, 1]), TypeError, "indices: expected an array, got list"),
    (functools.partial(take, Q, "0"), TypeError, "indices: expected an array, got str"),
    (functools.partial(take, Q, Q), TypeError, "indices: expected an array"),
    (functools.partial(take, Q, 2**40), ValueError, "indices: expected an int that int32 can hold"),
    (functools.partial(take, Q, np.array([2**40])), ValueError, "indices: expected integers that int32 can hold"),
    (
        functools.partial(take, Q, np.int64(2**32 + 1)),
        ValueError,
        r"indices: expected integers that int32 can hold, got 4294967297 \(int64\)",
    ),
    (
        functools.partial(take, Q, np.uint64(2**63)),
        ValueError,
        "indices: expected integers that int32 can hold, got 92",
    ),
    (functools.partial(take, Q, ONE, 2), ValueError, r"axis: expected an integer in \[-2, 1\].*, got 2"),
    (functools.partial(take, Q, ONE, None), TypeError, "axis: expected an int, got None"),
    (functools.partial(take, Q, ONE, True), TypeError, "axis: expected an int, got True"),
    (functools.partial(take, Q[0, 0], ONE), ValueError, "axis: expected an array of rank 1 or more.*, got rank 0"),
    (
        functools.partial(take, Q, ONE, mode="raise"),
        ValueError,
        "mode: expected 'fill' or 'clip' or 'wrap', got 'raise'",
    ),
    (functools.partial(take, Q[:0], ONE), ValueError, r"axis: expected an axis of positive length.*\(0, 4\), got 0"),
    (
        functools.partial(take, Q.replace(scale=np.ones((2, 1), np.float32)), ONE),
        ValueError,
        "q.scale: expected the rank of the codes",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSALS)
def test_refusals(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"jaxquant.take: {text}") as raised:
        call()
    assert isinstance(raised.value, AssertionError)
