"""A text in a pytree: static where JAX traces, and saved with the arrays by the helpers of `checkpoint`."""

from __future__ import annotations

import dataclasses

import jax
from jax import export


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class StaticText:
    """A node without leaves that describes the arrays beside it.

    Unlike an array, it can be compared while JAX traces: two trees with different texts have different structures.

    Attributes:
        text: what is said.
    """

    text: str

    def tree_flatten(self) -> tuple[tuple[()], str]:
        """Returns no arrays, and the text."""
        return (), self.text

    @classmethod
    def tree_unflatten(cls, text: str, _: object) -> StaticText:
        """Returns what `tree_flatten` was given."""
        return cls(text)


# A program that takes converted variables can be saved by jax.export.
export.register_pytree_node_serialization(
    StaticText,
    serialized_name="jaxquant.StaticText",
    serialize_auxdata=lambda text: text.encode(),
    deserialize_auxdata=lambda data: bytes(data).decode(),
)
