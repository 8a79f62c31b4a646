"""GGUF files, against the package gguf: the same codes and floats, and the same bytes when they are written again."""

from __future__ import annotations

import pathlib
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import checkpoint
from jaxquant.checkpoint import words
from jaxquant.checkpoint.formats.gguf_blocks import BLOCK_TYPES, OTHER_TYPES

from ..cases.gguf_files import add_metadata, draw_data, write_gguf
from ..oracles import file_formats
from ..oracles.file_formats import F32, Parts
from ..support import equality

NAMES = tuple(file_formats.GGUF)
PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32}


def dequantize_with_package(data: np.ndarray, kind: str) -> np.ndarray:
    if not data.size:  # it cannot
        size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        return np.empty((*data.shape[:-1], data.shape[-1] // nbytes * size), F32)
    return gguf.dequantize(data, gguf.GGMLQuantizationType[kind])


def same_floats(actual: Any, expected: np.ndarray, kind: str) -> None:
    actual = np.asarray(actual)
    if "FP4" in kind:  # the package's table of float4 has integers, and no -0
        actual, expected = (np.where(x == 0, np.float32(0), x) for x in (actual, expected))
    equality.same_bits(actual, expected)


def check_part(part: Any, expected: np.ndarray | Parts | None) -> None:
    """Check the codes of a scale or an offset, and its own scale."""
    if isinstance(expected, Parts):
        assert isinstance(part, jq.QuantizedArray)
        equality.check_equal(np.asarray(part.codes).astype(np.float32), expected.codes.astype(np.float32))
        check_part(part.scale, expected.scale)
    elif expected is None:
        assert part is None
    else:
        equality.same_bits(part, expected)


@pytest.mark.parametrize("kind", NAMES)
def test_codes_and_floats_are_those_of_the_file(kind: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    data = draw_data(rng, kind)
    write_gguf(tmp_path / "a.gguf", {"w": (kind, data)})
    tensors, info = checkpoint.load(tmp_path / "a.gguf")
    q, parts = tensors["w"], file_formats.GGUF[kind].decode({"data": data})
    assert info.tensors["w"].stored_as == kind
    assert (q.shape, info.tensors["w"].shape) == (parts.codes.shape, parts.codes.shape)
    assert info.tensors["w"].nbytes == data.nbytes
    assert info.tensors["w"].bits_per_weight == file_formats.GGUF[kind].bits
    equality.check_equal(np.asarray(q.codes).astype(np.float32), parts.codes.astype(np.float32))
    check_part(q.scale, parts.scale)
    check_part(q.offset, parts.offset)
    expected = dequantize_with_package(data, kind)
    for values in (q.dequantize(), jax.jit(lambda q: q.dequantize())(q), q[1:].dequantize()):
        same_floats(values, expected[-len(values) :], kind)
    # What maps the rows needs a scale for each of them; NVFP4 has one for all.
    rows = q.per_index(0)
    same_floats(jax.vmap(lambda q: q.dequantize())(rows), expected, kind)
    same_floats(lax.scan(lambda c, q: (c, q.dequantize()), 0, rows)[1], expected, kind)


@pytest.mark.sample(20)
@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("lead", [(3,), (1,), (), (2, 4), (2, 3, 2), (0,), (2, 0)])
def test_saved_bytes_are_those_of_the_file(
    kind: str, lead: tuple[int, ...], rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    data = draw_data(rng, kind, lead)
    x = rng.normal(size=(2, 5)).astype(np.float32)
    write_gguf(tmp_path / "a.gguf", {"w": (kind, data), "x": ("F32", x)})
    tensors, info = checkpoint.load(tmp_path / "a.gguf")
    same_floats(tensors["w"].dequantize(), dequantize_with_package(data, kind), kind)
    checkpoint.save(tmp_path / "b.gguf", tensors, info)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    # The array decides the type, whatever the file had, and the order in memory does not matter.
    # Narrow integers that are not packed count as int8.
    moved = tensors["w"] if isinstance(tensors["w"].format, type(jq.QuantSpec("int5").dtype)) else tensors["w"].unpack()
    moved = moved.store_last(0) if moved.ndim > 1 else moved
    checkpoint.save(tmp_path / "c.gguf", {**tensors, "w": moved}, info)
    assert (tmp_path / "c.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_rows_longer_and_shorter_than_what_is_read_at_once(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    for kind in ("Q4_K", "Q5_0", "Q8_0"):
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
        wide = rng.integers(0, 256, (2, 4096 * block)).astype(np.uint8)
        tall = rng.integers(0, 256, (9000, block)).astype(np.uint8)
        write_gguf(tmp_path / "a.gguf", {"wide": (kind, wide), "tall": (kind, tall)})
        tensors, info = checkpoint.load(tmp_path / "a.gguf")
        for name, data in (("wide", wide), ("tall", tall)):
            with np.errstate(all="ignore"):
                equality.same_bits(tensors[name].dequantize(), dequantize_with_package(data, kind))
        checkpoint.save(tmp_path / "b.gguf", tensors, info)
        assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def draw_ternary(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return bytes of TQ1_0: five digits of base 3, 243 numbers, stretched to 256; the last four bytes have four."""
    numbers = rng.integers(0, 243, shape)
    numbers[..., 48:] = numbers[..., 48:] // 3 * 3
    return ((numbers * 256 + 242) // 243).astype(np.uint8)


def test_ternary_digits_are_those_of_the_package(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    data = rng.integers(0, 256, (5, 4, 54)).astype(np.uint8)
    data[..., 52:] = rng.normal(size=(5, 4, 1)).astype(np.float16).view(np.uint8)
    data[..., :52] = draw_ternary(rng, (5, 4, 52))
    other = data.copy()
    other[3, 2, 7] = next(n for n in range(256) if n not in {(i * 256 + 242) // 243 for i in range(243)})
    write_gguf(tmp_path / "a.gguf", {"w": ("TQ1_0", data.reshape(5, -1))})
    tensors, info = checkpoint.load(tmp_path / "a.gguf")
    equality.same_bits(tensors["w"].dequantize(), dequantize_with_package(data.reshape(5, -1), "TQ1_0"))
    checkpoint.save(tmp_path / "b.gguf", tensors, info)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    three = tensors["w"].replace(codes=jnp.full((5, 1024), 3, jnp.uint2))
    with pytest.raises(checkpoint.CheckpointError, match="'w': expected codes of TQ1_0 from 0 to 2, got 3 to 3"):
        checkpoint.save(tmp_path / "b.gguf", {"w": three}, info)
    write_gguf(tmp_path / "a.gguf", {"w": ("TQ1_0", other.reshape(5, -1))})
    with pytest.raises(checkpoint.CheckpointError, match="'w': expected bytes that the digits of TQ1_0 are written as"):
        checkpoint.load(tmp_path / "a.gguf")
    tensors, _ = checkpoint.load(tmp_path / "a.gguf", unsupported="keep_bytes")
    equality.check_equal(tensors["w"], other.reshape(5, -1))


def test_every_byte_comes_back(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """Also scales that are NaN or infinite."""
    tensors = {}
    for kind, row in BLOCK_TYPES.items():
        data = rng.integers(0, 256, (16, 2 * row.nbytes)).astype(np.uint8)
        if kind == "NVFP4":
            data.reshape(-1, row.nbytes)[:, :4] %= 127
        if kind == "TQ1_0":
            data.reshape(-1, row.nbytes)[:, :52] = draw_ternary(rng, (32, 52))
        tensors[kind] = (kind, data)
    write_gguf(tmp_path / "a.gguf", tensors)
    loaded, info = checkpoint.load(tmp_path / "a.gguf")
    checkpoint.save(tmp_path / "b.gguf", loaded, info)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_words_in_numpy_are_those_of_packed_arrays(bits: int, rng: np.random.Generator) -> None:
    for _ in range(10):
        rows, length = int(rng.integers(0, 5)), 32 * int(rng.integers(1, 9))
        codes = rng.integers(0, 2**bits, (rows, length)).astype(np.uint8)
        out = np.empty((rows, length * bits // 32), np.uint32)
        words.pack_rows(codes | np.uint8(256 - 2**bits), bits, out)  # the other bits do not count
        held: Any = {2: jnp.uint2, 4: jnp.uint4}.get(bits)
        q = jq.QuantizedArray(jnp.asarray(codes, held), jnp.ones((1, 1))).pack(held or f"uint{bits}")
        equality.check_equal(out, np.asarray(q.stored_codes))
        equality.check_equal(words.unpack_rows(out, bits), codes)


def test_metadata_come_back(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    x = rng.normal(size=(2, 5)).astype(np.float32)
    write_gguf(tmp_path / "a.gguf", {"x": ("F32", x)}, add_metadata)
    tensors, info = checkpoint.load(tmp_path / "a.gguf")
    assert info.metadata["a.strings"] == ["", "a", "▁the", "\0", "x" * 3000]
    assert info.metadata["a.uint64"] == 2**64 - 1
    assert info.metadata["a.bool"] is True
    assert info.metadata["a.string"] == "Grüße\n\0"
    assert info.metadata["a.floats"].dtype == np.float32
    checkpoint.save(tmp_path / "b.gguf", tensors, info)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    info.metadata["a.string"] = "other"
    info.metadata["b.new"] = [1, 2]
    checkpoint.save(tmp_path / "b.gguf", tensors, info)
    fields = gguf.GGUFReader(tmp_path / "b.gguf").fields
    assert (fields["a.string"].contents(), fields["b.new"].contents()) == ("other", [1, 2])


def test_bytes_that_are_no_utf8_come_back(tmp_path: pathlib.Path) -> None:
    write_gguf(tmp_path / "a.gguf", {"xyzw": ("F32", np.ones(3, F32))}, lambda writer: writer.add_string("k", "QQQQ"))
    data = (
        (tmp_path / "a.gguf").read_bytes().replace(b"QQQQ", b"\xff\xfe\x80\xc0").replace(b"xyzw", b"\xed\xa0\x80\xff")
    )
    (tmp_path / "a.gguf").write_bytes(data)
    tensors, info = checkpoint.load(tmp_path / "a.gguf")
    str(info)
    checkpoint.save(tmp_path / "b.gguf", tensors, info)
    assert (tmp_path / "b.gguf").read_bytes() == data


def rotate(x: np.ndarray, angles: np.ndarray, *, neighbors: bool) -> np.ndarray:
    """Return heads (heads, 2 n) rotated by n angles: neighbors together, or element i with element i + n."""
    n = angles.size
    first, second = (x[:, ::2], x[:, 1::2]) if neighbors else (x[:, :n], x[:, n:])
    new = first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles)
    return np.stack(new, axis=-1).reshape(x.shape) if neighbors else np.concatenate(new, axis=-1)


def test_rows_of_ropes_in_the_order_of_other_models(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """The line of the page about downloaded models: rotating halves then gives the attention of the file's order."""
    heads, rows = 3, 3 * 8
    write_gguf(tmp_path / "a.gguf", {name: ("Q8_0", draw_data(rng, "Q8_0", (rows,))) for name in ("q", "k")})
    tensors, info = checkpoint.load(tmp_path / "a.gguf")
    order = np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    tensors_of_halves = {name: w[order] for name, w in tensors.items()}
    angles, x = rng.uniform(-3, 3, (2, 4)), rng.normal(size=(2, tensors["q"].shape[1]))
    scores = {}
    for neighbors, found in ((True, tensors), (False, tensors_of_halves)):
        q, k = (
            rotate((np.asarray(found[name].dequantize(), np.float64) @ x[i]).reshape(heads, -1), angles[i],
                   neighbors=neighbors)
            for i, name in enumerate(("q", "k"))
        )  # fmt: skip
        scores[neighbors] = (q * k).sum(axis=-1)
    np.testing.assert_allclose(scores[True], scores[False], rtol=1e-9, atol=1e-9 * np.abs(scores[True]).max())
    back = {name: w[np.argsort(order)] for name, w in tensors_of_halves.items()}
    checkpoint.save(tmp_path / "b.gguf", back, info)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_alignment_version_and_order_come_back(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    x = {f"x{i}": ("F32", rng.normal(size=3).astype(np.float32)) for i in range(3)}
    write_gguf(tmp_path / "a.gguf", x, lambda writer: writer.add_custom_alignment(256))
    data = bytearray((tmp_path / "a.gguf").read_bytes())
    data[4] = 2  # the version
    # Exchange the places of the first and the last tensor in the header: then their data are in another order.
    places = [data.find(b"x%d" % i) + 2 + 4 + 8 + 4 for i in range(3)]
    data[places[0]], data[places[0] + 1], data[places[2]], data[places[2] + 1] = 0, 2, 0, 0
    (tmp_path / "a.gguf").write_bytes(data)
    tensors, info = checkpoint.load(tmp_path / "a.gguf")
    assert list(tensors) == ["x0", "x1", "x2"]
    assert np.asarray(tensors["x0"])[0] == x["x2"][1][0]
    checkpoint.save(tmp_path / "b.gguf", tensors, info)
    assert (tmp_path / "b.gguf").read_bytes() == data


def test_files_that_end_with_the_last_tensor(tmp_path: pathlib.Path) -> None:
    write_gguf(tmp_path / "a.gguf", {"x": ("F32", np.ones(3, F32))})
    data = (tmp_path / "a.gguf").read_bytes()
    for count in (12, 20, 32):
        (tmp_path / "a.gguf").write_bytes(data[: len(data) - 32 + count])
        tensors, info = checkpoint.load(tmp_path / "a.gguf")
        checkpoint.save(tmp_path / "b.gguf", tensors, info)
        assert (tmp_path / "b.gguf").read_bytes() == data[: len(data) - 32 + (12 if count == 12 else 32)]


def test_plain_types(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    tensors = {kind: (kind, (100 * rng.normal(size=(3, 5))).astype(dtype)) for kind, dtype in PLAIN.items()}
    tensors["I64"] = ("I64", rng.integers(-(2**62), 2**62, 7))
    half = rng.normal(size=(3, 4)).astype(ml_dtypes.bfloat16)
    write_gguf(tmp_path / "a.gguf", {**tensors, "BF16": ("BF16", half.view(np.uint8))})
    loaded, info = checkpoint.load(tmp_path / "a.gguf")
    for name, (_, expected) in {**tensors, "BF16": ("", half)}.items():
        assert np.asarray(loaded[name]).tobytes() == expected.tobytes()
        assert loaded[name].dtype == expected.dtype
        assert isinstance(loaded[name], np.ndarray if expected.dtype.itemsize == 8 else jax.Array)
    checkpoint.save(tmp_path / "b.gguf", loaded, info)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


@pytest.mark.parametrize("kind", [name for name in OTHER_TYPES if name in gguf.GGMLQuantizationType.__members__])
def test_other_types_are_refused_or_kept_as_bytes(kind: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    number, size, nbytes = OTHER_TYPES[kind]
    enumerated = gguf.GGMLQuantizationType[kind]
    assert (number, (size, nbytes)) == (enumerated.value, gguf.GGML_QUANT_SIZES[enumerated])
    data = rng.integers(0, 256, (3, 2 * nbytes)).astype(np.uint8)
    write_gguf(tmp_path / "a.gguf", {"w": (kind, data), "x": ("F32", np.ones(3, F32))})
    with pytest.raises(checkpoint.CheckpointError, match=rf"tensor 'w': expected one of the types .*, got {kind}"):
        checkpoint.load(tmp_path / "a.gguf")
    tensors, info = checkpoint.load(tmp_path / "a.gguf", unsupported="keep_bytes")
    equality.check_equal(tensors["w"], data)
    assert info.tensors["w"].shape == (3, 2 * size)
    assert "kept as bytes" in str(info)
    checkpoint.save(tmp_path / "b.gguf", tensors, info)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_the_types_are_those_of_the_package() -> None:
    known = {**{name: (row.number, row.size, row.nbytes) for name, row in BLOCK_TYPES.items()}, **OTHER_TYPES}
    for kind in gguf.GGMLQuantizationType:
        if kind.name in known:
            assert known[kind.name] == (kind.value, *gguf.GGML_QUANT_SIZES[kind])


def test_scales_of_nvfp4_that_no_writer_makes(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    data = draw_data(rng, "NVFP4")
    data[0, 0] = 200
    write_gguf(tmp_path / "a.gguf", {"w": ("NVFP4", data)})
    with pytest.raises(checkpoint.CheckpointError, match=r"tensor 'w': expected scales of NVFP4.*, got \d+ to 200"):
        checkpoint.load(tmp_path / "a.gguf")
    tensors, info = checkpoint.load(tmp_path / "a.gguf", unsupported="keep_bytes")
    equality.check_equal(tensors["w"], data)
    checkpoint.save(tmp_path / "b.gguf", tensors, info)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_sharded_loading(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    tensors = {kind: (kind, draw_data(rng, kind, (4,))) for kind in NAMES}
    write_gguf(tmp_path / "a.gguf", tensors)
    loaded, info = checkpoint.load(tmp_path / "a.gguf", sharding=NamedSharding(mesh, PartitionSpec("d")))
    for kind, (_, data) in tensors.items():
        q = loaded[kind]
        assert q.stored_codes.sharding.shard_shape(q.stored_codes.shape)[0] == 2
        scale = q.scale.codes if isinstance(q.scale, jq.QuantizedArray) else q.scale
        assert scale.sharding.shard_shape(scale.shape)[0] == 2
        same_floats(jax.jit(lambda q: q.dequantize())(q), dequantize_with_package(data, kind), kind)
    checkpoint.save(tmp_path / "b.gguf", loaded, info)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    with pytest.raises(checkpoint.CheckpointError, match="leaves its last axis whole"):
        checkpoint.load(tmp_path / "a.gguf", names="Q4_0", sharding=NamedSharding(mesh, PartitionSpec(None, "d")))


# Arrays that JAX made.


def spec(dtype: Any, size: int = 32, **options: Any) -> jq.QuantSpec:
    return jq.QuantSpec(dtype, jq.Blocked(-1, size), **options)


HALF: dict[str, Any] = {"scale_dtype": jnp.float16}
SPECS = {
    "Q4_0": spec("int4", **HALF),
    "Q4_1": spec("uint4", offset=True, **HALF),
    "Q5_0": spec("int5", narrow_range=False, **HALF),
    "Q5_1": spec("uint5", offset=True, **HALF),
    "Q8_0": spec("int8", **HALF),
    "Q3_K": spec("int3", 16, scale_spec=jq.QuantSpec("int6", jq.Blocked(-1, 16), **HALF)),
    "Q4_K": spec("uint4", offset=True, scale_spec=jq.QuantSpec("uint6", jq.Blocked(-1, 8), **HALF)),
    "Q6_K": spec("int6", 16, scale_spec=jq.QuantSpec("int8", jq.Blocked(-1, 16), **HALF)),
    "MXFP4": spec("float4_e2m1fn", scale_dtype=jnp.float8_e8m0fnu, scale_rule="floor"),
}


@pytest.mark.parametrize("kind", SPECS)
def test_arrays_of_jax_are_saved_with_their_values(kind: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    x = rng.normal(size=(6, 512)).astype(np.float32)
    q = jax.jit(lambda x: jq.quantize(x, SPECS[kind]))(x)
    info = checkpoint.Info("gguf", {"general.architecture": "test", "test.layers": 3, "test.eps": 1e-5, "names": ["a"]})
    checkpoint.save(tmp_path / "a.gguf", {"w": q, "norm": jnp.ones(7)}, info)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert reader.fields["test.layers"].contents() == 3
    assert reader.fields["test.eps"].contents() == np.float32(1e-5)
    assert reader.fields["names"].contents() == ["a"]
    tensor, norm = reader.tensors
    assert (tensor.name, tensor.tensor_type.name, norm.tensor_type.name) == ("w", kind, "F32")
    same_floats(q.dequantize(), gguf.dequantize(tensor.data, tensor.tensor_type), kind)
    equality.same_bits(norm.data, np.ones(7, F32))
    loaded, _ = checkpoint.load(tmp_path / "a.gguf")
    same_floats(loaded["w"].dequantize(), np.asarray(q.dequantize()), kind)


def test_scales_for_more_elements_are_repeated(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    x = rng.normal(size=(2, 6, 128)).astype(np.float32)
    for granularity in (
        jq.PerTensor(), jq.PerAxis(1), jq.PerAxis((0, 1)), jq.Blocked(-1, 64), jq.Blocked(-1, 96),
    ):  # fmt: skip
        q = jq.quantize(x, jq.QuantSpec("int8", granularity, **HALF))
        checkpoint.save(tmp_path / "a.gguf", {"w": q}, checkpoint.Info("gguf"))
        tensor = gguf.GGUFReader(tmp_path / "a.gguf").tensors[0]
        equality.same_bits(q.dequantize(), gguf.dequantize(tensor.data, tensor.tensor_type).reshape(x.shape))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (spec("uint4", **HALF), "Q4_1, Q4_K cannot hold an array with this zero point"),
        (spec("int4"), "Q4_0 cannot hold a scale in float32 instead of float16"),
        (spec("int4", 16, **HALF), "Q4_0 cannot hold a scale of shape"),
        (jq.QuantSpec("int4", jq.Blocked(0, 2), **HALF), "Q4_0 cannot hold a scale of shape"),
        (spec("int2", **HALF), "no type holds codes of int2"),
        (spec(jq.nf4, **HALF), "no type holds codes of nf4"),
        (
            spec("float4_e2m1fn", 16, scale_spec=jq.QuantSpec("float8_e4m3fn")),
            "a scale of the whole tensor other than 1",
        ),
        (
            spec("uint4", offset=True, scale_spec=jq.QuantSpec("uint8", jq.Blocked(-1, 8), **HALF)),
            "scales from 0 to 63",
        ),
        (spec("int8", 33, **HALF), "Q8_0 cannot hold a scale of shape"),
    ],
)
def test_arrays_that_no_type_holds(
    given: jq.QuantSpec, text: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    q = jq.quantize(rng.normal(size=(4, 512)).astype(F32), given)
    with pytest.raises(checkpoint.CheckpointError, match=f"tensor 'w': expected.*{text}"):
        checkpoint.save(tmp_path / "a.gguf", {"w": q}, checkpoint.Info("gguf"))
    assert list(tmp_path.iterdir()) == []


def test_what_files_compute_in_another_way_is_refused(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    x = rng.normal(size=(4, 512)).astype(F32)
    plain = jq.quantize(x, spec("int4", **HALF))
    nested = jq.quantize(x, spec("int6", 16, scale_spec=jq.QuantSpec("int8", jq.Blocked(-1, 16), **HALF)))
    half = jnp.float16
    for q, text in (
        (plain.replace(arithmetic=half, dtype=half), "Q4_0 cannot hold values that are computed in float16 instead of"),
        (nested.replace(scale=nested.scale.replace(arithmetic=half)), "Q6_K cannot hold a scale .*computed in float16"),
        (plain.replace(inverse_scale=True), "an inverse scale"),
        (nested.replace(scale=nested.scale.replace(inverse_scale=True)), "or an inverse scale"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=f"tensor 'w': expected.*{text}"):
            checkpoint.save(tmp_path / "a.gguf", {"w": q}, checkpoint.Info("gguf"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tensor", "metadata", "text"),
    [
        (np.ones(3, np.uint8), {}, "expected a dtype that GGUF has"),
        (np.ones(3, np.complex64), {}, "expected a dtype that GGUF has"),
        (np.ones((1, 1, 1, 1, 1), F32), {}, "expected at most 4 dimensions"),
        (np.ones(3, F32), {"a": None}, "metadata 'a': expected a str"),
        (np.ones(3, F32), {"a": 2**64}, "an integer of 64 bits"),
        (np.ones(3, F32), {"a": [1, "b"]}, "metadata 'a': expected an array of one dimension"),
        (np.ones(3, F32), {"a": ["b", 1]}, "metadata 'a': expected an array of one dimension"),
        (np.ones(3, F32), {"a": np.ones((2, 2), F32)}, "metadata 'a': expected an array of one dimension"),
        (np.ones(3, F32), {"a": [[[[1]]]]}, "metadata 'a'"),
        (np.ones(3, F32), {"general.alignment": 3}, "a power of two"),
    ],
)
def test_what_a_file_cannot_hold(tensor: np.ndarray, metadata: Any, text: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(checkpoint.CheckpointError, match=text):
        checkpoint.save(tmp_path / "a.gguf", {"w": tensor}, checkpoint.Info("gguf", metadata))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("\ud800", 1, "expected names and texts that UTF-8 has"),
        ("key", "\ud800", "expected names and texts that UTF-8 has"),
        ("key", 1e300, "metadata 'key': expected a float that float32 holds, or a numpy.float64, got 1e+300"),
        ("key", [1.0, -1e300], "metadata 'key': expected a float that float32 holds, or a numpy.float64, got -1e+300"),
        ("key", [-1, 2**63], "metadata 'key': expected integers that int64 or uint64 holds"),
        ("key", [2**60 + 1, 0.5], "metadata 'key': expected numbers that one type holds, got float64"),
    ],
)
def test_metadata_that_gguf_cannot_hold_are_refused(
    tmp_path: pathlib.Path, name: str, value: object, text: str
) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.save(path, {"a": np.ones(2, np.float32)}, checkpoint.Info("gguf", {name: value}))
    assert text in str(error.value)
    assert not path.exists()


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, -1], np.int32),
        ([0, 2**32 - 1], np.uint32),
        ([-1, 2**31], np.int64),
        ([2**63 - 1, -1], np.int64),
        ([1, 2**64 - 1], np.uint64),
    ],
)
def test_lists_of_ints_keep_their_values(tmp_path: pathlib.Path, values: list[int], dtype: type[np.generic]) -> None:
    path = tmp_path / "model.gguf"
    checkpoint.save(
        path, {"a": np.ones(2, np.float32)}, checkpoint.Info("gguf", {"general.architecture": "x", "k": values})
    )
    found = checkpoint.load(path)[1].metadata["k"]
    assert (found.dtype, found.tolist()) == (dtype, values)
    assert gguf.GGUFReader(path).fields["k"].contents() == values
