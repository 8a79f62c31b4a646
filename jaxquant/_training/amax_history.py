"""Delayed scaling: the scale of a tensor from its largest magnitudes in the last steps of a training."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, entry_point
from .estimators import Estimator, StraightThrough
from .fake_quantize import Quantizer

_NAME = "AmaxHistory"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AmaxHistory:
    """The largest magnitudes of a tensor in the last steps of a training, for delayed scaling.

    scale = max(amax) / largest code

    A scale that is known before the tensor is computed needs no pass over the tensor, unlike the scale of a QuantSpec,
    which depends on the current values. The state is a pytree that the caller keeps, one for each tensor: `update`
    returns the next one. Values beyond the range of the last steps saturate, and get no gradient.

    Attributes:
        amax: float32 [length], the latest step first; 0 for steps that have not been yet.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> history = jq.AmaxHistory.start(3)
        >>> for step in (448.0, 896.0, 1.0):
        ...     history = history.update(jnp.array([step, -0.5]))
        >>> history.amax
        Array([  1., 896., 448.], dtype=float32)
        >>> history.make_quantizer(jq.QuantSpec("float8_e4m3fn"))(jnp.array([33.0, 1e4]))  # 33 / 2 is a tie
        Array([ 32., 896.], dtype=float32)

    Source: Micikevicius et al., arXiv 2209.05433; delayed scaling in NVIDIA's Transformer Engine, with the maximum of
    the history.
    """

    amax: jax.Array

    @classmethod
    def start(cls, length: int = 16) -> AmaxHistory:
        """Return the history before the first step.

        Args:
            length: the number of steps that are kept.

        Raises:
            TypeError: length is not an int.
            ValueError: length is not positive.
        """
        checks.check_integer(f"{_NAME}.start", "length", length)
        checks.require(length > 0, f"{_NAME}.start", "length", "a positive int", length)
        return cls(jnp.zeros(length, jnp.float32))

    def update(self, x: ArrayLike) -> AmaxHistory:
        """Return the history with the largest magnitude of x in front. x without elements counts as 0.

        Args:
            x: float32, float16 or bfloat16, of any shape. It gets no gradient.

        Raises:
            TypeError: x has an unsupported dtype.
        """
        x = entry_point.read_float_operand(f"{_NAME}.update", "x", x)
        checks.check_array(f"{_NAME}.update", "x", x, dtypes.FLOATS)
        amax = jnp.max(jnp.abs(jax.lax.stop_gradient(x)), initial=0).astype(jnp.float32)
        return AmaxHistory(jnp.concatenate([amax[None], self.amax[:-1]]))

    def make_quantizer(
        self, spec: QuantSpec, *, margin: int = 0, gradient: Estimator = StraightThrough()
    ) -> Quantizer:  # fmt: skip
        """Return the Quantizer whose largest code is the largest magnitude of the history times 2**margin.

        Before the first step the scale is 1.

        Args:
            spec: Static. How to quantize, with one scale.
            margin: Static. The number of binary orders of magnitude that are left for values beyond the history.
            gradient: the gradient rule.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: the spec has several scales.
        """
        checks.check_integer(f"{_NAME}.make_quantizer", "margin", margin)
        most = jax.lax.stop_gradient(jnp.max(self.amax)) * np.float32(2.0**margin)
        with checks.name_errors(f"{_NAME}.make_quantizer"):
            return Quantizer.from_range(spec, (-most, most), gradient)
