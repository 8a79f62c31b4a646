"""The rows on single converted layers of Linen and NNX, each against Flax's own layer in float32.

Both are jitted functions of the variables and the batch. A shape is the shape of the input. The schemes:

- static, dynamic: int8 weights with a scale for each output feature, uint8 activations with a fixed or a computed range
- w8, w4: int8 or int4 weights with a scale for each output feature, float32 activations
- w4/128, w4/32, nf4/64: 4-bit weights with a scale for each block of 128, 32 or 64 inputs, float32 activations
- w4a8: int4 weights with a scale for each output feature, uint8 activations with a fixed range
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import jaxquant as jq
from jaxquant import flax as jqf
from jaxquant.flax import linen as qnn
from jaxquant.flax import nnx as qnnx

from .contest import FLOAT32, Call, Contest, Missing, Row, Table

_TOLERANCE = 1e-5  # of the largest magnitude: the sums of trained and of served layers have other orders
_UINT8, _AVERAGE = jq.QuantSpec(jnp.uint8), jq.Static(jq.calibration.moving_average)
_FEATURES = {name: jq.QuantSpec(name, jq.PerFeature()) for name in ("int8", "int4")}


def _block_inputs(dtype: Any, size: int) -> jq.QuantSpec:
    return jq.QuantSpec(dtype, jq.Blocked(0, size))


_SCHEMES: dict[str, dict[str, Any]] = {
    "static": {"weight_spec": _FEATURES["int8"], "activation_spec": _UINT8, "activation_range": _AVERAGE},
    "dynamic": {"weight_spec": _FEATURES["int8"], "activation_spec": _UINT8},
    "w8": {"weight_spec": _FEATURES["int8"]},
    "w4": {"weight_spec": _FEATURES["int4"]},
    "w4/128": {"weight_spec": _block_inputs("int4", 128)},
    "w4/32": {"weight_spec": _block_inputs("int4", 32)},
    "nf4/64": {"weight_spec": _block_inputs(jq.nf4, 64)},
    "w4a8": {"weight_spec": _FEATURES["int4"], "activation_spec": _UINT8, "activation_range": _AVERAGE},
}  # fmt: skip
_ALL = ("static", "dynamic", "w8", "w4", "w4a8")
_DENSE = (*_ALL, "w4/128", "w4/32", "nf4/64")
_WEIGHT_ONLY = ("w8", "w4")
_STATIC = ("static", "w4a8")  # their ranges are found by calibration


class _Layer(NamedTuple):
    """A layer in Linen and in NNX, and the shapes of its inputs.

    Attributes:
        linen: the names of the layer's classes in Flax and here are equal; and its arguments.
        nnx: the same.
        shapes: the shapes of the inputs.
        schemes: the names of the schemes.
    """

    linen: tuple[str, tuple[Any, ...], dict[str, Any]]
    nnx: tuple[str, tuple[Any, ...], dict[str, Any]]
    shapes: tuple[tuple[int, ...], ...]
    schemes: tuple[str, ...]


def _dense(inputs: int, outputs: int, rows: tuple[int, ...], schemes: tuple[str, ...]) -> _Layer:
    shapes = tuple((n, inputs) for n in rows)
    return _Layer(("Dense", (outputs,), {}), ("Linear", (inputs, outputs), {}), shapes, schemes)


def _conv(inputs: int, outputs: int, size: int, shapes: tuple[tuple[int, ...], ...], **arguments: Any) -> _Layer:
    kernel = (size, size)
    return _Layer(("Conv", (outputs, kernel), arguments), ("Conv", (inputs, outputs, kernel), arguments), shapes, _ALL)


_LAYERS = {
    "Dense 768 to 3072": _dense(768, 3072, (1, 8, 32, 128, 512), _DENSE),
    "Dense 4096 to 4096": _dense(4096, 4096, (1, 8, 32, 128), _DENSE),
    "Dense 256 to 256": _dense(256, 256, (1, 32, 512), _ALL),
    "DenseGeneral 512 to (8, 64)": _Layer(
        ("DenseGeneral", ((8, 64),), {}), ("LinearGeneral", (512, (8, 64)), {}), ((1, 512), (64, 512)), _ALL
    ),
    "Conv 3x3 64 to 64": _conv(64, 64, 3, ((1, 56, 56, 64), (8, 56, 56, 64))),
    "Conv 1x1 64 to 256": _conv(64, 256, 1, ((8, 56, 56, 64),)),
    "Conv 3x3/2 3 to 32": _conv(3, 32, 3, ((1, 224, 224, 3),), strides=(2, 2)),
    "Conv 3x3 depthwise 128": _conv(128, 128, 3, ((8, 56, 56, 128),), feature_group_count=128),
    "Conv 3x3 16 to 16": _conv(16, 16, 3, ((8, 32, 32, 16),)),
    "Conv 3x3 128 to 128, 4 groups": _conv(128, 128, 3, ((8, 28, 28, 128),), feature_group_count=4),
    "Embed 30000 x 384": _Layer(("Embed", (30000, 384), {}), ("Embed", (30000, 384), {}), ((8, 128),), _WEIGHT_ONLY),
}  # fmt: skip


def _make_input(name: str, shape: tuple[int, ...]) -> jax.Array:
    rng = np.random.default_rng(7)
    if name.startswith("Embed"):
        return jnp.asarray(rng.integers(0, 30000, shape), jnp.int32)
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def _serve_linen(layer: _Layer, scheme: str, x: jax.Array) -> tuple[Call, Call, Call]:
    """Return the served layer, the trained one and Flax's own."""
    name, sizes, arguments = layer.linen
    plain = getattr(nn, name)(*sizes, **arguments)
    model = getattr(qnn, name)(*sizes, **arguments, **_SCHEMES[scheme])
    params = jax.jit(plain.init)(jax.random.key(0), x)["params"]
    _, ranges = model.apply({"params": params}, x, mutable=["ranges", "scales"])
    variables = {"params": params, **ranges}
    serve = jax.jit(model.apply)
    return (
        functools.partial(serve, jqf.convert(model, variables), x),
        functools.partial(serve, variables, x),
        functools.partial(jax.jit(plain.apply), {"params": params}, x),
    )


