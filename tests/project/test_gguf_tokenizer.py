"""SentencePiece's tokens of the examples' tokenizer, beside a search of all neighbors in each step."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import numpy as np
import pytest

from ..cases.decoders import EXAMPLES

SPACE, CONTROL, NORMAL, USER_DEFINED, BYTE = "\N{LOWER ONE EIGHTH BLOCK}", 3, 1, 4, 6
BYTES = [f"<0x{value:02X}>" for value in range(256)]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("gguf_tokenizer")


def make_metadata(rng: np.random.Generator, equal_scores: bool = False) -> dict[str, Any]:
    """Return a vocabulary of letters, tokens of two to five of them, and tokens that are found before these."""
    letters = ["a", "b", "\N{LATIN SMALL LETTER E WITH ACUTE}", SPACE]
    joined = sorted({"".join(rng.choice(letters, n)) for n in rng.integers(2, 6, 60)})
    parts = {"<eos>": CONTROL, **dict.fromkeys(BYTES, BYTE), "\n\n": USER_DEFINED, "   ": USER_DEFINED}
    parts |= dict.fromkeys([*letters, *joined], NORMAL)
    scores = -rng.permutation(len(parts)).astype(np.float32)
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.tokens": list(parts), "tokenizer.ggml.token_type": np.array(list(parts.values())),
        "tokenizer.ggml.scores": np.floor(scores / 8) if equal_scores else scores,
    }  # fmt: skip


def join_all(parts: list[str], scores: dict[str, float]) -> list[str]:
    """Join the neighbors whose token has the best score, the first ones of equal scores, until none are a token."""
    while True:
        joined = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not joined:
            return parts
        _, i = min(joined)
        parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]


@pytest.mark.parametrize("equal_scores", [False, True])
def test_tokens_are_those_of_a_search(module: Any, equal_scores: bool, rng: np.random.Generator) -> None:
    metadata = make_metadata(rng, equal_scores)
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"].tolist(), strict=True))
    tokenizer = module.load_tokenizer(metadata)
    assert tokenizer.encode("") == []
    for length in [1, 2, 3, *rng.integers(4, 80, 40)]:
        # A letter that is no token, and no token of several of them: their bytes are.
        text = "".join(rng.choice(["a", "b", "\N{LATIN SMALL LETTER E WITH ACUTE}", " ", "z", "\N{SNOWMAN}"], length))
        while "   " in text:  # a token that is found before others
            text = text.replace("   ", " a ")
        expected = []
        for part in join_all(list(text.replace(" ", SPACE)), scores):
            expected += [part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()]
        found = tokenizer.encode(text)
        assert [tokens[token] for token in found] == expected
        assert tokenizer.decode(found) == text


def test_some_tokens_are_found_before_others(module: Any, rng: np.random.Generator) -> None:
    metadata = make_metadata(rng)
    tokens, tokenizer = metadata["tokenizer.ggml.tokens"], module.load_tokenizer(metadata)
    text = "\n\n\na<eos>   b<eos>"
    found = tokenizer.encode(text)
    assert [tokens[token] for token in found] == ["\n\n", "<0x0A>", "a", "<eos>", "   ", "b", "<eos>"]
    assert tokenizer.decode(found) == "\n\n\na   b"
    assert tokenizer.decode(np.array(found), keep_control=True) == text
    part = tokens.index("<0xE2>")  # of three bytes
    assert tokenizer.decode([part, tokens.index("a")]) == "\N{REPLACEMENT CHARACTER}a"


def test_a_vocabulary_without_bytes(module: Any, rng: np.random.Generator) -> None:
    metadata = make_metadata(rng)
    metadata["tokenizer.ggml.token_type"][5] = NORMAL
    with pytest.raises(ValueError, match="expected a token for each of 256 bytes, got tokens for 255"):
        module.load_tokenizer(metadata)


def test_other_tokenizers_are_refused(module: Any, rng: np.random.Generator) -> None:
    metadata = {**make_metadata(rng), "tokenizer.ggml.model": "bert", "tokenizer.ggml.pre": "jina-v2-en"}
    with pytest.raises(ValueError, match="expected a tokenizer gpt2 with the rules of smollm, or llama, got bert with"):
        module.load_tokenizer(metadata)
