"""The cases of the contractions, compared with ONNX Runtime if it has a kernel, and otherwise with int64 numpy.

com.microsoft's MatMulNBits is missing: the order of its float sums is not specified, so results are not bit-identical.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxquant as jq

from ..oracles import contraction_text, onnx_runtime
from ..support.case import Case
from .contraction_inputs import Requantized, Shape, draw_codes, draw_dynamic, draw_float8, draw_operands, draw_scaled

PAIRS = (("uint8", "uint8"), ("uint8", "int8"), ("int8", "uint8"), ("int8", "int8"))
# ONNX Runtime's QLinearMatMul and QLinearConv have kernels for the first three.
KERNELS = (("uint8", "uint8", "uint8"), ("uint8", "int8", "uint8"), ("int8", "int8", "int8"))
OTHERS = tuple((a, b, y) for a, b in PAIRS for y in ("uint8", "int8") if (a, b, y) not in KERNELS)
BYTES = "int8, uint8"
NUMPY = "numpy (text)"
MICROSOFT = "com.microsoft"

FEW = ("jit", "shared_constant_parameters", "shared_vmap_unbatched", "scan")

SMALL = ((5, 7), (7, 9))
WIDE = ((5, 7), (7, 33))
LARGE = ((3, 130), (130, 67))


def from_runtime(node: str, output: Any, domain: str = "", **attributes: Any) -> Any:
    """Return ONNX Runtime's result for the operator's arguments in order."""

    def want(*args: np.ndarray) -> np.ndarray:
        return onnx_runtime.ask(node, args, output, domain, **attributes)

    return want


def call(name: str, **attributes: Any) -> Callable[..., Any]:
    """Return jaxquant's operator of a name, with its attributes bound."""

    def op(*args: Any) -> Any:
        function: Any = functools.reduce(getattr, name.split("."), jq.ops if name in jq.ops.__all__ else jq)
        return function(*args, **attributes)

    return op


def matmul_integer_cases() -> Iterator[Case]:
    """Yield cases of MatMulInteger: ONNX Runtime for one zero point of a, the text for one per row."""
    name, text = "matmul_integer", contraction_text.matmul_integer
    kernel = from_runtime("MatMulInteger", np.int32)
    for a, b in PAIRS:
        label = f"{a} {b}"
        for shapes, point in ((SMALL, (9,)), (LARGE, ())):
            draw = draw_operands((a, shapes[0], ()), (b, shapes[1], point))
            variant = f"{label} {list(shapes[0])} {'per column' if point else 'per tensor'}"
            yield Case(name, BYTES, variant, "ONNX Runtime", call(name), draw, kernel)
        draw = draw_operands((a, WIDE[0], (5,)), (b, WIDE[1], (33,)))
        yield Case(name, BYTES, f"{label} per row and column", NUMPY, call(name), draw, text)
    draw = draw_codes(("uint8", (2, 1, 5, 7)), ("int8", (3, 7, 9)))
    yield Case(name, BYTES, "uint8 int8 broadcast, no zero points", "ONNX Runtime", call(name), draw, kernel)
    for a, b, variant in (
        (("int8", (7, 7), (7,)), ("uint8", (7, 9), ()), "as many rows as columns"),
        (("uint8", (2, 5, 7), (2, 5, 1)), ("int8", (2, 7, 9), (2, 1, 9)), "batched, per row and column"),
    ):
        yield Case(name, BYTES, f"{a[0]} {b[0]} {variant}", NUMPY, call(name), draw_operands(a, b), text)


