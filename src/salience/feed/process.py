"""The feeder as a process (or a thread): starting it, sending it windows, watching it and ending it."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from salience.child import Child
from salience.errors import SalienceError
from salience.feed import isolated
from salience.feed.feeder import Feeder
from salience.feed.fetcher import LAST_WRITES
from salience.feed.policy import OpenPolicy, Policy, open_policy
from salience.feed.schedule import FeedWindow, Limits
from salience.feed.shared import Shared
from salience.feed.source import Source
from salience.feed.tiers import open_tiers


@dataclass(frozen=True, kw_only=True, slots=True)
class FeederArguments:
    """Arguments of a feeder. It must not hold the Feed, whose deletion ends the feeder."""

    shared: Shared
    source: Source
    policy: str | OpenPolicy
    budget: int
    limits: Limits
    workers: int
    disk: str | None
    redis: str | None

    def open_policy(self) -> Policy:
        return open_policy(self.policy, self.budget, self.source.sizes)


class Process:
    """The feeder in a separate process, or in a thread if this process must not fork."""

    def __init__(self, arguments: FeederArguments) -> None:
        self._child: Child | None = None
        self._thread: threading.Thread | None = None
        if isolated.needed():
            self._child = Child(
                _serve,
                arguments,
                os.getpid(),
                name="salience-feeder",
                start="fork",
                farewell=2 * LAST_WRITES,
                ends_itself=True,
            )
            self._child.on_end(functools.partial(_tell_of_death, arguments.shared))
            self._here: Any = self._child.pipe
            self.close = self._child.close
        else:
            self._here, there = multiprocessing.Pipe()
            self._thread = threading.Thread(target=_serve, args=(there, arguments), name="salience-feeder", daemon=True)
            self._thread.start()
            self.close = weakref.finalize(self, _close, self._here, os.getpid())

    @property
    def alive(self) -> bool:
        if self._child is not None:
            return self._child.alive
        return self.close.alive and self._thread is not None and self._thread.is_alive()

    def end(self) -> None:
        """Close, and wait until the end has been reported, so that it is not mistaken for the end of the next feeder."""
        if self._child is None:
            self.close()
        else:
            self._child.end()

    def send(self, window: FeedWindow) -> None:
        with contextlib.suppress(OSError):  # it died, which the workers that wait are told
            self._here.send(window)

    def warnings(self) -> list[str]:
        found: list[str] = []
        with contextlib.suppress(EOFError, OSError):
            while self._here.poll():
                found.append(self._here.recv())
        return found


def _serve(inbox: Any, given: FeederArguments, parent: int | None = None) -> None:
    """Run the feeder; the main function of its process."""

    def warn(text: str) -> None:
        with contextlib.suppress(OSError):
            inbox.send(text)

    source = given.source
    try:
        reader = source.reader.for_feeder(given.workers, given.limits.gap)
        tiers = open_tiers(given.disk, given.redis, source.index, source.url, warn)
        feeder = Feeder(given.shared, reader, given.open_policy, tiers, given.limits, given.budget)
        if parent is not None:
            signal.signal(signal.SIGTERM, feeder.end)  # which Python sends to such processes when it exits
        feeder.serve(inbox, parent)
    except SalienceError as error:
        given.shared.fail(str(error))
    except Exception as error:
        given.shared.fail(f"The feeder failed: {type(error).__name__}: {error}")
    if parent is not None:
        os._exit(0)  # threads of the store's client do not always end


def _tell_of_death(shared: Shared) -> None:
    """Tell the workers that the feeder died."""
    if shared.failed[0] <= shared.first.max():
        shared.fail(
            "The process that reads from the store died. Go on from the last checkpoint, or begin the next window."
        )


def _close(here: Any, owner: int) -> None:
    """Tell the thread of a feeder to end."""
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            here.send(None)
    here.close()
