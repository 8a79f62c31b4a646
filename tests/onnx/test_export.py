"""Exported models in ONNX Runtime: the same codes at each quantize point, and floats within a tolerance."""

from __future__ import annotations

import collections
import functools
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from flax import nnx
from jax.experimental import io_callback
from onnx import ModelProto

import jaxquant as jq
from jaxquant import onnx as jqonnx
from jaxquant.flax import linen as qnn
from jaxquant.flax import nnx as qnnx

from ..cases.exported_networks import NETWORKS, RECIPES, convert_network

UINT8, INT8 = jq.QuantSpec(jnp.uint8), jq.QuantSpec(jnp.int8, jq.PerAxis(1))
LEVELS = ("disabled", "basic", "extended", "all")
# Their activation ranges are computed by float operations that XLA and ONNX Runtime round differently.
FLOAT_RANGES = ("dynamic", "int4")


def count_operators(model: ModelProto) -> collections.Counter[str]:
    return collections.Counter(node.op_type for node in model.graph.node)


def check_model(model: ModelProto, function, batches, levels=("all",), tolerance=5e-6) -> None:
    onnx.checker.check_model(model, full_check=True)
    for level in levels:
        report = jqonnx.verify(model, function, batches, level=level, tolerance=tolerance)
        assert report.is_exact, str(report)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "recipe"), list(itertools.product(NETWORKS, RECIPES)))