def qlinear_matmul_cases() -> Iterator[Case]:
    """Yield cases of QLinearMatMul: ONNX Runtime for its dtypes, the text for others, rows, 16-bit scales, float8."""
    name, text = "qlinear_matmul", contraction_text.qlinear_matmul
    batched = ((2, 5, 7), (2, 7, 9))
    for names in KERNELS:
        kernel = from_runtime("QLinearMatMul", np.dtype(names[2]))
        for shapes, scales, label in ((WIDE, (), "per tensor"), (LARGE, (67,), "per column")):
            draw = Requantized(names, shapes, ((), scales, ()))
            variant = f"{' '.join(names)} {list(shapes[0])} {label}"
            yield Case(name, BYTES, variant, "ONNX Runtime", call(name), draw, kernel)
    for names in OTHERS:
        draw = Requantized(names, WIDE, ((), (33,), ()))
        yield Case(name, BYTES, f"{' '.join(names)} per column", NUMPY, call(name), draw, text)
    for names, shapes, scales, dtype in (
        (KERNELS[2], WIDE, ((5,), (33,), (5,)), "float32"),
        (KERNELS[1], LARGE, ((3,), (), ()), "float32"),
        (KERNELS[0], batched, ((2, 5, 1), (2, 1, 9), (2, 5, 1)), "float32"),
        (KERNELS[0], WIDE, ((5,), (33,), ()), "float16"),
        (KERNELS[2], SMALL, ((), (), ()), "bfloat16"),
    ):
        draw = Requantized(names, shapes, scales, dtype=dtype)
        variant = f"{' '.join(names)} scales {dtype} {' '.join(str(list(s)) for s in scales)}"
        yield Case(name, BYTES, variant, NUMPY, call(name), draw, text)
    for names, scales in (
        (("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn"), ((), (9,), ())),
        (("float8_e5m2", "float8_e5m2", "float8_e5m2"), ((5,), (9,), (5,))),
        (("float8_e4m3fnuz", "float8_e4m3fnuz", "float8_e4m3fnuz"), ((), (), ())),
        (("float8_e4m3fn", "float8_e5m2", "float8_e5m2fnuz"), ((), (), ())),
    ):
        draw = draw_float8(names, scales, SMALL)
        yield Case(name, "float8", " ".join(names), NUMPY, call(name), draw, text)


def convolution_shapes() -> Iterator[tuple[str, Shape, Shape, dict[str, Any]]]:
    """Return convolutions as (name, shape of x, shape of w, attributes)."""
    yield "2-D padded, strided", (2, 5, 9, 11), (7, 5, 3, 2), {"pads": [1, 0, 2, 1], "strides": [2, 1]}
    yield "2-D in groups, dilated", (2, 6, 9, 8), (9, 2, 3, 3), {"group": 3, "dilations": [2, 1], "pads": [1, 2, 3, 0]}
    yield "1-D", (2, 4, 17), (6, 4, 5), {"pads": [2, 2], "dilations": [2]}
    yield "3-D", (1, 3, 5, 6, 4), (5, 3, 2, 3, 2), {"pads": [1, 1, 1, 0, 1, 0], "strides": [1, 2, 1]}
    yield "depthwise", (2, 8, 7, 9), (16, 1, 3, 3), {"group": 8, "pads": [1] * 4}
    yield "SAME_LOWER", (1, 3, 9, 10), (4, 3, 2, 4), {"auto_pad": "SAME_LOWER", "strides": [2, 3]}
    yield "1x1", (2, 9, 6, 5), (16, 9, 1, 1), {"strides": [2, 2]}


def conv_integer_cases() -> Iterator[Case]:
    """Yield cases of ConvInteger: ONNX Runtime for one zero point of w, the text for one per output channel."""
    name, text = "conv_integer", contraction_text.conv_integer
    for i, (label, x, w, attributes) in enumerate(convolution_shapes()):
        for is_scalar, pairs in ((True, PAIRS if i == 0 else PAIRS[i % 4 : i % 4 + 1]), (False, [PAIRS[-1 - i % 4]])):
            for pair in pairs if is_scalar or i < 5 else ():
                kernel = from_runtime("ConvInteger", np.int32, **attributes)
                draw = draw_operands((pair[0], x, ()), (pair[1], w, () if is_scalar else w[:1]))
                want = kernel if is_scalar else functools.partial(text, **attributes)
                variant = f"{' '.join(pair)} {label}" + ("" if is_scalar else ", per channel")
                source = "ONNX Runtime" if is_scalar else NUMPY
                yield Case(name, BYTES, variant, source, call(name, **attributes), draw, want)


