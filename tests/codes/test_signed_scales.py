"""Codes with scales that may be negative, which reverses the order of the values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

F32 = np.float32
BYTES = ("int8", "uint8")


def draw(rng: np.random.Generator, name: str, shape: tuple[int, ...], scale: np.ndarray, point: Any) -> Any:
    info = np.iinfo(name)
    codes = rng.integers(info.min, info.max + 1, shape).astype(name)
    return jq.QuantizedArray(codes, scale.astype(F32), point, signed_scale=True)


def check_relu(q: Any, y: Any) -> None:
    expected = np.maximum(np.asarray(q.dequantize()), 0)
    np.testing.assert_array_equal(np.asarray(y.dequantize()), expected)
    assert y.signed_scale
    assert y.codes.dtype == q.codes.dtype


@pytest.mark.parametrize("has_zero_point", [False, True])
@pytest.mark.parametrize("name", BYTES)
def test_relu(rng: np.random.Generator, name: str, has_zero_point: bool) -> None:
    """Mixed signs for each channel, and for each block."""
    signs = np.array([1, -1, 0, -1, 1, -1, 1])
    for shape in ((1, 7), (5, 1), (5, 7), (5, 2)):
        scale = rng.uniform(0.5, 2, shape) * np.resize(signs, shape)
        info = np.iinfo(name)
        point = rng.integers(info.min, info.max + 1, shape).astype(name) if has_zero_point else None
        q = draw(rng, name, (5, 7), scale, point)
        q = q.replace(block_size=4)
        check_relu(q, jq.codes.relu(q))
        check_relu(q, jax.jit(jq.codes.relu)(q))


def test_relu_with_the_lowest_zero_point(rng: np.random.Generator) -> None:
    """All values of a negative scale are negative then, while codes of positive scales do not change."""
    q = draw(rng, "uint8", (4, 3), np.array([[2.0, -2.0, 0.0]]), None)
    for y in (jq.codes.relu(q), jax.jit(jq.codes.relu)(q)):
        check_relu(q, y)
        np.testing.assert_array_equal(y.codes[:, 0], q.codes[:, 0])
        np.testing.assert_array_equal(y.codes[:, 1], 0)


def test_relu_of_forms(rng: np.random.Generator) -> None:
    """Nested scales of either sign, block sizes that differ, and a permutation."""
    inner = jq.QuantizedArray(
        rng.integers(-31, 32, (2, 5)).astype(np.int8), np.array([[0.5], [-3.0]], F32), signed_scale=True
    )
    codes = rng.integers(-128, 128, (10, 22)).astype(np.int8)
    order = rng.permutation(22).astype(np.int32)
    q = jq.QuantizedArray(
        codes, inner, permutation=order, permuted_axis=-1, block_size=(5, 5), signed_scale=True, dtype=F32
    )  # fmt: skip
    for y in (jq.codes.relu(q), jax.jit(jq.codes.relu)(q)):
        check_relu(q, y)


@pytest.mark.parametrize("padding", ["VALID", "SAME", ((1, 0), (0, 2))])
@pytest.mark.parametrize("name", BYTES)
def test_max_pool(rng: np.random.Generator, name: str, padding: Any) -> None:
    options = {"window_shape": (2, 3), "strides": (1, 2), "padding": padding}
    pool = jax.jit(lambda q: jq.codes.max_pool(q, **options))
    for sign in (1, -1, 0):
        scale = np.full((1, 1, 1, 1), sign * rng.uniform(0.5, 2))
        q = draw(rng, name, (2, 6, 7, 3), scale, np.full((1, 1, 1, 1), 7, name))
        x = jnp.asarray(q.dequantize())
        pads = padding if isinstance(padding, str) else ((0, 0), *padding, (0, 0))
        expected = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 3, 1), (1, 1, 2, 1), pads)
        for y in (jq.codes.max_pool(q, **options), pool(q)):
            np.testing.assert_array_equal(y.dequantize(), expected)
            assert y.signed_scale


def test_pad(rng: np.random.Generator) -> None:
    q = draw(rng, "uint8", (3, 4), np.array([[-0.5], [2.0], [0.0]]), np.array([[3], [9], [200]], np.uint8))
    for y in (jq.codes.pad(q, ((0, 0), (1, 2))), jax.jit(lambda q: jq.codes.pad(q, ((0, 0), (1, 2))))(q)):
        np.testing.assert_array_equal(y.dequantize(), np.pad(q.dequantize(), ((0, 0), (1, 2))))
        assert y.signed_scale


def test_moves(rng: np.random.Generator) -> None:
    q = draw(rng, "int8", (4, 6), rng.normal(size=(4, 1)), None)
    np.testing.assert_array_equal(jq.codes.transpose(q).dequantize(), q.dequantize().T)
    np.testing.assert_array_equal(jq.codes.reshape(q, (2, 2, 6)).dequantize(), q.dequantize().reshape(2, 2, 6))


def test_refusals(rng: np.random.Generator) -> None:
    """What requantizes has kernels for positive scales only."""
    q = draw(rng, "int8", (1, 4, 4, 1), np.full((1, 1, 1, 1), -1.0), None)
    plain = q.replace(scale=-q.scale, signed_scale=False)
    calls = {
        "codes.add": lambda q: jq.codes.add(plain, q, output=plain),
        "codes.mean": lambda q: jq.codes.mean(q, output=plain),
        "codes.average_pool": lambda q: jq.codes.average_pool(q, window_shape=(2, 2), output=plain),
        "concatenate": lambda q: jq.concatenate([q, q], output=plain),
    }
    for function, call in calls.items():
        for run in (call, jax.jit(call)):
            with pytest.raises(ValueError, match=rf"jaxquant\.{function}: .*signed_scale: expected False"):
                run(q)


def test_joined_arrays_with_an_offset_refuse(rng: np.random.Generator) -> None:
    """With an output: without one they keep their offsets."""
    q = draw(rng, "int8", (3, 4), np.ones((1, 1)), None).replace(signed_scale=False)
    shifted = q.replace(offset=jnp.ones((1, 1)))
    for run in (jq.concatenate, jax.jit(lambda arrays, output: jq.concatenate(arrays, output=output))):
        with pytest.raises(ValueError, match=r"jaxquant\.concatenate: arrays\[0\]\.offset: expected None"):
            run([shifted, shifted], output=q)
    joined = jq.concatenate([shifted, shifted])
    np.testing.assert_array_equal(joined.dequantize(), np.concatenate([shifted.dequantize()] * 2))
