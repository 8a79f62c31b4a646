"""From a trained NNX model to one that serves, and what is done to a model before it is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..._arrays.quantized_array import QuantizedArray
from ..._core import checks
from ..._core.granularity import PerFeature
from .. import _fold_batch_norm, _layer_operand
from .._layer_operand import Site
from ..ranges import Dynamic, Learned, Observed
from .contraction import ROWS, Codes, Contraction, Partitioned, Ranges, Scale, Table, find_partitioning, promote_dtype

_CONVERT, _START, _FOLD = "flax.nnx.convert", "flax.nnx.start", "flax.nnx.fold_batch_norm"

Model = TypeVar("Model", bound=nnx.Module)


def start(model: nnx.Module, *inputs: Any, method: str = "__call__") -> None:
    """scale, zero_point = gradient.initial(x, spec), wherever one is learned: from the kernels and a batch.

    Call it once before training, and again after a float checkpoint is loaded: until then learned scales are NaN. The
    model is called on the inputs as it is, so that each layer sees what the quantized ones before it return; of what
    the call changes only the `Scale` variables stay.

    Args:
        model: is updated in place.
        inputs: what it is called with: a batch like those that it is trained on.
        method: Static. The name of the method that is called.

    Returns:
        None.

    Raises:
        TypeError: model is no NNX module.
        ValueError: nothing is learned in it; or, after its path, a scale that the call did not reach, or of a batch
            that is not finite.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq, jaxquant.flax
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int4), "activation_spec": jq.QuantSpec(jnp.int8)}
        >>> layer = qnnx.Linear(2, 1, **specs, activation_range=jq.flax.Learned(jq.PACT()), rngs=nnx.Rngs(0))
        >>> qnnx.start(layer, jnp.array([[-127.0, 63.5]]))  # 63.5 is half a step
        >>> layer.dot_general.activation_scale[...]
        Array([1.], dtype=float32)

    Source: the gradients' own, `jq.LSQ.initial` and its like.
    """
    require_module(_START, "model", model)
    copy = nnx.clone(model)
    learning = [(path, c) for path, c in find_contractions(copy) if any(_list_learned(c))]
    checks.require(bool(learning), _START, "model", "a layer with Learned() in it", "none")
    for path, contraction in find_contractions(copy):
        contraction.layer = find_path(path, contraction)
    for _, contraction in learning:
        contraction.is_starting = True
    getattr(copy, method)(*inputs)
    for path, contraction in learning:
        with _layer_operand.prefix_errors(find_path(path, contraction)):
            for name in _list_learned(contraction):
                expected = "a layer that the call comes by, and finite numbers"
                checks.require(
                    _layer_operand.is_finite(getattr(contraction, name)[...]), _START, name, expected, "none"
                )
    nnx.update(model, nnx.state(copy, Scale))


def convert(model: Model) -> Model:
    """serving = a copy of model with quantize(kernel, weight) in the place of each kernel, and constants for ranges.

    `serving(x)` contracts integers, with the codes that the model had while it was trained. Float kernels, calibrators
    and learned scales are gone, and the model that is given stays as it is; so does all that is not quantized, biases
    and norms for example. Layers under `nnx.vmap` and `nnx.scan` keep their leading axis, which must be 0.

    A kernel becomes a `Codes` variable with a QuantizedArray, which no filter for `nnx.Param` finds: what is left
    there can still be trained. Of a partitioned kernel the codes and the scale have a variable each, partitioned as it
    was.

    Args:
        model: a module with layers of this package in it, or one of them.

    Returns:
        A module of the same class.

    Raises:
        TypeError: model is no NNX module.
        ValueError: no layer is quantized; or, after its path, what is missing in one: data, a kernel of its shape, a
            learned scale that was started.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int4, jq.PerAxis(-1)), "activation_spec": jq.QuantSpec(jnp.uint8)}
        >>> layer = qnnx.Conv(2, 4, (3, 3), **specs, rngs=nnx.Rngs(0))
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
    layers = list(_find_layers(serving))
    checks.require(bool(layers), _CONVERT, "model", "a model with quantized layers", "none")
    done: dict[Any, Any] = {}
    for layer in layers:
        with _layer_operand.prefix_errors(find_path(layer.path, layer.module)):
            # Layers that share a kernel share its codes; what is learned differs from layer to layer.
            variable, site = _check_kernel(layer), layer.contraction.sites[0]
            key = (id(variable), site if isinstance(site.source, Dynamic) else layer.path)
            if key not in done:
                done[key] = variable, _quantize_kernel(layer, variable)
            setattr(layer.module, layer.kernel, nnx.data(done[key][1]))
    for path, contraction in find_contractions(serving):
        contraction.layer = find_path(path, contraction)
        with _layer_operand.prefix_errors(contraction.layer):
            _freeze_ranges(contraction)
    return serving


