"""`apply`: an algorithm on each weight of a prepared function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..._arrays.quantized_array import QuantizedArray
from ..._core import checks
from ...calibration import loop
from ...transform import Prepared, QuantizedTree
from ...transform._inspect import check_prepared
from ...transform._trees import Ranges
from .. import _grid, _matrix
from ..methods import GPTQ, AdaRound, Method, Nearest, check_method, measure_error
from ..moments import Moments
from . import inputs
from .collect import Statistics
from .layerwise import Drift, run_layers
from .notes import Note, Notes, Outcome

_NAME = "ptq.apply"
# What `match_floats` tries, of the mean square of the inputs.
_DAMPINGS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_PART = 0.5  # of the moments of the inputs, beside those of gradients
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

    The specs are those of the rules. What `data` is decides which inputs the algorithm sees:

    - batches: layer by layer. All batches go through the program together, operation by operation. At each contraction
      the weight is quantized with the inputs that come from the quantized weights before it, and the outputs go on with
      the quantized weight. So each layer can make up for the errors of earlier ones, as in the paper on GPTQ. Of all
      batches, the values that later operations read are in memory. Contractions in a loop get the inputs of a loop of
      float weights, and a weight with several uses those of the first;
    - `ptq.Statistics`, as `collect` returns them: all inputs are those of the float function, which needs one pass over
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
        match_floats: with batches, whether the outputs of a layer shall be those of the float function. The batches go
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
        ValueError: the parameters have other paths or shapes than those of `prepare`; the batches differ in shapes,
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
    check_prepared(_NAME, prepared)
    check_method(_NAME, method)
    loop.check_progress(_NAME, progress)
    checks.check_flag(_NAME, "match_floats", match_floats)
    can_match = not match_floats or not (data is None or isinstance(data, Statistics))
    checks.require(can_match, _NAME, "data", "batches, with match_floats=True", _describe_data(data))
    has_data = data is not None or not _needs_data(method)
    checks.require(has_data, _NAME, "data", f"batches or statistics for {method}", "None")
    with checks.name_errors(_NAME):
        records = prepared._read_ranges("convert", ranges)
    signature = prepared._read_parameters("convert", params)
    arrays, notes = list(signature.arrays), {}
    known, slopes = _read_state(prepared, state), _read_gradients(prepared, gradients)
    bar = loop.Bar("quantizing", len(prepared.leaves), progress)

    def quantize_leaf(leaf: int, found: tuple[inputs.Uses, Moments] | str, drift: Drift | None = None) -> jax.Array:
        """Quantize a parameter, note what was done, and return the floats of its codes."""
        path, w = prepared.names[leaf], jnp.asarray(signature.arrays[leaf])
        with checks.prefix_errors(path):
            arrays[leaf], notes[leaf] = _quantize(
                prepared, leaf, w, found, drift, method, known.get(path), slopes.get(path)
            )
        bar.count_step()
        if on_layer is not None:
            on_layer({prepared.names[place]: arrays[place] for place in notes})
        return arrays[leaf].dequantize()

    try:
        if isinstance(data, Statistics):
            for leaf in prepared.leaves:
                quantize_leaf(leaf, _read_statistics(data, prepared.names[leaf], prepared.leaves[leaf].shape))
        elif data is not None:
            split = _read_batches(_NAME, "data", data, arguments)
            run_layers(prepared, params, split, arguments, quantize_leaf, match_floats)
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
        fits = isinstance(q, QuantizedArray) and q.shape == plan.shape and q.codes.dtype == plan.spec.carrier
        got = f"{q.codes.dtype}{list(q.shape)}" if isinstance(q, QuantizedArray) else type(q).__name__
        checks.require(fits, _NAME, "state", f"{plan.spec.carrier}{list(plan.shape)} codes at {path}", got)
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


def _read_batches(
    function: str, name: str, batches: Any, arguments: Any
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the batches of an argument of a function as positional and keyword arguments."""
    loop._check_batches(function, batches, name)
    step = loop.Step(function, lambda *x: x, lambda: 0, lambda state: "", frozenset(arguments))  # type: ignore[arg-type]
    split = [loop.split_arguments(step, index, batch, name) for index, batch in enumerate(batches)]
    checks.require(bool(split), function, name, "at least one batch", "none")
    return split


