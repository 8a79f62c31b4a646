"""The moving average of the extremes: its weights, its bits, its merges, and the time steps of a recurrent layer."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant.flax import Observed
from jaxquant.flax import linen as qnn

F32 = np.float32
INT4 = jq.QuantSpec(jnp.int4)
COLUMNS = jq.QuantSpec(jnp.int8, jq.PerAxis(-1))


def feed(cal: jq.calibration.Calibrator, *batches: Any) -> Any:
    state = cal.init(batches[0])
    for batch in batches:
        state = cal.update(state, batch)
    return state


def check_equal(a: Any, b: Any) -> None:
    for actual, expected in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def columns(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x.min(axis=(0, 1), keepdims=True), x.max(axis=(0, 1), keepdims=True)


def test_every_operation_is_rounded_once(rng: np.random.Generator) -> None:
    """numpy's float32, step by step; and the weighted mean in float64, within the roundings of the steps."""
    cal = jq.calibration.moving_average(COLUMNS, decay=0.9)
    batches = rng.uniform(-1, 1, (20, 3, 5, 6)).astype(F32)
    low, high = columns(batches[0])
    weight = share = F32(1 - 0.9)
    for batch in batches[1:]:
        weight = F32(0.9) * weight + share
        low, high = (m + share / weight * (end - m) for m, end in zip((low, high), columns(batch), strict=True))
    state = feed(cal, *batches)
    check_equal(tuple(state), (low, high, np.full_like(low, weight)))
    ranges = cal.finalize(state)
    check_equal(tuple(ranges), (low, high))
    weights = 0.9 ** np.arange(19.0, -1, -1)
    for actual, ends in zip(ranges, zip(*map(columns, batches), strict=True), strict=True):
        expected = np.average(np.stack(ends).astype(np.float64), axis=0, weights=weights)
        # A step makes five roundings of numbers below 2, and what it is given fades.
        np.testing.assert_allclose(actual, expected, rtol=0, atol=20 * 5 * 2.0**-24 * 2)
    check_equal(cal.update(state, np.zeros((0, 5, 6), F32)), state)


def test_the_first_batch_counts_no_more_than_others() -> None:
    cal = jq.calibration.moving_average(INT4)
    zero, batch = np.zeros(4, F32), np.array([-1, 1], F32)
    lo, hi = cal.finalize(feed(cal, zero, batch, batch, batch))
    # Nearly 3 / 4: the weights are 0.99**3, 0.99**2, 0.99 and 1. Not 1 - 0.99**3, as if all began with zeros.
    want = 1 - 0.99**3 / sum(0.99**n for n in range(4))
    np.testing.assert_allclose([-lo[0], hi[0]], want, rtol=1e-6)
    for x in (batch, np.array([-0.0, 1e-40], F32), np.array([0.1, 3e38], F32)):
        check_equal(tuple(cal.finalize(feed(cal, x))), (x[:1], x[1:]))  # one batch: its own extremes, to the bit
    last = jq.calibration.moving_average(INT4, decay=0.0)
    assert float(last.finalize(feed(last, np.array([1, 9], F32), np.array([2, 3], F32))).hi[0]) == 3
    long = jq.calibration.moving_average(INT4, decay=1 - 1e-9)  # a plain mean
    ends = [float(long.finalize(feed(long, *(batch * n for n in range(1, last + 1)))).hi[0]) for last in (2, 3, 7)]
    np.testing.assert_allclose(ends, [1.5, 2, 4], rtol=1e-6)


