"""The differentiation rule shared by all contractions that quantize their float operands.

The forward pass contracts integers. The backward pass differentiates the float operation on the dequantized operands,
and sends the cotangent of each operand through the estimator of its rounding. In between, the rule keeps the codes; a
mask of the elements that saturated, eight to a byte, if any can; and x itself only if the gradient of its scale is
needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from .._arrays.quantize import quantize
from .._arrays.quantized_array import QuantizedArray, dequantize_checked
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, entry_point, granularity, sharding
from .._kernels.affine import divide_by_scale
from . import estimators
from .backward import split_keys
from .backward_choices import Backward, Float8Backward, Int8Backward, check_backward
from .fake_quantize import Quantizer, read_parts, read_quantizer, split_quantizer
from .rounding_vjp import RoundingConfig, compute_cotangents, compute_mask, make_array, round_zero_point

CODES = "jaxquant.codes"
# The argument names of the operands and specs of `quantized_dot_general` and `quantized_conv_general_dilated`.
SIDES = (("lhs", "lhs_spec"), ("rhs", "rhs_spec"))
_POLICY = jax.checkpoint_policies.save_only_these_names(CODES)


def save_codes(primitive: Any, *operands: Any, **parameters: Any) -> Any:
    """Tell `jax.checkpoint` to keep the codes, scales and masks of quantized contractions, and nothing else.

    This is a policy for `jax.checkpoint`: do not call it, but pass it, `jax.checkpoint(network, policy=jq.save_codes)`.
    The backward pass recomputes everything else from the codes: activation functions, and the float operands with
    learned scales.

    With one checkpoint around a whole network, XLA may recompute all its layers at the same time. To hold one block in
    memory at a time, wrap each block: `flax.linen.remat(Block, policy=jq.save_codes)`, with an activation function at
    the end of the block.

    Args:
        primitive: the primitive that computes a value, as JAX passes it to a policy.
        operands: its operands, as abstract values.
        **parameters: its parameters.

    Returns:
        What `jax.checkpoint_policies.save_only_these_names` returns for them.
    """
    return _POLICY(primitive, *operands, **parameters)


class LinearContraction(Protocol):
    """A contraction that is linear in each of its operands, with its static attributes."""

    @property
    def preferred(self) -> Any:
        """The dtype of the result, or None for the dtype of the operands."""
        ...

    def check_operands(self, *operands: jax.Array) -> None:
        """Raise unless the operands fit each other; an error then describes the user's arrays and not their codes."""
        ...

    def contract_quantized(self, *operands: QuantizedArray | jax.Array) -> jax.Array:
        """Return the contraction of operands, some quantized and the others floats."""
        ...

    def contract_floats(self, *operands: jax.Array) -> jax.Array:
        """Return the contraction of floats of one dtype."""
        ...

    def compute_integer_cotangent(
        self, index: int, qs: Sequence[QuantizedArray], g: jax.Array | QuantizedArray, key: jax.Array | None
    ) -> jax.Array:
        """Return the float32 cotangent of the operand `index`, 0 or 1, computed by a contraction of codes."""
        ...


class OperandRounding(NamedTuple):
    """The static part of one operand.

    Attributes:
        config: how the operand is rounded; None for floats.
        is_dynamic: whether its scale was found from the operand itself.
    """

    config: RoundingConfig | None
    is_dynamic: bool


class TrainedContraction(NamedTuple):
    """The static part of a contraction; `function` names it in errors."""

    function: str
    operation: LinearContraction
    sides: tuple[OperandRounding, ...]
    backward: Backward


def check_options(
    function: str, specs: Mapping[str, Any], backward: object, key: jax.Array | None, precision: lax.PrecisionLike,
    preferred_element_type: DTypeLike | None, out_sharding: NamedSharding | PartitionSpec | None = None, *,
    has_algorithms: bool = True,
) -> tuple[list[Quantizer | None], np.dtype | None]:  # fmt: skip
    """Check the arguments that all quantized contractions take, and return their quantizers and the result's dtype.

    Args:
        function: the name of the public function, for errors.
        specs: a spec, a Quantizer or None for each operand, by its argument name.
        backward: how gradients are contracted.
        key: a key of `jax.random`, or None.
        precision: as in `jax.lax`.
        preferred_element_type: the dtype of the result, or None.
        out_sharding: the sharding of the result, or None.
        has_algorithms: whether the precision may be a dot algorithm.
    """
    # Everything static is checked before the program is compiled, because a cache of compiled programs hashes it.
    quantizers = [read_quantizer(function, name, spec) for name, spec in specs.items()]
    check_backward(function, backward, key, [quantizer and quantizer.spec for quantizer in quantizers])
    checks.check_precision(function, precision, has_algorithms=has_algorithms)
    sharding.check_out_sharding(function, out_sharding)
    if preferred_element_type is None:
        return quantizers, None
    return quantizers, checks.check_dtype(function, "preferred_element_type", preferred_element_type, dtypes.FLOATS)


