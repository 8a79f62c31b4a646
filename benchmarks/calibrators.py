"""The rows on calibrators: the time to process one more batch.

The batches have up to 4 million float32, with one range per tensor or for each of 1024 channels. "one read" is jnp.max
of the batch, the least that a calibrator must do. "ONNX Runtime" is onnxruntime.quantization: its minima and maxima run
in ONNX Runtime, its histograms in numpy and not per channel. Ranges are compared with numpy's over all data. The
results of mse and entropy, and of histograms that skip data, are checked by `benchmarks.sqnr` and by the tests.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

from . import inputs
from . import onnxruntime_models as models
from .contest import ONNX_RUNTIME, Call, Contest, Missing, Row, Table

_ONE_READ = "one read"
_UNLIKE = frozenset({_ONE_READ, ONNX_RUNTIME})
_PERCENTILE = 99.9
_BINS = 2048
_EVERY = 17
_PER_TENSOR, _PER_CHANNEL = (0, 1), (0,)  # the reduced axes
_Axes = tuple[int, ...]


def _extremes(size: tuple[int, int], axes: _Axes, name: str) -> Contest:
    x = inputs.finite(size)

    def expected() -> tuple[np.ndarray, np.ndarray]:
        low, high = x.min(axes, keepdims=True), x.max(axes, keepdims=True)
        largest = np.maximum(-low, high)
        return (-largest, largest) if name == "absmax" else (low, high)

    reductions = [models.single_node(f"Reduce{end}", {"x": x}, {}, axes=axes) for end in ("Min", "Max")]
    calls = [call for call in reductions if not isinstance(call, Missing)]
    onnx = (lambda: [call() for call in calls]) if len(calls) == 2 else Missing("not installed")
    calibrator = getattr(jq.calibration, name)(_spec(axes))
    return _contest(calibrator, x, axes, onnx, expected, calibrator.finalize)


def _histogram(size: tuple[int, int], axes: _Axes, name: str, every: int) -> Contest:
    x = inputs.finite(size)
    further = {"percentile": (_PERCENTILE,)}.get(name, ())
    calibrator = getattr(jq.calibration, name)(_spec(axes), *further, bins=_BINS, every=every)
    onnx = _collector(name, x, axes)
    if name != "percentile" or every > 1:
        return _contest(calibrator, x, axes, onnx, Missing("not compared"), lambda state: state)
    everywhere = partial(np.ones, () if axes == _PER_TENSOR else size[1], bool)
    return _contest(calibrator, x, axes, onnx, everywhere, partial(_close, calibrator, x, axes))


def _contest(
    calibrator: Any, x: np.ndarray, axes: _Axes, onnx: Call | Missing, expected: Any, compared: Callable[[Any], Any]
) -> Contest:
    """Return the contest of a second batch, which is the first one in reverse order."""
    first, second = jax.device_put((x, x[::-1]))
    update = jax.jit(calibrator.update)
    state = jax.block_until_ready(update(calibrator.init(first), first))
    find_max = partial(jax.jit(lambda x: jnp.max(x, axis=axes)), second)
    opponents: dict[str, Call | Missing] = {_ONE_READ: find_max, ONNX_RUNTIME: onnx}
    return Contest(partial(update, state, second), opponents, expected, x.nbytes, _UNLIKE, compared)


def _spec(axes: _Axes) -> jq.QuantSpec:
    return jq.QuantSpec(jnp.int8, jq.PerTensor() if axes == _PER_TENSOR else jq.PerAxis(1))


def _close(calibrator: Any, x: np.ndarray, axes: _Axes, state: Any) -> np.ndarray:
    """Return whether the ranges are within a bin of numpy's percentiles. The calibrator has seen each number twice."""
    magnitudes = np.abs(np.concatenate([x, x]))
    exact = np.percentile(magnitudes, _PERCENTILE, axes).astype(np.float32)
    reach = 2 ** np.ceil(np.log2(magnitudes.max(axes)))
    low, high = (np.asarray(end).reshape(exact.shape) for end in calibrator.finalize(state))
    # The range is clipped to the data, so only one of its ends is the percentile.
    return np.abs(np.maximum(-low, high) - exact) <= 2 * reach / _BINS


def _collector(name: str, x: np.ndarray, axes: _Axes) -> Call | Missing:
    """Return a call of onnxruntime.quantization that processes one more batch, or why there is none."""
    if name == "mse" or axes != _PER_TENSOR:
        return Missing("none")
    if importlib.util.find_spec("onnxruntime") is None:
        return Missing("not installed")
    try:
        from onnxruntime.quantization.calibrate import HistogramCollector
    except ImportError:  # it has more dependencies than onnxruntime
        return Missing("not installed")
    collector = HistogramCollector(name, True, _BINS, 128, _PERCENTILE, "same")
    see = collector.collect_absolute_value if name == "percentile" else collector.collect_value
    see({"x": x})
    return partial(see, {"x": x[::-1]})


def _rows(title: str, sizes: Sequence[tuple[int, int]], build: Callable[..., Contest], *arguments: Any) -> list[Row]:
    rows = []
    for kind, axes in (("per tensor", _PER_TENSOR), ("per channel", _PER_CHANNEL)):
        rows += [Row(f"{title} {kind}", size, partial(build, size, axes, *arguments), size == _LARGE) for size in sizes]
    return rows


_SMALL, _LARGE = (256, 1024), (4096, 1024)
_WITH_HISTOGRAM = {f"percentile {_PERCENTILE}": "percentile", "mse": "mse", "entropy": "entropy"}

ROWS = [
    *(row for name in ("minmax", "absmax", "moving_average") for row in _rows(name, (_SMALL, _LARGE), _extremes, name)),
    *(row for t, name in _WITH_HISTOGRAM.items() for row in _rows(t, (_SMALL, _LARGE), _histogram, name, 1)),
    *(
        row
        for title, name in _WITH_HISTOGRAM.items()
        for row in _rows(f"{title}, every={_EVERY}", (_LARGE,), _histogram, name, _EVERY)
    ),
]

TABLE = Table("Calibrators: one more batch", (_ONE_READ, ONNX_RUNTIME), ROWS)
