"""Files that the packages of other programs write, and the values that these packages have for them.

Each test is skipped where its package is missing:

    pip install compressed-tensors bitsandbytes torchao "mlx[cpu]"
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest

import jaxquant as jq
from jaxquant import checkpoint
from jaxquant.checkpoint.formats.rounding import TARGETS

from ..cases.family_files import MODULE, WEIGHT, quantization, scheme
from ..oracles.file_formats import BF16, E4M3, F32
from ..support import equality
from ..support.packages import load_package


def from_torch(x: Any) -> np.ndarray:
    torch = load_package("torch")
    x = x.detach().cpu().contiguous()
    return x.view(torch.int16).numpy().view(BF16) if x.dtype == torch.bfloat16 else x.numpy()


def check(path: pathlib.Path, expected: dict[str, np.ndarray], *, has_zero_sign: bool = True) -> None:
    """Compare the values of a folder with its package's, and the bytes of what is saved."""
    loaded, info = checkpoint.load(path)
    for name, values in expected.items():
        q = loaded[name]
        assert isinstance(q, jq.QuantizedArray)
        actual = np.asarray(q.dequantize()).reshape(values.shape)
        if not has_zero_sign:
            actual, values = (np.where(x == 0, x.dtype.type(0), x) for x in (actual, values))
        equality.same_bits(actual, values)
    checkpoint.save(path.parent / "again", loaded, info)
    for file in path.iterdir():
        assert (path.parent / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def save_torch(path: pathlib.Path, tensors: dict[str, Any], config: Any, metadata: Any = None) -> None:
    path.mkdir()
    saver = load_package("safetensors.torch")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    saver.save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt", **(metadata or {})})
    (path / "config.json").write_text(json.dumps(config["config.json"]))


ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "pack-quantized, 4 bits": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "pack-quantized, 8 bits": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "pack-quantized, 3 bits, asymmetric": (
        "pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 16, "symmetric": False},
    ),
    "pack-quantized, 5 bits, asymmetric": (
        "pack-quantized", {"num_bits": 5, "strategy": "channel", "symmetric": False},
    ),
    "int-quantized": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int-quantized, asymmetric": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "int-quantized, one scale": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "float-quantized": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "float-quantized, one scale": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "float-quantized in blocks": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [4, 48]},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compressed_tensors(rng: np.random.Generator, tmp_path: pathlib.Path, name: str, dtype: str) -> None:
    torch = load_package("torch")
    compressors = load_package("compressed_tensors.compressors")
    quantization = load_package("compressed_tensors.quantization")
    helpers = load_package("compressed_tensors.quantization.utils")
    kind, arguments = ARGUMENTS[name]
    args = quantization.QuantizationArgs(**arguments)
    weight = torch.from_numpy(rng.normal(size=(8, 96)).astype(F32)).to(getattr(torch, dtype))
    groups = {"group": args.group_size, "tensor_group": args.group_size, "channel": 96}
    if args.strategy == "block":
        blocks = weight.reshape(2, 4, 2, 48)
        low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    elif args.strategy == "tensor":
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    else:
        rows = weight.reshape(8, -1, groups[args.strategy])
        low, high = rows.amin(dim=-1), rows.amax(dim=-1)
    state = {"weight": weight}
    if "nvfp4" in name:
        state["weight_global_scale"] = helpers.generate_gparam(weight.amin(), weight.amax()).float()
    scale, zero = helpers.calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
    state["weight_scale"] = scale
    if not args.symmetric:
        state["weight_zero_point"] = zero
    scheme_ = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    compressor = compressors.BaseCompressor.get_value_from_registry(kind)
    packed = compressor.compress(state, scheme_)
    values = compressor.decompress(packed, scheme_)["weight"]
    settings = json.loads(args.model_dump_json())
    tensors = {f"{MODULE}.{part}": tensor for part, tensor in packed.items()}
    save_torch(tmp_path / "model", tensors, scheme(**settings))
    check(tmp_path / "model", {WEIGHT: from_torch(values)})


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_bitsandbytes(rng: np.random.Generator, tmp_path: pathlib.Path, kind: str, double: bool) -> None:
    torch, functional = load_package("torch"), load_package("bitsandbytes.functional")
    tensors, expected = {}, {}
    for i, shape in enumerate(((16, 128), (6, 50), (40, 1024), (3, 3))):
        weight = torch.from_numpy(rng.normal(size=shape).astype(F32)).to(torch.bfloat16)
        data, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=double, blocksize=64)
        name = f"model.layers.{i}.weight"
        tensors |= {name: data, **{f"{name}.{key}": part for key, part in state.as_dict(packed=True).items()}}
        expected[name] = from_torch(functional.dequantize_4bit(data, state))
    config = quantization(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type=kind)
    save_torch(tmp_path / "model", tensors, config)
    check(tmp_path / "model", expected, has_zero_sign=kind == "nf4")


