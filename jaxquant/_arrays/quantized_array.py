"""The quantized array type: codes with their scale and zero point or offset, registered as a JAX pytree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import DTypeLike

from .._core import checks, dtypes, entry_point, granularity
from .._kernels.affine import Use
from . import indexing, parts
from .spec import Codebook, Format, read_format

# Errors for Python operators and JAX functions that do not accept quantized arrays; they say what to call instead.


_NAME = "QuantizedArray"
# The names of the special methods without their underscores, and the operators in Python's notation.
_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "divmod": "divmod",
    "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNARY = {
    "neg": "-{}", "pos": "+{}", "invert": "~{}", "abs": "abs({})", "round": "round({})",
    "float": "float({})", "int": "int({})", "complex": "complex({})",
}  # fmt: skip
# A function that looks rows up by `jq.take` runs on float tables, too, which have no `dequantize`.
_LOOKUPS: dict[str, str] = dict.fromkeys(
    ("+", "-", "*", "/"), " (jq.take(q, indices) looks up floats, in place of q[indices])"
)
# One line, because JAX inserts the repr of the type into a sentence.
_ADVICE = (
    "jq.matmul, jq.dot_general and jq.einsum contract it, jq.take and jq.concatenate take it, "
    "q.dequantize() returns a jax.Array"
)


class Advised(type):
    """The metaclass of QuantizedArray, which makes the repr of the class list the functions that accept one.

    If a JAX function gets an object that is not an array, its error prints the type of the object: "sum requires
    ndarray or scalar arguments, got <type>". The repr of the type is therefore the only place for advice. A
    `__jax_array__` that raises is not an alternative, because `x @ q` calls it too and must work.
    """

    def __repr__(cls) -> str:
        """Return the public name of the class and the functions that take it."""
        # Subclasses of QuantizedArray, and its base class, keep the usual repr.
        if cls.__name__ != _NAME:
            return super().__repr__()
        return f"<class 'jaxquant.{_NAME}': {_ADVICE}>"


class RefusedOperators(metaclass=Advised):
    """A base class with operators that raise a TypeError, which names the call to make instead.

    All of Python's operators are refused except `@`, `==` and `!=`. `==` compares identities, as sets, dicts and
    comparisons of pytrees require.
    """

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"jaxquant.{_NAME}: {name}: the array is immutable; use replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"jaxquant.{_NAME}: {name}: the array is immutable")

    def __bool__(self) -> bool:
        """Raise TypeError: a truth value would need the values as floats."""
        text = "q.dequantize() for a truth value"
        raise TypeError(checks.format_message(f"{_NAME}.__bool__", "self", text, repr(self)))

    def __array__(self, *_: object, **__: object) -> Any:
        """Raise TypeError: numpy must not get floats without an explicit `dequantize`."""
        raise TypeError(checks.format_message(f"{_NAME}.__array__", "self", "q.dequantize() or q.codes", repr(self)))

    def __contains__(self, item: object) -> bool:
        """Raise TypeError: Python would compare the rows by identity, and the result would always be False."""
        _refuse("__contains__", "x in q.dequantize()", f"{_name_type(item)} in {self!r}")
        # `_refuse` always raises, but a type checker does not know that.
        raise AssertionError


def _refuse(method: str, expected: str, got: str) -> None:
    """Raise the TypeError of an operator."""
    checks.refuse_type(f"{_NAME}.{method}", "self", expected, got)


def _name_type(value: object) -> str:
    """Return the text for an operand in an error: the repr of a number or quantized array, the type of any other."""
    return repr(value) if isinstance(value, int | float | complex | RefusedOperators) else type(value).__name__


def _write_expression(symbol: str, left: str, right: str) -> str:
    """Return the Python expression of an operator."""
    return f"divmod({left}, {right})" if symbol == "divmod" else f"{left} {symbol} {right}"


def _make_binary(method: str, symbol: str) -> Callable[[Any, Any], Any]:
    """Return the method of a binary operator with the quantized array on the left."""
    refused_types = (RefusedOperators, jax.Array, np.ndarray, np.generic, int, float, complex, str, list, tuple)

    def refuse(self: object, other: object) -> Any:
        if not isinstance(other, refused_types):
            return NotImplemented  # the other class may support QuantizedArrays
        # Show how both operands become floats.
        right = "p.dequantize()" if isinstance(other, RefusedOperators) else "x"
        got = _write_expression(symbol, repr(self), _name_type(other))
        return _refuse(method, f"{_write_expression(symbol, 'q.dequantize()', right)}{_LOOKUPS.get(symbol, '')}", got)

    return refuse


def _make_reflected(method: str, symbol: str) -> Callable[[Any, Any], Any]:
    """Return the method of a binary operator with the quantized array on the right."""

    def refuse(self: object, other: object) -> Any:
        return _refuse(
            method,
            f"{_write_expression(symbol, 'x', 'q.dequantize()')}{_LOOKUPS.get(symbol, '')}",
            _write_expression(symbol, _name_type(other), repr(self)),
        )

    return refuse


def _make_unary(method: str, form: str) -> Callable[..., Any]:
    """Return the method of a unary operator or a conversion."""

    def refuse(self: object, *_: object) -> Any:
        return _refuse(method, form.format("q.dequantize()"), form.format(repr(self)))

    return refuse


def _add_operators() -> None:
    """Add the methods with setattr, so that type checkers do not see them and report the operators as errors, too."""
    for name, symbol in {**_BINARY, **_COMPARISONS}.items():
        setattr(RefusedOperators, f"__{name}__", _make_binary(f"__{name}__", symbol))
    for name, symbol in _BINARY.items():
        setattr(RefusedOperators, f"__r{name}__", _make_reflected(f"__r{name}__", symbol))
    for name, form in _UNARY.items():
        setattr(RefusedOperators, f"__{name}__", _make_unary(f"__{name}__", form))


_add_operators()


# `jaxquant.matmul`, for the operator @. It is in a package above this one, which `import jaxquant` imports.
_MATMUL: list[Callable[[Any, Any], Any]] = []


def register_matmul(matmul: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that the operator @ of quantized arrays calls; it decorates `jaxquant.matmul`."""
    _MATMUL.append(matmul)
    return matmul


