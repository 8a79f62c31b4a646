"""The functions of a prepared function: calibration, conversion, calls and training."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import pathlib
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jaxquant as jq
from jaxquant.transform import _calls, _prepared

F32 = np.float32
STATIC = jq.recipes.w8a8_static()
DYNAMIC = jq.recipes.w8a8_dynamic()
SYMMETRIC_INT4 = (jq.Rule(weight=jq.Weight("int4", block=4)),)
SATURATING = "2 can saturate in ONNX Runtime on x86-64 without VNNI; reduce_range=True avoids it"


def apply(params: Any, x: jax.Array, *, scale: float = 1.0, double: bool = False) -> jax.Array:
    """Return a network of two layers, with an option that is static and one that is traced."""
    h = jax.nn.relu(x @ params["first"]["kernel"] + params["first"]["bias"])
    h = h * 2 if double else h
    return h @ params["second"]["kernel"] * scale


@pytest.fixture
def params(rng: np.random.Generator) -> Any:
    def sample(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, 0.3, shape).astype(F32))

    return {"first": {"kernel": sample(12, 16), "bias": sample(1, 16)}, "second": {"kernel": sample(16, 5)}}


@pytest.fixture
def batches(rng: np.random.Generator) -> list[np.ndarray]:
    return list(rng.normal(0.1, 1, (4, 6, 12)).astype(F32))


def equal(a: Any, b: Any) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((np.asarray(x) == np.asarray(y)).all()), a, b)))


def test_prepare_reads_shapes_only(params: Any) -> None:
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    prepared = jq.prepare(apply, like, jax.ShapeDtypeStruct((6, 12), F32), rules=STATIC, strict=True)
    rows = prepared.coverage.rows
    assert [row.name for row in rows] == ["first/kernel", "second/kernel"]
    assert [row.form for row in rows] == ["integer", "integer"]
    assert rows[0].where.startswith(str(pathlib.Path(__file__)))
    assert "first/kernel" in str(prepared.coverage)
    assert str(prepared.coverage).splitlines()[-2:] == ["2 integer", SATURATING]
    assert prepared.coverage.to_dict()["second/kernel"]["shapes"] == [[6, 16], [16, 5]]
    # The parameters without a contraction are not quantized.
    assert {prepared.names[place] for place in prepared.leaves} == {"first/kernel", "second/kernel"}


@pytest.mark.parametrize(
    "rules", [STATIC, DYNAMIC, jq.recipes.weight_only_int8()], ids=["static", "dynamic", "weights"]
)
def test_integers_are_those_of_the_operators(params: Any, batches: Any, rules: Any) -> None:
    """The transform computes what a user writes with `quantize` and `dot_general` by hand."""
    x = jnp.asarray(batches[0])
    prepared = jq.prepare(apply, params, x, rules=rules)
    ranges = prepared.calibrate(params, batches)
    specs = {"static": jq.QuantSpec("uint8"), "dynamic": jq.QuantSpec("uint8", jq.PerAxis(0))}
    spec = specs["static"] if rules is STATIC else specs["dynamic"] if rules is DYNAMIC else None

    def contract(x: jax.Array, name: str) -> jax.Array:
        w = jq.quantize(params[name]["kernel"], jq.QuantSpec("int8", jq.PerAxis(1)))
        if spec is None:
            return jq.matmul(x, w)
        ends = ranges.get(f"{name}/kernel", {"0": None})["0"]
        return jq.matmul(jq.quantize(x, spec, range=ends), w)

    @jax.jit
    def compute(x: jax.Array) -> jax.Array:
        return contract(jax.nn.relu(contract(x, "first") + params["first"]["bias"]), "second")

    y = jax.jit(prepared.apply)(prepared.convert(params, ranges), x)
    np.testing.assert_array_equal(y, compute(x))


def test_calibration_by_hand_equals_the_loop(params: Any, batches: Any, tmp_path: pathlib.Path) -> None:
    prepared = jq.prepare(apply, params, batches[0], rules=STATIC)
    ranges = prepared.calibrate(params, iter(batches), progress=False)
    observe = jax.jit(prepared.observe)
    halves = []
    for part in (batches[:1], batches[1:]):
        state = prepared.init()
        for batch in part:
            state = observe(state, params, batch)
        halves.append(state)
    assert equal(prepared.finalize(prepared.merge(*halves)), ranges)
    assert equal(prepared.calibrate(params, batches[1:], state=halves[0]), ranges)
    # The range of the first layer is that of the inputs.
    lo, hi = ranges["first/kernel"]["0"]
    assert (float(lo.squeeze()), float(hi.squeeze())) == (np.min(batches), np.max(batches))
    # An interrupted loop goes on from its file, in which the first two batches are counted.
    path = tmp_path / "ranges"
    prepared.calibrate(params, batches[:2], checkpoint=path)
    assert equal(
        jq.prepare(apply, params, batches[0], rules=STATIC).calibrate(params, batches, checkpoint=path), ranges
    )
    with pytest.raises(ValueError, match=r"jaxquant\.Prepared\.calibrate: checkpoint: .* other weights or layers"):
        prepared.calibrate(jax.tree.map(lambda w: 2 * w, params), batches, checkpoint=path)


def test_states_of_devices_are_reduced(params: Any, batches: Any) -> None:
    prepared = jq.prepare(apply, params, batches[0], rules=STATIC)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def observe(params: Any, x: jax.Array) -> Any:
        state = prepared.observe(prepared.init(), params, x)
        return prepared.all_reduce(state, "data")

    run = jax.shard_map(observe, mesh=mesh, in_specs=(whole, split), out_specs=whole, check_vma=False)
    state = jax.jit(run)(params, np.concatenate(batches))
    assert equal(prepared.finalize(state), prepared.calibrate(params, batches))


@pytest.mark.parametrize("rules", [STATIC, DYNAMIC])
def test_gradients_of_devices_are_summed(params: Any, batches: Any, rules: Any) -> None:
    """As for floats, the gradient of parameters that all devices have is the sum over the devices."""
    prepared = jq.prepare(apply, params, batches[0], rules=rules)
    ranges, x = prepared.calibrate(params, batches), np.concatenate(batches)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    differentiate = jax.grad(lambda params, x: (prepared.fake_apply(prepared.trainable(params, ranges), x) ** 2).sum())
    run = jax.shard_map(differentiate, mesh=mesh, in_specs=(whole, split), out_specs=whole)
    actual, expected = jax.jit(run)(params, x), jax.jit(differentiate)(params, x)
    # A value near a tie may be rounded in another way by another program.
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) < 1e-2 * np.linalg.norm(b)


def test_batches_are_arrays_tuples_or_mappings(params: Any, batches: Any) -> None:
    x = batches[0]
    prepared = jq.prepare(apply, params, x, rules=STATIC, double=True)
    expected = prepared.calibrate(params, [x], double=True)
    assert equal(prepared.calibrate(params, [(x,)], double=True), expected)
    assert equal(prepared.calibrate(params, [{"x": x}], double=True), expected)
    assert not equal(prepared.calibrate(params, [x]), expected)
    with pytest.raises(ValueError, match=r"batches\[0\]: expected names of arguments that no other argument"):
        prepared.calibrate(params, [{"x": x, "scale": np.float32(1)}], scale=2.0)
    with pytest.raises(ValueError, match="expected at least one batch, got none"):
        prepared.calibrate(params, [])
    with pytest.raises(ValueError, match=r"a NaN or an infinity in batch 1"):
        prepared.calibrate(params, [x, x * np.inf])


def test_convert_keeps_the_tree(params: Any, batches: Any) -> None:
    prepared = jq.prepare(apply, params, batches[0], rules=DYNAMIC)
    qparams = prepared.convert(params)
    assert isinstance(qparams.params["first"]["kernel"], jq.QuantizedArray)
    assert qparams.params["first"]["bias"] is params["first"]["bias"]
    assert qparams.params["second"]["kernel"].codes.dtype == jnp.int8
    shapes = jax.eval_shape(prepared.convert, params)
    assert [x.shape for x in jax.tree.leaves(shapes)] == [x.shape for x in jax.tree.leaves(qparams)]
    assert equal(jax.jit(prepared.convert)(params), qparams)
    assert repr(qparams).startswith("QuantizedTree(2 quantized arrays, 1 other, 0 ranges, nbytes=")
    assert qparams.nbytes == sum(x.nbytes for x in jax.tree.leaves(qparams.params))
    assert jq.QuantizedTree([qparams, batches[0]]).nbytes == qparams.nbytes + batches[0].nbytes  # of any tree
    copy = jax.tree.map(jnp.copy, params)
    assert equal(prepared.convert(copy, delete=True), qparams)
    assert copy["first"]["kernel"].is_deleted()
    assert copy["second"]["kernel"].is_deleted()
    assert not copy["first"]["bias"].is_deleted()


def test_convert_keeps_arrays_that_are_still_needed() -> None:
    def function(params: Any, x: jax.Array) -> jax.Array:
        return x @ params["a"] @ params["b"] @ params["c"] + params["bias"][:1]

    first, second = jnp.full((8, 8), 0.5), jnp.full((8, 8), 0.25)
    params = {"a": first, "b": first, "c": second, "bias": second}
    prepared = jq.prepare(function, params, jnp.ones((2, 8)), rules=DYNAMIC)
    qparams = prepared.convert(params, delete=True)
    # One array under two paths is deleted after the second one; one that stays in floats is not deleted.
    assert first.is_deleted()
    assert qparams.params["bias"] is second
    assert not second.is_deleted()
    assert equal(qparams.params["a"].codes, qparams.params["b"].codes)


def test_parameters_have_names_of_their_own() -> None:
    x = jnp.ones((2, 8))
    params = {"a/b": jnp.full((8, 8), 0.5), "a": {"b": jnp.full((8, 8), 0.25)}}
    prepared = jq.prepare(lambda p, x: x @ p["a/b"] @ p["a"]["b"], params, x, rules=STATIC)
    names = ["['a/b']", "['a']['b']"]
    assert [row.name for row in prepared.coverage.rows] == names
    ranges = prepared.calibrate(params, [x])
    t: Any = prepared.trainable(params, ranges, estimator=jq.LSQ())
    assert sorted(t.scales.weights) == sorted(names)
    # Parameters that are a single array have a name, too.
    assert jq.prepare(lambda w, x: x @ w, params["a/b"], x, rules=STATIC).coverage.rows[0].name == "params"


def test_convert_frees_one_leaf_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a leaf is quantized, the floats of all leaves before it are gone."""
    params = {f"w{place}": jnp.full((8, 8), place + 1.0) for place in range(4)}
    prepared = jq.prepare(
        lambda params, x: functools.reduce(jnp.matmul, params.values(), x), params, jnp.ones((2, 8)), rules=DYNAMIC
    )
    deleted, quantize_weight = [], _prepared.quantize_weight

    def watch(*args: Any) -> Any:
        deleted.append(sum(w.is_deleted() for w in params.values()))
        return quantize_weight(*args)

    monkeypatch.setattr(_prepared, "quantize_weight", watch)
    prepared.convert(params, delete=True)
    assert deleted == [0, 1, 2, 3]


