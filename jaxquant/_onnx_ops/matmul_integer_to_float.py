"""ONNX Runtime's MatMulIntegerToFloat, with a scale per block of rows besides."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._core import barriers, checks, dtypes, matmul_shapes
from .._core.entry_point import compile_entry_point
from .._core.number_arguments import convert_plain_scale
from ..integer import _operands, _scaling
from ..integer._block_sum import sum_over_blocks
from . import _rows_and_columns

_NAME = "matmul_integer_to_float"


def matmul_integer_to_float(
    a: ArrayLike,
    b: ArrayLike,
    a_scale: ArrayLike,
    b_scale: ArrayLike,
    a_zero_point: ArrayLike | None = None,
    b_zero_point: ArrayLike | None = None,
    bias: ArrayLike | None = None,
) -> jax.Array:
    """y = float32(acc) * (a_scale * b_scale) + bias, acc as of `matmul_integer`.

    The float32 operations are ONNX Runtime's, each rounded once: the scales are multiplied first, the product is
    rounded before bias is added. acc wraps around as `matmul_integer`'s does.

    With a scale per block of b's rows, y starts at 0 and adds, block by block in ascending order,
    float32(acc of the block) * (a_scale * b_scale[block]), each product and each sum rounded once.

    Args:
        a: codes, int8 or uint8, of rank 1 or more; numpy.matmul's shapes.
        b: codes, int8 or uint8, not necessarily a's dtype.
        a_scale: value per step of a, float32: a scalar, or one for each row, as [M] or [..., M, 1]. A Python number
            is float32.
        b_scale: value per step of b, float32: a scalar, one for each column, as [N] or [..., 1, N], or, for a b of
            rank 2, [blocks, N]: one for each column and each of `blocks` equal runs of rows.
        a_zero_point: steps, in a's dtype, shaped as an a_scale. None is 0. An int stands for an array of it.
        b_zero_point: steps, in b's dtype, shaped as a b_scale; [blocks, N] only with such a b_scale.
        bias: float32, [N]. None is 0.

    Returns:
        float32, of numpy.matmul's shape.

    Raises:
        TypeError: an argument has a dtype that the operator does not have.
        ValueError: shapes do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> a = jnp.array([[0, 128, 255]], jnp.uint8)
        >>> b = jnp.array([[1, -128], [2, 127], [3, 1]], jnp.int8)
        >>> jq.matmul_integer_to_float(a, b, 0.5, jnp.array([0.25, 2.0]), 128, bias=jnp.array([0.1, -1.0]))
        Array([[   31.725, 16510.   ]], dtype=float32)

    Source: ONNX Runtime's com.microsoft MatMulIntegerToFloat-1; the blocks are this library's.

    Cotangent of a_scale, of b_scale: g * acc times the other scale, summed over what shares the scale. Of bias: g
    summed over rows. Integers have none.
    """
    a_scale, b_scale = convert_plain_scale(_NAME, "a_scale", a_scale), convert_plain_scale(_NAME, "b_scale", b_scale)
    a_zero_point = _operands.convert_zero_point_number(_NAME, "a_zero_point", a_zero_point, a)
    b_zero_point = _operands.convert_zero_point_number(_NAME, "b_zero_point", b_zero_point, b)
    return _matmul_integer_to_float(
        a, b, a_scale, b_scale, a_zero_point, b_zero_point, bias,
        centred=_operands.find_centred((a, b), (a_zero_point, b_zero_point)),
    )  # fmt: skip


@compile_entry_point(_NAME)
def _matmul_integer_to_float(
    a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array, a_zero_point: jax.Array | None,
    b_zero_point: jax.Array | None, bias: jax.Array | None, *, centred: tuple[bool, bool],
) -> jax.Array:  # fmt: skip
    checks.check_array(_NAME, "a", a, _operands.EIGHT_BITS)
    checks.check_array(_NAME, "b", b, _operands.EIGHT_BITS)
    for argument, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        checks.check_array(_NAME, argument, scale, (dtypes.FLOAT32,))
    of = matmul_shapes.find_shapes(_NAME, a, b)
    _rows_and_columns.check_bias(_NAME, bias, of)
    rows = _rows_and_columns.read_per_row(_NAME, "a_scale", a_scale, of)
    blocks = count_blocks(b_scale, of)
    if blocks > 1:
        b_scale, b_zero_point = check_blocks(_NAME, b, b_scale, b_zero_point, of)
        steps = _rows_and_columns.read_zero_points(_NAME, of, (a, b), (a_zero_point, None), (centred[0], True))
        b_steps = _operands.convert_steps(b_zero_point, b.dtype, centred[1])
        y = multiply_blocks(a, b, steps[0], b_steps, rows, b_scale, of)
    else:
        steps = _rows_and_columns.read_zero_points(_NAME, of, (a, b), (a_zero_point, b_zero_point), centred)
        columns = _rows_and_columns.read_per_column(_NAME, "b_scale", b_scale, of)
        y = _scaling.scale_product(
            _rows_and_columns.multiply_matrices(a, b, *steps, of), _scaling.multiply_scales(rows, columns)
        )
    return _scaling.add_bias(y, bias).reshape(of.out)


def count_blocks(b_scale: jax.Array, of: matmul_shapes.Shapes) -> int:
    """Returns how many runs of b's rows have scales of their own."""
    return b_scale.shape[0] if b_scale.ndim == 2 and len(of.b) == 2 else 1


