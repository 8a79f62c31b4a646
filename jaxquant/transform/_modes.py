"""The three evaluations of a program: observing its activations, on codes, and on floats that stand for codes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays.parts import derive_packing
from .._arrays.quantize import compute_parameters, encode_array, quantize, quantize_kernel, quantize_under_range
from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._codes.fake_codes import finish_training
from .._core import checks
from .._kernels.barriers import replace_value
from .._program import jaxpr
from .._program.analysis import Address, Site
from .._program.jaxpr import Equation
from .._program.replacing import Records, Stores
from .._training.estimators import LSQ, Estimator, LSQPlus, StraightThrough
from .._training.fake_quantize import Quantizer
from .._training.rounding_vjp import RoundingConfig, make_array, quantize_and_dequantize
from . import _moved_codes as moved_codes
from . import _operations as operations
from ._learned import LearnedScale, SignedScale, read_learned
from ._plan import LeafPlan, OperandPlan, ProgramPlan
from ._ranges import StaticRanges
from ._regions.folding import compute_factor_and_bias
from ._regions.rounding_points import OUTPUT, Action, RoundingPoint
from ._regions.run import (
    PendingResult,
    RegionCodes,
    combine_codes,
    contract_to_codes,
    dequantize_codes,
    finish_floats,
    run_move,
)
from ._regions.statics import StaticValues

_NAME = "Prepared.apply"


class _PlannedMode:
    """What all modes have in common: the plan."""

    def __init__(self, plan: ProgramPlan) -> None:
        self.plan = plan

    def locate_record(self, site: Site) -> tuple[str, tuple[Address, ...]]:
        """Return the name of a site's record, and the scans with an entry for each iteration."""
        return self.plan.sites[site.name].record, self.plan.sites[site.name].layers

    def choose_action(self, address: Address) -> Action | None:
        """Return what becomes of an equation between contractions that runs on codes, or None."""
        return self.plan.regions.actions.get(address)

    def is_codes(self, value: Any) -> bool:
        """Return whether a value is codes between contractions, or will be when the equations of its point were met."""
        return isinstance(value, RegionCodes | PendingResult)


class ObserveMode(_PlannedMode):
    """The float program, which also updates the state of a calibrator for each static range."""

    updates_records = True

    def replaces(self, site: Site) -> bool:
        """Return whether the contraction has a static range."""
        has_range = any(operand.calibrator is not None for operand in self.plan.sites[site.name].activations)
        return has_range or self.plan.regions.get_point(site) is not None

    def contract(self, site: Site, operands: Sequence[Any], records: Records, stores: Stores) -> tuple[Any, Records]:
        """Return the float result, and the states updated by the activations."""
        plan, arrivals = self.plan.sites[site.name], self.plan.regions.arrivals.get(site.name, ())
        for operand in plan.activations:
            if operand.calibrator is not None and operand.place not in arrivals:
                x = operands[operand.place]  # type: ignore[index]
                records = _update_state(records, plan.record, operand, x)
        action = self.choose_action(site.address)
        if action is not None:
            (result,), records = self.run_action(action, operands, records)
            return result, records
        (result,) = jaxpr.evaluate(site.equation, operands)
        return result, records

    def run_action(self, action: Action, operands: Sequence[Any], records: Records) -> tuple[list[Any], Records]:
        """Return the float results of an equation, and the state updated by a result that is rounded."""
        results = jaxpr.evaluate(action.node.equation, operands)
        if action.is_end and action.point is not None:
            operand = OperandPlan(OUTPUT, *action.point.output)
            records = _update_state(records, action.point.name, operand, results[0])
        return results, records

    def is_parameter(self, value: Any) -> bool:
        """Return False: parameters are plain arrays."""
        return False

    def can_join(self, parameters: Sequence[Any]) -> bool:
        """Return True: arrays can be concatenated."""
        return True

    def move_elements(self, equation: Equation, operands: Sequence[Any]) -> list[Any]:
        """Return the results of an equation on arrays."""
        return jaxpr.evaluate(equation, operands)

    def convert_to_array(self, parameter: Any) -> jax.Array:
        """Return an array unchanged."""
        return parameter

    def prepare_stacked(self, parameter: Any) -> Any:
        """Return an array unchanged."""
        return parameter

    def call_with_rule(self, equation: Equation, operands: Any, run: Callable[..., Any], records: Records) -> Any:
        """Return the results of the body: observing has no derivative."""
        return run(operands, records)

    call_with_remat = call_with_rule


