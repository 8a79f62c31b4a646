"""What the command lines of packages share: errors are one line on the error stream, and the status 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import checks


class CommandParser(argparse.ArgumentParser):
    """A parser that prints one line for an error, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print one line, and exit with 2."""
        self.exit(2, f"error: {message}\n")


def run_command(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, errors: tuple[type[Exception], ...]
) -> int:  # fmt: skip
    """Run the function that the arguments choose; return its status or 0, and 2 after an error in files or arguments.

    Args:
        parser: a parser that sets `function`.
        argv: the arguments; None for the ones of the process.
        errors: what is wrong with a file, besides OSError and the errors of checks.
    """
    arguments = parser.parse_args(argv)
    try:
        status = arguments.function(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        # Python would report the pipe once more when it flushes its output at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except (*errors, OSError, checks.ContractValueError, checks.ContractTypeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return status or 0
