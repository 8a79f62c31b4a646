"""Every family of operators on eight devices of one process and of two: the integers of one process with one device."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxquant import distributed as jqd

from ..cases import operator_families
from ..cases.operator_families import CUTS, EVEN, FAMILIES, ODD, check_results, list_arrays
from ..support import process_families, processes

TIME_LIMIT = 1800


def find_spec(dimension: int, rank: int) -> PartitionSpec:
    return PartitionSpec(*("d" if i == dimension else None for i in range(rank)))


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("lengths", ["even", "odd"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_devices_give_the_bits_of_one(rng: np.random.Generator, family: str, cut: str, lengths: str) -> None:
    """On every axis, contracted ones too, of lengths that the number of devices divides and that it does not."""
    run, mesh = FAMILIES[family], Mesh(np.array(jax.devices()[:8]), ("d",))
    data: dict[str, Any] = operator_families.draw_inputs(rng, EVEN if lengths == "even" else ODD)
    shardings = {name: NamedSharding(mesh, find_spec(CUTS[cut][name], x.ndim)) for name, x in data.items()}
    expected = jax.jit(lambda data: list_arrays(run(data)))(data)
    if lengths == "even":
        data = {name: jax.device_put(x, shardings[name]) for name, x in data.items()}

    def run_cut(data: Any) -> Any:
        return list_arrays(run(jax.lax.with_sharding_constraint(data, shardings)))

    compiled = jax.jit(run_cut).lower(data).compile()
    if cut == "contracted" and family != "onednn":  # whose operators are element-wise
        assert jqd.count_traffic(compiled), "expected operands that are spread over devices"
    check_results(compiled(data), expected, f"{family}, {cut}")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Run both processes, which takes minutes, and return what the first has written."""
    folder, port = tmp_path_factory.mktemp("families"), processes.find_port()
    commands = [["-m", "tests.support.process_families", str(i), str(port), str(folder)] for i in range(2)]
    statuses, log = processes.run_together(commands, folder, TIME_LIMIT)
    assert statuses == [0, 0], log
    with np.load(pathlib.Path(folder / "families.npz")) as file:
        return dict(file)


def select(results: dict[str, Any], names: Any) -> dict[str, Any]:
    return {name: results[name] for name in names}


@pytest.mark.full
def test_two_processes_give_the_bits_of_one_device(results: dict[str, np.ndarray]) -> None:
    """Every family, cut along contracted dimensions; all calibrators; all recipes."""
    expected = process_families.calibrate_alone() | process_families.run_families(lambda value, _: value, None)
    check_results(select(results, expected), expected, "two processes")


@pytest.mark.full
def test_two_processes_give_the_bits_of_eight_devices(results: dict[str, np.ndarray]) -> None:
    """All collectives, and steps of training with quantized gradients and an 8-bit state."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("d",))

    def spread(value: np.ndarray, dimension: int | None) -> jax.Array:
        sharding = PartitionSpec() if dimension is None else find_spec(dimension, value.ndim)
        return jax.device_put(value, NamedSharding(mesh, sharding))

    expected = process_families.run_programs(mesh, spread)
    check_results(select(results, expected), expected, "two processes")
    assert results["same"], "expected the same weights on all devices"
    assert results["collectives/same sums"].all()
    assert not results["collectives/same"].any()
