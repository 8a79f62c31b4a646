"""Weight-only contractions in chunks, and of a row whose elements differ by many powers of two."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import QuantizedArray

from ..support.hlo import Program

LIMIT = 2e-6  # relative to the sum of magnitudes, as in `test_weight_only`


def find_error(y: Any, x: np.ndarray, real: np.ndarray) -> float:
    magnitudes = np.abs(x.astype(np.float64)) @ np.abs(real)
    differences = np.abs(np.asarray(y, np.float64) - x.astype(np.float64) @ real)
    return float(np.max(differences / magnitudes))


# The shape of the codes, the shapes of the scale and of the zero point, and the block size. None of the blocks ends
# where a chunk of 2**19 weights would.
CUTS: dict[str, tuple[Any, tuple[int, int], tuple[int, int], tuple[int, int] | None, int | None]] = {
    "one scale": (jnp.int8, (2100, 1024), (1, 1), (1, 1), None),
    "a scale for each row": (jnp.int8, (2100, 1024), (2100, 1), None, None),
    "even blocks": (jnp.uint8, (3000, 1000), (5, 1000), (1, 1000), None),
    "even blocks of two lengths": (jnp.uint8, (3000, 1000), (60, 1000), (75, 1), None),
    "a short last block": (jnp.int8, (2300, 1024), (5, 1), None, 500),
    "blocks of columns": (jnp.int8, (1024, 2300), (1, 5), (1, 5), 500),
    "int4": (jnp.int4, (2100, 1030), (21, 1030), (21, 1), None),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", list(CUTS))
@pytest.mark.parametrize("contracted", [0, 1])
def test_chunks_end_where_blocks_end(name: str, contracted: int, rng: np.random.Generator) -> None:
    dtype, shape, scale_shape, point_shape, block_size = CUTS[name]
    low, high = (int(bound) for bound in (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max))
    codes = rng.integers(low, high + 1, shape)
    scale = rng.uniform(0.5, 2, scale_shape).astype(np.float32)
    points = None if point_shape is None else rng.integers(low, high + 1, point_shape)

    def expand(part: np.ndarray) -> np.ndarray:
        for axis, (entries, length) in enumerate(zip(part.shape, shape, strict=True)):
            run = block_size if block_size and entries not in (1, length) else -(-length // entries)
            part = np.repeat(part, run, axis)[tuple([slice(None)] * axis + [slice(length)])]
        return part

    real = (codes - (0 if points is None else expand(points))) * expand(scale).astype(np.float64)
    q = QuantizedArray(
        jnp.asarray(codes, dtype), jnp.asarray(scale), None if points is None else jnp.asarray(points, dtype),
        block_size=block_size,
    )  # fmt: skip
    x = rng.normal(size=(70, shape[contracted])).astype(np.float32)
    y = jax.jit(lambda x, q: jq.dot_general(x, q, (((1,), (contracted,)), ((), ()))))(x, q)
    assert find_error(y, x, real if contracted == 0 else real.T) < LIMIT


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA of jax 0.10 folds the index behind a barrier")
@pytest.mark.parametrize(("rows", "chunks"), [(20, 16), (70, 8)])
def test_chunks_are_the_same_program(rows: int, chunks: int) -> None:
    """XLA:CPU compiles equal fusions once. Of many chunks at most three differ, which are the first and the last."""
    codes = jax.ShapeDtypeStruct((4096, 4096), jnp.int8)
    q = QuantizedArray(codes, jax.ShapeDtypeStruct((1, 4096), jnp.float32))
    program = Program(lambda x, q: x @ q, jax.ShapeDtypeStruct((rows, 4096), jnp.float32), q)
    bodies = []
    for body in program.computations.values():
        if any(array == ("s8", (4096 // chunks, 4096)) for i in body for array in i.results):
            numbers: dict[str, str] = {}
            text = "\n".join(f"{i.name} {i.results} {i.opcode}" for i in body)
            bodies.append(re.sub(r"[\w-]+\.\d+|^[\w-]+", lambda m, n=numbers: n.setdefault(m[0], str(len(n))), text))
    assert len(bodies) == chunks
    assert len(set(bodies)) <= 3


@pytest.mark.parametrize("side", [0, 1])
def test_weights_with_the_contracted_dimension_last_come_first(side: int) -> None:
    """XLA:CPU contracts a few rows two to three times as fast if weights in this layout are the left operand."""
    q = QuantizedArray(jax.ShapeDtypeStruct((2048, 1024), jnp.int8), jax.ShapeDtypeStruct((2048, 32), jnp.float32))
    x = jax.ShapeDtypeStruct((20, 1024), jnp.float32)
    dimensions = (((1,), (1,)), ((), ()))
    operands = (q, x) if side == 0 else (x, q)
    program = Program(lambda a, b: jq.dot_general(a, b, dimensions), *operands)
    dots = [contraction for contraction in program.contractions() if contraction.opcode == "dot"]
    assert len(dots) == 4
    assert {dot.operands for dot in dots} == {(("f32", (512, 1024)), ("f32", (20, 1024)))}


@pytest.mark.parametrize("stored_last", [None, 0])
@pytest.mark.parametrize("name", ["int4", "uint4", "float4_e2m1fn"])
def test_words_are_unpacked_once(name: str, stored_last: int | None) -> None:
    """The codes of words have 8 bits or more until they are scaled, and are not packed in another form of 4 bits."""
    spec = jq.QuantSpec(name, jq.Blocked(0, 32))
    q = jax.eval_shape(lambda w: jq.quantize(w, spec, stored_last=stored_last).pack(), jnp.ones((2048, 1024)))
    program = Program(jq.matmul, jax.ShapeDtypeStruct((20, 2048), jnp.float32), q)
    results = [array for body in program.computations.values() for i in body for array in i.results]
    assert ("f32", (256, 2048) if stored_last == 0 else (512, 1024)) in results
    narrow = [array for array in results if array[0] in ("s4", "u4", "f4e2m1fn") and np.prod(array[1]) >= 2**19]
    assert narrow == []


@pytest.mark.parametrize("exponent", [-120, -98, -80, -41, -20, 0, 60])
@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_a_row_of_many_magnitudes(name: str, exponent: int, rng: np.random.Generator) -> None:
    """The largest element meets codes of 0, so small elements alone determine the result.

    Products and sums below 2**-126 count as 0 before they are scaled.
    """
    depth, columns = 256, 1024
    codes = rng.integers(1, 16, (depth, columns))
    codes[0] = 7 if name == "nf4" else 0
    levels = np.asarray(jq.nf4.levels, np.float64) if name == "nf4" else np.arange(16.0)
    for scale_exponent in (-50, -10, 20):
        if not -120 < exponent + scale_exponent < 120:
            continue
        scale = (rng.uniform(1, 2, (1, columns)) * 2.0**scale_exponent).astype(np.float32)
        book: dict[str, Any] = {"codebook": jq.nf4} if name == "nf4" else {}
        q = QuantizedArray(jnp.asarray(codes, jnp.uint4 if book else jnp.int8), jnp.asarray(scale), **book)
        x = (rng.uniform(1, 2, (1, depth)) * 2.0**exponent).astype(np.float32)
        x[0, ::7] *= np.float32(2.0**-3)
        x[0, 0] = 3.0
        real = levels[codes] * scale.astype(np.float64)
        magnitudes = x.astype(np.float64) @ np.abs(real)
        error = np.abs(np.asarray(jax.jit(jq.matmul)(x, q)) - x.astype(np.float64) @ real)
        assert np.all(error <= LIMIT * magnitudes + depth * 2.0**-126 * scale), scale_exponent


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("is_last", [False, True], ids=["inputs-outputs", "outputs-inputs"])
@pytest.mark.parametrize("name", ["int4", "int5", "float4_e2m1fn", "int8"])
def test_floats_of_one_layer_at_a_time(name: str, is_last: bool, rows: int) -> None:
    """Weights that are dequantized at once wait for their operand, and reuse the memory of the layer before."""
    spec = jq.QuantSpec(name, jq.Blocked(int(is_last), 32))
    layers = jax.eval_shape(lambda w: [jq.quantize(w, spec)] * 8, jnp.ones((640, 640)))

    def run(x: jax.Array, layers: list[jq.QuantizedArray]) -> jax.Array:
        for q in layers:
            x = jnp.tanh(x @ (q.T if is_last else q))
        return x

    program = Program(run, jax.ShapeDtypeStruct((rows, 640), jnp.float32), layers)
    assert program.memory.temp_size_in_bytes < 1.5 * 4 * 640 * 640


@pytest.mark.parametrize("name", ["uint3", "int4", "int5", "int6"])
def test_words_of_one_layer_in_a_loop(name: str) -> None:
    """A loop over layers unpacks the words of one, once: no array of shifts, and no codes of 4 bits between."""
    layers, size, rows = 6, 640, 64
    spec = jq.QuantSpec(name, jq.Blocked(2, 32))
    q = jax.eval_shape(lambda w: jq.quantize(w, spec).pack(), jnp.ones((1, size, size)))
    stack = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((layers, *leaf.shape[1:]), leaf.dtype), q)

    def run(x: jax.Array, stack: jq.QuantizedArray) -> jax.Array:
        def step(layer: jax.Array, x: jax.Array) -> jax.Array:
            w = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False), stack)
            return jnp.tanh(x @ w.T)

        return jax.lax.fori_loop(0, layers, step, x)

    program = Program(run, jax.ShapeDtypeStruct((rows, size), jnp.float32), stack)
    # The floats, the codes in 8 bits, the words, and three activations.
    assert program.memory.temp_size_in_bytes < (4 + 1 + 1) * size * size + 3 * 4 * rows * size
    assert not re.search(r"\b[su]4\[", program.text)
