"""Leaves of an optimizer state as blocks of codes: which elements share a scale, and how they are rounded."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import scale_from_range
from .._arrays.codebook import Codebook
from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._core import dtypes, sharding, small_floats
from .._core.granularity import Aligned, Blocked, PerTensor
from .._kernels import barriers, rounding
from .._kernels.affine import divide_by_scale
from .codebooks import read_levels, round_to_levels

_LARGEST_BLOCK = 256
# Square tiles first: a mesh that divides the matrix divides its tiles of 16 more often than rows of 256.
_LENGTHS = (16, 32, 64, 128, 256, 8, 4, 2)
_SLACK = 1.2


def choose_blocks(shape: tuple[int, ...]) -> PerTensor | Blocked:
    """Return blocks of up to 256 elements, cut to the same length along one or more of the last axes.

    They are squares of 16 for most matrices. Others are chosen where those would need a fifth more scales, as in a
    matrix with few columns or a vector.

    Args:
        shape: the shape of the array, without a dimension of 0.
    """
    choices = {}
    for length in _LENGTHS:
        for count in range(1, len(shape) + 1):
            last = shape[-count:]
            if math.prod(min(n, length) for n in last) <= _LARGEST_BLOCK:
                # Blocks along more axes never need more scales, so they replace those along fewer.
                scales = math.prod(shape[:-count]) * math.prod(-(-n // length) for n in last)
                choices[length] = scales, Blocked(tuple(range(-count, 0)), length)
    if not choices:  # rank 0
        return PerTensor()
    fewest = min(scales for scales, _ in choices.values())
    return next(blocks for scales, blocks in choices.values() if scales <= _SLACK * fewest)


def complete_spec(spec: QuantSpec | Codebook, shape: tuple[int, ...]) -> QuantSpec:
    """Return a spec with the blocks of its granularity, or, of a codebook alone, with those chosen for the shape."""
    return QuantSpec(spec, choose_blocks(shape)) if isinstance(spec, Codebook) else spec


@functools.partial(jax.jit, static_argnames=("function", "spec"))
def quantize_leaf(x: jax.Array, key: jax.Array | None, *, function: str, spec: QuantSpec) -> QuantizedArray:
    """Return an array as codes; with a codebook from 0 up, positive numbers do not become 0.

    Args:
        x: float32, float16 or bfloat16.
        key: the key of a stochastic rounding, or None to round to the nearest level.
        function: Static. The public function that errors name.
        spec: Static. A codebook with a level 0, and a granularity.
    """
    scale_shape, _ = scale_from_range.find_shapes(function, spec, x.shape)
    block_size = scale_from_range.find_stored_block_size(function, spec, x.shape)
    return _quantize_blocks(x, key, spec, scale_shape, block_size)


@jax.jit
def quantize_like(x: jax.Array, key: jax.Array | None, old: QuantizedArray) -> QuantizedArray:
    """Return an array as codes of the codebook and in the blocks of another array of its shape."""
    # Under jax.vmap and jax.shard_map the shapes of the old array are those of its part, as that of x is.
    spec = QuantSpec(old.codebook, scale_dtype=old.scale.dtype)
    return _quantize_blocks(x, key, spec, old.scale.shape, old.block_size)


@jax.jit
def dequantize_leaf(q: QuantizedArray) -> jax.Array:
    """Return what `q.dequantize` returns, for an array of a codebook."""
    assert q.codebook is not None
    scale = small_floats.scale_as_float32(q.scale)
    product = read_levels(q.codebook, q.codes) * Aligned(q.block_size).expand(scale, q.codes)
    return rounding.round_to_dtype(barriers.round_result(product), q.dtype).astype(q.dtype)


def _quantize_blocks(
    x: jax.Array, key: jax.Array | None, spec: QuantSpec, scale_shape: tuple[int, ...], block_size: int | None
) -> QuantizedArray:
    assert spec.codebook is not None
    x = lax.stop_gradient(x)
    values = x.astype(jnp.float32)
    largest = _find_largest(values, scale_shape, block_size)
    scale, _ = scale_from_range.find_scale_and_zero_point(spec, -largest, largest, scale_shape, scale_shape, x.dtype)
    quotient = divide_by_scale(values, Aligned(block_size).expand(scale, values), dtypes.FLOAT32)
    round_quotient = round_to_levels if key is None else functools.partial(_round_stochastically, key=key)
    codes = round_quotient(spec.codebook, quotient)
    if spec.codebook.levels[0] == 0:
        # The update of Adam divides by the root of the second moment: one that became 0 would make it huge. The next
        # level makes it smaller. A first moment may become 0: here the next level would make the update larger.
        codes = jnp.where((codes == 0) & (values > 0), 1, codes.astype(jnp.int32)).astype(spec.codebook.carrier)
    return QuantizedArray(codes, scale, dtype=x.dtype, block_size=block_size, codebook=spec.codebook)


def _find_largest(x: jax.Array, shape: tuple[int, ...], block_size: int | None) -> jax.Array:
    """Return the largest magnitude in each block; NaN where a block has a NaN, 0 where it has no elements."""
    sizes = Aligned(block_size).sizes(shape, x.shape)
    assert sizes is not None
    # Of magnitudes, the bits sort as the numbers do, with NaN above infinity: an integer maximum loses no NaN.
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    padding = [(0, n * size - length, 0) for n, size, length in zip(shape, sizes, x.shape, strict=True)]
    if any(high for _, high, _ in padding):
        # With explicit mesh axes, JAX cannot infer how a padded dimension is sharded.
        bits = sharding.gather_axes(bits, [axis for axis, (_, high, _) in enumerate(padding) if high])
        bits = lax.pad(bits, np.int32(0), padding)
    bits = sharding.split_into_runs(bits, shape, sizes)
    # One axis after another: XLA:CPU uses vectors for the first ones only if they are reduced alone.
    for axis in range(1, x.ndim + 1):
        bits = jnp.max(bits, axis=axis, initial=0)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _round_stochastically(codebook: Codebook, value: jax.Array, key: jax.Array) -> jax.Array:
    """Return the code of one of the two levels around each value, with the value as expectation.

    Values beyond the levels get the code of the first or the last one, and NaN that of the first.
    """
    codes = round_to_levels(codebook, value)
    below = codes.astype(jnp.int32) - (read_levels(codebook, codes) > value).astype(jnp.int32)
    last = len(codebook.levels) - 1
    below = jnp.clip(below, 0, last - 1)
    low, high = (read_levels(codebook, (below + step).astype(codebook.carrier)) for step in (0, 1))
    chance = (value - low) / (high - low)
    is_above = jax.random.uniform(key, value.shape) < chance
    return (below + is_above.astype(jnp.int32)).astype(codebook.carrier)
