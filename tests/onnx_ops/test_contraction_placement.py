"""The contractions on eight devices, in every mode of JAX and lowered for other platforms: the same integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq

from ..support import transforms

Array = np.ndarray
ROW_POINTS, COLUMN_POINTS = np.arange(16, dtype=np.uint8), np.arange(32, dtype=np.int8)
COLUMNS = np.full(32, 0.25, np.float32)
PADS = (1, 1, 1, 1)

# Two operands each, with what belongs to them, and their shapes and dtypes. Sizes are divisible by the eight devices.
OPERATORS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], str, str]] = {
    "matmul_integer": (lambda a, b: jq.matmul_integer(a, b, 3, 5), (16, 24), (24, 32), "uint8", "int8"),
    "plain": (jq.matmul_integer, (16, 24), (24, 32), "int8", "int8"),
    "zero points": (
        lambda a, b: jq.matmul_integer(a, b, ROW_POINTS, COLUMN_POINTS), (16, 24), (24, 32), "uint8", "int8",
    ),
    "batched": (lambda a, b: jq.matmul_integer(a, b, 3, 5), (8, 16, 24), (8, 24, 32), "uint8", "uint8"),
    "batched a": (lambda a, b: jq.matmul_integer(a, b, 3, 5), (8, 16, 24), (24, 32), "int8", "uint8"),
    "row": (lambda a, b: jq.matmul_integer(a, b, 3, 5), (1, 24), (24, 32), "uint8", "int8"),
    "vector": (lambda a, b: jq.matmul_integer(a, b, 3, 5), (24,), (24, 32), "uint8", "int8"),
    "by a vector": (lambda a, b: jq.matmul_integer(a, b, 3, 5), (16, 24), (24,), "uint8", "int8"),
    "qlinear_matmul": (
        lambda a, b: jq.qlinear_matmul(a, 0.5, 3, b, COLUMNS, 5, 60.0, 7), (16, 24), (24, 32), "uint8", "int8",
    ),
    "dot_general": (
        lambda a, b: jq.integer.dot_general(
            a, b, (((1,), (1,)), ((), ())), lhs_zero_point=ROW_POINTS[:, None], rhs_zero_point=COLUMN_POINTS[:, None]
        ),
        (16, 24), (32, 24), "uint8", "int8",
    ),
    "dynamic_quantize_matmul": (
        lambda a, b: jq.ops.dynamic_quantize_matmul(a, b, COLUMNS, 5, COLUMNS), (16, 24), (24, 32), "float32", "int8",
    ),
    "dynamic, blocks": (
        lambda a, b: jq.ops.dynamic_quantize_matmul(a, b, np.stack([COLUMNS] * 3), 5, COLUMNS),
        (16, 24), (24, 32), "float32", "int8",
    ),
    "matmul_integer_to_float": (
        lambda a, b: jq.ops.matmul_integer_to_float(a, b, COLUMNS[:16], COLUMNS, 3, 5, COLUMNS),
        (16, 24), (24, 32), "uint8", "int8",
    ),
    "to_float, blocks": (
        lambda a, b: jq.ops.matmul_integer_to_float(a, b, 0.5, np.stack([COLUMNS] * 3), 3, 5, COLUMNS),
        (16, 24), (24, 32), "uint8", "int8",
    ),
    "matmul_nbits": (
        lambda a, b: jq.ops.matmul_nbits(a, b, np.stack([COLUMNS] * 2, 1), None, COLUMNS, K=64, N=32),
        (16, 64), (32, 2, 16), "float32", "uint8",
    ),
    "conv_integer": (
        lambda x, w: jq.conv_integer(x, w, 3, COLUMN_POINTS, pads=PADS), (8, 16, 8, 8), (32, 16, 3, 3), "uint8", "int8",
    ),
    "few channels": (
        lambda x, w: jq.conv_integer(x, w, 3, 5, pads=PADS), (8, 8, 8, 8), (32, 8, 3, 3), "uint8", "int8",
    ),
    "1x1": (lambda x, w: jq.conv_integer(x, w, 3, 5), (8, 16, 8, 8), (32, 16, 1, 1), "uint8", "int8"),
    "depthwise": (
        lambda x, w: jq.conv_integer(x, w, 3, 5, group=16, pads=PADS), (8, 16, 8, 8), (16, 1, 3, 3), "uint8", "int8",
    ),
    "groups": (lambda x, w: jq.conv_integer(x, w, 3, 5, group=2), (8, 32, 8, 8), (32, 16, 3, 3), "uint8", "int8"),
    "qlinear_conv": (
        lambda x, w: jq.qlinear_conv(x, 0.5, 3, w, COLUMNS, 5, 60.0, 7, np.arange(32, dtype=np.int32)),
        (8, 16, 8, 8), (32, 16, 3, 3), "uint8", "int8",
    ),
    "conv_general_dilated": (
        lambda x, w: jq.integer.conv_general_dilated(
            x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), lhs_zero_point=3
        ),
        (8, 8, 8, 16), (3, 3, 16, 32), "uint8", "int8",
    ),
}  # fmt: skip
CONVOLUTIONS = list(OPERATORS)[list(OPERATORS).index("conv_integer") :]
PRODUCTS = [name for name in OPERATORS if name not in CONVOLUTIONS]


def draw_operands(rng: np.random.Generator, name: str) -> tuple[Array, Array]:
    """Two operands."""
    _, *shapes, left, right = OPERATORS[name]
    operands = []
    for shape, dtype in zip(shapes, (left, right), strict=True):
        low, high = (-128, 128) if dtype == "int8" else (0, 256)
        is_float = dtype == "float32"
        operands.append(
            rng.normal(size=shape).astype(dtype) if is_float else rng.integers(low, high, shape).astype(dtype)
        )
    return operands[0], operands[1]


def check_equal(name: str, actual: Any, expected: Any) -> None:
    """The same bits; but matmul_nbits adds up floats, in an order of XLA's."""
    if name == "matmul_nbits":
        np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-5, atol=1e-3)
    else:
        assert transforms.mismatches(np.asarray(actual), np.asarray(expected)) == 0