@pytest.mark.slow
def test_other_arguments_are_traced_or_static(params: Any, batches: Any) -> None:
    x = jnp.asarray(batches[0])
    prepared = jq.prepare(apply, params, x, rules=DYNAMIC, scale=1.0)
    qparams = prepared.convert(params)
    run = jax.jit(prepared.apply, static_argnames="double")
    y = run(qparams, x, scale=1.0)
    np.testing.assert_array_equal(run(qparams, x, scale=2.0), 2 * y)
    np.testing.assert_array_equal(run(qparams, x, double=True).shape, y.shape)
    # Another batch size needs no other preparation.
    np.testing.assert_array_equal(run(qparams, x[:1], scale=1.0), y[:1])
    np.testing.assert_array_equal(run(qparams, np.asarray(x), scale=1.0), y)


def test_check_reports_other_arguments(params: Any, batches: Any) -> None:
    prepared = jq.prepare(apply, params, batches[0], rules=DYNAMIC)
    rows = prepared.check(params, jax.ShapeDtypeStruct((3, 12), F32)).rows
    assert rows[0].shapes == ((3, 12), (12, 16))
    assert prepared.check(prepared.convert(params), batches[0]).to_dict() == prepared.coverage.to_dict()


# Training.


def test_coverage_of_symbolic_shapes_is_for_json(params: Any, batches: Any) -> None:
    prepared = jq.prepare(apply, params, batches[0], rules=jq.recipes.w8a8_dynamic())
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 12"), jnp.float32)
    shapes = [row["shapes"] for row in json.loads(json.dumps(prepared.check(params, shape).to_dict())).values()]
    assert shapes[0][0] == ["b", 12]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "estimator"),
    [
        *(
            pytest.param(rules, estimator, id=f"{name}-{type(estimator).__name__}")
            for name, rules in (("static", STATIC), ("dynamic", DYNAMIC), ("symmetric int4", SYMMETRIC_INT4))
            for estimator in (jq.LSQ(), jq.LSQPlus())
        ),
        pytest.param(jq.recipes.weight_only_int4(4), jq.LSQPlus(), id="int4-LSQPlus"),  # LSQ has no zero points
    ],
)
def test_trained_scales_are_those_that_are_served(params: Any, batches: Any, rules: Any, estimator: Any) -> None:
    x = jnp.asarray(batches[0])
    prepared = jq.prepare(apply, params, x, rules=rules)
    start: Any = prepared.trainable(params, prepared.calibrate(params, batches), estimator=estimator)
    trained = start
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(start.scales))
    assert set(start.scales.activations) == (set(prepared.static_ranges))

    @jax.jit
    def step(trained: Any) -> tuple[Any, jax.Array]:
        def find_loss(trained: Any) -> tuple[jax.Array, jax.Array]:
            y = prepared.fake_apply(trained, x)
            return ((y - 1) ** 2).mean(), y

        slopes, y = jax.grad(find_loss, has_aux=True)(trained)
        return jax.tree.map(lambda p, g: p - np.float32(0.01) * g, trained, slopes), y

    serve = jax.jit(prepared.apply)
    for _ in range(3):
        following, y = step(trained)
        np.testing.assert_array_equal(serve(prepared.convert(trained), x), y)
        trained = following
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), start.scales, trained.scales)
    assert all(part.scale for part in moved.weights.values())
    assert all(part.scale for parts in moved.activations.values() for part in parts.values())


