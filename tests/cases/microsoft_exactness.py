"""The cases of ONNX Runtime's com.microsoft operators on codes, compared with ONNX Runtime where it has a kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import jaxquant as jq

from ..oracles import microsoft_text, onnx_runtime
from ..support.case import BATCH, Arrays, Case

MICROSOFT = "com.microsoft"
BYTES = ("uint8", "int8")
FEW = ("jit", "shared_constant_parameters", "vmap_batched", "scan")
# The transforms in which XLA has the most to rewrite. These programs take up to three seconds each to compile.
BY_DEFAULT = ("repeated", "fused")
F = np.float32


@functools.cache
def is_fused() -> bool:
    """Return whether ONNX Runtime has the kernels for x86-64 with AVX2 and FMA; the other ones round differently.

    Two numbers tell: a sum that is next to a tie, which only the kernel with fused operations sees.
    """
    scale, code = F(0.5) * F(1 + 2**-23), np.full(2, 255, np.uint8)
    arguments = (code, scale, np.uint8(0), code[::-1], F(0.5), np.uint8(254), F(1), np.uint8(0))
    found = onnx_runtime.ask("QLinearAdd", arguments, np.uint8, MICROSOFT)
    fused = microsoft_text.qlinear_add(*arguments)
    rounded = F(F(255) * scale + F(F(255) * F(0.5) - F(127)))
    assert int(found[0]) in (int(fused[0]), int(np.rint(rounded))), found
    return bool((found == fused).all())


def draw_scale(rng: np.random.Generator) -> np.float32:
    """Sample a scale: a multiple of a power of two, exactly or next to it, so that sums meet ties; or any."""
    dyadic = rng.integers(1, 9) * 2.0 ** rng.integers(-4, -1) * (1 + rng.integers(-3, 4) * 2.0**-23)
    return F(dyadic if rng.random() < 0.6 else rng.uniform(0.02, 1))


def draw_point(rng: np.random.Generator, name: str) -> Any:
    """Sample a zero point, a numpy scalar."""
    info = np.iinfo(name)
    return np.dtype(name).type(rng.integers(info.min, info.max + 1))


def draw_codes(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Sample codes from the whole dtype."""
    info = ml_dtypes.iinfo(name)
    return np.asarray(rng.integers(info.min, info.max + 1, shape)).astype(name)


def draw_batch(*kinds: tuple[str, Any]) -> Callable[[np.random.Generator], Arrays]:
    """Return a function that samples batches of arguments: ("uint8", shape), ("scale", factor), ("point", "uint8")."""

    def draw_one(rng: np.random.Generator, kind: str, value: Any) -> Any:
        if kind == "scale":
            return F(draw_scale(rng) * F(value))
        if kind == "point":
            return draw_point(rng, value)
        return rng.random(value) < 0.5 if kind == "bool" else draw_codes(rng, kind, value)

    def draw(rng: np.random.Generator) -> Arrays:
        return tuple(np.stack([draw_one(rng, *kind) for _ in range(BATCH)]) for kind in kinds)

    return draw


def affine(name: str, factor: float = 1.0) -> tuple[tuple[str, Any], tuple[str, Any]]:
    """Return the kinds of a scale and a zero point."""
    return ("scale", factor), ("point", name)


def find_oracle(node: str, text: Callable[..., Any], **attributes: Any) -> Callable[..., Any]:
    """Return ONNX Runtime, or the text where ONNX Runtime has other kernels."""
    # Before 1.32, ONNX Runtime rounded products in this operator that jaxquant does not round.
    has_kernel = node != "QLinearSoftmax" or onnx_runtime.VERSION >= (1, 32)

    def want(*args: np.ndarray) -> np.ndarray:
        if has_kernel and is_fused():
            return onnx_runtime.ask(node, args, args[-1].dtype, MICROSOFT, **attributes)
        return text(*args, **attributes)

    return want


def build_case(
    name: str, variant: str, kinds: tuple[tuple[str, Any], ...], dtype: str, every: bool, **attributes: Any
) -> Case:
    """Return a case of an operator whose last argument is the zero point of the result."""
    node = "QL" + "".join(part.title() for part in name.split("_"))[2:]
    op = functools.partial(getattr(jq.ops, name), **attributes)
    want = find_oracle(node, getattr(microsoft_text, name), **attributes)
    case = Case(name, dtype, variant, "ONNX Runtime", op, draw_batch(*kinds), want, by_default=BY_DEFAULT)
    return case if every else dataclasses.replace(case, transforms=FEW, by_default=None)


SHAPES = (
    ((3, 300), (3, 300)),
    ((3, 70), (70,)),
    ((70,), (2, 3, 70)),
    ((2, 3, 5), (3, 1)),
    ((3, 1), (2, 3, 5)),
    ((), (9,)),
    ((), ()),
    ((3, 1), (1,)),
    ((0, 4), (4,)),
)


