"""The contraction of a float array with dequantized codes: its gradient, and its form in chunks for a CPU.

Dequantized at once, the weights of a large layer are written to memory and read again, which takes as long as reading
float weights. On a CPU they are therefore dequantized a chunk at a time, and a chunk is contracted while it is in the
second-level caches. The chunks wait for each other, because XLA:CPU would dequantize all of them first. They are
written out one by one instead of in a loop: XLA:CPU runs a loop that calls no library on one thread.

Few weights are dequantized at once, because each chunk has a cost of its own; so are more weights if there are so many
rows that the contraction takes most of the time. Other backends have forms of their own, or dequantize all weights at
once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._core import dtypes
from . import barriers

# Up to this number of weights, they are dequantized at once; up to the second one if there are this many rows, which
# take so long that it hardly matters whether the weights stay in the second-level caches (0 to 6 % with 256 rows). The
# operations of chunks make the program of a training step larger: chunks of all weights of Gemma 3 270M took half as
# long again to compile.
WHOLE, WHOLE_OF_MANY_ROWS, MANY_ROWS = 2**20, 2**22, 2**8
# The numbers of weights in a chunk. The fewest, as float32, stay in the second-level caches of two cores until the
# contraction reads them. More weights than 16 such chunks are cut into chunks of up to twice that, and rows of x can
# make chunks larger.
_FEWEST, _MANY, _MOST, _FEW_CHUNKS = 2**19, 2**20, 2**21, 16
# From this number of rows on, XLA:CPU's contraction is faster with weights from the third-level cache, in fewer chunks.
_SEVERAL_ROWS, _FEWER_CHUNKS = 64, 4
# The largest number of chunks, which is limited because the program contains the operations of every chunk.
_CHUNKS = 32


class Cut(NamedTuple):
    """How the weights of a contraction are cut into chunks along one dimension.

    Attributes:
        length: the length of the dimension.
        width: the number of weights at each of its indices.
        divisor: a number that divides the length of every chunk but the last.
        axis: the dimension of the product, or None for a contracted dimension.
    """

    length: int
    width: int
    divisor: int
    axis: int | None


class Chunk(NamedTuple):
    """A chunk of the weights of a contraction: the indices from `start` on along the dimension that is cut."""

    start: int
    length: int

    def take(self, part: jax.Array, axis: int, size: int = 1) -> jax.Array:
        """Return the part of an array that belongs to the chunk, where each entry belongs to `size` indices."""
        first, count = self.start // size, -(-self.length // size)
        if axis == part.ndim - 1 and dtypes.count_packed_bits(part.dtype) < 8:  # a byte holds several of these codes
            return lax.slice_in_dim(part, first, first + count, axis=axis)
        # The barrier hides the index from XLA, so that the loops over chunks of the same length are the same program,
        # which XLA:CPU compiles once.
        return lax.dynamic_slice_in_dim(part, lax.optimization_barrier(np.int32(first)), count, axis)


class WeightOnly(Protocol):
    """The parts in which weight-only contractions differ; it must be hashable, because it is a static argument."""

    def make_cpu_form(self) -> Callable[..., jax.Array]:
        """Return the function of x, codes, scale and zero point that computes the float32 product on a CPU."""
        ...

    def make_cuda_form(self) -> Callable[..., jax.Array]:
        """Return the same function for CUDA."""
        ...

    def plan_cut(self, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None) -> Cut:
        """Return how the weights are cut into chunks."""
        ...

    def arrange_operand(self, x: jax.Array) -> Any:
        """Return the float operand in the form that `contract_chunk` takes."""
        ...

    def select_operand(self, x: Any, chunk: Chunk) -> Any:
        """Return the part of an arranged operand that one chunk of the weights is multiplied with."""
        ...

    def dequantize_chunk(
        self, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None, chunk: Chunk | None,
        wait: Callable[[jax.Array], jax.Array],
    ) -> Any:  # fmt: skip
        """Return the dequantized weights of one chunk, with `wait` applied to its scale; None is all of them."""
        ...

    def contract_chunk(self, x: Any, weights: Any) -> jax.Array:
        """Return the float32 product of an arranged operand and weights."""
        ...


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def contract_weights(
    config: WeightOnly, x: jax.Array, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None
) -> jax.Array:
    """Return the float32 contraction of x with the dequantized codes, in the form that each backend runs fast.

    The derivatives with respect to x, the scale and a float32 zero point are as in `contract_at_once`. Codes and
    integer zero points have none.
    """
    default = functools.partial(contract_at_once, config)
    return lax.platform_dependent(
        x, codes, scale, zero_point, cpu=config.make_cpu_form(), cuda=config.make_cuda_form(), default=default
    )


@functools.partial(contract_weights.defjvp, symbolic_zeros=True)
def _contract_weights_jvp(config: WeightOnly, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    # Only what has a tangent is differentiated: a gradient with respect to x must not compute a gradient of the scale.
    numbers = [
        number
        for number, tangent in enumerate(tangents)
        if not isinstance(tangent, SymbolicZero | None) and tangent.dtype != jax.dtypes.float0
    ]

    # Without `jax.checkpoint` the dequantized weights would be kept for the backward pass.
    @jax.checkpoint
    def contract_dequantized(*variables: jax.Array) -> jax.Array:
        operands = list(primals)
        for number, variable in zip(numbers, variables, strict=True):
            operands[number] = variable
        return contract_at_once(config, *operands)

    variables, directions = (tuple(values[number] for number in numbers) for values in (primals, tangents))
    _, tangent = jax.jvp(contract_dequantized, variables, directions)
    return contract_weights(config, *primals), tangent


def contract_at_once(
    config: WeightOnly, x: jax.Array, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None
) -> jax.Array:
    """Return the float32 contraction of x with the codes, which are all dequantized at once."""
    weights = config.dequantize_chunk(codes, scale, zero_point, None, lambda scale: scale)
    return config.contract_chunk(config.arrange_operand(x), weights)


def contract_in_chunks(
    config: WeightOnly, x: jax.Array, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None
) -> jax.Array:
    """Return the float32 contraction of x with the codes, dequantized in chunks that stay in the cache of a CPU."""
    cut = config.plan_cut(codes, scale, zero_point)
    length, axis, rows = cut.length, cut.axis, _choose_chunk_length(cut, x.size)
    # Every chunk reads the float operand. The barrier makes XLA arrange it only once, before the first chunk.
    operand = lax.optimization_barrier(config.arrange_operand(x))
    products: list[jax.Array] = []
    for start in range(0, length, rows):
        wait = functools.partial(delay_floats, predecessor=products[-1] if products else x)
        chunk = Chunk(start, min(rows, length - start))
        weights = config.dequantize_chunk(codes, scale, zero_point, chunk, wait)
        # The barrier keeps XLA from fusing the dequantization into the contraction: its fast kernel reads
        # operands from memory.
        part = config.contract_chunk(config.select_operand(operand, chunk), lax.optimization_barrier(weights))
        if axis is None and products:
            part = products.pop() + part
        products.append(part)
    return products[0] if axis is None else jnp.concatenate(products, axis=axis)


def _choose_chunk_length(cut: Cut, x_size: int) -> int:
    """Return the length of the chunks but the last, from the cut and the number of elements of the float operand."""
    total = cut.length * cut.width
    size = min(max(total // _FEW_CHUNKS, _FEWEST), _MANY)
    if not isinstance(x_size, int) or x_size >= _SEVERAL_ROWS * (cut.length if cut.axis is None else cut.width):
        size = min(max(total // _FEWER_CHUNKS, _FEWEST), _MOST)
    length = max(size // cut.width, -(-cut.length // _CHUNKS), 1)
    if cut.axis is None:
        # The products of the chunks are added. Each sum should take no longer than reading the weights of its chunk.
        # A symbolic number of rows counts as many.
        most = _MOST // cut.width
        length = max(length, min(x_size // cut.length, most) if isinstance(x_size, int) else most)
    return -(-length // cut.divisor) * cut.divisor


def delay_weights(x: jax.Array, codes: jax.Array, scale: jax.Array, is_packed: bool) -> tuple[jax.Array, jax.Array]:
    """Return codes and a scale that on a CPU wait for x, so that their floats are not made before they are used.

    Otherwise XLA:CPU dequantizes the weights of all layers of a program first, and keeps them in memory. Packed codes
    wait, and not their scale: a float is made of both, and the codes should not be unpacked before, either.
    """
    if not is_packed:
        return codes, delay_floats(scale, x)
    # The barrier keeps XLA from finding the place of each code in a stack of all layers, one by one.
    return lax.optimization_barrier(barriers.wait_for(codes, x)), scale


def delay_floats(value: jax.Array, predecessor: jax.Array) -> jax.Array:
    """Return an array of floats, and on a CPU make it wait for `predecessor`."""
    bits = lax.bitcast_convert_type(value, jnp.dtype(f"int{8 * value.dtype.itemsize}"))
    return lax.bitcast_convert_type(barriers.wait_for(bits, predecessor), value.dtype)
