"""What is special to QuantizeLinear: shapes, defaults, Python numbers, what ONNX Runtime refuses and takes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxquant as jq

from ..oracles import onnx_runtime, onnx_text
from ..support import transforms


def test_the_vectors_that_tell_formulas_apart() -> None:
    """Each differs under a reciprocal multiply or when the zero point is added before rounding."""
    for x, scale, point, name, expected in (
        (261.8338317871094, 5.630835056304932, 0, "uint8", 46),
        (-0.031088432297110558, 0.0010908221593126655, 112, "int8", 84),
        (-269.3614196777344, 25.653467178344727, 3, "int4", -8),
        (2.614954710006714, 0.038740068674087524, 177, "uint8", 245),
        (11.351314544677734, 22.70262908935547, 7, "uint4", 7),
    ):
        actual = jq.quantize_linear(np.float32(x), np.float32(scale), np.asarray(point, onnx_text.dtype(name)))
        assert int(actual) == expected


def test_defaults_of_the_text() -> None:
    x = jnp.array([-1.0, 0.5, 2.5])
    assert jq.quantize_linear(x, 1.0).dtype == jnp.uint8
    assert jq.quantize_linear(x, 1.0, output_dtype=jnp.int4).dtype == jnp.int4
    assert jq.quantize_linear(x, 1.0, jnp.int8(0)).dtype == jnp.int8
    assert jq.quantize_linear(x, 1.0, jnp.int8(0), output_dtype=jnp.int8).dtype == jnp.int8
    assert jq.quantize_linear(1.5, 1.0).shape == ()
    assert jq.quantize_linear(1.5, 1.0) == 2


def test_numbers_stand_for_arrays() -> None:
    x = np.array([[0.3, -0.7], [1.1, 2.0]], np.float32)
    scales = np.array([0.1, 0.2], np.float32)
    want = jq.quantize_linear(x, scales, np.array([3, 3], np.int8))
    for number in (3, np.int64(3), np.int32(3)):
        np.testing.assert_array_equal(jq.quantize_linear(x, scales, number, output_dtype=jnp.int8), want)
    assert jq.quantize_linear(x, 0.1, np.uint8(3)).dtype == jnp.uint8
    half = jq.quantize_linear(x.astype(np.float16), 0.1)  # the number takes x's dtype, as JAX's weak types do
    np.testing.assert_array_equal(half, jq.quantize_linear(x.astype(np.float16), np.float16(0.1)))


def runtime_accepts(x, scale, point, **attributes) -> np.ndarray | None:
    try:
        return onnx_runtime.run(
            "QuantizeLinear", {"x": x, "s": scale, "z": point}, {"y": point.dtype}, 21, **attributes
        )[0]
    except Exception:
        return None


SHAPES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "rank 0": ((), (), (), {}),
    "empty": ((0,), (), (), {}),
    "empty per axis": ((2, 0, 3), (0,), (0,), {}),
    "axis out of range, scalar": ((2, 3), (), (), {"axis": 7}),
    "axis out of range, one element": ((2, 3), (1,), (1,), {"axis": 7}),
    "axis out of range": ((2, 3), (3,), (3,), {"axis": 2}),
    "rank 1, default axis": ((3,), (3,), (3,), {}),
    "rank 1, axis 0": ((3,), (3,), (3,), {"axis": 0}),
    "one element for a longer axis": ((2, 3), (1,), (1,), {}),
    "(1, 1) without a block": ((2, 3), (1, 1), (1, 1), {}),
    "zero point a scalar for three": ((2, 3), (3,), (), {}),
    "zero point three for a scalar": ((2, 3), (), (3,), {}),
    "one element and a scalar": ((2, 3), (1,), (), {}),
    "a scalar and one element": ((2, 3), (), (1,), {}),
    "blocked": ((2, 6), (2, 3), (2, 3), {"block_size": 2}),
    "blocked, last one short": ((2, 7), (2, 4), (2, 4), {"block_size": 2}),
    "blocked off the last axis": ((5, 3), (2, 3), (2, 3), {"axis": 0, "block_size": 3}),
    "block longer than the axis": ((2, 3), (2, 1), (2, 1), {"block_size": 9}),
    "one block of all": ((1, 6), (1, 1), (1, 1), {"block_size": 6}),
    "too many blocks": ((2, 6), (2, 4), (2, 4), {"block_size": 2}),
    "too few blocks": ((2, 6), (2, 2), (2, 2), {"block_size": 2}),
    "a scalar for blocks": ((2, 6), (), (), {"block_size": 2}),
    "blocked, zero point a scalar": ((2, 6), (2, 3), (), {"block_size": 2}),
    "rank 1 blocked": ((6,), (3,), (3,), {"axis": 0, "block_size": 2}),
}


@pytest.mark.parametrize("name", list(SHAPES))
def test_shapes_are_taken_as_onnx_runtime_takes_them(rng: np.random.Generator, name: str) -> None:
    shape, s_shape, z_shape, attributes = SHAPES[name]
    x = rng.normal(0, 50, shape).astype(np.float32)
    scale = np.asarray(rng.uniform(0.5, 2, s_shape), np.float32)
    point = np.asarray(rng.integers(-128, 128, z_shape), np.int8)
    want = runtime_accepts(x, scale, point, **attributes)
    if want is None:
        with pytest.raises(ValueError, match=r"jaxquant\.quantize_linear"):
            jq.quantize_linear(x, scale, point, **attributes)
        return
    assert transforms.mismatches(np.asarray(jq.quantize_linear(x, scale, point, **attributes)), want) == 0
    values = onnx_runtime.run(
        "DequantizeLinear", {"x": want, "s": scale, "z": point}, {"y": np.float32}, 21, **attributes
    )
    restored = jq.dequantize_linear(want, scale, point, **attributes)
    assert transforms.mismatches(np.asarray(restored), values[0]) == 0


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16"])
@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, np.inf, np.nan])
def test_scales_that_are_zero_negative_or_not_finite(scale: float, name: str) -> None:
    x = np.array([3.0, -3.0, 0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 0.5, -2.5], np.float32)
    args = x, np.asarray(scale, np.float32), np.asarray(3, name)
    (want,) = onnx_runtime.run("QuantizeLinear", dict(zip("xsz", args, strict=True)), {"y": np.dtype(name)}, 21)
    np.testing.assert_array_equal(jq.quantize_linear(*args), want)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape_any_granularity(data: st.DataObject) -> None:
    """Shapes, axes and blocks at random; the values from a drawn seed, printed by hypothesis when it fails."""
    shape = tuple(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4)))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    block = data.draw(st.integers(0, 5))
    dimension = axis % len(shape)
    s_shape = (
        (*shape[:dimension], -(-shape[dimension] // block), *shape[dimension + 1 :]) if block else (shape[dimension],)
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    name = data.draw(st.sampled_from(list(onnx_text.BOUNDS)))
    low, high = onnx_text.BOUNDS[name]
    scale = np.exp(rng.uniform(-3, 3, s_shape)).astype(np.float32)
    point = rng.integers(low, high + 1, s_shape).astype(onnx_text.dtype(name))
    spread = scale if s_shape == (1,) and not block else None
    x = rng.normal(0, high, shape).astype(np.float32)
    keywords: dict[str, Any] = {"axis": axis, "block": block}
    expected = onnx_text.quantize_linear(x, scale if spread is None else spread, point, name, **keywords)
    actual = jq.quantize_linear(x, scale, point, axis=axis, block_size=block)
    assert transforms.mismatches(np.asarray(actual), expected) == 0
    restored = jq.dequantize_linear(actual, scale, point, axis=axis, block_size=block)
    assert (
        transforms.mismatches(np.asarray(restored), onnx_text.dequantize_linear(expected, scale, point, **keywords))
        == 0
    )
