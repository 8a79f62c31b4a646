"""Weights as matrices of inputs times outputs, and the scale and the zero point of each of their elements."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import parts, scale_from_range
from .._arrays.quantize import compute_parameters, quantize
from .._arrays.quantized_array import QuantizedArray, check_array, read_entries
from .._arrays.scale_rules import encode_ties_toward_zero
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, granularity
from .._kernels import packed_codes
from .._kernels.affine import dequantize_affine, divide_by_scale, quantize_affine

_EACH = granularity.Aligned()
# What a grid may have, besides a scale and a zero point. A permutation of the inputs would have to be followed by the
# second moments.
_FORMS = ("offset", "nested", "signed_scale", "block_sizes")

Axis = int | tuple[int, ...]


class MatrixLayout(NamedTuple):
    """How the elements of a weight are arranged as [groups, inputs, outputs].

    Attributes:
        shape: the shape of the weight.
        kept: the axes that the contraction keeps, which become the groups and the outputs.
        summed: the axes that the contraction sums over, in ascending order, which become the inputs.
        groups: the number of groups: runs of outputs that read other inputs than the next run.
    """

    shape: tuple[int, ...]
    kept: tuple[int, ...]
    summed: tuple[int, ...]
    groups: int

    @property
    def inputs(self) -> int:
        """The number of inputs of an output."""
        return math.prod(self.shape[axis] for axis in self.summed)

    def arrange(self, x: jax.Array) -> jax.Array:
        """Return an array of the weight's shape as [groups, inputs, outputs]."""
        # With the kept axes in front, the outputs of a group are neighbors, and one reshape cuts the groups.
        rows = x.transpose(*self.kept, *self.summed).reshape(self.groups, -1, self.inputs)
        return rows.transpose(0, 2, 1)

    def restore(self, matrix: jax.Array) -> jax.Array:
        """Return [groups, inputs, outputs] as an array of the weight's shape."""
        order = (*self.kept, *self.summed)
        rows = matrix.transpose(0, 2, 1).reshape([self.shape[axis] for axis in order])
        return rows.transpose([order.index(axis) for axis in range(len(order))])


def make_layout(function: str, shape: tuple[int, ...], axis: Axis, groups: int = 1) -> MatrixLayout:
    """Return the layout of a weight; raise if it has no such axes, or no such groups.

    Args:
        function: the public function that errors name.
        shape: the shape of the weight.
        axis: the axis or axes that the contraction keeps.
        groups: the number of groups.
    """
    axes = axis if isinstance(axis, tuple | list) else (axis,)
    kept = tuple(checks.check_axis(function, entry, len(shape)) for entry in axes)
    checks.require(len(set(kept)) == len(kept), function, "axis", "distinct axes", axis)
    outputs = math.prod(shape[entry] for entry in kept)
    expected = f"a number of groups that divides the {outputs} outputs"
    checks.require(groups > 0 and outputs % groups == 0, function, "hessian", expected, groups)
    return MatrixLayout(tuple(shape), kept, tuple(entry for entry in range(len(shape)) if entry not in kept), groups)


def check_weight(function: str, w: jax.Array) -> None:
    """Raise unless w is an array of floats of rank 1 or more."""
    checks.check_array(function, "w", w, dtypes.FLOATS)
    checks.require(w.ndim > 0, function, "w", "rank 1 or more", "rank 0")


def read_hessian(function: str, w: jax.Array, hessian: jax.Array, axis: Axis) -> tuple[jax.Array, MatrixLayout]:
    """Return the second moments as [groups, inputs, inputs] of float32, and the layout of the weight."""
    check_weight(function, w)
    checks.check_array(function, "hessian", hessian, dtypes.FLOATS)
    is_matrix = hessian.ndim in (2, 3)
    expected = "shape (inputs, inputs), or (groups, inputs, inputs)"
    checks.require(is_matrix, function, "hessian", expected, f"shape {hessian.shape}")
    layout = make_layout(function, w.shape, axis, hessian.shape[0] if hessian.ndim == 3 else 1)
    shape = (*hessian.shape[:-2], layout.inputs, layout.inputs)
    reason = f"w has shape {w.shape}, and the contraction keeps the axes {layout.kept}"
    checks.check_shape(function, "hessian", hessian, shape, reason)
    return hessian.astype("float32").reshape(layout.groups, layout.inputs, layout.inputs), layout


