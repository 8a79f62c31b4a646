"""Transposes that XLA does not fold into the contraction that follows."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from .._core import barriers


def is_moving(permutation: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a transpose moves elements in memory; the position of a dimension of 1 does not matter."""
    kept = [axis for axis in permutation if shape[axis] != 1]
    return kept != sorted(kept)


def transpose_in_memory(x: jax.Array, permutation: Sequence[int]) -> jax.Array:
    """Return x transposed, and on a CPU written to memory in that layout before another operation reads it.

    XLA:CPU folds a transpose into the dimension numbers of the contraction that follows. The contraction then no
    longer has the form that its fast kernel accepts, and costs more than the transpose saved.
    """
    # A transpose that moves nothing is a reshape, which is free.
    if not is_moving(permutation, x.shape):
        return lax.reshape(x, tuple(x.shape[axis] for axis in permutation))
    return barriers.pin_layout(lax.transpose(x, tuple(permutation)))
