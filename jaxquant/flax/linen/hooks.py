"""What flax's own Linen layers can be given to contract in integers."""

from __future__ import annotations

from ..._arrays.spec import QuantSpec
from ..._training.backward import Backward, FloatBackward
from .. import _layer_operand
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
    """layer(x) = quantized_dot_general(x, kernel, ...) + bias, where layer = nn.Dense(..., dot_general=this).

    For every layer of flax that takes a `dot_general`. The layer needs `promote_dtype=jq.flax.promote_dtype`, too: to
    be served, for flax's own takes only arrays; and in bfloat16, where flax's own rounds the kernel before it is
    quantized. `nn.MultiHeadDotProductAttention` does not pass one on: it trains so, and is not converted.

    Args:
        weight_spec: how the kernel, the right operand, is quantized.
        activation_spec: how the left operand is, or None.
        weight_range: Static. `Dynamic()` or `Learned()`.
        activation_range: Static. `Observed()`, `Dynamic()` or `Learned()`.
        backward: Static. `jq.FloatBackward()` or `jq.Int8Backward()`.

    Returns:
        A function for any number of layers: in each it makes a module, whose ranges are in that layer's variables.

    Raises:
        TypeError: an argument has a wrong type, or a spec is none that a layer can serve.
        ValueError: specs contradict their ranges.

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
    _layer_operand.check_layer("flax.dot_general", weight_spec, activation_spec, weight_range, activation_range)
    return Injected(DotGeneral, weight_spec, activation_spec, weight_range, activation_range, backward)


def conv_general_dilated(
    weight_spec: QuantSpec,
    activation_spec: QuantSpec | None = None,
    *,
    weight_range: Source = Dynamic(),
    activation_range: Source = Observed(),
    backward: Backward = FloatBackward(),
) -> Injected:
    """layer(x) = quantized_conv_general_dilated(x, kernel, ...) + bias, of nn.Conv(conv_general_dilated=this).

    As `dot_general`, for flax's convolutions.

    Args:
        weight_spec: how the kernel is quantized.
        activation_spec: how the images are, or None.
        weight_range: Static. `Dynamic()` or `Learned()`.
        activation_range: Static. `Observed()`, `Dynamic()` or `Learned()`.
        backward: Static. `jq.FloatBackward()` or `jq.Int8Backward()`.

    Returns:
        A function for any number of layers.

    Raises:
        TypeError: an argument has a wrong type, or a spec is none that a layer can serve.
        ValueError: specs contradict their ranges.

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
    _layer_operand.check_layer(
        "flax.conv_general_dilated", weight_spec, activation_spec, weight_range, activation_range
    )
    return Injected(ConvGeneralDilated, weight_spec, activation_spec, weight_range, activation_range, backward)
