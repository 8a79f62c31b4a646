"""`numpy.einsum` over quantized arrays: one `dot_general` for two operands, pair by pair for more."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, reshard
from jax.typing import DTypeLike

from .._arrays.quantized_array import QuantizedArray, dequantize_checked
from .._core import checks, rounding, sharding
from .._core.dtypes import FLOAT32, FLOATS
from .dot import Operand, check_operand, contract_checked
from .dot_integer import Axes

_NAME = "einsum"
_TERM = re.compile(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*")
_OPTIMAL = 6  # the search for the best order takes the factorial of their number
_ANY_SIZE = 2**62  # numpy would otherwise keep intermediate results as small as the operands
_Labels = tuple[str, ...]


def einsum(
    subscripts: str,
    *operands: Operand,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """out = sum over the indices that the output lacks of the product of the operands, some or all quantized.

    Two operands are one `dot_general`, which says what is computed, and a transpose: integers where both are
    quantized, a float contraction where one is. An index that one operand alone has, and the output lacks, is summed
    after the contraction, in float32.

    More operands are contracted pair by pair, in the order of `numpy.einsum_path` (the best one up to 6 operands, a
    greedy one beyond). What a pair leaves is float32: the third quantized operand meets it weight-only. To contract
    two in integers that would not meet, write two calls. A single operand is dequantized.

    Args:
        subscripts: Static. numpy's notation: a term for each operand, and "->" with the output; without it, what occurs
            once in alphabetical order. "..." stands for the dimensions left over; there, and only there, a size of 1
            goes with any other. Spaces do not matter.
        operands: a QuantizedArray, or an array of float32, float16 or bfloat16, each; one at least is a
            QuantizedArray. An index that a float operand has twice takes its diagonal.
        precision: Static. As `jax.lax.dot_general` has it, for float contractions.
        preferred_element_type: Static. float32, float16 or bfloat16: what is returned. By default the dtype of the
            operands, float32 where they differ.
        out_sharding: Static. The sharding of the output on a mesh with explicit axes, as in `dot_general`. With more
            than two operands it applies to the last pair; the shardings of the others must determine their own.

    Returns:
        The dimensions of the output's indices, in their order.

    Raises:
        TypeError: no operand is quantized, or one has a dtype that there is not.
        ValueError: the subscripts do not fit the operands, sizes do not fit each other, or a quantized operand has an
            index twice; and what `dot_general` refuses, lhs and rhs being the two operands that meet.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> spec = jq.QuantSpec(jnp.int8)
        >>> query = jq.quantize(jnp.array([[127.0, 2.5], [-0.5, 300.0]]), spec, -127.0, 127.0)  # ties, and one beyond
        >>> key = jq.quantize(jnp.array([[1.0, -1.0], [63.5, 0.25], [0.0, 2.0]]), spec)  # 0.25 is half a step
        >>> jq.einsum("qd,kd->kq", query, key).tolist()
        [[125.0, -127.0], [8064.5, 0.0], [4.0, 254.0]]
        >>> jq.einsum("qd, kd, k", query, key, jnp.array([1.0, 0.0, 0.5]))  # q is what remains
        Array([127.,   0.], dtype=float32)

    Source: numpy.einsum; the arithmetic is `dot_general`'s.

    Cotangents: as of `dot_general`.
    """
    given = [check_operand(_NAME, f"operands[{i}]", x) for i, x in enumerate(operands)]
    checks.check_precision(_NAME, precision)
    if not any(isinstance(x, QuantizedArray) for x in given):
        got = ", ".join(str(checks.describe_value(x)) for x in given) or "none"
        checks.require_type(False, _NAME, "operands", "a QuantizedArray among them", got)
    if preferred_element_type is not None:
        preferred_element_type = checks.check_dtype(_NAME, "preferred_element_type", preferred_element_type, FLOATS)
    sharding.check_out_sharding(_NAME, out_sharding)
    return contract_operands(_NAME, subscripts, given, precision, preferred_element_type, out_sharding)


def contract_operands(
    function: str,
    subscripts: str,
    given: Sequence[Any],
    precision: Any,
    preferred: Any,
    out_sharding: Any = None,
) -> jax.Array:
    """Returns `einsum`, with errors that name another function."""
    dtypes = {x.dtype for x in given}
    dtype = preferred or (dtypes.pop() if len(dtypes) == 1 else FLOAT32)
    terms, out = parse_subscripts(function, subscripts, [x.ndim for x in given])
    sharding.find_out_partition(function, out_sharding, len(out))
    sizes = _find_sizes(function, given, terms)
    parts = [
        _check_distinct(function, i, x, labels, sizes) for i, (x, labels) in enumerate(zip(given, terms, strict=True))
    ]
    if len(parts) == 1:
        x, labels, _ = parts[0]
        values = dequantize_checked(x.astype(jnp.float32))
        found = _Part(values, labels).summed([label for label in labels if label not in out])
    else:
        how = _How(function, out, precision, dtype, out_sharding)
        found = _contract(how, parts, _find_path(parts, out, sizes))
    y = lax.transpose(found.x, [found.labels.index(label) for label in out])
    if len(parts) == 1 and out_sharding is not None:
        y = reshard(y, out_sharding)
    return y if y.dtype == dtype else rounding.round_to_dtype(y.astype(jnp.float32), dtype).astype(dtype)


class _Part(NamedTuple):
    """An operand, or what some of them have become, and the indices of its dimensions.

    Attributes:
        axes: of an operand, which of the caller's dimensions they are.
    """

    x: Any
    labels: _Labels
    axes: tuple[int, ...] = ()

    def summed(self, labels: Sequence[str]) -> _Part:
        """Returns the sum over some of the dimensions."""
        axes = tuple(self.labels.index(label) for label in labels)
        kept = tuple(label for label in self.labels if label not in labels)
        return _Part(jnp.sum(self.x, axis=axes) if axes else self.x, kept)


def parse_subscripts(function: str, subscripts: Any, ranks: Sequence[int]) -> tuple[list[_Labels], _Labels]:
    """Returns the indices of each operand and of the output; those of "..." are numbers, from the back."""
    checks.require_type(
        isinstance(subscripts, str), function, "subscripts", "a string", checks.describe_value(subscripts)
    )
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    texts = inputs.split(",")
    expected = f"as many terms as operands, {len(ranks)}"
    checks.require(len(texts) == len(ranks), function, "subscripts", expected, f"{len(texts)} in {subscripts!r}")
    for text in (*texts, output):
        expected = 'terms of letters and one "..." at most, with "," between and "->" before the last'
        checks.require(bool(_TERM.fullmatch(text)), function, "subscripts", expected, repr(subscripts))
    extras = []
    for i, (text, rank) in enumerate(zip(texts, ranks, strict=True)):
        named = len(text.replace("...", ""))
        holds = named <= rank if "..." in text else named == rank
        checks.require(holds, function, f"operands[{i}]", f"a rank that fits {text!r}", f"rank {rank}")
        extras.append(rank - named)
    terms = [_read_labels(text, extra) for text, extra in zip(texts, extras, strict=True)]
    letters = inputs.replace("...", "").replace(",", "")
    if not arrow:
        output = "..." + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    named = output.replace("...", "")
    holds = len(set(named)) == len(named) and set(named) <= set(letters)
    expected = "an output of different indices of the operands"
    checks.require(holds, function, "subscripts", expected, repr(subscripts))
    expected = 'an output with "...", for there are dimensions that it stands for'
    checks.require("..." in output or max(extras) == 0, function, "subscripts", expected, repr(subscripts))
    return terms, _read_labels(output, max(extras))


def _read_labels(text: str, extra: int) -> _Labels:
    before, dots, behind = text.partition("...")
    return (*before, *(str(extra - i) for i in range(extra) if dots), *behind)


def _find_sizes(function: str, given: Sequence[Any], terms: Sequence[_Labels]) -> dict[str, int]:
    """Returns the size of each index; a 1 under "..." gives way to another."""
    sizes: dict[str, int] = {}
    for i, (x, labels) in enumerate(zip(given, terms, strict=True)):
        for label, n in zip(labels, x.shape, strict=True):
            known = sizes.setdefault(label, n)
            is_dots = label not in string.ascii_letters
            sizes[label] = n if is_dots and known == 1 else known
            holds = n == sizes[label] or (is_dots and n == 1)
            index = 'under "..."' if is_dots else f"of index {label!r}"
            expected = f"size {known} {index}, as before it"
            checks.require(holds, function, f"operands[{i}]", expected, f"shape {x.shape}")
    expected = f"{len(string.ascii_letters)} indices at most"
    checks.require(len(sizes) <= len(string.ascii_letters), function, "subscripts", expected, len(sizes))
    return sizes


def _check_distinct(function: str, i: int, x: Any, labels: _Labels, sizes: dict[str, int]) -> _Part:
    """Returns an operand that has every index once, at its full size or not at all."""
    if len(set(labels)) < len(labels):
        expected = "each index once in a quantized operand, or the operand dequantized"
        got = "".join(label for label in labels if label in string.ascii_letters)
        checks.require(not isinstance(x, QuantizedArray), function, f"operands[{i}]", expected, repr(got))
        kept = tuple(dict.fromkeys(labels))
        x = jnp.einsum(x, [kept.index(label) for label in labels], list(range(len(kept))))
        labels = kept
    shared = tuple(a for a, label in enumerate(labels) if x.shape[a] != sizes[label])
    if not shared:
        return _Part(x, labels, tuple(range(len(labels))))
    squeezed = jax.tree.map(lambda part: lax.squeeze(part, shared), x)
    axes = tuple(a for a in range(len(labels)) if a not in shared)
    kept = tuple(labels[a] for a in axes)
    return _Part(squeezed, kept, axes)


def _find_path(parts: Sequence[_Part], out: _Labels, sizes: dict[str, int]) -> list[tuple[int, ...]]:
    """Returns which operands meet, in numpy's form: by their places in a list that what they become is added to."""
    if len(parts) == 2:
        return [(0, 1)]
    letters = dict(zip(sizes, string.ascii_letters, strict=False))
    terms = ["".join(letters[label] for label in labels) for labels in (*(p.labels for p in parts), out)]
    nothing = np.zeros(())  # arrays of the operands' shapes that take no memory
    shapes = [np.broadcast_to(nothing, p.x.shape) for p in parts]
    how = ("optimal" if len(parts) <= _OPTIMAL else "greedy", _ANY_SIZE)
    path, _ = np.einsum_path(f"{','.join(terms[:-1])}->{terms[-1]}", *shapes, optimize=how)
    return path[1:]


