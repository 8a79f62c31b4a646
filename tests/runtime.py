"""ONNX Runtime and onnx's reference on one operator. Never imports jaxquant."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

Arrays = Mapping[str, np.ndarray]


def tensor_type(dtype: Any) -> int:
    """ONNX's number of a numpy dtype."""
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def _plain(dtype: Any) -> bool:
    """Whether ONNX Runtime's Python door takes and gives this dtype; it has none for 4 bits and float8."""
    return np.dtype(dtype).isbuiltin == 1


def model(op: str, feeds: Arrays, outputs: Mapping[str, Any], opset: int, attributes: Mapping[str, Any]) -> ModelProto:
    """A model of one operator.

    An input that cannot be fed is a constant of the model; an output that cannot be fetched goes through a
    DequantizeLinear of scale 1, which keeps every code of 16 bits or fewer as a float32.
    """
    fetched = {n if _plain(d) else f"{n}_codes": d for n, d in outputs.items()}
    nodes = [helper.make_node(op, list(feeds), list(fetched), **attributes)]
    constants = [numpy_helper.from_array(np.asarray(a), n) for n, a in feeds.items() if not _plain(a.dtype)]
    for name, dtype in outputs.items():
        if not _plain(dtype):
            nodes.append(helper.make_node("DequantizeLinear", [f"{name}_codes", "one"], [name]))
    if len(nodes) > 1:
        constants.append(numpy_helper.from_array(np.array(1, np.float32), "one"))
    graph = helper.make_graph(
        nodes,
        op,
        [helper.make_tensor_value_info(n, tensor_type(a.dtype), None) for n, a in feeds.items() if _plain(a.dtype)],
        [
            helper.make_tensor_value_info(n, tensor_type(d if _plain(d) else np.float32), None)
            for n, d in outputs.items()
        ],
        constants,
    )
    built = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    built.ir_version = 10
    return built


@functools.lru_cache(maxsize=128)
def _session(serialized: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])


def run(op: str, feeds: Arrays, outputs: Mapping[str, Any], opset: int, **attributes: Any) -> list[np.ndarray]:
    """Runs one operator in ONNX Runtime: numpy in, numpy out, in the dtypes asked for."""
    session = _session(model(op, feeds, outputs, opset, attributes).SerializeToString())
    found = session.run(list(outputs), {n: np.asarray(a) for n, a in feeds.items() if _plain(a.dtype)})
    return [np.asarray(f).astype(d) for f, d in zip(found, outputs.values(), strict=True)]


def reference(op: str, feeds: Arrays, outputs: Mapping[str, Any], opset: int, **attributes: Any) -> list[np.ndarray]:
    """Runs one operator in onnx's reference implementation."""
    node = helper.make_node(op, list(feeds), list(outputs), **attributes)
    graph = helper.make_graph(
        [node],
        op,
        [helper.make_tensor_value_info(n, tensor_type(a.dtype), None) for n, a in feeds.items()],
        [helper.make_tensor_value_info(n, tensor_type(d), None) for n, d in outputs.items()],
    )
    built = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    with np.errstate(all="ignore"):
        return [np.asarray(a) for a in ReferenceEvaluator(built).run(None, dict(feeds))]
