"""Arrays with each of the forms, such as an offset, a nested scale, signed scales, a permutation or bfloat16 steps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxquant as jq
from jaxquant import QuantizedArray, checkpoint

from ..cases.array_forms import NAMES, SHAPE, WEIGHT_ONLY, check_values, make_array

F32 = np.float32


@pytest.mark.parametrize("name", NAMES)
def test_dequantize(name: str, rng: np.random.Generator) -> None:
    q, expected = make_array(name, rng)
    assert q.shape == SHAPE
    assert repr(q).startswith("QuantizedArray(uint8[6,22]" if name != "codebook" else "QuantizedArray(nf4[6,22]")
    check_values(q.dequantize(), expected)
    check_values(jax.jit(QuantizedArray.dequantize)(q), expected)
    for dtype in (jnp.float16, jnp.bfloat16):
        with np.errstate(over="ignore"):
            check_values(jax.jit(QuantizedArray.dequantize)(q.astype(dtype)), expected.astype(dtype))


@pytest.mark.parametrize("name", NAMES)
def test_stacked_arrays(name: str, rng: np.random.Generator) -> None:
    """Each leaf of a stack has one more dimension: vmap and scan see single arrays, and the stack dequantizes whole."""
    pairs = [make_array(name, rng) for _ in range(3)]
    stack = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *(q for q, _ in pairs))
    expected = np.stack([values for _, values in pairs])
    check_values(stack.dequantize(), expected)
    check_values(jax.vmap(QuantizedArray.dequantize)(stack), expected)
    check_values(jax.lax.scan(lambda _, q: (None, q.dequantize()), None, stack)[1], expected)


ROUND_TRIPS: dict[str, Callable[[QuantizedArray], Any]] = {
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),
    "copy": copy.deepcopy,
    "arrays": lambda q: checkpoint.from_arrays(checkpoint.to_arrays(q)),
    "export": lambda q: export.deserialize(export.export(jax.jit(lambda q: q))(q).serialize()).call(q),
    "stored order": lambda q: q.store_last(0).store_last(),
    "replace": lambda q: q.replace(codes=q.codes),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("trip", ROUND_TRIPS)
def test_round_trips(name: str, trip: str, rng: np.random.Generator) -> None:
    q, expected = make_array(name, rng)
    q = jax.tree.map(jnp.asarray, q)
    restored = ROUND_TRIPS[trip](q)
    assert jax.tree.structure(restored) == jax.tree.structure(q)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), restored, q)
    check_values(restored.dequantize(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_weight_only_products(name: str, rng: np.random.Generator) -> None:
    q, values = make_array(name, rng)
    x = rng.normal(size=(3, 6)).astype(F32)
    expected = x.astype(np.float64) @ values
    tolerance = np.abs(x).astype(np.float64) @ np.abs(values) * 2.0**-20
    for y in (jq.matmul(x, q), jax.jit(jq.matmul)(x, q), jq.einsum("ij,jk->ki", x, q).T, x @ q.store_last(0)):
        assert (np.abs(np.asarray(y, np.float64) - expected) <= tolerance).all()


def test_gradient_of_permuted_scales(rng: np.random.Generator) -> None:
    q, _ = make_array("permutation", rng)
    w = rng.normal(size=SHAPE).astype(F32)

    def compute(scale: jax.Array) -> jax.Array:
        return (q.replace(scale=scale).dequantize() * w).sum()

    grouped = np.asarray(q.codes).astype(F32) * w[:, np.asarray(q.permutation)]
    expected = np.add.reduceat(grouped, range(0, 22, 4), axis=1)
    for grad in (jax.grad(compute), jax.jit(jax.grad(compute))):
        np.testing.assert_allclose(grad(jnp.asarray(q.scale)), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_products_of_codes(name: str, rng: np.random.Generator) -> None:
    """They are sums of integers with the scales and the offsets outside, or refused."""
    q, values = make_array(name, rng)
    x = jq.quantize(rng.normal(size=(3, 22)).astype(F32), jq.QuantSpec("int8"))
    calls = (lambda: jq.matmul(x, q.T), lambda: jq.einsum("ij,kj", x, q))
    if name in WEIGHT_ONLY:
        for call in calls:
            with pytest.raises((TypeError, ValueError), match=r"jaxquant\.(matmul|einsum): (rhs|operands\[1\])"):
                call()
        return
    wide = np.asarray(x.dequantize(), np.float64)
    tolerance = np.abs(wide) @ np.abs(values.astype(np.float64)).T * 2.0**-18
    # The product of a block is rounded before the offset is added, which may cancel it.
    tolerance = tolerance + np.abs(wide) @ _derive_magnitudes(q).T * 2.0**-18
    for call in calls:
        assert (np.abs(np.asarray(call(), np.float64) - wide @ values.astype(np.float64).T) <= tolerance).all()


def _derive_magnitudes(q: QuantizedArray) -> np.ndarray:
    """Return |codes * scale| + |offset|."""
    product = np.asarray(q.replace(offset=None).dequantize(), np.float64)
    return np.abs(product) + np.abs(np.asarray(q.dequantize(), np.float64) - product)


@pytest.mark.parametrize("name", NAMES[:-2])
def test_operations_on_codes_refuse(name: str, rng: np.random.Generator) -> None:
    q, _ = make_array(name, rng)
    calls = {
        "relu": jq.codes.relu,
        "max_pool": lambda q: jq.codes.max_pool(q, window_shape=(1,)),
        "onnx_view": jq.onnx_view,
    }
    supported = {"relu": ("nested scale", "inverse nested scale", "signed", "permutation"), "max_pool": ("signed",)}
    for function, call in calls.items():
        if name in supported.get(function, ()):
            continue
        with pytest.raises(ValueError, match=rf"jaxquant\.(codes\.)?{function}: q\.[a-z_]+: expected .*because"):
            call(q)


def _make(**changes: Any) -> QuantizedArray:
    parts: dict[str, Any] = {"codes": np.ones(SHAPE, np.uint8), "scale": np.ones((6, 2), F32), **changes}
    return QuantizedArray(parts.pop("codes"), parts.pop("scale"), **parts)


ONES, INDICES = np.ones((6, 2), F32), np.arange(22, dtype=np.int32)
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "zero point and offset": ({"zero_point": np.ones((1, 1), np.uint8), "offset": ONES}, r"offset: expected None"),
    "offset of floats": ({"codes": jnp.ones(SHAPE, jnp.float8_e4m3fn), "offset": ONES}, r"offset: expected None"),
    "dtype of the offset": ({"offset": np.ones((6, 2), np.int32)}, "offset: expected dtype float32"),
    "shape of the offset": ({"offset": np.ones((6, 5), F32)}, "offset: expected the rank of the codes"),
    "number as offset": ({"offset": 1.0}, "offset: expected an array"),
    "negative scale": ({"scale": -ONES}, "scale: expected positive numbers, got -1"),
    "negative nested scale": ({"scale": QuantizedArray(-ONES.astype(np.int8), ONES)}, "scale: expected positive"),
    "two levels": ({"scale": QuantizedArray(np.ones((6, 2), np.int8), QuantizedArray(np.ones((6, 2), np.int8), ONES))},
                   r"scale\.scale: expected an array of floats"),
    "nested shape": ({"scale": QuantizedArray(np.ones((6, 3), np.int8), ONES)}, r"scale\.scale: expected the rank"),
    "no axis": ({"permutation": INDICES}, "permutation: expected None without a permuted_axis"),
    "no permutation": ({"permuted_axis": -1}, "permutation: expected an array, because"),
    "axis out of range": ({"permutation": INDICES, "permuted_axis": -3}, "permuted_axis: expected an axis from -1"),
    "positive axis": ({"permutation": INDICES, "permuted_axis": 1}, "permuted_axis: expected an axis from -1"),
    "length": ({"permutation": INDICES[1:], "permuted_axis": -1}, r"permutation: expected shape \(22,\)"),
    "dtype": ({"permutation": INDICES.astype(np.int8), "permuted_axis": -1}, "permutation: expected dtype int32"),
    "repeated index": ({"permutation": INDICES // 2, "permuted_axis": -1}, "permutation: expected each of the indices"),
    "block size": ({"block_size": (0, 11)}, "block_size: expected a positive int"),
    "block sizes": ({"block_size": (2, 8)}, "scale: expected the rank of the codes.*blocks of"),
    "flag": ({"signed_scale": "no"}, "signed_scale: expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    changes, text = REFUSALS[name]
    error = (TypeError, ValueError)
    q = _make(**changes)
    with pytest.raises(error, match=rf"jaxquant\.QuantizedArray\.dequantize: self\.{text}"):
        q.dequantize()
