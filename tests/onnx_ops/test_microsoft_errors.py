"""What the operators of ONNX Runtime refuse, and the numbers that they take as scales and zero points."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

F, U8, I8 = np.float32, np.uint8, np.int8
CODES = np.ones((4, 6), U8)
IMAGES = np.ones((2, 3, 7, 9), U8)
TWO = {
    "a": CODES,
    "a_scale": F(1),
    "a_zero_point": U8(0),
    "b": CODES,
    "b_scale": F(1),
    "b_zero_point": U8(0),
    "c_scale": F(1),
    "c_zero_point": U8(0),
}
ONE = {"x": CODES, "x_scale": F(1), "x_zero_point": U8(0), "y_scale": F(1), "y_zero_point": U8(0)}
POOL = {**ONE, "x": IMAGES, "kernel_shape": (2, 2)}
CHOICE = {
    "condition": np.ones(6, bool),
    **ONE,
    "y": CODES,
    "z_scale": F(1),
    "z_zero_point": U8(0),
}
MEAN = {"data": CODES, "data_scale": F(1), "data_zero_point": U8(0), "reduced_scale": F(1)}

TABLE = {"data": np.ones((5, 16), U8), "indices": np.ones(3, np.int32), "scales": np.ones((5, 2), F), "block_size": 16}
NIBBLES = {**TABLE, "data": np.ones((5, 32), jnp.int4)}


@pytest.mark.parametrize(
    ("name", "arguments", "changes", "text"),
    [
        ("qlinear_add", TWO, {"a": CODES.astype(np.int16)}, "a: expected dtype int8 or uint8, got int16"),
        ("qlinear_add", TWO, {"b": CODES.astype(I8)}, r"b: expected dtype uint8 \(a's\), got int8"),
        ("qlinear_add", TWO, {"b": CODES[:3]}, r"a, b: expected shapes that broadcast .*, got \(4, 6\) and \(3, 6\)"),
        ("qlinear_add", TWO, {"a_scale": np.ones(2, F)}, r"a_scale: expected a scalar, got shape \(2,\)"),
        ("qlinear_add", TWO, {"b_zero_point": I8(0)}, r"b_zero_point: expected dtype uint8 .*, got int8"),
        ("qlinear_add", TWO, {"b_zero_point": 256}, r"b_zero_point: expected an int in \[0, 255\]"),
        ("qlinear_add", TWO, {"c_scale": 1e60}, "c_scale: expected a number that float32 can hold"),
        ("qlinear_mul", TWO, {"c_scale": np.float16(1)}, "c_scale: expected dtype float32, got float16"),
        ("qlinear_mul", TWO, {"a": CODES[:, :5]}, "a, b: expected shapes that broadcast"),
        ("qlinear_where", CHOICE, {"condition": CODES}, "condition: expected dtype bool, got uint8"),
        ("qlinear_where", CHOICE, {"y": CODES.astype(I8)}, r"y: expected dtype uint8 \(x's\)"),
        ("qlinear_where", CHOICE, {"condition": np.ones(5, bool)}, "condition, x, y: expected shapes that broadcast"),
        ("qlinear_sigmoid", ONE, {"x": CODES.astype(F)}, "x: expected dtype int8 or uint8, got float32"),
        ("qlinear_leaky_relu", ONE, {"alpha": "x"}, "alpha: expected a static Python number"),
        ("qlinear_leaky_relu", ONE, {"alpha": float("nan")}, "alpha: expected a finite number"),
        ("qlinear_softmax", ONE, {"axis": 2}, r"axis: expected an integer in \[-2, 1\]"),
        ("qlinear_softmax", ONE, {"axis": True}, "axis: expected an int, got True"),
        ("qlinear_softmax", ONE, {"opset": 13.0}, "opset: expected an int"),
        ("qlinear_softmax", ONE, {"x": U8(1)}, "axis: expected an array of rank 1 or more"),
        ("qlinear_global_average_pool", ONE, {}, "x: expected an array of rank 3 or more"),
        ("qlinear_global_average_pool", ONE, {"channels_last": 2}, "channels_last: expected True or False"),
        ("qlinear_reduce_mean", MEAN, {"axes": (0, 2)}, r"axes: expected an integer in \[-2, 1\]"),
        ("qlinear_reduce_mean", MEAN, {"axes": (0, -2)}, "axes: expected different axes"),
        ("qlinear_reduce_mean", MEAN, {"axes": 1}, "axes: expected a sequence of ints"),
        ("qlinear_average_pool", POOL, {"x": CODES}, "x: expected an array .N, C, .spatial."),
        ("qlinear_average_pool", POOL, {"kernel_shape": (2,)}, "kernel_shape: expected 2 positive ints"),
        ("qlinear_average_pool", POOL, {"kernel_shape": (8, 2)}, "kernel_shape: expected windows no longer than x"),
        ("qlinear_average_pool", POOL, {"strides": (0, 1)}, "strides: expected 2 positive ints"),
        ("qlinear_average_pool", POOL, {"pads": (0, 2, 0, 0)}, "pads: expected 4 ints from 0 to less than"),
        ("qlinear_average_pool", POOL, {"pads": (1, 0)}, "pads: expected 4 ints"),
        ("qlinear_average_pool", POOL, {"auto_pad": "SAME"}, "auto_pad: expected 'NOTSET' or 'SAME_UPPER'"),
        ("qlinear_average_pool", POOL, {"auto_pad": "VALID", "pads": (1, 0, 0, 0)}, "pads: expected None or zeros"),
        ("qlinear_average_pool", POOL, {"ceil_mode": 1.0}, "ceil_mode: expected True or False"),
        ("qlinear_average_pool", POOL, {"strides": (True, 1)}, "strides: expected an int, got True"),
        ("gather_block_quantized", TABLE, {"data": CODES.astype(F)}, "data: expected dtype int4, uint4 or uint8"),
        ("gather_block_quantized", TABLE, {"data": np.ones(16, U8), "quantize_axis": 0}, "data: expected rank 2"),
        ("gather_block_quantized", TABLE, {"data": np.ones((0, 16), U8)}, "data: expected entries along axis 0"),
        ("gather_block_quantized", TABLE, {"bits": 3}, "bits: expected 2, 4 or 8, because data is uint8, got 3"),
        ("gather_block_quantized", NIBBLES, {"bits": 8}, "bits: expected 4, because data is int4, got 8"),
        ("gather_block_quantized", TABLE, {"bits": True}, "bits: expected an int, got True"),
        ("gather_block_quantized", TABLE, {"block_size": 8}, "block_size: expected a power of two, 16 or more"),
        ("gather_block_quantized", TABLE, {"quantize_axis": 0}, "quantize_axis: expected the last axis, because"),
        ("gather_block_quantized", TABLE, {"gather_axis": 1}, "gather_axis: expected 0, because data is uint8"),
        ("gather_block_quantized", NIBBLES, {"gather_axis": 2}, r"gather_axis: expected an integer in \[-2, 1\]"),
        ("gather_block_quantized", TABLE, {"scales": np.ones((5, 1), F)}, r"scales: expected shape \(5, 2\)"),
        ("gather_block_quantized", TABLE, {"indices": np.ones(3, F)}, "indices: expected dtype int32 or int64"),
        ("gather_block_quantized", TABLE, {"zero_points": np.ones((5, 2), U8)}, r"zero_points: expected shape .5, 1"),
        ("gather_block_quantized", TABLE, {"zero_points": np.ones((5, 1), I8)}, "zero_points: expected dtype uint8"),
    ],
)
def test_errors(name: str, arguments: dict[str, Any], changes: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^jaxquant.ops.{name}: {text}"):
        getattr(jq.ops, name)(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("inputs", "axis", "text"),
    [
        ((), 0, "inputs: expected one or more arrays, each followed by its scale and its zero point, got 0 inputs"),
        ((CODES, 1.0), 0, "inputs: expected one or more arrays, .*, got 2 inputs"),
        ((CODES, 1.0, 0, CODES.astype(I8), 1.0, 0), 0, r"inputs\[3\]: expected dtype uint8"),
        ((CODES, 1.0, 0, CODES[:, :5], 1.0, 0), 0, r"inputs\[3\]: expected the shape \(4, 6\) of inputs\[0\]"),
        ((CODES, 1.0, 0, CODES[0], 1.0, 0), 0, r"inputs\[3\]: expected the shape \(4, 6\) of inputs\[0\]"),
        ((CODES, 1.0, 0, CODES, 1.0, I8(0)), 0, r"inputs\[5\]: expected dtype uint8"),
        ((CODES, 1.0, 0, CODES, np.ones(2, F), 0), 0, r"inputs\[4\]: expected a scalar"),
        ((CODES, 1.0, 300), 0, r"inputs\[2\]: expected an int in \[0, 255\]"),
        ((CODES, 1.0, 0), 2, r"axis: expected an integer in \[-2, 1\]"),
    ],
)
def test_errors_of_concat(inputs: tuple[Any, ...], axis: int, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^jaxquant.ops.qlinear_concat: {text}"):
        jq.ops.qlinear_concat(1.0, 0, *inputs, axis=axis)


@pytest.mark.slow
def test_python_numbers_and_single_elements_are_scalars() -> None:
    want = np.asarray(jq.ops.qlinear_add(CODES, F(0.1), U8(3), CODES, F(0.2), U8(0), F(0.5), U8(7)))
    single: Any = [np.array([v]) for v in (F(0.1), U8(3), F(0.2), U8(0), F(0.5), U8(7))]
    for got in (
        jq.ops.qlinear_add(CODES, 0.1, 3, CODES, 0.2, None, 0.5, 7),
        jq.ops.qlinear_add(*(CODES, *single[:2], CODES, *single[2:])),
    ):
        np.testing.assert_array_equal(np.asarray(got), want)
    # A missing zero point is 0.
    left, right = jq.ops.qlinear_sigmoid(CODES, 0.1, None, 0.01), jq.ops.qlinear_sigmoid(CODES, 0.1, 0, 0.01, 0)
    np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def test_any_scale_gives_codes() -> None:
    """As with the other operators of ONNX: a quotient of infinity or NaN saturates."""

    @jax.jit
    def compute(scale: jax.Array) -> tuple[jax.Array, ...]:
        two = (CODES, scale, 0, CODES, 0.5, 0, 1.0, 0)
        return jq.ops.qlinear_add(*two), jq.ops.qlinear_mul(*two), jq.ops.qlinear_softmax(CODES, scale, 0, 0.5, 0)

    for scale in (0.0, -1.0, float("nan"), float("inf"), 1e30):
        assert all(y.dtype == jnp.uint8 for y in compute(F(scale)))


def test_a_negative_scale_is_a_number_like_any_other() -> None:
    codes = np.arange(256, dtype=U8)
    a = jq.ops.qlinear_add(codes, -0.5, 3, codes, 0.25, 5, 0.75, 101)
    exact = ((codes - 3.0) * -0.5 + (codes - 5.0) * 0.25) / 0.75 + 101
    np.testing.assert_allclose(np.asarray(a), np.clip(exact, 0, 255), atol=0.5001)


def test_large_factors_saturate() -> None:
    """ONNX Runtime converts to int32 first, and gives the lowest code beyond 2**31."""
    x = np.array([0, 1, 255], U8)
    assert jq.ops.qlinear_add(x, 1e10, 0, x, 1.0, 0, 1.0, 5).tolist() == [5, 255, 255]
    assert jq.ops.qlinear_mul(x, 1e10, 0, x, 1.0, 0, 1.0, 5).tolist() == [5, 255, 255]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["qlinear_add", "qlinear_mul"])
def test_under_disable_jit(name: str) -> None:
    with jax.disable_jit():
        y = getattr(jq.ops, name)(CODES, 0.5, 0, CODES, 0.5, 0, 0.5, 0)
    assert y.tolist() == [[{"qlinear_add": 2, "qlinear_mul": 0}[name]] * 6] * 4
