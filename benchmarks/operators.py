"""The rows on element-wise operators.

A row is one function that returns a Contest, and one line in ROWS. jaxquant's functions are called as users call them,
outside of jit unless the row says otherwise. "plain JAX" is the same computation without the library, under jit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

from . import inputs
from . import onnxruntime_models as models
from .contest import ONNX_RUNTIME, PLAIN, Contest, Missing, Row, Table

_SIZES = (64, 256, 1024, 4096)
_LARGE = (1024, 4096)
_COMPILED_AT = 1024
_NO_OPERATOR = Missing("no such operator")


def _quantize(size: int, dtype: str, axis: int | None, jitted: bool = False) -> Contest:
    scale, zero_point = inputs.parameters(() if axis is None else (size,), dtype)
    x = inputs.near_ties((size, size), inputs.along(scale, axis), dtype)
    arguments = jax.device_put((x, scale, zero_point))
    ours = partial(jq.quantize_linear, axis=axis or 0)
    if jitted:
        ours = jax.jit(ours)
    plain = _plain_quantize(inputs.along(scale, axis), inputs.along(zero_point, axis), dtype)
    onnx = models.single_node("QuantizeLinear", {"x": x}, {"scale": scale, "zero_point": zero_point}, axis=axis or 0)
    opponents = {ONNX_RUNTIME: onnx, PLAIN: partial(plain, arguments[0])}
    return Contest(partial(ours, *arguments), opponents, onnx, x.nbytes)


def _quantize_lower_bound(size: int) -> Contest:
    """Return a contest with the simplest program that reads float32 and writes int8: a bound for every formula."""
    contest = _quantize(size, "int8", None)
    x = jax.device_put(inputs.finite((size, size)))
    convert = jax.jit(lambda x: x.astype(jnp.int8))
    opponents = {**contest.opponents, PLAIN: partial(convert, x)}
    return dataclasses.replace(contest, opponents=opponents, unlike=frozenset({PLAIN}))


def _plain_quantize(s: Any, z: Any, dtype: str) -> Callable[[jax.Array], jax.Array]:
    low, high = inputs.bounds(dtype)
    return jax.jit(lambda x: jnp.clip(jnp.round(x / s) + z.astype(jnp.float32), low, high).astype(dtype))


def _quantize_blocked(size: int, block_size: int) -> Contest:
    scale, zero_point = inputs.parameters((size, size // block_size), jnp.int4)
    x = inputs.near_ties((size, size), np.repeat(scale, block_size, axis=1), jnp.int4)
    arguments = jax.device_put((x, scale, zero_point))

    @jax.jit
    def plain(x: jax.Array, s: jax.Array, z: jax.Array) -> jax.Array:
        steps = jnp.round(x.reshape(size, -1, block_size) / s[..., None]) + z.astype(jnp.float32)[..., None]
        return jnp.clip(steps, -8, 7).astype(jnp.int4).reshape(size, size)

    onnx, widened = models.blocked_int4(x, scale, zero_point, block_size)
    ours = partial(jq.quantize_linear, *arguments, axis=1, block_size=block_size)
    return Contest(ours, {ONNX_RUNTIME: onnx, PLAIN: partial(plain, *arguments)}, widened, x.nbytes)


def _dynamic_quantize(size: int) -> Contest:
    x = inputs.finite((size, size))
    argument = jax.device_put(x)

    @jax.jit
    def plain(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        low, high = jnp.minimum(x.min(), 0), jnp.maximum(x.max(), 0)
        s = (high - low) / 255
        z = jnp.clip(jnp.round(-low / s), 0, 255)
        return jnp.clip(jnp.round(x / s) + z, 0, 255).astype(jnp.uint8), s, z.astype(jnp.uint8)

    onnx = models.single_node("DynamicQuantizeLinear", {"x": x}, {}, outputs=("y", "y_scale", "y_zero_point"))
    opponents = {ONNX_RUNTIME: onnx, PLAIN: partial(plain, argument)}
    return Contest(partial(jq.dynamic_quantize_linear, argument), opponents, onnx, x.nbytes)


def _dequantize_fused(size: int) -> Contest:
    q, scale, zero_point, x = _codes(size)
    quantized, s, z, values = jax.device_put((q, scale, zero_point, x))
    ours = jax.jit(lambda q, s, z: jax.nn.relu(jq.dequantize_linear(q, s, z)) + 1.0)
    plain = jax.jit(lambda x: jax.nn.relu(x) + 1.0)
    opponents = {ONNX_RUNTIME: Missing("not measured"), PLAIN: partial(plain, values)}
    return Contest(partial(ours, quantized, s, z), opponents, lambda: np.maximum(x, 0) + np.float32(1), q.nbytes)


def _dequantize_alone(size: int) -> Contest:
    q, scale, zero_point, x = _codes(size)
    quantized, s, z, values = jax.device_put((q, scale, zero_point, x))
    onnx = models.single_node("DequantizeLinear", {"x": q}, {"scale": scale, "zero_point": zero_point})
    # x + 1 only shows the time that an output of this size takes. Its numbers are not compared.
    opponents = {ONNX_RUNTIME: onnx, PLAIN: partial(jax.jit(lambda x: x + 1), values)}
    ours = partial(jq.dequantize_linear, quantized, s, z)
    return Contest(ours, opponents, onnx, q.nbytes, unlike=frozenset({PLAIN}))


def _codes(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    scale, zero_point = inputs.parameters((), "uint8")
    q = inputs.codes((size, size), "uint8")
    return q, scale, zero_point, inputs.decoded(q, scale, zero_point)


def _fake_quantize(size: int) -> Contest:
    x, scale, zero_point = _trained(size)
    arguments = jax.device_put((x, scale, zero_point))
    opponents = {ONNX_RUNTIME: _NO_OPERATOR, PLAIN: partial(jax.jit(_straight_through), *arguments)}

    def expected() -> np.ndarray:
        q, _ = inputs.encoded(np.rint(x / scale) + zero_point.astype(np.float32), "int8")
        return inputs.decoded(q, scale, zero_point)

    return Contest(partial(jq.fake_quantize_linear, *arguments), opponents, expected, x.nbytes)


def _fake_quantize_gradient(size: int, argnums: tuple[int, ...]) -> Contest:
    x, scale, zero_point = _trained(size)
    g = inputs.finite(x.shape)
    arguments = jax.device_put((x, scale, zero_point, g))

    def step(fake: Callable[..., jax.Array]) -> Callable[[], Any]:
        loss = jax.value_and_grad(lambda x, s, z, g: jnp.vdot(fake(x, s, z), g), argnums)
        return partial(jax.jit(loss), *arguments)

    def expected() -> np.ndarray:
        _, inside = inputs.encoded(np.rint(x / scale) + zero_point.astype(np.float32), "int8")
        return np.where(inside, g, np.float32(0))

    opponents = {ONNX_RUNTIME: _NO_OPERATOR, PLAIN: step(_straight_through)}
    # The last bits of the loss and of the scale's gradient depend on the order of sums: compare only the gradient of x.
    return Contest(step(jq.fake_quantize_linear), opponents, expected, x.nbytes + g.nbytes, compared=lambda r: r[1][0])


def _trained(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scale, zero_point = inputs.parameters((), "int8")
    return inputs.near_ties((size, size), scale, "int8"), scale, zero_point


def _straight_through(x: jax.Array, s: jax.Array, z: jax.Array) -> jax.Array:
    steps = z.astype(jnp.float32)
    inner = jnp.clip(x / s, -128 - steps, 127 - steps)
    return (inner + jax.lax.stop_gradient(jnp.round(inner) - inner)) * s


def _onednn_quantize(size: int) -> Contest:
    scale, zero_point = inputs.parameters((), "uint8")
    x = inputs.near_ties((size, size), scale, "uint8")
    arguments = jax.device_put((x, scale, zero_point))
    plain = jax.jit(lambda x, s, z: jnp.clip(jnp.round(x * (1 / s) + z.astype(jnp.float32)), 0, 255).astype(jnp.uint8))

    def expected() -> np.ndarray:
        steps = x * (np.float32(1) / scale) + zero_point.astype(np.float32)
        return inputs.encoded(np.rint(steps), "uint8")[0]

    opponents = {ONNX_RUNTIME: _NO_OPERATOR, PLAIN: partial(plain, *arguments)}
    return Contest(partial(jq.onednn.quantize, *arguments), opponents, expected, x.nbytes)


def _onednn_grouped(size: int, group: int) -> Contest:
    scale, zero_point = inputs.parameters((size, size // group), jnp.int4)
    scale = scale.astype(np.float16)
    q = inputs.codes((size, size), jnp.int4)
    arguments = jax.device_put((q, scale, zero_point))

    @jax.jit
    def plain(q: jax.Array, s: jax.Array, z: jax.Array) -> jax.Array:
        grouped = q.reshape(size, -1, group).astype(s.dtype)
        return ((grouped - z[..., None].astype(s.dtype)) * s[..., None]).reshape(size, size)

    def expected() -> np.ndarray:
        wide_scale, wide_zero_point = (np.repeat(p, group, axis=1) for p in (scale, zero_point))
        return inputs.decoded(q, wide_scale, wide_zero_point).astype(np.float16)

    opponents = {ONNX_RUNTIME: _NO_OPERATOR, PLAIN: partial(plain, *arguments)}
    ours = partial(jq.dynamic_dequantize, *arguments, qtype="per_group", group_shape=(1, group))
    return Contest(ours, opponents, expected, q.nbytes)


# For each of ONNX Runtime's operators on codes: the order of its arguments, the factor of the result's scale that
# spreads the codes, the float32 operation, and the attributes.
_ON_CODES: dict[str, tuple[str, float, Callable[..., jax.Array], dict[str, Any]]] = {
    "add": ("a b y", 2.0, lambda a, b: a + b, {}),
    "mul": ("a b y", 3.0, lambda a, b: a * b, {}),
    "where": ("c a b y", 1.0, lambda c, a, b: jnp.where(c, a, b), {}),
    "concat": ("y a b", 1.0, lambda a, b: jnp.concatenate([a, b]), {"axis": 0}),
    "sigmoid": ("a y", 0.1, jax.nn.sigmoid, {}),
    "leaky_relu": ("a y", 1.0, partial(jax.nn.leaky_relu, negative_slope=0.1), {"alpha": 0.1}),
    "softmax": ("a y", 0.1, jax.nn.softmax, {"axis": -1, "opset": 13}),
    "average_pool": (
        "a y", 0.5, lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 1, 3, 3), (1, 1, 2, 2), "VALID") / 9,
        {"kernel_shape": (3, 3), "strides": (2, 2)},
    ),
    "global_average_pool": ("a y", 0.1, lambda x: x.mean((2, 3), keepdims=True), {}),
}  # fmt: skip


def _on_codes(shape: tuple[int, ...], name: str) -> Contest:
    """Return a contest of one operator on uint8; plain JAX dequantizes, computes in float32 and quantizes."""
    order, factor, compute, attributes = _ON_CODES[name]
    scale, zero_point = inputs.parameters((3,), "uint8")
    scale = scale * np.array([1, 1, factor], np.float32)
    constants: dict[str, np.ndarray] = {}
    for i, tensor in enumerate("aby"):
        if tensor in order.split():
            constants |= {f"{tensor}_scale": scale[i], f"{tensor}_zero_point": zero_point[i]}
    arrays = {t: inputs.codes(shape, "uint8", seed) for t, seed in (("a", 4), ("b", 5)) if t in order.split()}
    if "c" in order.split():
        arrays = {"c": inputs.codes(shape, "uint8", 6) > 127, **arrays}
    names = [n for t in order.split() for n in (t, f"{t}_scale", f"{t}_zero_point") if n in {**arrays, **constants}]
    operator = "QLinear" + "".join(part.title() for part in name.split("_"))
    onnx = models.single_node(operator, arrays, constants, domain="com.microsoft", order=names, **attributes)
    given = jax.device_put({**arrays, **constants})

    @jax.jit
    def plain(given: dict[str, jax.Array]) -> jax.Array:
        steps = [given[t] if t == "c" else
                 (given[t].astype(jnp.float32) - given[f"{t}_zero_point"].astype(jnp.float32)) * given[f"{t}_scale"]
                 for t in arrays]  # fmt: skip
        y = jnp.round(compute(*steps) / given["y_scale"]) + given["y_zero_point"].astype(jnp.float32)
        return jnp.clip(y, 0, 255).astype(jnp.uint8)

    ours = partial(getattr(jq.ops, f"qlinear_{name}"), *(given[n] for n in names), **attributes)
    opponents = {ONNX_RUNTIME: onnx, PLAIN: partial(plain, given)}
    return Contest(ours, opponents, onnx, sum(x.nbytes for x in arrays.values()), unlike=frozenset({PLAIN}))


def _reduce_mean(shape: tuple[int, ...]) -> Contest:
    x = inputs.codes(shape, "uint8")
    scale, zero_point = inputs.parameters((2,), "uint8")
    given = jax.device_put((x, scale[0], zero_point[0], scale[1] / 10, zero_point[1]))

    @jax.jit
    def plain(x: jax.Array, s: jax.Array, z: jax.Array, t: jax.Array, w: jax.Array) -> jax.Array:
        mean = ((x.astype(jnp.float32) - z.astype(jnp.float32)) * s).mean(-1)
        return jnp.clip(jnp.round(mean / t) + w.astype(jnp.float32), 0, 255).astype(jnp.uint8)

    def expected() -> np.ndarray:
        total = x.sum(-1, dtype=np.int32) - np.int32(zero_point[0]) * np.int32(shape[-1])
        steps = np.rint(total.astype(np.float32) * (scale[0] / (scale[1] / 10 * np.float32(shape[-1]))))
        return inputs.encoded(steps + zero_point[1].astype(np.float32), "uint8")[0]

    opponents = {ONNX_RUNTIME: Missing("no kernel for CPUs"), PLAIN: partial(plain, *given)}
    ours = partial(jq.ops.qlinear_reduce_mean, *given, axes=(-1,), keepdims=False)
    return Contest(ours, opponents, expected, x.nbytes, unlike=frozenset({PLAIN}))


def _look_up(size: int, block_size: int) -> Contest:
    """Return a contest of as many lookups as a table of 4 bits has rows; plain JAX dequantizes the rows it takes."""
    data, places = inputs.codes((size, size // 2), "uint8"), inputs.codes((size,), "uint8", 7).astype(np.int32)
    scales, _ = inputs.parameters((size, size // block_size), "int8")
    onnx = models.single_node(
        "GatherBlockQuantized", {"data": data, "indices": places, "scales": scales}, {}, domain="com.microsoft",
        bits=4, block_size=block_size,
    )  # fmt: skip
    arguments = jax.device_put((data, places, scales))

    @jax.jit
    def plain(data: jax.Array, places: jax.Array, scales: jax.Array) -> jax.Array:
        stored, steps = data[places], jnp.repeat(scales[places], block_size, axis=1)
        codes = jnp.stack([stored & 15, stored >> 4], -1).reshape(size, size)
        return (codes.astype(jnp.float32) - 8) * steps

    opponents = {ONNX_RUNTIME: onnx, PLAIN: partial(plain, *arguments)}
    ours = partial(jq.ops.gather_block_quantized, *arguments, block_size=block_size)
    return Contest(ours, opponents, onnx, data.nbytes + scales.nbytes)


def _codes_rows() -> list[Row]:
    """Return the rows of the operators on codes: matrices, and images for the poolings."""
    rows = []
    for name in _ON_CODES:
        for size in _LARGE:
            shape = (size // 64, 64, 64, 64) if "pool" in name else (size, size)
            rows.append(Row(f"qlinear_{name} uint8", shape, partial(_on_codes, shape, name), size == _COMPILED_AT))
    rows += [Row("qlinear_reduce_mean uint8", (size, size), partial(_reduce_mean, (size, size))) for size in _LARGE]
    return rows


def _sized(name: str, sizes: tuple[int, ...], build: Callable[..., Contest], *arguments: Any) -> list[Row]:
    return [Row(name, (size, size), partial(build, size, *arguments), size == _COMPILED_AT) for size in sizes]


ROWS = [
    *_sized("quantize_linear int8 per tensor", _SIZES, _quantize, "int8", None),
    *_sized("quantize_linear int8 per tensor, in the user's jit", (64, 256), _quantize, "int8", None, True),
    *_sized("quantize_linear int8 per tensor; plain: only x.astype(int8)", _SIZES, _quantize_lower_bound),
    *_sized("quantize_linear uint8 per tensor", _SIZES, _quantize, "uint8", None),
    *_sized("quantize_linear int8 axis=1", _SIZES, _quantize, "int8", 1),
    *_sized("quantize_linear uint8 axis=1", _SIZES, _quantize, "uint8", 1),
    *_sized("quantize_linear int8 axis=0", _SIZES, _quantize, "int8", 0),
    *_sized("quantize_linear uint8 axis=0", _SIZES, _quantize, "uint8", 0),
    *_sized("quantize_linear int4 block_size=32", _LARGE, _quantize_blocked, 32),
    *_sized("dynamic_quantize_linear uint8", _SIZES, _dynamic_quantize),
    *_sized("dequantize_linear uint8 in relu(.) + 1; plain: the same of float32", _LARGE, _dequantize_fused),
    *_sized("dequantize_linear uint8 alone; plain: x + 1", _LARGE, _dequantize_alone),
    *_sized("fake_quantize_linear int8", _LARGE, _fake_quantize),
    *_sized("fake_quantize_linear int8 value_and_grad of x", _LARGE, _fake_quantize_gradient, (0,)),
    *_sized("fake_quantize_linear int8 value_and_grad of x, scale", _LARGE, _fake_quantize_gradient, (0, 1)),
    *_sized("onednn.quantize uint8 per tensor", _LARGE, _onednn_quantize),
    *_sized("dynamic_dequantize int4 (1, 128) float16", _LARGE, _onednn_grouped, 128),
    *_sized("gather_block_quantized 4 bits block_size=32", _LARGE, _look_up, 32),
    *_codes_rows(),
]

TABLE = Table("Element-wise operators", (ONNX_RUNTIME, PLAIN), ROWS)