@jax.tree_util.register_pytree_with_keys_class
class QuantizedArray(RefusedOperators):
    """An array of codes with the scale and the zero point or offset that turn them into real numbers.

    x = (codes - zero_point) * scale + offset, which `dequantize` computes. With `inverse_scale`, a division takes the
    place of the product.

    It is immutable and a pytree of up to five arrays, so it can be an argument, a result or a part of a larger tree
    wherever JAX takes arrays. It is not a `jax.Array`: an operation that needs floats must be given `q.dequantize()`,
    which is never called implicitly.

    No granularity is stored, because the shapes imply it, and still do after `jax.vmap`, a slice or a transpose.
    `scale`, `zero_point` and `offset` have the rank of `codes`. Each of their dimensions is 1 (all indices share an
    entry), as long as `codes.shape[i]` (one entry per index), or the number of blocks. Their shapes may differ.

    `jax.vmap` and `jax.lax.scan` map each of the arrays, so the scale must have an entry for each index of the mapped
    axis: keep that axis with `PerAxis`, or call `per_index(axis)` first. To join arrays use `jq.concatenate`. Do not
    concatenate their parts with `jnp.concatenate`: the joined scale is read as blocks of equal length. If the blocks
    differ in length, the numbers are wrong, and no check can detect it.

    The constructor checks only that `dtype` is a dtype, because JAX also builds pytrees of objects that are not arrays.
    Every method and function that takes a QuantizedArray checks it. Unless `signed_scale` is set, the elements of a
    scale must be positive; they are checked if they are known, that is, not traced and not on an accelerator. NaN and
    infinity are accepted, because `quantize` returns such scales for data that contain them; they then show in every
    result. A function that cannot compute with an offset, a nested scale, signed scales, a permutation, packed codes, a
    zero point that is a real number, an inverse scale or the arithmetic of 16 bits refuses the array by name.

    Attributes:
        codes: the quantized values, int2 to uint16, float8 or float4_e2m1fn. With a codebook: indices into it.
        scale: the real value of one step, float32, float16, bfloat16 or float8_e8m0fnu. Or a QuantizedArray without a
            nested scale of its own, which stands for the floats that it has in float32: a nested scale.
        zero_point: the code of 0.0, in steps and in the dtype of `codes`, or in int8 or uint8 if the codes are packed;
            None for 0. Or a real number, float32, float16 or bfloat16: then codes - zero_point is rounded as the
            product is.
        offset: the real value of the code 0, float32, float16 or bfloat16, or a QuantizedArray; None for 0. An array
            has a zero point or an offset, not both. Codes of float8 and float4 have neither.
        permutation: int32 of length `codes.shape[permuted_axis]`, or None. `codes`, `scale`, `zero_point` and
            `offset` hold this axis in the order of their blocks: the index j of them is the index permutation[j] of the
            array. The first dimensions of the array may stand in front of its length, as after `jax.vmap`.
        dtype: Static. The dtype that `dequantize` returns: float32, float16 or bfloat16. By default the dtype of the
            scale.
        block_size: Static. The number of indices that share an entry in a dimension divided into blocks, or a tuple of
            one number for each of the last dimensions, 1 for those without blocks. None if there are no blocks, or if
            they divide the dimension evenly. It is stored because the shapes do not imply the block size if the last
            block is shorter.
        codebook: Static. The `Codebook` that the codes index, or None.
        stored_order: Static. The axes, counted from the back, in the order in which the last dimensions of the codes in
            memory hold them: (-1, -2) if a matrix is stored transposed. None, the default, if they are in order. Only
            memory differs, and with it speed: `codes`, `shape`, the scale and all functions have the logical order.
            `stored_codes` is the array in memory and, as a leaf of the pytree, what `jax.vmap`, `jax.device_put` and
            `jax.tree.map` see. `store_last` chooses the order.
        packing: Static. How the codes are packed in uint32 words, or None. `codes` are unpacked; `stored_codes` are
            the words.
        signed_scale: Static. Whether elements of the scale may be zero or negative.
        permuted_axis: Static. The axis that `permutation` permutes, a negative int, or None.
        inverse_scale: Static. Whether `scale` is the number of steps in 1.0, so that codes are divided by it.
        arithmetic: Static. The dtype that `dequantize` computes in: float32, by default; or float16 or bfloat16, as the
            producers of some files do. Scale, zero point and offset are then rounded to it first, and each difference,
            product, quotient and sum is.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([[-1.27, 0.5, 0.005], [3.0, 254.0, -1.0]])
        >>> q = jq.quantize(x, jq.QuantSpec(jnp.int8, jq.PerAxis(0)))
        >>> q
        QuantizedArray(int8[2,3], scale=float32[2,1], zero_point=None, dtype=float32, nbytes=14)
        >>> q.codes
        Array([[-127,   50,    0],
               [   2,  127,    0]], dtype=int8)
        >>> q[1].dequantize()
        Array([  4., 254.,   0.], dtype=float32)
        >>> jax.tree.map(jnp.shape, q)
        QuantizedArray(codes=(2, 3), scale=(2, 1), zero_point=None)
    """

    # The codes and the static attributes are private: they are read through properties and set only by `_fill`.
    # `_is_lazy`: the stored order comes from a transpose that nothing has needed yet, and is hidden from others.
    # `_is_view`: the array is the transpose of one without a stored order, made by `transpose`.
    __slots__ = (
        "_is_checked", "_is_lazy", "_is_view", "_restored", "_static", "_stored", "offset", "permutation", "scale",
        "zero_point",
    )  # fmt: skip

    scale: Any
    zero_point: Any
    offset: Any
    permutation: Any
    _stored: Any
    _static: parts.ArrayStatic
    _is_lazy: bool
    _is_view: bool
    _is_checked: bool
    _restored: Any

    def __init__(
        self,
        codes: Any,
        scale: Any,
        zero_point: Any = None,
        offset: Any = None,
        permutation: Any = None,
        *,
        dtype: DTypeLike | None = None,
        block_size: int | Sequence[int] | None = None,
        codebook: Codebook | None = None,
        stored_order: Sequence[int] | None = None,
        packing: parts.Packing | None = None,
        signed_scale: bool = False,
        permuted_axis: int | None = None,
        inverse_scale: bool = False,
        arithmetic: DTypeLike | None = None,
    ) -> None:
        output_dtype: Any = getattr(scale, "dtype", None)
        if dtype is not None:
            output_dtype = parts.read_dtype(_NAME, "dtype", dtype)
        elif output_dtype in (dtypes.E8M0, np.dtype(np.float64)):  # JAX converts numpy's float64 to float32
            output_dtype = dtypes.FLOAT32
        order = parts.read_stored_order(_NAME, stored_order)
        sizes: Any = block_size
        if isinstance(sizes, list | tuple):
            sizes = granularity.shorten_block_size(tuple(sizes))
        step: Any = None if arithmetic is None else parts.read_dtype(_NAME, "arithmetic", arithmetic)
        step = None if step == dtypes.FLOAT32 else step
        static = parts.ArrayStatic(
            output_dtype, sizes, codebook, order, packing, signed_scale, permuted_axis, inverse_scale, step
        )
        stored = parts.store_codes(codes, order, packing)
        self._fill(parts.ArrayParts(stored, scale, zero_point, offset, permutation), static)

    def _fill(self, children: parts.ArrayParts, static: parts.ArrayStatic) -> None:
        """Set the attributes, which `__setattr__` refuses to do."""
        # One statement for each, because a loop would make every unflatten slower.
        set_attribute = object.__setattr__
        set_attribute(self, "_stored", children[0])
        set_attribute(self, "scale", children[1])
        set_attribute(self, "zero_point", children[2])
        set_attribute(self, "offset", children[3])
        set_attribute(self, "permutation", children[4])
        set_attribute(self, "_static", static)
        set_attribute(self, "_is_lazy", False)
        set_attribute(self, "_is_view", False)
        set_attribute(self, "_restored", None)
        set_attribute(self, "_is_checked", False)

    # A pytree.

    def tree_flatten(self) -> tuple[parts.ArrayParts, parts.ArrayStatic]:
        """Return the arrays, with the codes as they are stored, and the static attributes."""
        static = self._static
        if self._is_lazy:
            static = static._replace(stored_order=None)
        return parts.ArrayParts(self.stored_codes, self.scale, self.zero_point, self.offset, self.permutation), static

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], parts.ArrayStatic]:
        """Return the arrays with their names, and the static attributes."""
        children, static = self.tree_flatten()
        keys = (jax.tree_util.GetAttrKey(name) for name in parts.ArrayParts._fields)
        return tuple(zip(keys, children, strict=True)), static

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], children: tuple[Any, ...]) -> QuantizedArray:
        """Return an array with the given children, which JAX may have replaced with any objects.

        Children that are left out are None, and static attributes that are left out have their defaults: arrays that
        were pickled by an earlier version have three of each.
        """
        new = object.__new__(cls)
        filled = children if len(children) == len(parts.ArrayParts._fields) else parts.ArrayParts(*children)
        new._fill(filled, static if isinstance(static, parts.ArrayStatic) else parts.ArrayStatic(*static))  # type: ignore
        return new

    def __reduce__(self) -> Any:
        """Return how `pickle` and `copy` rebuild the array."""
        children, static = self.tree_flatten()
        return _rebuild_array, (static, children)

    def replace(self, **changes: Any) -> QuantizedArray:
        """Return a copy with other attributes, such as a new `scale`, `dtype` or `stored_order`.

        New codes have the logical shape and are not packed; they are stored in the stored order, and packed if the
        array is.

        Raises:
            ValueError: there is no such attribute.
        """
        known = (*parts.ArrayParts._fields, *parts.ArrayStatic._fields)
        for name in changes:
            if name not in known:
                checks.refuse(f"{_NAME}.replace", name, f"one of {', '.join(known)}", "another name")
        children = {name: changes.get(name, getattr(self, name)) for name in parts.ArrayParts._fields[1:]}
        static = {name: changes.get(name, getattr(self, name)) for name in parts.ArrayStatic._fields}
        if changes.keys() & {"codes", "stored_order", "packing"}:
            codes = changes.get("codes")
            codes = self.codes if codes is None else codes
            if "packing" not in changes and self.packing is not None:
                static["packing"] = self._measure_packing(codes, static["stored_order"])
            return QuantizedArray(codes, **children, **static)
        # Codes that stay are neither transposed nor packed twice.
        new = QuantizedArray(None, **children, **{**static, "stored_order": None, "packing": None})
        children, static = new._parts._replace(codes=self._stored), new._static._replace(packing=self.packing)
        return QuantizedArray.tree_unflatten(static, children)._with_stored(
            self._stored, self._order, is_lazy=self._is_lazy
        )

    def _measure_packing(self, codes: Any, order: Any) -> parts.Packing | None:
        """Return the packing of other codes in an order."""
        packing, rank = self.packing, getattr(codes, "ndim", 0)
        if packing is None or rank == 0:
            return packing
        last = parts.derive_permutation(parts.read_stored_order(_NAME, order), rank)[-1]
        return dataclasses.replace(packing, length=codes.shape[last])

    @property
    def _parts(self) -> parts.ArrayParts:
        """The children, with the codes as they are in memory, also of a lazy transpose."""
        return parts.ArrayParts(self._stored, self.scale, self.zero_point, self.offset, self.permutation)

    @property
    def _order(self) -> parts.StoredOrder:
        """The order of the codes in memory, also of a lazy transpose."""
        return self._static.stored_order

    def _with_stored(
        self, stored: Any, order: parts.StoredOrder, *, is_lazy: bool = False, packing: Any = ...
    ) -> QuantizedArray:
        """Return a copy with other stored codes, in the stored order `order`, and in another packing if one is given.

        With `is_lazy`, the order is not one that the user has chosen: it comes from a transpose. The functions of this
        package then read the codes as they are stored, and where the array is taken apart as a pytree, or its
        `stored_codes` are read, the codes are transposed, so that `jax.vmap` and shardings see the logical order.
        """
        static = self._static._replace(stored_order=order, packing=self.packing if packing is ... else packing)
        zero_point = self.zero_point
        if self.packing is not None and static.packing is None and zero_point is not None:
            zero_point = parts.narrow_zero_point(zero_point, stored.dtype)
        new = QuantizedArray.tree_unflatten(static, self._parts._replace(codes=stored, zero_point=zero_point))
        object.__setattr__(new, "_is_lazy", is_lazy and order is not None)
        return new

    # Attributes as a `jax.Array` has them.

    @property
    def dtype(self) -> Any:
        """The dtype that `dequantize` returns."""
        return self._static.dtype

    @property
    def block_size(self) -> Any:
        """The number of indices that share an entry in a dimension divided into blocks, one for each, or None."""
        return self._static.block_size

    @property
    def codebook(self) -> Codebook | None:
        """The codebook that the codes index, or None."""
        return self._static.codebook

    @property
    def stored_order(self) -> tuple[int, ...] | None:
        """The axes, counted from the back, that the last dimensions of the stored codes hold; None if in order."""
        return None if self._is_lazy else self._order

    @property
    def packing(self) -> parts.Packing | None:
        """How the codes are packed in uint32 words, or None."""
        return self._static.packing

    @property
    def format(self) -> Format:
        """What a spec calls the dtype: the codebook, or else the dtype or the narrow integer that the codes are.

        Codes of a narrow integer that are not packed count as int8 or uint8.
        """
        if self.codebook is not None:
            return self.codebook
        return self._stored.dtype if self.packing is None else self.packing.format

    @property
    def signed_scale(self) -> bool:
        """Whether elements of the scale may be zero or negative."""
        return self._static.signed_scale

    @property
    def permuted_axis(self) -> int | None:
        """The axis that the permutation permutes, counted from the back, or None."""
        return self._static.permuted_axis

    @property
    def inverse_scale(self) -> bool:
        """Whether codes are divided by the scale, and not multiplied with it."""
        return self._static.inverse_scale

    @property
    def arithmetic(self) -> Any:
        """The dtype to which each operation of `dequantize` is rounded."""
        return self._static.arithmetic or dtypes.FLOAT32

    @property
    def codes(self) -> Any:
        """The quantized values, or the indices into the codebook, unpacked and in the logical order."""
        order, packing = self._order, self._static.packing
        if order is None and packing is None:
            return self._stored
        if self._restored is not None:
            return self._restored
        codes = parts.restore_codes(self._stored, order, packing)
        # A lazy transpose is carried out once. A tracer is not kept: it belongs to the trace that asks for it.
        if self._is_lazy and not checks.is_traced(codes):
            object.__setattr__(self, "_restored", codes)
        return codes

    @property
    def values(self) -> Any:
        """Another name for `codes`."""
        return self.codes

    @property
    def stored_codes(self) -> Any:
        """The codes as they are in memory: `codes` in the stored order, or the words that hold them."""
        return self.codes if self._is_lazy else self._stored

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `codes`."""
        stored = getattr(self._stored, "shape", None)  # each eager call asks several times, and `jnp.shape` is slow
        stored = tuple(jnp.shape(self._stored)) if stored is None else tuple(stored)
        return parts.derive_logical_shape(_NAME, "self", stored, self._static)

    @property
    def ndim(self) -> int:
        """The rank of `codes`."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of codes."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays as they are stored.

        A 4-bit code takes half a byte and a 2-bit code a quarter. In jax 0.10 a running CPU program holds each of
        these codes in a whole byte.
        """
        return parts.count_all_bytes(self._parts)

    def __len__(self) -> int:
        """Return the length of the first dimension."""
        checks.require_type(self.ndim > 0, f"{_NAME}.__len__", "self", "rank 1 or more", "rank 0")
        return self.shape[0]

    def __iter__(self) -> Iterator[QuantizedArray]:
        """Yield the slices along the first dimension."""
        q = check_lazy(f"{_NAME}.__iter__", "self", self, supports=FORMS)
        return (indexing.index_array(q, i) for i in range(len(q)))

    def __repr__(self) -> str:
        """Return the dtypes and shapes, without numbers; the children themselves if they are not arrays."""
        children, static = self._parts, self._static
        if self._is_lazy:  # the text needs no transpose
            codes = jax.ShapeDtypeStruct(self.shape, self._stored.dtype)
            children, static = children._replace(codes=codes), static._replace(stored_order=None)
        nested = {name: getattr(self, name) for name in ("scale", "offset")}
        nested = {name: _describe_nested(part) for name, part in nested.items() if isinstance(part, QuantizedArray)}
        return parts.describe_array(children._replace(**nested), static, children)

    # Conversions.

    def dequantize(self) -> jax.Array:
        """Return the floats that the codes represent, in `dtype`.

        y = (codes - zero_point) * scale, bit for bit the result of `dequantize_linear`: the product is computed in
        float32 and rounded once to `dtype`. With a codebook, y = codebook[codes] * scale.

        With an offset, the product is rounded to float32, the sum of both is rounded to float32, and the result to
        `dtype`. A scale or an offset that is quantized itself is dequantized to float32 first. A zero point that is a
        real number is subtracted in float32, with a rounding of the difference, too. Where `arithmetic` is another
        dtype, it takes the place of float32 in all of this.

        Raises:
            TypeError: a part is not an array or has an unsupported dtype.
            ValueError: the shapes of the parts do not fit each other, or a known scale is 0 or negative.
        """
        return dequantize_checked(check_array("QuantizedArray.dequantize", "self", self, supports=FORMS))

    def astype(self, dtype: DTypeLike) -> QuantizedArray:
        """Return the same array with a new `dtype` for `dequantize` to return: float32, float16 or bfloat16."""
        return self.replace(dtype=checks.check_dtype(f"{_NAME}.astype", "dtype", dtype, dtypes.FLOATS))

    def __getitem__(self, index: object) -> QuantizedArray:
        """Return the elements that a numpy index selects, with their entries of scale and zero point.

        A slice that cuts through blocks gets one entry per index. An int that is out of range raises IndexError. In
        an array of indices, which may be traced, an index out of range selects the nearest element, as in
        `jax.numpy`. `jq.take` can return NaN instead.

        Raises:
            TypeError: the index has a type or dtype that does not index arrays.
            ValueError: the index has too many dimensions, or int32 does not hold one of its numbers.
            IndexError: an int is out of range, or a mask has the wrong shape.
        """
        return indexing.index_array(check_lazy("QuantizedArray.__getitem__", "self", self, supports=FORMS), index)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **keywords: object) -> Any:
        """Compute numpy's `@`; raise TypeError for every other numpy function."""
        # numpy calls this method for `array @ q`, before __rmatmul__.
        if ufunc is np.matmul and method == "__call__" and not keywords:
            return _MATMUL[0](*inputs)
        expected = f"q.dequantize() for numpy's {ufunc.__name__}"
        raise TypeError(checks.format_message(_NAME, "self", expected, repr(self)))

    def __matmul__(self, other: object) -> jax.Array:
        """Return `jq.matmul(self, other)`."""
        return _MATMUL[0](self, other)

    def __rmatmul__(self, other: object) -> jax.Array:
        """Return `jq.matmul(other, self)`."""
        return _MATMUL[0](other, self)

    def store_last(self, *axes: int) -> QuantizedArray:
        """Return the same array with its codes stored with the given axes last, in this order; without axes, in order.

        Nothing but the layout of the codes in memory changes. An integer contraction of few rows is up to twice as fast
        on a CPU if the contracted axes of the weights are stored last.

        `jax.vmap`, `jax.lax.scan` and shardings count the dimensions of the stored codes. Map only the axes in front
        that have not moved. Before you map another one, call `store_last()`.

        Raises:
            TypeError: an axis is not an int.
            ValueError: an axis is out of range or occurs twice.
        """
        q = check_array(f"{_NAME}.store_last", "self", self, supports=FORMS)
        order = parts.move_axes_last(f"{_NAME}.store_last", "axes", axes, q.ndim)
        return q if order == q._order else q.replace(stored_order=order)

    def pack(self, dtype: Any = None) -> QuantizedArray:
        """Return the same array with its codes in uint32 words, in which codes of 2 to 6 bits take as many bits.

        They are packed along the last dimension of the stored codes; `store_last` chooses another axis. `codes` returns
        them unpacked, as before. int4 and other dtypes of less than a byte have a byte for each code on some backends,
        words do not. `quantize` packs codes of 3, 5 and 6 bits by itself. Integer zero points become int8 or uint8, and
        `unpack` returns them to the dtype of the codes.

        Args:
            dtype: Static. The format of the codes: "int3", "uint3", "int5", "uint5", "int6" or "uint6" for codes in
                int8 or uint8, which the format must hold. If they are traced, and it does not hold one of them, the
                scale becomes NaN. By default the dtype of the codes, which is int2, uint2, int4, uint4 or
                float4_e2m1fn, or of the indices into the codebook.

        Raises:
            TypeError: codes of this dtype cannot be packed as `dtype`.
            ValueError: the array has rank 0, or `dtype` does not hold all codes.

        Example:
            >>> import jax.numpy as jnp, jaxquant as jq
            >>> q = jq.quantize(jnp.linspace(-8.0, 7.0, 64), jq.QuantSpec("int4")).pack()
            >>> q.packing, q.stored_codes.shape, q.codes.dtype
            (Packing(format=dtype(int4), length=64), (8,), dtype(int4))
        """
        function = f"{_NAME}.pack"
        q = check_array(function, "self", self, supports=FORMS)
        checks.require(q.ndim > 0, function, "self", "rank 1 or more", "rank 0")
        if q.packing is not None:
            is_same = dtype is None or read_format(function, "dtype", dtype, parts.PACKED) == q.packing.format
            checks.require(is_same, function, "dtype", f"{q.packing.format}, as the codes are packed", dtype)
            return q
        own = np.dtype(q._stored.dtype)
        held: Any = own if dtype is None else read_format(function, "dtype", dtype, parts.PACKED)
        if dtype is None:
            allowed = tuple(d for d in parts.PACKED if isinstance(d, np.dtype))
            expected = f"codes of {dtypes.list_names(allowed)}, or dtype='int5', for example"
            checks.require_type(own in allowed, function, "self", expected, own)
        fits = tuple(d for d in parts.PACKED if getattr(d, "carrier", d) == own and (q.codebook is None or d == own))
        names = dtypes.list_names(fits) if fits else "None"
        expected = f"{names}, as the codes have the dtype {own}"
        checks.require_type(held in fits, function, "dtype", expected, held)
        if isinstance(held, dtypes.NarrowInteger):
            q = _check_bounds(function, q, held)
        return pack_checked(q, held)

    def unpack(self) -> QuantizedArray:
        """Return the same array with its codes in a dtype of their own, not in words; narrow integers in int8 or uint8.

        Raises:
            TypeError: a part is not an array or has an unsupported dtype.
            ValueError: the shapes of the parts do not fit each other.
        """
        return unpack_checked(check_array(f"{_NAME}.unpack", "self", self, supports=FORMS))

    def reshape(self, *shape: Any) -> QuantizedArray:
        """Return the same elements in another shape, in which elements that share an entry must still be neighbors.

        Raises:
            TypeError: a dimension is not an int.
            ValueError: the size differs, or no scale or zero point of the new rank can be shared by the same elements.
        """
        return indexing.reshape_array(check_lazy(f"{_NAME}.reshape", "self", self, supports=FORMS), shape)

    def per_index(self, *axes: int) -> QuantizedArray:
        """Return the same array with one entry of scale and zero point for each index of the given axes.

        Call this before `jax.vmap` or `jax.lax.scan` maps one of these axes, because they map every array of a pytree.

        Raises:
            TypeError: an axis is not an int.
            ValueError: an axis is out of range.
        """
        return indexing.per_index(check_lazy(f"{_NAME}.per_index", "self", self, supports=FORMS), axes)

    def transpose(self, *axes: Any) -> QuantizedArray:
        """Return the array with its dimensions in the given order, by default reversed.

        No code is moved: contractions, `jq.take`, indexing and `dequantize` read the codes where they are. They are
        transposed in memory where the result is taken apart as a pytree, such as by `jax.vmap` or as an argument of a
        jitted function, because these see the logical order. `q.T.store_last(0)` keeps them as they are there, too.

        Raises:
            TypeError: an axis is not an int.
            ValueError: the axes are not a permutation of the dimensions.
        """
        return indexing.transpose_array(check_lazy(f"{_NAME}.transpose", "self", self, supports=FORMS), axes)

    def swapaxes(self, axis1: int, axis2: int) -> QuantizedArray:
        """Return the array with two dimensions exchanged; see `transpose`.

        Raises:
            TypeError: an axis is not an int.
            ValueError: an axis is out of range.
        """
        function = f"{_NAME}.swapaxes"
        first, second = (
            checks.check_axis(function, axis, self.ndim, name) for name, axis in (("axis1", axis1), ("axis2", axis2))
        )
        order = list(range(self.ndim))
        order[first], order[second] = second, first
        return self.transpose(*order)

    @property
    def T(self) -> QuantizedArray:  # noqa: N802 numpy's name
        """The array with its dimensions reversed."""
        return self.transpose()

    @property
    def mT(self) -> QuantizedArray:  # noqa: N802 numpy's name
        """The array with its last two dimensions exchanged."""
        checks.require(self.ndim > 1, f"{_NAME}.mT", "self", "rank 2 or more", f"rank {self.ndim}")
        return self.transpose(*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)


