"""Invalid input to the contractions, as rows for `bad_input`: valid arguments of each operator, with one replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np

import jaxquant as jq

from ..support.bad_input import Row

P: Any = functools.partial  # untyped, because the rows are intentionally wrong
T, V = TypeError, ValueError
F, F16, U8, I8, I16, I32 = np.float32, np.float16, np.uint8, np.int8, np.int16, np.int32
I4, E4, E5 = ml_dtypes.int4, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def ones(dtype: Any, *shape: int) -> Any:
    """Return ones, or a numpy scalar without a shape."""
    return np.ones(shape, dtype)[()]


@functools.wraps(jq.integer.dot_general)
def dot_general(
    lhs: Any, rhs: Any, lhs_zero_point: Any, rhs_zero_point: Any, dimension_numbers: Any = (((1,), (0,)), ((), ()))
) -> Any:
    """Call the function with positional zero points, as jit and vmap pass them."""
    points = {"lhs_zero_point": lhs_zero_point, "rhs_zero_point": rhs_zero_point}
    return jq.integer.dot_general(lhs, rhs, dimension_numbers, **points)


@functools.wraps(jq.integer.conv_general_dilated)
def conv_general_dilated(lhs: Any, rhs: Any, lhs_zero_point: Any, rhs_zero_point: Any, **statics: Any) -> Any:
    """Call the function with positional zero points, as jit and vmap pass them."""
    keywords = {"window_strides": (1, 1), "padding": "VALID", **statics}
    points = {"lhs_zero_point": lhs_zero_point, "rhs_zero_point": rhs_zero_point}
    return jq.integer.conv_general_dilated(lhs, rhs, **keywords, **points)


MI, QM, CI, QC = jq.matmul_integer, jq.qlinear_matmul, jq.conv_integer, jq.qlinear_conv
DM, MF, NB = jq.ops.dynamic_quantize_matmul, jq.ops.matmul_integer_to_float, P(jq.ops.matmul_nbits, K=40, N=5)
DG, CG = dot_general, conv_general_dilated
A, B, X, W = ones(U8, 4, 6), ones(I8, 6, 5), ones(U8, 2, 4, 7, 9), ones(I8, 6, 4, 3, 3)
GOOD: dict[Callable[..., Any], dict[str, Any]] = {
    MI: {"a": A, "b": B, "a_zero_point": ones(U8), "b_zero_point": ones(I8)},
    QM: {
        "a": A, "a_scale": ones(F), "a_zero_point": ones(U8), "b": B, "b_scale": ones(F), "b_zero_point": ones(I8),
        "y_scale": ones(F), "y_zero_point": ones(U8),
    },
    CI: {"x": X, "w": W, "x_zero_point": ones(U8), "w_zero_point": ones(I8)},
    QC: {
        "x": X, "x_scale": ones(F), "x_zero_point": ones(U8), "w": W, "w_scale": ones(F), "w_zero_point": ones(I8),
        "y_scale": ones(F), "y_zero_point": ones(U8), "b": ones(I32, 6),
    },
    DM: {"a": ones(F, 4, 6), "b": B, "b_scale": ones(F), "b_zero_point": ones(I8), "bias": ones(F, 5)},
    MF: {
        "a": A, "b": B, "a_scale": ones(F), "b_scale": ones(F), "a_zero_point": ones(U8), "b_zero_point": ones(I8),
        "bias": ones(F, 5),
    },
    NB: {
        "a": ones(F, 3, 40), "b": ones(U8, 5, 2, 16), "scales": ones(F, 5, 2), "zero_points": ones(U8, 5, 1),
        "bias": ones(F, 5),
    },
    DG: {"lhs": A, "rhs": B, "lhs_zero_point": ones(U8), "rhs_zero_point": ones(I8)},
    CG: {"lhs": X, "rhs": W, "lhs_zero_point": ones(U8), "rhs_zero_point": ones(I8)},
}  # fmt: skip
OPERANDS = {MI: "ab", QM: "ab", CI: "xw", QC: "xw", MF: "ab", DG: ("lhs", "rhs"), CG: ("lhs", "rhs")}


def row(op: Any, changes: dict[str, Any], error: Any, argument: str, expected: str, actual: str) -> Row:
    """Return a row in which some of the valid arguments are replaced. Other entries of `changes` are static."""
    good = GOOD[op]
    statics = {name: value for name, value in changes.items() if name not in good}
    arrays = {name: changes.get(name, value) for name, value in good.items()}
    label = ", ".join(f"{name} {value_name(value)}" for name, value in changes.items())
    return label, P(op, **statics), tuple(arrays.values()), error, argument, expected, actual


def value_name(value: Any) -> str:
    """Return a short description of the invalid argument of a row."""
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else repr(value)


def not_arrays() -> Iterable[Row]:
    """Return rows with each argument of each operator replaced by a type that no operator accepts."""
    for op, good in GOOD.items():
        for argument, like in good.items():
            yield row(op, {argument: [1]}, T, argument, "an array", "list")
            yield row(op, {argument: "x"}, T, argument, "an array", "str")
            yield row(op, {argument: np.array(["x"])}, T, argument, "an array", "<U1")
            for dtype in (bool, I16):
                name = np.dtype(dtype).name
                yield row(op, {argument: ones(dtype, *np.shape(like))}, T, argument, "dtype", name)
            optional = (
                argument.endswith("zero_point") or argument in ("zero_points", "bias") or (op, argument) == (QC, "b")
            )
            if not optional or argument == "y_zero_point":
                yield row(op, {argument: None}, T, argument, "an array", "None")


def zero_points() -> Iterable[Row]:
    """Return rows on zero points that must have the dtype of their operand, here uint8 and int8."""
    sides = [(op, name, i) for op, names in OPERANDS.items() for i, name in enumerate(names)]
    for op, name, i in (*sides, (DM, "b", 1)):
        operand_dtype, partner_dtype = (U8, I8) if i == 0 else (I8, U8)
        low, high = (0, 255) if i == 0 else (-128, 127)
        argument, dtype = f"{name}_zero_point", f"dtype {np.dtype(operand_dtype).name} \\({name}'s\\)"
        for value in (ones(partner_dtype), ones(I32), ones(F)):
            yield row(op, {argument: value}, T, argument, dtype, str(value.dtype))
        yield row(op, {argument: 1.0}, T, argument, dtype, "float32")
        yield row(op, {argument: True}, T, argument, "an int", "True")
        for number in (high + 1, low - 1, 2**40):
            bounds = rf"an int in \[{low}, {high}\], the range of {np.dtype(operand_dtype).name}"
            yield row(op, {argument: number}, V, argument, bounds, str(number))
        for shape in ((0,), (7,), (1, 7), (7, 1), (1, 1, 1, 1, 1)):
            yield row(op, {argument: ones(operand_dtype, *shape)}, V, argument, "a scalar", rf"shape \({shape[0]},")


def products() -> Iterable[Row]:
    """Return rows for the four operators that multiply 8-bit matrices as numpy.matmul does."""
    for op in (MI, QM, DM, MF):
        a_dtype = F if op is DM else U8
        for dtype in (I32, F16, I4) if op is DM else (I32, F, I4):
            yield row(op, {"a": ones(dtype, 4, 6)}, T, "a", "dtype (float32|int8)", np.dtype(dtype).name)
        for dtype in (I32, F, I4):
            yield row(op, {"b": ones(dtype, 6, 5)}, T, "b", "dtype int8", np.dtype(dtype).name)
        yield row(op, {"a": ones(a_dtype)}, V, "a", "an array of rank 1 or more", "rank 0")
        yield row(op, {"b": ones(I8)}, V, "b", "an array of rank 1 or more", "rank 0")
        yield row(op, {"b": ones(I8, 7, 5)}, V, "b", "6 rows, as many as a has columns", r"\(4, 6\) and \(7, 5\)")
        yield row(op, {"b": ones(I8, 5)}, V, "b", "6 rows", r"\(4, 6\) and \(5,\)")
        yield row(op, {"a": ones(a_dtype, 5)}, V, "b", "5 rows", r"\(5,\) and \(6, 5\)")
        batches = {"a": ones(a_dtype, 3, 4, 6), "b": ones(I8, 2, 6, 5)}
        yield row(op, batches, V, "b", "batch dimensions that broadcast", r"\(3, 4, 6\) and \(2, 6, 5\)")
        for argument, dtype in (("b_zero_point", I8), ("b_scale", F)):
            if argument in GOOD[op]:
                expected = r"\(5,\) or (\(1, 5\)|\(blocks, 5\))"
                for shape in ((6,), (6, 1), (1, 6), (1, 1, 5)):
                    yield row(op, {argument: ones(dtype, *shape)}, V, argument, expected, rf"\({shape[0]},")
        for argument, dtype in (("a_zero_point", U8), ("a_scale", F)):
            if argument in GOOD[op]:
                for shape in ((6,), (1, 6), (4, 6), (1, 4, 1)):
                    yield row(
                        op, {argument: ones(dtype, *shape)}, V, argument, r"\(4,\) or \(4, 1\)", rf"\({shape[0]},"
                    )
                yield row(
                    op, {"a": ones(U8, 6), argument: ones(dtype, 6)}, V, argument, r"\(1,\) or \(1, 1\)", r"\(6,\)"
                )
        if "bias" in GOOD[op]:
            for value in (ones(F16, 5), ones(I32, 5)):
                yield row(op, {"bias": value}, T, "bias", r"dtype float32 \(the result's\)", str(value.dtype))
            for shape in ((), (1,), (6,), (1, 5)):
                yield row(op, {"bias": ones(F, *shape)}, V, "bias", r"shape \(5,\)", r"shape \(")
            yield row(op, {"bias": 1.0}, V, "bias", r"shape \(5,\)", r"shape \(\)")


def scales() -> Iterable[Row]:
    """Return rows on scales, including blocked ones."""
    for op, names in {QM: "aby", QC: "xwy", DM: "b", MF: "ab"}.items():
        for argument in (f"{name}_scale" for name in names):
            for dtype in (I8, I32, *(() if op is QM else (F16, ml_dtypes.bfloat16))):
                yield row(op, {argument: ones(dtype)}, T, argument, "dtype float32", np.dtype(dtype).name)
            yield row(op, {argument: True}, T, argument, "a number", "True")
            for number in (1e60, 1e-60, np.float64(1e-60), 2**200):
                named = repr(float(number)).replace("+", "[+]")
                yield row(op, {argument: number}, V, argument, "a number that float32 can hold", f"{named}|{2**200}")
    for op in (DM, MF):
        for shape in ((4, 5), (7, 5), (12, 5), (2, 6), (2, 1)):
            expected = r"\(blocks, 5\) with blocks that divide b's 6 rows"
            yield row(op, {"b_scale": ones(F, *shape)}, V, "b_scale", expected, rf"\({shape[0]}, {shape[1]}\)")
        blocks = {"b_scale": ones(F, 2, 5)}
        for shape in ((2,), (2, 1), (3, 5), (6, 5), (2, 6)):
            yield row(
                op, {**blocks, "b_zero_point": ones(I8, *shape)}, V, "b_zero_point", "a scalar", rf"\({shape[0]},"
            )
        yield row(op, {**blocks, "b_zero_point": ones(U8, 2, 5)}, T, "b_zero_point", "dtype int8", "uint8")
        yield row(op, {"b_zero_point": ones(I8, 2, 5)}, V, "b_zero_point", r"\(1, 5\)", r"\(2, 5\)")
        stack = {"b": ones(I8, 2, 6, 5), **blocks}
        yield row(op, stack, V, "b_scale", r"\(5,\) or \(2, 1, 5\)", r"\(2, 5\)")
    for shape in ((5,), (1, 5), (4, 5)):
        yield row(QM, {"y_scale": ones(F, *shape)}, V, "y_scale", r"\(4,\) or \(4, 1\)", rf"\({shape[0]},")
        yield row(QM, {"y_zero_point": ones(U8, *shape)}, V, "y_zero_point", r"\(4,\) or \(4, 1\)", rf"\({shape[0]},")
    yield row(QM, {"b_scale": ones(F, 2, 5)}, V, "b_scale", r"\(5,\) or \(1, 5\)", r"\(2, 5\)")


def quantized() -> Iterable[Row]:
    """Return rows on arguments that only the QLinear operators have: y's zero point, float8 and an int32 bias."""
    for op in (QM, QC):
        for value in (ones(I32), ones(F), ones(I4), np.zeros((), E5)[()]):
            yield row(op, {"y_zero_point": value}, T, "y_zero_point", "dtype int8", str(value.dtype))
        yield row(op, {"y_zero_point": 256}, V, "y_zero_point", r"an int in \[0, 255\], the range of uint8", "256")
        yield row(op, {"y_zero_point": True}, T, "y_zero_point", "an int", "True")
    small = {n: ones(E4, *np.shape(v)) if v.dtype != F else v for n, v in GOOD[QM].items()}
    zeros = {n: np.zeros((), E4)[()] for n in small if n.endswith("zero_point")}
    for name in zeros:
        only = "0, the only zero point of float8_e4m3fn"
        yield row(QM, {**small, **zeros, name: ones(E4)}, V, name, only, "1.0")
        yield row(QM, {**small, **zeros, name: ones(I8)}, T, name, "dtype float8_e4m3fn", "int8")
    other = {"a_zero_point": np.zeros((), E5)[()]}
    yield row(QM, {**small, **zeros, **other}, T, "a_zero_point", "dtype float8_e4m3fn", "float8_e5m2")
    yield row(QM, {**small, **zeros, "b": B}, T, "b", "dtype float8_e4m3fn", "int8")
    yield row(QM, {"b": ones(E4, 6, 5)}, T, "b", "dtype int8 or uint8", "float8_e4m3fn")
    for name in ("x_scale", "y_scale"):
        for shape in ((2,), (6,), (1, 1)):
            yield row(QC, {name: ones(F, *shape)}, V, name, "a scalar", rf"\({shape[0]},")
    for shape in ((4,), (6, 1, 1, 1), (1, 6)):
        yield row(QC, {"w_scale": ones(F, *shape)}, V, "w_scale", r"shape \(6,\)", rf"\({shape[0]},")
    yield row(QC, {"y_zero_point": ones(U8, 6)}, V, "y_zero_point", "a scalar", r"\(6,\)")
    for value in (ones(F, 6), ones(I8, 6)):
        yield row(QC, {"b": value}, T, "b", "dtype int32", str(value.dtype))
    for shape in ((), (1,), (5,), (6, 1)):
        yield row(QC, {"b": ones(I32, *shape)}, V, "b", r"shape \(6,\)", r"shape \(")
    yield row(QC, {"b": np.full(6, 2**40)}, V, "b", "integers that int32 can hold", "int64")


