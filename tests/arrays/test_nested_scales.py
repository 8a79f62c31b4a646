"""NVFP4: scales that are float8 themselves, in the orders of ModelOpt and of compressed-tensors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxquant as jq

from ..oracles import microscaling_text as text

F32 = np.float32
BLOCK = 16
INNER = jq.QuantSpec("float8_e4m3fn")
RULES = ("modelopt", "compressed_tensors")


def make_spec(rule: str | None = None, axis: int = -1) -> jq.QuantSpec:
    return jq.QuantSpec("float4_e2m1fn", jq.Blocked(axis, BLOCK), scale_spec=INNER, scale_rule=rule)  # type: ignore[arg-type]


def draw(rng: np.random.Generator) -> np.ndarray:
    """Return [8, 64] with blocks of very different sizes, one of zeros and one that underflows."""
    x = (rng.standard_normal((8, 64)) * np.exp2(rng.integers(-6, 6, (8, 1)))).astype(F32)
    x[0, :BLOCK] = 0
    x[1, :BLOCK] = rng.standard_normal(BLOCK).astype(F32) * F32(1e-7)
    return x


@pytest.mark.parametrize("rule", RULES)
def test_scales_and_codes_are_the_oracle_s(rule: str, rng: np.random.Generator) -> None:
    x = draw(rng)
    codes, scale, shared, values = text.quantize_nvfp4(x, rule)
    for q in (jq.quantize(x, make_spec(rule)), jax.jit(jq.quantize, static_argnums=1)(x, make_spec(rule))):
        np.testing.assert_array_equal(np.asarray(q.codes).view(np.uint8), codes)
        np.testing.assert_array_equal(np.asarray(q.scale.codes).view(np.uint8), scale)
        np.testing.assert_array_equal(q.scale.scale, np.reshape(shared, (1, 1)))
        levels = codes.view(ml_dtypes.float4_e2m1fn).astype(F32)
        assert q.scale.inverse_scale == (rule == "compressed_tensors")
        np.testing.assert_array_equal(q.scale.dequantize(), values)
        np.testing.assert_array_equal(q.dequantize(), (levels * np.repeat(values, BLOCK, 1)).astype(F32))
    assert q.nbytes == x.size // 2 + x.size // BLOCK + 4


def test_modelopt(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    nvfp4 = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    x = draw(rng)
    packed, scale, shared = nvfp4.quantize(torch.from_numpy(x.copy()), BLOCK)
    q = jq.quantize(x, make_spec("modelopt"))
    bytes_ = packed._quantized_data.numpy()
    codes = np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(x.shape)
    found = np.asarray(q.codes).view(np.uint8)
    np.testing.assert_array_equal(np.asarray(q.scale.codes).view(np.uint8), scale.view(torch.uint8).numpy())
    np.testing.assert_array_equal(np.ravel(q.scale.scale), np.ravel(shared.numpy()))
    assert ((found == codes) | (found & 7 == 0)).all()


def test_compressed_tensors(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    package = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    x = draw(rng)
    arguments = package.QuantizationArgs(
        num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=BLOCK,
        scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    values = torch.from_numpy(x)
    blocks = values.reshape(8, -1, BLOCK)
    inverse = helpers.generate_gparam(values.min(), values.max())
    scale, point = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments, inverse)
    rounded = forward.quantize(values, scale, point, arguments, global_scale=inverse).float().numpy()
    q = jq.quantize(x, make_spec("compressed_tensors"))
    np.testing.assert_array_equal(np.asarray(q.scale.codes).astype(F32), scale.float().numpy())
    np.testing.assert_array_equal(np.asarray(q.codes).astype(F32), rounded)
    np.testing.assert_array_equal(np.ravel(q.scale.scale), inverse.numpy())
    floats = forward.dequantize(torch.from_numpy(rounded), scale, point, arguments, global_scale=inverse)
    np.testing.assert_array_equal(q.dequantize(), floats.numpy())


@pytest.mark.parametrize("rule", RULES)
def test_empty_and_broken_ranges(rule: str) -> None:
    for quantize in (jq.quantize, jax.jit(jq.quantize, static_argnums=1)):
        q = quantize(np.zeros((2, 32), F32), make_spec(rule))
        np.testing.assert_array_equal(q.dequantize(), 0)
        assert (np.asarray(q.scale.dequantize()) > 0).all()
        for value in (np.nan, np.inf):
            x = np.ones((2, 32), F32)
            x[0, 3] = value
            assert not np.isfinite(np.asarray(quantize(x, make_spec(rule)).dequantize())).any()
        assert np.isfinite(np.asarray(quantize(np.full((1, 16), 3e38, F32), make_spec(rule)).dequantize())).all()


def test_given_range_and_dtypes(rng: np.random.Generator) -> None:
    x = jnp.asarray(draw(rng), jnp.bfloat16)
    q = jq.quantize(x, make_spec(), range=(-4.0, 4.0))
    np.testing.assert_array_equal(np.ravel(q.scale.scale), F32(4) / F32(2688))
    assert (np.asarray(q.scale.codes).astype(F32) == 448).all()
    assert q.dequantize().dtype == jnp.bfloat16


@pytest.mark.parametrize("rule", RULES)
def test_products(rule: str, rng: np.random.Generator) -> None:
    """Weight-only, and of two NVFP4 arrays: exact sums of each block, within a bound of float64."""
    x, w = rng.standard_normal((4, 64)).astype(F32), rng.standard_normal((64, 24)).astype(F32)
    a, b = jq.quantize(x, make_spec(rule)), jq.quantize(w, make_spec(rule, axis=0))
    wide = [np.asarray(v.dequantize(), np.float64) for v in (a, b)]
    for lhs, left in ((x, x.astype(np.float64)), (a, wide[0])):
        y = jax.jit(jq.matmul)(lhs, b)
        assert (np.abs(y - left @ wide[1]) <= 2e-6 * (np.abs(left) @ np.abs(wide[1]))).all()
    lowered = jax.jit(jq.matmul).trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
    assert "block_scaled_dot" in lowered
    assert "tensor<1x4x4xf8E4M3FN>" in lowered


def test_recipe(rng: np.random.Generator) -> None:
    params = {
        "up": jnp.asarray(rng.standard_normal((64, 96)), F32),
        "down": jnp.asarray(rng.standard_normal((96, 8)), F32),
    }
    x = jnp.asarray(rng.standard_normal((5, 64)), F32)

    def network(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ params["up"]) @ params["down"]

    for rule in RULES:
        prepared = jq.prepare(network, params, x, rules=jq.recipes.nvfp4(scale_rule=rule), strict=True)  # type: ignore[arg-type]
        assert prepared.coverage.summary == "2 weight-only"
        assert "float4_e2m1fn Blocked(0, 16)" in str(prepared.coverage)
        q = prepared.convert(params)
        y = jax.jit(prepared.apply)(q, x)
        decoded = {name: q.params[name].dequantize() for name in params}
        np.testing.assert_allclose(y, network(decoded, x), rtol=0, atol=1e-4)
        error = np.asarray(y - network(params, x), np.float64)
        assert np.sum(error**2) < 0.05 * np.sum(np.asarray(network(params, x), np.float64) ** 2)


def test_spec() -> None:
    assert make_spec() == make_spec("modelopt")
    assert repr(make_spec("compressed_tensors")).endswith(
        "scale_rule='compressed_tensors', scale_spec=QuantSpec(float8_e4m3fn, PerTensor(), symmetric=True, "
        "narrow_range=False, scale_dtype=float32))"
    )
    cases = (
        ({"scale_spec": "float8_e4m3fn"}, TypeError, r"scale_spec: expected a QuantSpec or None"),
        (
            {"scale_spec": jq.QuantSpec("int8"), "scale_rule": "modelopt"},
            ValueError,
            "scale_rule: expected None, because",
        ),
        ({"scale_spec": INNER, "scale_dtype": "bfloat16"}, ValueError, r"scale_dtype: expected float32"),
        ({"scale_spec": INNER, "scale_rule": "floor"}, ValueError, r"scale_rule: expected .*modelopt.*got 'floor'"),
        ({"scale_rule": "modelopt"}, ValueError, r"scale_rule: expected .*got 'modelopt'"),
    )
    for options, error, match in cases:
        with pytest.raises(error, match=match):
            jq.QuantSpec("float4_e2m1fn", **options)  # type: ignore[arg-type]


def test_contractions_of_training_refuse_the_spec() -> None:
    x = np.ones((16, 16), F32)
    with pytest.raises(ValueError, match=r"quantized_einsum: .*only jq.quantize quantizes scales"):
        jq.quantized_einsum("ab,bc->ac", x, x, specs=(make_spec(), None))
