"""ONNX models from a shell: print, run, quantize, export and verify them.

    python -m jaxquant.onnx inspect model.onnx
    python -m jaxquant.onnx run model.onnx --inputs x.npz
    python -m jaxquant.onnx quantize model.onnx small.onnx --data calibration.npz
    python -m jaxquant.onnx export package.module:function model.onnx --inputs x.npz
    python -m jaxquant.onnx verify package.module:function model.onnx --inputs x.npz

The function takes the arrays of the file in their order, after the arrays of `--params package.module:name`, such as a
prepared function and its `QuantizedTree`. Both are imported, so their modules are executed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import pathlib
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._core import dtypes
from .._core.command_line import CommandParser, run_command
from ..transform import Prepared
from . import Limits, ModelError, export, load, quantize, save, verify
from .limits import count_model_bytes
from .model_file import read_checked_model
from .quantization.data import list_inputs, read_images, split_arrays
from .quantization.recipes import CALIBRATORS, FORMS, RECIPES, check_output


@contextlib.contextmanager
def name_file(path: str) -> Iterator[None]:
    """Put the name of the model's file in front of what is wrong with it: a shell may run many commands."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def inspect_model(arguments: argparse.Namespace) -> None:
    """Print the inputs, the outputs and the nodes of a model."""
    with name_file(arguments.model):
        fn, params = load(arguments.model, limits=Limits(memory_bytes=arguments.memory), fusions=arguments.fusions)
    for x in fn.inputs:
        print(f"input {x.name}: {x.dtype}{'' if x.shape is None else list(x.shape)}")
    print(f"outputs {', '.join(fn.outputs)}")
    print(fn.describe(params))


def run_model(arguments: argparse.Namespace) -> None:
    """Run a model on the arrays of an .npz file, and print or store the outputs."""
    with name_file(arguments.model):
        fn, params = load(arguments.model, limits=Limits(memory_bytes=arguments.memory), fusions=arguments.fusions)
    inputs = read_arrays(arguments.inputs)
    # Inputs that decide about shapes must not be traced, so they are no arguments of the jitted function.
    known = {name: inputs.pop(name) for name in list(inputs) if name in fn.static_inputs}
    outputs: Any = jax.jit(lambda p, values: fn(p, **values, **known))(params, inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results: dict[str, Any] = {name: np.asarray(y) for name, y in zip(fn.outputs, outputs, strict=True)}
    for name, y in results.items():
        print(f"{name}: {y.dtype}{list(y.shape)}" + (f", {y.min()} to {y.max()}" if y.size else ""))
    if arguments.outputs:
        write_arrays(arguments.outputs, results)


def import_name(argument: str, place: str) -> Any:
    """Return what is at a place such as "package.module:name"; raise ModelError if there is nothing."""
    module, colon, name = place.partition(":")
    if not (module and colon and name) or module.startswith("."):
        raise ModelError(f"{argument}: expected package.module:name, got {place!r}")
    sys.path.insert(0, os.getcwd())  # as `python -m` does for the module that it runs
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"{argument}: expected a name that can be imported, got {place!r}: {error}") from error
    finally:
        sys.path.pop(0)


def import_call(arguments: argparse.Namespace) -> tuple[Any, list[Any], list[np.ndarray]]:
    """Return the function that a command names, its parameters in a list, if it has any, and its inputs."""
    place = arguments.function_place
    function: Any = import_name("function", place)
    if not callable(function) and not isinstance(function, Prepared):
        raise ModelError(f"function: expected a function, got {place!r}, of type {type(function).__name__}")
    params = [] if arguments.params is None else [import_name("--params", arguments.params)]
    inputs = [*read_arrays(arguments.inputs).values()]
    check_arguments(function, place, params, inputs)
    return function, params, inputs


