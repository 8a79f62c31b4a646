"""`einsum` over quantized arrays against numpy's, in float64 and exactly."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..oracles.onnx_text import BOUNDS, dtype
from ..support.quantized_arrays import dequantized

Shape = tuple[int, ...]


def quantized(rng: np.random.Generator, name: str, shape: Shape, *, exact: bool = False) -> jq.QuantizedArray:
    """Codes over the whole range; a scale of 1, or another one with an odd zero point."""
    low, high = BOUNDS[name]
    ones = (1,) * len(shape)
    values = rng.integers(low, high + 1, shape).astype(dtype(name))
    if exact:
        return jq.QuantizedArray(values, np.ones(ones, np.float32))
    point = np.full(ones, rng.integers(low // 2, high // 2) * 2 + 1, dtype(name))
    return jq.QuantizedArray(values, rng.uniform(0.01, 0.1, ones).astype(np.float32), point)


def plain(x: Any) -> np.ndarray:
    return (dequantized(x.astype(jnp.float32)) if isinstance(x, jq.QuantizedArray) else np.asarray(x)).astype(
        np.float64
    )


def check(actual: Any, subscripts: str, *operands: Any) -> None:
    """numpy's einsum of the dequantized arrays, within the rounding of float32 sums."""
    tables = [plain(x) for x in operands]
    expected = np.einsum(subscripts, *tables)
    size = np.einsum(subscripts, *map(np.abs, tables))
    assert (actual.dtype, actual.shape) == (np.float32, expected.shape)
    assert (np.abs(np.asarray(actual, np.float64) - expected) <= 1e-5 * size + 1e-30).all()


TWO: dict[str, tuple[Shape, Shape]] = {
    "ij,jk->ik": ((3, 4), (4, 5)),
    "ij,jk": ((3, 4), (4, 5)),
    "ij,kj->ki": ((3, 4), (5, 4)),
    "Ab,bA": ((2, 3), (3, 2)),
    "bqhd,bkhd->bhqk": ((2, 3, 4, 5), (2, 6, 4, 5)),
    "bhqk,bkhd->bqhd": ((2, 4, 3, 6), (2, 6, 4, 5)),
    "i,j->ij": ((3,), (4,)),
    "ij,k->kji": ((2, 3), (4,)),
    "ij,ij->": ((3, 4), (3, 4)),
    "ij,ij->ji": ((3, 4), (3, 4)),
    "ij,jk->k": ((3, 4), (4, 5)),
    "ij,kl->": ((3, 4), (2, 5)),
    ",ij->ij": ((), (2, 3)),
    "...ij, ...jk -> ...ik": ((2, 1, 3, 4), (7, 4, 5)),
    "i...,i...": ((3, 2, 1), (3, 1, 4)),
    "...,...": ((2, 1), (1, 3)),
    "ab...->...ba": ((2, 3, 4), ()),
    "ij,jk->ki": ((2, 0), (0, 3)),
    "ij,i->ij": ((0, 3), (0,)),
}
MORE: dict[str, tuple[Shape, ...]] = {
    "ij,jk,kl->li": ((2, 3), (3, 4), (4, 5)),
    "i,i,i->i": ((5,), (5,), (5,)),
    "i,j,k->kij": ((2,), (3,), (4,)),
    "...i,...i,i->...": ((2, 3), (1, 3), (3,)),
    "aij,bjk,ck->abc": ((2, 3, 4), (5, 4, 6), (7, 6)),
    "zij,jzk,kz": ((2, 3, 4), (4, 2, 5), (5, 2)),
    "ij,jk,kl,lm,mn,no,op->ip": ((3, 3),) * 7,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("subscripts", list(TWO))
def test_two_operands(subscripts: str, rng: np.random.Generator) -> None:
    """Both quantized, exactly where the scales are 1; then one of them as floats."""
    shapes = TWO[subscripts][: subscripts.count(",") + 1]
    exact = [quantized(rng, "int8", shape, exact=True) for shape in shapes]
    expected = np.einsum(subscripts, *(np.asarray(q.codes, np.int64) for q in exact))
    actual = jq.einsum(subscripts, *exact)
    assert actual.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(actual), expected)
    operands: list[Any] = [quantized(rng, name, shape) for name, shape in zip(("uint8", "int4"), shapes, strict=False)]
    check(jax.jit(functools.partial(jq.einsum, subscripts))(*operands), subscripts, *operands)
    for i in range(len(shapes) if len(shapes) > 1 else 0):
        mixed = [*operands]
        mixed[i] = rng.standard_normal(shapes[i]).astype(np.float32)
        check(jq.einsum(subscripts, *mixed), subscripts, *mixed)


