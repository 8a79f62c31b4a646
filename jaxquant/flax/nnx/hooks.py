"""Modules that flax's own NNX layers take as `dot_general` and `conv_general_dilated` to contract in integers."""

from __future__ import annotations

from collections.abc import Sequence

from flax import nnx

from ..._arrays.spec import QuantSpec
from ..._training.backward import Backward, FloatBackward
from .._layer_operand import Quantization
from ..ranges import Dynamic, Observed, Source
from .contraction import ConvGeneralDilated, DotGeneral


def dot_general(
    weight_spec: QuantSpec,
    activation_spec: QuantSpec | None = None,
    rngs: nnx.Rngs | None = None,
    *,
    weight_range: Source = Dynamic(),
    activation_range: Source = Observed(),
    backward: Backward = FloatBackward(),
    use_running_average: bool = False,
    kernel_shape: Sequence[int] | None = None,
) -> DotGeneral:
    """Return a module that any flax NNX layer with a `dot_general` argument can contract with.

    layer(x) = quantized_dot_general(x, kernel, ...) + bias, where layer = nnx.Linear(..., dot_general=this)

    The layer also needs `promote_dtype=qnnx.promote_dtype`: flax's own `promote_dtype` does not accept a converted
    kernel, and in bfloat16 it rounds the kernel before it is quantized.

    Args:
        weight_spec: How to quantize the kernel, the right operand.
        activation_spec: How to quantize the left operand; None leaves it in floats.
        rngs: Random keys for `Int8Backward(stochastic_rounding=True)`, which samples from the stream "rounding" in
            training mode. Otherwise None.
        weight_range: Static. The source of the kernel's range: `Dynamic()` or `Learned()`.
        activation_range: Static. The source of the left operand's range: `Observed()`, `Dynamic()` or `Learned()`.
        backward: Static. How to contract gradients: `jq.FloatBackward()` or `jq.Int8Backward()`.
        use_running_average: Static. Whether ranges are only read, not updated; `model.train()` and `model.eval()` set
            it.
        kernel_shape: Static. The shape of the kernel, needed only if it has several scales and they are learned.

    Returns:
        A module with variables, for one layer. Layers that share it share their ranges.

    Raises:
        TypeError: An argument has a wrong type, or a spec has a dtype that cannot be contracted in integers.
        ValueError: A spec is not supported with the source of its range, or kernel_shape is needed and missing.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> dot_general = qnnx.dot_general(jq.QuantSpec(jnp.int8, jq.PerFeature()))
        >>> layer = nnx.Linear(3, 2, dot_general=dot_general, promote_dtype=qnnx.promote_dtype, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((1, 3))
        >>> bool((qnnx.convert(layer)(x) == layer(x)).all())
        True

    Source: flax.nnx.Linear, `dot_general`.
    """
    quantization = Quantization(weight_spec, activation_spec, weight_range, activation_range, backward)
    return DotGeneral("flax.nnx.dot_general", quantization, use_running_average, rngs, None, kernel_shape)


def conv_general_dilated(
    weight_spec: QuantSpec,
    activation_spec: QuantSpec | None = None,
    rngs: nnx.Rngs | None = None,
    *,
    weight_range: Source = Dynamic(),
    activation_range: Source = Observed(),
    backward: Backward = FloatBackward(),
    use_running_average: bool = False,
    kernel_shape: Sequence[int] | None = None,
) -> ConvGeneralDilated:
    """Return a module that flax's NNX convolutions can convolve with.

    layer(x) = quantized_conv_general_dilated(x, kernel, ...) + bias, where
    layer = nnx.Conv(..., conv_general_dilated=this)

    The layer also needs `promote_dtype=qnnx.promote_dtype`, for the reasons that `dot_general` gives.

    Args:
        weight_spec: How to quantize the kernel.
        activation_spec: How to quantize the images; None leaves them in floats.
        rngs: Random keys for `Int8Backward(stochastic_rounding=True)`. Otherwise None.
        weight_range: Static. The source of the kernel's range: `Dynamic()` or `Learned()`.
        activation_range: Static. The source of the images' range: `Observed()`, `Dynamic()` or `Learned()`.
        backward: Static. How to contract gradients: `jq.FloatBackward()` or `jq.Int8Backward()`.
        use_running_average: Static. Whether ranges are only read, not updated; `model.train()` and `model.eval()` set
            it.
        kernel_shape: Static. The shape of the kernel, needed only if it has several scales and they are learned.

    Returns:
        A module with variables, for one layer. Layers that share it share their ranges.

    Raises:
        TypeError: An argument has a wrong type, or a spec has a dtype that cannot be contracted in integers.
        ValueError: A spec is not supported with the source of its range, or kernel_shape is needed and missing.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> conv = qnnx.conv_general_dilated(jq.QuantSpec(jnp.int8, jq.PerFeature()), jq.QuantSpec(jnp.uint8))
        >>> given = {"conv_general_dilated": conv, "promote_dtype": qnnx.promote_dtype}
        >>> layer = nnx.Conv(1, 2, (3,), **given, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 4, 1))).shape, int(conv.activation_batches[...])
        ((1, 4, 2), 1)

    Source: flax.nnx.Conv, `conv_general_dilated`.
    """
    quantization = Quantization(weight_spec, activation_spec, weight_range, activation_range, backward)
    return ConvGeneralDilated(
        "flax.nnx.conv_general_dilated", quantization, use_running_average, rngs, None, kernel_shape
    )
