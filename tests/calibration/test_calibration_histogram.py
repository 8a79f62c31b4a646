"""The histogram under the calibrators: the same bits in any order, no count lost, none beyond 2**32 either."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant.calibration import uint64

from ..oracles import calibration_text as oracle
from ..support.matrix import mark_others_full

BINS = 64
SPEC = jq.QuantSpec(jnp.int8, jq.PerAxis(0))


def number(words: Any) -> np.ndarray:
    """Two words as Python's integers."""
    return np.asarray(np.asarray(words.high).astype(object) * 2**32 + np.asarray(words.low).astype(object), object)


def words(numbers: list[int]) -> uint64.Words:
    return uint64.Words(*(jnp.asarray([n >> s & 0xFFFFFFFF for n in numbers], jnp.uint32) for s in (0, 32)))


def check_equal(a: Any, b: Any) -> None:
    for actual, expected in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def holds(state: Any, slices: list[np.ndarray], bins: int, every: int = 1) -> None:
    """Requires the state to equal numpy's histograms of the slices, one by one."""
    rows = [v.reshape(len(slices), -1) for v in (number(state.counts), state.least, state.most) if v is not None]
    for i, x in enumerate(slices):
        # What is not counted still says how far the bins reach.
        exponent, _, _ = oracle.histogram(x, bins)
        counted = x.ravel()[::every].astype(np.float32)
        scale = oracle.width(exponent, bins)
        half = bins // 2
        size = np.floor(np.abs(counted.astype(np.float64)) / scale).astype(np.int64)
        index = np.where(counted < 0, half - 1 - size, half + size)[counted != 0]
        np.testing.assert_array_equal(rows[0][i], np.bincount(index, minlength=bins))
        assert np.asarray(state.exponent).ravel()[i] == exponent
        assert number(state.zeros).ravel()[i] == (counted == 0).sum()
        assert number(state.seen).ravel()[i] == x.size
        assert np.asarray(state.low).ravel()[i] == x.min()
        assert np.asarray(state.high).ravel()[i] == x.max()
        bits = np.abs(counted[counted != 0]).view(np.int32)
        for row, f, start in zip(rows[1:], (np.minimum, np.maximum), (2**31 - 1, 0), strict=False):
            want = np.full(bins, start, np.int32)
            f.at(want, index, bits)
            np.testing.assert_array_equal(row[i], want)


def batches(rng: np.random.Generator, shape: tuple[int, ...], n: int) -> list[np.ndarray]:
    """Of magnitudes far apart, with exact zeros, powers of two and their negatives, which lie on edges."""
    parts = []
    for _ in range(n):
        x = rng.normal(size=shape) * np.exp2(rng.integers(-40, 40, (shape[0], 1)))
        x = np.where(rng.uniform(size=shape) < 0.2, 0, x)
        edges = np.exp2(rng.integers(-20, 20, shape)) * rng.choice([-1, 1], shape)
        parts.append(np.where(rng.uniform(size=shape) < 0.2, edges, x).astype(np.float32))
    return parts


@pytest.mark.slow
@pytest.mark.parametrize("has_ends", [False, True])
def test_the_order_changes_no_bit(rng: np.random.Generator, has_ends: bool) -> None:
    """Any order of batches, split anywhere, merged in any tree: the histogram of all the data at once."""
    cal = jq.calibration.mse(SPEC, bins=BINS) if has_ends else jq.calibration.percentile(SPEC, 99, bins=BINS)
    for _ in range(5):
        data = batches(rng, (3, 40), 6)
        whole = np.concatenate(data, axis=1)
        want = cal.update(cal.init(whole), whole)
        holds(want, list(whole), BINS)
        order = rng.permutation(len(data))
        in_order = cal.init(data[0])
        for i in order:
            in_order = cal.update(in_order, data[i])
        check_equal(in_order, want)
        states = [cal.update(cal.init(x), x) for x in np.split(rng.permutation(whole, axis=1), 12, axis=1)]
        while len(states) > 1:
            a, b = (states.pop(int(rng.integers(len(states)))) for _ in range(2))
            states.append(cal.merge(a, b) if rng.integers(2) else cal.merge(b, cal.merge(cal.init(whole), a)))
        check_equal(states[0], want)


