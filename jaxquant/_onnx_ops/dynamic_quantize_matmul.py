"""ONNX Runtime's DynamicQuantizeMatMul, also with a scale for each block of b's rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core import checks, dtypes, entry_point, granularity
from .._core.entry_point import compile_entry_point
from .._core.number_arguments import convert_plain_scale
from ..integer import _matmul_shapes, _operands, _scaling
from ..integer._matmul_shapes import Shapes
from . import _rows_and_columns
from ._scaled_product import count_blocks, multiply_scaled, read_scaled_columns
from .dynamic_quantize_linear import encode_dynamic, find_dynamic_range

_NAME = "ops.dynamic_quantize_matmul"
_UINT8 = np.dtype(jnp.uint8)


def dynamic_quantize_matmul(
    a: ArrayLike, b: ArrayLike, b_scale: ArrayLike, b_zero_point: ArrayLike | None = None, bias: ArrayLike | None = None
) -> jax.Array:
    """Quantize a to uint8 with its own range and multiply it by codes, as ONNX Runtime's DynamicQuantizeMatMul does.

    y = float32((q - q_zero_point) @ (b - b_zero_point)) * (q_scale * b_scale) + bias,
    where (q, q_scale, q_zero_point) is the result of `dynamic_quantize_linear` for the whole of a, in uint8.

    The float32 operations are ONNX Runtime's, each rounded once. Infinities and NaN in a have the effect that
    `dynamic_quantize_linear` documents. With a scale for each block of b's rows, the products of the blocks are added
    in ascending order, as in `matmul_integer_to_float`.

    Args:
        a: values, float32, of rank 1 or more, in the shapes of numpy.matmul.
        b: codes, int8 or uint8.
        b_scale: value per step of b, float32: a scalar; one for each column, as [N] or [..., 1, N]; or, if b has rank
            2, [blocks, N]: one for each column and each of `blocks` equal runs of rows. A Python number becomes
            float32.
        b_zero_point: the code of 0.0, in b's dtype, with a shape that b_scale may have; [blocks, N] only if b_scale has
            it too. None means 0. An int becomes a scalar in b's dtype.
        bias: float32, [N]. None means 0.

    Returns:
        float32, of numpy.matmul's shape.

    Raises:
        TypeError: an argument has a dtype that the operator does not support.
        ValueError: shapes do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> a = jnp.array([[-10.0, 3.4, 10.0]])  # 0, 170 and 254, zero point 127
        >>> b = jnp.array([[1, -128], [2, 127], [3, 1]], jnp.int8)
        >>> jq.ops.dynamic_quantize_matmul(a, b, jnp.array([0.25, 2.0]))
        Array([[   6.666667, 3426.51    ]], dtype=float32)

    Source: ONNX Runtime's com.microsoft DynamicQuantizeMatMul-1; the blocks are an addition of this library.

    Cotangent of a: g times the transpose of the dequantized b; rounding counts as the identity, and the range of a as a
    constant. Of b_scale: g * acc * q_scale, summed over the elements that share the scale. Of bias: g summed over rows.
    Integers have none.
    """
    b_scale = convert_plain_scale(_NAME, "b_scale", b_scale)
    b_zero_point = _operands.convert_zero_point_number(_NAME, "b_zero_point", b_zero_point, b)
    centred = _operands.is_centred(b_zero_point, getattr(b, "dtype", None))
    return _dynamic_quantize_matmul(entry_point.convert_number(a), b, b_scale, b_zero_point, bias, centred=centred)


@compile_entry_point(_NAME)
def _dynamic_quantize_matmul(
    a: jax.Array, b: jax.Array, b_scale: jax.Array, b_zero_point: jax.Array | None, bias: jax.Array | None, *,
    centred: bool,
) -> jax.Array:  # fmt: skip
    checks.check_array(_NAME, "a", a, (dtypes.FLOAT32,))
    checks.check_array(_NAME, "b", b, _operands.EIGHT_BITS)
    checks.check_array(_NAME, "b_scale", b_scale, (dtypes.FLOAT32,))
    shapes = _matmul_shapes.find_shapes(_NAME, a, b)
    _rows_and_columns.check_bias(_NAME, bias, shapes)
    b_scale, b_steps = read_scaled_columns(_NAME, b, b_scale, b_zero_point, shapes, centred)
    # The bias stays outside of the gradient rule: JAX differentiates a sum.
    y: Any = _multiply(shapes, a, b, b_steps, b_scale)
    return _scaling.add_bias(y, bias).reshape(shapes.out)


# A gradient rule is necessary because a is converted to integer codes, where JAX stops the gradient.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(shapes: Shapes, a: jax.Array, b: jax.Array, b_steps: Any, b_scale: jax.Array) -> jax.Array:
    """Return the product without its bias; b_steps is the zero point of the signed b."""
    return _multiply_fwd(shapes, a, b, b_steps, b_scale)[0]


def _multiply_fwd(
    shapes: Shapes, a: jax.Array, b: jax.Array, b_steps: Any, b_scale: jax.Array
) -> tuple[jax.Array, Any]:
    a, b, b_scale = jnp.asarray(a), jnp.asarray(b), jnp.asarray(b_scale)
    # The operator has one scale for all of a, even if a is a stack of matrices.
    per_tensor = granularity.PerTensor()
    _, _, scale, zero_point = find_dynamic_range(a, per_tensor, _UINT8)
    codes = encode_dynamic(a, scale, zero_point, per_tensor)
    a_steps, a_scale = _operands.convert_steps(zero_point, _UINT8, False), scale.reshape((1,) * len(shapes.a))
    y = multiply_scaled(codes, b, a_steps, b_steps, a_scale, b_scale, shapes)
    return y, (codes, b, a_steps, b_steps, a_scale, b_scale)


def _multiply_bwd(shapes: Shapes, residuals: Any, g: jax.Array) -> tuple[Any, ...]:
    codes, b, a_steps, b_steps, a_scale, b_scale = residuals
    weights = _operands.convert_to_signed(b.reshape(shapes.b)).astype(jnp.float32)
    blocks = count_blocks(b_scale, shapes)
    if b_steps is not None:
        weights = weights - jnp.broadcast_to(_spread_blocks(b_steps, blocks, shapes), shapes.b).astype(jnp.float32)
    # Only the gradient of a needs dequantized weights; that of b_scale comes from the integer product.
    values = weights * jnp.broadcast_to(_spread_blocks(b_scale, blocks, shapes), shapes.b)
    highest = lax.Precision.HIGHEST
    # jax.vjp needs an operand with the shape, sharding and variance of a. Its value does not matter, because the
    # product is linear in it.
    like = codes.reshape(shapes.a).astype(jnp.float32)
    _, pull_a = jax.vjp(lambda v: jnp.matmul(v, values, precision=highest), like)
    _, pull_scale = jax.vjp(lambda s: multiply_scaled(codes, b, a_steps, b_steps, a_scale, s, shapes), b_scale)
    (da,) = pull_a(g)
    return da.reshape(codes.shape), None, None, pull_scale(g)[0]


_multiply.defvjp(_multiply_fwd, _multiply_bwd)


def _spread_blocks(value: jax.Array, blocks: int, shapes: Shapes) -> jax.Array:
    """Return a scale or zero point of [blocks, N] with an entry for each row of b, and any other one unchanged."""
    return jnp.repeat(value, shapes.b[0] // blocks, axis=0) if blocks > 1 and value.ndim == 2 else value
