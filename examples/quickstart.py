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
from jaxquant import flax as jqf
from jaxquant.flax import linen as qnn

INT8 = jq.QuantSpec(jnp.int8, jq.PerFeature())  # one scale per output feature
INT4 = jq.QuantSpec(jnp.int4, jq.PerFeature())
UINT8 = jq.QuantSpec(jnp.uint8)  # one scale and zero point
OPTIMIZER = optax.adam(1e-3)


class Network(nn.Module):
    """Three dense layers: Flax's, or jaxquant's if there is a spec for the weights. The parameters are the same."""

    weight_spec: jq.QuantSpec | None = None
    weight_range: Any = jqf.Dynamic()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits."""
        dense: Any = nn.Dense
        if self.weight_spec is not None:
            dense = functools.partial(
                qnn.Dense, weight_spec=self.weight_spec, weight_range=self.weight_range, activation_spec=UINT8
            )
        for features in (1024, 1024):
            x = nn.relu(dense(features)(x))
        return dense(10)(x)


@functools.partial(jax.jit, static_argnums=(0, 4))
def train(network: Network, variables: Any, images: jax.Array, labels: jax.Array, steps: int) -> Any:
    """Return trained variables: gradients train "params" and learned "scales"; calls update the observed "ranges"."""

    def compute_loss(trainable: Any, ranges: Any) -> Any:
        logits, ranges = network.apply({**trainable, **ranges}, images, mutable=["ranges"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), ranges

    def step(carry: Any, _: None) -> Any:
        trainable, ranges, optimizer_state = carry
        gradient, ranges = jax.grad(compute_loss, has_aux=True)(trainable, ranges)
        updates, optimizer_state = OPTIMIZER.update(gradient, optimizer_state)
        return (optax.apply_updates(trainable, updates), ranges, optimizer_state), None

    ranges = {name: value for name, value in variables.items() if name == "ranges"}
    trainable = {name: value for name, value in variables.items() if name != "ranges"}
    trainable, ranges, _ = jax.lax.scan(step, (trainable, ranges, OPTIMIZER.init(trainable)), None, steps)[0]
    return {**trainable, **ranges}


def load_float_parameters(network: Network, params: Any, images: jax.Array) -> Any:
    """Return the variables of a quantized network: float parameters, and the ranges and scales they lead to."""
    _, ranges_and_scales = network.apply({"params": params}, images, mutable=["ranges", "scales"])
    return {"params": params, **ranges_and_scales}


def measure_milliseconds(predict: Callable[[jax.Array], Any], images: jax.Array) -> float:
    """Return the median time of a call."""
    seconds = []
    for _ in range(60):
        start = time.perf_counter()
        jax.block_until_ready(predict(images))
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[10:])) * 1e3


def main() -> int:
    """Train, quantize, train further, convert, and print a table. Return 1 if conversion changes a logit, else 0."""
    images, digits = load_digits(return_X_y=True)
    images = (images / 8 - 1).astype(np.float32)  # from [0, 16] to [-1, 1]
    split = train_test_split(images, digits, random_state=0, stratify=digits)
    train_x, test_x, train_y, test_y = (jnp.asarray(part) for part in split)

    float_network = Network()
    variables = train(float_network, float_network.init(jax.random.key(0), train_x), train_x, train_y, 100)
    models = {"float32": (float_network, variables)}
    for name, weight_spec in (("int8", INT8), ("int4", INT4)):  # post-training quantization
        network = Network(weight_spec)
        models[name] = network, load_float_parameters(network, variables["params"], train_x)
    network = Network(INT4, weight_range=jqf.Learned(jq.LSQ()))
    started = load_float_parameters(network, variables["params"], train_x)
    models["int4 trained"] = network, train(network, started, train_x, train_y, 100)

    rows = {"test accuracy, percent": [], "weights (+ scales), bytes": [], "4096 images, ms": []}
    changed = 0
    for network, variables in models.values():
        predict = jax.jit(network.apply)
        serving = variables if network.weight_spec is None else jqf.convert(network, variables)
        logits = predict(serving, test_x)
        changed += int((logits != predict(variables, test_x)).sum())
        kernels = [layer["kernel"] for layer in serving["params"].values()]
        milliseconds = measure_milliseconds(functools.partial(predict, serving), jnp.resize(test_x, (4096, 64)))
        rows["test accuracy, percent"].append(f"{100 * (logits.argmax(1) == test_y).mean():.2f}")
        rows["weights (+ scales), bytes"].append(str(sum(kernel.nbytes for kernel in kernels)))
        rows["4096 images, ms"].append(f"{milliseconds:.1f}")
    print(f"Handwritten digits: {len(train_x)} images to train, {len(test_x)} to test")
    print(f"{'':28}" + "".join(f"{name:>14}" for name in models))
    for name, cells in rows.items():
        print(f"{name:28}" + "".join(f"{cell:>14}" for cell in cells))
    print(f"Logits changed by the conversion to integers: {changed}")
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