# This lets `jax.export` save a program that takes or returns a QuantizedArray.
export.register_pytree_node_serialization(
    QuantizedArray,
    serialized_name="jaxquant.QuantizedArray",
    serialize_auxdata=lambda static: parts.encode_static(static).encode(),
    deserialize_auxdata=parts.decode_saved_program,
)


def _check_bounds(function: str, q: QuantizedArray, held: dtypes.NarrowInteger) -> QuantizedArray:
    """Raise if known codes are outside of the bounds of a format; if they are traced, make the scale NaN instead."""
    low, high = held.bounds
    is_outside = jnp.any((q._stored < low) | (q._stored > high))
    if not checks.is_traced(is_outside):
        expected = f"codes from {low} to {high}, which {held} holds"
        checks.require(not bool(is_outside), function, "self", expected, "others")
        return q
    return _mark_scale(q, is_outside)


def _mark_scale(q: QuantizedArray, is_wrong: jax.Array) -> QuantizedArray:
    """Return an array with a scale of NaN if `is_wrong`; all dtypes of a scale have a NaN."""
    if isinstance(q.scale, QuantizedArray):
        return q.replace(scale=_mark_scale(q.scale, is_wrong))
    return q.replace(scale=jnp.where(is_wrong, jnp.full_like(q.scale, np.nan), q.scale))


