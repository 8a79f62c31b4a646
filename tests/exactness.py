"""The full check of each operator, dtype and granularity against its oracle under each transform.

`pytest` runs the cases one by one. `python -m tests.exactness` prints the table of docs/measured/exactness.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import zlib
from concurrent import futures
from typing import Any

import jax
import numpy as np

from .cases.contraction_exactness import FEW, contraction_cases
from .cases.elementwise_exactness import elementwise_cases
from .cases.microsoft_exactness import microsoft_cases
from .support import transforms
from .support.case import Arrays, Case

__all__ = ["Case", "cases", "check", "table"]


def cases() -> list[Case]:
    """Return all cases."""
    return [*elementwise_cases(), *contraction_cases(), *microsoft_cases()]


def stacked(case: Case, args: Arrays, *, shared: bool) -> Any:
    """Return the oracle's results, stacked over the batch."""
    found = [case.want(*(a[b if i == 0 or not shared else 0] for i, a in enumerate(args))) for b in range(len(args[0]))]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *found)


def check(case: Case, seed: int) -> dict[str, tuple[int, int]]:
    """Run a case under every transform; return {transform: (elements, mismatches)}."""
    args = case.draw(np.random.default_rng([seed, zlib.crc32(case.id.encode())]))
    want = {shared: stacked(case, args, shared=shared) for shared in (False, True)}
    result = {}
    for name in case.transforms:
        got = transforms.ALL[name](case.op, args)
        wrong = transforms.mismatches(got, want[transforms.is_shared(name)])
        result[name] = (sum(np.asarray(leaf).size for leaf in jax.tree.leaves(got)), wrong)
    return result


def count(seed: int, only: str = "", part: int = 0, parts: int = 1) -> list[tuple[int, int]]:
    """Return the numbers of elements and of mismatches of each case, or of every `parts`-th from number `part` on."""
    totals = []
    for case in _choose(only)[part::parts]:
        counts = check(case, seed).values()
        totals.append((sum(n for n, _ in counts), sum(bad for _, bad in counts)))
    return totals


def table(seed: int, only: str = "", processes: int = 1) -> tuple[str, int, int]:
    """Return the table of docs/measured/exactness.md, the number of elements, and the number of mismatches.

    Args:
        seed: the seed of the inputs.
        only: a regular expression; only cases of operators that contain a match are run.
        processes: the number of processes that share the cases. Most of the time goes into compiling.
    """
    lines: dict[tuple[str, str, str], list[int]] = {}
    chosen = _choose(only)
    totals = [(0, 0)] * len(chosen)
    if processes == 1:
        totals = count(seed, only)
    else:
        # Several processes share a GPU only if none of them takes all of its memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        with futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _be_strict) as pool:
            found = [pool.submit(count, seed, only, part, processes) for part in range(processes)]
            for part, future in enumerate(found):
                totals[part::processes] = future.result()
    for case, (elements, bad) in zip(chosen, totals, strict=True):
        line = lines.setdefault((case.operator, case.dtype, case.oracle), [0, 0, 0])
        line[0] += 1
        line[1] += elements
        line[2] += bad
    rows = ["| operator | dtype | oracle | variants | elements | mismatches |", "|---|---|---|--:|--:|--:|"]
    rows += [f"| {' | '.join(key)} | {v} | {n:,} | {bad} |" for key, (v, n, bad) in lines.items()]
    elements, wrong = (sum(line[i] for line in lines.values()) for i in (1, 2))
    rows.append(f"| all | | | {len(chosen)} | {elements:,} | {wrong} |")
    return "\n".join(rows), elements, wrong


def _choose(only: str) -> list[Case]:
    chosen = [case for case in cases() if re.search(only, case.operator)]
    if not chosen:
        raise ValueError(f"no operator matches {only!r}")
    return chosen


def _be_strict() -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


def main() -> int:
    """Run every case and prints the table; exits with 1 on a mismatch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--only", default="", help="run only operators that match this regular expression")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="share the cases; default 1")
    arguments = parser.parse_args()
    seed = arguments.seed
    _be_strict()
    text, _, wrong = table(seed, arguments.only, arguments.processes)
    every, few = (
        ", ".join(name.removeprefix("shared_").replace("_", " ") for name in names) for names in (transforms.ALL, FEW)
    )
    print(f"jax {jax.__version__}, backend {jax.default_backend()}, seed {seed}; transformations: {every};")
    print(f"for contractions, only the first variant of a row uses all; the others use: {few}.\n\n{text}")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
