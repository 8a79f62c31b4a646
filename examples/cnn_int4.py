"""Train a network with 4-bit weights and learned scales, and plot its learning curves: python examples/cnn_int4.py"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import jaxquant as jq
from jaxquant import flax as jqf
from jaxquant.flax import linen as qnn

SPECS = {
    "weight_spec": jq.QuantSpec(jnp.int4, jq.PerFeature()), "activation_spec": jq.QuantSpec(jnp.uint8),
    "activation_range": jq.Static(jq.calibration.moving_average, freeze_after=200), "weight_range": jq.Learned(),
}  # fmt: skip
OPTIMIZER = optax.adam(2e-3)


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(qnn.Conv(32, (3, 3), **SPECS)(x))
        x = nn.relu(qnn.Conv(32, (3, 3), strides=2, feature_group_count=32, **SPECS)(x))  # depthwise
        return qnn.Dense(10, **SPECS)(x.reshape(len(x), -1))


def compute_loss(trainable, ranges, x, y):
    logits, ranges = CNN().apply({**trainable, **ranges}, x, mutable=["ranges"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), ranges


@jax.jit
def step(carry, batch):
    trainable, ranges, optimizer_state = carry
    (loss, ranges), gradient = jax.value_and_grad(compute_loss, has_aux=True)(trainable, ranges, *batch)
    updates, optimizer_state = OPTIMIZER.update(gradient, optimizer_state)
    return (optax.apply_updates(trainable, updates), ranges, optimizer_state), loss


images, digits = load_digits(return_X_y=True)
order = jax.random.permutation(jax.random.key(1), len(digits))
x, y = jnp.asarray(images, jnp.float32).reshape(-1, 8, 8, 1)[order] / 16, jnp.asarray(digits)[order]
batches, (test_x, test_y) = [(x[i : i + 64], y[i : i + 64]) for i in range(0, 1408, 64)], (x[1408:], y[1408:])
trainable = CNN().init(jax.random.key(0), x[:64])  # gradients train "params" and "scales"; calls update "ranges"
carry, losses, accuracies = (trainable, {"ranges": trainable.pop("ranges")}, OPTIMIZER.init(trainable)), [], []
for _ in range(25):
    for batch in batches:  # not jax.lax.scan, in which XLA:CPU takes 20 times as long for gradients
        carry, loss = step(carry, batch)
    serving = jqf.convert(CNN(), {**carry[0], **carry[1]})  # integers, as they would be deployed after this epoch
    losses.append(float(loss))
    accuracies.append(100 * float((jnp.argmax(CNN().apply(serving, test_x), -1) == test_y).mean()))  # type: ignore[arg-type]
axes = (figure := Figure()).subplots(2, sharex=True)
axes[0].set(title="Digits: int4 weights, uint8 activations", ylabel="loss, last batch", yscale="log")
axes[1].set(xlabel="epoch", ylabel="test accuracy of the integers, percent")
for curve, values in zip(axes, (losses, accuracies), strict=True):
    curve.plot(values)
figure.savefig("cnn_int4.png")
print(f"{accuracies[-1]:.1f} % of the test images are recognized by integers; the learning curves are in cnn_int4.png")
