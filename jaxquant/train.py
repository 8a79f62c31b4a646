"""Training for the format that will run: a prepared function learns the outputs of the float model."""

from __future__ import annotations

import functools
import inspect
import os
import pathlib
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._core import checks, dtypes
from .calibration import loop
from .checkpoint import load_safetensors, save_safetensors
from .transform import Prepared, TrainableTree
from .transform.adapters import AdaptedTree
from .transform.rules import matches_pattern
from .transform.session import Signature, is_quantized

__all__ = ["Distilled", "distill"]

_NAME = "train.distill"


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


class Distilled(NamedTuple):
    """What `distill` returns.

    Attributes:
        tree: the trained tree, of the kind that training began with, for `Prepared.convert` or `Prepared.apply`. With
            held-out batches it is the tree with the least loss on them, which may be the one at the start.
        losses: float32 [steps], the loss of each step, on the batch of the step before its update.
        held_out: the loss on the held-out batches after some numbers of steps, 0 first. Empty without such batches.
    """

    tree: Any
    losses: np.ndarray
    held_out: Mapping[int, float]


class _Loss(NamedTuple):
    """What is minimized; the attributes are arguments of `distill`."""

    temperature: float
    label_loss: Callable[..., Any] | None
    label_weight: float


class _Position(NamedTuple):
    """Where the training is: everything that a file holds to go on from there.

    Attributes:
        variables: the arrays that are trained, by their paths.
        state: the state of the optimizer.
        best: the variables with the least held-out loss, or None without held-out batches.
        losses: the loss of each step so far.
        held_out: the held-out losses so far, by the number of steps.
    """

    variables: dict[str, jax.Array]
    state: Any
    best: dict[str, jax.Array] | None
    losses: list[float]
    held_out: dict[int, float]


def compute_divergence(target: jax.Array, outputs: jax.Array, temperature: float) -> jax.Array:
    """Return the mean Kullback-Leibler divergence of logits from target logits, times the temperature's square."""
    expected, found = (jax.nn.log_softmax(x.astype(jnp.float32) / temperature) for x in (target, outputs))
    # A class that both exclude with -inf has no difference that could be computed.
    difference = jnp.where(expected > -jnp.inf, expected - found, 0)
    return (jnp.exp(expected) * difference).sum(-1).mean() * np.float32(temperature) ** 2


