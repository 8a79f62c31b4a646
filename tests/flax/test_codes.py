"""Layers whose results are codes: the trained result is that of the integer program, and so is the converted one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxquant as jq
from jaxquant.flax import Dynamic, Learned, Observed
from jaxquant.flax import linen as qnn
from jaxquant.flax import nnx as qnnx

F = np.float32
A8, W8 = jq.QuantSpec("uint8"), jq.QuantSpec("int8", jq.PerFeature())
BOTH: dict[str, Any] = {"weight_spec": W8, "activation_spec": A8}
CODES: dict[str, Any] = {**BOTH, "output_spec": A8}


class Residual(nn.Module):
    """A network that has no floats between its first quantization and its last sums."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = qnn.Conv(8, (3, 3), output_relu=True, **jq.flax.RUNTIME)(x)
        y: Any = qnn.Conv(8, (3, 3), feature_group_count=8, output_relu=True, **jq.flax.RUNTIME)(x)
        y = qnn.Conv(8, (1, 1), **jq.flax.RUNTIME)(y)
        x = jq.codes.add(x, y, output=qnn.OutputRange(A8, relu=True))
        x = jq.concatenate(
            [jq.codes.max_pool(x, (2, 2), (2, 2)), jq.codes.average_pool(y, (2, 2), (2, 2), output=x)], -1, output=x
        )
        x = qnn.DenseGeneral((2, 6), axis=(1, -1), output_relu=True, **CODES)(
            jq.codes.reshape(x, (x.shape[0], 4, 16, -1))
        )
        x = jq.codes.reshape(
            jq.codes.pad(jq.codes.transpose(x, (0, 2, 1, 3)), ((0, 0), (0, 1), (0, 0), (0, 0))), (x.shape[0], -1)
        )
        x = jq.codes.multiply(x, x, output=qnn.OutputRange(A8, Learned()))
        return qnn.Dense(10, integer_bias=True, **BOTH)(x)


