"""Conversion of the variables of a trained Linen module to variables that serve it in integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import traverse_util
from flax.core import FrozenDict, meta, unfreeze

from ..._arrays.quantized_array import QuantizedArray, check_form
from ..._core import checks
from ..._training.range_sources import Dynamic, Static
from ...checkpoint.arrays import StaticText
from .. import _conversion, _operand_ranges, _quantization
from .._conversion import MeshAxes
from .._quantization import LayerOperand
from .contraction import RANGES, RECORD, SCALES, LayerRecord, LearnedPart, VariablePath, list_layers, list_scales

_NAME = "flax.convert"


def convert(module: nn.Module, variables: Mapping[str, object]) -> dict[str, Any]:
    """Return the variables with which a trained Linen module contracts integers.

    serving["params"][...]["kernel"] = quantize(kernel, weight_spec), for the kernel of each quantized layer

    `module.apply(serving, x)` uses the same codes as the module in training, so it returns the same numbers. Float
    kernels become QuantizedArrays, and calibrators become constants. Everything that is not quantized, such as biases
    and norms, is unchanged. Layers under `nn.scan` and `nn.vmap` keep their leading axis, which must be axis 0.
    Partitioned kernels get partitioned codes and scales.

    If both operands are quantized, the codes of dense layers and of `Einsum` are stored with the contracted axes last,
    which is faster on a CPU for few rows; their `shape` does not change. See `QuantizedArray.stored_order`.
    flax's own layers, into which `jq.flax.dot_general` was injected, keep the order, because flax compares the shapes
    of parameters.

    `convert` finds a layer by the record that the layer leaves in the collection "ranges" when it is called by `init`,
    or by an `apply` with that collection mutable. The layer is quantized as in the last such call. A layer that was
    never called in this way keeps its float kernel and quantizes it at each call.

    Args:
        module: The Linen module of the variables.
        variables: A mapping of collections that `init` and `apply` return: "params", "ranges", and "scales" if scales
            are learned.

    Returns:
        The collections except "scales", as plain dicts. "ranges" holds the constants and, for each layer, a text that
        describes the specs with which it was converted; the layer checks them when it serves.

    Raises:
        TypeError: module is not a Linen module.
        ValueError: no layer is quantized, or the variables are converted already. Or, with the path of the layer in
            front: a range that has seen no data, a kernel or a scale that is missing or does not fit, a learned scale
            that training drove to 0, or a layer that does not accept a converted kernel.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant.flax import linen as qnn
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int4, jq.PerFeature()), "activation_spec": jq.QuantSpec(jnp.uint8)}
        >>> layer = qnn.Conv(4, (3, 3), **specs, activation_range=jq.Static(jq.calibration.minmax))
        >>> x = jnp.linspace(-1.0, 1.55, 98).reshape(1, 7, 7, 2)
        >>> variables = jq.flax.calibrate(layer, layer.init(jax.random.key(0), x), [x])
        >>> serving = jq.flax.convert(layer, variables)
        >>> serving["params"]["kernel"].codes.dtype, serving["params"]["bias"].dtype
        (dtype(int4), dtype('float32'))
        >>> {name: float(v.squeeze()) for name, v in serving["ranges"]["ConvGeneralDilated_0"]["activation"].items()}
        {'scale': 0.009999999776482582, 'zero_point': 100.0}

    Source: Jacob et al., arXiv 1712.05877, section 2.
    """
    expected = "a flax.linen.Module (jaxquant.flax.nnx.convert is for NNX)"
    checks.require_type(isinstance(module, nn.Module), _NAME, "module", expected, type(module).__name__)
    collections: Any = unfreeze(variables) if isinstance(variables, dict | FrozenDict) else {}
    layers = list_layers(collections.get(RANGES))
    got = "variables that are already converted: module.apply serves them as they are"
    is_float = bool(layers) or not has_codes(collections.get("params"))
    checks.require(is_float, _NAME, "variables", "variables with float kernels", got)
    expected = f'variables of a quantized module, with "params" and the collection "{RANGES}" that init makes'
    holds = bool(layers) and "params" in collections
    checks.require(holds, _NAME, "variables", expected, sorted(collections) or "none")
    params = collections["params"]
    # Modules without parameters keep their empty entries.
    params = traverse_util.flatten_dict(params, keep_empty_nodes=True) if isinstance(params, dict) else {}
    scales = list_scales(collections.get(SCALES))
    ranges = {}
    for path, state in layers.items():
        with checks.prefix_errors("/".join(path[:-1]) or type(module).__name__):
            ranges[path] = _convert_layer(path, state, params, scales)
    serving = {name: value for name, value in collections.items() if name not in (SCALES, RANGES)}
    return {
        **serving, "params": traverse_util.unflatten_dict(params), RANGES: traverse_util.unflatten_dict(ranges)
    }  # fmt: skip


def has_codes(params: object) -> bool:
    """Return whether a tree of parameters has a QuantizedArray."""
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, QuantizedArray))
    return any(isinstance(leaf, QuantizedArray) for leaf in leaves)


def check_convertible(function: str, record: LayerRecord) -> None:
    """Raise ContractValueError unless a layer takes converted weights.

    `calibrate` calls this too, so that the error is raised before hours of work.
    """
    expected = "promote_dtype=jq.flax.promote_dtype in this layer, because flax's own takes no converted kernel"
    if record.attention is not None:
        expected = (
            f"attention made of jaxquant.flax.linen.DenseGeneral and flax.linen.dot_product_attention, because flax's "
            f"{record.attention} passes no promote_dtype to its layers, without which they take no converted kernel"
        )
    checks.require(record.is_ready, function, "module", expected, record.attention or "flax.linen's promote_dtype")


def _convert_layer(
    path: VariablePath, state: Mapping[str, Any], params: dict[VariablePath, Any],
    scales: Mapping[VariablePath, LearnedPart],
) -> dict[str, Any]:  # fmt: skip
    """Convert the kernel of one layer in `params`, and return what the collection "ranges" holds for the layer.

    Args:
        path: the path of the module that contracts; its parent has the kernel.
        state: the layer's entries of "ranges".
        params: all parameters by path, changed in place.
        scales: all learned scales by path and name.
    """
    record = state[RECORD]
    # The record is in the submodule that contracts; the kernel is in the layer around it.
    kernel_path = (*path[:-1], record.kernel)
    kernel = params.get(kernel_path)
    is_float = kernel is not None and not isinstance(kernel, QuantizedArray)
    got = "a kernel that is already converted" if kernel is not None else "none"
    checks.require(is_float, _NAME, f"params[{record.kernel!r}]", "a float kernel", got)
    params[kernel_path], depth = _quantize_kernel(record, kernel, path, scales)
    # The layer compares these descriptions when it serves, so that it never reads the codes with another spec.
    texts = {"weight_spec": record.weight, "activation_spec": record.activation}
    described = {name: StaticText(_quantization.describe_converted(operand)) for name, operand in texts.items()}
    return {**_compute_constants(record, record.activation, path, state, scales, depth), **described}


def _quantize_kernel(
    record: LayerRecord, boxed: Any, path: VariablePath, scales: Mapping[VariablePath, LearnedPart]
) -> tuple[QuantizedArray, int]:  # fmt: skip
    """Return a kernel as a QuantizedArray, partitioned like it, and the number of axes that stack layers."""
    kernel, weight, argument = meta.unbox(boxed), record.weight, f"params[{record.kernel!r}]"
    depth = _conversion.count_leading_axes(_NAME, argument, kernel, record.shape, "nn.scan and nn.vmap")
    check_convertible(_NAME, record)
    parts = () if isinstance(weight.source, Dynamic) else _read_learned(weight, path, scales)
    q = _conversion.quantize_kernel(_NAME, weight, kernel, parts, depth, record.stored_axes)
    names = getattr(boxed, "names", None)
    if not isinstance(boxed, meta.AxisMetadata) or names is None:
        return q, depth

    # A box of flax holds one array with its mesh axes, so each part of the kernel gets a box.
    def box_part(part: jax.Array, part_names: tuple[MeshAxes, ...]) -> Any:
        return meta.replace_boxed(boxed, part).replace(names=part_names)  # type: ignore[attr-defined]

    check_form(_NAME, argument, q, ("offset", "signed_scale", "block_sizes"))
    (codes, *parameters), static = q.tree_flatten()
    boxes = [None if p is None else box_part(p, _conversion.match_part_names(names, p.shape)) for p in parameters]
    codes = box_part(codes, _conversion.match_part_names(names, codes.shape, order=q.stored_order))
    return QuantizedArray.tree_unflatten(static, (codes, *boxes)), depth


def _compute_constants(
    record: LayerRecord, activation: LayerOperand | None, path: VariablePath, state: Mapping[str, Any],
    scales: Mapping[VariablePath, LearnedPart], depth: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the scale and the zero point of static activations, as an entry of "ranges"."""
    if activation is None or isinstance(activation.source, Dynamic):
        return {}
    if isinstance(activation.source, Static):
        values = state.get(activation.role)
        expected = 'a range: call apply(..., mutable=["ranges"]) with data like the data to serve'
        if record.kernel == "embedding":
            expected += ", by a method that calls attend; or set activation_spec=None if none does"
        batches = None if values is None else values["batches"]
        checks.require(_operand_ranges.has_data(batches), _NAME, activation.role, expected, "no data")
        assert values is not None
        assert batches is not None
        # The depth of the range itself: layers that share a kernel may each have a range.
        depth = batches.ndim
    else:
        values = _read_learned(activation, path, scales)
    scale, zero_point = _conversion.compute_constants(_NAME, activation, values, depth)
    if zero_point is None:
        return {activation.role: {"scale": scale}}
    return {activation.role: {"scale": scale, "zero_point": zero_point}}


def _read_learned(
    operand: LayerOperand, path: VariablePath, scales: Mapping[VariablePath, LearnedPart]
) -> tuple[jax.Array, ...]:
    """Return the learned scale of an operand, and its zero point if that is learned."""
    parts = []
    for name in _operand_ranges.list_learned_names(operand):
        expected = f'it in the collection "{SCALES}": apply(..., mutable=["{SCALES}"]) starts it'
        checks.require((*path, name) in scales, _NAME, name, expected, "none")
        parts.append(meta.unbox(scales[(*path, name)]))
    return tuple(parts)
