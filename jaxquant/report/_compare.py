"""`compare`: the errors of each contraction of a prepared function, measured on data."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import parts
from .._arrays.error_metrics import quantization_error
from .._core import checks
from .._training.rounding_vjp import Config, make_array
from ..calibration import loop
from ..transform import Prepared
from ..transform._calls import Call, Signature
from ..transform._inspect import InspectMode, check_prepared
from ..transform._modes import Twin, find_scale
from ..transform._programs import jaxpr, operations
from ..transform._programs.interpret import Records
from ..transform._programs.sites import Site
from ._report import Histogram, Report, SiteRow

_NAME = "report.compare"
_SUMS = ("activation", "activation_error", "saturated", "elements", "output", "output_error")
_BINS = 64


def _make_mode(plan: Any) -> InspectMode:
    """Return the float program that also computes each contraction on codes and sums the squared differences."""
    return InspectMode(plan, lambda site: plan.sites[site.name].is_replaced, functools.partial(_compare_site, plan))


def _compare_site(plan: Any, site: Site, operands: Sequence[Any], records: Records) -> tuple[Any, Records]:
    """Return the float result, and the sums with those of this contraction."""
    record = records[site.name]
    (result,) = jaxpr.evaluate(site.equation, [x.floats if isinstance(x, Twin) else x for x in operands])
    codes = [x.codes if isinstance(x, Twin) else x for x in operands]
    sums: dict[str, Any] = {}
    if site.operation == "take":
        values = operations.look_up(site.equation, codes[0], operands[1])
    else:
        for operand in plan.sites[site.name].activations:
            x, part = operands[operand.place], record["ranges"].get(str(operand.place))
            scale, point = find_scale(operand.spec, x, part)
            q = make_array(Config(operand.spec), x, scale, point, None)
            sums = _add(sums, _sum_squares(x, q.dequantize(), "activation"))
            sums = _add(sums, _count_saturated(x, q, scale))
            codes[operand.place] = q
        values = operations.make_operation(site.equation).contract_quantized(*codes)
    sums = _add(sums, _sum_squares(result, values, "output"))
    return result, {**records, site.name: {**record, "sums": _add(record["sums"], sums)}}


def _add(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Return the sums of two dicts, of which an entry may be missing in either."""
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in {**a, **b}}


def _sum_squares(x: jax.Array, y: jax.Array, name: str) -> dict[str, jax.Array]:
    wide, other = x.astype(jnp.float32), y.astype(jnp.float32)
    # An entry of a table may be NaN where the index is out of range, in both.
    wide, other = (jnp.where(jnp.isnan(wide) & jnp.isnan(other), 0, v) for v in (wide, other))
    return {name: jnp.sum(wide**2), f"{name}_error": jnp.sum((wide - other) ** 2)}


def _count_saturated(x: jax.Array, q: Any, scale: jax.Array) -> dict[str, jax.Array]:
    """Return the number of elements that lie more than half a step beyond the last code, and that of all."""
    distance = jnp.abs(x.astype(jnp.float32) - q.dequantize().astype(jnp.float32))
    step = jnp.broadcast_to(scale.astype(jnp.float32), x.shape)
    is_beyond = distance > np.float32(0.51) * step
    return {"saturated": jnp.sum(is_beyond, dtype=jnp.float32), "elements": jnp.float32(x.size)}


