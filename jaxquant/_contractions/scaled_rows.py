"""The contraction of a single float row with a matrix of codes, as a sum of scaled rows of the matrix.

Nothing is dequantized in memory: XLA:CPU reads the codes once, and vectorizes the conversion and the sum over columns.
The XLA of jax 0.10 does not vectorize it; there the other forms of a weight-only contraction are faster.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays.quantized_array import QuantizedArray
from .._core import dtypes, granularity, packed_codes, small_floats
from ..integer.dot_general import Role
from . import dot_integer, float_digits

# The number of rows that one loop adds up: enough to use the vector registers of a CPU, without spilling them.
_TERMS = (32, 16, 8)
# The selections that decode a codebook need registers too.
_DECODED_TERMS = (16, 8)
# From this number of codes of 8 bits on, loops of fewer rows are faster. With fewer codes they are not: XLA:CPU then
# waits for a second thread.
_BYTE_TERMS, _MANY_BYTES = (16, 8), 2**18
# If the products of the elements of a row and the scales are at least this large or 0, and so are the elements, then
# their products with levels of a codebook of at least _SMALLEST_LEVEL are normal float32 numbers.
_SMALLEST, _SMALLEST_LEVEL = 2.0**-100, 2.0**-20
# Whether XLA:CPU vectorizes the loop. Measured with jax 0.10 (it does not) and 0.12.
IS_VECTORIZED = jax.__version_info__ >= (0, 12)


def find_terms(q: QuantizedArray, role: Role) -> int | None:
    """Return how many rows one loop adds up, or None if the contraction does not have this form.

    The rows of a loop must share their entries of scale and zero point, and all blocks must have the same length.

    Args:
        q: an array of rank 2 or more with static dimensions.
        role: the role of each dimension.
    """
    is_integer = q.codebook is not None or q.codes.dtype in dtypes.INTEGERS
    if role.contracted != (0,) or role.batch or not is_integer:
        return None
    runs = [q.shape[0]]
    for part in (q.scale, q.zero_point):
        if part is not None:
            sizes = granularity.Aligned(q.block_size).sizes(part.shape, q.shape)
            assert sizes is not None
            runs.append(sizes[0])
    if any(q.shape[0] % run for run in runs):
        return None
    is_wide = dtypes.find_width(q.codes.dtype) == 8 and q.size >= _MANY_BYTES
    terms = _BYTE_TERMS if is_wide else _TERMS
    if q.codebook is not None:
        if not all(level == 0 or _SMALLEST_LEVEL <= abs(level) <= 1 / _SMALLEST_LEVEL for level in q.codebook.levels):
            return None
        terms = _DECODED_TERMS
    return next((n for n in terms if all(run % n == 0 for run in runs)), None)


def contract_row(x: jax.Array, q: QuantizedArray, role: Role, terms: int) -> tuple[jax.Array, jax.Array]:
    """Return the float32 contraction of a row with the first dimension of a quantized array, and whether it is exact.

    It is not if the row or a scale has an infinity, a NaN, or numbers so far from 1 that a product could overflow, or
    be lost as a subnormal number.

    Args:
        x: float32 [K].
        q: codes [K, ...].
        role: the role of each dimension of q.
        terms: what `find_terms` returns.

    Returns:
        float32 [...]; a bool.
    """
    depth, kept = q.shape[0], q.shape[1:]
    columns = math.prod(kept)
    scale = _spread_entries(q, small_floats.scale_as_float32(q.scale), role, depth // terms)
    point = None if q.zero_point is None else _spread_entries(q, q.zero_point.astype(jnp.int32), role, depth // terms)
    # The row is scaled to magnitudes of about 1: a product with a code must not overflow before the scale reduces it.
    factor, unit = float_digits.find_powers(jnp.max(jnp.abs(x)), 0)
    scaled = x * factor
    size = jnp.abs(scaled)
    # The magnitude of an infinity or a NaN counts as 0 here, and that of a zero as one that is large enough.
    least = jnp.min(jnp.where(x == 0, np.float32(4), jnp.where(size <= 4, size, np.float32(0))))
    least_product = least * float_digits.find_least_scale(q.scale)
    is_exact = (least >= np.float32(_SMALLEST)) & (least_product >= np.float32(_SMALLEST))
    factors = scaled.reshape(depth // terms, terms)
    matrix = q.codes.reshape(depth, columns)
    count = packed_codes.count_planes(matrix)
    groups = packed_codes.read_bytes(matrix).reshape(depth // terms, terms, -1)
    sums = []
    for place in range(count):
        plane_scale = _take_plane(scale, place, count)
        plane_point = None if point is None else _take_plane(point, place, count)
        products = None
        for i in range(terms):
            if q.codebook is not None:
                weights = q.codebook.decode(groups[:, i], place * 8 // count)
            else:
                steps = packed_codes.read_plane(groups[:, i], np.dtype(q.codes.dtype), place, count)
                weights = (steps if plane_point is None else steps - plane_point).astype(jnp.float32)
            product = factors[:, i, None] * weights
            products = product if products is None else products + product
        assert products is not None
        # The barrier keeps XLA from fusing this reduction with the loop of products.
        sums.append(jnp.sum(lax.optimization_barrier(products * plane_scale), axis=0))
    return jnp.stack(sums, axis=-1).reshape(kept) * unit, is_exact


def _spread_entries(q: QuantizedArray, part: jax.Array, role: Role, rows: int) -> jax.Array:
    """Return a scale or zero point as [rows, 1] or [rows, columns], with an entry for each group of rows."""
    expanded = dot_integer.expand_side(q, part, role.free)
    entries, kept = expanded.shape[0], expanded.shape[1:]
    if any(n != 1 for n in kept):
        kept = q.shape[1:]
    flat = jnp.broadcast_to(expanded, (entries, *kept)).reshape(entries, 1, math.prod(kept))
    return jnp.broadcast_to(flat, (entries, rows // entries, flat.shape[2])).reshape(rows, flat.shape[2])


def _take_plane(part: jax.Array, place: int, count: int) -> jax.Array:
    """Return the columns of a scale or zero point that belong to one place of the codes in their bytes."""
    return part if part.shape[1] == 1 else part[:, place::count]
