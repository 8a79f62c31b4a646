"""Programs that call every family of operators, for tests that spread their inputs over devices and processes.

A family is a function of a dict of inputs. It returns a dict of results. Results that are sums of floats, whose order
depends on how the inputs are spread, have a name that begins with "float ". All others are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

Results = dict[str, Any]
INT8, UINT8 = jq.QuantSpec(jnp.int8), jq.QuantSpec(jnp.uint8)
TOKENS = jq.QuantSpec(jnp.int8, jq.PerToken())
WINDOWS: Any = ((1, 1), "SAME")
F, U8, I8 = np.float32, np.uint8, np.int8

# The lengths: (rows, features, columns), (images, channels, height, width, outputs), and (batch, tokens, heads, head
# features, kv heads). The eight devices divide all of the first ones and none of the second ones.
EVEN = ((16, 32, 24), (8, 8, 8, 16, 16), (8, 8, 16, 16, 8))
ODD = ((13, 21, 27), (5, 6, 7, 9, 10), (3, 5, 6, 10, 3))


def draw_inputs(rng: np.random.Generator, lengths: Any) -> dict[str, np.ndarray]:
    """Return the inputs of all families."""
    (rows, features, columns), (images, channels, height, width, outputs), (batch, tokens, heads, size, kv) = lengths
    shapes = {
        "x": (rows, features),
        "w": (features, columns),
        "images": (images, channels, height, width),
        "kernel": (outputs, channels, 3, 3),
        "query": (batch, tokens, heads, size),
        "key": (batch, tokens, kv, size),
        "value": (batch, tokens, kv, size),
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


# Which dimension of each input is cut. "contracted" cuts both operands of each contraction along a contracted one.
CUTS = {
    "rows": {"x": 0, "w": 1, "images": 0, "kernel": 0, "query": 0, "key": 0, "value": 0},
    "contracted": {"x": 1, "w": 0, "images": 1, "kernel": 1, "query": 3, "key": 3, "value": 1},
    "height and tokens": {"x": 0, "w": 0, "images": 2, "kernel": 1, "query": 1, "key": 1, "value": 1},
    "width and heads": {"x": 1, "w": 1, "images": 3, "kernel": 0, "query": 2, "key": 2, "value": 2},
}


def run_onnx(data: Any) -> Results:
    """Return the results of ONNX's and ONNX Runtime's operators on matrices."""
    x, w = data["x"], data["w"]
    columns = np.linspace(0.01, 0.05, w.shape[1], dtype=np.float32)
    codes, point = jq.quantize_linear(x, F(0.03), U8(131)), U8(131)
    weights = jq.quantize_linear(w, columns, I8(np.zeros(w.shape[1], np.int8)), axis=1)
    dynamic = jq.dynamic_quantize_linear(x)
    blocks = -(-x.shape[1] // 16)
    packed = jnp.pad(jax.lax.bitcast_convert_type(weights, jnp.uint8).T, ((0, 0), (0, 16 * blocks - x.shape[1])))
    nbits = {"K": x.shape[1], "N": w.shape[1], "bits": 8, "block_size": 16}
    return {
        "quantize_linear": codes,
        "quantize_linear, axis": weights,
        "dequantize_linear": jq.dequantize_linear(weights, columns, axis=1),
        "dynamic_quantize_linear": dynamic,
        "matmul_integer": jq.matmul_integer(codes, weights, point),
        "qlinear_matmul": jq.qlinear_matmul(codes, F(0.03), point, weights, columns, I8(0), F(0.2), U8(120)),
        "dynamic_quantize_matmul": jq.ops.dynamic_quantize_matmul(x, weights, columns),
        "matmul_integer_to_float": jq.ops.matmul_integer_to_float(codes, weights, F(0.03), columns, point, I8(0)),
        "float matmul_nbits": jq.ops.matmul_nbits(
            x, packed.reshape(w.shape[1], blocks, 16), jnp.full((w.shape[1], blocks), F(0.02)), **nbits
        ),
        "gather_block_quantized": jq.ops.gather_block_quantized(
            packed, np.array([5, -1, 0, 99], np.int32), jnp.full((w.shape[1], blocks), F(0.02)), bits=8, block_size=16
        ),
    }


def run_microsoft(data: Any) -> Results:
    """Return the results of ONNX Runtime's operators on codes."""
    a, b = jq.quantize_linear(data["x"], F(0.03), U8(131)), jq.quantize_linear(-data["x"], F(0.02), U8(117))
    one, two, out = (F(0.03), U8(131)), (F(0.02), U8(117)), (F(0.041), U8(125))
    images = jq.quantize_linear(data["images"], *one)
    return {
        "add": jq.ops.qlinear_add(a, *one, b, *two, *out),
        "mul": jq.ops.qlinear_mul(a, *one, b, *two, *out),
        "where": jq.ops.qlinear_where(data["x"] > 0, a, *one, b, *two, *out),
        "concat": jq.ops.qlinear_concat(*out, a, *one, b, *two, axis=1),
        "concat rows": jq.ops.qlinear_concat(*out, a, *one, b, *two, axis=0),
        "sigmoid": jq.ops.qlinear_sigmoid(a, *one, F(1 / 256), U8(0)),
        "leaky_relu": jq.ops.qlinear_leaky_relu(a, *one, *out),
        "softmax": jq.ops.qlinear_softmax(a, *one, F(1 / 256), U8(0)),
        "reduce_mean": jq.ops.qlinear_reduce_mean(a, *one, *out, axes=(0,)),
        "average_pool": jq.ops.qlinear_average_pool(images, *one, *out, kernel_shape=(2, 2)),
        "global_average_pool": jq.ops.qlinear_global_average_pool(images, *one, *out),
    }


