"""llama.cpp, as the package xllamacpp runs it: the tokens of texts, and the probabilities of tokens."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys
from typing import Any

# In a process of its own: llama.cpp writes to the standard streams, and ends a process that has a broken model. A large
# bias makes it choose the next token of the text; the probability that it reports is without the bias.
PROGRAM = """
import concurrent.futures, json, sys, urllib.request
import xllamacpp
path, request = sys.argv[1:]
request = json.load(open(request))
rows, texts = request.get("rows", []), request.get("texts", [])
params = xllamacpp.CommonParams()
params.model.path, params.warmup, params.cpuparams.n_threads = path, False, 2
params.n_parallel = max(len(rows), 1)
params.n_ctx = params.n_parallel * (max(map(len, rows), default=0) + 32)
if "adapter" in request:
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(request["adapter"], 1.0)]
server = xllamacpp.Server(params)

def post(name, **values):
    body = json.dumps(values).encode()
    request = urllib.request.Request(f"{server.listening_address}/{name}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)

def score(place):
    row, found = rows[place], []
    for end in range(1, len(row)):
        answer = post("completion", prompt=row[:end], n_predict=1, n_probs=1, temperature=0, cache_prompt=True,
                      id_slot=place, samplers=["top_k"], top_k=1, logit_bias=[[row[end], 1e4]])
        (token,) = answer["completion_probabilities"]
        assert token["id"] == row[end]
        found.append((token["logprob"], token["top_logprobs"][0]["id"]))
    return found

with concurrent.futures.ThreadPoolExecutor(params.n_parallel) as pool:
    scores = list(pool.map(score, range(len(rows))))
tokens = [post("tokenize", content=text, add_special=False)["tokens"] for text in texts]
print("RESULT" + json.dumps({"scores": scores, "tokens": tokens}), flush=True)
"""


def is_installed() -> bool:
    """Return whether the package xllamacpp is there."""
    return importlib.util.find_spec("xllamacpp") is not None


def ask(path: pathlib.Path, folder: pathlib.Path, **request: Any) -> dict[str, Any]:
    """Return what `PROGRAM` prints: "scores" of rows of tokens, and "tokens" of texts.

    A score is the logarithm of the probability of a token after the ones before it, with the likeliest token there.
    With "adapter", the path of a GGUF file, the model has its adapters. The folder gets a file.
    """
    (folder / "request.json").write_text(json.dumps(request))
    command = [sys.executable, "-c", PROGRAM, str(path), str(folder / "request.json")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, result.stderr[-2000:]
    return json.loads(lines[0].removeprefix("RESULT"))
