"""The static description of a quantization: `QuantSpec`, and the codebooks that it may name in place of a dtype."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import checks, dtypes, sharding
from .._core.dtypes import NarrowInteger
from .._core.granularity import Choice, PerTensor
from .._kernels.affine import encode_order

# Codebooks: codes are indices into a table of levels, such as nf4 or one that a user defines.


# With these lengths every code of the dtype has an entry.
_CARRIERS = {4: np.dtype(jnp.uint2), 16: np.dtype(jnp.uint4), 256: np.dtype(jnp.uint8)}
_COMPARED = 16  # up to this length a comparison with each midpoint is faster than two lookups
_MOST_BUCKETS = 2**16


@dataclasses.dataclass(frozen=True)
class Codebook:
    """A table of values in ascending order; the codes of a quantized array are indices into it.

    A value is rounded to the nearest entry, and to the lower one if it is halfway between two. NaN becomes the first
    entry.

    Attributes:
        name: the name that `repr` prints for an array or a spec with this codebook.
        levels: 4, 16 or 256 numbers in ascending order; their codes are uint2, uint4 or uint8, respectively. They are
            rounded to float32.

    Raises:
        TypeError: `name` is not a string, or `levels` is not a sequence of numbers.
        ValueError: there are not 4, 16 or 256 levels, or they are not finite or not ascending in float32.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> ternary = jq.Codebook("ternary", (-1.0, 0.0, 0.5, 1.0))
        >>> q = jq.quantize(jnp.array([-2.0, 0.5, 0.6, 9.0]), jq.QuantSpec(ternary), range=(-2.0, 2.0))  # 0.5 is a tie
        >>> q.codes, q.dequantize()
        (Array([0, 1, 2, 3], dtype=uint2), Array([-2.,  0.,  1.,  2.], dtype=float32))
    """

    name: str
    levels: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the levels and round them to float32."""
        checks.require_type(isinstance(self.name, str), "Codebook", "name", "a string", repr(self.name))
        is_array = isinstance(self.levels, np.ndarray) and self.levels.ndim == 1
        is_sequence = is_array or isinstance(self.levels, list | tuple)
        expected = "a sequence of numbers"
        checks.require_type(is_sequence, "Codebook", "levels", expected, checks.describe_value(self.levels))
        for level in self.levels:
            checks.check_real("Codebook", "levels", level)
        # Round first: two levels that differ only in float64 are not ascending in float32.
        levels = tuple(float(np.float32(level)) for level in self.levels)
        checks.require(len(levels) in _CARRIERS, "Codebook", "levels", "4, 16 or 256 numbers", len(levels))
        is_ascending = all(a < b for a, b in itertools.pairwise(levels))
        checks.require(is_ascending, "Codebook", "levels", "ascending numbers", self.levels)
        object.__setattr__(self, "levels", levels)

    def __repr__(self) -> str:
        """Return the name, because a table may have 256 numbers."""
        return self.name

    @property
    def carrier(self) -> np.dtype:
        """The dtype of the codes."""
        return _CARRIERS[len(self.levels)]

    @property
    def largest(self) -> float:
        """The largest magnitude of the levels."""
        return max(abs(level) for level in self.levels)

    def encode(self, value: jax.Array) -> jax.Array:
        """Return the code of the nearest level for each float32 value."""
        buckets = _build_buckets(self.levels) if len(self.levels) > _COMPARED else None
        if buckets is not None:
            return _encode_by_lookup(value, buckets).astype(self.carrier)
        # A code is the number of midpoints below the value.
        code = jnp.zeros(value.shape, jnp.int32)
        for middle in _compute_midpoints(self.levels):
            code = code + (value > middle).astype(jnp.int32)
        return code.astype(self.carrier)

    def decode(self, codes: jax.Array, first_bit: int | jax.Array = 0) -> jax.Array:
        """Return the float32 level of each code.

        Args:
            codes: integers of any dtype.
            first_bit: the position of a code's lowest bit, an int, or an int32 array of the shape of `codes`, which are
                then uint32. Only codes of up to 4 bits may have other bits beside them.
        """
        if len(self.levels) > 16:
            return _look_up(np.asarray(self.levels, np.float32), codes)
        # XLA:CPU vectorizes a tree of selections by one bit of the code after another, but not a table lookup.
        is_fixed = isinstance(first_bit, int)
        index = codes.astype(jnp.uint8 if is_fixed else jnp.int32)
        entries: list[jax.Array | np.float32] = [np.float32(level) for level in self.levels]
        for bit in range(int(math.log2(len(self.levels)))):
            mask: Any = np.uint8(1 << (first_bit + bit)) if is_fixed else lax.shift_left(np.int32(1), first_bit + bit)
            is_set = (index & mask) != 0
            entries = [jnp.where(is_set, high, low) for low, high in zip(entries[::2], entries[1::2], strict=True)]
        return jnp.asarray(entries[0])


