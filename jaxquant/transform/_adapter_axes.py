"""Which axes of a parameter an adapter's two factors have, from the contractions that read the parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .._program import jaxpr, views
from .._program.analysis import PRODUCTS, Site, read_product_numbers


class AdapterAxes(NamedTuple):
    """The axes of a parameter, divided between the factors of its adapter.

    Attributes:
        shared: the axes that both factors have: stacked layers, experts, batch dimensions.
        inputs: the axes of the first factor: those that contractions sum over. Of a table, the axis of its rows.
        outputs: the axes of the second factor.
        operations: the operations of the contractions that read the parameter.
    """

    shared: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operations: tuple[str, ...]


def match_adapter_axes(sites: Sequence[Site], leaf: int, shape: Sequence[int]) -> AdapterAxes | str:
    """Return the axes of the factors of an adapter for a parameter, or why it can have none.

    Args:
        sites: the contractions on codes that read the parameter.
        leaf: the number of the parameter.
        shape: its shape.
    """
    found: set[int] = set()
    pairs: list[tuple[set[int], set[int]]] = []
    # The products decide which factor comes first, and a table that is looked up only has its rows there.
    for site in sorted(sites, key=lambda site: site.operation == "take"):
        reason = _explain_refusal(site, shape)
        if reason:
            return f"{reason} at {site.describe()}"
        for view in site.views:
            if view.leaf != leaf:
                continue
            rank = len(view.dimensions)
            batch = _list_batch(site)
            summed = view.list_axes(site.contracted)
            free = view.list_axes([place for place in range(rank) if place not in (*site.contracted, *batch)])
            seen = summed | free
            # What a scan, an index or a slice selects is not among the dimensions any more.
            found |= {axis for axis in range(len(shape)) if axis not in seen}
            pairs.append((free, summed) if site.operation == "take" else (summed, free))
    inputs, outputs = pairs[0]
    # An axis of length 1 may be missing after a reshape.
    long = {axis for axis, length in enumerate(shape) if length != 1}
    for first, second in pairs:
        is_split = not found & (first | second) & long and not first & second & long
        if not is_split or {frozenset(first & long), frozenset(second & long)} != {
            frozenset(inputs & long), frozenset(outputs & long)
        }:  # fmt: skip
            return "the contractions that read it do not divide its axes into the same two factors"
    if not inputs or not outputs:
        return "it is a vector in the contractions that read it"
    shared = found - inputs - outputs
    operations = tuple(sorted({site.operation for site in sites}))
    return AdapterAxes(tuple(sorted(shared)), tuple(sorted(inputs)), tuple(sorted(outputs)), operations)


def _list_batch(site: Site) -> tuple[int, ...]:
    """Return the batch dimensions of the parameter operand, and the dimension of the groups of a ragged product."""
    if site.operation not in PRODUCTS or site.weight is None:
        return ()
    batch = tuple(read_product_numbers(site.equation)[1][site.weight])
    ragged = site.equation.params.get("ragged_dot_dimension_numbers")
    return batch if ragged is None else (*batch, *ragged.rhs_group_dimensions)


def _explain_refusal(site: Site, shape: Sequence[int]) -> str:
    """Return why a contraction takes no adapter, or ""."""
    parameters, name = site.equation.params, jaxpr.read_name(site.equation)
    if name in ("conv_general_dilated", "ragged_dot_general") and site.weight != 1:
        return "it is the first operand"
    if isinstance(site.origins[site.weight or 0], views.Joined):
        return "it is concatenated with other parameters"
    if name == "conv_general_dilated" and (
        parameters["feature_group_count"] != 1 or parameters["batch_group_count"] != 1
    ):
        return "it is a convolution in groups"
    if name == "ragged_dot_general" and any(read_product_numbers(site.equation)[1]):
        return "it is a ragged product with batch dimensions"
    if site.operation == "take" and len(shape) != 2:
        return "it is a lookup in a table with another number of axes than 2"
    return ""
