"""The primitives that move elements, in one table.

Each of them has one row. Whoever follows elements through a program reads the rows: `views` follows parameters,
`transform` moves codes and their scales, and finds what stays in codes between contractions, `ptq` looks for biases and
for factors of channels, and the ONNX exporter folds what is known. A primitive is added by one row, in terms of the
methods of `Elements`; only one that moves elements in another way needs a new method there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from . import jaxpr
from .jaxpr import Equation

Shape = Sequence[Any]


class Elements:
    """An array that primitives move the elements of: a view of a parameter, codes with their scales, a known array.

    Each method returns the moved elements, or None if they cannot be moved so in this form, which is the default.
    """

    def keep(self) -> Any:
        """Return the elements as they are."""
        return None

    def vary(self, equation: Equation) -> Any:
        """Return the elements, marked by an equation as different on the devices of a `jax.shard_map`."""
        return None

    def convert(self, dtype: np.dtype) -> Any:
        """Return the elements in another dtype."""
        return None

    def transpose(self, order: Sequence[int]) -> Any:
        """Return the elements with their dimensions in another order."""
        return None

    def reshape(self, shape: Shape) -> Any:
        """Return the elements, in their order, in another shape."""
        return None

    def squeeze(self, axes: Sequence[int], shape: Shape) -> Any:
        """Return the elements without some dimensions of length 1."""
        return None

    def broadcast(self, axes: Sequence[int], shape: Shape) -> Any:
        """Return the elements repeated along new dimensions; old dimension i becomes `axes[i]`."""
        return None

    def tile(self, repeats: Sequence[int], shape: Shape) -> Any:
        """Return the array repeated as a whole along each dimension."""
        return None

    def reverse(self, axes: Sequence[int]) -> Any:
        """Return the elements in reverse order along some dimensions."""
        return None

    def cut(self, starts: Shape, limits: Shape, strides: Sequence[int], shape: Shape) -> Any:
        """Return a part of each dimension."""
        return None

    def cut_dynamically(self, starts: Sequence[Any], shape: Shape) -> Any:
        """Return a part of each dimension, from a start that the program computes."""
        return None

    def select_index(self, axis: int, index: int) -> Any:
        """Return the elements at one index of a dimension, without the dimension."""
        return None


class Move(NamedTuple):
    """A row: how a primitive moves elements.

    Attributes:
        move: a function of the equation, the elements of its first operand and its other operands, which returns the
            elements of each result. None if nothing is followed through it.
        join: for a primitive that joins its operands, a function of the equation, which returns the dimension along
            which they are joined, and whether it is a new one.
        keeps: "indices" if each element stays at its index, so that indices do not change and ONNX needs no operator;
            "order" if the elements keep their order, apart from repetitions, and the equation itself moves indices; or
            "".
        on_codes: whether codes with one scale can take it between contractions: on integers it is the same equation,
            with the zero point for 0.
    """

    move: Callable[..., Sequence[Any]] | None = None
    join: Callable[[Equation], tuple[int, bool]] | None = None
    keeps: str = ""
    on_codes: bool = False


def _keep(equation: Equation, x: Elements) -> list[Any]:
    return [x.keep()]


def _reshape(equation: Equation, x: Elements) -> list[Any]:
    order = equation.params.get("dimensions")
    x = x if order is None else x.transpose(order)
    return [x.reshape(jaxpr.read_shape(equation.outvars[0]))]


def _squeeze(equation: Equation, x: Elements) -> list[Any]:
    return [x.squeeze(equation.params["dimensions"], jaxpr.read_shape(equation.outvars[0]))]


def _broadcast(equation: Equation, x: Elements, *sizes: object) -> list[Any]:
    return [x.broadcast(equation.params["broadcast_dimensions"], jaxpr.read_shape(equation.outvars[0]))]


def _slice(equation: Equation, x: Elements) -> list[Any]:
    parameters, shape = equation.params, jaxpr.read_shape(equation.outvars[0])
    strides = parameters["strides"] or (1,) * len(shape)
    return [x.cut(parameters["start_indices"], parameters["limit_indices"], strides, shape)]


def _split(equation: Equation, x: Elements) -> list[Any]:
    axis, start, parts = equation.params["axis"], 0, []
    lengths = jaxpr.read_shape(equation.invars[0])
    for size, variable in zip(equation.params["sizes"], equation.outvars, strict=True):
        starts = [start if i == axis else 0 for i in range(len(lengths))]
        start += int(size)
        limits = [start if i == axis else n for i, n in enumerate(lengths)]
        parts.append(x.cut(starts, limits, (1,) * len(lengths), jaxpr.read_shape(variable)))
    return parts


def _unstack(equation: Equation, x: Elements) -> list[Any]:
    return [x.select_index(equation.params["axis"], index) for index in range(len(equation.outvars))]


def _cut_dynamically(equation: Equation, x: Elements, *starts: object) -> list[Any]:
    return [x.cut_dynamically(starts, equation.params["slice_sizes"])]


def _put(equation: Equation, x: Elements, *others: object) -> list[Any]:
    # One equation puts all arrays of a tree, and each result has the elements of another operand. A sharding has the
    # rank of the array, which is not that of the scale.
    place = equation.params["devices"][0]
    if others or not (place is None or isinstance(place, jax.Device)):
        return [None] * len(equation.outvars)
    return [x.vary(equation)]


MOVES: dict[str, Move] = {
    # No element moves. "name" is the primitive of `jax.ad_checkpoint.checkpoint_name`.
    "convert_element_type": Move(lambda e, x: [x.convert(e.params["new_dtype"])], keeps="indices", on_codes=True),
    "copy": Move(_keep, keeps="indices", on_codes=True),
    "copy_p": Move(_keep, keeps="indices", on_codes=True),
    "name": Move(_keep, keeps="indices", on_codes=True),
    "sharding_constraint": Move(_keep, keeps="indices", on_codes=True),
    "stop_gradient": Move(_keep, keeps="indices", on_codes=True),
    "pvary": Move(lambda e, x: [x.vary(e)], keeps="indices"),
    "reshard": Move(keeps="indices"),
    "mesh_cast": Move(keeps="indices"),
    # The elements keep their order.
    "reshape": Move(_reshape, keeps="order", on_codes=True),
    "squeeze": Move(_squeeze, keeps="order", on_codes=True),
    "expand_dims": Move(lambda e, x: [x.reshape(jaxpr.read_shape(e.outvars[0]))], keeps="order"),
    "broadcast_in_dim": Move(_broadcast, keeps="order", on_codes=True),
    # Each element stays at its index, but `keeps` is about the first operand, and there may be several.
    "device_put": Move(_put),
    # Other orders, parts and repetitions.
    "transpose": Move(lambda e, x: [x.transpose(e.params["permutation"])], on_codes=True),
    "rev": Move(lambda e, x: [x.reverse(e.params["dimensions"])], on_codes=True),
    "tile": Move(lambda e, x: [x.tile(e.params["reps"], jaxpr.read_shape(e.outvars[0]))]),
    "slice": Move(_slice, on_codes=True),
    "dynamic_slice": Move(_cut_dynamically),
    "split": Move(_split, on_codes=True),
    "unstack": Move(_unstack),
    # Several arrays in one.
    "concatenate": Move(join=lambda e: (e.params["dimension"], False)),
    "stack": Move(join=lambda e: (e.params["axis"], True)),
    # Elements and zeros, or the largest ones.
    "pad": Move(on_codes=True),
    "reduce_max": Move(on_codes=True),
    "reduce_window_max": Move(on_codes=True),
}
BARRIER, SELECTION = "optimization_barrier", "select_n"


def keeps_indices(name: str) -> bool:
    """Return whether a primitive leaves each element at its index."""
    return name in MOVES and MOVES[name].keeps == "indices"


def keeps_order(name: str) -> bool:
    """Return whether a primitive leaves elements in their order, apart from repetitions."""
    return name in MOVES and MOVES[name].keeps != ""


def match_join(equation: Equation) -> tuple[int, bool] | None:
    """Return the dimension along which an equation joins its operands, and whether it is new; None if it joins none."""
    row = MOVES.get(jaxpr.read_name(equation))
    return None if row is None or row.join is None else row.join(equation)
