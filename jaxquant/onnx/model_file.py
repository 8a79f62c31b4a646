"""The file of a model: `save`, and reading with checks before anything is converted: onnx's checker, and our limits."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import operator
import os
import pathlib
import stat
from collections.abc import Iterable, Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .._core import checks, dtypes
from .limits import LARGEST_INNER_ARRAY, Limits, ModelError, is_large

# The least opset with element-wise operators that broadcast as numpy does.
_LEAST_OPSET = 7
# A call inside a call takes some frames of Python's stack.
_MOST_NESTED_CALLS = 100
_STANDARD = ("", "ai.onnx")
_MOST_DIMENSIONS = 32


def save(model: onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Write a model to a file; the arrays of a model of 2 GB or more go to a second file beside it.

    Args:
        model: what `export` returns, or any other model.
        path: the name of the file. The second file has the same name with ".data" appended, and replaces a file of this
            name.

    Returns:
        None.

    Raises:
        TypeError: model is not an `onnx.ModelProto`.
        OSError: the file cannot be written.

    Example:
        >>> import os, tempfile, jax.numpy as jnp
        >>> import jaxquant as jq
        >>> model = jq.onnx.export(lambda x: jnp.maximum(x, 0), [jnp.zeros(3)])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "relu.onnx")
        ...     jq.onnx.save(model, path)
        ...     os.path.exists(path)
        True

    Source: ONNX's external data.
    """
    got = checks.describe_value(model)
    checks.require_type(isinstance(model, onnx.ModelProto), "onnx.save", "model", "an onnx.ModelProto", got)
    path = os.fspath(path)
    # onnx would write text to a file with a name such as "model.json", which `load` does not read.
    kind = "protobuf"
    if not is_large(model):
        onnx.save_model(model, path, kind)
        return
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):  # for which onnx has an error of its own
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    # onnx appends to a file that exists.
    with contextlib.suppress(FileNotFoundError):
        os.remove(f"{path}.data")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)  # save_model moves the arrays out of the model that it is given
    onnx.save_model(
        copy, path, kind, save_as_external_data=True, location=f"{os.path.basename(path)}.data",
        size_threshold=LARGEST_INNER_ARRAY,
    )  # fmt: skip


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
        >>> import jaxquant as jq
        >>> jq.onnx.check(b"")
        Traceback (most recent call last):
            ...
        jaxquant.onnx.limits.ModelError: expected a model with a graph, got none: the file is empty or is no ONNX model

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
        folder = pathlib.Path(source).resolve().parent if isinstance(source, str | os.PathLike) else None
        load_external_data(model, folder, limits)
    except ModelError:
        raise
    except Exception as error:  # names that are no UTF-8, and other text that protobuf decodes late
        raise ModelError(f"the model is damaged: {type(error).__name__}: {error}") from error
    return model


