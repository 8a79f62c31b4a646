"""The formulas of the gradient rules: the mask of x, the slopes and factors of scales, and stochastic rounding."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import scale_from_range
from .._arrays.codebook import Codebook
from .._arrays.spec import QuantSpec
from .._core import dtypes
from .._kernels import min_max, rounding
from .estimators import LSQ, PACT, LSQPlus, Rule, StochasticRounding, StraightThrough

_ZERO, _ONE = np.float32(0), np.float32(1)


class Codes(Protocol):
    """The attributes of a QuantSpec that masks and slopes depend on."""

    @property
    def dtype(self) -> Any:
        """The dtype of the codes, or a codebook."""
        ...

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest code."""
        ...

    @property
    def codebook(self) -> Codebook | None:
        """The codebook, or None for a dtype."""
        ...

    @property
    def fixed_zero_point(self) -> int | None:
        """The zero point that the codes fix, or None."""
        ...


def round_stochastically(value: jax.Array, key: Any) -> jax.Array:
    """Return float32 values rounded to an integer: up with a probability equal to their fraction, otherwise down."""
    below = lax.floor(value)
    # The fraction and its product with 2**32 are both exact. An infinity has no fraction; 0 leaves it unchanged.
    fraction = lax.mul(lax.sub(value, below), np.float32(2**32))
    fraction = lax.select(lax.is_finite(fraction), fraction, lax.full_like(fraction, 0))
    # float32 rounds a fraction within 2**-25 of 1 to 1. Its product is 2**32, which a uint32 cannot hold, so such a
    # value is rounded up without a sample.
    is_whole = lax.ge(fraction, np.float32(2**32))
    threshold = lax.convert_element_type(lax.min(fraction, np.float32(2**32 - 2**8)), jnp.uint32)
    rounds_up = lax.bitwise_or(is_whole, lax.lt(jax.random.bits(key, value.shape, jnp.uint32), threshold))
    return lax.select(rounds_up, lax.add(below, np.float32(1)), below)


def find_mask(rule: Rule, spec: Codes, u: jax.Array, steps: jax.Array | None) -> jax.Array | None:
    """Return a mask of the elements whose gradient passes to x, False for NaN; or None if all of them pass.

    Args:
        rule: Static. The estimator.
        spec: Static. How x is quantized.
        u: x / scale, float32.
        steps: the zero point, int32, in u's shape; None for 0.
    """
    if isinstance(rule, StraightThrough | StochasticRounding) and not rule.clip:
        return None
    low, high = (np.float32(b) for b in spec.bounds)
    if isinstance(rule, StraightThrough):
        if spec.codebook is not None:
            return (u >= low) & (u <= high)
        bounds = None if spec.dtype in dtypes.SMALL_FLOATS else (int(low), int(high))
        return rounding.find_in_range(u, steps, spec.dtype, bounds)
    # u + z would be rounded. Subtracting z from the bounds is exact, because they are whole numbers.
    least, most = (bound if steps is None else bound - steps.astype(jnp.float32) for bound in (low, high))
    if isinstance(rule, StochasticRounding):
        return (u >= least) & (u <= most)
    above = u >= least if isinstance(rule, PACT) and low == (spec.fixed_zero_point or 0) else u > least
    return above & (u < most)


def find_slopes(
    rule: Rule, spec: Codes, u: jax.Array, steps: jax.Array | None, distance: jax.Array
) -> tuple[jax.Array | None, jax.Array, bool]:
    """Return the mask of x, the summands of dy/dscale, and whether a zero point gets -scale where the mask is False.

    Args:
        rule: Static. The estimator.
        spec: Static. How x is quantized.
        u: x / scale, float32.
        steps: the zero point, int32, in u's shape; None for 0.
        distance: the number of steps of y, float32.
    """
    inside = find_mask(rule, spec, u, steps)
    if inside is None:
        return None, distance - u, False
    if isinstance(rule, PACT):
        return inside, jnp.where(inside, _ZERO, distance), False
    # Inside the range the slope is the rounding error; outside it is the number of steps to the end.
    ds = distance - jnp.where(inside, u, _ZERO)
    return inside, ds, not isinstance(rule, LSQ)


def find_factor(rule: Rule, spec: QuantSpec, x: jax.Array, shape: tuple[int, ...], steps: jax.Array | None) -> Any:
    """Return the factor of the gradient of a scale: a float32, or one for each entry of `shape`.

    Args:
        rule: Static. The estimator.
        spec: Static. How x is quantized.
        x: the values.
        shape: Static. The shape of the scale or of the zero point.
        steps: the zero point, int32; None for 0.
    """
    if not isinstance(rule, LSQ | LSQPlus):
        return _ONE
    count: Any = rule.elements
    if count is None:
        counts = np.maximum(min_max.count_members(x, shape, scale_from_range.find_block_size(spec)), 1)
        count = counts if counts.size and (counts != counts.flat[0]).any() else counts.max(initial=1)
    most = spec.bounds[1]
    if steps is None or isinstance(rule, LSQPlus):
        return np.asarray(1 / np.sqrt(count * most), np.float32)
    # If the zero point is finer than the scale, the largest number of steps among its entries counts.
    shared = tuple(a for a, (n, m) in enumerate(zip(steps.shape, shape, strict=True)) if m == 1 != n)
    reach = np.int32(most) - jnp.min(steps, axis=shared, keepdims=True)
    return lax.rsqrt(jnp.maximum(reach, 1).astype(jnp.float32) * np.asarray(count, np.float32))
