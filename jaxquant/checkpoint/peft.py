"""Folders of adapters as the package PEFT has them: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .._core import checks
from .containers import replace_folder
from .info import CheckpointError
from .safetensors import load_safetensors, save_safetensors

CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Further settings of PEFT, which change what an adapter computes, and the values at which they do not.
_PLAIN = {
    "bias": ("none",), "modules_to_save": (None, []), "fan_in_fan_out": (False, None), "lora_bias": (False, None),
    "layer_replication": (None, []), "trainable_token_indices": (None, []), "use_qalora": (False, None),
    "target_parameters": (None, []), "alora_invocation_tokens": (None, []), "use_bdlora": (None, False),
    # The other initial values also change the weights of the model, which no file of adapters holds.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
    "arrow_config": (None,), "kasa_config": (None,), "monteclora_config": (None,), "velora_config": (None,),
}  # fmt: skip


def write_folder(folder: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Write the settings and the tensors of adapters."""
    target = pathlib.Path(folder)
    with _name_path(target, "a folder that can be made and written to"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replace_folder(target) as new:
            save_safetensors(new / _TENSORS, dict(tensors))
            (new / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def read_folder(function: str, folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the settings and the tensors of adapters."""
    source = pathlib.Path(folder)
    with _name_path(source / CONFIG, "a file that can be read"):
        config = _read_config(function, source / CONFIG)
    with _name_path(source / _TENSORS, "a file that can be read"):
        return config, load_safetensors(source / _TENSORS)


@contextlib.contextmanager
def _name_path(path: pathlib.Path, expected: str) -> Iterator[None]:
    """Raise CheckpointError, which says what was expected at a path, in place of the errors of the system."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: expected {expected}, got {error.strerror or error}") from error


def _read_config(function: str, path: pathlib.Path) -> dict[str, Any]:
    """Return the settings of a file, of the types that they must have."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        text = checks.format_message(function, "folder", "a JSON file", f"{os.fspath(path)!r}: {error}")
        raise checks.ContractValueError(text) from error
    checks.require(isinstance(config, dict), function, CONFIG, "an object", type(config).__name__)
    checks.require(config.get("peft_type") == "LORA", function, CONFIG, 'peft_type "LORA"', config.get("peft_type"))
    for name, values in _PLAIN.items():
        value = config.get(name, values[0])
        expected = " or ".join(map(json.dumps, values))
        checks.require(value in values, function, CONFIG, f"{name} {expected}", repr(value))
    kinds = {
        "r": int, "lora_alpha": int | float, "lora_dropout": int | float, "use_rslora": bool, "use_dora": bool,
        "rank_pattern": dict, "alpha_pattern": dict,
    }  # fmt: skip
    # PEFT's own values, where an older file lacks a setting.
    result: dict[str, Any] = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False, "use_dora": False}
    result |= {"rank_pattern": {}, "alpha_pattern": {}}
    for name, kind in kinds.items():
        value = config.get(name)
        value = result[name] if value is None else value
        holds = isinstance(value, kind) and (kind in (bool, dict) or not isinstance(value, bool))
        checks.require(holds, function, CONFIG, f"a number, a bool or an object at {name}", repr(value))
        if isinstance(value, dict):
            holds = all(isinstance(x, int | float) and not isinstance(x, bool) for x in value.values())
            checks.require(holds, function, CONFIG, f"numbers in {name}", repr(value))
        result[name] = value
    return result


def write_patterns(numbers: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """Return the patterns that give modules their numbers, those of the modules whose number is not the default.

    Args:
        numbers: the number of each module by its name.
        default: the number of the modules that no pattern matches.
    """
    patterns = {}
    for module, number in numbers.items():
        if number != default:
            # PEFT searches for the name at the end of others, too, and takes the first pattern that matches.
            is_plain = re.fullmatch(r"[\w.-]*", module) is not None
            is_plain = is_plain and all(other == number for name, other in numbers.items() if _matches(module, name))
            patterns[module if is_plain else f"^{re.escape(module)}"] = number
    return patterns


def match_patterns(function: str, config: Mapping[str, Any], module: str) -> tuple[Any, Any]:
    """Return the rank and the alpha of a module."""
    rank = _match_pattern(function, config, "rank_pattern", "r", module)
    return rank, _match_pattern(function, config, "alpha_pattern", "lora_alpha", module)


def _match_pattern(function: str, config: Mapping[str, Any], pattern: str, default: str, module: str) -> Any:
    """Return the number that a pattern of a file gives a module."""
    for key, number in config[pattern].items():
        try:
            is_match = _matches(key, module)
        except re.error as error:
            checks.refuse(function, CONFIG, f"regular expressions as keys of {pattern}", f"{key!r}: {error}")
        if is_match:
            return number
    return config[default]


def _matches(pattern: str, module: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", module) is not None
