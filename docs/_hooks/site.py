"""A hook of mkdocs that puts the version of the documentation into the name of the site and into the footer."""

from __future__ import annotations

import pathlib
import tomllib
from typing import Any


def on_config(config: Any) -> Any:
    """Name the version: the header has major and minor, and the footer the whole. mkdocs calls this for each build."""
    pyproject = pathlib.Path(config.config_file_path).with_name("pyproject.toml")
    version = tomllib.loads(pyproject.read_text())["project"]["version"]
    config.site_name = f"{config.site_name} {'.'.join(version.split('.')[:2])}"
    config.copyright = f"The documentation of jaxquant {version}, Apache-2.0"
    return config
