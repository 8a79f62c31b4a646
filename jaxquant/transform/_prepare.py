"""`prepare` and `Prepared`: a function, the plan of its quantization, and what can be computed with both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays.quantize import quantize
from .._arrays.quantized_array import QuantizedArray
from .._core import checks, dtypes
from .._training.estimators import Rule as Estimator
from .._training.estimators import StraightThrough
from . import _analysis, _modes, _program, _views
from ._coverage import Coverage, list_missing, make_coverage
from ._interpret import Interpreter
from ._plan import LeafPlan, OperandPlan, Plan, make_plan
from .rules import Rule

_NAME = "prepare"


def _is_quantized(value: Any) -> bool:
    return isinstance(value, QuantizedArray)


def is_array(value: Any) -> bool:
    """Return whether a leaf is an array, or stands for one; a Python float or complex number counts as one."""
    return (hasattr(value, "shape") and hasattr(value, "dtype")) or isinstance(value, float | complex)


class Signature:
    """The structure of a call: which leaves are arrays, and what the others are."""

    def __init__(self, tree: Any) -> None:
        leaves, self.structure = jax.tree.flatten(tree, is_leaf=_is_quantized)
        self.places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]
        self.arrays = [leaves[place] for place in self.places]
        self.leaves = [None if is_array(leaf) else leaf for leaf in leaves]

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """Return the tree with other arrays."""
        leaves = list(self.leaves)
        for place, array in zip(self.places, arrays, strict=True):
            leaves[place] = array
        return jax.tree.unflatten(self.structure, leaves)


def _describe_array(value: Any) -> Any:
    """Return an array as what tracing needs of it; a quantized array as the floats that it stands for."""
    if isinstance(value, QuantizedArray):
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    return value


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A call that has been traced, analyzed and planned."""

    trace: _program.Trace
    analysis: _analysis.Analysis
    plan: Plan
    structure: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A function whose contractions are planned to run on codes; made by `prepare`."""

    function: Callable[..., Any]
    rules: tuple[Rule, ...]
    strict: bool
    names: tuple[str, ...]
    leaves: Mapping[int, LeafPlan]
    coverage: Coverage
    ranged: Mapping[str, Any]

    def check(self, params: Any, *args: Any, **kwargs: Any) -> Coverage:
        """Return the coverage at other arguments, which are not read."""
        traced, _ = _trace_call(self.function, self.rules, params, args, kwargs)
        return make_coverage(traced.analysis, traced.plan, self.names)

    def init(self) -> dict[str, Any]:
        """Return the states of the calibrators, without data."""
        return {
            record: {str(operand.place): _make_state(operand, lengths, shape) for operand, shape in operands}
            for record, (operands, lengths) in self.ranged.items()
        }

    def observe(self, state: dict[str, Any], params: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the states updated by one call."""
        _, states = self._run(_modes.ObserveMode, state, params, args, kwargs)
        return states

    def merge(self, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        """Return the states that hold the data of both."""
        return self._map_states(lambda calibrator, *pair: calibrator.merge(*pair), a, b)

    def finalize(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the range of each static activation."""
        return self._map_states(lambda calibrator, one: calibrator.finalize(one), state)

    def _map_states(self, function: Any, *states: dict[str, Any]) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for record, (operands, lengths) in self.ranged.items():
            results[record] = {}
            for operand, _ in operands:
                place = str(operand.place)
                calibrator = operand.calibrator(operand.spec)

                def call(*parts: Any, calibrator: Any = calibrator) -> Any:
                    return function(calibrator, *parts)

                for _ in lengths:
                    call = jax.vmap(call)
                results[record][place] = call(*(state[record][place] for state in states))
        return results

    def calibrate(self, params: Any, batches: Iterable[Any], *, state: Any = None, progress: bool = True) -> Any:
        """Return the ranges of the activations in batches."""
        observe = jax.jit(self.observe)
        state = self.init() if state is None else state
        for batch in batches:
            state = observe(state, params, *(batch if isinstance(batch, tuple) else (batch,)))
        return self.finalize(state)

    def convert(self, params: Any, scales: Any = None, *, delete: bool = False) -> Any:
        """Return the parameters with codes in place of the weights."""
        signature = Signature(params)
        converted = list(signature.arrays)
        for place, plan in self.leaves.items():
            w = converted[place]
            converted[place] = jax.block_until_ready(quantize(w, plan.spec, stored_last=plan.stored_last or None))
            if delete:
                w.delete()
        return signature.rebuild(converted)

    def apply(self, params: Any, ranges: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the function, with contractions of codes."""
        return self._run(_modes.IntegerMode, ranges, params, args, kwargs)[0]

    def fake_apply(
        self, params: Any, ranges: Any, *args: Any, estimator: Estimator = StraightThrough(), **kwargs: Any
    ) -> Any:
        """Return the result of `apply` on the converted parameters, with a gradient."""
        return self._run(lambda plan: _modes.TrainMode(plan, estimator), ranges, params, args, kwargs)[0]

    def _run(self, make_mode: Any, records: Any, params: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        traced, arrays = _trace_call(self.function, self.rules, params, args, kwargs)
        mode = make_mode(traced.plan)
        count = len(Signature(params).arrays)
        arrays = [self._read_parameter(mode, place, x) if place < count else x for place, x in enumerate(arrays)]
        interpreter = Interpreter(traced.analysis, mode, records)
        body = _program.Body(traced.trace.program, traced.trace.constants)
        results = [
            mode.convert_to_array(x) if mode.is_parameter(x) else x for x in interpreter.run(body, arrays)
        ]
        return jax.tree.unflatten(traced.structure, results), interpreter.records

    def _read_parameter(self, mode: Any, place: int, value: Any) -> Any:
        plan = self.leaves.get(place)
        if not isinstance(mode, _modes.TrainMode) or plan is None:
            return value
        operand = OperandPlan(place, plan.spec, None)
        twin = _modes.make_twin(operand, value, None, StraightThrough())
        codes = twin.codes.store_last(*plan.stored_last) if plan.stored_last else twin.codes
        return _modes.Twin(twin.floats, codes)


def _make_state(operand: OperandPlan, lengths: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    state = operand.calibrator(operand.spec).init(jax.ShapeDtypeStruct(shape, jnp.float32))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*lengths, *x.shape)), state)


def _trace_call(
    function: Callable[..., Any], rules: Sequence[Rule], params: Any, args: Any, kwargs: Any
) -> tuple[_Traced, list[Any]]:
    """Return a call traced, analyzed and planned, and its arrays."""
    parameters, arguments = Signature(params), Signature((args, kwargs))
    count = len(parameters.arrays)

    def call(*arrays: Any) -> Any:
        positional, named = arguments.rebuild(arrays[count:])
        return function(parameters.rebuild(arrays[:count]), *positional, **named)

    arrays = [*parameters.arrays, *arguments.arrays]
    trace = _program.trace(call, *(_describe_array(x) for x in arrays))
    names = list_names(params)
    avals = [variable.aval for variable in trace.program.invars]
    origins = [
        _views.view_parameter(place, aval.shape, aval.dtype)
        if place < count and aval.dtype in dtypes.FLOATS
        else (_views.Data() if place >= count else _views.Constant())
        for place, aval in enumerate(avals)
    ]
    analysis = _analysis.analyze_program(trace, origins, names)
    plan = make_plan(analysis, rules, names, [aval.shape for aval in avals[:count]])
    return _Traced(trace, analysis, plan, jax.tree.structure(trace.result)), arrays


def list_names(params: Any) -> list[str]:
    """Return the path of each array of the parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_quantized)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, leaf in leaves if is_array(leaf)]


def prepare(
    function: Callable[..., Any], params: Any, *args: Any, rules: Sequence[Rule], strict: bool = False, **kwargs: Any
) -> Prepared:
    """Plan how the contractions of a function run on codes."""
    traced, _ = _trace_call(function, rules, params, args, kwargs)
    names = tuple(list_names(params))
    checks.require_type(bool(names), _NAME, "params", "a tree with arrays", checks.describe_value(params))
    for rule in traced.plan.unmatched:
        expected = f"a path that matches one of {', '.join(sorted({p for s in traced.analysis.sites.values() for p in (s.name,)})[:8])}"
        checks.require(False, _NAME, "rules", expected, repr(rule.path))
    coverage = make_coverage(traced.analysis, traced.plan, names)
    missing = list(list_missing(coverage))
    if strict and missing:
        checks.require(False, _NAME, "rules", "no contraction that a rule wants in floats", "; ".join(missing))
    ranged: dict[str, Any] = {}
    for site in traced.analysis.sites.values():
        plan = traced.plan.sites[site.name]
        operands = [o for o in plan.activations if o.calibrator is not None]
        if operands:
            shapes = [site.equation.invars[o.place].aval.shape for o in operands]
            ranged.setdefault(plan.record, (list(zip(operands, shapes, strict=True)), site.lengths))
    return Prepared(function, tuple(rules), strict, names, traced.plan.leaves, coverage, ranged)
