"""Weights with offsets, and with quantized scales in blocks: GGUF's types, and the moves of a program."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxquant as jq
from jaxquant import checkpoint

from ..support.equality import same_bits

# The most that the norm of the error may be of the norm of the weights: 200 draws of a type reached 0.87 of it at most.
ERRORS = {
    "Q4_1": 0.1, "Q5_1": 0.046, "Q2_K": 0.4, "Q3_K": 0.24, "Q4_K": 0.1, "Q5_K": 0.046, "Q6_K": 0.024,
    "IQ4_NL": 0.11, "IQ4_XS": 0.11,
}  # fmt: skip
HALF = {"offset": True, "scale_dtype": "float16"}
NESTED = {"offset": True, "scale_spec": jq.QuantSpec("uint6", scale_dtype="float16")}
WEIGHTS = {
    "offset": jq.Weight("uint4", block=4, options=HALF),
    "offset of rows": jq.Weight("uint4", options=HALF),
    "nested": jq.Weight("uint4", block=4, options=NESTED, scale_block=2),
    "one scale of scales": jq.Weight("uint5", block=4, options=NESTED),
}


def draw(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(0, 0.25, shape) + rng.normal(0, 0.1), jnp.float32)


def check_near(actual: Any, expected: Any) -> None:
    """Check results of the same codes: the floats are added in another order."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        wide = np.asarray(b, np.float64)
        np.testing.assert_allclose(np.asarray(a, np.float64), wide, rtol=0, atol=1e-5 * np.abs(wide).max())


@pytest.mark.parametrize("type", ERRORS)
def test_codes_of_a_recipe_are_saved(type: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """The package gguf reads the numbers that the function computed with, for weights of either layout."""
    gguf = pytest.importorskip("gguf")
    params = {"up.weight": draw(rng, 8, 256), "down.weight": draw(rng, 256, 8)}
    x = draw(rng, 3, 256)

    def function(params: Any, x: jax.Array) -> Any:
        return [jnp.einsum("bi,oi->bo", x, params["up.weight"]), x @ params["down.weight"]]

    prepared = jq.prepare(function, params, x, rules=jq.recipes.gguf(type), strict=True)
    q = prepared.convert(params)
    y = jax.jit(prepared.apply)(q, x)
    floats = {name: np.asarray(w.dequantize()) for name, w in q.params.items()}
    with jax.default_matmul_precision("highest"):
        check_near(y, function({name: jnp.asarray(w) for name, w in floats.items()}, x))
    for name, w in params.items():
        assert np.linalg.norm(floats[name] - w) < ERRORS[type] * np.linalg.norm(w)
    path = tmp_path / "a.gguf"
    named = {"up.weight": q.params["up.weight"], "down.weight": q.params["down.weight"].T}
    checkpoint.save(path, named, checkpoint.Info("gguf"))
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    for name, tensor in tensors.items():
        assert tensor.tensor_type.name == type
        expected = floats[name] if name == "up.weight" else floats[name].T
        same_bits(gguf.dequantize(tensor.data, tensor.tensor_type), np.ascontiguousarray(expected))
    assert len(tensors) == 2


def move(params: Any, x: jax.Array, start: jax.Array) -> Any:
    """Products with a parameter that was tiled, broadcast, reshaped, reversed, joined, and sliced at a traced index."""
    w, stack = params["w"], params["stack"]
    tiled = jnp.tile(w, (1, 2))
    shared = jnp.einsum("bi,eio->beo", x, jnp.broadcast_to(w, (3, 16, 16)))
    rows = lax.dynamic_slice(w, (start, jnp.int32(0)), (8, 16))
    layer = lax.dynamic_index_in_dim(stack, start, keepdims=False)
    scanned = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]
    joined = jnp.concatenate([stack[0], stack[1]], 1)
    chosen = jax.vmap(lambda r: r @ w)(x)
    return [
        x @ tiled, shared, x[:, :8] @ rows, x @ layer, scanned, x @ joined, chosen, x @ w[::-1], x[:, 4:12] @ w[4:12],
        x @ w.reshape(16, 2, 8)[:, 1],
    ]  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_moved_weights_keep_their_codes(name: str, rng: np.random.Generator) -> None:
    params, x = {"w": draw(rng, 16, 16), "stack": draw(rng, 3, 16, 16)}, draw(rng, 4, 16)
    rules = [jq.Rule(weight=WEIGHTS[name])]
    prepared = jq.prepare(move, params, x, jnp.int32(0), rules=rules, strict=True)
    assert not prepared.coverage.floats
    q = prepared.convert(params)
    floats = {name: w.dequantize() for name, w in q.params.items()}
    for start in (0, 2):
        y = jax.jit(prepared.apply)(q, x, jnp.int32(start))
        with jax.default_matmul_precision("highest"):
            check_near(y, move(floats, x, jnp.int32(start)))
            check_near(y, prepared.apply(q, x, jnp.int32(start)))
    fake = jax.jit(prepared.fake_apply)(prepared.trainable(params), x, jnp.int32(2))
    check_near(fake, y)


def test_scale_blocks_are_checked() -> None:
    expected = jq.QuantSpec(
        "uint4", jq.Blocked(0, 4), offset=True,
        scale_spec=jq.QuantSpec("uint6", jq.Blocked(0, 2), scale_dtype="float16"),
    )  # fmt: skip
    x, w = jnp.ones((2, 16)), jnp.ones((16, 3))
    prepared = jq.prepare(lambda w, x: x @ w, w, x, rules=[jq.Rule(weight=WEIGHTS["nested"])], strict=True)
    assert [row.weight for row in prepared.coverage.rows] == [expected]
    for options, match in (
        ({"block": 4, "scale_block": 2}, "scale_block: expected None without block= and without a scale_spec"),
        ({"options": NESTED, "scale_block": 2}, "scale_block: expected None without block="),
        ({"block": 4, "options": NESTED, "scale_block": 0}, "scale_block: expected a positive int or None, got 0"),
    ):
        with pytest.raises(ValueError, match=rf"^jaxquant\.Weight: {match}"):
            jq.Weight("uint4", **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^jaxquant\.Weight: scale_block"):
        jq.Weight("uint4", block=4, options=NESTED, scale_block="two")  # type: ignore[arg-type]
