"""The forward pass and the generation of `examples/` on small random decoders, beside numpy in float64."""

from __future__ import annotations

import functools
import importlib
import pathlib
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"
CHUNK, VOCABULARY, FEATURES, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 4, 96, 32, 64, 4, 2, 8
EPSILON, WINDOW, LAYERS = 1e-5, 5, {"llama": 2, "gemma3": 6}


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module("decoder")
    monkeypatch.setattr(module, "CHUNK", CHUNK)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as in a user's program
        yield module


@pytest.fixture(params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, decoder: Any, rng: np.random.Generator) -> Any:
    """A decoder of a letter for each token, with random weights."""
    name = request.param
    metadata = {
        "general.architecture": name, f"{name}.block_count": LAYERS[name], f"{name}.attention.head_count": HEADS,
        f"{name}.attention.head_count_kv": KV_HEADS, f"{name}.embedding_length": FEATURES,
        f"{name}.attention.layer_norm_rms_epsilon": EPSILON, f"{name}.rope.freq_base": 100.0,
        f"{name}.context_length": 64,
    }  # fmt: skip
    shapes = {
        "attn_q": (32, FEATURES),
        "attn_k": (16, FEATURES),
        "attn_v": (16, FEATURES),
        "attn_output": (FEATURES, 32),
    }
    shapes |= {"ffn_gate": (HIDDEN, FEATURES), "ffn_up": (HIDDEN, FEATURES), "ffn_down": (FEATURES, HIDDEN)}
    norms = {"attn_norm": FEATURES, "ffn_norm": FEATURES}
    if name == "gemma3":
        metadata[f"{name}.attention.sliding_window"] = WINDOW
        norms |= {"attn_q_norm": HEAD_DIM, "attn_k_norm": HEAD_DIM}
        norms |= {"post_attention_norm": FEATURES, "post_ffw_norm": FEATURES}
    params = {
        "token_embd.weight": rng.normal(size=(VOCABULARY, FEATURES)),
        "output_norm.weight": rng.uniform(1, 2, FEATURES),
    }
    for layer in range(LAYERS[name]):
        params |= {f"blk.{layer}.{n}.weight": rng.normal(size=s) / np.sqrt(s[1]) for n, s in shapes.items()}
        params |= {f"blk.{layer}.{n}.weight": rng.uniform(0.5, 2, s) for n, s in norms.items()}
    params = {name: jnp.asarray(x, jnp.float32) for name, x in params.items()}
    config = decoder.Config.read(metadata)
    tokenizer = types.SimpleNamespace(
        encode=lambda text, add_special_tokens: types.SimpleNamespace(ids=[ord(letter) - 32 for letter in text]),
        decode=lambda tokens: "".join(chr(token + 32) for token in tokens),
    )
    return decoder.Model(config, functools.partial(decoder.forward, config), params, tokenizer, [2], VOCABULARY - 1)


def compute_logits(architecture: str, params: dict[str, Any], tokens: list[int]) -> np.ndarray:
    """Return the logits [tokens, vocabulary] in float64: each query by itself, from the papers' formulas."""
    weights = {name.removesuffix(".weight"): np.asarray(x, np.float64) for name, x in params.items()}
    is_gemma, count = architecture == "gemma3", len(tokens)

    def normalize(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPSILON) * weights[name]

    def turn(head: np.ndarray, position: int, base: float) -> np.ndarray:
        result = np.empty_like(head)
        for i in range(HEAD_DIM // 2):
            a, b = (i, i + HEAD_DIM // 2) if is_gemma else (2 * i, 2 * i + 1)
            angle = position * base ** (-2 * i / HEAD_DIM)
            result[..., a] = head[..., a] * np.cos(angle) - head[..., b] * np.sin(angle)
            result[..., b] = head[..., b] * np.cos(angle) + head[..., a] * np.sin(angle)
        return result

    x = weights["token_embd"][tokens] * (np.sqrt(FEATURES) if is_gemma else 1)
    for layer in range(LAYERS[architecture]):
        block, is_local = f"blk.{layer}", is_gemma and layer % 6 != 5
        y = normalize(x, f"{block}.attn_norm")
        q, k, v = ((y @ weights[f"{block}.attn_{n}"].T).reshape(count, -1, HEAD_DIM) for n in "qkv")
        if is_gemma:
            q, k = normalize(q, f"{block}.attn_q_norm"), normalize(k, f"{block}.attn_k_norm")
        base = 10_000.0 if is_local else 100.0
        q, k = (np.stack([turn(heads[t], t, base) for t in range(count)]) for heads in (q, k))
        y = np.zeros((count, HEADS, HEAD_DIM))
        for t in range(count):
            seen = slice(max(t - WINDOW + 1, 0) if is_local else 0, t + 1)
            for head in range(HEADS):
                shared = head // (HEADS // KV_HEADS)
                scores = np.exp(k[seen, shared] @ q[t, head] / np.sqrt(HEAD_DIM))
                y[t, head] = scores @ v[seen, shared] / scores.sum()
        y = y.reshape(count, -1) @ weights[f"{block}.attn_output"].T
        x = x + (normalize(y, f"{block}.post_attention_norm") if is_gemma else y)
        y = normalize(x, f"{block}.ffn_norm")
        gate, up = (y @ weights[f"{block}.ffn_{n}"].T for n in ("gate", "up"))
        gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        y = ((gelu if is_gemma else gate / (1 + np.exp(-gate))) * up) @ weights[f"{block}.ffn_down"].T
        x = x + (normalize(y, f"{block}.post_ffw_norm") if is_gemma else y)
    return normalize(x, "output_norm") @ weights["token_embd"].T


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


def test_scores_are_logarithms_of_probabilities(decoder: Any, model: Any, rng: np.random.Generator) -> None:
    serve: Any = importlib.import_module("language_model")
    tokens = rng.integers(0, VOCABULARY, 30).tolist()
    found = serve.score(model, tokens, "float32", row=8)
    assert found.shape == (4, 7)
    row = [2, *tokens[7:14]]
    logits = compute_logits(model.config.architecture, model.params, row)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(found[1], expected[np.arange(7), row[1:]], atol=5e-3)


def test_a_recipe_quantizes_the_forward_pass(decoder: Any, model: Any, rng: np.random.Generator) -> None:
    serve: Any = importlib.import_module("language_model")
    quantized = serve.quantize(model, "weight_only_int8")
    rows = [rng.integers(0, VOCABULARY, n).tolist() for n in (7, 3)]
    found = read_in_chunks(decoder, quantized, quantized.params, rows, "float32")
    for logits, row in zip(found, rows, strict=True):
        assert 0 < measure_error(logits, compute_logits(model.config.architecture, model.params, row)) < 0.1


def test_other_architectures_are_refused(decoder: Any) -> None:
    with pytest.raises(ValueError, match="expected a model of the architecture llama or gemma3, got qwen2"):
        decoder.Config.read({"general.architecture": "qwen2"})
