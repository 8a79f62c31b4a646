"""The contestants of a row of a table, their expected result, and the count of mismatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

JAXQUANT = "jaxquant"
ONNX_RUNTIME = "ONNX Runtime"
PLAIN = "plain JAX"
FLOAT32 = "float32 JAX"
BFLOAT16 = "JAX bfloat16"
QWIX = "qwix"

Call = Callable[[], Any]
_BELOW_A_BYTE = ("int2", "uint2", "int4", "uint4")


@dataclass(frozen=True)
class Missing:
    """A placeholder for an opponent, with the reason for its absence."""

    reason: str


def _whole(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Contest:
    """The contestants of one row. A call takes no argument and returns its result, which may still be queued.

    Attributes:
        jaxquant: the call to measure.
        opponents: the other calls, by the name of their column.
        expected: returns the correct result; called once and not timed. Sums of products of integers are exact ones,
            not ONNX Runtime's results, which saturate on some processors.
        bytes_read: the size of jaxquant's inputs, from which the bandwidth is computed.
        unlike: the opponents whose results differ by design and are not compared.
        compared: selects the part of a contestant's result that `expected` returns.
        multiply_adds: the number of multiply-adds, from which the operations per second of a contraction are computed.
        judges_runtime: whether ONNX Runtime's result is compared, too; otherwise it is the expected result, or no
            result is.
    """

    jaxquant: Call
    opponents: Mapping[str, Call | Missing]
    expected: Call | Missing
    bytes_read: int
    unlike: frozenset[str] = frozenset()
    compared: Callable[[Any], Any] = _whole
    multiply_adds: int = 0
    judges_runtime: bool = False


@dataclass(frozen=True)
class Row:
    """One row of a table. `build` creates the inputs and sessions, so that only one row at a time uses memory.

    Attributes:
        name: the operation.
        shape: its size.
        build: returns the contest.
        compile_time: whether the first call is timed too.
    """

    name: str
    shape: tuple[int, ...]
    build: Callable[[], Contest]
    compile_time: bool = False


@dataclass(frozen=True)
class Table:
    """A table: rows with the same opponents.

    Attributes:
        title: the heading of the table.
        opponents: the columns, in order.
        rows: the rows.
        off_cpu: additional first columns on an accelerator.
        throughput: the unit of jaxquant's throughput on an accelerator, "GB/s" or "TOP/s".
    """

    title: str
    opponents: tuple[str, ...]
    rows: Sequence[Row]
    off_cpu: tuple[str, ...] = ()
    throughput: str = "GB/s"


def mismatches(result: Any, expected: Any) -> int:
    """Return the number of elements that differ in any bit between two results of the same structure."""
    left, right = jax.tree.leaves(result), jax.tree.leaves(expected)
    if len(left) != len(right):
        raise ValueError(f"{len(left)} outputs against {len(right)}")
    return sum(_differing(np.asarray(a), np.asarray(b)) for a, b in zip(left, right, strict=True))


def _differing(result: np.ndarray, expected: np.ndarray) -> int:
    result, expected = _bits(result), _bits(expected)
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return max(result.size, expected.size, 1)
    return int(np.count_nonzero(result != expected))


def _bits(values: np.ndarray) -> np.ndarray:
    # Compare floats as bit patterns: with ==, -0 would equal 0, and NaN would not equal itself.
    if jnp.issubdtype(values.dtype, jnp.floating):
        return values.view(f"u{values.dtype.itemsize}")
    # Dtypes narrower than a byte become numpy's from JAX, and int8 from ONNX Runtime.
    return values.astype(np.int8) if values.dtype.name in _BELOW_A_BYTE else values
