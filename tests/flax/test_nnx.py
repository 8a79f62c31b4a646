"""NNX layers against flax's own, whose parameters they have, and against the Linen layers, whose bits they give; where
their ranges come from, and what is refused."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxquant as jq
from jaxquant.flax import Dynamic, Learned, Observed
from jaxquant.flax import convert as linen_convert
from jaxquant.flax import linen as qnn
from jaxquant.flax import nnx as qnnx

F32, BF16 = np.float32, jnp.bfloat16
W = jq.QuantSpec("int8", jq.PerAxis(-1))
A = jq.QuantSpec("uint8")
SPECS: Any = {"weight_spec": W, "activation_spec": A}
# layer, its arguments, Linen's layer, what Linen's is told, the shape of what they are called on
CASES: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str, dict[str, Any], tuple[int, ...]]] = {
    "linear": ("Linear", (6, 5), {}, "Dense", {"features": 5}, (4, 6)),
    "linear, batch equal to the width": ("Linear", (6, 6), {}, "Dense", {"features": 6}, (6, 6)),
    "linear, no bias": ("Linear", (6, 5), {"use_bias": False}, "Dense", {"features": 5, "use_bias": False}, (2, 3, 6)),
    "linear, bfloat16": ("Linear", (6, 5), {"dtype": BF16}, "Dense", {"features": 5, "dtype": BF16}, (4, 6)),
    "general": ("LinearGeneral", ((3, 5), (2, 3)), {"axis": (-2, -1)}, "DenseGeneral",
                {"features": (2, 3), "axis": (-2, -1)}, (4, 3, 5)),
    "general, batches": ("LinearGeneral", (6, (2, 4)), {"batch_axis": {0: 3}}, "DenseGeneral",
                         {"features": (2, 4), "batch_dims": (0,)}, (3, 5, 6)),
    "einsum": ("Einsum", ("abc, cde -> abde", (6, 2, 3), (2, 3)), {}, "Einsum",
               {"einsum_str": "abc,cde->abde", "shape": (6, 2, 3)}, (4, 5, 6)),
    "einsum, any rank": ("Einsum", ("...c,cd->...d", (6, 3)), {}, "Einsum",
                         {"einsum_str": "...c,cd->...d", "shape": (6, 3), "use_bias": False}, (2, 3, 6)),
    "conv, strides": ("Conv", (3, 4, (3, 2), (2, 1)), {"padding": ((1, 0), 2)}, "Conv",
                      {"features": 4, "kernel_size": (3, 2), "strides": (2, 1), "padding": ((1, 0), 2)}, (2, 6, 5, 3)),
    "conv, causal": ("Conv", (3, 4, 3), {"padding": "CAUSAL", "kernel_dilation": 2}, "Conv",
                     {"features": 4, "kernel_size": 3, "padding": "CAUSAL", "kernel_dilation": 2}, (2, 9, 3)),
    "conv, groups": ("Conv", (4, 6, (3, 3)), {"feature_group_count": 2}, "Conv",
                     {"features": 6, "kernel_size": (3, 3), "feature_group_count": 2}, (2, 6, 5, 4)),
    "conv, depthwise": ("Conv", (4, 8, (3, 3)), {"feature_group_count": 4}, "Conv",
                        {"features": 8, "kernel_size": (3, 3), "feature_group_count": 4}, (2, 6, 5, 4)),
    "conv, no batch": ("Conv", (3, 4, (3, 3)), {"dtype": BF16}, "Conv",
                       {"features": 4, "kernel_size": (3, 3), "dtype": BF16}, (6, 5, 3)),
}  # fmt: skip


def draw_inputs(rng: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(rng.normal(0.3, 1, shape), F32)


def rngs(rng: np.random.Generator) -> nnx.Rngs:
    return nnx.Rngs(int(rng.integers(2**31)))


def check_equal(actual: Any, expected: Any) -> None:
    """The same dtypes and bits."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, F32), np.asarray(b, F32))


