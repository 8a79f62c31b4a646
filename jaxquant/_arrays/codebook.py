"""Codes that stand for the entries of a table: nf4, and tables of one's own. Knows nothing of scales."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from .._core import checks

_CARRIERS = {4: np.dtype(jnp.uint2), 16: np.dtype(jnp.uint4), 256: np.dtype(jnp.uint8)}


@dataclasses.dataclass(frozen=True)
class Codebook:
    """A table of values in ascending order; a code is an index into it.

    A value takes the nearest entry; half way between two the lower one. NaN takes the first.

    Attributes:
        name: what it is called where it is printed.
        levels: 4, 16 or 256 numbers, exact in float32: their codes are uint2, uint4 or uint8.
    """

    name: str
    levels: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuses a table that is not ascending or has no dtype for its codes."""
        checks.require_type(isinstance(self.name, str), "Codebook", "name", "a string", repr(self.name))
        is_array = isinstance(self.levels, np.ndarray) and self.levels.ndim == 1
        is_sequence = is_array or isinstance(self.levels, list | tuple)
        expected = "a sequence of numbers"
        checks.require_type(is_sequence, "Codebook", "levels", expected, checks.describe_value(self.levels))
        for level in self.levels:
            checks.check_real("Codebook", "levels", level)
        levels = tuple(float(np.float32(level)) for level in self.levels)
        checks.require(len(levels) in _CARRIERS, "Codebook", "levels", "4, 16 or 256 numbers", len(levels))
        ascending = all(a < b for a, b in itertools.pairwise(levels))
        checks.require(ascending, "Codebook", "levels", "ascending numbers", self.levels)
        object.__setattr__(self, "levels", levels)

    def __repr__(self) -> str:
        """Returns the name; a table of 256 numbers helps no reader."""
        return self.name

    @property
    def carrier(self) -> np.dtype:
        """The dtype of its codes."""
        return _CARRIERS[len(self.levels)]

    @property
    def largest(self) -> float:
        """The largest magnitude in the table."""
        return max(abs(level) for level in self.levels)

    def encode(self, value: jax.Array) -> jax.Array:
        """Returns the codes of float32 values."""
        code = jnp.zeros(value.shape, jnp.int32)
        for low, high in itertools.pairwise(self.levels):
            middle = np.float32((low + high) / 2)
            if float(middle) > (low + high) / 2:  # half way counts as below, exactly
                middle = np.nextafter(middle, np.float32(-np.inf))
            code = code + (value > middle).astype(jnp.int32)
        return code.astype(self.carrier)

    def decode(self, codes: jax.Array) -> jax.Array:
        """Returns the float32 entries of codes."""
        index = codes.astype(jnp.int32)
        if len(self.levels) > 16:
            return jnp.asarray(np.asarray(self.levels, np.float32))[index]
        # A tree of choices, bit by bit from the lowest: XLA:CPU vectorises it, and a lookup it does not.
        entries: list[jax.Array | np.float32] = [np.float32(level) for level in self.levels]
        for bit in range(int(math.log2(len(self.levels)))):
            chosen = (index >> bit) & 1 == 1
            entries = [jnp.where(chosen, high, low) for low, high in zip(entries[::2], entries[1::2], strict=True)]
        return jnp.asarray(entries[0])


Format = np.dtype | Codebook

nf4 = Codebook(
    "nf4",
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
)
"""4-bit NormalFloat: Dettmers et al., arXiv 2305.14314, appendix E."""


def find_carrier(of: Format) -> np.dtype:
    """Returns the dtype that carries the codes of a format."""
    return of.carrier if isinstance(of, Codebook) else of
