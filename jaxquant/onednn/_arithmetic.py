"""What oneDNN's kernels compute, and how oneDNN Graph spells granularity. Shared by the four operators; knows none
of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _contracts, _dtypes, _granularity, _numerics, _small_floats

EIGHT_BIT = (np.dtype(jnp.uint8), np.dtype(jnp.int8))
FOUR_BIT = (np.dtype(jnp.uint4), np.dtype(jnp.int4))
FLOAT8 = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))
ZERO_POINTS = (*EIGHT_BIT, _dtypes.INT32)


def number(function: str, argument: str, value: Any, dtype: np.dtype) -> Any:
    """Returns a Python number as an array of `dtype`, which must hold it; anything else as it came."""
    if not isinstance(value, int | float):
        return value
    if dtype == _dtypes.INT32:
        _contracts.integer(function, argument, value)
        low, high = _dtypes.bounds(dtype)
        _contracts.require(low <= value <= high, function, argument, f"an int32 in [{low}, {high}]", value)
    else:
        _contracts.require_type(
            not isinstance(value, bool), function, argument, "a number", _contracts.described(value)
        )
        single = np.finfo(np.float32)
        size, most, least = abs(value), float(single.max), float(single.smallest_subnormal)
        lost = most < size < np.inf or 0 < size < least  # Python compares an int of any length
        _contracts.require(not lost, function, argument, "a number that float32 can hold", value)
    return np.asarray(value, dtype)


def granularity(
    function: str, src: jax.Array, scales: jax.Array, zps: jax.Array | None, qtype: str, axis: int
) -> _granularity.Granularity:
    """Reads "per_tensor" or "per_channel" and holds scales and zps to it."""
    if qtype == "per_tensor":
        found: _granularity.Granularity = _granularity.PerTensor()
        for argument, value in (("scales", scales), ("zps", zps)):
            if value is not None and value.shape != ():
                _contracts.shape(function, argument, value, (1,), 'one element, qtype="per_tensor"')
        return found
    kept = _contracts.axis(function, axis, src.ndim)
    reason = f'src has shape {src.shape}, qtype="per_channel", axis={axis}'
    for argument, value in (("scales", scales), ("zps", zps)):
        if value is not None:
            _contracts.shape(function, argument, value, (src.shape[kept],), reason)
    return _granularity.PerAxis(kept)


def quantize_contract(
    function: str, src: jax.Array, scales: jax.Array, zps: jax.Array | None, qtype: str, axis: int
) -> _granularity.Granularity:
    """Holds the arguments of the two quantizing operators to their contracts."""
    _contracts.array(function, "src", src, (_dtypes.FLOAT32,))
    _contracts.array(function, "scales", scales, (_dtypes.FLOAT32,))
    _contracts.option(function, "qtype", qtype, ("per_tensor", "per_channel"))
    if zps is not None:
        _contracts.array(function, "zps", zps, ZERO_POINTS)
    return granularity(function, src, scales, zps, qtype, axis)


def quantize(
    src: jax.Array,
    scales: jax.Array,
    zps: jax.Array | None,
    found: _granularity.Granularity,
    dtype: np.dtype,
) -> jax.Array:
    """Returns saturate(round_half_even(src * (1 / scale) + zp)), each operation rounded to float32."""
    src, scales = lax.stop_gradient((src, scales))
    inverse = _numerics.quotient(jnp.ones_like(scales), scales)
    value = _numerics.rounded(src * found.expand(inverse, src))
    if dtype in _dtypes.FLOAT8:
        return _small_floats.encode(value, dtype, saturate=False)
    if zps is not None:
        # XLA adds constants up first, this one and the one that rounds.
        value = _numerics.rounded(value + found.expand(zps.astype(jnp.float32), src))
    return _numerics.encode(value, None, dtype)


def dequantize(
    src: jax.Array,
    scales: jax.Array,
    zps: jax.Array | None,
    found: _granularity.Granularity,
) -> jax.Array:
    """Returns (src - zp) * scale, each operation rounded to float32, in the dtype of `scales`."""
    steps = _small_floats.decode(src) if src.dtype in FLOAT8 else src.astype(jnp.float32)
    if zps is not None:
        steps = steps - found.expand(zps.astype(jnp.float32), src)
    product = _numerics.rounded(steps * found.expand(scales.astype(jnp.float32), src))
    return _numerics.to_grid(product, scales.dtype).astype(scales.dtype)
