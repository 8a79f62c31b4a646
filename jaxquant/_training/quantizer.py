"""`Quantizer`: a spec with the scale, the zero point and the gradient rule of one operand of a trained contraction."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from .._arrays.quantize import quantize
from .._arrays.spec import QuantSpec
from .._core import checks, entry_point
from . import estimators
from .estimators import Estimator, StochasticRounding, StraightThrough
from .fake_quantize import check_parts, fake_quantize, split_key
from .rounding_vjp import RoundingConfig

_NAME = "Quantizer"


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Quantizer:
    """The arguments of `fake_quantize` except x, for an operand of a quantized contraction.

    quantizer(x) = fake_quantize(x, spec, scale, zero_point, gradient)

    A Quantizer is a pytree. Its leaves are the scale, the zero point and the key of a stochastic gradient rule; the
    rest is static. The constructor checks nothing, because JAX also builds pytrees of objects that are not arrays.
    Each function that takes a Quantizer checks it as `fake_quantize` checks its arguments.

    Attributes:
        spec: Static. How to quantize.
        scale: as in `fake_quantize`. None finds the scale and the zero point from the operand.
        zero_point: as in `fake_quantize`.
        gradient: the gradient rule, as in `fake_quantize`. Static, except for a key.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> quantizer = jq.Quantizer(jq.QuantSpec(jnp.uint4), 0.5, 3)
        >>> quantizer(jnp.array([-1.75, 0.25, 0.75, 100.0]))
        Array([-1.5,  0. ,  1. ,  6. ], dtype=float32)
    """

    spec: QuantSpec
    scale: Any = None
    zero_point: Any = None
    gradient: Estimator = StraightThrough()

    @classmethod
    def from_range(
        cls, spec: QuantSpec, range: tuple[ArrayLike, ArrayLike], gradient: Estimator = StraightThrough()
    ) -> Quantizer:  # fmt: skip
        """Return the Quantizer of a range, with the scale and the zero point that `quantize` computes for it.

        Args:
            spec: how to quantize, with one scale and one zero point (`PerTensor()`).
            range: the ends (lo, hi), as for `quantize`, one element each.
            gradient: the gradient rule.

        Raises:
            TypeError: an argument has a wrong type or dtype.
            ValueError: the spec has several scales, or an end is known and not finite.
        """
        with checks.name_errors("Quantizer.from_range"):
            q = quantize(np.zeros((), np.float32), spec, range)
        return cls(spec, q.scale, q.zero_point, gradient)

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Return `fake_quantize` of x with these arguments; it raises the same errors."""
        return fake_quantize(x, self.spec, self.scale, self.zero_point, self.gradient)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the leaves and the static part."""
        # The key of a stochastic rule is an array and must be a leaf.
        rule, key = split_key(self.gradient)
        return (self.scale, self.zero_point, key), (self.spec, rule)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], children: tuple[Any, ...]) -> Quantizer:
        """Return the Quantizer of these leaves, which may be any objects, and this static part."""
        spec, rule = static
        scale, zero_point, key = children
        is_stochastic = isinstance(rule, StochasticRounding)
        return cls(spec, scale, zero_point, dataclasses.replace(rule, key=key) if is_stochastic else rule)


def read_quantizer(function: str, argument: str, value: Any) -> Quantizer | None:
    """Check a spec, a Quantizer or None, and return a Quantizer whose leaves are arrays or None; None stays None."""
    if value is None:
        return None
    quantizer = Quantizer(value) if isinstance(value, QuantSpec) else value
    is_quantizer = isinstance(quantizer, Quantizer) and isinstance(quantizer.spec, QuantSpec)
    expected = "a QuantSpec, a Quantizer or None"
    checks.require_type(is_quantizer, function, argument, expected, checks.describe_value(value))
    scale, point = map(entry_point.unwrap_array, (quantizer.scale, quantizer.zero_point))
    scale, point = check_parts(function, (f"{argument}.scale", f"{argument}.zero_point"), scale, point, quantizer.spec)
    # Check the rule last: it may depend on the scale and the zero point, which have to be arrays first.
    estimators.check_estimator(function, f"{argument}.gradient", quantizer.gradient, quantizer.spec, point)
    return dataclasses.replace(quantizer, scale=scale, zero_point=point)


def split_quantizer(quantizer: Quantizer) -> tuple[RoundingConfig, tuple[Any, Any, Any]]:
    """Return the static part of a Quantizer, and (scale, zero_point, key)."""
    (scale, zero_point, key), static = quantizer.tree_flatten()
    return RoundingConfig(*static), (scale, zero_point, key)
