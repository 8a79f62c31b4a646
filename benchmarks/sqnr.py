"""The signal-to-quantization-noise ratio by calibrator and dtype.

Run `python -m benchmarks.sqnr` from the repository root, with the extra "examples".

The data are the weights and activations of a small network that is trained on handwritten digits, and samples of
heavy-tailed distributions. Calibrators find the ranges in one half of the data, batch by batch, and the ratio is
measured on the other half, except for weights. The seeds are fixed. The exit status is 1 if mse is worse than minmax on
the data that both have seen, or worse by more than 0.05 dB on other data.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

_DTYPES = (jnp.int8, jnp.uint8, jnp.int4, jnp.uint4, jnp.float8_e4m3fn)
_INTEGERS = (jnp.int8, jnp.uint8, jnp.int4, jnp.uint4)
_COLUMNS = ("minmax", "moving_average", "percentile 99.9", "percentile 99.99", "mse", "entropy")
_SLACK = 0.05  # dB by which mse may be worse than minmax on data that it has not seen
_BATCH, _WIDTH = 224, 64  # of the network's activations; all batches have one shape, so that few programs are compiled
_HALF = 4 * _BATCH  # images
_DRAWN, _DRAWN_BATCH = 16, (64, 1024)  # samples of each distribution to find ranges, and as many to measure
_STEPS, _RATE = 2000, 0.2


class _Data(NamedTuple):
    """Float32 matrices in which ranges are found, and one on which they are measured."""

    name: str
    granularity: Any
    batches: Sequence[np.ndarray]
    held_out: np.ndarray


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser("benchmarks.sqnr", description=__doc__).parse_args(arguments)
    if importlib.util.find_spec("sklearn") is None:
        print('the digits need scikit-learn: pip install -e ".[examples]"', file=sys.stderr)
        return 2
    network, right = _network()
    print("SQNR in dB on data that no calibrator has seen; for weights, on the weights themselves.")
    print(f"The network classifies {right:.1%} of unseen digits correctly.\n")
    _print_line(["data", "scale", "dtype", *_COLUMNS, "mse - minmax", "mse - minmax, data seen"])
    _print_line(["---"] * (len(_COLUMNS) + 5))
    wrong = [line for data in (*network, *_draw_heavy_tails()) for dtype in _DTYPES for line in _judge(data, dtype)]
    print("\nmse is worse than minmax: " + "; ".join(wrong) if wrong else "\nmse is never worse than minmax")
    return 1 if wrong else 0


def _judge(data: _Data, dtype: Any) -> list[str]:
    """Print a row, and return a description of each failure."""
    spec = jq.QuantSpec(dtype, data.granularity)
    ranges = {name: _range(name, spec, data.batches) for name in _COLUMNS if name != "entropy" or dtype in _INTEGERS}
    held_out = jnp.asarray(data.held_out)
    sqnr = {
        n: float(jq.quantization_error(held_out, jq.quantize(held_out, spec, range=r))[0]) for n, r in ranges.items()
    }
    calibration_data = np.concatenate(data.batches)
    unseen_gain, seen_gain = (
        _gain(*(_noise(x, jq.quantize(jnp.asarray(x), spec, range=ranges[name])) for name in ("minmax", "mse")))
        for x in (data.held_out, calibration_data)
    )
    cells = [f"{sqnr[name]:.2f}" if name in sqnr else "" for name in _COLUMNS]
    kind = "per tensor" if isinstance(data.granularity, jq.PerTensor) else "per column"
    label = [data.name, kind, np.dtype(dtype).name]
    _print_line([*label, *cells, f"{unseen_gain:+.3f}", f"{seen_gain:+.3f}"])
    title = " ".join(label)
    wrong = [f"{title}, data seen: {seen_gain:+.4f} dB"] if seen_gain < 0 else []
    return wrong + ([f"{title}: {unseen_gain:+.4f} dB"] if unseen_gain < -_SLACK else [])


def _range(name: str, spec: jq.QuantSpec, batches: Sequence[np.ndarray]) -> Any:
    kind, *arguments = name.split()
    calibrator = getattr(jq.calibration, kind)(spec, *map(float, arguments))
    state = calibrator.init(batches[0])
    for batch in batches:
        state = calibrator.update(state, jnp.asarray(batch))
    return calibrator.finalize(state)


def _noise(x: np.ndarray, q: jq.QuantizedArray) -> float:
    """Return the squared error in float64, so that the rounding of float32 sums does not matter."""
    return float(np.sum((x.astype(np.float64) - np.asarray(q.dequantize(), np.float64)) ** 2))


def _gain(before: float, after: float) -> float:
    if before == after:
        return 0.0
    return float(10 * np.log10(before / after)) if after else float("inf")


# The digits network.


def _network() -> tuple[list[_Data], float]:
    """Return the weights, the inputs of the layers, and the accuracy on held-out digits."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    halves = order[:_HALF], order[_HALF : 2 * _HALF]
    calibration_images, held_out = ((images[half] / 16).astype(np.float32) for half in halves)
    weights = _train(calibration_images, labels[halves[0]])
    layers = [[np.asarray(x) for x in _layers(weights, images)] for images in (calibration_images, held_out)]
    data = []
    for name, x, y in zip(("images", "hidden 1, after ReLU", "hidden 2, after ReLU"), *layers, strict=False):
        data.append(_Data(f"digits: {name}", jq.PerTensor(), np.split(x, _HALF // _BATCH), y))
    for granularity in (jq.PerTensor(), jq.PerAxis(1)):
        for i, (w, _) in enumerate(weights, 1):
            data.append(_Data(f"digits: weights {i}", granularity, [np.asarray(w)], np.asarray(w)))
    return data, float(np.mean(np.argmax(layers[1][-1], axis=1) == labels[halves[1]]))


def _layers(weights: Any, x: Any) -> list[jax.Array]:
    """Return the inputs of all layers and the output of the last one."""
    inputs = [x]
    for w, b in weights[:-1]:
        inputs.append(jax.nn.relu(inputs[-1] @ w + b))
    w, b = weights[-1]
    return [*inputs, inputs[-1] @ w + b]


def _train(images: np.ndarray, labels: np.ndarray) -> Any:
    """Return the layers (weights, bias) after plain gradient descent. Each step uses all images."""
    rng = np.random.default_rng(1)
    widths = (_WIDTH, _WIDTH, _WIDTH, 10)
    weights = [
        (jnp.asarray(rng.normal(0, np.sqrt(2 / m), (m, n)), jnp.float32), jnp.zeros(n, jnp.float32))
        for m, n in itertools.pairwise(widths)
    ]

    def loss(weights: Any) -> jax.Array:
        scores = jax.nn.log_softmax(_layers(weights, images)[-1])
        return -jnp.mean(scores[np.arange(len(labels)), labels])

    def step(_: int, weights: Any) -> Any:
        return jax.tree.map(lambda w, g: w - _RATE * g, weights, jax.grad(loss)(weights))

    return jax.jit(functools.partial(jax.lax.fori_loop, 0, _STEPS, step))(weights)


# Heavy tails.


def _draw_heavy_tails() -> Iterator[_Data]:
    rng = np.random.default_rng(2)
    shape = _DRAWN_BATCH
    families = {
        "Student t, 3 degrees of freedom": lambda: rng.standard_t(3, shape),
        "Laplace": lambda: rng.laplace(size=shape),
        "log-normal, signed": lambda: rng.lognormal(size=shape) * rng.choice((-1, 1), shape),
        "normal, 0.1 % times 20": lambda: rng.normal(size=shape) * np.where(rng.random(shape) < 1e-3, 20, 1),
    }
    for name, draw in families.items():
        batches = [draw().astype(np.float32) for _ in range(2 * _DRAWN)]
        yield _Data(name, jq.PerTensor(), batches[:_DRAWN], np.concatenate(batches[_DRAWN:]))


def _print_line(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
