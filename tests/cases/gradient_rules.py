"""Dtypes, granularities and problems for the gradient rules, and the comparison of their cotangents."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

import jaxquant as jq

from ..cases.quantized_arrays import GRANULARITIES
from ..oracles import array_text, onnx_text
from ..oracles import gradient_rules_text as rules
from ..oracles.array_text import F32
from ..support import inputs

SHAPE = (5, 6, 7)
TABLE = jq.Codebook("uneven", (-0.75, -0.25, 0.25, 1.0))
BOOKS = {"nf4": jq.nf4, "uneven": TABLE}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "int8": ("int8", "tensor", {}),
    "int8, all codes": ("int8", "axes", {"narrow_range": False}),
    "int8, asymmetric": ("int8", "blocked both", {"symmetric": False}),
    "int8, asymmetric and narrow": ("int8", "axis", {"symmetric": False, "narrow_range": True}),
    "uint8": ("uint8", "axis", {}),
    "uint8, symmetric": ("uint8", "blocked", {"symmetric": True}),
    "uint8, symmetric, all codes": ("uint8", "axes", {"symmetric": True, "narrow_range": False}),
    "uint4": ("uint4", "blocked", {}),
    "int2": ("int2", "axis", {}),
    "uint2": ("uint2", "tensor", {}),
    "int16": ("int16", "axis", {}),
    "uint16": ("uint16", "axes", {}),
    "float8_e4m3fn": ("float8_e4m3fn", "axis", {}),
    "float8_e5m2fnuz": ("float8_e5m2fnuz", "blocked", {}),
    "float4_e2m1fn": ("float4_e2m1fn", "tensor", {}),
    "nf4": ("nf4", "blocked", {}),
    "uneven": ("uneven", "axis", {}),
}


def spec_of(case: str) -> jq.QuantSpec:
    name, granularity, options = CASES[case]
    return jq.QuantSpec(BOOKS.get(name) or onnx_text.dtype(name), GRANULARITIES[granularity][0], **options)


class Problem(NamedTuple):
    """A problem, also in the oracle's form. `learned` rounds to `point`; both are None if the zero point is fixed."""

    x: np.ndarray
    scale: np.ndarray
    point: np.ndarray | None
    learned: np.ndarray | None
    g: np.ndarray
    each: array_text.Sizes
    steps: rules.Steps


def _with_both(x: np.ndarray, scale: np.ndarray, beyond: float) -> np.ndarray:
    """Return x with three fixed first elements: one in range, 0, and one out of range."""
    x.flat[0], x.flat[1] = 0, beyond * scale.flat[1]
    return x


def draw_problem(rng: np.random.Generator, case: str) -> Problem:
    name, granularity, _ = CASES[case]
    spec = spec_of(case)
    sizes = array_text.sizes(SHAPE, GRANULARITIES[granularity][1])
    entries = array_text.entries(SHAPE, sizes)
    # With a power of two, a bound and its neighbors are exact.
    scale = np.where(
        rng.random(entries) < 0.5, np.exp2(rng.integers(-9, 3, entries)), inputs.scales(rng, entries, np.dtype(F32))
    )
    scale = scale.astype(F32)
    wide = array_text.spread(scale, sizes, SHAPE)
    point = learned = steps = None
    if not spec.symmetric:
        low, high = (int(b) for b in spec.bounds)
        # LSQ's gradient scale is undefined if the zero point is the largest code.
        point = np.clip(inputs.zero_points(rng, entries, name).astype(np.int64), low, high - 1)
        learned = (point + rng.choice([-0.5, -0.3, 0.0, 0.3, 0.5], entries)).astype(F32)
        learned = np.where(np.clip(np.rint(learned), low, high - 1) == point, learned, point).astype(F32)
        point = point.astype(onnx_text.dtype(name))
        steps = array_text.spread(point.astype(np.int64), sizes, SHAPE)
    elif spec.fixed_zero_point:
        steps = np.full(SHAPE, spec.fixed_zero_point)
    narrow = bool(spec.narrow_range)
    if name in BOOKS:
        x = _with_both(rules.table_edges(rng, wide, BOOKS[name].levels), wide, 2 * BOOKS[name].largest)
        rule_steps = rules.steps(x, wide, None, name, levels=BOOKS[name].levels)
    else:
        x = _with_both(rules.on_edges(rng, wide, steps, name, narrow), wide, 4 * float(spec.bounds[1]))
        rule_steps = rules.steps(x, wide, steps, name, narrow)
    return Problem(x, scale, point, learned, rng.normal(size=SHAPE).astype(F32), sizes, rule_steps)


def pull(spec: jq.QuantSpec, rule: Any, x: Any, scale: Any, point: Any, g: Any) -> tuple[Any, Any]:
    """Return (y, (dx, ds, dz))."""
    y, vjp = jax.vjp(lambda x, s, z: jq.fake_quantize(x, spec, s, z, gradient=rule), x, scale, point)
    return y, vjp(g)


def check_sum(actual: Any, terms: np.ndarray, sizes: array_text.Sizes, parameter: np.ndarray) -> None:
    """Check a float32 sum up to 16 times half of float32's epsilon of the sum of the magnitudes of its terms."""
    assert actual.shape == parameter.shape
    assert actual.dtype == parameter.dtype
    tolerance = rules.collected(np.abs(terms), sizes) * 2.0**-20
    error = np.abs(np.asarray(actual, np.float64) - rules.collected(terms, sizes))
    assert (error <= tolerance).all(), (actual, rules.collected(terms, sizes), tolerance)


def check_cotangents(actual: tuple[Any, Any], expected: rules.Cotangents, d: Problem, point: np.ndarray | None) -> None:
    y, (dx, ds, dz) = actual
    np.testing.assert_array_equal(y, rules.values(d.steps, d.x.dtype))
    np.testing.assert_array_equal(dx, expected[0].astype(F32))
    check_sum(ds, expected[1], d.each, d.scale)
    if point is None:
        assert dz is None
    elif point.dtype == F32:
        check_sum(dz, expected[2], d.each, point)
    else:
        assert dz.dtype == jax.dtypes.float0
