"""The cases of the element-wise operators: quantize, dequantize, dynamic quantize and fake quantize."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxquant as jq

from ..oracles import onnx_runtime, onnx_text
from ..support import inputs
from ..support.case import BATCH, Arrays, Case

SHAPE = (6, 11, 50)
INTEGERS = tuple(onnx_text.BOUNDS)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A granularity: ONNX's attributes, and the shape of the scale for an x of SHAPE."""

    name: str
    scale: tuple[int, ...]
    axis: int = 1
    block: int = 0


LAYOUTS = (
    Layout("per-tensor", ()),
    Layout("per-axis 1", (11,)),
    Layout("per-axis -1", (50,), axis=-1),
    Layout("blocked 16 of 50", (6, 11, 4), axis=2, block=16),
    Layout("blocked 4 of 11", (6, 3, 50), axis=1, block=4),
)


def draw_floats(x_dtype: np.dtype, scale_dtype: np.dtype, name: str, layout: Layout) -> Callable[..., Arrays]:
    """Return a function that samples batches of (x, scale, zero_point), with x at and next to ties of its scale."""

    def draw(rng: np.random.Generator) -> Arrays:
        scale = inputs.scales(rng, (BATCH, *layout.scale), scale_dtype)
        point = inputs.zero_points(rng, (BATCH, *layout.scale), name)
        xs = []
        for s, z in zip(scale, point, strict=True):
            wide = onnx_text.expand(s, SHAPE, layout.axis, layout.block)
            steps = onnx_text.expand(z, SHAPE, layout.axis, layout.block)
            xs.append(inputs.near_ties(rng, wide, steps.astype(np.int64), onnx_text.BOUNDS[name], x_dtype))
        # Some transforms use the first scale for the whole batch, so half of each x is at its ties.
        wide = onnx_text.expand(scale[0], SHAPE, layout.axis, layout.block)
        steps = onnx_text.expand(point[0], SHAPE, layout.axis, layout.block)
        other = inputs.near_ties(rng, wide, steps.astype(np.int64), onnx_text.BOUNDS[name], x_dtype)
        x = np.stack(xs)
        return np.where(rng.random(x.shape) < 0.5, x, other), scale, point

    return draw


def is_trusted(x: np.ndarray, scale: np.ndarray, name: str, layout: Layout) -> np.ndarray:
    """Return where ONNX Runtime's QuantizeLinear is correct.

    It converts to int32 before it clips for float16, for 2 bits, for an odd last element of 4 bits and for blocks
    off the last axis; beyond int32, infinities and NaN included, its answer there is an accident.
    """
    slips = x.dtype == np.float16 or "2" in name or "4" in name or (layout.block and layout.axis != 2)
    if not slips:
        return np.ones(x.shape, bool)
    wide = onnx_text.expand(scale, x.shape, layout.axis, layout.block)
    with np.errstate(all="ignore"):
        return np.abs(x.astype(np.float64) / wide.astype(np.float64)) < 2.0**30


def quantize_cases() -> Iterator[Case]:
    """Yield cases of QuantizeLinear from float32 to all integer dtypes: ONNX Runtime."""
    for name in INTEGERS:
        for layout in LAYOUTS:
            keywords: dict[str, Any] = {"axis": layout.axis, "block_size": layout.block}
            opset = 25 if "2" in name.replace("32", "") else 21

            def want(x, s, z, name=name, layout=layout, keywords=keywords, opset=opset):
                feeds = {"x": x, "s": s, "z": z}
                attributes: dict[str, Any] = keywords if layout.block else {"axis": layout.axis}
                (codes,) = onnx_runtime.run("QuantizeLinear", feeds, {"y": z.dtype}, opset, **attributes)
                text = onnx_text.quantize_linear(x, s, z, name, axis=layout.axis, block=layout.block)
                return np.where(is_trusted(x, s, name, layout), codes, text)

            def op(x, s, z, keywords=keywords):
                return jq.quantize_linear(x, s, z, **keywords)

            draw = draw_floats(np.dtype(np.float32), np.dtype(np.float32), name, layout)
            yield Case("quantize_linear", name, f"float32 {layout.name}", "ONNX Runtime", op, draw, want)


