"""Quantize a pretrained sentence encoder to weights of 4 bits with GPTQ, and write a report with pictures.

Install what `examples/minilm.py` needs, and matplotlib. The text for calibration is Python's own language reference.
"""

from __future__ import annotations

import sys
import time
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import minilm
import numpy as np

import jaxquant as jq
from jaxquant import ptq

SENTENCES, TOKENS = 256, 32
# The tables have 8 bits: single rows are looked up, so an algorithm has no inputs to look at.
RULES = (jq.Rule(operation="take", weight=jq.Weight("int8")), jq.Rule(weight=jq.Weight("int4")))


def read_texts(count: int) -> list[str]:
    """Return paragraphs that fill all tokens, so that the statistics do not count padding."""
    texts = [" ".join(text.split()) for topic in sorted(topics) for text in topics[topic].split("\n\n")]
    texts = [text for text in texts if len(text) > 8 * TOKENS and text[0].isalpha()]
    return [texts[place] for place in np.random.default_rng(0).permutation(len(texts))[:count]]


def rank_similarities(embeddings: jax.Array) -> np.ndarray:
    """Return the ranks of the similarities of all pairs of sentences."""
    pairs = np.asarray(embeddings @ embeddings.T)[np.triu_indices(len(embeddings), 1)]
    return pairs.argsort().argsort()


def main() -> int:
    """Quantize, compare and print. Return 1 if GPTQ does not keep more of the order than round-to-nearest, else 0."""
    params, tokenizer = minilm.load()
    start = time.perf_counter()
    batch = minilm.tokenize(tokenizer, read_texts(SENTENCES), TOKENS)
    prepared = jq.prepare(minilm.encode, params, *batch, rules=RULES)
    q, notes = ptq.apply(prepared, params, [batch], ptq.GPTQ())
    print(f"{notes}\n\n{time.perf_counter() - start:.0f} s for {SENTENCES} sentences and {len(notes)} weights")
    texts = minilm.tokenize(tokenizer, minilm.TEST, TOKENS)
    expected = rank_similarities(jax.jit(minilm.encode)(params, *texts))
    results = {"GPTQ": q, "round-to-nearest": prepared.convert(params)}
    ranks = {name: rank_similarities(jax.jit(prepared.apply)(tree, *texts)) for name, tree in results.items()}
    correlations = {name: float(np.corrcoef(rank, expected)[0, 1]) for name, rank in ranks.items()}
    print("Spearman's correlation with float32:", ", ".join(f"{name} {x:.4f}" for name, x in correlations.items()))
    jq.report.compare(prepared, params, q, [jax.tree.map(jnp.asarray, texts)]).to_html("minilm_4bit.html")
    print("minilm_4bit.html has the errors of each contraction")
    return int(correlations["GPTQ"] <= correlations["round-to-nearest"])


if __name__ == "__main__":
    sys.exit(main())
