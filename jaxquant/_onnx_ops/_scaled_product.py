"""The float32 product of two 8-bit operands, with a scale for each column of b or for each block of its rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._core import checks
from .._kernels import accumulator, barriers, signed_codes
from .._kernels.accumulator import sum_over_blocks
from ..integer.dot_general import MatrixShapes
from ._rows_and_columns import multiply_matrices, read_column_steps, read_per_column


def count_blocks(b_scale: jax.Array, shapes: MatrixShapes) -> int:
    """Return the number of blocks of b's rows, each of which has its own scales."""
    # Only a single matrix has blocks of rows. With a stack of matrices, a scale of rank 2 is refused where columns are
    # read.
    return b_scale.shape[0] if b_scale.ndim == 2 and len(shapes.b) == 2 else 1


def read_scaled_columns(
    function: str, b: jax.Array, b_scale: jax.Array, b_zero_point: Any, shapes: MatrixShapes, centred: bool
) -> tuple[jax.Array, Any]:
    """Check b_scale and b_zero_point, and return the scale and the int32 zero point of the signed b.

    They have b's rank with 1 for its rows, or shape [blocks, N].
    """
    blocks = count_blocks(b_scale, shapes)
    if blocks <= 1:
        steps = read_column_steps(function, b, b_zero_point, shapes, centred)
        return read_per_column(function, "b_scale", b_scale, shapes), steps
    depth, columns = shapes.b
    expected = f"a scalar, shape ({columns},) or (blocks, {columns}) with blocks that divide b's {depth} rows"
    fits = depth % blocks == 0 and b_scale.shape[1] == columns
    checks.require(fits, function, "b_scale", expected, f"shape {b_scale.shape}")
    if b_zero_point is not None:
        checks.check_same_dtype(function, "b_zero_point", b_zero_point, b.dtype, "b's")
        if b_zero_point.shape != b_scale.shape:
            b_zero_point = read_per_column(function, "b_zero_point", b_zero_point, shapes)
        # The loop over blocks takes a zero point for each block, so one for all blocks is repeated.
        b_zero_point = jnp.broadcast_to(b_zero_point, (blocks, b_zero_point.shape[-1]))
    return b_scale, signed_codes.convert_steps(b_zero_point, b.dtype, centred)


def multiply_scaled(
    a: jax.Array, b: jax.Array, a_steps: Any, b_steps: Any, a_scale: jax.Array, b_scale: jax.Array, shapes: MatrixShapes
) -> jax.Array:
    """Return the int32 product times (a_scale * b_scale) in float32; with blocks, the sum of such products."""
    blocks = count_blocks(b_scale, shapes)
    if blocks <= 1:
        acc = multiply_matrices(a, b, a_steps, b_steps, shapes)
        return accumulator.scale_by_both(acc, a_scale, b_scale)
    length = shapes.b[0] // blocks
    block_shapes = shapes._replace(a=(*shapes.a[:-1], length), b=(length, shapes.b[1]))
    # a must be in memory before it is cut. Otherwise XLA would repeat the operation that computes it, for example a
    # quantization, for each block.
    a_blocks = barriers.pin_layout(jnp.moveaxis(a.reshape(*shapes.a[:-1], blocks, length), -2, 0))
    # A scalar zero point is not part of what the loop iterates over.
    stacked_steps = None if b_steps is None or b_steps.ndim == 0 else b_steps[:, None]

    def contract_block(block: Any) -> jax.Array:
        rows, filters, steps, scale = block
        acc = multiply_matrices(rows, filters, a_steps, b_steps if steps is None else steps, block_shapes)
        return accumulator.scale_by_both(acc, a_scale, scale)

    stacks = (a_blocks, b.reshape(blocks, length, shapes.b[1]), stacked_steps, b_scale[:, None])
    return sum_over_blocks(contract_block, stacks)
