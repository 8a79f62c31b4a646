"""From an array and a spec to a QuantizedArray."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._core import checks, dtypes, entry_point, granularity, known_values, min_max
from .._core.affine import divide_by_scale, quantize_affine
from .._core.entry_point import compile_entry_point
from . import scale_from_range
from .quantized_array import QuantizedArray, mark_checked
from .spec import QuantSpec

_NAME = "quantize"


def quantize(
    x: ArrayLike,
    spec: QuantSpec,
    lo: ArrayLike | None = None,
    hi: ArrayLike | None = None,
    range: tuple[ArrayLike, ArrayLike] | None = None,
) -> QuantizedArray:
    """codes = saturate(round_half_even(x / scale) + zero_point), the scale and the zero point from a range.

    The range is that of x, slice by slice as the spec's granularity says, or the one that is given, and is widened to
    hold 0. With qmin and qmax the spec's least and largest code, and z its fixed zero point, float32 throughout:

    - symmetric: scale = max(lo / (qmin - z), hi / (qmax - z)), no value of the range saturates;
    - else scale = (hi - lo) / (qmax - qmin), zero_point = round(saturate(qmin - lo / scale)), as ONNX's
      DynamicQuantizeLinear has them, whose integers uint8 per tensor gives;
    - floats and code books: scale = max(-lo, hi) / their largest value.

    A slice without a range (all zeros, subnormal numbers, which XLA:CPU treats as 0, or no elements) has scale 1. No
    other scale is below 2**-126, the least normal float32, or below the least number of the spec's scale_dtype. A NaN
    or an infinity in a slice makes its scale NaN or infinite, and shows in all that is dequantized from it: 0 times
    infinity is NaN, and the infinity itself may come back with the other sign.

    The codes are `quantize_linear`'s with precision float32, ONNX Runtime's, and of a code book the nearest entry.
    With a scale that is known, `from_onnx(quantize_linear(x, scale, ...), scale, ...)` makes the array.

    They carry no gradient, and neither do the scale and the zero point, for x, `lo` and `hi` alike:
    `fake_quantize_linear` is the one to train through.

    Args:
        x: values, float32, float16 or bfloat16, of any shape; a Python number is float32.
        spec: Static. How to quantize.
        lo: the lower end of the range, in the unit of x, float32, float16 or bfloat16: one element, or of x's rank
            with the dimensions of the scale. A Python number is float32. Given together with `hi`.
        hi: the upper end, likewise.
        range: both ends in one argument, as a calibrator's `finalize` returns them: (lo, hi).

    Returns:
        A QuantizedArray of x's shape and dtype. Its scale and zero point have x's rank, the dimensions that
        share an entry being 1.

    Raises:
        TypeError: an argument has a dtype or type that there is not.
        ValueError: an axis of the spec is out of range; `lo` or `hi` is missing or has another shape; both they and
            `range` are given; or the ends are known and are NaN or infinite, or `lo` exceeds `hi`.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([[-1.75, 0.125, 0.375], [0.0, 28.0, 2.0]])  # scales 0.25 and 4, and three ties
        >>> jq.quantize(x, jq.QuantSpec(jnp.int4, jq.PerAxis(0))).dequantize()
        Array([[-1.75,  0.  ,  0.5 ],
               [ 0.  , 28.  ,  0.  ]], dtype=float32)
        >>> q = jq.quantize(x, jq.QuantSpec(jnp.uint8), range=(-1.0, 1.55))
        >>> q.scale, q.zero_point, q.values
        (Array([[0.01]], dtype=float32), Array([[100]], dtype=uint8), Array([[  0, 112, 138],
               [100, 255, 255]], dtype=uint8))

    Source: ONNX QuantizeLinear-25 and DynamicQuantizeLinear-11; Jacob et al., arXiv 1712.05877, section 2.1.
    """
    checks.require_type(isinstance(spec, QuantSpec), _NAME, "spec", "a QuantSpec", checks.describe_value(spec))
    if range is not None:
        lo, hi = _split_range(range, lo, hi)
    missing = "lo" if lo is None else "hi"
    checks.require((lo is None) == (hi is None), _NAME, missing, "a range of two ends, or none", "None")
    lo, hi = entry_point.convert_number(lo), entry_point.convert_number(hi)
    if lo is not None:
        _check_known_range(lo, hi)
    given = _quantize(entry_point.convert_number(x), lo, hi, spec=spec)
    return mark_checked(given)


def _split_range(ends: Any, lo: Any, hi: Any) -> tuple[Any, Any]:
    """Returns the two ends of a range; requires that they are given once."""
    is_pair = isinstance(ends, tuple | list) and len(ends) == 2
    expected = "a pair (lo, hi), as a calibrator's finalize returns it"
    checks.require_type(is_pair, _NAME, "range", expected, checks.describe_value(ends))
    checks.require(lo is None and hi is None, _NAME, "range", "either range=(lo, hi), or lo and hi", "both")
    return ends[0], ends[1]


def _check_known_range(lo: Any, hi: Any) -> None:
    """Requires a range that is known to be one; what is traced cannot be looked at."""
    ends = [known_values.find_known(v, is_awaited=True) for v in (lo, hi)]
    if any(end is None for end in ends):
        return
    with np.errstate(over="ignore"):  # what float32 cannot hold is an infinity, and refused as one
        low, high = (np.asarray(end, np.float32) for end in ends)
    for argument, bound in (("lo", low), ("hi", high)):
        finite = bool(np.isfinite(bound).all())
        checks.require(finite, _NAME, argument, "finite numbers", "NaN or an infinity")
    if low.shape == high.shape or low.size == 1 or high.size == 1:
        checks.require(bool((low <= high).all()), _NAME, "lo", "no more than hi", "more")


@compile_entry_point(_NAME)
def _quantize(x: jax.Array, lo: jax.Array | None, hi: jax.Array | None, *, spec: QuantSpec) -> QuantizedArray:
    checks.check_array(_NAME, "x", x, dtypes.FLOATS)
    x, lo, hi = jax.lax.stop_gradient((x, lo, hi))
    scale, zero_point, _ = find_parameters(_NAME, x, spec, lo, hi)
    values = encode_array(x, scale, zero_point, spec)
    size = scale_from_range.find_stored_block_size(_NAME, spec, x.shape)
    return QuantizedArray(values, scale, zero_point, dtype=x.dtype, block_size=size, codebook=spec.codebook)


def find_parameters(
    function: str, x: Any, spec: QuantSpec, lo: jax.Array | None, hi: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, tuple[int, ...]]:
    """Returns the scale and the zero point of x, from a range or from x itself, and the shape of the ranges."""
    scale_shape, point_shape = scale_from_range.find_shapes(function, spec, x.shape)
    shape = scale_from_range.find_range_shape(function, spec, x.shape)
    if lo is None or hi is None:
        low, high = min_max.find_extremes(x, shape, scale_from_range.check_one_block_size(function, spec))
    else:
        low, high = (_read_bound(argument, bound, shape) for argument, bound in (("lo", lo), ("hi", hi)))
    return *scale_from_range.find_scale_and_zero_point(spec, low, high, scale_shape, point_shape), shape


def _read_bound(argument: str, bound: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    checks.check_array(_NAME, argument, bound, dtypes.FLOATS)
    if bound.size == 1:  # of another rank too: calibrated on batches, used on one row
        return jnp.broadcast_to(bound.astype(jnp.float32).reshape(()), shape)
    fits = bound.ndim == 0 or (
        bound.ndim == len(shape) and all(b in (1, n) for b, n in zip(bound.shape, shape, strict=True))
    )
    expected = f"a scalar or shape {shape}, with 1 in places of it"
    checks.require(fits, _NAME, argument, expected, f"shape {bound.shape}")
    return jnp.broadcast_to(bound.astype(jnp.float32), shape)


def encode_array(x: jax.Array, scale: jax.Array, zero_point: jax.Array | None, spec: QuantSpec) -> jax.Array:
    """Returns the codes of x under a scale and a zero point of the spec's; every argument has passed its contract."""
    aligned = granularity.Aligned(scale_from_range.check_one_block_size(_NAME, spec))
    if spec.codebook is not None:
        return spec.codebook.encode(divide_by_scale(x, aligned.expand(scale, x), dtypes.FLOAT32))
    bounds = None if spec.dtype in dtypes.SMALL_FLOATS else (int(spec.bounds[0]), int(spec.bounds[1]))
    return quantize_affine(x, scale, zero_point, aligned, spec.dtype, dtypes.FLOAT32, bounds=bounds)