def _rebuild_array(static: tuple[Any, ...], children: tuple[Any, ...]) -> QuantizedArray:
    """Return the array that `__reduce__` described."""
    return QuantizedArray.tree_unflatten(static, children)


# What an array may have beside codes, a scale and a zero point. A function refuses parts that it does not support.
_FORMS = {
    "offset": ("offset", "None", "no offset"),
    "nested": ("scale", "an array of floats", "no scale or offset that is quantized itself"),
    "signed_scale": ("signed_scale", "False", "no scale that may be zero or negative"),
    "block_sizes": ("block_size", "an int or None", "no block sizes that differ by axis"),
    "permutation": ("permutation", "None", "no permutation"),
    "packing": ("packing", "None", "no packed codes"),
    "real_zero_point": ("zero_point", "None or integers", "no zero point that is a real number"),
    "inverse_scale": ("inverse_scale", "False", "no scale that codes are divided by"),
    "arithmetic": ("arithmetic", "float32", "no values that are computed in 16 bits"),
}
FORMS = tuple(_FORMS)


def list_forms(q: QuantizedArray) -> list[str]:
    """Return which of `FORMS` an array has."""
    static, forms = q._static, []
    if q.offset is not None:
        forms.append("offset")
    if isinstance(q.scale, QuantizedArray) or isinstance(q.offset, QuantizedArray):
        forms.append("nested")
    if static.signed_scale:
        forms.append("signed_scale")
    if isinstance(static.block_size, tuple):
        forms.append("block_sizes")
    if q.permutation is not None or static.permuted_axis is not None:
        forms.append("permutation")
    if static.packing is not None:
        forms.append("packing")
    if q.zero_point is not None and q.zero_point.dtype in dtypes.FLOATS:
        forms.append("real_zero_point")
    if static.inverse_scale:
        forms.append("inverse_scale")
    if static.arithmetic is not None:
        forms.append("arithmetic")
    return forms


