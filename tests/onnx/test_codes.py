"""Integer-only networks and operators on codes, exported in both forms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest

import jaxquant as jq
from jaxquant import onnx as jqonnx

from ..cases.exported_networks import make_integer_mlp
from ..cases.onnx_models import run_runtime
from ..support.prepared import find_ranges

UINT8 = jq.QuantSpec(jnp.uint8)
NUMBERS = ("NHWC", "HWIO", "NHWC")


def make_network(rng: np.random.Generator):
    """Return a network of codes: convolutions, a sum, pooling and a mean."""
    spec = jq.QuantSpec(jnp.int8, jq.PerAxis(3))
    shapes = ((3, 3, 3, 8), (3, 3, 8, 8))
    kernels = [jq.quantize(jnp.asarray(rng.normal(0, 0.2, s), jnp.float32), spec) for s in shapes]
    biases = [jnp.asarray(rng.integers(-500, 500, 8), jnp.int32) for _ in kernels]
    out, pooled = jq.Quantizer(UINT8, 0.05, 0), jq.Quantizer(UINT8, 0.02, 3)

    def apply(x: jax.Array) -> jax.Array:
        q = jq.quantize(x, UINT8, range=(-2.0, 2.0))
        skip = jq.conv_general_dilated(
            q, kernels[0], (1, 1), "SAME", dimension_numbers=NUMBERS, bias=biases[0], output=out
        )
        q = jq.conv_general_dilated(
            skip, kernels[1], (1, 1), "SAME", dimension_numbers=NUMBERS, bias=biases[1], output=out
        )
        q = jq.codes.max_pool(jq.codes.add(q, skip, output=out), window_shape=(2, 2), strides=(2, 2))
        return jq.codes.mean(
            jq.codes.average_pool(q, window_shape=(2, 2), strides=(2, 2), output=pooled), (1, 2), output=pooled
        ).codes

    return apply, jnp.asarray(rng.normal(0, 1, (3, 8, 8, 3)), jnp.float32)


def list_optimized(model, tmp_path) -> set[str]:
    """Return the operators of ONNX Runtime's optimized graph."""
    import onnx

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}


def list_operators(model) -> list[str]:
    return [node.op_type for node in model.graph.node]


POOLS = [
    ((2, 2), (2, 2), "VALID"), ((3, 2), None, "SAME"), ((3, 3), (2, 1), [(1, 1), (2, 0)]), ((1, 4), (1, 3), "VALID"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize(("window", "strides", "padding"), POOLS)
def test_maxima_of_codes_are_one_node(rng: np.random.Generator, dtype, window, strides, padding) -> None:
    """In ONNX Runtime they are those of numpy, also where the padding is larger than all codes of a window."""
    codes = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).min + 120, (2, 3, 7, 8)).astype(dtype)

    def pool(codes: jax.Array) -> jax.Array:
        q = jq.QuantizedArray(codes, jnp.float32(0.5).reshape(1, 1, 1, 1))
        options = {"window_shape": window, "strides": strides, "padding": padding, "channels_last": False}
        return jq.codes.max_pool(q, **options).codes

    for function, x in ((pool, codes), (jax.vmap(pool), codes[None])):
        model = jqonnx.export(function, [x])
        operators = list_operators(model)
        assert operators.count("MaxPool") == 1
        assert set(operators) <= {"MaxPool", "Reshape", "Transpose"}
        (y,) = run_runtime(model, {model.graph.input[0].name: x})
        expected = find_maxima(codes, window, strides, padding)
        np.testing.assert_array_equal(y.reshape(expected.shape), expected)
        np.testing.assert_array_equal(jax.jit(function)(x), y)


def find_maxima(codes: np.ndarray, window, strides, padding) -> np.ndarray:
    """Return the largest code of each window of [N, C, *spatial]."""
    strides = strides or (1,) * len(window)
    lengths = codes.shape[2:]
    if isinstance(padding, str):
        ends = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(lengths, window, strides, strict=True)]
        padding = [(n // 2, n - n // 2) if padding == "SAME" else (0, 0) for n in ends]
    wide = np.pad(codes.astype(np.int64), [(0, 0), (0, 0), *padding], constant_values=-1000)
    views = np.lib.stride_tricks.sliding_window_view(wide, window, (2, 3))[:, :, :: strides[0], :: strides[1]]
    return views.max((-2, -1)).astype(codes.dtype)


def test_layers_with_channels_last_have_no_nodes_in_between(rng: np.random.Generator) -> None:
    """A relu whose lowest code is 0 changes nothing, and the transposes between two layers undo each other."""

    def network(params, x: jax.Array) -> jax.Array:
        for kernel in params:
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS)
            x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return x

    shapes = ((3, 3, 1, 4), (3, 3, 4, 8))
    params = [jnp.asarray(rng.normal(0, 0.2, shape), jnp.float32) for shape in shapes]
    x = jnp.asarray(rng.normal(0, 1, (3, 8, 8, 1)), jnp.float32)
    prepared = jq.prepare(network, params, x, rules=jq.recipes.onnx_runtime(), strict=True)
    q = prepared.convert(params, prepared.calibrate(params, [x]))
    model = jqonnx.export(prepared, q, [x], batch="N")
    body = ["QLinearConv", "MaxPool"] * 2
    assert list_operators(model)[:7] == ["QuantizeLinear", "Transpose", *body, "Transpose"]
    for level in ("disabled", "all"):
        report = jqonnx.verify(model, prepared, q, [x, x[:1]], level=level, tolerance=0)
        assert report.is_exact, str(report)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["operators", "qdq"])
