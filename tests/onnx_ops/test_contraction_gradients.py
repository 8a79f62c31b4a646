"""The backward rules of the float contractions against float64 formulas, and that integers stay out of the way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxquant as jq

from ..oracles import contraction_text, gradient_formulas, onnx_text
from ..support import transforms
from ..support.matrix import mark_others_full

Array = np.ndarray


def close(actual: Any, expected: Array, digits: float = 2e-6, *, sizes: Array | None = None) -> None:
    """Equal up to the order and the precision of the sums, in the shape of what is differentiated.

    `sizes` are the sums of the magnitudes of what is added up; without them it may not cancel by much.
    """
    assert actual.shape == expected.shape
    if sizes is not None:
        excess = np.abs(np.asarray(actual, np.float64) - expected) - digits * sizes
        assert (excess <= 0).all(), f"got {actual}, want {expected}, of magnitudes {sizes}"
        return
    bound = digits * max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=10 * digits, atol=bound)


# a, b, b_scale, b_zero_point (None: absent), bias
SHAPES: dict[str, tuple[Any, ...]] = {
    "per tensor": ((4, 12), (12, 5), (), None, False),
    "one element": ((4, 12), (12, 5), (1,), (1,), True),
    "columns": ((4, 12), (12, 5), (5,), (5,), True),
    "kept columns": ((4, 12), (12, 5), (1, 5), (1, 5), False),
    "a column": ((4, 12), (12, 1), (1,), (), True),
    "blocks": ((4, 12), (12, 5), (3, 5), (3, 5), True),
    "blocks, one zero point": ((4, 12), (12, 5), (4, 5), (), False),
    "blocks, no zero point": ((4, 12), (12, 5), (12, 5), None, False),
    "row": ((1, 12), (12, 5), (5,), (5,), True),
    "vector": ((12,), (12, 5), (5,), (5,), True),
    "vector, blocks": ((12,), (12, 5), (3, 5), (3, 5), True),
    "two vectors": ((12,), (12,), (), (), False),
    "by a vector": ((4, 12), (12,), (), (), False),
    "batched a": ((2, 3, 4, 12), (12, 5), (5,), (5,), True),
    "batched a, blocks": ((3, 4, 12), (12, 5), (2, 5), (2, 5), True),
    "batched both": ((3, 4, 12), (3, 12, 5), (3, 1, 5), (5,), True),
    "batched both, columns": ((3, 4, 12), (3, 12, 5), (5,), (3, 1, 1), True),
    "broadcast batches": ((3, 1, 4, 12), (2, 12, 5), (2, 1, 5), (), True),
    "more batch in b": ((4, 12), (3, 12, 5), (3, 1, 1), None, False),
    "a vector by a batch": ((12,), (3, 12, 5), (3, 1, 5), None, True),
}


def draw_weights(rng: np.random.Generator, layout: str, signed: bool) -> tuple[Array, ...]:
    """b, b_scale, b_zero_point and bias of a layout."""
    _, b_shape, scale_shape, point_shape, biased = SHAPES[layout]
    low, high, name = (-128, 128, "int8") if signed else (0, 256, "uint8")
    b = rng.integers(low, high, b_shape).astype(name)
    scale = np.asarray(np.exp(rng.uniform(-3, 0, scale_shape)), np.float32)
    point = None if point_shape is None else np.asarray(rng.integers(low, high, point_shape)).astype(name)
    bias = rng.normal(size=b_shape[-1]).astype(np.float32) if biased else None
    return b, scale, point, bias  # type: ignore[return-value]


def find_gradients(op: Callable[..., Any], arguments: dict[str, Any], rng: np.random.Generator, g: Any = None) -> Any:
    """The cotangent that is sent back, drawn if it is not given, and what it comes to at every argument."""

    @jax.jit
    def pull(operands: dict[str, Any], g: Any) -> Any:
        y, vjp = jax.vjp(lambda operands: op(**operands), operands)
        return y, vjp(g)[0]

    operands = {n: v for n, v in arguments.items() if v is not None}
    y = op(**operands)
    g = np.asarray(rng.normal(size=y.shape), y.dtype) if g is None else g
    repeated, gradients = pull(operands, g)
    assert transforms.mismatches(repeated, y) == 0, "a forward pass under differentiation gives other bits"
    for name, value in operands.items():
        if np.asarray(value).dtype.kind in "iu":
            assert gradients[name].dtype == jax.dtypes.float0
        else:
            assert gradients[name].dtype == np.asarray(value).dtype
    return g, gradients


def as_matrices(a: Array, b: Array, g: Array) -> tuple[Array, Array, Array]:
    """Operands of numpy.matmul and a cotangent of its result in float64, with the dimensions that vectors lack."""
    g = g.astype(np.float64)
    if b.ndim == 1:
        g = g[..., None]
    if a.ndim == 1:
        g = g[..., None, :]
    return np.atleast_2d(a), b[:, None] if b.ndim == 1 else b, g


@pytest.mark.sample(1)
@pytest.mark.parametrize(("layout", "signed"), [(name, i % 2 == 0) for i, name in enumerate(SHAPES)])
def test_dynamic_quantize_matmul(rng: np.random.Generator, layout: str, signed: bool) -> None:
    a = rng.normal(size=SHAPES[layout][0]).astype(np.float32)
    b, b_scale, point, bias = draw_weights(rng, layout, signed)
    arguments = {"a": a, "b": b, "b_scale": b_scale, "b_zero_point": point, "bias": bias}
    g, gradients = find_gradients(jq.ops.dynamic_quantize_matmul, arguments, rng)
    codes, scale, zero_point = onnx_text.dynamic_quantize_linear(a)
    steps, matrix, g = as_matrices(codes.astype(np.float64) - float(zero_point), b, g)
    parts = (steps, float(scale), matrix, b_scale, point, g)
    want, sizes = gradient_formulas.of_product(*parts), gradient_formulas.sizes_of_product(*parts)
    close(gradients["a"], want["a"].reshape(a.shape), sizes=sizes["a"].reshape(a.shape))
    for name in ("b_scale", "bias") if bias is not None else ("b_scale",):
        close(gradients[name], want[name], sizes=sizes[name])


ROWS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "per tensor": ((), ()),
    "one element": ((1,), None),
    "columns": ((4,), (4,)),
    "blocks": ((4, 1), (4, 1)),
    "blocks, one zero point": ((1, 1), ()),
    "batched a": ((2, 3, 4, 1), (4,)),
    "batched a, blocks": ((4,), (3, 1, 1)),
    "batched both": ((3, 4, 1), (3, 4, 1)),
    "broadcast batches": ((3, 1, 1, 1), (4,)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("layout", "signed"), [(name, i % 2 == 1) for i, name in enumerate(SHAPES)])
def test_matmul_integer_to_float(rng: np.random.Generator, layout: str, signed: bool) -> None:
    b, b_scale, point, bias = draw_weights(rng, layout, not signed)
    rows, points = ROWS.get(layout, ((), None))
    low, high, name = (-128, 128, "int8") if signed else (0, 256, "uint8")
    a = rng.integers(low, high, SHAPES[layout][0]).astype(name)
    a_point = None if points is None else np.asarray(rng.integers(low, high, points)).astype(name)
    a_scale = np.asarray(np.exp(rng.uniform(-3, 0, rows)), np.float32)
    arguments = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "a_zero_point": a_point}
    g, gradients = find_gradients(
        jq.ops.matmul_integer_to_float, {**arguments, "b_zero_point": point, "bias": bias}, rng
    )
    steps = np.asarray(a, np.float64) - (0 if a_point is None else contraction_text.per_row(a_point).astype(float))
    steps, matrix, g = as_matrices(steps, b, g)
    parts = (steps, a_scale, matrix, b_scale, point, g)
    want, sizes = gradient_formulas.of_product(*parts), gradient_formulas.sizes_of_product(*parts)
    for name in ("a_scale", "b_scale", *(("bias",) if bias is not None else ())):
        close(gradients[name], want[name], sizes=sizes[name])


def nbits(rng: np.random.Generator, shape: tuple[int, ...], bits: int, block: int, points: Any, dtype: Any) -> Any:
    """Arguments of matmul_nbits, its static ones, and the steps of its weights in float64, [N, blocks, block]."""
    width, columns = shape[-1], 5
    blocks = -(-width // block)
    statics = {"K": width, "N": columns, "bits": bits, "block_size": block}
    a = rng.normal(size=shape).astype(dtype)
    b = rng.integers(0, 256, (columns, blocks, block * bits // 8)).astype(np.uint8)
    scales = np.exp(rng.uniform(-3, 0, (columns, blocks))).astype(dtype)
    bias = rng.normal(size=columns).astype(dtype)
    zero_points: Any = None
    wide = np.full((columns, blocks), 2 ** (bits - 1), np.float64)
    if points == "packed":
        zero_points = rng.integers(0, 256, (columns, -(-blocks * bits // 8))).astype(np.uint8)
        wide = contraction_text.unpack(zero_points, bits)[:, :blocks].astype(np.float64)
    elif points == "float":
        zero_points = rng.uniform(0, 2**bits, (columns, blocks)).astype(dtype)
        wide = zero_points.astype(np.float64)
    steps = contraction_text.unpack(b, bits).reshape(columns, blocks, block) - wide[..., None]
    arguments = {"a": a, "b": b, "scales": scales, "zero_points": zero_points, "bias": bias}
    return arguments, statics, steps


@pytest.mark.sample(1)
@pytest.mark.parametrize("points", ["none", "packed", "float"])
@pytest.mark.parametrize("shape", [(3, 64), (3, 70), (41,), (2, 3, 33)], ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_matmul_nbits(rng: np.random.Generator, bits: int, shape: tuple[int, ...], points: str) -> None:
    arguments, statics, steps = nbits(rng, shape, bits, 16 if bits == 2 else 32, points, np.float32)
    op = functools.partial(jq.ops.matmul_nbits, **statics)
    if points == "none":  # flat, as ONNX has it
        arguments["scales"] = arguments["scales"].reshape(-1)
    g, gradients = find_gradients(op, arguments, rng)
    want, sizes = (f(arguments, steps, g) for f in (gradient_formulas.of_nbits, gradient_formulas.sizes_of_nbits))
    for name in ("a", "scales", "bias", *(("zero_points",) if points == "float" else ())):
        close(gradients[name], want[name], sizes=sizes[name])


@pytest.mark.sample(2)
@pytest.mark.parametrize("points", ["none", "packed", "float"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_matmul_nbits(rng: np.random.Generator, dtype: Any, points: str) -> None:
    arguments, statics, steps = nbits(rng, (3, 40), 4, 32, points, dtype)
    g, gradients = find_gradients(functools.partial(jq.ops.matmul_nbits, **statics), arguments, rng)
    want, sizes = (f(arguments, steps, g) for f in (gradient_formulas.of_nbits, gradient_formulas.sizes_of_nbits))
    digits = float(ml_dtypes.finfo(dtype).eps)
    for name in ("a", "scales", "bias", *(("zero_points",) if points == "float" else ())):
        close(gradients[name], want[name], digits, sizes=sizes[name])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["float32", "float16", "bfloat16"])
def test_a_result_of_zero_has_a_gradient(rng: np.random.Generator, dtype: Any) -> None:
    """And so has one that float16 holds only as a subnormal."""
    arguments, statics, steps = nbits(rng, (3, 40), 4, 32, "none", dtype)
    arguments["bias"] = None
    arguments["a"] = np.stack([np.zeros(40), np.full(40, 1e-8), np.full(40, 1e-6)]).astype(dtype)
    g = np.ones((3, 5), dtype)
    _, gradients = find_gradients(functools.partial(jq.ops.matmul_nbits, **statics), arguments, rng, g)
    close(gradients["a"], gradient_formulas.of_nbits(arguments, steps, g)["a"], float(ml_dtypes.finfo(dtype).eps))


@pytest.mark.slow
def test_the_range_of_a_is_a_constant(rng: np.random.Generator) -> None:
    """The cotangent of a equals a plain product's with dequantized weights, saturated or not, NaN or not."""
    b, scale = rng.integers(-128, 128, (12, 5)).astype(np.int8), np.float32(0.25)
    weights = b.astype(np.float32) * scale
    for a in (np.zeros((4, 12), np.float32), np.full((4, 12), np.nan, np.float32), np.full((4, 12), 7, np.float32)):
        da = jax.grad(lambda a: jq.ops.dynamic_quantize_matmul(a, b, scale).sum())(a)
        np.testing.assert_allclose(da, np.broadcast_to(weights.sum(1), a.shape), rtol=1e-6, atol=1e-4)


