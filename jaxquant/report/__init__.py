"""Reports on quantized functions: where the errors are, as tables, pictures and HTML."""

from ._compare import compare
from ._report import Report, SiteRow

__all__ = ["Report", "SiteRow", "compare"]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
