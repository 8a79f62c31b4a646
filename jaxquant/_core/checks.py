"""Checks of the arguments of a call, and the errors that they raise.

This is the only module that imports chex, and it does so when a check fails, because that import takes a third of the
time of `import jaxquant`. The checks of a shape, of an axis and of one exact dtype use a chex assertion as well as a
plain check. `chex.disable_asserts()` silences the assertion but not the plain check, so a wrong input never gives a
wrong result.
"""

from __future__ import annotations

import contextlib
import numbers
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from .dtypes import is_float6, is_known, list_names, parse_dtype

_ARRAYS = (jax.Array, np.ndarray)
_NUMBERS = (int, float)
_NAMED = re.compile(r"(?<![\w.])jaxquant\.([A-Za-z_][\w.]*): ")
_LONG_INT = 1024  # bits; by default Python refuses to print an int of more than 4300 digits


class ContractValueError(AssertionError, ValueError):
    """The error for an argument with a wrong shape, rank, length or value."""


class ContractTypeError(AssertionError, TypeError):
    """The error for an argument with a wrong type or dtype."""


_Error = type[ContractValueError] | type[ContractTypeError]


def format_message(function: str, argument: str, expected: str, got: object) -> str:
    """Return the text of an error: the function, the argument, what was expected and what was passed."""
    if isinstance(got, int) and got.bit_length() > _LONG_INT:
        got = describe_value(got)
    return f"jaxquant.{function}: {argument}: expected {expected}, got {got}"


def _fail(error: _Error, text: str, assertion: str, *args: object) -> None:
    """Raise an error with the given text from the failure of the chex assertion of this name."""
    import chex

    try:
        getattr(chex, assertion)(*args, exception_type=error)
    except error as chex_error:  # the user reads our text; the error of chex is its cause
        raise error(text) from chex_error
    # The assertion passed, because chex is disabled or accepts the value, but our own check has already failed.
    raise error(text)


def refuse(function: str, argument: str, expected: str, got: object) -> NoReturn:
    """Raise ContractValueError."""
    raise ContractValueError(format_message(function, argument, expected, got))


def refuse_type(function: str, argument: str, expected: str, got: object) -> NoReturn:
    """Raise ContractTypeError."""
    raise ContractTypeError(format_message(function, argument, expected, got))


def require(holds: bool, function: str, argument: str, expected: str, got: object) -> None:
    """Raise ContractValueError unless `holds`."""
    if not holds:
        raise ContractValueError(format_message(function, argument, expected, got))


def require_type(holds: bool, function: str, argument: str, expected: str, got: object) -> None:
    """Raise ContractTypeError unless `holds`."""
    if not holds:
        raise ContractTypeError(format_message(function, argument, expected, got))


@contextlib.contextmanager
def prefix_errors(path: str) -> Iterator[None]:
    """Put the path of a layer or of a contraction in front of the errors that are raised inside the `with` block."""
    try:
        yield
    except (ContractValueError, ContractTypeError) as error:
        # An inner block may have added the same path already.
        if str(error).startswith(f"{path}: "):
            raise
        raise type(error)(f"{path}: {error}") from error


@contextlib.contextmanager
def name_errors(function: str) -> Iterator[None]:
    """Name another function in the errors that are raised inside the `with` block.

    A public function that leaves checks to another one calls it in such a block, so that an error names the
    function that the user called.
    """
    try:
        yield
    except (ContractValueError, ContractTypeError) as error:
        text = str(error)
        match = _NAMED.search(text)
        if match is None or match[1] == function:
            raise
        raise type(error)(f"{text[: match.start()]}jaxquant.{function}: {text[match.end() :]}") from error


def check_array(function: str, argument: str, value: Any, allowed: Sequence[np.dtype]) -> None:
    """Raise ContractTypeError unless `value` is an array of one of the allowed dtypes."""
    _check_is_array(function, argument, value)
    if value.dtype not in allowed:
        refuse_type(function, argument, f"dtype {list_names(tuple(allowed))}", value.dtype)


def check_same_dtype(function: str, argument: str, value: Any, dtype: np.dtype, reason: str) -> None:
    """Raise ContractTypeError unless `value` is an array of exactly this dtype; `reason` says why it must have it."""
    _check_is_array(function, argument, value)
    if value.dtype != dtype:
        text = format_message(function, argument, f"dtype {dtype} ({reason})", value.dtype)
        _fail(ContractTypeError, text, "assert_type", value, dtype)


def _check_is_array(function: str, argument: str, value: object) -> None:
    if not isinstance(value, _ARRAYS):
        check_readable(function, argument, value)
        refuse_type(function, argument, "an array", type(value).__name__)


