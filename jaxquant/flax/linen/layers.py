"""Flax Linen's layers with quantized weights and activations: same names, same arguments, same parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from flax.linen import dtypes

from ..._arrays import parts
from ..._arrays.quantized_array import QuantizedArray
from ..._arrays.spec import QuantSpec
from ..._core import checks
from ..._training.backward_choices import Backward, FloatBackward
from ..._training.range_sources import Dynamic, RangeSource
from .. import _operations
from .._quantization import Quantization, check_layer
from .contraction import (
    ConvGeneralDilated,
    DotGeneral,
    EinsumProduct,
    LinenContraction,
    LinenHook,
    Table,
    promote_dtype,
)

_NAME = "flax.linen"


# This base class comes before flax's layer: dataclass fields are collected from the last base class to the first, so
# flax's own attributes keep their positions.
class _LinenLayer(nn.Module):
    """The attributes that all quantized layers add to flax's, and their checks. A base class in front of flax's layer.

    Attributes:
        weight_spec: how to quantize the kernel. Required; it has a default because flax's attributes have defaults.
        activation_spec: how to quantize the inputs, or None.
        weight_range: the source of the kernel's range.
        activation_range: the source of the inputs' range.
        backward: how to contract gradients.
        promote_dtype: flax's attribute, with another default.
    """

    weight_spec: QuantSpec | None = None
    activation_spec: QuantSpec | None = None
    weight_range: RangeSource = Dynamic()
    activation_range: RangeSource = Dynamic()
    backward: Backward = FloatBackward()
    promote_dtype: Any = promote_dtype
    # The attribute through which flax's layer contracts, and the module for it; None if the layer calls its own module.
    _field: ClassVar[str | None] = None
    _contraction: ClassVar[type[LinenContraction] | None] = None
    # Read by the record of the layer's contraction.
    permits_stored_order: ClassVar[bool] = True

    @nn.nowrap
    def param(self, name: str, init_fn: Callable[..., Any], *init_args: Any, **options: Any) -> Any:
        """Return a parameter as flax does; the codes of a converted kernel may have a stored order."""
        is_stored = self.scope is not None and self.has_variable("params", name)
        value = meta.unbox(self.get_variable("params", name)) if is_stored else None
        order = value.stored_order if isinstance(value, QuantizedArray) else None
        if order is None:
            return super().param(name, init_fn, *init_args, **options)

        # flax compares the shape of the first array of a parameter, here the stored codes, with its initial value.
        def init_stored(*arguments: Any, **keywords: Any) -> Any:
            return parts.store_codes(meta.unbox(init_fn(*arguments, **keywords)), order)

        return super().param(name, init_stored, *init_args, **options)

    def __post_init__(self) -> None:
        """Check the arguments, and set the factory with which flax's layer makes its contraction."""
        field, given = self._field, {}
        if field is not None and self._contraction is not None:
            given = {name: getattr(self, name) for name in (field, field.removesuffix("_cls"))}
            # Set before flax freezes the module, and checked below, once the module knows its path.
            setattr(self, field, LinenHook(self._contraction, _read_quantization(self)))
        super().__post_init__()
        with checks.prefix_errors(_describe_path(self)):
            expected = "None, because converted weights take no mask"
            checks.require(getattr(self, "mask", None) is None, _NAME, "mask", expected, "an array")
            check_layer(_NAME, _read_quantization(self))
            for name, value in given.items():
                # A clone of a layer gets the factory of the original, which is not an error.
                is_copied = name == field and isinstance(value, LinenHook)
                expected = "None, because this layer has its own contraction"
                checks.require(value is None or is_copied, _NAME, name, expected, checks.describe_value(value))


def _read_quantization(layer: _LinenLayer) -> Quantization:
    """Return the arguments of a layer that say how to quantize it."""
    weight_spec: Any = layer.weight_spec  # None, the default, is an error of `check_layer`
    sources = (layer.weight_range, layer.activation_range)
    return Quantization(weight_spec, layer.activation_spec, *sources, layer.backward)


def _describe_path(layer: nn.Module) -> str:
    """Return the path of a layer, for errors. A layer that is made in `setup` has no name yet."""
    if layer.scope is not None:
        return "/".join(layer.path) or type(layer).__name__
    parent = layer.parent
    outer = parent.path if isinstance(parent, nn.Module) and parent.scope is not None else ()
    return "/".join((*outer, layer.name or type(layer).__name__))