def prepare(module: nn.Module, x: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Return calibrated variables whose biases are not zero."""
    variables = jax.jit(module.init)(jax.random.key(int(rng.integers(99))), x)
    params = jax.tree.map(lambda p: p + rng.normal(0, 0.1, p.shape).astype(F), variables["params"])
    return jq.flax.calibrate(module, {**variables, "params": params}, [x])


@pytest.mark.slow
def test_a_network_serves_what_it_trained(rng: np.random.Generator) -> None:
    x = rng.normal(size=(4, 8, 8, 3)).astype(F)
    network = Residual()
    variables = prepare(network, x, rng)
    jq.flax.check_calibrated(variables)
    serving = jq.flax.convert(network, variables)
    y = np.asarray(jax.jit(network.apply)(serving, x))
    assert len(np.unique(y)) > 20

    def find_loss(params: Any) -> tuple[jax.Array, jax.Array]:
        out: Any = network.apply({**variables, "params": params}, x)
        return jnp.sum(out**2), out

    gradient, out = jax.jit(jax.grad(find_loss, has_aux=True))(variables["params"])
    np.testing.assert_array_equal(out, y)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_codes_are_those_of_qlinear_conv(rng: np.random.Generator) -> None:
    x = rng.normal(size=(2, 3, 7, 6, 3)).astype(F)  # two dimensions of a batch
    layer = qnn.Conv(5, (3, 2), strides=2, padding="VALID", output_relu=True, **CODES)
    variables = prepare(layer, x, rng)
    serving = jq.flax.convert(layer, variables)
    q: Any = layer.apply(serving, x)
    ranges = serving["ranges"]["ConvGeneralDilated_0"]
    parts = [
        (ranges[role]["scale"].reshape(()), ranges[role]["zero_point"].reshape(())) for role in ("activation", "output")
    ]
    assert int(parts[1][1]) == 0
    kernel = serving["params"]["kernel"]
    codes = jq.quantize_linear(x.reshape(6, 7, 6, 3), *parts[0])
    bias = np.rint(
        np.asarray(variables["params"]["bias"]) / (np.asarray(parts[0][0]) * np.asarray(kernel.scale).reshape(-1))
    )
    want = jq.qlinear_conv(
        codes.transpose(0, 3, 1, 2), *parts[0], kernel.codes.transpose(3, 2, 0, 1), kernel.scale.reshape(-1), 0,
        *parts[1], bias.astype(np.int32), strides=[2, 2],
    )  # fmt: skip
    np.testing.assert_array_equal(q.codes.reshape(6, *q.shape[2:]), want.transpose(0, 2, 3, 1))
    fake: Any = layer.apply(variables, x)
    np.testing.assert_array_equal(fake.quantize().codes, q.codes)
    np.testing.assert_array_equal(fake.values, q.dequantize())


@pytest.mark.slow
def test_gradients_are_those_of_fake_quantization(rng: np.random.Generator) -> None:
    """Straight through the output, with the gradients of LSQ for a learned scale."""
    x, c = rng.normal(size=(6, 9)).astype(F), rng.normal(size=(6, 4)).astype(F)
    layer = qnn.Dense(4, output_range=Learned(), output_relu=True, **CODES)
    variables = layer.init(jax.random.key(0), x)
    variables = jq.flax.calibrate(layer, variables, [x])
    scales = {name: value * F(0.5) for name, value in variables["scales"]["DotGeneral_0"].items()}
    activation = layer.apply(variables, x, mutable=["ranges"])[1]["ranges"]

    def run(params: Any, scales: Any, x: Any) -> jax.Array:
        fake: Any = layer.apply({"params": params, "scales": {"DotGeneral_0": scales}, "ranges": activation}, x)
        return jnp.sum(fake.values * c)

    serving = jq.flax.convert(layer, {**variables, "ranges": activation})
    constants = serving["ranges"]["DotGeneral_0"]["activation"]
    specs = {
        "lhs_spec": jq.Quantizer(A8, constants["scale"], constants["zero_point"]),
        "rhs_spec": jq.QuantSpec("int8", jq.PerAxis(-1)),
    }

    def run_floats(params: Any, scales: Any, x: Any) -> jax.Array:
        y = jq.quantized_dot_general(x, params["kernel"], (((1,), (0,)), ((), ())), **specs) + params["bias"][None]
        scale = jnp.abs(scales["output_scale"])
        values = jq.fake_quantize(jax.nn.relu(y), A8, scale, np.uint8(0), jq.LSQ(elements=4))
        return jnp.sum(values * c)

    got, want = (jax.grad(f, (0, 1, 2))(variables["params"], scales, x) for f in (run, run_floats))
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(got[1]["output_scale"]).max()) > 0


@pytest.mark.slow
def test_an_integer_bias_with_floats(rng: np.random.Generator) -> None:
    x = rng.normal(size=(5, 7)).astype(F)
    layer = qnn.Dense(3, integer_bias=True, **BOTH)
    variables = prepare(layer, x, rng)
    serving = jq.flax.convert(layer, variables)
    constants, kernel = serving["ranges"]["DotGeneral_0"]["activation"], serving["params"]["kernel"]
    q = jq.quantize_linear(x, constants["scale"].reshape(()), constants["zero_point"].reshape(()))
    bias = jq.codes.quantize_bias(variables["params"]["bias"], constants["scale"], kernel.scale)
    point = constants["zero_point"].reshape(())
    want = jq.qlinear_matmul(
        q, constants["scale"].reshape(()), point, kernel.codes, kernel.scale.reshape(-1), 0, None, None, bias
    )
    np.testing.assert_array_equal(layer.apply(serving, x), want)
    np.testing.assert_array_equal(layer.apply(variables, x), want)


@pytest.mark.slow
def test_parameters_of_sixteen_bits(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(5, 7)), jnp.bfloat16)
    layer = qnn.Dense(3, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, **CODES)
    variables = layer.init(jax.random.key(0), x)
    params = {**variables["params"], "bias": jnp.asarray(rng.normal(size=3), jnp.bfloat16)}
    variables = jq.flax.calibrate(layer, {**variables, "params": params}, [x])
    served: Any = layer.apply(jq.flax.convert(layer, variables), x)
    trained: Any = layer.apply(variables, x)
    np.testing.assert_array_equal(trained.quantize().codes, served.codes)
    assert trained.dtype == served.dtype == jnp.float32
    q = jq.quantize(jnp.ones((2, 7)), A8)
    layer = qnn.Dense(3, dtype=jnp.bfloat16, weight_spec=W8)
    variables = layer.init(jax.random.key(0), q)
    y: Any = layer.apply(jq.flax.convert(layer, variables), q)
    np.testing.assert_array_equal(y, np.asarray(layer.apply(variables, q)))
    assert y.dtype == jnp.bfloat16


@pytest.mark.slow
def test_codes_into_a_layer_without_an_output_spec(rng: np.random.Generator) -> None:
    """The bias stays a float, and the scale of the inputs replaces the activation_spec."""
    q = jq.quantize(rng.normal(size=(5, 7)).astype(F), A8)
    layer = qnn.Dense(3, **BOTH)
    variables = layer.init(jax.random.key(0), q)
    variables = {**variables, "params": {**variables["params"], "bias": rng.normal(size=3).astype(F)}}
    serving = jq.flax.convert(layer, variables)
    want = jq.matmul(q, serving["params"]["kernel"]) + variables["params"]["bias"][None]
    np.testing.assert_array_equal(layer.apply(serving, q), want)
    np.testing.assert_array_equal(layer.apply(variables, q), want)


class NnxNetwork(nnx.Module):
    """A network whose layers, but for the first, take codes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = qnnx.Conv(3, 8, (3, 3), output_relu=True, **CODES, rngs=rngs)
        self.last = qnnx.Linear(8, 10, weight_spec=W8, integer_bias=True, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.first(x)
        return self.last(jq.codes.mean(x, (1, 2), output=x))


@pytest.mark.slow
def test_nnx(rng: np.random.Generator) -> None:
    """An NNX model serves what it trained, and its layers give the codes of the Linen layers."""
    x = rng.normal(size=(4, 8, 8, 3)).astype(F)
    model = NnxNetwork(nnx.Rngs(int(rng.integers(99))))
    qnnx.calibrate(model, [x])
    qnnx.check_calibrated(model)
    model.eval()

    @nnx.jit
    def find_gradient(model: Any, x: Any) -> Any:
        def find_loss(model: Any) -> tuple[jax.Array, jax.Array]:
            y = model(x)
            return jnp.sum(y**2), y

        return nnx.grad(find_loss, has_aux=True)(model)

    gradient, y = find_gradient(model, x)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient))
    serving: Any = qnnx.convert(model)
    assert len(np.unique(y)) > 20
    np.testing.assert_array_equal(nnx.jit(lambda model, x: model(x))(serving, x), y)
    first: Any = model.first
    params = {"kernel": first.kernel[...], "bias": first.bias[...]}
    linen = qnn.Conv(8, (3, 3), output_relu=True, **CODES)
    variables = jq.flax.calibrate(linen, {**jax.jit(linen.init)(jax.random.key(0), x), "params": params}, [x])
    want: Any = linen.apply(jq.flax.convert(linen, variables), x)
    np.testing.assert_array_equal(serving.first(x).codes, want.codes)


