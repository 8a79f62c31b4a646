"""Patterns of codes, loaded, against the model as it is written: scales of any sign and size, and the runtime's errors.

The oracle is onnx's reference implementation of DequantizeLinear, operator, QuantizeLinear, and ONNX Runtime where its
fusions are followed.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from jaxquant import onnx as jqonnx
from jaxquant.onnx.load import fuse, fuse_operators, fused_graph

from ..cases.onnx_models import list_optimized_operators, run_runtime
from ..oracles import onnx_runtime

F = np.float32
CODES = (np.uint8, np.int8)


class Model:
    """A graph in the making, with the arrays that are fed to it."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.feeds: dict[str, np.ndarray] = {}

    def feed(self, array: np.ndarray) -> str:
        name = f"x{len(self.feeds)}"
        self.feeds[name] = array
        return name

    def hold(self, array: Any) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(array), f"c{len(self.constants)}"))
        return self.constants[-1].name

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), [f"{op}{len(self.nodes)}"], **attributes))
        return self.nodes[-1].output[0]

    def affine(self, scale: Any, point: Any) -> list[str]:
        scale = np.asarray(scale, F)
        return [self.hold(scale), self.hold(np.broadcast_to(np.asarray(point, self.dtype), scale.shape))]

    def dequantized(self, codes: np.ndarray, scale: Any, point: Any, **attributes: Any) -> str:
        return self.add("DequantizeLinear", self.feed(codes), *self.affine(scale, point), **attributes)

    def quantized(self, x: str, scale: Any, point: Any, **attributes: Any) -> str:
        return self.add("QuantizeLinear", x, *self.affine(scale, point), **attributes)

    def build(self, output: str, symbolic: bool = False, opset: int = 19) -> Any:
        kind = helper.np_dtype_to_tensor_dtype
        inputs = []
        for name, x in self.feeds.items():
            shape = ["batch", *x.shape[1:]] if symbolic and x.ndim else x.shape
            inputs.append(helper.make_tensor_value_info(name, kind(x.dtype), shape))
        element = {"QuantizeLinear": kind(self.dtype), "ArgMax": TensorProto.INT64}
        elem = next((value for op, value in element.items() if output.startswith(op)), TensorProto.FLOAT)
        outputs = [helper.make_tensor_value_info(output, elem, None)]
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def run_literally(model: Any, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the output of the model as it is written."""
    with np.errstate(all="ignore"):
        outputs: Any = ReferenceEvaluator(model).run(None, dict(feeds))
        return np.asarray(outputs[0])


def run_loaded(model: Any, feeds: Mapping[str, np.ndarray], **options: Any) -> tuple[np.ndarray, Any]:
    """Return the output of the loaded model, and the function."""
    fn, params = jqonnx.load(model, **options)
    return np.asarray(jax.jit(lambda p, x: fn(p, **x))(params, dict(feeds))), fn


def draw_codes(rng: np.random.Generator, dtype: Any, *shape: int) -> np.ndarray:
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


def draw_point(rng: np.random.Generator, dtype: Any) -> int:
    info = np.iinfo(dtype)
    return int(rng.choice(np.array([info.min, info.max, rng.integers(info.min, info.max + 1)])))


IMAGE, MATRIX = (2, 3, 4, 6), (3, 4, 6)
# For each operator: the shapes of its operands, its attributes, its constants, and whether all of its codes are exact.
# A mean, a product and a function of a table may round another way beside ties.
OPERATORS: dict[str, tuple[Sequence[tuple[int, ...]], dict[str, Any], Sequence[np.ndarray], bool]] = {
    "MaxPool": ([IMAGE], {"kernel_shape": [2, 2], "strides": [2, 1], "pads": [1, 0, 0, 1]}, [], True),
    "Relu": ([MATRIX], {}, [], True),
    "ReduceMax": ([MATRIX], {"keepdims": 0}, [np.array([1])], True),
    "ReduceMin": ([MATRIX], {}, [np.array([2])], True),
    "Max": ([MATRIX, MATRIX], {}, [], True),
    "Min": ([MATRIX, MATRIX], {}, [], True),
    "Transpose": ([MATRIX], {"perm": [2, 0, 1]}, [], True),
    "Reshape": ([MATRIX], {}, [np.array([6, 12])], True),
    "Flatten": ([MATRIX], {}, [], True),
    "Unsqueeze": ([MATRIX], {}, [np.array([0])], True),
    "Slice": ([MATRIX], {}, [np.array([1]), np.array([4]), np.array([2])], True),
    "Expand": ([MATRIX], {}, [np.array([2, 3, 4, 6])], True),
    "Gather": ([MATRIX], {"axis": 2}, [np.array([5, 0, 5])], True),
    "Pad": ([MATRIX], {}, [np.array([0, 1, 0, 0, 0, 2])], True),
    "Tile": ([MATRIX], {}, [np.array([1, 2, 1])], True),
    "Concat": ([MATRIX, MATRIX], {"axis": 1}, [], False),
    "Add": ([MATRIX, MATRIX], {}, [], False),
    "Sub": ([MATRIX, MATRIX], {}, [], True),
    "Mul": ([MATRIX, MATRIX], {}, [], False),
    "LeakyRelu": ([MATRIX], {"alpha": 0.3}, [], False),
    "Sigmoid": ([MATRIX], {}, [], False),
    "Softmax": ([MATRIX], {"axis": 1}, [], False),
    "AveragePool": ([IMAGE], {"kernel_shape": [2, 2], "strides": [2, 2]}, [], False),
    "GlobalAveragePool": ([IMAGE], {}, [], False),
}
SCALES = (-0.1, 0.1, 1e-30, -1e-12, -3e8)


def choose_result(op: str, scale: float) -> float:
    """Return a scale for the result of an operator that is not linear."""
    if op == "Softmax":
        return 1 / 256
    return {"Sigmoid": -1 / 200, "Mul": min(max(scale * scale * 100, 1e-36), 1e30)}.get(op, scale)


@pytest.mark.filterwarnings("ignore:ONNX Runtime's optimizations change the value:UserWarning")
@pytest.mark.sample(10)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("op", list(OPERATORS))
def test_scales_of_any_sign_and_size(op: str, scale: float, rng: np.random.Generator) -> None:
    shapes, attributes, constants, is_exact = OPERATORS[op]
    for dtype in CODES:
        model, point = Model(dtype), draw_point(rng, dtype)
        operands = [model.dequantized(draw_codes(rng, dtype, *shape), scale, point) for shape in shapes]
        y = model.add(op, *operands, *map(model.hold, constants), **attributes)
        proto = model.build(model.quantized(y, choose_result(op, scale), point))
        want = run_literally(proto, model.feeds).astype(np.int32)
        for fusions in ("all", "safe", "none"):
            got, _ = run_loaded(proto, model.feeds, fusions=fusions)
            assert np.abs(got - want).max() <= (0 if is_exact else 1), (fusions, dtype)


@pytest.mark.parametrize("op", ["MaxPool", "Relu", "ReduceMax", "Transpose", "Concat", "Add"])
def test_scales_of_channels_with_both_signs(op: str, rng: np.random.Generator) -> None:
    shapes, attributes, constants, is_exact = OPERATORS[op]
    for dtype in CODES:
        model = Model(dtype)
        signs = rng.permutation([-0.1, 0.2, -0.3, 0.1])[: shapes[0][1]]
        operands = [model.dequantized(draw_codes(rng, dtype, *shape), signs, 3, axis=1) for shape in shapes]
        y = model.add(op, *operands, *map(model.hold, constants), **attributes)
        proto = model.build(model.quantized(y, -0.1, 3))
        want = run_literally(proto, model.feeds).astype(np.int32)
        got, _ = run_loaded(proto, model.feeds)
        assert np.abs(got - want).max() <= (0 if is_exact else 1)


@pytest.mark.parametrize("op", ["MaxPool", "Relu", "Softmax", "ReduceMax", "Transpose"])
def test_scales_that_are_inputs(op: str, rng: np.random.Generator) -> None:
    """A scale that is unknown when the model is loaded may be negative."""
    shapes, attributes, constants, is_exact = OPERATORS[op]
    for scale in (0.1, -0.1, 1e-30):
        model = Model(np.uint8)
        codes, given = model.feed(draw_codes(rng, np.uint8, *shapes[0])), model.feed(np.asarray(scale, F))
        point = model.hold(np.uint8(0))
        x = model.add("DequantizeLinear", codes, given, point)
        y = model.add(op, x, *map(model.hold, constants), **attributes)
        last = model.hold(F(1 / 256)) if op == "Softmax" else given
        proto = model.build(model.add("QuantizeLinear", y, last, point))
        want = run_literally(proto, model.feeds).astype(np.int32)
        got, _ = run_loaded(proto, model.feeds)
        assert np.abs(got - want).max() <= (0 if is_exact else 1)


@pytest.mark.parametrize("op", ["ArgMax", "TopK"])
def test_the_largest_value_of_codes(op: str, rng: np.random.Generator) -> None:
    model = Model(np.uint8)
    x = model.dequantized(rng.permutation(24).astype(np.uint8).reshape(4, 6), -0.1, 7)
    if op == "ArgMax":
        y = model.add("ArgMax", x, axis=1)
    else:
        y = "largest"
        model.nodes.append(helper.make_node("TopK", [x, model.hold(np.array([3]))], [y, "indices"], axis=1))
    proto = model.build(y)
    np.testing.assert_array_equal(run_loaded(proto, model.feeds)[0], run_literally(proto, model.feeds))


def test_where_of_codes(rng: np.random.Generator) -> None:
    for scale in SCALES:
        model = Model(np.int8)
        parts = [model.dequantized(draw_codes(rng, np.int8, 5, 7), s, 3) for s in (scale, -2 * scale)]
        y = model.add("Where", model.hold(rng.random((5, 7)) < 0.5), *parts)
        proto = model.build(model.quantized(y, scale, 3))
        want = run_literally(proto, model.feeds).astype(np.int32)
        assert np.abs(run_loaded(proto, model.feeds)[0] - want).max() <= 1


@pytest.mark.parametrize("dtype", CODES)
def test_clips_before_tiny_and_negative_scales(dtype: Any, rng: np.random.Generator) -> None:
    """Clip(-3 s, 100 s) has codes of its own, however small s is."""
    for scale in (1e-30, 1e-12, 1e-8, 1e-7, 0.5, -1e-12, -0.1, 1e20):
        info = np.iinfo(dtype)
        model = Model(dtype)
        x = model.dequantized(np.arange(256, dtype=np.uint8).view(dtype), scale, 0)
        low, high = sorted((F(-3 * scale), F(100 * scale)))
        y = model.add("Clip", x, model.hold(low), model.hold(high))
        proto = model.build(model.quantized(y, scale, info.min + 20))
        want = run_literally(proto, model.feeds)
        for fusions in ("all", "safe", "none"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", jqonnx.FusionWarning)
                got, _ = run_loaded(proto, model.feeds, fusions=fusions)
            np.testing.assert_array_equal(got, want)


def test_a_redundant_clip_changes_no_code(rng: np.random.Generator) -> None:
    """The rule is exact: bounds next to halves of steps, scales of all magnitudes and both signs."""
    found = []
    for dtype, _ in itertools.product(CODES, range(300)):
        info = np.iinfo(dtype)
        scale, point = F(10.0 ** rng.uniform(-30, 10) * rng.choice([-1, 1])), draw_point(rng, dtype)
        ends = np.array([info.min - point, info.max - point]) + rng.choice([-0.5, 0, 0.5, 3, -3], 2)
        bounds = sorted(F(end * scale) for end in ends)
        low, high = (np.nextafter(b, F(rng.choice(np.array([-np.inf, np.inf, b])))) for b in bounds)
        steps = np.arange(-300, 301, 0.25).astype(F) * scale
        x = np.concatenate([steps, [low, high], np.nextafter([low, high], F(0)), [-np.inf, np.inf]]).astype(F)

        def encode(x: np.ndarray, scale: Any = scale, point: int = point, info: Any = info) -> np.ndarray:
            return np.clip(np.rint(x / scale).astype(np.float64) + point, info.min, info.max)

        with np.errstate(over="ignore"):
            same = bool(np.all(encode(np.clip(x, low, high)) == encode(x)))
        assert fuse.is_clip_redundant((float(low), float(high)), scale, np.asarray(point, dtype)) == same
        found.append(same)
    assert 0 < np.mean(found) < 1


def test_scales_that_do_not_give_codes_back(rng: np.random.Generator) -> None:
    """Values of 255 steps overflow, or are all 0: then a pair of quantizations changes codes."""
    for scale in (1e37, 3e38, 0.0):
        model = Model(np.uint8)
        x = model.dequantized(draw_codes(rng, np.uint8, *MATRIX), scale, 100)
        proto = model.build(model.quantized(model.add("Transpose", x), scale, 100))
        got, fn = run_loaded(proto, model.feeds)
        if scale:
            with np.errstate(over="ignore"):
                values = (model.feeds["x0"].astype(F) - F(100)) * F(scale)
            want = np.clip(np.rint(values / F(scale)).astype(np.float64) + 100, 0, 255)
            np.testing.assert_array_equal(got, want.T)
        assert [node.op for node in fn.graph.nodes] == ["DequantizeLinear", "Transpose", "QuantizeLinear"]


def test_every_fused_operator_has_a_need() -> None:
    fused = {*fused_graph.MOVING, *fused_graph.SANDWICHED, *fuse_operators._UNARY, *fuse_operators._BINARY}
    assert fused | {"Conv", "MatMul", "Gemm", "Concat", "Where", "DequantizeLinear"} == set(fused_graph.NEEDS)


def make_contraction(
    rng: np.random.Generator, op: str, *, bias: np.ndarray | None = None, bias_scale: Any = None, bias_point: int = 0,
    x_scale: float = 1e-3, w_scale: Any = 1e-2, axis: int | None = None, y_scale: float = 0.002, trans: int = 0,
) -> Model:  # fmt: skip
    """Return a model of a Conv, Gemm or MatMul of 4 features with weights of 7 bits: it is exact everywhere."""
    model = Model(np.uint8)
    shape = {"Conv": (2, 4, 3, 3)}.get(op, (6, 4))
    x = model.dequantized(draw_codes(rng, np.uint8, *shape), x_scale, 3)
    codes = rng.integers(-63, 64, (4, 4, 1, 1) if op == "Conv" else (4, 4)).astype(np.int8)
    w_scale = np.asarray(w_scale, F)
    parts = [model.hold(w_scale), model.hold(np.zeros(w_scale.shape, np.int8))]
    w = model.add("DequantizeLinear", model.hold(codes), *parts, **({} if axis is None else {"axis": axis}))
    inputs = [x, w]
    if bias is not None and bias_scale is None:
        inputs.append(model.hold(bias.astype(F)))
    elif bias is not None:
        scale = np.asarray(bias_scale, F)
        point = model.hold(np.full(scale.shape, bias_point, np.int32))
        along = {"axis": 0} if scale.ndim else {}
        inputs.append(
            model.add("DequantizeLinear", model.hold(bias.astype(np.int32)), model.hold(scale), point, **along)
        )
    y = model.add(op, *inputs, **({"transB": 1} if trans else {}))
    model.quantized(y, y_scale, 100)
    return model


BIAS = np.array([10000, 500, -5000, 100])
FOUR = np.array([0.01, 0.02, 0.03, 0.04])
SMALL: dict[str, Any] = {"x_scale": 1e-4, "w_scale": 1e-3, "y_scale": 1e-5}
# Contractions that ONNX Runtime computes otherwise than the model says, and what the warning says of them.
FOLLOWED: dict[str, tuple[str, dict[str, Any], str]] = {
    "conv, small scales": ("Conv", {"bias": BIAS, "bias_scale": 2e-7, **SMALL}, r"adds bias\[0\] = 0.002; .* 0.001,"),
    "conv, one percent": (
        "Conv", {"bias": BIAS, "bias_scale": 1.008e-5, "y_scale": 1e-4}, r"adds bias\[0\] = 0.1008; .* adds 0.1,"
    ),
    "gemm": ("Gemm", {"bias": BIAS, "bias_scale": 3e-5}, r"adds bias\[0\] = 0.3; ONNX Runtime adds 0.1,"),
    "gemm, zero point": ("Gemm", {"bias": BIAS, "bias_scale": 1e-5, "bias_point": 5000}, r"adds bias\[\d\]"),
    "conv, channels": ("Conv", {"w_scale": FOUR, "axis": 1}, "scales of w are along its dimension 1; .* dimension 0"),
    "gemm, channels": ("Gemm", {"w_scale": FOUR, "axis": 0}, "scales of w are along its dimension 0; .* dimension 1"),
    "gemm, transposed": ("Gemm", {"w_scale": FOUR, "axis": 1, "trans": 1}, "dimension 1; .* dimension 0"),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", list(FOLLOWED))
def test_contractions_that_the_runtime_computes_otherwise(
    name: str, fixed_rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    op, options, text = FOLLOWED[name]
    model = make_contraction(fixed_rng, op, **options)
    proto = model.build(model.nodes[-1].output[0])
    literal = run_literally(proto, model.feeds).astype(np.int32)
    with pytest.warns(jqonnx.FusionWarning, match=text) as caught:
        got, fn = run_loaded(proto, model.feeds)
    assert len(caught) == 1
    assert [d.is_followed for d in fn.deviations] == [True]
    np.testing.assert_array_equal(got, run_runtime(proto, model.feeds)[0])
    assert np.abs(got - literal).max() > 1
    for fusions in ("safe", "none"):
        got, fn = run_loaded(proto, model.feeds, fusions=fusions)
        assert fn.deviations == ()
        assert np.abs(got - literal).max() <= 1
    assert any(op.startswith(("QLinearConv", "QGemm")) for op in list_optimized_operators(proto, tmp_path))


# Contractions that ONNX Runtime does not fuse, or in which its int32 overflows.
LITERAL: dict[str, tuple[str, dict[str, Any], str]] = {
    "matmul, channels": ("MatMul", {"w_scale": FOUR, "axis": 0}, ""),
    "conv, zero point": ("Conv", {"bias": BIAS, "bias_scale": 1e-5, "bias_point": 5000}, ""),
    "conv, large bias": ("Conv", {"bias": np.array([1e6, 1, -1e6, 0])}, r"adds bias\[0\] = 1e\+06; .* overflow"),
    "conv, dead channel": (
        "Conv", {"bias": np.full(4, 0.3), "w_scale": [1e-12, 0.01, 0.01, 0.01], "axis": 0}, "overflow"
    ),
    "gemm, large bias": ("Gemm", {"bias": np.array([1e6, 1, -1e6, 0])}, "overflow"),
    "gemm, largest int32": (
        "Gemm", {"bias": np.array([2**31 - 1, 0, -(2**31), 5]), "bias_scale": 1e-5}, "sums overflow"
    ),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", list(LITERAL))
def test_contractions_that_are_not_fused(name: str, rng: np.random.Generator) -> None:
    op, options, text = LITERAL[name]
    model = make_contraction(rng, op, **options)
    proto = model.build(model.nodes[-1].output[0])
    literal = run_literally(proto, model.feeds).astype(np.int32)
    for fusions in ("all", "safe", "none"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got, fn = run_loaded(proto, model.feeds, fusions=fusions)
        assert np.abs(got - literal).max() <= 1
        if text and fusions == "all":
            (found,) = caught
            assert issubclass(found.category, jqonnx.FusionWarning)
            assert "this function computes what the model says" in str(found.message)
            assert [d.is_followed for d in fn.deviations] == [False]
        else:
            assert not caught


@pytest.mark.parametrize("op", ["Conv", "Gemm"])
def test_float_biases_with_a_negative_scale(op: str, rng: np.random.Generator) -> None:
    for bias, text in ((BIAS * 1e-5, ""), (BIAS * 1e2, "overflows")):
        model = make_contraction(rng, op, bias=bias, x_scale=-1e-3)
        proto = model.build(model.nodes[-1].output[0])
        want = run_literally(proto, model.feeds).astype(np.int32)
        with pytest.warns(jqonnx.FusionWarning, match=text) if text else contextlib.nullcontext():
            got, _ = run_loaded(proto, model.feeds)
        assert np.abs(got - want).max() <= 1


@pytest.mark.parametrize("op", ["Gemm", "MatMul"])
def test_products_before_a_relu(op: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """A Relu before a higher zero point keeps ONNX Runtime from fusing what is before it."""
    model = make_contraction(rng, op)
    last = model.nodes.pop()
    model.quantized(model.add("Relu", last.input[0]), 0.002, 100)
    proto = model.build(model.nodes[-1].output[0])
    got, fn = run_loaded(proto, model.feeds)
    assert np.abs(got - run_literally(proto, model.feeds).astype(np.int32)).max() <= 1
    assert op in [node.op for node in fn.graph.nodes]
    assert not any("QGemm" in name or "Integer" in name for name in list_optimized_operators(proto, tmp_path))


def test_blocks_of_weights_are_not_fused(rng: np.random.Generator) -> None:
    """Scales of blocks of rows fit no kernel; the model could not be loaded."""
    for op in ("MatMul", "Gemm"):
        model = make_contraction(rng, op, w_scale=rng.uniform(0.01, 0.02, (2, 4)), axis=0)
        model.nodes[1].attribute.append(helper.make_attribute("block_size", 2))
        proto = model.build(model.nodes[-1].output[0], opset=21)
        want = run_runtime(proto, model.feeds, "none")[0].astype(np.int32)
        assert np.abs(run_loaded(proto, model.feeds)[0] - want).max() <= 1


def test_float_results_of_other_channels(rng: np.random.Generator) -> None:
    """MatMul without QuantizeLinear, which ONNX Runtime fuses whatever the dimension of the scales is."""
    model = make_contraction(rng, "MatMul", w_scale=FOUR, axis=0)
    model.nodes.pop()
    proto = model.build(model.nodes[-1].output[0])
    with pytest.warns(jqonnx.FusionWarning, match="along its dimension 0"):
        got, _ = run_loaded(proto, model.feeds)
    np.testing.assert_allclose(got, run_runtime(proto, model.feeds)[0], rtol=1e-6)
    safe, _ = run_loaded(proto, model.feeds, fusions="safe")
    np.testing.assert_allclose(safe, run_literally(proto, model.feeds), rtol=1e-5, atol=1e-7)


def make_pool(rng: np.random.Generator, length: int, **attributes: Any) -> Model:
    model = Model(np.uint8)
    x = model.dequantized(draw_codes(rng, np.uint8, 2, 3, length, length), 0.1, 3)
    model.quantized(model.add("AveragePool", x, kernel_shape=[3, 3], strides=[2, 2], **attributes), 0.1, 3)
    return model


def test_windows_beyond_the_padding(rng: np.random.Generator) -> None:
    """With ceil_mode and count_include_pad, ONNX Runtime divides by the size of the window."""
    model = make_pool(rng, 6, ceil_mode=1, count_include_pad=1)
    proto = model.build(model.nodes[-1].output[0])
    literal = run_literally(proto, model.feeds).astype(np.int32)
    with pytest.warns(
        jqonnx.FusionWarning, match="AveragePool: divides .* by the number .*; ONNX Runtime divides it by 9"
    ):
        got, _ = run_loaded(proto, model.feeds)
    np.testing.assert_array_equal(got, run_runtime(proto, model.feeds)[0])
    assert np.abs(got - literal).max() > 1
    safe, _ = run_loaded(proto, model.feeds, fusions="safe")
    assert np.abs(safe - literal).max() <= 1


@pytest.mark.parametrize(
    ("length", "attributes"),
    [
        (7, {"ceil_mode": 1, "count_include_pad": 1}),
        (6, {"ceil_mode": 1, "count_include_pad": 1, "pads": [1, 1, 0, 0]}),
        (6, {"ceil_mode": 1}),
        (6, {"count_include_pad": 1, "pads": [1, 1, 1, 1]}),
    ],
)
def test_windows_within_the_padding(length: int, attributes: dict[str, Any], rng: np.random.Generator) -> None:
    model = make_pool(rng, length, **attributes)
    proto = model.build(model.nodes[-1].output[0])
    literal = run_literally(proto, model.feeds).astype(np.int32)
    got, _ = run_loaded(proto, model.feeds)  # without a warning
    assert np.abs(got - literal).max() <= 1


def test_windows_of_unknown_lengths(rng: np.random.Generator) -> None:
    model = make_pool(rng, 7, ceil_mode=1, count_include_pad=1)
    with pytest.warns(jqonnx.FusionWarning, match="a last window that reaches beyond the padding"):
        jqonnx.load(model.build(model.nodes[-1].output[0], symbolic=True))


def test_softmax_with_coarse_steps(rng: np.random.Generator) -> None:
    """The factor of QLinearSoftmax is an integer: 1 for 1.3."""
    for y_scale, is_exact in (
        (0.77, False),
        (0.3, False),
        (-0.08, False),
        (1 / 256, True),
        (0.5, True),
        (1 / 300.7, True),
    ):
        model = Model(np.uint8)
        x = model.dequantized(draw_codes(rng, np.uint8, 40, 3), 0.02, 3)
        proto = model.build(model.quantized(model.add("Softmax", x, axis=-1), y_scale, 7))
        literal = run_literally(proto, model.feeds).astype(np.int32)
        if is_exact:
            got, fn = run_loaded(proto, model.feeds)
            assert fn.deviations == ()
            assert np.abs(got - literal).max() <= 1
            continue
        with pytest.warns(jqonnx.FusionWarning, match=r"multiplies by 1 / y_scale = .*; ONNX Runtime by -?\d+$"):
            got, _ = run_loaded(proto, model.feeds)
        if onnx_runtime.VERSION >= (1, 32):
            np.testing.assert_array_equal(got, run_runtime(proto, model.feeds)[0])
        safe, _ = run_loaded(proto, model.feeds, fusions="safe")
        np.testing.assert_array_equal(safe, literal)


def test_a_relu_that_the_runtime_drops(rng: np.random.Generator) -> None:
    """ONNX Runtime drops a Relu before the lowest zero point also with a negative scale."""
    model = Model(np.uint8)
    x = model.dequantized(draw_codes(rng, np.uint8, 40), -0.1, 100)
    proto = model.build(model.quantized(model.add("Relu", x), -0.1, 0))
    literal = run_literally(proto, model.feeds)
    with pytest.warns(
        jqonnx.FusionWarning, match=r"Relu: cuts values off at 0 .*; ONNX Runtime drops it \(this function"
    ):
        got, _ = run_loaded(proto, model.feeds)
    np.testing.assert_array_equal(got, literal)
    assert (run_runtime(proto, model.feeds)[0] != literal).any()


def test_training_of_a_maximum_of_codes(rng: np.random.Generator) -> None:
    """A MaxPool of codes takes the largest code, not the code of the largest value if the scale is negative."""
    for scale in (0.1, -0.1):
        model = Model(np.uint8)
        name = model.feed(rng.normal(size=(1, 1, 4, 4)).astype(F))
        y = model.add("MaxPool", model.quantized(model.add("Tanh", name), scale, 128), kernel_shape=[2, 2])
        proto = model.build(model.add("DequantizeLinear", y, *model.affine(scale, 128)))
        if scale < 0:
            with pytest.raises(jqonnx.ModelError, match="codes of QuantizeLinear"):
                jqonnx.load(proto, trainable=True)
            continue
        fn, params = jqonnx.load(proto, trainable=True)
        np.testing.assert_allclose(fn(params, **model.feeds), run_literally(proto, model.feeds), atol=1e-6)


def test_wrong_fusions() -> None:
    model = Model(np.uint8)
    y = model.add("Relu", model.dequantized(np.zeros(3, np.uint8), 0.1, 0))
    with pytest.raises(ValueError, match=r"onnx\.load: fusions: expected 'all' or 'safe' or 'none', got 'literal'"):
        jqonnx.load(model.build(y), fusions="literal")
