"""bitsandbytes: nf4 and fp4, two codes in a byte, the high one first, in blocks of the flattened tensor; and int8.

x = table[q] * absmax. With double quantization, absmax = map[a] * nested_absmax + offset, in blocks of the flattened a.
int8, (outputs, inputs): x = q * (SCB / 127), where SCB is the largest magnitude of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..._arrays import spec
from ..._arrays.parts import parse_json
from ..._arrays.quantized_array import QuantizedArray
from ..._arrays.spec import Codebook
from ..._core import checks
from ..info import Info, TensorInfo, shorten_name
from ..safetensors_files import SafetensorsFiles, SafetensorsFormat
from . import bits as streams
from . import family
from .family import refuse

_STATE = "quant_state.bitsandbytes__"
_STATES = (f"{_STATE}nf4", f"{_STATE}fp4")
_INT8_LEAVES = ("weight", "SCB", "weight_format")
_LEAVES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *_STATES)
_MOST_BYTES = 2**16
_DTYPES = {"float32": family.F32, "float16": family.F16, "bfloat16": family.BF16}
_CODES = "codes"  # the role of the tensor that has the name of the parameter


class _BitsAndBytes(SafetensorsFormat):
    name = "bitsandbytes"

    def recognizes_config(self, files: SafetensorsFiles) -> bool:
        """Return whether a configuration names bitsandbytes, or a tensor has its state."""
        settings = family.get_quantization(files.configs)
        if not {"quant_method", "load_in_4bit", "load_in_8bit"}.isdisjoint(settings):
            return settings.get("quant_method", "bitsandbytes") == "bitsandbytes"
        return any(_STATE in name for name in files.entries)

    def list_tensors(self, files: SafetensorsFiles) -> Iterable[TensorInfo]:
        """Yield the quantized tensors."""
        settings = family.get_quantization(files.configs)
        for module, parts in family.collect_modules(files.entries, _INT8_LEAVES, ("SCB",)).items():
            family.check_not_excluded(module, _find_excluded(settings, module))
            yield _describe_int8(files, module, parts)
        for parameter, parts in family.collect_modules(files.entries, _LEAVES, _LEAVES).items():
            family.check_not_excluded(parameter, _find_excluded(settings, parameter))
            state_role = next((role for role in _STATES if role in parts), _STATES[0])
            family.check_complete(parameter, parts, ("absmax", "quant_map", state_role))
            if parameter not in files.entries:
                raise refuse(parameter, "a tensor with the codes", "none of this name")
            yield _describe(files, parameter, parts, state_role)

    def read(self, entry: TensorInfo, arrays: Mapping[str, np.ndarray], info: Info) -> QuantizedArray:
        """Return a quantized tensor, of one dimension if blocks cross rows."""
        extras = entry.extras
        if "SCB" in arrays:
            extras["kept"] = {role: part.copy() for role, part in arrays.items() if role != "weight"}
            return QuantizedArray(arrays["weight"], _divide(arrays["SCB"]), signed_scale=True)
        extras["state"] = arrays[extras["state_role"]].copy()
        count = math.prod(entry.shape)
        data = arrays[_CODES].reshape(-1).view(np.uint8)
        codes = streams.unpack_bits(streams.swap_nibbles(data), 4, 2 * data.size)
        # The package quantizes the zeros that it appends to an odd number of elements.
        codes, extras["appended"] = codes[:count], codes[count:].copy()
        absmax = arrays["absmax"].reshape(extras["scale_shape"])
        scale: Any = absmax
        if extras["nested_sizes"] is not None:
            offset = np.full((1,) * absmax.ndim, extras["offset"], np.float32)
            nested = arrays["nested_absmax"].reshape(extras["nested_shape"])
            scale = family.make_array(
                absmax, 8, nested, offset=offset, dtype=family.F32,
                block_size=family.derive_block_size(absmax.shape, extras["nested_sizes"]),
                codebook=_make_book("dynamic8", arrays["nested_quant_map"]),
            )  # fmt: skip
        blocks = family.derive_block_size(entry.shape, extras["sizes"])
        book = _make_book(extras["kind"], arrays["quant_map"])
        extras["levels"] = book.levels
        codes = codes.reshape(entry.shape)
        return family.make_array(codes, 4, scale, block_size=blocks, codebook=book, dtype=extras["dtype"])

    def write(self, tensor: QuantizedArray, entry: TensorInfo, info: Info) -> Mapping[str, np.ndarray]:
        """Return the codes, the scales, the tables and the state of a tensor."""
        extras = entry.extras
        if "SCB" in entry.stored:
            family.check_written(entry, tensor, ("int8",), (1, entry.shape[1]))
            # SCB / 127 does not have every float32.
            if not np.array_equal(np.asarray(tensor.scale), _divide(extras["kept"]["SCB"]), equal_nan=True):
                raise family.refuse_array(entry, "the scales that were loaded", "others")
            return {"weight": np.asarray(tensor.codes), **extras["kept"]}
        family.check_written(entry, tensor, ("a codebook",), extras["sizes"])
        assert tensor.codebook is not None
        if tensor.codebook.levels != extras["levels"]:
            raise family.refuse_array(entry, f"the codebook {extras['kind']} that was loaded", tensor.codebook)
        codes = family.read_codes(tensor).reshape(-1)
        data = streams.pack_bits(np.append(codes, extras["appended"]), 4, np.uint8)
        arrays = {
            _CODES: streams.swap_nibbles(data).view(extras["stored_dtype"]).reshape(extras["stored_shape"]),
            "quant_map": np.asarray(tensor.codebook.levels, np.float32),
            extras["state_role"]: extras["state"],
        }
        scale = tensor.scale
        if extras["nested_sizes"] is None:
            absmax = family.write_floats(entry, scale, "scale", (family.F32,), extras["scale_shape"])
            return {**arrays, "absmax": absmax.reshape(extras["absmax_shape"])}
        if not isinstance(scale, QuantizedArray) or scale.codebook is None or scale.offset is None:
            raise family.refuse_array(entry, "a scale of 8 bits with a codebook and an offset", repr(scale))
        if not bool((np.asarray(scale.offset) == np.float32(extras["offset"])).all()):
            raise family.refuse_array(entry, f"a scale with the offset {extras['offset']}", "another offset")
        nested = family.write_floats(entry, scale.scale, "nested scale", (family.F32,), extras["nested_shape"])
        return {
            **arrays,
            "absmax": np.asarray(scale.codes).reshape(extras["absmax_shape"]),
            "nested_absmax": nested.reshape(-1),
            "nested_quant_map": np.asarray(scale.codebook.levels, np.float32),
        }

    def explain_float(self, name: str, info: Info) -> str:
        """Return why a tensor is stored as it is."""
        settings = family.get_quantization(info.metadata)
        return family.explain_float(name, info, lambda module: _find_excluded(settings, module))


def _divide(largest: np.ndarray) -> np.ndarray:
    """Return the scales of int8 codes from the largest magnitudes of rows."""
    return (largest / np.float32(127))[:, None]


def _describe_int8(files: SafetensorsFiles, module: str, parts: Mapping[str, str]) -> TensorInfo:
    """Return the description of a matrix of int8; raise CheckpointError if its tensors do not fit each other."""
    family.check_complete(module, parts, _INT8_LEAVES[:2])
    shape = family.get_stored(files, parts["weight"], (family.INT8,), 2)
    family.check_stored(files, parts["SCB"], (family.F32,), shape[:1])
    if "weight_format" in parts:
        family.check_stored(files, parts["weight_format"], (family.UINT8,), ())
        if files.read(parts["weight_format"]) != 0:
            raise refuse(parts["weight_format"], "0, for rows, to which bitsandbytes converts", "an older order")
    return TensorInfo(f"{module}.weight", "bitsandbytes int8", shape, stored=dict(parts))


def _find_excluded(settings: family.Settings, module: str) -> str | None:
    """Return the pattern that excludes a module, or None."""
    excluded = family.get_names(settings, "llm_int8_skip_modules")
    return family.find_pattern(excluded, module, family.is_part_of)


def _make_book(name: str, table: np.ndarray) -> Codebook:
    """Return the codebook of a table: jaxquant's own where it has the same numbers."""
    levels = tuple(float(level) for level in table)
    return spec.nf4 if levels == spec.nf4.levels else Codebook(name, levels)


