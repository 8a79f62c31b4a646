"""`search_range`: the range of a weight that leaves the least squared error."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._arrays import scale_from_range
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, granularity
from .._core.entry_point import compile_entry_point, convert_number
from .._kernels import affine, min_max
from ..calibration.calibrator import Range
from . import _grid
from ._grid import Grid, check_weight

_NAME = "ptq.search_range"


def search_range(
    w: ArrayLike, spec: QuantSpec, importance: ArrayLike | None = None, *, least: float = 0.3, steps: int = 71
) -> Range:
    """Return the range of each slice of a weight with the least squared error.

    (lo, hi) = t * (min(w, 0), max(w, 0)), where t in [least, 1] minimizes sum importance * (w - w_q)^2

    w_q is w after `jq.quantize` and `dequantize`. The range of a spec with an offset need not include 0: it is w's
    range, and shrinks towards its middle. Scales and offsets that the spec quantizes count as they are before that.

    A smaller range saturates the largest elements and has finer steps for all others, which pays for 4 bits and fewer.
    The search tries each t on each slice, and finds the exact minimum among them. The whole range, t = 1, is one of
    them.

    Args:
        w: the weight, float32, float16 or bfloat16.
        spec: Static. How to quantize, with one granularity for the scale and the zero point.
        importance: weights of the squares, float32, of a shape that broadcasts to w's: the mean squares of
            the inputs, for example. None weighs all equally.
        least: Static. The smallest t, in (0, 1].
        steps: Static. The number of values of t.

    Returns:
        A `jq.Range`, which `jq.quantize` takes as `range`. A slice with a NaN or an infinity keeps its whole range.

    Raises:
        TypeError: an argument has an unsupported type or dtype.
        ValueError: `importance` has another shape; least or steps is out of range; or `w` is known and has a NaN or an
            infinity.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> w, spec = jnp.array([0.4, -0.45, 0.55, 0.35, 0.5, 1.0]), jq.QuantSpec("int2")
        >>> jq.quantize(w, spec).dequantize()
        Array([0., 0., 1., 0., 0., 1.], dtype=float32)
        >>> q = jq.quantize(w, spec, range=ptq.search_range(w, spec))
        >>> [round(value, 2) for value in q.dequantize().tolist()]
        [0.54, -0.54, 0.54, 0.54, 0.54, 0.54]

    Source: Lin et al., arXiv 2306.00978, section 5.1, for the search of a clipping range; Choukroun et al., arXiv
    1902.06822, section 4.1, for the minimum of the squared error.
    """
    _grid.check_spec(_NAME, spec)
    checks.check_real(_NAME, "least", least)
    checks.require(0 < least <= 1, _NAME, "least", "a number in (0, 1]", least)
    checks.check_integer(_NAME, "steps", steps)
    checks.require(steps > 0, _NAME, "steps", "a positive number", steps)
    w, importance = convert_number(w), convert_number(importance)
    _grid.check_finite(_NAME, w=w, importance=importance)
    return _search_range(w, importance, spec=spec, least=float(least), steps=int(steps))


@compile_entry_point(_NAME)
def _search_range(w: jax.Array, importance: jax.Array | None, *, spec: QuantSpec, least: float, steps: int) -> Range:
    check_weight(_NAME, w)
    w = lax.stop_gradient(w)
    slices = make_slices(_NAME, w, spec)
    squares = jnp.ones((), jnp.float32)
    if importance is not None:
        checks.check_array(_NAME, "importance", importance, dtypes.FLOATS)
        fits = importance.ndim == w.ndim and all(a in (1, b) for a, b in zip(importance.shape, w.shape, strict=True))
        expected = f"shape {w.shape}, in which any dimension may be 1"
        checks.require(fits, _NAME, "importance", expected, f"shape {importance.shape}")
        squares = jnp.broadcast_to(importance.astype(jnp.float32), w.shape)
    low, high = slices.compute_extremes()

    def measure_factor(factor: jax.Array) -> jax.Array:
        return slices.sum(squares * (slices.w - slices.round_to_range(*shrink_range(spec, low, high, factor))) ** 2)

    def try_factor(best: tuple[jax.Array, ...], factor: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        return keep_better(best, (measure_factor(factor), jnp.full(slices.shape, factor))), None

    # From the whole range down, so that it wins a tie.
    factors = np.linspace(1, least, steps, dtype=np.float32)
    start = (jnp.full(slices.shape, np.float32(np.inf)), jnp.ones(slices.shape, jnp.float32))
    # One factor after the other: all at once would take `steps` copies of w.
    (_, factor), _ = lax.scan(try_factor, start, jnp.asarray(factors))
    return shrink_range(spec, low, high, factor)


def shrink_range(spec: QuantSpec, low: ArrayLike, high: ArrayLike, factor: ArrayLike) -> Range:
    """Return a part of ranges: around 0, or around the middle of each if the spec has an offset."""
    low, high = jnp.asarray(low), jnp.asarray(high)
    if not spec.offset:
        return Range(low * factor, high * factor)
    # The difference of the ends may overflow, and is no number for infinite ones.
    half = (1 - jnp.asarray(factor, jnp.float32)) / 2
    shift = jnp.where(half > 0, high * half - low * half, 0)
    return Range(low + shift, high - shift)


# Ranges of a weight that are tried: the error that each of them leaves in each slice.


class Slices(NamedTuple):
    """A weight, and how its elements share scales.

    Attributes:
        w: the weight in float32.
        spec: how to quantize it, with scales that are not quantized themselves.
        shape: the shape of the scale, and of the zero point or the offset.
        includes_zero: whether the lower end of each range is at most 0, and whether the upper end is at least 0.
    """

    w: jax.Array
    spec: QuantSpec
    shape: tuple[int, ...]
    includes_zero: tuple[bool, bool]

    @property
    def block_size(self) -> int | None:
        """The block size, or None."""
        return scale_from_range.derive_block_size(self.spec)

    def expand(self, part: jax.Array) -> jax.Array:
        """Return numbers of the slices for each element."""
        return granularity.Aligned(self.block_size).expand(part, self.w)

    def sum(self, values: jax.Array) -> jax.Array:
        """Return the sum of numbers of the elements in each slice."""
        return affine.sum_to_scale(granularity.Aligned(self.block_size), values, jnp.zeros(self.shape))

    def compute_extremes(self) -> tuple[jax.Array, jax.Array]:
        """Return the least and the largest element of each slice, widened to include 0 unless there are offsets."""
        low, high = min_max.compute_extremes(self.w, self.shape, self.block_size)
        # As `jq.quantize` widens ranges: so that 0 is a code, or for offsets in unsigned codes.
        is_low, is_high = self.includes_zero
        return jnp.minimum(low, 0) if is_low else low, jnp.maximum(high, 0) if is_high else high

    def count(self) -> np.ndarray:
        """Return the number of elements in each slice. The last block along an axis may be short."""
        counts = np.ones((), np.float32)
        for length, parts in zip(self.w.shape, self.shape, strict=True):
            size = self.block_size if self.block_size and 1 < parts < length else -(-length // parts)
            counts = counts[..., None] * np.minimum(size, length - size * np.arange(parts)).astype(np.float32)
        return counts

    def compute_scales(self, low: jax.Array, high: jax.Array) -> Grid:
        """Return the scale, the zero point and the offset of each slice, for a range of each slice."""
        if self.spec.offset:
            offset = scale_from_range.compute_offset(self.spec, low).astype(jnp.float32)
            scale, _ = scale_from_range.compute_scale_above(self.spec, offset, high, dtypes.FLOAT32)
            return Grid(dtypes.scale_as_float32(scale), None, offset)
        scale, zero_point = scale_from_range.compute_scale_and_zero_point(self.spec, low, high, self.shape, self.shape)
        return Grid(dtypes.scale_as_float32(scale), None if zero_point is None else zero_point.astype(jnp.int32))

    def compute_grid(self, low: jax.Array, high: jax.Array) -> Grid:
        """Return the scale, the zero point and the offset of each element, for a range of each slice."""
        scale, *others = self.compute_scales(low, high)
        return Grid(self.expand(scale), *(None if x is None else self.expand(x) for x in others))

    def round_to_range(self, low: jax.Array, high: jax.Array) -> jax.Array:
        """Return the values of the codes, for a range of each slice."""
        grid = self.compute_grid(low, high)
        return _grid.decode_values(_grid.encode_values(self.w, grid, self.spec), grid, self.spec)


def make_slices(function: str, w: jax.Array, spec: QuantSpec) -> Slices:
    """Return the slices of a weight; raise if the zero point has another granularity than the scale."""
    scale, zero_point = scale_from_range.derive_shapes(function, _grid.separate_spec(spec, offset=False), w.shape)
    # A range that is tried gives both a scale and a zero point, so that both belong to the same elements.
    expected = "the same granularity for the scale and the zero point"
    got = f"{spec.granularity} and {spec.zero_point_granularity}"
    checks.require(scale == zero_point, function, "spec", expected, got)
    is_unsigned = spec.offset and spec.scale_spec is not None and spec.scale_spec.fixed_zero_point is None
    includes_zero = (not spec.offset or is_unsigned, not spec.offset)
    return Slices(w.astype(jnp.float32), _grid.separate_spec(spec, offset=True), scale, includes_zero)


def keep_better(best: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return, for each slice, the tuple with the smaller error, its first entry."""
    # False if an error is NaN: such a range never replaces another one.
    is_better = other[0] < best[0]
    return tuple(jnp.where(is_better, new, old) for old, new in zip(best, other, strict=True))
