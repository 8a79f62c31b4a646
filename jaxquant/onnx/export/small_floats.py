"""ONNX nodes of float8, float4 and float8_e8m0fnu, and of scales that are powers of two.

The graph holds float4 as float8_e4m3fn and float8_e8m0fnu as float32. Each has all numbers of the narrower type, and
ONNX Runtime has kernels of neither. In the form "qdq" constant weights keep their own types, because other
runtimes read them: see `write_native`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._arrays import scale_rules
from ..._core import dtypes
from . import values
from .elementwise import apply_operator, cast_value, choose, make_scalar, write_is_finite, write_operator
from .graph import ModelGraph, WriterCall, writes_mark
from .values import UnsupportedError, Value

# The first opsets in which ONNX's operators have a type.
_FLOAT4_OPSET, _E8M0_OPSET = 23, 24
_DIGITS = 1 << 23  # the lowest bit of a float32's exponent
# The power of two of each exponent field of a normal float32.
_POWERS = np.exp2(np.arange(256, dtype=np.float64) - 127).clip(0, np.finfo(np.float32).max).astype(np.float32)


@writes_mark("decode_small_float")
def write_decoded(graph: ModelGraph, call: WriterCall) -> Value:
    """Write the conversion of a small float to float32."""
    return cast_value(graph, call.parameters["value"], np.float32)


@writes_mark("encode_small_float")
def write_small_float(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a conversion of float32 to a small float."""
    p = call.parameters
    return encode(graph, p["value"], np.dtype(p["dtype"]), is_saturated=p["saturate"])


