"""The ranges that the histograms give: numpy over all the data, every candidate tried; and ONNX Runtime's own."""

from __future__ import annotations

import contextlib
import io
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, create_calibrator
from onnxruntime.quantization.calibrate import HistogramCollector

import jaxquant as jq

from ..oracles import calibration_text as oracle

N = 20_000
KINDS: dict[str, jq.QuantSpec] = {
    "int8": jq.QuantSpec(jnp.int8),
    "uint8": jq.QuantSpec(jnp.uint8),
    "int4": jq.QuantSpec(jnp.int4),
    "float8_e4m3fn": jq.QuantSpec(jnp.float8_e4m3fn),
    "float4_e2m1fn": jq.QuantSpec(jnp.float4_e2m1fn),
    "nf4": jq.QuantSpec(jq.nf4),
}


def draw_samples(rng: np.random.Generator) -> dict[str, np.ndarray]:
    data = {
        "heavy tails": rng.standard_t(3, N),
        "heavier tails": rng.standard_t(2, N),
        "normal": rng.normal(size=N),
        "uniform": rng.uniform(-1, 1, N),
        "after a ReLU": np.maximum(rng.normal(size=N), 0),
        "above 0": rng.exponential(size=N) + 3,
        "below 0": -rng.exponential(size=N),
        "pixels of 16": rng.integers(0, 17, N) / 16,
        "pixels of 255": np.minimum(rng.geometric(0.02, N), 255) / 255,
        "centred pixels": (rng.integers(0, 256, N) / 255 - 0.45) / 0.22,
        "few values": rng.choice([0, 1 / 16, 5 / 16, 1], p=[0.5, 0.3, 0.199, 0.001], size=N),
    }
    return {name: x.astype(np.float32) for name, x in data.items()}


