"""Invalid input to the convolutions and invalid dimension numbers, as rows for `bad_input`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jax.lax import ConvDimensionNumbers

from ..support.bad_input import Row
from .contraction_refusals import CG, CI, DG, I8, I16, I32, QC, U8, F, T, Unhashable, V, W, X, ones, row

INTS = "2 positive ints, one for each spatial dimension"
PADS = "4 ints of 0 or more, for the beginning of each spatial dimension, then for the end of each"


def attributes() -> Iterable[Row]:
    """Return rows on ONNX's attributes."""
    for op in (CI, QC):
        for value in ("SAME", "same_upper", "", None, 3, True, b"VALID"):
            expected = "'NOTSET' or 'SAME_UPPER' or 'SAME_LOWER' or 'VALID'"
            yield row(op, {"auto_pad": value}, V, "auto_pad", expected, repr(value))
        for value in ((), (1, 1), (1, 1, 1), (1,) * 5, (1, -1, 1, 1), ((1, 1), (1, 1)), 3, "1111", range(4)):
            yield row(op, {"pads": value}, V, "pads", PADS, "")
        for value in ((1.5, 1, 1, 1), (1.0, 1, 1, 1), (True, 1, 1, 1), (1, 1, 1, None), (1, 1, 1, "1")):
            yield row(op, {"pads": value}, T, "pads", "an int", "1.5|1.0|True|None|'1'")
        for name in ("strides", "dilations", "kernel_shape"):
            for value in ((), (3,), (3, 3, 3), (0, 3), (-3, 3), 3, "33"):
                yield row(op, {name: value}, V, name, INTS, "")
            for value in ((3.5, 3), (3.0, 3), (True, 3), (None, 3), ("3", 3), ((3,), 3)):
                yield row(op, {name: value}, T, name, "an int", "")
        for name in ("auto_pad", "pads", "strides", "dilations", "kernel_shape", "group"):
            for value in (Unhashable(), np.ones(2, np.int64)):
                yield row(op, {name: value}, T, name, "a static, hashable value", "Unhashable|dict|an array")
        for value in ((3, 2), (2, 3), (1, 1)):
            yield row(op, {"kernel_shape": value}, V, "kernel_shape", r"\(3, 3\), as in w", "")
        for value in (0, -1, 3, 4, 6):
            expected = "a divisor of x's 4 channels and of w's 6 features"
            yield row(op, {"group": value}, V, "group", expected, str(value))
        for value in (1.0, 2.5, True, None, "1", (1,)):
            yield row(op, {"group": value}, T, "group", "an int", "")
        for auto_pad in ("VALID", "SAME_UPPER", "SAME_LOWER"):
            for value in ((1, 1, 1, 1), (0, 0, 0, 1), (0,), 3, "0000", (0.0, 0, 0, 0)):
                yield row(op, {"auto_pad": auto_pad, "pads": value}, (T, V), "pads", "", "")


def windows() -> Iterable[Row]:
    """Return rows on operands of ONNX's convolutions that do not fit each other."""
    for op in (CI, QC):
        for shape in ((), (4,), (2, 4)):
            yield row(
                op, {"x": ones(U8, *shape)}, V, "x", r"an array \(N, C, \*spatial\) of rank 3 or more", r"shape \("
            )
        yield row(op, {"x": ones(U8, 2, 4, 7)}, V, "w", "x's rank, 3", r"\(6, 4, 3, 3\)")
        for shape in ((6, 4), (6, 4, 3), (6, 4, 3, 3, 3)):
            yield row(op, {"w": ones(I8, *shape)}, V, "w", "x's rank, 4", r"\(6, 4,?")
        for name, good in (("x", X), ("w", W)):
            for dtype in (F, I32):
                yield row(op, {name: ones(dtype, *good.shape)}, T, name, "dtype int8 or uint8", np.dtype(dtype).name)
        yield row(op, {"x": ones(U8, 2, 3, 7, 9)}, V, "w", "3 channels, x's 3 in 1 groups", r"\(6, 4, 3, 3\)")
        yield row(op, {"w": ones(I8, 6, 3, 3, 3)}, V, "w", "4 channels, x's 4 in 1 groups", r"\(6, 3, 3, 3\)")
        yield row(op, {"group": 2}, V, "w", "2 channels, x's 4 in 2 groups", r"\(6, 4, 3, 3\)")
        for changes, spans, actual in (
            ({"w": ones(I8, 6, 4, 8, 3)}, 8, r"7 with padding \(0, 0\)"),
            ({"w": ones(I8, 6, 4, 3, 10)}, 10, r"9 with padding \(0, 0\)"),
            ({"w": ones(I8, 6, 4, 9, 3), "pads": (1, 0, 0, 0)}, 9, r"7 with padding \(1, 0\)"),
            ({"x": ones(U8, 2, 4, 2, 9), "auto_pad": "VALID"}, 3, r"2 with padding \(0, 0\)"),
            ({"dilations": (4, 1)}, 9, r"7 with padding \(0, 0\)"),
            ({"dilations": (1, 5), "kernel_shape": (3, 3)}, 11, r"9 with padding \(0, 0\)"),
        ):
            yield row(op, changes, V, "w", f"a kernel that spans {spans} to fit", actual)
        yield row(op, {"w": ones(I8, 6, 4, 0, 3)}, V, "w", "", "")
    for shape in ((4,), (6, 1, 1, 1), (1, 6)):
        yield row(CI, {"w_zero_point": ones(I8, *shape)}, V, "w_zero_point", r"a scalar or shape \(6,\)", r"shape \(")
    for shape in ((2,), (4,), (1, 1)):
        yield row(CI, {"x_zero_point": ones(U8, *shape)}, V, "x_zero_point", "a scalar", r"shape \(")


