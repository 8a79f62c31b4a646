"""The question for which platform a program is compiled, for computations whose other forms are not kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import lax


def choose_on_cpu(on_cpu: Callable[..., Any], elsewhere: Callable[..., Any], *operands: Any) -> Any:
    """Return `on_cpu(*operands)` in a program for a CPU, and `elsewhere(*operands)` in any other.

    Both return the same values. Use it where one form of a computation suits the caches and the threads of a CPU, and
    another one suits processors that run all of it at once. The choice is made when the program is lowered, so that a
    program that is exported for several platforms holds all of them.
    """
    return lax.platform_dependent(*operands, cpu=on_cpu, default=elsewhere)


def run_branch(
    platforms: Sequence[Sequence[str] | None], branches: Sequence[Callable[..., Any]], *operands: Any
) -> Any:
    """Return the result of the branch for the platform; None among the platforms marks the branch for all others.

    This repeats a `jax.lax.platform_dependent` of a traced program. Only the branch of the platform is compiled: a
    kernel of another one would raise an error.
    """
    named: Mapping[str, Callable[..., Any]] = {
        name: branch for names, branch in zip(platforms, branches, strict=True) for name in names or ()
    }
    default = next((branch for names, branch in zip(platforms, branches, strict=True) if names is None), None)
    return lax.platform_dependent(*operands, default=default, **named)
