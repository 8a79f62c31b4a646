"""The words of layers and of rules: where a range comes from, and how gradients are contracted. Frozen dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from ..calibration.calibrator import Factory, check_factory
from .estimators import LSQ, PACT, Estimator, LSQPlus, StraightThrough


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """A range that each call computes from the array that it quantizes, so that nothing is stored.

    (lo, hi) = the range that the calibrator finds in x

    It is the default of layers and of rules.

    Attributes:
        calibrator: A function from a spec to a calibrator, such as `jq.calibration.mse`, which finds the range through
            its `init`, `update` and `finalize`. None (the default) takes the least and the largest value of x, and is
            the only choice in a rule.
        gradient: The gradient rule of the rounding in a layer, `jq.StraightThrough()` or
            `jq.StraightThrough(clip=False)`.

    Raises:
        TypeError: calibrator is neither such a function nor None, or gradient is not `jq.StraightThrough()`.

    Example:
        >>> import jaxquant as jq
        >>> jq.Activation("uint8", per="row") == jq.Activation("uint8", per="row", range=jq.Dynamic())
        True
        >>> jq.Dynamic(jq.calibration.mse) == jq.Dynamic(jq.calibration.mse)
        True
    """

    calibrator: Factory | None = None
    gradient: StraightThrough = StraightThrough()

    def __post_init__(self) -> None:
        """Check the arguments."""
        object.__setattr__(self, "calibrator", check_factory("Dynamic", self.calibrator, " or None"))
        _check_gradient("Dynamic", self.gradient, (StraightThrough,))


@dataclasses.dataclass(frozen=True)
class Static:
    """A range that a calibrator finds in the batches that it has seen, before the integers are served.

    (lo, hi) = the range that the calibrator finds in the batches so far

    In a rule, `Prepared.calibrate` finds it. In a layer, the state of the calibrator is in the collection "ranges", or
    for NNX in `Ranges` variables. In Linen, a call updates the state while that collection is mutable. In NNX, a call
    updates it while the layer's `use_running_average` is False; `model.train()` and `model.eval()` set it. Other calls
    only read the range. The update comes first, so a batch is quantized with a range that includes it. `init` and empty
    batches update nothing. `jq.flax.calibrate` and `jq.flax.nnx.calibrate` run a loop over batches that updates only
    the ranges.

    A layer raises an error if its range has seen no data, a NaN or an infinity. Inside `jax.jit` no error can depend on
    a value, so the layer returns NaN there; `check_calibrated` raises the error outside of `jit`.

    Attributes:
        calibrator: A function from a spec to a calibrator: `jq.calibration.minmax` for the range of all data,
            `jq.calibration.moving_average` for the range of the last batches of a training, another of
            `jq.calibration`, or a `functools.partial` of one. It is static and compared by identity, so do not define
            it inside a function that is called often.
        freeze_after: The number of batches after which the range of a layer no longer changes. None (the default) means
            that every batch changes it. In a rule it is None.
        gradient: The gradient rule of the rounding in a layer, `jq.StraightThrough()` or
            `jq.StraightThrough(clip=False)`.

    Raises:
        TypeError: calibrator is not such a function, freeze_after is not an int or None, or gradient is not
            `jq.StraightThrough()`.
        ValueError: freeze_after is not positive.

    Example:
        >>> import functools, jaxquant as jq
        >>> jq.Activation("uint8", range=jq.Static(jq.calibration.minmax)).range
        Static(calibrator=<function minmax at ...>, freeze_after=None, gradient=StraightThrough(clip=True))
        >>> source = jq.Static(functools.partial(jq.calibration.moving_average, decay=0.9), freeze_after=1000)
        >>> source == jq.Static(functools.partial(jq.calibration.moving_average, decay=0.9), freeze_after=1000)
        True
    """

    calibrator: Factory
    freeze_after: int | None = None
    gradient: StraightThrough = StraightThrough()

    def __post_init__(self) -> None:
        """Check the arguments."""
        object.__setattr__(self, "calibrator", check_factory("Static", self.calibrator))
        _check_gradient("Static", self.gradient, (StraightThrough,))
        if self.freeze_after is not None:
            checks.check_integer("Static", "freeze_after", self.freeze_after)
            checks.require(self.freeze_after > 0, "Static", "freeze_after", "a positive int", self.freeze_after)


@dataclasses.dataclass(frozen=True)
class Learned:
    """A range with a scale that is trained by gradient descent, and with `jq.LSQPlus()` a zero point, too.

    y = fake_quantize(x, spec, scale, zero_point, gradient)

    Layers take it. `Prepared.trainable` with an estimator trains the scales of a prepared function, whatever its rules
    say.

    The scale and the zero point are in the collection "scales", or for NNX in `Scale` variables. They are not in
    "params", so that float checkpoints still fit. In Linen, a call with "scales" mutable initializes those that are
    missing: the `initial` method of the gradient computes them from the weights and the batch of that call. In NNX they
    are NaN until `qnnx.start(model, batch)` sets them. The layer uses the magnitude of a learned scale, so its sign
    does not matter.

    With `jq.LSQ()` and `jq.PACT()` the zero point of a spec that is not symmetric is 0, so unsigned codes represent no
    negative values. Weights with such a spec raise an error when the layer is constructed. Negative activations raise
    an error when a scale of `jq.LSQ()` is initialized from them. Inside `jax.jit` they cannot be checked, and become 0.
    With `jq.PACT()` they become 0 on purpose. `jq.LSQPlus()` learns a zero point that can represent them.

    Attributes:
        gradient: The gradient rule: `jq.LSQ()` (the default), `jq.LSQPlus()` or `jq.PACT()`. Unless its `elements` is
            set, LSQ scales the gradient of an activation scale by the number of elements of one example.

    Raises:
        TypeError: gradient is not one of these rules.

    Example:
        >>> import jaxquant as jq
        >>> jq.Learned(jq.LSQPlus()).gradient
        LSQPlus(elements=None)
    """

    gradient: LSQ | LSQPlus | PACT = LSQ()

    def __post_init__(self) -> None:
        """Check the gradient."""
        _check_gradient("Learned", self.gradient, (LSQ, LSQPlus, PACT))


RangeSource = Dynamic | Static | Learned


def _check_gradient(name: str, gradient: object, rules: tuple[type[Estimator], ...]) -> None:
    """Raise ContractTypeError unless a gradient is one of these rules."""
    expected = " or ".join(f"{rule.__name__}()" for rule in rules)
    checks.require_type(isinstance(gradient, rules), name, "gradient", expected, checks.describe_value(gradient))


# How the gradient of a contraction of codes is contracted.


@dataclasses.dataclass(frozen=True)
class FloatBackward:
    """The gradients of a quantized contraction, computed in floats.

    dlhs = g contracted with the dequantized rhs, and drhs = the dequantized lhs contracted with g, in the float dtype
    of the operands.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> spec, w = jq.QuantSpec(jnp.int8), jnp.array([[127.0], [2.5]])  # 2.5 is a tie
        >>> dense = lambda x: jq.quantized_einsum("bi,io->bo", x, w, specs=(spec, spec), backward=jq.FloatBackward())
        >>> jax.grad(lambda x: dense(x).sum())(jnp.array([[0.1, -0.2]]))
        Array([[127.,   2.]], dtype=float32)
    """


@dataclasses.dataclass(frozen=True)
class Int8Backward:
    """The gradients of a quantized contraction, computed in integers.

    dlhs = q(g) contracted with the codes of rhs, and drhs = the codes of lhs contracted with q(g).

    q quantizes g to int8, symmetrically, with one scale for each index that the contraction does not sum over: in a
    matrix product, one for each row of dlhs or for each column of drhs. If the scale of the other operand varies along
    a dimension that is summed over, it is multiplied into g first.

    Attributes:
        stochastic_rounding: whether g is rounded stochastically, which keeps a gradient that sums many small parts
            unbiased. Differentiating the call then needs a `key`.
        lhs: whether dlhs is computed in integers. If False, it is computed as with `FloatBackward`.
        rhs: whether drhs is computed in integers. If False, it is computed as with `FloatBackward`.

    Raises:
        TypeError: an attribute is not True or False.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> spec, w = jq.QuantSpec(jnp.int8), jnp.array([[127.0], [2.5]])  # 2.5 is a tie
        >>> dense = lambda x: jq.quantized_einsum("bi,io->bo", x, w, specs=(spec, spec), backward=jq.Int8Backward())
        >>> jax.grad(lambda x: dense(x).sum())(jnp.array([[0.1, -0.2]])).round(4)
        Array([[127.,   2.]], dtype=float32)

    Source: Banner et al., arXiv 1805.11046, section 5, which keeps drhs in floats; Gupta et al., arXiv 1502.02551, for
    the rounding.
    """

    stochastic_rounding: bool = False
    lhs: bool = True
    rhs: bool = True

    def __post_init__(self) -> None:
        """Check the flags."""
        for field in ("stochastic_rounding", "lhs", "rhs"):
            checks.check_flag("Int8Backward", field, getattr(self, field))


@dataclasses.dataclass(frozen=True)
class Float8Backward:
    """The gradients of a contraction of float8 codes, computed from float8 gradients.

    dlhs = q(g) contracted with the codes of rhs, and drhs = the codes of lhs contracted with q(g), times the scales.

    q quantizes g with one scale, found from g itself (current scaling). The products of codes are exact in float32.
    CUDA and TPU contract them as float8 where no scale varies along the dimensions that are summed.

    Attributes:
        dtype: the float8 dtype of g. float8_e5m2 has the range of float16, which gradients need more than digits.

    Raises:
        TypeError: dtype is not a float8 dtype.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> spec, w = jq.QuantSpec("float8_e4m3fn"), jnp.array([[448.0], [17.0]])  # 17 is a tie
        >>> dense = lambda x: jq.quantized_einsum("bi,io->bo", x, w, specs=(spec, spec), backward=jq.Float8Backward())
        >>> jax.grad(lambda x: dense(x).sum())(jnp.array([[0.1, -0.2]])).round(2)
        Array([[448.,  16.]], dtype=float32)

    Source: Micikevicius et al., arXiv 2209.05433, sections 3 and 4.
    """

    dtype: Any = "float8_e5m2"

    def __post_init__(self) -> None:
        """Check the dtype."""
        object.__setattr__(self, "dtype", checks.check_dtype("Float8Backward", "dtype", self.dtype, dtypes.FLOAT8))


Backward = FloatBackward | Int8Backward | Float8Backward


def check_backward(function: str, backward: object, key: jax.Array | None, specs: Sequence[QuantSpec | None]) -> None:
    """Check `backward`, its key, and, unless it is FloatBackward, that two operands are quantized as it needs them.

    This comes before the call is compiled, because `backward` is static in the compiled program.
    """
    is_backward = isinstance(backward, Backward)
    expected = "FloatBackward(), Int8Backward() or Float8Backward()"
    checks.require_type(is_backward, function, "backward", expected, checks.describe_value(backward))
    is_key = key is None or checks.is_key(key)
    checks.require_type(is_key, function, "key", "None or one key of jax.random", checks.describe_value(key))
    if isinstance(backward, FloatBackward):
        return
    name = type(backward).__name__
    expected = f"FloatBackward(), because {name}() needs two quantized operands"
    quantized = [spec for spec in specs if spec is not None]
    checks.require(len(specs) == len(quantized) == 2, function, "backward", expected, f"{name}()")
    is_float8 = isinstance(backward, Float8Backward)
    for spec in quantized:
        needed = "operands in float8 or float4" if is_float8 else "operands in integers"
        expected = f"FloatBackward(), because {name}() needs {needed}"
        fits = (spec.dtype in dtypes.SMALL_FLOATS) == is_float8 or (not is_float8 and spec.codebook is not None)
        checks.require(fits, function, "backward", expected, f"{name}() with {spec.dtype}")
