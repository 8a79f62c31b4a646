"""`quantized_dot_general`: `jax.lax.dot_general` of floats that the call quantizes, with a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._contractions.dot import check_numbers, contract_dimensions, undo_transposes
from .._contractions.output import Epilogue
from .._core import checks, dtypes, entry_point
from ..integer import DotDimensionNumbers, match_roles
from . import contraction_vjp
from .backward import compute_operand_cotangent
from .backward_choices import Backward, FloatBackward
from .fake_quantize import Quantizer

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
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Contract two float arrays in integers or in float8, with a gradient.

    out = dot_general(quantize(lhs, lhs_spec), quantize(rhs, rhs_spec))

    The forward pass is the contraction of `dot_general` bit for bit: in integers if both operands have a spec of
    integers, in float8 or float4 if both have one of these. For the backward pass, the call keeps the codes, one bit
    for each element that can saturate, and a float operand only if the gradient of its scale is needed. Under
    `jax.checkpoint` with the policy `save_codes`, a whole network keeps only the codes, the scales and these bits.

    Args:
        lhs: float32, float16 or bfloat16, of any shape.
        rhs: the same dtypes, of any shape.
        dimension_numbers: Static. ((lhs contracted, rhs contracted), (lhs batch, rhs batch)), as in `jax.lax`.
        lhs_spec: how lhs is quantized: a QuantSpec, which finds the scale from lhs; a `Quantizer`; or None, which
            leaves lhs in floats.
        rhs_spec: the same for rhs. At least one of the two must not be None.
        backward: Static. How the gradients are contracted: `FloatBackward()`, or, if both operands are quantized to
            integers, `Int8Backward()`, or, if both are quantized to float8 or float4, `Float8Backward()`.
        key: a key of `jax.random`, for the gradients of Int8Backward(stochastic_rounding=True); not needed otherwise.
            The result of the forward pass does not depend on it.
        precision: Static. As in `jax.lax`, for float contractions, in the backward pass too.
        preferred_element_type: Static. The dtype of the result: float32, float16 or bfloat16. None takes the dtype of
            the operands, or float32 if they differ.
        out_sharding: Static. The sharding of the result on a mesh with explicit axes, as in `dot_general`. A cotangent
            is sharded like its operand.

    Returns:
        The result with the batch dimensions first, the free dimensions of lhs, and the free dimensions of rhs.

    Raises:
        TypeError: an operand, a spec, the key or `backward` has a wrong type or dtype; neither operand has a spec; or
            `dot_general` would raise a TypeError.
        ValueError: shapes, scales or zero points do not fit each other; `backward` is Int8Backward() but a gradient
            cannot be contracted in integers; or `backward` rounds stochastically and there is no key.

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

    Cotangent of an operand: the cotangent of the contraction with the other operand dequantized (with Int8Backward, of
    the contraction in integers), passed through the gradient rule of its Quantizer. Of a scale and of a float32
    zero_point in a Quantizer: what that gradient rule gives.
    """
    numbers = check_numbers(_NAME, dimension_numbers)
    quantizers, dtype = contraction_vjp.check_options(
        _NAME, {"lhs_spec": lhs_spec, "rhs_spec": rhs_spec}, backward, key, precision, preferred_element_type,
        out_sharding,
    )  # fmt: skip
    lhs, rhs = entry_point.read_float_operand(_NAME, "lhs", lhs), entry_point.read_float_operand(_NAME, "rhs", rhs)
    operation = DotContraction(_NAME, numbers, precision, dtype, out_sharding)
    return contraction_vjp.quantize_and_contract(
        (lhs, rhs), tuple(quantizers), key, function=_NAME, names=contraction_vjp.SIDES, operation=operation,
        backward=backward,
    )  # fmt: skip


class DotContraction(NamedTuple):
    """A `dot_general` with its static attributes."""

    function: str
    numbers: Any
    precision: Any
    preferred: Any
    out_sharding: Any = None

    def check_operands(self, *operands: jax.Array) -> None:
        """Raise unless the operands are floats with shapes that fit each other."""
        lhs, rhs = operands
        for name, x in (("lhs", lhs), ("rhs", rhs)):
            checks.check_array(self.function, name, x, dtypes.FLOATS)
        match_roles(self.function, lhs, rhs, self.numbers)

    def contract_quantized(self, *operands: QuantizedArray | jax.Array, epilogue: Epilogue | None = None) -> Any:
        """Return the contraction of operands, at least one of them quantized."""
        lhs, rhs = operands
        lhs, rhs, numbers = undo_transposes(lhs, rhs, self.numbers)
        return contract_dimensions(
            lhs, rhs, epilogue, function=self.function, numbers=numbers, precision=self.precision,
            preferred=self.preferred, out_sharding=self.out_sharding,
            caller_axes=tuple(zip(*self.numbers[0], strict=True)),
        )  # fmt: skip

    def contract_floats(self, *operands: jax.Array) -> jax.Array:
        """Return the contraction of floats."""
        lhs, rhs = operands
        return lax.dot_general(lhs, rhs, self.numbers, self.precision, out_sharding=self.out_sharding)

    def compute_integer_cotangent(
        self, index: int, qs: Sequence[QuantizedArray], g: jax.Array | QuantizedArray, key: jax.Array | None
    ) -> jax.Array:
        """Return the float32 cotangent of the operand `index`, computed by an integer contraction."""
        # The labels of the dimensions of both operands and of the result, as an einsum would name them.
        left, right = match_roles(self.function, qs[0], qs[1], self.numbers)
        terms = []
        for side, (q, role) in enumerate(zip(qs, (left, right), strict=True)):
            labels = [""] * q.ndim
            for kind in ("batch", "contracted", "free"):
                # Free dimensions belong to one operand; the others have the same label on both.
                suffix = side if kind == "free" else ""
                for i, axis in enumerate(getattr(role, kind)):
                    labels[axis] = f"{kind}{suffix}.{i}"
            terms.append(tuple(labels))
        # The result has the batch dimensions first, then the free dimensions of each operand.
        batch = tuple(terms[0][a] for a in left.batch)
        frees = (terms[i][a] for i, role in enumerate((left, right)) for a in role.free)
        return compute_operand_cotangent(self.function, index, terms, (*batch, *frees), qs, g, key)
