"""Round to nearest with compressed-tensors' arithmetic, and the configurations of models that are quantized so.

The scale of a group is its largest magnitude divided by half the number of codes, such as 7.5, so that the largest
weight may saturate. Each operation is rounded to the dtype of the weights, and ties go to the even code.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..._arrays.quantized_array import QuantizedArray
from . import family
from .family import Settings, refuse

_LARGEST_FLOAT8 = 448.0


@dataclasses.dataclass(frozen=True)
class Target:
    """What a model becomes.

    Attributes:
        format: of compressed-tensors, how codes are stored.
        weights: the settings of the weights.
        activations: the settings of the activations, which the file only tells, or None for floats.
    """

    format: str
    weights: Settings
    activations: Settings | None = None

    def make_config(self, ignored: list[str]) -> dict[str, Any]:
        """Return the quantization_config of a model whose modules `ignored` stay in floats."""
        group = {"targets": ["Linear"], "weights": dict(self.weights)}
        group["input_activations"] = None if self.activations is None else dict(self.activations)
        group["output_activations"] = None
        return {
            "quant_method": "compressed-tensors", "format": self.format, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ignored,
        }  # fmt: skip


_TOKENS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
TARGETS: Mapping[str, Target] = {
    "compressed-tensors-int4": Target(
        "pack-quantized",
        {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False},
    ),
    "compressed-tensors-int8": Target(
        "int-quantized",
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
        {"type": "int", **_TOKENS},
    ),
    "compressed-tensors-fp8": Target(
        "float-quantized",
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
        {"type": "float", **_TOKENS},
    ),
}


def round_to_nearest(name: str, weights: np.ndarray, settings: Settings) -> QuantizedArray:
    """Return weights as compressed-tensors quantizes them.

    Args:
        name: the name that errors have.
        weights: float32, float16 or bfloat16, (..., outputs, inputs).
        settings: the settings of the weights: symmetric, in groups or with a scale for each output.

    Raises:
        CheckpointError: the groups do not divide the inputs, or a weight is NaN or infinite.
    """
    dtype, inputs = weights.dtype, weights.shape[-1]
    if dtype not in family.FLOATS or weights.ndim < 2 or not inputs:
        expected = "a matrix of float32, float16 or bfloat16 with inputs"
        raise refuse(name, expected, f"{dtype}{list(weights.shape)}")
    size = settings["group_size"] if settings["strategy"] == "group" else inputs
    if inputs % size:
        raise refuse(name, f"inputs that groups of {size} divide", inputs)
    groups = weights.reshape(*weights.shape[:-1], inputs // size, size).astype(np.float32)
    if not np.isfinite(groups).all():
        raise refuse(name, "finite weights", "NaN or infinity")
    is_float = settings["type"] == "float"
    low, high = (-_LARGEST_FLOAT8, _LARGEST_FLOAT8) if is_float else _find_bounds(settings["num_bits"])
    # float32 has more than twice the bits of the 16-bit floats and two more: rounding twice is the same as once.
    reach = np.float32(_LARGEST_FLOAT8 if is_float else (high - low) / 2)
    scale = (np.abs(groups).max(axis=-1, keepdims=True) / reach).astype(dtype)
    scale = np.where(scale == 0, np.asarray(_find_epsilon(dtype), dtype), scale)
    steps = (groups / scale.astype(np.float32)).astype(dtype).astype(np.float32)
    steps = np.clip(steps, np.float32(low), np.float32(high)).reshape(weights.shape)
    codes = steps.astype(family.E4M3) if is_float else np.rint(steps).astype(np.int8)
    bits = settings["num_bits"]
    return family.make_array(codes, bits, scale[..., 0], dtype=dtype)


def _find_bounds(bits: int) -> tuple[float, float]:
    """Return the lowest and the highest code."""
    return -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1


def _find_epsilon(dtype: np.dtype) -> float:
    """Return the scale of a group of zeros: the distance from 1 to the next number of the dtype."""
    return math.ldexp(1.0, -{family.F32: 23, family.F16: 10, family.BF16: 7}[dtype])
