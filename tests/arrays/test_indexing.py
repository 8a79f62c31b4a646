"""Indexing, reshaping and transposing take the scale and the zero point along: numpy's answers, bit for bit."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxquant as jq

from ..oracles import array_text
from ..support import inputs, transforms

F32 = np.float32
P: Any = functools.partial


def make_array(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    scale: tuple[int, ...],
    point: tuple[int, ...] | None,
    size: int | None,
) -> tuple[jq.QuantizedArray, np.ndarray]:
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    scales = inputs.scales(rng, scale, np.dtype(F32))
    points = None if point is None else inputs.zero_points(rng, point, "int8")
    q = jq.QuantizedArray(codes, scales, points, block_size=size)
    wide = [None if p is None else array_text.aligned(p, shape, size) for p in (scales, points)]
    assert wide[0] is not None
    return q, array_text.values(codes, wide[0], wide[1], F32)


def check_values(actual: jq.QuantizedArray, expected: np.ndarray) -> None:
    values = np.asarray(actual.dequantize())
    assert values.shape == expected.shape == actual.shape
    assert transforms.mismatches(values, expected) == 0


def check_in_numpy(actual: jq.QuantizedArray, expected: np.ndarray) -> None:
    """The same of the parts, spread in numpy: what so many shapes would take to compile tells no more."""
    codes = np.asarray(actual.codes)
    assert codes.shape == expected.shape
    parts = [None if p is None else np.asarray(p) for p in (actual.scale, actual.zero_point)]
    wide = [None if p is None else array_text.aligned(p, codes.shape, actual.block_size) for p in parts]
    assert wide[0] is not None
    assert transforms.mismatches(array_text.values(codes, wide[0], wide[1], F32), expected) == 0


# shape, scale, zero point, block_size
LAYOUTS: dict[str, tuple[Any, Any, Any, int | None]] = {
    "shared": ((4, 6, 5), (1, 1, 1), (4, 1, 1), None),
    "short blocks": ((4, 6, 5), (4, 6, 2), (1, 6, 1), 3),
    "two block sizes": ((4, 6, 12), (4, 3, 4), (1, 2, 6), None),
    "blocks on two axes": ((4, 6, 5), (1, 2, 2), None, 4),
}
I = np.index_exp  # noqa: E741
MASK = np.arange(24).reshape(4, 6) % 5 == 1
INDICES: dict[str, Any] = {
    "an int": I[2],
    "from the back": I[-1, ..., -3],
    "numpy ints": I[np.int64(1), np.int8(-2)],
    "all": I[:],
    "dots": I[...],
    "nothing": (),
    "whole blocks": I[:, 2:4, 3:],
    "to the end": I[..., 3:],
    "through blocks": I[1:3, 1:4, 2:5],
    "steps": I[::2, ::-1, 1::3],
    "back": I[:, 4:1:-1],
    "nothing left": I[:, 3:3],
    "nothing left of blocks": I[..., 5:2],
    "beyond the end": I[:, 2:99, -99:],
    "new dimensions": I[None, :, None, 2, ..., None],
    "an array": I[np.array([3, 0, -1, 3])],
    "an array on blocks": I[:, np.array([[5, 0], [-1, 2]])],
    "a list": I[[0, 2], ..., [1, 4]],
    "an empty list": I[:, []],
    "two arrays": I[np.array([0, 3]), np.array([[1], [5]])],
    "two arrays apart": I[np.array([0, 3]), :, np.array([4, -1])],
    "three arrays": I[np.array([0, 3]), np.array([5, 1]), np.array([4, -1])],
    "an int and an array apart": I[1, :, np.array([4, -1])],
    "an array and new dimensions": I[None, np.array([1, 2]), None, 1:3],
    "arrays with dots between": I[:, np.array([5, 0, 2]), ..., np.array(1)],
    "an int and an array with dots between": I[3, ..., np.array([[5, 0], [2, 1]]), 1:4],
    "a mask and an array with dots between": I[MASK, ..., np.array([4])],
    "a small dtype": I[np.array([-1, 3], np.int8), np.array([5], np.uint8)],
    "a jax array": I[jnp.array([1, 2]), jnp.array(-1)],
    "a mask": I[np.array([True, False, True, False])],
    "a mask of two": I[MASK],
    "a mask of two and a slice": I[MASK, 1:4],
    "a list of bools": I[:, [True, False, True, True, False, False]],
    "a mask and an array": I[np.array([True, False, True, False]), np.array([1, 5])],
    "an empty mask": I[np.zeros(4, bool), 2:],
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_an_index_picks_what_numpy_picks(rng: np.random.Generator, layout: str) -> None:
    q, want = make_array(rng, *LAYOUTS[layout])
    for index in INDICES.values():
        plain = tuple(np.asarray(i) if isinstance(i, jax.Array) else i for i in index) if index else index
        check_in_numpy(q[index], want[plain])
    check_values(q[:, 1:4], want[:, 1:4])
    check_values(q[2], want[2])
    check_values(q[MASK], want[MASK])
    check_values(q[1:3][:, ::2][0], want[1:3][:, ::2][0])  # what was picked is picked from again
    for row, w in zip(q, want, strict=True):
        check_values(row, w)


@pytest.mark.slow
def test_rank_0_and_empty(rng: np.random.Generator) -> None:
    q, want = make_array(rng, (), (), (), None)
    check_values(q[...], want[...])
    check_values(q[()], want)
    check_values(q[None], want[None])
    q, want = make_array(rng, (0, 6), (1, 3), (0, 1), 2)
    for index in (I[:], I[:, 3:], I[..., -1], I[None, :, ::2], I[:, np.array([5, 1])]):
        check_values(q[index], want[index])


@pytest.mark.slow
def test_slices_of_whole_blocks_keep_the_blocks(rng: np.random.Generator) -> None:
    """A slice along block bounds keeps the blocks; any other gets an entry per index, and no more dimensions do."""
    q, _ = make_array(rng, (4, 12), (4, 4), (4, 1), 3)
    assert q[:, 3:9].scale.shape == (4, 2)
    assert q[1:, 9:].scale.shape == (3, 1)
    assert q[:, 2:9].scale.shape == (4, 7)
    assert q[:, 2:9].zero_point.shape == (4, 1)
    assert q[0].scale.shape == (4,)
    short, _ = make_array(rng, (4, 11), (4, 4), None, 3)
    assert short[:, 6:].scale.shape == (4, 2)
    assert short[:, 6:].block_size == 3
    assert short[:, 3:8].scale.shape == (4, 2)


@pytest.mark.slow
def test_a_traced_index(rng: np.random.Generator) -> None:
    q, expected = make_array(rng, (4, 6, 5), (4, 3, 1), (1, 6, 1), 2)
    actual = jax.jit(lambda q, i, j: q[i, :, j])(q, jnp.array([3, -1]), jnp.array([[0], [4]]))
    check_values(actual, expected[np.array([3, -1]), :, np.array([[0], [4]])])
    check_values(jax.jit(lambda q, i: q[:, i])(q, 5), expected[:, 5])
    check_values(jax.vmap(lambda q, i: q[i], in_axes=(None, 0))(q, jnp.array([1, 0, 3])), expected[np.array([1, 0, 3])])
    stack, expected = make_array(rng, (4, 6, 5), (4, 3, 1), (4, 1, 5), 2)
    check_values(jax.vmap(lambda q: q[1:, 2])(stack), expected[:, 1:, 2])


@pytest.mark.slow
def test_indices_out_of_range_are_clamped_as_in_jax(rng: np.random.Generator) -> None:
    """JAX takes the nearest element for an array's index out of range; the scale must be that element's."""
    q, _ = make_array(rng, (4, 9), (4, 3), (1, 9), 3)
    expected = q.dequantize()
    for index in (np.array([99, -99, 9, -10]), np.array([8, -9])):
        actual = np.asarray(q[:, index].dequantize())
        np.testing.assert_array_equal(actual, expected[:, jnp.asarray(index)])


@pytest.mark.slow
def test_indices_of_every_integer_dtype(rng: np.random.Generator) -> None:
    """The codes and the scale are of the same row, whatever the dtype of the index; uint32 counts to its end."""
    q, want = make_array(rng, (9,), (3,), (9,), 3)
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        largest = min(np.iinfo(dtype).max, 2**31 - 1) if dtype.endswith("64") else np.iinfo(dtype).max
        index = np.array([0, 8, 4, largest], dtype)
        check_in_numpy(q[index], want[[0, 8, 4, 8]])
        check_in_numpy(q[index[1]], want[8])
        check_in_numpy(q[[index[1], index[2]]], want[[8, 4]])
    index = jnp.array([2**32 - 1, 2**31 + 2, 4], jnp.uint32)
    check_in_numpy(q[index], want[[8, 8, 4]])
    check_values(jax.jit(lambda q, i: q[i])(q, index), want[[8, 8, 4]])


@pytest.mark.slow
def test_transposes(rng: np.random.Generator) -> None:
    q, want = make_array(rng, (4, 6, 5), (4, 3, 1), (1, 6, 5), 2)
    for axes in itertools.permutations(range(3)):
        check_values(q.transpose(*axes), want.transpose(axes))
        check_values(q.transpose(axes), want.transpose(axes))
        check_values(q.transpose(*(a - 3 for a in axes)), want.transpose(axes))
    check_values(q.T, want.T)
    check_values(q.transpose(), want.T)
    check_values(q.transpose(None), want.T)
    check_values(q.mT, want.mT)
    check_values(q.mT[:, 1:, ::2].T, want.mT[:, 1:, ::2].T)
    check_values(jax.jit(lambda q: q.transpose(2, 0, 1))(q), want.transpose(2, 0, 1))
    check_values(q[0, 0].T, want[0, 0].T)


RESHAPES: list[tuple[tuple[int, ...], tuple[int, ...], int | None, tuple[int, ...], tuple[int, ...] | None]] = [
    ((4, 6), (1, 1), None, (2, 2, 3, 2), (1, 1, 1, 1)),
    ((4, 6), (1, 1), None, (24,), (1,)),
    ((4, 6), (1, 1), None, (4, 1, 6, 1), (1, 1, 1, 1)),
    ((4, 6), (4, 1), None, (2, 2, 6), (2, 2, 1)),
    ((4, 6), (4, 1), None, (4, 2, 3), (4, 1, 1)),
    ((4, 6), (4, 1), None, (24,), (4,)),
    ((4, 6), (4, 1), None, (8, 3), (4, 1)),
    ((4, 6), (4, 1), None, (2, 12), (2, 2)),
    ((4, 6), (4, 1), None, (6, 4), None),
    ((4, 6), (1, 6), None, (2, 2, 6), (1, 1, 6)),
    ((4, 6), (1, 6), None, (4, 2, 3), (1, 2, 3)),
    ((4, 6), (1, 6), None, (24,), None),
    ((4, 6), (4, 3), 2, (4, 3, 2), (4, 3, 1)),
    ((4, 6), (4, 3), 2, (24,), (12,)),
    ((4, 6), (4, 3), 2, (12, 2), (12, 1)),
    ((4, 7), (4, 3), 3, (4, 1, 7), (4, 1, 3)),
    ((4, 7), (4, 3), 3, (2, 2, 7), (2, 2, 3)),
    ((4, 7), (4, 3), 3, (28,), None),
    ((5, 4), (3, 1), 2, (20,), (3,)),
    ((5, 4), (3, 1), 2, (10, 2), (3, 1)),
    ((5, 4), (3, 1), 2, (4, 5), None),
    ((4, 6), (2, 6), 2, (2, 2, 6), (2, 1, 6)),
    ((2, 3, 4), (2, 3, 4), None, (24,), (24,)),
    ((2, 3, 4), (1, 3, 1), None, (2, 12), (1, 3)),
    ((2, 3, 4), (2, 1, 4), None, (2, 3, 2, 2), (2, 1, 2, 2)),
    ((1, 6), (1, 6), None, (6,), (6,)),
    ((), (), None, (1, 1), (1, 1)),
    ((1, 1), (1, 1), None, (), ()),
    ((0, 6), (1, 1), None, (3, 0), (1, 1)),
    ((0, 6), (1, 6), None, (0, 6), (1, 6)),
]


@pytest.mark.parametrize(("shape", "scale", "size", "new", "entries"), RESHAPES, ids=str)
def test_reshapes(
    rng: np.random.Generator, shape: Any, scale: Any, size: int | None, new: Any, entries: tuple[int, ...] | None
) -> None:
    q, expected = make_array(rng, shape, scale, (1,) * len(shape), size)
    if entries is None:
        message = r"reshape: shape: expected a shape in which elements that share an entry stay adjacent, or q.dequantize\(\).reshape"
        with pytest.raises(ValueError, match=message):
            q.reshape(new)
        return
    for actual in (q.reshape(new), q.reshape(*new), q.reshape(list(new))):
        assert actual.scale.shape == entries
        check_values(actual, expected.reshape(new))
    check_values(jax.jit(lambda q: q.reshape(new))(q), expected.reshape(new))
    if new and 0 not in shape:
        check_values(q.reshape(-1, *new[1:]), expected.reshape(new))


def test_a_reshape_that_leaves_two_block_sizes(rng: np.random.Generator) -> None:
    """Two block sizes are stored if a last block is short, but only one for each dimension."""
    q, want = make_array(rng, (4, 2, 4), (2, 2, 1), (1, 2, 1), 2)
    check_values(q.reshape(4, 8), want.reshape(4, 8))
    for scale, point in (((2, 1, 1), (1, 2, 1)), ((1, 2, 1), (2, 1, 1)), ((2, 2, 1), None)):
        q, want = make_array(rng, (5, 2, 4), scale, point, 3)
        assert q.reshape(5, 8).block_size == (3, 4)
        check_values(q.reshape(5, 8), want.reshape(5, 8))
        check_values(q.reshape(5, 8)[1:, ::-1], want.reshape(5, 8)[1:, ::-1])


def layouts(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], int | None]]:
    """Every scale that an array of this shape can have, with the block size that it needs."""
    pairs = []
    for size in (None, *range(2, max(shape, default=1))):
        dims = []
        for n in shape:
            blocks = [d for d in range(1, n) if n % d == 0] if size is None else [-(-n // size)]
            dims.append(sorted({1, n, *blocks}))
        pairs += [(scale, size) for scale in itertools.product(*dims)]
    return pairs


def can_be_told(groups: np.ndarray, new: tuple[int, ...]) -> bool:
    """Whether some scale in the new shape tells apart what `groups` does, entry for entry, and no more."""
    expected, count = groups.reshape(new), len(np.unique(groups))
    for scale, size in layouts(new):
        if math.prod(scale) != count:
            continue
        entries = array_text.aligned(np.arange(math.prod(scale)).reshape(scale), new, size)
        if np.array_equal(entries, expected):
            return True
    return False


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (2, 3, 4), (12,), (5, 2), (2, 5)], ids=str)
def test_a_reshape_is_refused_only_where_no_scale_says_it(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    """Every scale into every shape of up to three dimensions, against a search through all scales there are."""
    total = math.prod(shape)
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    targets = [s for k in (1, 2, 3) for s in itertools.product(divisors, repeat=k) if math.prod(s) == total]
    reshaped = refused = 0
    for scale, size in layouts(shape):
        if size is not None and size > 4:
            continue
        q = jq.QuantizedArray(
            np.zeros(shape, np.int8), np.arange(1, math.prod(scale) + 1, dtype=F32).reshape(scale), block_size=size
        )
        groups = array_text.aligned(np.arange(math.prod(scale)).reshape(scale), shape, size)
        for new in [targets[i] for i in rng.permutation(len(targets))[:8]]:
            try:
                actual = q.reshape(new)
            except ValueError:
                assert not can_be_told(groups, new), (scale, size, new)
                refused += 1
                continue
            entries = array_text.aligned(np.asarray(actual.scale), new, actual.block_size)
            np.testing.assert_array_equal(entries, groups.reshape(new) + 1)
            reshaped += 1
    assert reshaped
    assert refused


Q = jq.QuantizedArray(jnp.ones((4, 6), jnp.int8), jnp.ones((4, 1)))
ROWS: list[tuple[str, Any, type[Exception], str]] = [
    ("index float", lambda: Q[1.0], TypeError,
     r"__getitem__: index: expected ints, slices, None, an ellipsis.*, got 1.0"),
    ("index text", lambda: Q["a"], TypeError, r"__getitem__: index: expected ints, slices.*, got 'a'"),
    ("index bool", lambda: Q[True], TypeError, r"__getitem__: index: expected ints, slices.*, got True"),
    ("index floats", lambda: Q[np.ones(2)], TypeError,
     r"__getitem__: index: expected ints.*, got an array of float64\[2\]"),
    ("slice float", lambda: Q[1.0:], TypeError, r"__getitem__: index: expected an int, got 1.0"),
    ("too many", lambda: Q[0, 0, 0], ValueError,
     r"__getitem__: index: expected at most 2 dimensions, the rank of the array, got 3"),
    ("two dots", lambda: Q[..., 0, ...], ValueError, r"__getitem__: index: expected at most one ellipsis"),
    *[
        (f"64 bits {i}", P(Q.__getitem__, index), ValueError,
         rf"__getitem__: index: expected integers that int32 can hold, got {value_text}")
        for i, (index, value_text) in enumerate([
            (np.array([2**32 + 1]), "4294967297 \\(int64\\)"),
            (np.array([[0, -(2**31) - 1]]), "-2147483649 \\(int64\\)"),
            (np.array(2**31), "2147483648 \\(int64\\)"),
            (np.array([2**63], np.uint64), "9223372036854775808 \\(uint64\\)"),
            ((slice(None), np.array([2**64 - 1], np.uint64)), "18446744073709551615 \\(uint64\\)"),
            ([2**32 + 1], "4294967297"), ([[0], [2**63]], "9223372036854775808"), ([2**63, -1], "9223372036854775808"),
            ((0, [1, -(2**70)]), str(-(2**70))), ([np.int64(2**32)], "4294967296"), ([True, 2**40], "1099511627776"),
        ])
    ],
    ("an int of 64 bits", lambda: Q[2**32 + 1], IndexError, r"__getitem__: index: expected an int in .*, got 4294967297"),
    ("a scalar of 64 bits", lambda: Q[np.uint64(2**63)], IndexError, r"__getitem__: index: expected an int in .*, got 9"),
    ("a tuple in a tuple", lambda: Q[((2**32, 0),)], TypeError, r"__getitem__: index: expected ints, slices.*, got \(42"),
    ("an uneven list", lambda: Q[[[1], [1, 2]]], ValueError,
     r"__getitem__: index: expected a list whose rows have the same length, got \[\[1\], \[1, 2\]\]"),
    ("a list of text", lambda: Q[["a", 1]], TypeError, r"__getitem__: index: expected ints, slices"),
    ("a list of None", lambda: Q[[None]], TypeError, r"__getitem__: index: expected ints, slices"),
    ("a list of floats", lambda: Q[[0.5, 1]], TypeError, r"__getitem__: index: expected ints, slices"),
    ("beyond", lambda: Q[4], IndexError, r"__getitem__: index: expected an int in \[-4, 3\] for dimension 0, got 4"),
    ("before", lambda: Q[..., -7], IndexError,
     r"__getitem__: index: expected an int in \[-6, 5\] for dimension 1, got -7"),
    ("mask short", lambda: Q[np.ones(3, bool)], IndexError, r"__getitem__: index: expected a mask of shape \(4,\)"),
    ("mask long", lambda: Q[:, np.ones(7, bool)], IndexError, r"__getitem__: index: expected a mask of shape \(6,\)"),
    ("mask turned", lambda: Q[np.ones((6, 4), bool)], IndexError,
     r"__getitem__: index: expected a mask of shape \(4, 6\)"),
    ("mask rank 3", lambda: Q[np.ones((4, 6, 1), bool)], ValueError,
     r"__getitem__: index: expected at most 2 dimensions"),
    ("mask rank 0", lambda: Q[np.array(True)], TypeError,
     r"__getitem__: index: expected a mask of rank 1 or more that is not traced"),
    ("mask traced", lambda: jax.jit(lambda m: Q[m])(np.ones(4, bool)), TypeError,
     r"__getitem__: index: expected a mask of rank 1 or more that is not traced.*, got a traced array of bool\[4\]"),
    ("axes missing", P(Q.transpose, 0), ValueError, r"transpose: axes: expected a permutation of \(0, 1\), got \(0,\)"),
    ("axes twice", P(Q.transpose, 0, 0), ValueError,
     r"transpose: axes: expected a permutation of \(0, 1\), got \(0, 0\)"),
    ("axes beyond", P(Q.transpose, 0, 2), ValueError,
     r"transpose: axes: expected a permutation of \(0, 1\), got \(0, 2\)"),
    ("axes float", P(Q.transpose, 1.0, 0.0), TypeError, r"transpose: axes: expected an int, got 1.0"),
    ("axis float", P(Q.transpose, 1.0), TypeError, r"transpose: axes: expected an int, got 1.0"),
    ("axes bool", P(Q.transpose, True, False), TypeError, r"transpose: axes: expected an int, got True"),
    ("shape float", P(Q.reshape, 24.0), TypeError, r"reshape: shape: expected an int, got 24.0"),
    ("shape None", P(Q.reshape, None), TypeError, r"reshape: shape: expected an int, got None"),
    ("shape too small", P(Q.reshape, 5), ValueError, r"reshape: shape: expected a shape of 24 elements.*, got \(5,\)"),
    ("shape unknown twice", P(Q.reshape, -1, -1), ValueError, r"reshape: shape: expected .*at most one dimension of -1"),
    ("shape negative", P(Q.reshape, -2, 12), ValueError,
     r"reshape: shape: expected a shape of 24 elements.*, got \(-2, 12\)"),
    ("shape that does not divide", P(Q.reshape, -1, 5), ValueError,
     r"reshape: shape: expected a shape of 24 .*, got \(-1, 5\)"),
    ("shape 0", P(Q.reshape, -1, 0), ValueError, r"reshape: shape: expected a shape of 24 elements.*, got \(-1, 0\)"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[row[0].replace(" ", "_") for row in ROWS])
def test_refusals(row: tuple[str, Any, type[Exception], str]) -> None:
    _, call, error, text = row
    with pytest.raises(error, match=rf"jaxquant\.QuantizedArray\.{text}"):
        call()


@pytest.mark.slow
def test_packed_codes_are_picked_as_others(rng: np.random.Generator) -> None:
    codes = rng.integers(-8, 8, (6, 7)).astype(ml_dtypes.int4)
    scale = inputs.scales(rng, (6, 3), np.dtype(F32))
    q = jq.QuantizedArray(codes, scale, block_size=3)
    want = array_text.values(codes, array_text.spread(scale, (1, 3), (6, 7)), None, F32)
    for index in (I[2:5], I[::2, 1:6], I[np.array([5, 0])], I[..., 3]):
        check_values(q[index], want[index])
    check_values(q.T, want.T)
    check_values(q.reshape(2, 3, 7), want.reshape(2, 3, 7))
