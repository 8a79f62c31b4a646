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

WEIGHTS = jq.QuantSpec(jnp.int8, jq.PerFeature())  # a scale for each output of a layer
SEEN = jq.QuantSpec(jnp.uint8)  # one scale and zero point, from the range that a layer has seen


class Encoder(nn.Module):
    """Tokens in, logits out: with flax's layers, or with jaxquant's."""

    integers: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed, dense = nn.Embed, nn.Dense
        if self.integers:
            embed = functools.partial(qnn.Embed, weight_spec=WEIGHTS, activation_spec=SEEN)
            dense = functools.partial(qnn.Dense, weight_spec=WEIGHTS, activation_spec=SEEN)
        table = embed(256, 64)
        x = table(tokens)
        for _ in range(2):
            x = x + dense(64)(nn.gelu(dense(256)(x)))
        return table.attend(nn.LayerNorm()(x))  # the same weights again


with tempfile.TemporaryDirectory() as name:
    floats, integers = (pathlib.Path(name) / file for file in ("float.msgpack", "integers.safetensors"))
    tokens = jax.random.randint(jax.random.key(1), (64, 32), 0, 256)
    floats.write_bytes(serialization.to_bytes(Encoder().init(jax.random.key(0), tokens)["params"]))

    params: Any = serialization.msgpack_restore(floats.read_bytes())  # unchanged: names and shapes are flax's
    model, variables = Encoder(integers=True), {"params": params}
    variables = jqf.calibrate(model, variables, jnp.split(tokens, 4))
    checkpoint.save_safetensors(integers, jqf.convert(model, variables))

    serving = checkpoint.load_safetensors(integers)
    logits, expected = jax.jit(model.apply)(serving, tokens), Encoder().apply({"params": params}, tokens)
    error = 100 * float(jnp.linalg.norm(logits - expected) / jnp.linalg.norm(expected))
    print(f"{floats.stat().st_size} bytes of floats, {integers.stat().st_size} bytes of integers")
    print(f"the logits differ by {error:.2f} %")
