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

from . import jaxpr


class Atom(NamedTuple):
    """A factor of a dimension: a whole axis of a parameter, or a part of one that a reshape split.

    Attributes:
        axis: the axis of the parameter, or None if the same elements are repeated.
        size: the length of this factor.
    """

    axis: int | None
    size: int


class View(NamedTuple):
    """Elements of one parameter, moved.

    Attributes:
        leaf: the place of the parameter among the leaves of the tree of parameters.
        dimensions: the factors of each dimension, the slowest first.
        dtype: the dtype to which the elements were converted.
    """

    leaf: int
    dimensions: tuple[tuple[Atom, ...], ...]
    dtype: Any

    def list_axes(self, places: Sequence[int]) -> set[int]:
        """Return the axes of the parameter that have factors in the dimensions at these places."""
        return {atom.axis for place in places for atom in self.dimensions[place] if atom.axis is not None}


class Joined(NamedTuple):
    """Views of several parameters, concatenated along a dimension."""

    views: tuple[View, ...]
    axis: int


class Lost(NamedTuple):
    """An array computed from parameters by an operation that has no equivalent on codes.

    Attributes:
        leaves: the places of the parameters, sorted.
        reason: the operation and its place in the source.
    """

    leaves: tuple[int, ...]
    reason: str


@dataclasses.dataclass(frozen=True)  # empty named tuples would be equal
class Data:
    """An array that depends on the arguments of the function: activations."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """An array that depends neither on the parameters nor on the arguments."""


Origin = View | Joined | Lost | Data | Constant
_DTYPES = ("float32", "float16", "bfloat16")


def view_parameter(leaf: int, shape: Sequence[int], dtype: Any) -> View:
    """Return the view of a whole parameter."""
    return View(leaf, tuple((Atom(axis, size),) for axis, size in enumerate(shape)), np.dtype(dtype))


def list_views(origin: Origin) -> tuple[View, ...]:
    """Return the views of which an array consists, or none if it is not a view."""
    if isinstance(origin, View):
        return (origin,)
    return origin.views if isinstance(origin, Joined) else ()


def list_leaves(origin: Origin) -> tuple[int, ...]:
    """Return the places of the parameters that an array is computed from, if it is computed from nothing else."""
    if isinstance(origin, Lost):
        return origin.leaves
    return tuple(view.leaf for view in list_views(origin))


def combine(origins: Sequence[Origin], reason: str) -> Origin:
    """Return the origin of the result of an operation that has no equivalent on codes."""
    if any(isinstance(origin, Data) for origin in origins):
        return Data()
    leaves = {leaf for origin in origins for leaf in list_leaves(origin)}
    if not leaves:
        return Constant()
    # The first operation that lost a parameter explains more than the ones after it.
    earlier = [origin.reason for origin in origins if isinstance(origin, Lost)]
    return Lost(tuple(sorted(leaves)), earlier[0] if earlier else reason)


def take_layer(view: View) -> View | None:
    """Return the view of one iteration's part of a view that a scan stacks along its first dimension."""
    return view._replace(dimensions=view.dimensions[1:]) if view.dimensions else None


def follow_equation(equation: Any, origins: Sequence[Origin]) -> list[Origin] | None:
    """Return the views that an equation makes from views, or None if it has no equivalent on codes."""
    follow = _RULES.get(jaxpr.find_name(equation))
    if follow is None or not list_views(origins[0]):
        return None
    if follow is _concatenate:
        return _concatenate(equation, origins)
    if isinstance(origins[0], Joined) and jaxpr.find_name(equation) not in ("transpose", *_UNMOVED):
        return None
    # Further operands are the indices of a dynamic slice.
    views = [follow(equation, view) for view in list_views(origins[0])]
    if any(view is None for view in views):
        return None
    if isinstance(origins[0], View):
        return list(views[0])  # type: ignore[arg-type]
    return _follow_joined(equation, origins[0], [view[0] for view in views if view])  # type: ignore[arg-type]


