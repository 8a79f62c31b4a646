"""Train a CNN on handwritten digits, quantize it, export it to an ONNX file, and run the file in ONNX Runtime.

From the repository root: pip install -e ".[examples]" && python examples/onnx_export.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import jaxquant as jq


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.max_pool(nn.relu(nn.Conv(16, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.max_pool(nn.relu(nn.Conv(32, (3, 3))(x)), (2, 2), (2, 2))
        return nn.softmax(nn.Dense(10)(x.reshape(x.shape[0], -1)))


NETWORK: Any = CNN()
OPTIMIZER = optax.adam(3e-3)


@jax.jit
def step(params: Any, state: Any, x: jax.Array, labels: jax.Array) -> Any:
    """Return the parameters and the optimizer's state after a step of training."""

    def loss(params: Any) -> jax.Array:
        return -jnp.log(jnp.take_along_axis(NETWORK.apply(params, x), labels[:, None], axis=1) + 1e-6).mean()

    updates, state = OPTIMIZER.update(jax.grad(loss)(params), state)
    return optax.apply_updates(params, updates), state


images, digits = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(digits))
x, labels = jnp.asarray(images, jnp.float32).reshape(-1, 8, 8, 1)[order] / 16, jnp.asarray(digits)[order]
batches, test_x = jnp.split(x[:1408], 22), x[1408:]
params: Any = NETWORK.init(jax.random.key(0), x[:1])
state = OPTIMIZER.init(params)
for i in list(range(22)) * 10:
    params, state = step(params, state, batches[i], labels[64 * i : 64 * i + 64])

prepared = jq.prepare(NETWORK.apply, params, x[:1], rules=jq.recipes.onnx_runtime(), strict=True)
print(prepared.coverage)
q = prepared.convert(params, prepared.calibrate(params, batches))
model = jq.onnx.export(prepared, q, [x[:1]], batch="N", input_names=["image"], output_names=["probabilities"])
jq.onnx.save(model, "digits.onnx")
print(jq.onnx.verify(model, prepared, q, [test_x]))
session = onnxruntime.InferenceSession("digits.onnx", providers=["CPUExecutionProvider"])
found: dict[str, Any] = {"float32": NETWORK.apply(params, test_x)}
found["integers, in ONNX Runtime"] = session.run(None, {"image": np.asarray(test_x)})[0]
print({name: f"{(y.argmax(1) == labels[1408:]).mean():.1%} of the digits" for name, y in found.items()})
