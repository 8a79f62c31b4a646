"""Joined arrays hold the same codes, and dequantize to what jax.numpy.concatenate returns, bit for bit."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxquant as jq
from jaxquant import Blocked, PerAxis, PerTensor, QuantSpec

from ..oracles import array_text, onnx_text
from ..support import inputs, transforms

F32 = np.float32


def make(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    scale: tuple[int, ...],
    point: tuple[int, ...] | None,
    size: int | None,
) -> jq.QuantizedArray:
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    points = None if point is None else inputs.zero_points(rng, point, "int8")
    return jq.QuantizedArray(codes, inputs.scales(rng, scale, np.dtype(F32)), points, block_size=size)


def spread(q: jq.QuantizedArray) -> np.ndarray:
    """The values, in numpy: what so many shapes would take to compile tells no more."""
    codes = np.asarray(q.codes)
    parts = [None if p is None else np.asarray(p) for p in (q.scale, q.zero_point)]
    wide = [None if p is None else array_text.aligned(p, codes.shape, q.block_size) for p in parts]
    assert wide[0] is not None
    return array_text.values(codes, wide[0], wide[1], F32)


def check(actual: jq.QuantizedArray, arrays: list[jq.QuantizedArray], axis: int) -> None:
    codes = np.concatenate([np.asarray(q.codes) for q in arrays], axis)
    assert actual.codes.dtype == codes.dtype
    np.testing.assert_array_equal(np.asarray(actual.codes), codes)
    assert transforms.mismatches(spread(actual), np.concatenate([spread(q) for q in arrays], axis)) == 0
    assert (actual.dtype, actual.codebook) == (arrays[0].dtype, arrays[0].codebook)


@st.composite
def layouts(draw: Any, shape: tuple[int, ...], size: int | None) -> tuple[int, ...]:
    """The shape of a scale or a zero point for an array of a given shape."""
    counts = []
    for n in shape:
        blocks = [d for d in range(1, n) if n % d == 0] if size is None else [-(-n // size)]
        counts.append(draw(st.sampled_from(sorted({1, n, *blocks}))))
    return tuple(counts)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 2**32))
def test_every_layout(data: st.DataObject, seed: int) -> None:
    """One to four arrays, along every axis, in any mixture of shared entries, entries per index, and blocks."""
    rng = np.random.default_rng(seed)
    rank = data.draw(st.integers(1, 3))
    axis = data.draw(st.integers(-rank, rank - 1))
    rest = data.draw(st.lists(st.integers(1, 7), min_size=rank, max_size=rank))
    arrays = []
    for _ in range(data.draw(st.integers(1, 4))):
        shape = list(rest)
        shape[axis] = data.draw(st.integers(0, 9))
        size = data.draw(st.sampled_from([None, 2, 3, 4]))
        scale = data.draw(layouts(tuple(shape), size))
        point = data.draw(st.none() | layouts(tuple(shape), size))
        arrays.append(make(rng, tuple(shape), scale, point, size))
    actual = jq.concatenate(arrays, axis)
    check(actual, arrays, axis)
    if math.prod(actual.shape) and max(actual.shape) < 6:
        expected = np.concatenate([np.asarray(q.dequantize()) for q in arrays], axis)
        assert transforms.mismatches(np.asarray(actual.dequantize()), expected) == 0


# The layouts (shape, scale, zero point, block size) of the arrays, the axis, and the layout of the result.
Layout = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, int | None]
RESULTS: dict[str, tuple[list[Layout], int, tuple[Any, Any, int | None]]] = {
    "per tensor": ([((4, 6), (1, 1), None, None), ((4, 6), (1, 1), None, None)], 0, ((2, 1), None, 4)),
    "shorter last": ([((4, 6), (1, 1), None, None), ((3, 6), (1, 1), None, None)], 0, ((2, 1), None, 4)),
    "shorter first": ([((3, 6), (1, 1), None, None), ((4, 6), (1, 1), None, None)], 0, ((3, 1), None, 3)),
    "common divisor": ([((4, 6), (1, 1), None, None), ((6, 6), (1, 1), None, None), ((1, 6), (1, 1), None, None)], 0,
                       ((6, 1), None, 2)),
    "per index": ([((4, 6), (1, 6), None, None), ((4, 3), (1, 3), None, None)], 1, ((1, 9), None, None)),
    "per other axis": ([((4, 6), (4, 1), None, None), ((4, 3), (4, 1), None, None)], 1, ((4, 2), None, 6)),
    "along the kept": ([((4, 6), (4, 1), None, None), ((2, 6), (2, 1), None, None)], 0, ((6, 1), None, None)),
    "blocks": ([((4, 6), (4, 2), (4, 2), 3), ((4, 9), (4, 3), (4, 3), 3)], 1, ((4, 5), (4, 5), 3)),
    "blocks, last short": ([((4, 6), (4, 2), None, 3), ((4, 4), (4, 2), None, 3)], 1, ((4, 4), None, 3)),
    "blocks, first short": ([((4, 4), (4, 2), None, 3), ((4, 6), (4, 2), None, 3)], 1, ((4, 10), None, None)),
    "one has blocks": ([((4, 6), (1, 3), None, 2), ((4, 6), (4, 1), None, None)], 0, ((8, 3), None, 2)),
    "two block sizes": ([((4, 8), (4, 2), None, 4), ((4, 8), (4, 1), (1, 1), None)], 1, ((4, 4), (1, 2), None)),
    "two, one short": ([((4, 8), (4, 2), None, 4), ((4, 6), (4, 1), (1, 1), None)], 1, ((4, 4), (1, 4), 4)),
    "a point in one": ([((4, 6), (1, 1), None, None), ((4, 6), (1, 1), (1, 1), None)], 0, ((2, 1), (2, 1), 4)),
    "points per index": ([((2, 6), (1, 1), (2, 1), None), ((3, 6), (1, 1), None, None)], 0, ((3, 1), (5, 1), 2)),
    "one array": ([((4, 6), (1, 1), None, None)], 0, ((1, 1), None, None)),
    "an empty one": ([((0, 6), (1, 6), None, None), ((4, 6), (1, 1), None, None)], 0, ((1, 1), None, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_the_result_has_as_few_entries_as_blocks_allow(rng: np.random.Generator, name: str) -> None:
    layouts, axis, expected = RESULTS[name]
    arrays = [make(rng, *layout) for layout in layouts]
    actual = jq.concatenate(arrays, axis)
    check(actual, arrays, axis)
    shapes = tuple(None if part is None else part.shape for part in (actual.scale, actual.zero_point))
    assert (*shapes, actual.block_size) == expected
    repeated = jq.concatenate(tuple(arrays), axis - 2)
    assert jax.tree.structure(repeated) == jax.tree.structure(actual)


SPECS = {
    "int8": QuantSpec("int8"),
    "uint4": QuantSpec(jnp.uint4, Blocked(1, 4), scale_dtype=jnp.bfloat16),
    "int2": QuantSpec(jnp.int2, Blocked(1, 3), scale_dtype=jnp.float8_e8m0fnu),
    "uint2": QuantSpec(jnp.uint2, PerAxis(1), symmetric=False),
    "int16": QuantSpec("int16", PerAxis(1), scale_dtype=jnp.float16),
    "uint8": QuantSpec("uint8", PerAxis((0, 1)), zero_point_granularity=PerTensor()),
    "float8": QuantSpec(jnp.float8_e4m3fn, PerAxis(0)),
    "float4": QuantSpec(jnp.float4_e2m1fn, Blocked(1, 4), scale_dtype=jnp.float8_e8m0fnu),
    "nf4": QuantSpec(jq.nf4, Blocked(0, 2)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SPECS)
def test_every_dtype_of_codes(rng: np.random.Generator, name: str) -> None:
    """Quantized arrays of three lengths, numpy's leaves, eagerly and under jit."""
    arrays = [jq.quantize(rng.normal(size=(n, 7)).astype(F32) * n, SPECS[name]).astype("float16") for n in (4, 2, 5)]
    host = [jax.tree.map(np.asarray, q) for q in arrays]

    def concatenate(arrays: list[jq.QuantizedArray]) -> Any:
        return jq.concatenate(arrays), jnp.concatenate([q.dequantize() for q in arrays])

    expected = np.concatenate([np.asarray(q.dequantize()) for q in arrays])
    for joined, values in (jax.jit(concatenate)(arrays), (jq.concatenate(host), expected)):
        assert joined.codebook == SPECS[name].codebook
        np.testing.assert_array_equal(np.asarray(joined.codes), np.concatenate([np.asarray(q.codes) for q in arrays]))
        actual = np.asarray(joined.dequantize())
        assert actual.dtype == np.float16
        assert transforms.mismatches(actual, np.asarray(values)) == 0
        assert transforms.mismatches(actual, expected) == 0


