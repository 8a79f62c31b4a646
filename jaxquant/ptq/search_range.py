"""`search_range`: the range of a weight that leaves the least squared error."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from .._core.entry_point import compile_entry_point, convert_number
from ..calibration import Range
from . import _grid, _matrix, _ranges

_NAME = "ptq.search_range"


def search_range(
    w: ArrayLike, spec: QuantSpec, importance: ArrayLike | None = None, *, least: float = 0.3, steps: int = 71
) -> Range:
    """Return the range of each slice of a weight with the least squared error.

    (lo, hi) = t * (min(w, 0), max(w, 0)), where t in [least, 1] minimizes sum importance * (w - w_q)^2

    w_q is w after `jq.quantize` and `dequantize`. A smaller range saturates the largest elements and has finer steps
    for all others, which pays for 4 bits and fewer. The search tries each t on each slice, and finds the exact minimum
    among them. The whole range, t = 1, is one of them.

    Args:
        w: the weight, float32, float16 or bfloat16.
        spec: Static. How to quantize, with one granularity for the scale and the zero point.
        importance: weights of the squares, float32 of w's rank, with each dimension that of w or 1: the mean squares of
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

    Source: Lin et al., arXiv 2306.00978, section 5.1, whose search of a clipping range this is; Choukroun et al., arXiv
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
    _matrix.check_weight(_NAME, w)
    w = lax.stop_gradient(w)
    slices = _ranges.make_slices(_NAME, w, spec)
    squares = jnp.ones((), jnp.float32)
    if importance is not None:
        checks.check_array(_NAME, "importance", importance, dtypes.FLOATS)
        fits = importance.ndim == w.ndim and all(a in (1, b) for a, b in zip(importance.shape, w.shape, strict=True))
        expected = f"shape {w.shape}, in which any dimension may be 1"
        checks.require(fits, _NAME, "importance", expected, f"shape {importance.shape}")
        squares = jnp.broadcast_to(importance.astype(jnp.float32), w.shape)
    low, high = slices.find_extremes()

    def measure_factor(factor: jax.Array) -> jax.Array:
        return slices.sum(squares * (slices.w - slices.round_to_range(low * factor, high * factor)) ** 2)

    def try_factor(best: tuple[jax.Array, ...], factor: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        return _ranges.keep_better(best, (measure_factor(factor), jnp.full(slices.shape, factor))), None

    # From the whole range down, so that it wins a tie.
    factors = np.linspace(1, least, steps, dtype=np.float32)
    start = (jnp.full(slices.shape, np.float32(np.inf)), jnp.ones(slices.shape, jnp.float32))
    # One factor after the other: all at once would take `steps` copies of w.
    (_, factor), _ = lax.scan(try_factor, start, jnp.asarray(factors))
    return Range(low * factor, high * factor)