def _update_state(records: Records, name: str, operand: OperandPlan, x: jax.Array) -> Records:
    """Return the records with the state of one calibrator updated by an array."""
    calibrator, place = operand.make_calibrator(), str(operand.place)
    state = calibrator.update(records[name][place], lax.stop_gradient(x))
    return {**records, name: {**records[name], place: state}}


class _CodesMode(_PlannedMode):
    """What the modes have in common in which contractions run on codes.

    Args:
        plan: the plan.
        statics: the values that depend on parameters only, or None if no result is rounded to codes.
    """

    updates_records = False

    def __init__(self, plan: ProgramPlan, statics: StaticValues | None) -> None:
        super().__init__(plan)
        self.statics = statics

    def replaces(self, site: Site) -> bool:
        """Return whether the contraction runs on codes."""
        return self.plan.sites[site.name].is_replaced

    def run_action(self, action: Action, operands: Sequence[Any], records: Records) -> tuple[list[Any], Records]:
        """Return the results of an equation on codes."""
        graph = self.plan.regions.graph
        assert graph is not None
        if action.kind in ("move", "hidden") or action.point is None:
            return list(run_move(graph, action, operands)), records
        if action.kind == "start":
            result = PendingResult(
                action.point, tuple(value.array for value in operands if isinstance(value, RegionCodes))
            )
        else:
            result = next(value for value in operands if isinstance(value, PendingResult))
        return [self.finish(result, records) if action.is_end else result], records

    def finish(self, pending: PendingResult, records: Records) -> RegionCodes:
        """Return the codes of a result."""
        point, graph = pending.point, self.plan.regions.graph
        assert graph is not None
        assert self.statics is not None
        quantizer = self.make_quantizer(point, graph.get_shape(point.value), records[point.name][OUTPUT])
        if point.site is None:
            return RegionCodes(combine_codes(graph, point, pending.operands, quantizer))
        _, bias = compute_factor_and_bias(self.statics, point)
        return RegionCodes(self.contract_to_codes(point, pending.operands, bias, quantizer))

    def finish_contraction(self, site: Site, operands: Sequence[Any], records: Records) -> Any:
        """Return the codes of a contraction, or the operands if equations of its point follow."""
        action = self.choose_action(site.address)
        assert action is not None
        assert action.point is not None
        pending = PendingResult(action.point, operands)
        return self.finish(pending, records) if action.is_end else pending

    def make_quantizer(self, point: RoundingPoint, shape: tuple[int, ...], part: Any) -> Quantizer:
        """Return how a result is quantized."""
        spec = point.output.spec
        like: Any = jnp.zeros(shape) if isinstance(part, LearnedScale) else jax.ShapeDtypeStruct(shape, jnp.float32)
        return Quantizer(spec, *compute_scale(spec, like, part))

    def contract_to_codes(
        self, point: RoundingPoint, operands: Sequence[Any], bias: jax.Array | None, quantizer: Quantizer
    ) -> Any:
        """Return the codes of a contraction."""
        raise NotImplementedError


