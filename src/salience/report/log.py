"""An event log as it lies on disk: whole, cut off, damaged, or written by another salience."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from salience.errors import StateError
from salience.events import VERSION, Event

LARGEST = 10**18
"""No number of an event is larger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """The events of one file, and what was wrong with it."""

    path: Path
    events: tuple[Event, ...]
    torn: int = 0
    """Lines that are not whole JSON objects,"""
    cut: bool = False
    """the last one among them;"""
    newer: int = 0
    """events of a schema that this salience does not know."""


def read_log(path: Path) -> Log:
    """All events of a log that can be read; `events.read` stops at newer ones. Without any: an error that says what to do."""
    events: list[Event] = []
    torn = newer = 0
    cut = False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                event = _parsed(line)
                cut = event is None and not line.endswith("\n")
                if event is None:
                    torn += 1
                elif number(event.get("v"), 0) > VERSION:
                    newer += 1
                else:
                    events.append(event)
    except FileNotFoundError as cause:
        raise StateError(f"There is no event log at {str(path)!r}; a run writes one when given log=.") from cause
    except OSError as cause:
        raise StateError(f"The event log {str(path)!r} cannot be read: {cause.strerror}.") from cause
    if not events:
        why = "is empty: the run has not begun, or its log is another file"
        if newer:
            why = "was written by a newer salience; upgrade salience to read it"
        elif torn:
            why = "is not an event log of salience; name the run's folder, or the file given as log="
        raise StateError(f"{str(path)!r} {why}.")
    return Log(path=path, events=tuple(events), torn=torn, cut=cut, newer=newer)


def number(value: Any, default: float) -> float:
    """`value` where it is a number."""
    return value if isinstance(value, (int, float)) else default


def _parsed(line: str) -> Event | None:
    try:
        event = json.loads(line, parse_constant=_refuse, parse_int=_bounded(int), parse_float=_bounded(float))
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None  # pyright: ignore[reportUnknownMemberType]


def _bounded(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Numbers that something may be counted with; larger ones are damage."""

    def read(text: str) -> float:
        value = kind(text)
        if abs(value) > LARGEST:
            raise ValueError(text)
        return value

    return read


def _refuse(constant: str) -> Any:
    """NaN and Infinity are not JSON, and an event log never has them."""
    raise ValueError(constant)
