"""`Session`: what algorithms and reports may ask about a prepared function, its parameters and its program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._arrays.quantized_array import read_entries
from .._core import checks
from .._program.analysis import Site
from .._program.jaxpr import Address, Equation
from .._program.replacing import Records, Stores
from .._training.estimators import StraightThrough
from . import _operations as operations
from ._calls import Signature, TracedCall, check_names, is_quantized, list_programs
from ._modes import TrainMode, Twin, quantize_activations
from ._plan import LeafPlan, OperandPlan, ProgramPlan, describe_site
from ._prepared import Prepared, read_quantized
from ._trees import QuantizedTree, Ranges

__all__ = [
    "InspectMode",
    "LeafPlan",
    "OperandPlan",
    "ProgramPlan",
    "Ranges",
    "Session",
    "Signature",
    "TracedCall",
    "Twin",
    "check_float_results",
    "contract_codes",
    "describe_site",
    "is_quantized",
    "list_programs",
    "match_ranges",
    "read_quantized",
]

# A function of a contraction, its operands and the records: it returns the result and the updated records.
Visitor = Callable[[Site, Sequence[Any], Records], tuple[Any, Records]]


class Session:
    """A prepared function with its float parameters, for an algorithm or a report that looks into its program.

    `ptq` and `report` are written in terms of this class, and so can others be. A session traces the function at the
    arguments of a batch (`trace`), tells how each contraction runs and what it reads (`TracedCall`), and evaluates the
    program with a function that looks at the operands of contractions (`inspect`).

    Attributes:
        function: the name of the public function that errors name, such as "ptq.collect".
        prepared: the prepared function; all its contractions return floats.
        parameters: the parameters of the function, in floats.
    """

    def __init__(self, function: str, prepared: Prepared, params: Any) -> None:
        """Check the prepared function and its parameters.

        Args:
            function: the name of the public function that errors name.
            prepared: the prepared function.
            params: its parameters, in floats.

        Raises:
            TypeError: prepared is no `Prepared`.
            ValueError: rules have an `output`, or the parameters have other paths or shapes than in `prepare`.
        """
        check_prepared(function, prepared)
        self.function, self.prepared = function, prepared
        with checks.name_errors(function):
            self.parameters: Signature = prepared._read_parameters("convert", params)

    @property
    def names(self) -> tuple[str, ...]:
        """The path of each parameter."""
        return self.prepared.names

    @property
    def leaves(self) -> Mapping[int, LeafPlan]:
        """How each parameter that the rules quantize is quantized, by its place in `names`."""
        return self.prepared.leaves

    def read_converted(self, q: QuantizedTree) -> Signature:
        """Return converted parameters, which must have the paths and the shapes that `prepare` saw."""
        converted = Signature(read_quantized(self.function, q).params)
        check_names(self.function, self.names, converted.names, "q.params")
        for leaf, plan in self.leaves.items():
            path, w = self.names[leaf], converted.arrays[leaf]
            expected, got = f"a quantized array at {path}", type(w).__name__
            checks.require_type(is_quantized(w), self.function, "q.params", expected, got)
            expected = f"the shape {plan.shape} at {path}, as in prepare"
            checks.require(w.shape == plan.shape, self.function, "q.params", expected, w.shape)
        return converted

    def read_ranges(self, ranges: Any) -> Mapping[str, Any]:
        """Return the ranges in a `QuantizedTree`, by the name of the contraction and the place of the operand."""
        with checks.name_errors(self.function):
            return self.prepared._read_records("apply", "q.ranges", ranges)

    def read_new_ranges(self, ranges: Any) -> Mapping[str, Any]:
        """Return the ranges that a user passes for a new `QuantizedTree`: None if no activation has a static range."""
        with checks.name_errors(self.function):
            return self.prepared._read_ranges("convert", ranges)

    def trace(self, args: Any, kwargs: Any, arrays: Sequence[Any] | None = None) -> TracedCall:
        """Return the program of a call, analyzed and planned.

        Args:
            args: the positional arguments of the function, without the parameters.
            kwargs: its keyword arguments.
            arrays: the arrays of the parameters, in floats: tracers inside of `jax.jit`. None takes the session's.
        """
        params = self.parameters.rebuild(self.parameters.arrays if arrays is None else arrays)
        with checks.name_errors(self.function):
            call = self.prepared._trace("apply", params, args, kwargs)
            self.prepared._check_floats("apply", call.parameters)
        return call

    def inspect(
        self, call: TracedCall, wants: Callable[[Site], bool], visit: Visitor, records: Records,
        arrays: Sequence[Any] | None = None,
    ) -> Records:  # fmt: skip
        """Return the records after a call in floats, in which a function looks at the operands of contractions.

        Args:
            call: the call.
            wants: whether the function looks at a contraction.
            visit: the function: of the contraction, its operands and the records, it returns the result and the updated
                records.
            records: what it updates, by the name of the contraction, with the axes of the scans around it.
            arrays: the parameters: arrays, or `Twin`s of floats and codes. None for the parameters of the call.
        """
        mode = InspectMode(call.plan, wants, visit)
        return self.prepared._interpret(mode, call, call.parameters.arrays if arrays is None else arrays, records)[1]


def check_prepared(function: str, prepared: Any) -> None:
    """Raise unless a value is a prepared function of floats, and all its contractions return floats."""
    given = sorted(prepared.given) if isinstance(prepared, Prepared) else []
    names = [prepared.names[place] for place in given]
    expected = "a function of parameters that were floats in prepare"
    checks.require(not names, function, "prepared", expected, f"codes at {', '.join(names[:4])}")
    check_float_results(function, prepared)


def check_float_results(function: str, prepared: Any) -> None:
    """Raise unless a value is a prepared function and all its contractions return floats.

    A contraction that returns codes has the factors of a batch normalization in its weights, and a bias of integers.
    """
    checks.require_type(isinstance(prepared, Prepared), function, "prepared", "a Prepared", type(prepared).__name__)
    names = [row.name for row in prepared.coverage.rows if row.output is not None]
    expected = "rules without `output`, such as jq.recipes.w8a8_static()"
    got = f"codes as the result of {', '.join(names[:4])}"
    checks.require(not names, function, "prepared", expected, got)


class InspectMode(TrainMode):
    """The float program, in which a function looks at the operands of contractions and returns their results.

    Parameters are arrays, or `Twin`s whose floats the function itself reads.
    """

    updates_records = True

    def __init__(self, plan: ProgramPlan, wants: Callable[[Site], bool], visit: Visitor) -> None:
        super().__init__(plan, None, StraightThrough())
        self.wants = wants
        self.visit = visit

    def choose_action(self, address: Address) -> None:
        """Return None: between contractions there are floats."""

    def replaces(self, site: Site) -> bool:
        """Return whether the function looks at the contraction."""
        return self.wants(site)

    def contract(self, site: Site, operands: Sequence[Any], records: Records, stores: Stores) -> tuple[Any, Records]:
        """Return what the function returns for a contraction: the result, and the updated records."""
        del stores
        return self.visit(site, operands, records)

    def locate_record(self, site: Site) -> tuple[str, tuple[Address, ...]]:
        """Return the name of a site, and the scans with an entry for each iteration."""
        return site.name, site.layers

    def convert_to_array(self, parameter: Any) -> jax.Array:
        """Return the floats of a parameter."""
        return parameter.floats

    def call_with_rule(self, equation: Equation, operands: Any, run: Callable[..., Any], records: Records) -> Any:
        """Return the results of the body: inspecting has no derivative."""
        return run(operands, records)

    call_with_remat = call_with_rule


def contract_codes(
    plan: ProgramPlan, site: Site, operands: Sequence[Any], ranges: Any
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
        codes[place] = quantize_activations(operand.spec, operands[place], ranges.get(str(place)))
        activations.append((operand, codes[place], read_entries(codes[place].scale)))
    return operations.make_operation(site.equation).contract_quantized(*codes), activations


def match_ranges(call: TracedCall, ranges: Any) -> dict[str, Any]:
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
