"""Checks of arguments, and the text of the error where one fails. Only this module imports chex.

Contracts of shape, of axis and of one exact dtype are chex assertions with a plain check behind each:
`chex.disable_asserts()` silences the first and never the second, so that no wrong input becomes a wrong answer.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from .dtypes import find_dtype, is_float6, is_known, list_names

_ARRAYS = (jax.Array, np.ndarray, np.generic, int, float)


class ContractValueError(AssertionError, ValueError):
    """An argument of a wrong shape, rank, length or value."""


class ContractTypeError(AssertionError, TypeError):
    """An argument of a wrong type or dtype."""


_Error = type[ContractValueError] | type[ContractTypeError]


def format_message(function: str, argument: str, expected: str, got: object) -> str:
    """Returns the text of an error: the function, the argument, what was expected and what was given."""
    if isinstance(got, int) and got.bit_length() > 1024:  # Python refuses to print the longest
        got = describe_value(got)
    return f"jaxquant.{function}: {argument}: expected {expected}, got {got}"


def _fail(error: _Error, text: str, assertion: Callable[..., None], *args: Any) -> None:
    """Raises an error whose cause is chex's, unless chex is switched off, or takes the value."""
    try:
        assertion(*args, exception_type=error)
    except error as chex_error:  # the reader's sentence first, chex's behind it as the cause
        raise error(text) from chex_error
    raise error(text)


def require(holds: bool, function: str, argument: str, expected: str, got: object) -> None:
    """Raises ContractValueError unless `holds`."""
    if not holds:
        raise ContractValueError(format_message(function, argument, expected, got))


def require_type(holds: bool, function: str, argument: str, expected: str, got: object) -> None:
    """Raises ContractTypeError unless `holds`."""
    if not holds:
        raise ContractTypeError(format_message(function, argument, expected, got))


def check_array(function: str, argument: str, value: Any, allowed: Sequence[np.dtype]) -> None:
    """Requires an array of one of the allowed dtypes."""
    if not isinstance(value, jax.Array | np.ndarray):
        check_readable(function, argument, value)
        require_type(False, function, argument, "an array", type(value).__name__)
    if value.dtype not in allowed:
        require_type(False, function, argument, f"dtype {list_names(tuple(allowed))}", value.dtype)


def check_same_dtype(function: str, argument: str, value: Any, dtype: np.dtype, reason: str) -> None:
    """Requires exactly `dtype`."""
    is_array = isinstance(value, jax.Array | np.ndarray)
    require_type(is_array, function, argument, "an array", type(value).__name__)
    if value.dtype != dtype:
        text = format_message(function, argument, f"dtype {dtype} ({reason})", value.dtype)
        _fail(ContractTypeError, text, chex.assert_type, value, dtype)


def check_shape(function: str, argument: str, value: Any, expected: tuple[int, ...], reason: str) -> None:
    """Requires exactly the shape `expected`."""
    if value.shape != expected:
        text = format_message(function, argument, f"shape {expected} ({reason})", f"shape {value.shape}")
        _fail(ContractValueError, text, chex.assert_shape, value, expected)


def check_axis(function: str, value: Any, rank: int) -> int:
    """Requires an axis of an array of this rank and returns it counted from the front."""
    check_integer(function, "axis", value)
    require(rank > 0, function, "axis", "an array of rank 1 or more to have an axis", "rank 0")
    if not -rank <= value < rank:
        expected = f"an integer in [{-rank}, {rank - 1}], the array has rank {rank}"
        text = format_message(function, "axis", expected, value)
        _fail(ContractValueError, text, chex.assert_scalar_in, int(value), -rank, rank - 1)
    return int(value) % rank


def check_integer(function: str, argument: str, value: Any) -> None:
    """Requires a static integer; a bool is none."""
    holds = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    require_type(holds, function, argument, "an int", describe_value(value))


def check_integers(function: str, argument: str, value: Any) -> Any:
    """Requires every number, in sequences too, to be an integer; returns lists as tuples, all else as it came.

    Before a cache of compiled programs sees them: to it True is 1 and 1.0 is 1.
    """
    if isinstance(value, list | tuple):
        return tuple(check_integers(function, argument, each) for each in value)
    if isinstance(value, numbers.Number):
        check_integer(function, argument, value)
    return value


def check_hashable(function: str, argument: str, value: Any) -> None:
    """Requires a value that can be static in a compiled program."""
    try:
        hash(value)
    except TypeError:
        text = format_message(function, argument, "a static, hashable value", describe_value(value))
        raise ContractTypeError(text) from None


def check_real(function: str, argument: str, value: Any) -> None:
    """Requires a static finite real number; a bool is none, a traced value neither."""
    holds = isinstance(value, numbers.Real) and not isinstance(value, bool)
    require_type(holds, function, argument, "a static Python number", describe_value(value))
    magnitude: Any = abs(value)  # not of float(value): an int may be too large for a float
    finite = bool(magnitude <= float(np.finfo(np.float32).max))
    require(finite, function, argument, "a finite number of float32", value)


