"""Conversion of a trained NNX model to one that serves in integers.

Before it come the start of learned scales, and the folding of a batch normalization into the layer before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import PathParts

from ..._arrays.parts import StoredOrder
from ..._core import checks
from ..._core.granularity import PerFeature
from ..._training.range_sources import Dynamic, Learned, Static
from .. import _conversion, _operand_ranges, _operations
from .._quantization import LayerOperand
from ..linen import fold_batch_norm as linen_folding
from .contraction import (
    Codes,
    NnxContraction,
    NnxTable,
    PartitionedCodes,
    Ranges,
    Scale,
    match_partitioning,
    promote_dtype,
)

_CONVERT, _START = "flax.nnx.convert", "flax.nnx.start"
_FOLD = "flax.nnx.fold_batch_norm"

Model = TypeVar("Model", bound=nnx.Module)


def start(model: nnx.Module, *inputs: Any, method: str = "__call__") -> None:
    """Set the learned scales and zero points of an NNX model from its kernels and a batch, in place.

    scale, zero_point = gradient.initial(x, spec), for each operand with `Learned()`

    Call it once before training, and again after a float checkpoint is loaded: learned scales are NaN until then. The
    model is called on the inputs in its own mode, so each layer sees what the quantized layers before it return. That
    call changes only the `Scale` variables.

    Args:
        model: An NNX module with quantized layers, updated in place.
        inputs: The arguments of the call: a batch as in training.
        method: Static. The name of the method to call.

    Returns:
        None.

    Raises:
        TypeError: model is not an NNX module.
        ValueError: the model has no layer with `Learned()`. Or, with the path of the layer in front: the call does not
            reach the layer, or its inputs are not finite.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int4), "activation_spec": jq.QuantSpec(jnp.int8)}
        >>> layer = qnnx.Linear(2, 1, **specs, activation_range=jq.Learned(jq.PACT()), rngs=nnx.Rngs(0))
        >>> qnnx.start(layer, jnp.array([[-127.0, 63.5]]))  # 63.5 is half a step
        >>> layer.dot_general.activation_scale[...]
        Array([1.], dtype=float32)

    Source: the papers of the gradients, which `jq.LSQ`, `jq.LSQPlus` and `jq.PACT` name.
    """
    require_module(_START, "model", model)
    # Call a copy, because the call may also update ranges, batch statistics and random streams.
    copy = nnx.clone(model)
    learning = []
    for path, contraction in walk_contractions(copy):
        contraction.layer = describe_path(path, contraction)
        if _list_learned(contraction):
            contraction.is_starting = True
            learning.append((path, contraction))
    checks.require(bool(learning), _START, "model", "a model with a Learned() range", "none")
    getattr(copy, method)(*inputs)
    for path, contraction in learning:
        with checks.prefix_errors(describe_path(path, contraction)):
            for name in _list_learned(contraction):
                is_started = _operand_ranges.is_finite(getattr(contraction, name)[...])
                expected = "the call to reach this layer with finite inputs"
                checks.require(is_started, _START, name, expected, "NaN")
    nnx.update(model, nnx.state(copy, Scale))


def convert(model: Model) -> Model:
    """Return a copy of a trained NNX model that contracts integers.

    serving.kernel = quantize(kernel, weight_spec), for the kernel of each quantized layer

    `serving(x)` uses the same codes as the model in training, so it returns the same numbers. Float kernels become
    QuantizedArrays; calibrators and learned scales become constants. Everything that is not quantized, such as biases
    and norms, is unchanged, and so is the model that is passed. Layers under `nnx.vmap` and `nnx.scan` keep their
    leading axis, which must be axis 0.

    A kernel becomes a `Codes` variable with a QuantizedArray. A filter for `nnx.Param` does not find it, so the
    remaining `nnx.Param` variables can still be trained. The codes and the scale of a partitioned kernel are in a
    variable each, partitioned like the kernel.

    If both operands are quantized, the codes of dense layers and of `Einsum` are stored with the contracted axes last,
    which is faster on a CPU for few rows; their `shape` does not change. See `QuantizedArray.stored_order`.

    Args:
        model: An NNX module that contains layers of this package, or is such a layer.

    Returns:
        A module of the same class.

    Raises:
        TypeError: model is not an NNX module.
        ValueError: no layer is quantized. Or, with the path of the layer in front: a range that has seen no data, a
            kernel that is converted already or has an unexpected shape, a learned scale that `start` did not initialize
            or that training drove to 0, or a layer that does not accept a converted kernel.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int4, jq.PerAxis(-1)), "activation_spec": jq.QuantSpec(jnp.uint8)}
        >>> static = jq.Static(jq.calibration.minmax)
        >>> layer = qnnx.Conv(2, 4, (3, 3), **specs, activation_range=static, rngs=nnx.Rngs(0))
        >>> y = layer(jnp.linspace(-1.0, 1.55, 98).reshape(1, 7, 7, 2))
        >>> serving = qnnx.convert(layer)
        >>> serving.kernel.get_value().codes.dtype, serving.bias.dtype
        (dtype(int4), dtype('float32'))
        >>> constants = serving.conv_general_dilated
        >>> constants.activation_scale[...], constants.activation_zero_point[...]
        (Array([0.01], dtype=float32), Array([100], dtype=uint8))

    Source: Jacob et al., arXiv 1712.05877, section 2.
    """
    require_module(_CONVERT, "model", model)
    serving = nnx.clone(model)
    layers = list(_walk_layers(serving))
    has_range = any(True for _ in walk_contractions(serving))
    checks.require(has_range, _CONVERT, "model", "a model with quantized layers", "none")
    # The float variable is kept next to its codes, so that Python does not reuse its id for another variable.
    converted: dict[Any, Any] = {}
    for layer in layers:
        with checks.prefix_errors(describe_path(layer.path, layer.module)):
            # Layers that share a kernel share its codes; learned scales differ from layer to layer.
            variable, weight = _check_kernel(layer), layer.contraction.operands[0]
            # Variables compare by value, so a shared one is recognized by its id.
            key = (id(variable), weight if isinstance(weight.source, Dynamic) else layer.path)
            if key not in converted:
                converted[key] = variable, _quantize_kernel(layer, variable)
            setattr(layer.module, layer.kernel, nnx.data(converted[key][1]))
    for path, contraction in walk_contractions(serving):
        contraction.layer = describe_path(path, contraction)
        with checks.prefix_errors(contraction.layer):
            _freeze_ranges(contraction)
    return serving


def require_module(function: str, argument: str, value: object) -> None:
    """Raise ContractTypeError unless a value is an NNX module."""
    expected = "a flax.nnx.Module (jaxquant.flax has this function for Linen)"
    checks.require_type(isinstance(value, nnx.Module), function, argument, expected, type(value).__name__)


def describe_path(path: PathParts, module: nnx.Module) -> str:
    """Return the path of a layer, or of the layer around a contraction, for errors."""
    is_inside = isinstance(module, NnxContraction)
    name = module.layer if is_inside else type(module).__name__
    return "/".join(map(str, path[:-1] if is_inside else path)) or name


def walk_contractions(model: nnx.Module) -> Iterator[tuple[tuple[Any, ...], NnxContraction]]:
    """Yield the modules that contract, each with its path."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, NnxContraction):
            yield path, module


