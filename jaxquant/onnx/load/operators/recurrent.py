"""LSTM, GRU and RNN, by jax.lax.scan over time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .... import integer
from ...._core import recording
from ...._kernels import accumulator, barriers
from ...._onnx_ops.matrix_products import dynamic_quantize_matmul
from ...._onnx_ops.quantization import dynamic_quantize_linear
from .. import float_kernels
from ..graph import register
from ..interpret import Call
from ..values import Tensor, list_indices
from .activations import apply_activation
from .quantized import multiply_known_weights, read_scalar
from .shapes import reverse_first

_HIGHEST = lax.Precision.HIGHEST
# More weights than these leave the second-level cache as floats; then codes are as fast.
_MOST_FLOATS = 2**20
# Up to this number of products of differences of codes, from -255 to 255, float32 holds the sum: 258 * 255**2 < 2**24.
_MOST_DIFFERENCES = 258
# With fewer steps than these, it takes longer to bring weights into another form than the steps gain.
_FEW_STEPS = 6
# The activations with other defaults of attributes inside recurrent operators.
_AFFINE = "Affine"
_SCALED_TANH = "ScaledTanh"
_APPROXIMATED = {"Sigmoid": float_kernels.apply_logistic, "Tanh": float_kernels.tanh}


def _dot(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, precision=_HIGHEST)


def _project(x: Any, w: Any) -> list[Any]:
    """Return the products of an input with W, for each direction.

    One product for all times is many times as fast as one in each step of the scan.
    """
    return [_dot(x, part.T) for part in w]


def _list_activations(
    call: Call, defaults: tuple[str, ...], direction: int, approximate: bool = False
) -> list[Callable[[Any], Any]]:  # fmt: skip
    """Return the activation functions of a direction; `approximate` takes ONNX Runtime's sigmoid and tanh."""
    count = len(defaults)
    # One set for each of up to two directions.
    names = call.get("activations") or defaults * 2
    alphas, betas = list(call.get("activation_alpha") or ()), list(call.get("activation_beta") or ())
    functions = []
    # The lists of alphas and betas hold values only for the functions that take them.
    for i, name in enumerate(names):
        takes_alpha = name in ("LeakyRelu", "ThresholdedRelu", "HardSigmoid", "Elu", _AFFINE, _SCALED_TANH)
        alpha = alphas.pop(0) if takes_alpha and alphas else None
        takes_beta = name in ("HardSigmoid", _AFFINE, _SCALED_TANH)
        beta = betas.pop(0) if takes_beta and betas else None
        if direction * count <= i < (direction + 1) * count:
            is_approximated = approximate and name in _APPROXIMATED
            functions.append(_APPROXIMATED[name] if is_approximated else _make_activation(name, alpha, beta))
    return functions


def _make_activation(name: str, alpha: float | None, beta: float | None) -> Callable[[Any], Any]:
    if name == "Tanh":
        return jnp.tanh
    if name in (_AFFINE, _SCALED_TANH):
        factor, offset = (1.0 if alpha is None else alpha), (0.0 if beta is None else beta)
        if name == _AFFINE:
            return lambda x: factor * x + offset
        return lambda x: factor * jnp.tanh(offset * x)
    return lambda x: apply_activation(name, x, alpha=alpha, beta=beta)


