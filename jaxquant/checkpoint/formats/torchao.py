"""torchao's tensors in safetensors files: plain int4, int8 and narrower integers, float8 and NVFP4.

The metadata of a file's header describe each tensor as JSON. The parts of "layer.weight" are "layer._weight_qdata",
"layer._weight_scale" and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..._arrays.parts import parse_json
from ..._arrays.quantized_array import QuantizedArray
from ..._core import checks
from ..info import Info, TensorInfo, shorten_name
from ..safetensors_files import SafetensorsFiles, SafetensorsFormat
from . import bits as streams
from . import family
from .family import refuse

_NAMES = "tensor_names"
_KINDS = ("Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor", "NVFP4Tensor")
_DTYPES = {"float32": family.F32, "float16": family.F16, "bfloat16": family.BF16}
_SIZE = 16  # the block of NVFP4


class _TorchAo(SafetensorsFormat):
    name = "torchao"

    def recognizes_config(self, files: SafetensorsFiles) -> bool:
        """Return whether the metadata of a header have torchao's list of tensors."""
        return _NAMES in files.metadata and '"_type"' in "".join(files.metadata.values())

    def list_tensors(self, files: SafetensorsFiles) -> Iterable[TensorInfo]:
        """Yield the quantized tensors."""
        names = _parse(files.metadata, _NAMES)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise refuse(_NAMES, "a list of names", type(names).__name__)
        for name in names:
            description = _parse(files.metadata, name)
            kind = description.get("_type") if isinstance(description, dict) else None
            if kind == "Tensor":
                continue
            if kind not in _KINDS:
                got = f"{shorten_name(repr(kind)[:100])}; quantize the model with a plain layout to read it"
                raise refuse(name, f"a tensor of {', '.join(_KINDS)}", got)
            module, _, leaf = name.rpartition(".")
            prefix = f"{module}._{leaf}_"
            roles = _get(name, description, "_tensor_data_names", list)
            parts = {str(role): f"{prefix}{role}" for role in roles}
            family.check_complete(name, dict.fromkeys(files.entries, ""), list(parts.values()))
            yield _describe(files, name, kind, _get(name, description, "_data", dict), parts)

    def read(self, entry: TensorInfo, arrays: Mapping[str, np.ndarray], info: Info) -> QuantizedArray:
        """Return a quantized tensor of shape (..., outputs, inputs)."""
        extras = entry.extras
        for role in set(arrays) - {"qdata", "scale", "zero_point", "per_tensor_scale"}:
            extras.setdefault("kept", {})[role] = arrays[role].copy()  # what prepares activations
        kind, qdata, scale = extras["kind"], arrays["qdata"], arrays["scale"]
        if kind == "Int4Tensor":
            codes = family.shift_codes(streams.unpack_bits(qdata, 4, entry.shape[-1]) ^ np.uint8(8), 4)
            scale, offset = (np.ascontiguousarray(np.swapaxes(arrays[r], -1, -2)) for r in ("scale", "zero_point"))
            return family.make_array(
                codes, 4, scale, offset=offset, signed_scale=True, arithmetic=scale.dtype, dtype=scale.dtype
            )
        if kind == "NVFP4Tensor":
            shared = arrays.get("per_tensor_scale", np.ones((), np.float32)).reshape((1,) * scale.ndim)
            codes = streams.unpack_bits(qdata, 4, entry.shape[-1]).view(family.E2M1)
            return family.make_array(codes, 4, family.make_array(scale, 8, shared), dtype=extras["dtype"])
        scale = scale.reshape(extras["counts"])
        if kind == "Float8Tensor":
            return family.make_array(qdata, 8, scale, dtype=extras["dtype"])
        zeros = arrays.get("zero_point")
        zeros = None if zeros is None else zeros.reshape(extras["counts"])
        return family.make_array(qdata, 8, scale, zeros, dtype=extras["dtype"])

    def write(self, tensor: QuantizedArray, entry: TensorInfo, info: Info) -> Mapping[str, np.ndarray]:
        """Return the parts of a tensor."""
        extras, kind = entry.extras, entry.extras["kind"]
        arrays: dict[str, np.ndarray] = dict(extras.get("kept", {}))
        sizes = extras["sizes"]
        codes = family.read_codes(tensor)
        stored = extras["scale_shape"]
        if kind == "Int4Tensor":
            counts = (*stored[:-2], stored[-1], stored[-2])
            scale = family.write_floats(entry, tensor.scale, "scale", family.FLOATS, counts)
            family.check_written(entry, tensor, ("int4",), sizes, ("offset",), arithmetic=scale.dtype)
            arrays["qdata"] = streams.pack_bits(codes.view(np.uint8) & np.uint8(15), 4, np.uint8)
            offset = np.zeros((1,) * len(counts), scale.dtype) if tensor.offset is None else tensor.offset
            offset = family.write_floats(entry, offset, "offset", (scale.dtype,), counts)
            arrays["scale"], arrays["zero_point"] = (
                np.ascontiguousarray(np.swapaxes(p, -1, -2)) for p in (scale, offset)
            )
            return arrays
        if kind == "NVFP4Tensor":
            family.check_written(entry, tensor, ("float4_e2m1fn",), sizes)
            nested = tensor.scale
            if not isinstance(nested, QuantizedArray) or nested.inverse_scale or nested.offset is not None:
                raise family.refuse_array(entry, "a scale of float8_e4m3fn times a float32", repr(nested))
            arrays["qdata"] = streams.pack_bits(codes.view(np.uint8), 4, np.uint8)
            arrays["scale"] = family.write_floats(entry, nested.codes, "scale", (family.E4M3,), stored)
            if "per_tensor_scale" in entry.stored:
                ones = (1,) * len(stored)
                shared = family.write_floats(entry, nested.scale, "scale of the tensor", (family.F32,), ones)
                arrays["per_tensor_scale"] = shared.reshape(extras["shared_shape"])
            return arrays
        forms = ("zero_point",) if "zero_point" in entry.stored else ()
        held = "float8_e4m3fn" if kind == "Float8Tensor" else "int8"
        family.check_written(entry, tensor, (held,), sizes, forms)
        arrays["qdata"] = codes
        scale = family.write_floats(entry, tensor.scale, "scale", family.FLOATS, extras["counts"])
        arrays["scale"] = scale.reshape(stored)
        if "zero_point" in entry.stored:
            zeros = np.zeros((1,) * len(extras["counts"]), extras["zero_dtype"])
            zeros = zeros if tensor.zero_point is None else tensor.zero_point
            zeros = family.write_floats(entry, zeros, "zero point", (extras["zero_dtype"],), extras["counts"])
            arrays["zero_point"] = zeros.reshape(extras["zero_shape"])
        return arrays


