"""Train a network on handwritten digits, quantize it to int8, train it further in int4, and serve the integers."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxquant as jq

OPTIMIZER = optax.adam(1e-3)
# One scale and zero point, from the range of the training images.
UINT8 = jq.Activation(jnp.uint8, range=jq.Static(jq.calibration.minmax))
INT4 = (jq.Rule(weight=jq.Weight(jnp.int4), activation=UINT8),)  # one scale for each output feature


class Network(nn.Module):
    """Three of Flax's dense layers. Nothing in it is written for quantization."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits."""
        for features in (1024, 1024):
            x = nn.relu(nn.Dense(features)(x))
        return nn.Dense(10)(x)


@functools.partial(jax.jit, static_argnums=(0, 4))
def train(apply: Callable[..., Any], trainable: Any, images: jax.Array, labels: jax.Array, steps: int) -> Any:
    """Return trained parameters, and scales if there are any: `apply` takes them and the images."""

    def compute_loss(trainable: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(apply(trainable, images), labels).mean()

    def step(carry: Any, _: None) -> Any:
        trainable, state = carry
        updates, state = OPTIMIZER.update(jax.grad(compute_loss)(trainable), state)
        return (optax.apply_updates(trainable, updates), state), None

    return jax.lax.scan(step, (trainable, OPTIMIZER.init(trainable)), None, steps)[0][0]


def measure_milliseconds(predict: Callable[[jax.Array], Any], images: jax.Array) -> float:
    """Return the median time of a call."""
    seconds = []
    for _ in range(25):
        start = time.perf_counter()
        jax.block_until_ready(predict(images))
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[5:])) * 1e3


def main() -> int:
    """Train, quantize, train further, convert, and print a table. Return 1 if conversion changes a logit, else 0."""
    images, digits = load_digits(return_X_y=True)
    images = (images / 8 - 1).astype(np.float32)  # from [0, 16] to [-1, 1]
    split = train_test_split(images, digits, random_state=0, stratify=digits)
    train_x, test_x, train_y, test_y = (jnp.asarray(part) for part in split)
    print(f"Handwritten digits: {len(train_x)} images to train, {len(test_x)} to test\n")

    network = Network()
    params = train(network.apply, network.init(jax.random.key(0), train_x), train_x, train_y, 60)

    int8 = jq.prepare(network.apply, params, train_x, rules=jq.recipes.w8a8_static(), strict=True)
    int4 = jq.prepare(network.apply, params, train_x, rules=INT4, strict=True)
    print(f"{int8.coverage}\n")  # what becomes of each contraction
    batches = jnp.array_split(train_x, 10)
    models = {
        "int8": (int8, int8.trainable(params, int8.calibrate(params, batches))),
        "int4": (int4, int4.trainable(params, int4.calibrate(params, batches))),
    }
    # Scales of weights and activations become parameters, and the training goes on with int4 weights.
    start = int4.trainable(params, int4.calibrate(params, batches), estimator=jq.LSQ())
    models["int4 trained"] = int4, train(int4.fake_apply, start, train_x, train_y, 60)

    calls = {"float32": functools.partial(jax.jit(network.apply), params)}
    sizes = {"float32": jq.QuantizedTree(params).nbytes}
    changed = 0
    for name, (prepared, trainable) in models.items():
        q = prepared.convert(trainable)  # the same parameters, with codes in place of the kernels, and the ranges
        calls[name], sizes[name] = functools.partial(jax.jit(prepared.apply), q), jq.QuantizedTree(q.params).nbytes
        changed += int((calls[name](test_x) != jax.jit(prepared.fake_apply)(trainable, test_x)).sum())

    print(f"{'':28}" + "".join(f"{name:>14}" for name in calls))
    accuracies = [f"{100 * (predict(test_x).argmax(1) == test_y).mean():.2f}" for predict in calls.values()]
    times = [f"{measure_milliseconds(predict, jnp.resize(test_x, (4096, 64))):.1f}" for predict in calls.values()]
    for label, cells in (
        ("test accuracy, percent", accuracies),
        ("parameters and scales, bytes", [str(size) for size in sizes.values()]),
        ("4096 images, ms", times),
    ):
        print(f"{label:28}" + "".join(f"{cell:>14}" for cell in cells))
    print(f"Logits changed by the conversion to integers: {changed}")
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
