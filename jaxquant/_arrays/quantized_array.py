"""The one array type: codes with their scale and zero point, a pytree that goes wherever arrays go."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import DTypeLike

from .._core import barriers, checks, dtypes, entry_point, granularity, known_values, rounding, small_floats
from .._core.affine import dequantize_affine
from . import indexing, serialization
from .codebook import Codebook
from .refused_operators import RefusedOperators

_NAME = "QuantizedArray"
_SCALES = (*dtypes.FLOATS, dtypes.E8M0)


@jax.tree_util.register_pytree_with_keys_class
class QuantizedArray(RefusedOperators):
    """Codes, and what they stand for: x = (codes - zero_point) * scale.

    A pytree of up to three arrays. It stores no granularity: the shapes say it, and say it still after `jax.vmap`, a
    slice or a transpose. `scale` and `zero_point` have the rank of `codes`; each of their dimensions is 1 (shared),
    that of `codes` (an entry per index), or counts blocks. They may differ from each other.

    `jax.vmap` and `jax.lax.scan` map every part of it: an axis to map must be there in the scale too, among the axes
    that `PerAxis` keeps, or by `per_index(axis)`. `concatenate` joins arrays; `jnp.concatenate` of their parts leaves
    scales that are read as equally long blocks, which they may not be, and no check can tell.

    The constructor checks nothing but that `dtype` names one, for JAX builds pytrees of things that are no arrays;
    every method and function that is given one does. A known scale must be positive; one of NaN or infinity, which
    `quantize` gives data that hold such, shows in every result. It is immutable, and it is no `jax.Array`: what would
    need its values as floats asks for `dequantize()`, and nothing calls that for you.

    Attributes:
        codes: the integers, int2 to uint16, float8 or float4_e2m1fn; under a code book its indices.
        scale: value per step, float32, float16, bfloat16 or float8_e8m0fnu.
        zero_point: steps, in the dtype of `codes`, or None for 0.
        dtype: Static. What `dequantize` returns: float32, float16 or bfloat16. By default the dtype of the scale.
        block_size: Static. How many indices share an entry of a dimension that counts blocks. None where there are
            none, or where they divide the dimension. It is stored because the shapes do not tell the length of a
            block whose last one is short.
        codebook: Static. What the codes are indices of, or None.

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

    __slots__ = ("_block_size", "_checked", "_codebook", "_dtype", "codes", "scale", "zero_point")

    codes: Any
    scale: Any
    zero_point: Any

    def __init__(
        self,
        codes: Any,
        scale: Any,
        zero_point: Any = None,
        *,
        dtype: DTypeLike | None = None,
        block_size: int | None = None,
        codebook: Codebook | None = None,
    ) -> None:
        found: Any = getattr(scale, "dtype", None)
        if dtype is not None:
            found = _check_dtype(dtype)
        elif found in (dtypes.E8M0, np.dtype(np.float64)):  # numpy's word for a float, which JAX makes a float32
            found = dtypes.FLOAT32
        self._fill(codes, scale, zero_point, found, block_size, codebook)

    def _fill(self, codes: Any, scale: Any, zero_point: Any, dtype: Any, block_size: Any, codebook: Any) -> None:
        parts = {"codes": codes, "scale": scale, "zero_point": zero_point, "_checked": False}
        parts |= {"_dtype": dtype, "_block_size": block_size, "_codebook": codebook}
        for name, value in parts.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"jaxquant.{_NAME}: {name}: it is immutable; use replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"jaxquant.{_NAME}: {name}: it is immutable")

    # A pytree.

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the arrays, and what is static."""
        return (self.codes, self.scale, self.zero_point), (self._dtype, self._block_size, self._codebook)

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        """Returns the arrays under their names, and what is static."""
        children, static = self.tree_flatten()
        keys = (jax.tree_util.GetAttrKey(name) for name in ("codes", "scale", "zero_point"))
        return tuple(zip(keys, children, strict=True)), static

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], children: tuple[Any, ...]) -> QuantizedArray:
        """Returns what `tree_flatten` was given, whatever the children are by now."""
        new = object.__new__(cls)
        new._fill(*children, *static)
        return new

    def __reduce__(self) -> Any:
        """Pickles and copies by the parts."""
        children, static = self.tree_flatten()
        return _rebuild, (static, children)

    def replace(self, **changes: Any) -> QuantizedArray:
        """Returns the same with other `codes`, `scale`, `zero_point`, `dtype`, `block_size` or `codebook`."""
        parts = {
            "codes": self.codes, "scale": self.scale, "zero_point": self.zero_point, "dtype": self._dtype,
            "block_size": self._block_size, "codebook": self._codebook,
        }  # fmt: skip
        for name in changes:
            checks.require(name in parts, f"{_NAME}.replace", name, f"one of {', '.join(parts)}", "it is none")
        return QuantizedArray(**{**parts, **changes})

    # What an array tells of itself.

    @property
    def dtype(self) -> Any:
        """What `dequantize` returns."""
        return self._dtype

    @property
    def block_size(self) -> int | None:
        """The indices that share an entry of a dimension that counts blocks."""
        return self._block_size

    @property
    def codebook(self) -> Codebook | None:
        """What the codes are indices of."""
        return self._codebook

    @property
    def values(self) -> Any:
        """The same as `codes`."""
        return self.codes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `codes`."""
        return tuple(jnp.shape(self.codes))

    @property
    def ndim(self) -> int:
        """The rank of `codes`."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the codes, the scale and the zero point as they are stored: 4 bits take half a byte, 2 bits a
        quarter. On a CPU jax 0.10 holds a byte for each of them while a program runs.
        """
        return sum(count_stored_bytes(part) for part in (self.codes, self.scale, self.zero_point) if part is not None)

    def __len__(self) -> int:
        """Returns the length of the first dimension."""
        checks.require_type(self.ndim > 0, f"{_NAME}.__len__", "self", "rank 1 or more", "rank 0")
        return self.shape[0]

    def __iter__(self) -> Iterator[QuantizedArray]:
        """Yields the slices along the first dimension."""
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        """Refuses: a truth value would need the values as floats."""
        text = "q.dequantize() for a truth value"
        raise TypeError(checks.format_message(f"{_NAME}.__bool__", "self", text, repr(self)))

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Refuses: numpy would get floats that nobody asked for."""
        raise TypeError(checks.format_message(f"{_NAME}.__array__", "self", "q.dequantize(), or q.codes", repr(self)))

    def __repr__(self) -> str:
        """Returns dtypes and shapes, not numbers; of a pytree of other things, those."""
        parts: tuple[Any, Any, Any] = (self.codes, self.scale, self.zero_point)
        is_whole = self.codes is not None and self.scale is not None
        if not is_whole or not all(part is None or hasattr(part, "dtype") for part in parts):
            return f"{_NAME}(codes={self.codes!r}, scale={self.scale!r}, zero_point={self.zero_point!r})"
        codes = _describe_part(parts[0])
        if self._codebook is not None:
            codes = codes.replace(str(parts[0].dtype), self._codebook.name)
        blocks = f", block_size={self._block_size}" if self._block_size else ""
        point = "None" if parts[2] is None else _describe_part(parts[2])
        rest = (
            f"scale={_describe_part(self.scale)}, zero_point={point}{blocks}, dtype={self._dtype}, nbytes={self.nbytes}"
        )
        return f"{_NAME}({codes}, {rest})"

    # What an array is turned into.

    def dequantize(self) -> jax.Array:
        """Returns (codes - zero_point) * scale, in `dtype`: bit for bit what `dequantize_linear` returns.

        The product is taken in float32 and rounded to `dtype` once. Under a code book the entry of a code takes the
        place of `codes - zero_point`.

        Raises:
            TypeError, ValueError: the parts do not fit each other.
        """
        q = check_array(f"{_NAME}.dequantize", "self", self)
        return dequantize_checked(q)

    def astype(self, dtype: DTypeLike) -> QuantizedArray:
        """Returns the same codes with another `dtype` for `dequantize` to return: float32, float16 or bfloat16."""
        return self.replace(dtype=checks.check_dtype(f"{_NAME}.astype", "dtype", dtype, dtypes.FLOATS))

    def __getitem__(self, index: Any) -> QuantizedArray:
        """Returns what numpy's indexing picks, with the entries of scale and zero point that belong to it.

        A slice that cuts through blocks gets an entry per index. An int out of range is an IndexError; of an array,
        which may be traced, an index out of range takes the nearest element, as in `jax.numpy`. `take` can return NaN.

        Raises:
            TypeError, ValueError, IndexError: it is no index of this array, or int32 does not hold it.
        """
        return indexing.index_array(check_array(f"{_NAME}.__getitem__", "self", self), index)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
        """Takes numpy's `@`, and refuses all else that numpy would do with floats."""
        if ufunc is np.matmul and method == "__call__" and not keywords:
            from .._contractions.dot import matmul

            return matmul(*inputs)
        text = checks.format_message(_NAME, "self", f"q.dequantize() for numpy's {ufunc.__name__}", repr(self))
        raise TypeError(text)

    def __matmul__(self, other: Any) -> jax.Array:
        """Returns `matmul(self, other)`."""
        from .._contractions.dot import matmul  # the contractions import this module

        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> jax.Array:
        """Returns `matmul(other, self)`."""
        from .._contractions.dot import matmul

        return matmul(other, self)

    def reshape(self, *shape: Any) -> QuantizedArray:
        """Returns the same elements in another shape, whose dimensions must leave those that share an entry together.

        Raises:
            ValueError: the scale or the zero point has no shape that goes with the new one.
        """
        return indexing.reshape_array(check_array(f"{_NAME}.reshape", "self", self), shape)

    def per_index(self, *axes: int) -> QuantizedArray:
        """Returns the same with an entry of scale and zero point for each index of the given axes.

        `jax.vmap` and `jax.lax.scan` map every array of a pytree: an axis to map must be there in all of them.
        """
        return indexing.per_index(check_array(f"{_NAME}.per_index", "self", self), axes)

    def transpose(self, *axes: Any) -> QuantizedArray:
        """Returns the array with its dimensions in another order; reversed where none is given."""
        q = check_array(f"{_NAME}.transpose", "self", self)
        return indexing.transpose_array(q, axes)

    @property
    def T(self) -> QuantizedArray:  # noqa: N802 as numpy has it
        """The array with its dimensions reversed."""
        return self.transpose()

    @property
    def mT(self) -> QuantizedArray:  # noqa: N802 as numpy has it
        """The array with its last two dimensions exchanged."""
        checks.require(self.ndim > 1, f"{_NAME}.mT", "self", "rank 2 or more", f"rank {self.ndim}")
        return self.transpose(*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)


