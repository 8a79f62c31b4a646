"""Bad input: each row must raise at trace time, name the function and the argument, and say what was expected and got."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxquant as jq

from ..support import bad_input
from ..support.bad_input import Row

F = np.ones((4, 6), np.float32)
I8 = np.ones((4, 6), np.int8)
S, S4, S6 = np.float32(0.5), np.full(4, 0.5, np.float32), np.full(6, 0.5, np.float32)
Z6 = np.zeros(6, np.int8)
Q, D, Y = jq.quantize_linear, jq.dequantize_linear, jq.dynamic_quantize_linear
FQ, DFQ = jq.fake_quantize_linear, jq.dynamic_fake_quantize_linear
OQ, OD = jq.onednn.quantize, jq.onednn.dequantize
ODQ, ODD = jq.onednn.dynamic_quantize, jq.onednn.dynamic_dequantize
P: Any = functools.partial  # untyped: the rows are wrong on purpose

# name, operator, arrays, exception, argument, what was wanted, what came
ROWS: list[Row] = [
    ("x bool", Q, (F > 0, S), TypeError, "x", "dtype float32, float16, bfloat16 or int32", "bool"),
    ("x complex", Q, (F.astype(np.complex64), S), TypeError, "x", "dtype float32", "complex64"),
    ("x int8", Q, (I8, S), TypeError, "x", "dtype float32", "int8"),
    ("scale int8", Q, (F, np.int8(1)), TypeError, "y_scale", "dtype float32", "int8"),
    ("scale bool", Q, (F, np.bool_(True)), TypeError, "y_scale", "dtype float32", "bool"),
    ("scale int32 for float x", Q, (F, np.int32(1)), TypeError, "y_scale", "a float dtype, or precision=", "int32 with x"),
    ("scale rank 2", Q, (F, np.ones((4, 6), np.float32)), ValueError, "y_scale", "squeeze", r"shape \(4, 6\)"),
    ("scale (1, 1)", Q, (F, np.ones((1, 1), np.float32)), ValueError, "y_scale", "a scalar, a 1-D array", r"\(1, 1\)"),
    ("scale too short", Q, (F, S4), ValueError, "y_scale", r"shape \(6,\) \(x has shape \(4, 6\), axis=1\)", r"\(4,\)"),
    ("axis too large", P(Q, axis=2), (F, S6), ValueError, "axis", r"an integer in \[-2, 1\], because the array has rank 2", "2"),
    ("axis too small", P(Q, axis=-3), (F, S6), ValueError, "axis", r"an integer in \[-2, 1\]", "-3"),
    ("axis of rank 1 x", Q, (F[0], S6), ValueError, "axis", r"an integer in \[-1, 0\]", "1"),
    ("axis of rank 0 x", Q, (S, S6), ValueError, "axis", "an array of rank 1 or more", "rank 0"),
    ("axis float", P(Q, axis=1.0), (F, S6), TypeError, "axis", "an int", "1.0"),
    ("axis bool", P(Q, axis=True), (F, S6), TypeError, "axis", "an int", "True"),
    ("axis list", P(Q, axis=[1]), (F, S6), TypeError, "axis", "a static, hashable value", "list"),
    ("zero point dtype", P(Q, output_dtype=jnp.uint8), (F, S6, Z6), TypeError, "y_zero_point", "dtype uint8", "int8"),
    ("zero point float32", Q, (F, S, np.float32(0)), TypeError, "y_zero_point", "dtype int2", "float32"),
    ("zero point int32", Q, (F, S6, Z6.astype(np.int32)), TypeError, "y_zero_point", "dtype int2", "int32"),
    ("zero point shape", Q, (F, S6, np.int8(0)), ValueError, "y_zero_point", r"shape \(6,\)", r"\(\)"),
    ("zero point longer", Q, (F, S, Z6), ValueError, "y_zero_point", r"shape \(\)", r"\(6,\)"),
    ("zero point out of range", Q, (F, S, 256), ValueError, "y_zero_point", r"an int in \[0, 255\], the range of uint8", "256"),
    ("zero point negative", Q, (F, S, -1), ValueError, "y_zero_point", r"an int in \[0, 255\], the range of uint8", "-1"),
    ("block too many", P(Q, block_size=2), (F, np.ones((4, 4), np.float32)), ValueError, "y_scale", r"\(4, 3\)", r"\(4, 4\)"),
    ("block too few", P(Q, block_size=2), (F, np.ones((4, 2), np.float32)), ValueError, "y_scale", r"\(4, 3\)", r"\(4, 2\)"),
    ("block of scalar", P(Q, block_size=2), (F, S), ValueError, "y_scale", r"\(4, 3\)", r"\(\)"),
    ("block negative", P(Q, block_size=-1), (F, S), ValueError, "block_size", "0 or a positive integer", "-1"),
    ("block float", P(Q, block_size=2.0), (F, S), TypeError, "block_size", "an int", "2.0"),
    ("block zero point", P(Q, block_size=2), (F, np.ones((4, 3), np.float32), np.int8(0)), ValueError, "y_zero_point",
     r"\(4, 3\)", r"\(\)"),
    ("output int32", P(Q, output_dtype=jnp.int32), (F, S), TypeError, "output_dtype", "dtype int2", "int32"),
    ("output float6", P(Q, output_dtype=ml_dtypes.float6_e2m3fn), (F, S), TypeError, "output_dtype",
     "float6 is in ONNX 28, but the installed jaxlib cannot carry it", "float6_e2m3fn"),
    ("output nonsense", P(Q, output_dtype="nonsense"), (F, S), TypeError, "output_dtype", "dtype int2", "'nonsense'"),
    ("precision int8", P(Q, precision=jnp.int8), (F, S), TypeError, "precision", "dtype float32, float16 or bfloat16", "int8"),
    ("saturate", P(Q, saturate="yes"), (F, S), TypeError, "saturate", "True or False", "'yes'"),
    ("list", Q, ([1.0, 2.0], S), TypeError, "x", "an array", "list"),
    ("string", Q, ("x", S), TypeError, "x", "an array", "str"),
    ("None", Q, (None, S), TypeError, "x", "an array", "None"),
    ("no scale", Q, (F, None), TypeError, "y_scale", "an array", "None"),
    ("strings", Q, (np.array(["a"]), S), TypeError, "x", "an array", "<U1"),
    ("scale overflows", Q, (F.astype(np.float16), 1e6), ValueError, "y_scale", "a number that float16 can hold", "1000000.0"),
    ("scale vanishes", Q, (F, 1e-60), ValueError, "y_scale", "a number that float32 can hold", "1e-60"),
    ("float8 zero point", Q, (F, S, ml_dtypes.float8_e4m3fn(1)), ValueError, "y_zero_point",
     "0, the only zero point of float8_e4m3fn", "1.0"),
    ("x float32", D, (F, S), TypeError, "x", "dtype int2", "float32"),
    ("x bool", D, (F > 0, S), TypeError, "x", "dtype int2", "bool"),
    ("scale int32", D, (I8, np.int32(1)), TypeError, "x_scale", "dtype float32, float16, bfloat16 or float8_e8m0fnu", "int32"),
    ("zero point dtype", D, (I8, S, np.uint8(0)), TypeError, "x_zero_point", r"dtype int8 \(x's\)", "uint8"),
    ("zero point shape", D, (I8, S6, np.zeros(4, np.int8)), ValueError, "x_zero_point", r"\(6,\)", r"\(4,\)"),
    ("zero point range", D, (I8, S, 200), ValueError, "x_zero_point", r"an int in \[-128, 127\], the range of int8", "200"),
    ("scale shape", D, (I8, S4), ValueError, "x_scale", r"\(6,\)", r"\(4,\)"),
    ("axis", P(D, axis=5), (I8, S6), ValueError, "axis", r"\[-2, 1\]", "5"),
    ("output int8", P(D, output_dtype=jnp.int8), (I8, S), TypeError, "output_dtype", "float32, float16 or bfloat16", "int8"),
    ("e8m0 alone", D, (I8, ml_dtypes.float8_e8m0fnu(1)), TypeError, "x_scale", "an output_dtype with it", "float8_e8m0fnu"),
    ("float8 zero point", D, (F.astype(ml_dtypes.float8_e5m2), S, ml_dtypes.float8_e5m2(2)), ValueError, "x_zero_point",
     "0, the only zero point of float8_e5m2", "2.0"),
    ("x float16", Y, (F.astype(np.float16),), TypeError, "x", "dtype float32", "float16"),
    ("x complex", Y, (F.astype(np.complex64),), TypeError, "x", "dtype float32", "complex64"),
    ("dtype", P(Y, dtype=jnp.int4), (F,), TypeError, "dtype", "dtype uint8 or int8", "int4"),
    ("axis", P(Y, axis=2), (F,), ValueError, "axis", r"\[-2, 1\]", "2"),
    ("lda_coeff text", P(Y, lda_coeff="1"), (F,), TypeError, "lda_coeff", "a static Python number", "'1'"),
    ("lda_coeff nan", P(Y, lda_coeff=float("nan")), (F,), ValueError, "lda_coeff", "a finite number that float32", "nan"),
    ("lda_coeff huge", P(Y, lda_coeff=1e39), (F,), ValueError, "lda_coeff", "a finite number that float32", "1e\\+39"),
    ("int64 too large", Q, (np.array([2**40]), S), ValueError, "x", "integers that int32 can hold", "int64"),
    ("numpy string", Q, (np.str_("a"), S), TypeError, "x", "an array", "<U1"),
    ("float64 vanishes", Q, (F, np.float64(1e-60)), ValueError, "y_scale", "a number that float32 can hold", "1e-60"),
    ("float64 vanishes", OQ, (F, np.float64(1e-60)), ValueError, "scales", "a number that float32 can hold", "1e-60"),
    ("training", P(Y, training=None), (F,), TypeError, "training", "True or False", "None"),
    ("name", P(Y, name=3), (F,), TypeError, "name", "None or a non-empty string", "3"),
    ("x int32", FQ, (F.astype(np.int32), S), TypeError, "x", "dtype float32, float16 or bfloat16", "int32"),
    ("scale int32", FQ, (F, np.int32(1)), TypeError, "scale", "dtype float32", "int32"),
    ("zero point dtype", P(FQ, dtype=jnp.uint8), (F, S, np.int8(0)), TypeError, "zero_point", "dtype uint8 or float32", "int8"),
    ("zero point half", FQ, (F, S, np.float16(0)), TypeError, "zero_point", "dtype uint8 or float32", "float16"),
    ("zero point shape", FQ, (F, S6, np.zeros(4, np.float32)), ValueError, "zero_point", r"\(6,\)", r"\(4,\)"),
    ("float8 zero point", P(FQ, dtype=jnp.float8_e5m2), (F, S, 1), ValueError, "zero_point", "0, the only zero point of float8_e5m2", "1"),
    ("dtype", P(FQ, dtype=jnp.float16), (F, S), TypeError, "dtype", "dtype int2", "float16"),
    ("x float16", DFQ, (F.astype(np.float16),), TypeError, "x", "dtype float32", "float16"),
    ("axis", P(DFQ, axis=-3), (F,), ValueError, "axis", r"\[-2, 1\]", "-3"),
]  # fmt: skip
for op, src in ((OQ, F), (ODQ, F), (OD, I8), (ODD, I8)):
    ROWS += [
        ("qtype", P(op, qtype="per_row"), (src, S), ValueError, "qtype", "'per_tensor' or 'per_channel'", "'per_row'")
        if op is not ODD
        else (
            "qtype",
            P(op, qtype=3),
            (src, S),
            ValueError,
            "qtype",
            "'per_tensor' or 'per_channel' or 'per_group'",
            "3",
        ),
        ("two scales", op, (src, S6), ValueError, "scales", r"shape \(1,\)", r"\(6,\)"),
        ("two zps", op, (src, S, Z6), ValueError, "zps", r"shape \(1,\)", r"\(6,\)"),
        ("channels", P(op, qtype="per_channel"), (src, S4), ValueError, "scales", r"shape \(6,\)", r"\(4,\)"),
        ("a scalar per channel", P(op, qtype="per_channel"), (src, S), ValueError, "scales", r"shape \(6,\)", r"\(\)"),
        ("zps channels", P(op, qtype="per_channel"), (src, S6, Z6[:4]), ValueError, "zps", r"shape \(6,\)", r"\(4,\)"),
        ("axis", P(op, qtype="per_channel", axis=2), (src, S6), ValueError, "axis", r"\[-2, 1\]", "2"),
        ("zps float", op, (src, S, np.float32(0)), TypeError, "zps", "dtype", "float32"),
        (
            "zps too large",
            op,
            (src, S, 2**31),
            ValueError,
            "zps",
            r"an int in \[-2147483648, 2147483647\], the range of int32",
            "2147483648",
        ),
        ("src bool", op, (F > 0, S), TypeError, "src", "dtype", "bool"),
        ("scales int8", op, (src, np.int8(1)), TypeError, "scales", "dtype float32", "int8"),
    ]
ROWS += [
    ("dtype", P(OQ, dtype=jnp.int4), (F, S), TypeError, "dtype", "uint8, int8, float8_e4m3fn or float8_e5m2", "int4"),
    ("zps float8", P(OQ, dtype=jnp.float8_e5m2), (F, S, 0), ValueError, "zps", "None: float8 has no zero points", "an array"),
    ("dtype", P(ODQ, dtype=jnp.float8_e5m2), (F, S), TypeError, "dtype", "uint8 or int8", "float8_e5m2"),
    ("groups missing", P(ODD, qtype="per_group"), (I8, S), ValueError, "group_shape", "2 positive integers", "None"),
    ("groups short", P(ODD, qtype="per_group", group_shape=(2,)), (I8, S), ValueError, "group_shape", "2 positive", r"\(2,\)"),
    ("groups do not divide", P(ODD, qtype="per_group", group_shape=(1, 4)), (I8, S), ValueError, "group_shape",
     r"entries that divide src's shape \(4, 6\)", r"\(1, 4\)"),
    ("groups zero", P(ODD, qtype="per_group", group_shape=(1, 0)), (I8, S), ValueError, "group_shape", "divide", r"\(1, 0\)"),
    ("groups float", P(ODD, qtype="per_group", group_shape=(1, 2.0)), (I8, S), TypeError, "group_shape", "an int", "2.0"),
    ("groups scales", P(ODD, qtype="per_group", group_shape=(1, 2)), (I8, S6), ValueError, "scales", r"\(4, 3\)", r"\(6,\)"),
    ("groups zps", P(ODD, qtype="per_group", group_shape=(1, 6)), (I8, np.ones((4, 1), np.float32), Z6), ValueError, "zps",
     r"\(4, 1\)", r"\(6,\)"),
    ("groups unasked", P(ODD, group_shape=(1, 2)), (I8, S), ValueError, "group_shape", "None unless", r"\(1, 2\)"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=bad_input.ids(ROWS))
def test_bad_input_is_named(row: Row) -> None:
    bad_input.refused_eagerly(row)


@pytest.mark.parametrize("row", ROWS, ids=bad_input.ids(ROWS))
def test_disabled_asserts_hide_nothing(row: Row) -> None:
    bad_input.refused_without_chex(row)


TRACEABLE = bad_input.traceable(ROWS)


@pytest.mark.parametrize("row", TRACEABLE, ids=bad_input.ids(TRACEABLE))
def test_bad_input_is_named_while_tracing(row: Row) -> None:
    bad_input.refused_while_tracing(row)


def test_a_static_argument_may_not_be_traced() -> None:
    with pytest.raises(TypeError, match=r"jaxquant\.fake_quantize_linear: lda_coeff: expected"):
        jax.jit(lambda c: jq.fake_quantize_linear(F, S, lda_coeff=c))(0.5)
    with pytest.raises(TypeError, match=r"jaxquant\.quantize_linear: axis: expected"):
        jax.jit(lambda a: jq.quantize_linear(F, S6, axis=a))(1)


def test_the_first_cause_is_chex() -> None:
    with pytest.raises(ValueError, match="y_scale") as raised:
        jq.quantize_linear(F, S4)
    assert "[Chex]" in str(raised.value.__cause__)
