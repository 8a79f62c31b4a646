"""Code books: nf4's table by its formula, the nearest entry, and what a book refuses."""

from __future__ import annotations

import functools
import itertools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..oracles import array_text, onnx_text
from ..support import equality, transforms

F32 = np.float32
TERNARY = jq.Codebook("ternary and a half", (-1.0, 0.0, 0.5, 1.0))
P: Any = functools.partial


def test_nf4_is_the_table_of_the_paper() -> None:
    """arXiv 2305.14314, section 3: quantiles of the normal distribution, eight below 0 and nine from it, over the
    largest. Its offset is the mean of 1 - 1/32 and 1 - 1/30."""
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    quantile = statistics.NormalDist().inv_cdf
    positive = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    negative = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    table = np.sort([*positive, 0.0, *negative]) / positive[0]
    assert len(table) == 16
    np.testing.assert_allclose(jq.nf4.levels, table, rtol=0, atol=3e-7)  # the paper's are float32 throughout
    assert all(float(F32(level)) == level for level in jq.nf4.levels)
    assert (jq.nf4.levels[0], jq.nf4.levels[7], jq.nf4.levels[-1]) == (-1.0, 0.0, 1.0)


def sample(rng: np.random.Generator, book: jq.Codebook, scale: np.ndarray) -> np.ndarray:
    """Entries, values half way between two and one float to either side of that, times the scale; and the rest."""
    middles = np.array([(a + b) / 2 for a, b in itertools.pairwise(book.levels)])
    picked = rng.choice(np.concatenate([middles, middles, book.levels]), scale.shape)
    x = (picked * scale).astype(F32)
    toward = np.where(rng.random(scale.shape) < 0.5, F32(-9), F32(9)) * F32(1e9)
    x = np.where(rng.random(scale.shape) < 0.6, np.nextafter(x, toward.astype(F32)), x)
    anywhere = (rng.uniform(-1, 1, scale.shape) * scale).astype(F32)
    return np.where(rng.random(scale.shape) < 0.2, anywhere, x).astype(F32)


@pytest.mark.slow
def test_ties_go_to_the_lower_entry(rng: np.random.Generator) -> None:
    """Exactly: with a scale of 4 or 1 a tie in x is a tie of the table, and its neighbours are none."""
    for book in (jq.nf4, TERNARY, jq.Codebook("all", tuple(range(-100, 156)))):
        x = sample(rng, book, np.full(500, 4.0)) if book.levels[-1] == 1 else sample(rng, book, np.full(500, 1.0))
        span = 4.0 if book.levels[-1] == 1 else 155.0
        spec = jq.QuantSpec(book)
        for q in (
            jq.quantize(x, spec, range=(-span, span)),
            jax.jit(lambda x, s=spec, e=span: jq.quantize(x, s, range=(-e, e)))(x),
        ):
            scale = F32(span) / F32(max(abs(level) for level in book.levels))
            np.testing.assert_array_equal(q.scale, [scale])
            value = onnx_text.quotient(x, np.full(x.shape, scale), np.dtype(F32))
            want = array_text.nearest_level(value, book.levels)
            assert q.codes.dtype == book.carrier
            np.testing.assert_array_equal(np.asarray(q.codes).astype(np.int64), want)
            entries = np.asarray(book.levels, F32)[want]
            np.testing.assert_array_equal(q.dequantize(), entries * scale)


@pytest.mark.slow
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float8_e8m0fnu"])
def test_blocks_of_nf4(rng: np.random.Generator, scale_dtype: str) -> None:
    x = (rng.normal(size=(6, 50)) * np.exp(rng.normal(size=(6, 1)))).astype(F32)
    x[0, :16] = 0
    x[1, 20] = np.nan
    spec = jq.QuantSpec(jq.nf4, jq.Blocked(1, 16), scale_dtype=onnx_text.dtype(scale_dtype))
    sizes = (1, 16)
    low, high = array_text.extremes(x, sizes)
    scale, _ = array_text.parameters(low, high, "nf4", True, False, scale_dtype, levels=1.0)
    wide = array_text.spread(scale, sizes, x.shape).astype(F32)
    codes = array_text.nearest_level(onnx_text.quotient(x, wide, np.dtype(F32)), jq.nf4.levels)
    values = np.asarray(jq.nf4.levels, F32)[codes] * wide
    loop = jax.jit(lambda x: jax.lax.scan(lambda c, row: (c, jq.quantize(row[None], spec)), None, x)[1])(x)
    for q in (jq.quantize(x, spec), jax.jit(lambda x: jq.quantize(x, spec))(x)):
        np.testing.assert_array_equal(np.asarray(q.codes).astype(np.int64), codes)
        assert transforms.mismatches(np.asarray(q.scale), scale) == 0
        assert transforms.mismatches(np.asarray(q.dequantize()), values) == 0
        assert transforms.mismatches(np.asarray(q[1:, 16:].dequantize()), values[1:, 16:]) == 0
        assert transforms.mismatches(np.asarray(q.T.dequantize()), values.T) == 0
    assert transforms.mismatches(np.asarray(loop.dequantize())[:, 0], values) == 0
    # The scale is the largest magnitude, so what it comes from is an entry of the table.
    if scale_dtype == "float32":
        fine = np.isfinite(wide)
        largest = np.abs(x) == wide
        np.testing.assert_array_equal(values[fine & largest], x[fine & largest])


