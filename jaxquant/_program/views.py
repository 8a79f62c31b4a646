"""What the analysis knows about an array of a program: whether it is a parameter, and which axes of it are where.

A parameter stays recognizable while the program only moves its elements: transposes, reshapes, slices, broadcasts,
concatenations, and conversions of its dtype. Each of these operations has an equivalent on codes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import jaxpr, moves
from .jaxpr import Equation


class Atom(NamedTuple):
    """A factor of a dimension: a whole axis of a parameter, or a part of one that a reshape split.

    Attributes:
        axis: the axis of the parameter, or None if the same elements are repeated.
        size: the length of this factor.
        is_whole: whether it has all the indices of the axis, in their order.
    """

    axis: int | None
    size: int
    is_whole: bool = True


class View(NamedTuple):
    """Elements of one parameter, moved.

    Attributes:
        leaf: the number of the parameter among the leaves of the tree of parameters.
        dimensions: the factors of each dimension, the slowest first.
        dtype: the dtype to which the elements were converted.
        history: the operations that moved the elements; two views with equal histories have equal elements.
        selection: that activations select these elements by a dynamic slice, and the line of source, or "".
    """

    leaf: int
    dimensions: tuple[tuple[Atom, ...], ...]
    dtype: Any
    history: tuple[Any, ...] = ()
    selection: str = ""

    def list_axes(self, dimensions: Sequence[int]) -> set[int]:
        """Return the axes of the parameter that have factors in these dimensions."""
        return {atom.axis for dimension in dimensions for atom in self.dimensions[dimension] if atom.axis is not None}

    @property
    def is_cut_at_unknown_index(self) -> bool:
        """Whether a loop or a dynamic slice has taken a part of the parameter."""
        return any(type(step) is object for step in self.history)

    # The methods of `moves.Elements`.

    def keep(self) -> View:
        """Return the view."""
        return self

    def vary(self, equation: Equation) -> View:
        """Return the view."""
        return self

    def convert(self, dtype: np.dtype) -> View | None:
        """Return the view in another dtype of floats."""
        dtype = np.dtype(dtype)
        return self._replace(dtype=dtype) if dtype.name in _DTYPES else None

    def transpose(self, order: Sequence[int]) -> View:
        """Return the view with its dimensions in another order."""
        return self._replace(dimensions=tuple(self.dimensions[axis] for axis in order))

    def reshape(self, shape: Sequence[Any]) -> View | None:
        """Return the view in another shape, unless a dimension ends within an odd part of an axis."""
        dimensions = _regroup([atom for dimension in self.dimensions for atom in dimension if atom.size != 1], shape)
        return None if dimensions is None else self._replace(dimensions=dimensions)

    def squeeze(self, axes: Sequence[int], shape: Sequence[Any]) -> View:
        """Return the view without some dimensions."""
        return self._replace(dimensions=tuple(d for axis, d in enumerate(self.dimensions) if axis not in axes))

    def broadcast(self, axes: Sequence[int], shape: Sequence[Any]) -> View:
        """Return the view repeated along new dimensions."""
        sources = {to: axis for axis, to in enumerate(axes)}
        dimensions = []
        for to, size in enumerate(shape):
            dimension = self.dimensions[sources[to]] if to in sources else ()
            is_repeated = math.prod(atom.size for atom in dimension) != size
            dimensions.append((Atom(None, size),) if is_repeated else dimension)
        return self._replace(dimensions=tuple(dimensions))

    def tile(self, repeats: Sequence[int], shape: Sequence[Any]) -> View:
        """Return the view repeated as a whole along each dimension."""
        dimensions = tuple(
            (Atom(None, count), *dimension) if count != 1 else dimension
            for count, dimension in zip(repeats, self.dimensions, strict=True)
        )
        return self._replace(dimensions=dimensions)

    def reverse(self, axes: Sequence[int]) -> View:
        """Return the view with the indices of some dimensions in reverse order."""
        dimensions = tuple(
            tuple(atom._replace(is_whole=False) for atom in dimension) if axis in axes else dimension
            for axis, dimension in enumerate(self.dimensions)
        )
        return self._replace(dimensions=dimensions)

    def cut(
        self, starts: Sequence[Any], limits: Any, strides: Sequence[Any] | None, shape: Sequence[Any]
    ) -> View | None:
        """Return the view with fewer indices along some dimensions that have a single factor each."""
        dimensions = []
        for dimension, size in zip(self.dimensions, shape, strict=True):
            if math.prod(atom.size for atom in dimension) == size:
                dimensions.append(dimension)
            elif len(dimension) == 1 and size:
                dimensions.append((dimension[0]._replace(size=size, is_whole=False),))
            else:
                return None
        return self._replace(dimensions=tuple(dimensions))

    def cut_dynamically(self, starts: Sequence[Any], shape: Sequence[Any]) -> View | None:
        """Return the view with fewer indices along some dimensions, which are not known."""
        return self.cut(starts, None, None, shape)

    def select_index(self, axis: int, index: int) -> View:
        """Return the view without a dimension."""
        return self._replace(dimensions=(*self.dimensions[:axis], *self.dimensions[axis + 1 :]))

    def insert_dimension(self, axis: int) -> View:
        """Return the view with a new dimension of length 1."""
        return self._replace(dimensions=(*self.dimensions[:axis], (), *self.dimensions[axis:]))


class Joined(NamedTuple):
    """Views of several parameters in one array.

    Attributes:
        views: the views.
        axis: the dimension along which they are concatenated; None if a scan takes one of them in each iteration.
    """

    views: tuple[View, ...]
    axis: int | None


class Lost(NamedTuple):
    """An array computed from parameters by an operation that has no equivalent on codes.

    Attributes:
        leaves: the numbers of the parameters, sorted.
        reason: the operation and its line of source.
    """

    leaves: tuple[int, ...]
    reason: str


@dataclasses.dataclass(frozen=True)  # empty named tuples would be equal
class Data:
    """An array that depends on the arguments of the function: activations.

    Attributes:
        leaves: the parameters that its elements come from, if activations only select them.
        reason: that they are selected, and the line of source.
    """

    leaves: tuple[int, ...] = ()
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Constant:
    """An array that depends neither on the parameters nor on the arguments."""


Origin = View | Joined | Lost | Data | Constant
_SELECTED = "selected by activations"
_DTYPES = ("float32", "float16", "bfloat16")


def view_parameter(leaf: int, shape: Sequence[int], dtype: np.dtype) -> View:
    """Return the view of a whole parameter."""
    return View(leaf, tuple((Atom(axis, size),) for axis, size in enumerate(shape)), np.dtype(dtype))


def list_views(origin: Origin) -> tuple[View, ...]:
    """Return the views that make up an array, or none if it is not a view."""
    if isinstance(origin, View):
        return (origin,)
    return origin.views if isinstance(origin, Joined) else ()


def list_leaves(origin: Origin) -> tuple[int, ...]:
    """Return the numbers of the parameters that an array is computed from, if it is computed from nothing else."""
    if isinstance(origin, Lost):
        return origin.leaves
    return tuple(view.leaf for view in list_views(origin))


def combine(origins: Sequence[Origin], reason: str) -> Origin:
    """Return the origin of the result of an operation that has no equivalent on codes."""
    read = [_read_selection(origin) for origin in origins]
    data = [origin for origin in read if isinstance(origin, Data)]
    if data:
        # Parameters that activations select stay recognizable until they meet activations.
        return data[0] if all(origin.leaves for origin in data) else Data()
    leaves = {leaf for origin in origins for leaf in list_leaves(origin)}
    if not leaves:
        return Constant()
    # The first operation that lost a parameter explains more than the ones after it.
    earlier = [origin.reason for origin in origins if isinstance(origin, Lost)]
    return Lost(tuple(sorted(leaves)), earlier[0] if earlier else reason)


def _read_selection(origin: Origin) -> Origin:
    """Return the origin of elements that are computed with: elements that activations select depend on activations."""
    reason = _describe_selection(origin)
    return Data(list_leaves(origin), reason) if reason else origin


def _describe_selection(origin: Origin) -> str:
    """Return that a dynamic slice selects the elements of an array, and where, or ""."""
    return next((view.selection for view in list_views(origin) if view.selection), "")


def resolve_selections(origins: Sequence[Origin]) -> list[Origin]:
    """Return the origins of the operands of a contraction, with at most one parameter where possible.

    An entry that activations select is a weight where it meets activations, such as the layer of an index. Where it
    meets a parameter, it is activations itself, such as the embedding of a token.
    """
    parameters = [origin for origin in origins if list_leaves(origin)]
    if len([origin for origin in parameters if not _describe_selection(origin)]) != 1:
        return list(origins)
    return [Data() if _describe_selection(origin) else origin for origin in origins]


def locate_selection(origin: Origin, where: str) -> Origin:
    """Return an origin that `follow_equation` found, with the line of source if activations select it."""
    if isinstance(origin, Data) and origin.reason == _SELECTED:
        return dataclasses.replace(origin, reason=f"{_SELECTED} at {where}")
    return origin


def take_layer(origin: View | Joined) -> View | Joined:
    """Return one iteration's part of views that a scan stacks along their first dimension."""
    if isinstance(origin, Joined):
        axis = origin.axis - 1 if origin.axis else None
        return Joined(tuple(_take_layer(view) for view in origin.views), axis)
    return _take_layer(origin)