def check_shape(function: str, argument: str, value: Any, expected: tuple[int, ...], reason: str) -> None:
    """Raise ContractValueError unless `value` has exactly this shape; `reason` says why it must have it."""
    if value.shape != expected:
        text = format_message(function, argument, f"shape {expected} ({reason})", f"shape {value.shape}")
        _fail(ContractValueError, text, "assert_shape", value, expected)


def check_axis(function: str, value: Any, rank: int, argument: str = "axis") -> int:
    """Return an axis as a non-negative int; raise unless an array of this rank has it."""
    check_integer(function, argument, value)
    require(rank > 0, function, argument, "an array of rank 1 or more", "rank 0")
    if not -rank <= value < rank:
        expected = f"an integer in [{-rank}, {rank - 1}], because the array has rank {rank}"
        text = format_message(function, argument, expected, value)
        _fail(ContractValueError, text, "assert_scalar_in", int(value), -rank, rank - 1)
    return int(value) % rank


def check_integer(function: str, argument: str, value: object) -> None:
    """Raise ContractTypeError unless `value` is a static integer and not a bool."""
    # The exact type first: isinstance with an abstract class is slow, and an eager call makes many of these checks.
    if type(value) is int:
        return
    holds = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    require_type(holds, function, argument, "an int", describe_value(value))


_INT = frozenset((int,))


def check_integers(function: str, argument: str, value: Any) -> Any:
    """Return a value with its lists converted to tuples; raise if a number in it, at any depth, is not an integer.

    This check must run before the value becomes a key of the cache of compiled programs. True, 1.0 and 1 are equal
    keys: a call with True would run the program that was compiled for 1.
    """
    # The usual cases come first, because eager calls check several values: isinstance with an abstract class is slow.
    kind = type(value)
    if kind is int or kind is str or value is None or (kind is tuple and _INT.issuperset(map(type, value))):
        return value
    if isinstance(value, (list, tuple)):
        return tuple([check_integers(function, argument, entry) for entry in value])
    if isinstance(value, numbers.Number):
        check_integer(function, argument, value)
    return value


def check_hashable(function: str, argument: str, value: object) -> None:
    """Raise ContractTypeError unless `value` is hashable, as a static argument of a compiled program must be."""
    if not is_hashable(value):
        text = format_message(function, argument, "a static, hashable value", describe_value(value))
        raise ContractTypeError(text)


def is_hashable(value: object) -> bool:
    """Return whether a value, and all that it holds, has a hash."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def check_real(function: str, argument: str, value: Any) -> None:
    """Raise unless `value` is a static real number that float32 can hold; bools and traced values are refused."""
    holds = isinstance(value, numbers.Real) and not isinstance(value, bool)
    require_type(holds, function, argument, "a static Python number", describe_value(value))
    # Python compares an int of any length with a float, while float(value) would overflow.
    magnitude: Any = abs(value)
    finite = bool(magnitude <= float(np.finfo(np.float32).max))
    require(finite, function, argument, "a finite number that float32 can hold", value)


def check_flag(function: str, argument: str, value: object) -> None:
    """Raise ContractTypeError unless `value` is True, False, or 0 or 1, which ONNX uses for them."""
    if value is True or value is False:
        return
    holds = isinstance(value, bool | np.bool_) or (isinstance(value, numbers.Integral) and value in (0, 1))
    require_type(holds, function, argument, "True or False", describe_value(value))


def check_name(function: str, value: object) -> None:
    """Raise ContractTypeError unless `value` is None or a non-empty string."""
    holds = value is None or (isinstance(value, str) and bool(value))
    require_type(holds, function, "name", "None or a non-empty string", describe_value(value))


def check_dtype(
    function: str, argument: str, value: object, allowed: Sequence[np.dtype], *, expected: str | None = None
) -> np.dtype:
    """Return the dtype that `value` names; raise ContractTypeError unless it is one of the allowed dtypes.

    The error lists the allowed dtypes, or says what is `expected`.
    """
    try:
        dtype = parse_dtype(value)
    except (TypeError, ValueError):  # numpy reads a tuple or a dict as fields, and raises ValueError for invalid ones
        dtype = None
    if dtype is None or dtype not in allowed:
        expected = expected or f"dtype {list_names(tuple(allowed))}"
        if dtype is not None and is_float6(dtype):
            expected += " (float6 is in ONNX 28, but the installed jaxlib cannot carry it)"
        got = describe_value(value) if dtype is None else dtype
        raise ContractTypeError(format_message(function, argument, expected, got))
    return dtype


def check_option(function: str, argument: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ContractValueError unless `value` is one of the allowed strings."""
    if not isinstance(value, str) or value not in allowed:
        refuse(function, argument, " or ".join(repr(option) for option in allowed), repr(value))


def refuse_backward(function: str, training: bool) -> None:
    """Raise ContractValueError if a call with training=False is differentiated."""
    expected = "True if the call is differentiated (with False, nothing is stored for the backward pass)"
    require(training, function, "training", expected, False)


