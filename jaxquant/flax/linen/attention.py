"""Flax Linen's multi-head attention with quantized projections, attention in integers and a quantized cache."""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import linen as nn

from ..._arrays.spec import QuantSpec
from ..._attention.kv_cache import INT8
from ..._core import checks
from ..._training.backward_choices import Backward, FloatBackward
from ..._training.range_sources import Dynamic, RangeSource
from .. import _attention
from .._attention import AttentionOptions
from .layers import DenseGeneral

_NAME = "flax.linen"
_FIXED = (
    *("qkv_dot_general", "out_dot_general", "qkv_dot_general_cls", "out_dot_general_cls"),
    *("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"),
)


# This base class comes before flax's layer: dataclass fields are collected from the last base class to the first, so
# flax's own attributes keep their positions.
class _LinenAttention(nn.Module):
    """The attributes that the attention layer adds to flax's, and their checks.

    Attributes:
        weight_spec: how to quantize the kernels of the projections. Required.
        activation_spec: how to quantize the inputs of the projections, or None.
        weight_range: the source of a kernel's range.
        activation_range: the source of the range of the inputs of a projection.
        backward: how to contract the gradients of the projections.
        query_spec: how to quantize queries.
        key_spec: how to quantize keys.
        value_spec: how to quantize values.
        weight_digits: the number of digits of the weights of the attention.
        rotate: whether queries and keys are rotated.
        cache_window: the number of tokens that a query attends to in decode mode, or None for all.
    """

    weight_spec: QuantSpec | None = None
    activation_spec: QuantSpec | None = None
    weight_range: RangeSource = Dynamic()
    activation_range: RangeSource = Dynamic()
    backward: Backward = FloatBackward()
    query_spec: QuantSpec | None = None
    key_spec: QuantSpec = INT8
    value_spec: QuantSpec = INT8
    weight_digits: int = 2
    rotate: bool = False
    cache_window: int | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        fixed = {name: (getattr(self, name), None) for name in _FIXED}
        fixed["attention_fn"] = (self.attention_fn, nn.dot_product_attention)  # type: ignore[attr-defined]
        _attention.check_options(_NAME, fixed)


