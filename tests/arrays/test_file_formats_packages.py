"""The numpy decoders of `oracles/file_formats.py` against the packages that define the formats.

gguf is light and belongs to the extra `test`. The other packages need torch or MLX, so each test is skipped where its
package is missing:

    pip install compressed-tensors bitsandbytes torchao hqq autoawq gptqmodel transformers "mlx[cpu]"
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest

from ..cases import file_formats as cases
from ..oracles import file_formats
from ..oracles.file_formats import BF16, E2M1, E4M3, F16, F32, File, Parts
from ..support import equality
from ..support.packages import load_package


def to_torch(x: np.ndarray) -> Any:
    torch = load_package("torch")
    names = {BF16: (np.int16, torch.bfloat16), E4M3: (np.uint8, torch.float8_e4m3fn)}
    if x.dtype not in names:
        return torch.from_numpy(np.array(x))
    carrier, dtype = names[x.dtype]
    return torch.from_numpy(x.view(carrier).copy()).view(dtype)


def from_torch(x: Any) -> np.ndarray:
    torch = load_package("torch")
    x = x.detach().cpu().contiguous()
    return x.view(torch.int16).numpy().view(BF16) if x.dtype == torch.bfloat16 else x.numpy()


def torch_dtype(dtype: np.dtype) -> Any:
    return getattr(load_package("torch"), dtype.name)


def select(prefix: str) -> list[str]:
    return [name for name in file_formats.FORMATS if name.startswith(prefix)]


def draw(rng: np.random.Generator, name: str) -> tuple[File, Parts]:
    row = file_formats.FORMATS[name]
    file = row.draw(rng)
    return file, row.decode(file)


def check(actual: np.ndarray, parts: Parts, name: str, *, has_zero_sign: bool = True) -> None:
    each_step = file_formats.FORMATS[name].each_step
    expected = file_formats.compute_values(parts, actual.dtype, each_step=each_step)
    if not has_zero_sign:
        actual, expected = (np.where(x == 0, x.dtype.type(0), x) for x in (actual, expected))
    equality.same_bits(actual, expected)


@pytest.mark.parametrize("name", file_formats.GGUF)
def test_gguf(rng: np.random.Generator, name: str) -> None:
    gguf = load_package("gguf")
    kind = gguf.GGMLQuantizationType[name]
    for _ in range(10):
        file, parts = draw(rng, f"GGUF {name}")
        expected = gguf.dequantize(file["data"], kind)
        # Its table of float4 has integers, and no -0.
        check(expected, parts, f"GGUF {name}", has_zero_sign=parts.codes.dtype != E2M1)
        size = file_formats.FORMATS[f"GGUF {name}"].bits
        assert file["data"].nbytes * 8 == size * expected.size
    if name.startswith("Q") and "K" not in name:  # what gguf itself quantizes
        data = gguf.quantize(rng.normal(size=(4, 64)).astype(F32), kind)
        values = file_formats.compute_values(file_formats.GGUF[name].decode({"data": data}))
        equality.same_bits(values, gguf.dequantize(data, kind))


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_gguf_without_negative_zeros(rng: np.random.Generator, name: str) -> None:
    """With a codebook in place of float4 the signs of zeros are those of gguf, too."""
    gguf = load_package("gguf")
    file, parts = draw(rng, f"GGUF {name}")
    levels = tuple(float(level) + 0.0 for level in np.arange(16, dtype=np.uint8).view(E2M1))
    parts = parts._replace(codes=parts.codes.view(np.uint8), levels=levels)
    expected = gguf.dequantize(file["data"], gguf.GGMLQuantizationType[name])
    equality.same_bits(cases.build_array(parts, F32).dequantize(), expected)


@pytest.mark.parametrize("name", [name for name in select("compressed-tensors") if "bits" in name])
def test_compressed_tensors_packed(rng: np.random.Generator, name: str) -> None:
    helpers = load_package("torch", "compressed_tensors.compressors.pack_quantized.helpers")
    quantization = load_package("compressed_tensors.quantization")
    row = file_formats.FORMATS[name]
    bits = int(name.split()[1])
    file, parts = draw(rng, name)
    codes = helpers.unpack_from_int32(to_torch(file["weight_packed"]), bits, tuple(file["weight_shape"]))
    np.testing.assert_array_equal(from_torch(codes), parts.codes)
    np.testing.assert_array_equal(from_torch(helpers.pack_to_int32(codes, bits)), file["weight_packed"])
    if parts.zero_point is not None:
        words = to_torch(file["weight_zero_point"])
        zeros = helpers.unpack_from_int32(words, bits, tuple(parts.zero_point.shape), packed_dim=0)
        np.testing.assert_array_equal(from_torch(zeros), parts.zero_point)
    # Its dequantization refuses groups that do not divide.
    whole = np.pad(parts.codes, [(0, 0), (0, -parts.codes.shape[1] % 32)])
    args = quantization.QuantizationArgs(num_bits=bits, strategy="group", group_size=32, symmetric=False)
    zeros = None if parts.zero_point is None else to_torch(parts.zero_point)
    assert isinstance(parts.scale, np.ndarray)
    values = importlib.import_module("compressed_tensors.quantization.lifecycle.forward").dequantize(
        to_torch(whole), to_torch(parts.scale), zeros, args, dtype=torch_dtype(row.dtypes[0])
    )
    check(from_torch(values)[:, : parts.codes.shape[1]], parts, name)


@pytest.mark.parametrize("name", [*select("fp8 in blocks"), "compressed-tensors int8"])
def test_compressed_tensors_plain(rng: np.random.Generator, name: str) -> None:
    forward = load_package("torch", "compressed_tensors.quantization.lifecycle.forward")
    quantization = load_package("compressed_tensors.quantization")
    file, parts = draw(rng, name)
    args = quantization.QuantizationArgs(num_bits=8, strategy="channel")
    if "fp8" in name:
        args = quantization.QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    for dtype in file_formats.FORMATS[name].dtypes:
        scale = to_torch(file["weight_scale"])
        check(
            from_torch(forward.dequantize(to_torch(file["weight"]), scale, None, args, torch_dtype(dtype))), parts, name
        )


def test_compressed_tensors_nvfp4(rng: np.random.Generator) -> None:
    forward = load_package("torch", "compressed_tensors.quantization.lifecycle.forward")
    helpers = load_package("compressed_tensors.compressors.nvfp4.helpers")
    quantization = load_package("compressed_tensors.quantization")
    name = "NVFP4 of compressed-tensors"
    file, parts = draw(rng, name)
    codes = helpers.unpack_fp4_from_uint8(to_torch(file["weight_packed"]), *parts.codes.shape)
    equality.same_bits(from_torch(codes).astype(F32), parts.codes.astype(F32))
    args = quantization.QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    scale = to_torch(file["weight_scale"]).to(codes.dtype)
    for dtype in (F32, BF16):
        whole = to_torch(file["weight_global_scale"])
        values = forward.dequantize(codes, scale, None, args, torch_dtype(dtype), global_scale=whole)
        check(from_torch(values), parts, name)


def test_mxfp4_of_transformers(rng: np.random.Generator) -> None:
    integration = load_package("torch", "transformers.integrations.mxfp4")
    file, parts = draw(rng, "MXFP4")
    for dtype in (F32, BF16):
        values = integration._convert_moe_packed_tensors(
            to_torch(file["blocks"]), to_torch(file["scales"]), dtype=torch_dtype(dtype)
        )
        check(from_torch(values.transpose(1, 2)), parts, "MXFP4")


@pytest.mark.parametrize("name", select("bitsandbytes"))
def test_bitsandbytes(rng: np.random.Generator, name: str) -> None:
    functional = load_package("torch", "bitsandbytes.functional")
    torch = load_package("torch")
    file, parts = draw(rng, name)
    kind = name.split()[1]
    table = functional.get_4bit_type(kind, device="cpu")
    equality.same_bits(from_torch(table), np.asarray(parts.levels, F32))
    if "double" in name:
        levels = from_torch(functional.create_dynamic_map())
        equality.same_bits(levels, np.asarray(file_formats.list_dynamic_levels(), F32))
    for dtype in (F32, F16, BF16):
        nested = {}
        if "double" in name:
            nested = {
                "offset": to_torch(file["nested_offset"])[0],
                "state2": functional.QuantState(
                    absmax=to_torch(file["nested_absmax"]), code=to_torch(file["nested_quant_map"]), blocksize=256,
                    dtype=torch.float32,
                ),
            }  # fmt: skip
        state = functional.QuantState(
            absmax=to_torch(file["absmax"]), shape=torch.Size(file["shape"].tolist()), code=table, blocksize=64,
            quant_type=kind, dtype=torch_dtype(dtype), **nested,
        )  # fmt: skip
        values = from_torch(functional.dequantize_4bit(to_torch(file["weight"]).reshape(-1, 1), state))
        # For some shapes it runs a kernel that decodes the sign of a zero.
        check(values.reshape(parts.codes.shape), parts, name, has_zero_sign=kind == "nf4")


@pytest.mark.parametrize("name", select("MLX"))
def test_mlx(rng: np.random.Generator, name: str) -> None:
    mx = load_package("mlx.core")
    file, parts = draw(rng, name)
    is_affine = "bits" in name

    def convert(x: np.ndarray) -> Any:
        return mx.array(x.astype(F32)).astype(mx.bfloat16) if x.dtype == BF16 else mx.array(x)

    options = {"group_size": parts.sizes[-1], "bits": parts.bits}
    biases = convert(file["biases"]) if is_affine else None
    options |= {} if is_affine else {"mode": name.split()[1]}
    for dtype in file_formats.FORMATS[name].dtypes:
        options["dtype"] = getattr(mx, dtype.name)
        values = mx.dequantize(mx.array(file["weight"]), convert(file["scales"]), biases, **options, stream=mx.cpu)
        assert values.dtype == options["dtype"]
        check(np.array(values.astype(mx.float32)).astype(dtype), parts, name)


@pytest.mark.parametrize("name", select("torchao"))
def test_torchao(rng: np.random.Generator, name: str) -> None:
    primitives = load_package("torch", "torchao.quantization.quant_primitives")
    torch = load_package("torch")
    file, parts = draw(rng, name)
    assert isinstance(parts.scale, np.ndarray)
    assert isinstance(parts.offset, np.ndarray)
    for dtype in file_formats.FORMATS[name].dtypes:
        values = primitives._dequantize_affine_tinygemm(
            to_torch((parts.codes + 8).astype(np.uint8)), (1, 32), to_torch(parts.scale), to_torch(parts.offset),
            torch.uint8, 0, 15, output_dtype=torch_dtype(dtype),
        )  # fmt: skip
        check(from_torch(values), parts, name)
    unpacked = np.stack([file["qdata"] & 15, file["qdata"] >> 4], axis=-1).reshape(6, 96)
    np.testing.assert_array_equal(unpacked, parts.codes & 15)


@pytest.mark.parametrize("name", select("HQQ"))
def test_hqq(rng: np.random.Generator, name: str) -> None:
    hqq = load_package("torch", "hqq.core.quantize")
    file, parts = draw(rng, name)
    bits, axis = int(name.split()[1]), int(name.split()[4].strip(","))
    (dtype,) = file_formats.FORMATS[name].dtypes
    meta = {
        "nbits": bits, "group_size": 32, "shape": tuple(file["shape"].tolist()), "axis": axis,
        "packing": hqq.Quantizer.bit_to_packing[bits], "view_as_float": False, "compute_dtype": torch_dtype(dtype),
        "scale": to_torch(file["scale"]), "zero": to_torch(file["zero"]),
    }  # fmt: skip
    check(from_torch(hqq.Quantizer.dequantize(to_torch(file["W_q"]), meta)), parts, name)


def test_awq(rng: np.random.Generator) -> None:
    packing = load_package("torch", "awq.utils.packing_utils")
    file, parts = draw(rng, "AWQ")
    words = (to_torch(file[name]) for name in ("qweight", "qzeros", "scales"))
    check(from_torch(packing.dequantize_gemm(*words, 4, 32)), parts, "AWQ")


@pytest.mark.parametrize("name", [name for name in select("GPTQ") if "16" not in name])
def test_gptq(rng: np.random.Generator, name: str) -> None:
    linear = load_package("torch", "gptqmodel.nn_modules.qlinear.torch")
    bits = int(name.split()[1]) if "bits" in name else (8 if "desc_act with" in name else 4)
    file, parts = draw(rng, name)
    layer = linear.TorchLinear(
        bits=bits, group_size=32, sym=False, desc_act="desc_act" in name, in_features=len(file["g_idx"]),
        out_features=32, bias=False, register_buffers=True,
    )  # fmt: skip
    # Its own kernel has z, not z - 1.
    zeros = file_formats.pack(np.asarray(parts.zero_point), bits).view(np.int32)
    layer.qweight.data, layer.qzeros.data = to_torch(file["qweight"]), to_torch(zeros)
    layer.scales.data, layer.g_idx.data = to_torch(file["scales"]), to_torch(file["g_idx"])
    layer.post_init()
    check(from_torch(layer.dequantize_weight()), parts, name)


def test_sizes_of_files(rng: np.random.Generator) -> None:
    """Codes take their own bits, but for the padding of words."""
    for name, row in file_formats.FORMATS.items():
        file, parts = draw(rng, name)
        data = next(
            file[key] for key in ("data", "qweight", "weight_packed", "weight", "blocks", "W_q", "qdata") if key in file
        )
        least = math.prod(parts.codes.shape) * parts.bits / 8
        assert data.nbytes >= least, name
        if not row.bits and "HQQ 3" not in name:
            assert data.nbytes <= least + 4 * parts.codes.shape[0], name
