"""Calibration that is resumed or misused: files of other runs, damaged files, batches and factories that are none."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import jaxquant as jq
from jaxquant import flax as qflax
from jaxquant.flax import Dynamic, Learned, Observed, _layer_operand
from jaxquant.flax import linen as qnn
from jaxquant.flax import nnx as qnnx

F32 = np.float32
W, A = jq.QuantSpec("int8", jq.PerFeature()), jq.QuantSpec("uint8")
MINMAX = Observed(jq.calibration.minmax)
BATCHES = list(np.random.default_rng(5).normal(0.2, 1, (3, 2, 4)).astype(F32))


def dense(**options: Any) -> Any:
    return qnn.Dense(3, **{"weight_spec": W, "activation_spec": A, "activation_range": MINMAX, **options})


def linear(features: int = 4, **options: Any) -> Any:
    rngs = nnx.Rngs(0)
    return qnnx.Linear(
        features, 4, rngs=rngs, **{"weight_spec": W, "activation_spec": A, "activation_range": MINMAX, **options}
    )


OTHERS: list[dict[str, Any]] = [
    {"weight_spec": jq.QuantSpec("int4", jq.PerFeature())},
    {"activation_spec": jq.QuantSpec("uint4")},
    {"activation_range": Observed(jq.calibration.absmax)},
    {"activation_range": Observed(jq.calibration.minmax, freeze_after=2)},
]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_a_file_belongs_to_its_layers_and_weights(tmp_path: Any, library: str) -> None:
    """Ranges behind a layer of 8 bits are not those behind one of 4: no array tells the files apart."""
    path = tmp_path / "calibration"

    def run(batches: Any = BATCHES, factor: int = 1, **options: Any) -> None:
        if library == "linen":
            layer = dense(**options)
            params: dict[str, Any] = layer.init(jax.random.key(0), BATCHES[0])["params"]
            # numpy's, as a checkpoint that was read has them
            numpys = jax.tree.map(lambda p: np.asarray(p) * factor, params)
            qflax.calibrate(layer, {"params": numpys}, batches, checkpoint=path)
            return
        model = linear(**options)
        model.kernel.set_value(np.asarray(model.kernel[...]) * factor)
        qnnx.calibrate(model, batches, checkpoint=path)

    run()
    run()
    for options in ({"factor": 2}, *OTHERS):
        with pytest.raises(ValueError, match=r"checkpoint: expected a file written for these weights and layers"):
            run(**options)
    with pytest.raises(ValueError, match=r"batches: expected the 3 batches that .* counts.* delete it .*, got 2$"):
        run(BATCHES[:2])


@pytest.mark.slow
def test_a_damaged_file_is_refused(tmp_path: Any) -> None:
    path, layer = tmp_path / "calibration", dense()
    variables = layer.init(jax.random.key(0), BATCHES[0])
    calibrate = functools.partial(qflax.calibrate, layer, variables, BATCHES)
    calibrate(checkpoint=path)
    content = path.read_bytes()
    flips = [content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in range(0, len(content), 7)]
    cuts = [content[:n] for n in (0, 1, 3, 4, 5, len(content) // 2, len(content) - 1)]
    with jax.disable_jit():
        for damaged in (*flips, *cuts, content + b"x"):
            path.write_bytes(damaged)
            with pytest.raises(
                ValueError, match=r"checkpoint: expected no file, or a complete file that this function wrote"
            ):
                calibrate(checkpoint=path)
    with pytest.raises(ValueError, match=r"checkpoint: expected the path of a file, got the folder"):
        calibrate(checkpoint=tmp_path)


def test_a_folder_that_is_read_only_is_found_first(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)

    def batches() -> Iterator[Any]:
        raise AssertionError("no batch is read")
        yield

    with pytest.raises(ValueError, match=r"checkpoint: expected a folder that can be written to, got"):
        qnnx.calibrate(linear(), batches(), checkpoint=tmp_path / "file")


def test_batches_of_arrays_only() -> None:
    x, layer, model = BATCHES[0], dense(), linear()
    variables = layer.init(jax.random.key(0), x)
    runs = [
        ("", functools.partial(qflax.calibrate, layer, variables)),
        ("nnx.", functools.partial(qnnx.calibrate, model)),
    ]
    for name, run in runs:
        for batch, where in (((x, "label"), r"\[1\]"), ({"inputs": x, "text": ["a"]}, r"\['text'\]\[0\]"),
                             ((x, {"more": object()}), r"\[1\]\['more'\]")):  # fmt: skip
            with pytest.raises(TypeError, match=rf"flax\.{name}calibrate: batches\[0\]{where}: expected an array, or"):
                run([batch])
        with pytest.raises(ValueError, match=r"batches\[0\]: expected names of arguments that no other.*, got inputs"):
            run([{"inputs": x}], inputs=x)
    with pytest.raises(ValueError, match=r"batches\[0\]: expected names of arguments that no other.*, got rngs"):
        qflax.calibrate(layer, variables, [{"inputs": x, "rngs": x}])
    with pytest.raises(ValueError, match=r"arguments: expected arguments of the module; .*, got mutable"):
        qflax.calibrate(layer, variables, [x], mutable=["batch_stats"])
    for wrong in (variables["params"], {"ranges": variables["ranges"]}):
        with pytest.raises(
            ValueError, match=r'variables: expected the variables that init returns, with "params", got'
        ):
            qflax.calibrate(layer, wrong, [x])
    for run in (lambda x: qflax.calibrate(layer, variables, [x]), lambda x: qnnx.calibrate(linear(), [x])):
        with pytest.raises(
            ValueError, match=r"batches: expected arrays that are not traced, because the loop runs outside of jax\.jit"
        ):
            jax.eval_shape(run, x)
    with pytest.raises(TypeError, match=r"method: expected the name of a method, got NoneType"):
        qnnx.calibrate(model, [x], method=None)  # type: ignore[arg-type]


class Stream:
    """Batches whose number is not known, as of a data set that is read on the way."""

    def __iter__(self) -> Iterator[Any]:
        return iter(BATCHES)

    def __len__(self) -> int:
        raise TypeError("the length is not known")


def test_batches_without_a_length_have_a_progress_bar(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxquant.calibration import loop

    monkeypatch.setattr(loop, "_SHOW_SECONDS", 0.0)
    model = linear()
    qnnx.calibrate(model, Stream(), progress=True)
    assert int(model.dot_general.activation_batches[...]) == 3
    assert "3/" in capsys.readouterr().err


def test_a_factory_that_makes_no_calibrator() -> None:
    for source in (Observed, Dynamic):
        with pytest.raises(TypeError, match=r"calibrator: .*, got <lambda>, which does not take a spec$"):
            source(lambda: jq.calibration.minmax(A))  # type: ignore[misc,arg-type]
        with pytest.raises(TypeError, match=r"or functools\.partial\(percentile, q=\.\.\.\), got percentile, which"):
            source(functools.partial(jq.calibration.percentile))  # type: ignore[arg-type]
        layer = dense(activation_range=source(lambda spec: 3))  # type: ignore[arg-type,return-value]
        text = rf"^Dense: jaxquant\.{source.__name__}: calibrator: expected a function .*lambda>, which returns int"
        with pytest.raises(TypeError, match=text):
            jax.eval_shape(layer.init, jax.random.key(0), BATCHES[0])
    with pytest.raises(TypeError, match=r"^Linear\(4, 4\): jaxquant\.Observed: calibrator: expected a function"):
        linear(activation_range=Observed(lambda spec: 3))  # type: ignore[arg-type,return-value]


def make_calibrator(spec: jq.QuantSpec, inner: Any) -> jq.calibration.Calibrator:
    """A factory that is told of another one."""
    return inner(spec)


@pytest.mark.slow
def test_texts_are_equal_in_every_process() -> None:
    source = Dynamic(functools.partial(make_calibrator, inner=jq.calibration.mse))
    text = _layer_operand.describe_converted(_layer_operand.LayerOperand(A, source, "activation"))
    assert text.endswith("with Dynamic(partial(make_calibrator, inner=mse))")


@pytest.mark.slow
def test_nnx_errors_of_a_calibration_have_the_path() -> None:
    x = BATCHES[0]
    model = nnx.Sequential(linear(), nnx.relu, linear(5))
    with pytest.raises(ValueError, match=r"^layers/2: jaxquant\.quantized_dot_general: dimension_numbers"):
        qnnx.calibrate(model, [x])
    assert model.layers[2].dot_general.layer == "Linear(5, 4)"
    ways: list[dict[str, Any]] = [{"activation_range": Learned(jq.LSQPlus())}, {"weight_range": Learned()}]
    for learned in ways:
        model = nnx.Sequential(linear(), linear(**learned))
        text = (
            r"^layers/1: .*nnx\.calibrate: .*_scale: expected finite numbers: jaxquant\.flax\.nnx\.start\(model, batch"
        )
        with pytest.raises(ValueError, match=text):
            qnnx.calibrate(model, iter(()))
