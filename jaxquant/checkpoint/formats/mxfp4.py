"""MXFP4 as gpt-oss has it: (experts, rows, inputs), two codes in a byte, and a power of two for each 32 inputs.

x = 2**(e - 127) * q. The rows of "gate_up_proj" are left as they are stored: the gate has the even ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ..._arrays.quantized_array import QuantizedArray
from ..info import Info, TensorInfo
from ..safetensors_files import SafetensorsFiles
from . import bits as streams
from . import family
from .family import refuse

_BLOCKS, _SCALES, _SIZE = "_blocks", "_scales", 32


class _Mxfp4(family.FamilyFormat):
    name = "mxfp4"
    ending = ""

    def recognizes_config(self, files: SafetensorsFiles) -> bool:
        """Return whether a configuration names this format."""
        return family.get_quantization(files.configs).get("quant_method") == "mxfp4"

    def list_tensors(self, files: SafetensorsFiles) -> Iterable[TensorInfo]:
        """Yield the quantized tensors."""
        excluded = family.get_names(family.get_quantization(files.configs), "modules_to_not_convert")
        ends = {name.removesuffix(end) for name in files.entries for end in (_BLOCKS, _SCALES) if name.endswith(end)}
        for name in (name for name in files.entries if name.endswith((_BLOCKS, _SCALES))):
            base = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
            if base not in ends:
                continue  # its other tensor came first
            ends.remove(base)
            family.check_not_excluded(base, family.find_pattern(excluded, base, family.is_part_of))
            parts = {part: base + part for part in (_BLOCKS, _SCALES) if base + part in files.entries}
            family.check_complete(base, parts, (_BLOCKS, _SCALES))
            stored = family.get_stored(files, parts[_BLOCKS], (family.UINT8,))
            if len(stored) < 2 or stored[-1] != _SIZE // 2:
                raise refuse(parts[_BLOCKS], "shape (..., blocks, 16)", f"shape {stored}")
            family.check_stored(files, parts[_SCALES], (family.UINT8, family.E8M0), stored[:-1])
            shape = (*stored[:-2], stored[-2] * _SIZE)
            extras = {"scale_dtype": files.entries[parts[_SCALES]].dtype}
            yield TensorInfo(base, "MXFP4", shape, stored=parts, extras=extras)

    def read(self, entry: TensorInfo, arrays: Mapping[str, np.ndarray], info: Info) -> QuantizedArray:
        """Return a quantized tensor of shape (..., rows, inputs)."""
        blocks = arrays[_BLOCKS]
        codes = streams.unpack_bits(blocks, 4, _SIZE).reshape(entry.shape).view(family.E2M1)
        return family.make_array(codes, 4, arrays[_SCALES].view(family.E8M0), dtype=family.BF16)

    def write(self, tensor: QuantizedArray, entry: TensorInfo, info: Info) -> Mapping[str, np.ndarray]:
        """Return the codes and the scales of a tensor."""
        family.check_written(entry, tensor, ("float4_e2m1fn",), (*(1,) * (len(entry.shape) - 1), _SIZE))
        counts = (*entry.shape[:-1], entry.shape[-1] // _SIZE)
        scale = family.write_floats(entry, tensor.scale, "scale", (family.E8M0,), counts)
        codes = np.asarray(tensor.codes).view(np.uint8).reshape(*counts, _SIZE)
        return {
            _BLOCKS: streams.pack_bits(codes, 4, np.uint8),
            _SCALES: scale.view(entry.extras["scale_dtype"]),
        }

    def declare(self, module: str, tensor: QuantizedArray, info: Info) -> family.Declared:
        """Return what a tensor would have in a file."""
        counts = (*tensor.shape[:-1], -(-tensor.shape[-1] // _SIZE))
        return {_BLOCKS: (family.UINT8, (*counts, _SIZE // 2)), _SCALES: (family.UINT8, counts)}

    def explain_float(self, name: str, info: Info) -> str:
        """Return why a tensor is stored as it is."""
        excluded = family.get_names(family.get_quantization(info.metadata), "modules_to_not_convert")
        return family.explain_float(name, info, lambda module: family.find_pattern(excluded, module, family.is_part_of))


FORMAT = _Mxfp4()