@pytest.mark.slow
def test_under_vmap_and_grad(rng: np.random.Generator) -> None:
    spec = QuantSpec("uint8", PerAxis(0))
    stacks = [jax.vmap(lambda x: jq.quantize(x, spec))(rng.normal(size=(3, n, 4)).astype(F32)) for n in (2, 5)]
    joined = jax.vmap(lambda a, b: jq.concatenate([a, b]))(*stacks)
    want = np.concatenate([np.asarray(q.dequantize()) for q in stacks], 1)
    assert transforms.mismatches(np.asarray(joined.dequantize()), want) == 0
    first, second = (jax.tree.map(lambda part: part[0], q) for q in stacks)
    shared = first.replace(scale=first.scale[:1], zero_point=first.zero_point[:1])
    pull = jax.grad(lambda scale: jq.concatenate([shared.replace(scale=scale), second], 0).dequantize().sum())
    steps = np.asarray(shared.codes, np.float64) - np.asarray(shared.zero_point, np.float64)
    np.testing.assert_allclose(pull(shared.scale), steps.sum().reshape(1, 1), rtol=1e-6)


def test_stacking_leaf_by_leaf_is_right(rng: np.random.Generator) -> None:
    """What the docstring says of jnp.stack, and of jnp.concatenate."""
    arrays = [make(rng, (4, 6), (1, 2), (4, 1), 3) for _ in range(3)]
    for axis in (0, 1, 2):
        actual = jax.tree.map(lambda *parts, axis=axis: jnp.stack(parts, axis), *arrays)
        assert transforms.mismatches(spread(actual), np.stack([spread(q) for q in arrays], axis)) == 0
    arrays = [make(rng, (n, 6), (1, 1), None, None) for n in (3, 1)]
    wrong = jax.tree.map(lambda *parts: jnp.concatenate(parts), *arrays)
    assert transforms.mismatches(spread(wrong), np.concatenate([spread(q) for q in arrays]))
    check(jq.concatenate(arrays), arrays, 0)