def qlinear_conv_cases() -> Iterator[Case]:
    """Yield cases of QLinearConv: ONNX Runtime for its dtypes, the text for others and zero points per channel."""
    name, text = "qlinear_conv", contraction_text.qlinear_conv
    for i, (label, x, w, attributes) in enumerate(convolution_shapes()):
        for names in KERNELS if i == 0 else KERNELS[i % 3 : i % 3 + 1]:
            scale = w[:1] if i % 2 == 0 else ()
            # ONNX Runtime requires zero points of 0 for signed filters, and equal zero points for unsigned ones.
            options: dict[str, Any] = {"zero_weights": names[1] == "int8" or bool(scale), "bias": i != 1}
            draw = Requantized(names, (x, w), ((), scale, ()), convolution=attributes, **options)
            want = from_runtime("QLinearConv", np.dtype(names[2]), **attributes)
            variant = f"{' '.join(names)} {label}"
            yield Case(name, BYTES, variant, "ONNX Runtime", call(name, **attributes), draw, want)
        if i < len(OTHERS):
            draw = Requantized(OTHERS[i], (x, w), ((), w[:1], ()), convolution=attributes, bias=i != 1)
            want, variant = functools.partial(text, **attributes), f"{' '.join(OTHERS[i])} {label}, per channel"
            yield Case(name, BYTES, variant, NUMPY, call(name, **attributes), draw, want)


def float_cases() -> Iterator[Case]:
    """Yield cases of DynamicQuantizeMatMul and MatMulIntegerToFloat: ONNX Runtime, the text for rows and blocks."""
    name, text = "dynamic_quantize_matmul", contraction_text.dynamic_quantize_matmul
    kernel = from_runtime("DynamicQuantizeMatMul", np.float32, MICROSOFT)
    for b in ("int8", "uint8"):
        for scale, point, bias in (((33,), (33,), (33,)), ((), None, None)):
            draw = draw_dynamic(b, WIDE, scale, point, bias)
            variant = f"{b} {'per column, zero points, bias' if bias else 'per tensor'}"
            yield Case(name, BYTES, variant, "ONNX Runtime", call(name), draw, kernel)
    draw = draw_dynamic("int8", ((5, 12), (12, 9)), (3, 9), (3, 9), (9,))
    yield Case(name, BYTES, "int8 3 blocks", NUMPY, call(name), draw, text)

    name, text = "matmul_integer_to_float", contraction_text.matmul_integer_to_float
    kernel = from_runtime("MatMulIntegerToFloat", np.float32, MICROSOFT)
    for pair in (p for p in PAIRS if p != ("int8", "uint8")):
        draw = draw_scaled(pair, WIDE, ((), (33,)), ((), (33,)), (33,))
        yield Case(name, BYTES, f"{' '.join(pair)} per column, bias", "ONNX Runtime", call(name), draw, kernel)
    draw = draw_scaled(PAIRS[1], LARGE, ((), ()))
    yield Case(name, BYTES, "uint8 int8 per tensor, no zero points", "ONNX Runtime", call(name), draw, kernel)
    for label, draw in (
        ("int8 uint8 per row and column", draw_scaled(PAIRS[2], WIDE, ((5,), (33,)), ((5,), (33,)), (33,))),
        ("int8 int8 4 blocks", draw_scaled(PAIRS[3], ((5, 64), (64, 9)), ((), (4, 9)), ((), (4, 9)), (9,))),
        ("uint8 int8 3 blocks, per row", draw_scaled(PAIRS[1], ((5, 12), (12, 33)), ((5,), (3, 33)))),
    ):
        yield Case(name, BYTES, label, NUMPY, call(name), draw, text)