def _follow_joined(equation: Any, joined: Joined, views: list[View]) -> list[Origin]:
    if jaxpr.find_name(equation) == "transpose":
        return [Joined(tuple(views), equation.params["permutation"].index(joined.axis))]
    return [Joined(tuple(views), joined.axis)]


Rule = Callable[[Any, View], "list[View] | None"]


def _keep(equation: Any, view: View) -> list[View]:
    return [view]


def _convert(equation: Any, view: View) -> list[View] | None:
    dtype = np.dtype(equation.params["new_dtype"])
    return [view._replace(dtype=dtype)] if dtype.name in _DTYPES else None


def _transpose(equation: Any, view: View) -> list[View]:
    return [view._replace(dimensions=tuple(view.dimensions[axis] for axis in equation.params["permutation"]))]


def _reshape(equation: Any, view: View) -> list[View] | None:
    if equation.params.get("dimensions") is not None:
        return None
    atoms = [atom for dimension in view.dimensions for atom in dimension if atom.size != 1]
    dimensions = _regroup(atoms, _read_shape(equation))
    return None if dimensions is None else [view._replace(dimensions=dimensions)]


def _regroup(atoms: list[Atom], shape: Sequence[int]) -> tuple[tuple[Atom, ...], ...] | None:
    """Return factors divided among the dimensions of a shape, or None if a dimension ends within an odd part."""
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
            dimension.append(atom._replace(size=part))
            if part < atom.size:
                remaining.insert(0, atom._replace(size=atom.size // part))
            size //= part
        dimensions.append(tuple(dimension))
    return tuple(dimensions)


def _squeeze(equation: Any, view: View) -> list[View]:
    removed = equation.params["dimensions"]
    return [view._replace(dimensions=tuple(d for axis, d in enumerate(view.dimensions) if axis not in removed))]


def _broadcast(equation: Any, view: View) -> list[View]:
    sources = {to: axis for axis, to in enumerate(equation.params["broadcast_dimensions"])}
    shape = _read_shape(equation)
    dimensions = []
    for place, size in enumerate(shape):
        dimension = view.dimensions[sources[place]] if place in sources else ()
        is_repeated = math.prod(atom.size for atom in dimension) != size
        dimensions.append((Atom(None, size),) if is_repeated else dimension)
    return [view._replace(dimensions=tuple(dimensions))]


def _tile(equation: Any, view: View) -> list[View]:
    repeats = equation.params["reps"]
    dimensions = tuple(
        (Atom(None, count), *dimension) if count != 1 else dimension
        for count, dimension in zip(repeats, view.dimensions, strict=True)
    )
    return [view._replace(dimensions=dimensions)]


def _slice(equation: Any, view: View) -> list[View] | None:
    return _cut(view, _read_shape(equation))


def _split(equation: Any, view: View) -> list[View] | None:
    parts = [_cut(view, variable.aval.shape) for variable in equation.outvars]
    return None if any(part is None for part in parts) else [part[0] for part in parts if part]


def _cut(view: View, shape: Sequence[int]) -> list[View] | None:
    """Return a view with fewer indices along some dimensions, each of which has a single factor."""
    dimensions = []
    for dimension, size in zip(view.dimensions, shape, strict=True):
        if math.prod(atom.size for atom in dimension) == size:
            dimensions.append(dimension)
        elif len(dimension) == 1 and size:
            dimensions.append((dimension[0]._replace(size=size),))
        else:
            return None
    return [view._replace(dimensions=tuple(dimensions))]


def _concatenate(equation: Any, origins: Sequence[Origin]) -> list[Origin] | None:
    if not all(isinstance(origin, View) for origin in origins):
        return None
    return [Joined(tuple(origins), equation.params["dimension"])]  # type: ignore[arg-type]


def _read_shape(equation: Any) -> tuple[int, ...]:
    return tuple(equation.outvars[0].aval.shape)


# Operations that leave each element at its place.
_UNMOVED = ("convert_element_type", "copy", "copy_p", "stop_gradient", "pvary", "sharding_constraint")
_RULES: dict[str, Any] = {
    **dict.fromkeys(_UNMOVED, _keep),
    "convert_element_type": _convert,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "rev": _keep,
    "tile": _tile,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "dynamic_slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
}
