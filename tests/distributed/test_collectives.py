"""Collectives of codes on eight devices, against jax.lax's collectives and numpy's sums in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import jaxquant as jq
from jaxquant import distributed as jqd

P = PartitionSpec
INT8 = jq.QuantSpec(jnp.int8, jq.Blocked(-1, 128))
INT4 = jq.QuantSpec(jnp.int4, jq.Blocked(-1, 32), scale_dtype=jnp.bfloat16)


def make_mesh(count: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), ("d",))


def map_devices(function: Callable[..., Any], count: int = 8, **options: Any) -> Callable[..., Any]:
    """Return a jitted function of arrays whose first dimension holds the devices; so do its results."""

    def on_device(*arguments: Any) -> Any:
        results = function(*jax.tree.map(lambda x: x[0], arguments))
        return jax.tree.map(lambda y: y[None], results)

    return jax.jit(jax.shard_map(on_device, mesh=make_mesh(count), in_specs=P("d"), out_specs=P("d"), **options))


def assert_same_bits(actual: Any, expected: Any) -> None:
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# What arrives of quantized arrays.

ARRAYS = {
    "per tensor": ((4, 6), jq.QuantSpec(jnp.int8)),
    "per token": ((8, 5), jq.QuantSpec(jnp.uint8, jq.PerToken())),
    "per feature, 4 bits, odd": ((8, 3), jq.QuantSpec(jnp.int4, jq.PerFeature())),
    "blocks": ((8, 16), jq.QuantSpec(jnp.int4, jq.Blocked(1, 4), scale_dtype=jnp.bfloat16)),
    "short blocks": ((8, 10), jq.QuantSpec(jnp.uint4, jq.Blocked(1, 4))),
    "short blocks in front": ((10, 8), jq.QuantSpec(jnp.uint16, jq.Blocked(0, 4))),
    "blocks of both axes": ((6, 10), jq.QuantSpec(jnp.int8, jq.Blocked((0, 1), 4))),
    "codebook": ((8, 4), jq.QuantSpec(jq.nf4, jq.Blocked(-1, 4))),
    "float8": ((2, 8), jq.QuantSpec(jnp.float8_e4m3fn, jq.PerAxis(0), scale_dtype=jnp.float8_e8m0fnu)),
    "2 bits": ((8, 3), jq.QuantSpec(jnp.uint2, jq.PerAxis(1))),
    "vector": ((8,), jq.QuantSpec(jnp.int8, jq.Blocked(0, 3))),
    "empty": ((0, 4), jq.QuantSpec(jnp.int8)),
    "scalar": ((), jq.QuantSpec(jnp.int4)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ARRAYS)
def test_gathered_arrays_keep_their_bits(rng: np.random.Generator, name: str) -> None:
    """On every axis, stacked and joined: the codes of each device, and the values that `lax.all_gather` returns."""
    shape, spec = ARRAYS[name]
    x = rng.normal(size=(8, *shape)).astype(np.float32)
    q = jax.vmap(lambda row: jq.quantize(row, spec))(x)
    rank = len(shape)

    def gather(q: jq.QuantizedArray) -> Any:
        results = []
        for axis, tiled in [(a, False) for a in range(rank + 1)] + [(a, True) for a in range(-rank, 0) if shape[a]]:
            y = jqd.all_gather(q, "d", axis=axis, tiled=tiled)
            results.append((y, y.dequantize(), lax.all_gather(q.dequantize(), "d", axis=axis, tiled=tiled)))
        return results

    results = map_devices(gather)(q)
    for stacked, actual, expected in results:
        assert_same_bits(actual, expected)
        assert stacked.codes.dtype == q.codes.dtype
        assert stacked.scale.dtype == q.scale.dtype
    assert_same_bits(np.asarray(results[0][0].codes)[3], np.asarray(q.codes))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [name for name, (shape, _) in ARRAYS.items() if 8 in shape])
def test_exchanged_arrays_keep_their_bits(rng: np.random.Generator, name: str) -> None:
    """All pairs of axes of `all_to_all`, and `ppermute`, against the collectives of jax.lax of the values."""
    shape, spec = ARRAYS[name]
    q = jax.vmap(lambda row: jq.quantize(row, spec))(rng.normal(size=(8, *shape)).astype(np.float32))
    split = shape.index(8)
    pairs = [(i, (i + 3) % 8) for i in range(7)]

    def exchange(q: jq.QuantizedArray) -> Any:
        x = q.dequantize()
        results = [(jqd.ppermute(q, "d", pairs), lax.ppermute(x, "d", pairs))]
        for concat in range(len(shape)):
            for tiled in (False, True):
                y = jqd.all_to_all(q, "d", split, concat, tiled=tiled)
                results.append((y, lax.all_to_all(x, "d", split, concat, tiled=tiled)))
        return [(y.dequantize(), expected) for y, expected in results]

    for actual, expected in map_devices(exchange)(q):
        assert_same_bits(np.abs(actual), np.abs(expected))  # lax.ppermute fills up with 0, a code may stand for -0
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.slow
def test_stored_orders_and_trees(rng: np.random.Generator) -> None:
    """A stored order stays, integers travel as they are, floats as codes; slices may cut through blocks."""
    x = rng.normal(size=(8, 16, 6)).astype(np.float32)
    ids = rng.integers(0, 1000, (8, 3), dtype=np.int32)
    stored = jq.QuantSpec(jnp.int4, jq.PerAxis(1))
    cut = jq.QuantSpec(jnp.int8, jq.Blocked(0, 5))
    q = jax.vmap(lambda row: jq.quantize(row, stored, stored_last=0))(x)

    def move(x: Any, q: Any, ids: Any) -> Any:
        whole = jqd.all_gather({"x": x, "q": q, "ids": ids}, "d", spec=cut, axis=1)
        assert whole["q"].stored_order is not None
        assert whole["q"].shape == (16, 8, 6)
        joined = jqd.all_gather(q, "d", axis=0, tiled=True)
        assert joined.stored_order == q.stored_order
        sent = jqd.all_to_all(x, "d", 0, 1, spec=cut, tiled=True)
        local = jq.quantize(x, cut).dequantize()
        values = q.dequantize()
        expected = (
            {"x": lax.all_gather(local, "d", axis=1), "q": lax.all_gather(values, "d", axis=1),
             "ids": lax.all_gather(ids, "d", axis=1)},
            lax.all_gather(values, "d", axis=0, tiled=True),
            lax.all_to_all(local, "d", 0, 1, tiled=True),
        )  # fmt: skip
        return ({**whole, "q": whole["q"].dequantize()}, joined.dequantize(), sent), expected

    assert_same_bits(*map_devices(move)(x, q, ids))


# Sums.

SUMS = {
    "rows": ((24, 100), INT8, jnp.float32),
    "4 bits": ((3, 5, 7), INT4, jnp.float32),
    "unsigned": ((257,), jq.QuantSpec(jnp.uint8, jq.Blocked(-1, 16)), jnp.float32),
    "middle code": ((31,), jq.QuantSpec(jnp.uint8, symmetric=True), jnp.bfloat16),
    "scalar": ((), INT8, jnp.float32),
    "half": ((2, 9), jq.QuantSpec(jnp.int16), jnp.float16),
    "float8": ((40,), jq.QuantSpec(jnp.float8_e4m3fn, jq.Blocked(-1, 8)), jnp.float32),
    "empty": ((3, 0), INT8, jnp.float32),
}


def find_steps(rows: np.ndarray, spec: jq.QuantSpec) -> np.ndarray:
    """Return an upper bound of the step at each element of messages in float64, by the definition of the spec."""
    size = spec.granularity.size if isinstance(spec.granularity, jq.Blocked) else max(rows.shape[-1], 1)
    assert isinstance(size, int)
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % size)])
    blocks = padded.reshape(*rows.shape[:-1], -1, size)
    low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    if spec.dtype == jnp.float8_e4m3fn:  # half a step is at most 2**-4 of a value
        step = np.maximum(-low, high) * 2**-3
    else:
        reach = np.maximum(-low, high)
        step = reach / spec.bounds[1] if spec.symmetric and spec.bounds[0] else (high - low) / 255
        step = reach / 127 if spec.symmetric and spec.dtype == jnp.uint8 else step
    step = np.where(step == 0, 1.0, step) * (1 + 2**-7 if spec.scale_dtype == jnp.bfloat16 else 1 + 2**-20)
    return np.repeat(step, size, -1)[..., : rows.shape[-1]]


def bound_error(x: np.ndarray, spec: jq.QuantSpec) -> np.ndarray:
    """Return the error that `psum` may make: one quantization per hop, and float32's rounding of sums."""
    count = len(x)
    flat = x.reshape(count, -1)
    rows = np.pad(flat, ((0, 0), (0, -flat.shape[1] % count))).reshape(count, count, -1)
    first = find_steps(rows, spec).sum(0) / 2
    total = rows.sum(0)
    second = find_steps(np.abs(total) + first, spec) * (2 if not spec.symmetric else 1) / 2
    rounding = np.abs(rows).sum(0) * count * 2.0**-22
    return (first + second + rounding).reshape(-1)[: flat.shape[1]].reshape(x.shape[1:])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("count", range(2, 9))
