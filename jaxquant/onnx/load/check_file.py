"""Checks of a decoded model before anything of it is converted: onnx's own checker, and our limits."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx

from .. import model_size
from ..errors import ModelError
from .limits import Limits
from .read_file import Source, find_folder, load_external_data, read_model

# The least opset whose element-wise operators broadcast as numpy does.
_LEAST_OPSET = 7
# A call inside a call takes some frames of Python's stack.
_MOST_NESTED_CALLS = 100
_STANDARD = ("", "ai.onnx")


def check(model: Source, *, limits: Limits | None = None) -> None:
    """Examine a model that may be damaged or hostile; raise ModelError that says what is wrong with it.

    The file is decoded, examined by onnx's checker, and held against limits that the checker does not have: the nodes
    that functions expand to, the bytes of tensors, and the places of external data. Nothing of the model is run. `load`
    does all this itself, and afterwards examines the shapes of all values.

    Args:
        model: the path of a file, its bytes, or an onnx.ModelProto, which may not have external data.
        limits: Static. What the model may take; None means Limits().

    Returns:
        None, if nothing is wrong.

    Raises:
        ModelError: the model is damaged, unsafe, or needs more than its limits.
        TypeError: `model` is none of these types.

    Example:
        >>> from jaxquant import onnx as jqonnx
        >>> jqonnx.check(b"")
        Traceback (most recent call last):
            ...
        jaxquant.onnx.errors.ModelError: expected a model with a graph, got none: the file is empty or is no ONNX model

    Source: ONNX 1.23, "Open Neural Network Exchange Intermediate Representation".
    """
    read_checked_model(model, Limits() if limits is None else limits)


def read_checked_model(source: Source, limits: Limits) -> onnx.ModelProto:
    """Return a model with its external data in it, after all checks."""
    model = read_model(source, limits)
    try:
        # Nodes are counted before the checker, which follows calls of functions, and external data is read after it has
        # seen the dims that say how many bytes there are.
        _check_opsets(model)
        _check_node_count(model, limits)
        _run_checker(model)
        load_external_data(model, find_folder(source), limits)
    except ModelError:
        raise
    except Exception as error:  # names that are no UTF-8, and other text that protobuf decodes late
        raise ModelError(f"the model is damaged: {type(error).__name__}: {error}") from error
    return model


def list_opsets(entries: Any) -> dict[str, int]:
    """Return the version of each domain that a model or a function imports."""
    return {"" if entry.domain in _STANDARD else entry.domain: entry.version for entry in entries}


def find_function_key(proto: Any) -> tuple[str, str, str]:
    """Return what identifies a function, from the function itself or from a node that calls it."""
    name = proto.op_type if isinstance(proto, onnx.NodeProto) else proto.name
    return ("" if proto.domain in _STANDARD else proto.domain, name, proto.overload)


def _check_opsets(model: onnx.ModelProto) -> None:
    version = list_opsets(model.opset_import).get("")
    latest = onnx.defs.onnx_opset_version()
    if version is not None and not _LEAST_OPSET <= version <= latest:
        raise ModelError(f"expected opset {_LEAST_OPSET} to {latest}, got {version}")


def _check_node_count(model: onnx.ModelProto, limits: Limits) -> None:
    """Count all nodes, those of a function once for each call: 30 functions can make 2**30 nodes."""
    functions = {find_function_key(function): function for function in model.functions}
    totals: dict[tuple[str, str, str], int] = {}
    active: set[tuple[str, str, str]] = set()

    def count(nodes: Any, depth: int) -> int:
        total = 0
        if depth > _MOST_NESTED_CALLS:
            raise ModelError(f"expected functions to be nested at most {_MOST_NESTED_CALLS} deep")
        for node in _list_nodes(nodes):
            key, total = find_function_key(node), total + 1
            if key in functions:
                if key in active:
                    raise ModelError(f"function {node.op_type!r} calls itself")
                # A total is kept: counting each call anew would take as long as expanding the functions.
                if key not in totals:
                    active.add(key)
                    totals[key] = count(functions[key].node, depth + 1)
                    active.remove(key)
                total += totals[key]
            if total > limits.nodes:
                raise ModelError(f"the model has more nodes than Limits.nodes = {limits.nodes}, functions expanded")
        return total

    # A function that nobody calls is checked for recursion, too: onnx's checker visits all.
    for function in model.functions:
        count(function.node, 0)
    count(model.graph.node, 0)


def _list_nodes(nodes: Any) -> Iterator[onnx.NodeProto]:
    """Yield nodes and those of their subgraphs."""
    # Not by recursion: the file decides how deep subgraphs are nested.
    pending = [nodes]
    while pending:
        for node in pending.pop():
            yield node
            for attribute in node.attribute:
                pending += [attribute.g.node] if attribute.HasField("g") else []
                pending += [graph.node for graph in attribute.graphs]


def _run_checker(model: onnx.ModelProto) -> None:
    """Run onnx's checker without `full_check`, whose shape inference takes exponential time on nested functions."""
    _check_no_external_attributes(model)
    try:
        onnx.checker.check_model(_make_checkable(model))
    except Exception as error:  # ValidationError, UnicodeDecodeError, ValueError for more than 2 GB
        raise ModelError(f"onnx's checker refuses the model: {error}") from error


def _make_checkable(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model without what the checker should not see, or the model itself.

    The checker would look for external data itself; as inputs the tensors take no part in its checks of data. So do the
    arrays of a model that is too large for it. It also refuses inputs and outputs without a shape, and outputs without
    a type, which ONNX Runtime accepts.
    """
    most = model_size.LARGEST_INNER_ARRAY if model_size.is_large(model) else np.inf
    outside = [t.data_location == onnx.TensorProto.EXTERNAL or len(t.raw_data) > most for t in model.graph.initializer]
    external = list(itertools.compress(model.graph.initializer, outside))
    values = (*model.graph.input, *model.graph.output)
    bare = [v for v in values if v.type.HasField("tensor_type") and not v.type.tensor_type.HasField("shape")]
    untyped = [v for v in model.graph.output if v.type.WhichOneof("value") is None]
    if not external and not bare and not untyped:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for value in copy.graph.output:
        if value.type.WhichOneof("value") is None:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    for value in (*copy.graph.input, *copy.graph.output):
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.SetInParent()
    if external:
        inner = list(itertools.compress(model.graph.initializer, map(operator.not_, outside)))
        del copy.graph.initializer[:]
        copy.graph.initializer.extend(inner)
        names = {value.name for value in copy.graph.input}
        for tensor in external:
            if tensor.name not in names:
                value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                copy.graph.input.append(value)
    return copy


def _check_no_external_attributes(model: onnx.ModelProto) -> None:
    """Raise if a tensor other than an initializer of the graph has external data: the checker would look for a file."""
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for attribute in (attribute for node in _list_nodes(nodes) for attribute in node.attribute):
            graphs = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
            tensors = [attribute.t] if attribute.HasField("t") else list(attribute.tensors)
            tensors += [tensor for graph in graphs for tensor in graph.initializer]
            for tensor in tensors:
                if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
                    raise ModelError(f"tensor {tensor.name!r}: external data is supported for initializers only")