@pytest.mark.slow
def test_floats_behind_a_contraction_have_the_same_bits(fixed_rng: np.random.Generator) -> None:
    """A tanh depends on the loop in which XLA computes it, so both programs must have the same one."""
    x, w, v = (jnp.asarray(fixed_rng.normal(0, 0.5, shape).astype(F32)) for shape in ((8, 8), (8, 8), (8, 8)))

    def network(params: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ params["w"]) @ params["v"])

    params = {"w": w, "v": v}
    for size in range(1, 9):
        prepared = jq.prepare(network, params, x[:size], rules=STATIC)
        ranges = prepared.calibrate(params, [x])
        y = jax.jit(prepared.apply)(prepared.convert(params, ranges), x[:size])
        np.testing.assert_array_equal(jax.jit(prepared.fake_apply)(prepared.trainable(params, ranges), x[:size]), y)


@pytest.mark.slow
def test_gradient_is_that_of_the_floats_the_codes_stand_for(params: Any, batches: Any) -> None:
    """With inputs that need no clipping, the gradient is that of the float program at the dequantized values."""
    x = jnp.asarray(batches[0])
    prepared = jq.prepare(apply, params, x, rules=DYNAMIC)

    def reference(params: Any) -> jax.Array:
        fake = functools.partial(jq.fake_quantize, spec=jq.QuantSpec("int8", jq.PerAxis(1)))
        rows = functools.partial(jq.fake_quantize, spec=jq.QuantSpec("uint8", jq.PerAxis(0)))
        h = jax.nn.relu(rows(x) @ fake(params["first"]["kernel"]) + params["first"]["bias"])
        return rows(h) @ fake(params["second"]["kernel"])

    got = jax.grad(lambda p: prepared.fake_apply(p, x).sum())(params)
    expected = jax.grad(lambda p: reference(p).sum())(params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_apply_refuses_a_gradient_that_rounding_makes_zero(params: Any, batches: Any) -> None:
    x = jnp.asarray(batches[0])
    prepared = jq.prepare(apply, params, x, rules=DYNAMIC)
    qparams = prepared.convert(params)
    with pytest.raises(TypeError, match=r"^first/kernel .*Prepared\.apply: args: expected no gradient"):
        jax.grad(lambda x: prepared.apply(qparams, x).sum())(x)
    # What follows the contractions has its gradient, and so has a contraction of floats.
    assert jax.grad(lambda s: (s * prepared.apply(qparams, x)).sum())(1.0) != 0
    weights = jq.prepare(apply, params, x, rules=jq.recipes.weight_only_int8())
    assert jax.grad(lambda x: weights.apply(weights.convert(params), x).sum())(x).any()


@pytest.mark.slow
def test_pact_trains_activations_only(params: Any, batches: Any) -> None:
    x = [np.abs(batch) for batch in batches]
    prepared = jq.prepare(apply, params, x[0], rules=STATIC)
    t: Any = prepared.trainable(params, prepared.calibrate(params, x), estimator=jq.PACT())
    assert not t.scales.weights
    assert set(t.scales.activations) == {"first/kernel", "second/kernel"}
    y = jax.jit(prepared.fake_apply)(t, x[0])
    np.testing.assert_array_equal(jax.jit(prepared.apply)(prepared.convert(t), x[0]), y)
    ranges = prepared.calibrate(params, batches)
    with pytest.raises(ValueError, match=r"^first/kernel: .*estimator: expected LSQ\(\) or LSQPlus\(\)"):
        prepared.trainable(params, ranges, estimator=jq.PACT())


@pytest.mark.parametrize("kind", ["orbax", "safetensors"])
@pytest.mark.parametrize("rules", [STATIC, DYNAMIC, "learned"], ids=["static", "dynamic", "learned"])
def test_the_tree_is_saved(rules: Any, kind: str, params: Any, batches: Any, tmp_path: pathlib.Path) -> None:
    prepared = jq.prepare(apply, params, batches[0], rules=STATIC if rules == "learned" else rules)
    ranges = prepared.calibrate(params, batches)
    q = prepared.convert(params, ranges)
    if rules == "learned":
        q = prepared.convert(prepared.trainable(params, ranges, estimator=jq.LSQPlus()))
    save, load = (getattr(jq.checkpoint, f"{verb}_{kind}") for verb in ("save", "load"))
    save(tmp_path / "served", q)
    restored = load(tmp_path / "served", like=jax.eval_shape(lambda: q))
    assert equal(restored, q)
    serve = jax.jit(prepared.apply)
    for tree in (restored, jq.QuantizedTree(**load(tmp_path / "served"))):  # without a target, ranges are dicts
        np.testing.assert_array_equal(serve(tree, batches[0]), serve(q, batches[0]))


def test_the_tree_is_a_pytree(params: Any, batches: Any) -> None:
    prepared = jq.prepare(apply, params, batches[0], rules=STATIC)
    q = prepared.convert(params, prepared.calibrate(params, batches))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(q)]
    assert ".params['first']['bias']" in paths
    assert ".ranges['first/kernel']['0'].lo" in paths
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.params = None  # type: ignore[misc]
    y = jax.jit(prepared.apply)(q, batches[0])
    placed = jax.device_put(q, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    np.testing.assert_array_equal(jax.jit(prepared.apply)(placed, batches[0]), y)
    exported = jax.export.export(jax.jit(prepared.apply))(q, batches[0]).serialize()
    np.testing.assert_array_equal(jax.export.deserialize(exported).call(q, batches[0]), y)
    # Two trees at once, and one after the other: as for any pytree.
    two = jax.tree.map(lambda *xs: jnp.stack(xs), q, q)
    serve = jax.jit(jax.vmap(prepared.apply, (0, None)))
    np.testing.assert_array_equal(serve(two, batches[0]), jnp.stack([y, y]))
    scanned = jax.jit(
        lambda q: jax.lax.scan(lambda carry, _: (carry, prepared.apply(carry, batches[0])), q, length=2)[1]
    )
    np.testing.assert_array_equal(scanned(q), jnp.stack([y, y]))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion"])
def test_fixed_ranges_stay(optimizer: str, params: Any, batches: Any) -> None:
    """Weight decay, which moves what has no gradient, does not move them."""
    x = jnp.asarray(batches[0])
    prepared = jq.prepare(apply, params, x, rules=STATIC)
    ranges = prepared.calibrate(params, batches)
    transform: Any = {
        "adamw": optax.adamw(0.1, weight_decay=0.5), "lion": optax.lion(0.1, weight_decay=0.5),
        "sgd": optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1, momentum=0.9)),
    }[optimizer]  # fmt: skip

    @jax.jit
    def step(t: Any, state: Any) -> tuple[Any, Any]:
        gradient = jax.grad(lambda t: (prepared.fake_apply(t, x) ** 2).mean())(t)
        updates, state = transform.update(gradient, state, t)
        return optax.apply_updates(t, updates), state

    start: Any = prepared.trainable(params, ranges)
    t = start
    state = transform.init(t)
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies floats by counts
        for _ in range(3):
            t, state = step(t, state)
    assert step._cache_size() == 1  # type: ignore[attr-defined]
    assert t.scales == start.scales
    assert not equal(t.params, start.params)
    q = prepared.convert(t)
    assert equal(q.ranges, ranges)
    np.testing.assert_array_equal(jax.jit(prepared.apply)(q, x), jax.jit(prepared.fake_apply)(t, x))


