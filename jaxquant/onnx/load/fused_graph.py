"""A graph while rules of fusing replace its nodes: what the rules ask of it, and where ONNX Runtime changes a value."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .graph import Graph, Node, list_readers

PAIR = "DequantizeLinear"
# Operators that ONNX Runtime moves quantization past; each moves or selects elements of its first input.
MOVING = ("MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice")
# Operators that it runs on codes if they have the same scale and zero point before and after.
SANDWICHED = (*MOVING, "Flatten", "Expand", "Gather", "Identity")


# What operators on codes need of scales so that they compute what DequantizeLinear, operator, QuantizeLinear do. All
# scales are constant in the graph: one that is an input may be anything, so that patterns with one are not fused.


class Need(enum.Enum):
    """What an operator on codes needs of the scales of its operands."""

    SIGN = "positive"  # it compares codes, which are in the order of the values only with a positive scale
    CODES = "finite, not 0"  # codes go through, and quantizing their values has to give them back
    VALUES = "any"  # it computes with the values


# All operators that are fused. "DequantizeLinear" stands for a pair with an equal QuantizeLinear behind it.
NEEDS: dict[str, Need] = {
    **dict.fromkeys((*SANDWICHED, PAIR), Need.CODES),
    **dict.fromkeys(("MaxPool", "Softmax"), Need.SIGN),
    **dict.fromkeys(("Conv", "MatMul", "Gemm", "Add", "Mul", "Concat", "Where"), Need.VALUES),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid"), Need.VALUES),
}


def allows_scale(op: str, scale: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether an operator may run on codes of a dtype with a scale, or with several."""
    need = NEEDS[op]
    if need is Need.VALUES:
        return True
    values = np.abs(scale.astype(np.float64))
    # A zero point may be at either end, so that codes are this many steps away from it.
    steps = float(2 ** (8 * dtype.itemsize) - 1)
    largest = np.finfo(scale.dtype).max if scale.dtype.kind == "f" else np.finfo(np.float32).max
    gives_back = bool(np.all((values > 0) & (values * steps <= float(largest))))
    return gives_back and (need is Need.CODES or bool(np.all(scale > 0)))


