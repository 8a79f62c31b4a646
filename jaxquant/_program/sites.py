"""The contractions of a program ("sites"), and their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import lax

from . import jaxpr, views
from .jaxpr import Address, Equation
from .views import Origin, View

_FLOATS = ("float32", "bfloat16", "float16")

# The operations that can run on codes, and the names they have in coverage and rules.
OPERATIONS = {"dot_general": "dot_general", "conv_general_dilated": "conv_general_dilated", "gather": "take"}
# Further contractions, which stay in floats.
FLOAT_OPERATIONS = ("ragged_dot_general", "ragged_dot", "scaled_dot", "triangular_solve", "cholesky")
_ADVICE = {"ragged_dot_general": "; products in a loop over the groups have one"}


@dataclasses.dataclass(frozen=True)
class Site:
    """A contraction of a program, or a lookup of rows of a parameter.

    Attributes:
        address: where the equation is: its index, and for each program around it the index of the outer equation and
            of the program in its parameters.
        name: the name of the site: the path of the parameter and the number of its use, as "dense/kernel#1".
        operation: the name of the operation.
        equation: the equation.
        origins: what each operand is.
        layers: the addresses of the scans that give this site one part of a stacked parameter in each iteration.
        lengths: the lengths of these scans.
        scope: the name scopes around it.
        where: its file, line and function; those of a call around it if JAX's own function contracts.
        reason: why the site cannot run on codes, or "".
    """

    address: Address
    name: str
    operation: str
    equation: Any
    origins: tuple[Origin, ...]
    layers: tuple[Address, ...]
    lengths: tuple[int, ...]
    scope: str
    where: str
    reason: str = ""

    def describe(self) -> str:
        """Return the name of the site with its operation and its place in the source."""
        return f"{self.name} ({self.operation} at {self.where})"

    @property
    def weight(self) -> int | None:
        """The place of the operand that is a parameter, or None."""
        # With two parameters neither is the weight: such a product depends on no activation.
        places = [place for place, origin in enumerate(self.origins) if views.list_views(origin)]
        return places[0] if len(places) == 1 else None

    @property
    def views(self) -> tuple[View, ...]:
        """The views of which the parameter operand consists."""
        return () if self.weight is None else views.list_views(self.origins[self.weight])

    @property
    def leaves(self) -> tuple[int, ...]:
        """The places of all parameters that an operand is made of, without activations."""
        leaves = [leaf for origin in self.origins for leaf in views.list_leaves(origin)]
        selected = [leaf for origin in self.origins if isinstance(origin, views.Data) for leaf in origin.leaves]
        return tuple(dict.fromkeys(leaves or selected))

    @property
    def contracted(self) -> tuple[int, ...]:
        """The dimensions of the parameter operand that the operation sums; of a lookup, those within an entry."""
        assert self.weight is not None
        shape = jaxpr.read_shape(self.equation.invars[self.weight])
        return find_contracted(self.equation, self.weight, len(shape))


def find_contracted(equation: Equation, operand: int, rank: int) -> tuple[int, ...]:
    """Return the dimensions of an operand that an operation sums over."""
    numbers = equation.params["dimension_numbers"]
    operation = OPERATIONS[jaxpr.find_name(equation)]
    if operation == "dot_general":
        return tuple(numbers[0][operand])
    if operation == "conv_general_dilated":
        kept = (numbers.lhs_spec[0], numbers.rhs_spec[0])[operand]
        return tuple(axis for axis in range(rank) if axis != kept)
    axis = find_lookup_axis(equation)
    return tuple(other for other in range(rank) if other != axis)


def find_float_reason(equation: Equation, origins: Sequence[Origin]) -> str:
    """Return why a contraction with these operands cannot run on codes, or "" if it can."""
    if jaxpr.find_name(equation) not in OPERATIONS:
        return f"{jaxpr.find_name(equation)} has no form on codes{_ADVICE.get(jaxpr.find_name(equation), '')}"
    dtypes = [str(jaxpr.read_dtype(variable)) for variable in equation.invars[:2]]
    if OPERATIONS[jaxpr.find_name(equation)] != "take" and any(dtype not in _FLOATS for dtype in dtypes):
        return "integers already" if all("int" in dtype for dtype in dtypes) else f"operands are {' and '.join(dtypes)}"
    if (
        OPERATIONS[jaxpr.find_name(equation)] == "conv_general_dilated"
        and len(jaxpr.read_shape(equation.invars[0])) < 3
    ):
        return "a convolution without spatial dimensions: write it as a product"
    lost = [origin for origin in origins if isinstance(origin, views.Lost)]
    if lost:
        return lost[0].reason
    if OPERATIONS[jaxpr.find_name(equation)] == "take" and find_lookup_axis(equation) is None:
        return "a gather of something else than whole entries along one axis"
    if sum(bool(views.list_leaves(origin)) for origin in origins) > 1:
        return "both operands are parameters"
    # It may be a table of numbers, or a weight that was not passed: rounding it as activations would be a guess.
    is_constant = any(isinstance(origin, views.Constant) for origin in origins)
    if is_constant and not any(views.list_leaves(origin) for origin in origins):
        return "an operand is an array that the function closes over: pass it in the parameters"
    selected = [origin.reason for origin in origins if isinstance(origin, views.Data) and origin.leaves]
    if selected and not any(views.list_leaves(origin) for origin in origins):
        return selected[0]
    for origin in origins:
        if isinstance(origin, views.Joined):
            place = list(origins).index(origin)
            rank = len(jaxpr.read_shape(equation.invars[place]))
            if origin.axis in find_contracted(equation, place, rank):
                return "parameters are concatenated along an axis that is summed"
    return ""


def is_listed_lookup(equation: Equation, origins: Sequence[Origin]) -> bool:
    """Return whether an equation looks up entries of parameters, so that coverage lists it."""
    if jaxpr.find_name(equation) != "gather" or not views.list_leaves(origins[0]):
        return False
    if views.list_views(origins[0]) and find_lookup_axis(equation) is not None:
        return True
    # Other gathers stay in floats. With constant indices they are a step in the computation of another parameter.
    is_float = str(jaxpr.read_dtype(equation.invars[0])) in _FLOATS
    return is_float and any(isinstance(origin, views.Data) for origin in origins[1:])


def find_lookup_axis(equation: Equation) -> int | None:
    """Return the axis along which a gather takes whole entries, as `jnp.take` does, or None if it is another gather."""
    # Any other gather has no equivalent in `take`, which copies entries along one axis.
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape, axes = jaxpr.read_shape(equation.invars[0]), tuple(numbers.start_index_map)
    if numbers.operand_batching_dims:
        return None
    if len(axes) > 1:
        # JAX vectorizes a dynamic slice with an index for each axis. That of an axis which is taken whole is clamped.
        if equation.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
            return None
        axes = tuple(axis for axis in axes if sizes[axis] != shape[axis])
    if len(axes) != 1 or tuple(numbers.collapsed_slice_dims) not in ((), axes):
        return None
    (axis,) = axes
    entry = tuple(1 if other == axis else n for other, n in enumerate(shape))
    return axis if tuple(sizes) == entry else None