def sharded(x: Any, axis: int, kind: AxisType) -> jax.Array:
    """An array cut along one axis over the eight devices."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    spec = PartitionSpec(*("d" if a == axis else None for a in range(np.ndim(x))))
    return jax.device_put(x, NamedSharding(mesh, spec))


def find_contracted_axis(name: str, side: int) -> int:
    """The dimension of a product's operand that the result has not."""
    _, *shapes, _, _ = OPERATORS[name]
    rank = len(shapes[side])
    if side == 0 or name in ("dot_general", "matmul_nbits"):
        return rank - 1
    return max(rank - 2, 0)


def placements(*, explicit: bool) -> list[tuple[str, int, int]]:
    """An operator, which of its operands is cut, and along which axis."""
    rows = []
    for name, (_, *shapes, _, _) in OPERATORS.items():
        for side, shape in enumerate(shapes):
            axes = [a for a, n in enumerate(shape) if n % 8 == 0]
            if explicit and name in CONVOLUTIONS:  # for a cut channel or feature JAX itself wants an out_sharding
                axes = [0] if side == 0 else []
            elif explicit and name == "batched":  # JAX itself wants both batches cut alike, or none
                axes.remove(0)
            elif explicit and ("blocks" in name or name == "matmul_nbits"):  # a cut dimension would have to be split
                axes = [a for a in axes if a != find_contracted_axis(name, side)]
            elif name in ("conv_integer", "conv_general_dilated") and side == 0:
                # XLA's partitioner makes no valid program of s8 convolutions to s32 over an uneven cut.
                axes = [a for a in axes if shape[a] != 8 or a == 0]
            rows += [(name, side, axis) for axis in axes]
    return rows


def check_cut(rng: np.random.Generator, name: str, side: int, axis: int, kind: AxisType) -> jax.Array:
    """Returns the result of the compiled operator with one operand cut, after comparing it with one device's."""
    op, operands = OPERATORS[name][0], list[Any](draw_operands(rng, name))
    expected = op(*operands)
    operands[side] = sharded(operands[side], axis, kind)
    actual = jax.jit(op)(*operands)
    check_equal(name, actual, expected)
    return actual


# Every other placement and operator: each is a compilation of eight devices, and neighbours take the same program.
@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "side", "axis"), list(placements(explicit=False))[::2])
def test_automatic_shardings(rng: np.random.Generator, name: str, side: int, axis: int) -> None:
    """Rows, columns, batches and contracted dimensions."""
    actual = check_cut(rng, name, side, axis, AxisType.Auto)
    assert len(actual.sharding.device_set) == 8


@pytest.mark.sample(9)
@pytest.mark.parametrize(("name", "side", "axis"), placements(explicit=True))
def test_explicit_shardings(rng: np.random.Generator, name: str, side: int, axis: int) -> None:
    """Rows of a, columns of b, images of a convolution: the result is cut where they lie."""
    actual = check_cut(rng, name, side, axis, AxisType.Explicit)
    if name in CONVOLUTIONS or axis != find_contracted_axis(name, side):
        spec = jax.typeof(actual).sharding.spec
        assert spec[axis if side == 0 else actual.ndim - 1] == "d"


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", ["batched", "conv_integer", "depthwise"])
def test_both_operands_on_the_mesh(rng: np.random.Generator, name: str, kind: AxisType) -> None:
    """Batch by batch, or images by whole weights."""
    op, (a, b) = OPERATORS[name][0], draw_operands(rng, name)
    placed = sharded(a, 0, kind), sharded(b, 0 if name == "batched" else -1, kind)
    check_equal(name, jax.jit(op)(*placed), op(a, b))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", PRODUCTS)
