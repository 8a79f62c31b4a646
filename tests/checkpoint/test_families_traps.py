"""What is easily read wrongly in quantized safetensors files, and files that are damaged or contradict themselves."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import checkpoint

from ..cases.family_files import FAMILIES, MODULE, WEIGHT, Family, quantization, scheme, write_safetensors
from ..oracles.file_formats import BF16, E4M3, F16, F32
from ..support import equality

File = dict[str, np.ndarray]


def write_folder(path: pathlib.Path, tensors: File, configs: dict[str, Any]) -> pathlib.Path:
    path.mkdir()
    write_safetensors(path / "model.safetensors", tensors)
    for name, config in configs.items():
        (path / name).write_text(json.dumps(config))
    return path


def load_one(path: pathlib.Path, tensors: File, configs: dict[str, Any]) -> jq.QuantizedArray:
    """Return the only quantized array of a folder, after checking that it is saved with the same bytes."""
    loaded, info = checkpoint.load(write_folder(path / "model", tensors, configs))
    checkpoint.save(path / "again", loaded, info)
    for name in ("model.safetensors", *configs):
        assert (path / "again" / name).read_bytes() == (path / "model" / name).read_bytes()
    (q,) = (tensor for tensor in loaded.values() if isinstance(tensor, jq.QuantizedArray))
    return q


def to_words(codes: list[int], bits: int) -> np.ndarray:
    """Return a dense stream as int32 words, by way of one large integer."""
    number = sum(code << (bits * i) for i, code in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    return np.array([(number >> (32 * i)) & 0xFFFFFFFF for i in range(count)], np.uint32).view(np.int32)


def make_gptq(bits: int, inputs: int, group: int, stored: int) -> File:
    outputs = 32
    words = to_words([i % 2**bits for i in range(inputs)], bits)
    return {
        f"{MODULE}.qweight": np.repeat(words[:, None], outputs, axis=1),
        f"{MODULE}.qzeros": np.repeat(to_words([stored] * outputs, bits)[None], inputs // group, axis=0),
        f"{MODULE}.scales": np.full((inputs // group, outputs), 0.5, F16),
        f"{MODULE}.g_idx": (np.arange(inputs) // group).astype(np.int32),
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


@pytest.mark.parametrize("declared", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("stored", [7, 8])
def test_stored_zero_points_tell_the_version_of_gptq(tmp_path: pathlib.Path, declared: str | None, stored: int) -> None:
    """A symmetric file that stores 7 is of version 1, and one that stores 8 of version 2, whatever it says."""
    settings = GPTQ if declared is None else {**GPTQ, "checkpoint_format": declared}
    q = load_one(tmp_path, make_gptq(4, 64, 32, stored), quantization(**settings))
    np.testing.assert_array_equal(np.asarray(q.zero_point).astype(np.int32), 8)
    expected = (np.arange(64) % 16 - 8) * 0.5
    np.testing.assert_array_equal(np.asarray(q.dequantize()), np.repeat(expected[:, None], 32, axis=1))
    note = checkpoint.load(tmp_path / "model")[1].tensors[WEIGHT].note
    assert ("although" in note) == ((stored == 8) != (declared == "gptq_v2"))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_without_the_groups_of_inputs(bits: int, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """Older files have no g_idx, and the groups are in the order of the inputs; a permutation cannot be saved."""
    family = FAMILIES[f"GPTQ {bits} bits, version 2"]
    tensors, parts = family.make(rng)
    del tensors[f"{MODULE}.g_idx"]
    q = load_one(tmp_path, tensors, dict(family.configs))
    equality.same_bits(q.dequantize(), family.compute_values(parts))
    loaded, info = checkpoint.load(tmp_path / "model")
    order = jnp.arange(96, dtype=jnp.int32)[::-1]
    with pytest.raises(checkpoint.CheckpointError, match="expected no permutation"):
        checkpoint.save(tmp_path / "b", {**loaded, WEIGHT: q.replace(permutation=order, permuted_axis=-2)}, info)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_point_of_0_wraps_in_version_1_of_gptq(tmp_path: pathlib.Path, bits: int) -> None:
    settings = {**GPTQ, "bits": bits, "sym": False}
    q = load_one(tmp_path, make_gptq(bits, 64, 32, 2**bits - 1), quantization(**settings))
    assert not np.asarray(q.zero_point).astype(np.int32).any()
    np.testing.assert_array_equal(np.asarray(q.codes).astype(np.int32)[:, 5], np.arange(64) % 2**bits)


def test_three_bits_of_gptq_cross_words(tmp_path: pathlib.Path) -> None:
    """The eleventh code has two bits in the first word and one in the second."""
    codes = [0] * 32
    codes[10] = 5
    file = make_gptq(3, 32, 32, 0)
    words = to_words(codes, 3)
    assert (words.view(np.uint32) == [1 << 30, 1, 0]).all()
    file[f"{MODULE}.qweight"] = np.repeat(words[:, None], 32, axis=1)
    q = load_one(tmp_path, file, quantization(**{**GPTQ, "bits": 3, "sym": False}))
    np.testing.assert_array_equal(np.asarray(q.codes)[:, 0], codes)
    assert q.format.name == "uint3"  # pyright: ignore[reportAttributeAccessIssue]


def test_order_of_nibbles_of_awq(tmp_path: pathlib.Path) -> None:
    """Nibbles 0 to 7 of a word hold the outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    word = np.array([[0x76543210]], np.int32)
    file = {
        f"{MODULE}.qweight": np.repeat(word, 4, axis=0),
        f"{MODULE}.qzeros": word,
        f"{MODULE}.scales": np.ones((1, 8), F16),
    }
    q = load_one(tmp_path, file, {"quant_config.json": {"zero_point": True, "q_group_size": 4, "w_bit": 4}})
    for part in (q.codes[0], q.zero_point[0]):
        np.testing.assert_array_equal(np.asarray(part).astype(np.int32), [0, 4, 1, 5, 2, 6, 3, 7])


