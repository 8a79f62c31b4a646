"""The contraction of a float array with dequantized codes; on a CPU they are dequantized one chunk at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from .._core import barriers, dtypes

# The number of dequantized float32 weights that stay in the cache until the contraction reads them, and the largest
# number of chunks, which is limited because the program contains the operations of every chunk.
CHUNK, _CHUNKS = 2**21, 16


class Cut(NamedTuple):
    """How the weights of a contraction are cut into chunks along one dimension, which is not contracted.

    Attributes:
        length: the length of the dimension.
        width: the number of weights at each of its indices.
        divisor: a number that divides the length of every chunk but the last.
        axis: the place of the dimension in the product.
    """

    length: int
    width: int
    divisor: int
    axis: int


class WeightOnly(Protocol):
    """The parts in which weight-only contractions differ; it must be hashable, because it is a static argument."""

    def plan_cut(self, codes: jax.Array) -> Cut:
        """Return how the weights are cut into chunks."""
        ...

    def arrange_operand(self, x: jax.Array) -> Any:
        """Return the float operand in the form that `contract_chunk` takes."""
        ...

    def dequantize_chunk(
        self, codes: jax.Array, scale: jax.Array, zero_point: Any, chunk: slice, wait: Callable[[jax.Array], jax.Array]
    ) -> Any:
        """Return the dequantized weights of one chunk, with `wait` applied to its scale."""
        ...

    def contract_chunk(self, x: Any, weights: Any) -> jax.Array:
        """Return the float32 product of an arranged operand and weights."""
        ...


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def contract_in_cache(
    config: WeightOnly, x: jax.Array, codes: jax.Array, scale: jax.Array, zero_point: Any
) -> jax.Array:
    """Return the float32 contraction of x with the dequantized codes, on a CPU without all weights in memory at once.

    The cotangents of x, of the scale and of a float32 zero point are those of `contract_at_once`. Codes and integer
    zero points have none.
    """
    x, scale = jnp.asarray(x), jnp.asarray(scale)
    cpu, default = (functools.partial(f, config) for f in (_contract_in_chunks, contract_at_once))
    return lax.platform_dependent(x, codes, scale, zero_point, cpu=cpu, default=default)


def _contract_in_cache_fwd(
    config: WeightOnly, x: jax.Array, codes: jax.Array, scale: jax.Array, zero_point: Any
) -> tuple[jax.Array, Any]:
    return contract_in_cache(config, x, codes, scale, zero_point), (x, codes, scale, zero_point)


def _contract_in_cache_bwd(config: WeightOnly, residuals: Any, g: jax.Array) -> tuple[Any, ...]:
    x, codes, scale, zero_point = residuals
    is_float = zero_point is not None and zero_point.dtype == dtypes.FLOAT32

    def contract(x: jax.Array, scale: jax.Array, float_zero_point: Any) -> jax.Array:
        return contract_at_once(config, x, codes, scale, float_zero_point if is_float else zero_point)

    _, pull = jax.vjp(contract, jnp.asarray(x), jnp.asarray(scale), zero_point if is_float else None)
    dx, dscale, dzero_point = pull(g)
    return dx, None, dscale, dzero_point


contract_in_cache.defvjp(_contract_in_cache_fwd, _contract_in_cache_bwd)


def contract_at_once(
    config: WeightOnly, x: jax.Array, codes: jax.Array, scale: jax.Array, zero_point: Any
) -> jax.Array:
    """Return the float32 contraction of x with the codes, which are all dequantized at once."""
    weights = config.dequantize_chunk(codes, scale, zero_point, slice(None), lambda scale: scale)
    return config.contract_chunk(config.arrange_operand(x), weights)


def _contract_in_chunks(
    config: WeightOnly, x: jax.Array, codes: jax.Array, scale: jax.Array, zero_point: Any
) -> jax.Array:
    length, width, divisor, axis = config.plan_cut(codes)
    rows = max(CHUNK // width, -(-length // _CHUNKS), 1)
    rows = -(-rows // divisor) * divisor
    # Every chunk reads the float operand. The barrier makes XLA arrange it only once, before the first chunk.
    operand = lax.optimization_barrier(config.arrange_operand(x))
    products: list[jax.Array] = []
    for start in range(0, length, rows):
        wait = functools.partial(_delay_scale, done=products[-1] if products else None)
        weights = config.dequantize_chunk(codes, scale, zero_point, slice(start, min(start + rows, length)), wait)
        # The barrier keeps XLA from fusing the dequantization into the contraction, whose fast kernel reads its
        # operands from memory.
        products.append(config.contract_chunk(operand, lax.optimization_barrier(weights)))
    return jnp.concatenate(products, axis=axis)


def _delay_scale(scale: jax.Array, done: jax.Array | None) -> jax.Array:
    """Return the scale, and on a CPU make it wait for `done`.

    The dequantization then waits too. The scale is the smallest of its operands, so delaying it costs the least.
    """
    if done is None:
        return scale
    bits = lax.bitcast_convert_type(scale, jnp.dtype(f"int{8 * scale.dtype.itemsize}"))
    return lax.bitcast_convert_type(barriers.wait_for(bits, done), scale.dtype)
