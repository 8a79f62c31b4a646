"""The processor that figures are of. It needs nothing but Python, so that a benchmark's memory stays its own."""

from __future__ import annotations

import os
import pathlib
import platform
import re

_INFO = pathlib.Path("/proc/cpuinfo")
_HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


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


def describe_huge_pages() -> str:
    """Return when Linux backs memory with huge pages, and what GLIBC_TUNABLES says of those that malloc asks for."""
    chosen = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text()) if _HUGE_PAGES.exists() else None
    tunable = re.search(r"glibc\.malloc\.hugetlb=\d", os.environ.get("GLIBC_TUNABLES", ""))
    return f"{chosen[1] if chosen else 'not known'}, {tunable[0] if tunable else 'glibc.malloc.hugetlb is not set'}"
