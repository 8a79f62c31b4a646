"""Damaged and hostile files: each gives a ModelError that says what is wrong, without memory beyond its limits."""

from __future__ import annotations

import os
import pathlib
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from jaxquant import onnx as jqonnx

from ..cases.onnx_models import make_cnn, make_mlp

SMALL = jqonnx.Limits(memory_bytes=2**26, file_bytes=2**22, nodes=1000, iterations=1000)


def make_model(
    nodes: list[Any], constants: dict[str, Any] | None = None, functions: Any = (), shape: Any = (2, 2)
) -> onnx.ModelProto:
    """Return a model from x to y."""
    tensors = [numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [y], tensors)
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10, functions=list(functions))


node = helper.make_node
RELU = [node("Relu", ["x"], ["y"])]


def declare(dims: list[int], data_type: int = TensorProto.FLOAT, data: bytes = b"\0" * 16) -> onnx.ModelProto:
    """Return a model with an initializer with dims and a data type that need not fit its data."""
    model = make_model([node("Add", ["x", "w"], ["y"])])
    model.graph.initializer.append(TensorProto(name="w", dims=dims, data_type=data_type, raw_data=data))
    return model


def make_functions(count: int, first: str = "Relu") -> onnx.ModelProto:
    """Return a model of functions that each call the one before twice."""
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    functions = []
    for i in range(count):
        inner = ("Relu", "") if i == 0 and first == "Relu" else (f"F{i - 1}" if i else first, "f")
        body = [node(inner[0], [a], [b], domain=inner[1]) for a, b in (("a", "b"), ("b", "c"))]
        functions.append(helper.make_function("f", f"F{i}", ["a"], ["c"], body, domains))
    return make_model([node(f"F{count - 1}", ["x"], ["y"], domain="f")], functions=functions)


def make_loop(trips: int | None) -> onnx.ModelProto:
    """Return a model with a Loop that never ends by its condition."""
    flags = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("c", "d")]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in "vw"]
    step = helper.make_tensor_value_info("i", TensorProto.INT64, [])
    nodes = [node("Identity", ["c"], ["d"]), node("Relu", ["v"], ["w"])]
    body = helper.make_graph(nodes, "body", [step, flags[0], values[0]], [flags[1], values[1]])
    constants = {"t": np.asarray(True)} if trips is None else {"m": np.asarray(trips), "t": np.asarray(True)}
    return make_model([node("Loop", ["" if trips is None else "m", "t", "x"], ["y"], body=body)], constants)


def make_doubling(count: int, constant: bool) -> onnx.ModelProto:
    """Return a model that joins an array with itself again and again."""
    first = "w" if constant else "x"
    nodes = [node("Concat", [f"t{i}" if i else first] * 2, [f"t{i + 1}"], axis=0) for i in range(count)]
    last = node("Cast", [f"t{count}"], ["y"], to=TensorProto.FLOAT)
    return make_model([*nodes, last], {"w": np.zeros(2, np.int64)} if constant else None)


def make_shape(op: str, *values: Any, data: bool = True) -> onnx.ModelProto:
    """Return a model with an operator that returns an array of the shape that a constant says."""
    names = [f"s{i}" for i in range(len(values))]
    last = node("Cast", ["z"], ["y"], to=TensorProto.FLOAT)
    inputs = [*(["x"] if data else []), *names]
    return make_model([node(op, inputs, ["z"]), last], dict(zip(names, map(np.asarray, values), strict=True)))


def swap_order() -> onnx.ModelProto:
    return make_model([node("Relu", ["a"], ["y"]), node("Relu", ["x"], ["a"])])


