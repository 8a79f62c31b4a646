"""`jax.lax.dot_general` of floats that are quantized on the way in, with a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._contractions.dot import contract_checked
from .._core import checks, dtypes, sharding
from .._core.entry_point import compile_entry_point
from ..integer.dot_general import DotDimensionNumbers, find_roles
from . import contraction_vjp, quantizer
from .backward import Backward, FloatBackward, check_backward, find_dimensions
from .quantizer import Quantizer

_NAME = "quantized_dot_general"


def quantized_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: DotDimensionNumbers,
    *,
    lhs_spec: QuantSpec | Quantizer | None,
    rhs_spec: QuantSpec | Quantizer | None,
    backward: Backward = FloatBackward(),
    key: jax.Array | None = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """out = dot_general(quantize(lhs, lhs_spec), quantize(rhs, rhs_spec)), float in and float out, with a gradient.

    Forward it is the contraction of `dot_general` to the last bit, integers where both sides have a spec. For the way
    back it keeps the codes; a bit for each element that can saturate; and the float operand only where the gradient of
    its scale is asked for. `jax.checkpoint` with the policy `save_codes` keeps nothing else of a whole network.

    Args:
        lhs: float32, float16 or bfloat16, of any shape.
        rhs: likewise.
        dimension_numbers: Static. ((lhs contracted, rhs contracted), (lhs batch, rhs batch)), as `jax.lax` has it.
        lhs_spec: how lhs is quantized: a QuantSpec, whose scale comes from lhs, a `Quantizer`, or None: not at all.
        rhs_spec: likewise; one of the two is not None.
        backward: Static. `FloatBackward()`, or `Int8Backward()` where both sides are quantized.
        key: of `jax.random`: the gradient of Int8Backward(stochastic_rounding=True) draws from it, no result does.
        precision: Static. As `jax.lax` has it, for float contractions, those of the backward pass included.
        preferred_element_type: Static. float32, float16 or bfloat16: what is returned. By default the dtype of the
            operands, float32 where they differ.
        out_sharding: Static. The sharding of the result on a mesh with explicit axes, as in `dot_general`. Cotangents
            are sharded as the operands.

    Returns:
        The batch dimensions, then lhs's free ones, then rhs's.

    Raises:
        TypeError: an operand, a spec or a backward pass is none; or what `dot_general` refuses.
        ValueError: shapes, scales or zero points do not fit each other; Int8Backward where integers cannot come back,
            or, from the gradient, that draws without a key.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x, w = jnp.array([[-1.0, 0.0, 1.55]]), jnp.array([[127.0, 1.0], [-3.5, 2.5], [0.5, -2.0]])
        >>> dense = lambda x, w: jq.quantized_dot_general(
        ...     x, w, (((1,), (0,)), ((), ())), lhs_spec=jq.QuantSpec(jnp.uint8), rhs_spec=jq.QuantSpec(jnp.int8)
        ... )
        >>> dense(x, w)  # -3.5, 2.5 and 0.5 are ties
        Array([[-127. ,   -4.1]], dtype=float32)
        >>> jax.grad(lambda x: dense(x, w).sum())(x)
        Array([[128.,  -2.,  -2.]], dtype=float32)

    Source: `jax.lax.dot_general`; Jacob et al., arXiv 1712.05877, section 3.

    Cotangent of an operand: that of the contraction with the other side dequantized (or, of Int8Backward, in integers),
    through the gradient of its Quantizer. Of a scale and a float32 zero point in a Quantizer: that gradient's.
    """
    numbers = checks.check_integers(_NAME, "dimension_numbers", dimension_numbers)
    checks.check_hashable(_NAME, "dimension_numbers", numbers)
    checks.check_precision(_NAME, precision)
    if preferred_element_type is not None:
        preferred_element_type = checks.check_dtype(
            _NAME, "preferred_element_type", preferred_element_type, dtypes.FLOATS
        )
    sharding.check_out_sharding(_NAME, out_sharding)
    operation = Dot(_NAME, numbers, precision, preferred_element_type, out_sharding)
    specs = [
        quantizer.read_quantizer(_NAME, name, given) for name, given in (("lhs_spec", lhs_spec), ("rhs_spec", rhs_spec))
    ]
    check_backward(_NAME, backward, key, specs)
    return _quantized_dot_general(lhs, rhs, *specs, key, operation=operation, backward=backward)


@compile_entry_point(_NAME)
def _quantized_dot_general(
    lhs: Any, rhs: Any, lhs_spec: Any, rhs_spec: Any, key: Any, *, operation: Dot, backward: Any
) -> jax.Array:
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        checks.check_array(_NAME, name, x, dtypes.FLOATS)
    find_roles(_NAME, lhs, rhs, operation.numbers)
    names = (("lhs", "lhs_spec"), ("rhs", "rhs_spec"))
    return contraction_vjp.contract_with_gradient(
        _NAME, names, operation, (lhs, rhs), (lhs_spec, rhs_spec), backward, key
    )


class Dot(NamedTuple):
    """`dot_general` with its dimension numbers."""

    function: str
    numbers: Any
    precision: Any
    preferred: Any
    out_sharding: Any = None

    def forward(self, *operands: Any) -> jax.Array:
        """Returns the contraction of quantized and float operands."""
        lhs, rhs = operands
        return contract_checked(
            self.function, lhs, rhs, self.numbers, self.precision, self.preferred, self.out_sharding
        )

    def floats(self, *operands: jax.Array) -> jax.Array:
        """Returns the contraction of floats."""
        lhs, rhs = operands
        return lax.dot_general(lhs, rhs, self.numbers, self.precision, out_sharding=self.out_sharding)

    def integers(self, which: int, qs: Sequence[QuantizedArray], g: jax.Array, key: Any) -> jax.Array:
        """Returns the cotangent of one operand from an integer contraction."""
        terms, out = self._labels(qs)
        return find_dimensions(self.function, which, terms, out, qs, g, key)

    def _labels(self, qs: Sequence[QuantizedArray]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
        left, right = find_roles(self.function, qs[0], qs[1], self.numbers)
        terms = []
        for side, (q, role) in enumerate(zip(qs, (left, right), strict=True)):
            labels = [""] * q.ndim
            for kind in ("batch", "contracted", "free"):
                own = side if kind == "free" else ""
                for i, axis in enumerate(getattr(role, kind)):
                    labels[axis] = f"{kind}{own}.{i}"
            terms.append(tuple(labels))
        batch = tuple(terms[0][a] for a in left.batch)
        frees = (terms[i][a] for i, role in enumerate((left, right)) for a in role.free)
        return terms, (*batch, *frees)