def _serve_nnx(layer: _Layer, scheme: str, x: jax.Array) -> tuple[Call, Call, Call]:
    """Return the served layer, the trained one and Flax's own."""
    name, sizes, arguments = layer.nnx
    plain = getattr(nnx, name)(*sizes, **arguments, rngs=nnx.Rngs(0))
    model = getattr(qnnx, name)(*sizes, **arguments, **_SCHEMES[scheme], rngs=nnx.Rngs(0))
    if scheme in _STATIC:
        qnnx.calibrate(model, [x])
    model.eval()
    return _jit_nnx(qnnx.convert(model), x), _jit_nnx(model, x), _jit_nnx(plain, x)


def _jit_nnx(model: Any, x: jax.Array) -> Call:
    graph, state = nnx.split(model)
    return functools.partial(jax.jit(lambda state, x: nnx.merge(graph, state)(x)), state, x)


def _build(serve: Callable[..., tuple[Call, Call, Call]], name: str, scheme: str, shape: tuple[int, ...]) -> Contest:
    x = _make_input(name, shape)
    served, trained, plain = serve(_LAYERS[name], scheme, x)
    opponents: dict[str, Call | Missing] = {FLOAT32: plain}
    if "activation_spec" in _SCHEMES[scheme]:
        return Contest(served, opponents, trained, x.nbytes, unlike=frozenset(opponents))
    reference = np.asarray(trained())

    def find_wrong(y: Any) -> np.ndarray:
        return np.abs(np.asarray(y) - reference) > _TOLERANCE * np.abs(reference).max()

    expected = functools.partial(np.zeros, reference.shape, bool)
    return Contest(served, opponents, expected, x.nbytes, unlike=frozenset(opponents), compared=find_wrong)


TABLE = Table(
    "Converted layers",
    (FLOAT32,),
    [
        Row(f"{library} {name}, {scheme}", shape, functools.partial(_build, serve, name, scheme, shape))
        for library, serve in (("linen", _serve_linen), ("nnx", _serve_nnx))
        for name, layer in _LAYERS.items() for scheme in layer.schemes for shape in layer.shapes
    ],
)  # fmt: skip