def read_arrays(path: str) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file by name, in their order; raise ModelError if it is damaged or another file."""
    try:
        with open(path, "rb") as stream:  # numpy leaves a damaged file open
            file = np.load(stream, allow_pickle=False)
            arrays = None if isinstance(file, np.ndarray) else {name: file[name] for name in file.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ModelError(f"{path}: expected a file of numpy.savez: {error}") from error
    if arrays is None:
        raise ModelError(f"{path}: expected a file of numpy.savez, got one of numpy.save, with an array without a name")
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc":  # numpy stores bfloat16, and what else it does not know, as bytes
            raise ModelError(f"{path}: expected arrays of numbers, got {name} of dtype {array.dtype}")
    return arrays


def write_arrays(path: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to an .npz file; dtypes that numpy lacks become a wider dtype that holds their numbers."""
    path = path if path.endswith(".npz") else f"{path}.npz"
    # The arguments of numpy.savez have names, such as "file", which an output may have, too.
    with zipfile.ZipFile(path, "w") as file:
        for name, array in arrays.items():
            if array.dtype.isbuiltin != 1:
                is_integer = array.dtype in dtypes.INTEGERS
                array = array.astype(np.int8 if is_integer else np.float32)
            with file.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, array, allow_pickle=False)


def check_arguments(function: Any, place: str, params: Sequence[Any], inputs: Sequence[np.ndarray]) -> None:
    """Raise ModelError if a function does not take as many arguments as there are arrays."""
    try:
        signature = inspect.signature(function.function if isinstance(function, Prepared) else function)
    except (TypeError, ValueError):  # not every function tells its parameters
        return
    try:
        signature.bind(*params, *inputs)
    except TypeError as error:
        raise ModelError(f"{place} does not take the {len(inputs)} arrays of the file: {error}") from error


def export_function(arguments: argparse.Namespace) -> None:
    """Write a function as a model."""
    function, params, inputs = import_call(arguments)
    options = {name: getattr(arguments, name) for name in ("form", "opset", "scan", "batch", "weights")}
    write: Any = export  # overloads tell the two numbers of arguments apart
    model = write(function, *params, inputs, **options)
    save(model, arguments.model)
    print(f"{arguments.model}: {len(model.graph.node)} nodes, {count_model_bytes(model):,} bytes")


def verify_model(arguments: argparse.Namespace) -> int:
    """Compare a model with the function that it was exported from; return 1 if they differ."""
    function, params, inputs = import_call(arguments)
    with name_file(arguments.model):
        compare: Any = verify  # as `export`
        report = compare(arguments.model, function, *params, [tuple(inputs)], level=arguments.level)
    print(report)
    if not report.is_exact:
        print("error: the model and the function differ", file=sys.stderr)
    return not report.is_exact


def quantize_model(arguments: argparse.Namespace) -> None:
    """Quantize a model, and print what became of it."""
    page = check_output("--report", arguments.report)
    if page is not None and page.absolute() == pathlib.Path(arguments.output).absolute():
        raise ModelError(f"--report: expected another path than the model's, got {arguments.report}")
    with name_file(arguments.model):
        data = read_data(arguments)
        report = quantize(
            arguments.model, arguments.output, recipe=arguments.recipe, data=data, random=arguments.random,
            keep=arguments.keep, calibrator=arguments.calibrator, block=arguments.block,
            form=arguments.form, exact_everywhere=arguments.exact_everywhere,
        )  # fmt: skip
    if page is not None:
        report.to_html(page)
    print(report)
    print(f"{arguments.output}: {len(report.model.graph.node)} nodes, {report.bytes_after:,} bytes")


def read_data(arguments: argparse.Namespace) -> Any:
    """Return the batches of `--data`, or None without it."""
    if (arguments.mean, arguments.std) != ([0], [1]) and not os.path.isdir(arguments.data or ""):
        raise ModelError(f"--mean, --std: expected a folder of images as --data, got {arguments.data}")
    if arguments.data is None:
        return None
    path = pathlib.Path(arguments.data)
    if not path.exists() and ":" in arguments.data:
        function = import_name("--data", arguments.data)
        if not callable(function):
            raise ModelError(f"--data: expected a function, got {arguments.data!r}, of type {type(function).__name__}")
        try:
            batches = function()
            return [*batches] if isinstance(batches, Iterator) else batches
        except Exception as error:  # whatever the user's function raises
            raise ModelError(f"--data: {arguments.data} raised {type(error).__name__}: {error}") from error
    inputs = list_inputs(read_checked_model(arguments.model, Limits()))
    if path.is_dir():
        return read_images(inputs, path, arguments.mean, arguments.std)
    if path.suffix == ".npy" and len(inputs) == 1:
        return split_arrays(inputs, {inputs[0].name: read_array(arguments.data)}, arguments.data)
    return split_arrays(inputs, read_arrays(arguments.data), arguments.data)


