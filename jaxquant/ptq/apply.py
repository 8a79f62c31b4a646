"""`apply`: an algorithm on each weight of a prepared function."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays.concatenate import concatenate
from .._arrays.quantize import quantize
from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._core import checks
from .._program import jaxpr
from .._program.analysis import Site
from .._program.interpreter import Visit
from .._program.jaxpr import Address, Body, Equation
from .._program.replacing import Records, ReplacingInterpreter
from ..calibration import loop
from ..transform import Prepared, QuantizedTree
from ..transform.session import InspectMode, Ranges, Session, TracedCall, list_programs
from . import _grid, inputs, neighbors
from ._grid import Axis, make_layout
from .collect import MOMENTS, Statistics, finalize_moments, has_statistics, make_mode, make_states
from .methods import GPTQ, AdaRound, Method, Nearest, check_method, has_own_scales, measure_error
from .moments import Moments
from .notes import Note, Notes, Outcome

_NAME = "ptq.apply"
# What `match_floats` tries, of the mean square of the inputs.
_DAMPINGS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_PART = 0.5  # of the moments of the inputs, beside the moments of gradients
# The elements of a weight that are quantized at a time: algorithms take ten times the memory of the weight, which for a
# table of a vocabulary is more than the rest of a model. Matrices of 4096 x 4096 are not cut.
_MOST_ELEMENTS = 2**24
_HIGHEST = jax.lax.Precision.HIGHEST
_MEASURE = "the mean squared error of the outputs, with round-to-nearest and with the method"


def apply(
    prepared: Prepared, params: Any, data: Statistics | Iterable[Any] | None, method: Method, *,
    ranges: Ranges | None = None, match_floats: bool = False, gradients: Mapping[str, jax.Array] | None = None,
    state: Mapping[str, QuantizedArray] | None = None,
    on_layer: Callable[[dict[str, QuantizedArray]], None] | None = None, progress: bool | None = None,
    **arguments: Any,
) -> Outcome:  # fmt: skip
    """Quantize the weights of a prepared function with an algorithm in place of round-to-nearest.

    The specs come from the rules. What `data` is decides which inputs the algorithm sees:

    - batches: layer by layer. All batches go through the program together, operation by operation. At each contraction
      the weight is quantized with the inputs that come from the quantized weights before it, and the outputs go on with
      the quantized weight. So each layer can make up for the errors of earlier ones, as in the paper on GPTQ. Of all
      batches, the values that later operations read are in memory. Contractions in a loop get the inputs of a loop of
      float weights, and a weight with several uses gets the inputs of the first;
    - `ptq.Statistics`, as `collect` returns them: all inputs come from the float function, which needs one pass over
      the batches in a jitted program, and memory for one batch;
    - None: for `ptq.HQQ()` and for `ptq.Nearest()`, which need no data.

    With `match_floats`, a layer also makes up for what earlier ones have changed in its inputs. With the inputs x of
    the quantized function and z of the float one, the method minimizes E[(W^T z - Wq^T x)^2], and not
    E[(W^T x - Wq^T x)^2]. That is the same as quantizing

    W' = W + (E[x x^T] + damping)^-1 E[x (z - x)^T] W

    Where an array of the same shape is added to the outputs, as in a residual network, the layer makes up for what has
    changed in that array, too, as far as its inputs tell. With the array r, and s in the float function, the term
    (E[x x^T] + damping)^-1 E[x (s - r)^T] is added to W'.

    Of some dampings, from 0.001 to 3 of the mean of the diagonal, a layer gets the one whose correction, found in one
    half of the vectors of each batch, lowers the error of the other half most. If none lowers it, W' = W.

    With `gradients`, the errors of a weight also count by what they do to the results of the function, and not only to
    the outputs of its contraction: the method gets the mean of both second moments, scaled to the same trace. Those of
    gradients belong to the float function alone.

    A weight without inputs (a table that is looked up), and one whose axes the program splits, joins or slices before
    it is contracted, is rounded to nearest with the range of the method; the notes say so.

    To stop and go on later, save what `on_layer` gets, a dict of quantized arrays, for example with orbax, and pass it
    as `state`. The batches go through the program again, but the weights in the state keep their codes.

    Args:
        prepared: the prepared function.
        params: its parameters, in floats.
        data: batches, as for `Prepared.calibrate`, or statistics, or None.
        method: `ptq.GPTQ(...)`, `ptq.AdaRound(...)`, `ptq.HQQ(...)` or `ptq.Nearest(...)`.
        ranges: the ranges of the static activations, as for `Prepared.convert`. None or {} if there are none.
        match_floats: with batches, whether the outputs of a layer shall equal the float function's. The batches go
            through the float function, too, which takes twice the time and the memory of the values.
        gradients: second moments of gradients by path, as `collect_gradients` returns them. Weights that it has not are
            quantized as without it.
        state: the weights that are quantized already, by path, as `on_layer` got them.
        on_layer: a function that is called after each weight, with all weights that are quantized so far.
        progress: whether to show a progress bar, with the package rich. None shows it on a terminal.
        **arguments: with batches, keyword arguments of every call, such as `train=False`.

    Returns:
        A `QuantizedTree`, as `Prepared.convert` returns it, and notes: a row for each of the weights.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the parameters have other paths or shapes than in `prepare`; the batches differ in shapes,
            dtypes or static arguments; the statistics have no entry for a weight; the method needs data, and there are
            none; the state has other weights; or, with the name of the weight in front, the weight or its inputs have a
            NaN or an infinity.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> apply = lambda params, x: jax.nn.relu(x @ params["first"]) @ params["second"]
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> params = {"first": jax.random.normal(keys[0], (16, 8)), "second": jax.random.normal(keys[1], (8, 4))}
        >>> x = jax.random.normal(keys[2], (64, 16))
        >>> prepared = jq.prepare(apply, params, x, rules=[jq.Rule(weight=jq.Weight("int4"))])
        >>> q, notes = ptq.apply(prepared, params, [x], ptq.GPTQ())
        >>> str(q.params["first"].codes.dtype), [note.after < note.before for note in notes]
        ('int4', [True, True])

    Source: Frantar et al., arXiv 2210.17323, section 4 and the setup of section 5, for the order of the layers; Li et
    al., arXiv 2504.02692, section 3.1, for the objective of `match_floats`; Stone, Cross-Validatory Choice and
    Assessment of Statistical Predictions (1974), section 2, for the choice of the damping.
    """
    session = Session(_NAME, prepared, params)
    check_method(_NAME, method)
    loop.check_progress(_NAME, progress)
    checks.check_flag(_NAME, "match_floats", match_floats)
    can_match = not match_floats or not (data is None or isinstance(data, Statistics))
    checks.require(can_match, _NAME, "data", "batches, with match_floats=True", checks.describe_value(data))
    has_data = data is not None or not _needs_data(method)
    checks.require(has_data, _NAME, "data", f"batches or statistics for {method}", "None")
    records, signature = session.read_new_ranges(ranges), session.parameters
    arrays, notes = list(signature.arrays), {}
    known, slopes = _read_state(prepared, state), _read_gradients(prepared, gradients)
    bar = loop.Bar("quantizing", len(prepared.leaves), progress)

    def quantize_leaf(
        leaf: int, found: tuple[inputs.Uses, Moments] | str, drift: _Drift | None = None
    ) -> QuantizedArray:  # fmt: skip
        """Quantize a parameter, note what was done, and return its codes."""
        path, w = prepared.names[leaf], jnp.asarray(signature.arrays[leaf])
        with checks.prefix_errors(path):
            arrays[leaf], notes[leaf] = _quantize(
                prepared, leaf, w, found, drift, method, known.get(path), slopes.get(path)
            )
        bar.count_step()
        if on_layer is not None:
            on_layer({prepared.names[place]: arrays[place] for place in notes})
        return arrays[leaf]

    try:
        if isinstance(data, Statistics):
            for leaf in prepared.leaves:
                quantize_leaf(leaf, _read_statistics(data, prepared.names[leaf], prepared.leaves[leaf].shape))
        elif data is not None:
            split = loop.read_batches(_NAME, data, arguments, "data")
            _run_layers(session, split, arguments, quantize_leaf, match_floats)
        for leaf in prepared.leaves:
            if leaf not in notes:
                uses = _explain_missing(prepared, leaf)
                quantize_leaf(leaf, uses if data is not None else "no data")
    finally:
        bar.stop()
    rows = tuple(notes[leaf] for leaf in prepared.leaves)
    return Outcome(QuantizedTree(signature.rebuild(arrays), records), Notes(rows, _MEASURE))


def _read_state(prepared: Prepared, state: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the weights that are quantized already; raise unless they fit."""
    known: Any = {} if state is None else state
    checks.require_type(isinstance(known, Mapping), _NAME, "state", "a dict by path, or None", type(state).__name__)
    plans = {prepared.names[leaf]: plan for leaf, plan in prepared.leaves.items()}
    for path, q in known.items():
        expected = f"weights that the rules quantize: {', '.join(list(plans)[:4])}"
        checks.require(path in plans, _NAME, "state", expected, path)
        plan = plans[path]
        fits = isinstance(q, QuantizedArray) and q.shape == plan.shape and q.format == plan.spec.dtype
        got = f"{q.format}{list(q.shape)}" if isinstance(q, QuantizedArray) else type(q).__name__
        checks.require(fits, _NAME, "state", f"{plan.spec.dtype}{list(plan.shape)} codes at {path}", got)
    # A state that was loaded from a file may hold arrays of numpy.
    return {path: jax.tree.map(jnp.asarray, q) for path, q in known.items()}


