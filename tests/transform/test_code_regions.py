"""Which parts of a program stay in codes, and what the coverage says about the others."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import jaxquant as jq

from ..support.prepared import find_ranges, find_sqnr

F = np.float32
RULES = jq.recipes.onnx_runtime()
ACTIVATIONS = jq.Rule(operands="activations", activation=jq.Activation("uint8", range=jq.Static(jq.calibration.minmax)))
NHWC = ("NHWC", "HWIO", "NHWC")


def convolve(x: Any, w: Any, numbers: Any = NHWC) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


def pool_and_join(p: Any, x: Any) -> Any:
    """Averages without padding and maxima of NCHW images, a slice, a mean with its dimensions, and a clip."""
    numbers = ("NCHW", "OIHW", "NCHW")
    x = jnp.clip(convolve(x, p["c"], numbers) + p["g"][None, :, None, None], -0.5, 1.5)
    window = ((1, 1, 2, 2), (1, 1, 2, 2), ((0, 0), (0, 0), (0, 1), (1, 0)))
    ones = lax.reduce_window(jnp.ones((1, 1, *x.shape[2:])), np.float32(0), lax.add, *window)
    mean = lax.reduce_window(x, np.float32(0), lax.add, *window) / ones
    x = jnp.concatenate([mean, lax.reduce_window(x, -np.float32(np.inf), lax.max, *window)], 1)[:, :8]
    return x.mean((2, 3), keepdims=True).max(-1).reshape(x.shape[0], 8) @ p["a"]


def normalize(p: Any, x: Any) -> Any:
    """Subtract from, divide and negate by features, with the weights on the left."""
    y = jnp.einsum("bi,io->ob", x, p["a"])
    y = -(p["g"][:8, None] - y) / p["h"][:8, None] * 0.5
    return jax.nn.relu(y).T @ p["b"]


def split_and_multiply(p: Any, x: Any) -> Any:
    first, second = jnp.split(jax.nn.relu(x @ p["b"]), 2, axis=-1)
    both = lax.rev(first, (1,)) * second
    return (both + both) @ p["d"]


def attend(p: Any, x: Any) -> Any:
    """Products of codes with codes; the softmax is floats."""
    q, k = x @ p["a"] + p["h"][:8], x @ p["b"]
    return jax.nn.softmax(q @ k[..., :8].T) @ q


def scan(p: Any, x: Any) -> Any:
    return lax.scan(lambda x, _: (jax.nn.relu(x @ p["a"]), None), x @ p["a"], None, length=2)[0]


PROGRAMS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "pools": (pool_and_join, "2 of 2 contractions give codes; in codes: average_pool, max_pool, concatenate, slice, "
              "mean, max, reshape"),
    "features": (normalize, "2 of 2 contractions give codes; in codes: transpose"),
    "products": (split_and_multiply, "2 of 2 contractions give codes; in codes: split, rev, multiply, add"),
    "two results": (lambda p, x: (y := jax.nn.relu(x @ p["a"]), y @ p["b"]), "2 of 2 contractions give codes"),
    "relu of a result": (lambda p, x: jax.nn.relu(y := x @ p["a"]) + y, "1 of 1 contractions give codes; in codes: "
                         "clip, add"),
    "attention": (attend, "2 of 2 contractions give codes; in codes: slice, transpose"),
    "loop": (scan, "0 of 2 contractions give codes"),
}  # fmt: skip
IMAGES = ("pools",)


def draw(rng: np.random.Generator, is_image: bool = False) -> tuple[Any, jax.Array]:
    shapes = {"a": (8, 8), "b": (8, 12), "d": (6, 4), "c": (12, 3, 3, 3), "e": (3, 3, 4, 4), "g": (12,), "h": (12,)}
    params = {
        name: jnp.asarray(rng.uniform(0.1, 1, shape) - (name in "abdc") * 0.5, F) for name, shape in shapes.items()
    }
    return params, jnp.asarray(rng.normal(0, 1, (2, 3, 7, 9) if is_image else (16, 8)), F)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PROGRAMS))
@pytest.mark.sample(2)
def test_programs(name: str, rng: np.random.Generator) -> None:
    """The results are near those of floats, and training has the same numbers."""
    function, outputs = PROGRAMS[name]
    with jax.numpy_rank_promotion("allow"):
        params, x = draw(rng, name in IMAGES)
        prepared = jq.prepare(function, params, x, rules=(ACTIVATIONS, *RULES))
        assert prepared.coverage.outputs == outputs, str(prepared.coverage)
        # Quantized values may lie beyond the range of the floats, where they saturate and have no gradient.
        ranges = jax.tree.map(lambda bound: 1.1 * bound, find_ranges(prepared, params, x))
        y = jax.jit(prepared.apply)(prepared.convert(params, ranges), x)
        trained, gradient = jax.jit(jax.value_and_grad(_sum_squares(prepared, ranges, x), has_aux=True))(params)
        expected = jax.jit(jax.grad(_sum_squares(None, function, x), has_aux=True))(params)[0]
    jax.tree.map(np.testing.assert_array_equal, trained[1], y)
    for part, want in zip(jax.tree.leaves(y), jax.tree.leaves(function_result(function, params, x)), strict=True):
        assert find_sqnr(part, want) > 22
    for key, part in gradient.items():
        # Codes tie where floats do not, so that maxima share their gradient.
        norms = np.linalg.norm(part) * np.linalg.norm(expected[key])
        assert np.vdot(part, expected[key]) >= 0.9 * norms, key


def function_result(function: Any, params: Any, x: Any) -> Any:
    with jax.numpy_rank_promotion("allow"):
        return jax.jit(function)(params, x)


def _sum_squares(prepared: Any, ranges: Any, x: Any) -> Any:
    def compute(params: Any) -> Any:
        y = ranges(params, x) if prepared is None else prepared.fake_apply(prepared.trainable(params, ranges), x)
        return sum(jnp.sum(part**2) for part in jax.tree.leaves(y)), y

    return compute


def block(p: Any, x: Any) -> Any:
    y = jax.nn.relu(x @ p["a"] + p["g"][None, :8])
    return jax.nn.relu(y + y @ p["a"]) @ p["b"] + p["h"][None]


@pytest.mark.slow
def test_functions_on_codes_give_the_same_numbers(rng: np.random.Generator) -> None:
    params, x = draw(rng)
    prepared = jq.prepare(block, params, x, rules=RULES, strict=True)
    ranges = find_ranges(prepared, params, x)
    converted, spec = prepared.convert(params, ranges), jq.QuantSpec("uint8")
    assert sorted(ranges) == ["a", "a#1", "add", "b"]
    assert [sorted(record) for record in ranges.values()] == [["0", "output"], ["output"], ["output"], ["output"]]

    def output(name: str) -> jq.Quantizer:
        return jq.Quantizer.from_range(spec, jax.tree.map(jnp.ravel, ranges[name]["output"]))

    @jax.jit
    def compute(x: jax.Array) -> jax.Array:
        a, b = converted.params["a"], converted.params["b"]
        q = jq.quantize(x, spec, range=ranges["a"]["0"])
        bias = jq.codes.quantize_bias(params["g"][:8], q.scale, a.scale)
        y = jq.codes.relu(jq.matmul(q, a, bias=bias, output=output("a")))
        z = jq.codes.relu(jq.codes.add(y, jq.matmul(y, a, output=output("a#1")), output=output("add")))
        bias = jq.codes.quantize_bias(params["h"], z.scale, b.scale)
        return jq.matmul(z, b, bias=bias, output=output("b")).dequantize()

    y = compute(x)
    np.testing.assert_array_equal(jax.jit(prepared.apply)(converted, x), y)


@pytest.mark.slow
def test_calls_of_one_row_and_outside_of_jit(rng: np.random.Generator) -> None:
    params, x = draw(rng)
    prepared = jq.prepare(block, params, x, rules=RULES)
    ranges = find_ranges(prepared, params, x)
    converted = prepared.convert(params, ranges)
    y = jax.jit(prepared.apply)(converted, x)
    np.testing.assert_array_equal(prepared.apply(converted, x), y)
    rows = jax.jit(jax.vmap(lambda x: prepared.apply(converted, x[None])[0]))(x)
    np.testing.assert_array_equal(rows, y)

    def replace_bias(bias: Any) -> jq.QuantizedTree:
        return converted.replace(params={**converted.params, "g": bias})

    with pytest.raises(TypeError, match="expected no gradient through the codes"):
        jax.grad(lambda bias: prepared.apply(replace_bias(bias), x).sum())(params["g"])
    # A bias of more steps than int32 holds.
    wrong = {**params, "g": params["g"] * 1e9}
    # The scales of its weights grow.
    assert (prepared.convert(wrong, ranges).params["a"].scale >= converted.params["a"].scale).all()
    with pytest.raises(ValueError, match=r"a \(dot_general at .*Prepared\.apply: bias: expected biases of at most 2"):
        prepared.apply(replace_bias(params["g"] * 1e9), x)


@pytest.mark.slow
def test_export_with_symbolic_batch(rng: np.random.Generator) -> None:
    params, x = draw(rng)
    prepared = jq.prepare(block, params, x, rules=RULES)
    ranges = find_ranges(prepared, params, x)
    converted = prepared.convert(params, ranges)
    run = jax.jit(lambda x: prepared.apply(converted, x))
    (size,) = jax.export.symbolic_shape("batch")
    exported = jax.export.export(run)(jax.ShapeDtypeStruct((size, 8), F))
    np.testing.assert_array_equal(exported.call(x), run(x))


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [jq.LSQ(), jq.LSQPlus()], ids=["LSQ", "LSQPlus"])
@pytest.mark.sample(1)
def test_ranges_of_results_are_trained(estimator: Any, rng: np.random.Generator) -> None:
    params, x = draw(rng)
    prepared = jq.prepare(block, params, x, rules=RULES)
    t: Any = prepared.trainable(params, find_ranges(prepared, params, x), estimator=estimator)
    gradient = jax.jit(jax.grad(lambda t: (prepared.fake_apply(t, x) ** 2).sum()))(t).scales
    assert all(float(jnp.abs(record["output"].scale).max()) > 0 for record in gradient.activations.values())
    t = t.replace(scales=jax.tree.map(lambda scale, g: scale + 1e-4 * g, t.scales, gradient))
    trained = jax.jit(prepared.fake_apply)(t, x)
    served = jax.jit(prepared.apply)(prepared.convert(t), x)
    np.testing.assert_array_equal(trained, served)


def pass_through_calls(p: Any, x: Any) -> Any:
    """Calls that return an operand, a call with a sharding, stacked and reversed weights, and a folded bfloat16."""
    mesh = jax.sharding.NamedSharding(jax.make_mesh((1,), ("data",)), jax.sharding.PartitionSpec())
    y = jax.jit(jnp.matmul, out_shardings=mesh)(x, p["half"].astype(F)) * p["g"][None, :8] + p["g"][None, :8]
    y, z = jax.jit(lambda y: (y, jnp.tanh(y)))(jax.nn.relu(y))
    y = jax.jit(lambda y: y)(y @ p["stack"][1] + p["h"][None, :8])
    return jax.nn.relu6(y) @ p["a"][:, ::-1] + p["h"][None, :8], z


@pytest.mark.slow
def test_weights_in_parts_and_calls_that_return_operands(rng: np.random.Generator) -> None:
    params, x = draw(rng)
    stack = jnp.asarray(rng.normal(0, 0.5, (2, 8, 8)), F)
    params = {**params, "stack": stack, "half": params["b"][:, :8].astype(jnp.bfloat16)}
    prepared = jq.prepare(pass_through_calls, params, x, rules=RULES)
    assert prepared.coverage.outputs == "3 of 3 contractions give codes"
    ranges = find_ranges(prepared, params, x)
    y = jax.jit(prepared.apply)(prepared.convert(params, ranges), x)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(prepared.fake_apply)(prepared.trainable(params, ranges), x), y)
    assert find_sqnr(y, function_result(pass_through_calls, params, x)) > 25


def tie_weights(p: Any, x: Any) -> Any:
    """The weights are multiplied after one of their uses."""
    return jax.nn.relu(x @ p["a"] * p["g"][None, :8]) @ p["a"]


def scale_after_relu(p: Any, x: Any) -> Any:
    return (jax.nn.relu(x @ p["a"]) * p["g"][None, :8]) @ p["b"]


@jax.custom_vjp
def reverse_gradient(x: Any) -> Any:
    return x.T.T


reverse_gradient.defvjp(lambda x: (x, None), lambda _, g: (-g,))


@jax.custom_vjp
def scale_gradient(x: Any) -> Any:
    return x


scale_gradient.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


def multiply_parts(p: Any, x: Any) -> Any:
    """Features that are reversed, or some of those of a parameter, are not in the places of its axis."""
    return x @ p["a"][:, ::-1] * p["g"][None, :8], x @ p["b"][:, 4:] * p["g"][None, :8], x[:, :5] @ p["d"][:5] * 2.0


def multiply_rows(p: Any, x: Any) -> Any:
    """Both halves of a parameter have a factor of their own, but the parameter is converted once."""
    first, second = jnp.split(p["a"], 2)
    y = x[:, :4] @ first * p["g"][None, :8]
    return y + x[:, 4:] @ second * p["h"][None, :8]


def wait_for_weights(p: Any, x: Any) -> Any:
    """Behind a barrier each weight is still its own operand, of which the second one has another use in front."""
    first, second = lax.optimization_barrier((p["a"], p["b"]))
    return x @ first * p["g"][None, :8], x @ second * 2.0, x @ p["b"]


FLOATS: dict[str, tuple[Callable[[Any, Any], Any], tuple[str, ...]]] = {
    "softmax": (lambda p, x: jax.nn.softmax(jax.nn.relu(x @ p["a"])) @ p["b"], (".* reads it as floats", "")),
    "tied": (tie_weights, ("mul at .* multiplies it, and its weights have another use", "")),
    "scaled": (scale_after_relu, ("mul at .* has a parameter as another operand", "")),
    "floats": (lambda p, x: (x + x @ p["a"]) @ p["b"], ("add at .* has floats as another operand", "")),
    "loop": (scan, ("scan at .* reads it as floats", "it is in a loop, a branch")),
    "derivative": (lambda p, x: jax.checkpoint(block)(p, x), ("it is in a loop", "it is in a loop", "it is in a loop")),
    "gradient": (lambda p, x: reverse_gradient(x @ p["a"]) @ p["b"], ("custom_vjp_call at .* reads it", "")),
    "identity": (lambda p, x: scale_gradient(x @ p["a"]) @ p["b"], ("custom_vjp_call at .* reads it", "")),
    "parts": (multiply_parts, (*2 * ("mul at .* multiplies it, and its weights are not a whole parameter",), "")),
    "rows": (multiply_rows, 2 * ("mul at .* multiplies it, and its weights are a part of a parameter",)),
    "barrier": (wait_for_weights, ("", "mul at .* multiplies it, and its weights have another use", "")),
    "bfloat16": (
        lambda p, x: (x.astype(jnp.bfloat16) @ p["a"].astype(jnp.bfloat16)), ("its dtypes are bfloat16, and integer",)
    ),
    "unused": (lambda p, x: (x @ p["b"], x)[1] @ p["a"], ("", "")),
    "groups": (
        lambda p, x: lax.conv_general_dilated(
            x.reshape(4, 4, 2, 4), p["e"], (1, 1), "SAME", dimension_numbers=NHWC,
            batch_group_count=2,
        ),
        ("it has groups of images",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FLOATS))
def test_reasons_for_floats(name: str, rng: np.random.Generator) -> None:
    """Nothing is computed, so these are cheap."""
    function, reasons = FLOATS[name]
    params, x = draw(rng)
    rows = jq.prepare(function, params, x, rules=RULES).coverage.rows
    assert len(rows) == len(reasons), rows
    for row, reason in zip(rows, reasons, strict=True):
        assert bool(row.output_reason) == bool(reason), row
        assert (row.output is None) or not reason
        assert re.match(reason, row.output_reason)


def test_coverage_of_results(rng: np.random.Generator) -> None:
    params, x = draw(rng)
    coverage = jq.prepare(block, params, x, rules=RULES).coverage
    (operation,) = coverage.operations
    assert operation[:3] == ("add", "add", (16, 8))
    assert operation.output == jq.QuantSpec("uint8")
    lines = str(coverage).splitlines()
    assert "output" in lines[0].split()
    assert lines[-1] == "3 of 3 contractions give codes; in codes: add"
    assert coverage.to_dict()["b"]["output"] == repr(operation.output)
    floats = jq.prepare(block, params, x, rules=jq.recipes.w8a8_static()).coverage
    assert "output" not in str(floats)
    assert not floats.operations


class Layers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv, self.norm = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


@pytest.mark.slow
def test_nnx_module(rng: np.random.Generator) -> None:
    model, x = Layers(nnx.Rngs(0)), jnp.asarray(rng.normal(0, 1, (2, 6, 6, 3)), F)
    prepared = jq.prepare(lambda model, x: model(x), model, x, rules=RULES, strict=True)
    assert prepared.coverage.outputs == "2 of 2 contractions give codes; in codes: mean"
    ranges = prepared.calibrate(model, [x], progress=False)
    converted = prepared.convert(model, ranges)
    y = jax.jit(lambda x: prepared.apply(converted, x))(x)
    assert find_sqnr(y, jax.jit(model)(x)) > 25
    np.testing.assert_array_equal(jax.jit(lambda x: prepared.fake_apply(prepared.trainable(model, ranges), x))(x), y)


def test_another_program_is_refused(rng: np.random.Generator) -> None:
    """In training a batch normalization has the statistics of the batch, so it cannot become part of the weights."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            return nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))

    x = jnp.ones((2, 3))
    variables = jax.eval_shape(lambda: Net().init(jax.random.key(0), x, False))

    def apply(variables: Any, x: jax.Array, train: bool) -> Any:
        return Net().apply(variables, x, train, mutable="batch_stats")[0]

    prepared = jq.prepare(apply, variables, x, False, rules=RULES)
    with pytest.raises(
        ValueError, match="check: args: expected arguments at which params/Dense_0/kernel is multiplied"
    ):
        prepared.check(variables, x, True)


