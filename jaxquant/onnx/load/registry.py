"""The table of operators: what is registered under a name and a domain, and how its inputs are passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Operator(NamedTuple):
    """An operator.

    Attributes:
        function: the implementation; its first argument is the Call, the others are the inputs.
        static: the inputs that it needs as numpy arrays.
        keeps: the inputs that it takes as numpy arrays if they are known, and as JAX arrays if not.
        folds: whether it computes with numpy if all other inputs are numpy arrays.
        passes: whether it takes all other inputs as they are, because it hands them on to a subgraph or in a sequence.
    """

    function: Callable[..., Any]
    static: tuple[int, ...]
    keeps: tuple[int, ...]
    folds: bool
    passes: bool


OPERATORS: dict[tuple[str, str], Operator] = {}


def register(
    *names: str,
    domain: str = "",
    static: tuple[int, ...] = (),
    keeps: tuple[int, ...] = (),
    folds: bool = False,
    passes: bool = False,
) -> Callable[[_Function], _Function]:
    """Return a decorator that puts an implementation into the table under each of the names."""

    def decorate(function: _Function) -> _Function:
        for name in names:
            OPERATORS[domain, name] = Operator(function, static, keeps, folds, passes)
        return function

    return decorate


def find_operator(node: Any) -> Operator | None:
    """Return the operator of a node, or None for an unknown one and for the call of a function."""
    return None if node.body is not None else OPERATORS.get((node.domain, node.op))