def check_form(function: str, argument: str, q: QuantizedArray, supports: Sequence[str] = ()) -> None:
    """Raise if an array has a form that a function does not support.

    Args:
        function: the public function that errors name.
        argument: the argument that errors name.
        q: the array.
        supports: the entries of `FORMS` that the function supports.
    """
    for form in list_forms(q):
        if form not in supports:
            name, expected, reason = _FORMS[form]
            if form == "nested" and not isinstance(q.scale, QuantizedArray):
                name, expected = "offset", "None or an array of floats"
            advice = "unpack" if form == "packing" else "dequantize"
            expected = f"{expected}, because it supports {reason}, or {argument}.{advice}()"
            checks.refuse(function, f"{argument}.{name}", expected, repr(q))


def check_array(
    function: str, argument: str, q: object, *, supports: Sequence[str] = (), is_awaited: bool = False
) -> QuantizedArray:
    """Check that q is a QuantizedArray and that its parts are arrays that fit each other; return it with JAX arrays.

    The elements of the scale are checked if they are known. Those on an accelerator count as known only if `is_awaited`
    is True, because reading them means to wait for it. The result has the stored order of its codes in memory, also
    where it comes from a transpose that nothing has needed yet.

    Codes are unpacked if "packing" is not among `supports`. An array with another form that is not is refused: see
    `check_form`.
    """
    q = check_lazy(function, argument, q, supports=supports, is_awaited=is_awaited)
    if not q._is_lazy:
        return q
    stored = q._with_stored(q._stored, q._order)
    object.__setattr__(stored, "_is_view", q._is_view)
    object.__setattr__(stored, "_is_checked", True)
    return stored