def distill(
    prepared: Prepared, params: Any, batches: Iterable[Any], optimizer: Any, *,
    start: TrainableTree | AdaptedTree | None = None, teacher: Callable[..., Any] | None = None,
    temperature: float = 1.0, label_loss: Callable[..., Any] | None = None, label_weight: float | None = None,
    schedule: Mapping[str, range] | None = None, steps: int | None = None, held_out: Iterable[Any] | None = None,
    evaluate_every: int = 100, checkpoint: str | os.PathLike[str] | None = None, save_seconds: float = 600.0,
    progress: bool | None = None, **arguments: Any,
) -> Distilled:  # fmt: skip
    """Train a prepared function until its outputs on codes come close to the float function's.

    minimize temperature^2 * mean KL(softmax(teacher / temperature), softmax(outputs / temperature))

    The outputs come from `Prepared.fake_apply`, and have the bits of `Prepared.apply` for the converted tree: what
    is trained is the model that will run. The function returns logits, with the classes on the last axis.

    Args:
        prepared: the prepared function. It returns one array of floats.
        params: the parameters of the function, in floats: what the teacher has, and where training begins.
        batches: batches as for `Prepared.calibrate`, one for each step. If there are fewer than `steps`, they are read
            again, so that an iterator has to hold as many as there are steps.
        optimizer: a transformation of optax, or anything with its `init` and `update`, which gets the gradient, the
            state and the variables; and, if it takes them by name, the loss as `value`, the gradient as `grad`, and as
            `value_fn` a function from variables to the loss of this step. It trains a dict of float arrays by their
            paths, such as "params/w" and "scales/weights/w/scale", so that `optax.multi_transform` can give the scales
            another rate.
        start: the tree to train: of `Prepared.trainable`, with learned scales or fixed ranges, or of `lora.adapt`, of
            which the adapters are trained. None for `prepared.trainable(params)`. With a `key`, an adapted tree drops
            inputs of its adapters: other ones in each step, and none in evaluations. The returned tree has no key.
        teacher: a function of the arguments of a batch that returns the logits to learn, which is called as it is, in
            each step. None for the function itself with `params`, in floats.
        temperature: a number that logits are divided by. One above 1 gives unlikely classes more weight.
        label_loss: a function of the outputs and the arguments of the batch that returns a scalar, such as the cross
            entropy of labels, or None.
        label_weight: the weight of `label_loss` in the sum, from 0 to 1; the divergence has the rest. None for 0.5.
        schedule: patterns for paths, and the steps in which the arrays there change, counted from 0; the first pattern
            that matches counts, and what none matches changes in each step. In all other steps an array keeps its bits,
            and the optimizer sees the gradient 0. `range(0)` keeps an array out of training and the optimizer.
        steps: the number of steps. None for one step for each batch.
        held_out: batches that nothing is learned from, which are read again at each evaluation.
        evaluate_every: the number of steps between two evaluations.
        checkpoint: the path of a safetensors file from which interrupted training goes on, and which is written at
            the end, on an error, and every `save_seconds`. It needs the package safetensors. What went on before is
            known by its arrays, the coverage of `prepared`, the temperature, the weight of labels and the schedule;
            functions and the settings of the optimizer are not compared. A program of several processes cannot have
            one: each would write arrays of which it holds a part.
        save_seconds: the least time between two writes of the file.
        progress: whether to show a progress bar with the time left, with the package rich. None shows it on a terminal.
        **arguments: keyword arguments of every call of the function.

    Returns:
        The trained tree, and the losses.

    Raises:
        ModuleNotFoundError: there is a checkpoint, and safetensors is not installed.
        TypeError: an argument has a wrong type, an output is no array of floats, or the optimizer needs an argument
            that it is not given.
        ValueError: there are too few batches; a number is out of range; there is a weight of labels without their loss;
            a pattern matches nothing; the loss of a step or an array after it is not finite; outputs and target have
            different shapes; or the file is damaged, or belongs to another training, or to one of more steps, or there
            are several processes.

    Example:
        >>> import jax, jax.numpy as jnp, optax, jaxquant as jq
        >>> params = {"w": jax.random.normal(jax.random.key(0), (32, 8)) / 4}
        >>> x = jax.random.normal(jax.random.key(1), (256, 32))
        >>> apply = lambda params, x: x @ params["w"]
        >>> prepared = jq.prepare(apply, params, x, rules=jq.recipes.gguf("Q4_0"))
        >>> start = prepared.trainable(params, estimator=jq.LSQ())
        >>> tree, losses, held_out = jq.train.distill(
        ...     prepared, params, [x[:192]], optax.adam(3e-3), start=start, steps=40, held_out=[x[192:]],
        ...     evaluate_every=10)
        >>> len(losses), held_out[40] < 0.5 * held_out[0]
        (40, True)
        >>> prepared.convert(tree).params["w"].format
        dtype(int4)

    Source: Hinton et al., arXiv 1503.02531, section 2, for the loss; Prechelt, Early Stopping - But When? (1998),
    section 2, for the choice of the tree.
    """
    checks.require_type(isinstance(prepared, Prepared), _NAME, "prepared", "a Prepared", type(prepared).__name__)
    is_used = label_weight is None or label_loss is not None
    checks.require(is_used, _NAME, "label_weight", "None, as there is no label_loss", label_weight)
    label_weight = 0.5 if label_weight is None else label_weight
    _check_settings(temperature, label_weight, evaluate_every, save_seconds, steps)
    for name, value in (("teacher", teacher), ("label_loss", label_loss)):
        is_function = value is None or callable(value)
        checks.require_type(is_function, _NAME, name, "a function or None", checks.describe_value(value))
    is_optimizer = all(callable(getattr(optimizer, name, None)) for name in ("init", "update"))
    expected = "a transformation of optax, with init and update"
    checks.require_type(is_optimizer, _NAME, "optimizer", expected, type(optimizer).__name__)
    loop.check_progress(_NAME, progress)
    for name, value in (("batches", batches), ("held_out", () if held_out is None else held_out)):
        loop.check_batches(_NAME, value, name)
    with checks.name_errors(_NAME):
        tree = prepared.trainable(params) if start is None else start
    is_tree = isinstance(tree, TrainableTree | AdaptedTree)
    checks.require_type(is_tree, _NAME, "start", "a tree of Prepared.trainable or lora.adapt", type(tree).__name__)
    loss = _Loss(float(temperature), label_loss, float(label_weight))
    is_alone = checkpoint is None or jax.process_count() == 1
    checks.require(is_alone, _NAME, "checkpoint", "None, in a program of several processes", checkpoint)
    training = _Training(prepared, params, tree, optimizer, teacher, loss, schedule, arguments)
    evaluations = None if held_out is None else loop.read_batches(_NAME, held_out, arguments, "held_out")
    path = loop.check_path(_NAME, checkpoint)
    position = _run(training, batches, steps, evaluations, evaluate_every, path, save_seconds, progress)
    best = position.variables if position.best is None else position.best
    return Distilled(training.rebuild(best), np.asarray(position.losses, np.float32), position.held_out)