def _run_directions(
    call: Call, projected: list[Any], lengths: Any, states: tuple[Any, ...], make_step: Any
) -> tuple[Any, ...]:  # fmt: skip
    """Run a cell over time in each direction; return Y and the last states, in ONNX's layout.

    Args:
        call: the node's Call.
        projected: the products of the input with W, [time, batch, features] for each direction.
        lengths: the length of each sequence, or None.
        states: the initial states, [directions, batch, hidden] each.
        make_step: from a direction to a function of the states and the products at a time, which returns the new
            states; the first state is the output.
    """
    direction = call.get("direction", "forward")
    count = 2 if direction == "bidirectional" else 1
    outputs, lasts = [], []
    for d in range(count):
        is_reverse = direction == "reverse" or d == 1
        step, sequence = make_step(d), projected[d]
        times = list_indices(sequence.shape[0]).astype(np.int32)
        # With lengths, only the part of a sequence that counts is turned around.
        if is_reverse:
            reverse = functools.partial(reverse_first, lengths=lengths, batch=1, time=0)
            sequence = jnp.flip(sequence, 0) if lengths is None else reverse(sequence)

        def advance(carry: Any, element: Any, step: Any = step) -> Any:
            value, time = element
            if lengths is None:
                new = step(carry, value)
                return new, new[0]
            is_inside = (time < lengths)[:, None]
            # A step reads the output of the one before, which is 0 after the end: a range over the batch depends on it.
            previous = jnp.where((time <= lengths)[:, None], carry[0], jnp.zeros_like(carry[0]))
            new = step((previous, *carry[1:]), value)
            # After the end of a sequence the state stays, and the output is 0.
            kept = tuple(jnp.where(is_inside, n, old) for n, old in zip(new, carry, strict=True))
            return kept, jnp.where(is_inside, new[0], jnp.zeros_like(new[0]))

        last, y = lax.scan(advance, tuple(state[d] for state in states), (sequence, times))
        if is_reverse:
            y = jnp.flip(y, 0) if lengths is None else reverse(y)
        outputs.append(y)
        lasts.append(last)
    y = jnp.stack(outputs, axis=1)
    finals = tuple(jnp.stack(parts) for parts in zip(*lasts, strict=True))
    if call.get("layout", 0):
        return y.transpose(2, 0, 1, 3), *(state.swapaxes(0, 1) for state in finals)
    return y, *finals


def _prepare(call: Call, x: Any, hidden: int, count: int, lengths: Any, initial: list[Any]) -> tuple[Any, Any, Any]:
    """Return x as [time, batch, input], the lengths as int32, and the initial states."""
    if call.get("layout", 0):
        x, initial = x.swapaxes(0, 1), [None if h is None else h.swapaxes(0, 1) for h in initial]
    zeros = jnp.zeros((count, x.shape[1], hidden), x.dtype)
    states = tuple(zeros if h is None else h for h in initial)
    return x, None if lengths is None else lengths.astype(jnp.int32), states


def _clip(call: Call, x: Any) -> Any:
    limit = call.get("clip", 0.0)
    return jnp.clip(x, -limit, limit) if limit else x


def _make_lstm_step(call: Call, recur: Any, bias: Any, peepholes: Any, approximate: bool) -> Any:
    """Return the step of an LSTM in a direction; the product with R is a function.

    Each sum is rounded in ONNX Runtime's order: the two products, the peephole, the two biases' sum. XLA would contract
    a product and a sum into one operation.
    """

    def make_step(d: int) -> Any:
        f, g, h = _list_activations(call, ("Sigmoid", "Tanh", "Tanh"), d, approximate)
        # The gates are in the order i, o, f, c, the peepholes in the order i, o, f.
        biases: list[Any] = [None] * 4 if bias is None else jnp.split(sum(jnp.split(bias[d], 2)), 4)
        weights: list[Any] = [None] * 4 if peepholes is None else [*jnp.split(peepholes[d], 3), None]

        def enter(gates: Any, gate: int, cell: Any) -> Any:
            total = jnp.split(gates, 4, axis=-1)[gate]
            total = total if weights[gate] is None else total + barriers.round_result(weights[gate] * cell)
            return _clip(call, total if biases[gate] is None else total + biases[gate])

        def step(states: Any, projected: Any) -> Any:
            hidden, cell = states
            gates = projected + recur(d, hidden)
            i = f(enter(gates, 0, cell))
            forget = 1 - i if call.get("input_forget", 0) else f(enter(gates, 2, cell))
            new = barriers.round_result(forget * cell) + barriers.round_result(i * g(enter(gates, 3, cell)))
            # The peephole of the output gate sees the new cell, the other peepholes the old one.
            return f(enter(gates, 1, new)) * h(new), new

        return step

    return make_step


@register("LSTM")
def run_lstm(call: Call, x: jax.Array, w: jax.Array, r: jax.Array, *inputs: jax.Array) -> Any:
    """ONNX LSTM."""
    bias, lengths, h, c, peepholes = [*inputs, *[None] * (5 - len(inputs))]
    x, lengths, states = _prepare(call, x, r.shape[-1], w.shape[0], lengths, [h, c])
    make_step = _make_lstm_step(call, lambda d, v: _dot(v, r[d].T), bias, peepholes, call.has_runtime_floats(x))
    return _run_directions(call, _project(x, w), lengths, states, make_step)


