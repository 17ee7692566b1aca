"""Sizes in bytes: parsing and formatting them, and the size of this machine's memory."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from decimal import Decimal
from pathlib import Path

from salience.errors import ConfigError

UNITS = {"": 1, "b": 1} | {
    letter + end: base**power
    for power, letter in enumerate("kmgt", start=1)
    for end, base in (("ib", 1024), ("b", 1000))
}


def parse_bytes(size: str | int) -> int:
    """Bytes from "64MiB", "1.5GB", "1000000" or 1000000: KiB to TiB are powers of 1024, kB to TB of 1000."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if not found or found[2].lower() not in UNITS:
        raise ConfigError(f"{size!r} is not a size; write for example 64MiB, 1GiB or 500MB.")
    return int(Decimal(found[1]) * UNITS[found[2].lower()])


def memory_bytes() -> int | None:
    """Bytes of memory of this machine or container; None if unknown."""
    if sys.platform != "linux":
        return None
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(path).read_text()))
    return min(found)


def size(count: float) -> str:
    """A number of bytes in readable form."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
