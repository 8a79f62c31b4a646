"""The gradients that a rounding can be given, one frozen dataclass each. Knows formulas; knows nothing of calls."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import scale_from_range
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, granularity, min_max, rounding
from ..calibration import mse

_ZERO, _ONE = np.float32(0), np.float32(1)


@dataclasses.dataclass(frozen=True)
class StraightThrough:
    """dx = g * m, with m = [qmin <= round_half_even(x / scale) + zero_point <= qmax], or 1 without `clip`.

    Rounding counts as the identity. The mask is that of the integers themselves, both bounds included.

    Attributes:
        clip: whether what saturates has no gradient. Without it the clipping, too, counts as the identity.

    Source: Bengio et al., arXiv 1308.3432, section 4, for the estimator; Jacob et al., arXiv 1712.05877, section 3, for
    quantization; Jain et al., arXiv 1903.08066, section 3, for the scale.

    Cotangents, with u = x / scale, z = the zero point, d = the steps that y has, y = d * scale:
    Cotangent of x: g * m. Of scale: sum of g * (d - m * u). Of a float32 zero_point: sum of -g * (1 - m) * scale.
    """

    clip: bool = True

    def __post_init__(self) -> None:
        """Refuses what is no flag."""
        checks.check_flag("StraightThrough", "clip", self.clip)


@dataclasses.dataclass(frozen=True)
class LSQ:
    """dscale = sum of g * (round(u) - u if -QN < u < QP, else -QN or QP) / sqrt(N * QP), with u = x / scale.

    Learned step size. QN and QP are the steps from the zero point to the spec's least and largest code.

    Attributes:
        elements: N, the elements that the gradient of a scale is a sum of: of weights all that share the scale, which
            None stands for; of activations the paper counts the features of one example, not the whole batch.

    Source: Esser et al., arXiv 1902.08153: equations 3 and 5, in sections 2.1 and 2.3, and section 2.2 for the factor.

    Cotangent of x: g * [-QN < u < QP], strictly, on what is not yet rounded. Of scale: as above. A zero point has none.
    """

    elements: int | None = None

    def __post_init__(self) -> None:
        """Refuses what is no count."""
        _check_elements("LSQ", self.elements)

    def initial(self, x: jax.Array, spec: QuantSpec) -> tuple[jax.Array, jax.Array | None]:
        """Returns (scale, zero_point) to start from: scale = 2 * mean(abs(x)) / sqrt(QP), slice by slice.

        Args:
            x: values, float32, float16 or bfloat16.
            spec: Static. Symmetric, or unsigned for values that are not negative; the zero point is then 0.

        Returns:
            A float32 scale of x's rank, and the zero point that the spec fixes: 0 as None.

        Raises:
            TypeError, ValueError: as of `quantize`.

        Source: Esser et al., arXiv 1902.08153, section 2.1.
        """
        scale_shape, point_shape = _check_shapes("LSQ.initial", x, spec)
        fixed = spec.fixed_zero_point or 0
        (mean,) = _find_means(spec, scale_shape, jnp.abs(x.astype(jnp.float32)))
        scale = _make_positive(2 * mean / np.float32(np.sqrt(spec.bounds[1] - fixed)), mean)
        if spec.symmetric:
            return scale, jnp.full(point_shape, fixed, spec.carrier) if fixed else None
        return scale, jnp.zeros(point_shape, spec.carrier)


@dataclasses.dataclass(frozen=True)
class LSQPlus:
    """dzero_point = sum of -g * scale * [x / scale + zero_point outside (qmin, qmax)] / sqrt(N * qmax).

    Learned step size and learned offset. The paper's offset beta is real; that of an integer runtime counts whole
    steps. It is learned as a float32 zero point, beta = -zero_point * scale, which is rounded on the way forward; the
    cotangents are the paper's under that change of variables.

    Attributes:
        elements: N, as of `LSQ`.

    Source: Bhalgat et al., arXiv 2004.09576, section 3.1, and 3.2 for the start.

    Cotangents, with u = x / scale, z = the rounded zero point, d = the steps that y has, y = d * scale, and
    m = [qmin < u + z < qmax], strictly, on what is not yet rounded:
    Cotangent of x: g * m. Of scale: sum of g * (d - m * u) / sqrt(N * qmax). Of zero_point: as above.
    """

    elements: int | None = None

    def __post_init__(self) -> None:
        """Refuses what is no count."""
        _check_elements("LSQPlus", self.elements)

    def initial(self, x: jax.Array, spec: QuantSpec) -> tuple[jax.Array, jax.Array | None]:
        """Returns (scale, zero_point) to start from: symmetric scale = max(abs(mean -+ 3 deviations)) / 2**(bits - 1).

        Asymmetric: those of the range of least mean squared error, as `mse` finds it.

        Args:
            x: values, float32, float16 or bfloat16.
            spec: Static. How to quantize; the paper takes symmetric ones for weights, others for activations.

        Returns:
            A float32 scale of x's rank, and a float32 zero point, or the one that the spec fixes.

        Raises:
            TypeError, ValueError: as of `quantize`.

        Source: Bhalgat et al., arXiv 2004.09576, section 3.2.
        """
        scale_shape, point_shape = _check_shapes("LSQPlus.initial", x, spec)
        if not spec.symmetric:
            calibrator = mse(spec)
            low, high = calibrator.finalize(calibrator.update(calibrator.init(x), x), allow_zero=True)
            scale, point = scale_from_range.find_scale_and_zero_point(spec, low, high, scale_shape, point_shape)
            assert point is not None
            return scale.astype(jnp.float32), point.astype(jnp.float32)
        values = x.astype(jnp.float32)
        mean, square = _find_means(spec, scale_shape, values, values * values)
        deviation = jnp.sqrt(jnp.maximum(square - mean * mean, _ZERO))
        steps = 2.0 ** (dtypes.find_width(spec.carrier) - 1) if spec.dtype in dtypes.INTEGERS else spec.bounds[1]
        reach = jnp.maximum(jnp.abs(mean - 3 * deviation), jnp.abs(mean + 3 * deviation))
        fixed = spec.fixed_zero_point
        point = jnp.full(point_shape, fixed, spec.carrier) if fixed else None
        return _make_positive(reach / np.float32(steps), reach), point


@dataclasses.dataclass(frozen=True)
class PACT:
    """dalpha = sum of g * [x >= alpha], with alpha = scale * QP the clip that is learned; of scale QP times that.

    Parameterized clipping activation, for values from 0 to alpha in unsigned codes with the zero point 0. Of other
    codes both ends count, with QN steps below the zero point: dscale = sum of g * (QP * [x >= scale * QP] - QN *
    [x <= -scale * QN]). The paper's penalty on alpha belongs into the loss.

    Source: Choi et al., arXiv 1805.06085, section 3, equations 1 to 3.

    Cotangent of x: g * [0 <= x < alpha], of other codes g * [-scale * QN < x < alpha]. Of scale: QP * dalpha, or as
    above. A zero point has none, and is the one that the spec fixes, or 0.
    """

    def initial(self, x: jax.Array, spec: QuantSpec) -> tuple[jax.Array, jax.Array | None]:
        """Returns (scale, zero_point) to start from: scale = max(abs(x)) / QP, slice by slice.

        Args:
            x: values, float32, float16 or bfloat16.
            spec: Static. Signed, or unsigned with the zero point 0, which it is given here.

        Returns:
            A float32 scale of x's rank, and a zero point of 0: None where the spec fixes it.

        Raises:
            TypeError, ValueError: as of `quantize`.

        Source: Choi et al., arXiv 1805.06085, section 3: alpha starts above most of what comes.
        """
        scale_shape, point_shape = _check_shapes("PACT.initial", x, spec)
        low, high = min_max.find_extremes(x, scale_shape, scale_from_range.find_block_size(spec))
        reach = jnp.maximum(jnp.maximum(-low, high), _ZERO)  # an x without elements has the range (inf, -inf)
        scale = _make_positive(reach / np.float32(spec.bounds[1] - (spec.fixed_zero_point or 0)), reach)
        return scale, None if spec.symmetric else jnp.zeros(point_shape, spec.carrier)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["key"], meta_fields=["clip"])
@dataclasses.dataclass(frozen=True)
class StochasticRounding:
    """r = floor(u) + [a draw from [0, 1) < u - floor(u)], with u = x / scale: unbiased, straight through coming back.

    A pytree, whose key is its only leaf. One draw for each element, to 32 bits: a fraction of less than 2**-32 rounds
    down. Integer dtypes only.

    Attributes:
        key: of `jax.random`.
        clip: Static. Whether what saturates has no gradient.

    Source: Gupta et al., arXiv 1502.02551, section 3.

    Cotangents: as of `StraightThrough`, with m = [qmin <= u + z <= qmax], on what is not yet rounded.
    """

    key: Any
    clip: bool = True


Rule = StraightThrough | LSQ | LSQPlus | PACT | StochasticRounding


def check_estimator(function: str, argument: str, rule: Any, spec: QuantSpec, zero_point: Any) -> None:
    """Requires a rule, and one that the spec's codes and the zero point have."""
    names = "StraightThrough(), LSQ(), LSQPlus(), PACT() or StochasticRounding(key)"
    checks.require_type(isinstance(rule, Rule), function, argument, names, checks.describe_value(rule))
    if isinstance(rule, StochasticRounding):
        is_key, got = checks.is_key(rule.key), checks.describe_value(rule.key)
        checks.require_type(is_key, function, f"{argument}.key", "one key of jax.random", got)
        checks.check_flag(function, f"{argument}.clip", rule.clip)
        expected = f"another rule: {spec.dtype} has no neighbours one step apart"
        checks.require_type(spec.dtype in dtypes.INTEGERS, function, argument, expected, "StochasticRounding")
    if isinstance(rule, PACT) and isinstance(zero_point, jax.Array | np.ndarray | np.generic):
        fixed, point = spec.fixed_zero_point or 0, argument.replace("gradient", "zero_point")
        expected = f"{fixed} in {spec.carrier}, for PACT() does not learn it; LSQPlus() does"
        holds = zero_point.dtype != dtypes.FLOAT32
        holds = holds and (checks.is_traced(zero_point) or bool((np.asarray(zero_point) == fixed).all()))
        checks.require(holds, function, point, expected, checks.describe_value(zero_point))


