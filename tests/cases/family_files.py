"""Folders of quantized safetensors files, one for each format, as the producers write them.

The tensors are drawn by `oracles/file_formats.py`, which decodes them, too. The files are written without jaxquant.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ..oracles import file_formats as oracle
from ..oracles.file_formats import BF16, E4M3, F16, F32, File, Parts

_NAMES = {
    np.dtype(dtype): name
    for dtype, name in (
        (np.uint8, "U8"), (np.int8, "I8"), (np.int32, "I32"), (np.uint32, "U32"), (np.int64, "I64"), (F32, "F32"),
        (F16, "F16"), (BF16, "BF16"), (E4M3, "F8_E4M3"), (ml_dtypes.float8_e8m0fnu, "F8_E8M0"),
    )
}  # fmt: skip
MODULE = "model.layers.0.self_attn.q_proj"
WEIGHT = f"{MODULE}.weight"


def write_safetensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray], metadata: Any = None) -> None:
    """Write a safetensors file: the length of the header, the header as JSON, and the bytes."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    start = 0
    for name, array in tensors.items():
        stop = start + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@dataclasses.dataclass(frozen=True)
class Family:
    """A format of checkpoints.

    Attributes:
        format: the name that jaxquant has for it.
        draw: from a generator, the tensors of a file without the name of their module.
        decode: from these tensors, the parts, of the shape that jaxquant loads.
        configs: the configurations by the names of their files.
        name: from the name of a part, the name of its tensor in the file.
        metadata: of the header, or None.
        weight: the name of the loaded tensor.
        dtype: of the values that `dequantize` returns.
        each_step: whether each operation is rounded to that dtype.
    """

    format: str
    draw: Callable[[np.random.Generator], File]
    decode: Callable[[File], Parts]
    configs: Mapping[str, Any]
    name: Callable[[str], str] = f"{MODULE}.{{}}".format
    metadata: Mapping[str, str] | None = None
    weight: str = WEIGHT
    dtype: np.dtype = F32
    each_step: bool = False

    def make(self, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], Parts]:
        """Return the tensors of a file, with a norm and a table in floats, and the parts of the quantized one."""
        file = self.draw(rng)
        tensors = {"model.embed_tokens.weight": rng.normal(size=(8, 4)).astype(BF16)}
        tensors |= {self.name(part): array for part, array in file.items()}
        tensors |= {"model.norm.weight": rng.normal(size=4).astype(F32), "lm_head.weight": np.ones((2, 4), F16)}
        return tensors, self.decode(file)

    def write(self, path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
        """Write a folder."""
        path.mkdir(exist_ok=True)
        write_safetensors(path / "model.safetensors", tensors, self.metadata)
        for name, config in self.configs.items():
            (path / name).write_text(json.dumps(config, indent=2))

    def compute_values(self, parts: Parts) -> np.ndarray:
        """Return the values of the producer's code."""
        return oracle.compute_values(parts, self.dtype, each_step=self.each_step)


def quantization(**settings: Any) -> dict[str, Any]:
    """Return a config.json with settings of a quantization."""
    return {"config.json": {"model_type": "llama", "quantization_config": settings}}


def _gptq(
    bits: int, *, version: int = 1, in_features: int = 96, group: int = 32, act_order: bool = False, **more: Any
) -> Family:
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": False, **more}
    if version == 2:
        settings["checkpoint_format"] = "gptq_v2"
    draw = functools.partial(
        oracle.draw_gptq, bits=bits, version=version, in_features=in_features, act_order=act_order,
        group=in_features if group < 0 else group,
    )  # fmt: skip
    decode = functools.partial(oracle.decode_gptq, bits=bits, version=version)
    return Family("gptq", draw, decode, quantization(**settings), dtype=F16)


def scheme(**weights: Any) -> dict[str, Any]:
    """Return compressed-tensors' settings with one group of linear layers."""
    group = {"targets": ["Linear"], "weights": weights}
    return quantization(
        quant_method="compressed-tensors", config_groups={"group_0": group}, ignore=["lm_head"], format="dense"
    )


def _packed(bits: int, dtype: np.dtype, *, symmetric: bool, in_features: int) -> Family:
    draw = functools.partial(oracle.draw_packed, bits=bits, dtype=dtype, symmetric=symmetric, in_features=in_features)
    decode = functools.partial(oracle.decode_packed, bits=bits)
    configs = scheme(num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=32)
    return Family("compressed-tensors", draw, decode, configs, dtype=dtype)


def _draw_fp8(rng: np.random.Generator) -> File:
    file = oracle.draw_fp8_blocks(rng)
    return {"weight": file["weight"], "weight_scale_inv": file["weight_scale"]}


def _decode_fp8(file: File) -> Parts:
    return oracle.decode_plain({"weight": file["weight"], "weight_scale": file["weight_scale_inv"]}, (128, 128))


def _draw_modelopt(rng: np.random.Generator) -> File:
    file = oracle.draw_nvfp4(rng)
    shared = file["weight_global_scale"].reshape(())
    return {"weight": file["weight_packed"], "weight_scale": file["weight_scale"], "weight_scale_2": shared}


def _decode_modelopt(file: File) -> Parts:
    renamed = {"weight_packed": file["weight"], "weight_scale": file["weight_scale"]}
    return oracle.decode_nvfp4({**renamed, "weight_global_scale": file["weight_scale_2"]}, divides=False)


def _draw_bitsandbytes(rng: np.random.Generator, *, kind: str, dtype: np.dtype, shape: Any, double: bool) -> File:
    file = oracle.draw_bitsandbytes(rng, shape=shape, double=double)
    levels = oracle.NF4_LEVELS if kind == "nf4" else oracle.FP4_LEVELS
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": dtype.name, "shape": list(shape)}
    parts = {"": file["weight"].reshape(-1, 1), ".absmax": file["absmax"], ".quant_map": np.asarray(levels, F32)}
    if double:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(file["nested_offset"][0])}
        parts |= {f".{name}": file[name] for name in ("nested_absmax", "nested_quant_map")}
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return {**parts, f".quant_state.bitsandbytes__{kind}": text}


