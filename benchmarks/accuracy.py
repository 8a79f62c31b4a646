"""Accuracy of int8, int4 and int2 weights on real data, after quantization and after further training.

Run `python -m benchmarks.accuracy` from the repository root, with the extra "examples".

There are two data sets of scikit-learn and five seeds. A seed determines the split, the initial weights and the order
of the batches. A float network is trained, then quantized with ranges from the training data, then trained further with
learned scales. A validation split selects the best of the start and all epochs. The targets of the further training are
the mean of the data's targets and the float network's outputs. The test split is used once per network, for the
converted network in integers. Post-training is the better of two ranges in the mean over the test splits, a choice that
favors it.

The exit status is 1 if further training recovers less than 90 % of post-training's loss at int4, or 70 % at int2, where
that loss is measurable; if it ends below post-training; or if conversion changes an output. A difference of means is
measurable if it exceeds twice its standard error over the seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxquant as jq
from jaxquant import flax as jqf
from jaxquant.flax import linen as qnn

_SEEDS, _FIRST_SEED = 5, 100  # learning rates and widths were chosen with other seeds
_FLOAT, _TRAINED = "float32", "trained on"
_POST_TRAINING = {
    "minmax": (jq.Dynamic(), jq.Static(jq.calibration.minmax)),
    "mse": (jq.Dynamic(jq.calibration.mse), jq.Static(jq.calibration.mse)),
}
_LEARNED = (jq.Learned(jq.LSQPlus()), jq.Learned(jq.LSQPlus()))
_WEIGHTS = {name: jq.QuantSpec(name, jq.PerAxis(-1)) for name in ("int8", "int4", "int2")}
_RATES = {"int8": 0.1, "int4": 0.5, "int2": 1.0}  # times the plan's rate: a smaller loss needs smaller steps
_TARGETS = {"int4": 0.9, "int2": 0.7}
_ERRORS = 2  # standard errors: five seeds cannot distinguish a smaller difference of means from noise
_HEADS = (f"{_TRAINED} - post-training", "recovered", "target", "")
_TEMPERATURE = 2.0  # divides the float network's scores where they are targets
_AVERAGED = 0.98  # the decay of the moving average of the weights, which is the network that is evaluated

Split = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class _Task:
    """A data set and the hyperparameters of its network.

    Attributes:
        name: in the table.
        measure: the name of the score.
        is_classes: whether the targets are probabilities of classes, not numbers.
        load: returns the inputs and the targets.
        widths: the widths of the network's layers.
        batch: the batch size.
        plan: the epochs and the initial learning rate of training from scratch.
        plan_on: the data of the further training.
    """

    name: str
    measure: str
    is_classes: bool
    load: Callable[[], tuple[np.ndarray, np.ndarray]]
    widths: tuple[int, ...]
    batch: int
    plan: tuple[int, float]
    plan_on: tuple[int, float]


class Network(nn.Module):
    """Dense layers with ReLU between them: Flax's, or jaxquant's if there is a spec. The parameters are the same."""

    widths: tuple[int, ...]
    weight: jq.QuantSpec | None = None
    ranges: tuple[Any, Any] = _LEARNED

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the outputs of the last layer."""
        dense: Any = nn.Dense
        if self.weight is not None:
            specs = {"weight_spec": self.weight, "activation_spec": jq.QuantSpec(jnp.uint8)}
            dense = functools.partial(qnn.Dense, **specs, weight_range=self.ranges[0], activation_range=self.ranges[1])
        for features in self.widths[:-1]:
            x = nn.relu(dense(features)(x))
        return dense(self.widths[-1])(x)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.accuracy", description=__doc__)
    parser.add_argument("--seeds", type=int, default=_SEEDS, metavar="N", help=f"number of seeds; default {_SEEDS}")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("sklearn") is None:
        print('the data need scikit-learn: pip install -e ".[examples]"', file=sys.stderr)
        return 2
    began = time.perf_counter()
    print(f"Python {platform.python_version()}, jax {jax.__version__}, {options.seeds} seeds. In percent: means and")
    print("standard deviations; for differences, standard errors. One scale per output feature; uint8 activations.\n")
    kinds = [f"post-training, {name}" for name in _POST_TRAINING]
    heads = ["data", "measure", "weights", _FLOAT, *kinds, _TRAINED, "post-training - float32", *_HEADS]
    _print_line(heads)
    _print_line(["---"] * len(heads))
    wrong = []
    for task in _TASKS:
        seed_scores = [_score_seed(task, seed) for seed in range(_FIRST_SEED, _FIRST_SEED + options.seeds)]
        scores = {key: np.array([seed[key] for seed in seed_scores]) for key in seed_scores[0]}
        changed = int(scores.pop(("changed", "")).sum())
        wrong += [f"{task.name}: converting changed {changed} outputs"] if changed else []
        wrong += [line for weights in _WEIGHTS for line in _judge_weights(task, weights, scores)]
    print(f"\n{time.perf_counter() - began:.0f} s")
    print("missed: " + "; ".join(wrong) if wrong else "every target met; converting to integers changed no output")
    return 1 if wrong else 0