def round_stochastically(value: jax.Array, key: Any) -> jax.Array:
    """Returns float32 values rounded to an integer below or above, above as often as they lie near it."""
    below = lax.floor(value)
    # Both exact: the distance to an integer, and 2**32 times it. What is none, of an infinity, is no draw.
    part = lax.mul(lax.sub(value, below), np.float32(2**32))
    part = lax.select(lax.is_finite(part), part, lax.full_like(part, 0))
    # Less than 2**-25 below an integer the distance rounds to 1: up for sure, and nothing that a uint32 holds.
    sure = lax.ge(part, np.float32(2**32))
    part = lax.convert_element_type(lax.min(part, np.float32(2**32 - 2**8)), jnp.uint32)
    up = lax.bitwise_or(sure, lax.lt(jax.random.bits(key, value.shape, jnp.uint32), part))
    return lax.select(up, lax.add(below, np.float32(1)), below)


def find_mask(rule: Rule, spec: QuantSpec, u: jax.Array, steps: jax.Array | None) -> jax.Array | None:
    """Returns where the gradient passes through to x, or None for everywhere. False for NaN.

    Args:
        rule: Static. Which gradient.
        spec: Static. How x is quantized.
        u: x / scale, float32.
        steps: int32 zero point in u's shape, or None for 0.
    """
    if isinstance(rule, StraightThrough | StochasticRounding) and not rule.clip:
        return None
    low, high = (np.float32(b) for b in spec.bounds)
    if isinstance(rule, StraightThrough):
        if spec.codebook is not None:
            return (u >= low) & (u <= high)
        bounds = None if spec.dtype in dtypes.SMALL_FLOATS else (int(low), int(high))
        return rounding.find_in_range(u, steps, spec.dtype, bounds)
    # u + z would round: the bounds move instead, and they are whole numbers.
    least, most = (b if steps is None else b - steps.astype(jnp.float32) for b in (low, high))
    if isinstance(rule, StochasticRounding):
        return (u >= least) & (u <= most)
    above = u >= least if isinstance(rule, PACT) and low == (spec.fixed_zero_point or 0) else u > least
    return above & (u < most)