@functools.partial(jax.jit, inline=True, static_argnames=("function", "names", "operation", "backward"))
def quantize_and_contract(
    xs: Sequence[jax.Array],
    specs: Sequence[Quantizer | None],
    key: jax.Array | None,
    *,
    function: str,
    names: tuple[tuple[str, str], ...],
    operation: LinearContraction,
    backward: Backward,
) -> jax.Array:
    """Check float operands against their specs, quantize them, and return their contraction with a gradient.

    Args:
        xs: the operands.
        specs: a Quantizer or None for each operand.
        key: the key of a backward pass that rounds stochastically, or None.
        function: Static. The name of the public function, for errors.
        names: Static. The argument names of each operand and of its spec, for errors.
        operation: Static. The contraction.
        backward: Static. Already checked.
    """
    checks.require_type(
        any(s is not None for s in specs), function, ", ".join(dict.fromkeys(spec for _, spec in names)),
        "a QuantSpec or a Quantizer for at least one operand", "None for all of them",
    )  # fmt: skip
    xs = entry_point.convert_numpy(*xs)  # under `jax.disable_jit` they may be numpy's
    operation.check_operands(*xs)
    sides, operands = [], []
    for (name, spec_name), x, quantizer in zip(names, xs, specs, strict=True):
        if quantizer is None:
            sides.append(OperandRounding(None, False))
            operands.append((x, None, None, None))
            continue
        config, (scale, zero_point, rounding_key) = split_quantizer(quantizer)
        labels = (name, f"{spec_name}.scale", f"{spec_name}.zero_point")
        sides.append(OperandRounding(config, scale is None))
        operands.append((*read_parts(function, labels, x, scale, zero_point, quantizer.spec), rounding_key))
    return _contract(TrainedContraction(function, operation, tuple(sides), backward), _vary_alike(operands), key)