def test_sums_are_within_one_step_per_hop(rng: np.random.Generator, count: int, part: int) -> None:
    """Of shapes that the number of devices divides and that it does not; with the same bits on each device."""
    xs = {
        name: jnp.asarray(
            rng.normal(size=(count, *shape)) * np.exp(rng.normal(size=(count,) + (1,) * len(shape))), dtype
        )
        for name, (shape, _, dtype) in list(SUMS.items())[part::2]
    }

    def add(xs: Any) -> Any:
        return {name: jqd.psum(x, "d", spec=SUMS[name][1]) for name, x in xs.items()}

    for name, y in map_devices(add, count)(xs).items():
        _, spec, dtype = SUMS[name]
        assert y.dtype == dtype
        y = np.asarray(y)
        assert all(row.tobytes() == y[0].tobytes() for row in y)
        x = np.asarray(xs[name], np.float64)
        result_step = np.abs(x.sum(0)) * float(jnp.finfo(dtype).eps)
        error = np.abs(y[0].astype(np.float64) - x.sum(0))
        assert (error <= bound_error(x, spec) + 2 * result_step).all(), name
        if y.size and count == 8 and name == "rows":
            assert error.max() > 0, "expected a sum of rounded values"


@pytest.mark.slow
def test_slices_of_sums_and_means(rng: np.random.Generator) -> None:
    """`psum_scatter` on each axis and `pmean`, against sums in float64 of the values that each device sends."""
    x = rng.normal(size=(8, 8, 16, 3)).astype(np.float32)

    def add(x: jax.Array) -> Any:
        return (
            jqd.psum_scatter(x, "d", spec=INT8),
            jqd.psum_scatter(x, "d", spec=INT8, tiled=True),
            jqd.psum_scatter(x, "d", spec=INT4, scatter_dimension=1, tiled=True),
            jqd.pmean(x, "d", spec=INT8),
        )

    flat, tiled, columns, mean = (np.asarray(y) for y in map_devices(add)(x))
    sent = np.asarray(jq.quantize(x.reshape(64, 48), INT8).dequantize(), np.float64).reshape(x.shape)
    np.testing.assert_allclose(flat, sent.sum(0), rtol=1e-5, atol=1e-5)
    assert flat.tobytes() == tiled.tobytes()
    assert tiled.shape == (8, 1, 16, 3)
    slices = np.moveaxis(x.reshape(8, 8, 8, 2, 3), 2, 1).reshape(64, 48)
    sent = np.asarray(jq.quantize(slices, INT4).dequantize(), np.float64).reshape(8, 8, 8, 2, 3)
    np.testing.assert_allclose(columns, sent.sum(0), rtol=1e-5, atol=1e-5)
    error = np.abs(mean - x.astype(np.float64).mean(0)).max(0)
    assert (error <= bound_error(x.astype(np.float64), INT8) / 8 + 1e-6).all()
    assert mean[0].tobytes() == mean[7].tobytes()