S = jq.Static(jq.calibration.absmax)
A = jq.Activation("uint8", range=jq.Static(jq.calibration.minmax))
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"output": "uint8"}, "Rule: output: expected an Activation or None"),
    "range": ({"output": jq.Activation("uint8")}, r"Rule: output.range: expected Static\(calibrator\)"),
    "dtype": (
        {"output": jq.Activation("int4", range=jq.Static(jq.calibration.minmax))},
        "Rule: output: expected a spec of int8 or uint8",
    ),
    "blocks": ({"weight": jq.Weight("int8", block=4)}, "Rule: weight, activation: expected a Weight without blocks"),
    "rows": ({"activation": jq.Activation("uint8", per="row")}, "Rule: weight, activation: expected a Weight without"),
    "floats": ({"activation": None}, "Rule: weight, activation: expected a Weight without blocks"),
    "keep": ({"weight": None, "activation": None, "keep": "float"}, "Rule: output: expected None"),
    "narrow": (
        {"output": jq.Activation("int8", range=S, options={"symmetric": True, "narrow_range": True})},
        "Rule: output: expected narrow_range=False",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(ERRORS))
def test_rules_are_refused(name: str) -> None:
    arguments, text = ERRORS[name]
    with pytest.raises((TypeError, ValueError), match=text):
        jq.Rule(**{"weight": jq.Weight("int8"), "activation": A, "output": A, **arguments})


