"""`jax.lax.dot_general` and `numpy.matmul` of quantized arrays."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from .._arrays import indexing, parts, quantized_array
from .._arrays.quantized_array import QuantizedArray, unpack_checked
from .._core import checks, dtypes, entry_point, recording, sharding
from .._kernels import affine
from .._kernels.contraction import Role
from .._kernels.float_rows import WordLayout
from .._kernels.integer_rows import PackedOperand
from ..integer import DotDimensionNumbers, MatrixShapes, check_placement, match_matrices, match_roles
from . import dot_float, dot_integer
from .dot_integer import Axes
from .dot_weight_only import choose_contraction, has_readable_words, is_read_by_kernels
from .output import Epilogue, ScaledSpec, read_epilogue
from .weight_forms import simplify_weights

_NAME = "dot_general"
Operand = QuantizedArray | ArrayLike


def dot_general(
    lhs: Operand,
    rhs: Operand,
    dimension_numbers: DotDimensionNumbers,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    bias: ArrayLike | None = None,
    output: ScaledSpec | QuantizedArray | None = None,
) -> Any:
    """Contract two arrays, at least one of them quantized, as `jax.lax.dot_general` does.

    out = sum over the contracted dimensions of lhs * rhs.

    If both operands are quantized, this is an integer contraction:
    acc = sum of (lhs.codes - lhs.zero_point) * (rhs.codes - rhs.zero_point) is exact in int32, and
    out = float32(acc) * (lhs.scale * rhs.scale), each product rounded once. If a scale or a zero point varies from
    block to block of a contracted dimension, each block has such a contraction, and out is their sum in float32 in
    ascending order, each addition rounded once. If acc could exceed int32, the contraction is cut into blocks in the
    same way. Operands that cannot be contracted in integers raise an error.

    Offsets stay outside of the integers. With lhs_sum and rhs_sum, the sums of the codes of each side less its zero
    point, exact in int32, and K terms, a block is float32(acc) * (lhs.scale * rhs.scale)
    + (float32(lhs_sum) * lhs.scale + lhs.offset * K) * rhs.offset + lhs.offset * (float32(rhs_sum) * rhs.scale), added
    from left to right, each operation rounded once. Scales and offsets that are quantized themselves count with their
    float32 values.

    With a bias of integers, out = float32(acc + bias) * (lhs.scale * rhs.scale). With an output, the result is a
    QuantizedArray, and no float tensor lies in between: its codes are
    saturate(round_half_even(float32(acc + bias) * (lhs.scale * rhs.scale / scale)) + zero_point), as in ONNX
    Runtime's QGemm and QLinearMatMul. acc + bias wraps around. Neither is possible with blocks or
    an offset.

    If both operands are float8 or float4, the products of codes are summed in float32 and scaled as above, with an
    error of at most 2e-6 of the sum of magnitudes. Scales that vary along a contracted dimension are multiplied in
    before. Two float4 operands have exact sums, for each block. Neither takes a bias of integers or an output. CUDA and
    TPU contract float8 as it is, with the sums of their own kernels.

    If one operand is a float array (weight-only), out is the float product with the other operand dequantized, with an
    error of at most 2e-6 of the sum of magnitudes sum |lhs| * |rhs|. With an offset, the magnitudes of the scaled codes
    and of the offset count one by one. On a CPU, a few rows are contracted as integers: each float32 row becomes six
    rows of int8 digits with exact sums. With more rows, a large quantized operand is dequantized a chunk at a time.

    Args:
        lhs: a QuantizedArray, or an array of float32, float16 or bfloat16, of any shape.
        rhs: the same; at least one of the two is a QuantizedArray.
        dimension_numbers: Static. ((lhs contracted, rhs contracted), (lhs batch, rhs batch)), as in `jax.lax`.
        precision: Static. As in `jax.lax`, for a float contraction; an integer contraction ignores it.
        preferred_element_type: Static. float32, float16 or bfloat16: the dtype of the result. By default the dtype of
            the operands, or float32 if they differ.
        out_sharding: Static. The sharding of the result on a mesh with explicit axes, as in `jax.lax`; required if the
            shardings of the operands do not determine it. Partial sums of a sharded contracted dimension are added in
            int32, so the integers stay the same; a sharded contracted dimension with blocks is gathered first.
        bias: int32, in steps of lhs.scale * rhs.scale, of a shape that broadcasts against the result, if both operands
            are quantized. None means 0.
        output: how the result is quantized, if both operands are: a `Quantizer` with a scale; a QuantizedArray
            that gives its scale and zero point to the result; or None for a float result.

    Returns:
        The result, with the batch dimensions first, then the free dimensions of lhs and of rhs: an array of
        floats, or with `output` a QuantizedArray.

    Raises:
        TypeError: neither operand is quantized, or an operand has an unsupported dtype. int16 and codebooks cannot be
            contracted in integers, nor can float8 or float4 with integers.
        ValueError: dimension numbers or an out_sharding do not fit the operands; a scale, zero point or offset varies
            from index to index of a contracted dimension; the blocks of the two operands do not end at the same
            indices; one of two quantized operands has a permutation; or out_sharding is missing and the operands do not
            determine it.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x = jq.quantize(jnp.array([[-1.0, 0.0, 1.55]]), jq.QuantSpec(jnp.uint8))
        >>> w = jq.quantize(jnp.array([[127.0, 1.0], [-3.5, 2.5], [0.5, -2.0]]), jq.QuantSpec(jnp.int8))
        >>> jq.dot_general(x, w, (((1,), (0,)), ((), ())))  # -3.5, 2.5 and 0.5 are ties
        Array([[-127. ,   -4.1]], dtype=float32)
        >>> jq.dot_general(jnp.array([[1.0, 2.0, 4.0]]), w, (((1,), (0,)), ((), ())))  # weight-only
        Array([[119.,  -3.]], dtype=float32)
        >>> output = jq.Quantizer(jq.QuantSpec(jnp.uint8), 2.0, 100)
        >>> jq.dot_general(x, w, (((1,), (0,)), ((), ())), bias=jnp.array([12750, 10]), output=output).codes
        Array([[100,  98]], dtype=uint8)

    Source: `jax.lax.dot_general`; the arithmetic follows ONNX Runtime's MatMulIntegerToFloat and QGemm.

    Cotangent of a float operand: as in the contraction with the other operand dequantized. Of a scale: g * acc times
    the other scale, or, weight-only, g times the float product, summed over the elements that share the scale. Of an
    offset: g times the sums of the other operand. Codes and zero points have none.
    """
    lhs, rhs = check_operands(_NAME, lhs, rhs)
    epilogue = read_epilogue(_NAME, bias, output, preferred_element_type, (lhs, rhs))
    numbers = check_numbers(_NAME, dimension_numbers)
    return contract_checked(
        _NAME, lhs, rhs, numbers, precision, preferred_element_type, out_sharding, epilogue=epilogue
    )


def check_numbers(function: str, numbers: Any) -> Any:
    """Return dimension numbers with tuples for lists; raise unless they are integers and hashable."""
    numbers = checks.check_integers(function, "dimension_numbers", numbers)
    checks.check_hashable(function, "dimension_numbers", numbers)
    return numbers


def contract_checked(
    function: str, lhs: Any, rhs: Any, numbers: DotDimensionNumbers, precision: lax.PrecisionLike,
    preferred: DTypeLike | None, out_sharding: NamedSharding | PartitionSpec | None = None,
    caller_axes: Axes | None = None, epilogue: Epilogue | None = None,
) -> Any:  # fmt: skip
    """Return the `dot_general` of checked operands and dimension numbers, with errors that name `function`."""
    sharding.check_out_sharding(function, out_sharding)
    preferred = check_options(function, precision, preferred)
    match_roles(function, lhs, rhs, numbers)  # raises errors that name the axes that the caller knows
    if caller_axes is None:
        caller_axes = tuple(zip(*numbers[0], strict=True))
    lhs, rhs, numbers = undo_transposes(lhs, rhs, numbers)
    return contract_dimensions(
        lhs, rhs, epilogue, function=function, numbers=numbers, precision=precision, preferred=preferred,
        out_sharding=out_sharding, caller_axes=caller_axes,
    )  # fmt: skip


def check_options(function: str, precision: lax.PrecisionLike, preferred: DTypeLike | None) -> np.dtype | None:
    """Return the dtype that the caller asked for, or None; raise for a wrong one, or for a wrong precision."""
    checks.check_precision(function, precision)
    if preferred is None:
        return None
    return checks.check_dtype(function, "preferred_element_type", preferred, dtypes.FLOATS)


# A plain jit is enough: the operands have been checked, and a QuantizedArray is a pytree.
@functools.partial(
    jax.jit,
    static_argnames=("function", "numbers", "precision", "preferred", "out_sharding", "caller_axes"),
)  # fmt: skip
def contract_dimensions(
    lhs: Any, rhs: Any, epilogue: Epilogue | None, *, function: str, numbers: Any, precision: Any, preferred: Any,
    out_sharding: Any, caller_axes: Axes,
) -> Any:  # fmt: skip
    left, right = match_roles(function, lhs, rhs, numbers)
    is_weight_only = not all(isinstance(x, QuantizedArray) for x in (lhs, rhs))
    finish = None
    is_nested = any(isinstance(x, QuantizedArray) and dot_integer.has_nested(x) for x in (lhs, rhs))
    if is_weight_only:
        if isinstance(lhs, QuantizedArray):
            lhs = dot_integer.read_nested(lhs, rhs)
        else:
            rhs = dot_integer.read_nested(rhs, lhs)
        lhs, rhs, finish = simplify_weights(lhs, rhs, left, right)
    lhs_words, rhs_words = (_keep_words(x, role) for x, role in ((lhs, left), (rhs, right)))
    lhs, rhs = (_unpack_unread(x, role, is_weight_only) for x, role in ((lhs, left), (rhs, right)))
    a, b = (x.codes if isinstance(x, QuantizedArray) else x for x in (lhs, rhs))
    check_placement(function, a, b, left, right, out_sharding)
    is_integer = check_integer_pair(function, lhs, rhs)
    if is_integer:
        lhs, rhs = dot_integer.read_nested(lhs), dot_integer.read_nested(rhs)
    orders = [x.stored_order for x in (lhs, rhs) if isinstance(x, QuantizedArray) and x.ndim == 2]
    (lhs, left), (rhs, right) = (_read_as_stored(*side, is_integer=is_integer) for side in ((lhs, left), (rhs, right)))
    if finish is not None:
        contract, operands, dtype = choose_contraction(
            lhs, rhs, left, right, precision, out_sharding, is_moved=any(order is not None for order in orders),
            is_nested=is_nested,
        )  # fmt: skip
        dtype = preferred or dtype
        with jax.named_scope(recording.WEIGHT_ONLY):
            y = contract(*operands)
        return affine.round_to_dtype(finish(y), dtype).astype(dtype)
    if not is_integer:
        for argument, given in () if epilogue is None else (("bias", epilogue.bias), ("output", epilogue.output)):
            text = f"None with codes of {lhs.codes.dtype}, whose sums are floats"
            checks.require(given is None, function, argument, text, checks.describe_value(given))
        return dot_float.contract_small_floats(
            function, lhs, rhs, left, right, precision, preferred, out_sharding, caller_axes
        )
    lhs, rhs = dot_integer.fill_empty_entries(lhs, left), dot_integer.fill_empty_entries(rhs, right)
    plan = dot_integer.plan_contraction(function, lhs, rhs, left, right, out_sharding, caller_axes)
    packed = (lhs_words, rhs_words)
    if epilogue is None:
        return dot_integer.multiply_codes(lhs, rhs, plan, preferred, packed)
    return dot_integer.multiply_to_codes(function, lhs, rhs, plan, preferred, epilogue, packed)


def _keep_words(x: Any, role: Role) -> PackedOperand | None:
    """Return the words of an array of packed integers, with its dimensions as they are in memory; else None."""
    if not isinstance(x, QuantizedArray) or x.packing is None or x.codebook is not None:
        return None
    if x.packing.format in dtypes.FLOAT4 or sharding.is_placed(x.stored_codes):
        return None
    stored, _ = _read_as_stored(x, role, is_integer=True)
    layout = WordLayout(x.packing.bits, x.packing.length, dtypes.read_bounds(x.packing.format)[0] < 0)
    return PackedOperand(stored.stored_codes, stored.zero_point, layout, x.block_size)


def _unpack_unread(x: Any, role: Role, is_weight_only: bool) -> Any:
    """Return an operand with its codes unpacked, unless a weight-only contraction reads its words."""
    if not isinstance(x, QuantizedArray) or (is_weight_only and has_readable_words(x, role)):
        return x
    return unpack_checked(x)


def check_integer_pair(function: str, lhs: Any, rhs: Any) -> bool:
    """Return whether two operands are contracted as integers; raise if they cannot be, though both are quantized."""
    if not all(isinstance(x, QuantizedArray) for x in (lhs, rhs)):
        return False
    if all(dot_float.has_float_codes(x) for x in (lhs, rhs)):
        return False
    for argument, q in (("lhs", lhs), ("rhs", rhs)):
        dot_integer.check_integer_array(function, argument, q, dot_integer.DOT_FORMS)
    return True


def _read_as_stored(x: QuantizedArray | jax.Array, role: Role, *, is_integer: bool) -> tuple[Any, Role]:
    """Return an operand without a stored order, with its dimensions as they are in memory, and their roles.

    The contractions then see how the codes lie in memory. Each role lists the dimensions in the order of the logical
    axes, so the result is the same.
    """
    if not isinstance(x, QuantizedArray) or x.stored_order is None:
        return x, role
    if not is_integer and not is_read_by_kernels(x):
        return x.replace(stored_order=None), role
    dimensions = parts.match_dimensions(x.stored_order, x.ndim)
    batch, free, contracted = (tuple(dimensions[axis] for axis in axes) for axes in role)
    # `jax.lax.dot_general` returns the free dimensions in the order of its operand.
    if free != tuple(sorted(free)):
        return x.replace(stored_order=None), role
    permutation = parts.derive_permutation(x.stored_order, x.ndim)
    entries = indexing.transpose_entries(x, permutation)
    stored = x.replace(**entries)._with_stored(x._stored, None)
    return stored, Role(batch, free, contracted)


def check_operands(function: str, lhs: object, rhs: object) -> tuple[Any, Any]:
    """Check that at least one of two operands is quantized, and return both."""
    lhs, rhs = check_operand(function, "lhs", lhs), check_operand(function, "rhs", rhs)
    if not isinstance(lhs, QuantizedArray) and not isinstance(rhs, QuantizedArray):
        got = f"{checks.describe_value(lhs)} and {checks.describe_value(rhs)}"
        checks.refuse_type(function, "lhs, rhs", "a QuantizedArray on at least one side", got)
    return lhs, rhs


def check_operand(function: str, argument: str, x: Any) -> Any:
    """Check that an operand is a QuantizedArray or a float array, and return it."""
    # A flax.nnx.Param may hold a QuantizedArray, which JAX could not convert.
    if not isinstance(x, QuantizedArray) and not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):
        x = x.__jax_array__()
    if isinstance(x, QuantizedArray):
        return quantized_array.check_array(function, argument, x, supports=quantized_array.FORMS)
    (x,) = entry_point.convert_arrays(function, {argument: x})
    checks.check_array(function, argument, x, dtypes.FLOATS)
    return x


@quantized_array.register_matmul
def matmul(
    lhs: Operand,
    rhs: Operand,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    bias: ArrayLike | None = None,
    output: ScaledSpec | QuantizedArray | None = None,
) -> Any:
    """Multiply two matrices, or stacks of them, at least one of them quantized.

    out = lhs @ rhs, with the shapes of numpy.matmul.

    The contraction is `dot_general`'s: its documentation says what is computed, and in which order.

    Args:
        lhs: a QuantizedArray, or an array of float32, float16 or bfloat16, of rank 1 or more.
        rhs: the same; at least one of the two is a QuantizedArray.
        precision: Static. As in `jax.lax.dot_general`, for a float contraction; an integer contraction ignores it.
        preferred_element_type: Static. float32, float16 or bfloat16: the dtype of the result. By default the dtype of
            the operands, or float32 if they differ.
        out_sharding: Static. The sharding of the product on a mesh with explicit axes, as in `dot_general`.
        bias: int32, in steps of lhs.scale * rhs.scale, [N], one for each column of rhs, if both operands are
            quantized. None means 0.
        output: how the result is quantized, if both operands are: a `Quantizer` with a scale; a QuantizedArray
            that gives its scale and zero point to the result; or None for a float result.

    Returns:
        The product, of numpy.matmul's shape: an array of floats, or with `output` a QuantizedArray.

    Raises:
        TypeError: neither operand is quantized, or an operand has an unsupported dtype.
        ValueError: shapes do not fit each other, an out_sharding does not fit the product, or `dot_general` cannot
            contract the operands.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([[-1.0, 0.0, 1.55], [0.495, 0.015, 0.025]])
        >>> x = jq.quantize(x, jq.QuantSpec(jnp.uint8), range=(-1, 1.55))
        >>> w = jq.quantize(jnp.array([[63.5], [-3.25], [0.25]]), jq.QuantSpec(jnp.int8, jq.PerAxis(1)))
        >>> x.codes, jq.matmul(x, w)
        (Array([[  0, 100, 255],
               [150, 102, 102]], dtype=uint8), Array([[-63.5     ],
               [ 31.689999]], dtype=float32))
        >>> x @ w == jq.matmul(x, w)
        Array([[ True],
               [ True]], dtype=bool)

    Source: numpy.matmul; the arithmetic follows ONNX Runtime's MatMulIntegerToFloat and QGemm.

    Cotangents: as in `dot_general`.
    """
    a, b = check_operands("matmul", lhs, rhs)
    shapes = match_matrices("matmul", a, b, ("lhs", "rhs"))
    sharding.check_out_sharding("matmul", out_sharding)
    epilogue = read_epilogue("matmul", bias, output, preferred_element_type, (a, b))
    if bias is not None and epilogue is not None:
        expected = () if b.ndim == 1 else (b.shape[-1],)
        checks.check_shape("matmul", "bias", epilogue.bias, expected, "one for each column of rhs")
    partition = _match_partition("matmul", a, b, shapes, out_sharding)
    preferred = check_options("matmul", precision, preferred_element_type)
    # The operands may be reshaped below, but an error must name the dimensions of the caller's arrays.
    caller_axes = ((a.ndim - 1, max(b.ndim - 2, 0)),)
    batch: tuple[int, ...] = ()
    # If rhs is a single matrix, the batch dimensions of lhs are only additional rows of one product.
    if math.prod(shapes.b[:-2]) == 1:
        b = b.reshape(shapes.b[-2:]) if b.ndim != 2 else b
        contracted = ((a.ndim - 1,), (0,))
        a, b, (contracted, _) = undo_transposes(a, b, (contracted, ((), ())))
    else:
        batch = shapes.product[:-2]
        a, b = (_broadcast_batch(x, shape, batch) for x, shape in ((a, shapes.a), (b, shapes.b)))
        contracted = ((len(batch) + 1,), (len(batch),))
    batch_axes = tuple(range(len(batch)))
    # The product may lack leading dimensions of 1 that the final reshape adds; these have no sharding.
    rank = a.ndim + b.ndim - 2 - len(batch)
    y = contract_dimensions(
        a, b, epilogue, function="matmul", numbers=(contracted, (batch_axes, batch_axes)), precision=precision,
        preferred=preferred, caller_axes=caller_axes,
        out_sharding=sharding.set_partition(out_sharding, partition and partition[len(partition) - rank :]),
    )  # fmt: skip
    return y if y.shape == shapes.out else y.reshape(shapes.out)  # eager JAX runs a program for a reshape


def undo_transposes(lhs: Any, rhs: Any, numbers: DotDimensionNumbers) -> tuple[Any, Any, DotDimensionNumbers]:
    """Return operands as they were before a transpose in this program, and the numbers that give the same product.

    XLA then sees two transposes of a quantized matrix's scale, which cancel each other. Call this before
    `contract_dimensions`: its jit takes arrays apart, and an array loses the mark that it is a transpose.
    """
    operands, (contracted, batch) = [lhs, rhs], numbers
    axes = [tuple(axes) for axes in contracted]
    for side, x in enumerate((lhs, rhs)):
        is_matrix = not batch[side] and len(axes[side]) == 1
        if is_matrix and _is_view(x) and not isinstance(operands[1 - side], QuantizedArray):
            operands[side], axes[side] = x.T, (1 - axes[side][0],)
    return *operands, (tuple(axes), batch)  # type: ignore


def _is_view(x: object) -> bool:
    """Return whether x is a matrix in a program, transposed there, with its codes as they were."""
    return isinstance(x, QuantizedArray) and x.ndim == 2 and x._is_view and checks.is_traced(x._stored)


def _match_partition(
    function: str, a: QuantizedArray | jax.Array, b: QuantizedArray | jax.Array, shapes: MatrixShapes,
    out_sharding: NamedSharding | PartitionSpec | None,
) -> tuple[Any, ...] | None:  # fmt: skip
    """Return the mesh axes of the matrix product, in which a vector operand is a matrix of one row or column."""
    partition = sharding.read_out_partition(function, out_sharding, len(shapes.out))
    if partition is None:
        return None
    batch, matrix = partition[: len(shapes.product) - 2], list(partition[len(shapes.product) - 2 :])
    return (*batch, matrix.pop(0) if a.ndim > 1 else None, matrix.pop(0) if b.ndim > 1 else None)


def _broadcast_batch(x: QuantizedArray | jax.Array, shape: tuple[int, ...], batch: tuple[int, ...]) -> Any:
    """Return an operand as a stack of matrices with the common batch dimensions."""
    padded = (1,) * (len(batch) + 2 - len(shape)) + shape
    x = x if x.shape == padded else x.reshape(padded)
    full = (*batch, *padded[-2:])
    if x.shape == full:
        return x
    # A scale of length 1 along a batch dimension already applies to all of it.
    if isinstance(x, QuantizedArray):
        # The batch dimensions are in front of the matrix, and a stored order moves only the dimensions of the matrix.
        x = x if len(x.stored_order or ()) <= 2 else x.replace(stored_order=None)
        stored = x.stored_codes
        return x._with_stored(jnp.broadcast_to(stored, (*batch, *stored.shape[-2:])), x.stored_order)
    return jnp.broadcast_to(x, full)
