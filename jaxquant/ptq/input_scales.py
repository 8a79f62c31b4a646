"""`smoothquant` and `awq`: scales of the inputs of a contraction that make its weight or its inputs easier to round.

(x / s) @ (s * w) is x @ w: what multiplies the weight divides the inputs, and no float changes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._arrays.quantize import compute_parameters, encode_array
from .._arrays.quantized_array import QuantizedArray, dequantize_checked
from .._arrays.scale_from_range import derive_stored_block_size
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from .._core.entry_point import compile_entry_point, convert_number, convert_numpy
from . import _grid
from ._grid import MatrixLayout, read_hessian
from .gptq import compute_error
from .moments import Moments

_SMOOTHQUANT, _AWQ = "ptq.smoothquant", "ptq.awq"
# The range in which the scales of a weight stay, relative to their geometric mean.
_LEAST, _LARGEST = np.float32(1e-4), np.float32(1e4)


def smoothquant(
    w: ArrayLike | Sequence[ArrayLike], x_max: ArrayLike, alpha: ArrayLike = 0.5, *, channel: int = -2
) -> jax.Array:
    """Return the scale of each input that moves the difficulty of rounding from the inputs to the weight.

    s_i = max|x_i|^alpha / max|w_i|^(1 - alpha), and x @ w = (x / s) @ (s * w)

    Inputs of which some are a hundred times larger than others lose the small ones when they share a scale. Divided by
    s, they have similar ranges; the weight, whose rows were similar, takes on a part of the differences. An input that
    is always 0, or whose weights are all 0, has the scale 1. The scales are divided by their geometric mean, which
    changes no code, so that they stay near 1.

    Args:
        w: the weight, float32, float16 or bfloat16; or several weights of one rank that contract the same inputs, such
            as those of queries, keys and values, of which the largest |w_i| counts.
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
def _smoothquant(weights: tuple[jax.Array, ...], x_max: Any, alpha: Any, *, channel: int) -> jax.Array:
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
        channel: Static. The axis or axes of w whose indices get a scale each. None for all that are summed. A
            convolution whose inputs are scaled has one scale for each input channel.
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

    Source: Lin et al., arXiv 2306.00978, section 3.2, equations 4 and 5; the geometric mean is that of the authors'
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
    w: jax.Array, hessian: jax.Array, magnitude: jax.Array, *, spec: QuantSpec, axis: Any, channel: Any, steps: int
) -> jax.Array:
    hessian, layout = read_hessian(_AWQ, w, hessian, axis)
    shape = (layout.groups, layout.inputs)[1 if layout.groups == 1 and magnitude.ndim == 1 else 0 :]
    checks.check_shape(_AWQ, "moments.magnitude", magnitude, shape, "that of the inputs")
    w, hessian, magnitude = lax.stop_gradient((w.astype(jnp.float32), hessian, magnitude))
    size = _pool_channels(layout, magnitude.reshape(layout.groups, layout.inputs), channel)
    is_live = size > 0
    logarithm = _log_or_zero(size, is_live)
    logarithm = jnp.where(is_live, logarithm - _compute_mean(logarithm, is_live), 0)

    def scale_inputs(exponent: Any) -> jax.Array:
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


def _pool_channels(layout: MatrixLayout, values: jax.Array, channel: Any) -> jax.Array:
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
    scale, zero_point, _ = compute_parameters(_AWQ, w, spec, None, None)
    codes = encode_array(w, scale, zero_point, spec)
    block_size = derive_stored_block_size(_AWQ, spec, w.shape)
    q = QuantizedArray(codes, scale, zero_point, dtype=w.dtype, block_size=block_size, codebook=spec.codebook)
    return dequantize_checked(q)
