"""The compiled programs of prepared functions: integer contractions, and no floats of a weight's size."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..cases.networks import make_network
from ..support.hlo import Program, buffers_of, width
from ..support.prepared import RECIPES, find_ranges

PRODUCTS = ("plain mlp", "linen lstm", "linen encoder", "plain decoder")
# XLA:CPU may rewrite a small convolution, and zero points add contractions for padded borders.
# Codes that are symmetric about 0: with a zero point, one more contraction may sum the weights.
SIGNED = (
    jq.Rule(operation="dot_general", weight=jq.Weight("int8"), activation=jq.Activation("int8", per="row")),
    jq.Rule(operation="take", weight=jq.Weight("int8")),
)
STATIC = (
    jq.Rule(
        operation="dot_general",
        weight=jq.Weight("int8"),
        activation=jq.Activation("int8", range=jq.Static(jq.calibration.absmax)),
    ),
    jq.Rule(operation="take", weight=jq.Weight("int8")),
)
ROWS: dict[str, tuple[jq.Rule, ...]] = {"signed": SIGNED, "signed static": STATIC}
ROWS["activations"] = (jq.Rule(operands="activations", activation=jq.Activation("int8", per="row")), *SIGNED)
CONVOLUTIONS = ("linen cnn", "linen separable cnn")


def _prepare(name, recipe):
    network = make_network(name)
    x = network.sample(jax.random.key(1), 4)
    prepared = jq.prepare(network.apply, network.params, x, rules={**RECIPES, **ROWS}[recipe])
    return prepared, (prepared.convert(network.params, find_ranges(prepared, network.params, x)), x)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", list(ROWS))
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.sample(1)
def test_integer_contractions_are_as_many_as_rows(name, recipe):
    prepared, arguments = _prepare(name, recipe)
    contractions = Program(prepared.apply, *arguments).contractions()
    forms = [row.form for row in prepared.coverage.rows]
    assert sum(c.result[0] == "s32" for c in contractions) == forms.count("integer")
    assert sum(c.result[0] != "s32" for c in contractions) == forms.count("float")


@pytest.mark.parametrize("recipe", ["w8a8_dynamic", "w8a8_static"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.sample(1)
def test_convolutions_are_of_integers(name, recipe):
    prepared, arguments = _prepare(name, recipe)
    assert all(row.form == "integer" for row in prepared.coverage.rows)
    contractions = Program(prepared.apply, *arguments).contractions()
    assert contractions
    assert all(c.result[0] == "s32" for c in contractions)


def _make_wide(rng):
    width = 512
    names = ("first", "second", "third")
    params = {name: jnp.asarray(rng.normal(0, width**-0.5, (width, width)), jnp.float32) for name in names}

    def apply(params, x):
        x = jax.nn.relu(x @ params["first"])
        return jax.nn.relu(x @ params["second"].T) @ params["third"]

    return apply, params, jnp.asarray(rng.normal(0, 1, (16, width)), jnp.float32)


@pytest.mark.parametrize("recipe", ["w8a8_dynamic", "w8a8_static"])
def test_no_float_array_of_the_size_of_a_weight(recipe, rng):
    apply, params, x = _make_wide(rng)
    prepared = jq.prepare(apply, params, x, rules=RECIPES[recipe], strict=True)
    arguments = prepared.convert(params, find_ranges(prepared, params, x)), x
    size = params["first"].size
    program = Program(prepared.apply, *arguments)
    assert program.widest() < size
    constants = [shape for i in _list_constants(program) for shape in i.results if width(shape[0]) > 8]
    assert max((math.prod(shape) for _, shape in constants), default=0) < size / 8
    memory: Any = jax.jit(prepared.apply).lower(*arguments).compile().memory_analysis()
    # The codes of three weights, and little else.
    assert memory.argument_size_in_bytes < 3 * size + 4 * x.size + 3 * 4 * 512 + 1024
    # Activations only.
    assert memory.temp_size_in_bytes < size


def _step_decoder(params, x, caches, by_index):
    """Read one token [1, 256] in layers that a scan runs, each with its cache."""

    def layer(x, slices):
        weights, cache = slices
        q, k, v = (jnp.reshape(x @ weights[name], (1, 1, 4, 64)) for name in "qkv")
        cache = cache.append(k, v)
        x = x + jq.attention(q, cache).reshape(1, 256) @ weights["o"].T
        return x + jax.nn.silu(x @ weights["up"]) @ weights["down"], cache

    if not by_index:
        return jax.lax.scan(layer, x, (params, caches))

    def take_layer(x, slices):
        number, cache = slices
        weights = {name: jax.lax.dynamic_index_in_dim(w, number, keepdims=False) for name, w in params.items()}
        return layer(x, (weights, cache))

    return jax.lax.scan(take_layer, x, (jnp.arange(len(params["q"])), caches))


@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize("recipe", ["weight_only_int4"])
def test_a_scan_takes_layers_of_four_bits_in_place(recipe, by_index, rng):
    """XLA:CPU converts codes of 4 bits to int8 before it slices them: `convert` holds those of a loop in words."""
    layers, shapes = 8, {**dict.fromkeys("qkvo", (256, 256)), "up": (256, 512), "down": (512, 256)}
    params = {name: jnp.asarray(rng.normal(size=(layers, *s)) / 64, jnp.float32) for name, s in shapes.items()}
    caches = jax.tree.map(lambda leaf: jnp.stack([leaf] * layers), jq.KVCache.create((1, 32, 4, 64)))
    x = jnp.asarray(rng.normal(size=(1, 256)), jnp.float32)
    step = functools.partial(_step_decoder, by_index=by_index)
    prepared = jq.prepare(step, params, x, caches, rules=getattr(jq.recipes, recipe)(), strict=True)
    q = prepared.convert(params)
    for name, array in q.params.items():
        codes = jq.quantize(params[name], prepared.leaves[prepared.names.index(name)].spec).codes
        np.testing.assert_array_equal(array.codes.astype(jnp.float32), codes.astype(jnp.float32))
        assert array.packing is not None
    plain = jq.QuantizedTree({name: array.unpack() for name, array in q.params.items()}, q.ranges)
    programs = [Program(prepared.apply, tree, x, caches, donate_argnums=2) for tree in (q, plain)]
    count = sum(math.prod(shape) for shape in shapes.values())  # of the weights of a layer
    # The largest weight as floats, and activations; otherwise all layers in int8, too. jax 0.10 needs 1.14 MB.
    assert programs[0].memory.temp_size_in_bytes < 3 * count
    assert programs[1].memory.temp_size_in_bytes > layers * count
    y, _ = jax.jit(prepared.apply)(q, x, caches)
    # Codes of an activation next to a tie may be their neighbors, because the order of sums of floats differs.
    np.testing.assert_allclose(y, jax.jit(prepared.apply)(plain, x, caches)[0], 1e-3, 5e-3)
    np.testing.assert_array_equal(jax.jit(prepared.fake_apply)(params, x, caches)[0], y)


def _list_constants(program):
    return [i for body in program.computations.values() for i in body if i.opcode == "constant"]


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax 0.10 has other forms for one row")
@pytest.mark.parametrize("is_looped", [False, True])
@pytest.mark.parametrize("options", [{}, {"symmetric": False, "scale_dtype": "float16"}])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_transpose_of_a_parameter_is_undone(dtype, options, is_looped):
    """The entries are read as they are in memory, and not transposed in each call."""

    def multiply(weights, x):
        return jax.lax.map(lambda w: x @ w.T, weights) if is_looped else x @ weights.T

    shape = (3, 1536, 576) if is_looped else (1536, 576)
    weights, x = jnp.ones(shape), jax.ShapeDtypeStruct((1, 576), jnp.float32)
    rules = (jq.Rule(weight=jq.Weight(dtype, block=32, options=options)),)
    prepared = jq.prepare(multiply, weights, jnp.ones((1, 576)), rules=rules)
    program = Program(prepared.apply, jax.eval_shape(prepared.convert, weights), x)
    assert (18, 1536) not in {shape for i in program.in_memory() for _, shape in buffers_of(i)}


@pytest.mark.slow
def test_name_scopes_are_in_the_program():
    network = make_network("linen encoder")
    x = network.sample(jax.random.key(1), 4)
    prepared = jq.prepare(network.apply, network.params, x, rules=RECIPES["w8a8_dynamic"])
    text = jax.jit(prepared.apply).lower(prepared.convert(network.params), x).compile().as_text() or ""
    names = [line.split('op_name="')[1].split('"')[0] for line in text.splitlines() if " dot(" in line]
    for block in ("LinenBlock_0", "LinenBlock_1"):
        for layer in ("query", "key", "value", "out", "Dense_0", "Dense_1"):
            assert any(f"{block}/" in name and f"{layer}/" in name for name in names), (block, layer)


@pytest.mark.slow
def test_name_scopes_of_inlined_calls_are_in_the_program(rng):
    inner = jax.jit(lambda w, x: x @ w)

    def apply(params, x):
        with jax.named_scope("outer"):
            return inner(params["w"], x)

    params = {"w": jnp.asarray(rng.normal(0, 1, (16, 24)), jnp.float32)}
    x = jnp.ones((4, 16))
    prepared = jq.prepare(apply, params, x, rules=RECIPES["w8a8_dynamic"])
    text = jax.jit(prepared.apply).lower(prepared.convert(params), x).compile().as_text() or ""
    (line,) = [line for line in text.splitlines() if " dot(" in line]
    assert "outer/" in line.split('op_name="')[1]


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax 0.10's XLA removes barriers before it forms fusions")
def test_a_mean_after_activations_reads_no_array_of_zeros(rng):
    """XLA:CPU wrote the zeros of the second relu to memory, as an array of the size of the activations."""

    def apply(params, x):
        return jax.nn.relu(jax.nn.relu(x @ params["first"]) @ params["second"]).mean((1, 2))

    shape = (4, 16, 16, 64)
    params = {name: jnp.asarray(rng.normal(size=(64, 64)), jnp.float32) for name in ("first", "second")}
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    prepared = jq.prepare(apply, params, x, rules=jq.recipes.w8a8_dynamic(), strict=True)
    qparams = prepared.convert(params)
    text = jax.jit(prepared.apply).lower(qparams, x).compile().as_text() or ""
    dimensions = ",".join(map(str, shape))
    assert not re.findall(rf"= f32\[{dimensions}\]\S* (?:fusion|broadcast)\(%constant[\w.]*\), kind", text)
    served = jax.jit(prepared.apply)(qparams, x)
    np.testing.assert_array_equal(served, jax.jit(prepared.fake_apply)(params, x))
