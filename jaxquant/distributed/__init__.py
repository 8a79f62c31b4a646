"""Collectives that send arrays as codes, layouts, checks of what devices share, and plans of large meshes.

The collectives have the names and arguments of `jax.lax`, for use inside `jax.shard_map`.
"""

from .compare import check_processes, compare_devices
from .gather import all_gather, all_to_all, ppermute
from .placement import find_shardings
from .reduce import pmean, psum, psum_scatter, psum_with_error_feedback
from .traffic import Collective, count_traffic

__all__ = [
    "Collective",
    "all_gather",
    "all_to_all",
    "check_processes",
    "compare_devices",
    "count_traffic",
    "find_shardings",
    "pmean",
    "ppermute",
    "psum",
    "psum_scatter",
    "psum_with_error_feedback",
]


def __dir__() -> list[str]:
    return __all__