def test_learned_scales_are_kept_from_weight_decay_by_a_mask(params: Any, batches: Any) -> None:
    x = jnp.asarray(batches[0])
    prepared = jq.prepare(apply, params, x, rules=STATIC)
    t = prepared.trainable(params, prepared.calibrate(params, batches), estimator=jq.LSQ())
    mask = t.replace(params=True, scales=False)
    transform: Any = optax.add_decayed_weights(0.5, mask=mask)
    updates, _ = transform.update(jax.tree.map(jnp.zeros_like, t), transform.init(t), t)
    assert not any(x.any() for x in jax.tree.leaves(updates.scales))
    assert updates.params["first"]["kernel"].any()


def test_ranges_that_are_traced(params: Any, batches: Any) -> None:
    """A tree that is made inside of a traced function may have the ranges that this function computes."""
    x = jnp.asarray(batches[0])
    prepared = jq.prepare(apply, params, x, rules=STATIC)
    ranges = prepared.calibrate(params, [batches[0]])

    @jax.jit
    def find_gradient(params: Any, ranges: Any) -> Any:
        def find_loss(t: Any) -> jax.Array:
            return jax.checkpoint(prepared.fake_apply)(t, x).sum()

        return jax.grad(find_loss)(prepared.trainable(params, ranges)).params

    t = prepared.trainable(params, ranges)
    assert equal(find_gradient(params, ranges), jax.jit(jax.grad(lambda t: prepared.fake_apply(t, x).sum()))(t).params)
    other = prepared.trainable(params, jax.tree.map(lambda end: 2 * end, ranges))
    assert t.scales != other.scales
    assert hash(t.scales) == hash(prepared.trainable(params, ranges).scales)
    assert repr(t) == "TrainableTree(3 arrays, FixedRanges(first/kernel, second/kernel))"
    # A value for all leaves, such as an axis of `jax.vmap`.
    axes: Any = (0, None)
    assert repr(jq.QuantizedTree(*axes)) == "QuantizedTree(0 quantized arrays, 1 other, 0 ranges, nbytes=0)"


