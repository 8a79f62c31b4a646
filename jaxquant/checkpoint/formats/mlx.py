"""MLX: (..., outputs, inputs), with words of codes along the inputs, in the modes affine, mxfp4, mxfp8 and nvfp4.

affine: x = q * s + b, each operation rounded to the dtype of the scales. The others: x = q * s, without biases.
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

_LEAVES = ("weight", "scales", "biases")
_BITS = (2, 3, 4, 5, 6, 8)
# Of each mode without biases: the bits and the dtype of the codes, the size of the groups, and the dtype of the scales.
_FLOAT_MODES = {
    "mxfp4": (4, family.E2M1, 32, family.E8M0),
    "mxfp8": (8, family.E4M3, 32, family.E8M0),
    "nvfp4": (4, family.E2M1, 16, family.E4M3),
}


def get_settings(configs: Mapping[str, Any]) -> Settings:
    """Return the settings of a model, or an empty object."""
    settings = configs.get("config.json", {}).get("quantization", {})
    return settings if isinstance(settings, dict) else {}


class _Mlx(family.FamilyFormat):
    name = "mlx"

    def recognizes_config(self, files: SafetensorsFiles) -> bool:
        """Return whether config.json has MLX's object "quantization"."""
        return "group_size" in get_settings(files.configs)

    def list_tensors(self, files: SafetensorsFiles) -> Iterable[TensorInfo]:
        """Yield the quantized tensors."""
        settings = get_settings(files.configs)
        for module, parts in family.collect_modules(files.entries, _LEAVES, _LEAVES[1:]).items():
            own = settings.get(module, {})
            if own is False:
                family.check_not_excluded(module, module)
            own = {**settings, **own} if isinstance(own, dict) else settings
            mode = family.get_setting(own, "mode", ("affine", *_FLOAT_MODES), "affine")
            needed = _LEAVES if mode == "affine" else _LEAVES[:2]
            family.check_complete(module, parts, needed)
            if len(parts) > len(needed):
                raise refuse(module, f"no biases in the mode {mode!r}", "biases")
            allowed = _BITS if mode == "affine" else _FLOAT_MODES[mode][:1]
            bits = family.get_setting(own, "bits", allowed, None if mode == "affine" else allowed[0])
            if bits is None:
                raise refuse(module, "bits", "none")
            size = family.get_size(own, "group_size")
            stored = family.get_stored(files, parts["weight"], (family.UINT32,))
            if not stored or stored[-1] * 32 % bits or (mode != "affine" and size != _FLOAT_MODES[mode][2]):
                raise refuse(parts["weight"], f"rows of codes of {bits} bits in groups of {size}", f"shape {stored}")
            shape = (*stored[:-1], stored[-1] * 32 // bits)
            if size < 1 or shape[-1] % size:
                raise refuse(parts["weight"], f"rows of groups of {size}", f"{shape[-1]} codes in a row")
            counts = (*shape[:-1], shape[-1] // size)
            dtypes = family.FLOATS if mode == "affine" else (family.UINT8,)
            family.check_stored(files, parts["scales"], dtypes, counts)
            if mode == "affine":
                family.check_stored(files, parts["biases"], (files.entries[parts["scales"]].dtype,), counts)
            text = f"MLX, {bits} bits, groups of {size}" if mode == "affine" else f"MLX, {mode}"
            extras = {"mode": mode, "bits": bits, "counts": counts}
            yield TensorInfo(f"{module}.weight", text, shape, stored=parts, extras=extras)

    def read(self, entry: TensorInfo, arrays: Mapping[str, np.ndarray], info: Info) -> QuantizedArray:
        """Return a quantized tensor of shape (..., outputs, inputs)."""
        bits, scales = entry.extras["bits"], arrays["scales"]
        codes = streams.unpack_bits(arrays["weight"], bits, entry.shape[-1])
        if entry.extras["mode"] == "affine":
            return family.make_array(
                codes, bits, scales, offset=arrays["biases"], signed_scale=True, arithmetic=scales.dtype
            )
        _, held, _, scale_dtype = _FLOAT_MODES[entry.extras["mode"]]
        scale: Any = scales.view(scale_dtype)
        if scale_dtype == family.E4M3:
            scale = family.make_array(scale, 8, np.ones((1,) * scale.ndim, np.float32))
        return family.make_array(codes.view(held), bits, scale, dtype=family.BF16)

    def write(self, tensor: QuantizedArray, entry: TensorInfo, info: Info) -> Mapping[str, np.ndarray]:
        """Return the words, the scales and the biases of a tensor."""
        bits, counts, mode = entry.extras["bits"], entry.extras["counts"], entry.extras["mode"]
        sizes = tuple(n // max(count, 1) for n, count in zip(entry.shape, counts, strict=True))
        if mode == "affine":
            scales = family.write_floats(entry, tensor.scale, "scale", family.FLOATS, counts)
            family.check_written(entry, tensor, (f"uint{bits}",), sizes, ("offset",), arithmetic=scales.dtype)
            words = streams.pack_bits(family.read_codes(tensor), bits, np.uint32)
            offset = np.zeros((1,) * len(counts), scales.dtype) if tensor.offset is None else tensor.offset
            biases = family.write_floats(entry, offset, "offset", (scales.dtype,), counts)
            return {"weight": words, "scales": scales, "biases": biases}
        _, held, _, scale_dtype = _FLOAT_MODES[mode]
        family.check_written(entry, tensor, (held.name,), sizes)
        words = streams.pack_bits(np.asarray(tensor.codes).view(np.uint8), bits, np.uint32)
        scale = tensor.scale
        if scale_dtype == family.E4M3:
            is_alone = isinstance(scale, QuantizedArray) and bool((np.asarray(scale.scale) == 1).all())
            if not is_alone:
                raise family.refuse_array(entry, "scales of float8_e4m3fn times 1.0", repr(scale))
            scale = scale.codes
        scales = family.write_floats(entry, scale, "scale", (scale_dtype,), counts)
        return {"weight": words, "scales": scales.view(np.uint8)}

    def declare(self, module: str, tensor: QuantizedArray, info: Info) -> family.Declared:
        """Return what a tensor would have in a file."""
        bits = family.get_bits(tensor)
        if tensor.format in (family.E2M1, family.E4M3):
            bits = 4 if tensor.format == family.E2M1 else 8
        words = (family.UINT32, (*tensor.shape[:-1], family.count_words(tensor.shape[-1], bits)))
        scale = tensor.scale.codes if isinstance(tensor.scale, QuantizedArray) else tensor.scale
        dtype, shape = family.get_type(scale)
        if tensor.codes.dtype in (family.E2M1, family.E4M3):
            return {".weight": words, ".scales": (family.UINT8, shape)}
        return {".weight": words, ".scales": (dtype, shape), ".biases": (dtype, shape)}

    def explain_float(self, name: str, info: Info) -> str:
        """Return why a tensor is stored as it is."""
        settings = get_settings(info.metadata)
        return family.explain_float(name, info, lambda module: module if settings.get(module) is False else None)


FORMAT = _Mlx()
