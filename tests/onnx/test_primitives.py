"""JAX's primitives in ONNX Runtime, many in one model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from jax import lax

from jaxquant import onnx as jqonnx

from ..cases.onnx_models import run_runtime


def check(function, *arguments, opset: int = 21, tolerance: float = 2e-6) -> None:
    model = jqonnx.export(function, arguments, opset=opset)
    for level in ("disabled", "all"):
        report = jqonnx.verify(model, function, [arguments], level=level, tolerance=tolerance)
        assert report.is_exact, str(report)


def apply_elementwise(x: jax.Array, y: jax.Array, i: jax.Array) -> list[jax.Array]:
    unit = jnp.clip(x / 4, -0.9, 0.9)
    return [
        *(f(x) for f in (jnp.exp, jnp.exp2, jnp.expm1, jnp.tanh, jnp.sin, jnp.cos, jnp.sinh, jnp.cosh, jnp.cbrt)),
        *(f(x) for f in (jnp.floor, jnp.ceil, jnp.round, jnp.sign, jnp.abs, jnp.square, jnp.negative, jax.nn.sigmoid)),
        *(f(jnp.abs(x) + 1) for f in (jnp.log, jnp.log1p, jnp.log2, jnp.sqrt, lax.rsqrt, jnp.arccosh)),
        *(f(unit) for f in (jnp.arcsin, jnp.arccos, jnp.arctan, jnp.arctanh, jnp.arcsinh, jnp.tan, lax.erf, lax.erfc)),
        *(f(x, y) for f in (jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum, jnp.arctan2, lax.rem)),
        *(f(x, y) for f in (jnp.less, jnp.less_equal, jnp.greater, jnp.greater_equal, jnp.equal, jnp.not_equal)),
        *(f(x > 0, y > 0) for f in (jnp.logical_and, jnp.logical_or, jnp.logical_xor)),
        *(f(i, i + 3) for f in (jnp.add, jnp.multiply, lax.rem, jnp.maximum, jnp.bitwise_and, jnp.bitwise_or)),
        *(i << 2, i >> 1, ~i, jnp.where(x > 0, x, y), lax.round(x), x**3, x**-2, jnp.abs(x) ** jnp.abs(y)),
        *(jax.nn.relu6(x), jax.nn.gelu(x), jax.nn.gelu(x, approximate=False), jax.nn.silu(x), jax.nn.softplus(x)),
        *(jax.nn.softmax(x), jax.nn.log_softmax(x), jax.nn.hard_swish(x), jax.nn.elu(x), jnp.isfinite(x)),
        *(lax.reduce_precision(x, 8, 7), jax.grad(lambda x: jnp.tanh(x).sum())(x)),
    ]


def apply_arrangements(x: jax.Array, i: jax.Array) -> list[jax.Array]:
    places = jnp.array([[2, 0, 1, 1, 0, 3], [1, 1, 2, 0, 3, 2]])
    return [
        *(f(x, axis=1) for f in (jnp.sum, jnp.max, jnp.min, jnp.prod, jnp.mean, jnp.argmax, jnp.argmin, jnp.cumsum)),
        *(f(v, 1, reverse) for f in (lax.cummax, lax.cummin) for v in (x, x * np.nan) for reverse in (False, True)),
        *(jnp.any(x > 1, axis=0), jnp.all(x > -1), jnp.sum(x > 0), jnp.sort(x, axis=1), lax.top_k(x, 3)[0]),
        *jax.device_put((x, i), jax.devices()[0]),
        *(x[::-1], x[:, 1:5:2], x[1], x.T, x.reshape(2, -1), jnp.flip(x, 1), jnp.roll(x, 2, 1), jnp.tile(x, (2, 1))),
        *(jnp.pad(x, ((1, 2), (0, 3)), constant_values=7.0), jnp.stack([x, x], 1), jnp.concatenate([x, x], 1)),
        lax.pad(x, np.float32(0), ((1, 0, 1), (-1, 2, 0))),
        *jnp.split(x, 2, axis=1),
        *(x[i], x[:, i], jnp.take(x, i + 1, axis=0), jnp.take_along_axis(x, places, axis=0)),
        *(x[places, places], x.at[i].set(0.0, mode="clip"), lax.dynamic_slice(x, (i[0], 1), (2, 3))),
        lax.dynamic_update_slice(x, jnp.ones((1, 6)), (i[1], 0)),
        jnp.where(jnp.arange(6)[None] < 3, x, 0.0),
        lax.cond(x[0, 0] > 0, lambda x: x + 1, lambda x: x * 2, x),
        lax.fori_loop(0, 3, lambda k, y: y * 2 + k.astype(jnp.float32), x),
    ]


def apply_sorts(x: jax.Array, i: jax.Array) -> list[jax.Array]:
    ties, n = jnp.round(x), jnp.round(10 * x).astype(jnp.int32)
    return [
        *(jnp.argsort(ties, axis=0), jnp.argsort(ties, axis=1, descending=True), jnp.median(x, axis=1)),
        *lax.sort((ties, x, n), dimension=1, num_keys=1),
        *lax.sort((ties, n, x), dimension=1, num_keys=2),
        *(jnp.sort(n.astype(jnp.int8)), jnp.lexsort((x[0], ties[0]))),
    ]


def apply_scatters(x: jax.Array, i: jax.Array) -> list[jax.Array]:
    far, near = jnp.abs(jnp.round(9 * x)).astype(jnp.int32), jnp.abs(jnp.round(9 * x)).astype(jnp.int32) % 4
    return [
        *(x.at[i].set(7.0), x.at[i].add(1.0), x.at[i].subtract(2.0), x.at[i].multiply(2.0), x.at[i, 2].max(0.5)),
        *(x.at[1:3].set(0.0), x.at[:, 2].set(1.0), x.at[1:3, 2:4].add(3.0), x.at[::2, 1].min(0.1)),
        *(x.at[far[0]].set(1.0), x.at[far[0], far[1]].add(1.0), jnp.zeros(9).at[far.reshape(-1)].add(1.0)),
        *(x.at[()].add(2.0), x.at[()].set(x[::-1]), x.at[...].max(0.5), i.at[()].subtract(3)),
        x[0].at[()].multiply(x[1]),
        x.at[far[0]].get(mode="fill", fill_value=3.0),
        jax.vmap(lambda row, place: row.at[place].set(5.0))(x, far),
        jax.vmap(lambda row, place: row[place])(x, near),
        jax.vmap(lambda row, place: lax.dynamic_slice(row, (place,), (3,)))(x, far[:, 0]),
        jax.vmap(lambda row, place: lax.dynamic_update_slice(row, jnp.ones(2), (place,)))(x, far[:, 0]),
        jax.vmap(lambda place: lax.dynamic_slice(x, (place[0], place[1]), (2, 3)))(far),
        *(lax.dynamic_update_slice(x, jnp.ones((2, 3)), (far[0, 0], far[0, 1])), x[i, 1:4]),
    ]


def apply_contractions(x: jax.Array, image: jax.Array) -> list[jax.Array]:
    kernel = jnp.linspace(-1, 1, 3 * 3 * 2 * 4).reshape(3, 3, 2, 4)
    numbers = ("NHWC", "HWIO", "NHWC")
    return [
        x @ x.T,
        jnp.einsum("ij,kj->ik", x, x),
        jnp.einsum("ij,ij->i", x, x),
        jnp.einsum("ij,kl->ijkl", x, x[:2, :2]),
        lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers),
        lax.conv_general_dilated(image, kernel, (2, 1), "VALID", rhs_dilation=(1, 2), dimension_numbers=numbers),
        lax.conv_general_dilated(image, kernel, (1, 1), [(1, 1)] * 2, (2, 2), dimension_numbers=numbers),
        lax.reduce_window(image, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        lax.reduce_window(image, np.float32(0), lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
    ]


@pytest.mark.parametrize("opset", [pytest.param(18, marks=pytest.mark.full), 21])
def test_elementwise(rng: np.random.Generator, opset: int) -> None:
    x, y = (jnp.asarray(rng.normal(0, 1.5, (4, 6)), jnp.float32) for _ in range(2))
    i = jnp.asarray(rng.integers(-9, 9, (4, 6)), jnp.int32)
    check(apply_elementwise, x, y, jnp.where(i == -3, 1, i), opset=opset)


@pytest.mark.parametrize("opset", [pytest.param(13, marks=pytest.mark.full), 21])
def test_arrangements(rng: np.random.Generator, opset: int) -> None:
    x = jnp.asarray(rng.normal(0, 1, (4, 6)), jnp.float32)
    check(apply_arrangements, x, jnp.asarray([3, 0, 2], jnp.int32), opset=opset)


@pytest.mark.slow
@pytest.mark.parametrize("function", [apply_sorts, apply_scatters])
def test_sorts_and_scatters_also_of_a_loaded_model(rng: np.random.Generator, function) -> None:
    x, i = jnp.asarray(rng.normal(0, 1, (4, 6)), jnp.float32), jnp.asarray([3, 0, 2, 0], jnp.int32)
    check(function, x, i)
    loaded, params = jqonnx.load(jqonnx.export(function, [x, i]))
    for actual, expected in zip(jax.jit(loaded)(params, x, i), jax.jit(function)(x, i), strict=True):
        np.testing.assert_array_equal(actual, expected)
    again = jqonnx.export(loaded, params, [x, i])
    report = jqonnx.verify(again, lambda *inputs: loaded(params, *inputs), [(x, i)])
    assert report.is_exact, str(report)
    # One load may write an operator differently; later loads add no nodes.
    loaded, params = jqonnx.load(again)
    assert len(jqonnx.export(loaded, params, [x, i]).graph.node) <= len(again.graph.node)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "bool"]
)
def test_updates_in_each_dtype(rng: np.random.Generator, dtype: str) -> None:
    """Also those that ONNX Runtime has no kernels of."""
    x, y = (jnp.asarray(rng.integers(0, 4, (3, 4)), jnp.int32) for _ in range(2))
    wide = jnp.float32 if "float" in dtype else jnp.int32

    def function(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        x, y = x.astype(dtype), y.astype(dtype)
        results = []
        for index, update in (((), y), (1, y[0]), (jnp.array([2, 0]), y[:2])):
            place = x.at[index]
            updates = [place.set, place.min, place.max]
            # JAX itself scatters no sums of bools.
            updates += [] if dtype == "bool" else [place.add, place.multiply, place.subtract]
            results += [run(update).astype(wide) for run in updates]
        return results

    check(function, x, y)


def test_whole_updates_need_no_new_opset() -> None:
    check(lambda x, y: x.at[()].add(y), jnp.ones((2, 3)), jnp.ones((2, 3)), opset=13)


@pytest.mark.parametrize("index", [(), 1, slice(None)], ids=repr)
def test_a_function_that_is_applied_to_entries_is_refused(index) -> None:
    """The scatter of `apply` has no updates: without its function it would write zeros."""
    with pytest.raises(ValueError, match=r"a scatter that applies a function to the entries, as x.at\[index\].apply"):
        jqonnx.export(lambda x: x.at[index].apply(jnp.sin), (jnp.ones(3),))


@pytest.mark.slow
def test_repeated_bfloat16() -> None:
    """ONNX Runtime has kernels of neither Expand nor Tile for it."""
    x = np.arange(3, dtype=np.float32)[None]

    def function(x: jax.Array) -> list[jax.Array]:
        narrow = x.astype(jnp.bfloat16)
        return [jnp.concatenate([jnp.broadcast_to(narrow, (4, 3)), narrow]), jnp.tile(narrow, (4, 1))]

    assert jqonnx.verify(jqonnx.export(function, [x]), function, [x]).is_exact


def test_slices_of_a_symbolic_length() -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    for function in (lambda x: x[1:], lambda x: x[:2]):
        model = jqonnx.export(function, [x], batch="N")
        report = jqonnx.verify(model, function, [x, x[:3]])
        assert report.is_exact, str(report)


def test_sorts_and_scatters_of_a_symbolic_batch(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(0, 1, (4, 6)), jnp.float32)

    def function(x: jax.Array) -> list[jax.Array]:
        places = jnp.argmax(x, axis=1)
        return [
            *(jnp.argsort(x, axis=0), x.at[:, 2].set(1.0), x.at[0].set(1.0), x.at[:, 1:3].add(1.0)),
            *(x.at[jnp.array([0, 2])].add(1.0), jax.vmap(lambda row, i: row.at[i].set(0.0))(x, places)),
            jax.vmap(lambda row, i: lax.dynamic_slice(row, (i,), (2,)))(x, places),
        ]

    model = jqonnx.export(function, [x], batch="N")
    report = jqonnx.verify(model, function, [x, x[:3], jnp.concatenate([x, x])])
    assert report.is_exact, str(report)


def test_zeros_of_both_signs_are_ties_in_a_loaded_top_k() -> None:
    node = onnx.helper.make_node("TopK", ["x", "k"], ["values", "places"])
    x, values = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [5]) for n in ("x", "values"))
    places = onnx.helper.make_tensor_value_info("places", onnx.TensorProto.INT64, [5])
    k = onnx.numpy_helper.from_array(np.array([5]), "k")
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [values, places], [k]), ir_version=10)
    fn, params = jqonnx.load(model)
    numbers = np.array([-0.0, 0.0, -1.0, -0.0, 0.0], np.float32)
    want = run_runtime(model, {"x": numbers})[1]
    np.testing.assert_array_equal(want, [0, 1, 3, 4, 2])
    np.testing.assert_array_equal(fn(params, numbers)[1], want)


def test_contractions(rng: np.random.Generator) -> None:
    x, image = (jnp.asarray(rng.normal(0, 1, shape), jnp.float32) for shape in ((4, 6), (2, 6, 6, 2)))
    check(apply_contractions, x, image)


def apply_to_integers(i: jax.Array, codes: jax.Array) -> list[jax.Array]:
    def reduce(x: jax.Array, combine, padding: str) -> jax.Array:
        bounds = np.iinfo(x.dtype)
        initial = np.asarray(bounds.min if combine is lax.max else bounds.max, x.dtype)
        return lax.reduce_window(x, initial, combine, (2,), (1,), padding)

    arrays = (i, codes, codes.astype(jnp.uint8))
    return [
        *(lax.shift_right_arithmetic(i, jnp.int32(steps)) for steps in (0, 1, 30, 31, 32, -1)),
        *(lax.shift_right_arithmetic(codes, jnp.int8(steps)) for steps in (6, 7)),
        lax.shift_right_arithmetic(i, jnp.arange(8, dtype=jnp.int32) * 5),
        *(lax.population_count(x) for x in (*arrays, i.astype(jnp.uint32), i.astype(jnp.int16))),
        *(lax.cumsum(codes), lax.integer_pow(codes, 0)),
        *(reduce(x, lax.max, "VALID") for x in arrays),
        *(reduce(x, lax.min, "SAME") for x in arrays),
    ]


@pytest.mark.slow
def test_integers(rng: np.random.Generator) -> None:
    ends = np.iinfo(np.int32)
    i = jnp.asarray([5, -5, ends.max, ends.min, 2**24 + 1, 0, *rng.integers(ends.min, ends.max, 2)], jnp.int32)
    check(apply_to_integers, i, jnp.asarray([127, -128, 1, -1, *rng.integers(-128, 128, 4)], jnp.int8), tolerance=0)


def apply_to_unsigned(i: jax.Array) -> list[jax.Array]:
    return [
        *(i + i, i * i, i - 7, i // 3, i % 5, lax.rem(i, jnp.uint32(7)), i >> 1, i << 3, ~i, i**3, jnp.sign(i)),
        lax.population_count(i),
        *(i > 5, i <= jnp.uint32(2**31), i == 77, i.astype(jnp.float32)),
        *(jnp.minimum(i, jnp.uint32(2**31 + 4)), jnp.maximum(i, 9)),
        *(jnp.max(i), jnp.min(i), jnp.argmax(i), jnp.argmin(i), jnp.sort(i), lax.top_k(i, 3)[1], jnp.sum(i)),
    ]


@pytest.mark.slow
def test_unsigned_integers_also_of_a_loaded_model(rng: np.random.Generator) -> None:
    """In a loaded model integers of 64 bits are int32, which does not hold half of these numbers."""
    i = jnp.asarray([0, 1, 2**31, 2**32 - 1, 2**31 - 1, 77, *rng.integers(0, 2**32, 4)], jnp.uint32)
    check(apply_to_unsigned, i, tolerance=0)
    loaded, params = jqonnx.load(jqonnx.export(apply_to_unsigned, [i]))
    for actual, expected in zip(jax.jit(loaded)(params, i), jax.jit(apply_to_unsigned)(i), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_extremes_of_dtypes_that_argmax_lacks(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.integers(0, 5, (4, 6)), jnp.float32)

    def function(x: jax.Array) -> list[jax.Array]:
        dtypes = (jnp.bool_, jnp.int16, jnp.uint16, jnp.uint32, jnp.bfloat16, jnp.uint8)
        return [f(x.astype(dtype), axis=1) for dtype in dtypes for f in (jnp.argmax, jnp.argmin)]

    check(function, x)


def test_rounding_away_from_zero() -> None:
    below = np.nextafter(np.float32(0.5), np.float32(0))
    x = jnp.asarray([below, 0.5, 2.5, 2**23 + 1, 1e10, np.inf, np.nan], jnp.float32)
    check(lambda x: [lax.round(v, lax.RoundingMethod.AWAY_FROM_ZERO) for v in (x, -x)], x, tolerance=0)
