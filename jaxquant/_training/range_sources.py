"""Where the range of a layer or of a rule comes from: each call, calibration or training. Frozen dataclasses."""

from __future__ import annotations

import dataclasses

from .._core import checks
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