def test_a_traced_function_returns_fixed_ranges(params: Any, batches: Any) -> None:
    """Inside of the function they are leaves without a gradient, and outside of it no leaves."""
    x = jnp.asarray(batches[0])
    prepared = jq.prepare(apply, params, x, rules=STATIC)
    ranges = prepared.calibrate(params, batches)
    t = prepared.trainable(params, ranges)

    @jax.jit
    def step(params: Any, ranges: Any) -> Any:
        t = prepared.trainable(params, ranges)
        gradient = jax.grad(lambda t: prepared.fake_apply(t, x).sum())(t)
        return t, gradient, jax.tree.map(lambda p, g: p - 0.1 * g, t, gradient)

    returned, gradient, updated = step(params, ranges)
    assert equal(returned, t)
    assert returned.scales == t.scales
    assert updated.scales == t.scales
    assert not np.any([end for places in gradient.scales.values() for pair in places.values() for end in pair])
    np.testing.assert_array_equal(prepared.fake_apply(returned, x), prepared.fake_apply(t, x))
    assert equal(prepared.convert(jax.jit(prepared.trainable)(params, ranges)).ranges, ranges)
    stacked: Any = jax.vmap(lambda ranges: prepared.trainable(params, ranges))(
        jax.tree.map(lambda end: end[None], ranges)
    )
    assert stacked.scales["first/kernel"]["0"].lo.shape == (1, 1, 1)


