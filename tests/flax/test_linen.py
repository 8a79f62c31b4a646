"""Linen layers against flax's own: parameters, arguments, checkpoints, and the numbers of a float layer on what the
codes stand for; and where their ranges come from."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxquant as jq
from jaxquant import Dynamic, Learned, Static
from jaxquant import flax as qflax
from jaxquant.flax import linen as qnn

from ..oracles import array_text
from ..support.matrix import mark_others_full

AVERAGE = jq.Static(jq.calibration.moving_average)
F32, BF16 = np.float32, jnp.bfloat16
W = jq.QuantSpec("int8", jq.PerAxis(-1))
A = jq.QuantSpec("uint8")
# layer, its arguments, the shape of what it is called on
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "dense": ("Dense", {"features": 5}, (4, 6)),
    "dense, batch equal to the width": ("Dense", {"features": 6}, (6, 6)),
    "dense, no bias": ("Dense", {"features": 5, "use_bias": False}, (2, 3, 6)),
    "dense, one vector": ("Dense", {"features": 5}, (6,)),
    "dense, bfloat16": ("Dense", {"features": 5, "dtype": BF16}, (4, 6)),
    "dense, bfloat16 kernel": ("Dense", {"features": 5, "param_dtype": BF16, "dtype": F32}, (4, 6)),
    "general": ("DenseGeneral", {"features": (2, 3), "axis": (-2, -1)}, (4, 3, 5)),
    "general, axes apart": ("DenseGeneral", {"features": 4, "axis": (1, 3), "use_bias": False}, (2, 3, 4, 5)),
    "general, batches": ("DenseGeneral", {"features": (2, 4), "batch_dims": (0,)}, (3, 5, 6)),
    "einsum": ("Einsum", {"shape": (6, 2, 3), "einsum_str": "abc, cde -> abde"}, (4, 5, 6)),
    "einsum, any rank": ("Einsum", {"shape": (6, 3), "einsum_str": "...c,cd->...d"}, (2, 3, 6)),
    "einsum, batches": ("Einsum", {"shape": (3, 6, 4), "einsum_str": "bik,ikd->bid", "use_bias": False}, (5, 3, 6)),
    "conv": ("Conv", {"features": 4, "kernel_size": (3, 3)}, (2, 6, 5, 3)),
    "conv, strides": ("Conv", {"features": 4, "kernel_size": (3, 2), "strides": (2, 1)}, (2, 6, 5, 3)),
    "conv, an int": ("Conv", {"features": 4, "kernel_size": (3, 3), "padding": 2}, (2, 6, 5, 3)),
    "conv, pairs": ("Conv", {"features": 4, "kernel_size": (2, 3), "padding": ((1, 0), 2)}, (2, 6, 5, 3)),
    "conv, circular": ("Conv", {"features": 4, "kernel_size": (3, 3), "padding": "CIRCULAR"}, (2, 6, 5, 3)),
    "conv, reflect": ("Conv", {"features": 4, "kernel_size": (3, 3), "padding": "REFLECT"}, (2, 6, 5, 3)),
    "conv, causal": ("Conv", {"features": 4, "kernel_size": 3, "padding": "CAUSAL", "kernel_dilation": 2}, (2, 9, 3)),
    "conv, dilated": ("Conv", {"features": 4, "kernel_size": (3, 3), "kernel_dilation": 2}, (2, 7, 6, 3)),
    "conv, transposed": ("Conv", {"features": 4, "kernel_size": 3, "input_dilation": 2, "padding": 1}, (2, 4, 3)),
    "conv, groups": ("Conv", {"features": 6, "kernel_size": (3, 3), "feature_group_count": 2}, (2, 6, 5, 4)),
    "conv, depthwise": ("Conv", {"features": 8, "kernel_size": (3, 3), "feature_group_count": 4}, (2, 6, 5, 4)),
    "conv, two batches": ("Conv", {"features": 4, "kernel_size": (3,), "use_bias": False}, (2, 3, 6, 3)),
    "conv, no batch": ("Conv", {"features": 4, "kernel_size": (3, 3)}, (6, 5, 3)),
    "conv, bfloat16": ("Conv", {"features": 4, "kernel_size": (3, 3), "dtype": BF16}, (2, 6, 5, 3)),
    "embed": ("Embed", {"num_embeddings": 7, "features": 6}, (4, 3)),
    "embed, one row": ("Embed", {"num_embeddings": 1, "features": 6, "dtype": BF16}, (4, 3)),
}  # fmt: skip


def draw_inputs(rng: np.random.Generator, layer: str, shape: tuple[int, ...]) -> Any:
    if layer == "Embed":
        return jnp.asarray(rng.integers(-7, 9, shape), jnp.int32)  # from the back, and beyond the table
    return jnp.asarray(rng.normal(0.3, 1, shape), F32)


def observed(module: Any, variables: Any, x: Any) -> tuple[Any, Any]:
    """What a module returns for a batch that moves its ranges, and its variables from then on."""
    y, updates = jax.jit(functools.partial(module.apply, mutable=["ranges", "scales"]))(variables, x)
    return y, {**variables, **updates}


def steps(q: jq.QuantizedArray) -> np.ndarray:
    """What codes stand for, in float64."""
    scale = array_text.aligned(np.asarray(q.scale), q.shape, q.block_size)
    return np.asarray(q.codes).astype(np.float64) * scale.astype(np.float64)


def rounded(x: Any, scale: Any, zero_point: Any) -> np.ndarray:
    """Activations as uint8 has them, in float64."""
    step, point = np.asarray(scale, np.float64).item(), int(np.asarray(zero_point).item())
    return (np.clip(np.rint(np.asarray(x, np.float64) / step) + point, 0, 255) - point) * step


BY_DEFAULT = (
    *("dense, no bias", "dense, bfloat16 kernel", "general, axes apart", "einsum, batches", "conv, circular"),
    *("conv, transposed", "conv, groups", "conv, two batches", "conv, bfloat16", "embed", "embed, one row"),
)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("case", mark_others_full(CASES, BY_DEFAULT))
def test_a_layer_is_flax_s_on_what_the_codes_stand_for(fixed_rng: np.random.Generator, case: str) -> None:
    layer, arguments, shape = CASES[case]
    x = draw_inputs(fixed_rng, layer, shape)
    plain = getattr(nn, layer)(**arguments)
    activations = {} if layer == "Embed" else {"activation_spec": A, "activation_range": AVERAGE}
    module = getattr(qnn, layer)(**arguments, weight_spec=W, **activations)

    @jax.jit
    def trained(key: Any, x: Any) -> Any:
        params, fresh = plain.init(key, x)["params"], module.init(key, x)["params"]
        y, state = module.apply({"params": params}, x, mutable=["ranges"])  # a float checkpoint, as it is
        return params, fresh, y, plain.apply({"params": params}, x), qflax.convert(module, {"params": params, **state})

    params, fresh, y, float_y, serving = trained(jax.random.key(int(fixed_rng.integers(2**31))), x)
    assert jax.tree.structure(params) == jax.tree.structure(fresh)
    jax.tree.map(np.testing.assert_array_equal, params, fresh)
    served = jax.jit(module.apply)(serving, x)
    assert served.dtype == y.dtype == float_y.dtype
    np.testing.assert_array_equal(served, y)
    dtype = arguments.get("dtype", F32)
    if layer != "Embed":
        ((_, constants),) = serving["ranges"].items()
        x = jnp.asarray(rounded(x.astype(dtype), **constants["activation"]), F32)
    name = "embedding" if layer == "Embed" else "kernel"
    whole = {**params, name: jnp.asarray(steps(serving["params"][name]))}
    exact = getattr(nn, layer)(**{k: v for k, v in arguments.items() if "dtype" not in k})
    want = np.asarray(exact.apply({"params": jax.tree.map(lambda p: p.astype(F32), whole)}, x))
    tolerance = 2e-2 if dtype == BF16 else 2e-5
    np.testing.assert_allclose(np.asarray(y, F32), want, rtol=tolerance, atol=tolerance)
    mask = np.isfinite(want)
    assert (np.isfinite(float_y.astype(F32)) == mask).all()
    assert np.abs(want - np.asarray(float_y, F32))[mask].max(initial=0) < 0.05 * np.abs(want[mask]).max(initial=1)


CALIBRATORS: dict[str, Any] = {
    "moving average": jq.calibration.moving_average,
    "slower": functools.partial(jq.calibration.moving_average, decay=0.9),
    "extremes": jq.calibration.minmax,
    "percentile": functools.partial(jq.calibration.percentile, q=99.0),
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(CALIBRATORS))
def test_ranges_move_while_they_are_mutable(rng: np.random.Generator, name: str) -> None:
    factory, batches = (
        CALIBRATORS[name],
        jnp.asarray(rng.normal(0.5, [[[1.0]], [[3.0]], [[2.0]], [[9.0]]], (4, 5, 6)), F32),
    )
    module = qnn.Dense(3, weight_spec=W, activation_spec=A, activation_range=Static(factory, freeze_after=3))
    variables = module.init(jax.random.key(0), 100 * batches[0])
    assert variables["ranges"]["DotGeneral_0"]["activation"]["batches"] == 0, "init is no batch"
    step = jax.jit(functools.partial(module.apply, mutable=["ranges"]))
    calibrator = factory(A)
    state, update = calibrator.init(batches[0]), jax.jit(calibrator.update)
    for i, x in enumerate(batches):
        y, updates = step(variables, x)
        variables = {**variables, **updates}
        state = update(state, x) if i < 3 else state
        layer_ranges = updates["ranges"]["DotGeneral_0"]["activation"]
        assert int(layer_ranges["batches"]) == min(i + 1, 3)
        jax.tree.map(np.testing.assert_array_equal, layer_ranges["state"], state)
        np.testing.assert_array_equal(module.apply(variables, x), y)  # it moved before it was used
    constants = qflax.convert(module, variables)["ranges"]["DotGeneral_0"]["activation"]
    q = jq.quantize(batches[0], A, range=calibrator.finalize(state))
    np.testing.assert_array_equal(constants["scale"], q.scale)
    np.testing.assert_array_equal(constants["zero_point"], q.zero_point)


class Anew(nn.Module):
    """A layer whose calibrator is another object at every call."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns the layer of x."""
        source = Static(functools.partial(jq.calibration.moving_average, decay=0.5))
        return qnn.Dense(3, weight_spec=W, activation_spec=A, activation_range=source)(x)


