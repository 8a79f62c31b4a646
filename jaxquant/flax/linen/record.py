"""What a layer says of itself in its variables, so that `convert` finds it without running the module."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import serialization

from ..._arrays.quantized_array import QuantizedArray
from ..._arrays.static_text import StaticText
from .._layer_operand import Site

NAME = "layer"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Record:
    """A leaf of a collection without arrays.

    Attributes:
        weight: the site of the weights.
        activation: that of the activations, or None.
        kernel: the name of the weights in "params", beside the submodule that holds this.
        shape: that of the weights, where no `nn.scan` or `nn.vmap` stacks them.
        dtype: of the weights.
        is_ready: whether the layer around it takes converted weights.
        attention: the class of the attention layer that this layer is a part of, where flax's own made it.
    """

    weight: Site
    activation: Site | None
    kernel: str
    shape: tuple[int, ...]
    dtype: Any
    is_ready: bool
    attention: str | None = None


def _get_array_state(q: QuantizedArray) -> dict[str, Any]:
    parts = {"codes": q.codes, "scale": q.scale, "zero_point": q.zero_point}
    return {name: serialization.to_state_dict(part) for name, part in parts.items() if part is not None}


def _restore_array(q: QuantizedArray, state: dict[str, Any]) -> QuantizedArray:
    parts = {"codes": q.codes, "scale": q.scale, "zero_point": q.zero_point}
    restored = {
        name: serialization.from_state_dict(part, state[name], name=name) for name, part in parts.items()
        if part is not None
    }  # fmt: skip
    return q.replace(**restored)


# flax.serialization takes dicts of arrays apart, and nothing else that it is not told of.
serialization.register_serialization_state(QuantizedArray, _get_array_state, _restore_array)
serialization.register_serialization_state(Record, lambda _: {}, lambda record, _: record)
serialization.register_serialization_state(
    StaticText, lambda node: {"text": node.text}, lambda node, state: StaticText(state.get("text", node.text))
)
