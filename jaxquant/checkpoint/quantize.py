"""`quantize_to`: floats as the arrays that file formats hold, with the codes of the formats' own quantizers."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays.quantize import quantize
from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from .._core.granularity import Blocked
from .formats.gguf import allocate_parts, build_array, store_codes
from .formats.gguf_blocks import BLOCK_TYPES, IQ4_NL, BlockType
from .formats.rounding import TARGETS, round_to_nearest
from .info import CheckpointError, Info
from .place import place_tensor

_NAME = "checkpoint.quantize_to"
_F32 = np.float32
_ROWS_AT_ONCE = 2**18  # elements


def quantize_to(params: Any, target: str, *, keep: str | Sequence[str] = ()) -> tuple[Any, Info]:
    """Return parameters with each matrix quantized for a file format, round to nearest, and the `Info` for `save`.

    The targets are types of GGUF and schemes of compressed-tensors:

    - "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq2_0": the bits of the package gguf, and of llama.cpp's reference code
      in C where the compiler does not fuse a product and a sum.
    - "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4": codes from the range of each block. llama.cpp
      searches for better scales, so that its codes differ.
    - "compressed-tensors-int4", one scale for each 128 inputs, "compressed-tensors-int8" and "compressed-tensors-fp8",
      one for each output and int8 or float8 activations: the bits of the package compressed-tensors.

    Blocks are along the last axis, which is the input of a layer: weights have the shape (outputs, inputs).
    compressed-tensors takes the matrices with paths that end in ".weight".

    Args:
        params: a pytree of floats, such as a dict by name or nested dicts. QuantizedArrays in it stay as they are.
        target: the type of GGUF or the scheme of compressed-tensors, from the table.
        keep: patterns of the paths that stay in floats, such as "*norm*". The keys of a path are joined by "/". Arrays
            of rank 0 and 1, and integers, always stay.

    Returns:
        The tree with QuantizedArrays, and an `Info` with the format and its configuration. Add the metadata that the
        program needs that will read the file.

    Raises:
        CheckpointError: compressed-tensors cannot hold a matrix, such as one with inputs that 128 does not divide.
        TypeError: an argument has a wrong type, or an array is traced.
        ValueError: the target is unknown, or GGUF's type cannot hold a matrix: its rows are not whole blocks, or it has
            numbers that are not finite or too large for the scales. The error names the path, which may be added to
            `keep`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxquant import checkpoint
        >>> params = {"up": jnp.linspace(-1.0, 1.0, 64).reshape(2, 32), "norm": jnp.ones(32)}
        >>> quantized, info = checkpoint.quantize_to(params, "q4_0")
        >>> quantized["up"].codes[0, :5], quantized["up"].scale[0]
        (Array([-8, -8, -7, -7, -7], dtype=int4), Array([0.125], dtype=float16))

    Source: the package gguf, quants.py; compressed_tensors.quantization, calculate_qparams and quantize.
    """
    checks.require_type(isinstance(target, str), _NAME, "target", "the name of a type", checks.describe_value(target))
    name = target.lower()
    checks.check_option(_NAME, "target", name, (*(kind.lower() for kind in QUANTIZERS), *TARGETS))
    checks.require_type(isinstance(keep, Iterable), _NAME, "keep", "patterns of paths", checks.describe_value(keep))
    patterns = (keep,) if isinstance(keep, str) else tuple(keep)
    for pattern in patterns:
        checks.require_type(
            isinstance(pattern, str), _NAME, "keep", "patterns of paths", checks.describe_value(pattern)
        )
    scheme, kept = TARGETS.get(name), []

    def convert(keys: tuple[Any, ...], leaf: Any) -> Any:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        is_matrix = (
            isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim > 1 and leaf.dtype in (*dtypes.FLOATS, np.float64)
        )
        if not is_matrix or (scheme is not None and not path.endswith(".weight")):
            return leaf
        if any(fnmatch.fnmatch(path, pattern) for pattern in patterns):
            kept.append(path.removesuffix(".weight"))
            return leaf
        if scheme is None:
            return quantize_array(path, leaf, name.upper())
        expected = "an array that is not traced"
        checks.require_type(
            not checks.is_traced(leaf), _NAME, f"params at {path!r}", expected, checks.describe_value(leaf)
        )
        try:
            return place_tensor(_NAME, path, round_to_nearest(path, np.asarray(leaf), scheme.weights), None)
        except CheckpointError as error:
            raise CheckpointError(f"jaxquant.{_NAME}: {error}") from error

    tree = jax.tree_util.tree_map_with_path(convert, params, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray))
    # JAX sorts the keys, and a file has an order of its own.
    tree = {name: tree[name] for name in params} if isinstance(params, dict) else tree
    if scheme is None:
        return tree, Info("gguf")
    return tree, Info("compressed-tensors", {"config.json": {"quantization_config": scheme.make_config(kept)}})


def quantize_array(path: str, x: jax.Array | np.ndarray, type: str) -> Any:
    """Return a matrix as a QuantizedArray that a type of GGUF holds.

    Args:
        path: the name of the matrix, for errors.
        x: floats of rank 1 or more.
        type: the name of the type.
    """
    label, row = f"params at {path!r}", BLOCK_TYPES[type]
    expected = "an array that is not traced, because the codes are found outside of JAX's programs"
    checks.require_type(not checks.is_traced(x), _NAME, label, expected, checks.describe_value(x))
    expected = f"rows of a multiple of {row.size} elements for {type}, or its path in keep"
    checks.require(x.shape[-1] % row.size == 0, _NAME, label, expected, f"shape {tuple(x.shape)}")
    floats = np.asarray(x, _F32)
    checks.require(bool(np.isfinite(floats).all()), _NAME, label, "finite numbers", "infinity or NaN")
    quantizer = QUANTIZERS[type]
    if isinstance(quantizer, QuantSpec):
        q = quantize(jnp.asarray(floats), quantizer)
        q = q if q.packing else q.pack()
        scale = q.scale.scale if isinstance(q.scale, QuantizedArray) else q.scale
        is_finite = bool(jnp.isfinite(scale.astype(jnp.float32)).all())
    else:
        q, is_finite = _quantize_rows(floats, row, quantizer)
    expected = f"numbers whose scales the type {type} holds in float16"
    checks.require(is_finite, _NAME, label, expected, f"magnitudes of up to {np.abs(floats).max(initial=0):.3g}")
    return place_tensor(_NAME, path, q.replace(dtype=jnp.float32), None)


def _quantize_rows(x: np.ndarray, row: BlockType, quantizer: _Quantizer) -> tuple[QuantizedArray, bool]:
    """Return an array of a type, and whether its scales are finite."""
    lead, length = x.shape[:-1], x.shape[-1]
    flat = x.reshape(-1, length) if length else np.empty((0, 0), _F32)
    outs, is_finite = allocate_parts(row, len(flat), length), True
    step = max(1, _ROWS_AT_ONCE // max(length, 1))
    for first in range(0, len(flat), step):
        part = flat[first : first + step]
        with np.errstate(over="ignore", divide="ignore"):
            codes, *floats = quantizer(part.reshape(-1, row.size))
            halves = [number.astype(np.float16).reshape(len(part), -1) for number in floats]
        is_finite = is_finite and all(bool(np.isfinite(half).all()) for half in halves)
        rows = {name: out[first : first + step] for name, out in outs.items()}
        for name, half in zip(("scale", "offset"), halves, strict=False):
            rows[name][:] = half
        store_codes(row, codes.reshape(len(part), -1), rows["codes"])
    shaped = {name: out.reshape(*lead, out.shape[-1]) for name, out in outs.items()}
    return build_array(row, shaped, length), is_finite


# GGUF's quantizers, on blocks [n, 32] of float32: unsigned codes, the scale and, if there is one, the offset. Every
# operation is rounded to float32, as in the package gguf. The scale that divides is not yet rounded to float16.


_Quantizer = Callable[[np.ndarray], tuple[np.ndarray, ...]]


def _invert(d: np.ndarray) -> np.ndarray:
    return np.where(d == 0, _F32(0), _F32(1) / d)


def _quantize_signed(blocks: np.ndarray, half: int) -> tuple[np.ndarray, ...]:
    """The number of the largest magnitude becomes the code -half, so that d has the other sign."""
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1, keepdims=True), axis=-1)
    d = largest / _F32(-half)
    steps = np.trunc(blocks * _invert(d) + _F32(half + 0.5))
    return steps.astype(np.uint8).clip(0, 2 * half - 1), d


def _quantize_range(blocks: np.ndarray, highest: int) -> tuple[np.ndarray, ...]:
    low = blocks.min(axis=-1, keepdims=True)
    d = (blocks.max(axis=-1, keepdims=True) - low) / _F32(highest)
    steps = np.trunc((blocks - low) * _invert(d) + _F32(0.5))
    return steps.astype(np.uint8).clip(0, highest), d, low


def _quantize_largest(blocks: np.ndarray, highest: int, zero_point: int = 0) -> tuple[np.ndarray, ...]:
    """The largest magnitude becomes the highest code. Halves are rounded away from zero."""
    d = np.abs(blocks).max(axis=-1, keepdims=True) / _F32(highest)
    steps = blocks * _invert(d)
    whole = np.floor(np.abs(steps))
    whole = whole + np.floor(_F32(2) * (np.abs(steps) - whole))
    return (np.sign(steps) * whole + _F32(zero_point)).astype(np.int8).view(np.uint8), d


def _make_spec(dtype: Any, size: int, inner: str = "", entries: int = 0, **options: Any) -> QuantSpec:
    if inner:
        options["scale_spec"] = QuantSpec(inner, Blocked(-1, entries), scale_dtype=jnp.float16)
    return QuantSpec(dtype, Blocked(-1, size), **options)


QUANTIZERS: dict[str, _Quantizer | QuantSpec] = {
    "Q4_0": lambda blocks: _quantize_signed(blocks, 8),
    "Q4_1": lambda blocks: _quantize_range(blocks, 15),
    "Q5_0": lambda blocks: _quantize_signed(blocks, 16),
    "Q5_1": lambda blocks: _quantize_range(blocks, 31),
    "Q8_0": lambda blocks: _quantize_largest(blocks, 127),
    "TQ2_0": lambda blocks: _quantize_largest(blocks, 1, zero_point=1),
    "Q2_K": _make_spec("uint2", 16, "uint4", 16, offset=True),
    "Q3_K": _make_spec("int3", 16, "int6", 16),
    "Q4_K": _make_spec("uint4", 32, "uint6", 8, offset=True),
    "Q5_K": _make_spec("uint5", 32, "uint6", 8, offset=True),
    "Q6_K": _make_spec("int6", 16, "int8", 16),
    "IQ4_NL": _make_spec(IQ4_NL, 32, scale_dtype=jnp.float16),
    "IQ4_XS": _make_spec(IQ4_NL, 32, "int6", 8),
    "MXFP4": _make_spec("float4_e2m1fn", 32, scale_dtype="float8_e8m0fnu", scale_rule="floor", ties="toward_zero"),
}