def _take_layer(view: View) -> View:
    # No other view has equal elements: the next iteration has other elements.
    return view._replace(dimensions=view.dimensions[1:], history=(*view.history, object()))


def follow_equation(equation: Equation, origins: Sequence[Origin]) -> list[Origin] | None:
    """Return the views that an equation makes from views, or None if it has no equivalent on codes."""
    name = jaxpr.read_name(equation)
    if name == moves.BARRIER:
        return list(origins)
    if name == moves.SELECTION:
        return _select(origins)
    join = moves.match_join(equation)
    if join is not None:
        return _join(*join, origins)
    row = moves.MOVES.get(name)
    if row is None or row.move is None or not list_views(origins[0]):
        return None
    origin = origins[0]
    axis = origin.axis if isinstance(origin, Joined) else None
    if axis is not None and name != "transpose" and not moves.keeps_indices(name):
        return None
    # Further operands are the indices of a dynamic slice.
    views = [_follow_view(equation, row.move, view, origins[1:]) for view in list_views(origin)]
    if any(view is None for view in views):
        return None
    if name == "dynamic_slice" and any(isinstance(index, Data) for index in origins[1:]):
        selection = f"{_SELECTED} at {jaxpr.locate(equation)}"
        views = [[part._replace(selection=selection) for part in view or ()] for view in views]
    if isinstance(origin, View):
        return list(views[0])  # type: ignore[arg-type]
    if axis is not None and name == "transpose":
        axis = equation.params["permutation"].index(axis)
    return [Joined(parts, axis) for parts in zip(*views, strict=True)]  # type: ignore[arg-type]


