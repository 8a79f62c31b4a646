"""`Prepared`: a function with the plan of its quantization, and what can be computed with both."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._core import checks, entry_point
from .._program import jaxpr
from .._program.replacing import Mode, ReplacingInterpreter
from .._training.estimators import LSQ, PACT, LSQPlus, StraightThrough
from ..calibration import loop
from ..calibration.calibrator import Range, is_finite_state
from . import _coverage, _modes, _ranges
from ._adapted_mode import AdaptedMode
from ._calls import Signature, TracedCall, TracedFunctions, check_leaves, check_names, is_quantized, trace_call
from ._learned import LearnedScale, LearnedScales, ScaleEstimator, make_scales, read_part
from ._modes import make_larger_twin, make_weight_twin, quantize_weight, quantize_with_scale, start_at_codes
from ._plan import LeafPlan
from ._regions.folding import check_biases, enlarge_scales
from ._regions.rounding_points import Regions
from ._trees import FixedRanges, QuantizedTree, Ranges, TrainableTree
from .adapters import AdaptedTree, attach_adapters
from .rules import Rule

# What a tree of fixed ranges has in place of learned scales.
_NONE_LEARNED = LearnedScales({}, {}, StraightThrough())


# Compared by identity, and so hashable in spite of its dicts: it can be a static argument of `jax.jit`.
@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A function with a plan to run its contractions on codes; made by `prepare`.

    All methods take the function's own arguments: the parameters, for which `apply` takes a `QuantizedTree` and
    `fake_apply` a `TrainableTree`, then whatever else the function takes. They interpret its program in each call, so
    wrap them in `jax.jit` where they are called often. Arguments that are not arrays are static, as in `prepare`. As by
    `jax.jit`, the function is traced once for arguments of the same structure, shapes and dtypes. It is traced in each
    call if an argument cannot be hashed, or if it closes over tracers.

    Attributes:
        function: the function.
        rules: the rules.
        strict: whether a contraction that a rule wants on codes may stay in floats.
        names: the path of each array among the parameters.
        leaves: for each parameter that is quantized, by its place in `names`: its spec.
        given: the places of the parameters that had codes already when `prepare` saw them.
        coverage: what becomes of each contraction at the arguments of `prepare`.
        regions: what stays in codes between contractions, for the use of this class.
        static_ranges: the activations whose range calibration finds, by name.
        traced: the function as JAX traces it, for the use of this class.
    """

    function: Callable[..., Any]
    rules: tuple[Rule, ...]
    strict: bool
    names: tuple[str, ...]
    leaves: Mapping[int, LeafPlan]
    given: frozenset[int]
    coverage: _coverage.Coverage
    static_ranges: _ranges.StaticRanges
    regions: Regions
    traced: TracedFunctions

    def __repr__(self) -> str:
        """Return the function, and how many of its contractions are in each form."""
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        module = getattr(self.function, "__self__", None)
        if module is not None:  # the name of the class that a user wrote, and not of the one that defines the method
            name = f"{type(module).__qualname__}.{self.function.__name__}"
        return f"Prepared({name}: {self.coverage.summary})"

    def check(self, params: Any, /, *args: Any, **kwargs: Any) -> _coverage.Coverage:
        """Return the coverage at other arguments.

        Args:
            params: the parameters of the function, in floats, or a `QuantizedTree`.
            *args: its other arguments. Nothing is computed, so arrays may be `jax.ShapeDtypeStruct`.
            **kwargs: its keyword arguments.

        Raises:
            ValueError: the parameters have other paths than in `prepare`.
        """
        call = self._trace("check", params.params if isinstance(params, QuantizedTree) else params, args, kwargs)
        return _coverage.make_coverage(call.analysis, call.plan, self.names)

    # Static ranges.

    def init(self) -> dict[str, Any]:
        """Return the states of the calibrators, without data: a pytree, empty if no range is static."""
        return _ranges.make_states(self.static_ranges)

    def observe(self, state: dict[str, Any], params: Any, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the states of the calibrators, updated by the activations of one call in floats."""
        _ranges.check_tree("Prepared.observe", self.static_ranges, state)
        call = self._trace("observe", params, args, kwargs)
        self._check_floats("observe", call.parameters)
        self._check_records("observe", "state", call, state)
        arrays = [x.dequantize() if place in self.given else x for place, x in enumerate(call.parameters.arrays)]
        return self._interpret(_modes.ObserveMode(call.plan), call, arrays, state)[1]

    def merge(self, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        """Return the states that have seen the data of both."""
        return _ranges.map_states(
            "Prepared.merge", self.static_ranges, lambda e, *states: e.calibrator.merge(*states), a, b
        )

    def all_reduce(self, state: dict[str, Any], axis_name: Any) -> dict[str, Any]:
        """Return the states that have seen the data of all devices along an axis of `jax.shard_map`."""

        def reduce(entry: _ranges.StaticRange, part: Any) -> Any:
            return entry.calibrator.all_reduce(part, axis_name)

        return _ranges.map_states("Prepared.all_reduce", self.static_ranges, reduce, state)

    def finalize(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the range of each static activation.

        Raises:
            ValueError: with the name of the contraction in front: an activation has seen no data, a NaN, an infinity,
                or nothing but zeros. Under `jax.jit` such a range is NaN.
        """

        def finalize(entry: _ranges.StaticRange, part: Any) -> Any:
            # Zeros that no argument changes are no sign of missing data.
            return entry.calibrator.finalize(part, allow_zero=entry.is_constant)

        return _ranges.map_states("Prepared.finalize", self.static_ranges, finalize, state)

    def calibrate(
        self, params: Any, batches: Iterable[Any], /, *, state: dict[str, Any] | None = None, checkpoint: Any = None,
        progress: bool | None = None, **arguments: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the ranges of the static activations in some batches; each batch is one call in floats.

        Args:
            params: the parameters of the function, in floats.
            batches: an iterable of batches: an array is one argument, a tuple holds positional arguments, a mapping
                keyword arguments. Ints and bools in them are static. If no range is static, none is read.
            state: the states to start from, as `init` or `observe` returns them.
            checkpoint: the path of a file from which an interrupted loop goes on, and which it writes every minute.
            progress: whether to show a progress bar, with the package rich. None shows it on a terminal if rich is
                installed.
            **arguments: keyword arguments of every call, such as `train=False`. The function gets its arguments named
                `state`, `checkpoint` or `progress` from the batches.

        Returns:
            The ranges, by the name of the contraction and the place of the operand.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: there is no batch, a batch is not finite, an activation has seen no data, or the file was
                written for another function or other parameters.
        """
        _refuse_trees("Prepared.calibrate", params)
        signature = Signature(params)
        check_names("Prepared.calibrate", self.names, signature.names)
        if not self.static_ranges:
            return {}

        @jax.jit
        def observe_batch(state: Any, arrays: Any, batch: Signature) -> tuple[Any, jax.Array]:
            args, kwargs = batch.rebuild(batch.arrays)
            updated = self.observe(state, signature.rebuild(arrays), *args, **kwargs, **arguments)
            return updated, is_finite_state(updated)

        # The parameters are arguments of the jitted function: arrays that it closes over would be copied into the
        # program.
        compute_fingerprint = functools.cache(
            lambda: loop.compute_fingerprint(dict(zip(signature.names, signature.arrays, strict=True)))
        )
        step = loop.BatchStep(
            "Prepared.calibrate", lambda state, *batch: observe_batch(state, signature.arrays, Signature(batch)),
            compute_fingerprint, lambda state: _ranges.describe(self.static_ranges), frozenset(arguments),
        )  # fmt: skip
        start = self.init() if state is None else state
        final = loop.run_loop(
            step, start, batches, checkpoint=checkpoint, progress=progress, inspect=lambda state: None
        )
        with checks.name_errors("Prepared.calibrate"):
            return self.finalize(final)

    # Parameters.

    def convert(self, params: Any, ranges: Ranges | None = None, *, delete: bool = False) -> QuantizedTree:
        """Return the parameters, with a `QuantizedArray` for each weight that the rules quantize, and the ranges.

        A bias that becomes int32, as in integer-only networks, must fit together with the products that it is added to.
        Where it does not, as in a feature with tiny weights, the scale of that feature's weights is enlarged until
        it does. On a CPU, weights of many shapes share a few compiled programs, and codes of 2 or 4 bits are packed,
        as by `QuantizedArray.pack`, if nothing but loops over stacked layers contracts them.

        Args:
            params: the parameters of the function, in floats; or a `TrainableTree`, with its ranges or scales. Those
                that had codes in `prepare` keep them.
            ranges: the ranges of the static activations, as `calibrate` returns them. None or {} if there are none, and
                with a `TrainableTree`.
            delete: whether to delete the float array of each weight after it was quantized. The memory then holds the
                floats and one array of codes at most, and on a CPU a padded copy of one weight with up to 4 million
                elements. Of integer-only networks, the floats are deleted at the end. These arrays of `params` cannot
                be used any more. An array that `params` holds under another path without codes, too, is kept.

        Returns:
            One tree, to save and to pass to `apply`.

        Raises:
            TypeError: delete is not True or False, or ranges are none.
            ValueError: the rules have static activations, and a range is missing; there are ranges, and no activation
                is static; the parameters have other paths or shapes than in `prepare`, or are quantized already;
                delete is True inside of `jax.jit`; or a bias has more steps than int32 can hold, and its weights have
                no scale that could be enlarged.
        """
        checks.check_flag("Prepared.convert", "delete", delete)
        if isinstance(params, TrainableTree):
            expected = "None with a TrainableTree, which holds the ranges"
            checks.require(ranges is None, "Prepared.convert", "ranges", expected, _describe_tree(ranges))
            records, learned = self._read_scales("convert", params.scales)
            signature = self._read_parameters("convert", params.params)
        else:
            # The parameters first: where both are wrong, they are in the wrong order, or a tree of another method.
            signature = self._read_parameters("convert", params)
            records, learned = self._read_ranges("convert", ranges), _NONE_LEARNED
        can_delete = not (delete and any(checks.is_traced(x) for x in signature.arrays))
        expected = "False inside of jax.jit, where no array can be deleted"
        checks.require(can_delete, "Prepared.convert", "delete", expected, delete)
        originals, converted = signature.arrays, list(signature.arrays)
        # The floats are read again where a bias needs a larger scale.
        has_biases, unused = bool(self.regions.points), []
        for place, plan in self._list_floats().items():
            name, w = self.names[place], converted[place]
            with checks.prefix_errors(name), checks.name_errors("Prepared.convert"):
                folded = plan.multiply(w, signature.arrays)
                # Otherwise all weights are queued before the first float array can be deleted, and the memory holds all
                # of them.
                converted[place] = jax.block_until_ready(quantize_weight(folded, plan, learned.weights.get(name)))
            # An array with a second path is still needed.
            if delete and isinstance(w, jax.Array) and all(w is not x for x in converted):
                unused.append(w)
                if not has_biases:
                    unused.pop().delete()
        if has_biases:
            find = _modes.make_finder(self.static_ranges, records)
            with checks.name_errors("Prepared.convert"):
                for place, scale in enlarge_scales(self.regions, originals, converted, find).items():
                    w = self.leaves[place].multiply(originals[place], originals)
                    converted[place] = quantize_with_scale(w, self.leaves[place], converted[place], scale)
                check_biases(self.regions, originals, converted, find)
        for w in unused:
            w.delete()
        return QuantizedTree(signature.rebuild(converted), records)

    def trainable(
        self, params: Any, ranges: Ranges | None = None, *, estimator: ScaleEstimator | None = None,
        start: QuantizedTree | None = None,
    ) -> TrainableTree:  # fmt: skip
        """Return the parameters together with the ranges, which stay as they are, or with scales that are trained.

        With an estimator, the scales and zero points of weights and of static activations are trained. Those of weights
        start as the estimator's `initial` finds them, the others from the ranges. Dynamic ranges are not trained.
        `jq.PACT()` trains the scales of activations only.

        Args:
            params: the parameters of the function, in floats.
            ranges: the ranges of the static activations, as `calibrate` returns them. None or {} if there are none.
            estimator: the gradient rule of the scales: `jq.LSQ()`, `jq.LSQPlus()` or `jq.PACT()`. With `jq.LSQ()`, a
                zero point keeps its value. None keeps the ranges.
            start: codes to begin with, such as the result of `jq.ptq.apply`, where the estimator would choose others.
                The scales and zero points of weights start as they are there, and a weight with another code than there
                starts as the value of that code. Where scales may be negative, as in files of GGUF's Q4_0, they are
                trained with their signs, and may cross 0. It needs an estimator that trains the scales of weights.

        Returns:
            A pytree, for `fake_apply`, `convert` and an optimizer. Fixed ranges are not among its leaves, so no
            optimizer moves them. Inside a traced function that computes the ranges they are leaves with the gradient
            0. Learned scales are float32. Weight decay on either would shrink the ranges.

        Raises:
            TypeError: estimator is not one of these rules, or ranges are none.
            ValueError: as for `convert`; or, with the name of the weight or contraction in front, a spec has scales
                that are powers of two, the estimator keeps the zero point at 0 and the values are not all positive, or
                the codes to begin with are of another format, or have scales that may be negative, and results are
                rounded to codes.
        """
        signature = self._read_parameters("trainable", params)
        records = self._read_ranges("trainable", ranges)
        expected = "None, unless the estimator trains the scales of weights: jq.LSQ() or jq.LSQPlus()"
        holds = start is None or isinstance(estimator, LSQ | LSQPlus)
        checks.require(holds, "Prepared.trainable", "start", expected, f"codes with {estimator}")
        if estimator is None:
            return TrainableTree(params, FixedRanges(records))
        parameters = {
            self.names[place]: (plan.multiply(signature.arrays[place], signature.arrays), plan)
            for place, plan in self._list_floats().items()
        }
        with checks.name_errors("Prepared.trainable"):
            scales = make_scales(parameters, self.static_ranges, records, estimator)
            if start is None:
                return TrainableTree(params, scales)
            converted = Signature(read_quantized("Prepared.trainable", start, "start").params)
            check_names("Prepared.trainable", self.names, converted.names, "start")
            arrays = list(signature.arrays)
            for place, plan in self._list_floats().items():
                name = self.names[place]
                with checks.prefix_errors(name):
                    given = converted.arrays[place]
                    arrays[place], scales.weights[name] = start_at_codes(
                        "Prepared.trainable", arrays[place], plan, given, allows_signs=not self.regions.points
                    )
            return TrainableTree(signature.rebuild(arrays), scales)

    # Calls.

    def apply(self, q: QuantizedTree | AdaptedTree, /, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the function, with contractions of codes.

        Args:
            q: the converted parameters and the ranges; or an `AdaptedTree`, which has adapters for some of them.
            *args: the other arguments of the function.
            **kwargs: its keyword arguments.

        Raises:
            TypeError: q is no `QuantizedTree`; or the result is differentiated, and activations are quantized.
            ValueError: the parameters were not converted or have other paths; a range is missing; or the rules quantize
                a weight in another way at these arguments than at the arguments of `prepare`.
        """
        adapted = q if isinstance(q, AdaptedTree) else None
        frozen = read_quantized("Prepared.apply", q if adapted is None else adapted.frozen)
        call, records = self._trace_converted("apply", frozen, args, kwargs)
        mode: Mode = _modes.IntegerMode(call.plan, call.bind_statics())
        arrays = call.parameters.arrays
        with checks.name_errors("Prepared.apply"):
            if adapted is not None:
                mode = AdaptedMode(mode)
                arrays = attach_adapters("Prepared.apply", adapted, self.names, self.leaves, arrays)
            return self._interpret(mode, call, arrays, records)[0]

    def _trace_converted(self, method: str, q: QuantizedTree, args: Any, kwargs: Any) -> tuple[TracedCall, Any]:
        """Return the program of a call on codes, and the ranges of its activations."""
        records = self._read_records(method, "q.ranges", q.ranges)
        with self._explain_arguments(method, "q", args):
            call = self._trace(method, q.params, args, kwargs)
        self._check_converted(method, call)
        self._check_records(method, "q.ranges", call, records)
        return call, records

    def fake_apply(self, t: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `apply` on the converted parameters, bit for bit, with a gradient for training.

        Contractions have the gradient of the same contractions of floats; roundings have the gradient of
        `jq.StraightThrough()`, or of the estimator of trained scales.

        Args:
            t: a `TrainableTree`; the parameters alone, in floats, if no activation has a static range; or an
                `AdaptedTree`, whose codes stay as they are, for the gradient of its adapters.
            *args: the other arguments of the function.
            **kwargs: its keyword arguments.

        Raises:
            TypeError: t has no ranges, and activations are static.
            ValueError: as for `apply`; the parameters must be floats.
        """
        if isinstance(t, AdaptedTree):
            return self._train_adapters(t, args, kwargs)
        params, records, learned = self._read_trainable(t)
        with self._explain_arguments("fake_apply", "t", args):
            call = self._trace("fake_apply", params, args, kwargs)
        self._check_floats("fake_apply", call.parameters)
        self._check_records("fake_apply", "t.scales", call, records)
        mode = _modes.TrainMode(call.plan, call.bind_statics(), learned.estimator)
        arrays, parameters = call.parameters.arrays, list(call.parameters.arrays)
        for place, plan in self.leaves.items():
            name = self.names[place]
            if place in self.given:
                codes = jax.lax.stop_gradient(arrays[place])
                parameters[place] = _modes.Twin(codes.dequantize(), codes)
                continue
            with checks.prefix_errors(name), checks.name_errors("Prepared.fake_apply"):
                w = plan.multiply(arrays[place], arrays)
                parameters[place] = make_weight_twin(w, plan, learned.weights.get(name), learned.estimator)
        with checks.name_errors("Prepared.fake_apply"):
            # As in `convert`.
            for place, scale in self._compute_larger_scales(arrays, parameters, records).items():
                name, plan = self.names[place], self.leaves[place]
                w = plan.multiply(arrays[place], arrays)
                part, codes = learned.weights.get(name), parameters[place].codes
                parameters[place] = make_larger_twin(w, plan, part, learned.estimator, codes, scale)
            return self._interpret(mode, call, parameters, records)[0]

    def _train_adapters(self, t: AdaptedTree, args: Any, kwargs: Any) -> Any:
        """Return the result of `fake_apply` for adapters on codes."""
        function = "Prepared.fake_apply"
        call, records = self._trace_converted("fake_apply", read_quantized(function, t.frozen), args, kwargs)
        arrays = list(call.parameters.arrays)
        for place in self.leaves:
            arrays[place] = jax.lax.stop_gradient(arrays[place])
        mode = AdaptedMode(_modes.FrozenMode(call.plan, None))
        with checks.name_errors(function):
            parameters = attach_adapters(function, t, self.names, self.leaves, arrays)
            return self._interpret(mode, call, parameters, records)[0]

    @contextlib.contextmanager
    def _explain_arguments(self, method: str, tree: str, args: Sequence[Any]) -> Iterator[None]:
        """Say in the errors of a call that there is no argument for ranges, if the first argument looks like ranges."""
        first = args[0] if args else ...
        advice = f"{tree} holds the ranges, and the function's own arguments follow it: prepared.{method}({tree}, x)"
        expected = f"the arguments of the function, because {advice}"
        got = "ranges or scales in front of them"
        checks.require(not _holds_ranges(first), f"Prepared.{method}", "args", expected, got)
        try:
            yield
        except Exception as error:  # the function's own, for an argument that it does not have
            if first is None or (isinstance(first, Mapping) and not first):
                error.add_note(f"jaxquant.Prepared.{method}: {advice}; here {first} is in front of them.")
            raise

    def _compute_larger_scales(
        self, arrays: Sequence[Any], parameters: Sequence[Any], records: Any
    ) -> Mapping[int, jax.Array]:
        """Return the scales of `enlarge_scales` for parameters that are quantized during training."""
        if not self.regions.points:
            return {}
        codes = [parameters[i].codes if i in self.leaves else x for i, x in enumerate(parameters)]
        fixed, codes, records = jax.lax.stop_gradient((list(arrays), codes, records))
        return enlarge_scales(self.regions, fixed, codes, _modes.make_finder(self.static_ranges, records))

    def _interpret(self, mode: Mode, call: TracedCall, parameters: Sequence[Any], records: Any) -> tuple[Any, Any]:
        interpreter = ReplacingInterpreter(call.analysis, mode, records)
        body = jaxpr.Body(call.trace.program, call.trace.constants)
        results = interpreter.evaluate_body(body, call.list_operands(parameters))
        arrays = [mode.convert_to_array(x) if mode.is_parameter(x) or mode.is_codes(x) else x for x in results]
        return call.rebuild_result(arrays), interpreter.records

    def _trace(self, method: str, params: Any, args: Any, kwargs: Any) -> TracedCall:
        function = f"Prepared.{method}"
        _refuse_trees(function, params)
        # Before the function is traced, which may read a path that is missing, or contract a wrong shape.
        signature = Signature(params)
        check_names(function, self.names, signature.names)
        self._check_shapes(function, signature)
        given = {place: self.leaves[place].spec for place in self.given}
        call = trace_call(self.traced, self.rules, params, args, kwargs, self.leaves.keys(), given)
        if self.strict:
            _coverage.check_strict(function, _coverage.make_coverage(call.analysis, call.plan, self.names))
        check_leaves(function, self.names, self.leaves, call.plan.leaves)
        return call

    def _read_parameters(self, method: str, params: Any) -> Signature:
        """Return the parameters, which must have the paths and the shapes that `prepare` saw, in floats."""
        _refuse_trees(f"Prepared.{method}", params)
        signature = Signature(params)
        check_names(f"Prepared.{method}", self.names, signature.names)
        self._check_floats(method, signature)
        self._check_shapes(f"Prepared.{method}", signature)
        return signature

    def _read_trainable(self, t: Any) -> tuple[Any, Mapping[str, Any], LearnedScales]:
        """Return the parameters, the ranges or scales of the activations, and the scales that are trained."""
        if isinstance(t, TrainableTree):
            return t.params, *self._read_scales("fake_apply", t.scales)
        names = ", ".join(list(self.static_ranges)[:4])
        expected = f"prepared.trainable(params, ranges), because the ranges of {names} are static"
        is_plain = not isinstance(t, QuantizedTree)
        checks.require_type(
            is_plain and not names, "Prepared.fake_apply", "t", expected if names else "parameters in floats",
            _describe_tree(t) if is_plain else "a QuantizedTree, as for apply",
        )  # fmt: skip
        return t, {}, _NONE_LEARNED

    def _read_scales(self, method: str, scales: Any) -> tuple[Mapping[str, Any], LearnedScales]:
        """Return the ranges or scales of the activations, and the scales that are trained, of a `TrainableTree`."""
        function, argument = f"Prepared.{method}", "t.scales"
        expected = "the scales of the tree that trainable returned; load a saved tree with like="
        holds = isinstance(scales, LearnedScales | FixedRanges)
        checks.require_type(holds, function, argument, expected, _describe_tree(scales))
        if not isinstance(scales, LearnedScales):
            return self._read_records(method, argument, scales), _NONE_LEARNED
        names = {self.names[place] for place in self._list_floats()}
        # PACT trains no scales of weights.
        differing = sorted((set() if isinstance(scales.estimator, PACT) else names) ^ set(scales.weights))
        expected = "scales of the weights of this prepared function"
        checks.require(not differing, function, argument, expected, f"others at {', '.join(differing[:4])}")
        return self._read_records(method, argument, scales.activations), scales

    def _list_floats(self) -> dict[int, LeafPlan]:
        """Return the plans of the parameters that are floats until they are converted."""
        return {place: plan for place, plan in self.leaves.items() if place not in self.given}

    def _check_shapes(self, function: str, parameters: Signature) -> None:
        for place, plan in self.leaves.items():
            shape = tuple(parameters.arrays[place].shape)
            expected = f"the shape {plan.shape} at {self.names[place]}, as in prepare"
            checks.require(shape == plan.shape, function, "params", expected, shape)

    def _check_floats(self, method: str, parameters: Signature) -> None:
        for place in self.leaves:
            has_codes, name = is_quantized(parameters.arrays[place]), self.names[place]
            if place in self.given:
                checks.require(has_codes, f"Prepared.{method}", "params", f"a quantized array at {name}", "floats")
                continue
            got = "a quantized array, as for apply"
            checks.require(not has_codes, f"Prepared.{method}", "params", f"floats at {name}", got)

    def _check_converted(self, method: str, call: TracedCall) -> None:
        for place, plan in self.leaves.items():
            x, name = call.parameters.arrays[place], self.names[place]
            expected = f"a quantized array at {name}, as convert returns it"
            got = "floats" if not is_quantized(x) else f"{x.format} codes for {plan.spec}"
            holds = is_quantized(x) and x.format == plan.spec.dtype
            checks.require(holds, f"Prepared.{method}", "q.params", expected, got)

    def _read_ranges(self, method: str, ranges: Any) -> Mapping[str, Any]:
        """Return the ranges that the user passes: none if no activation is static."""
        got = f"ranges of {', '.join(map(str, list(ranges)[:4]))}" if isinstance(ranges, Mapping) else str(type(ranges))
        expected = "None, because no activation has a static range"
        checks.require(bool(self.static_ranges) or not ranges, f"Prepared.{method}", "ranges", expected, got)
        records = self._read_records(method, "ranges", {} if ranges is None else ranges)
        for name, places in records.items():
            for record in places.values():
                if not isinstance(record, LearnedScale):
                    _check_known_range(f"Prepared.{method}", name, *record)
        return records

    def _read_records(self, method: str, argument: str, records: Any) -> Mapping[str, Any]:
        """Return the ranges or scales of the activations by name."""
        function = f"Prepared.{method}"
        expected = "ranges as Prepared.calibrate returns them"
        checks.require_type(isinstance(records, Mapping), function, argument, expected, _describe_tree(records))
        missing = sorted(set(self.static_ranges) - set(records))
        expected = f"a range for each of the {len(self.static_ranges)} static activations, as Prepared.calibrate "
        expected += "returns them"
        checks.require(not missing, function, argument, expected, f"none for {', '.join(missing[:4])}")
        unknown = sorted(set(records) - set(self.static_ranges))
        for name, entries in self.static_ranges.items():
            places = records[name] if isinstance(records[name], Mapping) else ()
            unknown += sorted(f"{name}/{place}" for place in set(places) - {entry.place for entry in entries})
        expected = "ranges of this prepared function, in which no other activation is static"
        checks.require(not unknown, function, argument, expected, f"others at {', '.join(unknown[:4])}")
        return {
            name: {entry.place: read_part(function, argument, name, records[name], entry) for entry in entries}
            for name, entries in self.static_ranges.items()
        }

    def _check_records(self, method: str, argument: str, call: TracedCall, records: Mapping[str, Any]) -> None:
        """Raise unless there is a range for each static activation of this call."""
        needed = _ranges.list_ranges(call.analysis, call.plan)
        missing = sorted(set(needed) - set(records))
        expected = "the contractions that prepare saw; Rule(shared=True) gives all uses of a parameter one range"
        got = f"no range for {', '.join(missing[:4])}"
        checks.require(not missing, f"Prepared.{method}", argument, expected, got)
        for name, entries in needed.items():
            lengths, planned = (part[0].lengths for part in (entries, self.static_ranges[name]))
            expected = f"scans of lengths {planned} around {name}, as in prepare"
            checks.require(lengths == planned, f"Prepared.{method}", "args", expected, lengths)


def read_quantized(function: str, q: Any, argument: str = "q") -> QuantizedTree:
    """Return the tree that `apply` and what belongs to it take; raise unless it is a `QuantizedTree`."""
    expected = "a QuantizedTree, as Prepared.convert(params, ranges) returns it"
    # A file that was loaded without a target holds a dict.
    if isinstance(q, Mapping) and set(q) == {"params", "ranges"}:
        expected += ", or QuantizedTree(**tree) of a loaded tree"
    got = "a TrainableTree, as for fake_apply" if isinstance(q, TrainableTree) else _describe_tree(q)
    checks.require_type(isinstance(q, QuantizedTree), function, argument, expected, got)
    assert isinstance(q, QuantizedTree)
    return q


def _check_known_range(function: str, name: str, lo: Any, hi: Any) -> None:
    """Raise if a range is not finite or its ends are swapped; skip the check if they are traced."""
    ends = [entry_point.read_elements(end, is_awaited=True) for end in (lo, hi)]
    if any(end is None for end in ends):
        return
    low, high = (np.asarray(end, np.float32) for end in ends)
    is_finite = bool(np.isfinite(low).all() and np.isfinite(high).all())
    checks.require(is_finite, function, "ranges", f"finite numbers at {name}", "NaN or an infinity")
    if low.shape == high.shape or low.size == 1 or high.size == 1:
        is_ordered = bool((low <= high).all())
        checks.require(is_ordered, function, "ranges", f"Range(lo, hi) with lo at most hi at {name}", "more")


def _describe_tree(tree: Any) -> str:
    """Return what a tree is, without its arrays."""
    is_leaf = jax.tree_util.all_leaves([tree]) or tree is None
    return str(checks.describe_value(tree)) if is_leaf else f"a {type(tree).__name__}"


def _holds_ranges(value: Any) -> bool:
    """Return whether a value is ranges or scales, which are no argument of a function."""
    if isinstance(value, LearnedScales | FixedRanges):
        return True
    places = list(value.values()) if isinstance(value, Mapping) else []
    records = [record for place in places if isinstance(place, Mapping) for record in place.values()]
    return bool(records) and all(isinstance(record, Range) for record in records)


def _refuse_trees(function: str, params: Any) -> None:
    """Raise if the parameters are in a tree of this module."""
    is_plain = not isinstance(params, TrainableTree | QuantizedTree | AdaptedTree)
    expected = "the parameters of the function, in floats"
    expected += ", such as t.params" if isinstance(params, TrainableTree) else ""
    checks.require_type(is_plain, function, "params", expected, f"a {type(params).__name__}")
