"""What oneDNN's kernels compute, and how oneDNN Graph spells granularity. Shared by the four operators; knows none
of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import barriers, checks, division, dtypes, rounding, small_floats
from .._core.granularity import Granularity, PerAxis, PerTensor

EIGHT_BIT = (np.dtype(jnp.uint8), np.dtype(jnp.int8))
FOUR_BIT = (np.dtype(jnp.uint4), np.dtype(jnp.int4))
FLOAT8 = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))
ZERO_POINTS = (*EIGHT_BIT, dtypes.INT32)


def find_granularity(
    function: str, src: jax.Array, scales: jax.Array, zps: jax.Array | None, qtype: str, axis: int
) -> Granularity:
    """Reads "per_tensor" or "per_channel" and holds scales and zps to it."""
    if qtype == "per_tensor":
        found: Granularity = PerTensor()
        for argument, value in (("scales", scales), ("zps", zps)):
            if value is not None and value.shape != ():
                checks.check_shape(function, argument, value, (1,), 'one element, qtype="per_tensor"')
        return found
    kept = checks.check_axis(function, axis, src.ndim)
    reason = f'src has shape {src.shape}, qtype="per_channel", axis={axis}'
    for argument, value in (("scales", scales), ("zps", zps)):
        if value is not None:
            checks.check_shape(function, argument, value, (src.shape[kept],), reason)
    return PerAxis(kept)


def check_quantize(
    function: str, src: jax.Array, scales: jax.Array, zps: jax.Array | None, qtype: str, axis: int
) -> Granularity:
    """Holds the arguments of the two quantizing operators to their contracts."""
    checks.check_array(function, "src", src, (dtypes.FLOAT32,))
    checks.check_array(function, "scales", scales, (dtypes.FLOAT32,))
    checks.check_option(function, "qtype", qtype, ("per_tensor", "per_channel"))
    if zps is not None:
        checks.check_array(function, "zps", zps, ZERO_POINTS)
    return find_granularity(function, src, scales, zps, qtype, axis)


def quantize_by_reciprocal(
    src: jax.Array,
    scales: jax.Array,
    zps: jax.Array | None,
    found: Granularity,
    dtype: np.dtype,
) -> jax.Array:
    """Returns saturate(round_half_even(src * (1 / scale) + zp)), each operation rounded to float32."""
    src, scales = lax.stop_gradient((src, scales))
    inverse = division.divide(jnp.ones_like(scales), scales)
    value = barriers.round_result(src * found.expand(inverse, src))
    if dtype in dtypes.FLOAT8:
        return small_floats.encode_small_float(value, dtype, saturate=False)
    if zps is not None:
        # XLA adds constants up first, this one and the one that rounds.
        value = barriers.round_result(value + found.expand(zps.astype(jnp.float32), src))
    return rounding.encode_steps(value, None, dtype)


def dequantize_codes(
    src: jax.Array,
    scales: jax.Array,
    zps: jax.Array | None,
    found: Granularity,
) -> jax.Array:
    """Returns (src - zp) * scale, each operation rounded to float32, in the dtype of `scales`."""
    steps = small_floats.decode_small_float(src) if src.dtype in FLOAT8 else src.astype(jnp.float32)
    if zps is not None:
        steps = steps - found.expand(zps.astype(jnp.float32), src)
    product = barriers.round_result(steps * found.expand(scales.astype(jnp.float32), src))
    return rounding.round_to_dtype(product, scales.dtype).astype(scales.dtype)
