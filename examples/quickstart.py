"""Handwritten digits: trains a float network, takes it to int8 as it is and to int4 by training on, serves integers."""

from __future__ import annotations

import functools
import sys
import time
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

INT8, INT4 = (jq.QuantSpec(dtype, jq.PerFeature()) for dtype in (jnp.int8, jnp.int4))  # a scale for each output
OPTIMIZER = optax.adam(1e-3)


class Network(nn.Module):
    """Three dense layers: flax's, or with a spec for the weights jaxquant's, of the same parameters."""

    weight: jq.QuantSpec | None = None
    weight_range: Any = jqf.Dynamic()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        dense: Any = nn.Dense
        if self.weight is not None:  # activations in uint8, over the range that the layer has seen
            activation = jq.QuantSpec(jnp.uint8)
            dense = functools.partial(
                qnn.Dense, weight_spec=self.weight, activation_spec=activation, weight_range=self.weight_range
            )
        for features in (1024, 1024):
            x = nn.relu(dense(features)(x))
        return dense(10)(x)


@functools.partial(jax.jit, static_argnums=(0, 4))
def train(network: Network, variables: Any, images: jax.Array, labels: jax.Array, steps: int) -> Any:
    """Returns trained variables: "params" and learned "scales" by gradients, observed "ranges" by what they see."""

    def loss(trained: Any, ranges: Any) -> Any:
        logits, seen = network.apply({**trained, **ranges}, images, mutable=["ranges"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), seen

    def step(carry: Any, _: None) -> Any:
        trained, ranges, state = carry
        gradient, ranges = jax.grad(loss, has_aux=True)(trained, ranges)
        updates, state = OPTIMIZER.update(gradient, state)
        return (optax.apply_updates(trained, updates), ranges, state), None

    ranges = {name: value for name, value in variables.items() if name == "ranges"}
    trained = {name: value for name, value in variables.items() if name != "ranges"}
    trained, ranges, _ = jax.lax.scan(step, (trained, ranges, OPTIMIZER.init(trained)), None, steps)[0]
    return {**trained, **ranges}


def started(network: Network, params: Any, images: jax.Array) -> Any:
    """Returns the variables of a quantized network that takes the weights of a float one."""
    _, found = network.apply({"params": params}, images, mutable=["ranges", "scales"])
    return {"params": params, **found}


def milliseconds(serve: Any, images: jax.Array) -> float:
    """Returns the median time of a call."""
    seconds = []
    for _ in range(60):
        start = time.perf_counter()
        jax.block_until_ready(serve(images))
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[10:])) * 1e3


def main() -> int:
    """Trains, quantizes, trains on, converts, and prints one table. Returns 1 if converting changed one number."""
    images, digits = load_digits(return_X_y=True)
    split = train_test_split((images / 8 - 1).astype(np.float32), digits, random_state=0, stratify=digits)
    x, test, y, expected = (jnp.asarray(part) for part in split)

    network = Network()
    variables = train(network, network.init(jax.random.key(0), x), x, y, 100)
    models = {"float32": (network, variables)}
    for name, spec in (("int8", INT8), ("int4", INT4)):  # post-training: the weights as they are, ranges from x
        quantized = Network(spec)
        models[name] = quantized, started(quantized, variables["params"], x)
    learned = Network(INT4, jqf.Learned(jq.LSQ()))
    models["int4 trained"] = learned, train(learned, started(learned, variables["params"], x), x, y, 100)

    rows = {"test accuracy, percent": [], "weights (+ scales), bytes": [], "4096 images, ms": []}
    changed = 0
    for module, trained in models.values():
        serving = trained if module.weight is None else jqf.convert(module, trained)
        logits = jax.jit(module.apply)(serving, test)
        changed += int((logits != jax.jit(module.apply)(trained, test)).sum())
        kernels = [layer["kernel"] for layer in serving["params"].values()]
        rows["test accuracy, percent"].append(f"{100 * (logits.argmax(1) == expected).mean():.2f}")
        rows["weights (+ scales), bytes"].append(str(sum(kernel.nbytes for kernel in kernels)))
        serve = functools.partial(jax.jit(module.apply), serving)
        rows["4096 images, ms"].append(f"{milliseconds(serve, jnp.resize(test, (4096, 64))):.1f}")
    print(f"Handwritten digits: {len(x)} images to train, {len(test)} to test")
    print(f"{'':28}" + "".join(f"{name:>14}" for name in models))
    for name, cells in rows.items():
        print(f"{name:28}" + "".join(f"{cell:>14}" for cell in cells))
    print(f"Logits that converting to integers changed: {changed}")
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
