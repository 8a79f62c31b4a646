"""`compare`: the errors of each contraction of a prepared function, measured on data."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._arrays import parts
from .._arrays.diagnostics import quantization_error
from .._arrays.quantized_array import QuantizedArray
from .._core import checks, dtypes, granularity
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
    match_ranges,
)
from ._report import Histogram, Report, SiteRow

_NAME = "report.compare"
_SUMS = ("activation", "activation_error", "saturated", "elements", "output", "output_error")
_RESULTS = ("sums", "extremes", "counts", "ends")
_BINS = 64


def _is_replaced(plan: ProgramPlan, site: Site) -> bool:
    return plan.sites[site.name].is_replaced


def _compare_site(plan: ProgramPlan, site: Site, operands: Sequence[Any], records: Records) -> tuple[Any, Records]:
    """Return the float result, and the sums with the terms of this contraction added."""
    record = records[site.name]
    (result,) = jaxpr.evaluate(site.equation, [x.floats if isinstance(x, Twin) else x for x in operands])
    values, activations = contract_codes(plan, site, operands, record["ranges"])
    sums: dict[str, Any] = {}
    for operand, q, scale in activations:
        x = operands[int(operand.place)]
        sums = _add(sums, _sum_squares(x, q.dequantize(), "activation"))
        sums = _add(sums, _count_saturated(x, q, scale))
        record = {**record, **_describe_values(x, q, operand, record)}
    sums = _add(sums, _sum_squares(result, values, "output"))
    return result, {**records, site.name: {**record, "sums": _add(record["sums"], sums)}}


def _describe_values(x: jax.Array, q: Any, operand: Any, record: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return the extremes of activations, how many are in each bin, and the ends of a static range."""
    wide = x.astype(jnp.float32)
    extremes = jnp.stack([jnp.min(wide, initial=np.inf), jnp.max(wide, initial=-np.inf)])
    low, high = record["edges"][..., 0], record["edges"][..., 1]
    index = jnp.clip(jnp.floor((wide - low) / (high - low) * np.float32(_BINS)), 0, _BINS - 1).astype(jnp.int32)
    counts = jnp.zeros(_BINS, jnp.int32).at[index.ravel()].add(1)
    ends, scale = jnp.full(2, np.nan, jnp.float32), q.scale
    # A dynamic range has other ends in each call and each row.
    if operand.calibrator is not None:
        codes = np.asarray(operand.spec.bounds, np.float32)
        if isinstance(scale, QuantizedArray):  # the largest of the float8 scales, which a static range gives
            codes = codes * np.float32(operand.spec.scale_spec.bounds[1])
            scale = 1 / scale.scale if scale.inverse_scale else scale.scale
        zero_point = 0 if q.zero_point is None else q.zero_point.astype(jnp.float32).ravel()[0]
        ends = (codes - zero_point) * scale.astype(jnp.float32).ravel()[0]
    least, most = record["extremes"][0], record["extremes"][1]
    extremes = jnp.stack([jnp.minimum(least, extremes[0]), jnp.maximum(most, extremes[1])])
    return {"extremes": extremes, "counts": record["counts"] + counts, "ends": ends}


