"""`numpy.einsum` of quantized arrays: one `dot_general` for two operands, a sequence of pairs for more."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, reshard
from jax.typing import ArrayLike, DTypeLike
from opt_einsum.parser import parse_einsum_input

from .._arrays.quantized_array import QuantizedArray, check_form, dequantize_checked, unpack_checked
from .._core import checks, sharding
from .._core.dtypes import FLOAT32, FLOATS
from .._kernels import affine
from .dot import Operand, check_operand, contract_checked
from .dot_integer import DOT_FORMS, Axes, read_nested
from .dot_weight_only import is_read_by_kernels
from .output import Epilogue, ScaledSpec, read_epilogue

_NAME = "einsum"
_TERM = re.compile(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*")
# The time of the search for the best order grows with the factorial of the number of operands.
_MAX_OPTIMAL = 6
# If no size is given, numpy limits intermediate results to the size of the largest operand.
_ANY_SIZE = 2**62
_Labels = tuple[str, ...]


def einsum(
    subscripts: str,
    *operands: Operand,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    bias: ArrayLike | None = None,
    output: ScaledSpec | QuantizedArray | None = None,
) -> Any:
    """Contract quantized arrays, alone or together with float arrays, by the subscripts of `numpy.einsum`.

    out = the product of the operands, summed over the indices that do not occur in the output.

    Two operands are contracted by one `dot_general` and a transpose: in integers if both are quantized, in floats if
    only one is. See `dot_general` for what is computed, and in which order. An index that only one operand has, and the
    output does not, is summed after the contraction, in float32.

    More operands are contracted pair by pair, in the order of `numpy.einsum_path` (the best order up to 6 operands, a
    greedy one beyond). The result of a pair is float32, so the contraction with a third, quantized operand is
    weight-only. To make sure that two particular operands are contracted in integers, contract them in a separate call.
    A single operand is dequantized.

    Args:
        subscripts: Static. A term for each operand, separated by ",", then "->" and the term of the output. Without
            "->" the output has the indices that occur once, in alphabetical order. "..." represents the remaining
            dimensions of an operand; dimensions of size 1 broadcast only there. Spaces are ignored.
        operands: each a QuantizedArray, or an array of float32, float16 or bfloat16; at least one is a QuantizedArray.
            An index that occurs twice in the term of a float operand selects the diagonal of that operand.
        precision: Static. As in `jax.lax.dot_general`, for float contractions.
        preferred_element_type: Static. float32, float16 or bfloat16: the dtype of the result. By default the dtype of
            the operands, or float32 if they differ.
        out_sharding: Static. The sharding of the output on a mesh with explicit axes, as in `dot_general`. With more
            than two operands it applies to the last pair; the other operands must determine the shardings of
            their results.
        bias: int32, in steps of lhs.scale * rhs.scale, of a shape that broadcasts against the result, for two quantized
            operands. None means 0.
        output: how the result is quantized, for two quantized operands: a `Quantizer` with a scale; a QuantizedArray
            that gives its scale and zero point to the result; or None for a float result.

    Returns:
        The result, with the output's indices in their order as its dimensions: an array of floats, or with `output` a
        QuantizedArray with the codes of `dot_general`.

    Raises:
        TypeError: no operand is quantized, or an operand has an unsupported dtype.
        ValueError: the subscripts do not fit the operands, an index has different sizes, or an index occurs twice in
            the term of a quantized operand; or `dot_general` would raise a ValueError for a pair of operands, which its
            message calls lhs and rhs.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> spec = jq.QuantSpec(jnp.int8)
        >>> query = jq.quantize(jnp.array([[127.0, 2.5], [-0.5, 300.0]]), spec, range=(-127.0, 127.0))  # ties, and 300
        >>> key = jq.quantize(jnp.array([[1.0, -1.0], [63.5, 0.25], [0.0, 2.0]]), spec)  # 0.25 is half a step
        >>> jq.einsum("qd,kd->kq", query, key).tolist()
        [[125.0, -127.0], [8064.5, 0.0], [4.0, 254.0]]
        >>> jq.einsum("qd, kd, k", query, key, jnp.array([1.0, 0.0, 0.5]))  # only q occurs once
        Array([127.,   0.], dtype=float32)

    Source: numpy.einsum; the arithmetic is `dot_general`'s.

    Cotangents: as in `dot_general`.
    """
    arrays = [check_operand(_NAME, f"operands[{i}]", x) for i, x in enumerate(operands)]
    checks.check_precision(_NAME, precision)
    if not any(isinstance(x, QuantizedArray) for x in arrays):
        got = ", ".join(str(checks.describe_value(x)) for x in arrays) or "none"
        checks.refuse_type(_NAME, "operands", "a QuantizedArray among them", got)
    if preferred_element_type is not None:
        preferred_element_type = checks.check_dtype(_NAME, "preferred_element_type", preferred_element_type, FLOATS)
    sharding.check_out_sharding(_NAME, out_sharding)
    _check_subscripts(_NAME, subscripts)
    if bias is None and output is None:
        return _contract_jitted(_NAME, subscripts, arrays, precision, preferred_element_type, out_sharding)
    expected = "two quantized operands, because of the bias or the output"
    checks.require(len(arrays) == 2, _NAME, "operands", expected, f"{len(arrays)} operands")
    epilogue = read_epilogue(_NAME, bias, output, preferred_element_type, (arrays[0], arrays[1]))
    assert epilogue is not None
    statics = (precision, preferred_element_type, out_sharding)
    return _contract_to_codes(subscripts, arrays, epilogue, statics)


def contract_operands(
    function: str,
    subscripts: str,
    operands: Sequence[Any],
    precision: lax.PrecisionLike,
    preferred: DTypeLike | None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Return the `einsum` of checked operands, with errors that name `function`."""
    dtypes = {x.dtype for x in operands}
    operands = _read_forms(function, operands)
    dtype = preferred or (dtypes.pop() if len(dtypes) == 1 else FLOAT32)
    labels_of_operands, out = parse_subscripts(function, subscripts, [x.ndim for x in operands])
    sharding.read_out_partition(function, out_sharding, len(out))
    sizes = _match_sizes(function, subscripts, operands, labels_of_operands)
    terms = []
    for i, (x, labels) in enumerate(zip(operands, labels_of_operands, strict=True)):
        terms.append(_remove_repeats(function, i, x, labels, sizes))
    if len(terms) == 1:
        x, labels, _ = terms[0]
        values = dequantize_checked(x.astype(jnp.float32))
        result = _Term(values, labels).sum_over([label for label in labels if label not in out])
    else:
        statics = _Statics(function, out, precision, dtype, out_sharding)
        result = _contract_path(statics, terms, _choose_path(terms, out, sizes))
    y = lax.transpose(result.x, [result.labels.index(label) for label in out])
    # A single operand has no contraction that could take an out_sharding.
    if len(terms) == 1 and out_sharding is not None:
        y = reshard(y, out_sharding)
    return y if y.dtype == dtype else affine.round_to_dtype(y.astype(jnp.float32), dtype).astype(dtype)