def test_a_step_is_compiled_once(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(4, 6)), F32)
    variables, traces = jax.jit(Anew().init)(jax.random.key(0), x), []

    @jax.jit
    def step(variables: Any) -> Any:
        traces.append(1)
        return Anew().apply(variables, x, mutable=["ranges"])[1]

    for _ in range(3):
        variables = {**variables, **step(variables)}
    assert len(traces) == 1


DYNAMIC = {
    "per tensor": (A, Dynamic(), W, Dynamic()),
    "for each row": (jq.QuantSpec("uint8", jq.PerAxis(0)), Dynamic(), W, Dynamic(jq.calibration.mse)),
    "blocks": (A, Dynamic(jq.calibration.minmax), jq.QuantSpec("int4", jq.Blocked(0, 4)), Dynamic()),
    "weights alone": (None, Dynamic(), jq.QuantSpec(jq.nf4, jq.Blocked(0, 4)), Dynamic()),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(DYNAMIC))
def test_dynamic_ranges_are_found_at_each_call(rng: np.random.Generator, name: str) -> None:
    activation, source, weight, weight_source = DYNAMIC[name]
    module = qnn.Dense(
        3, weight_spec=weight, activation_spec=activation, activation_range=source, weight_range=weight_source
    )
    x = jnp.asarray(rng.normal(size=(5, 6)), F32)  # four do not divide it
    variables = module.init(jax.random.key(0), x)
    serving = qflax.convert(module, variables)
    assert not jax.tree.leaves(serving["ranges"]), "there is nothing to keep but the specs"
    y = jax.jit(module.apply)(variables, x)
    np.testing.assert_array_equal(jax.jit(module.apply)(serving, x), y)

    def codes(x: Any, spec: jq.QuantSpec, source: Any) -> jq.QuantizedArray:
        if source.calibrator is None:
            return jq.quantize(x, spec)
        calibrator = source.calibrator(spec)
        return jq.quantize(x, spec, range=calibrator.finalize(calibrator.update(calibrator.init(x), x)))

    kernel = codes(variables["params"]["kernel"], weight, weight_source)
    jax.tree.map(np.testing.assert_array_equal, serving["params"]["kernel"].store_last(), kernel)
    want = jq.matmul(codes(x, activation, source) if activation else x, kernel)
    np.testing.assert_array_equal(y, want + serving["params"]["bias"][None])


