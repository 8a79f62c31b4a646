"""Run oneDNN's own quantization ops, as a reference for tests.

Two PyPI packages ship oneDNN's shared library with the C interface of its Graph
API: ``onednn`` (3.13 and on, with the SYCL runtime, large) and
``onednn-cpu-gomp`` (up to 3.2, small). Each call of `run` builds a graph of one
op, has the library compile it and executes it, all through ctypes, so what
comes back is what oneDNN computes on this CPU. The numbers below come from the
library's public headers and are part of its ABI for major version 3.

Known of these versions:
    3.2: the static ops require zps and apply the first one to every channel; the dynamic ops
        abort with zps per channel; there are no groups, 4-bit values or 16-bit floats. NaN
        quantizes to 127 in int8.
    3.13: no op takes zps per channel, except that the static ones take zeros; DynamicDequantize
        alone takes groups, 4-bit values and 16-bit floats. It misreads a 16-bit scale that is the
        only one. NaN quantizes to 0 or the greatest value where every scale is a static 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import math
import os
import pathlib
from typing import Any

import numpy as np

_PACKAGES = ("onednn", "onednn-cpu-gomp")  # The first one that is installed is used.
# The dependencies of libdnnl.so and of SYCL's CPU driver in the first package, in order of loading.
_SYCL_LIBRARIES = ("libtbb.so.12", "libintlc.so.5", "libimf.so", "libsvml.so", "libsycl.so.*")

_STATUSES = (
    *("success", "out_of_memory", "invalid_arguments", "unimplemented", "last_impl_reached"),
    *("runtime_error", "not_required", "invalid_graph", "invalid_graph_op", "invalid_shape"),
    "invalid_data_type",
)
_OPS = {"Dequantize": 19, "DynamicDequantize": 21, "DynamicQuantize": 22, "Quantize": 49}
# "bfloat16" is the name of the dtype of ml_dtypes.
_DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "int32": 4, "int8": 5, "uint8": 6}
_FOUR_BIT = {"int8": 11, "uint8": 12}
_ATTR_SCALES, _ATTR_AXIS, _ATTR_ZPS, _ATTR_GROUP_SHAPE, _ATTR_QTYPE = 0x20, 0x30, 0x4D, 0x4E, 0x85
_ENGINE_CPU = 1
_STREAM_IN_ORDER = 1
# One partition for each op. For a graph of one op the fusing policy gives the same result, but takes
# milliseconds to match its patterns.
_POLICY_DEBUG = 2
_LAYOUT_STRIDED = 2
_PROPERTY_VARIABLE = 1
_MAX_NDIMS = 12

_Ptr = ctypes.c_void_p
_Size = ctypes.c_size_t
_Int = ctypes.c_int

# Spelled out because ctypes would otherwise pass a 64-bit handle or size as a 32-bit int.
_SIGNATURES: dict[str, list[Any]] = {
    "graph_op_destroy": [_Ptr],
    "graph_tensor_destroy": [_Ptr],
    "graph_graph_destroy": [_Ptr],
    "graph_partition_destroy": [_Ptr],
    "graph_compiled_partition_destroy": [_Ptr],
    "engine_create": [_Ptr, _Int, _Size],
    "stream_create": [_Ptr, _Ptr, ctypes.c_uint],
    "stream_wait": [_Ptr],
    "graph_logical_tensor_init_with_dims": [_Ptr, _Size, _Int, ctypes.c_int32, _Ptr, _Int, _Int],
    "graph_tensor_create": [_Ptr, _Ptr, _Ptr, _Ptr],
    "graph_op_create": [_Ptr, _Size, _Int, ctypes.c_char_p],
    "graph_op_add_input": [_Ptr, _Ptr],
    "graph_op_add_output": [_Ptr, _Ptr],
    "graph_op_set_attr_f32": [_Ptr, _Int, _Ptr, _Size],
    "graph_op_set_attr_s64": [_Ptr, _Int, _Ptr, _Size],
    "graph_op_set_attr_str": [_Ptr, _Int, ctypes.c_char_p, _Size],
    "graph_graph_create": [_Ptr, _Int],
    "graph_add_op": [_Ptr, _Ptr],
    "graph_graph_finalize": [_Ptr],
    "graph_graph_filter": [_Ptr, _Int],
    "graph_graph_get_partitions": [_Ptr, _Size, _Ptr],
    "graph_partition_is_supported": [_Ptr, _Ptr],
    "graph_partition_compile": [_Ptr, _Ptr, _Size, _Ptr, _Size, _Ptr, _Ptr],
    "graph_compiled_partition_create": [_Ptr, _Ptr],
    "graph_compiled_partition_execute": [_Ptr, _Ptr, _Size, _Ptr, _Size, _Ptr],
}


class OneDnnError(RuntimeError):
    """oneDNN refused an op or failed.

    Attributes:
        step: the call that failed, without its ``dnnl_`` prefix.
        status: oneDNN's name for the failure, such as ``"unimplemented"``, or ``"would_crash"``
            for an op that is known to end the process and so was not tried.
    """

    def __init__(self, step: str, status: str) -> None:
        super().__init__(f"oneDNN: {step} failed: {status}")
        self.step = step
        self.status = status


class _Version(ctypes.Structure):
    # Only the leading fields: the library owns the whole struct.
    _fields_ = [("major", _Int), ("minor", _Int), ("patch", _Int)]


class _LogicalTensor(ctypes.Structure):
    _fields_ = [
        *(("id", _Size), ("ndims", _Int), ("dims", ctypes.c_int64 * _MAX_NDIMS)),
        *(("data_type", _Int), ("property", _Int), ("layout_type", _Int)),
        ("strides", ctypes.c_int64 * _MAX_NDIMS),
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the library.

    Raises:
        ImportError: no package, or a library that it links to, is missing.
    """
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            files = importlib.metadata.files(package) or []
            break
    else:
        raise ImportError(f"none of {_PACKAGES} is installed")
    # The wheels install into <prefix>/lib, outside site-packages.
    path = next((pathlib.Path(str(f.locate())).resolve() for f in files if f.name == "libdnnl.so"), None)
    if path is None:
        raise ImportError(f"the package {package} lists no libdnnl.so")
    try:
        if package == "onednn":
            # Without LD_LIBRARY_PATH, which cannot be set any more, the loader does not find these.
            for pattern in _SYCL_LIBRARIES:
                paths = sorted(path.parent.glob(pattern))
                ctypes.CDLL(str(paths[0] if paths else pattern), ctypes.RTLD_GLOBAL)
            # SYCL finds a CPU only through this driver, which the wheel does not register.
            os.environ.setdefault("OCL_ICD_FILENAMES", str(path.parent / "libintelocl.so"))
        library = ctypes.CDLL(str(path))
    except OSError as error:
        # onednn-cpu-gomp bundles no dependencies; the loader's message names the one it missed.
        needs = "onednn-cpu-gomp needs the system's libgomp.so.1 and libstdc++.so.6"
        raise ImportError(f"cannot load {package}: {error} ({needs})") from error
    library.dnnl_version.restype = ctypes.POINTER(_Version)
    if (major := library.dnnl_version().contents.major) != 3:
        raise ImportError(f"{package} is oneDNN {major}, not 3")
    for name, argtypes in _SIGNATURES.items():
        getattr(library, f"dnnl_{name}").argtypes = argtypes
    return library


