"""The contractions of a network and nothing else: a lower bound of the time that any form of it takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .contest import Call

CONTRACTIONS_ALONE = "contractions alone"
OPERATIONS = ("dot_general", "conv_general_dilated")


def contract_alone(function: Callable[..., Any], arguments: Sequence[Any], are_integer: Sequence[bool]) -> Call:
    """Return a call that runs each contraction of a float function on operands that exist already.

    Args:
        function: the float function.
        arguments: its arguments.
        are_integer: for each contraction in program order, whether to contract int8 codes into int32 or floats.
    """
    equations = list(_list_contractions(jax.make_jaxpr(function)(*arguments).jaxpr))
    rng = np.random.default_rng(9)
    calls, operands = [], []
    for is_integer, equation in zip(are_integer, equations, strict=True):
        call, shapes = _make_contraction(equation, is_integer)
        calls.append(call)
        codes = [rng.integers(-128, 128, shape, np.int8) for shape in shapes]
        operands.append([jnp.asarray(c, jnp.int8 if is_integer else jnp.float32) for c in codes])
    return functools.partial(
        jax.jit(lambda pairs: [call(*pair) for call, pair in zip(calls, pairs, strict=True)]), operands
    )


def _list_contractions(program: Any) -> Iterator[Any]:
    """Yield the equations of a program that contract, in program order."""
    for equation in program.eqns:
        if str(equation.primitive) in OPERATIONS:
            yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _list_contractions(inner)


def _make_contraction(equation: Any, is_integer: bool) -> tuple[Callable[..., jax.Array], list[tuple[int, ...]]]:
    """Return the contraction of an equation, without the padding of a convolution, and the shapes of its operands."""
    shapes, parameters = [variable.aval.shape for variable in equation.invars], equation.params
    result = {"preferred_element_type": jnp.int32 if is_integer else jnp.float32}
    if str(equation.primitive) == "dot_general":
        return functools.partial(lax.dot_general, dimension_numbers=parameters["dimension_numbers"], **result), shapes
    images = list(shapes[0])
    for axis, (low, high) in zip(parameters["dimension_numbers"].lhs_spec[2:], parameters["padding"], strict=True):
        images[axis] += low + high
    names = ("window_strides", "dimension_numbers", "feature_group_count")
    call = functools.partial(lax.conv_general_dilated, padding="VALID", **{n: parameters[n] for n in names}, **result)
    return call, [tuple(images), shapes[1]]
