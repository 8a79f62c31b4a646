"""How the gradients of a contraction are contracted: the values of `backward=`, and their check. Frozen dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from .._arrays.spec import QuantSpec
from .._core import checks, dtypes


@dataclasses.dataclass(frozen=True)
class FloatBackward:
    """The gradients of a quantized contraction, computed in floats.

    dlhs = g contracted with the dequantized rhs, and drhs = the dequantized lhs contracted with g, in the float dtype
    of the operands.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> spec, w = jq.QuantSpec(jnp.int8), jnp.array([[127.0], [2.5]])  # 2.5 is a tie
        >>> dense = lambda x: jq.quantized_einsum("bi,io->bo", x, w, specs=(spec, spec), backward=jq.FloatBackward())
        >>> jax.grad(lambda x: dense(x).sum())(jnp.array([[0.1, -0.2]]))
        Array([[127.,   2.]], dtype=float32)
    """


@dataclasses.dataclass(frozen=True)
class Int8Backward:
    """The gradients of a quantized contraction, computed in integers.

    dlhs = q(g) contracted with the codes of rhs, and drhs = the codes of lhs contracted with q(g).

    q quantizes g to int8, symmetrically, with one scale for each index that the contraction does not sum over: in a
    matrix product, one for each row of dlhs or for each column of drhs. If the scale of the other operand varies along
    a dimension that is summed over, it is multiplied into g first.

    Attributes:
        stochastic_rounding: whether g is rounded stochastically, which keeps a gradient that sums many small parts
            unbiased. Differentiating the call then needs a `key`.
        lhs: whether dlhs is computed in integers. If False, it is computed as with `FloatBackward`.
        rhs: whether drhs is computed in integers. If False, it is computed as with `FloatBackward`.

    Raises:
        TypeError: an attribute is not True or False.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> spec, w = jq.QuantSpec(jnp.int8), jnp.array([[127.0], [2.5]])  # 2.5 is a tie
        >>> dense = lambda x: jq.quantized_einsum("bi,io->bo", x, w, specs=(spec, spec), backward=jq.Int8Backward())
        >>> jax.grad(lambda x: dense(x).sum())(jnp.array([[0.1, -0.2]])).round(4)
        Array([[127.,   2.]], dtype=float32)

    Source: Banner et al., arXiv 1805.11046, section 5, which keeps drhs in floats; Gupta et al., arXiv 1502.02551, for
    the rounding.
    """

    stochastic_rounding: bool = False
    lhs: bool = True
    rhs: bool = True

    def __post_init__(self) -> None:
        """Check the flags."""
        for field in ("stochastic_rounding", "lhs", "rhs"):
            checks.check_flag("Int8Backward", field, getattr(self, field))


@dataclasses.dataclass(frozen=True)
class Float8Backward:
    """The gradients of a contraction of float8 codes, computed from float8 gradients.

    dlhs = q(g) contracted with the codes of rhs, and drhs = the codes of lhs contracted with q(g), times the scales.

    q quantizes g with one scale, found from g itself (current scaling). The products of codes are exact in float32.
    CUDA and TPU contract them as float8 where no scale varies along the dimensions that are summed.

    Attributes:
        dtype: the float8 dtype of g. float8_e5m2 has the range of float16, which gradients need more than digits.

    Raises:
        TypeError: dtype is not a float8 dtype.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> spec, w = jq.QuantSpec("float8_e4m3fn"), jnp.array([[448.0], [17.0]])  # 17 is a tie
        >>> dense = lambda x: jq.quantized_einsum("bi,io->bo", x, w, specs=(spec, spec), backward=jq.Float8Backward())
        >>> jax.grad(lambda x: dense(x).sum())(jnp.array([[0.1, -0.2]])).round(2)
        Array([[448.,  16.]], dtype=float32)

    Source: Micikevicius et al., arXiv 2209.05433, sections 3 and 4.
    """

    dtype: Any = "float8_e5m2"

    def __post_init__(self) -> None:
        """Check the dtype."""
        object.__setattr__(self, "dtype", checks.check_dtype("Float8Backward", "dtype", self.dtype, dtypes.FLOAT8))


Backward = FloatBackward | Int8Backward | Float8Backward


def check_backward(function: str, backward: object, key: jax.Array | None, specs: Sequence[QuantSpec | None]) -> None:
    """Check `backward`, its key, and, unless it is FloatBackward, that two operands are quantized as it needs them.

    This comes before the call is compiled, because `backward` is static in the compiled program.
    """
    is_backward = isinstance(backward, Backward)
    expected = "FloatBackward(), Int8Backward() or Float8Backward()"
    checks.require_type(is_backward, function, "backward", expected, checks.describe_value(backward))
    is_key = key is None or checks.is_key(key)
    checks.require_type(is_key, function, "key", "None or one key of jax.random", checks.describe_value(key))
    if isinstance(backward, FloatBackward):
        return
    name = type(backward).__name__
    expected = f"FloatBackward(), because {name}() needs two quantized operands"
    quantized = [spec for spec in specs if spec is not None]
    checks.require(len(specs) == len(quantized) == 2, function, "backward", expected, f"{name}()")
    is_float8 = isinstance(backward, Float8Backward)
    for spec in quantized:
        needed = "operands in float8 or float4" if is_float8 else "operands in integers"
        expected = f"FloatBackward(), because {name}() needs {needed}"
        fits = (spec.dtype in dtypes.SMALL_FLOATS) == is_float8 or (not is_float8 and spec.codebook is not None)
        checks.require(fits, function, "backward", expected, f"{name}() with {spec.dtype}")