def _read_gradients(prepared: Prepared, gradients: Mapping[str, Any] | None) -> Mapping[str, jax.Array]:
    """Return the second moments of gradients; raise unless they belong to weights of the prepared function."""
    slopes: Any = {} if gradients is None else gradients
    is_mapping = isinstance(slopes, Mapping)
    checks.require_type(is_mapping, _NAME, "gradients", "a dict by path, or None", type(slopes).__name__)
    paths = [prepared.names[leaf] for leaf in prepared.leaves]
    for path in slopes:
        expected = f"weights that the rules quantize: {', '.join(paths[:4])}"
        checks.require(path in paths, _NAME, "gradients", expected, path)
    return {path: jnp.asarray(second) for path, second in slopes.items()}


def _needs_data(method: Method) -> bool:
    return isinstance(method, GPTQ | AdaRound)


def _explain_missing(prepared: Prepared, leaf: int) -> str:
    """Return why the batches brought no inputs to a parameter."""
    rows = [row for row in prepared.coverage if prepared.names[leaf] in row.paths]
    is_lookup = rows and all(row.form == "lookup" for row in rows)
    return "a lookup has no inputs" if is_lookup else "a part of a parameter, or a contraction without data"


def _read_statistics(stats: Statistics, path: str, shape: tuple[int, ...]) -> tuple[inputs.Uses, Moments] | str:
    uses = stats.find_uses(path)
    is_known = path in dict(stats.uses) and all(use.name in stats.moments or use.reason for use in uses)
    checks.require(is_known, _NAME, "data", f"statistics of {path}, as collect returns them", "none")
    return inputs.combine_uses(uses, stats.moments, shape)