def read_array(path: str) -> np.ndarray:
    """Return the array of an .npy file; raise ModelError if it is damaged or another file."""
    try:
        with open(path, "rb") as stream:
            array = np.load(stream, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ModelError(f"{path}: expected a file of numpy.save: {error}") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
        raise ModelError(f"{path}: expected a file of numpy.save with numbers")
    return array


def read_numbers(text: str) -> list[float]:
    """Return the numbers of an argument such as 0.5,0.5,0.5."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between them, got {text!r}") from None


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "python -m jaxquant.onnx", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    show = commands.add_parser("inspect", help="print a table of the nodes, integer or float, with bytes")
    show.set_defaults(function=inspect_model)
    run = commands.add_parser("run", help="run a model on the arrays of an .npz file")
    run.set_defaults(function=run_model)
    run.add_argument("--inputs", required=True, help="an .npz file with an array for each input")
    run.add_argument("--outputs", help="an .npz file to write")
    write = commands.add_parser("export", help="write a function as a model")
    write.set_defaults(function=export_function)
    compare = commands.add_parser(
        "verify", help="compare a model in ONNX Runtime with its function; status 1 if not equal"
    )
    compare.set_defaults(function=verify_model)
    for command in (write, compare):
        command.add_argument("function_place", metavar="function", help="package.module:function")
        command.add_argument("model", help="the model's file")
        command.add_argument("--params", metavar="NAME", help="package.module:name of the function's first argument")
        command.add_argument("--inputs", required=True, help="an .npz file with the other arguments, in their order")
    write.add_argument("--form", default="operators", help="operators or qdq (default %(default)s)")
    write.add_argument("--opset", type=int, default=21, help="the version of ONNX's operators (default %(default)s)")
    write.add_argument("--scan", default="auto", help="auto, unroll or loop (default %(default)s)")
    write.add_argument("--weights", help="int8, or uint8 for the same integers on every processor")
    write.add_argument("--batch", help="the name of a symbolic first dimension")
    compare.add_argument("--level", default="all", help="disabled, basic, extended or all (default %(default)s)")
    add_quantize(commands)
    for command in (show, run):
        command.add_argument("model", help="the model's file")
        default = Limits().memory_bytes
        command.add_argument("--fusions", default="all", help="all, safe or none (default %(default)s)")
        command.add_argument("--memory", type=int, default=default, help="Limits.memory_bytes (default %(default)s)")
    return parser


def add_quantize(commands: Any) -> None:
    """Add the command that quantizes a model."""
    command = commands.add_parser("quantize", help="quantize a float model, and compare it in ONNX Runtime")
    command.set_defaults(function=quantize_model)
    command.add_argument("model", help="the float model's file")
    command.add_argument("output", help="the file to write")
    command.add_argument("--recipe", choices=RECIPES, default="static", help="default %(default)s")
    text = "an .npz file by names of inputs, an .npy file, a folder of images, or package.module:function for batches"
    command.add_argument("--data", help=text)
    command.add_argument("--random", action="store_true", help="use random numbers in place of data")
    text = "a pattern of nodes, outputs or operators that stay in floats; may be repeated"
    command.add_argument("--keep", action="append", default=[], metavar="PATTERN", help=text)
    text = "how static ranges are found (default %(default)s)"
    command.add_argument("--calibrator", choices=CALIBRATORS, default="minmax", help=text)
    text = "how many inputs share a scale, of 4 bits (default %(default)s)"
    command.add_argument("--block", type=int, default=32, help=text)
    text = "static: QuantizeLinear and DequantizeLinear, or ONNX Runtime's operators on codes (default %(default)s)"
    command.add_argument("--form", choices=FORMS, default="qdq", help=text)
    command.add_argument("--report", metavar="PAGE", help="write an HTML page with a row for each node")
    text = "weights of 7 bits, which give the same integers on every processor"
    command.add_argument("--exact-everywhere", action="store_true", help=text)
    for name, default in (("--mean", "0"), ("--std", "1")):
        text = f"of images: a number, or one for each channel (default {default})"
        command.add_argument(name, type=read_numbers, default=default, metavar="NUMBERS", help=text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 2 after an error in the arguments or the files, and 1 if `verify` finds a difference."""
    return run_command(make_parser(), argv, (ModelError,))


if __name__ == "__main__":
    sys.exit(main())
