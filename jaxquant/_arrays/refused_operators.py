"""Errors for Python operators and JAX functions that do not accept quantized arrays; they say what to call instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._core import checks

_CLASS = "QuantizedArray"
# The names of the special methods without their underscores, and the operators in Python's notation.
_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "divmod": "divmod",
    "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNARY = {
    "neg": "-{}", "pos": "+{}", "invert": "~{}", "abs": "abs({})", "round": "round({})",
    "float": "float({})", "int": "int({})", "complex": "complex({})",
}  # fmt: skip
# A function that looks rows up by `jq.take` runs on float tables, too, which have no `dequantize`.
_LOOKUPS: dict[str, str] = dict.fromkeys(
    ("+", "-", "*", "/"), " (jq.take(q, indices) looks up floats, in place of q[indices])"
)
# One line, because JAX inserts the repr of the type into a sentence.
_ADVICE = (
    "jq.matmul, jq.dot_general and jq.einsum contract it, jq.take and jq.concatenate take it, "
    "q.dequantize() returns a jax.Array"
)


class Advised(type):
    """The metaclass of QuantizedArray, which makes the repr of the class list the functions that accept one.

    If a JAX function gets an object that is not an array, its error prints the type of the object: "sum requires
    ndarray or scalar arguments, got <type>". The repr of the type is therefore the only place for advice. A
    `__jax_array__` that raises is not an alternative, because `x @ q` calls it too and must work.
    """

    def __repr__(cls) -> str:
        """Return the public name of the class and the functions that take it."""
        # Subclasses of QuantizedArray, and its base class, keep the usual repr.
        if cls.__name__ != _CLASS:
            return super().__repr__()
        return f"<class 'jaxquant.{_CLASS}': {_ADVICE}>"


class RefusedOperators(metaclass=Advised):
    """A base class whose operators raise a TypeError that names the call to make instead.

    All of Python's operators are refused except `@`, `==` and `!=`. `==` compares identities, as sets, dicts and
    comparisons of pytrees require.
    """

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"jaxquant.{_CLASS}: {name}: the array is immutable; use replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"jaxquant.{_CLASS}: {name}: the array is immutable")

    def __bool__(self) -> bool:
        """Raise TypeError: a truth value would need the values as floats."""
        text = "q.dequantize() for a truth value"
        raise TypeError(checks.format_message(f"{_CLASS}.__bool__", "self", text, repr(self)))

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Raise TypeError: numpy must not get floats without an explicit `dequantize`."""
        raise TypeError(checks.format_message(f"{_CLASS}.__array__", "self", "q.dequantize() or q.codes", repr(self)))

    def __contains__(self, item: object) -> bool:
        """Raise TypeError: Python would compare the rows by identity, and the result would always be False."""
        _refuse("__contains__", "x in q.dequantize()", f"{_name_type(item)} in {self!r}")
        # `_refuse` always raises, but a type checker does not know that.
        raise AssertionError


def _refuse(method: str, expected: str, got: str) -> None:
    """Raise the TypeError of an operator."""
    checks.refuse_type(f"{_CLASS}.{method}", "self", expected, got)


def _name_type(value: Any) -> str:
    """Return the text for an operand in an error: the repr of a number or quantized array, the type of any other."""
    return repr(value) if isinstance(value, int | float | complex | RefusedOperators) else type(value).__name__


def _write_expression(symbol: str, left: str, right: str) -> str:
    """Return the Python expression of an operator."""
    return f"divmod({left}, {right})" if symbol == "divmod" else f"{left} {symbol} {right}"


def _make_binary(method: str, symbol: str) -> Callable[[Any, Any], Any]:
    """Return the method of a binary operator with the quantized array on the left."""
    refused_types = (RefusedOperators, jax.Array, np.ndarray, np.generic, int, float, complex, str, list, tuple)

    def refuse(self: Any, other: Any) -> Any:
        if not isinstance(other, refused_types):
            return NotImplemented  # the other class may support QuantizedArrays
        # Show how both operands become floats.
        right = "p.dequantize()" if isinstance(other, RefusedOperators) else "x"
        got = _write_expression(symbol, repr(self), _name_type(other))
        return _refuse(method, f"{_write_expression(symbol, 'q.dequantize()', right)}{_LOOKUPS.get(symbol, '')}", got)

    return refuse


def _make_reflected(method: str, symbol: str) -> Callable[[Any, Any], Any]:
    """Return the method of a binary operator with the quantized array on the right."""

    def refuse(self: Any, other: Any) -> Any:
        return _refuse(
            method,
            f"{_write_expression(symbol, 'x', 'q.dequantize()')}{_LOOKUPS.get(symbol, '')}",
            _write_expression(symbol, _name_type(other), repr(self)),
        )

    return refuse


def _make_unary(method: str, form: str) -> Callable[..., Any]:
    """Return the method of a unary operator or a conversion."""

    def refuse(self: Any, *_: Any) -> Any:
        return _refuse(method, form.format("q.dequantize()"), form.format(repr(self)))

    return refuse


def _add_operators() -> None:
    """Add the methods with setattr, so that type checkers do not see them and report the operators as errors, too."""
    for name, symbol in {**_BINARY, **_COMPARISONS}.items():
        setattr(RefusedOperators, f"__{name}__", _make_binary(f"__{name}__", symbol))
    for name, symbol in _BINARY.items():
        setattr(RefusedOperators, f"__r{name}__", _make_reflected(f"__r{name}__", symbol))
    for name, form in _UNARY.items():
        setattr(RefusedOperators, f"__{name}__", _make_unary(f"__{name}__", form))


_add_operators()
