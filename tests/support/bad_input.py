"""Checks of the error for a row of invalid input: eagerly, without chex, under jit and under vmap."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import numpy as np
import pytest

import jaxquant as jq

# name, operator, arrays, exception, argument, expected, got; the last two are patterns
Row = tuple[str, Callable[..., Any], tuple[Any, ...], type[Exception], str, str, str]


def function_name(op: Any) -> str:
    """Return the operator's name as its errors contain it."""
    function = op.func if isinstance(op, functools.partial) else op
    name, module = function.__name__, function.__module__.split(".")[1]
    if module in ("onednn", "integer"):
        return f"{module}.{name}"
    return f"ops.{name}" if name in jq.ops.__all__ and name not in jq.__all__ else name


def ids(rows: list[Row]) -> list[str]:
    """Return the ids of the rows for pytest."""
    return [f"{function_name(row[1])}-{row[0]}".replace(" ", "_") for row in rows]


def traceable(rows: list[Row]) -> list[Row]:
    """Return the rows whose arrays jit and vmap accept unchanged. They convert 64-bit arrays before any check."""

    def passes(value: Any) -> bool:
        if not isinstance(value, np.ndarray | np.generic):
            return value is None
        return value.dtype.kind not in "OSU" and (value.dtype.itemsize < 8 or value.dtype.kind == "c")

    return [row for row in rows if all(map(passes, row[2]))]


def refused(row: Row, call: Callable[..., Any], *arrays: Any) -> None:
    """Check that the call raises the row's exception with the row's text."""
    text = rf"jaxquant\.{function_name(row[1])}: (the dtype of )?{row[4]}: expected .*{row[5]}.*, got .*{row[6]}"
    with pytest.raises(row[3], match=text) as raised:
        call(*arrays)
    assert isinstance(raised.value, AssertionError), "code that expects chex's errors catches AssertionError"


def refused_eagerly(row: Row) -> None:
    """Check the error of an eager call."""
    refused(row, row[1], *row[2])


def refused_without_chex(row: Row) -> None:
    """Check the error with chex's assertions disabled."""
    chex.disable_asserts()
    try:
        refused_eagerly(row)
    finally:
        chex.enable_asserts()


def refused_while_tracing(row: Row) -> None:
    """Check the error under jit and under vmap, where it is raised before anything is computed."""
    _, op, arrays, *_ = row
    if "the only zero point" in row[5]:
        pytest.skip("the value of a traced zero point is unknown, as the docstring says")
    refused(row, functools.partial(jax.eval_shape, jax.jit(lambda *a: op(*a))), *arrays)
    stacked = [a if a is None else np.stack([a, a]) for a in arrays]
    refused(row, functools.partial(jax.eval_shape, jax.vmap(lambda *a: op(*a), axis_size=2)), *stacked)
