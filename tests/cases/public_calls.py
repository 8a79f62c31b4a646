"""A valid call of each public function, by argument names, for tests that replace one argument by an invalid one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxquant as jq
from jaxquant import checkpoint

F, U8, I8, I32 = np.float32, np.uint8, np.int8, np.int32


class Call(NamedTuple):
    """A function, valid arguments for it, and their kinds.

    Attributes:
        name: the function's, as its errors give it.
        function: takes every argument by name.
        arguments: good ones.
        operands: the names of arrays that are neither scales nor zero points.
        parts: the names of the scales and zero points among them.
        dtypes: the names of arguments that are dtypes.
    """

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    operands: tuple[str, ...]
    parts: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    def spoiled(self, **changes: Any) -> Any:
        """Return the call with other arguments."""
        return self.function(**{**self.arguments, **changes})


def ones(dtype: Any, *shape: int) -> Any:
    """Return ones, or a numpy scalar without a shape."""
    return np.ones(shape, dtype)[()]


def einsum(operands_0: Any, operands_1: Any, **statics: Any) -> Any:
    return jq.einsum("ij,jk->ik", operands_0, operands_1, **statics)


def quantized_einsum(operands_0: Any, operands_1: Any, **statics: Any) -> Any:
    specs = (statics.pop("specs_0"), statics.pop("specs_1"))
    return jq.quantized_einsum("ij,jk->ik", operands_0, operands_1, specs=specs, **statics)


def quantize(range_0: Any, range_1: Any, **arguments: Any) -> Any:
    return jq.quantize(**arguments, range=(range_0, range_1))


def calls() -> list[Call]:
    """Return the calls. They quantize, so they are not built on import."""
    return [*elementwise(), *integer_operators(), *on_codes(), *over_arrays(), *trained(), *others()]


X, CODES = ones(F, 4, 6), ones(I8, 4, 6)
A, B = ones(U8, 4, 6), ones(I8, 6, 5)
IMAGES, KERNEL = ones(U8, 2, 4, 7, 9), ones(I8, 6, 4, 3, 3)
DOT = (((1,), (0,)), ((), ()))
RAGGED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])


def elementwise() -> list[Call]:
    codes = {"src": CODES, "scales": ones(F), "zps": ones(I8)}
    return [
        Call("quantize_linear", jq.quantize_linear, {"x": X, "y_scale": ones(F), "y_zero_point": ones(U8)}, ("x",),
             ("y_scale", "y_zero_point"), ("output_dtype", "precision")),
        Call("dequantize_linear", jq.dequantize_linear, {"x": CODES, "x_scale": ones(F), "x_zero_point": ones(I8)},
             ("x",), ("x_scale", "x_zero_point"), ("output_dtype",)),
        Call("fake_quantize_linear", jq.fake_quantize_linear, {"x": X, "scale": ones(F), "zero_point": ones(U8)},
             ("x",), ("scale", "zero_point"), ("dtype",)),
        Call("dynamic_quantize_linear", jq.dynamic_quantize_linear, {"x": X}, ("x",), (), ("dtype",)),
        Call("dynamic_fake_quantize_linear", jq.dynamic_fake_quantize_linear, {"x": X}, ("x",), (), ("dtype",)),
        Call("onednn.quantize", jq.onednn.quantize, {**codes, "src": X}, ("src",), ("scales", "zps"), ("dtype",)),
        Call("onednn.dynamic_quantize", jq.onednn.dynamic_quantize, {**codes, "src": X}, ("src",), ("scales", "zps"),
             ("dtype",)),
        Call("onednn.dequantize", jq.onednn.dequantize, codes, ("src",), ("scales", "zps")),
        Call("onednn.dynamic_dequantize", jq.onednn.dynamic_dequantize, codes, ("src",), ("scales", "zps")),
    ]  # fmt: skip


def integer_operators() -> list[Call]:
    points = {"a_zero_point": ones(U8), "b_zero_point": ones(I8)}
    sides = {"lhs_zero_point": ones(U8), "rhs_zero_point": ones(I8)}
    windows = {"window_strides": (1, 1), "padding": "VALID"}
    result = {"y_scale": ones(F), "y_zero_point": ones(U8)}
    images = {"x_zero_point": ones(U8), "w_zero_point": ones(I8)}
    scales = {"a_scale": ones(F), "b_scale": ones(F)}
    return [
        Call("matmul_integer", jq.matmul_integer, {"a": A, "b": B, **points}, ("a", "b"), tuple(points)),
        Call("ops.matmul_integer_to_float", jq.ops.matmul_integer_to_float,
             {"a": A, "b": B, **scales, **points, "bias": ones(F, 5)}, ("a", "b", "bias"), (*scales, *points)),
        Call("qlinear_matmul", jq.qlinear_matmul, {"a": A, "b": B, **scales, **points, **result,
              "bias": ones(I32, 5)}, ("a", "b", "bias"), (*scales, *points, *result)),
        Call("ops.dynamic_quantize_matmul", jq.ops.dynamic_quantize_matmul,
             {"a": X, "b": B, "b_scale": ones(F), "b_zero_point": ones(I8), "bias": ones(F, 5)}, ("a", "b", "bias"),
             ("b_scale", "b_zero_point")),
        Call("ops.matmul_nbits", jq.ops.matmul_nbits,
             {"a": ones(F, 3, 40), "b": ones(U8, 5, 2, 16), "scales": ones(F, 5, 2), "zero_points": ones(U8, 5, 1),
              "bias": ones(F, 5), "K": 40, "N": 5}, ("a", "b", "bias"), ("scales", "zero_points")),
        Call("ops.gather_block_quantized", jq.ops.gather_block_quantized,
             {"data": ones(U8, 5, 16), "indices": ones(I32, 3), "scales": ones(F, 5, 2), "zero_points": ones(U8, 5, 1),
              "block_size": 16}, ("data", "indices"), ("scales", "zero_points")),
        Call("conv_integer", jq.conv_integer, {"x": IMAGES, "w": KERNEL, **images}, ("x", "w"), tuple(images)),
        Call("qlinear_conv", jq.qlinear_conv,
             {"x": IMAGES, "w": KERNEL, "x_scale": ones(F), "w_scale": ones(F), **images, **result,
              "b": ones(I32, 6)}, ("x", "w", "b"), ("x_scale", "w_scale", *images, *result)),
        Call("integer.dot_general", jq.integer.dot_general,
             {"lhs": A, "rhs": B, "dimension_numbers": DOT, **sides}, ("lhs", "rhs"), tuple(sides)),
        Call("integer.conv_general_dilated", jq.integer.conv_general_dilated,
             {"lhs": IMAGES, "rhs": KERNEL, **windows, **sides}, ("lhs", "rhs"), tuple(sides)),
    ]  # fmt: skip


def on_codes() -> list[Call]:
    """Return calls of ONNX Runtime's operators that take and give 8-bit codes."""

    def affine(*prefixes: str) -> dict[str, Any]:
        return {f"{p}_{part}": ones(F if part == "scale" else U8) for p in prefixes for part in ("scale", "zero_point")}

    one, two, codes = affine("x", "y"), affine("a", "b", "c"), ones(U8, 4, 6)
    images = ones(U8, 2, 4, 7, 9)

    def concat(y_scale: Any, y_zero_point: Any, **inputs: Any) -> Any:
        return jq.ops.qlinear_concat(y_scale, y_zero_point, *(inputs[f"inputs_{i}"] for i in range(6)), axis=0)

    joined = {**affine("y"), "inputs_1": ones(F), "inputs_2": ones(U8), "inputs_4": ones(F), "inputs_5": ones(U8)}
    return [
        Call("ops.qlinear_add", jq.ops.qlinear_add, {"a": codes, "b": codes, **two}, ("a", "b"), tuple(two)),
        Call("ops.qlinear_mul", jq.ops.qlinear_mul, {"a": codes, "b": codes, **two}, ("a", "b"), tuple(two)),
        Call("ops.qlinear_where", jq.ops.qlinear_where,
             {"condition": np.ones((4, 6), bool), "x": codes, "y": codes, **one, **affine("z")}, ("x", "y"),
             (*one, *affine("z"))),
        Call("ops.qlinear_concat", concat, {"inputs_0": codes, "inputs_3": codes, **joined}, ("inputs_0", "inputs_3"),
             tuple(joined)),
        *(Call(f"ops.{name}", getattr(jq.ops, name), {"x": codes, **one}, ("x",), tuple(one))
          for name in ("qlinear_sigmoid", "qlinear_leaky_relu", "qlinear_softmax")),
        Call("ops.qlinear_average_pool", functools.partial(jq.ops.qlinear_average_pool, kernel_shape=(2, 2)),
             {"x": images, **one}, ("x",), tuple(one)),
        Call("ops.qlinear_global_average_pool", jq.ops.qlinear_global_average_pool, {"x": images, **one}, ("x",),
             tuple(one)),
        Call("ops.qlinear_reduce_mean", jq.ops.qlinear_reduce_mean, {"data": codes, **affine("data", "reduced")},
             ("data",), tuple(affine("data", "reduced"))),
    ]  # fmt: skip


