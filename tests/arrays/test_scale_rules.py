"""The rules of scales that are powers of two, and ties: codes and scales of blocks against the producers' own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant._arrays.scale_rules import RULES

from ..oracles import microscaling_text as text

F32 = np.float32
BLOCK = 32


def make_spec(name: str, rule: str | None, ties: str = "even", scale_dtype: str = "float8_e8m0fnu") -> jq.QuantSpec:
    return jq.QuantSpec(name, jq.Blocked(-1, BLOCK), scale_dtype=scale_dtype, scale_rule=rule, ties=ties)  # type: ignore[arg-type]


def read_bytes(q: jq.QuantizedArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of the codes, with four bits in each for float4, and of the scale."""
    return np.asarray(q.codes).view(np.uint8), np.asarray(q.scale).view(np.uint8)


@pytest.mark.parametrize("name", sorted(text.FORMATS))
@pytest.mark.parametrize("rule", RULES)
def test_rule_has_the_oracle_s_scales_and_codes(rule: str, name: str, rng: np.random.Generator) -> None:
    blocks = text.draw_blocks(rng, 64, BLOCK, name)
    ties = ("even", "toward_zero") if name in ("float4_e2m1fn",) else ("even",)
    for tie in ties:
        expected = [text.quantize_block(block, rule, name, tie) for block in blocks]
        spec = make_spec(name, rule, tie)
        for q in (jq.quantize(blocks, spec), jax.jit(jq.quantize, static_argnums=1)(blocks, spec)):
            codes, scale = read_bytes(q)
            np.testing.assert_array_equal(scale[:, 0], [exponent + 127 for exponent, _ in expected])
            np.testing.assert_array_equal(codes, [block for _, block in expected])


# Generated with torchao 0.18 (to_mx), mlx 0.32 on a CPU (quantize), compressed-tensors 0.20 (generate_mx_scales) and
# gguf 0.19 (quantize): the bytes of the scales of blocks whose largest magnitudes are these.
MAGNITUDES = (1, 1.25, 1.4375, 1.5, 1.75, 1.78125, 1.875, 1.9375, 2, 6, 7, 440, 450, 480)
VECTORS = {
    ("torchao", "floor", "float4_e2m1fn"): "7d7d7d7d7d7d7d7d7e7f7f858585",
    ("torchao", "ceil", "float4_e2m1fn"): "7d7e7e7e7e7e7e7e7e8080868686",
    ("torchao", "even", "float4_e2m1fn"): "7d7d7d7d7e7e7e7e7e7f80858686",
    ("torchao", "rceil", "float4_e2m1fn"): "7d7d7d7d7e7e7e7e7e7f80868686",
    ("torchao", "floor", "float8_e4m3fn"): "77777777777777777879797f7f7f",
    ("torchao", "ceil", "float8_e4m3fn"): "7778787878787878787a7a808080",
    ("torchao", "even", "float8_e4m3fn"): "77777777777777787879797f7f7f",
    ("torchao", "rceil", "float8_e4m3fn"): "77777777777878787879797f8080",
    ("torchao", "floor", "float8_e5m2"): "7070707070707070717272787878",
    ("torchao", "ceil", "float8_e5m2"): "7071717171717171717373797979",
    ("torchao", "even", "float8_e5m2"): "7070707070707171717272787879",
    ("torchao", "rceil", "float8_e5m2"): "7070707070717171717272787979",
    ("mlx", "rceil", "float4_e2m1fn"): "7d7d7d7d7e7e7e7e7e7f80868686",
    ("mlx", "rceil", "float8_e4m3fn"): "77777777777878787879797f8080",
    ("compressed-tensors", "compressed_tensors", "float4_e2m1fn"): "7d7d7d7d7e7e7e7e7e7f80858686",
    ("compressed-tensors", "compressed_tensors", "float8_e4m3fn"): "777777777878787878797a7f8080",
    ("gguf", "floor", "float4_e2m1fn"): "7d7d7d7d7d7d7d7d7e7f7f858585",
}


@pytest.mark.parametrize(("producer", "rule", "name"), VECTORS)
def test_rule_has_the_scales_of_the_package(producer: str, rule: str, name: str) -> None:
    x = np.zeros((len(MAGNITUDES), BLOCK), F32)
    x[:, 0] = MAGNITUDES
    _, scale = read_bytes(jq.quantize(x, make_spec(name, rule)))
    assert scale.tobytes().hex() == VECTORS[producer, rule, name]


