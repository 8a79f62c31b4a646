"""Integers that JAX and ONNX Runtime would make differently of numbers that a dtype does not hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from jax import lax

from jaxquant import onnx as jqonnx

from ..cases.onnx_models import run_runtime

NARROW = ("int2", "uint2", "int4", "uint4")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32")


def compare(function: Callable[..., Any], *arguments: Any, opset: int = 21) -> Any:
    """Export a function, compare each result with ONNX Runtime's, also the sign of zeros, and return the model."""
    model = jqonnx.export(function, arguments, opset=opset)
    feeds = {x.name: np.asarray(v) for x, v in zip(model.graph.input, arguments, strict=True)}
    expected = jax.tree.leaves(jax.jit(function)(*arguments))
    for level in ("none", "all"):
        for place, (want, got) in enumerate(zip(expected, run_runtime(model, feeds, level), strict=True)):
            np.testing.assert_array_equal(got.astype(want.dtype), want, err_msg=f"result {place}, level {level}")
    return model


def list_operators(function: Callable[..., Any], *arguments: Any) -> list[str]:
    return [node.op_type for node in jqonnx.export(function, arguments).graph.node]


def widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [13, 21, 25])
def test_floats_saturate(rng: np.random.Generator, opset: int) -> None:
    ends = [2.0**n + step for n in (1, 2, 3, 4, 7, 8, 15, 16) for step in (-1.5, -1, -0.5, 0, 0.5)]
    large = [2.0**31, 2.0**31 - 128, 2.0**31 + 256, 2.0**32, 2.0**32 - 256, 3e9, 1e20, 3e38, np.inf]
    numbers = [*ends, *large, *rng.uniform(0, 3e9, 8)]
    x = jnp.asarray([np.nan, 0.0, -0.0, *numbers, *(-n for n in numbers)], jnp.float32)

    def function(x: jax.Array) -> list[jax.Array]:
        floats = (x, x.astype(jnp.float16), x.astype(jnp.bfloat16))
        codes = [widen(y.astype(d)) for y in floats for d in NARROW]
        return [*codes, *(y.astype(d) for y in floats for d in INTEGERS)]

    compare(function, x, opset=opset)


@pytest.mark.slow
def test_floats_saturate_in_64_bits() -> None:
    with jax.enable_x64(True):
        ends = [2.0**63, 2.0**63 - 1024, -(2.0**63), -(2.0**64), 2.0**64, 2.0**64 - 2048, 2.0**31 - 0.5, 2.0**31]
        x = jnp.asarray([np.nan, np.inf, -np.inf, -1.5, 1.5, *ends], jnp.float64)

        def function(x: jax.Array) -> list[jax.Array]:
            return [y.astype(d) for y in (x, x.astype(jnp.float32)) for d in ("int64", "uint64", "int32", "uint32")]

        compare(function, x)


def test_casts_of_numbers_in_range_are_one_node(rng: np.random.Generator) -> None:
    codes = jnp.asarray(rng.integers(-128, 128, 8), jnp.int8)
    x = codes.astype(jnp.float32)

    def scale(codes: jax.Array) -> jax.Array:
        return jnp.floor(codes.astype(jnp.float32) * 0.5).astype(jnp.int32)

    assert list_operators(scale, codes) == ["Cast", "Mul", "Floor", "Cast"]
    assert list_operators(lambda x: (x > 0).astype(jnp.int4), x) == ["Greater", "Cast"]
    # A clamp keeps NaN, which JAX converts to 0.
    clip = list_operators(lambda x: lax.clamp(np.float32(-8), x, np.float32(7)).astype(jnp.int4), x)
    assert clip == ["Max", "Min", "IsNaN", "Where", "Cast"]
    # The largest int32 is a float of 2**31, which int32 does not hold.
    back = list_operators(lambda i: i.astype(jnp.float32).astype(jnp.int32), codes.astype(jnp.int32))
    assert back == ["Cast", "Clip", "Cast", "GreaterOrEqual", "Where"]


