"""From the variables of a trained Linen module to those that serve it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.core import FrozenDict, meta, unfreeze

from ..._arrays.quantized_array import QuantizedArray
from ..._arrays.static_text import StaticText
from ..._core import checks
from .. import _layer_operand
from .._layer_operand import Site
from ..ranges import Dynamic, Observed
from .contraction import RANGES, SCALES
from .record import NAME, Record

_NAME = "flax.convert"


def convert(module: nn.Module, variables: Mapping[str, Any]) -> dict[str, Any]:
    """serving = variables with quantize(kernel, weight) in the place of each float kernel, and constants for ranges.

    `module.apply(serving, x)` contracts integers, with the codes that the module had while it was trained. Float
    kernels and calibrators are gone; whatever is not quantized, biases and norms for example, stays as it is. Layers
    under `nn.scan` and `nn.vmap` keep their leading axis, which must be 0. Partitioned kernels have partitioned codes,
    and scales to match.

    A layer is found by what it leaves in "ranges" when `init` or an `apply` with that collection mutable calls it, and
    quantized as it was told to be in the last such call. One that neither has called keeps its float kernel, and goes
    on quantizing it at each call.

    Args:
        module: that the variables are of.
        variables: of `init` and `apply`: "params", "ranges", and "scales" where something is learned.

    Returns:
        The collections without "scales", as plain dicts. In "ranges" are the constants, and for each layer a text of
        the specs that it was converted with, which it is held to when it serves.

    Raises:
        TypeError: module is no Linen module.
        ValueError: no layer is quantized, or the variables are converted already; or, after its path, what is missing
            in one: data, a kernel, a scale; or a layer that takes no converted kernel.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant.flax import linen as qnn
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int4, jq.PerFeature()), "activation_spec": jq.QuantSpec(jnp.uint8)}
        >>> layer = qnn.Conv(4, (3, 3), **specs)
        >>> x = jnp.linspace(-1.0, 1.55, 98).reshape(1, 7, 7, 2)
        >>> variables = jq.flax.calibrate(layer, layer.init(jax.random.key(0), x), [x])
        >>> serving = jq.flax.convert(layer, variables)
        >>> serving["params"]["kernel"].codes.dtype, serving["params"]["bias"].dtype
        (dtype(int4), dtype('float32'))
        >>> {name: float(v.squeeze()) for name, v in serving["ranges"]["ConvGeneralDilated_0"]["activation"].items()}
        {'scale': 0.009999999776482582, 'zero_point': 100.0}

    Source: Jacob et al., arXiv 1712.05877, section 2.
    """
    is_linen = isinstance(module, nn.Module)
    expected = "a flax.linen.Module (jaxquant.flax.nnx.convert is for NNX)"
    checks.require_type(is_linen, _NAME, "module", expected, type(module).__name__)
    given: Any = unfreeze(variables) if isinstance(variables, dict | FrozenDict) else {}
    leaves = jax.tree.leaves(given.get("params", {}), is_leaf=lambda node: isinstance(node, QuantizedArray))
    is_converted = any(isinstance(leaf, QuantizedArray) for leaf in leaves)
    records = list(find_records(given.get(RANGES, {})))
    expected = "variables with float kernels"
    got = "variables that are already converted: module.apply serves them as they are"
    checks.require(bool(records) or not is_converted, _NAME, "variables", expected, got)
    expected = f'variables of a quantized module, with "params" and the collection "{RANGES}" that init makes'
    checks.require(bool(records) and "params" in given, _NAME, "variables", expected, sorted(given) or "none")
    serving = {name: _copy_tree(value) for name, value in given.items() if name not in (SCALES, RANGES)}
    ranges: dict[str, Any] = {}
    for path, record in records:
        scales = _find_node(given.get(SCALES, {}), path) or {}
        state = _find_node(given[RANGES], path) or {}
        with _layer_operand.prefix_errors("/".join(path[:-1]) or type(module).__name__):
            holder = _find_node(serving["params"], path[:-1])
            kernel = holder.get(record.kernel) if isinstance(holder, dict) else None
            holds = kernel is not None and not isinstance(kernel, QuantizedArray)
            got = "a kernel that is already converted" if kernel is not None else "none"
            checks.require(holds, _NAME, f"params[{record.kernel!r}]", "a float kernel", got)
            holder[record.kernel], depth = _quantize_kernel(record, kernel, scales)
            constants = _find_constants(record, state, scales, depth)
        _set_node(ranges, path, {**constants, **_describe_specs(record)})
    return {**serving, RANGES: ranges}


def find_records(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Record]]:
    """Yields what the layers say of themselves in the collection "ranges", each with its path."""
    if not isinstance(node, Mapping):
        return
    if isinstance(node.get(NAME), Record):
        yield path, node[NAME]
    for name, child in node.items():
        yield from find_records(child, (*path, name))


def _describe_specs(record: Record) -> dict[str, StaticText]:
    """Returns what the layer that serves is held to: without it, codes would pass for those of another spec."""
    sites = {"weight_spec": record.weight, "activation_spec": record.activation}
    return {name: StaticText(_layer_operand.describe_converted(site)) for name, site in sites.items()}


def check_convertible(function: str, record: Record) -> None:
    """Requires a layer that takes converted weights, as soon as it is known which one it is."""
    expected = "promote_dtype=jq.flax.promote_dtype in this layer, for flax's own takes no converted kernel"
    if record.attention is not None:
        expected = (
            f"attention made of jaxquant.flax.linen.DenseGeneral and flax.linen.dot_product_attention: flax's "
            f"{record.attention} passes its layers no promote_dtype, without which they take no converted kernel"
        )
    checks.require(record.is_ready, function, "module", expected, record.attention or "flax.linen's promote_dtype")


def _copy_tree(node: Any) -> Any:
    return {name: _copy_tree(child) for name, child in node.items()} if isinstance(node, Mapping) else node


def _find_node(node: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _set_node(node: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        node = node.setdefault(name, {})
    node[path[-1]] = value


def _quantize_kernel(record: Record, boxed: Any, scales: Mapping[str, Any]) -> tuple[QuantizedArray, int]:
    """Returns a kernel's codes, and how many leading axes stack it."""
    kernel = meta.unbox(boxed)
    depth = kernel.ndim - len(record.shape)
    expected = f"shape {record.shape}, with the axes of nn.scan and nn.vmap before it"
    fits = depth >= 0 and tuple(kernel.shape[depth:]) == record.shape
    checks.require(fits, _NAME, f"params[{record.kernel!r}]", expected, f"shape {tuple(kernel.shape)}")
    check_convertible(_NAME, record)
    site = record.weight
    parts = () if isinstance(site.source, Dynamic) else _read_learned(site, scales)

    def quantized(kernel: jax.Array, parts: tuple[jax.Array, ...]) -> QuantizedArray:
        return _layer_operand.quantize_operand(
            site, kernel, _layer_operand.read_learned(site, parts) if parts else None
        )

    q = _map_stacked(quantized, depth)(kernel, parts)
    _layer_operand.check_shippable(_NAME, site, q.scale)
    names = getattr(boxed, "names", None)
    if not isinstance(boxed, meta.AxisMetadata) or names is None:
        return q, depth

    def part(value: Any) -> Any:
        if value is None:
            return None
        own = _layer_operand.find_part_names(names, value.shape)
        return meta.replace_boxed(boxed, value).replace(names=own)  # type: ignore[attr-defined]

    return q.replace(codes=part(q.codes), scale=part(q.scale), zero_point=part(q.zero_point)), depth


