"""The tokenizers that the metadata of GGUF files describe."""

from __future__ import annotations

import heapq
import importlib
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # of tokenizer.ggml.token_type
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece has in place of a space


class Tokenizer(Protocol):
    """What the decoders of the examples ask of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Names of control tokens in it, such as <eos>, become these tokens."""
        ...

    def decode(self, tokens: Sequence[int], *, keep_control: bool = False) -> str:
        """Return the text of some tokens, with the names of control tokens or without these tokens."""
        ...


def load_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return a tokenizer of the kind "gpt2" with SmolLM's rules, or "llama", which is SentencePiece's BPE."""
    kind, rules = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "default")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    if (kind, rules) == ("gpt2", "smollm"):
        return ByteLevelTokenizer(tokens, types, metadata["tokenizer.ggml.merges"])
    if kind == "llama" and not metadata.get("tokenizer.ggml.add_space_prefix", True):
        return SentencePieceTokenizer(tokens, types, metadata["tokenizer.ggml.scores"])
    raise ValueError(f"expected a tokenizer gpt2 with the rules of smollm, or llama, got {kind} with {rules}")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.replace("_", "-")
        text = f"expected the package {package}, which the tokenizer of this file needs, got none installed"
        raise ModuleNotFoundError(f"{text}: pip install {package}", name=name) from error


def _find(types: Any, *wanted: int) -> list[int]:
    """Return the tokens that have one of some types."""
    return np.flatnonzero(np.isin(types, wanted)).tolist()


class ByteLevelTokenizer:
    """GPT-2's byte-pair encoding with SmolLM's rules, by the package tokenizers."""

    def __init__(self, tokens: Sequence[str], types: Any, merges: Sequence[str]) -> None:
        """Take the tokens with their types, and the pairs of tokens that are joined, "a b", the first ones first."""
        package = _import("tokenizers")
        models, pre_tokenizers, make_whole = package.models, package.pre_tokenizers, package.AddedToken
        vocabulary = {token: i for i, token in enumerate(tokens)}
        self._tokenizer = package.Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        self._tokenizer.decoder = package.decoders.ByteLevel()
        special = [make_whole(tokens[i], normalized=False, special=True) for i in _find(types, CONTROL)]
        whole = [make_whole(tokens[i], normalized=False) for i in _find(types, USER_DEFINED)]
        self._tokenizer.add_special_tokens(special)
        self._tokenizer.add_tokens(whole)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, as `Tokenizer` says."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int], *, keep_control: bool = False) -> str:
        """Return the text of some tokens, as `Tokenizer` says."""
        return self._tokenizer.decode(tokens, skip_special_tokens=not keep_control)


class SentencePieceTokenizer:
    """SentencePiece's byte-pair encoding, with the vocabulary in a trie of the package marisa-trie.

    With Gemma's 262,144 tokens it takes 5 MB of memory. The package tokenizers takes 69 for the vocabulary and the
    pairs that can be joined, sentencepiece 44 for the vocabulary. The codes of Gemma 3 270M take 247.
    """

    def __init__(self, tokens: Sequence[str], types: Any, scores: Any) -> None:
        """Take the tokens with their types and scores; two neighbors whose token has the best score are joined first.

        Raises:
            ValueError: the tokens have no token for each byte, which texts with unknown letters need.
        """
        self._trie = _import("marisa_trie").Trie(tokens)
        # The trie numbers its keys in an order of its own.
        self._keys = array("i", [self._trie[token] for token in tokens])
        self._tokens = array("i", bytes(4 * len(self._trie)))
        self._scores = array("f", bytes(4 * len(self._trie)))
        for token, (key, score) in enumerate(zip(self._keys, np.asarray(scores).tolist(), strict=True)):
            self._tokens[key], self._scores[key] = token, score
        self._bytes = {int(tokens[i][1:-1], 16): i for i in _find(types, BYTE)}  # their names are <0x00> to <0xFF>
        if len(self._bytes) != 256:
            raise ValueError(f"expected a token for each of 256 bytes, got tokens for {len(self._bytes)}")
        self._byte_of_token = {token: bytes([byte]) for byte, token in self._bytes.items()}
        self._control = frozenset(_find(types, CONTROL))
        whole = sorted((tokens[i] for i in _find(types, CONTROL, USER_DEFINED)), key=len)
        self._whole = re.compile("|".join(map(re.escape, whole[::-1]))) if whole else re.compile("(?!)")

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, as `Tokenizer` says."""
        tokens, start = [], 0
        for match in self._whole.finditer(text):  # tokens that are found first, and not joined with others
            tokens += [*self._encode_part(text[start : match.start()]), self._tokens[self._trie[match[0]]]]
            start = match.end()
        return [*tokens, *self._encode_part(text[start:])]

    def decode(self, tokens: Sequence[int], *, keep_control: bool = False) -> str:
        """Return the text of some tokens, as `Tokenizer` says. Bytes that are no UTF-8 become U+FFFD."""
        shown = (token for token in map(int, tokens) if keep_control or token not in self._control)
        return b"".join(map(self._find_bytes, shown)).decode(errors="replace")

    def _find_bytes(self, token: int) -> bytes:
        if token in self._byte_of_token:
            return self._byte_of_token[token]
        return self._trie.restore_key(self._keys[token]).replace(SPACE, " ").encode()

    def _encode_part(self, text: str) -> Iterator[int]:
        for part in self._join(text.replace(" ", SPACE)):
            key = self._trie.get(part)
            if key is not None:
                yield self._tokens[key]
            else:  # an unknown letter
                yield from map(self._bytes.__getitem__, part.encode())

    def _join(self, text: str) -> Iterator[str]:
        """Return parts of a text: letters of which two neighbors were joined until no two of them are a token."""
        # By where a part begins: where it ends, or 0 if it was joined to another; and where the part before it begins.
        ends, befores = list(range(1, len(text) + 1)), list(range(-1, len(text) - 1))
        queue: list[tuple[float, int, int]] = []

        def offer(start: int, end: int) -> None:
            key = self._trie.get(text[start:end])
            if key is not None:
                heapq.heappush(queue, (-self._scores[key], start, end))

        for start in range(len(text) - 1):
            offer(start, start + 2)
        while queue:
            _, start, end = heapq.heappop(queue)
            middle = ends[start]
            if not middle or middle >= end or ends[middle] != end:
                continue  # one of the two neighbors was joined to another one since
            ends[start], ends[middle] = end, 0
            if end < len(text):
                befores[end] = start
                offer(start, ends[end])
            if start:
                offer(befores[start], end)
        start = 0
        while start < len(text):
            yield text[start : ends[start]]
            start = ends[start]
