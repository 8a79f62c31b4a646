"""Train a Flax network on handwritten digits, quantize it, export it, and serve it with ONNX Runtime.

From the repository root: pip install -e ".[examples]" && python examples/onnx_export.py
"""

import tempfile
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import optax
from sklearn.datasets import load_digits

import jaxquant as jq
from jaxquant import onnx as jqonnx

NETWORK = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64), nn.relu, nn.Dense(10)])
OPTIMIZER = optax.adam(3e-3)


@jax.jit
def train(images: jax.Array, labels: jax.Array) -> Any:
    """Return trained float parameters."""
    params = NETWORK.init(jax.random.key(0), images)

    def loss(params: Any) -> jax.Array:
        logits: Any = NETWORK.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(_: int, carry: Any) -> Any:
        updates, state = OPTIMIZER.update(jax.grad(loss)(carry[0]), carry[1])
        return optax.apply_updates(carry[0], updates), state

    return jax.lax.fori_loop(0, 200, step, (params, OPTIMIZER.init(params)))[0]


images, labels = load_digits(return_X_y=True)
x = jnp.asarray(images / 16, jnp.float32)
params = train(x[:1500], jnp.asarray(labels[:1500]))
prepared = jq.prepare(NETWORK.apply, params, x[:1], rules=jq.recipes.w8a8_static(reduce_range=True))
ranges = prepared.finalize(prepared.observe(prepared.init(), params, x[:1500]))
q = prepared.convert(params, ranges)  # the codes and the ranges

model = jqonnx.export(prepared, q, [x[:1]], batch="N", input_names=["image"])
with tempfile.TemporaryDirectory() as folder:
    jqonnx.save(model, f"{folder}/digits.onnx")
    session = onnxruntime.InferenceSession(f"{folder}/digits.onnx", providers=["CPUExecutionProvider"])
outputs: Any = session.run(None, {"image": np.asarray(x[1500:])})
print(f"Digits that ONNX Runtime recognizes: {(outputs[0].argmax(1) == labels[1500:]).mean():.1%}")
print(jqonnx.verify(model, prepared, q, [x[1500:]]))