def general_windows() -> Iterable[Row]:
    """Return rows on the static arguments of jax.lax's convolution."""
    for name in ("window_strides", "lhs_dilation", "rhs_dilation"):
        for value in ((), (2,), (2, 2, 2), (0, 2), (-2, 2), 2, "22"):
            yield row(CG, {name: value}, V, name, INTS, "")
        for value in ((2.5, 2), (2.0, 2), (True, 2), (None, 2), ("2", 2), ((2,), 2)):
            yield row(CG, {name: value}, T, name, "an int", "")
    yield row(CG, {"window_strides": None}, V, "window_strides", INTS, "None")
    for value in ("FULL", "NOTSET", ""):
        yield row(CG, {"padding": value}, V, "padding", "'SAME' or 'SAME_LOWER' or 'VALID'", repr(value))
    pairs = (
        *(None, 3, True, b"SAME", (), (1, 1), ((1, 1),), ((1, 1),) * 3, ((1,), (1,)), ("VALID", "VALID")),
        *(((1.5, 1), (1, 1)), ((1.0, 1), (1, 1)), ((True, 1), (1, 1)), ((None, 1), (1, 1)), (("1", "1"), ("1", "1"))),
    )
    for value in (*pairs, ("11", "11")):
        yield row(CG, {"padding": value}, (T, V), "padding", "", "")
    for name in ("feature_group_count", "batch_group_count"):
        for value in (0, -1, 3, 4) if name[0] == "f" else (0, -1, 3, 4, 6):
            yield row(CG, {name: value}, V, name, "a divisor of", str(value))
        for value in (1.0, 1.5, True, None, "1", (1,)):
            yield row(CG, {name: value}, T, name, "an int", "")
    changes = {"rhs": ones(I8, 6, 2, 3, 3), "feature_group_count": 2, "batch_group_count": 2}
    yield row(CG, changes, V, "batch_group_count", "1 unless feature_group_count is 1", "2")
    for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "batch_group_count"):
        for value in (Unhashable(), np.ones(2, np.int64)):
            yield row(CG, {name: value}, T, name, "a static, hashable value", "Unhashable|dict|an array")


def general_operands() -> Iterable[Row]:
    """Return rows on the operands of jax.lax's convolution."""
    for name, good in (("lhs", X), ("rhs", W)):
        for dtype in (F, I32, I16):
            yield row(CG, {name: ones(dtype, *good.shape)}, T, name, "dtype int8, uint8, int4", np.dtype(dtype).name)
    for shape in ((), (4,)):
        yield row(CG, {"lhs": ones(U8, *shape)}, V, "lhs", "an array of rank", r"shape \(")
    yield row(CG, {"lhs": ones(U8, 2, 4), "rhs": ones(I8, 6, 4), "window_strides": ()}, V, "lhs", "rank 3", r"\(2, 4\)")
    yield row(CG, {"rhs": ones(I8, 6, 4, 3)}, V, "rhs", "lhs's rank, 4", r"\(6, 4, 3\)")
    yield row(CG, {"rhs": ones(I8, 6, 3, 3, 3)}, V, "rhs", r"4 channels \(lhs has 4 in 1 groups\)", "3")
    yield row(CG, {"feature_group_count": 2}, V, "rhs", r"2 channels \(lhs has 4 in 2 groups\)", "4")
    for shape in ((4,), (6, 1, 1, 1)):
        yield row(
            CG, {"rhs_zero_point": ones(I8, *shape)}, V, "rhs_zero_point", r"a scalar or shape \(6,\)", r"shape \("
        )
    for shape in ((2,), (4,), (1, 1, 1, 1)):
        yield row(CG, {"lhs_zero_point": ones(U8, *shape)}, V, "lhs_zero_point", "a scalar", r"shape \(")
    right = (0, 1, 2, 3)
    for numbers in (
        *("x", 3, (), (None,) * 3, (1, 2, 3), ("NCHW", "OIHW"), ("NCHW", "OIHW", "NCH"), ("NCHW", "OIHW", "NCHH")),
        *(("NCDH", "OIHW", "NCHW"), ("nchw", "oihw", "nchw"), (right, right, right)),
        ConvDimensionNumbers((0, 1, 2), (0, 1, 2), (0, 1, 2)),
        ConvDimensionNumbers((0, 1, 2, 2), right, right),
        ConvDimensionNumbers(right, (0, 1, 2, 4), right),
        ConvDimensionNumbers(right, right, (0, 1, 2, 5)),
        ConvDimensionNumbers(right, right, (0, 1, 2, -1)),
    ):
        yield row(CG, {"dimension_numbers": numbers}, V, "dimension_numbers", "", "")


