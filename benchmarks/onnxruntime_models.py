"""ONNX Runtime's contestants: models of one node, with as many threads as XLA has.

Scales and zero points are initializers, as in a model file. `session.run` reads its numpy inputs in place. Its outputs
are new memory from its arena, which numpy receives without a copy.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .contest import Call, Missing

_IR_VERSION = 10
_INSTALLED = all(importlib.util.find_spec(module) is not None for module in ("onnx", "onnxruntime"))
_NOT_INSTALLED = Missing("not installed")


def threads() -> int:
    """Return the number of threads XLA:CPU takes by default: the processors this process may run on."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def single_node(
    operator: str,
    inputs: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray | None],
    *,
    outputs: Sequence[str] = ("y",),
    version: int = 13,
    domain: str = "",
    order: Sequence[str] | None = None,
    **attributes: Any,
) -> Call | Missing:
    """Return a call that runs one ONNX operator, or why there is none.

    Args:
        operator: the ONNX name.
        inputs: the arrays that are fed, by name, in the operator's order; they come before the constants.
        constants: the initializers; None omits an optional input.
        outputs: names for the outputs.
        version: the version of the ONNX operator set. (An attribute of QLinearSoftmax is called `opset`.)
        domain: the operator's, where it is not ONNX's own.
        order: the names of all inputs and constants in the operator's order, if the constants do not come last.
        **attributes: the node's attributes.
    """
    if not _INSTALLED:
        return _NOT_INSTALLED
    from onnx import helper

    names = [*inputs, *("" if array is None else name for name, array in constants.items())]
    node = helper.make_node(operator, list(order or names), list(outputs), domain=domain, **attributes)
    given = {name: array for name, array in constants.items() if array is not None}
    session = _session([node], inputs, given, outputs, version)
    feeds = dict(inputs)
    return lambda: session.run(None, feeds)


def store_unsigned(codes: np.ndarray) -> np.ndarray:
    """Return int8 codes, or their zero points, as uint8 that are 128 more: the same integers after the subtraction.

    Products of uint8 by uint8 have exact sums in ONNX Runtime on every processor. Those of uint8 by int8 saturate on
    x86-64 without VNNI.
    """
    return (codes.astype(np.int16) + 128).astype(np.uint8)


def products_saturate() -> bool | None:
    """Return whether ONNX Runtime's products of uint8 by int8 saturate on this processor, or None if there is none."""
    if not _INSTALLED:
        return None
    from jaxquant.onnx import probe_saturation

    return probe_saturation()


def many_nodes(
    nodes: Sequence[tuple[str, Sequence[str], str, Mapping[str, Any]]], inputs: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray], outputs: Sequence[str],
) -> Call | Missing:  # fmt: skip
    """Return a call that runs a graph of nodes: (operator, names of inputs, name of the output, attributes)."""
    if not _INSTALLED:
        return _NOT_INSTALLED
    from onnx import helper

    graph = [helper.make_node(op, list(names), [output], **attributes) for op, names, output, attributes in nodes]
    session = _session(graph, inputs, constants, outputs, 19)
    feeds = dict(inputs)
    return lambda: session.run(None, feeds)


def blocked_int4(
    x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, block_size: int
) -> tuple[Call | Missing, Call | Missing]:
    """Return QuantizeLinear to int4 along the last axis, once to be timed and once to be compared with.

    numpy cannot hold ONNX Runtime's packed int4, so the timed call leaves it in an OrtValue. That is fair: where
    numpy can hold a result, handing it over costs nothing either. The other call adds a Cast to int8.
    """
    if not _INSTALLED:
        return _NOT_INSTALLED, _NOT_INSTALLED
    import onnxruntime
    from onnx import TensorProto, helper

    inputs, constants = {"x": x}, {"scale": scale, "zero_point": zero_point}
    names = [*inputs, *constants]
    quantize = helper.make_node("QuantizeLinear", names, ["y"], axis=x.ndim - 1, block_size=block_size)
    widen = helper.make_node("Cast", ["y"], ["wide"], to=TensorProto.INT8)
    packed = _session([quantize], inputs, constants, ["y"], 21)
    wide = _session([quantize, widen], inputs, constants, ["wide"], 21)
    held = {"x": onnxruntime.OrtValue.ortvalue_from_numpy(x)}
    return lambda: packed.run_with_ort_values(None, held), lambda: wide.run(None, {"x": x})


def _session(
    nodes: Sequence[Any],
    inputs: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    opset: int,
) -> Any:
    from onnx import helper, numpy_helper

    graph = helper.make_graph(
        list(nodes),
        "benchmark",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in inputs.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    versions = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=_IR_VERSION)
    return open_session(model.SerializeToString())


def open_session(model: bytes) -> Any:
    """Return a session of a model, with as many threads as XLA has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads()
    # Threads that spin after a run would slow down the next measurement.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
