"""Times contestants in alternation.

Every round runs every contestant once, in a new order, twice over: first one call each that is waited for
("latency"), then ten calls each of which only the last is waited for ("queued", per call). A backend runs what one
thread queues in order, so the last result is there when all are; ONNX Runtime is synchronous and simply loops.

Both sides allocate their outputs anew in every call and copy none of them; results are dropped as soon as a user
would drop them. JAX allocates with malloc, which may give a large output back to the operating system after a single
call and pay for fresh pages in the next; in the loop of ten it more often hands out the same pages again. ONNX
Runtime's arena keeps what it once had. For large outputs, latency and queued differ by that too.
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
        """Returns medians and quartiles in milliseconds."""
        found: dict[str, Any] = {"rounds": len(self.latency)}
        for kind, samples in (("latency", self.latency), ("queued", self.queued)):
            first, median, third = (1e3 * q for q in statistics.quantiles(samples, n=4, method="inclusive"))
            found[kind] = {"median_ms": median, "quartiles_ms": [first, third]}
        return found


def measure(calls: Mapping[str, Call], rounds: int, seconds: float) -> dict[str, Timing]:
    """Times the calls against each other.

    Args:
        calls: the contestants by name.
        rounds: how many rounds at most.
        seconds: after which no new round begins, once there were five.

    Returns:
        The samples by name.
    """
    waits = {name: _warm_up(call) for name, call in calls.items()}
    timings = {name: Timing() for name in calls}
    shuffle = random.Random(0).shuffle  # which contestant runs before which must vary, but not from run to run
    order = list(calls)
    deadline = time.perf_counter() + seconds
    gc.collect()
    gc.disable()
    try:
        for done in range(rounds):
            if done >= _LEAST_ROUNDS and time.perf_counter() > deadline:
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
    """Returns the median seconds of a call that has to be traced and compiled, execution included."""
    samples = []
    for _ in range(repeats):
        jax.clear_caches()
        start = time.perf_counter()
        jax.block_until_ready(call())
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _warm_up(call: Call) -> Callable[[Any], Any]:
    """Runs a contestant until nothing is left to compile, and returns the cheapest way to wait for its result."""
    for _ in range(_WARM_UP):
        result = jax.block_until_ready(call())
    if isinstance(result, jax.Array):
        return _wait_for_array
    # A walk through the leaves takes microseconds; who has no JAX arrays must not be charged for it.
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
