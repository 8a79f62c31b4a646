"""Products of codes with a zero point for each row: integers in ONNX Runtime, too, and the same ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import onnx as jqonnx

from ..cases.onnx_models import run_runtime

LEVELS = ("disabled", "basic", "extended", "all")
MATRICES = (((1,), (0,)), ((), ()))
# The shapes of the operands and the dimension numbers.
PRODUCTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {
    "matrices": ((5, 16), (16, 7), MATRICES),
    "transposed": ((16, 5), (7, 16), (((0,), (1,)), ((), ()))),
    "several rows and columns": ((3, 4, 16), (2, 16, 3), (((2,), (1,)), ((), ()))),
    "several sums": ((3, 4, 5, 6), (6, 4, 7), (((3, 1), (0, 1)), ((), ()))),
    "batch": ((3, 5, 16), (3, 16, 7), (((2,), (1,)), ((0,), (0,)))),
    "moved batch": ((16, 5, 3), (7, 3, 16), (((0,), (2,)), ((2,), (1,)))),
    "rows only": ((5, 16), (16,), (((1,), (0,)), ((), ()))),
}


def draw(rng: np.random.Generator, dtype: Any, shape: tuple[int, ...]) -> jax.Array:
    bounds = jnp.iinfo(dtype)
    return jnp.asarray(rng.integers(bounds.min, bounds.max + 1, shape), dtype)


def draw_points(rng: np.random.Generator, x: jax.Array, contracted: tuple[int, ...]) -> jax.Array:
    """Return a zero point for each row or column."""
    return draw(rng, x.dtype, tuple(1 if axis in contracted else n for axis, n in enumerate(x.shape)))


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("right", ["none", "one", "columns"])
@pytest.mark.parametrize("dtypes", ["uint8 int8", "uint8 uint8", "int8 int8", "int8 uint8", "uint4 int4"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_zero_points_of_rows(name: str, dtypes: str, right: str, rng: np.random.Generator) -> None:
    lhs_shape, rhs_shape, numbers = PRODUCTS[name]
    lhs, rhs = (draw(rng, getattr(jnp, d), s) for d, s in zip(dtypes.split(), (lhs_shape, rhs_shape), strict=True))
    lhs_points = draw_points(rng, lhs, numbers[0][0])
    rhs_points = {
        "none": None, "one": draw(rng, rhs.dtype, ()), "columns": draw_points(rng, rhs, numbers[0][1])
    }[right]  # fmt: skip

    def multiply(lhs: jax.Array, lhs_points: jax.Array, rhs: jax.Array) -> jax.Array:
        return jq.integer.dot_general(lhs, rhs, numbers, lhs_zero_point=lhs_points, rhs_zero_point=rhs_points)

    expected = np.asarray(multiply(lhs, lhs_points, rhs))
    functions = {
        "weights": (lambda lhs, points: multiply(lhs, points, rhs), (lhs, lhs_points)),
        "inputs": (multiply, (lhs, lhs_points, rhs)),
        "constant rows": (lambda lhs, rhs: multiply(lhs, lhs_points, rhs), (lhs, rhs)),
    }
    for kind, (function, arguments) in functions.items():
        model = jqonnx.export(function, arguments)
        operators = [node.op_type for node in model.graph.node]
        # One zero point for each column of several dimensions is no vector, so that this product has no operator.
        if right != "columns" or len(set(range(rhs.ndim)) - {*numbers[0][1]}) == 1:
            assert "MatMulInteger" in operators, kind
            assert "MatMul" not in operators, kind
        feeds = {part.name: np.asarray(x) for part, x in zip(model.graph.input, arguments, strict=True)}
        for part in model.graph.input:  # codes of 4 bits are held as 8-bit integers
            x = feeds[part.name]
            feeds[part.name] = x.astype(np.uint8 if x.dtype.name.startswith("uint") else np.int8)
        for level in ("none", *LEVELS[1:]):
            (actual,) = run_runtime(model, feeds, level=level)
            np.testing.assert_array_equal(actual, expected, err_msg=f"{kind} {level}")
        loaded, params = jqonnx.load(model)
        held = [jnp.asarray(x) for x in feeds.values()]
        np.testing.assert_array_equal(jax.jit(loaded)(params, *held), expected, err_msg=kind)


@pytest.mark.slow
def test_dynamic_ranges_of_rows(rng: np.random.Generator) -> None:
    """The model holds int8 weights, and no product of int32, also with a batch of symbolic length."""
    w = jq.quantize(jnp.asarray(rng.normal(size=(32, 8)), jnp.float32), jq.QuantSpec(jnp.int8, jq.PerAxis(1)))
    rows = jq.QuantSpec(jnp.uint8, jq.PerAxis(0))

    def layer(x: jax.Array) -> jax.Array:
        return jq.matmul(jq.quantize(x, rows), w)

    x = jnp.asarray(rng.normal(1, 2, (6, 32)), jnp.float32)
    model = jqonnx.export(layer, [x], batch="N")
    assert "MatMul" not in [node.op_type for node in model.graph.node]
    shapes = {(part.data_type, tuple(part.dims)) for part in model.graph.initializer}
    assert (3, (32, 8)) in shapes  # int8
    assert (6, (32, 8)) not in shapes  # int32
    for level in LEVELS:
        report = jqonnx.verify(model, layer, [x, x[:1]], level=level)
        assert report.is_exact, f"{level}\n{report}"
