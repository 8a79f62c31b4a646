"""Gradient descent on the error of the results: what is learned, what is minimized, and the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._arrays.scale_from_range import find_least_scale
from ..._arrays.spec import QuantSpec
from ...calibration import loop
from ...transform.session import Signature, is_quantized
from . import learned_codes

_SUMS = 32  # random sums of results, which estimate a curvature to about a quarter of it
_DECAY = (np.float32(0.9), np.float32(0.99))  # Adam's; the second is short, because the steps are few


class Variables(NamedTuple):
    """What is learned of each parameter, by its place.

    Attributes:
        floats: of a parameter in floats, the change of each element; of codes, that of each scale.
        codes: the change of each code in steps, if codes are learned.
    """

    floats: dict[int, jax.Array]
    codes: dict[int, jax.Array]


class _State(NamedTuple):
    """The variables, and the moving averages of Adam for those of floats."""

    variables: Variables
    means: dict[int, jax.Array]
    squares: dict[int, jax.Array]


class Call(NamedTuple):
    """A batch, and the results in floats."""

    arguments: Signature
    expected: list[jax.Array]


class Problem(NamedTuple):
    """What is minimized.

    Attributes:
        compute_error: a function of the variables, the parameters and a batch.
        compute_sum: a function of the same, and of a key, that returns a random sum of the results: the squares of its
            slopes have the curvature of the error as their mean.
        specs: the specs of the codes that are learned.
        values: the parameters: floats, or quantized arrays if their codes or scales are learned.
    """

    compute_error: Callable[[Variables, Sequence[Any], Call], jax.Array]
    compute_sum: Callable[[Variables, Sequence[Any], Call, jax.Array], jax.Array]
    specs: dict[int, QuantSpec]
    values: Sequence[Any]


def make_problem(
    specs: dict[int, QuantSpec], run_function: Callable[..., list[jax.Array]], values: Sequence[Any]
) -> Problem:
    """Return what is minimized: the squared error of the results, as a part of their squares.

    Args:
        specs: the specs of the codes that are learned.
        run_function: the float function.
        values: the parameters: floats, or quantized arrays if their codes or scales are learned.
    """

    def run(variables: Variables, values: Sequence[Any], call: Call) -> list[jax.Array]:
        changed = list(values)
        for leaf, variable in variables.floats.items():
            x = values[leaf]
            if not is_quantized(x):
                changed[leaf] = change_floats(jnp.asarray(x), variable)
            elif leaf not in specs:
                # The scale is rounded to its dtype, as in the result.
                changed[leaf] = x.replace(scale=change_floats(x.scale, variable)).dequantize()
        for leaf, change in variables.codes.items():
            q, variable = values[leaf], variables.floats.get(leaf)
            scale = q.scale if variable is None else change_floats(q.scale, variable)
            changed[leaf] = learned_codes.dequantize_change(q, specs[leaf], change, scale)
        return run_function(changed, call.arguments)

    def find_size(call: Call) -> jax.Array:
        size = jnp.asarray(sum(jnp.sum(z**2) for z in call.expected))
        return jnp.where(size > 0, size, 1)

    def compute_error(variables: Variables, values: Sequence[Any], call: Call) -> jax.Array:
        results = run(variables, values, call)
        return sum(jnp.sum((y - z) ** 2) for y, z in zip(results, call.expected, strict=True)) / find_size(call)

    def compute_sum(variables: Variables, values: Sequence[Any], call: Call, key: jax.Array) -> jax.Array:
        results = run(variables, values, call)
        keys = jax.random.split(key, len(results))
        signs = [jax.random.rademacher(k, y.shape, y.dtype) for k, y in zip(keys, results, strict=True)]
        total = sum(jnp.sum(y * sign) for y, sign in zip(results, signs, strict=True))
        return total * jnp.sqrt(2 / find_size(call))

    return Problem(compute_error, compute_sum, specs, values)


def change_floats(x: jax.Array, variable: jax.Array) -> jax.Array:
    """Return floats with the change that a variable says."""
    wide = x.astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(wide**2))
    moved = wide + jnp.where(size > 0, size, 1) * variable
    # A product that x's dtype rounds to 0 would not be positive.
    product = jnp.maximum(wide * jnp.exp(variable), find_least_scale(x.dtype))
    return jnp.where(jnp.all(wide > 0), product, moved).astype(x.dtype)


def minimize(
    problem: Problem, start: Variables, calls: Sequence[Call], held_out: Sequence[Call] | None, rounds: int,
    rates: tuple[float, float], progress: bool | None,
) -> tuple[Variables, tuple[float, float]]:  # fmt: skip
    """Return the variables after the last step, or after the best round, and the mean error before and after."""
    measure = jax.jit(problem.compute_error)
    move_downhill = _make_step(problem)

    def measure_all(variables: Variables) -> float:
        measured = calls if held_out is None else held_out
        return float(np.mean([float(measure(variables, problem.values, call)) for call in measured]))

    zeros = jax.tree.map(jnp.zeros_like, start.floats)
    state, before, count = _State(start, zeros, zeros), measure_all(start), rounds * len(calls)
    curvatures = _measure_curvatures(problem, start, calls)
    best, least = start, before
    bar = loop.Bar("tuning", count, progress)
    try:
        for index in range(count):
            part = (1 + math.cos(math.pi * index / count)) / 2
            plan = (np.float32(index + 1), *(np.float32(rate * part) for rate in rates))
            state = move_downhill(state, plan, problem.values, curvatures, calls[index % len(calls)])
            bar.count_step()
            # On the batches that it learns from, an error between two rounds says nothing that the last one does not.
            is_measured = (index + 1) % len(calls) == 0 if held_out is not None else index + 1 == count
            error = measure_all(state.variables) if is_measured else math.nan
            # A NaN is not smaller, so that steps that diverge change nothing.
            if error < least:
                best, least = state.variables, error
    finally:
        bar.stop()
    return best, (before, least)


def _measure_curvatures(problem: Problem, start: Variables, calls: Sequence[Call]) -> dict[int, jax.Array]:
    """Return the second derivative of the error for each code, without that of the function itself."""
    curvatures = jax.tree.map(jnp.zeros_like, start.codes)
    if not curvatures:
        return curvatures

    # The variables are an argument, because as constants of the program they would be as large as the weights.
    @jax.jit
    def add(curvatures: Any, variables: Variables, values: Sequence[Any], call: Call, key: jax.Array) -> Any:
        slopes = jax.grad(problem.compute_sum)(variables, values, call, key).codes
        return jax.tree.map(lambda x, slope: x + slope**2 / _SUMS, curvatures, slopes)

    for index, key in enumerate(jax.random.split(jax.random.key(0), _SUMS)):
        curvatures = add(curvatures, start, problem.values, calls[index % len(calls)], key)
    return curvatures


def _make_step(problem: Problem) -> Callable[..., _State]:
    """Return a step, as a function of its state, the number of the step with its rates, values, curvatures and a batch.

    Adam moves the floats, and the codes move by a part of their way to the minimum.
    """

    @jax.jit
    def move_downhill(
        state: _State, plan: tuple[Any, Any, Any], values: Sequence[Any], curvatures: Any, call: Call
    ) -> _State:
        index, rate, code_rate = plan
        # Adam is written out, because optax is a dependency of jaxquant.optim alone.
        slopes, codes = jax.grad(problem.compute_error)(state.variables, values, call)
        means = jax.tree.map(lambda m, g: _DECAY[0] * m + (1 - _DECAY[0]) * g, state.means, slopes)
        squares = jax.tree.map(lambda s, g: _DECAY[1] * s + (1 - _DECAY[1]) * g**2, state.squares, slopes)

        def move(variable: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
            size = jnp.sqrt(square / (1 - _DECAY[1] ** index)) + np.float32(1e-12)
            return variable - rate * mean / (1 - _DECAY[0] ** index) / size

        floats = jax.tree.map(move, state.variables.floats, means, squares)
        moved = {
            leaf: learned_codes.move_change(
                values[leaf], problem.specs[leaf], change, codes[leaf], curvatures[leaf], code_rate
            )
            for leaf, change in state.variables.codes.items()
        }
        return _State(Variables(floats, moved), means, squares)

    return move_downhill
