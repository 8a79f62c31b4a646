"""The rows on ONNX models: a transformer encoder that is exported and loaded again, against ONNX Runtime.

- loaded encoder: 2 layers of width 256 on sequences of 64, with quantized products; one call. ONNX Runtime also runs
  the model of the float32 encoder, which tells whether it gains from the codes of the other model
- export encoder: the time to write the model of an encoder; a shape is (layers, width)
- load encoder: the time to read the bytes of a model, against the creation of a session

The floats of the two libraries differ in the last bits, and so does a code next to a tie: results are not compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

from .contest import ONNX_RUNTIME, Call, Contest, Missing, Row, Table
from .onnxruntime_models import open_session

_RECIPES = {"dynamic": jq.recipes.w8a8_dynamic(), "static": jq.recipes.w8a8_static()}
_LENGTH, _HEADS = 64, 4
_FLOAT_MODEL = "ONNX Runtime, float32"
_NOT_COMPARED = Missing("floats differ in the last bits")


def _normalize(x: jax.Array) -> jax.Array:
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt((centered * centered).mean(-1, keepdims=True) + 1e-5)


def _encode(params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        wide = jnp.einsum("bti,io->bto", _normalize(x), layer["qkv"])
        q, k, v = (part.reshape(*x.shape[:2], _HEADS, -1) for part in jnp.split(wide, 3, -1))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + jnp.einsum("bti,io->bto", mixed, layer["out"])
        hidden = jax.nn.gelu(jnp.einsum("bti,io->bto", _normalize(x), layer["up"]))
        x = x + jnp.einsum("bti,io->bto", hidden, layer["down"])
    return x


class _Encoder(NamedTuple):
    """An encoder on codes, the same one in float32, and a batch."""

    integer: Callable[[Any], Any]
    plain: Callable[[Any], Any]
    x: jax.Array


def _prepare(layers: int, width: int, batch: int, recipe: str) -> _Encoder:
    rng = np.random.default_rng(0)
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    params = [
        {name: jnp.asarray(rng.normal(0, shape[0] ** -0.5, shape), jnp.float32) for name, shape in shapes.items()}
        for _ in range(layers)
    ]
    x = jnp.asarray(rng.normal(size=(batch, _LENGTH, width)), jnp.float32)
    prepared = jq.prepare(_encode, params, x, rules=_RECIPES[recipe])
    q = jax.jit(prepared.convert)(params, prepared.calibrate(params, [x], progress=False))
    return _Encoder(lambda x: prepared.apply(q, x), lambda x: _encode(params, x), x)


def _run(recipe: str, shape: tuple[int, ...]) -> Contest:
    from jaxquant import onnx as jqonnx

    encoder = _prepare(2, shape[2], shape[0], recipe)
    models = [
        jqonnx.export(function, [encoder.x], batch="N", weights="int8") for function in (encoder.integer, encoder.plain)
    ]
    fn, params = jqonnx.load(models[0])
    feeds = {"x": np.asarray(encoder.x)}
    sessions = [open_session(model.SerializeToString()) for model in models]
    calls = [functools.partial(session.run, None, feeds) for session in sessions]
    ours = functools.partial(jax.jit(fn), jax.device_put(params), encoder.x)
    opponents: dict[str, Call | Missing] = dict(zip((ONNX_RUNTIME, _FLOAT_MODEL), calls, strict=True))
    return Contest(ours, opponents, _NOT_COMPARED, encoder.x.nbytes)


def _time_export(shape: tuple[int, int]) -> Contest:
    from jaxquant import onnx as jqonnx

    encoder = _prepare(*shape, 1, "static")

    def export() -> None:
        # A new function, so that nothing is traced already.
        jqonnx.export(lambda x: encoder.integer(x), [encoder.x], batch="N", weights="int8")

    opponents = {ONNX_RUNTIME: Missing("exports nothing"), _FLOAT_MODEL: Missing("exports nothing")}
    return Contest(export, opponents, _NOT_COMPARED, 0)


def _time_load(shape: tuple[int, int]) -> Contest:
    from jaxquant import onnx as jqonnx

    encoder = _prepare(*shape, 1, "static")
    data = jqonnx.export(encoder.integer, [encoder.x], batch="N", weights="int8").SerializeToString()
    load: Call = functools.partial(jqonnx.load, data)
    opponents: dict[str, Call | Missing] = {
        ONNX_RUNTIME: lambda: open_session(data) and None, _FLOAT_MODEL: Missing("another file")
    }  # fmt: skip
    return Contest(lambda: load() and None, opponents, _NOT_COMPARED, 0)


TABLE = Table(
    "ONNX models",
    (ONNX_RUNTIME, _FLOAT_MODEL),
    [
        *(
            Row(
                f"loaded encoder {recipe}",
                (batch, _LENGTH, 256),
                functools.partial(_run, recipe, (batch, _LENGTH, 256)),
            )
            for recipe in _RECIPES
            for batch in (1, 8)
        ),
        Row("export encoder", (6, 512), functools.partial(_time_export, (6, 512))),
        Row("load encoder", (22, 512), functools.partial(_time_load, (22, 512))),  # 69 MB of codes
    ],
)