def _read_forms(function: str, operands: Sequence[Any]) -> Sequence[Any]:
    """Return operands in forms that contractions of a pair read; one with floats for a form of a single quantized one.

    Raises:
        ContractValueError: several are quantized, and one has a form that no contraction of integers supports.
    """
    if len(operands) == 1:
        return operands
    quantized = [i for i, x in enumerate(operands) if isinstance(x, QuantizedArray)]
    if len(quantized) > 1:
        operands = [unpack_checked(x) if i in quantized else x for i, x in enumerate(operands)]
        for i in quantized:
            check_form(function, f"operands[{i}]", operands[i], DOT_FORMS)
        return operands
    other = next(x for i, x in enumerate(operands) if i not in quantized)
    return [_read_form(x, other) if i in quantized else x for i, x in enumerate(operands)]


def _read_form(q: QuantizedArray, operand: jax.Array) -> QuantizedArray | jax.Array:
    """Return an array as a weight-only contraction with another operand reads it."""
    q = read_nested(q, operand)
    return q if is_read_by_kernels(q) else dequantize_checked(q)


# An eager call then finds its program by the subscripts and the shapes, and does not parse them again.
_contract_jitted = jax.jit(contract_operands, inline=True, static_argnums=(0, 1, 3, 4, 5))


@functools.partial(jax.jit, inline=True, static_argnums=(0, 3))
def _contract_to_codes(subscripts: str, operands: Sequence[Any], epilogue: Epilogue, statics: tuple[Any, ...]) -> Any:
    """Return the einsum of two quantized operands with a bias of integers, as floats or as a QuantizedArray."""
    precision, preferred, out_sharding = statics
    operands = _read_forms(_NAME, operands)
    labels_of_operands, out = parse_subscripts(_NAME, subscripts, [x.ndim for x in operands])
    sharding.read_out_partition(_NAME, out_sharding, len(out))
    sizes = _match_sizes(_NAME, subscripts, operands, labels_of_operands)
    pairs = zip(operands, labels_of_operands, strict=True)
    lhs, rhs = (_remove_repeats(_NAME, i, x, labels, sizes) for i, (x, labels) in enumerate(pairs))
    single = [
        label for term in (lhs, rhs) for label in term.labels if not (label in lhs.labels and label in rhs.labels)
    ]
    expected = "an output with every index that only one operand has, because of the bias or the output"
    checks.require(all(label in out for label in single), _NAME, "subscripts", expected, repr(subscripts))
    shared = [label for label in lhs.labels if label in rhs.labels and label in out]
    product = [*shared, *single]
    order = [product.index(label) for label in out]
    if epilogue.bias is not None:
        bias = epilogue.bias
        expected = f"rank {len(out)} or less, to broadcast against the result"
        checks.require(bias.ndim <= len(out), _NAME, "bias", expected, f"shape {bias.shape}")
        bias = bias.reshape((1,) * (len(out) - bias.ndim) + bias.shape)
        epilogue = epilogue._replace(bias=lax.transpose(bias, [order.index(i) for i in range(len(order))]))
    options = _Statics(_NAME, out, precision, preferred, out_sharding)
    y = _contract_pair(options, lhs, rhs, set(out), epilogue).x
    return y.transpose(tuple(order)) if isinstance(y, QuantizedArray) else lax.transpose(y, order)


