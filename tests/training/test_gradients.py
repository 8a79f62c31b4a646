"""The backward rules against an oracle written apart, at ties and at bounds; and torch's masks where torch is."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..oracles import onnx_text
from ..support import inputs

SHAPE = (6, 10, 14)
LAYOUTS = {
    "per-tensor": ((), 1, 0),
    "one element": ((1,), 1, 0),
    "per-axis 1": ((10,), 1, 0),
    "per-axis -1": ((14,), -1, 0),
    "blocked": ((6, 10, 3), 2, 5),
}


def draw_inputs(rng: np.random.Generator, layout: str, name: str) -> tuple[np.ndarray, ...]:
    shape, axis, block = LAYOUTS[layout]
    scale, point = inputs.scales(rng, shape, np.dtype(np.float32)), inputs.zero_points(rng, shape, name)
    wide, steps = (onnx_text.expand(p, SHAPE, axis, block) for p in (scale, point))
    x = inputs.near_ties(rng, wide, steps.astype(np.int64), onnx_text.BOUNDS[name], np.dtype(np.float32))
    return np.where(np.abs(x) < 1e30, x, np.float32(0)), scale, point, rng.normal(size=SHAPE).astype(np.float32)


def close(actual: Any, expected: np.ndarray, terms: np.ndarray) -> None:
    """Equal up to the order of a float32 sum: 16 times eps / 2 times the sum of the magnitudes."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=float(np.abs(terms).sum() * 2.0**-20) + 1e-30)


@pytest.mark.sample(2)
@pytest.mark.parametrize("learned", [False, True], ids=["integer zero point", "float zero point"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("name", ["int8", "uint8", "int4", "uint2", "int16"])
def test_cotangents_of_fake_quantize(rng: np.random.Generator, name: str, layout: str, learned: bool) -> None:
    x, scale, point, g = draw_inputs(rng, layout, name)
    _, axis, block = LAYOUTS[layout]
    # A learned zero point rounds half to even and is cut to the dtype's bounds on its way in.
    float_point = np.asarray(
        point.astype(np.float32) + rng.choice([-0.5, -0.3, 0.0, 0.3, 0.5], point.shape), np.float32
    )
    code_point = np.clip(np.rint(float_point), *onnx_text.BOUNDS[name]).astype(point.dtype) if learned else point

    @functools.partial(jax.jit, static_argnames="coeff")
    def pull(x, scale, point, g, coeff):
        fake = functools.partial(
            jq.fake_quantize_linear, dtype=onnx_text.dtype(name), axis=axis, block_size=block, lda_coeff=coeff
        )
        y, vjp = jax.vjp(fake, x, scale, point)
        return y, vjp(g)

    zero_point = float_point if learned else point
    y, (dx, ds, dz) = pull(x, scale, zero_point, g, 1.0)
    codes = onnx_text.quantize_linear(x, scale, code_point, name, axis=axis, block=block)
    np.testing.assert_array_equal(y, onnx_text.dequantize_linear(codes, scale, code_point, axis=axis, block=block))
    bounds = onnx_text.BOUNDS[name]
    want_x, terms_s, terms_z = onnx_text.fake_quantize_gradients(
        x, scale, code_point, g, bounds, axis=axis, block=block
    )
    np.testing.assert_array_equal(dx, want_x.astype(np.float32))
    assert ds.shape == scale.shape
    close(ds, onnx_text.collapse(terms_s, scale.shape, axis, block), terms_s)
    if learned:
        assert dz.shape == point.shape
        close(dz, onnx_text.collapse(terms_z, point.shape, axis, block), terms_z)
    else:
        assert dz.dtype == jax.dtypes.float0
    half_dx, half_ds, _ = pull(x, scale, zero_point, g, -0.5)[1]
    np.testing.assert_array_equal(half_dx, -0.5 * dx)
    np.testing.assert_array_equal(half_ds, ds)


@pytest.mark.slow
def test_vectors_of_the_consistent_rule() -> None:
    """x, y, dx, dscale, dzero_point for scale 0.5, zero point 3, codes 0 to 15: ties and bounds by hand."""
    table = [
        (-2.0, -1.5, 0, -3, -0.5),
        (-1.75, -1.5, 0, -3, -0.5),  # u = -3.5 ties to -4: code -1, out
        (-1.5, -1.5, 1, 0, 0),
        (-1.25, -1.0, 1, 0.5, 0),
        (0.25, 0.0, 1, -0.5, 0),
        (0.3, 0.5, 1, 0.4, 0),
        (6.25, 6.0, 1, -0.5, 0),  # u = 12.5 ties to 12: code 15, in
        (6.26, 6.0, 0, 12, -0.5),
        (100.0, 6.0, 0, 12, -0.5),
    ]
    fake = functools.partial(jq.fake_quantize_linear, dtype=jnp.uint4)
    rule = jax.vmap(jax.value_and_grad(fake, (0, 1, 2)), in_axes=(0, None, None))
    x = jnp.array([row[0] for row in table])
    y, grads = rule(x, jnp.float32(0.5), jnp.float32(3))
    np.testing.assert_allclose(np.stack([y, *grads], 1), [row[1:] for row in table], atol=1e-6)


@pytest.mark.slow
def test_infinities_and_nan_on_the_way_back() -> None:
    x = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1.0])
    y, vjp = jax.vjp(lambda x, s: jq.fake_quantize_linear(x, s, dtype=jnp.int8), x, jnp.float32(0.5))
    np.testing.assert_array_equal(y, [63.5, -64, -64, 1])
    dx, ds = vjp(jnp.ones(4))
    np.testing.assert_array_equal(dx, [0, 0, 0, 1])
    assert ds == 127 - 128 - 128


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_stays_half(rng: np.random.Generator, dtype: Any) -> None:
    x = jnp.asarray(rng.normal(size=(5, 8)), dtype)
    scale = jnp.full(8, 0.05, dtype)
    y, vjp = jax.vjp(functools.partial(jq.fake_quantize_linear, dtype=jnp.int8), x, scale)
    dx, ds = vjp(jnp.ones_like(y))[:2]
    assert y.dtype == dx.dtype == ds.dtype == dtype
    pair = jq.dequantize_linear(jq.quantize_linear(x, scale, output_dtype=jnp.int8), scale, output_dtype=dtype)
    np.testing.assert_array_equal(y, pair)


