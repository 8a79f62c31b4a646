"""Factors of the channels between two layers, put into the parameters on both sides: `smooth` and `equalize`.

`smoothquant` and `awq` compute them for one weight. (x / s) @ (s * w) is x @ w: what multiplies the weight divides the
inputs, and no float changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._arrays.quantize import compute_parameters, encode_array, quantize
from .._arrays.quantized_array import QuantizedArray, dequantize_checked
from .._arrays.scale_from_range import derive_stored_block_size
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from .._core.entry_point import compile_entry_point, convert_number, convert_numpy
from .._program.analysis import Site
from ..calibration import loop
from ..transform import Prepared
from ..transform.session import Session, Signature, TracedCall
from . import _grid, inputs, neighbors
from ._grid import Axis, MatrixLayout, read_hessian
from .collect import Statistics, has_statistics
from .gptq import compute_error
from .moments import Moments
from .notes import Note, Notes, Outcome

_SMOOTHQUANT, _AWQ = "ptq.smoothquant", "ptq.awq"
# The range in which the scales of a weight stay, relative to their geometric mean.
_LEAST, _LARGEST = np.float32(1e-4), np.float32(1e4)


def smoothquant(
    w: ArrayLike | Sequence[ArrayLike], x_max: ArrayLike, alpha: ArrayLike = 0.5, *, channel: int = -2
) -> jax.Array:
    """Return the scale of each input that moves the difficulty of rounding from the inputs to the weight.

    s_i = max|x_i|^alpha / max|w_i|^(1 - alpha), and x @ w = (x / s) @ (s * w)

    If some inputs are a hundred times larger than others and share their scale, the small ones are lost. Divided by
    s, they have similar ranges, and the rows of the weight, which were similar, take on a part of the differences. An
    input that is always 0, or that has only weights of 0, has the scale 1. The scales are divided by their geometric
    mean, which changes no code, so that they stay near 1.

    Args:
        w: the weight, float32, float16 or bfloat16; or several weights of one rank that contract the same inputs, such
            as of queries, keys and values; the largest |w_i| counts.
        x_max: the largest |x| of each input, float32 [inputs], `Moments.largest`.
        alpha: how much of the differences to move, from 0 to 1: 0.5 for inputs and weights that are equally
            hard to round; more for inputs with larger outliers.
        channel: Static. The axis of w with the inputs: -2 in dense layers and in convolutions of layout HWIO.

    Returns:
        A positive float32 array of w's rank, with the length of the inputs along `channel` and 1 elsewhere. Under
        `jax.jit`, the scale of an input with a NaN is NaN.

    Raises:
        TypeError: an argument has an unsupported type or dtype.
        ValueError: the shapes do not fit each other, alpha is out of range, or an array is known and has a NaN or an
            infinity.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxquant import ptq
        >>> w, x = jnp.array([[0.5, -1.0], [2.0, 4.0]]), jnp.array([[64.0, -1.0], [32.0, 1.0]])
        >>> scale = ptq.smoothquant(w, jnp.abs(x).max(0))
        >>> scale.ravel().tolist()
        [4.0, 0.25]
        >>> x / scale.T, w * scale
        (Array([[16., -4.],
               [ 8.,  4.]], dtype=float32), Array([[ 2. , -4. ],
               [ 0.5,  1. ]], dtype=float32))

    Source: Xiao et al., arXiv 2211.10438, section 4, equations 3 and 4.
    """
    alpha = convert_number(alpha)
    checks.check_array(
        _SMOOTHQUANT, "alpha", np.asarray(alpha) if isinstance(alpha, np.generic) else alpha, dtypes.FLOATS
    )
    if not checks.is_traced(alpha):
        checks.require(0 <= float(np.asarray(alpha)) <= 1, _SMOOTHQUANT, "alpha", "a number from 0 to 1", alpha)
    checks.check_integer(_SMOOTHQUANT, "channel", channel)
    weights = tuple(convert_number(x) for x in (w if isinstance(w, tuple | list) else (w,)))
    checks.require(len(weights) > 0, _SMOOTHQUANT, "w", "one or more weights", "none")
    for x in weights:
        checks.check_array(_SMOOTHQUANT, "w", x, dtypes.FLOATS)
        _grid.check_finite(_SMOOTHQUANT, w=x)
    x_max = convert_number(x_max)
    _grid.check_finite(_SMOOTHQUANT, x_max=x_max)
    return _smoothquant(convert_numpy(*weights), x_max, alpha, channel=int(channel))


@functools.partial(jax.jit, static_argnames=("channel",))
def _smoothquant(weights: tuple[jax.Array, ...], x_max: jax.Array, alpha: ArrayLike, *, channel: int) -> jax.Array:
    x_max = jnp.asarray(x_max)
    checks.check_array(_SMOOTHQUANT, "x_max", x_max, dtypes.FLOATS)
    first = weights[0]
    axis = checks.check_axis(_SMOOTHQUANT, channel, first.ndim, "channel")
    for w in weights:
        is_alike = w.ndim == first.ndim and w.shape[axis] == first.shape[axis]
        expected = f"weights of rank {first.ndim} with {first.shape[axis]} inputs, as the first one"
        checks.require(is_alike, _SMOOTHQUANT, "w", expected, f"shape {w.shape}")
    checks.check_shape(_SMOOTHQUANT, "x_max", x_max, (first.shape[axis],), "one for each input of w")
    weights, x_max = lax.stop_gradient((weights, x_max))
    others = tuple(a for a in range(first.ndim) if a != axis)
    largest = [jnp.max(jnp.abs(w.astype(jnp.float32)), others, initial=0.0) for w in weights]
    w_max, x_max = functools.reduce(jnp.maximum, largest), jnp.abs(x_max.astype(jnp.float32))
    is_live = (x_max > 0) & (w_max > 0)
    share = jnp.asarray(alpha, jnp.float32)
    # In logarithms neither power overflows, and the mean is the logarithm of the geometric mean.
    logarithm = share * _log_or_zero(x_max, is_live) - (1 - share) * _log_or_zero(w_max, is_live)
    scale = jnp.where(is_live, jnp.exp(logarithm - _compute_mean(logarithm, is_live)), np.float32(1))
    # A NaN is not greater than 0, and would get the scale 1 of inputs that are always 0.
    scale = jnp.where(jnp.isnan(x_max) | jnp.isnan(w_max), np.float32(np.nan), scale)
    return scale.reshape([-1 if a == axis else 1 for a in range(first.ndim)])


def _log_or_zero(x: jax.Array, is_live: jax.Array) -> jax.Array:
    return jnp.log(jnp.where(is_live, x, np.float32(1)))


def _compute_mean(x: jax.Array, is_live: jax.Array) -> jax.Array:
    """Return the mean of the entries that count, or 0."""
    return jnp.sum(jnp.where(is_live, x, 0)) / jnp.maximum(jnp.sum(is_live), 1).astype(jnp.float32)


def awq(
    w: ArrayLike, moments: Moments, spec: QuantSpec, *, axis: int | tuple[int, ...] = -1,
    channel: int | tuple[int, ...] | None = None, steps: int = 20,
) -> jax.Array:  # fmt: skip
    """Return the scale of each input with which the rounded weight leaves the least error of the output.

    s = mean|x|^a / its geometric mean, where a in {0, 1/steps, ..., 1 - 1/steps} minimizes trace(E^T H E)

    E = w - (s * w)_q / s is the error of the weight after rounding, and H the mean of x x^T, so that the search
    measures the squared error of the output itself, for all calibration data. Inputs with large values get large
    scales, and their weights finer steps. a = 0, round-to-nearest without scales, is among the candidates.

    Args:
        w: the weight, float32, float16 or bfloat16, of any shape.
        moments: the statistics of the inputs, of as many inputs and groups as `gptq` takes.
        spec: Static. How to quantize, with any dtype and granularity.
        axis: Static. The axis or axes of w that the contraction keeps: the output features.
        channel: Static. The axis or axes of w with a scale for each index. None for all that are summed. A
            convolution with scaled inputs has one scale for each input channel.
        steps: Static. The number of candidates.

    Returns:
        A positive float32 array of w's rank to multiply w with; inputs are divided by it. It has w's length along
        `channel`, and with several groups along the axes that are kept; 1 elsewhere. Under `jax.jit`, it is NaN if an
        argument has a NaN.

    Raises:
        TypeError: an argument has an unsupported type or dtype.
        ValueError: the shapes do not fit each other; `channel` is kept; or an array is known and has a NaN or an
            infinity.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> w = jnp.array([[0.4, 0.6], [7.0, 7.0]])
        >>> x = jnp.array([[16.0, 0.01], [-16.0, 0.01]])  # the first input matters most
        >>> moments = ptq.second_moments()
        >>> moments = moments.finalize(moments.update(moments.init(x), x))
        >>> spec = jq.QuantSpec("int4", jq.PerAxis(1))
        >>> scale = ptq.awq(w, moments, spec)
        >>> jq.quantize(w, spec).dequantize()[0]
        Array([0., 1.], dtype=float32)
        >>> [round(value, 1) for value in (jq.quantize(w * scale, spec).dequantize() / scale)[0].tolist()]
        [0.4, 0.6]

    Source: Lin et al., arXiv 2306.00978, section 3.2, equations 4 and 5; the geometric mean is as in the authors'
    program, which measures the error on samples.
    """
    _grid.check_spec(_AWQ, spec)
    checks.check_integer(_AWQ, "steps", steps)
    checks.require(steps > 0, _AWQ, "steps", "a positive number", steps)
    is_moments = isinstance(moments, Moments)
    checks.require_type(is_moments, _AWQ, "moments", "a ptq.Moments", type(moments).__name__)
    w = convert_number(w)
    _grid.check_finite(_AWQ, w=w)
    _grid.check_finite(_AWQ, **{"moments.second": moments.second, "moments.magnitude": moments.magnitude})
    return _awq(
        w, moments.second, moments.magnitude, spec=spec, axis=checks.check_integers(_AWQ, "axis", axis),
        channel=None if channel is None else checks.check_integers(_AWQ, "channel", channel), steps=int(steps),
    )  # fmt: skip


@compile_entry_point(_AWQ)
def _awq(
    w: jax.Array,
    hessian: jax.Array,
    magnitude: jax.Array,
    *,
    spec: QuantSpec,
    axis: Axis,
    channel: Axis | None,
    steps: int,
) -> jax.Array:
    hessian, layout = read_hessian(_AWQ, w, hessian, axis)
    shape = (layout.groups, layout.inputs)[1 if layout.groups == 1 and magnitude.ndim == 1 else 0 :]
    checks.check_shape(_AWQ, "moments.magnitude", magnitude, shape, "the shape of the inputs")
    w, hessian, magnitude = lax.stop_gradient((w.astype(jnp.float32), hessian, magnitude))
    size = _pool_channels(layout, magnitude.reshape(layout.groups, layout.inputs), channel)
    is_live = size > 0
    logarithm = _log_or_zero(size, is_live)
    logarithm = jnp.where(is_live, logarithm - _compute_mean(logarithm, is_live), 0)

    def scale_inputs(exponent: ArrayLike) -> jax.Array:
        return jnp.clip(jnp.exp(exponent * logarithm), _LEAST, _LARGEST)

    def measure_exponent(exponent: jax.Array) -> jax.Array:
        scale = scale_inputs(exponent)
        errors = layout.arrange(w - _round_nearest(w * scale, spec) / scale)
        return jnp.sum(jax.vmap(compute_error)(errors, hessian))

    exponents = np.arange(steps, dtype=np.float32) / np.float32(steps)
    # One candidate after the other: all at once would take `steps` copies of the weight.
    costs = lax.map(measure_exponent, exponents)
    scale = scale_inputs(jnp.asarray(exponents)[jnp.argmin(costs)])
    is_valid = jnp.isfinite(costs).all() & jnp.isfinite(magnitude).all()
    return _grid.spoil_scale(scale, is_valid)


def _pool_channels(layout: MatrixLayout, values: jax.Array, channel: Axis | None) -> jax.Array:
    """Return the means of numbers [groups, inputs] over the inputs of each channel, of the weight's rank."""
    rank = len(layout.shape)
    axes = layout.summed if channel is None else channel if isinstance(channel, tuple) else (channel,)
    channels = tuple(checks.check_axis(_AWQ, entry, rank, "channel") for entry in axes)
    is_summed = all(entry in layout.summed for entry in channels)
    checks.require(is_summed, _AWQ, "channel", f"axes that are summed: {layout.summed}", channel)
    outputs = int(np.prod([layout.shape[entry] for entry in layout.kept])) // layout.groups
    wide = layout.restore(jnp.repeat(values[:, :, None], outputs, 2))
    others = tuple(entry for entry in layout.summed if entry not in channels)
    # Without groups all outputs have the same inputs.
    return jnp.mean(wide, (*others, *(layout.kept if layout.groups == 1 else ())), keepdims=True)


