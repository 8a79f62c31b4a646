"""ONNX models from a shell: `python -m jaxquant.onnx inspect model.onnx`, `... run model.onnx --inputs x.npz`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from . import Limits, ModelError, load


def inspect_model(arguments: argparse.Namespace) -> None:
    """Print the inputs, the outputs and the nodes of a model."""
    fn, params = load(arguments.model, limits=Limits(memory_bytes=arguments.memory))
    for x in fn.inputs:
        print(f"input {x.name}: {x.dtype}{'' if x.shape is None else list(x.shape)}")
    print(f"outputs {', '.join(fn.outputs)}")
    print(fn.describe(params))


def run_model(arguments: argparse.Namespace) -> None:
    """Run a model on the arrays of an .npz file, and print or store the outputs."""
    fn, params = load(arguments.model, limits=Limits(memory_bytes=arguments.memory))
    with np.load(arguments.inputs, allow_pickle=False) as file:
        inputs = dict(file)
    known = {name: inputs.pop(name) for name in list(inputs) if name in fn.static_inputs}
    outputs: Any = jax.jit(lambda p, values: fn(p, **values, **known))(params, inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results: dict[str, Any] = {name: np.asarray(y) for name, y in zip(fn.outputs, outputs, strict=True)}
    for name, y in results.items():
        print(f"{name}: {y.dtype}{list(y.shape)}" + (f", {y.min()} to {y.max()}" if y.size else ""))
    if arguments.outputs:
        np.savez(arguments.outputs, **results)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser("python -m jaxquant.onnx", description=__doc__)
    commands = parser.add_subparsers(required=True)
    inspect = commands.add_parser("inspect", help="print a table of the nodes, integer or float, with bytes")
    inspect.set_defaults(function=inspect_model)
    run = commands.add_parser("run", help="run a model on the arrays of an .npz file")
    run.set_defaults(function=run_model)
    run.add_argument("--inputs", required=True, help="an .npz file with an array for each input")
    run.add_argument("--outputs", help="an .npz file to write")
    for command in (inspect, run):
        command.add_argument("model", help="the model's file")
        default = Limits().memory_bytes
        command.add_argument("--memory", type=int, default=default, help="Limits.memory_bytes (default %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 1 after a ModelError."""
    arguments = make_parser().parse_args(argv)
    try:
        arguments.function(arguments)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