@pytest.mark.slow
def test_stochastic_sums_are_unbiased(fixed_rng: np.random.Generator) -> None:
    """The mean over keys is within six standard errors; devices with the same key round differently."""
    x = jnp.asarray(fixed_rng.normal(size=(8, 20)), jnp.float32)
    spec = jq.QuantSpec(jnp.int4, jq.Blocked(-1, 8))
    trials = 2000

    def add(x: jax.Array) -> Any:
        def step(_: Any, key: jax.Array) -> Any:
            scattered = jqd.psum_scatter(jnp.pad(x, (0, 4)), "d", spec=spec, tiled=True, key=key)
            moved = jqd.ppermute(x, "d", [(i, i) for i in range(8)], spec=spec, key=key)
            sent = jqd.all_to_all(jnp.stack([x] * 8), "d", 0, 0, spec=spec, key=key)
            mean = jqd.pmean(x, "d", spec=spec, key=key)
            total, left = jqd.psum_with_error_feedback(x, jnp.zeros_like(x), "d", spec=spec, key=key)
            return _, (jqd.psum(x, "d", spec=spec, key=key), scattered, moved, sent[2], mean, total, left)

        return lax.scan(step, None, jax.random.split(jax.random.key(7), trials))[1]

    sums, slices, moved, sent, mean, total, left = (np.asarray(y, np.float64) for y in map_devices(add)(x))
    assert sums[0].tobytes() == sums[5].tobytes()
    slices = slices.transpose(1, 0, 2).reshape(trials, 24)[:, :20]
    exact = np.asarray(x, np.float64)
    pairs = (
        *((samples, exact.sum(0)) for samples in (sums[0], slices, total[4])),
        *((samples, exact[2]) for samples in (moved[2], sent[7])),
        (mean[0], exact.mean(0)), (left.sum(0), np.zeros(20)),
    )  # fmt: skip
    for samples, expected in pairs:
        standard_error = samples.std(0, ddof=1) / np.sqrt(trials)
        assert (np.abs(samples.mean(0) - expected) <= 6 * standard_error + 1e-6).all()
    same = map_devices(lambda x: jqd.ppermute(x, "d", [(i, i) for i in range(8)], spec=spec, key=jax.random.key(1)))
    rows = np.asarray(same(jnp.broadcast_to(x[:1], x.shape)))
    assert len({row.tobytes() for row in rows}) > 1


