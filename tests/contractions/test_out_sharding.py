"""Explicit shardings that do not determine that of the result, and `out_sharding=`: the integers of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import Blocked, Int8Backward, PerAxis, QuantizedArray, QuantSpec

from ..support import transforms

F32 = np.float32
P = PartitionSpec
NUMBERS = (((1,), (0,)), ((), ()))
SPECS = {
    "per tensor": (QuantSpec("uint8"), QuantSpec("int8")),
    "per axis": (QuantSpec("uint8", PerAxis(0)), QuantSpec("uint4", PerAxis(1))),
    "blocks": (QuantSpec("int8", PerAxis(0)), QuantSpec("uint4", Blocked(0, 4))),
    "blocks of both": (QuantSpec("uint8", Blocked(1, 16)), QuantSpec("int4", Blocked(0, 8))),
}
# Shardings of lhs and rhs that determine none for the result: contracted dimensions of both, and a mesh axis twice.
OPEN = (((None, "d"), ("d", None)), (("d", None), (None, "d")))
RESULTS = (P("d", None), P(None, "d"), P())


def mesh_of(*sizes: int) -> Any:
    return jax.make_mesh(sizes, ("d", "e")[: len(sizes)], axis_types=(AxisType.Explicit,) * len(sizes))


def place(tree: Any, *places: str | None, mesh: Any = None) -> Any:
    """Every array at these places, but for dimensions that have no equal parts for them."""
    mesh = mesh_of(8) if mesh is None else mesh
    sizes = {None: 1, **mesh.shape}

    def place_leaf(x: Any) -> jax.Array:
        spec = P(*(None if n % sizes[axis] else axis for n, axis in zip(np.shape(x), places, strict=True)))
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(place_leaf, tree)


def check_equal(actual: Any, expected: Any) -> None:
    for g, w in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert transforms.mismatches(np.asarray(g), np.asarray(w)) == 0


def spec_of(x: jax.Array) -> tuple[Any, ...]:
    """The mesh axes of each dimension."""
    spec = jax.typeof(x).sharding.spec
    return (*spec, *(None,) * (x.ndim - len(spec)))


def operands(rng: np.random.Generator, name: str) -> tuple[QuantizedArray, QuantizedArray]:
    x, w = rng.normal(size=(16, 32)).astype(F32), rng.normal(size=(32, 24)).astype(F32)
    left, right = SPECS[name]
    return jq.quantize(x, left), jq.quantize(w, right)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SPECS)
def test_contractions_of_cut_operands(rng: np.random.Generator, name: str) -> None:
    a, b = operands(rng, name)
    expected = jq.matmul(a, b)
    with jax.set_mesh(mesh_of(8)):
        for left, right in OPEN:
            q, w = place(a, *left), place(b, *right)

            @jax.jit
            def all_of_them(q: Any, w: Any) -> Any:
                products = [jq.matmul(q, w, out_sharding=out) for out in RESULTS]
                other = jq.einsum("ij,jk->ki", q, w, out_sharding=P("d"))
                return products, jq.dot_general(q, w, NUMBERS, out_sharding=P("d")), other

            products, product, other = all_of_them(q, w)
            for actual, out in zip(products, RESULTS, strict=True):
                check_equal(actual, expected)
                assert spec_of(actual) == (*out, *(None,) * (2 - len(out)))
            check_equal((product, other), (expected, expected.T))
            assert (spec_of(product), spec_of(other)) == (("d", None), ("d", None))


@pytest.mark.slow
def test_a_named_sharding_needs_no_mesh_around_it(rng: np.random.Generator) -> None:
    a, b = operands(rng, "per axis")
    out = NamedSharding(mesh_of(8), P(None, "d"))
    actual = jq.matmul(place(a, None, "d"), place(b, "d", None), out_sharding=out)
    check_equal(actual, jq.matmul(a, b))
    assert spec_of(actual) == (None, "d")
    x, y = rng.integers(-128, 128, (16, 24)).astype(np.int8), rng.integers(0, 256, (24, 32)).astype(np.uint8)
    points = {"lhs_zero_point": np.arange(16, dtype=np.int8)[:, None], "rhs_zero_point": 7}
    for left, right in OPEN:
        actual = jq.integer.dot_general(place(x, *left), place(y, *right), NUMBERS, **points, out_sharding=out)
        check_equal(actual, jq.integer.dot_general(x, y, NUMBERS, **points))
        assert spec_of(actual) == (None, "d")


@pytest.mark.slow
def test_two_mesh_axes(rng: np.random.Generator) -> None:
    """Rows on one and columns on the other need no out_sharding; then batches, vectors and contracted pairs."""
    mesh = mesh_of(4, 2)
    a, b = operands(rng, "per axis")
    x, w = rng.normal(size=(4, 8, 16)).astype(F32), rng.normal(size=(4, 16, 6)).astype(F32)
    left, right = jq.quantize(x, QuantSpec("uint8", PerAxis((0, 1)))), jq.quantize(w, QuantSpec("int8", PerAxis(2)))
    row, column = jq.quantize(x[0, 0], QuantSpec("int8")), jq.quantize(w[0, :, 0], QuantSpec("uint8"))
    with jax.set_mesh(mesh):
        actual = jax.jit(jq.matmul)(place(a, "d", None, mesh=mesh), place(b, None, "e", mesh=mesh))
        check_equal(actual, jq.matmul(a, b))
        assert spec_of(actual) == ("d", "e")

        @jax.jit
        def batches(left: Any, right: Any, row: Any, column: Any, single: Any) -> Any:
            return (
                jq.matmul(left, right, out_sharding=P("d", "e")),
                jq.matmul(left, column, out_sharding=P("d", "e")),
                jq.matmul(row, right, out_sharding=P("d", "e")),
                jq.matmul(row, column, out_sharding=P()),
                jq.matmul(left, single, out_sharding=P("d")),
                jq.einsum("bij,bjk->kb", left, right, out_sharding=P("e", "d")),  # i is summed alone
            )

        placed = place((left, right), "d", None, "e", mesh=mesh)
        placed = (placed[0], place(right, "d", "e", None, mesh=mesh), *place((row, column), "e", mesh=mesh))
        actual = batches(*placed, right[:1])
        expected = (
            jq.matmul(left, right), jq.matmul(left, column), jq.matmul(row, right), jq.matmul(row, column),
            jq.matmul(left, right[:1]),
        )  # fmt: skip
        check_equal(actual[:5], expected)
        np.testing.assert_allclose(actual[5], jq.einsum("bij,bjk->kb", left, right), rtol=1e-5)
        places = [("d", "e", None), ("d", "e"), ("d", "e"), (), ("d", None, None), ("e", "d")]
        assert [spec_of(y) for y in actual] == places


@pytest.mark.slow
def test_weight_only(rng: np.random.Generator) -> None:
    a, b = operands(rng, "per axis")
    x = a.dequantize()
    expected = np.asarray(x) @ np.asarray(b.dequantize())
    with jax.set_mesh(mesh_of(8)):
        for left, right in OPEN:
            actual = jax.jit(lambda x, b: jq.matmul(x, b, out_sharding=P("d")))(place(x, *left), place(b, *right))
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
            assert spec_of(actual) == ("d", None)
        three = jax.jit(lambda x, b: jq.einsum("ij,jk,kl->li", x, b, jnp.ones((24, 8)), out_sharding=P("d")))
        actual = three(place(x, "d", None), b)
        np.testing.assert_allclose(actual, (expected @ np.ones((24, 8))).T, rtol=1e-4, atol=1e-3)
        alone = jq.einsum("ij->j", place(b, "d", None), out_sharding=P("d"))
        np.testing.assert_allclose(alone, np.asarray(b.dequantize()).sum(0), rtol=1e-4, atol=1e-4)
        assert (spec_of(actual), spec_of(alone)) == (("d", None), ("d",))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [QuantSpec("int4", PerAxis(0)), QuantSpec("uint8", Blocked(1, 4)), QuantSpec("int8")])
def test_take_of_cut_tables_and_by_cut_indices(rng: np.random.Generator, spec: QuantSpec) -> None:
    table = jq.quantize(rng.normal(size=(64, 16)).astype(F32), spec)
    index = rng.integers(-64, 70, (8, 5)).astype(np.int32)
    rows, columns = jq.take(table, index), jq.take(table, index[:, 0] % 16, 1)
    with jax.set_mesh(mesh_of(8)):

        @jax.jit
        def all_of_them(table: Any, column_table: Any, index: Any, cut_index: Any) -> Any:
            return [
                jq.take(t, i, out_sharding=P("d")) for t in (table, column_table) for i in (index, cut_index)
            ], jq.take(column_table, index[:, 0] % 16, 1, out_sharding=P(None, "d"))

        actual, other = all_of_them(place(table, "d", None), place(table, None, "d"), index, place(index, "d", None))
        check_equal(actual, [rows] * 4)
        check_equal(other, columns)
        assert {spec_of(y) for y in actual} == {("d", None, None)}
        assert spec_of(other) == (None, "d")


LOSSES: dict[str, Callable[..., jax.Array]] = {
    "dot_general": lambda x, w, out, **k: jq.quantized_dot_general(
        x, w, NUMBERS, lhs_spec=k.pop("left"), rhs_spec=k.pop("right"), out_sharding=out, **k
    ),
    "einsum": lambda x, w, out, **k: jq.quantized_einsum(
        "ij,jk->ik", x, w, specs=(k.pop("left"), k.pop("right")), out_sharding=out, **k
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("backward", [jq.FloatBackward(), Int8Backward()], ids=["float", "int8"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_lie_where_the_operands_do(rng: np.random.Generator, name: str, backward: Any) -> None:
    x, w = rng.normal(size=(16, 32)).astype(F32), rng.normal(size=(32, 24)).astype(F32)
    g = rng.normal(size=(16, 24)).astype(F32)
    keywords = {"left": QuantSpec("uint8"), "right": QuantSpec("int8"), "backward": backward}

    def pull(x: Any, w: Any, g: Any, out: Any) -> Any:
        y, vjp = jax.vjp(lambda x, w: LOSSES[name](x, w, out, **keywords), x, w)
        return y, *vjp(g)

    expected = pull(x, w, g, None)
    for left, right in OPEN:
        with jax.set_mesh(mesh_of(8)):
            actual = jax.jit(pull, static_argnums=3)(
                place(x, *left), place(w, *right), place(g, "d", None), P("d", None)
            )
        check_equal(actual[0], expected[0])
        for cotangent, text, places in zip(actual[1:], expected[1:], (left, right), strict=True):
            np.testing.assert_allclose(cotangent, text, rtol=1e-4, atol=1e-4)
            assert spec_of(cotangent) == places


@pytest.mark.slow
def test_scales_learned_in_a_quantizer(rng: np.random.Generator) -> None:
    x, w = rng.normal(size=(16, 32)).astype(F32), rng.normal(size=(32, 24)).astype(F32)

    def loss(x: Any, w: Any, scale: Any, out: Any) -> Any:
        left = jq.Quantizer(QuantSpec("int8"), scale, gradient=jq.LSQ())
        return jq.quantized_dot_general(
            x, w, NUMBERS, lhs_spec=left, rhs_spec=QuantSpec("int8", PerAxis(1)), out_sharding=out
        ).sum()

    pull = jax.grad(loss, (0, 1, 2))
    expected = pull(x, w, F32(0.01), None)
    with jax.set_mesh(mesh_of(8)):
        actual = jax.jit(pull, static_argnums=3)(place(x, None, "d"), place(w, "d", None), F32(0.01), P("d"))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_ambiguous_shardings_are_refused(rng: np.random.Generator) -> None:
    """At trace time, with the shardings and what to say; nothing is compiled."""
    a, b = operands(rng, "per tensor")
    blocks = place(operands(rng, "blocks")[1], "d", None)
    x, y = np.ones((16, 24), np.int8), np.ones((24, 32), np.int8)
    codes, image = np.ones((8, 8, 3), np.int8), np.ones((8, 8, 3), F32)
    kernel = jq.quantize(image, QuantSpec("int8"))
    table, vector = place(b, "d", None), place(jq.quantize(np.ones(32, F32), QuantSpec("int8")), "d")
    contracted, outer = ((place(a, *left), place(b, *right)) for left, right in OPEN)
    open_ = r"2 dim.* not determined by lhs uint8\[16, 32\] sharded as P\w*\(None, 'd'\) and rhs .*, got None"
    cases: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: jq.matmul(*contracted), rf"jaxquant.matmul: out_sharding: expected a .*{open_}"),
        (lambda: jq.matmul(*outer), r"matmul: out_sharding: expected a NamedSharding or PartitionSpec"),
        (lambda: contracted[0] @ contracted[1], r"matmul: out_sharding"),
        (lambda: jq.dot_general(*contracted, NUMBERS), r"jaxquant.dot_general: out_sharding"),
        (lambda: jq.matmul(outer[0].dequantize(), outer[1]), r"matmul: out_sharding"),
        (lambda: jq.einsum("ij,jk->ik", *contracted), r"jaxquant.einsum: out_sharding"),
        (lambda: jq.matmul(a, blocks), r"matmul: out_sharding: .*blocks of 4 are cut from.*uint4\[32, 24\] sh"),
        (lambda: jq.integer.dot_general(place(x, "d", None), place(y, None, "d"), NUMBERS), r"integer.dot_general: out_sh"),
        (lambda: jq.matmul_integer(place(x, None, "d"), place(y, "d", None)), r"matmul_integer: a, b: .*dot_general"),
        (lambda: jq.take(table, np.array([1, 2])), r"jaxquant.take: out_sharding: .*indices int32\[2\] sh"),
        (lambda: jq.take(b, place(np.arange(8), "d")), r"take: out_sharding"),
        (lambda: jq.quantized_dot_general(
            place(np.ones((16, 32), F32), None, "d"), place(np.ones((32, 24), F32), "d", None), NUMBERS,
            lhs_spec=QuantSpec("int8"), rhs_spec=None,
        ), r"quantized_dot_general: out_sharding"),
        (lambda: jq.conv_general_dilated(image, place(kernel, "d", None, None), (1,), "SAME"), r"rhs: .*reshard.*int8\["),
        (lambda: jq.integer.conv_general_dilated(place(codes, None, "d", None), codes, (1,), "SAME"), r"lhs: expected ch"),
        (lambda: jq.conv_integer(codes, place(codes, None, "d", None)), r"conv_integer: w: expected channels and features"),
        (lambda: jq.matmul(a, b, out_sharding=P("d")), r"out_sharding: expected a NamedSharding, or .*jax.set_mesh"),
        (lambda: jq.take(b, np.array([1]), out_sharding=P()), r"take: out_sharding: .*jax.set_mesh"),
        (lambda: jq.einsum("ij,jk->ik", a, b, out_sharding=P("d")), r"einsum: out_sharding: .*jax.set_mesh"),
        (lambda: jq.matmul(a, b, out_sharding=NamedSharding(mesh_of(8), P(None, None, "d"))), r"at most 2 entries"),
        (lambda: jq.matmul(a, vector, out_sharding=NamedSharding(mesh_of(8), P("d", None))), r"at most 1 entries"),
    )  # fmt: skip
    for call, text in cases:
        with pytest.raises(ValueError, match=text):
            call()
    functions: tuple[Callable[..., Any], ...] = (
        lambda o: jq.matmul(a, b, out_sharding=o), lambda o: jq.dot_general(a, b, NUMBERS, out_sharding=o),
        lambda o: jq.einsum("ij,jk->ik", a, b, out_sharding=o), lambda o: jq.take(a, np.array([1]), out_sharding=o),
        lambda o: jq.integer.dot_general(x, y, NUMBERS, out_sharding=o),
        lambda o: jq.quantized_einsum("ij->j", np.ones((2, 2), F32), specs=(QuantSpec("int8"),), out_sharding=o),
    )  # fmt: skip
    for call in functions:
        with pytest.raises(
            TypeError, match=r"out_sharding: expected None, a jax.sharding.NamedSharding or a P.*, got 'd'"
        ):
            call("d")
