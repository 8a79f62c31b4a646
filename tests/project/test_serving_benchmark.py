"""What benchmarks.serving runs, on small random decoders, and its commands."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from benchmarks import llama_cpp, serving

from ..cases.decoders import CHUNK, VOCABULARY, compute_logits, decoder, model

__all__ = ["decoder", "model"]  # fixtures


@pytest.mark.parametrize("stacks", [False, True])
def test_a_prompt_is_read_and_continued(decoder: Any, model: Any, rng: np.random.Generator, stacks: bool) -> None:
    served = decoder.stack(model) if stacks else model
    programs = serving.compile_programs(served, 2 * CHUNK + 3)
    prompt = rng.integers(1, VOCABULARY, (1, 2 * CHUNK)).astype(np.int32)
    reading, step, tokens = serving.serve(served, programs, prompt, 3)
    assert min(reading, step, programs.seconds) > 0
    assert programs.temporaries >= 0
    known = prompt[0].tolist()
    assert len(tokens) == 4
    for token in tokens:
        logits = compute_logits(model.config.architecture, model.params, known)[-1]
        # The cache has codes, so that a token whose logit is close to the largest may be taken.
        assert logits[token] > logits.max() - 0.3 * logits.std()
        known.append(token)


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)
    with pytest.raises(SystemExit) as error:
        serving.main(["--model", str(tmp_path / "model.gguf")])
    assert error.value.code == 2
    assert "llama.cpp is missing: pip install xllamacpp" in capsys.readouterr().err


def test_resident_memory_is_read(tmp_path: pathlib.Path) -> None:
    if not pathlib.Path("/proc/self/status").exists():
        pytest.skip("only Linux tells it")
    before = serving._read_resident()
    kept = np.ones(30_000_000)
    assert 200 < serving._read_resident() - before < 300
    assert kept.nbytes == 240_000_000
