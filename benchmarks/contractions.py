"""The rows on matrix products and convolutions.

A row is one function that returns a Contest, and one line in ROWS. The shape of a product is M x K x N, with the batch
before it; that of a convolution is N x C x H x W, then output channels and kernel width.

All contestants receive the weights beforehand: ONNX Runtime as initializers, which it packs; jaxquant and JAX as
arguments, whose values are unknown when they compile, unless the row says "constant weights". The results of float32
JAX, and of qwix, which quantizes its activations in each call, are different numbers by design.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

from . import inputs, qwix_calls
from . import onnxruntime_models as models
from .contest import BFLOAT16, FLOAT32, ONNX_RUNTIME, QWIX, Call, Contest, Missing, Row, Table

_MICROSOFT = "com.microsoft"
_NO_OPERATOR = Missing("no operator")
_UNLIKE = frozenset({FLOAT32, BFLOAT16, QWIX})
_BLOCK = 128
_NIBBLE_BLOCK = 32
_TOLERANCE = 1e-5  # XLA may add the K products of a float32 sum in any order


@dataclasses.dataclass(frozen=True)
class _Conv:
    """The attributes of a convolution, without the size of its images."""

    channels: int
    outputs: int
    kernel: int
    stride: int = 1
    group: int = 1

    @property
    def weights(self) -> tuple[int, ...]:
        return (self.outputs, self.channels // self.group, self.kernel, self.kernel)

    @property
    def onnx(self) -> dict[str, Any]:
        """The attributes under ONNX's names, which jaxquant also uses."""
        pads, strides = [self.kernel // 2] * 4, [self.stride] * 2
        return {"kernel_shape": [self.kernel] * 2, "pads": pads, "strides": strides, "group": self.group}

    @property
    def lax(self) -> dict[str, Any]:
        return {
            "window_strides": (self.stride, self.stride),
            "padding": [(self.kernel // 2, self.kernel // 2)] * 2,
            "dimension_numbers": ("NCHW", "OIHW", "NCHW"),
            "feature_group_count": self.group,
        }


def _matmul_integer(shape: tuple[int, ...], a_dtype: str, b_dtype: str) -> Contest:
    *batch, m, k, n = shape
    a, b = inputs.codes((*batch, m, k), a_dtype), inputs.codes((*batch, k, n), b_dtype, seed=5)
    zero_points = [inputs.parameters((), dtype)[1] for dtype in (a_dtype, b_dtype)]
    named = dict(zip(("a_zero_point", "b_zero_point"), zero_points, strict=True))
    onnx = models.single_node("MatMulInteger", {"a": a}, {"b": b, **named})
    expected = partial(inputs.multiply_exactly, a, b, *zero_points)
    floats = a.astype(np.float32), b.astype(np.float32)
    opponents = {ONNX_RUNTIME: onnx, **_floats(jnp.matmul, *floats), QWIX: qwix_calls.matmul(*floats)}
    ours = partial(jq.matmul_integer, *jax.device_put((a, b, *zero_points)))
    bytes_read, multiply_adds = a.nbytes + b.nbytes, math.prod(shape)
    return Contest(
        ours, opponents, expected, bytes_read, unlike=_UNLIKE, multiply_adds=multiply_adds, judges_runtime=True
    )


def _stored_last(shape: tuple[int, ...], a_dtype: str, b_dtype: str) -> Contest:
    """Return the contest of `_matmul_integer` with K last in memory in the weights, as converted layers have it."""
    contest = _matmul_integer(shape, a_dtype, b_dtype)
    assert isinstance(contest.jaxquant, partial)
    a, b, a_zero_point, b_zero_point = contest.jaxquant.args
    contract = jax.jit(partial(jq.integer.dot_general, dimension_numbers=(((1,), (1,)), ((), ()))))
    ours = partial(contract, a, b.T, lhs_zero_point=a_zero_point, rhs_zero_point=b_zero_point)
    return dataclasses.replace(contest, jaxquant=ours)


def _against_bare(shape: tuple[int, ...]) -> Contest:
    """Return the contest with XLA's bare int8 contraction, without unsigned operands and zero points, as a bound."""
    contest = _matmul_integer(shape, "uint8", "int8")
    a, b = (jax.device_put(inputs.codes(s, "int8", seed=i)) for i, s in enumerate((shape[:2], shape[1:]), 4))
    dimensions = (((1,), (0,)), ((), ()))
    bare = jax.jit(lambda a, b: jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.int32))
    opponents = {ONNX_RUNTIME: contest.opponents[ONNX_RUNTIME], FLOAT32: partial(bare, a, b), QWIX: Missing("none")}
    return dataclasses.replace(contest, opponents=opponents)


def _dynamic_dense(shape: tuple[int, ...], constant: bool = False) -> Contest:
    m, k, n = shape
    a, bias = inputs.finite((m, k)), inputs.finite((n,))
    b, (b_scale, _) = inputs.codes((k, n), "int8"), inputs.parameters((n,), "int8")
    weights = {"b": b, "b_scale": b_scale, "b_zero_point": None, "bias": bias}
    onnx = models.single_node("DynamicQuantizeMatMul", {"a": a}, weights, domain=_MICROSOFT)
    unsigned = {"b": models.store_unsigned(b), "b_zero_point": models.store_unsigned(np.zeros(n, np.int8))}
    exact = models.single_node("DynamicQuantizeMatMul", {"a": a}, weights | unsigned, domain=_MICROSOFT)
    floats = a, b * b_scale, bias
    opponents = {
        ONNX_RUNTIME: onnx,
        **_floats(lambda a, b, bias: a @ b + bias, *floats),
        QWIX: qwix_calls.matmul(*floats),
    }
    ours = _ours(jq.ops.dynamic_quantize_matmul, a, *weights.values(), constant=constant)
    bytes_read = a.nbytes + b.nbytes + b_scale.nbytes + bias.nbytes
    multiply_adds = math.prod(shape)
    return Contest(ours, opponents, exact, bytes_read, unlike=_UNLIKE, multiply_adds=multiply_adds, judges_runtime=True)


def _qlinear_conv(shape: tuple[int, ...], work: _Conv, constant: bool = False) -> Contest:
    x, constants = inputs.codes(shape, "uint8"), _conv_constants(work)
    w, bias = constants["w"], constants["bias"]
    onnx = models.single_node("QLinearConv", {"x": x}, constants, **work.onnx)
    unsigned = {name: models.store_unsigned(constants[name]) for name in ("w", "w_zero_point")}
    exact = models.single_node("QLinearConv", {"x": x}, constants | unsigned, **work.onnx)
    floats = x.astype(np.float32), w.astype(np.float32), bias.astype(np.float32)[:, None, None]
    opponents = {
        ONNX_RUNTIME: onnx,
        **_floats(lambda x, w, bias: jax.lax.conv_general_dilated(x, w, **work.lax) + bias, *floats),
        QWIX: qwix_calls.conv(*floats, work.lax),
    }
    ours = _ours(partial(jq.qlinear_conv, **work.onnx), x, *constants.values(), constant=constant)
    n, _, height, width = shape
    multiply_adds = n * -(-height // work.stride) * -(-width // work.stride) * w.size
    bytes_read = x.nbytes + w.nbytes
    return Contest(ours, opponents, exact, bytes_read, unlike=_UNLIKE, multiply_adds=multiply_adds, judges_runtime=True)


def _narrow_depthwise(shape: tuple[int, ...]) -> Contest:
    """Return a contest of a depthwise convolution with an int4 kernel and the same codes in int8."""
    n, channels, height, width, _, kernel = shape
    x, w = inputs.codes((n, height, width, channels), "int8"), inputs.codes((kernel, kernel, 1, channels), "int4", 5)
    layout: dict[str, Any] = {
        "window_strides": (1, 1),
        "padding": "SAME",
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
        "feature_group_count": channels,
    }
    convolve = jax.jit(partial(jq.integer.conv_general_dilated, **layout))
    images, narrow, wide = jax.device_put((x, w, w.astype(np.int8)))

    def expected() -> np.ndarray:
        edge, steps = kernel // 2, w.astype(np.int32)
        padded = np.pad(x.astype(np.int32), ((0, 0), (edge, edge), (edge, edge), (0, 0)))
        acc = np.zeros(x.shape, np.int32)
        for i in range(kernel):
            for j in range(kernel):
                acc += padded[:, i : i + height, j : j + width] * steps[i, j, 0]
        return acc

    opponents = {ONNX_RUNTIME: _NO_OPERATOR, FLOAT32: partial(convolve, images, wide), QWIX: Missing("none")}
    multiply_adds = n * height * width * w.size
    return Contest(
        partial(convolve, images, narrow), opponents, expected, x.nbytes + w.size, multiply_adds=multiply_adds
    )


def _conv_constants(work: _Conv) -> dict[str, np.ndarray]:
    """Return all arguments after x, in the operator's order."""
    (x_scale, x_zero_point), (w_scale, _) = inputs.parameters((), "uint8"), inputs.parameters((work.outputs,), "int8")
    terms = math.prod(work.weights[1:])
    # Uniform codes have a standard deviation of 74. With this scale the results span the range of y, and some saturate.
    y_scale = x_scale * w_scale.mean() * 74 * 74 * math.sqrt(terms) / 64
    return {
        "x_scale": x_scale,
        "x_zero_point": x_zero_point,
        "w": inputs.codes(work.weights, "int8", seed=5),
        "w_scale": w_scale,
        "w_zero_point": np.zeros(work.outputs, np.int8),
        "y_scale": np.asarray(y_scale, np.float32),
        "y_zero_point": np.asarray(125, np.uint8),
        "bias": inputs.codes((work.outputs,), "int16", seed=6).astype(np.int32),
    }


def _blocked_scales(shape: tuple[int, ...]) -> Contest:
    m, k, n = shape
    a, b = inputs.codes((m, k), "int8"), inputs.codes((k, n), "int8", seed=5)
    (a_scale, _), (b_scale, _) = inputs.parameters((), "int8"), inputs.parameters((k // _BLOCK, n), "int8")

    def expected() -> np.ndarray:
        total = np.zeros((m, n), np.float32)
        for block, scale in enumerate(b_scale):
            along_k = slice(_BLOCK * block, _BLOCK * (block + 1))
            # These sums of integers are exact in float32, because they stay below 2**24.
            total += (a[:, along_k].astype(np.float32) @ b[along_k].astype(np.float32)) * (a_scale * scale)
        return total

    floats = a * a_scale, b * np.repeat(b_scale, _BLOCK, axis=0)
    opponents = {
        ONNX_RUNTIME: _NO_OPERATOR,
        **_floats(jnp.matmul, *floats),
        QWIX: qwix_calls.matmul(*floats, block_size=_BLOCK),
    }
    ours = partial(jq.ops.matmul_integer_to_float, *jax.device_put((a, b, a_scale, b_scale)))
    bytes_read = a.nbytes + b.nbytes + b_scale.nbytes
    return Contest(ours, opponents, expected, bytes_read, unlike=_UNLIKE, multiply_adds=math.prod(shape))


def _nbits(shape: tuple[int, ...], constant: bool = False) -> Contest:
    m, k, n = shape
    blocks = k // _NIBBLE_BLOCK
    a, b = inputs.finite((m, k)), inputs.codes((n, blocks, _NIBBLE_BLOCK // 2), "uint8")
    scales, _ = inputs.parameters((n, blocks), "int8")
    attributes: dict[str, Any] = {"K": k, "N": n, "bits": 4, "block_size": _NIBBLE_BLOCK}
    onnx = models.single_node("MatMulNBits", {"a": a}, {"b": b, "scales": scales}, domain=_MICROSOFT, **attributes)
    steps = inputs.nibbles(b).astype(np.float32) - 8
    w = np.ascontiguousarray((steps * scales[..., None]).reshape(n, k).T)

    def close(y: Any) -> np.ndarray:
        exact = a.astype(np.float64) @ (steps.astype(np.float64) * scales[..., None]).reshape(n, k).T
        return np.abs(np.asarray(y) - exact) <= _TOLERANCE * np.abs(exact).max()

    opponents = {
        ONNX_RUNTIME: onnx,
        **_floats(jnp.matmul, a, w),
        QWIX: qwix_calls.int4_weights(a, w, _NIBBLE_BLOCK),
    }
    ours = _ours(partial(jq.ops.matmul_nbits, **attributes), a, b, scales, constant=constant)
    bytes_read = a.nbytes + b.nbytes + scales.nbytes
    all_close = partial(np.ones, (m, n), bool)
    return Contest(
        ours, opponents, all_close, bytes_read, unlike=_UNLIKE, compared=close, multiply_adds=math.prod(shape)
    )


def _ours(operator: Callable[..., jax.Array], x: np.ndarray, *weights: np.ndarray | None, constant: bool) -> Call:
    array, arrays = jax.device_put((x, weights))
    return partial(jax.jit(lambda x: operator(x, *arrays)), array) if constant else partial(operator, array, *arrays)


def _floats(work: Callable[..., jax.Array], *operands: np.ndarray) -> dict[str, Call | Missing]:
    """Return calls that do the same work in float32, and in bfloat16 if the backend has units for it."""
    jitted = jax.jit(work)
    calls: dict[str, Call | Missing] = {FLOAT32: partial(jitted, *jax.device_put(operands))}
    if jax.default_backend() != "cpu":
        calls[BFLOAT16] = partial(jitted, *(jnp.asarray(array, jnp.bfloat16) for array in operands))
    return calls


def _products(
    name: str, shapes: list[tuple[int, ...]], compiled: int, build: Callable[..., Contest], *arguments: Any
) -> list[Row]:
    """Return a row per shape. `compiled` is the index of the row whose compilation is timed."""
    timed = shapes[compiled]
    return [Row(name, shape, partial(build, shape, *arguments), shape == timed) for shape in shapes]


def _convs(name: str, work: _Conv, *sizes: tuple[int, int], constant: bool = False) -> list[Row]:
    """Return a row per batch size and resolution. The compilation of the last one is timed."""
    rows = []
    for n, size in sizes:
        x = (n, work.channels, size, size)
        build = partial(_qlinear_conv, x, work, constant)
        rows.append(Row(name, (*x, work.outputs, work.kernel), build, (n, size) == sizes[-1]))
    return rows


_CUBES = [(256,) * 3, (1024,) * 3, (2048,) * 3]
_BLOCKED = [(512,) * 3, (1024,) * 3, (2048,) * 3]
_BATCHED = [(8, *(size,) * 3) for size in (128, 256, 512)]
_DENSE = [(32, 256, 1024), (128, 768, 3072), (512, 1024, 4096)]
_ONE_ROW = [(1, size, size) for size in (1024, 2048, 4096)]
_FEW_ROWS = [(m, 4096, 4096) for m in (1, 2, 4, 8)]
_MANY_ROWS = [(128, size, size) for size in (1024, 2048, 4096)]
_STORED_LAST = "dot_general uint8 x int8, zero points, weights stored last"
_SQUARE = _Conv(64, 64, 3)
_DEPTHWISE = [(n, 128, size, size, 128, 3) for n, size in ((1, 14), (1, 56), (8, 56))]
_NARROW = "conv_general_dilated NHWC int8 x int4 3x3 depthwise 128; float32: the same codes in int8"

ROWS = [
    *_products("matmul_integer uint8 x int8, zero points", _CUBES, 1, _matmul_integer, "uint8", "int8"),
    *_products("matmul_integer uint8 x int8, zero points; float32: only lax.dot_general", _CUBES, 1, _against_bare),
    *_products("matmul_integer uint8 x uint8, zero points", _CUBES, 1, _matmul_integer, "uint8", "uint8"),
    *_products("matmul_integer int8 x int8, zero points", _CUBES, 1, _matmul_integer, "int8", "int8"),
    *_products("matmul_integer uint8 x int8, zero points, one row", _ONE_ROW, 2, _matmul_integer, "uint8", "int8"),
    *_products(_STORED_LAST, _FEW_ROWS, 0, _stored_last, "uint8", "int8"),
    *_products("matmul_integer uint8 x int8, zero points, batched", _BATCHED, 2, _matmul_integer, "uint8", "int8"),
    *_products("dynamic_quantize_matmul int8 per column, bias", _DENSE, 1, _dynamic_dense),
    *_products("dynamic_quantize_matmul int8 per column, bias, constant weights", _DENSE[:2], 1, _dynamic_dense, True),
    *_convs("qlinear_conv 3x3 64 to 64", _SQUARE, (1, 28), (1, 56), (8, 56)),
    *_convs("qlinear_conv 3x3 64 to 64, constant weights", _SQUARE, (1, 28), (8, 56), constant=True),
    *_convs("qlinear_conv 3x3 256 to 256", _Conv(256, 256, 3), (1, 7), (1, 14), (8, 14)),
    *_convs("qlinear_conv 1x1 64 to 256", _Conv(64, 256, 1), (1, 28), (1, 56), (8, 56)),
    *_convs("qlinear_conv 7x7/2 3 to 64", _Conv(3, 64, 7, stride=2), (1, 56), (1, 112), (1, 224)),
    *_convs("qlinear_conv 3x3 depthwise 128", _Conv(128, 128, 3, group=128), (1, 14), (1, 56), (8, 56)),
    *_products(_NARROW, _DEPTHWISE, 2, _narrow_depthwise),
    *_products("matmul_integer_to_float int8, a scale per 128 of K", _BLOCKED, 1, _blocked_scales),
    *_products("matmul_nbits 4 bits block_size=32, one row", _ONE_ROW, 2, _nbits),
    *_products("matmul_nbits 4 bits block_size=32", _MANY_ROWS, 2, _nbits),
    *_products("matmul_nbits 4 bits block_size=32, one row, constant weights", _ONE_ROW[::2], 1, _nbits, True),
]

TABLE = Table("Contractions", (ONNX_RUNTIME, FLOAT32, QWIX), ROWS, off_cpu=(BFLOAT16,), throughput="TOP/s")
