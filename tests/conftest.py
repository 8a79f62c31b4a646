"""Strict JAX, eight host devices (only the sharding tests use more than the first) and a seed for each test.

The inputs are the same in every run, those of seed 0. JAXQUANT_SEED=n draws others, in the property tests too; the
continuous integration does so once in each run, so a test must pass for every seed, or take
`fixed_rng`. What a new test needs:

    for seed in $(seq 100); do JAXQUANT_SEED=$seed pytest tests/test_quantize.py || break; done
"""

import os
import zlib

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import hypothesis
import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

SEED = int(os.environ.get("JAXQUANT_SEED", "0"))

# Without what differs from machine to machine: examples that failed in an earlier run, and how long drawing takes.
hypothesis.settings.register_profile("jaxquant", database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("jaxquant")


def pytest_report_header() -> str:
    """Says how to draw the same numbers again."""
    return f"JAXQUANT_SEED={SEED} (set it to repeat this run); jax {jax.__version__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the property tests the seed."""
    for item in items:
        if isinstance(item, pytest.Function) and hypothesis.is_hypothesis_test(item.function):
            hypothesis.seed(SEED)(item.function)


@pytest.fixture
def fixed_rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """The same for every seed. For what holds for most draws only: a frequency, an estimate, a loss that falls."""
    return np.random.default_rng([0, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of its own for each test, so that one test alone draws what it drew in the whole run."""
    return np.random.default_rng([SEED, zlib.crc32(request.node.nodeid.encode())])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """Puts the seed beside a failure."""
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        report.sections.append(("seed", f"JAXQUANT_SEED={SEED}"))
