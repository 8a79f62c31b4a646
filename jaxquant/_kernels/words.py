"""Codes of 2 to 6 bits in uint32 words: the layout, and the functions that write and read it.

The words hold codes along the last dimension. A group of 32 neighboring codes takes as many words as a code has bits:
first those of the low bits of its codes, then those of the high bits. 2 and 4 bits are all low bits; 3 bits are 2 low
ones and 1 high one, 5 are 4 and 1, 6 are 4 and 2.

A word of low bits has 16 lanes of 2 bits, or 8 lanes of 4 bits, from the lowest bits on: lane l of word m belongs to
code m * lanes + l of the group. The words of high bits hold those of all codes in the same order: a unit of 8 or 16
bits of them belongs to each word of low bits. The words of low bits of a row are one plane, and those of high bits
another one.

Groups are stored in tiles of 16 groups, of 8 if only that divides their number, and otherwise of all groups of the row.
A tile holds the first word of each of its groups, then the second word of each, and so on. The codes of a row beyond
its last multiple of 32 come at its end, as a group of which only the words that are needed are stored. All unused bits
are 0.

The reason is speed. A vector of neighboring words holds the codes at one place of neighboring groups, whose scales are
neighbors in memory too, so a block of 32 codes is scaled by one product for all of its codes. The high bits of a vector
of words are in a vector at the same place of another word. A tile of 16 groups is a cache line of each word, so all
that a loop over groups reads lies next to each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import sharding
from . import packed_codes

# The number of codes in a group, and the numbers of groups that a tile may have if a row has more tiles than one.
GROUP = 32
_TILE, _LEAST_TILE = 16, 8
# The number of lanes that XLA:CPU unpacks in one vector, for each number of lanes. With others it unpacks code by code.
_RUNS = {8: 8, 16: 4}


# A lane, a part, or a number of bits: one for all codes, or integers of a shape that broadcasts with the words.
Position: TypeAlias = int | np.ndarray | jax.Array


class _Layout(NamedTuple):
    """How codes of a width are stored.

    Attributes:
        low: the number of low bits of a code, and of words of low bits in a group.
        high: the number of high bits of a code, and of words of high bits in a group, or 0 if there are none.
    """

    low: int
    high: int

    @property
    def lanes(self) -> int:
        """The number of codes that share a word of low bits."""
        return GROUP // self.low

    @property
    def unit(self) -> int:
        """The number of high bits that belong to a word of low bits."""
        return self.high * self.lanes

    @property
    def parts(self) -> int:
        """The number of units in a word of high bits, or 1."""
        return self.low // self.high if self.high else 1


_LAYOUTS = {2: _Layout(2, 0), 3: _Layout(2, 1), 4: _Layout(4, 0), 5: _Layout(4, 1), 6: _Layout(4, 2)}


class Shape(NamedTuple):
    """How the codes of a row of full groups are arranged: `group * 32 + (word * parts + part) * lanes + lane`.

    Attributes:
        tiles: the number of tiles.
        words: the number of words of high bits in a group, or of low bits if there are no high ones.
        parts: the number of words of low bits that share a word of high bits, or 1.
        groups: the number of groups in a tile.
        lanes: the number of codes in a word of low bits.
    """

    tiles: int
    words: int
    parts: int
    groups: int
    lanes: int


def find_shape(length: int, bits: int) -> Shape:
    """Return how rows of `length` codes, a multiple of 32, are arranged."""
    layout, count = _LAYOUTS[bits], length // GROUP
    groups = math.gcd(count, _TILE)
    groups = groups if groups >= _LEAST_TILE else max(count, 1)
    return Shape(count // groups, layout.low // layout.parts, layout.parts, groups, layout.lanes)


def count_planes(bits: int) -> int:
    """Return 2 for 3, 5 and 6 bits, which have words of high bits, and 1 for 2 and 4 bits."""
    return 2 if _LAYOUTS[bits].high else 1


def count_words(length: int, bits: int) -> int:
    """Return the number of words that hold a row of `length` codes."""
    return length // GROUP * bits + sum(_count_rest(length % GROUP, bits))


def _count_rest(length: int, bits: int) -> tuple[int, int]:
    """Return the numbers of words of low and of high bits for a group of `length` codes."""
    layout = _LAYOUTS[bits]
    return -(-length // layout.lanes), -(-length * layout.high // GROUP)


def has_full_groups(length: int) -> bool:
    """Return whether rows of `length` codes end with a group of 32 codes."""
    return length % GROUP == 0


def split_words(words: jax.Array, bits: int, length: int) -> tuple[jax.Array, ...]:
    """Return the words of the low bits of rows, and those of their high bits, in shapes that broadcast to each other.

    Args:
        words: uint32 [..., count_words(length, bits)].
        bits: the number of bits of a code.
        length: the number of codes in a row, a multiple of 32.

    Returns:
        uint32 [..., tiles, words, parts, groups], in the sizes of `find_shape`; for 3, 5 and 6 bits also the words of
        high bits, uint32 [..., tiles, words, 1, groups].
    """
    layout, shape, lead = _LAYOUTS[bits], find_shape(length, bits), words.shape[:-1]
    tiles = words.reshape(*lead, shape.tiles, bits, shape.groups)
    low = lax.slice_in_dim(tiles, 0, layout.low, axis=-2).reshape(*lead, *shape[:-1])
    if not layout.high:
        return (low,)
    return low, lax.slice_in_dim(tiles, layout.low, bits, axis=-2)[..., None, :]


class Span(NamedTuple):
    """Neighboring groups of each tile.

    Attributes:
        start: the number of the first group.
        length: the number of groups.
        skipped: how many groups at the beginning belong to the span before this one, too.
    """

    start: int
    length: int
    skipped: int = 0

    def cut(self, part: jax.Array) -> jax.Array:
        """Return the groups of the span, in an array whose last dimension is for groups."""
        is_whole = self.start == 0 and part.shape[-1] == self.length
        return part if is_whole else lax.slice_in_dim(part, self.start, self.start + self.length, axis=-1)


def arrange_row(row: jax.Array, bits: int, spans: Sequence[Span] = ()) -> jax.Array:
    """Return the elements of a row of floats in the order of the lanes: [lanes, tiles, words, parts, groups].

    Args:
        row: [length], a multiple of 32.
        bits: the number of bits of a code.
        spans: the spans that follow each other in the groups of the result, by default one of all groups. What a span
            skips is 0.
    """
    shape = find_shape(row.shape[0], bits)
    arranged = row.reshape(shape.tiles, shape.groups, shape.words, shape.parts, shape.lanes)
    if any(span.length < shape.groups for span in spans):
        parts = []
        for span in spans:
            first = span.start + span.skipped
            part = lax.slice_in_dim(arranged, first, span.start + span.length, axis=1)
            parts.append(lax.pad(part, np.float32(0), [(0, 0, 0), (span.skipped, 0, 0), *((0, 0, 0),) * 3]))
        arranged = lax.concatenate(parts, 1)
    arranged = arranged.transpose(4, 0, 2, 3, 1)
    # One dimension, because XLA would give an array of several ones another order in memory, and copy nothing.
    flat = lax.optimization_barrier(arranged.reshape(-1))
    return flat.reshape(shape.lanes, *arranged.shape[1:])


def align_parts(plane: jax.Array, shape: tuple[int, ...], bits: int, axis: int, lane: int = 0) -> jax.Array:
    """Return words of high bits for each part, shifted to the right until the bits of one lane of the part come first.

    Args:
        plane: words of high bits, of a shape that broadcasts to `shape`.
        shape: the shape of the words of low bits.
        bits: the number of bits of a code.
        axis: the dimension of the parts.
        lane: the lane.
    """
    layout = _LAYOUTS[bits]
    first_bit = lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(layout.unit)
    first_bit = first_bit + np.uint32(lane * layout.high)
    return lax.shift_right_logical(jnp.broadcast_to(plane, shape), first_bit)


def read_lane(
    planes: tuple[jax.Array, ...], bits: int, lane: Position, high_lane: Position, part: Position, *, signed: bool
) -> jax.Array:
    """Return, as int32, the codes of one lane of words.

    Args:
        planes: words of low bits, and for 3, 5 and 6 bits words of high bits, of shapes that broadcast.
        bits: the number of bits of a code.
        lane: an int, or int32 of a shape that broadcasts with the planes, for several lanes at once.
        high_lane: like `lane`, the lane in the words of high bits, which `align_parts` may have shifted.
        part: like `lane`, the part of each word; 0 if `align_parts` returned the words of high bits.
        signed: whether the codes are in two's complement.

    Returns:
        int32 of the common shape.
    """
    layout = _LAYOUTS[bits]
    shape = jnp.broadcast_shapes(*(plane.shape for plane in planes), np.shape(lane), np.shape(part))
    low, *high = (jnp.broadcast_to(plane, shape) for plane in planes)
    # The words are not converted before they are shifted: XLA would convert them once for all lanes, in memory.
    if not signed:
        code = _read_bits(low, layout.low, lane * layout.low)
        if layout.high:
            bits_above = _read_bits(high[0], layout.high, part * layout.unit + high_lane * layout.high)
            code = code | lax.shift_left(bits_above, np.uint32(layout.low))
        return code.astype(jnp.int32)
    # A shift to the left and back removes the other bits and extends the sign.
    code = _raise_bits(low, layout.low, lane * layout.low)
    if layout.high:
        raised = _raise_bits(high[0], layout.high, part * layout.unit + high_lane * layout.high)
        # The high bits of the code are the highest bits of the word, and the low ones follow.
        mask = np.uint32(2**32 - 2 ** (32 - layout.high))
        code = (raised & mask) | lax.shift_right_logical(code, np.uint32(layout.high))
    return lax.shift_right_arithmetic(code.astype(jnp.int32), np.int32(32 - bits))


def read_lane_steps(
    planes: tuple[jax.Array, ...], bits: int, lane: Position, high_lane: Position, part: Position, base: jax.Array, *,
    signed: bool,
) -> jax.Array:  # fmt: skip
    """Return, as float32, the codes of one lane of words minus a zero point, as `packed_codes.read_steps` does.

    They take fewer operations than the codes of `read_lane`.

    Args:
        planes: words of low bits and of high bits, of shapes that broadcast.
        bits: the number of bits of a code: 3, 5 or 6.
        lane: an int, or int32 of a shape that broadcasts with the planes, for several lanes at once.
        high_lane: like `lane`, the lane in the words of high bits, which `align_parts` may have shifted.
        part: like `lane`, the part of each word; 0 if `align_parts` returned the words of high bits.
        base: what `packed_codes.compute_base` returns for the zero point, of a shape that broadcasts.
        signed: whether the codes are in two's complement.

    Returns:
        float32 of the common shape.
    """
    layout = _LAYOUTS[bits]
    shape = jnp.broadcast_shapes(*(plane.shape for plane in planes), np.shape(lane))
    low, high = (jnp.broadcast_to(plane, shape) for plane in planes)
    low = _read_bits(low, layout.low, lane * layout.low)
    first_bit = part * layout.unit + high_lane * layout.high
    if isinstance(first_bit, int):
        high = _shift_right(high, first_bit - layout.low)
    else:
        high = _shift_right(_shift_right(high, first_bit), -layout.low)
    high = high & np.uint32((2**layout.high - 1) << layout.low)
    code = (low ^ np.uint32(packed_codes.UNIT_BITS + signed * 2 ** (bits - 1))) ^ high
    return lax.bitcast_convert_type(code, jnp.float32) - base


def _read_bits(plane: jax.Array, width: int, first_bit: Position) -> jax.Array:
    """Return `width` bits of words from one bit on, as uint32."""
    if isinstance(first_bit, int) and first_bit + width == 32:
        return _shift_right(plane, first_bit)
    return _shift_right(plane, first_bit) & np.uint32(2**width - 1)


def _raise_bits(plane: jax.Array, width: int, first_bit: Position) -> jax.Array:
    """Return words, shifted to the left until the `width` bits from one bit on are the highest ones."""
    if isinstance(first_bit, int):
        return _shift_right(plane, first_bit + width - 32)
    shift = _place(np.int32(32 - width) - first_bit, plane)
    return lax.shift_left(plane, shift)


def _shift_right(plane: jax.Array, count: Position) -> jax.Array:
    """Return uint32 shifted to the right, or by an int below 0 to the left."""
    if not isinstance(count, int):
        return lax.shift_right_logical(plane, _place(count, plane))
    if count == 0:
        return plane
    shift = lax.shift_left if count < 0 else lax.shift_right_logical
    return shift(plane, np.uint32(abs(count)))


def _place(count: np.ndarray | jax.Array, plane: jax.Array) -> jax.Array:
    """Return int32 numbers as uint32 in the shape of a plane, and on its devices."""
    return sharding.place_like(jnp.broadcast_to(count.astype(jnp.uint32), plane.shape), plane)


def spread_lanes(planes: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Return what `split_words` returns in the order of the codes: [..., tiles, groups, words, parts or 1, 1]."""
    lead = planes[0].ndim - 4
    order = (*range(lead), lead, lead + 3, lead + 1, lead + 2)
    return tuple(plane.transpose(order)[..., None] for plane in planes)