def quantized(dtype: Any, *shape: int, fill: int = 1) -> jq.QuantizedArray:
    """Return a quantized array with equal codes, without compiling a program."""
    return jq.QuantizedArray(np.full(shape, fill, dtype), np.full((1,) * len(shape), 0.5, F))


def over_arrays() -> list[Call]:
    left, right = quantized(I8, 4, 6), quantized(I8, 6, 5)
    images, kernel = quantized(I8, 2, 4, 7, 9), quantized(I8, 6, 4, 3, 3)
    windows = {"window_strides": (1, 1), "padding": "VALID"}
    preferred = ("preferred_element_type",)
    both = ("lhs", "rhs")
    return [
        Call("quantize", quantize, {"x": X, "spec": jq.QuantSpec(I8), "range_0": ones(F), "range_1": ones(F)}, ("x",),
             ("range_0", "range_1")),
        Call("quantization_error", jq.quantization_error, {"x": X, "q": left}, ("x", "q")),
        Call("onnx_view", jq.onnx_view, {"q": left}, ("q",)),
        Call("from_onnx", jq.from_onnx, {"x": CODES, "x_scale": ones(F), "x_zero_point": ones(I8)}, ("x",),
             ("x_scale", "x_zero_point"), ("output_dtype",)),
        Call("take", jq.take, {"q": left, "indices": ones(I32, 3)}, ("q", "indices")),
        Call("matmul", jq.matmul, {"lhs": left, "rhs": right}, both, (), preferred),
        Call("dot_general", jq.dot_general, {"lhs": left, "rhs": right, "dimension_numbers": DOT}, both, (), preferred),
        Call("ragged_dot", jq.ragged_dot, {"lhs": left, "rhs": quantized(I8, 3, 6, 5), "group_sizes": ones(I32, 3)},
             (*both, "group_sizes"), (), preferred),
        Call("ragged_dot_general", jq.ragged_dot_general,
             {"lhs": left, "rhs": quantized(I8, 3, 6, 5), "group_sizes": ones(I32, 3),
              "ragged_dot_dimension_numbers": RAGGED}, (*both, "group_sizes"), (), preferred),
        Call("einsum", einsum, {"operands_0": left, "operands_1": right}, ("operands_0", "operands_1"), (), preferred),
        Call("conv_general_dilated", jq.conv_general_dilated, {"lhs": images, "rhs": kernel, **windows}, both, (),
             preferred),
        *to_codes(left, images),
    ]  # fmt: skip


