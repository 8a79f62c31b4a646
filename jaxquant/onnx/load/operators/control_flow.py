"""If, Loop and Scan, and sequences, which are Python lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ...limits import ModelError
from ..graph import register
from ..interpret import Call
from ..values import (
    OperatorError,
    Tensor,
    UnknownValueError,
    canonicalize_dtype,
    convert_to_jax,
    count_all,
    is_computed,
    is_known,
    is_static,
    list_ints,
    namespace,
    normalize_axis,
)

# A loop that lax.scan cannot run, because shapes change, is written out up to this many times under jit.
_MOST_UNROLLED = 256
# One that computes with known numbers is run when it is traced, up to this many nodes and numbers.
_MOST_ARITHMETIC = 2**14
_MOST_NUMBERS = 2**10


@register("If", keeps=(0,), passes=True)
def run_if(call: Call, condition: Tensor) -> Any:
    """ONNX If: the branch that a known condition chooses, else jax.lax.cond of both."""
    branches = call.get("then_branch"), call.get("else_branch")
    if is_known(condition):
        # Only the chosen branch runs: the results of the other one may have other shapes.
        return tuple(call.run_subgraph(branches[0 if bool(condition.reshape(())) else 1], ()))

    def make_branch(graph: Any) -> Any:
        return lambda: tuple(convert_to_jax(value) for value in call.run_subgraph(graph, ()))

    try:
        return lax.cond(condition.reshape(()), make_branch(branches[0]), make_branch(branches[1]))
    except (OperatorError, TypeError) as error:
        # A branch that is not meant for these inputs need not run on them, and the results may have other shapes.
        text = f"the condition must be known when the function is traced, because not both branches run: {error}"
        raise UnknownValueError(f"{call.node.label}: {text}", call.node.inputs[:1]) from error


@register("Scan")
def run_scan(call: Call, *inputs: jax.Array) -> Any:
    """ONNX Scan, as jax.lax.scan. The form before opset 9, with a batch dimension, is Scan-8."""
    if call.opset >= 9:
        return _scan(call, call.get("body"), inputs, {n: call.get(n) for n in _SCAN_ATTRIBUTES})
    lengths, *batches = inputs
    if lengths is not None:
        raise ModelError("Scan-8 with sequence_lens is not supported")
    names: dict[str, Any] = {**dict.fromkeys(_SCAN_ATTRIBUTES), "scan_input_directions": call.get("directions")}
    return jax.vmap(lambda *parts: _scan(call, call.get("body"), parts, names))(*batches)


_SCAN_ATTRIBUTES = ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")


def _scan(call: Call, body: Any, inputs: Sequence[Any], attributes: dict[str, Any]) -> tuple[Any, ...]:
    scanned = call.get("num_scan_inputs")
    states, sequences = list(inputs[: len(inputs) - scanned]), list(inputs[len(inputs) - scanned :])
    axes, directions = attributes["scan_input_axes"], attributes["scan_input_directions"]
    for i, sequence in enumerate(sequences):
        # lax.scan goes along the first axis, and its `reverse` holds for all operands alike.
        moved = jnp.moveaxis(sequence, axes[i] if axes else 0, 0)
        sequences[i] = jnp.flip(moved, 0) if directions and directions[i] else moved

    def advance(carry: Any, elements: Any) -> Any:
        outputs = [convert_to_jax(value) for value in call.run_subgraph(body, [*carry, *elements])]
        return tuple(outputs[: len(states)]), tuple(outputs[len(states) :])

    last, stacked = lax.scan(advance, tuple(states), tuple(sequences))
    axes, directions = attributes["scan_output_axes"], attributes["scan_output_directions"]
    results = []
    for i, y in enumerate(stacked):
        y = jnp.flip(y, 0) if directions and directions[i] else y
        results.append(jnp.moveaxis(y, 0, axes[i] if axes else 0))
    return (*last, *results)


# The states are passed as they are, because they may be shapes, which have to stay numpy arrays.
@register("Loop", keeps=(0, 1), passes=True)
def run_loop(call: Call, count: Tensor, condition: Tensor, *states: Any) -> Any:
    """ONNX Loop: written out in Python if it can be, else jax.lax.scan or jax.lax.while_loop."""
    body = call.get("body")
    trips: Any = None if count is None else int(count.reshape(())) if is_known(count) else count
    limit = call.run.limits.iterations
    if isinstance(trips, int) and trips > limit and condition is None and _keeps_condition(body):
        raise ModelError(f"a Loop of {trips} iterations, more than Limits.iterations = {limit}")
    is_fixed = _keeps_condition(body) and (condition is None or (is_known(condition) and bool(np.all(condition))))
    # A short loop is written out: its shapes may change from one iteration to the next.
    if isinstance(trips, int) and is_fixed and trips > _MOST_UNROLLED and not _is_arithmetic(call, body, trips, states):
        return _loop_by_scan(call, body, trips, states)
    is_readable = (trips is None or isinstance(trips, int)) and (condition is None or is_known(condition))
    if not is_readable:
        return _loop_by_while(call, body, trips, condition, states)
    try:
        return _loop_in_python(call, body, trips, condition, states, is_fixed)
    except _UnknownConditionError:
        # Nothing of what was traced is used.
        return _loop_by_while(call, body, trips, condition, states)


class _UnknownConditionError(Exception):
    """A loop computes its condition from values that are traced."""


def _is_arithmetic(call: Call, body: Any, trips: int, states: Sequence[Any]) -> bool:
    """Return whether a long loop computes with known numbers only, so that its results stay known."""
    values = [*states, *(call.values[name] for name in body.list_captures())]
    is_short = trips * (len(body.nodes) + 1) <= _MOST_ARITHMETIC
    return is_short and all(map(is_computed, values)) and count_all(values) <= _MOST_NUMBERS


def _keeps_condition(body: Any) -> bool:
    """Return whether the body of a Loop passes its condition on, or returns True."""
    name = body.outputs[0]
    sources = {node.outputs[0]: node for node in body.nodes if node.op in ("Identity", "Cast")}
    while name in sources:
        name = sources[name].inputs[0]
    return name == body.inputs[1] or (name in body.constants and bool(np.all(body.constants[name])))


def _loop_in_python(
    call: Call, body: Any, trips: int | None, condition: Any, states: Sequence[Any], is_fixed: bool
) -> tuple[Any, ...]:
    carried, scanned, step = list(states), [], 0
    limit = call.run.limits.iterations
    is_active = True if condition is None else bool(np.asarray(condition).reshape(()))
    while is_active and (trips is None or step < trips):
        if step >= limit:
            raise ModelError(f"a Loop of more than Limits.iterations = {limit} iterations")
        # The body runs only if the condition holds.
        flag = np.asarray(True)
        result, *outputs = call.run_subgraph(body, [np.asarray(step, np.int64), flag, *carried])
        carried, extra = outputs[: len(states)], outputs[len(states) :]
        scanned.append(extra)
        step += 1
        if not is_fixed:
            if not is_known(result):
                if not extra:
                    raise _UnknownConditionError
                raise UnknownValueError(
                    "the condition of a Loop with scan outputs must be known when the loop is traced"
                )
            is_active = bool(np.asarray(result).reshape(()))
    if not scanned:
        return (*states, *_make_empty_outputs(call, body, states))
    return (*carried, *(_stack(list(values)) for values in zip(*scanned, strict=True)))


def _make_empty_outputs(call: Call, body: Any, states: Sequence[Any]) -> list[Any]:
    """Return the scan outputs of a Loop without iterations: length 0, and the shape that the first one would have."""
    names = body.outputs[1 + len(states) :]
    if not names:
        return []

    def advance() -> list[Any]:
        outputs = call.run_subgraph(body, [np.asarray(0, np.int64), np.asarray(True), *states])
        return [convert_to_jax(value) for value in outputs[1 + len(states) :]]

    found, before = None, call.run.live
    try:
        found = [(x.shape, x.dtype) for x in jax.eval_shape(advance)]
    except UnknownValueError:
        raise
    except ModelError as error:
        # The states of a loop that never runs need not fit its body. What is declared tells the same.
        call.run.live = before
        if any(name not in body.declared or body.declared[name].shape is None for name in names):
            raise ModelError(
                f"the shape of an output of a Loop without iterations is neither declared nor can it be found: {error}"
            ) from error
    results = []
    for i, name in enumerate(names):
        declared = body.declared.get(name)
        # A length that nothing tells is 0, as in ONNX Runtime.
        known = [n if isinstance(n, int) else 0 for n in (declared.shape if declared and declared.shape else ())]
        shape, dtype = found[i] if found is not None else (known, None)
        results.append(_make_empty(shape, dtype if declared is None else declared.dtype))
    return results


def _make_empty(shape: Sequence[Any], dtype: DTypeLike | None) -> Any:
    """Return an array of length 0 and this shape, known unless a length is symbolic."""
    if is_static(shape):
        return np.zeros((0, *shape), dtype)
    return jnp.zeros((0, *shape), canonicalize_dtype(dtype))


def _stack(values: list[Any]) -> Any:
    return namespace(*values).stack([v if namespace(*values) is np else convert_to_jax(v) for v in values])


def _loop_by_scan(call: Call, body: Any, trips: int, states: Sequence[Any]) -> tuple[Any, ...]:
    if trips > call.run.limits.iterations:
        raise ModelError(f"a Loop of {trips} iterations, more than Limits.iterations = {call.run.limits.iterations}")

    def advance(carry: Any, step: Any) -> Any:
        outputs = call.run_subgraph(body, [step, np.asarray(True), *carry])[1:]
        outputs = [convert_to_jax(value) for value in outputs]
        return tuple(outputs[: len(states)]), tuple(outputs[len(states) :])

    initial = tuple(convert_to_jax(state) for state in states)
    last, stacked = lax.scan(advance, initial, jnp.arange(trips, dtype=jnp.int32))
    return (*last, *stacked)


def _loop_by_while(call: Call, body: Any, trips: Any, condition: Any, states: Sequence[Any]) -> tuple[Any, ...]:
    # The length of what is stacked would depend on data.
    if len(body.outputs) > 1 + len(states):
        raise UnknownValueError(
            "a Loop with scan outputs needs a trip count and a condition that are known when it is traced",
            [name for name in call.node.inputs[:2] if name],
        )
    limit = call.run.limits.iterations
    # Exporters write the largest int64 for "until the condition ends it", which the counter cannot hold.
    trips = min(trips, np.iinfo(np.int32).max) if isinstance(trips, int) else trips
    most = jnp.asarray(limit if trips is None else trips, jnp.int32).reshape(())
    first = jnp.asarray(True if condition is None else convert_to_jax(condition)).reshape(())

    def is_active(carry: Any) -> Any:
        return carry[1] & (carry[0] < jnp.minimum(most, limit))

    def advance(carry: Any) -> Any:
        step, flag, *values = carry
        outputs = [convert_to_jax(value) for value in call.run_subgraph(body, [step, flag, *values])]
        return (step + 1, outputs[0].reshape(()), *outputs[1:])

    initial = (jnp.int32(0), first, *(convert_to_jax(state) for state in states))
    last, flag, *results = lax.while_loop(is_active, advance, initial)
    is_cut = flag & (last >= limit) & ((most > limit) | (trips is None))
    return tuple(_invalidate(x, is_cut) for x in results)


def _invalidate(x: jax.Array, is_cut: jax.Array) -> jax.Array:
    """Return a result of a loop that nobody takes for one, if the limit has cut the loop short."""
    # A compiled program cannot raise an error, and a callback that does so would make it impossible to serialize.
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.where(is_cut, jnp.asarray(jnp.nan, x.dtype), x)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.where(is_cut, jnp.asarray(jnp.iinfo(x.dtype).min, x.dtype), x)
    return x


@register("SequenceConstruct", passes=True)
def make_sequence(call: Call, *values: Any) -> Any:
    """ONNX SequenceConstruct."""
    return list(values)


@register("SequenceEmpty")
def make_empty_sequence(call: Call) -> Any:
    """ONNX SequenceEmpty."""
    return []


@register("SequenceAt", static=(1,), passes=True)
def take_from_sequence(call: Call, sequence: Any, position: np.ndarray) -> Any:
    """ONNX SequenceAt."""
    return sequence[int(position.reshape(()))]


@register("SequenceInsert", static=(2,), passes=True)
def insert_into_sequence(call: Call, sequence: Any, value: Any, position: np.ndarray | None = None) -> Any:
    """ONNX SequenceInsert."""
    index = len(sequence) if position is None else int(position.reshape(()))
    index = index + len(sequence) if index < 0 else index
    return [*sequence[:index], value, *sequence[index:]]


@register("SequenceErase", static=(1,), passes=True)
def erase_from_sequence(call: Call, sequence: Any, position: np.ndarray | None = None) -> Any:
    """ONNX SequenceErase."""
    index = (len(sequence) - 1 if position is None else int(position.reshape(()))) % max(len(sequence), 1)
    return [*sequence[:index], *sequence[index + 1 :]]


@register("SequenceLength", passes=True)
def count_sequence(call: Call, sequence: Any) -> Any:
    """ONNX SequenceLength."""
    return np.asarray(len(sequence), np.int64)


@register("ConcatFromSequence", folds=True)
def concatenate_sequence(call: Call, sequence: Tensor) -> Any:
    """ONNX ConcatFromSequence."""
    axis, xp = call.get("axis", 0), namespace(*sequence)
    return xp.stack(sequence, axis) if call.get("new_axis", 0) else xp.concatenate(sequence, axis)


@register("SplitToSequence", static=(1,), folds=True)
def split_to_sequence(call: Call, x: Tensor, split: np.ndarray | None = None) -> Any:
    """ONNX SplitToSequence."""
    axis = normalize_axis(call.get("axis", 0), x.ndim)
    length = x.shape[axis]
    if split is None or split.ndim == 0:
        step = 1 if split is None else int(split)
        if step <= 0 or length // step > call.run.limits.nodes:
            raise ModelError(f"expected at most Limits.nodes = {call.run.limits.nodes} parts, got {length} by {step}")
        ends = list(range(step, length, step))
    else:
        ends = [int(n) for n in np.cumsum(list_ints(split))[:-1]]
    parts = list(namespace(x).split(x, ends, axis))
    return [part.squeeze(axis) for part in parts] if split is None and not call.get("keepdims", 1) else parts


@register("SequenceMap", passes=True)
def map_sequence(call: Call, sequence: Any, *others: Any) -> Any:
    """ONNX SequenceMap."""
    body, results = call.get("body"), []
    for i, value in enumerate(sequence):
        extra = [other[i] if isinstance(other, list) else other for other in others]
        results.append(call.run_subgraph(body, [value, *extra]))
    columns = list(zip(*results, strict=True)) if results else [()] * len(body.outputs)
    return tuple(list(column) for column in columns)


# An optional value is the value itself, or None.


@register("Optional", "OptionalGetElement", passes=True)
def pass_optional(call: Call, value: Any = None) -> Any:
    """ONNX Optional and OptionalGetElement."""
    if value is None and call.node.op == "OptionalGetElement":
        raise ValueError("expected a value, got an optional one that has none")
    return value


@register("OptionalHasElement", passes=True)
def has_element(call: Call, value: Any = None) -> Any:
    """ONNX OptionalHasElement."""
    return np.asarray(value is not None)