def unpack_words(words: jax.Array, bits: int, length: int, *, signed: bool) -> jax.Array:
    """Return the codes that `pack_words` packed.

    Args:
        words: uint32 [..., count_words(length, bits)].
        bits: the number of bits of a code, from 2 to 6.
        length: the number of codes in a row.
        signed: whether the codes are in two's complement.

    Returns:
        int8 or uint8 [..., length].
    """
    rest, lead = length % GROUP, words.shape[:-1]
    full = length - rest
    if rest:
        end = lax.slice_in_dim(words, words.shape[-1] - sum(_count_rest(rest, bits)), None, axis=-1)
        low, high = _count_rest(rest, bits)
        layout = _LAYOUTS[bits]
        end = (lax.slice_in_dim(end, 0, low, axis=-1), lax.slice_in_dim(end, low, low + high, axis=-1))
        end = lax.concatenate([_pad_last(end[0], layout.low), _pad_last(end[1], layout.high)], len(lead))
        codes = lax.slice_in_dim(unpack_words(end, bits, GROUP, signed=signed), 0, rest, axis=-1)
        if not full:
            return codes
        start = lax.slice_in_dim(words, 0, full // GROUP * bits, axis=-1)
        return lax.concatenate([unpack_words(start, bits, full, signed=signed), codes], len(lead))
    layout, size = _LAYOUTS[bits], find_shape(length, bits)
    planes = spread_lanes(split_words(words, bits, length))
    low, *high = planes
    if high and size.words > 1:  # XLA:CPU does not vectorize the loop over both
        low = low.reshape(*low.shape[:-3], layout.low, 1, 1)
        code = _unpack_plane(low, layout.low, layout.lanes, length)
        code = code | _unpack_plane(high[0], layout.high, GROUP // layout.high, length) << np.uint8(layout.low)
        sign = np.uint8(signed * 2 ** (bits - 1))
        return lax.bitcast_convert_type((code ^ sign) - sign, jnp.int8) if signed else code
    run = _RUNS[size.lanes]
    lane, part = _list_lanes(size.lanes, run), np.arange(size.parts, dtype=np.int32)[:, None, None]
    planes = tuple(plane[..., None] for plane in planes)
    codes = read_lane(planes, bits, lane, lane, part, signed=signed).astype(jnp.int8 if signed else jnp.uint8)
    # The barrier keeps XLA from finding the place of each code by divisions.
    return lax.optimization_barrier(codes).reshape(*lead, length)


def _unpack_plane(plane: jax.Array, width: int, lanes: int, length: int) -> jax.Array:
    """Return the bits of one plane as `spread_lanes` returns it, each code's in uint8 [..., length]."""
    run = _RUNS[lanes]
    shape = (*plane.shape[:-1], lanes // run, run)
    bits = _read_bits(jnp.broadcast_to(plane[..., None], shape), width, _list_lanes(lanes, run) * np.int32(width))
    return lax.optimization_barrier(bits.astype(jnp.uint8)).reshape(*plane.shape[:-5], length)


def _list_lanes(lanes: int, run: int) -> np.ndarray:
    """Return the lane of each code of a word: int32 [lanes / run, run].

    A constant, not `lax.iota` of the codes' shape: XLA would compute the shifts of all codes before the loop over a
    model's layers, and read four bytes of them for each code.
    """
    return np.arange(lanes, dtype=np.int32).reshape(-1, run)


def pack_words(codes: jax.Array, bits: int) -> jax.Array:
    """Return integers in words.

    Args:
        codes: integers of any dtype [..., length]; their lowest `bits` bits are kept.
        bits: the number of bits of a code, from 2 to 6.

    Returns:
        uint32 [..., count_words(length, bits)].
    """
    layout, lead, rest = _LAYOUTS[bits], codes.shape[:-1], codes.shape[-1] % GROUP
    full = codes.shape[-1] - rest
    if rest:
        end = pack_words(_pad_last(lax.slice_in_dim(codes, full, None, axis=-1), GROUP), bits)
        low, high = _count_rest(rest, bits)
        parts = [lax.slice_in_dim(end, first, first + n, axis=-1) for first, n in ((0, low), (layout.low, high))]
        start = pack_words(lax.slice_in_dim(codes, 0, full, axis=-1), bits)
        return lax.concatenate([start, *parts], len(lead))
    size = find_shape(full, bits)
    lanes = codes.reshape(*lead, size.tiles, size.groups, layout.low, layout.lanes)
    words = _join_last(lanes, layout.low, 0)
    if layout.high:
        units = _join_last(lanes, layout.high, layout.low).reshape(*words.shape[:-1], size.words, size.parts)
        words = lax.concatenate([words, _join_last(units, layout.unit, 0)], words.ndim - 1)
    return jnp.moveaxis(words, -1, -2).reshape(*lead, full // GROUP * bits)


def _join_last(lanes: jax.Array, width: int, first_bit: int) -> jax.Array:
    """Return `width` bits of each element of the last dimension next to each other: uint32 without that dimension."""
    mask, parts = np.uint32(2**width - 1), []
    for i in range(lanes.shape[-1]):
        lane = lanes[..., i].astype(jnp.uint32)
        parts.append(lax.shift_left(lax.shift_right_logical(lane, np.uint32(first_bit)) & mask, np.uint32(width * i)))
    return functools.reduce(lax.bitwise_or, parts)


def _pad_last(x: jax.Array, length: int) -> jax.Array:
    """Return x with zeros at the end of its last dimension."""
    if x.shape[-1] == length:
        return x
    return lax.pad(x, np.zeros((), x.dtype), [*((0, 0, 0) for _ in x.shape[:-1]), (0, length - x.shape[-1], 0)])
