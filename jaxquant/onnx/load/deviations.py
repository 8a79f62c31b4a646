"""Where ONNX Runtime's fusions change the value of a model by more than rounding: what is said, and what is done."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

_SHOWN = 8


class FusionWarning(UserWarning):
    """The warning for a model whose value ONNX Runtime's fusions change by more than rounding.

    `load` warns once, and names the nodes, what the model says and what ONNX Runtime computes. To silence it after you
    have read it: `warnings.simplefilter("ignore", jaxquant.onnx.FusionWarning)`.
    """


class Deviation(NamedTuple):
    """A node that ONNX Runtime with all optimizations computes otherwise than the model says, by more than rounding.

    Attributes:
        node: what errors and tables call the node.
        op: its operator.
        model: what the model says.
        runtime: what ONNX Runtime computes.
        is_followed: whether the loaded function computes what ONNX Runtime does.
    """

    node: str
    op: str
    model: str
    runtime: str
    is_followed: bool

    def __str__(self) -> str:
        end = "" if self.is_followed else " (this function computes what the model says)"
        return f"{self.node}: {self.model}; ONNX Runtime {self.runtime}{end}"


def warn_of_deviations(deviations: Sequence[Deviation], stacklevel: int) -> None:
    """Warn once, if there are any."""
    if not deviations:
        return
    shown = [f"  {deviation}" for deviation in deviations[:_SHOWN]]
    if len(deviations) > _SHOWN:
        shown.append(f"  and {len(deviations) - _SHOWN} more, in fn.deviations")
    followed = any(deviation.is_followed for deviation in deviations)
    end = ' The loaded function does the same; fusions="safe" gives the value of the model.' if followed else ""
    text = f"ONNX Runtime's optimizations change the value of this model by more than rounding.{end}"
    warnings.warn("\n".join([text, *shown]), FusionWarning, stacklevel=stacklevel + 1)
