"""The functions from a spec to a calibrator that layers and rules take: checked, comparable, and described."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from .._arrays.spec import QuantSpec
from .._core import checks
from .calibrator import Calibrator

Factory = Callable[[QuantSpec], Calibrator]
_FACTORY = "a function from a spec to a calibrator, such as jq.calibration.moving_average"


@dataclasses.dataclass(frozen=True)
class Partial:
    """A `functools.partial` that equals another one with equal arguments.

    Layers and rules are static and may be constructed in every trace. With `functools.partial`, which compares by
    identity, equal ones would be different.
    """

    function: Callable[..., Calibrator]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    def __call__(self, spec: QuantSpec) -> Calibrator:
        """Return the calibrator of a spec."""
        return self.function(*self.arguments, spec, **dict(self.keywords))


def check_factory(name: str, calibrator: Any, alternative: str = "") -> Any:
    """Check that a calibrator is a function of a spec, and return it in a form that compares by its arguments.

    Args:
        name: the name of the class, for errors.
        calibrator: the argument.
        alternative: " or None" where None is allowed.
    """
    if not callable(calibrator) and not (alternative and calibrator is None):
        checks.refuse_type(name, "calibrator", f"{_FACTORY}{alternative}", _describe_rejected(calibrator))
    fault = None if calibrator is None else _read_unexpected_argument(calibrator)
    # Compare with None, because "" is a fault, too: it means that the function takes no spec.
    if fault is not None:
        inner = calibrator.func if isinstance(calibrator, functools.partial) else calibrator
        function = getattr(inner, "__name__", "the function")
        expected, got = f"{_FACTORY}{alternative}", f"{function}, which does not take a spec"
        if fault:
            expected += f", or functools.partial({function}, {fault}=...)"
            got = f"{function}, which needs {fault}= besides a spec"
        checks.refuse_type(name, "calibrator", expected, got)
    if not isinstance(calibrator, functools.partial):
        return calibrator
    # Sort the keywords, so that the order in which they were passed does not make two partials different.
    return Partial(calibrator.func, calibrator.args, tuple(sorted(calibrator.keywords.items())))


def _describe_rejected(calibrator: Any) -> str:
    """Return a description of a value that is not a function, with what to pass instead."""
    if isinstance(calibrator, Calibrator):
        return "a Calibrator, which has a spec already: pass the function that made it, which is called with the spec"
    if isinstance(calibrator, str):
        return f"the string {calibrator!r}: pass the function jq.calibration.{calibrator}"
    return str(checks.describe_value(calibrator))


def _read_unexpected_argument(factory: Callable[..., Any]) -> str | None:
    """Return the first argument that a function needs besides a spec, "" if it takes no spec, or None if it fits."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # not every callable has a signature
        return None
    parameters = signature.parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positional = [p for p in required if p.kind is not p.KEYWORD_ONLY]
    # The first positional parameter receives the spec.
    further_parameters = [*positional[1:], *(p for p in required if p.kind is p.KEYWORD_ONLY)]
    if further_parameters:
        return further_parameters[0].name
    try:
        # Optional parameters are fine, as long as one positional argument is accepted.
        signature.bind(None)
    except TypeError:
        return ""
    return None


def describe_factory(factory: Any) -> str:
    """Return the name of a calibrator's factory, with the arguments that are bound to it; "" for None."""
    if factory is None:
        return ""
    if isinstance(factory, Partial):
        inner = [describe_factory(factory.function), *map(_describe_argument, factory.arguments)]
        named = (f"{name}={_describe_argument(value)}" for name, value in factory.keywords)
        return f"partial({', '.join([*inner, *named])})"
    return str(getattr(factory, "__qualname__", type(factory).__qualname__))


def _describe_argument(value: Any) -> str:
    """Return a description of an argument of a partial: the name of a function, whose repr would have an address."""
    return describe_factory(value) if callable(value) else repr(value)
