"""Softmax of float32 as ONNX Runtime's kernels for x86-64 compute it, in numpy, without importing jaxquant.

The kernels for AVX-512 and for AVX2 with FMA have the same approximation of exp, and add in another order: they have as
many partial sums as the vectors have lanes, 16 or 8.
"""

from __future__ import annotations

import numpy as np

from .microsoft_text import fuse_multiply_add

F = np.float32
# The coefficients of exp(r) for |r| <= log(2) / 2, the highest power first, and the parts of log(2).
_POLYNOMIAL = ("0x1.694p-10", "0x1.125edcp-7", "0x1.555b5ap-5", "0x1.55545p-3", "0x1.fffff6p-2", "0x1p0", "0x1p0")
_LOG2_HIGH, _LOG2_LOW = F(-6.93145752e-1), F(-1.42860677e-6)
_BIAS = F(1.5 * 2**23)  # a sum with it rounds to an integer


def exponentiate(x: np.ndarray) -> np.ndarray:
    """Return exp(x) for x <= 0."""
    x = np.maximum(x, F(-88.3762626647949))
    count = fuse_multiply_add(x, F(np.log2(np.e)), _BIAS) - _BIAS
    rest = fuse_multiply_add(count, _LOG2_LOW, fuse_multiply_add(count, _LOG2_HIGH, x))
    total = np.full_like(x, float.fromhex(_POLYNOMIAL[0]))
    for coefficient in _POLYNOMIAL[1:]:
        total = fuse_multiply_add(total, rest, F(float.fromhex(coefficient)))
    return np.ldexp(total, count.astype(np.int32))


def softmax(x: np.ndarray, lanes: int) -> np.ndarray:
    """Return the softmax along the last axis with a number of partial sums."""
    exponentials = exponentiate(x - x.max(axis=-1, keepdims=True))
    padded = np.pad(exponentials, [*((0, 0) for _ in x.shape[:-1]), (0, -x.shape[-1] % lanes)])
    total = np.zeros((*x.shape[:-1], lanes), F)
    for start in range(0, padded.shape[-1], lanes):
        total = total + padded[..., start : start + lanes]
    if lanes == 16:  # the two halves of a vector of AVX-512
        total = total[..., :8] + total[..., 8:]
    while total.shape[-1] > 1:  # pairs of neighbors
        total = total[..., 0::2] + total[..., 1::2]
    return exponentials * (F(1) / total)