def _check_settings(temperature: Any, label_weight: Any, evaluate_every: Any, save_seconds: Any, steps: Any) -> None:
    for name, value in (("temperature", temperature), ("label_weight", label_weight), ("save_seconds", save_seconds)):
        checks.check_real(_NAME, name, value)
    checks.require(temperature > 0, _NAME, "temperature", "a positive number", temperature)
    checks.require(0 <= label_weight <= 1, _NAME, "label_weight", "a number from 0 to 1", label_weight)
    checks.require(save_seconds >= 0, _NAME, "save_seconds", "0 or a positive number", save_seconds)
    for name, value in (("evaluate_every", evaluate_every), ("steps", 1 if steps is None else steps)):
        checks.check_integer(_NAME, name, value)
        checks.require(value > 0, _NAME, name, "a positive number", value)


class _Training:
    """The functions of a step, compiled once, and the arrays that they train.

    Args:
        prepared: the prepared function.
        params: the parameters of the teacher.
        tree: the tree to train.
        optimizer: the transformation of optax.
        teacher: a function that returns target logits, or None for the function with `params`.
        loss: what is minimized.
        schedule: by pattern, the steps in which arrays change.
        arguments: keyword arguments of every call.
    """

    def __init__(
        self, prepared: Prepared, params: Any, tree: Any, optimizer: Any, teacher: Any, loss: _Loss, schedule: Any,
        arguments: Any,
    ) -> None:  # fmt: skip
        self.optimizer, self.arguments, self._prepared, self._loss = optimizer, arguments, prepared, loss
        self._key = tree.key if isinstance(tree, AdaptedTree) else None
        if self._key is not None:
            checks.require_type(checks.is_key(self._key), _NAME, "start", "a key of jax.random as start.key", self._key)
            tree = tree.replace(key=None)
        self._signature = Signature(tree)
        prefix = "adapters/" if isinstance(tree, AdaptedTree) else ""
        places = {
            path: place
            for place, (path, x) in enumerate(zip(self._signature.names, self._signature.arrays, strict=True))
            if path.startswith(prefix) and not is_quantized(x) and checks.has_dtype(x, dtypes.FLOATS)
        }
        self._steps = _read_schedule(schedule, tuple(places))
        self._settings = (loss.temperature, loss.label_loss and loss.label_weight, schedule)
        self._places = {path: place for path, place in places.items() if len(self._steps[path])}
        checks.require(bool(self._places), _NAME, "schedule", "steps in which an array changes", "none")
        # A step deletes the variables that it is given, and these are the user's.
        self.start = {path: jnp.array(self._signature.arrays[place], copy=True) for path, place in self._places.items()}
        trained = set(self._places.values())
        self._fixed = [None if place in trained else x for place, x in enumerate(self._signature.arrays)]
        self._params = Signature(params)
        self._teacher = teacher
        self._teach = jax.jit(self._compute_target)
        self._step, self._score = jax.jit(self._update, donate_argnums=(0, 1)), jax.jit(self._compute_loss)

    def _compute_loss(
        self, variables: Any, fixed: Any, target: jax.Array, batch: Signature, key: jax.Array | None = None
    ) -> jax.Array:
        (args, kwargs), tree = batch.rebuild(batch.arrays), self._rebuild(variables, fixed)
        tree = tree if key is None else tree.replace(key=key)
        with checks.name_errors(_NAME):
            outputs = self._prepared.fake_apply(tree, *args, **kwargs, **self.arguments)
        _check_outputs("prepared, whose result is", outputs)
        expected = f"logits of shape {outputs.shape}, as of the function"
        checks.require(target.shape == outputs.shape, _NAME, "teacher", expected, target.shape)
        loss = compute_divergence(target, outputs, self._loss.temperature)
        if self._loss.label_loss is None:
            return loss
        label_loss, weight = self._loss.label_loss(outputs, *args, **kwargs), self._loss.label_weight
        is_scalar = checks.has_dtype(label_loss, dtypes.FLOATS) and label_loss.ndim == 0
        expected, got = "a function that returns one float, an array of shape ()", checks.describe_value(label_loss)
        checks.require_type(is_scalar, _NAME, "label_loss", expected, got)
        return (1 - weight) * loss + weight * label_loss

    def _update(
        self, variables: Any, state: Any, fixed: Any, active: Any, target: jax.Array, batch: Signature,
        key: jax.Array | None,
    ) -> Any:  # fmt: skip
        loss, gradient = jax.value_and_grad(self._compute_loss)(variables, fixed, target, batch, key)
        gradient = {path: jnp.where(active[path], g, 0) for path, g in gradient.items()}
        extra = {
            "value": loss,
            "grad": gradient,
            "value_fn": lambda v: self._compute_loss(v, fixed, target, batch, key),
        }
        given = {name: extra[name] for name in _list_extra(self.optimizer.update, extra)}
        # Optimizers of optax mix dtypes, which JAX refuses under `jax_numpy_dtype_promotion="strict"`.
        with jax.numpy_dtype_promotion("standard"):
            try:
                updates, state = self.optimizer.update(gradient, state, variables, **given)
            except TypeError as error:
                expected = f"one whose update needs no arguments but gradient, state, variables, {', '.join(extra)}"
                raise checks.ContractTypeError(
                    checks.format_message(_NAME, "optimizer", expected, f"the error: {error}")
                ) from error
        shapes, given = (_list_shapes(x) for x in (variables, updates))
        checks.require_type(given == shapes, _NAME, "optimizer", f"updates of the form {shapes}", given)
        new = {path: (x + updates[path]).astype(x.dtype) for path, x in variables.items()}
        variables = {path: jnp.where(active[path], new[path], x) for path, x in variables.items()}
        return variables, state, loss, jnp.stack([jnp.isfinite(x).all() for x in variables.values()]).all()

    def _compute_target(self, arrays: Any, batch: Signature) -> Any:
        args, kwargs = batch.rebuild(batch.arrays)
        return self._prepared.function(self._params.rebuild(arrays), *args, **kwargs, **self.arguments)

    def teach(self, batch: Signature) -> jax.Array:
        """Return the target logits of a batch."""
        if self._teacher is None:
            target = self._teach(self._params.arrays, batch)
        else:
            args, kwargs = batch.rebuild(batch.arrays)
            target = self._teacher(*args, **kwargs)
        _check_outputs("teacher", target)
        return target

    def run_step(self, position: _Position, number: int, batch: Signature) -> _Position:
        """Return the position after a step; the arrays of the one before are deleted, and its list of losses grows."""
        active = {path: np.bool_(number in self._steps[path]) for path in self._places}
        target = self.teach(batch)
        key = None if self._key is None else jax.random.fold_in(self._key, number)
        variables, state, loss, is_finite = self._step(
            position.variables, position.state, self._fixed, active, target, batch, key
        )
        value = float(loss)
        expected, got = "batches with a finite loss", f"a loss of {value} in step {number}, counted from 0"
        checks.require(bool(np.isfinite(value)), _NAME, "batches", expected, got)
        expected, got = "finite updates", f"a NaN or an infinity in an array after step {number}, counted from 0"
        checks.require(bool(is_finite), _NAME, "optimizer", expected, got)
        position.losses.append(value)
        return position._replace(variables=variables, state=state)

    def evaluate(self, position: _Position, calls: list[Any]) -> _Position:
        """Return the position with another held-out loss, and the best variables until now."""
        values = []
        for call in calls:
            batch = Signature(call)
            values.append(float(self._score(position.variables, self._fixed, self.teach(batch), batch)))
        loss, previous = float(np.mean(values)), position.held_out.values()
        expected = "batches with a finite loss"
        checks.require(bool(np.isfinite(loss)), _NAME, "held_out", expected, loss)
        best = position.best
        if best is None or loss < min(previous):
            # The next step deletes the variables.
            best = jax.tree.map(jnp.copy, position.variables)
        return position._replace(best=best, held_out={**position.held_out, len(position.losses): loss})

    def rebuild(self, variables: Mapping[str, jax.Array]) -> Any:
        """Return the tree with these variables."""
        return self._rebuild(variables, self._fixed)

    def _rebuild(self, variables: Mapping[str, Any], fixed: list[Any]) -> Any:
        arrays = list(fixed)
        for path, place in self._places.items():
            arrays[place] = variables[path]
        return self._signature.rebuild(arrays)

    @functools.cached_property
    def origin(self) -> int:
        """A checksum of where training began, which a file to go on from must have."""
        rows = [(row.name, row.form, row.weight, row.activations) for row in self._prepared.coverage]
        arrays = [self._signature, None if self._teacher else self._params]
        key = None if self._key is None else np.asarray(jax.random.key_data(self._key)).tolist()
        content = repr((self._signature.names, sorted(self._places), rows, self._settings, key))
        return zlib.crc32(content.encode(), loop.compute_fingerprint([x and x.arrays for x in arrays]))