def test_codes_of_compressed_tensors_cross_words(tmp_path: pathlib.Path) -> None:
    """5 bits, with zero points that are packed along the outputs; both stored plus 16."""
    rows, columns = 9, 40
    codes = np.arange(rows * columns).reshape(rows, columns) % 32
    zeros = np.arange(rows) * 3 % 32
    file = {
        f"{MODULE}.weight_packed": np.stack([to_words(list(row), 5) for row in codes.tolist()]),
        f"{MODULE}.weight_scale": np.full((rows, 1), 0.25, F32),
        f"{MODULE}.weight_shape": np.array([rows, columns]),
        f"{MODULE}.weight_zero_point": to_words(zeros.tolist(), 5)[:, None],
    }
    configs = scheme(num_bits=5, type="int", symmetric=False, strategy="channel")
    q = load_one(tmp_path, file, configs)
    np.testing.assert_array_equal(np.asarray(q.codes), codes - 16)
    np.testing.assert_array_equal(np.asarray(q.zero_point)[:, 0], zeros - 16)
    np.testing.assert_array_equal(np.asarray(q.dequantize()), (codes - zeros[:, None]) * 0.25)


def test_order_of_groups_of_older_compressed_tensors(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    codes, scales = rng.integers(0, 16, (4, 64)), np.array([[0.5, 2.0]] * 4, F32)
    g_idx = rng.permutation(np.arange(64) // 32)
    file = {
        f"{MODULE}.weight_packed": np.stack([to_words(list(row), 4) for row in codes.tolist()]),
        f"{MODULE}.weight_scale": scales,
        f"{MODULE}.weight_shape": np.array([4, 64]),
        f"{MODULE}.weight_g_idx": g_idx.astype(np.int32),
    }
    configs = scheme(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32, actorder="group")
    q = load_one(tmp_path, file, configs)
    np.testing.assert_array_equal(np.asarray(q.dequantize()), (codes - 8) * scales[:, g_idx])


def test_rows_of_gate_and_up_are_left_as_stored(tmp_path: pathlib.Path) -> None:
    """Row r of experts has only codes r, and the even rows are the gate's."""
    rows = np.arange(8, dtype=np.uint8)
    blocks = np.broadcast_to((rows | rows << 4)[None, :, None, None], (2, 8, 3, 16))
    base = "model.layers.0.mlp.experts.gate_up_proj"
    file = {f"{base}_blocks": blocks, f"{base}_scales": np.full((2, 8, 3), 127, np.uint8)}
    q = load_one(tmp_path, file, quantization(quant_method="mxfp4"))
    assert q.shape == (2, 8, 96)
    gate = np.asarray(q[:, ::2].dequantize().astype(jnp.float32))
    np.testing.assert_array_equal(gate[0, :, 0], [0.0, 1.0, 2.0, 4.0])


def test_blocks_of_bitsandbytes_that_cross_rows(tmp_path: pathlib.Path, rng: np.random.Generator) -> None:
    family = FAMILIES["bitsandbytes nf4 5 x 50, float16"]
    tensors, parts = family.make(rng)
    family.write(tmp_path / "model", tensors)
    loaded, info = checkpoint.load(tmp_path / "model")
    assert loaded[WEIGHT].shape == parts.codes.shape == (250,)
    assert info.tensors[WEIGHT].note == "blocks cross the rows of 5 x 50, so it has one dimension"


def test_the_two_conventions_of_nvfp4(tmp_path: pathlib.Path) -> None:
    """ModelOpt multiplies by the scale of the tensor, compressed-tensors divides by it."""
    codes, scale = np.full((2, 8), 0x22, np.uint8), np.full((2, 1), 3, E4M3)
    values = {}
    for name, shared, configs in (
        ("weight_scale_2", np.array(4.0, F32), {"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4"}}}),
        (
            "weight_global_scale", np.array([4.0], F32),
            scheme(num_bits=4, type="float", strategy="tensor_group", group_size=16),
        ),
    ):  # fmt: skip
        leaf = "weight" if name == "weight_scale_2" else "weight_packed"
        file = {f"{MODULE}.{leaf}": codes, f"{MODULE}.weight_scale": scale, f"{MODULE}.{name}": shared}
        folder = tmp_path / name
        folder.mkdir()
        values[name] = np.asarray(load_one(folder, file, configs).dequantize()).astype(F32)[0, 0]
    assert values == {"weight_scale_2": 12.0, "weight_global_scale": 0.75}


@pytest.mark.parametrize("is_scaled", [True, False])
def test_modelopt_says_that_inputs_are_scaled(is_scaled: bool, tmp_path: pathlib.Path) -> None:
    file = {
        f"{MODULE}.weight": np.full((2, 8), 0x22, np.uint8), f"{MODULE}.weight_scale": np.full((2, 1), 3, E4M3),
        f"{MODULE}.weight_scale_2": np.array(4.0, F32),
    }  # fmt: skip
    if is_scaled:
        file[f"{MODULE}.pre_quant_scale"] = np.ones(16, F16)
    configs = {"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4_AWQ"}}}
    _, info = checkpoint.load(write_folder(tmp_path / "model", file, configs))
    assert ("pre_quant_scale" in info.tensors[f"{MODULE}.weight"].note) == is_scaled


# Configurations.