def operators(rng: np.random.Generator) -> dict[str, tuple[Callable[..., jax.Array], Any, Array]]:
    """For each float operator a function of what can be learned and of x, and values of both; x has a batch of 6."""
    b, b_scale, point, bias = draw_weights(rng, "blocks", True)
    x = rng.normal(size=(6, 4, 12)).astype(np.float32)
    arguments, statics, _ = nbits(rng, (4, 40), 4, 32, "float", np.float32)
    packed, learned = arguments["b"], {n: arguments[n] for n in ("scales", "zero_points", "bias")}
    codes = rng.integers(0, 256, (6, 4, 12)).astype(np.uint8)
    return {
        "dynamic_quantize_matmul": (
            lambda p, x: jq.ops.dynamic_quantize_matmul(x, b, p["b_scale"], point, p["bias"]),
            {"b_scale": b_scale, "bias": bias},
            x,
        ),
        "matmul_integer_to_float": (
            lambda p, x: jq.ops.matmul_integer_to_float(x, b, p["a_scale"], p["b_scale"], 3, point, p["bias"]),
            {"a_scale": np.array([0.5, 1, 2, 3], np.float32), "b_scale": b_scale, "bias": bias},
            codes,
        ),
        "matmul_nbits": (
            lambda p, x: jq.ops.matmul_nbits(x, packed, **p, **statics),
            learned,
            rng.normal(size=(6, 4, 40)).astype(np.float32),
        ),
    }


