"""Plans of transformers on large meshes, from a shell; no device of that size is needed.

    python -m jaxquant.distributed plan --preset 70B --mesh data=8,model=8
    python -m jaxquant.distributed plan --layers 24 --width 2048 --heads 16 --mesh data=8 --step decode
    python -m jaxquant.distributed plan --preset 7B,70B --mesh data=8 --mesh data=8,model=8

With several presets or meshes it prints their totals side by side. With --json it prints the bytes of all plans, and
the shape of each stored array with the axis that cuts each dimension, for NamedSharding(mesh, PartitionSpec(*axes)).

It traces a step with abstract shapes and prints, for one device, the bytes of what it stores, and of what it sends in a
step by collective. Matrices are cut by `data` (FSDP, in training) and `model` (tensor parallelism). In training the
weights are float32 in every column, and gathered for each layer in the column's format, in the forward and in the
backward pass, which computes the layers again. Gradients and activations travel in it, too (the column int4 sends them
as int8), with a scale for each 128 elements. For decoding, weights and cache are stored in the format.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

from .._core import checks
from ._plan import FORMATS, PRESETS, MeshPlan, ModelSizes, make_plan

_NAME = "distributed.plan"
_STEPS = {"train": True, "decode": False}
_AXES = ("data", "model")


# The name of the sizes, the sizes, the mesh, and the plan in each format.
Row = tuple[str, ModelSizes, dict[str, int], dict[str, MeshPlan]]


class StoreOnce(argparse.Action):
    """Store the value of an option, and report a repeated option: argparse would keep its last value."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: str | Sequence[Any] | None,
        option: str | None = None,
    ) -> None:  # fmt: skip
        """Store the value."""
        if self.dest in namespace.given:
            raise argparse.ArgumentError(self, f"expected it once, got it again with {values!r}")
        namespace.given = (*namespace.given, self.dest)
        setattr(namespace, self.dest, values)


