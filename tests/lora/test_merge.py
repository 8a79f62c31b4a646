"""Merging of adapters: no code differs with the variant "qa", and what rounding costs otherwise."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from tests.cases.adapted_programs import PROGRAMS
from tests.support.equality import check_equal

ZERO_POINTS = (jq.Rule(weight=jq.Weight("uint4", block=4, options={"symmetric": False})),)
OFFSETS = (jq.Rule(weight=jq.Weight("uint4", block=4, options={"offset": True})),)
FLOAT16_OFFSETS = (jq.Rule(weight=jq.Weight("uint4", block=4, options={"offset": True, "scale_dtype": "float16"})),)
RULES = {
    "int4": jq.recipes.weight_only_int4(block=4), "zero points": ZERO_POINTS, "offsets": OFFSETS,
    "float16 offsets": FLOAT16_OFFSETS,
    "int8": jq.recipes.weight_only_int8(), "short blocks": jq.recipes.weight_only_int4(block=5),
    "tensor": (jq.Rule(weight=jq.Weight("uint8", per="tensor", options={"symmetric": False})),),
    "outputs": (jq.Rule(weight=jq.Weight("uint8", options={"offset": True})),),
    "nested scales": jq.recipes.gguf("Q4_K"), "five bits": jq.recipes.gguf("Q5_0"),
}  # fmt: skip


def adapt(name: str, rules: Any, rng: np.random.Generator, variant: str) -> tuple[Any, jq.lora.AdaptedTree, jax.Array]:
    params, x = PROGRAMS[name].sample(rng)
    prepared = jq.prepare(PROGRAMS[name].function, params, x, rules=rules)
    settings = jq.lora.LoRA(rank=2, alpha=3, variant=variant)
    adapted = jq.lora.adapt(prepared, prepared.convert(params), settings, jax.random.key(int(rng.integers(2**31))))
    moved = jax.tree.map(lambda v: v + jnp.asarray(rng.normal(0, 0.1, v.shape).astype(np.float32)), adapted.adapters)
    return prepared, adapted.replace(adapters=moved), x


@pytest.mark.sample(6)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    "name", ["dense", "scan", "heads", "experts", "tied", "left", "sliced", "convolution", "ragged", "grouped"]
)
def test_qa_lora_changes_no_code(name: str, rules: str, rng: np.random.Generator) -> None:
    if name == "convolution" and rules not in ("int8", "tensor", "outputs"):
        pytest.skip("convolutions take no blocks")
    prepared, adapted, x = adapt(name, RULES[rules], rng, "qa")
    tree, losses = jq.lora.merge(prepared, adapted)
    for path, q in adapted.frozen.params.items():
        new = tree.params[path]
        check_equal(new.codes, q.codes)
        jax.tree.map(check_equal, new.scale, q.scale)
        # One offset for each scale, computed here in float64.
        product = PROGRAMS[name].products[path]
        a, b = (np.asarray(adapted.adapters[path][part], np.float64) for part in "ab")
        offset = q.offset.dequantize() if isinstance(q.offset, jq.QuantizedArray) else q.offset
        before = 0.0 if offset is None else np.asarray(offset, np.float64)
        if q.zero_point is not None:
            before = -np.asarray(q.zero_point, np.float64) * np.asarray(q.scale, np.float64)
        np.testing.assert_allclose(new.offset, before + 1.5 * np.einsum(product, a, b), rtol=1e-5, atol=1e-6)
        assert losses[path] < 1e-5
    y, expected = (np.asarray(jax.jit(prepared.apply)(tree, x)) for tree in (tree, adapted))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert np.abs(y - np.asarray(prepared.apply(adapted.frozen, x))).max() > 1e-3 * np.abs(y).max()


@pytest.mark.parametrize("variant", ["lora", "dora"])
@pytest.mark.parametrize("name", ["dense", "heads"])
def test_other_variants_are_quantized_again(name: str, variant: str, rng: np.random.Generator) -> None:
    prepared, adapted, x = adapt(name, RULES["int4"], rng, variant)
    tree, losses = jax.jit(lambda t: jq.lora.merge(prepared, t))(adapted)
    expected = prepared.apply(adapted, x)
    for path, product in PROGRAMS[name].products.items():
        q, adapter = adapted.frozen.params[path], adapted.adapters[path]
        before = np.asarray(q.dequantize(), np.float64)
        after = before + 1.5 * np.einsum(product, *(np.asarray(adapter[part], np.float64) for part in "ab"))
        if variant == "dora":
            letters, (first, second) = product.split("->")[1], product.split("->")[0].split(",")
            axes = tuple(letters.index(i) for i in first if i not in second)
            kept = "".join(i for i in second if i != "r")
            order = "".join(i for i in letters if i in kept)
            magnitude = np.expand_dims(np.einsum(f"{kept}->{order}", np.asarray(adapter["magnitude"])), axes)
            after *= magnitude / np.sqrt((after**2).sum(axes, keepdims=True))
        again = jq.quantize(jnp.asarray(after, jnp.float32), prepared.leaves[prepared.names.index(path)].spec)
        new = tree.params[path]
        # A number on a tie of float64 may be rounded to the other side.
        assert (np.asarray(new.codes) != np.asarray(again.codes)).mean() < 0.02
        error = np.linalg.norm(np.asarray(new.dequantize(), np.float64) - after)
        np.testing.assert_allclose(losses[path], error / np.linalg.norm(after - before), rtol=1e-2)
    assert np.abs(np.asarray(prepared.apply(tree, x) - expected)).max() < np.abs(np.asarray(expected)).max()


def test_refusals() -> None:
    params, x = {"w": jnp.ones((4, 2))}, jnp.ones((1, 4))
    prepared = jq.prepare(lambda p, x: x @ p["w"], params, x, rules=RULES["int8"])
    with pytest.raises(TypeError, match=r"jaxquant\.lora\.merge: adapted: expected an AdaptedTree"):
        jq.lora.merge(prepared, prepared.convert(params))  # pyright: ignore[reportArgumentType]
    adapted = jq.lora.adapt(prepared, prepared.convert(params), jq.lora.LoRA(2), jax.random.key(0))
    with pytest.raises(ValueError, match=r"merge: adapters: expected the paths that the tree was made with, got none"):
        jq.lora.merge(prepared, adapted.replace(adapters={}))
    # Otherwise this factor a would be broadcast.
    wrong = {"w": {"a": jnp.ones((1, 2)), "b": jnp.ones((2, 2))}}
    with pytest.raises(ValueError, match=r"jaxquant\.lora\.merge: adapters\['w'\]: expected arrays of the shapes"):
        jq.lora.merge(prepared, adapted.replace(adapters=wrong))
    floats = jq.prepare(lambda p, x: x @ p["w"], params, x, rules=())
    with pytest.raises(
        ValueError, match=r"merge: adapters: expected adapters of parameters that are quantized, as w is"
    ):
        jq.lora.merge(floats, adapted)


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_nl", "mxfp4"])
def test_merged_codes_return_to_their_type_of_gguf(kind: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    gguf = pytest.importorskip("gguf")
    w = rng.normal(size=(8, 512)).astype(np.float32)
    params, info = jq.checkpoint.quantize_to({"blk.0.w": jnp.asarray(w)}, kind)
    x = jnp.asarray(rng.normal(size=(3, 512)).astype(np.float32))
    function = lambda p, x: x @ p["blk.0.w"].T  # noqa: E731
    prepared = jq.prepare(function, params, x, rules=jq.recipes.weight_only_int8())
    adapted = jq.lora.adapt(prepared, prepared.convert(params), jq.lora.LoRA(2), jax.random.key(0))
    factors = jax.tree.map(lambda v: v + rng.normal(0, 1, v.shape).astype(np.float32), adapted.adapters)
    tree, losses = jq.lora.merge(prepared, adapted.replace(adapters=factors))
    assert losses["blk.0.w"] < 1
    info = dataclasses.replace(info, metadata={"general.architecture": "test"})
    jq.checkpoint.save(tmp_path / "merged.gguf", tree.params, info)
    (tensor,) = gguf.GGUFReader(tmp_path / "merged.gguf").tensors
    assert tensor.tensor_type.name == kind.upper()
    check_equal(gguf.quants.dequantize(tensor.data, tensor.tensor_type), tree.params["blk.0.w"].dequantize())


@pytest.mark.parametrize("form", ["zero points", "offset", "codebook"])
def test_codes_with_scales_that_no_spec_can_say(form: str, rng: np.random.Generator) -> None:
    """They run as they are, as those of bitsandbytes' double quantization; merged codes have float32 scales."""
    inner = {"offset": {"offset": True}, "zero points": {"symmetric": False}, "codebook": {}}[form]
    inner_dtype = jq.nf4 if form == "codebook" else "uint8"
    outer = jq.QuantSpec("uint4", jq.Blocked(-1, 32), symmetric=False)
    outer = outer if form == "zero points" else jq.QuantSpec(jq.nf4, jq.Blocked(-1, 32))
    plain = jq.quantize(jnp.asarray(rng.normal(size=(8, 256)).astype(np.float32)), outer)
    scale = jq.quantize(plain.scale, jq.QuantSpec(inner_dtype, jq.Blocked(-1, 4), **inner))
    q = jq.QuantizedArray(
        plain.codes, scale, plain.zero_point, block_size=plain.block_size, codebook=plain.codebook
    )  # fmt: skip
    x = jnp.asarray(rng.normal(size=(3, 256)).astype(np.float32))
    prepared = jq.prepare(lambda p, x: x @ p["w"].T, {"w": q}, x, rules=jq.recipes.weight_only_int8())
    converted = prepared.convert({"w": q})
    expected = np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64).T
    np.testing.assert_allclose(prepared.apply(converted, x), expected, rtol=1e-4, atol=1e-4)
    tree, _ = jq.lora.merge(prepared, jq.lora.adapt(prepared, converted, jq.lora.LoRA(2), jax.random.key(0)))
    assert tree.params["w"].scale.dtype == jnp.float32
    assert not isinstance(tree.params["w"].scale, jq.QuantizedArray)
