"""The programs for CUDA, as far as a machine without a GPU can tell: their operations, and their results on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxquant as jq
from jaxquant._contractions import dot
from jaxquant._kernels import contraction, weight_chunks

OUTPUTS, DEPTH = 128, 512
NUMBERS = (((1,), (0,)), ((), ()))


def lower(function: Callable[..., Any], *arguments: Any) -> str:
    return jax.export.export(jax.jit(function), platforms=["cuda"])(*arguments).mlir_module()


@pytest.mark.parametrize("depth", [1, 5, 31, 33, 64, 100])
@pytest.mark.parametrize("dtypes", [("int8", "int8"), ("uint8", "int8"), ("int8", "int4")])
def test_no_product_of_int8_has_a_depth_that_xla_gets_wrong(depth: int, dtypes: tuple[str, str]) -> None:
    lhs, rhs = (
        jq.QuantizedArray(jnp.ones(shape, dtype), jnp.ones((1, 1), jnp.float32), zero_point)
        for shape, dtype, zero_point in (
            ((6, depth), dtypes[0], jnp.full((1, 1), 3, dtypes[0])), ((depth, 7), dtypes[1], None)
        )
    )  # fmt: skip
    lines = [line for line in lower(jq.matmul, lhs, rhs).splitlines() if "stablehlo.dot_general" in line]
    (line,) = lines
    assert "xi8>" in line
    padded = depth if depth % 4 == 0 else -(-depth // 32) * 32
    assert f"(tensor<6x{padded}xi8>, tensor<{padded}x7xi8>)" in line


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("depth", [1, 7, 33])
def test_padded_products_are_those_of_numpy(depth: int, transposed: bool, rng: np.random.Generator) -> None:
    lhs = rng.integers(-128, 128, (3, 5, depth)).astype(np.int8)
    rhs = rng.integers(-128, 128, (3, depth, 4)).astype(np.int8)
    moved = rhs.swapaxes(1, 2) if transposed else rhs
    y = contraction._multiply_padded(jnp.asarray(lhs), jnp.asarray(moved), transposed)
    np.testing.assert_array_equal(y, lhs.astype(np.int64) @ rhs.astype(np.int64))


def draw_specs(rng: np.random.Generator) -> dict[str, jq.QuantizedArray]:
    """Return weights [DEPTH, OUTPUTS] in each form."""
    w = rng.normal(0, 1, (DEPTH, OUTPUTS)).astype(np.float32)
    w[:, 1] = 0
    specs = {
        "int8": jq.QuantSpec("int8", jq.PerAxis(1)),
        "int8 of a tensor": jq.QuantSpec("int8"),
        "uint8 with zero points": jq.QuantSpec("uint8", jq.PerAxis(1)),
        "int4": jq.QuantSpec("int4", jq.PerAxis(1)),
        "float8": jq.QuantSpec("float8_e4m3fn", jq.PerAxis(1)),
        "int8 in blocks": jq.QuantSpec("int8", jq.Blocked(0, 32)),
        "uint4 in blocks": jq.QuantSpec("uint4", jq.Blocked(0, 64)),
        "uint4 with offsets": jq.QuantSpec("uint4", jq.Blocked(0, 32), offset=True),
        "int4 with a short block": jq.QuantSpec("int4", jq.Blocked(0, 96)),
        "blocks of outputs": jq.QuantSpec("int8", jq.Blocked(1, 32)),
        "scales of rows": jq.QuantSpec("int8", jq.PerAxis(0)),
        "nf4": jq.QuantSpec(jq.nf4, jq.Blocked(0, 64)),
        "int6": jq.QuantSpec("int6", jq.Blocked(0, 16)),
        "int3": jq.QuantSpec("int3", jq.Blocked(0, 32)),
    }
    return {name: jq.quantize(jnp.asarray(w), spec) for name, spec in specs.items()}


FORMS = list(draw_specs(np.random.default_rng(0)))
# Others are held in words anyway, or never.
PACKED = ("int4", "uint4 in blocks", "uint4 with offsets", "nf4")
ORDERS = [(form, order) for form in FORMS for order in ("as it is", "outputs first")]
ORDERS += [(form, f"packed, {order}") for form in PACKED for order in ("as it is", "outputs first")]


def contract_for_cuda(lhs: Any, rhs: Any, monkeypatch: pytest.MonkeyPatch, numbers: Any = NUMBERS) -> jax.Array:
    """Return the float32 product of two arrays in the form for CUDA, computed on a CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(weight_chunks, "contract_weights", lambda config, *operands: config.make_cuda_form()(*operands))
        # Without jit, which would keep this program for other tests.
        contract: Any = dot.contract_dimensions
        return contract.__wrapped__(
            lhs, rhs, None, function="matmul", numbers=numbers, precision="highest", preferred=np.dtype(np.float32),
            out_sharding=None, caller_axes=((1,), (0,)),
        )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize(("form", "order"), ORDERS)
