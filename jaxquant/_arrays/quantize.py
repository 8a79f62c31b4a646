"""Quantization of an array to a QuantizedArray according to a QuantSpec."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core import checks, dtypes, entry_point, granularity, recording
from .._core.entry_point import compile_entry_point
from .._core.granularity import PerAxis, PerTensor
from .._kernels import affine, barriers, min_max
from .._kernels.affine import divide_by_scale, quantize_affine
from . import parts, quantized_array, scale_from_range
from .parts import move_axes_last
from .quantized_array import QuantizedArray
from .scale_rules import encode_ties_toward_zero
from .spec import QuantSpec

_NAME = "quantize"
_ENDS = ("range[0]", "range[1]")  # the names of the ends in errors


def quantize(
    x: ArrayLike,
    spec: QuantSpec,
    range: tuple[ArrayLike, ArrayLike] | None = None,
    *,
    stored_last: int | Sequence[int] | None = None,
) -> QuantizedArray:
    """Quantize x as a spec says, and return the codes with their scale and zero point.

    codes = saturate(round_half_even(x / scale) + zero_point)

    The scale and the zero point are derived from a range (lo, hi): by default from the extremes of each slice of x
    that shares a scale, or else from the range that is given. The range is first widened to include 0. Let qmin and
    qmax be the lowest and the highest code of the spec and z its fixed zero point. In float32:

    - symmetric: scale = max(lo / (qmin - z), hi / (qmax - z)), so that no value in the range saturates;
    - asymmetric: scale = (hi - lo) / (qmax - qmin) and zero_point = round(saturate(qmin - lo / scale)). For uint8 per
      tensor these are the integers of ONNX's DynamicQuantizeLinear;
    - float dtypes and codebooks: scale = max(-lo, hi) / their largest value;
    - offset=True: offset = lo, rounded to its dtype, and scale = (hi - offset) / qmax. The range is not widened, and
      code = saturate(round_half_even((x - offset) / scale)). A range wider than the largest float32 saturates.

    With a scale_spec, the offsets and then the scales are quantized, the scales to the nearest number but never to 0,
    and the codes are computed with the results. The ends of a range then saturate by up to half a step of the scales'
    codes times qmax.

    The codes equal `quantize_linear` with precision float32, and therefore ONNX Runtime's. With a codebook they
    are the indices of the nearest entries. If the scale is already known, use `quantize_linear` and pass its result
    to `from_onnx`.

    A slice with a range of zero has scale 1: one that holds only zeros and subnormal numbers, which XLA:CPU treats as
    0, or that has no elements. No other scale is less than 2**-126, the least normal float32, or less than the least
    number of the spec's scale_dtype. A NaN or an infinity in a slice makes the scale of the slice NaN or infinite, and
    with it every value that is dequantized: 0 times infinity is NaN, and an infinity may change its sign.

    Finite values of a range are never dequantized to infinities. Where rounding would make the value of a code exceed
    the largest number of x's dtype, the scale is the largest at which none does, and the ends of the range saturate, by
    about one step. Scales that are powers of two are reduced by whole powers: such a range may lose half of its reach.

    A float16 scale or offset is at most 65504, and so is the float16 scale of quantized scales. A range that needs a
    larger one raises an error; if it is traced, its scale or offset is infinite, as for a range with an infinity, so
    that the slice is lost visibly instead of saturating.

    Neither the codes nor the scale and the zero point have a gradient with respect to x or `range`. Use
    `fake_quantize_linear` for training.

    Args:
        x: values of any shape, float32, float16 or bfloat16. A Python number becomes float32.
        spec: Static. The dtype of the codes, which elements share a scale, and how the scale is computed from a range.
        range: the lower and the upper end, (lo, hi), in the units of x: a pair, or the `Range` that the `finalize` of a
            calibrator returns. Each end is float32, float16 or bfloat16, and has one element or x's rank, in which
            each dimension is the scale's or 1. A Python number becomes float32. None takes the extremes of x.
        stored_last: Static. An axis, or several, that the codes hold last in memory, as after `store_last`. None stores
            them in the order of x. Weights that few rows are multiplied with are up to twice as fast on a CPU with
            their contracted axis last.

    Returns:
        A QuantizedArray with x's shape and dtype. Its scale and its zero point have x's rank, with length 1 in each
        dimension along which elements share an entry.

    Raises:
        TypeError: an argument has an unsupported type or dtype.
        ValueError: an axis is out of range; an end of the range has a wrong shape; the ends are known (not traced), and
            one is NaN or infinite, or lo is greater than hi; or a known range needs a scale or an offset that float16,
            the scale_dtype of the spec or of its scale_spec, cannot hold.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([[-1.75, 0.125, 0.375], [0.0, 28.0, 2.0]])  # scales 0.25 and 4, and three ties
        >>> jq.quantize(x, jq.QuantSpec(jnp.int4, jq.PerAxis(0))).dequantize()
        Array([[-1.75,  0.  ,  0.5 ],
               [ 0.  , 28.  ,  0.  ]], dtype=float32)
        >>> q = jq.quantize(x, jq.QuantSpec(jnp.uint8), range=(-1.0, 1.55))
        >>> q.scale, q.zero_point, q.codes
        (Array([[0.01]], dtype=float32), Array([[100]], dtype=uint8), Array([[  0, 112, 138],
               [100, 255, 255]], dtype=uint8))
        >>> q = jq.quantize(x, jq.QuantSpec(jnp.int4, jq.PerAxis(1)), stored_last=0)
        >>> q.shape, q.stored_codes.shape, q.stored_order
        ((2, 3), (3, 2), (-1, -2))

    Source: ONNX QuantizeLinear-25 and DynamicQuantizeLinear-11; Jacob et al., arXiv 1712.05877, section 2.1.
    """
    checks.require_type(isinstance(spec, QuantSpec), _NAME, "spec", "a QuantSpec", checks.describe_value(spec))
    lo, hi = None, None
    if range is not None:
        lo, hi = map(entry_point.convert_number, _check_pair(range))
        _check_known_range(lo, hi)
    if stored_last is not None:
        is_axes = isinstance(stored_last, tuple | list)
        stored_last = checks.check_integers(_NAME, "stored_last", stored_last if is_axes else (stored_last,))
    x = entry_point.convert_number(x)
    q = _quantize(x, lo, hi, spec=spec, stored_last=stored_last)
    if has_float16_scales(spec):
        check_known_scale(_NAME, x, spec, lo, hi, q)
    return q


def _check_pair(ends: Any) -> tuple[Any, Any]:
    """Return the two ends of a range; raise unless it has two."""
    is_pair = isinstance(ends, tuple | list) and len(ends) == 2 and all(end is not None for end in ends)
    expected = "a pair (lo, hi), as the finalize of a calibrator returns it"
    checks.require_type(is_pair, _NAME, "range", expected, checks.describe_value(ends))
    return ends[0], ends[1]


def _check_known_range(lo: ArrayLike, hi: ArrayLike) -> None:
    """Check that the ends of a range are finite and in order; skip the check if they are traced."""
    # The usual case comes first: two numbers.
    if type(lo) is np.float32 and type(hi) is np.float32 and -np.inf < lo <= hi < np.inf:
        return
    ends = [entry_point.read_elements(v, is_awaited=True) for v in (lo, hi)]
    if any(end is None for end in ends):
        return
    # A number too large for float32 becomes an infinity, which the check below rejects.
    with np.errstate(over="ignore"):
        low, high = (np.asarray(end, np.float32) for end in ends)
    for argument, end in zip(_ENDS, (low, high), strict=True):
        is_finite = bool(np.isfinite(end).all())
        checks.require(is_finite, _NAME, argument, "finite numbers", "NaN or an infinity")
    if low.shape == high.shape or low.size == 1 or high.size == 1:
        checks.require(bool((low <= high).all()), _NAME, "range", "a pair (lo, hi) with lo at most hi", "more")


def has_float16_scales(spec: QuantSpec) -> bool:
    """Return whether scales and offsets, or the scales that they are quantized with, are float16."""
    return (spec.scale_spec or spec).scale_dtype == dtypes.FLOAT16


def check_known_result(function: str, x: object, spec: QuantSpec, y: Any) -> None:
    """Raise if values that were rounded with float16 scales show an infinite scale; skip the check if they are traced.

    Args:
        function: the public function.
        x: the values.
        spec: Static. How they are quantized, with float16 scales.
        y: the rounded values.
    """
    is_readable = isinstance(y, jax.Array) and not checks.is_traced(y) and y.is_fully_addressable
    # Every value of a slice with an infinite scale is NaN or infinite.
    if is_readable and not bool(jnp.isfinite(y).all()):
        check_known_scale(function, x, spec, None, None, _quantize(x, None, None, spec=spec, stored_last=None))


def check_known_scale(function: str, x: object, spec: QuantSpec, lo: object, hi: object, q: QuantizedArray) -> None:
    """Raise if a float16 scale or offset of a finite range is infinite; skip the check if the array is traced.

    Args:
        function: the public function.
        x: the values.
        spec: Static. How they are quantized, with float16 scales.
        lo: the lower ends of the ranges, or None for the minima of x.
        hi: the upper ends, or None.
        q: the array that was found.
    """
    found = _list_numbers(q)
    if any(checks.is_traced(part) or not part.is_fully_addressable for part in found.values()):
        return
    infinite = {name: np.isinf(np.asarray(part, np.float32)) for name, part in found.items()}
    if not any(mask.any() for mask in infinite.values()):
        return
    inner = spec.scale_spec and dataclasses.replace(spec.scale_spec, scale_dtype=dtypes.FLOAT32)
    wide = dataclasses.replace(spec, scale_dtype=dtypes.FLOAT32, scale_spec=inner)
    needed = _list_numbers(_quantize(x, lo, hi, spec=wide, stored_last=None))
    for name, part in needed.items():
        # A range with an infinity has an infinite scale whatever the dtype.
        number = np.abs(np.asarray(part))
        too_large = number[infinite[name] & np.isfinite(number)]
        if too_large.size:
            argument = "x" if lo is None else "range"
            remedy = "scale_spec with scale_dtype=jnp.bfloat16" if inner else "scale_dtype=jnp.bfloat16"
            expected = f"a range whose {name} is at most 65504, the largest float16 (or {remedy})"
            checks.refuse(function, argument, expected, f"a range with the {name} {too_large.max():.6g}")


def _list_numbers(q: QuantizedArray) -> dict[str, Any]:
    """Return the scale and the offset of an array, or the scales that they are quantized with, by their names."""
    numbers = {}
    for name, part in (("scale", q.scale), ("offset", q.offset)):
        if isinstance(part, QuantizedArray):
            numbers[f"scale of the {name}s"] = part.scale
        elif part is not None:
            numbers[name] = part
    return numbers


@compile_entry_point(_NAME, ("x", *_ENDS))
def _quantize(
    x: jax.Array, lo: jax.Array | None, hi: jax.Array | None, *, spec: QuantSpec,
    stored_last: int | tuple[int, ...] | None,
) -> QuantizedArray:  # fmt: skip
    checks.check_array(_NAME, "x", x, dtypes.FLOATS)
    order = None if stored_last is None else move_axes_last(_NAME, "stored_last", stored_last, x.ndim)
    # Without this the scale would have a gradient and the codes would not, so their product would have a wrong one.
    x, lo, hi = jax.lax.stop_gradient((x, lo, hi))
    if spec.has_float8_scales:
        plain = dataclasses.replace(spec, scale_spec=None, scale_rule=None)
        scale, values = _compute_nested_scale(spec, *_choose_ends(_NAME, x, plain, lo, hi))
        return _build_array(encode_array(x, values, None, plain), scale, None, None, plain, x, order)
    if spec.offset or spec.scale_spec is not None:
        return _quantize_forms(x, lo, hi, spec, order)
    scale, zero_point, _ = compute_parameters(_NAME, x, spec, lo, hi)
    codes = encode_array(x, scale, zero_point, spec)
    return _build_array(codes, scale, zero_point, None, spec, x, order)


# Offsets, and scales that are quantized themselves.


def quantize_under_range(x: jax.Array, spec: QuantSpec, lo: jax.Array, hi: jax.Array) -> QuantizedArray:
    """Return x with float8 scales of its own blocks, and the float32 scale of a range that was found before.

    Args:
        x: the values.
        spec: Static. A spec with float8 scales.
        lo: the lower end of the range of the whole array, of one element.
        hi: the upper end.
    """
    plain = dataclasses.replace(spec, scale_spec=None, scale_rule=None)
    low, high = (jnp.abs(end.astype(jnp.float32)) for end in (lo, hi))
    reached = jnp.maximum(low, high).reshape((1,) * x.ndim)
    scale, values = _compute_nested_scale(spec, *_choose_ends(_NAME, x, plain, None, None), reached)
    return _build_array(encode_array(x, values, None, plain), scale, None, None, plain, x)


def _quantize_forms(
    x: jax.Array, lo: jax.Array | None, hi: jax.Array | None, spec: QuantSpec, order: parts.StoredOrder
) -> QuantizedArray:
    """Return the array of a spec with an offset or a scale_spec."""
    plain = dataclasses.replace(spec, offset=False, scale_spec=None)
    shape = scale_from_range.derive_range_shape(_NAME, plain, x.shape)
    block_size = scale_from_range.check_block_sizes(_NAME, plain, x.ndim)
    aligned = granularity.Aligned(block_size)
    if lo is None or hi is None:
        low, high = min_max.compute_extremes(x, shape, block_size)
    else:
        low, high = (_broadcast_end(_NAME, name, end, shape) for name, end in zip(_ENDS, (lo, hi), strict=True))
    zero_point = None
    if spec.offset:
        offset = scale_from_range.compute_offset(spec, low)
        if spec.scale_spec is not None:
            offset = _quantize_entries(offset, spec.scale_spec, None, x.dtype)
        offset_values = dtypes.scale_as_float32(quantized_array.read_entries(offset))
        scale, is_unused = scale_from_range.compute_scale_above(spec, offset_values, high, x.dtype)
    else:
        offset = offset_values = None
        scale, zero_point, _ = compute_parameters(_NAME, x, plain, lo, hi)
        is_unused = scale_from_range.is_empty(low, high) | (low > high)
    if spec.scale_spec is not None:
        # The scale 1 of an empty range must not count among the others.
        reach = scale_from_range.compute_largest_magnitude(plain)
        scale = _quantize_entries(jnp.where(is_unused, np.float32(0), scale), spec.scale_spec, reach, x.dtype)
    scale_values = dtypes.scale_as_float32(quantized_array.read_entries(scale))
    if offset_values is None:
        codes = encode_array(x, scale_values, zero_point, plain)
    else:
        # The difference may overflow where the offset is large. Its half cannot, and is exact.
        factor = scale_from_range.choose_factor(offset_values)
        above = x.astype(jnp.float32) * aligned.expand(factor, x) - aligned.expand(offset_values * factor, x)
        if spec.scale_spec is not None:  # a scale that was rounded up may reach beyond the largest number
            most = scale_from_range.compute_largest_difference(plain, scale_values, offset_values, x.dtype)
            above = jax.lax.min(above, aligned.expand(most * factor, x))
        codes = encode_array(above, scale_values * factor, None, plain)
    return _build_array(codes, scale, zero_point, offset, spec, x, order)


def _build_array(
    codes: jax.Array, scale: Any, zero_point: jax.Array | None, offset: Any, spec: QuantSpec, x: jax.Array,
    order: parts.StoredOrder = None, *, signed_scale: bool = False,
) -> QuantizedArray:  # fmt: skip
    """Return the array of codes that a spec gives x, with any of the parts that it may have."""
    plain = dataclasses.replace(spec, offset=False, scale_spec=None)
    block_size = scale_from_range.derive_stored_block_size(_NAME, plain, x.shape)
    return QuantizedArray(
        codes, scale, zero_point, offset, dtype=x.dtype, block_size=block_size, codebook=spec.codebook,
        stored_order=order, signed_scale=signed_scale, packing=parts.derive_packing(spec.dtype, x.shape, order),
    )  # fmt: skip


def _quantize_entries(values: jax.Array, spec: QuantSpec, reach: float | None, dtype: np.dtype) -> QuantizedArray:
    """Return scales or offsets as a quantized array.

    Args:
        values: float32, positive scales or 0 for those that do not matter, or offsets of any sign.
        spec: Static. How they are quantized.
        reach: Static. The largest magnitude that a scale is multiplied with; None for offsets. A scale is at least the
            least positive number of the codes.
        dtype: Static. The dtype of the dequantized values.
    """
    values = values.astype(jnp.float32)
    is_unsigned = spec.fixed_zero_point is None
    # The offsets that unsigned codes hold are not positive, and their scales are negative.
    is_negated = reach is None and is_unsigned
    magnitudes = -values if is_negated else values
    # The range of unsigned codes begins at 0, so their zero point is 0.
    scale, _, _ = compute_parameters(_NAME, magnitudes, spec, None, None)
    scale = scale_from_range.limit_entry_scale(spec, scale, 1 if reach is None else reach, dtype)
    codes = encode_array(magnitudes, scale, None, spec)
    if reach is not None:
        codes = _raise_to_positive(codes)
    if is_negated:  # float8_e8m0fnu has no sign
        scale = -(dtypes.scale_as_float32(scale) if spec.scale_dtype == dtypes.E8M0 else scale)
    return _build_array(codes, scale, None, None, spec, values, signed_scale=is_negated)


def _raise_to_positive(codes: jax.Array) -> jax.Array:
    """Return codes that are not negative, with each code of 0 replaced by the least positive code."""
    if codes.dtype in dtypes.FLOAT4:
        bits = jax.lax.bitcast_convert_type(codes, jnp.uint4).astype(jnp.int32)
        return jax.lax.bitcast_convert_type(jnp.maximum(bits, 1).astype(jnp.uint4), codes.dtype)
    if codes.dtype in dtypes.FLOAT8:
        bits = jax.lax.bitcast_convert_type(codes, jnp.uint8)
        return jax.lax.bitcast_convert_type(jnp.maximum(bits, np.uint8(1)), codes.dtype)
    return jnp.maximum(codes.astype(jnp.int32), 1).astype(codes.dtype)


def compute_parameters(
    function: str, x: Any, spec: QuantSpec, lo: jax.Array | None, hi: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, tuple[int, ...]]:
    """Return the scale and the zero point, for the given range or the extremes of x, and the shape of the ranges."""
    scale_shape, zero_point_shape = scale_from_range.derive_shapes(function, spec, x.shape)
    shape = scale_from_range.derive_range_shape(function, spec, x.shape)
    if lo is None or hi is None:
        block_size = scale_from_range.check_block_sizes(function, spec, x.ndim)
        # A symmetric range is recorded as extremes, for which an exporter has operators.
        is_symmetric = scale_from_range.has_equal_reach(spec) and not recording.is_recording()
        if spec.fixed_zero_point is None or is_symmetric:
            return *_compute_own_parameters(x, spec, shape, block_size, scale_shape, zero_point_shape), shape
    low, high = _choose_ends(function, x, spec, lo, hi)
    found = scale_from_range.compute_scale_and_zero_point(spec, low, high, scale_shape, zero_point_shape, x.dtype)
    return *found, shape


def _choose_ends(
    function: str, x: Any, spec: QuantSpec, lo: jax.Array | None, hi: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the ends of the ranges in float32: the given ones, or the extremes of x."""
    shape = scale_from_range.derive_range_shape(function, spec, x.shape)
    if lo is None or hi is None:
        low, high = min_max.compute_extremes(x, shape, scale_from_range.check_block_sizes(function, spec, x.ndim))
        return low, high
    low, high = (_broadcast_end(function, name, end, shape) for name, end in zip(_ENDS, (lo, hi), strict=True))
    return low, high


