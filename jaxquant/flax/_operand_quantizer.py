"""How a layer quantizes one operand: in training as a Quantizer with a gradient, in serving as a QuantizedArray."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from .._arrays.quantize import quantize
from .._arrays.quantized_array import QuantizedArray
from .._training.estimators import LSQ, LSQPlus, StraightThrough
from .._training.fake_quantize import read_parts
from .._training.quantizer import Quantizer
from .._training.rounding_vjp import RoundingConfig, make_array
from . import _observed
from ._layer_operand import LayerOperand
from .ranges import Dynamic

Parameters = tuple[jax.Array, Any]


def make_quantizer(operand: LayerOperand, x: jax.Array, parameters: Parameters | None) -> Quantizer:
    """Return the Quantizer of x.

    Args:
        operand: how to quantize x.
        x: the weights or the activations.
        parameters: the scale, and the zero point or None; None where the range is found in x.

    Returns:
        A Quantizer, whose scale is None where it is the default range of x.
    """
    spec, gradient = operand.spec, operand.source.gradient
    if parameters is None:
        assert isinstance(operand.source, Dynamic)
        if operand.source.calibrator is None:
            return Quantizer(spec, gradient=gradient)
        return Quantizer(spec, *_observed.calibrate_batch(operand, x), gradient)
    scale, zero_point = parameters
    if operand.role != "weight":
        scale, zero_point = (_observed.align_rank(operand, part, x.ndim) for part in (scale, zero_point))
        # LSQ divides its gradient by a number of elements: those of one example, whatever the batch size.
        if isinstance(gradient, LSQ | LSQPlus) and gradient.elements is None:
            gradient = dataclasses.replace(gradient, elements=_count_elements(x.shape, scale.shape))
    return Quantizer(spec, scale, zero_point, gradient)


def _count_elements(shape: tuple[int, ...], scale: tuple[int, ...]) -> int:
    """Return how many elements of one example share an entry of a scale, from the shapes of x and of the scale."""
    # The first axis is the batch, unless x is a single vector.
    example = shape[1:] if len(shape) > 1 else shape
    entries = scale[-len(example) :] if len(scale) == len(shape) and example else (1,) * len(example)
    return max(math.prod(n // max(e, 1) for n, e in zip(example, entries, strict=True)), 1)


def quantize_operand(
    operand: LayerOperand, x: jax.Array, parameters: Parameters | None, stored_axes: Sequence[int] = ()
) -> QuantizedArray:
    """Return x with the codes that a contraction computes from `make_quantizer` of the same arguments.

    The codes hold the `stored_axes` last in memory.
    """
    if parameters is None and isinstance(operand.source, Dynamic) and operand.source.calibrator is None:
        return quantize(x, operand.spec, stored_last=stored_axes or None)
    q = encode_operand(operand.role, make_quantizer(operand, x, parameters), x)
    return q.store_last(*stored_axes) if stored_axes else q


def encode_operand(role: str, quantizer: Quantizer, x: jax.Array) -> QuantizedArray:
    """Return the codes that a contraction computes from x and a Quantizer; they have no gradient."""
    spec = quantizer.spec
    if quantizer.scale is None:
        return quantize(x, spec)
    # `check_servable` rejects a scale that cannot be served.
    labels = (role, f"{role}.scale", f"{role}.zero_point")
    x, scale, zero_point = read_parts("quantize", labels, x, quantizer.scale, quantizer.zero_point, spec)
    return jax.lax.stop_gradient(make_array(RoundingConfig(spec, StraightThrough()), x, scale, zero_point, None))
