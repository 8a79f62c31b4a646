"""The rows on quantized arrays: contractions, convolutions, lookups, quantization and dequantization.

Everything runs under one jax.jit with the arrays as arguments, as users write it. "raw integers" is the same
contraction without the array type: the bare integer contraction of the codes and the scaling, written by hand in one
jit, with `lax.dot_general` for symmetric operands and `jaxquant.integer` for others. "plain JAX" is the same work on
floats and codes without this library. A shape is that of the contraction (batch, rows, depth, columns); that of the
NHWC images, output features and kernel width; or that of the table and the number of lookups.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

from . import inputs, qwix_calls
from .contest import FLOAT32, PLAIN, QWIX, Call, Contest, Missing, Row, Table

RAW = "raw integers"
_QWIX_IS_UNLIKE = frozenset({QWIX})
_FLOATS_ARE_UNLIKE = frozenset({FLOAT32, QWIX})
# The numbers of bits of formats that are held in words only.
_NARROW = {"int3": 3, "int5": 5, "int6": 6}
_NONE = Missing("none")
_TOLERANCE = 1e-5  # of the largest magnitude: XLA may add float32 numbers in any order
_BLOCK = 128
_FEW_LOOKUPS, _LOOKUPS = 128, 512
_ATTENTION = "bqhd,bkhd->bhqk"


@dataclasses.dataclass(frozen=True)
class Codes:
    """A quantized operand in numpy."""

    codes: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray | None = None
    codebook: jq.Codebook | None = None
    narrow: str | None = None  # the format that the codes are packed as

    @property
    def parts(self) -> tuple[Any, ...]:
        """The arrays on the device."""
        return jax.device_put((self.codes, self.scale, self.zero_point))

    @property
    def array(self) -> jq.QuantizedArray:
        q = jq.QuantizedArray(*self.parts, codebook=self.codebook)
        return q if self.narrow is None else q.pack(self.narrow)

    @property
    def steps(self) -> np.ndarray:
        """The codes minus the zero point, in float64, in which sums of products of integers are exact."""
        if self.codebook is not None:
            return np.asarray(self.codebook.levels)[self.codes.astype(np.int8)]
        return self.codes.astype(np.float64) - (0 if self.zero_point is None else self.zero_point.astype(np.float64))

    @property
    def floats(self) -> np.ndarray:
        return self.steps.astype(np.float32) * _wide(self.scale, self.codes.shape)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


def codes(shape: tuple[int, ...], dtype: Any, scales: tuple[int, ...], seed: int = 4) -> Codes:
    """Return an operand with scales of a shape. Only unsigned operands of 8 bits have a zero point."""
    is_asymmetric = np.dtype(dtype) == np.uint8
    zero_point = inputs.parameters((1,) * len(shape), dtype)[1] if is_asymmetric else None
    return Codes(inputs.codes(shape, dtype, seed), inputs.parameters(scales, "int8")[0], zero_point)


def _wide(part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    for axis, (entries, n) in enumerate(zip(part.shape, shape, strict=True)):
        if entries not in (1, n):
            part = np.repeat(part, n // entries, axis=axis)
    return part


def _contest(
    a: Any, b: Codes, ours: Callable[..., Any], opponents: dict[str, Call | Missing], expected: Call, **rest: Any
) -> Contest:
    """Return the contest of jitted contractions of `a`, quantized or not, with `b`."""
    operand = a.array if isinstance(a, Codes) else jax.device_put(a)
    return Contest(partial(jax.jit(ours), operand, b.array), opponents, expected, a.nbytes + b.nbytes, **rest)


def _jitted(work: Callable[..., Any], *operands: Any) -> Call:
    return partial(jax.jit(work), *jax.device_put(operands))


def raw_matmul(a: tuple[Any, ...], b: tuple[Any, ...]) -> jax.Array:
    """Multiply two matrices given as (values, scale, zero_point), as users do by hand. The second has no zero point."""
    (values, scale, zero_point), (b_values, b_scale, _) = a, b
    dimensions = (((1,), (0,)), ((), ()))
    if zero_point is None:
        acc = jax.lax.dot_general(values, b_values, dimensions, preferred_element_type=jnp.int32)
    else:
        acc = jq.integer.dot_general(values, b_values, dimensions, lhs_zero_point=zero_point)
    return acc.astype(jnp.float32) * (scale * b_scale)


def _matmul(shape: tuple[int, ...], a_dtype: str, per_column: bool) -> Contest:
    m, k, n = shape
    a = codes((m, k), a_dtype, (1, 1))
    b = codes((k, n), "int8", (1, n) if per_column else (1, 1), seed=5)
    opponents = {
        RAW: partial(jax.jit(raw_matmul), a.parts, b.parts),
        FLOAT32: _jitted(jnp.matmul, a.floats, b.floats),
        QWIX: qwix_calls.matmul(a.floats, b.floats),
    }

    def expected() -> np.ndarray:
        return (a.steps @ b.steps).astype(np.float32) * (a.scale * b.scale)

    rest: Any = {"unlike": _FLOATS_ARE_UNLIKE, "multiply_adds": math.prod(shape)}
    return _contest(a, b, lambda a, b: a @ b, opponents, expected, **rest)


def _einsum(shape: tuple[int, ...]) -> Contest:
    batch, length, heads, width = shape
    a, b = (codes(shape, "int8", (1,) * 4, seed) for seed in (4, 5))

    def raw(a: tuple[Any, ...], b: tuple[Any, ...]) -> jax.Array:
        acc = jq.integer.dot_general(a[0], b[0], (((3,), (3,)), ((0, 2), (0, 2))))
        return acc.astype(jnp.float32) * (a[1] * b[1])

    opponents = {
        RAW: partial(jax.jit(raw), a.parts, b.parts),
        FLOAT32: _jitted(partial(jnp.einsum, _ATTENTION), a.floats, b.floats),
        QWIX: qwix_calls.einsum(_ATTENTION, a.floats, b.floats),
    }

    def expected() -> np.ndarray:
        return np.einsum(_ATTENTION, a.steps, b.steps, optimize=True).astype(np.float32) * (a.scale * b.scale)

    rest: Any = {"unlike": _FLOATS_ARE_UNLIKE, "multiply_adds": batch * heads * length**2 * width}
    return _contest(a, b, lambda a, b: jq.einsum(_ATTENTION, a, b), opponents, expected, **rest)


def _blocked(shape: tuple[int, ...]) -> Contest:
    m, k, n = shape
    blocks = k // _BLOCK
    a, b = codes((m, k), "int8", (m, blocks)), codes((k, n), "int8", (blocks, n), seed=5)
    parts = [slice(_BLOCK * i, _BLOCK * (i + 1)) for i in range(blocks)]

    def raw(a: tuple[Any, ...], b: tuple[Any, ...]) -> jax.Array:
        operands = (a[0].reshape(m, blocks, _BLOCK), b[0].reshape(blocks, _BLOCK, n))
        acc = jq.integer.dot_general(*operands, (((2,), (1,)), ((1,), (0,))))
        return (acc.astype(jnp.float32) * (a[1].T[:, :, None] * b[1][:, None, :])).sum(axis=0)

    def expected() -> np.ndarray:
        total = np.zeros((m, n), np.float32)
        for i, part in enumerate(parts):
            acc = a.steps[:, part] @ b.steps[part]
            total += acc.astype(np.float32) * (a.scale[:, i, None] * b.scale[i])
        return total

    opponents = {
        RAW: partial(jax.jit(raw), a.parts, b.parts),
        FLOAT32: _jitted(jnp.matmul, a.floats, b.floats),
        QWIX: qwix_calls.matmul(a.floats, b.floats, block_size=_BLOCK),
    }
    # The hand-written form computes all blocks first, and adds them up in another order.
    rest: Any = {"unlike": _FLOATS_ARE_UNLIKE | {RAW}, "multiply_adds": math.prod(shape)}
    return _contest(a, b, lambda a, b: a @ b, opponents, expected, **rest)


def _conv(shape: tuple[int, ...]) -> Contest:
    n, height, width, channels, features, kernel = shape
    x = codes(shape[:4], "uint8", (1,) * 4)
    w = codes((kernel, kernel, channels, features), "int8", (1, 1, 1, features), seed=5)
    layout: Any = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def raw(x: tuple[Any, ...], w: tuple[Any, ...]) -> jax.Array:
        point = x[2].reshape(())
        acc = jq.integer.conv_general_dilated(x[0], w[0], **layout, lhs_zero_point=point)
        return acc.astype(jnp.float32) * (x[1] * w[1])

    def expected() -> np.ndarray:
        edge = kernel // 2
        padded = np.pad(x.steps, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
        taps = [(i, j) for i in range(kernel) for j in range(kernel)]
        acc = sum(padded[:, i : i + height, j : j + width] @ w.steps[i, j] for i, j in taps)
        return np.asarray(acc).astype(np.float32) * (x.scale * w.scale)

    opponents = {
        RAW: partial(jax.jit(raw), x.parts, w.parts),
        FLOAT32: _jitted(partial(jax.lax.conv_general_dilated, **layout), x.floats, w.floats),
        QWIX: qwix_calls.conv(x.floats, w.floats, np.zeros(features, np.float32), layout, feature_axis=3),
    }
    rest: Any = {"unlike": _FLOATS_ARE_UNLIKE, "multiply_adds": n * height * width * w.codes.size}
    return _contest(x, w, lambda x, w: jq.conv_general_dilated(x, w, **layout), opponents, expected, **rest)


def _weight_only(shape: tuple[int, ...], dtype: Any, block: int | None) -> Contest:
    m, k, n = shape
    a = inputs.finite((m, k))
    book = dtype if isinstance(dtype, jq.Codebook) else None
    scales = (1, n) if block is None else (k // block, n)
    bits = _NARROW.get(dtype) if isinstance(dtype, str) else None
    w = dataclasses.replace(codes((k, n), book.carrier if book else "int8" if bits else dtype, scales), codebook=book)
    if bits:
        w = dataclasses.replace(w, codes=w.codes >> (8 - bits), narrow=dtype)

    def plain(a: jax.Array, w: tuple[Any, ...]) -> jax.Array:
        values, scale, _ = w
        wide = jnp.asarray(book.levels, jnp.float32)[values.astype(jnp.int8)] if book else values.astype(jnp.float32)
        if block is not None:
            wide, scale = wide.reshape(-1, block, n), scale[:, None]
        return a @ (wide * scale).reshape(k, n)

    def close(y: Any) -> np.ndarray:
        exact = a.astype(np.float64) @ (w.steps * _wide(w.scale.astype(np.float64), (k, n)))
        return np.abs(np.asarray(y) - exact) <= _TOLERANCE * np.abs(exact).max()

    opponents = {
        PLAIN: partial(jax.jit(plain), jax.device_put(a), w.parts),
        FLOAT32: _jitted(jnp.matmul, a, w.floats),
        QWIX: _NONE if bits else qwix_calls.weight_only(a, w.floats, book.name if book else dtype, block),
    }
    rest: Any = {"unlike": _QWIX_IS_UNLIKE, "compared": close, "multiply_adds": math.prod(shape)}
    return _contest(a, w, lambda a, w: a @ w, opponents, partial(np.ones, (m, n), bool), **rest)


def _take(shape: tuple[int, ...]) -> Contest:
    length, width, lookups = shape
    table = codes((length, width), "int8", (length, 1))
    index = np.random.default_rng(7).integers(0, length, lookups, np.int32)

    def plain(table: tuple[Any, ...], index: jax.Array) -> jax.Array:
        values, scale = (jnp.take(part, index, axis=0) for part in table[:2])
        return values.astype(jnp.float32) * scale

    opponents: dict[str, Call | Missing] = {
        PLAIN: partial(jax.jit(plain), table.parts, jax.device_put(index)),
        FLOAT32: _jitted(lambda table, index: jnp.take(table, index, axis=0), table.floats, index),
        QWIX: _NONE,
    }
    ours = partial(jax.jit(lambda table, index: jq.take(table, index)), table.array, jax.device_put(index))
    return Contest(ours, opponents, lambda: table.floats[index], lookups * (width + 4) + index.nbytes)


def _quantize(size: int, axes: tuple[int, ...] | None, block: int | None = None, jitted: bool = True) -> Contest:
    """Return absolute maxima over `axes`, or over all if it is None; or over blocks of the last dimension."""
    x = inputs.finite((size, size))
    granularity = jq.Blocked(-1, block) if block else jq.PerAxis(1 - axes[0]) if axes else jq.PerTensor()
    spec = jq.QuantSpec(jnp.int8, granularity)

    def plain(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        blocks = x.reshape(size, -1, block) if block else x
        scale = jnp.max(jnp.abs(blocks), axis=-1 if block else axes, keepdims=True) / 127
        steps = jnp.clip(jnp.round(blocks / scale), -127, 127).astype(jnp.int8)
        return steps.reshape(size, size), scale.reshape(size, -1) if block else scale

    def expected() -> tuple[np.ndarray, np.ndarray]:
        blocks = x.reshape(size, -1, block) if block else x
        scale = np.abs(blocks).max(axis=-1 if block else axes, keepdims=True) / np.float32(127)
        steps = np.clip(np.rint(blocks / scale), -127, 127).astype(np.int8)
        return steps.reshape(size, size), scale.reshape(size, -1) if block else scale

    operand = jax.device_put(x)
    ours = partial(jq.quantize, spec=spec)
    opponents = {
        PLAIN: partial(jax.jit(plain), operand),
        FLOAT32: _NONE,
        QWIX: qwix_calls.quantize(x, spec.granularity),
    }
    return Contest(partial(jax.jit(ours) if jitted else ours, operand), opponents, expected, x.nbytes, _QWIX_IS_UNLIKE)


def _dequantize(size: int, dtype: Any, scales: tuple[int, ...]) -> Contest:
    q = codes((size, size), dtype, scales)

    def plain(q: tuple[Any, ...]) -> jax.Array:
        values, scale, zero_point = q
        steps = values.astype(jnp.float32)
        return (steps if zero_point is None else steps - zero_point.astype(jnp.float32)) * scale

    opponents: dict[str, Call | Missing] = {
        PLAIN: partial(jax.jit(plain), q.parts),
        FLOAT32: _jitted(lambda x: x + 1, q.floats),  # the time to write an array of this size
        QWIX: _NONE,
    }
    ours = partial(jax.jit(lambda q: q.dequantize()), q.array)
    return Contest(ours, opponents, lambda: q.floats, q.nbytes, unlike=frozenset({FLOAT32}))


def _rows(
    name: str, shapes: list[tuple[int, ...]], compiled: int, build: Callable[..., Contest], *arguments: Any
) -> list[Row]:
    """Return a row per shape. `compiled` is the index of the row whose compilation is timed."""
    timed = shapes[compiled]
    return [Row(name, shape, partial(build, shape, *arguments), shape == timed) for shape in shapes]


def _sized(name: str, build: Callable[..., Contest], *arguments: Any) -> list[Row]:
    return [Row(name, (size, size), partial(build, size, *arguments), size == 1024) for size in (1024, 4096)]


_CUBES = [(256,) * 3, (1024,) * 3, (2048,) * 3]
_ONE_ROW = [(1, size, size) for size in (1024, 4096)]
_WEIGHTS = [*_ONE_ROW, (128, 1024, 4096)]
_TABLES = [(1000, 512, _FEW_LOOKUPS), (50000, 512, _LOOKUPS)]

CONTRACTIONS = [
    *_rows("matmul uint8 per tensor x int8 per column", _CUBES, 1, _matmul, "uint8", True),
    *_rows("matmul uint8 per tensor x int8 per column, one row", _ONE_ROW, 1, _matmul, "uint8", True),
    *_rows("matmul int8 x int8", _CUBES, 1, _matmul, "int8", False),
    *_rows(f"einsum {_ATTENTION} int8 x int8", [(1, 32, 8, 64), (4, 128, 8, 64)], 1, _einsum),
    *_rows(f"matmul int8 x int8, both in blocks of {_BLOCK}", [(256,) * 3, (1024,) * 3], 1, _blocked),
    *_rows("conv NHWC uint8 x int8 per feature", [(1, 28, 28, 64, 64, 3), (8, 56, 56, 64, 64, 3)], 1, _conv),
]
FLOATS = [
    *_rows("matmul float32 x int8 per column", _WEIGHTS, 1, _weight_only, jnp.int8, None),
    *_rows("matmul float32 x int4 in blocks of 32", _WEIGHTS, 1, _weight_only, jnp.int4, 32),
    *_rows("matmul float32 x nf4 in blocks of 64", _WEIGHTS, 1, _weight_only, jq.nf4, 64),
    *_rows("matmul float32 x int5 in blocks of 32", _WEIGHTS, 1, _weight_only, "int5", 32),
    *_rows("matmul float32 x int6 in blocks of 32", _WEIGHTS, 1, _weight_only, "int6", 32),
    *_rows("take int8 per row", _TABLES, 1, _take),
    *_sized("quantize int8 per tensor", _quantize, None),
    *_sized("quantize int8 per tensor, outside of jit", _quantize, None, None, False),
    *_sized("quantize int8 per row", _quantize, (1,)),
    *_sized("quantize int8 per column", _quantize, (0,)),
    *_sized("quantize int8 in blocks of 32", _quantize, None, 32),
    *_sized("dequantize uint8 per tensor; float32: x + 1", _dequantize, "uint8", (1, 1)),
]

TABLES = (
    Table("Arrays: integer contractions", (RAW, FLOAT32, QWIX), CONTRACTIONS, throughput="TOP/s"),
    Table("Arrays: weights alone, lookups, in and out", (PLAIN, FLOAT32, QWIX), FLOATS),
)