def test_ties_are_those_of_the_packages() -> None:
    x = np.zeros((1, BLOCK), F32)
    x[0, :16] = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0.5]
    # With "even" those of torchao. gguf and mlx have no negative zero, which is the only difference from the second.
    for ties, codes in (("even", "702244668aaccee1"), ("toward_zero", "7012345689abcde1")):
        found, _ = read_bytes(jq.quantize(x, make_spec("float4_e2m1fn", "floor", ties)))
        assert "".join(f"{code:x}" for code in found[0, :16]) == codes


def unpack(packed: np.ndarray) -> np.ndarray:
    """Return the codes of bytes with two each, the low one first."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def compare_with_package(
    blocks: np.ndarray, scale: np.ndarray, codes: np.ndarray, rule: str, name: str, ties: str = "even"
) -> None:
    """Compare a producer's bytes, up to the sign of zero and logarithms in float32 next to powers of two."""
    q = jq.quantize(blocks, make_spec(name, rule, ties))
    found_codes, found_scale = read_bytes(q)
    amax = np.abs(blocks).max(1) / F32(text.LARGEST[name] if rule == "rceil" else 1)
    exponent = np.log2(amax.astype(np.float64))
    is_near = np.abs(exponent - np.round(exponent)) < 1e-5
    np.testing.assert_array_equal(found_scale[~is_near, 0], scale[~is_near])
    rows = found_scale[:, 0] == scale
    sign = 8 if name == "float4_e2m1fn" else 128
    wrong = (found_codes[rows] != codes[rows]) & (found_codes[rows] & (sign - 1) != 0)
    assert not wrong.any()