def dot_general_cases() -> Iterator[Case]:
    """Yield cases of integer.dot_general for 4 and 8 bits."""
    for left, right, numbers, points, left_shape, right_shape in (
        ("int8", "int8", (((1,), (0,)), ((), ())), ((5, 1), (1, 9)), *SMALL),
        ("uint8", "int8", (((1,), (0,)), ((), ())), ((), ()), *LARGE),
        ("int4", "int4", (((1,), (1,)), ((), ())), ((), (33, 1)), (5, 16), (33, 16)),
        ("uint4", "int8", (((2, 0), (0, 2)), ((1,), (1,))), ((1, 3, 1, 4), ()), (2, 3, 7, 4), (7, 3, 2, 5)),
        ("int4", "uint8", (((0,), (1,)), ((2,), (0,))), ((1, 5, 3), (3, 1, 9)), (7, 5, 3), (3, 7, 9)),
        ("uint8", "uint4", (((1,), (1,)), ((), ())), ((1, 1), (9, 1)), (5, 33), (9, 33)),
    ):

        def op(a, b, az, bz, numbers=numbers):
            return call("integer.dot_general", lhs_zero_point=az, rhs_zero_point=bz)(a, b, numbers)

        def want(a, b, az, bz, numbers=numbers):
            return contraction_text.dot_general(a, b, numbers, az, bz)

        draw = draw_operands((left, left_shape, points[0]), (right, right_shape, points[1]))
        variant = f"{left} {right} {list(left_shape)} {list(right_shape)}"
        yield Case("integer.dot_general", "4 and 8 bits", variant, NUMPY, op, draw, want)


def conv_general_cases() -> Iterator[Case]:
    """Yield cases of integer.conv_general_dilated for 4 and 8 bits: (layouts, strides, padding, dilations, groups)."""
    square, cube = ("NHWC", "HWIO", "NHWC"), ("CDHWN", "ODHWI", "NDHWC")
    rest = ([(1, 0), (1, 1), (0, 0)], ((1,) * 3, (1,) * 3), (1, 1))
    for dtypes, shapes, layouts, strides, padding, dilations, groups in (
        (("int8", "int8"), ((2, 9, 8, 3), (3, 3, 3, 7)), square, (2, 1), [(1, 1), (0, 2)], ((1, 1), (1, 1)), (1, 1)),
        (("uint8", "int8"), ((2, 5, 6, 3), (2, 3, 3, 5)), square, (1, 1), [(2, 1), (1, 1)], ((2, 3), (1, 2)), (1, 1)),
        (("int4", "int4"), ((4, 6, 11), (6, 3, 3)), ("NCW", "OIW", "NWC"), (2,), [(-1, 2)], ((1,), (1,)), (2, 1)),
        (("uint8", "uint4"), ((4, 3, 9), (6, 3, 3)), ("NCW", "OIW", "NCW"), (1,), [(1, 1)], ((1,), (1,)), (1, 2)),
        (("int8", "uint8"), ((3, 5, 4, 6, 2), (6, 3, 2, 2, 3)), cube, (1, 2, 1), *rest),
    ):
        features = shapes[1][layouts[1].index("O")]
        config: tuple[Any, ...] = (strides, padding, *dilations, layouts, *groups)

        def op(x, w, xz, wz, config=config):
            return call("integer.conv_general_dilated", lhs_zero_point=xz, rhs_zero_point=wz)(x, w, *config)

        def want(x, w, xz, wz, config=config):
            return contraction_text.conv_general_dilated(x, w, *config, points=(xz, wz))

        draw = draw_operands((dtypes[0], shapes[0], ()), (dtypes[1], shapes[1], (features,)))
        variant = f"{' '.join(dtypes)} {' '.join(layouts)}"
        yield Case("integer.conv_general_dilated", "4 and 8 bits", variant, NUMPY, op, draw, want)


def every_contraction() -> Iterator[Case]:
    """Return all cases of the contractions, with all transforms."""
    for maker in (
        matmul_integer_cases,
        qlinear_matmul_cases,
        conv_integer_cases,
        qlinear_conv_cases,
        float_cases,
        dot_general_cases,
        conv_general_cases,
    ):
        yield from maker()


def contraction_cases() -> Iterator[Case]:
    """Return all cases of the contractions: all transforms for the first case of each table row, FEW for the others.

    Tracing and compiling is what takes the time, and the dtypes and shapes of one operator take the same paths.
    """
    lines: set[tuple[str, str, str]] = set()
    for case in every_contraction():
        line = (case.operator, case.dtype, case.oracle)
        yield dataclasses.replace(case, transforms=FEW) if line in lines else case
        lines.add(line)
