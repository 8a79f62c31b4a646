"""`tune`: scales, parameters in floats, and codes, learned such that the results are near the float results.

`collect_gradients` measures what errors of each weight do to the results.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._arrays.quantize import encode_array
from .._arrays.quantized_array import QuantizedArray, list_forms, read_entries
from .._arrays.scale_from_range import derive_shapes, read_least_scale
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, granularity
from .._training.estimators import StraightThrough
from .._training.fake_quantize import fake_quantize
from ..calibration import loop
from ..transform import Prepared, QuantizedTree
from ..transform.session import Session, Signature, is_quantized
from . import inputs
from ._grid import MatrixLayout, make_layout, separate_spec
from .notes import Note, Notes, Outcome

_NAME = "ptq.tune"
_HIGHEST = jax.lax.Precision.HIGHEST
_GRADIENTS = "ptq.collect_gradients"
_MEASURE = "the squared error of the results, as a part of their squares, before and after"
_NO_FLOATS = "not an array of floats"
_NO_SLOPE = "the results do not depend on it, or have no gradient for it"
_WORSE = "the error of the results would not become smaller"
_SUMS = 32  # random sums of results, which estimate a curvature to about a quarter of it
_DECAY = (np.float32(0.9), np.float32(0.99))  # Adam's; the second is short, because the steps are few


class _Choice(NamedTuple):
    """What is learned of a parameter: its floats or scales, and its codes; and why not more, or ""."""

    floats: bool
    codes: bool
    reason: str


def tune(
    prepared: Prepared, params: Any, q: QuantizedTree, batches: Iterable[Any], *, held_out: Iterable[Any] | None = None,
    rounds: int = 8, rate: float = 1e-3, codes: bool = False, code_rate: float = 0.01, progress: bool | None = None,
    **arguments: Any,
) -> Outcome:  # fmt: skip
    """Learn the scales of the codes and the parameters in floats, with the results of the float function as the target.

    minimize sum (f(params, x) - f(q.params, x))^2 over the batches x. The codes do not change, unless `codes` is True.

    The other passes look at one contraction at a time. This one looks at the results, so that a later layer can make
    up for an error of an earlier one. It changes few numbers: a scale for each output, for example, biases, and the
    scales and offsets of normalizations. Adam minimizes, with one step for each batch of each round, and a rate that
    falls to 0.

    A scale, and a parameter with positive elements only, is multiplied by exp(v), and stays positive. To any other
    parameter v is added, in units of the root of its mean square. Scales of tables that are looked up, scales that are
    powers of two or quantized themselves, and offsets of codes do not change. While it learns, activations are in
    floats, also those that the rules quantize.

    With `codes`, a change v of each value is learned, too, in steps of its code, and the value is rounded whenever the
    function runs: w = scale * round(steps + v). The gradient g of v is that without the rounding (the straight-through
    estimator). Each step moves v by a part of the way to the minimum of its own parabola, where g / h + v - round(v) is
    0, but by no more than `code_rate` steps. h is the curvature: the mean square of the gradients of 32 random sums of
    the results. So a code changes where the next one has less error, and the largest errors come first. No code leaves
    the bounds of its spec, and codes do not depend on scales. Of a codebook, a step is the mean distance of its levels.

    The codes of tables that are looked up do not change, nor do codes of float dtypes. There are as many codes as
    weights, so that they need many more data than scales, and fit the batches; use `held_out`. In memory each takes
    some 16 bytes.

    Call it last, after `apply` and `correct_bias`. The results of all batches together should have many times as many
    elements as there are numbers to learn, or it fits the batches and nothing else. With `held_out`, the result
    comes from the round with the least error on these batches, from which neither `apply` nor this function should
    learn.

    Args:
        prepared: the prepared function. It returns arrays of floats, and can be differentiated.
        params: its parameters, in floats.
        q: its converted parameters, as `Prepared.convert` or `apply` returns them.
        batches: as for `Prepared.calibrate`. The results of all of them are kept in memory.
        held_out: batches like the others, from which nothing is learned. The error is measured on them, after each
            round. None measures it on `batches`, before the first round and after the last.
        rounds: how often to go over the batches.
        rate: the rate of the first step: a relative change.
        codes: Static. Whether to learn the codes as well.
        code_rate: the rate of the first step for codes: a part of the way to the minimum. The noise of the gradients is
            averaged over about 1 / `code_rate` steps; use at least twice as many. If many inputs of a layer are alike,
            their codes change at the same time, and lead too far if the rate is high: layers with few inputs bear 0.1,
            layers with hundreds do not.
        progress: whether to show a progress bar, with the package rich. None shows it on a terminal.
        **arguments: keyword arguments of every call.

    Returns:
        A `QuantizedTree` with the same codes and ranges, or the learned ones, and notes: a row for each
        parameter that is an array of floats or codes, which says how many codes have changed. If the error of the
        results does not become smaller, the parameters are unchanged, and the notes say so. With `held_out`, the errors
        before and after are measured on these batches.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the parameters have other paths or shapes than in `prepare`; there is no batch, or none that
            is held out; a number is out of range; or the results in floats have a NaN or an infinity.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> apply = lambda params, x: jax.nn.relu(x @ params["first"]) @ params["second"]
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> params = {"first": jax.random.normal(keys[0], (16, 8)), "second": jax.random.normal(keys[1], (8, 4))}
        >>> x = jax.random.normal(keys[2], (64, 16))
        >>> prepared = jq.prepare(apply, params, x, rules=[jq.Rule(weight=jq.Weight("int4"))])
        >>> q = prepared.convert(params)
        >>> tuned, notes = ptq.tune(prepared, params, q, [x], rounds=50)
        >>> bool((tuned.params["first"].codes == q.params["first"].codes).all())
        True
        >>> notes["first"].after < notes["first"].before
        True
        >>> learned = ptq.tune(prepared, params, q, [x], rounds=50, codes=True, code_rate=0.3)
        >>> bool((learned.tree.params["first"].codes == q.params["first"].codes).all())
        False
        >>> learned.notes["first"].after < 0.7 * notes["first"].after
        True

    Source: Chen et al., arXiv 2407.11062, section 3.3, for scales that are learned while the codes stay; Li et al.,
    arXiv 2309.02784, section 3, for normalizations; Bengio et al., arXiv 1308.3432, section 4, for the straight-through
    estimator; Malinovskii et al., arXiv 2405.14852, for codes and scales that are learned from the results together;
    Hassibi and Stork, Second Order Derivatives for Network Pruning (1992), for the curvature of a squared error from
    gradients of the results; Kingma and Ba, arXiv 1412.6980, algorithm 1; Prechelt, Early Stopping - But When? (1998),
    section 2, for the choice of the round.
    """
    session = Session(_NAME, prepared, params)
    loop.check_progress(_NAME, progress)
    checks.check_integer(_NAME, "rounds", rounds)
    checks.require(rounds > 0, _NAME, "rounds", "a positive number", rounds)
    checks.check_real(_NAME, "rate", rate)
    checks.require(rate > 0, _NAME, "rate", "a positive number", rate)
    checks.check_flag(_NAME, "codes", codes)
    checks.check_real(_NAME, "code_rate", code_rate)
    checks.require(code_rate > 0, _NAME, "code_rate", "a positive number", code_rate)
    signature, converted = session.parameters, session.read_converted(q)
    run_function = make_function(session, arguments)
    calls = _read_calls(signature, run_function, "batches", batches, arguments)
    others = None if held_out is None else _read_calls(signature, run_function, "held_out", held_out, arguments)
    choices = {leaf: _choose(prepared, leaf, x, codes) for leaf, x in enumerate(converted.arrays)}
    start = _make_start(converted.arrays, choices)
    specs = {leaf: prepared.leaves[leaf].spec for leaf in start.codes}
    values = [
        x.dequantize() if leaf in prepared.leaves and not (choices[leaf].floats or choices[leaf].codes) else x
        for leaf, x in enumerate(converted.arrays)
    ]
    problem = _make_problem(specs, run_function, values)
    variables, errors = _minimize(problem, start, calls, others, rounds, (rate, code_rate), progress)
    is_better, arrays, notes = errors[1] < errors[0], list(converted.arrays), []
    for leaf, choice in choices.items():
        note = Note(converted.names[leaf], "unchanged", choice.reason or _WORSE)
        moved = [x[leaf] for x in variables if leaf in x]
        if is_better and moved and not any(bool(x.any()) for x in moved):
            note = note._replace(reason=_NO_SLOPE)
        elif is_better and moved:
            arrays[leaf], action = _change_parameter(arrays[leaf], variables, leaf, specs)
            note = Note(note.path, action, choice.reason, *errors)
        notes += [] if choice.reason == _NO_FLOATS else [note]
    return Outcome(q.replace(params=converted.rebuild(arrays)), Notes(tuple(notes), _MEASURE))


def _read_calls(
    signature: Signature, run_function: Callable[..., list[jax.Array]], name: str, batches: Iterable[Any],
    arguments: dict[str, Any],
) -> list[_TuningBatch]:  # fmt: skip
    """Return batches with their results in floats.

    Args:
        signature: the parameters, in floats.
        run_function: the float function, as `make_function` returns it.
        name: the name of the argument that holds the batches.
        batches: the batches.
        arguments: keyword arguments of every call.
    """
    others = [Signature(call) for call in loop.read_batches(_NAME, batches, arguments, name)]
    calls = [_TuningBatch(other, run_function(signature.arrays, other)) for other in others]
    for index, call in enumerate(calls):
        # Their error would be 0, and would lower the mean.
        is_empty = not sum(y.size for y in call.expected)
        checks.require(not is_empty, _NAME, f"{name}[{index}]", "a batch with results", "results without elements")
        is_finite = all(bool(jnp.isfinite(y).all()) for y in call.expected)
        expected, got = "batches with finite results", f"a NaN or an infinity in the results of {name}[{index}]"
        checks.require(is_finite, _NAME, name, expected, got)
    return calls


def _choose(prepared: Prepared, leaf: int, x: Any, codes: bool) -> _Choice:
    """Return what is learned of a parameter, and why not more."""
    if not is_quantized(x):
        is_float = checks.has_dtype(x, dtypes.FLOATS)
        return _Choice(is_float, False, "" if is_float else _NO_FLOATS)
    if leaf not in prepared.leaves:
        return _Choice(False, False, "codes that the function itself reads")
    rows = [row for row in prepared.coverage if prepared.names[leaf] in row.paths]
    if rows and all(row.form == "lookup" for row in rows):
        return _Choice(False, False, "a lookup: a batch reads few of its rows")
    spec = prepared.leaves[leaf].spec
    obstacle = _explain_fixed_codes(x, spec) if codes else ""
    is_nested = isinstance(x.scale, QuantizedArray)
    reasons = ["scales that are powers of two"] if spec.power_of_two else []
    reasons += ["scales that are quantized themselves"] if is_nested else []
    reasons += [obstacle] if obstacle else []
    return _Choice(not (spec.power_of_two or is_nested), codes and not obstacle, "; ".join(reasons))


def make_function(session: Session, arguments: dict[str, Any]) -> Callable[[Sequence[Any], Signature], list[jax.Array]]:
    """Return the float function, as one of the arrays of the parameters and of a batch.

    Args:
        session: the prepared function and its parameters.
        arguments: keyword arguments of every call.
    """

    @jax.jit
    def run_function(arrays: Sequence[Any], other: Signature) -> list[jax.Array]:
        args, kwargs = other.rebuild(other.arrays)
        results = session.prepared.function(session.parameters.rebuild(arrays), *args, **kwargs, **arguments)
        # Integers among the results, such as a count of steps, have no gradient.
        floats = [y for y in jax.tree.leaves(results) if jnp.issubdtype(jnp.result_type(y), jnp.floating)]
        checks.require(bool(floats), session.function, "prepared", "a function that returns floats", "none")
        return [y.astype(jnp.float32) for y in floats]

    return run_function


def _make_start(arrays: Sequence[Any], choices: dict[int, _Choice]) -> _Changes:
    """Return the variables of the first step, which change nothing."""
    floats = [leaf for leaf, choice in choices.items() if choice.floats]
    shapes = {leaf: (arrays[leaf].scale if is_quantized(arrays[leaf]) else arrays[leaf]).shape for leaf in floats}
    coded = {leaf: arrays[leaf].shape for leaf, choice in choices.items() if choice.codes}
    return _Changes(*({leaf: jnp.zeros(shape, jnp.float32) for leaf, shape in x.items()} for x in (shapes, coded)))


def _change_parameter(x: Any, variables: _Changes, leaf: int, specs: dict[int, QuantSpec]) -> tuple[Any, str]:
    """Return a parameter with the change that its variables say, and what was done."""
    action = "tuned"
    if leaf in variables.codes:
        x, count = _change_codes(x, specs[leaf], variables.codes[leaf])
        action = f"tuned, {count} of {x.size} codes changed"
    if leaf in variables.floats:
        variable = variables.floats[leaf]
        changed = _change_floats(jnp.asarray(x.scale if is_quantized(x) else x), variable)
        x = x.replace(scale=changed) if is_quantized(x) else changed
    return x, action


# Gradient descent on the error of the results: what is learned, what is minimized, and the steps.


class _Changes(NamedTuple):
    """What is learned of each parameter, by its index.

    Attributes:
        floats: of a parameter in floats, the change of each element; of codes, the change of each scale.
        codes: the change of each code in steps, if codes are learned.
    """

    floats: dict[int, jax.Array]
    codes: dict[int, jax.Array]


class _State(NamedTuple):
    """The variables, and Adam's moving averages for the float ones."""

    variables: _Changes
    means: dict[int, jax.Array]
    squares: dict[int, jax.Array]