def half_cases() -> Iterator[Case]:
    """Yield cases of QuantizeLinear from 16-bit floats and int32: the text, and ONNX Runtime for precision=float32."""
    half, brain = onnx_text.dtype("float16"), onnx_text.dtype("bfloat16")
    layout = LAYOUTS[1]
    for name in ("int8", "uint8", "int4", "uint16"):
        for x_dtype in (half, brain):

            def text(x, s, z, name=name, precision=None):
                return onnx_text.quantize_linear(x, s, z, name, precision=precision)

            def op(x, s, z):
                return jq.quantize_linear(x, s, z)

            draw = draw_floats(x_dtype, x_dtype, name, layout)
            yield Case("quantize_linear", name, f"{x_dtype.name} per-axis 1", "numpy (text)", op, draw, text)

        def runtime_half(x, s, z, name=name):
            (codes,) = onnx_runtime.run("QuantizeLinear", {"x": x, "s": s, "z": z}, {"y": z.dtype}, 21, axis=1)
            wide = onnx_text.quantize_linear(x, s, z, name, precision=np.float32)
            return np.where(is_trusted(x, s, name, layout), codes, wide)

        def precise(x, s, z):
            return jq.quantize_linear(x, s, z, precision=jnp.float32)

        draw = draw_floats(half, half, name, layout)
        yield Case("quantize_linear", name, "float16 precision=float32", "ONNX Runtime", precise, draw, runtime_half)
    yield from int32_cases()
    yield from mixed_cases()


def mixed_cases() -> Iterator[Case]:
    """Yield cases of float32 x with another dtype of the scale or another precision, in which the division is done."""
    half, brain, single = onnx_text.dtype("float16"), onnx_text.dtype("bfloat16"), np.dtype(np.float32)
    for scale, precision in ((half, None), (brain, None), (single, half), (single, brain), (brain, single)):

        def text(x, s, z, precision=precision):
            return onnx_text.quantize_linear(x, s, z, "int8", precision=precision)

        def op(x, s, z, precision=precision):
            return jq.quantize_linear(x, s, z, precision=precision)

        draw = draw_floats(single, scale, "int8", LAYOUTS[1])
        variant = f"float32 by {scale.name}, precision={None if precision is None else precision.name}"
        yield Case("quantize_linear", "int8", variant, "numpy (text)", op, draw, text)


def int32_cases() -> Iterator[Case]:
    """Yield cases of QuantizeLinear from int32: divided in float32, or exactly by an int32 scale."""
    for scale_dtype in (np.float32, np.int32):

        def draw(rng: np.random.Generator, scale_dtype=scale_dtype) -> Arrays:
            scale = rng.integers(1, 9000, (BATCH, 11)).astype(scale_dtype)
            point = inputs.zero_points(rng, (BATCH, 11), "int8")
            k = rng.integers(-140, 140, (BATCH, *SHAPE))
            wide = np.stack([onnx_text.expand(s, SHAPE, 1, 0) for s in scale])
            x = np.floor((k + 0.5) * wide) + rng.integers(-1, 2, k.shape)
            anywhere = rng.integers(-(2**31), 2**31, k.shape)
            return np.where(rng.random(k.shape) < 0.7, x, anywhere).astype(np.int32), scale, point

        def text(x, s, z):
            return onnx_text.quantize_linear(x, s, z, "int8")

        def op(x, s, z):
            return jq.quantize_linear(x, s, z)

        variant = f"int32 by {np.dtype(scale_dtype).name} per-axis 1"
        yield Case("quantize_linear", "int8", variant, "numpy (text)", op, draw, text)