class _KernelLayer(NamedTuple):
    """A module that contracts its inputs with its kernel.

    Attributes:
        path: the path of the module in the model.
        module: the module.
        contraction: the attribute of the module that contracts.
        kernel: the name of the attribute that holds the kernel.
    """

    path: tuple[Any, ...]
    module: nnx.Module
    contraction: NnxContraction
    kernel: str


def _walk_layers(model: nnx.Module) -> Iterator[_KernelLayer]:
    """Yield the quantized layers, and check that each contraction is in a layer."""
    identities = set()
    for path, module in nnx.iter_modules(model):
        for contraction in [value for value in vars(module).values() if isinstance(value, NnxContraction)]:
            kernel = "embedding" if isinstance(contraction, NnxTable) else "kernel"
            if hasattr(module, kernel):
                # A hook is an attribute of the layer that it contracts for.
                identities.add(id(contraction))
                yield _KernelLayer(path, module, contraction, kernel)
    for path, contraction in walk_contractions(model):
        with checks.prefix_errors("/".join(map(str, path))):
            expected = 'a layer with a "kernel" around this module'
            checks.require(id(contraction) in identities, _CONVERT, "model", expected, "none")


def _check_kernel(layer: _KernelLayer) -> nnx.Variable:
    """Return the variable of a float kernel, and check that the layer takes a converted one."""
    variable = getattr(layer.module, layer.kernel)
    value = variable.get_value() if isinstance(variable, nnx.Variable) else variable
    got = "one that is already converted: call it as it is"
    is_converted = isinstance(variable, Codes | PartitionedCodes)
    checks.require(not is_converted, _CONVERT, "model", "a model with float kernels", got)
    # A checkpoint may have put a numpy array into the model.
    is_array = isinstance(value, jax.Array | np.ndarray)
    is_float = is_array and jnp.issubdtype(value.dtype, jnp.floating)
    checks.require(is_float, _CONVERT, layer.kernel, "a float kernel", type(value).__name__)
    # An Embed reads its table itself and promotes nothing.
    is_ready = isinstance(layer.contraction, NnxTable) or getattr(layer.module, "promote_dtype", None) is promote_dtype
    expected = "promote_dtype=jaxquant.flax.nnx.promote_dtype in this layer, because flax's own takes no converted "
    checks.require(is_ready, _CONVERT, "model", f"{expected}kernel", "another function")
    return variable


