"""HQQ and the searched range, against exhaustive searches in numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq

F32 = np.float32
call_hqq: Any = ptq.hqq
SPECS = [
    jq.QuantSpec("int4", jq.PerAxis(1)),
    jq.QuantSpec("uint4", jq.Blocked(0, 12)),
    jq.QuantSpec("uint2", jq.PerAxis(1)),
    jq.QuantSpec(jq.nf4, jq.PerTensor()),
    jq.QuantSpec("int4", jq.Blocked(0, 8), power_of_two=True),
    jq.QuantSpec("float4_e2m1fn", jq.PerAxis(0), scale_dtype=jnp.bfloat16),
]


def sample(rng: np.random.Generator) -> np.ndarray:
    """Return weights with outliers."""
    return rng.standard_t(3, size=(36, 8)).astype(F32)


def sum_powers(w: np.ndarray, q: Any, p: float) -> float:
    """Return the sum of |error|^p in units of the scales of round-to-nearest."""
    return float(np.sum(np.abs(w - np.asarray(q.dequantize(), np.float64)) ** p))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_hqq_falls_at_every_step(rng: np.random.Generator, spec: Any) -> None:
    w = sample(rng)
    q, sums = ptq.hqq(w, spec, diagnostics=True)
    sums = np.asarray(sums)
    assert sums.shape == (21,)
    assert (np.diff(sums) <= 1e-5 * sums[0]).all()
    assert q.codes.dtype == spec.carrier
    nearest = jq.quantize(w, spec)
    if spec.granularity == jq.PerTensor():  # the unit is the same for all elements
        ratio = sum_powers(w, q, 0.7) / sum_powers(w, nearest, 0.7)
        np.testing.assert_allclose(ratio, sums[-1] / sums[0], rtol=1e-3)


@pytest.mark.slow
def test_hqq_has_less_error_than_round_to_nearest(rng: np.random.Generator) -> None:
    w = sample(rng)
    for spec in SPECS[:3]:
        _, sums = ptq.hqq(w, spec, diagnostics=True)
        assert sums[-1] < sums[0]
    q = jax.vmap(lambda w: ptq.hqq(w, SPECS[0]))(np.stack([w, 2 * w]))
    np.testing.assert_array_equal(q.codes[0], ptq.hqq(w, SPECS[0]).codes)
    # A power of two changes no code.
    np.testing.assert_array_equal(q.codes[1], q.codes[0])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_searched_range_is_the_best_of_all(rng: np.random.Generator, spec: Any) -> None:
    w = sample(rng)
    importance = rng.uniform(0.1, 3, (36, 1)).astype(F32)
    lo, hi = ptq.search_range(w, spec, importance, least=0.4, steps=7)
    whole = jq.quantize(w, spec)
    block = spec.granularity.size if isinstance(spec.granularity, jq.Blocked) else 0
    assert isinstance(block, int)

    def sum_slices(values: np.ndarray) -> np.ndarray:
        """Return the sums of the elements that share a scale."""
        shape = whole.scale.shape
        if block:
            pad = np.pad(values, ((0, -len(values) % block), (0, 0)))
            return pad.reshape(-1, block, values.shape[1]).sum(1)
        return values.sum(tuple(a for a in range(2) if shape[a] == 1), keepdims=True)

    def measure(lo: Any, hi: Any) -> np.ndarray:
        values = np.asarray(jq.quantize(w, spec, range=(lo, hi)).dequantize(), np.float64)
        return sum_slices(importance * (w - values) ** 2)

    largest = [np.asarray(x) for x in ptq.search_range(w, spec, least=1.0, steps=1)]
    costs = [measure(*(F32(t) * x for x in largest)) for t in np.linspace(1, 0.4, 7)]
    np.testing.assert_allclose(measure(lo, hi), np.min(costs, 0), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("axis", [0, 1])
def test_slices_of_large_weights_do_not_depend_on_each_other(rng: np.random.Generator, axis: int) -> None:
    """On a CPU, a large weight is quantized in chunks, and half of this one at once."""
    w = rng.standard_t(4, size=(450, 700)).astype(F32)
    spec = jq.QuantSpec("uint4", jq.PerAxis(axis))
    q, sums = ptq.hqq(w, spec, diagnostics=True)
    halves, half_sums = zip(
        *(ptq.hqq(half, spec, diagnostics=True) for half in np.array_split(w, 2, axis)), strict=True
    )
    np.testing.assert_allclose(sums, np.sum(np.asarray(half_sums, np.float64), 0), rtol=1e-5)
    joined = np.concatenate([np.asarray(half.dequantize()) for half in halves], axis)
    # Sums in another order may decide otherwise between two ranges that are as good.
    moved = (np.abs(np.asarray(q.dequantize()) - joined) > 1e-5).any(1 - axis)
    assert moved.mean() < 0.02
    # The sum that the algorithm makes small, of the codes that it returned.
    unit = np.asarray(jq.quantize(w, spec).scale, np.float64)
    errors = np.abs(w - np.asarray(q.dequantize(), np.float64)) / unit
    np.testing.assert_allclose(np.sum(errors**0.7), sums[-1], rtol=1e-3)


@pytest.mark.slow
def test_large_weights_take_little_memory_on_a_cpu() -> None:
    w = jax.ShapeDtypeStruct((8192, 640), F32)
    for spec in (jq.QuantSpec("uint4", jq.PerAxis(0)), jq.QuantSpec("int4", jq.Blocked(1, 32))):
        program: Any = jax.jit(lambda w, spec=spec: ptq.hqq(w, spec).scale).lower(w).compile()
        assert program.memory_analysis().temp_size_in_bytes < 2 * w.size * w.dtype.itemsize


@pytest.mark.slow
def test_empty_slices_and_nan() -> None:
    w = jnp.zeros((4, 2)).at[0, 0].set(2.0)
    spec = jq.QuantSpec("int4", jq.PerAxis(1))
    for q in (ptq.hqq(w, spec), jq.quantize(w, spec, range=ptq.search_range(w, spec))):
        np.testing.assert_allclose(q.dequantize(), w, rtol=1e-6)
    for function in (ptq.hqq, ptq.search_range):
        name = function.__name__
        with pytest.raises(ValueError, match=rf"^jaxquant\.ptq\.{name}: w: expected finite numbers"):
            function(w.at[1, 1].set(jnp.nan), spec)
    q = jax.jit(lambda w: ptq.hqq(w, spec))(w.at[1, 1].set(jnp.nan))
    assert np.isnan(np.asarray(q.dequantize())[:, 1]).all()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda w, s: ptq.hqq(w, s, p=2.0), r"hqq: p: expected a number in \(0, 1\], got 2.0"),
        (lambda w, s: ptq.hqq(w, s, growth=0.5), "hqq: growth: expected 1 or a larger number, got 0.5"),
        (lambda w, s: call_hqq(w, "int4"), r"hqq: spec: expected a QuantSpec, got 'int4' \(str\)"),
        (lambda w, s: ptq.search_range(w, s, least=0), r"search_range: least: expected a number in \(0, 1\], got 0"),
        (lambda w, s: ptq.search_range(w, s, np.ones((3, 2), F32)), "search_range: importance: expected shape"),
        (
            lambda w, s: ptq.hqq(w, jq.QuantSpec("uint4", jq.PerAxis(1), zero_point_granularity=jq.PerTensor())),
            "hqq: spec: expected the same granularity for the scale and the zero point, got ",
        ),
    ],
)  # fmt: skip
def test_errors(call: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^jaxquant\.ptq\.{text}"):
        call(np.ones((4, 2), F32), SPECS[0])


def test_codes_are_refused_by_name() -> None:
    """The check for finite numbers, which came first, raised an error of `jax.numpy.isfinite`."""
    q: Any = jq.quantize(np.ones((8, 4), np.float32), jq.QuantSpec("int8"))
    for name, call in (("hqq", call_hqq), ("search_range", ptq.search_range)):
        with pytest.raises(TypeError, match=rf"jaxquant\.ptq\.{name}: w: expected an array, got QuantizedArray"):
            call(q, jq.QuantSpec("int8"))
