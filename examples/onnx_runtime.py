"""Train a network on handwritten digits, run it in integers, and compare its numbers with ONNX Runtime's.

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
    """Return trained float parameters. Each step uses all images, so only the initial weights are random."""

    def loss(params: Any) -> jax.Array:
        logits: Any = NETWORK.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(_: int, carry: Any) -> Any:
        params, state = carry
        updates, state = OPTIMIZER.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    params = NETWORK.init(jax.random.key(0), images)
    return jax.lax.fori_loop(0, 50, step, (params, OPTIMIZER.init(params)))[0]


def quantize_kernel(kernel: jax.Array) -> Quantized:
    """Quantize a kernel of shape (inputs, outputs) to int8, with one scale per output."""
    scale = jnp.abs(kernel).max(axis=0) / 127
    zero_point = jnp.zeros(scale.shape, jnp.int8)
    return jq.quantize_linear(kernel, scale, zero_point, axis=1), scale, zero_point


@jax.jit
def apply_dense(x: jax.Array, kernel: Quantized, bias: jax.Array) -> jax.Array:
    """Quantize x to uint8, contract the integers, and convert the result to float32."""
    codes, scale, zero_point = kernel
    return jq.ops.dynamic_quantize_matmul(x, codes, scale, zero_point, bias)


@jax.jit
def apply_plain_dense(x: jax.Array, kernel: Quantized, bias: jax.Array) -> jax.Array:
    """Compute the same layer in plain JAX."""
    codes, scale, _ = kernel  # the zero points of the kernel are 0
    y, y_scale, y_zero_point = quantize_dynamically_in_plain_jax(x)
    # Convert to int32 first, because differences and sums of 8-bit integers wrap around.
    sums = (y.astype(jnp.int32) - y_zero_point) @ codes.astype(jnp.int32)
    return sums * (y_scale * scale) + bias


def apply_network(x: jax.Array, kernels: list[Quantized], biases: list[jax.Array]) -> tuple[jax.Array, list[Any]]:
    """Return the logits and the input of each layer. Only the nn.relu between the layers compute in float32."""
    inputs = []
    for kernel, bias in zip(kernels, biases, strict=True):
        x = nn.relu(x) if inputs else x
        inputs.append(x)
        x = apply_dense(x, kernel, bias)
    return x, inputs


@jax.jit
def quantize_in_plain_jax(x: ArrayLike, scale: jax.Array, zero_point: jax.Array) -> jax.Array:
    """Compute QuantizeLinear in plain JAX. XLA replaces the division by a multiplication by 1 / scale."""
    limits = jnp.iinfo(zero_point.dtype)
    return jnp.clip(jnp.round(x / scale) + zero_point, limits.min, limits.max).astype(zero_point.dtype)


@jax.jit
def quantize_dynamically_in_plain_jax(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute DynamicQuantizeLinear in plain JAX."""
    low, high = jnp.minimum(x.min(), 0), jnp.maximum(x.max(), 0)
    scale = (high - low) / 255
    zero_point = jnp.clip(jnp.round(-low / scale), 0, 255).astype(jnp.uint8)
    return quantize_in_plain_jax(x, scale, zero_point), scale, zero_point


def run_onnx_runtime(op: str, *arrays: ArrayLike, outputs: int = 1, domain: str = "", **attributes: Any) -> list[Any]:
    """Run a model of a single node in ONNX Runtime and return its outputs."""
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


def compute_layer(
    kernel: jax.Array, quantized: Quantized, bias: jax.Array, x: jax.Array
) -> Iterator[tuple[str, Any, jax.Array, jax.Array]]:
    """Yield the kinds of numbers of a layer with input x, with the results of ONNX Runtime, jaxquant and plain JAX."""
    codes, scale, zero_point = quantized
    (reference,) = run_onnx_runtime("QuantizeLinear", kernel, scale, zero_point, axis=1)
    yield "weights: codes", reference, codes, quantize_in_plain_jax(kernel, scale, zero_point)
    (reference,) = run_onnx_runtime("DequantizeLinear", codes, scale, zero_point, axis=1)
    yield "weights: dequantized", reference, jq.dequantize_linear(codes, scale, zero_point, axis=1), codes * scale

    kinds = ("activations: codes", "activations: scale", "activations: zero point")
    references = run_onnx_runtime("DynamicQuantizeLinear", x, outputs=3)
    results, plain_results = jq.dynamic_quantize_linear(x), quantize_dynamically_in_plain_jax(x)
    yield from zip(kinds, references, results, plain_results, strict=True)

    (reference,) = run_onnx_runtime("DynamicQuantizeMatMul", x, codes, scale, zero_point, bias, domain="com.microsoft")
    yield "layers: outputs", reference, apply_dense(x, quantized, bias), apply_plain_dense(x, quantized, bias)

    # Trained weights are rarely halfway between two codes. These inputs are, or are the floats next to a tie.
    ties = (np.asarray(codes, np.float32) + np.float32(0.5)) * np.asarray(scale)
    below, above = np.nextafter(ties, np.float32(-np.inf)), np.nextafter(ties, np.float32(np.inf))
    near_ties = np.concatenate([ties, below, above])
    (reference,) = run_onnx_runtime("QuantizeLinear", near_ties, scale, zero_point, axis=1)
    result = jq.quantize_linear(near_ties, scale, zero_point, axis=1)
    yield "near ties: codes", reference, result, quantize_in_plain_jax(near_ties, scale, zero_point)


