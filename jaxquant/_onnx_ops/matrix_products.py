"""The products of quantized matrices of ONNX and ONNX Runtime: MatMulInteger, QLinearMatMul and their kind."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core import checks, dtypes, entry_point, granularity, recording, sharding
from .._core.entry_point import check_float_zero_point, compile_entry_point, convert_float32_scale
from .._kernels import accumulator, barriers, signed_codes
from .._kernels.accumulator import sum_over_blocks
from .._kernels.contraction import Role, contract_roles
from ..integer import MatrixShapes, determines_sharding, match_matrices
from .quantization import compute_dynamic_range, encode_dynamic

# Scales and zero points per row of a and per column of b, and the int32 product of two stacks of matrices.


def read_per_row(function: str, argument: str, value: jax.Array, shapes: MatrixShapes) -> jax.Array:
    """Return a scale or zero point of a, a single one or one per row, with a's rank and length 1 for its columns."""
    return _read_parameter(function, argument, value, (*shapes.a[:-1], 1), len(shapes.a) - 2, "row of a")


def read_per_column(function: str, argument: str, value: jax.Array, shapes: MatrixShapes) -> jax.Array:
    """Return a scale or zero point of b, a single one or one per column, with b's rank and length 1 for its rows."""
    return _read_parameter(
        function, argument, value, (*shapes.b[:-2], 1, shapes.b[-1]), len(shapes.b) - 1, "column of b"
    )


def _read_parameter(
    function: str, argument: str, value: jax.Array, full: tuple[int, ...], axis: int, per: str
) -> jax.Array:
    # ONNX allows both () and [1] for a value that all rows or columns share.
    if value.ndim <= 1 and value.size == 1:
        return value.reshape((1,) * len(full))
    # A 1-D array applies to the rows or columns of every matrix of the stack.
    if value.shape == (full[axis],):
        return lax.expand_dims(value, [i for i in range(len(full)) if i != axis])
    fits = value.ndim == len(full) and all(v in (1, n) for v, n in zip(value.shape, full, strict=True))
    expected = f"a scalar, shape ({full[axis]},) or {full}: one for each {per}"
    checks.require(fits, function, argument, expected, f"shape {value.shape}")
    return value


def read_row_center(
    function: str, a: jax.Array, zero_point: jax.Array | None, shapes: MatrixShapes, centred: bool
) -> Any:
    """Check a_zero_point and return it as the int32 zero point of the signed a, or None where that is known to be 0."""
    if zero_point is not None:
        checks.check_same_dtype(function, "a_zero_point", zero_point, a.dtype, "a's")
        zero_point = read_per_row(function, "a_zero_point", zero_point, shapes)
    return signed_codes.derive_center(zero_point, a.dtype, centred)


def read_column_center(
    function: str, b: jax.Array, zero_point: jax.Array | None, shapes: MatrixShapes, centred: bool
) -> Any:
    """Check b_zero_point and return it as the int32 zero point of the signed b, or None where that is known to be 0."""
    if zero_point is not None:
        checks.check_same_dtype(function, "b_zero_point", zero_point, b.dtype, "b's")
        zero_point = read_per_column(function, "b_zero_point", zero_point, shapes)
    return signed_codes.derive_center(zero_point, b.dtype, centred)


def check_bias(function: str, bias: jax.Array | None, shapes: MatrixShapes) -> None:
    """Check that the bias is None or has one float32 for each column of b."""
    if bias is not None:
        checks.check_same_dtype(function, "bias", bias, dtypes.FLOAT32, "the result's")
        checks.check_shape(function, "bias", bias, (shapes.b[-1],), "one for each column of b")


def multiply_matrices(
    a: jax.Array, b: jax.Array, a_center: jax.Array | None, b_center: jax.Array | None, shapes: MatrixShapes
) -> jax.Array:
    """Return the int32 product of two 8-bit operands, of shape `shapes.product`.

    The centers are the zero points of the signed operands: int32 scalars, arrays of the operands' rank, or None for 0.
    """
    a, b = signed_codes.convert_to_signed(a.reshape(shapes.a)), signed_codes.convert_to_signed(b.reshape(shapes.b))
    # If b is a single matrix, the batch dimensions of a are only additional rows of one product.
    if math.prod(shapes.b[:-2]) == 1:
        rank = len(shapes.a)
        leading = shapes.product[:-rank] if len(shapes.b) > rank else ()
        b, b_center = b.reshape(shapes.b[-2:]), _drop_batch(b_center)
        left, right = Role((), tuple(range(rank - 1)), (rank - 1,)), Role((), (1,), (0,))
        _check_placement(shapes.function, a, b, left, right)
        acc = contract_roles(a, b, a_center, b_center, left, right)
        return acc.reshape((*leading, *acc.shape)) if leading else acc
    # The kernel needs operands with equal batch dimensions.
    batch = shapes.product[:-2]
    a, a_center = _broadcast_operand(a, batch), _broadcast_center(a_center, batch)
    b, b_center = _broadcast_operand(b, batch), _broadcast_center(b_center, batch)
    n = len(batch)
    axes = tuple(range(n))
    left, right = Role(axes, (n,), (n + 1,)), Role(axes, (n + 1,), (n,))
    _check_placement(shapes.function, a, b, left, right)
    return contract_roles(a, b, a_center, b_center, left, right)


