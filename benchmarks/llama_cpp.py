"""llama.cpp, as the package xllamacpp runs it: the tokens of texts, the probabilities of tokens, and times."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pathlib
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
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


# The standard output is kept for the address. The process ends when its standard input does.
SERVER = """
import os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = sys.argv[1], int(sys.argv[2]), 1, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
server = xllamacpp.Server(params)
print(server.listening_address, file=answers, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def serve(path: pathlib.Path, length: int) -> Iterator[Callable[..., dict[str, Any]]]:
    """Run a server with two threads and a cache of `length` tokens; the function posts a request for a completion."""
    command = [sys.executable, "-c", SERVER, str(path), str(length)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise RuntimeError(f"expected llama.cpp to serve {path}, but its process ended: {process.wait()}")

        def post(**values: Any) -> dict[str, Any]:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{address}/completion", json.dumps(values).encode(), headers)
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)

        try:
            yield post
        finally:
            process.stdin.close()
            process.wait()


def time_completion(post: Callable[..., dict[str, Any]], prompt: Sequence[int], count: int) -> tuple[float, float]:
    """Return the seconds that the server takes to read a prompt of tokens, and those of each of `count` steps."""
    answer = post(
        prompt=list(prompt), n_predict=count + 1, ignore_eos=True, cache_prompt=False, temperature=0,
        samplers=["top_k"], top_k=1,
    )  # fmt: skip
    times = answer["timings"]
    assert times["prompt_n"] == len(prompt)
    assert times["predicted_n"] == count + 1  # the first token comes with the prompt
    return times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3 / count