def find_slopes(
    rule: Rule, spec: QuantSpec, u: jax.Array, steps: jax.Array | None, distance: jax.Array
) -> tuple[jax.Array | None, jax.Array, jax.Array | None]:
    """Returns dy/dx, the summands of dy/dscale and of dy/dzero_point over scale; None is 1, and 0 for the last.

    Args:
        rule: Static. Which gradient.
        spec: Static. How x is quantized.
        u: x / scale, float32.
        steps: int32 zero point in u's shape, or None for 0.
        distance: float32, how many steps y has.
    """
    inside = find_mask(rule, spec, u, steps)
    if inside is None:
        return None, distance - u, None
    if isinstance(rule, PACT):
        return inside, jnp.where(inside, _ZERO, distance), None
    ds = distance - jnp.where(inside, u, _ZERO)
    return inside, ds, None if isinstance(rule, LSQ) else jnp.where(inside, _ZERO, -_ONE)


def find_factor(rule: Rule, spec: QuantSpec, x: jax.Array, shape: tuple[int, ...], steps: jax.Array | None) -> Any:
    """Returns what the paper multiplies the gradient of a scale with: a float32, or one for each entry of `shape`.

    Args:
        rule: Static. Which gradient.
        spec: Static. How x is quantized.
        x: the values.
        shape: Static. That of the scale, or of the zero point.
        steps: int32 zero point, or None for 0.
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
    # A zero point may be finer than the scale; the farthest end then counts.
    shared = tuple(a for a, (n, m) in enumerate(zip(steps.shape, shape, strict=True)) if m == 1 != n)
    reach = np.int32(most) - jnp.min(steps, axis=shared, keepdims=True)
    return lax.rsqrt(jnp.maximum(reach, 1).astype(jnp.float32) * np.asarray(count, np.float32))


def _check_elements(rule: str, elements: Any) -> None:
    if elements is not None:
        checks.check_integer(rule, "elements", elements)
        checks.require(elements > 0, rule, "elements", "None or a positive int", elements)


def _check_shapes(function: str, x: Any, spec: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    checks.check_array(function, "x", x, dtypes.FLOATS)
    checks.require_type(isinstance(spec, QuantSpec), function, "spec", "a QuantSpec", checks.describe_value(spec))
    return scale_from_range.find_shapes(function, spec, x.shape)


def _find_means(spec: QuantSpec, shape: tuple[int, ...], *values: jax.Array) -> list[jax.Array]:
    """Returns the means of float32 arrays over the slices that share a scale."""
    aligned = granularity.Aligned(scale_from_range.find_block_size(spec))
    counts = np.maximum(min_max.count_members(values[0], shape, aligned.block_size), 1).astype(np.float32)
    like = jnp.zeros(shape, jnp.float32)
    return [granularity.sum_to_scale(aligned, v, like) / counts for v in values]


def _make_positive(scale: jax.Array, reach: jax.Array) -> jax.Array:
    """Returns a scale that is 1 where there was nothing to take it from, and a normal float32 elsewhere."""
    tiny = np.finfo(np.float32).tiny
    return jnp.where(jnp.abs(reach) < tiny, _ONE, jnp.maximum(scale, tiny))
