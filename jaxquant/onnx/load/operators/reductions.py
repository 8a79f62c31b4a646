"""Reductions, cumulative sums, and the positions of extremes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from .. import float_kernels
from ..graph import register
from ..interpret import Call
from ..values import Tensor, is_static, list_ints, namespace, normalize_axis, wrap_result


def _read_axes(call: Call, x: Any, axes: Any) -> tuple[int, ...] | None:
    """Return the axes to reduce, or None if x stays as it is."""
    value = call.get("axes") if axes is None else axes
    if value is None or not len(list_ints(value)):
        return None if call.get("noop_with_empty_axes", 0) else tuple(range(x.ndim))
    return tuple(normalize_axis(axis, x.ndim) for axis in list_ints(value))


def _reduce_extreme(xp: Any, name: str, x: Any, axes: Any, keepdims: bool) -> Any:
    if x.dtype == np.bool_:
        return (xp.any if name == "max" else xp.all)(x, axis=axes, keepdims=keepdims)
    # A symbolic length is 1 or more.
    if axes is not None and all(is_symbolic_dim(x.shape[axis]) or x.shape[axis] for axis in axes):
        return getattr(xp, name)(x, axis=axes, keepdims=keepdims)
    kind = x.dtype.kind in "iu"
    # An empty slice has the neutral element, as in ONNX.
    least, most = (np.iinfo(x.dtype).min, np.iinfo(x.dtype).max) if kind else (-np.inf, np.inf)
    initial = np.asarray(least if name == "max" else most, x.dtype)
    return getattr(xp, name)(x, axis=axes, keepdims=keepdims, initial=initial)


def _add_or_multiply(call: Call, name: str, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Return a sum, a mean or a product; sums of consecutive elements are added in ONNX Runtime's order."""
    if name == "mean" and x.dtype.kind in "iu" and is_static(x.shape):
        return _average_integers(x, axes, keepdims)
    first = x.ndim - len(axes)
    is_last = sorted(axes) == list(range(first, x.ndim)) and is_static(x.shape[first:])
    length = math.prod(x.shape[first:]) if is_last else 0
    if name == "prod" or not call.has_runtime_floats(x) or not float_kernels.is_summed_in_lanes(length):
        return getattr(namespace(x), name)(x, axis=axes, keepdims=keepdims)
    rows = x.reshape(*x.shape[:first], length)
    y = float_kernels.sum_last(rows)
    # A true division: XLA would multiply by the reciprocal of a constant.
    y = float_kernels.divide(y, jnp.full_like(y, rows.shape[-1])) if name == "mean" else y
    return y.reshape(*y.shape, *(1,) * len(axes)) if keepdims else y


def _average_integers(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Return means of integers, cut off towards zero: no float type holds all their sums."""
    xp, count = namespace(x), math.prod(x.shape[axis] for axis in axes)
    total = xp.sum(x, axis=axes, keepdims=keepdims, dtype=x.dtype)
    quotient = xp.abs(total) // np.asarray(max(count, 1), x.dtype)
    return wrap_result(xp.where(total < 0, -quotient, quotient) if x.dtype.kind == "i" else quotient)


def _square(x: Any) -> Any:
    return x * x


# For each operator: what is applied to the elements, the reduction, and what is applied to its result.
_REDUCTIONS: dict[str, tuple[Any, str, Any]] = {
    "ReduceSum": (None, "sum", None),
    "ReduceMean": (None, "mean", None),
    "ReduceProd": (None, "prod", None),
    "ReduceMax": (None, "max", None),
    "ReduceMin": (None, "min", None),
    "ReduceL1": ("abs", "sum", None),
    "ReduceL2": (_square, "sum", "sqrt"),
    "ReduceSumSquare": (_square, "sum", None),
    "ReduceLogSum": (None, "sum", "log"),
}


def _apply(xp: Any, function: Any, x: Any) -> Any:
    if function is None:
        return x
    return getattr(xp, function)(x) if isinstance(function, str) else function(x)


def _register_reductions() -> None:
    def bind(before: Any, reduction: str, after: Any) -> Any:
        def reduce(call: Call, x: Any, axes: Any = None) -> Any:
            xp, kept, keepdims = namespace(x), _read_axes(call, x, axes), bool(call.get("keepdims", 1))
            y = _apply(xp, before, x)
            if kept is not None:
                if reduction in ("max", "min"):
                    y = _reduce_extreme(xp, reduction, y, kept, keepdims)
                else:
                    y = _add_or_multiply(call, reduction, y, kept, keepdims)
            return wrap_result(_apply(xp, after, y)).astype(x.dtype)

        return reduce

    for name, parts in _REDUCTIONS.items():
        register(name, static=(1,), folds=True)(bind(*parts))


_register_reductions()


@register("ReduceLogSumExp", static=(1,))
def reduce_log_sum_exp(call: Call, x: jax.Array, axes: np.ndarray | None = None) -> Any:
    """ONNX ReduceLogSumExp."""
    kept = _read_axes(call, x, axes)
    if kept is None:
        return x
    return jax.nn.logsumexp(x, axis=kept, keepdims=bool(call.get("keepdims", 1))).astype(x.dtype)


@register("ArgMax", "ArgMin", folds=True)
def locate_extreme(call: Call, x: Tensor) -> Any:
    """ONNX ArgMax and ArgMin: of equal elements the first, or with select_last_index the last."""
    axis, xp = normalize_axis(call.get("axis", 0), x.ndim), namespace(x)
    find = xp.argmax if call.node.op == "ArgMax" else xp.argmin
    is_last = bool(call.get("select_last_index", 0))
    index = x.shape[axis] - 1 - find(xp.flip(x, axis), axis) if is_last else find(x, axis)
    index = index.astype(np.int64 if xp is np else jnp.int32)
    return xp.expand_dims(index, axis) if call.get("keepdims", 1) else index


@register("CumSum", "CumProd", static=(1,), folds=True)
def accumulate(call: Call, x: Tensor, along: np.ndarray) -> Any:
    """ONNX CumSum and CumProd."""
    axis, xp = normalize_axis(int(along.reshape(())), x.ndim), namespace(x)
    product = call.node.op == "CumProd"
    y = xp.flip(x, axis) if call.get("reverse", 0) else x
    # Exclusive: the neutral element comes first and the last element is left out.
    if call.get("exclusive", 0) and x.shape[axis]:
        first = xp.full_like(y.take(np.array([0]), axis), int(product))
        y = xp.concatenate([first, y.take(np.arange(x.shape[axis] - 1), axis)], axis)
    y = (xp.cumprod if product else xp.cumsum)(y, axis).astype(x.dtype)
    return xp.flip(y, axis) if call.get("reverse", 0) else y