@pytest.mark.slow
def test_error_feedback_loses_nothing(rng: np.random.Generator) -> None:
    """After every step, the sums so far and the residuals add up to the sums of the inputs; a NaN passes by."""
    xs = rng.normal(size=(8, 6, 37)).astype(np.float32)
    spec = jq.QuantSpec(jnp.int4)

    def run(xs: jax.Array) -> Any:
        def step(residual: Any, x: jax.Array) -> Any:
            y, residual = jqd.psum_with_error_feedback({"w": x}, residual, "d", spec=spec)
            return residual, (y["w"], residual["w"])

        first = {"w": jnp.zeros_like(xs[0])}
        ys, residuals = lax.scan(step, first, xs)[1]
        broken = jqd.psum_with_error_feedback(xs[0].at[0].set(jnp.nan), first["w"], "d", spec=spec)
        return ys, residuals, broken

    ys, residuals, (y, residual) = (jax.tree.map(np.asarray, part) for part in map_devices(run)(xs))
    assert ys[0].tobytes() == ys[3].tobytes()
    total = np.cumsum(xs.astype(np.float64).sum(0), 0)
    np.testing.assert_allclose(
        np.cumsum(ys[0].astype(np.float64), 0) + residuals.astype(np.float64).sum(0), total, atol=1e-4
    )
    assert np.abs(residuals).max() < 2, "expected residuals of about a step"
    assert np.isnan(y[:, 0]).all()
    assert np.isfinite(residual).all()