def binary_cases() -> Iterator[Case]:
    """Yield cases of QLinearAdd and QLinearMul, with every kind of broadcasting and with factors of any size."""
    for name in BYTES:
        for i, (left, right) in enumerate(SHAPES):
            kinds = ((name, left), *affine(name), (name, right), *affine(name), *affine(name))
            variant = f"{list(left)} {list(right)}"
            yield build_case("qlinear_add", variant, kinds, name, i == 0)
            kinds = ((name, left), *affine(name), (name, right), *affine(name), *affine(name, 100))
            yield build_case("qlinear_mul", variant, kinds, name, i == 0)
        for factor in (2.0**-9, 2.0**-20, 2.0**9):
            left, right = ((name, (3, 300)), *affine(name)), ((name, (3, 300)), *affine(name, factor))
            shown = f"one scale times 2**{int(math.log2(factor))}"
            yield build_case("qlinear_add", f"{shown}, b", (*left, *right, *affine(name)), name, factor == 2.0**-9)
            yield build_case("qlinear_add", f"{shown}, a", (*right, *left, *affine(name)), name, False)


def joined_cases() -> Iterator[Case]:
    """Yield cases of QLinearWhere and QLinearConcat."""
    for name in BYTES:
        kinds = (("bool", (2, 1, 50)), (name, (3, 50)), *affine(name), (name, (50,)), *affine(name), *affine(name))
        yield build_case("qlinear_where", "broadcast", kinds, name, True)
        for axis in (0, -1):
            shapes = ((2, 40), (3, 40)) if axis == 0 else ((2, 40), (2, 7))
            parts = tuple(kind for shape in shapes for kind in ((name, shape), *affine(name)))
            # The matrix takes the codes first and the zero point of the result last.
            kinds = (*parts, *affine(name))
            text = functools.partial(_concat_last, microsoft_text.qlinear_concat, axis=axis)
            kernel = functools.partial(_concat_last, _run_concat, axis=axis)
            want = functools.partial(_choose, kernel, text)
            op = functools.partial(_concat_last, jq.ops.qlinear_concat, axis=axis)
            drawn = draw_batch(*kinds)
            shown = f"axis {axis}"
            yield Case("qlinear_concat", name, shown, "ONNX Runtime", op, drawn, want, by_default=BY_DEFAULT)


def _choose(kernel: Callable[..., Any], text: Callable[..., Any], *args: Any) -> Any:
    return kernel(*args) if is_fused() else text(*args)


def _concat_last(function: Callable[..., Any], *args: Any, axis: int) -> Any:
    """Call a function that takes y's scale and zero point first with arguments that have them last."""
    return function(*args[-2:], *args[:-2], axis=axis)


def _run_concat(*args: Any, axis: int) -> np.ndarray:
    return onnx_runtime.ask("QLinearConcat", args, args[1].dtype, MICROSOFT, axis=axis)


def unary_cases() -> Iterator[Case]:
    """Yield cases of the operators with a table, and of QLinearSoftmax."""
    for name in BYTES:
        for shape in ((7, 300), ()):
            kinds = ((name, shape), *affine(name, 0.1), *affine(name, 1 / 32))
            yield build_case("qlinear_sigmoid", str(list(shape)), kinds, name, shape != ())
            kinds = ((name, shape), *affine(name), *affine(name))
            yield build_case("qlinear_leaky_relu", str(list(shape)), kinds, name, shape != (), alpha=0.3)
        for shape, axis, opset in (((3, 300), -1, 13), ((4, 5, 7), 1, 13), ((4, 5, 7), 1, 12), ((40,), 0, 13)):
            kinds = ((name, shape), *affine(name, 0.2), *affine(name, 0.1))
            attributes = {"axis": axis, "opset": opset}
            shown = f"{list(shape)} axis {axis} opset {opset}"
            yield build_case("qlinear_softmax", shown, kinds, name, len(shape) == 2, **attributes)


POOLS: tuple[dict[str, Any], ...] = (
    {"kernel_shape": (2, 2), "strides": (2, 2)},
    {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)},
    {"kernel_shape": (3, 2), "pads": (1, 1, 2, 0), "count_include_pad": 1, "strides": (2, 1)},
    {"kernel_shape": (3, 3), "strides": (2, 2), "auto_pad": "SAME_UPPER"},
    {"kernel_shape": (2, 3), "strides": (2, 3), "auto_pad": "SAME_LOWER"},
    {"kernel_shape": (3, 3), "strides": (3, 2), "ceil_mode": 1, "pads": (1, 1, 1, 1)},
    {"kernel_shape": (3, 3), "strides": (2, 3), "ceil_mode": 1, "pads": (1, 0, 1, 0), "count_include_pad": 1},
    {"kernel_shape": (3, 3), "strides": (2, 2), "ceil_mode": 1, "auto_pad": "VALID"},
    {"kernel_shape": (8, 9)},
)


