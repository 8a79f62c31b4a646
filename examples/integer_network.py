"""Train a network for integer kernels, and compare it with the converted one: python examples/integer_network.py"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import jaxquant as jq

OPTIMIZER = optax.adam(2e-3)


class CNN(nn.Module):
    """Flax's own layers. Prepared, floats are only in the first quantization and in the scales."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        y = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.relu(x + nn.Conv(16, (3, 3))(y))
        x = nn.relu(nn.Conv(32, (1, 1))(nn.max_pool(x, (2, 2), (2, 2))))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


def train(apply, variables, batches):
    """Return the variables after a step for each batch."""

    @jax.jit
    def step(variables, state, x, y):
        def compute_loss(variables):
            return optax.softmax_cross_entropy_with_integer_labels(apply(variables, x), y).mean()

        updates, state = OPTIMIZER.update(jax.grad(compute_loss)(variables), state)
        return optax.apply_updates(variables, updates), state

    state = OPTIMIZER.init(variables)
    for batch in batches:  # not jax.lax.scan, in which XLA:CPU takes 20 times as long for gradients
        variables, state = step(variables, state, *batch)
    return variables


images, digits = load_digits(return_X_y=True)
order = jax.random.permutation(jax.random.key(1), len(digits))
x, y = jnp.asarray(images, jnp.float32).reshape(-1, 8, 8, 1)[order] / 16, jnp.asarray(digits)[order]
batches, (test_x, test_y) = [(x[i : i + 64], y[i : i + 64]) for i in range(0, 1408, 64)], (x[1408:], y[1408:])
network: Any = CNN()
variables = train(network.apply, jax.jit(network.init)(jax.random.key(0), x[:64]), 10 * batches)
prepared = jq.prepare(network.apply, variables, x[:64], rules=jq.recipes.onnx_runtime(), strict=True)
print(prepared.coverage.outputs)
trainable = prepared.trainable(variables, prepared.calibrate(variables, [batch for batch, _ in batches]))
trainable = train(prepared.fake_apply, trainable, 2 * batches)
served = jax.jit(prepared.apply)(prepared.convert(trainable), test_x)
trained = jax.jit(prepared.fake_apply)(trainable, test_x)
accuracy = 100 * float((jnp.argmax(served, -1) == test_y).mean())
print(f"{accuracy:.1f} % of the test images are recognized by integers")
differences = int((served != trained).sum())
print(f"Codes that differ between the trained and the converted network: {differences} of {served.size}")
