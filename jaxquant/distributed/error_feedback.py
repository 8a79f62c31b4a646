"""`psum_with_error_feedback`: a quantized sum whose errors enter the next one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from . import _messages
from ._messages import find_axis_size
from .reduce import Reduction, add_messages, share_sums


def psum_with_error_feedback(
    x: Any, residual: Any, axis_name: Any, *, spec: QuantSpec, key: Any = None
) -> tuple[Any, Any]:
    """Return `psum(x + residual)`, and what its roundings have left out: the residual of the next call.

    Each device keeps the error of its own messages, and that of the sum which it quantized. With e the errors that the
    devices return, y + sum(e) = sum(x + residual), up to float32's rounding. Over many steps the sum of all y therefore
    differs from the sum of all x by the residuals of the last step only.

    Start with zeros. Where an error is NaN or infinite its residual is 0, so a step with a NaN does not spoil those
    that follow.

    The gradient of y is that of `jax.lax.psum`. The residual that is returned has none.

    Args:
        x: a pytree of floats: float32, float16 or bfloat16, of any shape.
        residual: a tree of float32 arrays of the same shapes, the device's own.
        axis_name: Static. The name of the mapped axis, or a tuple of names.
        spec: Static. How messages are quantized, with the granularity `PerTensor()` or `Blocked(-1, size)`.
        key: a key of `jax.random` to round stochastically, or None.

    Returns:
        The tree of sums, with the shapes and dtypes of x, the same on all devices; and the residuals, float32.

    Raises:
        TypeError: a leaf is no array of floats, or a residual is not float32; `spec` is no QuantSpec, or `key` no key.
        ValueError: there is no such mapped axis; the spec has another granularity; there is a key, and the spec is
            asymmetric or its dtype no integer; or a residual has another shape than x.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import distributed as jqd
        >>> x = jnp.array([[0.5, 127.0, 127.0, 127.0], [3.0, 254.0, 254.0, 254.0]])  # a row on each of two devices
        >>> add = lambda x, r: jqd.psum_with_error_feedback(x, r, "d", spec=jq.QuantSpec(jnp.int8))
        >>> y, residual = jax.vmap(add, axis_name="d", out_axes=(None, 0))(x, jnp.zeros_like(x))
        >>> y, residual  # 3.5 is 3 and a rest of 0.5; the first device also keeps the rest of the sum, 4 - 3
        (Array([  3., 381., 381., 381.], dtype=float32), Array([[ 1.5,  0. ,  0. ,  0. ],
               [-1. ,  0. ,  0. ,  0. ]], dtype=float32))

    Source: Seide et al., Interspeech 2014, section 3.2; Karimireddy et al., arXiv 1901.09847, algorithm 2.
    """
    function = "distributed.psum_with_error_feedback"
    size = find_axis_size(function, axis_name)
    _messages.check_flat_spec(function, spec, key)
    reduction = Reduction(axis_name, size, _messages.find_row_spec(spec))
    leaves, structure = jax.tree.flatten(x)
    residuals, got = jax.tree.flatten(residual)
    checks.require(got == structure, function, "residual", f"{structure}, the structure of x", got)
    sums, errors = [], []
    keys = _messages.list_keys(key, axis_name, len(leaves))
    for leaf, left, own_key in zip(leaves, residuals, keys, strict=True):
        leaf, left = _messages.read_floats(function, "x", leaf), _messages.read_floats(function, "residual", left)
        # In bfloat16 a residual would lose the very digits that it is there to keep.
        checks.check_same_dtype(function, "residual", left, dtypes.FLOAT32, "whatever the dtype of x")
        checks.check_shape(function, "residual", left, leaf.shape, "the shape of x")
        total, error = _sum_with_error(reduction, leaf, left, own_key)
        sums.append(total)
        errors.append(error)
    return structure.unflatten(sums), structure.unflatten(errors)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sum_with_error(reduction: Reduction, x: jax.Array, residual: jax.Array, key: Any) -> tuple[jax.Array, jax.Array]:
    """Return the sum of x + residual over the devices, and the new residual."""
    if not x.size:
        return lax.psum(x, reduction.axis_name), residual
    rows = _messages.split_messages(x.astype(jnp.float32) + residual, reduction.size)
    total, sent = add_messages(reduction, rows, key)
    shared, own = share_sums(reduction, total, key)
    # The error of a sum goes to the device that quantized it, into the message that was meant for itself.
    index = lax.axis_index(reduction.axis_name)
    is_own = lax.broadcasted_iota(jnp.int32, rows.shape, 0) == index
    errors = rows - sent + jnp.where(is_own, (total - own)[None], np.float32(0))
    # A NaN would stay in the residual, and in all sums from then on.
    errors = jnp.where(jnp.isfinite(errors), errors, np.float32(0))
    return _messages.join_messages(shared, x), _messages.join_messages(errors, residual)


@_sum_with_error.defjvp
def _sum_with_error_jvp(reduction: Reduction, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    dx, dresidual, _ = tangents
    y, error = _sum_with_error(reduction, *primals)
    # The residual is a correction, and constant to the derivative.
    return (y, error), (lax.psum(dx + dresidual.astype(dx.dtype), reduction.axis_name), jnp.zeros_like(error))
