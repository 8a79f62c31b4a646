"""Loops without iterations, and dimensions of length 0, beside ONNX Runtime."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from jaxquant import onnx as jqonnx

from ..cases.onnx_models import run_runtime

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
info = helper.make_tensor_value_info


def make_model(nodes: Any, inputs: Any, outputs: Any, constants: dict[str, Any]) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


def make_loop(trips: int | None, condition: bool | None, declared: Any) -> onnx.ModelProto:
    """Return a model with a loop that stacks floats [2, 3] and shapes, which are then joined with other arrays."""
    nodes = [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Add", ["v", "one"], ["w"])]
    nodes += [helper.make_node("Identity", ["w"], ["s"]), helper.make_node("Shape", ["v"], ["t"])]
    outputs = [info("d", BOOL, []), info("w", FLOAT, None), info("s", FLOAT, declared), info("t", INT, [2])]
    inputs = [info("i", INT, []), info("c", BOOL, []), info("v", FLOAT, None)]
    body = helper.make_graph(nodes, "b", inputs, outputs)
    constants: dict[str, Any] = {"one": np.float32(1), "more": np.array([[7, 8]])}
    names = ["trips", "condition" if condition is not None else ""]
    constants.update({} if condition is None else {"condition": condition})
    constants.update({} if trips is None else {"trips": np.int64(trips)})
    loop = helper.make_node("Loop", [*names, "x"], ["y", "floats", "shapes"], body=body)
    joined = [helper.make_node("Concat", ["floats", "z"], ["r"], axis=0)]
    joined.append(helper.make_node("Concat", ["shapes", "more"], ["q"], axis=0))
    given = [info("x", FLOAT, ["a", "b"]), info("z", FLOAT, ["n", "a", "b"])]
    given += [info("trips", INT, [])] if trips is None else []
    results = [info("y", FLOAT, None), info("r", FLOAT, None), info("q", INT, None), info("shapes", INT, None)]
    return make_model([loop, *joined], given, results, constants)


@pytest.mark.parametrize("declared", [[2, 3], ["a", 3], [None, None], [-1, 3]])
@pytest.mark.parametrize(
    ("trips", "condition"), [(0, None), (0, True), (3, False), (-1, None), (None, None), (2, None)]
)
def test_a_loop_without_iterations_has_the_declared_outputs(
    trips: int | None, condition: bool | None, declared: Any, rng: np.random.Generator
) -> None:
    model = make_loop(trips, condition, declared)
    feeds = {"x": rng.normal(size=(2, 3)).astype(np.float32), "z": rng.normal(size=(2, 2, 3)).astype(np.float32)}
    known = {} if trips is not None else {"trips": np.asarray(0)}
    fn, params = jqonnx.load(model)
    results = jax.jit(lambda p, values: fn(p, **values, **known))(params, feeds)
    for actual, expected in zip(results, run_runtime(model, {**feeds, **known}), strict=True):
        np.testing.assert_array_equal(actual, expected)
        assert actual.dtype == (np.int32 if expected.dtype == np.int64 else expected.dtype)


def test_the_result_of_no_iterations_can_be_a_shape() -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Identity", ["i"], ["s"])],
        "b", [info("i", INT, []), info("c", BOOL, [])], [info("d", BOOL, []), info("s", INT, [])],
    )  # fmt: skip
    nodes = [helper.make_node("Loop", ["trips", ""], ["numbers"], body=body)]
    nodes += [helper.make_node("Concat", ["numbers", "shape"], ["all"], axis=0)]
    nodes += [helper.make_node("Expand", ["x", "all"], ["y"])]
    constants = {"trips": np.int64(0), "shape": np.array([3, 2])}
    fn, params = jqonnx.load(make_model(nodes, [info("x", FLOAT, [2])], [info("y", FLOAT, None)], constants))
    assert jax.jit(fn)(params, np.ones(2, np.float32)).shape == (3, 2)


def test_an_output_whose_shape_nothing_tells_is_named() -> None:
    """The state does not fit the body, which never runs."""
    for declared, expected in (([4], (0, 4)), (["n"], (0, 0)), (None, None)):
        nodes = [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("MatMul", ["v", "w"], ["s"])]
        outputs = [info("d", BOOL, []), info("v", FLOAT, None), info("s", FLOAT, declared)]
        inputs = [info("i", INT, []), info("c", BOOL, []), info("v", FLOAT, None)]
        body = helper.make_graph(nodes, "b", inputs, outputs)
        loop = helper.make_node("Loop", ["trips", "", "x"], ["y", "s0"], body=body)
        constants = {"trips": np.int64(0), "w": np.ones((3, 4), np.float32)}
        model = make_model([loop], [info("x", FLOAT, [2])], [info("s0", FLOAT, None)], constants)
        x = np.ones(2, np.float32)
        if expected is None:
            with pytest.raises(jqonnx.ModelError, match=r"is neither declared nor can it be found: .*MatMul"):
                jqonnx.load(model)
        else:
            fn, params = jqonnx.load(model)
            assert fn(params, x).shape == expected


def make_while(limit: int | None, with_condition: bool) -> onnx.ModelProto:
    """Return a model that doubles x until its sum is 100 or more."""
    nodes = [helper.make_node("Add", ["v", "v"], ["w"]), helper.make_node("ReduceSum", ["w"], ["t"], keepdims=0)]
    nodes += [helper.make_node("Less", ["t", "hundred"], ["d"])]
    outputs = [info("d", BOOL, []), info("w", FLOAT, [3])]
    body = helper.make_graph(nodes, "b", [info("i", INT, []), info("c", BOOL, []), info("v", FLOAT, [3])], outputs)
    constants: dict[str, Any] = {"hundred": np.float32(100), "yes": np.asarray(True)}
    constants.update({} if limit is None else {"limit": np.int64(limit)})
    names = ["" if limit is None else "limit", "yes" if with_condition else ""]
    loop = helper.make_node("Loop", [*names, "x"], ["y"], body=body)
    return make_model([loop], [info("x", FLOAT, [3])], [info("y", FLOAT, [3])], constants)


@pytest.mark.parametrize("limit", [None, 2, 2**63 - 1])
def test_a_condition_of_data_ends_a_loop_in_a_compiled_program(limit: int | None) -> None:
    """Exporters write the largest int64 as trip count where the condition ends the loop."""
    model, x = make_while(limit, True), np.array([1, 2, 0.5], np.float32)
    fn, params = jqonnx.load(model)
    np.testing.assert_array_equal(jax.jit(fn)(params, x), run_runtime(model, {"x": x})[0])
    if limit is not None:
        model = make_while(limit, False)
        fn, params = jqonnx.load(model)
        np.testing.assert_array_equal(jax.jit(fn)(params, x), run_runtime(model, {"x": x})[0])


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


_RNG = np.random.default_rng(0)
WEIGHTS, KERNEL = (_RNG.normal(size=shape).astype(np.float32) for shape in ((3, 4), (5, 2, 3, 3)))
SCALE = np.float32(0.1)
# Operator, inputs, constants, attributes.
EMPTY: list[tuple[str, list[Any], list[Any], dict[str, Any]]] = [
    *(
        (f"Reduce{name}", [zeros(0, 3)], [numbers(axis)], {"keepdims": axis})
        for name in ("Sum", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
        for axis in (0, 1)
    ),
    *((op, [zeros(0, 3)], [], {"axis": 1}) for op in ("ArgMax", "Softmax", "LogSoftmax", "Hardmax")),
    *((op, [zeros(3, 0)], [], {"axis": 1}) for op in ("Softmax", "LogSoftmax", "Hardmax")),
    ("Concat", [zeros(0, 3), WEIGHTS[:, :3]], [], {"axis": 0}),
    ("Concat", [zeros(3, 0), WEIGHTS], [], {"axis": 1}),
    # Of another shape, but without elements: ONNX Runtime leaves it out.
    ("Concat", [zeros(0, 9), WEIGHTS], [], {"axis": 0}),
    ("Concat", [WEIGHTS, zeros(7, 0)], [], {"axis": 1}),
    ("Concat", [zeros(0, 0), zeros(0, 3)], [], {"axis": 0}),
    ("Split", [zeros(0, 4)], [numbers(1, 3)], {"axis": 1}),
    ("Split", [zeros(3, 4)], [numbers(0, 4)], {"axis": 1}),
    ("MatMul", [zeros(0, 3)], [WEIGHTS], {}),
    ("MatMul", [zeros(2, 0), zeros(0, 3)], [], {}),
    ("Conv", [zeros(0, 2, 5, 5)], [KERNEL], {}),
    ("MaxPool", [zeros(0, 2, 5, 5)], [], {"kernel_shape": [2, 2]}),
    ("GlobalAveragePool", [zeros(0, 2, 5, 5)], [], {}),
    ("LayerNormalization", [zeros(0, 4)], [WEIGHTS[0], WEIGHTS[1]], {}),
    ("TopK", [zeros(0, 3)], [numbers(2)], {}),
    ("TopK", [zeros(2, 3)], [numbers(0)], {}),
    ("Gather", [WEIGHTS, numbers()], [], {}),
    ("GatherND", [WEIGHTS, np.zeros((0, 2), np.int64)], [], {}),
    ("ScatterND", [WEIGHTS, np.zeros((0, 1), np.int64), zeros(0, 4)], [], {}),
    ("CumSum", [zeros(0, 3)], [np.int64(0)], {"exclusive": 1}),
    ("CumSum", [zeros(2, 0)], [np.int64(1)], {"exclusive": 1, "reverse": 1}),
    ("Reshape", [zeros(0, 3)], [numbers(-1, 3)], {}),
    ("Reshape", [zeros(0, 3)], [numbers(3, 0)], {"allowzero": 1}),
    ("Expand", [zeros(1, 3)], [numbers(0, 3)], {}),
    ("Tile", [WEIGHTS], [numbers(0, 2)], {}),
    ("Pad", [zeros(0, 3)], [numbers(1, 0, 1, 0)], {}),
    ("Slice", [WEIGHTS], [numbers(3), numbers(9)], {}),
    ("Einsum", [zeros(0, 3), WEIGHTS], [], {"equation": "ij,jk->ik"}),
    ("Add", [zeros(0, 4), WEIGHTS[:1]], [], {}),
    ("QuantizeLinear", [zeros(0, 3)], [SCALE, np.uint8(3)], {}),
    ("DequantizeLinear", [zeros(0, 3).astype(np.uint8)], [SCALE, np.uint8(3)], {}),
    ("QLinearMatMul", [zeros(0, 3).astype(np.uint8)],
     [SCALE, np.uint8(3), np.ones((3, 2), np.int8), SCALE, np.int8(0), SCALE, np.uint8(3)], {}),
]  # fmt: skip


def make_single(op: str, inputs: list[Any], constants: list[Any], attributes: dict[str, Any]) -> onnx.ModelProto:
    names = [f"i{i}" for i in range(len(inputs) + len(constants))]
    kind = helper.np_dtype_to_tensor_dtype
    infos = [info(n, kind(x.dtype), [None] * x.ndim) for n, x in zip(names, inputs, strict=False)]
    outputs = [f"y{i}" for i in range({"TopK": 2, "Split": 2}.get(op, 1))]
    values = [info(name, FLOAT, None) for name in outputs]
    for value in values:
        value.ClearField("type")
    held = dict(zip(names[len(inputs) :], constants, strict=True))
    return make_model([helper.make_node(op, names, outputs, **attributes)], infos, values, held)


def test_lengths_of_0_are_those_of_the_runtime() -> None:
    """One compiled program for all operators."""
    functions, expected, arguments = [], [], []
    for op, inputs, constants, attributes in EMPTY:
        model = make_single(op, inputs, constants, attributes)
        feeds = {f"i{i}": x for i, x in enumerate(inputs)}
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        expected.append(session.run(None, feeds))
        functions.append(jqonnx.load(model))
        arguments.append(inputs)
    results = jax.jit(lambda xs: [fn(p, *x) for (fn, p), x in zip(functions, xs, strict=True)])(arguments)
    for (op, inputs, *_), actual, wanted in zip(EMPTY, results, expected, strict=True):
        for y, z in zip(actual if isinstance(actual, tuple) else (actual,), wanted, strict=True):
            assert y.shape == z.shape, (op, [x.shape for x in inputs])
            np.testing.assert_allclose(y, z, rtol=1e-6, err_msg=op)


def test_log_sum_exp_of_integers_is_an_integer() -> None:
    model = make_single("ReduceLogSumExp", [np.array([[1, 9]], np.int32)], [numbers(1)], {})
    fn, params = jqonnx.load(model)
    assert fn(params, np.array([[1, 9]], np.int32)).dtype == np.int32
