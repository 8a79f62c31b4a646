"""The sizes of a transformer and of a mesh, and the formats that a plan compares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._arrays.quantize import quantize
from ..._arrays.spec import QuantSpec
from ..._core import checks
from ..._core.granularity import Blocked, PerToken


class Sizes(NamedTuple):
    """The sizes of a decoder with grouped queries and a gated feed-forward network.

    Attributes:
        layers: the number of layers.
        width: the number of features between layers.
        heads: the number of query heads.
        kv_heads: the number of key and value heads.
        hidden: the number of hidden features of the feed-forward network.
        vocabulary: the number of tokens.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        """The number of features of a head."""
        return self.width // self.heads


# The sizes of Llama 2 7B and 70B (arXiv 2307.09288) and of Llama 3.1 405B (arXiv 2407.21783, table 3).
PRESETS = {
    "7B": Sizes(32, 4096, 32, 32, 11008, 32000),
    "70B": Sizes(80, 8192, 64, 8, 28672, 32000),
    "400B": Sizes(126, 16384, 128, 8, 53248, 128256),
}


class Format(NamedTuple):
    """In what weights, gradients, activations and the cache are stored, and in what they travel.

    Attributes:
        name: the name of the column.
        dtype: the dtype of activations and of what is not quantized.
        weights: the dtype of the codes of weights, where they are stored for decoding and when they travel, with a
            scale for each 128 elements; None means that they are floats.
        traffic: how gradients and activations are quantized when they travel; None is `dtype`.
        cache: how keys and values are quantized; None is `dtype`.
        moments: how Adam's moments are stored; None is float32.
    """

    name: str
    dtype: Any
    weights: Any = None
    traffic: QuantSpec | None = None
    cache: QuantSpec | None = None
    moments: QuantSpec | None = None


_BLOCK = 128
_BYTES = QuantSpec(jnp.int8, Blocked(-1, _BLOCK))
_MOMENTS = QuantSpec(jnp.uint8, Blocked(-1, 256), symmetric=True)
FORMATS = {
    form.name: form
    for form in (
        Format("float32", jnp.float32),
        Format("bfloat16", jnp.bfloat16),
        Format("int8", jnp.bfloat16, jnp.int8, _BYTES, QuantSpec(jnp.int8, PerToken()), _MOMENTS),
        # Gradients and activations lose too much in 4 bits.
        Format("int4", jnp.bfloat16, jnp.int4, _BYTES, QuantSpec(jnp.int4, PerToken()), _MOMENTS),
    )
}


def check_sizes(sizes: Sizes, mesh: Mapping[str, int], batch: int, sequence: int) -> None:
    """Raise unless the mesh divides the sizes."""
    function = "distributed.plan"
    names = ("data", "model")
    checks.require(set(mesh) == set(names), function, "mesh", "the axes data and model", dict(mesh))
    for argument, value in {**sizes._asdict(), **mesh, "batch": batch, "sequence": sequence}.items():
        checks.require(value > 0, function, argument, "a positive int", value)
    divisors = {
        "width": math.lcm(sizes.heads, mesh["data"]),
        "heads": math.lcm(sizes.kv_heads, mesh["model"]),
        "kv_heads": mesh["model"],
        "hidden": mesh["model"],
        "vocabulary": mesh["model"],
    }
    for name, divisor in divisors.items():
        value = getattr(sizes, name)
        checks.require(value % divisor == 0, function, name, f"a multiple of {divisor}", value)
    checks.require(batch % mesh["data"] == 0, function, "batch", f"a multiple of {mesh['data']}, the axis data", batch)


def list_matrices(sizes: Sizes) -> dict[str, tuple[tuple[int, int], int]]:
    """Return the shape of each matrix of a layer, and the dimension that the axis `model` cuts."""
    keys = sizes.kv_heads * sizes.head_dim
    return {
        "query": ((sizes.width, sizes.width), 1),
        "key": ((sizes.width, keys), 1),
        "value": ((sizes.width, keys), 1),
        "out": ((sizes.width, sizes.width), 0),
        "gate": ((sizes.width, sizes.hidden), 1),
        "up": ((sizes.width, sizes.hidden), 1),
        "down": ((sizes.hidden, sizes.width), 0),
    }


def make_weight_spec(form: Format, axis: int) -> QuantSpec | None:
    """Return how a matrix is quantized, with blocks along an axis; None if the format holds floats."""
    return None if form.weights is None else QuantSpec(form.weights, Blocked(axis, _BLOCK))


def make_shape(shape: tuple[int, ...], dtype: Any, spec: QuantSpec | None) -> Any:
    """Return the shape of an array of floats or, with a spec, of its codes and scales."""
    struct = jax.ShapeDtypeStruct(shape, dtype)
    return struct if spec is None else jax.eval_shape(lambda x: quantize(x, spec), struct)