def available() -> bool:
    """Return whether oneDNN can be loaded."""
    try:
        _library()
    except ImportError:
        return False
    return True


def version() -> str:
    """oneDNN's version, as ``major.minor.patch``."""
    numbers = _library().dnnl_version().contents
    return f"{numbers.major}.{numbers.minor}.{numbers.patch}"


def _version_info() -> tuple[int, ...]:
    return tuple(map(int, version().split(".")))


def _call(name: str, *args: Any) -> None:
    if status := getattr(_library(), f"dnnl_{name}")(*args):
        raise OneDnnError(name, _STATUSES[status] if status < len(_STATUSES) else str(status))


def _owned(stack: contextlib.ExitStack, name: str, *args: Any) -> _Ptr:
    """Create an object that lives as long as `stack`."""
    handle = _Ptr()
    _call(f"{name}_create", ctypes.byref(handle), *args)
    stack.callback(_call, f"{name}_destroy", handle)
    return handle


@functools.cache
def _engine_and_stream() -> tuple[_Ptr, _Ptr]:
    # Shared by all calls and never destroyed: each new SYCL engine and stream leaks some memory.
    engine, stream = _Ptr(), _Ptr()
    _call("engine_create", ctypes.byref(engine), _ENGINE_CPU, 0)
    _call("stream_create", ctypes.byref(stream), engine, _STREAM_IN_ORDER)
    return engine, stream


