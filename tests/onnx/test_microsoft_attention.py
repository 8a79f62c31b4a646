"""Operators of transformers in ONNX Runtime's domain, beside ONNX Runtime."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import onnx as jqonnx

from ..cases.onnx_models import make_single, run_runtime

BATCH, LENGTH, PAST, HEADS, SIZE = 2, 5, 3, 4, 16
WIDTH = HEADS * SIZE


class Draw:
    """Random inputs: floats by their shape, and rows of angles."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def __call__(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape).astype(np.float32)

    def angles(self, count: int, size: int = SIZE // 2) -> list[np.ndarray]:
        values = self.rng.uniform(-3, 3, (count, size))
        return [np.cos(values).astype(np.float32), np.sin(values).astype(np.float32)]


def name_inputs(arrays: list[Any]) -> dict[str, Any]:
    return {f"x{i}": array for i, array in enumerate(arrays)}


def compare(
    op: str, inputs: list[Any], known: list[Any] | None = None, outputs: int = 1, tolerance: float = 2e-5,
    **attributes: Any,
) -> None:  # fmt: skip
    """Compare all outputs of an operator with ONNX Runtime's, as a call, compiled, and mapped over inputs."""
    feeds, constants = name_inputs(inputs), {f"c{i}": x for i, x in enumerate(known or [])}
    model = make_single(op, feeds, constants, outputs, **attributes)
    given = {name: x for name, x in feeds.items() if x is not None}
    fn, params = jqonnx.load(model)
    expected = run_runtime(model, given)

    def run(arrays: dict[str, Any]) -> tuple[Any, ...]:
        results = fn(params, **arrays)
        return results if isinstance(results, tuple) else (results,)

    mapped = jax.jit(jax.vmap(run))({name: np.stack([x, x]) for name, x in given.items()})
    for results in (run(given), jax.jit(run)(given), [x[1] for x in mapped]):
        for actual, value in zip(results, expected, strict=True):
            assert actual.dtype == value.dtype
            np.testing.assert_allclose(actual, value, atol=tolerance, rtol=1e-4)


MASKS: dict[str, Any] = {
    "no mask": None,
    "lengths": [5, 3],
    "ends and starts": [5, 4, 1, 0],
    "of keys": [[1, 1, 1, 1, 0], [0, 1, 1, 0, 1]],
    "of queries and keys": np.tril(np.ones((BATCH, LENGTH, LENGTH), int)),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("attributes", [{}, {"unidirectional": 1}, {"scale": 0.3}], ids=str)
def test_attention(mask: str, attributes: dict[str, Any], rng: np.random.Generator) -> None:
    draw, counts = Draw(rng), MASKS[mask]
    mask_array = None if counts is None else np.array(counts, np.int32)
    inputs = [draw(BATCH, LENGTH, 12), draw(12, 3 * WIDTH) / 3, draw(3 * WIDTH), mask_array]
    compare("Attention", inputs, num_heads=HEADS, **attributes)


@pytest.mark.parametrize("is_causal", [0, 1])
def test_attention_with_a_past(is_causal: int, rng: np.random.Generator) -> None:
    draw = Draw(rng)
    inputs = [draw(BATCH, LENGTH, 12), draw(12, 3 * WIDTH) / 3, draw(3 * WIDTH), None]
    inputs += [draw(2, BATCH, HEADS, PAST, SIZE)]
    compare("Attention", inputs, outputs=2, num_heads=HEADS, unidirectional=is_causal)


def test_attention_with_a_bias_of_products(rng: np.random.Generator) -> None:
    draw = Draw(rng)
    inputs = [draw(BATCH, LENGTH, 12), draw(12, 3 * WIDTH) / 3, draw(3 * WIDTH), None, None]
    compare("Attention", [*inputs, draw(1, HEADS, LENGTH, LENGTH)], num_heads=HEADS)


def test_attention_with_values_of_another_size(rng: np.random.Generator) -> None:
    draw = Draw(rng)
    inputs = [draw(BATCH, LENGTH, 12), draw(12, 2 * WIDTH + 16) / 3, draw(2 * WIDTH + 16)]
    compare("Attention", inputs, num_heads=HEADS, qkv_hidden_sizes=[WIDTH, WIDTH, 16])


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("columns", [1, 3 * WIDTH])
@pytest.mark.parametrize("has_past", [False, True])
def test_attention_on_codes(dtype: str, columns: int, has_past: bool, rng: np.random.Generator) -> None:
    draw = Draw(rng)
    point = 64 if dtype == "uint8" else 0
    x = rng.integers(0, 256, (BATCH, LENGTH, 12)).astype(np.uint8)
    # Products of 7-bit weights do not saturate on any processor.
    w = (rng.integers(-63, 64, (12, 3 * WIDTH)) + point).astype(dtype)
    scale = rng.uniform(0.003, 0.005, columns).astype(np.float32)
    known = [w, draw(3 * WIDTH), np.float32(0.02), scale[0] if columns == 1 else scale]
    known += [
        None,
        np.uint8(120),
        np.full(columns, point, dtype)[0] if columns == 1 else np.full(columns, point, dtype),
    ]
    known += [draw(2, BATCH, HEADS, PAST, SIZE)] if has_past else []
    compare("QAttention", [x], known, 1 + has_past, num_heads=HEADS, unidirectional=int(has_past))


@pytest.mark.parametrize("form", ["queries", "bias", "heads", "past"])
def test_multi_head_attention(form: str, rng: np.random.Generator) -> None:
    draw, other = Draw(rng), 7
    q, k, v = draw(BATCH, LENGTH, WIDTH), draw(BATCH, other, WIDTH), draw(BATCH, other, WIDTH)
    mask = np.array([[1, 1, 1, 0, 1, 1, 0], [1] * 7], np.int32)
    cases: dict[str, list[Any]] = {
        "queries": [q, k, v, None, mask],
        "bias": [q, k, v, draw(3 * WIDTH), None, draw(BATCH, HEADS, LENGTH, other)],
        "heads": [q, draw(BATCH, HEADS, other, SIZE), draw(BATCH, HEADS, other, SIZE)],
        "past": [q, k[:, :2], v[:, :2], None, None, None, *(draw(BATCH, HEADS, PAST, SIZE) for _ in "kv")],
    }
    compare("MultiHeadAttention", cases[form], outputs=3 if form == "past" else 1, num_heads=HEADS)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("is_prompt", [True, False])
@pytest.mark.parametrize(
    "attributes",
    [{}, {"do_rotary": 1}, {"do_rotary": 1, "rotary_interleaved": 1}, {"local_window_size": 2}, {"softcap": 2.0}],
    ids=str,
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_group_query_attention(
    kv_heads: int, is_prompt: bool, attributes: dict[str, Any], is_packed: bool, rng: np.random.Generator
) -> None:
    draw, count = Draw(rng), LENGTH if is_prompt else 1
    widths = WIDTH, kv_heads * SIZE, kv_heads * SIZE
    parts = [draw(BATCH, count, width) for width in widths]
    inputs = [np.concatenate(parts, axis=2), None, None] if is_packed else parts
    # Rows of a cache have lengths of their own; a prompt has none before it.
    lasts = np.array([LENGTH - 1] * BATCH if is_prompt else [PAST + 1, PAST], np.int32)
    inputs += [None if is_prompt else draw(BATCH, kv_heads, PAST + 2, SIZE) for _ in "kv"]
    known = [np.int32(LENGTH if is_prompt else PAST + 2)]
    known += draw.angles(16) if "do_rotary" in attributes else []
    compare("GroupQueryAttention", [*inputs, lasts], known, 3, num_heads=HEADS, kv_num_heads=kv_heads, **attributes)


@pytest.mark.parametrize("form", ["offset", "positions", "heads", "a part of the features"])
@pytest.mark.parametrize("is_interleaved", [0, 1])
def test_rotary_embedding(form: str, is_interleaved: int, rng: np.random.Generator) -> None:
    draw, attributes = Draw(rng), {}
    x = draw(BATCH, HEADS, LENGTH, SIZE) if form == "heads" else draw(BATCH, LENGTH, WIDTH)
    positions = np.array([2]) if form == "offset" else rng.integers(0, 10, (BATCH, LENGTH))
    tables = draw.angles(10, SIZE // 4 if form.startswith("a part") else SIZE // 2)
    if form.startswith("a part"):
        attributes = {"rotary_embedding_dim": SIZE // 2, "num_heads": HEADS}
    compare("RotaryEmbedding", [x, positions], tables, interleaved=is_interleaved, **attributes)


def test_embed_layer_normalization(rng: np.random.Generator) -> None:
    draw = Draw(rng)
    tokens, segments = (rng.integers(0, n, (BATCH, LENGTH)).astype(np.int32) for n in (20, 2))
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    tables = [draw(n, WIDTH) for n in (20, 10, 2)]
    compare("EmbedLayerNormalization", [tokens, segments, *tables, draw(WIDTH), draw(WIDTH), mask], outputs=2)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("block", [16, 32])
def test_product_with_a_codebook(kind: int, block: int, rng: np.random.Generator) -> None:
    k, n = 64, 6
    codes, scales = rng.integers(0, 256, n * k // 2).astype(np.uint8), rng.uniform(0.1, 0.2, n * k // block)
    known = [codes, scales.astype(np.float32)]
    compare("MatMulBnb4", [Draw(rng)(3, 4, k)], known, K=k, N=n, block_size=block, quant_type=kind, tolerance=1e-4)


def test_attention_has_gradients(rng: np.random.Generator) -> None:
    draw = Draw(rng)
    model = make_single("Attention", {"x": draw(BATCH, LENGTH, 12)}, {"w": draw(12, 3 * WIDTH)}, num_heads=HEADS)
    fn, params = jqonnx.load(model)
    slopes = jax.grad(lambda p: jnp.sum(fn(p, draw(BATCH, LENGTH, 12)) ** 2))(params)
    assert np.all(np.any(np.asarray(slopes["w"]), axis=0))
