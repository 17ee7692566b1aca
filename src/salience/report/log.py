"""An event log as it lies on disk: whole, cut off, damaged, or written by another salience."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from salience.errors import StateError
from salience.events import Event, Fault, scan


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """The events of one file, and what was wrong with it."""

    path: Path
    events: tuple[Event, ...]
    torn: int
    """Lines that are not whole JSON objects."""
    cut: bool
    """True if the last line is one of them."""
    newer: int
    """Events of a schema that this salience does not know."""
    unknown: Mapping[str, int]
    """Events of unknown kinds, by kind."""
    malformed: Mapping[str, int]
    """Events that lack what they should have, by kind."""


def read_log(path: Path) -> Log:
    """All events of a log that can be read; `events.read` stops at newer ones. Without any: an error that says what to do."""
    events: list[Event] = []
    faults: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    malformed: Counter[str] = Counter()
    last: Event | Fault | None = None
    try:
        for last in scan(path):
            if isinstance(last, Event):
                events.append(last)
                continue
            faults[last.why] += 1
            if last.why == "unknown":
                unknown[last.kind] += 1
            elif last.why == "malformed":
                malformed[last.kind] += 1
        cut = isinstance(last, Fault) and last.why == "torn" and not path.read_bytes().endswith(b"\n")
    except FileNotFoundError as cause:
        raise StateError(f"There is no event log at {str(path)!r}; a run writes one when given log=.") from cause
    except OSError as cause:
        raise StateError(f"The event log {str(path)!r} cannot be read: {cause.strerror}.") from cause
    if not events:
        why = "is empty: the run has not begun, or its log is another file"
        if faults["newer"]:
            why = "was written by a newer salience; upgrade salience to read it"
        elif faults:
            why = "is not an event log of salience; name the run's folder, or the file given as log="
        raise StateError(f"{str(path)!r} {why}.")
    return Log(
        path=path, events=tuple(events), torn=faults["torn"], cut=cut, newer=faults["newer"], unknown=unknown,
        malformed=malformed,
    )  # fmt: skip
