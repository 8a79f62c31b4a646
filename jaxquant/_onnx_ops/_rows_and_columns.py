"""Scales and zero points per row of a and per column of b, and the int32 product of two stacks of matrices."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core import checks, dtypes, sharding
from .._kernels import signed_codes
from .._kernels.contraction import Role, contract_roles
from ..integer.dot_general import MatrixShapes, determines_sharding


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


def read_row_steps(function: str, a: jax.Array, zero_point: Any, shapes: MatrixShapes, centred: bool) -> Any:
    """Check a_zero_point and return it as the int32 zero point of the signed a, or None where that is known to be 0."""
    if zero_point is not None:
        checks.check_same_dtype(function, "a_zero_point", zero_point, a.dtype, "a's")
        zero_point = read_per_row(function, "a_zero_point", zero_point, shapes)
    return signed_codes.convert_steps(zero_point, a.dtype, centred)


def read_column_steps(function: str, b: jax.Array, zero_point: Any, shapes: MatrixShapes, centred: bool) -> Any:
    """Check b_zero_point and return it as the int32 zero point of the signed b, or None where that is known to be 0."""
    if zero_point is not None:
        checks.check_same_dtype(function, "b_zero_point", zero_point, b.dtype, "b's")
        zero_point = read_per_column(function, "b_zero_point", zero_point, shapes)
    return signed_codes.convert_steps(zero_point, b.dtype, centred)


def check_bias(function: str, bias: Any, shapes: MatrixShapes) -> None:
    """Check that the bias is None or has one float32 for each column of b."""
    if bias is not None:
        checks.check_same_dtype(function, "bias", bias, dtypes.FLOAT32, "the result's")
        checks.check_shape(function, "bias", bias, (shapes.b[-1],), "one for each column of b")


def multiply_matrices(a: jax.Array, b: jax.Array, a_steps: Any, b_steps: Any, shapes: MatrixShapes) -> jax.Array:
    """Return the int32 product of two 8-bit operands, of shape `shapes.product`.

    The steps are the zero points of the signed operands: int32 scalars, arrays of the operands' rank, or None for 0.
    """
    a, b = signed_codes.convert_to_signed(a.reshape(shapes.a)), signed_codes.convert_to_signed(b.reshape(shapes.b))
    # If b is a single matrix, the batch dimensions of a are only additional rows of one product.
    if math.prod(shapes.b[:-2]) == 1:
        rank = len(shapes.a)
        leading = shapes.product[:-rank] if len(shapes.b) > rank else ()
        b, b_steps = b.reshape(shapes.b[-2:]), _drop_batch(b_steps)
        left, right = Role((), tuple(range(rank - 1)), (rank - 1,)), Role((), (1,), (0,))
        _check_placement(shapes.function, a, b, left, right)
        acc = contract_roles(a, b, a_steps, b_steps, left, right)
        return acc.reshape((*leading, *acc.shape)) if leading else acc
    # The kernel needs operands with equal batch dimensions.
    batch = shapes.product[:-2]
    a, a_steps = _broadcast_operand(a, batch), _broadcast_steps(a_steps, batch)
    b, b_steps = _broadcast_operand(b, batch), _broadcast_steps(b_steps, batch)
    n = len(batch)
    axes = tuple(range(n))
    left, right = Role(axes, (n,), (n + 1,)), Role(axes, (n + 1,), (n,))
    _check_placement(shapes.function, a, b, left, right)
    return contract_roles(a, b, a_steps, b_steps, left, right)


def _check_placement(function: str, a: jax.Array, b: jax.Array, left: Role, right: Role) -> None:
    """Check that the shardings of a and b determine that of the product: an ONNX operator has no out_sharding."""
    if not (sharding.is_placed(a) or sharding.is_placed(b)) or determines_sharding(a, b, left, right):
        return
    expected = "shardings that determine that of the product (jax.sharding.reshard one), or jq.integer.dot_general"
    got = f"shape {a.shape} sharded as {sharding.find_placement(a)}, {b.shape} as {sharding.find_placement(b)}"
    checks.require(False, function, "a, b", f"{expected}(..., out_sharding=...)", got)


def _drop_batch(steps: Any) -> Any:
    """Return the steps of b without its batch dimensions, all of which have length 1."""
    return steps if steps is None or steps.ndim < 2 else steps.reshape(steps.shape[-2:])


def _broadcast_operand(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Return an operand with the common batch dimensions."""
    return jnp.broadcast_to(x, (*batch, *x.shape[-2:]))


def _broadcast_steps(steps: Any, batch: tuple[int, ...]) -> Any:
    """Return steps with the common batch dimensions, all of length 1 if the steps do not vary along any of them."""
    if steps is None or steps.ndim < 2:
        return steps
    # The kernel accepts a batch of 1, and then computes one correction instead of one for each matrix.
    if all(n == 1 for n in steps.shape[:-2]):
        return steps.reshape((1,) * len(batch) + steps.shape[-2:])
    return jnp.broadcast_to(steps, (*batch, *steps.shape[-2:]))
