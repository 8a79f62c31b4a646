"""Networks that were not written for quantization, in the style of the users of each framework.

Each function returns a function of parameters and inputs, the parameters, and a function that samples inputs for a
batch size.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

CLASSES = 10


class Network(NamedTuple):
    """A network.

    Attributes:
        apply: a function of the parameters and a batch.
        params: the parameters.
        sample: a function of a key of `jax.random` and a batch size, which returns a batch.
    """

    apply: Callable[..., Any]
    params: Any
    sample: Callable[[jax.Array, int], Any]


def _make_rng(key: jax.Array) -> np.random.Generator:
    # Numpy compiles no programs.
    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def _sample_images(key: jax.Array, size: int) -> jax.Array:
    return jnp.asarray(_make_rng(key).uniform(0, 1, (size, 8, 8, 1)), jnp.float32)


def _sample_rows(key: jax.Array, size: int) -> jax.Array:
    return jnp.asarray(_make_rng(key).uniform(0, 1, (size, 8, 8)), jnp.float32)


def _sample_tokens(key: jax.Array, size: int) -> jax.Array:
    return jnp.asarray(_make_rng(key).integers(0, 16, (size, 8)), jnp.int32)


def _initialize(shapes: Any) -> Any:
    """Return parameters with random kernels, biases of 0 and scales of 1, for a tree of their shapes."""
    rng = np.random.default_rng(0)

    def make(path: Any, x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        name = jax.tree_util.keystr(path)
        if len(x.shape) > 1:
            inputs = x.shape[-1] if "weight" in name else math.prod(x.shape[:-1])
            return jnp.asarray(rng.normal(0, inputs**-0.5, x.shape), x.dtype)
        return jnp.full(x.shape, "scale" in name or "var" in name, x.dtype)

    return jax.tree_util.tree_map_with_path(make, shapes, is_leaf=lambda x: isinstance(x, jax.ShapeDtypeStruct))


def _init_linen(model: nn.Module, sample: Any) -> Network:
    shapes = jax.eval_shape(model.init, jax.random.key(0), sample(jax.random.key(1), 2))
    return Network(model.apply, _initialize(shapes), sample)


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for features in (64, 32):
            x = nn.relu(nn.Dense(features)(x))
        return nn.Dense(CLASSES)(x)


class LinenCNN(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        for features in (8, 16):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(CLASSES)(x.reshape(x.shape[0], -1))


class LinenSeparable(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        for features in (16, 16):
            x = nn.relu(nn.Conv(x.shape[-1], (3, 3), feature_group_count=x.shape[-1])(x))
            x = nn.relu(nn.Conv(features, (1, 1))(x))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class LinenRNN(nn.Module):
    cell: type[nn.RNNCellBase]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(CLASSES)(nn.RNN(self.cell(16))(x)[:, -1])  # pyright: ignore


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(h, h, mask=mask)
        h = nn.gelu(nn.Dense(64)(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(h)


class LinenEncoder(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(32)(x) + self.param("position", nn.initializers.normal(0.02), (1, 8, 32))
        for _ in range(2):
            x = LinenBlock()(x)
        return nn.Dense(CLASSES)(x.mean(1))


class _ScannedBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return LinenBlock()(x, nn.make_causal_mask(jnp.ones(x.shape[:2]))), None


class LinenDecoder(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(16, 32)
        block = nn.scan(nn.remat(_ScannedBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = block()(embed(tokens), None)
        return embed.attend(nn.LayerNorm()(x))


class LinenMixer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(16, (2, 2), (2, 2))(x).reshape(x.shape[0], 16, 16)
        for _ in range(2):
            y = nn.LayerNorm()(x).swapaxes(1, 2)
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(y))).swapaxes(1, 2)
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
        return nn.Dense(CLASSES)(x.mean(1))


class LinenUNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        first = nn.relu(nn.Conv(8, (3, 3))(x))
        x = nn.relu(nn.Conv(16, (3, 3), (2, 2))(first))
        x = nn.relu(nn.ConvTranspose(8, (2, 2), (2, 2))(x))
        return nn.Conv(2, (1, 1))(jnp.concatenate([x, first], -1)).mean((1, 2))


class LinenExperts(nn.Module):
    """A mixture of experts: each token goes through all experts, weighted by a router."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        weights = nn.softmax(nn.Dense(4)(x))
        experts = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=4)  # pyright: ignore
        return jnp.einsum("be,ebc->bc", weights, experts(CLASSES)(x))


