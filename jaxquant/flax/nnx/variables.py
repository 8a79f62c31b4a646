"""The NNX variables of quantized layers: ranges, learned scales, and codes of kernels with their partitioning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..._arrays.parts import StoredOrder
from ..._arrays.quantized_array import QuantizedArray
from .. import _converted


class Ranges(nnx.Variable):
    """The state of the calibrator of a layer's activations; in a converted layer, their scale or zero point."""


class Scale(nnx.Variable):
    """A learned scale or zero point. To train it, make the optimizer with `wrt=nnx.Any(nnx.Param, qnnx.Scale)`."""


class Codes(nnx.Variable):
    """A converted kernel, which is a QuantizedArray; if the kernel is partitioned, one of its arrays."""


class Partitioned(nnx.Pytree):
    """A converted kernel that is partitioned: its codes and its scale are variables, each with its own sharding.

    Attributes:
        codes: a `Codes` variable with an array, the codes in their stored order.
        scale: a `Codes` variable with an array.
        zero_point: a `Codes` variable with an array, or None.
        static: Static. The attributes of the QuantizedArray that are not arrays.
    """

    def __init__(self, q: QuantizedArray, box: Callable[[jax.Array, StoredOrder], nnx.Variable]) -> None:
        (codes, scale, zero_point), self.static = q.tree_flatten()
        self.codes, self.scale = box(codes, q.stored_order), box(scale, None)
        # `nnx.data` marks None as a missing variable and not as a static value.
        self.zero_point = nnx.data(None if zero_point is None else box(zero_point, None))

    def get_value(self) -> QuantizedArray:
        """Return the QuantizedArray."""
        zero_point = None if self.zero_point is None else self.zero_point[...]
        return QuantizedArray.tree_unflatten(self.static, (self.codes[...], self.scale[...], zero_point))

    def __getitem__(self, index: Any) -> QuantizedArray:
        """Return the QuantizedArray at an index; `...` returns all of it, as for a variable."""
        return self.get_value()[index]


def find_partitioning(
    kernel: nnx.Variable, shape: tuple[int, ...], depth: int, order: StoredOrder = None
) -> dict[str, Any]:
    """Return the metadata that partitions a part of a kernel like the kernel, or {} if the kernel is not partitioned.

    Args:
        kernel: a variable with perhaps an `out_sharding`.
        shape: the shape of the stored codes, of the scale or of the zero point.
        depth: the number of leading axes that stack layers.
        order: the stored order of the codes; None for the others.
    """
    out_sharding = kernel.get_metadata("out_sharding", None)
    names = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    if not isinstance(names, tuple | PartitionSpec) or not len(names):
        return {}
    part_names = _converted.find_part_names(tuple(names), shape, depth, order)
    part_sharding: Any = PartitionSpec(*part_names)
    if isinstance(out_sharding, NamedSharding):
        part_sharding = NamedSharding(out_sharding.mesh, part_sharding)
    # Do not test for tuple, of which PartitionSpec may be a subclass. A plain tuple stays a plain tuple.
    elif not isinstance(names, PartitionSpec):
        part_sharding = part_names
    metadata = {name: kernel.get_metadata(name, None) for name in ("mesh", "sharding_rules")}
    return {"out_sharding": part_sharding, **{name: value for name, value in metadata.items() if value is not None}}