def _pack(array: np.ndarray) -> np.ndarray:
    """Put two 4-bit values into each byte, the first in the low half."""
    flat = np.pad(array.view(np.uint8).ravel() & 15, (0, array.size % 2))
    packed: np.ndarray = flat[0::2] | flat[1::2] << 4
    return packed


def _logical(array: np.ndarray, tensor_id: int, four_bit: bool) -> _LogicalTensor:
    """Describe `array`, or with `four_bit` the result of `_pack`."""
    dtypes = _FOUR_BIT if four_bit else _DTYPES
    if array.dtype.name not in dtypes or not array.dtype.isnative:
        raise TypeError(f"no oneDNN data type for {array.dtype!r}")
    if array.ndim > _MAX_NDIMS:
        raise ValueError(f"rank {array.ndim} is above oneDNN's maximum, {_MAX_NDIMS}")
    logical = _LogicalTensor()
    dims = (ctypes.c_int64 * _MAX_NDIMS)(*array.shape)
    form = (dtypes[array.dtype.name], array.ndim, dims, _LAYOUT_STRIDED, _PROPERTY_VARIABLE)
    _call("graph_logical_tensor_init_with_dims", ctypes.byref(logical), tensor_id, *form)
    return logical


def _crashes(
    op: str, src: np.ndarray, scales: np.ndarray, zps: np.ndarray | None, qtype: str, four_bit: bool, dst_dtype: Any
) -> bool:
    """Return whether oneDNN is known to throw a C++ exception from its C functions, which ends the process."""
    if _version_info() < (3, 13):
        dynamic_zps = op.startswith("Dynamic") and zps is not None and scales.size > 1
        return qtype == "per_channel" and (src.size == 0 or dynamic_zps)
    if op != "DynamicDequantize" or (qtype == "per_channel" and zps is not None):
        return False
    if qtype == "per_group" and src.ndim == 1:
        return zps is None
    if four_bit:
        # A row of 4-bit values must end with a byte.
        rows = [] if zps is None or zps.itemsize > 1 else [math.prod(zps.shape[i:]) for i in range(1, zps.ndim)]
        return qtype == "per_tensor" or src.shape[-1] % 2 == 1 or any(row > 1 and row % 2 for row in rows)
    return src.dtype == np.uint8 and scales.dtype == np.dtype(dst_dtype) == np.float16


