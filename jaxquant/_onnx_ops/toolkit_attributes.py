"""The parameters `training`, `lda_coeff` and `name` of the LabVIEW toolkit's node, which three operators accept."""

from __future__ import annotations

import contextlib
from typing import Any

import jax

from .._core import checks


def check_attributes(function: str, training: bool, lda_coeff: float, name: str | None) -> None:
    """Raise unless the parameters of the toolkit's node have the right types and values."""
    checks.check_flag(function, "training", training)
    checks.check_real(function, "lda_coeff", lda_coeff)
    checks.check_name(function, name)


def refuse_backward(function: str, training: bool) -> None:
    """Raise ContractValueError if a call with training=False is differentiated."""
    expected = "True if the call is differentiated (with False, nothing is stored for the backward pass)"
    checks.require(training, function, "training", expected, False)


def name_scope(name: str | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which JAX names the operations, or one that does nothing if the name is None."""
    return contextlib.nullcontext() if name is None else jax.named_scope(name)
