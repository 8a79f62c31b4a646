"""`tune`: scales, parameters in floats, and codes, learned such that the results are those of floats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._arrays.spec import QuantSpec
from ..._core import checks, dtypes
from ...calibration import loop
from ...transform import Prepared, QuantizedTree
from ...transform._calls import Signature, is_quantized
from ...transform._inspect import check_prepared, read_converted
from . import learned_codes
from .learn import Call, Variables, change_floats, make_problem, minimize
from .notes import Note, Notes, Outcome

_NAME = "ptq.tune"
_MEASURE = "the squared error of the results, as a part of their squares, before and after"
_NO_FLOATS = "not an array of floats"
_NO_SLOPE = "the results do not depend on it, or have no gradient for it"
_WORSE = "the error of the results would not become smaller"


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

    A scale, and a parameter whose elements are all positive, is multiplied by exp(v), and stays positive. To any other
    parameter v is added, in units of the root of its mean square. Scales of tables that are looked up, and scales that
    are powers of two, do not change. While it learns, activations are in floats, also those that the rules quantize.

    With `codes`, a change v of each value is learned, too, in steps of its code, and the value is rounded whenever the
    function runs: w = scale * round(steps + v). The gradient g of v is that without the rounding (the straight-through
    estimator). Each step moves v by a part of the way to the minimum of its own parabola, where g / h + v - round(v) is
    0, but by no more than `code_rate` steps. h is the curvature: the mean square of the gradients of 32 random sums of
    the results. So a code changes where the next one has less error, and the largest errors come first. No code leaves
    the bounds of its spec, and codes do not depend on scales. Of a codebook, a step is the mean distance of its levels.

    The codes of tables that are looked up do not change, nor do those of float dtypes. There are as many codes as
    weights, so that they need many more data than scales, and fit the batches; use `held_out`. In memory each takes
    some 16 bytes.

    Call it last, after `apply` and `correct_bias`. The results of all batches together should have many times as many
    elements as there are numbers to learn, or it fits the batches and nothing else. With `held_out`, the result is that
    of the round with the least error of these batches, from which neither `apply` nor this function should learn.

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
        A `QuantizedTree` with the same codes and ranges, or with those that were learned, and notes: a row for each
        parameter that is an array of floats or codes, which says how many codes have changed. If the error of the
        results does not become smaller, the parameters are unchanged, and the notes say so. With `held_out`, the errors
        before and after are those of these batches.

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
    check_prepared(_NAME, prepared)
    loop.check_progress(_NAME, progress)
    checks.check_integer(_NAME, "rounds", rounds)
    checks.require(rounds > 0, _NAME, "rounds", "a positive number", rounds)
    checks.check_real(_NAME, "rate", rate)
    checks.require(rate > 0, _NAME, "rate", "a positive number", rate)
    checks.check_flag(_NAME, "codes", codes)
    checks.check_real(_NAME, "code_rate", code_rate)
    checks.require(code_rate > 0, _NAME, "code_rate", "a positive number", code_rate)
    signature, converted = prepared._read_parameters("convert", params), read_converted(_NAME, prepared, q)
    run_function = make_function(_NAME, prepared, signature, arguments)
    calls = _read_calls(signature, run_function, "batches", batches, arguments)
    others = None if held_out is None else _read_calls(signature, run_function, "held_out", held_out, arguments)
    choices = {leaf: _choose(prepared, leaf, x, codes) for leaf, x in enumerate(converted.arrays)}
    start = _make_start(converted.arrays, choices)
    specs = {leaf: prepared.leaves[leaf].spec for leaf in start.codes}
    values = [
        x.dequantize() if leaf in prepared.leaves and not (choices[leaf].floats or choices[leaf].codes) else x
        for leaf, x in enumerate(converted.arrays)
    ]
    problem = make_problem(specs, run_function, values)
    variables, errors = minimize(problem, start, calls, others, rounds, (rate, code_rate), progress)
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
    signature: Signature, run_function: Callable[..., list[jax.Array]], name: str, batches: Any,
    arguments: dict[str, Any],
) -> list[Call]:  # fmt: skip
    """Return batches with their results in floats.

    Args:
        signature: the parameters, in floats.
        run_function: the float function, as `make_function` returns it.
        name: the name of the argument that holds the batches.
        batches: the batches.
        arguments: keyword arguments of every call.
    """
    loop._check_batches(_NAME, batches, name)
    step = loop.Step(_NAME, lambda *x: x, lambda: 0, lambda state: "", frozenset(arguments))  # type: ignore[arg-type]
    others = [Signature(loop.split_arguments(step, index, batch, name)) for index, batch in enumerate(batches)]
    checks.require(bool(others), _NAME, name, "at least one batch", "none")
    calls = [Call(other, run_function(signature.arrays, other)) for other in others]
    for index, call in enumerate(calls):
        # Their error would be 0, and would lower the mean.
        is_empty = not sum(y.size for y in call.expected)
        checks.require(not is_empty, _NAME, f"{name}[{index}]", "a batch with results", "results without elements")
        is_finite = all(bool(jnp.isfinite(y).all()) for y in call.expected)
        expected, got = "batches with finite results", f"a NaN or an infinity in those of {name}[{index}]"
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
        changed = change_floats(jnp.asarray(x.scale if is_quantized(x) else x), variable)
        x = x.replace(scale=changed) if is_quantized(x) else changed
    return x, action
