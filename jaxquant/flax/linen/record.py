"""The record that a layer leaves in its variables, from which `convert` finds it without running the module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import serialization, traverse_util
from flax.core import FrozenDict

from ..._arrays.quantized_array import QuantizedArray
from ...checkpoint.arrays import StaticText
from .._layer_operand import LayerOperand

NAME = "layer"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Record:
    """How a layer quantizes: an entry of the collection "ranges" that holds no arrays.

    Attributes:
        weight: how the weights are quantized, or None for a result that no layer computes.
        activation: how the activations are quantized, or None.
        kernel: the name of the weights in "params", next to the submodule that holds this record.
        shape: the shape of the weights, without the axes of `nn.scan` and `nn.vmap`.
        dtype: the dtype of the weights.
        is_ready: whether the layer around the submodule takes converted weights.
        attention: the class name of flax's attention layer that made the layer, or None.
        stored_axes: the axes of the weights, counted from the back, that converted ones hold last in memory.
        output: how the result is quantized, or None.
    """

    weight: LayerOperand | None
    activation: LayerOperand | None
    kernel: str
    shape: tuple[int, ...]
    dtype: Any
    is_ready: bool
    attention: str | None = None
    stored_axes: tuple[int, ...] = ()
    output: LayerOperand | None = None


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
    parts = {"codes": q.stored_codes, "scale": q.scale, "zero_point": q.zero_point}
    state = {name: serialization.to_state_dict(part) for name, part in parts.items() if part is not None}
    # A state dict has no static attributes. Without the order, codes could be restored in another one.
    return state if q.stored_order is None else {**state, "stored_order": np.asarray(q.stored_order, np.int8)}


def _restore_array(q: QuantizedArray, state: dict[str, Any]) -> QuantizedArray:
    """Return a QuantizedArray with the arrays of a state dict."""
    children, static = q.tree_flatten()
    restored = []
    for name, part in zip(("codes", "scale", "zero_point"), children, strict=True):
        restored.append(None if part is None else serialization.from_state_dict(part, state[name], name=name))
    # States that were saved before there were stored orders have none: their codes are in the logical order.
    saved = state.get("stored_order")
    order = None if saved is None else tuple(int(axis) for axis in saved)
    new = QuantizedArray.tree_unflatten((*static[:3], order), tuple(restored))
    return new if order == q.stored_order else new.replace(stored_order=q.stored_order)


# flax.serialization knows nested dicts of arrays; every other type must be registered.
serialization.register_serialization_state(QuantizedArray, _get_array_state, _restore_array)
serialization.register_serialization_state(Record, lambda _: {}, lambda record, _: record)
serialization.register_serialization_state(
    StaticText, lambda node: {"text": node.text}, lambda node, state: StaticText(state.get("text", node.text))
)
