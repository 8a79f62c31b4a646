"""The arguments that both attention functions take, and their checks."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, sharding

_BOOL = np.dtype(np.bool_)
_BIASES = (*dtypes.FLOATS, *(np.dtype(name) for name in ("int32", "int16", "int8")))


def check_query_spec(function: str, argument: str, spec: Any) -> None:
    """Check that the codes of a spec can be contracted as integers."""
    checks.require_type(isinstance(spec, QuantSpec), function, argument, "a QuantSpec", checks.describe_value(spec))
    is_short = spec.dtype in dtypes.INTEGERS and dtypes.count_packed_bits(spec.dtype) <= 8
    checks.require_type(is_short, function, argument, "an integer dtype of 8 bits or fewer", spec.dtype)


def read_digits(function: str, value: Any) -> int:
    """Return the number of digits of a weight."""
    checks.check_integer(function, "weight_digits", value)
    checks.require(value in (1, 2, 3), function, "weight_digits", "1, 2 or 3", value)
    return int(value)


def read_factor(function: str, scale: Any, features: int) -> float:
    """Return what scores are multiplied by: a positive number, 1 / sqrt(features) for None."""
    if scale is None:
        return 1 / math.sqrt(max(features, 1))
    # A negative factor would be the scale of codes, which has no sign.
    checks.check_real(function, "scale", scale)
    checks.require(scale > 0, function, "scale", "a positive number", scale)
    return float(scale)


def read_mask(function: str, mask: Any, sizes: tuple[int, int, int, int]) -> jax.Array | None:
    """Return a mask with rank 4, after a check against (batch, heads, queries, tokens)."""
    if mask is None:
        return None
    checks.check_array(function, "mask", mask, (_BOOL,))
    return _expand_rank(function, "mask", mask, sizes)


def read_bias(function: str, bias: Any, sizes: tuple[int, int, int, int]) -> jax.Array | None:
    """Return a bias as floats with rank 4, after a check against (batch, heads, queries, tokens)."""
    if bias is None:
        return None
    checks.check_array(function, "bias", bias, _BIASES)
    bias = _expand_rank(function, "bias", bias, sizes)
    # Integers have no gradient.
    return bias if bias.dtype in dtypes.FLOATS else bias.astype(jnp.float32)


def _expand_rank(function: str, argument: str, value: jax.Array, sizes: tuple[int, int, int, int]) -> jax.Array:
    """Return an array with rank 4, after a check that it broadcasts against the sizes."""
    # `strict` is False, because leading dimensions may be missing, as in numpy.
    fits = value.ndim <= 4 and all(n in (1, m) for n, m in zip(value.shape[::-1], sizes[::-1], strict=False))
    expected = f"a shape that broadcasts against {sizes}: (batch, heads, queries, tokens)"
    checks.require(fits, function, argument, expected, f"shape {value.shape}")
    return jnp.reshape(value, (1,) * (4 - value.ndim) + value.shape)


def check_tokens_whole(function: str, argument: str, x: Any, axis: int) -> None:
    """Check that no explicit mesh axis cuts an array along its tokens.

    Their contraction would need an `out_sharding`, which JAX's own error asks for, and attention does not take.
    """
    expected = "tokens that no explicit mesh axis cuts (use jax.sharding.AxisType.Auto, or jax.sharding.reshard)"
    cut = sharding.read_partition(x)[axis]
    checks.require(cut is None, function, argument, expected, f"tokens cut over {cut!r}")


def ungroup_heads(y: jax.Array) -> jax.Array:
    """Return [batch, kv heads, groups, queries, features] as [batch, queries, heads, features]."""
    batch, heads, groups, queries, features = y.shape
    return lax.transpose(y.reshape(batch, heads * groups, queries, features), (0, 2, 1, 3))
