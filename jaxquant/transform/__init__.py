"""The transform of any JAX function into one whose contractions run on codes."""

from . import recipes
from ._coverage import Coverage, Operation, Row
from ._learned import LearnedScale, LearnedScales
from ._prepare import prepare
from ._prepared import Prepared
from .rules import Activation, Rule, SiteView, Weight
from .session import Session

__all__ = [
    "Activation",
    "Coverage",
    "LearnedScale",
    "LearnedScales",
    "Operation",
    "Prepared",
    "Row",
    "Rule",
    "Session",
    "SiteView",
    "Weight",
    "prepare",
    "recipes",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
