"""A parameter with the factors of its adapter, and the equations that move the elements of both."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays.quantized_array import QuantizedArray
from .._program import jaxpr, moves
from .._program.jaxpr import Equation


@dataclasses.dataclass(frozen=True)
class MovedFactors(moves.Elements):
    """Arrays with the dimensions of a parameter and one more, which does not move.

    Attributes:
        shape: the shape of the parameter.
        parts: the arrays by name. Each dimension has the length of the parameter's, or 1 where all of its indices share
            an entry.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, jax.Array]

    def _move(self, shape: Sequence[int], function: Callable[[jax.Array], jax.Array]) -> MovedFactors:
        return MovedFactors(tuple(shape), {name: function(part) for name, part in self.parts.items()})

    def keep(self) -> MovedFactors:
        """Return the factors as they are."""
        return self

    def vary(self, equation: Equation) -> MovedFactors:
        """Return the factors, marked by an equation."""
        return self._move(self.shape, lambda part: jaxpr.evaluate(equation, [part])[0])

    def convert(self, dtype: Any) -> MovedFactors:
        """Return the factors, which keep their dtype."""
        return self

    def transpose(self, order: Sequence[int]) -> MovedFactors:
        """Return the factors with their dimensions in another order."""
        shape = [self.shape[axis] for axis in order]
        return self._move(shape, lambda part: lax.transpose(part, (*order, len(shape))))

    def reshape(self, shape: Sequence[int]) -> MovedFactors:
        """Return the factors in another shape."""
        groups = list(_match_dimensions(self.shape, shape))

        def reshape(part: jax.Array) -> jax.Array:
            wide, new = list(part.shape), [1] * len(shape)
            for before, after in groups:
                if any(part.shape[axis] != 1 for axis in before):
                    for axis in before:
                        wide[axis] = self.shape[axis]
                    for axis in after:
                        new[axis] = shape[axis]
            return jnp.broadcast_to(part, wide).reshape(*new, part.shape[-1])

        return self._move(shape, reshape)

    def squeeze(self, axes: Sequence[int], shape: Sequence[int]) -> MovedFactors:
        """Return the factors without some dimensions of length 1."""
        return self.reshape(shape)

    def broadcast(self, axes: Sequence[int], shape: Sequence[int]) -> MovedFactors:
        """Return the factors with new dimensions, whose indices share an entry."""

        def broadcast(part: jax.Array) -> jax.Array:
            wide = [1] * len(shape)
            for axis, place in enumerate(axes):
                wide[place] = part.shape[axis]
            return lax.broadcast_in_dim(part, (*wide, part.shape[-1]), (*axes, len(shape)))

        return self._move(shape, broadcast)

    def tile(self, repeats: Sequence[int], shape: Sequence[int]) -> MovedFactors:
        """Return the factors repeated as a whole along each dimension."""
        return self._move(
            shape, lambda part: jnp.tile(part, (*(n if part.shape[i] > 1 else 1 for i, n in enumerate(repeats)), 1))
        )

    def reverse(self, axes: Sequence[int]) -> MovedFactors:
        """Return the factors in reverse order along some dimensions."""
        return self._move(self.shape, lambda part: lax.rev(part, axes))

    def cut(
        self, starts: Sequence[int], limits: Sequence[int], strides: Sequence[int], shape: Sequence[int]
    ) -> MovedFactors:
        """Return a part of the factors along each dimension."""
        bounds = [slice(*bound) for bound in zip(starts, limits, strides, strict=True)]
        return self._move(
            shape, lambda part: part[tuple(b if part.shape[i] > 1 else slice(None) for i, b in enumerate(bounds))]
        )

    def cut_dynamically(self, starts: Sequence[Any], shape: Sequence[int]) -> MovedFactors:
        """Return a part of the factors along each dimension, from starts that the program computes."""

        def cut(part: jax.Array) -> jax.Array:
            for axis, (start, size) in enumerate(zip(starts, shape, strict=True)):
                if part.shape[axis] > 1:
                    part = lax.dynamic_slice_in_dim(part, start, size, axis, allow_negative_indices=False)
            return part

        return self._move(shape, cut)

    def select_index(self, axis: int, index: int) -> MovedFactors:
        """Return the factors at one index of a dimension, without the dimension."""
        shape = (*self.shape[:axis], *self.shape[axis + 1 :])
        return self._move(
            shape, lambda part: lax.index_in_dim(part, index if part.shape[axis] > 1 else 0, axis, keepdims=False)
        )


def _match_dimensions(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the dimensions before and after a reshape that have the same elements, as few at a time as possible."""
    i = j = 0
    while i < len(old) or j < len(new):
        before, after = ([i], []) if i < len(old) else ([], [j])
        i, j = i + len(before), j + len(after)
        while math.prod(old[axis] for axis in before) != math.prod(new[axis] for axis in after):
            if math.prod(old[axis] for axis in before) < math.prod(new[axis] for axis in after):
                before, i = [*before, i], i + 1
            else:
                after, j = [*after, j], j + 1
        yield before, after


def multiply_factors(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the product of two aligned factors: what an adapter adds to a parameter."""
    rank = a.ndim - 1
    if a.shape[rank] == 1:
        return (a * b)[..., 0]
    # As a contraction of what each factor has. With repeated factors XLA may choose another order of the sum, and in a
    # program with a gradient it does; the repeated factors would also be in memory.
    axes_of_a = [axis for axis in range(rank) if a.shape[axis] != 1 or b.shape[axis] == 1]
    axes_of_b = [axis for axis in range(rank) if b.shape[axis] != 1]
    parts = ((a, axes_of_a), (b, axes_of_b))
    operands = [(x.reshape(*(x.shape[i] for i in axes), x.shape[rank]), [*axes, rank]) for x, axes in parts]
    return jnp.einsum(*(part for operand in operands for part in operand), list(range(rank)))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["base", "parts"], meta_fields=["dropout", "kind"])
@dataclasses.dataclass(frozen=True)
class AdaptedParameter:
    """A parameter in a program: its codes, and the factors of its adapter.

    Attributes:
        base: the codes.
        parts: the factors "a" and "b"; "factor" for each output, of "dora"; and "key", the data of a key.
        dropout: the probability.
        kind: the implementation of the key.
    """

    base: QuantizedArray
    parts: Mapping[str, jax.Array]
    dropout: float
    kind: Any

    def dequantize(self) -> jax.Array:
        """Return the floats that codes and adapter stand for, with the gradient of the factors."""
        floats = self.base.dequantize()
        # Neither product nor sum may be computed together with what is around it, which is different in a program with
        # a gradient.
        change = lax.optimization_barrier(multiply_factors(self.parts["a"], self.parts["b"]).astype(floats.dtype))
        total = lax.optimization_barrier(floats + change)
        return total * self.parts["factor"][..., 0].astype(floats.dtype) if "factor" in self.parts else total

    def replace(self, base: Any, parts: Mapping[str, jax.Array]) -> AdaptedParameter:
        return dataclasses.replace(self, base=base, parts=parts)
