"""`dynamic_fake_quantize_linear`: DynamicQuantizeLinear and DequantizeLinear in one call, with a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from .._core import dtypes, entry_point
from .._core.entry_point import compile_entry_point
from .._onnx_ops import quantization
from .._onnx_ops.quantization import check_dynamic, find_dynamic_range
from .rounding_vjp import Config, LinearCodes, LinearOptions, quantize_and_dequantize

_NAME = "dynamic_fake_quantize_linear"


def dynamic_fake_quantize_linear(
    x: ArrayLike,
    *,
    dtype: DTypeLike = jnp.uint8,
    axis: int | None = None,
    training: bool = True,
    lda_coeff: float = 1.0,
    name: str | None = None,
    specified_outputs_name: Sequence[str] | None = None,
) -> jax.Array:
    """Apply ONNX DynamicQuantizeLinear and DequantizeLinear to x, with a straight-through gradient.

    y = (q - y_zero_point) * y_scale, with (q, y_scale, y_zero_point) = dynamic_quantize_linear(x)

    The forward pass is `dequantize_linear(*dynamic_quantize_linear(x, ...), axis=axis)` bit for bit. The backward pass
    treats rounding as the identity, and the scale and the zero point as constants, although they are computed from x.
    To differentiate through the scale too, pass the y_scale of `dynamic_quantize_linear` to `fake_quantize_linear`.

    Args:
        x: the values, float32, of any shape. A Python number becomes float32.
        dtype: Static. uint8, or int8 for the codes [-127, 127].
        axis: Static. None computes one scale for all of x. An int is the axis that is kept: each index of it has its
            own scale and zero point. Negative numbers count from the back.
        training: Static. False stores nothing for the backward pass; differentiating the call then raises an error.
        lda_coeff: Static. The factor of the gradient of x: 0 stops the gradient, -1 reverses it.
        name: Static. A name for the operation in the lowered program, as with `jax.named_scope`.
        specified_outputs_name: Static. A list with a name for the output in a model that `jaxquant.onnx.export` writes.
            None or an empty list leaves it to the exporter.

    Returns:
        The values that the codes represent, float32, in the shape of x.

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

    Source: ONNX DynamicQuantizeLinear-11 and DequantizeLinear-10; training, lda_coeff, name and
    specified_outputs_name from the node of Graiphic's Deep Learning Toolkit for LabVIEW.

    Cotangent of x: lda_coeff * g * m, where m is 1 if x rounds to a code without clipping and 0 otherwise. An extreme
    of x can be clipped, because the zero point is rounded by up to half a step.
    """
    return _dynamic_fake_quantize_linear(
        entry_point.convert_number(x), dtype=dtype, axis=axis, training=training, lda_coeff=lda_coeff, name=name,
        specified_outputs_name=quantization.read_output_names(_NAME, specified_outputs_name, 1),
    )  # fmt: skip


@compile_entry_point(_NAME)
def _dynamic_fake_quantize_linear(
    x: jax.Array, *,
    dtype: Any, axis: int | None, training: bool, lda_coeff: float, name: str | None,
    specified_outputs_name: tuple[str, ...],
) -> jax.Array:  # fmt: skip
    code_dtype, granularity = check_dynamic(_NAME, x, dtype, axis)
    quantization.check_toolkit_attributes(_NAME, training, lda_coeff, name)
    options = LinearOptions(granularity, bool(training), float(lda_coeff), _NAME)
    config = Config(LinearCodes(code_dtype, dtypes.find_narrow_bounds(code_dtype)), linear=options)
    with quantization.name_scope(name):
        # The gradient treats the scale and the zero point as constants.
        _, _, scale, zero_point = find_dynamic_range(jax.lax.stop_gradient(x), granularity, code_dtype)
        y: Any = quantize_and_dequantize(config, x, scale, zero_point, None)
        return quantization.name_outputs((y,), specified_outputs_name)[0]
