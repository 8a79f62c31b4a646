"""Reports: the figures against numpy, and each way to show them."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

F32 = np.float32


def apply(params: Any, tokens: jax.Array, x: jax.Array) -> jax.Array:
    h = jax.nn.relu((x + params["table"][tokens]) @ params["first"])

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(layer, h, params["stack"])
    return (h @ (params["left"] + params["right"])) @ params["out"].T


def sample(rng: np.random.Generator) -> tuple[Any, list[Any]]:
    shapes = {"table": (5, 6), "first": (6, 8), "stack": (2, 8, 8), "left": (8, 8), "right": (8, 8), "out": (3, 8)}
    params = {name: jnp.asarray(rng.normal(size=shape), F32) for name, shape in shapes.items()}
    batches = [
        (jnp.asarray(rng.integers(0, 5, 16), jnp.int32), jnp.asarray(rng.normal(size=(16, 6)), F32)) for _ in range(2)
    ]
    return params, batches


def find_sqnr(x: Any, y: Any) -> float:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(10 * np.log10(np.sum(x**2) / np.sum((x - y) ** 2)))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["dynamic", "static"])
def test_figures(rng: np.random.Generator, recipe: str, tmp_path: pathlib.Path, capsys: Any) -> None:
    params, batches = sample(rng)
    batches[1] = batches[1][0], 10 * batches[1][1]  # beyond the range of the first batch
    rules = jq.recipes.w8a8_dynamic() if recipe == "dynamic" else jq.recipes.w8a8_static()
    prepared = jq.prepare(apply, params, *batches[0], rules=rules)
    ranges = prepared.calibrate(params, batches[:1], progress=False)
    qparams = prepared.convert(params, ranges)
    report = jq.report.compare(prepared, params, qparams, batches)
    rows = {row.name: row for row in report}
    assert set(rows) == {row.name for row in prepared.coverage}
    assert rows["left+right"].form == "float"
    assert rows["left+right"].reason
    assert rows["table"].form == "lookup"
    # The first contraction, by hand.
    x = np.concatenate([np.asarray(x) + np.asarray(params["table"])[np.asarray(t)] for t, x in batches])
    spec = jq.QuantSpec("uint8", jq.PerAxis(0) if recipe == "dynamic" else jq.PerTensor())
    q = jq.quantize(x, spec, range=ranges["first"]["0"] if recipe == "static" else None)
    row: Any = rows["first"]
    np.testing.assert_allclose(row.activation_sqnr, find_sqnr(x, q.dequantize()), atol=0.01)
    np.testing.assert_allclose(
        row.weight_sqnr, find_sqnr(params["first"], qparams.params["first"].dequantize()), atol=0.01
    )
    np.testing.assert_allclose(row.output_sqnr, find_sqnr(x @ params["first"], q @ qparams.params["first"]), atol=0.02)
    assert row.float_bytes == 6 * 8 * 4
    assert row.bytes == qparams.params["first"].nbytes
    if recipe == "static":
        step = float(q.scale.squeeze())
        ends = [float(np.asarray(end).squeeze()) for end in ranges["first"]["0"]]
        beyond = (x < ends[0] - 0.6 * step) | (x > ends[1] + 0.6 * step)
        assert beyond.mean() <= row.activation_saturated + 1e-6  # type: ignore[operator]
        assert row.activation_saturated > 0  # type: ignore[operator]
    # The distribution of its activations, of all batches.
    histogram = report.activations["first"]
    counts, edges = np.histogram(x, 64)
    np.testing.assert_allclose(histogram.edges, edges, rtol=1e-5, atol=1e-5)
    assert sum(histogram.counts) == x.size
    assert np.abs(np.array(histogram.counts) - counts).sum() <= 4  # values at an edge
    assert set(report.activations) == {name for name, row in rows.items() if row.form == "integer"}
    if recipe == "static":
        low, high = histogram.low, histogram.high
        assert low is not None
        assert high is not None
        np.testing.assert_allclose(
            (low, high), (np.arange(256)[[0, -1]] - float(q.zero_point.squeeze())) * step, rtol=1e-5
        )
        beyond = (x < low) | (x > high)
        assert beyond.any()
    else:
        assert histogram.low is histogram.high is None
    expected, actual = (
        np.concatenate([np.asarray(f(*batch)) for batch in batches])
        for f in (lambda *b: apply(params, *b), lambda *b: prepared.apply(qparams, *b))
    )
    np.testing.assert_allclose(report.result_sqnr, find_sqnr(expected, actual), atol=0.02)
    # Each way to show them.
    report.show()
    assert "Errors of contractions" in capsys.readouterr().out
    assert "left+right: computed by add" in str(report)
    report.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<tr") == len(rows) + 1
    # A phone shows it in its own width, keys scroll the table, and nothing is loaded.
    assert '<meta name="viewport" content="width=device-width' in page
    assert '<div class="table" tabindex="0"' in page
    assert not re.search(r"""(src|href)=["'](?!#)|url\((?!#)|@import""", page)
    pytest.importorskip("matplotlib")
    assert "<svg" in page
    report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10000
    assert report.to_dict()["first"]["form"] == "integer"


