"""compressed-tensors: packed integers of 1 to 8 bits, int8, float8, NVFP4, MXFP4 and MXFP8; (outputs, inputs).

x = (q - z) * s. Packed codes are stored as q + 2**(bits - 1) in a dense stream of bits along the inputs, zero points in
the same way along the outputs. NVFP4 divides its scales by a global one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..._arrays.quantized_array import QuantizedArray
from ..info import CheckpointError, Info, TensorInfo
from ..safetensors_files import SafetensorsFiles
from . import bits as streams
from . import family
from .family import Settings, refuse

_LEAVES = (
    "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale",
    "weight",
)  # fmt: skip
_MARKS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_global_scale")
_INDICES = (np.dtype(np.int64), family.INT32)
_FORMATS = (
    "dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
# Of each kind of codes: the tensors, the dtype of the scales where it is not one of the usual floats, and its name.
_NEEDED = {
    "packed": ("weight_packed", "weight_scale", "weight_shape"),
    "nvfp4": ("weight_packed", "weight_scale", "weight_global_scale"), "mxfp4": ("weight_packed", "weight_scale"),
    "plain": ("weight", "weight_scale"), "float": ("weight", "weight_scale"), "mxfp8": ("weight", "weight_scale"),
}  # fmt: skip
_SCALES = {"nvfp4": (family.E4M3,), "mxfp4": (family.UINT8,), "mxfp8": (family.UINT8,)}
_TEXTS = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "mxfp8": "MXFP8", "float": "float8_e4m3fn"}
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


def get_settings(configs: Mapping[str, Any]) -> Settings:
    """Return the settings of a model, which older files call "compression_config"."""
    config = configs.get("config.json", {})
    older = config.get("compression_config")
    return family.get_quantization(configs) or (older if isinstance(older, dict) else {})


def matches_target(pattern: str, module: str) -> bool:
    """Return whether a name, or an expression after "re:", matches a module."""
    if pattern.startswith("re:"):
        return family.matches_pattern(pattern[3:], module)
    return pattern == module


class Schemes:
    """The weights of a configuration: how those of each module are quantized.

    Attributes:
        ignored: the patterns of modules that are not quantized.
    """

    def __init__(self, settings: Settings) -> None:
        advice = "; compress the model with the format 'pack-quantized' to read it"
        family.get_setting(settings, "format", _FORMATS, "dense", advice)
        if settings.get("transform_config"):
            # Activations are rotated before a layer whose weights are: the weights alone give other results.
            raise refuse("transform_config", "none, because rotations are not applied", "rotations of activations")
        sparsity = settings.get("sparsity_config") or {}
        if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
            raise refuse("sparsity_config", "the format 'dense'", "weights with zeros left out")
        self.ignored = family.get_names(settings, "ignore")
        groups = settings.get("config_groups", {})
        if not isinstance(groups, dict):
            raise refuse("config_groups", "an object", type(groups).__name__)
        self._groups: list[tuple[list[str], Settings]] = []
        for name, group in groups.items():
            weights = group.get("weights") if isinstance(group, dict) else ()
            if weights is None:
                continue  # a group of activations
            if not isinstance(weights, dict):
                raise refuse(name, "an object with weights", type(weights).__name__)
            self._groups.append((family.get_names(group, "targets"), weights))

    def find_ignored(self, module: str) -> str | None:
        """Return the pattern that excludes a module, or None."""
        return family.find_pattern(self.ignored, module, matches_target)

    def find(self, module: str) -> list[Settings]:
        """Return the possible settings of a module.

        A name counts more than an expression, and this more than the class of the layer. A file does not say which
        class that is, so that all groups with classes are possible.
        """
        kinds = (
            lambda target: target == module,
            lambda target: target.startswith("re:") and matches_target(target, module),
            lambda target: not target.startswith("re:") and "." not in target and target[:1].isupper(),
        )
        for matches in kinds:
            found = [weights for targets, weights in self._groups if any(map(matches, targets))]
            if found:
                return found
        return []


class _CompressedTensors(family.FamilyFormat):
    name = "compressed-tensors"

    def recognizes_config(self, files: SafetensorsFiles) -> bool:
        """Return whether a configuration names compressed-tensors."""
        return get_settings(files.configs).get("quant_method") == "compressed-tensors"

    def list_tensors(self, files: SafetensorsFiles) -> Iterable[TensorInfo]:
        """Yield the quantized tensors."""
        schemes = Schemes(get_settings(files.configs))
        for module, parts in family.collect_modules(files.entries, _LEAVES, _MARKS).items():
            family.check_not_excluded(module, schemes.find_ignored(module))
            family.check_complete(module, parts, ("weight_scale",))
            entries, errors = [], []
            for settings in schemes.find(module):
                try:
                    entries.append(_describe(files, module, parts, settings))
                except CheckpointError as error:
                    errors.append(error)
            if not entries:
                raise errors[0] if errors else refuse(module, "a target of config_groups", "none for these tensors")
            if any(entry.extras != entries[0].extras for entry in entries):
                raise refuse(module, "one group of config_groups", "several with other settings that fit its tensors")
            yield entries[0]

    def read(self, entry: TensorInfo, arrays: Mapping[str, np.ndarray], info: Info) -> QuantizedArray:
        """Return a quantized tensor of shape (..., outputs, inputs)."""
        kind, bits = entry.extras["kind"], entry.extras["bits"]
        scale = arrays["weight_scale"].reshape(entry.extras["scale_shape"])
        blocks = family.derive_block_size(entry.shape, entry.extras["sizes"])
        dtype = entry.extras["dtype"]
        make = functools.partial(family.make_array, bits=bits, block_size=blocks, dtype=dtype)
        if kind == "mxfp8":
            return make(arrays["weight"], scale=scale.view(family.E8M0))
        if kind in ("nvfp4", "mxfp4"):
            codes = streams.unpack_bits(arrays["weight_packed"], 4, entry.shape[-1]).view(family.E2M1)
            if kind == "mxfp4":
                return make(codes, scale=scale.view(family.E8M0))
            shared = arrays["weight_global_scale"].reshape((1,) * scale.ndim)
            nested = family.make_array(scale, 8, shared, inverse_scale=True, dtype=family.F32)
            return make(codes, scale=nested)
        zeros, options = arrays.get("weight_zero_point"), {}
        if kind == "packed":
            name = entry.stored["weight_packed"]
            codes = _unpack(name, arrays["weight_packed"], bits, entry.shape[-1])
            if zeros is not None and zeros.dtype == family.INT32:
                zeros = _unpack_rows(entry.stored["weight_zero_point"], zeros, bits, entry.extras["scale_shape"][-2])
        else:
            codes = arrays["weight"]
        zeros = None if zeros is None else zeros.reshape(entry.extras["scale_shape"])
        order = self._read_order(entry, arrays)
        if order is not None:
            codes, options = codes[..., order], {"permutation": order, "permuted_axis": -1}
        return make(codes, scale=scale, zero_point=zeros, **options)

    def _read_order(self, entry: TensorInfo, arrays: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Return the inputs in the order of their groups, or None; what tells it is kept for `write`."""
        g_idx = arrays.get("weight_g_idx")
        if g_idx is None:
            return None
        entry.extras["g_idx"] = g_idx.copy()
        return self._find_order(entry, g_idx)

    def _find_order(self, entry: TensorInfo, g_idx: np.ndarray) -> np.ndarray | None:
        # -1 stands for groups in order.
        in_order = np.arange(entry.shape[-1]) // entry.extras["sizes"][-1]
        if (g_idx == -1).any() or np.array_equal(g_idx, in_order):
            return None
        order = np.argsort(g_idx, kind="stable").astype(np.int32)
        if not np.array_equal(g_idx[order], in_order):
            raise refuse(entry.stored["weight_g_idx"], "groups of equal sizes", "others")
        return order

    def _check_order(self, entry: TensorInfo, tensor: QuantizedArray) -> None:
        """Raise CheckpointError unless an array has the order of the groups that the file has."""
        order = self._find_order(entry, entry.extras["g_idx"]) if "weight_g_idx" in entry.stored else None
        found = tensor.permutation
        if (order is None) != (found is None) or (
            order is not None and not (tensor.permuted_axis == -1 and np.array_equal(np.asarray(found), order))
        ):
            raise family.refuse_array(entry, "the permutation that was loaded", repr(tensor))

    def write(self, tensor: QuantizedArray, entry: TensorInfo, info: Info) -> Mapping[str, np.ndarray]:
        """Return the codes, the scales and the shape of a tensor."""
        kind, bits, shape = entry.extras["kind"], entry.extras["bits"], entry.extras["scale_shape"]
        small, wide = ("float4_e2m1fn",), ("float8_e4m3fn",)
        floats = {"nvfp4": small, "mxfp4": small, "float": wide, "mxfp8": wide}
        roles = {"zero_point": "weight_zero_point", "permutation": "weight_g_idx"}
        forms = [form for form, role in roles.items() if role in entry.stored]
        formats = floats.get(kind, _name_integers(kind, bits))
        family.check_written(entry, tensor, formats, entry.extras["sizes"], forms)
        self._check_order(entry, tensor)
        codes = family.read_codes(tensor)
        stored = entry.extras["stored_scale_shape"]
        arrays: dict[str, np.ndarray] = {}
        if kind in ("nvfp4", "mxfp4"):
            arrays["weight_packed"] = streams.pack_bits(codes.view(np.uint8), 4, np.uint8)
        if kind == "nvfp4":
            scale, shared = _split_nested(entry, tensor.scale)
            arrays["weight_scale"] = family.write_floats(entry, scale, "scale", (family.E4M3,), shape).reshape(stored)
            ones = (1,) * len(shape)
            shared = family.write_floats(entry, shared, "global scale", (family.F32,), ones)
            arrays["weight_global_scale"] = shared.reshape(entry.extras["global_shape"])
            return arrays
        is_power = kind in ("mxfp4", "mxfp8")
        dtypes = (family.E8M0,) if is_power else family.FLOATS
        scale = family.write_floats(entry, tensor.scale, "scale", dtypes, shape).reshape(stored)
        arrays["weight_scale"] = scale.view(np.uint8) if is_power else scale
        if kind == "mxfp4":
            return arrays
        if tensor.permutation is not None:
            codes = codes[..., np.argsort(np.asarray(tensor.permutation))]
        if kind == "packed":
            codes = family.unshift_codes(codes, bits)
            # Codes of 1 and 7 bits are held in 2 and 8.
            if codes.size and codes.max() >= 2**bits:
                raise family.refuse_array(entry, f"codes of {bits} bits", "larger ones")
            arrays["weight_packed"] = streams.pack_bits(codes, bits, np.int32)
            arrays["weight_shape"] = np.array(entry.shape, entry.extras["shape_dtype"])
        else:
            arrays["weight"] = codes
        if "weight_zero_point" in entry.stored:
            arrays["weight_zero_point"] = self._write_zeros(tensor, entry)
        if "weight_g_idx" in entry.stored:
            arrays["weight_g_idx"] = entry.extras["g_idx"]
        return arrays

    def _write_zeros(self, tensor: QuantizedArray, entry: TensorInfo) -> np.ndarray:
        bits, shape = entry.extras["bits"], entry.extras["scale_shape"]
        zeros = np.zeros((1,) * len(shape), np.int8) if tensor.zero_point is None else tensor.zero_point
        dtypes = (np.dtype(zeros.dtype),)
        zeros = family.widen_codes(family.write_floats(entry, zeros, "zero point", dtypes, shape))
        if zeros.dtype != family.INT8:
            raise family.refuse_array(entry, "a zero point in the dtype of the codes", zeros.dtype)
        if entry.extras["packs_zeros"]:
            return streams.pack_rows(family.unshift_codes(zeros, bits), bits)
        return zeros.reshape(entry.extras["stored_scale_shape"])

    def declare(self, module: str, tensor: QuantizedArray, info: Info) -> family.Declared:
        """Return what a tensor would have in a file."""
        settings, scale, shape = get_settings(info.metadata), tensor.scale, tensor.shape
        half = (family.UINT8, (*shape[:-1], shape[-1] // 2))
        if isinstance(scale, QuantizedArray):
            return {
                ".weight_packed": half, ".weight_scale": family.get_type(scale.codes),
                ".weight_global_scale": (np.dtype(scale.scale.dtype), (1,)),
            }  # fmt: skip
        dtype, counts = family.get_type(scale)
        scales = (family.UINT8 if dtype == family.E8M0 else dtype, counts)
        if tensor.format == family.E2M1:
            return {".weight_packed": half, ".weight_scale": (family.UINT8, counts)}
        bits = family.get_bits(tensor)
        zeros: dict[str, Any] = {}
        if tensor.format == family.E4M3 or settings.get("format") != "pack-quantized":
            if tensor.zero_point is not None:
                zeros[".weight_zero_point"] = family.get_type(tensor.zero_point)
            return {".weight": family.get_type(tensor.codes), ".weight_scale": scales, **zeros}
        if tensor.zero_point is not None:
            rows = (*scales[1][:-2], family.count_words(scales[1][-2], bits), scales[1][-1])
            zeros[".weight_zero_point"] = (family.INT32, rows)
        return {
            ".weight_packed": (family.INT32, (*shape[:-1], family.count_words(shape[-1], bits))),
            ".weight_scale": scales, ".weight_shape": np.array(shape, np.int64), **zeros,
        }  # fmt: skip

    def explain_float(self, name: str, info: Info) -> str:
        """Return why a tensor is stored as it is."""
        return family.explain_float(name, info, Schemes(get_settings(info.metadata)).find_ignored)


def _name_integers(kind: str, bits: int) -> tuple[str, ...]:
    """Return the formats of codes in which integers may be held."""
    if kind == "packed":
        return ({1: "int2", 7: "int8"}.get(bits, f"int{bits}"),)
    return ("int8",)


def _split_nested(entry: TensorInfo, scale: family.Part) -> tuple[family.Part, family.Part]:
    """Return the float8 scales and the global scale that divides them."""
    if not isinstance(scale, QuantizedArray) or not scale.inverse_scale or scale.offset is not None:
        got = repr(scale) if isinstance(scale, QuantizedArray) else scale.dtype
        raise family.refuse_array(entry, "a scale of float8_e4m3fn with inverse_scale=True", got)
    return scale.codes, scale.scale


def _unpack(name: str, words: np.ndarray, bits: int, length: int) -> np.ndarray:
    """Return the signed codes of words along the last axis."""
    codes = streams.unpack_bits(words, bits, length)
    if length * bits % 32:
        family.check_unused_bits(name, words, streams.pack_bits(codes, bits, np.int32))
    return family.shift_codes(codes, bits)


def _unpack_rows(name: str, words: np.ndarray, bits: int, length: int) -> np.ndarray:
    """Return the signed codes of words along the last axis but one."""
    codes = streams.unpack_rows(words, bits, length)
    if length * bits % 32:
        family.check_unused_bits(name, words, streams.pack_rows(codes, bits))
    return family.shift_codes(codes, bits)


def _describe(files: SafetensorsFiles, module: str, parts: Mapping[str, str], settings: Settings) -> TensorInfo:
    """Return the description of the tensors of a module; raise CheckpointError if they do not fit the settings."""
    bits = family.get_setting(settings, "num_bits", tuple(range(1, 9)), 8)
    kind = _find_kind(files, module, parts, settings, bits)
    _check_parts(module, parts, kind, is_symmetric=family.get_setting(settings, "symmetric", (True, False), True))
    shape = _read_shape(files, parts, kind, bits)
    size = family.get_size(settings, "group_size", -1)
    inferred = "group" if size > 0 else "channel" if settings.get("group_size") == -1 else "tensor"
    strategy = family.get_setting(settings, "strategy", _STRATEGIES, inferred)
    scale = files.entries[parts["weight_scale"]]
    sizes = _find_sizes(parts["weight_scale"], strategy, size, settings, shape, scale.shape)
    counts = tuple(-(-n // each) for n, each in zip(shape, sizes, strict=True))
    dtypes = _SCALES.get(kind, family.FLOATS)
    family.get_stored(files, parts["weight_scale"], dtypes)
    extras: dict[str, Any] = {
        "kind": kind, "bits": bits, "sizes": sizes, "scale_shape": counts, "stored_scale_shape": scale.shape,
        "packs_zeros": kind == "packed" and strategy in ("group", "channel"),
        "dtype": scale.dtype if dtypes == family.FLOATS else family.BF16,
    }  # fmt: skip
    if kind == "packed":
        extras["shape_dtype"] = files.entries[parts["weight_shape"]].dtype
    if "weight_zero_point" in parts:
        words = (
            (*counts[:-2], family.count_words(counts[-2], bits), counts[-1]) if extras["packs_zeros"] else scale.shape
        )
        dtype = family.INT32 if extras["packs_zeros"] else family.INT8
        family.check_stored(files, parts["weight_zero_point"], (dtype,), words)
    if "weight_g_idx" in parts:
        family.check_stored(files, parts["weight_g_idx"], (family.INT32,), shape[-1:])
    if kind == "nvfp4":
        extras["global_shape"] = whole = family.get_stored(files, parts["weight_global_scale"], (family.F32,))
        if math.prod(whole) != 1:
            raise refuse(parts["weight_global_scale"], "one element", f"shape {whole}")
    text = _TEXTS.get(kind, f"int{bits}")
    return TensorInfo(f"{module}.weight", f"compressed-tensors, {text}", shape, stored=dict(parts), extras=extras)


def _find_kind(files: SafetensorsFiles, module: str, parts: Mapping[str, str], settings: Settings, bits: int) -> str:
    """Return which codes a module has, a key of `_NEEDED`."""
    if family.get_setting(settings, "type", ("int", "float"), "int") == "int":
        return "packed" if "weight_packed" in parts else "plain"
    if bits == 4:
        return "nvfp4" if "weight_global_scale" in parts else "mxfp4"
    if bits == 8:
        return "mxfp8" if files.entries[parts["weight_scale"]].dtype == family.UINT8 else "float"
    raise refuse(module, "floats of 4 or 8 bits", f"{bits} bits")


def _check_parts(module: str, parts: Mapping[str, str], kind: str, *, is_symmetric: bool) -> None:
    """Raise CheckpointError unless a module has the tensors of its codes, and no others."""
    needed = [*_NEEDED[kind], *(() if is_symmetric else ("weight_zero_point",))]
    family.check_complete(module, parts, needed)
    others = {*parts} - {*needed, *(("weight_g_idx",) if kind == "packed" else ())}
    if others:
        raise refuse(module, f"the tensors {', '.join(needed)}", f"{', '.join(sorted(others))}, too")


def _find_sizes(
    name: str, strategy: str, size: int, settings: Settings, shape: tuple[int, ...], stored: tuple[int, ...]
) -> tuple[int, ...]:
    """Return how many indices of each dimension share a scale; raise CheckpointError if the scales do not fit.

    Args:
        name: the name of the scales.
        strategy: the strategy of the configuration.
        size: the size of the groups.
        settings: the settings of the weights.
        shape: the logical shape of the weights.
        stored: the shape of the scales.
    """
    ones = (1,) * (len(shape) - 1)
    possible: list[tuple[int, ...]] = [(*ones, size)]
    if strategy == "tensor":
        possible = [shape]
        stored = (1,) * len(shape) if stored in ((), (1,)) else stored
    elif strategy == "channel":
        # Of stacked experts each has its own outputs; a convolution has the outputs first.
        possible = [(*ones, shape[-1]), (1, *shape[1:])]
    elif strategy == "block":
        possible = [(*ones[:-1], *_read_block(settings))]
    for sizes in possible:
        sizes = tuple(max(n, 1) for n in sizes)
        if stored == tuple(-(-n // each) for n, each in zip(shape, sizes, strict=True)):
            return sizes
    expected = [tuple(-(-n // max(each, 1)) for n, each in zip(shape, sizes, strict=True)) for sizes in possible]
    text = " or ".join(f"{one}" for one in dict.fromkeys(expected))
    raise refuse(name, f"shape {text} for the strategy {strategy!r}", f"shape {stored}")


def _read_block(settings: Settings) -> tuple[int, int]:
    """Return the rows and the columns of a block."""
    block = settings.get("block_structure")
    is_block = isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 2**31 for n in block)
    if not is_block:
        raise refuse("block_structure", "two sizes", repr(block)[:100])
    assert isinstance(block, list)
    return block[0], block[1]


def _read_shape(files: SafetensorsFiles, parts: Mapping[str, str], kind: str, bits: int) -> tuple[int, ...]:
    """Return the logical shape of a tensor."""
    if kind in ("plain", "float", "mxfp8"):
        dtype = family.INT8 if kind == "plain" else family.E4M3
        return family.get_stored(files, parts["weight"], (dtype,))
    name = parts["weight_packed"]
    if kind != "packed":
        stored = family.get_stored(files, name, (family.UINT8,))
        return (*stored[:-1], 2 * stored[-1])
    stored = family.get_stored(files, name, (family.INT32,))
    if len(family.get_stored(files, parts["weight_shape"], _INDICES)) != 1:
        raise refuse(parts["weight_shape"], "a list of lengths", f"shape {files.entries[parts['weight_shape']].shape}")
    shape = tuple(int(n) for n in files.read(parts["weight_shape"]))
    expected = (*shape[:-1], -(-shape[-1] * bits // 32)) if shape else ()
    if len(shape) < 2 or min(shape) < 0 or stored != expected:
        raise refuse(name, f"shape {expected} for {bits} bits and the weight_shape {shape}", f"shape {stored}")
    return shape


FORMAT = _CompressedTensors()
