"""The arithmetic of attention: which tokens a query sees, its scores, and the values that these weigh."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._contractions.einsum import contract_operands
from .._core import checks, dtypes
from .._core.granularity import Aligned
from .._kernels.accumulator import scale_by_both, sum_over_blocks
from .._kernels.barriers import pin_layout, round_result
from .._kernels.contraction import Role, contract_roles

# XLA:CPU contracts an operand of many rows with up to so many columns in up to half of the time that the transposed
# product takes.
_FEW_ROWS = 32
# A digit of 7 bits is an int8 that is not negative, so the contraction needs no zero point.
_DIGIT = 7
# With this many tokens a sum of products of a digit and an int8 fits in int32, and so do the sums of the upper and of
# the lower bits of exponentials.
_LONGEST = 2**17
# An exponential, at most 1, as a multiple of 2**-27, and the bits of its lower part.
_FRACTION = 27
_LOW = 14
_TINY = np.finfo(np.float32).tiny
_ZERO = np.float32(0)
_BOOL = np.dtype(np.bool_)
_BIASES = (*dtypes.FLOATS, *(np.dtype(name) for name in ("int32", "int16", "int8")))


# The arguments that both attention functions take, and their checks.


def check_query_spec(function: str, argument: str, spec: QuantSpec) -> None:
    """Check that the codes of a spec can be contracted as integers."""
    checks.require_type(isinstance(spec, QuantSpec), function, argument, "a QuantSpec", checks.describe_value(spec))
    is_short = dtypes.is_integer(spec.dtype) and dtypes.count_packed_bits(spec.dtype) <= 8
    checks.require_type(is_short, function, argument, "an integer dtype of 8 bits or fewer", spec.dtype)


def read_digits(function: str, value: int) -> int:
    """Return the number of digits of a weight."""
    checks.check_integer(function, "weight_digits", value)
    checks.require(value in (1, 2, 3), function, "weight_digits", "1, 2 or 3", value)
    return int(value)


def read_factor(function: str, scale: float | None, features: int) -> float:
    """Return what scores are multiplied by: a positive number, 1 / sqrt(features) for None."""
    if scale is None:
        return 1 / math.sqrt(max(features, 1))
    # A negative factor would be the scale of codes, which has no sign.
    checks.check_real(function, "scale", scale)
    checks.require(scale > 0, function, "scale", "a positive number", scale)
    return float(scale)


def read_mask(function: str, mask: jax.Array | None, sizes: tuple[int, int, int, int]) -> jax.Array | None:
    """Return a mask with rank 4, after a check against (batch, heads, queries, tokens)."""
    if mask is None:
        return None
    checks.check_array(function, "mask", mask, (_BOOL,))
    return _expand_rank(function, "mask", mask, sizes)


def read_bias(function: str, bias: jax.Array | None, sizes: tuple[int, int, int, int]) -> jax.Array | None:
    """Return a bias as floats with rank 4, after a check against (batch, heads, queries, tokens)."""
    if bias is None:
        return None
    checks.check_array(function, "bias", bias, _BIASES)
    bias = _expand_rank(function, "bias", bias, sizes)
    # Integers have no gradient.
    return bias if bias.dtype in dtypes.FLOATS else bias.astype(jnp.float32)


def _expand_rank(function: str, argument: str, value: jax.Array, sizes: tuple[int, int, int, int]) -> jax.Array:
    """Return an array with rank 4, after a check that it broadcasts against the sizes."""
    # `strict` is False, because leading dimensions may be missing, as in numpy.
    fits = value.ndim <= 4 and all(n in (1, m) for n, m in zip(value.shape[::-1], sizes[::-1], strict=False))
    expected = f"a shape that broadcasts against {sizes}: (batch, heads, queries, tokens)"
    checks.require(fits, function, argument, expected, f"shape {value.shape}")
    return jnp.reshape(value, (1,) * (4 - value.ndim) + value.shape)


# Which tokens a query attends to: masks of arrays, lengths, causality and windows.


class Hiding(NamedTuple):
    """The static part of what hides tokens in `quantized_dot_product_attention`.

    Attributes:
        is_causal: whether a query attends to no later token.
        window: the number of tokens before and after a query that it attends to, or None.
    """

    is_causal: bool
    window: tuple[int, int] | None


def group_heads(value: jax.Array, heads: int) -> jax.Array:
    """Return a mask or bias [batch, query heads, queries, tokens] as [batch, kv heads, groups, queries, tokens].

    Args:
        value: an array of rank 4; any dimension may be 1.
        heads: Static. The number of heads of the keys and values.
    """
    batch, query_heads, queries, tokens = value.shape
    groups = (1, 1) if query_heads == 1 else (heads, query_heads // heads)
    return value.reshape(batch, *groups, queries, tokens)


def merge_masks(masks: list[Any]) -> Any:
    """Return the conjunction of masks, which broadcast against each other; None if there is none."""
    present = [mask for mask in masks if mask is not None]
    return functools.reduce(operator.and_, present) if present else None


def derive_visible(
    hiding: Hiding, queries: int, tokens: int, mask: jax.Array | None, query_lengths: jax.Array | None,
    token_lengths: jax.Array | None,
) -> jax.Array | None:  # fmt: skip
    """Return which tokens a query attends to, of a shape that broadcasts against [batch, 1, 1, queries, tokens].

    Args:
        hiding: Static. Causality and the window.
        queries: Static. The number of queries.
        tokens: Static. The number of keys.
        mask: bool of rank 5, or None.
        query_lengths: int32 [batch], or None.
        token_lengths: int32 [batch], or None.
    """
    query = jnp.arange(queries, dtype=jnp.int32)[None, None, None, :, None]
    token = jnp.arange(tokens, dtype=jnp.int32)[None, None, None, None, :]
    masks = [mask]
    if hiding.is_causal:
        masks.append(token <= query)
    if hiding.window is not None:
        # A longer window is no limit, and a sum with it must not overflow int32.
        before, after = (np.int32(min(n, 2**30)) for n in hiding.window)
        masks.append((query <= token + before) & (query >= token - after))
    for position, lengths in ((query, query_lengths), (token, token_lengths)):
        if lengths is not None:
            masks.append(position < lengths.reshape(-1, 1, 1, 1, 1))
    return merge_masks(masks)


def derive_visible_in_cache(positions: jax.Array, query_positions: jax.Array, window: int | None) -> jax.Array:
    """Return which slots of a cache queries attend to: bool [batch or 1, 1, 1, queries, slots].

    Args:
        positions: the position of the token in each slot, -1 for none: int32 [batch or 1, slots].
        query_positions: int32 [batch or 1, queries].
        window: Static. The number of tokens that a query attends to, or None for all.
    """
    # Positions, not slots, are compared: in a ring the slots have another order than the tokens.
    position = positions[:, None, None, None, :]
    query = query_positions[:, None, None, :, None]
    visible = (position >= 0) & (position <= query)
    return visible if window is None else visible & (position > query - np.int32(window))


# Rotations of queries, keys and values.


def count_rotated(features: int) -> int:
    """Return how many neighboring features a rotation mixes: the largest power of 2 that divides their number."""
    return features & -features


def rotate_tokens(x: jax.Array) -> jax.Array:
    """Return keys or values [..., features], in float32, times a Hadamard matrix and a power of 2."""
    return _multiply_hadamard(x, math.ceil(math.log2(count_rotated(x.shape[-1])) / 2))


def rotate_back(x: jax.Array) -> jax.Array:
    """Return queries, or rotated keys or values, in float32, times the inverse of the matrix of `rotate_tokens`.

    That inverse is the transpose times a power of 2, so that the product of rotated keys and these queries is the
    product of keys and queries.
    """
    return _multiply_hadamard(x, math.floor(math.log2(count_rotated(x.shape[-1])) / 2))


def _multiply_hadamard(x: jax.Array, halvings: int) -> jax.Array:
    """Return runs of features times Sylvester's Hadamard matrix, whose elements are 1 and -1, times 2**-halvings.

    The sums are added in pairs, in the same order in every program, so the result is the same in all of them. A product
    of matrices would add in an order that depends on its shape.
    """
    size = count_rotated(x.shape[-1])
    # A product of the caller's must not be merged with the first sum.
    runs = round_result(x.astype(jnp.float32)).reshape(*x.shape[:-1], x.shape[-1] // size, size)

    def add_pairs(_: jax.Array, x: jax.Array) -> jax.Array:
        # A step mixes pairs that differ in the last bit of the index, and makes this bit the first one. After a step
        # for each bit, all bits are where they were.
        pairs = x.reshape(*x.shape[:-1], size // 2, 2)
        even, odd = (lax.index_in_dim(pairs, i, pairs.ndim - 1, keepdims=False) for i in range(2))
        return lax.concatenate([even + odd, even - odd], x.ndim - 1)

    runs = lax.fori_loop(np.int32(0), np.int32(size.bit_length() - 1), add_pairs, runs)
    return (runs * np.float32(2.0**-halvings)).reshape(x.shape)


# The scores of queries and keys, contracted as integers.


def group_queries(q: QuantizedArray, heads: int, factor: float) -> QuantizedArray:
    """Return queries [batch, queries, query heads, features] as [batch, kv heads, groups, queries, features].

    Args:
        q: the queries.
        heads: Static. The number of heads of the keys.
        factor: Static. What the scores are multiplied by; it becomes a part of the scale, which is then float32.
    """

    def regroup(part: jax.Array) -> jax.Array:
        batch, queries, query_heads, features = part.shape
        # A scale or zero point that all heads share stays a single one, and broadcasts.
        groups = (1, 1) if query_heads == 1 != q.shape[2] else (heads, query_heads // heads)
        return lax.transpose(part, (0, 2, 1, 3)).reshape(batch, *groups, queries, features)

    # Scaling the few scales is cheaper than scaling the scores.
    scale = dtypes.scale_as_float32(q.scale) * np.float32(factor)
    zero_point = None if q.zero_point is None else regroup(q.zero_point)
    return QuantizedArray(regroup(q.codes), regroup(scale), zero_point, dtype=jnp.float32, block_size=q.block_size)


def compute_scores(function: str, q: QuantizedArray, k: QuantizedArray, blocks: int = 1) -> jax.Array:
    """Return the scores, float32 [batch, kv heads, groups, queries, tokens].

    Args:
        function: the name of the public function, for errors.
        q: the result of `group_queries`.
        k: keys [batch, kv heads * blocks, tokens, features of a block].
        blocks: Static. The number of blocks of features, each of which is stored as a head of its own.
    """
    if blocks > 1:
        return _score_blocks(function, q, k, blocks)
    rows = q.shape[2] * q.shape[3]
    if not _has_few_rows(rows, q, k):
        return contract_operands(function, "bkgtd,bksd->bkgts", (q, k), None, dtypes.FLOAT32)
    # A single column would miss the kernel: add one of zeros.
    wide = _pad_queries(q) if rows == 1 else q
    scores = contract_operands(function, "bksd,bkgtd->bkgts", (k, wide), None, dtypes.FLOAT32)
    scores = lax.slice_in_dim(scores, 0, q.shape[3], axis=3)
    # The softmax reads the scores several times, and XLA:CPU would transpose the product of the codes in each of these
    # loops. The scores of a single query are read in order anyway.
    return scores if rows == 1 else pin_layout(scores)


def _score_blocks(function: str, q: QuantizedArray, k: QuantizedArray, blocks: int) -> jax.Array:
    """Return the sum of the scores of all blocks, in ascending order, each product and each sum rounded once."""
    q = _split_queries(function, q, blocks)
    batch, heads, _, groups, queries, features = q.shape
    rows = groups * queries
    # A scale for each row of a block, and no zero point.
    is_plain = q.zero_point is None and q.scale.shape[-1] == 1
    if is_plain and blocks <= _FEW_ROWS and isinstance(rows, int) and rows <= _FEW_ROWS:
        codes = q.codes.reshape(batch, heads * blocks, rows, features)
        if rows == 1:
            codes = jnp.concatenate([codes, jnp.zeros_like(codes)], 2)
        role = Role((0, 1), (2,), (3,))
        acc = contract_roles(k.codes, codes, None, None, role, role)
        acc = lax.slice_in_dim(acc, 0, rows, axis=3).reshape(batch, heads, blocks, -1, rows)
        k_scale = dtypes.scale_as_float32(k.scale).reshape(-1, heads, blocks, *k.scale.shape[2:])
        q_scale = jnp.broadcast_to(q.scale, (batch, heads, blocks, groups, queries, 1))
        parts = (acc, k_scale, q_scale.reshape(batch, heads, blocks, 1, rows))
        terms = (scale_by_both(*(x[:, :, i] for x in parts)) for i in range(blocks))
        scores = functools.reduce(lambda total, term: round_result(total + term), terms)
        scores = lax.transpose(scores, (0, 1, 3, 2)).reshape(batch, heads, groups, queries, -1)
        return scores if rows == 1 else pin_layout(scores)
    keys = jax.tree.map(lambda part: part.reshape(-1, heads, blocks, *part.shape[2:]), k)

    def score(block: jax.Array) -> jax.Array:
        # A part that all blocks share has a single entry, to which the index is clamped.
        take = functools.partial(lax.dynamic_index_in_dim, index=block, axis=2, keepdims=False)
        return compute_scores(function, *(jax.tree.map(take, x) for x in (q, keys)))

    return sum_over_blocks(score, jnp.arange(blocks, dtype=jnp.int32))


def _split_queries(function: str, q: QuantizedArray, blocks: int) -> QuantizedArray:
    """Return queries with their features cut into blocks: [batch, heads, blocks, groups, queries, features]."""
    features = q.shape[-1] // blocks
    sizes = Aligned(q.block_size).sizes(q.scale.shape, q.shape)
    assert sizes is not None
    size = sizes[-1]
    fits = size % features == 0 or features % size == 0
    expected = f"blocks of features that end where the keys' blocks of {features} do"
    checks.require(fits, function, "spec", expected, f"blocks of {size}")

    def split(part: jax.Array) -> jax.Array:
        if part.shape[-1] == 1:
            return lax.expand_dims(part, (2,))
        if part.shape[-1] < blocks:
            part = jnp.repeat(part, blocks // part.shape[-1], axis=-1)
        part = part.reshape(*part.shape[:-1], blocks, part.shape[-1] // blocks)
        return jnp.moveaxis(part, -2, 2)

    zero_point = None if q.zero_point is None else split(q.zero_point)
    block_size = size if size < features else None
    return QuantizedArray(split(q.codes), split(q.scale), zero_point, dtype=q.dtype, block_size=block_size)


def split_features(x: QuantizedArray) -> tuple[QuantizedArray, int]:
    """Return keys or values [batch, heads, tokens, features] with each block of features as a head, and their number.

    Those with a zero point, or with blocks of several lengths, are returned as they are, with the number 1.
    """
    blocks, features = x.scale.shape[-1], x.shape[-1]
    if blocks in (1, features) or x.zero_point is not None or features % blocks:
        return x, 1

    def split(part: jax.Array) -> jax.Array:
        (batch, _, tokens, n), heads = part.shape, x.shape[1]
        part = jnp.broadcast_to(part, (batch, heads, tokens, n))
        part = jnp.moveaxis(part.reshape(batch, heads, tokens, blocks, n // blocks), 3, 2)
        return part.reshape(batch, heads * blocks, tokens, n // blocks)

    return QuantizedArray(split(x.codes), split(x.scale), dtype=x.dtype), blocks


def _has_few_rows(rows: object, q: QuantizedArray, k: QuantizedArray) -> bool:
    """Return whether the contraction reads the keys faster as its left operand."""
    # The sums of the keys, which zero points need, are cheaper with the keys on the right. So are blocks of features.
    is_plain = all(x.zero_point is None and x.scale.shape[-1] == 1 for x in (q, k))
    return is_plain and isinstance(rows, int) and rows <= _FEW_ROWS


def _pad_queries(q: QuantizedArray) -> QuantizedArray:
    """Return queries with a further one of zeros."""
    codes, scale = (
        lax.pad(x, jnp.zeros((), x.dtype), [(0, int(axis == 3 and x.shape[3] == q.shape[3]), 0) for axis in range(5)])
        for x in (q.codes, q.scale)
    )
    return QuantizedArray(codes, scale, dtype=q.dtype, block_size=q.block_size)


def add_bias(scores: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Return scores plus an array that broadcasts against them, or the scores for None."""
    return scores if bias is None else scores + bias.astype(jnp.float32)


