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

SPECS = {
    "weight_spec": jq.QuantSpec(jnp.int8, jq.PerFeature()),  # one scale per output feature
    "activation_spec": jq.QuantSpec(jnp.uint8),  # one scale and zero point,
    "activation_range": jq.Static(jq.calibration.minmax),  # from the range of the calibration data
}


class Classifier(nnx.Module):
    """A network from images to logits, with Flax's layers or with jaxquant's."""

    def __init__(self, rngs, *, quantized=False):
        conv, linear = nnx.Conv, nnx.Linear
        if quantized:
            conv, linear = functools.partial(qnnx.Conv, **SPECS), functools.partial(qnnx.Linear, **SPECS)
        self.stem = conv(3, 32, (3, 3), strides=2, rngs=rngs)
        self.mixing = conv(32, 32, (3, 3), feature_group_count=32, rngs=rngs)  # depthwise
        self.head = linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.mixing(nnx.relu(self.stem(x))))
        return self.head(x.mean((1, 2)))


with tempfile.TemporaryDirectory() as folder:
    float_file, integer_file = pathlib.Path(folder, "float.msgpack"), pathlib.Path(folder, "integers.safetensors")
    images = jax.random.normal(jax.random.key(1), (64, 32, 32, 3))
    float_model = Classifier(nnx.Rngs(0))
    float_file.write_bytes(serialization.msgpack_serialize(nnx.to_pure_dict(nnx.state(float_model, nnx.Param))))

    model = Classifier(nnx.Rngs(0), quantized=True)
    nnx.update(model, serialization.msgpack_restore(float_file.read_bytes()))  # loads unchanged into jaxquant's layers
    qnnx.calibrate(model, jnp.split(images, 4))  # updates only the ranges
    checkpoint.save_safetensors(integer_file, nnx.to_pure_dict(nnx.state(qnnx.convert(model))))

    serving = qnnx.convert(model)
    nnx.update(serving, checkpoint.load_safetensors(integer_file))
    logits, expected = nnx.jit(lambda model, x: model(x))(serving, images), float_model(images)
    error = 100 * float(jnp.linalg.norm(logits - expected) / jnp.linalg.norm(expected))
    print(f"{float_file.stat().st_size} bytes of floats, {integer_file.stat().st_size} bytes of integers")
    print(f"the logits differ by {error:.2f} %")
