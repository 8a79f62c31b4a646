"""Flax NNX's layers with quantized weights and activations: same names, same arguments, same parameters."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from ..._arrays.spec import QuantSpec
from ..._core import checks
from ..._training.backward_choices import Backward, FloatBackward
from ..._training.range_sources import Dynamic, RangeSource
from .._quantization import Quantization
from .contraction import (
    NnxContraction,
    NnxConvGeneralDilated,
    NnxDotGeneral,
    NnxEinsum,
    NnxTable,
    OutSharding,
    promote_dtype,
)
from .convert import read_feature_axes

_NAME = "flax.nnx"
# Arguments of flax's layers that a quantized layer sets itself.
_RESERVED = ("dot_general", "dot_general_cls", "conv_general_dilated", "einsum_op", "promote_dtype")


class _NnxLayer(nnx.Module):
    """The arguments that all quantized layers add to flax's. A base class in front of flax's layer."""

    # The attribute that holds the module that contracts, its class, and the name of the weights.
    _field: ClassVar[str]
    _contraction: ClassVar[type[NnxContraction]]
    _kernel: ClassVar[str] = "kernel"

    def __init_subclass__(cls, **options: Any) -> None:
        """Give a layer the signature of flax's layer with the added arguments, for `help` and completion."""
        super().__init_subclass__(**options)
        bases = [base for base in cls.__bases__ if base in _NnxLayer.__subclasses__() or base is _NnxLayer]
        if not bases or len(cls.__bases__) < 2:  # a user's subclass has its own
            return
        flax_layer = cls.__bases__[cls.__bases__.index(bases[0]) + 1]
        hidden = ("self", "mask", *_RESERVED)
        parameters = [p for p in inspect.signature(flax_layer.__init__).parameters.values() if p.name not in hidden]
        added = inspect.signature(_NnxLayer.__init__).parameters.values()
        names = {p.name for p in parameters}
        parameters += [p for p in added if p.kind is p.KEYWORD_ONLY and p.name not in names]
        # Positional parameters come first, as Python requires, and rngs last, as in flax.
        parameters.sort(key=lambda p: (p.kind, p.kind is p.KEYWORD_ONLY and p.name == "rngs"))
        cls.__signature__ = inspect.Signature(parameters)

    def __init__(
        self, *sizes: Any, weight_spec: QuantSpec, activation_spec: QuantSpec | None = None,
        weight_range: RangeSource = Dynamic(), activation_range: RangeSource = Dynamic(),
        backward: Backward = FloatBackward(), use_running_average: bool = False, rngs: nnx.Rngs, **arguments: Any,
    ) -> None:  # fmt: skip
        _check_arguments(self, arguments)
        if self._contraction is not NnxTable:
            arguments["promote_dtype"] = promote_dtype
        super().__init__(*sizes, rngs=rngs, **arguments)  # type: ignore[call-arg]
        quantization = Quantization(weight_spec, activation_spec, weight_range, activation_range, backward)
        kernel = getattr(self, self._kernel)
        shape = tuple(kernel[...].shape)
        features = read_feature_axes(self, len(shape))
        # A layer does not know its path: errors name its class and the shape of its kernel.
        label = f"{type(self).__name__}{shape}"
        contraction = self._contraction(label, quantization, use_running_average, rngs, kernel, shape, features)
        setattr(self, self._field, nnx.data(contraction))


def _check_arguments(layer: nnx.Module, arguments: dict[str, Any]) -> None:
    """Raise ContractValueError for arguments of flax's layer that a quantized layer cannot take."""
    with checks.prefix_errors(type(layer).__name__):
        for name in _RESERVED:
            expected = "no value, because this layer sets its own"
            checks.require(name not in arguments, _NAME, name, expected, "one")
        expected = "None, because converted weights take no mask"
        checks.require(arguments.get("mask") is None, _NAME, "mask", expected, "an array")