def _judge_weights(task: _Task, weights: str, scores: dict[tuple[str, str], np.ndarray]) -> list[str]:
    """Print a row, and return descriptions of the targets that it misses."""
    full, after = scores[_FLOAT, ""], scores[_TRAINED, weights]
    before = max((scores[kind, weights] for kind in _POST_TRAINING), key=np.mean)
    (loss, loss_error), (gain, gain_error) = _mean(full - before), _mean(after - before)
    columns = [full, *(scores[kind, weights] for kind in _POST_TRAINING), after]
    spread = [f"{np.mean(s):.2f} ± {_deviation(s):.2f}" for s in columns]
    differences = [f"{mean:+.2f} ± {error:.2f}" for mean, error in ((-loss, loss_error), (gain, gain_error))]
    target, is_measured = _TARGETS.get(weights), loss > _ERRORS * loss_error
    share = f"{100 * gain / loss:.0f} %" if target and loss > 0 else ""
    goal, wrong = "not worse", []
    if target and is_measured:
        goal, wrong = f"{100 * target:.0f} %", [f"{share} recovered"] if gain < target * loss else []
    elif target:
        goal += ", the loss may be chance"
    wrong += [f"{gain:+.2f} against post-training"] if gain < -_ERRORS * gain_error else []
    _print_line([task.name, task.measure, weights, *spread, *differences, share, goal, "MISSED" if wrong else "met"])
    return [f"{task.name} {weights}: {failure}" for failure in wrong]


def _mean(differences: np.ndarray) -> tuple[float, float]:
    """Return the mean over the seeds, and its standard error."""
    return float(np.mean(differences)), _deviation(differences) / len(differences) ** 0.5


def _deviation(scores: np.ndarray) -> float:
    return float(np.std(scores, ddof=1)) if len(scores) > 1 else 0.0


def _score_seed(task: _Task, seed: int) -> dict[tuple[str, str], float]:
    """Return the score of each network on the test split, and the number of outputs that conversion changed."""
    train, validation, test = _splits(task, seed)
    key = jax.random.key(seed)
    network = Network(task.widths)
    variables = network.init(key, train[0])
    trained = _train(task, network, task.plan, variables, train, validation, key)
    scores = {(_FLOAT, ""): _score(task, _apply(network, trained, test[0]), test[1]), ("changed", ""): 0.0}
    softened = (train[0], _soften_targets(task, _apply(network, trained, train[0]), train[1]))
    for name, spec in _WEIGHTS.items():
        for kind, ranges in {**_POST_TRAINING, _TRAINED: _LEARNED}.items():
            quantized = Network(task.widths, spec, ranges)
            state = _start_ranges(quantized, trained["params"], train[0])
            if kind == _TRAINED:
                plan = task.plan_on[0], task.plan_on[1] * _RATES[name]
                state = _train(task, quantized, plan, state, softened, validation, key)
            outputs = _apply(quantized, jqf.convert(quantized, state), test[0])
            scores[kind, name] = _score(task, outputs, test[1])
            scores["changed", ""] += float((outputs != _apply(quantized, state, test[0])).sum())
    return scores


