"""The evaluation of a program in which some parameters have adapters.

The contraction of an adapted parameter is that of its codes plus two small ones, with the factors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core import dtypes
from .._program import jaxpr, moves
from .._program.analysis import Address, Site, read_product_numbers
from .._program.jaxpr import Equation
from .._program.replacing import Mode, Records, Stores
from . import _operations as operations
from ._moved_factors import AdaptedParameter, MovedFactors


class AdaptedMode:
    """A mode in which some parameters have adapters.

    Args:
        mode: the mode that contracts the codes.
    """

    updates_records = False

    def __init__(self, mode: Mode) -> None:
        self.mode = mode

    def replaces(self, site: Site) -> bool:
        """Return whether the contraction runs on codes."""
        return self.mode.replaces(site)

    def contract(self, site: Site, operands: Sequence[Any], records: Records, stores: Stores) -> tuple[Any, Records]:
        """Return the result of the contraction of codes, plus the contractions with the factors."""
        values = [x.base if isinstance(x, AdaptedParameter) else x for x in operands]
        result, records = self.mode.contract(site, values, records, stores)
        if site.weight is None or not isinstance(operands[site.weight], AdaptedParameter):
            return result, records
        w = operands[site.weight]
        # Neither sum may be computed together with what is around it, which is different in a program with a gradient.
        change, factor = lax.optimization_barrier(_CONTRACTIONS[site.operation](site, operands, w))
        total = result + change.astype(result.dtype)
        return (total if factor is None else total * factor.astype(result.dtype)), records

    def locate_record(self, site: Site) -> tuple[str, tuple[Address, ...]]:
        """Return the name of a site's record, and the scans with an entry for each iteration."""
        return self.mode.locate_record(site)

    def is_parameter(self, value: object) -> bool:
        """Return whether a value is a quantized parameter, with an adapter or without one."""
        return isinstance(value, AdaptedParameter) or self.mode.is_parameter(value)

    def can_join(self, parameters: Sequence[Any]) -> bool:
        """Return whether parameters can be concatenated: not those with adapters."""
        return not any(isinstance(x, AdaptedParameter) for x in parameters) and self.mode.can_join(parameters)

    def move_elements(self, equation: Equation, operands: Sequence[Any]) -> list[Any]:
        """Return the results of an equation on codes and on factors."""
        moved = self.mode.move_elements(equation, [x.base if isinstance(x, AdaptedParameter) else x for x in operands])
        name = jaxpr.read_name(equation)
        if name == moves.BARRIER:
            pairs = zip(operands, moved, strict=True)
            return [x.replace(base, x.parts) if isinstance(x, AdaptedParameter) else base for x, base in pairs]
        first = operands[1 if name == moves.SELECTION else 0]
        if not isinstance(first, AdaptedParameter):
            return moved
        if name == moves.SELECTION:
            return [first.replace(moved[0], first.parts)]
        move = moves.MOVES[name].move
        assert move is not None
        results = move(equation, MovedFactors(first.base.shape, first.parts), *operands[1:])
        return [first.replace(base, new.parts) for base, new in zip(moved, results, strict=True)]

    def convert_to_array(self, parameter: Any) -> jax.Array:
        """Return the floats that codes and adapters stand for."""
        return (
            parameter.dequantize() if isinstance(parameter, AdaptedParameter) else self.mode.convert_to_array(parameter)
        )

    def choose_action(self, address: Address) -> Any:
        """Return what becomes of an equation between contractions that runs on codes, or None."""
        return self.mode.choose_action(address)

    def run_action(self, action: Any, operands: Sequence[Any], records: Records) -> tuple[list[Any], Records]:
        """Return the results of such an equation, and the records."""
        return self.mode.run_action(action, operands, records)

    def is_codes(self, value: object) -> bool:
        """Return whether a value is codes between contractions."""
        return self.mode.is_codes(value)

    def prepare_stacked(self, parameter: Any) -> Any:
        """Return a parameter with entries for each index of its first axis."""
        if not isinstance(parameter, AdaptedParameter):
            return self.mode.prepare_stacked(parameter)
        length = parameter.base.shape[0]
        parts = {name: jnp.broadcast_to(x, (length, *x.shape[1:])) for name, x in parameter.parts.items()}
        return parameter.replace(self.mode.prepare_stacked(parameter.base), parts)

    def call_with_rule(self, equation: Equation, operands: Any, run: Callable[..., Any], records: Records) -> Any:
        """Return the results of the body as the mode calls it; a parameter with an adapter has its gradient there."""
        return self.mode.call_with_rule(equation, operands, run, records)

    def call_with_remat(self, equation: Equation, operands: Any, run: Callable[..., Any], records: Records) -> Any:
        """Return the results of the body, which the backward pass computes again."""
        parameters = equation.params
        call = jax.checkpoint(run, prevent_cse=parameters["prevent_cse"], policy=parameters["policy"])
        return call(operands, records)


# The contractions with the factors. Each returns the change of the result, and the factor of "dora" or None.


def _drop_inputs(x: jax.Array, site: Site, w: AdaptedParameter) -> jax.Array:
    """Return the inputs of an adapter, in the dtype of its factors, some of them 0."""
    x = x.astype(dtypes.choose_wider(x.dtype, w.parts["a"].dtype))
    if "key" not in w.parts:
        return x
    data = w.parts["key"].reshape(-1, w.parts["key"].shape[-1])[0]
    key = jax.random.fold_in(jax.random.wrap_key_data(data, impl=w.kind), zlib.crc32(repr(site.address).encode()))
    return jnp.where(jax.random.bernoulli(key, 1 - w.dropout, x.shape), x / (1 - w.dropout), jnp.zeros((), x.dtype))


