"""What each recipe of `jq.recipes` costs: accuracy, error, size and time of three networks on handwritten digits.

Run `python -m benchmarks.recipes` from the repository root, with the extra "examples"; with `--only NAME` one recipe.

The networks consist of Flax's own layers and are trained in float32, then prepared, calibrated with training images and
converted. A seed determines the split, the initial weights and the order of the batches. The accuracy and the error are
those of the test images, 450 for each seed. The error is the signal-to-quantization-noise ratio of the logits against
float32's. The size is that of all parameters and statistics. The time is that of 1024 images, relative to float32: the
ratio of the medians of alternating calls in one process.

The exit status is 1 if a recipe with 8-bit weights loses more than a point of accuracy in the mean over the seeds, or
if the converted network returns other logits than its twin for training.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxquant as jq

_SEEDS, _STEPS, _BATCH, _CLASSES = 3, 300, 128, 10
_ALLOWED_LOSS = 1.0
_FLOAT = "float32"
_RECIPES: dict[str, Sequence[jq.Rule]] = {
    "weight_only_int8": jq.recipes.weight_only_int8(),
    "weight_only_int4": jq.recipes.weight_only_int4(),
    "w8a8_dynamic": jq.recipes.w8a8_dynamic(),
    "w8a8_static": jq.recipes.w8a8_static(),
    "onednn": jq.recipes.onednn(),
    "onnx_runtime": jq.recipes.onnx_runtime(),
    "w4a8": jq.recipes.w4a8(),
}
_FOUR_BITS = ("weight_only_int4", "w4a8")
_OPTIMIZER = optax.adam(optax.cosine_decay_schedule(2e-3, _STEPS))


class MLP(nn.Module):
    """Three dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(512)(x))
        return nn.Dense(_CLASSES)(x)


class CNN(nn.Module):
    """Convolutions with batch normalization."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        for features, stride in ((32, 1), (64, 2), (64, 1)):
            x = nn.Conv(features, (3, 3), strides=(stride, stride), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(_CLASSES)(x.mean((1, 2)))


class Encoder(nn.Module):
    """Two layers of a transformer encoder, over the rows of an image."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Dense(128)(x[..., 0]) + self.param("position", nn.initializers.normal(0.02), (8, 128))
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
            x = x + nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.LayerNorm()(x))))
        return nn.Dense(_CLASSES)(x.mean(1))


_NETWORKS: dict[str, nn.Module] = {"MLP": MLP(), "CNN": CNN(), "encoder": Encoder()}


class _Cost(NamedTuple):
    """The costs of a recipe: percent, decibels, bytes, seconds, and the number of logits in which the twin differs."""

    accuracy: float
    error: float
    size: float
    seconds: float
    changed: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.recipes", description=__doc__)
    parser.add_argument("--seeds", type=int, default=_SEEDS, metavar="N", help=f"number of seeds; default {_SEEDS}")
    parser.add_argument("--only", choices=_RECIPES, metavar="NAME", help=f"one of {', '.join(_RECIPES)}; default all")
    options = parser.parse_args(arguments)
    recipes = [options.only] if options.only else list(_RECIPES)
    if importlib.util.find_spec("sklearn") is None:
        print('the data need scikit-learn: pip install -e ".[examples]"', file=sys.stderr)
        return 2
    began = time.perf_counter()
    costs = {name: [_measure_recipes(name, seed, recipes) for seed in range(options.seeds)] for name in _NETWORKS}
    print(f"Python {platform.python_version()}, jax {jax.__version__}, {options.seeds} seeds\n")
    for name, seeds in costs.items():
        print(f"### {name}\n")
        _print_line(["recipe", "top-1 %", "SQNR dB", "kB", "of float32's time"])
        _print_line(["---", "--:", "--:", "--:", "--:"])
        for recipe in (_FLOAT, *recipes):
            _print_line([recipe, *_format_cost(seeds, recipe)])
        print()
    missed = [line for name in _NETWORKS for recipe in recipes for line in _list_faults(costs[name], name, recipe)]
    print(f"{time.perf_counter() - began:.0f} s")
    print("missed: " + "; ".join(missed) if missed else "each target is met")
    return 1 if missed else 0


def _average(seeds: Sequence[dict[str, _Cost]], recipe: str) -> _Cost:
    return _Cost(*(float(np.mean(values)) for values in zip(*(seed[recipe] for seed in seeds), strict=True)))


def _format_cost(seeds: Sequence[dict[str, _Cost]], recipe: str) -> list[str]:
    cost, full = _average(seeds, recipe), _average(seeds, _FLOAT)
    cells = [
        f"{cost.accuracy:.2f}",
        f"{cost.error:.1f}",
        f"{cost.size / 1e3:.0f}",
        f"{cost.seconds / full.seconds:.2f}",
    ]
    return [cells[0], "", cells[2], ""] if recipe == _FLOAT else cells


