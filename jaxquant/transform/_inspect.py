"""The evaluation of a program for algorithms and reports that look at the operands of its contractions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._core import checks
from .._training.estimators import StraightThrough
from .._training.rounding_vjp import RoundingConfig, make_array
from ._calls import Call, Signature, check_names, is_quantized
from ._modes import TrainMode, Twin, find_scale
from ._plan import OperandPlan, Plan
from ._prepared import Prepared, read_quantized
from ._programs import operations
from ._programs.interpret import Records, Stores
from ._programs.sites import Address, Site
from ._trees import QuantizedTree


def check_prepared(function: str, prepared: Any) -> None:
    """Raise unless a value is a prepared function whose contractions return floats.

    A contraction that returns codes has the factors of a batch normalization in its weights, and a bias of integers.
    """
    checks.require_type(isinstance(prepared, Prepared), function, "prepared", "a Prepared", type(prepared).__name__)
    names = [prepared.names[place] for place in sorted(prepared.given)]
    expected = "a function whose parameters were floats in prepare"
    checks.require(not names, function, "prepared", expected, f"codes at {', '.join(names[:4])}")
    names = [row.name for row in prepared.coverage.rows if row.output is not None]
    expected = "rules without `output`, such as those of jq.recipes.w8a8_static()"
    got = f"codes as the result of {', '.join(names[:4])}"
    checks.require(not names, function, "prepared", expected, got)


def read_converted(function: str, prepared: Prepared, q: QuantizedTree) -> Signature:
    """Return converted parameters, which must have the paths and the shapes that `prepare` saw."""
    converted = Signature(read_quantized(function, q).params)
    check_names(function, prepared.names, converted.names, "q.params")
    for leaf, plan in prepared.leaves.items():
        path, w = prepared.names[leaf], converted.arrays[leaf]
        checks.require_type(is_quantized(w), function, "q.params", f"a quantized array at {path}", type(w).__name__)
        expected = f"the shape {plan.shape} at {path}, as in prepare"
        checks.require(w.shape == plan.shape, function, "q.params", expected, w.shape)
    return converted


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

    def contract(self, site: Site, operands: Sequence[Any], records: Records, stores: Stores) -> tuple[Any, Records]:
        """Return what the function returns for a contraction: the result, and the updated records."""
        del stores
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


def contract_codes(
    plan: Plan, site: Site, operands: Sequence[Any], ranges: Any
) -> tuple[jax.Array, list[tuple[OperandPlan, Any, jax.Array]]]:
    """Return the result of a contraction on codes, and the plan, the codes and the scale of each activation.

    Args:
        plan: the plan of the program.
        site: the contraction.
        operands: arrays, and a `Twin` for a parameter.
        ranges: the ranges of its static activations, by the place of the operand.
    """
    # Of other operands the floats are rounded below, or stay as they are.
    codes = [x.codes if isinstance(x, Twin) else x for x in operands]
    if site.operation == "take":
        return operations.look_up(site.equation, codes[0], operands[1]), []
    activations = []
    for operand in plan.sites[site.name].activations:
        place = int(operand.place)
        scale, point = find_scale(operand.spec, operands[place], ranges.get(str(place)))
        codes[place] = make_array(RoundingConfig(operand.spec), operands[place], scale, point, None)
        activations.append((operand, codes[place], scale))
    return operations.make_operation(site.equation).contract_quantized(*codes), activations


def find_ranges(call: Call, ranges: Any) -> dict[str, Any]:
    """Return the ranges of each contraction on codes by its name, with the axes of its scans."""
    result = {}
    for site in call.analysis.sites.values():
        plan = call.plan.sites[site.name]
        if not plan.is_replaced:
            continue
        part = ranges.get(plan.record, {}) if any(x.calibrator is not None for x in plan.activations) else {}
        lengths = site.lengths
        if not plan.layers:  # a range that all iterations share
            part = jax.tree.map(lambda x, n=lengths: jnp.broadcast_to(x, (*n, *x.shape)), part)
        result[site.name] = part
    return result