def test_casts_of_a_loaded_model_are_not_guarded_again(rng: np.random.Generator) -> None:
    x = jnp.asarray([np.nan, np.inf, -np.inf, 2.0**31, *rng.uniform(-3e9, 3e9, 4)], jnp.float32)

    def function(x: jax.Array) -> list[jax.Array]:
        return [x.astype(jnp.int32), x.astype(jnp.int8), widen(x.astype(jnp.int4))]

    model, counts = jqonnx.export(function, [x]), []
    for _ in range(3):
        counts.append(len(model.graph.node))
        loaded, params = jqonnx.load(model)
        for actual, expected in zip(loaded(params, x), function(x), strict=True):
            np.testing.assert_array_equal(actual, expected)
        model = jqonnx.export(loaded, params, [x])
    assert counts[1] >= counts[2]


def test_codes_of_few_bits_wrap_around(rng: np.random.Generator) -> None:
    i = jnp.asarray([*range(-20, 20), 2**31 - 1, -(2**31), *rng.integers(-(2**31), 2**31, 6)], jnp.int32)

    def function(i: jax.Array) -> list[jax.Array]:
        results = []
        for dtype in NARROW:
            x = i.astype(dtype)
            y = (i >> 3).astype(dtype)
            results += [x, x + y, x - y, x * y, -x, ~x, lax.cumsum(x), x.astype(jnp.int8), jnp.maximum(x, y)]
            results += [i.astype(jnp.uint8).astype(dtype), x.astype("uint4").astype("int4")]
        return [widen(x) for x in results]

    compare(function, i)


def test_sums_of_integers_are_exact(rng: np.random.Generator) -> None:
    """Beyond 2**24, which floats do not count to, and beyond the dtype, where JAX keeps the low bits."""
    i = jnp.asarray(rng.integers(-(2**31), 2**31, (2, 9, 7, 3)), jnp.int32)
    codes = jnp.asarray(rng.integers(-128, 128, (2, 9, 7, 3)), jnp.int8)

    def add(x: jax.Array, window: Any, strides: Any = (1,) * 4, padding: Any = "VALID", **options: Any) -> jax.Array:
        return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, window, strides, padding, **options)

    def function(i: jax.Array, codes: jax.Array) -> list[jax.Array]:
        pads = ((0, 0), (2, 1), (0, 3), (0, 0))
        arrays = (i, i.astype(jnp.uint32), codes, codes.astype(jnp.uint8), codes.astype(jnp.int16))
        return [
            *(add(x, (1, 3, 2, 1), (1, 2, 1, 1), "SAME") for x in arrays),
            add(i, (1, 7, 6, 2), padding=((0, 0), (0, 0), (4, 4), (0, 0))),
            add(i, (1, 3, 2, 1), (1, 1, 3, 1), pads, window_dilation=(1, 2, 3, 1)),
            *(jnp.sum(x, axis) for x in (i, i.astype(jnp.uint32)) for axis in (None, 1, (0, 2))),
            *(lax.cumsum(x, 1) for x in arrays),
            *(lax.cumsum(x, 2, reverse=True) for x in arrays),
        ]

    compare(function, i, codes)


