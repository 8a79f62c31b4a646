"""Quantized safetensors files of other programs: their codes, their floats, and the same bytes when they are saved."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import checkpoint

from ..cases.family_files import FAMILIES, Family
from ..oracles.file_formats import Parts
from ..support import equality


def check_parts(q: jq.QuantizedArray, parts: Parts) -> None:
    """Compare codes, and the numbers of scales, zero points and offsets, with those of the file."""
    codes = np.asarray(q.codes)
    assert codes.shape == parts.codes.shape
    np.testing.assert_array_equal(codes.astype(np.float32), parts.codes.astype(np.float32))
    for part, expected in ((q.zero_point, parts.zero_point), (q.permutation, parts.permutation)):
        assert (part is None) == (expected is None)
        if part is not None:
            np.testing.assert_array_equal(np.asarray(part).astype(np.float32), np.asarray(expected).astype(np.float32))
    for part, expected in ((q.scale, parts.scale), (q.offset, parts.offset)):
        if isinstance(expected, Parts):
            assert isinstance(part, jq.QuantizedArray)
            check_parts(part, expected._replace(offset=None))
        elif expected is not None:
            equality.same_bits(part, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_files(rng: np.random.Generator, tmp_path: pathlib.Path, name: str) -> None:
    """The arrays have the codes and the floats of the file, and saving them writes the same bytes."""
    family: Family = FAMILIES[name]
    tensors, parts = family.make(rng)
    family.write(tmp_path / "model", tensors)
    loaded, info = checkpoint.load(tmp_path / "model")
    assert info.format == family.format
    q = loaded[family.weight]
    assert isinstance(q, jq.QuantizedArray)
    check_parts(q, parts)
    expected = family.compute_values(parts)
    equality.same_bits(q.dequantize(), expected)
    equality.same_bits(jax.jit(lambda q: q.dequantize())(q), expected)
    for plain in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        equality.same_bits(loaded[plain], tensors[plain])
    checkpoint.save(tmp_path / "again", loaded, info)
    for file in (tmp_path / "model").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
