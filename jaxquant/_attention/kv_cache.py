"""`KVCache`: the quantized keys and values of a decoder."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from .._arrays.quantize import quantize
from .._arrays.quantized_array import QuantizedArray, dequantize_checked
from .._arrays.saved_programs import decode_spec, encode_spec, register_tree
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, entry_point, sharding
from .._core.granularity import Blocked, PerToken
from .._kernels.barriers import choose_on_cpu, round_result
from .scores_and_values import count_rotated, rotate_back, rotate_tokens

_CREATE, _APPEND, _CHECK, _FIND, _TAKE, _DEQUANTIZE = (
    f"KVCache.{name}" for name in ("create", "append", "check", "find_smoothing", "take_layer", "dequantize")
)
_TINY = np.finfo(np.float32).tiny
INT8 = QuantSpec(jnp.int8, PerToken())
_DTYPES = (np.dtype(jnp.int8), np.dtype(jnp.int4))
_SCALES = dtypes.FLOATS
# The axis of the features, which is packed, and the axis of the tokens, in the codes of keys and of values. Keys are
# contracted along their features and values along their tokens. With few rows, XLA:CPU reads
# an operand fastest if its contracted dimension is the last.
KEY_AXES = (3, 2)
VALUE_AXES = (2, 3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KVCache:
    """The keys and values of a decoder as codes of 8 or 4 bits, with a scale for each token and head, or block of it.

    A cache is a pytree: an argument, a result or the carry of a loop. It is immutable, so `append` returns a new one. A
    jitted function that donates the cache, and the body of `jax.lax.scan`, write the new tokens in place.

    `create` makes an empty cache, and checks its arguments. The constructor checks nothing, because JAX also builds
    pytrees of objects that are not arrays.

    A cache of `length` tokens that gets more of them overflows. If that is known, `append` raises an error. Under
    `jax.jit` it is not: then `index` counts on, `overflowed` is True, and `jq.attention` returns NaN for the rows that
    overflowed. Nothing is lost without a trace. A cache with a `window` cannot overflow: it is a ring, and
    the newest token takes the slot of the oldest.

    A loop over the layers of a decoder carries a stack of their caches, whose arrays have a dimension of layers before
    the others: `jax.tree.map(lambda *parts: jnp.stack(parts), *caches)`. `append` then takes the layer, and writes the
    tokens where they are in the stack. `take_layer` returns the cache of one layer, for `jq.attention` and
    `dequantize`.

    Attributes:
        keys: the codes of the keys, [batch, kv_heads, length, head_dim] of int8; or, for int4, uint8 with half the
            features: byte i holds feature i in its low bits, and feature i + ceil(head_dim / 2) in its high bits. With
            blocks of features each block is stored as a head of its own: block j of head i is head i * blocks + j, with
            the features of the block in place of head_dim. For int4 half of the blocks are stored, if their number is
            even: these have feature i + head_dim / 2 in their high bits, too.
        values: the codes of the values, [batch, kv_heads, head_dim, length] of int8; or, for int4, uint8 with half the
            features, packed in the same way, and with blocks stored in the same way. A contraction with few rows reads
            codes fastest if the contracted dimension is the last one, for keys the features and for values the tokens.
        key_scale: the value of a step of each token and head, [batch, kv_heads, length], or [batch, kv_heads * blocks,
            length], in the scale_dtype of spec_k.
        value_scale: the same of the values.
        index: the number of tokens that were appended, int32: one for all rows, or [batch].
        spec_k: Static. How keys are quantized.
        spec_v: Static. How values are quantized.
        head_dim: Static. The number of features of a token and head.
        window: Static. The number of tokens that a query attends to, itself included; None for all.
        rotate: Static. Whether keys are rotated before they are quantized.
        mean_key: what is subtracted from keys before they are quantized, float32 [batch, kv_heads, head_dim], or None.
        smoothing: powers of 2, by which the features of keys are divided before they are rotated and quantized, and
            those of queries multiplied, in the same shape, or None.
        rotate_values: Static. Whether values are rotated before they are quantized.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> cache = jq.KVCache.create((1, 4, 2, 64))
        >>> k = v = jnp.ones((1, 1, 2, 64))
        >>> cache = jax.jit(jq.KVCache.append, donate_argnums=0)(cache, k, v)
        >>> cache
        KVCache(keys=int8[1,2,4,64], values=int8[1,2,64,4], key_scale=float32[1,2,4], value_scale=float32[1,2,4],
                index=int32[], head_dim=64)
        >>> cache.length, int(cache.index), cache.nbytes / (2 * 4 * 2 * 64 * 4)  # of the bytes of float32
        (4, 1, 0.265625)
        >>> cache.keys[0, 0, :2, :3]
        Array([[127, 127, 127],
               [  0,   0,   0]], dtype=int8)
    """

    keys: Any
    values: Any
    key_scale: Any
    value_scale: Any
    index: Any
    spec_k: QuantSpec = dataclasses.field(default=INT8, metadata={"static": True})
    spec_v: QuantSpec = dataclasses.field(default=INT8, metadata={"static": True})
    head_dim: int = dataclasses.field(default=0, metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    rotate: bool = dataclasses.field(default=False, metadata={"static": True})
    mean_key: Any = None
    smoothing: Any = None
    rotate_values: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def create(
        cls,
        shape: tuple[int, int, int, int],
        spec_k: QuantSpec = INT8,
        spec_v: QuantSpec = INT8,
        *,
        window: int | None = None,
        per_row: bool = False,
        rotate: bool = False,
        rotate_values: bool = False,
        mean_key: ArrayLike | None = None,
        smoothing: ArrayLike | None = None,
    ) -> KVCache:
        """Return an empty cache.

        Args:
            shape: Static. (batch, length, kv_heads, head_dim): the shape of the keys, with the number of tokens that
                the cache holds.
            spec_k: Static. How keys are quantized: int8 or int4, symmetric, with the granularity `PerToken()`, that is
                a scale for each token and head, or `Blocked(-1, size)`, a scale for each block of features, whose size
                divides head_dim. The scales are stored in its scale_dtype: float32, or float16 or bfloat16, which take
                half the bytes and make a step up to 2**-10 or 2**-7 longer, because a scale is rounded up.
            spec_v: Static. How values are quantized, as for keys.
            window: Static. The number of tokens that a query attends to, itself included. The cache is then a ring, and
                `length` must be at least the window. A call of `attention` takes at most length - window + 1 queries,
                so that the ring holds their windows as a whole. None keeps all tokens.
            per_row: Static. Whether each row of the batch has its own index, for prompts of different lengths.
            rotate: Static. Whether keys, and the queries that attend to them, are multiplied by the same Hadamard
                matrix before they are quantized. It spreads a feature with large values over all features of a head,
                or, if head_dim is no power of 2, over runs of the largest power of 2 that divides it. The scores are
                the same, except for rounding.
            rotate_values: Static. Whether values are multiplied by that matrix before they are quantized, and the
                results of attention by its inverse. The results are the same, except for rounding.
            mean_key: a key that is subtracted from all keys before they are quantized, float [kv_heads, head_dim] or
                [batch, kv_heads, head_dim]: their mean, as `find_smoothing` finds it. It stays the same for all tokens
                of a cache. All scores of a query change by the same number, on which the softmax does not depend, so
                that another key has the same results, except for rounding. None subtracts nothing.
            smoothing: positive numbers of such a shape, by which the features of keys are divided and those of queries
                multiplied before they are rotated and quantized. They are rounded to powers of 2, so that the products
                are exact. None stands for 1.

        Raises:
            TypeError: the shape is not a tuple of four ints; a spec is not a QuantSpec, or has another dtype or
                scale_dtype; the window is not an int; per_row, rotate or rotate_values is not a bool; or mean_key or
                smoothing is not float.
            ValueError: a dimension is negative, a spec has another granularity or is asymmetric, the size of a block
                does not divide head_dim, the window is not within 1 and the length, an odd head_dim is to be rotated,
                or mean_key or smoothing has another shape; or a known number of smoothing is not positive.
        """
        sizes = _read_shape(shape)
        batch, length, heads, features = sizes
        for argument, spec in (("spec_k", spec_k), ("spec_v", spec_v)):
            _check_spec(argument, spec, features)
        checks.check_flag(_CREATE, "per_row", per_row)
        expected = f"False, because a head of {features} features has no pairs that a rotation could mix"
        for argument, is_rotated in (("rotate", rotate), ("rotate_values", rotate_values)):
            checks.check_flag(_CREATE, argument, is_rotated)
            checks.require(not is_rotated or count_rotated(features) > 1, _CREATE, argument, expected, is_rotated)
        arrays = _read_features({"mean_key": mean_key, "smoothing": smoothing}, (batch, heads, features))
        if window is not None:
            checks.check_integer(_CREATE, "window", window)
            expected = f"an int in [1, {length}], the length of the cache, or None"
            checks.require(1 <= window <= length, _CREATE, "window", expected, window)
        key_blocks, value_blocks = (count_blocks(spec, features) for spec in (spec_k, spec_v))
        (key_heads, keys), (value_heads, values) = (_count_stored(spec, features) for spec in (spec_k, spec_v))
        return cls(
            jnp.zeros((batch, heads * key_heads, length, keys), _derive_stored_dtype(spec_k)),
            jnp.zeros((batch, heads * value_heads, values, length), _derive_stored_dtype(spec_v)),
            jnp.zeros((batch, heads * key_blocks, length), spec_k.scale_dtype),
            jnp.zeros((batch, heads * value_blocks, length), spec_v.scale_dtype),
            jnp.zeros((batch,) if per_row else (), jnp.int32),
            spec_k, spec_v, features, None if window is None else int(window), bool(rotate), *arrays,
            rotate_values=bool(rotate_values),
        )  # fmt: skip

    @staticmethod
    def find_smoothing(q: ArrayLike, k: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """Return the mean key and the smoothing, the arguments of `create`, that suit some queries and keys.

        smoothing = sqrt(standard deviation of the keys / root mean square of the queries that read them), per feature

        Of all factors these make the expected error of a score smallest, if keys are rotated. Features that hardly vary
        count as if they varied by 1/64 of the average of their head.

        Args:
            q: queries, float [batch, queries, heads, head_dim], after all that the model does to them before attention.
            k: the keys of a prompt or of calibration, float [batch, tokens, kv_heads, head_dim].

        Returns:
            The mean key and the smoothing, float32 [kv_heads, head_dim].

        Raises:
            TypeError: an array is not float32, float16 or bfloat16.
            ValueError: a shape does not fit, or there is no token.

        Example:
            >>> import jax, jax.numpy as jnp, jaxquant as jq
            >>> k = jax.random.normal(jax.random.key(0), (1, 100, 1, 4)) * jnp.array([[[[16.0, 1.0, 1.0, 1.0]]]])
            >>> mean_key, smoothing = jq.KVCache.find_smoothing(jnp.ones((1, 100, 2, 4)), k + 3.0)
            >>> cache = jq.KVCache.create((1, 100, 1, 4), rotate=True, mean_key=mean_key, smoothing=smoothing)
            >>> cache.smoothing
            Array([[[4., 1., 1., 1.]]], dtype=float32)
        """
        arrays = entry_point.convert_arrays(_FIND, {"q": entry_point.unwrap_array(q), "k": entry_point.unwrap_array(k)})
        queries, keys = (_check_samples(name, x) for name, x in zip("qk", arrays, strict=True))
        batch, _, heads, features = keys.shape
        fits = (queries.shape[0], queries.shape[3]) == (batch, features) and queries.shape[2] % heads == 0
        expected = f"shape ({batch}, queries, a multiple of {heads}, {features}), because of k"
        checks.require(fits, _FIND, "q", expected, f"shape {queries.shape}")
        mean = jnp.mean(keys, axis=(0, 1), keepdims=True)
        queries = queries.reshape(*queries.shape[:2], heads, -1, features)
        spreads = (jnp.mean(jnp.square(keys - mean), axis=(0, 1)), jnp.mean(jnp.square(queries), axis=(0, 1, 3)))
        least = np.float32(2.0**-12)
        k_spread, q_spread = (jnp.maximum(x, least * jnp.mean(x, -1, keepdims=True) + _TINY) for x in spreads)
        return mean[0, 0], jnp.sqrt(jnp.sqrt(k_spread / q_spread))

    def __repr__(self) -> str:
        """Return the dtypes and shapes of the arrays, without their elements, and the static attributes."""
        texts = []
        names = ("keys", "values", "key_scale", "value_scale", "index")
        for name in (*names, *(name for name in ("mean_key", "smoothing") if getattr(self, name) is not None)):
            leaf = getattr(self, name)
            # JAX builds pytrees with leaves that are no arrays.
            is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
            texts.append(f"{name}={leaf.dtype}[{','.join(map(str, leaf.shape))}]" if is_array else f"{name}={leaf!r}")
        texts += [f"head_dim={self.head_dim}"] + ([] if self.window is None else [f"window={self.window}"])
        texts += [f"{name}=True" for name in ("rotate", "rotate_values") if getattr(self, name)]
        return f"KVCache({', '.join(texts)})"

    def append(
        self, k: ArrayLike, v: ArrayLike, lengths: ArrayLike | None = None, *, layer: ArrayLike | None = None
    ) -> KVCache:
        """Return a cache with further tokens after the ones that it holds.

        Args:
            k: the keys, float [batch, tokens, kv_heads, head_dim].
            v: the values, in the same shape.
            lengths: the number of tokens of each row that count, int32 [batch], for rows of different lengths; the
                others are not stored. It requires `per_row`. None counts all. The queries of such a call need
                `query_positions`: the index before the call, plus 0, 1, ...
            layer: the layer of a stack of caches to which the tokens are appended, an int or an integer scalar. If it
                is traced, one that the stack does not have stands for the nearest. None for a cache that is no stack.

        Returns:
            A cache with the index increased by the number of tokens; or a stack in which that is so for the layer.

        Raises:
            TypeError: k or v is not float32, float16 or bfloat16, lengths is not int32, or the layer is no integer.
            ValueError: a shape does not fit the cache; `lengths` is given although all rows share an index; an explicit
                mesh axis cuts the tokens of the cache; the cache is known to overflow, because the index is not
                traced or there are more tokens than the cache holds, and it has no window; a stack is given and no
                layer, or a layer and no stack; or the stack is known not to have the layer.

        Example:
            >>> import jax, jax.numpy as jnp, jaxquant as jq
            >>> stack = jax.vmap(lambda _: jq.KVCache.create((1, 4, 2, 64)))(jnp.arange(3))
            >>> k = v = jnp.ones((1, 1, 2, 64))
            >>> stack = jax.jit(jq.KVCache.append, donate_argnums=0)(stack, k, v, layer=1)
            >>> stack.keys.shape, stack.index.tolist(), int(stack.take_layer(1).keys[0, 0, 0, 0])
            ((3, 1, 2, 4, 64), [0, 1, 0], 127)
        """
        place = self._read_layer(_APPEND, layer)
        named = {"k": k, "v": v, "lengths": lengths}
        arrays = entry_point.convert_arrays(_APPEND, {name: entry_point.unwrap_array(x) for name, x in named.items()})
        _check_tokens(self, *arrays)
        self._check_space(arrays[0].shape[1], arrays[2], place)
        return _append(self, *arrays, place)

    def take_layer(self, layer: ArrayLike) -> KVCache:
        """Return the cache of one layer of a stack: a copy, and tokens that are appended to it are not in the stack.

        Args:
            layer: an int or an integer scalar. If it is traced, one that the stack does not have stands for the
                nearest.

        Raises:
            TypeError: the layer is no integer.
            ValueError: the cache is no stack, it has no layers, or it is known not to have this one.

        Example:
            >>> import jax, jax.numpy as jnp, jaxquant as jq
            >>> caches = [jq.KVCache.create((1, 4, 2, 64), rotate=True) for _ in range(3)]
            >>> stack = jax.tree.map(lambda *parts: jnp.stack(parts), *caches)
            >>> stack.take_layer(1).keys.shape
            (1, 2, 4, 64)
        """
        place = self._read_layer(_TAKE, layer)

        taken = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, place, keepdims=False), self)
        # XLA:CPU copies keys of few features token by token, unless tokens and features are one dimension. The batch
        # and the heads stay dimensions of their own, because they may be sharded.
        flat = self.keys.reshape(*self.keys.shape[:3], math.prod(self.keys.shape[3:]))
        keys = lax.optimization_barrier(lax.dynamic_index_in_dim(flat, place, keepdims=False))
        return dataclasses.replace(taken, keys=keys.reshape(self.keys.shape[1:]))

    def _read_layer(self, function: str, layer: ArrayLike | None) -> jax.Array | None:
        """Return a place in a stack of caches as an int32 scalar, or None for a cache that is no stack."""
        rank = self.key_scale.ndim
        if layer is None and rank == 3:
            return None
        expected = "an int or an integer scalar, because the cache is a stack, with a dimension of layers"
        checks.require(layer is not None, function, "layer", expected, None)
        expected = "a stack, whose scales have 4 dimensions" + ", or no layer" * (function == _APPEND)
        checks.require(rank == 4, function, "cache", expected, f"scales of {rank} dimensions")
        count = self.key_scale.shape[0]
        checks.require(count != 0, function, "cache", "a stack with a layer", "one without layers")
        layer = entry_point.unwrap_array(layer)
        # As it is given, because JAX cuts integers of 64 bits to 32.
        known = layer if isinstance(layer, int) else entry_point.read_elements(layer)
        (place,) = entry_point.convert_arrays(function, {"layer": layer})
        dtype = getattr(place, "dtype", None)
        is_integer = type(place) is int or (dtype is not None and jnp.issubdtype(dtype, jnp.integer))
        checks.require_type(is_integer, function, "layer", "an int or an integer scalar", checks.describe_value(layer))
        checks.require(jnp.shape(place) == (), function, "layer", "a scalar", f"shape {jnp.shape(place)}")
        fits = known is None or not isinstance(count, int) or 0 <= int(known) < count
        expected = f"from 0 to {count - 1}, because the stack has {count}"
        checks.require(fits, function, "layer", expected, known)
        return jnp.clip(place, 0, count - 1).astype(jnp.int32)

    def _check_is_layer(self, function: str) -> None:
        """Raise if the cache is a stack of several ones."""
        rank = jnp.ndim(self.key_scale)
        expected = "the cache of one layer, as take_layer returns it, whose scales have 3 dimensions"
        checks.require(rank == 3, function, "cache", expected, f"scales of {rank} dimensions")

    def _check_space(self, tokens: int, lengths: jax.Array | None, layer: jax.Array | None) -> None:
        """Raise if the cache, or a layer of a stack, is known to overflow."""
        if self.window is not None:
            return
        index, counts, place = (entry_point.read_elements(x) for x in (self.index, lengths, layer))
        if layer is not None and index is not None:
            index = None if place is None else index[int(place)]
        if lengths is not None and counts is None:
            return
        added = np.asarray(tokens if counts is None else np.clip(counts, 0, tokens))
        last = added.max(initial=0) if index is None else (index + added).max(initial=0)
        expected = f"at most {self.length} tokens in all, the length of the cache (a window makes it a ring)"
        checks.require(bool(last <= self.length), _APPEND, "k", expected, int(last))

    @property
    def length(self) -> int:
        """The number of tokens that the cache holds."""
        return self.key_scale.shape[-1]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape that `create` got: (batch, length, kv_heads, head_dim). It is that of each layer of a stack."""
        batch, heads, length = self.key_scale.shape[-3:]
        return batch, length, heads // count_blocks(self.spec_k, self.head_dim), self.head_dim

    @property
    def nbytes(self) -> int:
        """The bytes of the codes and scales, of all layers of a stack."""
        return sum(x.size * x.dtype.itemsize for x in (self.keys, self.values, self.key_scale, self.value_scale))

    @property
    def overflowed(self) -> jax.Array:
        """Whether tokens were appended beyond the length: bool, in the shape of the index, also of a stack."""
        if self.window is not None:
            return jnp.zeros(jnp.shape(self.index), jnp.bool_)
        return self.index > np.int32(self.length)

    @property
    def positions(self) -> jax.Array:
        """The position of the token in each slot of the cache, -1 if it is empty: int32 [batch or 1, length].

        Positions count the tokens from 0. Without a window the slot of a token is its position.
        """
        self._check_is_layer("KVCache.positions")
        slots = jnp.arange(self.length, dtype=jnp.int32)[None]
        index = jnp.reshape(self.index, (-1, 1))
        if self.window is None:
            return jnp.where(slots < index, slots, np.int32(-1))
        # The newest position before `index` that is the slot modulo the length. The remainder is never negative.
        newest = index - np.int32(1)
        return jnp.maximum(newest - (newest - slots) % np.int32(max(self.length, 1)), np.int32(-1))

    def check(self) -> KVCache:
        """Return the cache; raise ValueError if it overflowed. Call it outside of `jax.jit`."""
        expected = "a cache outside of jax.jit (or read cache.overflowed)"
        checks.require(not checks.is_traced(self.index), _CHECK, "cache", expected, "a traced one")
        expected = f"at most {self.length} tokens, the length of the cache (a window makes it a ring)"
        checks.require(
            not np.any(np.asarray(self.overflowed)), _CHECK, "cache", expected, int(np.max(self.index, initial=0))
        )
        return self

    def dequantize(self) -> tuple[jax.Array, jax.Array]:
        """Return the keys and values as float32 [batch, length, kv_heads, head_dim], in the order of the slots."""
        self._check_is_layer(_DEQUANTIZE)
        pairs = ((self.quantized_keys, (0, 2, 1, 3)), (self.quantized_values, (0, 3, 1, 2)))
        keys, values = (lax.transpose(dequantize_checked(q), order) for q, order in pairs)
        if self.rotate:
            keys = rotate_back(keys)
        if self.rotate_values:
            values = rotate_back(values)
        if self.smoothing is not None:
            keys = keys * self.smoothing[:, None]
        return keys if self.mean_key is None else keys + self.mean_key[:, None], values

    @property
    def quantized_keys(self) -> QuantizedArray:
        """The keys as a QuantizedArray [batch, kv_heads, length, head_dim] of int8 codes, as they were quantized:

        less `mean_key`, divided by `smoothing` and rotated.
        """
        return self._read_codes(self.keys, self.key_scale[..., None], self.spec_k, KEY_AXES[0])

    @property
    def quantized_values(self) -> QuantizedArray:
        """The values as a QuantizedArray [batch, kv_heads, head_dim, length] of int8 codes, rotated if need be."""
        return self._read_codes(self.values, self.value_scale[:, :, None], self.spec_v, VALUE_AXES[0])

    def _read_codes(self, stored: jax.Array, scale: jax.Array, spec: QuantSpec, axis: int) -> QuantizedArray:
        """Return codes and their scales with the blocks of a head beside each other along the axis of the features."""
        self._check_is_layer(f"KVCache.quantized_{'keys' if axis == KEY_AXES[0] else 'values'}")
        blocks = count_blocks(spec, self.head_dim)
        codes = unpack_codes(stored, spec, axis, self.head_dim)

        def join(part: jax.Array) -> jax.Array:
            batch, heads = part.shape[0], part.shape[1] // blocks
            part = jnp.moveaxis(part.reshape(batch, heads, blocks, *part.shape[2:]), 2, axis)
            shape = (*part.shape[:axis], blocks * part.shape[axis + 1], *part.shape[axis + 2 :])
            return part.reshape(shape)

        return QuantizedArray(join(codes), join(scale), dtype=jnp.float32)

    def partition_specs(
        self, batch: str | tuple[str, ...] | None = None, heads: str | tuple[str, ...] | None = None
    ) -> KVCache:
        """Return a cache of PartitionSpecs, to place the cache on a mesh.

        Args:
            batch: Static. The mesh axis, or axes, over which the batch is sharded; None for none.
            heads: Static. The same for the heads.
        """
        layers = (None,) * (self.key_scale.ndim - 3)
        whole, is_per_row = PartitionSpec(*layers, batch, heads), jnp.ndim(self.index) > len(layers)
        index = PartitionSpec(*layers, batch) if is_per_row else PartitionSpec()
        arrays = dict.fromkeys(("keys", "values", "key_scale", "value_scale"), whole)
        mean_key, smoothing = (None if x is None else whole for x in (self.mean_key, self.smoothing))
        return dataclasses.replace(self, **arrays, index=index, mean_key=mean_key, smoothing=smoothing)


