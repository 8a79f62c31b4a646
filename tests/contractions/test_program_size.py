"""The number of operations in the program of one product: XLA takes the longer to compile the more there are."""

import jax
import jax.numpy as jnp
import pytest

import jaxquant as jq

from ..support.hlo import Program, buffers_of

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax 0.10 has other forms for one row")


@pytest.mark.parametrize(
    ("dtype", "block", "stored_last", "most"),
    [
        ("int8", None, None, 130),
        ("int8", None, 0, 180),
        ("int8", 32, None, 130),
        ("int4", 32, None, 350),
        ("int5", 32, 0, 500),
    ],
)
def test_one_row(dtype: str, block: int | None, stored_last: int | None, most: int) -> None:
    """The limits lie above today's numbers, and below those of programs with more operations for each row.

    An int4 program cuts out each row of words: LLVM does not vectorize it otherwise. One of int5 has three times the
    operations of a loop over groups here, because 20 groups are read as three vectors.
    """
    spec = jq.QuantSpec(dtype, jq.PerAxis(1) if block is None else jq.Blocked(0, block))
    q = jax.eval_shape(lambda w: jq.quantize(w, spec, stored_last=stored_last), jnp.ones((640, 1024)))
    program = Program(jq.matmul, jax.ShapeDtypeStruct((1, 640), jnp.float32), q)
    assert sum(len(body) for body in program.computations.values()) <= most


@pytest.mark.parametrize(("dtype", "block"), [("int8", None), ("int8", 32), ("int4", 32), ("int5", 32)])
def test_equal_products_are_compiled_once(dtype: str, block: int | None) -> None:
    """XLA:CPU compiles equal loops of a program once, and each product with a vector of ones by itself."""
    spec = jq.QuantSpec(dtype, jq.PerAxis(0) if block is None else jq.Blocked(1, block))
    q = jax.eval_shape(lambda w: jq.quantize(w, spec), jnp.ones((1024, 640)))
    q = jax.eval_shape(lambda q: q.pack(), q) if dtype == "int4" else q
    program = Program(lambda x, q: x @ q.T, jax.ShapeDtypeStruct((1, 640), jnp.float32), q)
    assert not [i for body in program.computations.values() for i in body if i.opcode == "dot"]


@pytest.mark.parametrize("dtype", ["int8", "int4", "int5"])
@pytest.mark.parametrize("scale_dtype", ["float32", "float16"])
def test_a_transpose_is_undone(dtype: str, scale_dtype: str) -> None:
    """The scale is read as it is in memory, whichever way a product with the transpose is written."""
    spec = jq.QuantSpec(dtype, jq.Blocked(1, 32), scale_dtype=scale_dtype)
    x = jax.ShapeDtypeStruct((1, 576), jnp.float32)
    q = jax.eval_shape(lambda w: jq.quantize(w, spec), jnp.ones((1536, 576)))
    for array in (q, jax.eval_shape(lambda q: q.pack(), q)) if dtype == "int4" else (q,):
        for function in (
            lambda x, q: x @ q.T,
            lambda x, q: jq.dot_general(x, q.T, (((1,), (0,)), ((), ()))),
            lambda x, q: jq.dot_general(x, q, (((1,), (1,)), ((), ()))),
            lambda x, q: (q @ x.T).T,
        ):
            program = Program(function, x, array)
            shapes = {shape for i in program.in_memory() for _, shape in buffers_of(i)}
            assert (18, 1536) not in shapes


def test_chunks_of_words_have_two_dimensions() -> None:
    """XLA:CPU copies a slice of words code by code if the copy has three dimensions, which takes five times as long."""
    q = jax.eval_shape(lambda w: jq.quantize(w, jq.QuantSpec("int4", jq.Blocked(0, 32))), jnp.ones((4096, 4096)))
    program = Program(jq.matmul, jax.ShapeDtypeStruct((1, 4096), jnp.float32), q)
    words = [shape for i in program.in_memory() for dtype, shape in buffers_of(i) if dtype in ("s32", "u32")]
    assert words.count((1024, 512)) == 4
    assert all(len(shape) <= 2 for shape in words)


@pytest.mark.parametrize("block", [16, 32])
def test_entries_of_layers_are_written_in_one_dimension(block: int) -> None:
    """XLA:CPU slices and converts rows of 18 or 36 entries one by one, and one long row of them by vectors."""
    spec = jq.QuantSpec("int4", jq.Blocked(-1, block), symmetric=False, scale_dtype="float16")
    q = jax.eval_shape(jax.vmap(lambda w: jq.quantize(w, spec).pack()), jnp.ones((3, 1536, 576)))
    program = Program(lambda x, q: jax.lax.map(lambda q: x @ q.T, q), jax.ShapeDtypeStruct((1, 576), jnp.float32), q)
    found = {(dtype, shape) for i in program.in_memory() for dtype, shape in buffers_of(i)}
    each, rows = 32 // block, 1536 * 18
    assert (1536, 18 * each) not in {shape for _, shape in found}
    # The scale, whose entries are copied in another order if a group has several, and the converted zero point.
    assert {("f16", (rows,) if each == 1 else (1, each, rows)), ("f32", (1, each, rows))} <= found
    assert ("s8", (each * rows,)) not in found
