"""Flax Linen, from a float checkpoint to a file of integers that is served: python examples/linen_serving.py"""

import functools
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import serialization

import jaxquant as jq
from jaxquant import checkpoint
from jaxquant import flax as jqf
from jaxquant.flax import linen as qnn

SPECS = {
    "weight_spec": jq.QuantSpec(jnp.int8, jq.PerFeature()),  # one scale per output feature
    "activation_spec": jq.QuantSpec(jnp.uint8),  # one scale and zero point,
    "activation_range": jq.Static(jq.calibration.minmax),  # from the range of the calibration data
}


class Encoder(nn.Module):
    """A network from tokens to logits, with Flax's layers or with jaxquant's."""

    quantized: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed, dense = nn.Embed, nn.Dense
        if self.quantized:
            embed, dense = functools.partial(qnn.Embed, **SPECS), functools.partial(qnn.Dense, **SPECS)
        table = embed(256, 64)
        x = table(tokens)
        for _ in range(2):
            x = x + dense(64)(nn.gelu(dense(256)(x)))
        return table.attend(nn.LayerNorm()(x))  # the output layer shares the table


with tempfile.TemporaryDirectory() as folder:
    float_file, integer_file = pathlib.Path(folder, "float.msgpack"), pathlib.Path(folder, "integers.safetensors")
    tokens = jax.random.randint(jax.random.key(1), (64, 32), 0, 256)
    float_file.write_bytes(serialization.to_bytes(Encoder().init(jax.random.key(0), tokens)["params"]))

    params: Any = serialization.msgpack_restore(float_file.read_bytes())  # loads unchanged into jaxquant's layers
    model = Encoder(quantized=True)
    variables = jqf.calibrate(model, {"params": params}, jnp.split(tokens, 4))
    checkpoint.save_safetensors(integer_file, jqf.convert(model, variables))

    serving = checkpoint.load_safetensors(integer_file)
    logits, expected = jax.jit(model.apply)(serving, tokens), Encoder().apply({"params": params}, tokens)
    error = 100 * float(jnp.linalg.norm(logits - expected) / jnp.linalg.norm(expected))
    print(f"{float_file.stat().st_size} bytes of floats, {integer_file.stat().st_size} bytes of integers")
    print(f"the logits differ by {error:.2f} %")
