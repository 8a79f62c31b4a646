"""Where the range of a layer's weights or activations comes from: a frozen dataclass for each way."""

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
    """(lo, hi) = the range of what is quantized, found anew at each call. Nothing is stored.

    Attributes:
        calibrator: how: None takes the least and the largest value; `jq.mse` and the other calibrators are asked
            through their `init`, `update` and `finalize`.
        gradient: of the rounding.
    """

    calibrator: Factory | None = None
    gradient: StraightThrough = StraightThrough()

    def __post_init__(self) -> None:
        """Refuses what is no calibrator or gradient."""
        object.__setattr__(self, "calibrator", _check_factory("Dynamic", self.calibrator, " or None"))
        _check_gradient("Dynamic", self.gradient, (StraightThrough,))


@dataclasses.dataclass(frozen=True)
class Observed:
    """(lo, hi) = what a calibrator found in the batches so far: a static range.

    The calibrator's state is in the collection "ranges" (of NNX, in a `Ranges` variable). A batch moves it before it is
    quantized while that collection is mutable (of NNX, while the layer's `use_running_average` is False, which
    `model.train()` and `model.eval()` set); otherwise it is only read. `init` does not count as a batch, nor does an
    empty one. `jq.flax.calibrate` and `jq.flax.nnx.calibrate` are the loop that moves nothing else.

    A layer that has seen nothing, a NaN or an infinity raises; under a trace, where it cannot, it returns NaN.
    `check_calibrated` raises for it outside of the trace.

    Attributes:
        calibrator: a factory of calibrators: `jq.moving_average`, `jq.minmax`, `jq.mse`, a `functools.partial` of one.
            It is static: a function made anew for each call would be another one each time.
        freeze_after: the number of batches after which the state stays as it is. None: never.
        gradient: of the rounding.
    """

    calibrator: Factory = moving_average
    freeze_after: int | None = None
    gradient: StraightThrough = StraightThrough()

    def __post_init__(self) -> None:
        """Refuses an argument that is not a calibrator's factory, a count or a gradient."""
        object.__setattr__(self, "calibrator", _check_factory("Observed", self.calibrator))
        _check_gradient("Observed", self.gradient, (StraightThrough,))
        if self.freeze_after is not None:
            checks.check_integer("Observed", "freeze_after", self.freeze_after)
            checks.require(self.freeze_after > 0, "Observed", "freeze_after", "a positive int", self.freeze_after)


@dataclasses.dataclass(frozen=True)
class Learned:
    """y = fake_quantize(x, spec, scale, zero_point, gradient), whose scale is trained, with LSQPlus its zero point too.

    They are in the collection "scales" (of NNX, in `Scale` variables), beside "params", where a float checkpoint would
    not find them. Where they are missing and the collection is mutable, they start from the weights and the batch at
    hand, as the gradient's `initial` has it; of NNX they are NaN until `qnnx.start(model, batch)`. A scale counts by
    its magnitude.

    With `LSQ()` and `PACT()` the zero point of a spec that is not symmetric is 0: unsigned codes then hold nothing
    negative. Weights of such a spec are refused, and so are activations that are negative where they start a scale of
    `LSQ()`; under a trace they cannot be looked at, and become 0, as `PACT()` has it by intent. `LSQPlus()` learns a
    zero point.

    Attributes:
        gradient: `LSQ()`, `LSQPlus()` or `PACT()`. Of activations LSQ counts the elements of one example, where it is
            told nothing else.
    """

    gradient: LSQ | LSQPlus | PACT = LSQ()

    def __post_init__(self) -> None:
        """Refuses what does not learn."""
        _check_gradient("Learned", self.gradient, (LSQ, LSQPlus, PACT))


Source = Dynamic | Observed | Learned


@dataclasses.dataclass(frozen=True)
class Partial:
    """A `functools.partial` that is equal to another of the same arguments: layers are static, and made anew."""

    function: Callable[..., Calibrator]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    def __call__(self, spec: QuantSpec) -> Calibrator:
        """Returns the calibrator."""
        return self.function(*self.arguments, spec, **dict(self.keywords))


def _check_factory(name: str, calibrator: Any, more: str = "") -> Any:
    """Requires a factory, and returns it such that it compares by what it is."""
    if not callable(calibrator) and not (more and calibrator is None):
        checks.require_type(False, name, "calibrator", f"{_FACTORY}{more}", _describe_factory(calibrator))
    fault = None if calibrator is None else _find_fault(calibrator)
    if fault is not None:
        inner = calibrator.func if isinstance(calibrator, functools.partial) else calibrator
        function = getattr(inner, "__name__", "the factory")
        expected = f"{_FACTORY}{more}"
        if fault:
            expected += f", or functools.partial({function}, {fault}=...)"
        got = f"{function}, which {f'needs {fault}= beside' if fault else 'does not take'} the layer's spec"
        checks.require_type(False, name, "calibrator", expected, got)
    if not isinstance(calibrator, functools.partial):
        return calibrator
    return Partial(calibrator.func, calibrator.args, tuple(sorted(calibrator.keywords.items())))


def _describe_factory(calibrator: Any) -> str:
    """Returns what a reader needs to know of something that is no factory."""
    if isinstance(calibrator, Calibrator):
        return "a Calibrator, which already has a spec: give the function that made it; the layer calls it"
    if isinstance(calibrator, str):
        return f"the string {calibrator!r}: give the function, jq.{calibrator}"
    return str(checks.describe_value(calibrator))


def _find_fault(factory: Callable[..., Any]) -> str | None:
    """Returns the first argument that a factory needs beside the spec, "" where it takes no spec, or None."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # not every callable has a signature
        return None
    given = signature.parameters.values()
    needed = [p for p in given if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positional = [p for p in needed if p.kind is not p.KEYWORD_ONLY]
    rest = [*positional[1:], *(p for p in needed if p.kind is p.KEYWORD_ONLY)]
    if rest:
        return rest[0].name
    try:
        signature.bind(None)
    except TypeError:
        return ""
    return None


def _check_gradient(name: str, gradient: Any, known: tuple[type[Rule], ...]) -> None:
    expected = " or ".join(f"{rule.__name__}()" for rule in known)
    checks.require_type(isinstance(gradient, known), name, "gradient", expected, checks.describe_value(gradient))