def _parse(metadata: Mapping[str, str], key: str) -> Any:
    """Return a JSON value of the metadata."""
    if key not in metadata:
        raise refuse(key, "a description in the metadata of the header", "none")
    try:
        return parse_json("checkpoint.load", key, metadata[key])
    except checks.ContractValueError as error:
        raise refuse(key, "JSON in the metadata of the header", error) from error


def _get(name: str, fields: Mapping[str, Any], key: str, kind: type) -> Any:
    """Return a field of a description; raise CheckpointError if it has another type."""
    value = fields.get(key)
    if not isinstance(value, kind):
        raise refuse(name, f"a description with {key!r}", shorten_name(repr(value)[:100]))
    return value


def _describe(
    files: SafetensorsFiles, name: str, kind: str, data: Mapping[str, Any], parts: Mapping[str, str]
) -> TensorInfo:
    """Return the description of a tensor; raise CheckpointError if its parts do not fit each other."""
    needed = {
        "Int4Tensor": ("qdata", "scale", "zero_point"),
        "IntxUnpackedToInt8Tensor": ("qdata", "scale", "zero_point"),
    }
    family.check_complete(name, parts, needed.get(kind, ("qdata", "scale")))
    held = {"Int4Tensor": (family.UINT8, family.INT8), "NVFP4Tensor": (family.UINT8,), "Float8Tensor": (family.E4M3,)}
    stored = family.get_stored(files, parts["qdata"], held.get(kind, (family.INT8,)))
    scale = family.get_stored(files, parts["scale"], (family.E4M3,) if kind == "NVFP4Tensor" else family.FLOATS)
    scale_dtype = files.entries[parts["scale"]].dtype
    extras: dict[str, Any] = {"kind": kind, "scale_shape": scale}
    is_packed = kind in ("Int4Tensor", "NVFP4Tensor")
    shape = (*stored[:-1], 2 * stored[-1]) if is_packed and stored else stored
    if data.get("is_swizzled_scales"):
        raise refuse(name, "scales in the order of the blocks", "scales that are arranged for a processor")
    if kind == "NVFP4Tensor":
        counts = (*shape[:-1], shape[-1] // _SIZE)
        if shape[-1] % _SIZE or scale != counts:
            raise refuse(parts["scale"], f"shape {counts}", f"shape {scale}")
        if "per_tensor_scale" in parts:
            extras["shared_shape"] = family.get_stored(files, parts["per_tensor_scale"], (family.F32,))
            if math.prod(extras["shared_shape"]) != 1:
                raise refuse(parts["per_tensor_scale"], "one element", f"shape {extras['shared_shape']}")
        extras |= {"dtype": _get_dtype(name, data, "orig_dtype"), "sizes": (*(1,) * (len(shape) - 1), _SIZE)}
        return TensorInfo(name, "torchao, NVFP4", shape, stored=dict(parts), extras=extras)
    block = data.get("block_size")
    is_block = isinstance(block, list) and all(type(n) is int and 0 < n < 2**40 for n in block)
    if not is_block or len(block) not in (len(shape), 0):  # type: ignore[arg-type]
        raise refuse(name, f"a block_size of {len(shape)} sizes", shorten_name(repr(block)[:100]))
    assert isinstance(block, list)
    sizes = tuple(block) or shape
    if any(n % max(size, 1) for n, size in zip(shape, sizes, strict=True)):
        raise refuse(name, f"blocks that divide {shape}", sizes)
    counts = tuple(n // max(size, 1) for n, size in zip(shape, sizes, strict=True))
    extras["sizes"] = sizes
    expected = (*counts[:-2], counts[-1], counts[-2]) if kind == "Int4Tensor" and len(counts) > 1 else counts
    is_whole = math.prod(counts) == 1 and math.prod(scale) == 1
    if scale != expected and not (is_whole and kind != "Int4Tensor") and scale != _drop_ones(expected):
        raise refuse(parts["scale"], f"shape {expected}", f"shape {scale}")
    if kind == "Int4Tensor":
        family.check_stored(files, parts["zero_point"], (scale_dtype,), scale)
        return TensorInfo(name, "torchao, int4", shape, stored=dict(parts), extras=extras)
    extras |= {"counts": counts, "dtype": _get_dtype(name, data, "dtype")}
    if "zero_point" in parts:
        extras["zero_shape"] = family.get_stored(files, parts["zero_point"], (family.INT8, *family.FLOATS))
        extras["zero_dtype"] = files.entries[parts["zero_point"]].dtype
        if math.prod(extras["zero_shape"]) != math.prod(counts):
            raise refuse(parts["zero_point"], f"shape {counts}", f"shape {extras['zero_shape']}")
    text = {"Float8Tensor": "float8_e4m3fn"}.get(kind, "int8")
    return TensorInfo(name, f"torchao, {text}", shape, stored=dict(parts), extras=extras)


def _drop_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without its last dimension of 1: torchao leaves it out of the scales of rows."""
    return shape[:-1] if shape and shape[-1] == 1 else shape


def _get_dtype(name: str, data: Mapping[str, Any], key: str) -> np.dtype:
    """Return the dtype of the values of a tensor."""
    field = data.get(key)
    dtype = _DTYPES.get(str(field.get("_data"))) if isinstance(field, dict) else None
    if dtype is None:
        raise refuse(name, f"{key} of {', '.join(_DTYPES)}", shorten_name(repr(field)[:100]))
    return dtype


FORMAT = _TorchAo()
