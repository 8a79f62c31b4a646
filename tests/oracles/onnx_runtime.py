"""Models in ONNX Runtime, and one operator in onnx's reference implementation, without importing jaxquant."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ..support import processor
from . import exact_products

LEVELS = {
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
Arrays = Mapping[str, np.ndarray]
Optional = Mapping[str, np.ndarray | None]
# The version, such as (1, 32).
VERSION = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])


def tensor_type(dtype: Any) -> int:
    """Return ONNX's number for a numpy dtype."""
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def _plain(dtype: Any) -> bool:
    """Return whether ONNX Runtime's Python interface supports this dtype. It does not support 4 bits and float8."""
    return np.dtype(dtype).isbuiltin == 1


def present(feeds: Optional) -> dict[str, np.ndarray]:
    """Return the inputs that are not None."""
    return {n: np.asarray(a) for n, a in feeds.items() if a is not None}


def model(
    op: str, feeds: Optional, outputs: Mapping[str, Any], opset: int, domain: str, attributes: Mapping[str, Any]
) -> ModelProto:
    """Return a model of one operator. An input that is None is omitted.

    An input that cannot be fed is a constant of the model; an output that cannot be fetched goes through a
    DequantizeLinear of scale 1, which keeps every code of 16 bits or fewer as a float32.
    """
    fetched = {n if _plain(d) else f"{n}_codes": d for n, d in outputs.items()}
    given = present(feeds)
    names = [n if n in given else "" for n in feeds]
    nodes = [helper.make_node(op, names, list(fetched), domain=domain, **attributes)]
    constants = [numpy_helper.from_array(a, n) for n, a in given.items() if not _plain(a.dtype)]
    for name, dtype in outputs.items():
        if not _plain(dtype):
            nodes.append(helper.make_node("DequantizeLinear", [f"{name}_codes", "one"], [name]))
    if len(nodes) > 1:
        constants.append(numpy_helper.from_array(np.array(1, np.float32), "one"))
    graph = helper.make_graph(
        nodes,
        op,
        [
            # MatMulNBits needs the shape of its bias. The others share one session for all shapes.
            helper.make_tensor_value_info(n, tensor_type(a.dtype), a.shape if domain else None)
            for n, a in given.items()
            if _plain(a.dtype)
        ],
        [
            helper.make_tensor_value_info(n, tensor_type(d if _plain(d) else np.float32), None)
            for n, d in outputs.items()
        ],
        constants,
    )
    domains = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    built = helper.make_model(graph, opset_imports=domains)
    built.ir_version = 10
    return built


def open_session(model: ModelProto, level: str = "all", optimized: pathlib.Path | None = None, threads: int = 2) -> Any:
    """Return a session of ONNX Runtime in which the integer products of a model are exact on every processor.

    Products of floats with weights of a DequantizeLinear stay in floats; it would round the floats to 8 bits.

    Args:
        model: it stays as it is.
        level: the level of optimization: "none", "basic", "extended" or "all".
        optimized: the file that gets the optimized model.
        threads: the number of threads.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    exact = exact_products.make_exact(model) if processor.saturates() else model
    return onnxruntime.InferenceSession(exact.SerializeToString(), options, providers=["CPUExecutionProvider"])


@functools.lru_cache(maxsize=128)
def _session(serialized: bytes) -> onnxruntime.InferenceSession:
    return open_session(ModelProto.FromString(serialized))


def run(
    op: str, feeds: Optional, outputs: Mapping[str, Any], opset: int, /, domain: str = "", **attributes: Any
) -> list[np.ndarray]:
    """Run one operator in ONNX Runtime: numpy in, numpy out, in the dtypes asked for."""
    session = _session(model(op, feeds, outputs, opset, domain, attributes).SerializeToString())
    found = session.run(list(outputs), {n: a for n, a in present(feeds).items() if _plain(a.dtype)})
    return [np.asarray(f).astype(d) for f, d in zip(found, outputs.values(), strict=True)]


def ask(op: str, args: Sequence[Any], output: Any, domain: str = "", **attributes: Any) -> np.ndarray:
    """Run an operator of one output in ONNX Runtime, its inputs in order; None is an input that is left out."""
    feeds = {f"input{i}": None if a is None else np.asarray(a) for i, a in enumerate(args)}
    return run(op, feeds, {"y": output}, 21, domain=domain, **attributes)[0]


def reference(op: str, feeds: Arrays, outputs: Mapping[str, Any], opset: int, **attributes: Any) -> list[np.ndarray]:
    """Run one operator in onnx's reference implementation."""
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
