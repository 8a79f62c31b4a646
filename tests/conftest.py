"""Strict JAX, eight host devices (only the sharding tests use more than the first) and a seed per test."""

import os
import zlib

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# In the environment, so that the processes of a parallel run draw from the same one.
SEED = int(os.environ.setdefault("JAXQUANT_SEED", str(int.from_bytes(os.urandom(4), "little"))))


def pytest_report_header() -> str:
    """Says how to draw the same numbers again."""
    return f"JAXQUANT_SEED={SEED} (set it to repeat this run); jax {jax.__version__}"


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
