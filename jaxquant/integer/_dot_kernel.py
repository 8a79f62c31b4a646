"""One integer contraction, [B, M, K] by [B, K, N], in the form that each backend runs fast. Knows int8 and int32 only.

XLA:CPU has a vector kernel for int8 by int8 to int32 with two rows or more and both operands lying as they are
named here; its neighbours (uint8, one row, a contracted dimension that is not where the kernel wants it) fall into
scalar loops 10 to 300 times slower. Zero points are therefore taken out of the contraction:
sum (a - s)(b - t) = sum ab - t sum a - s (sum b - K t), exactly, for all of it is modulo 2**32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

# A single row is a sum of products; so many of them in one loop leave XLA:CPU's vector registers busy and not
# spilt. On the machine of docs/speed.md: 8 terms 1.1, 16 terms 1, 32 terms 1.5 to 2 times the time.
_TERMS = 16
_ROWS = 8  # of ones, to sum with the kernel

Steps = jax.Array | None


def contract_integers(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Steps, rhs_steps: Steps, *, transposed: bool
) -> jax.Array:
    """Returns sum over k of (lhs - lhs_steps) (rhs - rhs_steps), modulo 2**32.

    Args:
        lhs: int8 [B, M, K].
        rhs: int8 [B, K, N], or [B, N, K] if `transposed`.
        lhs_steps: int32 [B or 1, M or 1], or None for 0.
        rhs_steps: int32 [B or 1, N or 1], or None for 0.
        transposed: Static. How rhs lies.

    Returns:
        int32 [B, M, N].
    """
    return _BATCHABLE[transposed](lhs, rhs, lhs_steps, rhs_steps)


def _contract_on_platform(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Steps, rhs_steps: Steps, *, transposed: bool
) -> jax.Array:
    operands = (lhs, rhs, lhs_steps, rhs_steps)
    columns = rhs.shape[1] if transposed else rhs.shape[2]
    if lhs_steps is None and rhs_steps is None and 1 not in (lhs.shape[1], columns):
        return _multiply(lhs, rhs, transposed)  # the same everywhere
    cpu, default = (functools.partial(f, transposed=transposed) for f in (_contract_on_cpu, _contract_plain))
    return lax.platform_dependent(*operands, cpu=cpu, default=default)


def _contract_on_cpu(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Steps, rhs_steps: Steps, *, transposed: bool
) -> jax.Array:
    batch, rows, depth = lhs.shape
    columns = rhs.shape[1] if transposed else rhs.shape[2]
    if columns == 1:  # a column is a row of the transposed product
        turned = _contract_row_on_cpu(rhs.reshape(batch, 1, depth), lhs, rhs_steps, lhs_steps, transposed=True)
        return turned.reshape(batch, rows, 1)
    if rows == 1:
        return _contract_row_on_cpu(lhs, rhs, lhs_steps, rhs_steps, transposed=transposed)
    ones = jnp.ones((batch, _ROWS, depth), jnp.int8)
    row_sums = column_sums = None
    # Where rhs is the larger, one more row, of ones, in the same contraction reads it only once: 0.88 ms against 1.0
    # for 128 x 768 x 3072. Where lhs is, that row would cost a copy of it: 2.0 ms against 1.65 for 1024^3. Both
    # contractions take the longer lhs, or what makes it, a quantization perhaps, would be computed for each.
    together = lhs_steps is not None and all(isinstance(n, int) for n in (rows, columns)) and columns > rows
    if together:
        lhs = lax.concatenate([lhs, lax.slice_in_dim(ones, 0, 1, axis=1)], 1)
    acc = _multiply(lhs, rhs, transposed)
    if together:
        acc, column_sums = (lax.slice_in_dim(acc, *ends, axis=1) for ends in ((0, rows), (rows, rows + 1)))
    elif lhs_steps is not None:
        column_sums = lax.slice_in_dim(_multiply(ones, rhs, transposed), 0, 1, axis=1)
    if rhs_steps is not None:
        row_sums = lax.slice(_multiply(lhs, ones, True), (0, 0, 0), (batch, rows, 1))
    return _correct_product(acc, row_sums, column_sums, lhs_steps, rhs_steps, depth)


def _contract_row_on_cpu(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Steps, rhs_steps: Steps, *, transposed: bool
) -> jax.Array:
    batch, _, depth = lhs.shape
    if not transposed:
        return _sum_products(lhs, rhs, lhs_steps, rhs_steps)
    # The kernel wants rows; a row of ones among them yields the sums of the other side for nothing.
    ones, zeros = jnp.ones((batch, 1, depth), jnp.int8), jnp.zeros((batch, 2, depth), jnp.int8)
    acc = _multiply(lax.concatenate([lhs, ones, zeros], 1), rhs, True)
    row_sums = None if rhs_steps is None else jnp.sum(lhs, axis=2, keepdims=True, dtype=jnp.int32)
    return _correct_product(acc[:, :1], row_sums, acc[:, 1:2], lhs_steps, rhs_steps, depth)


def _multiply(lhs: jax.Array, rhs: jax.Array, transposed: bool) -> jax.Array:
    """Returns the plain batched contraction, without a batch dimension where it is 1."""
    last = 2 if transposed else 1
    if lhs.shape[0] == 1:
        dimensions: Any = (((1,), (last - 1,)), ((), ()))
        acc = lax.dot_general(lax.squeeze(lhs, (0,)), lax.squeeze(rhs, (0,)), dimensions, None, jnp.int32)
        return lax.expand_dims(acc, (0,))
    return lax.dot_general(lhs, rhs, (((2,), (last,)), ((0,), (0,))), preferred_element_type=jnp.int32)


def _correct_product(
    acc: jax.Array, row_sums: Steps, column_sums: Steps, lhs_steps: Steps, rhs_steps: Steps, depth: int
) -> jax.Array:
    """Returns the accumulator less what the zero points have put into it."""
    if rhs_steps is not None:
        acc = lax.sub(acc, _spread_sums(_multiply_int32(lax.expand_dims(rhs_steps, (1,)), row_sums), acc.shape))
    if lhs_steps is not None:
        assert column_sums is not None
        if rhs_steps is not None:
            centred = _multiply_int32(lax.expand_dims(rhs_steps, (1,)), jnp.asarray(depth, jnp.int32)[None, None, None])
            column_sums = jnp.broadcast_to(column_sums, (*column_sums.shape[:2], acc.shape[2])) - centred
        acc = lax.sub(acc, _spread_sums(_multiply_int32(lax.expand_dims(lhs_steps, (2,)), column_sums), acc.shape))
    return acc


def _multiply_int32(left: jax.Array, right: Any) -> jax.Array:
    """Returns the product of two int32 arrays of one rank, each as often repeated as it must be."""
    shape = lax.broadcast_shapes(left.shape, right.shape)
    return lax.mul(_spread_sums(left, shape), _spread_sums(right, shape))


def _spread_sums(value: jax.Array, shape: Any) -> jax.Array:
    """Returns an array repeated along its dimensions of 1; jnp's own is slower to trace."""
    return value if value.shape == shape else lax.broadcast_in_dim(value, shape, range(len(shape)))


