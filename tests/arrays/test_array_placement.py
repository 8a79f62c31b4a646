"""Quantized arrays on eight devices, by automatic and explicit shardings and shard_map: the integers of one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import Blocked, PerAxis, PerTensor, QuantizedArray, QuantSpec

from ..oracles import array_text
from ..support import transforms

F32 = np.float32
P = PartitionSpec
SHAPE = (8, 16, 24)
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
NHWC: Any = ("NHWC", "HWIO", "NHWC")

# A spec, and its granularity for the oracle. Every axis of SHAPE is cut; runs of 5 and 3 end where no device does.
SPECS: dict[str, tuple[QuantSpec, tuple[Any, ...]]] = {
    "per tensor": (QuantSpec("uint8"), ("tensor",)),
    "per axis": (QuantSpec("int8", PerAxis(2)), ("axis", (2,))),
    "per axes": (QuantSpec("uint4", PerAxis((0, 1))), ("axis", (0, 1))),
    "blocks": (QuantSpec("uint8", Blocked(1, 5)), ("blocked", (1,), 5)),
    "boxes": (QuantSpec("int4", Blocked((0, 2), 3)), ("blocked", (0, 2), 3)),
}


def mesh(kind: AxisType) -> Any:
    return jax.make_mesh((8,), ("d",), axis_types=(kind,))


def shard(tree: Any, axis: int | None, kind: AxisType) -> Any:
    """Every array is cut along one axis; arrays without eight equal parts are on every device."""

    def place(x: Any) -> jax.Array:
        spec = P(*("d" if a == axis and n % 8 == 0 else None for a, n in enumerate(np.shape(x))))
        return jax.device_put(x, NamedSharding(mesh(kind), spec))

    return jax.tree.map(place, tree)


def check_equal(actual: Any, expected: Any) -> None:
    """The same bits, leaf by leaf."""
    for g, w in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.shape(g) == np.shape(w)
        assert transforms.mismatches(np.asarray(g), np.asarray(w)) == 0


def widened(part: Any, q: QuantizedArray) -> np.ndarray:
    return array_text.aligned(np.asarray(part), q.shape, q.block_size)


def steps(q: QuantizedArray) -> np.ndarray:
    codes = np.asarray(q.codes).astype(np.int64)
    return codes if q.zero_point is None else codes - widened(q.zero_point, q).astype(np.int64)


def near_ties(rng: np.random.Generator, name: str) -> tuple[np.ndarray, tuple[Any, ...]]:
    """Values on ties and an ulp beside them; and numpy's codes, scale, zero point, and what they stand for."""
    spec, granularity = SPECS[name]
    text, sizes = str(spec.dtype), array_text.sizes(SHAPE, granularity)
    low_code, high_code = array_text.bounds(text, spec.narrow_range)  # type: ignore[arg-type]

    def find_parameters(x: np.ndarray) -> tuple[Any, ...]:
        low, high = array_text.extremes(x, sizes)
        return low, high, *array_text.parameters(low, high, text, bool(spec.symmetric), bool(spec.narrow_range))

    x = rng.normal(size=SHAPE).astype(F32)
    low, high, scale = (array_text.spread(p, sizes, SHAPE) for p in find_parameters(x)[:3])
    tie = ((rng.integers(low_code, high_code, SHAPE) + 0.5) * scale.astype(np.float64)).astype(F32)
    tie = np.nextafter(tie, tie + rng.integers(-1, 2, SHAPE).astype(F32))
    x = np.where((x == low) | (x == high), x, np.clip(tie, low, high)).astype(F32)  # the range stays
    *_, scale, point = find_parameters(x)
    wide = array_text.spread(scale, sizes, SHAPE)
    points = None if point is None else array_text.spread(point, sizes, SHAPE)
    codes = array_text.codes(x, wide, points, text, bool(spec.narrow_range))
    zero_point = None if point is None else point.astype(codes.dtype)
    return x, (codes, scale, zero_point, array_text.values(codes, wide, points, F32))