def _read_statistics(stats: Statistics, path: str, shape: Any) -> tuple[inputs.Uses, Moments] | str:
    uses = stats.find_uses(path)
    is_known = path in dict(stats.uses) and all(use.name in stats.moments or use.reason for use in uses)
    checks.require(is_known, _NAME, "data", f"statistics of {path}, as collect returns them", "none")
    return inputs.combine_uses(uses, stats.moments, shape)


def _quantize(
    prepared: Prepared, leaf: int, w: jax.Array, found: tuple[inputs.Uses, Moments] | str, drift: Drift | None,
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
        target = w if drift is None else _match_floats(w, drift, use.axis)
        second = moments.second
        if slopes is not None:
            checks.check_shape(_NAME, "gradients", slopes, second.shape, "that of the second moments of its inputs")
            _grid.check_finite(_NAME, gradients=slopes)
            second = _blend_moments(second, slopes)
        q = known if known is not None else method.quantize(target, second, plan.spec, use.axis)
        nearest = Nearest("whole").quantize(w, moments.second, plan.spec, use.axis)
        # Both are measured against the target, which is what the method approximates.
        errors = [float(measure_error(target, x, moments.second, use.axis)) for x in (nearest, q)]
        note = Note(path, name, _describe_inputs(moments), *errors)
    return (q.store_last(*plan.stored_last) if plan.stored_last else q), note


@jax.jit
def _blend_moments(second: jax.Array, slopes: jax.Array) -> jax.Array:
    """Return a mean of second moments [groups, inputs, inputs] of inputs and of gradients."""
    size, other = (jnp.trace(x, axis1=1, axis2=2)[:, None, None] for x in (second, slopes))
    # Gradients may be 0, for outputs that no result reads.
    return jnp.where(other > 0, _PART * second + (1 - _PART) * slopes * size / jnp.where(other > 0, other, 1), second)


@functools.partial(jax.jit, static_argnames=("axis",))
def _match_floats(w: jax.Array, drift: Drift, axis: Any) -> jax.Array:
    """Return the weight whose outputs, with what is added to them, are nearest to those that the float function has.

    The damping is the one whose correction, found in one half of the vectors, is best for the other half. Without a
    correction that is better than none, the weight is returned.

    Args:
        w: the weight.
        drift: how the inputs of the quantized function, and what is added to the outputs, differ from those of the
            float function.
        axis: the axes that are kept.
    """
    layout = _matrix.make_layout(_NAME, w.shape, axis, drift.second.shape[1])
    rows = layout.arrange(w.astype(jnp.float32))
    product = jnp.matmul(drift.inputs, rows[None], precision=_HIGHEST)
    if drift.addend is not None:
        product += drift.addend

    def find_error(damping: jax.Array) -> jax.Array:
        """Return by how much the corrections of both halves change the squared error of the other half."""
        shift = _solve_damped(drift.second, product, damping)
        return jnp.sum(shift * (jnp.matmul(drift.second[::-1], shift, precision=_HIGHEST) - 2 * product[::-1]))

    dampings = jnp.asarray(_DAMPINGS, jnp.float32)
    errors = jax.lax.map(find_error, dampings)
    best = jnp.argmin(jnp.where(jnp.isnan(errors), jnp.inf, errors))
    shift = _solve_damped(drift.second.sum(0), product.sum(0), dampings[best])
    return layout.restore(rows + jnp.where(errors[best] < 0, shift, jnp.zeros_like(shift))).astype(w.dtype)


def _solve_damped(second: jax.Array, product: jax.Array, damping: jax.Array) -> jax.Array:
    """Return (second + damping)^-1 product, with a damping relative to the mean of the diagonal."""
    inputs = second.shape[-1]
    mean = jnp.trace(second, axis1=-2, axis2=-1)[..., None, None] / inputs
    # Inputs that are always 0 would make the matrix singular.
    ones = jnp.broadcast_to(jnp.eye(inputs, dtype=jnp.float32), second.shape)
    return jnp.linalg.solve(second + ones * (damping * mean + jnp.finfo(jnp.float32).tiny), product)


def _describe_data(data: Any) -> str:
    return "None" if data is None else type(data).__name__


def _describe_inputs(moments: Moments) -> str:
    """Return what is unusual about some inputs, or ""."""
    inputs_count = moments.mean.shape[-1]
    dead = int(jnp.sum(moments.largest == 0))
    texts = [f"{dead} inputs are always 0"] if dead else []
    least = float(jnp.min(moments.count))
    if least < inputs_count:
        texts.append(f"{least:.0f} samples for {inputs_count} inputs: the second moments are singular, and damped")
    return "; ".join(texts)