def _checked_axis(
    op: str, src: np.ndarray, scales: np.ndarray, qtype: str, axis: int, group_shape: tuple[int, ...] | None
) -> int:
    """Reject arguments that oneDNN would misread silently: it reads past the end if there are too few scales.

    Returns:
        The axis, counted from the front: a negative one is among what oneDNN misreads.
    """
    if qtype == "per_tensor":
        if op.startswith("Dynamic") and scales.ndim != 1:
            raise ValueError("scales must be of rank 1")
        return 0
    if not -src.ndim <= axis < src.ndim:
        raise ValueError(f"axis {axis} is out of range for rank {src.ndim}")
    axis %= src.ndim
    if qtype == "per_channel":
        expected: tuple[int, ...] = (src.shape[axis],)
    elif qtype == "per_group" and group_shape is not None and len(group_shape) == src.ndim:
        expected = tuple(-(-size // group) for size, group in zip(src.shape, group_shape, strict=True))
    else:
        raise ValueError(f"qtype {qtype!r} with groups of {group_shape}")
    if scales.shape != expected:
        raise ValueError(f"scales of shape {scales.shape}, not {expected}")
    return axis


def _set_attr(op: _Ptr, attr: int, values: Any, dtype: type[np.generic]) -> None:
    array = np.ascontiguousarray(values, dtype)
    kind = "f32" if dtype is np.float32 else "s64"
    _call(f"graph_op_set_attr_{kind}", op, attr, array.ctypes.data, array.size)


def _compile(stack: contextlib.ExitStack, engine: _Ptr, op: _Ptr, logicals: list[_LogicalTensor]) -> _Ptr:
    """Compile a graph of one op. The tensors are its inputs and, last, its output."""
    graph = _owned(stack, "graph_graph", _ENGINE_CPU)
    _call("graph_add_op", graph, op)
    _call("graph_graph_finalize", graph)
    _call("graph_graph_filter", graph, _POLICY_DEBUG)
    partition, supported = _Ptr(), ctypes.c_uint8()
    _call("graph_graph_get_partitions", graph, 1, ctypes.byref(partition))
    stack.callback(_call, "graph_partition_destroy", partition)
    _call("graph_partition_is_supported", partition, ctypes.byref(supported))
    if not supported.value:
        raise OneDnnError("graph_partition_is_supported", "unsupported")
    compiled = _owned(stack, "graph_compiled_partition", partition)
    *inputs, output = map(ctypes.addressof, logicals)
    pointers = (len(inputs), (_Ptr * len(inputs))(*inputs), 1, (_Ptr * 1)(output))
    _call("graph_partition_compile", partition, compiled, *pointers, engine)
    return compiled


def run(
    op: str,
    src: np.ndarray,
    scales: np.ndarray,
    zps: np.ndarray | None,
    *,
    qtype: str,
    axis: int = 1,
    dst_dtype: np.dtype,
    group_shape: tuple[int, ...] | None = None,
    four_bit: bool = False,
) -> np.ndarray:
    """Execute one quantization op in oneDNN.

    Only what keeps a call safe is checked here: whether the operands are legal is left to the
    library, whose verdict is what tests ask for.

    Args:
        op: ``"Quantize"``, ``"Dequantize"``, ``"DynamicQuantize"`` or ``"DynamicDequantize"``.
        src: the operand. The library sees a C-contiguous copy where it is not contiguous.
        scales: of rank 1, or of one value for each group. A float32 attribute of the static ops,
            an input of the dynamic ones.
        zps: the zero points, or None to leave them out. An attribute of the static ops, as int64;
            an input of the dynamic ones, in its own dtype.
        qtype: ``"per_tensor"``, ``"per_channel"`` or ``"per_group"``.
        axis: the channel axis, if per channel.
        dst_dtype: the dtype of the result.
        group_shape: the sizes of a group along each axis, if per group.
        four_bit: hand the values of `src`, int8 or uint8, to oneDNN as s4 or u4, and those of 8-bit
            `zps` too.

    Returns:
        A new array of the shape of `src`.

    Raises:
        OneDnnError: oneDNN refused or failed.
        ImportError: oneDNN cannot be loaded.
        ValueError, TypeError: an operand that the library would misread.
    """
    axis = _checked_axis(op, src, scales, qtype, axis, group_shape)
    if _version_info() < (3, 13) and (group_shape is not None or four_bit):
        raise OneDnnError("graph_op_create", "unimplemented")
    if _crashes(op, src, scales, zps, qtype, four_bit, dst_dtype):
        raise OneDnnError("graph_partition_compile", "would_crash")
    dynamic = op.startswith("Dynamic")
    operands = [src, scales, zps] if dynamic else [src]
    arrays = [np.asarray(array, order="C") for array in operands if array is not None]
    packed = [four_bit and i != 1 and array.itemsize == 1 for i, array in enumerate(arrays)] + [False]
    arrays.append(np.empty(src.shape, dst_dtype))
    logicals = [_logical(array, i, pack) for i, (array, pack) in enumerate(zip(arrays, packed, strict=True))]
    # Keep references until the end, because the library only borrows the memory.
    buffers = [_pack(array) if pack else array for array, pack in zip(arrays, packed, strict=True)]
    engine, stream = _engine_and_stream()
    with contextlib.ExitStack() as stack:
        handle = _owned(stack, "graph_op", 0, _OPS[op], op.encode())
        _call("graph_op_set_attr_str", handle, _ATTR_QTYPE, qtype.encode(), len(qtype))
        _set_attr(handle, _ATTR_AXIS, axis, np.int64)
        if group_shape is not None:
            _set_attr(handle, _ATTR_GROUP_SHAPE, group_shape, np.int64)
        if not dynamic:
            _set_attr(handle, _ATTR_SCALES, scales, np.float32)
            if zps is not None:
                _set_attr(handle, _ATTR_ZPS, zps, np.int64)
        for logical in logicals[:-1]:
            _call("graph_op_add_input", handle, ctypes.byref(logical))
        _call("graph_op_add_output", handle, ctypes.byref(logicals[-1]))
        compiled = _compile(stack, engine, handle, logicals)
        *inputs, output = (
            _owned(stack, "graph_tensor", ctypes.byref(logical), engine, buffer.ctypes.data).value
            for logical, buffer in zip(logicals, buffers, strict=True)
        )
        tensors = (len(inputs), (_Ptr * len(inputs))(*inputs), 1, (_Ptr * 1)(output))
        _call("graph_compiled_partition_execute", compiled, stream, *tensors)
        _call("stream_wait", stream)
    return arrays[-1]
