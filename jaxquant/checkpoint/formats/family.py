"""What the formats of quantized safetensors files share: settings, the tensors of a module, and checks of both."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from ..._arrays.quantized_array import QuantizedArray
from ..._core.granularity import Aligned
from ..info import CheckpointError, Info, TensorInfo, list_some, shorten_name
from ..safetensors_files import SafetensorsFiles, SafetensorsFormat, StoredTensor

E2M1, E4M3, E8M0 = (np.dtype(t) for t in (ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu))
F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
FLOATS = (F16, BF16, F32)
INT8, UINT8, INT32, UINT32 = (np.dtype(t) for t in (np.int8, np.uint8, np.int32, np.uint32))
# The settings of a configuration, and what a message calls their place in it.
Settings = Mapping[str, Any]
Part = QuantizedArray | jax.Array | np.ndarray
_NARROW = (3, 5, 6)
_HEAD_NOTE = "not quantized, as most programs leave the last layer"
_LONGEST_PATTERN, _LONGEST_NAME, _MOST_LOOPS = 1000, 512, 4


def refuse(name: str, expected: str, got: object) -> CheckpointError:
    """Return the error for a tensor, or for a part of a configuration; the caller raises it."""
    return CheckpointError(f"{shorten_name(name)!r}: expected {expected}, got {got}")


# Configurations.


def get_quantization(configs: Mapping[str, Any]) -> Settings:
    """Return the object "quantization_config" of config.json, or an empty one."""
    settings = configs.get("config.json", {}).get("quantization_config")
    if settings is not None and not isinstance(settings, dict):
        raise refuse("quantization_config", "an object", type(settings).__name__)
    return settings or {}


def get_setting(
    settings: Settings, names: str | Sequence[str], allowed: Sequence[Any], default: object = ..., advice: str = ""
) -> Any:
    """Return a setting that has one of some values; raise CheckpointError for others.

    Args:
        settings: the object of a configuration.
        names: the key, or several keys; the first one that is there counts.
        allowed: the values. Equal values of other types, such as True for 1, are refused.
        default: what a missing setting means; by default it is an error.
        advice: the end of the message about another value: what to do.
    """
    keys = (names,) if isinstance(names, str) else names
    for key in keys:
        value = settings.get(key)
        if value is not None:
            if not any(type(value) is type(one) and value == one for one in allowed):
                got = shorten_name(repr(value)[:200]) + advice
                raise refuse(key, f"a setting of {', '.join(map(repr, allowed))}", got)
            return value
    if default is ...:
        raise refuse(keys[0], f"a setting of {', '.join(map(repr, allowed))}", "none")
    return default


def get_size(settings: Settings, names: str | Sequence[str], default: int | None = None) -> int:
    """Return a setting that is a positive int, or -1 for a whole row; raise CheckpointError for others."""
    keys = (names,) if isinstance(names, str) else names
    for key in keys:
        value = settings.get(key)
        if value is not None:
            if type(value) is not int or not (value == -1 or 0 < value < 2**31):
                raise refuse(key, "a size of groups, or -1", shorten_name(repr(value)[:200]))
            return value
    if default is None:
        raise refuse(keys[0], "a size of groups, or -1", "none")
    return default


def get_names(settings: Settings, key: str) -> list[str]:
    """Return a setting that is a list of strings, empty if it is missing; raise CheckpointError for others."""
    value = settings.get(key)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refuse(key, "a list of names", type(value).__name__)
    return value


def matches_pattern(pattern: str, name: str) -> bool:
    """Return whether a regular expression of a configuration matches the start of a name.

    Raises:
        CheckpointError: the expression is invalid, or could take very long: the file is not trusted, and Python's
            search has no limit of time.
    """
    loops = len(re.findall(r"[*+}]", re.sub(r"\\.|\[[^\]]*\]", "", pattern)))
    has_nested = re.search(r"\([^()]*[*+{|][^()]*\)[*+{]", re.sub(r"\\.", "", pattern)) is not None
    if len(pattern) > _LONGEST_PATTERN or len(name) > _LONGEST_NAME or has_nested or loops > _MOST_LOOPS:
        expected = f"an expression with at most {_MOST_LOOPS} repetitions, none inside another"
        raise refuse(pattern, expected, f"one that may take long for a name of {len(name)} characters")
    try:
        return re.match(pattern, name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise refuse(pattern, "a regular expression", error) from error


def find_pattern(patterns: Iterable[str], module: str, matches: Callable[[str, str], bool]) -> str | None:
    """Return the first pattern that matches a module, or None."""
    return next((pattern for pattern in patterns if matches(pattern, module)), None)


def is_part_of(pattern: str, module: str) -> bool:
    """Return whether a pattern is a name, or whole parts of the name of a module between its dots."""
    return module == pattern or f".{pattern}." in f".{module}." or module.startswith(f"{pattern}.")


def check_not_excluded(module: str, pattern: str | None) -> None:
    """Raise CheckpointError for a quantized module that the configuration excludes."""
    if pattern is not None:
        raise refuse(module, f"floats, because the configuration excludes {pattern!r}", "quantized tensors")


def explain_float(name: str, info: Info, find: Callable[[str], str | None]) -> str:
    """Return why a tensor of a quantized model is stored in floats.

    Args:
        name: the name of the tensor.
        info: the description of the checkpoint.
        find: from the name of a module, the pattern of the configuration that excludes it, or None.
    """
    module = name.rpartition(".")[0] or name
    pattern = find(module) or find(name)
    if pattern is not None:
        return f"not quantized, because the configuration excludes {pattern!r}"
    return _HEAD_NOTE if module == "lm_head" or module.endswith(".lm_head") else ""


# The tensors of a module.


def collect_modules(names: Iterable[str], leaves: Sequence[str], marks: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return, for each module with a tensor of `marks`, the names of its tensors by their last part.

    Args:
        names: the names of all tensors in the files.
        leaves: the last parts of the names, such as "qweight", that belong to a quantized tensor.
        marks: the names among them that only a quantized module has.
    """
    found: dict[str, dict[str, str]] = {}
    for name in names:
        for leaf in leaves:
            if name.endswith(f".{leaf}"):
                found.setdefault(name[: -len(leaf) - 1], {})[leaf] = name
                break
    return {module: parts for module, parts in found.items() if any(mark in parts for mark in marks)}


