"""The tokenizer that the metadata of a GGUF file describe, made with the package tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece has in place of a space


def load_tokenizer(metadata: Mapping[str, Any]) -> Any:
    """Return a `tokenizers.Tokenizer`, for "gpt2" with SmolLM's rules, or "llama", which is SentencePiece's BPE."""
    from tokenizers import (  # pyright: ignore[reportMissingImports]
        AddedToken,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
    )

    kind, rules = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "default")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if (kind, rules) == ("gpt2", "smollm"):
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "llama" and not metadata.get("tokenizer.ggml.add_space_prefix", True):
        merges = find_merges(vocabulary, metadata["tokenizer.ggml.scores"])
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        raise ValueError(f"expected a tokenizer gpt2 with the rules of smollm, or llama, got {kind} with {rules}")
    special = [AddedToken(tokens[i], normalized=False, special=True) for i in (types == CONTROL).nonzero()[0]]
    whole = [AddedToken(tokens[i], normalized=False) for i in (types == USER_DEFINED).nonzero()[0]]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(whole)
    return tokenizer


def find_merges(vocabulary: Mapping[str, int], scores: Any) -> list[tuple[str, str]]:
    """Return the pairs of tokens that are joined, those with the best scores first.

    SentencePiece joins two neighbors wherever the result is a token, and has no list of pairs.
    """
    pairs = []
    for token, i in vocabulary.items():
        parts = ((token[:n], token[n:]) for n in range(1, len(token)))
        pairs += [(-scores[i], i, n, pair) for n, pair in enumerate(parts) if all(part in vocabulary for part in pair)]
    return [pair for *_, pair in sorted(pairs)]