def to_codes(table: jq.QuantizedArray, images: jq.QuantizedArray) -> list[Call]:
    """Return calls of the functions over quantized arrays whose results are codes."""
    q, pool = {"q": table}, {"q": images, "window_shape": (2, 2)}
    return [
        *(Call(f"codes.{name}", getattr(jq.codes, name), {"a": table, "b": table, "output": table},
               ("a", "b", "output"))
          for name in ("add", "multiply")),
        Call("codes.relu", jq.codes.relu, q, ("q",)),
        Call("codes.max_pool", jq.codes.max_pool, pool, ("q",)),
        Call("codes.average_pool", jq.codes.average_pool, {**pool, "output": images}, ("q", "output")),
        Call("codes.mean", jq.codes.mean, {**q, "output": table}, ("q", "output")),
        Call("codes.reshape", jq.codes.reshape, {**q, "shape": (6, 4)}, ("q",)),
        Call("codes.transpose", jq.codes.transpose, q, ("q",)),
        Call("codes.pad", jq.codes.pad, {**q, "pad_width": 1}, ("q",)),
        Call("codes.quantize_bias", jq.codes.quantize_bias,
             {"bias": ones(F, 5), "lhs_scale": ones(F), "rhs_scale": ones(F, 5)}, ("bias",),
             ("lhs_scale", "rhs_scale")),
    ]  # fmt: skip


