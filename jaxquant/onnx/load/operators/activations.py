"""Activation functions, softmax, and the losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...._kernels import barriers
from .. import float_kernels
from ..graph import register
from ..interpret import Call
from ..values import normalize_axis

_Elementwise = Callable[..., Any]


def _gelu(x: Any, approximate: str = "none") -> Any:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def _hard_sigmoid(x: Any, alpha: Any, beta: float) -> Any:
    product = x * jnp.asarray(alpha, x.dtype)
    # XLA would contract the product and the sum into one operation.
    product = barriers.round_result(product) if x.dtype == np.float32 else product
    return jnp.clip(product + beta, 0, 1)


# For each operator its function, and the names and defaults of its attributes.
# Exponentials take minimum(x, 0), because an overflow in the branch that is not chosen would make the gradient NaN.
_FUNCTIONS: dict[str, tuple[_Elementwise, dict[str, Any]]] = {
    "Relu": (lambda x: jnp.maximum(x, jnp.zeros((), x.dtype)), {}),
    "LeakyRelu": (lambda x, alpha: jnp.where(x >= 0, x, alpha * x), {"alpha": 0.01}),
    "ThresholdedRelu": (lambda x, alpha: jnp.where(x > alpha, x, 0), {"alpha": 1.0}),
    "Elu": (lambda x, alpha: jnp.where(x > 0, x, alpha * jnp.expm1(jnp.minimum(x, 0))), {"alpha": 1.0}),
    "Celu": (
        lambda x, alpha: jnp.maximum(x, 0) + jnp.minimum(0, alpha * jnp.expm1(jnp.minimum(x, 0) / alpha)),
        {"alpha": 1.0},
    ),
    "Selu": (
        lambda x, alpha, gamma: gamma * jnp.where(x > 0, x, alpha * jnp.expm1(jnp.minimum(x, 0))),
        {"alpha": 1.6732632423543772848, "gamma": 1.0507009873554804934},
    ),
    "Sigmoid": (jax.nn.sigmoid, {}),
    "HardSigmoid": (_hard_sigmoid, {"alpha": 0.2, "beta": 0.5}),
    "HardSwish": (lambda x: x * _hard_sigmoid(x, np.float32(1 / 6), 0.5), {}),
    # log(1 + exp(x)) would overflow.
    "Softplus": (lambda x: jnp.logaddexp(x, jnp.zeros((), x.dtype)), {}),
    "Softsign": (lambda x: x / (1 + jnp.abs(x)), {}),
    "Mish": (lambda x: x * jnp.tanh(jnp.logaddexp(x, jnp.zeros((), x.dtype))), {}),
    "Swish": (lambda x, alpha: x * jax.nn.sigmoid(alpha * x), {"alpha": 1.0}),
    "Gelu": (_gelu, {"approximate": "none"}),
    "Shrink": (
        lambda x, bias, lambd: jnp.where(x < -lambd, x + bias, jnp.where(x > lambd, x - bias, 0)),
        {"bias": 0.0, "lambd": 0.5},
    ),
}


def apply_activation(name: str, x: Any, **attributes: Any) -> Any:
    """Return an activation function of x; an attribute that is None has ONNX's default."""
    function, defaults = _FUNCTIONS[name]
    values = {key: attributes.get(key) if attributes.get(key) is not None else v for key, v in defaults.items()}
    return function(x, **values).astype(x.dtype)


def _register_functions() -> None:
    def bind(name: str) -> _Elementwise:
        return lambda call, x: apply_activation(name, x, **{key: call.get(key) for key in _FUNCTIONS[name][1]})

    for name in _FUNCTIONS:
        register(name)(bind(name))


_register_functions()


@register("Sigmoid")
def apply_sigmoid(call: Call, x: jax.Array) -> Any:
    """ONNX Sigmoid."""
    # This entry replaces the one from the table above.
    return float_kernels.apply_logistic(x) if call.has_runtime_floats(x) else apply_activation("Sigmoid", x)


@register("PRelu")
def apply_prelu(call: Call, x: jax.Array, slope: jax.Array) -> Any:
    """ONNX PRelu."""
    return jnp.where(x >= 0, x, x * slope)


