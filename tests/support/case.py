"""One row of the full check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from . import transforms

BATCH = 4

Arrays = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: an operator with its static arguments, a function that samples its inputs, and the expected result.

    `by_default` are the transforms under which the first case of an operator runs by default; None means all.
    """

    operator: str
    dtype: str
    variant: str
    oracle: str
    op: Callable[..., Any]
    draw: Callable[[np.random.Generator], Arrays]
    want: Callable[..., Any]
    transforms: tuple[str, ...] = tuple(transforms.ALL)
    by_default: tuple[str, ...] | None = None

    @property
    def id(self) -> str:
        """The id of the case for pytest."""
        return "-".join((self.operator, self.dtype, self.variant, self.oracle)).replace(" ", "_")
