"""Training in float8: e4m3 forward, e5m2 backward, with current and delayed scales, against numpy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..oracles.cotangents import E4M3, E5M2, check_product

F32 = np.float32
E4, E5 = jq.QuantSpec("float8_e4m3fn"), jq.QuantSpec("float8_e5m2")
MATRIX = (((1,), (0,)), ((), ()))


def draw(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, w = rng.standard_normal((16, 48)).astype(F32), rng.standard_normal((48, 24)).astype(F32)
    return x, w, (rng.standard_normal((16, 24)) * np.exp2(rng.integers(-12, 3, (16, 24)))).astype(F32)


@pytest.mark.parametrize("way", ["dot_general", "einsum"])
def test_current_scaling(way: str, rng: np.random.Generator) -> None:
    x, w, g = draw(rng)
    backward = jq.Float8Backward()

    @jax.jit
    def run(x: Any, w: Any, g: Any) -> Any:
        if way == "einsum":
            call = lambda x, w: jq.quantized_einsum("bi,io->bo", x, w, specs=(E4, E4), backward=backward)  # noqa: E731
        else:
            call = functools.partial(
                jq.quantized_dot_general, dimension_numbers=MATRIX, lhs_spec=E4, rhs_spec=E4, backward=backward
            )
        y, pull = jax.vjp(call, x, w)
        return y, pull(g)

    y, (dx, dw) = run(x, w, g)
    a, b, q = E4M3(x), E4M3(w), E5M2(g)
    check_product(y, a, b)
    check_product(dx, q, b.T)
    check_product(dw, a.T, q)


def test_delayed_scaling(rng: np.random.Generator) -> None:
    """The scale comes from the largest magnitude of the last steps; what saturates gets no gradient."""
    histories = [jq.AmaxHistory.start(2), jq.AmaxHistory.start(2)]

    @jax.jit
    def step(histories: Any, x: Any, w: Any, g: Any) -> Any:
        def call(x: Any, w: Any) -> Any:
            specs = [history.make_quantizer(E4) for history in histories]
            return jq.quantized_dot_general(
                x, w, MATRIX, lhs_spec=specs[0], rhs_spec=specs[1], backward=jq.Float8Backward()
            )

        y, pull = jax.vjp(call, x, w)
        return [h.update(v) for h, v in zip(histories, (x, w), strict=True)], y, pull(g)

    seen: list[list[float]] = [[], []]
    for number in range(4):
        x, w, g = draw(rng)
        x = x * F32(2.0 ** (1 - number))
        amax = [max(s[-2:], default=448.0) for s in seen]  # before the first step the scale is 1
        histories, y, (dx, dw) = step(histories, x, w, g)
        a, b = E4M3(x, amax=amax[0]), E4M3(w, amax=amax[1])
        q = E5M2(g)
        check_product(y, a, b)
        # Values that round beyond the largest code have no gradient.
        inside = [np.abs(v / (F32(m) / F32(448))) <= 464 for v, m in ((x, amax[0]), (w, amax[1]))]
        check_product(dx, q, b.T) if inside[0].all() else None
        np.testing.assert_array_equal(np.asarray(dx)[~inside[0]], 0)
        np.testing.assert_array_equal(np.asarray(dw)[~inside[1]], 0)
        assert np.asarray(dx)[inside[0]].any()
        for s, v in zip(seen, (x, w), strict=True):
            s.append(float(np.abs(v).max()))


def test_gradient_loop_learns(rng: np.random.Generator) -> None:
    """A small regression in float8 converges, and save_codes keeps no floats of its operands."""
    x = rng.standard_normal((64, 16)).astype(F32)
    target = x @ rng.standard_normal((16, 4)).astype(F32)

    def loss(w: Any) -> jax.Array:
        y = jq.quantized_dot_general(x, w, MATRIX, lhs_spec=E4, rhs_spec=E4, backward=jq.Float8Backward())
        return jnp.mean((y - target) ** 2)

    @jax.jit
    def train(w: Any) -> Any:
        return jax.lax.scan(lambda w, _: (w - 0.2 * jax.grad(loss)(w), None), w, None, 60)[0]

    w = jnp.zeros((16, 4))
    assert float(loss(train(w))) < 0.01 * float(loss(w))


def test_history() -> None:
    history = jq.AmaxHistory.start(3).update(jnp.asarray([1.0, -3.0])).update(jnp.zeros((0, 2)))
    np.testing.assert_array_equal(history.amax, [0, 3, 0])
    quantizer = history.make_quantizer(E5, margin=1)
    np.testing.assert_array_equal(np.ravel(quantizer.scale), F32(6) / F32(57344))
    assert float(np.ravel(jq.AmaxHistory.start(3).make_quantizer(E4).scale)[0]) == 1.0
    assert jax.tree.leaves(history)[0].shape == (3,)


def test_errors() -> None:
    x = np.ones((2, 2), F32)
    call = functools.partial(jq.quantized_dot_general, x, x, MATRIX)
    cases = (
        ({"lhs_spec": E4, "rhs_spec": None}, r"FloatBackward\(\), because Float8Backward\(\) needs two quantized"),
        ({"lhs_spec": E4, "rhs_spec": jq.QuantSpec("int8")}, r"Float8Backward\(\) needs operands in float8 or float4"),
    )
    for specs, match in cases:
        with pytest.raises(ValueError, match=match):
            call(**specs, backward=jq.Float8Backward())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Int8Backward\(\) needs operands in integers, got .*float8_e4m3fn"):
        call(lhs_spec=E4, rhs_spec=E4, backward=jq.Int8Backward())
    with pytest.raises(TypeError, match=r"Float8Backward: dtype: expected .*float8_e4m3fn.*got int8"):
        jq.Float8Backward("int8")
    with pytest.raises(ValueError, match=r"AmaxHistory.start: length: expected a positive int, got 0"):
        jq.AmaxHistory.start(0)
    with pytest.raises(ValueError, match=r"AmaxHistory.make_quantizer"):
        jq.AmaxHistory.start(3).make_quantizer(jq.QuantSpec("float8_e4m3fn", jq.PerAxis(0)))