def compare(layers: Iterator[Any]) -> int:
    """Print how many numbers of each kind differ from ONNX Runtime's. Return how many of jaxquant's differ."""
    counts = defaultdict(lambda: np.zeros(3, int))  # compared; different in jaxquant; different in plain JAX
    for layer in layers:
        for kind, reference, *results in compute_layer(*layer):
            differences = [np.count_nonzero(np.asarray(result) != reference) for result in results]
            counts[kind] += [reference.size, *differences]
    print(f"Numbers that differ from ONNX Runtime's (version {onnxruntime.__version__}):")
    print(f"{'':28}{'compared':>10}{'jaxquant':>11}{'plain JAX':>11}")
    for kind, (compared, in_jaxquant, in_plain_jax) in counts.items():
        print(f"{kind:28}{compared:10}{in_jaxquant:11}{in_plain_jax:11}")
    print("Near ties: weights moved halfway between two codes, and to the floats next to it.\n")
    return sum(int(in_jaxquant) for _, in_jaxquant, _ in counts.values())


def report_speed(params: Any, quantized: list[Quantized], biases: list[jax.Array], images: jax.Array) -> None:
    """Print how long the compiled float and integer networks take. Their calls alternate."""
    float32 = jax.jit(NETWORK.apply)
    int8 = jax.jit(lambda x: apply_network(x, quantized, biases)[0])
    for count in (1, 64, 4096):
        x = jnp.resize(images, (count, images.shape[1]))
        seconds: list[list[float]] = []
        for _ in range(25):
            seconds.append([])
            for network in (lambda x: float32(params, x), int8):
                start = time.perf_counter()
                jax.block_until_ready(network(x))
                seconds[-1].append(time.perf_counter() - start)
        medians = np.median(seconds[5:], axis=0) * 1e3
        print(f"{f'{count} images, ms':28}{medians[0]:10.3f}{medians[1]:11.3f}")
    print()


def main() -> int:
    """Train, quantize and report. Return 1 if any number differs from ONNX Runtime's, else 0."""
    start = time.perf_counter()
    images, digits = load_digits(return_X_y=True)
    images = (images / 8 - 1).astype(np.float32)  # from [0, 16] to [-1, 1]
    split = train_test_split(images, digits, test_size=0.25, random_state=0, stratify=digits)
    train_x, test_x, train_y, test_y = (jnp.asarray(part) for part in split)

    params = train(train_x, train_y)
    layers = [params["params"][f"layers_{i}"] for i in (0, 2, 4)]  # 1 and 3 are nn.relu
    kernels, biases = [layer["kernel"] for layer in layers], [layer["bias"] for layer in layers]
    quantized = [quantize_kernel(kernel) for kernel in kernels]
    float_logits = jnp.asarray(NETWORK.apply(params, test_x))
    integer_logits, inputs = apply_network(test_x, quantized, biases)
    accuracies = [100 * float((logits.argmax(axis=1) == test_y).mean()) for logits in (float_logits, integer_logits)]
    float_bytes = sum(kernel.nbytes for kernel in kernels)
    integer_bytes = sum(codes.nbytes + scale.nbytes for codes, scale, _ in quantized)

    print(f"Handwritten digits: {len(train_x)} images to train, {len(test_x)} to test")
    print(f"{'':28}{'float32':>10}{'int8':>11}")
    print(f"{'test accuracy, percent':28}{accuracies[0]:10.2f}{accuracies[1]:11.2f}")
    print(f"{'weights (+ scales), bytes':28}{float_bytes:10}{integer_bytes:11}")
    report_speed(params, quantized, biases, test_x)
    differences = compare(zip(kernels, quantized, biases, inputs, strict=True))
    print(f"{time.perf_counter() - start:.1f} s")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