def read_mesh(text: str) -> dict[str, int]:
    """Return the lengths of the axes of a mesh, such as "data=8,model=8"; an axis that is missing has length 1."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, length = part.partition("=")
        if name not in _AXES or not length.isdecimal() or int(length) == 0:
            raise argparse.ArgumentTypeError(f"expected data=N,model=N with positive N, got {text!r}")
        if name in mesh:
            raise argparse.ArgumentTypeError(f"expected each axis once, got {name} twice in {text!r}")
        mesh[name] = int(length)
    return {name: mesh.get(name, 1) for name in _AXES}


def read_presets(text: str) -> list[str]:
    """Return the names of presets, such as "7B,70B"."""
    names = text.split(",")
    if not set(names) <= set(PRESETS):
        raise argparse.ArgumentTypeError(f"expected presets among {', '.join(PRESETS)}, got {text!r}")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"expected distinct presets, got {text!r}")
    return names


def read_formats(text: str) -> list[str]:
    """Return the names of formats."""
    names = text.split(",")
    for name in names:
        expected = f"formats among {', '.join(FORMATS)}"
        checks.require(name in FORMATS, _NAME, "formats", expected, repr(name))
    checks.require(len(set(names)) == len(names), _NAME, "formats", "distinct formats", text)
    return names


def read_sizes(arguments: argparse.Namespace, preset: str | None) -> ModelSizes:
    """Return the sizes of a preset, replaced by the sizes that are given."""
    start = PRESETS[preset] if preset else None
    values = {name: getattr(arguments, name) for name in ModelSizes._fields}
    if start is None:
        given = [f"--{name}" for name in ("layers", "width", "heads") if values[name] is not None]
        expected = "--preset, or --layers, --width and --heads"
        got = f"only {' and '.join(given)}" if given else "neither"
        checks.require(len(given) == 3, _NAME, "sizes", expected, got)
        start = ModelSizes(0, 0, 0, values["heads"], 4 * values["width"], 32000)
    return start._replace(**{name: value for name, value in values.items() if value is not None})


def format_table(columns: dict[str, MeshPlan]) -> str:
    """Return a table of the bytes of each format, in GB of 10**9 bytes."""
    plans = list(columns.values())
    rows = [["GB on each device", *columns]]
    for name in dict.fromkeys(name for plan in plans for name in plan.stored):
        rows.append([name, *(_format_bytes(plan.stored.get(name, 0)) for plan in plans)])
    for kind in sorted({kind for plan in plans for kind in plan.sent}):
        rows.append([f"sent by {kind}", *(_format_bytes(plan.sent.get(kind, 0)) for plan in plans)])
    rows.append(["sent in a step", *(_format_bytes(sum(plan.sent.values())) for plan in plans)])
    return _align_rows(rows, 1)


def format_summary(rows: list[Row]) -> str:
    """Return a table of the totals of several plans, in GB of 10**9 bytes."""
    formats = list(rows[0][3])
    table = [["sizes", "devices", "GB on each device", *formats]]
    for name, _, mesh, columns in rows:
        devices = f"{mesh['data'] * mesh['model']} ({describe_mesh(mesh)})"
        stored = [_format_bytes(sum(plan.stored.values())) for plan in columns.values()]
        sent = [_format_bytes(sum(plan.sent.values())) for plan in columns.values()]
        table += [[name, devices, "stored", *stored], [name, devices, "sent in a step", *sent]]
    return _align_rows(table, 3)


def _align_rows(rows: list[list[str]], texts: int) -> str:
    """Return a table with texts in the first columns and numbers in the others."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        [cell.ljust(n) if i < texts else cell.rjust(n) for i, (cell, n) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    ]
    lines.insert(1, ["-" * n if i < texts else "-" * (n - 1) + ":" for i, n in enumerate(widths)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def describe_mesh(mesh: dict[str, int]) -> str:
    """Return the axes of a mesh, as the command takes them."""
    return ", ".join(f"{name}={length}" for name, length in mesh.items())


def _format_bytes(count: int) -> str:
    return f"{count / 1e9:.3f}"


def print_plan(arguments: argparse.Namespace) -> None:
    """Print the plan of a step, or the totals of several plans."""
    formats = read_formats(arguments.formats)
    presets, meshes = arguments.preset or [None], arguments.mesh or [read_mesh("data=8")]
    texts = [describe_mesh(mesh) for mesh in meshes]
    # "data=8" and "data=8,model=1" are the same mesh, too.
    checks.require(len(set(texts)) == len(texts), _NAME, "mesh", "distinct meshes", " and ".join(texts))
    named_sizes = [(preset or "", read_sizes(arguments, preset)) for preset in presets]
    rows: list[Row] = []
    for name, sizes in named_sizes:
        for mesh in meshes:
            columns = {
                form: make_plan(
                    sizes, FORMATS[form], mesh, batch=arguments.batch, sequence=arguments.sequence,
                    is_training=_STEPS[arguments.step],
                )
                for form in formats
            }  # fmt: skip
            rows.append((name, sizes, mesh, columns))
    if arguments.json:
        print(json.dumps([_describe_plans(arguments, *row) for row in rows], indent=1))
        return
    tokens = f"{arguments.batch} x {arguments.sequence} tokens"
    if len(rows) > 1:
        print(f"{arguments.step}: {tokens}\n\n{format_summary(rows)}")
        return
    _, sizes, mesh, columns = rows[0]
    print(f"{arguments.step}: {', '.join(f'{name} {value:,}' for name, value in sizes._asdict().items())}")
    print(f"{mesh['data'] * mesh['model']} devices ({describe_mesh(mesh)}), {tokens}")
    print()
    print(format_table(columns))


def _describe_plans(
    arguments: argparse.Namespace, name: str, sizes: ModelSizes, mesh: dict[str, int], columns: dict[str, MeshPlan]
) -> dict[str, Any]:
    """Return the plans of all formats for one mesh, as JSON has them."""
    formats = {
        form: {**plan._asdict(), "arrays": {path: array._asdict() for path, array in plan.arrays.items()}}
        for form, plan in columns.items()
    }
    names = {"step": arguments.step, "preset": name or None, "sizes": sizes._asdict(), "mesh": mesh}
    return {**names, "batch": arguments.batch, "sequence": arguments.sequence, "formats": formats}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        "python -m jaxquant.distributed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    plan = commands.add_parser("plan", help="print the bytes of a step on each device of a mesh")
    plan.set_defaults(function=print_plan, given=())
    add = functools.partial(plan.add_argument, action=StoreOnce)
    names = ", ".join(PRESETS)
    add("--preset", type=read_presets, help=f"sizes among {names}, which other options may replace")
    for name in ModelSizes._fields:
        add(f"--{name.replace('_', '-')}", type=int)
    plan.add_argument(
        "--mesh", type=read_mesh, action="append", help="data=N,model=N, may be repeated (default data=8)"
    )
    add("--step", choices=_STEPS, default="train", help="(default %(default)s)")
    add("--batch", type=int, default=512, help="sequences on all devices (default %(default)s)")
    add("--sequence", type=int, default=4096, help="tokens of each (default %(default)s)")
    add("--formats", default=",".join(FORMATS), help="columns (default %(default)s)")
    plan.add_argument("--json", action="store_true", help="print JSON: bytes, and the axes that cut each array")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 1 after an error in the arguments."""
    arguments = make_parser().parse_args(argv)
    try:
        arguments.function(arguments)
    except (checks.ContractValueError, checks.ContractTypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
