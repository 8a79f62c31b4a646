"""The benchmarks, which measure, compare and print tables: `python -m benchmarks`.

The exit status is 1 if a result of jaxquant is wrong.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import random
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from . import (
    arrays,
    attention,
    calibrators,
    contractions,
    integer_networks,
    layers,
    onnx_models,
    operators,
    processor,
    timing,
    tracing,
    training,
    transform,
)
from .contest import JAXQUANT, ONNX_RUNTIME, Call, Contest, Missing, Row, Table, mismatches
from .onnxruntime_models import products_saturate, threads

TABLES = (
    operators.TABLE,
    contractions.TABLE,
    *arrays.TABLES,
    calibrators.TABLE,
    *training.TABLES,
    layers.TABLE,
    integer_networks.TABLE,
    onnx_models.TABLE,
    attention.TABLE,
    *transform.TABLES,
    tracing.TABLE,
)
_QUICK_LIMIT = 1024
_QUICK_WORK = 1024**2
_KINDS = {"latency": "", "queued": "queued: "}
_LEGEND = (
    "Medians over alternating runs in one process. The first columns time calls that each wait for their result. The "
    "queued columns time ten calls that wait only for the last result, per call. Ratios are jaxquant / opponent: "
    "below 1, jaxquant is faster. Mismatches are elements that differ in any bit from the expected ones. In products "
    "of integers these have exact sums, of numpy or of ONNX Runtime with uint8 weights. The last column has the "
    "mismatches of ONNX Runtime with the weights as they are. Elsewhere ONNX Runtime's results are the expected ones, "
    "or numpy's if it has none. For float sums (matmul_nbits, matmul float32 x ...) mismatches are elements that "
    "differ by more than 1e-5 of the largest element."
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    jax.config.update("jax_enable_compilation_cache", False)  # first calls must compile
    environment = _environment()
    print(
        ", ".join(f"{value}" if key in ("cpu", "runtime") else f"{key} {value}" for key, value in environment.items())
    )
    print(f"\n{_LEGEND}")
    report = [_run(table, options) for table in TABLES]
    records = [record for part in report for record in part]
    if not records:
        print("no row matches --only", file=sys.stderr)
        return 2
    _print_first_calls(records)
    if options.json:
        options.json.write_text(json.dumps({"environment": environment, "rows": records}, indent=1) + "\n")
    wrong = [f"{r['name']} {r['shape']}" for r in records if r["mismatches"].get(JAXQUANT)]
    if wrong:
        print("jaxquant's results are wrong in: " + "; ".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("benchmarks", description=__doc__)
    parser.add_argument(
        "--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="run the rows whose name matches"
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="maximal number of rounds per row; default 200, quick 20"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: a smoke test")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="run N rows of each table at most, chosen by the variable JAXQUANT_SEED"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all figures to this file")
    return parser


def _environment() -> dict[str, Any]:
    versions = {"Python": platform.python_version()}
    for package in ("jax", "jaxlib", "flax", "onnxruntime", "qwix", "aqtp"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    saturates = products_saturate()
    sums = {None: "not known", False: "exact", True: "saturate at 16 bits"}[saturates]
    return {
        **versions,
        "cpu": processor.read_name(),
        "VNNI": processor.find_vnni(),
        "threads": threads(),
        "backend": jax.default_backend(),
        "runtime": f"sums of ONNX Runtime's products of uint8 by int8: {sums}",
    }


def _run(table: Table, options: argparse.Namespace) -> list[dict[str, Any]]:
    # On an accelerator, ONNX Runtime's CPU kernels provide the expected results, but their times are not compared.
    on_cpu = jax.default_backend() == "cpu"
    opponents = table.opponents
    if not on_cpu:
        opponents = (*table.off_cpu, *(o for o in table.opponents if o != ONNX_RUNTIME))
    throughput = "" if on_cpu else table.throughput
    rows = [r for r in table.rows if options.only.search(r.name)]
    if options.quick:
        rows = _quick(rows)
    if options.sample and options.sample < len(rows):
        places = random.Random(os.environ.get("JAXQUANT_SEED", "0")).sample(range(len(rows)), options.sample)
        rows = [rows[place] for place in sorted(places)]
    if rows:
        print(f"\n### {table.title}\n")
        _print_line(_head(opponents, throughput))
        _print_line(["---"] * len(_head(opponents, throughput)))
    records = []
    for row in rows:
        records.append(_measure(row, opponents, options))
        _print_line(_cells(records[-1], opponents, throughput))
    return records


def _quick(rows: Sequence[Row]) -> list[Row]:
    """Return the small rows, or the smallest row of an operation without small ones."""
    smallest: dict[str, int] = {}
    for row in rows:
        smallest[row.name] = min(math.prod(row.shape), smallest.get(row.name, sys.maxsize))
    is_quick = lambda row: math.prod(row.shape) <= max(_QUICK_WORK, smallest[row.name])  # noqa: E731
    return [row for row in rows if max(row.shape) <= _QUICK_LIMIT and is_quick(row)]


def _measure(row: Row, opponents: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    contest = row.build()
    present = {o: contest.opponents.get(o, Missing("none")) for o in opponents}
    missing = {o: call.reason for o, call in present.items() if isinstance(call, Missing)}
    calls: dict[str, Call] = {JAXQUANT: contest.jaxquant}
    calls |= {o: call for o, call in present.items() if not isinstance(call, Missing)}
    first = {n: 1e3 * timing.first_call(c) for n, c in calls.items() if n != ONNX_RUNTIME} if row.compile_time else {}
    rounds, seconds = (20, 0.5) if options.quick else (200, 4.0)
    rounds = max(options.rounds or rounds, 2)  # one sample has no quartiles
    timings = timing.measure(calls, rounds, seconds)
    return {
        "name": row.name,
        "shape": "x".join(map(str, row.shape)),
        "timings": {name: t.summary() for name, t in timings.items()},
        "first_call_ms": first,
        "missing": missing,
        "mismatches": _compare(contest, calls),
        "runtime_is_expected": contest.expected is calls.get(ONNX_RUNTIME),
        "bytes": contest.bytes_read + sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(contest.jaxquant())),
        "operations": 2 * contest.multiply_adds,
    }


def _compare(contest: Contest, calls: dict[str, Call]) -> dict[str, int | None]:
    """Return the number of wrong elements by contestant, or None if its results cannot be compared."""
    expected = None if isinstance(contest.expected, Missing) else contest.expected()
    counts: dict[str, int | None] = {}
    for name, call in calls.items():
        if name == ONNX_RUNTIME and not contest.judges_runtime:
            continue
        comparable = expected is not None and name not in contest.unlike
        counts[name] = mismatches(contest.compared(call()), expected) if comparable else None
    return counts


def _head(opponents: Sequence[str], throughput: str) -> list[str]:
    cells = ["operation", "shape"]
    for prefix in _KINDS.values():
        cells += [f"{prefix}{name} ms" for name in (JAXQUANT, *opponents)]
        cells += [f"{prefix}ratio to {name}" for name in opponents]
    judged = [o for o in opponents if o != ONNX_RUNTIME]
    return [
        *cells,
        *([f"jaxquant {throughput}"] if throughput else []),
        "mismatches " + " / ".join((JAXQUANT, *judged)),
        *([f"mismatches {ONNX_RUNTIME}"] if ONNX_RUNTIME in opponents else []),
    ]


def _cells(record: dict[str, Any], opponents: Sequence[str], throughput: str) -> list[str]:
    cells = [record["name"], record["shape"]]
    for kind in _KINDS:
        medians = {name: t[kind]["median_ms"] for name, t in record["timings"].items()}
        columns = (JAXQUANT, *opponents)
        cells += [f"{medians[n]:.3g}" if n in medians else record["missing"][n] for n in columns]
        cells += [f"{medians[JAXQUANT] / medians[n]:.2f}" if n in medians else "" for n in opponents]
    if throughput:
        per_second = 1e3 / record["timings"][JAXQUANT]["queued"]["median_ms"]
        amount = record["operations"] / 1e12 if throughput == "TOP/s" else record["bytes"] / 1e9
        cells.append(f"{amount * per_second:.3g}")
    counts = record["mismatches"]
    judged = [counts.get(n) for n in (JAXQUANT, *opponents) if n != ONNX_RUNTIME]
    cells.append(" / ".join("not compared" if count is None else str(count) for count in judged))
    if ONNX_RUNTIME in opponents:
        cells.append(str(counts.get(ONNX_RUNTIME, "expected" if record["runtime_is_expected"] else "")))
    return cells


def _print_first_calls(records: Sequence[dict[str, Any]]) -> None:
    """Print the total time to trace, compile and run each operation once."""
    compiled = [r for r in records if r["first_call_ms"]]
    if not compiled:
        return
    names = list(dict.fromkeys(name for r in compiled for name in r["first_call_ms"]))
    print("\n### First call: trace, compile, run\n")
    _print_line(["operation", "shape", *(f"{name} ms" for name in names)])
    _print_line(["---"] * (2 + len(names)))
    for record in compiled:
        first = record["first_call_ms"]
        _print_line([record["name"], record["shape"], *(f"{first[n]:.0f}" if n in first else "" for n in names)])


def _print_line(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
