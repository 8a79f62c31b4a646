"""Weight-only contractions in each of their forms, against sums in float64.

The error is held relative to the sum of magnitudes of each output. In float32 a sum of K products has an error of about
sqrt(K) * 2**-24 in this measure, so the limit of 2e-6 detects a wrong digit, code, scale or zero point.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jaxquant as jq
from jaxquant import Blocked, PerAxis, PerTensor, QuantizedArray, QuantSpec
from jaxquant._contractions.dot_integer import prepare_side
from jaxquant._contractions.dot_weight_only import read_scaled_codes
from jaxquant._kernels import float_rows
from jaxquant._kernels.contraction import Role

from ..support.hlo import Program
from ..support.matrix import mark_others_full

LIMIT = 2e-6
FIRST, LAST, LEFT = "contracted first", "contracted last", "weights on the left"
ARRANGEMENTS = mark_others_full([FIRST, LAST, LEFT], [FIRST, LAST])
# Digits are used from 2**20 codes on, and the form for one row from 2**15.
SIZES = {"int8": (1024, 1024), "int4": (1024, 1024), "uint4 in blocks": (256, 128), "nf4": (256, 128)}
SPECS = {
    "int8": QuantSpec(jnp.int8, PerAxis(1)),
    "uint8": QuantSpec(jnp.uint8, PerAxis(1)),
    "one uint8 zero point": QuantSpec(jnp.uint8, PerTensor(), symmetric=False),
    "int4": QuantSpec(jnp.int4, PerAxis(1)),
    "uint2": QuantSpec(jnp.uint2, PerAxis(1)),
    "uint4 in blocks": QuantSpec(jnp.uint4, Blocked(0, 32)),
    "int8 in blocks": QuantSpec(jnp.int8, Blocked(0, 24)),
    "blocks in both": QuantSpec(jnp.int4, Blocked((0, 1), 16)),
    "int4, scale of rows": QuantSpec(jnp.int4, PerAxis(0)),
    "nf4": QuantSpec(jq.nf4, Blocked(0, 64)),
    "int16": QuantSpec(jnp.int16, PerAxis(1)),
    "float8": QuantSpec(jnp.float8_e4m3fn, PerAxis(1)),
}


def decode(q: QuantizedArray) -> np.ndarray:
    """The real numbers of an array of rank 2, in float64; codes of floats and codebooks are exact in float32."""
    whole = q.per_index(0, 1)
    scale = np.asarray(whole.scale, np.float64)
    if q.codebook is not None:
        return np.asarray(q.codebook.levels, np.float64)[np.asarray(q.codes).astype(int)] * scale
    point = 0 if q.zero_point is None else np.asarray(whole.zero_point).astype(np.float64)
    return (np.asarray(q.codes).astype(np.float64) - point) * scale


def multiply(x: Any, q: QuantizedArray, arrangement: str) -> jax.Array:
    """x @ q, with the weights in one of the arrangements."""
    if arrangement == FIRST:
        return jq.matmul(x, q)
    if arrangement == LAST:
        return jq.dot_general(x, q.T, (((x.ndim - 1,), (1,)), ((), ())))
    return jnp.swapaxes(jq.matmul(q.T, jnp.swapaxes(x, -1, -2)), -1, -2)


def find_error(y: Any, x: np.ndarray, real: np.ndarray) -> float:
    wide = np.asarray(x, np.float64)
    magnitudes = np.abs(wide) @ np.abs(real)
    differences = np.abs(np.asarray(y, np.float64) - wide @ real)
    return float(
        np.max(np.where(magnitudes == 0, differences != 0, differences / np.where(magnitudes == 0, 1, magnitudes)))
    )


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize(
    "name", mark_others_full(SPECS, ["uint8", "int4", "uint4 in blocks", "blocks in both", "int16"])
)
def test_every_form(name: str, arrangement: str, rng: np.random.Generator) -> None:
    """One row and more, with sizes that bytes and blocks divide, or do not."""
    for depth, columns in ((192, 200), (100, 33)):
        q = jq.quantize(rng.normal(size=(depth, columns)).astype(np.float32), SPECS[name])
        real = decode(q)
        for rows in (1, 9):
            x = rng.normal(size=(rows, depth)).astype(np.float32)
            assert find_error(multiply(x, q, arrangement), x, real) < LIMIT, (depth, rows)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("arrangement", [FIRST, LAST, LEFT])
def test_large_weights(arrangement: str, rng: np.random.Generator) -> None:
    """Weights that are contracted as digits, and weights that are cut into chunks."""
    w = rng.normal(size=(1536, 1500)).astype(np.float32)
    for name in ("int8", "one uint8 zero point", "int4", "nf4"):
        q = jq.quantize(w, SPECS[name])
        real = decode(q)
        for rows in (1, 3, 70):
            x = rng.normal(size=(rows, 1536)).astype(np.float32)
            assert find_error(multiply(x, q, arrangement), x, real) < LIMIT, (name, rows)


@jax.jit
def contract_digits(x: Any, q: QuantizedArray) -> jax.Array:
    """x @ q by digits, whatever the size."""
    role = Role((), (1,), (0,))
    side = prepare_side(q, role)
    y, is_exact = float_rows.contract_digits(x, side.codes, side.center, side.scale, Role((), (0,), (1,)), role)
    is_exact &= float_rows.has_moderate_scales(q.scale)
    return lax.cond(is_exact, lambda: y, lambda: jnp.matmul(x, q.dequantize(), precision="highest"))


@jax.jit
def contract_rows(x: Any, q: QuantizedArray) -> jax.Array:
    """x @ q, row by row, whatever the size."""
    role = Role((), (1,), (0,))
    matrix = read_scaled_codes(q, x, is_moved=False)
    terms = float_rows.choose_terms(matrix, role)
    assert terms is not None
    return jnp.stack([float_rows.contract_row(row, matrix, role, terms) for row in x])


@jax.jit
def contract_lanes(x: Any, q: QuantizedArray) -> jax.Array:
    """x @ q, row by row, lane by lane, whatever the size."""
    role = Role((), (0,), (1,))
    matrix = read_scaled_codes(q.T, x, is_moved=False)
    terms = float_rows.choose_groups(matrix, role)
    assert terms is not None
    return jnp.stack([float_rows.contract_lanes(row, matrix, role, terms) for row in x])


@pytest.mark.parametrize("contract", [contract_digits, contract_rows, contract_lanes], ids=["digits", "rows", "lanes"])
def test_magnitudes(contract: Any, rng: np.random.Generator) -> None:
    """Rows of any magnitude and of any range, where all codes of a column but one may be 0.

    Columns with a single code show the error of every element by itself.
    """
    rows, depth = 3, 128
    codes = np.eye(depth, dtype=np.int8) * rng.integers(1, 128, depth).astype(np.int8)
    codes = np.concatenate([codes, rng.integers(-127, 128, (depth, 32)).astype(np.int8)], axis=1)
    q = QuantizedArray(jnp.asarray(codes), jnp.asarray(rng.uniform(0.5, 1, (1, depth + 32)), jnp.float32))
    draws = {
        "one magnitude": np.exp2(rng.uniform(-1, 0, (rows, depth))),
        "a range of 2**25": np.exp2(rng.uniform(-25, 0, (rows, depth))),
        "a range of 2**29": np.exp2(rng.uniform(-29, 0, (rows, depth))),
        "a range of 2**60": np.exp2(rng.uniform(-60, 0, (rows, depth))),
        "large": np.exp2(rng.uniform(100, 119, (rows, depth))),
        "close to the largest": np.exp2(rng.uniform(126.9, 127, (rows, depth))) * (np.arange(depth) == 3),
        "small": np.exp2(rng.uniform(-105, -95, (rows, depth))),
        "below the digits": np.exp2(rng.uniform(-116, -113, (rows, depth))),
        "powers of two": np.exp2(np.floor(rng.uniform(-20, 1, (rows, depth)))),
        "next to powers of two": np.nextafter(np.float32(2), np.float32(0)) * np.ones((rows, depth)),
        "zeros": np.zeros((rows, depth)),
        "one element": np.eye(rows, depth, 7),
    }
    for name, draw in draws.items():
        x = (draw * rng.choice([-1, 1], draw.shape)).astype(np.float32)
        factor = 2.0**-8 if "large" in name else 1.0
        scaled = q.replace(scale=q.scale * np.float32(factor))
        assert find_error(contract(x, scaled), x, decode(scaled)) < LIMIT, name


@pytest.mark.parametrize("name", ["int4", "uint4, zero points", "nf4"])
def test_a_row_of_words(name: str, rng: np.random.Generator) -> None:
    """Eight codes of 4 bits are read as one word, each at its place."""
    depth, columns = 64, 24
    low, high = (-8, 8) if name == "int4" else (0, 16)
    dtype = jnp.int4 if name == "int4" else jnp.uint4
    codes = jnp.asarray(rng.integers(low, high, (depth, columns)), dtype)
    scale = jnp.asarray(rng.uniform(0.5, 1, (2, columns)), jnp.float32)
    point = jnp.asarray(rng.integers(0, 16, (2, columns)), dtype) if "zero points" in name else None
    q = QuantizedArray(codes, scale, point, codebook=jq.nf4 if name == "nf4" else None)
    x = rng.normal(size=(2, depth)).astype(np.float32)
    assert find_error(contract_rows(x, q), x, decode(q)) < LIMIT


def test_digits_at_their_bounds() -> None:
    """Every digit at -128, -127, 127 and 0, and carries through all of them."""
    depth = 256
    q = QuantizedArray(jnp.eye(depth, dtype=jnp.int8), jnp.ones((1, 1)))
    digits = np.array(list(itertools.product([-128, -1, 0, 1, 127], repeat=3)))
    values = (digits * [2.0**16, 2.0**8, 1.0]).sum(1)
    halves = np.array([0.5, 0.498, 0.49803925, 0.4980392, 0.25, 2.0**-9, 2.0**-16, 0.0])
    numbers = np.concatenate(
        [values, (values[:, None] / 2**12 + halves).ravel(), -(values[:, None] / 2**12 + halves).ravel()]
    )
    numbers = np.resize(numbers.astype(np.float32), (len(numbers) // depth + 1, depth))
    for largest in (2.0**23, 127 * 2.0**17, 1.984375 * 2.0**22, np.nextafter(np.float32(2.0**24), np.float32(0))):
        x = numbers.copy()
        x[:, 0] = largest
        # Each output is one element, which has at most 24 bits: the result must be that element.
        exact = contract_digits(x, q)
        unit = largest * 2.0**-46
        assert np.all(np.abs(np.asarray(exact, np.float64) - x) <= np.maximum(unit, np.abs(x) * 2.0**-23))


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["int4", "uint2", "int8 in blocks", "blocks in both", "one uint8 zero point", "nf4"])
def test_a_row_in_chunks(name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of equal length, or a shorter last one, which end where blocks end."""
    for constant in ("_CHUNK", "_BYTE_CHUNK"):
        monkeypatch.setattr(float_rows, constant, 80_000)
    q = jq.quantize(rng.normal(size=(576, 256)).astype(np.float32), SPECS[name])
    role = Role((), (1,), (0,))
    x = rng.normal(size=(1, 576)).astype(np.float32)
    matrix = read_scaled_codes(q, jnp.asarray(x), is_moved=False)
    terms = float_rows.choose_terms(matrix, role)
    assert terms is not None
    assert len(float_rows._cut_rows(matrix, terms)) == 2

    @jax.jit
    def contract(x: jax.Array, q: QuantizedArray) -> jax.Array:
        return float_rows.contract_row(x, read_scaled_codes(q, x, is_moved=False), role, terms)

    y = contract(jnp.asarray(x[0]), q)
    assert find_error(y[None], x, decode(q)) < LIMIT


