"""Flax Linen's layers with quantized weights and activations: same names, same arguments, same parameters."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes

from ..._arrays.quantized_array import QuantizedArray
from ..._arrays.spec import QuantSpec
from ..._contractions import dot
from ..._contractions.take import take
from ..._core import checks
from ..._training import dot_general
from ..._training.backward import Backward, FloatBackward
from .. import _layer_operand
from ..ranges import Dynamic, Observed, Source
from .contraction import Contraction, ConvGeneralDilated, DotGeneral, Injected, Product, promote_dtype

_NAME = "flax.linen"
_ROWS = (-2,)  # the output features of a table: `attend` has an output for each row


def _inject_contraction(layer: Any, field: str, module: type[Contraction]) -> None:
    """Sets the factory that flax's layer makes its contraction with."""
    specs = _check_specs(layer)
    for other in (field, field.removesuffix("_cls")):
        given = getattr(layer, other)
        free = given is None or (other == field and isinstance(given, Injected))  # that of a layer this is a clone of
        with _layer_operand.prefix_errors(_find_path(layer)):
            checks.require(free, _NAME, other, "None: this layer brings its own", checks.describe_value(given))
    object.__setattr__(layer, field, Injected(module, *specs))


def _check_specs(layer: Any) -> tuple[Any, ...]:
    """Holds the specs of a layer to their contract, and returns what a module of `_contraction` is made of."""
    specs = (layer.weight_spec, layer.activation_spec, layer.weight_range, layer.activation_range)
    with _layer_operand.prefix_errors(_find_path(layer)):
        _layer_operand.check_layer(_NAME, *specs)
    return *specs, layer.backward


def _find_path(layer: Any) -> str:
    """Returns the path of a layer, for errors; in `setup` it has no name yet."""
    if layer.scope is not None:
        return "/".join(layer.path) or type(layer).__name__
    parent = layer.parent
    outer = parent.path if isinstance(parent, nn.Module) and parent.scope is not None else ()
    return "/".join((*outer, layer.name or type(layer).__name__))


class Dense(nn.Dense):
    """y = dot_general(quantize(x), quantize(kernel)) + bias, `flax.linen.Dense` with quantized operands.

    A float kernel is quantized on the way in and trained; one that `jq.flax.convert` made is served, in integers. The
    numbers are the same. All attributes of flax's layer are there, and the parameters have its names and shapes.

    A layer whose static range was never found raises, with its path. Under `jax.jit`, where JAX can raise nothing for a
    value, it returns NaN: call `jq.flax.check_calibrated(variables)` once before. The same holds for all layers here.

    Attributes:
        weight_spec: how the kernel is quantized: `QuantSpec(jnp.int8, PerFeature())` has a scale for each output
            feature, whatever the layer's kernel looks like.
        activation_spec: how the inputs are, or None for weights only. `PerTensor()` by default; `PerToken()` with
            `Dynamic()` has a scale for each token, at any rank.
        weight_range: `Dynamic()`, from the kernel as it is; or `Learned()`.
        activation_range: `Observed()`, static, found by `jq.flax.calibrate`; `Dynamic()`; or `Learned()`. Static and
            learned ranges are `PerTensor()` or `PerFeature()`, which fit every batch.
        backward: `jq.FloatBackward()`, or `jq.Int8Backward()`, whose gradient draws from the rng "rounding" if told to.

    Raises:
        TypeError: at construction: weight_spec is no QuantSpec, or a spec or another argument is none that a layer can
            serve.
        ValueError: at construction: specs contradict their ranges. When it is called, after the path of the layer: a
            range that is missing, variables that were converted with other specs, an activation that cannot be
            contracted in integers.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant.flax import linen as qnn
        >>> weight_spec, activation_spec = jq.QuantSpec(jnp.int8, jq.PerFeature()), jq.QuantSpec(jnp.uint8)
        >>> layer = qnn.Dense(2, weight_spec=weight_spec, activation_spec=activation_spec)
        >>> x = jnp.array([[-1.0, 0.0, 1.55]])
        >>> variables = jq.flax.calibrate(layer, layer.init(jax.random.key(0), x), [x])
        >>> serving = jq.flax.convert(layer, variables)
        >>> serving["params"]["kernel"]
        QuantizedArray(int8[3,2], scale=float32[1,2], zero_point=None, dtype=float32, nbytes=14)
        >>> bool((layer.apply(serving, x) == layer.apply(variables, x)).all())
        True
    """

    weight_spec: QuantSpec | None = None
    activation_spec: QuantSpec | None = None
    weight_range: Source = Dynamic()
    activation_range: Source = Observed()
    backward: Backward = FloatBackward()
    promote_dtype: Any = promote_dtype

    def __post_init__(self) -> None:
        """Puts the contraction in."""
        super().__post_init__()
        _inject_contraction(self, "dot_general_cls", DotGeneral)


class DenseGeneral(nn.DenseGeneral):
    """y = dot_general(quantize(x), quantize(kernel)) + bias over several axes: `flax.linen.DenseGeneral`, as `Dense`.

    The kernel has the batch dimensions, the contracted ones and the features, in this order: `PerFeature()` has a
    scale for each index of all but the contracted ones.
    """

    weight_spec: QuantSpec | None = None
    activation_spec: QuantSpec | None = None
    weight_range: Source = Dynamic()
    activation_range: Source = Observed()
    backward: Backward = FloatBackward()
    promote_dtype: Any = promote_dtype

    def __post_init__(self) -> None:
        """Puts the contraction in."""
        super().__post_init__()
        _inject_contraction(self, "dot_general_cls", DotGeneral)


