"""The cotangents of fake quantization for each element, in numpy, written from the papers' formulas.

It does not import jaxquant or jax. With the float32 quotient u = x / s, the zero point z, the least and the largest
code qmin and qmax, and the cotangent g of y, each rule returns (dx, ds, dz). `collected` sums ds and dz over the
elements that share a scale or a zero point.

All comparisons are exact, because u, the codes and the zero points are float64, in which their sums are not rounded.
"""

from __future__ import annotations

import dataclasses
import itertools

import ml_dtypes
import numpy as np

from . import array_text, onnx_text
from .array_text import F32, Sizes

Array = np.ndarray
Cotangents = tuple[Array, Array, Array]


@dataclasses.dataclass(frozen=True)
class Steps:
    """An x with its scale and its zero point, all of x's shape in float64.

    u: x / scale. d: the steps that come out, y = d * scale. scale, point: as they are. inside: whether rounding alone
    stays in range. low, high: the ends of d, which are qmin - z and qmax - z. largest: qmax.
    """

    u: Array
    d: Array
    scale: Array
    point: Array
    inside: Array
    low: Array
    high: Array
    largest: float


def ends(name: str, narrow: bool = False, levels: tuple[float, ...] | None = None) -> tuple[float, float]:
    """Return (qmin, qmax) of an integer dtype, a small float or a table."""
    if levels:
        return levels[0], levels[-1]
    if name in onnx_text.BOUNDS:
        return array_text.bounds(name, narrow)
    largest = float(ml_dtypes.finfo(onnx_text.dtype(name)).max)
    return -largest, largest


def steps(
    x: Array, scale: Array, point: Array | None, name: str, narrow: bool = False,
    levels: tuple[float, ...] | None = None,
) -> Steps:  # fmt: skip
    """Return the steps of x. All arguments have x's shape; `point` contains integers, or is None for 0."""
    u = onnx_text.quotient(x, scale.astype(F32), np.dtype(F32))
    z = np.zeros(x.shape) if point is None else point.astype(np.float64)
    least, most = ends(name, narrow, levels)
    with np.errstate(all="ignore"):
        if levels:
            d = np.array(levels)[array_text.nearest_level(u, levels)]
            inside = (least <= u) & (u <= most)
        elif name in onnx_text.BOUNDS:
            q = np.rint(u) + z
            d = np.where(np.isnan(q), least, np.clip(q, least, most)) - z
            inside = (least <= q) & (q <= most)
        elif name == "float4_e2m1fn":
            finite_u = np.where(np.isnan(u), -0.0, u)  # float4 has no NaN
            d = np.clip(finite_u, least, most).astype(F32).astype(onnx_text.dtype(name)).astype(np.float64)
            inside = np.abs(u) < 7  # halfway from 6 to the next value, 8; a tie rounds to 8, which is even
        else:
            d = np.clip(u, least, most).astype(F32).astype(onnx_text.dtype(name)).astype(np.float64)
            inside = np.isfinite(u.astype(F32).astype(onnx_text.dtype(name)).astype(np.float64))
    return Steps(u, d, scale.astype(np.float64), z, inside, least - z, most - z, most)


def values(p: Steps, out: np.dtype) -> Array:
    """Return y, a float32 product that is rounded once to the dtype of x."""
    with np.errstate(all="ignore"):
        return (p.d.astype(F32) * p.scale.astype(F32)).astype(out)


def _straight(p: Steps, g: Array, m: Array) -> Cotangents:
    with np.errstate(all="ignore"):
        return np.where(m, g, 0), g * (p.d - np.where(m, p.u, 0)), np.where(m, 0, -g * p.scale)


def straight_through(p: Steps, g: Array, clip: bool = True) -> Cotangents:
    """Compute Jain et al., arXiv 1903.08066, eq. 6 to 8, for the scale instead of its logarithm: d - u within the
    codes, and the bound outside. Without clip it is the identity: Bengio et al., arXiv 1308.3432."""
    return _straight(p, g, p.inside if clip else np.ones(p.u.shape, bool))


def stochastic_rounding(p: Steps, g: Array, clip: bool = True) -> Cotangents:
    """Compute the same with the sampled d. The number itself, not its code, determines whether it is in range."""
    return _straight(p, g, (p.low <= p.u) & (p.u <= p.high) if clip else np.ones(p.u.shape, bool))


def lsq(p: Steps, g: Array, elements: Array | int) -> Cotangents:
    """Compute Esser et al., arXiv 1902.08153, eq. 3 and 5, with QN = -low, QP = high, gradient scale 1 / sqrt(N QP)."""
    m = (p.low < p.u) & (p.u < p.high)
    with np.errstate(all="ignore"):
        ds = np.where(p.u <= p.low, p.low, np.where(p.u >= p.high, p.high, p.d - p.u))
        return np.where(m, g, 0), g * ds / np.sqrt(elements * p.high), np.zeros(g.shape)


