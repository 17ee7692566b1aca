"""The event log: JSON lines, the first of which has the version. Reports are made from nothing else.

    {"kind": "log", "v": 2}
    {"seq": 0, "time": 1731900000.0, "kind": "run", ...}

`seq` counts 0, 1, 2, ...; `time` is in seconds since 1970; the other fields are those of the kind's dataclass. Version 1 had a
`v` on every line instead of the first line; it can still be read.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from salience.errors import StateError, printable
from salience.events.coding import Malformed, decode, encode, plain
from salience.events.kinds import KINDS, EventData

VERSION = 2
FIRST = '{"kind": "log"', '{"seq"', '{"v"'
"""What the first line of a log begins with."""
LARGEST_NUMBER = 10**18
"""No valid event has a larger number; an event that does is damaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of the log. Its fields can also be read as `event["window"]`, under their JSON names."""

    seq: int
    """Number of the event in its log."""
    time: float
    """Seconds since 1970."""
    data: EventData
    """What happened."""

    @property
    def kind(self) -> str:
        return self.data.kind

    @property
    def fields(self) -> dict[str, Any]:
        """The whole line as plain JSON values."""
        return {"seq": self.seq, "time": self.time, "kind": self.kind, **encode(self.data)}

    def __getitem__(self, name: str) -> Any:
        return self.kind if name == "kind" else self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    def keys(self) -> KeysView[str]:
        return self.fields.keys()

    def items(self) -> ItemsView[str, Any]:
        return self.fields.items()


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A line that is not an event."""

    why: str
    """"torn": not a complete JSON object. "newer": a later version. "unknown": an unknown kind. "malformed": bad fields."""
    kind: str = ""
    """The kind of event, if the line has one."""
    version: int = 0
    """The version of the line, if it is newer."""


class EventLog:
    """Appends events to a file (if there is one) and passes them to listeners. Only rank 0 should have a file."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.recent: deque[Event] = deque(maxlen=10_000)
        self._listeners: list[Callable[[Event], None]] = []
        self._seq = 0
        self._lock = threading.Lock()
        self._begun = False
        self._lost = False
        if self.path is not None:
            try:
                self._open(self.path)
            except OSError as cause:
                raise StateError(
                    f"log={str(path)!r} cannot be written: {cause.strerror or cause}; choose another file."
                ) from cause

    def _open(self, path: Path) -> None:
        """Make sure that the file can be written; a resumed run continues in the same one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._begun = _begins_with_version(path)
            self._seq = 1 + max((event.seq for event in read(path)), default=-1)
            _end_torn_line(path)
        path.open("ab").close()

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Call `listener(event)` for every event from now on."""
        self._listeners.append(listener)

    def emit(self, data: EventData | str, **fields: Any) -> Event:
        """Log what happened: a dataclass of `salience.events`, or the kind's name and its fields."""
        if isinstance(data, str):
            try:
                data = decode(data, plain(fields), strict=True)
            except Malformed as cause:
                raise TypeError(str(cause)) from None
        with self._lock:
            event = Event(seq=self._seq, time=time.time(), data=data)
            self._seq += 1
            self.recent.append(event)
            if self.path is not None and not self._lost:
                self._write(self.path, event)
        for listener in self._listeners:
            listener(event)
        return event

    def _write(self, path: Path, event: Event) -> None:
        """Append to the file. A full disk or a removed folder ends the log, not the training."""
        lines = [event.fields] if self._begun else [{"kind": "log", "v": VERSION}, event.fields]
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        except OSError as cause:
            self._lost = True
            log_warning(
                f"The event log {str(path)!r} can no longer be written ({cause.strerror}); training continues without it."
            )
        self._begun = True


def log_warning(text: str) -> None:
    """Log a warning through Python's logging, which prints it to stderr unless the program has configured logging."""
    logging.getLogger("salience").warning("salience: %s", printable(text))


def read(path: str | Path) -> Iterator[Event]:
    """The events of a log. Lines that are not events (such as a torn last line) are skipped."""
    for line in scan(path):
        if isinstance(line, Event):
            yield line
        elif line.why == "newer":
            raise StateError(
                f"{str(path)!r} was written by a newer salience (event log version {line.version}; this one reads up to "
                f"version {VERSION}); upgrade salience to read it."
            )


def scan(path: str | Path) -> Iterator[Event | Fault]:
    """Every line of a log except the one with the version: an event, or a Fault."""
    version = VERSION
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for text in file:
            line = _parsed(text)
            if line is None:
                yield Fault(why="torn")
                continue
            kind, of = line["kind"], line.get("v", version)
            of = of if isinstance(of, (int, float)) else version
            if kind == "log":
                version = of
            elif of > VERSION:
                yield Fault(why="newer", kind=kind, version=int(of))
            elif kind not in KINDS:
                yield Fault(why="unknown", kind=kind)
            else:
                yield _event(line)


def _event(line: dict[str, Any]) -> Event | Fault:
    seq, when = line.get("seq"), line.get("time")
    number = seq if isinstance(seq, int) else -1
    moment = float(when) if isinstance(when, (int, float)) else 0.0
    given = {key: value for key, value in line.items() if key not in ("v", "seq", "time", "kind")}
    try:
        return Event(seq=number, time=moment, data=decode(line["kind"], given))
    except (Malformed, RecursionError):
        return Fault(why="malformed", kind=line["kind"])


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text, parse_constant=_refuse, parse_int=_bounded(int), parse_float=_bounded(float))
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(cast("dict[str, Any]", line).get("kind"), str):
        return None
    return cast("dict[str, Any]", line)


def _bounded(kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if abs(value) > LARGEST_NUMBER:
            raise ValueError(text)
        return value

    return parse


def _refuse(constant: str) -> Any:
    """Refuse NaN and Infinity, which are not JSON and never occur in an event log."""
    raise ValueError(constant)


def _begins_with_version(path: Path) -> bool:
    """True if the log has this version and can simply be continued; a file that is not a log is refused."""
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.readline(1_000_000)
    first, text = _parsed(text), text.rstrip()
    if first is None:  # a killed run may have left half of it
        ours = text.startswith(FIRST) or (text != "{" and any(key.startswith(text) for key in FIRST))
    else:
        ours = first["kind"] == "log" or "seq" in first
    if not ours:
        raise StateError(f"log={str(path)!r} exists and is not an event log of salience; choose another file.")
    return first is not None and first["kind"] == "log" and first.get("v") == VERSION


def _end_torn_line(path: Path) -> None:
    """Close a half line that a killed run may have left, so that the next event starts on a new line."""
    with path.open("rb+") as file:
        if file.seek(0, 2) == 0:
            return
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