def batches(layer: Any) -> int:
    return int(layer.dot_general.activation_batches[...])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("case", list(CASES))
def test_flax_s_parameters_and_linen_s_bits(rng: np.random.Generator, case: str) -> None:
    name, args, keywords, linen, static, shape = CASES[case]
    layer: Any = getattr(qnnx, name)(*args, **keywords, **SPECS, rngs=rngs(rng))
    flax = getattr(nnx, name)(*args, **keywords, rngs=rngs(rng))
    assert isinstance(layer, type(flax))
    layer_params, theirs = nnx.state(layer, nnx.Param), nnx.state(flax, nnx.Param)
    assert jax.tree.structure(layer_params) == jax.tree.structure(theirs)
    nnx.update(layer, theirs)  # a float checkpoint loads, and back
    check_equal(nnx.state(layer, nnx.Param), theirs)
    nnx.update(flax, nnx.state(layer, nnx.Param))
    if layer.bias is not None:
        layer.bias[...] = draw_inputs(rng, layer.bias[...].shape)
    twin: Any = getattr(qnn, linen)(**static, **SPECS)
    x = draw_inputs(rng, shape)
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    variables: Any = {"params": params}
    for _ in range(2):
        expected, updates = twin.apply(variables, x, mutable=["ranges"])
        variables = {**variables, **updates}
        y = layer(x)
        assert y.dtype == expected.dtype == keywords.get("dtype", F32)
        check_equal(y, expected)
        x = x * 2 - 1
    layer.eval()
    y = layer(x)
    check_equal(y, twin.apply(variables, x))
    serving = qnnx.convert(layer)
    constants = linen_convert(twin, variables)
    check_equal(serving.kernel.get_value(), constants["params"]["kernel"])
    check_equal(serving(x), y)
    check_equal(twin.apply(constants, x), y)