def _check_outputs(argument: str, outputs: Any) -> None:
    is_array = checks.has_dtype(outputs, dtypes.FLOATS) and outputs.ndim > 0
    expected = "one array of float logits with the classes on the last axis"
    checks.require_type(is_array, _NAME, argument, expected, checks.describe_value(outputs))


def _list_extra(update: Callable[..., Any], known: Iterable[str]) -> list[str]:
    """Return the names of known arguments that the update of an optimizer takes by name."""
    parameters = inspect.signature(update).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in known if takes_all or name in parameters]


def _list_shapes(updates: Any) -> Any:
    return jax.tree.map(np.shape, updates)


def _read_schedule(schedule: Any, paths: tuple[str, ...]) -> dict[str, range]:
    """Return the steps in which each array changes."""
    expected = "a mapping from patterns to ranges of steps, or None"
    schedule = {} if schedule is None else schedule
    is_schedule = isinstance(schedule, Mapping) and all(
        isinstance(pattern, str) and isinstance(steps, range) for pattern, steps in schedule.items()
    )
    checks.require_type(is_schedule, _NAME, "schedule", expected, repr(schedule))
    always = range(np.iinfo(np.int64).max)
    for pattern in schedule:
        matches = any(matches_pattern(pattern, path) for path in paths)
        checks.require(matches, _NAME, "schedule", f"patterns for {', '.join(paths[:4])}", repr(pattern))
    return {
        path: next((steps for pattern, steps in schedule.items() if matches_pattern(pattern, path)), always)
        for path in paths
    }


