"""`correct_bias`: the mean error of each output, moved into the bias."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._core import checks
from .._program import jaxpr
from .._program.analysis import Site
from .._program.replacing import Records
from ..calibration import loop
from ..transform import Prepared, QuantizedTree
from ..transform.session import (
    ProgramPlan,
    Session,
    Signature,
    TracedCall,
    Twin,
    contract_codes,
    is_quantized,
    list_programs,
    match_ranges,
)
from . import inputs, neighbors
from ._grid import Axis, make_layout
from .collect import Statistics, has_statistics
from .notes import Note, Notes, Outcome

_NAME = "ptq.correct_bias"
_MEASURE = "the largest mean error of an output, before and after"
_SETTLED = 1e-3  # of the mean errors before the correction


class _Target(NamedTuple):
    """A quantized weight of a contraction with a bias.

    Attributes:
        leaf: the index of the weight.
        use: how the contraction reads it.
        site: the contraction.
        bias: the index of the bias.
    """

    leaf: int
    use: inputs.Uses
    site: Site
    bias: int


def correct_bias(
    prepared: Prepared, params: Any, q: QuantizedTree, data: Statistics | Iterable[Any], *, batch: Any = None,
    **arguments: Any,
) -> Outcome:  # fmt: skip
    """Add the mean error of each output of a quantized contraction to its bias.

    What `data` is decides where the mean comes from:

    - `ptq.Statistics`: bias + E[x] (W - W_q), with the mean E[x] of the inputs. This is the error that the rounding of
      the weight causes for inputs in floats. It needs one matrix product for each weight;
    - batches: bias + E[y] - E[y_q], with the outputs y of the function in floats and y_q of the quantized one, with all
      of its codes, also of activations. Each contraction is corrected on inputs that come from the corrected
      ones before it. One pass over all batches measures and corrects all contractions, and the next one corrects those
      whose inputs have changed by that, until each mean error is a thousandth of what it was, or smaller. At most there
      are as many passes as contractions on the longest path through the program.

    Args:
        prepared: the prepared function.
        params: its parameters, in floats.
        q: its converted parameters and ranges, as `Prepared.convert` or `apply` returns them.
        data: statistics of its inputs, from `collect`, or batches, as for `Prepared.calibrate`.
        batch: with statistics, one batch; only its shapes matter.
        **arguments: keyword arguments of every call.

    Returns:
        A `QuantizedTree` with new biases, and notes: a row for each quantized weight, with the reason if its
        contraction has no bias, or has several uses.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the parameters have other paths or shapes than in `prepare`; the statistics have no entry for
            a weight; there is no batch; a static argument of a batch leads to other contractions with biases; or a mean
            is not finite.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> apply = lambda params, x: x @ params["kernel"] + params["bias"][None]
        >>> params = {"kernel": jnp.array([[7.0], [0.4]]), "bias": jnp.zeros(1)}
        >>> x = jnp.array([[1.0, 3.0], [2.0, 1.0]])
        >>> prepared = jq.prepare(apply, params, x, rules=[jq.Rule(weight=jq.Weight("int4"))])
        >>> stats, q = ptq.collect(prepared, params, [x]), prepared.convert(params)
        >>> corrected, notes = ptq.correct_bias(prepared, params, q, stats, batch=x)
        >>> corrected.params["bias"]  # 0.4 was rounded to 0, and the mean of its input is 2
        Array([0.8], dtype=float32)
        >>> float(ptq.correct_bias(prepared, params, q, [x]).tree.params["bias"][0]).__round__(4)
        0.8

    Source: Nagel et al., arXiv 1906.04721, section 4.2, equation 15, and appendix D for the measured mean.
    """
    session = Session(_NAME, prepared, params)
    signature, codes = session.parameters, session.read_converted(q)
    is_analytic = isinstance(data, Statistics)
    checks.require(
        is_analytic == (batch is not None), _NAME, "batch", "a batch with statistics, and none with batches",
        "none" if batch is None else "a batch",
    )  # fmt: skip
    calls = _read_calls("batch", [batch], arguments) if is_analytic else _read_calls("data", data, arguments)
    call = session.trace(*calls[0])
    targets, notes = _match_targets(prepared, call, codes)
    if is_analytic:
        arrays = _correct_by_statistics(prepared, signature, codes, data, targets, notes)
    else:
        records = session.read_ranges(q.ranges)
        others = [Signature(arguments) for arguments in calls]
        for other in list_programs(others):
            again = session.trace(*other.rebuild(other.arrays))
            _check_targets(targets, _match_targets(prepared, again, codes)[0])
        measure = _make_measure(session, targets, records, others)
        arrays = _correct_by_batches(prepared, call, targets, notes, list(codes.arrays), measure)
    tree = q.replace(params=codes.rebuild(arrays))
    return Outcome(tree, Notes(tuple(notes[leaf] for leaf in prepared.leaves), _MEASURE))


def _read_calls(name: str, batches: Iterable[Any], arguments: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return the positional and the keyword arguments of each call, from the batches of an argument."""
    return [(args, {**kwargs, **arguments}) for args, kwargs in loop.read_batches(_NAME, batches, arguments, name)]