def _read_kernel_shape(layer: _KernelLayer) -> tuple[int, ...] | None:
    """Return the shape of a kernel without the axes that stack layers, or None if it is unknown."""
    module: Any = layer.module
    # The shape of the kernel itself is used last, because it may include axes that stack layers.
    if layer.contraction.kernel_shape is not None:
        return layer.contraction.kernel_shape
    if isinstance(module, nnx.LinearGeneral):
        return (*module.batch_axis.values(), *module.in_features, *module.out_features)
    if isinstance(module, nnx.Linear):
        return (module.in_features, module.out_features)
    return tuple(module.kernel_shape) if isinstance(module, nnx.Conv | nnx.Einsum) else None


def read_feature_axes(module: nnx.Module, rank: int) -> tuple[int, ...] | None:
    """Return the axes of a layer's kernel that are output features, counted from the back; None if unknown.

    Args:
        module: a layer of flax or a subclass of one.
        rank: the rank of its kernel, without the axes of `nnx.vmap`.
    """
    if isinstance(module, nnx.Embed):
        return _operations.TABLE_FEATURES
    if isinstance(module, nnx.LinearGeneral):
        # The kernel has the batch axes first, then those that are contracted.
        contracted = range(len(module.batch_axis), len(module.batch_axis) + len(module.axis))
        return _operations.list_kept_axes(rank, tuple(contracted))
    if isinstance(module, nnx.Einsum):
        return _operations.match_kept_axes(module.einsum_str, rank) if "->" in module.einsum_str else None
    if isinstance(module, nnx.ConvTranspose):
        return (-2,) if module.transpose_kernel else (-1,)
    return (-1,) if isinstance(module, nnx.Linear | nnx.Conv) else None


def _read_stored_axes(module: nnx.Module, rank: int) -> tuple[int, ...]:
    """Return the axes of a layer's kernel, counted from the back, that the converted codes hold last in memory.

    The layer contracts these axes, in the order of the axes of its input.
    """
    if isinstance(module, nnx.LinearGeneral):
        # The kernel has the batch axes first, then those that are contracted; flax sorts both.
        first = len(module.batch_axis) - rank
        return tuple(range(first, first + len(module.axis)))
    if isinstance(module, nnx.Einsum):
        return _operations.match_summed_axes(module.einsum_str, rank) if "->" in module.einsum_str else ()
    return (-2,) if isinstance(module, nnx.Linear) else ()


def _resolve_weight(layer: _KernelLayer, rank: int) -> LayerOperand:
    """Return how a layer's kernel is quantized, with `PerFeature()` replaced by axes."""
    weight = layer.contraction.operands[0]
    axes = read_feature_axes(layer.module, rank)
    if axes is not None:
        return _operations.resolve_features(weight, axes)
    expected = f"PerAxis(...), because the feature axes of the kernel of {type(layer.module).__name__} are unknown"
    checks.require(weight.spec.granularity != PerFeature(), _CONVERT, weight.argument, expected, weight.spec)
    return weight