def test_weight_only_products(
    form: str, order: str, rows: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = draw_specs(rng)[form]
    if "outputs first" in order:
        q = q.unpack().store_last(0)
    if "packed" in order:
        q = q.pack()
    values = np.asarray(q.dequantize(), np.float64)
    for dtype, precision in ((jnp.float32, 2.0**-20), (jnp.bfloat16, 2.0**-8)):
        x = jnp.asarray(rng.normal(0, 1, (rows, DEPTH)), dtype)
        for is_left in (False, True):
            operands = (q.T, x.T) if is_left else (x, q)
            y = contract_for_cuda(*operands, monkeypatch)
            wide = np.asarray(x, np.float64)
            want, magnitude = wide @ values, np.abs(wide) @ np.abs(values)
            error = np.abs(np.asarray(y.T if is_left else y, np.float64) - want)
            assert (error <= precision * magnitude).all()


@pytest.mark.parametrize(
    ("shapes", "numbers", "spec"),
    [
        (((3, 128, 128), (128, 128)), (((1, 2), (0, 1)), ((), ())), jq.QuantSpec("int8")),
        (((3, 128, 128), (128, 128)), (((2, 1), (0, 1)), ((), ())), jq.QuantSpec("int8", jq.Blocked(0, 32))),
        (((128, 128), (128, 128)), (((1, 0), (0, 1)), ((), ())), jq.QuantSpec("uint8", jq.PerAxis(0))),
        (((6, 5), (6, 5, 8)), (((0, 1), (0, 1)), ((), ())), jq.QuantSpec("int8", jq.PerAxis(2))),
        (((6, 5), (5, 6, 8)), (((0, 1), (1, 0)), ((), ())), jq.QuantSpec("uint4", jq.Blocked(2, 4))),
        (((4,), (4, 8)), (((0,), (0,)), ((), ())), jq.QuantSpec("int8", jq.PerAxis(0))),
        (((3,), (128, 128)), (((), ()), ((), ())), jq.QuantSpec("int8", jq.PerAxis(0))),
        (((2, 3, 128), (2, 128, 128)), (((2,), (1,)), ((0,), (0,))), jq.QuantSpec("int8", jq.PerAxis(2))),
        (((2, 128, 3), (128, 128)), (((1,), (1,)), ((), ())), jq.QuantSpec("int8", jq.PerAxis(0))),
    ],
)
def test_other_contractions(
    shapes: Any, numbers: Any, spec: jq.QuantSpec, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = jnp.asarray(rng.normal(0, 1, shapes[0]), jnp.float32)
    q = jq.quantize(jnp.asarray(rng.normal(0, 1, shapes[1]), jnp.float32), spec)
    y = contract_for_cuda(x, q, monkeypatch, numbers)
    want = lax.dot_general(x, q.dequantize(), numbers, precision="highest")
    assert y.shape == want.shape
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("form", ["int8", "int4 in blocks", "int6"])
def test_numbers_that_are_not_finite_show(
    form: str, rows: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = {
        "int8": ("int8", jq.PerAxis(1)),
        "int4 in blocks": ("int4", jq.Blocked(0, 32)),
        "int6": ("int6", jq.Blocked(0, 32)),
    }
    w, x = rng.normal(0, 1, (DEPTH, OUTPUTS)), rng.normal(0, 1, (rows, DEPTH))
    w[3, 5], x[-1, 7] = np.nan, np.inf
    q = jq.quantize(jnp.asarray(w, jnp.float32), jq.QuantSpec(*specs[form]))
    y = np.asarray(contract_for_cuda(jnp.asarray(x, jnp.float32), q, monkeypatch))
    assert np.isnan(y[:, 5]).all()
    assert not np.isfinite(y[-1]).any()
    assert np.isfinite(np.delete(y[:-1], 5, 1)).all()


@pytest.mark.parametrize(
    ("codes", "scale", "zero_point", "depth"),
    [
        ("float8_e4m3fn", (1, 2), None, 128),
        ("int8", (1, 4), None, 384),
        ("uint8", (1, 256), (1, 4), 384),
        ("uint8", (1, 4), (1, 8), 384),
        ("uint8", (4, 256), (6, 256), 384),
        ("int8", (3, 4), (1, 1), 384),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_outputs_and_of_several_sizes(
    codes: str, scale: Any, zero_point: Any, depth: int, dtype: str, rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    q = jq.QuantizedArray(
        jnp.asarray(rng.integers(0, 100, (depth, 256)), codes), jnp.asarray(rng.uniform(0.5, 1, scale), jnp.float32),
        None if zero_point is None else jnp.asarray(rng.integers(0, 100, zero_point), codes),
    )  # fmt: skip
    x = jnp.asarray(rng.normal(0, 1, (3, depth)), dtype)
    want = np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64)
    # All branches are traced on every backend.
    for y in (jq.matmul(x, q), contract_for_cuda(x, q, monkeypatch)):
        assert np.abs(np.asarray(y, np.float64) - want).max() < 0.01 * np.abs(want).max()


@pytest.mark.parametrize("spec", [jq.QuantSpec("int8", jq.PerAxis(1)), jq.QuantSpec("int4", jq.Blocked(0, 32))])
def test_mapped_rows_are_rows_of_one_product(spec: jq.QuantSpec) -> None:
    q = jax.eval_shape(lambda w: jq.quantize(w, spec), jnp.ones((256, 128), jnp.float32))
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    mapped = lower(lambda x, q: jax.vmap(jq.matmul, (0, None))(x, q), x, q)
    (line,) = [line for line in mapped.splitlines() if "stablehlo.dot_general" in line]
    assert "tensor<64x256xf32>, tensor<256x128xf32>" in line