@pytest.mark.slow
def test_embed_and_attend(rng: np.random.Generator) -> None:
    specs: Any = {"weight_spec": jq.QuantSpec("int8", jq.PerAxis(0)), "activation_spec": A}  # a scale for each row
    for rows, dtype in ((7, None), (1, BF16)):
        layer = qnnx.Embed(rows, 6, **specs, dtype=dtype, rngs=rngs(rng))
        assert jax.tree.structure(nnx.state(layer, nnx.Param)) == jax.tree.structure(
            nnx.state(nnx.Embed(rows, 6, rngs=rngs(rng)), nnx.Param)
        )
        indices = jnp.asarray(rng.integers(-7, 9, (4, 3)), jnp.int32)  # from the back, and beyond the table
        query = draw_inputs(rng, (2, 6))
        twin = qnn.Embed(rows, 6, **specs, dtype=dtype)
        variables = {"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}
        expected, updates = twin.apply(variables, query, method=twin.attend, mutable=["ranges"])
        embedded, products = layer(indices), layer.attend(query)
        check_equal(products, expected)
        check_equal(embedded, twin.apply({**variables, **updates}, indices))  # type: ignore[dict-item]
        assert np.isnan(np.asarray(embedded, F32)).any() == (rows == 7 and bool((indices >= 7).any()))
        serving = qnnx.convert(layer)
        check_equal(serving(indices), embedded)
        check_equal(serving.attend(query), products)
    layer = qnnx.Embed(7, 6, **specs, activation_range=Learned(jq.PACT()), rngs=rngs(rng))
    qnnx.start(layer, query, method="attend")
    check_equal(layer.table.activation_scale[...], jnp.abs(query).max().reshape(1) / F32(255))


# Ranges.


@pytest.mark.slow
def test_ranges_move_as_those_of_batch_norm(rng: np.random.Generator) -> None:
    class Block(nnx.Module):
        def __init__(self) -> None:
            self.norm = nnx.BatchNorm(6, rngs=nnx.Rngs(0))
            self.layer = qnnx.Linear(6, 5, **SPECS, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layer(self.norm(x))

    block, x = Block(), draw_inputs(rng, (4, 6))
    expected = r"Linear\(6, 5\): jaxquant.flax.nnx: activation: expected a range.*model.train\(\).*got no data"
    block.eval()
    with pytest.raises(ValueError, match=expected):
        block(x)
    assert np.isnan(nnx.jit(lambda block, x: block(x))(block, x)).all()
    block.train()
    step = nnx.jit(lambda block, x: block(x))
    for count in (1, 2, 3):
        step(block, x)
        assert batches(block.layer) == count
    block.eval()
    state = nnx.state(block, qnnx.Ranges)
    block(100 * x)
    check_equal(nnx.state(block, qnnx.Ranges), state)
    reading = nnx.view(block, use_running_average=False)
    reading(x)
    assert batches(block.layer) == 4  # a view shares its variables
    assert block.layer.dot_general.use_running_average
    block.layer.train()  # one layer alone
    block(x)
    assert batches(block.layer) == 5


@pytest.mark.slow
def test_the_range_is_the_calibrator_s(rng: np.random.Generator) -> None:
    for calibrator in (
        functools.partial(jq.calibration.mse, bins=64),
        functools.partial(jq.calibration.moving_average, decay=0.5),
    ):
        layer = qnnx.Linear(6, 5, **SPECS, activation_range=Observed(calibrator), rngs=rngs(rng))
        alone = calibrator(A)
        state = alone.init(jnp.zeros((1, 1, 6)))
        for _ in range(2):
            x = draw_inputs(rng, (4, 3, 6))
            layer(x)
            state = alone.update(state, x)
        lo, hi = alone.finalize(state)
        expected = jq.quantize(x, A, range=(lo, hi))
        served = qnnx.convert(layer).dot_general
        check_equal(served.activation_scale[...].reshape(1, 1, 1), expected.scale)
        check_equal(served.activation_zero_point[...].reshape(1, 1, 1), expected.zero_point)


@pytest.mark.slow
def test_a_range_is_found_over_rows(rng: np.random.Generator) -> None:
    """Not over a flat activation, which XLA:CPU reduces element by element: none is in the program."""
    layer = qnnx.Linear(64, 8, weight_spec=W, activation_spec=A, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    @jax.jit
    def step(params: Any, rest: Any, x: Any) -> Any:
        model = nnx.merge(graph, params, rest)
        return model(jax.nn.relu(x)), nnx.state(model, qnnx.Ranges)

    shape = (3, 11, 64)
    text = step.lower(params, rest, draw_inputs(rng, shape)).as_text()
    assert "3x11x64xf32" in text
    assert f"{np.prod(shape)}x" not in text


@pytest.mark.slow
def test_ranges_freeze(rng: np.random.Generator) -> None:
    layer = qnnx.Linear(6, 5, **SPECS, activation_range=Observed(freeze_after=2), rngs=rngs(rng))
    step = nnx.jit(lambda layer, x: layer(x))
    x = draw_inputs(rng, (4, 6))
    for _ in range(2):
        step(layer, x)
    state = nnx.state(layer, qnnx.Ranges)
    step(layer, 50 * x)
    check_equal(nnx.state(layer, qnnx.Ranges), state)
    assert batches(layer) == 2


def test_dynamic_ranges_have_no_variables(rng: np.random.Generator) -> None:
    per_row = jq.QuantSpec("int8", jq.PerAxis(0))
    layer = qnnx.Linear(6, 5, weight_spec=W, activation_spec=per_row, activation_range=Dynamic(), rngs=rngs(rng))
    assert not jax.tree.leaves(nnx.state(layer, (qnnx.Ranges, qnnx.Scale)))
    x = draw_inputs(rng, (4, 6))
    q = (jq.quantize(x, per_row), jq.quantize(layer.kernel[...], W))
    expected = jq.dot_general(*q, (((1,), (0,)), ((), ())))
    check_equal(layer(x), expected)
    check_equal(qnnx.convert(layer)(x), expected)


@pytest.mark.slow
def test_learned_scales_start_when_they_are_told(rng: np.random.Generator) -> None:
    learned: Any = {"weight_range": Learned(), "activation_range": Learned(jq.LSQPlus())}

    class Net(nnx.Module):
        def __init__(self) -> None:
            streams = rngs(rng)
            self.first = qnnx.Linear(6, 5, **SPECS, **learned, rngs=streams)
            self.norm = nnx.BatchNorm(5, rngs=streams)
            self.second = qnnx.Linear(5, 3, **SPECS, weight_range=Learned(jq.LSQPlus()), rngs=streams)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(nnx.relu(self.norm(self.first(x))))

    net, x = Net(), draw_inputs(rng, (4, 6))
    expected = r"Linear\(6, 5\): jaxquant.flax.nnx: activation_scale: expected finite numbers.*nnx.start.*got NaN"
    with pytest.raises(ValueError, match=expected):
        net(x)
    assert np.isnan(nnx.jit(lambda net, x: net(x))(net, x)).all()
    net = Net()
    initial_state = jax.tree.map(jnp.copy, nnx.state(net, (nnx.Param, qnnx.Ranges, nnx.BatchStat)))
    net.first.kernel[...] = 4 * net.first.kernel[...]  # as a checkpoint would
    qnnx.start(net, x)
    net.first.kernel[...] = net.first.kernel[...] / 4
    check_equal(nnx.state(net, (nnx.Param, qnnx.Ranges, nnx.BatchStat)), initial_state)
    first = net.first.dot_general
    scale, _ = jq.LSQ().initial(4 * net.first.kernel[...], W)
    check_equal(first.weight_scale[...], scale)
    scale, point = jq.LSQPlus().initial(x, A)
    check_equal((first.activation_scale[...], first.activation_zero_point[...]), (scale.reshape(1), point.reshape(1)))  # type: ignore[union-attr]
    assert net.second.dot_general.weight_scale[...].shape == (1, 3)
    assert np.isfinite(net(x)).all()
    twin = qnn.Dense(5, **SPECS, **learned)
    params = nnx.to_pure_dict(nnx.state(net.first, nnx.Param))
    scales = {name: getattr(first, name)[...] for name in ("weight_scale", "activation_scale", "activation_zero_point")}
    shaped = {name: scale.reshape(1, -1) for name, scale in scales.items()}
    check_equal(net.first(x), twin.apply({"params": params, "scales": {"DotGeneral_0": shaped}}, x))


@pytest.mark.slow
def test_flax_s_own_layers_take_a_contraction(rng: np.random.Generator) -> None:
    streams = rngs(rng)
    dot, out_dot = (qnnx.dot_general(W, A) for _ in range(2))
    attention = nnx.MultiHeadAttention(
        2, 4, 4, qkv_dot_general=dot, out_dot_general=out_dot, qkv_promote_dtype=qnnx.promote_dtype,
        out_promote_dtype=qnnx.promote_dtype, decode=False, rngs=streams,
    )  # fmt: skip
    x = draw_inputs(rng, (3, 5, 4))
    attention(x)
    assert int(dot.activation_batches[...]) == 3  # query, key and value share it
    attention.eval()
    serving = qnnx.convert(attention)
    assert isinstance(serving.query.kernel, qnnx.Codes)
    check_equal(serving(x), attention(x))
    conv = qnnx.conv_general_dilated(W, A)
    layer = nnx.Conv(3, 4, (3,), conv_general_dilated=conv, promote_dtype=qnnx.promote_dtype, rngs=streams)
    image = draw_inputs(rng, (2, 6, 3))
    y = layer(image)
    check_equal(qnnx.convert(layer)(image), y)
    quantized = qnnx.Conv(3, 4, (3,), **SPECS, rngs=streams)
    nnx.update(quantized, nnx.state(layer, nnx.Param))
    check_equal(quantized(image), y)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["observed", "learned", "draws"])
def test_an_evaluated_model_may_be_a_constant(rng: np.random.Generator, way: str) -> None:
    """Of what is traced: it is read, and nothing of it is written."""
    keywords: Any = {
        "observed": {}, "learned": {"weight_range": Learned(), "activation_range": Learned(jq.LSQPlus())},
        "draws": {"backward": jq.Int8Backward(stochastic_rounding=True)},
    }[way]  # fmt: skip
    layer = qnnx.Linear(6, 5, **SPECS, **keywords, rngs=rngs(rng))
    x = draw_inputs(rng, (3, 2, 6))
    if way == "learned":
        qnnx.start(layer, x)
    layer(x)
    layer.eval()
    initial_state = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer, nnx.Not(nnx.RngKey))))
    want = layer(x)
    for run in (jax.jit(lambda x: layer(x)), nnx.jit(lambda x: layer(x)), jax.vmap(lambda x: layer(x))):
        check_equal(run(x), want)
    check_equal(jax.lax.map(lambda x: layer(x), x), want)
    check_equal(jax.export.export(jax.jit(lambda x: layer(x)))(x).call(x), want)
    final_state = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer, nnx.Not(nnx.RngKey))))
    jax.tree.map(np.testing.assert_array_equal, final_state, initial_state)
    if way == "draws":  # a gradient draws, in training
        with pytest.raises(ValueError, match="key: expected a key, because Int8Backward"):
            jax.grad(lambda x: layer(x).sum())(x)
        layer.train()
        assert jnp.isfinite(nnx.grad(lambda m, x: m(x).sum(), argnums=1)(layer, x)).all()


