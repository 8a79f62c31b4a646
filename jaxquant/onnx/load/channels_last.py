"""Images with the channels last, from one convolution to the next.

XLA:CPU's convolutions read and write images with the channels last, and ONNX's images have them second. XLA transposes
them before and after each convolution, and moves these transposes through a chain of operations on each element, but
not through a concatenation, a split, or a value with several readers. Loops that read one layout and write the other
take several times as long as the others. So the results of convolutions stay as they are, and the operators that follow
run on them in the same layout, as far as they have a form for it. All others get the images in ONNX's layout.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core import recording
from .graph import Operator
from .values import convert_to_jax, normalize_axis

if TYPE_CHECKING:
    from .interpret import Call

_Array = jax.Array | np.ndarray
_RANK = 4
# Of windows: with more, the program would have too many operations.
_MOST_SLICES = 64
# ONNX's own operators, and those that fusing makes of them.
_DOMAINS = ("", "jaxquant")


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelsLast:
    """Images of a graph.

    Attributes:
        array: [N, *spatial, C].
    """

    array: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in ONNX's layout."""
        batch, *lengths, channels = self.array.shape
        return (batch, channels, *lengths)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the images."""
        return self.array.dtype

    def read(self) -> jax.Array:
        """Return the images in ONNX's layout, [N, C, *spatial]."""
        return jnp.moveaxis(self.array, -1, 1)


def read_images(value: object) -> Any:
    """Return images in ONNX's layout, and other values unchanged."""
    return value.read() if isinstance(value, ChannelsLast) else value


def run_operator(call: Call, operator: Operator, inputs: Sequence[Any]) -> Any:
    """Return the results of an operator with the channels last; None if it has no form for its inputs."""
    node = call.node
    run = _FORMS.get(node.op) if node.domain in _DOMAINS else None
    # A function that is prepared, exported or was exported keeps the operations of its graph.
    if run is None or call.run.is_exported or recording.is_recording() or recording.is_analyzing():
        return None
    if not any(isinstance(x, ChannelsLast) for x in inputs) and node.op != "Conv":
        return None
    return run(call, operator, inputs)


def _turn(value: ChannelsLast | _Array | None) -> _Array | None:
    """Return an input with the channels last: [C, 1, 1] is for each channel, and one element for all."""
    if value is None or isinstance(value, ChannelsLast):
        return value if value is None else value.array
    if value.size == 1:
        return value.reshape(())
    wide = value.reshape(*(1,) * (_RANK - value.ndim), *value.shape)
    return np.moveaxis(wide, 1, -1) if isinstance(wide, np.ndarray) else jnp.moveaxis(wide, 1, -1)


def _wrap(outputs: jax.Array | tuple[jax.Array, ...]) -> Any:
    return tuple(map(ChannelsLast, outputs)) if isinstance(outputs, tuple) else ChannelsLast(outputs)


def _run_elementwise(call: Call, operator: Operator, inputs: Sequence[Any]) -> Any:
    if any(x is not None and len(x.shape) > _RANK for x in inputs):
        return None
    return _wrap(operator.function(call, *map(convert_to_jax, map(_turn, inputs))))


def _run_rounded_product(call: Call, operator: Operator, inputs: Sequence[Any]) -> Any:
    # Between convolutions, which run on all threads, a second loop over the images gains nothing, and is compiled.
    function = functools.partial(operator.function, most=0)
    return _run_elementwise(call, operator._replace(function=function), inputs)


def _run_along_channels(call: Call, operator: Operator, inputs: Sequence[Any]) -> Any:
    """Return the results of an operator along the axis of channels, whose last inputs are no images."""
    count = len(inputs) if call.node.op == "Concat" else 1
    if normalize_axis(call.get("axis", 0), _RANK) != 1:
        return None
    if any(not isinstance(x, ChannelsLast | jax.Array) or len(x.shape) != _RANK for x in inputs[:count]):
        return None
    if any(x is not None and not isinstance(x, np.ndarray) for x in inputs[count:]):
        return None
    node = dataclasses.replace(call.node, attributes={**call.node.attributes, "axis": _RANK - 1})
    turned = dataclasses.replace(call, node=node)
    return _wrap(operator.function(turned, *map(_turn, inputs[:count]), *inputs[count:]))


def _run_convolution(call: Call, operator: Operator, inputs: Sequence[Any]) -> Any:
    x, *rest = inputs
    lengths = [n for value in inputs[:2] for n in value.shape]
    if len(x.shape) != _RANK or x.dtype.kind != "f" or not all(isinstance(n, int) for n in lengths):
        return None
    images = x if isinstance(x, ChannelsLast) else ChannelsLast(jnp.moveaxis(jnp.asarray(x), 1, -1))
    return operator.function(call, images, *map(convert_to_jax, rest))


def _run_normalization(call: Call, operator: Operator, inputs: Sequence[Any]) -> Any:
    x, *parameters = inputs
    if call.get("training_mode", 0) or any(len(p.shape) != 1 for p in parameters):
        return None
    # In rank 2 the channels are last in ONNX's layout, too.
    flat = x.array.reshape(-1, x.array.shape[-1])
    return ChannelsLast(operator.function(call, flat, *map(convert_to_jax, parameters)).reshape(x.array.shape))


def _run_pool(call: Call, operator: Operator, inputs: Sequence[Any]) -> Any:
    (x,) = inputs
    is_known = all(isinstance(n, int) for n in x.shape)
    if call.has_second_output or not is_known or sum(call.get("kernel_shape")) > _MOST_SLICES:
        return None
    return operator.function(call, x)


def _run_global_average(call: Call, operator: Operator, inputs: Sequence[Any]) -> Any:
    (x,) = inputs
    return ChannelsLast(jnp.mean(x.array, tuple(range(1, _RANK - 1)), keepdims=True))


_ELEMENTWISE = (
    "Abs", "Add", "Clip", "Div", "Elu", "Erf", "Exp", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Max",
    "Min", "Mul", "Neg", "PRelu", "Pow", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Swish", "Tanh",
)  # fmt: skip
_FORMS: dict[str, Callable[[Call, Operator, Sequence[Any]], Any]] = {
    **dict.fromkeys(_ELEMENTWISE, _run_elementwise),
    "BatchNormalization": _run_normalization,
    "Concat": _run_along_channels,
    "Conv": _run_convolution,
    "GlobalAveragePool": _run_global_average,
    "MaxPool": _run_pool,
    "RoundedMul": _run_rounded_product,
    "Split": _run_along_channels,
}
