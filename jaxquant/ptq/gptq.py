"""`gptq`: weights rounded one input after the other, where later inputs make up for the errors of earlier ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import ArrayLike

from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._core import checks
from .._core.entry_point import compile_entry_point, convert_number
from . import _grid
from ._grid import Axis, Grid, make_layout, read_hessian

_NAME = "ptq.gptq"
# TPUs and GPUs may round the operands of float32 products to bfloat16 or TF32 by default, which leaves too few digits
# to tell the better of two codes.
_HIGHEST = lax.Precision.HIGHEST
# The inputs that are rounded before their errors are propagated to all later inputs. The errors of a block and its rows
# fit into a cache of the second level.
_BLOCK = 64
# Even without a damping to start from, the last attempt adds 1e4 times the mean, more than any rounding error.
_LEAST_DAMPING, _ATTEMPTS = np.float32(1e-6), 12


class Diagnostics(NamedTuple):
    """What `gptq` did, for each group of outputs; a tuple of arrays of shape (groups,).

    Attributes:
        damping: float32, the number that was added to the diagonal, in units of the mean of the diagonal. It is larger
            than the argument if the float32 Cholesky factorization failed with less.
        dead: int32, the number of inputs that are 0 in all data.
        error: float32, the squared error of the output that remains, trace(E^T H E).
        nearest_error: float32, the error of round-to-nearest with the same scale.
    """

    damping: jax.Array
    dead: jax.Array
    error: jax.Array
    nearest_error: jax.Array


class Factors(NamedTuple):
    """What rounding needs of the second moments of each group, whatever the grid; see `factor_groups`.

    Attributes:
        order: int32 [groups, inputs], the order in which the inputs are rounded.
        feedback: float32 [groups, inputs, inputs], R_ij / R_jj above the diagonal, in that order.
        damping: float32 [groups], what was added to the diagonal, in units of its mean.
    """

    order: jax.Array
    feedback: jax.Array
    damping: jax.Array


export.register_namedtuple_serialization(Diagnostics, serialized_name="jaxquant.ptq.Diagnostics")


def gptq(
    w: ArrayLike,
    hessian: ArrayLike,
    spec: QuantSpec,
    grid: QuantizedArray | None = None,
    *,
    axis: int | tuple[int, ...] = -1,
    activation_order: bool = True,
    damping: float = 0.01,
    sweeps: int = 0,
    stored_last: int | tuple[int, ...] | None = None,
    diagnostics: bool = False,
) -> Any:
    """Quantize a weight such that the contraction's output, and not the weight, has a small error.

    minimize trace(E^T H E) over the codes, with E = w - dequantized w and H the mean of x x^T

    The inputs are rounded one after the other. Before an input is rounded, the errors of earlier inputs are moved to
    it, as far as it can make up for them. With H + damping * mean(diag H) * I = R R^T, where R is upper triangular:

    q_j = round(w_j + sum_{i < j} (w_i - q_i) R_ij / R_jj)

    This is the paper's iteration without its inverse: R^-T R^-1 is the inverse of the Hessian, and the paper takes
    the rows of the Cholesky factor. One float32 factorization instead of two keeps more digits. If it fails, the
    damping is raised tenfold until it succeeds, which the diagnostics tell. The scale and the zero point are as
    `jq.quantize` finds them, or as in `grid`, and do not change.

    An input without data (0 on the diagonal) is rounded to nearest, and no error is moved to it. Under `jax.jit`, a NaN
    or an infinity in `hessian` cannot raise an error; the scale is then NaN, and with it every value.

    Args:
        w: the weight, float32, float16 or bfloat16, of any shape.
        hessian: the second moments of the inputs of each output, `Moments.second`: float32 (inputs, inputs) or
            (groups, inputs, inputs). An input is an index of the axes that are summed, in the order of w. With groups,
            the outputs are cut into as many runs of equal length, and each run has inputs of its own, as in grouped
            convolutions or batches of matrices.
        spec: Static. How to quantize, with any dtype and granularity.
        grid: an array with the same shape and dtype of codes, for its scale and its zero point or offset, which may be
            quantized themselves; its codes do not matter. None finds them in the range of w.
        axis: Static. The axis or axes of w that the contraction keeps: the output features. It sums over all others.
        activation_order: Static. Whether to round the inputs in the order of their mean squares, the largest first. The
            errors of these matter most, and the inputs that come first have all others left to make up for them.
        damping: Static. What is added to the diagonal, in units of its mean over the inputs with data.
        sweeps: Static. How often each code then becomes the best one for all others, in the order of w. No step raises
            the error. Each sweep takes about as long as the first pass.
        stored_last: Static. The axes that the codes hold last in memory, as for `jq.quantize`.
        diagnostics: Static. Whether to return a `Diagnostics`, too.

    Returns:
        A QuantizedArray with the shape and the dtype of w. With `diagnostics`, the pair of it and a `Diagnostics`.

    Raises:
        TypeError: an argument has an unsupported type or dtype.
        ValueError: the shapes do not fit each other; damping is negative; or `w` or `hessian` is known and has a NaN
            or an infinity.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> w = jnp.array([[7.0, 1.4], [0.4, 7.0], [0.4, 0.4]])
        >>> x = jnp.array([[1.0, 1.0, 0.9], [1.0, 0.9, 1.0]])  # the inputs are nearly equal
        >>> spec = jq.QuantSpec("int4", jq.PerAxis(1))
        >>> ptq.gptq(w, x.T @ x / 2, spec).codes  # 0.4 + 0.4 is 1
        Array([[7, 1],
               [0, 7],
               [1, 1]], dtype=int4)
        >>> jq.quantize(w, spec).codes
        Array([[7, 1],
               [0, 7],
               [0, 0]], dtype=int4)

    Source: Frantar et al., arXiv 2210.17323, algorithm 1; Chee et al., arXiv 2307.13304, theorem 6, for the form
    without an inverse. The inputs have the order of the authors' program (its option "act-order"). Behdin et
    al., arXiv 2309.01885, section 3, for the sweeps.
    """
    _grid.check_spec(_NAME, spec)
    checks.check_flag(_NAME, "activation_order", activation_order)
    checks.check_flag(_NAME, "diagnostics", diagnostics)
    checks.check_real(_NAME, "damping", damping)
    checks.require(damping >= 0, _NAME, "damping", "0 or a positive number", damping)
    checks.check_integer(_NAME, "sweeps", sweeps)
    checks.require(sweeps >= 0, _NAME, "sweeps", "0 or a positive number", sweeps)
    w, hessian = convert_number(w), convert_number(hessian)
    _grid.check_finite(_NAME, w=w, hessian=hessian)
    q, report = _gptq(
        w, hessian, grid, spec=spec, axis=checks.check_integers(_NAME, "axis", axis),
        activation_order=bool(activation_order), damping=float(damping), sweeps=int(sweeps),
        stored_last=None if stored_last is None else checks.check_integers(_NAME, "stored_last", stored_last),
    )  # fmt: skip
    return (q, report) if diagnostics else q


@compile_entry_point(_NAME)
def _gptq(
    w: jax.Array, hessian: jax.Array, grid: QuantizedArray | None, *, spec: QuantSpec, axis: Axis,
    activation_order: bool, damping: float, sweeps: int, stored_last: Axis | None,
) -> tuple[QuantizedArray, Diagnostics]:  # fmt: skip
    hessian, layout = read_hessian(_NAME, w, hessian, axis)
    _grid.check_grid(_NAME, grid, w, spec)
    # The codes have no gradient. Without this `jax.grad` of a caller would fail at the while loop of `factor_hessian`.
    w, hessian, grid = lax.stop_gradient((w, hessian, grid))
    scales = _grid.compute_scales(_NAME, w, spec, _grid.read_grid(_NAME, grid))
    wide = _grid.subtract_offset(w, scales)
    each = _grid.expand_scales(scales, wide, layout)
    factors = _factor_groups(hessian, damping, activation_order)
    step = functools.partial(quantize_group, spec=spec, sweeps=sweeps)
    codes, report = map_groups(step, layout.arrange(wide), hessian, each, factors)
    is_valid = jnp.isfinite(hessian).all() & jnp.isfinite(wide).all()
    scales = _grid.spoil_scales(scales, is_valid)
    return _grid.build_array(_NAME, codes, layout, scales, spec, w.dtype, stored_last), report


def map_groups(function: Callable[..., Any], *arrays: Any) -> Any:
    """Return the results of a function for each index of the first axis of some trees, stacked."""
    if jax.tree.leaves(arrays)[0].shape[0] > 1:
        return jax.vmap(function)(*arrays)
    # A batch of one would keep XLA:CPU from its fast kernels for a matrix.
    results = function(*jax.tree.map(lambda x: x[0], arrays))
    return jax.tree.map(lambda x: x[None], results)


def _factor_groups(hessian: jax.Array, damping: float, is_ordered: bool) -> Factors:
    """Return the factors of second moments [groups, inputs, inputs]."""

    def factor_group(hessian: jax.Array) -> Factors:
        diagonal = jnp.diagonal(hessian)
        order = jnp.argsort(-diagonal, stable=True) if is_ordered else jnp.arange(len(diagonal))
        return Factors(order, *factor_hessian(hessian[order][:, order], damping))

    return map_groups(factor_group, hessian)


factor_groups = functools.partial(jax.jit, static_argnames=("damping", "is_ordered"))(_factor_groups)


@functools.partial(jax.jit, static_argnames=("spec", "axis", "sweeps"))
def round_on_grid(
    w: jax.Array, hessian: jax.Array, factors: Factors, grid: QuantizedArray, *, spec: QuantSpec, axis: Axis,
    sweeps: int,
) -> QuantizedArray:  # fmt: skip
    """Return what `gptq` returns, with factors that several grids share; nothing is checked.

    Args:
        w: the weight.
        hessian: [groups, inputs, inputs].
        factors: the factors of the second moments.
        grid: an array, for its scale and zero point.
        spec: Static. The spec.
        axis: Static. The axes that are kept.
        sweeps: Static. As for `gptq`.
    """
    layout = make_layout(_NAME, w.shape, axis, hessian.shape[0])
    scales = _grid.compute_scales(_NAME, w, spec, _grid.read_grid(_NAME, grid))
    wide = _grid.subtract_offset(w, scales)
    each = _grid.expand_scales(scales, wide, layout)
    step = functools.partial(quantize_group, spec=spec, sweeps=sweeps)
    codes, _ = map_groups(step, layout.arrange(wide), hessian, each, factors)
    return _grid.build_array(_NAME, codes, layout, scales, spec, w.dtype, None)


def quantize_group(
    w: jax.Array, hessian: jax.Array, grid: Grid, factors: Factors, *, spec: QuantSpec, sweeps: int
) -> tuple[jax.Array, Diagnostics]:
    """Return the codes of a matrix [inputs, outputs], and what was done."""
    order, feedback, used = factors
    rows, ordered = w[order], jax.tree.map(lambda x: x[order], grid)
    codes, errors = _round_rows(rows, ordered, feedback, spec)
    position = jnp.argsort(order)
    codes, errors = codes[position], errors[position]
    if sweeps:
        codes = descend(w, codes, hessian, grid, spec, sweeps)
        errors = w - _grid.decode_values(codes, grid, spec)
    nearest = w - _grid.decode_values(_grid.encode_values(w, grid, spec), grid, spec)
    report = Diagnostics(
        used,
        jnp.sum(jnp.diagonal(hessian) == 0, dtype=jnp.int32),
        compute_error(errors, hessian),
        compute_error(nearest, hessian),
    )
    return codes, report


def compute_error(errors: jax.Array, hessian: jax.Array) -> jax.Array:
    """Return trace(E^T H E), the squared error of the outputs."""
    return jnp.sum(errors * jnp.matmul(hessian, errors, precision=_HIGHEST))


def factor_hessian(hessian: jax.Array, damping: float) -> tuple[jax.Array, jax.Array]:
    """Return R_ij / R_jj above the diagonal, 0 elsewhere, with R R^T the damped matrix; and the damping in use."""
    diagonal = jnp.diagonal(hessian)
    is_live = diagonal > 0
    # Inputs that are always 0 would lower the mean, and with it the damping of all others.
    mean = jnp.sum(diagonal) / jnp.maximum(jnp.sum(is_live), 1).astype(jnp.float32)
    # Divided by the mean, no element overflows when it is squared.
    normal = hessian / jnp.where(is_live.any(), mean, np.float32(1))
    # A Cholesky factor of the matrix in reverse order, in reverse order, is upper triangular.
    reverse = normal[::-1, ::-1]
    # A 1 in the row of zeros of such an input: no error moves to it or away from it.
    dead = jnp.where(is_live, 0, 1).astype(jnp.float32)[::-1]

    def attempt(state: tuple[Any, ...]) -> tuple[Any, ...]:
        count, last, _ = state
        # The first attempt is with the caller's damping.
        used = jnp.where(count == 0, np.float32(damping), jnp.maximum(last * np.float32(10), _LEAST_DAMPING))
        # Only one triangle is read, so that symmetrizing would take a pass over the matrix for nothing.
        factor = lax.linalg.cholesky(reverse + jnp.diag(used + dead), symmetrize_input=False)
        return count + 1, used, factor

    def has_failed(state: tuple[Any, ...]) -> jax.Array:
        # With a NaN in the moments every attempt would fail.
        count, _, factor = state
        return (count == 0) | ((count < _ATTEMPTS) & ~jnp.isfinite(factor).all() & jnp.isfinite(normal).all())

    start = (jnp.int32(0), jnp.float32(0), jnp.zeros_like(normal))
    _, used, factor = lax.while_loop(has_failed, attempt, start)
    upper = factor[::-1, ::-1]
    return jnp.triu(upper / jnp.diagonal(upper)[None], 1), used


def _round_rows(w: jax.Array, grid: Grid, feedback: jax.Array, spec: QuantSpec) -> tuple[jax.Array, jax.Array]:
    """Return the codes of all rows of a matrix, and their errors."""
    count = w.shape[0]
    size = min(_BLOCK, max(count, 1))
    extra = -count % size
    # Rows of zeros fill the last block: no error moves to them.
    rows = jnp.pad(w, ((0, extra), (0, 0)))
    feedback = jnp.pad(feedback, (0, extra))
    filled = jax.tree.map(lambda x: jnp.pad(x, ((0, extra), (0, 0)), constant_values=1), grid)
    shape = jax.eval_shape(lambda: _grid.encode_values(rows, filled, spec))

    def round_block(index: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        errors, _ = state
        start = index * size
        columns = lax.dynamic_slice_in_dim(feedback, start, size, 1)
        block, own = (lax.dynamic_slice_in_dim(x, start, size) for x in (rows, columns))
        # The errors of this block and of later ones are still 0.
        moved = block + jnp.matmul(columns.T, errors, precision=_HIGHEST)

        def round_row(position: jax.Array, inner: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            errors, codes = inner
            weights = lax.dynamic_index_in_dim(own, position, 1, keepdims=False)
            # Rows of the block that are not rounded yet have errors of 0, so that the product needs no mask.
            value = moved[position] + jnp.matmul(weights, errors, precision=_HIGHEST)
            here = filled.take_row(start + position)
            code = _grid.encode_values(value, here, spec)
            # The distance from w and not from the moved value: R holds what each original error costs the inputs after
            # it, while the paper, with the inverse, moves on the errors of moved values.
            error = block[position] - _grid.decode_values(code, here, spec)
            return errors.at[position].set(error), codes.at[position].set(code)

        empty = (jnp.zeros_like(block), jnp.zeros(block.shape, shape.dtype))
        inner = lax.fori_loop(0, size, round_row, empty)
        return tuple(lax.dynamic_update_slice_in_dim(x, y, start, 0) for x, y in zip(state, inner, strict=True))  # type: ignore[return-value]

    start = (jnp.zeros_like(rows), jnp.zeros(rows.shape, shape.dtype))
    errors, codes = lax.fori_loop(0, rows.shape[0] // size, round_block, start)
    return codes[:count], errors[:count]


# Coordinate descent on the codes of a weight: each code in turn becomes the best one for all others.


def descend(
    w: jax.Array, codes: jax.Array, hessian: jax.Array, grid: Grid, spec: QuantSpec, sweeps: int,
    bounds: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:  # fmt: skip
    """Return the codes after some sweeps over the inputs.

    With errors E = w - values of the codes, trace(E^T H E) is a parabola in each value. Its minimum, rounded to the
    grid, is the best code, so that no step raises the error.

    Args:
        w: [inputs, outputs].
        codes: the codes to start from, as `encode_values` returns them.
        hessian: [inputs, inputs].
        grid: the scale and the zero point of each element.
        spec: Static. The spec.
        sweeps: Static. The number of sweeps.
        bounds: the least and the largest code of each element, or None for the spec's bounds.
    """
    count = w.shape[0]
    size = min(_BLOCK, max(count, 1))
    # Rows with a Hessian of 0, so that their errors neither count nor move, fill the last block.
    filled = ((0, -count % size), (0, 0))
    w, codes = jnp.pad(w, filled), jnp.pad(codes, filled)
    limits = jax.tree.map(lambda x: jnp.pad(x, filled), bounds)
    grid = jax.tree.map(lambda x: jnp.pad(x, filled, constant_values=1), grid)
    hessian = jnp.pad(hessian, (filled[0], filled[0]))
    diagonal = jnp.diagonal(hessian)
    errors = w - _grid.decode_values(codes, grid, spec)

    def visit_block(index: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        errors, codes = state
        start = index % (w.shape[0] // size) * size
        rows = lax.dynamic_slice_in_dim(hessian, start, size)
        own = lax.dynamic_slice_in_dim(rows, start, size, 1)
        before = lax.dynamic_slice_in_dim(errors, start, size)
        slopes = jnp.matmul(rows, errors, precision=_HIGHEST)

        def visit_row(position: jax.Array, inner: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            current, codes = inner
            curve = diagonal[start + position]
            # The slope at the errors before this block, and what its rows have changed since.
            slope = slopes[position] + jnp.matmul(own[position], current - before, precision=_HIGHEST)
            here, row = grid.take_row(start + position), w[start + position]
            value = row - current[position] + slope / jnp.where(curve > 0, curve, jnp.ones_like(curve))
            code = _grid.encode_values(value, here, spec)
            if limits is not None:
                code = jnp.clip(code, *(limit[start + position] for limit in limits))
            code = jnp.where(curve > 0, code, codes[position])
            error = row - _grid.decode_values(code, here, spec)
            return current.at[position].set(error), codes.at[position].set(code)

        inner = (before, lax.dynamic_slice_in_dim(codes, start, size))
        inner = lax.fori_loop(0, size, visit_row, inner)
        return tuple(lax.dynamic_update_slice_in_dim(x, y, start, 0) for x, y in zip(state, inner, strict=True))  # type: ignore[return-value]

    steps = sweeps * (w.shape[0] // size)
    return lax.fori_loop(0, steps, visit_block, (errors, codes))[1][:count]