def _quantize(
    prepared: Prepared, leaf: int, w: jax.Array, found: tuple[inputs.Uses, Moments] | str, drift: _Drift | None,
    method: Method, known: QuantizedArray | None, slopes: jax.Array | None,
) -> tuple[QuantizedArray, Note]:  # fmt: skip
    """Return a quantized parameter, which may be known already, and what was done."""
    plan, path = prepared.leaves[leaf], prepared.names[leaf]
    _grid.check_finite(_NAME, w=w)
    name = type(method).__name__
    if isinstance(found, str):
        q = known if known is not None else method.quantize(w, None, plan.spec, -1)
        is_rounded = _needs_data(method)
        note = Note(path, f"{Nearest.__name__} for {name}" if is_rounded else name, found if is_rounded else "")
    else:
        use, moments = found
        second = moments.second
        if slopes is not None:
            checks.check_shape(
                _NAME, "gradients", slopes, second.shape, "the shape of the second moments of its inputs"
            )
            _grid.check_finite(_NAME, gradients=slopes)
            second = _blend_moments(second, slopes)
        parts = _cut_outputs(w, method, plan.spec, use.axis, len(second))
        damping = None if drift is None else _choose_damping(w, drift, use.axis, parts)
        quantized, errors = [], np.zeros(2)
        for part in parts:
            piece = part.take(w)
            target = piece
            if drift is not None and damping is not None:
                target = _correct_weight(piece, part.take_drift(drift), jnp.float32(damping), use.axis)
            q = part.take(known) if known is not None else method.quantize(target, second, plan.spec, use.axis)
            nearest = Nearest("whole").quantize(piece, moments.second, plan.spec, use.axis)
            # Both are measured against the target, which is what the method approximates.
            errors += [float(measure_error(target, x, moments.second, use.axis)) for x in (nearest, q)]
            quantized.append(q)
        q = known if known is not None else concatenate(quantized, parts[0].axis)
        note = Note(path, name, _describe_inputs(moments), *errors.tolist())
    return plan.store(q), note


@jax.jit
def _blend_moments(second: jax.Array, slopes: jax.Array) -> jax.Array:
    """Return a mean of second moments [groups, inputs, inputs] of inputs and of gradients."""
    size, other = (jnp.trace(x, axis1=1, axis2=2)[:, None, None] for x in (second, slopes))
    # Gradients may be 0, for outputs that no result reads.
    return jnp.where(other > 0, _PART * second + (1 - _PART) * slopes * size / jnp.where(other > 0, other, 1), second)


_Array = TypeVar("_Array", jax.Array, QuantizedArray)


