"""Strict JAX, eight host devices (only the sharding tests use more than the first) and a seed for each test.

The inputs are the same in every run, those of seed 0. JAXQUANT_SEED=n draws others, in the property tests too; the
continuous integration does so once in each run, so a test must pass for every seed, or take
`fixed_rng`. What a new test needs:

    for seed in $(seq 100); do JAXQUANT_SEED=$seed pytest tests/arrays/test_quantize.py || break; done

Most of a test's time is compiling, so compiled programs are kept between runs, in JAX's persistent compilation cache:
`jaxquant-tests/jaxlib-<version>` in $XDG_CACHE_HOME or ~/.cache, some hundred MB, which may be deleted at any time.
JAX_COMPILATION_CACHE_DIR, where it is set, names another directory. JAXQUANT_TEST_CACHE=0 turns the cache off. A cache
that cannot be read or written costs time and fails no test.

`pytest` runs a part of the largest matrices, every operator, dtype, granularity and transform at least once;
`pytest -m "full or not full"` runs them whole.
"""

import gc
import importlib.metadata
import os
import pathlib
import zlib
from collections.abc import Iterator

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import hypothesis
import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def keep_compiled_programs() -> None:
    """Sets JAX's persistent compilation cache for this process and, by the environment, for those that it starts."""
    user = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    directory = user / "jaxquant-tests" / f"jaxlib-{importlib.metadata.version('jaxlib')}"
    options: dict[str, str | int | bool] = {"jax_enable_compilation_cache": False}
    if os.environ.get("JAXQUANT_TEST_CACHE") != "0":
        # The programs are small and many: each is kept, a tenth of a second's and a kilobyte's too.
        options = {
            "jax_compilation_cache_dir": str(directory),
            "jax_persistent_cache_min_compile_time_secs": 0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
    for name, value in options.items():
        if name.upper() not in os.environ:
            os.environ[name.upper()] = str(value)
            jax.config.update(name, value)


keep_compiled_programs()
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


@pytest.fixture(scope="module", autouse=True)
def _drop_compiled_programs() -> Iterator[None]:
    """Frees a module's programs after its last test: those of all modules are gigabytes, and few are shared."""
    yield
    jax.clear_caches()
    gc.collect()


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
