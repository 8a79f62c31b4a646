"""Trains a small network on handwritten digits, runs it on integers, and compares its numbers with ONNX Runtime's.

From the repository root: pip install -e ".[examples]" && python examples/onnx_runtime.py
"""

import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import optax
from jax.typing import ArrayLike
from onnx import helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxquant as jq

NETWORK = nn.Sequential([nn.Dense(1024), nn.relu, nn.Dense(1024), nn.relu, nn.Dense(10)])
OPTIMIZER = optax.adam(1e-3)

Quantized = tuple[jax.Array, jax.Array, jax.Array]  # codes, scale, zero_point


@jax.jit
def train(images: jax.Array, labels: jax.Array) -> Any:
    """Returns trained float parameters. Every step sees all images, so only the first weights are random."""

    def loss(params: Any) -> jax.Array:
        logits: Any = NETWORK.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(_: int, carry: Any) -> Any:
        params, state = carry
        updates, state = OPTIMIZER.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    params = NETWORK.init(jax.random.key(0), images)
    return jax.lax.fori_loop(0, 100, step, (params, OPTIMIZER.init(params)))[0]


def quantize_kernel(kernel: jax.Array) -> Quantized:
    """Quantizes weights to int8. Flax shapes them (inputs, outputs): axis 1, the outputs, has a scale each."""
    scale = jnp.abs(kernel).max(axis=0) / 127
    zero_point = jnp.zeros(scale.shape, jnp.int8)
    return jq.quantize_linear(kernel, scale, zero_point, axis=1), scale, zero_point


@jax.jit
def integer_dense(x: jax.Array, kernel: Quantized, bias: jax.Array) -> jax.Array:
    """Quantizes x to uint8 as it arrives, multiplies and adds integers, and only then returns to float32."""
    codes, scale, zero_point = kernel
    return jq.dynamic_quantize_matmul(x, codes, scale, zero_point, bias)


@jax.jit
def plain_dense(x: jax.Array, kernel: Quantized, bias: jax.Array) -> jax.Array:
    """The same layer as anyone would write it."""
    codes, scale, _ = kernel  # its zero points are 0
    y, y_scale, y_zero_point = plain_dynamic(x)
    # int32 first: a difference of two uint8 wraps, and so does a sum of 8-bit products.
    sums = (y.astype(jnp.int32) - y_zero_point) @ codes.astype(jnp.int32)
    return sums * (y_scale * scale) + bias


def integer_network(x: jax.Array, kernels: list[Quantized], biases: list[jax.Array]) -> tuple[jax.Array, list[Any]]:
    """Returns the logits and every layer's input. Only the nn.relu between the layers are float32."""
    inputs = []
    for kernel, bias in zip(kernels, biases, strict=True):
        x = nn.relu(x) if inputs else x
        inputs.append(x)
        x = integer_dense(x, kernel, bias)
    return x, inputs


@jax.jit
def plain_quantize(x: ArrayLike, scale: jax.Array, zero_point: jax.Array) -> jax.Array:
    """QuantizeLinear as anyone would write it. XLA makes the division a multiplication by 1 / scale."""
    limits = jnp.iinfo(zero_point.dtype)
    return jnp.clip(jnp.round(x / scale) + zero_point, limits.min, limits.max).astype(zero_point.dtype)


@jax.jit
def plain_dynamic(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """DynamicQuantizeLinear as anyone would write it."""
    low, high = jnp.minimum(x.min(), 0), jnp.maximum(x.max(), 0)
    scale = (high - low) / 255
    zero_point = jnp.clip(jnp.round(-low / scale), 0, 255).astype(jnp.uint8)
    return plain_quantize(x, scale, zero_point), scale, zero_point


def onnx_runtime(op: str, *arrays: ArrayLike, outputs: int = 1, domain: str = "", **attributes: Any) -> list[Any]:
    """Returns the outputs of one ONNX operator, a model of a single node, in ONNX Runtime."""
    feeds = {f"input{i}": np.asarray(array) for i, array in enumerate(arrays)}
    names = [f"output{i}" for i in range(outputs)]
    node = helper.make_node(op, list(feeds), names, domain=domain, **attributes)
    types = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    inputs = [helper.make_tensor_value_info(name, types[name], array.shape) for name, array in feeds.items()]
    graph = helper.make_graph([node], op, inputs, [helper.make_empty_tensor_value_info(name) for name in names])
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(names, feeds))


