"""Arrays with an offset, a nested scale, signed scales, a permutation, or block sizes that differ by axis.

The oracle is the formula in numpy, (codes - zero_point) * scale + offset, with each operation rounded to float32.
"""

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

F32 = np.float32
SHAPE = (6, 22)
NAMES = ("offset", "nested scale", "nested offset", "signed", "permutation", "block sizes", "codebook", "all")


def repeat(part: Any, shape: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
    """Return a part with its entries repeated over blocks of the given sizes, the last of which may be short."""
    part = np.asarray(part, F32)
    for axis, (size, length) in enumerate(zip(sizes, shape, strict=True)):
        part = np.repeat(part, size, axis)[(*(slice(None),) * axis, slice(length))]
    return np.broadcast_to(part, shape)


def make_floats(rng: np.random.Generator, shape: tuple[int, ...], *, signed: bool = False) -> np.ndarray:
    """Return floats of many magnitudes; with `signed`, some are negative and some are 0."""
    values = rng.uniform(0.5, 1, shape) * 2.0 ** rng.integers(-12, 12, shape)
    if signed:
        values *= rng.choice((-1, 0, 1), shape)
    return values.astype(F32)


def make_array(name: str, rng: np.random.Generator) -> tuple[QuantizedArray, np.ndarray]:
    """Return an array with one of the forms, and the float32 values of the formula."""
    codes, sizes = rng.integers(0, 16, SHAPE).astype(np.uint8), (1, 4)
    blocks = (6, 6)  # the last block is short
    steps: np.ndarray = codes.astype(F32)
    scale: Any = make_floats(rng, blocks)
    wide = scale
    options: dict[str, Any] = {"block_size": 4}
    parts: dict[str, Any] = {}
    offset = np.zeros((1, 1), F32)
    if name == "codebook":
        options["codebook"], steps = jq.nf4, np.asarray(jq.nf4.levels, F32)[codes]
    if name in ("nested scale", "all"):
        inner = rng.integers(1, 64, blocks).astype(np.uint8)
        step = make_floats(rng, (6, 2)).astype(np.float16)
        scale, wide = QuantizedArray(inner, step, block_size=4), inner * repeat(step, blocks, (1, 4))
    if name == "signed":
        scale = wide = make_floats(rng, blocks, signed=True)
        options["signed_scale"] = True
    if name == "block sizes":
        sizes = (4, 5)
        scale = wide = make_floats(rng, (2, 5))
        options["block_size"] = (4, 5)
    if name in ("offset", "block sizes", "codebook"):
        offset = make_floats(rng, wide.shape, signed=True)
        parts["offset"] = offset.astype(F32)
    if name in ("nested offset", "all"):
        inner = rng.integers(0, 64, blocks).astype(np.uint8)
        step = make_floats(rng, (6, 1), signed=True).astype(np.float16)
        parts["offset"] = QuantizedArray(inner, step, signed_scale=True)
        offset = inner * step.astype(F32)
    narrow = jnp.asarray(codes).astype(jnp.uint4 if name == "codebook" else jnp.uint8)
    values = steps * repeat(wide, SHAPE, sizes)
    values = (values + repeat(offset, SHAPE, sizes if offset.size > 1 else SHAPE)).astype(F32)
    if name in ("permutation", "all"):
        parts["permutation"] = rng.permutation(SHAPE[1]).astype(np.int32)
        options["permuted_axis"] = -1
        values, grouped = np.empty_like(values), values
        values[:, parts["permutation"]] = grouped
    return QuantizedArray(narrow, scale, **parts, dtype=F32, **options), values


def check_values(actual: Any, expected: np.ndarray) -> None:
    """Check that two arrays have the same bits; a zero of either sign is the same, as products with 0 have any."""
    np.testing.assert_array_equal(np.asarray(actual), expected)
    assert actual.dtype == expected.dtype


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


@pytest.mark.parametrize("name", NAMES)
def test_products_of_codes_refuse(name: str, rng: np.random.Generator) -> None:
    """Sums of products of codes would be wrong, or are not implemented."""
    q, _ = make_array(name, rng)
    x = jq.quantize(rng.normal(size=(3, 6)).astype(F32), jq.QuantSpec("int8"))
    for call in (lambda: jq.matmul(x, q), lambda: jq.einsum("ij,jk", x, q)):
        with pytest.raises((TypeError, ValueError), match=r"jaxquant\.(matmul|einsum): (rhs|operands\[1\])"):
            call()


@pytest.mark.parametrize("name", NAMES[:-2])
def test_operations_on_codes_refuse(name: str, rng: np.random.Generator) -> None:
    q, _ = make_array(name, rng)
    calls = {"relu": jq.codes.relu, "max_pool": lambda q: jq.codes.max_pool(q, (1,)), "onnx_view": jq.onnx_view}
    for function, call in calls.items():
        if function == "relu" and name == "block sizes":
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
