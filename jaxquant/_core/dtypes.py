"""The dtypes that jaxquant supports: their families, bounds and sizes, and the conversion of the small floats."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import recording

# The order of these tuples is the order in which errors list the dtypes.
INTEGERS: tuple[np.dtype, ...] = tuple(
    np.dtype(d) for d in (jnp.int2, jnp.uint2, jnp.int4, jnp.uint4, jnp.int8, jnp.uint8, jnp.int16, jnp.uint16)
)
FLOAT8: tuple[np.dtype, ...] = tuple(
    np.dtype(d) for d in (jnp.float8_e4m3fn, jnp.float8_e4m3fnuz, jnp.float8_e5m2, jnp.float8_e5m2fnuz)
)
FLOAT4: tuple[np.dtype, ...] = (np.dtype(jnp.float4_e2m1fn),)
SMALL_FLOATS = FLOAT8 + FLOAT4
QUANTIZED = INTEGERS + SMALL_FLOATS

FLOAT32 = np.dtype(jnp.float32)
FLOAT16 = np.dtype(jnp.float16)
BFLOAT16 = np.dtype(jnp.bfloat16)
INT32 = np.dtype(jnp.int32)
# It holds powers of two only, so it is a dtype of scales and not of codes.
E8M0 = np.dtype(jnp.float8_e8m0fnu)
FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
# The dtypes of codes that are contracted in integers, and those for which runtimes have kernels.
CONTRACTED: tuple[np.dtype, ...] = tuple(
    np.dtype(d) for d in (jnp.int8, jnp.uint8, jnp.int4, jnp.uint4, jnp.int2, jnp.uint2)
)
EIGHT_BITS = CONTRACTED[:2]
# The largest sum of two weights of int8 that no two codes of uint8 carry out of int16.
LARGEST_PAIR = 128


@dataclasses.dataclass(frozen=True)
class NarrowInteger:
    """An integer format of 3, 5 or 6 bits, for which numpy and JAX have no dtype.

    Attributes:
        bits: the number of bits of a code.
        signed: whether codes are in two's complement, from -2**(bits - 1) on, or from 0 on.
    """

    bits: int
    signed: bool

    def __repr__(self) -> str:
        """Return the name, as a dtype prints it."""
        return self.name

    @property
    def name(self) -> str:
        """The name, such as int5 or uint3."""
        return f"{'' if self.signed else 'u'}int{self.bits}"

    @property
    def carrier(self) -> np.dtype:
        """The dtype in which codes are computed: int8 or uint8."""
        return np.dtype(np.int8 if self.signed else np.uint8)

    @property
    def bounds(self) -> tuple[int, int]:
        """The lowest and the highest code."""
        low = -(2 ** (self.bits - 1)) if self.signed else 0
        return low, low + 2**self.bits - 1


NARROW = tuple(NarrowInteger(bits, signed) for bits in (3, 5, 6) for signed in (True, False))
# The formats that a spec may name in place of a dtype, by name.
NARROW_BY_NAME = {narrow.name: narrow for narrow in NARROW}


def parse_dtype(dtype: Any) -> np.dtype:
    """Return the numpy dtype that `dtype` names; raise TypeError if it does not name one."""
    if dtype is None:
        raise TypeError("None is not a dtype")  # numpy would read None as float64
    return np.dtype(dtype)


def is_float6(dtype: np.dtype) -> bool:
    """Return whether `dtype` is one of the two 6-bit floats, which jaxlib cannot compile on a CPU."""
    return dtype.name.startswith("float6_")


def is_known(dtype: np.dtype) -> bool:
    """Return whether some operator accepts this dtype; numpy's `kind` cannot tell, because ml_dtypes are void to it."""
    return dtype in (*QUANTIZED, *FLOATS, E8M0, INT32)


def is_integer(dtype: object) -> bool:
    """Return whether codes of a dtype, a narrow integer or a codebook are integers one step apart."""
    return isinstance(dtype, NarrowInteger) or dtype in INTEGERS


def list_names(dtypes: tuple[np.dtype | NarrowInteger, ...]) -> str:
    """Return the names of dtypes as a list for an error message: 'int8, uint8 or int16'."""
    names = [dtype.name for dtype in dtypes]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


def count_bits(dtype: np.dtype | NarrowInteger) -> int:
    """Return the number of bits of an integer dtype or a narrow integer."""
    return dtype.bits if isinstance(dtype, NarrowInteger) else jnp.iinfo(dtype).bits