def draw_small_floats(name: str, layout: Layout) -> Callable[..., Arrays]:
    """Return a function that samples x next to ties of a float8 or float4 dtype, and beyond its last value."""

    def draw(rng: np.random.Generator) -> Arrays:
        target = onnx_text.dtype(name)
        codes = np.arange(256 if name in onnx_text.FLOAT8 else 16, dtype=np.uint8).view(target).astype(np.float64)
        values = np.unique(codes[np.isfinite(codes)])
        middle = (values[1:] + values[:-1]) / 2
        beyond = values[-1] + np.array([-1, 0.25, 0.5, 0.75, 1, 2]) * (values[-1] - values[-2])
        # float4 maps NaN to a zero with an unspecified sign, so only one sign of NaN is used.
        extremes = [e for e in inputs.EXTREMES if not (np.isnan(e) and np.signbit(e) and target.itemsize == 1)]
        pool = np.concatenate([values, middle, beyond, -beyond, np.asarray(extremes)]).astype(np.float32)
        scale = np.exp2(rng.integers(-3, 4, (BATCH, *layout.scale))).astype(np.float32)
        picked = rng.choice(pool, (BATCH, *SHAPE))
        with np.errstate(all="ignore"):
            moved = np.nextafter(picked, rng.choice(np.array([-np.inf, np.inf], np.float32), picked.shape))
            candidates = np.where(rng.random(picked.shape) < 0.5, picked, moved)
            wide_scale = np.stack([onnx_text.expand(s, SHAPE, layout.axis, layout.block) for s in scale])
            x = (candidates * np.where(rng.random(picked.shape) < 0.5, wide_scale, wide_scale[:1])).astype(np.float32)
        # XLA:CPU flushes subnormal float32 numbers to 0. Bit equality is promised for normal numbers.
        return np.where(np.abs(x) < 1e-30, np.float32(0), x), scale

    return draw


def small_float_cases() -> Iterator[Case]:
    """Yield cases of QuantizeLinear to float8 and float4: onnx's reference implementation."""
    for name in (*onnx_text.FLOAT8, "float4_e2m1fn"):
        for layout in (LAYOUTS[0], LAYOUTS[3]):
            for saturate in (True, False) if name in onnx_text.FLOAT8 else (True,):

                def want(x, s, name=name, layout=layout, saturate=saturate):
                    attributes: dict[str, Any] = {"output_dtype": onnx_runtime.tensor_type(onnx_text.dtype(name))}
                    attributes |= {"axis": layout.axis, "block_size": layout.block, "saturate": int(saturate)}
                    outputs = {"y": onnx_text.dtype(name)}
                    return onnx_runtime.reference("QuantizeLinear", {"x": x, "s": s}, outputs, 25, **attributes)[0]

                def op(x, s, name=name, layout=layout, saturate=saturate):
                    keywords: dict[str, Any] = {"axis": layout.axis, "block_size": layout.block, "saturate": saturate}
                    return jq.quantize_linear(x, s, output_dtype=onnx_text.dtype(name), **keywords)

                variant = f"float32 {layout.name}" + ("" if saturate else " saturate=0")
                draw = draw_small_floats(name, layout)
                yield Case("quantize_linear", name, variant, "onnx reference", op, draw, want)


def power_cases() -> Iterator[Case]:
    """Yield cases of float8_e8m0fnu scales, which are powers of two: the text."""
    power = onnx_text.dtype("float8_e8m0fnu")

    def draw(rng: np.random.Generator) -> Arrays:
        scale = rng.integers(110, 140, (BATCH, 6, 11, 4)).astype(np.uint8)
        k = rng.integers(-300, 300, (BATCH, *SHAPE)) + 0.5
        wide_scale = np.stack([onnx_text.expand(s.view(power).astype(np.float32), SHAPE, 2, 16) for s in scale])
        x = (k * np.where(rng.random(k.shape) < 0.5, wide_scale, wide_scale[:1])).astype(np.float32)
        return np.where(rng.random(k.shape) < 0.5, x, np.nextafter(x, np.float32(np.inf))), scale.view(power)

    def want(x, s):
        return onnx_text.quantize_linear(x, s.astype(np.float32), None, "int8", axis=2, block=16)

    def op(x, s):
        return jq.quantize_linear(x, s, axis=2, block_size=16, output_dtype=jnp.int8)

    yield Case("quantize_linear", "int8", "float32 by float8_e8m0fnu blocked 16 of 50", "numpy (text)", op, draw, want)

    def draw_back(rng: np.random.Generator) -> Arrays:
        codes = rng.integers(-128, 128, (BATCH, *SHAPE)).astype(np.int8)
        return codes, rng.integers(1, 255, (BATCH, 6, 11, 4)).astype(np.uint8).view(power)

    def want_back(x, s):
        text = onnx_text.dequantize_linear(x, s.astype(np.float32), None, axis=2, block=16)
        return np.where(np.abs(text) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), text), text)

    def op_back(x, s):
        return jq.dequantize_linear(x, s, axis=2, block_size=16, output_dtype=jnp.float32)

    variant = "float8_e8m0fnu blocked 16 of 50"
    yield Case("dequantize_linear", "int8", variant, "numpy (text)", op_back, draw_back, want_back)