def run_onednn(data: Any) -> Results:
    """Return the results of oneDNN's operators."""
    x, points = data["x"], np.arange(data["x"].shape[1], dtype=np.int32) % 7
    scales = np.linspace(0.01, 0.05, x.shape[1], dtype=np.float32)
    channels = {"qtype": "per_channel", "axis": 1}
    codes = jq.onednn.quantize(x, scales, points, **channels)
    dynamic = jq.onednn.dynamic_quantize(x, scales, points, **channels, dtype=jnp.int8)
    return {
        "quantize": codes,
        "quantize, one scale": jq.onednn.quantize(x, F(0.037), np.int32(3)),
        "dequantize": jq.onednn.dequantize(codes, scales, points, **channels),
        "dynamic_quantize": dynamic,
        "dynamic_dequantize": jq.onednn.dynamic_dequantize(dynamic, scales, points, **channels),
    }


def run_arrays(data: Any) -> Results:
    """Return quantized arrays of every granularity, and contractions of them."""
    x, w = data["x"], data["w"]
    specs = {
        "tensor": INT8,
        "rows": jq.QuantSpec(jnp.uint8, jq.PerAxis(0)),
        "columns, 4 bits": jq.QuantSpec(jnp.int4, jq.PerAxis(1)),
        "blocks": jq.QuantSpec(jnp.int4, jq.Blocked(1, 4), scale_dtype=jnp.bfloat16),
        "blocks of rows": jq.QuantSpec(jnp.int8, jq.Blocked(0, 5)),
        "codebook": jq.QuantSpec(jq.nf4, jq.Blocked(1, 8)),
        "float8": jq.QuantSpec(jnp.float8_e4m3fn, jq.PerAxis(0)),
    }
    results: Results = {name: jq.quantize(x, spec) for name, spec in specs.items()}
    results |= {f"{name}, values": results[name].dequantize() for name in specs}
    rows, columns = jq.quantize(x, TOKENS), jq.quantize(w, jq.QuantSpec(jnp.int8, jq.PerAxis(1)))
    points = jq.quantize(w, jq.QuantSpec(jnp.uint8, jq.PerAxis(1)))
    numbers = (((1,), (0,)), ((), ()))
    return results | {
        "matmul": jq.matmul(rows, columns),
        "matmul, zero points": jq.matmul(results["tensor"], points),
        "matmul, 4 bits": jq.matmul(rows, jq.quantize(w, jq.QuantSpec(jnp.int4, jq.PerAxis(1)))),
        "float matmul, blocks": jq.matmul(rows, jq.quantize(w, jq.QuantSpec(jnp.int4, jq.Blocked(0, 4)))),
        "float matmul, weights only": jq.matmul(x, columns),
        "dot_general": jq.dot_general(rows, columns, numbers),
        "einsum": jq.einsum("ij,jk->ki", rows, columns),
        "integer.dot_general": jq.integer.dot_general(rows.codes, columns.codes, numbers),
        "integer.dot_general of a transpose": jq.integer.dot_general(
            rows.codes, rows.codes, (((0,), (0,)), ((), ())), lhs_zero_point=3
        ),
        "take": jq.take(rows, np.array([0, 7, 3, 7])),
        "concatenate": jq.concatenate([rows, rows], 0),
    }


def run_convolutions(data: Any) -> Results:
    """Return convolutions of codes, and of floats that are quantized."""
    images, kernel = data["images"], data["kernel"]
    codes = jq.quantize_linear(images, F(0.03), U8(131))
    weights = jq.quantize_linear(kernel, F(0.02), I8(0))
    pads: dict[str, Any] = {"pads": (1, 1, 1, 1)}
    depthwise = weights[: images.shape[1], :1]
    left = jq.quantize(images, jq.QuantSpec(jnp.uint8, jq.PerAxis(0)))
    right = jq.quantize(kernel, jq.QuantSpec(jnp.int8, jq.PerAxis(0)))
    return {
        "conv_integer": jq.conv_integer(codes, weights, U8(131), **pads),
        "conv_integer, groups": jq.conv_integer(codes, depthwise, U8(131), group=images.shape[1], **pads),
        "conv_integer, strides": jq.conv_integer(codes, weights, U8(131), strides=(2, 2), **pads),
        "qlinear_conv": jq.qlinear_conv(codes, F(0.03), U8(131), weights, F(0.02), I8(0), F(0.3), U8(120), **pads),
        "integer": jq.integer.conv_general_dilated(codes, weights, *WINDOWS, lhs_zero_point=131),
        "arrays": jq.conv_general_dilated(left, right, *WINDOWS),
        "quantized": jq.quantized_conv_general_dilated(images, kernel, *WINDOWS, lhs_spec=INT8, rhs_spec=INT8),
    }


