"""Functions that flax's own Linen layers take as `dot_general` and `conv_general_dilated` to contract in integers."""

from __future__ import annotations

from ..._arrays.spec import QuantSpec
from ..._training.backward import Backward, FloatBackward
from .._layer_operand import Quantization, check_layer
from ..ranges import Dynamic, Observed, Source
from .contraction import ConvGeneralDilated, DotGeneral, Injected


def dot_general(
    weight_spec: QuantSpec,
    activation_spec: QuantSpec | None = None,
    *,
    weight_range: Source = Dynamic(),
    activation_range: Source = Observed(),
    backward: Backward = FloatBackward(),
) -> Injected:
    """Return a function that any flax Linen layer with a `dot_general` attribute can contract with.

    layer(x) = quantized_dot_general(x, kernel, ...) + bias, where layer = nn.Dense(..., dot_general=this)

    The layer also needs `promote_dtype=jq.flax.promote_dtype`: flax's own `promote_dtype` does not accept a converted
    kernel, and in bfloat16 it rounds the kernel before it is quantized. `nn.MultiHeadDotProductAttention` does not pass
    `promote_dtype` to its layers: with this function it can be trained, but not converted.

    Args:
        weight_spec: How to quantize the kernel, the right operand.
        activation_spec: How to quantize the left operand; None leaves it in floats.
        weight_range: Static. The source of the kernel's range: `Dynamic()` or `Learned()`.
        activation_range: Static. The source of the left operand's range: `Observed()`, `Dynamic()` or `Learned()`.
        backward: Static. How to contract gradients: `jq.FloatBackward()` or `jq.Int8Backward()`.

    Returns:
        A function for any number of layers. In each layer it makes a module, and the ranges of that module are in the
        variables of the layer.

    Raises:
        TypeError: An argument has a wrong type, or a spec has a dtype that cannot be contracted in integers.
        ValueError: A spec is not supported with the source of its range.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq, jaxquant.flax
        >>> from flax import linen as nn
        >>> dot_general = jq.flax.dot_general(jq.QuantSpec(jnp.int8, jq.PerAxis(-1)))
        >>> layer = nn.Dense(2, dot_general=dot_general, promote_dtype=jq.flax.promote_dtype)
        >>> x = jnp.ones((1, 3))
        >>> variables = layer.init(jax.random.key(0), x)
        >>> serving = jq.flax.convert(layer, variables)
        >>> bool((layer.apply(serving, x) == layer.apply(variables, x)).all())
        True

    Source: flax.linen.Dense, `dot_general`.
    """
    quantization = Quantization(weight_spec, activation_spec, weight_range, activation_range, backward)
    check_layer("flax.dot_general", quantization)
    return Injected(DotGeneral, quantization)


def conv_general_dilated(
    weight_spec: QuantSpec,
    activation_spec: QuantSpec | None = None,
    *,
    weight_range: Source = Dynamic(),
    activation_range: Source = Observed(),
    backward: Backward = FloatBackward(),
) -> Injected:
    """Return a function that flax's Linen convolutions can convolve with.

    layer(x) = quantized_conv_general_dilated(x, kernel, ...) + bias, where
    layer = nn.Conv(..., conv_general_dilated=this)

    The layer also needs `promote_dtype=jq.flax.promote_dtype`, for the reasons that `dot_general` gives.

    Args:
        weight_spec: How to quantize the kernel.
        activation_spec: How to quantize the images; None leaves them in floats.
        weight_range: Static. The source of the kernel's range: `Dynamic()` or `Learned()`.
        activation_range: Static. The source of the images' range: `Observed()`, `Dynamic()` or `Learned()`.
        backward: Static. How to contract gradients: `jq.FloatBackward()` or `jq.Int8Backward()`.

    Returns:
        A function for any number of layers.

    Raises:
        TypeError: An argument has a wrong type, or a spec has a dtype that cannot be contracted in integers.
        ValueError: A spec is not supported with the source of its range.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq, jaxquant.flax
        >>> from flax import linen as nn
        >>> conv = jq.flax.conv_general_dilated(jq.QuantSpec(jnp.int8, jq.PerAxis(-1)), jq.QuantSpec(jnp.uint8))
        >>> layer = nn.Conv(2, (3,), conv_general_dilated=conv, promote_dtype=jq.flax.promote_dtype)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 4, 1)))
        >>> layer.apply(variables, jnp.ones((1, 4, 1)), mutable=["ranges"])[0].shape
        (1, 4, 2)

    Source: flax.linen.Conv, `conv_general_dilated`.
    """
    quantization = Quantization(weight_spec, activation_spec, weight_range, activation_range, backward)
    check_layer("flax.conv_general_dilated", quantization)
    return Injected(ConvGeneralDilated, quantization)