class IntegerMode(_CodesMode):
    """The program on codes."""

    def contract(self, site: Site, operands: Sequence[Any], records: Records, stores: Stores) -> tuple[Any, Records]:
        """Return the result of the contraction of codes."""
        operands = dequantize_codes(operands, self.plan.regions.arrivals.get(site.name, ()))
        assert site.weight is None or self.is_parameter(operands[site.weight])
        if site.operation == "take":
            return operations.look_up(site.equation, *operands), records
        plan, codes = self.plan.sites[site.name], [x.array if isinstance(x, RegionCodes) else x for x in operands]
        for operand in [entry for entry in plan.activations if not isinstance(operands[int(entry.place)], RegionCodes)]:
            place = int(operand.place)
            part = None if operand.calibrator is None else records[plan.record][str(place)]
            # A dynamic range belongs to the value, whichever contraction reads it.
            store = stores[place] if part is None else {}
            if operand.spec not in store:
                x = operations.refuse_gradient(operands[place])
                store[operand.spec] = quantize_activations(operand.spec, x, part)
            codes[place] = store[operand.spec]
        if self.plan.regions.get_point(site) is not None:
            return self.finish_contraction(site, codes, records), records
        return operations.make_operation(site.equation).contract_quantized(*codes), records

    def contract_to_codes(
        self, point: RoundingPoint, operands: Sequence[Any], bias: jax.Array | None, quantizer: Quantizer
    ) -> Any:
        """Return the codes of a contraction."""
        graph, operation = self.plan.regions.graph, operations.make_operation(point.node.equation)
        assert graph is not None
        bias = None if bias is None else operations.refuse_gradient(bias)
        return contract_to_codes(graph, point, operation, operands, bias, quantizer)

    def is_parameter(self, value: Any) -> bool:
        """Return whether a value is a quantized parameter."""
        return isinstance(value, QuantizedArray)

    def can_join(self, parameters: Sequence[Any]) -> bool:
        """Return whether the codes of parameters can stand in one array."""
        return moved_codes.can_concatenate(parameters)

    def move_elements(self, equation: Equation, operands: Sequence[Any]) -> list[Any]:
        """Return the results of an equation on codes."""
        return list(moved_codes.move_elements(equation, operands))

    def convert_to_array(self, parameter: Any) -> jax.Array:
        """Return the floats that codes stand for."""
        return parameter.to_array() if isinstance(parameter, RegionCodes) else parameter.dequantize()

    def prepare_stacked(self, parameter: Any) -> Any:
        """Return a parameter with a scale for each index of its first axis."""
        # A scan takes one index of the first axis of each part, and a scale that all layers share has only one.
        return parameter.per_index(0)

    def call_with_rule(self, equation: Equation, operands: Any, run: Callable[..., Any], records: Records) -> Any:
        """Return the results of the body: codes have no derivative."""
        return run(operands, records)

    call_with_remat = call_with_rule


class Twin(NamedTuple):
    """A parameter as the floats that its codes stand for, with their gradient, and as codes."""

    floats: Any
    codes: QuantizedArray


def _read_twin(x: Any) -> Twin:
    """Return an operand as floats with a gradient, and as codes; activations without codes are floats in both."""
    if isinstance(x, RegionCodes):
        return Twin(x.array.values, x.array.quantize())
    return x if isinstance(x, Twin) else Twin(x, x)


