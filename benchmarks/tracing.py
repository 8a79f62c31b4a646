"""The rows on tracing: milliseconds to trace one operation, which pass before XLA compiles.

Each call traces under a new jit, with a shape that is new in the process, so that no cache is used. The difference
between two columns is the time that the operation adds to a trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxquant as jq

from .arrays import RAW, raw_matmul
from .contest import FLOAT32, Call, Contest, Missing, Row, Table

_MORE = itertools.count()
_NOT_COMPARED = Missing("nothing to compare")
_Shape = tuple[int, ...]


def _trace(work: Callable[..., Any], arguments: Callable[[int], tuple[Any, ...]]) -> None:
    jax.jit(lambda *operands: work(*operands)).trace(*arguments(next(_MORE)))


def _contest(ours: Call, raw: Call, floats: Call) -> Contest:
    return Contest(ours, {RAW: raw, FLOAT32: floats}, _NOT_COMPARED, 0)


def _struct(shape: _Shape, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _parts(shape: _Shape, dtype: Any, scales: _Shape) -> tuple[Any, ...]:
    point = _struct((1,) * len(shape), dtype) if dtype == jnp.uint8 else None
    return _struct(shape, dtype), _struct(scales), point


def _array(shape: _Shape, dtype: Any, scales: _Shape) -> jq.QuantizedArray:
    return jq.QuantizedArray(*_parts(shape, dtype, scales), dtype=jnp.float32)


def _matmul(shape: _Shape, dtype: Any, per_column: bool) -> Contest:
    m, k, n = shape

    def operands(make: Callable[..., Any], extra: int) -> tuple[Any, ...]:
        scales = (1, n + extra) if per_column else (1, 1)
        return make((m + extra, k), dtype, (1, 1)), make((k, n + extra), jnp.int8, scales)

    return _contest(
        partial(_trace, jq.matmul, partial(operands, _array)),
        partial(_trace, raw_matmul, partial(operands, _parts)),
        partial(_trace, jnp.matmul, partial(operands, lambda shape, *_: _struct(shape))),
    )


def _weight_only(shape: _Shape) -> Contest:
    m, k, n = shape

    def operands(make: Callable[..., Any], extra: int) -> tuple[Any, ...]:
        return _struct((m, k)), make((k, n + extra), jnp.int8, (1, n + extra))

    def plain(a: jax.Array, w: tuple[Any, ...]) -> jax.Array:
        return a @ (w[0].astype(jnp.float32) * w[1])

    return _contest(
        partial(_trace, jq.matmul, partial(operands, _array)),
        partial(_trace, plain, partial(operands, _parts)),
        partial(_trace, jnp.matmul, partial(operands, lambda shape, *_: _struct(shape))),
    )


def _quantize(shape: _Shape) -> Contest:
    spec = jq.QuantSpec(jnp.int8, jq.PerAxis(1))

    def larger(extra: int) -> tuple[Any, ...]:
        return (_struct((shape[0], shape[1] + extra)),)

    def plain(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = jnp.max(jnp.abs(x), axis=0, keepdims=True) / 127
        return jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8), scale

    ours = partial(_trace, lambda x: jq.quantize(x, spec), larger)
    return _contest(ours, partial(_trace, plain, larger), partial(_trace, lambda x: x + 1, larger))


def _dequantize(shape: _Shape) -> Contest:
    def operands(make: Callable[..., Any], extra: int) -> tuple[Any, ...]:
        larger = (shape[0], shape[1] + extra)
        return (make(larger, jnp.uint8, (1, 1)),)

    def plain(q: tuple[Any, ...]) -> jax.Array:
        return (q[0].astype(jnp.float32) - q[2].astype(jnp.float32)) * q[1]

    return _contest(
        partial(_trace, lambda q: q.dequantize(), partial(operands, _array)),
        partial(_trace, plain, partial(operands, _parts)),
        partial(_trace, lambda x: x + 1, partial(operands, lambda shape, *_: _struct(shape))),
    )


def _row(name: str, shape: _Shape, build: Callable[..., Contest], *arguments: Any) -> Row:
    return Row(name, shape, partial(build, shape, *arguments))


ROWS = [
    _row("trace matmul uint8 per tensor x int8 per column", (256,) * 3, _matmul, jnp.uint8, True),
    _row("trace matmul int8 x int8", (256,) * 3, _matmul, jnp.int8, False),
    _row("trace matmul float32 x int8 per column; raw: dequantized by hand", (256,) * 3, _weight_only),
    _row("trace matmul float32 x int8 per column; raw: dequantized by hand", (1, 4096, 4096), _weight_only),
    _row("trace quantize int8 per column; raw: by hand; float32: x + 1", (256,) * 2, _quantize),
    _row("trace dequantize uint8 per tensor; raw: by hand; float32: x + 1", (256,) * 2, _dequantize),
]

TABLE = Table("Tracing", (RAW, FLOAT32), ROWS)
