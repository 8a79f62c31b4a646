"""Fine-tuning of a loaded QDQ model, and its way back to integers, against ONNX Runtime on the same numbers."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest

from jaxquant import onnx as jqonnx

from ..cases.onnx_models import MODELS, quantize_model, run_runtime


@pytest.mark.slow
@pytest.mark.parametrize("network", ["mlp", pytest.param("cnn", marks=pytest.mark.full)])
def test_training_lowers_a_loss_and_is_exported_again(
    network: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    make, shape = MODELS[network]
    batches = [rng.normal(size=shape).astype(np.float32) for _ in range(3)]
    model = quantize_model(make(rng), batches, "qdq", tmp_path, per_channel=True)
    x = batches[0]
    fn, params = jqonnx.load(model, trainable=True)
    assert all(value.dtype == jnp.float32 for value in params.values())
    (expected,) = run_runtime(model, {"x": x}, "none")
    np.testing.assert_allclose(jax.jit(fn)(params, x), expected, atol=0.05)

    # Untrained, the way back gives the model's integers.
    integer, codes = fn.convert(params)
    loaded, _ = jqonnx.load(model)
    assert [node.op for node in integer.graph.nodes] == [node.op for node in loaded.graph.nodes]
    np.testing.assert_array_equal(jax.jit(integer)(codes, x), run_runtime(model, {"x": x})[0])

    target = rng.normal(size=expected.shape).astype(np.float32)

    def find_loss(p: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((fn(p, x) - target) ** 2)

    # Scales are small numbers that must stay positive.
    rates = {name: 1e-4 if "scale" in name else 2e-3 for name in params}
    step = jax.jit(lambda p: jax.tree.map(lambda v, g, rate: v - rate * g, p, jax.grad(find_loss)(p), rates))
    trained = params
    for _ in range(20):
        trained = step(trained)
    before, after = (float(find_loss(p)) for p in (params, trained))
    assert after < before
    integer, codes = fn.convert(trained)
    # What was trained is what is served.
    exported = jqonnx.export(integer, [x], params=codes, batch="N")
    assert [value.name for value in exported.graph.input] == ["x"]
    onnx.checker.check_model(exported)
    np.testing.assert_allclose(run_runtime(exported, {"x": x})[0], jax.jit(fn)(trained, x), atol=0.15)
    for level in ("all",) if network == "mlp" else ("disabled", "basic", "extended", "all"):
        report = jqonnx.verify(exported, integer, [x] if network == "mlp" else [x, x[:2]], params=codes, level=level)
        assert report.is_exact, str(report)
        assert sum(row.kind == "codes" for row in report.rows) >= 2


def test_other_forms_are_refused(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    make, shape = MODELS["mlp"]
    batches = [rng.normal(size=shape).astype(np.float32)]
    model = quantize_model(make(rng), batches, "operators", tmp_path)
    with pytest.raises(jqonnx.ModelError, match="QDQ form; these operators have no derivative"):
        jqonnx.load(model, trainable=True)
    fn, params = jqonnx.load(model)
    with pytest.raises(ValueError, match="trainable=True"):
        fn.convert(params)
