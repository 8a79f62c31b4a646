"""The contraction of a float array with a quantized one, which is dequantized a piece at a time."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import indexing, quantized_array
from .._arrays.quantized_array import QuantizedArray
from .._core import barriers, dtypes, rounding, sharding
from ..integer.dot_general import Role

# As in `_matmul_nbits`: dequantized weights of so many elements stay in the cache until the contraction reads them.
_CHUNK, _CHUNKS = 2**21, 16


class _Product(NamedTuple):
    """What is static in a weight-only contraction."""

    left: Role
    right: Role
    quantized: int  # 0 where lhs is, 1 where rhs is
    static: tuple[Any, Any, Any]  # of the quantized side
    precision: Any
    out_sharding: Any


def contract_weight_only(
    lhs: Any, rhs: Any, left: Role, right: Role, precision: Any, preferred: Any, out_sharding: Any
) -> jax.Array:
    """Returns the float product of a quantized and a float array."""
    which = 0 if isinstance(lhs, QuantizedArray) else 1
    q: Any = (lhs, rhs)[which]
    x: Any = (lhs, rhs)[1 - which]
    wide = dtypes.find_wider(q.dtype, x.dtype)
    parts, static = q.astype(wide).tree_flatten()
    config = _Product(left, right, which, static, precision, out_sharding)
    axis = _plan_chunks(config, x, parts[0])
    # A rule of one's own stands in the way of forward mode, and makes gradients that nobody asked for.
    y: Any = (
        _contract_at_once(config, x.astype(wide), *parts) if axis is None else _multiply(config, x.astype(wide), *parts)
    )
    dtype = wide if preferred is None else preferred
    return rounding.round_to_dtype(y, dtype).astype(dtype)


def _plan_chunks(config: _Product, x: jax.Array, values: jax.Array) -> int | None:
    """Returns the dimension of the codes along which they are dequantized a piece at a time, or None."""
    role = (config.left, config.right)[config.quantized]
    axis = max(role.free, key=lambda a: values.shape[a], default=None)
    is_placed = config.out_sharding is not None or sharding.is_placed(x) or sharding.is_placed(values)
    whole = values.size <= _CHUNK or is_placed
    return None if whole else axis


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(config: _Product, x: jax.Array, values: jax.Array, scale: jax.Array, zero_point: Any) -> jax.Array:
    """Returns the float32 contraction of x with what the codes stand for, dequantized a piece at a time on a CPU."""
    x, scale = jnp.asarray(x), jnp.asarray(scale)
    at_once = functools.partial(_contract_at_once, config)
    axis = _plan_chunks(config, x, values)
    assert axis is not None
    in_chunks = functools.partial(_contract_in_chunks, config, axis)
    return lax.platform_dependent(x, values, scale, zero_point, cpu=in_chunks, default=at_once)


def _multiply_fwd(
    config: _Product, x: jax.Array, values: jax.Array, scale: jax.Array, zero_point: Any
) -> tuple[jax.Array, Any]:
    return _multiply(config, x, values, scale, zero_point), (x, values, scale, zero_point)


def _multiply_bwd(config: _Product, residuals: Any, g: jax.Array) -> tuple[Any, ...]:
    x, values, scale, zero_point = residuals
    _, pull = jax.vjp(lambda x, scale: _contract_at_once(config, x, values, scale, zero_point), x, scale)
    dx, dscale = pull(g)
    return dx, None, dscale, None


_multiply.defvjp(_multiply_fwd, _multiply_bwd)


def _contract_at_once(
    config: _Product, x: jax.Array, values: jax.Array, scale: jax.Array, zero_point: Any
) -> jax.Array:
    q = QuantizedArray.tree_unflatten(config.static, (values, scale, zero_point))
    operands = (
        (quantized_array.dequantize_checked(q), x)
        if config.quantized == 0
        else (x, quantized_array.dequantize_checked(q))
    )
    return _contract_piece(config, *operands)


def _contract_piece(config: _Product, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Returns the product in float32, whatever its operands are."""
    left, right = config.left, config.right
    dimensions = ((left.contracted, right.contracted), (left.batch, right.batch))
    return lax.dot_general(lhs, rhs, dimensions, config.precision, jnp.float32, out_sharding=config.out_sharding)


def _contract_in_chunks(
    config: _Product, axis: int, x: jax.Array, values: jax.Array, scale: jax.Array, zero_point: Any
) -> jax.Array:
    q = QuantizedArray.tree_unflatten(config.static, (values, scale, zero_point))
    length = values.shape[axis]
    rows = max(_CHUNK * length // values.size, -(-length // _CHUNKS), 1)
    if q.block_size is not None:
        rows = -(-rows // q.block_size) * q.block_size
    parts: list[jax.Array] = []
    for start in range(0, length, rows):
        chunk = indexing.index_array(q, (slice(None),) * axis + (slice(start, min(start + rows, length)),))
        if parts:  # the scale is the smallest of what has to wait
            bits = lax.bitcast_convert_type(chunk.scale, jnp.dtype(f"int{8 * chunk.scale.dtype.itemsize}"))
            bits = barriers.wait_for(bits, parts[-1])
            chunk = chunk.replace(scale=lax.bitcast_convert_type(bits, chunk.scale.dtype))
        weights = lax.optimization_barrier(quantized_array.dequantize_checked(chunk))
        operands = (weights, x) if config.quantized == 0 else (x, weights)
        parts.append(_contract_piece(config, *operands))
    role = (config.left, config.right)[config.quantized]
    ahead = 0 if config.quantized == 0 else len(config.left.free)
    return jnp.concatenate(parts, axis=len(role.batch) + ahead + role.free.index(axis))
