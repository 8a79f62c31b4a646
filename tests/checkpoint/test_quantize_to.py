"""`quantize_to` against the quantizer of the package gguf, and arrays that JAX makes in files."""

from __future__ import annotations

import pathlib
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import checkpoint
from jaxquant.checkpoint.quantize import QUANTIZERS

from ..oracles import file_formats
from ..support import equality

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ2_0")
# The least ratio of signal to noise for normal numbers, in decibels.
LEAST = {"Q2_K": 7, "Q3_K": 12, "Q4_K": 18, "Q5_K": 24, "Q6_K": 29, "IQ4_NL": 18, "IQ4_XS": 18, "MXFP4": 16}


def draw(rng: np.random.Generator, rows: int = 60) -> np.ndarray:
    """Return blocks of all magnitudes: with equal numbers, ties, zeros, subnormal scales, and outliers."""
    x = rng.normal(size=(rows, 8, 32)).astype(np.float32)
    x *= np.exp2(rng.integers(-20, 12, (rows, 8, 1)).astype(np.float32))
    kind = rng.integers(0, 6, (rows, 8, 1))
    steps = np.round(x / np.abs(x).max(axis=-1, keepdims=True) * 16) / 2  # halves of steps
    x = np.where(kind == 1, steps.astype(np.float32), x)
    x = np.where(kind == 2, x[..., :1], x)
    x = np.where((kind == 3) & (rng.random(x.shape) < 0.5), np.float32(0), x)
    x = np.where(rng.random((rows, 8, 1)) < 0.05, np.float32(-0.0), x)
    return x.reshape(rows, 256)


@pytest.mark.parametrize("kind", EXACT)
def test_codes_and_scales_are_those_of_gguf(kind: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    x = draw(rng)
    with np.errstate(all="ignore"):
        expected = gguf.quantize(x, gguf.GGMLQuantizationType[kind])
    params = {"w": jnp.asarray(x), "stacked": x.reshape(2, 30, 256), "half": x.astype(ml_dtypes.bfloat16)}
    quantized, _ = checkpoint.quantize_to(params, kind.lower())
    parts = file_formats.GGUF[kind].decode({"data": expected})
    equality.check_equal(np.asarray(quantized["w"].codes).astype(np.int32), parts.codes.astype(np.int32))
    assert isinstance(parts.scale, np.ndarray)
    equality.same_bits(quantized["w"].scale, parts.scale)
    checkpoint.save(tmp_path / "a.gguf", quantized, checkpoint.Info("gguf"))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    equality.check_equal(tensors["w"].data, expected)
    equality.check_equal(tensors["stacked"].data.reshape(60, -1), expected)
    with np.errstate(all="ignore"):
        half = gguf.quantize(params["half"].astype(np.float32), gguf.GGMLQuantizationType[kind])
    equality.check_equal(tensors["half"].data, half)


@pytest.mark.parametrize("kind", [kind for kind in QUANTIZERS if kind not in EXACT])
def test_other_types_are_saved_with_their_values(kind: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    x = rng.normal(size=(16, 512)).astype(np.float32)
    q = checkpoint.quantize_to({"w": x}, kind)[0]["w"]
    values = np.asarray(q.dequantize())
    assert values.dtype == np.float32
    assert 10 * np.log10((x**2).sum() / ((x - values) ** 2).sum()) > LEAST[kind]
    checkpoint.save(tmp_path / "a.gguf", {"w": q}, checkpoint.Info("gguf"))
    (tensor,) = gguf.GGUFReader(tmp_path / "a.gguf").tensors
    assert tensor.tensor_type.name == kind
    expected = gguf.dequantize(tensor.data, tensor.tensor_type)
    if kind == "MXFP4":  # the package's table has no -0
        values = np.where(values == 0, np.float32(0), values)
    equality.same_bits(values, expected)


def test_every_type_but_those_with_more_is_there() -> None:
    assert {*file_formats.GGUF} - {*QUANTIZERS} == {"NVFP4"}


def test_what_stays(rng: np.random.Generator) -> None:
    x = rng.normal(size=(4, 32)).astype(np.float32)
    q = jq.quantize(x, jq.QuantSpec("int8"))
    params = {"layer": [{"up": x, "norm": x, "bias": x[0]}], "table": np.ones((2, 32), np.int32), "q": q, "n": 3}
    found, _ = checkpoint.quantize_to(params, "q8_0", keep=["*norm*"])
    assert jax.tree.structure(found) != jax.tree.structure(params)
    assert isinstance(found["layer"][0]["up"], jq.QuantizedArray)
    assert found["layer"][0]["norm"] is x
    assert found["q"] is q
    assert (found["n"], found["table"].dtype, found["layer"][0]["bias"].ndim) == (3, np.int32, 1)


@pytest.mark.parametrize(
    ("x", "kind", "text"),
    [
        (np.ones((2, 33), np.float32), "q4_0", r"params at 'a/b': expected rows of a multiple of 32 elements for Q4_0"),
        (np.ones((2, 32), np.float32), "q4_k", r"params at 'a/b': expected rows of a multiple of 256"),
        (np.full((2, 32), np.nan, np.float32), "q4_0", r"params at 'a/b': expected finite numbers"),
        (np.full((2, 32), 1e30, np.float32), "q4_0", r"expected numbers whose scales the type Q4_0 holds in float16"),
        (np.full((2, 256), 1e30, np.float32), "q6_k", r"float16"),
        (np.ones((2, 32), np.float32), "q9", r"quantize_to: target: expected"),
        (np.ones((2, 32), np.float32), 4, r"quantize_to: target: expected"),
    ],
)
def test_bad_inputs(x: np.ndarray, kind: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        checkpoint.quantize_to({"a": {"b": x}}, kind)


def test_traced_arrays_are_refused() -> None:
    with pytest.raises(TypeError, match="not traced"):
        jax.jit(lambda x: checkpoint.quantize_to({"w": x}, "q4_0")[0])(jnp.ones((2, 32)))


def test_empty_matrices() -> None:
    for shape in ((0, 32), (2, 0), (2, 0, 64)):
        q = checkpoint.quantize_to([np.ones(shape, np.float32)], "q4_0")[0][0]
        assert q.dequantize().shape == shape


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"])
def test_weights_of_the_recipe_are_saved(kind: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """Rounded to nearest, and with the codes that GPTQ finds."""
    x = jnp.asarray(rng.normal(size=(16, 64)), jnp.float32)
    params = {"kernel": jnp.asarray(rng.normal(size=(64, 8)), jnp.float32)}
    prepared = jq.prepare(lambda params, x: x @ params["kernel"], params, x, rules=jq.recipes.gguf(kind))
    moments = jq.ptq.collect(prepared, params, [x])
    for found in (prepared.convert(params), jq.ptq.apply(prepared, params, moments, method=jq.ptq.GPTQ())):
        (q,) = [leaf for leaf in jax.tree.leaves(found, is_leaf=lambda leaf: isinstance(leaf, jq.QuantizedArray))
                if isinstance(leaf, jq.QuantizedArray)]  # fmt: skip
        checkpoint.save(tmp_path / "a.gguf", {"w": q.T}, checkpoint.Info("gguf"))
        (tensor,) = gguf.GGUFReader(tmp_path / "a.gguf").tensors
        assert tensor.tensor_type.name == kind
        values = np.asarray(q.dequantize()).T
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(values, expected)
