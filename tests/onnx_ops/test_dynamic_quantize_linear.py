"""What is special to DynamicQuantizeLinear: published vectors, empty and zero ranges, infinities, NaN at any length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..oracles import onnx_text
from ..oracles.onnx_runtime import run
from ..support import transforms

LENGTHS = (1, 2, 3, 7, 8, 31, 64, 1000, 4095, 4096, 8191, 8192, 32767, 32768, 32769, 40001, 262144)


def onnx_runtime(x: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(run("DynamicQuantizeLinear", {"x": x}, {"y": np.uint8, "s": np.float32, "z": np.uint8}, 11))


@pytest.mark.parametrize(
    ("x", "y", "scale", "point"),
    [
        ([-10, 3.4, 10], [0, 170, 254], 0.0784313753247261, 127),
        ([5.2, 0.8, -8.4, -3.1, -0.8], [255, 173, 0, 100, 143], None, 158),
        ([9.1, -1.7, -3.9, -0.6], [254, 43, 0, 64], 0.05098039284348488, 76),
        ([5, 5], [255, 255], 0.0196078438, 0),
        ([-5, -5], [0, 0], 0.0196078438, 255),
        ([np.inf, 1], [0, 0], np.inf, 0),
        ([1, -np.inf, -1], [255, 0, 255], np.inf, 255),
        ([3e38, -3e38, 1, 0], [0, 0, 0, 0], np.inf, 0),
        ([np.finfo(np.float32).max, 0, 1e38], [255, 0, 75], 1.3344406e36, 0),
    ],
)
def test_vectors(x: list[float], y: list[int], scale: float | None, point: int) -> None:
    x32 = np.array(x, np.float32)
    for op in (jq.dynamic_quantize_linear, jax.jit(jq.dynamic_quantize_linear)):
        actual = op(x32)
        np.testing.assert_array_equal(actual.y, y)
        assert int(actual.y_zero_point) == point
        assert scale is None or actual.y_scale == np.float32(scale)
        assert transforms.mismatches(tuple(actual), onnx_runtime(x32)) == 0


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), (), (4,), (3, 5)])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_range_of_zero(shape: tuple[int, ...], zero: float) -> None:
    x = np.full(shape, zero, np.float32)
    assert transforms.mismatches(tuple(jq.dynamic_quantize_linear(x)), onnx_runtime(x)) == 0
    signed = jq.dynamic_quantize_linear(x, dtype=jnp.int8)
    assert signed.y_scale == 1
    assert signed.y_zero_point == -127
    assert (np.asarray(signed.y) == -127).all()


def test_an_empty_slice_among_others() -> None:
    actual = jq.dynamic_quantize_linear(jnp.zeros((3, 0)), axis=0)
    np.testing.assert_array_equal(actual.y_scale, np.ones(3))
    assert jq.dynamic_quantize_linear(jnp.zeros((3, 0)), axis=1).y_scale.shape == (0,)


@pytest.mark.sample(6)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length(rng: np.random.Generator, length: int) -> None:
    x = (rng.normal(size=length) * np.exp(rng.uniform(-3, 3))).astype(np.float32)
    want = onnx_runtime(x)
    assert transforms.mismatches(tuple(jq.dynamic_quantize_linear(x)), want) == 0
    assert transforms.mismatches(tuple(jax.jit(jq.dynamic_quantize_linear)(x[None])), (want[0][None], *want[1:])) == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_nan_anywhere(rng: np.random.Generator, length: int) -> None:
    """XLA:CPU loses it in long reductions, ONNX Runtime by its lane."""
    for sign in (1, -1):
        for place in {0, length // 2, length - 1, int(rng.integers(length))}:
            x = rng.normal(size=length).astype(np.float32)
            x[place] = sign * np.nan
            actual = jq.dynamic_quantize_linear(x)
            assert np.isnan(actual.y_scale)
            assert actual.y_zero_point == 255
            assert (np.asarray(actual.y) == 0).all()
    rows = np.stack([x, np.nan_to_num(x)])
    by_row = jq.dynamic_quantize_linear(rows, axis=0)
    assert np.isnan(by_row.y_scale).tolist() == [True, False]
    assert (by_row.y_zero_point[0], *np.unique(by_row.y[0])) == (255, 0)
    batched = jax.vmap(jq.dynamic_quantize_linear)(rows)
    assert np.isnan(batched.y_scale).tolist() == [True, False]


@pytest.mark.parametrize("length", [1, 33, 8192, 40001])
@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_infinity_anywhere(rng: np.random.Generator, length: int, value: float) -> None:
    for place in {0, length // 2, length - 1}:
        x = rng.normal(size=length).astype(np.float32)
        x[place] = value
        y, scale, point = onnx_text.dynamic_quantize_linear(x)
        actual = jq.dynamic_quantize_linear(x)
        np.testing.assert_array_equal(actual.y, y)
        assert (float(actual.y_scale), int(actual.y_zero_point)) == (scale, point)


@pytest.mark.slow
def test_many_small_tensors(rng: np.random.Generator) -> None:
    """20 000 tensors of 4 elements: where ranges, ties and rounded zero points meet most."""
    x = (rng.normal(size=(20_000, 4)) * np.exp(rng.uniform(-8, 8, (20_000, 1)))).astype(np.float32)
    actual = jax.jit(jax.vmap(jq.dynamic_quantize_linear))(x)
    expected = [onnx_text.dynamic_quantize_linear(row) for row in x]
    np.testing.assert_array_equal(actual.y, np.stack([w[0] for w in expected]))
    np.testing.assert_array_equal(actual.y_scale, [w[1] for w in expected])
    np.testing.assert_array_equal(actual.y_zero_point, [w[2] for w in expected])


@pytest.mark.slow
def test_the_axis_that_is_kept(rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 5, 7)).astype(np.float32)
    for axis in (0, 1, 2, -1, -3):
        actual = jq.dynamic_quantize_linear(x, axis=axis)
        for i in range(x.shape[axis]):
            part = onnx_runtime(np.take(x, i, axis))
            alone = (np.take(np.asarray(actual.y), i, axis), actual.y_scale[i], actual.y_zero_point[i])
            assert transforms.mismatches(tuple(map(np.asarray, alone)), part) == 0


@pytest.mark.slow
def test_outputs_go_on_to_dequantize() -> None:
    x = jnp.linspace(-3, 5, 24).reshape(4, 6)
    for axis in (None, 0, -1):
        outputs = jq.dynamic_quantize_linear(x, axis=axis)
        values = jq.dequantize_linear(*outputs, axis=1 if axis is None else axis)
        assert jnp.abs(values - x).max() <= outputs.y_scale.max() * 0.51
        assert outputs._fields == ("y", "y_scale", "y_zero_point")