def _list_parameters(
    spec: QuantSpec, scale_shape: tuple[int, ...], zero_point_shape: tuple[int, ...] | None, **_: object
) -> list[Any]:
    return [(scale_shape, spec.scale_dtype), (zero_point_shape, spec.carrier)]


# A jit, so that JAX keeps the trace, as for `quantize_affine`.
@recording.mark("own_range", _list_parameters)
@functools.partial(jax.jit, static_argnames=("spec", "shape", "block_size", "scale_shape", "zero_point_shape"))
def _compute_own_parameters(
    x: jax.Array, spec: QuantSpec, shape: tuple[int, ...], block_size: granularity.BlockSize,
    scale_shape: tuple[int, ...], zero_point_shape: tuple[int, ...],
) -> tuple[jax.Array, Any]:  # fmt: skip
    """Return the scale and the zero point for the range of x."""
    return scale_from_range.compute_own_scale_and_zero_point(spec, x, shape, block_size, scale_shape, zero_point_shape)


def _broadcast_end(function: str, argument: str, end: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return one end of the range in float32 and in the shape of the ranges."""
    checks.check_array(function, argument, end, dtypes.FLOATS)
    # A single element may have any rank, because a range may be calibrated on batches and used on a single row.
    if end.size == 1:
        return jnp.broadcast_to(end.astype(jnp.float32).reshape(()), shape)
    fits = end.ndim == len(shape) and all(b in (1, n) for b, n in zip(end.shape, shape, strict=True))
    expected = f"a scalar or shape {shape}, in which any dimension may be 1"
    checks.require(fits, function, argument, expected, f"shape {end.shape}")
    return jnp.broadcast_to(end.astype(jnp.float32), shape)


def encode_array(x: jax.Array, scale: jax.Array, zero_point: jax.Array | None, spec: QuantSpec) -> jax.Array:
    """Return the codes of x for a scale and a zero point that fit the spec; the arguments have been checked."""
    aligned = granularity.Aligned(scale_from_range.check_block_sizes(_NAME, spec, x.ndim))
    if spec.codebook is not None:
        return spec.codebook.encode(divide_by_scale(x, aligned.expand(scale, x), dtypes.FLOAT32))
    if spec.ties != "even":
        return encode_ties_toward_zero(divide_by_scale(x, aligned.expand(scale, x), dtypes.FLOAT32))
    # Float codes have no integer bounds: they saturate at the largest value of their dtype.
    bounds = None if spec.dtype in dtypes.SMALL_FLOATS else (int(spec.bounds[0]), int(spec.bounds[1]))
    return quantize_affine(x, scale, zero_point, aligned, spec.carrier, dtypes.FLOAT32, bounds=bounds)


# Quantization of kernels of many shapes by few compiled programs, for the conversion of networks.


# Compiling a program takes some 100 ms, quantizing a kernel of this many elements a tenth of that.
_MOST_ELEMENTS = 2**22
_LEAST_LENGTH = 64


def quantize_kernel(kernel: jax.Array, spec: QuantSpec, stored_axes: Sequence[int]) -> QuantizedArray:
    """Return `quantize(kernel, spec)`, bit for bit, with a compiled program that kernels of other shapes share.

    The codes hold the `stored_axes` last in memory.

    A kernel on one CPU with one scale for each index of its last axes, or one in total, is padded with zeros to a
    matrix with sides that are powers of two. Every range is widened to include 0, so the zeros change no scale. The
    programs of a network are compiled one after another, and a network has many shapes of kernels.
    """
    table = None if spec.scale_spec else _match_table(kernel, spec)
    if table is None:
        return quantize(kernel, spec, stored_last=tuple(stored_axes) or None)
    rows, columns = table
    values = np.asarray(kernel)
    padded = np.zeros([max(_LEAST_LENGTH, 2 ** (n - 1).bit_length()) for n in table], values.dtype)
    padded[:rows, :columns] = values.reshape(table)
    scale_shape, zero_point_shape = scale_from_range.derive_shapes("quantize", spec, values.shape)
    granularity = PerTensor() if math.prod(scale_shape) == 1 else PerAxis(1)
    flat_spec = dataclasses.replace(spec, granularity=granularity, zero_point_granularity=None)
    # The padding is removed by numpy, because JAX would compile a program for each shape to do it.
    q = quantize(padded, flat_spec)

    order = parts.move_axes_last("quantize", "stored_last", stored_axes, values.ndim)

    def trim(
        part: jax.Array, row_count: int, shape: tuple[int, ...], order: parts.StoredOrder = None,
        packing: parts.Packing | None = None,
    ) -> jax.Array:  # fmt: skip
        host = np.asarray(part)[:row_count, : columns if part.shape[1] > 1 else 1].reshape(shape)
        return jax.device_put(np.array(parts.store_codes(host, order, packing), order="C"))

    zero_point = None if q.zero_point is None else trim(q.zero_point, 1, zero_point_shape)
    packing = parts.derive_packing(spec.dtype, values.shape, order)
    stored, scale = trim(q.codes, rows, values.shape, order, packing), trim(q.scale, 1, scale_shape)
    static = q.tree_flatten()[1]._replace(block_size=None, stored_order=order, packing=packing)
    return QuantizedArray.tree_unflatten(static, (stored, scale, zero_point))


def _match_table(kernel: jax.Array, spec: QuantSpec) -> tuple[int, int] | None:
    """Return the rows and the columns of a kernel that `quantize_kernel` can pad; None for any other kernel."""
    granularity = spec.granularity
    if spec.offset or spec.scale_spec is not None:
        return None
    if spec.zero_point_granularity != granularity or not isinstance(granularity, PerTensor | PerAxis):
        return None
    if not _is_on_cpu(kernel) or kernel.dtype not in dtypes.FLOATS or kernel.size == 0 or kernel.ndim == 0:
        return None
    shape = tuple(kernel.shape)
    scale_shape = scale_from_range.derive_shapes("quantize", spec, shape)[0]
    shared = len(shape) - 1
    if math.prod(scale_shape) > 1:
        shared = next(axis for axis, entries in enumerate(scale_shape) if entries > 1)
        if scale_shape[shared:] != shape[shared:]:
            return None
    rows, columns = math.prod(shape[:shared]), math.prod(shape[shared:])
    return (rows, columns) if rows * columns <= _MOST_ELEMENTS else None


def _is_on_cpu(kernel: object) -> bool:
    """Return whether a kernel is in the memory of a CPU that is the default device, where the result is made."""
    if not isinstance(kernel, jax.Array | np.ndarray) or checks.is_traced(kernel):
        return False
    default = jax.device_put(np.float32(0)).sharding
    is_here = isinstance(kernel, np.ndarray) or kernel.sharding == default
    return is_here and all(device.platform == "cpu" for device in default.device_set)


# Scales that are quantized themselves, as in NVFP4: a float8 scale for each block, times one float32 for all.
#
# The orders in which producers divide and round differ, so that their scales and codes differ by a step here and there:
#
# - ModelOpt: g = amax / (6 * 448), scale = float8(block_amax / (6 * g)), x / (scale * g);
# - compressed-tensors: r = (1 / amax) * (6 * 448), scale = float8(r * (block_amax / 6)), x / (scale / r).
#
# An array of this package holds g, or r as an inverse scale.


_TINY = np.finfo(np.float32).tiny
# compressed-tensors' scale of a block whose scale rounds to 0.
_EPSILON = np.float32(0.125)


def _compute_nested_scale(
    spec: QuantSpec, low: jax.Array, high: jax.Array, reached: jax.Array | None = None
) -> tuple[QuantizedArray, jax.Array]:
    """Return the quantized scale of float32 ranges, and the float32 values by which elements are divided.

    Args:
        spec: Static. A spec with a `scale_spec`.
        low: the lower ends of the ranges.
        high: the upper ends.
        reached: the largest magnitude that the scales must reach, float32 of length 1 in each dimension. Ranges beyond
            it saturate. None takes the largest magnitude of the ranges.

    Returns:
        The scale, in the shape of the ranges, and its values. They are positive, unless a range has a NaN or an
        infinity: then all are NaN or infinite.
    """
    inner = spec.scale_spec
    assert inner is not None
    reach, most = np.float32(spec.bounds[1]), np.float32(inner.bounds[1])
    amax = lax.max(lax.abs(low), lax.abs(high))
    amax = jnp.where(jnp.isnan(low) | jnp.isnan(high), np.float32(np.nan), amax)
    amax = jnp.where(amax < _TINY, np.float32(0), amax)  # XLA:CPU treats subnormal numbers as 0
    largest = reached
    if largest is None:
        largest = jnp.max(amax, keepdims=True, initial=0)
        largest = jnp.where(jnp.any(jnp.isnan(amax), keepdims=True), np.float32(np.nan), largest)
    product = np.float32(reach * most)  # exact for float4 times float8
    if spec.scale_rule == "compressed_tensors":
        magnitude = jnp.maximum(largest, _TINY)
        inverse = barriers.round_result(_divide(np.float32(1), magnitude) * product)
        # The reciprocal of a larger number is subnormal.
        inverse = jnp.where(largest > np.float32(2.0**126), _divide(product, magnitude), inverse)
        # Where it overflows, compressed-tensors takes 1; so is it here where quotients by it may be subnormal.
        inverse = jnp.where(inverse <= np.float32(2.0**126), inverse, np.float32(1))
        quotient = barriers.round_result(inverse * _divide(amax, reach))
        codes = _encode(quotient, inner.dtype)
        scale = dtypes.decode_small_float(codes)
        scale = jnp.where(scale == 0, _EPSILON, scale)
        values = affine.divide(scale, jnp.broadcast_to(inverse, scale.shape))
        codes, shared = _encode(scale, inner.dtype), inverse
    else:
        shared = _divide(largest, product)
        shared = jnp.where(shared < _TINY, np.float32(1), shared)
        divisor = barriers.round_result(shared * reach)
        quotient = affine.divide(amax, jnp.broadcast_to(divisor, amax.shape))
        quotient = jnp.where(quotient == 0, np.float32(1), quotient)
        least = np.float32(jnp.finfo(inner.dtype).smallest_subnormal)
        codes = _encode(jnp.maximum(quotient, least), inner.dtype)
        values = barriers.round_result(dtypes.decode_small_float(codes) * shared)
    # A slice with a NaN or an infinity shows it in every value, whatever float8 made of it. The quotient by an infinite
    # scale would be 0.
    divides = spec.scale_rule == "compressed_tensors"
    shared = jnp.where(jnp.isfinite(largest), shared, np.float32(np.nan) if divides else largest)
    values = jnp.where(jnp.isfinite(largest), values, largest)
    return QuantizedArray(codes, shared, dtype=jnp.float32, inverse_scale=divides), values


def _divide(x: jax.Array | np.float32, divisor: jax.Array | np.float32) -> jax.Array:
    """Return x / divisor, rounded correctly; one of the two may be a number."""
    shape = np.broadcast_shapes(np.shape(x), np.shape(divisor))
    return affine.divide(*(jnp.broadcast_to(jnp.asarray(v, jnp.float32), shape) for v in (x, divisor)))


def _encode(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return positive float32 values as float8, half to even, saturating."""
    return dtypes.encode_small_float(value, dtype, True)