def check_complete(module: str, parts: Mapping[str, str], needed: Sequence[str]) -> None:
    """Raise CheckpointError unless a module has all tensors that it needs."""
    missing = [leaf for leaf in needed if leaf not in parts]
    if missing:
        raise refuse(module, f"the tensors {', '.join(needed)}", f"none named {list_some(missing)}")


def refuse_stored(files: SafetensorsFiles, name: str, expected: str, got: object) -> CheckpointError:
    """Return the error for a tensor of the files, with the name of its file; the caller raises it."""
    return CheckpointError(f"{files.entries[name].file}: {refuse(name, expected, got)}")


def get_stored(
    files: SafetensorsFiles, name: str, dtypes: Sequence[np.dtype], rank: int | None = None
) -> tuple[int, ...]:
    """Return the shape of a tensor of the files; raise CheckpointError if it has another dtype or rank."""
    entry = files.entries[name]
    if entry.dtype not in dtypes:
        raise refuse_stored(files, name, f"dtype {' or '.join(map(str, dtypes))}", entry.dtype)
    if rank is not None and len(entry.shape) != rank:
        raise refuse_stored(files, name, f"rank {rank}", f"shape {entry.shape}")
    return entry.shape


def check_stored(files: SafetensorsFiles, name: str, dtypes: Sequence[np.dtype], shape: Sequence[int]) -> None:
    """Raise CheckpointError unless a tensor of the files has one of some dtypes and a shape."""
    if get_stored(files, name, dtypes) != tuple(shape):
        raise refuse_stored(files, name, f"shape {tuple(shape)}", f"shape {files.entries[name].shape}")


