"""Transposes that stay where they are put."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from .._core import barriers


def is_moving(permutation: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a transpose moves anything: dimensions of 1 may stand anywhere."""
    kept = [axis for axis in permutation if shape[axis] != 1]
    return kept != sorted(kept)


def transpose_in_memory(x: jax.Array, permutation: Sequence[int]) -> jax.Array:
    """Returns x transposed, and in memory that way before a contraction reads it.

    XLA:CPU folds a transpose into the dimension numbers of the contraction behind it, and so out of the form that
    its kernel takes. It cannot fold it through a barrier around a reshape; with a new dimension of 1 the transpose
    itself keeps its fast kernel (a flattening reshape would cost it that).
    """
    if not is_moving(permutation, x.shape):
        return lax.reshape(x, tuple(x.shape[axis] for axis in permutation))
    turned = lax.transpose(x, tuple(permutation))
    return barriers.pin_layout(turned)
