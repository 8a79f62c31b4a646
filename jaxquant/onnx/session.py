"""Sessions of ONNX Runtime with integers that are exact on every processor."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto, helper, numpy_helper

from .._core import checks
from .limits import ModelError, is_large
from .model_file import save
from .saturation import read_model, write_unsigned_weights

LEVELS = {
    "disabled": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


@functools.cache
def probe_saturation() -> bool:
    """Return whether ONNX Runtime's sums of uint8 by int8 products saturate on this processor.

    It runs one small product in the runtime. x86-64 processors without VNNI saturate: AMD's before Zen 4, Intel's
    before Cascade Lake and Ice Lake, with AVX-512 or without. ARM processors do not.

    Returns:
        A bool, which is kept for the next call.

    Example:
        >>> import jaxquant as jq
        >>> isinstance(jq.onnx.probe_saturation(), bool)
        True

    Source: the runtime itself.
    """
    count = 64
    weights = numpy_helper.from_array(np.full((count, 16), 127, np.int8), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "w"], ["y"])], "probe",
        [helper.make_tensor_value_info("a", TensorProto.UINT8, [4, count])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [4, 16])], [weights],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    (sums,) = open_session(model, "all").run(None, {"a": np.full((4, count), 255, np.uint8)})
    return bool(np.any(np.asarray(sums) != 255 * 127 * count))


def make_session(
    model: ModelProto | str | os.PathLike[str],
    *,
    level: str = "all",
    options: onnxruntime.SessionOptions | None = None,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
) -> onnxruntime.InferenceSession:
    """Return a session of ONNX Runtime with integers that are exact on every processor.

    Where the processor's sums saturate, the session gets what `convert_weights_to_uint8` returns for the model. On all
    others it gets the model itself. `probe_saturation` tells which is the case.

    Args:
        model: an `onnx.ModelProto`, or the name of a file.
        level: the level of optimization: "disabled", "basic", "extended" or "all".
        options: further options of the session, such as the number of threads. Its level of optimization is set.
        providers: the runtime's execution providers.

    Returns:
        An `onnxruntime.InferenceSession`.

    Raises:
        TypeError: model is neither an `onnx.ModelProto` nor the name of a file.
        ValueError: level is unknown.
        ModelError: the file is damaged or unsafe, or ONNX Runtime cannot load the model.

    Example:
        >>> import numpy as np, jax.numpy as jnp, jaxquant as jq
        >>> codes = jnp.full((2, 1), 127, jnp.int8)
        >>> product = lambda x: jq.matmul_integer(x, codes)
        >>> model = jq.onnx.export(product, [jnp.zeros((1, 2), jnp.uint8)], input_names=["x"], weights="int8")
        >>> session = jq.onnx.make_session(model)
        >>> session.run(None, {"x": np.full((1, 2), 255, np.uint8)})  # 32767 where int16 saturates
        [array([[64770]], dtype=int32)]

    Source: `onnxruntime.InferenceSession`.
    """
    name = "onnx.make_session"
    checks.check_option(name, "level", level, tuple(LEVELS))
    proto = read_model(name, model)
    if probe_saturation():
        proto = write_unsigned_weights(proto)
    return open_session(proto, level, options, providers)


def open_session(
    model: ModelProto,
    level: str,
    options: onnxruntime.SessionOptions | None = None,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
) -> onnxruntime.InferenceSession:
    """Return a session of a model as it is; raise ModelError if ONNX Runtime cannot load it."""
    chosen: Any = options
    if chosen is None:
        chosen = onnxruntime.SessionOptions()
        # Errors only: the warnings of ONNX Runtime would go to the caller's standard error.
        chosen.log_severity_level = 3
    chosen.graph_optimization_level = LEVELS[level]
    try:
        if not is_large(model):
            return onnxruntime.InferenceSession(model.SerializeToString(), chosen, providers=list(providers))
        # Files that are still open cannot be removed on every system.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            path = os.path.join(folder, "model.onnx")
            save(model, path)
            return onnxruntime.InferenceSession(path, chosen, providers=list(providers))
    except Exception as error:  # the runtime's own types, which it does not document
        raise ModelError(f"ONNX Runtime cannot load the model: {error}") from error