class _TuningBatch(NamedTuple):
    """A batch, and the results in floats."""

    arguments: Signature
    expected: list[jax.Array]


class _Problem(NamedTuple):
    """What is minimized.

    Attributes:
        compute_error: a function of the variables, the parameters and a batch.
        compute_sum: a function of the same, and of a key, that returns a random sum of the results: the squares of its
            slopes have the curvature of the error as their mean.
        specs: the specs of the codes that are learned.
        values: the parameters: floats, or quantized arrays if their codes or scales are learned.
    """

    compute_error: Callable[[_Changes, Sequence[Any], _TuningBatch], jax.Array]
    compute_sum: Callable[[_Changes, Sequence[Any], _TuningBatch, jax.Array], jax.Array]
    specs: dict[int, QuantSpec]
    values: Sequence[Any]


def _make_problem(
    specs: dict[int, QuantSpec], run_function: Callable[..., list[jax.Array]], values: Sequence[Any]
) -> _Problem:
    """Return what is minimized: the squared error of the results, as a part of their squares.

    Args:
        specs: the specs of the codes that are learned.
        run_function: the float function.
        values: the parameters: floats, or quantized arrays if their codes or scales are learned.
    """

    def run(variables: _Changes, values: Sequence[Any], call: _TuningBatch) -> list[jax.Array]:
        changed = list(values)
        for leaf, variable in variables.floats.items():
            x = values[leaf]
            if not is_quantized(x):
                changed[leaf] = _change_floats(jnp.asarray(x), variable)
            elif leaf not in specs:
                # The scale is rounded to its dtype, as in the result.
                changed[leaf] = x.replace(scale=_change_floats(x.scale, variable)).dequantize()
        for leaf, change in variables.codes.items():
            q, variable = values[leaf], variables.floats.get(leaf)
            scale = q.scale if variable is None else _change_floats(q.scale, variable)
            changed[leaf] = _dequantize_change(q, specs[leaf], change, scale)
        return run_function(changed, call.arguments)

    def compute_size(call: _TuningBatch) -> jax.Array:
        size = jnp.asarray(sum(jnp.sum(z**2) for z in call.expected))
        return jnp.where(size > 0, size, 1)

    def compute_error(variables: _Changes, values: Sequence[Any], call: _TuningBatch) -> jax.Array:
        results = run(variables, values, call)
        return sum(jnp.sum((y - z) ** 2) for y, z in zip(results, call.expected, strict=True)) / compute_size(call)

    def compute_sum(variables: _Changes, values: Sequence[Any], call: _TuningBatch, key: jax.Array) -> jax.Array:
        results = run(variables, values, call)
        keys = jax.random.split(key, len(results))
        signs = [jax.random.rademacher(k, y.shape, y.dtype) for k, y in zip(keys, results, strict=True)]
        total = sum(jnp.sum(y * sign) for y, sign in zip(results, signs, strict=True))
        return total * jnp.sqrt(2 / compute_size(call))

    return _Problem(compute_error, compute_sum, specs, values)