# The softmax of scores as integers, and their contraction with the codes of values.
#
# With scores s, the scales v of the values' tokens, and the digits n of a weight:
#
# p = exp(s - max(s)), u = p v, codes = round_half_even(u / step), step = max(u) / (128**n - 1)
#
# out = (codes contracted with the codes of the values) * step / sum(p)
#
# The scales of the values' tokens vary along the contracted dimension, so they belong to the weights before these are
# rounded. Values with a scale for each block of features have weights for each block. A row has its own step, because
# with a fixed one, 1 / 255 of the sum, all weights of a row that attends evenly to 1000 tokens would round to 0. The
# sum is divided by at the end: the codes then depend on element-wise operations and on a maximum, in any order. The sum
# is one of integers, for the same reason. So hidden tokens change no bit of a result: it is the same with a longer
# cache, for one query or many, and in training.


class RowWeights(NamedTuple):
    """The weights of a row of scores.

    Attributes:
        exponentials: exp(s - max(s)), float32 [batch, heads, groups, queries, tokens]; 0 where a token is hidden.
        codes: int32 [batch, heads, blocks, groups, queries, tokens], 0 where a token is hidden.
        step: the value of a step of the codes, float32, of that shape with one entry along the tokens.
        total: the sum of the exponentials, float32, with one entry along the tokens. NaN if a token that is not hidden
            has a NaN.
    """

    exponentials: jax.Array
    codes: jax.Array
    step: jax.Array
    total: jax.Array


