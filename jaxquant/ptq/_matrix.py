"""Weights of any layout as matrices of inputs times outputs, one for each group of outputs that reads other inputs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from .._core import checks, dtypes


class Layout(NamedTuple):
    """How the elements of a weight are arranged as [groups, inputs, outputs].

    Attributes:
        shape: the shape of the weight.
        kept: the axes that the contraction keeps, which become the groups and the outputs.
        summed: the axes that the contraction sums over, in ascending order, which become the inputs.
        groups: the number of groups: runs of outputs that read other inputs than the next run.
    """

    shape: tuple[int, ...]
    kept: tuple[int, ...]
    summed: tuple[int, ...]
    groups: int

    @property
    def inputs(self) -> int:
        """The number of inputs of an output."""
        return math.prod(self.shape[axis] for axis in self.summed)

    def arrange(self, x: jax.Array) -> jax.Array:
        """Return an array of the weight's shape as [groups, inputs, outputs]."""
        # With the kept axes in front, the outputs of a group are neighbors, and one reshape cuts the groups.
        rows = x.transpose(*self.kept, *self.summed).reshape(self.groups, -1, self.inputs)
        return rows.transpose(0, 2, 1)

    def restore(self, matrix: jax.Array) -> jax.Array:
        """Return [groups, inputs, outputs] as an array of the weight's shape."""
        order = (*self.kept, *self.summed)
        rows = matrix.transpose(0, 2, 1).reshape([self.shape[axis] for axis in order])
        return rows.transpose([order.index(axis) for axis in range(len(order))])


def make_layout(function: str, shape: tuple[int, ...], axis: Any, groups: int = 1) -> Layout:
    """Return the layout of a weight; raise if it has no such axes, or no such groups.

    Args:
        function: the public function that errors name.
        shape: the shape of the weight.
        axis: the axis or axes that the contraction keeps.
        groups: the number of groups.
    """
    axes = axis if isinstance(axis, tuple | list) else (axis,)
    kept = tuple(checks.check_axis(function, entry, len(shape)) for entry in axes)
    checks.require(len(set(kept)) == len(kept), function, "axis", "distinct axes", axis)
    outputs = math.prod(shape[entry] for entry in kept)
    expected = f"a number of groups that divides the {outputs} outputs"
    checks.require(groups > 0 and outputs % groups == 0, function, "hessian", expected, groups)
    return Layout(tuple(shape), kept, tuple(entry for entry in range(len(shape)) if entry not in kept), groups)


def check_weight(function: str, w: Any, argument: str = "w") -> None:
    """Raise unless w is an array of floats of rank 1 or more."""
    checks.check_array(function, argument, w, dtypes.FLOATS)
    checks.require(w.ndim > 0, function, argument, "rank 1 or more", "rank 0")


def read_hessian(function: str, w: jax.Array, hessian: jax.Array, axis: Any) -> tuple[jax.Array, Layout]:
    """Return the second moments as [groups, inputs, inputs] of float32, and the layout of the weight."""
    check_weight(function, w)
    checks.check_array(function, "hessian", hessian, dtypes.FLOATS)
    is_matrix = hessian.ndim in (2, 3)
    expected = "shape (inputs, inputs), or (groups, inputs, inputs)"
    checks.require(is_matrix, function, "hessian", expected, f"shape {hessian.shape}")
    layout = make_layout(function, w.shape, axis, hessian.shape[0] if hessian.ndim == 3 else 1)
    shape = (*hessian.shape[:-2], layout.inputs, layout.inputs)
    reason = f"w has shape {w.shape}, of which the contraction keeps the axes {layout.kept}"
    checks.check_shape(function, "hessian", hessian, shape, reason)
    return hessian.astype("float32").reshape(layout.groups, layout.inputs, layout.inputs), layout
