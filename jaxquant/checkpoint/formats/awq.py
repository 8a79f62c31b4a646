"""AWQ in its layout "GEMM": (inputs, outputs), with eight outputs in a word, in the order 0, 2, 4, 6, 1, 3, 5, 7.

x = (q - z) * s, in groups of inputs. The file stores z itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..._arrays.quantized_array import QuantizedArray
from ..info import Info, TensorInfo
from ..safetensors_files import SafetensorsFiles
from . import bits as streams
from . import family
from .family import Settings, refuse

_LEAVES = ("qweight", "qzeros", "scales")
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_INVERSE = tuple(_ORDER.index(i) for i in range(8))
_BITS = 4


def get_settings(configs: Mapping[str, Any]) -> Settings:
    """Return the settings of a model, from config.json or the older quant_config.json."""
    return family.get_quantization(configs) or configs.get("quant_config.json", {})


class _Awq(family.FamilyFormat):
    name = "awq"

    def recognizes_config(self, files: SafetensorsFiles) -> bool:
        """Return whether a configuration names AWQ."""
        settings = get_settings(files.configs)
        return settings.get("quant_method", "awq" if "quant_config.json" in files.configs else None) == "awq"

    def list_tensors(self, files: SafetensorsFiles) -> Iterable[TensorInfo]:
        """Yield the quantized tensors."""
        settings = get_settings(files.configs)
        family.get_setting(settings, ("bits", "w_bit"), (_BITS,))
        advice = ", which is arranged for other kernels; quantize the model with the version 'gemm'"
        family.get_setting(settings, "version", ("gemm", "GEMM"), "gemm", advice)
        size = family.get_size(settings, ("group_size", "q_group_size"))
        excluded = family.get_names(settings, "modules_to_not_convert")
        for module, parts in family.collect_modules(files.entries, _LEAVES, ("qweight", "qzeros")).items():
            family.check_not_excluded(module, family.find_pattern(excluded, module, family.is_part_of))
            family.check_complete(module, parts, _LEAVES)
            inputs, words = family.get_stored(files, parts["qweight"], (family.INT32,), 2)
            groups = family.count_groups(module, inputs, size)
            family.check_stored(files, parts["qzeros"], (family.INT32,), (groups, words))
            family.check_stored(files, parts["scales"], family.FLOATS, (groups, 8 * words))
            extras = {"group": inputs if size == -1 else size}
            yield TensorInfo(f"{module}.weight", "AWQ, 4 bits", (inputs, 8 * words), stored=parts, extras=extras)

    def read(self, entry: TensorInfo, arrays: Mapping[str, np.ndarray], info: Info) -> QuantizedArray:
        """Return a quantized tensor of shape (inputs, outputs)."""
        codes, zeros = (_restore(arrays[name]) for name in ("qweight", "qzeros"))
        blocks = family.derive_block_size(entry.shape, (entry.extras["group"], 1))
        return family.make_array(codes, _BITS, arrays["scales"], zeros, block_size=blocks)

    def write(self, tensor: QuantizedArray, entry: TensorInfo, info: Info) -> Mapping[str, np.ndarray]:
        """Return the words and the scales of a tensor."""
        family.check_written(entry, tensor, ("uint4", "int4"), (entry.extras["group"], 1), ("zero_point",))
        inputs, outputs = entry.shape
        shape = (-(-inputs // entry.extras["group"]) if inputs else 0, outputs)
        codes = family.read_codes(tensor)
        is_signed = codes.dtype == family.INT8
        if tensor.zero_point is None:
            zeros = np.full(shape, 0, codes.dtype)
        else:
            dtypes = (np.dtype(tensor.codes.dtype), codes.dtype)  # packed codes have zero points of 8 bits
            zeros = family.widen_codes(family.write_floats(entry, tensor.zero_point, "zero point", dtypes, shape))
        if is_signed:
            codes, zeros = family.unshift_codes(codes, _BITS), family.unshift_codes(zeros, _BITS)
        return {
            "qweight": _shuffle(codes),
            "qzeros": _shuffle(zeros),
            "scales": family.write_floats(entry, tensor.scale, "scale", family.FLOATS, shape),
        }

    def declare(self, module: str, tensor: QuantizedArray, info: Info) -> family.Declared:
        """Return what a tensor of shape (inputs, outputs) would have in a file."""
        inputs, outputs = tensor.shape[-2:]
        dtype, (groups, _) = family.get_type(tensor.scale)
        if outputs % 8:
            raise refuse(module, "a number of outputs that 8 divides", outputs)
        return {
            ".qweight": (family.INT32, (inputs, outputs // 8)),
            ".qzeros": (family.INT32, (groups, outputs // 8)),
            ".scales": (dtype, (groups, outputs)),
        }

    def explain_float(self, name: str, info: Info) -> str:
        """Return why a tensor is stored as it is."""
        excluded = family.get_names(get_settings(info.metadata), "modules_to_not_convert")
        return family.explain_float(name, info, lambda module: family.find_pattern(excluded, module, family.is_part_of))


def _restore(words: np.ndarray) -> np.ndarray:
    """Return the codes of words in the order of the outputs."""
    eights = streams.unpack_bits(words, _BITS, 8 * words.shape[1]).reshape(*words.shape, 8)
    return eights[..., _INVERSE].reshape(len(words), 8 * words.shape[1])


def _shuffle(codes: np.ndarray) -> np.ndarray:
    """Return the words of codes; the inverse of `_restore`."""
    eights = codes.reshape(len(codes), codes.shape[1] // 8, 8)[..., _ORDER]
    return streams.pack_bits(eights.reshape(codes.shape), _BITS, np.int32)


FORMAT = _Awq()