@pytest.mark.parametrize("settings", [[], "gptq", 4])
def test_a_quantization_that_is_no_object_is_refused(settings: Any, tmp_path: pathlib.Path) -> None:
    folder = write_folder(
        tmp_path / "model", make_gptq(4, 64, 32, 7), {"config.json": {"quantization_config": settings}}
    )
    with pytest.raises(checkpoint.CheckpointError, match="'quantization_config': expected an object, got"):
        checkpoint.load(folder)


def test_excluded_modules_say_why(tmp_path: pathlib.Path) -> None:
    file = make_gptq(4, 64, 32, 7)
    file |= {f"model.layers.{i}.mlp.gate.weight": np.ones((2, 2), F16) for i in (0, 1)}
    file["lm_head.weight"] = np.ones((2, 2), F16)
    settings = {**GPTQ, "dynamic": {r"-:.*\.1\..*gate": {}}}
    _, info = checkpoint.load(write_folder(tmp_path / "model", file, quantization(**settings)))
    notes = {name: entry.note for name, entry in info.tensors.items()}
    assert notes["model.layers.1.mlp.gate.weight"] == (
        r"not quantized, because the configuration excludes '-:.*\\.1\\..*gate'"
    )
    assert notes["model.layers.0.mlp.gate.weight"] == ""
    assert "last layer" in notes["lm_head.weight"]
    assert "not quantized, as most programs leave the last layer: lm_head.weight" in str(info)


