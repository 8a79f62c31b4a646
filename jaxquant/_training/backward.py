"""How the gradient of an integer contraction is contracted: in floats, or in integers once more."""

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
from .._core import checks, dtypes, granularity, sharding, small_floats
from .._core.granularity import PerAxis, PerTensor
from . import estimators
from .fake_quantize import Config, make_array

Labels = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class FloatBackward:
    """dlhs = g contracted with the dequantized rhs, drhs = the dequantized lhs with g, in the operands' float dtype."""


@dataclasses.dataclass(frozen=True)
class Int8Backward:
    """dlhs = q(g) contracted with the codes of rhs, drhs = the codes of lhs with q(g): integers coming back, too.

    q quantizes g to int8, symmetrically, with a scale for each index that is not added up: for each row of dlhs, for
    each column of drhs. A scale of the other operand that differs from index to index of what is added up is multiplied
    into g beforehand.

    Attributes:
        stochastic_rounding: whether g is rounded by chance, which keeps a gradient of many small parts unbiased. It
            needs a key, where there is a gradient.
        lhs: whether dlhs is found so; else as `FloatBackward` has it.
        rhs: whether drhs is.

    Source: Banner et al., arXiv 1805.11046, section 5, who keep drhs in floats; Gupta et al., arXiv 1502.02551, for the
    rounding.
    """

    stochastic_rounding: bool = False
    lhs: bool = True
    rhs: bool = True

    def __post_init__(self) -> None:
        """Refuses what is no flag."""
        for field in ("stochastic_rounding", "lhs", "rhs"):
            checks.check_flag("Int8Backward", field, getattr(self, field))


Backward = FloatBackward | Int8Backward


def check_backward(function: str, backward: Any, key: Any, specs: Sequence[Any]) -> None:
    """Requires one of the two, and what integers need; before a program is compiled that they are static in."""
    is_one = isinstance(backward, Backward)
    expected = "FloatBackward() or Int8Backward()"
    checks.require_type(is_one, function, "backward", expected, checks.describe_value(backward))
    is_key = key is None or checks.is_key(key)
    checks.require_type(is_key, function, "key", "None or one key of jax.random", checks.describe_value(key))
    if isinstance(backward, FloatBackward):
        return
    expected = "FloatBackward(), or two operands that are both quantized"
    checks.require(len(specs) == 2 and None not in specs, function, "backward", expected, "Int8Backward()")


def quantized_gradient(g: jax.Array, kept: tuple[int, ...], key: Any) -> QuantizedArray:
    """Returns g as int8 with a scale for each index of the kept dimensions."""
    spec = QuantSpec(jnp.int8, PerAxis(kept) if kept else PerTensor())
    q = quantize(g, spec)
    if key is None:
        return q
    return make_array(Config(spec, estimators.StochasticRounding(None)), g, q.scale, None, key)


def fold_key(
    function: str, q: QuantizedArray, added_up: Sequence[int], g: jax.Array, places: Sequence[int | None]
) -> tuple[QuantizedArray, jax.Array]:
    """Returns an operand whose scale is one along the dimensions that are added up, and g times what it was there.

    Args:
        function: for errors.
        q: the operand.
        added_up: its dimensions that are.
        g: the cotangent, float32.
        places: for each dimension of q which one of g it is, or None.
    """
    shape = q.scale.shape
    varies = [a for a in range(q.ndim) if shape[a] != 1]
    point = q.zero_point is None or all(q.zero_point.shape[a] == 1 for a in added_up)
    expected = "FloatBackward(), for a zero point differs along what comes back is added up along"
    checks.require(point, function, "backward", expected, "Int8Backward()")
    if not any(a in added_up for a in varies):
        return q, g
    there = all(places[a] is not None for a in varies)  # a batch, too: g has each of its indices
    expected = "FloatBackward(), for a scale differs from block to block, or along what the result does not have"
    checks.require(there and q.block_size is None, function, "backward", expected, "Int8Backward()")
    wide = [q.shape[a] if a in varies else 1 for a in range(q.ndim)]
    scale = small_floats.decode_small_float(q.scale) if q.scale.dtype == dtypes.E8M0 else q.scale.astype(jnp.float32)
    scale = granularity.Aligned(None).expand(scale, jnp.zeros(wide, jnp.float32))
    order = sorted(varies, key=lambda a: places[a] or 0)
    flat = lax.transpose(scale, [*order, *(a for a in range(q.ndim) if a not in order)])
    flat = flat.reshape([q.shape[a] for a in order])
    spread = lax.broadcast_in_dim(flat, g.shape, [places[a] or 0 for a in order])
    return q.replace(scale=jnp.ones((1,) * q.ndim, jnp.float32)), g * sharding.place_like(spread, g)


def find_dimensions(
    function: str,
    which: int,
    terms: Sequence[Labels],
    out: Labels,
    qs: Sequence[QuantizedArray],
    g: jax.Array,
    key: Any,
) -> jax.Array:
    """Returns the cotangent of one of the two operands of an einsum, from an integer contraction; float32."""
    own, other = terms[which], terms[1 - which]
    q = qs[1 - which]
    added_up = [a for a, label in enumerate(other) if label not in own]
    places = [out.index(label) if label in out else None for label in other]
    q, g = fold_key(function, q, added_up, g.astype(jnp.float32), places)
    kept = tuple(a for a, label in enumerate(out) if label in own)
    letters = dict(zip(dict.fromkeys((*own, *other, *out)), string.ascii_letters, strict=False))
    there = tuple(label for label in own if label in out or label in other)
    texts = ["".join(letters[label] for label in labels) for labels in (out, other, there)]
    pair = (quantized_gradient(g, kept, key), q)
    out_sharding = None
    if sharding.is_placed(qs[which].codes):  # a cotangent is sharded as its operand
        places = sharding.find_partition(qs[which].codes)
        mesh = jax.typeof(qs[which].codes).sharding.mesh
        out_sharding = NamedSharding(mesh, PartitionSpec(*(places[own.index(label)] for label in there)))
    d = contract_operands(function, f"{texts[0]},{texts[1]}->{texts[2]}", pair, None, dtypes.FLOAT32, out_sharding)
    # An index that was summed alone has the same cotangent everywhere.
    return lax.broadcast_in_dim(d, qs[which].shape, [own.index(label) for label in there])


def split_keys(function: str, backward: Backward, key: Any) -> Sequence[Any]:
    """Returns a key for each operand, or None where nothing is drawn."""
    if not isinstance(backward, Int8Backward) or not backward.stochastic_rounding:
        return (None, None)
    # Not before: a result alone, as an evaluation asks for, draws nothing.
    expected = (
        "a key, for Int8Backward(stochastic_rounding=True) draws "
        '(of a Linen layer the rng "rounding", of an NNX layer in training that of its rngs)'
    )
    checks.require(key is not None, function, "key", expected, "None")
    return tuple(jax.random.split(key))