def state_of(cal: jq.calibration.Calibrator, x: np.ndarray) -> Any:
    state = cal.init(x)
    for part in np.array_split(x, [len(x) // 2]):
        state = cal.update(state, part)
    return state


def ends(cal: jq.calibration.Calibrator, x: np.ndarray) -> tuple[float, float]:
    lo, hi = cal.finalize(state_of(cal, x))
    return float(lo[0]), float(hi[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("q", [50, 90, 99.9, 99.999, 0.01])
@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_percentiles_are_numpy_s(rng: np.random.Generator, kind: str, q: float) -> None:
    """Within the width of a bin, also where the two neighbours of a percentile lie many bins apart."""
    data = draw_samples(rng)
    data["two"] = np.array([1, 100], np.float32)
    data["one"] = np.array([-3], np.float32)
    data["an outlier"] = np.append(rng.normal(size=999), 1e4).astype(np.float32)
    cal = jq.calibration.percentile(KINDS[kind], q)
    for name, x in data.items():
        wide = x.astype(np.float64)
        if kind == "int8":
            p = np.percentile(np.abs(wide), q)
            want = np.clip([-p, p], x.min(), x.max())
        else:
            want = np.percentile(wide, [(100 - q) / 2, 100 - (100 - q) / 2])
        width = oracle.width(oracle.histogram(x, 2048)[0], 2048)
        limits = ends(cal, x)
        assert np.abs(limits - want).max() <= width * (1 + 1e-6), (name, limits, want, width)
        assert x.min() <= limits[0] <= limits[1] <= x.max()


@pytest.mark.slow
def test_percentile_of_everything_and_of_zeros(rng: np.random.Generator) -> None:
    x = rng.normal(size=1000).astype(np.float32)
    for spec in KINDS.values():
        assert ends(jq.calibration.percentile(spec, 100), x) == ends(jq.calibration.minmax(spec), x)
    x = np.append(np.zeros(700), rng.normal(size=300)).astype(np.float32)
    assert ends(jq.calibration.percentile(KINDS["int8"], 69), x)[1] == 0  # no part of a bin: exactly
    assert ends(jq.calibration.percentile(KINDS["uint8"], 60), x) == (0, 0)


@pytest.mark.slow
def test_slices_get_their_own_percentiles(rng: np.random.Generator) -> None:
    x = (rng.normal(size=(4, 5, 600)) * np.exp(rng.uniform(-9, 9, (1, 5, 1)))).astype(np.float32)
    cal = jq.calibration.percentile(jq.QuantSpec(jnp.int8, jq.PerAxis(1)), 99)
    state = cal.update(cal.init(x), x)
    want = np.percentile(np.abs(x.astype(np.float64)), 99, axis=(0, 2))
    width = np.ldexp(1.0, np.asarray(state.exponent).ravel()) / 1024
    assert (np.abs(np.asarray(cal.finalize(state).hi).ravel() - want) <= width * (1 + 1e-6)).all()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", list(KINDS))
def test_least_squared_error_is_brute_force_s(fixed_rng: np.random.Generator, kind: str) -> None:
    """Within one step of the grid of the best candidate over all the data, or minmax where that gains next to nothing;
    and never worse than minmax."""
    grid, spec = 50, KINDS[kind]
    levels = np.array(jq.nf4.levels) if kind == "nf4" else None
    cal = jq.calibration.mse(spec, grid=grid)
    for name, x in draw_samples(fixed_rng).items():
        lo, hi = ends(cal, x)
        low, high = min(x.min(), 0), max(x.max(), 0)
        step = round(max(-lo, hi) / max(-low, high) * grid)
        best, errors = oracle.least_error(kind, x, grid, levels)
        gain = 1 - errors[best - 1] / errors[-1]
        level = errors[step - 1] <= errors[best - 1] * 1.01  # of the heaviest tails far candidates may be so
        assert abs(step - best) <= 1 or level or (step == grid and gain < 0.05), (name, step, best, gain)
        whole, error = (oracle.squared_error(kind, x, a, b, levels) for a, b in ((x.min(), x.max()), (lo, hi)))
        assert error <= whole, (name, error, whole)
        q = jq.quantize(jnp.asarray(x), spec, range=(lo, hi))
        mean_error = np.mean((x - np.asarray(q.dequantize(), np.float64)) ** 2)
        np.testing.assert_allclose(mean_error, error, rtol=1e-3, atol=1e-12)
        assert (lo, hi) == (x.min(), x.max()) or step < grid


@pytest.mark.slow
def test_least_squared_error_of_other_scales(fixed_rng: np.random.Generator) -> None:
    """Scales of few bits, 16-bit codes, and slices of their own: none worse than minmax."""
    x = (fixed_rng.standard_t(3, size=(3, 2000)) * np.exp(fixed_rng.uniform(-9, 9, (3, 1)))).astype(np.float32)
    for spec in (
        jq.QuantSpec(jnp.int4, jq.PerAxis(0), scale_dtype=jnp.float8_e8m0fnu),
        jq.QuantSpec(jnp.uint4, jq.PerAxis(0), scale_dtype=jnp.bfloat16),
        jq.QuantSpec(jnp.int16, jq.PerAxis(0)),
        jq.QuantSpec(jnp.uint8, jq.PerAxis(0), symmetric=True),
        jq.QuantSpec(jnp.float8_e5m2, jq.PerAxis(0)),
        jq.QuantSpec(jq.Codebook("no zero", (-3.0, -1.0, 1.0, 3.0)), jq.PerAxis(0)),
    ):
        cal = jq.calibration.mse(spec, grid=20)
        ranges = cal.finalize(cal.update(cal.init(x), x))
        low, high = (f(x, axis=1, keepdims=True) for f in (np.min, np.max))

        def errors(lo: Any, hi: Any, spec: jq.QuantSpec = spec) -> np.ndarray:
            q = jq.quantize(jnp.asarray(x), spec, range=(lo, hi))
            return np.mean((x - np.asarray(q.dequantize(), np.float64)) ** 2, axis=1)

        least = np.min([errors(low * np.float32(i / 20), high * np.float32(i / 20)) for i in range(1, 21)], axis=0)
        error = errors(*ranges)
        assert (error <= errors(low, high)).all()
        assert (error <= least * 1.05).all(), (spec, error, least)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["int8", "uint8", "int4", "int8-reduced"])
def test_entropy_is_brute_force_s(fixed_rng: np.random.Generator, kind: str) -> None:
    """Within one bin of the least divergence of all candidates, on the same histogram, or with a divergence as small
    as float32 can tell: where a bin more is empty, candidates differ by less."""
    bins, spec = 1024, KINDS[kind] if kind in KINDS else jq.QuantSpec("int8", reduce_range=True)
    levels = {"int8": 128, "uint8": 256, "int4": 8, "int8-reduced": 64}[kind]
    cal = jq.calibration.entropy(spec, bins=bins)
    data = draw_samples(fixed_rng)
    for name in ("heavy tails", "normal", "uniform", "after a ReLU", "below 0", "centred pixels"):
        x = data[name]
        exponent, counts, _ = oracle.histogram(x, bins)
        side, divergences = oracle.least_divergence(counts, levels, bool(spec.symmetric))
        width = oracle.width(exponent, bins)
        want = np.clip([-side * width, side * width], x.min(), x.max())
        limits = ends(cal, x)
        is_near = np.abs(limits - want).max() <= width * (1 + 1e-6)
        equal = divergences.get(round(max(-limits[0], limits[1]) / width), np.inf) <= divergences[side] * (1 + 1e-5)
        assert is_near or equal, (name, limits, want, divergences[side])


def theirs(method: str, x: np.ndarray, symmetric: bool, bins: int, percentile: float = 99.9) -> tuple[float, float]:
    """ONNX Runtime's range of x, its collector fed by hand; it prints as it goes."""
    collector = HistogramCollector(method, symmetric, bins, 128, percentile, "same")
    with contextlib.redirect_stdout(io.StringIO()):
        for part in np.array_split(x, 2):
            collector.collect({"x": part})
        low, high = collector.compute_collection_result()["x"][:2]
    return float(low), float(high)


@pytest.mark.slow
def test_side_by_side_with_onnx_runtime(fixed_rng: np.random.Generator) -> None:
    """minmax the same; percentiles within a bin of each; entropy, whose details differ, within a factor of 2."""
    data = {
        "normal": fixed_rng.normal(size=N),
        "laplace": fixed_rng.laplace(size=N),
        "heavy tails": fixed_rng.standard_t(5, N),
    }
    table = []
    for name, wide in data.items():
        x = wide.astype(np.float32)
        assert ends(jq.calibration.minmax(KINDS["int8"]), x) == (x.min(), x.max())
        width = oracle.width(oracle.histogram(x, 2048)[0], 2048)
        for kind, symmetric in (("int8", True), ("uint8", False)):
            actual = ends(jq.calibration.percentile(KINDS[kind], 99.9), x)
            expected = theirs("percentile", x, symmetric, 2048)
            # Theirs is the edge of a bin; and they interpolate nothing between two neighbours.
            part = (100 - 99.9) / (1 if symmetric else 2)
            ranks = np.percentile(np.abs(x) if symmetric else x, [100 - part, part], method="higher")
            percentiles = np.percentile(np.abs(x) if symmetric else x, [100 - part, part], method="lower")
            slack = 2 * width + np.abs(ranks - percentiles).max()
            table.append((name, "percentile", kind, actual, expected, slack))
            assert np.abs(np.subtract(actual, expected)).max() <= slack, table
        actual = ends(jq.calibration.entropy(KINDS["int8"]), x)
        expected = theirs("entropy", x, True, 2048)
        table.append((name, "entropy", "int8", actual, expected, 2))
        assert 0.5 < actual[1] / expected[1] < 2, table


@pytest.mark.slow
def test_minmax_is_onnx_runtime_s(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """Its own collection over a model of one Identity."""
    batches = [rng.normal(size=(3, 4)).astype(np.float32) for _ in range(5)]

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(batches)

        def get_next(self) -> Any:
            batch = next(self.left, None)
            return None if batch is None else {"x": batch}

    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3, 4]) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", info[:1], info[1:])
    with contextlib.redirect_stdout(io.StringIO()):
        path = tmp_path / "identity.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
        augmented = str(tmp_path / "augmented.onnx")
        calibrator = create_calibrator(path, ["Identity"], augmented, CalibrationMethod.MinMax)
        calibrator.collect_data(Reader())
        low, high = calibrator.compute_data()["x"].range_value
    cal = jq.calibration.minmax(KINDS["uint8"])
    state = cal.init(batches[0])
    for batch in batches:
        state = cal.update(state, batch)
    lo, hi = cal.finalize(state)
    assert (lo[0, 0], hi[0, 0]) == (low, high)


@pytest.mark.parametrize("symmetric", [True, False])
def test_one_outlier_leaves_a_useful_percentile(symmetric: bool, rng: np.random.Generator) -> None:
    """1e4 among a hundred thousand normal numbers: the bins are 16 wide, and the percentile is 3.3."""
    x = rng.standard_normal(100_000).astype(np.float32)
    calibrator = jq.calibration.percentile(jq.QuantSpec("int8", symmetric=symmetric), 99.9)
    states = []
    for outlier in (1e4, -3e5):
        x[rng.integers(x.size)] = outlier
        # The outlier in any batch, or in a state that is merged.
        state = calibrator.init(jnp.zeros(4))
        for batch in np.split(rng.permutation(x), 4):
            state = calibrator.update(state, batch)
        first, second = (calibrator.update(calibrator.init(jnp.zeros(4)), part) for part in np.split(x, 2))
        states += [state, calibrator.merge(first, second)]
        lo, hi = calibrator.finalize(state)
        shares = (99.9,) if symmetric else (0.05, 99.95)
        expected = np.percentile(np.abs(x.astype(np.float64)) if symmetric else x.astype(np.float64), shares)
        actual = np.ravel(hi) if symmetric else np.r_[np.ravel(lo), np.ravel(hi)]
        assert (np.abs(actual - expected) <= np.abs(expected) / 32).all()
    for a, b in (states[:2], states[2:]):
        for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@pytest.mark.parametrize("bins", [16, 64, 2048])
def test_fine_bins_count_what_numpy_counts(bins: int, rng: np.random.Generator) -> None:
    """Each fine bin holds the numbers between its ends, whatever arrived first, and the bins hold them, too."""
    sizes = 2.0 ** rng.uniform(-30, 3, 4000) * rng.choice([-1, 1], 4000)
    x = np.r_[sizes, 0, 0, 2.0 ** np.arange(-30, 3)].astype(np.float32)
    calibrator = jq.calibration.percentile(jq.QuantSpec("int8"), 99, bins=bins)
    state = calibrator.init(jnp.zeros(4))
    for batch in np.array_split(x[np.argsort(np.abs(x))], 7):  # every batch makes the bins wider
        state = calibrator.update(state, batch)
    half = bins // 2
    width = 2.0 ** int(np.asarray(state.exponent)[0]) / half
    coarse = state.fine.low.shape[-1]
    assert coarse == min(32, bins // 4)
    for side, part in enumerate((-x[x < 0], x[x > 0])):
        for octave in range(16):
            start = coarse * width / 2.0 ** (octave + 1)
            edges = start * (1 + np.arange(coarse + 1) / coarse)
            inside = part[(part >= edges[0]) & (part < edges[-1])].astype(np.float64)
            expected = np.bincount(np.searchsorted(edges, inside, "right") - 1, minlength=coarse)
            np.testing.assert_array_equal(np.asarray(state.fine.low)[0, side, octave], expected)
    below = (np.abs(x.astype(np.float64)) / width).astype(int)
    for sign, part in (
        (x > 0, np.asarray(state.counts.low)[0, half:]),
        (x < 0, np.asarray(state.counts.low)[0, half - 1 :: -1]),
    ):
        np.testing.assert_array_equal(part, np.bincount(below[sign], minlength=half))
