"""What ONNX Runtime computes on this machine: its kernels, and so some of its results, depend on the processor.

Each function runs a small model and looks at the result, because the name of a processor tells neither which kernel
ONNX Runtime has for it nor what that kernel does. `python -m tests.support.processor` prints the answers.
Of a processor with AVX2 and without VNNI: `qemu-x86_64 -cpu Haswell "$(command -v python)" -m tests.support.processor`.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from ..oracles import float_kernels_text


def _run(node: onnx.NodeProto, *inputs: np.ndarray) -> np.ndarray:
    """Return what one node computes from its inputs, in order."""
    kinds = [helper.np_dtype_to_tensor_dtype(x.dtype) for x in inputs]
    shapes = [x.shape for x in inputs]
    infos = [helper.make_tensor_value_info(*info) for info in zip(node.input, kinds, shapes, strict=True)]
    graph = helper.make_graph([node], "g", infos, [helper.make_empty_tensor_value_info(node.output[0])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, dict(zip(node.input, inputs, strict=True)))[0])


@functools.cache
def saturates() -> bool:
    """Return whether ONNX Runtime's products of uint8 by int8 saturate here, as on x86-64 without VNNI.

    The kernel multiplies uint8 codes a by int8 codes w, without their zero points, and adds the products of the
    elements 0 and 1, 2 and 3, and so on of the contracted axis in int16. A pair saturates where a[0] * w[0] +
    a[1] * w[1] is not in -32768 to 32767. As a is at most 255, it can only if the two weights have the same sign and a
    sum above 128 or below -128. The elements of a convolution's window follow each other by position, and at each
    position by channel. `tests.oracles.exact_products` tells the operators.
    """
    a, w = np.full((1, 2), 255, np.uint8), np.full((2, 1), 127, np.int8)
    total = int(_run(helper.make_node("MatMulInteger", ["a", "w"], ["y"]), a, w)[0, 0])
    assert total in (2 * 255 * 127, 2**15 - 1), total
    return total == 2**15 - 1


@functools.cache
def count_lanes() -> int:
    """Return how many partial sums ONNX Runtime's Softmax has here: 16 with AVX-512, 8 with AVX2, 0 if neither."""
    x = np.random.default_rng(0).normal(0, 3, (64, 77)).astype(np.float32)
    found = _run(helper.make_node("Softmax", ["x"], ["y"], axis=-1), x)
    return next((n for n in (16, 8) if np.array_equal(float_kernels_text.softmax(x, n), found)), 0)


if __name__ == "__main__":
    print(f"onnxruntime {onnxruntime.__version__}: uint8 by int8 saturates: {saturates()}; lanes: {count_lanes()}")