@pytest.mark.parametrize("subscripts", list(MORE))
def test_more_operands(subscripts: str, rng: np.random.Generator) -> None:
    shapes = MORE[subscripts]
    operands: list[Any] = [quantized(rng, ("int8", "uint8", "uint4")[i % 3], s) for i, s in enumerate(shapes)]
    check(jq.einsum(subscripts, *operands), subscripts, *operands)
    mixed = [x if i == 1 else rng.standard_normal(x.shape).astype(np.float32) for i, x in enumerate(operands)]
    check(jq.einsum(subscripts, *mixed), subscripts, *mixed)


def contractions(subscripts: str, *operands: Any) -> list[str]:
    """The dtypes of every contraction in the program that XLA is given."""
    text = jax.jit(functools.partial(jq.einsum, subscripts)).lower(*operands).as_text()
    lines = [line for line in text.splitlines() if "dot_general" in line]
    return sorted("integer" if re.search(r"-> tensor<.*i32>", line) else "float" for line in lines)


def test_what_is_contracted_in_integers(rng: np.random.Generator) -> None:
    a, b, c = (quantized(rng, "int8", s, exact=True) for s in ((64, 32), (32, 48), (48, 16)))
    x = jnp.ones((48, 80))  # few float rows are contracted in integers too
    assert set(contractions("ij,jk->ki", a, b)) == {"integer"}
    assert contractions("ij,jk->ki", a, jnp.ones((32, 80))) == ["float"]
    together = contractions("ij,jk,kl->il", a, b, c)
    assert together.count("float") == 1, "the third meets what two have become"
    assert "integer" in together
    assert contractions("ij,jk,kl->il", jnp.ones((64, 32)), b, x) == ["float", "float"]


@pytest.mark.slow
def test_scales_along_the_axes(rng: np.random.Generator) -> None:
    """Per axis where it is kept, in blocks where it is contracted."""
    x = rng.standard_normal((2, 6, 3, 8)).astype(np.float32)
    query = jq.quantize(x, jq.QuantSpec(jnp.int8, jq.PerAxis((0, 1, 2))))
    key = jq.quantize(x + 1, jq.QuantSpec(jnp.uint8, jq.PerAxis((0, 2)), symmetric=False))
    check(jq.einsum("bqhd,bkhd->bhqk", query, key), "bqhd,bkhd->bhqk", query, key)
    weights = jq.quantize(x.reshape(12, 24), jq.QuantSpec(jnp.int4, jq.Blocked(1, 8)))
    tokens = jq.quantize(rng.standard_normal((5, 24)).astype(np.float32), jq.QuantSpec(jnp.int8, jq.PerAxis(0)))
    check(jq.einsum("td,fd->tf", tokens, weights), "td,fd->tf", tokens, weights)
    book = jq.quantize(x.reshape(12, 24), jq.QuantSpec(jq.nf4, jq.Blocked(1, 8)))
    check(jq.einsum("td,fd->tf", tokens.dequantize(), book), "td,fd->tf", tokens.dequantize(), book)


def test_one_operand_is_dequantized(rng: np.random.Generator) -> None:
    q = jq.quantize(rng.standard_normal((3, 4)).astype(np.float32), jq.QuantSpec(jq.nf4, jq.PerAxis(0)))
    np.testing.assert_array_equal(jq.einsum("ij->ji", q), dequantized(q).T)
    check(jq.einsum("ij->j", q), "ij->j", q)
    check(jq.einsum("ij->", q), "ij->", q)


def test_diagonal_of_a_float_operand(rng: np.random.Generator) -> None:
    q, x = quantized(rng, "int8", (3,)), rng.standard_normal((3, 2, 3)).astype(np.float32)
    check(jq.einsum("iji,i->ji", x, q), "iji,i->ji", x, q)


