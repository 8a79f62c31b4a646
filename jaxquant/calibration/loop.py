"""The loop over batches that finds static ranges, with its progress bar and the file to resume from."""

from __future__ import annotations

import importlib.util
import io
import json
import operator
import os
import pathlib
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._core import checks

_SAVE_SECONDS = 60.0  # the least time between two writes of the file to resume from
_SHOW_SECONDS = 2.0  # a shorter loop shows no progress bar
_FORMAT, _VERSION = "jaxquant.calibration", 2
_HAS_RICH = importlib.util.find_spec("rich") is not None  # flax installs it
_CHECKSUM_BYTES = 4  # at the start of the file, so that a damaged file is rejected and not read as other ranges


class BatchStep(NamedTuple):
    """The function that processes a batch, and what its result depends on.

    Attributes:
        function: the name of the public function, for errors.
        run: a jitted function of the state and of a batch's positional and keyword arguments. Returns the updated
            state, and whether it is finite, or a mapping that says so of each layer. In place of True and False it may
            be 1 and 0, or -1 for finite values with squares that overflow float32.
        fingerprint: a function that returns a checksum of the weights. It is slow for large weights.
        describe: a function of the state that returns a description of the quantized layers, equal in every process.
        arguments: the names of the arguments of every call, which no batch may use.
    """

    function: str
    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[Any, jax.Array | Mapping[str, jax.Array]]]
    fingerprint: Callable[[], int]
    describe: Callable[[Any], str]
    arguments: frozenset[str]


class Position(NamedTuple):
    """The progress of the loop: the state, and the number of batches that it has seen."""

    state: Any
    batches: int


def compute_fingerprint(tree: object) -> int:
    """Return a checksum of the arrays that this process holds."""
    checksum = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        # The path counts too: the same arrays at other paths are another model.
        checksum = zlib.crc32(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode(), checksum)
        # numpy cannot hold random keys, so only their shapes count.
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            continue
        shards = [shard.data for shard in array.addressable_shards] if isinstance(array, jax.Array) else [array]
        for shard in shards:
            checksum = zlib.crc32(np.asarray(shard).tobytes(), checksum)
    return checksum