def test_sums_that_fit_are_one_node(rng: np.random.Generator) -> None:
    codes = jnp.asarray(rng.integers(-128, 128, (4, 8)), jnp.int8)
    assert list_operators(lambda codes: jnp.sum(codes.astype(jnp.int32), 1), codes) == ["Cast", "ReduceSum"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_window_sums_of_floats_are_not_rounded_to_integers(rng: np.random.Generator, dtype: str) -> None:
    x = jnp.asarray(rng.uniform(0, 1, (1, 6, 6, 2)), dtype)
    zero = np.zeros((), dtype)

    def function(x: jax.Array) -> jax.Array:
        sums = lax.reduce_window(x, zero, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return sums.astype(jnp.float32)

    report = jqonnx.verify(jqonnx.export(function, [x]), function, [x], tolerance=0.02)
    assert report.is_exact, str(report)


def test_angles_of_zeros_and_infinities() -> None:
    ends = [0.0, 1.0, 3.0, 1e-30, 1e30, np.inf]
    y, x = (jnp.asarray(v.ravel(), jnp.float32) for v in np.meshgrid(*[[*ends, *(-v for v in ends), np.nan]] * 2))
    model = jqonnx.export(lax.atan2, [y, x])
    want = np.asarray(jax.jit(lax.atan2)(y, x))
    feeds = {x.name: np.asarray(v) for x, v in zip(model.graph.input, (y, x), strict=True)}
    for level in ("none", "all"):
        (got,) = run_runtime(model, feeds, level)
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-35)
        np.testing.assert_array_equal(np.signbit(got)[~np.isnan(want)], np.signbit(want)[~np.isnan(want)])


@pytest.mark.slow
def test_shifts_by_numbers_that_are_computed(rng: np.random.Generator) -> None:
    ends = np.iinfo(np.int32)
    x = jnp.asarray([5, -5, ends.max, ends.min, -1, 2**30, *rng.integers(ends.min, ends.max, 6)] * 12, jnp.int32)
    steps = jnp.asarray(np.repeat([0, 1, 2, 7, 8, 15, 16, 31, 32, 33, -1, ends.min], 12), jnp.int32)

    def function(x: jax.Array, steps: jax.Array) -> list[jax.Array]:
        shifts = (lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic)
        arrays = [x.astype(dtype) for dtype in INTEGERS]
        return [shift(y, steps.astype(y.dtype)) for y in arrays for shift in shifts]

    compare(function, x, steps)


def test_arrays_without_elements(rng: np.random.Generator) -> None:
    x, empty = jnp.asarray(rng.normal(0, 1, (1, 3, 2)), jnp.float32), jnp.zeros((2, 0, 3))

    def function(x: jax.Array, empty: jax.Array) -> list[jax.Array]:
        flags = empty > 0
        return [
            jnp.pad(x, ((0, 0), (1, 1), (0, 2)), mode="edge"),
            *(reduce(empty, 1) for reduce in (jnp.sum, jnp.prod)),
            *(reduce(flags, 1) for reduce in (jnp.any, jnp.all)),
            *(reduce(flags, (1,)) for reduce in (lax.reduce_or, lax.reduce_and, lax.reduce_max, lax.reduce_min)),
            *(f(empty.astype(jnp.int32), (1,)) for f in (lax.reduce_max, lax.reduce_min, lax.reduce_sum)),
            *(f(empty, (1,)) for f in (lax.reduce_max, lax.reduce_min)),
        ]

    compare(function, x, empty)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"])
def test_float8_inputs_and_results_are_verified(rng: np.random.Generator, name: str) -> None:
    """`verify` passes float8 to ONNX Runtime, and a loaded model that saturates is exported as a Cast."""
    x = jnp.asarray([np.nan, 0.0, 1e-9, 449.0, 1e6, -1e6, *rng.normal(0, 20, 8)], jnp.float32)
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name))
    nodes = [onnx.helper.make_node("Cast", ["x"], ["y"], to=kind)]
    info, dims = onnx.helper.make_tensor_value_info, [x.size]
    graph = onnx.helper.make_graph(nodes, "g", [info("x", 1, dims)], [info("y", kind, dims)])
    loaded, params = jqonnx.load(onnx.helper.make_model(graph, ir_version=10))
    model = jqonnx.export(loaded, params, [x])
    # The codes keep the name by which `verify` compares them, so the output is a copy.
    assert [node.op_type for node in model.graph.node] == ["Cast", "Identity"]
    assert jqonnx.verify(model, lambda x: loaded(params, x), [x]).is_exact
    narrow = loaded(params, x)
    widen = lambda x: x.astype(jnp.float32) * 2  # noqa: E731
    assert jqonnx.verify(jqonnx.export(widen, [narrow]), widen, [narrow]).is_exact