@pytest.mark.parametrize("estimator", [None, jq.LSQ(), jq.LSQPlus(elements=3)])
def test_a_program_that_takes_a_trainable_tree_is_saved(estimator: Any, params: Any, batches: Any) -> None:
    x = jnp.asarray(batches[0])
    prepared = jq.prepare(apply, params, x, rules=STATIC)
    ranges = prepared.calibrate(params, batches)
    t = prepared.trainable(params, ranges, estimator=estimator)
    program = jax.export.deserialize(jax.export.export(jax.jit(prepared.fake_apply))(t, x).serialize())
    np.testing.assert_array_equal(program.call(t, x), jax.jit(prepared.fake_apply)(t, x))
    make = jax.jit(functools.partial(prepared.trainable, estimator=estimator))
    program = jax.export.deserialize(jax.export.export(make)(params, ranges).serialize())
    assert equal(program.call(params, ranges), make(params, ranges))


@pytest.mark.parametrize("estimator", [None, jq.LSQ()])
def test_a_trainable_tree_is_saved_and_loaded_with_like(estimator: Any, tmp_path: pathlib.Path) -> None:
    params, x = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)}, jnp.linspace(-1.0, 2.0, 8).reshape(2, 4)
    prepared = jq.prepare(lambda params, x: x @ params["w"], params, x, rules=jq.recipes.w8a8_static())
    t = prepared.trainable(params, prepared.calibrate(params, [x]), estimator=estimator)
    jq.checkpoint.save_safetensors(tmp_path / "t", t)
    loaded = jq.checkpoint.load_safetensors(tmp_path / "t", like=jax.eval_shape(lambda: t))
    assert equal(loaded, t)
    assert (prepared.fake_apply(loaded, x) == prepared.fake_apply(t, x)).all()


# Modules and closures.


