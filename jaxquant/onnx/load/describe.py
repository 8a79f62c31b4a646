"""A table of the nodes of a loaded model: what computes with codes, what with floats, and the bytes of constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..._arrays.quantized_array import QuantizedArray
from ..._core import dtypes
from ..saturation import FLOAT_RESULTS, PRODUCTS, TYPE_SOURCES, count_pairs
from .graph import Graph, Node

if TYPE_CHECKING:
    from .function import LoadedFunction

# Operators that read or write codes and whose names do not begin with QLinear.
_QUANTIZED = (
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QGemm"),
    *("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "MatMulNBits", "QuantizeBias"),
)
# Operators that give elements of their first input.
_ARRANGEMENTS = (
    *("Concat", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Pad", "Reshape", "Slice", "Split", "Squeeze"),
    *("Tile", "Transpose", "Unsqueeze"),
)
_CODES = (*dtypes.INTEGERS, *dtypes.SMALL_FLOATS)
_UINT8 = np.dtype(np.uint8)
# The input whose dtype is that of the result.
_POINTS = {**TYPE_SOURCES, "QuantizeLinear": 2}


def describe_function(fn: LoadedFunction, params: Any) -> str:
    """Return a table of the nodes that run, after fusing.

    Args:
        fn: the function that `load` returned.
        params: its parameters.

    Returns:
        A line for each node: its name, its operator, "integer" if it computes with codes or moves them, "quantized" if
        it converts between codes and floats or reads codes as floats, "float" otherwise, and the bytes of the constants
        it reads.
        The last lines are totals, and the products whose sums can saturate in ONNX Runtime on x86-64 without VNNI.
    """
    sizes = {name: _count_bytes(value) for name, value in params.items()}
    sizes.update({name: _count_bytes(array) for name, array in fn._parameters.constants.items()})
    codes = {name for name, value in params.items() if any(x.dtype in _CODES for x in jax.tree.leaves(value))}
    results: set[str] = set()  # tensors of codes that nodes compute
    rows = [("node", "operator", "kind", "bytes")]
    totals: dict[str, list[int]] = {}
    for label, node in _list_nodes(fn.graph, ""):
        kind = "integer" if _is_arrangement(node, results) else _find_kind(node, codes)
        if kind == "integer" or node.op in ("QuantizeLinear", "DynamicQuantizeLinear"):
            results.update(node.outputs if _is_arrangement(node, results) else _list_codes(node))
        # Removed, so that a constant counts for the first node that reads it only.
        size = sum(sizes.pop(name, 0) for name in dict.fromkeys(node.inputs))
        operator = f"{node.domain}.{node.op}" if node.domain else node.op
        rows.append((label, operator, kind, f"{size:,}"))
        total = totals.setdefault(kind, [0, 0])
        total[0], total[1] = total[0] + 1, total[1] + size
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3].rjust(widths[3])]) for row in rows]
    lines += [f"{kind}: {count} nodes, {size:,} bytes of constants" for kind, (count, size) in sorted(totals.items())]
    saturating = list(_list_saturating(fn, params))
    if saturating:
        names = ", ".join(saturating)
        lines.append(f"can saturate in ONNX Runtime on x86-64 without VNNI: {len(saturating)} products, {names}")
    return "\n".join(lines)


def _list_nodes(graph: Graph, prefix: str) -> list[tuple[str, Node]]:
    """Return all nodes with a label that says in which subgraph they are."""
    result = []
    for node in graph.nodes:
        label = f"{prefix}{node.outputs[0] or node.op}"
        result.append((label, node))
        for value in (*node.attributes.values(), node.body):
            if isinstance(value, Graph):
                result += _list_nodes(value, f"{label}/")
    return result


def _list_saturating(fn: LoadedFunction, params: Any) -> Iterator[str]:
    """Yield the labels of products of uint8 codes by int8 weights of which a pair of products can leave int16."""
    values: dict[str, Any] = {**fn._parameters.constants}
    for name, value in params.items():
        values[name] = value.codes if isinstance(value, QuantizedArray) else value
    kinds = {x.name: np.dtype(x.dtype) for x in fn.inputs}
    for label, node in _list_nodes(fn.graph, ""):
        _note_codes(node, values, kinds)
        for operands in PRODUCTS.get((node.domain, node.op), ()):
            names = [*node.inputs, *[""] * 12]  # without those at the end that are left out
            weights = values.get(names[operands.weights])
            kind = _UINT8 if operands.activations is None else kinds.get(names[operands.activations])
            if kind != _UINT8 or weights is None or weights.dtype != np.int8 or operands.weight_point is None:
                continue
            if node.op != "ConvInteger" and count_pairs(node.op, np.asarray(weights), node.attributes)[0]:
                yield label
                break


def _note_codes(node: Node, values: Mapping[str, Any], kinds: dict[str, np.dtype]) -> None:
    """Store the dtype of the codes that a node returns, if it returns codes."""
    if node.op == "DynamicQuantizeLinear":
        kinds[node.outputs[0]] = _UINT8
    elif node.op in FLOAT_RESULTS:
        return
    elif node.op in _POINTS:
        place = _POINTS[node.op]
        point = values.get(node.inputs[place]) if len(node.inputs) > place else None
        if point is not None:
            kinds[node.outputs[0]] = np.dtype(point.dtype)
        elif node.op == "QuantizeLinear":
            kinds[node.outputs[0]] = _UINT8
    elif node.inputs and node.inputs[0] in kinds:  # an operator that moves codes, or one on codes of one dtype
        kinds.update(dict.fromkeys(node.outputs, kinds[node.inputs[0]]))


def _is_arrangement(node: Node, results: set[str]) -> bool:
    """Return whether a node moves codes: it is no computation with floats, though its operator has no Q."""
    return node.op in _ARRANGEMENTS and bool(node.inputs) and node.inputs[0] in results


def _list_codes(node: Node) -> tuple[str, ...]:
    """Return the results of a node that are codes; QGemm without a zero point of the result returns floats."""
    if node.op == "QGemm":
        return tuple(node.outputs[:1]) if len(node.inputs) > 8 and node.inputs[8] else ()
    return tuple(node.outputs[:1]) if node.op.startswith("QLinear") or node.op.endswith("QuantizeLinear") else ()


def _find_kind(node: Node, codes: set[str]) -> str:
    if node.op in ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QuantizeBias", "MatMulNBits"):
        return "quantized"
    if node.op in _QUANTIZED or node.op.startswith("QLinear"):
        return "integer"
    return "quantized" if codes.intersection(node.inputs) else "float"


def _count_bytes(value: Any) -> int:
    """Return the bytes of an array or QuantizedArray, with codes of 4 and 2 bits packed."""
    total = 0
    for x in jax.tree.leaves(value):
        width = dtypes.count_packed_bits(np.dtype(x.dtype)) if x.dtype in _CODES else 8 * np.dtype(x.dtype).itemsize
        total += -(-x.size * width // 8)
    return total
