"""GPTQ, versions 1 and 2: (inputs, outputs), with words of codes along the inputs and of zero points along the outputs.

x = (q - z[g_idx]) * s[g_idx]. Version 1 stores z - 1, where 0 wraps around, and version 2 stores z. Without desc_act
g_idx may be missing, as in older files: the groups are then in the order of the inputs.
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

_LEAVES = ("qweight", "qzeros", "scales", "g_idx")
_BITS = (2, 3, 4, 8)
_VERSIONS = {"gptq": 1, "gptq_v2": 2}


def get_settings(configs: Mapping[str, Any]) -> Settings:
    """Return the settings of a model, from config.json or the older quantize_config.json."""
    return family.get_quantization(configs) or configs.get("quantize_config.json", {})


def find_override(settings: Settings, module: str) -> tuple[Settings, str | None]:
    """Return the settings of a module, and the pattern that excludes it, or None.

    The object "dynamic" has regular expressions as keys: "-:" excludes modules, "+:" or nothing replaces settings.
    """
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise refuse("dynamic", "an object", type(dynamic).__name__)
    for pattern, changes in dynamic.items():
        if family.matches_pattern(pattern.removeprefix("-:").removeprefix("+:"), module):
            if pattern.startswith("-:"):
                return settings, pattern
            if not isinstance(changes, dict):
                raise refuse(pattern, "an object with settings", type(changes).__name__)
            return {**settings, **changes}, None
    return settings, None


class _Gptq(family.FamilyFormat):
    name = "gptq"

    def recognizes_config(self, files: SafetensorsFiles) -> bool:
        """Return whether a configuration names GPTQ."""
        settings = get_settings(files.configs)
        return settings.get("quant_method", "gptq" if "quantize_config.json" in files.configs else None) == "gptq"

    def list_tensors(self, files: SafetensorsFiles) -> Iterable[TensorInfo]:
        """Yield the quantized tensors."""
        settings = get_settings(files.configs)
        advice = ", which is arranged for other kernels; quantize the model with the format 'gptq'"
        family.get_setting(settings, "checkpoint_format", tuple(_VERSIONS), "gptq", advice)
        for module, parts in family.collect_modules(files.entries, _LEAVES, ("qweight", "qzeros", "g_idx")).items():
            own, pattern = find_override(settings, module)
            family.check_not_excluded(module, pattern)
            is_ordered = not family.get_setting(own, "desc_act", (True, False), False)
            family.check_complete(module, parts, _LEAVES[: 3 if is_ordered else 4])
            bits = family.get_setting(own, "bits", _BITS)
            rows, outputs = family.get_stored(files, parts["qweight"], (family.INT32,), 2)
            inputs = rows * 32 // bits
            if "g_idx" in parts:
                (inputs,) = family.get_stored(files, parts["g_idx"], (family.INT32,), 1)
            group = family.get_size(own, "group_size")
            groups = family.count_groups(module, inputs, group)
            family.check_stored(files, parts["qweight"], (family.INT32,), (-(-inputs * bits // 32), outputs))
            family.check_stored(files, parts["scales"], family.FLOATS, (groups, outputs))
            family.check_stored(files, parts["qzeros"], (family.INT32,), (groups, -(-outputs * bits // 32)))
            extras = {
                "bits": bits, "group": inputs if group == -1 else group,
                "symmetric": family.get_setting(own, "sym", (True, False), True),
                "version": _VERSIONS[settings.get("checkpoint_format") or "gptq"],
            }  # fmt: skip
            yield TensorInfo(f"{module}.weight", f"GPTQ, {bits} bits", (inputs, outputs), stored=parts, extras=extras)

    def read(self, entry: TensorInfo, arrays: Mapping[str, np.ndarray], info: Info) -> QuantizedArray:
        """Return a quantized tensor of shape (inputs, outputs)."""
        inputs, outputs = entry.shape
        bits, group = entry.extras["bits"], entry.extras["group"]
        codes = streams.unpack_rows(arrays["qweight"], bits, inputs)
        if inputs * bits % 32:
            family.check_unused_bits(entry.stored["qweight"], arrays["qweight"], streams.pack_rows(codes, bits))
        stored = streams.unpack_bits(arrays["qzeros"], bits, outputs)
        if outputs * bits % 32:
            again = streams.pack_bits(stored, bits, np.int32)
            family.check_unused_bits(entry.stored["qzeros"], arrays["qzeros"], again)
        _find_version(entry, stored)
        zeros = stored + np.uint8(1) if entry.extras["version"] == 1 else stored
        options: dict[str, Any] = {"block_size": family.derive_block_size(entry.shape, (group, 1))}
        order = _find_order(entry.stored["g_idx"], arrays["g_idx"], group) if "g_idx" in arrays else None
        if order is not None:
            codes = codes[order]
            options |= {"permutation": order, "permuted_axis": -2}
        return family.make_array(codes, bits, arrays["scales"], zeros & np.uint8(2**bits - 1), **options)

    def write(self, tensor: QuantizedArray, entry: TensorInfo, info: Info) -> Mapping[str, np.ndarray]:
        """Return the words, the scales and the groups of a tensor."""
        bits, group, (inputs, outputs) = entry.extras["bits"], entry.extras["group"], entry.shape
        middle = np.uint8(2 ** (bits - 1))
        forms = ("zero_point", "permutation") if "g_idx" in entry.stored else ("zero_point",)
        family.check_written(entry, tensor, (f"uint{bits}", f"int{bits}"), (group, 1), forms)
        codes = family.read_codes(tensor)
        is_signed = codes.dtype == family.INT8
        codes = family.unshift_codes(codes, bits) if is_signed else codes
        groups = -(-inputs // group) if inputs else 0
        if tensor.zero_point is None:
            zeros = np.full((groups, outputs), middle if is_signed else 0, np.uint8)
        else:
            dtypes = (np.dtype(tensor.zero_point.dtype),)
            zeros = family.widen_codes(
                family.write_floats(entry, tensor.zero_point, "zero point", dtypes, (groups, outputs))
            )
            if zeros.dtype not in (family.INT8, family.UINT8):
                raise family.refuse_array(entry, "a zero point in the dtype of the codes", zeros.dtype)
            zeros = family.unshift_codes(zeros, bits) if is_signed else zeros
        g_idx = (np.arange(inputs) // group).astype(np.int32)
        if tensor.permutation is not None:
            if tensor.permuted_axis != -2 or tensor.permutation.ndim != 1:
                raise family.refuse_array(entry, "a permutation of the inputs, axis -2", tensor.permuted_axis)
            order = np.asarray(tensor.permutation)
            codes, g_idx = codes[np.argsort(order)], g_idx[np.argsort(order)]
        version = entry.extras["version"]
        stored = (zeros - np.uint8(version == 1)) & np.uint8(2**bits - 1)
        # Reading would take these for the middle in the other version.
        if entry.extras["symmetric"] and stored.size and (stored == middle - np.uint8(version == 2)).all():
            raise family.refuse_array(entry, f"zero points of {middle}, because it is symmetric", int(zeros.flat[0]))
        parts = {
            "qweight": streams.pack_rows(codes, bits),
            "qzeros": streams.pack_bits(stored, bits, np.int32),
            "scales": family.write_floats(entry, tensor.scale, "scale", family.FLOATS, (groups, outputs)),
            "g_idx": g_idx,
        }
        return {role: part for role, part in parts.items() if role in entry.stored}

    def declare(self, module: str, tensor: QuantizedArray, info: Info) -> family.Declared:
        """Return what a tensor of shape (inputs, outputs) would have in a file."""
        (inputs, outputs), bits = tensor.shape[-2:], family.get_bits(tensor)
        dtype, (groups, _) = family.get_type(tensor.scale)
        return {
            ".qweight": (family.INT32, (family.count_words(inputs, bits), outputs)),
            ".qzeros": (family.INT32, (groups, family.count_words(outputs, bits))),
            ".scales": (dtype, (groups, outputs)),
            ".g_idx": (family.INT32, (inputs,)),
        }

    def explain_float(self, name: str, info: Info) -> str:
        """Return why a tensor is stored as it is."""
        settings = get_settings(info.metadata)
        return family.explain_float(name, info, lambda module: find_override(settings, module)[1])


def _find_version(entry: TensorInfo, stored: np.ndarray) -> None:
    """Correct the version of a symmetric tensor, whose zero points are all 2**(bits - 1).

    Some files say version 1 and store the zero points of version 2.
    """
    declared, middle = entry.extras["version"], 2 ** (entry.extras["bits"] - 1)
    if not entry.extras["symmetric"] or not stored.size:
        return
    found = 2 if (stored == middle).all() else 1 if (stored == middle - 1).all() else declared
    if found != declared:
        entry.extras["version"] = found
        entry.note = (
            f"symmetric zero points of version {found} of GPTQ, although the configuration says version {declared}"
        )


def _find_order(name: str, g_idx: np.ndarray, group: int) -> np.ndarray | None:
    """Return the inputs in the order of their groups, or None if they are in this order.

    Raises:
        CheckpointError: a group has another number of inputs than the others; the last one may have fewer.
    """
    inputs = len(g_idx)
    in_order = np.arange(inputs) // group
    if np.array_equal(g_idx, in_order):
        return None
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    if not np.array_equal(g_idx[order], in_order):
        raise refuse(name, f"groups of {group} inputs, of which only the last one may have fewer", "other groups")
    return order


FORMAT = _Gptq()
