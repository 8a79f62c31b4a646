"""The evaluation of a program for algorithms and reports that look at the operands of its contractions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._core import checks
from .._training.estimators import StraightThrough
from ._modes import TrainMode
from ._plan import Plan
from ._prepared import Prepared
from ._programs.interpret import Records
from ._programs.sites import Address, Site


def check_prepared(function: str, prepared: Any) -> None:
    """Raise unless a value is a prepared function whose contractions return floats.

    A contraction that returns codes has the factors of a batch normalization in its weights, and a bias of integers.
    """
    checks.require_type(isinstance(prepared, Prepared), function, "prepared", "a Prepared", type(prepared).__name__)
    names = [row.name for row in prepared.coverage.rows if row.output is not None]
    expected = "rules without `output`, such as those of jq.recipes.w8a8_static()"
    got = f"codes as the result of {', '.join(names[:4])}"
    checks.require(not names, function, "prepared", expected, got)


class InspectMode(TrainMode):
    """The float program, in which a function looks at the operands of contractions and returns their results.

    Parameters are arrays, or `Twin`s, of which the function itself reads the floats.
    """

    updates_records = True

    def __init__(self, plan: Plan, wants: Callable[[Site], bool], visit: Callable[..., tuple[Any, Records]]) -> None:
        super().__init__(plan, None, StraightThrough())
        self.wants = wants
        self.visit = visit

    def find_action(self, address: Address) -> None:
        """Return None: between contractions there are floats."""

    def replaces(self, site: Site) -> bool:
        """Return whether the function looks at the contraction."""
        return self.wants(site)

    def contract(self, site: Site, operands: Sequence[Any], records: Records) -> tuple[Any, Records]:
        """Return what the function returns for a contraction: the result, and the updated records."""
        return self.visit(site, operands, records)

    def find_record(self, site: Site) -> tuple[str, tuple[Address, ...]]:
        """Return the name of a site, and the scans with an entry for each iteration."""
        return site.name, site.layers

    def convert_to_array(self, parameter: Any) -> jax.Array:
        """Return the floats of a parameter."""
        return parameter.floats

    def call_with_rule(self, equation: Any, operands: Any, run: Callable[..., Any], records: Records) -> Any:
        """Return the results of the body: inspecting has no derivative."""
        return run(operands, records)

    call_with_remat = call_with_rule