def _add(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Return the sums of two dicts; an entry may be missing in either."""
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in {**a, **b}}


def _sum_squares(x: jax.Array, y: jax.Array, name: str) -> dict[str, jax.Array]:
    wide, other = x.astype(jnp.float32), y.astype(jnp.float32)
    # An entry of a table may be NaN where the index is out of range, in both, and a masked result is an infinity.
    is_same = (jnp.isnan(wide) & jnp.isnan(other)) | (jnp.isinf(wide) & (wide == other))
    wide, other = (jnp.where(is_same, 0, v) for v in (wide, other))
    return {name: jnp.sum(wide**2), f"{name}_error": jnp.sum((wide - other) ** 2)}


def _count_saturated(x: jax.Array, q: QuantizedArray, scale: jax.Array) -> dict[str, jax.Array]:
    """Return the number of elements that lie more than half a step beyond the last code, and the number of all."""
    step = granularity.Aligned(q.block_size).expand(dtypes.scale_as_float32(scale), x)
    if isinstance(q.format, np.dtype) and q.format in dtypes.SMALL_FLOATS:  # their steps differ
        is_beyond = dtypes.mark_overflow(x.astype(jnp.float32) / step, q.format)
    else:
        distance = jnp.abs(x.astype(jnp.float32) - q.dequantize().astype(jnp.float32))
        # A rounded element is half a step away, and in float32 a little more.
        is_beyond = distance > np.float32(0.51) * step
    return {"saturated": jnp.sum(is_beyond, dtype=jnp.float32), "elements": jnp.float32(x.size)}


def compare(prepared: Prepared, params: Any, q: QuantizedTree, batches: Iterable[Any], **arguments: Any) -> Report:
    """Measure the error that each contraction of a prepared function gets from its codes.

    SQNR = 10 log10(sum x^2 / sum (x - x_q)^2), in decibels

    The function runs in floats, and each contraction also on codes, with the same inputs. So the errors of a
    contraction come from its own weight and activations, not from earlier ones. The error of the result is
    the error of `Prepared.apply`, with all of them.

    Args:
        prepared: the prepared function.
        params: its parameters, in floats.
        q: its converted parameters and ranges, as `Prepared.convert` or a pass of `jaxquant.ptq` returns them.
        batches: batches, as for `Prepared.calibrate`.
        **arguments: keyword arguments of every call.

    Returns:
        A `Report`, with a row for each contraction and lookup, those in floats included, and methods that show it.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: there is no batch; a batch has other contractions than `prepare` saw, or results with a NaN; or the
            parameters or ranges do not belong to the function.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> apply = lambda params, x: jax.nn.relu(x @ params["first"]) @ params["second"]
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> params = {"first": jax.random.normal(keys[0], (16, 8)), "second": jax.random.normal(keys[1], (8, 4))}
        >>> x = jax.random.normal(keys[2], (64, 16))
        >>> prepared = jq.prepare(apply, params, x, rules=jq.recipes.w8a8_dynamic())
        >>> report = jq.report.compare(prepared, params, prepared.convert(params), [x])
        >>> [(row.name, row.form, row.weight_sqnr > 40, row.float_bytes) for row in report.rows]
        [('first', 'integer', True, 512), ('second', 'integer', True, 128)]
        >>> report.result_sqnr > 30
        True

    Source: Widrow and Kollar, Quantization Noise (Cambridge University Press, 2008), for the ratio.
    """
    session = Session(_NAME, prepared, params)
    signature, codes, records = session.parameters, session.read_converted(q), session.read_ranges(q.ranges)
    calls = loop.read_batches(_NAME, batches, arguments)
    others = [Signature((args, {**kwargs, **arguments})) for args, kwargs in calls]
    measured, activations = _measure_calls(session, codes, records, others)
    result = _measure_result(prepared, params, q, others)
    weights = _count_weights(prepared, signature, codes)
    rows = tuple(_make_row(prepared, row, measured.get(row.name, {}), signature, codes) for row in prepared.coverage)
    histograms = {
        prepared.names[leaf]: _make_histogram(signature.arrays[leaf], codes.arrays[leaf]) for leaf in prepared.leaves
    }
    return Report(rows, result, histograms, activations, weights)


def _measure_calls(
    session: Session, codes: Signature, ranges: Any, others: Sequence[Signature]
) -> tuple[dict[str, dict[str, float]], dict[str, Histogram]]:
    """Return the sums of each contraction over all calls and all iterations of loops, and histograms of activations."""
    names = {row.name for row in session.prepared.coverage if row.is_replaced}

    @jax.jit
    def run_sites(
        arrays: Sequence[Any], quantized: Sequence[Any], edges: Mapping[str, jax.Array], other: Signature
    ) -> Any:
        positional, named = other.rebuild(other.arrays)
        call = session.trace(positional, named, arrays)
        parameters = [
            Twin(x, quantized[index]) if index in session.leaves else x
            for index, x in enumerate(call.parameters.arrays)
        ]
        records = _make_records(call, ranges, edges)
        _check_contractions(records, names)
        wants, visit = functools.partial(_is_replaced, call.plan), functools.partial(_compare_site, call.plan)
        final = session.inspect(call, wants, visit, records, parameters)
        return {name: {key: record[key] for key in _RESULTS} for name, record in final.items()}

    def run_all(edges: Mapping[str, jax.Array]) -> list[dict[str, Any]]:
        return [
            jax.tree.map(np.asarray, run_sites(session.parameters.arrays, codes.arrays, edges, other))
            for other in others
        ]

    # Edges that are apart; the counts of the first time are not used.
    unit = {name: jnp.arange(2, dtype=jnp.float32) for name in names}
    totals: dict[str, dict[str, float]] = {}
    # The first time for the extremes, which are the edges of the histograms, the second time for the counts.
    first = run_all(unit)
    # A batch with other static arguments may be without some of the contractions.
    found = dict.fromkeys(name for result in first for name in result)
    edges = {name: _compute_edges([result[name]["extremes"] for result in first if name in result]) for name in found}
    second = run_all(
        {**unit, **{name: jnp.asarray(edge, jnp.float32) for name, edge in edges.items() if edge is not None}}
    )
    histograms = {}
    for name in found:
        for result in (result for result in first if name in result):
            totals[name] = _add(totals.get(name, {}), {key: float(x.sum()) for key, x in result[name]["sums"].items()})
        edge = edges[name]
        if edge is not None:
            rows = [result[name] for result in second if name in result]
            counts = sum(row["counts"].reshape(-1, _BINS).sum(0, dtype=np.int64) for row in rows)
            histograms[name] = _make_activation_histogram(counts, edge, rows[0]["ends"])
    return totals, histograms


def _check_contractions(names: Iterable[str], known: Set[str]) -> None:
    """Raise unless a call has only contractions of `prepare`: each of these has a row of the report."""
    added = sorted(set(names) - known)
    expected, got = "batches with calls that have the contractions that prepare saw", f"also {', '.join(added[:4])}"
    checks.require(not added, _NAME, "batches", expected, got)


def _compute_edges(extremes: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the least and the largest activation, or None if no activations are quantized."""
    rows = np.concatenate([x.reshape(-1, 2) for x in extremes])
    low, high = rows[:, 0].min(), rows[:, 1].max()
    if not np.isfinite(high - low):
        return None
    # A constant activation needs a bin with a width.
    return np.array([low, high if high > low else low + 1], np.float32)


def _make_activation_histogram(counts: Any, edge: np.ndarray, ends: np.ndarray) -> Histogram:
    """Return the distribution of activations; of a range for each layer of a loop, the one that is the widest."""
    edges = np.linspace(edge[0], edge[1], _BINS + 1)
    rows = ends.reshape(-1, 2)
    low, high = (None, None) if np.isnan(rows).any() else (float(rows[:, 0].min()), float(rows[:, 1].max()))
    return Histogram(tuple(int(n) for n in counts), tuple(float(e) for e in edges), low, high)


def _make_records(call: TracedCall, ranges: Any, edges: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Return the ranges, the sums and the histogram of each contraction on codes, with the axes of its scans."""
    records = {}
    lengths = {site.name: site.lengths for site in call.analysis.sites.values()}
    for name, part in match_ranges(call, ranges).items():
        shape = lengths[name]
        records[name] = {
            "ranges": part, "sums": {key: jnp.zeros(shape, jnp.float32) for key in _SUMS},
            "edges": jnp.broadcast_to(edges.get(name, jnp.arange(2, dtype=jnp.float32)), (*shape, 2)),
            "extremes": jnp.broadcast_to(jnp.array([np.inf, -np.inf], jnp.float32), (*shape, 2)),
            "counts": jnp.zeros((*shape, _BINS), jnp.int32), "ends": jnp.full((*shape, 2), np.nan, jnp.float32),
        }  # fmt: skip
    return records


def _measure_result(prepared: Prepared, params: Any, q: QuantizedTree, others: Sequence[Signature]) -> float:
    """Return the ratio of the result of the function, in decibels."""
    totals, is_empty = np.zeros(2), True
    floats, codes = Signature(params), Signature(q.params)

    @jax.jit
    def run_results(
        arrays: Sequence[Any], quantized: Sequence[Any], other: Signature
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        positional, named = other.rebuild(other.arrays)
        expected = prepared.function(floats.rebuild(arrays), *positional, **named)
        actual = prepared.apply(q.replace(params=codes.rebuild(quantized)), *positional, **named)
        pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True)
        results = [(x, y) for x, y in pairs if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
        sums = [list(_sum_squares(x, y, "x").values()) for x, y in results]
        # Without floats there is no ratio, and two sums of 0 would stand for an exact result.
        totals = jnp.asarray(sums or [[np.nan, np.nan]], jnp.float32).sum(0)
        has_nan = jnp.array([jnp.isnan(x).any() for x, _ in results], bool).any()
        return totals, has_nan, jnp.array(bool(results) and not any(x.size for x, _ in results))

    for index, other in enumerate(others):
        sums, has_nan, has_none = run_results(floats.arrays, codes.arrays, other)
        # The sums leave out what is NaN in floats and in codes, so that the ratio would not tell of it.
        expected, got = "batches with results in floats that are numbers", f"a NaN in the results of batches[{index}]"
        checks.require(not has_nan, _NAME, "batches", expected, got)
        # In float64, so that the sums of many batches keep their digits.
        totals += np.asarray(sums, np.float64)
        is_empty = is_empty and bool(has_none)
    # Two sums of nothing would stand for an exact result.
    checks.require(not is_empty, _NAME, "batches", "batches with results", "results without elements")
    return _compute_ratio(*totals)


def _compute_ratio(signal: float, noise: float) -> float:
    """Return the ratio in decibels; infinity without an error."""
    if math.isnan(signal):
        return float("nan")
    if noise == 0:
        return float("inf")
    return float(10 * np.log10(signal / noise)) if signal > 0 else float("-inf")


def _count_weights(prepared: Prepared, signature: Signature, codes: Signature) -> dict[str, tuple[int, int]]:
    """Return the bytes of each parameter that is contracted or looked up, in floats and as it is, by its path."""
    read = {path for row in prepared.coverage for path in row.paths}
    return {
        path: (_count_bytes(signature.arrays[index]), _count_bytes(codes.arrays[index]))
        for index, path in enumerate(prepared.names)
        if path in read
    }


def _count_bytes(x: Any) -> int:
    return int(x.nbytes) if is_quantized(x) else parts.count_stored_bytes(x)


def _make_row(prepared: Prepared, row: Any, sums: dict[str, float], signature: Signature, codes: Signature) -> SiteRow:
    indices = [index for index, name in enumerate(prepared.names) if name in row.paths]
    is_converted = row.is_replaced
    weights = [
        (signature.arrays[index], codes.arrays[index]) for index in indices if is_converted and index in prepared.leaves
    ]
    errors = [quantization_error(jnp.asarray(w), q) for w, q in weights]
    return SiteRow(
        row.name, row.operation, row.form, row.reason,
        # Of several parameters in one contraction the worst.
        min((float(error.sqnr_db) for error in errors), default=None),
        _compute_ratio(sums["activation"], sums["activation_error"]) if sums.get("elements") else None,
        _compute_ratio(sums["output"], sums["output_error"]) if sums.get("output") else None,
        max((float(error.saturated) for error in errors), default=None),
        sums["saturated"] / sums["elements"] if sums.get("elements") else None,
        max((float(error.used_codes) for error in errors), default=None),
        *(sum(_count_bytes(x.arrays[index]) for index in indices) for x in (signature, codes)),
    )  # fmt: skip


def _make_histogram(w: ArrayLike, q: QuantizedArray) -> Histogram:
    """Return the distribution of a weight, and the range of its codes."""
    values = np.asarray(w, np.float32).ravel()
    counts, edges = np.histogram(values, _BINS)
    codes = np.asarray(lax.stop_gradient(q.dequantize()), np.float32)
    return Histogram(
        tuple(int(n) for n in counts), tuple(float(e) for e in edges), float(codes.min()), float(codes.max())
    )
