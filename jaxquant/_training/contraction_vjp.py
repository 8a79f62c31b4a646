"""One rule of differentiation for every contraction of quantized operands. Knows no contraction of its own.

Forward the operation contracts integers. Back it is differentiated as the float operation on what the codes stand
for, and each operand's cotangent goes through the rule of its rounding. What is kept in between are the codes; a mask
of what saturated, where something can, eight to a byte; and x itself only where the gradient of its scale is asked for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

from .._arrays.quantized_array import QuantizedArray, dequantize_checked
from .._core import checks, dtypes, granularity, sharding
from .._core.affine import divide_by_scale
from . import estimators
from .backward import Backward, Int8Backward, split_keys
from .fake_quantize import Config, find_cotangents, make_array, read_parts, round_zero_point
from .quantizer import split_quantizer

CODES = "jaxquant.codes"
_POLICY = jax.checkpoint_policies.save_only_these_names(CODES)


def save_codes(primitive: Any, *operands: Any, **parameters: Any) -> Any:
    """A policy for `jax.checkpoint`: of a network it keeps the codes, scales and masks of the quantized contractions.

    All else, activation functions and float operands of learned scales among it, is computed again from them. Of one
    `jax.checkpoint(network, policy=jq.save_codes)` XLA may compute all layers again at once; block by block,
    `flax.linen.remat(Block, policy=jq.save_codes)` with an activation function at its end, it has one at a time in
    memory.
    """
    return _POLICY(primitive, *operands, **parameters)


class Operation(Protocol):
    """A contraction: linear in each of its operands, and static."""

    @property
    def preferred(self) -> Any:
        """The dtype that it returns, or None for the operands'."""
        ...

    def forward(self, *operands: Any) -> jax.Array:
        """Returns the result for quantized and float operands."""
        ...

    def floats(self, *operands: jax.Array) -> jax.Array:
        """Returns the same for operands that are floats of one dtype."""
        ...

    def integers(self, which: int, qs: Sequence[QuantizedArray], g: jax.Array, key: Any) -> jax.Array:
        """Returns the cotangent of one of two operands from an integer contraction, in float32."""
        ...


class Side(NamedTuple):
    """What is static of one operand: its config, None for floats; and whether its scale came from it."""

    config: Config | None
    is_dynamic: bool


class Product(NamedTuple):
    """What is static of a contraction; `function` is for errors."""

    function: str
    operation: Operation
    sides: tuple[Side, ...]
    backward: Backward


def contract_with_gradient(
    function: str, names: Sequence[tuple[str, str]], operation: Operation, xs: Sequence[Any], specs: Sequence[Any],
    backward: Any, key: Any,
) -> jax.Array:  # fmt: skip
    """Returns the contraction of float operands under their specs, held to their contracts.

    Args:
        function: for errors.
        names: of each operand and of its spec, for errors.
        operation: Static.
        xs: the operands.
        specs: a Quantizer or None for each.
        backward: Static. Held to its contract.
        key: for a backward pass that draws, or None.
    """
    checks.require_type(
        any(s is not None for s in specs), function, ", ".join(dict.fromkeys(spec for _, spec in names)),
        "a QuantSpec or a Quantizer for one operand at least", "None",
    )  # fmt: skip
    sides, operands = [], []
    for (name, own_name), x, spec in zip(names, xs, specs, strict=True):
        if spec is None:
            sides.append(Side(None, False))
            operands.append((x, None, None, None))
            continue
        config, (scale, zero_point, own) = split_quantizer(spec)
        labels = (name, f"{own_name}.scale", f"{own_name}.zero_point")
        sides.append(Side(config, scale is None))
        operands.append((*read_parts(function, labels, x, scale, zero_point, config.spec), own))
    return _contract(Product(function, operation, tuple(sides), backward), _vary_alike(operands), key)