class _Term(NamedTuple):
    """An operand or an intermediate result, with the labels of its dimensions.

    Attributes:
        x: a QuantizedArray, or an array of floats.
        labels: one for each dimension.
        axes: for an operand, its dimensions in the caller's array; empty for an intermediate result.
    """

    x: Any
    labels: _Labels
    axes: tuple[int, ...] = ()

    def sum_over(self, labels: Sequence[str]) -> _Term:
        """Return the sum over the dimensions with these labels."""
        axes = tuple(self.labels.index(label) for label in labels)
        kept = tuple(label for label in self.labels if label not in labels)
        return _Term(jnp.sum(self.x, axis=axes) if axes else self.x, kept)


def parse_subscripts(function: str, subscripts: str, ranks: Sequence[int]) -> tuple[list[_Labels], _Labels]:
    """Return the labels of the dimensions of each operand and of the output; those under "..." get unused letters."""
    _check_subscripts(function, subscripts)
    _check_terms(function, subscripts.replace(" ", ""), ranks, subscripts)
    shapes = [jax.ShapeDtypeStruct((1,) * rank, FLOAT32) for rank in ranks]
    try:
        inputs, output, _ = parse_einsum_input((subscripts, *shapes))
    except ValueError as error:  # after the checks above, opt_einsum can only refuse the output
        expected = "an output of distinct indices that the operands have"
        raise checks.ContractValueError(
            checks.format_message(function, "subscripts", expected, repr(subscripts))
        ) from error
    return [tuple(term) for term in inputs.split(",")], tuple(output)


def _check_subscripts(function: str, subscripts: object) -> None:
    """Raise ContractTypeError unless the subscripts are a string."""
    if not isinstance(subscripts, str):
        checks.refuse_type(function, "subscripts", "a string", checks.describe_value(subscripts))


