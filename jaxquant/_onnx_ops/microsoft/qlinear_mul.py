"""ONNX Runtime's QLinearMul."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._core import barriers, recording, rounding
from ..._core.entry_point import compile_entry_point
from ...integer import _requantize
from ._arguments import broadcast_operands, convert_two, read_two

_NAME = "ops.qlinear_mul"


def qlinear_mul(
    a: ArrayLike,
    a_scale: ArrayLike,
    a_zero_point: ArrayLike | None,
    b: ArrayLike,
    b_scale: ArrayLike,
    b_zero_point: ArrayLike | None,
    c_scale: ArrayLike,
    c_zero_point: ArrayLike | None = None,
) -> jax.Array:
    """Multiply two arrays of codes element by element, as ONNX Runtime's QLinearMul does.

    c = saturate(round_half_even((a - a_zero_point) * (b - b_zero_point) * (a_scale * b_scale / c_scale)
    + c_zero_point)).

    The integers are those of ONNX Runtime's kernel for x86-64: the scales are multiplied, then divided, in float32; the
    product with them and the sum with the zero point are rounded to float32, one after the other, before the rounding
    to an integer. ONNX Runtime converts to int32 before it saturates, so a product of more than 2**31 steps becomes the
    lowest code; here it saturates.

    Args:
        a: codes, int8 or uint8.
        a_scale: value per step of a, float32, a scalar. A Python number becomes float32.
        a_zero_point: the code of 0.0, a scalar in a's dtype. None means 0. An int becomes a scalar in a's dtype.
        b: codes in a's dtype, of a shape that broadcasts against a's.
        b_scale: value per step of b, float32, a scalar. A Python number becomes float32.
        b_zero_point: the code of 0.0, a scalar in a's dtype. None means 0. An int becomes a scalar in a's dtype.
        c_scale: value per step of c, float32, a scalar. A Python number becomes float32.
        c_zero_point: the code of 0.0, a scalar in a's dtype. None means 0. An int becomes a scalar in a's dtype.

    Returns:
        The codes of the product, in a's dtype.

    Raises:
        TypeError: an argument has a dtype that the operator does not support.
        ValueError: shapes do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> a, b = jnp.array([0, 1, 3, 255], jnp.uint8), jnp.array([1, 1, 1, 255], jnp.uint8)
        >>> jq.ops.qlinear_mul(a, 0.5, 0, b, 1.0, 0, 1.0, 1)  # 1, 1.5, 2.5, 32513.5: halves go to even after 1 is added
        Array([  1,   2,   2, 255], dtype=uint8)

    Source: ONNX Runtime's com.microsoft QLinearMul-1.
    """
    return _qlinear_mul(*convert_two(_NAME, a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point))


@compile_entry_point(_NAME)
@recording.mark("qlinear_mul", lambda a, b, **_: (jnp.broadcast_shapes(a.shape, b.shape), a.dtype))
def _qlinear_mul(
    a: jax.Array, a_scale: jax.Array, a_zero_point: jax.Array | None, b: jax.Array, b_scale: jax.Array,
    b_zero_point: jax.Array | None, c_scale: jax.Array, c_zero_point: jax.Array | None,
) -> jax.Array:  # fmt: skip
    left, right, result = read_two(_NAME, a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point)
    a, b = broadcast_operands(_NAME, ("a", "b"), (a, b))
    # The product of two differences of codes has 16 bits, which float32 holds exactly.
    steps = (a.astype(jnp.int32) - left.steps) * (b.astype(jnp.int32) - right.steps)
    scale = _requantize.find_multiplier(left.scale, right.scale, result.scale)
    scaled = barriers.round_result(steps.astype(jnp.float32) * scale)
    value = barriers.round_result(scaled + result.steps.astype(jnp.float32))
    return rounding.encode_steps(value, None, result.dtype)