def is_traced(value: object) -> bool:
    """Return whether the elements of `value` are unknown because JAX is tracing."""
    return isinstance(value, Tracer)


def has_dtype(value: object, dtypes: Sequence[np.dtype]) -> bool:
    """Return whether `value` has one of the dtypes; a Python number has no dtype."""
    return getattr(value, "dtype", None) in dtypes


def check_function(function: str, argument: str, value: object) -> None:
    """Raise ContractTypeError unless a value can be called; name `apply` for a module of Flax Linen or Haiku."""
    # A module of Linen that is not bound to variables can be called, but cannot run.
    is_module = all(callable(getattr(value, name, None)) for name in ("init", "apply"))
    is_module = is_module and (not callable(value) or getattr(value, "scope", value) is None)
    if is_module:
        expected, got = "a function, such as the module's `apply`", f"a module ({type(value).__name__})"
        refuse_type(function, argument, expected, got)
    require_type(callable(value), function, argument, "a function", describe_value(value))


def describe_value(value: object) -> object:
    """Return an object that prints as a description of a rejected value, without the elements of an array."""
    return _Description(value)


class _Description:
    """A description that is built when it is printed.

    Many checks describe their value before they know whether it is wrong. The repr of a large value takes longer than
    the check, and a valid call should not pay for it.
    """

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        """Return the dtype and shape of an array, the length of a long int, or the repr and type of another value."""
        value = self._value
        if isinstance(value, np.ma.MaskedArray):
            return f"a masked array of {value.dtype}{list(value.shape)}"
        if isinstance(value, _ARRAYS):
            return f"{'a traced' if is_traced(value) else 'an'} array of {value.dtype}{list(value.shape)}"
        if isinstance(value, int) and value.bit_length() > _LONG_INT:
            return f"an int of {value.bit_length()} bits"
        return f"{value!r} ({type(value).__name__})"


def check_readable(function: str, argument: str, value: object) -> None:
    """Raise unless `value` is None or something that JAX converts to an array without loss.

    Strings, objects, numpy's dates and records, masked arrays, and ints of more than 32 bits are rejected.
    """
    if isinstance(value, jax.Array) or value is None:
        return
    error: _Error = ContractTypeError
    expected, got = "an array", describe_value(value)
    if isinstance(value, np.ma.MaskedArray):
        expected = "an array without a mask, which JAX would drop (pass x.filled(value) or x.data)"
    elif isinstance(value, np.ndarray | np.generic):
        # To numpy the dtypes of ml_dtypes, such as bfloat16, are of kind "V" (void), like records.
        if value.dtype.kind not in "OSUMmV" or is_known(value.dtype):
            return
        got = f"dtype {value.dtype}"
    elif not isinstance(value, _NUMBERS):
        got = type(value).__name__
    elif isinstance(value, int) and not -(2**31) <= value < 2**31:
        # jnp.asarray converts a Python int to int32, and raises an error that names no argument if it does not fit.
        error, expected = ContractValueError, "an int that int32 can hold"
    else:
        return
    # `from None`, because this function is called while JAX's own error is handled, and this error replaces it.
    raise error(format_message(function, argument, expected, got)) from None


def is_key(value: object) -> bool:
    """Return whether `value` is a single key of `jax.random`, typed or raw uint32."""
    if not isinstance(value, _ARRAYS):
        return False
    is_typed = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return value.ndim == 0 if is_typed else value.ndim == 1 and value.dtype == np.uint32


def check_precision(function: str, value: object, *, has_algorithms: bool = True) -> None:
    """Raise ContractTypeError unless `value` is a precision that `jax.lax` accepts.

    A contraction of integers checks its precision too, although the precision does not change the result.

    Args:
        function: the name of the public function, for the error.
        value: the precision.
        has_algorithms: whether the function of `jax.lax` also accepts a DotAlgorithm or a DotAlgorithmPreset.
    """
    if value is None or isinstance(value, lax.Precision):
        return
    check_hashable(function, "precision", value)
    # A single precision applies to both operands.
    pair = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
    # jax.lax refuses a pair of a name and a Precision.
    are_names = all(isinstance(side, str) and _is_precision_name(side) for side in pair)
    holds = are_names or all(isinstance(side, lax.Precision) for side in pair)
    if has_algorithms:
        holds |= isinstance(value, lax.DotAlgorithm | lax.DotAlgorithmPreset)
        holds |= isinstance(value, str) and value in lax.DotAlgorithmPreset.__members__
    if not holds:
        expected = "None, a jax.lax.Precision, the name of one, or a pair of them"
        expected += ", or a jax.lax.DotAlgorithmPreset or DotAlgorithm" if has_algorithms else ""
        raise ContractTypeError(format_message(function, "precision", expected, describe_value(value)))


def _is_precision_name(name: str) -> bool:
    try:
        lax.Precision(name)
    except ValueError:
        return False
    return True
