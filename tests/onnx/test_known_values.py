"""Arithmetic on known values stays known: each operator returns numbers that can be a shape under jax.jit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from jaxquant import onnx as jqonnx
from jaxquant.onnx.load.graph import OPERATORS

from .node_tests import collect_cases, compare, read_value

LARGE = 2**40


class Graph:
    """A graph of int64 constants and of what is computed of them."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.functions: list[Any] = []

    def hold(self, value: Any, dtype: Any = np.int64) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def add(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"t{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def build(self, outputs: list[str], inputs: Any = ()) -> onnx.ModelProto:
        values = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs]
        for value in values:
            value.ClearField("type")
        graph = helper.make_graph(self.nodes, "g", list(inputs), values, self.constants)
        domains = [helper.make_opsetid("", 21), *([helper.make_opsetid("own", 1)] if self.functions else [])]
        return helper.make_model(graph, opset_imports=domains, ir_version=10, functions=self.functions)

    def use_as_shape(self, value: str, expected: Any) -> str:
        """Return the name of an array with lengths of 1 where a value is the expected one, and 0 elsewhere."""
        expected = np.asarray(expected)
        same = self.add("Equal", value, self.hold(expected, expected.dtype))
        flat = self.add("Reshape", self.add("Cast", same, to=TensorProto.INT64), self.hold([-1]))
        return self.add("ConstantOfShape", flat)


def check_shape(model: onnx.ModelProto, *inputs: Any) -> None:
    """Raise unless a model's result, under jax.jit, has lengths of 1 only, as `use_as_shape` makes them."""
    fn, params = jqonnx.load(model)
    result = jax.jit(fn)(params, *inputs)
    assert set(result.shape) == {1}, result.shape


