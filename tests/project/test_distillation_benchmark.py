"""The files of benchmarks.distillation for small random decoders, and what training gains on held-out text."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import distillation as benchmark
from jaxquant import checkpoint

from ..cases.decoders import compute_logits, decoder, model

__all__ = ["decoder", "model"]  # fixtures
LENGTH = 8


@pytest.fixture
def rng(fixed_rng: np.random.Generator) -> np.random.Generator:
    """For the model as well: training brings most models nearer to the floats, and leaves the others as they were."""
    return fixed_rng


@pytest.mark.slow
def test_training_brings_a_file_nearer_to_the_floats(
    model: Any, rng: np.random.Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.setattr(benchmark, "_LENGTH", LENGTH)
    name = model.config.architecture
    options = argparse.Namespace(folder=tmp_path, steps=24, tokens=LENGTH, weights=0.01, scales=0.002, others=1e-3)
    text = "".join(map(chr, rng.integers(33, 120, 40 * LENGTH)))
    info = checkpoint.Info("gguf", {"general.architecture": name})

    def write() -> dict[str, bytes]:
        benchmark.write_files(model, model.params, info, text, options)
        return {name: (tmp_path / f"{name}.gguf").read_bytes() for name in benchmark.FILES}

    written = write()
    rows = benchmark.cut(model, text, LENGTH)
    held_out = rows[np.random.default_rng(0).permutation(len(rows))][: benchmark._HELD_OUT]
    logits = {}
    for file in benchmark.FILES:
        tensors, found = checkpoint.load(tmp_path / f"{file}.gguf")
        types = {n: entry.stored_as for n, entry in found.tensors.items()}
        matrices = {n for n, x in model.params.items() if x.ndim == 2 and not n.startswith("token_embd")}
        assert {n for n, kind in types.items() if kind == "Q4_0"} == (set() if file == "floats" else matrices)
        params = benchmark.dequantize(tensors)
        assert bool(jnp.all(params["token_embd.weight"] == model.params["token_embd.weight"]))
        logits[file] = np.array([compute_logits(name, params, row.tolist()) for row in held_out])
    expected = logits["floats"] - np.log(np.exp(logits["floats"]).sum(-1, keepdims=True))
    losses = {}
    for file, y in logits.items():
        difference = expected - (y - np.log(np.exp(y).sum(-1, keepdims=True)))
        losses[file] = float((np.exp(expected) * difference).sum(-1).mean())
    assert losses["floats"] == 0
    assert losses["distilled"] < losses["gptq"]
    # What the folder has is not made again; a file that is missing comes out as it was.
    (tmp_path / "distilled.gguf").unlink()
    assert write() == written
