"""The attention layers of Linen and NNX: against flax's layers, converted, and token by token with a cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxquant as jq
from jaxquant import flax as jqf
from jaxquant.flax import linen as qnn
from jaxquant.flax import nnx as qnnx

AVERAGE = jq.Static(jq.calibration.moving_average)
W, A = jq.QuantSpec("int8", jq.PerFeature()), jq.QuantSpec("uint8")
SPECS: Any = {"weight_spec": W}
DYNAMIC: Any = {"weight_spec": W, "activation_spec": A, "activation_range": jq.Dynamic()}


def sample(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(0, 1, shape), jnp.float32)


@pytest.mark.slow
def test_linen_is_close_to_flax_and_converts(rng: np.random.Generator) -> None:
    """The parameters are flax's, the result is near flax's, and conversion changes no number."""
    x, mask = sample(rng, 2, 3, 5, 12), nn.make_causal_mask(jnp.ones((2, 3, 5)))
    arguments: Any = {"num_heads": 3, "out_features": 7, "normalize_qk": True}
    plain: Any = nn.MultiHeadDotProductAttention(**arguments)
    layer: Any = qnn.MultiHeadDotProductAttention(
        **arguments, weight_spec=W, activation_spec=A, activation_range=AVERAGE
    )
    theirs = plain.init(jax.random.key(0), x, mask=mask)
    mine = jax.jit(layer.init)(jax.random.key(0), x, mask=mask)
    check_equal(mine["params"], theirs["params"])
    variables = jqf.calibrate(layer, mine, [(x,)], mask=mask)
    serving = jqf.convert(layer, variables)
    assert isinstance(serving["params"]["query"]["kernel"], jq.QuantizedArray)
    y = jax.jit(layer.apply)(variables, x, mask=mask)
    np.testing.assert_array_max_ulp(np.asarray(jax.jit(layer.apply)(serving, x, mask=mask)), np.asarray(y), maxulp=16)
    expected = plain.apply(theirs, x, mask=mask)
    np.testing.assert_allclose(y, expected, atol=0.1)
    gradients = jax.jit(jax.grad(lambda p: layer.apply({**variables, "params": p}, x, mask=mask).sum()))(
        variables["params"]
    )
    exact = jax.grad(lambda p: plain.apply({"params": p}, x, mask=mask).sum())(theirs["params"])
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, atol=0.15 * max(1.0, float(jnp.abs(b).max())))


def check_equal(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_linen_decodes_token_by_token(rng: np.random.Generator) -> None:
    """A prompt and then single tokens, under scan, give the results of the whole sequence."""
    x = sample(rng, 2, 7, 8)
    layer: Any = qnn.MultiHeadAttention(num_heads=2, decode=True, **SPECS)
    variables = layer.init(jax.random.key(0), x)
    assert variables["cache"]["kv_cache"].shape == (2, 7, 2, 4)
    assert int(variables["cache"]["kv_cache"].index) == 0
    kept = {name: value for name, value in variables.items() if name != "cache"}

    @jax.jit
    def decode(cache: Any, x: Any) -> Any:
        first, state = layer.apply({**kept, "cache": cache}, x[:, :3], mutable=["cache"])

        def step(cache: Any, token: Any) -> Any:
            y, state = layer.apply({**kept, "cache": cache}, token[:, None], mutable=["cache"])
            return state["cache"], y[:, 0]

        cache, rest = jax.lax.scan(step, state["cache"], jnp.moveaxis(x[:, 3:], 1, 0))
        return cache, jnp.concatenate([first, jnp.moveaxis(rest, 0, 1)], 1)

    cache, y = decode(variables["cache"], x)
    assert int(cache["kv_cache"].index) == 7
    whole = layer.clone(decode=False, parent=None).apply(kept, x, mask=nn.make_causal_mask(jnp.ones((2, 7))))
    # Floats that differ in their last bit may round to another code.
    np.testing.assert_allclose(y, whole, atol=0.02)


@pytest.mark.slow
def test_nnx_is_linen(rng: np.random.Generator) -> None:
    """With the same parameters NNX gives Linen's numbers, also converted."""
    x = sample(rng, 2, 5, 8)
    layer: Any = qnn.MultiHeadAttention(num_heads=2, **DYNAMIC)
    variables = layer.init(jax.random.key(0), x)
    model = qnnx.MultiHeadAttention(2, 8, **DYNAMIC, decode=False, rngs=nnx.Rngs(0))
    theirs = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    for name in ("query", "key", "value", "out"):
        for part in ("kernel", "bias"):
            variable = getattr(getattr(model, name), part)
            np.testing.assert_array_equal(variable[...], getattr(getattr(theirs, name), part)[...])
            variable[...] = variables["params"][name][part]
    expected = layer.apply(variables, x, mask=nn.make_causal_mask(jnp.ones((2, 5))))
    y = model(x, is_causal=True)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    serving = qnnx.convert(model)
    assert isinstance(serving.query.kernel.get_value(), jq.QuantizedArray)
    np.testing.assert_allclose(serving(x, is_causal=True), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_nnx_decodes_with_shared_heads(rng: np.random.Generator) -> None:
    x = sample(rng, 1, 6, 8)
    model = qnnx.MultiHeadAttention(4, 8, num_kv_heads=2, **SPECS, decode=False, rngs=nnx.Rngs(0))
    whole = model(x, is_causal=True)
    model.init_cache((1, 6, 8))
    assert model.kv_cache.get_value().shape == (1, 6, 2, 2)

    @nnx.jit
    def decode(model: Any, x: Any) -> Any:
        return model(x, decode=True)

    y = jnp.concatenate([decode(model, x[:, :3]), *(decode(model, x[:, i : i + 1]) for i in range(3, 6))], 1)
    # Floats that differ in their last bit may round to another code.
    np.testing.assert_allclose(y, whole, atol=0.02)
    assert int(model.kv_cache.get_value().index) == 6
    with pytest.raises(ValueError, match=r"append: k: expected at most 6 tokens in all"):
        model(x[:, :1], decode=True)


@pytest.mark.slow
def test_nnx_decodes_into_a_ring(rng: np.random.Generator) -> None:
    """Long after the ring is full, the results equal a cache of all tokens with a banded mask."""
    x, window = sample(rng, 2, 11, 8), 3
    specs: Any = {**SPECS, "key_spec": jq.QuantSpec("int4", jq.PerToken())}
    model = qnnx.MultiHeadAttention(4, 8, num_kv_heads=2, **specs, decode=True, rngs=nnx.Rngs(0))
    nnx.view(model, batch_size=2, max_length=5, window=window)
    with pytest.raises(ValueError, match=r"create: window: expected an int in \[1, 2\]"):
        model.init_cache((2, 2, 8), window=window)
    whole, ring = nnx.clone(model), model
    whole.init_cache((2, 11, 8))
    ring.init_cache((2, 5, 8), window=window)
    assert ring.kv_cache.get_value().window == window

    @nnx.jit
    def decode(model: Any, x: Any, mask: Any = None) -> Any:
        return model(x, mask=mask)

    places = jnp.arange(11)
    for start, count in ((0, 3), *((i, 1) for i in range(3, 11))):
        queries = start + jnp.arange(count)[:, None]
        expected = decode(whole, x[:, start : start + count], (places[None] > queries - window)[None, None])
        np.testing.assert_array_equal(decode(ring, x[:, start : start + count]), expected)
    assert int(ring.kv_cache.get_value().index) == 11


@pytest.mark.slow
def test_linen_decodes_into_a_ring(rng: np.random.Generator) -> None:
    """Linen's ring holds the bits of NNX's; the results equal a cache of all tokens with a banded mask."""
    x, window = sample(rng, 2, 11, 8), 3
    specs: Any = {**DYNAMIC, "key_spec": jq.QuantSpec("int4", jq.PerToken())}
    ring: Any = qnn.MultiHeadAttention(num_heads=2, decode=True, cache_window=window, **specs)
    whole, twin = ring.clone(cache_window=None), qnnx.MultiHeadAttention(2, 8, **specs, decode=True, rngs=nnx.Rngs(0))
    variables, all_tokens = ring.init(jax.random.key(0), x[:, :5]), whole.init(jax.random.key(0), x)
    for name, parts in variables["params"].items():
        for part, value in parts.items():
            getattr(getattr(twin, name), part)[...] = value
    twin.init_cache((2, 5, 8), window=window)
    assert variables["cache"]["kv_cache"].window == window
    with pytest.raises(ValueError, match=r"create: window: expected an int in \[1, 2\]"):
        ring.init(jax.random.key(0), x[:, :2])

    @nnx.jit
    def decode_all(caches: Any, twin: Any, x: Any, band: Any) -> Any:
        kept = {name: value for name, value in variables.items() if name != "cache"}
        y, state = ring.apply({**kept, "cache": caches[0]}, x, mutable=["cache"])
        expected, all_tokens = whole.apply({**kept, "cache": caches[1]}, x, mask=band, mutable=["cache"])
        return (y, expected, twin(x)), (state["cache"], all_tokens["cache"])

    caches, places = (variables["cache"], all_tokens["cache"]), jnp.arange(11)
    for start, count in ((0, 3), *((i, 1) for i in range(3, 11))):
        queries = start + jnp.arange(count)[:, None]
        band = (places[None] > queries - window)[None, None]
        (y, expected, other), caches = decode_all(caches, twin, x[:, start : start + count], band)
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(y, other)
        check_equal(caches[0]["kv_cache"], twin.kv_cache.get_value())
    assert int(caches[0]["kv_cache"].index) == 11


@pytest.mark.slow
def test_scales_of_tokens(rng: np.random.Generator) -> None:
    """With `PerToken()` the heads of a token share a scale in `out`: a large token does not coarsen the others."""
    x = sample(rng, 2, 4, 8)
    specs: Any = {**DYNAMIC, "activation_spec": jq.QuantSpec("int8", jq.PerToken())}
    layer: Any = qnn.DenseGeneral(5, axis=(-2, -1), **specs)
    variables = layer.init(jax.random.key(0), x.reshape(2, 4, 4, 2))
    y = layer.apply(variables, x.reshape(2, 4, 4, 2))
    flat = {"params": {**variables["params"], "kernel": variables["params"]["kernel"].reshape(8, 5)}}
    np.testing.assert_array_equal(y, qnn.Dense(5, **specs).apply(flat, x))
    serving = jqf.convert(layer, variables)
    np.testing.assert_array_equal(layer.apply(serving, x.reshape(2, 4, 4, 2)), y)
    attention: Any = qnn.MultiHeadAttention(num_heads=2, **specs)
    params = attention.init(jax.random.key(0), x)
    model: Any = qnnx.MultiHeadAttention(2, 8, **specs, decode=False, rngs=nnx.Rngs(0))
    for name, parts in params["params"].items():
        for part, value in parts.items():
            getattr(getattr(model, name), part)[...] = value
    expected = attention.apply(params, x)
    np.testing.assert_allclose(model(x), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(qnnx.convert(model)(x), expected, rtol=1e-5, atol=1e-6)


def test_nnx_metadata() -> None:
    """Metadata reach the variables that they reach in flax."""
    names = ("kernel", "bias", "out_bias", "query_ln_scale", "key_ln_scale")
    options: Any = {f"{name}_metadata": {"label": name} for name in names}
    options |= {"normalize_qk": True, "decode": False}
    mine = nnx.state(qnnx.MultiHeadAttention(2, 4, **SPECS, **options, rngs=nnx.Rngs(0)), nnx.Param)
    theirs = nnx.state(nnx.MultiHeadAttention(2, 4, **options, rngs=nnx.Rngs(0)), nnx.Param)
    labels = [{path: v.get_metadata()["label"] for path, v in nnx.to_flat_state(state)} for state in (mine, theirs)]
    assert labels[0] == labels[1]
    assert labels[0]["out", "bias"] == "out_bias"
    assert labels[0]["out", "kernel"] == "kernel"


X = jnp.ones((1, 3, 8))
ERRORS: list[tuple[Any, str]] = [
    (lambda: qnn.MultiHeadAttention(2, **SPECS, attention_fn=jnp.add), "attention_fn: expected"),
    (lambda: qnn.MultiHeadAttention(2, **SPECS, qkv_dot_general=jnp.add), "qkv_dot_general: expected None"),
    (
        lambda: qnn.MultiHeadAttention(2, **SPECS, dropout_rate=0.5, deterministic=False).init(jax.random.key(0), X),
        "dropout_rate: expected 0.0 in training",
    ),
    (lambda: qnn.MultiHeadAttention(3, **SPECS).init(jax.random.key(0), X), "qkv_features: expected a multiple"),
    (lambda: qnn.MultiHeadAttention(2, **SPECS).init(jax.random.key(0), X, None, X), "inputs_k: expected an array"),
    (
        lambda: qnn.MultiHeadAttention(2, **SPECS).init(jax.random.key(0), X, sow_weights=True),
        "sow_weights: expected False",
    ),
    (lambda: qnnx.MultiHeadAttention(3, 8, **SPECS, rngs=nnx.Rngs(0)), "qkv_features: expected a multiple of 3"),
    (lambda: qnnx.MultiHeadAttention(2, 8, **SPECS, rngs=nnx.Rngs(0))(X), "decode: expected True or False"),
    (lambda: qnnx.MultiHeadAttention(2, 8, **SPECS, decode=True, rngs=nnx.Rngs(0))(X), "decode: expected a cache"),
]


@pytest.mark.parametrize(("call", "text"), ERRORS)
def test_errors(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=rf"jaxquant\.flax\.\w+: {text}"):
        call()


@pytest.mark.slow
def test_dropout_is_off_if_deterministic() -> None:
    layer: Any = qnn.MultiHeadAttention(2, **SPECS, dropout_rate=0.5)
    layer.init(jax.random.key(0), X, deterministic=True)
    model = qnnx.MultiHeadAttention(2, 8, **SPECS, dropout_rate=0.5, deterministic=True, decode=False, rngs=nnx.Rngs(0))
    assert model(X).shape == X.shape
