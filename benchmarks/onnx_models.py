"""The rows on ONNX models: a transformer encoder that is exported and loaded again, against ONNX Runtime.

- loaded encoder: 2 layers of width 256 on sequences of 64, with quantized products; one call
- export encoder: the time to write the model of an encoder; a shape is (layers, width)
- load encoder: the time to read the bytes of a model, against the creation of a session

The floats of the two libraries differ in the last bits, and so does a code next to a tie: results are not compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

from .contest import ONNX_RUNTIME, Call, Contest, Missing, Row, Table
from .onnxruntime_models import open_session

_RECIPES = {"dynamic": jq.recipes.w8a8_dynamic(), "static": jq.recipes.w8a8_static()}
_LENGTH, _HEADS = 64, 4
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


def _prepare(layers: int, width: int, batch: int, recipe: str) -> tuple[Callable[[Any], Any], jax.Array]:
    """Return an encoder on codes, and a batch."""
    rng = np.random.default_rng(0)
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    params = [
        {name: jnp.asarray(rng.normal(0, shape[0] ** -0.5, shape), jnp.float32) for name, shape in shapes.items()}
        for _ in range(layers)
    ]
    x = jnp.asarray(rng.normal(size=(batch, _LENGTH, width)), jnp.float32)
    prepared = jq.prepare(_encode, params, x, rules=_RECIPES[recipe])
    ranges = prepared.calibrate(params, [x], progress=False) if prepared.static_ranges else {}
    converted = jax.jit(prepared.convert)(params)
    return lambda x: prepared.apply(converted, ranges, x), x


def _export(layers: int, width: int, batch: int, recipe: str) -> tuple[Any, jax.Array]:
    from jaxquant import onnx as jqonnx

    function, x = _prepare(layers, width, batch, recipe)
    return jqonnx.export(function, [x], batch="N"), x


def _run(recipe: str, shape: tuple[int, ...]) -> Contest:
    from jaxquant import onnx as jqonnx

    model, x = _export(2, shape[2], shape[0], recipe)
    fn, params = jqonnx.load(model)
    session, feeds = open_session(model.SerializeToString()), {"x": np.asarray(x)}
    ours = functools.partial(jax.jit(fn), jax.device_put(params), x)
    return Contest(ours, {ONNX_RUNTIME: lambda: session.run(None, feeds)}, _NOT_COMPARED, x.nbytes)


def _time_export(shape: tuple[int, int]) -> Contest:
    from jaxquant import onnx as jqonnx

    function, x = _prepare(*shape, 1, "static")

    def export() -> None:
        jqonnx.export(lambda x: function(x), [x], batch="N")  # a new function, so that nothing is traced already

    return Contest(export, {ONNX_RUNTIME: Missing("exports nothing")}, _NOT_COMPARED, 0)


def _time_load(shape: tuple[int, int]) -> Contest:
    from jaxquant import onnx as jqonnx

    data = _export(*shape, 1, "static")[0].SerializeToString()
    load: Call = functools.partial(jqonnx.load, data)
    return Contest(lambda: load() and None, {ONNX_RUNTIME: lambda: open_session(data) and None}, _NOT_COMPARED, 0)


TABLE = Table(
    "ONNX models",
    (ONNX_RUNTIME,),
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