def test_repr_and_nbytes() -> None:
    q = jq.quantize(jnp.ones((3, 5)), jq.QuantSpec(jq.nf4))
    assert repr(q) == "QuantizedArray(nf4[3,5], scale=float32[1,1], zero_point=None, dtype=float32, nbytes=12)"
    assert repr(TERNARY) == "ternary and a half"
    assert TERNARY.carrier == jnp.uint2
    assert TERNARY.largest == 1


def test_equal_books_are_one_static_value() -> None:
    other = jq.Codebook("ternary and a half", [-1, 0, np.float32(0.5), 1])  # type: ignore[arg-type]
    assert other == TERNARY
    assert hash(other) == hash(TERNARY)
    x = jnp.array([0.1, 1.0])
    first, second = (jq.quantize(x, jq.QuantSpec(book)) for book in (other, TERNARY))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert jax.tree.structure(first) != jax.tree.structure(jq.quantize(x, jq.QuantSpec("uint2", symmetric=True)))


# Levels in any order, some of them several times, with zeros of both signs.
FP4 = tuple(value / 12 for value in (0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3))


def draw_book(rng: np.random.Generator, count: int) -> jq.Codebook:
    levels = rng.integers(-40, 40, count) / rng.choice([1, 4])  # the midpoints are float32 numbers
    levels[rng.integers(count)] = -0.0
    levels[:2] = -7, 5  # two of them differ
    return jq.Codebook("any order", tuple(rng.permutation(levels)))


def first_code(values: np.ndarray, book: jq.Codebook) -> np.ndarray:
    """The nearest level, of two equally near ones the lower one, and the first code that has it; NaN: the lowest."""
    levels = np.asarray(book.levels)
    distance = np.abs(np.nan_to_num(values.astype(np.float64), nan=-1e30)[:, None] - levels)
    nearest = np.where(distance == distance.min(axis=1, keepdims=True), levels, np.inf).min(axis=1)
    return np.argmax(levels == nearest[:, None], axis=1)  # -0.0 == 0.0


@pytest.mark.parametrize("count", [4, 8, 16, 256])
def test_levels_may_be_in_any_order(rng: np.random.Generator, count: int) -> None:
    book = draw_book(rng, count)
    codes = rng.integers(0, count, (3, 40))
    scale = (rng.normal(size=(3, 1)) ** 2 + 0.1).astype(F32)
    q = jq.QuantizedArray(jnp.asarray(codes).astype(book.carrier), scale, codebook=book)
    values = np.asarray(book.levels, F32)[codes] * scale
    equality.same_bits(q.dequantize(), values)  # with the sign of -0.0
    equality.same_bits(jax.jit(lambda q: q[1:].T.dequantize())(q), values[1:].T)
    middles = np.array([(a + b) / 2 for a, b in itertools.pairwise(sorted(set(book.levels)))])
    x = np.concatenate([middles, book.levels, rng.uniform(-50, 50, 40), [0.0, -0.0, np.nan, np.inf, -np.inf]])
    x = x.astype(F32)
    x = np.concatenate([x, np.nextafter(x, F32(99)), np.nextafter(x, F32(-99))])
    with np.errstate(invalid="ignore"):
        expected = first_code(np.clip(x, -1e9, 1e9), book)
    encode = jax.jit(book.encode)
    assert encode(x).dtype == book.carrier
    exact = np.float64(x)
    is_tie = np.isin(exact, middles)
    np.testing.assert_array_equal(np.asarray(encode(x)).astype(np.int64), expected)
    assert is_tie.any()