def _change_floats(x: jax.Array, variable: jax.Array) -> jax.Array:
    """Return floats with the change that a variable says."""
    wide = x.astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(wide**2))
    moved = wide + jnp.where(size > 0, size, 1) * variable
    # A product that x's dtype rounds to 0 would not be positive.
    product = jnp.maximum(wide * jnp.exp(variable), read_least_scale(x.dtype))
    return jnp.where(jnp.all(wide > 0), product, moved).astype(x.dtype)


def _minimize(
    problem: _Problem, start: _Changes, calls: Sequence[_TuningBatch], held_out: Sequence[_TuningBatch] | None,
    rounds: int, rates: tuple[float, float], progress: bool | None,
) -> tuple[_Changes, tuple[float, float]]:  # fmt: skip
    """Return the variables after the last step, or after the best round, and the mean error before and after."""
    measure = jax.jit(problem.compute_error)
    move_downhill = _make_step(problem)

    def measure_all(variables: _Changes) -> float:
        measured = calls if held_out is None else held_out
        return float(np.mean([float(measure(variables, problem.values, call)) for call in measured]))

    zeros = jax.tree.map(jnp.zeros_like, start.floats)
    state, before, count = _State(start, zeros, zeros), measure_all(start), rounds * len(calls)
    curvatures = _measure_curvatures(problem, start, calls)
    best, least = start, before
    bar = loop.Bar("tuning", count, progress)
    try:
        for index in range(count):
            part = (1 + math.cos(math.pi * index / count)) / 2
            plan = (np.float32(index + 1), *(np.float32(rate * part) for rate in rates))
            state = move_downhill(state, plan, problem.values, curvatures, calls[index % len(calls)])
            bar.count_step()
            # On the batches that it learns from, an error between two rounds says nothing that the last one does not.
            is_measured = (index + 1) % len(calls) == 0 if held_out is not None else index + 1 == count
            error = measure_all(state.variables) if is_measured else math.nan
            # A NaN is not smaller, so that steps that diverge change nothing.
            if error < least:
                best, least = state.variables, error
    finally:
        bar.stop()
    return best, (before, least)


