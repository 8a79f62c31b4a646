"""`numpy.einsum` of floats that are quantized on the way in, with a gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._contractions.einsum import contract_operands, parse_subscripts
from .._core import checks, dtypes, entry_point, sharding
from . import contraction_vjp, quantizer
from .backward import Backward, FloatBackward, check_backward, find_dimensions
from .quantizer import Quantizer

_NAME = "quantized_einsum"


def quantized_einsum(
    subscripts: str,
    *operands: ArrayLike,
    specs: Sequence[QuantSpec | Quantizer | None],
    backward: Backward = FloatBackward(),
    key: jax.Array | None = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """out = einsum(subscripts, *(quantize(x, spec) for each operand)), float in and float out, with a gradient.

    Forward it is `einsum` to the last bit: two quantized operands are one integer contraction, more are contracted pair
    by pair. What is kept for the way back is as of `quantized_dot_general`.

    Args:
        subscripts: Static. As of `einsum`.
        operands: float32, float16 or bfloat16, each.
        specs: how each of them is quantized: a QuantSpec, whose scale comes from it, a `Quantizer`, or None: not at
            all. One at least is not None.
        backward: Static. `FloatBackward()`, or `Int8Backward()` for two operands that are both quantized.
        key: of `jax.random`: the gradient of Int8Backward(stochastic_rounding=True) draws from it, no result does.
        precision: Static. As `jax.lax.dot_general` has it, for float contractions, those of the backward pass included.
        preferred_element_type: Static. float32, float16 or bfloat16: what is returned. By default the dtype of the
            operands, float32 where they differ.
        out_sharding: Static. The sharding of the output on a mesh with explicit axes, as in `einsum`. Cotangents are
            sharded as the operands.

    Returns:
        The dimensions of the output's indices, in their order.

    Raises:
        TypeError: an operand, a spec or a backward pass is none; or what `einsum` refuses.
        ValueError: likewise; or there are not as many specs as operands.

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

    Cotangents: as of `quantized_dot_general`.
    """
    named = {f"operands[{i}]": entry_point.unwrap_array(x) for i, x in enumerate(operands)}
    given = entry_point.convert_arrays(_NAME, named)
    for i, x in enumerate(given):
        checks.check_array(_NAME, f"operands[{i}]", x, dtypes.FLOATS)
    counts = isinstance(specs, list | tuple) and len(specs) == len(given)
    got = f"{len(specs)} for {len(given)} operands" if isinstance(specs, list | tuple) else checks.describe_value(specs)
    checks.require(counts, _NAME, "specs", "a spec or None for each operand", got)
    opened = tuple(quantizer.read_quantizer(_NAME, f"specs[{i}]", spec) for i, spec in enumerate(specs))
    check_backward(_NAME, backward, key, opened)
    if preferred_element_type is not None:
        preferred_element_type = checks.check_dtype(
            _NAME, "preferred_element_type", preferred_element_type, dtypes.FLOATS
        )
    checks.check_precision(_NAME, precision)
    parse_subscripts(_NAME, subscripts, [x.ndim for x in given])
    sharding.check_out_sharding(_NAME, out_sharding)
    operation = Einsum(subscripts, precision, preferred_element_type, out_sharding)
    return _quantized_einsum(given, opened, key, operation=operation, backward=backward)


@functools.partial(jax.jit, inline=True, static_argnames=("operation", "backward"))
def _quantized_einsum(operands: Any, specs: Any, key: Any, *, operation: Einsum, backward: Any) -> jax.Array:
    names = [(f"operands[{i}]", f"specs[{i}]") for i in range(len(operands))]
    return contraction_vjp.contract_with_gradient(_NAME, names, operation, operands, specs, backward, key)


class Einsum(NamedTuple):
    """`einsum` with its subscripts."""

    subscripts: str
    precision: Any
    preferred: Any
    out_sharding: Any = None

    def forward(self, *operands: Any) -> jax.Array:
        """Returns the contraction of quantized and float operands."""
        return contract_operands(_NAME, self.subscripts, operands, self.precision, self.preferred, self.out_sharding)

    def floats(self, *operands: jax.Array) -> jax.Array:
        """Returns the contraction of floats."""
        return jnp.einsum(self.subscripts, *operands, precision=self.precision, out_sharding=self.out_sharding)

    def integers(self, which: int, qs: Sequence[QuantizedArray], g: jax.Array, key: Any) -> jax.Array:
        """Returns the cotangent of one operand from an integer contraction."""
        terms, out = parse_subscripts(_NAME, self.subscripts, [q.ndim for q in qs])
        sizes: dict[str, int] = {}
        for q, labels in zip(qs, terms, strict=True):
            for label, n in zip(labels, q.shape, strict=True):
                expected = 'FloatBackward(), for a size of 1 stands for another under "..."'
                checks.require(sizes.setdefault(label, n) == n, _NAME, "backward", expected, "Int8Backward()")
        return find_dimensions(_NAME, which, terms, out, qs, g, key)