@pytest.mark.slow
def test_from_the_least_to_the_largest_number() -> None:
    info = np.finfo(np.float32)
    cal = jq.calibration.mse(jq.QuantSpec(jnp.int8), bins=BINS)
    x = np.array([info.tiny, -info.tiny, 2.0**-100, -(2.0**-100), 1, info.max, -info.max, 0], np.float32)
    for order in (x, x[::-1]):
        state = cal.init(x)
        for value in order:
            state = cal.update(state, value[None])
        holds(state, [x], BINS)
    assert np.asarray(state.exponent)[0] == 128
    assert [float(v[0]) for v in cal.finalize(state)] == [-info.max, info.max]
    small = cal.update(cal.init(x), x[:2])
    assert np.asarray(small.exponent)[0] == oracle.LEAST_EXPONENT
    assert [float(v[0]) for v in cal.finalize(small)] == [-info.tiny, info.tiny]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_floats_are_counted_as_they_are(rng: np.random.Generator, dtype: str) -> None:
    cal = jq.calibration.percentile(SPEC, 99, bins=BINS)
    x = rng.normal(size=(3, 50)).astype(jnp.dtype(dtype))
    state = cal.update(cal.init(x), x)
    holds(state, list(x.astype(np.float32)), BINS)


# shape, the spec's granularity, the slices of x as rows
LAYOUTS: dict[str, tuple[tuple[int, ...], Any, Any]] = {
    "chunks and a rest": ((3 * 2**14 + 17,), jq.PerTensor(), lambda x: [x]),
    "chunks": ((2**16,), jq.PerTensor(), lambda x: [x]),
    "one number": ((), jq.PerTensor(), lambda x: [x]),
    "long rows": ((3, 17_001), jq.PerAxis(0), list),
    "short rows": ((503, 7), jq.PerAxis(0), list),
    "columns": ((5003, 7), jq.PerAxis(1), lambda x: list(x.T)),
    "in the middle": ((17, 5, 509), jq.PerAxis(1), lambda x: list(x.transpose(1, 0, 2))),
    "apart": ((3, 50, 4), jq.PerAxis((0, 2)), lambda x: list(x.transpose(0, 2, 1).reshape(12, 50))),
    "blocks": ((4, 11), jq.Blocked(1, 4), lambda x: [row[i : i + 4] for row in x for i in (0, 4, 8)]),
    "blocks of rows": ((11, 2), jq.Blocked(0, 4), lambda x: [x[i : i + 4, j] for i in (0, 4, 8) for j in (0, 1)]),
}


THIRDS = ("chunks and a rest", "columns", "blocks")
COVERS = [(name, every) for name in LAYOUTS for every in (1, 3)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "every"), mark_others_full(COVERS, [(n, e) for n, e in COVERS if e == 1 or n in THIRDS])
)
def test_every_layout(rng: np.random.Generator, name: str, every: int) -> None:
    """And of every third element only, in the order of the slice, with the extremes of all."""
    shape, granularity, slices = LAYOUTS[name]
    x = np.asarray(np.where(rng.uniform(size=shape) < 0.3, 0, rng.normal(size=shape)), np.float32)
    cal = jq.calibration.mse(jq.QuantSpec(jnp.int8, granularity), bins=BINS, every=every)
    state = cal.update(cal.init(x), x)
    holds(state, slices(x), BINS, every)
    assert state.low.shape == jq.quantize(jnp.asarray(x), jq.QuantSpec(jnp.int8, granularity)).scale.shape


@pytest.mark.slow
def test_a_bad_slice_spoils_no_other(rng: np.random.Generator) -> None:
    cal = jq.calibration.mse(SPEC, bins=BINS)
    x = rng.normal(size=(3, 100)).astype(np.float32)
    want = cal.update(cal.init(x), x)
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        spoiled = x.copy()
        spoiled[1, 7] = value
        state = cal.merge(cal.update(cal.init(x), spoiled), cal.init(x))
        for row in (0, 2):
            check_equal(jax.tree.map(lambda v, row=row: v[row], state), jax.tree.map(lambda v, row=row: v[row], want))
        assert not np.isfinite(np.asarray(state.low) - np.asarray(state.high))[1, 0]


