"""The arrays of a KVCache: how codes are arranged and packed, and how tokens are written."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays.quantize import quantize
from .._arrays.spec import QuantSpec
from .._core import dtypes

# The axis of the features, which is packed, and that of the tokens, in the codes of keys and of values. Keys are
# contracted along their features and values along their tokens. XLA:CPU reads an operand of which few rows are
# contracted fastest if its contracted dimension is the last.
KEY_AXES = (3, 2)
VALUE_AXES = (2, 3)


def is_packed(spec: QuantSpec) -> bool:
    """Return whether two codes share a byte."""
    return dtypes.find_width(spec.dtype) == 4


def count_packed(spec: QuantSpec, features: int) -> int:
    """Return the number of bytes that hold the codes of the features of a token and head."""
    return math.ceil(features / 2) if is_packed(spec) else features


def encode_tokens(x: jax.Array, spec: QuantSpec, axes: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Return the codes of tokens as a cache stores them, and their scales.

    Args:
        x: float [batch, tokens, heads, features].
        spec: how to quantize, with a scale for each token and head.
        axes: `KEY_AXES` or `VALUE_AXES`.

    Returns:
        Codes [batch, heads, tokens, features] of keys, or [batch, heads, features, tokens] of values, and scales
        [batch, heads, tokens].
    """
    q = quantize(x, spec)
    order = (0, 2, 1, 3) if axes == KEY_AXES else (0, 2, 3, 1)
    codes = lax.transpose(q.codes.astype(jnp.int8), order)
    if is_packed(spec):
        codes = _pack_halves(codes, axes[0])
    return codes, lax.transpose(lax.squeeze(q.scale, (3,)), (0, 2, 1))


def _pack_halves(codes: jax.Array, axis: int) -> jax.Array:
    """Return 4-bit codes, int8, as bytes: the first half of an axis in the low bits, the second half in the high ones.

    Neighbors in a byte are half an axis apart, so that packing and unpacking move whole slices.
    """
    length = codes.shape[axis]
    half = math.ceil(length / 2)
    # Shifts of unsigned bytes fill with zeros and never extend the sign.
    bits = lax.bitcast_convert_type(codes, jnp.uint8)
    low = lax.slice_in_dim(bits, 0, half, axis=axis) & np.uint8(15)
    high = lax.slice_in_dim(bits, half, length, axis=axis) << np.uint8(4)
    padding = [(0, 2 * half - length if a == axis else 0, 0) for a in range(codes.ndim)]
    return low | lax.pad(high, np.uint8(0), padding)


def unpack_codes(stored: jax.Array, spec: QuantSpec, axis: int, features: int) -> jax.Array:
    """Return the codes of a cache as int8, with `features` entries along the axis of the features."""
    if not is_packed(spec):
        return stored
    signed = lax.bitcast_convert_type(stored, jnp.int8)
    # A shift to the right extends the sign.
    low, high = (signed << np.int8(4)) >> np.int8(4), signed >> np.int8(4)
    return lax.slice_in_dim(lax.concatenate([low, high], axis), 0, features, axis=axis)


def run_once(function: Callable[[Any], Any], arrays: Any) -> Any:
    """Return a function of arrays, computed in a loop of one step.

    XLA:CPU would fuse the writing of tokens with each contraction that reads the cache, and write them there into a
    further copy of it. A fusion does not cross the end of a loop, and a loop updates its carry in place. The compiler
    does not know the number of steps; a barrier alone would do with jax 0.12, but jax 0.10's XLA removes it too early.
    """
    return lax.fori_loop(np.int32(0), lax.optimization_barrier(np.int32(1)), lambda _, x: function(x), arrays)


def write_slice(stored: jax.Array, update: jax.Array, axis: int, start: jax.Array) -> jax.Array:
    """Return an array with the slice of an axis from `start`, an int32 scalar, replaced; it is moved to fit if need be.

    XLA writes it in place if the array is donated or is the carry of a loop.
    """
    return lax.dynamic_update_slice_in_dim(stored, update, start, axis)


def write_places(stored: jax.Array, update: jax.Array, axis: int, places: jax.Array) -> jax.Array:
    """Return an array with some indices of an axis replaced; those beyond the axis are dropped.

    Args:
        stored: [batch, heads, ...].
        update: the same shape, with an entry for each place along the axis.
        axis: the axis of the tokens, 2 or more.
        places: int32 [tokens], or [batch, tokens] for places that differ between rows.
    """
    if places.ndim == 2:
        return jax.vmap(functools.partial(_scatter, axis=axis - 1))(stored, update, places)
    return _scatter(stored, update, places, axis=axis)


def _scatter(stored: jax.Array, update: jax.Array, places: jax.Array, *, axis: int) -> jax.Array:
    index = (*(slice(None),) * axis, places)
    return stored.at[index].set(update, mode="drop", unique_indices=True)
