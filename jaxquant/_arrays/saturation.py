"""Which int8 weights make the sums of 8-bit products saturate on x86-64 processors without VNNI.

Such a processor has one instruction for these sums (PMADDUBSW): it multiplies uint8 activations by int8 weights and
adds two neighbors of the contracted dimension in int16, with saturation. ONNX Runtime's kernels use it. Two products
fit in int16 for all activations unless both weights have the same sign and add up to more than 128: 255 * 128 = 32640.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core import checks, dtypes
from .quantized_array import QuantizedArray
from .spec import QuantSpec

_NAME = "count_saturating_pairs"
_INT8, _UINT8 = np.dtype(np.int8), np.dtype(np.uint8)


def count_saturating_pairs(weights: Any, *, contracting_axis: int = 0) -> jax.Array:
    """Return how many pairs of neighboring weights can saturate a sum on x86-64 processors without VNNI.

    On these processors ONNX Runtime computes a_0 w_0 + a_1 w_1, for uint8 activations a and int8 weights w, in int16
    with saturation. The sum can leave int16 if w_0 and w_1 have the same sign and |w_0 + w_1| > 128. If no pair can,
    the integers of the product are the same on every processor. Zero points do not matter: the kernel multiplies the
    codes themselves.

    The runtime adds elements 0 and 1, 2 and 3, and so on. All pairs of neighbors are counted here, so the result does
    not depend on where a runtime begins.

    Args:
        weights: int8 codes, or a `QuantizedArray` of any dtype. Only int8 codes can saturate: those of 4 and 2 bits are
            small enough, and products of uint8 weights have another kernel.
        contracting_axis: Static. The axis that the product sums over: 0 for weights of shape [inputs, outputs].

    Returns:
        An int32 scalar. 0 means that the sums are exact for all activations.

    Raises:
        TypeError: `weights` are neither codes nor a QuantizedArray.
        ValueError: `contracting_axis` is out of range.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> jq.count_saturating_pairs(jnp.array([[64, 127], [64, 2], [65, -128]], jnp.int8))
        Array(2, dtype=int32)
        >>> w = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
        >>> spec = jq.QuantSpec(jnp.int8, jq.PerAxis(1))
        >>> jq.count_saturating_pairs(jq.quantize(w, spec))
        Array(26, dtype=int32)
        >>> spec = jq.QuantSpec(jnp.int8, jq.PerAxis(1), reduce_range=True)
        >>> jq.count_saturating_pairs(jq.quantize(w, spec))
        Array(0, dtype=int32)

    Source: Intel 64 instruction set reference, PMADDUBSW; ONNX Runtime 1.32, "Quantize ONNX models", "When and why do I
    need to try U8U8?".
    """
    codes = weights.codes if isinstance(weights, QuantizedArray) else weights
    checks.check_array(_NAME, "weights", codes, dtypes.QUANTIZED)
    checks.require(codes.ndim > 0, _NAME, "weights", "an array with an axis", "rank 0")
    axis = checks.check_axis(_NAME, contracting_axis, codes.ndim, "contracting_axis")
    if codes.dtype != _INT8 or (isinstance(weights, QuantizedArray) and weights.codebook is not None):
        return jnp.zeros((), jnp.int32)
    wide = jnp.moveaxis(jnp.asarray(codes), axis, 0).astype(jnp.int32)
    return jnp.sum(jnp.abs(wide[:-1] + wide[1:]) > dtypes.LARGEST_PAIR, dtype=jnp.int32)


def can_saturate(weight: QuantSpec, activation: QuantSpec) -> bool:
    """Return whether weights of a spec can saturate sums of products with activations of a spec."""
    is_pair = weight.dtype == _INT8 and activation.dtype == _UINT8
    return is_pair and 2 * max(-weight.bounds[0], weight.bounds[1]) > dtypes.LARGEST_PAIR