def _round_nearest(w: jax.Array, spec: QuantSpec) -> jax.Array:
    """Return the values of the codes that `jq.quantize` finds."""
    if spec.offset or spec.scale_spec is not None:
        with checks.name_errors(_AWQ):
            return quantize(w, spec).dequantize()
    scale, zero_point, _ = compute_parameters(_AWQ, w, spec, None, None)
    codes = encode_array(w, scale, zero_point, spec)
    block_size = derive_stored_block_size(_AWQ, spec, w.shape)
    q = QuantizedArray(codes, scale, zero_point, dtype=w.dtype, block_size=block_size, codebook=spec.codebook)
    return dequantize_checked(q)


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
    and the bias of a contraction, also through a relu, a maximum over windows, reshapes that keep the channels last,
    and the linear factor of a product, such as `x @ up` in the gated MLP `(silu(x @ gate) * (x @ up)) @ down`

    All contractions that read one array share its factors s. After this pass, quantize the parameters as usual. The
    new function is computed on the batch and compared with the old one. Factors that change a result by more than
    float32's rounding are dropped, for example if something else reads the array; the notes say so.

    Args:
        prepared: the prepared function.
        params: its parameters, in floats.
        stats: statistics of its inputs, from `collect`.
        batch: one batch, as for `Prepared.calibrate`: the arguments on which the functions are compared.
        method: "smoothquant" for the factors of `smoothquant`, for quantized activations; "awq" for factors of `awq`,
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
            return smoothquant(weights, largest.max(0), alpha).ravel()
        leaf, use = joint.uses[0]
        spec = prepared.leaves[leaf].spec
        return awq(arrays[leaf], moments, spec, axis=use.axis, channel=use.channel).ravel()

    return _scale_joints(name, prepared, params, batch, arguments, compute_factors)