class Unhashable:
    """Return rows on invalid static arguments."""

    __hash__: Any = None


def nbits() -> Iterable[Row]:
    """Return rows on packed weights and the attributes that describe them."""
    for name in ("K", "N", "bits", "block_size"):
        for value in (4.0, True, None, "4"):
            yield row(NB, {name: value}, T, name, "an int", "4.0|True|None|'4'")
        yield row(NB, {name: Unhashable()}, T, name, "a static, hashable value", "Unhashable")
        yield row(NB, {name: np.array(4)}, T, name, "a static, hashable value", "an array")
    for name in ("K", "N"):
        for value in (0, -1):
            yield row(NB, {name: value}, V, name, "a positive int", str(value))
    for value in (39, 41):
        yield row(NB, {"K": value}, V, "a", rf"shape \(..., {value}\), K last", r"\(3, 40\)")
    yield row(NB, {"K": 70, "a": ones(F, 3, 70)}, V, "b", r"shape \(5, 3, 16\)", r"\(5, 2, 16\)")
    yield row(NB, {"N": 4}, V, "b", r"shape \(4, 2, 16\)", r"\(5, 2, 16\)")
    for value in (0, 1, 3, 5, 16, -4):
        yield row(NB, {"bits": value}, V, "bits", "2, 4 or 8", str(value))
    for value, size in ((2, 8), (8, 32)):
        yield row(NB, {"bits": value}, V, "b", rf"\(5, 2, {size}\)", r"\(5, 2, 16\)")
    for value in (0, 8, 24, 31, 48, -32):
        yield row(NB, {"block_size": value}, V, "block_size", "a power of two, 16 or more", str(value))
    for value, shape in ((16, "3, 8"), (64, "1, 32")):
        yield row(NB, {"block_size": value}, V, "b", rf"\(5, {shape}\)", r"\(5, 2, 16\)")


