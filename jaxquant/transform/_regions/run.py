"""The equations of a region on codes, and on floats that carry codes in training."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._arrays.quantized_array import QuantizedArray
from ..._codes import arrangement, elementwise, pooling
from ..._codes.bias import quantize_added_bias
from ..._codes.fake_codes import FakeQuantizedArray
from ..._contractions.output import make_array, read_affine, read_epilogue
from ..._core import dtypes
from ..._core.granularity import PerTensor
from ..._kernels.affine import quantize_affine
from ..._kernels.barriers import replace_value
from ..._program import jaxpr
from ..._program.graph import EquationNode, ProgramGraph
from ..._program.jaxpr import Equation
from ..._program.moves import BARRIER
from .clips import call_rule, match_clip
from .folding import list_weight_dimensions
from .patterns import match_windows
from .rounding_points import Action, RoundingPoint

_NAME = "Prepared.apply"
Array = QuantizedArray | FakeQuantizedArray


@dataclasses.dataclass(frozen=True, eq=False)
class RegionCodes:
    """A value of a program that is codes; in training, floats that carry codes."""

    array: Any

    def to_array(self) -> jax.Array:
        """Return the floats that the codes stand for."""
        return self.array.dequantize()


class PendingResult(NamedTuple):
    """A result that is not rounded yet, because equations of its point follow.

    Attributes:
        point: where it is rounded.
        operands: the operands of the operation.
    """

    point: RoundingPoint
    operands: Sequence[Any]


def dequantize_codes(operands: Sequence[Any], kept: Collection[int]) -> list[Any]:
    """Return operands with floats in place of codes, except at some places."""
    return [x.to_array() if isinstance(x, RegionCodes) and place not in kept else x for place, x in enumerate(operands)]


def run_move(graph: ProgramGraph, action: Action, operands: Sequence[Any]) -> list[Any]:
    """Return the results of an equation that gives codes with the scale of its operand, or of a hidden one."""
    node = action.node
    if action.kind == "hidden":
        # What it would compute is part of the next equation, which needs the codes.
        return [next(value for value in operands if isinstance(value, RegionCodes | PendingResult))]
    if node.name == BARRIER:
        # Some operands may be floats, or parameters.
        arrays = _wait_for_all(tuple(x.array if isinstance(x, RegionCodes) else x for x in operands))
        return [RegionCodes(y) if isinstance(x, RegionCodes) else y for x, y in zip(operands, arrays, strict=True)]
    array = next(value.array for value in operands if isinstance(value, RegionCodes))
    if match_clip(graph, node) is not None:
        return [RegionCodes(_clip(graph, node, array))]
    return [RegionCodes(result) for result in _move(node.equation, array)]


def _wait_for_all(arrays: Any) -> Any:
    """Return a pytree of arrays after a barrier: one for those with a derivative, and one for integers."""
    leaves, structure = jax.tree.flatten(arrays)
    are_floats = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
    for kind in (True, False):
        places = [place for place, is_float in enumerate(are_floats) if is_float is kind]
        kept = lax.optimization_barrier([leaves[place] for place in places]) if places else []
        for place, leaf in zip(places, kept, strict=True):
            leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves)


def _move(equation: Equation, array: Array) -> list[Array]:
    """Return the results of an equation that moves elements, or finds their maxima."""
    # A pad by zeros pads codes with the zero point, and floats with 0.0.
    if isinstance(array, FakeQuantizedArray):
        zero = jnp.zeros((), array.dtype)
        return [array.replace_values(x) for x in _evaluate_move(equation, array.values, zero)]
    affine = read_affine(_NAME, "x", array)
    zero = jnp.zeros((), affine.dtype) if affine.zero_point is None else jnp.asarray(affine.zero_point)
    return [make_array(x, affine, array.dtype) for x in _evaluate_move(equation, array.codes, zero)]


def _evaluate_move(equation: Equation, x: jax.Array, zero: jax.Array) -> list[jax.Array]:
    name = jaxpr.read_name(equation)
    if name == "pad":
        return [lax.pad(x, zero, equation.params["padding_config"])]
    if name == "convert_element_type":  # to the dtype of the floats
        return [x]
    if name == "reduce_window_max":
        windows = match_windows(equation.params)
        assert windows is not None
        return [pooling.compute_maxima(x, windows=windows)]
    return jaxpr.evaluate(equation, [x])


def _clip(graph: ProgramGraph, node: EquationNode, array: Array) -> Array:
    """Return codes clipped by the numbers of a node, in training with the derivative rule that the node may have."""
    clip = match_clip(graph, node)
    assert clip is not None
    result = _clip_codes(array, clip.low, clip.high)
    if node.name in jaxpr.CUSTOM_RULES and isinstance(array, FakeQuantizedArray):
        assert isinstance(result, FakeQuantizedArray)
        return array.replace_values(replace_value(call_rule(graph, node, array.values), result.values))
    return result


def _clip_codes(array: Array, low: float | None, high: float | None) -> Array:
    """Return codes clipped to the codes of two numbers."""
    if low == 0:
        # Nothing is left of it if the zero point is the lowest code, as it is after a range of positive values.
        array, low = elementwise.relu(array), None
    if low is None and high is None:
        return array
    affine = read_affine(_NAME, "x", array) if isinstance(array, QuantizedArray) else array
    dtype = affine.dtype if isinstance(array, QuantizedArray) else array.codes_dtype
    point = jnp.zeros((), jnp.int32) if affine.zero_point is None else affine.zero_point.astype(jnp.int32)

    def encode(number: float) -> jax.Array:
        x = jnp.asarray(number, jnp.float32)
        return quantize_affine(x, lax.stop_gradient(affine.scale), point, PerTensor(), dtype, dtypes.FLOAT32)

    def clip(x: jax.Array, bounds: Sequence[Any]) -> jax.Array:
        for operation, bound in zip((jnp.maximum, jnp.minimum), bounds, strict=True):
            x = x if bound is None else operation(x, jnp.broadcast_to(bound, x.shape))
        return x

    codes = [None if number is None else encode(number) for number in (low, high)]
    if isinstance(array, QuantizedArray):
        return array.replace(codes=clip(array.codes, codes))
    floats = [
        None if code is None else (code.astype(jnp.int32) - point).astype(jnp.float32) * affine.scale for code in codes
    ]
    return array.replace_values(clip(array.values, floats))


def combine_codes(graph: ProgramGraph, point: RoundingPoint, arrays: Sequence[Array], output: Any) -> Array:
    """Return the result of an operation that is no contraction."""
    # The equation of a leaky ReLU reads its operand several times.
    operands = {"concatenate": [arrays], "add": arrays, "multiply": arrays}.get(point.operation, arrays[:1])
    return finish_steps(graph, point, _OPERATIONS[point.operation](*operands, **point.attributes, output=output))


_OPERATIONS = {
    "add": elementwise.add, "multiply": elementwise.multiply, "concatenate": arrangement.concatenate,
    "average_pool": pooling.average_pool, "mean": pooling.mean, "leaky_relu": elementwise.leaky_relu,
    "sigmoid": elementwise.sigmoid,
}  # fmt: skip


def finish_steps(graph: ProgramGraph, point: RoundingPoint, array: Array) -> Array:
    """Return the result of an operation after the moves and clips of its point."""
    for step in point.steps:
        if step.kind == "move":
            (array,) = _move(step.node.equation, array)
        elif step.kind == "clip":
            array = _clip(graph, step.node, array)
    return array


def finish_floats(graph: ProgramGraph, point: RoundingPoint, y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Return the floats that are rounded to the codes of a contraction.

    Args:
        graph: the program.
        point: the contraction.
        y: its result, with the weights multiplied.
        bias: the bias, of the feature dimensions, or None.
    """
    y = y if bias is None else y + lax.broadcast_in_dim(bias, y.shape, point.features)
    for step in point.steps:
        if step.kind == "move":
            (y,) = jaxpr.evaluate(step.node.equation, [y])
        elif step.kind == "clip":
            y = _clip_floats(graph, step.node, y)
    return y


