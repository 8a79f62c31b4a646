"""GGUF files that are damaged or lie: each is a CheckpointError, or is loaded and saved as it is."""

from __future__ import annotations

import pathlib
import resource
import struct
import sys

import gguf
import numpy as np
import pytest

from jaxquant import checkpoint

from ..cases.gguf_files import add_metadata, write_gguf
from ..oracles import file_formats


def text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def entry(name: bytes = b"w", shape: tuple[int, ...] = (32,), kind: int = 0, place: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", kind, place)


def make(
    *entries: bytes, values: bytes = b"", keys: int = 0, data: int = 128, version: int = 3, count: int | None = None
) -> bytes:
    count = len(entries) if count is None else count
    header = b"GGUF" + struct.pack("<IQQ", version, count, keys) + values + b"".join(entries)
    return header + bytes(-len(header) % 32) + bytes(data)


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return text(b"a") + struct.pack("<IIQ", 9, kind, count) + data


DAMAGED: dict[str, tuple[bytes, str]] = {
    "short": (b"GGUF", "expected a GGUF file"),
    "only the beginning": (make(entry())[:30], "the file ends"),
    "version 1": (make(entry(), version=1), "got version 1"),
    "big-endian": (make(entry(), version=0x03000000), "a big-endian file"),
    "more tensors than there are": (make(entry(), count=1000), "the file ends|expected"),
    "a million tensors": (make(entry(), count=10**6), "at most 500000 tensors"),
    "2**64 - 1 tensors": (make(entry(), count=2**64 - 1), "at most 500000 tensors"),
    "2**63 keys": (make(entry(), keys=2**63), "at most 65536 keys"),
    "a key twice": (
        make(entry(), values=(text(b"a") + struct.pack("<IB", 0, 1)) * 2, keys=2), "each key once, got 'a' twice"
    ),
    "a long string": (
        make(entry(), values=text(b"a") + struct.pack("<IQ", 8, 2**40), keys=1), "bytes of a string, got 1099511627776"
    ),
    "a long array": (make(entry(), values=array(0, 2**40), keys=1), "at most .* elements, got 1099511627776"),
    "an array beyond the end": (make(entry(), values=array(10, 100), keys=1), "the file ends"),
    "many strings": (make(entry(), values=array(8, 2**23 + 1), keys=1, data=2**24), "at most 8388608 strings"),
    "an unknown type of value": (make(entry(), values=text(b"a") + struct.pack("<I", 13), keys=1), "got 13"),
    "a bool of 2": (make(entry(), values=text(b"a") + struct.pack("<IB", 7, 2), keys=1), "0 or 1 for a bool, got 2"),
    "nested arrays": (
        make(entry(), values=text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 1000, keys=1),
        "at most 3 arrays",
    ),
    "an alignment of 3": (
        make(entry(), values=text(b"general.alignment") + struct.pack("<II", 4, 3), keys=1), "a power of two"
    ),
    "an alignment of 2**31": (
        make(entry(), values=text(b"general.alignment") + struct.pack("<II", 4, 2**31), keys=1), "a power of two"
    ),
    "an alignment in text": (
        make(entry(), values=text(b"general.alignment") + struct.pack("<I", 8) + text(b"32"), keys=1), "a power of two"
    ),
    "a tensor twice": (make(entry(), entry()), "each tensor once, got 'w' twice"),
    "2**40 elements": (make(entry(shape=(2**20, 2**20))), r"expected 4398046511104 bytes for F32"),
    "2**80 elements": (make(entry(shape=(2**40, 2**40))), "for F32 of shape"),
    "2**63 elements": (make(entry(shape=(2**63,))), "elements of a tensor, got 9223372036854775808"),
    "2**62 empty rows": (make(entry(shape=(0, 2**62), kind=2), data=0), "for Q4_0 of shape"),
    "2**62 rows of nothing, packed": (make(entry(shape=(32, 2**61, 0), kind=2), data=0), "for Q4_0 of shape"),
    "2**30 rows of nothing": (make(entry(shape=(32, 2**30, 0), kind=2), data=0), ""),
    "5 dimensions": (make(entry(shape=(1, 1, 1, 1, 1))), "at most 4 dimensions, got 5"),
    "2**32 - 1 dimensions": (
        make(text(b"w") + struct.pack("<I", 2**32 - 1)), "at most 4 dimensions, got 4294967295"
    ),
    "rows of 31": (make(entry(shape=(31,), kind=2)), "a multiple of 32 elements for Q4_0"),
    "a scalar of Q4_0": (make(entry(shape=(), kind=2)), "a multiple of 32 elements for Q4_0"),
    "an unknown type": (make(entry(kind=99)), "got number 99"),
    "a type that is no longer used": (make(entry(kind=4)), "got number 4"),
    "a type that is not decoded": (make(entry(shape=(256,), kind=16), data=96), "got IQ2_XXS"),
    "beyond the end": (make(entry(place=128)), "begins at byte"),
    "far beyond the end": (make(entry(place=2**63)), "bytes before a tensor"),
    "no multiple of the alignment": (make(entry(place=4), data=132), "begins at byte"),
    "overlapping": (make(entry(), entry(b"v")), "overlaps"),
    "overlapping in part": (make(entry(), entry(b"v", place=64), data=192), "overlaps"),
    "a gap": (make(entry(), entry(b"v", place=192), data=320), "a gap before it"),
    "more than the tensors": (make(entry(), data=192), "expected a file of"),
    "less than the tensors": (make(entry(), data=100), "expected a file of|expected 128 bytes"),
    "a name that cannot be printed": (make(entry(b"\x1b[2J" + b"x" * 5000, kind=99)), r"tensor '\ufffd\[2Jxxx"),
}  # fmt: skip


def count_resident_bytes() -> int:
    """Return the most memory that the process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name: str, tmp_path: pathlib.Path) -> None:
    data, message = DAMAGED[name]
    (tmp_path / "a.gguf").write_bytes(data)
    before = count_resident_bytes()
    if message:
        with pytest.raises(checkpoint.CheckpointError, match=f"(?s).*(?:{message})") as error:
            checkpoint.load(tmp_path / "a.gguf", format="gguf")
        assert str(tmp_path / "a.gguf") in str(error.value)
        assert len(str(error.value)) < 1000
    else:
        check_mutant(tmp_path / "a.gguf", data)
    assert count_resident_bytes() - before < 2**27


def test_an_undamaged_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.gguf").write_bytes(make(entry()))
    assert checkpoint.load(tmp_path / "a.gguf")[0]["w"].shape == (32,)


def test_a_file_is_read_while_it_shrinks(tmp_path: pathlib.Path) -> None:
    """A file in memory that another program truncates would kill the process."""
    path = tmp_path / "a.gguf"
    path.write_bytes(make(entry(shape=(2**20,)), data=2**22))

    def truncate(name: str, shape: tuple[int, ...]) -> None:
        path.write_bytes(path.read_bytes()[: 2**20])

    with pytest.raises(checkpoint.CheckpointError, match="the file ends"):
        checkpoint.load(path, sharding=truncate)


def make_seed(rng: np.random.Generator, path: pathlib.Path) -> bytes:
    """Return a small file with all types and all kinds of metadata."""
    kinds = rng.permutation(list(file_formats.GGUF))[:3]
    tensors = {f"blk.{i}": (kind, file_formats.GGUF[kind].draw(rng)["data"][:1]) for i, kind in enumerate(kinds)}
    write_gguf(path, {**tensors, "norm": ("F32", rng.normal(size=5).astype(np.float32))}, add_metadata)
    return path.read_bytes()


def mutate(rng: np.random.Generator, data: bytes) -> bytes:
    """Return a file with a few bytes changed, removed, repeated or replaced by numbers that are special."""
    new = bytearray(data)
    header = len(data) - 800
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(0, header if rng.random() < 0.8 else len(new)))
        choice = rng.integers(0, 6)
        if choice == 0:
            new[place : place + 1] = bytes([int(rng.integers(0, 256))])
        elif choice == 1:
            new[place : place + 8] = struct.pack("<Q", int(rng.choice([0, 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1])))
        elif choice == 2:
            new[place : place + 4] = struct.pack("<I", int(rng.choice([0, 1, 2, 9, 16, 2**31, 2**32 - 1])))
        elif choice == 3:
            del new[place : place + int(rng.integers(1, 40))]
        elif choice == 4:
            new[place:place] = new[place : place + int(rng.integers(1, 40))]
        else:
            del new[place:]
            return bytes(new)
        header = max(1, min(header, len(new)))
    return bytes(new)


def check_mutant(path: pathlib.Path, data: bytes) -> bool:
    """Return whether a file is loaded; what is loaded is saved with the same bytes, apart from what aligns tensors."""
    path.write_bytes(data)
    try:
        tensors, info = checkpoint.load(path, format="gguf", unsupported="keep_bytes")
    except checkpoint.CheckpointError:
        return False
    str(info)
    checkpoint.save(path.with_suffix(".again"), tensors, info)
    again, _ = checkpoint.load(path.with_suffix(".again"), format="gguf", unsupported="keep_bytes")
    assert list(again) == list(tensors)
    header = len(data) - sum(tensor.nbytes for tensor in info.tensors.values())
    new = path.with_suffix(".again").read_bytes()
    if len(info.tensors) and "general.alignment" not in info.metadata:
        start = min(tensor.extras["start"] for tensor in info.tensors.values())
        assert new[: start - 32] == data[: start - 32]
        for tensor in info.tensors.values():
            begin = tensor.extras["start"]
            assert new[begin : begin + tensor.nbytes] == data[begin : begin + tensor.nbytes]
    return header >= 0


def run_mutants(rng: np.random.Generator, tmp_path: pathlib.Path, count: int) -> None:
    path, seed, loaded = tmp_path / "a.gguf", b"", 0
    before = count_resident_bytes()
    for i in range(count):
        if i % 200 == 0:
            seed = make_seed(rng, path)
            assert check_mutant(path, seed)
        loaded += check_mutant(path, mutate(rng, seed))
    # Some change only a number, so that the file is as good as before.
    assert 0 < loaded < count
    assert count_resident_bytes() - before < 2**29


def test_mutants(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    run_mutants(rng, tmp_path, 300)


@pytest.mark.full
def test_many_mutants(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    run_mutants(rng, tmp_path, 100_000)


def test_the_package_reads_the_seed(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    make_seed(rng, tmp_path / "a.gguf")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    tensors, info = checkpoint.load(tmp_path / "a.gguf")
    assert [tensor.name for tensor in reader.tensors] == list(tensors)
    assert {*reader.fields} - {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"} == set(info.metadata)