def _find_constants(record: Record, state: Mapping[str, Any], scales: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Returns the constants that activations are quantized by."""
    site = record.activation
    if site is None or isinstance(site.source, Dynamic):
        return {}
    if isinstance(site.source, Observed):
        seen = state.get(site.of)
        expected = 'a range: apply(..., mutable=["ranges"]) with data that is like what is served'
        if record.kernel == "embedding":
            expected += ", by a method that calls attend; or activation_spec=None where none does"
        batches = None if seen is None else seen["batches"]
        holds = batches is not None and (checks.is_traced(batches) or bool((np.asarray(batches) > 0).all()))
        checks.require(holds, _NAME, site.of, expected, "no data")
        assert batches is not None
        found = _map_stacked(lambda state: _layer_operand.finalize_state(site, state), batches.ndim)(
            seen
        )  # its own: kernels may be shared
    else:
        found = _map_stacked(lambda *parts: _layer_operand.read_learned(site, parts), depth)(
            *_read_learned(site, scales)
        )
    scale, zero_point = found
    _layer_operand.check_shippable(_NAME, site, scale)
    if zero_point is None:
        return {site.of: {"scale": scale}}
    if zero_point.dtype != site.spec.carrier:
        zero_point = _layer_operand.find_code(site, zero_point)
    return {site.of: {"scale": scale, "zero_point": zero_point}}


def _read_learned(site: Site, scales: Mapping[str, Any]) -> tuple[jax.Array, ...]:
    for name in _layer_operand.list_names(site):
        expected = f'it in the collection "{SCALES}": apply(..., mutable=["{SCALES}"]) starts it'
        checks.require(name in scales, _NAME, name, expected, "none")
    return tuple(meta.unbox(scales[name]) for name in _layer_operand.list_names(site))


def _map_stacked(function: Any, depth: int) -> Any:
    for _ in range(depth):
        function = jax.vmap(function)
    return function