def _arrange(part: jax.Array, shape: Sequence[int], places: Sequence[int]) -> jax.Array:
    """Return the dimensions at some places of a factor, in full, and its last one; the others have length 1."""
    others = [place for place in range(len(shape)) if place not in places]
    part = lax.transpose(part, (*others, *places, len(shape)))
    part = part.reshape(part.shape[len(others) :])
    return jnp.broadcast_to(part, (*(shape[place] for place in places), part.shape[-1]))


def _order_factors(w: AdaptedParameter, summed: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Return the factor that has the dimensions that are summed, and the other one."""
    a, b = w.parts["a"], w.parts["b"]
    return (b, a) if any(b.shape[place] != 1 for place in summed) else (a, b)


def _contract_product(site: Site, operands: Sequence[Any], w: AdaptedParameter) -> tuple[jax.Array, jax.Array | None]:
    side = site.weight or 0
    contracted, batch = read_product_numbers(site.equation)
    (xc, xb), (wc, wb) = ((contracted[i], batch[i]) for i in (1 - side, side))
    shape, precision = w.base.shape, site.equation.params["precision"]
    free = [place for place in range(len(shape)) if place not in (*wc, *wb)]
    x = _drop_inputs(operands[1 - side], site, w)
    first, second = _order_factors(w, wc)
    count = len(wb)
    numbers = ((tuple(xc), tuple(range(count, count + len(wc)))), (tuple(xb), tuple(range(count))))
    h = lax.dot_general(x, _arrange(first, shape, (*wb, *wc)), numbers, precision=precision)
    last = _arrange(second, shape, (*wb, *free))
    numbers = (((h.ndim - 1,), (last.ndim - 1,)), (tuple(range(count)), tuple(range(count))))
    y = lax.dot_general(h, last, numbers, precision=precision)
    kept = h.ndim - 1 - count  # the dimensions of x in the result
    ones = (1,) * kept
    factor = None
    if "factor" in w.parts:
        rows = _arrange(w.parts["factor"], shape, (*wb, *free))[..., 0]
        outputs = rows.shape[count:]
        factor = rows.reshape(*rows.shape[:count], *((*ones, *outputs) if side else (*outputs, *ones)))
    if side == 0:
        y = jnp.moveaxis(y, range(count, count + kept), range(y.ndim - kept, y.ndim))
    return y, factor


def _contract_ragged(site: Site, operands: Sequence[Any], w: AdaptedParameter) -> tuple[jax.Array, None]:
    numbers, shape = site.equation.params["ragged_dot_dimension_numbers"], w.base.shape
    ((xc, wc), _), (row,), (group,) = (
        numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions,
    )  # fmt: skip
    free = [place for place in range(len(shape)) if place not in (*wc, group)]
    first, second = _order_factors(w, wc)

    def contract(x: jax.Array, xc: Sequence[int], row: int, factor: jax.Array, wc: Sequence[int]) -> jax.Array:
        new = lax.RaggedDotDimensionNumbers(((tuple(xc), tuple(wc)), ((), ())), [row], [0])
        return lax.ragged_dot_general(x, factor, operands[2], new, precision=site.equation.params["precision"])

    x = _drop_inputs(operands[0], site, w)
    h = contract(x, xc, row, _arrange(first, shape, (group, *wc)), range(1, 1 + len(wc)))
    last = _arrange(second, shape, (group, *free))
    return contract(h, (h.ndim - 1,), row - sum(axis < row for axis in xc), last, (last.ndim - 1,)), None


def _contract_windows(site: Site, operands: Sequence[Any], w: AdaptedParameter) -> tuple[jax.Array, jax.Array | None]:
    parameters, shape = site.equation.params, w.base.shape
    numbers, precision = parameters["dimension_numbers"], parameters["precision"]
    output, feature = numbers.rhs_spec[0], numbers.out_spec[1]
    others = [place for place in range(len(shape)) if place != output]
    first, second = _order_factors(w, others)
    h = lax.conv_general_dilated(
        _drop_inputs(operands[0], site, w), jnp.moveaxis(_arrange(first, shape, others), -1, output),
        parameters["window_strides"], parameters["padding"], parameters["lhs_dilation"], parameters["rhs_dilation"],
        numbers, precision=precision,
    )  # fmt: skip
    y = lax.dot_general(h, _arrange(second, shape, (output,)), (((feature,), (1,)), ((), ())), precision=precision)
    y, factor = jnp.moveaxis(y, -1, feature), None
    if "factor" in w.parts:
        rows = _arrange(w.parts["factor"], shape, (output,))[..., 0]
        factor = rows.reshape([-1 if axis == feature else 1 for axis in range(y.ndim)])
    return y, factor


def _look_up(site: Site, operands: Sequence[Any], w: AdaptedParameter) -> tuple[jax.Array, None]:
    shape = w.base.shape
    (entry,) = site.contracted
    first, second = _order_factors(w, (1 - entry,))
    rows, vectors = _arrange(first, shape, (1 - entry,)), _arrange(second, shape, (entry,))

    def take_entries(index: jax.Array, axis: int) -> jax.Array:
        return jnp.moveaxis(jnp.take(rows, index, axis=0, mode="clip") @ vectors.T, -1, 0 if axis else -1)

    return operations.arrange_lookup(site.equation, operands[1], take_entries, fill=0), None


_CONTRACTIONS: dict[str, Callable[[Site, Sequence[Any], AdaptedParameter], tuple[jax.Array, Any]]] = {
    "dot_general": _contract_product,
    "ragged_dot": _contract_ragged,
    "conv_general_dilated": _contract_windows,
    "take": _look_up,
}
