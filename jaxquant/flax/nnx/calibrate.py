"""Static ranges of an NNX model, from batches; and whether a model has them all."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from ..._core import checks
from .. import _calibration_loop, _layer_operand
from ..ranges import Dynamic, Observed
from .contraction import Contraction, Ranges
from .convert import find_contractions, find_path, require_module

_CALIBRATE, _VIEW, _CHECK = "flax.nnx.calibrate", "flax.nnx.calibration_view", "flax.nnx.check_calibrated"

Model = TypeVar("Model", bound=nnx.Module)


def calibrate(
    model: nnx.Module, batches: Iterable[Any], *, method: str = "__call__",
    checkpoint: str | os.PathLike[str] | None = None, progress: bool | None = None, **arguments: Any,
) -> None:  # fmt: skip
    """Find the static ranges of a model's layers, in place, from batches like those that will be served.

    The model is called on each batch in evaluation mode, whatever mode it is in: dropout is off and batch statistics
    are read. Only the `Ranges` variables change, and the model keeps its mode. A second call goes on where the first
    one ended.

    Args:
        model: a model with quantized layers. Its ranges are updated in place, also where a batch raises.
        batches: an iterable; each batch is an array, a tuple of positional arguments or a mapping of keyword
            arguments.
        method: Static. The name of the method that is called.
        checkpoint: a file that is written once a minute and however the loop ends. If it exists, the batches that it
            counts are read and passed over: give the same ones in the same order. Delete it to start anew.
        progress: whether a progress bar is shown; None shows it on a terminal once the work has taken two seconds.
        **arguments: Static. Further arguments of each call.

    Returns:
        None.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the model has no layer with `Observed()`, or is converted already; there is no batch; a batch has a
            NaN or an infinity, and the ranges are as before it; a learned scale was not started; a layer saw no data;
            the checkpoint was written for other weights or layers, counts more batches than there are, or is damaged.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int8), "activation_spec": jq.QuantSpec(jnp.uint8)}
        >>> model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), qnnx.Linear(3, 2, **specs, rngs=nnx.Rngs(1)))
        >>> qnnx.calibrate(model, [jnp.array([[-1.0, 0.5, 1.55]])])
        >>> serving = qnnx.convert(model)
        >>> serving.layers[1].dot_general.activation_scale[...]  # 2.55 / 255: no value was dropped or doubled
        Array([0.01], dtype=float32)

    Source: Jacob et al., arXiv 1712.05877, section 3; Nagel et al., arXiv 2106.08295, section 3.
    """
    require_module(_CALIBRATE, "model", model)
    observed = [c for _, c in find_contractions(model) if _observes(c)]
    expected = "a model with a layer whose activation_range is Observed(), and that is not converted yet"
    checks.require(bool(observed), _CALIBRATE, "model", expected, "none")
    checks.require_type(isinstance(method, str), _CALIBRATE, "method", "a name", type(method).__name__)
    view = calibration_view(model)
    layers = []
    for path, contraction in find_contractions(view):
        contraction.layer = find_path(path, contraction)  # for errors; the model keeps its own
        with _layer_operand.prefix_errors(contraction.layer):
            _check_learned(_CALIBRATE, contraction)
        layers.append(f"{contraction.layer}: {', '.join(map(_layer_operand.describe, contraction.sites))}")
    graph, moving, fixed = nnx.split(view, Ranges, ...)

    @jax.jit
    def run(fixed: Any, moving: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, jax.Array]:
        merged = nnx.merge(graph, moving, fixed)
        getattr(merged, method)(*args, **kwargs, **arguments)
        moved = nnx.state(merged, Ranges)
        return moved, _calibration_loop.is_finite(nnx.to_pure_dict(moved))

    step = _calibration_loop.Step(
        _CALIBRATE, lambda *rest: run(fixed, *rest),
        functools.cache(lambda: _calibration_loop.find_fingerprint(fixed)), lambda state: "\n".join(layers),
        frozenset(arguments),
    )  # fmt: skip
    _calibration_loop.run_loop(
        step, moving, batches, checkpoint=checkpoint, progress=progress, inspect=lambda state: None,
        keep=lambda state: nnx.update(model, state),
    )  # fmt: skip
    check_calibrated(model)


def calibration_view(model: Model) -> Model:
    """view = model in evaluation mode, but for its static ranges, which move with every call.

    The view shares the variables of the model, which keeps its own mode: a loop of your own calls the view, and the
    ranges of the model follow. `calibrate` is that loop.

    Args:
        model: a model with quantized layers.

    Returns:
        A module of the same class that shares its variables.

    Raises:
        TypeError: model is no NNX module.
        ValueError: no layer of it is quantized.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int8), "activation_spec": jq.QuantSpec(jnp.uint8)}
        >>> layer = qnnx.Linear(3, 2, **specs, rngs=nnx.Rngs(0))
        >>> y = qnnx.calibration_view(layer)(jnp.array([[-1.0, 0.5, 1.55]]))
        >>> int(layer.dot_general.activation_batches[...])
        1

    Source: flax.nnx.view.
    """
    require_module(_VIEW, "model", model)
    is_quantized = any(True for _ in find_contractions(model))
    checks.require(is_quantized, _VIEW, "model", "a model with quantized layers", "none")
    view = nnx.view(model, raise_if_not_found=False, calibrating=True)
    view.eval()  # also sets the modules that nnx.view does not know
    return view


def check_calibrated(model: nnx.Module) -> None:
    """Require that every static range and every learned scale of a model is there and finite.

    A layer without its range raises where it can; under `nnx.jit`, where nothing can be raised for a value, it returns
    NaN. A training or serving script calls this once on its model, outside of `jit`.

    Args:
        model: a model with quantized layers, converted or not.

    Returns:
        None.

    Raises:
        TypeError: model is no NNX module.
        ValueError: no layer is quantized; or, after the path of the layer, the range or scale that is missing, is NaN
            or is infinite.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> specs = {"weight_spec": jq.QuantSpec(jnp.int8), "activation_spec": jq.QuantSpec(jnp.uint8)}
        >>> layer = qnnx.Linear(3, 2, **specs, rngs=nnx.Rngs(0))
        >>> qnnx.calibrate(layer, [jnp.ones((1, 3))])
        >>> qnnx.check_calibrated(layer)

    Source: none; it is this library's.
    """
    require_module(_CHECK, "model", model)
    contractions = list(find_contractions(model))
    checks.require(bool(contractions), _CHECK, "model", "a model with quantized layers", "none")
    for path, contraction in contractions:
        with _layer_operand.prefix_errors(find_path(path, contraction)):
            if _observes(contraction):
                _check_observed(contraction)
            _check_learned(_CHECK, contraction)


def _check_learned(function: str, contraction: Contraction) -> None:
    for name in ("weight_scale", "weight_zero_point", "activation_scale", "activation_zero_point"):
        variable = getattr(contraction, name)
        holds = variable is None or _layer_operand.is_finite(variable[...])
        expected = "finite numbers: jaxquant.flax.nnx.start(model, batch) starts it"
        checks.require(holds, function, name, expected, "NaN or an infinity")


def _observes(contraction: Contraction) -> bool:
    """Whether a layer has a calibrator; a converted one has none left."""
    site = contraction.sites[1]
    is_observed = site is not None and isinstance(site.source, Observed) and not isinstance(site.source, Dynamic)
    return is_observed and contraction.activation_range is not None


def _check_observed(contraction: Contraction) -> None:
    batches = contraction.activation_batches[...]
    expected = "a range: jaxquant.flax.nnx.calibrate(model, batches) finds it"
    holds = checks.is_traced(batches) or bool((np.asarray(batches) > 0).all())
    checks.require(holds, _CHECK, "activation", expected, "no data")
    finite = _calibration_loop.is_finite(contraction.activation_range.get_value())
    holds = checks.is_traced(finite) or bool(finite)
    checks.require(holds, _CHECK, "activation", expected, "one from batches with a NaN or an infinity")
