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
_RELATIVE = 2e-6  # of the sum of magnitudes: what `jq.dot_general` promises
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


def _read_weights(q: jq.QuantizedArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the float64 numbers of a quantized array, from its parts, and their magnitudes with offsets apart."""
    held = np.asarray(q.codes)
    steps = (np.asarray(q.codebook.levels)[held.astype(np.int8)] if q.codebook else held).astype(np.float64)
    if q.zero_point is not None:
        steps = steps - _wide(np.asarray(q.zero_point).astype(np.float64), q.shape)
    scale = _read_weights(q.scale)[0] if isinstance(q.scale, jq.QuantizedArray) else np.asarray(q.scale, np.float64)
    scaled = steps * _wide(scale, q.shape)
    if q.offset is None:
        return scaled, np.abs(scaled)
    offset = _wide(np.asarray(q.offset, np.float64), q.shape)
    return scaled + offset, np.abs(scaled) + np.abs(offset)


def _with_form(q: jq.QuantizedArray, form: str) -> jq.QuantizedArray:
    """Return an array in words, with an offset in place of a zero point, or with a scale that is quantized itself."""
    if form == "words":
        return q.pack()
    if form == "offset":
        return q.replace(zero_point=None, offset=-8 * q.scale)
    if form == "nested":
        return q.replace(scale=jq.quantize(q.scale, jq.QuantSpec("uint8", jq.Blocked(0, 16))))
    return q


def _weight_form(shape: tuple[int, ...], spec: jq.QuantSpec, form: str, stored_last: int | None) -> Contest:
    m, k, n = shape
    a, floats = inputs.finite((m, k)), inputs.finite((k, n))
    q = _with_form(jq.quantize(jnp.asarray(floats), spec, stored_last=stored_last), form)
    real, magnitudes = _read_weights(q)

    def close(y: Any) -> np.ndarray:
        exact = a.astype(np.float64) @ real
        return np.abs(np.asarray(y) - exact) <= _RELATIVE * (np.abs(a.astype(np.float64)) @ magnitudes)

    plain = jax.jit(lambda a, q: a @ q.dequantize())
    opponents: dict[str, Call | Missing] = {
        PLAIN: partial(plain, jax.device_put(a), q),
        FLOAT32: _jitted(jnp.matmul, a, floats),
        QWIX: _NONE,
    }
    ours = partial(jax.jit(jq.matmul), jax.device_put(a), q)
    rest: Any = {"unlike": frozenset({FLOAT32}), "compared": close, "multiply_adds": math.prod(shape)}
    return Contest(ours, opponents, partial(np.ones, (m, n), bool), a.nbytes + q.nbytes, **rest)


def _ragged(shape: tuple[int, ...], spec: jq.QuantSpec) -> Contest:
    """Return the contest of rows that belong to the first groups, with a matrix for each of `_GROUPS` groups."""
    m, k, n = shape
    a, floats = inputs.finite((m, k)), inputs.finite((_GROUPS, k, n))
    sizes = np.bincount(np.arange(m) % _GROUPS, minlength=_GROUPS).astype(np.int32)
    q = jq.quantize(jnp.asarray(floats), spec)
    groups = np.repeat(np.arange(_GROUPS), sizes)
    real, magnitudes = _read_weights(q)

    def close(y: Any) -> np.ndarray:
        wide = a.astype(np.float64)
        exact = np.stack([row @ real[group] for row, group in zip(wide, groups, strict=True)])
        limit = np.stack([np.abs(row) @ magnitudes[group] for row, group in zip(wide, groups, strict=True)])
        return np.abs(np.asarray(y) - exact) <= _RELATIVE * limit

    operands = jax.device_put((a, sizes))
    opponents: dict[str, Call | Missing] = {
        PLAIN: partial(
            jax.jit(lambda a, q, sizes: jax.lax.ragged_dot(a, q.dequantize(), sizes)), operands[0], q, operands[1]
        ),
        FLOAT32: _jitted(jax.lax.ragged_dot, a, floats, sizes),
        QWIX: _NONE,
    }
    ours = partial(jax.jit(jq.ragged_dot), operands[0], q, operands[1])
    rest: Any = {"unlike": frozenset({FLOAT32}), "compared": close, "multiply_adds": math.prod(shape)}
    return Contest(ours, opponents, partial(np.ones, (m, n), bool), a.nbytes + q.nbytes, **rest)


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
_FEW_ROWS = [(m, 4096, 4096) for m in (1, 8, 128)]
_GROUPS = 4
_INT4, _UINT4 = jq.QuantSpec("int4", jq.Blocked(0, 32)), jq.QuantSpec("uint4", jq.Blocked(0, 32), symmetric=False)
_FORMS: dict[str, tuple[jq.QuantSpec, str]] = {
    "int8 per column": (jq.QuantSpec("int8", jq.PerAxis(1)), ""),
    "int8 in blocks of 32": (jq.QuantSpec("int8", jq.Blocked(0, 32)), ""),
    "int4 in blocks of 32": (_INT4, ""),
    "int4 in words": (_INT4, "words"),
    "int4 with nested scale": (_INT4, "nested"),
    "uint4 with zero points": (_UINT4, ""),
    "uint4 with offset": (_UINT4, "offset"),
    "nf4 in blocks of 32": (jq.QuantSpec(jq.nf4, jq.Blocked(0, 32)), ""),
    "float4 in blocks of 32": (jq.QuantSpec("float4_e2m1fn", jq.Blocked(0, 32)), ""),
    "int5 in blocks of 32": (jq.QuantSpec("int5", jq.Blocked(0, 32)), ""),
    "int6 in blocks of 32": (jq.QuantSpec("int6", jq.Blocked(0, 32)), ""),
}
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
    *(
        row
        for name, (spec, form) in _FORMS.items()
        for layout, last in (("", None), (", stored last", 0))
        for row in _rows(f"few rows float32 x {name}{layout}", _FEW_ROWS, 0, _weight_form, spec, form, last)
    ),
    *_rows(
        "ragged_dot float32 x int4, 4 matrices",
        [(m, 1024, 1024) for m in (1, 8, 128)],
        0,
        _ragged,
        jq.QuantSpec("int4", jq.Blocked(1, 32)),
    ),
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