class Block(nnx.Module):
    """Two layers, of which the second is used twice."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(12, 8, rngs=rngs)
        self.second = nnx.Linear(8, 8, rngs=rngs)
        self.same = self.second

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.same(jax.nn.relu(self.second(jax.nn.relu(self.first(x)))))


@pytest.mark.slow
def test_nnx_module_is_the_parameters(batches: Any) -> None:
    model, x = Block(nnx.Rngs(0)), jnp.asarray(batches[0])
    prepared = jq.prepare(lambda model, x: model(x), model, x, rules=STATIC, strict=True)
    # The shared layer is one parameter with two uses.
    assert [row.name for row in prepared.coverage.rows] == ["first/kernel", "same/kernel", "same/kernel#1"]
    ranges = prepared.calibrate(model, batches)
    converted = prepared.convert(model, ranges)
    assert isinstance(converted.params, Block)
    assert isinstance(converted.params.first.kernel[...], jq.QuantizedArray)
    assert converted.params.same is converted.params.second
    y = nnx.jit(prepared.apply)(converted, x)
    np.testing.assert_array_equal(y, nnx.jit(prepared.fake_apply)(prepared.trainable(model, ranges), x))
    np.testing.assert_allclose(y, model(x), atol=0.1)


@pytest.mark.slow
def test_quantized_parameters_are_left_alone(params: Any, batches: Any) -> None:
    """A function that contracts quantized arrays itself gets them as they are."""
    x = jnp.asarray(batches[0])
    given = {
        **params,
        "first": {**params["first"], "kernel": jq.quantize(params["first"]["kernel"], jq.QuantSpec("int8"))},
    }

    def mixed(params: Any, x: jax.Array) -> jax.Array:
        return jq.matmul(x, params["first"]["kernel"]) @ params["second"]["kernel"]

    prepared = jq.prepare(mixed, given, x, rules=DYNAMIC, strict=True)
    assert [prepared.names[place] for place in prepared.leaves] == ["second/kernel"]
    qparams = prepared.convert(given)
    assert qparams.params["first"]["kernel"] is given["first"]["kernel"]
    y = jax.jit(prepared.apply)(qparams, x)
    np.testing.assert_array_equal(y, jax.jit(prepared.fake_apply)(given, x))


RULES = {
    "dynamic": DYNAMIC, "static": STATIC, "weight_only": jq.recipes.weight_only_int8(),
    "onnx_runtime": jq.recipes.onnx_runtime(),
}  # fmt: skip


@pytest.mark.parametrize("rules", list(RULES))
def test_contractions_run_on_the_codes_that_parameters_have(rules: str, params: Any, batches: Any) -> None:
    """Those of a loaded checkpoint: with the scales of the file, which are other ones than those of the rules."""
    x = jnp.asarray(batches[0])
    q = jq.quantize(params["first"]["kernel"], jq.QuantSpec("int8", jq.PerAxis(1), power_of_two=True))
    given = {**params, "first": {**params["first"], "kernel": q}}
    prepared = jq.prepare(apply, given, x, rules=RULES[rules], strict=True)
    row, other = prepared.coverage.rows
    assert row.form == ("weight-only" if rules == "weight_only" else "integer")
    assert row.reason == "first/kernel keeps its codes"
    assert other.reason == ""
    ranges = prepared.calibrate(given, batches)
    converted = prepared.convert(given, ranges)
    assert converted.params["first"]["kernel"] is q
    y = jax.jit(prepared.apply)(converted, x)
    np.testing.assert_array_equal(y, jax.jit(prepared.fake_apply)(prepared.trainable(given, ranges), x))
    assert np.abs(y - apply(params, x)).max() < 0.05 * np.abs(y).max()
    if rules == "dynamic":
        activations = jq.quantize(x, prepared.coverage.rows[0].activations[0])
        h = jax.nn.relu(jq.matmul(activations, q) + params["first"]["bias"])
        rest = jq.quantize(h, other.activations[0])
        np.testing.assert_array_equal(y, jq.matmul(rest, converted.params["second"]["kernel"]))
    # The learned scales are those of the weights in floats.
    learned: Any = prepared.trainable(given, ranges, estimator=jq.LSQ())
    assert set(learned.scales.weights) == {"second/kernel"}
    assert prepared.convert(learned).params["first"]["kernel"] is q
    with pytest.raises(ValueError, match=r"convert: params: expected a quantized array at first/kernel, got floats"):
        prepared.convert(params, ranges)
    with pytest.raises(ValueError, match=r"ptq.collect: prepared: expected .* floats in prepare, got codes at first/k"):
        jq.ptq.collect(prepared, given, batches)


def test_a_flax_model_with_loaded_codes(batches: Any) -> None:
    """Flax's layers take no quantized arrays, so they see floats in place of them."""
    model, x = linen.Dense(5), jnp.asarray(batches[0])
    variables = model.init(jax.random.key(0), x)
    first = jq.prepare(model.apply, variables, x, rules=DYNAMIC)
    q = first.convert(variables)
    loaded = jq.prepare(model.apply, q.params, x, rules=DYNAMIC, strict=True)
    again = loaded.convert(q.params)
    assert equal(again, q)
    np.testing.assert_array_equal(jax.jit(loaded.apply)(again, x), jax.jit(first.apply)(q, x))


@pytest.mark.parametrize("kind", ["axis that is summed", "float8", "codebook"])
def test_codes_that_a_rule_cannot_contract_are_left_alone(kind: str, params: Any, batches: Any) -> None:
    spec = {
        "axis that is summed": jq.QuantSpec("int8", jq.PerAxis(0)),
        "float8": jq.QuantSpec("float8_e4m3fn"), "codebook": jq.QuantSpec(jq.nf4, jq.PerAxis(1)),
    }[kind]  # fmt: skip
    x, q = jnp.asarray(batches[0]), jq.quantize(params["first"]["kernel"], spec)
    prepared = jq.prepare(lambda p, x: x @ p["q"] @ p["w"], {"q": q, "w": params["second"]["kernel"]}, x, rules=DYNAMIC)
    assert [row.name for row in prepared.coverage.rows if row.form == "integer"] == ["w"]
    converted = prepared.convert({"q": q, "w": params["second"]["kernel"]})
    y = jax.jit(prepared.apply)(converted, x)
    assert np.abs(y - x @ q.dequantize() @ params["second"]["kernel"]).max() < 0.05 * np.abs(y).max()


def test_function_is_traced_once_for_each_structure_and_shape(params: Any, batches: Any) -> None:
    traces = []

    def count(params: Any, x: jax.Array, scale: float, double: Any = False) -> jax.Array:
        traces.append((x.shape, double))
        return apply(params, x, scale=scale, double=bool(double))

    x = jnp.asarray(batches[0])
    prepared = jq.prepare(count, params, x, 1.0, rules=DYNAMIC)
    qparams = prepared.convert(params)

    def call(x: jax.Array, *options: Any) -> None:
        jax.eval_shape(lambda q, x: prepared.apply(q, x, 2.0, *options), qparams, x)

    call(x)
    jax.eval_shape(prepared.fake_apply, params, x, 3.0)
    assert traces == [((6, 12), False)]
    call(x[:2])
    call(x, True)
    call(x, 1)  # 1 == True, and is another argument
    call(x, True)
    assert traces[1:] == [((2, 12), False), ((6, 12), True), ((6, 12), 1)]
    assert [type(double) for _, double in traces] == [bool, bool, bool, int]
    # JAX's configuration is part of what it keeps a trace for.
    with jax.default_matmul_precision("highest"):
        call(x)
    assert len(traces) == 5


