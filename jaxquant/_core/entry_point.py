"""The conversion and checking of the arguments of a call, before an operator computes anything."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from . import checks, dtypes

_Output = TypeVar("_Output")
# A tuple: isinstance with a union that is built for each argument of each call is measurably slower.
_NUMPY_INTEGERS = (np.ndarray, np.integer)
_LARGEST = 3e38  # less than the largest float32


def compile_entry_point(
    function: str, names: tuple[str, ...] | None = None
) -> Callable[[Callable[..., _Output]], Callable[..., _Output]]:
    """Return a decorator that jits an operator and names the public function in the errors of its arguments.

    The positional parameters of the operator are arrays and the keyword-only ones are static. The operator gets JAX
    arrays in place of numpy's, under `jax.disable_jit` too. What JAX cannot trace gets a named error, or is converted
    as JAX would convert it (a `flax.nnx.Param`, for example).

    Arguments are checked at two times. Before the compiled program runs, only numpy's 64-bit integers and masked arrays
    are looked for, because JAX accepts them and loses a part of them without an error. Everything else is examined only
    after JAX has refused the call, so a valid call does not pay for it.

    Args:
        function: the name of the public function, without "jaxquant.".
        names: the names of the arrays in errors, or None for the names of the parameters.
    """

    def decorate(operator: Callable[..., _Output]) -> Callable[..., _Output]:
        parameters = inspect.signature(operator).parameters.values()
        arrays = names or tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        statics = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)

        compiled = jax.jit(operator, inline=True, static_argnames=statics)

        @functools.wraps(operator)
        def call(*arguments: Any, **options: Any) -> Any:
            # This loop runs in each eager call. For a jax.Array it costs one isinstance.
            for value in arguments:
                if isinstance(value, _NUMPY_INTEGERS) and _loses_elements(value):
                    arguments = _narrow_integers(function, arrays, arguments)
                    break
            try:
                # Then the operator gets what the caller passed. The types of jax 0.10 lack the flag.
                if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
                    arguments = convert_numpy(*arguments)
                return compiled(*arguments, **options)
            except (TypeError, ValueError, OverflowError):
                # JAX refused the call. If an argument wraps an array, try again with the array itself. Otherwise raise
                # an error that names the argument at fault.
                unwrapped = tuple(unwrap_array(value) for value in arguments)
                if any(a is not b for a, b in zip(unwrapped, arguments, strict=True)):
                    return call(*unwrapped, **options)
                pairs = zip(arrays, arguments, strict=False)
                explain_refusal(function, {name: value for name, value in pairs if not _is_tree(value)}, options)
                raise  # an error of the operator itself, which already names the function and the argument

        return call

    return decorate


def _is_tree(value: object) -> bool:
    """Return whether a value is an instance of a pytree class, such as Quantizer; the operator checks its leaves."""
    return not isinstance(value, list | tuple | dict) and not jax.tree_util.all_leaves([value])


def _loses_elements(value: np.ndarray | np.integer) -> bool:
    """Return whether JAX would lose a part of a numpy array: its mask, or the upper bits of its integers."""
    return (value.dtype.itemsize == 8 and value.dtype.kind in "iu") or isinstance(value, np.ma.MaskedArray)


def _narrow_integers(function: str, names: tuple[str, ...], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with numpy's 64-bit integers as int32; raise if one is masked or does not fit in int32."""
    result = []
    for name, value in zip(names, arguments, strict=False):
        if isinstance(value, _NUMPY_INTEGERS) and _loses_elements(value):
            checks.check_readable(function, name, value)
            value = narrow_to_int32(function, name, value)
        result.append(value)
    return (*result, *arguments[len(result) :])


def narrow_to_int32(function: str, argument: str, value: Any) -> Any:
    """Return a numpy array or scalar of 64-bit integers as int32, which must hold them; return anything else unchanged.

    JAX would drop the upper 32 bits without an error: 2**32 + 1 would become 1.
    """
    is_wide = isinstance(value, _NUMPY_INTEGERS) and value.dtype.kind in "iu" and value.dtype.itemsize == 8
    if not is_wide:
        return value
    narrow = value.astype(np.int32)
    overflows = np.asarray(value)[narrow != value]
    if overflows.size:
        checks.refuse(function, argument, "integers that int32 can hold", f"{overflows.flat[0]} ({value.dtype})")
    return narrow


def unwrap_array(value: Any) -> Any:
    """Return the array inside an object that wraps one, such as a flax.nnx.Param; return anything else unchanged."""
    if isinstance(value, jax.Array) or not hasattr(value, "__jax_array__"):
        return value
    return value.__jax_array__()


def convert_number(value: Any) -> Any:
    """Return a Python number as a float32 scalar, infinite if it overflows; return anything else unchanged.

    This is for numbers given as values. Numbers given as scales and zero points must fit their dtype:
    `fit_number` converts them.
    """
    if type(value) not in (int, float):  # the exact types: a bool and a numpy scalar keep their dtype
        return value
    # The usual numbers come first, because each eager call pays for the context manager.
    if -_LARGEST <= value <= _LARGEST:
        return np.float32(value)
    with np.errstate(over="ignore"):  # an overflow becomes an infinity, without numpy's warning
        try:
            return np.float32(value)
        except OverflowError:  # an int beyond float64: the later check for an array raises an error that names it
            return value