def _check_terms(function: str, text: str, ranks: Sequence[int], subscripts: str) -> None:
    """Raise ContractValueError unless the terms are letters with at most one "...", and fit the ranks of the operands.

    opt_einsum accepts any character as a label, fails with an IndexError on too many terms, does not compare the ranks,
    and sums over the dimensions of a "..." that the output lacks. numpy refuses the latter.
    """
    inputs, arrow, output = text.partition("->")
    terms = inputs.split(",")
    expected = f"as many terms as operands, {len(ranks)}"
    checks.require(len(terms) == len(ranks), function, "subscripts", expected, f"{len(terms)} in {subscripts!r}")
    for term in (*terms, output):
        expected = 'terms of letters and at most one "...", separated by ",", with "->" before the last'
        checks.require(bool(_TERM.fullmatch(term)), function, "subscripts", expected, repr(subscripts))
    has_extra = False
    for i, (term, rank) in enumerate(zip(terms, ranks, strict=True)):
        named = len(term.replace("...", ""))
        holds = named <= rank if "..." in term else named == rank
        checks.require(holds, function, f"operands[{i}]", f"a rank that fits {term!r}", f"rank {rank}")
        has_extra |= named < rank
    expected = 'an output with "...", because it represents dimensions of the operands'
    holds = not arrow or "..." in output or not has_extra
    checks.require(holds, function, "subscripts", expected, repr(subscripts))


def _match_sizes(
    function: str, subscripts: str, operands: Sequence[Any], labels_of_operands: Sequence[_Labels]
) -> dict[str, int]:
    """Return the size of each label; under "..." a size of 1 broadcasts."""
    sizes: dict[str, int] = {}
    for i, (x, labels) in enumerate(zip(operands, labels_of_operands, strict=True)):
        for label, n in zip(labels, x.shape, strict=True):
            known = sizes.setdefault(label, n)
            broadcasts = label not in subscripts
            sizes[label] = n if broadcasts and known == 1 else known
            if n != sizes[label] and not (broadcasts and n == 1):
                index = 'under "..."' if broadcasts else f"of index {label!r}"
                expected = f"size {known} {index}, as in the operands before it"
                checks.refuse(function, f"operands[{i}]", expected, f"shape {x.shape}")
    # numpy's search for a path, and the backward pass of `quantized_einsum`, need a letter for every index.
    expected = f"at most {len(string.ascii_letters)} indices"
    checks.require(len(sizes) <= len(string.ascii_letters), function, "subscripts", expected, len(sizes))
    return sizes


def _remove_repeats(
    function: str, i: int, x: QuantizedArray | jax.Array, labels: _Labels, sizes: dict[str, int]
) -> _Term:
    """Return an operand with distinct labels, without the dimensions of size 1 that broadcast."""
    if len(set(labels)) < len(labels):
        expected = "each index once in a quantized operand, or the operand dequantized"
        repeated = ", ".join(repr(label) for label in dict.fromkeys(labels) if labels.count(label) > 1)
        checks.require(not isinstance(x, QuantizedArray), function, f"operands[{i}]", expected, f"{repeated} repeated")
        # dot_general has no repeated dimensions, so take the diagonal first.
        kept = tuple(dict.fromkeys(labels))
        x = jnp.einsum(x, [kept.index(label) for label in labels], list(range(len(kept))))
        labels = kept
    broadcast = tuple(a for a, label in enumerate(labels) if x.shape[a] != sizes[label])
    if not broadcast:
        return _Term(x, labels, tuple(range(len(labels))))
    if isinstance(x, QuantizedArray):
        x = read_nested(unpack_checked(x).store_last())  # its leaves are squeezed alike
        if isinstance(x.block_size, tuple):  # it has a size for each of the last dimensions
            runs = (*(1,) * (x.ndim - len(x.block_size)), *x.block_size)
            x = x.replace(block_size=tuple(run for axis, run in enumerate(runs) if axis not in broadcast))
    squeezed = jax.tree.map(lambda leaf: lax.squeeze(leaf, broadcast), x)
    axes = tuple(a for a in range(len(labels)) if a not in broadcast)
    kept = tuple(labels[a] for a in axes)
    return _Term(squeezed, kept, axes)