Q = jq.QuantizedArray(np.ones((4, 6), np.int8), np.ones((4, 1), F32))
N = jq.QuantizedArray(np.ones((4, 6), onnx_text.dtype("uint4")), np.ones((4, 1), F32), codebook=jq.nf4)
join: Any = jq.concatenate  # what it refuses is what its types refuse
REFUSALS: list[tuple[Any, type[Exception], str]] = [
    (functools.partial(join, []), ValueError, "arrays: expected one or more arrays, got none"),
    (functools.partial(join, Q), TypeError, "arrays: expected a list or tuple of QuantizedArrays, got QuantizedArray"),
    (functools.partial(join, None), TypeError, "arrays: expected a list or tuple of QuantizedArrays, got NoneType"),
    (
        functools.partial(join, [Q, np.ones((4, 6))]),
        TypeError,
        r"arrays\[1\]: expected a QuantizedArray, got an array of",
    ),
    (functools.partial(join, [Q, Q], 2), ValueError, r"axis: expected an integer in \[-2, 1\].*, got 2"),
    (functools.partial(join, [Q, Q], None), TypeError, "axis: expected an int, got None"),
    (functools.partial(join, [Q, Q], True), TypeError, "axis: expected an int, got True"),
    (
        functools.partial(join, [Q[0, 0], Q[0, 0]]),
        ValueError,
        "axis: expected an array of rank 1 or more.*, got rank 0",
    ),
    (
        functools.partial(join, [Q, Q, Q[:, 1:]]),
        ValueError,
        r"arrays\[2\]: expected the shape of arrays\[0\], \(4, 6\), except along axis 0, got shape \(4, 5\)",
    ),
    (functools.partial(join, [Q, Q[0]]), ValueError, r"arrays\[1\]: expected the shape of .*, got shape \(6,\)"),
    (
        functools.partial(join, [Q, Q.replace(codes=np.ones((4, 6), np.uint8))]),
        TypeError,
        r"arrays\[1\]\.codes: expected int8, as in arrays\[0\], got uint8",
    ),
    (
        functools.partial(join, [Q, Q.replace(scale=np.ones((4, 1), np.float16))]),
        TypeError,
        r"arrays\[1\]\.scale: expected float32, as in arrays\[0\], got float16",
    ),
    (
        functools.partial(join, [Q, Q.astype("bfloat16")]),
        TypeError,
        r"arrays\[1\]\.dtype: expected float32, as in arrays\[0\], got bfloat16",
    ),
    (
        functools.partial(join, [N, N.replace(codebook=None)]),
        TypeError,
        r"arrays\[1\]\.codebook: expected nf4, as in arrays\[0\], got None",
    ),
    (
        functools.partial(join, [Q, Q.replace(scale=np.ones((3, 1), F32))]),
        ValueError,
        r"arrays\[1\]\.scale: expected the rank of the codes",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSALS)
def test_refusals(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"jaxquant.concatenate: {text}") as raised:
        call()
    assert isinstance(raised.value, AssertionError)
