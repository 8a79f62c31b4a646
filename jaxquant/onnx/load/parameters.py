"""The constants of a graph: which become parameters, and which stay numpy arrays inside the function."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..._arrays.onnx_view import from_onnx
from ..._arrays.quantized_array import QuantizedArray
from ..._core import checks, dtypes
from ..limits import ModelError
from .graph import Graph, Node, list_small_powers, look_up_operator
from .interpret import list_static_names
from .values import put_on_device

_CODES = (*dtypes.INTEGERS, *dtypes.SMALL_FLOATS)
# Operators that add an int32 bias to an accumulator, and the position of that input.
_BIASES = {"QLinearConv": 8, "QGemm": 6, "DequantizeLinear": 0}
_MOST_SCALAR = 1
# Operators with weights, besides all operators with names that end with Normalization.
_LAYERS = (
    *("Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "FusedConv", "CausalConvWithState"),
    *("MatMul", "Gemm", "Einsum", "MatMulInteger", "QLinearMatMul", "QGemm", "FusedMatMul", "TransposeMatMul"),
    *("FusedGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits"),
    *("MatMulBnb4", "Attention", "QAttention"),
    *("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"),
)
# The axis of the weights, the second input, that is the features of the result.
_FEATURES = {"MatMul": -1, "FusedMatMul": -1, "Conv": 0, "ConvTranspose": 1}
# Operators that return their first input in another form.
_CONVERTING = (
    *("QuantizeLinear", "DequantizeLinear", "Cast", "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze"),
    "Flatten",
)


class QuantizedParameter(NamedTuple):
    """A parameter that is a QuantizedArray, and the constants of the graph that its parts stand for.

    Attributes:
        scale: the name of the scale.
        scale_shape: the shape of the scale in the graph.
        zero_point: the name of the zero point, or None if it stays a constant of zeros.
    """

    scale: str
    scale_shape: tuple[int, ...]
    zero_point: str | None


class Parameters(NamedTuple):
    """The parameters of a function, and how to make the graph's constants of them.

    Attributes:
        params: the parameters by the names of the initializers.
        weights: the parameters that are QuantizedArrays.
        constants: the other constants.
    """

    params: dict[str, Any]
    weights: dict[str, QuantizedParameter]
    constants: dict[str, np.ndarray]

    def list_parts(self) -> set[str]:
        """Return the names of the scales and zero points that are parts of QuantizedArrays."""
        return {part for weight in self.weights.values() for part in (weight.scale, weight.zero_point) if part}


def split_constants(graph: Graph) -> Parameters:
    """Return the parameters and the constants of a graph.

    The graph is the one before fusing: afterwards no DequantizeLinear tells which scale belongs to which codes.

    Parameters are floats, codes and int32 biases. Constants are scalars, shapes and other integers, what an operator
    must know when it is traced, the scales and zero points of operators on codes, exponents that are 2 or 3, and inputs
    that the user has given a value.
    """
    readers = _list_readers(graph)
    static = list_static_names(graph) | set(list_small_powers(graph))
    names = [name for name, array in graph.constants.items() if _is_parameter(graph, name, array, readers, static)]
    weights = _match_weights(graph, set(names), readers)
    params: dict[str, Any] = {}
    held = Parameters({}, weights, {}).list_parts()
    for name in names:
        if name in weights:
            params[name] = _make_weight(graph, name, weights[name], readers)
        elif name not in held:
            params[name] = put_on_device(graph.constants[name])
    rest = {name: array for name, array in graph.constants.items() if name not in params and name not in held}
    return Parameters(params, weights, rest)


def spread_parameters(params: Mapping[str, Any], parameters: Parameters) -> dict[str, Any]:
    """Return all constants of the graph by name; parameters come from `params`."""
    values: dict[str, Any] = dict(parameters.constants)
    for name, value in params.items():
        weight = parameters.weights.get(name)
        if weight is None or not isinstance(value, QuantizedArray):
            values[name] = value
            continue
        values[name] = value.codes
        values[weight.scale] = value.scale.reshape(weight.scale_shape)
        if weight.zero_point is not None and value.zero_point is not None:
            values[weight.zero_point] = value.zero_point.reshape(weight.scale_shape)
    return values


def list_scalars(graph: Graph) -> frozenset[str]:
    """Return the constants with one element that are no weights, such as the bounds of a Clip, a slope or a factor.

    A weight is read by a product, a convolution, a normalization or a recurrent operator, or is the bias that an Add
    adds to the single feature of one. A rank of 0 is no weight's.
    """
    weights = _list_weight_names(graph)
    single = {name: array for name, array in graph.constants.items() if array.size == 1}
    return frozenset(name for name, array in single.items() if array.ndim == 0 or name not in weights)


def _list_weight_names(graph: Graph) -> set[str]:
    """Return the names of values that are read as weights, also after conversions and in subgraphs."""
    producers = {name: node for node in graph.nodes for name in node.outputs if name}
    found: set[str] = set()
    # Backwards, so that all readers of a node's results come before the node.
    for node in reversed(graph.nodes):
        for subgraph in (value for value in node.attributes.values() if isinstance(value, Graph)):
            found |= _list_weight_names(subgraph) & set(subgraph.list_captures())
        if node.body is not None:
            inner = _list_weight_names(node.body)
            found |= {name for name, own in zip(node.inputs, node.body.inputs, strict=False) if own in inner}
        elif node.op == "Add":
            # Either operand may be the bias of the other one.
            sums = zip(node.inputs, reversed(node.inputs), strict=True)
            found |= {name for name, other in sums if _has_one_feature(graph, producers, other)}
        elif node.op in _LAYERS or node.op.endswith("Normalization"):
            found.update(node.inputs)
        elif node.op in _CONVERTING and node.outputs[0] in found:
            found.add(node.inputs[0])
    return found


def _has_one_feature(graph: Graph, producers: Mapping[str, Node], name: str) -> bool:
    """Return whether a value is the product of a layer with constant weights for one feature."""
    node = producers.get(name)
    if node is None or node.op not in _FEATURES:
        return False
    source = node.inputs[1]
    while source not in graph.constants:
        converted = producers.get(source)
        if converted is None or converted.op not in ("DequantizeLinear", "Identity", "Cast"):
            return False
        source = converted.inputs[0]
    weight = graph.constants[source]
    return weight.ndim > 1 and weight.shape[_FEATURES[node.op]] == 1


def can_train(array: np.ndarray) -> bool:
    """Return whether a constant can be a parameter: floats, codes, and biases of int32."""
    return _is_float(array.dtype) or array.dtype in (*_CODES, np.dtype(np.int32))


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype in (dtypes.BFLOAT16, *dtypes.SMALL_FLOATS)


def _list_readers(graph: Graph) -> dict[str, list[tuple[Node, int]]]:
    """Return for each name the nodes that read it and the positions of the inputs; -1 for a read in a subgraph."""
    readers: dict[str, list[tuple[Node, int]]] = collections.defaultdict(list)
    for node in graph.nodes:
        for position, name in enumerate(node.inputs):
            readers[name].append((node, position))
        for name in set(node.list_reads()) - set(node.inputs):
            readers[name].append((node, -1))
    return readers


def _is_parameter(graph: Graph, name: str, array: np.ndarray, readers: Any, static: set[str]) -> bool:
    dtype, uses = array.dtype, readers[name]
    if name in graph.bound or (name in graph.literals and array.size <= _MOST_SCALAR):
        return False
    if dtype == np.int32:
        return any(_BIASES.get(node.op) == position for node, position in uses)
    if not (_is_float(dtype) or dtype in _CODES):
        return False
    # The scales of DequantizeLinear are among what operators keep; the scale of constant codes belongs to the codes.
    return name not in static and bool(uses or name in graph.outputs)


def _match_weights(graph: Graph, names: set[str], readers: Any) -> dict[str, QuantizedParameter]:
    """Return the codes that a DequantizeLinear turns into floats, with a scale that nothing else has."""
    weights: dict[str, QuantizedParameter] = {}
    for node in graph.nodes:
        operator = look_up_operator(node)
        if operator is None or node.op != "DequantizeLinear" or node.inputs[0] not in names:
            continue
        codes, scale, *rest = node.inputs
        point = rest[0] if rest and rest[0] else None
        parts = [graph.constants.get(part) for part in (codes, scale, *([point] if point else []))]
        # Another reader takes the codes as an array, and not as a part of a QuantizedArray.
        if any(part is None for part in parts) or len(readers[codes]) > 1 or codes in weights:
            continue
        if len(readers[scale]) > 1 or graph.constants[codes].dtype not in _CODES:
            continue
        values = np.asarray(graph.constants[scale]).astype(np.float32)
        if not (values.size and np.all(np.isfinite(values)) and np.all(values > 0)):
            continue  # a QuantizedArray has positive scales
        # Zeros are None in a QuantizedArray, and a zero point that other nodes read stays a constant.
        own_point = point is not None and bool(np.any(graph.constants[point])) and len(readers[point]) == 1
        if point is not None and not own_point and np.any(graph.constants[point]):
            continue
        weights[codes] = QuantizedParameter(scale, graph.constants[scale].shape, point if own_point else None)
    return weights


def _make_weight(graph: Graph, name: str, weight: QuantizedParameter, readers: Any) -> QuantizedArray:
    """Return constant codes, their scale and their zero point as a QuantizedArray."""
    ((node, _),) = readers[name]
    codes, scale = (put_on_device(graph.constants[part]) for part in (name, weight.scale))
    point = None if weight.zero_point is None else put_on_device(graph.constants[weight.zero_point])
    if scale.size == 1:
        scale, point = scale.reshape(()), None if point is None else point.reshape(())
    axis, block = node.attributes.get("axis", 1), node.attributes.get("block_size", 0)
    try:
        return from_onnx(codes, scale, point, axis=axis, block_size=block)
    except (checks.ContractTypeError, checks.ContractValueError) as error:
        raise ModelError(f"{node.label}: {error}") from error