HUGE = 2**40
ATTACKS: dict[str, tuple[Callable[[], Any], str]] = {
    "empty": (lambda: b"", "no ONNX model"),
    "text": (lambda: b"hello, world" * 10, "not an ONNX model"),
    "truncated": (lambda: make_model(RELU).SerializeToString()[:40], "."),
    "no graph": (lambda: onnx.ModelProto(ir_version=10), "no ONNX model"),
    "cycle": (lambda: make_model([node("Relu", ["y"], ["y"])]), "checker"),
    "unsorted": (swap_order, "checker"),
    "missing input": (lambda: make_model([node("Add", ["x", "nothing"], ["y"])]), "checker"),
    "two producers": (lambda: make_model([*RELU, *RELU]), "checker"),
    "short data": (lambda: declare([2, 3]), "."),
    "negative dims": (lambda: declare([-2, -2]), "."),
    "many dims": (lambda: declare([1] * 40, data=b"\0" * 4), "."),
    "2**62 elements": (lambda: declare([2**31, 2**31]), "."),
    "overflowing dims": (lambda: declare([2**32, 2**32]), "."),
    "unknown data type": (lambda: declare([2, 2], 99), "."),
    "strings": (lambda: declare([2, 2], TensorProto.STRING), "."),
    "old opset": (lambda: onnx.ModelProto.FromString(_with_opset(5)), "opset 7"),
    "unknown opset": (lambda: onnx.ModelProto.FromString(_with_opset(999)), "opset 7"),
    "recursive function": (lambda: make_functions(2, "F1"), "calls itself"),
    "functions in functions": (lambda: make_functions(40), "Limits.nodes"),
    "infinite loop": (lambda: make_loop(None), "Limits.nodes"),
    "long loop": (lambda: make_loop(2**50), "Limits.iterations"),
    "doubled input": (lambda: make_doubling(45, False), "Limits.memory_bytes"),
    "doubled constant": (lambda: make_doubling(45, True), "Limits.memory_bytes"),
    "fill": (lambda: make_shape("ConstantOfShape", [HUGE], data=False), "Limits.memory_bytes"),
    "expand": (lambda: make_shape("Expand", [HUGE, 2, 2]), "Limits.memory_bytes"),
    "tile": (lambda: make_shape("Tile", [HUGE, HUGE]), "Limits.memory_bytes"),
    "pad": (lambda: make_shape("Pad", [HUGE, 0, 0, 0]), "Limits.memory_bytes"),
    "range": (lambda: make_shape("Range", 0, HUGE, 1, data=False), "Limits.memory_bytes"),
    "endless range": (lambda: make_shape("Range", 0, HUGE, 0, data=False), "node 0"),
    "one-hot": (lambda: make_shape("OneHot", HUGE, np.array([0.0, 1.0])), "Limits.memory_bytes"),
    "resize": (lambda: _resize_hugely(), "Limits.memory_bytes"),
    "large kernel": (lambda: make_pool("AveragePool", 1, 2**40, count_include_pad=1), "Limits.memory_bytes"),
    "large kernel with indices": (lambda: make_pool("MaxPool", 2, 2**13), "at most 4096 elements"),
    "long resize": (lambda: _resize_hugely(2**15), "Limits.memory_bytes"),
    "wide attention": (lambda: make_attention(2**13), "Limits.memory_bytes"),
    "constants in functions": (lambda: make_constants(200), "Limits.memory_bytes"),
    "loop that counts": (lambda: make_counter(), "Limits.nodes"),
    "long shape": (lambda: make_shape("Reshape", np.ones(2**17, np.int64)), "at most 65536"),
    "negative shape": (lambda: make_shape("ConstantOfShape", [-5], data=False), "node 0"),
    "reshape": (lambda: make_shape("Reshape", [3, -1]), "node 0"),
    "axis": (lambda: make_model([node("Softmax", ["x"], ["y"], axis=7)]), "node 0"),
    "axis of a scale": (lambda: make_dequantized_weight(axis=7), "node 0"),
}


def make_dequantized_weight(**attributes: Any) -> onnx.ModelProto:
    """Return a model that multiplies with codes that it dequantizes."""
    dequantize = node("DequantizeLinear", ["codes", "scale"], ["w"], **attributes)
    constants = {"codes": np.ones((2, 2), np.int8), "scale": np.ones(2, np.float32)}
    return make_model([dequantize, node("MatMul", ["x", "w"], ["y"])], constants)