class TrainMode(_CodesMode):
    """The program on codes, with the gradient of the floats that the codes stand for.

    Args:
        plan: the plan.
        statics: the values that depend on parameters only, or None if no result is rounded to codes.
        estimator: the gradient rule of scales that are trained.
    """

    def __init__(self, plan: ProgramPlan, statics: StaticValues | None, estimator: Estimator) -> None:
        super().__init__(plan, statics)
        self.estimator = estimator

    def contract(self, site: Site, operands: Sequence[Any], records: Records, stores: Stores) -> tuple[Any, Records]:
        """Return the result of the contraction of codes, with its gradient."""
        operands = dequantize_codes(operands, self.plan.regions.arrivals.get(site.name, ()))
        assert site.weight is None or self.is_parameter(operands[site.weight])
        if site.operation == "take":
            table, indices = operands
            (floats,) = jaxpr.evaluate(site.equation, [table.floats, indices])
            entries = operations.look_up(site.equation, lax.stop_gradient(table.codes), indices)
            return replace_value(floats, entries), records
        plan = self.plan.sites[site.name]
        twins = [_read_twin(x) for x in operands]
        for operand in plan.activations:
            place = int(operand.place)
            if not isinstance(operands[place], RegionCodes):
                part = None if operand.calibrator is None else records[plan.record][str(place)]
                rule = self.choose_rule(part, operands[place].shape)
                twins[place] = make_twin(operand.spec, operands[place], part, rule)
        if self.plan.regions.get_point(site) is not None:
            return self.finish_contraction(site, twins, records), records
        operation = operations.make_operation(site.equation)
        floats, codes = zip(*twins, strict=True)
        return operations.contract_with_gradient(operation, plan.backward, floats, codes), records

    def choose_rule(self, part: Any, shape: Sequence[int]) -> Estimator:
        """Return the gradient rule of activations of a shape."""
        if not isinstance(part, LearnedScale):
            return StraightThrough()
        rule = self.estimator
        if isinstance(rule, LSQ | LSQPlus) and rule.elements is None:
            # The paper counts the elements of one example.
            rule = dataclasses.replace(rule, elements=max(math.prod(shape[1:]), 1))
        return rule

    def make_quantizer(self, point: RoundingPoint, shape: tuple[int, ...], part: Any) -> Quantizer:
        """Return how a result is quantized, with its gradient rule."""
        return dataclasses.replace(super().make_quantizer(point, shape, part), gradient=self.choose_rule(part, shape))

    def contract_to_codes(
        self, point: RoundingPoint, operands: Sequence[Any], bias: jax.Array | None, quantizer: Quantizer
    ) -> Any:
        """Return the codes of a contraction as floats with the gradient of the contraction with a float bias."""
        graph, operation = self.plan.regions.graph, operations.make_operation(point.node.equation)
        assert graph is not None
        assert point.site is not None
        floats, codes = zip(*operands, strict=True)
        backward = self.plan.sites[point.site.name].backward
        y: Any = operations.contract_with_gradient(operation, backward, floats, codes)
        y = finish_floats(graph, point, y, bias)
        fixed = lax.stop_gradient(quantizer)
        exact = contract_to_codes(graph, point, operation, lax.stop_gradient(codes), bias, fixed)
        return finish_training(y, quantizer, exact)

    def is_parameter(self, value: Any) -> bool:
        """Return whether a value is a parameter in both forms."""
        return isinstance(value, Twin)

    def can_join(self, parameters: Sequence[Any]) -> bool:
        """Return whether the codes of parameters can stand in one array."""
        return moved_codes.can_concatenate([x.codes for x in parameters])

    def move_elements(self, equation: Equation, operands: Sequence[Any]) -> list[Any]:
        """Return the results of an equation on both forms."""
        floats = jaxpr.evaluate(equation, [x.floats if isinstance(x, Twin) else x for x in operands])
        codes = moved_codes.move_elements(equation, [x.codes if isinstance(x, Twin) else x for x in operands])
        if jaxpr.read_name(equation) == "optimization_barrier":
            # It has a result for each operand, and some operands may be activations.
            return [c if isinstance(c, jax.Array) else Twin(f, c) for f, c in zip(floats, codes, strict=True)]
        return [Twin(*pair) for pair in zip(floats, codes, strict=True)]

    def convert_to_array(self, parameter: Any) -> jax.Array:
        """Return the floats that the codes stand for, with their gradient."""
        if isinstance(parameter, RegionCodes):
            return parameter.to_array()
        # The same operation as in `IntegerMode`, so that XLA sums the elements in the same order.
        return replace_value(parameter.floats, parameter.codes.dequantize())

    def prepare_stacked(self, parameter: Any) -> Any:
        """Return a parameter with a scale for each index of its first axis."""
        return Twin(parameter.floats, parameter.codes.per_index(0))

    def call_with_rule(self, equation: Equation, operands: Any, run: Callable[..., Any], records: Records) -> Any:
        """Return the results of the body, with the derivative that the rule of the function gives its floats."""
        return operations.call_with_rule(equation, operands, run, records)

    def call_with_remat(self, equation: Equation, operands: Any, run: Callable[..., Any], records: Records) -> Any:
        """Return the results of the body, which the backward pass computes again."""
        parameters = equation.params
        call = jax.checkpoint(run, prevent_cse=parameters["prevent_cse"], policy=parameters["policy"])
        return call(operands, records)


class FrozenMode(IntegerMode):
    """The program on codes that stay as they are, with a gradient for activations.

    A contraction of floats with codes has a gradient of its own, which dequantizes the codes again and keeps no floats.
    """

    def contract(self, site: Site, operands: Sequence[Any], records: Records, stores: Stores) -> tuple[Any, Records]:
        """Return the result of the contraction of codes, with the gradient of the activations."""
        if not self.plan.sites[site.name].activations:
            if site.operation != "dot_general" or not isinstance(operands[site.weight or 0].scale, jax.Array):
                return super().contract(site, operands, records, stores)
            operation = operations.make_operation(site.equation)
            return operations.multiply_frozen(operation, operands, site.weight or 0), records
        twins = [Twin(x.dequantize(), x) if isinstance(x, QuantizedArray) else x for x in operands]
        return TrainMode(self.plan, self.statics, StraightThrough()).contract(site, twins, records, stores)

    def call_with_rule(self, equation: Equation, operands: Any, run: Callable[..., Any], records: Records) -> Any:
        """Return the results of the body, with the derivative that the rule of the function gives its floats."""
        return operations.call_with_rule(equation, operands, run, records)


