"""How accurate an integer-only network is: one on handwritten digits, made by `jq.prepare`.

Run `python -m benchmarks.integer_accuracy` from the repository root, with the extra "examples".

The network consists of Flax's own layers: convolutions with batch normalization, a residual sum, both poolings, a
concatenation, a mean and a dense layer. It is trained in float32. Then `jq.prepare` with `jq.recipes.onnx_runtime`
makes it integer-only, and it is calibrated and converted.

The prepared network has a form for training, whose results are floats, and one that serves codes. A seed determines the
split, the initial weights and the order of the batches. The accuracy is that of the test images, 450 for each seed. The
exit status is 1 if codes lose more than half a point of accuracy in the mean over the seeds, or if a logit differs
between the form for training and the codes.
"""

from __future__ import annotations

import argparse
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
from flax import linen as nn

import jaxquant as jq

from .recipes import _print_line, _split_digits, _train

_SEEDS, _CLASSES = 5, 10
_ALLOWED_LOSS = 0.5
_FLOAT = "float32"
_TRAINING, _CODES = "training", "codes"
_FORMS = (_FLOAT, _TRAINING, _CODES)
# What computes the logits of some images, by the name of its form.
Calls = dict[str, Callable[[jax.Array], jax.Array]]


class Network(nn.Module):
    """A residual block, batch normalization, both poolings and a concatenation."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        normalize = functools.partial(_normalize, train)
        x = nn.relu(normalize(nn.Conv(16, (3, 3), use_bias=False)(x)))
        x = nn.relu(x + normalize(nn.Conv(16, (3, 3), use_bias=False)(x)))
        x = jnp.concatenate([nn.max_pool(x, (2, 2), (2, 2)), nn.avg_pool(x, (2, 2), (2, 2))], -1)
        x = nn.relu(normalize(nn.Conv(32, (3, 3), use_bias=False)(x)))
        return nn.Dense(_CLASSES)(x.mean((1, 2)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.integer_accuracy", description=__doc__)
    parser.add_argument("--seeds", type=int, default=_SEEDS, metavar="N", help=f"number of seeds; default {_SEEDS}")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("sklearn") is None:
        print('the data need scikit-learn: pip install -e ".[examples]"', file=sys.stderr)
        return 2
    began = time.perf_counter()
    print(f"Python {platform.python_version()}, jax {jax.__version__}: top-1 % of 450 test images\n")
    _print_line(["seed", *_FORMS, "logits that differ"])
    _print_line(["---", *["--:"] * (len(_FORMS) + 1)])
    accuracies, changes = [], []
    make_calls = _make_prepared()
    for seed in range(options.seeds):
        accuracy, changed = _measure_seed(seed, make_calls)
        accuracies.append(accuracy)
        changes.append(changed)
        _print_line([str(seed), *(f"{accuracy[form]:.2f}" for form in _FORMS), str(changed)])
    means = {form: float(np.mean([accuracy[form] for accuracy in accuracies])) for form in _FORMS}
    _print_line(["mean", *(f"{means[form]:.2f}" for form in _FORMS), str(sum(changes))])
    losses = {form: means[_FLOAT] - means[form] for form in _FORMS}
    missed = [f"{form}: {loss:.2f} points" for form, loss in losses.items() if loss > _ALLOWED_LOSS]
    missed += ["logits differ"] if any(changes) else []
    print(f"\n{time.perf_counter() - began:.0f} s")
    print("missed: " + "; ".join(missed) if missed else "each target is met")
    return 1 if missed else 0


def _normalize(train: bool, x: jax.Array) -> jax.Array:
    return nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)


def _measure_seed(seed: int, make_calls: Callable[[Any, jax.Array], Calls]) -> tuple[dict[str, float], int]:
    """Return the accuracy of each form in percent, and the number of logits in which training and codes differ."""
    train, (images, digits) = _split_digits(seed)
    variables = _train(Network(), train, jax.random.key(seed))
    calls: Calls = {_FLOAT: functools.partial(_run_floats, variables), **make_calls(variables, train[0][:1024])}
    logits = {form: call(images) for form, call in calls.items()}
    accuracies = {form: 100 * float((y.argmax(1) == digits).mean()) for form, y in logits.items()}
    return accuracies, int((logits[_TRAINING] != logits[_CODES]).sum())


@jax.jit
def _run_floats(variables: Any, x: jax.Array) -> jax.Array:
    network: Any = Network()
    return network.apply(variables, x)


def _make_prepared() -> Callable[[Any, jax.Array], Calls]:
    """Return what makes the calls of the prepared network; its programs are compiled once for all seeds."""
    example = jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32)
    network = Network()
    shapes = jax.eval_shape(network.init, jax.random.key(0), example)
    prepared = jq.prepare(network.apply, shapes, example, rules=jq.recipes.onnx_runtime(), strict=True)
    serve, train = jax.jit(prepared.apply), jax.jit(prepared.fake_apply)

    def make(variables: Any, images: jax.Array) -> Calls:
        ranges = prepared.calibrate(variables, [images], progress=False)
        return {
            _TRAINING: functools.partial(train, prepared.trainable(variables, ranges)),
            _CODES: functools.partial(serve, prepared.convert(variables, ranges)),
        }

    return make


if __name__ == "__main__":
    sys.exit(main())