def fold_batch_norm(layer: Model, norm: nnx.BatchNorm) -> Model:
    """kernel = kernel * scale / sqrt(var + epsilon), bias = (bias - mean) * scale / sqrt(var + epsilon) + its bias.

    The layer then returns what the normalisation after it returned, in inference; take that out of the model. Fold
    before ranges are observed, scales are started and training goes on: weights are quantized as they are folded.

    Args:
        layer: a `Linear`, `LinearGeneral`, `Einsum`, `Conv` or `ConvTranspose`, of flax's or of this package. One
            without a bias gets one.
        norm: the `BatchNorm` over the last axis of its outputs.

    Returns:
        A copy of the layer; both that are given stay as they are.

    Raises:
        TypeError: an argument is no module, or the layer is none of these.
        ValueError: norm is over another axis or over other features, its variances are negative, the layer is
            converted, or no axis of its kernel is the last axis of its outputs.

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
    axis = _last_output_axis(layer, kernel[...].ndim)
    expected = "that of the features, the last"
    checks.require(norm.axis in (-1, (-1,)), _FOLD, "norm.axis", expected, norm.axis)
    kept = find_feature_axes(layer, kernel[...].ndim) or (axis,)
    start = jnp.zeros([kernel[...].shape[a] for a in kept], kernel[...].dtype) if bias is None else bias[...]
    parts = {"kernel": kernel[...], "bias": start}
    learned = {name: v[...] for name in ("scale", "bias") if (v := getattr(norm, name)) is not None}
    stats = {"mean": norm.mean[...], "var": norm.var[...]}
    new = _fold_batch_norm.fold_batch_norm(parts, learned, stats, epsilon=norm.epsilon, axis=axis)
    kernel.set_value(new["kernel"])
    if bias is not None:
        bias.set_value(new["bias"])
    else:
        folded.bias = nnx.Param(new["bias"])
        folded.use_bias = True
    return folded


def _last_output_axis(layer: nnx.Module, rank: int) -> int:
    """Returns the axis of a layer's kernel that is the last axis of its outputs, counted from the back."""
    known = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose)
    expected = "a Linear, LinearGeneral, Einsum, Conv or ConvTranspose"
    checks.require_type(isinstance(layer, known), _FOLD, "layer", expected, type(layer).__name__)
    if not isinstance(layer, nnx.Einsum):
        axes = find_feature_axes(layer, rank)
        assert axes
        return axes[-1]
    operands, _, result = layer.einsum_str.replace(" ", "").partition("->")
    labels = operands.split(",")[1]
    last = labels.rfind(result[-1:]) if result[-1:].isalpha() else -1
    is_feature = last >= 0 and "..." not in labels[last:] and result[-1] not in operands.split(",")[0]
    expected = "an einsum_str whose last output axis is an axis of the kernel alone"
    checks.require(is_feature, _FOLD, "layer", expected, repr(layer.einsum_str))
    return last - len(labels)


def require_module(function: str, argument: str, value: Any) -> None:
    """Requires an NNX module."""
    expected = "a flax.nnx.Module (jaxquant.flax has it for Linen)"
    checks.require_type(isinstance(value, nnx.Module), function, argument, expected, type(value).__name__)


def find_path(path: tuple[Any, ...], module: Any) -> str:
    """Returns the path of a layer, or of the layer around a contraction, for errors."""
    inside = isinstance(module, Contraction)
    return "/".join(map(str, path[:-1] if inside else path)) or (module.layer if inside else type(module).__name__)