def test_networks(name: str, recipe: str, rng: np.random.Generator) -> None:
    function, x = convert_network(name, recipe)
    model = jqonnx.export(function, [x], batch="N")
    onnx.checker.check_model(model, full_check=True)
    report = jqonnx.verify(model, function, [x[:2]], level=str(rng.choice(LEVELS)), tolerance=1e-5)
    if recipe in FLOAT_RANGES:  # a range may differ in the last bit, and with it a few codes by one step
        codes = [row for row in report.rows if row.kind == "codes"]
        elements = sum(row.elements for row in codes)
        assert sum(row.differing for row in codes) <= max(4, elements // 100), str(report)
    else:
        assert report.is_exact, str(report)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("opset", [13, 17, 25])
def test_opsets(opset: int) -> None:
    function, x = convert_network("linen cnn", "static")
    model = jqonnx.export(function, [x], opset=opset)
    assert model.opset_import[0].version == opset
    check_model(model, function, [x], levels=("all",))


def make_weights(rng: np.random.Generator, *shape: int, spec: jq.QuantSpec = INT8) -> jq.QuantizedArray:
    return jq.quantize(jnp.asarray(rng.normal(0, 0.2, shape), jnp.float32), spec)


def sample_ties(rng: np.random.Generator, *shape: int) -> jax.Array:
    """Return multiples of half a step of 0.25, one ulp on either side of them, and values that saturate."""
    x = rng.integers(-90, 90, shape).astype(np.float32) * np.float32(0.125)
    x = np.where(rng.random(shape) < 0.3, np.nextafter(x, np.float32(100)), x)
    return jnp.asarray(np.where(rng.random(shape) < 0.1, np.float32(1e6) * x, x))


GRANULARITIES = {
    "per_tensor": jq.PerTensor(),
    "per_axis": jq.PerAxis(1),
    "per_token": jq.PerToken(),
    "blocked": jq.Blocked(1, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, pytest.param(jnp.int4, marks=pytest.mark.full), jnp.uint16])
def test_codes_of_ties(rng: np.random.Generator, dtype) -> None:
    x = sample_ties(rng, 6, 8)

    def quantize(x: jax.Array) -> list[jax.Array]:
        results = []
        for granularity in GRANULARITIES.values():
            q = jq.quantize(x, jq.QuantSpec(dtype, granularity), range=(-16.0, 15.75))
            results += [q.codes.astype(jnp.int32), q.dequantize()]
        return results

    for opset in (13, 21):
        check_model(jqonnx.export(quantize, [x], opset=opset), quantize, [x])


def test_saturation_and_special_values() -> None:
    x = jnp.asarray([[jnp.inf, -jnp.inf, jnp.nan, 0.0, -0.0, 1e-40, 3e38, -3e38]])

    def quantize(x: jax.Array) -> tuple[jax.Array, ...]:
        narrow = jq.quantize(x, jq.QuantSpec(jnp.int8), range=(-1.27, 1.27)).codes
        wide = jq.quantize_linear(x, 0.5, np.uint8(3))
        return narrow, wide, jq.quantize_linear(x, jnp.float32(0.5), np.int16(-7))

    check_model(jqonnx.export(quantize, [x]), quantize, [x], levels=("disabled", "all"))


@pytest.mark.slow
def test_static_and_dynamic_layers(rng: np.random.Generator) -> None:
    w, x = make_weights(rng, 16, 8), jnp.asarray(rng.normal(0, 1, (4, 16)), jnp.float32)

    def static(x: jax.Array) -> jax.Array:
        return jq.matmul(jq.quantize(x, UINT8, range=(-2.0, 2.5)), w)

    def dynamic(x: jax.Array) -> jax.Array:
        return jq.ops.dynamic_quantize_matmul(x, w.codes, w.scale.reshape(-1), None, jnp.arange(8.0))

    def dynamic_spec(x: jax.Array) -> jax.Array:
        return jq.matmul(jq.quantize(x, UINT8), w)

    functions = (static, dynamic, dynamic_spec)
    models = [jqonnx.export(f, [x], batch="N") for f in functions]
    assert list(count_operators(models[0])) == ["QuantizeLinear", "MatMulInteger", "Cast", "Mul"]
    assert list(count_operators(models[1])) == ["DynamicQuantizeLinear", "MatMulInteger", "Cast", "Mul", "Add"]
    assert list(count_operators(models[2])) == ["DynamicQuantizeLinear", "MatMulInteger", "Cast", "Mul"]
    for model, function in zip(models, functions, strict=True):
        check_model(model, function, [x], levels=LEVELS, tolerance=0)


def test_weights_stay_codes(rng: np.random.Generator) -> None:
    w, x = make_weights(rng, 64, 32), jnp.asarray(rng.normal(0, 1, (4, 64)), jnp.float32)
    points = make_weights(rng, 64, 32, spec=jq.QuantSpec(jnp.uint8, jq.PerAxis(1)))
    table = make_weights(rng, 16, 64, spec=jq.QuantSpec(jnp.int8, jq.PerAxis(0)))

    def function(x: jax.Array, tokens: jax.Array) -> tuple[jax.Array, ...]:
        return jq.matmul(x, w), jq.matmul(x, points), jq.take(table, tokens)

    tokens = jnp.asarray(rng.integers(-3, 20, (2, 3)), jnp.int32)  # NaN where out of range
    model = jqonnx.export(function, [x, tokens])
    assert {array.data_type for array in model.graph.initializer if len(array.dims) > 1 and array.dims[0] > 1} <= {
        onnx.TensorProto.INT8,
        onnx.TensorProto.UINT8,
        onnx.TensorProto.FLOAT,
    }
    assert model.ByteSize() < w.nbytes + points.nbytes + table.nbytes + 4000
    check_model(model, function, [(x, tokens)], levels=LEVELS, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("frozen", [True, False], ids=["converted", "training"])
def test_flax_layers(rng: np.random.Generator, frozen: bool) -> None:
    specs: Any = {
        "weight_spec": jq.QuantSpec(jnp.int8, jq.PerFeature()),
        "activation_spec": UINT8,
        "activation_range": jq.Static(jq.calibration.minmax),
    }
    layer, x = qnn.Conv(4, (3, 3), **specs), jnp.asarray(rng.normal(0, 1, (2, 5, 5, 3)), jnp.float32)
    variables = jq.flax.calibrate(layer, layer.init(jax.random.key(0), x), [x])
    variables = jq.flax.convert(layer, variables) if frozen else variables

    def function(x: jax.Array):
        return layer.apply(variables, x)

    model = jqonnx.export(function, [x], batch="N")
    assert count_operators(model)["ConvInteger"] == 1
    check_model(model, function, [x], tolerance=0)


@pytest.mark.slow
def test_nnx_modules(rng: np.random.Generator) -> None:
    specs: Any = {
        "weight_spec": jq.QuantSpec(jnp.int8, jq.PerFeature()),
        "activation_spec": UINT8,
        "activation_range": jq.Static(jq.calibration.minmax),
    }
    layer, x = qnnx.Linear(8, 4, rngs=nnx.Rngs(0), **specs), jnp.asarray(rng.normal(0, 1, (3, 8)), jnp.float32)
    layer.train()
    layer(x)
    layer.eval()
    model = jqonnx.export(layer, [x], batch="N")
    assert count_operators(model)["MatMulInteger"] == 1
    check_model(model, layer, [x], tolerance=0)


@pytest.mark.slow
def test_contractions_with_zero_points_and_blocks(rng: np.random.Generator) -> None:
    specs = [
        jq.QuantSpec(jnp.uint8, jq.PerAxis(1), symmetric=False),
        jq.QuantSpec(jnp.int4, jq.Blocked(0, 4)),
        jq.QuantSpec(jnp.uint4, jq.PerTensor()),
    ]
    weights = [make_weights(rng, 12, 5, spec=spec) for spec in specs]
    x = jnp.asarray(rng.normal(0, 1, (2, 3, 12)), jnp.float32)

    def contract(x: jax.Array) -> list[jax.Array]:
        per_token = jq.quantize(x, jq.QuantSpec(jnp.uint8, jq.PerAxis((0, 1))), range=(-2.0, 2.0))
        per_tensor = jq.quantize(x, jq.QuantSpec(jnp.int8), range=(-2.0, 2.0))
        products = [jq.matmul(q, w) for w in weights for q in (per_token, per_tensor)]
        return [*products, jq.einsum("btk,bsk->bts", per_tensor, per_tensor), jq.matmul(x, weights[1])]

    check_model(jqonnx.export(contract, [x], batch="N"), contract, [x])


def test_mapped_functions_export_as_operators(rng: np.random.Generator) -> None:
    w, x = make_weights(rng, 8, 4), jnp.asarray(rng.normal(0, 1, (3, 2, 8)), jnp.float32)

    def layer(x: jax.Array) -> jax.Array:
        return jq.matmul(jq.quantize(x, UINT8, range=(-2.0, 2.5)), w)

    function = jax.vmap(layer)
    model = jqonnx.export(function, [x])
    assert {"QuantizeLinear", "MatMulInteger"} <= set(count_operators(model))
    check_model(model, function, [x], tolerance=0)


def test_mapped_dequantization_exports(rng: np.random.Generator) -> None:
    """Stacked weights alone, which are mapped together with the activations, and without them."""
    w, x = rng.normal(size=(3, 16, 8)).astype(np.float32), jnp.asarray(rng.normal(size=(3, 2, 16)), jnp.float32)
    for spec in (jq.QuantSpec(jnp.int8, jq.PerAxis((0, 2))), jq.QuantSpec(jq.nf4, jq.Blocked(1, 8))):
        q = jq.quantize(w, spec)
        for function in (
            lambda x, q=q: jax.vmap(jq.matmul)(x, q),
            lambda x, q=q: jax.vmap(jq.matmul, (None, 0))(x[0], q),
            lambda x, q=q: jax.vmap(lambda a, b: a @ b.dequantize())(x, q),
        ):
            check_model(jqonnx.export(function, [x]), function, [x])


def test_names(rng: np.random.Generator) -> None:
    params = {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.arange(2.0)}}

    def apply(params, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x @ params["dense"]["kernel"] + params["dense"]["bias"][None], y

    x = jnp.ones((2, 3))
    model = jqonnx.export(apply, params, [x, x], output_names=["logits", "copy"], name="net")
    assert [info.name for info in model.graph.input] == ["x", "y"]
    assert [info.name for info in model.graph.output] == ["logits", "copy"]
    assert {"dense.kernel", "dense.bias"} <= {array.name for array in model.graph.initializer}
    assert model.graph.name == "net"
    check = jqonnx.verify(model, apply, params, [(x, x)])
    assert check.is_exact


def test_unsupported_operations_are_all_listed() -> None:
    def function(x: jax.Array) -> jax.Array:
        return jax.lax.erf_inv(x) + jax.lax.lgamma(x)

    with pytest.raises(ValueError, match="lgamma") as error:
        jqonnx.export(function, [jnp.ones(3)])
    assert "erf_inv" in str(error.value)
    assert "test_export.py:" in str(error.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"opset": 12}, "opset: expected a number from 13 to 25, got 12"),
        ({"form": "dense"}, "form: expected"),
        ({"batch": "2b"}, "batch: expected a name or None"),
        ({"input_names": ["a", "a"]}, "input_names: expected 1 distinct names"),
        ({"output_names": []}, "output_names: expected 1 distinct names"),
        ({"input_names": [""]}, "input_names: expected 1 distinct names, none of which is empty"),
        ({"input_names": [3]}, "input_names: expected a sequence of strings"),
        ({"output_names": "y"}, "output_names: expected a sequence of strings"),
    ],
)
def test_wrong_options(options, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        jqonnx.export(lambda x: x + 1, [jnp.ones(3)], **options)


@pytest.mark.parametrize(
    ("function", "argument", "text"),
    [
        (lambda x: (), jnp.ones(3), "function: expected a result of one array or more"),
        (lambda x: x, "text", "inputs: expected arrays of numbers"),
        (lambda x: x, jax.random.key(0), "inputs: expected arrays of numbers"),
    ],
)
def test_functions_and_arguments_that_no_model_has(function, argument, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        jqonnx.export(function, [argument])


def test_names_are_kept_as_they_are() -> None:
    model = jqonnx.export(lambda x: x + 1, [jnp.ones(3)], input_names=["a/b: ü"], output_names=["Relu.out 1"])
    assert [info.name for info in (*model.graph.input, *model.graph.output)] == ["a/b: ü", "Relu.out 1"]
    # The name of an input that a node would have got.
    model = jqonnx.export(lambda x: jnp.exp(x) * 2, [jnp.ones(3)], input_names=["Exp.out"])
    assert jqonnx.verify(model, lambda x: jnp.exp(x) * 2, [jnp.ones(3)]).is_exact


def test_outputs_that_no_node_computes() -> None:
    def function(x: jax.Array, n: Any) -> Any:
        y = jnp.exp(x)
        return x, x, jnp.arange(3), y, y, y * n, None, 3.0

    x = jnp.zeros((0, 3))
    model = jqonnx.export(function, [x, 2.0], batch="N")
    onnx.checker.check_model(model, full_check=True)
    # A number of Python has the dtype that JAX gives it.
    for batch in ((x, 2.0), (jnp.ones((2, 3)), np.float64(3))):
        report = jqonnx.verify(model, function, [batch])
        assert report.is_exact, str(report)


def test_constants_are_quantized_as_in_any_other_program(rng: np.random.Generator) -> None:
    """Quotients next to ties: a product with the reciprocal of the scale would round some of them to other codes."""
    scale = np.float32(5) / np.float32(255)
    steps = rng.integers(-100, 100, 400).astype(np.float32) + np.float32(0.5)
    x = np.concatenate([steps * scale, np.array([-2.5, 2.5], np.float32)])
    x = np.concatenate([x, np.nextafter(x, np.float32(9)), np.nextafter(x, np.float32(-9))])
    expected = np.clip(np.rint(x / scale) + 128, 0, 255).astype(np.uint8)
    model = jqonnx.export(lambda: jq.quantize_linear(x, scale, np.uint8(128)), [])
    (codes,) = [onnx.numpy_helper.to_array(array) for array in model.graph.initializer]
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_floats(dtype: Any, rng: np.random.Generator) -> None:
    weight = jnp.asarray(rng.normal(size=(8, 4)), dtype)

    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(x @ weight), jq.quantize(x, UINT8, range=(-2.0, 2.0)).codes

    x = jnp.asarray(rng.normal(size=(3, 8)), dtype)
    report = jqonnx.verify(jqonnx.export(function, [x]), function, [x], tolerance=0.02)
    assert report.is_exact, str(report)


def test_verify_names_a_batch_of_another_shape() -> None:
    model = jqonnx.export(lambda x: x + 1, [jnp.ones((2, 3))], batch="N", input_names=["x"])
    with pytest.raises(ValueError, match=r"batches: expected x of shape \['N', 3\], got shape \[4, 5\]"):
        jqonnx.verify(model, lambda x: x + 1, [jnp.ones((4, 5))])
    with pytest.raises(ValueError, match="batches: expected 1 arrays, as the model has inputs, got 2"):
        jqonnx.verify(model, lambda x: x + 1, [(jnp.ones((4, 3)), jnp.ones(3))])


def test_verify_reports_a_difference(tmp_path: pathlib.Path) -> None:
    x = jnp.linspace(-1, 1, 8).reshape(2, 4)
    model = jqonnx.export(lambda x: jq.quantize(x, UINT8, range=(-1.0, 1.0)).codes, [x])
    jqonnx.save(model, tmp_path / "model.onnx")
    report = jqonnx.verify(tmp_path / "model.onnx", lambda x: jq.quantize(x, UINT8, range=(-1.1, 1.0)).codes, [x])
    assert not report.is_exact
    assert "first codes that differ" in str(report)
    with pytest.raises(ValueError, match="function: expected 2 quantize points"):
        jqonnx.verify(model, lambda x: x, [x])


def test_verify_refuses_files_that_are_damaged_or_lie(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.onnx"
    function, x = lambda x: jq.quantize(x, UINT8, range=(-1.0, 1.0)).codes, jnp.ones((2, 4))
    for text in ('[["loop", "codes"]]', "[", "[1]", "5"):
        model = jqonnx.export(function, [x])
        next(entry for entry in model.metadata_props if entry.key == "jaxquant.quantize_points").value = text
        jqonnx.save(model, path)
        with pytest.raises(jqonnx.ModelError, match="metadata of the model is damaged"):
            jqonnx.verify(path, function, [x])
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(jqonnx.ModelError):
        jqonnx.verify(path, function, [x])


@pytest.mark.slow
def test_names_of_outputs_from_the_operator(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(0, 1, (3, 4)), jnp.float32)

    def function(x: jax.Array) -> Any:
        y = jq.dynamic_quantize_linear(x, specified_outputs_name=["codes", "step", "zero"])
        fake = jq.fake_quantize_linear(x, 0.5, 3, dtype=jnp.uint4, specified_outputs_name=("fake",))
        moving = jq.dynamic_fake_quantize_linear(x, specified_outputs_name=["moving"])
        return y.y, fake * 2, y.y_zero_point, y.y_scale + 1, moving

    model = jqonnx.export(function, [x], batch="N")
    (node,) = [node for node in model.graph.node if "codes" in node.output]
    assert (node.op_type, list(node.output)) == ("DynamicQuantizeLinear", ["codes", "step", "zero"])
    assert [info.name for info in model.graph.output] == ["codes", "output_1", "zero", "output_3", "moving"]
    assert any("fake" in node.output for node in model.graph.node)
    onnx.checker.check_model(model, full_check=True)
    report = jqonnx.verify(model, function, [x], tolerance=0)
    assert report.is_exact, str(report)
    assert "codes" in {row.name for row in report.rows}
    renamed = jqonnx.export(function, [x], output_names=["a", "b", "c", "d", "e"])
    assert [info.name for info in renamed.graph.output] == ["a", "b", "c", "d", "e"]
    # Outside of an export the names change nothing.
    named = jq.dynamic_quantize_linear(x, specified_outputs_name=["codes", "step", "zero"])
    np.testing.assert_array_equal(named.y, jq.dynamic_quantize_linear(x).y)
    # Mapped, and differentiated.
    mapped = jax.vmap(lambda v: jq.fake_quantize_linear(v, 0.5, 3, specified_outputs_name=["rows"]))
    assert any("rows" in node.output for node in jqonnx.export(mapped, [x]).graph.node)
    np.testing.assert_array_equal(jax.grad(lambda v: mapped(v).sum())(x).shape, x.shape)


def test_wrong_names_of_outputs() -> None:
    x = jnp.ones((2, 2))
    for names, error in (
        (["a"], ValueError),
        (["a", "a", "b"], ValueError),
        ("abc", TypeError),
        ([1, 2, 3], TypeError),
    ):
        with pytest.raises(error, match="specified_outputs_name: expected 3 distinct names"):
            jq.dynamic_quantize_linear(x, specified_outputs_name=names)  # type: ignore[arg-type]

    def twice(x: jax.Array) -> jax.Array:
        scales = [jq.dynamic_quantize_linear(v, specified_outputs_name=["y", "s", "z"]).y_scale for v in (x, -x)]
        return scales[0] + scales[1]

    with pytest.raises(ValueError, match="specified_outputs_name: expected names that no other tensor has"):
        jqonnx.export(twice, [x])


def _run_under(wrap: str, effect: Callable[[jax.Array], Any], x: jax.Array) -> jax.Array:
    """Return x + 1, with an effect of x inside of a call, a loop or a branch, or of none."""

    def step(x: jax.Array) -> jax.Array:
        effect(x)
        return x + 1

    if wrap == "scan":
        return jax.lax.scan(lambda x, _: (step(x), None), x, None, length=1)[0]
    if wrap == "cond":
        return jax.lax.cond(x.sum() > 0, step, lambda x: x + 1, x)
    return jax.jit(step)(x) if wrap == "jit" else step(x)


@pytest.mark.parametrize("wrap", ["", "jit", "scan", "cond"])
def test_debug_calls_are_left_out_with_a_warning(wrap: str) -> None:
    """They change no result. What they alone need, here an operation that ONNX lacks, is left out, too."""

    def show(x: jax.Array) -> None:
        jax.debug.print("{}", jax.lax.lgamma(x))
        jax.debug.callback(lambda y: None, x)

    with pytest.warns(UserWarning, match=r"jaxquant.onnx.export: the model is without debug_print at \S*test_export"):
        model = jqonnx.export(functools.partial(_run_under, wrap, show), [jnp.ones(3)])
    plain = jqonnx.export(functools.partial(_run_under, wrap, lambda x: None), [jnp.ones(3)])
    assert model.graph == plain.graph


@pytest.mark.parametrize("wrap", ["", "jit", "scan", "cond"])
@pytest.mark.parametrize("ordered", [False, True])
def test_calls_with_effects_are_refused(wrap: str, ordered: bool) -> None:
    """A model without them would do less than the function, also if no result is read."""

    def send(x: jax.Array) -> None:
        io_callback(lambda y: None, None, x, ordered=ordered)

    with pytest.raises(ValueError, match=r"io_callback \(no operator of ONNX\) at \S*test_export"):
        jqonnx.export(functools.partial(_run_under, wrap, send), [jnp.ones(3)])


def test_a_barrier_of_several_known_arrays() -> None:
    def function(x: jax.Array) -> jax.Array:
        a, b = jax.lax.optimization_barrier((jnp.arange(3.0), jnp.ones(3)))
        return x * a + b

    check_model(jqonnx.export(function, [jnp.ones(3)]), function, [jnp.ones(3)])
