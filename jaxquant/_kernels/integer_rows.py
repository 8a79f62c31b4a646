"""The exact contraction of a row of integers with a matrix of codes in uint32 words, on a CPU.

The kernel of `word_rows` multiplies floats. If no sum is above 2**24, float32 holds all of them exactly, whatever their
order, so the kernel returns the int32 sums. It writes no code to memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from . import packed_codes, word_rows
from .contraction import Center, Role, contract_roles
from .float_rows import IS_VECTORIZED, ScaledCodes, WordLayout

# With fewer codes, unpacking takes fewer loops.
_FEWEST = 2**15
# The largest integer up to which float32 holds all of them.
_EXACT = 2**24


class PackedOperand(NamedTuple):
    """The codes of an operand as they are packed.

    Attributes:
        words: uint32.
        zero_point: integers of 8 bits, with an entry for each index of the dimensions that are kept, or None for 0.
        layout: Static. How the codes are packed.
        block_size: Static. The number of indices that share a zero point, or None.
    """

    words: jax.Array
    zero_point: Center
    layout: WordLayout
    block_size: int | None

    def read_matrix(self) -> ScaledCodes:
        """Return the codes in the form of the kernel, with a scale of 1."""
        one = jnp.ones((1, 1), jnp.float32)
        return ScaledCodes(self.words, one, self.zero_point, None, self.block_size, words=self.layout)


class _RowProduct(NamedTuple):
    """The static arguments of a contraction.

    Attributes:
        left: the role of each dimension of lhs.
        right: the role of each dimension of rhs.
        packed: 0 if the words are those of lhs, 1 if they are those of rhs.
        layout: the layout of the words.
        block_size: the number of indices that share a zero point, or None.
    """

    left: Role
    right: Role
    packed: int
    layout: WordLayout
    block_size: int | None

    def contract(
        self, lhs: jax.Array, rhs: jax.Array, lhs_center: Center, rhs_center: Center, words: jax.Array,
        zero_point: Center,
    ) -> jax.Array:  # fmt: skip
        """Return the int32 contraction of lhs and rhs minus their centers; on a CPU, of a row and words."""

        def contract_row(
            lhs: jax.Array, rhs: jax.Array, lhs_center: Center, rhs_center: Center, words: jax.Array, zero_point: Center
        ) -> jax.Array:
            row, center = ((rhs, rhs_center), (lhs, lhs_center))[self.packed]
            x = row.reshape(-1).astype(jnp.int32)
            x = (x if center is None else x - center.reshape(())).astype(jnp.float32)
            zero_point = None if zero_point is None else packed_codes.unpack_entries(zero_point, x)
            matrix = PackedOperand(words, zero_point, self.layout, self.block_size).read_matrix()
            role = (self.left, self.right)[self.packed]
            form = word_rows.choose_form(matrix, role)
            assert form is not None
            free = [x.shape[axis] for x, role in ((lhs, self.left), (rhs, self.right)) for axis in role.free]
            return form(x, matrix, role).astype(jnp.int32).reshape(free)

        def contract_codes(
            lhs: jax.Array, rhs: jax.Array, lhs_center: Center, rhs_center: Center, *_: Center
        ) -> jax.Array:
            return contract_roles(lhs, rhs, lhs_center, rhs_center, self.left, self.right)

        operands = (lhs, rhs, lhs_center, rhs_center, words, zero_point)
        return lax.platform_dependent(*operands, cpu=contract_row, default=contract_codes)


def contract_row_of_integers(
    lhs: jax.Array, rhs: jax.Array, lhs_center: Center, rhs_center: Center, left: Role, right: Role,
    packed: Sequence[PackedOperand | None],
) -> jax.Array | None:  # fmt: skip
    """Return what `contract_roles` returns, for a row and codes in words, or None if the kernel does not take them.

    The other arguments are those of `contract_roles`. `packed` has for each operand the words that hold its codes, in
    the order of its dimensions, or None.
    """
    operands, centers, roles = (lhs, rhs), (lhs_center, rhs_center), (left, right)
    for side in (1, 0):
        held, codes, row, center = packed[side], operands[side], operands[1 - side], centers[1 - side]
        is_static = all(isinstance(n, int) for n in (*codes.shape, *row.shape))
        if held is None or not IS_VECTORIZED or not is_static:
            continue
        is_single = math.prod(row.shape[axis] for axis in roles[1 - side].free) == 1
        is_matrix = codes.ndim == 2 and not roles[side].batch and codes.size >= _FEWEST
        if not is_single or not is_matrix or (center is not None and center.size != 1):
            continue
        # The largest magnitude of a code, or of its difference to a zero point.
        largest = 2 ** (held.layout.bits - (held.layout.is_signed and held.zero_point is None))
        if row.size * largest * (2**7 if center is None else 2**8) > _EXACT:
            continue
        if word_rows.choose_form(held.read_matrix(), roles[side]) is not None:
            product = _RowProduct(left, right, side, *held[2:])
            return _make_batchable(product)(*operands, *centers, held.words, held.zero_point)
    return None


# Created once for each product, because JAX reuses a trace only for the same function object.
@functools.lru_cache(maxsize=1024)
def _make_batchable(product: _RowProduct) -> custom_vmap:
    function = custom_vmap(product.contract)
    function.def_vmap(functools.partial(_contract_under_vmap, product))
    return function


def _contract_under_vmap(
    product: _RowProduct, size: int, batched: Sequence[bool], *operands: Any
) -> tuple[jax.Array, bool]:
    """Return the contraction under vmap, with more rows or more matrices, of the codes and not of the words."""
    axes = [0 if is_batched else None for is_batched in batched[:4]]
    contract = functools.partial(contract_roles, left=product.left, right=product.right)
    return jax.vmap(contract, axes, axis_size=size)(*operands[:4]), True
