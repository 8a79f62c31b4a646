"""Biases as int32, in the steps of the sums that a contraction of codes adds them to.

A bias must fit into int32 together with the products that are added to it: int32 sums wrap around.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._arrays.quantized_array import QuantizedArray
from .._core import checks, dtypes
from .._core.entry_point import compile_entry_point, convert_float32_scale, read_elements
from .._core.granularity import Aligned
from .._kernels import accumulator, affine

_NAME = "codes.quantize_bias"
# XLA:CPU takes less than the least normal float32 for 0. Steps are float32, which has no 2**31 - 1.
_TINY, _LIMIT = float(np.finfo(np.float32).tiny), 2.0**31
_MOST = 2**31 - 1
_LARGEST_CODE = 255  # the largest distance of an 8-bit code from its zero point


def quantize_bias(bias: ArrayLike, lhs_scale: ArrayLike, rhs_scale: ArrayLike) -> jax.Array:
    """Return a bias in steps of the product of two scales, int32, as ONNX Runtime quantizes one.

    y = saturate(round_half_even(bias / (lhs_scale * rhs_scale)))

    The product and the quotient are rounded to float32, one after the other.

    Args:
        bias: float32, of any shape.
        lhs_scale: value per step of the activations, float32, one element. A Python number becomes float32.
        rhs_scale: value per step of the weights, float32: one element, or as many as the bias has, in its order.

    Returns:
        int32, of the bias's shape. NaN becomes 0.

    Raises:
        TypeError: an argument has an unsupported dtype.
        ValueError: a scale has another number of elements; or, if they are known, a bias has more steps than int32 can
            hold, or the product of two scales is less than 2**-126, the least normal float32.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> jq.codes.quantize_bias(jnp.array([0.125, -1.0, 0.375]), 0.5, jnp.array([0.5, 0.25, 0.5]))  # ties go to even
        Array([ 0, -8,  2], dtype=int32)

    Source: Jacob et al., arXiv 1712.05877, section 2.4; ONNX Runtime's fusion of QLinearConv.
    """
    scales = [convert_float32_scale(_NAME, n, s) for n, s in (("lhs_scale", lhs_scale), ("rhs_scale", rhs_scale))]
    return _quantize_bias(bias, *scales)


@compile_entry_point(_NAME)
def _quantize_steps(bias: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the bias in steps, and the products of the scales."""
    checks.check_array(_NAME, "bias", bias, (dtypes.FLOAT32,))
    for argument, scale in (("lhs_scale", lhs_scale), ("rhs_scale", rhs_scale)):
        checks.check_array(_NAME, argument, scale, (dtypes.FLOAT32,))
        sizes = (1,) if argument == "lhs_scale" else (1, bias.size)
        expected = "one element" if argument == "lhs_scale" else f"one element or {bias.size}, as the bias has"
        checks.require(scale.size in sizes, _NAME, argument, expected, f"shape {scale.shape}")
    products = accumulator.multiply_scales(lhs_scale.reshape(1), rhs_scale.reshape(-1))
    wide = jnp.broadcast_to(products, (bias.size,)).reshape(bias.shape)
    steps = lax.round(affine.divide(bias, wide), lax.RoundingMethod.TO_NEAREST_EVEN)
    return steps, products


def _quantize_bias(bias: Any, lhs_scale: Any, rhs_scale: Any) -> jax.Array:
    steps, _ = _quantize_steps(bias, lhs_scale, rhs_scale)
    _count_known_steps(_NAME, bias, lhs_scale, rhs_scale)
    return steps.astype(jnp.int32)  # XLA's conversion saturates


