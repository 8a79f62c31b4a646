"""Each algorithm on each kind of codes, in blocks: less error than rounding to nearest, or an error that says why."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq

F32 = np.float32
BLOCK = 16
SPECS: dict[str, dict[str, Any]] = {
    "int4": {"dtype": "int4"},
    "int4 zero points": {"dtype": "int4", "symmetric": False},
    "uint4 zero points": {"dtype": "uint4", "symmetric": False, "scale_dtype": "float16"},
    "int2 zero points": {"dtype": "int2", "symmetric": False, "scale_dtype": "bfloat16"},
    "nf4": {"dtype": jq.nf4, "scale_dtype": "float16"},
    "mxfp4": {"dtype": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu"},
    "mxfp4, floor": {"dtype": "float4_e2m1fn", "scale_rule": "floor", "ties": "toward_zero"},
    "nvfp4": {"dtype": "float4_e2m1fn", "scale_spec": jq.QuantSpec("float8_e4m3fn")},
    "float8": {"dtype": "float8_e4m3fn"},
    "int3": {"dtype": "int3"},
    "uint3 zero points": {"dtype": "uint3", "scale_dtype": "float16"},
    "uint3 offsets": {"dtype": "uint3", "offset": True, "scale_dtype": "bfloat16"},
    "uint4 offsets": {"dtype": "uint4", "offset": True},
    "int4 nested": {"dtype": "int4", "scale_spec": jq.QuantSpec("uint8")},
    "nf4 nested": {"dtype": jq.nf4, "scale_spec": jq.QuantSpec("int8", jq.PerAxis(-1))},
    "uint4 nested offsets": {"dtype": "uint4", "offset": True, "scale_spec": jq.QuantSpec("uint6", jq.Blocked(-1, 4))},
    "uint6 signed nested offsets": {"dtype": "uint6", "offset": True, "scale_spec": jq.QuantSpec("int8")},
}
METHODS: dict[str, Any] = {
    "GPTQ": ptq.GPTQ(sweeps=1, refits=1),
    "AdaRound": ptq.AdaRound(steps=60),
    "HQQ": ptq.HQQ(),
    "Nearest": ptq.Nearest(),
}
FLOATS = ("nf4", "mxfp4", "mxfp4, floor", "nvfp4", "float8", "nf4 nested")


def network(params: Any, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["up"]) @ params["down"].T


def sample(rng: np.random.Generator) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return weights with a few large elements, and correlated inputs."""
    params = {name: jnp.asarray(rng.standard_t(4, (40, 24)) * 0.2, F32) for name in ("up", "down")}
    params["down"] = jnp.asarray(rng.standard_t(4, (8, 24)) * 0.2 + 0.1, F32)
    return params, jnp.asarray(rng.normal(size=(128, 40)) @ rng.normal(size=(40, 40)), F32)


def make_spec(name: str, axis: int = 0) -> jq.QuantSpec:
    options = dict(SPECS[name])
    return jq.QuantSpec(options.pop("dtype"), jq.Blocked(axis, BLOCK), **options)


def prepare(name: str, params: Any, x: jax.Array) -> jq.Prepared:
    options = dict(SPECS[name])
    weight = jq.Weight(options.pop("dtype"), block=BLOCK, options=options)
    return jq.prepare(network, params, x, rules=[jq.Rule(weight=weight)], strict=True)


def check_codes(q: jq.QuantizedArray, spec: jq.QuantSpec) -> None:
    """Check that an array has the parts that `jq.quantize` gives it, and codes within the bounds of the spec."""
    parts = [jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in (q, jq.quantize(jnp.zeros(q.shape), spec))]
    assert jax.tree.leaves(parts[0]) == jax.tree.leaves(parts[1])
    assert q.codes.dtype == spec.carrier
    if spec.codebook is None:
        codes = np.asarray(q.codes).astype(F32)
        assert spec.bounds[0] <= codes.min()
        assert codes.max() <= spec.bounds[1]
    assert np.isfinite(q.dequantize()).all()


def check_tree(tree: Any, template: Any) -> None:
    """Check that a tree can be loaded where a checkpoint of `convert` was expected."""
    assert jax.tree.structure(tree) == jax.tree.structure(template)
    jax.tree.map(lambda x, y: check_alike(x, y), tree, template)


def check_alike(x: jax.Array, y: jax.Array) -> None:
    assert (x.shape, x.dtype) == (y.shape, y.dtype)


def measure(prepared: jq.Prepared, params: Any, tree: Any, x: jax.Array) -> float:
    return float(jnp.mean((prepared.apply(tree, x) - network(params, x)) ** 2))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sample(6)