class Dense(_LinenLayer, nn.Dense):
    """`flax.linen.Dense` with a quantized kernel and quantized inputs.

    y = dot_general(quantize(x), quantize(kernel)) + bias

    A float kernel is trained: each call quantizes it, and gradients pass through the rounding. A kernel that
    `jq.flax.convert` made is served: the call contracts its integer codes. Both return the same numbers. The layer has
    all attributes of flax's layer, and its parameters have the same names and shapes.

    Attributes:
        weight_spec: How to quantize the kernel, a QuantSpec. Required. `QuantSpec(jnp.int8, PerFeature())` has one
            scale for each output feature, whatever the shape of the kernel.
        activation_spec: How to quantize the inputs, a QuantSpec; None (the default) leaves them in floats. The default
            granularity, `PerTensor()`, has one scale. `PerToken()` has one scale for each token, at any rank, and
            needs a dynamic range.
        weight_range: `jq.Dynamic()` (the default) finds the range in the kernel at each call; `jq.Learned()` trains it.
        activation_range: `jq.Dynamic()` (the default) finds the range in the inputs at each call. For a static range,
            `jq.Static(jq.calibration.minmax)`, `jq.flax.calibrate` finds it. `jq.Learned()` trains it. The granularity
            of static and learned ranges must be `PerTensor()` or `PerFeature()`, because other granularities depend on
            the batch size.
        backward: `jq.FloatBackward()` (the default) contracts gradients in floats. `jq.Int8Backward()` contracts them
            in integers, and with `stochastic_rounding=True` rounds them with keys from the rng "rounding".

    Raises:
        TypeError: At construction: weight_spec is not a QuantSpec, another argument has a wrong type, or a spec has a
            dtype that cannot be contracted in integers. At a call: the kernel was rounded to another dtype before it
            was quantized, or its codes do not have the dtype of weight_spec.
        ValueError: At construction: a spec is not supported with the source of its range, or `dot_general` is set. At a
            call, with the path of the layer in front: the layer's range has seen no data, its variables are missing or
            were made or converted with other specs, or a spec has several scales along a dimension that the contraction
            sums over.

    Note:
        Under `jax.jit` no error can depend on a value. There a layer returns NaN if its static range was never found.
        Call `jq.flax.check_calibrated(variables)` once, outside of `jit`, to find such layers. This holds for all
        layers here.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant.flax import linen as qnn
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int8, jq.PerFeature()), "activation_spec": jq.QuantSpec(jnp.uint8)}
        >>> layer = qnn.Dense(2, **specs, activation_range=jq.Static(jq.calibration.minmax))
        >>> x = jnp.array([[-1.0, 0.0, 1.55]])
        >>> variables = jq.flax.calibrate(layer, layer.init(jax.random.key(0), x), [x])
        >>> serving = jq.flax.convert(layer, variables)
        >>> serving["params"]["kernel"]
        QuantizedArray(int8[3,2], scale=float32[1,2], zero_point=None, stored_order=(-1, -2), dtype=float32, nbytes=14)
        >>> bool((layer.apply(serving, x) == layer.apply(variables, x)).all())
        True
    """

    _field = "dot_general_cls"
    _contraction = DotGeneral


class DenseGeneral(_LinenLayer, nn.DenseGeneral):
    """`flax.linen.DenseGeneral`, a Dense layer over several axes, with a quantized kernel and quantized inputs.

    y = dot_general(quantize(x), quantize(kernel)) + bias

    The layer adds the attributes of `Dense`, and raises its errors. The kernel has the batch dimensions, the contracted
    dimensions and the features, in this order. `PerFeature()` has one scale for each index of all axes that are not
    contracted, and so has `PerToken()` in the activations.
    """

    _field = "dot_general_cls"
    _contraction = DotGeneral


class Conv(_LinenLayer, nn.Conv):
    """`flax.linen.Conv` with a quantized kernel and quantized inputs.

    y = conv_general_dilated(quantize(x), quantize(kernel)) + bias

    The layer adds the attributes of `Dense`, and raises its errors. Grouped and depthwise convolutions, every padding
    and every dilation are supported. The output features are the last axis of the kernel.

    Raises:
        ValueError: At construction: `mask` is set. Multiply the kernel by the mask once instead.
    """

    _field = "conv_general_dilated_cls"
    _contraction = ConvGeneralDilated


