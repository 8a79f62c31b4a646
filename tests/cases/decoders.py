"""Small random decoders with the forward pass of `examples/`, and their logits in numpy."""

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
        encode=lambda text: [ord(letter) - 32 for letter in text],
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