def test_integer_networks(rng: np.random.Generator, form: str, tmp_path) -> None:
    function, x = make_network(rng)
    model = jqonnx.export(function, [x], batch="N", form=form)
    levels = ("disabled", "all") if form == "operators" else ("extended", "all")
    for level in levels:
        report = jqonnx.verify(model, function, [x], level=level)
        assert report.is_exact, str(report)
    # In the form "qdq" a runtime that knows only ONNX's own operators reads the model.
    assert form == "operators" or not any(node.domain for node in model.graph.node)
    kernels = list_optimized(model, tmp_path)
    assert "QLinearConv" in kernels
    assert not kernels & {"Conv", "FusedConv", "ConvInteger", "MatMul", "Gemm"}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["operators", "qdq"])
def test_matrix_products_with_a_bias(rng: np.random.Generator, form: str, tmp_path) -> None:
    function = make_integer_mlp(rng, 16, 12, 8)
    for shape in ((6, 16), (2, 3, 16)):
        x = jnp.asarray(rng.normal(0, 1, shape), jnp.float32)
        model = jqonnx.export(function, [x], batch="N", form=form)
        report = jqonnx.verify(model, function, [x])
        assert report.is_exact, str(report)
        assert not list_optimized(model, tmp_path) & {"MatMul", "Gemm"}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["operators", "qdq"])
def test_scales_of_weights_may_be_inputs(rng: np.random.Generator, form: str) -> None:
    kernel, matrix = (jnp.asarray(rng.integers(-100, 100, shape), jnp.int8) for shape in ((3, 3, 3, 4), (3, 4)))
    bias, output = jnp.asarray(rng.integers(-900, 900, 4), jnp.int32), jq.Quantizer(UINT8, 0.05, 0)

    def function(x: jax.Array, scale: jax.Array) -> list[jax.Array]:
        q, rows = (jq.quantize(v, UINT8, range=(-2.0, 2.0)) for v in (x, x[0, 0]))
        kernels = jq.QuantizedArray(kernel, scale.reshape(1, 1, 1, 4), None)
        weights = jq.QuantizedArray(matrix, scale[None], None)
        results = [
            jq.conv_general_dilated(q, kernels, (1, 1), "SAME", dimension_numbers=NUMBERS, bias=b, output=output)
            for b in (None, bias)
        ]
        results += [jq.matmul(rows, weights, bias=b, output=output) for b in (None, bias)]
        return [y.codes for y in results]

    inputs = jnp.asarray(rng.normal(0, 1, (2, 5, 5, 3)), jnp.float32), jnp.asarray([0.01, 0.02, 0.03, 0.04])
    report = jqonnx.verify(jqonnx.export(function, inputs, form=form), function, [inputs])
    assert report.is_exact, str(report)


@pytest.mark.slow
def test_operators_on_codes(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(0, 1, (2, 3, 4, 4)), jnp.float32)

    def function(x: jax.Array) -> list[jax.Array]:
        q = jq.quantize_linear(x, 0.02, np.uint8(120))
        a = jq.ops.qlinear_sigmoid(q, 0.02, 120, 1 / 256, 0)
        b = jq.ops.qlinear_leaky_relu(q, 0.02, 120, 0.02, 100, alpha=0.1)
        return [
            a,
            b,
            jq.ops.qlinear_softmax(q, 0.02, 120, 1 / 256, 0),
            jq.ops.qlinear_where(q > jnp.uint8(100), a, 1 / 256, 0, b, 0.02, 100, 0.03, 50),
            jq.ops.qlinear_global_average_pool(q, 0.02, 120, 0.01, 100),
            jq.ops.qlinear_add(a, 1 / 256, 0, b, 0.02, 100, 0.03, 7),
            jq.ops.qlinear_mul(a, 1 / 256, 0, b, 0.02, 100, 0.03, 7),
        ]

    model = jqonnx.export(function, [x])
    for level in ("disabled", "all"):
        report = jqonnx.verify(model, function, [x], level=level)
        assert report.is_exact, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("level", [pytest.param("extended", marks=pytest.mark.full), "all"])
