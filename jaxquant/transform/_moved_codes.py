"""The equations that move the elements of a parameter, applied to its codes, scale and zero point or offset."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import indexing
from .._arrays.concatenate import concatenate
from .._arrays.quantized_array import QuantizedArray, check_form, read_entries
from .._core import granularity
from .._program import jaxpr, moves
from .._program.jaxpr import Equation

_MOVED_FORMS = ("signed_scale", "packing", "offset")


def move_elements(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """Return the results of an equation of `views.follow_equation` for a quantized operand.

    Args:
        equation: the equation.
        operands: the quantized array, or several to be concatenated; after it the indices of a dynamic slice. Those of
            a barrier may be other arrays, too.
    """
    name = jaxpr.read_name(equation)
    if name == moves.BARRIER:
        return list(lax.optimization_barrier(tuple(operands)))
    if name == moves.SELECTION:
        # All cases are the same elements of the same parameter, as the analysis has found.
        return [operands[1]]
    join = moves.match_join(equation)
    if join is not None:
        axis, is_new = join
        arrays = [_read_scales(q) for q in operands]
        if is_new:
            arrays = [MovedCodes(q).reshape((*q.shape[:axis], 1, *q.shape[axis:])).array for q in arrays]
        return [concatenate(arrays, axis)]
    move = moves.MOVES[name].move
    assert move is not None
    return [moved.array for moved in move(equation, MovedCodes(operands[0]), *operands[1:])]


def can_concatenate(arrays: Sequence[QuantizedArray]) -> bool:
    """Return whether the codes of quantized arrays can stand in one array."""
    kinds = {(q.format, q.scale.dtype, q.dtype, None if q.offset is None else q.offset.dtype) for q in arrays}
    return len(kinds) == 1


@dataclasses.dataclass(frozen=True, eq=False)
class MovedCodes(moves.Elements):
    """A quantized array and the moves of its codes and of the entries that it has for them."""

    array: QuantizedArray

    def keep(self) -> MovedCodes:
        """Return the codes as they are."""
        return self

    def vary(self, equation: Equation) -> MovedCodes:
        """Return the codes, marked by an equation."""
        # Inside of `jax.shard_map` the parts must differ between devices where the floats do.
        return MovedCodes(jax.tree.map(lambda part: jaxpr.evaluate(equation, [part])[0], self.array))

    def convert(self, dtype: Any) -> MovedCodes:
        """Return codes that stand for floats of another dtype."""
        return MovedCodes(self.array.astype(dtype))

    def transpose(self, order: Sequence[int]) -> MovedCodes:
        """Return the codes with their dimensions in another order."""
        # The codes stay in memory as they are: transposing them would cost more than the contraction saves.
        return MovedCodes(indexing.view_transposed(self.array, order))

    def reshape(self, shape: Sequence[int]) -> MovedCodes:
        """Return the codes in another shape.

        Where a merged dimension repeats a sequence of entries, or a dimension is divided within a block, each of its
        indices gets an entry.
        """
        q, shape = _read_scales(self.array), tuple(shape)
        entries = {name: _spread(q, part, shape) for name, part in indexing.list_entries(q).items()}
        return MovedCodes(q.replace(**entries).reshape(shape))

    def squeeze(self, axes: Sequence[int], shape: Sequence[int]) -> MovedCodes:
        """Return the codes without some dimensions of length 1."""
        return self.reshape(shape)

    def broadcast(self, places: Sequence[int], shape: Sequence[int]) -> MovedCodes:
        """Return the codes repeated along new dimensions; repeated elements share their scale."""
        places, shape, q = tuple(places), tuple(shape), _read_scales(self.array)
        check_form("prepare", "a parameter", q, _MOVED_FORMS)

        def broadcast_entries(part: jax.Array) -> jax.Array:
            # Repeated elements share their entry, so a scale gets new dimensions of 1 only.
            wide = [1] * len(shape)
            for axis, place in enumerate(places):
                wide[place] = part.shape[axis]
            return lax.broadcast_in_dim(part, tuple(wide), places)

        entries = {name: broadcast_entries(part) for name, part in indexing.list_entries(q).items()}
        codes = lax.broadcast_in_dim(q.codes, shape, places)
        return MovedCodes(q.replace(codes=codes, stored_order=None, **entries))

    def tile(self, repeats: Sequence[int], shape: Sequence[int]) -> MovedCodes:
        """Return the codes repeated as a whole along each dimension."""
        # A new dimension in front of each one, merged with it.
        wide = tuple(n for pair in zip(repeats, self.array.shape, strict=True) for n in pair)
        return self.broadcast(range(1, 2 * self.array.ndim, 2), wide).reshape(shape)

    def reverse(self, axes: Sequence[int]) -> MovedCodes:
        """Return the codes in reverse order along some dimensions."""
        q = self.array
        return MovedCodes(q[tuple(slice(None, None, -1 if axis in axes else 1) for axis in range(q.ndim))])

    def cut(
        self, starts: Sequence[int], limits: Sequence[int], strides: Sequence[int], shape: Sequence[int]
    ) -> MovedCodes:  # fmt: skip
        """Return a part of the codes along each dimension."""
        return MovedCodes(self.array[tuple(slice(*bound) for bound in zip(starts, limits, strides, strict=True))])

    def cut_dynamically(self, starts: Sequence[jax.Array], shape: Sequence[int]) -> MovedCodes:
        """Return a part of the codes along each dimension, from starts that the program computes."""
        q, sizes = _read_scales(self.array), tuple(shape)
        check_form("prepare", "a parameter", q, _MOVED_FORMS)
        # One entry for each index of the axes that are cut, unless all indices share one.
        cut = [axis for axis, (size, n) in enumerate(zip(sizes, q.shape, strict=True)) if size != n]
        entries = {}
        for name, part in indexing.list_entries(q).items():
            for axis in cut:
                part = part if part.shape[axis] == 1 else _expand(q, part, axis)
            zeros = [jnp.zeros_like(start) for start in starts]
            places = [start if n != 1 else zero for start, zero, n in zip(starts, zeros, part.shape, strict=True)]
            lengths = [sizes[axis] if axis in cut and n != 1 else n for axis, n in enumerate(part.shape)]
            # As in `cut_codes`, no start is counted from the end.
            entries[name] = lax.dynamic_slice(part, places, lengths, allow_negative_indices=False)
        return MovedCodes(indexing.cut_codes(q.replace(**entries), starts, sizes))

    def select_index(self, axis: int, index: int) -> MovedCodes:
        """Return the codes at one index of a dimension, without the dimension."""
        return MovedCodes(self.array[(*(slice(None),) * axis, index)])


def _read_scales(q: QuantizedArray) -> QuantizedArray:
    """Return an array with floats for scales and offsets that are quantized themselves, which not all moves keep."""
    if not any(isinstance(part, QuantizedArray) for part in (q.scale, q.offset)):
        return q
    return q.replace(scale=read_entries(q.scale), offset=read_entries(q.offset))


def _spread(q: QuantizedArray, part: Any, shape: tuple[int, ...]) -> Any:
    """Return a scale, zero point or offset that can be reshaped with its codes."""
    for axes in _match_merged(q.shape, shape):
        # An entry for all indices of a slower dimension is repeated for all indices of a faster one.
        varying = [axis for axis in axes if part.shape[axis] > 1]
        for axis in axes[: axes.index(varying[-1])] if varying else ():
            part = _expand(q, part, axis)
    if not indexing.can_reshape(q, part, shape):
        for axis, n in enumerate(part.shape):
            part = part if n == 1 else _expand(q, part, axis)
    return part


def _match_merged(old: Sequence[int], new: Sequence[int]) -> Iterator[list[int]]:
    """Yield the dimensions that a reshape merges, or splits in another way."""
    ends, size, axes = set(itertools.accumulate(new, operator.mul)), 1, []
    for axis, length in enumerate(old):
        size *= length
        axes.append(axis)
        if size in ends:
            yield axes
            axes = []


def _expand(q: QuantizedArray, part: jax.Array, axis: int) -> jax.Array:
    """Return a scale, zero point or offset with an entry for each index of an axis."""
    length = q.shape[axis]
    if part.shape[axis] == length:
        return part
    sizes = granularity.Aligned(q.block_size).sizes(part.shape, q.shape)
    assert sizes is not None
    size = sizes[axis]
    return granularity.expand_blocks(part, axis, size, length)
