"""The static description of a quantization: dtype, granularity and the properties of the scale."""

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
_EIGHT_BITS = (np.dtype(np.int8), np.dtype(np.uint8))
_SCALES = (*dtypes.FLOATS, dtypes.E8M0)


def _read_dtype(dtype: Any) -> Any:
    """Return a codebook unchanged, and anything else as the dtype that it names."""
    return dtype if isinstance(dtype, Codebook) else checks.check_dtype(_NAME, "dtype", dtype, dtypes.QUANTIZED)


def _is_signed(dtype: Any) -> bool:
    """Return whether a dtype is signed. Float dtypes and codebooks are: their range is symmetric."""
    return dtype not in dtypes.INTEGERS or dtypes.find_bounds(dtype)[0] < 0


@dataclasses.dataclass(frozen=True)
class QuantSpec:
    """The static description of a quantization: a dtype, the elements that share a scale, and how to find the scale.

    A spec is frozen and hashable: pass it to a jitted function as a static argument, or close over it. Attributes that
    are left out are filled in from the others, so that specs with the same meaning compare equal.

    Attributes:
        dtype: the dtype of the codes: int2, uint2, int4, uint4, int8, uint8, int16, uint16, a float8 or
            float4_e2m1fn; or a `Codebook` such as `nf4`.
        granularity: which elements share a scale: `PerTensor()`, `PerToken()`, `PerFeature()`, `PerAxis(axis or axes)`
            or `Blocked(axis, size)`. By default `PerTensor()`.
        symmetric: True if the zero point is fixed to 0, or to the middle code of an unsigned dtype (128 of uint8). By
            default True for signed dtypes and False for unsigned ones. Float dtypes and codebooks must be symmetric.
        narrow_range: True to leave the lowest code unused, such as -128 of int8, so that the code of -x is the negated
            code of x. By default True if the spec is symmetric, as in ONNX Runtime and TFLite. int2 then has three
            codes.
        scale_dtype: float32, float16, bfloat16 or float8_e8m0fnu. A scale that the dtype cannot represent is rounded
            up, so that no value in the range saturates. A scale above 65504 is no float16: `quantize` raises an error,
            or makes it infinite if it is traced.
        power_of_two: True to round scales up to powers of two. float8_e8m0fnu represents only these.
        zero_point_granularity: which elements share a zero point. By default those that share a scale.
        reduce_range: True for codes of 7 bits in an int8 or uint8: -64 to 64, or 0 to 127, as with `reduce_range` of
            ONNX Runtime's quantizer. Products of such weights with uint8 activations are exact in ONNX Runtime on every
            processor; with 8 bits their sums saturate on x86-64 without VNNI.

    Raises:
        TypeError: an attribute has a wrong type or names an unsupported dtype.
        ValueError: attributes contradict each other, such as a codebook with symmetric=False.

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
    reduce_range: bool = False

    def __post_init__(self) -> None:
        """Fill in the defaults and check that the attributes do not contradict each other."""
        dtype = _read_dtype(self.dtype)
        is_integer = dtype in dtypes.INTEGERS
        symmetric = _is_signed(dtype) if self.symmetric is None else self.symmetric
        narrow = (is_integer and bool(symmetric)) if self.narrow_range is None else self.narrow_range
        self._check_flags(symmetric, narrow)
        expected = "False, because only codes of 8 bits have a reduced range"
        checks.require(
            not self.reduce_range or dtype in _EIGHT_BITS, _NAME, "reduce_range", expected, f"True with {dtype}"
        )
        checks.require(
            is_integer or symmetric, _NAME, "symmetric", f"True, because {dtype} has no zero point", symmetric
        )
        expected = f"False, because {dtype} has no lowest code to leave out"
        checks.require(is_integer or not narrow, _NAME, "narrow_range", expected, narrow)
        # None is a default only for the zero point.
        for argument in ("granularity", "zero_point_granularity"):
            value = getattr(self, argument)
            is_choice = isinstance(value, Choice) or (value is None and argument != "granularity")
            expected = "PerTensor(), PerToken(), PerFeature(), PerAxis(axis) or Blocked(axis, size)"
            checks.require_type(is_choice, _NAME, argument, expected, checks.describe_value(value))
        scale_dtype = checks.check_dtype(_NAME, "scale_dtype", self.scale_dtype, _SCALES)
        point_granularity = self.granularity if self.zero_point_granularity is None else self.zero_point_granularity
        expected = "None or the granularity of the scale, because a symmetric zero point is the same everywhere"
        is_same = not symmetric or point_granularity == self.granularity
        checks.require(is_same, _NAME, "zero_point_granularity", expected, point_granularity)
        attributes = {
            "dtype": dtype, "symmetric": bool(symmetric), "narrow_range": bool(narrow), "scale_dtype": scale_dtype,
            "power_of_two": bool(self.power_of_two) or scale_dtype == dtypes.E8M0,
            "zero_point_granularity": point_granularity, "reduce_range": bool(self.reduce_range),
        }  # fmt: skip
        # The dataclass is frozen, so its own assignment is refused here too.
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def _check_flags(self, symmetric: Any, narrow: Any) -> None:
        for argument, value in (
            ("symmetric", symmetric),
            ("narrow_range", narrow),
            ("power_of_two", self.power_of_two),
            ("reduce_range", self.reduce_range),
        ):
            checks.check_flag(_NAME, argument, value)

    def __repr__(self) -> str:
        """Return the attributes; the last three only if they differ from their defaults."""
        texts = [
            str(self.dtype),
            repr(self.granularity),
            *(f"{name}={getattr(self, name)}" for name in ("symmetric", "narrow_range", "scale_dtype")),
        ]
        # These are rarely used, so they are printed only if they are set.
        if self.power_of_two:
            texts.append("power_of_two=True")
        if self.zero_point_granularity != self.granularity:
            texts.append(f"zero_point_granularity={self.zero_point_granularity!r}")
        if self.reduce_range:
            texts.append("reduce_range=True")
        return f"{_NAME}({', '.join(texts)})"

    @property
    def carrier(self) -> np.dtype:
        """The dtype of the codes: `dtype`, or the dtype of the indices into the codebook."""
        return codebooks.find_carrier(self.dtype)

    @property
    def codebook(self) -> Codebook | None:
        """The codebook, or None if `dtype` is a dtype."""
        return self.dtype if isinstance(self.dtype, Codebook) else None

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest code of an integer dtype, or the extreme values of a float dtype or a codebook."""
        if self.codebook:
            return self.codebook.levels[0], self.codebook.levels[-1]
        if self.dtype in dtypes.SMALL_FLOATS:
            return -dtypes.find_largest(self.dtype), dtypes.find_largest(self.dtype)
        low, high = dtypes.find_reduced_bounds(self.dtype) if self.reduce_range else dtypes.find_bounds(self.dtype)
        # The reduced range of int8 is symmetric as it is.
        is_shortened = self.narrow_range and low != -high
        return low + int(bool(is_shortened)), high

    @property
    def fixed_zero_point(self) -> int | None:
        """The zero point of a symmetric spec: 0, or the middle code of an unsigned dtype. None if it is asymmetric."""
        if not self.symmetric:
            return None
        if _is_signed(self.dtype):
            return 0
        return 2 ** (dtypes.count_bits(self.dtype) - (2 if self.reduce_range else 1))
