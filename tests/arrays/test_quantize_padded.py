"""The codes of converted kernels are those of `quantize`, and kernels of many shapes share few programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxquant as jq
from jaxquant._arrays import quantize

from ..support.equality import same_bits
from ..support.matrix import mark_others_full


def check_same(quantized: jq.QuantizedArray, plain: jq.QuantizedArray) -> None:
    """Compares every bit of the parts, and the static attributes."""
    assert jax.tree.structure(quantized) == jax.tree.structure(plain)
    for part, expected in zip(jax.tree.leaves(quantized), jax.tree.leaves(plain), strict=True):
        same_bits(part, np.asarray(expected))


SPECS = {
    "int8 per feature": jq.QuantSpec(jnp.int8, jq.PerAxis(-1)),
    "uint4 per two axes": jq.QuantSpec(jnp.uint4, jq.PerAxis((-2, -1))),
    "uint8 per tensor": jq.QuantSpec(jnp.uint8),
    "unsigned, symmetric": jq.QuantSpec(jnp.uint8, jq.PerAxis(-1), symmetric=True),
    "int16 per row": jq.QuantSpec(jnp.int16, jq.PerAxis(0)),
    "float8": jq.QuantSpec(jnp.float8_e4m3fn, jq.PerAxis(-1), scale_dtype=jnp.bfloat16),
    "nf4": jq.QuantSpec(jq.nf4, jq.PerAxis(-1), power_of_two=True),
    "blocks": jq.QuantSpec(jnp.int4, jq.Blocked(0, 2)),
}
SHAPES = [(3, 3, 5, 70), (1, 130), (7, 1), (1, 1), (65, 2, 3), (5, 1, 4), (0, 3)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", mark_others_full([jnp.float32, jnp.bfloat16], [jnp.float32]))
@pytest.mark.parametrize(
    "name", mark_others_full(SPECS, ["int8 per feature", "uint4 per two axes", "uint8 per tensor", "blocks"])
)
def test_padding_changes_no_bit(name: str, dtype: Any, rng: np.random.Generator) -> None:
    for shape in SHAPES:
        spec = SPECS[name]
        if name == "int16 per row" and len(shape) == 3:
            spec = jq.QuantSpec(jnp.int16, jq.PerAxis((0, 2)))  # not the last axes
        x = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape)
        x = np.where(rng.random(shape) < 0.1, rng.choice([0.0, -0.0, 1e-40, -5.0], shape), x)
        kernel = jnp.asarray(np.asarray(x, np.float32)).astype(dtype)
        padded, plain = quantize.quantize_kernel(kernel, spec, ()), jq.quantize(kernel, spec)
        check_same(padded, plain)


def test_a_nan_stays_in_its_column() -> None:
    kernel = jnp.ones((3, 4)).at[1, 2].set(jnp.nan).at[0, 0].set(jnp.inf)
    spec = SPECS["int8 per feature"]
    check_same(quantize.quantize_kernel(kernel, spec, ()), jq.quantize(kernel, spec))


def test_a_traced_kernel_is_quantized_as_it_is() -> None:
    kernel, spec = jnp.arange(15.0).reshape(5, 3), SPECS["int8 per feature"]
    traced = jax.jit(lambda k: quantize.quantize_kernel(k, spec, ()))(kernel)
    check_same(traced, jq.quantize(kernel, spec))


def test_the_kernel_stays_on_its_device() -> None:
    device = jax.devices()[-1]
    kernel = jax.device_put(jnp.ones((5, 3)), device)
    assert quantize.quantize_kernel(kernel, SPECS["int8 per feature"], ()).codes.devices() == {device}


class Layers(nn.Module):
    """Ten layers of different widths."""

    dense: Callable[[int], nn.Module]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(10):
            x = self.dense(30 + 3 * i)(x)
        return x


def convert_layers() -> None:
    layers = Layers(functools.partial(jq.flax.linen.Dense, weight_spec=jq.QuantSpec(jnp.int8, jq.PerFeature())))
    jq.flax.convert(layers, jax.jit(layers.init)(jax.random.key(0), jnp.ones((1, 17))))


def convert_prepared() -> None:
    layers, x = Layers(nn.Dense), jnp.ones((1, 17))
    params = jax.tree.map(lambda w: jnp.ones(w.shape), jax.eval_shape(layers.init, jax.random.key(0), x))
    jq.prepare(layers.apply, params, x, rules=jq.recipes.w8a8_dynamic()).convert(params)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels are padded on a CPU")
@pytest.mark.parametrize("convert", [pytest.param(convert_layers, marks=pytest.mark.slow), convert_prepared])
def test_kernels_of_many_shapes_share_a_program(convert: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, compute = [], quantize.quantize
    monkeypatch.setattr(
        quantize, "quantize", lambda x, spec, **rest: shapes.append(x.shape) or compute(x, spec, **rest)
    )
    convert()
    assert len(shapes) == 10
    assert set(shapes) == {(64, 64)}
