"""Plans of transformers on large meshes, from a shell; no device of that size is needed.

    python -m jaxquant.distributed plan --preset 70B --mesh data=8,model=8
    python -m jaxquant.distributed plan --layers 24 --width 2048 --heads 16 --mesh data=8 --step decode

It traces a step with abstract shapes and prints, for one device, the bytes of what it stores, and of what it sends in a
step by collective. Matrices are cut by `data` (FSDP, in training) and `model` (tensor parallelism). In training the
weights are float32 in every column, and gathered for each layer in the column's format, in the forward and in the
backward pass, which computes the layers again. Gradients and activations travel in it, too (the column int4 sends them
as int8), with a scale for each 128 elements. For decoding, weights and cache are stored in the format.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .._core import checks
from ._plan.count import Plan, make_plan
from ._plan.sizes import FORMATS, PRESETS, Sizes

_STEPS = {"train": True, "decode": False}


def read_mesh(text: str) -> dict[str, int]:
    """Return the lengths of the axes of a mesh, such as "data=8,model=8"; an axis that is missing has length 1."""
    mesh = {"data": 1, "model": 1}
    for part in text.split(","):
        name, _, length = part.partition("=")
        if name not in mesh or not length.isdecimal():
            raise argparse.ArgumentTypeError(f"expected data=N,model=N, got {text!r}")
        mesh[name] = int(length)
    return mesh


def read_sizes(arguments: argparse.Namespace) -> Sizes:
    """Return the sizes of a preset, with those that are given in their place."""
    start = PRESETS[arguments.preset] if arguments.preset else None
    values = {name: getattr(arguments, name) for name in Sizes._fields}
    if start is None:
        missing = [name for name in ("layers", "width", "heads") if values[name] is None]
        checks.require(
            not missing, "distributed.plan", "sizes", "--preset, or --layers, --width and --heads", "neither"
        )
        start = Sizes(0, 0, 0, values["heads"], 4 * values["width"], 32000)
    return start._replace(**{name: value for name, value in values.items() if value is not None})


def format_table(columns: dict[str, Plan]) -> str:
    """Return a table of the bytes of each format, in GB of 10**9 bytes."""
    plans = list(columns.values())
    rows = [["GB on each device", *columns]]
    for name in dict.fromkeys(name for plan in plans for name in plan.stored):
        rows.append([name, *(_format_bytes(plan.stored.get(name, 0)) for plan in plans)])
    for kind in sorted({kind for plan in plans for kind in plan.sent}):
        rows.append([f"sent by {kind}", *(_format_bytes(plan.sent.get(kind, 0)) for plan in plans)])
    rows.append(["sent in a step", *(_format_bytes(sum(plan.sent.values())) for plan in plans)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows]
    lines.insert(1, ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _format_bytes(count: int) -> str:
    return f"{count / 1e9:.3f}"


def print_plan(arguments: argparse.Namespace) -> None:
    """Print the plan of a step."""
    sizes = read_sizes(arguments)
    columns = {}
    for name in arguments.formats.split(","):
        expected = f"formats among {', '.join(FORMATS)}"
        checks.require(name in FORMATS, "distributed.plan", "formats", expected, name)
        columns[name] = make_plan(
            sizes, FORMATS[name], arguments.mesh, batch=arguments.batch, sequence=arguments.sequence,
            is_training=_STEPS[arguments.step],
        )  # fmt: skip
    mesh = arguments.mesh
    print(f"{arguments.step}: {', '.join(f'{name} {value:,}' for name, value in sizes._asdict().items())}")
    devices = mesh["data"] * mesh["model"]
    axes = ", ".join(f"{name}={length}" for name, length in mesh.items())
    print(f"{devices} devices ({axes}), {arguments.batch} x {arguments.sequence} tokens")
    print()
    print(format_table(columns))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        "python -m jaxquant.distributed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    plan = commands.add_parser("plan", help="print the bytes of a step on each device of a mesh")
    plan.set_defaults(function=print_plan)
    plan.add_argument("--preset", choices=PRESETS, help="sizes that the other options may replace")
    for name in Sizes._fields:
        plan.add_argument(f"--{name.replace('_', '-')}", type=int)
    plan.add_argument("--mesh", type=read_mesh, default="data=8", help="data=N,model=N (default %(default)s)")
    plan.add_argument("--step", choices=_STEPS, default="train", help="(default %(default)s)")
    plan.add_argument("--batch", type=int, default=512, help="sequences on all devices (default %(default)s)")
    plan.add_argument("--sequence", type=int, default=4096, help="tokens of each (default %(default)s)")
    plan.add_argument("--formats", default=",".join(FORMATS), help="columns (default %(default)s)")
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