@writes_mark("encode_ties_toward_zero")
def write_ties_toward_zero(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a conversion of float32 to float4 with ties rounded toward zero."""
    return _encode_float4(graph, call.parameters["value"], is_even=False)


def encode(graph: ModelGraph, x: Value, dtype: np.dtype, *, is_saturated: bool) -> Value:
    """Return float32 values in a float8 or float4 dtype, rounded half to even."""
    check_opset(graph, dtype, x.hint)
    if dtype in dtypes.FLOAT4:
        return _encode_float4(graph, x, is_even=True)
    name = graph.add("Cast", [graph.store(x)], to=values.derive_element_type(dtype), saturate=int(is_saturated))
    return Value(x.shape, dtype, name)


def check_opset(graph: ModelGraph, dtype: np.dtype, hint: str | None) -> None:
    """Raise if the opset has no type in which the graph holds a dtype."""
    if values.choose_container(dtype) in dtypes.FLOAT8 and graph.opset < values.FLOAT8_OPSET:
        name = f" of {hint}" if hint else ""
        raise UnsupportedError(
            f"the {dtype} codes{name} need opset {values.FLOAT8_OPSET} or later, got opset {graph.opset}"
        )


def _encode_float4(graph: ModelGraph, x: Value, *, is_even: bool) -> Value:
    """Return float32 values as float4, which saturates; NaN becomes -0."""
    # A tiny negative number rounds to -0. ONNX Runtime's Where may turn a -0 itself into 0.
    nan = write_operator(graph, "IsNaN", [x], np.bool_)
    x = choose(graph, nan, make_scalar(-(2.0**-64), np.float32), x)
    x = write_operator(graph, "Clip", [x, make_scalar(-6, np.float32), make_scalar(6, np.float32)], np.float32)
    size = apply_operator(graph, "Abs", [x])
    # The distance of neighboring numbers: 0.5 below 2, 1 below 4, and 2 above. All products are exact.
    step: Value = make_scalar(2, np.float32)
    for limit, distance in ((4, 1), (2, 0.5)):
        is_below = apply_operator(graph, "Less", [size, make_scalar(limit, np.float32)], np.bool_)
        step = choose(graph, is_below, make_scalar(distance, np.float32), step)
    if is_even:
        count = apply_operator(graph, "Round", [apply_operator(graph, "Div", [x, step])])
    else:
        half = apply_operator(graph, "Sub", [apply_operator(graph, "Div", [size, step]), make_scalar(0.5, np.float32)])
        # Abs, because Ceil makes -0 of what is above -1. The reciprocal has the sign of a zero.
        count = apply_operator(graph, "Abs", [apply_operator(graph, "Ceil", [half])])
        reciprocal = apply_operator(graph, "Div", [make_scalar(1, np.float32), x])
        is_negative = apply_operator(graph, "Less", [reciprocal, make_scalar(0, np.float32)], np.bool_)
        sign = choose(graph, is_negative, make_scalar(-1, np.float32), make_scalar(1, np.float32))
        count = apply_operator(graph, "Mul", [count, sign])
    return cast_value(graph, apply_operator(graph, "Mul", [count, step]), np.dtype(jnp.float4_e2m1fn))


# Powers of two.


@writes_mark("round_to_power_of_two")
def write_power_above(graph: ModelGraph, call: WriterCall) -> Value:
    """Write the least power of two that is not less than a positive number."""
    return _write_power_field(graph, call.parameters["scale"], scale_rules.PowerForm(False, _DIGITS - 1, 0, 254))


@writes_mark("compute_power")
def write_power(graph: ModelGraph, call: WriterCall) -> Value:
    """Write the power of two of a rule."""
    p = call.parameters
    form = scale_rules.describe_power(p["rule"], np.dtype(p["codes"]), np.dtype(p["dtype"]))
    power = _write_power_field(graph, p["scale"] if form.is_quotient else p["largest"], form)
    return choose(graph, write_is_finite(graph, p["scale"]), power, p["scale"])


@writes_mark("encode_e8m0")
def write_e8m0(graph: ModelGraph, call: WriterCall) -> Value:
    """Write nothing but the NaN that an infinity becomes: the graph holds these powers as float32."""
    power = call.parameters["power"]
    result = choose(graph, write_is_finite(graph, power), power, make_scalar(np.nan, np.float32))
    return result._replace(dtype=values.choose_container(dtypes.E8M0))


@writes_mark("round_up_to_half")
def write_half_above(graph: ModelGraph, call: WriterCall) -> Value:
    """Write the least number of float16 or bfloat16 that is not less than a positive number."""
    scale, dtype = call.parameters["scale"], np.dtype(call.parameters["dtype"])
    nearest = cast_value(graph, cast_value(graph, scale, dtype), np.float32)
    # One unit in the last place more is between 1/2 and 1 of eps times the number. So these sums are within half a unit
    # of the next number: the first of normal numbers, the second, which is exact, of subnormal ones.
    info = jnp.finfo(dtype)
    part = apply_operator(graph, "Mul", [nearest, make_scalar(1 + 0.625 * float(info.eps), np.float32)])
    step = apply_operator(graph, "Add", [nearest, make_scalar(float(info.smallest_subnormal), np.float32)])
    following = cast_value(graph, cast_value(graph, apply_operator(graph, "Max", [part, step]), dtype), np.float32)
    is_less = apply_operator(graph, "Less", [nearest, scale], np.bool_)
    return cast_value(graph, choose(graph, is_less, following, nearest), dtype)


def _write_power_field(graph: ModelGraph, x: Value, form: scale_rules.PowerForm) -> Value:
    """Return the power of two whose exponent field a form finds in positive normal numbers; others stay as they are."""
    is_finite = write_is_finite(graph, x)
    number = choose(graph, is_finite, x, make_scalar(1, np.float32))
    # The rounded logarithm is the field or a neighbor of it, whatever the last bits of Log are. Comparisons with the
    # least numbers of two fields find the exact one.
    factor = make_scalar(1 / np.log(2), np.float32)
    logarithm = apply_operator(graph, "Mul", [apply_operator(graph, "Log", [number]), factor])
    guess = apply_operator(graph, "Add", [apply_operator(graph, "Round", [logarithm]), make_scalar(127, np.float32)])
    guess = write_operator(graph, "Clip", [guess, make_scalar(1, np.float32), make_scalar(254, np.float32)], np.float32)
    index = cast_value(graph, guess, np.int64)
    field = apply_operator(graph, "Sub", [index, make_scalar(1, np.int64)])
    bits = np.arange(256, dtype=np.int64) * _DIGITS - form.added
    starts = bits.clip(0, 0x7F800000).astype(np.int32).view(np.float32)
    for table in (starts, np.append(starts[1:], np.float32(np.inf))):
        start = _look_up(graph, table, index)
        is_reached = apply_operator(graph, "GreaterOrEqual", [number, start], np.bool_)
        field = apply_operator(graph, "Add", [field, cast_value(graph, is_reached, np.int64)])
    powers = _POWERS[(np.arange(256) - form.lowered).clip(1, form.most)]
    return choose(graph, is_finite, _look_up(graph, powers, field), x)


def _look_up(graph: ModelGraph, table: np.ndarray, index: Value) -> Value:
    return Value(index.shape, table.dtype, graph.add("Gather", [graph.add_constant(table), graph.store(index)], axis=0))


# Weights in the types that ONNX has for them.


def write_native(graph: ModelGraph, codes: Value, scale: Value, layout: Any, shape: Sequence[Any]) -> Value | None:
    """Return constant small floats times their scale as DequantizeLinear, or None if the opset has no such types.

    Only the form "qdq" has them. ONNX Runtime has no kernels for float4 and for blocks of small floats.
    """
    dtype = np.dtype(codes.dtype)
    if graph.form != "qdq" or not codes.is_known or dtype not in dtypes.SMALL_FLOATS or layout is None:
        return None
    needed = max(
        _FLOAT4_OPSET if dtype in dtypes.FLOAT4 else values.FLOAT8_OPSET,
        21 if layout.block else values.FLOAT8_OPSET,
        _E8M0_OPSET if scale.is_known and scale.dtype == dtypes.E8M0 else 0,
    )  # fmt: skip
    if graph.opset < needed:
        return None
    if scale.is_known:
        array = np.asarray(scale.array).reshape(layout.shape)
        name = graph.add_constant(array, scale.hint)
    else:
        if scale.dtype != dtypes.FLOAT32:
            return None
        name = graph.reshape(graph.store(scale), layout.shape)
    stored = graph.add_constant(np.broadcast_to(np.asarray(codes.array), tuple(shape)), codes.hint)
    is_e8m0 = scale.dtype == dtypes.E8M0
    output_dtype = values.derive_element_type(np.float32) if is_e8m0 else None
    name = graph.add(
        "DequantizeLinear", [stored, name], axis=layout.axis, block_size=layout.block or None,
        output_dtype=output_dtype,
    )  # fmt: skip
    return Value(tuple(shape), np.dtype(np.float32), name)
