"""Calibration of a Linen module's static ranges from batches, and the check that variables have every range."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core import FrozenDict, meta, unfreeze
from flax.typing import VariableDict

from ..._core import checks
from ..._training.range_sources import Dynamic, Learned, Static
from ...calibration import loop
from ...calibration.calibrator import is_finite_state
from .. import _operand_ranges, _quantization
from .._quantization import LayerOperand
from .contraction import RANGES, RECORD, SCALES, LearnedPart, VariablePath, join_path, list_layers, list_scales
from .convert import check_convertible, has_codes

_CALIBRATE, _CHECK = "flax.calibrate", "flax.check_calibrated"
_RESERVED = ("mutable", "capture_intermediates")  # arguments of module.apply that calibrate sets itself


def calibrate(
    module: nn.Module, variables: Mapping[str, object], batches: Iterable[Any], *,
    method: str | Callable[..., Any] | None = None, rngs: Mapping[str, jax.Array] | None = None,
    checkpoint: str | os.PathLike[str] | None = None, progress: bool | None = None, **arguments: Any,
) -> dict[str, Any]:  # fmt: skip
    """Find the static ranges of a Linen module from batches, and return its variables with them.

    Each layer with a `Static` range gets it. The module is called on each batch as it will be when it is served, and
    only the collection "ranges" changes; learned scales that are missing are initialized in "scales". Batch statistics
    are read, not updated, and dropout is on only if `arguments` turn it on. The first call starts from no data, or from
    the ranges in `variables`. A second call with the returned variables continues.

    Args:
        module: A Linen module with quantized layers.
        variables: A mapping of collections: "params" and others of the module, and perhaps "ranges" and "scales".
        batches: An iterable of batches as they will be served. Each batch is an array, a tuple of positional
            arguments, or a mapping of keyword arguments.
        method: Static. The method to call instead of `__call__`, as in `module.apply`.
        rngs: Random keys, as in `module.apply`.
        checkpoint: The path of a file to resume from, or None. The file is written once a minute and when the loop
            ends, even if an error ends it. If the file already exists, the batches that it has counted are read and
            skipped, so pass the same batches in the same order. Delete the file to start over.
        progress: Whether to show a progress bar. None shows it on a terminal, after two seconds of work.
        **arguments: Static. Further arguments of each call, such as `train=False`.

    Returns:
        The variables, as plain dicts, with "ranges" and perhaps "scales".

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the module has no layer with a range to find, or has a layer that cannot be converted; the variables
            are converted already, or have no "params"; there is no batch; a batch has a NaN or an infinity (the
            checkpoint then holds the ranges before that batch); a layer saw no data; or the checkpoint was written for
            other weights or layers, counts more batches than there are, or is damaged.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant.flax import linen as qnn
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int8), "activation_spec": jq.QuantSpec(jnp.uint8)}
        >>> layer = qnn.Dense(2, **specs, activation_range=jq.Static(jq.calibration.minmax))
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
    collections = _read_collections(_CALIBRATE, variables)
    _check_float(collections)
    reserved = ", ".join(name for name in _RESERVED if name in arguments)
    expected = f'arguments of the module; calibrate itself makes "{RANGES}" and "{SCALES}" mutable'
    checks.require(not reserved, _CALIBRATE, "arguments", expected, reserved)
    # The program returns only the collections that change.
    moving = {name: collections[name] for name in (RANGES, SCALES) if name in collections}
    fixed = {name: value for name, value in collections.items() if name not in moving}

    # The weights are arguments, not constants, so that XLA does not copy them into the program.
    @jax.jit
    def run_batch(
        fixed: VariableDict, moving: VariableDict, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[VariableDict, jax.Array]:
        settings = {**kwargs, **arguments, "method": method, "rngs": rngs, "mutable": [RANGES, SCALES]}
        _, updates = module.apply({**fixed, **moving}, *args, **settings)
        updated = {**moving, **updates}  # type: ignore[dict-item]
        return updated, is_finite_state(updated)

    step = loop.BatchStep(
        _CALIBRATE, lambda *rest: run_batch(fixed, *rest),
        # The weights do not change in the loop, so their fingerprint is computed once.
        functools.cache(lambda: loop.compute_fingerprint(fixed)), _describe_layers,
        frozenset(arguments) | {"method", "rngs", *_RESERVED},
    )  # fmt: skip
    moving = loop.run_loop(
        # The layers leave their records in the first call, so they are inspected after it.
        step,
        moving,
        batches,
        checkpoint=checkpoint,
        progress=progress,
        inspect=_check_layers,
    )
    calibrated = {**fixed, **moving}
    check_calibrated(calibrated)
    return calibrated


def check_calibrated(variables: Mapping[str, object]) -> None:
    """Check that a Linen module's variables have every static range and every learned scale, all finite.

    A layer without its range raises an error when it is called, but under `jax.jit`, where no error can depend on a
    value, it returns NaN. Call this function once on the variables of a training or serving script, outside of `jit`.

    Args:
        variables: The variables of a Linen module with quantized layers, as `init`, `apply`, `calibrate` or `convert`
            return them.

    Returns:
        None.

    Raises:
        TypeError: variables is not a mapping.
        ValueError: no layer is quantized. Or, with the path of the layer in front: a range or scale that is missing, is
            NaN or is infinite.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant.flax import linen as qnn
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int8), "activation_spec": jq.QuantSpec(jnp.uint8)}
        >>> layer = qnn.Dense(2, **specs, activation_range=jq.Static(jq.calibration.minmax))
        >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 3)))
        >>> try:
        ...     jq.flax.check_calibrated(variables)
        ... except ValueError as error:
        ...     print(str(error).partition("activation: ")[2])
        expected a range: jq.flax.calibrate finds it, got no data

    Source: none; this library defines it.
    """
    collections = _read_collections(_CHECK, variables)
    ranges, scales = collections.get(RANGES, {}), list_scales(collections.get(SCALES))
    layers = list_layers(ranges)
    expected = f'variables of a quantized module, with the collection "{RANGES}"'
    holds = bool(layers) or has_codes(collections.get("params"))
    checks.require(holds, _CHECK, "variables", expected, sorted(collections) or "none")
    for path, state in layers.items():
        record = state[RECORD]
        with checks.prefix_errors(join_path(path)):
            for operand in (record.weight, record.activation):
                if operand is not None and isinstance(operand.source, Static):
                    values = state.get(operand.role)
                    _operand_ranges.check_state(_CHECK, operand, values, "jq.flax.calibrate finds it")
                elif operand is not None and isinstance(operand.source, Learned):
                    _check_learned(operand, path, scales)
    # The constants of converted layers, which have no record.
    for path, value in jax.tree_util.tree_leaves_with_path(ranges):
        is_scale = bool(path) and getattr(path[-1], "key", None) == "scale"
        with checks.prefix_errors("/".join(str(getattr(key, "key", key)) for key in path[:-1])):
            holds = not is_scale or _operand_ranges.is_finite(value)
            checks.require(holds, _CHECK, "scale", "finite numbers", "NaN or an infinity")


def _read_collections(function: str, variables: Mapping[str, object]) -> dict[str, Any]:
    """Return variables as a dict of collections."""
    is_mapping = isinstance(variables, Mapping)
    checks.require_type(is_mapping, function, "variables", "a mapping of collections", type(variables).__name__)
    return unfreeze(variables) if isinstance(variables, FrozenDict) else dict(variables)


def _check_learned(operand: LayerOperand, path: VariablePath, scales: Mapping[VariablePath, LearnedPart]) -> None:
    """Raise ContractValueError unless the learned scale and zero point of an operand are present and finite."""
    for name in _operand_ranges.list_learned_names(operand):
        value = scales.get((*path, name))
        expected = f'it in the collection "{SCALES}": jq.flax.calibrate or apply(..., mutable=["{SCALES}"]) starts it'
        checks.require(value is not None, _CHECK, name, expected, "none")
        holds = _operand_ranges.is_finite(meta.unbox(value))
        checks.require(holds, _CHECK, name, "finite numbers", "NaN or an infinity")


def _check_float(collections: VariableDict) -> None:
    """Raise ContractValueError for variables without weights and for converted ones, before anything is computed."""
    expected = 'the variables that init returns, with "params"'
    checks.require("params" in collections, _CALIBRATE, "variables", expected, sorted(collections) or "none")
    got = "variables that are already converted: their ranges are constants"
    is_float = not has_codes(collections["params"])
    checks.require(is_float, _CALIBRATE, "variables", "variables with float kernels", got)


def _check_layers(moving: VariableDict) -> None:
    """Raise ContractValueError unless a layer has a range to find, and every layer can be converted."""
    layers = list_layers(moving.get(RANGES))
    operands = []
    for state in layers.values():
        record = state[RECORD]
        every = (record.weight, record.activation)
        operands += [operand for operand in every if operand is not None]
    has_range = any(not isinstance(operand.source, Dynamic) for operand in operands)
    expected = "a module with activation_range=Static(...) in a layer"
    got = "only Dynamic() ranges" if operands else "no quantized layer"
    checks.require(has_range, _CALIBRATE, "module", expected, got)
    for path, state in layers.items():
        with checks.prefix_errors(join_path(path)):
            check_convertible(_CALIBRATE, state[RECORD])


def _describe_layers(moving: VariableDict) -> str:
    """Return a description of how the layers quantize, equal in every process."""
    lines = []
    # `jax.jit` returns sorted dicts, so only the first state may have another order.
    for path, state in sorted(list_layers(moving.get(RANGES)).items(), key=lambda item: item[0]):
        record = state[RECORD]
        operands = map(_quantization.describe_operand, (record.weight, record.activation))
        lines.append(f"{'/'.join(path)}: {', '.join(operands)}")
    return "\n".join(lines)
