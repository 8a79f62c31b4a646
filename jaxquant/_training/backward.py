"""The gradient of a contraction of codes, contracted in integers or in float8: see `Backward` in `backward_choices`."""

from __future__ import annotations

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
from .backward_choices import Backward, Int8Backward
from .rounding_vjp import RoundingConfig, make_array

Labels = tuple[str, ...]


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
