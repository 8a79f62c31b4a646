"""What a row of the table is: who takes part, what they must agree on, and how disagreement is counted."""

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
    """Stands where an opponent would be, and says why there is none."""

    reason: str


def _whole(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Contest:
    """The contestants of one row. Every call takes no argument and returns its result, finished or still queued.

    Attributes:
        jaxquant: what is measured.
        opponents: by the name of their column.
        expected: gives the right answer; called once, never timed.
        bytes_read: the size of jaxquant's inputs, for the bandwidth.
        unlike: opponents whose answer is another one by design, so that comparing it means nothing.
        compared: picks from a contestant's result what `expected` returns.
        multiply_adds: how many the work takes, for the operations per second of a contraction.
    """

    jaxquant: Call
    opponents: Mapping[str, Call | Missing]
    expected: Call | Missing
    bytes_read: int
    unlike: frozenset[str] = frozenset()
    compared: Callable[[Any], Any] = _whole
    multiply_adds: int = 0


@dataclass(frozen=True)
class Row:
    """One line of a table. Inputs and sessions come to life in `build`, so that only one row holds memory.

    Attributes:
        name: the operation.
        shape: what its size is made of.
        build: makes the contest.
        compile_time: whether the first call is timed too.
    """

    name: str
    shape: tuple[int, ...]
    build: Callable[[], Contest]
    compile_time: bool = False


@dataclass(frozen=True)
class Table:
    """Rows that share their opponents.

    Attributes:
        title: what stands above the table.
        opponents: the columns, in order.
        rows: the lines.
        off_cpu: the columns that come first where an accelerator is measured.
        throughput: what is shown of jaxquant there, "GB/s" or "TOP/s".
    """

    title: str
    opponents: tuple[str, ...]
    rows: Sequence[Row]
    off_cpu: tuple[str, ...] = ()
    throughput: str = "GB/s"


def mismatches(result: Any, expected: Any) -> int:
    """Returns how many elements of two equally built results differ in any bit."""
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
    # Floats as their bit patterns: == would let -0 pass for 0 and never let NaN pass for itself.
    if jnp.issubdtype(values.dtype, jnp.floating):
        return values.view(f"u{values.dtype.itemsize}")
    # What is narrower than a byte reaches numpy unpacked from JAX, and widened from ONNX Runtime.
    return values.astype(np.int8) if values.dtype.name in _BELOW_A_BYTE else values
