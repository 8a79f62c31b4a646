"""`quantized_einsum`: `numpy.einsum` of floats that the call quantizes, with a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._contractions.einsum import contract_operands, parse_subscripts
from .._core import checks, dtypes, entry_point
from . import contraction_vjp
from .backward import compute_operand_cotangent
from .backward_choices import Backward, FloatBackward
from .fake_quantize import Quantizer

_NAME = "quantized_einsum"


def quantized_einsum(
    subscripts: str,
    *operands: ArrayLike,
    specs: Sequence[QuantSpec | Quantizer | None],
    backward: Backward = FloatBackward(),
    key: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Contract float arrays in integers by numpy's subscripts, with a gradient.

    out = einsum(subscripts, *(quantize(x, spec) for each operand))

    The forward pass is `einsum` bit for bit: two quantized operands are one integer contraction, more operands are
    contracted pair by pair. The backward pass keeps the same residuals as `quantized_dot_general`.

    Args:
        subscripts: Static. As in `einsum`.
        operands: arrays of float32, float16 or bfloat16.
        specs: how each operand is quantized: a QuantSpec, which finds the scale from the operand; a `Quantizer`; or
            None, which leaves it in floats. At least one must not be None.
        backward: Static. How the gradients are contracted: `FloatBackward()`, or, for two operands that are both
            quantized, `Int8Backward()` for integers and `Float8Backward()` for float8 or float4.
        key: a key of `jax.random`, for the gradients of Int8Backward(stochastic_rounding=True); not needed otherwise.
            The result of the forward pass does not depend on it.
        precision: Static. As in `jax.lax.dot_general`, for float contractions, in the backward pass too.
        preferred_element_type: Static. The dtype of the result: float32, float16 or bfloat16. None takes the dtype of
            the operands, or float32 if they differ.
        out_sharding: Static. The sharding of the result on a mesh with explicit axes, as in `einsum`. A cotangent is
            sharded like its operand.

    Returns:
        The result, with a dimension for each output index, in their order.

    Raises:
        TypeError: an operand, a spec, the key or `backward` has a wrong type or dtype; no operand has a spec; or
            `einsum` would raise a TypeError.
        ValueError: the number of specs is not the number of operands; shapes, scales or zero points do not fit each
            other; `backward` is Int8Backward() but a gradient cannot be contracted in integers; `backward` rounds
            stochastically and there is no key; or `einsum` would raise a ValueError.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> spec = jq.QuantSpec(jnp.int8)
        >>> x, w = jnp.array([[127.0, 2.5], [-0.5, 300.0]]), jnp.array([[1.0, -1.0], [63.5, 0.25], [0.0, 2.0]])
        >>> clipped = jq.Quantizer(spec, 1.0)  # 2.5 and -0.5 are ties, and 300 saturates
        >>> product = lambda x: jq.quantized_einsum("qd,kd->kq", x, w, specs=(clipped, spec))
        >>> product(x).tolist()
        [[125.0, -127.0], [8064.5, 0.0], [4.0, 254.0]]
        >>> jax.grad(lambda x: product(x).sum())(x)
        Array([[64.5,  1. ],
               [64.5,  0. ]], dtype=float32)

    Source: numpy.einsum; Jacob et al., arXiv 1712.05877, section 3.

    Cotangents: as for `quantized_dot_general`.
    """
    # numpy arrays and wrapped arrays are converted here, because the operands are a tuple in the compiled program.
    named = {f"operands[{i}]": entry_point.unwrap_array(x) for i, x in enumerate(operands)}
    arrays = entry_point.convert_arrays(_NAME, named)
    for i, x in enumerate(arrays):
        checks.check_array(_NAME, f"operands[{i}]", x, dtypes.FLOATS)
    is_list = isinstance(specs, list | tuple)
    if not is_list or len(specs) != len(arrays):
        got = f"{len(specs)} for {len(arrays)} operands" if is_list else checks.describe_value(specs)
        checks.refuse(_NAME, "specs", "a spec or None for each operand", got)
    named_specs = {f"specs[{i}]": spec for i, spec in enumerate(specs)}
    quantizers, dtype = contraction_vjp.check_options(
        _NAME, named_specs, backward, key, precision, preferred_element_type, out_sharding
    )
    operation = EinsumContraction(subscripts, precision, dtype, out_sharding)
    names = tuple((f"operands[{i}]", f"specs[{i}]") for i in range(len(arrays)))
    return contraction_vjp.quantize_and_contract(
        arrays, tuple(quantizers), key, function=_NAME, names=names, operation=operation, backward=backward
    )


class EinsumContraction(NamedTuple):
    """An `einsum` with its static attributes."""

    subscripts: str
    precision: Any
    preferred: Any
    out_sharding: Any = None

    def check_operands(self, *operands: jax.Array) -> None:
        """Raise unless the subscripts fit the operands."""
        parse_subscripts(_NAME, self.subscripts, [x.ndim for x in operands])

    def contract_quantized(self, *operands: QuantizedArray | jax.Array) -> jax.Array:
        """Return the contraction of operands, at least one of them quantized."""
        return contract_operands(_NAME, self.subscripts, operands, self.precision, self.preferred, self.out_sharding)

    def contract_floats(self, *operands: jax.Array) -> jax.Array:
        """Return the contraction of floats."""
        return jnp.einsum(self.subscripts, *operands, precision=self.precision, out_sharding=self.out_sharding)

    def compute_integer_cotangent(
        self, index: int, qs: Sequence[QuantizedArray], g: jax.Array | QuantizedArray, key: jax.Array | None
    ) -> jax.Array:
        """Return the float32 cotangent of the operand `index`, computed by an integer contraction."""
        terms, out = parse_subscripts(_NAME, self.subscripts, [q.ndim for q in qs])
        # An integer contraction does not broadcast a dimension of 1.
        sizes: dict[str, int] = {}
        for q, labels in zip(qs, terms, strict=True):
            for label, n in zip(labels, q.shape, strict=True):
                expected = 'FloatBackward(), because a dimension of size 1 is broadcast under "..."'
                checks.require(sizes.setdefault(label, n) == n, _NAME, "backward", expected, "Int8Backward()")
        return compute_operand_cotangent(_NAME, index, terms, out, qs, g, key)
