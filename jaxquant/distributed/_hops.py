"""The two hops of a quantized sum: each device adds the messages that it gets, and shares the sum with all."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays.quantized_array import dequantize_checked
from .._arrays.spec import QuantSpec
from . import _messages
from ._axis_names import find_gathered_type
from ._wire import move_array


class Reduction(NamedTuple):
    """The static part of a sum over devices.

    Attributes:
        axis_name: the mapped axis or axes.
        size: the number of devices along them.
        spec: how the messages are quantized; `find_row_spec` has adapted it.
        is_mean: whether the sum is divided by the number of devices.
    """

    axis_name: Any
    size: int
    spec: QuantSpec
    is_mean: bool = False


class Scatter(NamedTuple):
    """The static part of a `psum_scatter`.

    Attributes:
        reduction: the sum.
        dimension: the dimension that is cut into slices.
        tiled: whether the slices keep that dimension.
    """

    reduction: Reduction
    dimension: int
    tiled: bool


def add_messages(reduction: Reduction, rows: jax.Array, key: Any) -> tuple[jax.Array, jax.Array]:
    """Return the sum of the messages that all devices send to this one, and what they lose of those that it sends.

    Args:
        reduction: Static. The sum.
        rows: float32, a message for each device.
        key: a key of this device, or None.

    Returns:
        The sum, float32, of the shape of a row; and the values that the codes of `rows` represent.
    """
    # Slices are exchanged before they are added: messages with different scales cannot be added as codes on their way.
    q = _messages.encode(rows, reduction.spec, _derive_key(key, 0))
    received = move_array(q, lambda part: lax.all_to_all(part, reduction.axis_name, 0, 0, tiled=True), rows=1)
    return jnp.sum(dequantize_checked(received), axis=0), dequantize_checked(q)


def share_sums(reduction: Reduction, total: jax.Array, key: Any) -> tuple[jax.Array, jax.Array]:
    """Return the sums of all devices, one in each row, and the values of the codes of this device's own.

    Args:
        reduction: Static. The sum.
        total: float32, of the shape of a message.
        key: a key of this device, or None.
    """
    # The own sum is read from its codes as well, or the devices would not hold the same bits.
    q = _messages.encode(total[None], reduction.spec, _derive_key(key, 1))
    to = find_gathered_type(reduction.axis_name)
    gathered = move_array(q, lambda part: lax.all_gather(part, reduction.axis_name, tiled=True, to=to), rows=1)
    return dequantize_checked(gathered), dequantize_checked(q)[0]


def scatter_sums(scatter: Scatter, x: jax.Array, key: Any) -> jax.Array:
    """Return the slice of the sum of x over the devices that belongs to this device; it has no derivative."""
    size, d = scatter.reduction.size, scatter.dimension
    # One row for each device: the slices along the dimension, flattened.
    pieces = jnp.moveaxis(x.reshape(*x.shape[:d], size, x.shape[d] // size, *x.shape[d + 1 :]), d, 0)
    total, _ = add_messages(scatter.reduction, pieces.reshape(size, -1).astype(jnp.float32), key)
    part = total.reshape(pieces.shape[1:]).astype(x.dtype)
    return part if scatter.tiled else jnp.squeeze(part, d)


def _derive_key(key: Any, hop: int) -> Any:
    # With one key for both hops, the sum would be rounded by the random numbers of its own terms.
    return None if key is None else jax.random.fold_in(key, hop)
