"""`BitPlan`: a dtype for each weight, and the integer program that chooses it; plots of a plan solve it again."""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .._core import checks

if TYPE_CHECKING:
    from ..transform.rules import Rule

_NAME = "ptq.allocate_bits"


@dataclasses.dataclass(frozen=True)
class BitPlan:
    """A dtype for each weight.

    Attributes:
        choices: the dtype of each weight by its path, "float" for one that stays in floats.
        nbytes: the bytes of all these weights.
        damage: the sum of the damages of the choices.
        table: for each weight and each candidate, the bytes and the damage.
        rules: rules for `jq.prepare`: the rules of the function, with these dtypes.
    """

    choices: Mapping[str, str]
    nbytes: int
    damage: float
    table: Mapping[str, Mapping[str, tuple[int, float]]]
    rules: tuple[Rule, ...]

    def __str__(self) -> str:
        """Return the choices as a table."""
        width = max((len(path) for path in self.choices), default=0)
        lines = [
            f"{path.ljust(width)}  {dtype:8}  {self.table[path][dtype][0]:>10,} bytes  {self.table[path][dtype][1]:.3g}"
            for path, dtype in self.choices.items()
        ]
        return "\n".join([*lines, f"{self.nbytes:,} bytes, damage {self.damage:.3g}"])


def solve_plan(
    sizes: np.ndarray, damages: np.ndarray, budget: float | None, most_damage: float | None, paths: Sequence[str] = (),
) -> tuple[int, ...]:  # fmt: skip
    """Return the choice of each weight: the exact minimum of damage within a budget, or of size within some damage.

    Args:
        sizes: [weights, candidates], in bytes.
        damages: [weights, candidates].
        budget: the most bytes, or None.
        most_damage: the largest damage, or None.
        paths: the paths of the weights, for errors.
    """
    goal, limited, limit = (damages, sizes, budget) if most_damage is None else (sizes, damages, most_damage)
    assert limit is not None
    least = float(limited.min(1).sum())
    argument = "budget" if most_damage is None else "most_damage"
    expected = f"at least {least:.6g}, what the candidates with the least take"
    if paths:
        largest = int(limited.min(1).argmax())
        expected += f" (most of it {paths[largest]}: {limited.min(1)[largest]:.6g})"
    checks.require(limit >= least, _NAME, argument, expected, limit)
    try:
        # scipy is optional, and nothing but this solver needs it.
        optimize = importlib.import_module("scipy.optimize")
    except ModuleNotFoundError as error:
        text = f'jaxquant.{_NAME}: expected the package scipy: pip install "jaxquant[ptq]", got none installed'
        raise ModuleNotFoundError(text, name="scipy") from error
    # A candidate that exceeds the limit alone is in no plan, and its row would be larger than 1.
    is_allowed = limited <= limit
    while True:
        choice = _solve_once(optimize, goal, limited / (limit if limit > 0 else 1), is_allowed)
        checks.require(choice is not None, _NAME, argument, "a plan that meets it", limit)
        assert choice is not None
        # The solver stops within an absolute gap. A candidate that alone costs more than this plan is in no better
        # one: without it the costs are of the size of the plan's, and so is the gap.
        value = goal[np.arange(len(goal)), choice].sum()
        is_rest = is_allowed & (goal <= value)
        if (is_rest == is_allowed).all():
            return tuple(int(place) for place in choice)
        is_allowed = is_rest


def _solve_once(
    optimize: types.ModuleType, goal: np.ndarray, rows: np.ndarray, is_allowed: np.ndarray
) -> np.ndarray | None:
    """Return the choice with the least goal and a sum of the rows of at most 1, or None."""
    weights, candidates = goal.shape
    # The solver's tolerances are absolute, so that all numbers are at most 1.
    costs, rows = (np.where(is_allowed, x, 0).ravel() for x in (goal, rows))
    result = optimize.milp(
        costs / max(costs.max(), np.finfo(float).tiny), integrality=np.ones(goal.size),
        bounds=optimize.Bounds(0, is_allowed.ravel().astype(float)),
        constraints=[
            optimize.LinearConstraint(np.kron(np.eye(weights), np.ones(candidates)), 1, 1),
            optimize.LinearConstraint(rows[None], -np.inf, 1),
        ],
        # By default the solver stops at a plan that is up to 1e-4 worse than the best one.
        options={"mip_rel_gap": 0.0},
    )  # fmt: skip
    return None if result.x is None else result.x.reshape(weights, candidates).argmax(1)