def _vary_alike(operands: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    """Return the operands, under `jax.shard_map` marked as varying over every axis that any of them varies over.

    JAX then sums the cotangent of an operand that every device holds.
    """
    xs = [jnp.asarray(x) for x, *_ in operands]
    if not any(AxisType.Manual in jax.typeof(x).sharding.mesh.axis_types for x in xs):
        return tuple(operands)
    varying = []
    for *arrays, key in operands:
        for like in xs:
            arrays = [None if array is None else sharding.vary_like(array, like) for array in arrays]
        varying.append((*arrays, key))
    return tuple(varying)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract(product: TrainedContraction, operands: Sequence[tuple[Any, ...]], key: jax.Array | None) -> jax.Array:
    """Return the contraction; all arguments are checked."""
    return product.operation.contract_quantized(*_quantize_operands(product, operands))


def _quantize_operands(product: TrainedContraction, operands: Sequence[Sequence[Any]]) -> list[Any]:
    return [
        x if side.config is None else make_array(side.config, jnp.asarray(x), jnp.asarray(scale), zero_point, key)
        for side, (x, scale, zero_point, key) in zip(product.sides, operands, strict=True)
    ]


def _name_codes(part: jax.Array) -> jax.Array:
    return checkpoint_name(part, CODES)


def _contract_fwd(
    product: TrainedContraction, operands: Sequence[Sequence[CustomVJPPrimal | None]], key: CustomVJPPrimal | None
) -> tuple[jax.Array, Any]:
    is_needed = [[leaf is not None and leaf.perturbed for leaf in operand] for operand in operands]
    values = [[_read_value(product.function, leaf) for leaf in operand] for operand in operands]
    # The codes are named before they are contracted, so that a checkpoint can start its recomputation from them.
    operands = _quantize_operands(product, values)
    qs = [jax.tree.map(_name_codes, q) if isinstance(q, QuantizedArray) else q for q in operands]
    y = product.operation.contract_quantized(*qs)
    side_residuals = [_keep_residuals(*part) for part in zip(product.sides, values, is_needed, qs, strict=True)]
    return y, (side_residuals, None if key is None else key.value)


def _contract_bwd(
    product: TrainedContraction, residuals: tuple[Sequence[_Kept], jax.Array | None], g: Any
) -> tuple[Any, Any]:
    side_residuals, key = residuals
    # A symbolic zero: the differentiated function does not depend on the result, so no contraction is needed.
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        return tuple((None,) * 4 for _ in side_residuals), None
    # If one program contains both passes, XLA would share a division or dequantization between them and keep its floats
    # in memory. The barrier makes the backward pass wait for g. It does not accept keys, so they stay outside.
    arrays, g = lax.optimization_barrier(([(k.q, k.mask, k.x, k.parameters[:2]) for k in side_residuals], g))
    waiting = []
    for (q, mask, x, parameters), k in zip(arrays, side_residuals, strict=True):
        waiting.append(_Kept(q, mask, x, (*parameters, k.parameters[2])))
    cotangents = compute_operand_cotangents(product, [k.q for k in waiting], g, key)
    sides = zip(product.sides, waiting, cotangents, strict=True)
    return tuple(_pull_through_rounding(side, k, d) for side, k, d in sides), None


_contract.defvjp(_contract_fwd, _contract_bwd, symbolic_zeros=True)


def _read_value(function: str, leaf: CustomVJPPrimal | None) -> Any:
    """Return the value of a leaf of custom_vjp's symbolic zeros, guarded if it is differentiated."""
    if leaf is None:
        return None
    return _forbid_second_derivative(function, leaf.value) if leaf.perturbed else leaf.value


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forbid_second_derivative(function: str, value: jax.Array) -> jax.Array:
    """Return the value; raise if it is differentiated, because codes would give 0, a wrong second derivative."""
    return value


def _forbid_second_derivative_jvp(
    function: str, primals: tuple[jax.Array], tangents: tuple[jax.Array | SymbolicZero]
) -> tuple[Any, Any]:
    is_constant = isinstance(tangents[0], jax.custom_derivatives.SymbolicZero)
    expected = "only first derivatives (for second ones contract jq.fake_quantize(x) in floats)"
    checks.require_type(is_constant, function, "operands", expected, "the derivative of a gradient")
    return primals[0], tangents[0]


_forbid_second_derivative.defjvp(_forbid_second_derivative_jvp, symbolic_zeros=True)


class _Kept(NamedTuple):
    """The residuals of one operand. A float operand is in `q`.

    JAX keeps one structure of residuals for all calls of a cached program, whichever gradients a call needs. So a part
    that is not needed is an empty array instead of None.

    Attributes:
        q: the codes.
        mask: where the gradient passes, in bits; or an empty int8 array.
        x: the floats; or an empty bool array.
        parameters: the scale, the zero point and the key of the call; or empty arrays.
    """

    q: Any
    mask: Any
    x: Any
    parameters: Any


_NO_MASK, _NO_X = np.zeros(0, np.int8), np.zeros(0, np.bool_)


def _keep_residuals(side: OperandRounding, values: Sequence[Any], is_needed: Sequence[bool], q: Any) -> _Kept:
    """Return the residuals of one operand, given its (x, scale, zero_point, key) and which cotangents are needed."""
    if side.config is None:
        return _Kept(values[0], _NO_MASK, _NO_X, (None, None, None))
    if is_needed[1] or is_needed[2]:  # the gradient of a scale is a sum over x
        return _Kept(q, _NO_MASK, values[0], tuple(values[1:]))
    empty = tuple(None if value is None else _NO_X for value in values[1:])
    mask = None
    if is_needed[0] and not _never_saturates(side):
        spec, rule = side.config.spec, side.config.rule
        x, scale = jnp.asarray(values[0]), jnp.asarray(values[1])
        aligned = granularity.Aligned(q.block_size)
        center = round_zero_point(spec, values[2])
        u = divide_by_scale(x, aligned.expand(scale, x), dtypes.FLOAT32)
        mask = compute_mask(rule, spec, u, None if center is None else aligned.expand(center, x))
    bits = _NO_MASK if mask is None else _name_codes(_pack_mask(mask))
    return _Kept(q, bits, _NO_X, empty)


def _never_saturates(side: OperandRounding) -> bool:
    """Return whether no finite x can saturate.

    That takes a range found from x, as many codes below the zero point as above it, and a scale dtype that can hold
    every scale.
    """
    assert side.config is not None
    assert isinstance(side.config.spec, QuantSpec)
    spec, rule = side.config.spec, side.config.rule
    is_own = side.is_dynamic and spec.symmetric and dtypes.is_integer(spec.dtype)
    if not is_own or not isinstance(rule, estimators.StraightThrough):
        return False
    # With two bits the scale is the largest |x|, and a float32 has no power of two above 2**127.
    return spec.scale_dtype != dtypes.FLOAT16 and not (spec.power_of_two and spec.bits == 2)


def compute_operand_cotangents(
    product: TrainedContraction, values: Sequence[Any], g: jax.Array, key: jax.Array | None
) -> list[Any]:
    """Return the cotangents of the dequantized operands, each from a float or from an integer contraction."""
    backward, operation = product.backward, product.operation
    floats = [dequantize_checked(v) if isinstance(v, QuantizedArray) else v for v in values]
    # Operands of different dtypes are contracted in the dtype of the result: weights may be stored in a wider dtype
    # than the one the network computes in.
    dtype = operation.preferred or functools.reduce(dtypes.choose_wider, (f.dtype for f in floats))
    if isinstance(backward, Float8Backward):
        codes = quantize(g.astype(jnp.float32), QuantSpec(backward.dtype))
        return [operation.compute_integer_cotangent(i, values, codes, None) for i in range(2)]
    is_integer = [isinstance(backward, Int8Backward) and getattr(backward, n) for n in ("lhs", "rhs")]
    cotangents: list[Any] = [None] * len(values)
    if not all(is_integer) or len(values) != 2:
        _, pull = jax.vjp(operation.contract_floats, *(f.astype(dtype) for f in floats))
        cotangents = list(pull(g.astype(dtype)))
    for i, rounding_key in enumerate(split_keys(product.function, backward, key)):
        if isinstance(backward, Int8Backward) and is_integer[i]:
            cotangents[i] = operation.compute_integer_cotangent(i, values, g, rounding_key)
    return cotangents


def _pull_through_rounding(side: OperandRounding, residuals: _Kept, d: jax.Array) -> tuple[Any, Any, Any, Any]:
    """Return the cotangents of (x, scale, zero_point, key), given the cotangent of the dequantized operand."""
    if side.config is None:
        return d.astype(residuals.q.dtype), None, None, None
    # The dtype of an empty array tells which residuals were kept.
    if residuals.x.dtype != np.bool_:
        scale, zero_point, key = residuals.parameters
        return (*compute_cotangents(side.config, residuals.x, scale, zero_point, key, d), None)
    if residuals.mask.dtype != np.int8:
        d = jnp.where(_unpack_mask(residuals.mask, d.shape), d, jnp.zeros((), d.dtype))
    return d.astype(residuals.q.dtype), None, None, None


def _pack_mask(mask: jax.Array) -> jax.Array:
    """Return a mask with eight elements in a byte."""
    # The elements of a byte are an eighth of a row apart, so that each shift works on a contiguous slice.
    # A mask with a sharding in its type cannot be reshaped freely, and a tiny one is not worth packing.
    if sharding.is_placed(mask) or mask.size < 8:
        return mask
    rows, columns = _choose_rows(mask.shape)
    length = -(-columns // 8)
    flat = lax.pad(mask.reshape(rows, columns), np.False_, [(0, 0, 0), (0, 8 * length - columns, 0)])
    parts = (lax.slice_in_dim(flat, i * length, (i + 1) * length, axis=1) for i in range(8))
    return functools.reduce(lax.bitwise_or, (part.astype(jnp.uint8) << np.uint8(i) for i, part in enumerate(parts)))


def _choose_rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the matrix as which a mask is packed."""
    # The first dimension is kept as rows, so that a batch which is sharded over devices stays where it is.
    size = math.prod(shape)
    rows = shape[0] if len(shape) > 1 and size >= 16 * shape[0] else 1
    return rows, size // rows


def _unpack_mask(bits: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the mask that `_pack_mask` packed."""
    if bits.dtype == np.bool_:
        return bits
    parts = [(bits >> np.uint8(i)) & np.uint8(1) for i in range(8)]
    flat = lax.slice(lax.concatenate(parts, 1), (0, 0), _choose_rows(shape))
    return flat.reshape(shape).astype(np.bool_)
