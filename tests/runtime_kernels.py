"""Compare ONNX Runtime's kernels for this processor with the formulas in numpy: `python -m tests.runtime_kernels`.

Nothing is computed with JAX. The formulas are those that jaxquant's operators are compared with, and they follow the
kernels for x86-64. On another processor, or an emulated one, the table says which operators have other codes there.
"""

from __future__ import annotations

import argparse
import platform
import timeit
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime
from onnx import helper, numpy_helper

from .oracles import contraction_text, microsoft_text, onnx_runtime, onnx_text

MICROSOFT = "com.microsoft"
F = np.float32


def compare(seed: int) -> Iterator[tuple[str, int, int]]:
    """Yield for each operator its name, the number of elements, and how many of them differ from the formula."""
    rng = np.random.default_rng(seed)
    a, b = np.repeat(np.arange(256, dtype=np.uint8), 256), np.tile(np.arange(256, dtype=np.uint8), 256)
    scales = [F(scale) for scale in rng.uniform(0.01, 0.05, 3)]
    points = [np.uint8(point) for point in 2 * rng.integers(30, 100, 3) + 1]
    ties = F(rng.integers(-200, 200, 65536) + 0.5) * scales[0]
    x = np.concatenate([ties, np.nextafter(ties, F(np.inf)), np.nextafter(ties, F(-np.inf))])
    pair = (a, scales[0], points[0], b, scales[1], points[1], scales[2], points[2])
    one = (a, scales[0], points[0], F(1 / 256), np.uint8(0))
    left, right = rng.integers(0, 256, (33, 130), np.uint8), rng.integers(-128, 128, (130, 67), np.int8)
    image, kernel = rng.integers(0, 256, (2, 4, 9, 9), np.uint8), rng.integers(-128, 128, (8, 4, 3, 3), np.int8)
    products = (scales[0], points[0], right, scales[1], np.int8(-3), F(100), points[2])
    rows = rng.integers(0, 256, (64, 77), np.uint8)
    planes = rows.reshape(1, 64, 7, 11)
    text = microsoft_text
    cases: dict[str, tuple[str, tuple[Any, ...], Any, Any, dict[str, Any]]] = {
        "QuantizeLinear": (
            "", (x, scales[0], points[0]), np.uint8, onnx_text.quantize_linear(x, scales[0], points[0], "uint8"), {}
        ),
        "MatMulInteger": (
            "", (left, right, points[0]), np.int32, contraction_text.matmul_integer(left, right, points[0]), {}
        ),
        "QLinearMatMul": ("", (left, *products), np.uint8, contraction_text.qlinear_matmul(left, *products), {}),
        "ConvInteger": (
            "", (image, kernel, points[0]), np.int32, contraction_text.conv_integer(image, kernel, points[0]), {}
        ),
        "QLinearAdd": (MICROSOFT, pair, np.uint8, text.qlinear_add(*pair), {}),
        "QLinearMul": (MICROSOFT, pair, np.uint8, text.qlinear_mul(*pair), {}),
        "QLinearSigmoid": (MICROSOFT, one, np.uint8, text.qlinear_sigmoid(*one), {}),
        "QLinearLeakyRelu": (MICROSOFT, one, np.uint8, text.qlinear_leaky_relu(*one), {}),
        "QLinearGlobalAveragePool": (
            MICROSOFT, (planes, *one[1:]), np.uint8, text.qlinear_global_average_pool(planes, *one[1:]),
            {"channels_last": 0},
        ),
        "QLinearSoftmax": (
            MICROSOFT, (rows, *one[1:]), np.uint8, text.qlinear_softmax(rows, *one[1:]), {"axis": -1, "opset": 13}
        ),
    }  # fmt: skip
    for name, (domain, arguments, output, want, attributes) in cases.items():
        found = onnx_runtime.ask(name, arguments, output, domain, **attributes)
        yield name, want.size, int((found != want).sum())


def time_products(rows: int) -> Iterator[tuple[str, float]]:
    """Yield for each pair of dtypes the median milliseconds of MatMulInteger with constant weights, 1024 x 1024."""
    rng = np.random.default_rng(0)
    for a, w in (("uint8", "int8"), ("uint8", "uint8"), ("int8", "int8")):
        weights = numpy_helper.from_array(rng.integers(0, 100, (1024, 1024)).astype(w), "w")
        x = rng.integers(0, 100, (rows, 1024)).astype(a)
        ends = [helper.make_tensor_value_info("x", onnx_runtime.tensor_type(x.dtype), x.shape)]
        ends += [helper.make_tensor_value_info("y", onnx_runtime.tensor_type(np.int32), (rows, 1024))]
        node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
        graph = helper.make_graph([node], "product", ends[:1], ends[1:], [weights])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        times = timeit.repeat(lambda session=session, x=x: session.run(None, {"x": x}), number=1, repeat=30)
        yield f"{a} by {w}", 1e3 * float(np.median(times))


def main() -> int:
    """Print a row for each operator. Return 1 if a code differs, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", action="store_true", help="print the times of products of each pair of dtypes")
    options = parser.parse_args()
    if options.times:
        for rows in (1, 64, 1024):
            print(f"{rows:5} rows:", ", ".join(f"{name} {time:.2f} ms" for name, time in time_products(rows)))
        return 0
    seed, wrong = options.seed, 0
    print(f"onnxruntime {onnxruntime.__version__} on {platform.machine()}, seed {seed}\n")
    print("| operator | elements | mismatches |\n|---|--:|--:|")
    for name, count, differing in compare(seed):
        print(f"| {name} | {count:,} | {differing:,} |", flush=True)
        wrong += differing
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