NAMES = ["dynamic_quantize_matmul", "matmul_integer_to_float", "matmul_nbits"]


def loops(op: Callable[..., jax.Array]) -> dict[str, Callable[..., Any]]:
    """A loss over a batch of x, spelled in the ways of JAX."""

    def find_loss(p: Any, x: Any) -> jax.Array:
        return jnp.sum(op(p, x) ** 2)

    def scanned(p: Any, x: Any) -> jax.Array:
        return jax.lax.scan(lambda total, row: (total + find_loss(p, row), None), jnp.float32(0), x)[0]

    return {
        "loop": lambda p, x: functools.reduce(jnp.add, [find_loss(p, row) for row in x]),
        "vmap": lambda p, x: jax.vmap(find_loss, in_axes=(None, 0))(p, x).sum(),
        "vmap of both": lambda p, x: jax.vmap(find_loss)(jax.tree.map(lambda v: jnp.stack([v] * 6), p), x).sum(),
        "scan": scanned,
        "remat": lambda p, x: functools.reduce(jnp.add, [jax.checkpoint(find_loss)(p, row) for row in x]),
        "scan of remat": lambda p, x: jax.lax.scan(
            lambda total, row: (total + jax.checkpoint(find_loss)(p, row), None), jnp.float32(0), x
        )[0],
        "map": lambda p, x: jax.lax.map(functools.partial(find_loss, p), x).sum(),
    }


