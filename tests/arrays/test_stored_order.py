"""Quantized arrays whose codes are stored with chosen axes last: every function returns what it returns without."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import Blocked, PerAxis, QuantizedArray, QuantSpec, checkpoint

from ..support.equality import same_bits
from ..support.hlo import Program
from ..support.matrix import mark_others_full
from ..support.quantized_arrays import dequantized, product

F32 = np.float32
SPECS = {
    "int8 per axis": QuantSpec("int8", PerAxis(-1)),
    "uint8 blocks, zero points": QuantSpec("uint8", Blocked(-2, 4)),
    "int4 boxes": QuantSpec("int4", Blocked((-1, -2), 3)),
    "int2": QuantSpec("int2", PerAxis(-2)),
    "nf4": QuantSpec(jq.nf4, Blocked(-1, 4)),
    "float8": QuantSpec("float8_e4m3fn", PerAxis(-1)),
    "bfloat16 scales": QuantSpec("int8", PerAxis(-1), scale_dtype=jnp.bfloat16),
}
FEW = ("uint8 blocks, zero points", "int4 boxes")


def make_pair(
    rng: np.random.Generator, spec: QuantSpec, shape: tuple[int, ...], *axes: int
) -> tuple[QuantizedArray, QuantizedArray]:
    """Return an array, and the same array with the given axes last."""
    q = jq.quantize(rng.normal(size=shape).astype(F32), spec)
    return q, q.store_last(*axes)


def assert_same(actual: Any, expected: Any) -> None:
    """Check that two results have the same bits; the codes of quantized arrays may be stored in another order."""
    if isinstance(expected, QuantizedArray):
        assert isinstance(actual, QuantizedArray)
        assert (actual.shape, actual.ndim, actual.size, actual.nbytes) == (
            expected.shape,
            expected.ndim,
            expected.size,
            expected.nbytes,
        )
        assert (actual.dtype, actual.block_size, actual.codebook) == (
            expected.dtype,
            expected.block_size,
            expected.codebook,
        )
        for name in ("codes", "scale", "zero_point"):
            assert_same(getattr(actual, name), getattr(expected, name))
        # The order is in its shortest form, and describes the stored codes.
        assert actual.stored_order != ()
        order = actual.stored_order or ()
        assert sorted(order) == list(range(-len(order), 0))
        assert not order or order[0] != -len(order)
        permutation = (*range(actual.ndim - len(order)), *(axis + actual.ndim for axis in order))
        assert actual.stored_codes.shape == tuple(actual.shape[axis] for axis in permutation)
        same_floats(actual.dequantize(), dequantized(expected))
        return
    if expected is None or isinstance(expected, int | np.dtype | type):
        assert actual == expected
    elif isinstance(expected, tuple | list):
        for g, w in zip(actual, expected, strict=True):
            assert_same(g, w)
    else:
        actual, expected = (np.asarray(v.astype(F32) if v.dtype.itemsize < 2 else v) for v in (actual, expected))
        same_bits(actual, expected)


def same_floats(actual: Any, expected: Any) -> None:
    same_bits(np.asarray(actual).astype(F32), np.asarray(expected).astype(F32))


METHODS: dict[str, Callable[[QuantizedArray], Any]] = {
    "codes": lambda q: (q.codes, q.values, q.scale, q.zero_point, q.shape, len(q)),
    "dequantize": lambda q: q.dequantize(),
    "astype": lambda q: q.astype(jnp.bfloat16),
    "replace codes": lambda q: q.replace(codes=q.codes[::-1], scale=q.scale + q.scale),
    "replace the order": lambda q: q.replace(stored_order=(-2, -1)),
    "transpose": lambda q: [q.transpose(order) for order in itertools.permutations(range(3))],
    "T, mT": lambda q: [q.T, q.mT, q.T.T, q.mT.mT],
    "reshape": lambda q: [q.reshape(shape) for shape in ((1, 3, 8, 6), (3, 8, 6), (3, 1, 8, 6), (3, 8, 6, 1))],
    "per_index": lambda q: [q.per_index(0), q.per_index(1), q.per_index(-1, 0)],
    "iterate": lambda q: list(q),
    "index the first": lambda q: [q[1], q[-1], q[1:], q[None, 1:], q[np.array([2, 0])], q[jnp.array([[1], [1]])]],
    "slice": lambda q: [q[:, 2:7], q[:, :, 1:5], q[..., ::2], q[:, 4:8, 3:6], q[1, 4:], q[np.array([2, 0]), :, 3:]],
    "index the others": lambda q: [q[:, 3], q[:, :, -1], q[0, 1, 2], q[:, np.array([7, 1])], q[:, None], q[..., None]],
    "a mask": lambda q: [q[np.array([True, False, True])], q[:, np.arange(8) % 3 == 0]],
    "concatenate": lambda q: [jq.concatenate([q, q], axis) for axis in range(3)],
    "concatenate with others": lambda q: [jq.concatenate([q, q.store_last()], axis) for axis in range(3)],
    "concatenate one": lambda q: jq.concatenate([q]),
    "take": lambda q: [jq.take(q, jnp.array([1, -1, 9, 0]), axis) for axis in range(3)],
    "take an int": lambda q: [jq.take(q, 1, axis, mode="wrap") for axis in range(3)],
    "error": lambda q: list(jq.quantization_error(jnp.ones(q.shape), q)),
    "copies": lambda q: [copy.copy(q), copy.deepcopy(q), pickle.loads(pickle.dumps(q)), q.store_last(0, 2)],
    "arrays": lambda q: checkpoint.from_arrays(checkpoint.to_arrays(q)),
}


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "axes",
    [
        pytest.param((1,), id="second"),
        pytest.param((0,), id="first", marks=pytest.mark.full),
        pytest.param((1, 0), id="both", marks=pytest.mark.full),
    ],
)
def test_methods(method: str, axes: tuple[int, ...], rng: np.random.Generator) -> None:
    names = SPECS if axes == (1,) and method in ("codes", "dequantize", "arrays", "concatenate") else FEW
    for name in names:
        q, stored = make_pair(rng, SPECS[name], (3, 8, 6), *axes)
        assert_same(METHODS[method](stored), METHODS[method](q))


@pytest.mark.slow
def test_under_jit(rng: np.random.Generator) -> None:
    q, stored = make_pair(rng, SPECS["uint8 blocks, zero points"], (3, 8, 6), 1)
    exceptions = {"a mask", "copies", "arrays", "iterate", "codes", "error"}
    run = jax.jit(lambda q: {method: METHODS[method](q) for method in METHODS.keys() - exceptions})
    actual, expected = run(stored), run(q)
    for method in expected:
        assert_same(actual[method], expected[method])


@pytest.mark.slow
def test_onnx_view(rng: np.random.Generator) -> None:
    for spec in (SPECS["int8 per axis"], SPECS["uint8 blocks, zero points"], SPECS["int4 boxes"]):
        q, stored = make_pair(rng, spec, (8, 6), 0)
        view = jq.onnx_view(stored)
        assert_same(list(view), list(jq.onnx_view(q)))
        same_floats(jq.dequantize_linear(**view._asdict()), q.dequantize())


@pytest.mark.sample(3)
@pytest.mark.parametrize("shape", [(), (4,), (0, 3), (3, 0), (1, 1), (2, 1, 3), (1, 5, 1, 2)], ids=str)
def test_small_shapes(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    for axes in itertools.permutations(range(len(shape)), min(2, len(shape))):
        q, stored = make_pair(rng, QuantSpec("uint8"), shape, *axes)
        assert_same(stored, q)
        assert_same(stored.T, q.T)
        assert_same(stored.reshape(-1 if q.size else shape), q.reshape(-1 if q.size else shape))
        assert_same(stored.store_last(), q)
        assert stored.store_last().stored_order is None


@pytest.mark.slow
def test_quantize_stores_last(rng: np.random.Generator) -> None:
    x = rng.normal(size=(2, 5, 7)).astype(F32)
    for name, spec in SPECS.items():
        for axes in (1, -2, (1,), (0, 1), [2, 0]):
            q = jq.quantize(x, spec, stored_last=axes)
            assert_same(q, jq.quantize(x, spec))
            assert q.stored_order == jq.quantize(x, spec).store_last(*np.atleast_1d(axes)).stored_order, name
    assert jq.quantize(x, spec, stored_last=2).stored_order is None, "it is last already"
    mapped = jax.vmap(lambda x: jq.quantize(x, SPECS["int8 per axis"], stored_last=0))(x)
    assert (mapped.shape, mapped.stored_codes.shape, mapped.stored_order) == ((2, 5, 7), (2, 7, 5), (-1, -2))
    assert_same(mapped[1], jq.quantize(x[1], SPECS["int8 per axis"]))


@pytest.mark.slow
def test_the_order_is_in_its_shortest_form(rng: np.random.Generator) -> None:
    q = jq.quantize(rng.normal(size=(2, 3, 4, 5)).astype(F32), QuantSpec("int8"))
    for axes, order in (
        ((2,), (-1, -2)), ((1,), (-2, -1, -3)), ((1, 2), (-1, -3, -2)), ((2, 1), (-1, -2, -3)), ((3,), None),
        ((2, 3), None), ((0, 1, 2, 3), None), ((), None), ((0,), (-3, -2, -1, -4)), ((-3, -1), (-2, -3, -1)),
    ):  # fmt: skip
        stored = q.store_last(*axes)
        assert stored.stored_order == order
        assert_same(stored, q)
        replaced = q.replace(stored_order=(-4, *order) if order is not None and len(order) == 3 else order)
        assert jax.tree.structure(replaced) == jax.tree.structure(stored)
    array = QuantizedArray(q.codes, q.scale, stored_order=[-1, -2])
    assert_same(array, q)
    assert array.stored_codes.shape == (2, 3, 5, 4)


def test_repr_names_the_order() -> None:
    q = jq.quantize(jnp.ones((6, 5)), QuantSpec("int8"), stored_last=0)
    text = "QuantizedArray(int8[6,5], scale=float32[1,1], zero_point=None, stored_order=(-1, -2), dtype=float32, "
    assert repr(q) == f"{text}nbytes=34)"
    assert repr(q.store_last()) == text.replace("stored_order=(-1, -2), ", "") + "nbytes=34)"
    shapes = "QuantizedArray(stored_codes=(5, 6), scale=(1, 1), zero_point=None, stored_order=(-1, -2))"
    assert repr(jax.tree.map(jnp.shape, q)) == shapes


def test_trees_of_other_objects() -> None:
    """JAX puts objects of its own into pytrees: shapes, None, strings and shardings."""
    q = jq.quantize(jnp.ones((6, 5)), QuantSpec("int8"), stored_last=0)
    for value in (None, "codes", object(), PartitionSpec("x"), 3):
        tree = jax.tree.map(lambda _, value=value: value, q)
        assert tree.codes is tree.stored_codes is tree.values is value
        assert "stored_order=(-1, -2)" in repr(tree)
    shapes = jax.eval_shape(lambda: q)
    assert (shapes.codes.shape, shapes.stored_codes.shape, shapes.shape) == ((6, 5), (5, 6), (6, 5))
    assert shapes.codes.dtype == jnp.int8
    assert repr(shapes) == repr(q)
    on_host = jax.tree.map(np.asarray, q)
    assert isinstance(on_host.codes, np.ndarray)
    assert_same(on_host, q.store_last())


def test_leaves_are_what_is_in_memory(rng: np.random.Generator) -> None:
    q, stored = make_pair(rng, SPECS["int8 per axis"], (6, 5), 0)
    leaves, structure = jax.tree.flatten(stored)
    assert leaves[0] is stored.stored_codes
    assert leaves[0].shape == (5, 6)
    assert structure != jax.tree.structure(q)
    assert_same(jax.tree.unflatten(structure, leaves), q)
    assert [str(path[0]) for path, _ in jax.tree_util.tree_leaves_with_path(stored)] == [".codes", ".scale"]
    assert q.codes is q.stored_codes
    # What was pickled before there were stored orders has three static attributes.
    assert_same(QuantizedArray.tree_unflatten(jax.tree.structure(q).node_data()[1][:3], (*jax.tree.leaves(q), None)), q)


def test_errors() -> None:
    q: Any = jq.quantize(jnp.ones((6, 5)), QuantSpec("int8"))
    for call, kind, text in (
        (lambda: q.store_last(2), ValueError, r"QuantizedArray.store_last: axes: .*got 2"),
        (lambda: q.store_last(0, -2), ValueError, r"store_last: axes: expected distinct axes, got \(0, -2\)"),
        (lambda: q.store_last(0.0), TypeError, r"store_last: axes: expected an int, got 0.0"),
        (lambda: q.replace(stored_order=(-1, -3)), ValueError, r"stored_order: expected None, or the axes -1 to -n"),
        (lambda: q.replace(stored_order=-1), TypeError, r"stored_order: expected None, or the axes -1 to -n"),
        (lambda: q.replace(stored_order=(-2, -3, -1)), ValueError, r"expected rank 3 or more .*got shape \(6, 5\)"),
        (lambda: q.replace(order=(-1, -2)), ValueError, r"replace: order: expected one of codes, .*stored_order"),
        (lambda: jq.quantize(jnp.ones(3), QuantSpec("int8"), stored_last=1), ValueError, "quantize: stored_last: "),
        (lambda: jq.quantize(jnp.ones(3), QuantSpec("int8"), stored_last=True), TypeError, "quantize: stored_last: "),
    ):  # fmt: skip
        with pytest.raises(kind, match=text):
            call()


@pytest.mark.slow
def test_vmap_and_scan(rng: np.random.Generator) -> None:
    """The axes in front can be mapped; an axis that the order moves must be brought into its place first."""
    spec = QuantSpec("int8", PerAxis((0, 2)))
    q, stored = make_pair(rng, spec, (3, 8, 6), 1)
    x = jq.quantize(rng.normal(size=(3, 4, 8)).astype(F32), QuantSpec("uint8", PerAxis(0)))
    assert_same(jax.vmap(jq.matmul)(x, stored), jax.vmap(jq.matmul)(x, q))
    assert_same(jax.vmap(jq.matmul, (None, 0))(x[0], stored), jax.vmap(jq.matmul, (None, 0))(x[0], q))
    step = lambda carry, layer: (carry, (jq.matmul(*layer), layer[1].shape))  # noqa: E731
    for first, second in zip(lax.scan(step, 0, (x, stored)), lax.scan(step, 0, (x, q)), strict=True):
        jax.tree.map(np.testing.assert_array_equal, first, second)
    assert_same(jax.vmap(jq.matmul, (0, None))(x, stored[0]), jax.vmap(jq.matmul, (0, None))(x, q[0]))

    matrix = jq.quantize(rng.normal(size=(6, 6)).astype(F32), QuantSpec("int8", PerAxis((0, 1))), stored_last=0)
    text = (
        r"stored_codes: expected rank 2 or more for stored_order=\(-1, -2\) .*call q.store_last\(\).*got shape \(6,\)"
    )
    for use in (lambda q: q.dequantize(), lambda q: q.shape, lambda q: q.codes, lambda q: jq.matmul(jnp.ones(6), q)):
        with pytest.raises(ValueError, match=text):
            jax.vmap(use)(matrix)
        with pytest.raises(ValueError, match=text):
            lax.scan(lambda c, q, use=use: (c, use(q)), 0, matrix)
    rows = jax.vmap(lambda q: q.dequantize())
    same_floats(rows(matrix.store_last()), matrix.dequantize())
    # `per_index` prepares an axis for being mapped, so it also brings it into its place.
    per_row = jq.quantize(rng.normal(size=(4, 5, 5)).astype(F32), QuantSpec("int8", PerAxis(2)), stored_last=1)
    mapped = jax.vmap(lambda q: q.dequantize(), 1, 1)(per_row.per_index(1))
    same_floats(mapped, per_row.dequantize())


@pytest.mark.slow
def test_gradients(rng: np.random.Generator) -> None:
    """The gradients of scales and of float operands; the sums of float products may round differently."""
    q, stored = make_pair(rng, QuantSpec("int8", PerAxis(1)), (16, 5), 0)
    x = jq.quantize(rng.normal(size=(3, 16)).astype(F32), QuantSpec("uint8"))

    def integers(scale: Any, x_scale: Any, q: QuantizedArray) -> Any:
        return jnp.sum(jnp.sin(jq.matmul(x.replace(scale=x_scale), q.replace(scale=scale))))

    grad = jax.jit(jax.grad(integers, (0, 1)))
    for actual, expected in zip(grad(q.scale, x.scale, stored), grad(q.scale, x.scale, q), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)

    def floats(scale: Any, x: Any, q: QuantizedArray) -> Any:
        return jnp.sum(jnp.sin(jq.matmul(x, q.replace(scale=scale))))

    grad, x_float = jax.jit(jax.grad(floats, (0, 1))), x.dequantize()
    for actual, expected in zip(grad(q.scale, x_float, stored), grad(q.scale, x_float, q), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    by_codes = jax.grad(lambda s, q: jnp.sum(q.replace(scale=s).dequantize()), allow_int=True)
    np.testing.assert_allclose(by_codes(q.scale, stored), by_codes(q.scale, q), rtol=1e-6)


NUMBERS = {
    "dense": ((4, 12), (12, 7), (((1,), (0,)), ((), ()))),
    "one row": ((1, 12), (12, 7), (((1,), (0,)), ((), ()))),
    "one column": ((4, 12), (12, 1), (((1,), (0,)), ((), ()))),
    "heads out": ((2, 3, 12), (12, 4, 5), (((2,), (0,)), ((), ()))),
    "heads in": ((2, 3, 4, 5), (4, 5, 7), (((2, 3), (0, 1)), ((), ()))),
    "crossed": ((2, 5, 3, 4), (4, 5, 7), (((3, 1), (0, 1)), ((), ()))),
    "batch": ((3, 2, 8), (3, 8, 7), (((2,), (1,)), ((0,), (0,)))),
    "inner batch": ((2, 3, 8), (5, 8, 3), (((2,), (1,)), ((1,), (2,)))),
    "all": ((4, 5), (5, 4), (((0, 1), (1, 0)), ((), ()))),
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", mark_others_full(NUMBERS, ["dense", "one row", "heads in", "batch"]))
def test_contractions(name: str, rng: np.random.Generator) -> None:
    """Every order of both operands, against the logical order and numpy."""
    left, right, numbers = NUMBERS[name]
    for kinds in (("uint8", "int8"), ("int4", "uint4")):
        x = jq.quantize(rng.normal(size=left).astype(F32), QuantSpec(kinds[0]))
        axes = tuple(a for a in range(len(right)) if a not in numbers[0][1]) or 0
        w = jq.quantize(rng.normal(size=right).astype(F32), QuantSpec(kinds[1], PerAxis(axes)))
        if not isinstance(axes, tuple):
            w = jq.quantize(rng.normal(size=right).astype(F32), QuantSpec(kinds[1]))
        expected = product(x, w, numbers)
        run = jax.jit(lambda x, w: jq.dot_general(x, w, numbers))
        orders = list(itertools.permutations(range(len(right))))
        for order in orders[1:] if kinds[0] == "uint8" else orders[-1:]:
            same_bits(run(x, w.store_last(*order)), expected)
        for order in list(itertools.permutations(range(len(left))))[-2:]:
            same_bits(run(x.store_last(*order), w.store_last(*orders[-1])), expected)
        floats = jq.dot_general(x.dequantize(), w, numbers)
        for order in orders[1:2]:
            actual = jq.dot_general(x.dequantize(), w.store_last(*order), numbers)
            np.testing.assert_allclose(actual, floats, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_blocks_are_contracted_in_order(rng: np.random.Generator) -> None:
    x = jq.quantize(rng.normal(size=(5, 100)).astype(F32), QuantSpec("uint8", Blocked(1, 32)))
    w, stored = make_pair(rng, QuantSpec("uint4", Blocked(0, 32)), (100, 7), 0)
    assert_same(jq.matmul(x, stored), jq.matmul(x, w))
    assert_same(x @ stored, x @ w)
    assert_same(stored.T @ x.T, w.T @ x.T)
    long, stored = make_pair(rng, QuantSpec("int8"), (140000, 3), 0)  # more terms than int32 holds
    row = jq.quantize(rng.normal(size=(2, 140000)).astype(F32), QuantSpec("int8"))
    assert_same(row @ stored, row @ long)


@pytest.mark.slow
def test_matmul_and_einsum(rng: np.random.Generator) -> None:
    spec = QuantSpec("int8", PerAxis(-1))
    for left, right in (((4, 6), (6, 5)), ((6,), (6, 5)), ((3, 4, 6), (6, 5)), ((3, 4, 6), (1, 6, 5)),
                        ((2, 1, 4, 6), (3, 6, 5)), ((4, 6), (6,)), ((3, 4, 6), (3, 6, 5))):  # fmt: skip
        x = jq.quantize(rng.normal(size=left).astype(F32), QuantSpec("uint8"))
        w, stored = make_pair(rng, QuantSpec("int8") if len(right) == 1 else spec, right, max(len(right) - 2, 0))
        assert_same(jq.matmul(x, stored), jq.matmul(x, w))
        assert_same(x @ stored, x @ w)
    x = jq.quantize(rng.normal(size=(2, 3, 4, 6)).astype(F32), QuantSpec("uint8"))
    w = jq.quantize(rng.normal(size=(4, 6, 5)).astype(F32), QuantSpec("int8", PerAxis(2)))
    ones = jq.quantize(rng.normal(size=(1, 6, 5)).astype(F32), QuantSpec("int8", PerAxis(2)))
    for order in itertools.permutations(range(3)):
        for subscripts in ("abhd,hdf->abf", "abhd,hdf->fba", "abhd,hdf->habf"):
            operand = w
            if subscripts.endswith("habf"):
                operand = jq.quantize(rng.normal(size=(4, 6, 5)).astype(F32), QuantSpec("int8", PerAxis((0, 2))))
            actual = jq.einsum(subscripts, x, operand.store_last(*order))
            assert_same(actual, jq.einsum(subscripts, x, operand))
        assert_same(jq.einsum("ab...d,...df->ab...f", x, ones.store_last(*order)),
                    jq.einsum("ab...d,...df->ab...f", x, ones))  # fmt: skip
    assert_same(jq.einsum("hdf->fd", w.store_last(0, 1)), jq.einsum("hdf->fd", w))


@pytest.mark.slow
def test_convolutions(rng: np.random.Generator) -> None:
    x = jq.quantize(rng.normal(size=(2, 9, 7, 4)).astype(F32), QuantSpec("uint8"))
    w = jq.quantize(rng.normal(size=(3, 3, 4, 5)).astype(F32), QuantSpec("int8", PerAxis(3)))
    numbers: Any = ("NHWC", "HWIO", "NHWC")
    expected = jq.conv_general_dilated(x, w, (1, 2), "SAME", dimension_numbers=numbers)
    for axes in ((0,), (2,), (0, 1, 2)):
        actual = jq.conv_general_dilated(x, w.store_last(*axes), (1, 2), "SAME", dimension_numbers=numbers)
        assert_same(actual, expected)


def test_errors_name_the_logical_axes(rng: np.random.Generator) -> None:
    x = jq.quantize(rng.normal(size=(4, 6)).astype(F32), QuantSpec("uint8"))
    w = jq.quantize(rng.normal(size=(6, 5)).astype(F32), QuantSpec("int8", PerAxis(0)))
    wide = jq.quantize(rng.normal(size=(7, 5)).astype(F32), QuantSpec("int8"))
    for bad in (w, wide):
        texts = []
        for operand in (bad, bad.store_last(0)):
            with pytest.raises(ValueError, match=r"jaxquant.matmul: ") as error:
                jq.matmul(x, operand)
            texts.append(str(error.value).replace("stored_order=(-1, -2), ", ""))
        assert texts[0] == texts[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_the_kernel_reads_the_stored_codes(rows: int, dtype: str, rng: np.random.Generator) -> None:
    """Each contraction of int8 reduces the last dimension of the codes as they are: none is moved in memory."""
    cases: list[tuple[tuple[int, ...], tuple[int, ...], Any]] = [
        ((rows, 24), (24, 40), (((1,), (0,)), ((), ()))),
        ((rows, 24), (24, 5, 8), (((1,), (0,)), ((), ()))),
        ((rows, 4, 6), (4, 6, 40), (((1, 2), (0, 1)), ((), ()))),
    ]
    for left, right, numbers in cases:
        x = jq.quantize(rng.normal(size=left).astype(F32), QuantSpec("uint8"))
        free_axes = tuple(a for a in range(len(right)) if a not in numbers[0][1])
        w = jq.quantize(
            rng.normal(size=right).astype(F32), QuantSpec(dtype, PerAxis(free_axes)), stored_last=numbers[0][1]
        )
        program = Program(lambda x, w, numbers=numbers: jq.dot_general(x, w, numbers), x, w)
        dots = program.contractions()
        # Codes of 4 bits are contracted as two planes, the even and the odd ones of the contracted dimension.
        planes = 2 if dtype == "int4" else 1
        assert len(dots) == planes
        assert all(("s8", (40, 24 // planes)) in dot.operands for dot in dots)
        for body in program.computations.values():
            for step in body:
                is_large = any(math.prod(shape) == w.size for _, shape in step.results)
                assert not (is_large and step.opcode in ("transpose", "copy")), step


@pytest.mark.slow
def test_saved_programs(rng: np.random.Generator) -> None:
    q, stored = make_pair(rng, QuantSpec(jq.nf4, Blocked(1, 4)), (6, 8), 0)
    program = export.export(jax.jit(lambda q: (q.astype(jnp.bfloat16), q.dequantize(), q.T)))(stored)
    results: Any = export.deserialize(program.serialize()).call(stored)
    restored, floats, turned = results
    assert restored.stored_order == stored.stored_order
    assert turned.stored_order is None
    assert_same(restored, q.astype(jnp.bfloat16))
    same_floats(floats, q.dequantize())
    x = jq.quantize(rng.normal(size=(3, 6)).astype(F32), QuantSpec("uint8"))
    w, stored = make_pair(rng, QuantSpec("int8", PerAxis(1)), (6, 8), 0)
    program = export.export(jax.jit(jq.matmul))(x, stored)
    assert_same(export.deserialize(program.serialize()).call(x, stored), jq.matmul(x, w))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_shardings(kind: AxisType, rng: np.random.Generator) -> None:
    """The codes are placed as they are stored; results and their shardings are those of the logical order."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
    q, stored = make_pair(rng, QuantSpec("int8", PerAxis(1)), (8, 16), 0)
    x = jq.quantize(rng.normal(size=(4, 8)).astype(F32), QuantSpec("uint8"))

    def place(q: QuantizedArray, *names: Any) -> QuantizedArray:
        parts = [jax.device_put(p, NamedSharding(mesh, PartitionSpec(*n))) for p, n in zip(jax.tree.leaves(q), names,
                                                                                       strict=True)]  # fmt: skip
        return jax.tree.unflatten(jax.tree.structure(q), parts)

    everywhere = place(x, (None, None), (None, None), (None, None))
    for rows, columns in ((None, "b"), ("a", "b"), ("b", None)):
        logical = place(q, (rows, columns), (None, columns))
        moved = place(stored, (columns, rows), (None, columns))
        assert moved.codes.sharding.is_equivalent_to(logical.codes.sharding, 2)
        for call in (lambda q: q.dequantize(), lambda q: q.T.dequantize(), lambda q: q[2:6].dequantize(),
                     lambda q: jq.matmul(everywhere, q), lambda q: q.store_last(1)):  # fmt: skip
            if kind is AxisType.Explicit and call(q).shape == (4, 16):
                continue  # jax refuses a slice that does not divide evenly
            actual, expected = jax.jit(call)(moved), jax.jit(call)(logical)
            assert_same(actual, expected)
            if kind is AxisType.Explicit and isinstance(expected, jax.Array):
                assert jax.typeof(actual).sharding.spec == jax.typeof(expected).sharding.spec


@pytest.mark.slow
def test_donation(rng: np.random.Generator) -> None:
    """A program that returns the array that it gets needs no second copy of its codes."""
    q = jq.quantize(rng.normal(size=(64, 128)).astype(F32), QuantSpec("int8"), stored_last=0)
    compiled = jax.jit(lambda q: q.replace(scale=2 * q.scale), donate_argnums=0).lower(q).compile()
    memory = compiled.memory_analysis()
    assert memory is None or memory.alias_size_in_bytes >= 64 * 128
