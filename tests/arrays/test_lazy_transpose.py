"""Transposes of quantized arrays move no code in memory, and every function returns what it returns without that."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import Blocked, PerAxis, QuantizedArray, QuantSpec, checkpoint, distributed

from ..support.equality import same_bits
from ..support.hlo import Program
from ..support.quantized_arrays import dequantized, product

F32 = np.float32
SPECS = {
    "int8": QuantSpec("int8", PerAxis(0)),
    "int8 tensor": QuantSpec("int8"),
    "uint8 blocks": QuantSpec("uint8", Blocked(-1, 4)),
    "int4": QuantSpec("int4", PerAxis(0)),
    "int4 blocks": QuantSpec("int4", Blocked(-1, 4)),
    "int2": QuantSpec("int2", PerAxis(0)),
    "nf4": QuantSpec(jq.nf4, Blocked(-1, 4)),
    "float8": QuantSpec("float8_e4m3fn", PerAxis(0)),
    "bfloat16 scales": QuantSpec("int8", PerAxis(0), scale_dtype=jnp.bfloat16),
}
TURNS: dict[str, Callable[[QuantizedArray], QuantizedArray]] = {
    "T": lambda q: q.T,
    "mT": lambda q: q.mT,
    "swapaxes": lambda q: q.swapaxes(0, -1),
    "transpose": lambda q: q.transpose(1, 0),
    "jq.codes.transpose": lambda q: jq.codes.transpose(q, (-1, 0)),
}
DOTS: dict[str, Callable[[Any, QuantizedArray], jax.Array]] = {
    "@": lambda x, w: x @ w,
    "matmul": jq.matmul,
    "einsum": lambda x, w: jq.einsum("bd,dv->bv", x, w),
    "dot_general": lambda x, w: jq.dot_general(x, w, (((1,), (0,)), ((), ()))),
    "on the left": lambda x, w: jq.dot_general(w, x, (((0,), (1,)), ((), ()))).T,
}


def in_order(q: QuantizedArray, order: tuple[int, ...]) -> QuantizedArray:
    """Return q with its dimensions in another order, and its codes transposed by numpy."""
    parts = (q.codes, q.scale, q.zero_point)
    turned = [None if part is None else jnp.asarray(np.asarray(part).transpose(order)) for part in parts]
    return QuantizedArray(*turned, dtype=q.dtype, block_size=q.block_size, codebook=q.codebook)


def make_array(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> QuantizedArray:
    return jq.quantize(rng.normal(size=shape).astype(F32), SPECS[name])


def same_trees(actual: Any, expected: Any) -> None:
    """Check that two results have the same structure, static attributes included, and the same bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype
        is_plain = jnp.asarray(b).dtype.isbuiltin == 1
        same_bits(*(np.asarray(v if is_plain else v.astype(F32)) for v in (a, b)))


@pytest.mark.sample(6)
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("dot", DOTS)
def test_no_code_moves_in_a_compiled_product(dot: str, turn: str, rng: np.random.Generator) -> None:
    """The program of `x @ q.T` is that of the contraction along q's last axis: its buffers are as small."""
    q = make_array(rng, "int8", (1024, 256))
    for x in (jnp.ones((1, 256)), jq.quantize(jnp.ones((3, 256)), QuantSpec("uint8", jq.PerToken()))):
        along_last = Program(lambda x, q: jq.einsum("bd,vd->bv", x, q), x, q)
        check_nothing_moves(Program(lambda x, q: DOTS[dot](x, TURNS[turn](q)), x, q), along_last, q)


def check_nothing_moves(program: Program, along_last: Program, q: QuantizedArray) -> None:
    """Check that no instruction transposes or copies q's codes, and that the buffers are those of another program."""
    moved = [
        i
        for body in program.computations.values()
        for i in body
        if i.opcode in ("transpose", "copy") and any(math.prod(shape) >= q.size for _, shape in i.results)
    ]
    assert not moved
    # The other operand and the result may be transposed, which are small.
    assert program.memory.temp_size_in_bytes < along_last.memory.temp_size_in_bytes + q.nbytes / 4


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SPECS)
def test_every_format_is_contracted_where_it_is(name: str, rng: np.random.Generator) -> None:
    q = make_array(rng, name, (1024, 256))
    x = jnp.asarray(rng.normal(size=(2, 256)), F32)
    along_last, turned = jax.jit(lambda x, q: jq.einsum("bd,vd->bv", x, q)), jax.jit(lambda x, q: x @ q.T)
    same_bits(np.asarray(turned(x, q)), np.asarray(along_last(x, q)))
    programs = [Program(f, x, q) for f in (along_last, turned)]
    assert programs[1].memory.temp_size_in_bytes <= programs[0].memory.temp_size_in_bytes
    np.testing.assert_allclose(
        turned(x, q), np.asarray(x, np.float64) @ dequantized(q).astype(np.float64).T, 1e-4, 1e-3
    )