def compute_weights(scores: jax.Array, value_scale: jax.Array, visible: jax.Array | None, digits: int) -> RowWeights:
    """Return the softmax of scores along their last axis, as codes that include the scales of the values.

    Args:
        scores: float32 [batch, heads, groups, queries, tokens].
        value_scale: float32 [batch, heads, blocks, 1, 1, tokens]; any dimension but the blocks may be 1.
        visible: bool, of a shape that broadcasts against the scores: False hides a token. None hides none.
        digits: Static. The number of digits of a code.
    """
    hide = functools.partial(_hide, visible=visible)
    top = jnp.max(hide(scores, np.float32(-np.inf)), axis=-1, keepdims=True, initial=-np.inf)
    # In a row that sees no token the difference is infinite, and everything is hidden. In one that sees only scores of
    # -inf it is NaN, as in the softmax of floats.
    exponentials = hide(_exponentiate(scores - top), _ZERO)
    hide_blocks = functools.partial(_hide, visible=None if visible is None else lax.expand_dims(visible, (2,)))
    scaled = hide_blocks(lax.expand_dims(exponentials, (2,)) * value_scale, _ZERO)
    total = _add_exponentials(exponentials, _find_nan(exponentials, value_scale, visible))
    largest = jnp.max(scaled, axis=-1, keepdims=True, initial=0.0)
    most = 2 ** (_DIGIT * digits) - 1
    # A row of zeros gets codes of 0. The reciprocal of a step of this size is finite.
    step = jnp.maximum(largest * np.float32(1 / most), _TINY)
    steps = lax.round(scaled * (np.float32(1) / step), lax.RoundingMethod.TO_NEAREST_EVEN)
    codes = jnp.clip(steps, _ZERO, np.float32(most)).astype(jnp.int32)
    return RowWeights(exponentials, codes, step, total)


