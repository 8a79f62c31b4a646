"""Trains a network to 4-bit weights with learned scales, and draws its learning curves: python examples/cnn_int4.py"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import jaxquant as jq
from jaxquant import flax as jqf
from jaxquant.flax import linen as qnn

INTEGERS = {
    "weight_spec": jq.QuantSpec(jnp.int4, jq.PerFeature()), "weight_range": jqf.Learned(jq.LSQ()),
    "activation_spec": jq.QuantSpec(jnp.uint8), "activation_range": jqf.Observed(freeze_after=200),
}  # fmt: skip
OPTIMIZER = optax.adam(2e-3)


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(qnn.Conv(32, (3, 3), **INTEGERS)(x))
        x = nn.relu(qnn.Conv(32, (3, 3), strides=2, feature_group_count=32, **INTEGERS)(x))  # depthwise
        return qnn.Dense(10, **INTEGERS)(x.reshape(len(x), -1))


def loss(trained, ranges, x, y):
    logits, seen = CNN().apply({**trained, **ranges}, x, mutable=["ranges"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), seen


@jax.jit
def step(carry, batch):
    trained, ranges, state = carry
    (value, ranges), gradient = jax.value_and_grad(loss, has_aux=True)(trained, ranges, *batch)
    updates, state = OPTIMIZER.update(gradient, state)
    return (optax.apply_updates(trained, updates), ranges, state), value


images, digits = load_digits(return_X_y=True)
order = jax.random.permutation(jax.random.key(1), len(digits))
x, y = jnp.asarray(images, jnp.float32).reshape(-1, 8, 8, 1)[order] / 16, jnp.asarray(digits)[order]
batches, (test, labels) = (x[:1408].reshape(22, 64, 8, 8, 1), y[:1408].reshape(22, 64)), (x[1408:], y[1408:])
trained = CNN().init(jax.random.key(0), x[:64])  # "params" and "scales" are trained, "ranges" observed
carry, losses, right = (trained, {"ranges": trained.pop("ranges")}, OPTIMIZER.init(trained)), [], []
for _ in range(25):
    carry, values = jax.lax.scan(step, carry, batches)
    serving = jqf.convert(CNN(), {**carry[0], **carry[1]})  # the integers that would be shipped now
    losses.append(float(values.mean()))
    right.append(100 * float((jnp.argmax(CNN().apply(serving, test), -1) == labels).mean()))  # type: ignore[arg-type]
axes = (figure := Figure()).subplots(2, sharex=True)
axes[0].set(title="Digits: int4 weights, uint8 activations", ylabel="training loss", yscale="log")
axes[1].set(xlabel="epoch", ylabel="integers: accuracy, percent")
for curve, values in zip(axes, (losses, right), strict=True):
    curve.plot(values)
figure.savefig("cnn_int4.png")
print(f"{right[-1]:.1f} % of the test images are recognized by integers; the learning curves are in cnn_int4.png")
