"""ONNX files in jaxquant and in ONNX Runtime: the time of a call and of the first one, with one thread each.

    python -m benchmarks.onnx_files FILE... [--constants] [--seconds 3]

A file is a model, a wheel, or another zip or tar archive with models in it. `pip download --no-deps nudenet ddddocr`
gets some. Inputs are random; an input that decides about shapes or branches is known when the function is traced.
With --constants the weights are constants, too: `jaxquant.onnx.load(file, constants=True)`.

The process runs on one core, which it takes before JAX starts, so that XLA has one thread; ONNX Runtime's session has
one thread, too. Calls of the two alternate. Times are processor times, in milliseconds: the median and, in parentheses,
the least. The first call loads, traces, compiles and runs, in seconds of processor time; it should take at most 3 s
and 1 s for each 20 MB of file, the aim. The error is the largest difference from ONNX Runtime's result as a part of its
largest element. Rows are sorted by the ratio of the medians, the worst first.
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
import os
import pathlib
import statistics
import time
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime

from jaxquant import onnx as jqonnx
from jaxquant.onnx.quantization.data import list_inputs
from tests.onnx.real_files import list_models, make_input, open_session

_LEAST_ROUNDS, _MOST_ROUNDS = 5, 60


@dataclass(frozen=True)
class Row:
    """What was measured of a file: times in seconds, the size in bytes."""

    name: str
    size: int
    first: float
    jaxquant: list[float]
    runtime: list[float]
    error: float

    def compute_ratio(self, summary: Any) -> float:
        """Return jaxquant's time over ONNX Runtime's, of medians or of minima."""
        return summary(self.jaxquant) / summary(self.runtime)

    def compute_aim(self) -> float:
        """Return the time that the first call should take at most."""
        return 3 + self.size / 20e6


def measure_file(name: str, data: bytes, seconds: float, constants: bool) -> Row:
    """Return the times of a model, after its results were compared."""
    session = open_session(data)
    rng = np.random.default_rng(0)
    batch = {x.name: make_input(rng, x, name) for x in list_inputs(onnx.load_from_string(data))}
    start = time.process_time()
    fn, params = jqonnx.load(data, constants=constants or None)
    known = {n: x for n, x in batch.items() if n in fn.static_inputs}
    inputs = {n: x for n, x in batch.items() if n not in known}
    jitted = jax.jit(functools.partial(fn, **known))
    outputs = jax.block_until_ready(jitted(params, **inputs))
    first = time.process_time() - start
    expected = session.run(None, batch)
    leaves = outputs if isinstance(outputs, tuple) else (outputs,)
    error = max(map(_compare, leaves, expected))
    times: tuple[list[float], list[float]] = ([], [])
    calls = (lambda: jax.block_until_ready(jitted(params, **inputs)), lambda: session.run(None, batch))
    begin = time.process_time()
    for index in range(_MOST_ROUNDS):
        for call, spans in zip(calls, times, strict=True):
            start = time.process_time()
            call()
            spans.append(time.process_time() - start)
        if index >= _LEAST_ROUNDS and time.process_time() - begin > seconds:
            break
    jax.clear_caches()
    return Row(name, len(data), first, times[0][1:], times[1][1:], error)


def _compare(x: Any, expected: Any) -> float:
    """Return the largest difference as a part of the largest element."""
    x, expected = np.asarray(x, np.float64), np.asarray(expected, np.float64)
    return float(np.max(np.abs(x - expected), initial=0) / max(np.max(np.abs(expected), initial=0), 1e-30))


def format_row(row: Row) -> str:
    """Return the row of a file as a line of the table."""
    ours, runtime = (f"{1e3 * statistics.median(t):.2f} ({1e3 * min(t):.2f})" for t in (row.jaxquant, row.runtime))
    ratio = row.compute_ratio(statistics.median)
    cells = (row.name, f"{row.size / 1e6:.1f}", ours, runtime, f"{ratio:.2f}")
    cells = (*cells, f"{row.first:.1f}", f"{row.compute_aim():.1f}", f"{row.error:.0e}")
    return f"| {' | '.join(cells)} |"


def take_core() -> None:
    """Move this process to one core, the last one that it may use."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=3, help="the processor time after which a file is done")
    parser.add_argument("--constants", action="store_true", help="load with the weights as constants")
    arguments = parser.parse_args()
    take_core()
    jax.config.update("jax_enable_compilation_cache", False)  # first calls must compile
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    jax.devices()  # starts XLA, which is no part of a call
    rows = []
    for path in arguments.files:
        for name, data in list_models(path):
            try:
                rows.append(measure_file(name, data, arguments.seconds, arguments.constants))
                print(f"{format_row(rows[-1])}", flush=True)
            except Exception as error:  # the other files still have rows
                print(f"| {name} | {type(error).__name__}: {str(error)[:300]} |", flush=True)
    print(f"\njax {jax.__version__}, onnxruntime {onnxruntime.__version__}\n")
    print("| model | MB | jaxquant ms | ONNX Runtime ms | ratio | first call s | aim s | error |")
    print("| --- | --: | --: | --: | --: | --: | --: | --: |")
    for row in sorted(rows, key=lambda row: -row.compute_ratio(statistics.median)):
        print(format_row(row))
    for label, summary in (("medians", statistics.median), ("minima", min)):
        ratios = [row.compute_ratio(summary) for row in rows]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(f"\nratio of {label}: geometric mean {mean:.2f}, worst {max(ratios):.2f}, {len(ratios)} files")
    late = [row.name for row in rows if row.first > row.compute_aim()]
    print(f"\nfirst calls above the aim: {', '.join(late) or 'none'}")


if __name__ == "__main__":
    main()