def _choose_path(terms: Sequence[_Term], out: _Labels, sizes: dict[str, int]) -> list[tuple[int, ...]]:
    """Return which terms are contracted at each step, as indices into a list to which each result is appended.

    The order is numpy's. opt_einsum may choose another one of several that are about equally good, and the order
    decides which operands are contracted in integers and how the results are rounded.
    """
    if len(terms) == 2:
        return [(0, 1)]
    letters = dict(zip(sizes, string.ascii_letters, strict=False))
    texts = ["".join(letters[label] for label in labels) for labels in (*(term.labels for term in terms), out)]
    # numpy reads only the shapes. These arrays have the shapes but take no memory.
    shapes = [np.broadcast_to(np.zeros(()), term.x.shape) for term in terms]
    strategy = ("optimal" if len(terms) <= _MAX_OPTIMAL else "greedy", _ANY_SIZE)
    path, _ = np.einsum_path(f"{','.join(texts[:-1])}->{texts[-1]}", *shapes, optimize=strategy)
    return path[1:]


class _Statics(NamedTuple):
    """The static arguments of a contraction of several operands; `function` is the name for errors."""

    function: str
    out: _Labels
    precision: Any
    dtype: Any
    out_sharding: Any

    def order_out_sharding(self, labels: _Labels) -> Any:
        """Return the out_sharding of a result with these labels; a label that the output lacks is unsharded."""
        partition = sharding.read_out_partition(self.function, self.out_sharding, len(self.out))
        if partition is None:
            return None
        entries = dict(zip(self.out, partition, strict=True))
        return sharding.set_partition(self.out_sharding, [entries.get(label) for label in labels])


def _contract_path(statics: _Statics, terms: list[_Term], path: Sequence[tuple[int, ...]]) -> _Term:
    """Return the contraction of all terms, a pair at a time."""
    waiting = list(terms)
    for step in path:
        chosen = [waiting[i] for i in sorted(step)]
        waiting = [term for i, term in enumerate(waiting) if i not in step]
        # numpy returns a step with more than two terms if their order makes no difference to its cost.
        while len(chosen) > 1:
            lhs, rhs, *chosen = chosen
            kept = {*statics.out, *(label for term in (*chosen, *waiting) for label in term.labels)}
            is_last = not chosen and not waiting
            pair_statics = statics if is_last else statics._replace(dtype=FLOAT32, out_sharding=None)
            chosen.insert(0, _contract_pair(pair_statics, lhs, rhs, kept))
        waiting += chosen
    (result,) = waiting
    return result


def _contract_pair(
    statics: _Statics, lhs: _Term, rhs: _Term, kept: set[str], epilogue: Epilogue | None = None
) -> _Term:
    """Return the product of two terms, summed over every label that is not kept."""
    shared = [label for label in lhs.labels if label in rhs.labels]
    batch = [label for label in shared if label in kept]
    contracted = [label for label in shared if label not in kept]
    free = [label for term in (lhs, rhs) for label in term.labels if label not in shared]
    # dot_general does not sum over a dimension that only one operand has.
    summed = [label for label in free if label not in kept]
    numbers: Any = tuple(
        tuple(tuple(map(term.labels.index, labels)) for term in (lhs, rhs)) for labels in (contracted, batch)
    )
    is_float = not isinstance(lhs.x, QuantizedArray) and not isinstance(rhs.x, QuantizedArray)
    x: Any = lhs.x
    y: Any = rhs.x
    # Convert different dtypes to float32, because JAX refuses to mix them if the user has chosen strict promotion.
    if epilogue is None and (is_float or x.dtype != y.dtype):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    out_sharding = statics.order_out_sharding((*batch, *free))
    if is_float:
        product = lax.dot_general(x, y, numbers, precision=statics.precision, out_sharding=out_sharding)
    else:
        dtype = FLOAT32 if summed else statics.dtype
        caller_axes = _list_caller_axes(lhs, rhs, contracted)
        arguments = (numbers, statics.precision, dtype, out_sharding, caller_axes, epilogue)
        product = contract_checked(statics.function, x, y, *arguments)
    return _Term(product, (*batch, *free)).sum_over(summed)


def _list_caller_axes(lhs: _Term, rhs: _Term, contracted: Sequence[str]) -> Axes | None:
    """Return the contracted dimensions in the caller's arrays."""
    # An intermediate result has no dimensions in the caller's arrays. It is a float array, for which no error names a
    # dimension.
    if not lhs.axes or not rhs.axes:
        return None
    pairs = []
    for label in contracted:
        pairs.append((lhs.axes[lhs.labels.index(label)], rhs.axes[rhs.labels.index(label)]))
    return tuple(pairs)