class Scales(NamedTuple):
    """What turns codes into values, in the shapes in which a `QuantizedArray` stores it.

    Attributes:
        scale: an array of floats, or a quantized array itself.
        zero_point: None, or an array in the dtype of the codes.
        offset: None, an array of floats, or a quantized array itself.
        block_size: the block size.
        is_signed: whether the scale may be zero or negative.
    """

    scale: jax.Array | QuantizedArray
    zero_point: jax.Array | None
    offset: jax.Array | QuantizedArray | None
    block_size: granularity.BlockSize
    is_signed: bool


class Grid(NamedTuple):
    """The scale, float32, the zero point, int32 or None, and the offset, float32 or None, of each element of a matrix.

    Values have the offset subtracted before they become codes, so that only searches for a range have one here.
    """

    scale: jax.Array
    zero_point: jax.Array | None
    offset: jax.Array | None = None

    def take_row(self, index: jax.Array) -> Grid:
        """Return the grid of one row of the matrix."""
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), self)


def check_spec(function: str, spec: object) -> None:
    """Raise unless spec is a QuantSpec."""
    checks.require_type(isinstance(spec, QuantSpec), function, "spec", "a QuantSpec", checks.describe_value(spec))


def check_integer_spec(function: str, spec: QuantSpec) -> None:
    """Raise unless spec is a QuantSpec with integer codes."""
    check_spec(function, spec)
    is_integer = spec.codebook is None and dtypes.is_integer(spec.dtype)
    checks.require(is_integer, function, "spec", "codes of an integer dtype", spec.dtype)


def check_finite(function: str, **arrays: Any) -> None:
    """Raise if an array that is known contains a NaN or an infinity; wait for the accelerator that holds it."""
    for argument, x in arrays.items():
        if x is None or checks.is_traced(x) or not hasattr(x, "dtype") or not hasattr(x, "ndim"):
            continue
        # A check of the dtype follows, so that only arrays of floats are looked at here.
        if isinstance(x, QuantizedArray) or x.dtype not in dtypes.FLOATS:
            continue
        # A known array may meet this check while another one is traced.
        with jax.ensure_compile_time_eval():
            # An array of numpy is looked at where it is, and not copied to a device first.
            is_finite = bool(np.isfinite(x).all()) if isinstance(x, np.ndarray) else bool(_is_finite(x))
        checks.require(is_finite, function, argument, "finite numbers", "a NaN or an infinity")


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()


def read_grid(function: str, grid: QuantizedArray | None) -> Scales | None:
    """Return what turns the codes of the array that a caller passed as a grid into values, or None."""
    if grid is None:
        return None
    return _read_scales(check_array(function, "grid", grid, supports=_FORMS))


def _read_scales(q: QuantizedArray) -> Scales:
    return Scales(q.scale, q.zero_point, q.offset, q.block_size, q.signed_scale)


def separate_spec(spec: QuantSpec, *, offset: bool) -> QuantSpec:
    """Return a spec with scales that are not quantized themselves, and with its offset or without one.

    Args:
        spec: the spec.
        offset: whether the result has an offset if the spec has one.
    """
    # The rules of such scales say in which order both are rounded.
    rule = spec.scale_rule if spec.scale_spec is None else None
    return dataclasses.replace(spec, scale_spec=None, scale_rule=rule, offset=offset and spec.offset)


def check_grid(function: str, grid: QuantizedArray | None, w: jax.Array, spec: QuantSpec) -> None:
    """Raise unless a grid is None or a quantized array with the shape of w and the codes of the spec."""
    if grid is None:
        return
    q = check_array(function, "grid", grid, supports=(*_FORMS, "packing"))
    checks.check_shape(function, "grid", q, tuple(w.shape), "the shape of w")
    is_same = q.format == spec.dtype
    checks.require(is_same, function, "grid", f"codes of {spec.dtype}, as the spec has", q.format)


def compute_scales(function: str, w: jax.Array, spec: QuantSpec, grid: Scales | None) -> Scales:
    """Return a weight's scale and zero point: from a grid, or else as `jq.quantize` computes them."""
    if grid is not None:
        return grid
    if spec.offset or spec.scale_spec is not None:
        with checks.name_errors(function):
            return _read_scales(quantize(w, spec))
    scale, zero_point, _ = compute_parameters(function, w, spec, None, None)
    block_size = scale_from_range.derive_stored_block_size(function, spec, w.shape)
    return Scales(scale, zero_point, None, block_size, is_signed=False)