def trained() -> list[Call]:
    spec = jq.QuantSpec(I8)
    specs = {"lhs_spec": spec, "rhs_spec": spec}
    windows = {"window_strides": (1, 1), "padding": "VALID"}
    preferred = ("preferred_element_type",)
    both = ("lhs", "rhs")
    given = {"spec": jq.QuantSpec(U8), "scale": ones(F), "zero_point": ones(U8)}
    return [
        Call("fake_quantize", jq.fake_quantize, {"x": X, **given}, ("x",), ("scale", "zero_point")),
        Call("Quantizer", lambda x, **parts: jq.Quantizer(**parts)(x), {"x": X, **given}, ("x",),
             ("scale", "zero_point")),
        Call("quantized_dot_general", jq.quantized_dot_general,
             {"lhs": X, "rhs": ones(F, 6, 5), "dimension_numbers": DOT, **specs}, both, (), preferred),
        Call("quantized_einsum", quantized_einsum,
             {"operands_0": X, "operands_1": ones(F, 6, 5), "specs_0": spec, "specs_1": spec},
             ("operands_0", "operands_1"), (), preferred),
        Call("quantized_conv_general_dilated", jq.quantized_conv_general_dilated,
             {"lhs": ones(F, 2, 4, 7, 9), "rhs": ones(F, 6, 4, 3, 3), **windows, **specs}, both, (), preferred),
    ]  # fmt: skip


def calibrator(factory: Any) -> Any:
    """Call `update` by the names of its arguments, with an empty state."""
    spec = jq.QuantSpec(I8)
    made = factory(spec, 99.0) if factory is jq.calibration.percentile else factory(spec)
    return lambda batch: made.update(made.init(X), batch)


def others() -> list[Call]:
    factories = (
        jq.calibration.minmax,
        jq.calibration.absmax,
        jq.calibration.moving_average,
        jq.calibration.percentile,
        jq.calibration.mse,
        jq.calibration.entropy,
    )
    parts = {"scale": ones(F, 1, 1), "zero_point": ones(I8, 1, 1)}
    return [
        *(Call(f"calibration.{f.__name__}.update", calibrator(f), {"batch": X}, ("batch",)) for f in factories),
        Call("QuantizedArray.dequantize", lambda codes, **parts: jq.QuantizedArray(codes, **parts).dequantize(),
             {"codes": CODES, **parts}, ("codes",), ("scale", "zero_point"), ("dtype",)),
        Call("checkpoint.pack", checkpoint.pack, {"values": CODES}, ("values",)),
        Call("checkpoint.unpack", checkpoint.unpack, {"packed": ones(U8, 12), "dtype": jnp.int4, "shape": (4, 6)},
             ("packed",), (), ("dtype",)),
    ]  # fmt: skip


def has(call: Call, argument: str) -> bool:
    """Return whether a function has a parameter of this name."""
    function = {einsum: jq.einsum, quantized_einsum: jq.quantized_einsum, quantize: jq.quantize}.get(
        call.function, call.function
    )
    return argument in inspect.signature(function).parameters
