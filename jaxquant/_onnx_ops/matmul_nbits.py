"""ONNX Runtime's MatMulNBits: float activations times weights of 2, 4 or 8 bits in blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike

from .._core import checks, dtypes, entry_point, recording, sharding
from .._core.entry_point import compile_entry_point
from .._kernels import affine, weight_chunks
from .._kernels.weight_chunks import Chunk, Cut

_NAME = "ops.matmul_nbits"
_UINT8 = np.dtype(jnp.uint8)
# The largest number of rows of a that are contracted one after the other.
_FEW_ROWS = 3
# How many bytes of a block are handled together, and how many groups of them one loop adds up: enough to use the
# vector registers of a CPU, without spilling them.
_LANES, _TERMS = 32, (8, 16, 7, 6, 5, 4)
# Whether XLA:CPU vectorizes the loop. Measured with jax 0.10 (it does not) and 0.12.
_IS_VECTORIZED = jax.__version_info__ >= (0, 12)


def matmul_nbits(
    a: ArrayLike,
    b: ArrayLike,
    scales: ArrayLike,
    zero_points: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    K: int,
    N: int,
    bits: int = 4,
    block_size: int = 32,
) -> jax.Array:
    """Multiply floats by packed weights of 2, 4 or 8 bits, as ONNX Runtime's MatMulNBits does.

    y = a @ w.T + bias, where w[n, k] = (q[n, k] - zero_points[n, k // block_size]) * scales[n, k // block_size].

    This is a weight-only contraction: a stays float, and the products are summed in float32, in an order that XLA
    chooses. So y agrees with ONNX Runtime's result up to float32 rounding, not bit for bit. On a CPU the weights are
    dequantized a chunk at a time, or for a few rows one after the other, never the whole matrix.

    Args:
        a: values, float32, float16 or bfloat16, [..., K].
        b: the codes q, packed in uint8, [N, blocks, block_size * bits / 8] with blocks = ceil(K / block_size); the
            first code is in the lowest bits of a byte. Codes past K in the last block are ignored.
        scales: value per step, float32, float16 or bfloat16, [N, blocks] or flat.
        zero_points: the codes of 0.0: uint8, packed along the blocks as b is, [N, ceil(blocks * bits / 8)] or flat; or
            float32, float16 or bfloat16, [N, blocks] or flat. None means 2**(bits - 1).
        bias: [N], in a's dtype. None means 0.
        K: Static. The number of columns of a.
        N: Static. The number of rows of w, which are the columns of y.
        bits: Static. 2, 4 or 8.
        block_size: Static. How many weights of a row share a scale: a power of two, 16 or more.

    Returns:
        [..., N], in a's dtype.

    Raises:
        TypeError: an argument has a dtype that the operator does not support.
        ValueError: shapes, K, N, bits and block_size do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> b = jnp.full((2, 1, 8), 0x1F, jnp.uint8)  # 15, 1, 15, 1, ...; the zero point is 8
        >>> a = jnp.zeros((1, 16)).at[0, :2].set(jnp.array([1.0, 0.5]))
        >>> jq.ops.matmul_nbits(a, b, jnp.array([[1.0], [0.5]]), K=16, N=2, block_size=16)
        Array([[3.5 , 1.75]], dtype=float32)

    Source: ONNX Runtime's com.microsoft MatMulNBits-1, without its deprecated g_idx.

    Cotangent of a: g @ w. Of scales: (g.T @ a) * (q - zero_points), summed over each block. Of float zero_points:
    -(g.T @ a) * scales, summed over each block. Of bias: g summed over rows. Integers have none.
    """
    statics = {"K": K, "N": N, "bits": bits, "block_size": block_size}
    # Check before jit: its cache of compiled programs cannot tell True, 1 and 1.0 apart.
    statics = {name: checks.check_integers(_NAME, name, value) for name, value in statics.items()}
    return _matmul_nbits(entry_point.convert_number(a), b, scales, zero_points, bias, **statics)


class _PackedWeights(NamedTuple):
    """The static arguments, and the steps of the contraction that depend on them.

    A plane holds the codes at one position in their bytes: the codes `position`, `position + planes`, ... of
    a row, so that a contraction of one plane takes every `planes`-th column of a.
    """

    K: int
    N: int
    bits: int
    block_size: int

    @property
    def blocks(self) -> int:
        """The number of blocks in a row of weights."""
        return -(-self.K // self.block_size)

    @property
    def planes(self) -> int:
        """The number of codes in a byte."""
        return 8 // self.bits

    def make_cpu_form(self) -> Callable[..., jax.Array]:
        """Return the function that computes the float32 product on a CPU."""
        return _make_vmappable(self)

    def make_cuda_form(self) -> Callable[..., jax.Array]:
        """Return the function that computes the float32 product with CUDA, from weights that are dequantized."""
        return functools.partial(weight_chunks.contract_at_once, self)

    @property
    def lanes(self) -> int:
        """The number of consecutive bytes of a block that a CPU handles together, when it contracts a row."""
        return min(self.block_size // self.planes, _LANES)

    @property
    def terms(self) -> int | None:
        """The number of groups of lanes that one loop adds up, or None if no number in use divides the groups."""
        groups = self.blocks * (self.block_size // self.planes) // self.lanes
        return next((n for n in _TERMS if groups % n == 0), None)

    def plan_cut(self, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None) -> Cut:
        """Return how the rows of the weights are cut into chunks, which may end at any row."""
        return Cut(self.N, self.blocks * self.block_size, 1, 1)

    def arrange_operand(self, x: jax.Array) -> list[jax.Array]:
        """Return the columns of a for each plane; to separate them costs less than to interleave the weights."""
        # The codes past K in the last block are multiplied by zeros.
        padded = lax.pad(x, np.float32(0), ((0, 0, 0), (0, self.blocks * self.block_size - self.K, 0)))
        return [padded[:, i :: self.planes] for i in range(self.planes)]

    def select_operand(self, x: list[jax.Array], chunk: Chunk) -> list[jax.Array]:
        """Return the columns of a unchanged, because the weights are cut along N."""
        return x

    def dequantize_chunk(
        self, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None, chunk: Chunk | None,
        wait: Callable[[jax.Array], jax.Array],
    ) -> list[jax.Array]:  # fmt: skip
        """Return the dequantized weights of each plane, [N, blocks * bytes] each, with `wait` applied to the scale."""
        if chunk is not None:
            codes, scale = chunk.take(codes, 0), wait(chunk.take(scale, 0))
            zero_point = None if zero_point is None else chunk.take(zero_point, 0)
        # The planes stay separate arrays, because interleaving them would write the weights to memory once more.
        wide = jnp.broadcast_to(scale[..., None], codes.shape)
        return [(s * wide).reshape(codes.shape[0], -1) for s in _subtract_zero_points(codes, zero_point, self)]

    def contract_chunk(self, x: list[jax.Array], weights: list[jax.Array]) -> jax.Array:
        """Return the sum over planes of [rows, k] by [n, k]."""
        # Without HIGHEST a GPU would round both operands to TF32.
        dimensions = (((1,), (1,)), ((), ()))
        products = [
            lax.dot_general(planes, w, dimensions, precision=lax.Precision.HIGHEST)
            for planes, w in zip(x, weights, strict=True)
        ]
        return functools.reduce(jnp.add, products)


def _contract_on_cpu(
    config: _PackedWeights, x: jax.Array, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None
) -> jax.Array:
    # Reshapes of an array with its sharding in its type may not be possible.
    is_placed = sharding.is_placed(x) or sharding.is_placed(codes)
    if config.terms is None or not _IS_VECTORIZED or is_placed or not _has_few_rows(x):
        return weight_chunks.contract_in_chunks(config, x, codes, scale, zero_point)
    # The barrier keeps XLA from dequantizing weights that are constants while it compiles.
    codes = lax.optimization_barrier(codes)
    return jnp.stack([_contract_row(config, row, codes, scale, zero_point) for row in x])


def _has_few_rows(x: jax.Array) -> bool:
    """Return whether x has a few rows; their number may be symbolic, as in `jax.export`."""
    return isinstance(x.shape[0], int) and 0 < x.shape[0] <= _FEW_ROWS


def _contract_row(
    config: _PackedWeights, x: jax.Array, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None
) -> jax.Array:
    """Return the float32 product of a row, [K], and the weights, [N, blocks, bytes], which it dequantizes on the way.

    Nothing is dequantized in memory: XLA:CPU reads the codes once, and vectorizes the sum of groups of lanes, because
    it adds up each lane by itself.
    """
    size = config.blocks * config.block_size
    lanes, terms = config.lanes, config.terms
    assert terms is not None
    groups = size // config.planes // lanes
    padded = lax.pad(x, np.float32(0), ((0, size - config.K, 0),))
    # The barrier keeps XLA from separating the planes of x in each of its uses.
    planes = lax.optimization_barrier(
        [padded[i :: config.planes].reshape(groups // terms, terms, lanes) for i in range(config.planes)]
    )
    repeats = groups // config.blocks
    cut = codes.reshape(config.N, groups // terms, terms, lanes)
    scale = _spread_entries(scale, repeats, terms)
    zero_point = None if zero_point is None else _spread_entries(zero_point, repeats, terms)
    total: Any = None
    for term in range(terms):
        point = None if zero_point is None else zero_point[:, :, term]
        wide = jnp.broadcast_to(scale[:, :, term, None], (config.N, groups // terms, lanes))
        # Widened once for all planes; a CPU also shifts int32 faster than bytes.
        differences = _subtract_zero_points(cut[:, :, term].astype(jnp.int32), point, config)
        products = [(s * wide) * plane[None, :, term] for s, plane in zip(differences, planes, strict=True)]
        part = functools.reduce(jnp.add, products)
        total = part if total is None else total + part
    # The barrier keeps XLA from fusing this reduction with the loop of products.
    return jnp.sum(lax.optimization_barrier(total), axis=(1, 2))


def _spread_entries(part: jax.Array, repeats: int, terms: int) -> jax.Array:
    """Return scales or zero points of [N, blocks] as [N, groups / terms, terms], where a block has `repeats` groups."""
    rows, blocks = part.shape
    return jnp.broadcast_to(part[:, :, None], (rows, blocks, repeats)).reshape(rows, -1, terms)


# Created once for each configuration, because JAX reuses a trace only for the same function object.
@functools.lru_cache(maxsize=1024)
def _make_vmappable(config: _PackedWeights) -> Any:
    function = custom_vmap(functools.partial(_contract_on_cpu, config))
    function.def_vmap(functools.partial(_contract_under_vmap, config))
    return function


def _contract_under_vmap(config: _PackedWeights, size: int, batched: Any, *operands: Any) -> tuple[jax.Array, bool]:
    """Return the contraction of operands under vmap. If only x has the mapped axis, the axis becomes more rows."""
    if batched[0] and not any(batched[1:]):
        x = operands[0]
        y = config.make_cpu_form()(x.reshape(-1, config.K), *operands[1:])
        return y.reshape(*x.shape[:2], config.N), True
    axes = [0 if is_batched else None for is_batched in batched]
    contract = functools.partial(weight_chunks.contract_in_chunks, config)
    return jax.vmap(contract, axes, axis_size=size)(*operands), True


def _batch_products(mapped: dict[str, bool], a: jax.Array, **rest: object) -> jax.Array | None:
    # An exporter writes the same operator for mapped rows of a. Mapped weights would be several operators.
    return None if any(mapped[name] for name in mapped if name != "a") else _matmul_nbits(a, **rest)


def _infer_product(
    a: jax.Array, b: jax.Array, scales: jax.Array, zero_points: jax.Array | None, bias: jax.Array | None, *,
    K: int, N: int, bits: int, block_size: int,
) -> tuple[tuple[int, ...], np.dtype]:  # fmt: skip
    # While an exporter records the operation, its arithmetic, which checks the arguments otherwise, is not traced.
    _check_operands(_check_attributes(K, N, bits, block_size), a, b, scales, zero_points, bias)
    return (*a.shape[:-1], N), a.dtype


@compile_entry_point(_NAME)
@recording.mark("matmul_nbits", _infer_product, _batch_products)
def _matmul_nbits(
    a: jax.Array, b: jax.Array, scales: jax.Array, zero_points: jax.Array | None, bias: jax.Array | None, *,
    K: int, N: int, bits: int, block_size: int,
) -> jax.Array:  # fmt: skip
    config = _check_attributes(K, N, bits, block_size)
    _check_operands(config, a, b, scales, zero_points, bias)
    if zero_points is not None:
        packed = zero_points.dtype == _UINT8
        width = -(-config.blocks * bits // 8) if packed else config.blocks
        zero_points = zero_points.reshape(N, width)
        zero_points = _unpack_codes(zero_points, config) if packed else zero_points.astype(jnp.float32)
    wide = a.astype(jnp.float32).reshape(-1, K)
    # ONNX Runtime also accepts flat scales and zero points.
    scales = scales.astype(jnp.float32).reshape(N, config.blocks)
    y: Any = weight_chunks.contract_weights(config, wide, b.reshape(N, config.blocks, -1), scales, zero_points)
    y = y.reshape(*a.shape[:-1], N)
    # The bias is added in float32, so that a 16-bit result is rounded only once.
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(jnp.float32), y.shape)
    return affine.round_to_dtype(y, a.dtype).astype(a.dtype)


def _check_attributes(K: int, N: int, bits: int, block_size: int) -> _PackedWeights:
    """Check the attributes and return them as one static value."""
    for argument, value in (("K", K), ("N", N), ("bits", bits), ("block_size", block_size)):
        checks.check_integer(_NAME, argument, value)
    checks.require(K > 0, _NAME, "K", "a positive int", K)
    checks.require(N > 0, _NAME, "N", "a positive int", N)
    checks.require(bits in (2, 4, 8), _NAME, "bits", "2, 4 or 8", bits)
    # A power of two has a single bit set.
    power = block_size >= 16 and block_size & (block_size - 1) == 0
    checks.require(power, _NAME, "block_size", "a power of two, 16 or more", block_size)
    return _PackedWeights(int(K), int(N), int(bits), int(block_size))


def _check_operands(
    config: _PackedWeights, a: jax.Array, b: jax.Array, scales: jax.Array, zero_points: jax.Array | None,
    bias: jax.Array | None,
) -> None:  # fmt: skip
    """Check the dtypes and shapes of all arrays."""
    checks.check_array(_NAME, "a", a, dtypes.FLOATS)
    checks.check_array(_NAME, "b", b, (_UINT8,))
    checks.check_array(_NAME, "scales", scales, dtypes.FLOATS)
    fits = a.ndim > 0 and a.shape[-1] == config.K
    checks.require(fits, _NAME, "a", f"shape (..., {config.K}), K last", f"shape {a.shape}")
    size = config.block_size * config.bits // 8
    reason = f"N, ceil(K / block_size), block_size * bits / 8 for {config}"
    checks.check_shape(_NAME, "b", b, (config.N, config.blocks, size), reason)
    _check_flat("scales", scales, (config.N, config.blocks))
    if zero_points is not None:
        checks.check_array(_NAME, "zero_points", zero_points, (_UINT8, *dtypes.FLOATS))
        packed = zero_points.dtype == _UINT8
        width = -(-config.blocks * config.bits // 8) if packed else config.blocks
        _check_flat("zero_points", zero_points, (config.N, width))
    if bias is not None:
        checks.check_same_dtype(_NAME, "bias", bias, a.dtype, "a's")
        checks.check_shape(_NAME, "bias", bias, (config.N,), "N")


def _check_flat(argument: str, value: jax.Array, shape: tuple[int, int]) -> None:
    """Check that an array has this shape, or is flat with as many elements."""
    fits = value.shape in (shape, (shape[0] * shape[1],))
    checks.require(fits, _NAME, argument, f"shape {shape}, or flat", f"shape {value.shape}")


def _unpack_codes(packed: jax.Array, config: _PackedWeights) -> jax.Array:
    """Return packed zero points of [N, bytes] as int32 [N, blocks]."""
    # Consecutive zero points are in consecutive planes; the last byte of a row may hold unused codes.
    planes = [_unpack_plane(packed, i, config) for i in range(config.planes)]
    return jnp.stack(planes, axis=-1).reshape(packed.shape[0], -1)[:, : config.blocks]


def _unpack_plane(packed: jax.Array, index: int, config: _PackedWeights) -> jax.Array:
    """Return the codes of one plane as int32, from bytes of an integer dtype."""
    shifted = packed >> packed.dtype.type(index * config.bits)
    return (shifted & packed.dtype.type(2**config.bits - 1)).astype(jnp.int32)


def _subtract_zero_points(b: jax.Array, zero_points: jax.Array | None, config: _PackedWeights) -> list[jax.Array]:
    """Return q - zero_points in float32 for each plane: [N, blocks, bytes] each."""
    differences = []
    for i in range(config.planes):
        codes = _unpack_plane(b, i, config)
        if zero_points is None:
            differences.append((codes - np.int32(2 ** (config.bits - 1))).astype(jnp.float32))
            continue
        wide = jnp.broadcast_to(zero_points[..., None], b.shape)
        is_float = zero_points.dtype == dtypes.FLOAT32
        differences.append(codes.astype(jnp.float32) - wide if is_float else (codes - wide).astype(jnp.float32))
    return differences
