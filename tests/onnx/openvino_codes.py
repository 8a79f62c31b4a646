"""Exported models in OpenVINO: `python -m tests.onnx.openvino_codes` prints how far they are from the functions.

It needs `pip install openvino`. OpenVINO computes floats in bfloat16 on processors that can, so all models are compiled
with the precision float32. Its QuantizeLinear has another formula: x is clipped to the values of the least and the
largest code, multiplied by 255 / (largest - least), an offset is added, and only then the sum is rounded. So codes
differ at ties, and where the offset moves a number across a tie.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx

import jaxquant as jq
from jaxquant import onnx as jqonnx

from ..cases.exported_networks import convert_network, make_integer_mlp

UINT8 = jq.QuantSpec(jnp.uint8)
NUMBERS = ("NHWC", "HWIO", "NHWC")
Function = Callable[[jax.Array], Any]


def run_openvino(model: onnx.ModelProto, x: Any) -> list[np.ndarray]:
    """Return the outputs of OpenVINO, with floats of float32."""
    openvino: Any = importlib.import_module("openvino")
    core = openvino.Core()
    read = core.read_model(model.SerializeToString())
    compiled = core.compile_model(read, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    results = compiled([np.asarray(x)])
    return [np.asarray(results[output]) for output in compiled.outputs]


def quantize_as_openvino(x: np.ndarray, scale: Any, zero_point: int, dtype: Any) -> np.ndarray:
    """Return the codes of a number, by the formula of OpenVINO's FakeQuantize."""
    one, info = np.float32, np.iinfo(dtype)
    if zero_point == 0 and info.min < 0:  # without an offset
        return np.clip(np.rint(x * (one(1) / one(scale))), info.min, info.max).astype(dtype)
    low, high = (one(one(scale) * one(code - zero_point)) for code in (info.min, info.max))
    factor = one(255) / (high - low)
    steps = np.rint(np.clip(x, low, high) * factor + -low * factor)
    return (np.clip(steps, 0, 255) + info.min).astype(dtype)


def make_integer_cnn(rng: np.random.Generator) -> tuple[Function, jax.Array]:
    """Return convolutions on codes, their sum and its means over windows, and a batch."""
    spec, shapes = jq.QuantSpec(jnp.int8, jq.PerAxis(3)), ((3, 3, 3, 8), (3, 3, 8, 8))
    kernels = [jq.quantize(jnp.asarray(rng.normal(0, 0.2, shape), jnp.float32), spec) for shape in shapes]
    output, pooled = jq.Quantizer(UINT8, 0.05, 0), jq.Quantizer(UINT8, 0.02, 3)

    def convolve(q: Any, kernel: Any) -> Any:
        return jq.conv_general_dilated(q, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS, output=output)

    def function(x: jax.Array) -> jax.Array:
        first = convolve(jq.quantize(x, UINT8, range=(-2.0, 2.0)), kernels[0])
        total = jq.codes.add(first, convolve(first, kernels[1]), output=output)
        return jq.codes.average_pool(total, window_shape=(2, 2), strides=(2, 2), output=pooled).codes

    return function, jnp.asarray(rng.normal(0, 1, (8, 16, 16, 3)), jnp.float32)


def count_differences(function: Function, x: jax.Array, form: str) -> tuple[int, int, float]:
    """Return the number of elements, how many differ by more than rounding, and the largest difference."""
    outputs = run_openvino(jqonnx.export(function, [x], form=form), x)
    expected = jax.tree.leaves(jax.jit(function)(x))
    elements, differing, largest = 0, 0, 0.0
    for actual, want in zip(outputs, expected, strict=True):
        distance = np.abs(np.asarray(actual, np.float64) - np.asarray(want, np.float64))
        elements, largest = elements + distance.size, max(largest, float(distance.max()))
        differing += int((distance > (1e-5 if want.dtype == jnp.float32 else 0)).sum())
    return elements, differing, largest


def main() -> None:
    """Print the differences of several functions in both forms."""
    rng = np.random.default_rng(0)
    steps = jnp.asarray((rng.integers(-130, 130, 20_000) + 0.5) * np.float32(4 / 255), jnp.float32)
    normal = jnp.asarray(rng.normal(0, 1, 20_000), jnp.float32)

    def quantize(x: jax.Array) -> jax.Array:
        return jq.quantize(x, UINT8, range=(-2.0, 2.0)).codes

    cases: dict[str, tuple[Function, jax.Array]] = {
        "quantize, normal numbers": (quantize, normal),
        "quantize, ties": (quantize, steps),
        "integer MLP": (make_integer_mlp(rng, 32, 24, 16), jnp.asarray(rng.normal(0, 1, (256, 32)), jnp.float32)),
        "integer CNN": make_integer_cnn(rng),
    }
    for name in ("linen mlp", "linen cnn", "linen lstm", "linen encoder"):
        for recipe in ("float", "static", "dynamic", "weight_only_int8"):
            cases[f"{name}, {recipe}"] = convert_network(name, recipe)
    for name, (function, x) in cases.items():
        for form in ("operators", "qdq"):
            try:
                elements, differing, largest = count_differences(function, x, form)
                text = f"{differing} of {elements} differ, by at most {largest:.2g}"
            except RuntimeError as error:
                lines = [
                    line for line in str(error).splitlines() if "No conversion rule" in line or "failed for" in line
                ]
                text = f"not read: {(lines or str(error).splitlines()[-1:])[0].strip()[:120]}"
            print(f"{name}, {form}: {text}", flush=True)


if __name__ == "__main__":
    main()