def list_opsets(entries: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Return the version of each domain that a model or a function imports."""
    return {"" if entry.domain in _STANDARD else entry.domain: entry.version for entry in entries}


def read_function_key(proto: onnx.NodeProto | onnx.FunctionProto) -> tuple[str, str, str]:
    """Return what identifies a function, from the function itself or from a node that calls it."""
    name = proto.op_type if isinstance(proto, onnx.NodeProto) else proto.name
    return ("" if proto.domain in _STANDARD else proto.domain, name, proto.overload)


def _check_opsets(model: onnx.ModelProto) -> None:
    version = list_opsets(model.opset_import).get("")
    latest = onnx.defs.onnx_opset_version()
    if version is not None and not _LEAST_OPSET <= version <= latest:
        raise ModelError(f"expected opset {_LEAST_OPSET} to {latest}, got {version}")


def _check_node_count(model: onnx.ModelProto, limits: Limits) -> None:
    """Count all nodes, a function's once for each call: 30 functions can make 2**30 nodes."""
    functions = {read_function_key(function): function for function in model.functions}
    totals: dict[tuple[str, str, str], int] = {}
    active: set[tuple[str, str, str]] = set()

    def count(nodes: Iterable[onnx.NodeProto], depth: int) -> int:
        total = 0
        if depth > _MOST_NESTED_CALLS:
            raise ModelError(f"expected functions to be nested at most {_MOST_NESTED_CALLS} deep")
        for node in _list_nodes(nodes):
            key, total = read_function_key(node), total + 1
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


def _list_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and the nodes of their subgraphs."""
    # Not by recursion: the file decides how deep subgraphs are nested.
    pending = [nodes]
    while pending:
        for node in pending.pop():
            yield node
            for attribute in node.attribute:
                pending += [attribute.g.node] if attribute.HasField("g") else []
                pending += [graph.node for graph in attribute.graphs]


def _run_checker(model: onnx.ModelProto) -> None:
    """Run onnx's checker without `full_check`: its shape inference takes exponential time on nested functions."""
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
    most = LARGEST_INNER_ARRAY if is_large(model) else np.inf
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


# The bytes of a model, read and decoded; external data only from files in the model's folder.


Source = str | os.PathLike[str] | bytes | onnx.ModelProto


def read_model(source: Source, limits: Limits) -> onnx.ModelProto:
    """Return the model of a file, of bytes, or a copy of a ModelProto, with its external data in it."""
    if isinstance(source, onnx.ModelProto):
        model = onnx.ModelProto()
        model.CopyFrom(source)
    elif isinstance(source, bytes | bytearray | memoryview):
        model = _decode(bytes(source))
    elif isinstance(source, str | os.PathLike):
        model = _decode(_read_range(pathlib.Path(source), 0, None, limits.file_bytes))
    else:
        raise TypeError(f"jaxquant.onnx.load: model: expected a path, bytes or ModelProto, got {type(source).__name__}")
    if not model.HasField("graph"):
        raise ModelError("expected a model with a graph, got none: the file is empty or is no ONNX model")
    return model


def load_external_data(model: onnx.ModelProto, folder: pathlib.Path | None, limits: Limits) -> None:
    """Replace external data by the bytes of the files, which must be in `folder`."""
    # The limit is for all tensors together: many of them may name the same bytes.
    remaining = limits.file_bytes
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        if folder is None:
            raise ModelError(f"tensor {tensor.name!r} has external data, but the model was not loaded from a path")
        data = _read_tensor(tensor, folder, remaining)
        remaining -= len(data)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        tensor.raw_data = data


def _decode(data: bytes) -> onnx.ModelProto:
    try:
        return onnx.ModelProto.FromString(data)
    except Exception as error:  # DecodeError, UnicodeDecodeError, and whatever another protobuf raises
        raise ModelError(f"the bytes are not an ONNX model: {type(error).__name__}: {error}") from error


def _read_tensor(tensor: onnx.TensorProto, folder: pathlib.Path, remaining: int) -> bytes:
    """Return the bytes of a tensor with external data, after checking where they are and how many they are."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    name = f"the external data of tensor {tensor.name!r}"
    location = entries.get("location", "")
    path = pathlib.PurePosixPath(location)
    # Backslashes, and the colons after a drive and before a stream, are parts of paths on Windows.
    unsafe = not location or path.is_absolute() or "\\" in location or ":" in location or "\0" in location
    if unsafe or any(part in ("..", ".") for part in location.split("/")):
        raise ModelError(f"{name}: expected a relative path inside the model's folder, got {location!r}")
    target = folder / path
    # A symbolic link anywhere in the path would lead out of the folder.
    if os.path.realpath(target) != os.path.join(os.path.realpath(folder), *path.parts):
        raise ModelError(f"{name}: expected a file inside the model's folder, got {location!r}, which is a link")
    offset, length = (_read_number(name, key, entries.get(key)) for key in ("offset", "length"))
    expected = count_stored_bytes(count_elements(tensor), read_tensor_dtype(tensor))
    # The model contradicts itself, and nothing tells which of the two numbers is wrong.
    if length is not None and length != expected:
        raise ModelError(f"{name}: expected length {expected} by its dims and data type, got {length}")
    if expected > remaining:
        raise ModelError(f"{name} takes {expected} bytes; Limits.file_bytes leaves {remaining}")
    try:
        return _read_range(target, offset or 0, expected, remaining)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None


def _read_number(name: str, key: str, text: str | None) -> int | None:
    if text is None:
        return None
    # int() also takes signs, spaces, underscores and digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ModelError(f"{name}: expected a number as {key}, got {text[:40]!r}")
    return int(text)


def _read_range(path: pathlib.Path, offset: int, length: int | None, most: int) -> bytes:
    """Return `length` bytes of a regular file from `offset` on, or all of it; never more than `most`."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {str(path)!r}: {error}") from error
    # Of the open file: another one may get its name in the meantime.
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)  # `open` raises an error that names the number of a folder, and leaves it open
        raise ModelError(f"expected a regular file, got {str(path)!r}")
    with open(descriptor, "rb") as file:
        # A second name of a file may be one outside the folder. The model itself is the caller's choice.
        if length is not None and status.st_nlink > 1:
            raise ModelError(f"expected a file without hard links, got {str(path)!r}")
        size = status.st_size - offset if length is None else length
        if offset + size > status.st_size or size < 0:
            raise ModelError(f"expected bytes {offset} to {offset + size}, got a file of {status.st_size} bytes")
        if size > most:
            raise ModelError(f"the file has {size} bytes, more than Limits.file_bytes allows: {most}")
        file.seek(offset)
        data = file.read(size)
    if len(data) != size:
        raise ModelError(f"expected {size} bytes, got {len(data)}: the file became shorter")
    return data