def test_int8_of_bitsandbytes(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """The package multiplies by SCB, and then by 1 / 127, where `dequantize` multiplies by SCB / 127."""
    torch, bitsandbytes = load_package("torch"), load_package("bitsandbytes")
    layer = bitsandbytes.nn.Linear8bitLt(128, 16, bias=False, has_fp16_weights=False)
    weight = torch.from_numpy(rng.normal(size=(16, 128)).astype(F32)).to(torch.float16)
    codes, largest, _ = bitsandbytes.functional.int8_vectorwise_quant(weight)
    layer.weight.data, layer.weight.SCB = codes, largest
    tensors = {f"{MODULE}.{name}": part for name, part in layer.state_dict().items()}
    assert {name.rpartition(".")[2] for name in tensors} == {"weight", "SCB", "weight_format"}
    save_torch(tmp_path / "model", tensors, quantization(quant_method="bitsandbytes", load_in_8bit=True))
    check(tmp_path / "model", {})
    q = checkpoint.load(tmp_path / "model")[0][WEIGHT]
    assert isinstance(q, jq.QuantizedArray)
    np.testing.assert_array_equal(np.asarray(q.codes), from_torch(codes))
    values = from_torch(bitsandbytes.functional.int8_vectorwise_dequant(codes, largest))
    np.testing.assert_allclose(np.asarray(q.dequantize()), values, rtol=5 * 2.0**-24, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torchao(rng: np.random.Generator, tmp_path: pathlib.Path, dtype: str) -> None:
    torch = load_package("torch")
    support = load_package("torchao.prototype.safetensors.safetensors_support")
    quantization_ = load_package("torchao.quantization")
    nvfp4 = load_package("torchao.prototype.mx_formats.nvfp4_tensor")
    weight = torch.from_numpy(rng.normal(size=(8, 96)).astype(F32)).to(getattr(torch, dtype))
    named = {
        "int8": quantization_.Int8Tensor.from_hp(weight, quantization_.PerRow()),
        "int8_tensor": quantization_.Int8Tensor.from_hp(weight, quantization_.PerTensor()),
        "intx": quantization_.IntxUnpackedToInt8Tensor.from_hp(weight, (1, 32), torch.int4),
        "asymmetric": quantization_.IntxUnpackedToInt8Tensor.from_hp(
            weight, (1, 48), torch.int5, mapping_type=quantization_.MappingType.ASYMMETRIC
        ),
        "float8": quantization_.Float8Tensor.from_hp(weight, granularity=quantization_.PerRow()),
        "float8_tensor": quantization_.Float8Tensor.from_hp(weight, granularity=quantization_.PerTensor()),
    }
    if dtype != "float16":
        named["nvfp4"] = nvfp4.NVFP4Tensor.to_nvfp4(weight)
        named["nvfp4_two"] = nvfp4.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=torch.tensor(0.37))
    expected = {f"model.{name}.weight": from_torch(tensor.dequantize()) for name, tensor in named.items()}
    state = {f"model.{name}.weight": tensor for name, tensor in named.items()}
    state["model.norm.bias"] = torch.ones(4)
    tensors, metadata = support.flatten_tensor_state_dict(state)
    save_torch(tmp_path / "model", tensors, quantization(quant_method="torchao"), metadata)
    check(tmp_path / "model", expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_mlx(rng: np.random.Generator, tmp_path: pathlib.Path, dtype: str) -> None:
    mx = load_package("mlx.core")
    settings: dict[str, Any] = {"group_size": 64, "bits": 4}
    tensors, expected = {}, {}
    modes = [("affine", bits, 32 * (1 + bits % 2)) for bits in (2, 3, 4, 5, 6, 8)]
    modes += [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)] if dtype == "bfloat16" else []
    for mode, bits, group in modes:
        weight = mx.array(rng.normal(size=(8, 128)).astype(F32)).astype(getattr(mx, dtype))
        parts = mx.quantize(weight, group_size=group, bits=bits, mode=mode, stream=mx.cpu)
        module = f"model.{mode}_{bits}"
        names = ("weight", "scales", "biases")[: len(parts)]
        tensors |= {f"{module}.{name}": part for name, part in zip(names, parts, strict=True)}
        settings[module] = {"group_size": group, "bits": bits, "mode": mode}
        values = mx.dequantize(*parts, group_size=group, bits=bits, mode=mode, stream=mx.cpu)
        expected[f"{module}.weight"] = np.array(values.astype(mx.float32)).astype(
            BF16 if dtype == "bfloat16" else dtype
        )
    (tmp_path / "model").mkdir()
    mx.save_safetensors(str(tmp_path / "model" / "model.safetensors"), tensors, metadata={"format": "mlx"})
    (tmp_path / "model" / "config.json").write_text(json.dumps({"quantization": settings}))
    check(tmp_path / "model", expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_round_to_nearest_of_compressed_tensors(rng: np.random.Generator, name: str, dtype: str) -> None:
    """The codes and the scales of `quantize_to` are the package's own, for groups of zeros and ties, too."""
    torch = load_package("torch")
    quantization = load_package("compressed_tensors.quantization")
    forward = load_package("compressed_tensors.quantization.lifecycle.forward")
    helpers = load_package("compressed_tensors.quantization.utils")
    x = (rng.normal(size=(16, 512)) * np.exp(rng.uniform(-8, 2, (16, 1)))).astype(F32)
    x[0] = 0
    x[1] = rng.integers(-15, 16, 512) / 2
    x[1, ::128] = 7.5
    weight = torch.from_numpy(x).to(getattr(torch, dtype))
    settings = TARGETS[f"compressed-tensors-{name}"].weights
    args = quantization.QuantizationArgs(**settings)
    rows = weight.reshape(16, -1, args.group_size or 512)
    scale, zero = helpers.calculate_qparams(rows.amin(dim=-1), rows.amax(dim=-1), args)
    codes = forward.quantize(weight, scale, zero, args, dtype=args.pytorch_dtype())
    tensors, info = checkpoint.quantize_to({"a.weight": from_torch(weight)}, f"compressed-tensors-{name}")
    q = tensors["a.weight"]
    assert isinstance(q, jq.QuantizedArray)
    equality.same_bits(q.scale, from_torch(scale))
    expected = from_torch(codes.view(torch.uint8)).view(E4M3) if name == "fp8" else from_torch(codes)
    np.testing.assert_array_equal(np.asarray(q.codes).astype(F32), expected.astype(F32))
    assert info.format == "compressed-tensors"