def pool_cases() -> Iterator[Case]:
    """Yield cases of the poolings in both layouts, and of QLinearReduceMean, for which ONNX Runtime has no kernel."""
    for name in BYTES:
        for last in (0, 1):
            shape = (2, 8, 9, 5) if last else (2, 5, 8, 9)
            kinds = ((name, shape), *affine(name), *affine(name))
            layout = "channels last" if last else "channels first"
            for i, attributes in enumerate(POOLS):
                shown = f"{layout} {i}"
                yield build_case(
                    "qlinear_average_pool", shown, kinds, name, i == last, channels_last=last, **attributes
                )
            yield build_case("qlinear_global_average_pool", layout, kinds, name, not last, channels_last=last)
        for shape, window in (((2, 3, 40), (4,)), ((1, 2, 5, 6, 7), (2, 3, 2))):
            kinds = ((name, shape), *affine(name), *affine(name))
            attributes = {"kernel_shape": window, "strides": window}
            yield build_case("qlinear_average_pool", f"{len(window)}-D", kinds, name, False, **attributes)
        kinds = ((name, (4, 5, 6)), *affine(name), *affine(name))
        op = functools.partial(jq.ops.qlinear_reduce_mean, axes=(0, -1))
        want = functools.partial(microsoft_text.qlinear_reduce_mean, axes=(0, -1))
        drawn = draw_batch(*kinds)
        yield Case("qlinear_reduce_mean", name, "axes 0 -1", "numpy (text)", op, drawn, want, by_default=BY_DEFAULT)


class Tables(NamedTuple):
    """A function that samples tables in blocks of 16, indices into them, scales and zero points.

    Attributes:
        dtype: the dtype of the codes.
        bits: the width of a code; uint8 codes are packed.
        shape: the shape of the codes.
        axes: the axis that is cut into blocks, and the axis of the lookup.
        scales: the dtype of the scales.
        has_points: whether there are zero points.
    """

    dtype: str
    bits: int
    shape: tuple[int, ...]
    axes: tuple[int, int]
    scales: str = "float32"
    has_points: bool = True

    def __call__(self, rng: np.random.Generator) -> Arrays:
        length, count = self.shape[self.axes[1]], 8 // self.bits if self.dtype == "uint8" else 1
        lengths = list(self.shape)
        lengths[self.axes[0]] = -(-lengths[self.axes[0]] // 16)

        def draw_packed(shape: Sequence[int]) -> np.ndarray:
            return draw_codes(rng, self.dtype, (BATCH, *shape[:-1], -(-shape[-1] // count)))

        # A few indices are out of range.
        indices = rng.integers(-length - 1, length + 2, (BATCH, 2, 5)).astype(np.int32)
        scales = np.array([draw_scale(rng) for _ in range(BATCH * math.prod(lengths))]).reshape(BATCH, *lengths)
        arrays = (draw_packed(self.shape), indices, scales.astype(self.scales))
        return (*arrays, draw_packed(lengths)) if self.has_points else arrays


def table_cases() -> Iterator[Case]:
    """Yield cases of GatherBlockQuantized, whose kernel takes float32 and float16."""
    for i, (draw, label) in enumerate(
        (
            (Tables("uint8", 4, (7, 90), (1, 0)), "rows"),
            (Tables("uint8", 8, (3, 4, 40), (2, 0), "float16"), "rows of matrices"),
            (Tables("uint8", 2, (7, 48), (1, 0), has_points=False), "rows, no zero points"),
            (Tables("uint4", 4, (40, 9), (0, 1)), "columns"),
            (Tables("int4", 4, (3, 40, 5), (1, 1), "float16"), "axis of the blocks"),
            (Tables("int4", 4, (3, 5, 33), (2, 1), has_points=False), "middle axis, no zero points"),
            (Tables("int4", 4, (3, 5, 33), (0, 2), "bfloat16"), "last axis"),
        )
    ):
        attributes = {"bits": draw.bits, "block_size": 16, "quantize_axis": draw.axes[0], "gather_axis": draw.axes[1]}
        text = functools.partial(microsoft_text.gather_block_quantized, **attributes)
        # Before 1.32, ONNX Runtime refused indices out of range and codes of 2 bits.
        is_run = draw.scales != "bfloat16" and onnx_runtime.VERSION >= (1, 32)
        want = functools.partial(_run_lookup, **attributes) if is_run else text
        source = "numpy (text)" if draw.scales == "bfloat16" else "ONNX Runtime"
        op = functools.partial(jq.ops.gather_block_quantized, **attributes)
        variant = f"{draw.bits} bits, {draw.scales}, {label}"
        case = Case("gather_block_quantized", draw.dtype, variant, source, op, draw, want, by_default=BY_DEFAULT)
        yield case if i in (0, 3, 4) else dataclasses.replace(case, transforms=FEW, by_default=None)


def _run_lookup(*args: Any, **attributes: Any) -> np.ndarray:
    return onnx_runtime.ask("GatherBlockQuantized", args, args[2].dtype, MICROSOFT, **attributes)


def microsoft_cases() -> list[Case]:
    """Return all cases."""
    return [*binary_cases(), *joined_cases(), *unary_cases(), *pool_cases(), *table_cases()]
