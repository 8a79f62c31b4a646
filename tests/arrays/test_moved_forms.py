"""Indexing, joining, reshaping and transposing arrays with offsets, nested scales, permutations and so on.

The result dequantizes to what numpy returns for the floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import QuantizedArray

from ..cases.array_forms import NAMES, check_values, make_array

INDICES: dict[str, Any] = {
    "int": 2, "ints": (1, -3), "int last": (..., 5), "whole blocks": (slice(None), slice(4, 12)),
    "through blocks": (slice(1, 5), slice(3, 20)), "short block": (slice(None), slice(16, None)),
    "steps": (slice(None, None, -1), slice(None, None, 3)), "none": slice(2, 2), "new axis": (None, slice(None), None),
    "rows": np.array([3, 0, -1]), "matrix of rows": np.array([[3, 0], [1, 5]]), "columns": (slice(None), [7, -2, 7]),
    "both": (np.array([0, 5]), np.array([21, 4])), "row mask": np.arange(6) % 2 == 0,
    "column mask": (slice(None), np.arange(22) % 3 == 1), "int and slice": (3, slice(2, 9)),
    "rows and slice": (np.array([1, 4]), slice(None)),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", INDICES)
def test_indexing(name: str, index: str, rng: np.random.Generator) -> None:
    q, values = make_array(name, rng)
    item = INDICES[index]
    check_values(q[item].dequantize(), values[tuple(item) if isinstance(item, tuple) else item])
    if "mask" not in index:
        check_values(jax.jit(lambda q: q[item].dequantize())(q), values[item])


MOVES: dict[str, tuple[Callable[[QuantizedArray], QuantizedArray], Callable[[np.ndarray], np.ndarray]]] = {
    "transpose": (lambda q: q.T, lambda x: x.T),
    "transpose twice": (lambda q: q.T.mT, lambda x: x),
    "of a stored order": (lambda q: q.store_last(0).T, lambda x: x.T),
    "row of a transpose": (lambda q: q.T[3], lambda x: x.T[3]),
    "swapaxes": (lambda q: q.reshape(2, 3, 22).swapaxes(0, 2), lambda x: x.reshape(2, 3, 22).swapaxes(0, 2)),
    "new axes": (lambda q: q.reshape(6, 1, 22, 1)[:, 0, :, 0], lambda x: x),
    "iterate": (lambda q: list(q)[4], lambda x: x[4]),
    "through a pytree": (lambda q: jax.tree.map(jnp.asarray, q.T), lambda x: x.T),
    "per index": (lambda q: q.per_index(0), lambda x: x),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("move", MOVES)
def test_moves(name: str, move: str, rng: np.random.Generator) -> None:
    q, values = make_array(name, rng)
    if move == "swapaxes" and name == "block sizes":  # blocks of four rows cannot be divided among two times three
        with pytest.raises(ValueError, match="elements that share an entry"):
            MOVES[move][0](q)
        return
    moved, expected = MOVES[move]
    check_values(moved(q).dequantize(), expected(values))
    check_values(jax.jit(lambda q: moved(q).dequantize())(q), expected(values))


@pytest.mark.parametrize("name", NAMES)
def test_mapped_rows(name: str, rng: np.random.Generator) -> None:
    """With an entry for each row, jax.vmap and jax.lax.scan see arrays of one row."""
    q, values = make_array(name, rng)
    rows = q.per_index(0)
    check_values(jax.vmap(QuantizedArray.dequantize)(rows), values)
    check_values(jax.lax.scan(lambda _, row: (None, row.dequantize()), None, rows)[1], values)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", [0, 1])
def test_concatenate(name: str, axis: int, rng: np.random.Generator) -> None:
    (p, left), (q, right) = make_array(name, rng), make_array(name, rng)
    if p.permutation is not None:
        with pytest.raises(ValueError, match=r"concatenate: arrays\[0\]\.permutation: expected None"):
            jq.concatenate([p, q], axis)
        return
    check_values(jq.concatenate([p, q], axis).dequantize(), np.concatenate([left, right], axis))
    check_values(jq.concatenate([p[:, :8], q], 1).dequantize(), np.concatenate([left[:, :8], right], 1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", [0, 1])
def test_take(name: str, axis: int, rng: np.random.Generator) -> None:
    q, values = make_array(name, rng)
    batches: list[np.ndarray | int] = [np.array([[3, 0], [-1, 5]]), 2, np.array([1, 99])]
    for indices in batches:
        expected = np.take(values, np.clip(indices, -6, 5), axis)
        if isinstance(indices, np.ndarray) and 99 in indices:
            expected = np.moveaxis(np.moveaxis(expected, axis, 0) * np.array([[1], [np.nan]], np.float32), 0, axis)
        y = jq.take(q, indices, axis)
        np.testing.assert_array_equal(np.asarray(y), expected)


def test_join_refusals(rng: np.random.Generator) -> None:
    pairs = {name: make_array(name, rng)[0] for name in ("offset", "nested scale", "signed", "nested offset")}
    for name, field in (("nested scale", "scale"), ("signed", "signed_scale"), ("nested offset", "offset")):
        with pytest.raises((TypeError, ValueError), match=rf"concatenate: arrays\[1\]\.{field}: expected"):
            jq.concatenate([pairs["offset"], pairs[name]])
