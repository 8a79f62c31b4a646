"""Arrays whose codes are in words: every function returns what it returns for the same codes unpacked."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import Blocked, PerAxis, QuantizedArray, QuantSpec, checkpoint
from jaxquant._arrays.parts import Packing

from ..oracles import words_text

FORMATS: dict[str, Any] = {
    name: name
    for name in ("int2", "uint2", "int3", "uint3", "int4", "uint4", "int5", "uint5", "int6", "uint6", "float4_e2m1fn")
} | {"nf4": jq.nf4}
FEW = ("uint3", "int4", "uint4", "int5", "nf4")
SHAPES = [(40,), (6, 40), (3, 4, 33), (2, 3, 2, 24), (0, 24), (3, 0)]


def make_pair(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], granularity: Any = None, **options: Any
) -> tuple[QuantizedArray, QuantizedArray]:
    """Return an array with its codes in words, and the same array with its codes unpacked."""
    spec = QuantSpec(FORMATS[name], PerAxis(-1) if granularity is None else granularity, **options)
    q = jq.quantize(rng.normal(size=shape).astype(np.float32), spec)
    return (q.pack(), q) if q.packing is None else (q, q.unpack())


def assert_same(actual: Any, expected: Any) -> None:
    """Check that two results have the same dtype and the same bits."""
    actual, expected = (x.dequantize() if isinstance(x, QuantizedArray) else x for x in (actual, expected))
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def assert_near(actual: Any, expected: Any) -> None:
    """Check that two sums of float32 products differ only by their rounding."""
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-5, atol=1e-4)


@pytest.mark.sample(24)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_words_hold_the_codes(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> None:
    packed, q = make_pair(rng, name, shape)
    assert packed.packing is not None
    bits = packed.packing.bits
    assert (packed.shape, packed.ndim, packed.size, len(packed)) == (shape, len(shape), q.size, shape[0])
    assert packed.codes.dtype == q.codes.dtype
    assert packed.format == FORMATS[name] or str(packed.format) == name
    np.testing.assert_array_equal(np.asarray(packed.codes), np.asarray(q.codes))
    patterns = np.asarray(q.codes).view(np.uint8) if name == "float4_e2m1fn" else np.asarray(q.codes).astype(np.int32)
    np.testing.assert_array_equal(np.asarray(packed.stored_codes), words_text.write(patterns, bits))
    rest = q.scale.nbytes + (0 if q.zero_point is None else packed.nbytes - packed.stored_codes.nbytes - q.scale.nbytes)
    assert packed.nbytes == packed.stored_codes.nbytes + rest
    assert f"{name}[{','.join(map(str, shape))}]" in repr(packed)
    assert ", packed, " in repr(packed)
    assert_same(packed, q)
    assert packed.pack() is packed
    assert q.unpack() is q


@pytest.mark.parametrize("name", FEW)
def test_memory_is_that_of_the_bits(rng: np.random.Generator, name: str) -> None:
    for length in (256, 640, 1000, 4096):
        packed, _ = make_pair(rng, name, (4, length), PerAxis(0))
        assert packed.packing is not None
        assert packed.stored_codes.nbytes <= 1.02 * 4 * length * packed.packing.bits / 8


INDICES: list[Any] = [
    0, -1, slice(1, 3), (slice(None), 5), (slice(None), slice(3, 17)), (slice(None), slice(None, None, -1)),
    (Ellipsis, None), (2, 7), [3, 1], (slice(None), [0, 9]), (slice(None), slice(0, 40)), (None, 1),
]  # fmt: skip


@pytest.mark.parametrize("order", [(), (0,)], ids=["in order", "transposed"])
@pytest.mark.parametrize("name", FEW)
def test_indexing(rng: np.random.Generator, name: str, order: tuple[int, ...]) -> None:
    packed, q = make_pair(rng, name, (6, 40), Blocked(-1, 8))
    packed = packed.store_last(*order)
    for index in INDICES:
        assert_same(packed[index], q[index])
        assert (packed[index].packing is None) == (q[index].ndim == 0)
    for part, whole in zip(packed, q, strict=True):
        assert_same(part, whole)


@pytest.mark.parametrize("name", FEW)
def test_shapes(rng: np.random.Generator, name: str) -> None:
    packed, q = make_pair(rng, name, (4, 6, 8))
    words = packed.stored_codes
    for shape in [(24, 8), (2, 2, 6, 8), (4, 48), (-1,), (4, 6, 4, 2)]:
        per_tensor, plain = make_pair(rng, name, (4, 6, 8), jq.PerTensor())
        assert_same(per_tensor.reshape(shape), plain.reshape(shape))
        assert per_tensor.reshape(shape).packing is not None
    for axes in [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)]:
        moved = packed.transpose(axes)
        assert moved.stored_codes is words
        assert_same(moved, q.transpose(axes))
        assert_same(moved.store_last(), q.transpose(axes))
        assert_same(jax.jit(lambda q: q.dequantize())(moved), q.transpose(axes))
        assert_same(moved[1], q.transpose(axes)[1])
        assert_same(moved.reshape(1, *moved.shape), q.transpose(axes).reshape(1, *moved.shape))
    assert_same(packed.mT, q.mT)
    assert_same(packed.swapaxes(0, 2), q.swapaxes(0, 2))


@pytest.mark.parametrize("name", FEW)
def test_joins(rng: np.random.Generator, name: str) -> None:
    (a, p), (b, q) = (make_pair(rng, name, (n, 24), Blocked(-1, 8)) for n in (3, 5))
    (c, r), (d, s) = (make_pair(rng, name, (4, n), Blocked(0, 2)) for n in (20, 9))
    transposed = (a.store_last(0), b.store_last(0))
    cases = [([a, b], [p, q], 0), ([c, d], [r, s], 1), ([transposed[0], b], [p, q], 0), (transposed, [p, q], 0)]
    for packed, plain, axis in cases:
        joined = jq.concatenate(packed, axis)
        assert_same(joined, jq.concatenate(plain, axis))
        assert joined.packing is not None


@pytest.mark.parametrize("name", ["uint2", "uint4", "int4"])
def test_zero_points_have_a_byte(rng: np.random.Generator, name: str) -> None:
    """XLA:CPU converts narrower ones of all layers in each turn of a loop; arrays of earlier versions have these."""
    packed, q = make_pair(rng, name, (6, 48), Blocked(-1, 16), symmetric=False)
    assert packed.zero_point.dtype == ("int8" if name == "int4" else "uint8")
    np.testing.assert_array_equal(np.asarray(packed.zero_point), np.asarray(q.zero_point).astype(np.int32))
    assert packed.unpack().zero_point.dtype == q.codes.dtype
    earlier = packed.replace(zero_point=q.zero_point)
    for other in (packed, earlier):
        view, expected = jq.onnx_view(other), jq.onnx_view(q)
        assert view.x_zero_point is not None
        assert view.x_zero_point.dtype == view.x.dtype == q.codes.dtype
        assert_same(jq.dequantize_linear(**view._asdict()), jq.dequantize_linear(**expected._asdict()))
        assert_same(other[2:, ::2], q[2:, ::2])
        assert_near(jnp.ones((1, 48)) @ other.T, jnp.ones((1, 48)) @ q.T)
    without = q.replace(zero_point=None)
    for arrays, plain in [
        ([packed, q], [q, q]), ([q, packed], [q, q]), ([packed, earlier], [q, q]), ([earlier, packed], [q, q]),
        ([packed, without], [q, without]), ([without.pack(), packed], [without, q]), ([without, packed], [without, q]),
    ]:  # fmt: skip
        for axis in (0, 1):
            assert_same(jq.concatenate(arrays, axis), jq.concatenate(plain, axis))
    # The parts of an array are those of a new one.
    for again in (packed.replace(packing=None), packed.replace(codes=packed.codes, packing=None), jq.QuantizedArray(
        packed.codes, packed.scale, packed.zero_point, block_size=packed.block_size
    )):  # fmt: skip
        assert_same(again, q)
        assert_same(again[:, 3], q[:, 3])
        zero_point = jq.onnx_view(again).x_zero_point
        assert zero_point is not None
        assert zero_point.dtype == q.codes.dtype
    assert earlier.pack().zero_point.dtype == packed.zero_point.dtype
    with pytest.raises(TypeError, match=r"expected dtype \w+, the dtype of the codes, u?int8, or float32"):
        packed.replace(zero_point=packed.zero_point.astype("int16")).dequantize()
    with pytest.raises(ValueError, match=r"zero_point: expected codes of \w+, from -?\d to \d+, got others"):
        packed.replace(zero_point=packed.zero_point + packed.zero_point.dtype.type(16)).unpack()


def test_awq_files_of_packed_arrays(rng: np.random.Generator, tmp_path: Path) -> None:
    packed, q = make_pair(rng, "uint4", (64, 64), Blocked(0, 16), symmetric=False, scale_dtype="float16")
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
    info = checkpoint.Info("awq", {"config.json": {"quantization_config": quantization}})
    checkpoint.save(tmp_path, {"m.weight": packed.astype("float16")}, info)
    loaded, _ = checkpoint.load(tmp_path)
    assert_same(loaded["m.weight"], q.astype("float16"))


def test_joins_of_other_codes_are_refused(rng: np.random.Generator) -> None:
    packed, q = make_pair(rng, "int5", (3, 24))
    with pytest.raises(TypeError, match=r"concatenate: arrays\[1\]\.codes: expected int5, as in arrays\[0\], got int8"):
        jq.concatenate([packed, q])


@pytest.mark.parametrize("name", FORMATS)
def test_contractions(rng: np.random.Generator, name: str) -> None:
    packed, q = make_pair(rng, name, (32, 24), Blocked(0, 8))
    for rows in (1, 3):
        x = rng.normal(size=(rows, 32)).astype(np.float32)
        y = jq.matmul(x, q)
        assert_near(jq.matmul(x, packed), y)
        assert_near(x @ packed, y)
        assert_near(jq.matmul(packed.T, x.T), y.T)
        assert_near(jq.einsum("ro,io->ri", y, packed), jq.einsum("ro,io->ri", y, q))
    indices = jnp.array([[3, 0], [31, 7]])
    for axis in (0, 1):
        assert_same(jq.take(packed, indices % 24, axis=axis), jq.take(q, indices % 24, axis=axis))
    assert_near(jq.einsum("io->o", packed), jq.einsum("io->o", q))


@pytest.mark.parametrize("name", ["int3", "uint5", "int6", "uint4"])
def test_contractions_of_integers(rng: np.random.Generator, name: str) -> None:
    packed, q = make_pair(rng, name, (32, 24))
    x = jq.quantize(rng.normal(size=(3, 32)).astype(np.float32), QuantSpec("uint8", PerAxis(0)))
    assert_same(jq.matmul(x, packed), jq.matmul(x, q))
    assert_same(jq.dot_general(packed, x, (((0,), (1,)), ((), ()))), jq.dot_general(q, x, (((0,), (1,)), ((), ()))))
    kernel, plain = make_pair(rng, name, (3, 3, 4, 8))
    image = rng.normal(size=(1, 6, 6, 4)).astype(np.float32)
    numbers = ("NHWC", "HWIO", "NHWC")
    args: dict[str, Any] = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": numbers}
    y = jq.quantize(image, QuantSpec("uint8"))
    assert_same(jq.conv_general_dilated(y, kernel, **args), jq.conv_general_dilated(y, plain, **args))
    assert_near(jq.conv_general_dilated(image, kernel, **args), jq.conv_general_dilated(image, plain, **args))


@pytest.mark.parametrize("name", FEW)
def test_transforms(rng: np.random.Generator, name: str) -> None:
    packed, q = make_pair(rng, name, (4, 3, 40), PerAxis((0, 1)))
    read = QuantizedArray.dequantize
    assert_same(jax.jit(read)(packed), q)
    assert_same(jax.vmap(read)(packed), q)
    assert_same(jax.vmap(jax.vmap(read))(packed), q)
    assert_same(jax.vmap(read, 2, 2)(packed.per_index(2)), q)
    assert_same(lax.scan(lambda carry, row: (carry, read(row)), None, packed)[1], q)
    spec = QuantSpec(FORMATS[name], PerAxis(-2))
    x = rng.normal(size=(4, 3, 40)).astype(np.float32)
    rows = jax.vmap(lambda x: jq.quantize(x, spec).pack())(x)
    for row, values in zip(rows, x, strict=True):
        assert_same(row, jq.quantize(values, spec))
    slope = jax.grad(lambda s: packed.replace(scale=s).dequantize().sum())(packed.scale)
    assert_same(slope, jax.grad(lambda s: q.replace(scale=s).dequantize().sum())(q.scale))


def test_axes_of_words_are_not_mapped(rng: np.random.Generator) -> None:
    packed, _ = make_pair(rng, "int5", (3, 40), PerAxis((0, 1)))
    with pytest.raises(ValueError, match=r"QuantizedArray|vmap"):
        jax.vmap(QuantizedArray.dequantize, 1)(packed)
    with pytest.raises(ValueError, match=r"stored_codes: expected rank 2 or more for stored_order"):
        jax.vmap(QuantizedArray.dequantize)(packed[:, :3].T)


@pytest.mark.parametrize("name", FORMATS)
def test_files_and_copies(rng: np.random.Generator, name: str, tmp_path: Path) -> None:
    packed, q = make_pair(rng, name, (6, 40), Blocked(-1, 8))
    tree = {"w": packed, "t": packed.store_last(0)}
    checkpoint.save_safetensors(tmp_path / "a.safetensors", tree)
    loaded = checkpoint.load_safetensors(tmp_path / "a.safetensors")
    plain = checkpoint.from_arrays(checkpoint.to_arrays(tree))
    for restored in (loaded["w"], loaded["t"], plain["w"], copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert restored.format == packed.format
        assert_same(restored, q)
    np.testing.assert_array_equal(loaded["w"].stored_codes, packed.stored_codes)
    assert (loaded["w"].packing, loaded["t"].stored_order) == (packed.packing, (-1, -2))
    if name != "uint2":  # its zero points are uint2, which `jax.export` cannot save
        exported = jax.export.export(jax.jit(QuantizedArray.dequantize))(packed)
        assert_same(jax.export.deserialize(exported.serialize()).call(packed), q)


def test_sharding_of_other_axes(rng: np.random.Generator) -> None:
    packed, q = make_pair(rng, "int5", (8, 40), PerAxis(0))
    mesh = jax.make_mesh((4,), ("x",))
    placed = jax.device_put(packed, NamedSharding(mesh, PartitionSpec("x", None)))
    assert_same(jax.jit(QuantizedArray.dequantize)(placed), q)
    x = rng.normal(size=(2, 40)).astype(np.float32)
    np.testing.assert_allclose(jq.matmul(x, placed.T), jq.matmul(x, q.T), rtol=1e-5, atol=1e-5)


DAMAGE: dict[str, tuple[Any, str]] = {
    "short rows": (lambda words: words[:, :-1], r"stored_codes: expected rows of 7 words, which 40 codes of int5 take"),
    "long rows": (lambda words: jnp.pad(words, ((0, 0), (0, 1))), r"stored_codes: expected rows of 7 words"),
    "another dtype": (lambda words: words.astype(jnp.int32), r"stored_codes: expected dtype uint32, because"),
    "no dimension": (lambda words: words[0, 0], r"stored_codes: expected rank 1 or more for packing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_words_are_refused(rng: np.random.Generator, damage: str) -> None:
    packed, _ = make_pair(rng, "int5", (6, 40))
    change, message = DAMAGE[damage]
    children, static = packed.tree_flatten()
    damaged = QuantizedArray.tree_unflatten(static, (change(children[0]), *children[1:]))
    for read in (QuantizedArray.dequantize, jax.jit(QuantizedArray.dequantize)):
        with pytest.raises((TypeError, ValueError), match=message):
            read(damaged)


class _EarlierPacking:
    """It pickles as a `Packing` did while the layout of words was another one: a new object and its attributes."""

    def __reduce__(self) -> Any:
        return object.__new__, (Packing,), {"format": np.dtype(np.int8), "length": 40}


def test_pickles_of_earlier_words_are_refused() -> None:
    text = "QuantizedArray: packing: expected words in the layout of this version, got words in the layout of"
    with pytest.raises(ValueError, match=text):
        pickle.loads(pickle.dumps(_EarlierPacking()))


def test_packing_is_checked(rng: np.random.Generator) -> None:
    packed, q = make_pair(rng, "int5", (6, 40))
    wide = jq.quantize(rng.normal(size=(6, 40)).astype(np.float32), QuantSpec("int8"))
    with pytest.raises(ValueError, match=r"QuantizedArray\.pack: self: expected codes from -4 to 3, which int3 holds"):
        q.pack("int3")
    with pytest.raises(TypeError, match=r"QuantizedArray\.pack: self: expected codes of int2, .* got int8"):
        wide.pack()
    expected = "dtype: expected int3, int5 or int6, as the codes have the dtype int8, got "
    for dtype in ("uint5", "int4"):
        with pytest.raises(TypeError, match=r"QuantizedArray\.pack: " + expected + dtype):
            wide.pack(dtype)
    floats = jq.quantize(rng.normal(size=(6, 40)).astype(np.float32), QuantSpec("float8_e4m3fn"))
    with pytest.raises(TypeError, match=r"\.pack: dtype: expected None, as the codes have the dtype float8_e4m3fn"):
        floats.pack("int4")
    with pytest.raises(TypeError, match=r"QuantizedArray\.pack: dtype: expected dtype int2.*got int8"):
        wide.pack("int8")
    with pytest.raises(ValueError, match=r"QuantizedArray\.pack: dtype: expected int5, as the codes are packed"):
        packed.pack("int6")
    with pytest.raises(ValueError, match=r"QuantizedArray\.pack: self: expected rank 1 or more"):
        q[0, 0].pack("int5")
    assert_same(q.pack("int6"), q)
    assert_same(jax.jit(lambda q: q.pack("int6"))(q), q)
    # Under jit the codes are not known, so the result must show that they do not fit.
    assert bool(jnp.isnan(jax.jit(lambda q: q.pack("int3").dequantize())(q)).all())


def test_new_codes_are_packed(rng: np.random.Generator) -> None:
    packed, q = make_pair(rng, "int5", (6, 40), jq.PerTensor())
    changed = packed.replace(codes=q.codes[:, :13] // 2)
    assert changed.shape == (6, 13)
    np.testing.assert_array_equal(changed.codes, q.codes[:, :13] // 2)
    assert_same(packed.astype(jnp.bfloat16), q.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match=r"codes: expected dtype int8, which holds int5"):
        packed.replace(codes=jnp.zeros((6, 40), jnp.uint8))
    abstract = jax.eval_shape(lambda x: jq.quantize(x, QuantSpec("int5")), jax.ShapeDtypeStruct((6, 40), jnp.float32))
    assert abstract.shape == (6, 40)
    assert abstract.stored_codes.shape == (6, 7)


def test_single_codes_are_not_packed() -> None:
    q = jq.quantize(jnp.float32(3.0), QuantSpec("int5"))
    assert (q.packing, q.codes.dtype, int(q.codes)) == (None, jnp.int8, 15)


def test_traced_lengths_of_rows_are_static() -> None:
    shape = jax.export.symbolic_shape("n, 40")
    spec = QuantSpec("int5", PerAxis(0))
    exported = jax.export.export(jax.jit(lambda x: jq.quantize(x, spec).dequantize()))(
        jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    x = np.linspace(-3, 3, 120, dtype=np.float32).reshape(3, 40)
    assert_same(exported.call(x), jq.quantize(x, spec))
