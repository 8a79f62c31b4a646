"""Timing of contestants in alternation.

Each round runs all contestants in a new order, twice: first one call each, and waits for the result ("latency"); then
ten calls each, and waits only for the last result ("queued", per call). A backend runs the calls of one thread in
order, so all results are ready when the last one is. ONNX Runtime is synchronous and runs a plain loop.

Each call allocates new outputs and does not copy them. A result is released as soon as a user would release it. JAX
allocates with malloc, which may return a large output to the operating system after a single call, and then needs new
pages for the next call. In the loop of ten calls it reuses pages more often. ONNX Runtime's arena keeps its memory. For
large outputs this contributes to the difference between latency and queued.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from .contest import Call

QUEUED = 10
_WARM_UP = 3
_LEAST_ROUNDS = 5


@dataclass
class Timing:
    """The samples of one contestant, in seconds per call."""

    latency: list[float] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return medians and quartiles in milliseconds."""
        summary: dict[str, Any] = {"rounds": len(self.latency)}
        for kind, samples in (("latency", self.latency), ("queued", self.queued)):
            first, median, third = (1e3 * q for q in statistics.quantiles(samples, n=4, method="inclusive"))
            summary[kind] = {"median_ms": median, "quartiles_ms": [first, third]}
        return summary


def measure(calls: Mapping[str, Call], rounds: int, seconds: float) -> dict[str, Timing]:
    """Time the calls in alternation.

    Args:
        calls: the contestants by name.
        rounds: the maximal number of rounds.
        seconds: the time after which no new round begins, if there were at least five.

    Returns:
        The samples by name.
    """
    waits = {name: _warm_up(call) for name, call in calls.items()}
    timings = {name: Timing() for name in calls}
    shuffle = random.Random(0).shuffle  # the order varies between rounds, but not between runs
    order = list(calls)
    deadline = time.perf_counter() + seconds
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            if index >= _LEAST_ROUNDS and time.perf_counter() > deadline:
                break
            shuffle(order)
            for name in order:
                timings[name].latency.append(_once(calls[name], waits[name]))
            for name in order:
                timings[name].queued.append(_queued(calls[name], waits[name]))
    finally:
        gc.enable()
    return timings


def first_call(call: Call, repeats: int = 3) -> float:
    """Return the median seconds to trace, compile and run a call."""
    samples = []
    for _ in range(repeats):
        jax.clear_caches()
        start = time.perf_counter()
        jax.block_until_ready(call())
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _warm_up(call: Call) -> Callable[[Any], Any]:
    """Run a contestant until everything is compiled, and return the cheapest function that waits for its result."""
    for _ in range(_WARM_UP):
        result = jax.block_until_ready(call())
    if isinstance(result, jax.Array):
        return _wait_for_array
    # Traversing the leaves takes microseconds, which must not count for a contestant without JAX arrays.
    in_jax = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result))
    return jax.block_until_ready if in_jax else _wait_for_nothing


def _wait_for_array(result: Any) -> None:
    result.block_until_ready()


def _wait_for_nothing(result: Any) -> None:
    del result


def _once(call: Call, wait: Callable[[Any], Any]) -> float:
    start = time.perf_counter()
    result = call()
    wait(result)
    return time.perf_counter() - start


def _queued(call: Call, wait: Callable[[Any], Any]) -> float:
    start = time.perf_counter()
    result = None
    for _ in range(QUEUED):
        result = call()
    wait(result)
    return (time.perf_counter() - start) / QUEUED