def _check_placement(function: str, a: jax.Array, b: jax.Array, left: Role, right: Role) -> None:
    """Check that the shardings of a and b determine the product's: an ONNX operator has no out_sharding."""
    if not (sharding.is_placed(a) or sharding.is_placed(b)) or determines_sharding(a, b, left, right):
        return
    expected = "shardings that determine the product's sharding (jax.sharding.reshard one), or jq.integer.dot_general"
    got = f"shape {a.shape} sharded as {sharding.read_placement(a)}, {b.shape} as {sharding.read_placement(b)}"
    checks.refuse(function, "a, b", f"{expected}(..., out_sharding=...)", got)


def _drop_batch(center: jax.Array | None) -> Any:
    """Return the center of b without its batch dimensions, which all have length 1."""
    return center if center is None or center.ndim < 2 else center.reshape(center.shape[-2:])


def _broadcast_operand(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Return an operand with the common batch dimensions."""
    return jnp.broadcast_to(x, (*batch, *x.shape[-2:]))


def _broadcast_center(center: jax.Array | None, batch: tuple[int, ...]) -> Any:
    """Return a center with the common batch dimensions, all of length 1 if it does not vary along any of them."""
    if center is None or center.ndim < 2:
        return center
    # The kernel accepts a batch of 1, and then computes one correction instead of one for each matrix.
    if all(n == 1 for n in center.shape[:-2]):
        return center.reshape((1,) * len(batch) + center.shape[-2:])
    return jnp.broadcast_to(center, (*batch, *center.shape[-2:]))


# The float32 product of two 8-bit operands, with a scale for each column of b or for each block of its rows.


def count_blocks(b_scale: jax.Array, shapes: MatrixShapes) -> int:
    """Return the number of blocks of b's rows; each has its own scales."""
    # Only a single matrix has blocks of rows. With a stack of matrices, a scale of rank 2 is refused where columns are
    # read.
    return b_scale.shape[0] if b_scale.ndim == 2 and len(shapes.b) == 2 else 1


def read_scaled_columns(
    function: str, b: jax.Array, b_scale: jax.Array, b_zero_point: jax.Array | None, shapes: MatrixShapes, centred: bool
) -> tuple[jax.Array, Any]:
    """Check b_scale and b_zero_point, and return the scale and the int32 zero point of the signed b.

    They have b's rank with 1 for its rows, or shape [blocks, N].
    """
    blocks = count_blocks(b_scale, shapes)
    if blocks <= 1:
        center = read_column_center(function, b, b_zero_point, shapes, centred)
        return read_per_column(function, "b_scale", b_scale, shapes), center
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
    return b_scale, signed_codes.derive_center(b_zero_point, b.dtype, centred)


def multiply_scaled(
    a: jax.Array, b: jax.Array, a_center: jax.Array | None, b_center: jax.Array | None, a_scale: jax.Array,
    b_scale: jax.Array, shapes: MatrixShapes,
) -> jax.Array:  # fmt: skip
    """Return the int32 product times (a_scale * b_scale) in float32; with blocks, the sum of such products."""
    blocks = count_blocks(b_scale, shapes)
    if blocks <= 1:
        acc = multiply_matrices(a, b, a_center, b_center, shapes)
        return accumulator.scale_by_both(acc, a_scale, b_scale)
    length = shapes.b[0] // blocks
    block_shapes = shapes._replace(a=(*shapes.a[:-1], length), b=(length, shapes.b[1]))
    # a must be in memory before it is cut. Otherwise XLA would repeat the operation that computes it, for example a
    # quantization, for each block.
    a_blocks = barriers.pin_layout(jnp.moveaxis(a.reshape(*shapes.a[:-1], blocks, length), -2, 0))
    # A scalar zero point is not part of what the loop iterates over.
    stacked_center = None if b_center is None or b_center.ndim == 0 else b_center[:, None]

    def contract_block(block: tuple[jax.Array, ...]) -> jax.Array:
        rows, filters, center, scale = block
        acc = multiply_matrices(rows, filters, a_center, b_center if center is None else center, block_shapes)
        return accumulator.scale_by_both(acc, a_scale, scale)

    stacks = (a_blocks, b.reshape(blocks, length, shapes.b[1]), stacked_center, b_scale[:, None])
    return sum_over_blocks(contract_block, stacks)


# ONNX MatMulInteger-10.


_MATMUL_INTEGER = "matmul_integer"


def matmul_integer(
    a: ArrayLike, b: ArrayLike, a_zero_point: ArrayLike | None = None, b_zero_point: ArrayLike | None = None
) -> jax.Array:
    """Multiply matrices of 8-bit codes in int32, as ONNX's MatMulInteger does.

    y = (a - a_zero_point) @ (b - b_zero_point).

    The result is exact modulo 2**32: an int32 that overflows wraps around, as the ONNX text permits. It cannot overflow
    while a has fewer than 2**31 / (255 * 255) = 33025 columns. Both operands are contracted as int8 and are never
    widened.

    Args:
        a: codes, int8 or uint8, of rank 1 or more, in the shapes of numpy.matmul.
        b: codes, int8 or uint8, not necessarily a's dtype.
        a_zero_point: the code of 0.0, in a's dtype: a scalar, or one for each row of a, as [M] or [..., M, 1]. None
            means 0. An int becomes a scalar in a's dtype.
        b_zero_point: the code of 0.0, in b's dtype: a scalar, or one for each column of b, as [N] or [..., 1, N]. None
            means 0. An int becomes a scalar in b's dtype.

    Returns:
        int32, of numpy.matmul's shape.

    Raises:
        TypeError: an operand is neither int8 nor uint8, or a zero point does not have its operand's dtype.
        ValueError: shapes do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> a = jnp.array([[11, 7, 255], [0, 128, 2]], jnp.uint8)
        >>> b = jnp.array([[1, -128], [2, 127], [3, 0]], jnp.int8)
        >>> jq.matmul_integer(a, b, 12, jnp.array([0, -1], jnp.int8))
        Array([[ 718, -270],
               [ 190, 16362]], dtype=int32)

    Source: ONNX MatMulInteger-10. ONNX Runtime accepts no zero point per row of a, and leaves y unset if a has no
        columns; this function follows the text, according to which that y is 0.
    """
    a_zero_point = entry_point.convert_operand_zero_point(_MATMUL_INTEGER, "a_zero_point", a_zero_point, a)
    b_zero_point = entry_point.convert_operand_zero_point(_MATMUL_INTEGER, "b_zero_point", b_zero_point, b)
    return _matmul_integer(
        a, b, a_zero_point, b_zero_point, centred=signed_codes.are_centred((a, b), (a_zero_point, b_zero_point))
    )


@compile_entry_point(_MATMUL_INTEGER)
def _matmul_integer(
    a: jax.Array, b: jax.Array, a_zero_point: jax.Array | None, b_zero_point: jax.Array | None, *,
    centred: tuple[bool, bool],
) -> jax.Array:  # fmt: skip
    checks.check_array(_MATMUL_INTEGER, "a", a, dtypes.EIGHT_BITS)
    checks.check_array(_MATMUL_INTEGER, "b", b, dtypes.EIGHT_BITS)
    shapes = match_matrices(_MATMUL_INTEGER, a, b)
    a_center = read_row_center(_MATMUL_INTEGER, a, a_zero_point, shapes, centred[0])
    b_center = read_column_center(_MATMUL_INTEGER, b, b_zero_point, shapes, centred[1])
    return multiply_matrices(a, b, a_center, b_center, shapes).reshape(shapes.out)


# ONNX Runtime's MatMulIntegerToFloat, also with a scale for each block of b's rows.


_MATMUL_INTEGER_TO_FLOAT = "ops.matmul_integer_to_float"


def matmul_integer_to_float(
    a: ArrayLike,
    b: ArrayLike,
    a_scale: ArrayLike,
    b_scale: ArrayLike,
    a_zero_point: ArrayLike | None = None,
    b_zero_point: ArrayLike | None = None,
    bias: ArrayLike | None = None,
) -> jax.Array:
    """Multiply matrices of 8-bit codes and scale the product, as ONNX Runtime's MatMulIntegerToFloat does.

    y = float32(acc) * (a_scale * b_scale) + bias, where acc is the result of `matmul_integer`.

    The float32 operations are ONNX Runtime's, each rounded once: the scales are multiplied first, and the product is
    rounded before bias is added. acc wraps around as in `matmul_integer`.

    With a scale for each block of b's rows, y starts at 0 and adds, block by block in ascending order,
    float32(acc of the block) * (a_scale * b_scale[block]), each product and each sum rounded once.

    Args:
        a: codes, int8 or uint8, of rank 1 or more, in the shapes of numpy.matmul.
        b: codes, int8 or uint8, not necessarily a's dtype.
        a_scale: value per step of a, float32: a scalar, or one for each row, as [M] or [..., M, 1]. A Python number
            becomes float32.
        b_scale: value per step of b, float32: a scalar; one for each column, as [N] or [..., 1, N]; or, if b has rank
            2, [blocks, N]: one for each column and each of `blocks` equal runs of rows. A Python number becomes
            float32.
        a_zero_point: the code of 0.0, in a's dtype, with a shape that a_scale may have. None means 0. An int becomes a
            scalar in a's dtype.
        b_zero_point: the code of 0.0, in b's dtype, with a shape that b_scale may have; [blocks, N] only if b_scale has
            it too. None means 0. An int becomes a scalar in b's dtype.
        bias: float32, [N]. None means 0.

    Returns:
        float32, of numpy.matmul's shape.

    Raises:
        TypeError: an argument has a dtype that the operator does not support.
        ValueError: shapes do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> a = jnp.array([[0, 128, 255]], jnp.uint8)
        >>> b = jnp.array([[1, -128], [2, 127], [3, 1]], jnp.int8)
        >>> jq.ops.matmul_integer_to_float(a, b, 0.5, jnp.array([0.25, 2.0]), 128, bias=jnp.array([0.1, -1.0]))
        Array([[   31.725, 16510.   ]], dtype=float32)

    Source: ONNX Runtime's com.microsoft MatMulIntegerToFloat-1; the blocks are an addition of this library.

    Cotangent of a_scale and of b_scale: g * acc times the other scale, summed over the elements that share the scale.
    Of bias: g summed over rows. Integers have none.
    """
    a_scale, b_scale = (
        convert_float32_scale(_MATMUL_INTEGER_TO_FLOAT, "a_scale", a_scale),
        convert_float32_scale(_MATMUL_INTEGER_TO_FLOAT, "b_scale", b_scale),
    )
    a_zero_point = entry_point.convert_operand_zero_point(_MATMUL_INTEGER_TO_FLOAT, "a_zero_point", a_zero_point, a)
    b_zero_point = entry_point.convert_operand_zero_point(_MATMUL_INTEGER_TO_FLOAT, "b_zero_point", b_zero_point, b)
    return _matmul_integer_to_float(
        a, b, a_scale, b_scale, a_zero_point, b_zero_point, bias,
        centred=signed_codes.are_centred((a, b), (a_zero_point, b_zero_point)),
    )  # fmt: skip


@compile_entry_point(_MATMUL_INTEGER_TO_FLOAT)
def _matmul_integer_to_float(
    a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array, a_zero_point: jax.Array | None,
    b_zero_point: jax.Array | None, bias: jax.Array | None, *, centred: tuple[bool, bool],
) -> jax.Array:  # fmt: skip
    checks.check_array(_MATMUL_INTEGER_TO_FLOAT, "a", a, dtypes.EIGHT_BITS)
    checks.check_array(_MATMUL_INTEGER_TO_FLOAT, "b", b, dtypes.EIGHT_BITS)
    for argument, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        checks.check_array(_MATMUL_INTEGER_TO_FLOAT, argument, scale, (dtypes.FLOAT32,))
    shapes = match_matrices(_MATMUL_INTEGER_TO_FLOAT, a, b)
    check_bias(_MATMUL_INTEGER_TO_FLOAT, bias, shapes)
    a_scale = read_per_row(_MATMUL_INTEGER_TO_FLOAT, "a_scale", a_scale, shapes)
    a_center = read_row_center(_MATMUL_INTEGER_TO_FLOAT, a, a_zero_point, shapes, centred[0])
    b_scale, b_center = read_scaled_columns(_MATMUL_INTEGER_TO_FLOAT, b, b_scale, b_zero_point, shapes, centred[1])
    y = multiply_scaled(a, b, a_center, b_center, a_scale, b_scale, shapes)
    return accumulator.add_bias(y, bias).reshape(shapes.out)


# ONNX Runtime's DynamicQuantizeMatMul, also with a scale for each block of b's rows.


_DYNAMIC_QUANTIZE_MATMUL = "ops.dynamic_quantize_matmul"
_UINT8 = np.dtype(jnp.uint8)


def dynamic_quantize_matmul(
    a: ArrayLike, b: ArrayLike, b_scale: ArrayLike, b_zero_point: ArrayLike | None = None, bias: ArrayLike | None = None
) -> jax.Array:
    """Quantize a to uint8 with its own range and multiply it by codes, as ONNX Runtime's DynamicQuantizeMatMul does.

    y = float32((q - q_zero_point) @ (b - b_zero_point)) * (q_scale * b_scale) + bias,
    where (q, q_scale, q_zero_point) is the result of `dynamic_quantize_linear` for the whole of a, in uint8.

    The float32 operations are ONNX Runtime's, each rounded once. Infinities and NaN in a have the effect that
    `dynamic_quantize_linear` documents. With a scale for each block of b's rows, the products of the blocks are added
    in ascending order, as in `matmul_integer_to_float`.

    Args:
        a: values, float32, of rank 1 or more, in the shapes of numpy.matmul.
        b: codes, int8 or uint8.
        b_scale: value per step of b, float32: a scalar; one for each column, as [N] or [..., 1, N]; or, if b has rank
            2, [blocks, N]: one for each column and each of `blocks` equal runs of rows. A Python number becomes
            float32.
        b_zero_point: the code of 0.0, in b's dtype, with a shape that b_scale may have; [blocks, N] only if b_scale has
            it too. None means 0. An int becomes a scalar in b's dtype.
        bias: float32, [N]. None means 0.

    Returns:
        float32, of numpy.matmul's shape.

    Raises:
        TypeError: an argument has a dtype that the operator does not support.
        ValueError: shapes do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> a = jnp.array([[-10.0, 3.4, 10.0]])  # 0, 170 and 254, zero point 127
        >>> b = jnp.array([[1, -128], [2, 127], [3, 1]], jnp.int8)
        >>> jq.ops.dynamic_quantize_matmul(a, b, jnp.array([0.25, 2.0]))
        Array([[   6.666667, 3426.51    ]], dtype=float32)

    Source: ONNX Runtime's com.microsoft DynamicQuantizeMatMul-1; the blocks are an addition of this library.

    Cotangent of a: g times the transpose of the dequantized b; rounding counts as the identity, and the range of a as a
    constant. Of b_scale: g * acc * q_scale, summed over the elements that share the scale. Of bias: g summed over rows.
    Integers have none.
    """
    b_scale = convert_float32_scale(_DYNAMIC_QUANTIZE_MATMUL, "b_scale", b_scale)
    b_zero_point = entry_point.convert_operand_zero_point(_DYNAMIC_QUANTIZE_MATMUL, "b_zero_point", b_zero_point, b)
    centred = signed_codes.is_centred(b_zero_point, getattr(b, "dtype", None))
    return _dynamic_quantize_matmul(entry_point.convert_number(a), b, b_scale, b_zero_point, bias, centred=centred)


@compile_entry_point(_DYNAMIC_QUANTIZE_MATMUL)
def _dynamic_quantize_matmul(
    a: jax.Array, b: jax.Array, b_scale: jax.Array, b_zero_point: jax.Array | None, bias: jax.Array | None, *,
    centred: bool,
) -> jax.Array:  # fmt: skip
    checks.check_array(_DYNAMIC_QUANTIZE_MATMUL, "a", a, (dtypes.FLOAT32,))
    checks.check_array(_DYNAMIC_QUANTIZE_MATMUL, "b", b, dtypes.EIGHT_BITS)
    checks.check_array(_DYNAMIC_QUANTIZE_MATMUL, "b_scale", b_scale, (dtypes.FLOAT32,))
    shapes = match_matrices(_DYNAMIC_QUANTIZE_MATMUL, a, b)
    check_bias(_DYNAMIC_QUANTIZE_MATMUL, bias, shapes)
    b_scale, b_center = read_scaled_columns(_DYNAMIC_QUANTIZE_MATMUL, b, b_scale, b_zero_point, shapes, centred)
    # The bias stays outside of the gradient rule: JAX differentiates a sum.
    y: Any = _multiply(shapes, a, b, b_center, b_scale)
    return accumulator.add_bias(y, bias).reshape(shapes.out)


# A gradient rule is necessary because a is converted to integer codes, where JAX stops the gradient.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(
    shapes: MatrixShapes, a: jax.Array, b: jax.Array, b_center: jax.Array | None, b_scale: jax.Array
) -> jax.Array:
    """Return the product without its bias; b_center is the zero point of the signed b."""
    return _multiply_fwd(shapes, a, b, b_center, b_scale)[0]


