"""The gradient rules of fake quantization, one frozen dataclass each, with their initial values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import scale_from_range
from .._arrays.saved_programs import register_tree
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, granularity
from .._kernels import affine, min_max
from ..calibration import mse

_ZERO, _ONE = np.float32(0), np.float32(1)
_LARGEST = np.finfo(np.float32).max
_ALMOST_ONE = 1 - 2.0**-22
_SHRINK = np.float32(2.0**-100)  # no squares of numbers that are multiplied by this overflow, nor do their sums


@dataclasses.dataclass(frozen=True)
class StraightThrough:
    """The straight-through estimator: rounding has the gradient of the identity, clipping has the gradient 0.

    dx = g * m, with m = 1 where qmin <= round_half_even(x / scale) + zero_point <= qmax, and 0 elsewhere

    The mask m is computed from the rounded integers and includes both bounds.

    Attributes:
        clip: whether elements that saturate have the gradient 0. False makes m 1 everywhere, so that clipping, too, has
            the gradient of the identity.

    Raises:
        TypeError: clip is not True or False.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x, spec = jnp.array([-9.0, 0.25, 9.0]), jq.QuantSpec(jnp.int4)
        >>> jax.grad(lambda x: jq.fake_quantize(x, spec, 0.5, gradient=jq.StraightThrough()).sum())(x)
        Array([0., 1., 0.], dtype=float32)
        >>> jax.grad(lambda x: jq.fake_quantize(x, spec, 0.5, gradient=jq.StraightThrough(clip=False)).sum())(x)
        Array([1., 1., 1.], dtype=float32)

    Source: Bengio et al., arXiv 1308.3432, section 4, for the estimator; Jacob et al., arXiv 1712.05877, section 3, for
    quantization; Jain et al., arXiv 1903.08066, section 3, for the scale.

    Cotangents, with u = x / scale, z = zero_point, and d = the number of steps of y, so that y = d * scale:
    Cotangent of x: g * m. Of scale: sum of g * (d - m * u). Of a float32 zero_point: sum of -g * (1 - m) * scale.
    """

    clip: bool = True

    def __post_init__(self) -> None:
        """Check the flag."""
        checks.check_flag("StraightThrough", "clip", self.clip)


@dataclasses.dataclass(frozen=True)
class LSQ:
    """Learned step size quantization (LSQ): the scale is a parameter with a scaled gradient.

    dscale = sum of g * s / sqrt(N * QP), with u = x / scale and s = round(u) - u where -QN < u < QP, -QN where
    u <= -QN, and QP where u >= QP

    QN and QP are the numbers of steps from the zero point to the lowest and to the highest code of the spec.

    Attributes:
        elements: N, the number of elements that the gradient of one scale sums over. None counts all elements that
            share the scale, which is right for weights. For activations, the paper counts the features of one example,
            not of the whole batch: pass that number.

    Raises:
        TypeError: elements is not None or an int.
        ValueError: elements is not positive.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x, spec = jnp.array([-9.0, 0.3, 0.9]), jq.QuantSpec(jnp.int4)  # -18, 0.6 and 1.8 steps of 0.5
        >>> dscale = jax.grad(lambda scale: jq.fake_quantize(x, spec, scale, gradient=jq.LSQ()).sum())
        >>> dscale(jnp.float32(0.5)).round(4)  # (-7 + 0.4 + 0.2) / sqrt(3 * 7)
        Array(-1.3966, dtype=float32)

    Source: Esser et al., arXiv 1902.08153: equations 3 and 5 in sections 2.1 and 2.3, and section 2.2 for the factor.

    Cotangent of x: g where -QN < u < QP, strictly and before rounding, and 0 elsewhere. Of scale: as above. Of
    zero_point: 0.
    """

    elements: int | None = None

    def __post_init__(self) -> None:
        """Check the number of elements."""
        _check_elements("LSQ", self.elements)

    def initial(self, x: jax.Array, spec: QuantSpec) -> tuple[jax.Array, jax.Array | None]:
        """Return the initial (scale, zero_point) for training.

        scale = 2 * mean(abs(x)) / sqrt(QP), for each slice that shares a scale

        Args:
            x: the values, float32, float16 or bfloat16.
            spec: Static. How to quantize: symmetric; or unsigned with the zero point 0, for values that are not
                negative.

        Returns:
            A float32 scale of x's rank, and the zero point, which is None if the spec fixes it to 0.

        Raises:
            TypeError: x has an unsupported dtype, or spec is not a QuantSpec.
            ValueError: the granularity of the spec does not fit x.

        Source: Esser et al., arXiv 1902.08153, section 2.1.
        """
        scale_shape, point_shape = _check_shapes("LSQ.initial", x, spec)
        fixed = spec.fixed_zero_point or 0
        root = np.float32(np.sqrt(spec.bounds[1] - fixed))

        def compute_scale(values: jax.Array) -> tuple[jax.Array, jax.Array]:
            (mean,) = _compute_means(spec, scale_shape, jnp.abs(values))
            return 2 * mean / root, mean

        scale = _make_positive(*_compute_finite(compute_scale, x))
        # None represents 0 where the spec fixes it; an asymmetric spec needs an array.
        if spec.symmetric:
            return scale, jnp.full(point_shape, fixed, spec.carrier) if fixed else None
        return scale, jnp.zeros(point_shape, spec.carrier)


@dataclasses.dataclass(frozen=True)
class LSQPlus:
    """Learned step size and offset quantization (LSQ+): the scale and a float32 zero point are parameters.

    dzero_point = sum of -g * scale / sqrt(N * qmax) over the elements with x / scale + zero_point outside (qmin, qmax)

    The offset beta of the paper is a real number, but integer runtimes need a zero point in whole steps. So the offset
    is learned as a float32 zero point, beta = -zero_point * scale, which the forward pass rounds. The cotangents are
    the paper's after this change of variables.

    Attributes:
        elements: N, as in `LSQ`.

    Raises:
        TypeError: elements is not None or an int.
        ValueError: elements is not positive.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x, spec = jnp.array([-2.0, 0.3, 9.0]), jq.QuantSpec(jnp.uint4)
        >>> fake = lambda zero_point: jq.fake_quantize(x, spec, jnp.float32(0.5), zero_point, jq.LSQPlus())
        >>> fake(jnp.float32(2.0))  # codes 0, 3 and 15
        Array([-1. ,  0.5,  6.5], dtype=float32)
        >>> jax.grad(lambda zero_point: fake(zero_point).sum())(jnp.float32(2.0)).round(1)  # 2 * -0.5 / sqrt(3 * 15)
        Array(-0.1, dtype=float32)

    Source: Bhalgat et al., arXiv 2004.09576, section 3.1, and section 3.2 for the initial values.

    Cotangents, with u = x / scale, z = the rounded zero point, d = the number of steps of y, so that y = d * scale, and
    m = 1 where qmin < u + z < qmax, strictly and before rounding, and 0 elsewhere:
    Cotangent of x: g * m. Of scale: sum of g * (d - m * u) / sqrt(N * qmax). Of zero_point: as above.
    """

    elements: int | None = None

    def __post_init__(self) -> None:
        """Check the number of elements."""
        _check_elements("LSQPlus", self.elements)

    def initial(self, x: jax.Array, spec: QuantSpec) -> tuple[jax.Array, jax.Array | None]:
        """Return the initial (scale, zero_point) for training.

        For a symmetric spec, scale = max(abs(mean - 3 * deviation), abs(mean + 3 * deviation)) / 2**(bits - 1), for
        each slice that shares a scale. For any other spec, they are the scale and the zero point of the range with the
        least mean squared error, as `mse` finds it.

        Args:
            x: the values, float32, float16 or bfloat16.
            spec: Static. How to quantize. The paper uses symmetric specs for weights and asymmetric ones for
                activations.

        Returns:
            A float32 scale of x's rank, and a float32 zero point, or the one that the spec fixes.

        Raises:
            TypeError: x has an unsupported dtype, or spec is not a QuantSpec.
            ValueError: the granularity of the spec does not fit x; or, for an asymmetric spec, a slice of x has no
                elements, a NaN or an infinity.

        Source: Bhalgat et al., arXiv 2004.09576, section 3.2.
        """
        scale_shape, point_shape = _check_shapes("LSQPlus.initial", x, spec)
        if not spec.symmetric:
            calibrator = mse(spec)
            # A slice of zeros is a valid start: it gets scale 1.
            with checks.name_errors("LSQPlus.initial"):
                low, high = calibrator.finalize(calibrator.update(calibrator.init(x), x), allow_zero=True)
            scale, point = scale_from_range.compute_scale_and_zero_point(spec, low, high, scale_shape, point_shape)
            assert point is not None
            return scale.astype(jnp.float32), point.astype(jnp.float32)
        steps = 2.0 ** (spec.bits - 1) if dtypes.is_integer(spec.dtype) else spec.bounds[1]

        def compute_scale(values: jax.Array) -> tuple[jax.Array, jax.Array]:
            mean, square = _compute_means(spec, scale_shape, values, values * values)
            # Rounding can make the difference slightly negative.
            deviation = jnp.sqrt(jnp.maximum(square - mean * mean, _ZERO))
            reach = jnp.maximum(jnp.abs(mean - 3 * deviation), jnp.abs(mean + 3 * deviation))
            return reach / np.float32(steps), reach

        fixed = spec.fixed_zero_point
        point = jnp.full(point_shape, fixed, spec.carrier) if fixed else None
        return _make_positive(*_compute_finite(compute_scale, x)), point


@dataclasses.dataclass(frozen=True)
class PACT:
    """Parameterized clipping activation (PACT): the largest representable value is a parameter.

    dalpha = sum of g over the elements with x >= alpha, where alpha = scale * QP, so that dscale = QP * dalpha

    PACT is for values from 0 to alpha in unsigned codes with the zero point 0. For other codes both ends count, and
    dscale = sum of g * QP where x >= scale * QP, minus sum of g * QN where x <= -scale * QN. QN and QP are the numbers
    of steps from the zero point to the lowest and to the highest code. The paper adds a penalty on alpha to the loss;
    this rule does not, so add it yourself.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x, spec = jnp.array([-1.0, 0.3, 9.0]), jq.QuantSpec(jnp.uint4)
        >>> fake = lambda scale: jq.fake_quantize(x, spec, scale, 0, jq.PACT())
        >>> fake(jnp.float32(0.5))  # alpha = 7.5
        Array([0. , 0.5, 7.5], dtype=float32)
        >>> jax.grad(lambda scale: fake(scale).sum())(jnp.float32(0.5))
        Array(15., dtype=float32)

    Source: Choi et al., arXiv 1805.06085, section 3, equations 1 to 3.

    Cotangent of x: g where 0 <= x < alpha, and 0 elsewhere; for other codes g where -scale * QN < x < alpha. Of scale:
    as above. zero_point has none; it must be the one that the spec fixes, or 0.
    """

    def initial(self, x: jax.Array, spec: QuantSpec) -> tuple[jax.Array, jax.Array | None]:
        """Return the initial (scale, zero_point) for training.

        scale = max(abs(x)) / QP, for each slice that shares a scale

        Args:
            x: the values, float32, float16 or bfloat16.
            spec: Static. How to quantize: signed, or unsigned; the zero point of an unsigned asymmetric spec is 0.

        Returns:
            A float32 scale of x's rank, and a zero point of 0, or None if the spec fixes the zero point.

        Raises:
            TypeError: x has an unsupported dtype, or spec is not a QuantSpec.
            ValueError: the granularity of the spec does not fit x.

        Source: Choi et al., arXiv 1805.06085, section 3: alpha starts above most of the values.
        """
        scale_shape, point_shape = _check_shapes("PACT.initial", x, spec)
        low, high = min_max.compute_extremes(x, scale_shape, scale_from_range.derive_block_size(spec))
        reach = jnp.maximum(jnp.maximum(-low, high), _ZERO)  # an x without elements has the range (inf, -inf)
        steps = np.float32(spec.bounds[1] - (spec.fixed_zero_point or 0))
        scale = reach / steps
        # A scale that was rounded up can make the largest code infinite.
        scale = jnp.where(jnp.isinf(steps * scale) & jnp.isfinite(reach), np.float32(_ALMOST_ONE) * scale, scale)
        scale = _make_positive(scale, reach)
        return scale, None if spec.symmetric else jnp.zeros(point_shape, spec.carrier)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["key"], meta_fields=["clip"])
@dataclasses.dataclass(frozen=True)
class StochasticRounding:
    """Stochastic rounding: each element rounds up with a probability equal to its fraction, so that the mean is exact.

    r = floor(u) + 1 if a uniform sample from [0, 1) is less than u - floor(u), else floor(u), with u = x / scale

    The backward pass is straight-through. Each element uses one random sample of 32 bits, so a fraction below 2**-32
    always rounds down. Only specs with an integer dtype are supported.

    A StochasticRounding is a pytree with one leaf, the key. The constructor checks nothing; the functions that take
    the rule check it.

    Attributes:
        key: a key of `jax.random`.
        clip: Static. Whether elements that saturate have the gradient 0.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x, spec = jnp.full(10000, 0.125), jq.QuantSpec(jnp.int4)  # a quarter of a step of 0.5
        >>> rule = jq.StochasticRounding(jax.random.key(0))
        >>> jq.fake_quantize(x, spec, 0.5, gradient=rule).mean().round(2)
        Array(0.13, dtype=float32)

    Source: Gupta et al., arXiv 1502.02551, section 3.

    Cotangents: as for `StraightThrough`, with m = 1 where qmin <= u + zero_point <= qmax, before rounding.
    """

    key: Any
    clip: bool = True


register_tree(StochasticRounding, list, tuple)
Estimator = StraightThrough | LSQ | LSQPlus | PACT | StochasticRounding
_ESTIMATORS = {kind.__name__: kind for kind in get_args(Estimator)}


def encode_estimator(rule: Estimator) -> list[Any]:
    """Return an estimator without a key as what `json` writes."""
    return [type(rule).__name__, dataclasses.asdict(rule)]


def decode_estimator(saved: list[Any]) -> Estimator:
    """Return the estimator that `encode_estimator` described."""
    name, fields = saved
    return _ESTIMATORS[name](**fields)


def check_estimator(function: str, argument: str, rule: object, spec: QuantSpec, zero_point: object) -> None:
    """Check that `rule` is an estimator, and that it supports the spec and the zero point."""
    names = "StraightThrough(), LSQ(), LSQPlus(), PACT() or StochasticRounding(key)"
    checks.require_type(isinstance(rule, Estimator), function, argument, names, checks.describe_value(rule))
    if isinstance(rule, StochasticRounding):
        is_key, got = checks.is_key(rule.key), checks.describe_value(rule.key)
        checks.require_type(is_key, function, f"{argument}.key", "one key of jax.random", got)
        checks.check_flag(function, f"{argument}.clip", rule.clip)
        expected = f"another rule, because the codes of {spec.dtype} are not one step apart"
        checks.require_type(dtypes.is_integer(spec.dtype), function, argument, expected, "StochasticRounding")
    if isinstance(rule, PACT) and isinstance(zero_point, jax.Array | np.ndarray | np.generic):
        fixed, point = spec.fixed_zero_point or 0, argument.replace("gradient", "zero_point")
        expected = f"{fixed} in {spec.carrier}, because PACT() does not learn a zero point (LSQPlus() does)"
        # A traced zero point cannot be read; only its dtype can be checked.
        holds = zero_point.dtype != dtypes.FLOAT32
        holds = holds and (checks.is_traced(zero_point) or bool((np.asarray(zero_point) == fixed).all()))
        checks.require(holds, function, point, expected, checks.describe_value(zero_point))


def _check_elements(rule: str, elements: int | None) -> None:
    """Raise unless elements is None or a positive int."""
    if elements is not None:
        checks.check_integer(rule, "elements", elements)
        checks.require(elements > 0, rule, "elements", "None or a positive int", elements)


def _check_shapes(function: str, x: jax.Array, spec: QuantSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Check the arguments of `initial`, and return the shapes of the scale and of the zero point."""
    checks.check_array(function, "x", x, dtypes.FLOATS)
    checks.require_type(isinstance(spec, QuantSpec), function, "spec", "a QuantSpec", checks.describe_value(spec))
    return scale_from_range.derive_shapes(function, spec, x.shape)


