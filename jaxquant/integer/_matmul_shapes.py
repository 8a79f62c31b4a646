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
    shape_a, shape_b = a.shape, b.shape
    for name, shape in zip(names, (shape_a, shape_b), strict=True):
        checks.require(len(shape) > 0, function, name, "an array of rank 1 or more", "rank 0")
    # As in numpy, a vector on the left is a row and a vector on the right is a column.
    wide_a = shape_a if len(shape_a) > 1 else (1, *shape_a)
    wide_b = shape_b if len(shape_b) > 1 else (*shape_b, 1)
    if wide_a[-1] != wide_b[-2]:
        expected = f"{wide_a[-1]} rows, as many as {names[0]} has columns"
        checks.require(False, function, names[1], expected, f"shapes {shape_a} and {shape_b}")
    try:
        batch = lax.broadcast_shapes(wide_a[:-2], wide_b[:-2]) if len(wide_a) + len(wide_b) > 4 else ()
    except ValueError:
        expected = f"batch dimensions that broadcast against {names[0]}'s"
        checks.require(False, function, names[1], expected, f"shapes {shape_a} and {shape_b}")
        raise  # not reached, because the check above raises
    rows = (wide_a[-2],) if len(shape_a) > 1 else ()
    columns = (wide_b[-1],) if len(shape_b) > 1 else ()
    return Shapes(wide_a, wide_b, (*batch, *rows, *columns), function)
