"""The cotangents in the docstrings of the float contractions, in float64 numpy, without importing jaxquant or jax."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import contraction_text

Array = np.ndarray


def collapsed(value: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the dimensions that broadcasting from `shape` has repeated."""
    value = value.sum(axis=tuple(range(value.ndim - len(shape))))
    axes = tuple(i for i, (n, m) in enumerate(zip(value.shape, shape, strict=True)) if m == 1 != n)
    return value.sum(axis=axes, keepdims=True)


def of_columns(terms: Array, shape: tuple[int, ...]) -> Array:
    """Sum terms of b's shape to a scale's shape: one entry, one per column, or one per block and column."""
    if int(np.prod(shape)) == 1:
        return terms.sum().reshape(shape)
    if len(shape) == 2 and shape[0] > 1 and terms.ndim == 2:
        return terms.reshape(shape[0], -1, terms.shape[-1]).sum(1)
    by_column = terms.sum(axis=-2, keepdims=True)
    return collapsed(by_column, shape) if len(shape) > 1 else by_column.reshape(-1, *shape).sum(0)


def of_rows(terms: Array, shape: tuple[int, ...]) -> Array:
    """Sum terms of a's shape to a scale's shape: one entry, or one per row."""
    if int(np.prod(shape)) == 1:
        return terms.sum().reshape(shape)
    by_row = terms.sum(axis=-1, keepdims=True)
    return collapsed(by_row, shape) if len(shape) > 1 else by_row.reshape(-1, *shape).sum(0)


def spread(value: Array, b: Array) -> Array:
    """Return a scale or zero point of b in float64. One with blocks is expanded to b's shape."""
    value = np.asarray(value, np.float64)
    if value.ndim == 2 and b.ndim == 2 and value.shape[0] > 1:
        return np.repeat(value, b.shape[0] // value.shape[0], axis=0)
    return contraction_text.per_column(value)


def of_product(steps_a: Array, a_scale: Any, b: Array, b_scale: Array, b_point: Any, g: Array) -> dict[str, Array]:
    """Return the cotangents of y = (steps_a * a_scale) @ ((b - b_point) * b_scale) + bias for g, as matrices."""
    steps_b = b.astype(np.float64) - (0 if b_point is None else spread(b_point, b))
    weights = steps_b * spread(b_scale, b)
    values = steps_a * contraction_text.per_row(np.asarray(a_scale, np.float64))
    da = collapsed(g @ np.swapaxes(weights, -1, -2), steps_a.shape)
    dw = collapsed(np.swapaxes(values, -1, -2) @ g, b.shape)
    return {
        "a": da,
        "a_scale": of_rows(da * steps_a, np.shape(a_scale)),
        "b_scale": of_columns(dw * steps_b, b_scale.shape),
        "bias": g.reshape(-1, g.shape[-1]).sum(0),
    }


def sizes_of_product(
    steps_a: Array, a_scale: Any, b: Array, b_scale: Array, b_point: Any, g: Array
) -> dict[str, Array]:
    """Return the same sums with the magnitudes of their terms, to which their rounding errors are proportional."""
    steps_b = b.astype(np.float64) - (0 if b_point is None else spread(b_point, b))
    return of_product(np.abs(steps_a), a_scale, np.abs(steps_b), b_scale, None, np.abs(g))


def of_nbits(arguments: dict[str, Any], steps: Array, g: Array) -> dict[str, Array]:
    """Return the cotangents that the docstring states."""
    a = arguments["a"].astype(np.float64).reshape(-1, arguments["a"].shape[-1])
    g = g.astype(np.float64).reshape(-1, g.shape[-1])
    scales = arguments["scales"].astype(np.float64).reshape(steps.shape[:2])
    weights = (steps * scales[..., None]).reshape(len(steps), -1)
    padded = np.pad(a, ((0, 0), (0, weights.shape[1] - a.shape[1])))
    dw = (g.T @ padded).reshape(steps.shape)
    return {
        "a": (g @ weights[:, : a.shape[1]]).reshape(arguments["a"].shape),
        "scales": (dw * steps).sum(2).reshape(arguments["scales"].shape),
        "zero_points": -dw.sum(2) * scales,
        "bias": g.sum(0),
    }


def sizes_of_nbits(arguments: dict[str, Any], steps: Array, g: Array) -> dict[str, Array]:
    """Return the same sums with the magnitudes of their terms."""
    sizes = of_nbits({**arguments, "a": np.abs(arguments["a"])}, np.abs(steps), np.abs(g))
    return {name: np.abs(size) for name, size in sizes.items()}
