"""Memory of calibration and quantization: `python -m benchmarks.memory`. The exit status is 1 if a target is missed.

Each row runs in a new process. getrusage measures the peak resident size before and after the work, so the memory of
the compiler counts too. Only these processes import JAX, because on Linux a process starts with the peak of its parent.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_GIGABYTE, _MEGABYTE = 2**30, 2**20
_BATCH_BYTES = 64 * _MEGABYTE
_CHANNELS = 1024
_STATE_LIMIT = 50 * 10**6
_PEAK_LIMIT = 1.6  # of the array that is quantized
_HEADROOM = 3  # sizes of the array that must be free before its row runs
_CALIBRATORS = ("minmax", "absmax", "moving_average", "percentile", "mse", "entropy")
_DTYPES = ("int8", "uint8", "int4")
_PER_TENSOR, _PER_CHANNEL = ("PerTensor",), ("PerAxis", 1)
_GRANULARITIES = (_PER_TENSOR, ("PerAxis", 0), _PER_CHANNEL, ("Blocked", 1, 32))
_FLOAT_BYTES = 4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.memory", description=__doc__)
    parser.add_argument(
        "--megabytes",
        type=int,
        metavar="N",
        help="size of the data of each row; default 1024, or less if memory is short",
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        print(json.dumps(_measure(json.loads(options.case))))
        return 0
    size = options.megabytes * _MEGABYTE if options.megabytes else _fitting()
    missed = _calibration(size) + _quantization(size)
    print("\nmissed: " + "; ".join(missed) if missed else "\nevery target met")
    return 1 if missed else 0


def _fitting() -> int:
    """Return a gigabyte, or less if the machine has less than three gigabytes free."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = _GIGABYTE
    while size * _HEADROOM > free and size > _BATCH_BYTES:
        size //= 2
    if size < _GIGABYTE:
        print(f"{free // _MEGABYTE} MiB are free: {size // _MEGABYTE} MiB of data instead of 1024\n")
    return size


def _calibration(size: int) -> list[str]:
    batches = max(1, size // _BATCH_BYTES)
    print(f"### Calibrating {batches * _BATCH_BYTES // _MEGABYTE} MiB of float32 in batches of 64 MiB\n")
    heads = ["calibrator", "ranges", "state, bytes", f"target below {_STATE_LIMIT:,}", "peak above the batches, MB"]
    _print_line(heads)
    _print_line(["---"] * len(heads))
    missed = []
    for name in _CALIBRATORS:
        for granularity, ranges in ((_PER_TENSOR, "1"), (_PER_CHANNEL, f"{_CHANNELS}")):
            sizes = _in_process({"calibrator": name, "granularity": granularity, "batches": batches})
            is_small = sizes["state"] < _STATE_LIMIT
            peak = f"{sizes['peak'] / 1e6:.0f}"
            _print_line([name, ranges, f"{sizes['state']:,}", "met" if is_small else "MISSED", peak])
            missed += [] if is_small else [f"{name} {ranges}"]
    return missed


def _quantization(size: int) -> list[str]:
    print(f"\n### Quantizing {size // _MEGABYTE} MiB of float32: the peak in sizes of the array, including itself\n")
    heads = [f"{way}: {dtype}" for way in ("called as it is", "under jit") for dtype in _DTYPES]
    _print_line(["granularity", *heads, f"target below {_PEAK_LIMIT}"])
    _print_line(["---"] * (2 + len(heads)))
    missed = []
    for granularity in _GRANULARITIES:
        title = f"{granularity[0]}({', '.join(map(str, granularity[1:]))})"
        cells, failures = [title], []
        for jitted in (False, True):
            for dtype in _DTYPES:
                case = {"quantize": dtype, "granularity": granularity, "jitted": jitted, "size": size}
                peak = _in_process(case)["peak"] / size
                cells.append(f"{peak:.2f}")
                failures += [f"{title} {dtype}{' under jit' * jitted}"] if peak >= _PEAK_LIMIT else []
        _print_line([*cells, "MISSED" if failures else "met"])
        missed += failures
    return missed


def _in_process(case: dict[str, Any]) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.memory", "--case", json.dumps(case)]
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(process.stdout)


def _measure(case: dict[str, Any]) -> dict[str, int]:
    import jaxquant as jq

    name, *arguments = case["granularity"]
    granularity = getattr(jq, name)(*arguments)
    return _measure_calibration(case, granularity) if "calibrator" in case else _measure_quantization(case, granularity)


def _measure_calibration(case: dict[str, Any], granularity: Any) -> dict[str, int]:
    import jax
    import jax.numpy as jnp

    import jaxquant as jq

    spec = jq.QuantSpec(jnp.int8, granularity)
    calibrator = getattr(jq.calibration, case["calibrator"])(
        spec, *((99.9,) if case["calibrator"] == "percentile" else ())
    )
    grown = jax.jit(lambda x, i: x * (i + 1.0))  # the batches have increasing ranges, so that histograms grow too
    first = _make_floats((_BATCH_BYTES // _FLOAT_BYTES // _CHANNELS, _CHANNELS))
    jax.block_until_ready(grown(first, 0.0))
    update = jax.jit(calibrator.update)
    initial_peak = _peak()
    state = calibrator.init(first)
    for i in range(case["batches"]):
        state = jax.block_until_ready(update(state, grown(first, float(i))))
    calibrator.finalize(state)
    return {"state": sum(leaf.nbytes for leaf in jax.tree.leaves(state)), "peak": _peak() - initial_peak}


def _measure_quantization(case: dict[str, Any], granularity: Any) -> dict[str, int]:
    import jax
    import jax.numpy as jnp

    import jaxquant as jq

    spec = jq.QuantSpec(getattr(jnp, case["quantize"]), granularity)

    def quantize(x: jax.Array) -> jq.QuantizedArray:
        return jq.quantize(x, spec)

    _make_floats((8, 8))
    initial_peak = _peak()
    x = _make_floats((case["size"] // _FLOAT_BYTES // 2**14, 2**14))
    jax.block_until_ready((jax.jit(quantize) if case["jitted"] else quantize)(x))
    return {"peak": _peak() - initial_peak}


def _make_floats(shape: tuple[int, int]) -> Any:
    """Return pseudorandom float32 from -1 to 1, without temporary memory."""
    import jax
    import jax.numpy as jnp

    def draw() -> jax.Array:
        row, column = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
        mixed = (row * jnp.uint32(shape[1]) + column) * jnp.uint32(2654435761)
        return (mixed >> 8).astype(jnp.float32) * jnp.float32(2**-23) - 1

    return jax.block_until_ready(jax.jit(draw)())


def _peak() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _print_line(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
