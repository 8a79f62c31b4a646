"""GGUF files of adapters: what the package gguf reads of them, files that it writes, and damaged ones."""

from __future__ import annotations

import pathlib
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import checkpoint
from jaxquant.checkpoint.formats.gguf_header import ARCHITECTURES
from tests.cases.adapted_programs import PROGRAMS
from tests.support.equality import check_equal

RULES = jq.recipes.weight_only_int8()
NAMES = {"layers": "blk.{}.ffn_up.weight", "head": "output.weight"}


def network(params: Any, x: jax.Array) -> jax.Array:
    """Return a stack of two layers and a head, whose weight is the transpose of a file's."""
    x = jax.lax.scan(lambda h, w: (jax.nn.relu(h @ w.T), None), x, params["layers"])[0]
    return x @ params["head"]


def adapt(rng: np.random.Generator, settings: Any) -> tuple[Any, jq.lora.AdaptedTree, jax.Array]:
    shapes = {"layers": (2, 16, 16), "head": (16, 8)}
    params = {name: jnp.asarray(rng.normal(0, 0.4, shape).astype(np.float32)) for name, shape in shapes.items()}
    x = jnp.asarray(rng.normal(0, 1, (5, 16)).astype(np.float32))
    prepared = jq.prepare(network, params, x, rules=RULES)
    adapted = jq.lora.adapt(prepared, prepared.convert(params), settings, jax.random.key(0))
    moved = jax.tree.map(lambda v: v + jnp.asarray(rng.normal(0, 0.1, v.shape).astype(np.float32)), adapted.adapters)
    return prepared, adapted.replace(adapters=moved), x


def read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return fields, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


