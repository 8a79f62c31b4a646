"""Packages that only some tests need, and that the extra `test` does not install."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import warnings
from typing import Any

import pytest


def load_package(*names: str) -> Any:
    """Return the last module; skip the test, with the name of the package, where one is missing or does not load."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            try:
                module = importlib.import_module(name)
            except Exception as error:  # torch's own libraries may be missing, or a version too old
                pytest.skip(f"{name} is not installed: {type(error).__name__}: {error}"[:200])
    return module


def find_folder(name: str) -> pathlib.Path:
    """Return the folder of a package that need not load, such as one with data; skip the test where it is missing."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name} is not installed")
    return pathlib.Path(next(iter(spec.submodule_search_locations)))