_STATIC = tuple(field.name for field in dataclasses.fields(KVCache) if field.metadata.get("static"))


def _encode_static(static: tuple[Any, ...]) -> dict[str, Any]:
    fields = dict(zip(_STATIC, static, strict=True))
    return fields | {name: encode_spec(fields[name]) for name in ("spec_k", "spec_v")}


def _decode_static(saved: dict[str, Any]) -> tuple[Any, ...]:
    names, expected = ", ".join(saved), ", ".join(_STATIC)
    checks.require(names == expected, "KVCache", "the description in a saved program", expected, names)
    return tuple(decode_spec(saved[name]) if name.startswith("spec_") else saved[name] for name in _STATIC)


register_tree(KVCache, _encode_static, _decode_static)


@jax.jit
def _append(stored: KVCache, k: jax.Array, v: jax.Array, lengths: jax.Array | None, layer: jax.Array | None) -> KVCache:
    """Return a cache, or a layer of a stack, with further tokens; the arguments are checked."""
    cache = stored
    if layer is not None:
        # The arrays of codes and scales stay whole.
        small = {name: getattr(stored, name) for name in ("index", "mean_key", "smoothing")}
        take = functools.partial(lax.dynamic_index_in_dim, index=layer, keepdims=False)
        cache = dataclasses.replace(stored, **jax.tree.map(take, small))
    tokens, length = k.shape[1], cache.length
    counts = np.int32(tokens)
    if lengths is not None:
        # An index must never decrease or count tokens that do not exist, whatever the caller passes.
        counts = jnp.clip(lengths, np.int32(0), np.int32(tokens))
    if cache.mean_key is not None:
        # A product of the caller's must not be merged with the difference.
        k = round_result(k.astype(jnp.float32)) - cache.mean_key[:, None]
    if cache.smoothing is not None:
        k = k.astype(jnp.float32) * (np.float32(1) / cache.smoothing[:, None])
    if cache.rotate:
        k = rotate_tokens(k)
    if cache.rotate_values:
        v = rotate_tokens(v)
    codes, scales = _encode_tokens(k, cache.spec_k, KEY_AXES)
    value_codes, value_scales = _encode_tokens(v, cache.spec_v, VALUE_AXES)
    updates = ((codes, KEY_AXES[1]), (value_codes, VALUE_AXES[1]), (scales, 2), (value_scales, 2))
    whole = (cache.keys, cache.values, cache.key_scale, cache.value_scale)
    # One token, and tokens that share an index in a cache that is no ring, are contiguous.
    is_slice = cache.index.ndim == 0 and (tokens == 1 or cache.window is None)
    if is_slice:
        slots = cache.index if cache.window is None else cache.index % np.int32(length)
    else:
        slots = _choose_slots(cache, tokens, counts)
    write_one = _write_slice if is_slice else _write_slots

    def write(arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        pairs = zip(arrays, updates, strict=True)
        return tuple(write_one(array, update, axis, slots, layer) for array, (update, axis) in pairs)

    # On a GPU the host would wait for the condition of that loop.
    on_cpu = functools.partial(_run_once, write)
    keys, values, key_scale, value_scale = choose_on_cpu(on_cpu, write, whole)
    index = cache.index + counts
    if layer is not None:
        index = lax.dynamic_update_index_in_dim(stored.index, index, layer, 0)
    return dataclasses.replace(
        stored, keys=keys, values=values, key_scale=key_scale, value_scale=value_scale, index=index
    )


def _choose_slots(cache: KVCache, tokens: int, counts: ArrayLike) -> jax.Array:
    """Return the slots of new tokens, int32 [tokens] or [batch, tokens]; the length or more if they are not stored."""
    order = jnp.arange(tokens, dtype=jnp.int32)
    length = np.int32(cache.length)
    if cache.index.ndim:
        order, counts = order[None], jnp.reshape(jnp.asarray(counts), (-1, 1))
    is_stored = order < counts
    slots = jnp.expand_dims(cache.index, -1) + order
    if cache.window is not None:
        # Of more tokens than the ring holds, the last ones stay.
        is_stored &= order >= counts - length
        slots = slots % length
    # Slots beyond the end are dropped. They differ, because a scatter with unique indices must not get equal ones.
    return jnp.where(is_stored, slots, length + order)


def _derive_stored_dtype(spec: QuantSpec) -> Any:
    return jnp.uint8 if is_packed(spec) else jnp.int8


def _read_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a cache as ints."""
    is_shape = isinstance(shape, tuple | list) and len(shape) == 4
    expected = "(batch, length, kv_heads, head_dim)"
    checks.require_type(is_shape, _CREATE, "shape", expected, checks.describe_value(shape))
    for n in shape:
        checks.check_integer(_CREATE, "shape", n)
        checks.require(n >= 0, _CREATE, "shape", "dimensions of 0 or more", shape)
    return tuple(int(n) for n in shape)


def _check_spec(argument: str, spec: QuantSpec, features: int) -> None:
    """Check that a cache can hold codes of a spec."""
    checks.require_type(isinstance(spec, QuantSpec), _CREATE, argument, "a QuantSpec", checks.describe_value(spec))
    checks.require_type(spec.dtype in _DTYPES, _CREATE, argument, "dtype int8 or int4", spec.dtype)
    granularity: Any = spec.granularity
    is_blocked = isinstance(granularity, Blocked) and granularity.axis in (-1, 3) and isinstance(granularity.size, int)
    size: Any = granularity.size if is_blocked else 1
    expected = "PerToken(), a scale for each token and head, or Blocked(-1, size), one for each block of features"
    checks.require(granularity == PerToken() or is_blocked, _CREATE, argument, expected, granularity)
    if is_blocked:
        fits = features > 0 and features % size == 0
        expected = f"blocks of a size that divides head_dim, {features}"
        checks.require(fits, _CREATE, argument, expected, granularity)
    checks.require(bool(spec.symmetric), _CREATE, argument, "a symmetric spec", spec)
    expected = f"scale_dtype {dtypes.list_names(_SCALES)}"
    checks.require_type(spec.scale_dtype in _SCALES, _CREATE, argument, expected, spec.scale_dtype)


def _read_features(named: dict[str, ArrayLike | None], shape: tuple[int, int, int]) -> list[jax.Array | None]:
    """Return the mean key and the smoothing as float32 [batch, kv_heads, head_dim], or None."""
    arrays = entry_point.convert_arrays(_CREATE, {name: entry_point.unwrap_array(x) for name, x in named.items()})
    results: list[jax.Array | None] = []
    for name, x in zip(named, arrays, strict=True):
        if x is None:
            results.append(None)
            continue
        checks.check_array(_CREATE, name, x, dtypes.FLOATS)
        fits = x.shape in (shape, shape[1:])
        checks.require(fits, _CREATE, name, f"shape {shape[1:]} or {shape}", f"shape {x.shape}")
        x = jnp.broadcast_to(x.astype(jnp.float32), shape)
        if name == "smoothing":
            known = entry_point.read_elements(x)
            is_positive = known is None or bool(np.all(np.isfinite(known) & (known > 0)))
            checks.require(is_positive, _CREATE, name, "positive, finite numbers", known)
            x = _round_to_powers(x)
        results.append(x)
    return results


def _check_samples(argument: str, x: jax.Array) -> jax.Array:
    """Return queries or keys as float32, after a check."""
    checks.check_array(_FIND, argument, x, dtypes.FLOATS)
    expected = "rank 4, (batch, tokens, heads, head_dim), with a token and a head"
    checks.require(x.ndim == 4 and 0 not in x.shape[:3], _FIND, argument, expected, f"shape {x.shape}")
    return x.astype(jnp.float32)


def _round_to_powers(x: jax.Array) -> jax.Array:
    """Return positive float32 numbers rounded to powers of 2, halfway between them on a logarithmic scale."""
    # The fraction of sqrt(2) and of larger ones overflows into the exponent.
    bits = lax.bitcast_convert_type(x, jnp.int32) + np.int32(0x800000 - 0x3504F3)
    return lax.bitcast_convert_type(bits & np.int32(0x7F800000), jnp.float32)


def _check_tokens(cache: KVCache, k: jax.Array, v: jax.Array, lengths: jax.Array | None) -> None:
    """Check the arrays that are appended to a cache."""
    batch, _, heads, features = cache.shape
    check_tokens_whole(_APPEND, "cache", cache.key_scale, -1)
    for argument, x in (("k", k), ("v", v)):
        checks.check_array(_APPEND, argument, x, dtypes.FLOATS)
        fits = x.ndim == 4 and (x.shape[0], *x.shape[2:]) == (batch, heads, features) and x.shape == k.shape
        tokens = k.shape[1] if argument == "v" and k.ndim == 4 else "tokens"
        checks.require(fits, _APPEND, argument, f"shape ({batch}, {tokens}, {heads}, {features})", f"shape {x.shape}")
    if lengths is not None:
        checks.check_array(_APPEND, "lengths", lengths, (np.dtype(jnp.int32),))
        is_own = cache.index.ndim == cache.key_scale.ndim - 2
        checks.require(is_own, _APPEND, "lengths", "None, because all rows share an index", "an array")
        checks.check_shape(_APPEND, "lengths", lengths, (batch,), "one for each row")
    elif cache.window is None:
        expected = f"at most {cache.length} tokens, the length of the cache (a window makes it a ring)"
        checks.require(k.shape[1] <= cache.length, _APPEND, "k", expected, k.shape[1])


# The arrays of a KVCache: how codes are arranged and packed, and how tokens are written.


def is_packed(spec: QuantSpec) -> bool:
    """Return whether two codes share a byte."""
    return dtypes.count_packed_bits(spec.dtype) == 4


def count_blocks(spec: QuantSpec, features: int) -> int:
    """Return the number of blocks of features of a token and head that have a scale."""
    size: Any = spec.granularity.size if isinstance(spec.granularity, Blocked) else max(features, 1)
    return features // size if features else 1


def _count_stored(spec: QuantSpec, features: int) -> tuple[int, int]:
    """Return as how many heads a head is stored, and how many bytes hold the codes of a token in each of these."""
    blocks = count_blocks(spec, features)
    length = features // blocks
    if not is_packed(spec):
        return blocks, length
    return (blocks // 2, length) if blocks % 2 == 0 else (blocks, math.ceil(length / 2))


def _encode_tokens(x: jax.Array, spec: QuantSpec, axes: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Return the codes of tokens as a cache stores them, and their scales.

    Args:
        x: float [batch, tokens, heads, features].
        spec: how to quantize, with a scale for each token and head, or for each block of its features.
        axes: `KEY_AXES` or `VALUE_AXES`.

    Returns:
        Codes [batch, heads, tokens, features] of keys, or [batch, heads, features, tokens] of values, and scales
        [batch, heads, tokens]; each block of features is a head.
    """
    q = quantize(x, spec)
    order = (0, 2, 1, 3) if axes == KEY_AXES else (0, 2, 3, 1)
    batch, tokens, heads, features = x.shape
    blocks = count_blocks(spec, features)
    codes = q.codes.astype(jnp.int8)
    if blocks > 1:
        codes = codes.reshape(batch, tokens, heads * blocks, features // blocks)
    codes = lax.transpose(codes, order)
    if is_packed(spec):
        codes = _pack_codes(codes, blocks, axes[0])
    return codes, lax.transpose(q.scale.reshape(batch, tokens, heads * blocks), (0, 2, 1))


def _pack_codes(codes: jax.Array, blocks: int, axis: int) -> jax.Array:
    """Return 4-bit codes, int8 with a head for each block, as bytes; the axis is that of the features."""
    if blocks % 2:
        return _pack_halves(codes, axis)
    return _join_heads(_pack_halves(_split_heads(codes, blocks), 2))


def _split_heads(stored: jax.Array, blocks: int) -> jax.Array:
    """Return [batch, heads * blocks, ...] as [batch, heads, blocks, ...]."""
    return stored.reshape(stored.shape[0], stored.shape[1] // blocks, blocks, *stored.shape[2:])


def _join_heads(codes: jax.Array) -> jax.Array:
    """Return [batch, heads, blocks, ...] as [batch, heads * blocks, ...]."""
    return codes.reshape(codes.shape[0], codes.shape[1] * codes.shape[2], *codes.shape[3:])


def _pack_halves(codes: jax.Array, axis: int) -> jax.Array:
    """Return 4-bit codes, int8, as bytes: the first half of an axis in the low bits, the second half in the high ones.

    Neighbors in a byte are half an axis apart, so that packing and unpacking move whole slices.
    """
    length = codes.shape[axis]
    half = math.ceil(length / 2)
    # Shifts of unsigned bytes fill with zeros and never extend the sign.
    bits = lax.bitcast_convert_type(codes, jnp.uint8)
    low = lax.slice_in_dim(bits, 0, half, axis=axis) & np.uint8(15)
    high = lax.slice_in_dim(bits, half, length, axis=axis) << np.uint8(4)
    padding = [(0, 2 * half - length if a == axis else 0, 0) for a in range(codes.ndim)]
    return low | lax.pad(high, np.uint8(0), padding)


def unpack_codes(stored: jax.Array, spec: QuantSpec, axis: int, head_dim: int) -> jax.Array:
    """Return the codes of a cache as int8, with a head for each block of features.

    Args:
        stored: the codes as they are stored.
        spec: Static. How they were quantized.
        axis: Static. The axis of the features.
        head_dim: Static. The number of features of a token and head.
    """
    if not is_packed(spec):
        return stored
    blocks = count_blocks(spec, head_dim)
    signed = lax.bitcast_convert_type(stored, jnp.int8)
    # A shift to the right extends the sign.
    low, high = (signed << np.int8(4)) >> np.int8(4), signed >> np.int8(4)
    if blocks % 2:
        return lax.slice_in_dim(lax.concatenate([low, high], axis), 0, head_dim // blocks, axis=axis)
    # The halves of a head are whole blocks.
    return _join_heads(lax.concatenate([_split_heads(x, blocks // 2) for x in (low, high)], 2))


def _run_once(function: Callable[[Any], Any], arrays: Any) -> Any:
    """Return a function of arrays, computed in a loop of one step.

    XLA:CPU would fuse the writing of tokens with each contraction that reads the cache, and write them there into a
    further copy of it. A fusion does not cross the end of a loop, and a loop updates its carry in place. The compiler
    does not know the number of steps; a barrier alone would do with jax 0.12, but jax 0.10's XLA removes it too early.
    """
    return lax.fori_loop(np.int32(0), lax.optimization_barrier(np.int32(1)), lambda _, x: function(x), arrays)


def _write_slice(
    stored: jax.Array, update: jax.Array, axis: int, start: jax.Array, layer: jax.Array | None
) -> jax.Array:
    """Return an array with the slice of an axis from `start`, an int32 scalar, replaced; it is moved to fit if need be.

    XLA writes it in place if the array is donated or is the carry of a loop. The other arguments are those of
    `_write_slots`.
    """
    if layer is None:
        return lax.dynamic_update_slice_in_dim(stored, update, start, axis)
    places = (layer, *(start if i == axis else np.int32(0) for i in range(update.ndim)))
    return lax.dynamic_update_slice(stored, update[None], places)


def _write_slots(
    stored: jax.Array, update: jax.Array, axis: int, slots: jax.Array, layer: jax.Array | None
) -> jax.Array:
    """Return an array with some indices of an axis replaced; those beyond the axis are dropped.

    Args:
        stored: [batch, heads, ...], or that for each layer.
        update: [batch, heads, ...], with an entry for each slot along the axis.
        axis: the axis of the tokens of the update, 2 or more.
        slots: int32 [tokens], or [batch, tokens] for slots that differ between rows.
        layer: the layer to write to, an int32 scalar, or None.
    """
    if layer is not None:
        return _write_slots_of_layer(stored, update, axis, slots, layer)
    if slots.ndim == 2:
        return jax.vmap(functools.partial(_scatter, axis=axis - 1))(stored, update, slots)
    return _scatter(stored, update, slots, axis=axis)


def _write_slots_of_layer(
    stored: jax.Array, update: jax.Array, axis: int, slots: jax.Array, layer: jax.Array
) -> jax.Array:
    """Return what `_write_slots` returns for a stack."""
    is_per_row = slots.ndim == 2
    # The dimension of rows stays where it is. `jax.vmap` would move it to the front of the stack.
    window = tuple(range(2 if is_per_row else 1, update.ndim))
    numbers = lax.ScatterDimensionNumbers(
        window, (0, axis + 1), (0, axis + 1), (1,) if is_per_row else (), (0,) if is_per_row else ()
    )
    places = jnp.stack([sharding.place_like(jnp.broadcast_to(layer, slots.shape), slots), slots], -1)
    moved = jnp.moveaxis(update, axis, slots.ndim - 1)
    return lax.scatter(stored, places, moved, numbers, unique_indices=True, mode=lax.GatherScatterMode.FILL_OR_DROP)


def _scatter(stored: jax.Array, update: jax.Array, slots: jax.Array, *, axis: int) -> jax.Array:
    index = (*(slice(None),) * axis, slots)
    return stored.at[index].set(update, mode="drop", unique_indices=True)


def check_tokens_whole(function: str, argument: str, x: jax.Array, axis: int) -> None:
    """Check that no explicit mesh axis cuts an array along its tokens.

    Their contraction would need an `out_sharding`, which JAX's own error asks for, and attention does not take.
    """
    expected = "tokens that no explicit mesh axis cuts (use jax.sharding.AxisType.Auto, or jax.sharding.reshard)"
    cut = sharding.read_partition(x)[axis]
    checks.require(cut is None, function, argument, expected, f"tokens cut over {cut!r}")