@pytest.mark.parametrize("name", sorted(text.FORMATS))
@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
def test_torchao(rule: str, name: str, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    blocks = text.draw_blocks(rng, 256, BLOCK, name)
    dtype = torch.float4_e2m1fn_x2 if name == "float4_e2m1fn" else getattr(torch, name)
    scale, codes = mx.to_mx(torch.from_numpy(blocks), dtype, BLOCK, mx.ScaleCalculationMode(rule))
    codes = codes.view(torch.uint8).numpy()
    codes = unpack(codes) if name == "float4_e2m1fn" else codes
    compare_with_package(blocks, scale.view(torch.uint8).numpy()[:, 0], codes, rule, name)


@pytest.mark.parametrize(("name", "mode", "bits"), [("float4_e2m1fn", "mxfp4", 4), ("float8_e4m3fn", "mxfp8", 8)])
def test_mlx(name: str, mode: str, bits: int, rng: np.random.Generator) -> None:
    mx = pytest.importorskip("mlx.core")
    blocks = text.draw_blocks(rng, 256, BLOCK, name)
    words, scale = mx.quantize(mx.array(blocks), mode=mode, group_size=BLOCK, bits=bits)[:2]
    codes = np.array(words).view(np.uint8)
    codes, ties = (unpack(codes), "toward_zero") if bits == 4 else (codes, "even")
    compare_with_package(blocks, np.array(scale)[:, 0], codes, "rceil", name, ties)


def test_gguf(rng: np.random.Generator) -> None:
    gguf = pytest.importorskip("gguf")
    blocks = text.draw_blocks(rng, 256, BLOCK, "float4_e2m1fn")
    packed = gguf.quants.quantize(blocks, gguf.GGMLQuantizationType.MXFP4)
    codes = np.concatenate([packed[:, 1:] & 15, packed[:, 1:] >> 4], 1)
    compare_with_package(blocks, packed[:, 0], codes, "floor", "float4_e2m1fn", "toward_zero")


@pytest.mark.parametrize(("name", "bits"), [("float4_e2m1fn", 4), ("float8_e4m3fn", 8)])
def test_compressed_tensors(name: str, bits: int, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    utilities = pytest.importorskip("compressed_tensors.quantization.utils.mxfp_utils")
    blocks = text.draw_blocks(rng, 256, BLOCK, name)
    scale = utilities.generate_mx_scales(torch.from_numpy(np.abs(blocks).max(1)), bits).numpy().astype(np.uint8)
    _, found = read_bytes(jq.quantize(blocks, make_spec(name, "compressed_tensors")))
    np.testing.assert_array_equal(found[:, 0], scale)


@pytest.mark.parametrize("rule", RULES)
def test_extremes_of_a_rule(rule: str) -> None:
    """Empty ranges have scale 1, as without a rule; NaN and infinity show; the largest numbers stay finite."""
    largest = np.finfo(F32).max
    x = np.asarray([[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0], [largest, -1.0], [2.0**-126, 0.0]], F32)
    spec = jq.QuantSpec("float8_e4m3fn", jq.PerAxis(0), scale_dtype="float8_e8m0fnu", scale_rule=rule)  # type: ignore[arg-type]
    for q in (jq.quantize(x, spec), jax.jit(jq.quantize, static_argnums=1)(x, spec)):
        scale, y = np.asarray(q.scale).view(np.uint8)[:, 0], np.asarray(q.dequantize())
        assert scale[0] == 127
        np.testing.assert_array_equal(y[0], 0)
        assert not np.isfinite(y[1:3, 0]).any()
        assert np.isfinite(y[3:]).all()
        assert y[3, 0] > largest / 4
        assert scale[4] == 1  # 2**-126
    half = jq.quantize(jnp.asarray([[65504.0, -1.0]], jnp.float16), spec)
    assert np.isfinite(np.asarray(half.dequantize(), F32)).all()


def test_integers_have_rules() -> None:
    """MXINT8 of the OCP specification: codes in 64ths of the largest power of two that is not above amax."""
    x = np.asarray([[1.99, -0.5, 1 / 128]], F32)
    q = jq.quantize(x, jq.QuantSpec("int8", jq.PerAxis(0), scale_rule="floor", scale_dtype="float8_e8m0fnu"))
    np.testing.assert_array_equal(q.codes, [[127, -32, 0]])
    assert float(q.scale[0, 0]) == 2.0**-6


def test_default_is_rceil() -> None:
    """The default rule is stored as None, so that equal specs are equal; a rule implies powers of two."""
    spec = jq.QuantSpec("float4_e2m1fn", scale_dtype="float8_e8m0fnu")
    assert spec == jq.QuantSpec("float4_e2m1fn", scale_dtype="float8_e8m0fnu", scale_rule="rceil")
    assert jq.QuantSpec("float8_e5m2", scale_rule="even").power_of_two
    assert jq.QuantSpec("float8_e5m2", scale_rule="rceil") == jq.QuantSpec("float8_e5m2", power_of_two=True)
    text = repr(jq.QuantSpec("float4_e2m1fn", scale_rule="floor", ties="toward_zero"))
    assert text.endswith("power_of_two=True, scale_rule='floor', ties='toward_zero')")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "float4_e2m1fn", "scale_rule": "round"}, "QuantSpec: scale_rule: expected"),
        ({"dtype": "int8", "scale_rule": "even"}, "integers have no digits to round to, got 'even'"),
        ({"dtype": "uint8", "scale_rule": "floor"}, "reach equally far on both sides of 0"),
        ({"dtype": jq.nf4, "scale_rule": "floor"}, "reach equally far on both sides of 0"),
        ({"dtype": "float8_e4m3fn", "ties": "toward_zero"}, "only float4_e2m1fn has ties"),
        ({"dtype": "float4_e2m1fn", "ties": "up"}, "QuantSpec: ties: expected"),
    ],
)
def test_bad_rules(options: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        jq.QuantSpec(**options)  # type: ignore[arg-type]


def test_ties_in_training_and_fake_quantization(rng: np.random.Generator) -> None:
    """Every function that rounds takes the ties of the spec, and gives the codes of `quantize`."""
    blocks = text.draw_blocks(rng, 8, BLOCK, "float4_e2m1fn")
    spec = make_spec("float4_e2m1fn", "floor", "toward_zero", "float32")
    expected = np.asarray(jq.quantize(blocks, spec).dequantize())
    np.testing.assert_array_equal(jq.fake_quantize(blocks, spec), expected)
    y = jq.quantized_einsum("ab,bc->ac", blocks, np.eye(BLOCK, dtype=F32), specs=(spec, None))
    np.testing.assert_array_equal(y, expected)