BY_DEFAULT = ("vmap of both", "scan of remat")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("rest", mark_others_full([False, True], [False]), ids=["some", "rest"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_under_transformations(rng: np.random.Generator, name: str, rest: bool) -> None:
    op, parameters, x = operators(rng)[name]
    floats = (0, 1) if x.dtype == np.float32 else (0,)
    expected: Any = None
    for way, loss in loops(op).items():
        if way != "loop" and (way in BY_DEFAULT) == rest:
            continue
        eager = jax.grad(loss, floats)(parameters, x) if rest and way in ("loop", "scan") else None
        actual = jax.jit(jax.grad(loss, floats))(parameters, x)
        expected = actual if expected is None else expected
        for gradients in (actual, eager):
            if gradients is not None:
                jax.tree.map(lambda a, b: close(a, np.asarray(b, np.float64), 1e-5), gradients, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gradient_of_each_in_a_batch(rng: np.random.Generator, name: str) -> None:
    """vmap of grad: each x, and each set of parameters, has its own."""
    op, parameters, x = operators(rng)[name]

    def pull(p: Any, x: Any) -> Any:
        return jax.grad(lambda p: jnp.sum(op(p, x) ** 2))(p)

    batch = jax.tree.map(lambda v: np.stack([v * np.float32(1 + i / 8) for i in range(6)]), parameters)
    for axes, args in (((None, 0), parameters), ((0, 0), batch)):
        actual = jax.jit(jax.vmap(pull, axes))(args, x)
        rows = [pull(args if axes[0] is None else jax.tree.map(lambda v, i=i: v[i], args), x[i]) for i in range(6)]
        for name, value in actual.items():
            close(value, np.stack([np.asarray(r[name], np.float64) for r in rows]), 1e-5)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_the_value_beside_a_gradient_is_the_value(rng: np.random.Generator, name: str) -> None:
    op, parameters, x = operators(rng)[name]

    def loss(p: Any, x: Any) -> Any:
        y = op(p, x)
        return jnp.sum(y), y

    for function in (loss, jax.checkpoint(loss)):
        for rule in (jax.value_and_grad(function, has_aux=True), jax.jit(jax.value_and_grad(function, has_aux=True))):
            for row in x:
                assert transforms.mismatches(rule(parameters, row)[0][1], op(parameters, row)) == 0


ROWS_BY_ROWS = (((1,), (1,)), ((), ()))
CODES: dict[str, tuple[Callable[..., jax.Array], tuple[int, ...], tuple[int, ...]]] = {
    "matmul_integer": (lambda x, w: jq.matmul_integer(x, w, 3, jnp.full(5, 2, jnp.int8)), (4, 12), (12, 5)),
    "row": (lambda x, w: jq.matmul_integer(x, w, 3), (1, 12), (12, 5)),
    "dot_general": (functools.partial(jq.integer.dot_general, dimension_numbers=ROWS_BY_ROWS), (4, 12), (5, 12)),
    "conv_integer": (lambda x, w: jq.conv_integer(x, w, 3, pads=(1, 1)), (2, 12, 7), (5, 12, 3)),
    "few channels": (lambda x, w: jq.conv_integer(x, w, 3, pads=(1, 1)), (2, 2, 7), (5, 2, 3)),
    "depthwise": (lambda x, w: jq.conv_integer(x, w, 3, group=12), (2, 12, 7), (12, 1, 3)),
    "conv_general_dilated": (lambda x, w: jq.integer.conv_general_dilated(x, w, (2,), "SAME"), (2, 12, 7), (5, 12, 3)),
    "qlinear_matmul": (lambda x, w: jq.qlinear_matmul(x, 0.5, 3, w, 0.25, 0, 4.0, 7), (4, 12), (12, 5)),
    "qlinear_conv": (lambda x, w: jq.qlinear_conv(x, 0.5, 3, w, 0.25, 0, 4.0, 7), (2, 12, 7), (5, 12, 3)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(CODES))
def test_integers_stop_a_gradient_and_break_none(rng: np.random.Generator, name: str) -> None:
    """A scale behind the contraction learns; what is in front of the codes gets zeros, or what goes around them."""
    op, x_shape, w_shape = CODES[name]
    x, w = rng.normal(size=x_shape).astype(np.float32), rng.normal(size=w_shape).astype(np.float32)

    def codes(x: Any, w: Any) -> jax.Array:
        return op(jq.quantize_linear(x, 0.1, 128), jq.quantize_linear(w, 0.1, output_dtype=jnp.int8))

    def loss(x: Any, w: Any, scale: Any) -> jax.Array:
        return jnp.sum(codes(x, w).astype(jnp.float32) * scale) + jnp.sum(x) * 2

    def repeated(x: Any, w: Any, scale: Any) -> jax.Array:
        body = jax.checkpoint(lambda total, row: (total + loss(row, w, scale), None))
        return jax.lax.scan(body, jnp.float32(0), jnp.stack([x]))[0]

    integers = np.asarray(codes(x, w)).astype(np.float64)
    mapped = jax.vmap(loss, (0, None, None))
    for function in (loss, repeated, lambda x, w, s: mapped(jnp.stack([x]), w, s).sum()):
        for rule in (jax.grad(function, (0, 1, 2)), jax.jit(jax.grad(function, (0, 1, 2)))):
            dx, dw, dscale = rule(x, w, jnp.float32(0.5))
            np.testing.assert_array_equal(dx, np.full(x_shape, 2))
            np.testing.assert_array_equal(dw, np.zeros(w_shape))
            np.testing.assert_allclose(dscale, integers.sum(), rtol=0, atol=1e-6 * np.abs(integers).sum())
        _, tangent = jax.jvp(lambda x, function=function: function(x, w, jnp.float32(0.5)), (x,), (np.ones_like(x),))
        np.testing.assert_allclose(tangent, 2 * x.size)


@pytest.mark.parametrize("name", list(CODES))
def test_integer_operands_carry_float0(rng: np.random.Generator, name: str) -> None:
    op, x_shape, w_shape = CODES[name]
    x, w = rng.integers(0, 256, x_shape).astype(np.uint8), rng.integers(-128, 128, w_shape).astype(np.int8)
    y, vjp = jax.vjp(op, x, w)
    assert transforms.mismatches(y, op(x, w)) == 0
    for cotangent, operand in zip(vjp(np.zeros(y.shape, jax.dtypes.float0)), (x, w), strict=True):
        assert cotangent.dtype == jax.dtypes.float0
        assert cotangent.shape == operand.shape


@pytest.mark.slow
def test_forward_mode_of_scales(rng: np.random.Generator) -> None:
    """What no rule of its own stands for is differentiable both ways."""
    a, b = rng.integers(0, 256, (4, 12)).astype(np.uint8), rng.integers(-128, 128, (12, 5)).astype(np.int8)
    for shape in ((), (5,), (3, 5)):
        scale = jnp.full(shape, 0.5)
        op = functools.partial(jq.ops.matmul_integer_to_float, a, b, jnp.float32(2))
        y, tangent = jax.jvp(op, (scale,), (scale,))
        np.testing.assert_allclose(tangent, y, rtol=1e-6)