class Tokens(nn.Module):
    """A table whose rows are codes, and products whose features are not in the order of the kernel."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = qnn.Embed(16, 6, weight_spec=W8, output_spec=A8)(tokens)
        x = qnn.Einsum((6, 3, 4), "...ti,ihd->...tdh", **CODES)(x)
        x = jq.codes.add(x, x, output=qnn.OutputRange(A8, relu=True))
        return qnn.Einsum((4, 3, 5), "btdh,dho->bot", **CODES)(x)


class NnxTokens(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        options: dict[str, Any] = {"weight_spec": W8, "output_spec": A8, "rngs": rngs}
        self.embed = qnnx.Embed(16, 6, **options)
        self.first = qnnx.Einsum("...ti,ihd->...tdh", (6, 3, 4), (4, 3), **options)
        self.sum = qnnx.OutputRange(A8, relu=True)
        self.second = qnnx.Einsum("btdh,dho->bot", (4, 3, 5), (5,), **options)

    def __call__(self, tokens: Any) -> Any:
        x: Any = self.first(self.embed(tokens))
        return self.second(jq.codes.add(x, x, output=self.sum))


@pytest.mark.slow
def test_tables_and_einsums_give_codes(rng: np.random.Generator) -> None:
    """In Linen and in NNX, with the same parameters, the same codes."""
    tokens, network = rng.integers(0, 16, (2, 7)).astype(np.int32), Tokens()
    variables = prepare(network, tokens, rng)
    serving = jq.flax.convert(network, variables)
    q: Any = jax.jit(network.apply)(serving, tokens)
    fake: Any = jax.jit(network.apply)(variables, tokens)
    np.testing.assert_array_equal(fake.values, q.dequantize())
    assert len(np.unique(q.codes)) > 20
    params = variables["params"]
    model = NnxTokens(nnx.Rngs(0))
    names = (("embed", "Embed_0"), ("first", "Einsum_0"), ("second", "Einsum_1"))
    for layer, name in names:
        for key, value in params[name].items():
            getattr(getattr(model, layer), key).set_value(value)
    qnnx.calibrate(model, [tokens])
    converted: Any = qnnx.convert(model)
    np.testing.assert_array_equal(nnx.jit(lambda model, x: model(x))(converted, tokens).codes, q.codes)
    # The formula of the second layer, with numpy.
    first: Any = converted.first(converted.embed(tokens))
    first = jq.codes.add(first, first, output=converted.sum)
    kernel, scale = (
        np.asarray(part) for part in (converted.second.kernel[...].codes, converted.second.kernel[...].scale)
    )
    sums = np.einsum(
        "btdh,dho->bot", np.asarray(first.codes, np.int64) - int(first.zero_point.item()), kernel.astype(np.int64)
    )
    products = np.asarray(first.scale).reshape(()) * scale.reshape(-1)
    sums = sums + np.rint(np.asarray(params["Einsum_1"]["bias"]) / products).astype(np.int64)[:, None]
    steps = np.rint(sums.astype(F) * (products / np.asarray(q.scale).reshape(()))[:, None]).astype(np.int64)
    np.testing.assert_array_equal(q.codes, np.clip(steps + int(q.zero_point.item()), 0, 255))


def test_circular_padding_takes_no_codes() -> None:
    q = jq.quantize(X, A8)
    layer = qnn.Conv(2, (3,), padding="CIRCULAR", **BOTH)
    with pytest.raises(ValueError, match="padding: expected VALID, SAME or pairs of ints"):
        layer.init(jax.random.key(0), jq.codes.reshape(q, (1, 2, 4)))


X = np.ones((2, 4), F)


def make(**arguments: Any) -> nn.Module:
    return qnn.Dense(2, **{**BOTH, **arguments})


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "table": (lambda: qnn.Embed(4, 2, weight_spec=W8, integer_bias=True), "integer_bias: expected False, because a"),
    "nnx table": (
        lambda: qnnx.Embed(4, 2, weight_spec=W8, integer_bias=True, rngs=nnx.Rngs(0)),
        "Embed: .*integer_bias: expected no value, because a table",
    ),
    "narrow": (lambda: make(output_spec=jq.QuantSpec("int8")), "output_spec: expected narrow_range=False"),
    "int4": (lambda: make(output_spec=jq.QuantSpec("int4")), "output_spec: expected a spec of int8 or uint8"),
    "spec": (lambda: make(output_spec="uint8"), "output_spec: expected a QuantSpec, or None"),
    "dynamic": (lambda: make(output_spec=A8, output_range=Dynamic()), r"output_range: expected Observed\(\) or"),
    "relu": (lambda: make(output_relu=True), "output_relu: expected False without an output_spec"),
    "floats": (
        lambda: qnn.Dense(2, weight_spec=W8, output_spec=A8).init(jax.random.key(0), X),
        "activation_spec: expected a QuantSpec, or inputs that are codes",
    ),
    "rows": (
        lambda: make(
            output_spec=A8, activation_range=Dynamic(), activation_spec=jq.QuantSpec("uint8", jq.PerToken())
        ).init(jax.random.key(0), X),
        r"activation_spec: expected PerTensor\(\), because of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(ERRORS))
def test_errors(name: str) -> None:
    call, text = ERRORS[name]
    with pytest.raises((TypeError, ValueError), match=text):
        call()


@pytest.mark.slow
def test_a_changed_output_spec_is_refused(rng: np.random.Generator) -> None:
    layer = qnn.Dense(2, **CODES)
    variables = prepare(layer, X, rng)
    serving = jq.flax.convert(layer, variables)
    other = qnn.Dense(2, **BOTH, output_spec=jq.QuantSpec("int8", symmetric=False), output_range=Observed())
    for each in (variables, serving):
        with pytest.raises(ValueError, match="output_spec: expected what the variables were"):
            other.apply(each, X)
    uncalibrated = layer.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="no data"):
        jq.flax.convert(layer, uncalibrated)


class Sum(nn.Module):
    spec: jq.QuantSpec

    @nn.compact
    def __call__(self, q: Any) -> Any:
        return jq.codes.add(
            jq.codes.FakeQuantizedArray(jnp.ones(3), jnp.float32(1), None, np.dtype("uint8")),
            q,
            output=qnn.OutputRange(self.spec),
        )


@pytest.mark.slow
def test_an_output_range_is_checked() -> None:
    q = jq.codes.FakeQuantizedArray(jnp.ones(3), jnp.float32(1), None, np.dtype("uint8"))
    with pytest.raises(TypeError, match="spec: expected a QuantSpec"):
        qnn.OutputRange("uint8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"output_spec: expected PerTensor\(\)"):
        qnn.OutputRange(W8)
    variables = Sum(A8).init(jax.random.key(0), q)
    for match, each in (("no data", variables), ("spec: expected what the variables were made", None)):
        with pytest.raises(ValueError, match=match):
            Sum(A8 if each else jq.QuantSpec("uint8", power_of_two=True)).apply(each or variables, q)
