"""Train a network for integer kernels, and compare it with the converted one: python examples/integer_network.py"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import jaxquant as jq
from jaxquant.flax import linen as qnn

OPTIMIZER = optax.adam(2e-3)


class CNN(nn.Module):
    """Floats are only in the first quantization and in the scales: between the layers there are codes."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = qnn.Conv(16, (3, 3), output_relu=True, **jq.flax.RUNTIME)(x)
        y: Any = qnn.Conv(16, (3, 3), output_relu=True, **jq.flax.RUNTIME)(x)
        y = qnn.Conv(16, (3, 3), **jq.flax.RUNTIME)(y)
        x = jq.codes.add(x, y, output=qnn.OutputRange(jq.flax.RUNTIME["output_spec"], relu=True))
        x = qnn.Conv(32, (1, 1), output_relu=True, **jq.flax.RUNTIME)(jq.codes.max_pool(x, (2, 2), (2, 2)))
        return qnn.Dense(10, **jq.flax.RUNTIME)(jq.codes.reshape(x, (x.shape[0], -1)))


def compute_loss(params, ranges, x, y):
    logits: Any
    logits, ranges = CNN().apply({"params": params, **ranges}, x, mutable=["ranges"])
    return optax.softmax_cross_entropy_with_integer_labels(logits.values, y).mean(), ranges


@jax.jit
def step(carry, batch):
    params, ranges, optimizer_state = carry
    (loss, ranges), gradient = jax.value_and_grad(compute_loss, has_aux=True)(params, ranges, *batch)
    updates, optimizer_state = OPTIMIZER.update(gradient, optimizer_state)
    return (optax.apply_updates(params, updates), ranges, optimizer_state), loss


images, digits = load_digits(return_X_y=True)
order = jax.random.permutation(jax.random.key(1), len(digits))
x, y = jnp.asarray(images, jnp.float32).reshape(-1, 8, 8, 1)[order] / 16, jnp.asarray(digits)[order]
batches, (test_x, test_y) = [(x[i : i + 64], y[i : i + 64]) for i in range(0, 1408, 64)], (x[1408:], y[1408:])
start = jax.jit(CNN().init)(jax.random.key(0), x[:64])
carry = (start["params"], {"ranges": start["ranges"]}, OPTIMIZER.init(start["params"]))
for batch in 15 * batches:  # not jax.lax.scan, in which XLA:CPU takes 20 times as long for gradients
    carry, loss = step(carry, batch)
trained = {"params": carry[0], **carry[1]}
serving = jq.flax.convert(CNN(), trained)
served: Any = jax.jit(CNN().apply)(serving, test_x)
fake: Any = jax.jit(CNN().apply)(trained, test_x)
differences = int((fake.quantize().codes != served.codes).sum())
accuracy = 100 * float((jnp.argmax(served.codes, -1) == test_y).mean())
print(f"{accuracy:.1f} % of the test images are recognized by integers")
print(f"Codes that differ between the trained and the converted network: {differences} of {served.codes.size}")