# TensorProto to numpy, after checking that the data has as many elements as the dims say.


def read_tensor_dtype(tensor: onnx.TensorProto) -> np.dtype:
    """Return the numpy dtype of a tensor; raise ModelError for an unknown one, and for strings."""
    return read_onnx_dtype(tensor.data_type, f"tensor {tensor.name!r}")


def read_onnx_dtype(number: int, what: str) -> np.dtype:
    """Return the numpy dtype of a data type's number in ONNX."""
    try:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(number))
    except (KeyError, ValueError, TypeError, AttributeError):
        dtype = np.dtype(object)
    if dtype.kind in "OSU":
        raise ModelError(f"{what}: expected numbers, got the data type {number} of ONNX")
    return dtype


def count_elements(tensor: onnx.TensorProto) -> int:
    """Return the number of elements that the dims of a tensor declare."""
    if len(tensor.dims) > _MOST_DIMENSIONS or any(n < 0 for n in tensor.dims):
        raise ModelError(f"tensor {tensor.name!r}: expected at most 32 dims of 0 or more, got {list(tensor.dims)[:40]}")
    # Python's ints do not overflow: dims such as 2**62 would wrap around in int64.
    return math.prod(tensor.dims)


def count_stored_bytes(count: int, dtype: np.dtype) -> int:
    """Return the bytes of `count` elements in raw data, where elements of 2 and 4 bits are packed."""
    is_packed = dtype in dtypes.INTEGERS or dtype in dtypes.SMALL_FLOATS
    width = dtypes.count_packed_bits(dtype) if is_packed else 8 * dtype.itemsize
    return -(-count * width // 8)


def read_tensor(tensor: onnx.TensorProto) -> np.ndarray:
    """Return the array of a tensor."""
    dtype, count = read_tensor_dtype(tensor), count_elements(tensor)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise ModelError(f"tensor {tensor.name!r}: external data is supported in initializers and attributes only")
    # numpy would report only that a shape does not fit, without the name of the tensor.
    if tensor.HasField("raw_data"):
        expected, stored = count_stored_bytes(count, dtype), len(tensor.raw_data)
        if stored != expected:
            text = f"expected {expected} bytes for {list(tensor.dims)} of {dtype}, got {stored}"
            raise ModelError(f"tensor {tensor.name!r}: {text}")
    try:
        array = np.asarray(numpy_helper.to_array(tensor))
    except Exception as error:
        raise ModelError(f"tensor {tensor.name!r}: {error}") from error
    if array.size != count or array.dtype.kind in "OSU":
        raise ModelError(f"tensor {tensor.name!r}: expected {count} numbers, got {array.size} of {array.dtype}")
    return array
