"""The calibrators that keep no histogram, and what all of them share: contracts, transforms, devices, faults."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq

SPECS = {
    "per-tensor": jq.QuantSpec(jnp.int8),
    "rows": jq.QuantSpec(jnp.uint8, jq.PerAxis(1)),
    "columns": jq.QuantSpec(jnp.int8, jq.PerAxis(-1)),
    "two axes": jq.QuantSpec(jnp.int4, jq.PerAxis((0, 2))),
    "blocks": jq.QuantSpec(jnp.int4, jq.Blocked(1, 4)),
}
REDUCED = {"per-tensor": (0, 1, 2), "rows": (0, 2), "columns": (0, 1), "two axes": (1,)}
# One of each: the statistics differ, the contracts do not.
FACTORIES: dict[str, Callable[..., Any]] = {
    "minmax": jq.calibration.minmax,
    "absmax": jq.calibration.absmax,
    "moving_average": jq.calibration.moving_average,
    "percentile": functools.partial(jq.calibration.percentile, q=99.0, bins=64),
    "mse": functools.partial(jq.calibration.mse, bins=64, grid=8),
    "entropy": functools.partial(jq.calibration.entropy, bins=64),
}
INT4 = jq.QuantSpec(jnp.int4)
KEPT = [name for name in FACTORIES if name != "moving_average"]  # the order of what they see does not matter


def make(name: str, spec: jq.QuantSpec = INT4) -> jq.calibration.Calibrator:
    return FACTORIES[name](spec)


def feed(cal: jq.calibration.Calibrator, *batches: Any) -> Any:
    state = cal.init(batches[0])
    for batch in batches:
        state = cal.update(state, batch)
    return state


def check_equal(a: Any, b: Any) -> None:
    for actual, expected in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def least_most(x: np.ndarray, name: str) -> Any:
    if name != "blocks":
        return tuple(f(x, axis=REDUCED[name], keepdims=True) for f in (np.min, np.max))
    parts = [x[:, i : i + 4] for i in range(0, x.shape[1], 4)]
    return tuple(np.concatenate([f(p, axis=1, keepdims=True) for p in parts], axis=1) for f in (np.min, np.max))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extremes_are_numpy_s(rng: np.random.Generator, name: str, dtype: str) -> None:
    """Every layout and, with a last block of three, padding; the values of one sign, so that 0 is not among them."""
    for offset in (0.0, 9.0, -9.0):
        x = (np.clip(rng.normal(size=(5, 7, 6)), -4, 4) + offset).astype(jnp.dtype(dtype))
        low, high = least_most(x.astype(np.float32), name)
        state = feed(jq.calibration.minmax(SPECS[name]), x)
        check_equal(tuple(jq.calibration.minmax(SPECS[name]).finalize(state)), (low, high))
        size = np.maximum(np.abs(low), np.abs(high))
        check_equal(tuple(jq.calibration.absmax(SPECS[name]).finalize(state)), (-size, size))
        q = jq.quantize(jnp.asarray(x), SPECS[name], range=jq.calibration.minmax(SPECS[name]).finalize(state))
        check_equal(q, jq.quantize(jnp.asarray(x), SPECS[name]))


LONG = [(), (1,), (40001,), (2**18,), (300, 5), (300, 1000), (2, 3, 70_001)]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("shape", "axis"), [(s, k) for s in LONG for k in ((None, 0, -1) if len(s) > 1 else (None,))])
def test_extremes_of_long_arrays(rng: np.random.Generator, shape: tuple[int, ...], axis: int | None) -> None:
    """And a NaN of either sign anywhere in them."""
    spec = jq.QuantSpec(jnp.int8) if axis is None else jq.QuantSpec(jnp.int8, jq.PerAxis(axis))
    axes = tuple(a for a in range(len(shape)) if axis is None or a != axis % len(shape))
    x = rng.normal(size=shape).astype(np.float32)
    cal = jq.calibration.minmax(spec)
    state = feed(cal, x)
    want = [f(x, axis=axes, keepdims=True) for f in (np.min, np.max)]
    check_equal(tuple(state), [np.asarray(v, np.float32) for v in want])
    for sign in (1, -1):
        spoiled = x.copy()
        place = tuple(int(rng.integers(n)) for n in shape)
        spoiled[place] = sign * np.float32(np.nan)
        is_nan = np.isnan(np.asarray(cal.update(cal.init(x), spoiled).low))
        np.testing.assert_array_equal(is_nan, np.isnan(spoiled).any(axis=axes, keepdims=True))
        check_equal(
            cal.merge(state, cal.update(cal.init(x), spoiled)).low, np.where(is_nan, np.float32(np.nan), want[0])
        )


@pytest.mark.slow
def test_denormal_numbers_are_no_zeros() -> None:
    x = np.array([0, 1e-40, -3e-42], np.float32)
    assert [float(v[0]) for v in feed(jq.calibration.minmax(INT4), x)] == [x[2], x[1]]
    lo, hi = make("minmax").finalize(feed(make("minmax"), x))
    assert (lo[0], hi[0]) == (x[2], x[1])
    for name in FACTORIES:  # whatever a histogram makes of them, they are data
        lo, hi = make(name).finalize(feed(make(name), x))
        assert lo[0] <= hi[0]


# Transforms and devices.


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(FACTORIES))
def test_scan_vmap_and_jit_give_what_a_loop_gives(rng: np.random.Generator, name: str) -> None:
    cal = make(name, jq.QuantSpec(jnp.int4, jq.PerAxis(0)))
    x = (rng.normal(size=(3, 4, 2, 65)) * np.exp(rng.uniform(-4, 4, (3, 4, 1, 1)))).astype(np.float32)
    want = [feed(cal, *batches) for batches in x]
    stacked = jax.tree.map(lambda *v: jnp.stack(v), *want)

    def scanned(batches: jax.Array) -> Any:
        return jax.lax.scan(lambda s, b: (cal.update(s, b), None), cal.init(batches[0]), batches)[0]

    check_equal(jax.jit(jax.vmap(scanned))(x), stacked)
    finalize = jax.jit(jax.vmap(cal.finalize))
    check_equal(finalize(stacked), jax.tree.map(lambda *v: jnp.stack(v), *(cal.finalize(s) for s in want)))
    restored = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, want[0])))
    check_equal(cal.merge(restored, want[1]), cal.merge(want[0], want[1]))


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", KEPT)
def test_eight_devices_find_what_one_finds(rng: np.random.Generator, name: str) -> None:
    """By all_reduce under shard_map, with the loop inside; by jit over shards; and with shardings in types."""
    cal = make(name, jq.QuantSpec(jnp.int4, jq.PerAxis(1)))
    x = (rng.normal(size=(2, 16, 5, 33)) * np.exp(rng.uniform(-4, 4, (2, 16, 1, 1)))).astype(np.float32)
    want = feed(cal, *x)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def on_each(batches: jax.Array) -> Any:
        state = jax.lax.scan(lambda s, b: (cal.update(s, b), None), cal.init(batches[0]), batches)[0]
        return cal.all_reduce(state, "d")

    spread = jax.shard_map(on_each, mesh=mesh, in_specs=PartitionSpec(None, "d"), out_specs=PartitionSpec())
    check_equal(jax.jit(spread)(x), want)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
        batches = [jax.device_put(b, NamedSharding(mesh, PartitionSpec("d"))) for b in x]
        check_equal(jax.jit(lambda *b: feed(cal, *b))(*batches), want)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", KEPT)
def test_all_reduce_of_a_nan(name: str) -> None:
    cal = make(name)
    states = [
        feed(cal, np.array([1, 2], np.float32)),
        feed(cal, np.array([1, np.nan], np.float32)),
        feed(cal, np.array([3, -np.inf], np.float32)),
    ]
    stacked = jax.tree.map(lambda *v: jnp.stack(v), *states)
    for i, fault in enumerate(("NaN", "infinity")):
        rows = jax.tree.map(lambda v, i=i: v[jnp.array([0, i + 1])], stacked)
        copies = jax.vmap(lambda s: cal.all_reduce(s, "d"), axis_name="d")(rows)
        with pytest.raises(ValueError, match=fault):
            cal.finalize(jax.tree.map(lambda v: v[0], copies))


@pytest.mark.slow
def test_programs_are_saved_for_every_platform() -> None:
    cal = make("percentile")
    batch = jax.ShapeDtypeStruct((4, 6), jnp.float32)
    program = jax.jit(lambda state, x: cal.finalize(cal.update(state, x)))
    exported = export.export(program, platforms=["cpu", "cuda", "tpu"])(cal.init(batch), batch)
    restored = export.deserialize(exported.serialize())
    x = jnp.arange(24, dtype=jnp.float32).reshape(4, 6)
    check_equal(restored.call(cal.init(x), x), program(cal.init(x), x))


@pytest.mark.slow
def test_no_gradient_flows_through_an_update() -> None:
    cal = make("mse")
    x = jnp.arange(6, dtype=jnp.float32)

    def loss(x: jax.Array) -> tuple[jax.Array, Any]:
        return (x * x).sum(), cal.update(cal.init(x), x)

    gradient, state = jax.grad(loss, has_aux=True)(x)
    np.testing.assert_array_equal(gradient, 2 * np.arange(6))
    check_equal(state, feed(cal, x))


# What a range cannot be made of.

BAD = {
    "no data": None,
    "only zeros": np.array([0, -0.0], np.float32),
    "a NaN": np.array([1, np.nan], np.float32),
    "an infinity": np.array([1, -np.inf], np.float32),
}


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("fault", list(BAD))
@pytest.mark.parametrize("name", list(FACTORIES))
def test_what_has_no_range(name: str, fault: str) -> None:
    cal = make(name, jq.QuantSpec(jnp.int4, jq.PerAxis((0, 1))))
    x = np.array([[[1, 2]] * 3] * 2, np.float32)
    if BAD[fault] is None:
        x = np.zeros((2, 3, 0), np.float32)
    else:
        x[1, 0] = BAD[fault]
    state = feed(cal, x)
    slices, first = (6, r"\(0, 0, 0\)") if fault == "no data" else (1, r"\(1, 0, 0\)")
    text = (
        rf"jaxquant\.calibration\.{name}\.finalize: state: expected finite .*, "
        rf"got {fault} in {slices} of 6 slices, first in {first}"
    )
    with pytest.raises(ValueError, match=text):
        cal.finalize(state)
    traced = jax.jit(cal.finalize)(state)
    for end in traced:
        spoiled = np.isnan(np.asarray(end))
        assert spoiled.sum() == slices
        assert spoiled[1, 0, 0]
    if fault == "only zeros":
        ranges = cal.finalize(state, allow_zero=True)
        assert (ranges.lo[1, 0, 0], ranges.hi[1, 0, 0]) == (0, 0)
        assert (np.asarray(ranges.hi)[[0, 0, 0, 1, 1], [0, 1, 2, 1, 2], 0] > 0).all()
        q = jq.quantize(jnp.asarray(x), jq.QuantSpec(jnp.int4, jq.PerAxis((0, 1))), range=ranges)
        assert q.scale[1, 0, 0] == 1
        check_equal(jax.jit(functools.partial(cal.finalize, allow_zero=True))(state), ranges)
    else:
        with pytest.raises(ValueError, match=fault):
            cal.finalize(state, allow_zero=True)


# Contracts.

F = np.ones((2, 3), np.float32)
ROWS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: jq.calibration.minmax(jnp.int8), TypeError, "minmax: spec: expected a QuantSpec, got"),  # type: ignore[arg-type]
    (lambda: jq.calibration.absmax("int8"), TypeError, "absmax: spec: expected a QuantSpec, got 'int8'"),  # type: ignore[arg-type]
    (lambda: jq.calibration.percentile(None, 99), TypeError, "percentile: spec: expected a QuantSpec"),  # type: ignore[arg-type]
    (lambda: jq.calibration.entropy(None), TypeError, "entropy: spec: expected a QuantSpec"),  # type: ignore[arg-type]
    (lambda: jq.calibration.mse(None), TypeError, "mse: spec: expected a QuantSpec"),  # type: ignore[arg-type]
    (lambda: jq.calibration.moving_average(INT4, "x"), TypeError, "decay: expected a static Python number"),  # type: ignore[arg-type]
    (lambda: jq.calibration.moving_average(INT4, 1.0), ValueError, r"decay: expected a number in \[0, 1\), got 1.0"),
    (lambda: jq.calibration.moving_average(INT4, -0.1), ValueError, r"decay: expected a number in \[0, 1\), got -0.1"),
    (lambda: jq.calibration.percentile(INT4, 0), ValueError, r"q: expected a percentage in \(0, 100\], got 0"),
    (lambda: jq.calibration.percentile(INT4, 100.1), ValueError, r"q: expected a percentage in \(0, 100\], got 100.1"),
    (lambda: jq.calibration.percentile(INT4, True), TypeError, "q: expected a static Python number"),
    (
        lambda: jq.calibration.percentile(INT4, 9, bins=100),
        ValueError,
        r"percentile: bins: expected a power of two .*100",
    ),
    (
        lambda: jq.calibration.percentile(INT4, 9, bins=8),
        ValueError,
        r"bins: expected a power of two in \[16, 65536\], got 8",
    ),
    (
        lambda: jq.calibration.percentile(INT4, 9, bins=2**17),
        ValueError,
        r"bins: expected a power of two .*, got 131072",
    ),
    (lambda: jq.calibration.mse(INT4, bins=64.0), TypeError, "mse: bins: expected an int, got 64.0"),  # type: ignore[arg-type]
    (lambda: jq.calibration.mse(INT4, grid=0), ValueError, r"mse: grid: expected an int in \[1, 65536\], got 0"),
    (lambda: jq.calibration.mse(INT4, grid=True), TypeError, "mse: grid: expected an int, got True"),
    (lambda: jq.calibration.mse(INT4, every=0), ValueError, "mse: every: expected a positive int, got 0"),
    (
        lambda: jq.calibration.mse(jq.QuantSpec(jnp.uint8, zero_point_granularity=jq.PerAxis(0))),
        ValueError,
        r"mse: spec.zero_point_granularity: expected the granularity of the scale.*, got PerAxis\(axis=0\)",
    ),
    (
        lambda: jq.calibration.entropy(INT4, bins=16),
        ValueError,
        r"entropy: bins: .* \[32, 8192\], because there are 8 levels, got 16",
    ),
    (
        lambda: jq.calibration.entropy(jq.QuantSpec(jnp.int16)),
        TypeError,
        "entropy: spec.dtype: expected int2, .* or uint6, got int16",
    ),
    (lambda: jq.calibration.entropy(jq.QuantSpec(jq.nf4)), TypeError, "entropy: spec.dtype: expected .*, got nf4"),
    (
        lambda: make("minmax").init([1.0]),
        TypeError,
        "minmax.init: example: expected an array or a jax.Shape.*, got list",
    ),
    (
        lambda: jq.calibration.minmax(SPECS["two axes"]).init(F),
        ValueError,
        r"minmax.init: axis: expected an integer in \[-2, 1\], .*, got 2",
    ),
    (
        lambda: feed(make("mse"), F.astype(np.int32)),
        TypeError,
        "mse.update: batch: expected dtype float32, .*, got int32",
    ),
    (lambda: feed(make("mse"), F > 0), TypeError, "mse.update: batch: expected dtype float32, .*, got bool"),
    (
        lambda: make("mse").update(make("mse").init(F), [1.0]),
        TypeError,
        "mse.update: batch: expected an array, got list",
    ),
    (
        lambda: feed(jq.calibration.minmax(jq.QuantSpec(jnp.int8, jq.PerAxis(1))), F, F[:, :2]),
        ValueError,
        r"minmax.update: batch: expected a batch with ranges of shape \(1, 3\), .*, got ranges of shape \(1, 2\) for .*",
    ),
    (
        lambda: make("minmax").update(make("mse").init(F), F),
        TypeError,
        "minmax.update: state: expected a ExtremesState, as calibration.minmax.init returns it, got HistogramState",
    ),
    (
        lambda: make("percentile").merge(make("percentile").init(F), jq.calibration.percentile(INT4, 9).init(F)),
        ValueError,
        r"percentile.merge: b.counts: expected uint32\[1, 1, 64\], .*, got uint32\[1, 1, 2048\]",
    ),
    (
        lambda: make("mse").merge(make("entropy").init(F), make("mse").init(F)),
        ValueError,
        r"mse.merge: a.least: expected int32\[1, 1, 64\], as calibration.mse.init returns it, got None",
    ),
    (
        lambda: make("minmax").merge(make("minmax").init(F), make("minmax").init(F[0])),
        ValueError,
        r"minmax.merge: b.low: expected shape \(1, 1\), the shape of a.low, got shape \(1,\)",
    ),
    (
        lambda: make("minmax").finalize(F),
        TypeError,
        "minmax.finalize: state: expected a ExtremesState, .*, got ndarray",
    ),
    (
        lambda: make("minmax").finalize(make("minmax").init(F), allow_zero=3),  # type: ignore[call-arg]
        TypeError,
        "minmax.finalize: allow_zero: expected True or False, got 3",
    ),
    (lambda: make("absmax").all_reduce(F, "d"), TypeError, "absmax.all_reduce: state: expected a ExtremesState"),
    (
        lambda: make("mse", jq.QuantSpec(jnp.int4, jq.PerAxis(0))).init(jax.ShapeDtypeStruct((2**28, 1), jnp.float32)),
        ValueError,
        r"mse: spec: expected fewer than 2147483648 bins in total, got 268435456 slices",
    ),
]


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_refusals(row: int) -> None:
    call, error, text = ROWS[row]
    with pytest.raises(
        error, match=rf"jaxquant\.calibration\.{text}" if not text.startswith(("bins", "decay", "q:")) else text
    ):
        call()


def test_numbers_and_flax_parameters_are_batches() -> None:
    class Parameter:
        def __jax_array__(self) -> jax.Array:
            return jnp.array([-3, 1], np.float32)

    cal = make("minmax")
    assert float(cal.finalize(cal.update(cal.init(1.0), 2.5)).hi) == 2.5
    lo, hi = cal.finalize(cal.update(cal.init(jnp.zeros(2)), Parameter()))
    assert (lo[0], hi[0]) == (-3, 1)
    assert float(cal.finalize(feed(cal, np.array([0.1, 0.2]))).hi[0]) == np.float32(0.2)