def _vary_alike(operands: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    """Returns operands of which, under `jax.shard_map`, all vary where one does: of what every device holds JAX then
    sums the cotangents.
    """
    xs = [jnp.asarray(x) for x, *_ in operands]
    if not any(AxisType.Manual in jax.typeof(x).sharding.mesh.axis_types for x in xs):
        return tuple(operands)
    found = []
    for *parts, key in operands:
        for like in xs:
            parts = [None if part is None else sharding.vary_like(part, like) for part in parts]
        found.append((*parts, key))
    return tuple(found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract(product: Product, operands: Any, key: Any) -> jax.Array:
    """Returns the contraction; every argument has passed its contract."""
    return product.operation.forward(*_quantize_side(product, operands))


def _quantize_side(product: Product, operands: Any) -> list[Any]:
    return [
        x if side.config is None else make_array(side.config, jnp.asarray(x), jnp.asarray(scale), zero_point, key)
        for side, (x, scale, zero_point, key) in zip(product.sides, operands, strict=True)
    ]


def _name_codes(part: jax.Array) -> jax.Array:
    return checkpoint_name(part, CODES)


def _contract_fwd(product: Product, operands: Any, key: Any) -> tuple[jax.Array, Any]:
    asked = [[leaf is not None and leaf.perturbed for leaf in operand] for operand in operands]
    given = [[_find_value(product.function, leaf) for leaf in operand] for operand in operands]
    # Named before they are contracted: what a policy computes again starts from the codes that it kept.
    qs = [jax.tree.map(_name_codes, q) if isinstance(q, QuantizedArray) else q for q in _quantize_side(product, given)]
    y = product.operation.forward(*qs)
    kept = [_keep_residuals(*part) for part in zip(product.sides, given, asked, qs, strict=True)]
    return y, (kept, None if key is None else key.value)


def _contract_bwd(product: Product, residuals: Any, g: Any) -> tuple[Any, Any]:
    kept, key = residuals
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        return tuple((None,) * 4 for _ in kept), None
    # Within one program XLA would divide or dequantize for both ways at once and keep the floats: let it wait for g.
    parts, g = lax.optimization_barrier(([(k.q, k.mask, k.x, k.given[:2]) for k in kept], g))
    kept = [
        _Kept(q, mask, x, (*given, k.given[2])) for (q, mask, x, given), k in zip(parts, kept, strict=True)
    ]  # fmt: skip
    found = _find_operand_cotangents(product, [k.q for k in kept], g, key)
    sides = zip(product.sides, kept, found, strict=True)
    return tuple(_pull_through_rounding(side, k, d) for side, k, d in sides), None


_contract.defvjp(_contract_fwd, _contract_bwd, symbolic_zeros=True)


def _find_value(function: str, leaf: Any) -> Any:
    if leaf is None:
        return None
    return _forbid_second_derivative(function, leaf.value) if leaf.perturbed else leaf.value


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forbid_second_derivative(function: str, value: jax.Array) -> jax.Array:
    """Returns its argument. Codes have no gradient: of them a second derivative would be 0, where it is not."""
    return value


def _forbid_second_derivative_jvp(function: str, primals: Any, tangents: Any) -> tuple[Any, Any]:
    is_constant = isinstance(tangents[0], jax.custom_derivatives.SymbolicZero)
    expected = "one derivative; of a second one, contractions of jq.fake_quantize"
    checks.require_type(is_constant, function, "operands", expected, "the derivative of a gradient")
    return primals[0], tangents[0]


_forbid_second_derivative.defjvp(_forbid_second_derivative_jvp, symbolic_zeros=True)


class _Kept(NamedTuple):
    """What one operand leaves for the way back. A float operand is all in `q`.

    JAX holds the structure of it once for all the calls of a cached program, whichever gradients each is asked for:
    what is not needed is there as an array of nothing.

    Attributes:
        q: the codes.
        mask: where the gradient passes, in bits; or nothing, int8.
        x: the floats; or nothing, bool.
        given: the scale, the zero point and the key as they came; or arrays of nothing.
    """

    q: Any
    mask: Any
    x: Any
    given: Any


_NO_MASK, _NO_X = np.zeros(0, np.int8), np.zeros(0, np.bool_)


def _keep_residuals(side: Side, given: Sequence[Any], asked: Sequence[bool], q: Any) -> _Kept:
    if side.config is None:
        return _Kept(given[0], _NO_MASK, _NO_X, (None, None, None))
    if asked[1] or asked[2]:  # the gradient of a scale is a sum over x
        return _Kept(q, _NO_MASK, given[0], tuple(given[1:]))
    nothing = tuple(None if part is None else _NO_X for part in given[1:])
    mask = None
    if asked[0] and not _never_saturates(side):
        spec, rule = side.config
        x, scale = jnp.asarray(given[0]), jnp.asarray(given[1])
        aligned = granularity.Aligned(q.block_size)
        points = round_zero_point(spec, given[2])
        u = divide_by_scale(x, aligned.expand(scale, x), dtypes.FLOAT32)
        mask = estimators.find_mask(rule, spec, u, None if points is None else aligned.expand(points, x))
    bits = _NO_MASK if mask is None else _name_codes(_pack_mask(mask))
    return _Kept(q, bits, _NO_X, nothing)


def _never_saturates(side: Side) -> bool:
    """Whether no finite x can saturate: its own range, as many codes below the zero point as above, and a scale dtype
    that holds every scale.
    """
    assert side.config is not None
    spec, rule = side.config
    is_own = side.is_dynamic and spec.symmetric and spec.dtype in dtypes.INTEGERS
    if not is_own or not isinstance(rule, estimators.StraightThrough):
        return False
    # Of two bits the scale is the largest x, and beyond 2**127 there is no power of two.
    return spec.scale_dtype != dtypes.FLOAT16 and not (spec.power_of_two and dtypes.count_bits(spec.carrier) == 2)


def _find_operand_cotangents(product: Product, values: Sequence[Any], g: jax.Array, key: Any) -> list[Any]:
    backward, operation = product.backward, product.operation
    floats = [dequantize_checked(v) if isinstance(v, QuantizedArray) else v for v in values]
    # Of unlike dtypes the way back takes that of the result: weights may be kept in more digits than are computed in.
    dtype = operation.preferred or functools.reduce(dtypes.find_wider, (f.dtype for f in floats))
    inward = [isinstance(backward, Int8Backward) and getattr(backward, n) for n in ("lhs", "rhs")]
    found: list[Any] = [None] * len(values)
    if not all(inward) or len(values) != 2:
        _, pull = jax.vjp(operation.floats, *(f.astype(dtype) for f in floats))
        found = list(pull(g.astype(dtype)))
    for i, own in enumerate(split_keys(product.function, backward, key)):
        if isinstance(backward, Int8Backward) and inward[i]:
            found[i] = operation.integers(i, values, g, own)
    return found


def _pull_through_rounding(side: Side, kept: _Kept, d: jax.Array) -> tuple[Any, Any, Any, Any]:
    if side.config is None:
        return d.astype(kept.q.dtype), None, None, None
    if kept.x.dtype != np.bool_:
        scale, zero_point, key = kept.given
        return (*find_cotangents(side.config, kept.x, scale, zero_point, key, d), None)
    if kept.mask.dtype != np.int8:
        d = jnp.where(_unpack_mask(kept.mask, d.shape), d, jnp.zeros((), d.dtype))
    return d.astype(kept.q.dtype), None, None, None


def _pack_mask(mask: jax.Array) -> jax.Array:
    """Returns a mask with eight elements in a byte: those a whole eighth of a row apart, which vectors like."""
    if sharding.is_placed(mask) or mask.size < 8:
        return mask
    rows, columns = _find_rows(mask.shape)
    length = -(-columns // 8)
    flat = lax.pad(mask.reshape(rows, columns), np.False_, [(0, 0, 0), (0, 8 * length - columns, 0)])
    parts = (lax.slice_in_dim(flat, i * length, (i + 1) * length, axis=1) for i in range(8))
    return functools.reduce(lax.bitwise_or, (part.astype(jnp.uint8) << np.uint8(i) for i, part in enumerate(parts)))


def _find_rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the matrix that a mask is cut up as. A batch that lies on several devices stays there, index by index."""
    size = math.prod(shape)
    rows = shape[0] if len(shape) > 1 and size >= 16 * shape[0] else 1
    return rows, size // rows


def _unpack_mask(bits: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if bits.dtype == np.bool_:
        return bits
    parts = [(bits >> np.uint8(i)) & np.uint8(1) for i in range(8)]
    flat = lax.slice(lax.concatenate(parts, 1), (0, 0), _find_rows(shape))
    return flat.reshape(shape).astype(np.bool_)
