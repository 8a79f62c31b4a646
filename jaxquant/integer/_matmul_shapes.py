"""The shapes of the operands and the result of numpy.matmul."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax import lax

from .._core import checks


class Shapes(NamedTuple):
    """The shapes of two operands as stacks of matrices, and the shape that numpy.matmul returns.

    Attributes:
        a: the shape of the left operand; a vector is a matrix of one row.
        b: the shape of the right operand; a vector is a matrix of one column.
        out: the shape of the result, in which the row or column of a vector is dropped.
        function: the name of the public function, for errors.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    out: tuple[int, ...]
    function: str

    @property
    def product(self) -> tuple[int, ...]:
        """The shape of the product before the row or column of a vector is dropped."""
        return (*lax.broadcast_shapes(self.a[:-2], self.b[:-2]), self.a[-2], self.b[-1])


def find_shapes(function: str, a: jax.Array, b: jax.Array, names: tuple[str, str] = ("a", "b")) -> Shapes:
    """Return the shapes of a product; raise ContractValueError unless numpy.matmul accepts the operands."""
    for name, x in zip(names, (a, b), strict=True):
        checks.require(x.ndim > 0, function, name, "an array of rank 1 or more", "rank 0")
    # As in numpy, a vector on the left is a row and a vector on the right is a column.
    wide_a = a.shape if a.ndim > 1 else (1, *a.shape)
    wide_b = b.shape if b.ndim > 1 else (*b.shape, 1)
    got = f"shapes {a.shape} and {b.shape}"
    checks.require(
        wide_a[-1] == wide_b[-2], function, names[1], f"{wide_a[-1]} rows, as many as {names[0]} has columns", got
    )
    try:
        batch = lax.broadcast_shapes(wide_a[:-2], wide_b[:-2])
    except ValueError:
        checks.require(False, function, names[1], f"batch dimensions that broadcast against {names[0]}'s", got)
        raise  # not reached, because the check above raises
    rows = (wide_a[-2],) if a.ndim > 1 else ()
    columns = (wide_b[-1],) if b.ndim > 1 else ()
    return Shapes(wide_a, wide_b, (*batch, *rows, *columns), function)