def _clip_floats(graph: ProgramGraph, node: EquationNode, y: jax.Array) -> jax.Array:
    """Return floats clipped by the numbers of a node, with its derivative rule."""
    if node.name in jaxpr.CUSTOM_RULES:
        return call_rule(graph, node, y)
    clip = match_clip(graph, node)
    assert clip is not None
    low, high = clip.low, clip.high
    y = jax.nn.relu(y) if low == 0 else y if low is None else jnp.maximum(y, np.float32(low))
    return y if high is None else jnp.minimum(y, np.float32(high))


def contract_to_codes(
    graph: ProgramGraph,
    point: RoundingPoint,
    operation: Any,
    operands: Sequence[QuantizedArray],
    bias: jax.Array | None,
    output: Any,
) -> Any:
    """Return the codes of a contraction of codes, with its bias in steps of int32.

    Args:
        graph: the program.
        point: the contraction.
        operation: the operation.
        operands: both operands.
        bias: float32, of the feature dimensions, or None.
        output: a Quantizer.
    """
    site = point.site
    assert site is not None
    assert site.weight is not None
    if bias is not None:
        weight, x = operands[site.weight], operands[1 - site.weight]
        places = list_weight_dimensions(point)
        rest = [axis for axis in range(weight.ndim) if axis not in places]
        lengths = [weight.scale.shape[place] for place in places]
        scale = lax.transpose(weight.scale, (*rest, *places)).reshape(lengths)
        scale = scale if scale.size == 1 else jnp.broadcast_to(scale, bias.shape)
        steps = quantize_added_bias(_NAME, lax.stop_gradient(bias), x.scale, weight, scale, places)
        if site.operation != "conv_general_dilated":
            # The bias of a convolution has one element for each feature; one of a product is broadcast to its result.
            rank = len(graph.get_shape(point.node.outputs[0]))
            shape = [1] * rank
            for place, axis in enumerate(point.features):
                shape[axis] = bias.shape[place]
            steps = steps.reshape(shape)
        bias = steps
    epilogue = read_epilogue(_NAME, bias, output, None, (operands[0], operands[1]))
    return finish_steps(graph, point, operation.contract_quantized(*operands, epilogue=epilogue))
