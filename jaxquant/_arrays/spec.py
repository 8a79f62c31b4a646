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
from . import scale_rules
from .scale_rules import ScaleRule, Ties

# Codebooks: codes are indices into a table of levels, such as nf4 or one that a user defines.


# With these lengths every code of the dtype has an entry, except of 8: there the fourth bit of a code is ignored.
_CARRIERS = {4: np.dtype(jnp.uint2), 8: np.dtype(jnp.uint4), 16: np.dtype(jnp.uint4), 256: np.dtype(jnp.uint8)}
_COMPARED = 16  # up to this length a comparison with each midpoint is faster than two lookups
_MOST_BUCKETS = 2**16


@dataclasses.dataclass(frozen=True, eq=False)
class Codebook:
    """A table of values; the codes of a quantized array are indices into it.

    The values may be in any order, as in the fp4 of bitsandbytes, and may occur more than once. A value is rounded to
    the nearest level, and to the lower one if it is halfway between two. Of codes with the same level the first is
    used; 0.0 and -0.0 count as the same level. NaN becomes the lowest level.

    Decoding keeps the sign of -0.0. Two codebooks are equal if their names and the bits of their levels are.

    Attributes:
        name: the name that `repr` prints for an array or a spec with this codebook.
        levels: 4, 8, 16 or 256 numbers, not all equal; their codes are uint2, uint4, uint4 or uint8,
            respectively. They are rounded to float32. Of the codes of 8 levels only the last three bits count.

    Raises:
        TypeError: `name` is not a string, or `levels` is not a sequence of numbers.
        ValueError: there are not 4, 8, 16 or 256 levels, they are not finite in float32, or all are equal.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> ternary = jq.Codebook("ternary", (-1.0, 0.0, 0.5, 1.0))
        >>> q = jq.quantize(jnp.array([-2.0, 0.5, 0.6, 9.0]), jq.QuantSpec(ternary), range=(-2.0, 2.0))  # 0.5 is a tie
        >>> q.codes, q.dequantize()
        (Array([0, 1, 2, 3], dtype=uint2), Array([-2.,  0.,  1.,  2.], dtype=float32))
        >>> signed = jq.Codebook("sign and magnitude", (0.0, 1.0, -0.0, -1.0))
        >>> jq.quantize(jnp.array([-1.0, -0.5, 0.0, 0.5]), jq.QuantSpec(signed)).codes  # both halves are ties
        Array([3, 3, 0, 0], dtype=uint2)
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
        # Round first: two levels that differ only in float64 are the same in float32.
        levels = tuple(float(np.float32(level)) for level in self.levels)
        checks.require(len(levels) in _CARRIERS, "Codebook", "levels", "4, 8, 16 or 256 numbers", len(levels))
        checks.require(len(set(levels)) > 1, "Codebook", "levels", "at least two different numbers", self.levels)
        object.__setattr__(self, "levels", levels)

    def __repr__(self) -> str:
        """Return the name, because a table may have 256 numbers."""
        return self.name

    def __eq__(self, other: object) -> bool:
        """Return whether the names and the bits of the levels are equal."""
        # A comparison of floats would take -0.0 for 0.0, and JAX would then reuse a program of the other table.
        if not isinstance(other, Codebook):
            return NotImplemented
        return self.name == other.name and self.levels == other.levels and self._signs == other._signs

    def __hash__(self) -> int:
        """Return a hash of the name and the levels."""
        return hash((self.name, self.levels))

    @functools.cached_property
    def _signs(self) -> tuple[bool, ...]:
        return tuple(math.copysign(1, level) < 0 for level in self.levels)

    @functools.cached_property
    def ascending(self) -> tuple[float, ...]:
        """The different levels in ascending order."""
        return tuple(sorted(set(self.levels)))

    @functools.cached_property
    def is_ascending(self) -> bool:
        """Whether each level is larger than the one before it, so that codes are ordered as their levels are."""
        return self.levels == self.ascending

    @functools.cached_property
    def _first_codes(self) -> tuple[int, ...]:
        """The first code of each level of `ascending`."""
        return tuple(self.levels.index(level) for level in self.ascending)

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
        levels, codes = self.ascending, self._first_codes
        buckets = _build_buckets(levels) if len(levels) > _COMPARED else None
        if buckets is not None:
            rank = _encode_by_lookup(value, buckets)
            return (rank if self.is_ascending else _look_up(np.asarray(codes, np.uint8), rank)).astype(self.carrier)
        # The rank of a level is the number of midpoints below the value. A step from one level to the next one changes
        # the code by 1 if the levels are in order.
        code = jnp.full(value.shape, codes[0], jnp.int32)
        for middle, (low, high) in zip(_compute_midpoints(levels), itertools.pairwise(codes), strict=True):
            is_above = (value > middle).astype(jnp.int32)
            code = code + (is_above if high - low == 1 else is_above * np.int32(high - low))
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
        scale_rule: how such a power is chosen, which implies power_of_two. amax is the largest magnitude of a range,
            `largest` the largest code, and emax = floor(log2(largest)):

            - "rceil": 2**ceil(log2(amax / largest)), so that nothing saturates (torchao's `RCEIL`, ModelOpt,
              MLX). It is the default of such scales, and stored as None;
            - "floor": 2**(floor(log2(amax)) - emax), the rule of the OCP MX specification (torchao's `FLOOR`, GGUF);
            - "ceil": 2**(ceil(log2(amax)) - emax) (torchao's `CEIL`);
            - "even": as "floor", after amax was rounded to the digits of the codes, half up (torchao's `EVEN`);
            - "nearest": 2**round(log2(amax / largest)) (early versions of MLX);
            - "compressed_tensors": as "even", but always with the digits of float4_e2m1fn (compressed-tensors).

            The other rules need a float8 or float4 dtype, or a symmetric signed integer dtype with narrow_range.
            For float8 and float4 codes with float8 scales in `scale_spec` it says in which order the two scales are
            divided and rounded: "modelopt", the default, or "compressed_tensors".
        ties: what a value halfway between two codes becomes: "even", the code with an even last digit; or
            "toward_zero", the code of the smaller magnitude, as ModelOpt, GGUF and MLX on a CPU round MXFP4. Only
            float4 takes the latter.
        zero_point_granularity: which elements share a zero point. By default the elements that share a scale.
        reduce_range: True for codes of 7 bits in an int8 or uint8: -64 to 64, or 0 to 127, as with `reduce_range` of
            ONNX Runtime's quantizer. Products of such weights with uint8 activations are exact in ONNX Runtime on every
            processor; with 8 bits their sums saturate on x86-64 without VNNI.
        offset: True for a real offset in place of a zero point: x = codes * scale + offset. The dtype is unsigned. The
            offset has the granularity and the dtype of the scale (float32 for float8_e8m0fnu, which has no sign).
        scale_spec: how the scales, and the offsets, are quantized themselves, or None. Its granularity counts the
            dimensions of the scale: `Blocked(-1, 8)` are eight blocks of x. The codes are computed with the scales that
            result. Its dtype is one of integers or small floats. Unsigned integers hold the offsets negated, so that a
            range then includes 0 or what is below it. The scale has the other attributes of `scale_spec`.
            Each scale is rounded to the nearest one, so that the largest values of a block may saturate.
            NVFP4 is float4 with `QuantSpec("float8_e4m3fn")`: float8 scales times one float32 scale.

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
    scale_rule: ScaleRule | None = None
    ties: Ties = "even"
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
            not self.reduce_range or dtype in dtypes.EIGHT_BITS, _SPEC, "reduce_range", expected, f"True with {dtype}"
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
        is_power = bool(self.power_of_two) or scale_dtype == dtypes.E8M0
        is_power = is_power or (self.scale_rule is not None and self.scale_spec is None)
        attributes = {
            "dtype": dtype, "symmetric": bool(symmetric), "narrow_range": bool(narrow), "scale_dtype": scale_dtype,
            "power_of_two": is_power, "zero_point_granularity": point_granularity,
            "reduce_range": bool(self.reduce_range), "offset": bool(self.offset),
            "scale_rule": self._read_scale_rule(dtype, bool(symmetric), bool(narrow)),
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

    def _read_scale_rule(self, dtype: Format, symmetric: bool, narrow: bool) -> str | None:
        """Return the rule of the scales, None for the default; raise if the codes cannot have it."""
        checks.check_option(_SPEC, "ties", self.ties, scale_rules.TIES)
        expected = f'"even" for {dtype}; only float4_e2m1fn has ties="toward_zero"'
        checks.require(self.ties == "even" or dtype in dtypes.FLOAT4, _SPEC, "ties", expected, repr(self.ties))
        if self.scale_rule is None:
            return None
        if self.scale_spec is not None:
            expected = "None, because only float8 and float4 codes with scales in float8 have rules for both scales"
            checks.require(self.has_float8_scales, _SPEC, "scale_rule", expected, repr(self.scale_rule))
            checks.check_option(_SPEC, "scale_rule", self.scale_rule, scale_rules.NESTED_RULES)
            return None if self.scale_rule == "modelopt" else self.scale_rule
        checks.check_option(_SPEC, "scale_rule", self.scale_rule, scale_rules.RULES)
        if self.scale_rule == "rceil":
            return None
        is_float = dtype in dtypes.SMALL_FLOATS
        is_even_integer = not is_float and self.scale_rule in ("even", "compressed_tensors")
        expected = f'"rceil", "floor", "ceil" or "nearest" for {dtype}, because integers have no digits to round to'
        checks.require(not is_even_integer, _SPEC, "scale_rule", expected, repr(self.scale_rule))
        is_integer = dtypes.is_integer(dtype) and _is_signed(dtype) and symmetric and narrow and not self.reduce_range
        expected = (
            '"rceil", unless codes reach equally far on both sides of 0: float8, float4, or signed with narrow_range'
        )
        checks.require(is_float or is_integer, _SPEC, "scale_rule", expected, f"{self.scale_rule!r} with {dtype}")
        return self.scale_rule

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
        if self.scale_rule is not None:
            texts.append(f"scale_rule={self.scale_rule!r}")
        if self.ties != "even":
            texts.append(f"ties={self.ties!r}")
        if self.scale_spec is not None:
            texts.append(f"scale_spec={self.scale_spec!r}")
        return f"{_SPEC}({', '.join(texts)})"

    @property
    def carrier(self) -> np.dtype:
        """The dtype of the codes: `dtype`, int8 or uint8 for narrow integers, or the dtype of a codebook's indices."""
        return self.dtype.carrier if isinstance(self.dtype, Codebook | NarrowInteger) else self.dtype

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
    def has_float8_scales(self) -> bool:
        """Whether codes of float8 or float4 have scales of float8, times one float32 for all, as in NVFP4."""
        inner, dtype = self.scale_spec, _read_dtype(self.dtype)
        is_inner = isinstance(inner, QuantSpec) and inner.dtype in dtypes.FLOAT8 and inner == QuantSpec(inner.dtype)
        return is_inner and dtype in dtypes.SMALL_FLOATS

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest code of an integer dtype, or the extreme values of a float dtype or a codebook."""
        if self.codebook:
            return self.codebook.ascending[0], self.codebook.ascending[-1]
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
