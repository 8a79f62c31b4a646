"""The three evaluations of a program: observing its activations, on codes, and on floats that stand for codes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from .._arrays.quantize import find_parameters
from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._training.estimators import LSQ, LSQPlus, Rule, StraightThrough
from .._training.rounding_vjp import Config, make_array, quantize_and_dequantize
from ._learned import LearnedScale, read_learned
from ._plan import OperandPlan, Plan
from ._programs import jaxpr, operations, restructure
from ._programs.interpret import Records
from ._programs.sites import Address, Site

_NAME = "Prepared.apply"


class ObserveMode:
    """The float program, which also updates the state of a calibrator for each static range."""

    updates_records = True

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def replaces(self, site: Site) -> bool:
        """Return whether the contraction has a static range."""
        return any(operand.calibrator is not None for operand in self.plan.sites[site.name].activations)

    def contract(self, site: Site, operands: Sequence[Any], records: Records) -> tuple[Any, Records]:
        """Return the float result, and the states updated by the activations."""
        plan = self.plan.sites[site.name]
        states = dict(records[plan.record])
        for operand in plan.activations:
            assert operand.calibrator is not None
            calibrator, name = operand.calibrator(operand.spec), str(operand.place)
            states[name] = calibrator.update(states[name], lax.stop_gradient(operands[operand.place]))
        (result,) = jaxpr.evaluate(site.equation, operands)
        return result, {**records, plan.record: states}

    def find_record(self, site: Site) -> tuple[str, tuple[Address, ...]]:
        """Return the name of a site's record, and the scans with an entry for each iteration."""
        return self.plan.sites[site.name].record, self.plan.sites[site.name].layers

    def is_parameter(self, value: Any) -> bool:
        """Return False: parameters are plain arrays."""
        return False

    def can_join(self, parameters: Sequence[Any]) -> bool:
        """Return True: arrays can be concatenated."""
        return True

    def move_elements(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        """Return the results of an equation on arrays."""
        return jaxpr.evaluate(equation, operands)

    def convert_to_array(self, parameter: Any) -> jax.Array:
        """Return an array unchanged."""
        return parameter

    def prepare_stacked(self, parameter: Any) -> Any:
        """Return an array unchanged."""
        return parameter

    def call_with_rule(self, equation: Any, operands: Any, run: Callable[..., Any], records: Records) -> Any:
        """Return the results of the body: observing has no derivative."""
        return run(operands, records)

    call_with_remat = call_with_rule


class IntegerMode:
    """The program on codes."""

    updates_records = False

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def replaces(self, site: Site) -> bool:
        """Return whether the contraction runs on codes."""
        return self.plan.sites[site.name].is_replaced

    def contract(self, site: Site, operands: Sequence[Any], records: Records) -> tuple[Any, Records]:
        """Return the result of the contraction of codes."""
        assert site.weight is None or self.is_parameter(operands[site.weight])
        if site.operation == "take":
            return operations.look_up(site.equation, *operands), records
        plan, codes = self.plan.sites[site.name], list(operands)
        for operand in plan.activations:
            x = operations.refuse_gradient(operands[operand.place])
            part = None if operand.calibrator is None else records[plan.record][str(operand.place)]
            scale, zero_point = find_scale(operand.spec, x, part)
            codes[operand.place] = make_array(Config(operand.spec), x, scale, zero_point, None)
        return operations.make_operation(site.equation).contract_quantized(*codes), records

    def find_record(self, site: Site) -> tuple[str, tuple[Address, ...]]:
        """Return the name of a site's record, and the scans with an entry for each iteration."""
        return self.plan.sites[site.name].record, self.plan.sites[site.name].layers

    def is_parameter(self, value: Any) -> bool:
        """Return whether a value is a quantized parameter."""
        return isinstance(value, QuantizedArray)

    def can_join(self, parameters: Sequence[Any]) -> bool:
        """Return whether the codes of parameters can stand in one array."""
        return restructure.can_concatenate(parameters)

    def move_elements(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        """Return the results of an equation on codes."""
        return list(restructure.move_elements(equation, operands))

    def convert_to_array(self, parameter: Any) -> jax.Array:
        """Return the floats that a parameter's codes stand for."""
        return parameter.dequantize()

    def prepare_stacked(self, parameter: Any) -> Any:
        """Return a parameter with a scale for each index of its first axis."""
        return parameter.per_index(0)

    def call_with_rule(self, equation: Any, operands: Any, run: Callable[..., Any], records: Records) -> Any:
        """Return the results of the body: codes have no derivative."""
        return run(operands, records)

    call_with_remat = call_with_rule


class Twin(NamedTuple):
    """A parameter as the floats that its codes stand for, with their gradient, and as codes."""

    floats: Any
    codes: QuantizedArray


class TrainMode:
    """The program on codes, with the gradient of the floats that the codes stand for."""

    updates_records = False

    def __init__(self, plan: Plan, estimator: Rule) -> None:
        self.plan = plan
        self.estimator = estimator

    def replaces(self, site: Site) -> bool:
        """Return whether the contraction runs on codes."""
        return self.plan.sites[site.name].is_replaced

    def contract(self, site: Site, operands: Sequence[Any], records: Records) -> tuple[Any, Records]:
        """Return the result of the contraction of codes, with its gradient."""
        assert site.weight is None or self.is_parameter(operands[site.weight])
        if site.operation == "take":
            table, indices = operands
            (floats,) = jaxpr.evaluate(site.equation, [table.floats, indices])
            entries = operations.look_up(site.equation, lax.stop_gradient(table.codes), indices)
            # The value of the codes, with the gradient of the floats.
            return operations.replace_value(floats, entries), records
        plan = self.plan.sites[site.name]
        twins = [x if isinstance(x, Twin) else Twin(x, x) for x in operands]
        for operand in plan.activations:
            part = None if operand.calibrator is None else records[plan.record][str(operand.place)]
            twins[operand.place] = self.make_twin(operand, operands[operand.place], part)
        operation = operations.make_operation(site.equation)
        floats, codes = zip(*twins, strict=True)
        return operations.contract_with_gradient(operation, floats, codes), records

    def make_twin(self, operand: OperandPlan, x: jax.Array, part: Any) -> Twin:
        """Return activations as floats with a gradient, and as codes."""
        rule: Rule = StraightThrough()
        if isinstance(part, LearnedScale):
            rule = self.estimator
            if isinstance(rule, LSQ | LSQPlus) and rule.elements is None:
                # The paper counts the elements of one example.
                rule = dataclasses.replace(rule, elements=max(math.prod(x.shape[1:]), 1))
        return make_twin(operand.spec, x, part, rule)

    def find_record(self, site: Site) -> tuple[str, tuple[Address, ...]]:
        """Return the name of a site's record, and the scans with an entry for each iteration."""
        return self.plan.sites[site.name].record, self.plan.sites[site.name].layers

    def is_parameter(self, value: Any) -> bool:
        """Return whether a value is a parameter in both forms."""
        return isinstance(value, Twin)

    def can_join(self, parameters: Sequence[Any]) -> bool:
        """Return whether the codes of parameters can stand in one array."""
        return restructure.can_concatenate([x.codes for x in parameters])

    def move_elements(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        """Return the results of an equation on both forms."""
        floats = jaxpr.evaluate(equation, [x.floats if isinstance(x, Twin) else x for x in operands])
        codes = restructure.move_elements(equation, [x.codes if isinstance(x, Twin) else x for x in operands])
        if jaxpr.find_name(equation) == "optimization_barrier":
            # It has a result for each operand, and some operands may be activations.
            return [c if isinstance(c, jax.Array) else Twin(f, c) for f, c in zip(floats, codes, strict=True)]
        return [Twin(*pair) for pair in zip(floats, codes, strict=True)]

    def convert_to_array(self, parameter: Any) -> jax.Array:
        """Return the floats that the codes stand for, with their gradient."""
        # The same operation as in `IntegerMode`, so that XLA sums the elements in the same order.
        return operations.replace_value(parameter.floats, parameter.codes.dequantize())

    def prepare_stacked(self, parameter: Any) -> Any:
        """Return a parameter with a scale for each index of its first axis."""
        return Twin(parameter.floats, parameter.codes.per_index(0))

    def call_with_rule(self, equation: Any, operands: Any, run: Callable[..., Any], records: Records) -> Any:
        """Return the results of the body, with the derivative that the rule of the function gives its floats."""
        return operations.call_with_rule(equation, operands, run, records)

    def call_with_remat(self, equation: Any, operands: Any, run: Callable[..., Any], records: Records) -> Any:
        """Return the results of the body, which the backward pass computes again."""
        parameters = equation.params
        call = jax.checkpoint(run, prevent_cse=parameters["prevent_cse"], policy=parameters["policy"])
        return call(operands, records)


class InspectMode(TrainMode):
    """The float program, in which a function looks at the operands of contractions and returns their results.

    Parameters are arrays, or `Twin`s, of which the function itself reads the floats.
    """

    updates_records = True

    def __init__(self, plan: Plan, wants: Callable[[Site], bool], visit: Callable[..., tuple[Any, Records]]) -> None:
        super().__init__(plan, StraightThrough())
        self.wants = wants
        self.visit = visit

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


def find_scale(spec: QuantSpec, x: jax.Array, part: Any) -> tuple[jax.Array, jax.Array | None]:
    """Return the scale and the zero point of an array.

    Args:
        spec: how it is quantized.
        x: the array.
        part: its `Range`, its `LearnedScale`, or None for the range of the array itself.
    """
    if isinstance(part, LearnedScale):
        return read_learned(_NAME, part, x, spec)
    lo, hi = (None, None) if part is None else part
    return find_parameters(_NAME, lax.stop_gradient(x), spec, lo, hi)[:2]


def make_twin(spec: QuantSpec, x: jax.Array, part: Any, rule: Rule) -> Twin:
    """Return an array as floats with a gradient, and as codes."""
    scale, zero_point = find_scale(spec, x, part)
    config = Config(spec, rule)
    floats = quantize_and_dequantize(config, x, scale, zero_point, None)
    return Twin(floats, lax.stop_gradient(make_array(config, x, scale, zero_point, None)))