class _How(NamedTuple):
    """What is static of a contraction of several operands; `function` is for errors."""

    function: str
    out: _Labels
    precision: Any
    dtype: Any
    out_sharding: Any

    def out_sharding_of(self, labels: _Labels) -> Any:
        """Returns the out_sharding of a result with the indices of the output, and perhaps more, in another order."""
        partition = sharding.find_out_partition(self.function, self.out_sharding, len(self.out))
        if partition is None:
            return None
        places = dict(zip(self.out, partition, strict=True))
        return sharding.set_partition(self.out_sharding, [places.get(label) for label in labels])


def _contract(how: _How, parts: list[_Part], path: Sequence[tuple[int, ...]]) -> _Part:
    waiting = list(parts)
    for step in path:
        meeting = [waiting[i] for i in sorted(step)]
        waiting = [p for i, p in enumerate(waiting) if i not in step]
        while len(meeting) > 1:  # where the order does not matter, numpy has all of them meet at once
            a, b, *meeting = meeting
            kept = {*how.out, *(label for p in (*meeting, *waiting) for label in p.labels)}
            is_last = not meeting and not waiting
            inner = how if is_last else how._replace(dtype=FLOAT32, out_sharding=None)
            meeting.insert(0, _contract_pair(inner, a, b, kept))
        waiting += meeting
    (found,) = waiting
    return found