@pytest.mark.slow
def test_a_rule_for_weights_only_reads_floats() -> None:
    """Also where the operand is codes, because the caller or another contraction reads them."""

    def function(p: Any, x: Any) -> Any:
        y = jax.nn.relu(x @ p["a"])
        return y, y @ p["b"]

    rng = np.random.default_rng(0)
    params, x = {name: rng.normal(size=(8, 8)).astype(F) for name in "ab"}, rng.normal(size=(4, 8)).astype(F)
    rules = [jq.Rule("b", weight=jq.Weight("int8")), *RULES]
    prepared = jq.prepare(function, params, x, rules=rules)
    assert [row.form for row in prepared.coverage.rows] == ["integer", "weight-only"]
    ranges = find_ranges(prepared, params, x)
    codes = prepared.convert(params, ranges)
    y, z = jax.jit(prepared.apply)(codes, x)
    np.testing.assert_allclose(
        z, np.asarray(y, np.float64) @ np.asarray(codes.params["b"].dequantize(), np.float64), rtol=1e-5
    )
    alone = jq.prepare(lambda p, x: jax.nn.relu(x @ p["a"]), params, x, rules=RULES)
    integers = [
        str(jax.make_jaxpr(one.apply)(one.convert(params, ranges), x)).count("preferred_element_type=int32")
        for one in (prepared, alone)
    ]
    assert integers[0] == integers[1] > 0
    for got, want in zip(jax.jit(prepared.fake_apply)(prepared.trainable(params, ranges), x), (y, z), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_the_gradient_of_a_learned_output_scale_is_that_of_its_rule() -> None:
    """For one contraction whose sums are exact in float32: the gradient of fake-quantizing them by LSQ."""
    rng = np.random.default_rng(0)
    params = {"a": np.where(rng.random((8, 6)) < 0.5, -127, 127).astype(F)}  # weights of scale 1
    x = rng.integers(0, 256, (5, 8)).astype(F)
    x[0, :2] = 0, 255  # activations of scale 1, too
    # Weights of 8 bits, so that 127 is a code.
    prepared = jq.prepare(lambda p, x: x @ p["a"], params, x, rules=jq.recipes.onnx_runtime(reduce_range=False))
    learned: Any = prepared.trainable(params, find_ranges(prepared, params, x), estimator=jq.LSQ()).scales
    # The estimator starts the scales of weights elsewhere; here they are 1.
    learned = dataclasses.replace(learned, weights=jax.tree.map(jnp.ones_like, learned.weights))
    weights = F(rng.normal(size=(5, 6)))

    def find_loss(scales: Any) -> Any:
        return (prepared.fake_apply(jq.TrainableTree(params, scales), x) * weights).sum()

    gradient = jax.jit(jax.grad(find_loss))(learned).activations["a"]["output"].scale
    start, spec = learned.activations["a"]["output"], prepared.static_ranges["a"][-1].operand.spec
    zero_point = np.rint(0 if start.zero_point is None else start.zero_point).astype(spec.dtype).reshape(1, 1)

    def find_alone(scale: Any) -> Any:
        return (jq.fake_quantize(x @ params["a"], spec, scale, zero_point, jq.LSQ(elements=6)) * weights).sum()

    want = jax.jit(jax.grad(find_alone))(start.scale)
    assert np.abs(want).max() > 1e-3
    np.testing.assert_allclose(np.ravel(gradient), np.ravel(want), rtol=1e-4)