@pytest.mark.slow
def test_counts_beyond_32_bits(rng: np.random.Generator) -> None:
    """States merged with themselves until a slice has seen 2**45 elements; and summed over eight more."""
    cal = jq.calibration.percentile(SPEC, 90, bins=BINS)
    x = batches(rng, (2, 2**12), 1)[0]
    state = cal.update(cal.init(x), x)
    total = state
    for _ in range(33):
        total = cal.merge(total, total)
    for part in ("counts", "zeros", "seen"):
        np.testing.assert_array_equal(number(getattr(total, part)), number(getattr(state, part)) * 2**33)
    np.testing.assert_allclose(
        cal.finalize(total).hi, cal.finalize(state).hi, rtol=0, atol=float(np.max(widths(state)))
    )
    stacked = jax.tree.map(lambda v: jnp.stack([v] * 8), total)
    summed = jax.vmap(lambda s: cal.all_reduce(s, "d"), axis_name="d")(stacked)
    np.testing.assert_array_equal(number(summed.counts)[3], number(state.counts) * 2**36)


def widths(state: Any) -> np.ndarray:
    return np.ldexp(1.0, np.asarray(state.exponent)) / (state.counts.low.shape[-1] // 2)


@pytest.mark.slow
def test_sixty_four_bits_in_two_words(rng: np.random.Generator) -> None:
    """Against Python's integers, at the edges of a word and of a 16-bit limb."""
    edges = [0, 1, 2**16 - 1, 2**16, 2**31, 2**32 - 1, 2**32, 2**33 - 1, 2**48, 2**63 - 1]
    numbers = [*edges, *(int(n) for n in rng.integers(0, 2**62, 20))]
    pairs = list(itertools.product(numbers, numbers))
    a, b = words([p[0] for p in pairs]), words([p[1] for p in pairs])
    np.testing.assert_array_equal(number(uint64.add(a, b)), np.array([(p + q) % 2**64 for p, q in pairs], object))
    np.testing.assert_array_equal(number(uint64.subtract(a, b)), np.array([(p - q) % 2**64 for p, q in pairs], object))
    np.testing.assert_array_equal(uint64.is_less(a, b), [p < q for p, q in pairs])
    np.testing.assert_allclose(uint64.to_float32(a), [float(p) for p, _ in pairs], rtol=2e-7)
    long = [int(n) for n in rng.integers(0, 2**47, 2**16 - 1)] + [2**47]
    partial = list(itertools.accumulate(long))
    np.testing.assert_array_equal(number(uint64.sum_cumulatively(words(long))), np.array(partial, object))
    full = words([0xFFFF] * 2**16)
    assert number(uint64.sum_cumulatively(full))[-1] == 0xFFFF * 2**16
    for share in (Fraction(0), Fraction(1, 2), Fraction(99.99) / 100, 1 - Fraction(1, 2**60), Fraction(1, 3)):
        whole, rest = uint64.multiply_by_share(words(numbers), share)
        for n, quotient, part in zip(numbers, number(whole), np.asarray(rest), strict=True):
            error = Fraction(int(quotient)) + Fraction(float(part)) - n * share
            assert abs(error) < Fraction(1, 2**20) + Fraction(n, 2**64), (n, share)
            assert 0 <= part <= 1


def test_a_state_has_the_size_that_is_said() -> None:
    example = jax.ShapeDtypeStruct((1024, 3), jnp.float32)
    # percentile also has two sides with 16 octaves of 32 fine bins.
    for cal, expected in (
        (jq.calibration.percentile(SPEC, 99), 8 * (2048 + 1024)),
        (jq.calibration.mse(SPEC), 16 * 2048),
    ):
        state = jax.eval_shape(lambda cal=cal: cal.init(example))
        size = sum(math.prod(v.shape) * v.dtype.itemsize for v in jax.tree.leaves(state))
        assert 0 <= size - expected * 1024 <= 64 * 1024
        assert size < 50 * 2**20


@pytest.mark.slow
def test_sixty_four_bits_change_nothing() -> None:
    x = np.random.default_rng(3).normal(size=(3, 5)).astype(np.float32)
    spec = jq.QuantSpec("int8", jq.PerAxis(1))
    for calibrator in (jq.calibration.mse(spec), jq.calibration.entropy(spec), jq.calibration.percentile(spec, 99.0)):
        expected = calibrator.update(calibrator.init(x), x)
        with jax.enable_x64(True):
            state = calibrator.update(calibrator.init(x), x)
            ranges = calibrator.finalize(state)
        pair = (jax.tree.leaves(tree) for tree in ((state, ranges), (expected, calibrator.finalize(expected))))
        for a, b in zip(*pair, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
