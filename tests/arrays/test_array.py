"""QuantizedArray goes wherever arrays go: through every transformation, onto devices, into copies and pickles."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq

from ..oracles import array_text, onnx_text
from ..support import inputs, transforms

F32 = np.float32
P: Any = functools.partial


def make_array(rng: np.random.Generator, lead: tuple[int, ...] = ()) -> tuple[jq.QuantizedArray, np.ndarray]:
    """uint4 codes in short blocks, a zero point per row; and what they stand for."""
    shape, sizes = (*lead, 4, 7), (*(1 for _ in lead), 1, 3)
    codes = rng.integers(0, 16, shape).astype(ml_dtypes.uint4)
    scale = inputs.scales(rng, array_text.entries(shape, sizes), np.dtype(F32))
    point = inputs.zero_points(rng, (*lead, 4, 1), "uint4")
    q = jq.QuantizedArray(*map(jnp.asarray, (codes, scale, point)), block_size=3)
    want = array_text.values(codes, array_text.spread(scale, sizes, shape), np.broadcast_to(point, shape), F32)
    return q, want


def check_equal(actual: Any, expected: Any) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert transforms.mismatches(actual, expected) == 0, (actual, expected)


def same_arrays(actual: jq.QuantizedArray, expected: jq.QuantizedArray) -> None:
    assert isinstance(actual, jq.QuantizedArray)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for leaf, w in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        check_equal(leaf, w)


def test_a_pytree(rng: np.random.Generator) -> None:
    q, want = make_array(rng)
    leaves, structure = jax.tree.flatten(q)
    assert len(leaves) == 3
    same_arrays(jax.tree.unflatten(structure, leaves), q)
    named = jax.tree_util.tree_flatten_with_path({"w": q})[0]
    assert [jax.tree_util.keystr(path) for path, _ in named] == ["['w'].codes", "['w'].scale", "['w'].zero_point"]
    assert len(jax.tree.leaves(q.replace(zero_point=None))) == 2
    same_arrays(jax.tree.map(lambda v: v, q), q)
    doubled = jax.tree.map(lambda v: v, q).replace(scale=q.scale * 2)
    check_equal(doubled.dequantize(), want * 2)
    chex.assert_trees_all_equal(q, make_array(np.random.default_rng(1))[0].replace(**q_parts(q)))
    assert [leaf.dtype for leaf in leaves] == [jnp.uint4, jnp.float32, jnp.uint4]


def q_parts(q: jq.QuantizedArray) -> dict[str, Any]:
    return {"codes": q.codes, "scale": q.scale, "zero_point": q.zero_point}


def test_structures_are_equal_only_where_what_is_static_is(rng: np.random.Generator) -> None:
    q, _ = make_array(rng)
    structure = jax.tree.structure(q)
    assert jax.tree.structure(make_array(rng)[0]) == structure
    assert hash(jax.tree.structure(make_array(rng)[0])) == hash(structure)
    for other in (
        q.astype(jnp.bfloat16),
        q.replace(block_size=4),
        q.replace(zero_point=None),
        q.replace(codebook=jq.nf4),
    ):
        assert jax.tree.structure(other) != structure
    assert jax.tree.structure(q.replace(dtype="float32", block_size=3)) == structure


def test_jit_donation_and_no_recompilation(rng: np.random.Generator) -> None:
    q, want = make_array(rng)
    traces = []

    @jax.jit
    def twice(q: jq.QuantizedArray) -> jq.QuantizedArray:
        traces.append(repr(q))
        return q.replace(scale=q.scale * 2)

    check_equal(twice(q).dequantize(), want * 2)
    check_equal(twice(make_array(rng)[0].replace(**q_parts(q))).dequantize(), want * 2)
    assert traces == [repr(q)]
    host_array = jax.tree.map(np.asarray, q)
    donated = jax.jit(lambda q: jax.tree.map(lambda v: v, q), donate_argnums=0)(q)
    same_arrays(donated, host_array)
    check_equal(host_array.dequantize(), want)  # of numpy arrays, too
    shapes = jax.eval_shape(lambda q: q[:, 3:], host_array)
    assert (shapes.shape, shapes.scale.shape, shapes.zero_point.shape) == ((4, 4), (4, 2), (4, 1))
    assert isinstance(shapes.codes, jax.ShapeDtypeStruct)
    assert (shapes.ndim, shapes.size, len(shapes), shapes.nbytes) == (2, 16, 4, 8 + 32 + 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_vmap_over_any_axis(rng: np.random.Generator, axis: int) -> None:
    """The parts keep values' rank inside and outside, and come out where they are told."""
    q, expected = make_array(rng, (5,))
    moved = jax.tree.map(lambda v: jnp.moveaxis(v, 0, axis), q)
    for out_axis in (0, 1, -1):
        rows = jax.vmap(lambda q: q.replace(scale=q.scale * 2), in_axes=axis, out_axes=out_axis)(moved)
        check_equal(rows.dequantize(), np.moveaxis(expected * 2, 0, out_axis))
    rows = jax.vmap(lambda q: q.dequantize(), in_axes=axis, out_axes=1)(moved)
    check_equal(rows, np.moveaxis(expected, 0, 1))
    trees = jax.tree.map(lambda _: axis, q)
    check_equal(jax.vmap(lambda q: q.dequantize(), in_axes=(trees,))(moved), expected)
    shared = jax.tree.map(lambda v: v[:1], q)
    mixed = moved.replace(scale=shared.scale[0])  # codes by the batch, one scale for all of them
    rows = jax.vmap(lambda q: q.dequantize(), in_axes=(jax.tree.map(lambda _: axis, mixed).replace(scale=None),))(mixed)
    assert rows.shape == expected.shape
    loop = [moved.replace(**{k: jnp.take(v, b, axis) for k, v in q_parts(moved).items()}) for b in range(5)]
    check_equal(rows, np.stack([np.asarray(element.replace(scale=mixed.scale).dequantize()) for element in loop]))