def _decode_bitsandbytes(file: File) -> Parts:
    (key,) = [name for name in file if "quant_state" in name]
    state = json.loads(file[key].tobytes())
    renamed = {"weight": file[""], "shape": np.array(state["shape"]), "absmax": file[".absmax"]}
    if "nested_offset" in state:
        renamed |= {name: file[f".{name}"] for name in ("nested_absmax", "nested_quant_map")}
        renamed["nested_offset"] = np.array([state["nested_offset"]], F32)
    return oracle.decode_bitsandbytes(renamed, oracle.NF4_LEVELS if key.endswith("nf4") else oracle.FP4_LEVELS)


def _draw_int8(rng: np.random.Generator) -> File:
    file = oracle.draw_int8(rng)
    largest = np.abs(file["weight_scale"][:, 0]).astype(F32) * F32.type(100)
    return {"weight": file["weight"], "SCB": largest, "weight_format": np.zeros((), np.uint8)}


def _decode_int8(file: File) -> Parts:
    scale = file["SCB"][:, None] / F32.type(127)
    return oracle.decode_plain({"weight": file["weight"], "weight_scale": scale}, (1, 96))


def _draw_mxfp8(rng: np.random.Generator) -> File:
    codes = rng.integers(0, 256, (6, 96)).astype(np.uint8)
    codes[codes % 128 == 127] = 0  # NaN
    return {"weight": codes.view(E4M3), "weight_scale": rng.integers(100, 150, (6, 3)).astype(np.uint8)}


def _decode_mxfp8(file: File) -> Parts:
    scale = file["weight_scale"].view(ml_dtypes.float8_e8m0fnu)
    return oracle.decode_plain({"weight": file["weight"], "weight_scale": scale}, (1, 32))


def _draw_fbgemm(rng: np.random.Generator) -> File:
    codes = _draw_mxfp8(rng)["weight"]
    return {"weight": codes, "weight_scale": oracle.draw_scales(rng, (6, 1), F32, signed=False)}