@pytest.mark.sample(1)
@KINDS
@pytest.mark.parametrize("name", SPECS)
def test_quantize_and_dequantize_where_x_is_cut(rng: np.random.Generator, name: str, kind: AxisType) -> None:
    x, expected = near_ties(rng, name)
    spec = SPECS[name][0]

    @jax.jit
    def there_and_back(x: jax.Array) -> Any:
        q = jq.quantize(x, spec)
        return q.codes, q.scale, q.zero_point, q.dequantize()

    for axis in range(3):
        actual = there_and_back(shard(x, axis, kind))
        assert len(actual[0].sharding.device_set) == 8
        check_equal(actual, expected)


@KINDS
def test_a_given_range_that_is_cut(rng: np.random.Generator, kind: AxisType) -> None:
    x = rng.normal(size=(16, 24)).astype(F32)
    low, high = -rng.uniform(1, 2, (16, 1)).astype(F32), rng.uniform(1, 2, (16, 1)).astype(F32)
    spec = QuantSpec("uint8", PerAxis(0))
    scale, point = array_text.parameters(low, high, "uint8", False, False)
    assert point is not None
    codes = array_text.codes(x, scale, point, "uint8", False)
    quantize = jax.jit(lambda x, low, high: jq.quantize(x, spec, range=(low, high)))
    for axis, ends in ((0, 0), (1, 0), (0, None)):
        q = quantize(shard(x, axis, kind), *shard((low, high), ends, kind))
        check_equal((q.codes, q.scale, q.zero_point), (codes, scale, point.astype(np.uint8)))


VIEWS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    # What is applied to an array and to numpy's floats; and the axes that JAX splits under explicit shardings.
    "an index": (lambda q: q[3], (1, 2)),
    "a slice": (lambda q: q[:, 5:], (0, 2)),
    "a slice through blocks": (lambda q: q[:, 2:9], (0, 2)),
    "a new dimension": (lambda q: q[..., None, ::2], (0, 1)),
    "an array": (lambda q: q[np.array([1, -1, 5])], (1, 2)),
    "the transpose": (lambda q: q.T, (0, 1, 2)),
    "a split": (lambda q: q.reshape(8, 16, 1, 2, 12), (0, 1)),
}


@pytest.mark.sample(1)
@KINDS
@pytest.mark.parametrize("axis", range(3))
def test_views_of_a_cut_array(rng: np.random.Generator, axis: int, kind: AxisType) -> None:
    x = rng.normal(size=SHAPE).astype(F32)
    q = jq.quantize(x, QuantSpec("uint4", Blocked(1, 5)))
    q = q.replace(zero_point=rng.integers(0, 16, (1, 16, 1)).astype(q.codes.dtype))  # shared in another way
    whole = array_text.values(np.asarray(q.codes), widened(q.scale, q), widened(q.zero_point, q), F32)
    views = {n: f for n, (f, free) in VIEWS.items() if kind is AxisType.Auto or axis in free}

    @jax.jit
    def all_of_them(q: QuantizedArray) -> Any:
        onnx = jq.dequantize_linear(**jq.onnx_view(q)._asdict())
        return onnx, [view(q).dequantize() for view in views.values()]

    onnx, actual = all_of_them(shard(q, axis, kind))
    check_equal(onnx, whole)
    check_equal(actual, [view(whole) for view in views.values()])


@pytest.mark.slow
def test_what_an_explicit_cut_refuses(rng: np.random.Generator) -> None:
    """The sharding of the result is not determined: `out_sharding=` is, or for an index JAX's own function, reshard."""
    x = rng.normal(size=(8, 16)).astype(F32)
    q = jq.quantize(x, QuantSpec("int8", Blocked(1, 8)))
    rows, columns, w = shard(q, 0, AxisType.Explicit), shard(q, 1, AxisType.Explicit), shard(q.T, 0, AxisType.Explicit)
    refused: Sequence[tuple[Callable[[], Any], str]] = (
        (lambda: rows[3], "out_sharding"),
        (lambda: rows[np.array([1, 2])], "out_sharding"),
        (lambda: rows.reshape(2, 4, 16), "out_sharding"),
        (lambda: jq.take(rows, np.array([1, 2])), "jaxquant.take: out_sharding"),
        (lambda: columns @ w, "jaxquant.matmul: out_sharding"),  # a block per step: the contracted dimension is split
    )
    for call, text in refused:
        with pytest.raises(Exception, match=text):
            call()
    plain = [shard(jq.quantize(v, QuantSpec("int8")), a, AxisType.Explicit) for v, a in ((x, 1), (x.T, 0))]
    with pytest.raises(ValueError, match=r"jaxquant.matmul: out_sharding: .* not determined by"):
        jq.matmul(*plain)