def draw_codes(name: str, scale_dtype: np.dtype, layout: Layout) -> Callable[..., Arrays]:
    """Return a function that samples codes from the whole dtype, with scales and zero points."""

    def draw(rng: np.random.Generator) -> Arrays:
        scale = inputs.scales(rng, (BATCH, *layout.scale), scale_dtype)
        if name == "int32":
            return rng.integers(-(2**31), 2**31, (BATCH, *SHAPE)).astype(np.int32), scale
        if name not in onnx_text.BOUNDS:
            top = 16 if name.startswith("float4") else 256
            return rng.integers(0, top, (BATCH, *SHAPE)).astype(np.uint8).view(onnx_text.dtype(name)), scale
        low, high = onnx_text.BOUNDS[name]
        codes = rng.integers(low, high + 1, (BATCH, *SHAPE)).astype(onnx_text.dtype(name))
        return codes, scale, inputs.zero_points(rng, (BATCH, *layout.scale), name)

    return draw


def dequantize_cases() -> Iterator[Case]:
    """Yield cases of DequantizeLinear: ONNX Runtime for float32 and float16, the text if it has no kernel."""
    half, brain, single = onnx_text.dtype("float16"), onnx_text.dtype("bfloat16"), np.dtype(np.float32)
    for name in (*INTEGERS, "int32", *onnx_text.FLOAT8, "float4_e2m1fn"):
        for layout, scale_dtype in (
            (LAYOUTS[0], single),
            (LAYOUTS[2], half),
            (LAYOUTS[4], single),
            (LAYOUTS[1], brain),
        ):
            kernel = scale_dtype != brain and name != "float4_e2m1fn"

            def want(x, s, z=None, layout=layout, kernel=kernel):
                text = onnx_text.dequantize_linear(x, s, z, axis=layout.axis, block=layout.block)
                if not kernel:
                    return text
                feeds = {"x": x, "s": s} if z is None else {"x": x, "s": s, "z": z}
                attributes: dict[str, Any] = {"axis": layout.axis} | (
                    {"block_size": layout.block} if layout.block else {}
                )
                return onnx_runtime.run("DequantizeLinear", feeds, {"y": s.dtype}, 25, **attributes)[0]

            def op(x, s, z=None, layout=layout):
                return jq.dequantize_linear(x, s, z, axis=layout.axis, block_size=layout.block)

            draw = draw_codes(name, scale_dtype, layout)
            source = "ONNX Runtime" if kernel else "numpy (text)"
            yield Case("dequantize_linear", name, f"{scale_dtype.name} {layout.name}", source, op, draw, want)


def draw_ranges(shape: tuple[int, ...]) -> Callable[[np.random.Generator], Arrays]:
    """Sample float32 with two-sided, one-sided, narrow and shifted ranges, at the ties of their scale."""

    def draw(rng: np.random.Generator) -> Arrays:
        batches = []
        for _ in range(16):
            low, high = sorted(rng.normal(0, 1, 2) * np.exp(rng.uniform(-4, 6)))
            shift = rng.choice([0.0, 0.0, low, -low, high])
            x = (rng.uniform(low, high, shape) + shift).astype(np.float32)
            _, scale, _ = onnx_text.dynamic_quantize_linear(x)
            tie = ((rng.integers(-255, 256, shape) + 0.5) * np.float64(scale)).astype(np.float32)
            inside = (tie > x.min()) & (tie < x.max()) & (rng.random(shape) < 0.5)
            batches.append(np.where(inside, tie, x))
        return (np.stack(batches),)

    return draw


