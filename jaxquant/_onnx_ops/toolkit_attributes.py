"""The parameters of the LabVIEW toolkit's node beside those of ONNX, which three operators accept."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax

from .._core import checks, recording


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


def read_names(function: str, names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """Return `specified_outputs_name` as a tuple; raise unless it has a name for each output, or is empty or None."""
    names = () if names is None else names
    argument, expected = "specified_outputs_name", f"{count} distinct names, one for each output, or None"
    is_sequence = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    checks.require_type(is_sequence, function, argument, expected, repr(names))
    is_valid = not names or (len(names) == len(set(names)) == count and all(names))
    checks.require(is_valid, function, argument, expected, repr(names))
    return tuple(names)


def name_outputs(outputs: Sequence[jax.Array], names: tuple[str, ...]) -> tuple[jax.Array, ...]:
    """Return the outputs of an operator, which an exporter gives these names."""
    # Only an exporter reads the names.
    if not names or not recording.is_recording():
        return tuple(outputs)
    return tuple(_name_output(x, name) for x, name in zip(outputs, names, strict=True))


@recording.mark("name_output", lambda x, name: (x.shape, x.dtype), recording.map_elements)
def _name_output(x: jax.Array, name: str) -> jax.Array:
    return x