@pytest.mark.slow
def test_learned_scales_start_from_the_checkpoint(fixed_rng: np.random.Generator) -> None:
    x = jnp.asarray(fixed_rng.uniform(0, 3, (5, 6)), F32)
    source: dict[str, Any] = {"weight_range": Learned(), "activation_range": Learned(jq.LSQPlus())}
    module: Any = qnn.Dense(3, weight_spec=jq.QuantSpec("int4", jq.PerAxis(-1)), activation_spec=A, **source)
    variables = module.init(jax.random.key(0), x)
    loaded = {"params": jax.tree.map(lambda p: 5 * p, variables["params"])}
    y, variables = observed(module, loaded, x)
    scales = variables["scales"]["DotGeneral_0"]
    kernel = loaded["params"]["kernel"]
    scale, _ = jq.LSQ().initial(kernel, module.weight_spec)
    np.testing.assert_allclose(scales["weight_scale"], scale, rtol=1e-6)
    np.testing.assert_allclose(scale, 2 * np.abs(kernel).mean(axis=0, keepdims=True) / np.sqrt(7), rtol=1e-6)
    starts: Any = jq.LSQPlus().initial(x, A)
    for name, part in zip(("activation_scale", "activation_zero_point"), starts, strict=True):
        np.testing.assert_allclose(scales[name], part, rtol=1e-6)
    _, restarted = observed(module, variables, 3 * x)  # what is there stays
    jax.tree.map(np.testing.assert_array_equal, restarted["scales"], variables["scales"])
    grads = jax.grad(lambda s: (module.apply({**variables, "scales": s}, 3 * x) ** 2).sum())(variables["scales"])
    assert all((np.asarray(g) != 0).all() for g in jax.tree.leaves(grads))
    np.testing.assert_array_equal(jax.jit(module.apply)(qflax.convert(module, variables), x), y)
    # Training can move a zero point out of the codes, and a scale below 0: called without jit, where they are known,
    # the layer takes the nearest code and the magnitude, as it does under a trace.
    moved = {**scales, "activation_zero_point": scales["activation_zero_point"] - 300, "weight_scale": -scale}
    drifted = {**variables, "scales": {"DotGeneral_0": moved}}
    np.testing.assert_array_equal(module.apply(drifted, x), jax.jit(module.apply)(drifted, x))


