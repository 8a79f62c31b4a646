"""NVIDIA ModelOpt: NVFP4 and float8; (outputs, inputs).

NVFP4: x = q * (s * g), with a float8_e4m3fn scale s for each 16 inputs and a float32 g for the tensor, which the file
calls weight_scale_2. float8: x = q * s, one scale for the tensor.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..._arrays.quantized_array import QuantizedArray
from ..info import Info, TensorInfo
from ..safetensors_files import SafetensorsFiles
from . import bits as streams
from . import family
from .family import Settings, refuse

_LEAVES = ("weight", "weight_scale", "weight_scale_2")
_ALGORITHMS = ("NVFP4", "FP8", "NVFP4_AWQ", "MIXED_PRECISION")
_SIZE = 16


def get_settings(configs: Mapping[str, Any]) -> Settings:
    """Return the settings of a model, from hf_quant_config.json or config.json."""
    own = configs.get("hf_quant_config.json", {}).get("quantization")
    return own if isinstance(own, dict) else family.get_quantization(configs)


class _ModelOpt(family.FamilyFormat):
    name = "modelopt"

    def recognizes_config(self, files: SafetensorsFiles) -> bool:
        """Return whether a configuration names ModelOpt."""
        method = family.get_quantization(files.configs).get("quant_method")
        return method == "modelopt" or (method is None and "hf_quant_config.json" in files.configs)

    def list_tensors(self, files: SafetensorsFiles) -> Iterable[TensorInfo]:
        """Yield the quantized tensors."""
        settings = get_settings(files.configs)
        family.get_setting(settings, "quant_algo", _ALGORITHMS)
        family.get_setting(settings, "group_size", (_SIZE,), _SIZE)
        for module, parts in family.collect_modules(files.entries, _LEAVES, _LEAVES[1:]).items():
            family.check_not_excluded(module, _find_excluded(settings, module))
            family.check_complete(module, parts, ("weight", "weight_scale"))
            stored = family.get_stored(files, parts["weight"], (family.UINT8, family.E4M3))
            extras: dict[str, Any] = {"stored": files.entries[parts["weight_scale"]].shape}
            if files.entries[parts["weight"]].dtype == family.E4M3:
                family.get_stored(files, parts["weight_scale"], family.FLOATS)
                if extras["stored"] not in ((), (1,)) or "weight_scale_2" in parts:
                    raise refuse(parts["weight_scale"], "one scale for the tensor", f"shape {extras['stored']}")
                yield TensorInfo(f"{module}.weight", "float8_e4m3fn", stored, stored=parts, extras=extras)
                continue
            family.check_complete(module, parts, _LEAVES)
            if not stored:
                raise refuse(parts["weight"], "rank 1 or more", f"shape {stored}")
            shape = (*stored[:-1], 2 * stored[-1])
            counts = (*stored[:-1], -(-shape[-1] // _SIZE))
            family.check_stored(files, parts["weight_scale"], (family.E4M3,), counts)
            extras["shared"] = family.get_stored(files, parts["weight_scale_2"], (family.F32,))
            # Of stacked experts each has its own.
            extras["lead"] = (1,) * len(shape)
            if math.prod(extras["shared"]) != 1:
                extras["lead"] = (*extras["shared"], *(1,) * (len(shape) - len(extras["shared"])))
                if extras["shared"] != shape[: len(extras["shared"])] or len(extras["shared"]) > len(shape) - 2:
                    raise refuse(
                        parts["weight_scale_2"], "one scale, or one for each expert", f"shape {extras['shared']}"
                    )
            note = ""
            if f"{module}.pre_quant_scale" in files.entries:
                note = "for inputs that are multiplied by pre_quant_scale first"
            yield TensorInfo(f"{module}.weight", "NVFP4", shape, note=note, stored=parts, extras=extras)

    def read(self, entry: TensorInfo, arrays: Mapping[str, np.ndarray], info: Info) -> QuantizedArray:
        """Return a quantized tensor of shape (..., outputs, inputs)."""
        scale = arrays["weight_scale"]
        if "weight_scale_2" not in arrays:
            return family.make_array(arrays["weight"], 8, scale.reshape((1,) * len(entry.shape)))
        codes = streams.unpack_bits(arrays["weight"], 4, entry.shape[-1]).view(family.E2M1)
        shared = arrays["weight_scale_2"].reshape(entry.extras["lead"])
        nested = family.make_array(scale, 8, shared)
        blocks = family.derive_block_size(entry.shape, (*(1,) * (len(entry.shape) - 1), _SIZE))
        return family.make_array(codes, 4, nested, block_size=blocks, dtype=family.F32)

    def write(self, tensor: QuantizedArray, entry: TensorInfo, info: Info) -> Mapping[str, np.ndarray]:
        """Return the codes and the scales of a tensor."""
        stored = entry.extras["stored"]
        if "weight_scale_2" not in entry.stored:
            family.check_written(entry, tensor, ("float8_e4m3fn",), entry.shape)
            scale = family.write_floats(entry, tensor.scale, "scale", family.FLOATS, (1,) * len(entry.shape))
            return {"weight": np.asarray(tensor.codes), "weight_scale": scale.reshape(stored)}
        family.check_written(entry, tensor, ("float4_e2m1fn",), (*(1,) * (len(entry.shape) - 1), _SIZE))
        nested = tensor.scale
        if not isinstance(nested, QuantizedArray) or nested.inverse_scale or nested.offset is not None:
            got = repr(nested) if isinstance(nested, QuantizedArray) else nested.dtype
            raise family.refuse_array(entry, "a scale of float8_e4m3fn times a float32", got)
        codes = np.asarray(tensor.codes).view(np.uint8)
        shared = family.write_floats(entry, nested.scale, "second scale", (family.F32,), entry.extras["lead"])
        return {
            "weight": streams.pack_bits(codes, 4, np.uint8),
            "weight_scale": family.write_floats(entry, nested.codes, "scale", (family.E4M3,), stored),
            "weight_scale_2": shared.reshape(entry.extras["shared"]),
        }

    def declare(self, module: str, tensor: QuantizedArray, info: Info) -> family.Declared:
        """Return what a tensor would have in a file."""
        scale = tensor.scale
        if not isinstance(scale, QuantizedArray):
            return {".weight": family.get_type(tensor.codes), ".weight_scale": (np.dtype(scale.dtype), ())}
        return {
            ".weight": (family.UINT8, (*tensor.shape[:-1], tensor.shape[-1] // 2)),
            ".weight_scale": family.get_type(scale.codes),
            ".weight_scale_2": (np.dtype(scale.scale.dtype), ()),
        }

    def explain_float(self, name: str, info: Info) -> str:
        """Return why a tensor is stored as it is."""
        settings = get_settings(info.metadata)
        return family.explain_float(name, info, lambda module: _find_excluded(settings, module))


def _find_excluded(settings: Settings, module: str) -> str | None:
    """Return the pattern, with wildcards, that excludes a module, or None."""
    excluded = [*family.get_names(settings, "exclude_modules"), *family.get_names(settings, "ignore")]
    return family.find_pattern(excluded, module, lambda pattern, name: fnmatch.fnmatchcase(name, pattern))


FORMAT = _ModelOpt()