def _find_nan(exponentials: jax.Array, value_scale: jax.Array, visible: jax.Array | None) -> jax.Array:
    """Return where the exponential of a token that is not hidden is NaN, or its product with a scale of its values.

    An exponential is at most 1. So its product with one of the scales is NaN exactly if that with the largest magnitude
    is: if that is NaN, or infinite while the exponential is 0. Products for all blocks would take as long as the codes.
    """
    largest = jnp.max(jnp.abs(value_scale), axis=2)
    return jnp.isnan(_hide(exponentials * largest, _ZERO, visible=visible))


def _exponentiate(differences: jax.Array) -> jax.Array:
    """Return the exponentials, with the same bits in every program on a machine.

    XLA:CPU computes the maximum of a long row, the differences from it and their exponentials in a call of a library,
    which rounds a few exponentials differently than the code that XLA generates for a short row. It does so with
    jax 0.12, and not where an integer operation is between these operations.
    """
    return round_result(jnp.exp(round_result(differences)))


def _add_exponentials(exponentials: jax.Array, is_nan: jax.Array) -> jax.Array:
    """Return the sum along the last axis, which does not depend on the order of the terms; NaN if one is NaN.

    A term is rounded to a multiple of 2**-27, which is finer than a code of three digits. Its upper and lower bits are
    summed in int32.
    """
    steps = jnp.where(is_nan, _ZERO, exponentials * np.float32(2**_FRACTION))
    fixed = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)
    total = None
    for start in range(0, fixed.shape[-1], _LONGEST):
        chunk = lax.slice_in_dim(fixed, start, min(start + _LONGEST, fixed.shape[-1]), axis=fixed.ndim - 1)
        high, low = chunk >> np.int32(_LOW), chunk & np.int32(2**_LOW - 1)
        high, low = (jnp.sum(part, axis=-1, keepdims=True, dtype=jnp.int32).astype(jnp.float32) for part in (high, low))
        part = high * np.float32(2.0 ** (_LOW - _FRACTION)) + low * np.float32(2.0**-_FRACTION)
        total = part if total is None else total + part
    assert total is not None
    return jnp.where(jnp.any(is_nan, axis=-1, keepdims=True), np.float32(np.nan), total)


