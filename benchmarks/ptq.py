"""Post-training algorithms with weights of 4, 3 and 2 bits: accuracy and error of networks on handwritten digits.

Run `python -m benchmarks.ptq` from the repository root, with the extra "examples".

The networks are those of benchmarks.recipes: Flax's own layers, trained in float32. All weights of a network get the
same number of bits, with one scale for each output feature; activations stay in floats. A seed determines the split,
the initial weights and the order of the batches. The algorithms see 512 training images. The accuracy is that of the
450 test images of each seed. The error is the signal-to-quantization-noise ratio of the logits against float32's.

JAX has no dtype of 3 bits. The levels -3 to 3 are a codebook with 16 entries, of which several are equal but for 1e-6,
so the arithmetic is that of 3 bits; the memory is that of 4. AdaRound chooses between integers, and has no row there.

The last table compares GPTQ with that of qwix, if it is installed: on one matrix with the same second moments, without
an order of the inputs, and with the scales that each of them finds.

The exit status is 1 if, in the mean over the seeds, the best stack keeps less than 99.5 % of float32's accuracy at 4
bits, or 98 % at 3 bits.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq
from jaxquant import ptq

from .recipes import _NETWORKS, _find_error, _print_line, _split_digits, _train

_SEEDS, _IMAGES = 5, 512
_FLOAT, _STACK = "float32", "stack: AWQ, GPTQ with 3 sweeps, biases"
_TARGETS = {"4": 0.995, "3": 0.98}
_NEAR = 1e-6
# Each level, once more beside it, and the two ends a third time: 16 entries.
_LEVELS = sorted([level + _NEAR * copy * (-1 if level > 0 else 1) for level in range(-3, 4) for copy in (0, 1)] +
                 [-3 + 2 * _NEAR, 3 - 2 * _NEAR])  # fmt: skip
_BITS: dict[str, Any] = {"4": "int4", "3": jq.Codebook("int3", tuple(_LEVELS)), "2": "int2"}

Outcome = Callable[[Any, Any, jax.Array], Any]


def _stack(prepared: Any, params: Any, x: jax.Array) -> Any:
    """Return the parameters of all algorithms together, each where it is exact."""
    stats = ptq.collect(prepared, params, [x], progress=False)
    smoothed = ptq.smooth(prepared, params, stats, x, method="awq").params
    qparams = ptq.apply(prepared, smoothed, [x], ptq.GPTQ(sweeps=3)).params
    stats = ptq.collect(prepared, smoothed, [x], progress=False)
    return ptq.correct_bias(prepared, smoothed, qparams, stats, batch=x).params


def _awq(prepared: Any, params: Any, x: jax.Array) -> Any:
    stats = ptq.collect(prepared, params, [x], progress=False)
    return prepared.convert(ptq.smooth(prepared, params, stats, x, method="awq").params)


def _gptq_with_float_inputs(prepared: Any, params: Any, x: jax.Array) -> Any:
    stats = ptq.collect(prepared, params, [x], progress=False)
    return ptq.apply(prepared, params, stats, ptq.GPTQ()).params


def _correct_bias(prepared: Any, params: Any, x: jax.Array) -> Any:
    stats = ptq.collect(prepared, params, [x], progress=False)
    return ptq.correct_bias(prepared, params, prepared.convert(params), stats, batch=x).params


_ALGORITHMS: dict[str, Outcome] = {
    "round-to-nearest": lambda prepared, params, x: prepared.convert(params),
    "round-to-nearest, searched range": lambda prepared, params, x: (
        ptq.apply(prepared, params, [x], ptq.Nearest("searched")).params
    ),
    "round-to-nearest, tried ranges": lambda prepared, params, x: (
        ptq.apply(prepared, params, [x], ptq.Nearest()).params
    ),
    "bias correction": _correct_bias,
    "equalization": lambda prepared, params, x: prepared.convert(ptq.equalize(prepared, params, x).params),
    "AWQ": _awq,
    "HQQ": lambda prepared, params, x: ptq.apply(prepared, params, None, ptq.HQQ()).params,
    "AdaRound": lambda prepared, params, x: ptq.apply(prepared, params, [x], ptq.AdaRound()).params,
    "GPTQ, whole range": lambda prepared, params, x: ptq.apply(prepared, params, [x], ptq.GPTQ(range="whole")).params,
    "GPTQ, inputs in floats": _gptq_with_float_inputs,
    "GPTQ": lambda prepared, params, x: ptq.apply(prepared, params, [x], ptq.GPTQ()).params,
    _STACK: _stack,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.ptq", description=__doc__)
    parser.add_argument("--seeds", type=int, default=_SEEDS, metavar="N", help=f"number of seeds; default {_SEEDS}")
    parser.add_argument("--networks", nargs="+", default=list(_NETWORKS), choices=list(_NETWORKS), help="default all")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("sklearn") is None:
        print('the data need scikit-learn: pip install -e ".[examples]"', file=sys.stderr)
        return 2
    began = time.perf_counter()
    print(
        f"Python {platform.python_version()}, jax {jax.__version__}, {options.seeds} seeds; mean ± standard deviation"
    )
    missed = []
    for name in options.networks:
        scores = [_score_seed(name, seed) for seed in range(options.seeds)]
        _print_table(name, scores)
        missed += _list_faults(name, scores)
    if importlib.util.find_spec("qwix") is not None:
        _print_qwix()
    print(f"\n{time.perf_counter() - began:.0f} s")
    print("missed: " + "; ".join(missed) if missed else "each target is met")
    return 1 if missed else 0


def _print_table(name: str, scores: Sequence[dict[tuple[str, str], tuple[float, float]]]) -> None:
    print(f"\n### {name}\n")
    _print_line(["weights", *(f"{bits} bits, {what}" for bits in _BITS for what in ("top-1 %", "SQNR dB"))])
    _print_line(["---", *["--:"] * 2 * len(_BITS)])
    _print_line([_FLOAT, *(x for _ in _BITS for x in (_format([seed[_FLOAT, ""][0] for seed in scores], 2), ""))])
    for algorithm in _ALGORITHMS:
        cells = []
        for bits in _BITS:
            values = [seed[algorithm, bits] for seed in scores if (algorithm, bits) in seed]
            cells += [_format([value[k] for value in values], 2 - k) if values else "" for k in range(2)]
        _print_line([algorithm, *cells])


def _format(values: Sequence[float], digits: int) -> str:
    spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
    return f"{np.mean(values):.{digits}f} ± {spread:.{digits}f}"


def _print_qwix(shapes: Sequence[tuple[int, int]] = ((64, 128), (128, 64))) -> None:
    """Print the times and the errors of GPTQ here and in qwix."""
    from qwix.contrib import gptq_core

    print(f"\n### GPTQ at 4 bits beside qwix {importlib.metadata.version('qwix')}\n")
    heads = ("inputs x outputs", "jaxquant ms", "qwix ms", "error jaxquant / qwix")
    _print_line(heads)
    _print_line(["---", *["--:"] * (len(heads) - 1)])
    how = gptq_core.qarray.HowToQuantize(qtype=jnp.int4, channelwise_axes=(0,))
    spec = jq.QuantSpec("int4", jq.PerAxis(1), narrow_range=False)
    for inputs, outputs in shapes:
        rng = np.random.default_rng(inputs)
        w = jnp.asarray(rng.normal(size=(inputs, outputs)), jnp.float32)
        x = jnp.asarray(rng.normal(size=(4 * inputs, inputs)) @ rng.normal(size=(inputs, inputs)), jnp.float32)
        hessian = x.T @ x / len(x)
        ours = functools.partial(ptq.gptq, w, hessian, spec, activation_order=False)
        theirs = functools.partial(gptq_core.quantize_weight, w.T, hessian, how)
        jax.block_until_ready(ours().codes)
        errors, seconds = [], []
        for call in (ours, theirs):
            begin = time.perf_counter()
            q = jax.block_until_ready(call())
            seconds.append(time.perf_counter() - begin)
            if isinstance(q, jq.QuantizedArray):
                values = q.dequantize()
            else:
                values = (q[0].qvalue.astype(jnp.float32) * q[0].scale).T
            errors.append(float(jnp.sum((x @ (w - values)) ** 2)))
        _print_line([f"{inputs} x {outputs}", *(f"{1e3 * s:.1f}" for s in seconds), f"{errors[0] / errors[1]:.3f}"])


def _list_faults(name: str, scores: Sequence[dict[tuple[str, str], tuple[float, float]]]) -> list[str]:
    full = np.mean([seed[_FLOAT, ""][0] for seed in scores])
    faults = []
    for bits, target in _TARGETS.items():
        share = np.mean([seed[_STACK, bits][0] for seed in scores]) / full
        faults += [f"{name}, {bits} bits: {100 * share:.2f} % of float32"] if share < target else []
    return faults


def _score_seed(name: str, seed: int) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the accuracy and the error of each algorithm on one trained network."""
    network = _NETWORKS[name]
    train, test = _split_digits(seed)
    params = _train(network, train, jax.random.key(seed))
    expected = jax.jit(network.apply)(params, test[0])
    scores = {(_FLOAT, ""): (100 * float((expected.argmax(1) == test[1]).mean()), 0.0)}
    for bits, dtype in _BITS.items():
        prepared = jq.prepare(network.apply, params, test[0], rules=[jq.Rule(weight=jq.Weight(dtype))])
        run = jax.jit(prepared.apply)
        for algorithm, quantize in _ALGORITHMS.items():
            if algorithm == "AdaRound" and not isinstance(dtype, str):
                continue
            y = run(quantize(prepared, params, train[0][:_IMAGES]), None, test[0])
            accuracy = 100 * float(jnp.mean(y.argmax(1) == test[1]))
            scores[algorithm, bits] = (accuracy, _find_error(expected, y))
    return scores


if __name__ == "__main__":
    sys.exit(main())
