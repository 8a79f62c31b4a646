"""How the tensors of each file format become quantized arrays."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxquant as jq

from ..oracles.file_formats import BF16, E2M1, E4M3, F16, F32, FORMATS, Parts, compute_values

# The dtypes of integer codes. Others are held in 8 bits, and those of 3, 5 and 6 bits in words.
_INTEGERS = {1: "int2", 2: "int2", 4: "int4"}
_PACKED = (3, 5, 6)


def build_array(parts: Parts, dtype: np.dtype = F32, *, signed: bool = False) -> jq.QuantizedArray:
    """Return the quantized array with the codes, the scales and the offsets of a file.

    Two formulas have another form here, and differ from the file's by roundings. A scale to divide by is replaced by
    its reciprocal, and a float zero point z (HQQ) by the offset -z * scale, in float32. With `signed`, all scales are
    taken to be signed, whatever their numbers.
    """
    scale, offset, zero_point = parts.scale, parts.offset, parts.zero_point
    if zero_point is not None and zero_point.dtype in (F16, BF16, F32):
        assert isinstance(scale, np.ndarray)
        scale, offset, zero_point = scale.astype(F32), -zero_point.astype(F32) * scale.astype(F32), None
    if parts.divides:
        assert isinstance(scale, np.ndarray)
        scale = F32.type(1) / scale
    codebook = None if parts.levels is None else jq.Codebook(f"{len(parts.levels)} levels", parts.levels)
    codes = _convert_codes(parts.codes, parts.bits, codebook)
    options: dict[str, Any] = {"codebook": codebook, "dtype": dtype, "permuted_axis": parts.axis}
    if any(length % size for length, size in zip(parts.codes.shape, parts.sizes, strict=True)):
        options["block_size"] = parts.sizes
    q = jq.QuantizedArray(
        codes,
        build_array(scale, signed=signed) if isinstance(scale, Parts) else jnp.asarray(scale),
        None if zero_point is None else _convert_codes(zero_point, parts.bits, None),
        _build_part(offset, signed=signed),
        None if parts.permutation is None else jnp.asarray(parts.permutation),
        signed_scale=signed or has_signed_scale(scale),
        **options,
    )
    return q.pack(f"{codes.dtype.name.removesuffix('8')}{parts.bits}") if parts.bits in _PACKED else q


def has_signed_scale(scale: np.ndarray | Parts) -> bool:
    """Return whether a scale is zero or negative anywhere; scales that are quantized themselves may be."""
    return isinstance(scale, Parts) or not bool((scale.astype(F32) > 0).all())


def _build_part(part: np.ndarray | Parts | None, *, signed: bool) -> Any:
    if part is None:
        return None
    return build_array(part, signed=signed) if isinstance(part, Parts) else jnp.asarray(part)


def _convert_codes(codes: np.ndarray, bits: int, codebook: jq.Codebook | None) -> Any:
    if codes.dtype in (E2M1, E4M3):
        return jnp.asarray(codes)
    if codebook is not None:
        return jnp.asarray(codes).astype(codebook.carrier)
    name = _INTEGERS.get(bits, "int8")
    return jnp.asarray(codes).astype(name if codes.dtype == np.int8 else f"u{name}")


def is_exact(name: str, parts: Parts, dtype: np.dtype) -> bool:
    """Return whether an array has the bits of the producer's own code.

    That code rounds after each operation to 16-bit floats for MLX, torchao and HQQ; jaxquant rounds to float32 and then
    once.
    """
    scale = parts.scale
    divides = parts.divides or (isinstance(scale, Parts) and scale.divides)
    has_float_zero = parts.zero_point is not None and parts.zero_point.dtype in (F16, BF16, F32)
    rounds_twice = FORMATS[name].each_step and dtype != F32 and parts.offset is not None
    return not (divides or has_float_zero or rounds_twice)


def count_bits(part: np.ndarray | Parts | None, bits: int = 0) -> int:
    """Return the bits of the numbers of a tensor, if each code takes its own bits.

    Rows of 3, 5 and 6 bits begin with a new word, as in the files of compressed-tensors.
    """
    if part is None:
        return 0
    if isinstance(part, np.ndarray):
        if bits in _PACKED:
            return math.prod(part.shape[:-1]) * -(-part.shape[-1] * bits // 32) * 32
        return part.size * (bits or 8 * part.dtype.itemsize)
    total = count_bits(part.codes, part.bits) + count_bits(part.scale) + count_bits(part.offset)
    has_codes = part.zero_point is not None and part.zero_point.dtype in (np.int8, np.uint8)
    # Zero points are in the dtype of the unpacked codes, so those of 3 bits have 8.
    total += count_bits(part.zero_point, (8 if part.bits in _PACKED else part.bits) if has_codes else 0)
    return total + count_bits(part.permutation)


def list_widths(parts: Parts | np.ndarray | None) -> set[int]:
    """Return the bits of the codes of a tensor and of its quantized scales and offsets."""
    if not isinstance(parts, Parts):
        return set()
    return {parts.bits} | list_widths(parts.scale) | list_widths(parts.offset)


def bound_difference(parts: Parts, dtype: np.dtype) -> np.ndarray:
    """Return how far an array that is not exact may be from the producer's floats.

    Either side rounds at most three times to `dtype`, which changes the value or the product by half a unit in the last
    place each time. The roundings to float32 count for the terms that cancel, too: the code and the zero point.
    """
    unit = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-24}[dtype]
    subnormal = {F16: 2.0**-24, BF16: 2.0**-126, F32: 2.0**-126}[dtype]

    def measure(parts: Parts) -> np.ndarray:
        return np.abs(compute_values(parts).astype(np.float64))

    value, product = measure(parts), measure(parts._replace(offset=None, zero_point=None))
    if parts.zero_point is None:
        return 4 * unit * (value + product) + subnormal
    shift = parts._replace(codes=np.zeros_like(parts.codes))
    return 4 * unit * value + 8 * 2.0**-24 * (product + measure(shift)) + subnormal


def measure_bits(q: jq.QuantizedArray) -> float:
    """Return the bits in memory for each element."""
    return 8 * q.nbytes / math.prod(q.shape)
