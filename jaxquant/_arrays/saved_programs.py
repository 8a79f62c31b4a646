"""Trees of this library in programs that `jax.export` saves: the static part of a tree as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import export

from .._core.granularity import Blocked, Choice, PerAxis, PerFeature, PerTensor, PerToken
from .spec import Codebook, QuantSpec

_GRANULARITIES: dict[str, type] = {kind.__name__: kind for kind in (PerTensor, PerAxis, PerToken, PerFeature, Blocked)}


def register_tree(
    kind: type, encode: Callable[[Any], Any] = lambda _: None, decode: Callable[[Any], Any] = lambda _: ()
) -> None:
    """Let `jax.export` save a program that takes or returns a tree of this kind.

    Args:
        kind: a class that is registered as a pytree node.
        encode: returns the static part of the tree as what `json` writes. By default there is none.
        decode: returns the static part of what `encode` returned.
    """
    export.register_pytree_node_serialization(
        kind, serialized_name=f"jaxquant.{kind.__name__}",
        serialize_auxdata=lambda static: json.dumps(encode(static)).encode(),
        deserialize_auxdata=lambda text: decode(json.loads(text)),
    )  # fmt: skip


def encode_spec(spec: QuantSpec) -> dict[str, Any]:
    """Return a spec as what `json` writes: all its attributes by name."""
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    is_codebook, inner = isinstance(spec.dtype, Codebook), spec.scale_spec
    return fields | {
        "dtype": {"name": spec.dtype.name, "levels": spec.dtype.levels} if is_codebook else spec.dtype.name,
        "granularity": _encode_granularity(spec.granularity),
        "zero_point_granularity": _encode_granularity(spec.zero_point_granularity),
        "scale_dtype": np.dtype(spec.scale_dtype).name,
        "scale_spec": None if inner is None else encode_spec(inner),
    }


def decode_spec(fields: dict[str, Any]) -> QuantSpec:
    """Return the spec that `encode_spec` described."""
    dtype, inner = fields["dtype"], fields["scale_spec"]
    changes = {
        "dtype": Codebook(dtype["name"], tuple(dtype["levels"])) if isinstance(dtype, dict) else dtype,
        "granularity": _decode_granularity(fields["granularity"]),
        "zero_point_granularity": _decode_granularity(fields["zero_point_granularity"]),
        "scale_spec": None if inner is None else decode_spec(inner),
    }
    return QuantSpec(**{**fields, **changes})


def _encode_granularity(granularity: Choice | None) -> list[Any] | None:
    return None if granularity is None else [type(granularity).__name__, dataclasses.asdict(granularity)]


def _decode_granularity(saved: list[Any] | None) -> Any:
    if saved is None:
        return None
    name, fields = saved
    # JSON has no tuples: an axis and a size may be one.
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return _GRANULARITIES[name](**values)
