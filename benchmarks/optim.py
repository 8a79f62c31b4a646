"""8-bit states of optimizers: bytes, the end of training against float32 states, and the time of an update.

Run `python -m benchmarks.optim` from the repository root, with the extra "examples"; `--all` adds the alternatives that
were not chosen.

Two networks are trained with AdamW, each with five seeds, which determine the initial weights and the order of the
batches: a convolutional network on scikit-learn's digits, and a transformer on sequences of a Markov chain whose words
are as unequally frequent as in a language. The table shows means and standard deviations over the seeds. A
state "ends within the spread" if its mean loss on data that were not trained on differs from that of float32 by at most
the standard deviation of float32, or is lower.

The time is that of a jitted update of AdamW with donated buffers, without the gradient. The CPU time is that of all
threads.

The exit status is 1 if the default ends outside the spread, or takes more than 0.27 of the bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from sklearn import datasets

import jaxquant as jq

_FLOAT, _DEFAULT = "float32", "default"
_MOST_BYTES = 0.27
_Params = dict[str, jax.Array]


def _list_decades(is_signed: bool) -> jq.Codebook:
    """Return the dynamic map of arXiv 2110.02861: 2**i or 2**(i + 1) levels in the decade from 10**(i - 7)."""
    levels: list[float] = []
    for i in range(7):
        edges = np.linspace(0.1, 1, 2 ** (i + 1 - is_signed) + 1)
        levels += list(10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2)
    negative = [-level for level in levels[::-1]] if is_signed else []
    return jq.Codebook("signed decades" if is_signed else "decades", (*negative, 0.0, *levels, 1.0))


def _list_squares() -> jq.Codebook:
    """Return the squares of equally spaced numbers: the root of a second moment in equal steps."""
    return jq.Codebook("squares", tuple((i / 255) ** 2 for i in range(256)))


_LINEAR = jq.Codebook("linear", tuple(i / 255 for i in range(256)))
_wrap = jq.optim.quantize_state
_STATES: dict[str, Callable[[Any], Any]] = {
    _FLOAT: lambda tx: tx,
    _DEFAULT: _wrap,
    "stochastic rounding": functools.partial(_wrap, seed=0),
    "embeddings in float32": functools.partial(_wrap, overrides={"embed": None}),
    "rows of 256": lambda tx: _wrap(
        tx, jq.QuantSpec(jq.optim.dynamic, jq.Blocked(-1, 256)), jq.QuantSpec(jq.optim.logarithmic, jq.Blocked(-1, 256))
    ),
    "decades": lambda tx: _wrap(tx, _list_decades(True), _list_decades(False)),
    "second: decades": lambda tx: _wrap(tx, second_spec=_list_decades(False)),
    "both: dynamic": lambda tx: _wrap(tx, second_spec=jq.optim.dynamic),
    "second: squares": lambda tx: _wrap(tx, second_spec=_list_squares()),
    "second: linear": lambda tx: _wrap(tx, second_spec=_LINEAR),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """A network, its data and how long it is trained.

    Attributes:
        name: in the table.
        init: returns parameters for a key.
        loss: the mean loss and the accuracy for parameters and a batch.
        train: the training data, arrays with equally long first dimensions.
        test: the data of the scores.
        steps: the number of updates.
        batch: the batch size.
        rate: the largest learning rate.
    """

    name: str
    init: Callable[[jax.Array], _Params]
    loss: Callable[[_Params, Any], tuple[jax.Array, jax.Array]]
    train: Any
    test: Any
    steps: int
    batch: int
    rate: float


def _score_logits(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (logits.argmax(-1) == labels).mean()


# The digits.


def init_cnn(key: jax.Array) -> _Params:
    keys = jax.random.split(key, 4)
    shapes = {"conv_a": (3, 3, 1, 32), "conv_b": (3, 3, 32, 64), "dense_a": (1024, 64), "dense_b": (64, 10)}
    params = {}
    for k, (name, shape) in zip(keys, shapes.items(), strict=True):
        params[name] = jax.nn.initializers.he_normal()(k, shape)
        params[f"{name}_bias"] = jnp.zeros(shape[-1])
    return params


def apply_cnn(params: _Params, x: jax.Array) -> jax.Array:
    """Return the logits of images [n, 8, 8, 1]: two convolutions, a maximum over 2 x 2, and two dense layers."""
    for name in ("conv_a", "conv_b"):
        x = lax.conv_general_dilated(x, params[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + params[f"{name}_bias"][None, None, None])
    x = x.reshape(len(x), 4, 2, 4, 2, 64).max((2, 4)).reshape(len(x), 1024)
    x = jax.nn.relu(x @ params["dense_a"] + params["dense_a_bias"][None])
    return x @ params["dense_b"] + params["dense_b_bias"][None]


def make_digits(steps: int = 300) -> Task:
    digits: Any = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(digits.data))
    images = jnp.asarray(digits.data[order].reshape(-1, 8, 8, 1) / 16, jnp.float32)
    labels = jnp.asarray(digits.target[order], jnp.int32)

    def loss(params: _Params, batch: Any) -> tuple[jax.Array, jax.Array]:
        return _score_logits(apply_cnn(params, batch[0]), batch[1])

    train, test = (images[:1200], labels[:1200]), (images[1200:], labels[1200:])
    return Task("digits, CNN", init_cnn, loss, train, test, steps, 32, 1e-3)


# The transformer.

_WORDS, _WIDTH, _HEADS, _LAYERS, _LENGTH = 512, 64, 4, 2, 32


def sample_chain(count: int) -> np.ndarray:
    """Return sequences of words: each word has eight successors, drawn with frequencies 1, 1/2, ..., 1/8."""
    rng = np.random.default_rng(1)
    frequency = 1 / np.arange(1, _WORDS + 1)
    successors = rng.choice(_WORDS, (_WORDS, 8), p=frequency / frequency.sum())
    weight = 1 / np.arange(1, 9)
    draws = rng.choice(8, (count, _LENGTH), p=weight / weight.sum())
    words = np.zeros((count, _LENGTH + 1), np.int32)
    words[:, 0] = rng.choice(_WORDS, count, p=frequency / frequency.sum())
    for place in range(_LENGTH):
        words[:, place + 1] = successors[words[:, place], draws[:, place]]
    return words


def init_transformer(key: jax.Array) -> _Params:
    shapes = {"embed": (_WORDS, _WIDTH), "places": (_LENGTH, _WIDTH)}
    for layer in range(_LAYERS):
        shapes |= {f"qkv{layer}": (_WIDTH, 3 * _WIDTH), f"out{layer}": (_WIDTH, _WIDTH)}
        shapes |= {f"up{layer}": (_WIDTH, 4 * _WIDTH), f"down{layer}": (4 * _WIDTH, _WIDTH)}
    shapes["head"] = (_WIDTH, _WORDS)
    keys = jax.random.split(key, len(shapes))
    scales: dict[str, float] = {"embed": 0.02, "places": 0.02}
    return {
        name: jax.random.normal(k, shape) * scales.get(name, 1 / math.sqrt(shape[0]))
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _normalize(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def apply_transformer(params: _Params, words: jax.Array) -> jax.Array:
    """Return the logits of the next word at each place: a decoder with normalization before each part."""
    x = params["embed"][words] + params["places"][None]
    for layer in range(_LAYERS):
        qkv = (_normalize(x) @ params[f"qkv{layer}"]).reshape(*x.shape[:2], 3, _HEADS, _WIDTH // _HEADS)
        mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x = x + mixed.reshape(x.shape) @ params[f"out{layer}"]
        x = x + jax.nn.gelu(_normalize(x) @ params[f"up{layer}"]) @ params[f"down{layer}"]
    return _normalize(x) @ params["head"]


def make_chain(steps: int = 400) -> Task:
    words = jnp.asarray(sample_chain(4096 + 256))

    def loss(params: _Params, batch: Any) -> tuple[jax.Array, jax.Array]:
        return _score_logits(apply_transformer(params, batch[0][:, :-1]), batch[0][:, 1:])

    return Task("words, transformer", init_transformer, loss, (words[:4096],), (words[4096:],), steps, 16, 3e-3)


# Training.


def train(task: Task, tx: Any, seeds: Sequence[int]) -> tuple[np.ndarray, jq.optim.StateReport]:
    """Return the loss and the accuracy on the test data for each seed, and a report on the state."""

    # One call for each step: XLA:CPU computes convolutions inside of loops on one thread.
    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry: Any, key: jax.Array) -> Any:
        params, state = carry
        rows = jax.random.randint(key, (task.batch,), 0, len(task.train[0]))
        batch = jax.tree.map(lambda x: x[rows], task.train)
        gradient = jax.grad(lambda p: task.loss(p, batch)[0])(params)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    score, scores = jax.jit(lambda params: jnp.stack(task.loss(params, task.test))), []
    for seed in seeds:
        start, order = jax.random.split(jax.random.key(seed))
        params = task.init(start)
        carry = params, tx.init(params)
        for key in jax.random.split(order, task.steps):
            carry = step(carry, key)
        scores.append(score(carry[0]))
    report = jq.optim.describe_state(jax.eval_shape(lambda key: tx.init(task.init(key)), jax.random.key(0)))
    return np.array(scores, np.float64), report


def make_optimizer(task: Task) -> Any:
    """Return AdamW with a schedule, the optimizer of the comparisons."""
    return optax.adamw(optax.cosine_decay_schedule(task.rate, task.steps), weight_decay=0.01)


def _compare(task: Task, names: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Print the rows of a task, and return what is wrong with the default."""
    wrong, reference = [], np.zeros(0)
    for name in names:
        began = time.perf_counter()
        scores, report = train(task, _STATES[name](make_optimizer(task)), seeds)
        losses = scores[:, 0]
        reference = losses if name == _FLOAT else reference
        spread = reference.std(ddof=1) if len(seeds) > 1 else np.inf
        is_within = bool(losses.mean() <= reference.mean() + spread)
        adam = [row for row in report.rows if row.shape]
        ratio = sum(row.nbytes for row in adam) / sum(row.float_nbytes for row in adam)
        columns = [f"{values.mean():.4f} ± {values.std(ddof=min(1, len(seeds) - 1)):.4f}" for values in scores.T]
        verdict = "" if name == _FLOAT else "yes" if is_within else "no"
        print(f"| {task.name} | {name} | {ratio:.3f} | {columns[0]} | {columns[1]} | {verdict} |", flush=True)
        print(f"{task.name} {name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        if name == _DEFAULT:
            wrong += [] if is_within else [f"{task.name}: the loss is outside the spread"]
            wrong += [] if ratio <= _MOST_BYTES else [f"{task.name}: {ratio:.3f} of the bytes"]
    return wrong


# Time.


def _measure(names: Sequence[str], shape: tuple[int, int], rounds: int) -> dict[str, tuple[float, ...]]:
    """Return the least and the median time of an update and the median of its CPU time, ms, of alternating updates."""
    params = {"w": jax.random.normal(jax.random.key(0), shape)}
    calls, carries = {}, {}
    for name in names:
        tx = _STATES[name](optax.adamw(1e-3))

        def step(carry: Any, gradient: Any, tx: Any = tx) -> Any:
            updates, state = tx.update(gradient, carry[1], carry[0])
            return optax.apply_updates(carry[0], updates), state

        calls[name] = jax.jit(step, donate_argnums=0)
        carries[name] = jax.tree.map(jnp.copy, (params, tx.init(params)))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for place in range(rounds + 2):
        for name, call in calls.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            carries[name] = jax.block_until_ready(call(carries[name], params))
            spent = 1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - began_cpu)
            times[name] += [spent] if place > 1 else []
    columns = {name: np.array(values) for name, values in times.items()}
    return {name: (t[:, 0].min(), *np.median(t, axis=0)) for name, t in columns.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.optim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="number of seeds; default 5")
    parser.add_argument("--all", action="store_true", help="the alternatives that were not chosen, too")
    parser.add_argument("--part", choices=("train", "time"), help="only one of the two tables")
    options = parser.parse_args(arguments)
    print(f"Python {platform.python_version()}, jax {jax.__version__}, optax {optax.__version__}\n")
    names, wrong = list(_STATES) if options.all else list(_STATES)[:4], []
    if options.part != "time":
        print("| task | state | bytes | loss | accuracy | within the spread |\n|---|---|---|---|---|---|")
        wrong = [line for make in (make_digits, make_chain) for line in _compare(make(), names, range(options.seeds))]
    if options.part != "train":
        print("\n| matrix | state | update, ms, least | median | CPU time, median |\n|---|---|---|---|---|")
        for shape in ((512, 512), (2048, 2048)):
            for name, times in _measure(names[:3], shape, 40).items():
                print(f"| {shape[0]} x {shape[1]} | {name} | {' | '.join(f'{t:.2f}' for t in times)} |")
    if options.part == "time":
        return 0
    print("\n" + ("missed: " + "; ".join(wrong) if wrong else "the default met every target"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
