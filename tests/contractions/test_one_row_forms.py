"""Weight-only contractions of one row with arrays that have an offset, a nested or signed scale, or packed codes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import Blocked, PerAxis, PerTensor, QuantizedArray, QuantSpec
from jaxquant._contractions import dot_weight_only
from jaxquant._kernels import float_rows, word_rows

from ..support.hlo import Program, buffers_of
from ..support.matrix import mark_others_full

on_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not float_rows.IS_VECTORIZED, reason="the forms are a CPU's, with jax 0.12"
)
DEPTH, COLUMNS = 512, 384
CODES = {
    "int8": QuantSpec("int8", Blocked(0, 32)),
    "int4": QuantSpec("int4", Blocked(0, 32)),
    "uint4": QuantSpec("uint4", Blocked(0, 32), symmetric=False),
    "nf4": QuantSpec(jq.nf4, Blocked(0, 64)),
    "int4, one scale a column": QuantSpec("int4", PerAxis(1)),
    "int3": QuantSpec("int3", Blocked(0, 16)),
    "uint5": QuantSpec("uint5", Blocked(0, 32), symmetric=False),
    "int6": QuantSpec("int6", Blocked(0, 16)),
}
FORMS = ("signed", "offset", "nested", "nested offset", "words")
CASES = {(codes, form): None for codes in CODES for form in FORMS if (codes, form) != ("int8", "words")}
BY_DEFAULT = [
    ("int4", "signed"), ("int8", "nested"), ("uint4", "offset"), ("nf4", "nested offset"), ("int4", "words"),
    ("nf4", "words"), ("uint5", "words"), ("int6", "offset"), ("int3", "signed"),
]  # fmt: skip


def make_array(codes: str, form: str, stored_last: int | None, rng: np.random.Generator) -> QuantizedArray:
    """An array with a form. Codes of 3, 5 and 6 bits are packed in any case."""
    w = rng.normal(size=(DEPTH, COLUMNS)).astype(np.float32)
    q = jq.quantize(w, CODES[codes], stored_last=stored_last)
    if form == "words":
        return q.pack()
    if form == "signed":
        signs = rng.choice(np.asarray([-1, 0, 1], np.float32), q.scale.shape)
        return q.replace(scale=q.scale * signs, signed_scale=True)
    if form.startswith("nested"):
        q = q.replace(scale=jq.quantize(q.scale, QuantSpec("uint8", PerTensor())))
    if "offset" not in form:
        return q
    offset = jnp.asarray(rng.normal(size=q.scale.shape), jnp.float32)
    nested = jq.quantize(offset, QuantSpec("int8", PerTensor()))
    return q.replace(zero_point=None, offset=nested if form.startswith("nested") else offset)


def find_limit(x: np.ndarray, q: QuantizedArray) -> np.ndarray:
    """2e-6 of the sums of magnitudes, in which scaled codes and offsets count one by one."""
    offset = q.offset.dequantize() if isinstance(q.offset, QuantizedArray) else q.offset
    magnitudes = np.abs(np.asarray(q.dequantize(), np.float64))
    if offset is not None:
        without = q.replace(offset=None)
        offsets = np.abs(np.asarray(offset, np.float64))
        magnitudes = np.abs(np.asarray(without.dequantize(), np.float64)) + np.repeat(offsets, DEPTH // len(offsets), 0)
    return 2e-6 * (np.abs(x.astype(np.float64)) @ magnitudes)


def multiply(x: Any, q: QuantizedArray) -> jax.Array:
    return jq.matmul(x, q)


@on_cpu
@pytest.mark.parametrize("stored_last", [None, 0])
@pytest.mark.parametrize(("codes", "form"), mark_others_full(CASES, BY_DEFAULT), ids=str)
def test_values(codes: str, form: str, stored_last: int | None, rng: np.random.Generator) -> None:
    """Close to the dequantized product, from either side; what is not finite as in floats."""
    q = make_array(codes, form, stored_last, rng)
    real = np.asarray(q.dequantize(), np.float64)
    x = rng.normal(size=(3, DEPTH)).astype(np.float32)
    want, limit = x.astype(np.float64) @ real, find_limit(x, q)
    for function in (multiply, lambda x, q: jq.matmul(q.T, x.T).T, lambda x, q: jq.einsum("bk,kn->bn", x, q)):
        assert np.all(np.abs(jax.jit(function)(x[:1], q) - want[:1]) <= limit[:1])
    assert np.all(np.abs(jax.jit(multiply)(x, q) - want) <= limit)
    assert np.all(np.abs(jax.vmap(multiply, (0, None))(x, q) - want) <= limit)
    row = x[:1].copy()
    for special in (np.inf, np.nan):
        row[0, 3] = special
        with np.errstate(invalid="ignore"):
            expected = np.float32(special) * real[3].astype(np.float32)
        np.testing.assert_array_equal(jax.jit(multiply)(row, q)[0], expected)


@on_cpu
@pytest.mark.parametrize("stored_last", [None, 0])
@pytest.mark.parametrize(("codes", "form"), mark_others_full(CASES, BY_DEFAULT), ids=str)
def test_kernels_read_them(codes: str, form: str, stored_last: int | None, rng: np.random.Generator) -> None:
    """No array of the size of the weights is made, and the loop of the one-row kernels reads them."""
    q = make_array(codes, form, stored_last, rng)
    x = jax.ShapeDtypeStruct((1, DEPTH), jnp.float32)
    program = Program(multiply, x, q)
    assert program.widest() < q.size // 2
    assert program.memory.temp_size_in_bytes < 1.5 * q.size
    assert not any(i.opcode == "conditional" for body in program.computations.values() for i in body)
    assert program.count_contracted() < q.size // 2


@on_cpu
@pytest.mark.parametrize("stored_last", [None, 0])
@pytest.mark.parametrize("codes", ["int4", "int6"])
def test_large_numbers(codes: str, stored_last: int | None, rng: np.random.Generator) -> None:
    """Products that overflow on their own, but not with the offset, have the values of the dequantized product."""
    q = make_array(codes, "offset", stored_last, rng)
    scale = q.scale.at[2].set(1e36)
    offset = jnp.asarray(q.offset).at[2].set(-3e36)
    q = q.replace(scale=scale, offset=offset)
    x = rng.uniform(0.5, 1, (1, DEPTH)).astype(np.float32)
    got = jax.jit(multiply)(x, q)
    want = x.astype(np.float64) @ np.asarray(q.dequantize(), np.float64)
    assert np.all(np.abs(got - want) <= find_limit(x, q))
    tiny = jax.jit(multiply)(x * np.float32(1e-38), q)
    assert not np.any(np.isnan(tiny))


@on_cpu
@pytest.mark.parametrize("stored_last", [None, 0])
@pytest.mark.parametrize("codes", ["int4", "int6"])
def test_gradients(codes: str, stored_last: int | None, rng: np.random.Generator) -> None:
    """Of the row, the scale and the offset, as of the dequantized product; of the scale of a nested scale."""
    q = make_array(codes, "offset", stored_last, rng)
    x = rng.normal(size=(1, DEPTH)).astype(np.float32)

    def sum_product(x: Any, scale: Any, offset: Any, *, multiply: Any) -> Any:
        y = multiply(x, q.replace(scale=scale, offset=offset))[0]
        return jnp.sum(y * jnp.cos(jnp.arange(y.size)))

    def multiply_floats(x: Any, q: QuantizedArray) -> jax.Array:
        return jnp.matmul(x, q.dequantize(), precision="highest")

    got, want = (
        jax.grad(lambda *a, f=f: sum_product(*a, multiply=f), (0, 1, 2))(x, q.scale, q.offset)
        for f in (multiply, multiply_floats)
    )
    for each, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(each, expected, rtol=1e-4, atol=1e-3)
    nested = make_array(codes, "nested", stored_last, rng)

    def sum_nested(factor: Any, multiply: Any) -> Any:
        return jnp.sum(multiply(x, nested.replace(scale=nested.scale.replace(scale=factor))))

    got, want = (jax.grad(lambda s, f=f: sum_nested(s, f))(nested.scale.scale) for f in (multiply, multiply_floats))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-2 * float(jnp.abs(want).max()))


@on_cpu
@pytest.mark.parametrize("stored_last", [None, 0])
@pytest.mark.parametrize("codes", ["int4", "int3", "uint5", "int6"])
def test_words_with_unusual_scales(codes: str, stored_last: int | None, rng: np.random.Generator) -> None:
    """One block has a scale that is 0, negative, subnormal, or far from 1."""
    q = make_array(codes, "words", stored_last, rng).replace(signed_scale=True)
    x = rng.normal(size=(1, DEPTH)).astype(np.float32)
    for scale in (0.0, -0.5, 1e-30, 1e30):
        unusual = q.replace(scale=q.scale.at[3].set(scale))
        want = x.astype(np.float64) @ np.asarray(unusual.dequantize(), np.float64)
        assert np.all(np.abs(jax.jit(multiply)(x, unusual) - want) <= find_limit(x, unusual))


@on_cpu
@pytest.mark.parametrize("stored_last", [None, 0])
@pytest.mark.parametrize(
    ("codes", "form"), [("int4", "signed"), ("nf4", "words"), ("int6", "signed"), ("int6", "offset")]
)
def test_unusual_rows(codes: str, form: str, stored_last: int | None, rng: np.random.Generator) -> None:
    """The largest float32 numbers beside others of 2**-80, a row of 1e-28, and infinities in any number of places."""
    q = make_array(codes, form, stored_last, rng)
    q = q.replace(scale=q.scale * np.float32(1e-6), offset=None if q.offset is None else jnp.asarray(q.offset) * 1e-6)
    real, largest = np.asarray(q.dequantize(), np.float64), np.finfo(np.float32).max
    x = rng.normal(size=(1, DEPTH)).astype(np.float32)
    huge = x.copy()
    huge[0, ::2] = largest * np.sign(x[0, ::2])
    mixed = huge * np.where(np.arange(DEPTH) < DEPTH // 2, np.float32(2.0**-80), np.float32(1))
    for row in (huge, mixed, x * np.float32(1e-28)):
        got = np.asarray(jax.jit(multiply)(row, q))
        assert np.all(np.abs(got - row.astype(np.float64) @ real) <= find_limit(row, q))
    infinite = x.copy()
    infinite[0, [3, 100]] = np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        want = np.asarray([np.inf, -np.inf], np.float32) @ real[[3, 100]].astype(np.float32)
    got = np.asarray(jax.jit(multiply)(infinite, q))[0]
    assert not np.any(np.isfinite(got))
    if form != "offset":
        np.testing.assert_array_equal(got, want)


@on_cpu
@pytest.mark.parametrize("stored_last", [None, 0])
@pytest.mark.parametrize("special", [np.inf, np.nan])
@pytest.mark.parametrize("name", ["scale", "offset"])
def test_entries_that_are_not_finite(
    name: str, special: float, stored_last: int | None, rng: np.random.Generator
) -> None:
    """They make the results of their columns NaN, and no others."""
    for codes in ("int4", "int8", "int6"):
        q = make_array(codes, "offset", stored_last, rng)
        q = q.replace(**{name: jnp.asarray(getattr(q, name)).at[2, 5].set(special)})
        got = np.asarray(jax.jit(multiply)(rng.normal(size=(1, DEPTH)).astype(np.float32), q))
        np.testing.assert_array_equal(np.isnan(got[0]), np.arange(COLUMNS) == 5)


@on_cpu
@pytest.mark.parametrize("scale_dtype", ["float32", "float16"])
@pytest.mark.parametrize("form", ["signed", "offset", "zero points"])
def test_loop_over_chunks(
    form: str, scale_dtype: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes of 8 bits that are stored last, in each way to write it, without an array for all rows but the result."""
    rows, depth = 4096, 224
    monkeypatch.setattr(float_rows, "_LOOP", 2**18)
    monkeypatch.setattr(float_rows, "_CHUNK", 2**16)
    spec = QuantSpec("uint8", Blocked(1, 32), symmetric=False, scale_dtype=scale_dtype)
    q = jq.quantize(rng.normal(size=(rows, depth)).astype(np.float32), spec)
    if form == "signed":
        signs = rng.choice(np.asarray([-1, 0, 1]), q.scale.shape)
        q = q.replace(zero_point=None, scale=q.scale * jnp.asarray(signs, q.scale.dtype), signed_scale=True)
    if form == "offset":
        q = q.replace(zero_point=None, offset=jnp.asarray(rng.normal(size=q.scale.shape), scale_dtype))
    real = np.asarray(q.dequantize(), np.float64).T
    x = rng.normal(size=(1, depth)).astype(np.float32)
    steps = np.abs(np.asarray(q.codes, np.float64)) * np.repeat(np.abs(np.asarray(q.scale, np.float64)), 32, 1)
    limit = 2e-6 * np.abs(x.astype(np.float64)) @ (np.abs(real) + steps.T)
    for function in (lambda x, q: x @ q.T, lambda x, q: jq.einsum("bk,nk->bn", x, q), lambda x, q: (q @ x.T).T):
        got = np.asarray(jax.jit(function)(x, q))
        assert np.all(np.abs(got - x.astype(np.float64) @ real) <= limit)
        program = Program(function, x, q)
        assert program.widest() <= rows * 4
        assert any(i.opcode == "while" for i in program.in_memory())
        assert program.memory.temp_size_in_bytes < q.size // 2
        # The loop reads the codes where they are.
        assert not any(dtype in ("s8", "u8") for i in program.in_memory() for dtype, _ in buffers_of(i))
    stored = q.T.store_last(0)
    assert np.all(np.abs(np.asarray(jax.jit(multiply)(x, stored)) - x.astype(np.float64) @ real) <= limit)
    spoiled = q.replace(scale=q.scale.at[7, 3].set(jnp.inf))
    got = np.asarray(jax.jit(lambda x, q: x @ q.T)(x, spoiled))[0]
    np.testing.assert_array_equal(np.isnan(got), np.arange(rows) == 7)


