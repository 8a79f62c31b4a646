"""Codes of 2 to 6 bits in uint32 words: the layout, and the functions that write and read it.

The words hold codes along the last dimension. A row of n codes has one or two planes, one after the other: 2 and 4 bits
have one plane; 3 bits are 2 low bits and 1 high bit, 5 are 4 and 1, 6 are 4 and 2.

The first plane has w = ceil(n / lanes) words: of 16 lanes of 2 bits, or of 8 lanes of 4 bits, from the lowest bits on.
Lane l of word j belongs to code l * w + j. In the second plane, a unit of 8 or 16 bits belongs to each word of the
first one, and holds the high bits of the same codes in the same order. It has v = ceil(w * unit / 32) words, and unit
j is the one from bit unit * (j // v) on of word j % v. All unused bits are 0.

The reason is speed: what is read in a vector is next to each other in memory, with one shift for the whole vector.
Codes of a lane are neighbors, so neither they nor what they are multiplied with must be moved: a row of floats, a row
of scales, or the sum over rows is cut into lanes as it is. If the codes of a word were neighbors, as they are in most
files, the sum over the last dimension would need a scale of a block for a few words only; if the units of a word
belonged to neighboring words of the first plane, each unit would have to be moved to its place.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import sharding
from . import barriers, packed_codes


class _Layout(NamedTuple):
    """How codes of a width are stored.

    Attributes:
        low: the number of bits of a code in the first plane.
        high: the number of bits of a code in the second plane, or 0 if there is none.
    """

    low: int
    high: int

    @property
    def lanes(self) -> int:
        """The number of codes that share a word of the first plane."""
        return 32 // self.low

    @property
    def unit(self) -> int:
        """The number of bits in the second plane that belong to a word of the first one."""
        return self.high * self.lanes

    @property
    def parts(self) -> int:
        """The number of units in a word of the second plane, or 1."""
        return 32 // self.unit if self.high else 1


_LAYOUTS = {2: _Layout(2, 0), 3: _Layout(2, 1), 4: _Layout(4, 0), 5: _Layout(4, 1), 6: _Layout(4, 2)}


def count_lanes(bits: int) -> int:
    """Return the number of codes that share a word of the first plane: 16 of 2 and 3 bits, 8 of 4, 5 and 6 bits."""
    return _LAYOUTS[bits].lanes


def count_parts(bits: int) -> int:
    """Return the number of words of the first plane that share a word of the second one; 1 if there is none."""
    return _LAYOUTS[bits].parts


def count_planes(bits: int) -> int:
    """Return the number of planes: 1 for 2 and 4 bits, 2 for 3, 5 and 6 bits."""
    return 2 if _LAYOUTS[bits].high else 1


def count_words(length: int, bits: int) -> int:
    """Return the number of words that hold a row of `length` codes."""
    first, second = _count_plane_words(length, bits)
    return first + second


def _count_plane_words(length: int, bits: int) -> tuple[int, int]:
    layout = _LAYOUTS[bits]
    first = -(-length // layout.lanes)
    return first, -(-first * layout.unit // 32)


def is_even(length: int, bits: int) -> bool:
    """Return whether the planes of rows of `length` codes have no unused bits, as for all multiples of 32."""
    return length % (count_lanes(bits) * count_parts(bits)) == 0


def split_words(words: jax.Array, bits: int, length: int) -> tuple[jax.Array, ...]:
    """Return the planes of rows of words, in shapes that broadcast to each other.

    Args:
        words: uint32 [..., count_words(length, bits)].
        bits: the number of bits of a code.
        length: the number of codes in a row.

    Returns:
        The first plane, uint32 [..., parts, v], with v = w / parts; for 3, 5 and 6 bits also the second one, uint32
        [..., 1, v]. If the planes are not even, zeros are added to the first one.
    """
    layout, (first, second) = _LAYOUTS[bits], _count_plane_words(length, bits)
    lead = words.shape[:-1]
    if not layout.high:
        return (words.reshape(*lead, 1, first),)
    low = _pad_last(lax.slice_in_dim(words, 0, first, axis=-1), layout.parts * second)
    high = lax.slice_in_dim(words, first, first + second, axis=-1)
    return low.reshape(*lead, layout.parts, second), high.reshape(*lead, 1, second)


def split_vectors(
    words: jax.Array, bits: int, length: int, size: int, number: int, count: int
) -> tuple[jax.Array, ...]:
    """Return every `count`-th vector of the planes of rows of words, from one vector on.

    They are cut out of the words as they are in memory, so that XLA:CPU does not copy them. The planes must be even.

    Args:
        words: uint32 [..., count_words(length, bits)].
        bits: the number of bits of a code.
        length: the number of codes in a row.
        size: the number of words in a vector.
        number: the first vector.
        count: a number that divides the number of vectors of each part.

    Returns:
        uint32 [..., parts, v / (size * count), size], where `split_words` returns [..., parts, v]; for 3, 5 and 6 bits
        also those of the second plane, [..., 1, v / (size * count), size].
    """
    layout, (first, second) = _LAYOUTS[bits], _count_plane_words(length, bits)
    lead, vectors = words.shape[:-1], words.reshape(*words.shape[:-1], -1, size)
    spans = [(0, first // size, layout.parts)]
    if layout.high:
        spans.append((first // size, (first + second) // size, 1))
    cut = (lax.slice_in_dim(vectors, start + number, end, count, len(lead)) for start, end, _ in spans)
    return tuple(plane.reshape(*lead, parts, -1, size) for plane, (_, _, parts) in zip(cut, spans, strict=True))


def split_units(words: jax.Array, bits: int, length: int, predecessor: jax.Array) -> tuple[jax.Array, ...]:
    """Return the planes of rows of words, with the unit of the second plane that belongs to each word of the first one.

    The units are a copy, which XLA:CPU makes after `predecessor`. The planes must be even.

    Args:
        words: uint32 [..., count_words(length, bits)].
        bits: the number of bits of a code.
        length: the number of codes in a row.
        predecessor: an array to wait for.

    Returns:
        The first plane, uint32 [..., w]; for 3, 5 and 6 bits also the units, uint32 [..., w].
    """
    layout, (first, second) = _LAYOUTS[bits], _count_plane_words(length, bits)
    if not layout.high:
        return (words,)
    low, high = (lax.slice_in_dim(words, *span, axis=-1) for span in ((0, first), (first, first + second)))
    shape = (*words.shape[:-1], layout.parts, second)
    units = align_parts(barriers.wait_for(high, predecessor)[..., None, :], shape, bits, len(shape) - 2)
    # The barrier keeps XLA from finding the part of each word by divisions.
    units = lax.optimization_barrier(units.astype(f"uint{layout.unit}")).reshape(low.shape)
    return low, units.astype(jnp.uint32)


def align_parts(plane: jax.Array, shape: tuple[int, ...], bits: int, axis: int) -> jax.Array:
    """Return the words of the second plane for each part, shifted to the right until the bits of the part come first.

    Args:
        plane: the second plane, as `split_vectors` returns it.
        shape: the shape of the first plane.
        bits: the number of bits of a code.
        axis: the dimension of the parts.
    """
    part = lax.broadcasted_iota(jnp.uint32, shape, axis)
    return lax.shift_right_logical(jnp.broadcast_to(plane, shape), part * np.uint32(_LAYOUTS[bits].unit))


def read_lane(planes: tuple[jax.Array, ...], bits: int, lane: int | jax.Array, *, signed: bool) -> jax.Array:
    """Return, as int32, the codes of one lane of rows of words, in their order.

    They are the codes `lane * w` to `lane * w + w - 1`, or 0 beyond the end of a row.

    Args:
        planes: what `split_words` returns, or the same rows and words of both planes.
        bits: the number of bits of a code.
        lane: an int, or int32 of a shape that broadcasts with the planes, for several lanes at once.
        signed: whether the codes are in two's complement.

    Returns:
        int32 of the common shape, [..., parts, v].
    """
    layout = _LAYOUTS[bits]
    shape = jnp.broadcast_shapes(*(plane.shape for plane in planes), np.shape(lane))
    low, *high = (jnp.broadcast_to(plane.astype(jnp.int32), shape) for plane in planes)
    lane = sharding.place_like(jnp.broadcast_to(np.int32(lane) if isinstance(lane, int) else lane, shape), low)
    # A shift to the left and back removes the other bits and extends the sign.
    code = _raise_lane(low, layout.low, lane)
    if layout.high:
        part = sharding.place_like(lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2), low)
        raised = _raise_lane(high[0], layout.high, lane, part * np.int32(layout.unit))
        # The high bits of the code are the highest bits of the word, and the low ones follow.
        mask = np.int32(-(2 ** (32 - layout.high)))
        code = lax.bitwise_or(raised & mask, lax.shift_right_logical(code, np.int32(layout.high)))
    return (lax.shift_right_arithmetic if signed else lax.shift_right_logical)(code, np.int32(32 - bits))


def read_lane_steps(
    planes: tuple[jax.Array, ...], bits: int, lane: int | jax.Array, part: int | jax.Array, base: jax.Array, *,
    signed: bool,
) -> jax.Array:  # fmt: skip
    """Return, as float32, the codes of one lane of rows of words minus a zero point, as `packed_codes.read_steps` does.

    They take fewer operations than the codes of `read_lane`, and no shift of the first plane by a number of bits that
    is the same for all lanes: XLA:CPU would make that number an operand of the loop, because it is used so often.

    Args:
        planes: two planes as `split_words` returns them, or the same rows and words of both.
        bits: the number of bits of a code: 3, 5 or 6.
        lane: an int, or int32 of a shape that broadcasts with the planes, for several lanes at once.
        part: like `lane`, the part of each word; 0 if `align_parts` returned the second plane.
        base: what `packed_codes.compute_base` returns for the zero point, of a shape that broadcasts.
        signed: whether the codes are in two's complement.

    Returns:
        float32 of the common shape.
    """
    layout = _LAYOUTS[bits]
    shape = jnp.broadcast_shapes(*(plane.shape for plane in planes), np.shape(lane))
    low, high = (jnp.broadcast_to(plane, shape) for plane in planes)
    low = _shift_right(low, lane * layout.low) & np.uint32(2**layout.low - 1)
    first_bit = part * layout.unit + lane * layout.high
    if isinstance(first_bit, int):
        high = _shift_right(high, first_bit - layout.low)
    else:
        high = _shift_right(_shift_right(high, first_bit), -layout.low)
    high = high & np.uint32((2**layout.high - 1) << layout.low)
    code = (low ^ np.uint32(packed_codes.UNIT_BITS + signed * 2 ** (bits - 1))) ^ high
    return lax.bitcast_convert_type(code, jnp.float32) - base


def _shift_right(plane: jax.Array, count: int | jax.Array) -> jax.Array:
    """Return uint32 shifted to the right, or by an int below 0 to the left."""
    if isinstance(count, int):
        shift = lax.shift_left if count < 0 else lax.shift_right_logical
        return shift(plane, np.uint32(abs(count)))
    return lax.shift_right_logical(plane, count.astype(jnp.uint32))


def _raise_lane(plane: jax.Array, width: int, lane: jax.Array, first_bit: jax.Array | None = None) -> jax.Array:
    """Return a plane, shifted to the left until the bits of a lane are the highest ones."""
    shift = np.int32(32 - width) - lane * np.int32(width)
    return lax.shift_left(plane, shift if first_bit is None else shift - first_bit)


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
    planes, lanes, (width, _) = split_words(words, bits, length), count_lanes(bits), _count_plane_words(length, bits)
    lead = words.shape[:-1]
    shape = (*lead, lanes, *planes[0].shape[-2:])
    planes = tuple(jnp.expand_dims(plane, -3) for plane in planes)
    codes = read_lane(planes, bits, lax.broadcasted_iota(jnp.int32, shape, len(lead)), signed=signed)
    # The barrier keeps XLA from finding the lane and the word of each code by divisions.
    codes = lax.optimization_barrier(codes.astype(jnp.int8 if signed else jnp.uint8))
    codes = lax.slice_in_dim(codes.reshape(*lead, lanes, shape[-2] * shape[-1]), 0, width, axis=-1)
    return lax.slice_in_dim(codes.reshape(*lead, lanes * width), 0, length, axis=-1)


def pack_words(codes: jax.Array, bits: int) -> jax.Array:
    """Return integers in words.

    Args:
        codes: integers of any dtype [..., length]; their lowest `bits` bits are kept.
        bits: the number of bits of a code, from 2 to 6.

    Returns:
        uint32 [..., count_words(length, bits)].
    """
    layout, (first, second), lead = _LAYOUTS[bits], _count_plane_words(codes.shape[-1], bits), codes.shape[:-1]
    lanes = _pad_last(codes, layout.lanes * first).reshape(*lead, layout.lanes, first)
    low = _join_lanes(lanes, layout.low, 0)
    if not layout.high:
        return low
    units = _pad_last(_join_lanes(lanes, layout.high, layout.low), layout.parts * second)
    units = units.reshape(*lead, layout.parts, second)
    return lax.concatenate([low, _join_lanes(units, layout.unit, 0)], len(lead))


def _join_lanes(lanes: jax.Array, width: int, first_bit: int) -> jax.Array:
    """Return `width` bits of each lane, [..., lanes, words], next to each other: uint32 [..., words]."""
    mask, parts = np.uint32(2**width - 1), []
    for i in range(lanes.shape[-2]):
        lane = lanes[..., i, :].astype(jnp.uint32)
        parts.append(lax.shift_left(lax.shift_right_logical(lane, np.uint32(first_bit)) & mask, np.uint32(width * i)))
    return functools.reduce(lax.bitwise_or, parts)


def _pad_last(x: jax.Array, length: int) -> jax.Array:
    """Return x with zeros at the end of its last dimension."""
    if x.shape[-1] == length:
        return x
    return lax.pad(x, np.zeros((), x.dtype), [*((0, 0, 0) for _ in x.shape[:-1]), (0, length - x.shape[-1], 0)])