def dimension_numbers() -> Iterable[Row]:
    """Return rows on the dimension numbers of a contraction, and on its zero points."""
    for name, shape in (("lhs", (4, 6)), ("rhs", (6, 5))):
        for dtype in (F, I32, I16):
            yield row(DG, {name: ones(dtype, *shape)}, T, name, "dtype int8, uint8, int4", np.dtype(dtype).name)
    empty = ((), ())
    malformed = r"(\(\(lhs contracted, rhs contracted\), \(lhs batch, rhs batch\)\), sequences of ints|an int)"
    for numbers in (
        *(
            None,
            "x",
            3,
            (),
            ((1,), (0,)),
            (((1,), (0,)),),
            (((1,),), empty),
            (((1,), (0,)), empty, ()),
            ((1, 0), empty),
        ),
        *((((None,), (0,)), empty), (((1.0,), (0,)), empty), (((1.5,), (0,)), empty), ((("1",), ("0",)), empty)),
        *((((True,), (False,)), empty), (("1", "0"), empty)),
    ):
        yield row(DG, {"dimension_numbers": numbers}, (T, V), "dimension_numbers", malformed, "")
    for side, contracted, batch in (
        *(("lhs", ((2,), (0,)), empty), ("lhs", ((-1,), (0,)), empty), ("lhs", ((1, 1), (0, 0)), empty)),
        *(("lhs", ((1,), (0,)), ((1,), (1,))), ("rhs", ((1,), (2,)), empty), ("rhs", ((1,), (-2,)), empty)),
        *(("rhs", ((1, 0), (0, 0)), empty), ("rhs", ((1,), (0,)), ((0,), (0,)))),
    ):
        expected = rf"distinct dimensions of {side}, in \[0, 2\)"
        yield row(DG, {"dimension_numbers": (contracted, batch)}, V, "dimension_numbers", expected, "")
    for contracted, batch, expected in (
        *((((1,), (1,)), empty, "contracted"), (((1,), ()), empty, "contracted")),
        *((((1,), (0,)), ((0,), (1,)), "batch"), (((1,), (0,)), ((0,), ()), "batch")),
    ):
        numbers = {"dimension_numbers": (contracted, batch)}
        yield row(DG, numbers, V, "dimension_numbers", f"equal {expected} sizes", "in lhs, .* in rhs")
    for value in (Unhashable(), {}, (({1}, {0}), empty), ((np.array([1]), np.array([0])), empty)):
        yield row(DG, {"dimension_numbers": value}, T, "dimension_numbers", "a static, hashable value", "")
    for shape in ((1,), (4,), (1, 6), (4, 6), (1, 1, 1)):
        yield row(DG, {"lhs_zero_point": ones(U8, *shape)}, V, "lhs_zero_point", r"shape \(4, 1\)", rf"\({shape[0]},")
    for shape in ((1,), (5,), (6, 1), (6, 5)):
        yield row(DG, {"rhs_zero_point": ones(I8, *shape)}, V, "rhs_zero_point", r"shape \(1, 5\)", rf"\({shape[0]},")
    batched = {"lhs": ones(U8, 3, 4, 6), "rhs": ones(I8, 3, 6, 5), "dimension_numbers": (((2,), (1,)), ((0,), (0,)))}
    for shape in ((3,), (4, 1), (3, 1, 6), (2, 1, 1)):
        expected = r"shape \(3, 4, 1\)"
        yield row(DG, {**batched, "lhs_zero_point": ones(U8, *shape)}, V, "lhs_zero_point", expected, rf"\({shape[0]},")