@pytest.mark.parametrize("second", [jq.lora.LoRA(4, alpha=6), jq.lora.LoRA(4, alpha=8, rank_stabilized=True)])
def test_a_file_has_the_names_and_shapes_of_llama_cpp(
    second: jq.lora.LoRA, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    prepared, adapted, x = adapt(rng, [jq.lora.LoRA(3, "layers", alpha=6), second])
    path = tmp_path / "adapter.gguf"
    jq.lora.save_gguf(path, prepared, adapted, architecture="llama", names=NAMES.__getitem__)
    fields, tensors = read(path)
    assert fields["general.type"] == "adapter"
    assert fields["general.architecture"] == "llama"
    assert fields["adapter.type"] == "lora"
    assert fields["adapter.lora.alpha"] == 6
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "blk.0.ffn_up.weight.lora_a": (3, 16), "blk.0.ffn_up.weight.lora_b": (16, 3),
        "blk.1.ffn_up.weight.lora_a": (3, 16), "blk.1.ffn_up.weight.lora_b": (16, 3),
        "output.weight.lora_a": (4, 16), "output.weight.lora_b": (8, 4),
    }  # fmt: skip

    # llama.cpp: w + alpha / rank * b @ a, in numpy.
    def compute_weight(w: Any, name: str) -> np.ndarray:
        a, b = (tensors[f"{name}.lora_{part}"].astype(np.float64) for part in "ab")
        return np.asarray(w, np.float64) + fields["adapter.lora.alpha"] / len(a) * b @ a

    floats = {name: q.dequantize() for name, q in adapted.frozen.params.items()}
    h = np.asarray(x, np.float64)
    for layer, w in enumerate(floats["layers"]):
        h = np.maximum(h @ compute_weight(w, f"blk.{layer}.ffn_up.weight").T, 0)
    expected = h @ compute_weight(floats["head"].T, "output.weight").T
    np.testing.assert_allclose(prepared.apply(adapted, x), expected, atol=1e-5 * np.abs(expected).max())
    loaded = jq.lora.load_gguf(path, prepared, adapted.frozen, names=NAMES.__getitem__)
    np.testing.assert_allclose(prepared.apply(loaded, x), expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["dense", "heads", "scan", "ragged", "experts"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_round_trip(name: str, dtype: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    params, x = PROGRAMS[name].sample(rng)
    prepared = jq.prepare(PROGRAMS[name].function, params, x, rules=jq.recipes.weight_only_int4(block=4))
    settings, q = jq.lora.LoRA(3, alpha=7), prepared.convert(params)
    adapted = jq.lora.adapt(prepared, q, settings, jax.random.key(0), params=params, dtype=dtype)
    names = lambda path: f"{path}.{{}}" if name in ("scan", "ragged", "experts") else path  # noqa: E731
    jq.lora.save_gguf(tmp_path / "a.gguf", prepared, adapted, architecture="llama", names=names)
    loaded = jq.lora.load_gguf(tmp_path / "a.gguf", prepared, q, names=names)
    jax.tree.map(check_equal, loaded.adapters, dict(adapted.adapters))
    assert {x.scaling for _, x in loaded.settings} == {7 / 3}
    if dtype == "float32":  # the tests allow no promotion
        check_equal(*(jax.jit(prepared.apply)(tree, x) for tree in (loaded, adapted)))


def write(path: pathlib.Path, tensors: dict[str, Any], alpha: float | None = 6.0, **fields: str) -> None:
    """Write a file of adapters with the package gguf."""
    writer = gguf.GGUFWriter(path, fields.pop("architecture", "llama"))
    writer.add_type(fields.pop("type", "adapter"))
    writer.add_string("adapter.type", fields.pop("kind", "lora"))
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, gguf.quantize(*tensor), raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def draw(rng: np.random.Generator, rank: int = 32, **changes: Any) -> dict[str, Any]:
    shapes = {"output.weight.lora_a": (rank, 16), "output.weight.lora_b": (8, rank)}
    tensors: dict[str, Any] = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    return {name: x for name, x in {**tensors, **changes}.items() if x is not None}


@pytest.mark.parametrize("alpha", [6.0, 0.0, None])
def test_a_file_of_the_package_gguf_is_read(
    alpha: float | None, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    """Also with codes for one factor; llama.cpp takes no alpha, and an alpha of 0, for the scaling 1."""
    prepared, adapted, _ = adapt(rng, jq.lora.LoRA(2))
    tensors = draw(rng)
    b, kind = tensors["output.weight.lora_b"], gguf.GGMLQuantizationType.Q8_0
    tensors["output.weight.lora_b"] = (b, kind)
    write(tmp_path / "a.gguf", tensors, alpha)
    loaded = jq.lora.load_gguf(tmp_path / "a.gguf", prepared, adapted.frozen, names=NAMES.__getitem__)
    assert [(path, x.rank, x.scaling) for path, x in loaded.settings] == [("head", 32, alpha / 32 if alpha else 1)]
    check_equal(loaded.adapters["head"]["a"], tensors["output.weight.lora_a"].T)
    check_equal(loaded.adapters["head"]["b"], gguf.dequantize(gguf.quantize(b, kind), kind).T)


A, B = "output.weight.lora_a", "output.weight.lora_b"
DAMAGES: dict[str, Any] = {
    "a model": ({}, {"type": "model"}, "expected general.type 'adapter', got 'model'"),
    "another kind": ({}, {"kind": "dora"}, "expected adapter.type 'lora', got 'dora'"),
    "alpha": ({}, {"alpha": float("nan")}, "expected adapter.lora.alpha to be a finite float, got"),
    "missing b": ({B: None}, {}, "load_gguf: path: expected a tensor output.weight.lora_b, got none"),
    "missing a": ({A: None}, {}, "which names calls .*, output.weight, got output.weight.lora_b"),
    "ranks": ({B: np.ones((8, 3), np.float32)}, {}, r"lora_b: expected float32.* of shape \(8, 32\), got"),
    "inputs": ({A: np.ones((32, 15), np.float32)}, {}, r"lora_a: expected float32.* of shape \(32, 16\), got"),
    "integers": ({A: np.ones((32, 16), np.int8)}, {}, "lora_a: expected float32.*, got int8"),
    "a rank of 0": ({A: np.ones((0, 16), np.float32), B: np.ones((8, 0), np.float32)}, {}, "matrices of one rank"),
    "unknown": ({"blk.7.x.lora_a": np.ones(3, np.float32)}, {}, "expected tensors of .*, got blk.7.x.lora_a"),
    "one of a stack": (
        {"blk.1.ffn_up.weight.lora_a": np.ones((2, 16), np.float32)}, {},
        "a tensor blk.0.ffn_up.weight.lora_a, got none",
    ),
    "ranks of a stack": (
        {f"blk.{n}.ffn_up.weight.lora_a": np.ones((2 + n, 16), np.float32) for n in range(2)}, {},
        r"matrices of one rank at layers, got \[\(2,\), \(3,\)\]",
    ),
    "nothing": ({A: None, B: None}, {}, "which names calls .*, output.weight, got a file without tensors"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused(damage: str, fixed_rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    prepared, adapted, _ = adapt(fixed_rng, jq.lora.LoRA(2))
    changes, fields, text = DAMAGES[damage]
    path = tmp_path / "a.gguf"
    write(path, draw(fixed_rng, **changes), **fields)
    with pytest.raises(ValueError, match=text):
        jq.lora.load_gguf(path, prepared, adapted.frozen, names=NAMES.__getitem__)


def test_a_parameter_without_a_name_has_no_adapter(fixed_rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    prepared, adapted, _ = adapt(fixed_rng, jq.lora.LoRA(2, "layers"))
    names = {"layers": NAMES["layers"]}
    jq.lora.save_gguf(tmp_path / "a.gguf", prepared, adapted, architecture="llama", names=names.__getitem__)
    loaded = jq.lora.load_gguf(tmp_path / "a.gguf", prepared, adapted.frozen, names=names.get)
    check_equal(loaded.adapters["layers"]["a"], adapted.adapters["layers"]["a"])
    assert list(loaded.adapters) == ["layers"]
    with pytest.raises(TypeError, match=r"layers: .*save_gguf: names: expected a function that returns text, got None"):
        jq.lora.save_gguf(tmp_path / "b.gguf", prepared, adapted, architecture="llama", names=lambda path: None)


def test_a_cut_file_is_refused(fixed_rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    prepared, adapted, _ = adapt(fixed_rng, jq.lora.LoRA(2))
    path = tmp_path / "a.gguf"
    with pytest.raises(checkpoint.CheckpointError, match=r"a\.gguf: expected a file or a folder, got nothing there"):
        jq.lora.load_gguf(path, prepared, adapted.frozen)
    write(path, draw(fixed_rng))
    data = path.read_bytes()
    for length in range(0, len(data) - 32, 97):
        path.write_bytes(data[:length])
        with pytest.raises(checkpoint.CheckpointError, match=r"a\.gguf"):
            jq.lora.load_gguf(path, prepared, adapted.frozen, names=NAMES.__getitem__)


def test_the_architectures_are_those_of_the_package() -> None:
    known = set(gguf.MODEL_ARCH_NAMES.values())
    assert known >= ARCHITECTURES or known <= ARCHITECTURES  # a newer package, or an older one


def test_an_architecture_that_only_the_file_knows(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    prepared, adapted, _ = adapt(rng, jq.lora.LoRA(2))
    info = checkpoint.Info("gguf", {"general.architecture": "lama"})
    jq.lora.save_gguf(tmp_path / "a.gguf", prepared, adapted, architecture=info, names=NAMES.__getitem__)
    assert checkpoint.load(tmp_path / "a.gguf")[1].metadata["general.architecture"] == "lama"


def test_what_a_file_cannot_hold_is_refused(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.gguf"
    for name, text in (("tied", r"one of table \(dot_general and take\)"), ("convolution", "one of window")):
        params, x = PROGRAMS[name].sample(rng)
        prepared = jq.prepare(PROGRAMS[name].function, params, x, rules=RULES)
        adapted = jq.lora.adapt(prepared, prepared.convert(params), jq.lora.LoRA(2), jax.random.key(0))
        with pytest.raises(ValueError, match=rf"lora\.save_gguf: adapted: expected adapters of products.*{text}"):
            jq.lora.save_gguf(path, prepared, adapted, architecture="llama")
    prepared, adapted, _ = adapt(rng, jq.lora.LoRA(2, variant="dora"))
    with pytest.raises(ValueError, match=r'save_gguf: adapted: .* not of the variant "dora", got one of blk.0'):
        jq.lora.save_gguf(path, prepared, adapted, architecture="llama", names=NAMES.__getitem__)
    prepared, adapted, _ = adapt(rng, jq.lora.LoRA(2))
    with pytest.raises(TypeError, match=r"save_gguf: architecture: expected text or an Info, got None"):
        jq.lora.save_gguf(path, prepared, adapted, architecture=None)  # pyright: ignore
    for name, near in (("lama", "'llama', 'llama4', "), ("Llama", "'llama', "), ("", "'llama', 'gemma3'")):
        text = rf"save_gguf: architecture: expected an architecture of llama.cpp, such as {near}.*, got '{name}'"
        with pytest.raises(ValueError, match=text):
            jq.lora.save_gguf(path, prepared, adapted, architecture=name, names=NAMES.__getitem__)
    with pytest.raises(ValueError, match=r'expected the Info of a GGUF file, with "general.architecture", got one of'):
        jq.lora.save_gguf(path, prepared, adapted, architecture=checkpoint.Info("mlx"), names=NAMES.__getitem__)
    prepared, adapted, _ = adapt(rng, [jq.lora.LoRA(2, "layers", alpha=1e-3), jq.lora.LoRA(2, alpha=1e4)])
    half = adapted.replace(adapters=jax.tree.map(lambda x: jnp.full_like(x, 0.1, dtype=jnp.float16), adapted.adapters))
    with pytest.raises(ValueError, match=r"adapted: .* times 1e\+07 .* float16 can hold, got .* output.weight"):
        jq.lora.save_gguf(path, prepared, half, architecture="llama", names=NAMES.__getitem__)
    with pytest.raises(ValueError, match="save_gguf: names: expected a name of its own for each parameter"):
        jq.lora.save_gguf(
            path, prepared, adapted, architecture="llama", names=lambda p: "a.{}" if p == "layers" else "a.0"
        )
    names = lambda p: "é" * 28 + p[0] + ".{}"  # noqa: E731
    text = r"save_gguf: names: expected names of tensors of at most 63 bytes, got 6[67] in é"
    with pytest.raises(ValueError, match=text):
        jq.lora.save_gguf(path, prepared, adapted, architecture="llama", names=names)
    assert not path.exists()
    longest = lambda p: "é" * 26 + p[0] + ".{}"  # noqa: E731
    jq.lora.save_gguf(path, prepared, adapted, architecture="llama", names=longest)
    assert max(len(name.encode()) for name in read(path)[1]) == 63
