"""Progress and tables in the terminal: rich where it is installed and the output is a terminal, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from salience.errors import printable

SECONDS_BETWEEN_UPDATES = 0.5
"""Fewest seconds between two updates."""


class Bars(Protocol):
    """Several named progress bars."""

    def update(self, name: str, done: float, total: float, note: str = "") -> None: ...


class _PlainBars:
    """A line every few seconds, for logs."""

    def __init__(self, every: float = 5.0) -> None:
        self._every = every
        self._last: dict[str, float] = {}

    def update(self, name: str, done: float, total: float, note: str = "") -> None:
        now = time.monotonic()
        if done < total and now - self._last.get(name, -1e9) < self._every:
            return
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


def _rich_terminal() -> bool:
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


@contextmanager
def bars() -> Generator[Bars]:
    """Progress bars while the block runs, redrawn at most twice a second."""
    if not _rich_terminal():
        yield _PlainBars()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(bar_width=32),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, refresh_per_second=1 / SECONDS_BETWEEN_UPDATES) as progress:
        yield _RichBars(progress)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, strong: int | None = None) -> None:
    """A table, first column left and the others right; row `strong` stands out."""
    if _rich_terminal():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        drawn = Table(title=escape(printable(title)), title_justify="left", title_style="bold")
        for number, name in enumerate(head):
            drawn.add_column(name, justify="left" if number == 0 else "right")
        for number, row in enumerate(rows):
            drawn.add_row(*(escape(printable(cell)) for cell in row), style="bold green" if number == strong else None)
        Console().print(drawn)
        return
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    say(title)
    for line in (head, ["-" * w for w in widths], *rows):
        cells = [f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        say("  " + "  ".join(cells).rstrip())


def say(text: str = "") -> None:
    print(printable(text), flush=True)