class Conv(nn.Conv):
    """y = conv_general_dilated(quantize(x), quantize(kernel)) + bias: `flax.linen.Conv`, as `Dense`.

    Grouped and depthwise convolutions, every padding and dilation. The kernel's features are its last axis. A `mask` is
    refused: multiply the kernel by it, once.
    """

    weight_spec: QuantSpec | None = None
    activation_spec: QuantSpec | None = None
    weight_range: Source = Dynamic()
    activation_range: Source = Observed()
    backward: Backward = FloatBackward()
    promote_dtype: Any = promote_dtype

    def __post_init__(self) -> None:
        """Puts the convolution in."""
        super().__post_init__()
        with _layer_operand.prefix_errors(_find_path(self)):
            checks.require(self.mask is None, _NAME, "mask", "None: converted weights take no mask", "an array")
        _inject_contraction(self, "conv_general_dilated_cls", ConvGeneralDilated)


class Einsum(nn.Einsum):
    """y = einsum(einsum_str, quantize(x), quantize(kernel)) + bias: `flax.linen.Einsum`, as `Dense`."""

    weight_spec: QuantSpec | None = None
    activation_spec: QuantSpec | None = None
    weight_range: Source = Dynamic()
    activation_range: Source = Observed()
    backward: Backward = FloatBackward()
    promote_dtype: Any = promote_dtype

    def __post_init__(self) -> None:
        """Holds the specs to their contract."""
        super().__post_init__()
        _check_specs(self)

    @nn.compact
    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        """Returns the contraction of the inputs with the kernel; the equation as of flax's layer."""
        equation: Any = nn.merge_param("einsum_str", self.einsum_str, einsum_str)
        equation = equation.replace(" ", "")
        explicit = "->" in equation and equation.count(",") == 1
        with _layer_operand.prefix_errors(_find_path(self)):
            checks.require(explicit, _NAME, "einsum_str", 'two operands and an explicit "->"', repr(equation))
        kernel: Any = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias, wide = None, None
        if self.use_bias:
            stand_in = jnp.broadcast_to(jnp.zeros(()), kernel.shape)
            shape, wide = self._get_bias_shape(equation, inputs, stand_in)
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        product = Product(*_check_specs(self))
        y = product(equation, inputs, kernel, self.precision, self.preferred_element_type)
        return y if bias is None else y + jnp.reshape(bias, wide)


class _Table(Contraction):
    """What an `Embed` does with its table, whose range is one for both."""

    @nn.compact
    def __call__(self, table: Any, indices: jax.Array | None, query: jax.Array | None) -> jax.Array:
        """Returns rows of the table, or the products of a query with all of them."""
        if query is not None:
            numbers = (((query.ndim - 1,), (1,)), ((), ()))
            static = {"preferred_element_type": query.dtype}

            def training(lhs: Any, rhs: Any, specs: Any, more: dict[str, Any]) -> jax.Array:
                return dot_general.quantized_dot_general(
                    lhs, rhs, numbers, lhs_spec=specs[0], rhs_spec=specs[1], **static, **more
                )

            serving = functools.partial(dot.dot_general, dimension_numbers=numbers, **static)
            return self.contracted(query, table, _ROWS, training, serving)
        assert indices is not None
        rows = indices
        with _layer_operand.prefix_errors(self.place()):
            weight, activation = self.sites()
            weight = _layer_operand.resolve_features(weight, _ROWS)
            if isinstance(table, QuantizedArray):
                self.check_converted(weight, activation, table)
                return take(table, rows, axis=0, mode="fill")
            self._record(weight, activation, table)
            quantizer = self._quantizer(weight, table)
            assert quantizer is not None
            return jnp.take(quantizer(table), rows, axis=0)


class Embed(nn.Embed):
    """y = take(quantize(embedding), indices): `flax.linen.Embed` with a quantized table, as `Dense`.

    A converted table is looked up in its codes. `attend` quantizes the query too, where `activation_spec` says how. The
    range of the query is the layer's only activation range.
    """

    weight_spec: QuantSpec | None = None
    activation_spec: QuantSpec | None = None
    weight_range: Source = Dynamic()
    activation_range: Source = Observed()
    backward: Backward = FloatBackward()
    promote_dtype: Any = promote_dtype

    def __post_init__(self) -> None:
        """Holds the specs to their contract."""
        super().__post_init__()
        _check_specs(self)
        expected = "jq.flax.promote_dtype: a table is quantized as it is stored"
        with _layer_operand.prefix_errors(_find_path(self)):
            checks.require(self.promote_dtype is promote_dtype, _NAME, "promote_dtype", expected, "another")

    def setup(self) -> None:
        """Makes the table, and what looks it up."""
        super().setup()
        self.table = _Table(*_check_specs(self), kernel_name="embedding")

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the rows at the given indices, in the layer's dtype; NaN beyond the table."""
        is_integer = jnp.issubdtype(inputs.dtype, jnp.integer)
        with _layer_operand.prefix_errors(_find_path(self)):
            checks.require_type(is_integer, _NAME, "inputs", "an integer dtype", inputs.dtype)
        if self.num_embeddings == 1:  # as flax has it: every index is the one
            inputs = jnp.zeros_like(inputs)
        rows = self.table(self.embedding, inputs, None)
        return rows.astype(self.dtype or rows.dtype)

    def attend(self, query: jax.Array) -> jax.Array:
        """Returns the products of a query with every row of the table."""
        dtype = dtypes.canonicalize_dtype(query, jnp.zeros((), self.embedding.dtype), dtype=self.dtype)
        return self.table(self.embedding, None, query.astype(dtype))