def equalize(prepared: Prepared, params: Any, batch: Any, **arguments: Any) -> Outcome:
    """Give the channels between two contractions equal ranges on both sides, without changing a float.

    s_i = sqrt(max|W1_i| / max|W2_i|): the outputs i of W1 and its bias are divided by s_i, the inputs i of W2
    multiplied by it

    Between the two may be what commutes with a positive factor: a relu, a maximum over windows, reshapes that keep the
    channels last, a product with something else, as in a gated MLP. After that, both weights lose the same number of
    digits to a scale that all channels share. With a scale for each output it changes the first weight's codes only by
    rounding. The result is compared with the old one, as `smooth` does.

    Args:
        prepared: the prepared function.
        params: its parameters, in floats.
        batch: one batch, as for `Prepared.calibrate`: the arguments on which the functions are compared.
        **arguments: keyword arguments of the call.

    Returns:
        The parameters, in floats, and notes: a row for each weight that the rules quantize.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the parameters have other paths or shapes than in `prepare`; or the function returns no
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
        source = _read_source_weight(joint, arrays)
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
    summed = sorted(use.summed)
    shape = [arrays[leaf].shape[axis] for axis in summed]
    largest = jnp.moveaxis(moments.largest.reshape(shape), summed.index(use.channel[0]), -1)
    return moments._replace(largest=largest)


def _read_source_weight(joint: _Joint, arrays: Sequence[Any]) -> jax.Array | str:
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
    name: str, prepared: Prepared, params: Any, batch: Any, arguments: dict[str, Any],
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
    (w,) = [w for w, (index, _) in zip(_read_weights(joint, arrays), joint.uses, strict=True) if index == leaf][:1]
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
        array = neighbors.match_input(graph, site)
        for view in site.views:
            use = inputs.describe_use(site, view, arrays[view.leaf].shape)
            joints.setdefault(site.name if array is None else array, []).append((view.leaf, use))
    return [
        _Joint(tuple(uses), neighbors.match_source(graph, key if isinstance(key, int) else None))
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
    session: Session, args: tuple[Any, ...], kwargs: dict[str, Any], tolerance: float = _TOLERANCE
) -> Callable[[Sequence[Any]], bool]:  # fmt: skip
    """Return a function that tells whether parameters give the results of the first ones, up to a tolerance."""
    others = Signature((args, kwargs))

    @jax.jit
    def run_function(arrays: Sequence[Any], rest: Sequence[Any]) -> Any:
        positional, named = others.rebuild(rest)
        results = jax.tree.leaves(session.prepared.function(session.parameters.rebuild(arrays), *positional, **named))
        floats = [x.astype(jnp.float32) for x in results if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
        # Integers, such as the result of an argmax, hide the differences that would tell that a factor is wrong.
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