def _sum_products(lhs: jax.Array, rhs: jax.Array, lhs_steps: Steps, rhs_steps: Steps) -> jax.Array:
    """Returns [B, 1, K] by [B, K, N] as a sum of rows of rhs: element-wise, which XLA:CPU vectorises."""
    batch, depth, columns = rhs.shape
    row = lhs.astype(jnp.int32)[:, 0]
    if lhs_steps is not None:
        row = row - jnp.broadcast_to(lhs_steps, row.shape)
    length = depth // _TERMS
    head = length * _TERMS
    acc = jnp.zeros((batch, columns), jnp.int32)
    if length:
        left = row[:, :head].reshape(batch, _TERMS, length)
        right = rhs[:, :head].reshape(batch, _TERMS, length, columns)
        terms = [_scale_rows(left[:, t], right[:, t]) for t in range(_TERMS)]
        acc = jnp.sum(lax.optimization_barrier(functools.reduce(jnp.add, terms)), axis=1, dtype=jnp.int32)
    for k in range(head, depth):
        acc = acc + _scale_rows(row[:, k], rhs[:, k])
    if rhs_steps is not None:
        acc = acc - jnp.broadcast_to(
            _multiply_int32(rhs_steps, jnp.sum(row, axis=1, keepdims=True, dtype=jnp.int32)), acc.shape
        )
    return acc[:, None]


def _scale_rows(factors: jax.Array, rows: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(factors, rows.shape, tuple(range(factors.ndim))) * rows.astype(jnp.int32)


def _contract_plain(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Steps, rhs_steps: Steps, *, transposed: bool
) -> jax.Array:
    axis = 2 if transposed else 1
    row_sums = None if rhs_steps is None else jnp.sum(lhs, axis=2, dtype=jnp.int32)[:, :, None]
    column_sums = None if lhs_steps is None else jnp.sum(rhs, axis=axis, dtype=jnp.int32)[:, None, :]
    acc = _multiply(lhs, rhs, transposed)
    return _correct_product(acc, row_sums, column_sums, lhs_steps, rhs_steps, lhs.shape[2])


def _contract_under_vmap(transposed: bool, size: int, batched: Any, *operands: Any) -> tuple[jax.Array, bool]:
    """Makes more rows of a batch of left sides, and more batch of anything else: never one contraction a time."""
    lhs, rhs, lhs_steps, rhs_steps = batch_all(size, batched, operands)
    _, batch, rows, depth = lhs.shape
    if not batched[1] and not batched[3]:
        folded = jnp.swapaxes(lhs, 0, 1).reshape(batch, size * rows, depth)
        if lhs_steps is not None:
            wide = jnp.broadcast_to(lhs_steps, (*lhs_steps.shape[:2], rows))
            lhs_steps = jnp.swapaxes(wide, 0, 1).reshape(-1, size * rows)
        acc = contract_integers(folded, operands[1], lhs_steps, operands[3], transposed=transposed)
        return jnp.swapaxes(acc.reshape(batch, size, rows, -1), 0, 1), True
    lhs_steps, rhs_steps = (
        s if s is None else jnp.broadcast_to(s, (size, batch, s.shape[2])).reshape(size * batch, s.shape[2])
        for s in (lhs_steps, rhs_steps)
    )
    folded_lhs, folded_rhs = (x.reshape(size * batch, *x.shape[2:]) for x in (lhs, rhs))
    acc = contract_integers(folded_lhs, folded_rhs, lhs_steps, rhs_steps, transposed=transposed)
    return acc.reshape(size, batch, *acc.shape[1:]), True


def batch_all(size: int, batched: Any, operands: tuple[Any, ...]) -> Any:
    """Returns the operands of a vmap, each with a leading axis of its size; None stays None."""
    pairs = zip(operands, batched, strict=True)
    return tuple(x if x is None or b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in pairs)


def _make_batchable(transposed: bool) -> Any:
    function = custom_vmap(functools.partial(_contract_on_platform, transposed=transposed))
    function.def_vmap(functools.partial(_contract_under_vmap, transposed))
    return function


_BATCHABLE = {transposed: _make_batchable(transposed) for transposed in (False, True)}