def _measure_curvatures(problem: _Problem, start: _Changes, calls: Sequence[_TuningBatch]) -> dict[int, jax.Array]:
    """Return the second derivative of the error for each code, without the second derivative of the function itself."""
    curvatures = jax.tree.map(jnp.zeros_like, start.codes)
    if not curvatures:
        return curvatures

    # The variables are an argument, because as constants of the program they would be as large as the weights.
    @jax.jit
    def add(
        curvatures: dict[int, jax.Array], variables: _Changes, values: Sequence[Any], call: _TuningBatch, key: jax.Array
    ) -> Any:
        slopes = jax.grad(problem.compute_sum)(variables, values, call, key).codes
        return jax.tree.map(lambda x, slope: x + slope**2 / _SUMS, curvatures, slopes)

    for index, key in enumerate(jax.random.split(jax.random.key(0), _SUMS)):
        curvatures = add(curvatures, start, problem.values, calls[index % len(calls)], key)
    return curvatures


def _make_step(problem: _Problem) -> Callable[..., _State]:
    """Return a step, as a function of its state, the number of the step with its rates, values, curvatures and a batch.

    Adam moves the floats, and the codes move by a part of their way to the minimum.
    """

    @jax.jit
    def move_downhill(
        state: _State, plan: tuple[Any, Any, Any], values: Sequence[Any], curvatures: dict[int, jax.Array],
        call: _TuningBatch,
    ) -> _State:  # fmt: skip
        index, rate, code_rate = plan
        # Adam is written out, because optax is a dependency of jaxquant.optim alone.
        slopes, codes = jax.grad(problem.compute_error)(state.variables, values, call)
        means = jax.tree.map(lambda m, g: _DECAY[0] * m + (1 - _DECAY[0]) * g, state.means, slopes)
        squares = jax.tree.map(lambda s, g: _DECAY[1] * s + (1 - _DECAY[1]) * g**2, state.squares, slopes)

        def move(variable: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
            size = jnp.sqrt(square / (1 - _DECAY[1] ** index)) + np.float32(1e-12)
            return variable - rate * mean / (1 - _DECAY[0] ** index) / size

        floats = jax.tree.map(move, state.variables.floats, means, squares)
        moved = {
            leaf: _move_change(values[leaf], problem.specs[leaf], change, codes[leaf], curvatures[leaf], code_rate)
            for leaf, change in state.variables.codes.items()
        }
        return _State(_Changes(floats, moved), means, squares)

    return move_downhill


# Codes that are learned: a change of each value in steps, rounded in the forward pass, with its gradient unrounded.


def _explain_fixed_codes(q: QuantizedArray, spec: QuantSpec) -> str:
    """Return why the codes of an array cannot be learned, or ""."""
    if spec.dtype in dtypes.SMALL_FLOATS:
        return "codes of floats, which are not evenly spaced"
    shape = derive_shapes("ptq.tune", separate_spec(spec, offset=False), q.shape)[1]
    has_zero_point = q.offset is None and (not spec.symmetric or bool(spec.fixed_zero_point))
    fits = q.format == spec.dtype and (q.offset is not None or not spec.offset)
    fits = fits and (q.zero_point is not None) == has_zero_point
    # The values would be computed by another formula.
    fits = fits and not {"real_zero_point", "inverse_scale", "arithmetic"} & set(list_forms(q))
    fits = fits and (q.zero_point is None or all(n in (1, m) for n, m in zip(q.zero_point.shape, shape, strict=True)))
    return "" if fits else "codes of another spec than in the rules"


def _move_change(
    q: QuantizedArray, spec: QuantSpec, change: jax.Array, slope: jax.Array, curvature: jax.Array, rate: ArrayLike
) -> jax.Array:
    """Return the changes after a step towards the minimum of each code alone, within the bounds of the spec.

    A code is at the minimum where slope + curvature * (change - rounded change) = 0. The next code is better if this is
    nearer to it than to the present one.
    """
    start, unit = _decode_steps(q), _compute_unit(spec)
    steps = start + unit * change
    rest = (steps - _round_steps(q, spec, steps)) / unit
    least = np.float32(1e-3) * jnp.mean(curvature) + np.finfo(np.float32).tiny
    change = change - rate * jnp.clip(slope / (curvature + least) + rest, -1, 1)
    low, high = (np.float32(bound) for bound in spec.bounds)
    zero_point = np.float32(0)
    if q.zero_point is not None:
        zero_point = granularity.Aligned(q.block_size).expand(q.zero_point.astype(jnp.float32), start)
    return jnp.clip(change, (low - zero_point - start) / unit, (high - zero_point - start) / unit)


def _dequantize_change(q: QuantizedArray, spec: QuantSpec, change: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the floats of the array after a change of its codes, with the gradient of codes that are not rounded.

    Args:
        q: the array with the codes of the start.
        spec: Static. The spec of the codes.
        change: the change of each value, in steps, float32.
        scale: the scale, which may have changed, too.
    """
    steps = _decode_steps(q) + _compute_unit(spec) * change
    rounded = _round_steps(q, spec, steps)
    aligned = granularity.Aligned(q.block_size)
    scale = dtypes.scale_as_float32(read_entries(scale)).reshape(scale.shape or (1,) * q.ndim)
    values = rounded * aligned.expand(scale, rounded)
    if q.offset is not None:
        values = values + aligned.expand(read_entries(q.offset).astype(jnp.float32), rounded)
    return values.astype(q.dtype)


@functools.partial(jax.jit, static_argnames="spec")
def _change_codes(q: QuantizedArray, spec: QuantSpec, change: jax.Array) -> tuple[QuantizedArray, jax.Array]:
    """Return the array with the codes that `_dequantize_change` has rounded to, and how many of them have changed."""
    steps = _decode_steps(q) + _compute_unit(spec) * change
    codes = encode_array(steps, jnp.ones((1,) * q.ndim), q.zero_point, spec)
    count = jnp.sum(codes.astype(jnp.int32) != q.codes.astype(jnp.int32))
    return q.replace(codes=codes), count


def _round_steps(q: QuantizedArray, spec: QuantSpec, steps: jax.Array) -> jax.Array:
    """Return the steps of the nearest codes, with the gradient of steps that are not rounded."""
    zero_point = q.zero_point
    if q.offset is not None:
        # Codes with an offset begin at 0, whatever the rules say: the offset may have taken the place of a zero point.
        zero_point = jnp.zeros((1,) * q.ndim, spec.carrier)
    # `_move_change` keeps them within the bounds, so that no gradient has to be 0.
    plain = separate_spec(spec, offset=False)
    return fake_quantize(steps, plain, 1.0, zero_point, StraightThrough(clip=False))


def _decode_steps(q: QuantizedArray) -> jax.Array:
    """Return the values in steps, float32: codes without the zero point, or the levels of a codebook."""
    return q.replace(scale=jnp.ones((1,) * q.ndim), offset=None, signed_scale=False, dtype=np.float32).dequantize()


def _compute_unit(spec: QuantSpec) -> Any:
    """Return the length of a step: of a codebook, the mean distance of its levels."""
    if spec.codebook is None:
        return np.float32(1)
    levels = spec.codebook.ascending
    return np.float32((levels[-1] - levels[0]) / (len(levels) - 1))


# What errors of each weight do to the results.


def collect_gradients(
    prepared: Prepared, params: Any, batches: Iterable[Any], *, key: jax.Array, progress: bool | None = None,
    **arguments: Any,
) -> dict[str, jax.Array]:  # fmt: skip
    """Return what errors of each weight do to the results of a prepared function.

    H = mean of G G^T over the batches, with G the gradient of sum(r * f(params, x)), and r of a normal distribution

    An error E of a weight changes the results by dy, and the mean of sum(r * dy)^2 over r is sum(dy^2). To first order,
    sum(r * dy) is sum(G * E). If the errors of different outputs are uncorrelated, the mean of its square is
    trace(E^T H E). This is the objective of `ptq.gptq`, with H in the place of the second moments of the inputs. Those
    say what an error does to the outputs of its own contraction, and these what it does to the results: an input counts
    as much as the results depend on the outputs that it goes to, and errors that later sums cancel count little.

    Args:
        prepared: the prepared function. It returns arrays of floats, and can be differentiated.
        params: its parameters, in floats.
        batches: as for `Prepared.calibrate`. Each of them gives one gradient, of rank d for a weight with d outputs.
        key: a random key, for r.
        progress: whether to show a progress bar, with the package rich. None shows it on a terminal.
        **arguments: keyword arguments of every call.

    Returns:
        A dict by path: float32 [groups, inputs, inputs] for each weight that is contracted as a whole. Pass it to
        `ptq.apply` as `gradients`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the parameters have other paths or shapes than in `prepare`; there is no batch; or a gradient
            has a NaN or an infinity.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> apply = lambda w, x: (x @ w).mean(0)
        >>> x = jnp.array([[1.0, 3.0], [1.0, -3.0]])  # the mean of the second input is 0
        >>> prepared = jq.prepare(apply, jnp.ones((2, 4)), x, rules=[jq.Rule(weight=jq.Weight("int4"))])
        >>> (second,) = ptq.collect_gradients(prepared, jnp.ones((2, 4)), [x] * 8, key=jax.random.key(0)).values()
        >>> bool(second[0, 1, 1] < 1e-9 * second[0, 0, 0])  # so that its errors do not count
        True

    Source: Tseng et al., arXiv 2505.22988, section 3.2, for second moments of gradients as the Hessian of one side.
    """
    session = Session(_GRADIENTS, prepared, params)
    loop.check_progress(_GRADIENTS, progress)
    checks.require_type(checks.is_key(key), _GRADIENTS, "key", "one key of jax.random", checks.describe_value(key))
    loop.check_batches(_GRADIENTS, batches)
    signature, run_function = session.parameters, make_function(session, arguments)
    layouts: dict[int, MatrixLayout] = {}
    sums: dict[int, jax.Array] = {}
    add_batch, count = _make_gradient_step(run_function, layouts), 0
    bar = loop.Bar("gradients", operator.length_hint(batches) or None, progress)
    try:
        for index, batch in enumerate(batches):
            args, kwargs = loop.split_arguments(_GRADIENTS, index, batch, arguments)
            if not index:
                layouts |= _list_layouts(session, args, {**kwargs, **arguments})
                sums = {leaf: jnp.zeros((x.groups, x.inputs, x.inputs)) for leaf, x in layouts.items()}
            sums = add_batch(sums, signature.arrays, Signature((args, kwargs)), jax.random.fold_in(key, index))
            count = index + 1
            bar.count_step()
    finally:
        bar.stop()
    checks.require(count > 0, _GRADIENTS, "batches", "at least one batch", "none")
    means = {prepared.names[leaf]: total / count for leaf, total in sums.items()}
    for path, second in means.items():
        with checks.prefix_errors(path):
            is_finite = bool(jnp.isfinite(second).all())
            expected, got = "finite gradients", "a NaN or an infinity, or squares that overflow float32"
            checks.require(is_finite, _GRADIENTS, "batches", expected, got)
    return means


def _make_gradient_step(
    run_function: Callable[..., list[jax.Array]], layouts: Mapping[int, MatrixLayout]
) -> Callable[..., dict[int, jax.Array]]:
    """Return a function that adds the second moments of one gradient to the sums over earlier gradients.

    Args:
        run_function: the float function.
        layouts: how each weight is arranged as a matrix, by the index of the parameter.
    """

    @jax.jit
    def add_batch(
        sums: dict[int, jax.Array], arrays: Sequence[Any], other: Signature, key: jax.Array
    ) -> dict[int, jax.Array]:
        def project_results(weights: dict[int, jax.Array]) -> jax.Array:
            results = run_function([weights.get(leaf, x) for leaf, x in enumerate(arrays)], other)
            pairs = zip(jax.random.split(key, len(results)), results, strict=True)
            return jnp.sum(jnp.stack([jnp.sum(jax.random.normal(part, y.shape) * y) for part, y in pairs]))

        slopes = jax.grad(project_results)({leaf: arrays[leaf] for leaf in sums})
        rows = {leaf: layouts[leaf].arrange(slope.astype(jnp.float32)) for leaf, slope in slopes.items()}
        return {leaf: sums[leaf] + jnp.matmul(g, jnp.swapaxes(g, 1, 2), precision=_HIGHEST) for leaf, g in rows.items()}

    return add_batch


def _list_layouts(session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, MatrixLayout]:
    """Return how the contractions read each parameter, by its index, if all of them read it as a whole, and alike."""
    call = session.trace(args, kwargs)
    layouts = {}
    for leaf, plan in session.leaves.items():
        uses = inputs.list_uses(call, leaf)
        alike = {(use.axis, frozenset(use.summed), use.groups) for use in uses}
        if len(alike) == 1 and not any(use.reason for use in uses):
            layouts[leaf] = make_layout(_GRADIENTS, plan.shape, uses[0].axis, uses[0].groups)
    return layouts
