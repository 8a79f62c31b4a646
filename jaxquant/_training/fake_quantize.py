"""`fake_quantize`: quantize and dequantize in one call, from float to float, with a choice of gradient.

`Quantizer` holds its arguments, for an operand of a trained contraction. `AmaxHistory` makes one for delayed scaling.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._arrays import scale_from_range
from .._arrays.quantize import check_known_result, compute_parameters, has_float16_scales, quantize
from .._arrays.saved_programs import decode_spec, encode_spec, register_tree
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, entry_point
from .._core.entry_point import compile_entry_point
from . import estimators
from .estimators import Estimator, StochasticRounding, StraightThrough, decode_estimator, encode_estimator
from .rounding_vjp import RoundingConfig, quantize_and_dequantize

_NAME = "fake_quantize"


def fake_quantize(
    x: ArrayLike,
    spec: QuantSpec,
    scale: ArrayLike | None = None,
    zero_point: ArrayLike | None = None,
    gradient: Estimator = StraightThrough(),
) -> jax.Array:
    """Round x to the values that a spec can represent, with a gradient for training.

    y = (saturate(round_half_even(x / scale) + zero_point) - zero_point) * scale

    The forward pass is `quantize(x, spec).dequantize()` bit for bit; an explicit scale and zero point take the place of
    those that `quantize` computes. `gradient` chooses the backward pass. If the scale and the zero point are computed
    from x, the gradient treats them as constants.

    An offset, and scales that are quantized themselves, are found from x: such a spec takes no scale and no zero point,
    and only `StraightThrough()`. Its gradient passes everywhere, because the range is the range of x.

    Args:
        x: the values, float32, float16 or bfloat16, of any shape. A Python number becomes float32.
        spec: Static. How to quantize.
        scale: the value per step, float32, float16 or bfloat16: one element, or an array of x's rank that
            broadcasts to `quantize(x, spec).scale`. A Python number becomes float32. None finds the scale and the
            zero point from x.
        zero_point: the code of 0.0, shaped like the scale: an integer array of dtype `spec.carrier`, or a float32 array
            that is learned, which the forward pass rounds half to even. If a float32 zero point does not round to a
            code of the spec, it is moved to the nearest code if it is traced (as in training), and raises an error if
            its value is known. An int becomes an array of dtype `spec.carrier`. None takes the zero point that a
            symmetric spec fixes.
        gradient: the gradient rule: `StraightThrough()`, `LSQ()`, `LSQPlus()`, `PACT()`, or `StochasticRounding(key)`,
            which also rounds stochastically in the forward pass. Static, except for the key.

    Returns:
        The values that the codes represent, in the shape and dtype of x.

    Raises:
        TypeError: an argument has a wrong type or an unsupported dtype; or the rule is StochasticRounding and the spec
            has a float dtype or a codebook.
        ValueError: a scale or zero point does not fit x; there is a zero point without a scale, or a scale without the
            zero point that an asymmetric spec needs; a known scale is 0, negative, NaN or infinite; a known float32
            zero point does not round to a code of the spec; or a known x needs a scale that float16, the spec's
            scale_dtype, cannot hold. An array is known if it is not traced, and a scale or a zero point if it also has
            at most 65536 elements and is in the memory of this host. Under jax.jit a scale or zero point that an
            argument holds is not known, and none of this is checked.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x, spec = jnp.array([-5.0, 0.25, 0.75, 1.6, 2.25]), jq.QuantSpec(jnp.int4)
        >>> jq.fake_quantize(x, spec, 0.5)  # 0.25 and 0.75 are ties; -5 saturates at -7 steps
        Array([-3.5,  0. ,  1. ,  1.5,  2. ], dtype=float32)
        >>> jax.grad(lambda x: jq.fake_quantize(x, spec, 0.5).sum())(x)
        Array([0., 1., 1., 1., 1.], dtype=float32)
        >>> jax.grad(lambda scale: jq.fake_quantize(x, spec, scale, gradient=jq.LSQ()).sum())(jnp.float32(0.5)).round(4)
        Array(-1.3015, dtype=float32)

    Source: Jacob et al., arXiv 1712.05877, section 3. Each gradient rule states its own source.

    Cotangents: as the gradient rule states. An integer zero_point has none, and a scale found from x has none.
    """
    checks.require_type(isinstance(spec, QuantSpec), _NAME, "spec", "a QuantSpec", checks.describe_value(spec))
    scale, zero_point = check_parts(_NAME, ("scale", "zero_point"), scale, zero_point, spec)
    estimators.check_estimator(_NAME, "gradient", gradient, spec, zero_point)
    # The key is an array, so it must be split off before the rule becomes static.
    rule, key = split_key(gradient)
    x = entry_point.convert_number(x)
    y = _fake_quantize(x, scale, zero_point, key, spec=spec, rule=rule)
    if scale is None and has_float16_scales(spec):
        check_known_result(_NAME, x, spec, y)
    return y


@compile_entry_point(_NAME)
def _fake_quantize(
    x: jax.Array, scale: jax.Array | None, zero_point: jax.Array | None, key: jax.Array | None, *, spec: QuantSpec,
    rule: Estimator,
) -> jax.Array:  # fmt: skip
    if spec.offset or spec.scale_spec is not None:
        expected = "None, because the spec has an offset, or scales that are quantized themselves"
        checks.require(scale is None, _NAME, "scale", expected, "a scale")
        checks.require(zero_point is None, _NAME, "zero_point", expected, "a zero point")
        expected = "StraightThrough(), because the spec has an offset, or scales that are quantized themselves"
        checks.require(isinstance(rule, StraightThrough), _NAME, "gradient", expected, rule)
        (x,) = entry_point.convert_numpy(x)
        checks.check_array(_NAME, "x", x, dtypes.FLOATS)
        # `quantize` checks this, too, under its own name.
        scale_from_range.derive_range_shape(_NAME, dataclasses.replace(spec, offset=False, scale_spec=None), x.shape)
        return _pass_through(x, quantize(lax.stop_gradient(x), spec).dequantize())
    arrays = read_parts(_NAME, ("x", "scale", "zero_point"), x, scale, zero_point, spec)
    return quantize_and_dequantize(RoundingConfig(spec, rule), *arrays, key)


@jax.custom_jvp
def _pass_through(x: jax.Array, values: jax.Array) -> jax.Array:
    """Return the values, with the derivative of x."""
    del x
    return values


@_pass_through.defjvp
def _pass_through_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    return primals[1], tangents[0]


def split_key(rule: Estimator) -> tuple[Estimator, Any]:
    """Return a rule without its key, so that the rule is static, and the key."""
    if isinstance(rule, StochasticRounding):
        return dataclasses.replace(rule, key=None), rule.key
    return rule, None


def check_parts(
    function: str, names: tuple[str, str], scale: ArrayLike | None, zero_point: ArrayLike | None, spec: QuantSpec
) -> tuple[Any, Any]:
    """Check the known values of a scale and a zero point against the spec, and return both with numbers as arrays."""
    if scale is None and zero_point is None:
        return None, None
    scale = entry_point.convert_number(scale)
    zero_point = convert_zero_point_number(function, names[1], zero_point, spec)
    for argument, part in zip(names, (scale, zero_point), strict=True):
        # A wrapped array, such as a flax.nnx.Param, is unwrapped and checked later.
        if not hasattr(part, "__jax_array__"):
            checks.check_readable(function, argument, part)
    entry_point.check_positive_scale(function, names[0], scale)
    if zero_point is not None and dtypes.is_integer(spec.dtype):
        low, high = spec.bounds
        entry_point.check_rounded_zero_point(function, names[1], zero_point, (int(low), int(high)))
    return scale, zero_point


def convert_zero_point_number(function: str, argument: str, value: ArrayLike | None, spec: QuantSpec) -> Any:
    """Return an int as a zero point in the spec's dtype, which must hold it; return anything else unchanged."""
    if not isinstance(value, int | np.integer) or checks.has_dtype(value, dtypes.QUANTIZED):
        return entry_point.convert_number(value)
    checks.check_integer(function, argument, value)
    low, high = spec.bounds if dtypes.is_integer(spec.dtype) else (0, 0)
    if not low <= value <= high:
        expected = f"an int in [{low}, {high}], the codes of the spec"
        checks.refuse(function, argument, expected, value)
    return np.asarray(value, spec.carrier)


