"""Attention over quantized operands in numpy: integers in int64, the softmax in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

F32 = np.float32


class Codes(NamedTuple):
    """Codes and their scales, which broadcast against them."""

    codes: np.ndarray
    scale: np.ndarray

    @property
    def values(self) -> np.ndarray:
        return self.codes.astype(np.float64) * self.scale.astype(np.float64)


def quantize_tokens(x: Any, most: int) -> Codes:
    """Return symmetric codes with a scale for each index of all axes but the last; `most` is the largest code."""
    x = np.asarray(x, F32)
    largest = np.abs(x).max(-1, keepdims=True, initial=0)
    scale = np.where(largest > 0, largest / F32(most), F32(1)).astype(F32)
    return Codes(np.clip(np.rint((x / scale).astype(F32)), -most, most).astype(np.int64), scale)


def share_heads(x: np.ndarray, heads: int) -> np.ndarray:
    """Return keys or values [batch, tokens, kv heads, features], each head repeated for the queries that share it."""
    return np.repeat(x, heads // x.shape[2], axis=2)


def find_integer_scores(q: Codes, k: Codes) -> np.ndarray:
    """Return the exact products [batch, heads, queries, tokens] of the codes of queries and keys."""
    return np.einsum("bthd,bshd->bhts", q.codes, k.codes)


class Result(NamedTuple):
    """The output [batch, queries, heads, features], and the largest error that rounded weights can cause."""

    output: np.ndarray
    error: np.ndarray


def attend(
    q: Codes, k: Codes, v: Codes, factor: float, visible: np.ndarray, bias: np.ndarray | float = 0.0, digits: int = 2
) -> Result:
    """Return the attention of codes with a softmax that is not rounded.

    Args:
        q: the queries.
        k: the keys, with the heads of the queries.
        v: the values, with the heads of the queries.
        factor: what the scores are multiplied by.
        visible: bool [batch, heads, queries, tokens].
        bias: added to the scores.
        digits: the number of digits of the weights whose error is returned.
    """
    scores = np.einsum("bthd,bshd->bhts", q.values, k.values) * factor + bias
    hidden = np.where(visible, scores, -np.inf)
    top = hidden.max(-1, keepdims=True, initial=-np.inf)
    p = np.where(visible, np.exp(np.where(visible, scores - np.where(top == -np.inf, 0, top), 0)), 0)
    total = p.sum(-1, keepdims=True)
    inverse = np.where(total > 0, 1 / np.where(total > 0, total, 1), 0)
    output = np.einsum("bhts,bshd->bthd", p * inverse, v.values)
    # Each weight is off by half a step at most, where a step includes the scale of the token's value.
    token_scale = np.swapaxes(v.scale[..., 0].astype(np.float64), 1, 2)[:, :, None]
    step = (p * token_scale).max(-1, keepdims=True, initial=0) / (128**digits - 1)
    reach = np.einsum("bhts,bshd->bthd", np.broadcast_to(visible, p.shape).astype(np.float64), np.abs(v.codes))
    return Result(output, 0.5 * np.swapaxes(step * inverse, 1, 2) * reach)


def bound_from_floats(q: Codes, k: Codes, v: Codes, factor: float, floats: Any) -> np.ndarray:
    """Return the largest difference from the attention of the floats, [batch, queries, heads, 1].

    A score is off by at most e, so a softmax weight is off by a factor between exp(-2e) and exp(2e). Each value is off
    by half a step.
    """
    x, y = (np.asarray(a, np.float64) for a in floats[:2])
    q_step, k_step = q.scale.astype(np.float64) / 2, k.scale.astype(np.float64) / 2
    q_sums, k_sums = np.abs(x).sum(-1) + x.shape[-1] * q_step[..., 0], np.abs(y).sum(-1)
    errors = np.einsum("bth,bsh->bhts", q_sums, k_step[..., 0]) + np.einsum("bth,bsh->bhts", q_step[..., 0], k_sums)
    error = np.swapaxes(errors.max(-1, initial=0), 1, 2)[..., None] * factor
    values = np.asarray(floats[2], np.float64)
    largest = np.abs(values).max((1, 3), keepdims=True, initial=0)
    return np.expm1(2 * error) * largest + v.scale.max((1, 3), keepdims=True, initial=0) / 2