@pytest.mark.slow
def test_faults_arrive_everywhere(rng: np.random.Generator) -> None:
    """A NaN or an infinity on one device is not finite on any, in its own block only."""
    values = (np.nan, np.inf, -np.inf)
    x = rng.normal(size=(8, 8, 256)).astype(np.float32)
    xs = np.stack([x] * len(values), 1)
    xs[2, :, 5, 130] = values

    def move(xs: jax.Array) -> Any:
        return (
            jqd.psum(list(xs), "d", spec=INT8),
            jqd.pmean(list(xs), "d", spec=INT8, key=jax.random.key(0)),
            [jqd.all_gather(x, "d", spec=INT8)[2] for x in xs],
        )

    for y in jax.tree.leaves(map_devices(move)(xs)):
        y = np.asarray(y)
        assert not np.isfinite(y[:, 5, 130]).any()
        assert np.isfinite(np.delete(y, 5, axis=1)).all()
        assert np.isfinite(y[:, 5, :128]).all()


# Gradients and transformations.


@pytest.mark.sample(1)
@pytest.mark.parametrize("check_vma", [False, True])
def test_gradients_are_those_of_jax(rng: np.random.Generator, check_vma: bool) -> None:
    """Straight-through: bit for bit the cotangents of the collectives of jax.lax, forward and reverse."""
    x = rng.normal(size=(8, 8, 4)).astype(np.float32)
    weights = {n: rng.normal(size=(8, *n)).astype(np.float32) for n in ((8, 4), (4,), (8, 8, 4))}
    ours = {
        "psum": lambda x: jqd.psum(x, "d", spec=INT8),
        "pmean": lambda x: jqd.pmean(x, "d", spec=INT8, key=jax.random.key(3)),
        "psum_scatter": lambda x: jqd.psum_scatter(x, "d", spec=INT8),
        "all_gather": lambda x: jqd.all_gather(x, "d", spec=INT8),
        "all_to_all": lambda x: jqd.all_to_all(x, "d", 0, 0, spec=INT8),
        "ppermute": lambda x: jqd.ppermute(x, "d", [(0, 1), (1, 0)], spec=INT8),
        "feedback": lambda x: jqd.psum_with_error_feedback(x, jnp.zeros_like(x), "d", spec=INT8)[0],
    }
    jax_names = {name: functools.partial(getattr(lax, name), axis_name="d") for name in list(ours)[:4]}
    theirs = {
        **jax_names,
        "all_to_all": lambda x: lax.all_to_all(x, "d", 0, 0),
        "ppermute": lambda x: lax.ppermute(x, "d", [(0, 1), (1, 0)]),
        "feedback": lambda x: lax.psum(x, "d"),
    }

    def differentiate(x: jax.Array, weights: Any) -> Any:
        results = []
        for name in ours:
            pair = []
            for f in (ours[name], theirs[name]):
                shape = jax.eval_shape(f, x).shape
                pair.append(jax.grad(lambda x, f=f, shape=shape: (f(x) * weights[shape]).sum())(x))
            results.append(pair)
        tangents = [jax.jvp(f, (x,), (x,))[1] for f in (ours["psum"], theirs["psum"])]
        return results, tangents

    keyed = {str(n): w for n, w in weights.items()}
    f = map_devices(lambda x, w: differentiate(x, {n: w[str(n)] for n in weights}), check_vma=check_vma)
    results, tangents = f(x, keyed)
    for actual, expected in [*results, tangents]:
        assert_same_bits(actual, expected)