def _hide(values: jax.Array, filling: np.float32, *, visible: jax.Array | None) -> jax.Array:
    return values if visible is None else jnp.where(visible, values, filling)


def compute_reciprocal(total: jax.Array) -> jax.Array:
    """Return 1 / total, or 0 for a row that sees no token."""
    return jnp.where(total == 0, _ZERO, np.float32(1) / total)


def weigh_values(
    weights: RowWeights, values: jax.Array, features: int, digits: int, contract: Callable[..., jax.Array] | None = None
) -> jax.Array:
    """Return the values weighted by each row, float32 [batch, heads, groups, queries, features of all blocks].

    A row that sees no token gets 0.

    Args:
        weights: the weights of the rows.
        values: the codes of the values, [batch, heads * blocks, features, tokens]: int8, or what `contract` takes.
        features: the number of features of a block.
        digits: Static. The number of digits of a code.
        contract: Static. A function in place of `contract_digits`.
    """
    batch, heads, blocks, groups, queries, tokens = weights.codes.shape
    rows = weights.codes.reshape(batch, heads * blocks, groups * queries, tokens)
    parts = [(rows >> np.int32(_DIGIT * position)) & np.int32(2**_DIGIT - 1) for position in reversed(range(digits))]
    # The digits are further rows of one contraction, which reads the values once.
    stacked = lax.concatenate([part.astype(jnp.int8) for part in parts], 2)
    contract = contract_digits if contract is None else contract
    y = None
    for start in range(0, tokens, _LONGEST):
        end = min(start + _LONGEST, tokens)
        chunk = (lax.slice_in_dim(stacked, start, end, axis=3), lax.slice_in_dim(values, start, end, axis=3))
        total = _add_digits(contract(*chunk), digits)
        y = total if y is None else y + total
    assert y is not None
    y = y.reshape(batch, heads, blocks, groups, queries, features)
    y = y * (weights.step * compute_reciprocal(lax.expand_dims(weights.total, (2,))))
    return lax.transpose(y, (0, 1, 3, 4, 2, 5)).reshape(batch, heads, groups, queries, blocks * features)


