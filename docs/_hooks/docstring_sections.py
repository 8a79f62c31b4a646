"""An extension of griffe, which reads docstrings for the API reference: `Example:` sections are code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class DocstringSections(griffe.Extension):
    """Renames `Example:` to the name of the section that griffe parses as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes one docstring. Called by griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
