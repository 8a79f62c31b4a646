"""Rotations: the matrices, what is rotated, what is not, and that the float function stays the same."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq
from jaxquant.ptq.rotate import choose_block, make_hadamard

F32 = np.float32
RULES = (jq.Rule(weight=jq.Weight("int4")),)


def test_hadamard_matrices() -> None:
    """Orthogonal, with entries of 1 and -1; for each size that powers of two and Paley's constructions reach."""
    sizes = [n for n in range(1, 129) if choose_block(n) == n]
    # Of the multiples of 4 up to 128, these need other constructions.
    assert sizes == [1, 2, *(n for n in range(4, 129, 4) if n not in (52, 92, 100, 116))]
    for size in (*sizes, 384, 768, 1536):
        matrix = make_hadamard(size).astype(float)  # exact, and fast to multiply
        np.testing.assert_array_equal(np.abs(matrix), 1)
        np.testing.assert_array_equal(matrix @ matrix.T, size * np.eye(size))
    assert [choose_block(n) for n in (3, 10, 92, 100, 384, 11008)] == [1, 2, 4, 20, 384, 11008]


def check_same_function(apply: Any, params: Any, rotated: Any, *args: Any) -> None:
    assert jax.tree.structure(params) == jax.tree.structure(rotated)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        expected, actual = (
            np.asarray(apply(*jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), (p, *args))))
            for p in (params, rotated)
        )
    # In float64, so that what remains is the rounding of the parameters.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def attend(params: Any, x: jax.Array) -> jax.Array:
    """Attention as PyTorch stores it, with joined heads."""
    query, key, value = (
        (x @ params[name].T + params[f"{name}_bias"][None, None]).reshape(*x.shape[:2], 4, 6) for name in "qkv"
    )
    context = jax.nn.dot_product_attention(query, key, value).reshape(*x.shape[:2], 24)
    return x + context @ params["out"].T


def sample(rng: np.random.Generator, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), F32) for name, shape in shapes.items()}


@pytest.mark.slow
def test_values_of_attention(rng: np.random.Generator) -> None:
    shapes = dict.fromkeys("qkv", (24, 16)) | {f"{name}_bias": (24,) for name in "qkv"} | {"out": (16, 24)}
    params = sample(rng, **shapes)
    x = jnp.asarray(rng.normal(size=(2, 5, 16)), F32)
    prepared = jq.prepare(attend, params, x, rules=RULES)
    rotated, notes = ptq.rotate(prepared, params, x, key=jax.random.key(int(rng.integers(100))))
    # Heads of 6 channels, which have no Hadamard matrix, but blocks of 2.
    assert notes["v"].action == "outputs rotated in blocks of 2"
    assert notes["out"].action == "inputs rotated in blocks of 2"
    assert notes["q"].action == notes["k"].action == "unchanged"
    assert "a product with other activations sums its outputs" in notes["k"].reason
    for name in params:
        is_same = bool((rotated[name] == params[name]).all())
        assert is_same == (name not in ("v", "v_bias", "out")), name
    check_same_function(attend, params, rotated, x)


