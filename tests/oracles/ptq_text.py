"""Post-training algorithms in numpy float64, written from the papers; no function of jaxquant is used."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Rounded(NamedTuple):
    """Codes, and the least distance of a value from the point at which its code would change, in steps."""

    codes: np.ndarray
    margin: np.ndarray


def round_values(
    x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, bounds: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the codes of values, the values of the codes, and the distances to the nearest tie, in steps."""
    steps = x / scale
    codes = np.clip(np.rint(steps) + zero_point, *bounds)
    distance = np.abs(np.abs(steps - np.floor(steps)) - 0.5)
    # Beyond the last code no tie changes the code.
    outside = (steps + zero_point < bounds[0] - 0.5) | (steps + zero_point > bounds[1] + 0.5)
    return codes, (codes - zero_point) * scale, np.where(outside, np.inf, distance)


def gptq(
    w: np.ndarray, hessian: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, bounds: tuple[float, float],
    *, damping: float = 0.01, activation_order: bool = False,
) -> Rounded:  # fmt: skip
    """Algorithm 1 of arXiv 2210.17323, column by column.

    Args:
        w: [outputs, inputs].
        hessian: [inputs, inputs].
        scale: [outputs, inputs].
        zero_point: [outputs, inputs].
        bounds: the lowest and the highest code.
        damping: in units of the mean of the diagonal, over the inputs with data.
        activation_order: whether the inputs are in the order of their mean squares.
    """
    w, hessian = w.astype(np.float64).copy(), hessian.astype(np.float64).copy()
    diagonal = np.diag(hessian).copy()
    order = np.argsort(-diagonal, kind="stable") if activation_order else np.arange(len(diagonal))
    live = diagonal > 0
    hessian[~live, ~live] = 1
    hessian += damping * diagonal[live].mean() * np.eye(len(diagonal))
    w, hessian = w[:, order], hessian[order][:, order]
    scale, zero_point = (np.broadcast_to(x, w.shape)[:, order].astype(np.float64) for x in (scale, zero_point))
    inverse = np.linalg.cholesky(np.linalg.inv(hessian)).T
    codes, margins = np.zeros(w.shape), np.zeros(w.shape)
    for j in range(w.shape[1]):
        codes[:, j], values, margins[:, j] = round_values(w[:, j], scale[:, j], zero_point[:, j], bounds)
        error = (w[:, j] - values) / inverse[j, j]
        w[:, j:] -= np.outer(error, inverse[j, j:])
    back = np.argsort(order)
    return Rounded(codes[:, back], margins[:, back])


def find_objective(error: np.ndarray, hessian: np.ndarray) -> float:
    """Return trace(E H E^T) for an error of [outputs, inputs]."""
    error = error.astype(np.float64)
    return float(np.sum((error @ hessian.astype(np.float64)) * error))
