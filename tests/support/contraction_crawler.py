"""A count of the contractions in a traced function, by a search of its own: no code of the package is used."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax

CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot", "scaled_dot")
# Primitives with another name in rules and coverage.
RENAMED = {"ragged_dot_general": "ragged_dot"}


def count_contractions(function: Callable[..., Any], *arguments: Any) -> collections.Counter[str]:
    """Return how often each contraction occurs in the program of a function of arrays."""
    return collections.Counter(_list_names(jax.make_jaxpr(function)(*arguments)))


def count_rows(coverage: Any) -> collections.Counter[str]:
    """Return how often each contraction occurs in a coverage. Lookups are no contractions."""
    return collections.Counter(row.operation for row in coverage.rows if row.operation in CONTRACTIONS)


def list_primitives(function: Callable[..., Any], *arguments: Any) -> set[str]:
    """Return the names of the primitives in the program of a function of arrays."""
    return {equation.primitive.name for equation in _list_equations(jax.make_jaxpr(function)(*arguments))}


def _list_names(value: Any) -> Iterator[str]:
    names = (equation.primitive.name for equation in _list_equations(value))
    names = (RENAMED.get(name, name) for name in names)
    return (name for name in names if name in CONTRACTIONS)


def _list_equations(value: Any) -> Iterator[Any]:
    """Yield the equations of all programs in a value, however deep."""
    program = getattr(value, "jaxpr", value)
    if hasattr(program, "eqns"):
        for equation in program.eqns:
            yield equation
            yield from _list_equations(dict(equation.params))
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _list_equations(entry)
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _list_equations(entry)
