"""The values of quantized arrays and their products, in numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import jaxquant as jq
from jaxquant import QuantizedArray


def expanded(part: Any, shape: tuple[int, ...], block_size: int | None) -> np.ndarray:
    """Return a scale or zero point with one entry per index, in numpy."""
    part = np.asarray(part)
    for axis, (entries, n) in enumerate(zip(part.shape, shape, strict=True)):
        if entries != n:
            size = n if entries == 1 else block_size or n // entries
            part = np.take(part, np.arange(n) // max(size, 1), axis=axis)
    return part


def dequantized(q: jq.QuantizedArray) -> np.ndarray:
    """Return the values that the codes represent, computed in float32 and converted to q's dtype."""
    values, scale = np.asarray(q.codes), expanded(q.scale, q.shape, q.block_size).astype(np.float32)
    if q.codebook is not None:
        steps = np.asarray(q.codebook.levels, np.float32)[values.astype(np.int32)]
    elif q.zero_point is not None:
        steps = values.astype(np.int32) - expanded(q.zero_point, q.shape, q.block_size).astype(np.int32)
    else:
        steps = values.astype(np.float32)
    return (steps.astype(np.float32) * scale).astype(q.dtype)


def wide(part: np.ndarray, shape: tuple[int, ...], block: int | None) -> np.ndarray:
    """Return a scale or zero point with one entry per element."""
    for axis, n in enumerate(shape):
        size = n if part.shape[axis] == 1 else 1 if part.shape[axis] == n else block or n // part.shape[axis]
        part = np.take(part, np.arange(n) // max(size, 1), axis=axis)
    return part


def product(lhs: QuantizedArray, rhs: QuantizedArray, numbers: Any, length: int | None = None) -> np.ndarray:
    """Return dot_general's result: scaled integer sums over each `length` indices of the first contracted axis."""
    (left, right), (batch_l, batch_r) = numbers
    sides = []
    for q, contracted, batch in ((lhs, left, batch_l), (rhs, right, batch_r)):
        codes = np.asarray(q.codes).astype(np.int64)
        if q.zero_point is not None:
            codes = codes - wide(np.asarray(q.zero_point).astype(np.int64), q.shape, q.block_size)
        scale = wide(np.asarray(q.scale).astype(np.float32), q.shape, q.block_size)
        free = [a for a in range(q.ndim) if a not in (*contracted, *batch)]
        order = (*batch, *free, *contracted)
        sides.append((codes.transpose(order), scale.transpose(order), [q.shape[a] for a in free], len(batch)))
    (a, a_scale, a_free, batch), (b, b_scale, b_free, _) = sides
    depth = a.shape[batch + len(a_free)]
    total = None
    for start in range(0, depth, length or depth):
        run = slice(start, start + (length or depth))
        slices = [(*(slice(None),) * (batch + len(f)), run) for f in (a_free, b_free)]
        sums = []
        for values, free in ((a[slices[0]], a_free), (b[slices[1]], b_free)):
            rest = math.prod(values.shape[batch + len(free) :])
            sums.append(values.reshape((*values.shape[:batch], math.prod(free), rest)))
        acc = np.einsum("...ik,...jk->...ij", *sums)
        assert np.abs(acc).max(initial=0) < 2**31
        first = [
            s[c].reshape((*s.shape[:batch], math.prod(f), math.prod(s[c].shape[batch + len(f) :])))[..., 0]
            for s, c, f in ((a_scale, slices[0], a_free), (b_scale, slices[1], b_free))
        ]
        scale = (first[0][..., :, None] * first[1][..., None, :]).astype(np.float32)
        term = acc.astype(np.float32) * scale
        total = term if total is None else (total + term).astype(np.float32)
    assert total is not None
    return total.reshape((*a.shape[:batch], *a_free, *b_free))
