"""How to quantize, as one static value. Knows no arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._core import checks, dtypes
from .._core.granularity import Choice, PerTensor
from . import codebook as codebooks
from .codebook import Codebook

_NAME = "QuantSpec"
_PER_TENSOR = PerTensor()
_SCALES = (*dtypes.FLOATS, dtypes.E8M0)


def _read_dtype(dtype: Any) -> Any:
    """Returns a code book as it came, and anything else as the dtype that it names."""
    return dtype if isinstance(dtype, Codebook) else checks.check_dtype(_NAME, "dtype", dtype, dtypes.QUANTIZED)


@dataclasses.dataclass(frozen=True)
class QuantSpec:
    """What a real number becomes: which codes, which elements share a scale, and how a range becomes a scale.

    It is hashable and static: pass it to a jitted function as a static argument, or close over it. Arguments that
    say nothing of their own are filled in, so that equal specs are equal however they were written.

    Attributes:
        dtype: int2, uint2, int4, uint4, int8, uint8, int16, uint16, a float8, float4_e2m1fn, or a `Codebook` such as
            `nf4`.
        granularity: which elements share a scale: `PerTensor()`, `PerToken()`, `PerFeature()`, `PerAxis(axis or axes)`,
            `Blocked(axis, size)`.
        symmetric: whether the zero point is fixed: 0, or the middle code of an unsigned dtype (128 of uint8). By
            default True for signed dtypes, False for unsigned ones. Floats and code books are always symmetric.
        narrow_range: whether the lowest code is left out, -128 of int8. By default True where symmetric, as ONNX
            Runtime and TFLite have it: -x then has the code of x negated. int2 keeps three codes of its four.
        scale_dtype: float32, float16, bfloat16 or float8_e8m0fnu. A scale that the dtype cannot hold is rounded up,
            so that no value of the range saturates.
        power_of_two: whether a scale is rounded up to a power of two. float8_e8m0fnu holds nothing else.
        zero_point_granularity: which elements share a zero point; by default those that share a scale.

    Raises:
        TypeError: an attribute has a wrong type, or names a dtype that there is not.
        ValueError: attributes contradict each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> jq.QuantSpec(jnp.int8, jq.PerAxis(0))
        QuantSpec(int8, PerAxis(axis=0), symmetric=True, narrow_range=True, scale_dtype=float32)
        >>> jq.QuantSpec(jnp.uint4, jq.Blocked(-1, 32), scale_dtype=jnp.float16)
        QuantSpec(uint4, Blocked(axis=-1, size=32), symmetric=False, narrow_range=False, scale_dtype=float16)
        >>> jq.QuantSpec(jnp.int8) == jq.QuantSpec("int8", symmetric=True)
        True
    """

    dtype: Any
    granularity: Choice = _PER_TENSOR
    _: dataclasses.KW_ONLY
    symmetric: bool | None = None
    narrow_range: bool | None = None
    scale_dtype: Any = jnp.float32
    power_of_two: bool = False
    zero_point_granularity: Choice | None = None

    def __post_init__(self) -> None:
        """Fills in the defaults and refuses contradictions."""
        dtype = _read_dtype(self.dtype)
        is_integer = dtype in dtypes.INTEGERS
        signed = not is_integer or dtypes.find_bounds(dtype)[0] < 0
        symmetric = signed if self.symmetric is None else self.symmetric
        narrow = (is_integer and bool(symmetric)) if self.narrow_range is None else self.narrow_range
        self._flags(symmetric, narrow)
        checks.require(is_integer or symmetric, _NAME, "symmetric", f"True: {dtype} has no zero point", symmetric)
        expected = f"False: {dtype} has no lowest code to leave out"
        checks.require(is_integer or not narrow, _NAME, "narrow_range", expected, narrow)
        for argument in ("granularity", "zero_point_granularity"):
            value = getattr(self, argument)
            known = isinstance(value, Choice) or (value is None and argument != "granularity")
            expected = "PerTensor(), PerToken(), PerFeature(), PerAxis(axis) or Blocked(axis, size)"
            checks.require_type(known, _NAME, argument, expected, checks.describe_value(value))
        scale_dtype = checks.check_dtype(_NAME, "scale_dtype", self.scale_dtype, _SCALES)
        points = self.granularity if self.zero_point_granularity is None else self.zero_point_granularity
        expected = "None, or the granularity of the scale: a symmetric zero point is the same everywhere"
        checks.require(not symmetric or points == self.granularity, _NAME, "zero_point_granularity", expected, points)
        found = {
            "dtype": dtype, "symmetric": bool(symmetric), "narrow_range": bool(narrow), "scale_dtype": scale_dtype,
            "power_of_two": bool(self.power_of_two) or scale_dtype == dtypes.E8M0, "zero_point_granularity": points,
        }  # fmt: skip
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def _flags(self, symmetric: Any, narrow: Any) -> None:
        for argument, value in (
            ("symmetric", symmetric),
            ("narrow_range", narrow),
            ("power_of_two", self.power_of_two),
        ):
            checks.check_flag(_NAME, argument, value)

    def __repr__(self) -> str:
        """Returns what was chosen, and of the rarer choices only those that were made."""
        parts = [
            str(self.dtype),
            repr(self.granularity),
            *(f"{name}={getattr(self, name)}" for name in ("symmetric", "narrow_range", "scale_dtype")),
        ]
        if self.power_of_two:
            parts.append("power_of_two=True")
        if self.zero_point_granularity != self.granularity:
            parts.append(f"zero_point_granularity={self.zero_point_granularity!r}")
        return f"{_NAME}({', '.join(parts)})"

    @property
    def carrier(self) -> np.dtype:
        """The dtype of the codes: `dtype`, or that of a code book's indices."""
        return codebooks.find_carrier(self.dtype)

    @property
    def codebook(self) -> Codebook | None:
        """The code book, or None where `dtype` is a dtype."""
        return self.dtype if isinstance(self.dtype, Codebook) else None

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest number of steps: codes of an integer dtype, entries of a code book."""
        if self.codebook:
            return self.codebook.levels[0], self.codebook.levels[-1]
        if self.dtype in dtypes.SMALL_FLOATS:
            return -dtypes.find_largest(self.dtype), dtypes.find_largest(self.dtype)
        low, high = dtypes.find_bounds(self.dtype)
        return low + int(bool(self.narrow_range)), high

    @property
    def fixed_zero_point(self) -> int | None:
        """The zero point of a symmetric spec: 0, or the middle code of an unsigned dtype. None where it is found."""
        if not self.symmetric:
            return None
        is_unsigned = self.dtype in dtypes.INTEGERS and dtypes.find_bounds(self.dtype)[0] == 0
        return 2 ** (dtypes.count_bits(self.dtype) - 1) if is_unsigned else 0
