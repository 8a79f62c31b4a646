"""Strict JAX, eight host devices (only the sharding tests use more than one) and a seed for each test.

By default the inputs are the same in every run, with seed 0. JAXQUANT_SEED=n samples others, also in the property
tests. The continuous integration uses a random seed in one of its runs, so a test must pass for every seed, or use
`fixed_rng`. Check a new test like this:

    for seed in $(seq 100); do JAXQUANT_SEED=$seed pytest tests/arrays/test_quantize.py || break; done

Tests spend most of their time compiling, so JAX's persistent compilation cache keeps the programs between runs, in
`jaxquant-tests/jaxlib-<version>` in $XDG_CACHE_HOME or ~/.cache. These few hundred MB can be deleted at any time.
Machines may share the directory: JAX's keys depend on the instructions that the processor has.
Set JAX_COMPILATION_CACHE_DIR to use another directory, or JAXQUANT_TEST_CACHE=0 to disable the cache. A cache that
cannot be read or written makes the tests slower, but does not fail them.

`pytest` runs a part of the largest matrices. Of a test with the marker `sample(n)` it runs n cases, which the seed
chooses, and of the tests with the marker `slow` about one in 32. `pytest -m "full or not full"` runs everything but the
tests with the marker `models`, which download packages: `pytest -m models` runs these.
"""

import collections
import ctypes
import gc
import importlib.metadata
import os
import pathlib
import sys
import zlib
from collections.abc import Generator, Iterator

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import hypothesis
import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def keep_compiled_programs() -> None:
    """Enable JAX's persistent compilation cache for this process and, by the environment, for its subprocesses."""
    user = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    directory = user / "jaxquant-tests" / f"jaxlib-{importlib.metadata.version('jaxlib')}"
    options: dict[str, str | int | bool] = {"jax_enable_compilation_cache": False}
    if os.environ.get("JAXQUANT_TEST_CACHE") != "0":
        # There are many small programs. Keep all of them, even those of a tenth of a second and a kilobyte.
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
# In bytes: 1.3 GB. Without programs a worker has 0.5 to 0.8 GB: JAX, ONNX Runtime, oneDNN and the inputs of tests.
MEMORY_LIMIT = 5 * 2**28

# Ignore what differs between machines: examples that failed in earlier runs, and the time to generate inputs.
hypothesis.settings.register_profile("jaxquant", database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("jaxquant")


def pytest_report_header() -> str:
    """Return the seed, with which the run can be repeated."""
    return f"JAXQUANT_SEED={SEED} (set it to repeat this run); jax {jax.__version__}"


@pytest.hookimpl(tryfirst=True)  # before pytest deselects the tests with the marker `full`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Set the seed of the property tests, and choose what runs by default of the tests marked `sample` or `slow`."""
    cases = collections.defaultdict(list)
    if "models" not in config.option.markexpr:
        kept = [item for item in items if not item.get_closest_marker("models")]
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("models")])
        items[:] = kept
    for item in items:
        if isinstance(item, pytest.Function) and hypothesis.is_hypothesis_test(item.function):
            hypothesis.seed(SEED)(item.function)
        if item.get_closest_marker("sample") and not item.get_closest_marker("full"):
            cases[item.nodeid.partition("[")[0]].append(item)
        # By the name, so that the choice does not depend on which other tests were collected.
        if item.get_closest_marker("slow") and zlib.crc32(f"{SEED} {item.nodeid}".encode()) % 32:
            item.add_marker(pytest.mark.full)
    for name, group in cases.items():
        (count,) = group[0].get_closest_marker("sample").args
        order = np.random.default_rng([SEED, zlib.crc32(name.encode())]).permutation(len(group))
        for place in order[count:]:
            group[place].add_marker(pytest.mark.full)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which packages of models were used, and which were not to be had."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    properties = [pair for report in reports for pair in getattr(report, "user_properties", ())]
    packages = sorted({tuple(value) for key, value in properties if key == "package"})
    if packages:
        terminalreporter.section("packages of models")
    for package, text, is_there in packages:
        terminalreporter.line(f"{package}: {text if is_there else f'not to be had: {text}'}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the garbage collector skip what is imported and collected here: some 800,000 objects that live to the end.

    Otherwise it visits them again and again, which takes a fifth of the processor's time of many tests.
    """
    gc.disable()
    try:
        result = yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()
    return result


def free_compiled_programs() -> None:
    """Free all compiled programs, and give the memory back to the system, which glibc does only when it is told to."""
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries do not have it
        if trim is not None:
            trim(0)


def read_resident_bytes() -> int:
    """Return the memory of this process, or 0 where the system does not tell."""
    statm = pathlib.Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


@pytest.fixture(scope="module", autouse=True)
def _free_after_module() -> Iterator[None]:
    """Free the programs of a module after its last test. All programs are gigabytes, and few modules share one."""
    yield
    free_compiled_programs()


class MemoryLimit:
    """A plugin that frees the programs after any test at whose end the process holds more memory than MEMORY_LIMIT.

    The hooks of a conftest.py are called for the tests of its folder only. Those of a plugin are also called for the
    examples in docstrings and in the documentation.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        """Free the programs, if need be, after the fixtures of a test have been torn down."""
        yield
        if read_resident_bytes() > MEMORY_LIMIT:
            free_compiled_programs()


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin that limits the memory."""
    config.pluginmanager.register(MemoryLimit())


@pytest.fixture
def fixed_rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Return a generator that ignores the seed, for statements that hold for most samples only, such as frequencies."""
    return np.random.default_rng([0, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Return a generator that depends on the test, so that a test alone samples the same numbers as in a whole run."""
    return np.random.default_rng([SEED, zlib.crc32(request.node.nodeid.encode())])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """Add the seed to the report of a failure."""
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        report.sections.append(("seed", f"JAXQUANT_SEED={SEED}"))
