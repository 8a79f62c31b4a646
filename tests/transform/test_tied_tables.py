"""A parameter with several uses is quantized once: with the finest of the Weights that rules name for its uses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq

F32 = np.float32
ROWS, FEATURES = 24, 16
TOKENS = jnp.array([[3, 0, 7, 23], [5, 6, 1, 2]])


def tied(params: Any, tokens: jax.Array) -> jax.Array:
    """Look rows up in a table, and multiply them by the table."""
    return jnp.tanh(params["table"][tokens]) @ params["table"].T


def make_params(rng: np.random.Generator) -> dict[str, jax.Array]:
    return {"table": jnp.asarray(rng.normal(size=(ROWS, FEATURES)), F32)}


def make_rules(take: jq.Weight, dot: jq.Weight, activation: jq.Activation | None = None) -> list[jq.Rule]:
    return [
        jq.Rule("table", operation="take", weight=take),
        jq.Rule("table", operation="dot_general", weight=dot, activation=activation),
    ]


def round_table(w: jax.Array, spec: jq.QuantSpec) -> np.ndarray:
    """Return a table rounded to int8 or int4 codes with a symmetric scale for each row, or block of a row, by numpy."""
    largest = {"int8": 127, "int4": 7}[str(spec.dtype)]
    size = spec.granularity.size if isinstance(spec.granularity, jq.Blocked) else FEATURES
    assert isinstance(size, int)
    parts = np.asarray(w, F32).reshape(ROWS, -1, size)
    if spec.granularity == jq.PerTensor():
        parts = parts.reshape(1, -1)
    scale = (np.abs(parts).max(-1, keepdims=True) / F32(largest)).astype(F32)
    return (np.rint(parts / scale) * scale).astype(F32).reshape(w.shape)


INT8, INT4 = jq.Weight("int8"), jq.Weight("int4")
ROW8, ROW4 = jq.QuantSpec("int8", jq.PerAxis(0)), jq.QuantSpec("int4", jq.PerAxis(0))
DYNAMIC = jq.Activation("uint8", per="row")
# The Weight of the lookup, that of the product, the activations of the product, and the spec of the table.
CASES: dict[str, tuple[jq.Weight, jq.Weight, jq.Activation | None, jq.QuantSpec]] = {
    "more bits in the lookup": (INT8, INT4, None, ROW8),
    "more bits in the product": (INT4, INT8, None, ROW8),
    "more bits before smaller groups": (INT8, jq.Weight("int4", block=4), None, ROW8),
    "smaller groups in the product": (INT8, jq.Weight("int8", block=4), None, jq.QuantSpec("int8", jq.Blocked(1, 4))),
    "smaller groups in the lookup": (jq.Weight("int4", block=8), INT4, None, jq.QuantSpec("int4", jq.Blocked(1, 8))),
    "shorter blocks": (jq.Weight("int4", block=8), jq.Weight("int4", block=4), None,
                       jq.QuantSpec("int4", jq.Blocked(1, 4))),
    "a row before the tensor": (jq.Weight("int8", per="tensor"), INT8, None, ROW8),
    "the tensor before fewer bits": (jq.Weight("int8", per="tensor"), INT4, None, jq.QuantSpec("int8")),
    "integers, more bits in the lookup": (INT8, INT4, DYNAMIC, ROW8),
    "integers, more bits in the product": (INT4, INT8, DYNAMIC, ROW8),
    "integers, blocks": (INT8, jq.Weight("int8", block=4), DYNAMIC, jq.QuantSpec("int8", jq.Blocked(1, 4))),
    "integers, blocks of the lookup": (jq.Weight("int4", block=8), INT4, DYNAMIC,
                                       jq.QuantSpec("int4", jq.Blocked(1, 8))),
    "integers cannot have 16 bits": (jq.Weight("int16"), INT8, DYNAMIC, ROW8),
    "integers cannot have a codebook": (jq.Weight(jq.nf4, block=4), INT4, DYNAMIC, ROW4),
    "integers cannot be floats": (jq.Weight("float8_e4m3fn", block=4), INT8, DYNAMIC, ROW8),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_finest_weight_serves_all_uses(name: str, rng: np.random.Generator) -> None:
    take, dot, activation, spec = CASES[name]
    params = make_params(rng)
    prepared = jq.prepare(tied, params, TOKENS, rules=make_rules(take, dot, activation), strict=True)
    rows = prepared.coverage.rows
    assert [row.form for row in rows] == ["lookup", "weight-only" if activation is None else "integer"]
    assert [row.weight for row in rows] == [spec, spec]
    # Both rows say that, and why.
    assert rows[0].reason == rows[1].reason
    assert rows[0].reason.startswith(f"all uses of table have {spec.dtype}")
    assert " for table#1; " in rows[0].reason
    assert rows[0].reason in str(prepared.coverage)
    converted = prepared.convert(params)
    rounded = round_table(params["table"], spec)
    np.testing.assert_array_equal(converted.params["table"].dequantize(), rounded)
    wide = rounded.astype(np.float64)
    x = np.tanh(wide[np.asarray(TOKENS)])
    # Activations of 8 bits have half a step of error in each of the products.
    limit = 1e-4 if activation is None else 2 / 255 * np.abs(wide).sum(1).max()
    assert np.abs(jax.jit(prepared.apply)(converted, TOKENS) - x @ wide.T).max() < limit
    np.testing.assert_allclose(
        jax.jit(prepared.fake_apply)(params, TOKENS), prepared.apply(converted, TOKENS), 1e-5, 1e-5
    )


@pytest.mark.parametrize("recipe", ["weight_only_int4", "w4a8"])
def test_recipes_of_4_bits_keep_tied_tables_in_8(recipe: str, rng: np.random.Generator) -> None:
    """Their lookups have int8, so a table that is also the output layer has it, too."""
    params = {**make_params(rng), "up": jnp.ones((FEATURES, 32)), "down": jnp.ones((32, FEATURES))}

    def network(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["table"][tokens]
        return (jax.nn.relu(x @ params["up"]) @ params["down"]) @ params["table"].T

    rows = jq.prepare(network, params, TOKENS, rules=getattr(jq.recipes, recipe)(), strict=True).coverage.rows
    assert {row.name: str(row.weight and row.weight.dtype) for row in rows} == {
        "table": "int8", "up": "int4", "down": "int4", "table#1": "int8"
    }  # fmt: skip
    assert [bool(row.reason) for row in rows] == [True, False, False, True]


@pytest.mark.parametrize("recipe", ["weight_only_int8", "w8a8_dynamic"])
def test_equal_weights_need_no_reason(recipe: str, rng: np.random.Generator) -> None:
    prepared = jq.prepare(tied, make_params(rng), TOKENS, rules=getattr(jq.recipes, recipe)())
    assert not any(row.reason for row in prepared.coverage)
    # Two spellings of a dtype are one.
    rules = make_rules(jq.Weight("int8"), jq.Weight(jnp.int8))
    assert not any(row.reason for row in jq.prepare(tied, make_params(rng), TOKENS, rules=rules).coverage)


def test_two_products_have_the_finest_weight(rng: np.random.Generator) -> None:
    def again(params: Any, x: jax.Array) -> jax.Array:
        return (x @ params["w"]) * ((x + 1) @ params["w"])

    rules = [
        jq.Rule(where=lambda site: site.name == "w", weight=INT4, activation=jq.Activation("int8")),
        jq.Rule(weight=INT8, activation=jq.Activation("int8")),
    ]
    params = {"w": jnp.asarray(rng.normal(size=(8, 6)), F32)}
    rows = jq.prepare(again, params, jnp.ones((2, 8)), rules=rules, strict=True).coverage.rows
    assert [str(row.weight) for row in rows] == [str(jq.QuantSpec("int8", jq.PerAxis(1)))] * 2
    assert rows[0].reason == "all uses of w have int8, the finest that rules name (int4 for w; int8 for w#1)"


def test_weights_that_no_use_can_share_are_refused() -> None:
    def network(params: Any, x: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(x, params["w"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return y + x @ params["w"][0]

    rules = [
        jq.Rule(operation="dot_general", weight=jq.Weight("int8", block=4), activation=DYNAMIC),
        jq.Rule(weight=jq.Weight("float8_e4m3fn")),
    ]
    expected = r"prepare: rules: expected one Weight for all uses of w, or one that each of them can take, got "
    with pytest.raises(ValueError, match=expected + r"float8_e4m3fn for w; int8 in blocks of 4 for w#1"):
        jq.prepare(network, {"w": jnp.ones((1, 8, 8))}, jnp.ones((2, 5, 8)), rules=rules)


def test_linen_and_nnx_tables(rng: np.random.Generator) -> None:
    """`Embed.attend`, and a parameter that two NNX layers share, are uses of one parameter."""
    linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            table = linen.Embed(ROWS, FEATURES, name="table")
            return table.attend(jnp.tanh(table(tokens)))

    class Shared(nnx.Module):
        def __init__(self) -> None:
            self.table = nnx.Embed(ROWS, FEATURES, rngs=nnx.Rngs(0))
            self.head = nnx.Embed(ROWS, FEATURES, rngs=nnx.Rngs(1))
            self.head.embedding = self.table.embedding

        def __call__(self, tokens: jax.Array) -> jax.Array:
            return self.head.attend(jnp.tanh(self.table(tokens)))

    model, shared = Model(), Shared()
    variables = model.init(jax.random.key(0), TOKENS)
    rules = jq.recipes.weight_only_int4(block=8)
    pairs: list[tuple[Any, Any]] = [(model.apply, variables), (lambda m, tokens: m(tokens), shared)]
    for function, params in pairs:
        prepared = jq.prepare(function, params, TOKENS, rules=rules, strict=True)
        assert [row.form for row in prepared.coverage] == ["lookup", "weight-only"]
        assert [str(row.weight and row.weight.dtype) for row in prepared.coverage] == ["int8", "int8"]
        named = "int4 in blocks of 8, scale_dtype=float16, symmetric=False for "
        assert all(named in row.reason for row in prepared.coverage)
        y = prepared.apply(prepared.convert(params), TOKENS)
        assert np.abs(np.asarray(y) - np.asarray(function(params, TOKENS))).max() < 0.05


def test_allocated_bits_are_those_that_were_measured(rng: np.random.Generator) -> None:
    """The plan's rules give a tied table the Weight of the spec whose bytes and damage are in its table."""
    pytest.importorskip("scipy")
    params = make_params(rng)
    prepared = jq.prepare(tied, params, TOKENS, rules=jq.recipes.weight_only_int4(block=4))
    plan = ptq.allocate_bits(prepared, params, [TOKENS], budget=10**6, dtypes=("int4",))
    again = jq.prepare(tied, params, TOKENS, rules=plan.rules, strict=True)
    assert [row.weight for row in again.coverage] == [ROW4, ROW4]
    assert again.convert(params).params["table"].nbytes == plan.nbytes
