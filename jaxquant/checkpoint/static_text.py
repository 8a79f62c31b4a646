"""A string as a node of a pytree: static under tracing, and saved by the functions of `checkpoint`."""

from __future__ import annotations

import dataclasses

import jax
from jax import export


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class StaticText:
    """A node of a pytree without leaves, which describes the other arrays of the tree.

    Unlike an array, the text is known under tracing: trees with different texts have different structures.

    Attributes:
        text: the description.
    """

    text: str

    def tree_flatten(self) -> tuple[tuple[()], str]:
        """Return no arrays, and the text as the static part."""
        return (), self.text

    @classmethod
    def tree_unflatten(cls, text: str, _: object) -> StaticText:
        """Return the node that was flattened."""
        return cls(text)


# This lets `jax.export` save a program that takes converted variables.
export.register_pytree_node_serialization(
    StaticText,
    serialized_name="jaxquant.StaticText",
    serialize_auxdata=lambda text: text.encode(),
    deserialize_auxdata=lambda data: bytes(data).decode(),
)