def _quantize_kernel(layer: _KernelLayer, variable: nnx.Variable) -> Any:
    """Return a converted kernel as a variable, or as one variable for each array if it is partitioned."""
    kernel = jnp.asarray(variable.get_value())
    shape = tuple(_read_kernel_shape(layer) or kernel.shape)
    depth = _conversion.count_leading_axes(_CONVERT, layer.kernel, kernel, shape, "nnx.vmap")
    weight = _resolve_weight(layer, len(shape))
    # As in `run_operation`: a float contraction keeps the layout that it has in training.
    is_integer = layer.contraction.operands[1] is not None
    stored_axes = _read_stored_axes(layer.module, len(shape)) if is_integer else ()
    parts = _read_learned(layer.contraction, weight)
    q = _conversion.quantize_kernel(_CONVERT, weight, kernel, parts, depth, stored_axes)
    # Metadata, such as the sharding, stays with the converted kernel.
    metadata = variable.get_metadata()
    if not match_partitioning(variable, kernel.shape, depth):
        return Codes.from_metadata(q, metadata)

    def box_part(part: jax.Array, order: StoredOrder) -> nnx.Variable:
        return Codes.from_metadata(part, {**metadata, **match_partitioning(variable, part.shape, depth, order)})

    return PartitionedCodes(q, box_part)


def _freeze_ranges(contraction: NnxContraction) -> None:
    """Replace the variables that find ranges by the constants that they found."""
    for operand in contraction.list_operands():
        if operand.role != "weight" and not isinstance(operand.source, Dynamic):
            scale, zero_point = _compute_constants(contraction, operand)
            setattr(contraction, f"{operand.role}_scale", Ranges(scale))
            point = nnx.data(None if zero_point is None else Ranges(zero_point))
            setattr(contraction, f"{operand.role}_zero_point", point)
    # The layer compares this description when it serves.
    contraction.converted_specs = Ranges(contraction.describe_specs())
    for name in ("activation_range", "activation_batches", "weight_scale", "weight_zero_point", "rngs"):
        setattr(contraction, name, nnx.data(None))


def _compute_constants(contraction: NnxContraction, activation: LayerOperand) -> tuple[jax.Array, jax.Array | None]:
    """Return the scale and the zero point of the activations, from a static or learned range."""
    if not isinstance(activation.source, Static):
        parts = _read_learned(contraction, activation)
        return _conversion.compute_constants(_CONVERT, activation, parts, parts[0].ndim - 1)
    state = contraction.read_state(activation.role)
    batches = state["batches"]
    expected = "a range: call jaxquant.flax.nnx.calibrate(model, batches), or the model after model.train()"
    checks.require(_operand_ranges.has_data(batches), _CONVERT, activation.role, expected, "no data")
    return _conversion.compute_constants(_CONVERT, activation, state, batches.ndim, (1,))


def _read_learned(contraction: NnxContraction, operand: LayerOperand) -> tuple[jax.Array, ...]:
    """Return the learned scale of an operand, and its zero point if that is learned; () if nothing is."""
    if not isinstance(operand.source, Learned):
        return ()
    parts = []
    for name in _operand_ranges.list_learned_names(operand):
        part = getattr(contraction, name)[...]
        expected = "finite numbers: jaxquant.flax.nnx.start(model, batch) starts it"
        checks.require(_operand_ranges.is_finite(part), _CONVERT, name, expected, "NaN")
        parts.append(part)
    return tuple(parts)


def _list_learned(contraction: NnxContraction) -> list[str]:
    """Return the names of the variables that a layer learns. A converted layer learns none."""
    operands = [operand for operand in contraction.list_operands() if isinstance(operand.source, Learned)]
    names = [name for operand in operands for name in _operand_ranges.list_learned_names(operand)]
    return [name for name in names if getattr(contraction, name) is not None]


# Folding of a batch normalization into the layer before it.