def check_flag(function: str, argument: str, value: Any) -> None:
    """Requires True or False; 0 and 1 pass for them, as ONNX spells them."""
    holds = isinstance(value, bool | np.bool_) or (isinstance(value, numbers.Integral) and value in (0, 1))
    require_type(holds, function, argument, "True or False", describe_value(value))


def check_name(function: str, value: Any) -> None:
    """Requires None or a non-empty string."""
    holds = value is None or (isinstance(value, str) and bool(value))
    require_type(holds, function, "name", "None or a non-empty string", describe_value(value))


def check_dtype(function: str, argument: str, value: Any, allowed: Sequence[np.dtype]) -> np.dtype:
    """Requires something that names one of the allowed dtypes and returns that dtype."""
    try:
        found = find_dtype(value)
    except (TypeError, ValueError):  # ValueError: of a tuple or a dict that numpy takes for fields
        found = None
    if found is None or found not in allowed:
        expected = f"dtype {list_names(tuple(allowed))}"
        if found is not None and is_float6(found):
            expected += " (float6 is in ONNX 28, but the installed jaxlib cannot carry it)"
        raise ContractTypeError(
            format_message(function, argument, expected, describe_value(value) if found is None else found)
        )
    return found


def check_option(function: str, argument: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Requires one of the given strings."""
    expected = " or ".join(repr(a) for a in allowed)
    require(isinstance(value, str) and value in allowed, function, argument, expected, repr(value))


def is_traced(value: Any) -> bool:
    """Whether the elements of `value` are unknown because JAX is tracing."""
    return isinstance(value, Tracer)


def has_dtype(value: Any, dtypes: Sequence[np.dtype]) -> bool:
    """Whether `value` carries one of the dtypes; a Python number carries none."""
    return getattr(value, "dtype", None) in dtypes


def describe_value(value: Any) -> object:
    """Returns what a reader needs to know of a rejected value, without printing an array; a text once it is printed."""
    return _Description(value)


class _Description:
    """A text that is made where it is printed: to make it of every value that is accepted would take too long."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __str__(self) -> str:
        """Returns the text."""
        value = self._value
        if isinstance(value, np.ma.MaskedArray):
            return f"a masked array of {value.dtype}{list(value.shape)}"
        if isinstance(value, jax.Array | np.ndarray):
            return f"{'a traced' if is_traced(value) else 'an'} array of {value.dtype}{list(value.shape)}"
        if isinstance(value, int) and value.bit_length() > 1024:
            return f"an int of {value.bit_length()} bits"
        return f"{value!r} ({type(value).__name__})"


def check_readable(function: str, argument: str, value: Any) -> None:
    """Requires None or something that JAX reads as an array: no text, no object, no mask, no endless int."""
    if isinstance(value, jax.Array) or value is None:
        return
    if isinstance(value, np.ma.MaskedArray):
        expected = "an array without a mask, which would be lost: x.filled(value), or x.data"
        raise ContractTypeError(format_message(function, argument, expected, describe_value(value))) from None
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind in "OSUMmV" and not is_known(value.dtype):
            raise ContractTypeError(format_message(function, argument, "an array", f"dtype {value.dtype}")) from None
    elif not isinstance(value, _ARRAYS):
        raise ContractTypeError(format_message(function, argument, "an array", type(value).__name__)) from None
    elif isinstance(value, int) and not -(2**31) <= value < 2**31:
        raise ContractValueError(
            format_message(function, argument, "a number that JAX can hold", describe_value(value))
        ) from None


def is_key(value: Any) -> bool:
    """Whether `value` is one key of `jax.random`, of the new style or the old."""
    if not isinstance(value, jax.Array | np.ndarray):
        return False
    is_typed = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return value.ndim == 0 if is_typed else value.ndim == 1 and value.dtype == np.uint32


def check_precision(function: str, value: Any, *, has_algorithms: bool = True) -> None:
    """Requires what `jax.lax` takes as a precision, also where integers leave nothing to choose."""
    if value is None or isinstance(value, lax.Precision):
        return
    check_hashable(function, "precision", value)
    pair = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
    texts = all(isinstance(each, str) and _is_precision(each) for each in pair)
    holds = texts or all(isinstance(each, lax.Precision) for each in pair)
    if has_algorithms:
        holds |= isinstance(value, lax.DotAlgorithm | lax.DotAlgorithmPreset)
        holds |= isinstance(value, str) and value in lax.DotAlgorithmPreset.__members__
    if not holds:
        expected = "None, a jax.lax.Precision, its name, or two of them"
        expected += ", or a jax.lax.DotAlgorithmPreset or DotAlgorithm" if has_algorithms else ""
        raise ContractTypeError(format_message(function, "precision", expected, describe_value(value)))


def _is_precision(name: str) -> bool:
    try:
        lax.Precision(name)
    except ValueError:
        return False
    return True