def test_merging_adds_the_weights(rng: np.random.Generator) -> None:
    """Each batch keeps the weight that it has in its own state: in any order, and so over a mapped axis."""
    cal = jq.calibration.moving_average(INT4, decay=0.5)
    batches = rng.uniform(1, 2, (4, 10)).astype(F32)
    a, b, empty = feed(cal, *batches[:3]), feed(cal, batches[3]), cal.init(batches[0])
    merged = cal.merge(a, b)
    weights = [0.125, 0.25, 0.5, 0.5]
    np.testing.assert_allclose(merged.weight, [sum(weights)], rtol=0)
    for actual, ends in zip(merged[:2], (batches.min(axis=1), batches.max(axis=1)), strict=True):
        np.testing.assert_allclose(actual, [np.average(ends.astype(np.float64), weights=weights)], rtol=1e-6)
    check_equal(cal.merge(b, a), merged)
    check_equal(cal.merge(a, empty), a)
    check_equal(cal.merge(empty, empty), empty)
    updated = cal.update(merged, batches[0])
    weights = [w / 2 for w in weights] + [0.5]
    expected = np.average([*batches.max(axis=1), batches[0].max()], weights=weights)
    np.testing.assert_allclose(updated.high, [expected], rtol=1e-6)
    stacked = jax.tree.map(lambda *v: jnp.stack(v), a, b, empty)
    mapped = jax.vmap(lambda s: cal.all_reduce(s, "d"), axis_name="d")(stacked)
    for actual, expected in zip(mapped, merged, strict=True):
        np.testing.assert_allclose(actual, np.stack([expected] * 3), rtol=1e-6)


def test_an_infinity_stays_one() -> None:
    cal = jq.calibration.moving_average(INT4)
    batches = [np.array(x, F32) for x in ([1, np.inf], [1, 2], [-np.inf, 0])]
    for state in (feed(cal, *batches), cal.merge(feed(cal, batches[0]), feed(cal, *batches[1:]))):
        with pytest.raises(ValueError, match="an infinity"):
            cal.finalize(state)


class Cell(nn.RNNCellBase):
    """An Elman network's step, whose two layers are made by `dense`."""

    dense: Any

    @nn.compact
    def __call__(self, carry: Any, x: Any) -> Any:
        """Returns the hidden state, twice."""
        hidden = jnp.tanh(self.dense(16, name="hidden")(carry) + self.dense(16, name="input")(x))
        return hidden, hidden

    @nn.nowrap
    def initialize_carry(self, rng: Any, input_shape: tuple[int, ...]) -> jax.Array:
        """Returns zeros."""
        return jnp.zeros((*input_shape[:-1], 16), F32)

    @property
    def num_feature_axes(self) -> int:
        """Returns the number of dimensions of an example."""
        return 1


@pytest.mark.slow
def test_the_time_steps_of_a_recurrent_layer(fixed_rng: np.random.Generator) -> None:
    """Each is a batch, and the first hidden state is 0: after one pass it may not hold the range down."""
    x = jnp.asarray(fixed_rng.normal(size=(5, 8, 16, 12)), F32)  # five batches of 8 sequences of 16 steps
    plain = nn.RNN(Cell(nn.Dense))
    params = jax.jit(plain.init)(jax.random.key(0), x[0])
    want = jax.jit(plain.apply)(params, x[-1])

    def find_error(source: Observed) -> float:
        dense = functools.partial(
            qnn.Dense, weight_spec=COLUMNS, activation_spec=jq.QuantSpec(jnp.int8), activation_range=source
        )
        cell = Cell(dense)
        ranges = jax.jit(cell.init)(jax.random.key(0), jnp.zeros((8, 16), F32), x[0, :, 0])["ranges"]
        observing = nn.RNN(cell, variable_broadcast="params", variable_carry="ranges")
        observe = jax.jit(functools.partial(observing.apply, mutable=["ranges"]))
        variables = {**params, "ranges": {"cell": ranges}}
        for batch in x[:-1]:
            variables = {**params, **observe(variables, batch)[1]}
        y = jax.jit(nn.RNN(cell, variable_broadcast=("params", "ranges")).apply)(variables, x[-1])
        return float(jnp.linalg.norm(y - want) / jnp.linalg.norm(want))

    errors = {source: find_error(source) for source in (Observed(), Observed(jq.calibration.minmax))}
    assert errors[Observed(jq.calibration.minmax)] < 0.03, errors
    assert errors[Observed()] < 0.06, errors  # the mean of the largest values of the steps lies below the largest