class Linear(_NnxLayer, nnx.Linear):
    """`flax.nnx.Linear` with a quantized kernel and quantized inputs.

    y = dot_general(quantize(x), quantize(kernel)) + bias

    A float kernel is trained: each call quantizes it, and gradients pass through the rounding. A kernel that `convert`
    made is served: the call contracts its integer codes. Both return the same numbers, and so does the Linen layer with
    the same parameters. The layer takes all arguments of flax's layer, and its `nnx.Param` variables have the same
    names and shapes. Learned scales are in `Scale` variables, static ranges in `Ranges` variables.

    `calibrate(model, batches)` finds static ranges and changes nothing else. Ranges are also updated by each call while
    `use_running_average` is False, like the statistics of BatchNorm: `model.train()` and `model.eval()` set it. Learned
    scales are NaN until `start(model, batch)` sets them.

    Args:
        *sizes: The positional arguments of flax's layer: in_features and out_features. They may be named.
        weight_spec: How to quantize the kernel, a QuantSpec. `QuantSpec(jnp.int8, PerFeature())` has one scale for each
            output feature, whatever the shape of the kernel.
        activation_spec: How to quantize the inputs, a QuantSpec; None leaves them in floats. `PerToken()` has one scale
            for each token, and needs a dynamic range.
        weight_range: `jq.Dynamic()` finds the range in the kernel at each call; `jq.Learned()` trains it.
        activation_range: `jq.Dynamic()` finds the range in the inputs at each call. For a static range,
            `jq.Static(jq.calibration.minmax)`, `calibrate` finds it. `jq.Learned()` trains it. The granularity of
            static and learned ranges must be `PerTensor()`, because an NNX variable has one shape for all inputs.
        backward: `jq.FloatBackward()` contracts gradients in floats. `jq.Int8Backward()` contracts them in integers,
            and with `stochastic_rounding=True` rounds them with keys from the stream "rounding" of rngs.
        use_running_average: Whether ranges are only read, not updated.
        rngs: Random keys, as in flax's layer.
        **arguments: Other arguments of flax's layer.

    Raises:
        TypeError: At construction: an argument has a wrong type, or a spec has a dtype that cannot be contracted in
            integers. At a call: the codes of the kernel do not have the dtype of weight_spec.
        ValueError: At construction: a spec is not supported with the source of its range, or an argument is given that
            the layer sets itself, such as `dot_general`. At a call: the layer's range has seen no data, a learned scale
            was not initialized by `start`, the state was converted with other specs, or a spec has several scales along
            a dimension that the contraction sums over.

    Note:
        Under `nnx.jit` no error can depend on a value. There a layer returns NaN if its static range was never found.
        Call `check_calibrated(model)` once, outside of `jit`, to find such layers. This holds for all layers here.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int8, jq.PerFeature()), "activation_spec": jq.QuantSpec(jnp.uint8)}
        >>> layer = qnnx.Linear(3, 2, **specs, activation_range=jq.Static(jq.calibration.minmax), rngs=nnx.Rngs(0))
        >>> x = jnp.array([[-1.0, 0.0, 1.55]])
        >>> qnnx.calibrate(layer, [x])
        >>> serving = qnnx.convert(layer)
        >>> serving.kernel.get_value()
        QuantizedArray(int8[3,2], scale=float32[1,2], zero_point=None, stored_order=(-1, -2), dtype=float32, nbytes=14)
        >>> layer.eval()
        >>> bool((serving(x) == layer(x)).all())
        True
    """

    _field = "dot_general"
    _contraction = NnxDotGeneral


