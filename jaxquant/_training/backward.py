"""The ways to contract the gradient of an integer contraction: in floats, or again in integers."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._arrays.quantize import quantize
from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._contractions.einsum import contract_operands
from .._core import checks, dtypes, granularity, sharding
from .._core.granularity import PerAxis, PerTensor
from . import estimators
from .rounding_vjp import RoundingConfig, make_array

Labels = tuple[str, ...]


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

    def quantize_gradient(self, g: jax.Array) -> QuantizedArray:
        """Return g in float8 with one scale."""
        return quantize(g.astype(jnp.float32), QuantSpec(self.dtype))


Backward = FloatBackward | Int8Backward | Float8Backward


def check_backward(function: str, backward: object, key: jax.Array | None, specs: Sequence[Any]) -> None:
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
    checks.require(len(specs) == 2 and None not in specs, function, "backward", expected, f"{name}()")
    is_float8 = isinstance(backward, Float8Backward)
    for quantizer in specs:
        dtype = quantizer.spec.dtype
        needed = "operands in float8 or float4" if is_float8 else "operands in integers"
        expected = f"FloatBackward(), because {name}() needs {needed}"
        fits = (dtype in dtypes.SMALL_FLOATS) == is_float8 or (not is_float8 and quantizer.spec.codebook is not None)
        checks.require(fits, function, "backward", expected, f"{name}() with {dtype}")


def quantize_gradient(g: jax.Array, axes: tuple[int, ...], key: jax.Array | None) -> QuantizedArray:
    """Return g as int8 with a scale for each index of the kept dimensions, rounded stochastically if there is a key."""
    spec = QuantSpec(jnp.int8, PerAxis(axes) if axes else PerTensor())
    q = quantize(g, spec)
    if key is None:
        return q
    # The scale is the same as for rounding to nearest, so both roundings have the same range.
    return make_array(RoundingConfig(spec, estimators.StochasticRounding(None)), g, q.scale, None, key)


def fold_scale_into_gradient(
    function: str, q: QuantizedArray, summed: Sequence[int], g: jax.Array, dimensions: Sequence[int | None]
) -> tuple[QuantizedArray, jax.Array]:
    """Return an operand with a constant scale along the summed dimensions, and g multiplied by its former scale.

    Args:
        function: the name of the public function, for errors.
        q: the operand.
        summed: the dimensions of q that the gradient sums over.
        g: the cotangent, float32.
        dimensions: for each dimension of q, the corresponding dimension of g, or None.
    """
    shape = q.scale.shape
    varying = [a for a in range(q.ndim) if shape[a] != 1]
    has_one_zero_point = q.zero_point is None or all(q.zero_point.shape[a] == 1 for a in summed)
    expected = "FloatBackward(), because the zero point varies along a dimension that the gradient sums over"
    checks.require(has_one_zero_point, function, "backward", expected, "Int8Backward()")
    # A scale that is constant along the sum can be multiplied in after the contraction of integers.
    if not any(a in summed for a in varying):
        return q, g
    is_in_g = all(dimensions[a] is not None for a in varying)
    expected = (
        "FloatBackward(), because the scale is blocked, or varies along a dimension that the result does not have"
    )
    checks.require(is_in_g and q.block_size is None, function, "backward", expected, "Int8Backward()")
    # Only the dimensions along which the scale varies are expanded; the others broadcast against g.
    wide = [q.shape[a] if a in varying else 1 for a in range(q.ndim)]
    scale = granularity.Aligned(None).expand(dtypes.scale_as_float32(q.scale), jnp.zeros(wide, jnp.float32))
    # The dimensions in the order that they have in g, so that a broadcast puts each in its place.
    order = sorted(varying, key=lambda a: dimensions[a] or 0)
    flat = lax.transpose(scale, [*order, *(a for a in range(q.ndim) if a not in order)])
    flat = flat.reshape([q.shape[a] for a in order])
    spread = lax.broadcast_in_dim(flat, g.shape, [dimensions[a] or 0 for a in order])
    return q.replace(scale=jnp.ones((1,) * q.ndim, jnp.float32)), g * sharding.place_like(spread, g)


def compute_operand_cotangent(
    function: str,
    index: int,
    terms: Sequence[Labels],
    out: Labels,
    qs: Sequence[QuantizedArray],
    g: jax.Array | QuantizedArray,
    key: jax.Array | None,
) -> jax.Array:
    """Return the float32 cotangent of one of the two operands of an einsum, computed by a contraction of codes.

    Args:
        function: the name of the public function, for errors.
        index: 0 for the first operand, 1 for the second.
        terms: the labels of the dimensions of both operands.
        out: the labels of the dimensions of the result.
        qs: the quantized operands.
        g: the cotangent of the result, or its codes in float8.
        key: the key of the stochastic rounding, or None.
    """
    labels, partner_labels = terms[index], terms[1 - index]
    operand, partner = qs[index], qs[1 - index]
    summed = [a for a, label in enumerate(partner_labels) if label not in labels]
    dimensions = [out.index(label) if label in out else None for label in partner_labels]
    if not isinstance(g, QuantizedArray):
        partner, g = fold_scale_into_gradient(function, partner, summed, g.astype(jnp.float32), dimensions)
    # These dimensions of g survive the contraction, so each of their indices can have its own scale.
    scaled_axes = tuple(a for a, label in enumerate(out) if label in labels)
    # Labels are strings of any length; einsum takes one letter for each.
    letters = dict(zip(dict.fromkeys((*labels, *partner_labels, *out)), string.ascii_letters, strict=False))
    # An index that only this operand has, and that the result lacks, was summed: its cotangent is broadcast below.
    contracted = tuple(label for label in labels if label in out or label in partner_labels)
    texts = ["".join(letters[label] for label in term) for term in (out, partner_labels, contracted)]
    pair = (g if isinstance(g, QuantizedArray) else quantize_gradient(g, scaled_axes, key), partner)
    out_sharding = None
    if sharding.is_placed(operand.codes):  # a cotangent is sharded like its operand
        partition = sharding.read_partition(operand.codes)
        mesh = jax.typeof(operand.codes).sharding.mesh
        out_sharding = NamedSharding(mesh, PartitionSpec(*(partition[labels.index(label)] for label in contracted)))
    d = contract_operands(function, f"{texts[0]},{texts[1]}->{texts[2]}", pair, None, dtypes.FLOAT32, out_sharding)
    return lax.broadcast_in_dim(d, operand.shape, [labels.index(label) for label in contracted])


def split_keys(function: str, backward: Backward, key: jax.Array | None) -> Sequence[Any]:
    """Return a key for each operand, or None for each if nothing is rounded stochastically."""
    if not isinstance(backward, Int8Backward) or not backward.stochastic_rounding:
        return (None, None)
    # Check this in the backward pass, because a call that is not differentiated needs no key.
    expected = (
        "a key, because Int8Backward(stochastic_rounding=True) rounds stochastically "
        '(a Linen layer takes it from the rng "rounding", an NNX layer in training from its rngs)'
    )
    checks.require(key is not None, function, "key", expected, "None")
    assert key is not None
    return tuple(jax.random.split(key))
