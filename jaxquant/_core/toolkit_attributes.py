"""The parameters of the LabVIEW toolkit's node, which three operators take. Knows none of them."""

from __future__ import annotations

import contextlib
from typing import Any

import jax

from . import checks


def check_attributes(function: str, training: bool, lda_coeff: float, name: str | None) -> None:
    """Holds the toolkit node's parameters to their contracts."""
    checks.check_flag(function, "training", training)
    checks.check_real(function, "lda_coeff", lda_coeff)
    checks.check_name(function, name)


def refuse_backward(function: str, training: bool) -> None:
    """Raises where a call made with training=False is differentiated."""
    expected = "True where the call is differentiated (nothing was kept for the backward pass)"
    checks.require(training, function, "training", expected, False)


def name_scope(name: str | None) -> contextlib.AbstractContextManager[Any]:
    """Returns the named scope of an operation, or none."""
    return contextlib.nullcontext() if name is None else jax.named_scope(name)
