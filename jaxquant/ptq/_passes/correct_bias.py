"""`correct_bias`: the mean error of each output, moved into the bias."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..._core import checks
from ...calibration import loop
from ...transform import Prepared
from ...transform._calls import Signature, is_quantized
from ...transform._inspect import check_prepared
from .. import _matrix
from . import graph as graphs
from . import inputs
from .collect import Statistics, has_statistics
from .notes import Note, Notes, Outcome

_NAME = "ptq.correct_bias"
_MEASURE = "the largest mean error of an output, before and after"


def correct_bias(
    prepared: Prepared, params: Any, qparams: Any, stats: Statistics, *, batch: Any, **arguments: Any
) -> Outcome:
    """Add the mean error that the rounding of a weight causes to the bias of its contraction.

    bias + E[x] (W - W_q), with the mean E[x] of the inputs from the statistics

    The mean of each output is then that of the float weight, for inputs with these statistics.

    Args:
        prepared: the prepared function.
        params: its parameters, in floats.
        qparams: its converted parameters, as `Prepared.convert` or `apply` returns them.
        stats: statistics of its inputs, from `collect`.
        batch: one batch, as for `Prepared.calibrate`: only its shapes matter.
        **arguments: keyword arguments of the call.

    Returns:
        The converted parameters with new biases, and notes: a row for each quantized weight, with the reason if its
        contraction has no bias, or has several uses.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the parameters have other paths or shapes than those of `prepare`, or the statistics have no entry
            for a weight.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> apply = lambda params, x: x @ params["kernel"] + params["bias"][None]
        >>> params = {"kernel": jnp.array([[7.0], [0.4]]), "bias": jnp.zeros(1)}
        >>> x = jnp.array([[1.0, 3.0], [2.0, 1.0]])
        >>> prepared = jq.prepare(apply, params, x, rules=[jq.Rule(weight=jq.Weight("int4"))])
        >>> stats, qparams = ptq.collect(prepared, params, [x]), prepared.convert(params)
        >>> corrected, notes = ptq.correct_bias(prepared, params, qparams, stats, batch=x)
        >>> corrected["bias"]  # 0.4 was rounded to 0, and the mean of its input is 2
        Array([0.8], dtype=float32)

    Source: Nagel et al., arXiv 1906.04721, section 4.2, equation 15.
    """
    check_prepared(_NAME, prepared)
    checks.require_type(isinstance(stats, Statistics), _NAME, "stats", "a ptq.Statistics", type(stats).__name__)
    signature, codes = prepared._read_parameters("convert", params), Signature(qparams)
    step = loop.Step(_NAME, lambda *x: x, lambda: 0, lambda state: "", frozenset(arguments))  # type: ignore[arg-type]
    args, kwargs = loop.split_arguments(step, 0, batch)
    call = prepared._trace("apply", params, args, {**kwargs, **arguments})
    graph, arrays, notes = graphs.make_graph(call), list(codes.arrays), {}
    for leaf in prepared.leaves:
        path, w, q = prepared.names[leaf], signature.arrays[leaf], codes.arrays[leaf]
        checks.require_type(is_quantized(q), _NAME, "qparams", f"a quantized array at {path}", type(q).__name__)
        uses = inputs.list_uses(call, leaf)
        found = inputs.combine_uses(uses, stats.moments, w.shape)
        if isinstance(found, str) or len(uses) > 1:
            notes[leaf] = Note(path, "unchanged", found if isinstance(found, str) else "a weight with several uses")
            continue
        use, moments = found
        shift = find_mean_error(jnp.asarray(w), q.dequantize(), moments.mean, use.axis)
        site = next(s for s in call.analysis.sites.values() if s.name == use.name and has_statistics(call.plan, s))
        bias = graphs.find_bias(graph, site, shift.size)
        if bias is None or is_quantized(arrays[bias]):
            notes[leaf] = Note(path, "unchanged", "its contraction has no bias")
            continue
        old = jnp.asarray(arrays[bias])
        arrays[bias] = (old.astype(jnp.float32) + shift.reshape(old.shape)).astype(old.dtype)
        notes[leaf] = Note(path, f"corrected in {prepared.names[bias]}", "", float(jnp.abs(shift).max()), 0.0)
    return Outcome(codes.rebuild(arrays), Notes(tuple(notes[leaf] for leaf in prepared.leaves), _MEASURE))


def find_mean_error(w: jax.Array, values: jax.Array, mean: jax.Array, axis: Any) -> jax.Array:
    """Return the mean of x (W - W_q) of each output."""
    layout = _matrix.make_layout(_NAME, w.shape, axis, mean.shape[0])
    errors = layout.arrange(w.astype(jnp.float32) - values.astype(jnp.float32))
    return jnp.einsum("gi,gio->go", mean, errors, precision=jax.lax.Precision.HIGHEST).ravel()
