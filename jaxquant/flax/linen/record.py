"""The record that a layer leaves in its variables, from which `convert` finds it without running the module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import serialization, traverse_util
from flax.core import FrozenDict

from ..._arrays.quantized_array import QuantizedArray
from ..._arrays.static_text import StaticText
from .._layer_operand import LayerOperand

NAME = "layer"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Record:
    """How a layer quantizes: an entry of the collection "ranges" that holds no arrays.

    Attributes:
        weight: how the weights are quantized.
        activation: how the activations are quantized, or None.
        kernel: the name of the weights in "params", next to the submodule that holds this record.
        shape: the shape of the weights, without the axes of `nn.scan` and `nn.vmap`.
        dtype: the dtype of the weights.
        is_ready: whether the layer around the submodule takes converted weights.
        attention: the class name of flax's attention layer that made the layer, or None.
    """

    weight: LayerOperand
    activation: LayerOperand | None
    kernel: str
    shape: tuple[int, ...]
    dtype: Any
    is_ready: bool
    attention: str | None = None


Path = tuple[str, ...]


def find_layers(ranges: Any) -> dict[Path, Mapping[str, Any]]:
    """Return the variables of each quantized layer in the collection "ranges", by path. Each has a Record."""
    if not isinstance(ranges, dict | FrozenDict):
        return {}
    # Only the modules above a layer are flattened; the entries of the layer stay together.
    nodes: dict[Path, Any] = traverse_util.flatten_dict(ranges, is_leaf=lambda _, node: _has_record(node))
    return {path: node for path, node in nodes.items() if _has_record(node)}


def _has_record(node: Any) -> bool:
    """Return whether a node of the collection "ranges" is that of a quantized layer."""
    return isinstance(node, Mapping) and isinstance(node.get(NAME), Record)


def find_scales(scales: Any) -> dict[Path, Any]:
    """Return the variables in the collection "scales", by path and name."""
    return traverse_util.flatten_dict(scales) if isinstance(scales, dict | FrozenDict) else {}


def join_path(path: Path) -> str:
    """Return the path of the layer around a submodule with a record, for errors."""
    return "/".join(path[:-1]) or path[-1]


def _get_array_state(q: QuantizedArray) -> dict[str, Any]:
    """Return the arrays of a QuantizedArray as a state dict."""
    parts = {"codes": q.codes, "scale": q.scale, "zero_point": q.zero_point}
    return {name: serialization.to_state_dict(part) for name, part in parts.items() if part is not None}


def _restore_array(q: QuantizedArray, state: dict[str, Any]) -> QuantizedArray:
    """Return a QuantizedArray with the arrays of a state dict."""
    restored = {}
    for name, part in {"codes": q.codes, "scale": q.scale, "zero_point": q.zero_point}.items():
        if part is not None:
            restored[name] = serialization.from_state_dict(part, state[name], name=name)
    return q.replace(**restored)


# flax.serialization knows nested dicts of arrays; every other type must be registered.
serialization.register_serialization_state(QuantizedArray, _get_array_state, _restore_array)
serialization.register_serialization_state(Record, lambda _: {}, lambda record, _: record)
serialization.register_serialization_state(
    StaticText, lambda node: {"text": node.text}, lambda node, state: StaticText(state.get("text", node.text))
)