def quantize_added_bias(
    function: str, bias: jax.Array, lhs_scale: jax.Array, weight: QuantizedArray, rhs_scale: jax.Array,
    places: Sequence[int],
) -> jax.Array:  # fmt: skip
    """Return a bias as `quantize_bias` does, for sums of products of 8-bit codes, which it does not make wrap around.

    Args:
        function: the public function that errors name.
        bias: float32, of the features.
        lhs_scale: the scale of the activations.
        weight: the other operand.
        rhs_scale: its scale: one element, or one for each feature.
        places: the axes of the weight that are features, in the bias's order.

    Returns:
        int32. A bias that is not known, and too large, saturates.

    Raises:
        ContractValueError: the arrays are known, and a sum may have more steps than int32 holds.
    """
    steps, _ = _quantize_steps(bias, lhs_scale, rhs_scale)
    free = derive_free_steps(weight, places)
    known = _count_known_steps(function, bias, lhs_scale, rhs_scale)
    if known is None:
        return steps.astype(jnp.int32) if free is None else lax.clamp(-np.int32(free), steps.astype(jnp.int32), free)
    if free is not None:
        most = float(np.abs(known).max(initial=0))
        _require_fit(function, bool(most <= free), f"{free} steps of the scales' product beside these products", most)
    elif not checks.is_traced(weight.stored_codes):
        with jax.ensure_compile_time_eval():
            products = np.asarray(compute_largest_sums(weight, places), np.float64).reshape(known.shape)
        most = float((np.abs(known) + products).max(initial=0))
        _require_fit(function, most <= _MOST, "2**31 - 1 steps of the scales' product", most)
    return steps.astype(jnp.int32)


def _require_fit(function: str, condition: bool, limit: str, most: float) -> None:
    expected = f"a bias that fits into int32 together with the products, at most {limit}"
    got = f"{most:.6g} steps; convert the parameters with their ranges, which enlarges the scales of the weights"
    checks.require(condition, function, "bias", expected, got)


def derive_free_steps(weight: QuantizedArray, places: Sequence[int]) -> np.int32 | None:
    """Return the steps that int32 leaves to a bias beside any products of 8-bit codes; None if less than half of all.

    Known and traced biases have the same limit, which is not that of the codes: to read these in each call takes long.
    A sum of so many products that they need more than half of int32 is limited by its codes, where they are known.

    Args:
        weight: the codes; only their shape matters.
        places: its axes that are features.
    """
    terms = math.prod(n for axis, n in enumerate(weight.shape) if axis not in places)
    free = _MOST - terms * _LARGEST_CODE * _LARGEST_CODE
    return np.int32(free) if free >= _MOST // 2 else None


def compute_largest_sums(weight: QuantizedArray, places: Sequence[int]) -> jax.Array:
    """Return the largest magnitude that the sum of the products with 8-bit codes can have, for each feature, float32.

    Args:
        weight: the codes.
        places: its axes that are features; the result has them in this order.
    """
    codes = weight.codes.astype(jnp.int32)
    if weight.zero_point is not None:
        codes = codes - Aligned(weight.block_size).expand(weight.zero_point.astype(jnp.int32), codes)
    rest = tuple(axis for axis in range(codes.ndim) if axis not in places)
    # float32, because the product of a long sum does not fit into int32.
    sums = jnp.sum(jnp.abs(codes), axis=rest).astype(jnp.float32) * np.float32(_LARGEST_CODE)
    kept = sorted(places)
    return lax.transpose(sums, [kept.index(axis) for axis in places])


def _count_known_steps(function: str, bias: Any, lhs_scale: Any, rhs_scale: Any) -> np.ndarray | None:
    """Return the steps of a bias, or None if an array is not known; raise if int32 cannot hold them."""
    # Not from the results of the compiled function, which are traced in another one even if the arguments are known.
    known = [read_elements(value) for value in (bias, lhs_scale, rhs_scale)]
    if any(value is None for value in known):
        return None
    values, left, right = (np.asarray(value, np.float32) for value in known)
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        products = left.reshape(1) * right.reshape(-1)
        steps = np.rint(values / np.broadcast_to(products, (values.size,)).reshape(values.shape))
    expected = "scales whose product is at least 2**-126, the least normal float32"
    least = float(products.min(initial=np.inf))
    checks.require(not least < _TINY, function, "lhs_scale, rhs_scale", expected, f"{least}")
    most = float(np.abs(np.nan_to_num(steps, nan=0, posinf=np.inf)).max(initial=0))
    expected = "biases of at most 2**31 steps of the product of the scales (a larger scale, or a float bias)"
    checks.require(not most > _LIMIT, function, "bias", expected, f"{most} steps")
    return np.nan_to_num(steps, nan=0).astype(np.float64)
