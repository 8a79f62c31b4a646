"""A spec with the scale, the zero point and the gradient that one operand of a trained contraction has."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.typing import ArrayLike

from .._arrays.spec import QuantSpec
from .._core import checks, entry_point
from . import estimators
from .estimators import Rule, StochasticRounding, StraightThrough
from .fake_quantize import Config, check_parts, fake_quantize, split_key

_NAME = "Quantizer"


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Quantizer:
    """y = fake_quantize(x, spec, scale, zero_point, gradient): all of it but x.

    A pytree: the scale, the zero point and the key of a stochastic gradient are its leaves, and the rest is static.
    The constructor checks nothing, for JAX builds pytrees of things that are no arrays; every function that is given
    one does, as `fake_quantize` checks its arguments.

    Attributes:
        spec: Static. How to quantize.
        scale: as of `fake_quantize`. None finds it, and the zero point, from what is quantized.
        zero_point: as of `fake_quantize`.
        gradient: Static, but for a key. As of `fake_quantize`.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> quantizer = jq.Quantizer(jq.QuantSpec(jnp.uint4), 0.5, 3)
        >>> quantizer(jnp.array([-1.75, 0.25, 0.75, 100.0]))
        Array([-1.5,  0. ,  1. ,  6. ], dtype=float32)
    """

    spec: QuantSpec
    scale: Any = None
    zero_point: Any = None
    gradient: Rule = StraightThrough()

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Returns `fake_quantize` of x."""
        return fake_quantize(x, self.spec, self.scale, self.zero_point, self.gradient)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the arrays, and what is static."""
        rule, key = split_key(self.gradient)
        return (self.scale, self.zero_point, key), (self.spec, rule)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], children: tuple[Any, ...]) -> Quantizer:
        """Returns what `tree_flatten` was given, whatever the children are by now."""
        spec, rule = static
        scale, zero_point, key = children
        draws = isinstance(rule, StochasticRounding)
        return cls(spec, scale, zero_point, dataclasses.replace(rule, key=key) if draws else rule)


def read_quantizer(function: str, argument: str, given: Any) -> Quantizer | None:
    """Requires a spec, a Quantizer or None, and returns the latter two, whose parts are arrays or None."""
    if given is None:
        return None
    quantizer = Quantizer(given) if isinstance(given, QuantSpec) else given
    is_one = isinstance(quantizer, Quantizer) and isinstance(quantizer.spec, QuantSpec)
    expected = "a QuantSpec, a Quantizer or None"
    checks.require_type(is_one, function, argument, expected, checks.describe_value(given))
    scale, point = (entry_point.unwrap_array(part) for part in (quantizer.scale, quantizer.zero_point))
    scale, point = check_parts(function, (f"{argument}.scale", f"{argument}.zero_point"), scale, point, quantizer.spec)
    estimators.check_estimator(function, f"{argument}.gradient", quantizer.gradient, quantizer.spec, point)
    return dataclasses.replace(quantizer, scale=scale, zero_point=point)


def split_quantizer(quantizer: Quantizer) -> tuple[Config, tuple[Any, Any, Any]]:
    """Returns what is static of a Quantizer, and (scale, zero_point, key)."""
    (scale, zero_point, key), static = quantizer.tree_flatten()
    return Config(*static), (scale, zero_point, key)
