"""Two processes of four devices each: the codes of one process with one device, and checkpoints of either by the other.

All tests share one run of tests/support/process_scenario.py, because processes take seconds to start.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import checkpoint

from ..support import process_scenario, processes

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "distributed.md"
TIME_LIMIT = 240


@pytest.fixture(scope="module")
def tree() -> dict[str, Any]:
    data = process_scenario.make_data()
    return {
        "q": jq.quantize(data["first"], process_scenario.WEIGHTS),
        "x": jax.numpy.asarray(data["x"].reshape(32, 16)),
        "cache": jax.jit(process_scenario.make_cache)(data["x"]),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> pathlib.Path:
    """Run both processes until the second one has ended itself, while both save a checkpoint."""
    folder = tmp_path_factory.mktemp("processes")
    checkpoint.save_orbax(folder / "alone", tree)
    port = processes.find_port()
    commands = [["-m", "tests.support.process_scenario", str(i), "2", str(port), str(folder)] for i in range(2)]
    statuses, logs = processes.run_together(
        commands, folder, TIME_LIMIT, is_over=lambda statuses: statuses != [None, None]
    )
    assert (folder / "results.npz").exists(), f"expected results of two processes, got\n{logs}"
    assert statuses[1] == -9, logs
    return folder


@pytest.fixture(scope="module")
def results(folder: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(folder / "results.npz") as file:
        return dict(file)


def test_codes_are_those_of_one_device(results: dict[str, np.ndarray]) -> None:
    """Operators, contractions, calibrators and converted weights, bit for bit; a step within float32's rounding."""
    expected = process_scenario.run_alone()
    inexact = ("loss", "exact", "quantized", "attention")
    assert set(expected) <= set(results)
    for name, value in expected.items():
        if name.split("/")[0] not in inexact:
            assert results[name].dtype == value.dtype, name
            assert results[name].tobytes() == value.tobytes(), name
    for name in ("loss", "exact/first", "exact/second", "attention"):
        np.testing.assert_allclose(results[name], expected[name], rtol=1e-5, atol=1e-6)
    data = process_scenario.make_data()
    for name in ("first", "second"):
        # A gradient is at most half a step of each of two hops away from the exact one.
        largest = np.abs(expected[f"exact/{name}"] - data[name]).max() * 8
        error = np.abs(results[f"quantized/{name}"] - expected[f"exact/{name}"])
        assert 0 < error.max() <= 2 * largest / 127


def test_one_process_restores_what_two_saved(folder: pathlib.Path, tree: Any) -> None:
    """Into the shardings of `like`, because the devices that saved are not there."""
    assert_same(checkpoint.load_orbax(folder / "many", tree), tree)


def test_two_processes_restore_what_one_saved(results: dict[str, np.ndarray], tree: Any) -> None:
    expected = (tree["q"].codes.astype(np.int8), tree["q"].scale, tree["x"], tree["cache"])
    for name, value in process_scenario.flatten({"restored": expected}).items():
        assert results[name].tobytes() == value.tobytes(), name


def test_a_killed_process_leaves_the_last_checkpoint(folder: pathlib.Path, tree: Any) -> None:
    """What was being written has its final name only if it is whole, and the checkpoint before it is whole."""
    assert list(folder.glob("torn*")), "expected a process that was killed after the other one began to write"
    if (folder / "torn").exists():
        assert_same(checkpoint.load_orbax(folder / "torn", tree), tree)
    assert_same(checkpoint.load_orbax(folder / "many", tree), tree)


def test_specs_that_differ_are_refused(folder: pathlib.Path, results: dict[str, np.ndarray]) -> None:
    """Each process raises, and says which leaf differs and in which process; none waits for another."""
    second = (folder / "messages.txt").read_text().splitlines()
    first = [str(message) for message in results["messages"]]
    start = "jaxquant.distributed.check_processes: settings['spec']"
    assert len(first) == len(second) == 5
    for index, messages in enumerate((first, second)):
        spec, ends, structure, codebooks, _ = messages
        assert spec.startswith(start.replace("spec", "other"))
        assert "process 0 and process 1 differ" in spec
        assert f"size={64 * (index + 1)}" in spec
        assert f"in process {index}" in spec
        assert "settings['range'].lo" in ends
        assert "the structure of settings" in structure
        assert "the codebooks of settings: expected the same in all processes" in codebooks
        assert f"got [(-1.0, 0.0, {0.25 * (index + 1)}, 1.0)] (list) in process {index}" in codebooks


def test_a_nan_of_one_device_is_reported_by_all(folder: pathlib.Path, results: dict[str, np.ndarray]) -> None:
    """A range of all devices has the NaN, and both processes raise, although one of them has only finite batches."""
    for message in ((folder / "messages.txt").read_text().splitlines()[4], str(results["messages"][4])):
        assert message.startswith("jaxquant.")
        assert "a NaN" in message


@pytest.mark.slow
def test_the_script_of_the_documentation(tmp_path: pathlib.Path) -> None:
    """Two processes run it as it is printed, but for the port and the folder; the ranges cover all batches."""
    text = DOCS.read_text()
    script = text.split("```python\n")[1].split("```")[0]
    assert "127.0.0.1:12345" in script
    assert '"/tmp/ranges"' in script
    script = script.replace(":12345", f":{processes.find_port()}").replace("/tmp/ranges", str(tmp_path / "ranges"))
    (tmp_path / "script.py").write_text(script)
    commands = [[str(tmp_path / "script.py"), str(i)] for i in range(2)]
    statuses, logs = processes.run_together(commands, tmp_path, TIME_LIMIT)
    assert statuses == [0, 0], logs
    batches = [np.random.default_rng(i).normal(size=(4, 32)).astype(np.float32) for i in range(2)]
    batch = np.concatenate(batches)
    q = jq.quantize(batch, jq.QuantSpec(np.uint8))
    saved = checkpoint.load_orbax(tmp_path / "ranges", {"q": q, "lo": q.scale, "hi": q.scale})
    assert (saved["lo"].item(), saved["hi"].item()) == (batch.min(), batch.max())
    assert_same(saved["q"], q)


def assert_same(actual: Any, expected: Any) -> None:
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
