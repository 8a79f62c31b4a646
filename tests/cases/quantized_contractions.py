"""Problems without rounding in float32, so that two ways to compute a gradient must agree bit for bit.

Scales are powers of two, x is at multiples of a quarter step (including ties, bounds, and numbers out of range), and
cotangents are small integers. So each product and each sum is a multiple of a power of two, below 2**24 times it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

F32 = np.float32


def key(rng: np.random.Generator) -> jax.Array:
    return jax.random.key(int(rng.integers(2**31)))


def quarters(rng: np.random.Generator, spec: jq.QuantSpec, scale: Any, point: int, shape: tuple[int, ...]) -> Any:
    """Sample x at quarter steps, one in eight at or near a bound of the codes or two steps out of range."""
    low, high = (int(b) - point for b in spec.bounds)
    inner = rng.integers(4 * low, 4 * high + 1, shape) / 4
    at_ends = rng.choice([low, high], shape) + rng.integers(-3, 4, shape) / 4
    beyond = rng.choice([low - 2, high + 2], shape)
    chance = rng.random(shape)
    steps = np.where(chance < 0.125, beyond, np.where(chance < 0.25, at_ends, inner))
    return (steps * scale).astype(F32)


def whole(rng: np.random.Generator, shape: tuple[int, ...], most: int = 2) -> Any:
    """Sample cotangents."""
    return rng.integers(-most, most + 1, shape).astype(F32)


def faked(quantizer: jq.Quantizer | None, x: Any) -> Any:
    """Return the values that one operand represents, with the gradient of `fake_quantize`."""
    return x if quantizer is None else quantizer(x)


def both_ways(
    quantized: Callable[..., Any], floats: Callable[..., Any], xs: Sequence[Any], quantizers: Sequence[Any], g: Any
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return (y, cotangents) of `quantized(*xs, *quantizers)`, and of `floats` of the fake-quantized operands."""
    parts = [None if q is None else jax.tree.flatten(q) for q in quantizers]
    leaves = [[] if p is None else p[0] for p in parts]

    def rebuilt(leaves: Any) -> list[Any]:
        return [None if p is None else jax.tree.unflatten(p[1], v) for p, v in zip(parts, leaves, strict=True)]

    def contract(xs: Any, leaves: Any) -> Any:
        return quantized(*xs, *rebuilt(leaves))

    def contract_floats(xs: Any, leaves: Any) -> Any:
        return floats(*(faked(q, x) for q, x in zip(rebuilt(leaves), xs, strict=True)))

    results = []
    for way in (contract, contract_floats):
        y, pull = jax.vjp(way, list(xs), leaves)
        results.append((y, pull(jnp.asarray(g, y.dtype))))
    return results[0], results[1]


def check_equal(actual: Any, expected: Any) -> None:
    """Compare dtypes, shapes and bits, except the sign of 0. Integers and keys have float0 cotangents."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for leaf, expected_leaf in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (leaf.dtype, leaf.shape) == (expected_leaf.dtype, expected_leaf.shape)
        if leaf.dtype != jax.dtypes.float0:
            np.testing.assert_array_equal(np.asarray(leaf, F32), np.asarray(expected_leaf, F32))


def rules(rng: np.random.Generator) -> dict[str, Any]:
    """Return all rules. Each rule that samples has its own key."""
    return {
        "straight": jq.StraightThrough(),
        "identity": jq.StraightThrough(clip=False),
        "lsq": jq.LSQ(),
        "lsq of 1000": jq.LSQ(elements=1000),
        "lsq+": jq.LSQPlus(),
        "pact": jq.PACT(),
        "stochastic": jq.StochasticRounding(key(rng)),
        "stochastic identity": jq.StochasticRounding(key(rng), clip=False),
    }