def test_a_quantized_array_of_unordered_levels(rng: np.random.Generator) -> None:
    book = jq.Codebook("fp4", FP4)
    x = rng.normal(size=(4, 40)).astype(F32)
    q = jq.quantize(x, jq.QuantSpec(book, jq.Blocked(-1, 16)))
    largest = np.abs(np.pad(x, ((0, 0), (0, 8)))).reshape(4, 3, 16).max(axis=-1)
    np.testing.assert_array_equal(q.scale, largest)
    levels = np.sort(np.asarray(FP4, F32))
    wide = np.repeat(largest, 16, axis=1)[:, :40]
    nearest = levels[np.argmin(np.abs((x / wide)[..., None] - levels), axis=-1)]
    np.testing.assert_array_equal(q.dequantize(), nearest * wide)
    assert float(jq.quantization_error(x, q).saturated) == 0
    mse = jq.calibration.mse(jq.QuantSpec(book, jq.PerAxis(0)))
    low, high = mse.finalize(mse.update(mse.init(x), x))
    assert np.isfinite(np.asarray(low)).all()
    assert (np.asarray(high) > 0).all()


def test_the_sign_of_zero_tells_codebooks_apart() -> None:
    """A comparison of floats would not, and jit would reuse the program of the other one."""
    first, second = (jq.Codebook("zeros", (0.0, zero, 1.0, -1.0)) for zero in (-0.0, 0.0))
    assert first != second
    assert first == jq.Codebook("zeros", (0.0, -0.0, 1.0, -1.0))
    assert first != "zeros"
    codes = jnp.array([0, 1, 2, 3], jnp.uint2)
    for book in (first, second):
        q = jq.QuantizedArray(codes, jnp.ones(1), codebook=book)
        decoded = jax.jit(lambda q: q.dequantize())(q)
        np.testing.assert_array_equal(np.signbit(decoded), np.signbit(book.levels))
        loaded = jq.checkpoint.from_arrays(jq.checkpoint.to_arrays({"w": q}))["w"]
        assert loaded.codebook == book


def test_of_eight_levels_three_bits_count() -> None:
    book = jq.Codebook("eight", (3, -3, 1, -1, 2, -2, 0.5, 0))
    codes = jnp.arange(16, dtype=jnp.int32).astype(jnp.uint4)
    q = jq.QuantizedArray(codes, jnp.ones(1), codebook=book)
    np.testing.assert_array_equal(q.dequantize(), np.tile(book.levels, 2))
    assert book.carrier == jnp.uint4
    assert (book.largest, book.ascending[0], book.is_ascending) == (3, -3, False)
    assert float(jq.quantization_error(jnp.ones(16), q).used_codes) == 1


ROWS: list[tuple[str, Any, type[Exception], str, str, str]] = [
    ("name", P(jq.Codebook, 3, (0, 1, 2, 3)), TypeError, "name", "a string", "3"),
    ("levels none", P(jq.Codebook, "a", None), TypeError, "levels", "a sequence of numbers", "None"),
    ("levels text", P(jq.Codebook, "a", "0123"), TypeError, "levels", "a sequence of numbers", "'0123'"),
    ("levels of rank 0", P(jq.Codebook, "a", np.array(3.0)), TypeError, "levels", "a sequence of numbers", "an array"),
    ("larger than floats", P(jq.Codebook, "a", (0, 1, 2, 10**400)), ValueError, "levels", "a finite number", "an int"),
    ("a text", P(jq.Codebook, "a", (0, 1, 2, "3")), TypeError, "levels", "a static Python number", "'3'"),
    ("a bool", P(jq.Codebook, "a", (False, 1, 2, 3)), TypeError, "levels", "a static Python number", "False"),
    ("a nan", P(jq.Codebook, "a", (0, 1, 2, float("nan"))), ValueError, "levels", "a finite number", "nan"),
    ("too large", P(jq.Codebook, "a", (0, 1, 2, 1e39)), ValueError, "levels", "a finite number that", "1e\\+39"),
    ("three", P(jq.Codebook, "a", (0, 1, 2)), ValueError, "levels", "4, 8, 16 or 256 numbers", "3"),
    ("all equal", P(jq.Codebook, "a", (1, 1, 1, 1)), ValueError, "levels", "at least two different", "1, 1, 1, 1"),
    ("zeros", P(jq.Codebook, "a", (0.0, -0.0, 0, 0)), ValueError, "levels", "at least two different", "-0.0"),
    ("equal in float32", P(jq.Codebook, "a", (1, 1, 1 + 1e-12, 1)), ValueError, "levels", "two different", "1.0"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[row[0].replace(" ", "_") for row in ROWS])
def test_refusals(row: tuple[str, Any, type[Exception], str, str, str]) -> None:
    _, call, error, argument, expected, actual = row
    with pytest.raises(error, match=rf"jaxquant\.Codebook: {argument}: expected .*{expected}.*, got .*{actual}"):
        call()
