"""Start processes that work together by jax.distributed, and end all of them when the first fails or time is up."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

ROOT = pathlib.Path(__file__).parents[2]


def find_port() -> int:
    """Return a port of this machine that nobody listens to."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def start(command: Sequence[str], log: pathlib.Path, devices: int = 4) -> subprocess.Popen[str]:
    """Start a Python process with devices of its own, and without the settings of this one."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
        )


def run_together(
    commands: Sequence[Sequence[str]],
    folder: pathlib.Path,
    time_limit: float,
    *,
    devices: int = 4,
    is_over: Callable[[list[int | None]], bool] | None = None,
) -> tuple[list[int | None], str]:
    """Run processes side by side; return their exit statuses, None where one was ended, and what they have printed.

    Args:
        commands: the arguments of Python, for each process.
        folder: where they print, into log0.txt, log1.txt and so on.
        time_limit: seconds after which processes that still run are ended.
        devices: how many each process has.
        is_over: whether to end processes that still run, by the exit statuses so far. None: after the first failure,
            because the others would wait for it.
    """
    logs = [folder / f"log{i}.txt" for i in range(len(commands))]
    processes = [start(command, log, devices) for command, log in zip(commands, logs, strict=True)]
    is_over = is_over or (lambda statuses: any(statuses))
    deadline = time.monotonic() + time_limit
    try:
        while time.monotonic() < deadline:
            statuses = [process.poll() for process in processes]
            if None not in statuses or is_over(statuses):
                break
            time.sleep(0.1)
        statuses = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return statuses, "\n".join(log.read_text()[-3000:] for log in logs)