def check_lazy(
    function: str, argument: str, q: object, *, supports: Sequence[str] = (), is_awaited: bool = False
) -> QuantizedArray:
    """Return what `check_array` returns, but with a transpose that nothing has needed yet still as such."""
    if not isinstance(q, QuantizedArray):
        q = entry_point.unwrap_array(q)  # a flax.nnx.Param, for example
        if not isinstance(q, QuantizedArray):
            checks.refuse_type(function, argument, "a QuantizedArray", checks.describe_value(q))
    # Nothing in it can change, so the weights of a model are not checked again in each eager call.
    if not q._is_checked or is_awaited:
        q = _check_children(function, argument, q, is_awaited=is_awaited)
    if q.packing is not None and "packing" not in supports:
        q = unpack_checked(q)
    check_form(function, argument, q, supports)
    return q


def unpack_checked(q: QuantizedArray) -> QuantizedArray:
    """Return an array with its codes unpacked; it has been checked."""
    if q.packing is None:
        return q
    codes = parts.unpack_codes(q._stored, q.packing)
    zero_point = None if q.zero_point is None else parts.narrow_zero_point(q.zero_point, codes.dtype)
    children = q._parts._replace(codes=codes, zero_point=zero_point)
    new = QuantizedArray.tree_unflatten(q._static._replace(packing=None), children)
    object.__setattr__(new, "_is_checked", True)
    return new


