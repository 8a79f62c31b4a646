"""Reports on quantized functions: where the errors are, as tables, pictures and HTML."""

from ._compare import compare
from ._report import Histogram, Report, SiteRow
from ._side_by_side import write_side_by_side
from .pictures import plot_notes, plot_plan

__all__ = ["Histogram", "Report", "SiteRow", "compare", "plot_notes", "plot_plan", "write_side_by_side"]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
