"""Inputs for the contractions: whole ranges, extremes with opposite zero points, and sums that are ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..oracles import contraction_text, onnx_text
from ..support import inputs
from ..support.case import BATCH, Arrays

Draw = Callable[[np.random.Generator], Arrays]
Shape = tuple[int, ...]

STEP = 32


def integers(rng: np.random.Generator, name: str, shape: Shape) -> np.ndarray:
    """Sample codes from the whole dtype, one in five at a bound."""
    low, high = onnx_text.BOUNDS[name]
    anywhere = rng.integers(low, high + 1, shape)
    return np.where(rng.random(shape) < 0.2, rng.choice([low, high], shape), anywhere).astype(onnx_text.dtype(name))


def point(rng: np.random.Generator, name: str, shape: Shape = ()) -> np.ndarray:
    """Sample zero points from the whole dtype, most of them odd."""
    return np.asarray(inputs.zero_points(rng, shape, name), onnx_text.dtype(name))


def central(rng: np.random.Generator, name: str, shape: Shape) -> np.ndarray:
    """Sample odd zero points from the middle half of the dtype, so that sums are small and few results saturate."""
    low, high = onnx_text.BOUNDS[name]
    quarter = (high - low + 1) // 4
    return (rng.integers(low + quarter, high - quarter, shape) | 1).astype(onnx_text.dtype(name))


def opposed(rng: np.random.Generator, name: str, shape: Shape, point: Shape) -> Arrays:
    """Sample batches of codes and zero points from the whole dtype. In member 1 they are at opposite bounds."""
    codes, points = integers(rng, name, (BATCH, *shape)), inputs.zero_points(rng, (BATCH, *point), name)
    codes[1], points[1] = rng.permutation(np.array(onnx_text.BOUNDS[name])).astype(onnx_text.dtype(name))
    return codes, points


def draw_operands(left: tuple[str, Shape, Shape], right: tuple[str, Shape, Shape]) -> Draw:
    """Return a function that samples (a, b, a_zero_point, b_zero_point) of (dtype, shape, shape of the zero point)."""

    def draw(rng: np.random.Generator) -> Arrays:
        (a, az), (b, bz) = opposed(rng, *left), opposed(rng, *right)
        return a, b, az, bz

    return draw


def draw_codes(*operands: tuple[str, Shape]) -> Draw:
    """Return a function that samples codes without zero points."""
    return lambda rng: tuple(integers(rng, name, (BATCH, *shape)) for name, shape in operands)


def stepped(rng: np.random.Generator, point: np.ndarray, shape: Shape, outputs: Shape) -> np.ndarray:
    """Sample codes at zero_point + STEP * j, |j| <= 3, for half of the `outputs`, and anywhere for the other half.

    A sum over such codes is a multiple of STEP, so that a power of two makes a tie of it.
    """
    low, high = onnx_text.BOUNDS[point.dtype.name]
    wide = np.broadcast_to(point, shape).astype(np.int64)
    least, most = np.maximum(-((wide - low) // STEP), -3), np.minimum((high - wide) // STEP, 3)
    codes = (wide + STEP * rng.integers(least, most + 1)).astype(point.dtype)
    return np.where(rng.random(outputs) < 0.5, codes, integers(rng, point.dtype.name, shape))


class Requantized:
    """Samples of (a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point) for QLinear operators."""

    def __init__(
        self,
        names: tuple[str, str, str],
        shapes: tuple[Shape, Shape],
        scales: tuple[Shape, Shape, Shape] = ((), (), ()),
        *,
        convolution: dict[str, Any] | None = None,
        dtype: str = "float32",
        zero_weights: bool = False,
        bias: bool = False,
    ) -> None:
        """With zero_weights b's zero points are 0, as ONNX Runtime requires for signed filters. A bias comes last."""
        self.names, self.shapes, self.scales = names, shapes, scales
        self.convolution, self.dtype, self.zero_weights, self.bias = (
            convolution,
            onnx_text.dtype(dtype),
            zero_weights,
            bias,
        )

    def columns(self, value: np.ndarray) -> np.ndarray:
        """Return a scale or zero point of b in a shape that broadcasts with b."""
        if self.convolution is None:
            return contraction_text.per_column(value)
        return value.reshape(-1, *[1] * (len(self.shapes[1]) - 1))

    def total(self, a, az, b, bz) -> np.ndarray:
        """Return the int32 sums."""
        if self.convolution is None:
            return contraction_text.matmul_integer(a, b, az, bz)
        return contraction_text.conv_integer(a, b, az, bz, **self.convolution)

    def exact(self, total: np.ndarray, a_scale: np.ndarray, b_scale: np.ndarray) -> np.ndarray:
        """Return the real numbers that the sums represent, in float64."""
        scales = b_scale.astype(np.float64)
        spread = self.columns(scales) if self.convolution is None else scales.reshape(-1, *[1] * (total.ndim - 2))
        return total * (contraction_text.per_row(a_scale).astype(np.float64) * spread)

    def outputs(self) -> Shape:
        """Return b's shape with 1 for the dimensions that are summed."""
        shape = self.shapes[1]
        return shape[-1:] if self.convolution is None else (shape[0], *[1] * (len(shape) - 1))

    def depth(self) -> int:
        """Return the number of products of a sum."""
        return int(np.prod(self.shapes[1][1:])) if self.convolution is not None else self.shapes[1][-2]

    def tied(self, rng: np.random.Generator, *, rational: bool) -> list[np.ndarray]:
        """Sample powers of two with which sums of `stepped` codes are ties, or if rational, divided by 3, 5 or 7."""
        a_shape, b_shape, y_shape = self.scales
        common = int(rng.integers(-3, 4))
        unit = 5 + max(2, round(np.log2(self.depth()) / 2 + 0.7))
        a, b, y = (rng.integers(-1, 2, shape) if shape else np.zeros((), int) for shape in (a_shape, b_shape, y_shape))
        odd = rng.choice([3.0, 5.0, 7.0], y_shape) / 2 if rational else 1.0
        return [np.exp2(a + common), np.exp2(b), np.exp2(y + common + unit) * odd]

    def aimed(self, rng: np.random.Generator, a, az, b, bz) -> list[np.ndarray]:
        """Sample scales with full mantissas. With y_scale one sum, or one per row, is within two ulp of a tie."""
        a_scale, b_scale = (np.exp(rng.uniform(-3, 0, shape)).astype(self.dtype) for shape in self.scales[:2])
        real = np.abs(self.exact(self.total(a, az, b, bz), a_scale, b_scale))
        rows = real.reshape(-1, real.shape[-1]) if self.scales[2] else real.reshape(1, -1)
        picked = np.take_along_axis(rows, rng.integers(0, rows.shape[1], (len(rows), 1)), axis=1)[:, 0]
        aim = np.where(picked == 0, 1.0, picked) / (rng.integers(0, 100, picked.shape) + 0.5)
        return [a_scale, b_scale, aim.reshape(self.scales[2])]

    def member(self, rng: np.random.Generator, index: int) -> Arrays:
        """Sample one member of the batch: ties, ties divided by an odd number, or an aimed scale."""
        a_name, b_name, y_name = self.names
        a_shape, b_shape = self.shapes
        points = inputs.zero_points if index == 3 else lambda rng, shape, name: central(rng, name, shape)
        az, bz = (
            np.asarray(points(rng, s, n), onnx_text.dtype(n))
            for s, n in zip(self.scales, (a_name, b_name), strict=False)
        )
        bz = np.zeros_like(bz) if self.zero_weights else bz
        yz = np.asarray(points(rng, self.scales[2], y_name), onnx_text.dtype(y_name))
        a, b = integers(rng, a_name, a_shape), stepped(rng, self.columns(bz), b_shape, self.outputs())
        scales = self.aimed(rng, a, az, b, bz) if index == 2 else self.tied(rng, rational=index != 1)
        a_scale, b_scale, y_scale = (np.asarray(s).astype(self.dtype) for s in scales)
        arrays = (a, a_scale, az, b, b_scale, bz, y_scale, yz)
        if not self.bias:
            return arrays
        # Multiples of STEP and a few other numbers. The first one wraps around.
        bias = STEP * rng.integers(-500, 500, b_shape[0]) + rng.integers(0, 2, b_shape[0])
        bias[0] = rng.choice([2**31 - 1, -(2**31), 7])
        return *arrays, bias.astype(np.int32)

    def __call__(self, rng: np.random.Generator) -> Arrays:
        """Sample the whole batch."""
        members = [self.member(rng, index) for index in range(BATCH)]
        return tuple(np.stack(parts) for parts in zip(*members, strict=True))


