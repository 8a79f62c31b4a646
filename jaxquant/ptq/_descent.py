"""Coordinate descent on the codes of a weight: each code in turn becomes the best one for all others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays.spec import QuantSpec
from . import _grid
from ._grid import Grid

# TPUs and GPUs may round the operands of float32 products to bfloat16 or TF32 by default, which leaves too few digits
# to tell the better of two codes.
_HIGHEST = lax.Precision.HIGHEST
_BLOCK = 64


def descend(
    w: jax.Array, codes: jax.Array, hessian: jax.Array, grid: Grid, spec: QuantSpec, sweeps: int,
    bounds: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:  # fmt: skip
    """Return the codes after some sweeps over the inputs.

    With errors E = w - values of the codes, trace(E^T H E) is a parabola in each value. Its minimum, rounded to the
    grid, is the best code, so that no step raises the error.

    Args:
        w: [inputs, outputs].
        codes: the codes to start from, as `encode_values` returns them.
        hessian: [inputs, inputs].
        grid: the scale and the zero point of each element.
        spec: Static. The spec.
        sweeps: Static. The number of sweeps.
        bounds: the least and the largest code of each element, or None for those of the spec.
    """
    count = w.shape[0]
    size = min(_BLOCK, max(count, 1))
    # Rows of which the Hessian is 0, so that their errors neither count nor move, fill the last block.
    filled = ((0, -count % size), (0, 0))
    w, codes = jnp.pad(w, filled), jnp.pad(codes, filled)
    limits = jax.tree.map(lambda x: jnp.pad(x, filled), bounds)
    grid = jax.tree.map(lambda x: jnp.pad(x, filled, constant_values=1), grid)
    hessian = jnp.pad(hessian, (filled[0], filled[0]))
    diagonal = jnp.diagonal(hessian)
    errors = w - _grid.decode_values(codes, grid, spec)

    def visit_block(index: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        errors, codes = state
        start = index % (w.shape[0] // size) * size
        rows = lax.dynamic_slice_in_dim(hessian, start, size)
        own = lax.dynamic_slice_in_dim(rows, start, size, 1)
        before = lax.dynamic_slice_in_dim(errors, start, size)
        slopes = jnp.matmul(rows, errors, precision=_HIGHEST)

        def visit_row(place: Any, inner: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            current, codes = inner
            curve = diagonal[start + place]
            # The slope at the errors before this block, and what its rows have changed since.
            slope = slopes[place] + jnp.matmul(own[place], current - before, precision=_HIGHEST)
            here, row = grid.take_row(start + place), w[start + place]
            value = row - current[place] + slope / jnp.where(curve > 0, curve, jnp.ones_like(curve))
            code = _grid.encode_values(value, here, spec)
            if limits is not None:
                code = jnp.clip(code, *(limit[start + place] for limit in limits))
            code = jnp.where(curve > 0, code, codes[place])
            error = row - _grid.decode_values(code, here, spec)
            return current.at[place].set(error), codes.at[place].set(code)

        inner = (before, lax.dynamic_slice_in_dim(codes, start, size))
        inner = lax.fori_loop(0, size, visit_row, inner)
        return tuple(lax.dynamic_update_slice_in_dim(x, y, start, 0) for x, y in zip(state, inner, strict=True))  # type: ignore[return-value]

    steps = sweeps * (w.shape[0] // size)
    return lax.fori_loop(0, steps, visit_block, (errors, codes))[1][:count]