@pytest.mark.parametrize("name", ["int8", "uint8 blocks", "int4 blocks"])
def test_integer_products(name: str, rng: np.random.Generator) -> None:
    q, x = make_array(rng, name, (24, 16)), jq.quantize(rng.normal(size=(5, 16)).astype(F32), QuantSpec("uint8"))
    numbers = (((1,), (0,)), ((), ()))
    expected = product(x, in_order(q, (1, 0)), numbers, 4 if "blocks" in name else None)
    call = lambda x, q: x @ q.T  # noqa: E731
    rows = jax.tree.map(lambda part: jnp.stack([part, part]), x)
    same_bits(np.asarray(call(x, q)), expected)
    same_bits(np.asarray(jax.jit(call)(x, q)), expected)
    for y in (jax.vmap(call, (0, None))(rows, q), lax.map(lambda x: call(x, q), rows)):
        same_bits(np.asarray(y), np.stack([expected, expected]))
    # Mapped weights: the axis in front keeps its place.
    both = jax.tree.map(lambda part: jnp.stack([part, part]), q)
    same_bits(np.asarray(jax.vmap(call, (None, 0))(x, both)), np.stack([expected, expected]))
    _, y = lax.scan(lambda carry, q: (carry, x @ q.mT), 0, both)
    same_bits(np.asarray(y), np.stack([expected, expected]))


METHODS: dict[str, Callable[[QuantizedArray], Any]] = {
    "tree": lambda q: q,
    "codes": lambda q: (q.codes, q.values, q.stored_codes, q.scale, q.zero_point),
    "dequantize": lambda q: q.dequantize(),
    "astype": lambda q: q.astype(jnp.bfloat16),
    "replace": lambda q: [q.replace(codes=q.codes[::-1]), q.replace(scale=q.scale + q.scale)],
    "transposes": lambda q: [q.transpose(order) for order in itertools.permutations(range(3))],
    "reshape": lambda q: [q.reshape((1, *q.shape)), q.reshape((*q.shape, 1))],
    "per_index": lambda q: [q.per_index(axis) for axis in range(3)],
    "store_last": lambda q: [q.store_last(), q.store_last(0), q.store_last(1), q.store_last(2, 0)],
    "iterate": lambda q: list(q),
    "index": lambda q: [
        q[1],
        q[:, 1],
        q[..., 1],
        q[1:, ::2],
        q[None, :, 1:],
        q[np.array([1, 0])],
        q[..., jnp.array([1])],
    ],
    "concatenate": lambda q: [jq.concatenate([q, q], axis) for axis in range(3)],
    "concatenate others": lambda q: [jq.concatenate([q, q.replace(codes=q.codes)], axis) for axis in range(3)],
    "take": lambda q: [jq.take(q, jnp.array([1, -1, 9]), axis) for axis in range(3)],
    "vmap": lambda q: [jax.vmap(lambda q: q.dequantize(), axis)(q.per_index(axis)) for axis in range(3)],
    "scan": lambda q: lax.scan(lambda c, q: (c, q), 0, q.per_index(0))[1],
    "branches": lambda q: lax.cond(q.scale.sum() > 0, lambda: q, lambda: q.replace(codes=q.codes)),
    "jit": lambda q: jax.jit(lambda q: q)(q),
}
EAGER: dict[str, Callable[[QuantizedArray], Any]] = {
    "copies": lambda q: [copy.copy(q), copy.deepcopy(q), pickle.loads(pickle.dumps(q))],
    "arrays": lambda q: [checkpoint.to_arrays(q), checkpoint.from_arrays(checkpoint.to_arrays(q))],
    "error": lambda q: list(jq.quantization_error(jnp.ones(q.shape), q)),
    "text": lambda q: [len(repr(q)), q.nbytes, q.size],
    "export": lambda q: export.export(jax.jit(lambda q: q.mT))(q).call(q),
    "leaves": lambda q: [jnp.stack(parts) for parts in zip(*map(jax.tree.leaves, (q, q)), strict=True)],
    "device_put": lambda q: jax.device_put(q, jax.devices()[0]),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[1:], ids=str)
@pytest.mark.parametrize("name", ["int8", "uint8 blocks", "int4", "nf4"])
def test_methods_return_what_they_return_for_transposed_codes(
    name: str, order: tuple[int, ...], rng: np.random.Generator
) -> None:
    q = make_array(rng, name, (4, 6, 8))
    turned, expected = q.transpose(order), in_order(q, order)
    for method, call in {**EAGER, **METHODS}.items():
        with jax.named_scope(method):
            same_trees(call(turned), call(expected))
    assert repr(turned) == repr(expected)
    assert turned.stored_order is None

    def run(q: QuantizedArray) -> Any:
        return {method: call(q) for method, call in METHODS.items()}

    same_trees(jax.jit(lambda q: run(q.transpose(order)))(q), run(expected))