def test_dtype_of_the_result(rng: np.random.Generator) -> None:
    a, b = quantized(rng, "int8", (3, 4)), quantized(rng, "uint8", (4, 5))
    wide = np.asarray(jq.einsum("ij,jk->ik", a, b))
    half = jq.einsum("ij,jk->ik", a, b, preferred_element_type=jnp.float16)
    np.testing.assert_array_equal(half, wide.astype(np.float16))
    narrow = [q.astype(jnp.bfloat16) for q in (a, b)]
    assert jq.einsum("ij,jk->ik", *narrow).dtype == jnp.bfloat16
    np.testing.assert_array_equal(jq.einsum("ij,jk->ik", *narrow), wide.astype(jnp.bfloat16))
    assert jq.einsum("ij,jk->ik", a, narrow[1]).dtype == jnp.float32
    # The sum over what one operand alone has is float32's, rounded once.
    alone = np.asarray(jq.einsum("ij,jk->k", a, b))
    np.testing.assert_array_equal(jq.einsum("ij,jk->k", *narrow), alone.astype(jnp.bfloat16))
    assert jq.einsum("ij,jk,kl->il", *narrow, jnp.ones((5, 2), jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.slow
def test_gradients(rng: np.random.Generator) -> None:
    """Of a float operand and of scales, through two contractions."""
    a, b = quantized(rng, "int8", (3, 4)), quantized(rng, "uint8", (4, 5))
    x = rng.standard_normal((5, 2)).astype(np.float32)
    g = rng.standard_normal((2, 3)).astype(np.float32)

    def contract(x: Any, a_scale: Any, b_scale: Any) -> jax.Array:
        return jq.einsum("ij,jk,kl->li", a.replace(scale=a_scale), b.replace(scale=b_scale), x)

    _, pull = jax.vjp(contract, jnp.asarray(x), jnp.asarray(a.scale), jnp.asarray(b.scale))
    dx, da, db = pull(jnp.asarray(g))
    tables = plain(a), plain(b), x.astype(np.float64)
    np.testing.assert_allclose(dx, np.einsum("ij,jk,li->kl", *tables[:2], g), rtol=1e-4, atol=1e-4)
    whole = np.einsum("ij,jk,kl,li->", *tables, g)
    size = np.einsum("ij,jk,kl,li->", *map(np.abs, tables), np.abs(g))
    for actual, q in ((da, a), (db, b)):
        np.testing.assert_allclose(actual[0, 0] * np.float64(q.scale[0, 0]), whole, atol=1e-5 * size)


def test_under_vmap(rng: np.random.Generator) -> None:
    a = quantized(rng, "uint8", (6, 3, 4))
    b = quantized(rng, "int8", (4, 5))
    parts = [a.replace(codes=a.codes[i : i + 1][0], scale=a.scale[0], zero_point=a.zero_point[0]) for i in range(6)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    actual = jax.vmap(functools.partial(jq.einsum, "ij,jk->ki"), in_axes=(0, None))(stacked, b)
    check(actual, "nij,jk->nki", a, b)


Q = jq.QuantizedArray(np.ones((2, 3), np.int8), np.ones((1, 1), np.float32))
ROWS = Q.replace(scale=np.ones((1, 3), np.float32))
F = np.ones((3, 4), np.float32)
REFUSALS: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
    ("ij,jk", (F.T, F), TypeError, "operands: expected a QuantizedArray among them"),
    ("", (), TypeError, "operands: expected a QuantizedArray among them, got none"),
    ("ij,jk", (Q, F.tolist()), TypeError, r"operands\[1\]: expected an array, got list"),
    ("ij,jk", (Q, np.ones((3, 4), np.int8)), TypeError, r"operands\[1\]: expected dtype float32.*, got int8"),
    (F, (Q, F), TypeError, "subscripts: expected a string, got an array"),
    ("ij", (Q, F), ValueError, "subscripts: expected as many terms as operands, 2, got 1"),
    ("ij,jk,kl", (Q, F), ValueError, "subscripts: expected as many terms as operands, 2, got 3"),
    ("ij,j1", (Q, F), ValueError, "subscripts: expected terms of letters"),
    ("ij,j..k", (Q, F), ValueError, "subscripts: expected terms of letters"),
    ("...ij...,jk", (Q, F), ValueError, "subscripts: expected terms of letters"),
    ("ij,jk->i->k", (Q, F), ValueError, "subscripts: expected terms of letters"),
    ("ij,jk->ikl", (Q, F), ValueError, "subscripts: expected an output of distinct indices that the operands have"),
    ("ij,jk->iki", (Q, F), ValueError, "subscripts: expected an output of distinct indices that the operands have"),
    ("...j,jk->k", (Q, F), ValueError, 'subscripts: expected an output with "..."'),
    ("ijk,kl", (Q, F), ValueError, r"operands\[0\]: expected a rank that fits 'ijk', got rank 2"),
    ("ij,...jkl", (Q, F), ValueError, r"operands\[1\]: expected a rank that fits '...jkl', got rank 2"),
    ("ij,ik", (Q, F), ValueError, r"operands\[1\]: expected size 2 of index 'i', as in the operands before"),
    ("i...,j...", (Q, F), ValueError, r'operands\[1\]: expected size 3 under "...", as in the operands before'),
    ("ij,jk", (Q[:, :1], F), ValueError, r"operands\[1\]: expected size 1 of index 'j'"),
    ("ii,ij", (Q[:, :2], Q), ValueError, r"operands\[0\]: expected each index once in a quantized operand"),
    (
        "ij,jk",
        (ROWS, Q.T),
        ValueError,
        r"lhs: expected one scale along the contracted dimension 1.*lhs\.dequantize\(\)",
    ),
]


@pytest.mark.parametrize(("subscripts", "operands", "error", "text"), REFUSALS)
def test_refusals(subscripts: Any, operands: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"jaxquant.einsum: {text}") as raised:
        jq.einsum(subscripts, *operands)
    assert isinstance(raised.value, AssertionError)


def test_refusal_of_a_dtype() -> None:
    with pytest.raises(TypeError, match=r"jaxquant\.einsum: preferred_element_type: expected dtype float32"):
        jq.einsum("ij,jk", Q, F, preferred_element_type=jnp.int32)