@pytest.mark.slow
def test_types_under_shard_map(rng: np.random.Generator) -> None:
    """JAX knows that a sum is the same on all devices, so that it may leave shard_map without a dimension for them."""
    x = rng.normal(size=(8, 24)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))

    def add(x: jax.Array) -> Any:
        both, one = jqd.psum(x[0], ("a", "b"), spec=INT8), jqd.psum(x, "b", spec=INT8)
        return both, one, jqd.compare_devices(both, ("a", "b"))

    mapped = jax.shard_map(add, mesh=mesh, in_specs=P(("a", "b")), out_specs=(P(), P("a"), P()))
    both, one, same = jax.jit(mapped)(x)
    assert same
    exact = x.astype(np.float64)

    def differentiate(x: jax.Array) -> list[jax.Array]:
        """Return derivatives with cotangents as codes and as floats; x is the same on all devices."""
        gathers = (
            lambda x: jqd.all_gather(x, "b", spec=INT8, backward_spec=INT8),
            lambda x: lax.all_gather(x, "b"),
        )
        return [jax.grad(lambda x, f=f: lax.psum(f(x).sum(), "b"))(x) for f in gathers]

    assert_same_bits(*jax.jit(jax.shard_map(differentiate, mesh=mesh, in_specs=P(), out_specs=P()))(x))
    assert np.abs(both - exact.sum(0)).max() < 0.2
    assert np.abs(one - exact.reshape(2, 4, 24).sum(1)).max() < 0.1


@pytest.mark.slow
def test_under_vmap_and_pmap(rng: np.random.Generator) -> None:
    """Named axes of jax.vmap and jax.pmap: the bits of shard_map, up to the order in which sums are added."""
    x = rng.normal(size=(8, 40)).astype(np.float32)
    q = jax.vmap(lambda row: jq.quantize(row, INT4))(x)

    def move(x: jax.Array, q: jq.QuantizedArray) -> Any:
        return (
            jqd.psum(x, "d", spec=INT8),
            jqd.psum_scatter(x, "d", spec=INT8, tiled=True),
            jqd.all_gather(q, "d", tiled=True).dequantize(),
            jqd.all_to_all(x, "d", 0, 0, spec=INT4, tiled=True),
        )

    # A batch inside of the mapped function, too.
    expected, batch = map_devices(lambda x, q: (move(x, q), jax.vmap(lambda x: move(x, q)[0])(jnp.stack([x, 2 * x]))))(
        x, q
    )
    step = np.abs(expected[0]).max() / 100  # another order of a sum may change a tie
    for mapped in (jax.jit(jax.vmap(move, axis_name="d")), jax.pmap(move, axis_name="d")):
        actual = mapped(x, q)
        assert_same_bits(actual[2:], expected[2:])
        for a, b in zip(actual[:2], expected[:2], strict=True):
            np.testing.assert_allclose(a, b, atol=step)
    np.testing.assert_allclose(batch[:, 0], expected[0], atol=step)


# Programs.


