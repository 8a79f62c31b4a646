"""`tune`: the scales of the codes and the parameters in floats, learned such that the results are those of floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._arrays.quantized_array import QuantizedArray
from ..._core import checks, dtypes, granularity
from ...calibration import loop
from ...transform import Prepared
from ...transform._calls import Signature, is_quantized
from ...transform._inspect import check_prepared
from .notes import Note, Notes, Outcome

_NAME = "ptq.tune"
_MEASURE = "the squared error of the results, as a part of their squares, before and after"
_NO_FLOATS = "not an array of floats"
_DECAY = (np.float32(0.9), np.float32(0.99))  # Adam's; the second is short, because the steps are few


Variables = dict[int, jax.Array]


class _Adam(NamedTuple):
    """The variables of each parameter, by its place, and their moving averages."""

    variables: Variables
    means: Variables
    squares: Variables


class _Call(NamedTuple):
    """A batch, and the results in floats."""

    arguments: Signature
    expected: list[jax.Array]


ComputeError = Callable[[Variables, Sequence[Any], _Call], jax.Array]


def tune(
    prepared: Prepared, params: Any, qparams: Any, batches: Iterable[Any], *, held_out: Iterable[Any] | None = None,
    rounds: int = 8, rate: float = 1e-3, progress: bool | None = None, **arguments: Any,
) -> Outcome:  # fmt: skip
    """Learn the scales of the codes and the parameters in floats, with the results of the float function as the target.

    minimize sum (f(params, x) - f(qparams, x))^2 over the batches x. The codes do not change.

    The other passes look at one contraction at a time. This one looks at the results, so that a later layer can make
    up for an error of an earlier one. It changes few numbers: a scale for each output, for example, biases, and the
    scales and offsets of normalizations. Adam minimizes, with one step for each batch of each round, and a rate that
    falls to 0.

    A scale, and a parameter whose elements are all positive, is multiplied by exp(v), and stays positive. To any other
    parameter v is added, in units of the root of its mean square. Scales of tables that are looked up, and scales that
    are powers of two, do not change. While it learns, activations are in floats, also those that the rules quantize.

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
        progress: whether to show a progress bar, with the package rich. None shows it on a terminal.
        **arguments: keyword arguments of every call.

    Returns:
        The converted parameters with the same codes, and notes: a row for each parameter that is an array of floats or
        codes. If the error of the results does not become smaller, the parameters are unchanged, and the notes say so.
        With `held_out`, the errors before and after are those of these batches.

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

    Source: Chen et al., arXiv 2407.11062, section 3.3, for scales that are learned while the codes stay; Li et al.,
    arXiv 2309.02784, section 3, for normalizations; Kingma and Ba, arXiv 1412.6980, algorithm 1; Prechelt, Early
    Stopping - But When? (1998), section 2, for the choice of the round.
    """
    check_prepared(_NAME, prepared)
    loop.check_progress(_NAME, progress)
    checks.check_integer(_NAME, "rounds", rounds)
    checks.require(rounds > 0, _NAME, "rounds", "a positive number", rounds)
    checks.check_real(_NAME, "rate", rate)
    checks.require(rate > 0, _NAME, "rate", "a positive number", rate)
    signature, codes = prepared._read_parameters("convert", params), Signature(qparams)
    for leaf in prepared.leaves:
        path, q = prepared.names[leaf], codes.arrays[leaf]
        checks.require_type(is_quantized(q), _NAME, "qparams", f"a quantized array at {path}", type(q).__name__)
    run_function = make_function(_NAME, prepared, signature, arguments)
    calls = _read_calls(signature, run_function, "batches", batches, arguments)
    others = None if held_out is None else _read_calls(signature, run_function, "held_out", held_out, arguments)
    reasons = {leaf: _find_obstacle(prepared, leaf, x) for leaf, x in enumerate(codes.arrays)}
    start = _make_start(codes.arrays, [leaf for leaf, reason in reasons.items() if not reason])
    compute_error = _make_error(codes.arrays, run_function)
    values = [x.dequantize() if leaf in prepared.leaves else x for leaf, x in enumerate(codes.arrays)]
    variables, errors = _minimize(compute_error, start, values, calls, others, rounds, rate, progress)
    worse = "" if errors[1] < errors[0] else "the error of the results would not become smaller"
    arrays, notes = list(codes.arrays), []
    for leaf, reason in ((leaf, reason or worse) for leaf, reason in reasons.items() if reason != _NO_FLOATS):
        if not reason:
            arrays[leaf] = _change_parameter(arrays[leaf], variables[leaf])
        notes.append(Note(codes.names[leaf], "unchanged" if reason else "tuned", reason, *(() if reason else errors)))
    return Outcome(codes.rebuild(arrays), Notes(tuple(notes), _MEASURE))


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


def _find_obstacle(prepared: Prepared, leaf: int, x: Any) -> str:
    """Return why a parameter cannot be learned, or ""."""
    if not is_quantized(x):
        dtype = getattr(x, "dtype", None)
        return "" if dtype is not None and np.dtype(dtype) in dtypes.FLOATS else _NO_FLOATS
    if leaf not in prepared.leaves:
        return "codes that the function itself reads"
    rows = [row for row in prepared.coverage if prepared.names[leaf] in row.paths]
    if rows and all(row.form == "lookup" for row in rows):
        return "a lookup, of which a batch reads few rows"
    return "scales that are powers of two" if prepared.leaves[leaf].spec.power_of_two else ""


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


def _make_start(arrays: Sequence[Any], learned: Sequence[int]) -> Variables:
    """Return the variables of the first step, which change nothing."""
    shapes = {leaf: (arrays[leaf].scale if is_quantized(arrays[leaf]) else arrays[leaf]).shape for leaf in learned}
    return {leaf: jnp.zeros(shape, jnp.float32) for leaf, shape in shapes.items()}


def _change_parameter(x: Any, variable: jax.Array) -> Any:
    """Return a parameter with the change that a variable says."""
    if is_quantized(x):
        return x.replace(scale=_change_floats(x.scale, variable))
    return _change_floats(jnp.asarray(x), variable)


def _change_floats(x: jax.Array, variable: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(wide**2))
    moved = wide + jnp.where(size > 0, size, 1) * variable
    return jnp.where(jnp.all(wide > 0), wide * jnp.exp(variable), moved).astype(x.dtype)


def _expand_factor(q: QuantizedArray, variable: jax.Array, like: jax.Array) -> jax.Array:
    """Return the factor of the scale for each element of a quantized array."""
    aligned = granularity.Aligned(q.block_size)
    return aligned.expand(jnp.exp(variable.reshape(variable.shape or (1,) * like.ndim)), like)


def _make_error(arrays: Sequence[Any], run_function: Callable[..., list[jax.Array]]) -> ComputeError:
    """Return a function of the variables, the floats of the parameters, and a batch.

    It returns the squared error of the results, as a part of their squares.

    Args:
        arrays: the converted parameters, of which only shapes are read.
        run_function: the float function.
    """

    def compute_error(variables: Variables, values: Sequence[Any], call: _Call) -> jax.Array:
        changed = list(values)
        for leaf, variable in variables.items():
            q, w = arrays[leaf], values[leaf]
            if is_quantized(q):
                changed[leaf] = (w.astype(jnp.float32) * _expand_factor(q, variable, w)).astype(w.dtype)
            else:
                changed[leaf] = _change_floats(jnp.asarray(w), variable)
        results = run_function(changed, call.arguments)
        error = sum(jnp.sum((y - z) ** 2) for y, z in zip(results, call.expected, strict=True))
        size = jnp.asarray(sum(jnp.sum(z**2) for z in call.expected))
        return error / jnp.where(size > 0, size, 1)

    return compute_error


def _minimize(
    compute_error: ComputeError, start: Variables, values: Sequence[Any], calls: Sequence[_Call],
    held_out: Sequence[_Call] | None, rounds: int, rate: float, progress: bool | None,
) -> tuple[Variables, tuple[float, float]]:  # fmt: skip
    """Return the variables after the last step, or after the best round, and the mean error before and after."""
    measure = jax.jit(compute_error)
    move_downhill = _make_step(compute_error)

    def measure_all(variables: Variables) -> float:
        measured = calls if held_out is None else held_out
        return float(np.mean([float(measure(variables, values, call)) for call in measured]))

    zeros = jax.tree.map(jnp.zeros_like, start)
    state, before, count = _Adam(start, zeros, zeros), measure_all(start), rounds * len(calls)
    best, least = start, before
    bar = loop.Bar("tuning", count, progress)
    try:
        for index in range(count):
            current = rate * (1 + math.cos(math.pi * index / count)) / 2
            plan = (np.float32(index + 1), np.float32(current))
            state = move_downhill(state, plan, values, calls[index % len(calls)])
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


def _make_step(compute_error: ComputeError) -> Callable[..., _Adam]:
    """Return a step of Adam, as a function of its state, the number of the step with its rate, values and a batch."""

    @jax.jit
    def move_downhill(state: _Adam, plan: tuple[Any, Any], values: Sequence[Any], call: _Call) -> _Adam:
        index, rate = plan
        # Adam is written out, because optax is a dependency of jaxquant.optim alone.
        slopes = jax.grad(compute_error)(state.variables, values, call)
        means = jax.tree.map(lambda m, g: _DECAY[0] * m + (1 - _DECAY[0]) * g, state.means, slopes)
        squares = jax.tree.map(lambda s, g: _DECAY[1] * s + (1 - _DECAY[1]) * g**2, state.squares, slopes)

        def move(variable: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
            size = jnp.sqrt(square / (1 - _DECAY[1] ** index)) + np.float32(1e-12)
            return variable - rate * mean / (1 - _DECAY[0] ** index) / size

        return _Adam(jax.tree.map(move, state.variables, means, squares), means, squares)

    return move_downhill
