"""Flax NNX's multi-head attention with quantized projections, attention in integers and a quantized cache."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Initializer, PrecisionLike
from jax.typing import DTypeLike

from ..._arrays.spec import QuantSpec
from ..._attention.kv_cache import INT8
from ..._core import checks
from ..._training.backward_choices import Backward, FloatBackward
from ..._training.range_sources import Dynamic, RangeSource
from .. import _attention
from .._attention import AttentionOptions
from .layers import LinearGeneral

_NAME = "flax.nnx"
_ZEROS = nnx.initializers.zeros_init()
# What a variable is made with besides its value, for example {"sharding_names": (None, "model")}.
Metadata = Mapping[str, Any] | None


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` with projections and attention in integers.

    y = out(quantized_dot_product_attention(query(x), key(x), value(x), mask))

    The layer takes the arguments of flax's layer, except those that replace its contractions, and its variables have
    the same names and shapes. The projections `query`, `key`, `value` and `out` are `LinearGeneral` layers of this
    package: they are calibrated and converted as these. The attention trains and serves with the same numbers.

    With `decode=True` the layer appends the tokens of a call to `kv_cache`, an `nnx.Cache` with a `jq.KVCache`, and
    attends to all tokens so far. As in flax, `init_cache` makes the cache. Unlike in flax a call may have several
    tokens, for example a prompt. A mask then refers to the slots of the cache.

    Args:
        num_heads: The number of heads of the queries.
        in_features: The number of input features of the queries.
        qkv_features: The number of features of all heads of the queries; None stands for in_features.
        out_features: The number of output features; None stands for in_features.
        num_kv_heads: The number of heads of keys and values, a divisor of num_heads; None stands for num_heads.
        in_kv_features: The number of input features of keys and values; None stands for in_features.
        weight_spec: How to quantize the kernels of the projections, a QuantSpec, as in `Linear`.
        activation_spec: How to quantize the inputs of the projections, as in `Linear`; None leaves them in floats.
            With `PerToken()` all heads of a token share a scale in `out`, which contracts heads and features.
        weight_range: As in `Linear`.
        activation_range: As in `Linear`.
        backward: How the gradients of the projections are contracted, as in `Linear`. Those of the attention are
            contracted in floats.
        use_running_average: As in `Linear`.
        query_spec: How to quantize queries, as in `jq.quantized_dot_product_attention`. None stands for int8 with a
            scale for each token and head, or with blocks where the keys have blocks.
        key_spec: The same for keys. A cache needs int8 or int4 with the granularity `PerToken()` or
            `Blocked(-1, size)`.
        value_spec: The same for values.
        weight_digits: The number of digits of 7 bits of the weights of the attention, 1, 2 or 3.
        rotate: Whether queries and keys are rotated before they are quantized, as in `jq.KVCache.create`.
        dtype: As in flax's layer.
        param_dtype: As in flax's layer.
        dropout_rate: As in flax's layer; a call in training needs 0.0.
        deterministic: As in flax's layer.
        precision: As in flax's layer.
        kernel_init: As in flax's layer.
        out_kernel_init: As in flax's layer.
        bias_init: As in flax's layer.
        out_bias_init: As in flax's layer.
        use_bias: As in flax's layer.
        decode: As in flax's layer.
        normalize_qk: As in flax's layer.
        rngs: Random keys, as in flax's layer.
        kernel_metadata: As in flax's layer, for example {"sharding_names": (None, "model")}.
        out_kernel_metadata: As in flax's layer.
        bias_metadata: As in flax's layer.
        out_bias_metadata: As in flax's layer.
        query_ln_scale_metadata: As in flax's layer.
        key_ln_scale_metadata: As in flax's layer.

    Raises:
        TypeError: At construction: an argument has a wrong type.
        ValueError: At construction: the heads do not divide the features. At a call: dropout is to be applied, or
            weights are to be sowed, which the integer attention does not support; there is no cache; or an error of
            `LinearGeneral` or of `jq.KVCache.append`.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int8, jq.PerFeature())}
        >>> layer = qnnx.MultiHeadAttention(4, 8, num_kv_heads=2, **specs, decode=True, rngs=nnx.Rngs(0))
        >>> layer.init_cache((1, 16, 8))
        >>> layer(jnp.ones((1, 3, 8))).shape, int(layer.kv_cache.get_value().index)
        ((1, 3, 8), 3)
    """

    def __init__(
        self, num_heads: int, in_features: int, qkv_features: int | None = None, out_features: int | None = None,
        num_kv_heads: int | None = None, in_kv_features: int | None = None, *, weight_spec: QuantSpec,
        activation_spec: QuantSpec | None = None, weight_range: RangeSource = Dynamic(),
        activation_range: RangeSource = Dynamic(), backward: Backward = FloatBackward(),
        use_running_average: bool = False, query_spec: QuantSpec | None = None, key_spec: QuantSpec = INT8,
        value_spec: QuantSpec = INT8, weight_digits: int = 2, rotate: bool = False,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32, dropout_rate: float = 0.0,
        deterministic: bool | None = None, precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init, out_kernel_init: Initializer | None = None,
        bias_init: Initializer = _ZEROS, out_bias_init: Initializer | None = None,
        use_bias: bool = True, decode: bool | None = None, normalize_qk: bool = False, rngs: nnx.Rngs,
        kernel_metadata: Metadata = None, out_kernel_metadata: Metadata = None, bias_metadata: Metadata = None,
        out_bias_metadata: Metadata = None, query_ln_scale_metadata: Metadata = None,
        key_ln_scale_metadata: Metadata = None,
    ) -> None:  # fmt: skip
        self.num_heads, self.in_features = num_heads, in_features
        self.qkv_features = in_features if qkv_features is None else qkv_features
        self.out_features = in_features if out_features is None else out_features
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, count, divisor in (
            ("qkv_features", self.qkv_features, num_heads),
            ("num_heads", num_heads, self.num_kv_heads),
        ):
            checks.require(count % divisor == 0, _NAME, name, f"a multiple of {divisor} heads", count)
        self.head_dim = self.qkv_features // num_heads
        self.dtype, self.param_dtype, self.normalize_qk = dtype, param_dtype, normalize_qk
        self.dropout_rate, self.deterministic, self.decode = dropout_rate, deterministic, decode
        self.options = AttentionOptions(query_spec, key_spec, value_spec, weight_digits, rotate)
        project = functools.partial(
            LinearGeneral, dtype=dtype, param_dtype=param_dtype, use_bias=use_bias, precision=precision,
            weight_spec=weight_spec, activation_spec=activation_spec, weight_range=weight_range,
            activation_range=activation_range, backward=backward, use_running_average=use_running_average, rngs=rngs,
        )  # fmt: skip
        inner = {
            "kernel_init": kernel_init, "bias_init": bias_init, "kernel_metadata": kernel_metadata or {},
            "bias_metadata": bias_metadata or {},
        }  # fmt: skip
        heads, kv_heads = (num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        self.query = project(in_features, heads, **inner)
        self.key = project(self.in_kv_features, kv_heads, **inner)
        self.value = project(self.in_kv_features, kv_heads, **inner)
        norms = (query_ln_scale_metadata, key_ln_scale_metadata)
        self.query_ln, self.key_ln = (self._make_norm(rngs, metadata) for metadata in norms)
        # As in flax, the output takes what is not set for it from the other projections.
        outer = {
            "kernel_init": out_kernel_init or kernel_init, "bias_init": out_bias_init or bias_init,
            "kernel_metadata": out_kernel_metadata or kernel_metadata or {},
            "bias_metadata": out_bias_metadata or bias_metadata or {},
        }  # fmt: skip
        self.out = project(heads, self.out_features, axis=(-2, -1), **outer)
        self.kv_cache: Any = nnx.data(None)

    def _make_norm(self, rngs: nnx.Rngs, metadata: Metadata) -> Any:
        """Return the norm of queries or keys, or None."""
        if not self.normalize_qk:
            return nnx.data(None)
        options: dict[str, Any] = {"use_bias": False, "dtype": self.dtype, "param_dtype": self.param_dtype}
        options["scale_metadata"] = metadata or {}
        return nnx.LayerNorm(self.head_dim, **options, rngs=rngs)

    def __call__(  # type: ignore[override]
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
    ) -> jax.Array:
        """Return the projected attention.

        Args:
            inputs_q: What the queries are made of, float [batch..., queries, features].
            inputs_k: The same for keys; None stands for inputs_q.
            inputs_v: The same for values; None stands for inputs_k.
            mask: An array that broadcasts against [batch..., heads, queries, tokens]; its zeros hide a token. In decode
                mode the tokens are the slots of the cache.
            deterministic: Static. Whether dropout is off; None takes the layer's attribute.
            rngs: Not used, because the weights are not dropped.
            sow_weights: Static. False, because the weights are integers.
            decode: Static. Whether to use the cache; None takes the layer's attribute.
            is_causal: Static. Whether a query attends to no later token. In decode mode it always does not.

        Returns:
            A float array [batch..., queries, features].
        """
        del rngs
        checks.require(inputs_k is not None or inputs_v is None, _NAME, "inputs_k", "an array, as inputs_v", None)
        _attention.check_options(_NAME, {"sow_weights": (sow_weights, False)})
        deterministic = self.deterministic if deterministic is None else deterministic
        _attention.check_no_dropout(_NAME, self.dropout_rate, deterministic)
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        query, key, value = self.query(inputs_q), self.key(inputs_k), self.value(inputs_v)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        decode = self.decode if decode is None else decode
        expected = "True or False, at construction or at the call"
        checks.require(decode is not None, _NAME, "decode", expected, None)
        if decode:
            checks.require(self.kv_cache is not None, _NAME, "decode", "a cache: call init_cache first", "none")
            cache = self.kv_cache.get_value()
            y, cache = _attention.attend_to_cache(self.options, cache, query, key, value, mask)
            self.kv_cache.set_value(cache)
        else:
            y = _attention.attend_to_tokens(self.options, query, key, value, mask, is_causal)
        return self.out(y)

    def init_cache(  # type: ignore[override]
        self, input_shape: tuple[int, ...], dtype: DTypeLike | None = None, *, window: int | None = None
    ) -> None:
        """Make an empty cache.

        Args:
            input_shape: Static. (batch..., length, features), with the number of tokens that the cache holds.
            dtype: Not used: the codes have the dtypes of key_spec and value_spec.
            window: Static. The number of tokens that a query attends to in decode mode, itself included. The cache is
                then a ring, as in `jq.KVCache.create`. None keeps all tokens.
        """
        del dtype
        shape = (*input_shape[:-1], self.num_kv_heads, self.head_dim)
        self.kv_cache = nnx.Cache(_attention.make_cache(self.options, shape, window))

    def set_view(
        self, deterministic: bool | None = None, decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None, max_length: int | None = None, window: int | None = None,
    ) -> None:  # fmt: skip
        """Set the modes of the layer, for `nnx.view`.

        Args:
            deterministic: Whether dropout is off; None leaves it.
            decode: Whether to use the cache; None leaves it.
            batch_size: The batch dimensions of a new cache, an int or a tuple.
            max_length: The number of tokens that a new cache holds.
            window: The number of tokens that a query attends to with a new cache, which is then a ring; None for all.
        """
        self.deterministic = self.deterministic if deterministic is None else deterministic
        self.decode = self.decode if decode is None else decode
        if batch_size is not None and max_length is not None:
            batch = batch_size if isinstance(batch_size, tuple) else (batch_size,)
            self.init_cache((*batch, max_length, self.in_features), window=window)
