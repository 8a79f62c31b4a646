"""Transposes that XLA does not fold into the contraction that follows."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from .._kernels import barriers


def is_moving(permutation: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a transpose moves elements in memory; the position of a dimension of 1 does not matter."""
    axes = [axis for axis in permutation if shape[axis] != 1]
    return axes != sorted(axes)


def transpose_in_memory(x: jax.Array, permutation: Sequence[int]) -> jax.Array:
    """Return x transposed, and make XLA:CPU write it to memory in that layout before another operation reads it.

    XLA:CPU would fold the transpose into the dimension numbers of the contraction that follows. The contraction would
    then not have the form that its fast kernel accepts, and that costs more than the transpose.
    """
    # A transpose that moves nothing is a reshape, which is free.
    if not is_moving(permutation, x.shape):
        return lax.reshape(x, tuple(x.shape[axis] for axis in permutation))
    return barriers.pin_layout(lax.transpose(x, tuple(permutation)))