def _multiply_fwd(
    shapes: MatrixShapes, a: jax.Array, b: jax.Array, b_center: jax.Array | None, b_scale: jax.Array
) -> tuple[jax.Array, Any]:
    a, b, b_scale = jnp.asarray(a), jnp.asarray(b), jnp.asarray(b_scale)
    # The operator has one scale for all of a, even if a is a stack of matrices.
    per_tensor = granularity.PerTensor()
    _, _, scale, zero_point = compute_dynamic_range(a, per_tensor, _UINT8)
    codes = encode_dynamic(a, scale, zero_point, per_tensor)
    a_center, a_scale = signed_codes.derive_center(zero_point, _UINT8, False), scale.reshape((1,) * len(shapes.a))
    y = multiply_scaled(codes, b, a_center, b_center, a_scale, b_scale, shapes)
    return y, (codes, b, a_center, b_center, a_scale, b_scale)


def _multiply_bwd(shapes: MatrixShapes, residuals: Any, g: jax.Array) -> tuple[Any, ...]:
    codes, b, a_center, b_center, a_scale, b_scale = residuals
    weights = signed_codes.convert_to_signed(b.reshape(shapes.b)).astype(jnp.float32)
    blocks = count_blocks(b_scale, shapes)
    if b_center is not None:
        weights = weights - jnp.broadcast_to(_spread_blocks(b_center, blocks, shapes), shapes.b).astype(jnp.float32)
    # Only the gradient of a needs dequantized weights; the gradient of b_scale comes from the integer product.
    values = weights * jnp.broadcast_to(_spread_blocks(b_scale, blocks, shapes), shapes.b)
    highest = lax.Precision.HIGHEST
    # jax.vjp needs an operand with the shape, sharding and variance of a. Its value does not matter, because the
    # product is linear in it.
    like = codes.reshape(shapes.a).astype(jnp.float32)
    _, pull_a = jax.vjp(lambda v: jnp.matmul(v, values, precision=highest), like)
    _, pull_scale = jax.vjp(lambda s: multiply_scaled(codes, b, a_center, b_center, a_scale, s, shapes), b_scale)
    (da,) = pull_a(g)
    return da.reshape(codes.shape), None, None, pull_scale(g)[0]