@functools.cache
def read_bounds(dtype: np.dtype | NarrowInteger) -> tuple[int, int]:
    """Return (qmin, qmax) of an integer dtype or a narrow integer: its lowest and its highest value."""
    if isinstance(dtype, NarrowInteger):
        return dtype.bounds
    info = jnp.iinfo(dtype)
    return int(info.min), int(info.max)


def derive_narrow_bounds(dtype: np.dtype) -> tuple[int, int]:
    """Return (qmin, qmax) without the lowest code of a signed dtype: (-127, 127) for int8, (0, 255) for uint8."""
    low, high = read_bounds(dtype)
    return (-high, high) if low < 0 else (low, high)


def derive_reduced_bounds(dtype: np.dtype) -> tuple[int, int]:
    """Return (qmin, qmax) of 7-bit codes in int8 or uint8, as `reduce_range` in ONNX Runtime's quantizer.

    Two products of a uint8 code with such a code of int8 add up to 255 * 128 = 32640 at most, which int16 holds.
    """
    return (-64, 64) if read_bounds(dtype)[0] < 0 else (0, 127)


def read_largest(dtype: np.dtype) -> float:
    """Return the largest finite value of a small float dtype: 448 for float8_e4m3fn, 6 for float4_e2m1fn."""
    return float(jnp.finfo(dtype).max)


def count_packed_bits(dtype: np.dtype | NarrowInteger) -> int:
    """Return the number of bits of a packed element."""
    if isinstance(dtype, NarrowInteger):
        return dtype.bits
    if dtype in FLOAT4:
        return 4
    return count_bits(dtype) if dtype in INTEGERS else 8 * dtype.itemsize


def choose_wider(left: np.dtype, right: np.dtype) -> np.dtype:
    """Return the dtype of the result of two float operands: their common dtype, or float32 if they differ."""
    return left if left == right else FLOAT32


# Conversion between float32 and float8, float4 and float8_e8m0fnu, by integer arithmetic on their bits.
#
# XLA:CPU in jax 0.12 converts these dtypes wrongly inside the body of a scan: an overflow of float8_e4m3fn becomes -0,
# and -0 becomes the NaN of float8_e4m3fnuz. Integer arithmetic gives the same bits everywhere.


# The floats between 2**23 and 2**24 are exactly the integers, so adding this to a small number rounds the number half
# to even and leaves it in the low bits.
_MAGIC = np.float32(1.5 * 2**23)