def find_contractions(model: nnx.Module) -> Iterator[tuple[tuple[Any, ...], Contraction]]:
    """Yields the modules that contract, each with its path."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Contraction):
            yield path, module


class _Layer(NamedTuple):
    """A module that contracts its kernel with another.

    Attributes:
        path: in the model.
        module: the layer.
        contraction: one of its attributes.
        kernel: the name of another.
    """

    path: tuple[Any, ...]
    module: nnx.Module
    contraction: Contraction
    kernel: str


def _find_layers(model: nnx.Module) -> Iterator[_Layer]:
    """Yields the quantized layers, and requires a layer around each contraction."""
    around = set()
    for path, module in nnx.iter_modules(model):
        own = [value for value in vars(module).values() if isinstance(value, Contraction)]
        for contraction in own:
            kernel = "embedding" if isinstance(contraction, Table) else "kernel"
            if hasattr(module, kernel):
                around.add(id(contraction))
                yield _Layer(path, module, contraction, kernel)
    for path, contraction in find_contractions(model):
        with _layer_operand.prefix_errors("/".join(map(str, path))):
            expected = 'a layer around it, with a "kernel"'
            checks.require(id(contraction) in around, _CONVERT, "model", expected, "none")


def _check_kernel(layer: _Layer) -> nnx.Variable:
    """Requires a float kernel, and a layer that takes a converted one."""
    variable = getattr(layer.module, layer.kernel)
    value = variable.get_value() if isinstance(variable, nnx.Variable) else variable
    expected = "a model with float kernels"
    got = "one that is already converted: call it as it is"
    checks.require(not isinstance(variable, Codes | Partitioned), _CONVERT, "model", expected, got)
    is_array = isinstance(value, jax.Array | np.ndarray)  # numpy's, where a checkpoint was read into the model
    is_float = is_array and jnp.issubdtype(value.dtype, jnp.floating)
    checks.require(is_float, _CONVERT, layer.kernel, "a float kernel", type(value).__name__)
    is_ready = isinstance(layer.contraction, Table) or getattr(layer.module, "promote_dtype", None) is promote_dtype
    expected = "promote_dtype=jaxquant.flax.nnx.promote_dtype in this layer, for flax's own takes no converted kernel"
    checks.require(is_ready, _CONVERT, "model", expected, "another")
    return variable


def _find_kernel_shape(layer: _Layer) -> tuple[int, ...] | None:
    """Returns the shape of a kernel that is not stacked, or None where nothing tells it."""
    module: Any = layer.module
    if layer.contraction.kernel_shape is not None:
        return layer.contraction.kernel_shape
    if isinstance(module, nnx.LinearGeneral):
        return (*module.batch_axis.values(), *module.in_features, *module.out_features)
    if isinstance(module, nnx.Linear):
        return (module.in_features, module.out_features)
    return tuple(module.kernel_shape) if isinstance(module, nnx.Conv | nnx.Einsum) else None


def find_feature_axes(module: Any, rank: int) -> tuple[int, ...] | None:
    """Returns the axes of a layer's kernel that are output features, counted from the back; None where unknown.

    Args:
        module: a layer of flax's or one that is derived from it.
        rank: of its kernel, without the axes of `nnx.vmap`.
    """
    if isinstance(module, nnx.Embed):
        return ROWS
    if isinstance(module, nnx.LinearGeneral):
        contracted = range(len(module.batch_axis), len(module.batch_axis) + len(module.axis))
        return _layer_operand.find_kept_axes(rank, tuple(contracted))
    if isinstance(module, nnx.Einsum):
        return _layer_operand.find_kept_in_einsum(module.einsum_str, rank) if "->" in module.einsum_str else None
    if isinstance(module, nnx.ConvTranspose):
        return (-2,) if module.transpose_kernel else (-1,)
    return (-1,) if isinstance(module, nnx.Linear | nnx.Conv) else None


def _find_weight_site(layer: _Layer, rank: int) -> Site:
    """Returns how the kernel of a layer is quantized, its output features as axes."""
    site = layer.contraction.sites[0]
    axes = find_feature_axes(layer.module, rank)
    if axes is not None:
        return _layer_operand.resolve_features(site, axes)
    expected = f"PerAxis(...): it is not known which axes of the kernel of {type(layer.module).__name__} are features"
    checks.require(site.spec.granularity != PerFeature(), _CONVERT, "weight_spec", expected, site.spec)
    return site


def _quantize_kernel(layer: _Layer, variable: nnx.Variable) -> Any:
    """Returns the codes of a kernel, as variables."""
    kernel = jnp.asarray(variable.get_value())
    shape = _find_kernel_shape(layer) or tuple(kernel.shape)
    depth = kernel.ndim - len(shape)
    expected = f"shape {shape}, with the axes of nnx.vmap before it"
    fits = depth >= 0 and tuple(kernel.shape[depth:]) == tuple(shape)
    checks.require(fits, _CONVERT, layer.kernel, expected, f"shape {tuple(kernel.shape)}")
    site = _find_weight_site(layer, len(shape))
    parts = _read_learned(layer.contraction, site)

    def quantized(kernel: jax.Array, parts: tuple[jax.Array, ...]) -> QuantizedArray:
        return _layer_operand.quantize_operand(
            site, kernel, _layer_operand.read_learned(site, parts) if parts else None
        )

    q = _map_stacked(quantized, depth)(kernel, parts)
    _layer_operand.check_shippable(_CONVERT, site, q.scale)
    metadata = variable.get_metadata()
    if not find_partitioning(variable, kernel.shape, depth):
        return Codes.from_metadata(q, metadata)
    return Partitioned(
        q, lambda part: Codes.from_metadata(part, {**metadata, **find_partitioning(variable, part.shape, depth)})
    )  # fmt: skip


def _freeze_ranges(contraction: Contraction) -> None:
    """Replaces what ranges are found by with what they were found to be."""
    site = contraction.sites[1]
    if site is not None and not isinstance(site.source, Dynamic):
        scale, point = _find_constants(contraction, site)
        _layer_operand.check_shippable(_CONVERT, site, scale)
        contraction.activation_scale = Ranges(scale)
        contraction.activation_zero_point = nnx.data(None if point is None else Ranges(point))
    contraction.converted_specs = Ranges(contraction.describe_specs())
    for name in ("activation_range", "activation_batches", "weight_scale", "weight_zero_point", "rngs"):
        setattr(contraction, name, nnx.data(None))


def _find_constants(contraction: Contraction, site: Site) -> tuple[jax.Array, jax.Array | None]:
    if isinstance(site.source, Observed):
        batches = contraction.activation_batches[...]
        holds = checks.is_traced(batches) or bool((np.asarray(batches) > 0).all())
        expected = "a range: jaxquant.flax.nnx.calibrate(model, batches) finds it, or calls after model.train()"
        checks.require(holds, _CONVERT, site.of, expected, "no data")
        state = {"state": contraction.activation_range.get_value(), "batches": batches}
        return _map_stacked(lambda state: _layer_operand.finalize_state(site, state, (1,)), batches.ndim)(state)
    parts = _read_learned(contraction, site)
    scale, point = _map_stacked(lambda *parts: _layer_operand.read_learned(site, parts), parts[0].ndim - 1)(*parts)
    return scale, _layer_operand.find_code(
        site, point
    ) if point is not None and point.dtype != site.spec.carrier else point


def _read_learned(contraction: Contraction, site: Site) -> tuple[jax.Array, ...]:
    if not isinstance(site.source, Learned):
        return ()
    parts = tuple(getattr(contraction, name)[...] for name in _layer_operand.list_names(site))
    for name, part in zip(_layer_operand.list_names(site), parts, strict=True):
        checks.require(
            _layer_operand.is_finite(part), _CONVERT, name, f"finite numbers: jaxquant.{_START} starts it", "NaN"
        )
    return parts


def _list_learned(contraction: Contraction) -> list[str]:
    sites = [site for site in contraction.sites if site is not None and isinstance(site.source, Learned)]
    names = [name for site in sites for name in _layer_operand.list_names(site)]
    return [name for name in names if getattr(contraction, name) is not None]  # a converted one has none


def _map_stacked(function: Any, depth: int) -> Any:
    for _ in range(depth):
        function = jax.vmap(function)
    return function
