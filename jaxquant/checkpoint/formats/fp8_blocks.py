"""float8_e4m3fn with a scale for each block of 128 x 128, as DeepSeek's models have it, for a row or for a tensor.

FBGEMM's models, "fbgemm_fp8", have a scale for each row.

x = q * s, with the shape (outputs, inputs) and, of experts, the number of experts in front.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ..._arrays.quantized_array import QuantizedArray
from ..info import Info, TensorInfo
from ..safetensors_files import SafetensorsFiles
from . import family
from .family import refuse, refuse_stored

_SCALES = ("weight_scale_inv", "weight_scale")
_DTYPES = (*family.FLOATS, family.E8M0)


class _Fp8Blocks(family.FamilyFormat):
    name = "fp8"

    def recognizes_config(self, files: SafetensorsFiles) -> bool:
        """Return whether a configuration names this format."""
        return family.get_quantization(files.configs).get("quant_method") in ("fp8", "fbgemm_fp8")

    def list_tensors(self, files: SafetensorsFiles) -> Iterable[TensorInfo]:
        """Yield the quantized tensors."""
        settings = family.get_quantization(files.configs)
        block = settings.get("weight_block_size")
        is_block = isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 2**31 for n in block)
        if block is not None and not is_block:
            raise refuse("weight_block_size", "two sizes", repr(block)[:100])
        family.get_setting(settings, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        modules = family.collect_modules(files.entries, (*_SCALES, "weight"), _SCALES)
        known = {name for parts in modules.values() for name in parts.values()}
        for name, entry in files.entries.items():
            if entry.dtype == family.E4M3 and name not in known:
                raise refuse_stored(files, name, f"a scale named {' or '.join(_SCALES)} beside float8", "none")
        for module, parts in modules.items():
            family.check_not_excluded(module, _find_excluded(settings, module))
            (scale,) = [leaf for leaf in parts if leaf != "weight"] if len(parts) == 2 else [_SCALES[0]]
            family.check_complete(module, parts, ("weight", scale))
            shape = family.get_stored(files, parts["weight"], (family.E4M3,))
            if len(shape) < 2:
                raise refuse(parts["weight"], "rank 2 or more", f"shape {shape}")
            stored = family.get_stored(files, parts[scale], _DTYPES)
            lead = (1,) * (len(shape) - 2)
            sizes = (*lead, *block) if block else (*lead, 1, shape[-1]) if stored == (*shape[:-1], 1) else shape
            sizes = tuple(max(n, 1) for n in sizes)
            counts = tuple(-(-n // size) for n, size in zip(shape, sizes, strict=True))
            if stored != counts and not (sizes == shape and stored in ((), (1,))):
                raise refuse(parts[scale], f"shape {counts}", f"shape {stored}")
            text = f"float8_e4m3fn, blocks of {block[0]} x {block[1]}" if block else "float8_e4m3fn"
            extras = {"role": scale, "sizes": sizes, "counts": counts, "stored": stored}
            yield TensorInfo(f"{module}.weight", text, shape, stored=parts, extras=extras)

    def read(self, entry: TensorInfo, arrays: Mapping[str, np.ndarray], info: Info) -> QuantizedArray:
        """Return a quantized tensor."""
        scale = arrays[entry.extras["role"]].reshape(entry.extras["counts"])
        blocks = family.derive_block_size(entry.shape, entry.extras["sizes"])
        return family.make_array(arrays["weight"], 8, scale, block_size=blocks)

    def write(self, tensor: QuantizedArray, entry: TensorInfo, info: Info) -> Mapping[str, np.ndarray]:
        """Return the codes and the scales of a tensor."""
        family.check_written(entry, tensor, ("float8_e4m3fn",), entry.extras["sizes"])
        scale = family.write_floats(entry, tensor.scale, "scale", _DTYPES, entry.extras["counts"])
        return {"weight": np.asarray(tensor.codes), entry.extras["role"]: scale.reshape(entry.extras["stored"])}

    def declare(self, module: str, tensor: QuantizedArray, info: Info) -> family.Declared:
        """Return what a tensor would have in a file."""
        has_blocks = family.get_quantization(info.metadata).get("weight_block_size") is not None
        leaf = _SCALES[0] if has_blocks else _SCALES[1]
        return {".weight": family.get_type(tensor.codes), f".{leaf}": family.get_type(tensor.scale)}

    def explain_float(self, name: str, info: Info) -> str:
        """Return why a tensor is stored as it is."""
        settings = family.get_quantization(info.metadata)
        return family.explain_float(name, info, lambda module: _find_excluded(settings, module))


def _find_excluded(settings: family.Settings, module: str) -> str | None:
    """Return the pattern that excludes a module, or None."""
    excluded = [*family.get_names(settings, "modules_to_not_convert"), *family.get_names(settings, "ignored_layers")]
    return family.find_pattern(excluded, module, family.is_part_of)


FORMAT = _Fp8Blocks()
