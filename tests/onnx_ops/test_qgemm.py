"""The bias and the float32 result of `qlinear_matmul`: ONNX Runtime's QGemm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxquant as jq

from ..oracles import onnx_runtime

F = np.float32
KERNELS = (("uint8", "uint8"), ("uint8", "int8"), ("int8", "int8"))
PAIRS = (*KERNELS, ("int8", "uint8"))
EXTREMES = (2**31 - 1, -(2**31), 2**31 - 100, -(2**31) + 100, 0)


def draw(rng: np.random.Generator, names: tuple[str, str], per_column: bool, shape: tuple[int, ...]) -> list[Any]:
    """Sample the arguments up to the bias; many products with the scales are next to ties."""
    depth, columns = 19, 7
    info = {name: np.iinfo(name) for name in names}
    a = rng.integers(info[names[0]].min, info[names[0]].max + 1, (*shape, depth)).astype(names[0])
    b = rng.integers(info[names[1]].min, info[names[1]].max + 1, (depth, columns)).astype(names[1])
    count = (columns,) if per_column else ()
    b_point = rng.integers(info[names[1]].min, info[names[1]].max + 1, count).astype(names[1])
    b_scale = (rng.integers(1, 9, count) * 2.0**-6).astype(F) if rng.random() < 0.5 else rng.uniform(0.01, 1, count)
    bias = rng.integers(-9000, 9000, columns)
    place = rng.integers(0, columns, 3)
    bias[place] = rng.choice(EXTREMES, 3)
    y_point = np.dtype(names[0]).type(rng.integers(info[names[0]].min, info[names[0]].max + 1))
    a_point = np.dtype(names[0]).type(rng.integers(info[names[0]].min, info[names[0]].max + 1))
    y_scale = F(2.0 ** rng.integers(0, 8))
    a_scale = F(0.5 if rng.random() < 0.5 else rng.uniform(0.01, 1))
    scales = (a_scale, np.asarray(b_scale, F)[()], y_scale)
    return [a, scales[0], a_point, b, scales[1], b_point[()], scales[2], y_point, bias.astype(np.int32)]


def multiply(a: Any, a_scale: Any, a_point: Any, b: Any, b_scale: Any, b_point: Any, y_scale: Any, y_point: Any,
             bias: Any) -> np.ndarray:  # fmt: skip
    """Compute QGemm: the sum with the bias wraps around, the scales are multiplied, then divided, in float32."""
    total = (a.astype(np.int64) - int(a_point)) @ (b.astype(np.int64) - b_point.astype(np.int64)) + bias
    values = total.astype(np.int32).astype(F)
    scale = F(a_scale) * b_scale
    if y_scale is None:
        return values * scale
    steps = np.rint(values * (scale / F(y_scale))).astype(np.float64) + float(y_point)
    info = np.iinfo(y_point.dtype)
    return np.clip(steps, info.min, info.max).astype(y_point.dtype)


def equal(got: Any, want: np.ndarray) -> None:
    assert np.asarray(got).dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.sample(1)
@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_codes_and_floats(names: tuple[str, str], per_column: bool, rng: np.random.Generator) -> None:
    op = jax.jit(jq.qlinear_matmul)
    for _ in range(10):
        arguments = draw(rng, names, per_column, (5,))
        floats = [*arguments[:6], None, None, arguments[8]]
        equal(op(*arguments), multiply(*arguments))
        equal(op(*floats), multiply(*floats))
        if names in KERNELS:
            feeds = [*arguments[:6], arguments[8], *arguments[6:8]]
            equal(onnx_runtime.ask("QGemm", feeds, names[0], "com.microsoft"), multiply(*arguments))
            feeds[-2:] = [None, None]
            equal(onnx_runtime.ask("QGemm", feeds, F, "com.microsoft"), multiply(*floats))
        zeros = [*arguments[:8], np.zeros(7, np.int32)]
        equal(op(*arguments[:8]), multiply(*zeros))


@pytest.mark.slow
def test_transforms(rng: np.random.Generator) -> None:
    """Eager, with constants, vmap, scan, and a program that adds to the result."""
    given = [draw(rng, ("uint8", "int8"), True, (4,)) for _ in range(3)]
    stacks = [np.stack(parts) for parts in zip(*given, strict=True)]
    for keep in (True, False):
        want = np.stack([multiply(*(g if keep else [*g[:6], None, None, g[8]])) for g in given])

        def call(*args: Any, keep: bool = keep) -> jax.Array:
            given: Any = args if keep else (*args[:6], None, None, args[8])
            return jq.qlinear_matmul(*given)

        equal(np.stack([np.asarray(call(*g)) for g in given]), want)
        constants = jax.jit(lambda a, call=call: call(a, *given[0][1:]))
        equal(constants(given[0][0]), want[0])
        equal(jax.jit(jax.vmap(call))(*stacks), want)
        scanned = jax.jit(lambda s, call=call: lax.scan(lambda carry, xs: (carry, call(*xs)), None, s)[1])
        equal(scanned(tuple(map(jnp.asarray, stacks))), want)
        added = jax.jit(lambda *args, call=call: (call(*args), call(*args).astype(jnp.float32) + F(0.1)))
        y, after = added(*given[0])
        equal(y, want[0])
        equal(after, np.asarray(y).astype(F) + F(0.1))


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 1, 3)])
def test_ranks(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    arguments = draw(rng, ("uint8", "int8"), False, shape)
    equal(jq.qlinear_matmul(*arguments), multiply(*arguments))
    floats = [*arguments[:6], None, None, arguments[8]]
    equal(jq.qlinear_matmul(*floats), multiply(*floats))


def test_a_sum_of_nothing_is_the_bias() -> None:
    """ONNX Runtime returns zeros."""
    a, b, bias = np.zeros((2, 0), np.uint8), np.zeros((0, 3), np.int8), np.array([100, -3, 5], np.int32)
    y = jq.qlinear_matmul(a, 0.5, 1, b, 0.5, 1, 0.5, 9, bias)  # steps of 0.25: 50, -1.5, 2.5
    assert y.tolist() == [[59, 7, 11]] * 2
    assert jq.qlinear_matmul(a, 0.5, 1, b, 0.5, 1, None, None, bias).tolist() == [[25, -0.75, 1.25]] * 2


def test_gradients_of_the_scales(rng: np.random.Generator) -> None:
    arguments = draw(rng, ("uint8", "int8"), True, (4,))
    arguments[8] = rng.integers(10**6, 2 * 10**6, 7).astype(np.int32)  # all products are positive: no sum cancels
    a_scale, b_scale = jnp.asarray(arguments[1]), jnp.asarray(arguments[4])

    a, _, a_point, b, _, b_point, _, _, bias = arguments

    def total(s: jax.Array, t: jax.Array) -> jax.Array:
        return jq.qlinear_matmul(a, s, a_point, b, t, b_point, None, None, bias).sum()

    got = jax.grad(total, (0, 1))(a_scale, b_scale)
    values = multiply(a, F(1), a_point, b, np.ones(7, F), b_point, None, None, bias)
    np.testing.assert_allclose(got[0], (values * arguments[4]).sum(), rtol=1e-5)
    np.testing.assert_allclose(got[1], values.sum(0) * arguments[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"bias": np.ones(3, F)}, "bias: expected dtype int32"),
        ({"bias": np.ones(4, np.int32)}, r"bias: expected shape \(3,\)"),
        ({"y_scale": None}, "y_scale: expected an array, got NoneType"),
        ({"y_zero_point": None}, "y_zero_point: expected an array, got NoneType"),
    ],
)
def test_errors(changes: dict[str, Any], text: str) -> None:
    arguments = {"a": np.ones((2, 4), np.uint8), "b": np.ones((4, 3), np.uint8), "bias": np.ones(3, np.int32)}
    for name in ("a", "b", "y"):
        arguments |= {f"{name}_scale": F(1), f"{name}_zero_point": np.uint8(1)}
    with pytest.raises((TypeError, ValueError), match=rf"jaxquant.qlinear_matmul: {text}"):
        jq.qlinear_matmul(**{**arguments, **changes})


def test_float8_takes_neither_a_bias_nor_a_float_result() -> None:
    a = jnp.ones((2, 2), jnp.float8_e4m3fn)
    zero = jnp.zeros((), jnp.float8_e4m3fn)
    with pytest.raises(TypeError, match="bias: expected None, because a is float8"):
        jq.qlinear_matmul(a, 1.0, zero, a, 1.0, zero, 1.0, zero, jnp.ones(2, jnp.int32))
    with pytest.raises(TypeError, match="y_zero_point: expected an array"):
        jq.qlinear_matmul(a, 1.0, zero, a, 1.0, zero, None, None)
