"""The transform of any JAX function into one that contracts codes."""

from . import recipes
from ._coverage import Coverage, Operation, Row
from ._learned import LearnedScale, LearnedScales
from ._prepare import prepare
from ._prepared import Prepared
from ._trees import FixedRanges, QuantizedTree, TrainableTree
from .rules import Activation, Rule, SiteView, Weight
from .session import Session

__all__ = [
    "Activation",
    "Coverage",
    "FixedRanges",
    "LearnedScale",
    "LearnedScales",
    "Operation",
    "Prepared",
    "QuantizedTree",
    "Row",
    "Rule",
    "Session",
    "SiteView",
    "TrainableTree",
    "Weight",
    "prepare",
    "recipes",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