_multiply.defvjp(_multiply_fwd, _multiply_bwd)


def _spread_blocks(value: jax.Array, blocks: int, shapes: MatrixShapes) -> jax.Array:
    """Return a scale or zero point of [blocks, N] with an entry for each row of b, and any other one unchanged."""
    return jnp.repeat(value, shapes.b[0] // blocks, axis=0) if blocks > 1 and value.ndim == 2 else value


# ONNX QLinearMatMul, versions 10 and 21, also with the bias and the float32 result of ONNX Runtime's QGemm.


_QLINEAR_MATMUL = "qlinear_matmul"
_DTYPES = (*dtypes.EIGHT_BITS, *dtypes.FLOAT8)


def qlinear_matmul(
    a: ArrayLike,
    a_scale: ArrayLike,
    a_zero_point: ArrayLike,
    b: ArrayLike,
    b_scale: ArrayLike,
    b_zero_point: ArrayLike,
    y_scale: ArrayLike | None,
    y_zero_point: ArrayLike | None,
    bias: ArrayLike | None = None,
) -> jax.Array:
    """Multiply two matrices of codes and requantize the product, as ONNX's QLinearMatMul does.

    y = saturate(round_half_even(float32(acc + bias) * (a_scale * b_scale / y_scale)) + y_zero_point),
    where acc is the result of `matmul_integer`. Without y_scale and y_zero_point, y is a float32 array:
    y = float32(acc + bias) * (a_scale * b_scale).

    The bias and the float32 result are as in ONNX Runtime's QGemm.

    The integers are ONNX Runtime's: the scales are multiplied, then divided, in float32, and the product with
    float32(acc) is rounded half to even before the zero point is added. onnx's reference adds the zero point first,
    which differs on ties if y_zero_point is odd. acc + bias wraps around as acc does in `matmul_integer`.

    float8 operands are multiplied and summed in float32. XLA chooses the order of that sum, so the result is exact only
    if every partial sum is.

    Args:
        a: codes, int8, uint8 or one of the four float8, of rank 1 or more, in the shapes of numpy.matmul.
        a_scale: value per step of a, float32, float16 or bfloat16: a scalar, or one for each row, as [M] or [..., M,
            1]. A Python number becomes float32.
        a_zero_point: the code of 0.0, in a's dtype: a scalar, or one for each row, as a_scale; 0 for float8. An int
            becomes a scalar in a's dtype.
        b: codes: int8 or uint8 if a is one of these, otherwise one of the four float8.
        b_scale: value per step of b, float32, float16 or bfloat16: a scalar, or one for each column, as [N] or [..., 1,
            N]. A Python number becomes float32.
        b_zero_point: the code of 0.0, in b's dtype: a scalar, or one for each column, as b_scale; 0 for float8. An int
            becomes a scalar in b's dtype.
        y_scale: value per step of y, float32, float16 or bfloat16: a scalar, or one for each row of a. A Python number
            becomes float32. None together with y_zero_point=None: the result is float32, and a and b are int8 or uint8.
        y_zero_point: the code of 0.0: a scalar, or one for each row of a. Its dtype is y's; an int becomes a
            scalar in a's dtype.
        bias: int32, [N], in steps of a_scale * b_scale, if a and b are int8 or uint8. None means 0.

    Returns:
        The codes of the product, of numpy.matmul's shape, in y_zero_point's dtype; or the product in float32.

    Raises:
        TypeError: an argument has a dtype that the operator does not support.
        ValueError: shapes do not fit each other, or a float8 zero point is not 0.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> a = jnp.array([[1], [3], [5], [7]], jnp.uint8)
        >>> b = jnp.array([[1, 2]], jnp.uint8)
        >>> jq.qlinear_matmul(a, 0.5, 0, b, 1.0, 0, 1.0, 1)  # halves go to even, then 1 is added
        Array([[1, 2],
               [3, 4],
               [3, 6],
               [5, 8]], dtype=uint8)
        >>> jq.qlinear_matmul(a, 0.5, 0, b, 1.0, 0, None, None, bias=jnp.array([-1, 510]))
        Array([[  0., 256.],
               [  1., 258.],
               [  2., 260.],
               [  3., 262.]], dtype=float32)

    Source: ONNX QLinearMatMul-10, -21; where the texts leave the order of operations open, ONNX Runtime's CPU kernel.
        com.microsoft QGemm-1.

    Cotangent of a_scale and of b_scale, if the result is float32: g * (acc + bias) times the other scale, summed over
    the elements that share the scale. Integers have none.
    """
    scales = (("a_scale", a_scale), ("b_scale", b_scale), ("y_scale", y_scale))
    a_scale, b_scale, y_scale = (convert_float32_scale(_QLINEAR_MATMUL, name, scale) for name, scale in scales)
    a_zero_point = entry_point.convert_operand_zero_point(_QLINEAR_MATMUL, "a_zero_point", a_zero_point, a)
    b_zero_point = entry_point.convert_operand_zero_point(_QLINEAR_MATMUL, "b_zero_point", b_zero_point, b)
    # An int gets the dtype of a: ONNX Runtime has no kernel with a result of another dtype.
    y_zero_point = entry_point.convert_operand_zero_point(_QLINEAR_MATMUL, "y_zero_point", y_zero_point, a)
    for argument, point in (("a", a_zero_point), ("b", b_zero_point), ("y", y_zero_point)):
        check_float_zero_point(_QLINEAR_MATMUL, f"{argument}_zero_point", point)
    return _qlinear_matmul(
        a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point, bias,
        centred=signed_codes.are_centred((a, b), (a_zero_point, b_zero_point)),
    )  # fmt: skip


@compile_entry_point(_QLINEAR_MATMUL)
def _qlinear_matmul(
    a: jax.Array, a_scale: jax.Array, a_zero_point: jax.Array, b: jax.Array, b_scale: jax.Array,
    b_zero_point: jax.Array, y_scale: jax.Array | None, y_zero_point: jax.Array | None, bias: jax.Array | None, *,
    centred: tuple[bool, bool],
) -> jax.Array:  # fmt: skip
    _check_dtypes(a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point, bias)
    shapes = match_matrices(_QLINEAR_MATMUL, a, b)
    if bias is not None:
        checks.check_shape(_QLINEAR_MATMUL, "bias", bias, (shapes.b[-1],), "one for each column of b")
    a_scale = read_per_row(_QLINEAR_MATMUL, "a_scale", a_scale, shapes)
    b_scale = read_per_column(_QLINEAR_MATMUL, "b_scale", b_scale, shapes)
    a_center = read_row_center(_QLINEAR_MATMUL, a, a_zero_point, shapes, centred[0])
    b_center = read_column_center(_QLINEAR_MATMUL, b, b_zero_point, shapes, centred[1])
    if y_scale is None or y_zero_point is None:
        acc = _add_bias(multiply_matrices(a, b, a_center, b_center, shapes), bias)
        factors = (s.astype(jnp.float32) for s in (a_scale, b_scale))
        return accumulator.scale_by_both(acc, *factors).reshape(shapes.out)
    # Scales of rows and scales of columns have different ranks if only one operand is a stack of matrices.
    y_scale = read_per_row(_QLINEAR_MATMUL, "y_scale", y_scale, shapes)
    scale = accumulator.compute_multiplier(*(_align(s, shapes) for s in (a_scale, b_scale, y_scale)))
    y_center = _align(read_per_row(_QLINEAR_MATMUL, "y_zero_point", y_zero_point, shapes), shapes)
    # A float8 zero point is 0, so only integers need the center.
    if a.dtype in dtypes.FLOAT8:
        return _multiply_float8(a, b, scale, y_zero_point.dtype, shapes)
    acc = multiply_matrices(a, b, a_center, b_center, shapes)
    # An exporter needs the scales one by one, and the multiplier does not tell them.
    if recording.is_recording():
        bias = None if bias is None else accumulator.place_part(bias, acc.ndim, None)
        scales = (_align(s, shapes) for s in (a_scale, b_scale, y_scale))
        numbers = (*scales, y_center.astype(jnp.int32), y_zero_point.dtype)
        return accumulator.requantize_product(acc, bias, *numbers).reshape(shapes.out)
    acc = _add_bias(acc, bias)
    scale, y_center = (accumulator.spread_over_product(v, acc) for v in (scale, y_center.astype(jnp.int32)))
    return accumulator.requantize_accumulator(acc, scale, y_center, y_zero_point.dtype).reshape(shapes.out)


def _check_dtypes(
    a: jax.Array, a_scale: jax.Array, a_zero_point: jax.Array | None, b: jax.Array, b_scale: jax.Array,
    b_zero_point: jax.Array | None, y_scale: Any, y_zero_point: jax.Array | None, bias: jax.Array | None,
) -> None:  # fmt: skip
    """Check which arguments are None, and the dtypes of the others except the zero points of a and b."""
    # Unlike in MatMulInteger, the zero points are required inputs, so None must not be read as 0.
    for argument, point in (("a_zero_point", a_zero_point), ("b_zero_point", b_zero_point)):
        checks.require_type(point is not None, _QLINEAR_MATMUL, argument, "an array", "None")
    checks.check_array(_QLINEAR_MATMUL, "a", a, _DTYPES)
    # int8 and uint8 may be mixed, and so may the float8 dtypes, but not integers with floats.
    is_integer = a.dtype in dtypes.EIGHT_BITS
    family = dtypes.EIGHT_BITS if is_integer else dtypes.FLOAT8
    checks.check_array(_QLINEAR_MATMUL, "b", b, family)
    is_float = y_scale is None and y_zero_point is None and is_integer
    if not is_float:
        checks.check_array(_QLINEAR_MATMUL, "y_zero_point", y_zero_point, family)
    for argument, scale in (("a_scale", a_scale), ("b_scale", b_scale), ("y_scale", y_scale)):
        if not (is_float and scale is None and argument == "y_scale"):
            checks.check_array(_QLINEAR_MATMUL, argument, scale, dtypes.FLOATS)
    if bias is not None:
        checks.require_type(
            is_integer, _QLINEAR_MATMUL, "bias", "None, because a is float8", checks.describe_value(bias)
        )
        checks.check_same_dtype(_QLINEAR_MATMUL, "bias", bias, dtypes.INT32, "steps of a_scale * b_scale")


def _add_bias(acc: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Return the accumulator plus a bias for each column, modulo 2**32."""
    return acc if bias is None else acc + accumulator.spread_over_product(bias, acc)


def _align(value: jax.Array, shapes: MatrixShapes) -> jax.Array:
    """Return a scale or zero point of a's or b's rank with the product's rank."""
    return value.reshape((1,) * (len(shapes.product) - value.ndim) + value.shape)


def _multiply_float8(a: jax.Array, b: jax.Array, scale: jax.Array, dtype: np.dtype, shapes: MatrixShapes) -> jax.Array:
    """Return the codes of the product of two float8 operands, summed in float32."""
    lhs, rhs = (dtypes.decode_small_float(x).reshape(s) for x, s in ((a, shapes.a), (b, shapes.b)))
    # Without HIGHEST a GPU would round both operands to TF32.
    product: Any = jnp.matmul(lhs, rhs, precision=lax.Precision.HIGHEST)
    scaled = product * accumulator.spread_over_product(scale, product)
    return dtypes.encode_small_float(scaled, dtype, True).reshape(shapes.out)