def read_batches(
    function: str, batches: Iterable[Any], reserved: Collection[str], name: str = "batches"
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return one batch or more as positional and keyword arguments; see `split_arguments`."""
    check_batches(function, batches, name)
    calls = [split_arguments(function, index, batch, reserved, name) for index, batch in enumerate(batches)]
    checks.require(bool(calls), function, name, "at least one batch", "none")
    return calls


def split_arguments(
    function: str, index: int, batch: object, reserved: Collection[str], name: str = "batches"
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as positional and keyword arguments.

    An array is one positional argument, a tuple is several, and a mapping holds keyword arguments.

    Args:
        function: the public function that errors name.
        index: the index of the batch, for errors.
        batch: an array, a tuple, a list or a mapping.
        reserved: the names of the arguments of every call, which no batch may use.
        name: the argument that holds the batches, for errors.
    """
    label = f"{name}[{index}]"
    if not isinstance(batch, Mapping | tuple | list):
        expected = "an array, a tuple of positional arguments, or a mapping of keyword arguments"
        checks.require_type(_is_array(batch), function, label, expected, type(batch).__name__)
        return (batch,), {}
    if not isinstance(batch, Mapping):
        _check_arrays(function, label, tuple(batch))
        return tuple(batch), {}
    named = dict(batch)
    is_named = all(isinstance(name, str) for name in named)
    expected = "a mapping from names of arguments; (mapping,) passes the mapping as one argument"
    checks.require_type(is_named, function, label, expected, f"keys {list(named)[:3]}")
    duplicates = sorted(set(reserved) & set(named))
    expected = "names of arguments that no other argument of this call sets"
    checks.require(not duplicates, function, label, expected, ", ".join(duplicates))
    _check_arrays(function, label, named)
    return (), named


def _is_array(value: object) -> bool:
    """Return whether a value is something that JAX takes as an array."""
    # jax.Array is named besides ArrayLike, because Python 3.11 compares types for a union, and a traced array has
    # another type.
    return isinstance(value, (jax.Array, ArrayLike))


def _check_arrays(function: str, label: str, batch: object) -> None:
    """Raise ContractTypeError unless each leaf of a batch is an array."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not _is_array(leaf):
            argument, expected = f"{label}{jax.tree_util.keystr(path)}", "an array, or nested tuples and dicts of them"
            checks.refuse_type(function, argument, expected, type(leaf).__name__)


def run_loop(
    step: BatchStep, state: Any, batches: Iterable[Any], *, checkpoint: str | os.PathLike[str] | None,
    progress: bool | None, inspect: Callable[[Any], None], keep: Callable[[Any], None] = lambda state: None,
) -> Any:  # fmt: skip
    """Return the state after all batches.

    Args:
        step: the work on a batch.
        state: the state to start from, unless the checkpoint has one.
        batches: an iterable of arrays, tuples or mappings.
        checkpoint: the path of a file to resume from, or None.
        progress: whether to show a progress bar, which needs the package rich; or None to show it on a terminal if that
            package is installed.
        inspect: called with the state after the first batch, to raise an error if calibration makes no sense.
        keep: called with the last finite state when the loop ends, also by an error.

    Raises:
        ContractTypeError: batches, a batch, checkpoint or progress has a wrong type.
        ContractValueError: there is no batch, a batch is not finite, or the checkpoint does not fit.
    """
    check_batches(step.function, batches)
    path = check_path(step.function, checkpoint)
    check_progress(step.function, progress)
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
        # An error in a later batch must not lose the work on the earlier ones.
        if position.batches:
            keep(position.state)
            if path is not None:
                _save(path, step, position)
    checks.require(position.batches > 0, step.function, "batches", "at least one batch", "none")
    return position.state


def _iterate_positions(
    step: BatchStep, start: Position, batches: Iterable[Any], path: pathlib.Path | None
) -> Iterator[Position]:
    """Yield the position after each batch, and check that its values are finite.

    Args:
        step: the work on a batch.
        start: the position before the first batch, unless the file has one.
        batches: the batches.
        path: the file to resume from, or None.
    """
    position, index, batch_count, pending = start, -1, 0, None
    for index, batch in enumerate(batches):
        arguments = split_arguments(step.function, index, batch, step.arguments)
        # The first batch gives the shapes with which the file is compared.
        if index == 0 and path is not None and path.exists():
            # The arguments are not traced, because some of them may be static.
            target = jax.eval_shape(lambda state, given=arguments: step.run(state, *given), start.state)[0]
            position = _load(path, step, target)
            batch_count = position.batches
        # The batches that the file already counts are read and ignored, so that an iterator advances past them.
        if index < batch_count:
            continue
        # A batch is checked only after the next one has been read, so that the device computes while the host reads.
        if pending is not None:
            position = _check_finite(step, *pending)
            yield position
        pending = (index, *step.run(position.state, *arguments))
    expected = f"the {batch_count} batches that {path} counts, and perhaps more; delete it to start again"
    checks.require(index + 1 >= batch_count, step.function, "batches", expected, f"{index + 1}")
    if pending is not None:
        yield _check_finite(step, *pending)
    elif batch_count:
        yield position


def _check_finite(step: BatchStep, index: int, state: Any, finite: jax.Array | Mapping[str, jax.Array]) -> Position:
    """Return the position after a batch, and check that the state is finite."""
    flags = finite if isinstance(finite, Mapping) else {"": finite}
    expected = "arrays that are not traced, because the loop runs outside of jax.jit"
    is_traced = any(checks.is_traced(flag) for flag in flags.values())
    checks.require(not is_traced, step.function, "batches", expected, "a traced array")
    names = [name for name, flag in flags.items() if int(flag) <= 0]
    label = f" at {names[0]}" if names and names[0] else ""
    expected = "batches with finite activations"
    got = f"a NaN or an infinity{label} in batch {index}, counted from 0; the ranges are those before this batch"
    if names and int(flags[names[0]]) < 0:
        expected = "batches with activations that float32 can square and sum, up to 3.4e38"
        got = f"larger activations{label} in batch {index}, counted from 0"
    checks.require(not names, step.function, "batches", expected, got)
    return Position(state, index + 1)


def check_batches(function: str, batches: object, name: str = "batches") -> None:
    """Raise ContractTypeError for a single batch and for values that are not iterable."""
    is_array = isinstance(batches, jax.Array | np.ndarray)
    is_iterable = isinstance(batches, Iterable) and not is_array and not isinstance(batches, Mapping | str)
    got = checks.describe_value(batches) if is_array else type(batches).__name__
    checks.require_type(is_iterable, function, name, "an iterable of batches, such as [batch]", got)


def check_path(function: str, checkpoint: str | os.PathLike[str] | None) -> pathlib.Path | None:
    """Return the path of a checkpoint, and check that a file can be written there before the work begins."""
    if checkpoint is None:
        return None
    is_path = isinstance(checkpoint, str | os.PathLike)
    expected = "the path of a file, or None"
    checks.require_type(is_path, function, "checkpoint", expected, type(checkpoint).__name__)
    path = pathlib.Path(checkpoint)
    checks.require(path.parent.is_dir(), function, "checkpoint", "a folder that exists", str(path.parent))
    checks.require(not path.is_dir(), function, "checkpoint", "the path of a file", f"the folder {path}")
    is_writable = os.access(path.parent, os.W_OK)
    checks.require(is_writable, function, "checkpoint", "a folder that can be written to", str(path.parent))
    return path


class Bar:
    """A progress bar on the error stream, which appears once the work takes long, or not at all.

    Args:
        text: what is done.
        total: the number of steps; None shows a bar without an end.
        progress: whether to show a bar; None shows it on a terminal, if the package rich is installed.
    """

    def __init__(self, text: str, total: int | None, progress: bool | None) -> None:
        self._bar: Any = None
        self._begin, self._is_running = time.monotonic(), False
        if not (sys.stderr.isatty() and _HAS_RICH if progress is None else progress):
            return
        # Imported only when a bar is shown, because most loops show none.
        from rich import console
        from rich import progress as rich

        columns = (
            rich.TextColumn(text), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn(),
            rich.TimeRemainingColumn(),
        )  # fmt: skip
        stream = console.Console(stderr=True)
        # The bar disappears from a terminal; a log file keeps its last state.
        self._bar = rich.Progress(*columns, console=stream, transient=stream.is_terminal)
        self._task = self._bar.add_task(text, total=total)

    def count_step(self) -> None:
        """Count a step."""
        if self._bar is None:
            return
        self._bar.advance(self._task)
        if not self._is_running and time.monotonic() - self._begin > _SHOW_SECONDS:
            self._bar.start()
            self._is_running = True

    def stop(self) -> None:
        """Remove the bar."""
        if self._is_running:
            self._bar.stop()


def check_progress(function: str, progress: object) -> None:
    """Raise unless an argument says whether to show a progress bar, and it can be shown."""
    if progress is not None:
        checks.check_flag(function, "progress", progress)
        checks.require(_HAS_RICH or not progress, function, "progress", "None or False, or the package rich", "True")


def _show_progress(batches: Iterable[Any], progress: bool | None) -> Iterator[Any]:
    """Yield the batches, and show a bar on the error stream once they take long."""
    bar = Bar("calibrating", operator.length_hint(batches) or None, progress)
    try:
        for batch in batches:
            yield batch
            bar.count_step()
    finally:
        bar.stop()


def _compute_origin(step: BatchStep, state: object) -> int:
    """Return a checksum of the weights and of the description of the quantized layers."""
    return zlib.crc32(step.describe(state).encode(), step.fingerprint())


def _save(path: pathlib.Path, step: BatchStep, position: Position) -> None:
    """Write the position to a file, so that the file is complete at any time."""
    leaves = jax.tree_util.tree_leaves_with_path(position.state)
    header = {
        "format": _FORMAT, "version": _VERSION, "function": step.function, "batches": position.batches,
        "origin": _compute_origin(step, position.state),
        "names": [jax.tree_util.keystr(key_path) for key_path, _ in leaves],
    }  # fmt: skip
    stream = io.BytesIO()
    np.savez(stream, *(np.asarray(leaf) for _, leaf in leaves), header=np.array(json.dumps(header)))
    data = stream.getvalue()
    # Renaming is atomic: a process that is killed leaves the old file or the new one.
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(zlib.crc32(data).to_bytes(_CHECKSUM_BYTES) + data)
    partial.replace(path)


def _load(path: pathlib.Path, step: BatchStep, target: Any) -> Position:
    """Return the position in a file, and check that it was written for the same weights and layers.

    Args:
        path: the file.
        step: the work on a batch.
        target: the shapes and dtypes of the state.
    """
    function, file = step.function, path.read_bytes()
    data = file[_CHECKSUM_BYTES:]
    is_complete = int.from_bytes(file[:_CHECKSUM_BYTES]) == zlib.crc32(data) and bool(data)
    content, arrays = _read_file(data) if is_complete else ({}, [])
    is_known = content.get("format") == _FORMAT and content.get("version") == _VERSION
    expected = "no file, or a complete file that this function wrote"
    checks.require(is_known, function, "checkpoint", expected, f"{path}, which is another file or a damaged one")
    target_leaves = jax.tree_util.tree_leaves_with_path(target)
    expected_leaves = [(jax.tree_util.keystr(key_path), leaf.shape, leaf.dtype) for key_path, leaf in target_leaves]
    named_leaves = zip(content["names"], arrays, strict=True)
    is_same = [(name, leaf.shape, leaf.dtype) for name, leaf in named_leaves] == expected_leaves
    # The fingerprint of the weights is slow, so it is compared last.
    is_same = is_same and content["function"] == function and content["origin"] == _compute_origin(step, target)
    expected = "a file written for these weights and layers; delete it to start again"
    checks.require(is_same, function, "checkpoint", expected, f"{path}, written for other weights or layers")
    state = jax.tree.unflatten(jax.tree.structure(target), list(map(jnp.asarray, arrays)))
    return Position(state, int(content["batches"]))


def _read_file(data: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the header and the arrays of a file, or no header if it is not a file of this module."""
    try:
        with np.load(io.BytesIO(data)) as file:
            if "header" not in file:
                return {}, []
            header = json.loads(str(file["header"]))
            return header, [file[f"arr_{index}"] for index in range(len(header["names"]))]
    except (ValueError, OSError, zipfile.BadZipFile):
        return {}, []