def test_functions_that_return_no_floats() -> None:
    params, x = {"w": jnp.eye(4)}, jnp.ones((2, 4))
    prepared = jq.prepare(lambda p, x: jnp.argmax(x @ p["w"], -1), params, x, rules=jq.recipes.weight_only_int8())
    report = jq.report.compare(prepared, params, prepared.convert(params), [x])
    assert np.isnan(report.result_sqnr)
    assert "result: nan dB" in report.summary


@pytest.mark.slow
def test_weights_count_once(rng: np.random.Generator, capsys: Any) -> None:
    """A path may look like the second use of another parameter, and like a style of rich."""
    names = ("a", "a#1", "b[red]")
    params = {name: jnp.asarray(rng.normal(size=(8, 8)), F32) for name in names}
    x = jnp.asarray(rng.normal(size=(4, 8)), F32)

    def multiply(params: Any, x: jax.Array) -> jax.Array:
        a, other, last = (params[name] for name in names)
        return (jnp.tanh(((x @ a) @ a) @ other) @ (other + last)) @ last

    prepared = jq.prepare(multiply, params, x, rules=jq.recipes.w8a8_static())
    assert [row.name for row in prepared.coverage] == ["a", "a#2", "a#1", "a#1+b[red]", "b[red]"]
    ranges = prepared.calibrate(params, [x], progress=False)
    qparams = prepared.convert(params, ranges)
    # Each contraction has a range of its own.
    np.testing.assert_allclose(ranges["a#1"]["0"][1].squeeze(), (x @ params["a"] @ params["a"]).max(), rtol=1e-5)
    np.testing.assert_allclose(ranges["a#2"]["0"][1].squeeze(), (x @ params["a"]).max(), rtol=1e-5)
    report = jq.report.compare(prepared, params, qparams, [x])
    assert report.weights == {name: (256, qparams.params[name].nbytes) for name in names}
    assert f"weights: {3 * qparams.params['a'].nbytes} bytes, of 768 in floats" in report.summary
    # The sum of two weights stays in floats, and yet both are stored as codes.
    assert {row.name: row.bytes for row in report}["a#1+b[red]"] == 2 * qparams.params["a"].nbytes
    report.show()
    assert "a#1+b[red]: computed by add" in capsys.readouterr().out


def test_masked_results() -> None:
    """What is minus infinity in floats and in codes has no error."""
    params, x = {"w": jnp.eye(4)}, jnp.array([[1.0, -0.5, 0.25, 0.0]])
    prepared = jq.prepare(
        lambda p, x: jnp.where(jnp.arange(4)[None] > 2, -jnp.inf, x @ p["w"]), params, x,
        rules=jq.recipes.weight_only_int8(),
    )  # fmt: skip
    report = jq.report.compare(prepared, params, prepared.convert(params), [x])
    assert report.result_sqnr > 40


def test_errors(rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    prepared = jq.prepare(apply, params, *batches[0], rules=jq.recipes.w8a8_dynamic())
    name = r"jaxquant\.report\.compare: "
    with pytest.raises(ValueError, match=name + "batches: expected at least one batch, got none"):
        jq.report.compare(prepared, params, prepared.convert(params), [])
    with pytest.raises(ValueError, match=name + "batches: expected batches with results, got results without"):
        jq.report.compare(prepared, params, prepared.convert(params), [tuple(x[:0] for x in batches[0])])
    with pytest.raises(TypeError, match=name + "prepared: expected a Prepared, got int"):
        jq.report.compare(3, params, params, batches)  # type: ignore[arg-type]