def _compute_midpoints(levels: tuple[float, ...]) -> list[np.float32]:
    """Return the largest float32 numbers that are as near to each level, or nearer, as to the next one."""
    midpoints = []
    for low, high in itertools.pairwise(levels):
        middle = np.float32((low + high) / 2)
        # If float32 rounds the midpoint up, the result is already nearer to `high`: compare with the float below.
        if float(middle) > (low + high) / 2:
            middle = np.nextafter(middle, np.float32(-np.inf))
        midpoints.append(middle)
    return midpoints


class _Buckets(NamedTuple):
    """A table from the first bits of a float to its code, give or take the one midpoint with the same first bits.

    Attributes:
        shift: how many of the last bits the floats of a bucket may differ in.
        start: the first bits, as an order key, of the first bucket.
        codes: for each bucket, the number of midpoints in the buckets before it, uint8.
        midpoints: the order keys of the midpoints, and one more that is above all numbers.
    """

    shift: int
    start: int
    codes: np.ndarray
    midpoints: np.ndarray


@functools.lru_cache(maxsize=64)
def _build_buckets(levels: tuple[float, ...]) -> _Buckets | None:
    """Return the buckets of a codebook of 256 levels, or None if two midpoints are too close for a small table."""
    middle = np.asarray(_compute_midpoints(levels), np.float32)
    middle[np.abs(middle) < np.finfo(np.float32).tiny] = 0  # as the values are flushed
    bits = middle.view(np.int32)
    keys = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits).astype(np.int64)
    if (np.diff(keys) <= 0).any():  # subnormal levels
        return None
    for shift in range(23, 7, -1):
        first = keys >> shift
        if (np.diff(first) > 0).all():
            start, count = int(first[0]), int(first[-1] - first[0]) + 2
            if count > _MOST_BUCKETS:
                return None
            codes = np.searchsorted(first, np.arange(start, start + count)).astype(np.uint8)
            return _Buckets(shift, start, codes, np.append(keys, 2**31 - 1).astype(np.int32))
    return None


def _encode_by_lookup(value: jax.Array, buckets: _Buckets) -> jax.Array:
    """Return the number of midpoints below each float32 value, int32; 0 for NaN."""
    # Subnormal numbers count as 0, as they do in comparisons of floats on XLA:CPU.
    value = jnp.where(jnp.abs(value) < np.finfo(np.float32).tiny, np.float32(0), value)
    key = encode_order(value)
    bucket = lax.shift_right_arithmetic(key, np.int32(buckets.shift)) - np.int32(buckets.start)
    bucket = jnp.clip(bucket, 0, len(buckets.codes) - 1)
    code = _look_up(buckets.codes, bucket.astype(jnp.uint32))
    code = code.astype(jnp.int32) + (key > _look_up(buckets.midpoints, code)).astype(jnp.int32)
    return jnp.where(jnp.isnan(value), 0, code)


def _look_up(table: np.ndarray, index: jax.Array) -> jax.Array:
    """Return the entries of a table at unsigned indices, which are in its bounds."""
    options: dict[str, Any] = {"out_sharding": jax.typeof(index).sharding} if sharding.is_placed(index) else {}
    return jnp.asarray(table).at[index].get(mode="promise_in_bounds", **options)


Format = np.dtype | NarrowInteger | Codebook

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


def read_carrier(dtype: Format) -> np.dtype:
    """Return the dtype of the codes: a dtype itself, or the one of narrow integers or of a codebook's indices."""
    return dtype.carrier if isinstance(dtype, Codebook | NarrowInteger) else dtype


def read_format(
    function: str, argument: str, value: object, allowed: Sequence[np.dtype | NarrowInteger]
) -> np.dtype | NarrowInteger:
    """Return the dtype or the narrow integer that a value names; raise TypeError unless it is one of the allowed."""
    narrow = dtypes.NARROW_BY_NAME.get(value) if isinstance(value, str) else value
    if isinstance(narrow, NarrowInteger) and narrow in allowed:
        return narrow
    known = [dtype for dtype in allowed if isinstance(dtype, np.dtype)]
    expected = f"dtype {dtypes.list_names(tuple(allowed))}"
    return checks.check_dtype(function, argument, value, known, expected=expected)


