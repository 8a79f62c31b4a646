"""Exported decoders with a quantized cache of keys and values: ONNX Runtime writes and reads the same codes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest

import jaxquant as jq
from jaxquant import onnx as jqonnx

F32 = np.float32
HEADS, LENGTH = 2, 6


def make_cache(dtype: str, features: int, **options: Any) -> jq.KVCache:
    granularity = options.pop("granularity", jq.PerToken())
    spec = jq.QuantSpec(dtype, granularity, narrow_range=options.pop("narrow_range", None))
    return jq.KVCache.create((2, LENGTH, HEADS, features), spec, spec, **options)


def decode(
    cache: jq.KVCache, q: jax.Array, k: jax.Array, v: jax.Array, query_digits: int = 1
) -> tuple[jax.Array, jq.KVCache]:
    cache = cache.append(k, v)
    return jq.attention(q, cache, query_digits=query_digits), cache


def sample(rng: np.random.Generator, features: int, tokens: int) -> list[np.ndarray]:
    heads = (2 * HEADS, HEADS, HEADS)
    return [rng.normal(size=(2, tokens, n, features)).astype(F32) for n in heads]


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "all tokens": (8, {}),
    "odd features": (5, {}),  # the last byte holds one code
    "a ring": (6, {"window": 3}),
    "an index for each row": (5, {"per_row": True}),
    "blocks": (8, {"granularity": jq.Blocked(-1, 4)}),
    "all codes, and two for queries": (
        8,
        {"granularity": jq.Blocked(-1, 4), "narrow_range": False, "query_digits": 2},
    ),
    "blocks, rotated, less a mean": (
        12,
        {
            "granularity": jq.Blocked(-1, 4),
            "rotate": True,
            "mean_key": np.full((HEADS, 12), 0.7, F32),
            "smoothing": np.full((HEADS, 12), 4.0, F32),
            "rotate_values": True,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_a_decoder_step_by_step(dtype: str, name: str, rng: np.random.Generator) -> None:
    """The model gets the cache that it returned; each of its arrays equals JAX's, code for code and bit for bit."""
    features, options = CASES[name]
    run = functools.partial(decode, query_digits=options.get("query_digits", 1))
    cache = make_cache(dtype, features, **{key: x for key, x in options.items() if key != "query_digits"})
    model = jqonnx.export(run, [cache, *sample(rng, features, 1)])
    # The cache stays as small as it is in JAX: int4 codes are bytes of two.
    stored = {info.name: info.type.tensor_type.elem_type for info in model.graph.input[:2]}
    assert set(stored.values()) == ({2} if dtype == "int4" else {3})  # uint8, int8
    for level in (
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
        onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    ):
        run_options = onnxruntime.SessionOptions()
        run_options.graph_optimization_level = level
        session = onnxruntime.InferenceSession(model.SerializeToString(), run_options)
        names = [info.name for info in session.get_inputs()]
        ours, theirs = cache, [np.asarray(leaf) for leaf in jax.tree.leaves(cache)]
        for _ in range(4):
            arguments = sample(rng, features, 1)
            y, ours = jax.jit(run)(ours, *map(jnp.asarray, arguments))
            outputs: Any = session.run(None, dict(zip(names, [*theirs, *arguments], strict=True)))
            result, *theirs = outputs
            for actual, expected in zip(theirs, jax.tree.leaves(ours), strict=True):
                np.testing.assert_array_equal(actual, expected, strict=True)
            # The probabilities are rounded to digits of 15 bits: an exponential with other last bits may change one.
            # Each is multiplied by a value of up to 8.
            np.testing.assert_allclose(result, y, rtol=1e-5, atol=2 * 8 / 2**15)
        assert int(np.max(ours.index)) == 4


@pytest.mark.parametrize("opset", [18, 21])
def test_a_prompt(opset: int, rng: np.random.Generator) -> None:
    cache, arguments = make_cache("int4", 5), sample(rng, 5, 4)
    model = jqonnx.export(decode, [cache, *arguments], opset=opset)
    report = jqonnx.verify(model, decode, [(cache, *arguments)])
    assert report.is_exact, str(report)


INTEGERS = {
    8: ("int8", "uint8"), 16: ("int16", "uint16"), 32: ("int32", "uint32"), 4: ("int4", "uint4"), 2: ("int2", "uint2")
}  # fmt: skip


@pytest.mark.parametrize("bits", INTEGERS)
def test_bits_of_integers(bits: int, rng: np.random.Generator) -> None:
    for old, new in (INTEGERS[bits], INTEGERS[bits][::-1]):
        info = jnp.iinfo(old)
        numbers = (
            np.arange(int(info.min), int(info.max) + 1) if bits < 16 else rng.integers(info.min, int(info.max), 300)
        )
        numbers = np.asarray([*numbers, info.min, info.max, 0])
        expected = numbers % 2**bits  # the value of the bits as an unsigned integer, and then with a sign
        expected = np.where((expected >= 2 ** (bits - 1)) & (jnp.iinfo(new).min < 0), expected - 2**bits, expected)

        def reinterpret(x: jax.Array, old: str = old, new: str = new) -> jax.Array:
            codes = jax.lax.bitcast_convert_type(x.astype(old), jnp.dtype(new))
            return codes.astype(jnp.uint32 if new == "uint32" else jnp.int32)

        wide = numbers.astype(np.uint32 if old == "uint32" else np.int32)
        model = jqonnx.export(reinterpret, [wide])
        (actual,) = _run(model, wide)
        np.testing.assert_array_equal(actual.astype(np.int64), expected)
        np.testing.assert_array_equal(np.asarray(reinterpret(jnp.asarray(wide))).astype(np.int64), expected)


def _run(model: Any, x: np.ndarray) -> Any:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {session.get_inputs()[0].name: x})


def test_other_bits_are_refused() -> None:
    for old, new in ((F32, np.int32), (np.int32, F32), (np.int16, np.int8)):
        x = jnp.zeros(4, old)
        with pytest.raises(ValueError, match=r"bitcast_convert_type \(the bits of "):
            jqonnx.export(lambda x, new=new: jax.lax.bitcast_convert_type(x, new), [x])