def lsq_plus(p: Steps, g: Array, elements: Array | int) -> Cotangents:
    """Compute Bhalgat et al., arXiv 2004.09576, eq. 4 and 5, where beta = -z s: (x - beta) / s is u + z, the offset's
    cotangent is g outside the codes, and z's is -s times that. The offset's cotangent times -z is added to ds."""
    m = (p.low < p.u) & (p.u < p.high)
    gain = 1 / np.sqrt(elements * p.largest)
    with np.errstate(all="ignore"):
        of_beta = np.where(m, 0, g)
        end = (
            np.where(p.u <= p.low, p.low, p.high) + p.point
        )  # the paper's n and p, for its cotangent of s at a fixed beta
        ds = np.where(m, g * (p.d - p.u), g * end - of_beta * p.point)
    return np.where(m, g, 0), gain * ds, gain * -of_beta * p.scale


def pact(p: Steps, g: Array) -> Cotangents:
    """Compute Choi et al., arXiv 1805.06085, eq. 1 to 3: y = clip(x, 0, alpha), alpha = high * s. For signed codes,
    y = clip(x, low * s, high * s), whose lower bound has the derivative low with respect to s."""
    above, below = p.u >= p.high, p.u <= p.low
    signed = p.low < 0
    dx = np.where((p.u < p.high) & np.where(signed, p.u > p.low, p.u >= 0), g, 0)
    return dx, np.where(above, g * p.high, 0) + np.where(below & signed, g * p.low, 0), np.zeros(g.shape)


def collected(terms: Array, sizes: Sizes) -> Array:
    """Sum over each box of `sizes` indices. The last boxes may be smaller."""
    counts = tuple(-(-n // size) for n, size in zip(terms.shape, sizes, strict=True))
    pads = [(0, c * s - n) for c, s, n in zip(counts, sizes, terms.shape, strict=True)]
    boxes = np.pad(terms, pads).reshape([n for pair in zip(counts, sizes, strict=True) for n in pair])
    return boxes.sum(axis=tuple(range(1, boxes.ndim, 2)))


def sharing(shape: tuple[int, ...], sizes: Sizes) -> Array:
    """Return for each element how many elements share its scale."""
    return array_text.spread(collected(np.ones(shape), sizes), sizes, shape)


def _beside(rng: np.random.Generator, x: Array) -> Array:
    """Return x or one of its neighboring floats; for 0, a small number that no processor flushes to 0."""
    side = rng.integers(-1, 2, x.shape)
    neighbor = np.nextafter(x, np.where(side < 0, F32(-np.inf), F32(np.inf)))
    neighbor = np.where(x == 0, side * F32(1e-30), neighbor)
    return np.where(side == 0, x, neighbor).astype(F32)


def on_edges(rng: np.random.Generator, scale: Array, point: Array | None, name: str, narrow: bool) -> Array:
    """Sample float32 numbers at the bounds of the codes, half a step from them, at ties, at 0, and the floats next to
    these; the others are anywhere, in range and far outside. `scale` and `point` have x's shape."""
    least, most = ends(name, narrow)
    z = np.zeros(scale.shape) if point is None else point.astype(np.float64)
    places = np.array([least, least, least - 0.5, least + 0.5, most, most, most - 0.5, most + 0.5])
    if name not in onnx_text.BOUNDS:  # the smallest number that overflows by rounding
        half = {"float8_e4m3fn": 16.0, "float8_e4m3fnuz": 8.0, "float4_e2m1fn": 1.0}.get(name, 4096.0)
        places = np.array([least, -most - half, most, most + half, most, most - half])
    picked = rng.choice(places, scale.shape) - z
    inner = rng.integers(0, int(min(most - least, 2**20)) + 1, scale.shape) + least - z
    picked = np.where(rng.random(scale.shape) < 0.4, inner + rng.choice([0, 0.5], scale.shape), picked)
    picked = np.where(rng.random(scale.shape) < 0.05, 0, picked)
    x = (picked * scale.astype(np.float64)).astype(F32)
    x = _beside(rng, x)
    anywhere = (rng.normal(0, most, scale.shape) * scale).astype(F32)
    return np.where(rng.random(scale.shape) < 0.2, anywhere, x).astype(F32)


def table_edges(rng: np.random.Generator, scale: Array, levels: tuple[float, ...]) -> Array:
    """Sample the same for a table: its entries, the midpoints between them, and the floats next to these."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(levels)]
    picked = rng.choice([*levels, *middles, *[levels[0], levels[-1]] * 6, 2 * levels[0], 2 * levels[-1]], scale.shape)
    x = (picked * scale.astype(np.float64)).astype(F32)
    return _beside(rng, x)
