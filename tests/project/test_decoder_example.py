"""The forward pass and the generation of `examples/` on small random decoders, beside numpy in float64."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..cases.decoders import CHUNK, HEAD_DIM, KV_HEADS, VOCABULARY, compute_logits, decoder, model

__all__ = ["decoder", "model"]  # fixtures


def read_in_chunks(
    decoder: Any, model: Any, params: Any, rows: list[list[int]], cache: str, smoothing: Any = None
) -> list[np.ndarray]:
    """Return the logits of all tokens of rows of different lengths, read in chunks together."""
    lengths = np.array([len(row) for row in rows])
    caches = decoder.create_caches(model.config, len(rows), 24, cache, smoothing)
    run, found = jax.jit(model.run), []
    for start in range(0, lengths.max(), CHUNK):
        parts = [[*row[start : start + CHUNK], *[0] * CHUNK][:CHUNK] for row in rows]
        counts = jnp.asarray(np.clip(lengths - start, 0, CHUNK), jnp.int32)
        wanted = jnp.tile(jnp.arange(CHUNK), (len(rows), 1))
        logits, caches = run(params, jnp.asarray(parts), counts, wanted, caches)
        found.append(np.asarray(logits))
    return [logits[: len(row)] for logits, row in zip(np.concatenate(found, axis=1), rows, strict=True)]


def measure_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_logits_are_numpys(decoder: Any, model: Any, rng: np.random.Generator) -> None:
    """With a cache of floats, in chunks, for rows of different lengths, some longer than the windows."""
    rows = [rng.integers(0, VOCABULARY, n).tolist() for n in (11, 3, 8)]
    expected = [compute_logits(model.config.architecture, model.params, row) for row in rows]
    smoothing = decoder.find_smoothing(model.config, model.params, [rows[0]])
    for cache, most in (("float32", 1e-4), ("int8", 0.1), ("int8-int4", 0.6), ("int4", 0.8)):
        for found in (
            read_in_chunks(decoder, model, model.params, rows, cache),
            read_in_chunks(decoder, model, model.params, rows, cache, smoothing),
        ):
            assert max(map(measure_error, found, expected)) < most
    codes = {
        name: jq.quantize(x, jq.QuantSpec("int8", jq.Blocked(-1, 8))) if x.ndim == 2 else x
        for name, x in model.params.items()
    }
    floats = {name: x.dequantize() if isinstance(x, jq.QuantizedArray) else x for name, x in codes.items()}
    found = read_in_chunks(decoder, model, codes, rows, "float32")
    expected = [compute_logits(model.config.architecture, floats, row) for row in rows]
    assert max(map(measure_error, found, expected)) < 1e-4


def test_stacked_layers_compute_the_same(decoder: Any, model: Any, rng: np.random.Generator) -> None:
    rows = [rng.integers(0, VOCABULARY, n).tolist() for n in (11, 3)]
    smoothing = decoder.find_smoothing(model.config, model.params, [rows[0]])
    spec = jq.QuantSpec("int4", jq.Blocked(-1, 8))
    codes = {name: jq.quantize(x, spec) if x.ndim == 2 else x for name, x in model.params.items()}
    stacked = decoder.stack(model._replace(params=codes))
    assert stacked.params["layers.ffn_up.weight"].shape[0] == model.config.layers
    assert jq.QuantizedTree(stacked.params).nbytes == jq.QuantizedTree(codes).nbytes
    for cache in ("float32", "int8"):
        expected = read_in_chunks(decoder, model, codes, rows, cache, smoothing)
        found = read_in_chunks(decoder, stacked, stacked.params, rows, cache, smoothing)
        # A code of a key or value may be its neighbor, if XLA fuses what computes it otherwise.
        assert max(map(measure_error, found, expected)) < (1e-4 if cache == "float32" else 0.05)
    with pytest.raises(ValueError, match="call find_smoothing before stack"):
        decoder.find_smoothing(stacked.config, stacked.params, [rows[0]])


def test_stacked_layers_may_be_in_several_formats(decoder: Any, model: Any, rng: np.random.Generator) -> None:
    """One layer has another format than the others, in one matrix in floats and in one in int8 in place of int4."""
    formats = {"blk.1.ffn_up.weight": None, "blk.0.attn_v.weight": "int8"}

    def quantize(name: str, x: jax.Array) -> Any:
        dtype = formats.get(name, "int4")
        return x if dtype is None or x.ndim < 2 else jq.quantize(x, jq.QuantSpec(dtype, jq.Blocked(-1, 8)))

    codes = {name: quantize(name, x) for name, x in model.params.items()}
    stacked = decoder.stack(model._replace(params=codes))
    others = [layer for layer in range(model.config.layers) if layer != 1]
    mixed = stacked.params["layers.ffn_up.weight"]
    assert [stack.shape[0] for stack in mixed.stacks] == [len(others), 1]
    assert [layer for layer, number in enumerate(mixed.formats) if number == 0] == others
    assert jq.QuantizedTree(stacked.params).nbytes == jq.QuantizedTree(codes).nbytes
    rows = [rng.integers(0, VOCABULARY, n).tolist() for n in (11, 3)]
    expected = read_in_chunks(decoder, model, codes, rows, "float32")
    found = read_in_chunks(decoder, stacked, stacked.params, rows, "float32")
    assert max(map(measure_error, found, expected)) < 1e-4


@pytest.mark.parametrize("cache", ["float32", "int8", "int4"])
def test_a_saved_step_computes_the_same_bits(decoder: Any, model: Any, cache: str, rng: np.random.Generator) -> None:
    """A step with layers in a loop, some in another format, written to bytes and read by `jax.export`."""
    codes = {
        name: jq.quantize(x, jq.QuantSpec("int8" if name == "blk.1.ffn_up.weight" else "int4", jq.Blocked(-1, 8)))
        if x.ndim == 2 else x
        for name, x in model.params.items()
    }  # fmt: skip
    stacked = decoder.stack(model._replace(params=codes))
    assert isinstance(stacked.params["layers.ffn_up.weight"], decoder.MixedStack)
    tokens, one = jnp.asarray(rng.integers(0, VOCABULARY, (6, 1, 1)), jnp.int32), jnp.array([1])
    expected = caches = decoder.create_caches(stacked.config, 1, 24, cache)
    step = jax.jit(stacked.run)
    saved = jax.export.export(step)(stacked.params, tokens[0], one, tokens[0] * 0, caches).serialize()
    program = jax.jit(jax.export.deserialize(saved).call)
    for token in tokens:
        logits, caches = program(stacked.params, token, one, token * 0, caches)
        same, expected = step(stacked.params, token, one, token * 0, expected)
        np.testing.assert_array_equal(logits, same)
    assert jax.tree.structure(caches) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, caches, expected)


def test_layers_with_other_vectors_are_not_stacked(decoder: Any, model: Any) -> None:
    name = "blk.1.attn_norm.weight"
    params = {**model.params, name: model.params[name].astype(jnp.float16)}
    with pytest.raises(ValueError, match=r"expected attn_norm.weight to be a matrix of one shape, or of one shape"):
        decoder.stack(model._replace(params=params))


def test_a_program_has_one_layer_if_they_are_stacked(decoder: Any, model: Any) -> None:
    """The lowered program has each matrix of a layer once, and attention once for each window."""
    stacked = decoder.stack(model)
    tokens, one = jnp.zeros((1, 1), jnp.int32), jnp.array([1])

    def count_products(model: Any) -> int:
        caches = decoder.create_caches(model.config, 1, 24, "float32")
        text = jax.jit(model.run).lower(model.params, tokens, one, tokens, caches).as_text()
        return text.count("stablehlo.dot_general")

    layers, windows = model.config.layers, len(model.config.list_windows())
    assert count_products(model) == 9 * layers + 1
    assert count_products(stacked) == 7 + 2 * windows + 1


def test_smoothing_is_of_the_keys_that_caches_hold(decoder: Any, model: Any, rng: np.random.Generator) -> None:
    tokens = jnp.asarray(rng.integers(0, VOCABULARY, (1, 12)))
    counts, caches = jnp.array([12]), decoder.create_caches(model.config, 1, 12, "float32")
    _, caches = model.run(model.params, tokens, counts, counts[:, None] - 1, caches)
    found = decoder.find_smoothing(model.config, model.params, tokens)
    jitted = jax.jit(lambda params, tokens: decoder.find_smoothing(model.config, params, tokens))(model.params, tokens)
    for cache, eager, traced in zip(caches, found, jitted, strict=True):
        np.testing.assert_allclose(eager[0], np.asarray(cache.keys, np.float64).mean((0, 1)), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(traced[0], eager[0], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(traced[1], eager[1], rtol=1e-3)
        assert eager[1].shape == (KV_HEADS, HEAD_DIM)


def test_a_row_does_not_depend_on_the_others(decoder: Any, model: Any, rng: np.random.Generator) -> None:
    rows = [rng.integers(0, VOCABULARY, n).tolist() for n in (9, 4)]
    together = read_in_chunks(decoder, model, model.params, rows, "int8")
    for row, found in zip(rows, together, strict=True):
        (alone,) = read_in_chunks(decoder, model, model.params, [row], "int8")
        assert measure_error(found, alone) < 0.05  # float contractions of other shapes may choose another code


def test_texts_are_those_of_the_likeliest_tokens(decoder: Any, model: Any, rng: np.random.Generator) -> None:
    serve: Any = importlib.import_module("language_model")
    prompts = [model.tokenizer.decode(rng.integers(0, VOCABULARY - 1, n)) for n in (9, 2)]
    texts, lines = serve.generate(model, prompts, 6, "float32")
    assert [line.split()[0] for line in lines][:3] == ["compile", "prefill", "decode"]
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = [2, *model.encode(prompt)]
        for letter in text:
            logits = compute_logits(model.config.architecture, model.params, tokens)[-1]
            (token,) = model.encode(letter)
            assert logits[token] > logits.max() - 0.01
            tokens.append(token)
        ended = np.argmax(compute_logits(model.config.architecture, model.params, tokens)[-1]) == model.eos
        assert len(text) == 6 or ended
    # One of the k likeliest tokens.
    (text,), _ = serve.generate(model, prompts[:1], 1, "float32", top_k=3, temperature=5.0)
    if text:
        logits = compute_logits(model.config.architecture, model.params, [2, *model.encode(prompts[0])])[-1]
        assert model.encode(text)[0] in np.argsort(logits)[-4:]


def test_the_likeliest_token_is_that_of_argmax(decoder: Any, rng: np.random.Generator) -> None:
    """The first of several, and a place of the vocabulary also where a model returns NaN."""
    logits = rng.integers(-3, 4, (6, 50)).astype(np.float32)
    logits[1, [7, 20]], logits[2], logits[3, [9, 30]], logits[4, 5] = np.nan, np.nan, np.inf, -np.inf
    tokens = jax.jit(lambda x: decoder.sample(x, jax.random.key(0)))(logits)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=-1))


def test_short_prompts_are_read_in_short_calls(decoder: Any) -> None:
    assert [decoder.choose_chunk(n) for n in (1, 2, 3, CHUNK, CHUNK + 5)] == [1, 2, 4, CHUNK, CHUNK]


def test_scores_are_logarithms_of_probabilities(decoder: Any, model: Any, rng: np.random.Generator) -> None:
    serve: Any = importlib.import_module("language_model")
    tokens = rng.integers(0, VOCABULARY, 30).tolist()
    found = serve.score(model, tokens, "float32", row=8, size=4)
    assert found.shape == (4, 7)
    row = [2, *tokens[7:14]]
    logits = compute_logits(model.config.architecture, model.params, row)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(found[1], expected[np.arange(7), row[1:]], atol=5e-3)


@pytest.mark.parametrize("stacks", [False, True])
def test_a_recipe_quantizes_the_forward_pass(decoder: Any, model: Any, rng: np.random.Generator, stacks: bool) -> None:
    serve: Any = importlib.import_module("language_model")
    rows = [rng.integers(0, VOCABULARY, n).tolist() for n in (7, 3)]
    quantized = serve.quantize(model, "weight_only_int8", stacks=stacks)
    found = read_in_chunks(decoder, quantized, quantized.params, rows, "float32")
    for logits, row in zip(found, rows, strict=True):
        assert 0 < measure_error(logits, compute_logits(model.config.architecture, model.params, row)) < 0.1


def test_other_architectures_are_refused(decoder: Any) -> None:
    with pytest.raises(ValueError, match="expected a model of the architecture llama or gemma3, got qwen2"):
        decoder.Config.read({"general.architecture": "qwen2"})