def encode_magnitude(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the int32 code of |value|, rounded half to even, as if the dtype had no largest exponent.

    A code beyond the largest finite one is an overflow. The code of NaN is unspecified.
    """
    info = jnp.finfo(dtype)
    digits, least = int(info.nmant), int(info.minexp)
    size = lax.abs(value)
    exponent = jnp.clip((lax.bitcast_convert_type(size, jnp.int32) >> 23) - 127, least, 126)
    # Multiplying by this power of two is exact, and makes one unit in the last place 1.
    unit = lax.bitcast_convert_type((127 + digits - exponent) << 23, jnp.float32)
    # The product is below this bound for a finite value. For an infinity the bound keeps the addition of _MAGIC valid.
    scaled = jnp.minimum(size * unit, np.float32(2.0 ** (digits + 2)))
    units = lax.bitcast_convert_type(scaled + _MAGIC, jnp.int32) - int(_MAGIC.view(np.int32))
    # A normal number has its leading 1 in `units`, which adds 1 to the exponent field. A subnormal has exponent `least`
    # and no leading 1, so its exponent field is 0. If the rounding carries, it increments the exponent, as it should.
    return ((exponent - least) << digits) + units


def mark_overflow(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return a mask of the values that round beyond the largest finite one; True for infinities, False for NaN."""
    return (encode_magnitude(value, dtype) > _read_largest_code(dtype)) & ~jnp.isnan(value)


@recording.mark("encode_small_float", lambda value, dtype, **_: (value.shape, dtype), recording.map_elements)
def encode_small_float(value: jax.Array, dtype: np.dtype, saturate: bool) -> jax.Array:
    """Return float32 values in a small float dtype, rounded half to even.

    Args:
        value: float32. NaN stays NaN in float8, and becomes -0 in float4, which has no NaN.
        dtype: a float8 or float4 dtype.
        saturate: whether an overflow, including an infinity, becomes the largest finite value. If not, it becomes an
            infinity in float8_e5m2 and NaN in the other float8 dtypes. float4 always saturates.
    """
    largest, is_float4 = _read_largest_code(dtype), dtype in FLOAT4
    sign_bit = 8 if is_float4 else 128
    code = encode_magnitude(value, dtype)
    overflow = largest if saturate or is_float4 else largest + 1  # the code after the largest is infinity or NaN
    code = jnp.where(code > largest, overflow, code)
    negative = lax.bitcast_convert_type(value, jnp.int32) < 0
    signed = code + jnp.where(negative, sign_bit, 0)
    if _is_fnuz(dtype):  # the code of -0 means NaN, so a zero gets the code of +0 and an overflow the code of -0
        signed = jnp.where(code == 0, 0, jnp.where(code > largest, sign_bit, signed))
    nan = sign_bit if is_float4 or _is_fnuz(dtype) else int(np.asarray(np.nan, dtype).view(np.uint8)) & 0x7F
    signed = jnp.where(jnp.isnan(value), nan, signed)
    return lax.bitcast_convert_type(signed.astype(_view_unsigned(dtype)), dtype)


@recording.mark("decode_small_float", lambda value: (value.shape, jnp.float32), recording.map_elements)
def decode_small_float(value: jax.Array) -> jax.Array:
    """Return an array of a small float dtype or of float8_e8m0fnu as float32, exactly.

    The cotangent is passed on, as through a conversion.
    """
    return _decode_bits(value)


@jax.custom_jvp
def _decode_bits(value: jax.Array) -> jax.Array:
    dtype = value.dtype
    # XLA converts float4 correctly, and cannot compile a 4-bit bitcast in a scan.
    if dtype in FLOAT4:
        return value.astype(jnp.float32)
    code = lax.bitcast_convert_type(value, _view_unsigned(dtype)).astype(jnp.int32)
    if dtype == E8M0:
        nan = np.float32(np.nan)
        # The code is the biased exponent of a float32, except that code 0 is 2**-127, a subnormal float32.
        bits = jnp.where(code == 0, 1 << 22, code << 23)
        return jnp.where(code == 255, nan, lax.bitcast_convert_type(bits, jnp.float32))
    info = jnp.finfo(dtype)
    digits, least, largest = int(info.nmant), int(info.minexp), _read_largest_code(dtype)
    size = code & 127
    # The digits of a normal code are shifted to their position in a float32, and its exponent is rebiased. A
    # subnormal code is a multiple of the smallest unit.
    normal = lax.bitcast_convert_type((size << (23 - digits)) + ((126 + least) << 23), jnp.float32)
    subnormal = size.astype(jnp.float32) * np.float32(2.0 ** (least - digits))
    result = jnp.where(size < (1 << digits), subnormal, normal)
    if not _is_fnuz(dtype):
        # The code after the largest finite one is infinity in float8_e5m2; all codes after that are NaN.
        overflow = np.float32(np.inf) if dtype.name == "float8_e5m2" else np.float32(np.nan)
        result = jnp.where(size == largest + 1, overflow, jnp.where(size > largest + 1, np.float32(np.nan), result))
    result = jnp.where(code >= 128, -result, result)
    return jnp.where(code == 128, np.float32(np.nan), result) if _is_fnuz(dtype) else result


@_decode_bits.defjvp
def _decode_bits_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _decode_bits(*primals), tangents[0].astype(jnp.float32)


def scale_as_float32(scale: jax.Array) -> jax.Array:
    """Return a scale of any supported dtype as float32; exact, except that an int32 beyond 2**24 is rounded."""
    return decode_small_float(scale) if scale.dtype == E8M0 else scale.astype(jnp.float32)


def _view_unsigned(dtype: np.dtype) -> np.dtype:
    return np.dtype(jnp.uint4) if dtype in FLOAT4 else np.dtype(jnp.uint8)


def _read_largest_code(dtype: np.dtype) -> int:
    return int(np.asarray(jnp.finfo(dtype).max, dtype).view(np.uint8))


def _is_fnuz(dtype: np.dtype) -> bool:
    return dtype.name.endswith("fnuz")  # fn: finite (no infinities); uz: unsigned zero, because the code of -0 is NaN