def _with_opset(version: int) -> bytes:
    model = make_model(RELU)
    model.opset_import[0].version = version
    return model.SerializeToString()


def _resize_hugely(length: float = 1e9) -> onnx.ModelProto:
    scales = np.array([length, length], np.float32)
    return make_model([node("Resize", ["x", "", "s"], ["y"], mode="linear")], {"s": scales})


def make_pool(op: str, outputs: int, kernel: int, **attributes: Any) -> onnx.ModelProto:
    """Return a model with a pool that has its kernel in the padding."""
    names = ["p", "i"][:outputs]
    pool = node(op, ["r"], names, kernel_shape=[kernel], pads=[kernel, kernel], **attributes)
    reads = [node("Cast", [names[-1]], ["y"], to=TensorProto.FLOAT)]
    return make_model([node("Reshape", ["x", "s"], ["r"]), pool, *reads], {"s": np.array([1, 1, 4])})


def make_attention(length: int) -> onnx.ModelProto:
    """Return a model with products of queries and keys that take far more than its inputs."""
    attend = node("Attention", ["x", "x", "x"], ["y"], q_num_heads=1, kv_num_heads=1)
    model = make_model([attend], shape=(1, length, 1))
    model.opset_import[0].version = 23
    return model


def make_constants(calls: int) -> onnx.ModelProto:
    """Return a model that calls a function with a constant of 400 KB again and again."""
    constant = node("Constant", [], ["w"], value=numpy_helper.from_array(np.zeros(10**5, np.float32)))
    body = [constant, node("ReduceSum", ["w"], ["s"]), node("Add", ["a", "s"], ["b"])]
    function = helper.make_function("f", "F", ["a"], ["b"], body, [helper.make_opsetid("", 21)])
    names = ["x", *(f"t{i}" for i in range(calls - 1)), "y"]
    return make_model([node("F", [names[i]], [names[i + 1]], domain="f") for i in range(calls)], functions=[function])


def make_counter() -> onnx.ModelProto:
    """Return a model with a Loop that ends by a condition that it computes, after 10**5 iterations."""
    info = helper.make_tensor_value_info
    inner = [info("i", TensorProto.INT64, []), info("c", TensorProto.BOOL, []), info("v", TensorProto.FLOAT, [2, 2])]
    nodes = [node("Less", ["i", "most"], ["d"]), node("Relu", ["v"], ["w"])]
    results = [info("d", TensorProto.BOOL, []), info("w", TensorProto.FLOAT, [2, 2])]
    body = helper.make_graph(nodes, "body", inner, results)
    loop = node("Loop", ["", "t", "x"], ["y"], body=body)
    return make_model([loop], {"t": np.asarray(True), "most": np.asarray(10**5)})