def compute_scale(spec: QuantSpec, x: Any, part: Any) -> tuple[jax.Array, jax.Array | None]:
    """Return the scale and the zero point of an array.

    Args:
        spec: how it is quantized.
        x: the array; with a `Range`, its shape is enough.
        part: its `Range`, its `LearnedScale`, or None for the range of the array itself.
    """
    if isinstance(part, LearnedScale):
        return read_learned(_NAME, part, x, spec)
    lo, hi = (None, None) if part is None else part
    # The gradient of a rounding is that at a fixed scale, also where the scale is found in x. A shape has only a rank.
    fixed = x if isinstance(x, jax.ShapeDtypeStruct) else lax.stop_gradient(x)
    return compute_parameters(_NAME, fixed, spec, lo, hi)[:2]


def quantize_activations(spec: QuantSpec, x: jax.Array, part: Any) -> QuantizedArray:
    """Return activations as codes; the arguments are as in `compute_scale`."""
    if spec.offset or spec.scale_spec is not None:
        expected = "a spec without an offset and without a scale_spec, because its scale is trained or enlarged"
        checks.require(not isinstance(part, LearnedScale), _NAME, "spec", expected, spec)
        return quantize(x, spec) if part is None else quantize_under_range(x, spec, *part)
    return make_array(RoundingConfig(spec), x, *compute_scale(spec, x, part), None)


def make_finder(ranges: StaticRanges, records: Mapping[str, Any]) -> Callable[[str, str], Any]:
    """Return a function of the name and the place of a static range, which returns its scale, or None without one."""

    def find(name: str, place: str) -> Any:
        for entry in ranges.get(name, ()):
            if entry.place == place:
                part, shape = records[name][place], entry.shape
                is_learned = isinstance(part, LearnedScale)
                like = jnp.zeros(shape) if is_learned else jax.ShapeDtypeStruct(shape, jnp.float32)
                return compute_scale(entry.operand.spec, like, part)[0]
        return None

    return find


def make_twin(spec: QuantSpec, x: jax.Array, part: Any, rule: Estimator) -> Twin:
    """Return an array as floats with a gradient, and as codes."""
    if spec.offset or spec.scale_spec is not None:
        fixed = lax.stop_gradient(x)
        codes = quantize_activations(spec, fixed, lax.stop_gradient(part))
        change = x - fixed  # which is 0
        if part is not None:
            # What is beyond a static range saturates, and has no gradient.
            reached = jnp.maximum(*(jnp.abs(end).reshape(()) for end in part)).astype(x.dtype)
            change = jnp.where(jnp.abs(fixed) <= reached, change, jnp.zeros((), x.dtype))
        return Twin(codes.dequantize() + change, codes)
    scale, zero_point = compute_scale(spec, x, part)
    config, is_signed, wide = RoundingConfig(spec, rule), isinstance(part, SignedScale), scale
    if isinstance(part, LearnedScale) and scale.dtype != jnp.float32:
        # The gradient of a narrower scale would be as narrow: in float16 0 below 6e-8, and infinite above 65504.
        wide, _ = compute_scale(dataclasses.replace(spec, scale_dtype=jnp.float32), x, part)
        wide = replace_value(wide, scale.astype(jnp.float32))
    floats = quantize_and_dequantize(config, x, wide, zero_point, None)
    return Twin(floats, lax.stop_gradient(make_array(config, x, scale, zero_point, None, signed_scale=is_signed)))


# The conversion of one parameter: to codes, or to codes and the floats that are trained.


@functools.partial(jax.jit, static_argnames="plan")
def _encode_learned(w: jax.Array, part: LearnedScale, plan: LeafPlan) -> Any:
    scale, zero_point = read_learned("Prepared.convert", part, w, plan.spec)
    is_signed = isinstance(part, SignedScale)
    return make_array(RoundingConfig(plan.spec), w, scale, zero_point, None, signed_scale=is_signed)


def quantize_weight(w: Any, plan: LeafPlan, part: LearnedScale | None) -> Any:
    """Return a parameter as codes, with a scale that was trained or the scale of its range."""
    if part is None:
        return plan.store(quantize_kernel(w, plan.spec, plan.stored_last))
    return plan.store(_encode_learned(jnp.asarray(w), part, plan))