def test_function_of_an_unhashable_argument_is_traced_in_each_call(params: Any, batches: Any) -> None:
    class Options:
        __hash__ = None  # type: ignore[assignment]
        double = False

    options, x = Options(), jnp.asarray(batches[0])

    def read(params: Any, x: jax.Array, options: Options) -> jax.Array:
        h = apply(params, x, double=options.double)
        return jnp.concatenate([h, h]) if options.double else h

    prepared = jq.prepare(read, params, x, options, rules=DYNAMIC)
    options.double = True
    y = jax.eval_shape(lambda p, x: prepared.fake_apply(p, x, options), params, x)
    assert y.shape == (12, 5)


def test_kept_functions_do_not_keep_the_arrays_of_their_arguments(params: Any, batches: Any) -> None:
    x = jnp.asarray(batches[0]) + 1
    prepared = jq.prepare(apply, params, x, rules=DYNAMIC)
    reference = weakref.ref(x)
    del x
    gc.collect()
    assert reference() is None
    assert prepared.coverage.rows


def test_no_more_functions_are_kept_than_the_limit(params: Any, batches: Any) -> None:
    like = jax.ShapeDtypeStruct((6, 12), F32)
    prepared = jq.prepare(lambda p, x, step: x @ p["first"]["kernel"] * step, params, like, 0, rules=DYNAMIC)
    for step in range(_calls._MOST_KEPT + 2):
        prepared.check(params, like, step)
    assert len(prepared.traced._kept) == _calls._MOST_KEPT


def test_activation_of_several_contractions_is_quantized_once(params: Any, batches: Any) -> None:
    """Contractions of one value have its codes in common, also where only one of them is in a loop."""
    kernel = params["first"]["kernel"]
    given = {"a": kernel, "b": kernel * 2, "c": jnp.stack([kernel, -kernel])}

    def project(p: Any, x: jax.Array) -> Any:
        looped = jax.lax.scan(lambda y, w: (y + x @ w, None), jnp.zeros((6, 16)), p["c"])[0]
        return x @ p["a"], x @ p["b"], jax.jit(lambda x: x @ p["a"])(x * 2), looped

    x = jnp.asarray(batches[0])
    prepared = jq.prepare(project, given, x, rules=DYNAMIC, strict=True)
    qparams = prepared.convert(given)
    program = str(jax.make_jaxpr(prepared.apply)(qparams, x))
    # That of x and that of x * 2, and in the loop that of x again.
    assert program.count("name=quantize_affine") == 3
    y = jax.jit(prepared.apply)(qparams, x)
    assert equal(y, jax.jit(prepared.fake_apply)(given, x))


@pytest.mark.parametrize("is_inner", [False, True], ids=["function", "inner function"])
def test_trace_with_closed_over_tracers_is_not_kept(params: Any, batches: Any, is_inner: bool) -> None:
    x, cell = jnp.asarray(batches[0]), {}

    def add(y: jax.Array) -> jax.Array:
        return y + cell["offset"]

    @jax.jit
    def prepare_inside(params: Any, x: jax.Array, offset: jax.Array) -> jax.Array:
        cell["offset"] = offset
        last = jax.jit(lambda y: add(y)) if is_inner else add
        cell["prepared"] = jq.prepare(lambda p, x: last(apply(p, x)), params, x, rules=DYNAMIC)
        return x

    @jax.jit
    def call_inside(params: Any, x: jax.Array, offset: jax.Array) -> jax.Array:
        cell["offset"] = offset
        return cell["prepared"].fake_apply(params, x)

    prepare_inside.lower(params, x, jnp.float32(0))
    assert not cell["prepared"].traced._kept
    if not is_inner:  # JAX itself keeps the trace of the inner function
        assert call_inside.lower(params, x, jnp.float32(1)).out_info.shape == (6, 5)


@pytest.mark.slow
def test_closed_over_tracers_do_not_leak(params: Any, batches: Any) -> None:
    @jax.jit
    def run(params: Any, x: jax.Array, offset: jax.Array) -> jax.Array:
        prepared = jq.prepare(lambda p, x: apply(p, x) + offset, params, x, rules=DYNAMIC)
        return prepared.fake_apply(params, x)

    x = jnp.asarray(batches[0])
    np.testing.assert_array_equal(run(params, x, jnp.float32(0)), run(params, x[:], jnp.float32(0)))
    assert run(params, x[:2], jnp.float32(1)).shape == (2, 5)
