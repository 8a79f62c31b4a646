"""Products of floats with weights that have a permutation, or blocks along both axes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

F32 = np.float32


def permute(q: jq.QuantizedArray, rng: np.random.Generator, axis: int = -2) -> jq.QuantizedArray:
    permutation = jnp.asarray(rng.permutation(q.shape[axis]), jnp.int32)
    return q.replace(permutation=permutation, permuted_axis=axis)


def draw(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(0.1, 1, shape), F32)


def quantize(w: jax.Array, dtype: Any, axis: Any, size: Any, **options: Any) -> jq.QuantizedArray:
    return jq.quantize(w, jq.QuantSpec(dtype, jq.Blocked(axis, size), **options))


SHAPE = (96, 80)
INNER = jq.QuantSpec("uint6", jq.Blocked(0, 2))
CASES: dict[str, Callable[[jax.Array, np.random.Generator], jq.QuantizedArray]] = {
    "GPTQ": lambda w, rng: permute(quantize(w, "uint4", 0, 32), rng),
    "GPTQ in words": lambda w, rng: permute(quantize(w, "uint4", 0, 32), rng).pack(),
    "3 bits in words": lambda w, rng: permute(quantize(w, "int3", 0, 16), rng),
    "columns": lambda w, rng: permute(quantize(w, "int8", 0, 32), rng, -1),
    "stored transposed": lambda w, rng: permute(quantize(w, "int8", 0, 32), rng).store_last(0),
    "offset": lambda w, rng: permute(quantize(w, "uint4", 0, 32, offset=True), rng),
    "nested": lambda w, rng: permute(quantize(w, "uint4", 0, 16, offset=True, scale_spec=INNER), rng),
    "codebook": lambda w, rng: permute(quantize(w, jq.nf4, 0, 32), rng),
    "float8 in squares": lambda w, rng: quantize(w, "float8_e4m3fn", (0, 1), 32),
    "short last blocks": lambda w, rng: quantize(w, "float8_e4m3fn", (0, 1), 36),
    "uint8 in squares": lambda w, rng: quantize(w, "uint8", (0, 1), 24),
    "squares, permuted": lambda w, rng: permute(quantize(w, "int8", (0, 1), 32), rng),
    "squares, stored transposed": lambda w, rng: quantize(w, "int8", (0, 1), 32).store_last(0),
}


def find_bound(x: Any, w: Any) -> Any:
    return np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64)) * 2.0**-20


@pytest.mark.parametrize("name", CASES)
def test_products(name: str, rng: np.random.Generator) -> None:
    q = CASES[name](draw(rng, *SHAPE), rng)
    w = np.asarray(q.dequantize(), np.float64)
    for rows in (1, 5, 40):
        x = draw(rng, rows, SHAPE[0])
        expected, bound = np.asarray(x, np.float64) @ w, find_bound(x, w)
        results = [
            jq.matmul(x, q),
            jax.jit(jq.matmul)(x, q),
            jax.vmap(jq.matmul, (0, None))(x, q),
            jax.lax.map(lambda row: jq.matmul(row, q), x),
            jq.matmul(q.T, x.T).T,
            jq.einsum("ij,jk->ki", x, q).T,
            jq.dot_general(q, x, (((0,), (1,)), ((), ()))).T,
        ]
        for y in results:
            assert (np.abs(np.asarray(y, np.float64) - expected) <= bound).all()
    # The other axis is contracted.
    x = draw(rng, 3, SHAPE[1])
    y = jq.dot_general(x, q, (((1,), (1,)), ((), ())))
    assert (np.abs(np.asarray(y, np.float64) - np.asarray(x, np.float64) @ w.T) <= find_bound(x, w.T)).all()


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, rng: np.random.Generator) -> None:
    q, x, g = CASES[name](draw(rng, *SHAPE), rng), draw(rng, 4, SHAPE[0]), draw(rng, 4, SHAPE[1])
    y, pull = jax.vjp(lambda x: jq.matmul(x, q), x)
    (dx,) = pull(g)
    w = np.asarray(q.dequantize(), np.float64)
    assert (np.abs(np.asarray(dx, np.float64) - np.asarray(g, np.float64) @ w.T) <= find_bound(g, w.T)).all()
    assert y.shape == g.shape
    if isinstance(q.scale, jq.QuantizedArray):
        return

    def multiply(scale: jax.Array) -> jax.Array:
        return jnp.sum(jq.matmul(x, q.replace(scale=scale)) * g)

    def dequantize(scale: jax.Array) -> jax.Array:
        return jnp.sum(jnp.matmul(x, q.replace(scale=scale).dequantize(), precision="highest") * g)

    gradient, expected = jax.grad(multiply)(q.scale), jax.grad(dequantize)(q.scale)
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-3 * float(jnp.abs(expected).max()))


def test_stacked_weights(rng: np.random.Generator) -> None:
    stack = [permute(quantize(draw(rng, *SHAPE), "uint4", 0, 32), rng) for _ in range(3)]
    q = jax.tree.map(lambda *leaves: jnp.stack(leaves), *stack)
    x = draw(rng, 3, 5, SHAPE[0])
    w = np.stack([np.asarray(part.dequantize(), np.float64) for part in stack])
    expected = np.asarray(x, np.float64) @ w
    for y in (jax.vmap(jq.matmul)(x, q), jax.lax.map(lambda pair: jq.matmul(*pair), (x, q)), jq.matmul(x, q)):
        assert (np.abs(np.asarray(y, np.float64) - expected) <= find_bound(x, w)).all()


@pytest.mark.parametrize("name", ["GPTQ", "GPTQ in words", "float8 in squares", "codebook", "columns"])
def test_the_experts_of_a_mixture(name: str, rng: np.random.Generator) -> None:
    stack = [CASES[name](draw(rng, *SHAPE), rng) for _ in range(3)]
    q = jax.tree.map(lambda *leaves: jnp.stack(leaves), *stack)
    x, sizes = draw(rng, 20, SHAPE[0]), jnp.asarray([7, 0, 11])
    groups = np.repeat([0, 2], [7, 11])
    w = np.stack([np.asarray(part.dequantize(), np.float64) for part in stack])
    expected = np.zeros((20, SHAPE[1]))
    expected[:18] = np.einsum("ik,ikn->in", np.asarray(x[:18], np.float64), w[groups])
    bound = np.abs(np.asarray(x, np.float64)) @ np.abs(w).max(0) * 2.0**-20
    for y in (jq.ragged_dot(x, q, sizes), jax.jit(jq.ragged_dot)(x, q, sizes)):
        assert (np.abs(np.asarray(y, np.float64) - expected) <= bound).all()
    gradient = jax.grad(lambda x: jnp.sum(jq.ragged_dot(x, q, sizes)))(x)
    np.testing.assert_allclose(gradient[:18], w[groups].sum(-1), rtol=1e-4, atol=1e-3)


LARGE = (2048, 1536)


def count_temporaries(call: Callable[..., Any], *arguments: Any) -> int:
    analysis = jax.jit(call).lower(*arguments).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    ("name", "make"),
    {
        "permutation": lambda w, rng: permute(quantize(w, "int8", 0, 128), rng),
        "permuted columns": lambda w, rng: permute(quantize(w, "int8", 0, 128), rng, -1),
        "squares": lambda w, rng: quantize(w, "float8_e4m3fn", (0, 1), 128),
        "squares, permuted": lambda w, rng: permute(quantize(w, "int8", (0, 1), 128), rng),
    }.items(),
)
def test_no_temporary_has_the_weights_size(name: str, make: Any, rows: int, rng: np.random.Generator) -> None:
    """As plain blocks along the contracted axis: of the weights in floats, which would take 12 MB, there is a part."""
    q = make(draw(rng, *LARGE), rng)
    x = draw(rng, rows, LARGE[0])
    plain = quantize(draw(rng, *LARGE), q.codes.dtype, 0, 128)
    allowed = count_temporaries(jq.matmul, x, plain) + 2**20
    used = count_temporaries(jq.matmul, x, q)
    whole = count_temporaries(lambda x, q: x @ q.dequantize(), x, q)
    assert used <= allowed < whole
    text = jax.jit(jq.matmul).lower(x, q).compile().as_text()
    assert text is not None
    # Floats and scales are gathered, not codes.
    for shape in re.findall(r"= \w+\[([\d,]+)\]\S* gather\(", text):
        assert np.prod([int(n) for n in shape.split(",")]) <= LARGE[0] * LARGE[1] // 64
