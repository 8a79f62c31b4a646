"""With jax_enable_x64, equal float32 inputs give the same bits and dtypes, and float64 inputs raise an error.

The flag changes JAX's default dtypes of loop counters, indices, sums of integers and Python numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxquant as jq
from jaxquant.flax import Learned, Observed
from jaxquant.flax import linen as qnn
from jaxquant.flax import nnx as qnnx

F32 = np.float32
DRAWN = np.random.default_rng(0)
X = DRAWN.normal(size=(6, 10)).astype(F32)
W = DRAWN.normal(size=(10, 4)).astype(F32)
LONG = DRAWN.normal(size=(3, 20_001)).astype(F32)  # more than one chunk of a histogram
IMAGES = DRAWN.normal(size=(2, 3, 6, 6)).astype(F32)
FILTERS = DRAWN.normal(size=(4, 3, 3, 3)).astype(F32)
CODES = DRAWN.integers(-128, 128, (6, 10)).astype(np.int8)
WEIGHTS = DRAWN.integers(-128, 128, (10, 4)).astype(np.int8)
SHORT = DRAWN.normal(size=(3, 16)).astype(F32)
NIBBLES = DRAWN.integers(0, 256, (4, 1, 8)).astype(np.uint8)
I8, U8 = jq.QuantSpec("int8"), jq.QuantSpec("uint8")
ROWS = jq.QuantSpec("uint8", jq.PerAxis(0))
BLOCKS = jq.QuantSpec("int4", jq.Blocked(0, 5))
MATRIX = (((1,), (0,)), ((), ()))


def calibrated(factory: Callable[..., jq.calibration.Calibrator], spec: jq.QuantSpec) -> Any:
    """Return a merged state of an eager batch and two scanned ones, its sum over a mapped axis, and its range."""
    cal = factory(spec)
    state = cal.update(cal.init(LONG), LONG)
    scanned, _ = jax.lax.scan(lambda s, x: (cal.update(s, x), None), state, np.stack([LONG, 3 * LONG]))
    both = cal.merge(state, scanned)
    summed = jax.vmap(lambda s: cal.all_reduce(s, "d"), axis_name="d")(jax.tree.map(lambda v: jnp.stack([v, v]), both))
    return both, summed, cal.finalize(both)


def quantized() -> Any:
    found = [jq.quantize(W, spec) for spec in (I8, U8, BLOCKS, jq.QuantSpec(jq.nf4), jq.QuantSpec("float4_e2m1fn"))]
    return found, [q.dequantize() for q in found], [jq.quantization_error(W, q) for q in found]


def contracted() -> Any:
    x, w = jq.quantize(X, U8), jq.quantize(W, I8)
    einsum = jq.einsum("ij,jk->ki", x, w)
    images, filters = jq.quantize(IMAGES, U8), jq.quantize(FILTERS, I8)
    convolved = jq.conv_general_dilated(images, filters, (1, 1), "SAME")
    rows = jq.take(jq.quantize(W, BLOCKS), np.array([3, 0, 9]), axis=0)
    return jq.matmul(x, w), jq.matmul(X, jq.quantize(W, BLOCKS)), einsum, convolved, rows


def operators() -> Any:
    scale, point = F32(0.05), np.uint8(3)
    dynamic = jq.dynamic_quantize_linear(X)
    codes = jq.quantize_linear(X, scale, point)
    return (
        dynamic, codes, jq.dequantize_linear(codes, scale, point),
        jq.matmul_integer(codes, WEIGHTS, point), jq.ops.dynamic_quantize_matmul(X, WEIGHTS, scale),
        jq.ops.matmul_integer_to_float(codes, WEIGHTS, scale, scale, point),
        jq.qlinear_matmul(codes, scale, point, WEIGHTS, scale, np.int8(1), scale, point),
        jq.ops.matmul_nbits(SHORT, NIBBLES, np.ones((4, 1), F32), K=16, N=4, block_size=16),
        jq.onednn.quantize(X, np.full(1, scale), np.full(1, 3)), jq.integer.dot_general(CODES, WEIGHTS, MATRIX),
    )  # fmt: skip


def on_codes() -> Any:
    scale, point, codes = F32(0.05), np.int8(3), CODES
    one, images = (scale, point, F32(0.04), point), IMAGES.astype(np.int8)
    two = (codes, scale, point, codes[:1], F32(1e-5), point, scale, point)
    return (
        jq.ops.qlinear_add(*two), jq.ops.qlinear_mul(*two), jq.ops.qlinear_where(codes > 0, *two),
        jq.ops.qlinear_concat(scale, point, *two[:6], axis=0), jq.ops.qlinear_sigmoid(codes, *one),
        jq.ops.qlinear_leaky_relu(codes, *one), jq.ops.qlinear_softmax(codes, *one),
        jq.ops.qlinear_reduce_mean(codes, *one),
        jq.ops.qlinear_average_pool(images, *one, kernel_shape=(2, 2)),
        jq.ops.qlinear_global_average_pool(images, *one),
        jq.ops.qlinear_average_pool(np.tile(images, (1, 1, 2, 2)), *one, kernel_shape=(9, 8)),
    )  # fmt: skip


RULES = {
    "straight": jq.StraightThrough(),
    "lsq": jq.LSQ(),
    "lsq+": jq.LSQPlus(),
    "draws": jq.StochasticRounding(jax.random.key(0)),
}


def pulled() -> Any:
    """Return the values and cotangents of all rules, and of a contraction with each backward pass."""
    found = {}
    for name, rule in RULES.items():
        call = functools.partial(jq.fake_quantize, spec=ROWS, gradient=rule)
        y, back = jax.vjp(lambda x, s, z, call=call: call(x, scale=s, zero_point=z), X, np.full((6, 1), F32(0.02)),
                          np.full((6, 1), F32(7)))  # fmt: skip
        found[name] = (y, back(jnp.ones_like(y)))
    for backward in (jq.FloatBackward(), jq.Int8Backward(), jq.Int8Backward(stochastic_rounding=True)):
        call = functools.partial(jq.quantized_dot_general, dimension_numbers=MATRIX, lhs_spec=I8, rhs_spec=I8,
                                 backward=backward, key=jax.random.key(1))  # fmt: skip
        y, back = jax.vjp(call, X, W)
        found[repr(backward)] = (y, back(jnp.ones_like(y)))
    return found, [rule.initial(jnp.asarray(X), ROWS) for rule in (jq.LSQ(), jq.LSQPlus(), jq.PACT())]


CALLS: dict[str, Callable[[], Any]] = {
    "minmax": functools.partial(calibrated, jq.calibration.minmax, ROWS),
    "moving_average": functools.partial(calibrated, jq.calibration.moving_average, ROWS),
    "percentile": functools.partial(calibrated, functools.partial(jq.calibration.percentile, q=99.0, bins=64), ROWS),
    "mse": functools.partial(calibrated, functools.partial(jq.calibration.mse, bins=64, grid=8), ROWS),
    "entropy": functools.partial(calibrated, functools.partial(jq.calibration.entropy, bins=64), jq.QuantSpec("int4")),
    "quantized": quantized,
    "contracted": contracted,
    "operators": operators,
    "on codes": on_codes,
    "pulled": pulled,
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(CALLS))
def test_same_bits_and_dtypes(name: str) -> None:
    with jax.enable_x64(False):
        want = CALLS[name]()
    with jax.enable_x64(True):
        got = CALLS[name]()
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    "source", [Observed(jq.calibration.mse), Observed(), Learned(jq.LSQPlus())], ids=["mse", "average", "lsq+"]
)
def test_layers_train_and_serve(source: Any) -> None:
    with jax.enable_x64(True):
        options: dict[str, Any] = {"weight_spec": I8, "activation_spec": U8, "activation_range": source}
        layer: nn.Module = qnn.Dense(4, **options)
        variables = layer.init(jax.random.key(0), X)
        y, moved = layer.apply(variables, X, mutable=["ranges", "scales"])
        assert y.dtype == jnp.float32
        assert {leaf.dtype.itemsize for leaf in jax.tree.leaves({**variables, **moved})} <= {4}
        own = qnnx.Linear(10, 4, **options, rngs=nnx.Rngs(0))
        if isinstance(source, Learned):
            qnnx.start(own, X)
        assert own(jnp.asarray(X)).dtype == jnp.float32


def test_float64_is_refused() -> None:
    with jax.enable_x64(True):
        wide = jnp.asarray(X.astype(np.float64))
        assert wide.dtype == jnp.float64
        cal = jq.calibration.percentile(I8, 99)
        for call in (
            lambda: jq.quantize(wide, I8),
            lambda: jq.quantize_linear(wide, F32(1), np.uint8(0)),
            lambda: jq.dynamic_quantize_linear(wide),
            lambda: jq.fake_quantize(wide, I8),
            lambda: cal.update(cal.init(wide), wide),
            lambda: jq.matmul(wide, jq.quantize(W, I8)),
        ):
            with pytest.raises(TypeError, match=r"expected .*float32.*, got .*float64"):
                call()