def _bitsandbytes(kind: str, dtype: np.dtype, shape: tuple[int, int], *, double: bool) -> Family:
    draw = functools.partial(_draw_bitsandbytes, kind=kind, dtype=dtype, shape=shape, double=double)
    configs = quantization(
        quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type=kind, llm_int8_skip_modules=["lm_head"]
    )
    return Family("bitsandbytes", draw, _decode_bitsandbytes, configs, name=f"{WEIGHT}{{}}".format, dtype=dtype)


def _mlx(bits: int, dtype: np.dtype, group: int) -> Family:
    draw = functools.partial(oracle.draw_mlx, bits=bits, dtype=dtype, group=group)
    decode = functools.partial(oracle.decode_mlx, bits=bits)
    settings = {"group_size": group, "bits": bits}
    return Family(
        "mlx", draw, decode, {"config.json": {"quantization": settings, "quantization_config": settings}},
        metadata={"format": "mlx"}, dtype=dtype, each_step=True,
    )  # fmt: skip


def _mlx_floats(mode: str) -> Family:
    draw = functools.partial(oracle.draw_mlx_floats, mode=mode)
    decode = functools.partial(oracle.decode_mlx_floats, mode=mode)
    settings = {"group_size": 16 if mode == "nvfp4" else 32, "bits": 8 if mode == "mxfp8" else 4, "mode": mode}
    configs = {"config.json": {"quantization": settings}}
    return Family("mlx", draw, decode, configs, metadata={"format": "mlx"}, dtype=BF16)


def describe_torchao(kind: str, names: list[str], **data: Any) -> dict[str, str]:
    """Return the metadata of torchao for one tensor and for tensors that are not quantized."""
    plain = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    metadata = {name: json.dumps({"_type": "Tensor"}) for name in plain}
    metadata[WEIGHT] = json.dumps({"_type": kind, "_data": data, "_tensor_data_names": names})
    return {**metadata, "tensor_names": json.dumps([*plain, WEIGHT])}


def _torchao_int4(dtype: np.dtype) -> Family:
    metadata = describe_torchao("Int4Tensor", ["qdata", "scale", "zero_point"], block_size=[1, 32], shape=[6, 96])
    draw = functools.partial(oracle.draw_tinygemm, dtype=dtype)
    return Family(
        "torchao", draw, oracle.decode_tinygemm, quantization(quant_method="torchao"),
        name=f"{MODULE}._weight_{{}}".format, metadata=metadata, dtype=dtype, each_step=True,
    )  # fmt: skip


def _draw_torchao_int8(rng: np.random.Generator) -> File:
    file = oracle.draw_int8(rng)
    return {"qdata": file["weight"], "scale": file["weight_scale"].astype(F32)}


def _torchao_int8() -> Family:
    dtype = {"_type": "torch.dtype", "_data": "bfloat16"}
    metadata = describe_torchao("Int8Tensor", ["qdata", "scale"], block_size=[1, 96], dtype=dtype)

    def decode(file: File) -> Parts:
        return oracle.decode_plain({"weight": file["qdata"], "weight_scale": file["scale"]}, (1, 96))

    return Family(
        "torchao", _draw_torchao_int8, decode, quantization(quant_method="torchao"),
        name=f"{MODULE}._weight_{{}}".format, metadata=metadata, dtype=BF16,
    )  # fmt: skip