def convert_numpy(*values: object) -> tuple[Any, ...]:
    """Return the values with numpy's arrays and scalars as JAX arrays.

    A compiled function receives JAX arrays anyway; under `jax.disable_jit` it receives what the caller passed.
    """
    return tuple(jnp.asarray(v) if isinstance(v, np.ndarray | np.generic | float) else v for v in values)


def convert_arrays(function: str, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Return named arguments as `convert_numpy` does; raise a named error for the first that JAX cannot read."""
    if any(isinstance(value, np.ma.MaskedArray) for value in arguments.values()):
        explain_refusal(function, arguments, {})  # JAX would accept a masked array and drop its mask
    try:
        return convert_numpy(*arguments.values())
    except (TypeError, ValueError, OverflowError):
        explain_refusal(function, arguments, {})
        raise


def read_float_operand(function: str, argument: str, value: Any) -> Any:
    """Return an operand that has to be an array of floats in a form that a compiled function takes.

    A JAX array and a numpy array of floats stay as they are, because each eager call would pay for a conversion.
    """
    if isinstance(value, jax.Array) or (type(value) is np.ndarray and value.dtype.kind == "f"):
        return value
    (operand,) = convert_arrays(function, {argument: unwrap_array(value)})
    checks.check_readable(function, argument, operand)
    return operand


def explain_refusal(function: str, arrays: dict[str, Any], statics: dict[str, Any]) -> None:
    """Raise a named error for the first argument that JAX cannot read as an array, or that cannot be static."""
    for argument, value in arrays.items():
        checks.check_readable(function, argument, value)
    for argument, value in statics.items():
        checks.check_hashable(function, argument, value)


# Conversion of Python numbers that are given as scales and zero points.


# Every float dtype here holds magnitudes in this range, so an ordinary scale needs no other check.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-14, 2.0**15
# A tuple, because isinstance with a union that is built in each call is measurably slower.
_NUMBERS = (int, float)


def fit_number(function: str, argument: str, value: object, dtype: np.dtype) -> Any:
    """Return a Python number as an array of `dtype`, which must hold it; return anything else unchanged.

    A float dtype holds 0, infinities, NaN, and every number that it does not round to 0 or to an infinity. An integer
    dtype holds the ints in its range. A float8 or float4 dtype holds only 0, because there the number is a zero point.
    """
    if not isinstance(value, _NUMBERS):
        return value
    if dtype in dtypes.FLOATS:
        return _round_to_float(function, argument, value, dtype)
    checks.check_integer(function, argument, value)
    if dtype in dtypes.SMALL_FLOATS:
        if value != 0:
            checks.refuse(function, argument, f"0, the only zero point of {dtype}", value)
    else:
        low, high = dtypes.read_bounds(dtype)
        if not low <= value <= high:
            checks.refuse(function, argument, f"an int in [{low}, {high}], the range of {dtype}", value)
    return np.asarray(value, dtype)


def _round_to_float(function: str, argument: str, value: float, dtype: np.dtype) -> np.ndarray:
    """Return a number as an array of a float dtype; raise if it overflows or becomes 0."""
    if isinstance(value, bool):
        checks.refuse_type(function, argument, "a number", checks.describe_value(value))
    if _SMALLEST_SCALE <= abs(value) <= _LARGEST_SCALE:
        return np.asarray(value, dtype)
    try:
        with np.errstate(over="ignore"):  # an overflow is an error below, without numpy's warning
            result = np.asarray(float(value), dtype)
    except OverflowError:  # an int beyond float64
        result = np.asarray(np.inf, dtype)
    rounded = float(result)
    overflows = math.isinf(rounded) and abs(value) != math.inf
    if overflows or (rounded == 0 and value != 0):
        checks.refuse(function, argument, f"a number that {dtype} can hold", value)
    return result


def convert_scale_number(function: str, argument: str, value: object, x: object) -> Any:
    """Return a Python number as a scale of x's float dtype, or of float32; return anything else unchanged."""
    dtype: Any = getattr(x, "dtype", None)
    return fit_number(function, argument, value, dtype if dtype in dtypes.FLOATS else dtypes.FLOAT32)


def convert_float32_scale(function: str, argument: str, value: object) -> Any:
    """Return a Python number as a float32 scale; return anything else unchanged."""
    return fit_number(function, argument, value, dtypes.FLOAT32)


def convert_zero_point_number(function: str, argument: str, value: Any, dtype: Any, scale: Any) -> Any:
    """Return an int as a zero point of scale's shape and the given dtype, which must hold it."""
    dtype = checks.check_dtype(function, f"the dtype of {argument}", dtype, dtypes.QUANTIZED)
    checks.check_integer(function, argument, value)
    zero_point, shape = fit_number(function, argument, int(value), dtype), np.shape(scale)
    return zero_point if shape == () else np.full(shape, zero_point)


def convert_operand_zero_point(function: str, argument: str, value: object, operand: object) -> Any:
    """Return an int as a zero point of the operand's dtype, which must hold it; return anything else unchanged."""
    dtype: Any = getattr(operand, "dtype", None)
    # A float is returned unchanged: the later check of the zero point's dtype rejects it.
    if not isinstance(value, int) or dtype not in (*dtypes.CONTRACTED, *dtypes.FLOAT8):
        return value
    return fit_number(function, argument, value, np.dtype(dtype))


# Checks of the elements of scales and zero points, made only if the elements are known and cheap to read.


# A longer array is not read: the check would cost more time than the error message saves.
_MOST_ELEMENTS = 2**16


def read_elements(value: object, *, is_awaited: bool = False) -> np.ndarray | None:
    """Return the elements of an array of numbers if they are known and few, and None otherwise.

    Args:
        value: anything. The elements are unknown if it is traced, if it is on devices of another host, or if it is not
            an array of numbers.
        is_awaited: whether to wait for an accelerator. If not, only arrays in the memory of this host are known.
    """
    if isinstance(value, jax.Array):
        if isinstance(value, Tracer) or value.size > _MOST_ELEMENTS or not value.is_fully_addressable:
            return None
        if not is_awaited:
            for device in value.devices():  # a loop, because a generator costs an eager call more
                if device.platform != "cpu":
                    return None
    elif (
        not isinstance(value, np.ndarray | np.generic)
        or isinstance(value, np.ma.MaskedArray)
        or value.size > _MOST_ELEMENTS
    ):
        return None
    dtype = value.dtype  # a key of jax.random has a dtype that is not a numpy dtype
    is_number = isinstance(dtype, np.dtype) and (dtype.kind in "iuf" or dtypes.is_known(dtype))
    return np.asarray(value) if is_number else None


def check_positive_scale(
    function: str, argument: str, scale: object, *, allow_overflow: bool = False, is_awaited: bool = False
) -> None:
    """Raise ContractValueError if a known element of a scale is not positive, or is NaN or infinite.

    Args:
        function: the name of the public function, for the error.
        argument: the name of the scale, for the error.
        scale: anything; the elements that `read_elements` returns are checked.
        allow_overflow: whether NaN and infinity are accepted.
        is_awaited: whether to wait for an accelerator.
    """
    values = read_elements(scale, is_awaited=is_awaited)
    if values is None:
        return
    # The usual case, a positive float32 scale, is tested first, because every eager call with a scale pays for it.
    is_positive = values.dtype == dtypes.FLOAT32 and values.size and np.minimum.reduce(values, axis=None) > 0
    if is_positive and (allow_overflow or np.maximum.reduce(values, axis=None) < np.inf):
        return
    if values.dtype not in (*dtypes.FLOATS, dtypes.E8M0, np.float64):  # the check of the dtype raises
        return
    values = values.astype(np.float32, copy=False)  # JAX reads a float64 as float32, where it may become 0
    if values.size and values.min() > 0 and values.max() < np.inf:
        return
    wrong = values <= 0 if allow_overflow else ~((values > 0) & (values < np.inf))
    if wrong.any():
        expected = "positive numbers" if allow_overflow else "finite positive numbers"
        checks.refuse(function, argument, expected, f"{values[wrong].ravel()[0]}")


def check_rounded_zero_point(function: str, argument: str, zero_point: object, bounds: tuple[int, int]) -> None:
    """Raise ContractValueError if a known element of a float zero point does not round to a code in `bounds`."""
    if getattr(zero_point, "dtype", None) != dtypes.FLOAT32:
        return
    values = read_elements(zero_point)
    if values is None:
        return
    steps = np.rint(values)
    wrong = ~((steps >= bounds[0]) & (steps <= bounds[1]))
    if wrong.any():
        expected = (
            f"numbers that round to a code in [{bounds[0]}, {bounds[1]}] (a traced zero point is clipped to this range)"
        )
        checks.refuse(function, argument, expected, f"{values[wrong].ravel()[0]}")


def check_float_zero_point(function: str, argument: str, zero_point: object) -> None:
    """Raise ContractValueError if a zero point of a small float dtype is known and not zero."""
    # Integers are the usual case, and each eager call pays for this check.
    dtype = getattr(zero_point, "dtype", None)
    if dtype is None or getattr(dtype, "kind", None) in ("i", "u") or dtype not in dtypes.SMALL_FLOATS:
        return
    if not isinstance(zero_point, jax.Array | np.ndarray | np.generic) or checks.is_traced(zero_point):
        return
    values = np.asarray(zero_point).astype(np.float32)
    if np.any(values):
        expected = f"0, the only zero point of {zero_point.dtype}"
        checks.refuse(function, argument, expected, values.tolist())
