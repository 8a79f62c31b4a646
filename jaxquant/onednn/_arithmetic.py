"""The arithmetic of oneDNN's kernels and the granularity of oneDNN Graph, shared by the four operators."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import checks, dtypes, small_floats
from .._core.granularity import Granularity, PerAxis, PerTensor
from .._kernels import barriers, division, rounding

EIGHT_BIT = (np.dtype(jnp.uint8), np.dtype(jnp.int8))
FOUR_BIT = (np.dtype(jnp.uint4), np.dtype(jnp.int4))
FLOAT8 = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))
ZERO_POINTS = (*EIGHT_BIT, dtypes.INT32)


def find_granularity(
    function: str, src: jax.Array, scales: jax.Array, zps: jax.Array | None, qtype: str, axis: int
) -> Granularity:
    """Return the granularity of a qtype, "per_tensor" or "per_channel"; raise unless scales and zps fit it."""
    if qtype == "per_tensor":
        # oneDNN takes an array of one element only. A scalar is what JAX programs have.
        if scales.shape != ():
            checks.check_shape(function, "scales", scales, (1,), 'one element, qtype="per_tensor"')
        if zps is not None and zps.shape != ():
            checks.check_shape(function, "zps", zps, (1,), 'one element, qtype="per_tensor"')
        return PerTensor()
    dimension = checks.check_axis(function, axis, src.ndim)
    reason = f'src has shape {src.shape}, qtype="per_channel", axis={axis}'
    check_shapes(function, scales, zps, (src.shape[dimension],), reason)
    return PerAxis(dimension)


def check_shapes(function: str, scales: jax.Array, zps: jax.Array | None, shape: tuple[int, ...], reason: str) -> None:
    """Raise ContractValueError unless scales, and zps if there are any, have exactly this shape."""
    checks.check_shape(function, "scales", scales, shape, reason)
    if zps is not None:
        checks.check_shape(function, "zps", zps, shape, reason)


def check_float8_zero_point(function: str, dtype: np.dtype, zps: jax.Array | None) -> None:
    """Raise ContractValueError if codes of a float8 dtype have zero points."""
    if zps is not None:
        # oneDNN means to refuse them, too, but its check reads the dtype of src where dst has to be checked.
        expected = "None: float8 has no zero points"
        checks.require(dtype not in dtypes.FLOAT8, function, "zps", expected, "an array")


def check_quantize(
    function: str, src: jax.Array, scales: jax.Array, zps: jax.Array | None, qtype: str, axis: int
) -> Granularity:
    """Return the granularity of the arguments of a quantizing operator, after checking their dtypes and shapes."""
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
    granularity: Granularity,
    dtype: np.dtype,
) -> jax.Array:
    """Return the codes of src, with each operation rounded to float32.

    dst = saturate(round_half_even(src * (1 / scales) + zps))
    """
    # The codes have no gradient, but without this JAX would trace the derivative of the division.
    src, scales = lax.stop_gradient((src, scales))
    # oneDNN rounds the reciprocal and multiplies; a true division gives other codes next to ties.
    inverse = division.divide(jnp.ones_like(scales), scales)
    # oneDNN rounds this product before it adds the zero point; XLA would contract the two operations.
    value = barriers.round_result(src * granularity.expand(inverse, src))
    if dtype in dtypes.FLOAT8:
        # oneDNN does not saturate float8: e4m3 overflows to NaN, e5m2 to infinity.
        return small_floats.encode_small_float(value, dtype, saturate=False)
    if zps is not None:
        # Without this XLA would combine the zero point with the constant that encode_steps adds next, and round once.
        value = barriers.round_result(value + granularity.expand(zps.astype(jnp.float32), src))
    # The zero point is in the value already: unlike ONNX, oneDNN rounds the sum with it.
    return rounding.encode_steps(value, None, dtype)


def dequantize_codes(
    src: jax.Array,
    scales: jax.Array,
    zps: jax.Array | None,
    granularity: Granularity,
) -> jax.Array:
    """Return the values of the codes src in the dtype of scales, with each operation rounded to float32.

    dst = (src - zps) * scales
    """
    is_float = src.dtype in FLOAT8
    steps = small_floats.decode_small_float(src) if is_float else src.astype(jnp.float32)
    if zps is not None:
        # Subtract in float32, as oneDNN does: a large int32 zero point is rounded before the subtraction.
        steps = steps - granularity.expand(zps.astype(jnp.float32), src)
    if not is_float:
        # Of few elements, the difference and the product are one fusion each. Integers have no derivative.
        steps = barriers.split_small_fusion(steps)
    # In float32 also for scales of 16 bits, and rounded to their dtype once, as oneDNN's kernels do.
    product = barriers.round_result(steps * granularity.expand(scales.astype(jnp.float32), src))
    return rounding.round_to_dtype(product, scales.dtype).astype(scales.dtype)