def make_state_product(
    r: jax.Array, scale: jax.Array, point: jax.Array | None, steps: int, rows: int
) -> Callable[[jax.Array], jax.Array] | None:
    """Return a function that returns what `dynamic_quantize_matmul` does for a hidden state and R of a direction.

    Outside of the scan it brings R into the form that a CPU multiplies fastest in each step. None if R has a scale for
    each feature, or if there are too few steps for that.

    Args:
        r: codes [hidden, gates].
        scale: the scale of R.
        point: the zero point of R, or None.
        steps: the length of the sequences.
        rows: the length of the batch.
    """
    if scale.ndim or (point is not None and point.ndim) or (isinstance(steps, int) and steps < _FEW_STEPS):
        return None
    if rows == 1 and r.size <= _MOST_FLOATS:
        # With up to 512 rows of R, all sums are integers that float32 holds, in any order: 512 * 128 * 255 < 2**24.
        floats = r.astype(jnp.float32) - (0 if point is None else jnp.asarray(point, jnp.float32))
        floats = barriers.compute_once(floats)
        is_short = len(r) <= _MOST_DIFFERENCES
        sums = None if is_short else _dot(jnp.ones((1, len(r)), jnp.float32), floats)
        return lambda a: _multiply_row(a, floats, sums, scale)
    # Once, before the scan: few rows are multiplied faster by weights that are stored feature by feature.
    features = barriers.transpose_in_memory(r, (1, 0))
    return lambda a: _multiply_features(a, features, scale, point)


def _multiply_row(a: jax.Array, floats: jax.Array, sums: jax.Array | None, scale: jax.Array) -> jax.Array:
    """Return the product of one row, quantized, and of integers in float32.

    `sums` are the integers' sums over the rows, or None if there are few.
    """
    codes, a_scale, a_point = dynamic_quantize_linear(a)
    if sums is None:
        acc = _dot(codes.astype(jnp.float32) - a_point.astype(jnp.float32), floats).astype(jnp.int32)
    else:
        row, center = (part.astype(jnp.float32) - 128 for part in (codes, a_point))
        acc = _dot(row, floats).astype(jnp.int32) - (center * sums).astype(jnp.int32)
    return accumulator.scale_by_both(acc, a_scale.reshape(1, 1), scale.reshape(1, 1))


def _multiply_features(a: Any, features: Any, scale: Any, point: Any) -> Any:
    """Return the product of few rows, quantized, and of codes [features, inputs]."""
    # With jax 0.10, XLA would convert the codes to 32 bits before the scan if there were a single row, see
    # `barriers.tie_to_row`. A row of zeros does not change the range.
    is_padded = a.shape[0] == 1 and jax.__version_info__ < (0, 12)
    rows = jnp.concatenate([a, jnp.zeros_like(a)]) if is_padded else a
    codes, a_scale, a_point = dynamic_quantize_linear(rows)
    acc = integer.dot_general(
        codes, features, (((1,), (1,)), ((), ())), lhs_zero_point=a_point, rhs_zero_point=point
    )  # fmt: skip
    return accumulator.scale_by_both(acc, a_scale.reshape(1, 1), scale.reshape(1, 1))[: a.shape[0]]


def _project_codes(x: jax.Array, w: np.ndarray, scale: jax.Array, point: jax.Array | None) -> jax.Array:
    """Return what `dynamic_quantize_matmul` does for known codes of W, [inputs, gates]."""
    codes, x_scale, x_point = dynamic_quantize_linear(x)
    acc = multiply_known_weights(codes, w, x_point, point)
    ones = (1,) * acc.ndim
    return accumulator.scale_by_both(acc, x_scale.reshape(ones), scale.reshape(ones))


