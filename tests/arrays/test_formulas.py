"""Real zero points, inverse scales and the arithmetic of 16 bits: products, gradients, models, joins and refusals.

`test_forms.py` and `test_moved_forms.py` compare their values. Here the oracles are numpy in float64, JAX's derivatives
of the formula, and ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import QuantizedArray, ptq
from jaxquant import onnx as jqonnx

from ..cases.array_forms import check_values, make_array

F32 = np.float32
NAMES = ("real zero point", "inverse scale", "bfloat16", "float16", "inverse nested scale")
BF16, F16 = np.dtype(jnp.bfloat16), np.dtype(np.float16)


def check_product(actual: Any, x: np.ndarray, values: np.ndarray) -> None:
    """Check x @ values within the documented bound, 2e-6 of the sum of magnitudes."""
    wide, weights = x.astype(np.float64), values.astype(np.float64)
    error = np.abs(np.asarray(actual, np.float64) - wide @ weights)
    assert (error <= 2e-6 * (np.abs(wide) @ np.abs(weights))).all()


def make_weights(name: str, rng: np.random.Generator, shape: tuple[int, int], size: int) -> QuantizedArray:
    """Return a matrix whose values differ from those of the usual formula by more than the bound of products."""
    blocks = (shape[0] // size, shape[1])
    codes, scale = rng.integers(0, 16, shape).astype(np.uint8), rng.uniform(0.01, 0.02, blocks).astype(F32)
    shift = rng.uniform(0, 15, blocks).astype(F32)
    parts: dict[str, Any] = {
        "real zero point": {"zero_point": shift}, "inverse scale": {"inverse_scale": True},
        "bfloat16": {"offset": -shift * scale, "arithmetic": BF16},
        "float16": {"zero_point": shift.astype(F16), "arithmetic": F16},
        "inverse nested scale": {"scale": QuantizedArray(np.ones(blocks, np.uint8), scale, inverse_scale=True)},
    }[name]  # fmt: skip
    return QuantizedArray(jnp.asarray(codes).astype("uint4"), **{"scale": scale, **parts}, dtype=F32)


# A few codes are dequantized at once, more in chunks. Other arrays have kernels of their own for few rows.
SHAPES = {"small": (64, 48), "chunks along the sum": (512, 1040), "chunks of columns": (1040, 512)}


@pytest.mark.sample(15)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products_of_floats(name: str, shape: str, rows: int, rng: np.random.Generator) -> None:
    q = make_weights(name, rng, SHAPES[shape], 16)
    q = q.store_last(0) if shape == "chunks of columns" else q
    values = np.asarray(q.dequantize())
    x = rng.normal(size=(rows, q.shape[0])).astype(F32)
    multiply = jax.jit(jq.matmul)
    check_product(multiply(x, q), x, values)
    check_product(multiply(x, q.pack()), x, values)
    check_product(jax.vmap(multiply, (0, None))(x, q), x, values)
    left = jnp.asarray(x).astype(jnp.bfloat16)
    check_product(multiply(left, q), np.asarray(left).astype(F32), values)
    if shape == "small":
        check_product(jq.matmul(q.T, x.T).T, x, values)
        stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), q)
        for y in jax.vmap(jq.matmul, (None, 0))(x, stack):
            check_product(y, x, values)


@pytest.mark.parametrize("name", NAMES)
def test_other_contractions(name: str, rng: np.random.Generator) -> None:
    """einsum, lookups, convolutions and groups of rows."""
    q = make_weights(name, rng, (64, 48), 16)
    values, x = np.asarray(q.dequantize()), rng.normal(size=(5, 64)).astype(F32)
    check_product(jq.einsum("ij,jk->ki", x, q).T, x, values)
    check_values(jq.take(q, np.array([5, -1, 40])), values[[5, -1, 40]])
    image = rng.normal(size=(2, 64, 9)).astype(F32)
    kernel = q.T.reshape(48, 64, 1)
    y = jq.conv_general_dilated(image, kernel, (1,), "VALID")
    check_product(np.moveaxis(np.asarray(y), 1, 2).reshape(-1, 48), np.moveaxis(image, 1, 2).reshape(-1, 64), values)
    groups = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[..., ::-1]]), q)
    y = jax.jit(jq.ragged_dot)(x, groups, jnp.array([2, 3]))
    check_product(y[:2], x[:2], values)
    check_product(y[2:], x[2:], np.asarray(groups[1].dequantize()))


def compute_formula(parts: tuple[Any, ...], codes: Any, *, inverse: bool) -> jax.Array:
    """Return the values without the roundings to 16 bits, through which derivatives pass as if there were none."""
    scale, zero_point, offset = (0 if p is None else jnp.repeat(p, 64 // p.shape[0], 0) for p in parts)
    steps = codes - zero_point
    return (steps / scale if inverse else steps * scale) + offset


@pytest.mark.parametrize("name", NAMES[:4])
def test_gradients(name: str, rng: np.random.Generator) -> None:
    """Of dequantized arrays and of products, with respect to the scale, and to the zero point or the offset."""
    q = jax.tree.map(jnp.asarray, make_weights(name, rng, (64, 48), 16))
    g, x = rng.normal(size=(64, 48)).astype(F32), rng.normal(size=(5, 64)).astype(F32)
    parts = tuple(None if p is None else p.astype(jnp.float32) for p in (q.scale, q.zero_point, q.offset))
    codes = q.codes.astype(jnp.float32)

    def put(parts: tuple[Any, ...]) -> QuantizedArray:
        return q.replace(scale=parts[0], zero_point=parts[1], offset=parts[2])

    calls: tuple[tuple[Callable[[Any], jax.Array], Callable[[Any], jax.Array]], ...] = (
        (lambda parts: (put(parts).dequantize() * g).sum(), lambda values: (values * g).sum()),
        (lambda parts: (jq.matmul(x, put(parts)) ** 2).sum(), lambda values: ((x @ values) ** 2).sum()),
    )
    for compute, expect in calls:
        expected = jax.grad(
            lambda parts, expect=expect: expect(compute_formula(parts, codes, inverse=q.inverse_scale))
        )(parts)
        for grad in (jax.grad(compute), jax.jit(jax.grad(compute))):
            for a, b in zip(jax.tree.leaves(grad(parts)), jax.tree.leaves(expected), strict=True):
                # The values in 16 bits have errors of their own.
                np.testing.assert_allclose(a, b, rtol=0.03, atol=0.03 * float(np.abs(b).max()))


def test_derivatives_of_quotients_on_other_backends() -> None:
    """The correction of a quotient on an accelerator has no derivative, so the division has a rule of its own."""
    q = QuantizedArray(jnp.ones((4, 4), jnp.int8), jnp.full((4, 1), 2.0), inverse_scale=True)
    _, derive = jax.linearize(lambda scale: q.replace(scale=scale).dequantize(), q.scale)
    np.testing.assert_array_equal(derive(jnp.ones((4, 1))), np.full((4, 4), -0.25))
    assert "platform_index" in str(jax.make_jaxpr(QuantizedArray.dequantize)(q))
    assert "cond" not in str(jax.make_jaxpr(derive)(q.scale)), "a branch for another backend is differentiated"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_models(name: str, dtype: str, rng: np.random.Generator) -> None:
    """ONNX Runtime has the same floats in an exported model, of constants and of arguments."""
    q = make_weights(name, rng, (64, 48), 16).astype(dtype)
    q = jax.tree.map(jnp.asarray, q)
    indices = np.array([5, 0, 63], np.int32)

    def look_up(indices: jax.Array) -> jax.Array:
        return jq.take(q, indices).astype(jnp.float32)

    report = jqonnx.verify(jqonnx.export(look_up, [indices]), look_up, [indices], tolerance=0)
    assert report.is_exact, str(report)
    if dtype == "float32":
        x = rng.normal(size=(5, 64)).astype(F32)
        model = jqonnx.export(jq.matmul, [x, q])
        report = jqonnx.verify(model, jq.matmul, [(x, q)], tolerance=1e-5)
        assert report.is_exact, str(report)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_the_arithmetic_is_not_the_dtype(name: str, rng: np.random.Generator) -> None:
    """Another dtype of the result changes its rounding only, and another arithmetic is another array."""
    q, values = make_array(name, rng)
    assert q.arithmetic == name
    with np.errstate(over="ignore"):
        check_values(q.astype("float16").dequantize(), values.astype(F16))
        check_values(q.astype("bfloat16").dequantize(), values.astype(BF16))
    plain = q.replace(arithmetic=None)
    assert plain.arithmetic == F32
    assert jax.tree.structure(plain) == jax.tree.structure(plain.replace(arithmetic="float32"))
    assert (np.asarray(plain.dequantize()) != values).any()


def test_scales_are_rounded_first() -> None:
    """As in MLX: the scale 2**16 is infinite in float16, and 2**-26 is 0."""
    scale = jnp.array([[2.0**16], [2.0**-26]])
    q = QuantizedArray(jnp.array([[0.5, -0.5], [6.0, 4.0]], jnp.float4_e2m1fn), scale.astype(jnp.float8_e8m0fnu))
    y = q.replace(arithmetic="float16", dtype="float16").dequantize()
    np.testing.assert_array_equal(y, np.array([[np.inf, -np.inf], [0, 0]], F16))
    np.testing.assert_array_equal(
        q.astype("float16").dequantize(), [[32768, -32768], [2.0**-23, 2.0**-24]]
    )  # 6 * 2**-26 is a tie


def test_small_floats_with_inverse_scales(rng: np.random.Generator) -> None:
    """Both sides in the NVFP4 of compressed-tensors, whose float8 scales are divided by one float32."""
    sides = []
    for shape in ((5, 64), (48, 64)):
        codes = jnp.asarray(rng.normal(0, 3, shape).astype(F32)).astype(jnp.float4_e2m1fn)
        scale = jnp.asarray(rng.uniform(1, 448, (shape[0], 4)).astype(F32)).astype(jnp.float8_e4m3fn)
        inverse = jnp.full((1, 1), rng.uniform(300, 3000), jnp.float32)
        sides.append(QuantizedArray(codes, QuantizedArray(scale, inverse, inverse_scale=True), dtype=F32))
    x, w = sides
    check_product(jax.jit(jq.matmul)(x, w.T), np.asarray(x.dequantize()), np.asarray(w.dequantize()).T)
    check_product(jq.matmul(np.asarray(x.dequantize()), w.T), np.asarray(x.dequantize()), np.asarray(w.dequantize()).T)


def test_joins(rng: np.random.Generator) -> None:
    """Equal forms are joined, also with an array without a zero point; others are refused by name."""
    arrays = {name: make_array(name, rng)[0] for name in NAMES}
    real, values = make_array("real zero point", rng)
    plain = real.replace(zero_point=None)
    check_values(jq.concatenate([plain, real]).dequantize(), np.concatenate([np.asarray(plain.dequantize()), values]))
    other = real.replace(zero_point=real.zero_point.astype(F32))
    whole = real.replace(zero_point=np.ones((6, 1), np.uint8))
    pairs = [
        (real, other, r"arrays\[1\]\.zero_point: expected float16"),
        (plain, whole, None),
        (whole, real, r"arrays\[1\]\.zero_point: expected uint8, as in arrays\[0\]"),
        (plain, arrays["inverse scale"], r"arrays\[1\]\.inverse_scale: expected False, as in arrays\[0\]"),
        (
            arrays["bfloat16"],
            arrays["bfloat16"].replace(arithmetic=None),
            r"arrays\[1\]\.arithmetic: expected bfloat16",
        ),
        (arrays["inverse nested scale"], make_array("nested scale", rng)[0], r"arrays\[1\]\.scale: expected"),
    ]
    for a, b, text in pairs:
        if text is None:
            assert jq.concatenate([a, b]).zero_point.dtype == np.uint8
            continue
        with pytest.raises((TypeError, ValueError), match=rf"jaxquant\.concatenate: {text}"):
            jq.concatenate([a, b])


ONES = np.ones((6, 2), F32)
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "zero point of a float": ({"codes": jnp.ones((6, 22), jnp.float8_e4m3fn), "zero_point": ONES},
                              "zero_point: expected None, because float8_e4m3fn has no zero point"),
    "zero point of a codebook": ({"codes": jnp.ones((6, 22), jnp.uint4), "codebook": jq.nf4, "zero_point": ONES},
                                 "zero_point: expected None, because nf4 has no zero point"),
    "zero point and offset": ({"zero_point": ONES, "offset": ONES}, "offset: expected None, because the array has a"),
    "dtype": ({"zero_point": ONES.astype(np.int32)},
              "zero_point: expected dtype uint8, the dtype of the codes, or float32"),
    "shape": ({"zero_point": np.ones((6, 5), F32)}, "zero_point: expected the rank of the codes"),
    "flag": ({"inverse_scale": "no"}, "inverse_scale: expected"),
    "arithmetic": ({"arithmetic": "int8"}, "arithmetic: expected dtype float32, float16 or bfloat16, got int8"),
    "negative scale": ({"scale": -ONES, "inverse_scale": True}, "scale: expected positive numbers, got -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    changes, text = REFUSALS[name]
    parts: dict[str, Any] = {"codes": np.ones((6, 22), np.uint8), "scale": ONES, **changes}
    q = QuantizedArray(parts.pop("codes"), parts.pop("scale"), **parts)
    with pytest.raises((TypeError, ValueError), match=rf"jaxquant\.QuantizedArray\.dequantize: self\.{text}"):
        q.dequantize()


def test_no_dtype() -> None:
    with pytest.raises(TypeError, match=r"jaxquant\.QuantizedArray: arithmetic: expected dtype float32"):
        QuantizedArray(np.ones((6, 22), np.uint8), ONES, arithmetic="float13")


def make_functions(q: QuantizedArray) -> dict[str, Callable[[], Any]]:
    """Return calls of what reads codes without dequantizing them, or writes arrays in another form."""
    codes = jq.quantize(np.eye(6, dtype=F32), jq.QuantSpec("int8"))
    spec = jq.QuantSpec("uint8", jq.Blocked(-1, 4))
    w = jnp.ones((6, 4))
    return {
        "matmul": lambda: jq.matmul(codes, q),
        "dot_general": lambda: jq.dot_general(codes, q, (((1,), (0,)), ((), ()))),
        "einsum": lambda: jq.einsum("ij,jk", codes, q),
        "ragged_dot": lambda: jq.ragged_dot(codes, jax.tree.map(lambda leaf: jnp.stack([leaf]), q), jnp.array([6])),
        "conv_general_dilated": lambda: jq.conv_general_dilated(
            jq.quantize(jnp.ones((1, 4, 9)), jq.QuantSpec("int8")), q.reshape(6, 4, 1), (1,), "VALID"
        ),
        "matmul, output": lambda: jq.matmul(codes, codes, output=q), "onnx_view": lambda: jq.onnx_view(q),
        "codes.relu": lambda: jq.codes.relu(q), "codes.max_pool": lambda: jq.codes.max_pool(q, window_shape=(1,)),
        "codes.pad": lambda: jq.codes.pad(q, 1), "codes.add": lambda: jq.codes.add(q, q, output=q),
        "codes.multiply": lambda: jq.codes.multiply(q, q, output=q), "codes.mean": lambda: jq.codes.mean(q, output=q),
        "codes.average_pool": lambda: jq.codes.average_pool(q, window_shape=(1,), output=q),
        "quantization_error": lambda: jq.quantization_error(w, q),
        "ptq.gptq": lambda: ptq.gptq(w, jnp.eye(6), spec, grid=q),
    }  # fmt: skip


FUNCTIONS = tuple(make_functions(QuantizedArray(np.ones((6, 22), np.uint8), ONES)))


@pytest.mark.parametrize("name", NAMES[:4])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_refuse(name: str, function: str, rng: np.random.Generator) -> None:
    """They would compute with another formula."""
    parts: dict[str, Any] = {
        "real zero point": {"zero_point": np.ones((1, 1), F32)}, "inverse scale": {"inverse_scale": True},
        "bfloat16": {"arithmetic": BF16}, "float16": {"arithmetic": F16, "zero_point": np.ones((1, 1), np.uint8)},
    }[name]  # fmt: skip
    q = QuantizedArray(rng.integers(0, 9, (6, 4)).astype(np.uint8), ONES[:1, :1], **parts)
    field = {"real zero point": "zero_point", "inverse scale": "inverse_scale"}.get(name, "arithmetic")
    q = jax.tree.map(jnp.asarray, q)
    public = function.partition(",")[0]
    with pytest.raises(
        ValueError, match=rf"jaxquant\.{public}: [a-z_]+(\[1\])?\.{field}: expected .*because it supports"
    ):
        make_functions(q)[function]()


def test_tuning_leaves_codes_alone(rng: np.random.Generator) -> None:
    """Learned codes are those of the usual formula."""
    w = rng.normal(size=(16, 8)).astype(F32)
    q = jq.quantize(w, jq.QuantSpec("int8", jq.PerAxis(1)))
    params = {"w": q.replace(scale=1 / q.scale, inverse_scale=True)}
    x = rng.normal(size=(32, 16)).astype(F32)
    rules = jq.recipes.weight_only_int8()
    prepared = jq.prepare(lambda params, x: x @ params["w"], params, x, rules=rules)
    y = prepared.apply(prepared.convert(params), x)
    check_product(y, x, np.asarray(params["w"].dequantize()))
    quantized = jq.prepare(lambda params, x: x @ params["w"], params, x, rules=jq.recipes.w8a8_dynamic())
    converted = quantized.convert(params)
    with pytest.raises(ValueError, match=r"rhs\.inverse_scale: expected False"):
        quantized.apply(converted, x)
