"""How the tensors of each file format become quantized arrays."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxquant as jq

from ..oracles.file_formats import BF16, E2M1, E4M3, F16, F32, Parts

# The dtypes of integer codes. Others are held in 8 bits, and codes of 3, 5 and 6 bits in words.
_INTEGERS = {1: "int2", 2: "int2", 4: "int4"}
_PACKED = (3, 5, 6)
_FLOATS = (F16, BF16, F32)


def build_array(
    parts: Parts, dtype: np.dtype = F32, *, arithmetic: np.dtype = F32, signed: bool = False
) -> jq.QuantizedArray:
    """Return the quantized array with the codes, the scales and the offsets of a file.

    Args:
        parts: the numbers of the file.
        dtype: of the floats.
        arithmetic: the dtype to which the producer's code rounds each operation.
        signed: whether all scales are taken to be signed, whatever their numbers.
    """
    scale, zero_point = parts.scale, parts.zero_point
    codebook = None if parts.levels is None else jq.Codebook(f"{len(parts.levels)} levels", parts.levels)
    codes = _convert_codes(parts.codes, parts.bits, codebook)
    options: dict[str, Any] = {"codebook": codebook, "dtype": dtype, "permuted_axis": parts.axis}
    if any(length % size for length, size in zip(parts.codes.shape, parts.sizes, strict=True)):
        options["block_size"] = parts.sizes
    if zero_point is not None:
        is_real = zero_point.dtype in _FLOATS
        zero_point = jnp.asarray(zero_point) if is_real else _convert_codes(zero_point, parts.bits, None)
    q = jq.QuantizedArray(
        codes,
        build_array(scale, signed=signed) if isinstance(scale, Parts) else jnp.asarray(scale),
        zero_point,
        _build_part(parts.offset, signed=signed),
        None if parts.permutation is None else jnp.asarray(parts.permutation),
        signed_scale=signed or has_signed_scale(scale), inverse_scale=parts.divides, arithmetic=arithmetic, **options,
    )  # fmt: skip
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
    # Zero points are in the dtype of the unpacked codes: 8 bits for codes of 3 bits.
    total += count_bits(part.zero_point, (8 if part.bits in _PACKED else part.bits) if has_codes else 0)
    return total + count_bits(part.permutation)


def list_widths(parts: Parts | np.ndarray | None) -> set[int]:
    """Return the bits of the codes of a tensor and of its quantized scales and offsets."""
    if not isinstance(parts, Parts):
        return set()
    return {parts.bits} | list_widths(parts.scale) | list_widths(parts.offset)


def measure_bits(q: jq.QuantizedArray) -> float:
    """Return the bits in memory for each element."""
    return 8 * q.nbytes / math.prod(q.shape)
