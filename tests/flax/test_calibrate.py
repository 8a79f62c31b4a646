"""Calibration of Linen and NNX models: what it changes, what it leaves alone, how it resumes, and what it refuses."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxquant as jq
from jaxquant import Dynamic, Learned, Static
from jaxquant import flax as qflax
from jaxquant.flax import linen as qnn
from jaxquant.flax import nnx as qnnx

F32 = np.float32
W, A = jq.QuantSpec("int8", jq.PerFeature()), jq.QuantSpec("uint8")
MINMAX = Static(jq.calibration.minmax)


class Net(nn.Module):
    """Dropout and batch normalisation around quantized layers."""

    activation_range: Any = MINMAX

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        """Returns 3 features."""
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return qnn.Dense(3, weight_spec=W, activation_spec=A, activation_range=self.activation_range)(x)


class Model(nnx.Module):
    """The same of NNX."""

    def __init__(self, activation_range: Any = MINMAX) -> None:
        rngs = nnx.Rngs(0)
        self.dropout, self.norm = nnx.Dropout(0.5, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.layer = qnnx.Linear(4, 3, weight_spec=W, activation_spec=A, activation_range=activation_range, rngs=rngs)

    def __call__(self, x: Any, scale: Any = 1.0) -> Any:
        """Returns 3 features."""
        return self.layer(self.norm(self.dropout(x)) * scale)


def draw_batches(count: int = 5) -> list[jax.Array]:
    return [jnp.asarray(x) for x in np.random.default_rng(7).normal(0.3, 1, (count, 6, 4)).astype(F32)]


def arrays_of(tree: Any) -> list[np.ndarray]:
    leaves = [v for v in jax.tree.leaves(tree) if not jnp.issubdtype(v.dtype, jax.dtypes.prng_key)]
    return [np.asarray(v).copy() for v in leaves]


def assert_same(actual: Any, expected: Any) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def range_of(batches: list[Any], variance: float = 1.0) -> tuple[float, float]:
    """The range of what the quantized layer is given in evaluation."""
    x = np.concatenate([np.asarray(b) for b in batches]) / np.sqrt(F32(variance) + F32(1e-5))
    return float(x.min()), float(x.max())


@pytest.mark.slow
def test_linen_finds_the_ranges_of_what_is_served() -> None:
    batches, module = draw_batches(), Net()
    variables = module.init(jax.random.key(0), batches[0])
    calibrated = qflax.calibrate(module, variables, batches)
    originals = {name: value for name, value in variables.items() if name != "ranges"}
    assert_same(arrays_of({name: calibrated[name] for name in originals}), arrays_of(originals))
    state = calibrated["ranges"]["Dense_0"]["DotGeneral_0"]["activation"]
    assert int(state["batches"]) == 5
    lo, hi = jq.calibration.minmax(A).finalize(state["state"])
    np.testing.assert_allclose([lo.item(), hi.item()], range_of(batches), rtol=1e-6)
    serving = qflax.convert(module, calibrated)
    np.testing.assert_array_equal(module.apply(serving, batches[0]), module.apply(calibrated, batches[0]))
    # A second call goes on, and a mapping or a tuple passes several arguments.
    named = qflax.calibrate(module, variables, [{"x": batches[0]}, (batches[1],), *batches[2:4]], train=False)
    recalibrated = qflax.calibrate(module, named, batches[4:])
    assert_same(arrays_of(recalibrated["ranges"]), arrays_of(calibrated["ranges"]))


@pytest.mark.slow
def test_nnx_finds_the_ranges_of_what_is_served() -> None:
    batches, model = draw_batches(), Model()
    model.train()
    state = nnx.state(model, nnx.Not(qnnx.Ranges))
    originals = arrays_of(state)
    qnnx.calibrate(model, batches)
    assert_same(arrays_of(nnx.state(model, nnx.Not(qnnx.Ranges))), originals)
    assert not model.dropout.deterministic, "the model keeps its mode"
    contraction = model.layer.dot_general
    assert int(contraction.activation_batches[...]) == 5
    lo, hi = jq.calibration.minmax(A).finalize(contraction.activation_range.get_value())
    np.testing.assert_allclose([lo.item(), hi.item()], range_of(batches), rtol=1e-6)
    # A loop of one's own, over the view that calibrates.
    other = Model()
    view = qnnx.calibration_view(other)
    for batch in batches:
        view(batch)
    assert_same(arrays_of(nnx.state(other, qnnx.Ranges)), arrays_of(nnx.state(model, qnnx.Ranges)))
    model.eval()
    model(100 * batches[0])
    assert int(contraction.activation_batches[...]) == 5, "an evaluation reads the ranges"
    third = Model()
    qnnx.calibrate(third, [{"x": batches[0], "scale": 3.0}])
    lo, hi = jq.calibration.minmax(A).finalize(third.layer.dot_general.activation_range.get_value())
    np.testing.assert_allclose([lo.item(), hi.item()], 3 * np.asarray(range_of(batches[:1])), rtol=1e-5)


def interrupted(batches: list[Any], count: int) -> Iterator[Any]:
    for index, batch in enumerate(batches):
        if index == count:
            raise KeyboardInterrupt
        yield batch


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_an_interrupted_calibration_resumes(tmp_path: Any, library: str) -> None:
    batches, path = draw_batches(), tmp_path / "calibration"
    if library == "linen":
        module = Net()
        variables = module.init(jax.random.key(0), batches[0])
        run = functools.partial(qflax.calibrate, module, variables, checkpoint=path)
        expected = arrays_of(qflax.calibrate(module, variables, batches)["ranges"])
        other = {**variables, "params": jax.tree.map(lambda p: p + 1, variables["params"])}
        rerun = functools.partial(qflax.calibrate, module, other, batches, checkpoint=path)
    else:
        whole, model = Model(), Model()
        qnnx.calibrate(whole, batches)
        expected = arrays_of(nnx.state(whole, qnnx.Ranges))
        run = functools.partial(qnnx.calibrate, model, checkpoint=path)
        other = Model()
        other.layer.kernel[...] += 1
        rerun = functools.partial(qnnx.calibrate, other, batches, checkpoint=path)
    with pytest.raises(KeyboardInterrupt):
        run(interrupted(batches, 3))
    assert path.exists()
    indices: list[int] = []

    def noted() -> Iterator[Any]:
        for index, batch in enumerate(batches):
            indices.append(index)
            yield batch if index >= 2 else jnp.full_like(batch, 1e6)  # batches that were seen are passed over

    for _ in range(2):  # and once more, with nothing left to do
        result: Any = run(noted())
        actual = arrays_of(result["ranges"] if library == "linen" else nnx.state(model, qnnx.Ranges))
        assert_same(actual, expected)
    assert indices == [*range(5)] * 2
    with pytest.raises(ValueError, match=r"checkpoint: expected a file written for these weights.*delete it to start"):
        rerun()
    path.write_bytes(b"something else")
    with pytest.raises(
        ValueError,
        match=r"checkpoint: expected no file, or a complete file that this function wrote.*which is another file",
    ):
        run(batches)
    with pytest.raises(ValueError, match=r"checkpoint: expected a folder that exists"):
        rerun(checkpoint=tmp_path / "missing" / "file")


def test_a_batch_that_is_not_finite_is_named() -> None:
    batches, module, model = draw_batches(3), Net(), Model()
    variables = module.init(jax.random.key(0), batches[0])
    bad = [batches[0], batches[1].at[0, 0].set(np.nan), batches[2]]
    text = r"batches: expected batches with finite activations, got a NaN or an infinity in batch 1, counted from 0"
    with pytest.raises(ValueError, match=rf"^jaxquant\.flax\.calibrate: {text}"):
        qflax.calibrate(module, variables, bad)
    with pytest.raises(ValueError, match=rf"^jaxquant\.flax\.nnx\.calibrate: {text}"):
        qnnx.calibrate(model, [batches[0], batches[0].at[0, 0].set(np.inf)])
    assert int(model.layer.dot_general.activation_batches[...]) == 1, "the ranges are as before it"


@pytest.mark.slow
def test_learned_scales_are_started() -> None:
    batches, module = draw_batches(2), Net(activation_range=Learned(jq.LSQPlus()))
    params = module.init(jax.random.key(0), batches[0])
    floats = {name: value for name, value in params.items() if name in ("params", "batch_stats")}
    calibrated = qflax.calibrate(module, floats, batches)
    assert set(calibrated["scales"]["Dense_0"]["DotGeneral_0"]) == {"activation_scale", "activation_zero_point"}
    qflax.check_calibrated(calibrated)


def test_progress_is_shown_when_it_is_asked_for(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxquant.calibration import loop

    monkeypatch.setattr(loop, "_SHOW_SECONDS", 0.0)
    batches, module = draw_batches(3), Net()
    variables = module.init(jax.random.key(0), batches[0])
    for progress, is_shown in ((False, False), (None, False), (True, True)):  # None: here is no terminal
        qflax.calibrate(module, variables, batches, progress=progress)
        output = capsys.readouterr()
        assert ("3/3" in output.err, output.out) == (is_shown, "")


@pytest.mark.slow
def test_what_cannot_be_calibrated() -> None:
    batch, module, model = draw_batches(1)[0], Net(), Model()
    variables = module.init(jax.random.key(0), batch)
    calibrate = functools.partial(qflax.calibrate, module, variables)
    with pytest.raises(
        TypeError, match=r"batches: expected an iterable of batches, such as \[batch\], got an array of"
    ):
        calibrate(batch)
    with pytest.raises(TypeError, match=r"batches: expected an iterable of batches.*, got dict"):
        calibrate({"x": batch})
    with pytest.raises(TypeError, match=r"batches\[0\]: expected an array, a tuple .*, got str"):
        calibrate(["x"])
    with pytest.raises(TypeError, match=r"batches\[0\]: expected a mapping from names of arguments"):
        calibrate([{1: batch}])
    with pytest.raises(TypeError, match=r"progress: expected True or False"):
        calibrate([batch], progress="bar")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"checkpoint: expected the path of a file, or None, got int"):
        calibrate([batch], checkpoint=3)  # type: ignore[arg-type]
    for run in (calibrate, functools.partial(qnnx.calibrate, model)):
        with pytest.raises(ValueError, match=r"batches: expected at least one batch, got none"):
            run([])
    with pytest.raises(TypeError, match=r"jaxquant\.flax\.calibrate: module: expected a flax\.linen\.Module"):
        qflax.calibrate(model, {}, [batch])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"jaxquant\.flax\.nnx\.calibrate: model: expected a flax\.nnx\.Module"):
        qnnx.calibrate(module, [batch])  # type: ignore[arg-type]
    dynamic = Net(activation_range=Dynamic())
    with pytest.raises(
        ValueError, match=r"expected a module with activation_range=Static\(\.\.\.\) in a layer, got on"
    ):
        qflax.calibrate(dynamic, dynamic.init(jax.random.key(0), batch), [batch])
    with pytest.raises(ValueError, match=r"expected a model that is not converted yet, with activation_range"):
        qnnx.calibrate(Model(Dynamic()), [batch])
    with pytest.raises(ValueError, match=r"model: expected a model with quantized layers, got none"):
        qnnx.calibration_view(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    serving = qflax.convert(module, calibrate([batch]))
    with pytest.raises(ValueError, match=r"variables with float kernels, got variables that are already converted"):
        qflax.calibrate(module, serving, [batch])
    with pytest.raises(ValueError, match=r"convert: variables: .* already converted: module\.apply serves them"):
        qflax.convert(module, serving)
    qnnx.calibrate(model, [batch])
    converted = qnnx.convert(model)
    with pytest.raises(
        ValueError, match=r"^layer: .*model: expected a model with float kernels, got one .* already conv"
    ):
        qnnx.convert(converted)
    with pytest.raises(ValueError, match=r"not converted yet, with activation_range=Static.*, got none"):
        qnnx.calibrate(converted, [batch])


@pytest.mark.slow
def test_attention_that_cannot_be_converted_is_refused_first() -> None:
    x = jnp.ones((1, 2, 4))
    dot = qflax.dot_general(W, A, activation_range=MINMAX)
    attention: Any = nn.MultiHeadDotProductAttention(2, qkv_dot_general=dot, out_dot_general=dot)
    variables = attention.init(jax.random.key(0), x)
    text = r"module: expected attention made of jaxquant\.flax\.linen\.DenseGeneral and .*, got MultiHeadDotProductAtt"
    indices: list[int] = []

    def batches() -> Iterator[Any]:
        for i in range(9):
            indices.append(i)
            yield x

    with pytest.raises(ValueError, match=rf"^(query|key|value|out): jaxquant\.flax\.calibrate: {text}"):
        qflax.calibrate(attention, variables, batches())
    assert len(indices) < 3
    with pytest.raises(ValueError, match=rf"^(query|key|value|out): jaxquant\.flax\.convert: {text}"):
        qflax.convert(attention, variables)


@pytest.mark.slow
def test_missing_ranges_are_found_before_jit_hides_them() -> None:
    batch, module, model = draw_batches(1)[0], Net(), Model()
    variables = module.init(jax.random.key(0), batch)
    with pytest.raises(ValueError, match=r"^Dense_0: jaxquant\.flax\.check_calibrated: activation: .*, got no data"):
        qflax.check_calibrated(variables)
    with pytest.raises(ValueError, match=r"^layer: jaxquant\.flax\.nnx\.check_calibrated: activation: .*, got no data"):
        qnnx.check_calibrated(model)
    calibrated = qflax.calibrate(module, variables, [batch])
    qflax.check_calibrated(calibrated)
    serving = qflax.convert(module, calibrated)
    qflax.check_calibrated(serving)
    broken = jax.tree.map(lambda v: v * np.nan if v.dtype == F32 else v, serving["ranges"])
    with pytest.raises(
        ValueError, match=r"^Dense_0/DotGeneral_0/activation: .*scale: expected finite numbers, got NaN"
    ):
        qflax.check_calibrated({**serving, "ranges": broken})
    _, updates = jax.jit(lambda x: module.apply(calibrated, x, mutable=["ranges"]))(batch * np.inf)
    with pytest.raises(ValueError, match=r"^Dense_0: .*, got a range of batches with a NaN or an infinity"):
        qflax.check_calibrated({**calibrated, **updates})
    with pytest.raises(ValueError, match=r"check_calibrated: variables: expected variables of a quantized module"):
        qflax.check_calibrated(nn.Dense(2).init(jax.random.key(0), batch))
    learned = Model(Learned(jq.LSQPlus()))
    with pytest.raises(
        ValueError, match=r"^layer: .*activation_scale: expected finite numbers: .*nnx\.start\(model, bat"
    ):
        qnnx.check_calibrated(learned)
    qnnx.start(learned, batch)
    qnnx.check_calibrated(learned)
    qnnx.calibrate(model, [batch])
    qnnx.check_calibrated(qnnx.convert(model))
    rest = {name: value for name, value in calibrated.items() if name != "scales"}
    started = Net(activation_range=Learned(jq.LSQPlus()))
    _, updates = started.apply({**rest, "ranges": {}}, batch, mutable=["ranges", "scales"])
    with pytest.raises(ValueError, match=r'activation_scale: expected it in the collection "scales": .*, got none'):
        qflax.check_calibrated({**rest, "ranges": updates["ranges"]})
