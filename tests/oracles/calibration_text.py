"""The calibrators in numpy on the whole data, written from the definitions, without importing jaxquant."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

LEAST_EXPONENT = -100


def histogram(x: np.ndarray, bins: int) -> tuple[int, np.ndarray, int]:
    """Return (exponent, counts, zeros): bins over [-2**exponent, 2**exponent), symmetric about 0."""
    x = x.astype(np.float64).ravel()
    zeros = int((x == 0).sum())
    x = x[x != 0]
    exponent = int(max([LEAST_EXPONENT, *np.frexp(np.abs(x))[1]]))
    size = np.floor(np.abs(x) / width(exponent, bins)).astype(np.int64)
    index = np.where(x < 0, bins // 2 - 1 - size, bins // 2 + size)
    return exponent, np.bincount(index, minlength=bins), zeros


def width(exponent: int, bins: int) -> float:
    return math.ldexp(1.0, exponent) / (bins // 2)


def parameters(kind: str, low: float, high: float) -> tuple[np.float32, float]:
    """Return the float32 scale and the zero point of a range, as documented in `quantize`, for a kind of `rounded`."""
    low32, high32 = np.float32(min(low, 0)), np.float32(max(high, 0))
    if kind == "uint8":
        scale = np.float32((high32 - low32) / np.float32(255))
        return scale, float(np.rint(np.clip(np.float32(0) - np.float32(low32 / scale), 0, 255)))
    largest = {"int8": 127, "int4": 7, "float8_e4m3fn": 448, "float4_e2m1fn": 6, "nf4": 1}[kind]
    return np.float32(max(-low32, high32) / np.float32(largest)), 0.0


def rounded(kind: str, steps: np.ndarray, point: float, levels: np.ndarray | None = None) -> np.ndarray:
    """Return the nearest code to each number of float32 steps, in steps."""
    if kind in ("int8", "int4", "uint8"):
        low, high = {"int8": (-127, 127), "int4": (-7, 7), "uint8": (0, 255)}[kind]
        return np.clip(np.rint(steps) + point, low, high) - point
    if levels is not None:
        return levels[np.abs(steps[:, None] - levels).argmin(axis=1)]
    dtype = np.dtype(getattr(ml_dtypes, kind))
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(steps, -largest, largest).astype(dtype).astype(np.float64)


def squared_error(kind: str, x: np.ndarray, low: float, high: float, levels: np.ndarray | None = None) -> float:
    """Return the mean of (x - x_q)**2 over x in float64."""
    scale, point = parameters(kind, low, high)
    steps = (x.astype(np.float32) / scale).astype(np.float32)
    values = rounded(kind, steps, point, levels) * np.float64(scale)
    return float(np.mean((x.astype(np.float64) - values) ** 2))


def least_error(kind: str, x: np.ndarray, grid: int, levels: np.ndarray | None = None) -> tuple[int, np.ndarray]:
    """Return the fraction of the range with the least error on all data, and the errors of all fractions."""
    low, high = min(x.min(), 0), max(x.max(), 0)
    errors = []
    for i in range(1, grid + 1):
        share = i / grid
        if kind == "uint8":
            errors.append(squared_error(kind, x, low * share, high * share))
        else:
            reach = max(-low, high) * share
            errors.append(squared_error(kind, x, max(-reach, low), min(reach, high), levels))
    error_array = np.array(errors)
    return grid - int(error_array[::-1].argmin()), error_array


def divergence(counts: np.ndarray, start: int, end: int, levels: int) -> float:
    """Return KL(P || Q) of the bins from `start` up to `end` in float64, run by run."""
    inner_counts = counts[start:end].astype(np.float64)
    p = inner_counts.copy()
    p[0] += counts[:start].sum()
    p[-1] += counts[end:].sum()
    q = np.zeros_like(p)
    runs = np.arange(len(p)) * levels // len(p)
    for run in range(levels):
        is_in_run = (runs == run) & (p > 0)
        if is_in_run.any():
            q[is_in_run] = inner_counts[runs == run].sum() / is_in_run.sum()
    if q.sum() == 0:
        return math.inf
    p, q = smoothed(p), smoothed(q)
    return float(np.sum(p * np.log(p / q)))


def smoothed(counts: np.ndarray) -> np.ndarray:
    empty = counts == 0
    total = counts.sum()
    mass = min(1e-4 * empty.sum(), total / 2)
    return np.where(empty, mass / max(empty.sum(), 1), counts * (1 - mass / total)) / total


def least_divergence(counts: np.ndarray, levels: int, symmetric: bool) -> tuple[int, dict[int, float]]:
    """Return how many bins on each side of 0 the range with the least divergence has, and all divergences."""
    half = len(counts) // 2
    if symmetric:
        counts = counts[half:] + counts[:half][::-1]
    divergences = {}
    (occupied,) = np.nonzero(counts)
    for side in range(levels if symmetric else max(1, levels // 2), half + 1):
        if symmetric:
            start, end = 0, min(side, occupied[-1] + 1)
        else:
            start, end = max(half - side, min(occupied[0], half)), min(half + side, max(occupied[-1], half - 1) + 1)
        if end - start >= levels or side == half:
            divergences[side] = divergence(counts, start, end, levels)
    return min(divergences, key=lambda side: divergences[side]), divergences
