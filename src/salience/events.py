"""The event log: one JSON object a line, versioned; the only thing reports are made from.

Every line has `v` (schema version), `seq` (0, 1, 2, ...), `time` (seconds since the epoch) and `kind`; the other
fields depend on the kind:

    run        config, versions, population, seed        once, at the start (and again after a resume)
    plan       window, picked, population, filters, ...   at each window's start
    signals    layers, left_out, share, text              once, when the attached model's first batch came
    window     window, seconds, overhead, steps, ...      at each window's end
    evaluated  metric, progress                           whenever the user reports a validation result
    steered    from, to, metric, mean, spread, reason     when keep = "auto" moved the share that is kept
    copies     samples, groups                            when copies were looked for
    findings   suspects, hard, copies, noise_rate, ...    after the last window, and when a report was asked for
    broken     window, id, name, reason                   a sample of a Source that could not be read or decoded
    feed       window, broken, bytes and requests, ...    at each window's end, where a Source is read
    treat      window, stages, fresh, reused, ...         at each window's end, where there are stages
    verdict    bound, cause, text, costs, levers, ...     what holds the run back, as often as it was measured
    decision   window, lever, action, predicted, ...      what `auto` tried, kept, undid or left alone, and why
    settings   window, workers, cache, treat, select      what `auto` has a window run with
    observed   summary                                    when a report was asked for
    warning    text, ...                                  a plug-in disabled, losses that are not finite, ...
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from salience.errors import StateError

VERSION = 1

Event = dict[str, Any]


def _plain(value: Any) -> Any:
    """JSON has no arrays of NumPy's and no NaN: lists and null."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if value is None or isinstance(value, (str, int)):
        return value
    return str(value)


class EventLog:
    """Appends events to a file (if given one) and hands them to listeners. Only rank 0 should have a file."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.recent: deque[Event] = deque(maxlen=10_000)
        self._listeners: list[Callable[[Event], None]] = []
        self._seq = 0
        self._lock = threading.Lock()
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():  # a resumed run goes on in the same file
                self._seq = 1 + max((event["seq"] for event in read(self.path)), default=-1)
                _end_torn_line(self.path)

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Call `listener(event)` for every event from now on."""
        self._listeners.append(listener)

    def emit(self, kind: str, **fields: Any) -> Event:
        with self._lock:
            event: Event = {"v": VERSION, "seq": self._seq, "time": time.time(), "kind": kind, **_plain(fields)}
            self._seq += 1
            self.recent.append(event)
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(event) + "\n")
        for listener in self._listeners:
            listener(event)
        return event


def _end_torn_line(path: Path) -> None:
    """A killed run may leave half a line; close it so that the next event starts on its own."""
    with path.open("rb+") as file:
        if file.seek(0, 2) == 0:
            return
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")


def read(path: str | Path) -> Iterator[Event]:
    """The events of a log. Lines that are not whole JSON objects (a torn last line, say) are passed over."""
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue
            if not isinstance(event, dict) or "kind" not in event:
                continue
            if event.get("v", 0) > VERSION:  # pyright: ignore[reportUnknownMemberType]
                raise StateError(
                    f"{path} was written by a newer salience (event schema {event['v']}, this one reads up to "
                    f"{VERSION}); upgrade salience to read it."
                )
            yield event
