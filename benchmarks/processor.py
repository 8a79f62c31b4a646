"""The processor that figures are of. It needs nothing but Python, so that a benchmark's memory stays its own."""

from __future__ import annotations

import pathlib
import platform
import re

_INFO = pathlib.Path("/proc/cpuinfo")


def read_name() -> str:
    """Return the name of the processor, as the operating system has it."""
    model = re.search(r"model name\s*:\s*(.+)", _INFO.read_text()) if _INFO.exists() else None
    return model[1] if model else platform.processor() or platform.machine()


def find_vnni() -> str:
    """Return whether the operating system names an instruction for products of uint8 by int8. An emulator may not."""
    flags = re.search(r"^flags\s*:(.+)", _INFO.read_text(), re.MULTILINE) if _INFO.exists() else None
    if flags is None:
        return "not known"
    return " ".join(flag for flag in ("avx512_vnni", "avx_vnni") if flag in flags[1].split()) or "no"