# A program that takes or returns one can be saved by jax.export.
export.register_pytree_node_serialization(
    QuantizedArray,
    serialized_name="jaxquant.QuantizedArray",
    serialize_auxdata=lambda static: serialization.encode_static(static).encode(),
    deserialize_auxdata=serialization.decode_saved_program,
)


def _rebuild(static: tuple[Any, ...], children: tuple[Any, ...]) -> QuantizedArray:
    return QuantizedArray.tree_unflatten(static, children)


def _check_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype that `dtype` names; which one it may be the functions say that are given the array."""
    try:
        return np.dtype(dtype)
    except (TypeError, ValueError):
        return checks.check_dtype(_NAME, "dtype", dtype, dtypes.FLOATS)  # which says what it may be


def _describe_part(part: Any) -> str:
    return f"{part.dtype}[{','.join(map(str, part.shape))}]"


def count_stored_bytes(part: Any) -> int:
    """Returns the bytes of an array whose elements are packed: 4 bits take half a byte, 2 bits a quarter."""
    dtype = np.dtype(part.dtype)
    return -(-math.prod(part.shape) * dtypes.find_width(dtype) // 8)


def check_array(function: str, argument: str, q: Any) -> QuantizedArray:
    """Requires a QuantizedArray whose parts are arrays that fit each other; returns it with JAX's arrays."""
    if not isinstance(q, QuantizedArray) and hasattr(q, "__jax_array__"):
        q = q.__jax_array__()  # a flax.nnx.Param, for one
    if not isinstance(q, QuantizedArray):
        checks.require_type(False, function, argument, "a QuantizedArray", checks.describe_value(q))
    if q._checked:
        return q
    _check_static(function, argument, q)
    given = (q.codes, q.scale, q.zero_point)
    names = (f"{argument}.codes", f"{argument}.scale", f"{argument}.zero_point")
    for name, part in zip(names, given, strict=True):
        if isinstance(part, float):  # of no rank
            checks.check_array(function, name, part, ())
    codes, scale, zero_point = entry_point.convert_arrays(function, dict(zip(names, given, strict=True)))
    allowed = dtypes.QUANTIZED if q.codebook is None else (q.codebook.carrier,)
    checks.check_array(function, f"{argument}.codes", codes, allowed)
    checks.check_array(function, f"{argument}.scale", scale, _SCALES)
    checks.check_dtype(function, f"{argument}.dtype", q.dtype, dtypes.FLOATS)
    _check_aligned(function, f"{argument}.scale", scale, codes, q.block_size)
    if zero_point is not None:
        if codes.dtype not in dtypes.INTEGERS or q.codebook is not None:
            expected = f"None: {q.codebook or codes.dtype} has no zero point"
            checks.require(False, function, f"{argument}.zero_point", expected, checks.describe_value(zero_point))
        checks.check_same_dtype(function, f"{argument}.zero_point", zero_point, codes.dtype, "that of the codes")
        _check_aligned(function, f"{argument}.zero_point", zero_point, codes, q.block_size)
    # `quantize` gives data with a NaN or an infinity such a scale, which shows in every result.
    known_values.check_positive(function, f"{argument}.scale", scale, allow_overflow=True, is_awaited=True)
    if any(a is not b for a, b in zip(given, (codes, scale, zero_point), strict=True)):
        q = q.replace(codes=codes, scale=scale, zero_point=zero_point)
    object.__setattr__(q, "_checked", True)
    return q


