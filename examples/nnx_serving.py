"""Flax NNX, from a float checkpoint to a file of integers that is served: python examples/nnx_serving.py"""

import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
from flax import nnx, serialization

import jaxquant as jq
from jaxquant import checkpoint
from jaxquant.flax import nnx as qnnx

INTEGERS = {
    "weight_spec": jq.QuantSpec(jnp.int8, jq.PerFeature()),  # a scale for each output
    "activation_spec": jq.QuantSpec(jnp.uint8),  # one scale and zero point, from the range that a layer has seen
}


class Classifier(nnx.Module):
    """Images in, logits out: with flax's layers, or with jaxquant's."""

    def __init__(self, rngs, *, integers=False):
        conv, linear = nnx.Conv, nnx.Linear
        if integers:
            conv, linear = functools.partial(qnnx.Conv, **INTEGERS), functools.partial(qnnx.Linear, **INTEGERS)
        self.stem = conv(3, 32, (3, 3), strides=2, rngs=rngs)
        self.mixing = conv(32, 32, (3, 3), feature_group_count=32, rngs=rngs)  # depthwise
        self.head = linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.mixing(nnx.relu(self.stem(x))))
        return self.head(x.mean((1, 2)))


with tempfile.TemporaryDirectory() as name:
    floats, integers = (pathlib.Path(name) / file for file in ("float.msgpack", "integers.safetensors"))
    images = jax.random.normal(jax.random.key(1), (64, 32, 32, 3))
    original = Classifier(nnx.Rngs(0))
    floats.write_bytes(serialization.msgpack_serialize(nnx.to_pure_dict(nnx.state(original, nnx.Param))))

    model = Classifier(nnx.Rngs(0), integers=True)
    nnx.update(model, serialization.msgpack_restore(floats.read_bytes()))  # unchanged: names and shapes are flax's
    qnnx.calibrate(model, jnp.split(images, 4))  # dropout stays off, batch statistics as they are
    checkpoint.save_safetensors(integers, nnx.to_pure_dict(nnx.state(qnnx.convert(model))))

    serving = qnnx.convert(model)
    nnx.update(serving, checkpoint.load_safetensors(integers))
    logits, expected = nnx.jit(lambda model, x: model(x))(serving, images), original(images)
    error = 100 * float(jnp.linalg.norm(logits - expected) / jnp.linalg.norm(expected))
    print(f"{floats.stat().st_size} bytes of floats, {integers.stat().st_size} bytes of integers")
    print(f"the logits differ by {error:.2f} %")