class _OutputRange(NamedTuple):
    """Some of the outputs of a weight, which can be quantized without the others.

    Attributes:
        axis: the axis of the outputs.
        start: the first output.
        stop: the first output after them, or None for all outputs.
    """

    axis: int = 0
    start: int = 0
    stop: int | None = None

    def take(self, w: _Array) -> _Array:
        """Return these outputs of an array or quantized array."""
        if self.stop is None:
            return w
        return w[(slice(None),) * self.axis + (slice(self.start, self.stop),)]

    def take_drift(self, drift: _Drift) -> _Drift:
        """Return what has changed for these outputs."""
        if self.stop is None or drift.addend is None:
            return drift
        return drift._replace(addend=drift.addend[..., self.start : self.stop])


def _cut_outputs(w: jax.Array, method: Method, spec: QuantSpec, axis: Axis, groups: int) -> list[_OutputRange]:
    """Return parts of a large weight, or one part: the codes of an output must not depend on other outputs."""
    kept = tuple(axis) if isinstance(axis, tuple) else (axis,)
    if w.size <= _MOST_ELEMENTS or not isinstance(method, GPTQ | Nearest) or len(kept) != 1 or groups != 1:
        return [_OutputRange()]
    grid = jax.eval_shape(functools.partial(quantize, spec=spec), w)
    place = kept[0] % w.ndim
    if not has_own_scales(make_layout(_NAME, w.shape, axis, groups), grid):
        return [_OutputRange()]
    outputs = w.shape[place]
    size = max(_MOST_ELEMENTS * outputs // w.size, 1)
    return [_OutputRange(place, start, min(start + size, outputs)) for start in range(0, outputs, size)]


# With the damping r, a layer makes up for what has changed before it by the weight with which its outputs, plus what is
# added to them, are nearest to the float function's.


def _choose_damping(w: jax.Array, drift: _Drift, axis: Axis, parts: Sequence[_OutputRange]) -> float | None:
    """Return the damping whose correction, found in one half of the vectors, is best for the other half.

    None if no correction is better than none.
    """
    errors: Any = sum(_compare_dampings(part.take(w), part.take_drift(drift), axis) for part in parts)
    best = jnp.argmin(jnp.where(jnp.isnan(errors), jnp.inf, errors))
    return _DAMPINGS[int(best)] if errors[best] < 0 else None


@functools.partial(jax.jit, static_argnames=("axis",))
def _compare_dampings(w: jax.Array, drift: _Drift, axis: Axis) -> jax.Array:
    """Return for each damping by how much the corrections of both halves change the squared error of the other half.

    Args:
        w: the weight.
        drift: how the inputs of the quantized function, and what is added to the outputs, differ from the float
            function's.
        axis: the axes that are kept.
    """
    product = _sum_products(w, drift, axis)

    def compute_error(damping: jax.Array) -> jax.Array:
        shift = _solve_damped(drift.second, product, damping)
        return jnp.sum(shift * (jnp.matmul(drift.second[::-1], shift, precision=_HIGHEST) - 2 * product[::-1]))

    return jax.lax.map(compute_error, jnp.asarray(_DAMPINGS, jnp.float32))


@functools.partial(jax.jit, static_argnames=("axis",))
def _correct_weight(w: jax.Array, drift: _Drift, damping: jax.Array, axis: Axis) -> jax.Array:
    """Return the weight that makes up for what has changed."""
    layout = make_layout(_NAME, w.shape, axis, drift.second.shape[1])
    shift = _solve_damped(drift.second.sum(0), _sum_products(w, drift, axis).sum(0), damping)
    return layout.restore(layout.arrange(w.astype(jnp.float32)) + shift).astype(w.dtype)


def _sum_products(w: jax.Array, drift: _Drift, axis: Axis) -> jax.Array:
    """Return the sums of x times what is missing in the outputs, [2, groups, inputs, outputs]."""
    layout = make_layout(_NAME, w.shape, axis, drift.second.shape[1])
    product = jnp.matmul(drift.inputs, layout.arrange(w.astype(jnp.float32))[None], precision=_HIGHEST)
    return product if drift.addend is None else product + drift.addend


def _solve_damped(second: jax.Array, product: jax.Array, damping: jax.Array) -> jax.Array:
    """Return (second + damping)^-1 product, with a damping relative to the mean of the diagonal."""
    inputs = second.shape[-1]
    mean = jnp.trace(second, axis1=-2, axis2=-1)[..., None, None] / inputs
    # Inputs that are always 0 would make the matrix singular.
    ones = jnp.broadcast_to(jnp.eye(inputs, dtype=jnp.float32), second.shape)
    return jnp.linalg.solve(second + ones * (damping * mean + jnp.finfo(jnp.float32).tiny), product)


def _describe_inputs(moments: Moments) -> str:
    """Return what is unusual about some inputs, or ""."""
    inputs_count = moments.mean.shape[-1]
    dead = int(jnp.sum(moments.largest == 0))
    texts = [f"{dead} inputs are always 0"] if dead else []
    least = float(jnp.min(moments.count))
    if least < inputs_count:
        texts.append(f"{least:.0f} samples for {inputs_count} inputs: the second moments are singular, and damped")
    return "; ".join(texts)


# The evaluation of a program, operation by operation, that quantizes each weight where it is first contracted.


class _Drift(NamedTuple):
    """What quantized layers have changed, in the terms of the inputs x of a later one; see `_run_layers`.

    The sums are over the first half of the vectors x of each batch, and over the second half, so that what is found in
    one half can be tried on the other.

    Attributes:
        second: the sum of x x^T, [2, groups, inputs, inputs].
        inputs: the sum of x (z - x)^T, [2, groups, inputs, inputs], with the inputs z of the float function.
        addend: the sum of x (s - r)^T, [2, groups, inputs, outputs], with the array r that is added to the outputs, and
            s in the float function; None if there is no such array.
    """

    second: jax.Array
    inputs: jax.Array
    addend: jax.Array | None


# A parameter, the statistics of its inputs, and what has changed.
_Quantize = Callable[[int, "tuple[inputs.Uses, Moments] | str", "_Drift | None"], QuantizedArray]


class _Each(tuple):
    """The values of one variable in all batches; if float weights are run, too, first those with these."""


class _UnreadParameter(NamedTuple):
    """A parameter that is read when it is needed, because its codes are not known before.

    Attributes:
        leaf: the index of the parameter.
        moves: the equations that move its elements, each with the place of the result.
    """

    leaf: int
    moves: tuple[tuple[Any, int], ...] = ()


class _LayerMode(InspectMode):
    """The float program; a parameter is read when it is contracted."""

    updates_records = False

    def __init__(self, plan: Any, weights: Sequence[Any], floats: int) -> None:
        super().__init__(plan, lambda site: False, lambda *arguments: arguments)  # type: ignore[arg-type]
        self.weights = weights  # the float arrays of all parameters
        self.floats = floats  # the number of batches with float weights, which are the first ones
        self.quantized: dict[int, QuantizedArray] = {}

    def is_parameter(self, value: object) -> bool:
        """Return whether a value is a parameter that has not been read."""
        return isinstance(value, _UnreadParameter)

    def can_join(self, parameters: Sequence[Any]) -> bool:
        """Return False: joined parameters are read as they are."""
        return False

    def move_elements(self, equation: Equation, operands: Sequence[Any]) -> list[Any]:
        """Return the parameter with one more move, for each result of the equation."""
        if any(not isinstance(x, _UnreadParameter) for x in operands) or len(operands) > 1:
            return _evaluate_each(equation, [self.convert_to_array(x) for x in operands])
        (x,) = operands
        return [x._replace(moves=(*x.moves, (equation, place))) for place in range(len(equation.outvars))]

    def convert_to_array(self, parameter: object) -> Any:
        """Return the array of a parameter as it is now, after its moves."""
        if not isinstance(parameter, _UnreadParameter):
            return parameter
        w, q = self.weights[parameter.leaf], self.quantized.get(parameter.leaf)
        # The floats of codes are not kept, because those of all layers would take as much memory as the weights.
        values = [w] if q is None else [q.dequantize()] if not self.floats else [w, q.dequantize()]
        for equation, place in parameter.moves:
            values = [jaxpr.evaluate(equation, [value])[place] for value in values]
        return values[0] if len(values) == 1 else _Each(value for value in values for _ in range(self.floats))


def _evaluate_each(equation: Equation, arrays: Sequence[Any]) -> list[Any]:
    """Return the results of an equation: for each batch, if an operand differs between them."""
    count = next((len(x) for x in arrays if isinstance(x, _Each)), None)
    if count is None:
        return jaxpr.evaluate(equation, arrays)
    results = [jaxpr.evaluate(equation, _select(arrays, index)) for index in range(count)]
    return [_Each(parts) for parts in zip(*results, strict=True)]


class _AllQuantizedError(Exception):
    """Raised when all parameters that are contracted are quantized, because what follows in the program is not used."""


class _LayerInterpreter(ReplacingInterpreter):
    """The evaluation of one program on all batches at once, outside of `jax.jit`."""

    mode: _LayerMode

    def __init__(self, call: TracedCall, mode: _LayerMode, quantize: _Quantize) -> None:
        super().__init__(call.analysis, mode, {})
        self.call = call
        self.quantize = quantize
        self.floats = mode.floats
        sites = [site for site in self.analysis.sites.values() if has_statistics(call.plan, site)]
        self.remaining = {view.leaf for site in sites for view in site.views}
        # The arrays that are added to the outputs of a contraction, by the name of it, and where they are written.
        self.addends: dict[str, Any] = {}
        self.writers: dict[Address, list[tuple[int, str]]] = {}
        self.waiting: set[str] = set()
        if self.floats:
            self._match_addends()

    def _match_addends(self) -> None:
        graph = neighbors.make_call_graph(self.call)
        for site in self.analysis.sites.values():
            if has_statistics(self.call.plan, site):
                array = neighbors.match_addend(graph, site)
                for address, place in () if array is None else graph.program.list_writers(array):
                    self.writers.setdefault(address, []).append((place, site.name))
                    self.waiting.add(site.name)

    def evaluate_body(self, body: Body, values: Sequence[Any], address: Address = ()) -> list[Any]:
        """Return the results of a program for the values of its operands.

        Equations that differ between batches wait until one contracts a parameter, and are then evaluated for one batch
        after the other. For all batches, the arrays between two such contractions would take several times the memory.
        """
        program = body.program
        known: dict[Any, Any] = dict(zip(program.invars, values, strict=True))
        known |= dict(zip(program.constvars, body.constants, strict=True))
        live = jaxpr.list_live(program, self.has_effect)
        last_uses = jaxpr.list_last_uses(program, live)
        stores: collections.defaultdict[Any, dict[Any, Any]] = collections.defaultdict(dict)
        waiting: dict[int, Equation] = {}
        differing: set[Any] = set()  # the results of these
        late: list[Any] = []  # variables that an equation after these is the last to read, while these wait

        def read(atom: Any) -> Any:
            return self.read_literal(atom) if jaxpr.is_literal(atom) else known[atom]

        def evaluate_waiting() -> None:
            if waiting:
                known.update(self._evaluate_batches(waiting, last_uses, known))
            drop(late)
            for group in (waiting, differing, late):
                group.clear()

        def drop(variables: Iterable[Any]) -> None:
            for variable in variables:
                known.pop(variable, None)
                stores.pop(variable, None)

        for index in live:
            equation, place = program.eqns[index], (*address, index)
            atoms = [atom for atom in equation.invars if not jaxpr.is_literal(atom)]
            is_plain = self._is_plain(equation, place)
            if is_plain and any(atom in differing or isinstance(known.get(atom), _Each) for atom in atoms):
                waiting[index] = equation
                differing.update(equation.outvars)
                continue
            if not is_plain or self.has_effect(equation):
                evaluate_waiting()
            operands = [read(atom) for atom in equation.invars]
            own = [{} if jaxpr.is_literal(atom) else stores[atom] for atom in equation.invars]
            results = self.evaluate_equation(equation, operands, Visit(place, program, own))
            pairs = zip(equation.outvars, results, strict=True)
            known |= {variable: result for variable, result in pairs if not jaxpr.is_unused(variable)}
            if waiting:
                late += last_uses.get(index, ())
            else:
                drop(last_uses.get(index, ()))
            del operands, results  # which would be in memory until the next contraction
        evaluate_waiting()
        return [read(atom) for atom in program.outvars]

    def _is_plain(self, equation: Equation, address: Address) -> bool:
        """Return whether an equation neither contracts nor moves a parameter, and none in its bodies does."""
        sites = [self.analysis.sites.get(address), *self.analysis.list_below(address)]
        if any(site is not None and has_statistics(self.call.plan, site) for site in sites):
            return False
        return not any(address in group for group in (self.analysis.followed, self.analysis.entered, self.writers))

    def _evaluate_batches(
        self, equations: Mapping[int, Equation], last_uses: Mapping[int, Sequence[Any]], known: dict[Any, Any]
    ) -> dict[Any, Any]:
        """Return the values of the variables that some equations define and others read, for all batches.

        Args:
            equations: the equations, by their places.
            last_uses: the variables that no equation reads after the one at a place.
            known: the values of variables, without those that these equations are the last to read when this returns.
        """
        defined = {variable for equation in equations.values() for variable in equation.outvars}
        last = {variable for index in equations for variable in last_uses.get(index, ())}
        kept = [variable for variable in defined - last if not jaxpr.is_unused(variable)]
        atoms = {atom for equation in equations.values() for atom in equation.invars if not jaxpr.is_literal(atom)}
        outer = {atom: self.read_arrays([known[atom]])[0] for atom in atoms - defined}
        each = {variable: list(outer.pop(variable)) for variable in list(outer) if isinstance(outer[variable], _Each)}
        for variable in last:
            known.pop(variable, None)
        found: dict[Any, list[Any]] = {variable: [] for variable in kept}
        for batch in range(len(next(iter(each.values())))):
            local = {**outer, **{variable: parts[batch] for variable, parts in each.items()}}
            for variable in last.intersection(each):
                each[variable][batch] = None
            for index, equation in equations.items():
                values = [
                    self.read_literal(atom) if jaxpr.is_literal(atom) else local[atom] for atom in equation.invars
                ]
                local |= dict(zip(equation.outvars, jaxpr.evaluate(equation, values), strict=True))
                for variable in last_uses.get(index, ()):
                    del local[variable]
            # JAX would begin other batches before it has computed this one.
            for variable in kept:
                found[variable].append(jax.block_until_ready(local[variable]))
        return {variable: _Each(parts) for variable, parts in found.items()}

    def evaluate_equation(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of an equation, and keep those that are added to the outputs of a contraction."""
        results = self._run_equation(equation, operands, visit)
        places = self.writers.get(visit.address, ())
        self.addends |= {name: results[place] for place, name in places if name in self.waiting}
        return results

    def _run_equation(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        address = visit.address
        site = self.analysis.sites.get(address)
        if site is not None and has_statistics(self.call.plan, site):
            with checks.prefix_errors(site.describe()):
                self._visit(site, operands)
            self._check_remaining()
            return self._run_each(equation, operands)
        is_moved = address in self.analysis.followed and self.can_move(equation, operands)
        is_call = jaxpr.read_name(equation) in (*jaxpr.CALLS, jaxpr.REMAT) and address in self.analysis.entered
        # A dynamic slice that starts elsewhere in each batch gives each batch other elements of the parameter.
        if is_moved and not any(isinstance(x, _Each) for x in operands):
            return self.mode.move_elements(equation, operands)
        # Inside of a call parameters are still pending, and are quantized where they are contracted.
        if is_call:
            return super().evaluate_equation(equation, operands, visit)
        if any(has_statistics(self.call.plan, site) for site in self.analysis.list_below(address)):
            self._visit_loop(equation, operands, visit)
            self._check_remaining()
        return self._run_each(equation, operands)

    def _check_remaining(self) -> None:
        if not self.remaining:
            raise _AllQuantizedError

    def run_inner(self, body: Body, values: Sequence[Any], address: Address, records: Records) -> tuple[Any, Any]:
        """Return the results of a body, in which parameters are still read when they are contracted."""
        return self.evaluate_body(body, values, address), {}

    def _run_each(self, equation: Equation, operands: Sequence[Any]) -> list[Any]:
        """Return the results of an equation: for each batch, if an operand differs between them."""
        return _evaluate_each(equation, self.read_arrays(operands))

    def _visit(self, site: Site, operands: Sequence[Any]) -> None:
        """Quantize the parameter of a contraction, if this is its first one."""
        self.waiting.discard(site.name)
        addend = self.addends.pop(site.name, None)
        if self.remaining.isdisjoint(view.leaf for view in site.views):
            return
        x = inputs.read_operand(site, operands)
        batches = x if isinstance(x, _Each) else (x,)
        vectors = [inputs.read_vectors(site, batch) for batch in batches]
        floats = self.floats if isinstance(x, _Each) else 0
        state = MOMENTS.init(vectors[0])
        for batch in vectors[floats:]:
            state = MOMENTS.update(state, batch)
        with checks.name_errors("ptq.apply"):
            moments, drift = MOMENTS.finalize(state), None
        if floats:
            outputs = [inputs.read_outputs(site, part) for part in addend] if isinstance(addend, _Each) else None
            changes = [
                None if arrays is None else _sum_changes(vectors, arrays, floats) for arrays in (vectors, outputs)
            ]
            second = sum(_sum_halves(x, x) for x in vectors[floats:])
            drift = _Drift(second, *changes)  # type: ignore[arg-type]
        self._quantize_views(site, moments, drift)

    def _visit_loop(self, equation: Equation, operands: Sequence[Any], visit: Visit) -> None:
        """Quantize the parameters that are contracted in a loop or a branch, with the inputs of float weights."""
        # A loop is one operation here. Its weights are quantized before any iteration runs with codes, so that no layer
        # in it sees the errors of earlier ones.
        sites = [site for site in self.analysis.list_below(visit.address) if has_statistics(self.call.plan, site)]
        states = make_states(self.call, {site.name for site in sites})
        arrays = self.read_arrays(operands)
        count = next((len(x) for x in arrays if isinstance(x, _Each)), 1)

        @jax.jit
        def update_states(states: Any, values: Any) -> Any:
            inner = ReplacingInterpreter(self.analysis, make_mode(self.call.plan, states), states)
            inner.evaluate_equation(equation, list(values), Visit(visit.address, visit.program, [{} for _ in values]))
            return inner.records

        for index in range(self.floats if count > 1 else 0, count):
            states = update_states(states, _select(arrays, index))
        for site in sites:
            self._quantize_views(site, finalize_moments("ptq.apply", site.name, states[site.name]), None)

    def _quantize_views(self, site: Site, moments: Moments, drift: _Drift | None) -> None:
        for view in site.views:
            if view.leaf not in self.remaining:
                continue
            shape = self.call.parameters.arrays[view.leaf].shape
            use = inputs.describe_use(site, view, shape)
            found = inputs.combine_uses([use], {site.name: moments}, shape)
            ordered = None if drift is None or use.reason else _order_drift(use, drift, shape)
            self.mode.quantized[view.leaf] = self.quantize(view.leaf, found, ordered)
            self.remaining.remove(view.leaf)


def _sum_changes(vectors: Sequence[jax.Array], arrays: Sequence[jax.Array], floats: int) -> Any:
    """Return the sums of x (s - r)^T over all batches, with inputs x and arrays r; the float arrays s come first."""
    return sum(
        _sum_halves(x, expected, array)
        for x, array, expected in zip(vectors[floats:], arrays[floats:], arrays[:floats], strict=True)
    )


@jax.jit
def _sum_halves(x: jax.Array, y: jax.Array, other: jax.Array | None = None) -> jax.Array:
    """Return the sums of x (y - other)^T over both halves of some vectors [number, groups, length], for each group."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    if other is not None:
        y = y - other.astype(jnp.float32)
    # Vectors of one example are neighbors, and much alike: most examples are in one half alone.
    parts = [(values[: len(x) // 2], values[len(x) // 2 :]) for values in (x, y)]
    return jnp.stack([jnp.einsum("ngi,ngj->gij", *pair, precision=_HIGHEST) for pair in zip(*parts, strict=True)])


def _order_drift(use: inputs.Uses, drift: _Drift, shape: Sequence[int]) -> _Drift:
    """Return what has changed, with the inputs in the order of the parameter's axes."""
    addend = drift.addend
    if addend is not None:
        addend = jnp.swapaxes(inputs.order_inputs(use, jnp.swapaxes(addend, 2, 3), shape, 1), 2, 3)
    second, changed = (inputs.order_inputs(use, x, shape, 2) for x in (drift.second, drift.inputs))
    return _Drift(second, changed, addend)


def _select(values: Sequence[Any], index: int) -> list[Any]:
    """Return the values of one batch."""
    return [x[index] if isinstance(x, _Each) else x for x in values]


def _run_layers(
    session: Session, batches: Sequence[tuple[Any, Any]], arguments: dict[str, Any], quantize: _Quantize,
    has_floats: bool = False,
) -> None:  # fmt: skip
    """Evaluate a program on all batches, and call `quantize` for each parameter at its first contraction.

    Args:
        session: the prepared function and its parameters.
        batches: the positional and the keyword arguments of each call; all calls have the same program.
        arguments: keyword arguments of every call.
        quantize: a function of the index of a parameter, of the statistics of its inputs, and of a `_Drift` or None. It
            returns the codes with which to go on.
        has_floats: whether to evaluate the program with float weights, too, beside the quantized ones.
    """
    calls = [session.trace(args, {**kwargs, **arguments}) for args, kwargs in batches]
    # The constants of two programs may differ, too, and are not part of their text.
    count = len(list_programs([call.arguments for call in calls]))
    expected = "batches of one shape, dtype and static arguments, because they go through one program together"
    checks.require(count == 1, _NAME, "data", expected, f"{count} kinds of batches")
    first = calls[0]
    places = range(len(first.parameters.arrays))
    mode = _LayerMode(first.plan, first.parameters.arrays, len(calls) if has_floats else 0)
    pending = [_UnreadParameter(leaf) if leaf in session.leaves else first.parameters.arrays[leaf] for leaf in places]
    operands = [call.list_operands(pending) for call in calls]
    # The parameters come first, and are the same in all calls.
    values = [
        parts[0]
        if isinstance(parts[0], _UnreadParameter) or index < len(pending)
        else _Each(parts * (2 if has_floats else 1))
        for index, parts in enumerate(zip(*operands, strict=True))
    ]
    body = jaxpr.Body(first.trace.program, first.trace.constants)
    with contextlib.suppress(_AllQuantizedError):
        _LayerInterpreter(first, mode, quantize).evaluate_body(body, values)
