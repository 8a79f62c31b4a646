"""The conversion and checking of the arguments of a call, before an operator computes anything."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from . import checks

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
        names: the names of the arrays in errors, or None if they are those of the parameters.
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
                if jax.config.jax_disable_jit:  # then the operator gets what the caller passed
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


def _is_tree(value: Any) -> bool:
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
    `scale_arguments` converts them.
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


def convert_numpy(*values: Any) -> tuple[Any, ...]:
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