def draw_float8(names: tuple[str, str, str], scales: tuple[Shape, Shape, Shape], shapes: tuple[Shape, Shape]) -> Draw:
    """Sample float8 operands whose float32 sums are exact in any order, and scales for ties and for saturation."""

    def codes(rng: np.random.Generator, name: str, shape: Shape) -> np.ndarray:
        every = np.arange(256, dtype=np.uint8).view(onnx_text.dtype(name)).astype(np.float64)
        values = every[np.isfinite(every) & (np.abs(every) >= 0.125) & (np.abs(every) <= 16)]
        return rng.choice(values, (BATCH, *shape)).astype(np.float32).astype(onnx_text.dtype(name))

    def draw(rng: np.random.Generator) -> Arrays:
        a, b = (codes(rng, name, shape) for name, shape in zip(names, shapes, strict=False))
        factors = [np.exp2(rng.integers(-2, 3, (BATCH, *s))).astype(np.float32) for s in scales]
        factors[2][2] = np.exp(rng.uniform(-6, 3, scales[2]))
        zeros = [np.zeros((BATCH, *s), onnx_text.dtype(n)) for s, n in zip(scales, names, strict=True)]
        return a, factors[0], zeros[0], b, factors[1], zeros[1], factors[2], zeros[2]

    return draw