def test_nested_vmap(rng: np.random.Generator) -> None:
    q, want = make_array(rng, (2, 3))
    check_equal(jax.vmap(jax.vmap(lambda q: q.dequantize()))(q), want)
    spec = jq.QuantSpec("uint8", jq.Blocked(-1, 3))
    made_inside = jax.vmap(jax.vmap(lambda x: jq.quantize(x, spec)))(want)
    same_arrays(made_inside, jq.quantize(want, spec))


@pytest.mark.slow
def test_scan_loops_and_branches(rng: np.random.Generator) -> None:
    stack, want = make_array(rng, (5,))
    total, rows = lax.scan(lambda c, q: (c + q.dequantize(), q.dequantize()), jnp.zeros((4, 7)), stack)
    check_equal(rows, want)
    np.testing.assert_allclose(total, want.sum(0), rtol=1e-5)
    carried, _ = lax.scan(lambda q, _: (q.replace(scale=q.scale * 2), None), stack, None, length=3)
    check_equal(carried.dequantize(), want * 8)
    check_equal(lax.fori_loop(0, 3, lambda _, q: q.replace(scale=q.scale * 2), stack).dequantize(), want * 8)
    picked = jax.jit(lambda q, i: lax.fori_loop(0, i, lambda j, acc: acc + q[j].dequantize(), jnp.zeros((4, 7))))(
        stack, 1
    )
    check_equal(picked, want[0])
    check_equal(jax.jit(lambda q, i: q[i].dequantize())(stack, 3), want[3])
    first, second = stack[0], stack[1].replace(scale=stack[1].scale * 4)
    for flag in (True, False):
        result = lax.cond(flag, lambda a, b: a, lambda a, b: b, first, second)
        same_arrays(result, first if flag else second)
    branches = [lambda q, k=k: q.replace(scale=q.scale * k) for k in (1, 2, 4)]
    check_equal(lax.switch(2, branches, first).dequantize(), want[0] * 4)
    with pytest.raises(TypeError):  # another block_size is another type, as JAX sees it
        lax.cond(True, lambda q: q, lambda q: q.replace(block_size=4), first)
    check_equal(lax.map(lambda q: q.T.dequantize(), stack), want.transpose(0, 2, 1))
    check_equal(jax.checkpoint(lambda q: q.dequantize())(stack), want)  # type: ignore[attr-defined]


