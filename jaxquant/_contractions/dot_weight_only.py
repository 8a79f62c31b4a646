"""The contraction of a float array with a quantized one, in the form that suits its size and layout on a CPU.

- A few rows are contracted as integers: see `_kernels.float_rows`.
- A single row is contracted as a sum of scaled rows, if XLA vectorizes that; codes in words as in `_kernels.word_rows`.
- Otherwise the codes are dequantized one chunk at a time, or at once if they are few.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec

from .._arrays import parts, quantized_array
from .._arrays.quantized_array import QuantizedArray
from .._core import dtypes, granularity, sharding
from .._kernels import barriers, float_rows, packed_codes, weight_chunks, word_rows, words
from .._kernels.contraction import Role
from .._kernels.weight_chunks import Chunk, Cut
from . import dot_integer, weight_only_cuda

# The largest number of rows that are contracted as digits: for codes of 8 bits or with their contracted dimensions
# last, and for others. With more rows, their int8 digits take longer than dequantizing in chunks.
_FEW_ROWS, _FEW_ROWS_PACKED = 4, 1
# Below these numbers of codes, all of them are dequantized at once: that takes fewer loops, and each loop has a cost.
_FEWEST_FOR_DIGITS, _FEWEST_FOR_ROW = 2**20, 2**15
# From this number of codes on, weights that are dequantized at once wait for the other operand.
_FEWEST_TO_WAIT = 2**15
# From this number of rows on, packed codes of 4 bits are not cut into planes.
_FEWEST_WITHOUT_PLANES = 2**9

# The forms of an array that the contractions below read, after `dot_integer.read_nested`.
_FORMS = {"offset", "signed_scale", "packing", *weight_only_cuda.ROUNDED_FORMS}


class _WeightOnlyProduct(NamedTuple):
    """The static arguments of a weight-only contraction.

    Attributes:
        left: the role of each dimension of lhs.
        right: the role of each dimension of rhs.
        quantized: 0 if lhs is quantized, 1 if rhs is.
        static: the static part of the quantized side, as its `tree_flatten` returns it.
        is_moved: whether the scale, the zero point and the offset are transposed: the codes of a matrix are stored in
            another order than the logical one.
        is_nested: whether the scale or the offset has been computed from one that is quantized itself.
        has_real_zero_point: whether a zero point of floats is one, and no offset.
        is_cut: whether the weights are contracted in chunks, on a CPU.
    """

    left: Role
    right: Role
    quantized: int
    static: parts.ArrayStatic
    precision: Any
    out_sharding: Any
    is_moved: bool = False
    is_nested: bool = False
    has_real_zero_point: bool = False
    is_cut: bool = False

    @property
    def role(self) -> Role:
        """The role of the quantized side."""
        return (self.left, self.right)[self.quantized]

    @property
    def x_role(self) -> Role:
        """The role of the float side."""
        return (self.left, self.right)[1 - self.quantized]

    @property
    def cuts_contracted(self) -> bool:
        """Whether the codes are cut along the contracted dimension, which comes first in memory."""
        return self.role.contracted == (0,)

    def make_cpu_form(self) -> Callable[..., jax.Array]:
        """Return the function that computes the float32 product on a CPU."""
        return _make_batchable(self)

    def make_cuda_form(self) -> Callable[..., jax.Array]:
        """Return the function that computes the float32 product with CUDA."""
        return _make_batchable_for_cuda(self)

    def contract_dequantized(
        self, x: jax.Array, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None
    ) -> jax.Array:
        """Return the float32 product of x and dequantized codes."""
        is_small = not _is_static(codes.shape) or self.count_codes(codes) <= weight_chunks.WHOLE
        is_whole = is_small or self.has_many_rows(x, codes) or self.choose_axis(codes) is None
        if is_whole:
            if _is_static(codes.shape) and self.count_codes(codes) >= _FEWEST_TO_WAIT:
                codes, scale = weight_chunks.delay_weights(x, codes, scale, self.static.packing is not None)
            return weight_chunks.contract_at_once(self, x, codes, scale, zero_point)
        return weight_chunks.contract_in_chunks(self._replace(is_cut=True), x, codes, scale, zero_point)

    def has_many_rows(self, x: jax.Array, codes: jax.Array, least: int = weight_chunks.MANY_ROWS) -> bool:
        """Return whether x has so many rows, at least `least`, that all weights are dequantized at once."""
        rows = math.prod(x.shape[axis] for axis in self.x_role.free)
        is_static = isinstance(rows, int) and _is_static(codes.shape)
        return is_static and rows >= least and self.count_codes(codes) <= weight_chunks.WHOLE_OF_MANY_ROWS

    def count_codes(self, codes: jax.Array) -> int:
        """Return the number of codes, which may be packed."""
        packing = self.static.packing
        return codes.size if packing is None else math.prod(codes.shape[:-1]) * packing.length

    def choose_axis(self, codes: jax.Array) -> int | None:
        """Return the dimension of the codes that is cut: the contracted one, or the longest other one."""
        if self.cuts_contracted:
            return 0
        return max(self.role.free, key=lambda a: codes.shape[a], default=None)

    def plan_cut(self, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None) -> Cut:
        """Return how the codes are cut into chunks, which end where blocks end."""
        axis = self.choose_axis(codes)
        assert axis is not None
        q = self.unflatten(codes, scale, zero_point)
        length, width = q.shape[axis], math.prod(q.shape) // q.shape[axis]
        runs = [_count_run(q, part, axis) for part in (scale, zero_point) if part is not None and part.shape[axis] != 1]
        divisor = math.lcm(*runs)
        if self.cuts_contracted:
            return Cut(length, width, divisor, None)
        # The product has the batch dimensions, then the free dimensions of lhs and of rhs.
        frees_before = 0 if self.quantized == 0 else len(self.left.free)
        return Cut(length, width, divisor, len(self.role.batch) + frees_before + self.role.free.index(axis))

    @property
    def turns_operand(self) -> bool:
        """Whether the contracted dimension of the float side is moved to the front, where a chunk is read in order."""
        return self.is_cut and self.cuts_contracted and not self.role.batch

    def arrange_operand(self, x: jax.Array) -> jax.Array:
        """Return the float operand in the order that the products with chunks read."""
        if not self.turns_operand:
            return x
        return barriers.transpose_in_memory(x, (*self.x_role.contracted, *self.x_role.free))

    def select_operand(self, x: jax.Array, chunk: Chunk) -> jax.Array:
        """Return the part of an arranged operand that one chunk of the weights is multiplied with."""
        if not self.cuts_contracted:
            return x
        return chunk.take(x, 0 if self.turns_operand else self.x_role.contracted[0])

    def dequantize_chunk(
        self, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None, chunk: Chunk | None,
        wait: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:  # fmt: skip
        """Return the dequantized weights of one chunk, `wait` applied to its scale and codes; None is all of them."""
        use = "any" if math.prod(codes.shape[axis] for axis in self.role.contracted) == 1 else "operand"
        if chunk is not None:
            axis = self.choose_axis(codes)
            assert axis is not None
            q = self.unflatten(codes, scale, zero_point)
            # Chunks end where blocks end, so an entry belongs to one chunk.
            if scale.shape[axis] != 1:
                scale = chunk.take(scale, axis, _count_run(q, scale, axis))
            if zero_point is not None and zero_point.shape[axis] != 1:
                zero_point = chunk.take(zero_point, axis, _count_run(q, zero_point, axis))
            codes, scale = chunk.take(codes, axis), wait(scale)
            if scale.dtype != dtypes.FLOAT32:
                # The barrier keeps XLA from converting a scale for each code.
                scale = lax.optimization_barrier(dtypes.scale_as_float32(scale))
            if self.static.packing is None:
                codes = packed_codes.widen_codes(codes, wait)
            else:
                # The barrier keeps XLA from fusing the slice into the loop that unpacks the words.
                codes = lax.optimization_barrier(wait(codes))
        codes, static = self._unpack_codes(codes)
        wide = self._replace(static=static).unflatten(codes, scale, zero_point)
        return quantized_array.dequantize_checked(wide, use=use)

    def _unpack_codes(self, codes: jax.Array) -> tuple[jax.Array, parts.ArrayStatic]:
        """Return codes and the static part for them; those in words are unpacked, to a dtype of 8 bits or more."""
        packing = self.static.packing
        if packing is None:
            return codes, self.static
        is_float = packing.format in dtypes.FLOAT4
        is_signed = self.static.codebook is None and not is_float and dtypes.read_bounds(packing.format)[0] < 0
        # A device must have all codes of a row, because the codes of a word are not neighbors.
        codes = sharding.gather_axes(codes, (codes.ndim - 1,))
        unpacked = words.unpack_words(codes, packing.bits, packing.length, signed=is_signed)
        # As 8 bits, or bfloat16, because a format of 4 bits would be packed once more.
        unpacked = packed_codes.read_bfloat16(unpacked.astype(jnp.uint32), 0) if is_float else unpacked
        return unpacked, self.static._replace(packing=None)

    def contract_chunk(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """Return the product in float32, whatever dtype the operands have."""
        left, right, quantized = self.left, self.right, self.quantized
        if self.turns_operand:
            turned = Role((), tuple(range(1, x.ndim)), (0,))
            left, right = (turned, self.role) if quantized == 1 else (self.role, turned)
        # XLA:CPU takes up to three times as long for a few rows times weights with the contracted dimension last as for
        # these weights times the rows, and longer for other weights times the rows.
        is_last = not barriers.is_moving((*self.role.free, *self.role.contracted), weights.shape)
        is_swapped = self.is_cut and not self.role.batch and is_last != (quantized == 0)
        lhs, rhs = (weights, x) if quantized == 0 else (x, weights)
        if not is_swapped:
            dimensions = ((left.contracted, right.contracted), (left.batch, right.batch))
            return lax.dot_general(lhs, rhs, dimensions, self.precision, jnp.float32, out_sharding=self.out_sharding)
        precision = self.precision[::-1] if isinstance(self.precision, tuple) else self.precision
        y = lax.dot_general(rhs, lhs, ((right.contracted, left.contracted), ((), ())), precision, jnp.float32)
        # The barrier keeps XLA from swapping the operands back.
        columns = len(right.free)
        return lax.transpose(lax.optimization_barrier(y), (*range(columns, y.ndim), *range(columns)))

    def unflatten(self, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None) -> QuantizedArray:
        """Return the quantized side, which has at most one of a zero point and an offset."""
        children = parts.ArrayParts(codes, scale)
        is_float = zero_point is not None and zero_point.dtype in dtypes.FLOATS
        name = "offset" if is_float and not self.has_real_zero_point else "zero_point"
        return QuantizedArray.tree_unflatten(self.static, children._replace(**{name: zero_point}))

    def swap_sides(self, y: jax.Array) -> jax.Array:
        """Return a product of x and the codes, without batch dimensions, in the order of lhs and rhs."""
        if self.quantized == 1:
            return y
        rows = len(self.x_role.free)
        return lax.transpose(y, (*range(rows, y.ndim), *range(rows)))

    def add_rows(self) -> _WeightOnlyProduct:
        """Return the configuration for a float side with one more free dimension, its first."""
        role = self.x_role
        batch, free, contracted = (tuple(axis + 1 for axis in axes) for axes in role)
        wider = Role(batch, (0, *free), contracted)
        return self._replace(**{"right" if self.quantized == 0 else "left": wider})

    def derive_row_axis(self) -> int:
        """Return the dimension of the product that is the first free one of the float side."""
        return len(self.x_role.batch) + (len(self.left.free) if self.quantized == 0 else 0)


def choose_contraction(
    lhs: QuantizedArray | jax.Array, rhs: QuantizedArray | jax.Array, left: Role, right: Role,
    precision: lax.PrecisionLike, out_sharding: NamedSharding | PartitionSpec | None, *, is_moved: bool = False,
    is_nested: bool = False,
) -> tuple[Callable[..., jax.Array], tuple[Any, ...], np.dtype]:  # fmt: skip
    """Return how to contract a quantized and a float array: a function, its operands, and the dtype of the result.

    The function returns the product in float32. `is_moved` and `is_nested` are as in
    `_WeightOnlyProduct`.
    """
    quantized = 0 if isinstance(lhs, QuantizedArray) else 1
    q: Any = (lhs, rhs)[quantized]
    x: Any = (lhs, rhs)[1 - quantized]
    # Convert both sides to one dtype, because JAX refuses to mix dtypes if the user has chosen strict promotion.
    wide = dtypes.choose_wider(q.dtype, x.dtype)
    if not is_read_by_kernels(q):
        weights, x = quantized_array.dequantize_checked(q.astype(wide)), x.astype(wide)
        dimensions = ((left.contracted, right.contracted), (left.batch, right.batch))
        contract = functools.partial(
            lax.dot_general, dimension_numbers=dimensions, precision=precision, preferred_element_type=jnp.float32,
            out_sharding=out_sharding,
        )  # fmt: skip
        return contract, ((weights, x) if quantized == 0 else (x, weights)), wide
    codes, scale, zero_point, offset, _ = q._parts
    leaves, static = (codes, scale, zero_point if offset is None else offset), q.astype(wide)._static
    is_real = "real_zero_point" in quantized_array.list_forms(q)
    product = _WeightOnlyProduct(left, right, quantized, static, precision, out_sharding, is_moved, is_nested, is_real)
    # Reshapes and slices of an array with its sharding in its type may not be possible.
    is_placed = out_sharding is not None or sharding.is_placed(x) or sharding.is_placed(q.codes)
    contract = weight_chunks.contract_at_once if is_placed else weight_chunks.contract_weights
    return functools.partial(contract, product), (x.astype(wide), *leaves), wide


def is_read_by_kernels(q: QuantizedArray) -> bool:
    """Return whether weight-only contractions read an array as it is; otherwise it must be dequantized before."""
    return not set(quantized_array.list_forms(q)) - _FORMS


def has_readable_words(q: QuantizedArray, role: Role) -> bool:
    """Return whether weight-only contractions read words: those of a matrix of which one dimension is contracted."""
    is_matrix = q.ndim == 2 and not role.batch and len(role.contracted) == 1 and _is_static(q.stored_codes.shape)
    return q.packing is not None and is_matrix and is_read_by_kernels(q) and not sharding.is_placed(q.stored_codes)


def _contract_by_size(
    config: _WeightOnlyProduct,
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    few_rows: int | None = None,
) -> jax.Array:
    """Return the contraction; `few_rows` is the largest number of rows for digits, None to find it."""
    q, role, x_role = config.unflatten(codes, scale, zero_point), config.role, config.x_role
    contract_dequantized = functools.partial(config.contract_dequantized, x, codes, scale, zero_point)
    is_plain = _is_static(codes.shape) and _is_static(x.shape) and not role.batch
    # A 16-bit dtype of q rounds the dequantized weights, which the forms below never compute.
    is_plain = is_plain and not weight_only_cuda.ROUNDED_FORMS & set(quantized_array.list_forms(q))
    if not is_plain or 0 in (codes.size, x.size) or q.dtype != dtypes.FLOAT32:
        return contract_dequantized()
    rows = math.prod(x.shape[axis] for axis in x_role.free)

    def contract_swapped() -> jax.Array:
        y = contract_dequantized()
        columns = len(role.free)
        return y if config.quantized == 1 else lax.transpose(y, (*range(columns, y.ndim), *range(columns)))

    if rows == 1 and math.prod(q.shape) >= _FEWEST_FOR_ROW and float_rows.IS_VECTORIZED:
        matrix = read_scaled_codes(q, x, is_moved=config.is_moved, is_nested=config.is_nested)
        choose = float_rows.choose_form if matrix.words is None else word_rows.choose_form
        contract_row = choose(matrix, role)
        if contract_row is not None:
            y = contract_row(x.reshape(-1), matrix, role)
            shape = (*(x.shape[axis] for axis in x_role.free), *(q.shape[axis] for axis in role.free))
            return config.swap_sides(y.reshape(shape))
    if q.packing is not None:
        return contract_dequantized()
    few_rows = _choose_few_rows(q, role) if few_rows is None else few_rows
    # To cut the codes into planes costs a second contraction, which is of less use the more rows there are.
    has_planes = packed_codes.count_column_planes(codes, scale, zero_point) > 1
    if has_planes and not config.has_many_rows(x, codes, _FEWEST_WITHOUT_PLANES):
        return _contract_planes(config, x, codes, scale, zero_point, few_rows)
    if codes.size >= _FEWEST_FOR_DIGITS and _has_digits(q, role) and rows <= few_rows:
        side = dot_integer.prepare_side(q, role)
        y, is_exact = float_rows.contract_digits(x, side.codes, side.center, side.scale, x_role, role)
        is_exact &= float_rows.has_moderate_scales(q.scale)
        return config.swap_sides(lax.cond(is_exact, lambda: y, contract_swapped))
    return contract_dequantized()


def _contract_planes(
    config: _WeightOnlyProduct, x: jax.Array, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None,
    few_rows: int,
) -> jax.Array:  # fmt: skip
    """Return the contraction of x with codes of 2 or 4 bits, one plane after the other."""
    count, last, role = packed_codes.count_column_planes(codes, scale, zero_point), codes.ndim - 1, config.role
    is_offset = zero_point is not None and zero_point.dtype in dtypes.FLOATS
    narrow = zero_point if zero_point is None or is_offset else zero_point.astype(jnp.int8)
    is_summed = last in role.contracted
    results = []
    for position in range(count):
        x_plane = x
        if is_summed:
            axis = config.x_role.contracted[role.contracted.index(last)]
            x_plane = lax.slice_in_dim(x, position, None, count, axis)
        plane = packed_codes.take_code_plane(codes, position, count)
        plane_scale, plane_zero_point = (packed_codes.take_plane(part, position, count) for part in (scale, narrow))
        results.append(_contract_by_size(config, x_plane, plane, plane_scale, plane_zero_point, few_rows))
    if is_summed:
        return functools.reduce(jnp.add, results)
    before = 0 if config.quantized == 0 else len(config.left.free)
    return packed_codes.join_planes(results, before + role.free.index(last))


def read_scaled_codes(
    q: QuantizedArray, x: jax.Array, *, is_moved: bool, is_nested: bool = False
) -> float_rows.ScaledCodes:
    """Return the parts of an array in the form of the kernels.

    Args:
        q: an array without a stored order.
        x: float32, an array to wait for. XLA would unpack and transpose the zero points and scales of all products of a
            program first, and keep them in memory until they are used.
        is_moved: whether the scale, the zero point and the offset of a matrix are transposed.
        is_nested: whether the scale or the offset has been computed from one that is quantized itself.
    """
    book, packing = q.codebook, q.packing
    decode, levels = (None, ()) if book is None else (book.decode, book.levels)
    layout = None
    if packing is not None:
        is_signed = book is None and packing.format not in dtypes.FLOAT4 and dtypes.read_bounds(packing.format)[0] < 0
        layout = float_rows.WordLayout(packing.bits, packing.length, is_signed)
    stored = q.codes if packing is None else q.stored_codes
    if (stored.dtype if packing is None else packing.format) in dtypes.FLOAT4:
        decode = packed_codes.read_float4
    # These kernels convert entries where they read them.
    is_widened_later = not is_moved and (float_rows.is_looped(stored) or layout is not None)
    matrix = float_rows.ScaledCodes(stored, q.scale, q.zero_point, q.offset, q.block_size, decode, levels, layout)

    def prepare(part: jax.Array | None) -> jax.Array | None:
        """Return entries, as float32 if they are no zero point, and in memory if they are transposed."""
        if part is None:
            return None
        original = part.T if is_moved else part  # This cancels the transpose.
        if part is q.zero_point:
            original = packed_codes.unpack_entries(original, x)
        elif not is_widened_later:
            original = float_rows.widen(original)
        if not is_moved:
            is_float = part is not q.zero_point and not is_widened_later
            if is_widened_later and is_nested and part is not q.zero_point:
                # The barrier keeps XLA from computing an entry for each word.
                return lax.optimization_barrier(original)
            if not is_float or (part.dtype == dtypes.FLOAT32 and not is_nested):
                return original
            # The barrier keeps XLA from converting or computing an entry for each code. In one dimension, the loop
            # consists of vectors only, however few entries a row has.
            flat = weight_chunks.delay_floats(original.reshape(-1), x)
            return lax.optimization_barrier(flat).reshape(original.shape)
        if original.dtype == dtypes.FLOAT32:
            original = weight_chunks.delay_floats(original, x)
        elif original.dtype in dtypes.INTEGERS:
            original = barriers.wait_for(original, x)
        # Without this barrier the transpose would be fused with what precedes it, and no longer be XLA's fast kernel.
        return barriers.pin_layout(lax.optimization_barrier(original).T)

    scale, zero_point, offset = (prepare(part) for part in (q.scale, q.zero_point, q.offset))
    assert scale is not None
    return matrix._replace(scale=scale, zero_point=zero_point, offset=offset)


def _has_digits(q: QuantizedArray, role: Role) -> bool:
    """Return whether a float row can be contracted with q as digits."""
    if q.codebook is not None or q.offset is not None or q.codes.dtype not in dtypes.CONTRACTED:
        return False
    parts = [part for part in (q.scale, q.zero_point) if part is not None]
    is_shared = all(part.shape[axis] == 1 for part in parts for axis in role.contracted)
    return is_shared and math.prod(q.shape[axis] for axis in role.contracted) <= float_rows.LIMIT


def _choose_few_rows(q: QuantizedArray, role: Role) -> int:
    """Return the largest number of rows that are contracted as digits."""
    is_last = not barriers.is_moving((*role.free, *role.contracted), q.shape)
    return _FEW_ROWS if is_last or dtypes.count_packed_bits(q.codes.dtype) == 8 else _FEW_ROWS_PACKED


def _count_run(q: QuantizedArray, part: jax.Array, axis: int) -> int:
    """Return how many indices of a dimension share an entry of the scale or the zero point."""
    sizes = granularity.Aligned(q.block_size).sizes(part.shape, q.shape)
    assert sizes is not None
    return sizes[axis]


def _is_static(shape: tuple[Any, ...]) -> bool:
    """Return whether no dimension is symbolic, as in `jax.export`."""
    return all(isinstance(n, int) for n in shape)


# Created once for each configuration, because JAX reuses a trace only for the same function object.
@functools.lru_cache(maxsize=1024)
def _make_batchable(config: _WeightOnlyProduct) -> Any:
    function = custom_vmap(functools.partial(_contract_by_size, config))
    function.def_vmap(functools.partial(_contract_under_vmap, config))
    return function


@functools.lru_cache(maxsize=1024)
def _make_batchable_for_cuda(config: _WeightOnlyProduct) -> Any:
    function = custom_vmap(functools.partial(weight_only_cuda.contract, config))
    function.def_vmap(functools.partial(_contract_under_vmap, config, for_cuda=True))
    return function


def _contract_under_vmap(
    config: _WeightOnlyProduct, size: int, batched: Sequence[bool], *operands: Any, for_cuda: bool = False
) -> tuple[jax.Array, bool]:
    """Return the contraction of operands under vmap. If only x has the mapped axis, the axis becomes more rows."""
    if batched[0] and not any(batched[1:]):
        wider = config.add_rows()
        contract = wider.make_cuda_form() if for_cuda else wider.make_cpu_form()
        return jnp.moveaxis(contract(*operands), wider.derive_row_axis(), 0), True
    axes = [0 if is_batched else None for is_batched in batched]
    at_once = functools.partial(weight_chunks.contract_at_once, config)
    return jax.vmap(at_once if for_cuda else config.contract_dequantized, axes, axis_size=size)(*operands), True