def _follow_view(equation: Equation, move: Callable[..., Any], view: View, others: Sequence[Any]) -> list[View] | None:
    name, results = jaxpr.read_name(equation), move(equation, view, *others)
    if any(result is None for result in results):
        return None
    # A copy has equal elements, and is not part of the history; a conversion may round them.
    if moves.keeps_indices(name) and name != "convert_element_type":
        return results
    # Where a dynamic slice starts is not known, so its elements are equal to no others.
    step = object() if name == "dynamic_slice" else (name, tuple(equation.params.items()))
    return [result._replace(history=(*view.history, step, number)) for number, result in enumerate(results)]


def _regroup(atoms: list[Atom], shape: Sequence[Any]) -> tuple[tuple[Atom, ...], ...] | None:
    """Return factors divided among the dimensions of a shape, or None if a dimension ends within an odd part."""
    # Shapes of `jax.export` may be symbols.
    if not all(isinstance(size, int) for size in (*shape, *(atom.size for atom in atoms))):
        return None  # a symbolic size has no known factors
    remaining = list(atoms)
    dimensions = []
    for size in shape:
        if size == 0:
            return None
        dimension = []
        while size > 1:
            atom = remaining.pop(0)
            part = math.gcd(size, atom.size)
            if part not in (size, atom.size):
                return None
            is_whole = atom.is_whole and part == atom.size
            dimension.append(atom._replace(size=part, is_whole=is_whole))
            if part < atom.size:
                remaining.insert(0, atom._replace(size=atom.size // part, is_whole=False))
            size //= part
        dimensions.append(tuple(dimension))
    return tuple(dimensions)


def _join(axis: int, is_new: bool, origins: Sequence[Origin]) -> list[Origin] | None:
    views = [origin for origin in origins if isinstance(origin, View)]
    if len(views) < len(origins):
        return None
    return [Joined(tuple(view.insert_dimension(axis) if is_new else view for view in views), axis)]


def _select(origins: Sequence[Origin]) -> list[Origin] | None:
    condition, *cases = origins
    # `jax.vmap` makes a cond select between a parameter and the same parameter.
    if list_views(cases[0]) and all(case == cases[0] for case in cases):
        return [cases[0]]
    leaves = {leaf for case in cases for leaf in list_leaves(case)}
    # A choice among parameters that activations make is not known until the program runs; what is chosen is itself an
    # activation then.
    if not isinstance(condition, Data) or any(isinstance(case, Data) for case in cases) or not leaves:
        return None
    return [Data(tuple(sorted(leaves)), _SELECTED)]