_apply = jax.jit(lambda network, variables, x: network.apply(variables, x), static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _start_ranges(network: Network, params: Any, x: jax.Array) -> Any:
    """Return the variables of a quantized network with the weights of a float network and ranges or scales from x."""
    _, state = network.apply({"params": params}, x, mutable=["ranges", "scales"])
    return {"params": params, **state}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _train(
    task: _Task, network: Network, plan: tuple[int, float], variables: Any, train: Split, validation: Split, key: Any
) -> Any:
    """Return the variables with the least validation loss, at the start or after an epoch."""
    epochs, rate = plan
    steps = len(train[0]) // task.batch
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, epochs * steps))
    fixed = {name: value for name, value in variables.items() if name == "ranges"}
    start = {name: value for name, value in variables.items() if name != "ranges"}

    def loss(weights: Any, split: Split) -> jax.Array:
        outputs: Any = network.apply({**weights, **fixed}, split[0])
        return _loss(task, outputs, split[1])

    def step(carry: Any, index: jax.Array) -> Any:
        weights, average, state = carry
        gradient = jax.grad(loss)(weights, (train[0][index], train[1][index]))
        updates, state = optimizer.update(gradient, state)
        weights = optax.apply_updates(weights, updates)
        average = jax.tree.map(lambda a, w: _AVERAGED * a + (1 - _AVERAGED) * w, average, weights)
        return (weights, average, state), None

    def epoch(carry: Any, key: Any) -> Any:
        running, (best, least) = carry
        order = jax.random.permutation(key, len(train[0]))[: steps * task.batch].reshape(steps, task.batch)
        running, _ = jax.lax.scan(step, running, order)
        reached = loss(running[1], validation)
        best = jax.tree.map(lambda new, old: jnp.where(reached < least, new, old), running[1], best)
        return (running, (best, jnp.minimum(reached, least))), None

    carry = (start, start, optimizer.init(start)), (start, loss(start, validation))
    (_, (best, _)), _ = jax.lax.scan(epoch, carry, jax.random.split(key, epochs))
    return {**best, **fixed}


def _loss(task: _Task, outputs: jax.Array, targets: jax.Array) -> jax.Array:
    if task.is_classes:
        return optax.softmax_cross_entropy(outputs, targets).mean()
    return jnp.mean((outputs - targets) ** 2)


def _soften_targets(task: _Task, outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean of the data's targets and the float network's outputs."""
    return (targets + (jax.nn.softmax(outputs / _TEMPERATURE) if task.is_classes else outputs)) / 2


def _score(task: _Task, outputs: jax.Array, targets: jax.Array) -> float:
    if task.is_classes:
        return 100 * float((outputs.argmax(axis=1) == targets.argmax(axis=1)).mean())
    return 100 * float(jnp.mean(1 - jnp.mean((outputs - targets) ** 2, axis=0) / jnp.var(targets, axis=0)))


def _print_line(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


# The data.


def _splits(task: _Task, seed: int) -> list[Split]:
    """Return standardized splits: half of the data to train, a fifth to validate, the rest to test."""
    x, y = task.load()
    order = np.random.default_rng(seed).permutation(len(x))
    half, rest = len(x) // 2, 7 * len(x) // 10
    parts = [order[:half], order[half:rest], order[rest:]]
    x = _standardize(x, parts[0])
    y = y if task.is_classes else _standardize(y, parts[0])
    return [(jnp.asarray(x[part], jnp.float32), jnp.asarray(y[part], jnp.float32)) for part in parts]


def _standardize(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    deviation = values[rows].std(axis=0)
    return (values - values[rows].mean(axis=0)) / np.where(deviation == 0, 1, deviation)


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images of 8 x 8 pixels and their digits."""
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    return images, np.eye(10)[digits]


def _cells() -> tuple[np.ndarray, np.ndarray]:
    """Return the means and standard errors of ten measures of the cells in a biopsy, and the worst of each cell.

    In logarithms: sizes and their errors are positive and have long tails.
    """
    from sklearn.datasets import load_breast_cancer

    measures: Any = np.log(load_breast_cancer(return_X_y=True)[0] + 1e-3)
    return measures[:, :20], measures[:, 20:]


_TASKS = (
    _Task("digits", "accuracy", True, _digits, (16, 16, 16, 16, 10), 64, (80, 5e-3), (100, 5e-3)),
    _Task("breast cancer, worst of 10 measures", "R²", False, _cells, (32, 32, 10), 32, (150, 3e-3), (300, 3e-3)),
)


if __name__ == "__main__":
    sys.exit(main())
