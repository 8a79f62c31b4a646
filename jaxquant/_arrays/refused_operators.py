"""What Python's operators and JAX's functions say when they are given a quantized array: which call to make instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._core import checks

_CLASS = "QuantizedArray"
_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "divmod": "divmod",
    "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNARY = {
    "neg": "-{}", "pos": "+{}", "invert": "~{}", "abs": "abs({})", "round": "round({})",
    "float": "float({})", "int": "int({})", "complex": "complex({})",
}  # fmt: skip
_ADVICE = (
    "jq.matmul, jq.dot_general and jq.einsum contract it, jq.take and jq.concatenate take it, "
    "q.dequantize() returns a jax.Array"
)


class Advised(type):
    """The metaclass of QuantizedArray: its repr says what to call.

    JAX's functions refuse what is no array with the type of it, as in "sum requires ndarray or scalar arguments, got
    <type>". That is the one place where the advice can be. A `__jax_array__` that raises would also be called by
    `x @ q`, which is to work.
    """

    def __repr__(cls) -> str:
        """Returns the name under which the class is public, and what takes it."""
        if cls.__name__ != _CLASS:
            return super().__repr__()
        return f"<class 'jaxquant.{_CLASS}': {_ADVICE}>"


class RefusedOperators(metaclass=Advised):
    """Python's operators but for `@`, `==` and `!=`: each raises a TypeError that names the call to make.

    `==` compares identities, for sets, dicts and comparisons of pytrees.
    """

    __slots__ = ()

    def __contains__(self, item: object) -> bool:
        """Refuses: Python would compare the rows by identity, and always say False."""
        _refuse("__contains__", "x in q.dequantize()", f"{_name_type(item)} in {self!r}")
        raise AssertionError


def _refuse(method: str, expected: str, got: str) -> None:
    checks.require_type(False, f"{_CLASS}.{method}", "self", expected, got)


def _name_type(value: Any) -> str:
    return repr(value) if isinstance(value, int | float | complex | RefusedOperators) else type(value).__name__


def _write(symbol: str, left: str, right: str) -> str:
    return f"divmod({left}, {right})" if symbol == "divmod" else f"{left} {symbol} {right}"


def _make_binary(method: str, symbol: str) -> Callable[[Any, Any], Any]:
    known = (RefusedOperators, jax.Array, np.ndarray, np.generic, int, float, complex, str, list, tuple)

    def refuse(self: Any, other: Any) -> Any:
        if not isinstance(other, known):
            return NotImplemented  # it may know how to treat a QuantizedArray
        right = "p.dequantize()" if isinstance(other, RefusedOperators) else "x"
        got = _write(symbol, repr(self), _name_type(other))
        return _refuse(method, _write(symbol, "q.dequantize()", right), got)

    return refuse


def _make_reflected(method: str, symbol: str) -> Callable[[Any, Any], Any]:
    def refuse(self: Any, other: Any) -> Any:
        return _refuse(method, _write(symbol, "x", "q.dequantize()"), _write(symbol, _name_type(other), repr(self)))

    return refuse


def _make_unary(method: str, form: str) -> Callable[..., Any]:
    def refuse(self: Any, *_: Any) -> Any:
        return _refuse(method, form.format("q.dequantize()"), form.format(repr(self)))

    return refuse


def _add_operators() -> None:
    """Adds the methods by name, unseen by type checkers, which therefore refuse the operators as well."""
    for name, symbol in {**_BINARY, **_COMPARISONS}.items():
        setattr(RefusedOperators, f"__{name}__", _make_binary(f"__{name}__", symbol))
    for name, symbol in _BINARY.items():
        setattr(RefusedOperators, f"__r{name}__", _make_reflected(f"__r{name}__", symbol))
    for name, form in _UNARY.items():
        setattr(RefusedOperators, f"__{name}__", _make_unary(f"__{name}__", form))


_add_operators()