def _match_targets(prepared: Prepared, call: TracedCall, codes: Signature) -> tuple[list[_Target], dict[int, Note]]:
    """Return the weights of contractions with a bias, and a note for each of the others."""
    graph, targets, notes = neighbors.make_call_graph(call), [], {}
    for leaf in prepared.leaves:
        uses = inputs.list_uses(call, leaf)
        reason = next((use.reason for use in uses if use.reason), "" if uses else _explain_missing(prepared, leaf))
        # One shift cannot make up for the errors of uses with different means of the inputs.
        reason = reason or ("a weight with several uses" if len(uses) > 1 else "")
        if not reason:
            use = next(iter(uses))
            site = next(s for s in call.analysis.sites.values() if s.name == use.name and has_statistics(call.plan, s))
            bias = neighbors.match_bias(graph, site, inputs.list_output_dimensions(site))
            if bias is not None and not is_quantized(codes.arrays[bias]):
                targets.append(_Target(leaf, use, site, bias))
                continue
            reason = "its contraction has no bias of its own"
        notes[leaf] = Note(prepared.names[leaf], "unchanged", reason)
    return targets, notes


def _explain_missing(prepared: Prepared, leaf: int) -> str:
    """Return why no contraction with inputs reads a parameter."""
    forms = {row.form for row in prepared.coverage if prepared.names[leaf] in row.paths}
    return "a lookup has no inputs" if "lookup" in forms else "the batches do not reach its contraction"


def _check_targets(targets: Sequence[_Target], others: Sequence[_Target]) -> None:
    """Raise unless another batch has contractions with biases as the first batch has them."""
    names, other_names = ({target.site.name: (target.use, target.bias) for target in x} for x in (targets, others))
    differing = sorted(name for name in {**names, **other_names} if names.get(name) != other_names.get(name))
    # A mean of one batch would be the target for all of them, and a bias of one program may be in no other.
    expected = "batches with calls that all have the same contractions with biases"
    got = f"others at {', '.join(differing[:4])} (a static argument, or a shape that decides on the program?)"
    checks.require(not differing, _NAME, "data", expected, got)


def _correct_by_statistics(
    prepared: Prepared, signature: Signature, codes: Signature, stats: Statistics, targets: Sequence[_Target],
    notes: dict[int, Note],
) -> list[Any]:  # fmt: skip
    """Return the parameters with biases that make up for the rounding of each weight, and add the notes."""
    arrays = list(codes.arrays)
    for leaf, use, _, bias in targets:
        is_known = use.name in stats.moments
        checks.require(is_known, _NAME, "data", f"statistics of {use.name}, as collect returns them", "none")
        w = jnp.asarray(signature.arrays[leaf])
        combined = inputs.combine_uses([use], stats.moments, w.shape)
        assert not isinstance(combined, str)
        shift = compute_mean_error(w, codes.arrays[leaf].dequantize(), combined[1].mean, use.axis)
        arrays[bias] = _add_shift(arrays[bias], shift)
        action = f"corrected in {prepared.names[bias]}"
        notes[leaf] = Note(prepared.names[leaf], action, "", float(jnp.abs(shift).max()), 0.0)
    return arrays


def _add_shift(bias: ArrayLike, shift: ArrayLike) -> jax.Array:
    bias = jnp.asarray(bias)
    return (bias.astype(jnp.float32) + jnp.asarray(shift, jnp.float32).reshape(bias.shape)).astype(bias.dtype)


def _correct_by_batches(
    prepared: Prepared, call: TracedCall, targets: Sequence[_Target], notes: dict[int, Note], arrays: list[Any],
    measure: Callable[[Sequence[Any] | None], dict[str, np.ndarray]],
) -> list[Any]:  # fmt: skip
    """Return the parameters with biases that make up for the measured means, and add the notes."""
    levels = neighbors.count_levels(neighbors.make_call_graph(call), [target.site for target in targets])
    expected = measure(None) if targets else {}
    before: dict[str, float] = {}
    taken = {name: np.zeros_like(mean) for name, mean in expected.items()}
    after: dict[str, float] = {}
    originals = [jnp.asarray(arrays[target.bias]) for target in targets]
    for level in sorted(set(levels.values())):
        # The outputs are read before the bias is added, so that each is the error with the original bias.
        actual = measure(arrays)
        errors = {name: expected[name] - actual[name] for name in expected}
        before = before or _compute_largest(errors)
        after = _compute_largest({name: errors[name] - taken[name] for name in errors})
        if all(after[name] <= _SETTLED * before[name] for name in before):
            break
        # Contractions of earlier levels have inputs that do not change any more. Those of later levels are corrected
        # again when the means of their inputs are right, and often they nearly are after a few passes.
        for target, old in zip(targets, originals, strict=True):
            name = target.site.name
            if levels[name] >= level:
                arrays[target.bias] = _add_shift(old, errors[name])
                # A bias of few digits takes only a part.
                taken[name] = np.asarray(arrays[target.bias].astype(jnp.float32) - old.astype(jnp.float32)).ravel()
                after |= _compute_largest({name: errors[name] - taken[name]})
    for leaf, _, site, bias in targets:
        action = f"corrected in {prepared.names[bias]}"
        notes[leaf] = Note(prepared.names[leaf], action, "", before[site.name], after[site.name])
    return arrays