def check_blocks(
    function: str, b: jax.Array, b_scale: jax.Array, b_zero_point: Any, of: matmul_shapes.Shapes
) -> tuple[jax.Array, Any]:
    """Holds a scale per block, and the zero point with it, to its contract; returns both as [blocks, N or 1]."""
    depth, columns = of.b
    blocks = b_scale.shape[0]
    expected = f"a scalar, shape ({columns},) or (blocks, {columns}) with blocks that divide b's {depth} rows"
    fits = depth % blocks == 0 and b_scale.shape[1] == columns
    checks.require(fits, function, "b_scale", expected, f"shape {b_scale.shape}")
    if b_zero_point is None:
        return b_scale, None
    checks.check_same_dtype(function, "b_zero_point", b_zero_point, b.dtype, "b's")
    if b_zero_point.shape != b_scale.shape:
        b_zero_point = _rows_and_columns.read_per_column(function, "b_zero_point", b_zero_point, of)
    return b_scale, jnp.broadcast_to(b_zero_point, (blocks, b_zero_point.shape[-1]))


def multiply_blocks(
    a: jax.Array,
    b: jax.Array,
    a_steps: Any,
    b_steps: Any,
    a_scale: jax.Array,
    b_scale: jax.Array,
    of: matmul_shapes.Shapes,
) -> jax.Array:
    """Returns the product with a scale for each block of b's rows: one integer contraction a block."""
    blocks = b_scale.shape[0]
    length = of.b[0] // blocks
    part = of._replace(a=(*of.a[:-1], length), b=(length, of.b[1]))
    # In memory before it is cut up, or what makes it, a quantization perhaps, would be computed for each piece.
    a_blocks = barriers.pin_layout(jnp.moveaxis(a.reshape(*of.a[:-1], blocks, length), -2, 0))
    own_steps = None if b_steps is None or b_steps.ndim == 0 else b_steps[:, None]

    def contract_block(block: Any) -> jax.Array:
        rows, filters, steps, scale = block
        acc = _rows_and_columns.multiply_matrices(rows, filters, a_steps, b_steps if steps is None else steps, part)
        return _scaling.scale_product(acc, _scaling.multiply_scales(a_scale, scale))

    stacks = (a_blocks, b.reshape(blocks, length, of.b[1]), own_steps, b_scale[:, None])
    return sum_over_blocks(contract_block, stacks)