def nbits_operands() -> Iterable[Row]:
    """Return rows on the shapes and dtypes of the operands."""
    for value in (ones(I32, 3, 40), ones(U8, 3, 40)):
        yield row(NB, {"a": value}, T, "a", "dtype float32, float16 or bfloat16", str(value.dtype))
    for value in (ones(F), ones(F, 40, 3)):
        yield row(NB, {"a": value}, V, "a", "K last", r"shape \(")
    for dtype in (I8, F, I4):
        yield row(NB, {"b": ones(dtype, 5, 2, 16)}, T, "b", "dtype uint8", np.dtype(dtype).name)
    for shape in ((), (160,), (5, 32), (4, 2, 16), (5, 1, 16), (5, 2, 15)):
        yield row(NB, {"b": ones(U8, *shape)}, V, "b", r"shape \(5, 2, 16\)", r"shape \(")
    for shape in ((), (5,), (2, 5), (5, 1), (5, 3), (5, 2, 1), (9,)):
        yield row(NB, {"scales": ones(F, *shape)}, V, "scales", r"shape \(5, 2\), or flat", r"shape \(")
    yield row(NB, {"scales": ones(I8, 5, 2)}, T, "scales", "dtype float32, float16 or bfloat16", "int8")
    for shape in ((), (4,), (5, 2), (10,), (1, 5)):
        yield row(NB, {"zero_points": ones(U8, *shape)}, V, "zero_points", r"shape \(5, 1\), or flat", r"shape \(")
    for shape in ((), (5,), (5, 1)):
        yield row(NB, {"zero_points": ones(F, *shape)}, V, "zero_points", r"shape \(5, 2\), or flat", r"shape \(")
    for value in (ones(I8, 5, 1), ones(I32, 5, 2), 8):
        yield row(NB, {"zero_points": value}, T, "zero_points", "dtype uint8, float32", "int8|int32")
    for value in (ones(F16, 5), ones(I32, 5)):
        yield row(NB, {"bias": value}, T, "bias", r"dtype float32 \(a's\)", str(value.dtype))
    yield row(NB, {"a": ones(F16, 3, 40)}, T, "bias", r"dtype float16 \(a's\)", "float32")
    for shape in ((), (1,), (4,), (1, 5)):
        yield row(NB, {"bias": ones(F, *shape)}, V, "bias", r"shape \(5,\)", r"shape \(")
