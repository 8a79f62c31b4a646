"""Rows of integer codes times weights in words: exact sums, and programs that write no code of the weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant._kernels import float_rows

from ..support.hlo import Program, buffers_of

FORMATS = ("int2", "uint2", "int3", "uint3", "int4", "uint4", "int5", "uint5", "int6", "uint6")
on_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not float_rows.IS_VECTORIZED, reason="the form is a CPU's, with jax 0.12"
)


def read_bounds(name: str) -> tuple[int, int]:
    bits, is_signed = int(name[-1]), not name.startswith("u")
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)


def make_words(codes: np.ndarray, name: str, zero_point: np.ndarray | None = None, axis: int = 0) -> jq.QuantizedArray:
    """Return a matrix of a format in words along its last dimension, with a scale of 1 for each index of an axis."""
    carrier = name if name[-1] in "24" else "uint8" if name.startswith("u") else "int8"
    scale = jnp.ones([n if i == axis else 1 for i, n in enumerate(codes.shape)], jnp.float32)
    point = None if zero_point is None else jnp.asarray(zero_point, carrier)
    return jq.QuantizedArray(jnp.asarray(codes, carrier), scale, point).pack(name if carrier != name else None)


def make_row(codes: np.ndarray, dtype: str, zero_point: int = 0) -> jq.QuantizedArray:
    """Return codes with a scale of 1."""
    point = jnp.full((1, 1), zero_point, dtype) if zero_point else None
    return jq.QuantizedArray(jnp.asarray(codes, dtype), jnp.ones((1, 1), jnp.float32), point)


def sample_codes(rng: np.random.Generator, name: str, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Return codes of a format, or only its lowest, its highest or both."""
    low, high = {"int8": (-128, 127), "uint8": (0, 255)}.get(name) or read_bounds(name)
    choices = {"random": np.arange(low, high + 1), "low": [low], "high": [high], "ends": [low, high]}[kind]
    return rng.choice(choices, shape)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("row_dtype", ["int8", "uint8"])
