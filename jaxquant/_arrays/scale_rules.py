"""How scales that are powers of two are chosen: the rules of the MX formats' producers, from the bits of the range.

A scale 2**e of a format with the largest value `largest` and the largest exponent `emax` (6 and 2 for float4_e2m1fn)
follows from the largest magnitude `amax` of its elements. OCP's rule takes the power of two of amax, rounded down, so
that values beyond largest * 2**e saturate; the others differ in where they go to the next power of two. All of them
only look at the exponent and the digits of amax, so they are computed from its bits, exactly. A producer that computes
a logarithm in float32 may be off next to a power of two.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import dtypes, recording

ScaleRule = Literal["rceil", "floor", "ceil", "even", "nearest", "compressed_tensors", "modelopt"]
Ties = Literal["even", "toward_zero"]
# The rules for powers of two, and the rules for scales that are quantized themselves.
RULES: tuple[str, ...] = get_args(ScaleRule)[:-1]
NESTED_RULES: tuple[str, ...] = ("modelopt", "compressed_tensors")
TIES: tuple[str, ...] = get_args(Ties)

_ONE_BITS = 1 << 23  # the lowest bit of a float32's exponent
# The digits of the least float32 above the square root of 2: the logarithm of no float is halfway between two integers.
_ROOT_DIGITS = 0x3504F4


@recording.mark("compute_power", lambda largest, **_: (largest.shape, jnp.float32), recording.map_elements)
def compute_power(rule: str, largest: jax.Array, scale: jax.Array, codes: np.dtype, dtype: np.dtype) -> jax.Array:
    """Return the power of two of a rule, float32, in the shape of the ranges.

    The result is at most the power at which the largest finite code is still a finite number of `dtype`.

    Args:
        rule: Static. Any rule but "rceil".
        largest: the largest magnitude of each range, float32, a normal number, an infinity or NaN.
        scale: largest / the largest code, which an infinite or NaN range keeps.
        codes: Static. The dtype of the codes.
        dtype: Static. The dtype of the dequantized values.
    """
    form = describe_power(rule, codes, dtype)
    bits = lax.bitcast_convert_type(scale if form.is_quotient else largest, jnp.int32)
    exponent = ((bits + np.int32(form.added)) >> 23) - np.int32(form.lowered)
    power = lax.bitcast_convert_type(jnp.clip(exponent, 1, form.most) << 23, jnp.float32)
    return jnp.where(jnp.isfinite(scale), power, scale)


class PowerForm(NamedTuple):
    """How a rule finds the exponent of its power of two.

    Attributes:
        is_quotient: whether it reads amax / largest, and not amax.
        added: what it adds to the bits before it reads the exponent field.
        lowered: what it subtracts from the field.
        most: the largest field of a power.
    """

    is_quotient: bool
    added: int
    lowered: int
    most: int


def describe_power(rule: str, codes: np.dtype, dtype: np.dtype) -> PowerForm:
    """Return how a rule finds a power of two; see `compute_power`."""
    is_float = codes in dtypes.SMALL_FLOATS
    reach = dtypes.read_largest(codes) if is_float else dtypes.read_bounds(codes)[1]
    emax = math.floor(math.log2(reach))
    most = min(int(jnp.finfo(dtype).maxexp) - 1 - emax + 127, 254)
    if rule == "nearest":
        return PowerForm(True, _ONE_BITS - _ROOT_DIGITS, 0, most)
    added = {
        "floor": 0,
        "ceil": _ONE_BITS - 1,
        # Half a step of the format: amax goes up if it would round to the next power of two.
        "even": _ONE_BITS >> (int(jnp.finfo(codes).nmant) + 1) if is_float else 0,
        # Half a step of E2M1, whatever the format.
        "compressed_tensors": _ONE_BITS >> 2,
    }[rule]
    return PowerForm(False, added, emax, most)


@recording.mark(
    "encode_ties_toward_zero", lambda value: (value.shape, jnp.float4_e2m1fn), recording.map_elements
)  # fmt: skip
def encode_ties_toward_zero(value: jax.Array) -> jax.Array:
    """Return float32 values as float4_e2m1fn, with a value halfway between two codes rounded to the smaller magnitude.

    NaN becomes -0, as in `dtypes.encode_small_float`.
    """
    size = lax.abs(value)
    code = jnp.zeros(value.shape, jnp.int32)
    for middle in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
        code = code + (size > np.float32(middle)).astype(jnp.int32)
    is_negative = (lax.bitcast_convert_type(value, jnp.int32) < 0) | jnp.isnan(value)
    code = code + jnp.where(is_negative, 8, 0)
    return lax.bitcast_convert_type(code.astype(jnp.uint4), jnp.float4_e2m1fn)