def _describe(files: SafetensorsFiles, parameter: str, parts: Mapping[str, str], state_role: str) -> TensorInfo:
    """Return the description of a parameter; raise CheckpointError if its tensors do not fit its state."""
    kind = state_role.removeprefix(_STATE)
    label = parts[state_role]
    (length,) = family.get_stored(files, label, (family.UINT8,), 1)
    if length > _MOST_BYTES:
        raise refuse(label, f"at most {_MOST_BYTES} bytes", length)
    state = _parse_state(label, files.read(label).tobytes())
    if state.get("quant_type") != kind:
        raise refuse(label, f"the quant_type {kind!r}", shorten_name(repr(state.get("quant_type"))[:100]))
    shape, size = _get_lengths(label, state, "shape"), _get_length(label, state, "blocksize")
    dtype = _DTYPES.get(str(state.get("dtype")))
    if dtype is None:
        raise refuse(label, f"a dtype of {', '.join(_DTYPES)}", shorten_name(repr(state.get("dtype"))[:100]))
    count = math.prod(shape)
    entry = files.entries[parameter]
    if entry.dtype.itemsize * math.prod(entry.shape) not in (-(-count // 2), (-(-count // 2) + 1) // 2 * 2):
        raise refuse(parameter, f"{-(-count // 2)} bytes for {count} codes", f"{entry.dtype}{list(entry.shape)}")
    scales = -(-count // size)
    is_double = any(role.startswith("nested_") for role in parts)
    absmax_dtype = family.UINT8 if is_double else family.F32
    if math.prod(family.get_stored(files, parts["absmax"], (absmax_dtype,))) != scales:
        raise refuse(parts["absmax"], f"{scales} elements", f"shape {files.entries[parts['absmax']].shape}")
    family.check_stored(files, parts["quant_map"], (family.F32,), (16,))
    nested = None
    if is_double:
        family.check_complete(parameter, parts, ("nested_absmax", "nested_quant_map"))
        nested = _get_length(label, state, "nested_blocksize")
        family.check_stored(files, parts["nested_quant_map"], (family.F32,), (256,))
        family.check_stored(files, parts["nested_absmax"], (family.F32,), (-(-scales // nested),))
        if not isinstance(state.get("nested_offset"), float | int):
            raise refuse(label, "a number nested_offset", repr(state.get("nested_offset"))[:100])
    extras = _arrange(shape, size, nested)
    extras |= {
        "kind": kind, "dtype": dtype, "state_role": state_role, "offset": state.get("nested_offset"),
        "stored_shape": entry.shape, "stored_dtype": entry.dtype, "absmax_shape": files.entries[parts["absmax"]].shape,
    }  # fmt: skip
    text = f"bitsandbytes {kind}, blocks of {size}{', double quantization' if is_double else ''}"
    logical = extras.pop("shape")
    note = (
        "" if logical == shape else f"blocks cross the rows of {' x '.join(map(str, shape))}, so it has one dimension"
    )
    return TensorInfo(parameter, text, logical, note=note, stored={_CODES: parameter, **parts}, extras=extras)


def _arrange(shape: tuple[int, ...], size: int, nested: int | None) -> dict[str, Any]:
    """Return the shape in which blocks of the flattened tensor are blocks along axes, and the sizes of these blocks.

    Args:
        shape: the shape of the tensor.
        size: the elements of a block.
        nested: the scales of a nested block, or None without double quantization.
    """
    count = math.prod(shape)
    scales = -(-count // size)
    flat = {"shape": (count,), "sizes": (size,), "scale_shape": (scales,), "nested_sizes": None}
    if nested is not None:
        flat |= {"nested_sizes": (nested,), "nested_shape": (-(-scales // nested),)}
    if not shape or not count or shape[-1] % size:
        return flat
    each = shape[-1] // size  # the scales of a row
    scale_shape = (*shape[:-1], each)
    ones = (1,) * (len(shape) - 1)
    rows = {"shape": shape, "sizes": (*ones, size), "scale_shape": scale_shape, "nested_sizes": None}
    if nested is None:
        return rows
    if each % nested == 0:
        sizes = (*ones, nested)
    elif nested % each == 0 and len(shape) > 1 and (len(shape) == 2 or shape[-2] % (nested // each) == 0):
        sizes = (*ones[:-1], nested // each, each)
    else:
        return flat
    counts = tuple(-(-n // m) for n, m in zip(scale_shape, sizes, strict=True))
    return {**rows, "nested_sizes": sizes, "nested_shape": counts}


def _parse_state(label: str, text: bytes) -> dict[str, Any]:
    """Return the JSON object of a state."""
    try:
        state = parse_json("checkpoint.load", label, text)
    except checks.ContractValueError as error:
        raise refuse(label, "JSON", error) from error
    if not isinstance(state, dict):
        raise refuse(label, "a JSON object", type(state).__name__)
    return state


def _get_length(label: str, state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    if type(value) is not int or not 0 < value < 2**31:
        raise refuse(label, f"a positive int {key}", shorten_name(repr(value)[:100]))
    return value


def _get_lengths(label: str, state: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = state.get(key)
    is_shape = isinstance(value, list) and len(value) <= 8 and all(type(n) is int and 0 <= n < 2**40 for n in value)
    if not is_shape:
        raise refuse(label, f"a list of lengths {key}", shorten_name(repr(value)[:100]))
    assert isinstance(value, list)
    return tuple(value)


FORMAT = _BitsAndBytes()
