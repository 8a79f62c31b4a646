"""`smooth` and `equalize`: factors of the channels between two layers, put into the parameters on both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core import checks
from .._program.analysis import Site
from ..calibration import loop
from ..transform import Prepared
from ..transform.session import Session, Signature, TracedCall
from . import input_scales, inputs, neighbors
from .collect import Statistics, has_statistics
from .moments import Moments
from .notes import Note, Notes, Outcome

_TOLERANCE = 1e-4  # of the largest result: float32 rounds each product again
_EXACT = "the largest |weight| of a channel over the smallest, before and after"


class _Joint(NamedTuple):
    """Contractions that read one array, and what makes the channels of it.

    Attributes:
        uses: the parameters that contract it, with how they are read.
        source: what makes its channels.
    """

    uses: tuple[tuple[int, inputs.Uses], ...]
    source: neighbors.Source


def smooth(
    prepared: Prepared, params: Any, stats: Statistics, batch: Any, *, method: str = "smoothquant",
    alpha: float = 0.5, **arguments: Any,
) -> Outcome:  # fmt: skip
    """Move the differences between channels from the inputs of contractions into weights, without changing a float.

    x W = (x / s) (s W), and 1 / s goes into what makes x: the scale and the offset of a normalization, or the weight
    and the bias of a contraction, also through a relu, a maximum over windows and reshapes that keep the channels last

    All contractions that read one array share its factors s. After this pass, quantize the parameters as usual. The
    new function is computed on the batch and compared with the old one. Factors that change a result by more than
    float32's rounding are dropped, for example if something else reads the array; the notes say so.

    Args:
        prepared: the prepared function.
        params: its parameters, in floats.
        stats: statistics of its inputs, from `collect`.
        batch: one batch, as for `Prepared.calibrate`: the arguments on which the functions are compared.
        method: "smoothquant" for the factors of `smoothquant`, for quantized activations; "awq" for those of `awq`,
            which are searched with the spec of the first weight that reads the array, for weights of few bits.
        alpha: how much "smoothquant" moves, from 0 to 1.
        **arguments: keyword arguments of the call.

    Returns:
        The parameters, in floats, and notes: a row for each weight that the rules quantize.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the method is unknown, alpha is out of range, the statistics are of another function, or the
            function returns no floats.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> def apply(params, x):
        ...     return jax.nn.relu(x @ params["first"]) @ params["second"]
        >>> params = {"first": jnp.eye(3) * jnp.array([[1.0, 1.0, 64.0]]), "second": jnp.ones((3, 2))}
        >>> x = jnp.ones((4, 3))
        >>> prepared = jq.prepare(apply, params, x, rules=jq.recipes.w8a8_dynamic())
        >>> smoothed, notes = ptq.smooth(prepared, params, ptq.collect(prepared, params, [x]), x)
        >>> jnp.diagonal(smoothed["first"]).round(2), smoothed["second"][:, 0].round(2)
        (Array([ 2.,  2., 16.], dtype=float32), Array([0.5, 0.5, 4. ], dtype=float32))
        >>> notes["first"].reason
        'inputs of the function'

    Source: Xiao et al., arXiv 2211.10438, section 4, and Lin et al., arXiv 2306.00978, section 3.2.
    """
    name = "ptq.smooth"
    checks.check_option(name, "method", method, ("smoothquant", "awq"))
    checks.require_type(isinstance(stats, Statistics), name, "stats", "a ptq.Statistics", type(stats).__name__)

    def compute_factors(joint: _Joint, arrays: Sequence[Any]) -> jax.Array:
        weights, moments = _read_weights(joint, arrays), _read_moments(joint, stats, arrays)
        if method == "smoothquant":
            largest = moments.largest.reshape(-1, weights[0].shape[0])
            return input_scales.smoothquant(weights, largest.max(0), alpha).ravel()
        leaf, use = joint.uses[0]
        spec = prepared.leaves[leaf].spec
        return input_scales.awq(arrays[leaf], moments, spec, axis=use.axis, channel=use.channel).ravel()

    return _scale_joints(name, prepared, params, batch, arguments, compute_factors)


def equalize(prepared: Prepared, params: Any, batch: Any, **arguments: Any) -> Outcome:
    """Give the channels between two contractions equal ranges on both sides, without changing a float.

    s_i = sqrt(max|W1_i| / max|W2_i|): the outputs i of W1 and its bias are divided by s_i, the inputs i of W2
    multiplied by it

    Between the two may be what commutes with a positive factor: a relu, a maximum over windows, reshapes that keep the
    channels last. After that, both weights lose the same number of digits to a scale that all channels share. With a
    scale for each output it changes the first weight's codes only by rounding. The result is compared with the old one,
    as `smooth` does.

    Args:
        prepared: the prepared function.
        params: its parameters, in floats.
        batch: one batch, as for `Prepared.calibrate`: the arguments on which the functions are compared.
        **arguments: keyword arguments of the call.

    Returns:
        The parameters, in floats, and notes: a row for each weight that the rules quantize.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the parameters have other paths or shapes than those of `prepare`; or the function returns no
            floats.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> def apply(params, x):
        ...     return jax.nn.relu(x @ params["first"]) @ params["second"]
        >>> params = {"first": jnp.ones((2, 2)) * jnp.array([[1.0, 64.0]]), "second": jnp.ones((2, 2))}
        >>> prepared = jq.prepare(apply, params, jnp.ones((4, 2)), rules=jq.recipes.weight_only_int8())
        >>> equal, notes = ptq.equalize(prepared, params, jnp.ones((4, 2)))
        >>> equal["first"].max(0), equal["second"].max(1)
        (Array([1., 8.], dtype=float32), Array([1., 8.], dtype=float32))

    Source: Nagel et al., arXiv 1906.04721, section 4.1, equations 10 and 11.
    """

    def compute_factors(joint: _Joint, arrays: Sequence[Any]) -> jax.Array | str:
        if joint.source.site is None:
            return "a normalization, which has no weight to equalize with"
        source = _read_source_weight(joint, prepared, arrays)
        if isinstance(source, str):
            return source
        first = jnp.max(jnp.abs(source), 0)
        # All weights that read the channels get the same factors, and the largest entry is the hardest to round.
        second = jnp.stack([jnp.max(jnp.abs(w), 1) for w in _read_weights(joint, arrays)]).max(0)
        is_live = (first > 0) & (second > 0)
        return jnp.where(is_live, jnp.sqrt(jnp.where(is_live, first, 1) / jnp.where(is_live, second, 1)), 1)

    return _scale_joints("ptq.equalize", prepared, params, batch, arguments, compute_factors)


def _read_weights(joint: _Joint, arrays: Sequence[Any]) -> list[jax.Array]:
    """Return the weights of a joint as [channels, other]."""
    weights = []
    for leaf, use in joint.uses:
        w = jnp.moveaxis(jnp.asarray(arrays[leaf]).astype(jnp.float32), use.channel[0], 0)
        weights.append(w.reshape(w.shape[0], -1))
    return weights


def _read_moments(joint: _Joint, stats: Statistics, arrays: Sequence[Any]) -> Moments:
    """Return the moments of the first contraction: all have its inputs; largest with channels last."""
    leaf, use = joint.uses[0]
    checks.require(use.name in stats.moments, "ptq.smooth", "stats", f"statistics of {use.name}", "none")
    result = inputs.combine_uses([use], stats.moments, arrays[leaf].shape)
    assert not isinstance(result, str)
    moments = result[1]
    places = sorted(use.summed)
    shape = [arrays[leaf].shape[axis] for axis in places]
    largest = jnp.moveaxis(moments.largest.reshape(shape), places.index(use.channel[0]), -1)
    return moments._replace(largest=largest)


def _read_source_weight(joint: _Joint, prepared: Prepared, arrays: Sequence[Any]) -> jax.Array | str:
    """Return the weight that makes the channels as [other, channels], or why there is none."""
    found = _locate_outputs(joint.source.site, arrays)
    if isinstance(found, str):
        return found
    leaf, axis = found
    w = jnp.moveaxis(jnp.asarray(arrays[leaf]).astype(jnp.float32), axis, -1)
    return w.reshape(-1, w.shape[-1])


def _locate_outputs(site: Site | None, arrays: Sequence[Any]) -> tuple[int, int] | str:
    """Return the parameter of a contraction, and the axis of its output channels; or why there is none."""
    assert site is not None
    use = inputs.describe_use(site, site.views[0], arrays[site.views[0].leaf].shape)
    if use.reason or site.lengths:
        return use.reason or "a contraction in a loop over layers"
    outputs = [axis for axis in use.axis if arrays[site.views[0].leaf].shape[axis] > 1]
    return (site.views[0].leaf, outputs[-1]) if len(outputs) == 1 else "outputs with several axes"


def _scale_joints(
    name: str, prepared: Prepared, params: Any, batch: Any, arguments: Any,
    compute_factors: Callable[[_Joint, Sequence[Any]], jax.Array | str],
) -> Outcome:  # fmt: skip
    """Return parameters with factors between layers, wherever they can be put into parameters on both sides."""
    session = Session(name, prepared, params)
    signature = session.parameters
    args, kwargs = loop.split_arguments(name, 0, batch, arguments)
    call = session.trace(args, {**kwargs, **arguments})
    compare = make_comparison(session, args, {**kwargs, **arguments})
    arrays, notes = list(signature.arrays), {}
    before = arrays
    for joint in _list_joints(call, arrays):
        reason = joint.source.reason or _explain_obstacle(joint, arrays)
        factors = reason or compute_factors(joint, arrays)
        if not isinstance(factors, str):
            changed = _put_factors(joint, arrays, factors)
            if isinstance(changed, str):
                factors = changed
            elif not compare(changed):
                factors = "the factors would change the function: something else reads these inputs"
            else:
                arrays, before = changed, arrays
        for leaf, _ in joint.uses:
            path = prepared.names[leaf]
            if isinstance(factors, str):
                notes[leaf] = Note(path, "unchanged", factors)
            else:
                spread = [_compute_spread(joint, x, leaf) for x in (before, arrays)]
                notes[leaf] = Note(path, f"scaled, with {_describe_source(joint, prepared)}", "", *spread)
    rows = [notes.get(leaf, Note(prepared.names[leaf], "unchanged", "no inputs")) for leaf in prepared.leaves]
    return Outcome(signature.rebuild(arrays), Notes(tuple(rows), _EXACT))


def _compute_spread(joint: _Joint, arrays: Sequence[Any], leaf: int) -> float:
    (w,) = [w for w, (place, _) in zip(_read_weights(joint, arrays), joint.uses, strict=True) if place == leaf][:1]
    sizes = jnp.abs(w).max(1)
    return float(sizes.max() / jnp.maximum(sizes.min(), jnp.finfo(jnp.float32).tiny))


def _describe_source(joint: _Joint, prepared: Prepared) -> str:
    source = joint.source
    leaves = [source.scale] if source.scale is not None else [source.site.views[0].leaf]  # type: ignore[union-attr]
    return ", ".join(prepared.names[leaf] for leaf in (*leaves, *source.offsets) if leaf is not None)


def _list_joints(call: TracedCall, arrays: Sequence[Any]) -> list[_Joint]:
    """Return the contractions that read one array together, in program order."""
    graph = neighbors.make_call_graph(call)
    joints: dict[Any, list[tuple[int, inputs.Uses]]] = {}
    for site in call.analysis.sites.values():
        if not has_statistics(call.plan, site):
            continue
        array = neighbors.find_input(graph, site)
        for view in site.views:
            use = inputs.describe_use(site, view, arrays[view.leaf].shape)
            joints.setdefault(site.name if array is None else array, []).append((view.leaf, use))
    return [
        _Joint(tuple(uses), neighbors.find_source(graph, key if isinstance(key, int) else None))
        for key, uses in joints.items()
    ]


def _explain_obstacle(joint: _Joint, arrays: Sequence[Any]) -> str:
    """Return why the weights of a joint cannot take factors, or ""."""
    for leaf, use in joint.uses:
        if use.reason:
            return use.reason
        if use.groups > 1:
            return "groups of channels, or layers in a loop"
        if len(use.channel) != 1:
            return "inputs with several axes"
        if arrays[leaf].shape[use.channel[0]] != arrays[joint.uses[0][0]].shape[joint.uses[0][1].channel[0]]:
            return "weights with different numbers of channels"
    return ""


def _put_factors(joint: _Joint, arrays: Sequence[Any], factors: jax.Array) -> list[Any] | str:
    """Return the parameters with the factors in them, or why they do not fit."""
    changed, source = list(arrays), joint.source

    def scale(leaf: int, axis: int | None, values: jax.Array) -> None:
        w = jnp.asarray(changed[leaf])
        shape = w.shape if axis is None else [-1 if a == axis else 1 for a in range(w.ndim)]
        changed[leaf] = (w.astype(jnp.float32) * values.reshape(shape)).astype(w.dtype)

    for leaf, use in joint.uses:
        scale(leaf, use.channel[0], factors)
    if source.site is not None:
        found = _locate_outputs(source.site, arrays)
        if isinstance(found, str):
            return found
        if arrays[found[0]].shape[found[1]] != factors.size:
            return "channels that are reshaped"
        scale(*found, 1 / factors)
    leaves = [leaf for leaf in (source.scale, *source.offsets) if leaf is not None]
    if any(np.size(arrays[leaf]) != factors.size for leaf in leaves):
        return "channels that are reshaped"
    for leaf in leaves:
        scale(leaf, None, 1 / factors)
    return changed


def make_comparison(
    session: Session, args: Any, kwargs: Any, tolerance: float = _TOLERANCE
) -> Callable[[Sequence[Any]], bool]:  # fmt: skip
    """Return a function that tells whether parameters give the results of the first ones, up to a tolerance."""
    others = Signature((args, kwargs))

    @jax.jit
    def run_function(arrays: Any, rest: Any) -> Any:
        positional, named = others.rebuild(rest)
        results = jax.tree.leaves(session.prepared.function(session.parameters.rebuild(arrays), *positional, **named))
        floats = [x.astype(jnp.float32) for x in results if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
        # Integers, such as those of an argmax, hide the differences that would tell that a factor is wrong.
        checks.require(bool(floats), session.function, "prepared", "a function that returns floats", "none")
        return floats

    expected = run_function(session.parameters.arrays, others.arrays)

    def compare(arrays: Sequence[Any]) -> bool:
        for x, y in zip(run_function(arrays, others.arrays), expected, strict=True):
            # Not the opposite comparison: with a NaN this one is False, and the factors are dropped.
            if not bool(jnp.max(jnp.abs(x - y), initial=0) <= tolerance * jnp.max(jnp.abs(y), initial=0)):
                return False
        return True

    return compare
