"""Static ranges of a Linen module, from batches; and whether variables have them all."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.core import FrozenDict, meta, unfreeze

from ..._arrays.quantized_array import QuantizedArray
from ..._core import checks
from .. import _calibration_loop, _layer_operand
from ..ranges import Dynamic, Learned, Observed
from .contraction import RANGES, SCALES
from .convert import check_convertible, find_records
from .record import Record

_CALIBRATE, _CHECK = "flax.calibrate", "flax.check_calibrated"


def calibrate(
    module: nn.Module, variables: Mapping[str, Any], batches: Iterable[Any], *,
    method: str | Callable[..., Any] | None = None, rngs: Any = None,
    checkpoint: str | os.PathLike[str] | None = None, progress: bool | None = None, **arguments: Any,
) -> dict[str, Any]:  # fmt: skip
    """calibrated = variables with the ranges that the layers with `Observed()` find in the batches.

    The module is called on each batch as it is served: only the collection "ranges" moves, and scales that are learned
    and missing are started. Nothing else changes: batch statistics are read, and dropout is on only if the arguments
    turn it on. A first call starts from nothing or from the ranges that `variables` has; a second one goes on.

    Args:
        module: a Linen module with quantized layers.
        variables: its "params" and other collections, and perhaps "ranges" and "scales".
        batches: an iterable; each batch is an array, a tuple of positional arguments or a mapping of keyword
            arguments, like those that will be served.
        method: Static. What is called in place of `__call__`, as of `module.apply`.
        rngs: as of `module.apply`.
        checkpoint: a file that is written once a minute and however the loop ends. If it exists, the batches that it
            counts are read and passed over: give the same ones in the same order. Delete it to start anew.
        progress: whether a progress bar is shown; None shows it on a terminal once the work has taken two seconds.
        **arguments: Static. Further arguments of each call, such as `train=False`.

    Returns:
        The variables, as plain dicts, with "ranges" and perhaps "scales".

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the module has no layer with a range to find, or one that cannot be converted; the variables are
            converted already, or have no "params"; there is no batch; a batch has a NaN or an infinity, after which
            the checkpoint holds what came before; a layer saw no data; the checkpoint was written for other weights or
            layers, counts more batches than there are, or is damaged.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant.flax import linen as qnn
        >>> layer = qnn.Dense(2, weight_spec=jq.QuantSpec(jnp.int8), activation_spec=jq.QuantSpec(jnp.uint8))
        >>> batches = [jnp.array([[-1.0, 0.5, 1.55]]), jnp.array([[0.0, 0.0, 1.55]])]
        >>> variables = layer.init(jax.random.key(0), batches[0])
        >>> calibrated = jq.flax.calibrate(layer, variables, batches)
        >>> int(calibrated["ranges"]["DotGeneral_0"]["activation"]["batches"])
        2
        >>> serving = jq.flax.convert(layer, calibrated)
        >>> bool((layer.apply(serving, batches[0]) == layer.apply(calibrated, batches[0])).all())
        True

    Source: Jacob et al., arXiv 1712.05877, section 3; Nagel et al., arXiv 2106.08295, section 3.
    """
    expected = "a flax.linen.Module (jaxquant.flax.nnx.calibrate is for NNX)"
    checks.require_type(isinstance(module, nn.Module), _CALIBRATE, "module", expected, type(module).__name__)
    is_mapping = isinstance(variables, Mapping)
    checks.require_type(is_mapping, _CALIBRATE, "variables", "a mapping of collections", type(variables).__name__)
    given: dict[str, Any] = unfreeze(variables) if isinstance(variables, FrozenDict) else dict(variables)
    _check_float(given)
    own = ("mutable", "capture_intermediates")
    taken = ", ".join(name for name in own if name in arguments)
    expected = f'arguments of the module: only "{RANGES}" and "{SCALES}" are mutable here'
    checks.require(not taken, _CALIBRATE, "arguments", expected, taken)
    moving = {name: given[name] for name in (RANGES, SCALES) if name in given}
    fixed = {name: value for name, value in given.items() if name not in moving}

    @jax.jit
    def run(fixed: Any, moving: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, jax.Array]:
        calls = {**kwargs, **arguments, "method": method, "rngs": rngs, "mutable": [RANGES, SCALES]}
        _, seen = module.apply({**fixed, **moving}, *args, **calls)
        moved = {**moving, **seen}  # type: ignore[dict-item]
        return moved, _calibration_loop.is_finite(moved)

    step = _calibration_loop.Step(
        _CALIBRATE, lambda *rest: run(fixed, *rest),
        functools.cache(lambda: _calibration_loop.find_fingerprint(fixed)), _describe_layers,
        frozenset(arguments) | {"method", "rngs", *own},
    )  # fmt: skip
    moving = _calibration_loop.run_loop(
        step, moving, batches, checkpoint=checkpoint, progress=progress, inspect=_check_layers
    )
    calibrated = {**fixed, **moving}
    check_calibrated(calibrated)
    return calibrated


def check_calibrated(variables: Mapping[str, Any]) -> None:
    """Require that every static range and every learned scale in a module's variables is there and finite.

    A layer without its range raises where it can; under `jax.jit`, where nothing can be raised for a value, it returns
    NaN. A training or serving script calls this once on its variables, outside of `jit`.

    Args:
        variables: of a Linen module with quantized layers: as `init`, `apply` or `calibrate` return them, or converted.

    Returns:
        None.

    Raises:
        TypeError: variables is no mapping.
        ValueError: no layer is quantized; or, after the path of the layer, the range or scale that is missing, is NaN
            or is infinite.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant.flax import linen as qnn
        >>> layer = qnn.Dense(2, weight_spec=jq.QuantSpec(jnp.int8), activation_spec=jq.QuantSpec(jnp.uint8))
        >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 3)))
        >>> try:
        ...     jq.flax.check_calibrated(variables)
        ... except ValueError as error:
        ...     print(str(error).partition("activation: ")[2])
        expected a range: jq.flax.calibrate finds it, got no data

    Source: none; it is this library's.
    """
    is_mapping = isinstance(variables, Mapping)
    checks.require_type(is_mapping, _CHECK, "variables", "a mapping of collections", type(variables).__name__)
    given: dict[str, Any] = unfreeze(variables) if isinstance(variables, FrozenDict) else dict(variables)
    ranges, scales = given.get(RANGES, {}), given.get(SCALES, {})
    records = list(find_records(ranges))
    expected = f'variables of a quantized module, with the collection "{RANGES}"'
    is_converted = _has_codes(given.get("params", {}))
    checks.require(bool(records) or is_converted, _CHECK, "variables", expected, sorted(given) or "none")
    for path, record in records:
        state, learned = (_find(tree, path) for tree in (ranges, scales))
        with _layer_operand.prefix_errors("/".join(path[:-1]) or path[-1]):
            for site in (record.weight, record.activation):
                if site is not None and isinstance(site.source, Observed):
                    _check_observed(site, state)
                elif site is not None and isinstance(site.source, Learned):
                    _check_learned(site, learned)
    for path, value in jax.tree_util.tree_leaves_with_path(ranges):
        is_scale = bool(path) and getattr(path[-1], "key", None) == "scale"
        with _layer_operand.prefix_errors("/".join(str(getattr(key, "key", key)) for key in path[:-1])):
            holds = not is_scale or _layer_operand.is_finite(value)
            checks.require(holds, _CHECK, "scale", "finite numbers", "NaN or an infinity")


def _check_observed(site: _layer_operand.Site, state: Any) -> None:
    entry = state.get(site.of) if isinstance(state, Mapping) else None
    batches = None if entry is None else entry["batches"]
    expected = "a range: jq.flax.calibrate finds it"
    holds = batches is not None and (checks.is_traced(batches) or bool((np.asarray(batches) > 0).all()))
    checks.require(holds, _CHECK, site.of, expected, "no data")
    assert entry is not None
    finite = _calibration_loop.is_finite(entry["state"])
    holds = checks.is_traced(finite) or bool(finite)
    checks.require(holds, _CHECK, site.of, expected, "one from batches with a NaN or an infinity")


def _check_learned(site: _layer_operand.Site, scales: Any) -> None:
    for name in _layer_operand.list_names(site):
        value = scales.get(name) if isinstance(scales, Mapping) else None
        expected = f'it in the collection "{SCALES}": jq.flax.calibrate or apply(..., mutable=["{SCALES}"]) starts it'
        checks.require(value is not None, _CHECK, name, expected, "none")
        holds = _layer_operand.is_finite(meta.unbox(value))
        checks.require(holds, _CHECK, name, "finite numbers", "NaN or an infinity")


def _check_float(given: Mapping[str, Any]) -> None:
    """Refuses variables without weights, and converted ones, before anything is computed."""
    expected = 'the variables that init returns, with "params"'
    checks.require("params" in given, _CALIBRATE, "variables", expected, sorted(given) or "none")
    got = "variables that are already converted: their ranges are constants"
    holds = not _has_codes(given.get("params", {}))
    checks.require(holds, _CALIBRATE, "variables", "variables with float kernels", got)


def _has_codes(params: Any) -> bool:
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, QuantizedArray))
    return any(isinstance(leaf, QuantizedArray) for leaf in leaves)


def _check_layers(moving: Mapping[str, Any]) -> None:
    """Requires layers that have something to find, and that can be converted once it is found."""
    records: list[tuple[tuple[str, ...], Record]] = list(find_records(moving.get(RANGES, {})))
    sites = [site for _, record in records for site in (record.weight, record.activation) if site is not None]
    expected = "a module with a layer whose activation_range is Observed()"
    holds = any(not isinstance(site.source, Dynamic) for site in sites)
    checks.require(holds, _CALIBRATE, "module", expected, "only Dynamic() ranges" if sites else "no quantized layer")
    for path, record in records:
        with _layer_operand.prefix_errors("/".join(path[:-1]) or path[-1]):
            check_convertible(_CALIBRATE, record)


def _describe_layers(moving: Mapping[str, Any]) -> str:
    """Returns how the layers quantize, the same in every process."""
    records = sorted(find_records(moving.get(RANGES, {})), key=lambda found: found[0])
    return "\n".join(
        f"{'/'.join(path)}: {_layer_operand.describe(record.weight)}, {_layer_operand.describe(record.activation)}"
        for path, record in records
    )


def _find(node: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        node = node.get(name) if isinstance(node, Mapping) else None
    return node