def test_a_chosen_order_stays(rng: np.random.Generator) -> None:
    """An order that the user has chosen is that of the tree, as it was; so is one chosen for a transpose."""
    q = make_array(rng, "int8", (4, 6))
    stored = q.store_last(0)
    assert stored.T.stored_order is None
    assert q.T.store_last(0).stored_order == (-1, -2)
    assert q.T.store_last(0).stored_codes is q.stored_codes
    assert jax.tree.leaves(q.T)[0].shape == (6, 4)
    same_trees(
        jq.concatenate([q.T.store_last(0), q.T.store_last(0)]).store_last(), in_order(jq.concatenate([q, q], 1), (1, 0))
    )


def test_the_transpose_is_carried_out_once(rng: np.random.Generator) -> None:
    turned = make_array(rng, "int8", (4, 6)).T
    assert turned.codes is turned.codes is turned.stored_codes is jax.tree.leaves(turned)[0]


def test_a_transpose_outlives_a_trace(rng: np.random.Generator) -> None:
    """What a trace computes of a transpose is not kept in an array that outlives it."""
    turned = make_array(rng, "int8", (4, 6)).T
    for read in (lambda q: q.codes, lambda q: q.stored_codes, lambda q: jax.tree.leaves(q)[0], lambda q: q.codes):
        codes = jax.jit(lambda x, read=read: x + read(turned))(jnp.zeros((6, 4), jnp.int8))
        same_bits(codes, np.asarray(turned.codes))


def test_shardings_are_of_the_logical_order(rng: np.random.Generator) -> None:
    mesh = jax.make_mesh((2,), ("a",))
    q = make_array(rng, "int8 tensor", (8, 6))
    placed = jax.device_put(q.T, NamedSharding(mesh, PartitionSpec()))
    rows = placed.replace(codes=jax.device_put(placed.codes, NamedSharding(mesh, PartitionSpec("a", None))))
    assert [shard.data.shape for shard in rows.codes.addressable_shards] == [(3, 8), (3, 8)]
    x = jnp.asarray(rng.normal(size=(5, 6)), F32)
    want = jax.jit(lambda q: q.T.dequantize())(rows)
    same_bits(np.asarray(want), dequantized(q))
    np.testing.assert_allclose(jax.jit(lambda x, q: x @ q)(x, rows), np.asarray(x) @ dequantized(q).T, 1e-4, 1e-4)
    shardings = distributed.find_shardings({"w": q.T}, mesh, {"w": PartitionSpec("a", None)})["w"]
    assert jax.tree.leaves(shardings)[0].spec == PartitionSpec("a", None)
    assert jax.device_put(q.T, shardings).codes.sharding.spec == PartitionSpec("a", None)


@pytest.mark.parametrize("rules", ["weight_only_int8", "w8a8_dynamic"])
def test_prepared_functions_move_no_table(rules: str, rng: np.random.Generator) -> None:
    """A tied table is read as rows by the lookup and along its rows by the product, whatever spells the transpose."""
    table = jnp.asarray(rng.normal(size=(1024, 256)), F32)
    turns: tuple[Callable[[Any], Any], ...] = (
        lambda w: w.T,
        lambda w: jnp.swapaxes(w, 0, 1),
        lambda w: jnp.moveaxis(w, 0, -1),
        lambda w: jnp.matrix_transpose(w),
    )
    tokens = jnp.array([3, 1000])

    def compile_network(head: Callable[[Any, Any], Any]) -> tuple[Program, QuantizedArray]:
        network = lambda params, tokens: head(params["table"][tokens], params["table"])  # noqa: E731
        prepared = jq.prepare(network, {"table": table}, tokens, rules=getattr(jq.recipes, rules)())
        q = prepared.convert({"table": table})
        return Program(prepared.apply, q, tokens), q.params["table"]

    along_last, q = compile_network(lambda x, w: jnp.einsum("bd,vd->bv", x, w))
    for turn in turns:
        check_nothing_moves(compile_network(lambda x, w, turn=turn: x @ turn(w))[0], along_last, q)


def test_axes_are_checked(rng: np.random.Generator) -> None:
    q = make_array(rng, "int8", (4, 6))
    with pytest.raises(ValueError, match=r"QuantizedArray\.swapaxes: axis1: expected an integer in \[-2, 1\]"):
        q.swapaxes(2, 0)
    with pytest.raises(TypeError, match=r"QuantizedArray\.swapaxes: axis2: expected an int"):
        q.swapaxes(0, 1.0)  # type: ignore[arg-type]