NUMBERS = [7, -7, LARGE, -LARGE - 1, 0]
DIVISORS = [-2, 3, 7, 3, -5]
# What exporters write between Shape and the operators that take a shape, on numbers that int32 does not hold.
OPERATIONS: list[tuple[str, list[Any], dict[str, Any]]] = [
    *((op, [NUMBERS, DIVISORS], {}) for op in ("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Equal", "Less")),
    ("Mod", [NUMBERS, DIVISORS], {"fmod": 1}),
    ("Pow", [[3, -2, 2, 1, -1, -1, 2], [39, 3, 40, -2, -3, -2, -1]], {}),
    ("Pow", [[10, 2**20], np.array([11, 2], np.float32)], {}),
    *((op, [NUMBERS], {}) for op in ("Neg", "Abs", "Sign", "Identity", "Relu")),
    *((op, [np.array([-2.5, 1.5, 3.0], np.float32)], {}) for op in ("Floor", "Ceil", "Round", "Neg")),
    ("Sqrt", [np.array([9.0, 2.25], np.float32)], {}),
    ("Cast", [np.array([-2.7, 2.7, 1e10], np.float32)], {"to": TensorProto.INT64}),
    ("Cast", [NUMBERS], {"to": TensorProto.DOUBLE}),
    ("Cast", [NUMBERS], {"to": TensorProto.BOOL}),
    ("Where", [np.array([True, False, True, False, True]), NUMBERS, DIVISORS], {}),
    ("Clip", [NUMBERS, np.int64(-9), np.int64(2**35)], {}),
    ("Not", [np.array([True, False])], {}),
    ("And", [np.array([True, False]), np.array([True, True])], {}),
    ("Range", [np.int64(LARGE + 9), np.int64(LARGE), np.int64(-4)], {}),
    ("Gather", [NUMBERS, [-1, 2]], {}),
    ("GatherElements", [NUMBERS, [3, 0]], {}),
    ("GatherND", [NUMBERS, [[2], [3]]], {}),
    ("ScatterND", [NUMBERS, [[1], [4]], [LARGE, 3]], {}),
    ("ScatterND", [NUMBERS, [[1], [1]], [LARGE, 3]], {"reduction": "add"}),
    ("ScatterElements", [NUMBERS, [1, -1], [LARGE, 3]], {}),
    ("Slice", [NUMBERS, [-2], [-6], [0], [-2]], {}),
    ("Concat", [NUMBERS, DIVISORS], {"axis": 0}),
    ("Expand", [[LARGE], [2, 3]], {}),
    ("Tile", [[LARGE, 1], [2]], {}),
    ("Unsqueeze", [NUMBERS, [0]], {}),
    ("Squeeze", [[NUMBERS], [0]], {}),
    ("Transpose", [[NUMBERS, DIVISORS]], {}),
    ("Flatten", [[NUMBERS, DIVISORS]], {"axis": 0}),
    ("Pad", [NUMBERS, [1, 2], np.int64(LARGE)], {}),
    ("Trilu", [[[LARGE, 2], [3, LARGE]]], {"upper": 0}),
    ("CumSum", [NUMBERS, np.int64(0)], {}),
    ("OneHot", [[1, 0], np.int64(3), [0, LARGE]], {}),
    ("TopK", [NUMBERS, [3]], {}),
    ("ArgMax", [NUMBERS], {"axis": 0}),
    ("NonZero", [NUMBERS], {}),
    ("Unique", [[LARGE, 3, LARGE]], {}),
    ("Shape", [[NUMBERS, DIVISORS]], {}),
    ("Size", [[NUMBERS, DIVISORS]], {}),
    ("MatMul", [[[LARGE, 1]], [[2], [3]]], {}),
    ("Einsum", [[LARGE, 1], [2, 3]], {"equation": "i,i->"}),
    ("EyeLike", [[[5, 5], [5, 5]]], {}),
    ("ConstantOfShape", [[2, 3]], {"value": numpy_helper.from_array(np.array([LARGE]))}),
    ("BitwiseAnd", [NUMBERS, DIVISORS], {}),
    ("BitShift", [np.array([1, 3], np.uint64), np.array([40, 33], np.uint64)], {"direction": "LEFT"}),
    *((f"Reduce{name}", [[[LARGE, 3], [5, 7]], [1]], {}) for name in ("Sum", "Prod", "Max", "Min", "SumSquare", "L1")),
    ("ReduceMean", [[[LARGE, 3], [-5, -8]], [1]], {"keepdims": 0}),
    ("ReduceMean", [np.array([2**24 + 1] * 3, np.int32)], {}),
]
# onnx's reference rounds these to floats; the numbers here are integers, as in ONNX Runtime.
EXPECTED = {
    "Pow": [[3**39, -8, LARGE, 1, -1, 1, 0], [10**11, LARGE]],
    "ReduceMean": [[(LARGE + 3) // 2, -6], [2**24 + 1]],
}


def evaluate(model: onnx.ModelProto) -> np.ndarray:
    with np.errstate(all="ignore"):
        results: Any = ReferenceEvaluator(model).run(None, {})
        return np.asarray(results[0])


def test_each_operator_of_shapes_keeps_its_integers() -> None:
    """A product or a condition that is traced could not be a shape, and int32 would wrap around."""
    everything, sizes, rest = Graph(), [], {name: iter(values) for name, values in EXPECTED.items()}
    for op, inputs, attributes in OPERATIONS:
        single = Graph()
        outputs = {"TopK": 2, "Unique": 4}.get(op, 1)
        arrays = [np.asarray(x) for x in inputs]
        single.add(op, *(single.hold(x, x.dtype) for x in arrays), outputs=outputs, **attributes)
        names = list(single.nodes[0].output)
        expected = np.asarray(next(rest[op])) if op in rest else evaluate(single.build(names[:1]))
        if op in rest:
            expected = expected.astype(arrays[0].dtype)
        value = everything.add(op, *(everything.hold(x, x.dtype) for x in arrays), outputs=outputs, **attributes)
        sizes.append((op, everything.use_as_shape(value if outputs == 1 else value[0], expected)))
    fn, params = jqonnx.load(everything.build([name for _, name in sizes]))
    wrong = [op for (op, _), y in zip(sizes, jax.jit(fn)(params), strict=True) if set(y.shape) != {1}]
    assert not wrong


def run_exactly(model: onnx.ModelProto) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    results: Any = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {})
    return results[0]


def draw_expression(rng: np.random.Generator, graph: Graph) -> str:
    """Return the name of a result of random operators on random integers."""
    values = [graph.hold(rng.integers(-9, 10, 4)), graph.hold(rng.integers(-(2**33), 2**33, 4))]
    values.append(graph.add("Shape", graph.hold(np.zeros((2, 3, 1, 5)))))
    for _ in range(8):
        a, b = (values[i] for i in rng.integers(0, len(values), 2))
        op = rng.choice(["Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Where", "Neg", "Cast", "Gather", "Concat"])
        if op in ("Div", "Mod"):
            b = graph.add("Max", graph.add("Abs", b), graph.hold([1]))
            y = graph.add(op, a, b)
        elif op == "Where":
            y = graph.add(op, graph.add("Less", a, b), a, b)
        elif op == "Neg":
            y = graph.add(op, a)
        elif op == "Cast":
            y = graph.add(op, graph.add(op, graph.add("Mod", a, graph.hold([999])), to=1), to=TensorProto.INT64)
        elif op == "Gather":
            y = graph.add(op, a, graph.hold(rng.integers(-4, 4, 4)))
        elif op == "Concat":
            halves = [graph.add("Slice", x, graph.hold([0]), graph.hold([2])) for x in (a, b)]
            y = graph.add(op, *halves, axis=0)
        elif op == "Mul":
            # A product that a sum reads is rounded by itself in floats.
            y = graph.add("Add", graph.add(op, a, b), a)
        else:
            y = graph.add(op, a, b)
        values.append(y)
    return functools.reduce(lambda a, b: graph.add("Sub", graph.add("Mul", a, graph.hold([3])), b), values)


def test_random_integer_arithmetic_is_that_of_the_runtime(rng: np.random.Generator) -> None:
    graph = Graph()
    value = draw_expression(rng, graph)
    # The runtime computes with all 64 bits, and wraps around at the same numbers.
    expected = run_exactly(graph.build([value]))
    check_shape(graph.build([graph.use_as_shape(value, expected)]))


def make_subgraph(nodes: Any, inputs: Any, outputs: Any) -> onnx.GraphProto:
    first, last = (
        [helper.make_tensor_value_info(name, kind, None) for name, kind in values] for values in (inputs, outputs)
    )
    return helper.make_graph(nodes, "body", first, last)


INT, BOOL = TensorProto.INT64, TensorProto.BOOL


def test_known_values_stay_known_in_branches_loops_and_functions() -> None:
    node, graph = helper.make_node, Graph()
    start, two = graph.hold([3]), graph.hold([2])
    body = [node("Mul", ["v", two], ["p"]), node("Add", ["p", two], ["w"])]
    function = [node("Mul", ["v", "v"], ["p"]), node("Sub", ["p", "v"], ["w"])]
    graph.functions.append(helper.make_function("own", "f", ["v"], ["w"], function, [helper.make_opsetid("", 21)]))
    value = graph.add("f", start, domain="own")  # 6
    loop = make_subgraph(
        [node("Identity", ["c"], ["d"]), *body], [("i", INT), ("c", BOOL), ("v", INT)], [("d", BOOL), ("w", INT)]
    )
    value = graph.add("Loop", graph.hold(3), "", value, body=loop)  # 62
    # More iterations than are written out.
    long = graph.add("Loop", graph.hold(300), "", graph.hold([0]), body=make_subgraph(
        [node("Identity", ["c"], ["d"]), node("Add", ["v", two], ["w"])],
        [("i", INT), ("c", BOOL), ("v", INT)], [("d", BOOL), ("w", INT)],
    ))  # fmt: skip
    branches: dict[str, Any] = {
        f"{key}_branch": make_subgraph([node(op, [value, two], ["r"])], [], [("r", INT)])
        for key, op in (("then", "Mul"), ("else", "Div"))
    }
    value = graph.add("If", graph.add("Greater", value, graph.hold([100])), **branches)  # 31
    sequence = graph.add("SequenceConstruct", value, long)
    sequence = graph.add("SequenceInsert", sequence, start, graph.hold(1))
    total = graph.add("ConcatFromSequence", sequence, axis=0)
    scan = make_subgraph(
        [node("Mul", ["v", two], ["p"]), node("Add", ["p", "x"], ["w"]), node("Identity", ["w"], ["y"])],
        [("v", INT), ("x", INT)], [("w", INT), ("y", INT)],
    )  # fmt: skip
    state, _ = graph.add("Scan", start, graph.add("Unsqueeze", total, graph.hold([1])), outputs=2, body=scan,
                         num_scan_inputs=1)  # fmt: skip
    check_shape(graph.build([graph.use_as_shape(graph.add("Concat", total, state, axis=0), [31, 3, 600, 754])]))


def test_small_floats_of_known_values_saturate() -> None:
    values, graph = np.array([1e9, -1e9, 1.0], np.float32), Graph()
    number = graph.hold(values, np.float32)
    small = graph.add("Cast", number, to=TensorProto.FLOAT8E5M2)
    limit = float(np.float32(57344))
    check_shape(graph.build([graph.use_as_shape(
        graph.add("Cast", small, to=TensorProto.FLOAT), np.array([limit, -limit, 1.0], np.float32)
    )]))  # fmt: skip


# Their results have no zeros that numbers could be compared by, are sequences, or are larger than shapes.
LEFT_OUT = ("sequence", "optional", "bf16", "bfloat16", "training", "3d_default", "e8m0", "loop16", "loop13")


@functools.cache
def list_first_cases() -> dict[str, Any]:
    """Return for each operator of the table the first case of onnx's node tests that consists of it alone."""
    found: dict[str, Any] = {}
    for case in collect_cases():
        if case.model is None or len(case.model.graph.node) != 1 or any(word in case.name for word in LEFT_OUT):
            continue
        (node,) = case.model.graph.node
        values = (*case.model.graph.input, *case.model.graph.output)
        is_array = all(value.type.HasField("tensor_type") for value in values)
        # Below, NonZero has no version, or Cast another type.
        is_array = is_array and all(entry.version >= 13 for entry in case.model.opset_import if not entry.domain)
        if (node.domain, node.op_type) in OPERATORS and is_array:
            found.setdefault(node.op_type, case)
    return found


def check_case(case: Any) -> None:
    """Raise unless the outputs of a case are right, and known under jax.jit, if its inputs are constants."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    outputs = [value.name for value in model.graph.output]
    for name in outputs:
        # NonZero takes what is known only: its result's shape depends on the numbers.
        nodes = (("Cast", name, f"{name}/number"), ("NonZero", f"{name}/number", f"{name}/places"))
        for op, source, target in nodes:
            attributes: dict[str, Any] = {"to": TensorProto.FLOAT} if op == "Cast" else {}
            model.graph.node.append(helper.make_node(op, [source], [target], **attributes))
        model.graph.output.append(helper.make_tensor_value_info(f"{name}/places", INT, None))
    inputs, expected = case.data_sets[0]
    names = [value.name for value in model.graph.input]
    fn, params = jqonnx.load(model, constants=dict(zip(names, map(read_value, inputs), strict=True)))
    results = jax.jit(fn)(params)
    for y, places, value in zip(results, results[len(outputs) :], expected, strict=False):
        compare(read_value(value), y, max(case.rtol, 1e-3), max(case.atol, 1e-5))
        assert places.shape[1] == np.count_nonzero(np.asarray(y).astype(np.float32)), case.name


def test_a_sample_of_all_operators_returns_known_values(rng: np.random.Generator) -> None:
    cases = list_first_cases()
    for name in rng.permutation(sorted(cases))[:4]:
        check_case(cases[name])


@pytest.mark.full
def test_all_operators_return_known_values() -> None:
    cases = list_first_cases()
    assert len(cases) > 150
    for case in cases.values():
        check_case(case)
