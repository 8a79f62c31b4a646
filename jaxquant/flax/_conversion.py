"""Conversion of kernels and ranges to their form for serving, and the checks of converted variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._arrays import quantize, scale_from_range
from .._arrays.parts import StoredOrder, derive_permutation
from .._arrays.quantized_array import QuantizedArray
from .._core import checks, dtypes
from .._training.range_sources import Dynamic, Learned, Static
from . import _operand_ranges
from ._operand_ranges import RangeState, quantize_operand
from ._quantization import LayerOperand

# The names of the mesh axes along which one axis of an array is partitioned.
MeshAxes = str | tuple[str, ...] | None


def check_kernel(weight: LayerOperand, kernel: QuantizedArray) -> None:
    """Check that a converted kernel has the codes, the scales and the blocks of the layer's weight_spec."""
    spec, argument = weight.spec, weight.argument
    expected = f"codes of {spec.dtype}, the dtype of the layer's spec"
    checks.require_type(kernel.format == spec.dtype, "flax", argument, expected, kernel.format)
    expected = f"an offset: {spec.offset}, a quantized scale: {spec.scale_spec is not None}, as in the layer's spec"
    forms = kernel.offset is not None, isinstance(kernel.scale, QuantizedArray)
    checks.require(forms == (spec.offset, spec.scale_spec is not None), "flax", argument, expected, kernel)
    # Offsets and scales of scales have no part in these two shapes.
    spec = dataclasses.replace(spec, offset=False, scale_spec=None)
    shape = scale_from_range.derive_shapes("flax", spec, kernel.shape)[0]
    expected = f"scales of shape {shape}, the shape for the layer's spec"
    checks.require(kernel.scale.shape == shape, "flax", argument, expected, f"shape {kernel.scale.shape}")
    block_size = scale_from_range.derive_stored_block_size("flax", spec, kernel.shape)
    expected = f"block_size={block_size}"
    checks.require(kernel.block_size == block_size, "flax", argument, expected, kernel.block_size)


def check_servable(function: str, operand: LayerOperand, scale: jax.Array | QuantizedArray) -> None:
    """Raise ContractValueError unless a known scale is finite and, if it was learned, positive."""
    if isinstance(scale, QuantizedArray):
        scale = scale.dequantize()
    if checks.is_traced(scale):
        return
    values = np.asarray(dtypes.scale_as_float32(scale))
    argument = f"scale of the {operand.role}"
    checks.require(bool(np.isfinite(values).all()), function, argument, "finite numbers", "NaN or an infinity")
    # `read_learned` replaces a scale of 0 by the least scale, so that is the value to look for.
    least = float(values.min(initial=1))
    holds = least > float(scale_from_range.read_least_scale(scale.dtype)) or not isinstance(operand.source, Learned)
    checks.require(holds, function, argument, "a positive scale (training drove it to 0)", least)


def count_leading_axes(
    function: str, argument: str, kernel: jax.Array, shape: tuple[int, ...], transforms: str
) -> int:  # fmt: skip
    """Return how many axes stack the kernels of one layer, and check the shape after them.

    Args:
        function: the name of the public function, for errors.
        argument: the name of the kernel, for errors.
        kernel: kernels with perhaps more axes in front.
        shape: the shape of one layer's kernel.
        transforms: the names of the transformations that stack kernels, for errors.
    """
    depth = kernel.ndim - len(shape)
    fits = depth >= 0 and tuple(kernel.shape[depth:]) == tuple(shape)
    expected = f"shape {shape}, with the axes of {transforms} in front of it"
    checks.require(fits, function, argument, expected, f"shape {tuple(kernel.shape)}")
    return depth


def quantize_kernel(
    function: str, weight: LayerOperand, kernel: jax.Array, parts: tuple[jax.Array, ...], depth: int,
    stored_axes: Sequence[int],
) -> QuantizedArray:  # fmt: skip
    """Return the codes of a kernel and check its scale.

    Args:
        function: the name of the public function, for errors.
        weight: how to quantize the kernel.
        kernel: float kernels with `depth` axes in front.
        parts: the learned scale and zero point, or () where the range is found in the kernel.
        depth: the number of axes that stack kernels.
        stored_axes: the axes of the kernel, counted from the back, that the codes hold last in memory.
    """

    # Inside vmap the kernel and the learned scale have the ranks that one layer has.
    def quantize_one(kernel: jax.Array, parts: tuple[jax.Array, ...]) -> QuantizedArray:
        if isinstance(weight.source, Dynamic) and weight.source.calibrator is None:
            return quantize.quantize_kernel(kernel, weight.spec, stored_axes)
        learned = _operand_ranges.read_learned(weight, parts) if parts else None
        return quantize_operand(weight, kernel, learned, stored_axes)

    q = _map_leading_axes(quantize_one, depth)(kernel, parts)
    check_servable(function, weight, q.scale)
    return q


def compute_constants(
    function: str,
    activation: LayerOperand,
    values: RangeState | tuple[jax.Array, ...],
    depth: int,
    shape: tuple[int, ...] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the scale and the zero point that a converted layer quantizes its activations with.

    Args:
        function: the name of the public function, for errors.
        activation: how to quantize the activations; its range is static or learned.
        values: the calibrator's state with its batch count, or the learned scale and zero point.
        depth: the number of axes that stack layers.
        shape: as in `_operand_ranges.finalize_state`.

    Returns:
        The scale, and the zero point as a code or None.
    """

    def compute_one(values: Any) -> tuple[jax.Array, jax.Array | None]:
        if isinstance(activation.source, Static):
            return _operand_ranges.finalize_state(activation, values, shape)
        return _operand_ranges.read_learned(activation, values)

    scale, zero_point = _map_leading_axes(compute_one, depth)(values)
    check_servable(function, activation, scale)
    # A zero point is learned as a float; the converted layer adds it to codes.
    if zero_point is not None and zero_point.dtype != activation.spec.carrier:
        zero_point = _operand_ranges.round_learned_zero_point(activation, zero_point)
    return scale, zero_point


def match_part_names(
    names: Sequence[MeshAxes], shape: tuple[int, ...], depth: int = 0, order: StoredOrder = None
) -> tuple[MeshAxes, ...]:
    """Return the mesh axes along which the codes, the scale or the zero point of a kernel are partitioned.

    Args:
        names: the mesh axes of the kernel, perhaps fewer than it has axes.
        shape: the shape of the stored codes, of the scale or of the zero point.
        depth: the number of leading axes that stack layers; they are partitioned even where they have length 1.
        order: the stored order of the codes; None for a scale or zero point.
    """
    padded = (*names, *(None,) * (len(shape) - len(names)))
    padded = tuple(padded[axis] for axis in derive_permutation(order, len(shape)))
    # Along an axis of length 1 there is nothing to partition.
    return tuple(
        name if size != 1 or axis < depth else None for axis, (name, size) in enumerate(zip(padded, shape, strict=True))
    )


def _map_leading_axes(function: Callable[..., Any], depth: int) -> Callable[..., Any]:
    """Return a function vectorized over this many leading axes."""
    # One vmap for each axis, because nn.vmap inside nn.scan stacks kernels twice.
    for _ in range(depth):
        function = jax.vmap(function)
    return function