def _check_static(function: str, argument: str, q: QuantizedArray) -> None:
    if q.block_size is not None:
        checks.check_integer(function, f"{argument}.block_size", q.block_size)
        checks.require(q.block_size > 0, function, f"{argument}.block_size", "a positive int", q.block_size)
    is_book = q.codebook is None or isinstance(q.codebook, Codebook)
    checks.require_type(is_book, function, f"{argument}.codebook", "a Codebook or None", q.codebook)


def mark_checked(q: QuantizedArray) -> QuantizedArray:
    """Returns a QuantizedArray that was made here, of parts that fit, marked so that it is not checked again."""
    object.__setattr__(q, "_checked", True)
    return q


def _check_aligned(function: str, argument: str, part: Any, codes: Any, block_size: int | None) -> None:
    if granularity.Aligned(block_size).sizes(part.shape, codes.shape) is None:
        blocks = "blocks that divide it" if block_size is None else f"blocks of {block_size}"
        expected = f"the rank of the codes, {codes.shape}, each dimension 1, theirs, or their number of {blocks}"
        checks.require(False, function, argument, expected, f"shape {part.shape}")


def dequantize_checked(q: QuantizedArray) -> jax.Array:
    """Returns what the codes stand for; q has passed its contract."""
    return _dequantize_parts(
        q.codes, q.scale, q.zero_point, dtype=q.dtype, block_size=q.block_size, codebook=q.codebook
    )


@functools.partial(jax.jit, inline=True, static_argnames=("dtype", "block_size", "codebook"))
def _dequantize_parts(
    codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None, *, dtype: Any, block_size: Any, codebook: Any
) -> jax.Array:
    aligned = granularity.Aligned(block_size)
    if codebook is None:
        return dequantize_affine(codes, scale, zero_point, aligned, dtype)
    wide = small_floats.scale_as_float32(scale)
    product = barriers.round_result(codebook.decode(codes) * aligned.expand(wide, codes))
    return rounding.round_to_dtype(product, dtype).astype(dtype)
