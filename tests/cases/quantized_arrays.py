"""Arrays of each dtype and granularity for `quantize`, and their comparison with the text."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxquant as jq

from ..oracles import array_text, onnx_text
from ..oracles.array_text import F32
from ..support import inputs, transforms

SHAPE = (5, 6, 7)
GRANULARITIES: dict[str, tuple[jq.PerTensor | jq.PerAxis | jq.Blocked, tuple[Any, ...]]] = {
    "tensor": (jq.PerTensor(), ("tensor",)),
    "axis": (jq.PerAxis(-2), ("axis", (1,))),
    "axes": (jq.PerAxis((0, 2)), ("axis", (0, 2))),
    "blocked": (jq.Blocked(2, 3), ("blocked", (2,), 3)),
    "blocked both": (jq.Blocked((0, 2), 4), ("blocked", (0, 2), 4)),
}


def spec_of(name: str, granularity: str, **options: Any) -> jq.QuantSpec:
    return jq.QuantSpec(onnx_text.dtype(name), GRANULARITIES[granularity][0], **options)


def expected(x: np.ndarray, spec: jq.QuantSpec, sizes: tuple[int, ...]) -> tuple[Any, Any, np.ndarray]:
    """Return (scale, zero point, codes) by the text, of x's rank."""
    name, narrow = spec.dtype.name, bool(spec.narrow_range)
    low, high = array_text.extremes(x, sizes)
    scale, point = array_text.parameters(
        low, high, name, bool(spec.symmetric), narrow, np.dtype(spec.scale_dtype).name, spec.power_of_two
    )
    wide = array_text.spread(scale, sizes, x.shape)
    steps = None if point is None else array_text.spread(point, sizes, x.shape)
    values = array_text.codes(x, wide, steps, name, narrow)
    return scale, None if point is None else point.astype(onnx_text.dtype(name)), values


def draw_inputs(
    rng: np.random.Generator, spec: jq.QuantSpec, granularity: str, dtype: Any = F32, lead: int = 0
) -> np.ndarray:
    """Return values with a known range, so that most of them can be at or next to ties. Some slices are zeros, and
    some contain an infinity or a NaN."""
    shape = (lead, *SHAPE) if lead else SHAPE
    kind = GRANULARITIES[granularity][1]
    if lead and kind[0] != "tensor":
        kind = (kind[0], tuple(a + 1 for a in kind[1]), *kind[2:])
    sizes = array_text.sizes(shape, kind)
    sizes = (1, *sizes[1:]) if lead else sizes
    size = np.exp(rng.uniform(-4, 4, array_text.entries(shape, sizes)))
    first = rng.normal(rng.normal(), 1, shape) * array_text.spread(size, sizes, shape)
    if spec.symmetric is False and rng.random() < 0.3:
        first = np.abs(first)
    first = first.astype(dtype).astype(F32)
    low, high = array_text.extremes(first, sizes)
    scale, point, _ = expected(first, spec, sizes)
    wide = array_text.spread(scale, sizes, shape).astype(F32)
    steps = 0 if point is None else array_text.spread(point, sizes, shape).astype(np.int64)
    limits = onnx_text.BOUNDS.get(spec.dtype.name, (-9, 9))
    ties = inputs.near_ties(rng, wide, steps, limits, np.dtype(F32))
    bound = tuple(array_text.spread(b, sizes, shape) for b in (low, high))
    is_extreme = (first == bound[0]) | (first == bound[1])
    x = np.where(is_extreme | ~np.isfinite(ties), first, np.clip(ties, *bound))
    zero = array_text.spread(rng.random(low.shape) < 0.1, sizes, shape)
    chances = [0.85, 0.05, 0.05, 0.05] if low.size > 3 or rng.random() < 0.3 else [1, 0, 0, 0]
    odd = array_text.spread(rng.choice([0, np.nan, np.inf, -np.inf], low.shape, p=chances), sizes, shape)
    x = np.where(zero, 0, np.where((rng.random(shape) < 0.2) & ~(odd == 0), odd, x))
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def check_equal(actual: Any, exact: Any) -> None:
    actual, exact = np.asarray(actual), np.asarray(exact)
    assert transforms.mismatches(actual, exact) == 0, (actual, exact)


def check_parts(q: jq.QuantizedArray, x: np.ndarray, spec: jq.QuantSpec, granularity: str) -> np.ndarray:
    """Compare an array with the text, and return the values that it represents by the text."""
    sizes = array_text.sizes(x.shape, GRANULARITIES[granularity][1])
    scale, point, codes = expected(x, spec, sizes)
    check_equal(q.scale, scale)
    assert (q.zero_point is None) == (point is None)
    if point is not None:
        check_equal(q.zero_point, point)
    check_equal(q.codes, codes)
    wide = [None if p is None else array_text.spread(p, sizes, x.shape) for p in (scale, point)]
    assert wide[0] is not None
    assert q.dtype == x.dtype
    return array_text.values(codes, wide[0], wide[1], x.dtype)


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "int8 tensor": ("int8", "tensor", {}),
    "int8 axis": ("int8", "axis", {}),
    "int8 axes, all codes": ("int8", "axes", {"narrow_range": False}),
    "int8 blocked": ("int8", "blocked", {"symmetric": False}),
    "int8 blocked both": ("int8", "blocked both", {"symmetric": False, "narrow_range": True}),
    "uint8 tensor": ("uint8", "tensor", {}),
    "uint8 axis": ("uint8", "axis", {}),
    "uint8 symmetric": ("uint8", "blocked", {"symmetric": True}),
    "uint8 symmetric, all codes": ("uint8", "axes", {"symmetric": True, "narrow_range": False}),
    "uint8 power of two": ("uint8", "axes", {"power_of_two": True}),
    "int4 blocked": ("int4", "blocked", {"scale_dtype": jnp.float16}),
    "uint4 blocked": ("uint4", "blocked", {"scale_dtype": jnp.bfloat16}),
    "uint4 e8m0": ("uint4", "blocked both", {"scale_dtype": jnp.float8_e8m0fnu}),
    "int2 axis": ("int2", "axis", {"narrow_range": False}),
    "int2 ternary": ("int2", "axes", {}),
    "uint2 blocked": ("uint2", "blocked", {}),
    "int16 axis": ("int16", "axis", {}),
    "uint16 axes": ("uint16", "axes", {}),
    "uint16 float16": ("uint16", "axis", {"scale_dtype": jnp.float16}),
    "float8_e4m3fn": ("float8_e4m3fn", "axis", {}),
    "float8_e4m3fnuz": ("float8_e4m3fnuz", "tensor", {}),
    "float8_e5m2": ("float8_e5m2", "blocked", {"scale_dtype": jnp.float8_e8m0fnu}),
    "float8_e5m2fnuz": ("float8_e5m2fnuz", "axes", {}),
    "float4_e2m1fn": ("float4_e2m1fn", "blocked", {"power_of_two": True, "scale_dtype": jnp.bfloat16}),
}