def draw_dynamic(name: str, shapes: tuple[Shape, Shape], scale: Shape, point: Shape | None, bias: Shape | None) -> Draw:
    """Sample (a, b, b_scale, b_zero_point, bias), where the float32 elements of a are ties of its scale."""

    def draw(rng: np.random.Generator) -> Arrays:
        members = []
        for _ in range(BATCH):
            low, high = sorted(rng.normal(0, 1, 2) * np.exp(rng.uniform(-4, 6)))
            a = (rng.uniform(low, high, shapes[0]) + rng.choice([0.0, low, -low])).astype(np.float32)
            _, a_scale, _ = onnx_text.dynamic_quantize_linear(a)
            tie = ((rng.integers(-255, 256, a.shape) + 0.5) * np.float64(a_scale)).astype(np.float32)
            inside = (tie > a.min()) & (tie < a.max()) & (rng.random(a.shape) < 0.5)
            members.append(np.where(inside, tie, a))
        parts = [np.stack(members), integers(rng, name, (BATCH, *shapes[1]))]
        parts.append(np.exp(rng.uniform(-5, 0, (BATCH, *scale))).astype(np.float32))
        if point is not None:
            parts.append(inputs.zero_points(rng, (BATCH, *point), name))
        if bias is not None:
            parts.append(rng.normal(0, 100, (BATCH, *bias)).astype(np.float32))
        return tuple(parts)

    return draw


def draw_scaled(
    names: tuple[str, str],
    shapes: tuple[Shape, Shape],
    scales: tuple[Shape, Shape],
    points: tuple[Shape, Shape] | None = None,
    bias: Shape | None = None,
) -> Draw:
    """Sample (a, b, a_scale, b_scale, a_zero_point, b_zero_point, bias) for MatMulIntegerToFloat."""

    def draw(rng: np.random.Generator) -> Arrays:
        parts = [integers(rng, n, (BATCH, *s)) for n, s in zip(names, shapes, strict=True)]
        parts += [np.exp(rng.uniform(-5, 0, (BATCH, *s))).astype(np.float32) for s in scales]
        if points is not None:
            parts += [inputs.zero_points(rng, (BATCH, *s), n) for n, s in zip(names, points, strict=True)]
        if bias is not None:
            parts.append(rng.normal(0, 1000, (BATCH, *bias)).astype(np.float32))
        return tuple(parts)

    return draw