class LinearGeneral(_NnxLayer, nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral`, a Linear layer over several axes, with a quantized kernel and quantized inputs.

    y = dot_general(quantize(x), quantize(kernel)) + bias

    The layer adds the arguments of `Linear`, and raises its errors. The kernel has the batch dimensions, the contracted
    dimensions and the features, in this order. `PerFeature()` has one scale for each index of all axes that are not
    contracted.

    Args:
        *sizes: in_features and out_features, each an int or a sequence. They may be named.
        **arguments: As in `Linear`.
    """

    _field = "dot_general"
    _contraction = NnxDotGeneral


class Einsum(_NnxLayer, nnx.Einsum):
    """`flax.nnx.Einsum` with a quantized kernel and quantized inputs.

    y = einsum(einsum_str, quantize(x), quantize(kernel)) + bias

    The layer adds the arguments of `Linear`, and raises its errors.

    Args:
        einsum_str: The equation of two operands, the inputs and the kernel.
        kernel_shape: The shape of the kernel.
        bias_shape: The shape of the bias, or None for no bias.
        **arguments: As in `Linear`.
    """

    _field = "einsum_op"
    _contraction = NnxEinsum

    def __init__(
        self, einsum_str: str, kernel_shape: Sequence[int], bias_shape: Sequence[int] | None = None, **arguments: Any
    ) -> None:  # fmt: skip
        # Store a tuple, because NNX interprets a list attribute as a list of variables.
        shapes = (tuple(kernel_shape), None if bias_shape is None else tuple(bias_shape))
        super().__init__(einsum_str, *shapes, **arguments)


class Conv(_NnxLayer, nnx.Conv):
    """`flax.nnx.Conv` with a quantized kernel and quantized inputs.

    y = conv_general_dilated(quantize(x), quantize(kernel)) + bias

    The layer adds the arguments of `Linear`, and raises its errors. Grouped and depthwise convolutions, every padding
    and every dilation are supported. The output features are the last axis of the kernel.

    Args:
        *sizes: in_features, out_features, kernel_size and strides (1 by default). They may be named.
        **arguments: As in `Linear`.

    Raises:
        ValueError: At construction: `mask` is given. Multiply the kernel by the mask once instead.
    """

    _field = "conv_general_dilated"
    _contraction = NnxConvGeneralDilated


class Embed(_NnxLayer, nnx.Embed):
    """`flax.nnx.Embed` with a quantized table.

    y = take(quantize(embedding), indices)

    The layer adds the arguments of `Linear`, and raises its errors. A lookup in a converted table reads its codes.
    `attend` contracts queries with the table; `activation_spec` says how to quantize the queries, and their range is
    the only activation range of the layer.

    Args:
        *sizes: num_embeddings and features. They may be named.
        **arguments: As in `Linear`.

    Raises:
        TypeError: At a call: the indices are not integers.
    """

    _field = "table"
    _contraction = NnxTable
    _kernel = "embedding"
    table: NnxTable

    def __call__(self, inputs: jax.Array, out_sharding: OutSharding | None = None) -> Any:
        """Return rows of the table.

        Args:
            inputs: The indices, an integer array of any shape.
            out_sharding: Static. The sharding of the result, or None.

        Returns:
            The rows in the layer's dtype, of the shape of the indices followed by the features. An index beyond the
            table returns NaN.
        """
        is_integer = jnp.issubdtype(inputs.dtype, jnp.integer)
        with checks.prefix_errors(self.table.layer):
            checks.require_type(is_integer, _NAME, "inputs", "an integer dtype", inputs.dtype)
        # As in flax, a table of one row returns it for every index.
        if self.num_embeddings == 1:
            inputs = jnp.zeros_like(inputs)
        rows: Any = self.table(self.embedding[...], inputs, out_sharding=out_sharding)
        return rows.astype(self.dtype)

    def attend(self, query: jax.Array, out_sharding: OutSharding | None = None) -> jax.Array:
        """Return the products of queries with every row of the table.

        Args:
            query: A float array [..., features], with the features of the table.
            out_sharding: Static. The sharding of the result, or None.

        Returns:
            A float array; its last axis has one entry for each row.
        """
        table = self.embedding[...]
        dtype = dtypes.canonicalize_dtype(query, jnp.zeros((), table.dtype), dtype=self.dtype)
        return self.table.contract_rows(query.astype(dtype), table, out_sharding)