@register("DynamicQuantizeLSTM", domain="com.microsoft", keeps=(1, 8, 9, 10, 11))
def run_quantized_lstm(call: Call, x: jax.Array, w: Tensor, r: jax.Array, *inputs: jax.Array) -> Any:
    """ONNX Runtime's DynamicQuantizeLSTM: each product quantizes its input with the input's own range.

    The whole input sequence has one range, and the hidden state of the whole batch one at each time, as in ONNX Runtime
    with one thread. With several it divides a batch of five sequences or more, or of two or more with up to 256
    features, among its threads, and each part has a range of its own.
    """
    bias, lengths, h, c, peepholes, w_scale, w_point, r_scale, r_point = [*inputs, *[None] * (9 - len(inputs))]
    # The weights are transposed, compared with ONNX's LSTM.
    x, lengths, states = _prepare(call, x, r.shape[1], w.shape[0], lengths, [h, c])

    def pick(part: Any, d: int) -> Any:
        return None if part is None else read_scalar(part[d])

    def multiply(values: Any, weights: Any, scale: Any, point: Any, d: int) -> Any:
        return dynamic_quantize_matmul(values, weights[d], pick(scale, d), pick(point, d))

    if lengths is not None:
        # ONNX Runtime reads the input up to the end of the longest sequence. Zeros do not change a range.
        x = jnp.where(
            (list_indices(x.shape[0]).astype(np.int32) < jnp.max(lengths))[:, None, None], x, jnp.zeros_like(x)
        )

    def project(d: int) -> Any:
        y, point = multiply(x, w, w_scale, w_point, d), pick(w_point, d)
        scale = barriers.hide_number(pick(w_scale, d))
        is_plain = scale.ndim == 0 and (point is None or point.ndim == 0)
        if recording.is_analyzing() or not isinstance(w, np.ndarray) or not is_plain:
            return y
        return barriers.replace_value(y, _project_codes(x, w[d], scale, point))

    # All gates of the input at once: the range is of the whole sequence.
    projected = [project(d) for d in range(w.shape[0])]
    products = [
        None if recording.is_analyzing() else make_state_product(r[d], pick(r_scale, d), pick(r_point, d), *x.shape[:2])
        for d in range(len(r))
    ]

    def recur(d: int, hidden: Any) -> Any:
        y, product = multiply(hidden, r, r_scale, r_point, d), products[d]
        return y if product is None else barriers.replace_value(y, product(hidden))

    make_step = _make_lstm_step(call, recur, bias, peepholes, call.has_runtime_floats(x))
    return _run_directions(call, projected, lengths, states, make_step)


@register("GRU")
def run_gru(call: Call, x: jax.Array, w: jax.Array, r: jax.Array, *inputs: jax.Array) -> Any:
    """ONNX GRU."""
    bias, lengths, h = [*inputs, *[None] * (3 - len(inputs))]
    hidden = r.shape[-1]
    x, lengths, states = _prepare(call, x, hidden, w.shape[0], lengths, [h])

    def make_step(d: int) -> Any:
        f, g = _list_activations(call, ("Sigmoid", "Tanh"), d)
        both = jnp.zeros((2, 3 * hidden), x.dtype) if bias is None else bias[d].reshape(2, -1)
        (b_zr, b_h), (r_zr, r_h) = (jnp.split(part, [2 * hidden]) for part in both)
        # Parts of R that are cut out of it in the step would be copied at each time.
        gates, kernel = jnp.split(r[d].T, [2 * hidden], axis=1)

        def step(states: Any, projected: Any) -> Any:
            (old,) = states
            z, reset = jnp.split(
                f(_clip(call, projected[:, : 2 * hidden] + _dot(old, gates) + b_zr + r_zr)), 2, axis=-1
            )
            if call.get("linear_before_reset", 0):
                # Here the reset gate applies to the recurrent bias, too, which is why the two biases are not summed
                # before.
                inner = reset * (_dot(old, kernel) + r_h)
            else:
                inner = _dot(reset * old, kernel) + r_h
            new = g(_clip(call, projected[:, 2 * hidden :] + inner + b_h))
            return ((1 - z) * new + z * old,)

        return step

    return _run_directions(call, _project(x, w), lengths, states, make_step)


@register("RNN")
def run_rnn(call: Call, x: jax.Array, w: jax.Array, r: jax.Array, *inputs: jax.Array) -> Any:
    """ONNX RNN."""
    bias, lengths, h = [*inputs, *[None] * (3 - len(inputs))]
    x, lengths, states = _prepare(call, x, r.shape[-1], w.shape[0], lengths, [h])

    def make_step(d: int) -> Any:
        (f,) = _list_activations(call, ("Tanh",), d)
        offset = 0 if bias is None else sum(jnp.split(bias[d], 2))

        def step(states: Any, projected: Any) -> Any:
            total = projected + _dot(states[0], r[d].T)
            return (f(_clip(call, total + offset)),)

        return step

    return _run_directions(call, _project(x, w), lengths, states, make_step)