@pytest.mark.parametrize("name", list(ATTACKS))
def test_attack_is_refused(name: str) -> None:
    make, text = ATTACKS[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(jqonnx.ModelError, match=text):
        jqonnx.load(make(), limits=SMALL)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18, "more than 256 MB"


def make_external(tmp_path: pathlib.Path, location: str, **entries: Any) -> pathlib.Path:
    """Write a model with external data, and return its path."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    model = make_model([node("Add", ["x", "w"], ["y"])])
    tensor = model.graph.initializer.add(name="w", dims=[2, 2], data_type=TensorProto.FLOAT)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder / "data.bin").write_bytes(np.arange(8, dtype=np.float32).tobytes())
    (tmp_path / "secret.bin").write_bytes(b"\1" * 64)
    return folder / "model.onnx"


def test_external_data_is_read(tmp_path: pathlib.Path) -> None:
    fn, params = jqonnx.load(make_external(tmp_path, "data.bin", offset=16, length=16), limits=SMALL)
    np.testing.assert_array_equal(params["w"], [[4, 5], [6, 7]])
    np.testing.assert_array_equal(fn(params, np.ones((2, 2), np.float32)), [[5, 6], [7, 8]])


LINKS = {
    "link.bin": lambda folder: (folder / "link.bin").symlink_to(folder.parent / "secret.bin"),
    "hard.bin": lambda folder: os.link(folder.parent / "secret.bin", folder / "hard.bin"),
    "sub/secret.bin": lambda folder: (folder / "sub").symlink_to(folder.parent),
    "pipe": lambda folder: os.mkfifo(folder / "pipe"),
}


@pytest.mark.parametrize(
    ("location", "entries"),
    [
        *((location, {}) for location in ("../secret.bin", "/etc/passwd", "/dev/zero", "sub/../../secret.bin")),
        *((location, {}) for location in ("", ".", "model/..", "C:\\x", "a\\..\\b", "missing.bin", "./data.bin")),
        *((location, {}) for location in LINKS),
        *(("data.bin", entries) for entries in ({"offset": 24}, {"offset": -4}, {"offset": 10**30}, {"length": 8})),
        *(("data.bin", entries) for entries in ({"length": 2**40}, {"length": "many"}, {"offset": "0x10"})),
    ],
)
def test_external_data_is_refused(location: str, entries: dict[str, Any], tmp_path: pathlib.Path) -> None:
    path = make_external(tmp_path, location, **entries)
    if location in LINKS:
        LINKS[location](path.parent)
    with pytest.raises(jqonnx.ModelError, match="'w'"):
        jqonnx.load(path, limits=SMALL)


def test_external_data_needs_a_path(tmp_path: pathlib.Path) -> None:
    data = make_external(tmp_path, "data.bin").read_bytes()
    with pytest.raises(jqonnx.ModelError, match="not loaded from a path"):
        jqonnx.load(data)


def test_files_are_bounded(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(make_model(RELU, {}).SerializeToString() + b"\0" * 2000)
    with pytest.raises(jqonnx.ModelError, match=r"Limits\.file_bytes"):
        jqonnx.load(path, limits=jqonnx.Limits(file_bytes=1000))
    with pytest.raises(jqonnx.ModelError, match="regular file"):
        jqonnx.load("/dev/zero")
    with pytest.raises(jqonnx.ModelError, match="cannot read"):
        jqonnx.load(tmp_path / "nothing.onnx")


def test_unknown_operators_are_listed() -> None:
    nodes = [node("Foo", ["x"], ["a"], domain="f"), node("Bar", ["a"], ["b"], domain="f"), node("Relu", ["b"], ["y"])]
    with pytest.raises(jqonnx.ModelError, match=r"not supported: f\.Bar, f\.Foo$"):
        jqonnx.load(make_model(nodes))


def test_shapes_that_a_model_leaves_open_are_examined_by_each_call() -> None:
    fn, params = jqonnx.load(make_model([node("MatMul", ["x", "x"], ["y"])], shape=("n", "n")), limits=SMALL)
    assert fn(params, np.ones((4, 4), np.float32)).shape == (4, 4)
    doubled = jqonnx.load(
        make_model([*make_doubling(20, False).graph.node], shape=("n", 2)), limits=jqonnx.Limits(memory_bytes=2**20)
    )
    with pytest.raises(jqonnx.ModelError, match=r"Limits\.memory_bytes"):
        doubled[0](doubled[1], np.ones((4, 2), np.float32))


def make_corpus(rng: np.random.Generator) -> list[bytes]:
    """Return small valid models: networks, a loop, functions, shape arithmetic."""
    models = [make_mlp(rng), make_cnn(rng), make_loop(3), make_functions(3), make_shape("Expand", [2, 2, 2])]
    models.append(make_shape("Resize", np.array([], np.float32), np.array([2.0, 2.0], np.float32)))
    quantized = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("DequantizeLinear", ["w", "ws"], ["dw"], axis=1),
        node("MatMul", ["d", "dw"], ["m"]),
        node("QuantizeLinear", ["m", "s", "z"], ["n"]),
        node("DequantizeLinear", ["n", "s", "z"], ["y"]),
    ]
    constants = {
        "s": np.float32(0.1),
        "z": np.uint8(3),
        "w": np.ones((2, 2), np.int8),
        "ws": np.array([0.1, 0.2], np.float32),
    }
    models.append(make_model(quantized, constants))
    return [model.SerializeToString() for model in models]


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """Return bytes with some changed, cut out, repeated, or set to what is special in protobuf."""
    values = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        place, kind = int(rng.integers(len(values))), int(rng.integers(6))
        if kind == 0:
            values[place] = int(rng.integers(256))
        elif kind == 1:
            values[place] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            values[place : place + int(rng.integers(1, 9))] = b""
        elif kind == 3:
            values[place:place] = values[place : place + int(rng.integers(1, 33))]
        elif kind == 4:
            values[place : place + 1] = bytes([0xFF] * int(rng.integers(1, 9))) + b"\x01"
        else:
            other = int(rng.integers(len(values)))
            values[place : place + 8] = values[other : other + 8]
        if not values:
            values = bytearray(b"\0")
    return bytes(values)


def alter_message(data: bytes, rng: np.random.Generator) -> bytes:
    """Return a model that decodes, with a lying number, name or operator."""
    model = onnx.ModelProto.FromString(data)
    nodes = list(model.graph.node)
    chosen = nodes[int(rng.integers(len(nodes)))]
    numbers = (-1, 0, 1, 2, 7, 255, 2**31, 2**40, 2**62, -(2**63))
    number, kind = numbers[int(rng.integers(len(numbers)))], int(rng.integers(6))
    if kind == 0 and chosen.attribute:
        attribute = chosen.attribute[int(rng.integers(len(chosen.attribute)))]
        attribute.i = number
        if attribute.ints:
            attribute.ints[int(rng.integers(len(attribute.ints)))] = number
    elif kind == 1 and model.graph.initializer:
        tensor = model.graph.initializer[int(rng.integers(len(model.graph.initializer)))]
        if tensor.dims:
            tensor.dims[int(rng.integers(len(tensor.dims)))] = number
    elif kind == 2 and model.graph.initializer:
        model.graph.initializer[int(rng.integers(len(model.graph.initializer)))].data_type = int(rng.integers(30))
    elif kind == 3 and chosen.input:
        names = [name for other in nodes for name in (*other.input, *other.output)]
        chosen.input[int(rng.integers(len(chosen.input)))] = names[int(rng.integers(len(names)))]
    elif kind == 4:
        operators = ("Concat", "Reshape", "Slice", "Conv", "Loop", "QLinearConv", "Resize", "Gather", "LSTM", "Pad")
        chosen.op_type = operators[int(rng.integers(len(operators)))]
    elif model.graph.input:
        dims = model.graph.input[0].type.tensor_type.shape.dim
        if dims:
            dims[int(rng.integers(len(dims)))].dim_value = number
    return model.SerializeToString()


def run_mutants(count: int, rng: np.random.Generator) -> tuple[int, int]:
    """Load mutants; return how many loaded and how many were refused. Anything but a ModelError is raised."""
    corpus, loaded = make_corpus(rng), 0
    for data in corpus:
        jqonnx.load(data, limits=SMALL)
    for _ in range(count):
        data = corpus[int(rng.integers(len(corpus)))]
        data = mutate(data, rng) if rng.integers(2) else alter_message(data, rng)
        try:
            jqonnx.load(data, limits=SMALL)
            loaded += 1
        except jqonnx.ModelError:
            pass
    return loaded, count - loaded


@pytest.mark.slow
def test_mutants(rng: np.random.Generator) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded, refused = run_mutants(300, rng)
    assert loaded > 10
    assert refused > 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "more than 1 GB"


@pytest.mark.full
def test_many_mutants(rng: np.random.Generator) -> None:
    run_mutants(100_000, rng)