def test_contracted_dimensions_of_both_are_cut(rng: np.random.Generator, name: str) -> None:
    op, (a, b) = OPERATORS[name][0], draw_operands(rng, name)
    placed = [sharded(x, find_contracted_axis(name, i), AxisType.Auto) for i, x in enumerate((a, b))]
    check_equal(name, jax.jit(op)(*placed), op(a, b))


def mapped(op: Callable[..., Any], *specs: PartitionSpec) -> Callable[..., Any]:
    """A shard_map with the specs of the operands, then of the result."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(op, mesh=mesh, in_specs=specs[:-1], out_specs=specs[-1]))


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", [n for n in OPERATORS if n not in ("row", "vector", "zero points", "dot_general")])
def test_under_shard_map_each_shard_is_on_its_own(rng: np.random.Generator, name: str) -> None:
    op, (a, b) = OPERATORS[name][0], draw_operands(rng, name)
    if name == "matmul_integer_to_float":  # a scale per row does not know which rows a shard has
        op = lambda a, b: jq.ops.matmul_integer_to_float(a, b, 0.5, COLUMNS, 3, 5)  # noqa: E731
    specs = (PartitionSpec("d"), PartitionSpec("d") if name == "batched" else PartitionSpec(), PartitionSpec("d"))
    parts = [op(x, y) for x, y in zip(np.split(a, 8), np.split(b, 8) if name == "batched" else [b] * 8, strict=True)]
    check_equal(name, mapped(op, *specs)(a, b), np.concatenate(parts))


@pytest.mark.parametrize("name", ["plain", "matmul_integer", "row", "vector", "batched a"])
def test_partial_sums_of_a_cut_contraction_add_up(rng: np.random.Generator, name: str) -> None:
    """int32 is exact in any order, zero points included."""
    op, (a, b) = OPERATORS[name][0], draw_operands(rng, name)
    columns, rows = PartitionSpec(*[None] * (a.ndim - 1), "d"), PartitionSpec("d")
    summed = mapped(lambda a, b: jax.lax.psum(op(a, b), "d"), columns, rows, PartitionSpec())
    check_equal(name, summed(a, b), op(a, b))
    scattered = mapped(lambda a, b: jax.lax.psum_scatter(op(a, b), "d", tiled=True), columns, rows, PartitionSpec("d"))
    if op(a, b).shape[0] % 8 == 0:
        check_equal(name, scattered(a, b), op(a, b))


LOSSES: dict[str, Callable[..., jax.Array]] = {
    "dynamic_quantize_matmul": lambda a, b, s: jq.ops.dynamic_quantize_matmul(a, b, s, 5).sum(),
    "dynamic, blocks": lambda a, b, s: jq.ops.dynamic_quantize_matmul(a, b, jnp.stack([s] * 3), 5).sum(),
    "matmul_integer_to_float": lambda a, b, s: jq.ops.matmul_integer_to_float(a, b, 0.5, s, 3, 5).sum(),
    "to_float, blocks": lambda a, b, s: jq.ops.matmul_integer_to_float(a, b, 0.5, jnp.stack([s] * 3), 3, 5).sum(),
    "matmul_nbits": lambda a, b, s: jq.ops.matmul_nbits(a, b, jnp.stack([s] * 2, 1), K=64, N=32).sum(),
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(LOSSES))
def test_gradients_under_shard_map(rng: np.random.Generator, name: str) -> None:
    """What is cut has a gradient of its own; what is not has the sum over the devices."""
    a, b = draw_operands(rng, name)
    learned = (0, 2) if a.dtype == np.float32 else (2,)
    pull = jax.grad(LOSSES[name], learned)
    split = [pull(part, b, COLUMNS) for part in np.split(a, 8)]
    specs = (PartitionSpec("d"), PartitionSpec(), PartitionSpec())
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    spread = jax.shard_map(pull, mesh=mesh, in_specs=specs, out_specs=tuple(specs[i] for i in learned))
    actual = jax.jit(spread)(a, b, COLUMNS)
    np.testing.assert_allclose(actual[-1], np.sum([s[-1] for s in split], 0), rtol=1e-4, atol=1)
    if len(learned) == 2:
        np.testing.assert_allclose(actual[0], np.concatenate([s[0] for s in split]), rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("part", ["rows of a", "columns of b"])
@pytest.mark.parametrize("name", list(LOSSES))
def test_gradients_where_operands_are_cut(rng: np.random.Generator, name: str, part: str, kind: AxisType) -> None:
    a, b = draw_operands(rng, name)
    operands: list[Any] = [a, b, COLUMNS]
    if part == "rows of a":
        operands[0] = sharded(a, 0, kind)
    else:
        operands[1:] = sharded(b, 0 if name == "matmul_nbits" else 1, kind), sharded(COLUMNS, 0, kind)
    pull = jax.grad(LOSSES[name], (0, 2) if a.dtype == np.float32 else (2,))
    summed_over = a.dtype == np.float32 if part == "columns of b" else name == "matmul_nbits"
    if kind is AxisType.Explicit and summed_over:  # jax asks for out_sharding, as it does of a plain a @ b
        with pytest.raises(Exception, match="ambiguous how the output"):
            jax.jit(pull)(*operands)
        return
    for actual, expected in zip(jax.jit(pull)(*operands), pull(a, b, COLUMNS), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["matmul_integer", "row", "qlinear_matmul", "conv_integer", "dynamic_quantize_matmul"])
def test_vmap_over_a_cut_axis(rng: np.random.Generator, name: str) -> None:
    """Each device one member of the batch."""
    op, members = OPERATORS[name][0], [draw_operands(rng, name) for _ in range(8)]
    a, b = (np.stack(parts) for parts in zip(*members, strict=True))
    want = np.stack([op(*member) for member in members])
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        batch = jax.jit(jax.vmap(op, spmd_axis_name="d"))
        check_equal(name, batch(sharded(a, 0, AxisType.Auto), sharded(b, 0, AxisType.Auto)), want)
    first = np.stack([op(x, b[0]) for x in a])
    check_equal(name, jax.jit(jax.vmap(op, (0, None)))(sharded(a, 0, AxisType.Auto), b[0]), first)


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", list(OPERATORS))
def test_export_lowers_for_every_platform(rng: np.random.Generator, name: str) -> None:
    op, operands = OPERATORS[name][0], draw_operands(rng, name)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    exported = export.export(jax.jit(op), platforms=["cpu", "cuda", "tpu"])(*shapes)
    assert set(exported.platforms) == {"cpu", "cuda", "tpu"}
    check_equal(name, export.deserialize(exported.serialize()).call(*operands), op(*operands))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [n for n in OPERATORS if n not in ("row", "vector", "zero points", "dot_general")])
def test_export_with_a_symbolic_batch(rng: np.random.Generator, name: str) -> None:
    """Rows or images of any number."""
    (batch,) = export.symbolic_shape("batch")
    op, (a, b) = OPERATORS[name][0], draw_operands(rng, name)
    if name == "matmul_integer_to_float":
        op = lambda a, b: jq.ops.matmul_integer_to_float(a, b, 0.5, COLUMNS, 3, 5)  # noqa: E731
    shapes = [jax.ShapeDtypeStruct((batch, *a.shape[1:]), a.dtype), jax.ShapeDtypeStruct(b.shape, b.dtype)]
    if name == "batched":
        shapes[1] = jax.ShapeDtypeStruct((batch, *b.shape[1:]), b.dtype)
    saved = export.export(jax.jit(op), platforms=["cpu", "cuda", "tpu"])(*shapes)
    saved = export.deserialize(saved.serialize())
    for count in (1, 2, 5, len(a)):
        weights = b[:count] if name == "batched" else b
        check_equal(name, saved.call(a[:count], weights), op(a[:count], weights))


MODES: dict[str, Callable[[], Any]] = {
    "x64": lambda: jax.enable_x64(True),
    "disable_jit": jax.disable_jit,
    "debug_nans": lambda: jax.debug_nans(True),
    "promotion": lambda: jax.numpy_dtype_promotion("standard"),
    "matmul precision": lambda: jax.default_matmul_precision("bfloat16"),
}


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("name", list(OPERATORS)[::2])
def test_modes_of_jax_change_nothing(rng: np.random.Generator, name: str, mode: str) -> None:
    op, (a, b) = OPERATORS[name][0], draw_operands(rng, name)
    want = op(a, b)
    with MODES[mode]():
        check_equal(name, op(a, b), want)
        check_equal(name, jax.jit(op)(a, b), want)
        check_equal(name, jax.vmap(op, (0, None))(np.stack([a, a]), b)[1], want)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["x64", "disable_jit", "debug_nans", "promotion"])
@pytest.mark.parametrize("name", ["dynamic_quantize_matmul", "dynamic, blocks", "matmul_nbits"])
def test_gradients_in_every_mode(rng: np.random.Generator, name: str, mode: str) -> None:
    op, (a, b) = OPERATORS[name][0], draw_operands(rng, name)
    pull = jax.grad(lambda a: op(a, b).sum())
    expected = pull(jnp.asarray(a))
    with MODES[mode]():
        actual = pull(jnp.asarray(a))
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)