@pytest.mark.skipif(not float_rows.IS_VECTORIZED, reason="the form is off")
def test_chunks_of_a_row_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_rows, "_CHUNK", 2**18)
    q = QuantizedArray(jnp.ones((1024, 2048), jnp.int4), jnp.ones((1, 2048)))
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)

    @jax.jit
    def contract(x: jax.Array, q: QuantizedArray) -> jax.Array:
        matrix = read_scaled_codes(q, x, is_moved=False)
        return float_rows.contract_row(x, matrix, Role((), (1,), (0,)), 16)

    memory = contract.lower(x, q).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < q.size // 4  # all bytes take q.size // 2


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint4, jq.nf4], ids=["int8", "uint4", "nf4"])
def test_short_last_blocks(dtype: Any, rows: int, rng: np.random.Generator) -> None:
    """The last block is shorter than the others, from the start or because of a slice."""
    for depth, size, kept in ((160, 96, 160), (256, 64, 224), (384, 128, 352)):
        w = rng.normal(size=(depth, 256)).astype(np.float32)
        w[kept - kept % size :] *= 100
        q = jq.quantize(w, QuantSpec(dtype, Blocked(0, size)))[:kept]
        x = rng.normal(size=(rows, kept)).astype(np.float32)
        assert find_error(jq.matmul(x, q), x, decode(q)) < LIMIT, (depth, size)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "rows"), [(64, 1), (2048, 1), (2048, 4)], ids=["one short row", "one row", "rows"])
