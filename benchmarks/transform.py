"""The rows on `jq.prepare`: networks of Flax's own layers, converted, against float32, qwix and bare contractions.

All are jitted functions of the parameters and the batch. qwix quantizes the activations in each call, one scale for
each row or image, as it does by default; in the encoder it also quantizes the attention scores. jaxquant's rules leave
these in floats. The results of converted functions are compared bit for bit with `fake_apply`'s. A shape is that
of the batch; that of the networks "mlp" and "x @ W" ends with the number of layers.

The opponent "contractions alone" runs nothing but the contractions of the network: with int32 results on int8 codes
that exist already, where the converted function contracts codes, and on floats elsewhere. It shows how much of the time
is left for everything else.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import jaxquant as jq

from .bare_contractions import CONTRACTIONS_ALONE, OPERATIONS, contract_alone
from .contest import FLOAT32, PLAIN, QWIX, Call, Contest, Missing, Row, Table
from .training import CNN, MLP

_PLAIN = "x @ W"
_TRACE = "trace in float32"
_HEADS = 8
_LEAST_WIDTH = 64
_RECIPES = {"dynamic": jq.recipes.w8a8_dynamic(), "static": jq.recipes.w8a8_static()}


class Encoder(nn.Module):
    """Four layers of a transformer encoder."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        for _ in range(4):
            x = x + nn.MultiHeadDotProductAttention(_HEADS)(nn.LayerNorm()(x))
            x = x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))
        return x


