"""Lines, tables and progress in the terminal; rich draws progress if it is installed and the output is a terminal."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from salience.errors import printable

SECONDS_BETWEEN_UPDATES = 0.5
"""Minimum seconds between two updates."""
SECONDS_BETWEEN_LINES = 5.0
"""Minimum seconds between two lines of the same bar, if there is no terminal."""


def say(text: str = "") -> None:
    print(printable(text), flush=True)


def columns(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), indent: str = "") -> str:
    """Rows of text as aligned columns: those numbered in `right` are aligned to the right, the others to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        indent + "  ".join(f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
        for row in rows
    )


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table with a title; the first column is aligned to the left, the others to the right."""
    line = ["-" * max(map(len, column)) for column in zip(head, *rows, strict=True)]
    say(f"{title}\n{columns([head, line, *rows], right=range(1, len(head)), indent='  ')}")


class Bars(Protocol):
    """Several named progress bars."""

    def update(self, name: str, done: float, total: float, note: str = "") -> None: ...


class _PlainBars:
    """Progress as a line every few seconds, for logs."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def update(self, name: str, done: float, total: float, note: str = "") -> None:
        now = time.monotonic()
        if done >= total or now - self._last.get(name, -1e9) >= SECONDS_BETWEEN_LINES:
            self._last[name] = now
            say(f"{name:<14} {done / max(total, 1e-9):4.0%}  {note}")


class _RichBars:
    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._tasks: dict[str, Any] = {}

    def update(self, name: str, done: float, total: float, note: str = "") -> None:
        from rich.markup import escape

        note = escape(printable(note))
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(escape(printable(name)), total=total, note=note)
        self._progress.update(self._tasks[name], completed=done, total=total, note=note)


@contextmanager
def bars() -> Generator[Bars]:
    """Progress bars while the block runs, redrawn at most twice a second."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield _PlainBars()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    shown = (
        TextColumn("{task.description:<14}"),
        BarColumn(bar_width=32),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*shown, refresh_per_second=1 / SECONDS_BETWEEN_UPDATES) as progress:
        yield _RichBars(progress)