def test_float_form_of_operators_on_codes(rng: np.random.Generator, level: str, tmp_path) -> None:
    """In the form "qdq" they are standard operators, which ONNX Runtime runs on codes."""
    x = jnp.asarray(rng.normal(0, 1, (2, 3, 6, 6)), jnp.float32)

    def function(x: jax.Array) -> list[jax.Array]:
        q = jq.quantize_linear(x, 0.02, np.uint8(120))
        a = jq.ops.qlinear_sigmoid(q, 0.02, 120, 1 / 256, 0)
        b = jq.ops.qlinear_leaky_relu(q, 0.02, 120, 0.02, 100, alpha=0.1)
        pooled = jq.ops.qlinear_average_pool(b, 0.02, 100, 0.015, 90, kernel_shape=(2, 2), strides=(2, 2))
        total = jq.ops.qlinear_add(a, 1 / 256, 0, b, 0.02, 100, 0.03, 7)
        return [
            jq.ops.qlinear_softmax(q, 0.02, 120, 1 / 256, 0),
            jq.ops.qlinear_global_average_pool(pooled, 0.015, 90, 0.01, 100),
            jq.ops.qlinear_mul(a, 1 / 256, 0, total, 0.03, 7, 0.03, 7),
            jq.ops.qlinear_concat(0.03, 7, total, 0.03, 7, b, 0.02, 100, axis=1),
        ]

    model = jqonnx.export(function, [x], form="qdq", batch="N")
    floats = {"Sigmoid", "LeakyRelu", "Softmax", "AveragePool", "GlobalAveragePool", "Add", "Mul"}
    assert floats <= {node.op_type for node in model.graph.node}
    assert all(not node.domain for node in model.graph.node)
    report = jqonnx.verify(model, function, [x], level=level)
    assert report.is_exact, str(report)
    kernels = list_optimized(model, tmp_path)
    assert not kernels & floats
    assert {"QLinearSigmoid", "QLinearAdd", "QLinearAveragePool", "QLinearSoftmax"} <= kernels


@pytest.mark.slow
def test_activations_of_prepared_networks(rng: np.random.Generator) -> None:
    """The logistic function and a leaky relu are lookups in tables that the export computes; silu adds a product."""
    shapes = {"a": (8, 8), "b": (8, 8), "c": (8, 8), "d": (8, 4)}
    params = {name: jnp.asarray(rng.normal(0, 1, shape), jnp.float32) for name, shape in shapes.items()}
    x = jnp.asarray(rng.normal(0, 1, (32, 8)), jnp.float32)

    def apply(p, x: jax.Array) -> jax.Array:
        x = jax.nn.leaky_relu(jax.nn.silu(x @ p["a"]) @ p["b"], 0.1)
        return jax.nn.sigmoid(x @ p["c"]) @ p["d"]

    prepared = jq.prepare(apply, params, x, rules=jq.recipes.onnx_runtime())
    assert prepared.coverage.outputs == "4 of 4 contractions give codes; in codes: sigmoid (2), multiply, leaky_relu"
    converted = jax.jit(prepared.convert)(params, find_ranges(prepared, params, x))

    def serve(x: jax.Array) -> jax.Array:
        return prepared.apply(converted, x)

    model = jqonnx.export(serve, [x], batch="N")
    operators = [node.op_type for node in model.graph.node]
    assert [operators.count(name) for name in ("QLinearMatMul", "Gather", "QLinearMul")] == [4, 3, 1]
    assert not {"Sigmoid", "LeakyRelu", "MatMul"} & set(operators)
    for level in ("disabled", "all"):
        report = jqonnx.verify(model, serve, [x], level=level)
        assert report.is_exact, str(report)


@pytest.mark.slow
def test_codes_without_a_fused_kernel(rng: np.random.Generator) -> None:
    """Between int8 and uint8 ONNX Runtime has no integer kernel, and in the form "qdq" it would run a float one."""
    w = jq.quantize(jnp.asarray(rng.normal(0, 0.2, (8, 4)), jnp.float32), jq.QuantSpec(jnp.int8, jq.PerAxis(1)))
    signed = jq.QuantSpec(jnp.int8, narrow_range=False)

    def function(x: jax.Array) -> list[jax.Array]:
        qs = [jq.quantize(x, spec, range=(-2.0, 2.0)) for spec in (signed, UINT8)]
        outputs = [jq.Quantizer(spec, 0.05, 3) for spec in (jq.QuantSpec(jnp.int8, symmetric=False), UINT8)]
        return [jq.matmul(q, w, output=output).codes for q in qs for output in outputs]

    x = jnp.asarray(rng.normal(0, 1, (3, 8)), jnp.float32)
    with pytest.warns(UserWarning, match="expected uint8 inputs and outputs") as warned:
        models = [jqonnx.export(function, [x], form="qdq"), jqonnx.export(function, [x])]
    assert sum("expected uint8" in str(warning.message) for warning in warned) == 3
    for model in models:
        for level in ("disabled", "all"):
            report = jqonnx.verify(model, function, [x], level=level)
            assert report.is_exact, str(report)