def start_at_codes(
    function: str, w: Any, plan: LeafPlan, q: Any, *, allows_signs: bool
) -> tuple[jax.Array, LearnedScale]:
    """Return a weight that is rounded to given codes, and their scale as one that is trained.

    Args:
        function: the public function that errors name.
        w: the weight, in floats. An element that the given scale rounds to the given code stays as it is.
        plan: how it is quantized.
        q: the codes.
        allows_signs: whether scales may be negative. Networks whose results are codes enlarge positive ones.
    """
    spec = plan.spec
    expected = f"an array of {spec.dtype} of shape {w.shape} with {spec.scale_dtype} scales"
    expected += "" if allows_signs else " that are positive, because results are codes"
    holds = isinstance(q, QuantizedArray) and (q.format, q.shape) == (spec.dtype, w.shape) and q.offset is None
    holds = holds and isinstance(q.scale, jax.Array) and q.scale.dtype == spec.scale_dtype
    holds = holds and (allows_signs or not q.signed_scale)
    checks.require(holds, function, "start", expected, q if isinstance(q, QuantizedArray) else type(q).__name__)
    expected = "codes of a weight that no normalization is folded into"
    checks.require(plan.fold is None, function, "start", expected, "a weight that is multiplied by one")
    w = jnp.asarray(w)
    part = (SignedScale if q.signed_scale else LearnedScale)(
        q.scale.astype(jnp.float32), None if spec.symmetric else jnp.asarray(q.zero_point).astype(jnp.float32)
    )
    parts = read_learned(function, part, w, spec)
    found = make_array(RoundingConfig(spec), w, *parts, None, signed_scale=q.signed_scale)
    fixed, point = spec.fixed_zero_point, q.zero_point
    has_fixed = (
        fixed is None or checks.is_traced(point) or bool(jnp.all(jnp.asarray(0 if point is None else point) == fixed))
    )
    expected = f"scales of shape {found.scale.shape} and the zero points of {spec}"
    checks.require(q.scale.shape == found.scale.shape and has_fixed, function, "start", expected, q)
    is_same = found.codes.astype(jnp.float32) == q.codes.astype(jnp.float32)
    return jnp.where(is_same, w, q.dequantize().astype(w.dtype)), part


def quantize_with_scale(w: Any, plan: LeafPlan, q: QuantizedArray, scale: jax.Array) -> QuantizedArray:
    """Return a parameter quantized again, with other scales and the same zero points."""
    codes = encode_array(jnp.asarray(w), scale, q.zero_point, plan.spec)
    result = QuantizedArray(
        codes, scale, q.zero_point, dtype=q.dtype, block_size=q.block_size, codebook=q.codebook,
        packing=derive_packing(plan.spec.dtype, codes.shape, None),
    )  # fmt: skip
    return plan.store(result)


def make_weight_twin(w: Any, plan: LeafPlan, part: LearnedScale | None, rule: Any) -> Twin:
    """Return a parameter as the floats that its codes stand for, with their gradient, and as codes."""
    twin = make_twin(plan.spec, jnp.asarray(w), part, StraightThrough() if part is None else rule)
    # XLA must not fuse what finds the codes with what follows the contraction, which is float: the result of a tanh
    # depends on the loop in which it is. After the barrier the codes are like those that `apply` gets as arguments.
    return Twin(twin.floats, jax.lax.optimization_barrier(plan.store(twin.codes)))


def make_larger_twin(
    w: Any, plan: LeafPlan, part: LearnedScale | None, rule: Any, codes: QuantizedArray, scale: jax.Array
) -> Twin:
    """Return a parameter as `make_weight_twin` does, with larger scales where a bias needs them.

    Args:
        w: the parameter, in floats.
        plan: how it is quantized.
        part: the scale that is trained, or None.
        rule: the estimator of that scale.
        codes: the parameter as codes, with the scale that it has otherwise.
        scale: the larger scales; the others are in `codes`. They have no gradient.
    """
    zero_point = None if codes.zero_point is None else codes.zero_point.astype(jnp.float32)
    if part is None:
        return make_weight_twin(w, plan, LearnedScale(scale, zero_point), StraightThrough())
    larger = jnp.where(scale > codes.scale, scale, part.scale)
    return make_weight_twin(w, plan, part._replace(scale=larger), rule)