def operands(rng: np.random.Generator, name: str) -> tuple[QuantizedArray, QuantizedArray]:
    x, w = rng.normal(size=(16, 32)).astype(F32), rng.normal(size=(32, 24)).astype(F32)
    left, right = {
        "plain": (QuantSpec("uint8"), QuantSpec("int8", PerAxis(1))),
        "blocks": (QuantSpec("int8", PerAxis(0)), QuantSpec("uint4", Blocked(0, 8))),
        "blocks of both": (QuantSpec("uint8", Blocked(1, 16)), QuantSpec("int4", Blocked(0, 4))),
    }[name]
    return jq.quantize(x, left), jq.quantize(w, right)


def product(a: QuantizedArray, b: QuantizedArray, length: int) -> np.ndarray:
    """The contraction in int64, `length` terms at a time, added up in ascending order in float32."""
    (left, right), y = (steps(a), steps(b)), None
    scales = [widened(q.scale, q).astype(F32) for q in (a, b)]
    for start in range(0, a.shape[1], length):
        run = slice(start, start + length)
        acc = (left[:, run] @ right[run]).astype(F32)
        part = acc * (scales[0][:, start, None] * scales[1][start])
        y = part if y is None else y + part
    assert y is not None
    return y


@pytest.mark.slow
@pytest.mark.sample(1)
@KINDS
@pytest.mark.parametrize(("name", "length"), [("plain", 32), ("blocks", 8), ("blocks of both", 4)])
def test_matmul_where_an_operand_is_cut(rng: np.random.Generator, name: str, length: int, kind: AxisType) -> None:
    """Rows and columns, and contracted dimensions of either side and of both."""
    a, b = operands(rng, name)
    expected = product(a, b, length)
    check_equal(jq.matmul(a, b), expected)
    places: list[tuple[int | None, int | None]] = [(0, None), (None, 1)]
    if kind is AxisType.Auto:
        places += [(0, 1), (1, 0)]
    if kind is AxisType.Auto or name == "plain":
        places += [(1, None), (None, 0)]
    matmul = jax.jit(jq.matmul)
    for left, right in places:
        actual = matmul(a if left is None else shard(a, left, kind), b if right is None else shard(b, right, kind))
        check_equal(actual, expected)
        if kind is AxisType.Explicit and (left == 0 or right == 1):
            assert jax.typeof(actual).sharding.spec == (P("d", None) if left == 0 else P(None, "d"))


@pytest.mark.slow
@KINDS
def test_other_operators_where_an_operand_is_cut(rng: np.random.Generator, kind: AxisType) -> None:
    query, key = (
        jq.quantize(rng.normal(size=(8, 16, 2, 8)).astype(F32), QuantSpec("int8", PerAxis((0, 1, 2)))) for _ in "qk"
    )
    scores = lambda q, k: jq.einsum("bqhd,bkhd->bhqk", q, k)  # noqa: E731
    acc = np.einsum("bqhd,bkhd->bhqk", steps(query), steps(key)).astype(F32)
    pairs = np.einsum("bqh,bkh->bhqk", *(np.asarray(q.scale)[..., 0] for q in (query, key)))
    check_equal(jax.jit(scores)(shard(query, 0, kind), shard(key, 0, kind)), acc * pairs)
    check_equal(jax.jit(scores)(shard(query, 1, kind), key), acc * pairs)
    table = jq.quantize(rng.normal(size=(64, 16)).astype(F32), QuantSpec("int4", Blocked(1, 4)))
    index = rng.integers(-64, 64, (8, 5)).astype(np.int32)
    rows = steps(table).astype(F32) * widened(table.scale, table)
    check_equal(jax.jit(jq.take)(shard(table, 1, kind), index), rows[index])
    if kind is AxisType.Auto:  # JAX itself asks for an out_sharding where what is gathered, or by what, is cut
        check_equal(jax.jit(jq.take)(shard(table, 0, kind), index), rows[index])
        check_equal(jax.jit(jq.take)(table, shard(index, 0, kind)), rows[index])


