"""The contraction of a float array with a quantized one, which is dequantized a piece at a time."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import _array, _dtypes, _granularity, _scheduling
from ._array import QuantizedArray
from .integer._dot_general import Role

# As in `_matmul_nbits`: dequantized weights of so many elements stay in the cache until the contraction reads them.
_CHUNK, _CHUNKS = 2**21, 16


class _Product(NamedTuple):
    """What is static in a weight-only contraction."""

    left: Role
    right: Role
    quantized: int  # 0 where lhs is, 1 where rhs is
    static: tuple[Any, Any, Any]  # of the quantized side
    precision: Any


def weight_only(lhs: Any, rhs: Any, left: Role, right: Role, precision: Any, preferred: Any) -> jax.Array:
    """Returns the float product of a quantized and a float array."""
    which = 0 if isinstance(lhs, QuantizedArray) else 1
    q, x = (lhs, rhs) if which == 0 else (rhs, lhs)
    wide = _dtypes.wider(q.dtype, x.dtype)
    parts, static = q.astype(wide).tree_flatten()
    config = _Product(left, right, which, static, precision)
    y: Any = _product(config, x.astype(wide), *parts)
    dtype = wide if preferred is None else preferred
    return y if y.dtype == dtype else y.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(config: _Product, x: jax.Array, values: jax.Array, scale: jax.Array, zero_point: Any) -> jax.Array:
    """Returns the contraction of x with what the codes stand for."""
    x, scale = jnp.asarray(x), jnp.asarray(scale)
    role = (config.left, config.right)[config.quantized]
    at_once = functools.partial(_at_once, config)
    axis = max(role.free, key=lambda a: values.shape[a], default=None)
    if axis is None or values.size <= _CHUNK or _granularity.is_placed(x) or _granularity.is_placed(values):
        return at_once(x, values, scale, zero_point)
    in_chunks = functools.partial(_in_chunks, config, axis)
    return lax.platform_dependent(x, values, scale, zero_point, cpu=in_chunks, default=at_once)


def _product_fwd(
    config: _Product, x: jax.Array, values: jax.Array, scale: jax.Array, zero_point: Any
) -> tuple[jax.Array, Any]:
    return _product(config, x, values, scale, zero_point), (x, values, scale, zero_point)


def _product_bwd(config: _Product, residuals: Any, g: jax.Array) -> tuple[Any, ...]:
    x, values, scale, zero_point = residuals
    _, pull = jax.vjp(lambda x, scale: _at_once(config, x, values, scale, zero_point), x, scale)
    dx, dscale = pull(g)
    return dx, None, dscale, None


_product.defvjp(_product_fwd, _product_bwd)


def _at_once(config: _Product, x: jax.Array, values: jax.Array, scale: jax.Array, zero_point: Any) -> jax.Array:
    q = QuantizedArray.tree_unflatten(config.static, (values, scale, zero_point))
    operands = (_array.dequantized(q), x) if config.quantized == 0 else (x, _array.dequantized(q))
    dimensions = tuple((getattr(config.left, g), getattr(config.right, g)) for g in ("contracted", "batch"))
    return lax.dot_general(*operands, dimensions, precision=config.precision)  # type: ignore[arg-type]


def _in_chunks(
    config: _Product, axis: int, x: jax.Array, values: jax.Array, scale: jax.Array, zero_point: Any
) -> jax.Array:
    q = QuantizedArray.tree_unflatten(config.static, (values, scale, zero_point))
    length = values.shape[axis]
    rows = max(_CHUNK * length // values.size, -(-length // _CHUNKS), 1)
    if q.block_size is not None:
        rows = -(-rows // q.block_size) * q.block_size
    parts: list[jax.Array] = []
    for start in range(0, length, rows):
        chunk = q[(slice(None),) * axis + (slice(start, min(start + rows, length)),)]
        if parts:  # the scale is the smallest of what has to wait
            bits = lax.bitcast_convert_type(chunk.scale, jnp.dtype(f"int{8 * chunk.scale.dtype.itemsize}"))
            bits = _scheduling.after(bits, parts[-1])
            chunk = chunk.replace(scale=lax.bitcast_convert_type(bits, chunk.scale.dtype))
        weights = lax.optimization_barrier(_array.dequantized(chunk))
        operands = (weights, x) if config.quantized == 0 else (x, weights)
        dimensions = tuple((getattr(config.left, g), getattr(config.right, g)) for g in ("contracted", "batch"))
        parts.append(lax.dot_general(*operands, dimensions, precision=config.precision))  # type: ignore[arg-type]
    role = (config.left, config.right)[config.quantized]
    ahead = 0 if config.quantized == 0 else len(config.left.free)
    return jnp.concatenate(parts, axis=len(role.batch) + ahead + role.free.index(axis))
