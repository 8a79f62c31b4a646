"""A QDQ graph as a fake-quantized one, whose weights are floats with gradients, and the way back to codes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._core import dtypes
from ..._onnx_ops.quantization import dequantize_linear, quantize_linear
from ..errors import ModelError
from .graph import Graph, Node

_DOMAIN = "jaxquant"
_CODES = (*dtypes.INTEGERS, *dtypes.SMALL_FLOATS)
# Operators without a derivative: those on codes in a form other than QDQ.
_BLOCKING = ("MatMulInteger", "ConvInteger", "DynamicQuantizeLinear", "QGemm", "DynamicQuantizeLSTM")
# Operators that move codes and leave them as they are, so that they do the same with the floats.
_ARRANGING = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Slice", "MaxPool")


def make_trainable(graph: Graph) -> Graph:
    """Return a graph in which constant codes are floats, and QuantizeLinear and DequantizeLinear are one operator.

    The operator is `jq.fake_quantize_linear`, which has gradients for its input and its scale.

    Raises:
        ModelError: the graph has operators on codes that have no derivative.
    """
    readers = _list_readers(graph)
    fake = {node.outputs[0]: names for node in graph.nodes if (names := _find_fake(graph, node, readers))}
    blocking = _list_blocking(graph) or _list_lost(graph, fake, readers)
    if blocking:
        text = (
            "trainable=True needs a model in QDQ form, or with products of codes as export writes those of static "
            f"ranges and float results; these operators have no derivative: {sorted(blocking)}"
        )
        raise ModelError(text)
    floats = {name for names in fake.values() for name in names}
    constants, nodes, scales = dict(graph.constants), [], set()
    for node in graph.nodes:
        if node.outputs[0] in fake:
            scales.add(node.inputs[1])
            nodes.append(_make_fake(graph, node))
        elif node.op == "DequantizeLinear" and node.inputs[0] in floats:
            nodes.append(_pass_on(node))
        elif _has_constant_codes(graph, node) and _are_alike(readers[node.inputs[0]]):
            name = node.inputs[0]
            constants[name] = _dequantize(graph, node)
            is_bias = graph.constants[name].dtype == np.int32
            scales.update([] if is_bias else [node.inputs[1]])
            nodes.append(_pass_on(node) if is_bias else _make_fake(graph, node))
        else:
            nodes.append(node)
    # A scalar of a Constant node would be no parameter, but a scale is trained.
    literals = frozenset(graph.literals - scales)
    return dataclasses.replace(graph, constants=constants, nodes=tuple(nodes), literals=literals)


def quantize_constants(graph: Graph, params: Mapping[str, Any]) -> Graph:
    """Return the graph that `make_trainable` took, with the codes and scales of trained parameters.

    The bias of a Conv or Gemm gets the scale of its accumulator, as ONNX Runtime requires.
    """
    constants = dict(graph.constants)
    for name, value in params.items():
        if name in constants and constants[name].dtype not in (*_CODES, dtypes.INT32):
            constants[name] = np.asarray(value).astype(constants[name].dtype).reshape(constants[name].shape)
    producers = {name: node for node in graph.nodes for name in node.outputs}
    readers = _list_readers(graph)
    for node in graph.nodes:
        if not _has_constant_codes(graph, node) or not _are_alike(readers[node.inputs[0]]):
            continue
        if node.inputs[0] not in params:
            continue
        codes, value = node.inputs[0], np.asarray(params[node.inputs[0]])
        if graph.constants[codes].dtype == np.int32:
            scale = _find_accumulator_scale(graph, node, producers, constants)
            if scale is not None:
                constants[node.inputs[1]] = scale
            steps = np.rint(value / constants[node.inputs[1]].reshape(-1))
            # The largest float32 below 2**31. A conversion of 2**31 itself would overflow.
            constants[codes] = np.clip(steps, -(2.0**31), 2.0**31 - 128).astype(np.int32)
        else:
            scale, point = (_read_part(constants, node, i) for i in (1, 2))
            options = {"axis": node.attributes.get("axis", 1), "block_size": node.attributes.get("block_size", 0)}
            dtype = graph.constants[codes].dtype
            constants[codes] = np.asarray(quantize_linear(value, scale, point, output_dtype=dtype, **options))
    return dataclasses.replace(graph, constants=constants)


def _list_readers(graph: Graph) -> dict[str, list[Node]]:
    readers: dict[str, list[Node]] = collections.defaultdict(list)
    for node in graph.nodes:
        for name in node.list_reads():
            readers[name].append(node)
    return readers


def _list_blocking(graph: Graph) -> set[str]:
    """Return the operators on codes that have no derivative, also those in subgraphs."""
    found = {node.op for node in graph.nodes if node.op in _BLOCKING or node.op.startswith("QLinear")}
    bodies = [value for node in graph.nodes for value in node.attributes.values() if isinstance(value, Graph)]
    return found.union(*(_list_blocking(body) for body in bodies))


def _list_lost(graph: Graph, fake: Collection[str], readers: Mapping[str, list[Node]]) -> set[str]:
    """Return the readers of codes that stay integers, where the gradient of what is before them would be lost."""
    codes = [
        node.outputs[0]
        for node in graph.nodes
        if node.op == "QuantizeLinear" and node.outputs[0] not in fake and node.inputs[0] not in graph.inputs
    ]
    lost = set()
    for name in codes:  # grows by what is arranged
        for use in readers[name]:
            if use.op in _ARRANGING:
                codes.append(use.outputs[0])
            else:
                lost.add(f"{use.op} of the codes of QuantizeLinear")
    return lost


def _find_fake(graph: Graph, node: Node, readers: Mapping[str, list[Node]]) -> set[str]:
    """Return the tensors of codes of a QuantizeLinear that are read as floats only, with its own constant scale."""
    if node.op != "QuantizeLinear" or node.inputs[1] not in graph.constants:
        return set()
    parts = [graph.constants.get(name) for name in node.inputs[1:] if name]
    pending, found = [node.outputs[0]], set()
    while pending:
        name = pending.pop()
        uses = readers[name]
        found.add(name)
        if name in graph.outputs or not uses:
            return set()
        for use in uses:
            # A scale for each index of an axis does not follow the elements. The largest code is that of the largest
            # value with a positive scale only.
            scale: Any = parts[0]
            is_arranged = use.op in _ARRANGING and use.inputs[0] == name and scale.size == 1
            if is_arranged and (use.op != "MaxPool" or scale.reshape(()) > 0):
                pending.append(use.outputs[0])
                continue
            others = [graph.constants.get(part) for part in use.inputs[1:] if part]
            if use.op != "DequantizeLinear" or len(parts) != len(others):
                return set()
            if any(a is None or b is None or not np.array_equal(a, b) for a, b in zip(parts, others, strict=True)):
                return set()
    return found


def _are_alike(uses: Sequence[Node]) -> bool:
    """Return whether all readers of codes make the same floats of them."""
    return all(use.op == "DequantizeLinear" for use in uses) and all(
        use.inputs == uses[0].inputs and use.attributes == uses[0].attributes for use in uses
    )


def _has_constant_codes(graph: Graph, node: Node) -> bool:
    if node.op != "DequantizeLinear":
        return False
    parts = [graph.constants.get(name) for name in node.inputs if name]
    return all(part is not None for part in parts) and parts[0].dtype in (*_CODES, dtypes.INT32)  # type: ignore[union-attr]


def _make_fake(graph: Graph, node: Node) -> Node:
    """Return the node that quantizes and dequantizes at once."""
    point = graph.constants.get("".join(node.inputs[2:3]))
    dtype: Any = np.dtype(np.uint8) if point is None else point.dtype
    if node.op == "DequantizeLinear":
        dtype = graph.constants[node.inputs[0]].dtype
    kept = {key: node.attributes[key] for key in ("axis", "block_size") if key in node.attributes}
    attributes = {**kept, "dtype": dtype}
    return dataclasses.replace(node, op="FakeQuantize", domain=_DOMAIN, attributes=attributes)


def _pass_on(node: Node) -> Node:
    return dataclasses.replace(node, op="Identity", domain="", inputs=node.inputs[:1], attributes={})


def _read_part(constants: Mapping[str, np.ndarray], node: Node, position: int) -> Any:
    """Return a scale or a zero point as jaxquant's operators take it, or None."""
    if len(node.inputs) <= position or not node.inputs[position]:
        return None
    array = constants[node.inputs[position]]
    return jnp.asarray(array.reshape(()) if array.size == 1 else array)