def list_families() -> dict[str, Family]:
    """Return all formats by name."""
    families = {f"GPTQ {bits} bits, version {v}": _gptq(bits, version=v) for bits in (2, 3, 4, 8) for v in (1, 2)}
    families |= {
        "GPTQ desc_act": _gptq(4, act_order=True),
        "GPTQ 3 bits, desc_act with a rest": _gptq(3, in_features=160, group=64, act_order=True),
        "GPTQ with a rest": _gptq(8, in_features=80),
        "GPTQ whole columns": _gptq(4, group=-1),
        "AWQ": Family(
            "awq", oracle.draw_awq, oracle.decode_awq,
            quantization(quant_method="awq", bits=4, group_size=32, version="gemm", zero_point=True), dtype=F16,
        ),
    }  # fmt: skip
    for bits in range(1, 9):
        dtype = (F32, BF16, F16)[bits % 3]
        for symmetric in (True, False):
            name = f"compressed-tensors {bits} bits{'' if symmetric else ', asymmetric'}"
            families[name] = _packed(bits, dtype, symmetric=symmetric, in_features=480 - bits)
    plain = functools.partial(oracle.decode_plain, sizes=(1, 96))
    int8 = scheme(num_bits=8, type="int", symmetric=True, strategy="channel")
    fp8 = scheme(num_bits=8, type="float", symmetric=True, strategy="block", block_structure=[128, 128])
    nvfp4 = scheme(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16)
    mxfp8 = scheme(num_bits=8, type="float", symmetric=True, strategy="group", group_size=32, scale_dtype="torch.uint8")
    families |= {
        "compressed-tensors int8": Family("compressed-tensors", oracle.draw_int8, plain, int8, dtype=BF16),
        "compressed-tensors fp8 in blocks": Family(
            "compressed-tensors", functools.partial(oracle.draw_fp8_blocks, dtype=BF16),
            functools.partial(oracle.decode_plain, sizes=(128, 128)), fp8, dtype=BF16,
        ),
        "compressed-tensors NVFP4": Family(
            "compressed-tensors", oracle.draw_nvfp4, functools.partial(oracle.decode_nvfp4, divides=True), nvfp4,
            dtype=BF16,
        ),
        "compressed-tensors MXFP8": Family("compressed-tensors", _draw_mxfp8, _decode_mxfp8, mxfp8, dtype=BF16),
        "bitsandbytes int8": Family(
            "bitsandbytes", _draw_int8, _decode_int8,
            quantization(quant_method="bitsandbytes", load_in_8bit=True, llm_int8_skip_modules=["lm_head"]),
        ),
        "fp8 of FBGEMM": Family(
            "fp8", _draw_fbgemm, plain,
            quantization(quant_method="fbgemm_fp8", activation_scale_ub=1200.0, modules_to_not_convert=["lm_head"]),
        ),
        "fp8 in blocks": Family(
            "fp8", _draw_fp8, _decode_fp8,
            quantization(quant_method="fp8", weight_block_size=[128, 128], fmt="e4m3", activation_scheme="dynamic"),
        ),
        "MXFP4": Family(
            "mxfp4", oracle.draw_mxfp4, oracle.decode_mxfp4,
            quantization(quant_method="mxfp4", modules_to_not_convert=["lm_head"]),
            name="model.layers.0.mlp.experts.gate_up_proj_{}".format, weight="model.layers.0.mlp.experts.gate_up_proj",
            dtype=BF16,
        ),
        "ModelOpt NVFP4": Family(
            "modelopt", _draw_modelopt, _decode_modelopt,
            {
                "config.json": {"model_type": "llama"},
                "hf_quant_config.json": {
                    "producer": {"name": "modelopt"},
                    "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head*"]},
                },
            },
        ),
    }  # fmt: skip
    for kind, dtype in (("nf4", F16), ("fp4", BF16), ("nf4", F32)):
        for shape in ((8, 64), (40, 1024), (5, 50), (3, 64 * 5)):
            for double in (False, True):
                name = f"bitsandbytes {kind} {shape[0]} x {shape[1]}{', double' if double else ''}, {dtype.name}"
                families[name] = _bitsandbytes(kind, dtype, shape, double=double)
    for bits in (2, 3, 4, 5, 6, 8):
        for dtype in (F32, F16, BF16):
            families[f"MLX {bits} bits, {dtype.name}"] = _mlx(bits, dtype, (32, 64, 128)[bits % 3])
    families |= {f"MLX {mode}": _mlx_floats(mode) for mode in ("mxfp4", "mxfp8", "nvfp4")}
    families |= {f"torchao int4, {dtype.name}": _torchao_int4(dtype) for dtype in (F32, BF16)}
    return {**families, "torchao int8": _torchao_int8()}


FAMILIES = list_families()