def test_unusual_scales_and_elements(depth: int, rows: int, rng: np.random.Generator) -> None:
    """A product with an intermediate overflow or underflow, although the result is a normal number."""
    codes = rng.integers(-127, 128, (depth, 1024)).astype(np.int8)
    codes[0] = 0
    for scale, largest in ((1e30, 1e-20), (1e26, 1.0), (1e36, 1e-10), (1e-37, 1e20), (1e-3, 1e-18)):
        q = QuantizedArray(jnp.asarray(codes), jnp.full((1, 1024), scale, jnp.float32))
        x = rng.uniform(0.5, 1, (rows, depth)).astype(np.float32) * np.float32(largest)
        x[:, 0] = 1e20  # the codes of this element are 0
        assert find_error(jq.matmul(x, q), x, decode(q)) < LIMIT, scale
    scale = jnp.ones((1, 1024), jnp.float32).at[0, 5].set(jnp.inf)
    y = np.asarray(jq.matmul(jnp.ones((rows, depth)), QuantizedArray(jnp.asarray(codes), scale)))
    assert np.isnan(y[:, 5]).all()  # 0 times infinity, as in floats
    assert np.isfinite(np.delete(y, 5, 1)).all()


def test_codebooks_far_from_one(rng: np.random.Generator) -> None:
    levels = (0.0, 1e-30, 2e-30, 1.0)
    codes = rng.integers(1, 3, (128, 512)).astype(np.uint8)
    codes[0] = 0
    q = QuantizedArray(
        jnp.asarray(codes.astype(jnp.uint2)), jnp.full((1, 512), 1e-4), codebook=jq.Codebook("far", levels)
    )
    x = rng.uniform(1, 2, (1, 128)).astype(np.float32) * np.float32(1e11)
    x[0, 0] = 1e20  # the row is scaled by this element, whose weights are 0
    assert find_error(jq.matmul(x, q), x, decode(q)) < LIMIT