def compare(
    prepared: Prepared, params: Any, qparams: Any, batches: Iterable[Any], *, ranges: Any = None, **arguments: Any
) -> Report:
    """Measure the error that each contraction of a prepared function gets from its codes.

    SQNR = 10 log10(sum x^2 / sum (x - x_q)^2), in decibels

    The function runs in floats, and each contraction also on codes, with the same inputs. So the errors of a
    contraction are those of its own weight and activations, without those of earlier ones. The error of the result is
    that of `Prepared.apply`, with all of them.

    Args:
        prepared: the prepared function.
        params: its parameters, in floats.
        qparams: its converted parameters, as `Prepared.convert` or a pass of `jaxquant.ptq` returns them.
        batches: batches, as for `Prepared.calibrate`.
        ranges: the ranges of the static activations. None if there are none.
        **arguments: keyword arguments of every call.

    Returns:
        A `Report`, with a row for each contraction and lookup, those in floats included, and methods that show it.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: there is no batch, or the parameters or ranges are not those of the function.

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
    check_prepared(_NAME, prepared)
    signature, codes = prepared._read_parameters("convert", params), Signature(qparams)
    records = prepared._read_records("apply", "ranges", ranges)
    loop._check_batches(_NAME, batches)
    step = loop.Step(_NAME, lambda *x: x, lambda: 0, lambda state: "", frozenset(arguments))  # type: ignore[arg-type]
    calls = [loop.split_arguments(step, index, batch) for index, batch in enumerate(batches)]
    checks.require(bool(calls), _NAME, "batches", "at least one batch", "none")
    calls = [(args, {**kwargs, **arguments}) for args, kwargs in calls]
    measured = _measure_calls(prepared, signature, codes, records, calls)
    result = _measure_result(prepared, params, qparams, ranges, calls)
    rows = tuple(_make_row(prepared, row, measured.get(row.name, {}), signature, codes) for row in prepared.coverage)
    histograms = {
        prepared.names[leaf]: _make_histogram(signature.arrays[leaf], codes.arrays[leaf]) for leaf in prepared.leaves
    }
    return Report(rows, result, histograms)


def _measure_calls(
    prepared: Prepared, signature: Signature, codes: Signature, ranges: Any, calls: Sequence[tuple[Any, Any]]
) -> dict[str, dict[str, float]]:
    """Return the sums of each contraction over all calls and all iterations of loops."""
    totals: dict[str, dict[str, float]] = {}
    others = [Signature(call) for call in calls]

    @jax.jit
    def run_sites(arrays: Any, quantized: Any, rest: Any) -> Any:
        positional, named = others[0].rebuild(rest)
        call = prepared._trace("compare", signature.rebuild(arrays), positional, named)
        parameters = [
            Twin(x, quantized[place]) if place in prepared.leaves else x
            for place, x in enumerate(call.parameters.arrays)
        ]
        records = _make_records(call, ranges)
        final = prepared._interpret(_make_mode(call.plan), call, parameters, records)[1]
        return {name: jax.tree.map(jnp.sum, record["sums"]) for name, record in final.items()}

    for other in others:
        for name, sums in run_sites(signature.arrays, codes.arrays, other.arrays).items():
            totals[name] = _add(totals.get(name, {}), {key: float(value) for key, value in sums.items()})
    return totals


def _make_records(call: Call, ranges: Any) -> dict[str, Any]:
    """Return the ranges and the sums of each contraction on codes, with the axes of its scans."""
    records = {}
    for site in call.analysis.sites.values():
        plan = call.plan.sites[site.name]
        if not plan.is_replaced:
            continue
        found = ranges.get(plan.record, {}) if any(x.calibrator is not None for x in plan.activations) else {}
        lengths = site.lengths
        if not plan.layers:  # a range that all iterations share
            found = jax.tree.map(lambda x, n=lengths: jnp.broadcast_to(x, (*n, *x.shape)), found)
        sums = {name: jnp.zeros(lengths, jnp.float32) for name in _SUMS}
        records[site.name] = {"ranges": found, "sums": sums}
    return records


def _measure_result(
    prepared: Prepared, params: Any, qparams: Any, ranges: Any, calls: Sequence[tuple[Any, Any]]
) -> float:
    """Return the ratio of the result of the function, in decibels."""
    totals = np.zeros(2)
    floats, codes = Signature(params), Signature(qparams)
    others = [Signature(call) for call in calls]

    @jax.jit
    def run_results(arrays: Any, quantized: Any, rest: Any) -> Any:
        positional, named = others[0].rebuild(rest)
        expected = prepared.function(floats.rebuild(arrays), *positional, **named)
        actual = prepared.apply(codes.rebuild(quantized), ranges, *positional, **named)
        pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True)
        sums = [
            list(_sum_squares(x, y, "x").values()) for x, y in pairs if jnp.issubdtype(jnp.result_type(x), jnp.floating)
        ]
        return jnp.asarray(sums, jnp.float32).sum(0)

    for other in others:
        totals += np.asarray(run_results(floats.arrays, codes.arrays, other.arrays), np.float64)
    return _find_ratio(*totals)


def _find_ratio(signal: float, noise: float) -> float:
    """Return the ratio in decibels; infinity without an error."""
    if noise == 0:
        return float("inf")
    return float(10 * np.log10(signal / noise)) if signal > 0 else float("-inf")


def _make_row(prepared: Prepared, row: Any, sums: dict[str, float], signature: Signature, codes: Signature) -> SiteRow:
    places = [place for place, name in enumerate(prepared.names) if name in row.paths]
    is_converted = row.form != "float"
    weights = [
        (signature.arrays[place], codes.arrays[place]) for place in places if is_converted and place in prepared.leaves
    ]
    errors = [quantization_error(jnp.asarray(w), q) for w, q in weights]
    sizes = [parts.count_stored_bytes(signature.arrays[place]) for place in places]
    return SiteRow(
        row.name, row.operation, row.form, row.reason,
        min((float(error.sqnr_db) for error in errors), default=None),
        _find_ratio(sums["activation"], sums["activation_error"]) if sums.get("elements") else None,
        _find_ratio(sums["output"], sums["output_error"]) if sums.get("output") else None,
        max((float(error.saturated) for error in errors), default=None),
        sums["saturated"] / sums["elements"] if sums.get("elements") else None,
        max((float(error.used_codes) for error in errors), default=None),
        sum(sizes), sum(int(q.nbytes) for _, q in weights) if weights else sum(sizes),
    )  # fmt: skip


def _make_histogram(w: Any, q: Any) -> Histogram:
    """Return the distribution of a weight, and the range of its codes."""
    values = np.asarray(w, np.float32).ravel()
    counts, edges = np.histogram(values, _BINS)
    codes = np.asarray(lax.stop_gradient(q.dequantize()), np.float32)
    return Histogram(
        tuple(int(n) for n in counts), tuple(float(e) for e in edges), float(codes.min()), float(codes.max())
    )