class Einsum(_LinenLayer, nn.Einsum):
    """`flax.linen.Einsum` with a quantized kernel and quantized inputs.

    y = einsum(einsum_str, quantize(x), quantize(kernel)) + bias

    The layer adds the attributes of `Dense`, and raises its errors.

    Raises:
        ValueError: At a call: einsum_str does not have two operands and an explicit "->".
    """

    # flax's Einsum has no attribute for its contraction, so this method repeats its steps.
    @nn.compact
    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> Any:
        """Return the contraction of the inputs with the kernel, plus the bias.

        Args:
            inputs: The first operand, an array of floats.
            einsum_str: Static. The equation, if the layer was constructed without one.

        Returns:
            A float array with the axes that the equation names.
        """
        equation: Any = nn.merge_param("einsum_str", self.einsum_str, einsum_str)
        equation = equation.replace(" ", "")
        is_explicit = "->" in equation and equation.count(",") == 1
        with checks.prefix_errors(_describe_path(self)):
            checks.require(is_explicit, _NAME, "einsum_str", 'two operands and an explicit "->"', repr(equation))
        kernel: Any = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias, broadcast_shape = None, None
        if self.use_bias:
            # flax reads only the shape of the kernel here, and a converted kernel is not an array.
            stand_in = jnp.broadcast_to(jnp.zeros(()), kernel.shape)
            bias_shape, broadcast_shape = self._get_bias_shape(equation, inputs, stand_in)
            bias = self.param("bias", self.bias_init, bias_shape, self.param_dtype)
        inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        bias = None if bias is None else jnp.reshape(bias, broadcast_shape)
        product = EinsumProduct(_read_quantization(self))
        y = product(equation, inputs, kernel, self.precision, self.preferred_element_type)
        return y if bias is None else y + bias


class Embed(_LinenLayer, nn.Embed):
    """`flax.linen.Embed` with a quantized table.

    y = take(quantize(embedding), indices)

    The layer adds the attributes of `Dense`, and raises its errors. A lookup in a converted table reads its codes.
    `attend` contracts queries with the table; `activation_spec` says how to quantize the queries, and their range is
    the only activation range of the layer.

    Raises:
        TypeError: At a call: the indices are not integers.
        ValueError: At construction: `promote_dtype` is set.
    """

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        expected = "jq.flax.promote_dtype, because a table is quantized in the dtype in which it is stored"
        with checks.prefix_errors(_describe_path(self)):
            is_default = self.promote_dtype is promote_dtype
            checks.require(is_default, _NAME, "promote_dtype", expected, "another function")

    def setup(self) -> None:
        """Make the table and the module that reads it."""
        super().setup()
        self.table = Table(_read_quantization(self), kernel_name="embedding")

    def __call__(self, inputs: jax.Array) -> Any:
        """Return rows of the table.

        Args:
            inputs: The indices, an integer array of any shape.

        Returns:
            The rows in the layer's dtype, of the shape of the indices followed by the features. An index beyond the
            table returns NaN.
        """
        is_integer = jnp.issubdtype(inputs.dtype, jnp.integer)
        with checks.prefix_errors(_describe_path(self)):
            checks.require_type(is_integer, _NAME, "inputs", "an integer dtype", inputs.dtype)
        # As in flax, a table of one row returns it for every index.
        if self.num_embeddings == 1:
            inputs = jnp.zeros_like(inputs)
        rows: Any = self.table(_operations.LOOKUP, self.embedding, inputs)
        return rows.astype(self.dtype or rows.dtype)

    def attend(self, query: jax.Array) -> jax.Array:
        """Return the products of queries with every row of the table.

        Args:
            query: A float array [..., features], with the features of the table.

        Returns:
            A float array; its last axis has one entry for each row.
        """
        # A scalar represents the table, which may be a QuantizedArray.
        dtype = dtypes.canonicalize_dtype(query, jnp.zeros((), self.embedding.dtype), dtype=self.dtype)
        return self.table(_operations.ATTEND, query.astype(dtype), self.embedding)
