"""A job of a shared feed, in the training process: it publishes plans, receives messages, and restarts the feed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from salience._version import __version__
from salience.errors import ConfigError
from salience.feed.cache import read_ids
from salience.feed.options import Decode
from salience.feed.policy import Ids
from salience.feed.reads import Counts
from salience.feed.shared import SERIAL_SHIFT
from salience.feed.sharing import finding
from salience.feed.sharing.config import FeedConfig
from salience.feed.sharing.handle import SharedHandle
from salience.feed.sharing.wire import Gone, Line
from salience.feed.sizes import size
from salience.feed.source import Source
from salience.plan import Plan, Shard, Trace

SECONDS_BETWEEN_LOOKS = 0.2
"""Seconds between two checks for messages of the feed, while batches are delivered."""
SECONDS_BETWEEN_STARTS = 10.0
"""Seconds between two attempts to start a feed that died."""


class JobFeed:
    """The training process's side of a shared feed; it replaces `Feed`."""

    def __init__(
        self, config: FeedConfig, identity: str, source: Source, form: str | None, decode: Decode | None, workers: int
    ) -> None:
        """`form` is the signature of `decode`; None if there is none, or if it cannot be compared with that of other jobs."""
        self.source, self.workers, self.budget = source, workers, config.budget
        self._config, self._identity, self._form = config, identity, form or ""
        self._path = finding.socket_of(config.name)
        self.handle = SharedHandle(self._path, source, shares=form is not None, patience=config.patience)
        self._owner = os.getpid()
        self._line: Line | None = None
        self._serial, self._looked, self._started = 0, 0.0, 0.0
        self._published: dict[str, Any] = {}
        """The window in progress, as published to the feed."""
        self._launch: subprocess.Popen[str] | None = None
        self._failed_before = self._stopped = False
        """True if the feed was stopped on purpose."""
        self._said: list[str] = []
        self._counts: dict[str, int] = {}
        self.resident: Ids = np.empty(0, dtype=np.int64)
        if decode is not None and form is None:
            self._said.append(
                f"Whether other jobs decode as {getattr(decode, '__qualname__', decode)} does cannot be told (a lambda, a "
                "closure, or what cannot be pickled): bytes are shared, and this job decodes for itself. Define it at the "
                "top of a module to share that too."
            )
        self._connect()

    # --- windows ---

    def window(self, shard: Shard, delivered: set[int], unread: npt.NDArray[np.bool_] | None = None) -> None:
        """Begin a window of which this rank takes `shard`, except for batches in `delivered` and visits in `unread`."""
        if os.getpid() != self._owner:
            raise ConfigError("The feed belongs to the process that made the Loader; make one in each that iterates.")
        self._serial += 1
        batches = [read_ids(shard, k, unread) for k in range(len(shard)) if k not in delivered]
        ids = np.concatenate(batches) if batches else np.empty(0, dtype=np.int64)
        ends = np.cumsum([len(batch) for batch in batches], dtype=np.int64)
        group = hashlib.blake2b(ids.tobytes() + ends.tobytes(), digest_size=8).hexdigest()
        worth = shard.plan.importance_of_all
        importance = (
            np.empty(0, np.int64) if worth is None else np.round(worth.astype(np.float64) * 1e6).astype(np.int64)
        )
        self._published = {
            "words": {"serial": self._serial, "window": shard.plan.window, "group": group},
            "ids": ids, "ends": ends, "importance": importance,
        }  # fmt: skip
        if self._line is None and not self._stopped:
            self._reconnect(wait=True)
        else:
            self._publish()

    def ticket(self, position: int) -> int:
        """The ticket of the batch at `position` among those needed in this window."""
        return (self._serial << SERIAL_SHIFT) + position

    def delivered(self, ticket: int) -> list[str]:
        """A batch has arrived; returns warnings for the user."""
        now = time.monotonic()
        if now - self._looked > SECONDS_BETWEEN_LOOKS:
            self._looked = now
            if self._line is not None:
                self._hear()
            elif not self._stopped:
                self._reconnect(wait=False)
        said, self._said = self._said, []
        return said

    @property
    def serial(self) -> int:
        """Index of the window in progress; never reused."""
        return self._serial

    def break_off(self, serial: int) -> None:
        """End a window early; workers still get what they wait for."""

    def restore(self, resident: Ids) -> None:
        """Do nothing: what a feed holds does not depend on this run."""

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """No samples, bool [n]: what is in memory depends on other jobs, and plans must not."""
        return np.zeros(len(self.source), dtype=bool)

    def rival_bytes(self, trace: Trace, unread: Callable[[Plan], npt.NDArray[np.bool_] | None]) -> dict[str, int]:
        """Nothing to compare with: the store sent bytes for other jobs too."""
        return {}

    # --- in numbers ---

    def counts(self) -> dict[str, int]:
        """Counts of what this job took, and of what the feed did for all jobs."""
        if self._line is not None:
            try:
                self._line.tell("counts")
                while (message := self._line.hear()).kind != "counts":
                    self._take_note(message.kind, message.words)
                self._counts = {name: int(count) for name, count in message.words.items() if name != "kind"}
            except Gone:
                self._lose()
        return self._counts

    def take_counts(self) -> Counts:
        """Requests of this job alone: none if the feed reads. Workers without a feed send theirs along with batches."""
        return Counts()

    def summary(self, rivals: Mapping[str, int]) -> str:
        """What the feed did, in words."""
        counts = self.counts()
        if not counts:
            return f"The feed {self._config.name!r} was not reached."
        return (
            f"Feed {self._config.name!r}, shared: of {counts['samples']:,} samples that this job took {counts['hits']:,} "
            f"were there when it asked, and it decoded {counts['decoded']:,} itself. For all jobs since it began, the feed was "
            f"sent {size(counts['bytes_sent'])} in {counts['requests']:,} requests."
        )

    def close(self) -> None:
        """Leave the feed."""
        self.handle.belongs_to(0)
        if self._line is not None:
            self._line.close()
        self._line = None

    # --- the connection ---

    def _connect(self) -> None:
        """Join the feed; raises Gone if it is not running, ConfigError if this job cannot use it."""
        line = Line(self._path)
        words = {
            "role": "job", "version": __version__, "identity": self._identity, "form": self._form, "pid": os.getpid(),
            "name": " ".join(sys.argv)[:200], "ahead": 2 * self.workers + 1,
        }  # fmt: skip
        answer = line.ask("hello", words)
        if answer.kind != "welcome":
            line.close()
            raise ConfigError(str(answer.words.get("text")))
        self._line = line
        self.handle.belongs_to(int(answer.words["job"]))

    def _publish(self) -> None:
        """Send the feed the plan of this window."""
        if self._line is None or not self._published:
            return
        numbers = {name: self._published[name] for name in ("ids", "ends", "importance")}
        try:
            self._line.tell("plan", self._published["words"], **numbers)
        except Gone:
            self._lose()

    def _hear(self) -> None:
        """Handle the messages that the feed has sent meanwhile."""
        try:
            while self._line is not None and self._line.waiting():
                message = self._line.hear()
                self._take_note(message.kind, message.words)
        except Gone:
            self._lose()

    def _take_note(self, kind: str, words: Any) -> None:
        if kind == "warning":
            self._said.append(str(words["text"]))
        elif kind == "over":
            self._stopped = True

    def _lose(self) -> None:
        """Note that the feed is gone."""
        self.close()
        ending = (
            "was stopped; this job reads by itself from here on"
            if self._stopped
            else "died; this job reads by itself until it is back"
        )
        self._said.append(f"The feed {self._config.name!r} {ending}. Nothing is lost.")

    def _reconnect(self, *, wait: bool) -> None:
        """Join a feed that was restarted by this job or by another one."""
        try:
            if wait or finding.ask(self._config.name, "status") is not None:
                finding.ensure(self._config, self.source.index)
                self._connect()
                self._said.append(f"The feed {self._config.name!r} is back.")
                self._publish()
                self._forget_launch()
            elif self._launch is None and time.monotonic() - self._started > SECONDS_BETWEEN_STARTS:
                self._started = time.monotonic()
                self._launch = finding.launch(self._config, self.source.index)
            elif self._launch is not None and self._launch.poll() is not None:
                self._forget_launch()
        except (Gone, OSError, ConfigError) as error:  # StoreError is an OSError
            self._looked = time.monotonic() + SECONDS_BETWEEN_STARTS
            if not self._failed_before:
                self._failed_before = True
                self._said.append(
                    f"The feed {self._config.name!r} cannot be joined again ({error}); this job reads by itself."
                )

    def _forget_launch(self) -> None:
        """Forget the process that was to start a feed: it has done so, or has failed."""
        if self._launch is not None:
            for pipe in (self._launch.stdin, self._launch.stdout, self._launch.stderr):
                if pipe is not None:
                    pipe.close()
            self._launch = None
