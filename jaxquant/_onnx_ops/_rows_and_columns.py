"""What ONNX gives the rows of a and the columns of b, and the integer product of two stacks of matrices."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core import checks, dtypes, sharding
from .._core.matmul_shapes import Shapes
from ..integer import _operands
from ..integer.dot_general import Role, contract_roles, determines_sharding


def read_per_row(function: str, argument: str, value: jax.Array, of: Shapes) -> jax.Array:
    """Reads what is one for a, or one for each of its rows, as an array of a's rank with 1 for its columns."""
    return _read(function, argument, value, (*of.a[:-1], 1), len(of.a) - 2, "row of a")


def read_per_column(function: str, argument: str, value: jax.Array, of: Shapes) -> jax.Array:
    """Reads what is one for b, or one for each of its columns, as an array of b's rank with 1 for its rows."""
    return _read(function, argument, value, (*of.b[:-2], 1, of.b[-1]), len(of.b) - 1, "column of b")


def _read(function: str, argument: str, value: jax.Array, full: tuple[int, ...], axis: int, per: str) -> jax.Array:
    if value.ndim <= 1 and value.size == 1:
        return value.reshape((1,) * len(full))
    if value.shape == (full[axis],):
        return lax.expand_dims(value, [i for i in range(len(full)) if i != axis])
    fits = value.ndim == len(full) and all(v in (1, n) for v, n in zip(value.shape, full, strict=True))
    expected = f"a scalar, shape ({full[axis]},) or {full}: one for each {per}"
    checks.require(fits, function, argument, expected, f"shape {value.shape}")
    return value


def read_zero_points(
    function: str, of: Shapes, operands: tuple[Any, Any], given: tuple[Any, Any], centred: tuple[bool, bool]
) -> tuple[Any, Any]:
    """Holds a_zero_point and b_zero_point to their contracts and returns them as the signed operands want them."""
    found = []
    for name, x, zero_point, known, read in zip(
        "ab", operands, given, centred, (read_per_row, read_per_column), strict=True
    ):
        argument = f"{name}_zero_point"
        if zero_point is not None:
            checks.check_same_dtype(function, argument, zero_point, x.dtype, f"{name}'s")
            zero_point = read(function, argument, zero_point, of)
        found.append(_operands.convert_steps(zero_point, x.dtype, known))
    return found[0], found[1]


def multiply_matrices(a: jax.Array, b: jax.Array, a_steps: Any, b_steps: Any, of: Shapes) -> jax.Array:
    """Returns the int32 product of two 8-bit operands, of the shape `of.product`.

    The steps are those of the signed operands: int32 scalars, arrays of the operands' rank, or None for 0.
    """
    a, b = _operands.convert_to_signed(a.reshape(of.a)), _operands.convert_to_signed(b.reshape(of.b))
    if math.prod(of.b[:-2]) == 1:  # one b for all of a: its batch is more rows
        rank, extra = len(of.a), of.product[: -len(of.a)] if len(of.b) > len(of.a) else ()
        b, b_steps = b.reshape(of.b[-2:]), _as_matrix(b_steps)
        left, right = Role((), tuple(range(rank - 1)), (rank - 1,)), Role((), (1,), (0,))
        _check_placement(of.function, a, b, left, right)
        acc = contract_roles(a, b, a_steps, b_steps, left, right)
        return acc.reshape((*extra, *acc.shape)) if extra else acc
    batch = of.product[:-2]
    a, a_steps = (_stack_batch(x, batch, a.shape[:-2]) for x in (a, a_steps))
    b, b_steps = (_stack_batch(x, batch, b.shape[:-2]) for x in (b, b_steps))
    n = len(batch)
    role = tuple(range(n))
    left, right = Role(role, (n,), (n + 1,)), Role(role, (n + 1,), (n,))
    _check_placement(of.function, a, b, left, right)
    return contract_roles(a, b, a_steps, b_steps, left, right)


def _check_placement(function: str, a: jax.Array, b: jax.Array, left: Role, right: Role) -> None:
    """Requires shardings that determine that of the product: an ONNX operator takes no out_sharding."""
    if not (sharding.is_placed(a) or sharding.is_placed(b)) or determines_sharding(a, b, left, right):
        return
    expected = "shardings that determine that of the product (jax.sharding.reshard one), or jq.integer.dot_general"
    got = f"shape {a.shape} sharded as {sharding.find_placement(a)}, {b.shape} as {sharding.find_placement(b)}"
    checks.require(False, function, "a, b", f"{expected}(..., out_sharding=...)", got)


def _as_matrix(steps: Any) -> Any:
    return steps if steps is None or steps.ndim < 2 else steps.reshape(steps.shape[-2:])


def _stack_batch(x: Any, batch: tuple[int, ...], own: tuple[int, ...]) -> Any:
    """Returns an operand, or what belongs to it, under the common batch dimensions; 1 stays 1 in what belongs to it."""
    if x is None or x.ndim < 2:
        return x
    x = x.reshape((1,) * (len(batch) + 2 - x.ndim) + x.shape)
    is_operand = x.shape[len(batch) - len(own) : -2] == own and x.dtype == jnp.int8
    whole = is_operand or any(n != 1 for n in x.shape[:-2])
    return jnp.broadcast_to(x, (*batch, *x.shape[-2:])) if whole else x


def check_bias(function: str, bias: Any, of: Shapes) -> None:
    """Requires None or one float32 for each column of b."""
    if bias is not None:
        checks.check_same_dtype(function, "bias", bias, dtypes.FLOAT32, "the result's")
        checks.check_shape(function, "bias", bias, (of.b[-1],), "one for each column of b")