def test_settings_of_single_modules(tmp_path: pathlib.Path) -> None:
    """GPTQ's "dynamic", targets of compressed-tensors, and MLX's objects with the name of a module."""
    file = make_gptq(8, 64, 64, 127)
    other = {name.replace("q_proj", "k_proj"): array for name, array in make_gptq(4, 64, 32, 7).items()}
    settings = {**GPTQ, "dynamic": {r"+:.*q_proj$": {"bits": 8, "group_size": 64}}}
    loaded, _ = checkpoint.load(write_folder(tmp_path / "gptq", {**file, **other}, quantization(**settings)))
    assert [str(q.codes.dtype) for q in loaded.values()] == ["uint8", "uint4"]  # pyright: ignore

    names = [f"model.layers.0.{name}" for name in ("a", "b", "c")]
    file = {}
    for name, bits in zip(names, (4, 8, 3), strict=True):
        file |= {
            f"{name}.weight_packed": np.stack([to_words(list(range(8)) * 4, bits)] * 2),
            f"{name}.weight_scale": np.ones((2, 1), BF16),
            f"{name}.weight_shape": np.array([2, 32]),
        }
    configs = scheme(num_bits=4, strategy="channel")
    groups = configs["config.json"]["quantization_config"]["config_groups"]
    groups["group_1"] = {"targets": ["re:.*b$"], "weights": {"num_bits": 8, "strategy": "channel"}}
    groups["group_2"] = {"targets": [names[2]], "weights": {"num_bits": 3, "strategy": "channel"}}
    loaded, _ = checkpoint.load(write_folder(tmp_path / "compressed", file, configs))
    assert [q.format.name for q in loaded.values()] == ["int4", "int8", "int3"]  # pyright: ignore

    file, settings = {}, {"group_size": 32, "bits": 4, "model.b": {"group_size": 64, "bits": 8}, "model.c": False}
    for name, bits, group in (("model.a", 4, 32), ("model.b", 8, 64)):
        file |= {
            f"{name}.weight": np.zeros((2, 64 * bits // 32), np.uint32),
            f"{name}.scales": np.ones((2, 64 // group), F16),
            f"{name}.biases": np.ones((2, 64 // group), F16),
        }
    file["model.c.weight"] = np.ones((2, 2), F16)
    path = write_folder(tmp_path / "mlx", file, {"config.json": {"quantization": settings}})
    loaded, info = checkpoint.load(path)
    assert [str(loaded[f"{name}.weight"].codes.dtype) for name in ("model.a", "model.b")] == ["uint4", "uint8"]  # pyright: ignore
    assert "excludes 'model.c'" in info.tensors["model.c.weight"].note


def test_older_names_of_configurations(tmp_path: pathlib.Path) -> None:
    settings = {name: value for name, value in GPTQ.items() if name != "quant_method"}
    q = load_one(tmp_path, make_gptq(4, 64, 32, 7), {"quantize_config.json": settings})
    assert str(q.codes.dtype) == "uint4"
    family = FAMILIES["compressed-tensors 4 bits"]
    configs = {"config.json": {"compression_config": family.configs["config.json"]["quantization_config"]}}
    tensors, _ = family.make(np.random.default_rng(0))
    (tmp_path / "other").mkdir()
    assert load_one(tmp_path / "other", tensors, configs).shape == (6, 476)


def test_parts_of_a_tensor_in_several_files(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    file = make_gptq(4, 64, 32, 7)
    files = {f"model-0000{i}-of-00002.safetensors": names for i, names in ((1, list(file)[:1]), (2, list(file)[1:]))}
    for path, names in files.items():
        write_safetensors(folder / path, {name: file[name] for name in names})
    places = {name: path for path, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(quantization(**GPTQ)["config.json"]))
    loaded, info = checkpoint.load(folder)
    assert loaded[WEIGHT].shape == (64, 32)
    checkpoint.save(tmp_path / "again", loaded, info)
    for path in folder.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


# Damage. A case has the name of a family, changes its tensors and its settings, and has what the error says.

Change = Callable[[File, dict[str, Any]], None]


def drop(leaf: str) -> Change:
    def change(file: File, _: dict[str, Any]) -> None:
        del file[leaf]

    return change


def put(leaf: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda file, _: file.update({leaf: change(file[leaf])})


def cut(leaf: str) -> Change:
    return put(leaf, lambda array: array[:-1])


def narrow(leaf: str) -> Change:
    return put(leaf, lambda array: array[..., :-1])


def convert(leaf: str, dtype: Any) -> Change:
    return put(leaf, lambda array: array.astype(dtype))


def configure(**settings: Any) -> Change:
    return lambda _, config: config.update(settings)


def configure_weights(**settings: Any) -> Change:
    return lambda _, config: config["config_groups"]["group_0"]["weights"].update(settings)


def set_first(leaf: str, value: Any) -> Change:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.reshape(-1)[-1] = value
        return array

    return put(leaf, change)


def change_state(**fields: Any) -> Change:
    def change(array: np.ndarray) -> np.ndarray:
        return np.frombuffer(json.dumps(json.loads(array.tobytes()) | fields).encode(), np.uint8)

    return put(".quant_state.bitsandbytes__nf4", change)


G4, CT4, CT5 = "GPTQ 4 bits, version 1", "compressed-tensors 4 bits", "compressed-tensors 5 bits, asymmetric"
NF4, NF4_DOUBLE = "bitsandbytes nf4 8 x 64, float16", "bitsandbytes nf4 8 x 64, double, float16"
DAMAGES: dict[str, tuple[str, Change, str]] = {
    "GPTQ without g_idx": ("GPTQ desc_act", drop("g_idx"), "q_proj.*expected the tensors .*got none named g_idx"),
    "GPTQ without scales": (G4, drop("scales"), "got none named scales"),
    "GPTQ short g_idx": (G4, put("g_idx", lambda a: a[:-8]), r"qweight'?: expected shape \(11, 32\)"),
    "GPTQ wide zero points": (G4, put("qzeros", lambda a: np.tile(a, (2, 1))), r"qzeros'?: expected shape \(3, 4\)"),
    "GPTQ dtype": (G4, convert("qweight", np.int64), "qweight'?: expected dtype int32, got int64"),
    "GPTQ float g_idx": (G4, convert("g_idx", F32), "g_idx'?: expected dtype int32"),
    "GPTQ other groups": (G4, put("g_idx", lambda a: np.zeros_like(a)), "g_idx'?: expected groups of 32 inputs"),
    "GPTQ negative group": (G4, set_first("g_idx", -1), "g_idx'?: expected groups of 32 inputs"),
    "GPTQ group_size": (G4, configure(group_size=16), r"scales'?: expected shape \(6, 32\)"),
    "GPTQ bits": (G4, configure(bits=5), "'bits': expected a setting of 2, 3, 4, 8, got 5"),
    "GPTQ no bits": (G4, configure(bits=None), "'bits': expected a setting of 2, 3, 4, 8, got none"),
    "GPTQ other bits": (G4, configure(bits=8), "qweight'?: expected shape"),
    "GPTQ marlin": (G4, configure(checkpoint_format="marlin"), "'checkpoint_format': expected .*'marlin'.*'gptq'$"),
    "GPTQ desc_act": (G4, configure(desc_act="yes"), "'desc_act': expected a setting of True, False, got 'yes'"),
    "GPTQ excluded": (G4, configure(dynamic={"-:.*q_proj": {}}), "expected floats, because the configuration exc"),
    "GPTQ dynamic": (G4, configure(dynamic=[1]), "'dynamic': expected an object"),
    "GPTQ slow pattern": (G4, configure(dynamic={"-:(a+)+$": {}}), "expected an expression with at most"),
    "GPTQ pattern": (G4, configure(dynamic={"-:(": {}}), "expected a regular expression"),
    "AWQ version": ("AWQ", configure(version="gemv"), "'version': expected .*'gemv', .* with the version 'gemm'$"),
    "AWQ gemv_fast": ("AWQ", configure(version="gemv_fast"), "'version': expected .*'gemv_fast', .* 'gemm'$"),
    "AWQ bits": ("AWQ", configure(bits=8), "'bits': expected a setting of 4, got 8"),
    "AWQ group": ("AWQ", configure(group_size=0), "'group_size': expected a size of groups"),
    "AWQ zero points": ("AWQ", cut("qzeros"), r"qzeros'?: expected shape \(3, 4\)"),
    "AWQ without zero points": ("AWQ", drop("qzeros"), "got none named qzeros"),
    "AWQ excluded": ("AWQ", configure(modules_to_not_convert=["self_attn"]), "excludes 'self_attn'"),
    "packed shape": (CT4, set_first("weight_shape", 500), r"weight_packed'?: expected shape \(6, 63\)"),
    "packed rank": (CT4, put("weight_shape", lambda a: a[:1]), "weight_packed'?: expected shape"),
    "packed negative": (CT4, set_first("weight_shape", -4), "weight_packed'?: expected shape"),
    "packed float shape": (CT4, convert("weight_shape", F32), "weight_shape'?: expected dtype int64 or int32"),
    "packed scales": (CT4, narrow("weight_scale"), r"weight_scale'?: expected shape \(6, 15\) for the strategy 'gr"),
    "packed without scales": (CT4, drop("weight_scale"), "got none named weight_scale"),
    "packed unused bits": (CT5, set_first("weight_packed", -1), "weight_packed'?: expected unused bits of 0"),
    "packed zero points": (CT5, cut("weight_zero_point"), r"weight_zero_point'?: expected shape \(1, 15\)"),
    "packed without zero points": (CT5, drop("weight_zero_point"), "got none named weight_zero_point"),
    "packed symmetric": (CT5, configure_weights(symmetric=True), "weight_zero_point, too"),
    "packed bits": (CT4, configure_weights(num_bits=9), "'num_bits': expected a setting of 1, 2"),
    "packed other bits": (CT4, configure_weights(num_bits=8), "weight_packed'?: expected shape"),
    "packed strategy": (CT4, configure_weights(strategy="token"), "'strategy': expected a setting of 'tensor'"),
    "ignored": (CT4, configure(ignore=["re:.*q_proj"]), "excludes 're:.*q_proj'"),
    "no target": (CT4, configure(config_groups={}), "expected a target of config_groups"),
    "sparse": (CT4, configure(format="marlin-24"), "'format': expected .*'marlin-24'; .*'pack-quantized'"),
    "rotated": (CT4, configure(transform_config={"config_groups": {"R1": {}}}), "rotations are not applied"),
    "zeros left out": (CT4, configure(sparsity_config={"format": "sparse-bitmask"}), "the format 'dense'"),
    "int8 dtype": ("compressed-tensors int8", convert("weight", np.int32), "weight'?: expected dtype int8"),
    "blocks": ("compressed-tensors fp8 in blocks", configure_weights(block_structure=[64, 128]), r"\(5, 2\)"),
    "block sizes": ("compressed-tensors fp8 in blocks", configure_weights(block_structure=[0, 128]), "two sizes"),
    "global scale": ("compressed-tensors NVFP4", put("weight_global_scale", lambda a: np.tile(a, 2)), "one element"),
    "fp8 scales": ("fp8 in blocks", cut("weight_scale_inv"), r"weight_scale_inv'?: expected shape \(3, 2\)"),
    "fp8 codes alone": (
        "fp8 in blocks", lambda file, _: file.update(other=np.zeros((2, 2), E4M3)),
        "other'?: expected a scale named weight_scale_inv or weight_scale beside float8, got none",
    ),
    "fp8 without scales": ("fp8 in blocks", drop("weight"), "got none named weight"),
    "fp8 blocks": ("fp8 in blocks", configure(weight_block_size=[128]), "'weight_block_size': expected two sizes"),
    "MXFP4 scales": ("MXFP4", cut("scales"), r"_scales'?: expected shape \(2, 4, 3\)"),
    "MXFP4 without scales": ("MXFP4", drop("scales"), "got none named _scales"),
    "MXFP4 blocks": ("MXFP4", narrow("blocks"), r"_blocks'?: expected shape \(\.\.\., blocks, 16\)"),
    "ModelOpt scales": ("ModelOpt NVFP4", cut("weight_scale"), r"weight_scale'?: expected shape \(6, 4\)"),
    "ModelOpt second scale": ("ModelOpt NVFP4", drop("weight_scale_2"), "got none named weight_scale_2"),
    "nf4 scales": (NF4, cut(".absmax"), "absmax'?: expected 8 elements"),
    "nf4 codes": (NF4, cut(""), r"q_proj.weight'?: expected 256 bytes for 512 codes"),
    "nf4 table": (NF4, cut(".quant_map"), r"quant_map'?: expected shape \(16,\)"),
    "nf4 without state": (NF4, drop(".quant_state.bitsandbytes__nf4"), "got none named quant_state"),
    "nf4 kind": (NF4, change_state(quant_type="fp4"), "expected the quant_type 'nf4', got 'fp4'"),
    "nf4 shape": (NF4, change_state(shape=[8, 65]), "expected 260 bytes for 520 codes"),
    "nf4 large shape": (NF4, change_state(shape=[2**39, 2**39]), "bytes for 302231454903657293676544 codes"),
    "nf4 blocks": (NF4, change_state(blocksize=0), "expected a positive int blocksize"),
    "nf4 dtype": (NF4, change_state(dtype="int8"), "expected a dtype of float32"),
    "nf4 nested": (NF4_DOUBLE, drop(".nested_absmax"), "got none named nested_absmax"),
    "nf4 offset": (NF4_DOUBLE, change_state(nested_offset=None), "expected a number nested_offset"),
    "int8 scales": ("bitsandbytes int8", cut("SCB"), r"SCB'?: expected shape \(6,\)"),
    "int8 codes": ("bitsandbytes int8", convert("weight", np.uint8), "weight'?: expected dtype int8"),
    "int8 without codes": ("bitsandbytes int8", drop("weight"), "got none named weight"),
    "int8 order": (
        "bitsandbytes int8", put("weight_format", lambda a: np.ones_like(a)), "weight_format'?: expected 0, for rows",
    ),
    "MXFP8 scales": ("compressed-tensors MXFP8", narrow("weight_scale"), r"weight_scale'?: expected shape \(6, 3\)"),
    "MXFP8 dtype": ("compressed-tensors MXFP8", convert("weight_scale", np.int8), "weight_scale'?: expected dtype"),
    "MLX words": ("MLX 3 bits, float32", narrow("weight"), "weight'?: expected rows of "),
    "MLX biases": ("MLX 4 bits, float16", cut("biases"), "biases'?: expected shape"),
    "MLX without biases": ("MLX 4 bits, float16", drop("biases"), "got none named biases"),
    "MLX dtype": ("MLX 4 bits, float16", convert("biases", F32), "biases'?: expected dtype float16, got float32"),
    "torchao scale": ("torchao int8", put("scale", lambda a: a[:-1]), r"scale'?: expected shape \(6, 1\)"),
    "torchao part": ("torchao int8", drop("scale"), "got none named .*_weight_scale"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(rng: np.random.Generator, tmp_path: pathlib.Path, damage: str) -> None:
    """The error names the folder or the file, the tensor or the setting, what was expected and what was found."""
    name, change, text = DAMAGES[damage]
    family: Family = FAMILIES[name]
    file = family.draw(rng)
    configs = json.loads(json.dumps(family.configs))
    change(file, configs.get("config.json", {}).get("quantization_config", {}))
    tensors = {family.name(part): array for part, array in file.items()}
    tensors |= dict.fromkeys(("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"), np.ones(2, F32))
    path = tmp_path / "model"
    path.mkdir()
    write_safetensors(path / "model.safetensors", tensors, family.metadata)
    for config_name, config in configs.items():
        (path / config_name).write_text(json.dumps(config))
    with pytest.raises(checkpoint.CheckpointError, match=text) as caught:
        checkpoint.load(path)
    assert str(path) in str(caught.value)


def test_layouts_of_torchao_for_one_processor_are_refused(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    family = FAMILIES["torchao int4, float32"]
    assert family.metadata is not None
    tensors, _ = family.make(rng)
    tiles = {name: text.replace("Int4Tensor", "Int4TilePackedTo4dTensor") for name, text in family.metadata.items()}
    write_safetensors(tmp_path / "model.safetensors", tensors, tiles)
    text = "expected a tensor of Int4Tensor, .*, got 'Int4TilePackedTo4dTensor'; quantize the model with a plain layout"
    with pytest.raises(checkpoint.CheckpointError, match=text):
        checkpoint.load(tmp_path / "model.safetensors")


# Arrays that a format does not hold.


def test_arrays_that_do_not_fit_their_format(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    family = FAMILIES["compressed-tensors 4 bits"]
    tensors, _ = family.make(rng)
    family.write(tmp_path / "model", tensors)
    loaded, info = checkpoint.load(tmp_path / "model")
    q = loaded[WEIGHT]
    assert isinstance(q, jq.QuantizedArray)
    floats = q.dequantize()
    for other, text in (
        (jq.quantize(floats, jq.QuantSpec("int8", jq.Blocked(1, 32))), "expected codes of int4"),
        (q[:, :-1], r"expected shape \(6, 476\)"),
        (jq.quantize(floats, jq.QuantSpec("int4", jq.Blocked(1, 64))), r"expected blocks of \(1, 32\) elements"),
        (jq.quantize(floats, jq.QuantSpec("int4")).per_index(0, 1), r"expected blocks of \(1, 32\) elements"),
        (jq.quantize(floats, jq.QuantSpec("int4", jq.Blocked(1, 32), symmetric=False)), "expected no zero point"),
        (floats, "expected a QuantizedArray"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=text):
            checkpoint.save(tmp_path / "again", {**loaded, WEIGHT: other}, info)
    assert not (tmp_path / "again").exists()


def make_gptq_array(rows: int, size: int) -> jq.QuantizedArray:
    x = np.sin(np.arange(rows * 8)).reshape(rows, 8)
    return jq.quantize(x, jq.QuantSpec("uint4", jq.Blocked(0, size), symmetric=True, scale_dtype="float16"))


def save_new(path: pathlib.Path, kind: str, configs: dict[str, Any], q: jq.QuantizedArray) -> jq.QuantizedArray:
    checkpoint.save(path, {WEIGHT: q}, checkpoint.Info(kind, configs))
    again = checkpoint.load(path)[0][WEIGHT]
    assert isinstance(again, jq.QuantizedArray)
    return again


@pytest.mark.parametrize("kind", ["gptq", "awq", "fp8"])
def test_as_many_blocks_of_another_size_are_refused(kind: str, tmp_path: pathlib.Path) -> None:
    """Two blocks of 96 are as many as one of 128 and one of 64."""
    configs = quantization(**{**GPTQ, "quant_method": kind, "group_size": 128})
    right, wrong = make_gptq_array(192, 128), make_gptq_array(192, 96)
    if kind == "fp8":
        configs, x = quantization(quant_method="fp8", weight_block_size=[128, 128]), np.ones((130, 128), F32)
        right, wrong = (jq.quantize(x, jq.QuantSpec("float8_e4m3fn", jq.Blocked((0, 1), (n, 128)))) for n in (128, 65))
    equality.same_bits(
        save_new(tmp_path / "right", kind, configs, right).astype(F32).dequantize(), np.asarray(right.dequantize())
    )
    with pytest.raises(checkpoint.CheckpointError, match=r"expected blocks of \(128, .*got blocks of"):
        save_new(tmp_path / "wrong", kind, configs, wrong)


@pytest.mark.parametrize("kind", ["gptq", "awq", "fp8"])
def test_scales_that_divide_are_refused(kind: str, tmp_path: pathlib.Path) -> None:
    configs = quantization(**{**GPTQ, "quant_method": kind})
    q = make_gptq_array(64, 32)
    q = jq.quantize(np.ones((4, 8), F32), jq.QuantSpec("float8_e4m3fn", jq.PerAxis(0))) if kind == "fp8" else q
    save_new(tmp_path / "right", kind, configs, q)
    with pytest.raises(checkpoint.CheckpointError, match="inverse_scale=False"):
        save_new(tmp_path / "wrong", kind, configs, q.replace(inverse_scale=True))


@pytest.mark.parametrize(("version", "point"), [("gptq", 9), ("gptq_v2", 7)])
def test_zero_points_that_would_be_read_in_the_other_version(version: str, point: int, tmp_path: pathlib.Path) -> None:
    settings = {**GPTQ, "checkpoint_format": version}
    q = make_gptq_array(64, 32)
    q = q.replace(zero_point=jnp.full(q.scale.shape, point, jnp.uint4))
    with pytest.raises(checkpoint.CheckpointError, match="expected zero points of 8, because it is symmetric"):
        save_new(tmp_path / "wrong", "gptq", quantization(**settings), q)
    again = save_new(tmp_path / "right", "gptq", quantization(**{**settings, "sym": False}), q)
    equality.same_bits(again.astype(F32).dequantize(), np.asarray(q.dequantize()))


def test_a_permutation_is_stored_only_where_the_file_has_the_same(tmp_path: pathlib.Path) -> None:
    x = np.sin(np.arange(4 * 64)).reshape(4, 64)
    q = jq.quantize(x, jq.QuantSpec("int4", jq.Blocked(1, 32), symmetric=False))
    configs = scheme(num_bits=4, type="int", symmetric=False, strategy="group", group_size=32)
    configs["config.json"]["quantization_config"]["format"] = "pack-quantized"
    save_new(tmp_path / "right", "compressed-tensors", configs, q)
    order = jnp.arange(64, dtype=jnp.int32)[::-1]
    with pytest.raises(checkpoint.CheckpointError, match="expected no permutation"):
        save_new(tmp_path / "wrong", "compressed-tensors", configs, q.replace(permutation=order, permuted_axis=-1))
    words = np.stack([to_words([i % 16 for i in range(64)], 4)] * 4)
    file = {
        f"{MODULE}.weight_packed": words, f"{MODULE}.weight_scale": np.ones((4, 2), F32),
        f"{MODULE}.weight_shape": np.array([4, 64]), f"{MODULE}.weight_g_idx": (np.arange(64) % 2).astype(np.int32),
    }  # fmt: skip
    configs = scheme(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    loaded, info = checkpoint.load(write_folder(tmp_path / "grouped", file, configs))
    grouped = loaded[WEIGHT]
    assert isinstance(grouped, jq.QuantizedArray)
    checkpoint.save(tmp_path / "grouped again", loaded, info)
    plain = grouped.replace(permutation=None, permuted_axis=None)
    for other, text in (
        (plain, "expected the permutation that was loaded"),
        (grouped.replace(permutation=order), "expected the permutation that was loaded"),
        (grouped.replace(zero_point=jnp.ones((4, 2), jnp.int4)), "expected no zero point"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=text):
            checkpoint.save(tmp_path / "wrong", {WEIGHT: other}, info)


def test_codes_that_the_bits_of_the_file_do_not_hold(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    file = {
        f"{MODULE}.weight_packed": np.stack([to_words(list(range(32)), 7)] * 4),
        f"{MODULE}.weight_scale": np.ones((4, 1), F32), f"{MODULE}.weight_shape": np.array([4, 32]),
    }  # fmt: skip
    configs = scheme(num_bits=7, type="int", symmetric=True, strategy="group", group_size=32)
    loaded, info = checkpoint.load(write_folder(tmp_path / "model", file, configs))
    q = loaded[WEIGHT]
    assert isinstance(q, jq.QuantizedArray)
    with pytest.raises(checkpoint.CheckpointError, match="expected codes of 7 bits"):
        checkpoint.save(tmp_path / "again", {WEIGHT: q.replace(codes=jnp.full((4, 32), 64, jnp.int8))}, info)
    family = next(family for name, family in FAMILIES.items() if name.startswith("bitsandbytes nf4"))
    tensors, _ = family.make(rng)
    family.write(tmp_path / "bitsandbytes", tensors)
    loaded, info = checkpoint.load(tmp_path / "bitsandbytes")
    name, q = next((n, t) for n, t in loaded.items() if isinstance(t, jq.QuantizedArray))
    other = jq.Codebook("other", tuple(float(i) for i in range(16)))
    with pytest.raises(checkpoint.CheckpointError, match="expected the codebook"):
        checkpoint.save(tmp_path / "again", {**loaded, name: q.replace(codebook=other)}, info)


def test_other_scales_of_int8_of_bitsandbytes_are_refused(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    family = FAMILIES["bitsandbytes int8"]
    tensors, _ = family.make(rng)
    family.write(tmp_path / "model", tensors)
    loaded, info = checkpoint.load(tmp_path / "model")
    q = loaded[WEIGHT]
    assert isinstance(q, jq.QuantizedArray)
    checkpoint.save(tmp_path / "again", {**loaded, WEIGHT: q.replace(codes=q.codes[:, ::-1])}, info)
    again = checkpoint.load(tmp_path / "again")[0][WEIGHT]
    equality.same_bits(again.dequantize(), np.asarray(q.dequantize())[:, ::-1])  # pyright: ignore
    with pytest.raises(checkpoint.CheckpointError, match=r"expected the scales that were loaded, .* got others"):
        checkpoint.save(tmp_path / "again", {**loaded, WEIGHT: q.replace(scale=2 * q.scale)}, info)


def test_a_file_without_its_configuration_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(checkpoint.CheckpointError, match=r"expected a folder, because config\.json"):
        save_new(tmp_path / "a.safetensors", "gptq", quantization(**GPTQ), make_gptq_array(64, 32))
    assert list(tmp_path.iterdir()) == []


def test_arrays_that_jax_made_take_the_place_of_loaded_ones(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """Signed codes are stored with the zero point 2**(bits - 1) in GPTQ and AWQ, and have the same values."""
    for name, dtype in ((G4, "int4"), ("GPTQ 3 bits, version 2", "uint3"), ("AWQ", "int4"), ("AWQ", "uint4")):
        family = FAMILIES[name]
        tensors, parts = family.make(rng)
        folder = tmp_path / f"{name} {dtype}"
        family.write(folder, tensors)
        loaded, info = checkpoint.load(folder)
        x = rng.normal(size=parts.codes.shape).astype(F32)
        spec = jq.QuantSpec(dtype, jq.Blocked(0, 32), scale_dtype=jnp.float16)
        q = jq.quantize(x, spec).astype(jnp.float16)
        checkpoint.save(tmp_path / f"{name} {dtype} again", {**loaded, WEIGHT: q}, info)
        again, _ = checkpoint.load(tmp_path / f"{name} {dtype} again")
        equality.same_bits(again[WEIGHT].dequantize(), np.asarray(q.dequantize()))  # pyright: ignore


def make_nested(x: np.ndarray, *, inverse: bool) -> jq.QuantizedArray:
    """Return NVFP4 with a scale of the tensor that multiplies the scales of blocks, or divides them."""
    q = jq.quantize(x, jq.QuantSpec("float4_e2m1fn", jq.Blocked(1, 16), scale_spec=jq.QuantSpec("float8_e4m3fn")))
    whole = q.scale.scale
    return q.replace(scale=q.scale.replace(scale=1 / whole, inverse_scale=True)) if inverse else q


def blocked(dtype: str, axis: int = 1, size: int = 32, **options: Any) -> Callable[[np.ndarray], jq.QuantizedArray]:
    spec = jq.QuantSpec(dtype, jq.Blocked(axis, size), **options)
    return lambda x: jq.quantize(x, spec)


def compute_in_bfloat16(q: jq.QuantizedArray) -> jq.QuantizedArray:
    return q.replace(arithmetic=BF16, dtype=BF16)


FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
MLX4 = {"config.json": {"quantization": {"group_size": 32, "bits": 5}}}
MXFP4_MLX = {"config.json": {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}}
NVFP4_MODELOPT = {"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4"}}}
NVFP4 = scheme(num_bits=4, type="float", strategy="tensor_group", group_size=16)
INT8 = scheme(num_bits=8, strategy="channel")
MXFP8 = scheme(num_bits=8, type="float", strategy="group", group_size=32)
PACKED3 = scheme(num_bits=3, strategy="group", group_size=32, symmetric=False)
PACKED3["config.json"]["quantization_config"]["format"] = "pack-quantized"
BLOCKS = jq.QuantSpec("float8_e4m3fn", jq.Blocked((0, 1), (32, 32)))
MX: dict[str, Any] = {"scale_dtype": "float8_e8m0fnu"}
NEW: dict[str, tuple[str, Any, Callable[[np.ndarray], jq.QuantizedArray]]] = {
    "GPTQ": ("gptq", quantization(**GPTQ), blocked("int4", 0, scale_dtype="float16")),
    "AWQ": ("awq", quantization(quant_method="awq", bits=4, group_size=32), blocked("uint4", 0)),
    "packed": ("compressed-tensors", PACKED3, blocked("int3", symmetric=False)),
    "int8": ("compressed-tensors", INT8, lambda x: jq.quantize(x, jq.QuantSpec("int8", jq.PerAxis(0)))),
    "NVFP4": ("compressed-tensors", NVFP4, lambda x: make_nested(x, inverse=True)),
    "ModelOpt": ("modelopt", NVFP4_MODELOPT, lambda x: make_nested(x, inverse=False)),
    "fp8": ("fp8", quantization(**FP8), lambda x: jq.quantize(x, BLOCKS)),
    "MXFP4": ("mxfp4", quantization(quant_method="mxfp4"), blocked("float4_e2m1fn", **MX)),
    "MLX": ("mlx", MLX4, lambda x: compute_in_bfloat16(blocked("uint5", offset=True, scale_dtype=BF16)(x))),
    "MLX float32": ("mlx", MLX4, blocked("uint5", offset=True)),
    "MXFP8": ("compressed-tensors", MXFP8, blocked("float8_e4m3fn", **MX)),
    "MLX mxfp4": ("mlx", MXFP4_MLX, blocked("float4_e2m1fn", **MX)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("MLX", {"arithmetic": None}, "expected arithmetic in bfloat16, in which the values of the file are computed"),
        ("MLX float32", {"arithmetic": BF16, "dtype": BF16}, "expected arithmetic in float32"),
        ("NVFP4", {"arithmetic": BF16, "dtype": BF16}, "expected arithmetic in float32"),
        ("int8", {"arithmetic": F16, "dtype": F16}, "expected arithmetic in float32"),
    ],
)
def test_values_that_a_file_computes_in_another_way_are_refused(
    name: str, change: dict[str, Any], text: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    kind, configs, make = NEW[name]
    q = make(rng.normal(size=(64, 96)).astype(F32)).replace(**change)
    with pytest.raises(checkpoint.CheckpointError, match=text):
        save_new(tmp_path / "model", kind, configs, q)


def test_a_single_product_of_16_bits_is_that_of_float32(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """float32 holds the product of a code and of such a scale, so that there is one rounding."""
    spec = jq.QuantSpec("uint4", jq.Blocked(0, 32), scale_dtype=BF16)
    q = compute_in_bfloat16(jq.quantize(rng.normal(size=(64, 96)).astype(F32), spec))
    again = save_new(tmp_path / "model", "gptq", quantization(**{**GPTQ, "sym": False}), q)
    assert again.arithmetic == F32
    equality.same_bits(again.dequantize(), np.asarray(q.dequantize()))


@pytest.mark.parametrize("name", NEW)
def test_new_folders(rng: np.random.Generator, tmp_path: pathlib.Path, name: str) -> None:
    """A folder of arrays that JAX made, by a configuration, has their codes and values when it is loaded."""
    kind, configs, make = NEW[name]
    q = make(rng.normal(size=(64, 96)).astype(F32))
    tensors: dict[str, Any] = {"model.a.weight": q, "model.b.weight": make(rng.normal(size=(64, 96)).astype(F32))}
    tensors["model.norm.weight"] = jnp.ones(4)
    checkpoint.save(tmp_path / "model", tensors, checkpoint.Info(kind, configs))
    loaded, info = checkpoint.load(tmp_path / "model")
    assert info.format == kind
    again = loaded["model.a.weight"]
    assert isinstance(again, jq.QuantizedArray)
    equality.same_bits(again.dequantize(), np.asarray(q.astype(again.dtype).dequantize()))
    with pytest.raises(checkpoint.CheckpointError, match="expected"):
        checkpoint.save(tmp_path / "other", {"x": q.reshape(2, 32, 96) if name == "GPTQ" else q[0]}, info)
