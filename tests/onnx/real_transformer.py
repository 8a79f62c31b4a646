"""A quantized transformer from a wheel, run through `jaxquant.onnx.load` beside ONNX Runtime.

    pip download traceforge-title-model==0.2.0 --no-deps
    python -m tests.onnx.real_transformer traceforge_title_model-0.2.0-py3-none-any.whl

For each model in the wheel it prints how many codes, scales and zero points of its DynamicQuantizeLinear nodes differ
from ONNX Runtime's on their inputs in that model, and how far the outputs are apart: jaxquant from ONNX Runtime, and
ONNX Runtime without optimizations from ONNX Runtime with all of them, for several draws of inputs. A float at the tie
between two codes turns a difference in its last bit into one of a whole step, and the codes of later nodes follow. So a
draw is either equal up to the rounding of floats, or it differs by steps. With `--trace` it also prints

- the first node of each draw with codes that differ, the floats at one of them in steps, and by how many units in the
  last place they differ;
- how far ONNX Runtime is from itself if one ReduceMean of the model is multiplied by 1 + 2^-23.
"""

from __future__ import annotations

import dataclasses
import sys
import zipfile
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

import jaxquant as jq
from jaxquant import onnx as jqonnx

from ..oracles.onnx_runtime import open_session

LENGTH, TOKENS, DRAWS = 16, 1000, 4
LEVELS = ("none", "all")


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
    nodes = list_quantized(copy)
    present = {info.name for info in (*copy.graph.output, *copy.graph.input)}
    names = list(dict.fromkeys(name for node in nodes for name in (node.input[0], *node.output)))
    copy.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in present)
    names = [name for name in names if name not in feeds]  # an input is no output
    results = open_session(copy, "none").run(names, feeds)
    fetched = {**feeds, **dict(zip(names, results, strict=True))}
    quantize = jax.jit(jq.dynamic_quantize_linear)
    elements = differing = 0
    for node in nodes:
        parts = quantize(fetched[node.input[0]])
        for result, name in zip(parts, node.output, strict=True):
            elements += fetched[name].size
            differing += int((np.asarray(result) != fetched[name]).sum())
    return len(nodes), elements, differing


def measure_distance(a: Any, b: Any) -> float:
    """Return the largest difference of all outputs."""
    return max(float(np.abs(np.asarray(x, np.float64) - y).max()) for x, y in zip(a, b, strict=True))


def list_quantized(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the nodes that quantize with dynamic ranges."""
    return [node for node in model.graph.node if node.op_type == "DynamicQuantizeLinear"]


def trace_codes(model: onnx.ModelProto, draws: list[dict[str, np.ndarray]]) -> None:
    """Print the first node of each draw with other codes than ONNX Runtime without optimizations."""
    fn, params = jqonnx.load(model)
    nodes = [node for node in list_quantized(model) if node.input[0] not in {x.name for x in model.graph.input}]
    names = list(dict.fromkeys(name for node in nodes for name in (node.input[0], *node.output[:2])))
    traced = dataclasses.replace(fn, graph=dataclasses.replace(fn.graph, outputs=tuple(names)))
    run = jax.jit(lambda p, values: traced(p, **values))
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    session = open_session(copy, "none")
    for feeds in draws:
        ours = {name: np.asarray(x) for name, x in zip(names, run(params, feeds), strict=True)}
        theirs: dict[str, Any] = dict(zip(names, session.run(names, feeds), strict=True))
        differing = [node for node in nodes if (ours[node.output[0]] != theirs[node.output[0]]).any()]
        if not differing:
            print("  first codes that differ: none")
            continue
        x, codes, scale = differing[0].input[0], *differing[0].output[:2]
        places = np.argwhere(ours[codes] != theirs[codes])
        place = tuple(places[0])
        steps = [float(values[x][place]) / float(values[scale]) for values in (ours, theirs)]
        ulps = [abs(int(a.view(np.int32)) - int(b.view(np.int32))) for a, b in zip(
            (ours[x][place], ours[scale]), (theirs[x][place], theirs[scale]), strict=True
        )]  # fmt: skip
        print(
            f"  first codes that differ: {len(places)} of {ours[codes].size} in node {nodes.index(differing[0])} of "
            f"{len(nodes)}, at {steps[0]:.7g} and {steps[1]:.7g} steps; float {ulps[0]}, scale {ulps[1]} ulp"
        )


def nudge_means(model: onnx.ModelProto, draws: list[dict[str, np.ndarray]]) -> None:
    """Print how far ONNX Runtime's outputs move if one ReduceMean is larger by a unit in the last place."""
    session = open_session(model, "none")
    expected: list[Any] = [session.run(None, feeds) for feeds in draws]
    distances = []
    for index, node in enumerate(model.graph.node):
        if node.op_type == "ReduceMean":
            copy = onnx.ModelProto()
            copy.CopyFrom(model)
            mean = copy.graph.node[index]
            (name,) = mean.output
            mean.output[0] = "nudged_mean"
            copy.graph.initializer.append(numpy_helper.from_array(np.array(1 + 2**-23, np.float32), "nudge"))
            copy.graph.node.insert(index + 1, helper.make_node("Mul", ["nudged_mean", "nudge"], [name]))
            nudged = open_session(copy, "none")
            distances.append([measure_distance(nudged.run(None, f), y) for f, y in zip(draws, expected, strict=True)])
    table, largest = np.asarray(distances), max(np.abs(y[0]).max() for y in expected)
    print(
        f"  ONNX Runtime with one of {len(table)} means larger by an ulp: {np.sum(table > 1e-3)} of {table.size} "
        f"results differ by more than 0.001, at most {table.max():.2g} of {largest:.2g}"
    )


def report(name: str, data: bytes, with_trace: bool) -> None:
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
            "jaxquant - not optimized": (ours, runtime["none"]),
            "jaxquant - all": (ours, runtime["all"]),
            "not optimized - all": (runtime["none"], runtime["all"]),
        }
        print("  largest difference:", ", ".join(f"{t} {measure_distance(*pair):.2g}" for t, pair in pairs.items()))
    if with_trace:
        trace_codes(model, draws)
        nudge_means(model, draws)


def main(path: str, *options: str) -> None:
    """Print the figures of all models in a wheel."""
    with zipfile.ZipFile(path) as wheel:
        for name in sorted(wheel.namelist()):
            if name.endswith(".onnx"):
                report(name, wheel.read(name), "--trace" in options)


if __name__ == "__main__":
    main(*sys.argv[1:])