class LinenCachedAttention(nn.Module):
    """One step of decoding: attention to the tokens before, of which a cache holds keys and values."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(32)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, decode=True)(nn.LayerNorm()(x))
        return nn.Dense(CLASSES)(x)


def _linen_cached_decoder() -> Network:
    model = LinenCachedAttention()
    params = _initialize(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((2, 8, 8)))["params"])

    def apply(params: Any, x: jax.Array) -> jax.Array:
        shapes = jax.eval_shape(model.init, jax.random.key(0), x)["cache"]

        def step(cache: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            y, updated = model.apply({"params": params, "cache": cache}, x[:, None], mutable="cache")
            return updated["cache"], y[:, 0]

        start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.scan(step, start, x.swapaxes(0, 1))[1].swapaxes(0, 1)

    return Network(apply, params, _sample_rows)


def _init_nnx(kind: type[nnx.Module], sample: Any) -> Network:
    graph, shapes = nnx.split(nnx.eval_shape(lambda: kind(nnx.Rngs(0))))  # pyright: ignore
    return Network(lambda state, x: nnx.merge(graph, state)(x), _initialize(shapes), sample)


class NnxCNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, use_running_average=True, rngs=rngs)
        self.out = nnx.Linear(64, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.first(x)), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.norm(self.second(x))), (2, 2), (2, 2))
        return self.out(x.reshape(x.shape[0], -1))


class NnxTransformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Linear(8, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(32, rngs=rngs) for _ in range(2)])
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
        self.out = nnx.Linear(32, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(nnx.gelu(self.up(self.norms[1](x))))
        return self.out(x.mean(1))


def _equinox_mlp() -> Network:
    eqx = importlib.import_module("equinox")
    model = _initialize(eqx.filter_eval_shape(eqx.nn.MLP, 64, CLASSES, 48, 2, key=jax.random.key(0)))
    return Network(lambda model, x: jax.vmap(model)(x.reshape(x.shape[0], -1)), model, _sample_images)


def _equinox_cnn() -> Network:
    eqx = importlib.import_module("equinox")

    def make(keys: jax.Array) -> Any:
        first, second = eqx.nn.Conv2d(1, 8, 3, key=keys[0]), eqx.nn.Conv2d(8, 16, 3, key=keys[1])
        relu, pool = eqx.nn.Lambda(jax.nn.relu), eqx.nn.MaxPool2d(2, 2)
        out = eqx.nn.Linear(16, CLASSES, key=keys[2])
        return eqx.nn.Sequential([first, relu, pool, second, relu, eqx.nn.Lambda(jnp.ravel), out])

    model = _initialize(eqx.filter_eval_shape(make, jax.random.split(jax.random.key(0), 3)))
    return Network(lambda model, x: jax.vmap(model)(x.transpose(0, 3, 1, 2)), model, _sample_images)


def _haiku_mlp() -> Network:
    hk = importlib.import_module("haiku")

    def forward(x: jax.Array) -> jax.Array:
        return hk.nets.MLP([48, 32, CLASSES])(x.reshape(x.shape[0], -1))

    model = hk.without_apply_rng(hk.transform(forward))
    params = _initialize(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((2, 8, 8, 1))))
    return Network(model.apply, params, _sample_images)


def _plain_mlp() -> Network:
    layers = [
        {"weight": jax.ShapeDtypeStruct((out, n), jnp.float32), "b": jnp.zeros(out)}
        for n, out in itertools.pairwise((64, 48, 32, CLASSES))
    ]

    def apply(params: Any, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for place, layer in enumerate(params):
            x = x @ layer["weight"].T + layer["b"][None]
            x = x if place == len(params) - 1 else jnp.tanh(x)
        return x

    return Network(apply, _initialize(layers), _sample_images)


def _plain_decoder() -> Network:
    width, layers, tokens = 32, 3, 16
    shapes = {
        "table": (tokens, width),
        "layers": {
            "qkv": (layers, width, 3 * width),
            "out": (layers, width, width),
            "up": (layers, width, 2 * width),
            "down": (layers, 2 * width, width),
        },
    }
    params = _initialize(
        jax.tree.map(lambda n: jax.ShapeDtypeStruct(n, jnp.float32), shapes, is_leaf=lambda n: isinstance(n, tuple))
    )

    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        query, key, value = jnp.split(_normalize(x) @ layer["qkv"], 3, axis=-1)
        scores = jnp.einsum("btd,bsd->bts", query, key) / width**0.5
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jax.nn.softmax(jnp.where(mask, scores, jnp.full((), -1e9)), axis=-1)
        x = x + jnp.einsum("bts,bsd->btd", scores, value) @ layer["out"]
        return x + jax.nn.silu(_normalize(x) @ layer["up"]) @ layer["down"], None

    def apply(params: Any, ids: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(jax.checkpoint(block), params["table"][ids], params["layers"])
        return _normalize(x) @ params["table"].T

    return Network(apply, params, _sample_tokens)


def _normalize(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + jnp.full((), 1e-6))


NETWORKS: dict[str, Callable[[], Network]] = {
    "linen mlp": lambda: _init_linen(LinenMLP(), _sample_images),
    "linen cnn": lambda: _init_linen(LinenCNN(), _sample_images),
    "linen separable cnn": lambda: _init_linen(LinenSeparable(), _sample_images),
    "linen lstm": lambda: _init_linen(LinenRNN(nn.OptimizedLSTMCell), _sample_rows),
    "linen gru": lambda: _init_linen(LinenRNN(nn.GRUCell), _sample_rows),
    "linen encoder": lambda: _init_linen(LinenEncoder(), _sample_rows),
    "linen decoder": lambda: _init_linen(LinenDecoder(), _sample_tokens),
    "linen cached decoder": _linen_cached_decoder,
    "linen mixer": lambda: _init_linen(LinenMixer(), _sample_images),
    "linen unet": lambda: _init_linen(LinenUNet(), _sample_images),
    "linen experts": lambda: _init_linen(LinenExperts(), _sample_images),
    "nnx cnn": lambda: _init_nnx(NnxCNN, _sample_images),
    "nnx transformer": lambda: _init_nnx(NnxTransformer, _sample_rows),
    "equinox mlp": _equinox_mlp,
    "equinox cnn": _equinox_cnn,
    "haiku mlp": _haiku_mlp,
    "plain mlp": _plain_mlp,
    "plain decoder": _plain_decoder,
}
# The frameworks whose absence skips a test.
FRAMEWORKS = {"equinox": "equinox", "haiku": "haiku"}


@functools.cache
def make_network(name: str) -> Network:
    """Return a network by its name."""
    return NETWORKS[name]()
