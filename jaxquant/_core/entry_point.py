"""What every operator does with the arguments of a call before it computes anything: one decorator."""

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


def compile_entry_point(function: str) -> Callable[[Callable[..., _Output]], Callable[..., _Output]]:
    """Return a decorator that jits an operator and names the public function in the errors of its arguments.

    The positional parameters of the operator are arrays and the keyword-only ones are static. The operator gets JAX
    arrays in place of numpy's, under `jax.disable_jit` too. What JAX cannot trace gets a named error, or is converted
    as JAX would convert it (a `flax.nnx.Param`, for example).

    Only numpy's 64-bit integers and masked arrays are looked for before the call, because a program that is already
    compiled takes them without an error. Everything else is examined after JAX refused, so that a good call pays
    nothing for it.

    Args:
        function: the name of the public function, without "jaxquant.".
    """

    def decorate(operator: Callable[..., _Output]) -> Callable[..., _Output]:
        parameters = inspect.signature(operator).parameters.values()
        arrays = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        statics = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)

        @functools.wraps(operator)
        def convert_and_call(*given: Any, **options: Any) -> Any:
            return operator(*convert_numpy(*given), **options)

        compiled = jax.jit(convert_and_call, inline=True, static_argnames=statics)

        @functools.wraps(operator)
        def call(*given: Any, **options: Any) -> Any:
            for value in given:
                if isinstance(value, np.ndarray | np.integer) and _loses_elements(value):
                    given = _narrow_integers(function, arrays, given)
                    break
            try:
                return compiled(*given, **options)
            except (TypeError, ValueError, OverflowError):
                unwrapped = tuple(unwrap_array(value) for value in given)
                if any(a is not b for a, b in zip(unwrapped, given, strict=True)):
                    return call(*unwrapped, **options)
                named = {name: v for name, v in zip(arrays, given, strict=False) if not _is_tree(v)}
                explain_refusal(function, named, options)
                raise

        return call

    return decorate


def _is_tree(value: Any) -> bool:
    """Return whether a value is a pytree of its own, as a Quantizer is, whose arrays the operator checks."""
    return not isinstance(value, list | tuple | dict) and not jax.tree_util.all_leaves([value])


def _loses_elements(value: np.ndarray | np.integer) -> bool:
    """Return whether JAX would lose something of a numpy array: its mask, or the upper bits of its integers."""
    return (value.dtype.itemsize == 8 and value.dtype.kind in "iu") or isinstance(value, np.ma.MaskedArray)


def _narrow_integers(function: str, arguments: tuple[str, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with numpy's 64-bit integers as int32; JAX would convert them, wrapped around or not."""
    result = []
    for argument, value in zip(arguments, given, strict=False):
        if isinstance(value, np.ndarray | np.integer) and _loses_elements(value):
            checks.check_readable(function, argument, value)
            value = narrow_to_int32(function, argument, value)
        result.append(value)
    return (*result, *given[len(result) :])


def narrow_to_int32(function: str, argument: str, value: Any) -> Any:
    """Returns a numpy array or scalar of 64-bit integers as int32, which has to hold them; anything else as it came.

    JAX drops the upper 32 bits without a word: 2**32 + 1 becomes 1.
    """
    is_wide = isinstance(value, np.ndarray | np.integer) and value.dtype.kind in "iu" and value.dtype.itemsize == 8
    if not is_wide:
        return value
    narrow = value.astype(np.int32)
    wrong = np.asarray(value)[narrow != value]
    if wrong.size:
        checks.require(False, function, argument, "integers that int32 holds", f"{wrong.flat[0]}, of {value.dtype}")
    return narrow


def unwrap_array(value: Any) -> Any:
    """Returns the array inside an object that stands for one, a flax.nnx.Param for one; anything else as it came."""
    if isinstance(value, jax.Array) or not hasattr(value, "__jax_array__"):
        return value
    return value.__jax_array__()


def convert_number(value: Any) -> Any:
    """Returns a Python number as a float32; anything else, and an int beyond float64, as it came."""
    if type(value) not in (int, float):
        return value
    with np.errstate(over="ignore"):  # what is too large is an infinity, without numpy's warning
        try:
            return np.float32(value)
        except OverflowError:  # refused by name where an array is required
            return value


def convert_numpy(*values: Any) -> tuple[Any, ...]:
    """Returns numpy's arrays and scalars as JAX's, as they come under `jax.disable_jit`; anything else as it came."""
    return tuple(jnp.asarray(v) if isinstance(v, np.ndarray | np.generic | float) else v for v in values)


def convert_arrays(function: str, given: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what `arrays` does of arguments by their names; what JAX cannot read gets a named error."""
    if any(isinstance(value, np.ma.MaskedArray) for value in given.values()):
        explain_refusal(function, given, {})
    try:
        return convert_numpy(*given.values())
    except (TypeError, ValueError, OverflowError):
        explain_refusal(function, given, {})
        raise


def explain_refusal(function: str, arrays: dict[str, Any], statics: dict[str, Any]) -> None:
    """Raise a named error for the first argument that JAX cannot read as an array, or that cannot be static."""
    for argument, value in arrays.items():
        checks.check_readable(function, argument, value)
    for argument, value in statics.items():
        checks.check_hashable(function, argument, value)