def contract_digits(digits: jax.Array, values: jax.Array) -> jax.Array:
    """Return the int32 contraction of int8 [batch, heads, rows, tokens] and [batch, heads, features, tokens]."""
    role = Role((0, 1), (2,), (3,))
    if isinstance(digits.shape[2], int) and 1 < digits.shape[2] <= _FEW_ROWS:
        acc = contract_roles(values, digits, None, None, role, role)
        return lax.transpose(acc, (0, 1, 3, 2))
    return contract_roles(digits, values, None, None, role, role)


def _add_digits(acc: jax.Array, digits: int) -> jax.Array:
    """Return the float32 sum of the products with each digit, each times its power of 128."""
    rows = acc.shape[2] // digits
    # A product with a power of two is exact, so only the conversions and the additions round.
    parts = [lax.slice_in_dim(acc, i * rows, (i + 1) * rows, axis=2).astype(jnp.float32) for i in range(digits)]
    scaled = [part * np.float32(2 ** (_DIGIT * (digits - 1 - i))) for i, part in enumerate(parts)]
    return functools.reduce(jnp.add, scaled)


def ungroup_heads(y: jax.Array) -> jax.Array:
    """Return [batch, kv heads, groups, queries, features] as [batch, queries, heads, features]."""
    batch, heads, groups, queries, features = y.shape
    return lax.transpose(y.reshape(batch, heads * groups, queries, features), (0, 2, 1, 3))