@on_cpu
@pytest.mark.parametrize("scale_dtype", ["float32", "float16"])
@pytest.mark.parametrize("form", ["signed", "offset", "zero points", "one scale per column"])
def test_loop_over_rows(form: str, scale_dtype: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of 8 bits that are stored as [in, out], without an array for all groups of rows."""
    depth, columns = 2048, 448
    monkeypatch.setattr(float_rows, "_LOOP", 2**18)
    monkeypatch.setattr(float_rows, "_CHUNK", 2**17)
    blocks = PerAxis(1) if form == "one scale per column" else Blocked(0, 32)
    spec = QuantSpec("uint8", blocks, symmetric=False, scale_dtype=scale_dtype)
    q = jq.quantize(rng.normal(size=(depth, columns)).astype(np.float32), spec)
    if form == "signed":
        signs = rng.choice(np.asarray([-1, 0, 1]), q.scale.shape)
        q = q.replace(zero_point=None, scale=q.scale * jnp.asarray(signs, q.scale.dtype), signed_scale=True)
    if form == "offset":
        q = q.replace(zero_point=None, offset=jnp.asarray(rng.normal(size=q.scale.shape), scale_dtype))
    real = np.asarray(q.dequantize(), np.float64)
    x = rng.normal(size=(1, depth)).astype(np.float32)
    run = depth // q.scale.shape[0]
    steps = np.abs(np.asarray(q.codes, np.float64)) * np.repeat(np.abs(np.asarray(q.scale, np.float64)), run, 0)
    limit = 2e-6 * np.abs(x.astype(np.float64)) @ (np.abs(real) + steps)
    program = Program(multiply, x, q)
    assert any(i.opcode == "while" for i in program.in_memory())
    assert program.memory.temp_size_in_bytes < q.size // 2
    # The loop reads the codes where they are.
    codes = [shape for i in program.in_memory() for dtype, shape in buffers_of(i) if dtype in ("s8", "u8")]
    assert all(math.prod(shape) <= q.scale.size for shape in codes)
    for function in (multiply, jax.jit(multiply)):
        assert np.all(np.abs(np.asarray(function(x, q)) - x.astype(np.float64) @ real) <= limit)
    large = np.asarray(jax.jit(multiply)(x * np.float32(2.0**100), q)) / 2.0**100
    assert np.all(np.abs(large - x.astype(np.float64) @ real) <= limit)
    spoiled = q.replace(scale=q.scale.at[-1, 7].set(jnp.inf))
    got = np.asarray(jax.jit(multiply)(x, spoiled))[0]
    np.testing.assert_array_equal(np.isnan(got), np.arange(columns) == 7)


@on_cpu
@pytest.mark.parametrize("codes", ["int4", "nf4", "int3", "int6"])
def test_chunks_of_words_stored_last(codes: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many words, whose sums are not written to memory at once; those of low bits only are, one for each group."""
    depth, columns = 768, 288  # of no other test, because JAX keeps traces
    spec = QuantSpec(jq.nf4 if codes == "nf4" else codes, Blocked(1, 32))
    q = jq.quantize(rng.normal(size=(columns, depth)).astype(np.float32), spec)
    q = q.pack() if q.packing is None else q
    x, real = rng.normal(size=(1, depth)).astype(np.float32), np.asarray(q.dequantize(), np.float64).T
    monkeypatch.setattr(word_rows, "_CHUNK", q.size // 3)
    program = Program(lambda x, q: x @ q.T, x, q)
    limit = 2e-6 * np.abs(x.astype(np.float64)) @ np.abs(real)
    assert np.all(np.abs(np.asarray(jax.jit(lambda x, q: x @ q.T)(x, q)) - x.astype(np.float64) @ real) <= limit)
    sums = [shape for i in program.in_memory() for dtype, shape in buffers_of(i) if dtype == "f32"]
    lanes = 16 if codes == "int3" else 8
    assert max(math.prod(shape) for shape in sums) == q.size // (32 if codes == "int4" else 3 * lanes)


@pytest.mark.sample(12)
@on_cpu
@pytest.mark.parametrize("depth", [640, 768, 1024])  # tiles of 20 groups, of 8, and two of 16
@pytest.mark.parametrize("codes", ["int4", "uint4", "int2"])
@pytest.mark.parametrize("form", ["signed", "offset", "zero points", "one scale for each output"])
def test_chunks_of_words_of_low_bits(
    form: str, codes: str, depth: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large table, in chunks whose words are read where they are, and no array for all rows but the result."""
    rows, chunks = 3000, 5
    # At most a sum for each group.
    sums = rows // chunks * depth // 32
    monkeypatch.setattr(word_rows, "_CHUNK_SUMS", sums)
    monkeypatch.setattr(word_rows, "_CHUNK", rows // chunks * depth)
    block = 16 if form == "signed" else 32
    blocks = PerAxis(0) if form == "one scale for each output" else Blocked(1, block)
    w = rng.normal(size=(rows, depth)).astype(np.float32)
    q = jq.quantize(w, QuantSpec(codes, blocks, symmetric=form != "zero points"))
    if form == "signed":
        signs = rng.choice(np.asarray([-1, 0, 1]), q.scale.shape)
        q = q.replace(scale=q.scale * jnp.asarray(signs, q.scale.dtype), signed_scale=True)
    if form == "offset":
        q = q.replace(offset=jnp.asarray(rng.normal(size=q.scale.shape), jnp.float32), zero_point=None)
    q = q.pack()
    real = np.asarray(q.dequantize(), np.float64).T
    x = rng.normal(size=(1, depth)).astype(np.float32)
    run = depth // q.scale.shape[1]
    steps = np.abs(np.asarray(q.codes, np.float64)) * np.repeat(np.abs(np.asarray(q.scale, np.float64)), run, 1)
    limit = 2e-6 * np.abs(x.astype(np.float64)) @ (np.abs(real) + steps.T)
    contract = lambda x, q: x @ q.T  # noqa: E731
    assert np.all(np.abs(np.asarray(jax.jit(contract)(x, q)) - x.astype(np.float64) @ real) <= limit)
    program = Program(contract, x, q)
    found = [(dtype, math.prod(shape)) for i in program.in_memory() for dtype, shape in buffers_of(i)]
    # The largest floats are the sums of a chunk, and its entries. No words are copied except those of zero points.
    copied = 0 if q.zero_point is None else q.zero_point.size // 8
    assert max((size for dtype, size in found if dtype == "u32"), default=0) <= copied
    assert max(size for dtype, size in found if dtype == "f32") <= max(sums, rows, q.scale.size // chunks)
    if form == "zero points":
        # Those of a chunk are converted to floats when the chunk is read.
        assert program.memory.temp_size_in_bytes < 4 * q.scale.size // 2
    spoiled = q.replace(scale=q.scale.at[7, 0].set(jnp.inf).at[rows - 1, -1].set(jnp.nan))
    got = np.asarray(jax.jit(contract)(x, spoiled))[0]
    np.testing.assert_array_equal(np.isnan(got), np.isin(np.arange(rows), [7, rows - 1]))


@pytest.mark.sample(20)
@on_cpu
@pytest.mark.parametrize("depth", [288, 576, 640, 896, 912, 1120])
@pytest.mark.parametrize(
    ("codes", "block"),
    [
        ("int5", 16), ("int6", 16), ("int3", 16), ("int4", 16), ("uint4", 8), ("uint6", 32), ("nf4", 32),
        ("int4 with zero points", 16), ("uint4 with zero points", 8), ("int5 with zero points", 16),
        ("int6 with zero points", 8), ("uint3 with zero points", 16), ("uint2 with zero points", 16),
        ("int4 with zero points", 32),
    ],
)  # fmt: skip
def test_words_of_rows_of_any_length(codes: str, block: int, depth: int, rng: np.random.Generator) -> None:
    """Tiles of any number of groups, and a group at the end that is not full, which has no form of its own."""
    w = rng.normal(size=(COLUMNS, depth)).astype(np.float32)
    block = block if depth % block == 0 else 16
    if "zero points" in codes:
        spec = QuantSpec(codes.split()[0], Blocked(1, block), symmetric=False, scale_dtype="float16")
        q = jq.quantize(w, spec)
    elif codes == "uint6":
        spec = QuantSpec(codes, Blocked(1, block), symmetric=False, scale_dtype="float16")
        q = jq.quantize(w, spec)
        q = q.replace(zero_point=None, offset=jnp.asarray(rng.normal(size=q.scale.shape), jnp.float16))
    else:
        q = jq.quantize(w, QuantSpec(jq.nf4 if codes == "nf4" else codes, Blocked(1, block)))
    q = q.pack() if q.packing is None else q
    x, real = rng.normal(size=(3, depth)).astype(np.float32), np.asarray(q.dequantize(), np.float64).T
    want = x.astype(np.float64) @ real
    limit = 2e-6 * (np.abs(x.astype(np.float64)) @ np.abs(real))
    function = jax.jit(lambda x, q: x @ q.T)
    assert np.all(np.abs(function(x[:1], q) - want[:1]) <= limit[:1])
    assert np.all(np.abs(jax.lax.scan(lambda _, row: (None, function(row[None], q)[0]), None, x)[1] - want) <= limit)
    is_even = depth % 32 == 0
    program = Program(lambda x, q: x @ q.T, x[:1], q)
    # Sums over words and over blocks are dots, too.
    assert (program.count_contracted() < q.size // 2) is is_even
    if not is_even:
        return
    assert program.widest() < q.size // 2
    # Each scale counts for the elements of its block, and each element for its codes, wherever they are in a vector.
    spoiled = q.replace(scale=q.scale.at[7, -1].set(jnp.inf).at[9, depth // block // 2].set(jnp.nan))
    np.testing.assert_array_equal(np.isnan(function(x[:1], spoiled)[0]), np.isin(np.arange(COLUMNS), [7, 9]))
    for place in (0, depth // 2 + 1, depth - 40, depth - 1):
        assert not np.isfinite(function(np.where(np.arange(depth) == place, np.float32(np.inf), x[:1]), q)).any()


@on_cpu
@pytest.mark.parametrize("shape", [(512, 130), (70, 512), (512, 513)])
@pytest.mark.parametrize("stored_last", [None, 0])
def test_words_of_any_length(shape: tuple[int, int], stored_last: int | None, rng: np.random.Generator) -> None:
    """Words that are not full, and lengths that no loop takes."""
    q = jq.quantize(
        rng.normal(size=shape).astype(np.float32), QuantSpec("int5", Blocked(0, 10)), stored_last=stored_last
    )
    for rows in (1, 3):
        x = rng.normal(size=(rows, shape[0])).astype(np.float32)
        real = np.asarray(q.dequantize(), np.float64)
        limit = 2e-6 * (np.abs(x.astype(np.float64)) @ np.abs(real))
        assert np.all(np.abs(jax.jit(multiply)(x, q) - x.astype(np.float64) @ real) <= limit)


@on_cpu
def test_words_of_large_weights(rng: np.random.Generator) -> None:
    """Weights that are cut into chunks, for several rows."""
    w = rng.normal(size=(1536, 1024)).astype(np.float32)
    for codes, last in (("int5", None), ("int6", 0)):
        stored = jq.quantize(w, QuantSpec(codes, Blocked(0, 32)), stored_last=last)
        x = rng.normal(size=(5, 1536)).astype(np.float32)
        real = np.asarray(stored.dequantize(), np.float64)
        limit = 2e-6 * (np.abs(x.astype(np.float64)) @ np.abs(real))
        program = Program(multiply, jax.ShapeDtypeStruct(x.shape, x.dtype), stored)
        assert program.widest() <= stored.size // 2
        assert np.all(np.abs(jax.jit(multiply)(x, stored) - x.astype(np.float64) @ real) <= limit)


@on_cpu
@pytest.mark.parametrize("stored_last", [None, 0])
@pytest.mark.parametrize(("codes", "form"), [("int5", "signed"), ("uint5", "words"), ("int6", "offset")])
def test_chunks_of_words(codes: str, form: str, stored_last: int | None, rng: np.random.Generator) -> None:
    """Words of two planes are copied in chunks that end where blocks do, and never all of them."""
    depth, columns = 2048, 2112
    spec = QuantSpec(codes, Blocked(0, 32), symmetric=codes != "uint5")
    q = jq.quantize(rng.normal(size=(depth, columns)).astype(np.float32), spec, stored_last=stored_last)
    if form == "signed":
        q = q.replace(scale=q.scale * rng.choice(np.asarray([-1, 0, 1], np.float32), q.scale.shape), signed_scale=True)
    real = np.asarray(q.dequantize(), np.float64)
    magnitudes = np.abs(real)
    if form == "offset":
        offset = rng.normal(size=q.scale.shape).astype(np.float32)
        q = q.replace(offset=jnp.asarray(offset))
        spread = np.repeat(offset.astype(np.float64), 32, 0)
        real, magnitudes = real + spread, magnitudes + np.abs(spread)
    x = rng.normal(size=(1, depth)).astype(np.float32)
    got = jax.jit(multiply)(x, q)
    assert np.all(np.abs(got - x.astype(np.float64) @ real) <= 2e-6 * (np.abs(x.astype(np.float64)) @ magnitudes))
    program = Program(multiply, x, q)
    assert program.widest() < q.stored_codes.size
    assert not any(i.opcode == "conditional" for body in program.computations.values() for i in body)
    assert program.count_contracted() < q.size // 2


@on_cpu
def test_memory_of_words() -> None:
    """With several rows, the words of a chunk are unpacked when it is contracted, not those of all chunks before."""
    w = jax.ShapeDtypeStruct((4096, 2048), jnp.float32)
    q = jax.eval_shape(lambda w: jq.quantize(w, QuantSpec("int6", Blocked(0, 32))), w)
    program = Program(multiply, jax.ShapeDtypeStruct((8, 4096), jnp.float32), q)
    assert program.memory.temp_size_in_bytes < w.size


def test_several_dimensions(rng: np.random.Generator) -> None:
    """Words of three dimensions, and with a batch dimension, are unpacked."""
    q = jq.quantize(rng.normal(size=(4, 64, 96)).astype(np.float32), QuantSpec("int6", Blocked(1, 32)))
    assert q.packing is not None
    assert dot_weight_only.is_read_by_kernels(q)
    x = rng.normal(size=(4, 1, 64)).astype(np.float32)
    real = np.asarray(q.dequantize(), np.float64)
    limit = 2e-6 * (np.abs(x.astype(np.float64)) @ np.abs(real))
    assert np.all(np.abs(jq.matmul(x, q) - x.astype(np.float64) @ real) <= limit)
    got = jq.einsum("bk,bkn->n", x[:, 0], q)
    want = np.einsum("bk,bkn->n", x[:, 0].astype(np.float64), real)
    assert np.all(np.abs(got - want) <= np.sum(limit, 0)[0])


@on_cpu
@pytest.mark.parametrize("einsum", [False, True])
def test_nested_scales_of_many_layers(einsum: bool, rng: np.random.Generator) -> None:
    """The floats of a layer's scales and offsets are in memory while the layer runs, not from the start on."""
    size, layers = 512, 8
    spec = QuantSpec("uint4", Blocked(1, 16), offset=True, scale_spec=QuantSpec("uint6", PerTensor()))
    w = rng.normal(size=(layers, size, size)).astype(np.float32) / np.float32(size**0.5)
    qs = [jq.quantize(each, spec).pack() for each in w]
    x = jnp.asarray(rng.normal(size=(3, 1, size)), jnp.float32)

    def run(x: jax.Array, qs: list[QuantizedArray]) -> jax.Array:
        for q in qs:
            x = jnp.tanh(jq.einsum("bk,nk->bn", x, q) if einsum else x @ q.T)
        return x

    # The bytes of a layer's scales and offsets, twice: as they are computed, and in the order in which they are read.
    entries = 2 * 2 * 4 * size * size // 16
    assert Program(run, x[0], qs).memory.temp_size_in_bytes < layers * entries // 4
    want = [np.asarray(run(row, qs)) for row in x]
    mapped = Program(jax.vmap(run, in_axes=(0, None)), x, qs)
    # The scales are not those of each element of the batch.
    assert mapped.widest() <= size * size
    np.testing.assert_allclose(jax.jit(jax.vmap(run, in_axes=(0, None)))(x, qs), want, rtol=1e-4, atol=1e-5)
    _, got = jax.lax.scan(lambda _, row: (None, run(row, qs)), None, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    floats = [q.dequantize() for q in qs]

    def run_floats(x: jax.Array) -> jax.Array:
        for each in floats:
            x = jnp.tanh(x @ each.T)
        return x

    np.testing.assert_allclose(want[0], run_floats(x[0]), rtol=1e-3, atol=1e-4)
    gradients = [jax.grad(lambda x, f=f: f(x).sum())(x[0]) for f in (lambda x: run(x, qs), run_floats)]
    np.testing.assert_allclose(*gradients, rtol=1e-3, atol=1e-4)
    assert jax.vmap(run, in_axes=(0, None))(x[:0], qs).shape == (0, 1, size)
