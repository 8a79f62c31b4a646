"""The rows of benchmarks.language_model on small random decoders, and what it derives of them."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from benchmarks import language_model as benchmark

from ..cases.decoders import VOCABULARY, compute_logits, decoder, model

__all__ = ["decoder", "model"]  # fixtures
TEXT = 8
ROWS = list(benchmark._list_rows())


def measure(model: Any, *arguments: Any, **options: Any) -> benchmark.Figures:
    """Return the figures of a row of a copy of the model, whose parameters the benchmark may take."""
    return benchmark.measure(model._replace(params=dict(model.params)), *arguments, **options)


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> Any:
    for name, value in (("_TEXT", TEXT), ("_STEPS", 2), ("_WRITTEN", 3), ("_PROMPT", 4), ("_CHUNK", 4)):
        monkeypatch.setattr(benchmark, name, value)
    rows = rng.integers(1, VOCABULARY, (5, TEXT + 2)).astype(np.int32)
    rows[:, 0] = 2
    return benchmark.Sample(rows[:3], rows[3:])


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ROWS)
def test_rows_on_a_small_decoder(name: str, model: Any, sample: Any) -> None:
    base = measure(model, benchmark._FLOAT, sample)
    figures = measure(model, name, sample, texts=2)
    assert np.shape(figures.scores) == (3, TEXT)
    loss, error = benchmark.compare(figures.scores, base.scores)
    # The parameters are floats, so that they are their own codes.
    if name in (benchmark._FLOAT, benchmark._OWN, f"{benchmark._CACHE}float32"):
        assert abs(loss) < 1e-6
        assert figures.bytes == base.bytes or name.startswith(benchmark._CACHE)
    else:
        assert 0 < error < (0.5 if "8" in name.partition(":")[0] or name.endswith("int8") else 3)
        assert figures.bytes < base.bytes
    assert (figures.texts is not None) == name.startswith(benchmark._CACHE)


def test_scores_are_of_the_tokens_after_the_first(model: Any, sample: Any) -> None:
    figures = measure(model, benchmark._FLOAT, sample)
    row = sample.test[1].tolist()
    logits = compute_logits(model.config.architecture, model.params, row[:-1])
    expected = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(TEXT + 1), row[1:]]
    np.testing.assert_allclose(figures.scores[1], expected[1:], atol=5e-3)


def test_rows_of_the_text(model: Any, sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "topics", {"b": "d" * 20, "a": "abc" * 20})
    model = model._replace(tokenizer=types.SimpleNamespace(encode=lambda text: [ord(x) % 90 for x in text]))
    found = benchmark.cut(model, 2, 1)
    text = [ord(x) % 90 for x in "abc" * 20 + "\n\n" + "d" * 20]
    assert found.test.tolist() == [[2, *text[: TEXT + 1]], [2, *text[TEXT + 1 : 2 * TEXT + 2]]]
    assert found.calibration.tolist() == [[2, *text[-TEXT - 1 :]]]


def test_the_error_of_a_difference(rng: np.random.Generator) -> None:
    """Scores that differ by chance, around a loss of 0.1, with the spread of their difference and not of the scores."""
    base = rng.normal(-3, 2, (4, 500))
    scores = base - 0.1 + rng.normal(0, 0.05, base.shape)
    loss, error = benchmark.compare(scores.tolist(), base.tolist())
    assert abs(loss - 0.1) < 6 * error
    assert 0.8 < error / (0.05 / 2000**0.5) < 1.25


def test_faults() -> None:
    losses = {
        benchmark._FLOAT: 0.0, benchmark._OWN: -0.003, "8 bits: weight_only_int8": 0.019, "8 bits: w8a8_dynamic": 0.1,
        "8 bits: gguf Q8_0": 0.021, "cache: int8": 0.03, "cache: int8-int4": 0.03, "llama.cpp": -0.03,
    }  # fmt: skip
    assert [fault.rpartition(":")[0] for fault in benchmark.list_faults(losses)] == [
        benchmark._OWN, "8 bits: gguf Q8_0", "cache: int8", "llama.cpp",
    ]  # fmt: skip
