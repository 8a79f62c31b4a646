"""Quantized graphs in ONNX's QDQ form, and their results and kernels in ONNX Runtime, without importing jaxquant."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from . import onnx_runtime

LEVELS = ("extended", "all")
# The kernels that compute with codes, and the operators that only move them.
INTEGER_KERNELS = frozenset(
    {
        *("QLinearConv", "QLinearMatMul", "QGemm", "QLinearAdd", "QLinearMul", "QLinearConcat", "QLinearAveragePool"),
        *("QLinearGlobalAveragePool", "MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "NhwcMaxPool"),
    }
)
Tensor = tuple[str, Any, Any]  # the name of codes, their scale and their zero point


@dataclasses.dataclass
class QdqGraph:
    """A graph in which each operator reads DequantizeLinear and is read by QuantizeLinear.

    Attributes:
        nodes: the nodes so far.
        constants: the initializers so far.
        feeds: the inputs.
        results: the names of the codes that the graph returns.
    """

    nodes: list[Any] = dataclasses.field(default_factory=list)
    constants: list[Any] = dataclasses.field(default_factory=list)
    feeds: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    results: dict[str, Any] = dataclasses.field(default_factory=dict)

    def feed(self, codes: np.ndarray, scale: Any, zero_point: Any) -> Tensor:
        """Add an input of codes."""
        name = f"x{len(self.feeds)}"
        self.feeds[name] = codes
        return name, scale, zero_point

    def hold(self, codes: np.ndarray, scale: Any, zero_point: Any = None) -> Tensor:
        """Add constant codes: weights, or a bias of int32."""
        return self._store(codes), scale, zero_point

    def apply(
        self, operator: str, inputs: Sequence[Tensor], scale: Any, zero_point: Any, *, axes: Sequence[int] = (0,),
        after: str | None = None, **attributes: Any,
    ) -> Tensor:  # fmt: skip
        """Add an operator, perhaps with another one after it, and the quantization of its result.

        Args:
            operator: the name in ONNX.
            inputs: the codes.
            scale: the scale of the result.
            zero_point: its zero point, in the dtype of its codes.
            axes: for each input, the axis along which its scale varies; the last one holds for the inputs after it.
            after: an operator of one input between this one and QuantizeLinear, such as "Relu".
            **attributes: those of the operator.
        """
        axes = (*axes, *(axes[-1],) * len(inputs))
        floats = [self._dequantize(*tensor, axis) for tensor, axis in zip(inputs, axes, strict=False)]
        shape = attributes.pop("shape", None)
        if shape is not None:  # an input of Reshape that is not quantized
            floats.append(self._store(np.asarray(shape, np.int64)))
        y = self._add(operator, floats, **attributes)
        if after is not None:
            y = self._add(after, [y])
        name = self._add("QuantizeLinear", [y, self._store(scale), self._store(zero_point)])
        self.results[name] = np.asarray(zero_point).dtype
        return name, scale, zero_point

    def run(self, level: str) -> tuple[dict[str, np.ndarray], list[str]]:
        """Return the codes at each quantization by name, and the operators of the optimized graph."""
        kind = helper.np_dtype_to_tensor_dtype
        feeds = [helper.make_tensor_value_info(n, kind(x.dtype), x.shape) for n, x in self.feeds.items()]
        results = [helper.make_tensor_value_info(n, kind(dtype), None) for n, dtype in self.results.items()]
        graph = helper.make_graph(self.nodes, "network", feeds, results, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "optimized.onnx"
            session = onnx_runtime.open_session(model, level, path)
            outputs = session.run(list(self.results), self.feeds)
            operators = [node.op_type for node in onnx.load(path).graph.node]
        return dict(zip(self.results, map(np.asarray, outputs), strict=True)), operators

    def _dequantize(self, name: str, scale: Any, zero_point: Any, axis: int) -> str:
        names = [name, self._store(scale)]
        if zero_point is not None:
            names.append(self._store(zero_point))
        return self._add("DequantizeLinear", names, **({"axis": axis} if np.ndim(scale) else {}))

    def _store(self, array: Any) -> str:
        name = f"constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def _add(self, operator: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"{operator}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name