@pytest.mark.parametrize(
    "names",
    [
        ("psum", "all_gather", "psum_scatter"),
        pytest.param(("pmean", "all_to_all", "ppermute", "feedback"), marks=pytest.mark.slow),
    ],
)
def test_what_travels(names: tuple[str, ...]) -> None:
    """Integers, and at most 0.28 of the bytes of floats; no floats but the scales."""
    x = jnp.zeros((8, 64, 1024), jnp.float32)

    def count(f: Callable[..., Any], *arguments: Any) -> list[jqd.Collective]:
        return jqd.count_traffic(map_devices(f).lower(*arguments).compile())

    def total(collectives: list[jqd.Collective]) -> int:
        return sum(c.sent_bytes for c in collectives)

    pairs = {
        "psum": (lambda x: jqd.psum(x, "d", spec=INT8), lambda x: lax.psum(x, "d")),
        "all_gather": (lambda x: jqd.all_gather(x, "d", spec=INT8), lambda x: lax.all_gather(x, "d")),
        "psum_scatter": (
            lambda x: jqd.psum_scatter(x, "d", spec=INT8, tiled=True),
            lambda x: lax.psum_scatter(x, "d", tiled=True),
        ),
        "pmean": (lambda x: jqd.pmean(x, "d", spec=INT8, key=jax.random.key(0)), lambda x: lax.pmean(x, "d")),
        "all_to_all": (
            lambda x: jqd.all_to_all(x, "d", 0, 1, spec=INT8, tiled=True),
            lambda x: lax.all_to_all(x, "d", 0, 1, tiled=True),
        ),
        "ppermute": (
            lambda x: jqd.ppermute(x, "d", [(i, (i + 1) % 8) for i in range(8)], spec=INT8),
            lambda x: lax.ppermute(x, "d", [(i, (i + 1) % 8) for i in range(8)]),
        ),
        "feedback": (
            lambda x: jqd.psum_with_error_feedback(x, jnp.zeros_like(x), "d", spec=INT8),
            lambda x: lax.psum(x, "d"),
        ),
    }
    for name in names:
        ours, theirs = pairs[name]
        codes, floats = count(ours, x), count(theirs, x)
        assert total(codes) <= 0.28 * total(floats), name
        assert {c.dtype for c in codes if np.prod(c.shape) > 64 * 1024 * 8 // 128} == {"s8"}, name
        assert all(c.devices == 8 or c.kind == "collective-permute" for c in codes)
    if "psum" not in names:
        return
    elements = 64 * 1024
    assert total(count(pairs["psum"][1], x)) == 2 * 7 * elements * 4 // 8
    assert total(count(pairs["all_gather"][1], x)) == 7 * elements * 4
    four_bits = jax.vmap(
        lambda x: jq.quantize(x, jq.QuantSpec(jnp.int4, jq.Blocked(-1, 128), scale_dtype=jnp.bfloat16))
    )
    packed = count(lambda q: jqd.all_gather(q, "d"), jax.eval_shape(four_bits, x))
    assert total(packed) == 7 * (elements // 2 + 2 * elements // 128)
    assert {c.dtype for c in packed} == {"u8", "u16"}


# Errors.


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: jqd.psum(x, "e", spec=INT8), r"jaxquant.distributed.psum: axis_name: expected the name .*'e'"),
        (lambda x: jqd.all_gather(x, ("d", "e"), spec=INT8), r"all_gather: axis_name: .*'e'"),
        (lambda x: jqd.psum(x, ("d", "d"), spec=INT8), r"psum: axis_name: expected the names of distinct axes"),
        (lambda x: jqd.psum(x, 0, spec=INT8), r"psum: axis_name: expected the name of an axis of .*0"),
        (
            lambda x: jqd.psum(x, "d", spec=jq.QuantSpec(jnp.uint8), key=jax.random.key(0)),
            r"psum: key: expected None, because the codes of an asymmetric spec clip",
        ),
        (lambda x: jqd.all_gather(x, "d"), r"all_gather: spec: expected a QuantSpec for floats .jax.lax.all_gather"),
        (lambda x: jqd.psum(x, "d", spec=cast(Any, jnp.int8)), r"psum: spec: expected a QuantSpec"),
        (
            lambda x: jqd.psum(x, "d", spec=jq.QuantSpec(jnp.int8, jq.PerAxis(0))),
            r"psum: spec.granularity: expected PerT",
        ),
        (lambda x: jqd.psum(x, "d", spec=INT8, key=cast(Any, 1)), r"psum: key: expected None or one key"),
        (
            lambda x: jqd.pmean(x, "d", spec=jq.QuantSpec(jq.nf4), key=jax.random.key(0)),
            r"pmean: key: expected None, because the codes of nf4",
        ),
        (lambda x: jqd.psum(x.astype(int), "d", spec=INT8), r"psum: x: expected dtype float32"),
        (lambda x: jqd.psum_scatter(x, "d", spec=INT8), r"psum_scatter: scatter_dimension: expected a dimension of 8"),
        (lambda x: jqd.all_to_all(x, "d", 0, 0, spec=INT8, tiled=True), r"all_to_all: split_axis: .*multiple of 8"),
        (lambda x: jqd.all_to_all(x, "d", 4, 0, spec=INT8), r"all_to_all: split_axis: expected an integer in"),
        (lambda x: jqd.ppermute(x, "d", [(0, 8)], spec=INT8), r"ppermute: perm: expected pairs .* in \[0, 7\]"),
        (lambda x: jqd.all_gather(x, "d", spec=INT8, axis=3), r"all_gather: axis: expected an integer in \[-3, 2\]"),
        (
            lambda x: jqd.psum_with_error_feedback(x, x[0], "d", spec=INT8),
            r"psum_with_error_feedback: residual: expected shape \(3, 5\)",
        ),
        (lambda x: jqd.compare_devices(x, "model"), r"compare_devices: axis_name: .*'model'"),
    ],
)
def test_errors(call: Callable[..., Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        jax.eval_shape(map_devices(call), jnp.zeros((8, 3, 5)))


def test_outside_of_shard_map() -> None:
    with pytest.raises(ValueError, match=r"psum: axis_name: expected the name of an axis of a jax.shard_map.*'d'"):
        jqd.psum(jnp.ones(3), "d", spec=INT8)


@pytest.mark.slow
def test_checksums(rng: np.random.Generator) -> None:
    """`compare_devices` sees one bit, an exchange of two elements, and the sign of 0, in every dtype."""
    values = {
        "f32": rng.normal(size=9).astype(np.float32),
        "bf16": jnp.zeros(5, jnp.bfloat16),
        "int4": jnp.arange(-8, 8, dtype=jnp.int8).astype(jnp.int4),
        "bool": jnp.zeros(3, bool),
        "uint16": jnp.arange(7, dtype=jnp.uint16),
        "complex": jnp.ones(2, jnp.complex64),
        "float8": jnp.ones(3, jnp.float8_e4m3fn),
    }
    same = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x), (8, *x.shape)), values)
    swapped = np.asarray(same["f32"]).copy()
    swapped[4, [1, 2]] = swapped[4, [2, 1]]
    changes = {
        "f32": jnp.asarray(swapped),
        "bf16": same["bf16"].at[1, 0].set(-0.0),
        "int4": same["int4"].at[7, 3].set(0),
        "bool": same["bool"].at[0, 2].set(True),
        "uint16": same["uint16"].at[2, 6].set(7),
        "complex": same["complex"].at[3, 1].set(1 - 1j),
        "float8": same["float8"].at[6, 2].set(1.125),
    }

    compare = map_devices(lambda tree: jqd.compare_devices(tree, "d"))
    assert np.asarray(compare(same)).all()
    for name, changed in changes.items():
        assert not np.asarray(compare({**same, name: changed})).any(), name


def test_one_process_agrees_with_itself() -> None:
    q = jq.quantize(jnp.ones((4, 6)), INT4)
    jqd.check_processes({"q": q, "spec": INT4, "key": jax.random.key(0), "name": "a"})
    rules = {"calibrator": jq.calibration.minmax(INT4), "rules": jq.recipes.w8a8_static()}
    jqd.check_processes({**rules, "function": np.sin, "book": jq.Quantizer(jq.QuantSpec(jq.nf4))})
    jqd.check_processes({})