def count_groups(name: str, length: int, size: int) -> int:
    """Return how many groups of a size a row has; -1 stands for the whole row."""
    if size == -1:
        return min(length, 1)
    return -(-length // size)


# Codes.


def hold_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return int8 or uint8 codes in the narrowest dtype that numpy has for them: of 1, 2, 4 or up to 8 bits."""
    prefix = "" if codes.dtype == INT8 else "u"
    name = {1: "int2", 2: "int2", 4: "int4"}.get(bits)
    # These dtypes are saved as int8 and uint8, byte for byte.
    return codes if name is None else codes.view(np.dtype(getattr(ml_dtypes, prefix + name)))


def make_array(
    codes: np.ndarray, bits: int, scale: Part, zero_point: np.ndarray | None = None, **options: Any
) -> QuantizedArray:
    """Return a quantized array of codes in int8, uint8 or small floats, packed if they have 3, 5 or 6 bits.

    Args:
        codes: the codes.
        bits: the bits of a code.
        scale: floats, or a quantized array.
        zero_point: as the codes, or floats.
        **options: of QuantizedArray.
    """
    options.setdefault("signed_scale", isinstance(scale, QuantizedArray) or has_signs(scale))
    if codes.dtype not in (INT8, UINT8):
        return QuantizedArray(codes, scale, zero_point, **options)
    if zero_point is not None and zero_point.dtype == codes.dtype:
        zero_point = hold_codes(zero_point, bits)
    q = QuantizedArray(hold_codes(codes, bits), scale, zero_point, **options)
    return q.pack(f"{codes.dtype.name.removesuffix('8')}{bits}") if bits in _NARROW else q


def has_signs(scale: jax.Array | np.ndarray) -> bool:
    """Return whether a scale is zero or negative anywhere."""
    return scale.dtype != E8M0 and bool((scale <= 0).any())


def read_codes(q: QuantizedArray) -> np.ndarray:
    """Return the codes of an array as int8, uint8, or small floats."""
    return widen_codes(q.codes)


def widen_codes(part: jax.Array | np.ndarray) -> np.ndarray:
    """Return integers of less than 8 bits in int8 or uint8, and other arrays as they are."""
    array = np.asarray(part)
    name = array.dtype.name
    return (
        array.astype(INT8 if name.startswith("int") else UINT8) if name in ("int2", "int4", "uint2", "uint4") else array
    )


def shift_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return unsigned codes in uint8 as signed ones in int8: less 2**(bits - 1)."""
    return (codes - np.uint8(2 ** (bits - 1))).view(INT8)


def unshift_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return signed codes in int8 as unsigned ones in uint8; the inverse of `shift_codes`."""
    return codes.view(UINT8) + np.uint8(2 ** (bits - 1))


def check_unused_bits(name: str, words: np.ndarray, again: np.ndarray) -> None:
    """Raise CheckpointError unless words hold nothing but codes: writing these must give the same words."""
    if not np.array_equal(words, again):
        raise refuse(name, "unused bits of 0", "others, which no code holds")


# Writing.


def refuse_array(entry: TensorInfo, expected: str, got: object) -> CheckpointError:
    """Return the error for an array that a format does not hold; the caller raises it."""
    return refuse(entry.name, f"{expected}, to be stored as {entry.stored_as}", got)


def check_written(
    entry: TensorInfo, q: QuantizedArray, formats: Sequence[str], sizes: Sequence[int], forms: Sequence[str] = (),
    *, arithmetic: np.dtype | None = None,
) -> None:  # fmt: skip
    """Raise CheckpointError unless an array has the shape and the blocks of its description and codes of a format.

    Args:
        entry: the description.
        q: the array.
        formats: the names of the formats of codes that the file holds.
        sizes: for each dimension, how many indices share a scale in the file.
        forms: which of "zero_point", "offset" and "permutation" the file holds.
        arithmetic: the dtype that the values are computed in when the file is loaded, or None for float32.
    """
    if q.shape != entry.shape:
        raise refuse_array(entry, f"shape {entry.shape}", q.shape)
    name = "a codebook" if q.codebook is not None else q.format.name
    if name not in formats:
        raise refuse_array(entry, f"codes of {' or '.join(formats)}", name)
    for part in ("zero_point", "offset", "permutation"):
        if part not in forms and getattr(q, part) is not None:
            raise refuse_array(entry, f"no {part.replace('_', ' ')}", repr(q))
    # A product of a code and a scale of 16 bits is exact in float32, so that rounding it once or twice is the same.
    is_exact = arithmetic is None and q.offset is None and q.arithmetic == q.dtype == q.scale.dtype
    if q.arithmetic != (arithmetic or F32) and not (is_exact and not isinstance(q.scale, QuantizedArray)):
        expected = f"arithmetic in {arithmetic or F32}, in which the values of the file are computed"
        raise refuse_array(entry, expected, q.arithmetic)
    if q.inverse_scale:
        raise refuse_array(entry, "a scale that codes are multiplied with, inverse_scale=False", repr(q))
    if isinstance(q.scale, QuantizedArray) and q.scale.zero_point is not None:
        raise refuse_array(entry, "a nested scale without a zero point", repr(q.scale))
    # The file may have as many blocks, of another size.
    for part in (q.scale, q.zero_point, q.offset):
        shape = q.shape if part is None else tuple(part.shape)
        found = Aligned(q.block_size).sizes(shape, q.shape) or ()
        wrong = [axis for axis, n in enumerate(found) if shape[axis] > 1 and part is not None and n != sizes[axis]]
        if wrong:
            raise refuse_array(entry, f"blocks of {tuple(sizes)} elements", f"blocks of {found}")


def write_floats(
    entry: TensorInfo, part: Part, name: str, dtypes: Sequence[np.dtype], shape: Sequence[int]
) -> np.ndarray:
    """Return a scale or another part with one of some dtypes, expanded to a shape; raise CheckpointError for others."""
    if isinstance(part, QuantizedArray) or np.dtype(part.dtype) not in dtypes:
        got = "a quantized one" if isinstance(part, QuantizedArray) else part.dtype
        raise refuse_array(entry, f"a {name} of {' or '.join(map(str, dtypes))}", got)
    array = np.asarray(part)
    if array.shape == tuple(shape):
        return array
    fits = array.ndim == len(shape) and all(n in (1, m) for n, m in zip(array.shape, shape, strict=True))
    if not fits:
        raise refuse_array(entry, f"a {name} of shape {tuple(shape)}", array.shape)
    return np.ascontiguousarray(np.broadcast_to(array, tuple(shape)))


def derive_block_size(shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Return the argument `block_size` of an array: None if the blocks divide its dimensions."""
    return tuple(sizes) if any(n % size for n, size in zip(shape, sizes, strict=True)) else None


# Tensors that JAX made.

# What a tensor would have in a file: for each role the dtype and the shape, or the array itself.
Declared = Mapping[str, np.ndarray | tuple[np.dtype, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class DeclaredFiles:
    """Files that do not exist yet, with the attributes of `SafetensorsFiles` that listing tensors needs."""

    configs: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray | tuple[np.dtype, tuple[int, ...]]]
    metadata: Mapping[str, str]

    @property
    def entries(self) -> dict[str, StoredTensor]:
        """The tensors by name."""
        types = {n: a if isinstance(a, tuple) else (a.dtype, a.shape) for n, a in self.arrays.items()}
        return {n: StoredTensor(dtype, shape, "the new file", 0, 0) for n, (dtype, shape) in types.items()}

    def read(self, name: str) -> np.ndarray:
        """Return one of the arrays that are known."""
        array = self.arrays[name]
        assert isinstance(array, np.ndarray)
        return array


class FamilyFormat(SafetensorsFormat):
    """The base of the formats of this folder: they describe arrays that JAX made as those of a file.

    A format overrides `declare`, and `list_tensors` then checks what it declares as it checks a file.
    """

    # The end of the names of parameters, which those of the parts do not have.
    ending = ".weight"
    needs_config = True

    def declare(self, module: str, tensor: QuantizedArray, info: Info) -> Declared:
        """Return what a tensor would have in a file, by the ends of the names of its parts."""
        raise NotImplementedError

    def describe(self, name: str, tensor: QuantizedArray, info: Info) -> TensorInfo:
        """Return the description of an array that JAX made, by the configuration in the metadata of `info`."""
        if not name.endswith(self.ending) or tensor.ndim < 2:
            raise refuse(name, f"the name of a matrix that ends in {self.ending!r}", f"shape {tensor.shape}")
        module = name.removesuffix(self.ending)
        declared = {f"{module}{end}": part for end, part in self.declare(module, tensor, info).items()}
        files: Any = DeclaredFiles(info.metadata, declared, {})
        (entry,) = self.list_tensors(files)
        entry.nbytes = sum(math.prod(part.shape) * part.dtype.itemsize for part in files.entries.values())
        return entry


def count_words(length: int, bits: int) -> int:
    """Return the number of words of 32 bits that hold codes."""
    return -(-length * bits // 32)


def get_bits(q: QuantizedArray) -> int:
    """Return the number of bits of an array's integer codes, or 0 for a codebook."""
    digits = re.sub(r"\D", "", q.format.name) if q.codebook is None else ""
    return int(digits or 0)


def get_type(part: Part) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the dtype and the shape of a part of an array."""
    return np.dtype(part.dtype), tuple(part.shape)