class Tied(nn.Module):
    """A table looked up and attended to, and a layer called twice."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        """Returns logits."""
        table = qnn.Embed(
            11, 6, weight_spec=jq.QuantSpec("int4", jq.PerAxis(0)), activation_spec=A, activation_range=AVERAGE
        )
        layer = qnn.Dense(6, weight_spec=W, activation_spec=A, activation_range=AVERAGE)
        return table.attend(layer(nn.relu(layer(table(tokens)))))


@pytest.mark.slow
def test_weights_that_are_used_twice(fixed_rng: np.random.Generator) -> None:
    module, tokens = Tied(), jnp.asarray(fixed_rng.integers(0, 11, (3, 4)), jnp.int32)
    params = jax.jit(module.init)(jax.random.key(1), tokens)
    y, variables = observed(module, params, tokens)
    assert int(variables["ranges"]["Dense_0"]["DotGeneral_0"]["activation"]["batches"]) == 2
    serving = qflax.convert(module, variables)
    served = jax.jit(module.apply)(serving, tokens)
    np.testing.assert_array_equal(served, jax.jit(module.apply)(variables, tokens))
    table, layer = (steps(serving["params"][n][k]) for n, k in (("Embed_0", "embedding"), ("Dense_0", "kernel")))
    x, ranges = table[np.asarray(tokens)], serving["ranges"]
    for relu in (True, False):
        x = rounded(x.astype(F32), **ranges["Dense_0"]["DotGeneral_0"]["activation"]) @ layer
        x = np.maximum(x, 0) if relu else x
    want = rounded(x.astype(F32), **ranges["Embed_0"]["table"]["activation"]) @ table.T
    step = float(ranges["Embed_0"]["table"]["activation"]["scale"].item()) * np.abs(table).max()
    assert np.abs(np.asarray(served) - want).max() < 2 * step  # float32 sums are not float64's: a step here and there
    assert y.shape == (3, 4, 11)


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "weights alone": {"weight_spec": jq.QuantSpec("int4", jq.PerAxis(-1))},
    "both asymmetric": {
        "weight_spec": jq.QuantSpec("uint4", jq.PerAxis(-1)),
        "activation_spec": jq.QuantSpec("int8", symmetric=False),
        "activation_range": AVERAGE,
    },
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(CONVOLUTIONS))
def test_groups_of_channels_are_trained(rng: np.random.Generator, name: str) -> None:
    module = qnn.Conv(8, (3, 3), feature_group_count=4, **CONVOLUTIONS[name])
    x, g = (jnp.asarray(rng.normal(size=(2, 5, 5, n)), F32) for n in (4, 8))
    _, variables = observed(module, jax.jit(module.init)(jax.random.key(0), x), x)

    @jax.jit
    def find_gradients(params: Any, x: Any) -> Any:
        y, pull = jax.vjp(lambda p, x: module.apply({**variables, "params": p}, x), params, x)
        return y, pull(g)

    y, (dparams, dx) = find_gradients(variables["params"], x)
    serving = qflax.convert(module, variables)
    np.testing.assert_array_equal(jax.jit(module.apply)(serving, x), y)
    # Nothing in the first batch saturates: the gradient equals the float layer's on dequantized inputs.
    kernel = serving["params"]["kernel"].dequantize()
    steps = x
    if module.activation_spec is not None:
        constants = serving["ranges"]["ConvGeneralDilated_0"]["activation"]
        steps = jq.fake_quantize(x, module.activation_spec, **constants)
    plain = nn.Conv(8, (3, 3), feature_group_count=4)
    _, pull = jax.vjp(lambda p, x: plain.apply({"params": p}, x), {**serving["params"], "kernel": kernel}, steps)
    for actual, expected in zip(jax.tree.leaves((dparams, dx)), jax.tree.leaves(pull(g)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