def test_a_network_loses_less(name: str, method: str, rng: np.random.Generator) -> None:
    params, x = sample(rng)
    prepared = prepare(name, params, x)
    if method == "AdaRound" and name in FLOATS:
        with pytest.raises(ValueError, match=r"adaround: spec: expected codes of an integer dtype, got "):
            ptq.apply(prepared, params, [x], METHODS[method])
        return
    tree, notes = ptq.apply(prepared, params, [x], METHODS[method])
    nearest = prepared.convert(params)
    check_tree(tree, nearest)
    for leaf, axis in (("up", 0), ("down", 1)):
        check_codes(tree.params[leaf], make_spec(name, axis))
    if method == "HQQ":  # without data, for errors of the weight: the result may be worse
        return
    for note in notes:
        assert note.before is not None
        assert note.after is not None
        assert note.after <= note.before * 1.001
    if method == "Nearest":  # each layer loses less, but all of them together may lose more
        return
    factor = {"GPTQ": 0.75, "AdaRound": 0.85}[method]
    assert measure(prepared, params, tree, x) < factor * measure(prepared, params, nearest, x)


def biased(params: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ params["up"] + params["shift"][None])
    return hidden @ params["down"].T + params["bias"][None]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.sample(3)
def test_passes_before_and_after_the_rounding(name: str, rng: np.random.Generator) -> None:
    """Scaling searches with the spec, the correction of biases and tuning keep its parts; all lower the error."""
    params, x = sample(rng)
    params |= {"shift": jnp.asarray(rng.normal(size=24), F32), "bias": jnp.zeros(8)}
    options = dict(SPECS[name])
    rule = jq.Rule(weight=jq.Weight(options.pop("dtype"), block=BLOCK, options=options))
    prepared = jq.prepare(biased, params, x, rules=[rule], strict=True)
    stats, expected = ptq.collect(prepared, params, [x]), biased(params, x)
    smooth = ptq.smooth(prepared, params, stats, x, method="awq")
    assert [note.action for note in smooth.notes if note.before is not None]  # "down", behind the relu
    np.testing.assert_allclose(
        biased(smooth.tree, x), expected, rtol=1e-3, atol=1e-3 * float(jnp.max(jnp.abs(expected)))
    )
    nearest = prepared.convert(params)
    check_tree(prepared.convert(smooth.tree), nearest)
    corrected = ptq.correct_bias(prepared, params, nearest, [x]).tree
    check_tree(corrected, nearest)
    tuned, notes = ptq.tune(prepared, params, corrected, [x], rounds=3, codes=True, progress=False)
    check_tree(tuned, nearest)
    for leaf, axis in (("up", 0), ("down", 1)):
        check_codes(tuned.params[leaf], make_spec(name, axis))
        reasons = notes[leaf].reason
        assert ("codes of floats" in reasons) == ((options.get("scale_dtype") is not None and name == "mxfp4")
                                                  or name in ("mxfp4, floor", "nvfp4", "float8"))  # fmt: skip
        assert ("scales that are quantized themselves" in reasons) == ("scale_spec" in options)
    losses = [float(jnp.mean((prepared.apply(q, x) - expected) ** 2)) for q in (nearest, corrected, tuned)]
    assert losses[1] <= losses[0] * 1.1  # the mean of each output is right then, its variance may be larger
    assert losses[2] <= losses[1] * 1.0001


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.sample(3)
def test_a_range_that_is_searched_has_less_error(name: str, rng: np.random.Generator) -> None:
    w = jnp.asarray(rng.standard_t(4, (40, 24)) * 0.2 + 0.1, F32)
    spec = make_spec(name)
    low, high = ptq.search_range(w, spec)
    assert low.shape == high.shape == (3, 24)
    errors = [jnp.mean((w - jq.quantize(w, spec, ends).dequantize()) ** 2) for ends in (None, (low, high))]
    # Scales are searched before they are quantized themselves.
    assert errors[1] <= errors[0] * (1.1 if spec.scale_spec else 1.000001)


def test_a_searched_range_of_offsets_is_a_part_of_the_whole_range() -> None:
    """Nothing pulls it towards 0, and the ends of the best one are those of a single outlier's neighbors."""
    w = jnp.asarray([[5.0, 5.1, 5.2, 5.3], [-9.0, -9.0, -9.0, -9.0]])
    spec = jq.QuantSpec("uint2", jq.PerAxis(0), offset=True)
    low, high = ptq.search_range(w, spec)
    np.testing.assert_array_equal(low.ravel(), [5.0, -9.0])
    np.testing.assert_array_equal(high.ravel(), jnp.asarray([5.3, -9.0]))
    np.testing.assert_allclose(jq.quantize(w, spec, (low, high)).dequantize(), w, rtol=1e-6)