class Layers(nn.Module):
    """Flax's attention, a decomposed layer with a sum and a factor in between, and two convolutions."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.MultiHeadDotProductAttention(2, qkv_features=24, name="attention")(x)
        x = 0.5 * nn.Dense(20, name="down")(x).mean(1)
        x = nn.Dense(16, name="up")(x) + nn.Dense(16, use_bias=False, name="side")(x)
        x = nn.Conv(8, (1, 1), name="first")(x.reshape(-1, 4, 4, 1))
        return nn.Conv(2, (3, 3), name="second")(x)


@pytest.mark.slow
def test_layers(rng: np.random.Generator) -> None:
    x, model = jnp.asarray(rng.normal(size=(2, 5, 16)), F32), Layers()
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    params = jax.tree.map(lambda s: jnp.asarray(rng.normal(0.1, 0.3, s.shape), F32), shapes)
    prepared = jq.prepare(model.apply, params, x, rules=RULES)
    rotated, notes = ptq.rotate(prepared, params, x)
    actions = {note.path.removeprefix("params/").removesuffix("/kernel"): note.action for note in notes}
    assert actions == {
        "attention/query": "unchanged", "attention/key": "unchanged",
        "attention/value": "outputs rotated in blocks of 12",
        "attention/out": "inputs rotated in blocks of 12, outputs rotated in blocks of 16",
        "down": "inputs rotated in blocks of 16, outputs rotated in blocks of 20",
        "up": "inputs rotated in blocks of 20", "side": "inputs rotated in blocks of 20",
        "first": "outputs rotated in blocks of 8", "second": "inputs rotated in blocks of 8",
    }, str(notes)  # fmt: skip
    check_same_function(model.apply, params, rotated, x)


def test_what_a_rotation_would_change_stays(rng: np.random.Generator) -> None:
    """Between the contractions: a relu, a sum with other activations, factors of each channel, a second result."""
    names = [f"{name}_{side}" for name in ("relu", "residual", "scale", "result", "offset", "norm") for side in "ab"]
    params = sample(rng, **dict.fromkeys([*names, "twice"], (8, 8)), factors=(8,), shared=(8,))
    x = jnp.asarray(rng.normal(size=(3, 8)), F32)

    def apply(params: Any, x: jax.Array) -> Any:
        h = {name: x @ params[f"{name}_a"] for name in ("relu", "residual", "scale", "result", "offset", "norm")}
        h["relu"] = jax.nn.relu(h["relu"])
        h["residual"] = h["residual"] + x
        h["scale"] = h["scale"] * params["factors"][None]
        y = h["result"]
        h["offset"] = h["offset"] + params["shared"][None]
        h["norm"] = h["norm"] / jnp.linalg.norm(h["norm"], axis=-1, keepdims=True)
        results = [h[name] @ params[f"{name}_b"] for name in h]
        return y, sum(results) + params["shared"][None], (x @ params["twice"]) @ params["twice"]

    prepared = jq.prepare(apply, params, x, rules=RULES)
    rotated, notes = ptq.rotate(prepared, params, x)
    assert {note.action for note in notes} == {"unchanged"}, str(notes)
    reasons = {note.path: note.reason for note in notes if note.path.endswith("_a") or note.path == "twice"}
    assert reasons["relu_a"].startswith(("max", "custom_jvp_call", "jit"))
    assert reasons["residual_a"] == "add reads its outputs"
    assert reasons["scale_a"] == "mul multiplies its outputs by different numbers"
    assert reasons["result_a"] == "outputs of the function"
    assert reasons["offset_a"] == "what is added to its outputs is shared"
    assert reasons["twice"] == "a parameter with several uses"
    jax.tree.map(np.testing.assert_array_equal, params, rotated)


@pytest.mark.slow
def test_rotations_help_outliers(rng: np.random.Generator) -> None:
    """Of a decomposed layer of which a channel is much larger: fewer errors with codes of activations between."""
    params = sample(rng, down=(32, 128), up=(128, 16))
    params["down"] = params["down"].at[:, 3].mul(40)
    x = jnp.asarray(rng.normal(size=(64, 32)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return (x @ params["down"]) @ params["up"]

    prepared = jq.prepare(apply, params, x, rules=jq.recipes.w8a8_dynamic())
    rotated, notes = ptq.rotate(prepared, params, x, key=jax.random.key(0))
    assert notes["down"].after < 0.5 * notes["down"].before  # type: ignore[operator]
    errors = [
        float(jnp.sum((prepared.apply(prepared.convert(p), x) - apply(params, x)) ** 2)) for p in (params, rotated)
    ]
    assert errors[1] < 0.9 * errors[0]


def test_errors(rng: np.random.Generator) -> None:
    params = sample(rng, w=(4, 4))
    prepared = jq.prepare(lambda params, x: x @ params["w"], params, jnp.ones((2, 4)), rules=RULES)
    with pytest.raises(TypeError, match=r"jaxquant\.ptq\.rotate: prepared: expected a Prepared, got int"):
        ptq.rotate(3, params, jnp.ones((2, 4)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"jaxquant\.ptq\.rotate: params: expected"):
        ptq.rotate(prepared, {"v": params["w"]}, jnp.ones((2, 4)))