def _dequantize(graph: Graph, node: Node) -> np.ndarray:
    scale, point = (_read_part(graph.constants, node, i) for i in (1, 2))
    codes = jnp.asarray(graph.constants[node.inputs[0]])
    # A bias has rank 1, for which the default axis would be out of range.
    axis = 0 if codes.ndim == 1 else node.attributes.get("axis", 1)
    return np.asarray(
        dequantize_linear(codes, scale, point, axis=axis, block_size=node.attributes.get("block_size", 0))
    )


def _find_accumulator_scale(graph: Graph, node: Node, producers: Any, constants: Any) -> np.ndarray | None:
    """Return the product of the scales of x and w for a bias, in the shape of its scale; None if there is none."""
    for reader in graph.nodes:
        if reader.op not in ("Conv", "Gemm") or node.outputs[0] not in reader.inputs[2:3]:
            continue
        sources = [producers.get(name) for name in reader.inputs[:2]]
        if any(source is None or source.op != "DequantizeLinear" for source in sources):
            return None
        left, right = (constants.get(source.inputs[1]) for source in sources)
        shape = constants[node.inputs[1]].shape
        if left is None or right is None or left.size != 1 or right.size != int(np.prod(shape)):
            return None
        return (left.reshape(()) * right.reshape(-1)).astype(np.float32).reshape(shape)
    return None
