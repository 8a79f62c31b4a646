"""`jaxquant.onnx.quantize`: whole models beside ONNX Runtime, codes beside formulas, bad input, and the command."""

from __future__ import annotations

import html
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from jaxquant import onnx as jqonnx
from jaxquant.onnx.__main__ import main

from ..cases.onnx_models import run_runtime


class Builder:
    """A float model that is written node by node."""

    def __init__(self, rng: np.random.Generator, shape: list[Any], opset: int = 17) -> None:
        self.rng, self.shape, self.opset = rng, shape, opset
        self.nodes: list[onnx.NodeProto] = []
        self.arrays: list[onnx.TensorProto] = []

    def constant(self, array: Any) -> str:
        name = f"c{len(self.arrays)}"
        self.arrays.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def draw(self, *shape: int) -> str:
        """Return a constant of normal numbers, with a variance that keeps the size of results."""
        inputs = np.prod(shape[1:]) if len(shape) > 1 else 1
        return self.constant((self.rng.normal(size=shape) / np.sqrt(inputs)).astype(np.float32))

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), [f"t{len(self.nodes)}"], **attributes))
        return f"t{len(self.nodes) - 1}"

    def conv(self, x: str, inputs: int, outputs: int, size: int = 3, group: int = 1) -> str:
        w, b = self.draw(outputs, inputs // group, size, size), self.draw(outputs)
        return self.add("Conv", x, w, b, pads=[size // 2] * 4, group=group)

    def finish(self, *outputs: str, kind: int = TensorProto.FLOAT) -> ModelProto:
        graph = helper.make_graph(
            self.nodes, "g", [helper.make_tensor_value_info("x", kind, self.shape)],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs], self.arrays,
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)


def make_network(rng: np.random.Generator) -> ModelProto:
    """Return a network of convolutions with all that has kernels on codes."""
    b = Builder(rng, ["N", 3, 16, 16])
    normalization = [b.constant(rng.uniform(0.5, 1.5, 8).astype(np.float32)) for _ in range(4)]
    x = b.add("Relu", b.add("BatchNormalization", b.conv("x", 3, 8), *normalization))
    bounds = [b.constant(np.float32(n)) for n in (0, 1.5)]
    y = b.add("Clip", b.conv(x, 8, 8, group=8), *bounds)
    x = b.add("Add", x, b.conv(y, 8, 8, 1))
    x = b.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    y = b.conv(x, 8, 8)
    y = b.add("Mul", y, b.add("Sigmoid", y))
    x = b.add("Relu", b.conv(b.add("Concat", b.conv(x, 8, 8), y, axis=1), 16, 16))
    x = b.conv(b.add("GlobalAveragePool", x), 16, 32, 1)
    x = b.add("Reshape", x, b.constant(np.array([-1, 32])))
    return b.finish(b.add("Gemm", x, b.draw(16, 32), b.draw(16), transB=1))


def draw_batches(rng: np.random.Generator, *shape: int, count: int = 8, limit: float = 2.5) -> list[np.ndarray]:
    """Return batches whose extremes do not depend on the seed, so that few elements of the last ones saturate."""
    return list(np.clip(rng.normal(size=(count, *shape)), -limit, limit).astype(np.float32))


def list_kernels(model: ModelProto, path: pathlib.Path) -> list[str]:
    """Return the operators that ONNX Runtime runs, with all optimizations."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(path), 4
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    return [node.op_type for node in onnx.load(path).graph.node]


def measure_error(want: np.ndarray, got: np.ndarray) -> float:
    want, got = want.astype(np.float64), got.astype(np.float64)
    noise = np.square(want - got).sum()
    return 10 * np.log10(np.square(want).sum() / noise) if noise else np.inf


@pytest.mark.parametrize("exact_everywhere", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_network_runs_on_codes(rng: np.random.Generator, tmp_path: pathlib.Path, exact_everywhere: bool) -> None:
    """Each convolution is an integer kernel, and JAX has the runtime's bits."""
    model, batches = make_network(rng), draw_batches(rng, 2, 3, 16, 16)
    report = jqonnx.quantize(model, data=batches, exact_everywhere=exact_everywhere)
    assert {row.form for row in report.rows} == {"integer", "codes"}
    kernels = list_kernels(report.model, tmp_path / "optimized.onnx")
    assert kernels.count("QLinearConv") == 7
    floats = {"Conv", "Gemm", "Relu", "Clip", "Add", "Mul", "Sigmoid", "Concat", "GlobalAveragePool"}
    assert not floats & set(kernels), kernels
    session = jqonnx.make_session(report.model)
    fn, params = jqonnx.load(report.model)
    for batch in batches[-2:]:
        (want,) = session.run(None, {"x": batch})
        np.testing.assert_array_equal(jax.jit(fn)(params, batch), want)
        each = jax.vmap(lambda x: fn(params, x[None])[0])(batch)
        np.testing.assert_array_equal(each, want)
    held_out = batches[-2:]
    want, got = (
        np.concatenate([np.asarray(run(batch)) for batch in held_out])
        for run in (lambda x: run_runtime(model, {"x": x})[0], lambda x: session.run(None, {"x": x})[0])
    )
    assert measure_error(want, got) > (18 if exact_everywhere else 22)
    assert report.outputs[model.graph.output[0].name] == pytest.approx(measure_error(want, got), abs=0.01)
    if exact_everywhere:
        assert not report.saturating
        assert not jqonnx.find_saturating_products(report.model)


def test_both_forms_have_the_same_codes(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """The operators on codes have the runtime's bits of QDQ at every level, and JAX has them, too."""
    model, batches = make_network(rng), draw_batches(rng, 2, 3, 16, 16)
    qdq, operators = (jqonnx.quantize(model, data=batches, form=form) for form in ("qdq", "operators"))
    kinds = [node.op_type for node in operators.model.graph.node]
    assert kinds.count("QLinearConv") == 7
    assert not {"Conv", "Gemm", "Relu", "Clip", "Add", "Sigmoid"} & set(kinds)
    assert "QLinearConv" not in [node.op_type for node in qdq.model.graph.node]
    fn, params = jqonnx.load(operators.model)
    for batch in batches[-2:]:
        (want,) = run_runtime(qdq.model, {"x": batch})
        for level in ("disabled", "basic", "extended", "all"):
            (got,) = jqonnx.make_session(operators.model, level=level).run(None, {"x": batch})
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(jax.jit(fn)(params, batch), want)
    assert [(row.name, row.form) for row in operators.rows] == [(row.name, row.form) for row in qdq.rows]
    assert operators.outputs == qdq.outputs
    assert len(operators.saturating) == len(qdq.saturating) > 0


def test_a_model_with_codes_is_not_called_a_float_model(rng: np.random.Generator) -> None:
    batches = draw_batches(rng, 2, 3, 16, 16)
    report = jqonnx.quantize(jqonnx.quantize(make_network(rng), data=batches).model, data=batches)
    assert {row.reason for row in report.rows} == {"its weights are codes already"}
    assert all(error == np.inf for error in report.outputs.values())


def test_the_codes_are_those_of_the_formulas(rng: np.random.Generator) -> None:
    b = Builder(rng, ["N", 24])
    model = b.finish(b.add("Gemm", "x", b.draw(16, 24), b.draw(16), transB=1))
    batches = draw_batches(rng, 5, 24, limit=np.inf)
    report = jqonnx.quantize(model, data=batches)
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in report.model.graph.initializer}
    w, bias = (numpy_helper.to_array(tensor) for tensor in model.graph.initializer)
    seen = np.concatenate(batches[:6])
    scale = np.float32((float(seen.max()) - float(seen.min())) / 255)
    point = int(np.rint(-float(seen.min()) / scale))
    w_scale = np.abs(w).max(1) / np.float32(127)
    codes = np.rint(w / w_scale[:, None]).astype(np.int8)
    # What the rounding of the weights takes from the outputs on average goes to the bias.
    shift = (w.astype(np.float64) - codes * w_scale[:, None].astype(np.float64)) @ seen.mean(0, dtype=np.float64)
    step = scale * w_scale
    names = {"x_scale": scale, "x_zero_point": np.uint8(point), "c0_codes": codes, "c0_scale": w_scale}
    for name, want in names.items():
        np.testing.assert_array_equal(arrays[name], want, strict=True)
    np.testing.assert_allclose(arrays["c1_codes"], (bias + shift) / step, rtol=0, atol=0.51)
    # The sums are exact, and are scaled once.
    x = batches[-1]
    q = np.clip(np.rint(x / scale) + point, 0, 255).astype(np.int64) - point
    sums = q @ codes.T.astype(np.int64) + arrays["c1_codes"]
    (got,) = run_runtime(report.model, {"x": x})
    np.testing.assert_allclose(got, sums * step.astype(np.float64), rtol=1e-6, atol=1e-6)


def make_encoder(rng: np.random.Generator) -> ModelProto:
    """Return a network with a lookup, a recurrent layer, products of matrices and a product of activations."""
    b = Builder(rng, ["N", 6])
    x = b.add("Gather", b.draw(40, 32), "x")
    hidden = b.add("MatMul", x, b.draw(32, 64))
    hidden = b.add("Relu", b.add("Add", hidden, b.draw(64)))
    x = b.add("Add", x, b.add("MatMul", hidden, b.draw(64, 32)))
    scores = b.add("MatMul", x, b.add("Transpose", x, perm=[0, 2, 1]))
    x = b.add("MatMul", b.add("Softmax", scores), x)
    x = b.add("LSTM", b.add("Transpose", x, perm=[1, 0, 2]), b.draw(1, 64, 32), b.draw(1, 64, 16), hidden_size=16)
    x = b.add("Reshape", x, b.constant(np.array([-1, 16])))
    return b.finish(b.add("Gemm", x, b.draw(16, 32), b.draw(32)), kind=TensorProto.INT64)


RECIPES = {
    "static": ("QuantizeLinear", 25), "dynamic": ("MatMulInteger", 25), "weight_only_int8": ("DequantizeLinear", 30),
    "weight_only_int4": ("MatMulNBits", 8), "gptq": ("MatMulNBits", 8),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_of_an_encoder(rng: np.random.Generator, recipe: str) -> None:
    model = make_encoder(rng)
    batches = [rng.integers(0, 40, (4, 6)) for _ in range(8)]
    report = jqonnx.quantize(model, recipe=recipe, data=batches)
    operator, least = RECIPES[recipe]
    assert operator in [node.op_type for node in report.model.graph.node]
    forms = {(row.operator, row.form) for row in report.rows}
    is_integer = recipe in ("static", "dynamic")
    products = {("MatMul", "integer" if is_integer else "weights"), ("Gemm", "integer" if is_integer else "weights")}
    assert forms == {("Gather", "weights"), ("LSTM", "weights"), ("MatMul", "float"), *products}
    (error,) = report.outputs.values()
    assert error > least
    assert report.bytes_after < report.bytes_before
    fn, params = jqonnx.load(report.model)
    (want,) = run_runtime(report.model, {"x": batches[0]})
    got = np.asarray(jax.jit(fn)(params, batches[0]))
    # Floats between the codes may round otherwise, and a code may differ where that decides a tie.
    assert measure_error(want, got) > (40 if is_integer else 90)


def test_gptq_has_less_error_than_rounding(rng: np.random.Generator) -> None:
    b = Builder(rng, ["N", 64])
    model = b.finish(b.add("MatMul", "x", b.draw(64, 48)))
    mixing = rng.normal(size=(16, 64)).astype(np.float32)
    batches = [rng.normal(size=(64, 16)).astype(np.float32) @ mixing for _ in range(8)]
    errors = [
        next(iter(jqonnx.quantize(model, recipe=recipe, data=batches).outputs.values()))
        for recipe in ("weight_only_int4", "gptq")
    ]
    assert errors[1] > errors[0] + 2


def test_blocks_that_do_not_fill_the_inputs(rng: np.random.Generator) -> None:
    b = Builder(rng, ["N", 40])
    model = b.finish(b.add("Gemm", "x", b.draw(40, 24), b.draw(24)))
    (batch,) = draw_batches(rng, 7, 40, count=1)
    report = jqonnx.quantize(model, recipe="weight_only_int4", data=[batch], block=16)
    w, bias = (numpy_helper.to_array(tensor).astype(np.float64) for tensor in model.graph.initializer)
    blocks = [w[i : i + 16] for i in range(0, 40, 16)]
    bound = sum(
        np.abs(batch[:, i * 16 : i * 16 + 16])
        @ np.broadcast_to((np.maximum(part.max(0), 0) - np.minimum(part.min(0), 0)) / 15, part.shape)
        for i, part in enumerate(blocks)
    )
    (got,) = run_runtime(report.model, {"x": batch})
    assert np.all(np.abs(got - (batch @ w + bias)) <= 0.51 * bound + 1e-5)


def test_what_stays_in_floats(rng: np.random.Generator) -> None:
    model, batches = make_network(rng), draw_batches(rng, 1, 3, 16, 16, count=4)
    names = [node.output[0] for node in model.graph.node if node.op_type == "Conv"]
    report = jqonnx.quantize(model, data=batches, keep=["Gemm", names[-1]])
    floats = {(row.operator, row.reason) for row in report.rows if row.form == "float"}
    assert floats == {("Conv", "kept by `keep`"), ("Gemm", "kept by `keep`")}
    better = jqonnx.quantize(model, data=batches, keep=["*"])
    assert all(row.form == "float" for row in better.rows)
    assert all(np.isinf(error) or error > 100 for error in better.outputs.values())
    assert "kept by `keep`" in str(report)


def test_names_that_others_read(rng: np.random.Generator) -> None:
    """A graph returns the values of codes under the name of the floats, and a branch reads them."""
    b = Builder(rng, ["N", 3, 8, 8])
    y = b.conv("x", 3, 8)
    z = b.add("Relu", b.conv(y, 8, 8))
    branches = [
        helper.make_graph(
            [helper.make_node(op, [y], [op])], op, [], [helper.make_tensor_value_info(op, TensorProto.FLOAT, None)]
        )
        for op in ("Neg", "Abs")
    ]
    total = b.add("ReduceSum", "x", keepdims=0)
    condition = b.add("Greater", total, b.constant(np.float32(0)))
    b.nodes.append(helper.make_node("If", [condition], ["chosen"], then_branch=branches[0], else_branch=branches[1]))
    model, batches = b.finish(y, z, "chosen"), draw_batches(rng, 2, 3, 8, 8)
    report = jqonnx.quantize(model, data=batches)
    assert [info.name for info in report.model.graph.output] == [y, z, "chosen"]
    assert ("If", "float") in {(row.operator, row.form) for row in report.rows}
    first, _, chosen = run_runtime(report.model, {"x": batches[0]})
    np.testing.assert_array_equal(chosen, -first if batches[0].sum() > 0 else np.abs(first))
    assert all(error > 25 for error in report.outputs.values())


def test_an_old_opset_and_a_tiny_channel(rng: np.random.Generator) -> None:
    b = Builder(rng, [2, 3, 8, 8], opset=9)
    w = rng.normal(size=(8, 3, 3, 3)).astype(np.float32)
    w[3] *= 1e-12  # its bias would leave int32 in steps of such weights
    w[4] = 0
    x = b.add("Conv", "x", b.constant(w), b.draw(8), pads=[1, 1, 1, 1])
    model, batches = b.finish(b.add("Clip", x, min=0.0, max=6.0)), draw_batches(rng, 2, 3, 8, 8)
    report = jqonnx.quantize(model, data=batches)
    assert next(entry.version for entry in report.model.opset_import if not entry.domain) == 13
    (error,) = report.outputs.values()
    assert error > 30
    (got,), (want,) = (run_runtime(part, {"x": batches[-1]}) for part in (report.model, model))
    assert np.abs(got - want).max(axis=(0, 2, 3))[3:5].max() < 0.03


def test_weights_of_float16(rng: np.random.Generator) -> None:
    """ONNX Runtime computes them in float32, and so does the quantized model without the weights of float16."""
    b = Builder(rng, ["N", 24])
    w, bias = (rng.normal(size=shape).astype(np.float16) for shape in ((24, 32), (32,)))
    x = b.add("Cast", "x", to=TensorProto.FLOAT16)
    x = b.add("Gemm", x, b.constant(w), b.constant(bias))
    model = b.finish(b.add("Cast", x, to=TensorProto.FLOAT))
    report = jqonnx.quantize(model, data=draw_batches(rng, 50, 24))
    assert [(row.operator, row.form) for row in report.rows] == [("Gemm", "integer")]
    assert next(iter(report.outputs.values())) > 25
    kinds = {tensor.data_type for tensor in report.model.graph.initializer}
    assert TensorProto.FLOAT16 not in kinds


def test_the_names_of_the_report_keep_layers_in_floats(rng: np.random.Generator) -> None:
    """A layer is named after the activation at its end, or by its own output, which may have brackets."""
    b = Builder(rng, ["N", 3, 8, 8])
    x = b.add("Relu", b.conv("x", 3, 16))
    model, batches = b.finish(b.conv(x, 16, 16)), draw_batches(rng, 2, 3, 8, 8)
    model.graph.node[-1].output[0] = model.graph.output[0].name = "layers[1].out"
    rows = jqonnx.quantize(model, data=batches).rows
    assert [(row.name, row.form) for row in rows] == [("t1", "integer"), ("layers[1].out", "integer")]
    for i, row in enumerate(rows):
        kept = jqonnx.quantize(model, data=batches, keep=[row.name])
        forms = [other.form for other in kept.rows if other.operator == "Conv"]
        assert forms == ["float" if j == i else "integer" for j in range(2)]
        assert sum(node.op_type == "QuantizeLinear" for node in kept.model.graph.node) == 2


def test_a_bias_for_each_row(rng: np.random.Generator) -> None:
    """As many rows as outputs: a bias [rows, 1] has the length of a bias of outputs."""
    b = Builder(rng, [16, 32])
    bias = b.constant(10 * np.arange(16, dtype=np.float32)[:, None])
    model = b.finish(b.add("Gemm", "x", b.draw(32, 16), bias))
    for recipe in ("static", "dynamic"):
        report = jqonnx.quantize(model, data=draw_batches(rng, 16, 32), recipe=recipe)
        assert all(error > 40 for error in report.outputs.values())


def test_initializers_that_are_inputs(rng: np.random.Generator) -> None:
    """Before version 4 of the format all constants are inputs, too; since then such an input is a default."""
    batches = draw_batches(rng, 1, 3, 16, 16)
    for version, form in ((3, "integer"), (8, "float")):
        model = make_network(rng)
        model.ir_version = version
        model.graph.input.extend(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            for tensor in model.graph.initializer
        )
        report = jqonnx.quantize(model, data=batches)
        rows = [row for row in report.rows if row.operator in ("Conv", "Gemm")]
        assert {row.form for row in rows} == {form}
        assert {row.reason for row in rows} == (
            {""} if version == 3 else {"its weights are inputs of the model, with defaults"}
        )
        assert (len(report.model.graph.input) == 1) == (version == 3)


def test_an_activation_with_a_default(rng: np.random.Generator) -> None:
    b = Builder(rng, ["N", 32])
    model = b.finish(b.add("Add", b.add("MatMul", "state", b.draw(32, 32)), "x"))
    state = rng.normal(size=(4, 32)).astype(np.float32)
    model.graph.input.append(helper.make_tensor_value_info("state", TensorProto.FLOAT, [4, 32]))
    model.graph.initializer.append(numpy_helper.from_array(state, "state"))
    report = jqonnx.quantize(model, data=draw_batches(rng, 4, 32))
    assert next(iter(report.outputs.values())) > 30
    scale = next(numpy_helper.to_array(x) for x in report.model.graph.initializer if x.name == "state_scale")
    assert scale == np.float32((float(state.max()) - float(state.min())) / 255)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_without_codes(rng: np.random.Generator, recipe: str) -> None:
    """A NaN, an infinity, and float64: they stay as they are, and the report says so."""
    weights = [rng.normal(size=(32, 32)).astype(np.float32) for _ in range(2)]
    weights[0][3, 5], weights[1][3, 5] = np.nan, np.inf
    for w in (*weights, rng.normal(size=(32, 32))):
        b = Builder(rng, ["N", 32])
        x = b.add("Cast", "x", to=helper.np_dtype_to_tensor_dtype(w.dtype))
        model = b.finish(b.add("Cast", b.add("MatMul", x, b.constant(w)), to=TensorProto.FLOAT))
        report = jqonnx.quantize(model, data=draw_batches(rng, 4, 32), recipe=recipe)
        assert [(row.form, row.reason) for row in report.rows] == [
            ("float", "its weights are not finite numbers of float32")
        ]
        batch = rng.normal(size=(4, 32)).astype(np.float32)
        (want,), (got,) = (run_runtime(part, {"x": batch}) for part in (model, report.model))
        np.testing.assert_array_equal(got, want)
        assert all(np.isinf(error) and error > 0 for error in report.outputs.values())


def test_an_output_without_signal_or_of_another_shape_is_not_exact(rng: np.random.Generator) -> None:
    b = Builder(rng, ["N", 32])
    x = b.add("Relu", b.add("MatMul", "x", b.draw(32, 32)))
    indices = b.add("Cast", b.add("NonZero", x), to=TensorProto.FLOAT)
    report = jqonnx.quantize(b.finish(indices), data=draw_batches(rng, 64, 32), recipe="dynamic")
    assert report.outputs == {indices: -np.inf}
    assert f"error    {indices}: -inf dB" in str(report)


def test_integer_outputs_are_not_compared(rng: np.random.Generator) -> None:
    b = Builder(rng, ["N", 32])
    x = b.add("MatMul", "x", b.draw(32, 32))
    model = b.finish(x, b.add("ArgMax", x))
    model.graph.output[1].type.tensor_type.elem_type = TensorProto.INT64
    report = jqonnx.quantize(model, data=draw_batches(rng, 16, 32))
    assert list(report.outputs) == [x]


def test_an_infinity_in_an_output_is_no_noise_if_both_have_it(rng: np.random.Generator) -> None:
    b = Builder(rng, ["N", 32])
    mask = np.where(np.arange(32) % 2, np.float32(-np.inf), np.float32(0))
    model = b.finish(b.add("Add", b.add("MatMul", "x", b.draw(32, 32)), b.constant(mask)))
    for recipe in ("static", "dynamic"):
        report = jqonnx.quantize(model, data=draw_batches(rng, 16, 32), recipe=recipe)
        assert all(30 < error < 100 for error in report.outputs.values())
        assert [row.form for row in report.rows] == [("integer" if recipe == "dynamic" else "weights")]


def test_gptq_names_the_value_that_is_not_finite(rng: np.random.Generator) -> None:
    b = Builder(rng, ["N", 32])
    model = b.finish(b.add("MatMul", b.add("Log", "x"), b.draw(32, 32)))
    with pytest.raises(ValueError, match=r"onnx.quantize: data: expected data for which all values .* in 't0'"):
        jqonnx.quantize(model, data=draw_batches(rng, 4, 32), recipe="gptq")


def test_integers_that_the_input_does_not_hold(rng: np.random.Generator) -> None:
    b = Builder(rng, ["N", 32])
    model = b.finish(b.add("MatMul", b.add("Cast", "x", to=1), b.draw(32, 32)), kind=TensorProto.UINT8)
    for number in (-1, 256):
        with pytest.raises(ValueError, match=rf"data\[0\]\['x'\]: expected numbers that uint8 holds, got {number}"):
            jqonnx.quantize(model, data=[np.full((1, 32), number)])
    jqonnx.quantize(model, data=[np.full((1, 32), 255)])


ARGUMENTS: dict[str, tuple[Callable[[list[np.ndarray]], dict[str, Any]], str]] = {
    "recipe": (lambda data: {"recipe": "int8"}, "recipe: expected 'static' or"),
    "calibrator": (lambda data: {"calibrator": "max"}, "calibrator: expected 'minmax' or"),
    "block": (lambda data: {"recipe": "weight_only_int4", "block": 24}, "block: expected 16, 32, 64, 128 or 256"),
    "keep": (lambda data: {"keep": ["lstm*"]}, "keep: expected patterns that fit a node"),
    "text": (lambda data: {"keep": "Conv"}, "keep: expected a sequence of patterns"),
    "no data": (lambda data: {"data": None}, "data: expected batches for the recipe 'static', or random=True"),
    "both": (lambda data: {"random": True}, "random: expected False, if there is data"),
    "no batch": (lambda data: {"data": []}, "data: expected at least one batch"),
    "array": (lambda data: {"data": data[0]}, "data: expected an iterable of batches"),
    "shape": (lambda data: {"data": [data[0][:, :2]]}, r"data[0]['x']: expected float32[?, 3, 16, 16], got float32[2,"),
    "dtype": (lambda data: {"data": [data[0].astype(complex)]}, "expected float32[?, 3, 16, 16], got complex128"),
    "name": (lambda data: {"data": [{"y": data[0]}]}, "data[0]: expected arrays for the inputs ['x'], got without"),
    "count": (lambda data: {"data": [(data[0], data[0])]}, "data[0]: expected 1 arrays, ['x'], got 2"),
    "nan": (lambda data: {"data": [*data, data[0] * np.nan]}, "data[8]['x']: expected finite numbers"),
    "overflow": (lambda data: {"data": [np.full_like(data[0], 2e38)]}, "for which all values of the model are finite"),
    "block of floats": (lambda data: {"recipe": "gptq", "block": 32.0}, "block: expected 16, 32, 64, 128 or 256"),
    "calibrator of another recipe": (
        lambda data: {"recipe": "dynamic", "calibrator": "mse"},
        "calibrator: expected 'minmax', as the recipe 'dynamic' does not use it, got mse",
    ),
    "block of another recipe": (lambda data: {"block": 64}, "block: expected 32, as the recipe 'static' does"),
    "no elements": (lambda data: {"data": [*data, data[0][:0]]}, "data[8]: expected an array with elements, got none"),
    "no patterns": (lambda data: {"keep": None}, "keep: expected a sequence of patterns"),
    "numbers": (lambda data: {"keep": [1]}, "keep: expected a sequence of patterns"),
    "model": (lambda data: {"model": 3}, "model: expected a path, bytes or an onnx.ModelProto, got int"),
    "ragged": (lambda data: {"data": [([[1], [1, 2]],)]}, "data[0]['x']: expected float32[?, 3, 16, 16]"),
    "form": (lambda data: {"form": "codes"}, "form: expected 'qdq' or 'operators'"),
    "form of another recipe": (
        lambda data: {"recipe": "dynamic", "form": "operators"},
        "form: expected 'qdq', as the recipe 'dynamic' does not use it, got operators",
    ),
    "folder": (lambda data: {"out": "/none/model.onnx"}, "out: expected a path in a folder that exists"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_bad_arguments(rng: np.random.Generator, tmp_path: pathlib.Path, case: str) -> None:
    make, text = ARGUMENTS[case]
    data = draw_batches(rng, 2, 3, 16, 16)
    arguments = {"model": make_network(rng), "data": data, "out": tmp_path / "out.onnx", **make(data)}
    with pytest.raises((ValueError, TypeError)) as caught:
        jqonnx.quantize(arguments.pop("model"), arguments.pop("out"), **arguments)
    assert str(caught.value).startswith("jaxquant.onnx.quantize: "), caught.value
    assert text in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_command(
    rng: np.random.Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    jqonnx.save(make_network(rng), "in.onnx")
    images = rng.normal(size=(24, 3, 16, 16)).astype(np.float32)
    np.savez("data.npz", x=images)
    np.save("data.npy", images)
    pathlib.Path("batches_of_a_test.py").write_text(
        "import numpy as np\ndef read():\n    return list(np.load('data.npy').reshape(6, 4, 3, 16, 16))\n"
    )
    sources = (["--data", "data.npz"], ["--data", "data.npy"], ["--data", "batches_of_a_test:read"], ["--random"])
    for source in sources:
        assert main(["quantize", "in.onnx", "out.onnx", *source]) == 0, capsys.readouterr().err
        text = capsys.readouterr().out
        assert "integer     7 Conv" in text
        assert ("random batches" in text) == (source == ["--random"])
        assert jqonnx.load("out.onnx")[0].inputs[0].name == "x"
    options = ["--data", "data.npz", "--form", "operators", "--report", "report.html"]
    assert main(["quantize", "in.onnx", "out.onnx", *options]) == 0
    capsys.readouterr()
    assert "QLinearConv" in [node.op_type for node in onnx.load("out.onnx").graph.node]
    assert pathlib.Path("report.html").read_text().startswith("<!doctype html>")
    for recipe in ("dynamic", "weight_only_int8"):
        assert main(["quantize", "in.onnx", "out.onnx", "--recipe", recipe]) == 0
        assert "none: nothing was compared" in capsys.readouterr().out


def test_a_page_of_the_report(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """The page has a row for each node, says what stays in floats and why, and loads nothing."""
    model = make_network(rng)
    model.graph.output[0].name = model.graph.node[-1].output[0] = "<y & z>"
    report = jqonnx.quantize(model, data=draw_batches(rng, 2, 3, 16, 16), keep=["Add"])
    report.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    body = page.split("<tbody>")[1].split("</tbody>")[0]
    assert body.count("<tr") == len(report.rows) > 7
    for row in report.rows:
        assert f"<td>{html.escape(row.name)}" in body
        assert row.sqnr is None or f"{row.sqnr:.1f}" in body
    assert f"<li>size: {report.bytes_before:,} bytes before, {report.bytes_after:,} after" in page
    assert "<y & z>" not in page
    assert not re.search(r'(?:src|href)="(?!#)|@import|<script', page)
    if importlib.util.find_spec("matplotlib") is not None:
        assert page.count("<svg") == 1
    assert len(page) < 2e6
    with pytest.raises(ValueError, match=r"QuantizationReport.to_html: path: expected a folder that exists"):
        report.to_html(tmp_path / "none" / "page.html")


def test_a_folder_of_images(
    rng: np.random.Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    image = pytest.importorskip("PIL.Image")
    jqonnx.save(make_network(rng), tmp_path / "in.onnx")
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(4):
        image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8)).save(folder / f"{i}.png")
    command = ["quantize", str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx"), "--data", str(folder)]
    assert main([*command, "--mean", "0.5,0.4,0.3", "--std", "0.25"]) == 0
    model = onnx.load(tmp_path / "out.onnx")
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    # 0 is (0 - 0.5) / 0.25 = -2 in the first channel, 255 is (1 - 0.3) / 0.25 = 2.8 in the last.
    assert 0.8 * 4.8 / 255 < arrays["x_scale"] < 1.00001 * 4.8 / 255
    capsys.readouterr()
    (folder / "4.png").write_text("no image")
    assert main(command) == 2
    assert "4.png: expected an image" in capsys.readouterr().err
    (folder / "4.png").unlink()
    for option, text in (
        ("--mean=1,2", "--mean: expected a number, or 3"), ("--std=0", "no --std of 0"), ("--mean=nan", "finite"),
    ):  # fmt: skip
        assert main([*command, option]) == 2
        captured = capsys.readouterr().err
        assert text in captured
        assert captured.count("\n") == 1
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 100)  # Pillow refuses what has twice as many
    assert main(command) == 2
    assert "0.png: expected an image: Image size (600 pixels)" in capsys.readouterr().err


def test_bad_input_on_the_command_line(
    rng: np.random.Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    jqonnx.save(make_network(rng), "in.onnx")
    images = rng.normal(size=(8, 3, 16, 16)).astype(np.float32)
    np.savez("data.npz", x=images)
    np.savez("named.npz", y=images)
    np.savez("narrow.npz", x=images[:, :2])
    np.savez("nan.npz", x=images * np.nan)
    np.savez("more.npz", x=images, y=images)
    np.savez("large.npz", x=images.astype(np.float64) * 1e300)
    pathlib.Path("failing_of_a_test.py").write_text(
        "def fail():\n    yield 1\n    raise RuntimeError('in two\\nlines')\ndef take(x): pass\n"
    )
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    pathlib.Path("text.npz").write_text("no array")
    pathlib.Path("cut.onnx").write_bytes(pathlib.Path("in.onnx").read_bytes()[:1000])
    os.mkfifo("pipe")
    pathlib.Path("pages").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    commands = (
        (["in.onnx", "pipe", "--random"], "out: expected the path of a regular file, got pipe"),
        (["in.onnx", "out.onnx"], "data: expected batches for the recipe 'static'"),
        (["none.onnx", "out.onnx", "--random"], "none.onnx"), (["cut.onnx", "out.onnx", "--random"], "cut.onnx"),
        (["in.onnx", "none/out.onnx", "--random"], "none/out.onnx"),
        (["in.onnx", "out.onnx", "--data", "none.npz"], "none.npz"),
        (["in.onnx", "out.onnx", "--data", "text.npz"], "text.npz"),
        (["in.onnx", "out.onnx", "--data", "data.npz", "--std", "2"], "--mean, --std: expected a folder of images"),
        (["in.onnx", "out.onnx", "--random", "--mean", "2"], "--mean, --std: expected a folder of images as --data"),
        (["in.onnx", "out.onnx", "--data", "named.npz"], "expected arrays for the inputs ['x'], got a file without"),
        (["in.onnx", "out.onnx", "--data", "more.npz"], "got a file with ['y']"),
        (["in.onnx", "out.onnx", "--data", "narrow.npz"], "x: expected float32[?, 3, 16, 16]"),
        (["in.onnx", "out.onnx", "--data", "nan.npz"], "expected finite numbers"),
        (["in.onnx", "out.onnx", "--data", "large.npz"], "expected finite numbers of float32"),
        (["in.onnx", "out.onnx", "--data", "failing_of_a_test:fail"], "fail raised RuntimeError: in two lines"),
        (["in.onnx", "out.onnx", "--data", "failing_of_a_test:take"], "take raised TypeError: take() missing 1"),
        (["in.onnx", "out.onnx", "--data", "no_module_of_a_test:read"], "--data: expected a name that can be imported"),
        (["in.onnx", "out.onnx", "--data", "data.npz", "--keep", "none"], "keep: expected patterns that fit a node"),
        (["in.onnx", "out.onnx", "--random", "--report", "none/page.html"], "--report: expected a path in a folder"),
        (["in.onnx", "out.onnx", "--random", "--report", "pages"], "--report: expected the path of a file, got"),
        (["in.onnx", "out.onnx", "--random", "--report", "out.onnx"], "--report: expected another path than"),
        (["in.onnx", "out.onnx", "--data", "data.npz", "--block", "7"], "block: expected 16, 32"),
    )  # fmt: skip
    for arguments, text in commands:
        assert main(["quantize", *arguments]) == 2, arguments
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1, captured.err
        assert text in captured.err, (arguments, captured.err)
    for arguments in (["in.onnx"], ["in.onnx", "out.onnx", "--recipe", "int8"], ["in.onnx", "o", "--mean", "a"]):
        with pytest.raises(SystemExit) as caught:
            main(["quantize", *arguments])
        assert caught.value.code == 2
        captured = capsys.readouterr().err
        assert captured.count("\n") == 1
        assert "read_numbers" not in captured
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert pathlib.Path("pipe").is_fifo()