def _run(
    training: _Training, batches: Iterable[Any], steps: int | None, evaluations: list[Any] | None, evaluate_every: int,
    path: pathlib.Path | None, save_seconds: float, progress: bool | None,
) -> _Position:  # fmt: skip
    """Return the position at the end of training."""
    # A step deletes both, so the state cannot hold the variables themselves.
    state = jax.tree.map(jnp.copy, training.optimizer.init(training.start))
    position = _Position(training.start, state, None, [], {})
    if path is not None and path.exists():
        position = _load(path, training, position, evaluations is not None)
    elif evaluations is not None:
        position = training.evaluate(position, evaluations)
    done, saved = len(position.losses), time.monotonic()
    expected, got = f"the {done} steps of the file {path}, or more; delete it to start again", steps
    checks.require(steps is None or steps >= done, _NAME, "steps", expected, got)
    total = steps if steps is not None else (len(batches) if hasattr(batches, "__len__") else None)  # type: ignore[arg-type]
    bar = loop.Bar("distilling", total, progress)
    try:
        # Training may have been interrupted in an evaluation.
        if evaluations is not None and done % evaluate_every == 0 and done not in position.held_out:
            position = training.evaluate(position, evaluations)
        for number, batch in enumerate(_repeat(batches, steps)):
            bar.count_step()
            if number < done:  # the file has these steps
                continue
            call = Signature(loop.split_arguments(_NAME, number, batch, training.arguments))
            position = training.run_step(position, number, call)
            if evaluations is not None and (number + 1) % evaluate_every == 0:
                position = training.evaluate(position, evaluations)
            if path is not None and time.monotonic() - saved > save_seconds:
                _save(path, training, position)
                saved = time.monotonic()
        if evaluations is not None and len(position.losses) not in position.held_out:
            position = training.evaluate(position, evaluations)
    finally:
        bar.stop()
        # A step that failed may have deleted the arrays.
        arrays = [x for x in jax.tree.leaves((position.variables, position.state)) if isinstance(x, jax.Array)]
        if path is not None and not any(x.is_deleted() for x in arrays):
            _save(path, training, position)
    return position