# What is refused.


@pytest.mark.slow
def test_refusals(rng: np.random.Generator) -> None:
    streams = rngs(rng)
    with pytest.raises(TypeError, match=r"Linear\(6, 5\): jaxquant.flax.nnx: weight_spec: expected a QuantSpec"):
        qnnx.Linear(6, 5, weight_spec="int8", rngs=streams)  # type: ignore[arg-type]
    for name in ("dot_general", "promote_dtype"):
        specs: Any = {name: None}
        with pytest.raises(ValueError, match=f"Linear: jaxquant.flax.nnx: {name}: expected no value"):
            qnnx.Linear(6, 5, weight_spec=W, **specs, rngs=streams)
    with pytest.raises(ValueError, match=r"Conv: jaxquant.flax.nnx: mask: expected None"):
        qnnx.Conv(3, 4, (3,), weight_spec=W, mask=jnp.ones((3, 3, 4)), rngs=streams)
    with pytest.raises(TypeError, match=r"activation_spec: expected codes of .* got int16"):
        qnnx.Linear(6, 5, weight_spec=W, activation_spec=jq.QuantSpec("int16"), rngs=streams)
    rows = jq.QuantSpec("uint8", jq.PerAxis(0))
    with pytest.raises(
        ValueError, match=r"Linear\(6, 5\).* activation_spec: expected PerTensor\(\), PerFeature\(\), or act"
    ):
        qnnx.Linear(6, 5, weight_spec=W, activation_spec=rows, rngs=streams)
    with pytest.raises(TypeError, match=r"use_running_average: expected True or False, got 'yes'"):
        qnnx.Linear(6, 5, weight_spec=W, use_running_average="yes", rngs=streams)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="kernel_shape: expected the shape of the kernel, because its scales are learned"
    ):
        qnnx.dot_general(W, A, weight_range=Learned())
    turned = qnnx.dot_general(W, A, weight_range=Learned(), kernel_shape=(5, 6))
    layer = nnx.Linear(6, 5, dot_general=turned, promote_dtype=qnnx.promote_dtype, rngs=streams)
    with pytest.raises(
        ValueError, match=r"weight: expected scales of shape \(1, 6\) \(is kernel_shape the shape of the kernel"
    ):
        qnnx.start(layer, draw_inputs(rng, (2, 6)))
    draws: Any = {"weight_spec": W, "activation_spec": A, "backward": jq.Int8Backward(stochastic_rounding=True)}
    with pytest.raises(ValueError, match=r'Linear\(6, 5\): .*rngs: expected rngs with a stream "rounding"'):
        qnnx.Linear(6, 5, **draws, rngs=nnx.Rngs(params=0))
    started = qnnx.Linear(6, 5, weight_spec=W, weight_range=Learned(), rngs=streams)
    qnnx.start(started, draw_inputs(rng, (2, 6)))
    with pytest.raises(
        ValueError, match=r"start: model: expected a model with a layer whose range is Learned\(\), got none"
    ):
        qnnx.start(qnnx.convert(started), draw_inputs(rng, (2, 6)))
    with pytest.raises(TypeError, match='rngs: expected rngs with a stream "rounding"'):
        qnnx.dot_general(W, A, backward=jq.Int8Backward(stochastic_rounding=True))
    with pytest.raises(ValueError, match="operands: expected a tuple of inputs, kernel and bias"):
        qnnx.promote_dtype((jnp.ones(1),))
    layer = qnnx.Linear(6, 5, **SPECS, rngs=streams)
    with pytest.raises(ValueError, match=r"^Linear\(6, 5\): jaxquant.quantized_dot_general"):
        layer(jnp.ones((2, 7)))
    with pytest.raises(
        ValueError, match=r"flax.nnx.start: model: expected a model with a layer whose range is Learned\(\)"
    ):
        qnnx.start(layer, jnp.ones((2, 6)))
    with pytest.raises(TypeError, match=r"flax.nnx.start: model: expected a flax.nnx.Module"):
        qnnx.start(nn.Dense(5), jnp.ones((2, 6)))  # type: ignore[arg-type]
    table = qnnx.Embed(7, 6, weight_spec=W, rngs=streams)
    with pytest.raises(TypeError, match=r"Embed\(7, 6\): jaxquant.flax.nnx: inputs: expected an integer dtype"):
        table(jnp.ones(2))


