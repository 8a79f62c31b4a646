"""`tune`: scales, parameters in floats, and codes, learned such that the results are those of floats."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._arrays.quantized_array import QuantizedArray
from ..._arrays.spec import QuantSpec
from ..._core import checks, dtypes, granularity
from ...calibration import loop
from ...transform import Prepared
from ...transform._calls import Signature, is_quantized
from ...transform._inspect import check_prepared
from . import learned_codes
from .notes import Note, Notes, Outcome

_NAME = "ptq.tune"
_MEASURE = "the squared error of the results, as a part of their squares, before and after"
_NO_FLOATS = "not an array of floats"
_WORSE = "the error of the results would not become smaller"
_DECAY = (np.float32(0.9), np.float32(0.99))  # Adam's; the second is short, because the steps are few


class Variables(NamedTuple):
    """What is learned of each parameter, by its place.

    Attributes:
        floats: of a parameter in floats, the change of each element; of codes, that of each scale.
        codes: the change of each code in steps, if codes are learned.
    """

    floats: dict[int, jax.Array]
    codes: dict[int, jax.Array]


class _Adam(NamedTuple):
    """The variables and their moving averages."""

    variables: Variables
    means: Variables
    squares: Variables


class _Call(NamedTuple):
    """A batch, and the results in floats."""

    arguments: Signature
    expected: list[jax.Array]


class _Choice(NamedTuple):
    """What is learned of a parameter: its floats or scales, and its codes; and why not more, or ""."""

    floats: bool
    codes: bool
    reason: str


class _Problem(NamedTuple):
    """What is minimized.

    Attributes:
        compute_error: a function of the variables, the parameters and a batch.
        limit: a function of the variables and the parameters that keeps codes within their bounds.
        values: the parameters: floats, or quantized arrays if codes are learned.
    """

    compute_error: Callable[[Variables, Sequence[Any], _Call], jax.Array]
    limit: Callable[[Variables, Sequence[Any]], Variables]
    values: Sequence[Any]


def tune(
    prepared: Prepared, params: Any, qparams: Any, batches: Iterable[Any], *, held_out: Iterable[Any] | None = None,
    rounds: int = 8, rate: float = 1e-3, codes: bool = False, code_rate: float = 0.02, progress: bool | None = None,
    **arguments: Any,
) -> Outcome:  # fmt: skip
    """Learn the scales of the codes and the parameters in floats, with the results of the float function as the target.

    minimize sum (f(params, x) - f(qparams, x))^2 over the batches x. The codes do not change, unless `codes` is True.

    The other passes look at one contraction at a time. This one looks at the results, so that a later layer can make
    up for an error of an earlier one. It changes few numbers: a scale for each output, for example, biases, and the
    scales and offsets of normalizations. Adam minimizes, with one step for each batch of each round, and a rate that
    falls to 0.

    A scale, and a parameter whose elements are all positive, is multiplied by exp(v), and stays positive. To any other
    parameter v is added, in units of the root of its mean square. Scales of tables that are looked up, and scales that
    are powers of two, do not change. While it learns, activations are in floats, also those that the rules quantize.

    With `codes`, a change v of each value is learned, too, in steps of its code, and the value is rounded again whenever
    the function runs: w = scale * round(steps + v). The gradient of v is that without the rounding (the straight-through
    estimator). A code changes when v leads it nearer to the next one, and never beyond the bounds of its spec. The codes
    do not depend on the scales, which learn as before. For a codebook a step is the mean distance of its levels, and the
    value is rounded to the nearest level. Codes of tables that are looked up, and those of float dtypes, stay. This takes
    some 16 bytes of memory for each code, and many more data than scales do: the codes are as many as the weights, and
    fit what they see. Use it with `held_out`.

    Call it last, after `apply` and `correct_bias`. The results of all batches together should have many times as many
    elements as there are numbers to learn, or it fits the batches and nothing else. With `held_out`, the result is that
    of the round with the least error of these batches, from which neither `apply` nor this function should learn.

    Args:
        prepared: the prepared function. It returns arrays of floats, and can be differentiated.
        params: its parameters, in floats.
        qparams: its converted parameters, as `Prepared.convert` or `apply` returns them.
        batches: as for `Prepared.calibrate`. The results of all of them are kept in memory.
        held_out: batches like the others, from which nothing is learned. The error is measured on them, after each
            round. None measures it on `batches`, before the first round and after the last.
        rounds: how often to go over the batches.
        rate: the rate of the first step: a relative change.
        codes: Static. Whether to learn the codes as well.
        code_rate: the rate of the first step for codes, as a part of the distance of two codes. As the rates fall to 0,
            a code can change if half of the steps times this rate is more than 0.5.
        progress: whether to show a progress bar, with the package rich. None shows it on a terminal.
        **arguments: keyword arguments of every call.

    Returns:
        The converted parameters with the same codes, or those that were learned, and notes: a row for each parameter
        that is an array of floats or codes, with the number of codes that have changed. If the error of the results does
        not become smaller, the parameters are unchanged, and the notes say so. With `held_out`, the errors before and
        after are those of these batches.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the parameters have other paths or shapes than those of `prepare`; there is no batch, or none that
            is held out; a number is out of range; or the results in floats have a NaN or an infinity.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> apply = lambda params, x: jax.nn.relu(x @ params["first"]) @ params["second"]
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> params = {"first": jax.random.normal(keys[0], (16, 8)), "second": jax.random.normal(keys[1], (8, 4))}
        >>> x = jax.random.normal(keys[2], (64, 16))
        >>> prepared = jq.prepare(apply, params, x, rules=[jq.Rule(weight=jq.Weight("int4"))])
        >>> qparams = prepared.convert(params)
        >>> tuned, notes = ptq.tune(prepared, params, qparams, [x], rounds=50)
        >>> bool((tuned["first"].codes == qparams["first"].codes).all()), notes["first"].after < notes["first"].before
        (True, True)
        >>> tuned, notes = ptq.tune(prepared, params, qparams, [x], rounds=50, codes=True, code_rate=0.05)
        >>> bool((tuned["first"].codes == qparams["first"].codes).all()), notes["first"].after < 0.5 * notes["first"].before
        (False, True)
        >>> notes["first"].action
        'tuned, ... of 128 codes changed'

    Source: Chen et al., arXiv 2407.11062, section 3.3, for scales that are learned while the codes stay; Li et al.,
    arXiv 2309.02784, section 3, for normalizations; Bengio et al., arXiv 1308.3432, for the straight-through estimator,
    and Malinovskii et al., arXiv 2405.14852, for codes that are learned from the results, with it and without;
    Kingma and Ba, arXiv 1412.6980, algorithm 1; Prechelt, Early Stopping - But When? (1998), section 2, for the choice
    of the round.
    """
    check_prepared(_NAME, prepared)
    loop.check_progress(_NAME, progress)
    checks.check_integer(_NAME, "rounds", rounds)
    checks.require(rounds > 0, _NAME, "rounds", "a positive number", rounds)
    checks.check_real(_NAME, "rate", rate)
    checks.require(rate > 0, _NAME, "rate", "a positive number", rate)
    checks.check_flag(_NAME, "codes", codes)
    checks.check_real(_NAME, "code_rate", code_rate)
    checks.require(code_rate > 0, _NAME, "code_rate", "a positive number", code_rate)
    signature, converted = prepared._read_parameters("convert", params), Signature(qparams)
    for leaf in prepared.leaves:
        path, q = prepared.names[leaf], converted.arrays[leaf]
        checks.require_type(is_quantized(q), _NAME, "qparams", f"a quantized array at {path}", type(q).__name__)
    run_function = make_function(_NAME, prepared, signature, arguments)
    calls = _read_calls(signature, run_function, "batches", batches, arguments)
    others = None if held_out is None else _read_calls(signature, run_function, "held_out", held_out, arguments)
    choices = {leaf: _choose(prepared, leaf, x, codes) for leaf, x in enumerate(converted.arrays)}
    start = _make_start(converted.arrays, choices)
    specs = {leaf: prepared.leaves[leaf].spec for leaf in start.codes}
    values = [
        x.dequantize() if leaf in prepared.leaves and leaf not in specs else x
        for leaf, x in enumerate(converted.arrays)
    ]
    problem = _make_problem(converted.arrays, specs, run_function, values)
    variables, errors = _minimize(problem, start, calls, others, rounds, (rate, code_rate), progress)
    is_better, arrays, notes = errors[1] < errors[0], list(converted.arrays), []
    for leaf, choice in choices.items():
        note = Note(converted.names[leaf], "unchanged", choice.reason or _WORSE)
        if is_better and (choice.floats or choice.codes):
            arrays[leaf], action = _change_parameter(arrays[leaf], variables, leaf, specs)
            note = Note(note.path, action, choice.reason, *errors)
        notes += [] if choice.reason == _NO_FLOATS else [note]
    return Outcome(converted.rebuild(arrays), Notes(tuple(notes), _MEASURE))


def _read_calls(
    signature: Signature, run_function: Callable[..., list[jax.Array]], name: str, batches: Any,
    arguments: dict[str, Any],
) -> list[_Call]:  # fmt: skip
    """Return batches with their results in floats.

    Args:
        signature: the parameters, in floats.
        run_function: the float function, as `make_function` returns it.
        name: the name of the argument that holds the batches.
        batches: the batches.
        arguments: keyword arguments of every call.
    """
    loop._check_batches(_NAME, batches)
    step = loop.Step(_NAME, lambda *x: x, lambda: 0, lambda state: "", frozenset(arguments))  # type: ignore[arg-type]
    others = [Signature(loop.split_arguments(step, index, batch)) for index, batch in enumerate(batches)]
    checks.require(bool(others), _NAME, name, "at least one batch", "none")
    calls = [_Call(other, run_function(signature.arrays, other)) for other in others]
    for index, call in enumerate(calls):
        is_finite = all(bool(jnp.isfinite(y).all()) for y in call.expected)
        expected, got = "batches with finite results", f"a NaN or an infinity in those of {name}[{index}]"
        checks.require(is_finite, _NAME, name, expected, got)
    return calls


def _choose(prepared: Prepared, leaf: int, x: Any, codes: bool) -> _Choice:
    """Return what is learned of a parameter, and why not more."""
    if not is_quantized(x):
        dtype = getattr(x, "dtype", None)
        is_float = dtype is not None and np.dtype(dtype) in dtypes.FLOATS
        return _Choice(is_float, False, "" if is_float else _NO_FLOATS)
    if leaf not in prepared.leaves:
        return _Choice(False, False, "codes that the function itself reads")
    rows = [row for row in prepared.coverage if prepared.names[leaf] in row.paths]
    if rows and all(row.form == "lookup" for row in rows):
        return _Choice(False, False, "a lookup, of which a batch reads few rows")
    spec = prepared.leaves[leaf].spec
    obstacle = learned_codes.find_obstacle(x, spec) if codes else ""
    reasons = ["scales that are powers of two"] if spec.power_of_two else []
    reasons += [obstacle] if obstacle else []
    return _Choice(not spec.power_of_two, codes and not obstacle, "; ".join(reasons))


def make_function(
    name: str, prepared: Prepared, signature: Signature, arguments: dict[str, Any]
) -> Callable[[Sequence[Any], Signature], list[jax.Array]]:
    """Return the float function, as one of the arrays of the parameters and of a batch.

    Args:
        name: the public function that errors name.
        prepared: the prepared function.
        signature: its parameters.
        arguments: keyword arguments of every call.
    """

    @jax.jit
    def run_function(arrays: Sequence[Any], other: Signature) -> list[jax.Array]:
        args, kwargs = other.rebuild(other.arrays)
        results = prepared.function(signature.rebuild(arrays), *args, **kwargs, **arguments)
        # Integers among the results, such as a count of steps, have no gradient.
        floats = [y for y in jax.tree.leaves(results) if jnp.issubdtype(jnp.result_type(y), jnp.floating)]
        checks.require(bool(floats), name, "prepared", "a function that returns floats", "none")
        return [y.astype(jnp.float32) for y in floats]

    return run_function


def _make_start(arrays: Sequence[Any], choices: dict[int, _Choice]) -> Variables:
    """Return the variables of the first step, which change nothing."""
    floats = [leaf for leaf, choice in choices.items() if choice.floats]
    shapes = {leaf: (arrays[leaf].scale if is_quantized(arrays[leaf]) else arrays[leaf]).shape for leaf in floats}
    coded = {leaf: arrays[leaf].shape for leaf, choice in choices.items() if choice.codes}
    return Variables(*({leaf: jnp.zeros(shape, jnp.float32) for leaf, shape in x.items()} for x in (shapes, coded)))


def _change_parameter(x: Any, variables: Variables, leaf: int, specs: dict[int, QuantSpec]) -> tuple[Any, str]:
    """Return a parameter with the change that its variables say, and what was done."""
    action = "tuned"
    if leaf in variables.codes:
        x, count = learned_codes.change_codes(x, specs[leaf], variables.codes[leaf])
        action = f"tuned, {count} of {x.size} codes changed"
    if leaf in variables.floats:
        variable = variables.floats[leaf]
        changed = _change_floats(jnp.asarray(x.scale if is_quantized(x) else x), variable)
        x = x.replace(scale=changed) if is_quantized(x) else changed
    return x, action


def _change_floats(x: jax.Array, variable: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(wide**2))
    moved = wide + jnp.where(size > 0, size, 1) * variable
    return jnp.where(jnp.all(wide > 0), wide * jnp.exp(variable), moved).astype(x.dtype)


def _expand_factor(q: QuantizedArray, variable: jax.Array, like: jax.Array) -> jax.Array:
    """Return the factor of the scale for each element of a quantized array."""
    aligned = granularity.Aligned(q.block_size)
    return aligned.expand(jnp.exp(variable.reshape(variable.shape or (1,) * like.ndim)), like)


def _make_problem(
    arrays: Sequence[Any], specs: dict[int, QuantSpec], run_function: Callable[..., list[jax.Array]],
    values: Sequence[Any],
) -> _Problem:  # fmt: skip
    """Return what is minimized: the squared error of the results, as a part of their squares.

    Args:
        arrays: the converted parameters, of which only shapes are read.
        specs: the specs of the codes that are learned.
        run_function: the float function.
        values: the parameters: floats, or quantized arrays if codes are learned.
    """

    def compute_error(variables: Variables, values: Sequence[Any], call: _Call) -> jax.Array:
        changed = list(values)
        for leaf, variable in variables.floats.items():
            q, w = arrays[leaf], values[leaf]
            if not is_quantized(q):
                changed[leaf] = _change_floats(jnp.asarray(w), variable)
            elif leaf not in specs:
                changed[leaf] = (w.astype(jnp.float32) * _expand_factor(q, variable, w)).astype(w.dtype)
        for leaf, change in variables.codes.items():
            q, variable = values[leaf], variables.floats.get(leaf)
            scale = q.scale if variable is None else _change_floats(q.scale, variable)
            changed[leaf] = learned_codes.dequantize_change(q, specs[leaf], change, scale)
        results = run_function(changed, call.arguments)
        error = sum(jnp.sum((y - z) ** 2) for y, z in zip(results, call.expected, strict=True))
        size = jnp.asarray(sum(jnp.sum(z**2) for z in call.expected))
        return error / jnp.where(size > 0, size, 1)

    def limit(variables: Variables, values: Sequence[Any]) -> Variables:
        codes = {leaf: learned_codes.limit_change(values[leaf], specs[leaf], x) for leaf, x in variables.codes.items()}
        return variables._replace(codes=codes)

    return _Problem(compute_error, limit, values)


def _minimize(
    problem: _Problem, start: Variables, calls: Sequence[_Call], held_out: Sequence[_Call] | None, rounds: int,
    rates: tuple[float, float], progress: bool | None,
) -> tuple[Variables, tuple[float, float]]:  # fmt: skip
    """Return the variables after the last step, or after the best round, and the mean error before and after."""
    measure = jax.jit(problem.compute_error)
    move_downhill = _make_step(problem)

    def measure_all(variables: Variables) -> float:
        measured = calls if held_out is None else held_out
        return float(np.mean([float(measure(variables, problem.values, call)) for call in measured]))

    zeros = jax.tree.map(jnp.zeros_like, start)
    state, before, count = _Adam(start, zeros, zeros), measure_all(start), rounds * len(calls)
    best, least = start, before
    bar = loop.Bar("tuning", count, progress)
    try:
        for index in range(count):
            part = (1 + math.cos(math.pi * index / count)) / 2
            plan = (np.float32(index + 1), Variables(*(np.float32(rate * part) for rate in rates)))
            state = move_downhill(state, plan, problem.values, calls[index % len(calls)])
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


def _make_step(problem: _Problem) -> Callable[..., _Adam]:
    """Return a step of Adam, as a function of its state, the number of the step with its rates, values and a batch."""

    @jax.jit
    def move_downhill(state: _Adam, plan: tuple[Any, Any], values: Sequence[Any], call: _Call) -> _Adam:
        index, rates = plan
        # Adam is written out, because optax is a dependency of jaxquant.optim alone.
        slopes = jax.grad(problem.compute_error)(state.variables, values, call)
        means = jax.tree.map(lambda m, g: _DECAY[0] * m + (1 - _DECAY[0]) * g, state.means, slopes)
        squares = jax.tree.map(lambda s, g: _DECAY[1] * s + (1 - _DECAY[1]) * g**2, state.squares, slopes)

        def move(rate: Any, variable: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
            size = jnp.sqrt(square / (1 - _DECAY[1] ** index)) + np.float32(1e-12)
            return variable - rate * mean / (1 - _DECAY[0] ** index) / size

        groups = zip(rates, state.variables, means, squares, strict=True)
        variables = Variables(*(jax.tree.map(functools.partial(move, rate), *group) for rate, *group in groups))
        return _Adam(problem.limit(variables, values), means, squares)

    return move_downhill