class FusedGraph:
    """The nodes of a graph while they are replaced."""

    def __init__(self, graph: Graph, fusions: str, deviations: list[Deviation]) -> None:
        self.graph = graph
        self.fusions = fusions
        self.deviations = deviations
        self.nodes = list(graph.nodes)
        self.constants = dict(graph.constants)
        self.literals = set(graph.literals)
        self.names = {*graph.inputs, *graph.outputs, *graph.constants}
        for node in graph.nodes:
            self.names.update(node.outputs, node.list_reads())
        self.zero_points: dict[tuple[str, np.dtype], str] = {}
        self.index()

    def allows_deviation(self, node: Node, model: str, runtime: str, can_follow: bool = True) -> bool:
        """Note that a fusion changes the value by more than rounding; return whether it is made.

        Args:
            node: the node.
            model: what the model says.
            runtime: what ONNX Runtime computes.
            can_follow: whether "all" means to do the same.
        """
        if self.fusions == "safe":
            return False
        deviation = Deviation(node.label, node.op, model, runtime, can_follow)
        if deviation not in self.deviations:  # rules are applied several times
            self.deviations.append(deviation)
        return can_follow

    def allows_scale(self, op: str, node: Node) -> bool:
        """Return whether an operator may run on the codes of a DequantizeLinear, or before a QuantizeLinear."""
        dtype = self.derive_codes_dtype(node)
        return dtype is not None and allows_scale(op, self.constants[node.inputs[1]], dtype)

    def index(self) -> None:
        """Find the producer and the readers of each name."""
        self.producers = {name: node for node in self.nodes for name in node.outputs if name}
        self.readers = list_readers(self.nodes)

    def get_reader(self, node: Node) -> Node | None:
        """Return the first node that reads a node's result, if there is one."""
        return next(iter(self.readers[node.outputs[0]]), None)

    def match_dequantize(self, name: str) -> Node | None:
        """Return the DequantizeLinear that makes a value, if its scale is constant."""
        node = self.producers.get(name)
        if node is None or node.op != "DequantizeLinear" or self.derive_codes_dtype(node) is None:
            return None
        # ONNX Runtime's rules want a constant scale and zero point.
        return node if self.has_constants(node) else None

    def match_quantize(self, node: Node) -> Node | None:
        """Return the QuantizeLinear that is the only reader of a node, if its scale is constant."""
        readers = self.readers[node.outputs[0]]
        if len(readers) != 1 or readers[0].op != "QuantizeLinear" or node.outputs[0] in self.graph.outputs:
            return None
        (sink,) = readers
        if sink.inputs[0] != node.outputs[0]:
            return None
        return sink if self.has_constants(sink) else None

    def has_constants(self, node: Node) -> bool:
        """Return whether all inputs of a node after the first are constant, such as its scale and zero point."""
        return all(name in self.constants for name in node.inputs[1:] if name)

    def derive_codes_dtype(self, node: Node) -> np.dtype | None:
        """Return the dtype of the codes of a DequantizeLinear or QuantizeLinear, or None if it is unknown."""
        point = "".join(node.inputs[2:3])
        if point:
            return self.constants[point].dtype if point in self.constants else None
        if node.op == "QuantizeLinear":
            return None if node.attributes.get("output_dtype") else np.dtype(np.uint8)
        codes = node.inputs[0]
        if codes in self.constants:
            return self.constants[codes].dtype
        source = self.producers.get(codes)
        return self.derive_codes_dtype(source) if source is not None and source.op == "QuantizeLinear" else None

    def is_per_tensor(self, node: Node) -> bool:
        """Return whether a QuantizeLinear or DequantizeLinear has a single scale."""
        return self.constants[node.inputs[1]].size == 1

    def read_affine(self, node: Node) -> tuple[str, str]:
        """Return the names of the scale and of the zero point, which is made if the node has none."""
        scale, point = [*node.inputs[1:3], ""][:2]
        if point:
            return scale, point
        dtype = self.derive_codes_dtype(node)
        assert dtype is not None
        name = self.zero_points.get((scale, dtype))
        if name is None:
            name = self.hold(f"{scale}/zero point of {dtype}", np.zeros(self.constants[scale].shape, dtype))
            self.zero_points[scale, dtype] = name
        return scale, name

    def make_name(self, name: str) -> str:
        """Return a name that no value has: the model may have the first choice, or a rule applies to a value twice."""
        base, count = name, 1
        while name in self.names:
            count += 1
            name = f"{base} {count}"
        self.names.add(name)
        return name

    def hold(self, name: str, array: np.ndarray) -> str:
        """Add a constant that is no parameter, and return its name, which begins with this one."""
        name = self.make_name(name)
        self.constants[name] = array
        self.literals.add(name)
        return name

    def have_same_affine(self, source: Node, sink: Node) -> bool:
        """Return whether two nodes have the same single scale and zero point."""
        if not (self.is_per_tensor(source) and self.is_per_tensor(sink)):
            return False
        parts = (self.read_affine(node) for node in (source, sink))
        left, right = ([self.constants[name].reshape(()) for name in pair] for pair in parts)
        return all(a.dtype == b.dtype and a == b for a, b in zip(left, right, strict=True))


# Where ONNX Runtime's fusions change the value of a model by more than rounding.


_SHOWN = 8


class FusionWarning(UserWarning):
    """The warning for a model with a value that ONNX Runtime's fusions change by more than rounding.

    `load` warns once, and names the nodes, what the model says and what ONNX Runtime computes. To silence it after you
    have read it: `warnings.simplefilter("ignore", jaxquant.onnx.FusionWarning)`.
    """


class Deviation(NamedTuple):
    """A node that ONNX Runtime with all optimizations computes otherwise than the model says, by more than rounding.

    Attributes:
        node: what errors and tables call the node.
        op: its operator.
        model: what the model says.
        runtime: what ONNX Runtime computes.
        is_followed: whether the loaded function computes what ONNX Runtime does.
    """

    node: str
    op: str
    model: str
    runtime: str
    is_followed: bool

    def __str__(self) -> str:
        end = "" if self.is_followed else " (this function computes what the model says)"
        return f"{self.node}: {self.model}; ONNX Runtime {self.runtime}{end}"


def warn_of_deviations(deviations: Sequence[Deviation], stacklevel: int) -> None:
    """Warn once, if there are any."""
    if not deviations:
        return
    shown = [f"  {deviation}" for deviation in deviations[:_SHOWN]]
    if len(deviations) > _SHOWN:
        shown.append(f"  and {len(deviations) - _SHOWN} more, in fn.deviations")
    followed = any(deviation.is_followed for deviation in deviations)
    end = ' The loaded function does the same; fusions="safe" gives the value of the model.' if followed else ""
    text = f"ONNX Runtime's optimizations change the value of this model by more than rounding.{end}"
    warnings.warn("\n".join([text, *shown]), FusionWarning, stacklevel=stacklevel + 1)