def _repeat(batches: Iterable[Any], steps: int | None) -> Iterator[Any]:
    """Yield a batch for each step."""
    count = 0
    while True:
        before = count
        for batch in batches:
            yield batch
            count += 1
            if count == steps:
                return
        if count == before or steps is None:
            expected = "at least one batch" if steps is None else f"{steps} batches, or a list, which can be read again"
            checks.require(count > 0 if steps is None else count == steps, _NAME, "batches", expected, count)
            return


# The file to go on from: lists of arrays, whose order the optimizer and the tree determine.


def _save(path: pathlib.Path, training: _Training, position: _Position) -> None:
    content = {
        "origin": np.uint32(training.origin),
        "losses": np.asarray(position.losses, np.float64),
        "held_out": np.array(list(position.held_out.items()), np.float64).reshape(-1, 2),
        "variables": [np.asarray(position.variables[name]) for name in sorted(position.variables)],
        "state": [_to_numpy(x) for x in jax.tree.leaves(position.state)],
        "best": [] if position.best is None else [np.asarray(position.best[name]) for name in sorted(position.best)],
    }
    partial = path.with_name(f"{path.name}.partial")
    save_safetensors(partial, {**content, "checksum": np.uint32(loop.compute_fingerprint(content))})
    partial.replace(path)


def _load(path: pathlib.Path, training: _Training, start: _Position, has_best: bool) -> _Position:
    """Return the position of a file; `start` is the first one."""
    expected = f"a file of this training at {path}; delete it to start again"
    try:
        content = load_safetensors(path)
    except checks.ContractValueError as error:
        raise checks.ContractValueError(checks.format_message(_NAME, "checkpoint", expected, error)) from error
    names = {"origin", "losses", "held_out", "variables", "state", "best", "checksum"}
    is_known = isinstance(content, dict) and set(content) == names
    checks.require(is_known, _NAME, "checkpoint", expected, "another file")
    checksum = content.pop("checksum")
    is_complete = np.array_equal(checksum, loop.compute_fingerprint(content))
    checks.require(is_complete, _NAME, "checkpoint", expected, "a damaged file")
    got = "a file of training with other arrays, rules or settings"
    checks.require(int(content["origin"]) == training.origin, _NAME, "checkpoint", expected, got)
    paths, (state, form) = sorted(start.variables), jax.tree.flatten(start.state)
    variables = [start.variables[path] for path in paths]
    had_best = len(content["held_out"]) > 0
    wanted = "held-out batches, as the training had" if had_best else "None, as the training had no held-out batches"
    got = f"{'batches' if has_best else 'none'}, and {path} to go on from"
    checks.require(had_best == has_best, _NAME, "held_out", wanted, got)
    likes = {"variables": variables, "state": state, "best": variables if has_best else []}
    for name, like in likes.items():
        found, needed = ([(x.shape, x.dtype) for x in map(_to_numpy, part)] for part in (content[name], like))
        got = f"{len(found)} arrays in {name}, or others than the {len(needed)} of this optimizer"
        checks.require(found == needed, _NAME, "checkpoint", expected, got)
    arrays = {name: list(map(_place, content[name], like)) for name, like in likes.items()}
    return _Position(
        dict(zip(paths, arrays["variables"], strict=True)), jax.tree.unflatten(form, arrays["state"]),
        dict(zip(paths, arrays["best"], strict=True)) if has_best else None, content["losses"].tolist(),
        {int(steps): float(loss) for steps, loss in content["held_out"]},
    )  # fmt: skip


def _to_numpy(x: Any) -> np.ndarray:
    """Return an array as a file holds it: of a random key its data, which an optimizer that adds noise has."""
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)


def _place(data: np.ndarray, like: jax.Array) -> jax.Array:
    """Return an array of a file as the one that it stands for, on the same devices."""
    array = jnp.asarray(data)
    array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(like)) if _is_key(like) else array
    return jax.device_put(array, like.sharding) if like.committed else array


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