def test_empty_contraction_with_blocks() -> None:
    e = jq.quantize(jnp.zeros((2, 0)), QuantSpec(jnp.int8, Blocked(1, 8)))
    y = jq.matmul(e, jq.quantize(jnp.zeros((0, 3)), QuantSpec(jnp.int8)))
    np.testing.assert_array_equal(y, np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("shape", [(32, 0), (0, 32), (0, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["int4", "int5"])
def test_empty_codes_in_words(dtype: str, shape: tuple[int, int]) -> None:
    q = jq.quantize(jnp.zeros(shape), QuantSpec(dtype)).pack()
    for rows in (1, 3, 300):
        for matrix in (q, q.T):
            depth, columns = matrix.shape
            x, expected = jnp.ones((rows, depth)), np.zeros((rows, columns), np.float32)
            np.testing.assert_array_equal(x @ matrix, expected)
            np.testing.assert_array_equal(jax.jit(jq.matmul)(x, matrix), expected)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("name", mark_others_full(SIZES, ["int8", "uint4 in blocks"]))
def test_infinities_and_nan(name: str, arrangement: str, rng: np.random.Generator) -> None:
    """They reach the outputs that a float contraction gives them to."""
    depth, columns = SIZES[name]
    q = jq.quantize(rng.normal(size=(depth, columns)).astype(np.float32), SPECS[name])
    real = decode(q).astype(np.float32)
    for rows in (1, 4):
        for special in (np.inf, -np.inf, np.nan):
            x = rng.normal(size=(rows, depth)).astype(np.float32)
            x[-1, 5] = special
            with np.errstate(invalid="ignore"):
                want = np.where(np.isfinite(x), 0, x)[:, 5:6] * real[5:6]
            got = np.asarray(multiply(x, q, arrangement))
            np.testing.assert_array_equal(got[-1], want[-1])
            assert np.isfinite(got[:-1]).all()


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the digits are a CPU's")
def test_a_row_does_not_depend_on_others(rng: np.random.Generator) -> None:
    """Sums of digits are exact: the same bits with other rows, under vmap, and with the depth reversed."""
    q = jq.quantize(rng.normal(size=(1024, 1030)).astype(np.float32), QuantSpec(jnp.int8, PerAxis(0)))
    x = rng.normal(size=(4, 1030)).astype(np.float32)
    contract = functools.partial(jq.dot_general, dimension_numbers=(((1,), (1,)), ((), ())))
    whole = contract(x, q)
    np.testing.assert_array_equal(whole[1:3], contract(x[1:3], q))
    np.testing.assert_array_equal(whole, jax.vmap(lambda row: contract(row[None], q)[0])(x))
    np.testing.assert_array_equal(whole, contract(x[:, ::-1], q[:, ::-1]))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("name", mark_others_full(SIZES, ["int8", "uint4 in blocks"]))
def test_transforms(name: str, arrangement: str, rng: np.random.Generator) -> None:
    """Eager, jit, vmap over x, over the weights and over both, scan, and constant weights."""
    depth, columns = SIZES[name]
    w = rng.normal(size=(2, depth, columns)).astype(np.float32)
    x = rng.normal(size=(2, 3, depth)).astype(np.float32)
    qs = [jq.quantize(part, SPECS[name]) for part in w]
    reals = [decode(q) for q in qs]
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *qs)
    function = functools.partial(multiply, arrangement=arrangement)
    for got in (function(x[0], qs[0]), jax.jit(function)(x[0], qs[0]), jax.jit(lambda x: function(x, qs[0]))(x[0])):
        assert find_error(got, x[0], reals[0]) < LIMIT
    by_x, by_weights = jax.vmap(function, (0, None))(x, qs[1]), jax.vmap(function, (None, 0))(x[0], stacked)
    by_both = jax.jit(jax.vmap(function))(x, stacked)
    scanned = lax.scan(lambda _, pair: (None, function(*pair)), None, (x, stacked))[1]
    for i in range(2):
        assert find_error(by_x[i], x[i], reals[1]) < LIMIT
        assert find_error(by_weights[i], x[0], reals[i]) < LIMIT
        assert find_error(by_both[i], x[i], reals[i]) < LIMIT
        assert find_error(scanned[i], x[i], reals[i]) < LIMIT
    nested = jax.vmap(jax.vmap(lambda row: function(row[None], qs[0])[0]))(x)
    assert find_error(nested.reshape(6, columns), x.reshape(6, depth), reals[0]) < LIMIT


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("name", mark_others_full(SIZES, ["int8", "uint4 in blocks"]))
@pytest.mark.parametrize("rows", mark_others_full([1, 3], [3]))
def test_derivatives(rows: int, name: str, arrangement: str, rng: np.random.Generator) -> None:
    """Those of the float contraction, in both modes, with respect to x and to the scale."""
    depth, columns = SIZES[name]
    q = jq.quantize(rng.normal(size=(depth, columns)).astype(np.float32), SPECS[name])
    x, dx = (rng.normal(size=(rows, depth)).astype(np.float32) for _ in range(2))
    g = rng.normal(size=(rows, columns)).astype(np.float32)
    ds = rng.normal(size=q.scale.shape).astype(np.float32)

    def contract(x: Any, scale: Any) -> jax.Array:
        return multiply(x, q.replace(scale=scale), arrangement)

    def contract_floats(x: Any, scale: Any) -> jax.Array:
        return jnp.matmul(x, q.replace(scale=scale).dequantize(), precision="highest")

    def close(got: Any, want: Any) -> None:
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())

    for got, want in zip(*(jax.vjp(f, x, q.scale)[1](g) for f in (contract, contract_floats)), strict=True):
        close(got, want)
    close(*(jax.jvp(f, (x, q.scale), (dx, ds))[1] for f in (contract, contract_floats)))
    close(jax.jvp(lambda x: contract(x, q.scale), (x,), (dx,))[1], contract_floats(dx, q.scale))
    # A second derivative: the product of the Hessian with a direction.
    squares = [lambda s, f=f: jnp.sum(f(x, s) ** 2) for f in (contract, contract_floats)]
    close(*(jax.jvp(jax.grad(f), (q.scale,), (ds,))[1] for f in squares))
    per_row = jax.vmap(jax.grad(lambda row, g: jnp.sum(contract(row[None], q.scale)[0] * g)))(x, g)
    close(per_row, jax.vjp(contract_floats, x, q.scale)[1](g)[0])


@pytest.mark.slow
def test_half_dtypes(rng: np.random.Generator) -> None:
    """16-bit activations are widened; a 16-bit array dequantizes to its dtype first, as documented."""
    w = rng.normal(size=(96, 16)).astype(np.float32)
    for dtype in (jnp.float16, jnp.bfloat16):
        x = jnp.asarray(rng.normal(size=(3, 96)), dtype)
        q = jq.quantize(w, SPECS["int8"])
        y = jq.matmul(x, q)
        assert y.dtype == jnp.float32
        assert find_error(y, np.asarray(x, np.float32), decode(q)) < LIMIT
        half = jq.quantize(w.astype(dtype), SPECS["int8"])
        want = np.asarray(x, np.float64) @ np.asarray(half.dequantize(), np.float64)
        found = jq.matmul(x, half, preferred_element_type=jnp.float32)
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_export_with_a_symbolic_batch(rng: np.random.Generator) -> None:
    for name in ("int4", "nf4"):
        q = jq.quantize(rng.normal(size=(64, 12)).astype(np.float32), SPECS[name])
        (rows,) = export.symbolic_shape("rows")
        argument = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
        exported = export.export(jax.jit(lambda x, q=q: jq.matmul(x, q)))(argument)
        for n in (1, 5):
            x = rng.normal(size=(n, 64)).astype(np.float32)
            assert find_error(exported.call(x), x, decode(q)) < LIMIT


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the forms are those of a CPU")
def test_programs(rng: np.random.Generator) -> None:
    """A few rows are contracted in int8, and no float copy of large weights is made, nor stored for a gradient."""
    w = rng.normal(size=(1024, 4096)).astype(np.float32)
    x = jnp.ones((4, 1024))
    for name in ("int8", "int4"):
        q = jq.quantize(w.T, QuantSpec(SPECS[name].dtype, PerAxis(0)))
        program = Program(lambda x, q: jq.dot_general(x, q, (((1,), (1,)), ((), ()))), x, q)
        assert any(operand[0] == "s8" for dot in program.contractions() for operand in dot.operands)
        assert program.widest() < w.size * 0.6
    blocked = jq.quantize(w, SPECS["uint4 in blocks"])
    assert Program(jq.matmul, x[:1], blocked).widest() < w.size * 0.6
    _, pull = jax.vjp(lambda x: jq.matmul(x, blocked), x)
    assert all(np.size(leaf) < w.size or leaf.dtype == jnp.uint4 for leaf in jax.tree.leaves(pull))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the forms are those of a CPU")
@pytest.mark.parametrize(("rows", "contractions"), [(511, 2), (512, 1)])
def test_many_rows_take_one_contraction(rows: int, contractions: int, rng: np.random.Generator) -> None:
    """Fewer rows are contracted with one plane of 4-bit codes after the other."""
    if jax.__version_info__ < (0, 12):
        pytest.skip("jax 0.10 keeps a 4-bit code in a byte on CPUs, so there are no planes")
    w = jnp.asarray(rng.normal(size=(128, 64)), jnp.float32)
    q = jq.quantize(w, QuantSpec(jnp.int4, PerAxis(1)))
    assert len(Program(jq.matmul, jnp.zeros((rows, 128)), q).contractions()) == contractions