@pytest.mark.parametrize("centered", ["none", "weights", "row", "both"])
@pytest.mark.parametrize("order", ["x q.T", "q x", "x q"])
@pytest.mark.parametrize("kind", ["random", "low", "high", "ends"])
def test_sums_are_exact(
    name: str, row_dtype: str, centered: str, order: str, kind: str, rng: np.random.Generator
) -> None:
    """Against numpy's int64, at the largest depth that the kernel takes and beyond it."""
    low, high = read_bounds(name)
    has_point, row_has_point = centered in ("weights", "both"), centered in ("row", "both")
    largest = high - low if has_point else max(-low, high)
    most = 2**24 // (largest * (256 if row_has_point or row_dtype == "uint8" else 128))
    longest = min(most // 32 * 32, 16384)
    for depth, columns in ((640, 96), (longest, 2**15 // longest + 8), (longest + 32, 2**15 // longest + 8)):
        codes = sample_codes(rng, name, (columns, depth), kind)
        points = rng.integers(low, high + 1, (columns, 1)) if has_point else None
        row = sample_codes(rng, row_dtype, (1, depth), kind)
        point = int(rng.integers(1, 100)) if row_has_point else 0
        weights = codes - (0 if points is None else points)
        expected = (row.astype(np.int64) - point) @ weights.T.astype(np.int64)
        x, q = make_row(row, row_dtype, point), make_words(codes, name, points)
        function = {"x q.T": lambda x, q: x @ q.T, "q x": lambda x, q: (q @ x.T).T, "x q": lambda x, q: x @ q}[order]
        if order == "x q":  # words along the dimension that is not contracted
            q = make_words(codes.T, name, None if points is None else points.T, axis=1)
        for found in (function(x, q), jax.jit(function)(x, q), jax.jit(lambda x, q=q, f=function: f(x, q))(x)):
            # A sum above 2**24 is rounded when it becomes a float.
            np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_sums_that_floats_do_not_hold(rng: np.random.Generator) -> None:
    """Positive products come first, and negative ones take most of their sum away, above 2**24 in each lane."""
    depth = 2**20
    row = 127 - rng.integers(0, 2, (1, depth))
    positive, negative = 7 - rng.integers(0, 2, (2, depth)), -8 + rng.integers(0, 2, (2, depth))
    codes = np.where(np.arange(depth) < depth * 8 // 15, positive, negative)
    x, q = make_row(row, "int8"), make_words(codes, "int4")
    expected = row.astype(np.int64) @ codes.T
    assert np.abs(expected).max() < 2**24
    for found in (x @ q.T, jax.jit(lambda x, q: x @ q.T)(x, q)):
        np.testing.assert_array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize("name", ["int4", "uint5"])
def test_scales_biases_and_outputs(name: str, rng: np.random.Generator) -> None:
    """The results of the array without words, bit for bit: under vmap and scan, and as codes."""
    spec = jq.QuantSpec(name, jq.PerAxis(0), symmetric=name == "int4")
    q = (
        jq.quantize(rng.normal(size=(256, 640)).astype(np.float32), spec).pack()
        if name == "int4"
        else jq.quantize(rng.normal(size=(256, 640)).astype(np.float32), spec)
    )
    plain = q.unpack()
    rows = rng.normal(size=(5, 1, 640)).astype(np.float32)
    bias = jnp.asarray(rng.integers(-900, 900, 256), jnp.int32)
    output = jq.Quantizer(jq.QuantSpec(jnp.uint8), 0.5, 120)

    def multiply(row: Any, q: Any) -> Any:
        x = jq.quantize(row, jq.QuantSpec("int8", jq.PerToken()))
        fixed = jq.quantize(row, jq.QuantSpec("uint8", symmetric=False), range=(-4.0, 4.0))
        return x @ q.T, jq.matmul(fixed, q.T, bias=bias, output=output).codes

    expected = [jax.jit(multiply)(row, plain) for row in rows]
    found = [
        [jax.jit(multiply)(row, q) for row in rows],
        [multiply(row, q) for row in rows],
        list(zip(*jax.jit(jax.vmap(multiply, (0, None)))(rows, q), strict=True)),
        list(zip(*jax.jit(lambda r, q: jax.lax.scan(lambda c, x: (c, multiply(x, q)), 0, r)[1])(rows, q), strict=True)),
        list(zip(*jax.jit(jax.vmap(multiply))(rows, jax.tree.map(lambda x: jnp.stack([x] * 5), q)), strict=True)),
    ]
    for results in found:
        for pair, theirs in zip(results, expected, strict=True):
            for mine, other in zip(pair, theirs, strict=True):
                np.testing.assert_array_equal(mine, other)


@on_cpu
@pytest.mark.parametrize("name", ["int4", "uint4", "int6"])
@pytest.mark.parametrize("layers", [0, 3])
def test_no_code_is_written_to_memory(name: str, layers: int, rng: np.random.Generator) -> None:
    """Neither for one matrix nor in a loop over several, which copies the words of one."""
    q = make_words(sample_codes(rng, name, (512, 1024), "random"), name)
    q = jax.tree.map(lambda x: jnp.stack([x] * layers), q) if layers else q

    def multiply(x: Any, q: Any) -> Any:
        return (jq.quantize(x, jq.QuantSpec("int8", jq.PerToken())) @ q.T)[:, :512]

    def run(x: Any, q: Any) -> Any:
        return (
            jax.lax.scan(lambda x, q: (jnp.tile(multiply(x, q), (1, 2)), None), x, q)[0] if layers else multiply(x, q)
        )

    program = Program(run, jax.ShapeDtypeStruct((1, 1024), jnp.float32), q)
    words = 512 * 1024 * int(name[-1]) // 8
    # Words of two planes have a sum for each word.
    assert program.memory.temp_size_in_bytes < words + 2**17 + 2**18 * (name == "int6")
    written = [shape for i in program.in_memory() for shape in buffers_of(i)]
    assert not [shape for shape in written if shape[0] in ("s8", "u8", "s4", "u4") and np.prod(shape[1]) >= 512 * 256]


@on_cpu
def test_several_rows_are_unpacked_once(rng: np.random.Generator) -> None:
    """To int8, and not to 4 bits, which XLA:CPU would pack once more."""
    q = make_words(sample_codes(rng, "int4", (512, 1024), "random"), "int4")
    x = make_row(sample_codes(rng, "int8", (8, 1024), "random"), "int8")
    program = Program(lambda x, q: x @ q.T, x, q)
    written = [shape for i in program.in_memory() for shape in buffers_of(i)]
    assert sum(np.prod(shape[1]) == 512 * 1024 for shape in written) == 1
    assert not [shape for shape in written if shape[0] in ("s4", "u4")]