def fold_batch_norm(layer: Model, norm: nnx.BatchNorm) -> Model:
    """Return a copy of an NNX layer that includes the batch normalization after it.

    kernel = kernel * scale / sqrt(var + epsilon)
    bias = (bias - mean) * scale / sqrt(var + epsilon) + norm's bias

    In inference, the folded layer returns what the normalization returned; remove the normalization from the model.
    Fold before ranges are found, scales are started and training continues, because the folded weights are
    quantized.

    Args:
        layer: A `Linear`, `LinearGeneral`, `Einsum`, `Conv` or `ConvTranspose`, of flax or of this package. A layer
            without a bias gets one.
        norm: The `BatchNorm` over the last axis of the layer's outputs.

    Returns:
        A copy of the layer; both arguments are unchanged.

    Raises:
        TypeError: layer or norm is not of one of these classes.
        ValueError: norm is over a different axis or a different number of features, its variances are negative, the
            layer is converted, or no axis of the kernel is the last axis of the outputs.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> layer, norm = nnx.Linear(1, 2, use_bias=False, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        >>> layer.kernel[...] = jnp.array([[1.0, 2.0]])
        >>> norm.mean[...], norm.var[...], norm.epsilon = jnp.array([0.5, 4.0]), jnp.array([0.25, 4.0]), 0.0
        >>> folded = qnnx.fold_batch_norm(layer, norm)
        >>> folded.kernel[...], folded.bias[...]
        (Array([[2., 1.]], dtype=float32), Array([-1., -2.], dtype=float32))

    Source: Jacob et al., arXiv 1712.05877, section 3.2, equation 14.
    """
    require_module(_FOLD, "layer", layer)
    checks.require_type(isinstance(norm, nnx.BatchNorm), _FOLD, "norm", "a BatchNorm", type(norm).__name__)
    folded: Any = nnx.clone(layer)
    kernel, bias = getattr(folded, "kernel", None), getattr(folded, "bias", None)
    is_float = isinstance(kernel, nnx.Variable) and isinstance(kernel[...], jax.Array)
    checks.require(is_float, _FOLD, "layer", "a layer with a float kernel", type(layer).__name__)
    assert kernel is not None
    weights = kernel[...]
    axis = _read_last_output_axis(layer, weights.ndim)
    checks.require(norm.axis in (-1, (-1,)), _FOLD, "norm.axis", "-1, the axis of the features", norm.axis)
    # A bias has all feature axes, not only the one that is normalized.
    axes = read_feature_axes(layer, weights.ndim) or (axis,)
    zeros = jnp.zeros([weights.shape[a] for a in axes], weights.dtype)
    params = {"kernel": weights, "bias": zeros if bias is None else bias[...]}
    learned = {name: v[...] for name in ("scale", "bias") if (v := getattr(norm, name)) is not None}
    stats = {"mean": norm.mean[...], "var": norm.var[...]}
    params = linen_folding.fold_batch_norm(params, learned, stats, epsilon=norm.epsilon, axis=axis)
    kernel.set_value(params["kernel"])
    if bias is not None:
        bias.set_value(params["bias"])
    else:
        folded.bias = nnx.Param(params["bias"])
        folded.use_bias = True
    return folded


def _read_last_output_axis(layer: nnx.Module, rank: int) -> int:
    """Return the axis of a layer's kernel that is the last axis of its outputs, counted from the back."""
    classes = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose)
    expected = "a Linear, LinearGeneral, Einsum, Conv or ConvTranspose"
    checks.require_type(isinstance(layer, classes), _FOLD, "layer", expected, type(layer).__name__)
    if not isinstance(layer, nnx.Einsum):
        axes = read_feature_axes(layer, rank)
        assert axes
        return axes[-1]
    operands, _, result = layer.einsum_str.replace(" ", "").partition("->")
    inputs, labels = operands.split(",")
    last = labels.rfind(result[-1:]) if result[-1:].isalpha() else -1
    # If the inputs have the label too, it is a batch axis. An ellipsis after the label would hide its position.
    is_feature = last >= 0 and "..." not in labels[last:] and result[-1] not in inputs
    expected = "an einsum_str with an axis of the kernel alone as the last output axis"
    checks.require(is_feature, _FOLD, "layer", expected, repr(layer.einsum_str))
    return last - len(labels)