def dynamic_cases() -> Iterator[Case]:
    """Yield cases of DynamicQuantizeLinear: ONNX Runtime for uint8, the text for int8 and for a scale per slice."""

    def whole(x):
        y = {"y": np.uint8, "s": np.float32, "z": np.uint8}
        return tuple(onnx_runtime.run("DynamicQuantizeLinear", {"x": x}, y, 11))

    def slices(x, name, axis):
        bounds = (0, 255) if name == "uint8" else (-127, 127)
        moved = [x] if axis is None else list(np.moveaxis(x, axis, 0))
        results = [onnx_text.dynamic_quantize_linear(part, bounds) for part in moved]
        y = results[0][0] if axis is None else np.moveaxis(np.stack([f[0] for f in results]), 0, axis)
        scale, point = (np.array([f[i] for f in results]) for i in (1, 2))
        shape = () if axis is None else (len(results),)
        return y.astype(name), scale.astype(np.float32).reshape(shape), point.astype(name).reshape(shape)

    for name, axis, shape in (
        ("uint8", None, SHAPE),
        ("uint8", None, (7,)),
        ("uint8", 1, SHAPE),
        ("int8", None, SHAPE),
        ("int8", -1, SHAPE),
    ):

        def op(x, name=name, axis=axis):
            return tuple(jq.dynamic_quantize_linear(x, dtype=name, axis=axis))

        is_onnx = (name, axis) == ("uint8", None)

        def want(x, name=name, axis=axis, is_onnx=is_onnx):
            return whole(x) if is_onnx else slices(x, name, axis)

        variant = f"{'per-tensor' if axis is None else f'per-axis {axis}'} {list(shape)}"
        source = "ONNX Runtime" if is_onnx else "numpy (text)"
        yield Case("dynamic_quantize_linear", name, variant, source, op, draw_ranges(shape), want)


def fake_cases() -> Iterator[Case]:
    """Yield cases of the fake-quantize operators: quantization followed by dequantization, in numpy."""
    single = np.dtype(np.float32)
    for name in ("int8", "uint4", "uint16"):
        for layout in (LAYOUTS[0], LAYOUTS[3]):

            def want(x, s, z, name=name, layout=layout):
                keywords: dict[str, Any] = {"axis": layout.axis, "block": layout.block}
                codes = onnx_text.quantize_linear(x, s, z, name, **keywords)
                return onnx_text.dequantize_linear(codes, s, z, **keywords)

            def op(x, s, z, name=name, layout=layout):
                keywords: dict[str, Any] = {"axis": layout.axis, "block_size": layout.block}
                return jq.fake_quantize_linear(x, s, z, dtype=onnx_text.dtype(name), **keywords)

            draw = draw_floats(single, single, name, layout)
            yield Case("fake_quantize_linear", name, f"float32 {layout.name}", "numpy (text)", op, draw, want)

    def dynamic(x):
        y, scale, point = onnx_text.dynamic_quantize_linear(x)
        return ((y - point).astype(np.float32) * scale).astype(np.float32)

    draw = draw_ranges(SHAPE)
    yield Case(
        "dynamic_fake_quantize_linear",
        "uint8",
        "per-tensor",
        "numpy (text)",
        jq.dynamic_fake_quantize_linear,
        draw,
        dynamic,
    )


def elementwise_cases() -> Iterator[Case]:
    """Return all cases of the element-wise ONNX operators."""
    makers = (quantize_cases, half_cases, small_float_cases, power_cases, dequantize_cases, dynamic_cases, fake_cases)
    for maker in makers:
        yield from maker()