def _compute_largest(errors: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: float(np.abs(error).max()) for name, error in errors.items()}


def _make_measure(
    session: Session, targets: Sequence[_Target], ranges: Any, others: Sequence[Signature]
) -> Callable[[Sequence[Any] | None], dict[str, np.ndarray]]:
    """Return a function of the converted parameters that returns the mean outputs of each contraction over all calls.

    It takes None for the float parameters.
    """
    sites = {target.site.name for target in targets}

    @jax.jit
    def run_program(arrays: Sequence[Any], other: Signature) -> dict[str, Any]:
        positional, named = other.rebuild(other.arrays)
        call = session.trace(positional, named)
        records: dict[str, Any] = {name: {"ranges": part} for name, part in match_ranges(call, ranges).items()}
        for site in call.analysis.sites.values():
            if site.name in sites:
                result = site.equation.outvars[0].aval
                records[site.name] |= _compute_mean(site, jnp.zeros(result.shape, jnp.float32))
        # Other quantized arrays are read by the function itself; in the float parameters they are floats.
        parameters = [
            Twin(x.dequantize(), x) if leaf in session.leaves and is_quantized(x) else x
            for leaf, x in enumerate(arrays)
        ]
        wants, visit = functools.partial(_is_replaced, call.plan), functools.partial(_visit_outputs, call.plan)
        final = session.inspect(call, wants, visit, records, parameters)
        return {name: (final[name]["mean"], final[name]["count"]) for name in sites}

    def measure(arrays: Sequence[Any] | None) -> dict[str, np.ndarray]:
        totals, counts = dict.fromkeys(sites, np.zeros(())), dict.fromkeys(sites, 0.0)
        for other in others:
            means = run_program(session.parameters.arrays if arrays is None else arrays, other)
            for name, (mean, count) in means.items():
                # In float64 on the host: JAX has none by default, and the shifts are small differences of these means.
                totals[name] = totals[name] + np.asarray(mean, np.float64) * float(count)
                counts[name] += float(count)
        averages = {name: totals[name] / counts[name] for name in sites}
        for name, mean in averages.items():
            expected, got = "batches with finite outputs", f"a NaN or an infinity in the outputs of {name}"
            checks.require(bool(np.isfinite(mean).all()), _NAME, "data", expected, got)
        return averages

    return measure


def _visit_outputs(plan: ProgramPlan, site: Site, operands: Sequence[Any], records: Records) -> tuple[Any, Any]:
    """Return the result of a contraction, on codes if its parameter has any, and records with the mean of it."""
    record = records[site.name]
    # With the float parameters there are no codes, so that both programs are walked in one way.
    if any(isinstance(x, Twin) for x in operands):
        result = contract_codes(plan, site, operands, record["ranges"])[0]
    else:
        (result,) = jaxpr.evaluate(site.equation, operands)
    if "mean" in record:
        record = {**record, **_compute_mean(site, result.astype(jnp.float32))}
    return result, {**records, site.name: record}


def _is_replaced(plan: ProgramPlan, site: Site) -> bool:
    return plan.sites[site.name].is_replaced


def _compute_mean(site: Site, result: jax.Array) -> dict[str, jax.Array]:
    """Return the mean of each output of a contraction, and the number of results that it is the mean of."""
    outputs = inputs.list_output_dimensions(site)
    others = tuple(axis for axis in range(result.ndim) if axis not in outputs)
    count = math.prod(result.shape[axis] for axis in others)
    return {"mean": jnp.mean(result, others).ravel(), "count": jnp.float32(count)}


def compute_mean_error(w: jax.Array, values: jax.Array, mean: jax.Array, axis: Axis) -> jax.Array:
    """Return the mean of x (W - W_q) of each output."""
    layout = make_layout(_NAME, w.shape, axis, mean.shape[0])
    errors = layout.arrange(w.astype(jnp.float32) - values.astype(jnp.float32))
    return jnp.einsum("gi,gio->go", mean, errors, precision=jax.lax.Precision.HIGHEST).ravel()