class MultiHeadDotProductAttention(_LinenAttention, nn.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` with projections and attention in integers.

    y = out(quantized_dot_product_attention(query(x), key(x), value(x), mask))

    The layer has the attributes of flax's layer, except those that replace its contractions, and its parameters have
    the same names and shapes. The projections `query`, `key`, `value` and `out` are `DenseGeneral` layers of this
    package: they are calibrated and converted as these. The attention trains and serves with the same numbers.

    With `decode=True` the collection "cache" holds a `jq.KVCache`. As in flax, `init` makes it, for as many tokens as
    its inputs have, and each later call appends its tokens and attends to all tokens so far. Unlike in flax a call may
    have several tokens, for example a prompt. A mask then refers to the slots of the cache.

    Attributes:
        weight_spec: How to quantize the kernels of the projections, a QuantSpec, as in `Dense`. Required.
        activation_spec: How to quantize the inputs of the projections, as in `Dense`; None leaves them in floats.
            With `PerToken()` all heads of a token share a scale in `out`, which contracts heads and features.
        weight_range: As in `Dense`.
        activation_range: As in `Dense`.
        backward: How the gradients of the projections are contracted, as in `Dense`. Those of the attention are
            contracted in floats.
        query_spec: How to quantize queries, as in `jq.quantized_dot_product_attention`. None stands for int8 with a
            scale for each token and head, or with blocks where the keys have blocks.
        key_spec: The same for keys. A cache needs int8 or int4 with the granularity `PerToken()` or
            `Blocked(-1, size)`.
        value_spec: The same for values.
        weight_digits: The number of digits of 7 bits of the weights of the attention, 1, 2 or 3.
        rotate: Whether queries and keys are rotated before they are quantized, as in `jq.KVCache.create`.
        cache_window: The number of tokens that a query attends to in decode mode, itself included. The cache is then a
            ring for as many tokens as the inputs of `init` have, as in `jq.KVCache.create`. None keeps all
            tokens. Without decode mode it has no effect: pass the band of the window as the mask.

    Raises:
        TypeError: At construction: an argument has a wrong type.
        ValueError: At construction: `attention_fn`, or an attribute that replaces a contraction, is set. At `init`: the
            cache_window is not within 1 and the number of tokens. At a call: dropout is to be applied, or weights are
            to be sowed, which the integer attention does not support; or an error of `DenseGeneral` or of
            `jq.KVCache.append`.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant.flax import linen as qnn
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int8, jq.PerFeature())}
        >>> layer = qnn.MultiHeadDotProductAttention(num_heads=2, decode=True, **specs)
        >>> x = jax.random.normal(jax.random.key(0), (1, 8, 6))
        >>> variables = layer.init(jax.random.key(1), x)
        >>> y, state = layer.apply(variables, x[:, :3], mutable=["cache"])
        >>> y.shape, int(state["cache"]["kv_cache"].index), state["cache"]["kv_cache"].keys.dtype
        ((1, 3, 6), 3, dtype('int8'))
    """

    @nn.compact
    def __call__(  # type: ignore[override]
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """Return the projected attention.

        Args:
            inputs_q: What the queries are made of, float [batch..., queries, features].
            inputs_k: The same for keys; None stands for inputs_q.
            inputs_v: The same for values; None stands for inputs_k.
            mask: An array that broadcasts against [batch..., heads, queries, tokens]; its zeros hide a token. In decode
                mode the tokens are the slots of the cache.
            deterministic: Static. Whether dropout is off.
            dropout_rng: Not used, because the weights are not dropped.
            sow_weights: Static. False, because the weights are integers.

        Returns:
            A float array [batch..., queries, features].
        """
        checks.require(inputs_k is not None or inputs_v is None, _NAME, "inputs_k", "an array, as inputs_v", None)
        _attention.check_options(_NAME, {"sow_weights": (sow_weights, False)})
        deterministic = self.deterministic if deterministic is None else deterministic
        _attention.check_no_dropout(_NAME, self.dropout_rate, deterministic)
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        features = self.qkv_features or inputs_q.shape[-1]
        expected = f"a multiple of num_heads, {self.num_heads}"
        checks.require(features % self.num_heads == 0, _NAME, "qkv_features", expected, features)
        project = functools.partial(
            self._project, features=(self.num_heads, features // self.num_heads), axis=-1,
            kernel_init=self.kernel_init, bias_init=self.bias_init,
        )  # fmt: skip
        query, key, value = project("query")(inputs_q), project("key")(inputs_k), project("value")(inputs_v)
        if self.normalize_qk:
            query, key = self._normalize("query_ln")(query), self._normalize("key_ln")(key)
        y = self._attend(query, key, value, mask)
        out = self._project(
            "out", features=self.out_features or inputs_q.shape[-1], axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init, bias_init=self.out_bias_init or self.bias_init,
        )  # fmt: skip
        return out(y)

    @nn.nowrap
    def _project(self, name: str, **arguments: Any) -> DenseGeneral:
        """Return one of the projections."""
        shared = {
            "dtype": self.dtype, "param_dtype": self.param_dtype, "use_bias": self.use_bias,
            "precision": self.precision, "weight_spec": self.weight_spec, "activation_spec": self.activation_spec,
            "weight_range": self.weight_range, "activation_range": self.activation_range, "backward": self.backward,
        }  # fmt: skip
        return DenseGeneral(name=name, **shared, **arguments)

    @nn.nowrap
    def _normalize(self, name: str) -> nn.LayerNorm:
        """Return the norm of queries or keys."""
        return nn.LayerNorm(name=name, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)

    @nn.nowrap
    def _attend(self, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> jax.Array:
        """Return the attention, in decode mode to the cache."""
        options = AttentionOptions(self.query_spec, self.key_spec, self.value_spec, self.weight_digits, self.rotate)
        if self.decode:
            # `init` makes the cache, for the length of its inputs.
            is_initialized = self.has_variable("cache", "kv_cache")
            make_cache = _attention.make_cache
            cache = self.variable("cache", "kv_cache", make_cache, options, key.shape, self.cache_window)
            if is_initialized:
                y, cache.value = _attention.attend_to_cache(options, cache.value, query, key, value, mask)
                return y
        return _attention.attend_to_tokens(options, query, key, value, mask)


class MultiHeadAttention(MultiHeadDotProductAttention):
    """`MultiHeadDotProductAttention` under flax's other name, which is also the default name of its variables."""