@register("SwiGLU")
def apply_swiglu(call: Call, *inputs: jax.Array) -> Any:
    """ONNX SwiGLU: swish(gate) * value, from two inputs or the halves of one."""
    gate, value = inputs if len(inputs) == 2 else jnp.split(inputs[0], 2, axis=call.get("axis", -1))
    return gate * jax.nn.sigmoid(call.get("alpha", 1.0) * gate) * value


def _normalize(call: Call, x: Any, function: Any) -> Any:
    """Return a function along an axis, or before opset 13 over all dimensions from the axis on."""
    if call.opset >= 13:
        return function(x, normalize_axis(call.get("axis", -1), x.ndim))
    axis = call.get("axis", 1)
    # An axis of the rank is valid: it cuts the shape after the last dimension. No negative axis means that place.
    axis = normalize_axis(axis, x.ndim) if axis < 0 else normalize_axis(axis, x.ndim + 1)
    flat = x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
    return function(flat, 1).reshape(x.shape)


@register("Softmax")
def apply_softmax(call: Call, x: jax.Array) -> Any:
    """ONNX Softmax."""
    return _normalize(call, x, lambda x, axis: _compute_softmax(call, x, axis))


def _compute_softmax(call: Call, x: Any, axis: int) -> Any:
    n = x.shape[axis]
    if not (call.has_runtime_floats(x) and isinstance(n, int) and n):
        return jax.nn.softmax(x, axis)
    # XLA would compute a dequantization again where the largest element is subtracted, and contract its product with
    # the difference: for scales of 1e8 the result would be NaN.
    x = lax.optimization_barrier(x)
    return jnp.moveaxis(float_kernels.softmax_last(jnp.moveaxis(x, axis, -1)), -1, axis)


@register("LogSoftmax")
def apply_log_softmax(call: Call, x: jax.Array) -> Any:
    """ONNX LogSoftmax."""
    return _normalize(call, x, jax.nn.log_softmax)


@register("Hardmax")
def apply_hardmax(call: Call, x: jax.Array) -> Any:
    """ONNX Hardmax: 1 at the first largest element, 0 elsewhere."""
    return _normalize(call, x, _compute_hardmax)


def _compute_hardmax(x: Any, axis: int) -> Any:
    if x.shape[axis] == 0:
        return x
    return jax.nn.one_hot(jnp.argmax(x, axis), x.shape[axis], dtype=x.dtype, axis=axis)


@register("NegativeLogLikelihoodLoss")
def compute_nll_loss(call: Call, x: jax.Array, target: jax.Array, weight: jax.Array | None = None) -> Any:
    """ONNX NegativeLogLikelihoodLoss."""
    return _reduce_loss(call, x, target, weight)


@register("SoftmaxCrossEntropyLoss")
def compute_cross_entropy(call: Call, scores: jax.Array, labels: jax.Array, weights: jax.Array | None = None) -> Any:
    """ONNX SoftmaxCrossEntropyLoss."""
    log_probabilities = jax.nn.log_softmax(scores, axis=1)
    return _reduce_loss(call, log_probabilities, labels, weights), log_probabilities


def _reduce_loss(call: Call, x: Any, target: Any, weight: Any) -> Any:
    """Return minus the entries of x at the targets along dimension 1, weighted and reduced."""
    ignored = call.get("ignore_index")
    is_ignored = jnp.zeros(target.shape, bool) if ignored is None else target == ignored
    # An ignored target may be any number, such as -100.
    index = jnp.where(is_ignored, 0, target).astype(jnp.int32)
    factor = jnp.ones(target.shape, x.dtype) if weight is None else jnp.take(weight, index, axis=0, mode="clip")
    factor = jnp.where(is_ignored, jnp.zeros((), x.dtype), factor)
    entries = jnp.take_along_axis(x, jnp.expand_dims(index, 1), axis=1, mode="clip").squeeze(1)
    loss = -entries * factor
    reduction = call.get("reduction", "mean")
    if reduction == "none":
        return loss
    total = jnp.sum(loss)
    if reduction == "sum":
        return total
    return total / (np.float32(loss.size) if weight is None and ignored is None else jnp.sum(factor))