def read_parts(
    function: str, names: tuple[str, str, str], x: jax.Array, scale: jax.Array | None, zero_point: jax.Array | None,
    spec: QuantSpec,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
    """Check the arrays of a fake quantization, and return (x, scale, zero_point), the latter two with x's rank."""
    x, scale, zero_point = entry_point.convert_numpy(x, scale, zero_point)
    checks.check_array(function, names[0], x, dtypes.FLOATS)
    if scale is None:
        if zero_point is not None:
            expected = f"None, because {names[1]} is None"
            checks.refuse(function, names[2], expected, "a zero point")
        # The gradient treats the range of x as a constant.
        return x, *compute_parameters(function, lax.stop_gradient(x), spec, None, None)[:2]
    shapes = scale_from_range.derive_shapes(function, spec, x.shape)
    checks.check_array(function, names[1], scale, (*dtypes.FLOATS, dtypes.E8M0))
    scale = _expand_rank(function, names[1], scale, shapes[0])
    if zero_point is None:
        expected = "a zero point, because the spec is asymmetric and a scale is given"
        checks.require(bool(spec.symmetric), function, names[2], expected, "None")
        # None represents 0 without an array that has to be subtracted.
        fixed = spec.fixed_zero_point
        return x, scale, jnp.full((1,) * x.ndim, fixed, spec.carrier) if fixed else None
    if not dtypes.is_integer(spec.dtype):
        checks.refuse(function, names[2], f"None, because {spec.dtype} has no zero point", "an array")
    checks.check_array(function, names[2], zero_point, (spec.carrier, dtypes.FLOAT32))
    return x, scale, _expand_rank(function, names[2], zero_point, shapes[1])


def _expand_rank(function: str, argument: str, part: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a scale or zero point with the rank of `shape`, after a check that it fits it."""
    if part.ndim == len(shape) and all(n in (1, m) for n, m in zip(part.shape, shape, strict=True)):
        return part
    expected = f"one element, or shape {shape} (any of its dimensions may be 1)"
    checks.require(math.prod(part.shape) == 1, function, argument, expected, f"shape {part.shape}")
    return part.reshape((1,) * len(shape))


# `Quantizer`: the arguments of a fake quantization as a pytree.


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Quantizer:
    """The arguments of `fake_quantize` except x, for an operand of a quantized contraction.

    quantizer(x) = fake_quantize(x, spec, scale, zero_point, gradient)

    A Quantizer is a pytree. Its leaves are the scale, the zero point and the key of a stochastic gradient rule; the
    rest is static. The constructor checks nothing, because JAX also builds pytrees of objects that are not arrays.
    Each function that takes a Quantizer checks it as `fake_quantize` checks its arguments.

    Attributes:
        spec: Static. How to quantize.
        scale: as in `fake_quantize`. None finds the scale and the zero point from the operand.
        zero_point: as in `fake_quantize`.
        gradient: the gradient rule, as in `fake_quantize`. Static, except for a key.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> quantizer = jq.Quantizer(jq.QuantSpec(jnp.uint4), 0.5, 3)
        >>> quantizer(jnp.array([-1.75, 0.25, 0.75, 100.0]))
        Array([-1.5,  0. ,  1. ,  6. ], dtype=float32)
    """

    spec: QuantSpec
    scale: Any = None
    zero_point: Any = None
    gradient: Estimator = StraightThrough()

    @classmethod
    def from_range(
        cls, spec: QuantSpec, range: tuple[ArrayLike, ArrayLike], gradient: Estimator = StraightThrough()
    ) -> Quantizer:  # fmt: skip
        """Return the Quantizer of a range, with the scale and the zero point that `quantize` computes for it.

        Args:
            spec: how to quantize, with one scale and one zero point (`PerTensor()`).
            range: the ends (lo, hi), as for `quantize`, one element each.
            gradient: the gradient rule.

        Raises:
            TypeError: an argument has a wrong type or dtype.
            ValueError: the spec has several scales, or an end is known and not finite.
        """
        with checks.name_errors("Quantizer.from_range"):
            q = quantize(np.zeros((), np.float32), spec, range)
        return cls(spec, q.scale, q.zero_point, gradient)

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Return `fake_quantize` of x with these arguments; it raises the same errors."""
        return fake_quantize(x, self.spec, self.scale, self.zero_point, self.gradient)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the leaves and the static part."""
        # The key of a stochastic rule is an array and must be a leaf.
        rule, key = split_key(self.gradient)
        return (self.scale, self.zero_point, key), (self.spec, rule)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], children: tuple[Any, ...]) -> Quantizer:
        """Return the Quantizer of these leaves, which may be any objects, and this static part."""
        spec, rule = static
        scale, zero_point, key = children
        is_stochastic = isinstance(rule, StochasticRounding)
        return cls(spec, scale, zero_point, dataclasses.replace(rule, key=key) if is_stochastic else rule)


register_tree(
    Quantizer,
    lambda static: [encode_spec(static[0]), encode_estimator(static[1])],
    lambda saved: (decode_spec(saved[0]), decode_estimator(saved[1])),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AmaxHistory:
    """The largest magnitudes of a tensor in the last steps of a training, for delayed scaling.

    scale = max(amax) / largest code

    A scale that is known before the tensor is computed needs no pass over the tensor, unlike the scale of a QuantSpec,
    which depends on the current values. The state is a pytree that the caller keeps, one for each tensor: `update`
    returns the next one. Values beyond the range of the last steps saturate, and get no gradient.

    Attributes:
        amax: float32 [length], the latest step first; 0 for steps that have not been yet.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> history = jq.AmaxHistory.start(3)
        >>> for step in (448.0, 896.0, 1.0):
        ...     history = history.update(jnp.array([step, -0.5]))
        >>> history.amax
        Array([  1., 896., 448.], dtype=float32)
        >>> history.make_quantizer(jq.QuantSpec("float8_e4m3fn"))(jnp.array([33.0, 1e4]))  # 33 / 2 is a tie
        Array([ 32., 896.], dtype=float32)

    Source: Micikevicius et al., arXiv 2209.05433; delayed scaling in NVIDIA's Transformer Engine, with the maximum of
    the history.
    """

    amax: jax.Array

    @classmethod
    def start(cls, length: int = 16) -> AmaxHistory:
        """Return the history before the first step.

        Args:
            length: the number of steps that are kept.

        Raises:
            TypeError: length is not an int.
            ValueError: length is not positive.
        """
        checks.check_integer("AmaxHistory.start", "length", length)
        checks.require(length > 0, "AmaxHistory.start", "length", "a positive int", length)
        return cls(jnp.zeros(length, jnp.float32))

    def update(self, x: ArrayLike) -> AmaxHistory:
        """Return the history with the largest magnitude of x in front. x without elements counts as 0.

        Args:
            x: float32, float16 or bfloat16, of any shape. It gets no gradient.

        Raises:
            TypeError: x has an unsupported dtype.
        """
        x = entry_point.read_float_operand("AmaxHistory.update", "x", x)
        checks.check_array("AmaxHistory.update", "x", x, dtypes.FLOATS)
        amax = jnp.max(jnp.abs(jax.lax.stop_gradient(x)), initial=0).astype(jnp.float32)
        return AmaxHistory(jnp.concatenate([amax[None], self.amax[:-1]]))

    def make_quantizer(
        self, spec: QuantSpec, *, margin: int = 0, gradient: Estimator = StraightThrough()
    ) -> Quantizer:  # fmt: skip
        """Return the Quantizer whose largest code is the largest magnitude of the history times 2**margin.

        Before the first step the scale is 1.

        Args:
            spec: Static. How to quantize, with one scale.
            margin: Static. The number of binary orders of magnitude that are left for values beyond the history.
            gradient: the gradient rule.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: the spec has several scales.
        """
        checks.check_integer("AmaxHistory.make_quantizer", "margin", margin)
        most = jax.lax.stop_gradient(jnp.max(self.amax)) * np.float32(2.0**margin)
        with checks.name_errors("AmaxHistory.make_quantizer"):
            return Quantizer.from_range(spec, (-most, most), gradient)


register_tree(AmaxHistory)


def read_quantizer(function: str, argument: str, value: QuantSpec | Quantizer | None) -> Quantizer | None:
    """Check a spec, a Quantizer or None, and return a Quantizer of arrays or None; None stays None."""
    if value is None:
        return None
    quantizer = Quantizer(value) if isinstance(value, QuantSpec) else value
    is_quantizer = isinstance(quantizer, Quantizer) and isinstance(quantizer.spec, QuantSpec)
    expected = "a QuantSpec, a Quantizer or None"
    checks.require_type(is_quantizer, function, argument, expected, checks.describe_value(value))
    scale, zero_point = map(entry_point.unwrap_array, (quantizer.scale, quantizer.zero_point))
    names = (f"{argument}.scale", f"{argument}.zero_point")
    scale, zero_point = check_parts(function, names, scale, zero_point, quantizer.spec)
    # Check the rule last: it may depend on the scale and the zero point, which have to be arrays first.
    estimators.check_estimator(function, f"{argument}.gradient", quantizer.gradient, quantizer.spec, zero_point)
    return dataclasses.replace(quantizer, scale=scale, zero_point=zero_point)


def split_quantizer(quantizer: Quantizer) -> tuple[RoundingConfig, tuple[Any, Any, Any]]:
    """Return the static part of a Quantizer, and (scale, zero_point, key)."""
    (scale, zero_point, key), static = quantizer.tree_flatten()
    return RoundingConfig(*static), (scale, zero_point, key)