def _list_faults(seeds: Sequence[dict[str, _Cost]], network: str, recipe: str) -> list[str]:
    cost, full = _average(seeds, recipe), _average(seeds, _FLOAT)
    loss = full.accuracy - cost.accuracy
    faults = [f"{network}, {recipe}: {loss:.2f} points"] if loss > _ALLOWED_LOSS and recipe not in _FOUR_BITS else []
    return faults + ([f"{network}, {recipe}: the twin differs"] if cost.changed else [])


def _measure_recipes(name: str, seed: int, recipes: Sequence[str]) -> dict[str, _Cost]:
    """Return the costs of float32 and of some recipes on one trained network."""
    network = _NETWORKS[name]
    train, test = _split_digits(seed)
    variables = _train(network, train, jax.random.key(seed))
    calls: dict[str, Callable[[jax.Array], jax.Array]] = {
        _FLOAT: functools.partial(jax.jit(network.apply), variables),
    }
    sizes, changed = {_FLOAT: jq.QuantizedTree(variables).nbytes}, {_FLOAT: 0}
    for recipe in recipes:
        rules = _RECIPES[recipe]
        prepared = jq.prepare(network.apply, variables, test[0], rules=rules, strict=True)
        batches = jnp.split(train[0][:1024], 8)
        t = prepared.trainable(variables, prepared.calibrate(variables, batches, progress=False))
        q = prepared.convert(t)
        calls[recipe] = functools.partial(jax.jit(prepared.apply), q)
        sizes[recipe] = jq.QuantizedTree(q.params).nbytes
        twin = jax.jit(prepared.fake_apply)(t, test[0])
        changed[recipe] = int((calls[recipe](test[0]) != twin).sum())
    logits = {recipe: call(test[0]) for recipe, call in calls.items()}
    seconds = _time_calls(calls, jnp.resize(test[0], (1024, 8, 8, 1)))
    return {
        recipe: _Cost(
            100 * float((y.argmax(1) == test[1]).mean()), _find_error(logits[_FLOAT], y), sizes[recipe],
            seconds[recipe], changed[recipe],
        )
        for recipe, y in logits.items()
    }  # fmt: skip


def _find_error(expected: jax.Array, y: jax.Array) -> float:
    noise = float(jnp.sum((y - expected) ** 2))
    return 10 * float(np.log10(float(jnp.sum(expected**2)) / noise)) if noise else float("inf")


def _time_calls(calls: dict[str, Callable[[jax.Array], jax.Array]], x: jax.Array, rounds: int = 25) -> dict[str, float]:
    """Return the median seconds of each call, in alternation."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name, call in calls.items():
            start = time.perf_counter()
            call(x).block_until_ready()
            if turn >= 3:
                seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(samples)) for name, samples in seconds.items()}


def _train(network: nn.Module, data: tuple[jax.Array, jax.Array], key: jax.Array) -> Any:
    """Return trained variables."""
    images, digits = data
    variables = jax.jit(network.init)(key, images[:1])
    params, statistics = variables["params"], {k: v for k, v in variables.items() if k != "params"}
    state = _OPTIMIZER.init(params)
    # Not in a scan, in which XLA:CPU runs convolutions on one core.
    for part in jax.random.split(key, _STEPS):
        params, statistics, state = _step(network, params, statistics, state, part, images, digits)
    return {"params": params, **statistics}


@functools.partial(jax.jit, static_argnums=0)
def _step(
    network: nn.Module, params: Any, statistics: Any, state: Any, key: jax.Array, images: jax.Array, digits: jax.Array
) -> Any:
    """Return the parameters, the statistics and the optimizer's state after one step; compiled once for all seeds."""
    index = jax.random.randint(key, (_BATCH,), 0, len(images))

    def compute_loss(params: Any) -> Any:
        variables = {"params": params, **statistics}
        logits, updated = network.apply(variables, images[index], train=True, mutable=list(statistics))
        return optax.softmax_cross_entropy_with_integer_labels(logits, digits[index]).mean(), updated

    gradient, statistics = jax.grad(compute_loss, has_aux=True)(params)
    updates, state = _OPTIMIZER.update(gradient, state)
    return optax.apply_updates(params, updates), statistics, state


def _split_digits(seed: int) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Return images of 8 x 8 pixels in [0, 1] and their digits, to train and to test."""
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    x = jnp.asarray(images[order].reshape(-1, 8, 8, 1) / 16, jnp.float32)
    y = jnp.asarray(digits[order], jnp.int32)
    return (x[450:], y[450:]), (x[:450], y[:450])


def _print_line(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