# The dtype or the codebook, the granularity and the properties of the scale.


_SPEC = "QuantSpec"
_PER_TENSOR = PerTensor()
_EIGHT_BITS = (np.dtype(np.int8), np.dtype(np.uint8))
_SCALES = (*dtypes.FLOATS, dtypes.E8M0)


def _read_dtype(dtype: object) -> Any:
    """Return a codebook unchanged, and anything else as the dtype or the narrow integer that it names."""
    if isinstance(dtype, Codebook):
        return dtype
    return read_format(_SPEC, "dtype", dtype, (*dtypes.QUANTIZED, *dtypes.NARROW))


def _is_signed(dtype: Format) -> bool:
    """Return whether a dtype is signed. Float dtypes and codebooks are: their range is symmetric."""
    return isinstance(dtype, Codebook) or dtype in dtypes.SMALL_FLOATS or dtypes.read_bounds(dtype)[0] < 0


@dataclasses.dataclass(frozen=True)
class QuantSpec:
    """The static description of a quantization: a dtype, the elements that share a scale, and how to find the scale.

    A spec is frozen and hashable: pass it to a jitted function as a static argument, or close over it. Attributes that
    are left out are filled in from the others, so that specs with the same meaning compare equal.

    Attributes:
        dtype: the dtype of the codes: int2, uint2, int4, uint4, int8, uint8, int16, uint16, a float8 or
            float4_e2m1fn; the name of a narrow integer: "int3", "uint3", "int5", "uint5", "int6" or "uint6"; or a
            `Codebook` such as `nf4`.
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
        offset: True for a real offset in place of a zero point: x = codes * scale + offset. The dtype is unsigned. The
            offset has the granularity and the dtype of the scale (float32 for float8_e8m0fnu).
        scale_spec: how the scales, and the offsets, are quantized themselves, or None. Its granularity counts the
            dimensions of the scale: `Blocked(-1, 8)` are eight blocks of x. The codes are computed with the scales that
            result. Its dtype is one of integers or small floats. Unsigned integers hold the offsets negated, so that a
            range then includes 0 or what is below it. The other attributes of the scale are those of `scale_spec`.

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
    offset: bool = False
    scale_spec: QuantSpec | None = None

    def __post_init__(self) -> None:
        """Fill in the defaults and check that the attributes do not contradict each other."""
        dtype = _read_dtype(self.dtype)
        is_integer = dtypes.is_integer(dtype)
        symmetric = _is_signed(dtype) if self.symmetric is None else self.symmetric
        narrow = (is_integer and bool(symmetric)) if self.narrow_range is None else self.narrow_range
        self._check_flags(symmetric, narrow)
        expected = "False, because only codes of 8 bits have a reduced range"
        checks.require(
            not self.reduce_range or dtype in _EIGHT_BITS, _SPEC, "reduce_range", expected, f"True with {dtype}"
        )
        checks.require(
            is_integer or symmetric, _SPEC, "symmetric", f"True, because {dtype} has no zero point", symmetric
        )
        expected = f"False, because {dtype} has no lowest code to leave out"
        checks.require(is_integer or not narrow, _SPEC, "narrow_range", expected, narrow)
        # None is a default only for the zero point.
        for argument in ("granularity", "zero_point_granularity"):
            value = getattr(self, argument)
            is_choice = isinstance(value, Choice) or (value is None and argument != "granularity")
            expected = "PerTensor(), PerToken(), PerFeature(), PerAxis(axis) or Blocked(axis, size)"
            checks.require_type(is_choice, _SPEC, argument, expected, checks.describe_value(value))
        scale_dtype = checks.check_dtype(_SPEC, "scale_dtype", self.scale_dtype, _SCALES)
        point_granularity = self.granularity if self.zero_point_granularity is None else self.zero_point_granularity
        expected = "None or the granularity of the scale, because a symmetric zero point is the same everywhere"
        is_same = not symmetric or point_granularity == self.granularity
        checks.require(is_same, _SPEC, "zero_point_granularity", expected, point_granularity)
        attributes = {
            "dtype": dtype, "symmetric": bool(symmetric), "narrow_range": bool(narrow), "scale_dtype": scale_dtype,
            "power_of_two": bool(self.power_of_two) or scale_dtype == dtypes.E8M0,
            "zero_point_granularity": point_granularity, "reduce_range": bool(self.reduce_range),
        }  # fmt: skip
        # The dataclass is frozen, so its own assignment is refused here too.
        for name, value in attributes.items():
            object.__setattr__(self, name, value)
        if self.offset:
            self._check_offset()
        if self.scale_spec is not None:
            self._check_scale_spec()

    def _check_offset(self) -> None:
        is_unsigned = self.codebook is None and not _is_signed(self.dtype)
        expected = f"False, because only unsigned integers have an offset, and not {self.dtype}"
        checks.require(is_unsigned, _SPEC, "offset", expected, True)
        reason = "because an offset takes the place of the zero point"
        checks.require(not self.symmetric, _SPEC, "symmetric", f"False, {reason}", True)
        expected = f"None or the granularity of the scale, {reason}"
        is_same = self.zero_point_granularity == self.granularity
        checks.require(is_same, _SPEC, "zero_point_granularity", expected, self.zero_point_granularity)
        for name in ("narrow_range", "reduce_range"):
            checks.require(not getattr(self, name), _SPEC, name, "False, because offset=True uses all codes", True)

    def _check_scale_spec(self) -> None:
        name, inner = "scale_spec", self.scale_spec
        checks.require_type(
            isinstance(inner, QuantSpec), _SPEC, name, "a QuantSpec or None", checks.describe_value(inner)
        )
        assert inner is not None
        checks.require(inner.scale_spec is None, _SPEC, name, "a spec without a scale_spec: there is one level", inner)
        checks.require(not inner.offset, _SPEC, name, "a spec without an offset, so that scales stay positive", inner)
        checks.require(inner.codebook is None, _SPEC, name, "a spec of integers or small floats", inner)
        is_centered = inner.fixed_zero_point == 0 or (inner.bounds[0] == 0 and not inner.symmetric)
        checks.require(is_centered, _SPEC, name, "a symmetric spec of signed codes, or unsigned codes", inner)
        has_fixed = self.offset or self.fixed_zero_point is not None
        expected = "None, because the zero point depends on the scale (offset=True, or symmetric=True)"
        checks.require(has_fixed, _SPEC, name, expected, inner)
        is_default = self.scale_dtype == dtypes.FLOAT32 and not self.power_of_two
        expected = "float32 without power_of_two, because the scales are rounded to scale_spec"
        checks.require(is_default, _SPEC, "scale_dtype", expected, self.scale_dtype)

    def _check_flags(self, symmetric: object, narrow: object) -> None:
        for argument, value in (
            ("symmetric", symmetric),
            ("narrow_range", narrow),
            ("power_of_two", self.power_of_two),
            ("reduce_range", self.reduce_range),
            ("offset", self.offset),
        ):
            checks.check_flag(_SPEC, argument, value)

    def __repr__(self) -> str:
        """Return the attributes; the last ones only if they differ from their defaults."""
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
        if self.offset:
            texts.append("offset=True")
        if self.scale_spec is not None:
            texts.append(f"scale_spec={self.scale_spec!r}")
        return f"{_SPEC}({', '.join(texts)})"

    @property
    def carrier(self) -> np.dtype:
        """The dtype of the codes: `dtype`, int8 or uint8 for narrow integers, or the dtype of a codebook's indices."""
        return read_carrier(self.dtype)

    @property
    def codebook(self) -> Codebook | None:
        """The codebook, or None if `dtype` is not one."""
        return self.dtype if isinstance(self.dtype, Codebook) else None

    @property
    def bits(self) -> int:
        """The number of bits of a code, with `reduce_range` the number that is used."""
        stored = self.dtype if isinstance(self.dtype, NarrowInteger) else self.carrier
        return dtypes.count_packed_bits(stored) - int(self.reduce_range)

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest code of an integer dtype, or the extreme values of a float dtype or a codebook."""
        if self.codebook:
            return self.codebook.levels[0], self.codebook.levels[-1]
        if self.dtype in dtypes.SMALL_FLOATS:
            return -dtypes.read_largest(self.dtype), dtypes.read_largest(self.dtype)
        low, high = dtypes.derive_reduced_bounds(self.dtype) if self.reduce_range else dtypes.read_bounds(self.dtype)
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
        return 2 ** (self.bits - 1)