def _compute_means(spec: QuantSpec, shape: tuple[int, ...], *values: jax.Array) -> list[jax.Array]:
    """Return the means of float32 arrays over the slices that share a scale."""
    aligned = granularity.Aligned(scale_from_range.derive_block_size(spec))
    counts = np.maximum(min_max.count_members(values[0], shape, aligned.block_size), 1).astype(np.float32)
    like = jnp.zeros(shape, jnp.float32)
    return [affine.sum_to_scale(aligned, v, like) / counts for v in values]


def _compute_finite(
    find: Callable[[jax.Array], tuple[jax.Array, jax.Array]], x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return a scale and a statistic of x that are proportional to x, finite although sums or squares overflow.

    Args:
        find: a function from float32 values to both.
        x: the values.
    """
    values = jnp.asarray(x).astype(jnp.float32)
    first, second = (find(v) for v in (values, values * _SHRINK))
    # Numbers that the factor makes subnormal are 2**126 times less than the largest number of an x that overflows.
    grown = [jnp.minimum(v, _LARGEST * _SHRINK) / _SHRINK for v in second]
    is_finite = jnp.isfinite(first[0]) & jnp.isfinite(first[1])
    # A NaN or an infinity in x stays one.
    overflows = ~is_finite & jnp.isfinite(second[0]) & jnp.isfinite(second[1])
    scale, statistic = (jnp.where(overflows, large, v) for v, large in zip(first, grown, strict=True))
    return scale, statistic


def _make_positive(scale: jax.Array, reach: jax.Array) -> jax.Array:
    """Return a scale that is 1 where x has only zeros and subnormal numbers, and a normal float32 elsewhere."""
    tiny = np.finfo(np.float32).tiny
    return jnp.where(jnp.abs(reach) < tiny, _ONE, jnp.maximum(scale, tiny))


# How a trained scale and a trained zero point become the scale and the zero point of codes.


def read_learned_scale(spec: QuantSpec, scale: jax.Array, *, is_signed: bool = False) -> jax.Array:
    """Return the magnitude of a learned scale, or the scale itself, in the dtype of the spec; 0 becomes the least one.

    A signed scale may cross 0: what its codes stand for becomes 0 on both sides of it.
    """
    # The least scale of the scale's own dtype: float16 rounds the least float32 to 0.
    least = scale_from_range.read_least_scale(spec.scale_dtype)
    magnitude = jnp.maximum(jnp.abs(scale), least)
    return (jnp.where(scale < 0, -magnitude, magnitude) if is_signed else magnitude).astype(spec.scale_dtype)


def read_learned_zero_point(spec: QuantSpec, zero_point: jax.Array) -> Any:
    """Return a learned zero point within the codes of the spec, still in float32."""
    # fake_quantize rejects a known zero point outside the codes, and training may move one there.
    if checks.is_traced(zero_point):
        return zero_point
    return jnp.clip(zero_point, *map(np.float32, spec.bounds))
