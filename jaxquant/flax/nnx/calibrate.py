"""Calibration of an NNX model's static ranges from batches, and the check that a model has every range."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
from flax import nnx

from ..._core import checks
from ..._training.range_sources import Static
from ...calibration import loop
from ...calibration.calibrator import is_finite_state
from .. import _operand_ranges, _quantization
from .contraction import NnxContraction, Ranges
from .convert import describe_path, require_module, walk_contractions

_CALIBRATE, _VIEW, _CHECK = "flax.nnx.calibrate", "flax.nnx.calibration_view", "flax.nnx.check_calibrated"

Model = TypeVar("Model", bound=nnx.Module)


def calibrate(
    model: nnx.Module, batches: Iterable[Any], *, method: str = "__call__",
    checkpoint: str | os.PathLike[str] | None = None, progress: bool | None = None, **arguments: Any,
) -> None:  # fmt: skip
    """Find the static ranges of an NNX model from batches, in place.

    Each layer with a `Static` range gets it. The model is called on each batch in evaluation mode, whatever its own
    mode: dropout is off, and batch statistics are read, not updated. Only the `Ranges` variables change, and the model
    keeps its mode. A second call continues where the first ended.

    Args:
        model: An NNX module with quantized layers. Its ranges are updated in place, even if a later batch raises an
            error.
        batches: An iterable of batches as they will be served. Each batch is an array, a tuple of positional
            arguments, or a mapping of keyword arguments.
        method: Static. The name of the method to call.
        checkpoint: The path of a file to resume from, or None. The file is written once a minute and when the loop
            ends, even if an error ends it. If the file already exists, the batches that it has counted are read and
            skipped, so pass the same batches in the same order. Delete the file to start over.
        progress: Whether to show a progress bar. None shows it on a terminal, after two seconds of work.
        **arguments: Static. Further arguments of each call.

    Returns:
        None.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the model has no layer with a `Static` range, or is converted already; there is no batch; a batch
            has a NaN or an infinity (the ranges are then those before that batch); a learned scale was not initialized
            by `start`; a layer saw no data; or the checkpoint was written for other weights or layers, counts more
            batches than there are, or is damaged.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int8), "activation_spec": jq.QuantSpec(jnp.uint8)}
        >>> specs["activation_range"] = jq.Static(jq.calibration.minmax)
        >>> model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), qnnx.Linear(3, 2, **specs, rngs=nnx.Rngs(1)))
        >>> qnnx.calibrate(model, [jnp.array([[-1.0, 0.5, 1.55]])])
        >>> serving = qnnx.convert(model)
        >>> serving.layers[1].dot_general.activation_scale[...]  # 2.55 / 255: no value was dropped or doubled
        Array([0.01], dtype=float32)

    Source: Jacob et al., arXiv 1712.05877, section 3; Nagel et al., arXiv 2106.08295, section 3.
    """
    require_module(_CALIBRATE, "model", model)
    has_range = any(_has_static(contraction) for _, contraction in walk_contractions(model))
    expected = "a model that is not converted yet, with activation_range=Static(...) in a layer"
    checks.require(has_range, _CALIBRATE, "model", expected, "none")
    checks.require_type(isinstance(method, str), _CALIBRATE, "method", "the name of a method", type(method).__name__)
    view = calibration_view(model)
    layers = []
    for path, contraction in walk_contractions(view):
        # The view has its own modules, so the names that the model's layers have in errors do not change.
        contraction.layer = describe_path(path, contraction)
        with checks.prefix_errors(contraction.layer):
            _check_learned(_CALIBRATE, contraction)
        operands = map(_quantization.describe_operand, contraction.operands)
        layers.append(f"{contraction.layer}: {', '.join(operands)}")
    graph, moving, fixed = nnx.split(view, Ranges, ...)

    # The weights are arguments, not constants, so that XLA does not copy them into the program.
    @jax.jit
    def run_batch(
        fixed: nnx.State, moving: nnx.State, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[nnx.State, jax.Array]:
        merged = nnx.merge(graph, moving, fixed)
        getattr(merged, method)(*args, **kwargs, **arguments)
        updated = nnx.state(merged, Ranges)
        return updated, is_finite_state(nnx.to_pure_dict(updated))

    step = loop.BatchStep(
        _CALIBRATE, lambda *rest: run_batch(fixed, *rest),
        # The weights do not change in the loop, so their fingerprint is computed once.
        functools.cache(lambda: loop.compute_fingerprint(fixed)), lambda state: "\n".join(layers),
        frozenset(arguments),
    )  # fmt: skip
    loop.run_loop(
        step, moving, batches, checkpoint=checkpoint, progress=progress, inspect=lambda state: None,
        # Do this after an error, too, because the ranges of the earlier batches are valid.
        keep=lambda state: nnx.update(model, state),
    )  # fmt: skip
    check_calibrated(model)


def calibration_view(model: Model) -> Model:
    """Return a view of an NNX model in evaluation mode; its calls update the static ranges.

    The view shares the variables of the model, which keeps its own mode. Call the view in a calibration loop of your
    own, and the model gets the ranges; `calibrate` is such a loop.

    Args:
        model: An NNX module with quantized layers.

    Returns:
        A module of the same class that shares the variables of the model.

    Raises:
        TypeError: model is not an NNX module.
        ValueError: no layer of the model is quantized.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int8), "activation_spec": jq.QuantSpec(jnp.uint8)}
        >>> specs["activation_range"] = jq.Static(jq.calibration.minmax)
        >>> layer = qnnx.Linear(3, 2, **specs, rngs=nnx.Rngs(0))
        >>> y = qnnx.calibration_view(layer)(jnp.array([[-1.0, 0.5, 1.55]]))
        >>> int(layer.dot_general.activation_batches[...])
        1

    Source: flax.nnx.view.
    """
    require_module(_VIEW, "model", model)
    is_quantized = any(True for _ in walk_contractions(model))
    checks.require(is_quantized, _VIEW, "model", "a model with quantized layers", "none")
    view = nnx.view(model, raise_if_not_found=False, calibrating=True)
    # `eval` also reaches the modules without a `set_view`, which nnx.view does not change.
    view.eval()
    return view


def check_calibrated(model: nnx.Module) -> None:
    """Check that an NNX model has every static range and every learned scale, all finite.

    A layer without its range raises an error when it is called, but under `nnx.jit`, where no error can depend on a
    value, it returns NaN. Call this function once on the model of a training or serving script, outside of `jit`.

    Args:
        model: An NNX module with quantized layers, converted or not.

    Returns:
        None.

    Raises:
        TypeError: model is not an NNX module.
        ValueError: no layer is quantized. Or, with the path of the layer in front: a range or scale that is missing, is
            NaN or is infinite.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int8), "activation_spec": jq.QuantSpec(jnp.uint8)}
        >>> specs["activation_range"] = jq.Static(jq.calibration.minmax)
        >>> layer = qnnx.Linear(3, 2, **specs, rngs=nnx.Rngs(0))
        >>> qnnx.calibrate(layer, [jnp.ones((1, 3))])
        >>> qnnx.check_calibrated(layer)

    Source: none; this library defines it.
    """
    require_module(_CHECK, "model", model)
    contractions = list(walk_contractions(model))
    checks.require(bool(contractions), _CHECK, "model", "a model with quantized layers", "none")
    for path, contraction in contractions:
        with checks.prefix_errors(describe_path(path, contraction)):
            if _has_static(contraction):
                _check_static(contraction)
            _check_learned(_CHECK, contraction)


def _has_static(contraction: NnxContraction) -> bool:
    """Return whether a layer has a calibrator. A converted layer has none."""
    return any(
        isinstance(operand.source, Static) and getattr(contraction, f"{operand.role}_range") is not None
        for operand in contraction.list_operands()
    )


def _check_static(contraction: NnxContraction) -> None:
    """Raise ContractValueError unless the static ranges of a layer have seen data, all of it finite."""
    remedy = "jaxquant.flax.nnx.calibrate(model, batches) finds it"
    for operand in contraction.list_operands():
        if isinstance(operand.source, Static):
            _operand_ranges.check_state(_CHECK, operand, contraction.read_state(operand.role), remedy)


def _check_learned(function: str, contraction: NnxContraction) -> None:
    """Raise ContractValueError unless the scales and zero points of a layer are finite."""
    for name in (f"{role}_{part}" for role in ("weight", "activation") for part in ("scale", "zero_point")):
        variable = getattr(contraction, name)
        holds = variable is None or _operand_ranges.is_finite(variable[...])
        expected = "finite numbers: jaxquant.flax.nnx.start(model, batch) starts it"
        checks.require(holds, function, name, expected, "NaN or an infinity")