@pytest.mark.slow
@KINDS
def test_convolutions_of_cut_images(rng: np.random.Generator, kind: AxisType) -> None:
    x = jq.quantize(rng.normal(size=(8, 4, 4, 8)).astype(F32), QuantSpec("uint8"))
    w = jq.quantize(rng.normal(size=(1, 1, 8, 16)).astype(F32), QuantSpec("int8", PerAxis(3)))
    convolve = lambda x, w: jq.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=NHWC)  # noqa: E731
    acc = np.einsum("nhwc,co->nhwo", steps(x), steps(w)[0, 0]).astype(F32)
    want = acc * (np.asarray(x.scale) * np.asarray(w.scale))
    check_equal(jax.jit(convolve)(shard(x, 0, kind), w), want)
    floats = jax.jit(convolve)(shard(x.dequantize(), 0, kind), w)
    np.testing.assert_allclose(floats, want, rtol=1e-4, atol=1e-4)
    if kind is AxisType.Auto:  # JAX itself wants an out_sharding for cut features
        check_equal(jax.jit(convolve)(x, shard(w, 3, kind)), want)


@pytest.mark.slow
@KINDS
def test_gradients_of_scales_where_operands_are_cut(rng: np.random.Generator, kind: AxisType) -> None:
    x, w = rng.normal(size=(16, 32)).astype(F32), rng.normal(size=(32, 24)).astype(F32)
    a, q = jq.quantize(x, QuantSpec("uint8")), jq.quantize(w, QuantSpec("int4", Blocked(0, 8)))
    g = rng.normal(size=(16, 24)).astype(F32)
    per_element = steps(q) * (np.asarray(a.dequantize()).T @ g)
    want = per_element.reshape(4, 8, 24).sum(1)
    loss = lambda s, a, g: (jq.matmul(a, q.replace(scale=s)) * g).sum()  # noqa: E731
    pull = jax.jit(jax.grad(loss))
    np.testing.assert_allclose(pull(q.scale, a, g), want, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(pull(q.scale, *shard((a, g), 0, kind)), want, rtol=1e-4, atol=1e-3)
    by_columns = pull(shard(q.scale, 1, kind), a, shard(g, 1, kind))
    np.testing.assert_allclose(by_columns, want, rtol=1e-4, atol=1e-3)
    slope = jax.jit(jax.grad(lambda s, q, g: (q.replace(scale=s).dequantize() * g).sum()))
    flat = rng.normal(size=(32, 24)).astype(F32)
    want = (steps(q) * flat).reshape(4, 8, 24).sum(1)
    for axis in (0, 1):
        placed = shard((q, flat), axis, kind)
        np.testing.assert_allclose(slope(placed[0].scale, *placed), want, rtol=1e-4, atol=1e-3)


def mapped(op: Callable[..., Any], specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.jit(jax.shard_map(op, mesh=mesh(AxisType.Auto), in_specs=specs, out_specs=out_specs))


@pytest.mark.parametrize("name", ["per tensor", "blocks", "nf4"])
def test_under_shard_map_each_shard_has_its_own_scale(rng: np.random.Generator, name: str) -> None:
    spec = QuantSpec(jq.nf4, Blocked(1, 5)) if name == "nf4" else SPECS[name][0]
    x = rng.normal(size=(8, 2, 24)).astype(F32)
    actual = mapped(lambda x: jq.quantize(x[0], spec).dequantize()[None], (P("d"),), P("d"))(x)
    for part, row in zip(actual, x, strict=True):
        sizes = array_text.sizes((2, 24), ("tensor",) if name == "per tensor" else ("blocked", (1,), 5))
        low, high = array_text.extremes(row, sizes)
        if spec.codebook is not None:
            scale = array_text.spread(np.maximum(-low, high), sizes, (2, 24))
            expected = np.array(jq.nf4.levels, F32)[array_text.nearest_level(row / scale, jq.nf4.levels)] * scale
        else:
            scale, point = array_text.parameters(low, high, "uint8", False, False)
            wide, points = (array_text.spread(p, sizes, (2, 24)) for p in (scale, point) if p is not None)
            expected = array_text.values(array_text.codes(row, wide, points, "uint8", False), wide, points, F32)
        check_equal(part, expected)


@pytest.mark.slow
def test_quantized_arrays_in_and_out_of_shard_map(rng: np.random.Generator) -> None:
    x = rng.normal(size=(16, 64)).astype(F32)
    spec = QuantSpec("uint4", Blocked(1, 8))
    want = jq.quantize(x, spec)
    check_equal(mapped(lambda x: jq.quantize(x, spec), (P(None, "d"),), P(None, "d"))(x), want)  # a block per device
    for place in (P("d", None), P(None, "d")):
        check_equal(mapped(lambda q: q.dequantize(), (place,), place)(want), want.dequantize())
        check_equal(mapped(lambda q: q.T[::2].dequantize(), (place,), P(*place[::-1]))(want), want.dequantize().T[::2])
    whole = QuantSpec("uint8")
    places = QuantizedArray(P("d"), P(), P(), dtype=F32)
    quantize_shard = lambda x: jq.quantize(x, whole, range=(lax.pmin(x.min(), "d"), lax.pmax(x.max(), "d")))  # noqa: E731
    check_equal(mapped(quantize_shard, (P("d"),), places)(x), jq.quantize(x, whole))


def test_a_lost_nan_under_shard_map(rng: np.random.Generator) -> None:
    """XLA's reductions lose a NaN in long arrays: only the shard that has one is NaN."""
    x = rng.normal(size=(8, 2**14)).astype(F32)
    x[3, 5] = np.nan
    scale = mapped(lambda x: jq.quantize(x, QuantSpec("uint8")).scale, (P("d"),), P("d"))(x)
    low, high = x.min(1).clip(max=0), x.max(1).clip(min=0)
    check_equal(scale[:, 0], (high - low) / F32(255))


@pytest.mark.slow
def test_partial_sums_of_a_cut_contraction_add_up(rng: np.random.Generator) -> None:
    """Scales are powers of two, so that float32 adds them up exactly, in any order: a psum gives the same bits."""
    x, w = rng.normal(size=(16, 64)).astype(F32), rng.normal(size=(64, 24)).astype(F32)
    for left, right, length in (
        (QuantSpec("uint8", power_of_two=True), QuantSpec("int8", PerAxis(1), power_of_two=True), 64),
        (QuantSpec("int8", PerAxis(0), power_of_two=True), QuantSpec("uint4", Blocked(0, 4), power_of_two=True), 4),
    ):
        a, b = jq.quantize(x, left), jq.quantize(w, right)
        want = product(a, b, length)
        over_depth = jax.tree.map(lambda p: P(None, "d") if p.shape[1] == 64 else P(), a)
        over_rows = jax.tree.map(lambda p: P("d") if p.shape[0] > 1 else P(), b)
        summed = mapped(lambda a, b: lax.psum(jq.matmul(a, b), "d"), (over_depth, over_rows), P())
        check_equal(summed(a, b), want)
        rows = jax.tree.map(lambda p: P("d") if p.shape[0] == 16 else P(), a)
        check_equal(mapped(jq.matmul, (rows, P()), P("d"))(a, b), want)


@pytest.mark.slow
def test_gradients_under_shard_map(rng: np.random.Generator) -> None:
    """What is cut has a gradient of its own; a scale on every device has the sum."""
    x, w = rng.normal(size=(16, 64)).astype(F32), rng.normal(size=(64, 24)).astype(F32)
    b = jq.quantize(w, QuantSpec("int4", Blocked(0, 8)))
    a = jq.quantize(x, QuantSpec("int8", PerAxis(0)))
    floats, codes = np.asarray(b.dequantize()).astype(np.float64), steps(b)

    def scales_pull(left: np.ndarray) -> np.ndarray:
        y = left @ floats
        return (codes * (left.T @ (2 * y))).reshape(8, 8, 24).sum(1)

    loss = lambda x, s: (jq.matmul(x, b.replace(scale=s)) ** 2).sum()  # noqa: E731
    dx, ds = mapped(jax.grad(loss, (0, 1)), (P("d"), P()), (P("d"), P()))(x, b.scale)
    np.testing.assert_allclose(dx, 2 * (x @ floats) @ floats.T, rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(ds, scales_pull(x.astype(np.float64)), rtol=1e-3, atol=0.5)
    integer = mapped(jax.grad(loss, 1), (P("d"), P()), P())(a, b.scale)
    np.testing.assert_allclose(integer, scales_pull(np.asarray(a.dequantize(), np.float64)), rtol=1e-3, atol=0.5)


@pytest.mark.slow
def test_take_and_convolve_under_shard_map(rng: np.random.Generator) -> None:
    table = jq.quantize(rng.normal(size=(64, 16)).astype(F32), QuantSpec("int4", PerAxis(0)))
    index = rng.integers(-64, 70, (16, 5)).astype(np.int32)
    rows = steps(table).astype(F32) * np.asarray(table.scale)
    want = np.where((index < 64)[..., None], rows[np.minimum(index, 63)], F32(np.nan))
    check_equal(mapped(jq.take, (P(), P("d")), P("d"))(table, index), want)
    x = jq.quantize(rng.normal(size=(8, 4, 4, 8)).astype(F32), QuantSpec("int8", PerAxis(0)))
    w = jq.quantize(rng.normal(size=(1, 1, 8, 16)).astype(F32), QuantSpec("uint8", PerAxis(3)))
    convolve = lambda x, w: jq.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=NHWC)  # noqa: E731
    acc = np.einsum("nhwc,co->nhwo", steps(x), steps(w)[0, 0]).astype(F32)
    check_equal(mapped(convolve, (P("d"), P()), P("d"))(x, w), acc * (np.asarray(x.scale) * np.asarray(w.scale)))


def in_chunks(rng: np.random.Generator) -> None:
    """Weights so large that they are dequantized a piece at a time, the rows of x on eight devices."""
    w = jq.quantize(rng.normal(size=(1024, 2304)).astype(F32), QuantSpec("int8", PerAxis(1)))
    x = rng.normal(size=(16, 1024)).astype(F32)
    actual = mapped(jq.matmul, (P("d"), P()), P("d"))(x, w)
    np.testing.assert_allclose(actual, x @ np.asarray(w.dequantize()), rtol=1e-4, atol=1e-3)


def zero_point_granularity(rng: np.random.Generator) -> None:
    x = rng.normal(size=(16, 24)).astype(F32)
    for spec in (
        QuantSpec("uint8", PerAxis(0), zero_point_granularity=PerTensor()),
        QuantSpec("uint8", zero_point_granularity=PerAxis(0)),
    ):
        check_equal(jax.jit(lambda x, s=spec: jq.quantize(x, s))(shard(x, 0, AxisType.Explicit)), jq.quantize(x, spec))


def error_measures(rng: np.random.Generator) -> None:
    x = shard(rng.normal(size=(16, 24)).astype(F32), 0, AxisType.Explicit)
    errors = jax.jit(lambda x: jq.quantization_error(x, jq.quantize(x, QuantSpec("int8"))))(x)
    whole = jq.quantization_error(np.asarray(x), jq.quantize(np.asarray(x), QuantSpec("int8")))
    np.testing.assert_allclose(errors, whole, rtol=1e-5)


def weight_only_gradient(rng: np.random.Generator) -> None:
    """Of x alone, a batch on eight devices: JAX finds it for floats."""
    w = jq.quantize(rng.normal(size=(32, 24)).astype(F32), QuantSpec("int8", PerAxis(1)))
    x = rng.normal(size=(16, 32)).astype(F32)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        actual = jax.jit(jax.grad(lambda x: jq.matmul(x, w).sum()))(shard(x, 0, AxisType.Explicit))
    np.testing.assert_allclose(actual, np.asarray(w.dequantize()).sum(1)[None].repeat(16, 0), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("check", [in_chunks, zero_point_granularity, error_measures, weight_only_gradient])
def test_operations_that_jax_refused_at_first(
    rng: np.random.Generator, check: Callable[[np.random.Generator], None]
) -> None:
    check(rng)