@pytest.mark.parametrize("name", [*onnx_text.FLOAT8, "float4_e2m1fn"])
def test_small_floats_are_differentiable(name: str) -> None:
    largest = float(jnp.finfo(onnx_text.dtype(name)).max)
    x = jnp.array([1.1, -0.7, 0.9 * largest, 2 * largest, -2 * largest, jnp.inf, jnp.nan])
    y, vjp = jax.vjp(lambda x: jq.fake_quantize_linear(x, 1.0, dtype=onnx_text.dtype(name)), x)
    codes = jq.quantize_linear(x, 1.0, output_dtype=onnx_text.dtype(name))
    np.testing.assert_array_equal(y, jq.dequantize_linear(codes, 1.0))
    np.testing.assert_array_equal(vjp(jnp.ones(7))[0], [1, 1, 1, 0, 0, 0, 0])


@pytest.mark.parametrize("axis", [None, 0, -1])
@pytest.mark.parametrize("name", ["uint8", "int8"])
def test_gradient_of_a_dynamic_scale(rng: np.random.Generator, name: str, axis: int | None) -> None:
    x = rng.integers(-4, 5, (5, 7)).astype(np.float32)  # many equal extremes
    x[0], x[1] = np.abs(x[0]), -np.abs(x[1])
    steps = 255 if name == "uint8" else 254
    g = rng.normal(size=() if axis is None else (x.shape[axis],)).astype(np.float32)

    def scale(x: jax.Array, coeff: float = 1.0) -> jax.Array:
        return jq.dynamic_quantize_linear(x, dtype=name, axis=axis, lda_coeff=coeff).y_scale

    (dx,) = jax.vjp(scale, x)[1](jnp.asarray(g))
    want = np.zeros(x.shape)
    slices = [(slice(None), slice(None))] if axis is None else [
        tuple(i if a == axis % 2 else slice(None) for a in range(2)) for i in range(x.shape[axis])
    ]  # fmt: skip
    for where, weight in zip(slices, np.atleast_1d(g), strict=True):
        part = x[where]
        upper, lower = (part == part.max()) * (part.max() > 0), (part == part.min()) * (part.min() < 0)
        want[where] = weight / steps * (upper / max(upper.sum(), 1) - lower / max(lower.sum(), 1))
    np.testing.assert_allclose(dx, want, rtol=1e-6, atol=1e-9)
    (twice,) = jax.vjp(functools.partial(scale, coeff=2.0), x)[1](jnp.asarray(g))
    np.testing.assert_allclose(twice, 2 * want, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_dynamic_scale_gradient_by_differences(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.uniform(-1, 1, 40), jnp.float32).at[3].set(2.0).at[5].set(-3.0)
    gradient = jax.grad(lambda x: jq.dynamic_quantize_linear(x).y_scale)(x)
    for i in (int(x.argmax()), int(x.argmin()), 7):
        moved = [float(jq.dynamic_quantize_linear(x.at[i].add(h)).y_scale) for h in (0.05, -0.05)]
        assert abs((moved[0] - moved[1]) / 0.1 - float(gradient[i])) < 1e-5


@pytest.mark.slow
def test_zero_range_and_nan_of_the_dynamic_scale() -> None:
    zero = jax.grad(lambda x: jq.dynamic_quantize_linear(x).y_scale)(jnp.zeros(3))
    np.testing.assert_array_equal(zero, np.zeros(3))
    bad = jax.grad(lambda x: jq.dynamic_quantize_linear(x).y_scale)(jnp.array([1.0, jnp.nan]))
    assert np.isnan(bad).all()


@pytest.mark.slow
def test_dynamic_fake_quantize_is_straight_through(rng: np.random.Generator) -> None:
    x, g = (rng.normal(size=(30, 40)).astype(np.float32) for _ in range(2))
    for name, axis in (("uint8", None), ("int8", 0)):
        y, scale, point = jq.dynamic_quantize_linear(x, dtype=name, axis=axis)
        fake = functools.partial(jq.dynamic_fake_quantize_linear, dtype=name, axis=axis, lda_coeff=0.25)
        out, vjp = jax.vjp(fake, x)
        np.testing.assert_array_equal(out, jq.dequantize_linear(y, scale, point, axis=axis or 0))
        bounds = (0, 255) if name == "uint8" else (-127, 127)
        want, _, _ = onnx_text.fake_quantize_gradients(
            x, np.asarray(scale), np.asarray(point), g, bounds, axis=axis or 0
        )
        np.testing.assert_array_equal(vjp(g)[0], np.float32(0.25) * want.astype(np.float32))


def test_dequantize_gradients(rng: np.random.Generator) -> None:
    codes = rng.integers(-128, 128, SHAPE).astype(np.int8)
    scale, point = rng.random(10).astype(np.float32), rng.integers(-128, 128, 10).astype(np.int8)
    g = rng.normal(size=SHAPE).astype(np.float32)
    ds = jax.vjp(lambda s: jq.dequantize_linear(codes, s, point), scale)[1](g)[0]
    terms = g.astype(np.float64) * (codes.astype(np.int64) - point.reshape(1, 10, 1))
    close(ds, terms.sum((0, 2)), terms)
    x8 = jnp.asarray([1.0, -2.0], jnp.float8_e4m3fn)
    dx = jax.vjp(lambda x: jq.dequantize_linear(x, 0.5), x8)[1](jnp.ones(2))[0]
    np.testing.assert_array_equal(dx.astype(jnp.float32), [0.5, 0.5])
    onednn = jax.vjp(lambda s: jq.onednn.dequantize(codes, s, point, qtype="per_channel"), scale)[1](g)[0]
    close(onednn, terms.sum((0, 2)), terms)
    _, tangent = jax.jvp(lambda s: jq.dequantize_linear(codes, s, point), (scale,), (jnp.ones(10),))
    np.testing.assert_array_equal(tangent, codes.astype(np.float32) - point.reshape(1, 10, 1))


def test_codes_carry_no_gradient() -> None:
    x = jnp.array([0.3, 0.6])
    for op in (
        lambda x: jq.quantize_linear(x, 0.5, output_dtype=jnp.float8_e4m3fn),
        lambda x: jq.onednn.quantize(x, 0.5, dtype=jnp.float8_e5m2),
        lambda x: jq.quantize_linear(x, 0.5),
    ):
        np.testing.assert_array_equal(jax.grad(lambda x, op=op: op(x).astype(jnp.float32).sum())(x), [0, 0])


@pytest.mark.parametrize(
    "op",
    [
        lambda x: jq.dynamic_quantize_linear(x, training=False).y_scale,
        lambda x: jq.fake_quantize_linear(x, 0.5, training=False).sum(),
        lambda x: jq.dynamic_fake_quantize_linear(x, training=False).sum(),
    ],
    ids=["dynamic_quantize_linear", "fake_quantize_linear", "dynamic_fake_quantize_linear"],
)
def test_training_false_refuses_to_be_differentiated(op: Any) -> None:
    x = jnp.array([-1.0, 2.0])
    assert np.isfinite(op(x))
    assert np.isfinite(jax.jit(op)(x))
    for call in (lambda: jax.grad(op)(x), lambda: jax.jit(jax.grad(op))(x)):
        with pytest.raises(ValueError, match=r"jaxquant\.\w+: training: expected True if the call is differentiated"):
            call()
    # A constant under differentiation by something else is not differentiated.
    assert jax.grad(lambda w: op(x) * w)(2.0) == op(x)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: jq.dynamic_quantize_linear(x, name="a_name_of_mine"),
        lambda x: jq.fake_quantize_linear(x, 0.5, name="a_name_of_mine"),
        lambda x: jq.dynamic_fake_quantize_linear(x, name="a_name_of_mine"),
    ],
)
def test_name_is_in_the_lowered_program(op: Any) -> None:
    lowered = jax.jit(op).lower(jnp.ones(4))
    assert "a_name_of_mine" in lowered.as_text(debug_info=True)


@pytest.mark.slow
def test_masks_of_torch(fixed_rng: np.random.Generator) -> None:
    """torch multiplies by a reciprocal: its masks agree wherever both quotients round alike."""
    torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
    for name in ("int8", "uint8", "uint4"):
        low, high = onnx_text.BOUNDS[name]
        x, scale, point, g = draw_inputs(fixed_rng, "per-tensor", name)
        leaf = torch.tensor(x, requires_grad=True)
        torch.fake_quantize_per_tensor_affine(leaf, float(scale), int(point), low, high).backward(torch.tensor(g))
        dx = jax.vjp(lambda x, p=point, s=scale, n=name: jq.fake_quantize_linear(x, s, p, dtype=n), x)[1](g)[0]
        alike = np.rint(x / scale) == np.rint(x * (np.float32(1) / scale))
        assert alike.mean() > 0.5
        np.testing.assert_array_equal(np.asarray(dx)[alike], leaf.grad.numpy()[alike])