def run_codes(data: Any) -> Results:
    """Return the results of functions between the contractions of integer networks."""
    x = jq.quantize(data["x"], UINT8)
    images = jq.quantize(jnp.moveaxis(data["images"], 1, 3), UINT8)
    out = jq.Quantizer(UINT8, F(0.05), U8(128))
    results = {
        "add": jq.codes.add(x, x, output=out),
        "multiply": jq.codes.multiply(x, x, output=out),
        "relu": jq.codes.relu(x),
        "max_pool": jq.codes.max_pool(images, window_shape=(2, 2)),
        "average_pool": jq.codes.average_pool(images, window_shape=(2, 2), output=out),
        "mean": jq.codes.mean(images, (1, 2), output=out),
        "reshape": jq.codes.reshape(images, (images.shape[0], -1)),
        "transpose": jq.codes.transpose(x),
        "pad": jq.codes.pad(x, 1),
        "concatenate": jq.concatenate([x, x], 1, output=out),
    }
    bias = jq.codes.quantize_bias(data["w"][0], F(0.01), np.linspace(0.01, 0.05, data["w"].shape[1], dtype=np.float32))
    return {**{name: q.codes for name, q in results.items()}, "quantize_bias": bias}


def run_attention(data: Any) -> Results:
    """Return attention over caches of 8 and 4 bits, attention of floats that are quantized, and its gradient."""
    query, key, value = (data[name] for name in ("query", "key", "value"))
    results: Results = {}
    for bits in (8, 4):
        spec = jq.QuantSpec(f"int{bits}", jq.PerToken())
        cache = jq.KVCache.create((*key.shape[:1], key.shape[1] + 3, *key.shape[2:]), spec, spec).append(key, value)
        results |= {f"cache of int{bits}": cache, f"float attention, int{bits}": jq.attention(query, cache)}

    def attend(query: Any, key: Any, value: Any) -> jax.Array:
        return jq.quantized_dot_product_attention(query, key, value, is_causal=True)

    y, pull = jax.vjp(attend, query, key, value)
    return results | {"float training": y, "float gradients": pull(y)}


def run_training(data: Any) -> Results:
    """Return forward passes of the functions that have a gradient, and their gradients."""
    x, w = data["x"], data["w"]

    def contract(x: Any, w: Any) -> Any:
        options: dict[str, Any] = {"lhs_spec": TOKENS, "rhs_spec": jq.QuantSpec(jnp.int8, jq.PerAxis(1))}
        return jq.quantized_dot_general(x, w, (((1,), (0,)), ((), ())), **options, backward=jq.Int8Backward())

    def fake(x: Any) -> Any:
        return jq.fake_quantize(x, UINT8) + jq.fake_quantize_linear(x, F(0.03)) + jq.dynamic_fake_quantize_linear(x)

    y, pull = jax.vjp(contract, x, w)
    z, pull_fake = jax.vjp(fake, x)
    return {
        "quantized_dot_general": y,
        "quantized_einsum": jq.quantized_einsum("ij,jk->ik", x, w, specs=(TOKENS, INT8)),
        "fake": z,
        "float gradients": pull(y),
        "float gradients of fake": pull_fake(z),
    }


FAMILIES: dict[str, Callable[[Any], Results]] = {
    "onnx": run_onnx,
    "microsoft": run_microsoft,
    "onednn": run_onednn,
    "arrays": run_arrays,
    "convolutions": run_convolutions,
    "codes": run_codes,
    "attention": run_attention,
    "training": run_training,
}


def list_arrays(results: Any) -> dict[str, jax.Array]:
    """Return the arrays of the results of a family by name, in dtypes that numpy can store.

    Integers of less than 8 bits become int8, and bfloat16 and float8 become float32.
    """

    def widen(leaf: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer) and jnp.iinfo(leaf.dtype).bits < 8:
            return leaf.astype(jnp.int8)
        is_small = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype not in (jnp.float32, jnp.float16)
        return leaf.astype(jnp.float32) if is_small else leaf

    leaves = jax.tree_util.tree_leaves_with_path(results)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): widen(leaf) for path, leaf in leaves}


def check_results(actual: dict[str, Any], expected: dict[str, Any], label: str = "") -> None:
    """Assert that results have the same bits, or, if they are sums of floats, that they differ by their rounding."""
    assert set(actual) == set(expected)
    for name, value in expected.items():
        a, b = np.asarray(actual[name]), np.asarray(value)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{label} {name}"
        if name.startswith("float "):
            scale = np.abs(b.astype(np.float64)).max(initial=1e-30)
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale, err_msg=f"{label} {name}")
        else:
            assert a.tobytes() == b.tobytes(), f"{label} {name}: {np.sum(a != b)} of {a.size} differ"