def test_gradients(rng: np.random.Generator) -> None:
    """The scale learns; codes and zero points are integers, and carry none."""
    q, want = make_array(rng)
    g = rng.normal(size=(4, 7)).astype(F32)
    loss = lambda scale: (q.replace(scale=scale).dequantize() * g).sum()  # noqa: E731
    steps = np.asarray(q.codes).astype(np.int64) - np.asarray(q.zero_point).astype(np.int64)
    padded = np.pad((steps * g.astype(np.float64)), ((0, 0), (0, 2))).reshape(4, 3, 3)
    np.testing.assert_allclose(jax.grad(loss)(q.scale), padded.sum(2), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(q.scale), padded.sum(2), rtol=1e-4, atol=1e-4)
    by_leaf = jax.grad(lambda q: (q.dequantize() * g).sum(), allow_int=True)(q)
    assert isinstance(by_leaf, jq.QuantizedArray)
    np.testing.assert_allclose(by_leaf.scale, padded.sum(2), rtol=1e-4, atol=1e-4)
    assert by_leaf.codes.dtype == jax.dtypes.float0
    assert "float0" in repr(by_leaf)
    _, tangent = jax.jvp(lambda s: q.replace(scale=s).dequantize(), (q.scale,), (q.scale,))
    np.testing.assert_allclose(tangent, want, rtol=1e-5, atol=1e-6)
    f8 = jq.quantize(want, jq.QuantSpec(jnp.float8_e4m3fn, jq.PerAxis(0)))
    slope = jax.grad(lambda s: f8.replace(scale=s).dequantize().sum())(f8.scale)
    np.testing.assert_allclose(slope, np.asarray(f8.codes).astype(F32).sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_eight_devices(rng: np.random.Generator, kind: AxisType) -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    x = rng.normal(size=(8, 16)).astype(F32)
    q = jq.quantize(x, jq.QuantSpec("uint8", jq.Blocked(1, 5)))
    want = q.dequantize()
    for spec in (PartitionSpec("d"), PartitionSpec()):
        spread = jax.device_put(q, NamedSharding(mesh, spec))
        for leaf in jax.tree.leaves(spread):
            assert len(leaf.sharding.device_set) == 8
        check_equal(spread.dequantize(), want)
        check_equal(jax.jit(lambda q: q.dequantize())(spread), want)
        check_equal(spread.T.dequantize(), np.asarray(want).T)
    places = jax.tree.map(lambda v: NamedSharding(mesh, PartitionSpec("d" if v.shape[0] == 8 else None)), q)
    check_equal(jax.jit(lambda q: q, in_shardings=(places,), out_shardings=places)(q).dequantize(), want)
    rows = jax.shard_map(
        lambda q: q.dequantize(), mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d")
    )(jax.device_put(q, NamedSharding(mesh, PartitionSpec("d"))))  # fmt: skip
    check_equal(rows, want)


def test_copies(rng: np.random.Generator) -> None:
    q, want = make_array(rng)
    book = jq.quantize(want, jq.QuantSpec(jq.nf4, jq.Blocked(1, 3), scale_dtype=jnp.float8_e8m0fnu))
    for array in (q, book, jq.quantize(want, jq.QuantSpec(jnp.float4_e2m1fn))):
        for copied in (copy.copy(array), copy.deepcopy(array), pickle.loads(pickle.dumps(array))):
            assert copied is not array
            same_arrays(copied, array)
            check_equal(copied.dequantize(), array.dequantize())
    assert copy.copy(q).codes is q.codes
    assert copy.deepcopy(q).codes is not q.codes
    same_arrays(q.replace(), q)


def test_an_array_is_immutable(rng: np.random.Generator) -> None:
    q, _ = make_array(rng)
    for name in ("scale", "codes", "zero_point", "dtype", "block_size", "anything"):
        with pytest.raises(
            AttributeError, match=rf"jaxquant\.QuantizedArray: {name}: the array is immutable; use replace"
        ):
            setattr(q, name, 1)
    with pytest.raises(AttributeError, match="scale: the array is immutable"):
        del q.scale
    with pytest.raises(TypeError):
        q[0] = 1  # type: ignore[index]


def test_an_array_is_not_converted_implicitly(rng: np.random.Generator) -> None:
    """What would need its values as floats is refused; it is a value of its own, with an identity and a hash."""
    q, _ = make_array(rng)
    for ask in (np.asarray, jnp.asarray, lambda q: jnp.sin(q), lambda q: np.ones(7) + q):
        with pytest.raises(TypeError):
            ask(q)
    with pytest.raises(TypeError, match=r"__array__: self: expected q.dequantize\(\) or q.codes, got QuantizedArray"):
        np.asarray(q)
    for ask in (bool, lambda q: not q):
        with pytest.raises(TypeError, match=r"__bool__: self: expected q.dequantize\(\) for a truth value"):
            ask(q)
    operations: Any = (lambda q: q + 1, lambda q: -q, lambda q: q < 1, float, int)
    for operation in operations:
        with pytest.raises(TypeError):
            operation(q)
    assert not isinstance(q, jax.Array)
    assert len({q, q, copy.copy(q)}) == 2


def test_attributes_len_iteration_and_repr(rng: np.random.Generator) -> None:
    q, _ = make_array(rng)
    assert (q.shape, q.ndim, q.size, len(q), q.dtype, q.block_size, q.codebook) == ((4, 7), 2, 28, 4, F32, 3, None)
    assert [row.shape for row in q] == [(7,)] * 4
    assert repr(q) == (
        "QuantizedArray(uint4[4,7], scale=float32[4,3], zero_point=uint4[4,1], block_size=3, dtype=float32, nbytes=64)"
    )
    assert repr(q.replace(zero_point=None).astype(jnp.bfloat16)) == (
        "QuantizedArray(uint4[4,7], scale=float32[4,3], zero_point=None, block_size=3, dtype=bfloat16, nbytes=62)"
    )
    texts = []
    jax.jit(lambda q: texts.append(repr(q)))(q)
    assert texts == [repr(q)]
    assert repr(jax.eval_shape(lambda q: q, q)) == repr(q)
    assert repr(jax.tree.map(lambda _: 0, q)) == "QuantizedArray(codes=0, scale=0, zero_point=0)"
    assert repr(jax.tree.map(jnp.shape, q)) == "QuantizedArray(codes=(4, 7), scale=(4, 3), zero_point=(4, 1))"
    assert repr(jax.tree.map(lambda _: None, q)) == "QuantizedArray(codes=None, scale=None, zero_point=None)"
    assert repr(jq.QuantizedArray(0, None)) == "QuantizedArray(codes=0, scale=None, zero_point=None)"
    assert repr(q.replace(scale=None)).endswith("scale=None, zero_point=" + repr(q.zero_point) + ")")
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    assert "SingleDeviceSharding" in repr(jax.tree.map(lambda _: place, q))


@pytest.mark.parametrize(
    ("name", "bits"),
    [("int2", 2), ("uint4", 4), ("float4_e2m1fn", 4), ("int8", 8), ("float8_e5m2", 8), ("int16", 16)],
)  # fmt: skip
def test_bytes_are_those_of_packed_codes(name: str, bits: int) -> None:
    for size in (0, 1, 3, 4, 5, 1000):
        codes = np.zeros((1, size), onnx_text.dtype(name))
        scale = jnp.ones((1, 1), jnp.float8_e8m0fnu)
        assert jq.QuantizedArray(codes, scale).nbytes == -(-size * bits // 8) + 1
    big = jax.ShapeDtypeStruct((2**20, 2**14), onnx_text.dtype(name))
    assert jq.QuantizedArray(big, jax.ShapeDtypeStruct((1, 1), jnp.float32)).nbytes == 2**34 * bits // 8 + 4


def test_the_dtype_that_comes_back(rng: np.random.Generator) -> None:
    codes = jnp.array([[-128, 127, 3]], jnp.int8)
    for scale, dtype in ((jnp.float16, jnp.float16), (jnp.bfloat16, jnp.bfloat16), (jnp.float8_e8m0fnu, jnp.float32)):
        q = jq.QuantizedArray(codes, jnp.ones((1, 1), scale))
        assert q.dtype == dtype
        assert q.dequantize().dtype == dtype
    scale = inputs.scales(rng, (1, 3), np.dtype(F32))
    q = jq.QuantizedArray(codes, scale)
    for dtype in ("float16", "bfloat16"):
        want = (np.asarray(codes).astype(F32) * scale).astype(onnx_text.dtype(dtype))
        check_equal(q.astype(dtype).dequantize(), want)
        check_equal(jax.jit(lambda q, d=dtype: q.astype(d).dequantize())(q), want)
    assert q.astype(jnp.float16).astype("float32").dtype == jnp.float32


def test_a_replaced_scale_is_checked(rng: np.random.Generator) -> None:
    """Each public call checks the array that it is given, so a bad scale is refused after a good one."""
    q, _ = make_array(rng)
    q.dequantize()
    q.dequantize()
    with pytest.raises(ValueError, match="scale: expected positive numbers"):
        q.replace(scale=-q.scale).dequantize()
    with pytest.raises(ValueError, match="scale: expected positive numbers"):
        jax.tree.map(lambda x: -x, q).dequantize()
    nan = q.replace(scale=q.scale.at[0, 0].set(jnp.nan))
    assert np.isnan(np.asarray(nan.dequantize())).sum() == 3


V, S = jnp.ones((4, 6), jnp.int8), jnp.ones((4, 1))
Q = jq.QuantizedArray(V, S)
N = jq.QuantizedArray(jnp.ones((4, 6), jnp.uint4), S, codebook=jq.nf4)
A: Any = jq.QuantizedArray
ROWS: list[tuple[str, Any, type[Exception], str, str, str]] = [
    ("values float32", A(jnp.ones((4, 6)), S), TypeError, "self.codes", "dtype int2", "float32"),
    ("values int32", A(V.astype(jnp.int32), S), TypeError, "self.codes", "dtype int2", "int32"),
    ("values list", A([1, 2], S), TypeError, "self.codes", "an array", "list"),
    ("values number", A(0, 0), TypeError, "self.codes", "an array", "int"),
    ("values abstract", A(jax.ShapeDtypeStruct((4, 6), jnp.int8), S), TypeError, "self.codes",
     "an array", "Shape"),
    ("scale int8", A(V, V, dtype="float32"), TypeError, "self.scale", "dtype float32", "int8"),
    ("scale float8", A(V, S.astype(jnp.float8_e5m2), dtype="float32"), TypeError, "self.scale",
     "dtype float32", "e5m2"),
    ("scale None", A(V, None, dtype="float32"), TypeError, "self.scale", "an array", "None"),
    ("scale number", A(V, 1.0, dtype="float32"), TypeError, "self.scale", "an array", "float"),
    ("scale rank", A(V, S[:, 0]), ValueError, "self.scale", r"the rank of the codes, \(4, 6\)", r"shape \(4,\)"),
    ("scale scalar", A(V, S[0, 0]), ValueError, "self.scale", "the rank of the codes", r"shape \(\)"),
    ("scale shape", A(V, jnp.ones((3, 1))), ValueError, "self.scale", "each dimension 1, the codes' length", r"\(3, 1\)"),
    ("scale blocks", A(V, jnp.ones((4, 4))), ValueError, "self.scale", "blocks that divide it", r"\(4, 4\)"),
    ("scale too long", A(V, jnp.ones((4, 12))), ValueError, "self.scale", "blocks that divide it", r"\(4, 12\)"),
    ("scale empty", A(V, jnp.ones((4, 0))), ValueError, "self.scale", "blocks that divide it", r"\(4, 0\)"),
    ("scale blocks of 4", A(V, jnp.ones((4, 3)), block_size=4), ValueError, "self.scale",
     "blocks of 4", r"\(4, 3\)"),
    ("scale zero", A(V, S * 0), ValueError, "self.scale", "positive numbers", "0.0"),
    ("scale negative", A(V, S - 3), ValueError, "self.scale", "positive numbers", "-2.0"),
    ("scale minus infinity", A(V, S - np.inf), ValueError, "self.scale", "positive numbers", "-inf"),
    ("point dtype", A(V, S, S.astype(jnp.uint8)), TypeError, "self.zero_point", "dtype int8", "uint8"),
    ("point float8", A(V, S, S.astype(jnp.float8_e5m2)), TypeError, "self.zero_point", "dtype int8", "float8_e5m2"),
    ("point number", A(V, S, 3), TypeError, "self.zero_point", "an array", "int"),
    ("point shape", A(V, S, V[:, :4]), ValueError, "self.zero_point", "each dimension 1, the codes' length", r"\(4, 4\)"),
    ("point of floats", A(V.astype(jnp.float8_e5m2), S, S.astype(jnp.float8_e5m2)), ValueError, "self.zero_point",
     "None, because float8_e5m2 has no zero point", "float8_e5m2"),
    ("point of a book", N.replace(zero_point=N.codes), ValueError, "self.zero_point", "None, because nf4 has no", "uint4"),
    ("carrier", N.replace(codes=V), TypeError, "self.codes", "dtype uint4", "int8"),
    ("book", Q.replace(codebook="nf4"), TypeError, "self.codebook", "a Codebook or None", "nf4"),
    ("dtype", A(V, S, dtype="float64"), TypeError, "self.dtype", "dtype float32", "float64"),
    ("dtype int8", A(V, V, dtype=jnp.int8), TypeError, "self.scale", "dtype float32", "int8"),
    ("block size 0", Q.replace(block_size=0), ValueError, "self.block_size", "a positive int", "0"),
    ("block size float", Q.replace(block_size=2.0), TypeError, "self.block_size", "an int", "2.0"),
    ("block size bool", Q.replace(block_size=True), TypeError, "self.block_size", "an int", "True"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[row[0].replace(" ", "_") for row in ROWS])
def test_every_method_refuses_parts_that_do_not_fit(row: tuple[str, Any, type[Exception], str, str, str]) -> None:
    _, q, error, argument, expected, actual = row
    calls = {
        "dequantize": q.dequantize,
        "__getitem__": lambda: q[0],
        "reshape": lambda: q.reshape(-1),
        "transpose": q.transpose,
    }
    for method, call in calls.items():
        text = rf"jaxquant\.QuantizedArray\.{method}: {argument}: expected .*{expected}.*, got .*{actual}"
        with pytest.raises(error, match=text) as raised:
            call()
        assert isinstance(raised.value, AssertionError), "chex's readers look for AssertionError"


@pytest.mark.parametrize("row", [r for r in ROWS if "positive" not in r[4]], ids=lambda row: row[0].replace(" ", "_"))
def test_bad_parts_are_refused_while_tracing_and_without_chex(
    row: tuple[str, Any, type[Exception], str, str, str],
) -> None:
    _, q, error, argument, expected, actual = row
    text = rf"jaxquant\.QuantizedArray\.dequantize: {argument}: expected .*{expected}.*, got .*{actual}"
    chex.disable_asserts()
    try:
        with pytest.raises(error, match=text):
            q.dequantize()
    finally:
        chex.enable_asserts()
    if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(q)):
        with pytest.raises(error, match=text):
            jax.eval_shape(lambda q: q.dequantize(), q)


MORE: list[tuple[str, Any, type[Exception], str]] = [
    ("len", P(len, A(V[0, 0], S[0, 0])), TypeError, r"__len__: self: expected rank 1 or more, got rank 0"),
    ("replace", P(Q.replace, scales=S), ValueError, r"replace: scales: expected one of codes, scale, zero_point, offset"),
    ("astype int8", P(Q.astype, jnp.int8), TypeError,
     r"astype: dtype: expected dtype float32, float16 or bfloat16, got int8"),
    ("astype None", P(Q.astype, None), TypeError,
     r"astype: dtype: expected dtype float32, float16 or bfloat16, got None"),
    ("mT", lambda: A(V[0], S[0]).mT, ValueError, r"mT: self: expected rank 2 or more, got rank 1"),
    ("quantize", P(jq.quantize, np.ones(3, F32), "int8"), TypeError, r"quantize: spec: expected a QuantSpec, got 'int8'"),
    ("x int32", P(jq.quantize, np.ones(3, np.int32), jq.QuantSpec("int8")), TypeError,
     r"quantize: x: expected dtype float32"),
    ("x float8", P(jq.quantize, jnp.ones(3, jnp.float8_e5m2), jq.QuantSpec("int8")), TypeError,
     r"quantize: x: expected dtype f"),
    ("x list", P(jq.quantize, [1.0], jq.QuantSpec("int8")), TypeError, r"quantize: x: expected an array, got list"),
    ("x None", P(jq.quantize, None, jq.QuantSpec("int8")), TypeError, r"quantize: x: expected an array, got None"),
    ("x quantized", P(jq.quantize, Q, jq.QuantSpec("int8")), TypeError, r"quantize: x: expected an array, got Quantized"),
    ("axis", P(jq.quantize, S, jq.QuantSpec("int8", jq.PerAxis(2))), ValueError,
     r"quantize: axis: expected an integer in \[-2, 1\], because the array has rank 2, got 2"),
    ("axis of rank 0", P(jq.quantize, 1.0, jq.QuantSpec("int8", jq.PerAxis(0))), ValueError,
     r"quantize: axis: .*rank 0"),
    ("axes alike", P(jq.quantize, S, jq.QuantSpec("int8", jq.PerAxis((0, -2)))), ValueError,
     r"quantize: axis: expected distinct axes, got \(0, -2\)"),
    ("blocks of two sizes", P(jq.quantize, V.astype(jnp.float32), jq.QuantSpec(
        "uint8", jq.Blocked(1, 2), zero_point_granularity=jq.Blocked(1, 3))), ValueError,
     r"quantize: spec: expected (granularities of scale|blocks of the same size)"),
    ("neither coarser", P(jq.quantize, V.astype(jnp.float32), jq.QuantSpec(
        "uint8", jq.PerAxis(0), zero_point_granularity=jq.PerAxis(1))), ValueError,
     r"quantize: spec: expected granularities of scale and zero point, one of them at least as fine as the other, got PerAxis\(axis=0\) and"),
    ("one end", P(jq.quantize, S, jq.QuantSpec("int8"), 0.0), TypeError, r"quantize: range: expected a pair \(lo, hi\)"),
    ("lo none", P(jq.quantize, S, jq.QuantSpec("int8"), (None, 0.0)), TypeError,
     r"quantize: range: expected a pair \(lo, hi\)"),
    ("lo nan", P(jq.quantize, S, jq.QuantSpec("int8"), (np.nan, 1)), ValueError,
     r"quantize: range\[0\]: expected finite numbers"),
    ("hi inf", P(jq.quantize, S, jq.QuantSpec("int8"), (0, np.inf)), ValueError,
     r"quantize: range\[1\]: expected finite numbers"),
    ("lo above", P(jq.quantize, S, jq.QuantSpec("int8"), (2.0, 1.0)), ValueError,
     r"quantize: range: expected .* lo at most hi"),
    ("lo above in one", P(jq.quantize, S, jq.QuantSpec("int8", jq.PerAxis(0)), (S * 0, jnp.ones((1, 1)) - 3)),
     ValueError, r"quantize: range: expected .* lo at most hi"),
    ("lo int", P(jq.quantize, S, jq.QuantSpec("int8"), (jnp.int32(0), 1.0)), TypeError,
     r"quantize: range\[0\]: expected dtype float32"),
    ("lo bool", P(jq.quantize, S, jq.QuantSpec("int8"), (False, 1.0)), TypeError, r"quantize: range\[0\]: expected "),
    ("hi list", P(jq.quantize, S, jq.QuantSpec("int8"), (0.0, [1.0])), TypeError,
     r"quantize: range\[1\]: expected an array, got list"),
    ("lo shape", P(jq.quantize, S, jq.QuantSpec("int8"), (-S, S)), ValueError,
     r"quantize: range\[0\]: expected a scalar or shape \(1, 1\), in which any dimension may be 1, got shape \(4, 1\)"),
    ("hi rank", P(jq.quantize, S, jq.QuantSpec("int8", jq.PerAxis(0)), (0.0, S[:, 0])), ValueError,
     r"quantize: range\[1\]: expected a scalar or shape \(4, 1\)"),
]  # fmt: skip


@pytest.mark.parametrize("row", MORE, ids=[row[0].replace(" ", "_") for row in MORE])
def test_refusals(row: tuple[str, Any, type[Exception], str]) -> None:
    _, call, error, text = row
    with pytest.raises(error, match=rf"jaxquant\.(QuantizedArray\.)?{text}") as raised:
        call()
    assert isinstance(raised.value, AssertionError)
