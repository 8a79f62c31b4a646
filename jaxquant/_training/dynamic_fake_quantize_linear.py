"""DynamicQuantizeLinear and DequantizeLinear in one, float in and float out, with a straight-through gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from .._core import dtypes, entry_point, toolkit_attributes
from .._core.entry_point import compile_entry_point
from .._onnx_ops.dynamic_quantize_linear import check_dynamic, find_dynamic_range
from .fake_quantize_linear import Config, fake_quantize_parts

_NAME = "dynamic_fake_quantize_linear"


def dynamic_fake_quantize_linear(
    x: ArrayLike,
    *,
    dtype: DTypeLike = jnp.uint8,
    axis: int | None = None,
    training: bool = True,
    lda_coeff: float = 1.0,
    name: str | None = None,
) -> jax.Array:
    """y = (q - y_zero_point) * y_scale, with (q, y_scale, y_zero_point) = dynamic_quantize_linear(x).

    The forward pass is `dequantize_linear(*dynamic_quantize_linear(x, ...), axis=axis)` to the last bit. On the
    way back the scale and the zero point count as constants, although x gave them, and rounding as the identity.
    For the whole derivative hand `dynamic_quantize_linear`'s y_scale to `fake_quantize_linear`.

    Args:
        x: values, float32, of any shape; a Python number is float32.
        dtype: Static. uint8, or int8 for the range [-127, 127].
        axis: Static. None for one scale; else the axis that is kept, negative from the back: a scale and a zero
            point per index of it.
        training: Static. False keeps nothing for the backward pass; differentiating then raises.
        lda_coeff: Static. Multiplies the gradient that flows back to x; 0 stops it, -1 reverses it.
        name: Static. A name for the operation in the lowered program, as `jax.named_scope` gives it.

    Returns:
        The values that the codes stand for, float32, x's shape.

    Raises:
        TypeError: x is not float32, dtype is neither uint8 nor int8, or a static argument has a wrong type.
        ValueError: axis is out of range; or the call is differentiated with training=False.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([-1.0, 0.5, 126.5, 254.0])
        >>> jq.dynamic_fake_quantize_linear(x)
        Array([ -1.,   0., 126., 254.], dtype=float32)
        >>> jax.grad(lambda x: jq.dynamic_fake_quantize_linear(x, lda_coeff=0.5).sum())(x)
        Array([0.5, 0.5, 0.5, 0.5], dtype=float32)

    Source: ONNX DynamicQuantizeLinear-11 and DequantizeLinear-10; training, lda_coeff and name from the node of
    Graiphic's Deep Learning Toolkit for LabVIEW.

    Cotangent of x: lda_coeff * g * m, with m 1 where rounding alone lands on a code and 0 elsewhere (a rounded
    zero point can push an extreme half a step out).
    """
    return _dynamic_fake_quantize_linear(
        entry_point.convert_number(x), dtype=dtype, axis=axis, training=training, lda_coeff=lda_coeff, name=name,
    )  # fmt: skip


@compile_entry_point(_NAME)
def _dynamic_fake_quantize_linear(
    x: jax.Array, *,
    dtype: Any, axis: int | None, training: bool, lda_coeff: float, name: str | None,
) -> jax.Array:  # fmt: skip
    found, granularity = check_dynamic(_NAME, x, dtype, axis)
    toolkit_attributes.check_attributes(_NAME, training, lda_coeff, name)
    config = Config(granularity, found, dtypes.find_narrow_bounds(found), bool(training), float(lda_coeff), _NAME)
    with toolkit_attributes.name_scope(name):
        _, _, scale, zero_point = find_dynamic_range(jax.lax.stop_gradient(x), granularity, found)
        return fake_quantize_parts(config, x, scale, zero_point)
