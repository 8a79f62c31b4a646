"""The algorithms that `apply` can run on each weight, with their settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._arrays.quantize import quantize
from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._core import checks
from . import _matrix
from .adaround import adaround
from .gptq import gptq
from .hqq import hqq
from .search_range import search_range

_RANGES = ("whole", "searched", "hqq")


@dataclasses.dataclass(frozen=True)
class Nearest:
    """Round to nearest, with the scale of a range.

    Attributes:
        range: "whole" for the range of the weight, "searched" for that of `search_range`, weighted with the mean
            squares of the inputs where they are known, "hqq" for that of `hqq`.
    """

    range: str = "searched"

    def __post_init__(self) -> None:
        """Check the range."""
        checks.check_option(type(self).__name__, "range", self.range, _RANGES)

    def quantize(self, w: jax.Array, hessian: jax.Array | None, spec: QuantSpec, axis: Any) -> QuantizedArray:
        """Return the quantized array of a weight; `hessian` is None if its inputs are not known."""
        return find_grid(self.range, w, hessian, spec, axis)


@dataclasses.dataclass(frozen=True)
class HQQ:
    """`hqq`, which needs no data; its attributes are the arguments of the function."""

    p: float = 0.7
    beta: float = 10.0
    growth: float = 1.01
    steps: int = 20

    def quantize(self, w: jax.Array, hessian: jax.Array | None, spec: QuantSpec, axis: Any) -> QuantizedArray:
        """Return the quantized array of a weight."""
        return hqq(w, spec, p=self.p, beta=self.beta, growth=self.growth, steps=self.steps)


@dataclasses.dataclass(frozen=True)
class GPTQ:
    """`gptq`; its attributes are the arguments of the function, and the range of the grid, as for `Nearest`."""

    activation_order: bool = True
    damping: float = 0.01
    sweeps: int = 0
    range: str = "searched"

    def __post_init__(self) -> None:
        """Check the range."""
        checks.check_option(type(self).__name__, "range", self.range, _RANGES)

    def quantize(self, w: jax.Array, hessian: jax.Array | None, spec: QuantSpec, axis: Any) -> QuantizedArray:
        """Return the quantized array of a weight; rounded to nearest if its inputs are not known."""
        grid = find_grid(self.range, w, hessian, spec, axis)
        if hessian is None:
            return grid
        return gptq(
            w, hessian, spec, grid, axis=axis, activation_order=self.activation_order, damping=self.damping,
            sweeps=self.sweeps,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AdaRound:
    """`adaround`; its attributes are the arguments of the function, and the range of the grid, as for `Nearest`."""

    steps: int = 300
    rate: float = 0.05
    penalty: float = 1.0
    sweeps: int = 2
    range: str = "searched"

    def __post_init__(self) -> None:
        """Check the range."""
        checks.check_option(type(self).__name__, "range", self.range, _RANGES)

    def quantize(self, w: jax.Array, hessian: jax.Array | None, spec: QuantSpec, axis: Any) -> QuantizedArray:
        """Return the quantized array of a weight; rounded to nearest if its inputs are not known."""
        grid = find_grid(self.range, w, hessian, spec, axis)
        if hessian is None:
            return grid
        return adaround(
            w, hessian, spec, grid, axis=axis, steps=self.steps, rate=self.rate, penalty=self.penalty,
            sweeps=self.sweeps,
        )  # fmt: skip


Method = Nearest | HQQ | GPTQ | AdaRound


def find_grid(name: str, w: jax.Array, hessian: jax.Array | None, spec: QuantSpec, axis: Any) -> QuantizedArray:
    """Return a weight rounded to nearest with the scale of a range of this name."""
    if name == "hqq":
        return hqq(w, spec)
    if name == "whole" or spec.zero_point_granularity != spec.granularity:
        return quantize(w, spec)
    importance = None
    if hessian is not None:
        layout = _matrix.make_layout("ptq.apply", w.shape, axis, hessian.shape[0])
        squares = jnp.diagonal(hessian, axis1=1, axis2=2)[:, :, None]
        outputs = w.size // layout.inputs // layout.groups
        # An input without data must not make its weights free of cost: only they may share the scale.
        squares = jnp.maximum(squares, 1e-6 * jnp.maximum(jnp.max(squares), jnp.finfo(jnp.float32).tiny))
        importance = layout.restore(jnp.repeat(squares, outputs, 2))
    return quantize(w, spec, range=search_range(w, spec, importance))


def measure_error(w: jax.Array, q: QuantizedArray, hessian: jax.Array, axis: Any) -> jax.Array:
    """Return trace(E^T H E), the mean squared error of the outputs."""
    layout = _matrix.make_layout("ptq.apply", w.shape, axis, hessian.shape[0])
    errors = layout.arrange(w.astype(jnp.float32) - q.dequantize().astype(jnp.float32))
    return jnp.sum(errors * jnp.matmul(hessian, errors, precision=jax.lax.Precision.HIGHEST))


def check_method(function: str, method: Any) -> None:
    """Raise unless a method is one of this module's."""
    expected = "ptq.GPTQ(), ptq.AdaRound(), ptq.HQQ() or ptq.Nearest()"
    checks.require_type(isinstance(method, Method), function, "method", expected, checks.describe_value(method))
