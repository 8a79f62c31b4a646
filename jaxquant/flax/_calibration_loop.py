"""The loop over batches in which static ranges are found: what a batch is, the progress bar, and the file to resume."""

from __future__ import annotations

import operator
import os
import pathlib
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax.typing import ArrayLike

from .._core import checks

_SAVE_SECONDS = 60.0  # between two writes of the file to resume from
_SHOW_SECONDS = 2.0  # what takes less shows no progress bar
_FORMAT, _VERSION = "jaxquant.calibration", 1
_CHECKSUM_BYTES = 4  # at the start of the file: a damaged one is refused, not read as other ranges


class Step(NamedTuple):
    """What one batch does, and what it depends on.

    Attributes:
        function: the name of the function that is called, for errors.
        run: jitted; from the state and a batch's positional and keyword arguments to (state, whether it is finite).
        fingerprint: returns a number that differs where the weights do; costly for large ones.
        describe: from a state to a text that differs where the quantized layers do, the same in every process.
        arguments: the names of the arguments that every call is given, which no batch may name.
    """

    function: str
    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[Any, jax.Array]]
    fingerprint: Callable[[], int]
    describe: Callable[[Any], str]
    arguments: frozenset[str]


class Position(NamedTuple):
    """How far the loop has come: the state, and the number of batches that it has seen."""

    state: Any
    batches: int


def find_fingerprint(tree: Any) -> int:
    """Returns a checksum of the arrays that this process holds."""
    checksum = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        checksum = zlib.crc32(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode(), checksum)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            continue
        for part in [shard.data for shard in array.addressable_shards] if isinstance(array, jax.Array) else [array]:
            checksum = zlib.crc32(np.asarray(part).tobytes(), checksum)
    return checksum


