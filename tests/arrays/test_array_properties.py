"""What holds of every array: half a step at most, the same codes twice, and shapes that commute with values."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxquant as jq

from ..oracles import array_text, onnx_text
from ..support import inputs, transforms

F32 = np.float32
shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
seeds = st.integers(0, 2**32)


@st.composite
def granularities(draw: Any, rank: int) -> jq.PerTensor | jq.PerAxis | jq.Blocked:
    axes = tuple(draw(st.lists(st.integers(0, rank - 1), min_size=1, max_size=rank, unique=True)))
    return draw(st.sampled_from([jq.PerTensor(), jq.PerAxis(axes), jq.Blocked(axes, draw(st.integers(1, 4)))]))


@st.composite
def specs(draw: Any, rank: int) -> jq.QuantSpec:
    name = draw(st.sampled_from(list(onnx_text.BOUNDS)))
    symmetric = draw(st.booleans())
    return jq.QuantSpec(
        onnx_text.dtype(name), draw(granularities(rank)), symmetric=symmetric, narrow_range=draw(st.booleans()),
        scale_dtype=onnx_text.dtype(draw(st.sampled_from(["float32", "float32", "float16", "float8_e8m0fnu"]))),
    )  # fmt: skip


def values(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(seed)
    size = np.exp(rng.uniform(-6, 6, (*shape[:-1], 1)))
    return ((rng.normal(size=shape) + rng.normal()) * size * (rng.random(shape) > 0.1)).astype(F32)


def wide(part: Any, q: jq.QuantizedArray) -> np.ndarray:
    return array_text.aligned(np.asarray(part), q.shape, q.block_size)


def representable(q: jq.QuantizedArray, spec: jq.QuantSpec) -> tuple[np.ndarray, ...]:
    """(scale, least, most) of each element, exact in float64."""
    scale = wide(q.scale, q).astype(np.float64)
    point = 0 if q.zero_point is None else wide(q.zero_point, q).astype(np.int64)
    return scale, (spec.bounds[0] - point) * scale, (spec.bounds[1] - point) * scale


def tolerance(q: jq.QuantizedArray, steps: float) -> float:
    """What the error may be over half a step: the quotient rounds once in float32, and so does the product."""
    return steps * 2.0**-23


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data(), shapes, seeds)
def test_half_a_step_at_most(data: st.DataObject, shape: tuple[int, ...], seed: int) -> None:
    """In float64: |dequantize(quantize(x)) - x| <= scale / 2 where the codes reach; beyond, the nearest end is taken.

    The range of x itself is reached but for the half step by which an asymmetric zero point is rounded.
    """
    spec = data.draw(specs(len(shape)))
    x = values(seed, shape)
    q = jq.quantize(x, spec)
    scale, least, most = representable(q, spec)
    steps = spec.bounds[1] - spec.bounds[0]
    error = np.abs(np.asarray(q.dequantize()).astype(np.float64) - np.clip(x, least, most))
    assert (error <= scale * (0.5 + tolerance(q, steps))).all()
    beyond = np.maximum(np.maximum(least - x, x - most), 0)
    slack = tolerance(q, steps) if spec.symmetric else 0.5 + tolerance(q, steps)
    assert (beyond <= scale * slack).all()


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.data(), shapes, seeds)
def test_quantizing_again_gives_the_same(data: st.DataObject, shape: tuple[int, ...], seed: int) -> None:
    """With the same range: every code comes back, whatever was rounded."""
    spec = data.draw(specs(len(shape)))
    x = values(seed, shape)
    low, high = F32(-1.5), F32(2.75)
    q = jq.quantize(x, spec, range=(low, high))
    requantized = jq.quantize(q.dequantize(), spec, range=(low, high))
    for actual, expected in zip(jax.tree.leaves(requantized), jax.tree.leaves(q), strict=True):
        assert transforms.mismatches(np.asarray(actual), np.asarray(expected)) == 0
    assert jax.tree.structure(requantized) == jax.tree.structure(q)


@st.composite
def arrays(draw: Any) -> tuple[jq.QuantizedArray, np.ndarray]:
    """Any shapes of scale and zero point that fit, and what the array stands for by the text."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    size = draw(st.sampled_from([None, 2, 3, 4]))
    parts = []
    for _ in range(2):
        dims = []
        for n in shape:
            blocks = [d for d in range(1, n) if n % d == 0] if size is None else [-(-n // size)]
            dims.append(draw(st.sampled_from([1, n, *blocks])))
        parts.append(tuple(dims))
    rng = np.random.default_rng(draw(seeds))
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    scale = inputs.scales(rng, parts[0], np.dtype(F32))
    point = inputs.zero_points(rng, parts[1], "uint8") if draw(st.booleans()) else None
    q = jq.QuantizedArray(codes, scale, point, block_size=size)
    steps = None if point is None else wide(point, q)
    return q, array_text.values(codes, wide(scale, q), steps, F32)


def find_values(q: jq.QuantizedArray) -> np.ndarray:
    """What an array stands for, in numpy: to compile each shape would tell no more."""
    point = None if q.zero_point is None else wide(q.zero_point, q)
    return array_text.values(np.asarray(q.codes), wide(q.scale, q), point, F32)


@st.composite
def indices(draw: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Ints, slices with steps, new dimensions, arrays, masks, and an ellipsis somewhere."""
    items: list[Any] = []
    arrays = draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))  # one shape for all, so that they broadcast
    rng = np.random.default_rng(draw(seeds))
    masked = False
    for n in shape[: draw(st.integers(0, len(shape)))]:
        kind = draw(st.sampled_from(["int", "slice", "slice", "array", "mask", "new"]))
        if kind == "new":
            items.append(None)
        if kind == "int":
            items.append(draw(st.integers(-n, n - 1)))
        elif kind == "array":
            items.append(rng.integers(-n, n, arrays))
        elif kind == "mask" and not masked and not any(isinstance(i, np.ndarray) for i in items):
            masked, arrays = True, ()
            items.append(rng.random(n) < 0.5)
        else:
            ends = st.none() | st.integers(-n - 1, n + 1)
            items.append(slice(draw(ends), draw(ends), draw(st.sampled_from([None, 1, 2, -1, -2]))))
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), Ellipsis)
        count_after = len(items) - next(n for n, i in enumerate(items) if i is Ellipsis) - 1
        index_count = sum(i is not None for i in items[len(items) - count_after :])
        if index_count and len(shape) > len([i for i in items if i is not None]) - 1:
            items = [i for i in items if i is not Ellipsis]  # what follows the dots was drawn for other dimensions
    return tuple(items)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data(), arrays())
def test_any_index_is_numpy_s(data: st.DataObject, pair: tuple[jq.QuantizedArray, np.ndarray]) -> None:
    q, expected = pair
    index = data.draw(indices(q.shape))
    try:
        picked = expected[index]
    except IndexError:  # several arrays that do not broadcast
        return
    actual = q[index]
    assert actual.shape == picked.shape
    assert transforms.mismatches(find_values(actual), picked) == 0
    if actual.size:
        assert transforms.mismatches(find_values(actual[..., None]), picked[..., None]) == 0


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.data(), arrays())
def test_shapes_commute_with_values(data: st.DataObject, pair: tuple[jq.QuantizedArray, np.ndarray]) -> None:
    q, expected = pair
    order = tuple(data.draw(st.permutations(range(q.ndim))))
    turned = q.transpose(order)
    assert transforms.mismatches(find_values(turned), expected.transpose(order)) == 0
    divisors = [d for d in range(1, q.size + 1) if q.size % d == 0]
    first = data.draw(st.sampled_from(divisors))
    second = data.draw(st.sampled_from([d for d in divisors if q.size // first % d == 0]))
    new = (first, second, q.size // first // second)
    for array, plain in ((q, expected), (turned, expected.transpose(order))):
        try:
            actual = array.reshape(new)
        except ValueError as error:
            assert "elements that share an entry stay adjacent" in str(error)  # noqa: PT017
            continue
        assert transforms.mismatches(find_values(actual), plain.reshape(new)) == 0
        assert transforms.mismatches(find_values(actual.reshape(array.shape)), plain) == 0  # and back again


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(arrays())
def test_values_by_the_library(pair: tuple[jq.QuantizedArray, np.ndarray]) -> None:
    q, want = pair
    assert transforms.mismatches(np.asarray(q.dequantize()), want) == 0
    assert transforms.mismatches(np.asarray(q[..., ::-1].T.dequantize()), want[..., ::-1].T) == 0


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.data(), st.lists(st.integers(1, 5), min_size=2, max_size=3).map(tuple), seeds)
def test_vmap_is_a_loop(data: st.DataObject, shape: tuple[int, ...], seed: int) -> None:
    """Over any axis, in and out."""
    axis, out_axis = (data.draw(st.integers(0, len(shape) - 1)) for _ in range(2))
    spec = data.draw(specs(len(shape) - 1))
    x = values(seed, shape)
    actual = jax.vmap(lambda x: jq.quantize(x, spec), in_axes=axis, out_axes=out_axis)(x)
    loop = [jq.quantize(np.take(x, b, axis), spec) for b in range(shape[axis])]
    expected = np.stack([np.asarray(element.dequantize()) for element in loop], out_axis)
    assert math.prod(actual.shape) == x.size
    assert transforms.mismatches(find_values(actual), expected) == 0