def _contract_pair(how: _How, a: _Part, b: _Part, kept: set[str]) -> _Part:
    """Returns the product of two operands, summed over every index that is not kept."""
    both = [label for label in a.labels if label in b.labels]
    batch, contracted = ([label for label in both if (label in kept) == is_kept] for is_kept in (True, False))
    frees = [label for p in (a, b) for label in p.labels if label not in both]
    alone = [label for label in frees if label not in kept]
    axes = ([tuple(map(p.labels.index, group)) for p in (a, b)] for group in (contracted, batch))
    numbers: Any = tuple((left, right) for left, right in axes)
    is_float = not isinstance(a.x, QuantizedArray) and not isinstance(b.x, QuantizedArray)
    # Of unlike dtypes both become float32, which a user's strict promotion would not let them.
    x, y = (p.x.astype(jnp.float32) if is_float or a.x.dtype != b.x.dtype else p.x for p in (a, b))
    out_sharding = how.out_sharding_of((*batch, *frees))
    if is_float:
        y = lax.dot_general(x, y, numbers, precision=how.precision, out_sharding=out_sharding)
    else:
        dtype = FLOAT32 if alone else how.dtype
        caller_axes = _find_caller_axes(a, b, contracted)
        y = contract_checked(how.function, x, y, numbers, how.precision, dtype, out_sharding, caller_axes)
    return _Part(y, (*batch, *frees)).summed(alone)


def _find_caller_axes(a: _Part, b: _Part, contracted: Sequence[str]) -> Axes | None:
    """Returns the contracted dimensions by their places in what the caller gave."""
    if not a.axes or not b.axes:  # one is a product of floats, of which nothing is required
        return None
    return tuple((a.axes[a.labels.index(c)], b.axes[b.labels.index(c)]) for c in contracted)