class Depthwise(nn.Module):
    """Two depthwise convolutions."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        features = x.shape[-1]
        for _ in range(2):
            x = nn.relu(nn.Conv(features, (3, 3), feature_group_count=features)(x))
        return x


_NETWORKS: dict[str, tuple[Callable[[int], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "mlp": (lambda width: MLP(width, nn.Dense), ((1024, 1024, 3), (64, 64, 3))),
    "cnn": (lambda width: CNN(nn.Conv, nn.Dense), ((16, 32, 32, 64), (2, 8, 8, 32))),
    "encoder": (lambda width: Encoder(), ((8, 128, 512), (2, 16, 64))),
    "depthwise": (lambda width: Depthwise(), ((8, 56, 56, 128), (2, 8, 8, 32))),
}


def _make_batch(network: str, shape: tuple[int, ...]) -> jax.Array:
    sizes = shape[:2] if network in ("mlp", _PLAIN) else shape
    return jnp.asarray(np.random.default_rng(7).normal(size=sizes), jnp.float32)


def _make_network(network: str, shape: tuple[int, ...]) -> tuple[nn.Module, Any, jax.Array]:
    """Return a network, its parameters and a batch."""
    x = _make_batch(network, shape)
    model = _NETWORKS[network][0](x.shape[-1])
    return model, jax.jit(model.init)(jax.random.key(0), x), x


def _convert(function: Callable[..., Any], params: Any, x: jax.Array, recipe: str) -> tuple[Call, Call]:
    """Return the call of a converted function, and the call of its twin on floats."""
    prepared = jq.prepare(function, params, x, rules=_RECIPES[recipe], strict=True)
    t = prepared.trainable(params, prepared.calibrate(params, [x], progress=False))
    serve = functools.partial(jax.jit(prepared.apply), prepared.convert(t), x)
    return serve, functools.partial(jax.jit(prepared.fake_apply), t, x)


def _serve(network: str, recipe: str, shape: tuple[int, ...]) -> Contest:
    model, params, x = _make_network(network, shape)
    ours, twin = _convert(model.apply, params, x, recipe)
    opponents: dict[str, Call | Missing] = {
        FLOAT32: functools.partial(jax.jit(model.apply), params, x),
        QWIX: _serve_qwix(model, params, x),
        CONTRACTIONS_ALONE: _contract_alone(model.apply, params, x, recipe),
    }
    return Contest(ours, opponents, twin, x.nbytes, unlike=frozenset(opponents))


def _serve_qwix(model: nn.Module, params: Any, x: jax.Array) -> Call | Missing:
    """Return a call of the network that qwix has quantized, or why there is none."""
    if importlib.util.find_spec("qwix") is None:
        return Missing("not installed")
    import qwix

    rule = qwix.QuantizationRule(module_path=".*", weight_qtype="int8", act_qtype="int8")
    try:
        quantized = qwix.quantize_model(model, qwix.PtqProvider([rule]))
        like = jax.eval_shape(quantized.init, jax.random.key(0), x)["params"]
        codes = {"params": qwix.quantize_params(params["params"], like)}
        call = functools.partial(jax.jit(quantized.apply), codes, x)
        jax.block_until_ready(call())
    except Exception as error:  # any error of another library is reported as its result
        return Missing(f"raises {type(error).__name__}")
    return call


def _contract_alone(function: Callable[..., Any], params: Any, x: jax.Array, recipe: str) -> Call:
    """Return a call that runs the contractions of a network, on codes where the converted function does."""
    prepared = jq.prepare(function, params, x, rules=_RECIPES[recipe], strict=True)
    rows = [row for row in prepared.coverage if row.operation in OPERATIONS]
    return contract_alone(function, (params, x), [row.form == "integer" for row in rows])


def _serve_transposed(shape: tuple[int, ...]) -> Contest:
    """Return dense layers whose weights have their outputs first, against the same with their inputs first."""
    rng, (_, width, layers) = np.random.default_rng(8), shape
    weights = [jnp.asarray(rng.normal(size=(width, width)) / width**0.5, jnp.float32) for _ in range(layers)]
    x = _make_batch(_PLAIN, shape)

    def contract(params: Any, x: jax.Array) -> jax.Array:
        return functools.reduce(lambda x, w: jnp.tanh(x @ w), params, x)

    def contract_transposed(params: Any, x: jax.Array) -> jax.Array:
        return functools.reduce(lambda x, w: jnp.tanh(x @ w.T), params, x)

    transposed = [w.T for w in weights]
    ours, twin = _convert(contract_transposed, transposed, x, "dynamic")
    opponents: dict[str, Call | Missing] = {
        _PLAIN: _convert(contract, weights, x, "dynamic")[0],
        FLOAT32: functools.partial(jax.jit(contract_transposed), transposed, x),
    }
    return Contest(ours, opponents, twin, x.nbytes, unlike=frozenset((FLOAT32,)))


def _prepare(network: str, shape: tuple[int, ...]) -> Contest:
    model, params, x = _make_network(network, shape)

    def prepare() -> None:
        jq.prepare(lambda params, x: model.apply(params, x), params, x, rules=_RECIPES["dynamic"])

    def trace() -> None:
        jax.jit(lambda params, x: model.apply(params, x)).trace(params, x)

    return Contest(prepare, {_TRACE: trace}, Missing("nothing to compare"), 0)


def _convert_layers(shape: tuple[int, ...]) -> Contest:
    """Return the conversion of dense layers of different widths, against one written by hand."""
    (layers,) = shape
    rng, widths = np.random.default_rng(9), [_LEAST_WIDTH + 8 * i for i in range(layers + 1)]
    params = [jnp.asarray(rng.normal(size=pair), jnp.float32) for pair in itertools.pairwise(widths)]

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return functools.reduce(lambda x, w: jnp.tanh(x @ w), params, x)

    @jax.jit
    def quantize(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = jnp.max(jnp.abs(w), axis=0, keepdims=True) / 127
        return jnp.clip(jnp.round(w / scale), -127, 127).astype(jnp.int8), scale

    prepared = jq.prepare(apply, params, jnp.ones((1, widths[0])), rules=_RECIPES["dynamic"])
    spec = jq.QuantSpec(jnp.int8, jq.PerAxis(1))
    return Contest(
        lambda: prepared.convert(params),
        {PLAIN: lambda: [quantize(w) for w in params]},
        lambda: [jq.quantize(w, spec).codes for w in params],
        sum(w.nbytes for w in params),
        frozenset((PLAIN,)),
        lambda q: [w.codes for w in q.params],
    )


TABLES = (
    Table(
        "Converted functions",
        (FLOAT32, QWIX, CONTRACTIONS_ALONE),
        [
            Row(f"transform {network}, {recipe}", shape, functools.partial(_serve, network, recipe, shape), True)
            for network, (_, shapes) in _NETWORKS.items() for recipe in _RECIPES for shape in shapes
        ],
    ),
    Table(
        "Converted functions with transposed weights",
        (_PLAIN, FLOAT32),
        [
            Row("transform x @ W.T, dynamic", shape, functools.partial(_serve_transposed, shape))
            for shape in ((1024, 1024, 3), (64, 64, 3))
        ],
    ),
    Table(
        "Converting parameters",
        (PLAIN,),
        [Row("convert dense layers of different widths", (20,), functools.partial(_convert_layers, (20,)), True)],
    ),
    Table(
        "Preparing functions",
        (_TRACE,),
        [
            Row(f"prepare {network}", shape, functools.partial(_prepare, network, shape))
            for network, (_, shapes) in _NETWORKS.items() for shape in shapes
        ],
    ),
)  # fmt: skip
