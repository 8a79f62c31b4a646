"""The sources of a layer's ranges: `Dynamic`, `Observed` and `Learned`, frozen dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from .._arrays.spec import QuantSpec
from .._core import checks
from .._training.estimators import LSQ, PACT, LSQPlus, Rule, StraightThrough
from ..calibration import Calibrator, moving_average

Factory = Callable[[QuantSpec], Calibrator]
_FACTORY = "a function from a spec to a calibrator, such as jq.moving_average"


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """A range that each call computes from the array that it quantizes, so that nothing is stored.

    (lo, hi) = the range that the calibrator finds in x

    Attributes:
        calibrator: A function from a spec to a calibrator, such as `jq.mse`, which finds the range through its `init`,
            `update` and `finalize`. None (the default) takes the least and the largest value of x.
        gradient: The gradient rule of the rounding, `jq.StraightThrough()` or `jq.StraightThrough(clip=False)`.

    Raises:
        TypeError: calibrator is neither such a function nor None, or gradient is not `jq.StraightThrough()`.

    Example:
        >>> import jaxquant as jq, jaxquant.flax
        >>> jq.flax.Dynamic(jq.mse) == jq.flax.Dynamic(jq.mse)
        True
    """

    calibrator: Factory | None = None
    gradient: StraightThrough = StraightThrough()

    def __post_init__(self) -> None:
        """Check the arguments."""
        object.__setattr__(self, "calibrator", _check_factory("Dynamic", self.calibrator, " or None"))
        _check_gradient("Dynamic", self.gradient, (StraightThrough,))


@dataclasses.dataclass(frozen=True)
class Observed:
    """A static range, which a calibrator finds in the batches that it has seen.

    (lo, hi) = the range that the calibrator finds in the batches so far

    The state of the calibrator is in the collection "ranges", or for NNX in `Ranges` variables. In Linen, a call
    updates the state while that collection is mutable. In NNX, a call updates it while the layer's
    `use_running_average` is False; `model.train()` and `model.eval()` set it. Other calls only read the range. The
    update comes first, so a batch is quantized with a range that includes it. `init` and empty batches update nothing.
    `jq.flax.calibrate` and `jq.flax.nnx.calibrate` run a loop over batches that updates only the ranges.

    A layer raises an error if its range has seen no data, a NaN or an infinity. Inside `jax.jit` no error can depend on
    a value, so the layer returns NaN there; `check_calibrated` raises the error outside of `jit`.

    Attributes:
        calibrator: A function from a spec to a calibrator: `jq.moving_average` (the default), `jq.minmax`, `jq.mse`, or
            a `functools.partial` of one. It is static and compared by identity, so do not define it inside a function
            that is called often.
        freeze_after: The number of batches after which the range no longer changes. None (the default) means that every
            batch changes it.
        gradient: The gradient rule of the rounding, `jq.StraightThrough()` or `jq.StraightThrough(clip=False)`.

    Raises:
        TypeError: calibrator is not such a function, freeze_after is not an int or None, or gradient is not
            `jq.StraightThrough()`.
        ValueError: freeze_after is not positive.

    Example:
        >>> import functools, jaxquant as jq, jaxquant.flax
        >>> source = jq.flax.Observed(functools.partial(jq.moving_average, decay=0.9), freeze_after=1000)
        >>> source == jq.flax.Observed(functools.partial(jq.moving_average, decay=0.9), freeze_after=1000)
        True
    """

    calibrator: Factory = moving_average
    freeze_after: int | None = None
    gradient: StraightThrough = StraightThrough()

    def __post_init__(self) -> None:
        """Check the arguments."""
        object.__setattr__(self, "calibrator", _check_factory("Observed", self.calibrator))
        _check_gradient("Observed", self.gradient, (StraightThrough,))
        if self.freeze_after is not None:
            checks.check_integer("Observed", "freeze_after", self.freeze_after)
            checks.require(self.freeze_after > 0, "Observed", "freeze_after", "a positive int", self.freeze_after)


@dataclasses.dataclass(frozen=True)
class Learned:
    """A range whose scale is trained by gradient descent, and with `jq.LSQPlus()` its zero point too.

    y = fake_quantize(x, spec, scale, zero_point, gradient)

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
        >>> import jaxquant as jq, jaxquant.flax
        >>> jq.flax.Learned(jq.LSQPlus()).gradient
        LSQPlus(elements=None)
    """

    gradient: LSQ | LSQPlus | PACT = LSQ()

    def __post_init__(self) -> None:
        """Check the gradient."""
        _check_gradient("Learned", self.gradient, (LSQ, LSQPlus, PACT))


Source = Dynamic | Observed | Learned


@dataclasses.dataclass(frozen=True)
class Partial:
    """A `functools.partial` that equals another one with equal arguments.

    A layer is static and constructed in every trace. With `functools.partial`, which compares by identity, equal layers
    would be different.
    """

    function: Callable[..., Calibrator]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    def __call__(self, spec: QuantSpec) -> Calibrator:
        """Return the calibrator of a spec."""
        return self.function(*self.arguments, spec, **dict(self.keywords))


def _check_factory(name: str, calibrator: Any, alternative: str = "") -> Any:
    """Check that a calibrator is a function of a spec, and return it in a form that compares by its arguments.

    Args:
        name: the name of the class, for errors.
        calibrator: the argument.
        alternative: " or None" where None is allowed.
    """
    if not callable(calibrator) and not (alternative and calibrator is None):
        checks.require_type(False, name, "calibrator", f"{_FACTORY}{alternative}", _describe_rejected(calibrator))
    argument = None if calibrator is None else _find_unexpected_argument(calibrator)
    # Compare with None, because "" is a fault, too: it means that the function takes no spec.
    if argument is not None:
        inner = calibrator.func if isinstance(calibrator, functools.partial) else calibrator
        function = getattr(inner, "__name__", "the function")
        expected, got = f"{_FACTORY}{alternative}", f"{function}, which does not take the layer's spec"
        if argument:
            expected += f", or functools.partial({function}, {argument}=...)"
            got = f"{function}, which needs {argument}= besides the layer's spec"
        checks.require_type(False, name, "calibrator", expected, got)
    if not isinstance(calibrator, functools.partial):
        return calibrator
    # Sort the keywords, so that the order in which they were passed does not make two layers different.
    return Partial(calibrator.func, calibrator.args, tuple(sorted(calibrator.keywords.items())))


def _describe_rejected(calibrator: Any) -> str:
    """Return a description of a value that is not a function, with what to pass instead."""
    if isinstance(calibrator, Calibrator):
        return "a Calibrator, which has a spec already: pass the function that made it, which the layer calls"
    if isinstance(calibrator, str):
        return f"the string {calibrator!r}: pass the function jq.{calibrator}"
    return str(checks.describe_value(calibrator))


def _find_unexpected_argument(factory: Callable[..., Any]) -> str | None:
    """Return the first argument that a function needs besides a spec, "" if it takes no spec, or None if it fits."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # not every callable has a signature
        return None
    parameters = signature.parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positional = [p for p in required if p.kind is not p.KEYWORD_ONLY]
    # The first positional parameter receives the spec.
    others = [*positional[1:], *(p for p in required if p.kind is p.KEYWORD_ONLY)]
    if others:
        return others[0].name
    try:
        # Optional parameters are fine, as long as one positional argument is accepted.
        signature.bind(None)
    except TypeError:
        return ""
    return None


def _check_gradient(name: str, gradient: Any, rules: tuple[type[Rule], ...]) -> None:
    """Raise ContractTypeError unless a gradient is one of these rules."""
    expected = " or ".join(f"{rule.__name__}()" for rule in rules)
    checks.require_type(isinstance(gradient, rules), name, "gradient", expected, checks.describe_value(gradient))