def subtract_offset(w: jax.Array, scales: Scales) -> jax.Array:
    """Return a weight in float32 without the offset of its grid: what the products of codes and scale have to match."""
    wide = w.astype(jnp.float32)
    if scales.offset is None:
        return wide
    offset = read_entries(scales.offset).astype(jnp.float32)
    return wide - granularity.Aligned(scales.block_size).expand(offset, wide)


def expand_scales(scales: Scales, like: jax.Array, layout: MatrixLayout) -> Grid:
    """Return the scale and the zero point of each element, arranged as a matrix."""
    aligned = granularity.Aligned(scales.block_size)
    scale = layout.arrange(aligned.expand(dtypes.scale_as_float32(read_entries(scales.scale)), like))
    if scales.zero_point is None:
        return Grid(scale, None)
    return Grid(scale, layout.arrange(aligned.expand(scales.zero_point.astype(jnp.int32), like)))


def encode_values(x: jax.Array, grid: Grid, spec: QuantSpec) -> jax.Array:
    """Return the codes of float32 values as `jq.quantize` rounds them; codes of less than 8 bits as int8."""
    if grid.offset is not None:
        x = x - grid.offset
    if spec.codebook is not None:
        return spec.codebook.encode(divide_by_scale(x, grid.scale, dtypes.FLOAT32))
    if spec.ties != "even":
        return encode_ties_toward_zero(divide_by_scale(x, grid.scale, dtypes.FLOAT32))
    if spec.dtype in dtypes.SMALL_FLOATS:
        return quantize_affine(x, grid.scale, None, _EACH, spec.dtype, dtypes.FLOAT32)
    # A loop that writes one row after the other must not share bytes between codes.
    wide = np.dtype(jnp.int8) if dtypes.count_bits(spec.dtype) < 8 else spec.dtype
    bounds = (int(spec.bounds[0]), int(spec.bounds[1]))
    return quantize_affine(x, grid.scale, grid.zero_point, _EACH, wide, dtypes.FLOAT32, bounds=bounds)


def decode_values(codes: jax.Array, grid: Grid, spec: QuantSpec) -> jax.Array:
    """Return the float32 values of codes that `encode_values` returned."""
    if spec.codebook is not None:
        return spec.codebook.decode(codes) * grid.scale
    values = dequantize_affine(codes, grid.scale, grid.zero_point, _EACH, dtypes.FLOAT32)
    return values if grid.offset is None else values + grid.offset


def build_array(
    function: str, codes: jax.Array, layout: MatrixLayout, scales: Scales, spec: QuantSpec, dtype: np.dtype,
    stored_last: Axis | None,
) -> QuantizedArray:  # fmt: skip
    """Return the quantized array of a matrix of codes.

    Args:
        function: the public function that errors name.
        codes: [groups, inputs, outputs], as `encode_values` returns them.
        layout: the layout of the weight.
        scales: what turns the codes into values.
        spec: the spec.
        dtype: the dtype of the weight.
        stored_last: the axes that the codes hold last in memory, or None.
    """
    codes = layout.restore(codes)
    if codes.dtype != spec.carrier:
        codes = packed_codes.narrow_codes(codes, spec.carrier)
    axes = stored_last if isinstance(stored_last, tuple | list) else (stored_last,)
    order = None if stored_last is None else parts.move_axes_last(function, "stored_last", axes, codes.ndim)
    return QuantizedArray(
        codes, scales.scale, scales.zero_point, offset=scales.offset, dtype=dtype, block_size=scales.block_size,
        codebook=spec.codebook, stored_order=order, signed_scale=scales.is_signed,
        packing=parts.derive_packing(spec.dtype, codes.shape, order),
    )  # fmt: skip


def spoil_scales(scales: Scales, is_valid: jax.Array) -> Scales:
    """Return scales unchanged, or NaN if the data are not valid; see `spoil_scale`."""
    scale = scales.scale
    if isinstance(scale, QuantizedArray):
        return scales._replace(scale=scale.replace(scale=spoil_scale(jnp.asarray(scale.scale), is_valid)))
    return scales._replace(scale=spoil_scale(scale, is_valid))


def spoil_scale(scale: jax.Array, is_valid: jax.Array) -> jax.Array:
    """Return a scale unchanged, or NaN if the data are not valid, so that every value that it scales is NaN."""
    # Codes have no NaN, and under `jax.jit` no error can be raised: only the scale can tell.
    spoiled = jnp.full(scale.shape, np.nan, jnp.float32).astype(scale.dtype)
    return jnp.where(is_valid, scale, spoiled)