def pack_checked(q: QuantizedArray, held: np.dtype | dtypes.NarrowInteger) -> QuantizedArray:
    """Return an array with its codes packed as a format packs them, which holds all of them; it has been checked."""
    packing = parts.Packing(held, q._stored.shape[-1])
    zero_point = q.zero_point
    if zero_point is not None and zero_point.dtype in dtypes.INTEGERS:
        # A loop over layers would convert those of all layers in each turn if they had less than 8 bits.
        zero_point = zero_point.astype(parts.widen_zero_point(packing.carrier))
    children = q._parts._replace(codes=parts.pack_codes(q._stored, packing), zero_point=zero_point)
    new = QuantizedArray.tree_unflatten(q._static._replace(packing=packing), children)
    object.__setattr__(new, "_is_checked", True)
    return new


def _check_children(function: str, argument: str, q: QuantizedArray, *, is_awaited: bool) -> QuantizedArray:
    children, static = q._parts, q._static
    supports = [form for form in FORMS if form not in ("nested", "permutation")]  # of a scale that is quantized itself
    nested = {
        name: check_array(function, f"{argument}.{name}", part, supports=supports, is_awaited=is_awaited)
        for name, part in (("scale", q.scale), ("offset", q.offset))
        if isinstance(part, QuantizedArray)
    }
    types = {name: parts.Nested(dtypes.FLOAT32, part.shape) for name, part in nested.items()}
    checked = parts.check_parts(function, argument, children._replace(**types), static, is_awaited=is_awaited)
    checked = checked._replace(**nested)
    if "scale" in nested and not static.signed_scale:
        _check_nested_scale(function, f"{argument}.scale", nested["scale"], is_awaited=is_awaited)
    # In the usual case nothing was converted: return the same object.
    if any(new is not old for new, old in zip(checked, children, strict=True)):
        is_lazy, is_view, q = q._is_lazy, q._is_view, QuantizedArray.tree_unflatten(static, checked)
        object.__setattr__(q, "_is_lazy", is_lazy)
        object.__setattr__(q, "_is_view", is_view)
    object.__setattr__(q, "_is_checked", True)
    return q


