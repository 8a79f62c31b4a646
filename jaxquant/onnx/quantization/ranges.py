"""What ONNX Runtime computes between the nodes of a model: ranges, means and second moments of its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import onnxruntime
from onnx import ModelProto, helper, numpy_helper

from ..._arrays.spec import QuantSpec
from ..._core import checks
from ...calibration.calibrator import Factory
from ...calibration.loop import Bar
from ..limits import ModelError
from ..session import open_session

Batch = Mapping[str, np.ndarray]
# A calibrator compiles a program for each length: longer arrays come in pieces of these lengths.
_PIECE = 2**18


def add_outputs(model: ModelProto, names: Iterable[str]) -> ModelProto:
    """Return a copy of a model that also returns other values."""
    copy = ModelProto()
    copy.CopyFrom(model)
    present = {info.name for info in copy.graph.output}
    copy.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in present)
    return copy


def open_quiet_session(model: ModelProto, level: str = "all", threads: int = 0) -> onnxruntime.InferenceSession:
    """Return a session that writes nothing to the error stream: what fails in it is an exception, too."""
    return open_session(model, level, make_quiet_options(threads))


def make_quiet_options(threads: int = 0) -> onnxruntime.SessionOptions:
    """Return the options of such a session; 0 threads are as many as ONNX Runtime chooses."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, threads
    return options


def run_session(session: onnxruntime.InferenceSession, batch: Batch, names: Sequence[str] | None = None) -> list[Any]:
    """Return outputs of a session; raise ModelError if ONNX Runtime cannot run it."""
    try:
        return list(session.run(names, dict(batch)))
    except Exception as error:  # the runtime's own types, which it does not document
        raise ModelError(f"ONNX Runtime cannot run the model on the data: {error}") from error


def observe(
    model: ModelProto,
    batches: Sequence[Batch],
    observers: Mapping[str, Sequence[Callable[[np.ndarray], None]]],
    progress: bool | None,
) -> None:
    """Run a model on batches, and give each observer the values of its name."""
    inputs = {info.name for info in model.graph.input}
    defaults = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name in inputs
    }
    names = [name for name in observers if name not in inputs]
    session = open_quiet_session(add_outputs(model, names))
    bar = Bar("calibrating", len(batches), progress)
    try:
        for batch in batches:
            values = dict(zip(names, run_session(session, batch, names), strict=True)) if names else {}
            for name, functions in observers.items():
                x = {**defaults, **batch, **values}[name]
                for function in functions:
                    function(x)
            bar.count_step()
    finally:
        bar.stop()


class RangeObserver:
    """The range of a value.

    Args:
        name: the name of the value, for errors.
        factory: a function from a spec to a calibrator; None for the least and the largest element.
    """

    def __init__(self, name: str, factory: Factory | None) -> None:
        self._name = name
        self._calibrator = None if factory is None else factory(QuantSpec(jnp.uint8))
        self._state: Any = None
        self._ends = (0.0, 0.0)

    def __call__(self, x: np.ndarray) -> None:
        """Count the elements of an array."""
        if not x.size:
            return
        lo, hi = float(x.min()), float(x.max())
        _require_finite(self._name, lo, hi)
        self._ends = (min(self._ends[0], lo), max(self._ends[1], hi))
        if self._calibrator is None:
            return
        flat, start = x.reshape(-1).astype(np.float32, copy=False), 0
        while start < flat.size:
            # The largest power of two that is left, so that few programs are compiled.
            length = min(_PIECE, 1 << (flat.size - start).bit_length() - 1)
            piece = flat[start : start + length]
            if self._state is None:
                self._state = self._calibrator.init(piece)
            self._state = self._calibrator.update(self._state, piece)
            start += length

    def read(self) -> tuple[float, float]:
        """Return the ends of the range, (0, 0) without elements."""
        if self._calibrator is None or self._state is None:
            return self._ends
        lo, hi = self._calibrator.finalize(self._state, allow_zero=True)
        return float(lo.reshape(())), float(hi.reshape(()))


def _require_finite(name: str, *numbers: Any) -> None:
    if not all(np.isfinite(number).all() for number in numbers):
        expected = "data for which all values of the model are finite"
        checks.refuse("onnx.quantize", "data", expected, f"a NaN or an infinity in {name!r}")


class MeanObserver:
    """The mean of a value for each index of an axis."""

    def __init__(self, axis: int) -> None:
        self._axis, self._sum, self._count = axis, np.zeros(()), 0

    def __call__(self, x: np.ndarray) -> None:
        """Count the elements of an array."""
        axes = tuple(i for i in range(x.ndim) if i != self._axis % x.ndim)
        self._sum = self._sum + x.sum(axes, dtype=np.float64)
        self._count += x.size // max(x.shape[self._axis], 1)

    def read(self) -> np.ndarray:
        """Return the means."""
        return self._sum / max(self._count, 1)


class MomentsObserver:
    """The mean of x x^T of the rows x of a value, along its last axis.

    Args:
        name: the name of the value, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name, self._sum, self._count = name, np.zeros(()), 0

    def __call__(self, x: np.ndarray) -> None:
        """Count the rows of an array."""
        _require_finite(self._name, x)
        rows = x.reshape(-1, x.shape[-1])
        self._sum = self._sum + (rows.T @ rows).astype(np.float64)
        self._count += len(rows)

    def read(self) -> np.ndarray:
        """Return the second moments as float32."""
        return (self._sum / max(self._count, 1)).astype(np.float32)