def test_hqq_fits_offsets(rng: np.random.Generator) -> None:
    """The sum that it minimizes falls, and far from 0 an offset is better than a zero point."""
    w = jnp.asarray(rng.standard_t(4, (96, 6)) * 0.2 + 3, F32)
    spec, other = (jq.QuantSpec("uint3", jq.PerAxis(1), offset=offset) for offset in (True, False))
    q, sums = ptq.hqq(w, spec, diagnostics=True)
    assert sums[-1] < 0.99 * sums[0]
    errors = [float(jnp.sum(jnp.abs(w - x.dequantize()) ** 0.7)) for x in (q, jq.quantize(w, spec), ptq.hqq(w, other))]
    assert errors[0] < errors[1] < errors[2]
    # A column that is 0 keeps its range, and so does one without any difference.
    flat = jnp.broadcast_to(jnp.asarray([0, 3.0]), (16, 2))
    np.testing.assert_array_equal(ptq.hqq(flat, spec).dequantize(), flat)


@pytest.mark.parametrize(("name", "dtypes"), [("uint4 offsets", ("uint2", "uint4")), ("nvfp4", ("float4_e2m1fn",))])
def test_bits_of_each_spec(name: str, dtypes: tuple[str, ...], rng: np.random.Generator) -> None:
    """Candidates keep the offsets and the scales of the rule; one that cannot have them is refused by name."""
    pytest.importorskip("scipy")
    params, x = sample(rng)
    prepared = prepare(name, params, x)
    plan = ptq.allocate_bits(prepared, params, [x], budget=10**6, dtypes=dtypes)
    assert set(plan.choices.values()) == {dtypes[-1]}
    check_tree(jq.prepare(network, params, x, rules=plan.rules).convert(params), prepared.convert(params))
    if name == "uint4 offsets":
        match = r"up as int4: jaxquant\.ptq\.allocate_bits: offset: expected False"
        with pytest.raises(ValueError, match=match):
            ptq.allocate_bits(prepared, params, [x], budget=10**6, dtypes=["int4"])


@pytest.mark.parametrize("name", ["uint3 offsets", "uint4 nested offsets", "nvfp4"])
@pytest.mark.parametrize("method", ["gptq", "hqq"])
@pytest.mark.sample(2)
def test_stacked_layers(name: str, method: str, rng: np.random.Generator) -> None:
    """Mapped over layers and jitted, each layer is as on its own."""
    spec = make_spec(name)
    ws = jnp.asarray(rng.normal(size=(2, 40, 6)), F32)
    xs = rng.normal(size=(2, 64, 40))
    hessians = jnp.asarray(np.einsum("lni,lnj->lij", xs, xs) / 64, F32)

    def run(w: jax.Array, hessian: jax.Array) -> jq.QuantizedArray:
        return ptq.gptq(w, hessian, spec) if method == "gptq" else ptq.hqq(w, spec)

    stacked = jax.jit(jax.vmap(run))(ws, hessians)
    for place, pair in enumerate(zip(ws, hessians, strict=True)):
        single, layer = run(*pair), jax.tree.map(lambda x, at=place: x[at], stacked)
        check_tree(layer, single)
        # Sums of a batch may have another order, so that codes near a tie differ.
        assert np.mean(np.asarray(layer.dequantize() == single.dequantize())) > 0.9 or method == "hqq"
        errors = [float(jnp.sum((pair[0] - x.dequantize()) ** 2)) for x in (layer, single)]
        np.testing.assert_allclose(*errors, rtol=0.05)


@pytest.mark.parametrize("name", ["uint4 offsets", "nvfp4"])
def test_scales_that_cannot_be_trained(name: str, rng: np.random.Generator) -> None:
    params, x = sample(rng)
    prepared = prepare(name, params, x)
    match = r"^(up|down): jaxquant\.Prepared\.trainable: estimator: expected None with QuantSpec"
    with pytest.raises(ValueError, match=match):
        prepared.trainable(params, estimator=jq.LSQPlus())


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.sample(4)
def test_training_on_codes(name: str, rng: np.random.Generator) -> None:
    """`fake_apply` equals `apply`, and weights have the gradients of the contractions of their values."""
    params, x = sample(rng)
    prepared = prepare(name, params, x)
    assert {row.form for row in prepared.coverage.rows} == {"weight-only"}
    q = prepared.convert(params)
    np.testing.assert_array_equal(jax.jit(prepared.fake_apply)(params, x), jax.jit(prepared.apply)(q, x))
    values = {path: leaf.dequantize() for path, leaf in q.params.items()}
    actual = jax.grad(lambda p: jnp.sum(prepared.fake_apply(p, x) ** 2))(params)
    expected = jax.grad(lambda p: jnp.sum(network(p, x) ** 2))(values)
    for path, slope in expected.items():
        is_inside = np.ones(slope.shape, bool)
        if "scale_rule" in SPECS[name]:  # the largest values saturate
            is_inside = np.abs(np.asarray(actual[path])) > 0
        first, second = (np.where(is_inside, g, 0) for g in (actual[path], slope))
        np.testing.assert_allclose(first, second, atol=1e-3 * float(jnp.max(jnp.abs(slope))))