def _check_nested_scale(function: str, argument: str, q: QuantizedArray, *, is_awaited: bool) -> None:
    """Raise if a known element of a scale that is quantized itself is not positive."""
    leaves = jax.tree.leaves(q)
    # Like any scale, it is not read if it is long or traced, or on an accelerator.
    if any(entry_point.read_elements(leaf, is_awaited=is_awaited) is None for leaf in leaves):
        return
    with jax.ensure_compile_time_eval():
        scale = dequantize_checked(q.astype(dtypes.FLOAT32))
    entry_point.check_positive_scale(function, argument, scale, allow_overflow=True, is_awaited=is_awaited)


def _describe_nested(q: QuantizedArray) -> parts.Nested:
    """Return the shape of a nested scale, and a name for its dtype, "codes*scale"."""
    try:
        static = q._static
        name = static.codebook or (static.packing.format if static.packing else q._stored.dtype)
        return parts.Nested(f"{name}*{q.scale.dtype}", q.shape)  # type: ignore
    except AttributeError:  # JAX prints trees of objects that are not arrays
        return q  # type: ignore


def read_entries(part: Any) -> Any:
    """Return a scale or an offset as an array of floats, or None for None; one that is quantized in float32."""
    if not isinstance(part, QuantizedArray):
        return part
    return dequantize_checked(part if part.dtype == dtypes.FLOAT32 else part.replace(dtype=dtypes.FLOAT32))


def dequantize_checked(q: QuantizedArray, use: Use = "any") -> jax.Array:
    """Return the floats that q represents; q has been checked. `use` is as in `dequantize_affine`."""
    children = q._parts
    if isinstance(q.scale, QuantizedArray) or isinstance(q.offset, QuantizedArray):
        children = children._replace(scale=read_entries(q.scale), offset=read_entries(q.offset))
    return parts.dequantize_parts(children, static=q._static, use=use)