def test_start_says_what_it_did_not_reach(rng: np.random.Generator) -> None:
    net = nnx.Sequential(qnnx.Linear(4, 4, **SPECS, activation_range=Learned(jq.PACT()), rngs=rngs(rng)), lambda x: x)
    with pytest.raises(ValueError, match=r"layers/0: jaxquant.flax.nnx: activation_scale: expected finite"):
        qnnx.start(net, jnp.full((2, 4), jnp.nan))
    unused: Any = nnx.Sequential(lambda x: x)
    unused.spare = net.layers[0]
    with pytest.raises(
        ValueError, match=r"spare: jaxquant.flax.nnx.start: activation_scale: expected the call to reach this layer"
    ):
        qnnx.start(unused, jnp.ones((2, 4)))


@pytest.mark.slow
def test_a_layer_has_the_signature_of_flax_s_with_the_added_arguments() -> None:
    added = {"weight_spec", "activation_spec", "weight_range", "activation_range", "backward", "use_running_average"}
    outputs = {"output_spec", "output_range", "output_relu", "integer_bias"}
    ours = {"dot_general", "dot_general_cls", "conv_general_dilated", "einsum_op", "promote_dtype", "mask", "self"}
    for name in ("Linear", "LinearGeneral", "Einsum", "Conv", "Embed"):
        signature = inspect.signature(getattr(qnnx, name)).parameters
        expected = set(inspect.signature(getattr(nnx, name).__init__).parameters) - ours | added
        assert set(signature) == expected | (outputs - {"integer_bias"} if name == "Embed" else outputs), name
    assert next(iter(inspect.signature(qnnx.Conv).parameters)) == "in_features"
