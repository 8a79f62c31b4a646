"""SmoothQuant and AWQ: formulas in numpy, and no change of the float function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq

from ..oracles import ptq_text

F32 = np.float32
INT4 = jq.QuantSpec("int4", jq.PerAxis(1))


def sample(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return a weight, and inputs of which some are much larger than others."""
    return rng.normal(size=(16, 8)).astype(F32), (rng.normal(size=(64, 16)) * np.exp(rng.normal(size=16) * 2)).astype(
        F32
    )


def find_moments(x: np.ndarray, groups: bool = False) -> Any:
    moments = ptq.second_moments(groups=groups)
    return moments.finalize(moments.update(moments.init(x), x))


def test_smoothquant(rng: np.random.Generator) -> None:
    w, x = sample(rng)
    x_max = np.abs(x).max(0)
    for alpha in (0.0, 0.5, 0.8, 1.0):
        scale = np.asarray(ptq.smoothquant(w, x_max, alpha), np.float64)
        expected = x_max.astype(np.float64) ** alpha / np.abs(w).max(1).astype(np.float64) ** (1 - alpha)
        np.testing.assert_allclose(scale[:, 0], expected / np.exp(np.mean(np.log(expected))), rtol=1e-4)
        product = (x / scale[:, 0]) @ (w * scale)
        np.testing.assert_allclose(product, x @ w, rtol=0, atol=1e-5 * np.abs(x @ w).max())
    several = ptq.smoothquant((w, 3 * w[:, :2]), x_max)
    np.testing.assert_allclose(several, ptq.smoothquant(np.concatenate([w, 3 * w[:, :2]], 1), x_max))
    kernel = rng.normal(size=(3, 3, 16, 4)).astype(F32)
    assert ptq.smoothquant(kernel, x_max).shape == (1, 1, 16, 1)
    assert ptq.smoothquant(w.T, x_max, channel=1).shape == (1, 16)


def test_smoothquant_of_dead_inputs(rng: np.random.Generator) -> None:
    w, x = sample(rng)
    w[2], x[:, 5] = 0, 0
    scale = np.asarray(ptq.smoothquant(w, np.abs(x).max(0)))
    assert (scale[2], scale[5]) == (1, 1)
    assert np.isfinite(scale).all()
    x_max = jnp.abs(x).max(0).at[3].set(jnp.nan)
    scale = np.asarray(jax.jit(lambda w, m: ptq.smoothquant(w, m))(w, x_max))
    assert np.isnan(scale[3]).all()


def find_error(w: np.ndarray, scale: Any, x: np.ndarray, spec: Any) -> float:
    values = np.asarray(jq.quantize(jnp.asarray(w * scale), spec).dequantize(), np.float64) / np.asarray(
        scale, np.float64
    )
    return ptq_text.find_objective((w - values).reshape(-1, w.shape[-1]).T, x.T @ x / len(x))


@pytest.mark.slow
def test_awq_is_the_best_candidate(rng: np.random.Generator) -> None:
    w, x = sample(rng)
    scale = np.asarray(ptq.awq(w, find_moments(x), INT4, steps=5))
    size = np.abs(x).mean(0, dtype=np.float64)
    size /= np.exp(np.log(size).mean())
    costs = [find_error(w, (size**a)[:, None].astype(F32), x, INT4) for a in np.arange(5) / 5]
    np.testing.assert_allclose(find_error(w, scale, x, INT4), min(costs), rtol=1e-2)
    assert min(costs) < costs[0]


@pytest.mark.slow
def test_awq_of_convolutions(rng: np.random.Generator) -> None:
    w = rng.normal(size=(3, 3, 4, 6)).astype(F32)
    x = (rng.normal(size=(64, 3, 3, 4)) * np.exp(rng.normal(size=4))).astype(F32).reshape(64, 36)
    spec = jq.QuantSpec("int4", jq.PerAxis(3))
    scale = ptq.awq(w, find_moments(x), spec, channel=2)
    assert scale.shape == (1, 1, 4, 1)
    assert find_error(w, scale, x, spec) <= find_error(w, np.ones((1, 1, 4, 1), F32), x, spec)
    grouped = rng.normal(size=(2, 2, 3, 4)).astype(F32)
    inputs = rng.normal(size=(32, 2, 12)).astype(F32) ** 3
    scale = ptq.awq(grouped, find_moments(inputs, groups=True), spec, channel=2)
    assert scale.shape == (1, 1, 3, 4)
    np.testing.assert_array_equal(scale[..., 0], scale[..., 1])  # the outputs of a group share their inputs


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda w, x: ptq.smoothquant(w, np.ones(3, F32)), r"smoothquant: x_max: expected shape \(16,\)"),
        (lambda w, x: ptq.smoothquant(w, np.full(16, np.nan, F32)), "smoothquant: x_max: expected finite"),
        (lambda w, x: ptq.smoothquant(w, np.ones(16, F32), 2.0), "smoothquant: alpha: expected a number from 0"),
        (lambda w, x: ptq.smoothquant((), np.ones(16, F32)), "smoothquant: w: expected one or more"),
        (lambda w, x: ptq.smoothquant((w, w[:2]), np.ones(16, F32)), "smoothquant: w: expected weights of rank 2"),
        (lambda w, x: ptq.smoothquant(w, np.ones(16, F32), channel=2), "smoothquant: channel: expected an integer"),
        (lambda w, x: ptq.awq(w, x, INT4), "awq: moments: expected a ptq.Moments, got ndarray"),
        (lambda w, x: ptq.awq(w, find_moments(x), INT4, channel=1), "awq: channel: expected axes that are summed"),
        (lambda w, x: ptq.awq(w, find_moments(x[:, :3]), INT4), r"awq: hessian: expected shape \(16, 16\)"),
    ],
)  # fmt: skip
def test_errors(rng: np.random.Generator, call: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^jaxquant\.ptq\.{text}"):
        call(*sample(rng))