def split_arguments(step: Step, index: int, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a batch as positional and keyword arguments: an array is one, a tuple several, a mapping has names."""
    place = f"batches[{index}]"
    if not isinstance(batch, Mapping | tuple | list):
        expected = "an array, a tuple of positional arguments, or a mapping of keyword arguments"
        checks.require_type(_is_array(batch), step.function, place, expected, type(batch).__name__)
        return (batch,), {}
    if not isinstance(batch, Mapping):
        _check_arrays(step.function, place, tuple(batch))
        return tuple(batch), {}
    named = dict(batch)
    is_named = all(isinstance(name, str) for name in named)
    expected = "names of arguments as its keys; (mapping,) passes it as one argument"
    checks.require_type(is_named, step.function, place, expected, f"keys {list(named)[:3]}")
    twice = sorted(step.arguments & set(named))
    expected = "names of arguments that no other argument of this call sets"
    checks.require(not twice, step.function, place, expected, ", ".join(twice))
    _check_arrays(step.function, place, named)
    return (), named


def _is_array(value: Any) -> bool:
    # jax.Array by itself: of a union, Python 3.11 asks for the type, and that of a traced array is another.
    return isinstance(value, (jax.Array, ArrayLike))


def _check_arrays(function: str, place: str, batch: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not _is_array(leaf):
            argument, expected = f"{place}{jax.tree_util.keystr(path)}", "an array, or nested tuples and dicts of them"
            checks.require_type(False, function, argument, expected, type(leaf).__name__)


def run_loop(
    step: Step, state: Any, batches: Iterable[Any], *, checkpoint: Any, progress: Any,
    inspect: Callable[[Any], None], keep: Callable[[Any], None] = lambda state: None,
) -> Any:  # fmt: skip
    """Returns the state after all batches.

    Args:
        step: what a batch does.
        state: to start from, where the checkpoint has none.
        batches: arrays, tuples or mappings.
        checkpoint: the path of a file to resume from, or None.
        progress: whether a bar is shown, or None to show it on a terminal.
        inspect: is called with the state after the first batch, and raises where calibration makes no sense.
        keep: is called with the last good state however the loop ends.
    """
    _check_batches(step.function, batches)
    path = _check_path(step.function, checkpoint)
    if progress is not None:
        checks.check_flag(step.function, "progress", progress)
    position, saved = Position(state, 0), time.monotonic()
    positions = _iterate_positions(step, position, _show_progress(batches, progress), path)
    try:
        for position in positions:
            if position.batches == 1:
                inspect(position.state)
            if path is not None and time.monotonic() - saved > _SAVE_SECONDS:
                _save(path, step, position)
                saved = time.monotonic()
    finally:
        if position.batches:
            keep(position.state)
            if path is not None:
                _save(path, step, position)
    checks.require(position.batches > 0, step.function, "batches", "at least one batch", "none")
    return position.state


def _iterate_positions(
    step: Step, start: Position, batches: Iterable[Any], path: pathlib.Path | None
) -> Iterator[Position]:
    """Yields the position after each batch whose values are finite; a batch is checked while the next one is read."""
    position, index, done, pending = start, -1, 0, None
    for index, batch in enumerate(batches):
        arguments = split_arguments(step, index, batch)
        if index == 0 and path is not None and path.exists():
            target = jax.eval_shape(step.run, start.state, *arguments)[0]
            position = _load(path, step, target)
            done = position.batches
        if index < done:
            continue
        if pending is not None:
            position = _check_finite(step, *pending)
            yield position
        pending = (index, *step.run(position.state, *arguments))
    expected = f"the {done} batches that {path} counts, and perhaps more; delete it to start anew"
    checks.require(index + 1 >= done, step.function, "batches", expected, f"{index + 1}")
    if pending is not None:
        yield _check_finite(step, *pending)
    elif done:
        yield position


def _check_finite(step: Step, index: int, state: Any, finite: jax.Array) -> Position:
    expected = "arrays that are known: the loop runs outside of jax.jit"
    checks.require(not checks.is_traced(finite), step.function, "batches", expected, "a trace")
    expected = "batches whose activations are finite"
    got = f"a NaN or an infinity with batch {index}, counted from 0; the ranges are as before it"
    checks.require(bool(finite), step.function, "batches", expected, got)
    return Position(state, index + 1)


def _check_batches(function: str, batches: Any) -> None:
    is_one = isinstance(batches, jax.Array | np.ndarray | Mapping | str)
    expected = "an iterable of batches, such as [batch]"
    checks.require_type(
        isinstance(batches, Iterable) and not is_one, function, "batches", expected, checks.describe_value(batches)
        if isinstance(batches, jax.Array | np.ndarray) else type(batches).__name__,
    )  # fmt: skip


def _check_path(function: str, checkpoint: Any) -> pathlib.Path | None:
    if checkpoint is None:
        return None
    is_path = isinstance(checkpoint, str | os.PathLike)
    expected = "the path of a file, or None"
    checks.require_type(is_path, function, "checkpoint", expected, type(checkpoint).__name__)
    path = pathlib.Path(checkpoint)
    checks.require(path.parent.is_dir(), function, "checkpoint", "a folder that exists", str(path.parent))
    checks.require(not path.is_dir(), function, "checkpoint", "the path of a file", f"the folder {path}")
    is_writable = os.access(path.parent, os.W_OK)  # found now, not after the first minute of work
    checks.require(is_writable, function, "checkpoint", "a folder that can be written to", str(path.parent))
    return path


def _show_progress(batches: Iterable[Any], progress: bool | None) -> Iterator[Any]:
    """Yields the batches, with a bar on the error stream once they take long."""
    is_shown = sys.stderr.isatty() if progress is None else progress
    if not is_shown:
        yield from batches
        return
    from rich import console
    from rich import progress as rich

    columns = (rich.TextColumn("calibrating"), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn())
    stream = console.Console(stderr=True)
    columns = (*columns, rich.TimeRemainingColumn())
    bar = rich.Progress(*columns, console=stream, transient=stream.is_terminal)  # a file keeps the last state
    task = bar.add_task("calibrating", total=operator.length_hint(batches) or None)
    begin, is_running = time.monotonic(), False
    try:
        for batch in batches:
            yield batch
            bar.advance(task)
            if not is_running and time.monotonic() - begin > _SHOW_SECONDS:
                bar.start()
                is_running = True
    finally:
        if is_running:
            bar.stop()


def _find_origin(step: Step, state: Any) -> int:
    """Returns a number that differs where the weights or the quantized layers do."""
    return zlib.crc32(step.describe(state).encode(), step.fingerprint())


def _save(path: pathlib.Path, step: Step, position: Position) -> None:
    """Writes the position to a file that is whole at any time."""
    leaves = jax.tree_util.tree_leaves_with_path(position.state)
    content = {
        "format": _FORMAT, "version": _VERSION, "function": step.function, "batches": position.batches,
        "origin": _find_origin(step, position.state),
        "names": [jax.tree_util.keystr(where) for where, _ in leaves],
        "leaves": [np.asarray(leaf) for _, leaf in leaves],
    }  # fmt: skip
    data = serialization.msgpack_serialize(content)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(zlib.crc32(data).to_bytes(_CHECKSUM_BYTES) + data)
    partial.replace(path)


def _load(path: pathlib.Path, step: Step, target: Any) -> Position:
    """Returns the position that a file holds, if it was written for the same weights and layers."""
    name, stored = step.function, path.read_bytes()
    data = stored[_CHECKSUM_BYTES:]
    is_whole = int.from_bytes(stored[:_CHECKSUM_BYTES]) == zlib.crc32(data) and bool(data)
    content = serialization.msgpack_restore(data) if is_whole else None
    is_ours = isinstance(content, dict) and content.get("format") == _FORMAT and content.get("version") == _VERSION
    expected = "a file that this function wrote, whole, or none"
    checks.require(is_ours, name, "checkpoint", expected, f"{path}, which is another file or a damaged one")
    assert content is not None
    leaves = jax.tree_util.tree_leaves_with_path(target)
    shapes = [(jax.tree_util.keystr(where), leaf.shape, leaf.dtype) for where, leaf in leaves]
    found = [(n, v.shape, v.dtype) for n, v in zip(content["names"], content["leaves"], strict=True)]
    is_same = found == shapes and content["function"] == name
    is_same = is_same and content["origin"] == _find_origin(step, target)
    expected = "a file written for these weights and layers; delete it to start anew"
    checks.require(is_same, name, "checkpoint", expected, f"{path}, written for others")
    arrays = [jnp.asarray(leaf) for leaf in content["leaves"]]
    return Position(jax.tree.unflatten(jax.tree.structure(target), arrays), int(content["batches"]))