def results(
    kernel: jax.Array, quantized: Quantized, bias: jax.Array, x: jax.Array
) -> Iterator[tuple[str, Any, jax.Array, jax.Array]]:
    """Yields the numbers of a layer and its input x, each by ONNX Runtime, by jaxquant and by plain JAX."""
    codes, *steps = quantized  # steps: scale, zero_point
    (reference,) = onnx_runtime("QuantizeLinear", kernel, *steps, axis=1)
    yield "weights: codes", reference, codes, plain_quantize(kernel, *steps)
    (reference,) = onnx_runtime("DequantizeLinear", codes, *steps, axis=1)
    yield "weights: dequantized", reference, jq.dequantize_linear(codes, *steps, axis=1), codes * steps[0]

    kinds = ("activations: codes", "activations: scale", "activations: zero point")
    references = onnx_runtime("DynamicQuantizeLinear", x, outputs=3)
    yield from zip(kinds, references, jq.dynamic_quantize_linear(x), plain_dynamic(x), strict=True)

    (reference,) = onnx_runtime("DynamicQuantizeMatMul", x, codes, *steps, bias, domain="com.microsoft")
    yield "layers: outputs", reference, integer_dense(x, quantized, bias), plain_dense(x, quantized, bias)

    # Trained weights seldom fall half way between two codes. These are put there, and on the floats next to it.
    middle = (np.asarray(codes, np.float32) + np.float32(0.5)) * np.asarray(steps[0])
    ties = np.concatenate([middle, *(np.nextafter(middle, np.float32(end)) for end in (-np.inf, np.inf))])
    (reference,) = onnx_runtime("QuantizeLinear", ties, *steps, axis=1)
    ours = jq.quantize_linear(ties, *steps, axis=1)
    yield "near ties (made up): codes", reference, ours, plain_quantize(ties, *steps)


def compare(layers: Iterator[Any]) -> int:
    """Prints how many numbers are not ONNX Runtime's, by kind, and returns how many of jaxquant's are not."""
    counts = defaultdict(lambda: np.zeros(3, int))  # compared, wrong in jaxquant, wrong in plain JAX
    for layer in layers:
        for kind, reference, *others in results(*layer):
            counts[kind] += [reference.size, *(np.count_nonzero(np.asarray(other) != reference) for other in others)]
    print(f"Numbers that differ from those of ONNX Runtime {onnxruntime.__version__}:")
    print(f"{'':28}{'of':>10}{'jaxquant':>11}{'plain JAX':>11}")
    for kind, (compared, ours, plain) in counts.items():
        print(f"{kind:28}{compared:10}{ours:11}{plain:11}")
    print("Near ties: the weights, moved half way between two codes and one float to either side.\n")
    return sum(int(ours) for _, ours, _ in counts.values())


def report_speed(params: Any, quantized: list[Quantized], biases: list[jax.Array], images: jax.Array) -> None:
    """Prints how long the float and the integer network take, compiled, in turns."""
    float32 = jax.jit(NETWORK.apply)
    int8 = jax.jit(lambda x: integer_network(x, quantized, biases)[0])
    for count in (1, 64, 4096):
        x = jnp.resize(images, (count, images.shape[1]))
        seconds: list[list[float]] = []
        for _ in range(60):
            seconds.append([])
            for network in (lambda x: float32(params, x), int8):
                start = time.perf_counter()
                jax.block_until_ready(network(x))
                seconds[-1].append(time.perf_counter() - start)
        medians = np.median(seconds[10:], axis=0) * 1e3
        print(f"{f'{count} images, ms':28}{medians[0]:10.3f}{medians[1]:11.3f}")
    print()


def main() -> int:
    """Trains, quantizes and reports. Returns 1 if a single number differs from ONNX Runtime's, else 0."""
    start = time.perf_counter()
    images, digits = load_digits(return_X_y=True)
    images = (images / 8 - 1).astype(np.float32)  # 0 to 16 becomes -1 to 1
    split = train_test_split(images, digits, test_size=0.25, random_state=0, stratify=digits)
    train_x, test_x, train_y, test_y = (jnp.asarray(part) for part in split)

    params = train(train_x, train_y)
    dense = [params["params"][f"layers_{i}"] for i in (0, 2, 4)]  # 1 and 3 are nn.relu
    kernels, biases = [layer["kernel"] for layer in dense], [layer["bias"] for layer in dense]
    quantized = [quantize_kernel(kernel) for kernel in kernels]
    integer_logits, inputs = integer_network(test_x, quantized, biases)
    logits = NETWORK.apply(params, test_x), integer_logits
    right = [100 * float((jnp.asarray(each).argmax(axis=1) == test_y).mean()) for each in logits]
    size = sum(k.nbytes for k in kernels), sum(codes.nbytes + scale.nbytes for codes, scale, _ in quantized)

    print(f"Handwritten digits: {len(train_x)} images to train, {len(test_x)} to test")
    print(f"{'':28}{'float32':>10}{'int8':>11}")
    print(f"{'test accuracy, percent':28}{right[0]:10.2f}{right[1]:11.2f}")
    print(f"{'weights (+ scales), bytes':28}{size[0]:10}{size[1]:11}")
    report_speed(params, quantized, biases, test_x)
    wrong = compare(zip(kernels, quantized, biases, inputs, strict=True))
    print(f"{time.perf_counter() - start:.1f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
