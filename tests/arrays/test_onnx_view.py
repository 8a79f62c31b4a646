"""A QuantizedArray as ONNX's DequantizeLinear has it: ONNX Runtime reads it, and it comes back."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxquant as jq

from ..oracles import array_text, onnx_runtime, onnx_text
from ..support import inputs, transforms

F32 = np.float32
P: Any = functools.partial


def check_equal(actual: Any, expected: Any) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert transforms.mismatches(actual, expected) == 0, (actual, expected)


def make_array(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], scale: tuple[int, ...], point: tuple[int, ...] | None,
    block_size: int | None, out: str = "float32",
) -> tuple[jq.QuantizedArray, np.ndarray]:  # fmt: skip
    """An array with parts of the given shapes, and what it stands for by the text."""
    low, high = onnx_text.BOUNDS[name]
    codes = rng.integers(low, high + 1, shape).astype(onnx_text.dtype(name))
    scales = inputs.scales(rng, scale, np.dtype(F32))
    points = None if point is None else inputs.zero_points(rng, point, name)
    q = jq.QuantizedArray(codes, scales, points, dtype=onnx_text.dtype(out), block_size=block_size)
    wide = [None if p is None else array_text.aligned(p, shape, block_size) for p in (scales, points)]
    assert wide[0] is not None
    return q, array_text.values(codes, wide[0], wide[1], onnx_text.dtype(out))


# shape, scale, zero point, block_size -> ONNX's scale shape, axis, block_size
Row = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, int | None, tuple[int, ...], int, int]
VIEWS: dict[str, Row] = {
    "per tensor": ((4, 6), (1, 1), None, None, (), 1, 0),
    "per tensor, zero point": ((4, 6), (1, 1), (1, 1), None, (), 1, 0),
    "rank 0": ((), (), (), None, (), 1, 0),
    "rank 1": ((6,), (6,), None, None, (6,), 0, 0),
    "per axis 0": ((4, 6), (4, 1), (4, 1), None, (4,), 0, 0),
    "per axis 2 of 3": ((4, 6, 5), (1, 1, 5), (1, 1, 5), None, (5,), 2, 0),
    "scale per tensor, zero point per axis": ((4, 6), (1, 1), (4, 1), None, (4,), 0, 0),
    "zero point per tensor, scale per axis": ((4, 6), (1, 6), (1, 1), None, (6,), 1, 0),
    "blocked": ((4, 6), (4, 3), (4, 3), 2, (4, 3), 1, 2),
    "blocked, short": ((4, 7), (4, 3), None, 3, (4, 3), 1, 3),
    "blocked, shared elsewhere": ((4, 6), (1, 3), None, 2, (4, 3), 1, 2),
    "blocked along the first": ((4, 6, 2), (2, 6, 2), (2, 6, 2), 2, (2, 6, 2), 0, 2),
    "blocks of two sizes": ((2, 12), (2, 3), (2, 6), None, (2, 6), 1, 2),
    "blocks that do not nest": ((2, 12), (2, 3), (2, 4), None, (2, 12), 0, 1),
    "blocks and a shared zero point": ((4, 6), (4, 3), (1, 1), 2, (4, 3), 1, 2),
    "two axes of three": ((4, 5, 6), (4, 1, 6), (4, 1, 6), None, (4, 1, 6), 1, 5),
    "two axes of two": ((4, 6), (4, 6), None, None, (4, 6), 0, 1),
    "blocked both": ((4, 6), (2, 3), (2, 3), 2, (2, 6), 0, 2),
    "blocked both, short": ((5, 7), (2, 2), None, 4, (2, 7), 0, 4),
    "one row": ((1, 6), (1, 6), (1, 6), None, (6,), 1, 0),
    "empty": ((0, 6), (1, 1), (1, 1), None, (), 1, 0),
    "empty per axis": ((0, 6), (0, 1), None, None, (0,), 0, 0),
    "empty, the other axis": ((0, 6), (1, 6), None, None, (6,), 1, 0),
    "empty blocked": ((0, 6), (0, 3), (1, 3), 2, (0, 3), 1, 2),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(VIEWS))
def test_onnx_runtime_reads_the_view(rng: np.random.Generator, name: str) -> None:
    shape, scale, point, size, *expected = VIEWS[name]
    for dtype in ("int8", "uint4"):
        q, want = make_array(rng, dtype, shape, scale, point, size)
        check_equal(q.dequantize(), want)
        view = jq.onnx_view(q)
        assert [view.x_scale.shape, view.axis, view.block_size] == expected
        assert (view.x_zero_point is None) == (point is None)
        assert view.output_dtype == jnp.float32
        check_equal(jq.dequantize_linear(**view._asdict()), want)
        feeds = {"x": np.asarray(view.x), "s": np.asarray(view.x_scale)}
        feeds["z"] = np.zeros(feeds["s"].shape, feeds["x"].dtype) if point is None else np.asarray(view.x_zero_point)
        attributes: dict[str, Any] = {"axis": view.axis, "block_size": view.block_size}
        (values,) = onnx_runtime.run("DequantizeLinear", feeds, {"y": F32}, 21, **attributes)
        check_equal(values, want)
        restored = jq.from_onnx(**view._asdict())
        assert restored.scale.ndim == len(shape)
        check_equal(restored.dequantize(), want)
        second_view = jq.onnx_view(restored)
        for leaf, w in zip(second_view, view, strict=True):
            if isinstance(w, jax.Array):
                check_equal(leaf, w)
            else:
                assert leaf == w


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shapes(data: st.DataObject) -> None:
    """The scale and the zero point each share, keep or block each dimension as they like."""
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    size = data.draw(st.sampled_from([None, 1, 2, 3, 4]))

    def part(n: int) -> int:
        blocks = [d for d in range(1, n) if n % d == 0] if size is None else [-(-n // size)]
        return data.draw(st.sampled_from([1, n, *blocks]))

    scale = tuple(part(n) for n in shape)
    point = tuple(part(n) for n in shape) if data.draw(st.booleans()) else None
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    out = data.draw(st.sampled_from(["float32", "bfloat16"]))
    q, want = make_array(rng, data.draw(st.sampled_from(["int8", "uint4"])), shape, scale, point, size, out)
    check_equal(q.dequantize(), want)
    view = jq.onnx_view(q)
    check_equal(jq.dequantize_linear(**view._asdict()), want)
    check_equal(jq.from_onnx(**view._asdict()).dequantize(), want)


@pytest.mark.slow
def test_floats_and_powers_of_two(rng: np.random.Generator) -> None:
    x = rng.normal(size=(4, 6)).astype(F32)
    for name in ("float8_e4m3fn", "float4_e2m1fn", "float8_e5m2fnuz"):
        spec = jq.QuantSpec(onnx_text.dtype(name), jq.Blocked(1, 4), scale_dtype=jnp.float8_e8m0fnu)
        q = jq.quantize(x, spec).astype(jnp.bfloat16)
        view = jq.onnx_view(q)
        assert view.x_scale.dtype == jnp.float8_e8m0fnu
        check_equal(jq.dequantize_linear(**view._asdict()), q.dequantize())
        assert jq.from_onnx(*view[:3], axis=1, block_size=4).dtype == jnp.float32
        zero = jnp.zeros(view.x_scale.shape, view.x.dtype)  # the only zero point that it may have
        check_equal(
            jq.from_onnx(view.x, view.x_scale, zero, axis=1, block_size=4, output_dtype=q.dtype).dequantize(),
            q.dequantize(),
        )


def test_under_transformations(rng: np.random.Generator) -> None:
    q, want = make_array(rng, "int8", (3, 4, 6), (3, 1, 3), (3, 4, 1), 2)
    check_equal(jax.jit(lambda q: jq.dequantize_linear(**jq.onnx_view(q)._asdict()))(q), want)
    mapped = jax.vmap(lambda q: jq.from_onnx(**jq.onnx_view(q)._asdict()).dequantize())(q)
    check_equal(mapped, want)


def test_numbers_and_numpy() -> None:
    codes = np.array([[1, 2, 3]], np.int8)
    for scale in (0.5, np.float32(0.5), np.array([0.5], F32), jnp.float32(0.5)):
        q = jq.from_onnx(codes, scale)
        assert q.scale.shape == (1, 1)
        check_equal(q.dequantize(), codes * F32(0.5))
    assert jq.from_onnx(codes, jnp.float16(0.5)).dtype == jnp.float16
    assert jq.from_onnx(codes, jnp.float16(0.5), output_dtype="float32").dtype == jnp.float32
    assert jq.from_onnx(codes, 0.5, jnp.zeros((1,), jnp.int8), axis=7).zero_point.shape == (1, 1)


I8, S6, Z6 = np.ones((4, 6), np.int8), np.full(6, 0.5, F32), np.zeros(6, np.int8)
Q8 = jq.QuantizedArray(jnp.asarray(I8), jnp.ones((4, 1)))
F8 = np.ones((4, 6), ml_dtypes.float8_e5m2)
B = jq.from_onnx
ROWS: list[tuple[str, Any, type[Exception], str, str, str, str]] = [
    ("float", P(jq.onnx_view, I8), TypeError, "onnx_view", "q", "a QuantizedArray", "int8"),
    ("codebook", P(jq.onnx_view, jq.quantize(jnp.ones(3), jq.QuantSpec(jq.nf4))), ValueError, "onnx_view", "q",
     "an array without a codebook", "nf4"),
    ("bad parts", P(jq.onnx_view, Q8.replace(scale=jnp.ones((4, 4)))), ValueError, "onnx_view",
     "q.scale", "the rank", "4, 4"),
    ("x float32", P(B, np.ones((4, 6), F32), 0.5), TypeError, "from_onnx", "x", "dtype int2", "float32"),
    ("x int32", P(B, I8.astype(np.int32), 0.5), TypeError, "from_onnx", "x", "dtype int2", "int32"),
    ("x list", P(B, [1, 2], 0.5), TypeError, "from_onnx", "x", "an array", "list"),
    ("scale int", P(B, I8, np.int32(1)), TypeError, "from_onnx", "x_scale", "dtype float32", "int32"),
    ("scale bool", P(B, I8, True), TypeError, "from_onnx", "x_scale", "an array", "bool"),
    ("scale zero", P(B, I8, 0.0), ValueError, "from_onnx", "x_scale", "positive numbers", "0.0"),
    ("scale negative", P(B, I8, -S6), ValueError, "from_onnx", "x_scale", "positive numbers", "-0.5"),
    ("scale shape", P(B, I8, S6[:4]), ValueError, "from_onnx", "x_scale", r"shape \(6,\)", r"\(4,\)"),
    ("scale rank 2", P(B, I8, np.ones((4, 6), F32)), ValueError, "from_onnx",
     "x_scale", "a scalar, a 1-D array", "block_size=0"),
    ("blocks", P(B, I8, np.ones((4, 2), F32), block_size=2), ValueError, "from_onnx", "x_scale",
     r"\(4, 3\)", r"\(4, 2\)"),
    ("block size", P(B, I8, S6, block_size=-1), ValueError, "from_onnx", "block_size", "0 or a positive integer", "-1"),
    ("block float", P(B, I8, S6, block_size=2.0), TypeError, "from_onnx", "block_size", "an int", "2.0"),
    ("axis", P(B, I8, S6, axis=2), ValueError, "from_onnx", "axis", r"an integer in \[-2, 1\]", "2"),
    ("axis float", P(B, I8, S6, axis=1.0), TypeError, "from_onnx", "axis", "an int", "1.0"),
    ("point dtype", P(B, I8, S6, Z6.astype(np.uint8)), TypeError, "from_onnx", "x_zero_point", "dtype int8", "uint8"),
    ("point shape", P(B, I8, S6, Z6[:4]), ValueError, "from_onnx", "x_zero_point", r"shape \(6,\)", r"\(4,\)"),
    ("point number", P(B, I8, S6, 3), TypeError, "from_onnx", "x_zero_point", "an array", "int"),
    ("float point", P(B, F8, 0.5, ml_dtypes.float8_e5m2(2)), ValueError, "from_onnx", "x_zero_point",
     "0, the only zero point of float8_e5m2", "2.0"),
    ("output", P(B, I8, 0.5, output_dtype="int8"), TypeError, "from_onnx", "output_dtype", "dtype float32", "int8"),
    ("output text", P(B, I8, 0.5, output_dtype="x"), TypeError, "from_onnx", "output_dtype", "dtype float32", "'x'"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[row[0].replace(" ", "_") for row in ROWS])
def test_refusals(row: tuple[str, Any, type[Exception], str, str, str, str]) -> None:
    _, call, error, function, argument, expected, actual = row
    with pytest.raises(error, match=rf"jaxquant\.{function}: {argument}: expected .*{expected}.*, got .*{actual}"):
        call()
