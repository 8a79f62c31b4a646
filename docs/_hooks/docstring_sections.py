"""An extension of griffe that reads the docstrings for the API reference: it renders `Example:` sections as code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class DocstringSections(griffe.Extension):
    """An extension that renames `Example:` to `Examples:`, the section that griffe parses as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in one docstring. Griffe calls this for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
