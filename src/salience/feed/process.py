"""The feeder as a process of its own (or a thread): started, told of windows, watched, ended."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import weakref
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from salience.errors import SalienceError
from salience.feed import apart
from salience.feed.feeder import LAST_WRITES, Feeder, Limits, Window
from salience.feed.policy import OpenPolicy, Policy, open_policy
from salience.feed.shared import Shared
from salience.feed.source import Source
from salience.feed.tiers import open_tiers


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a feeder is started with. It does not hold the Feed, which ends the feeder when nobody has it any more."""

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
    """The feeder, in a process of its own (or in a thread, where a fork would not do)."""

    def __init__(self, job: Job) -> None:
        self._here, there = multiprocessing.Pipe()
        self._work: Any
        self._watch: threading.Thread | None = None
        if apart.needed():
            context = multiprocessing.get_context("fork")
            arguments = (job, there, self._here, os.getpid())
            self._work = context.Process(target=_serve, args=arguments, name="salience-feeder", daemon=True)
            self._work.start()
            there.close()
            ends = os.dup(self._work.sentinel)  # the process object may be gone before the thread looks
            self._watch = threading.Thread(target=_watch, args=(ends, job.shared), daemon=True)
            self._watch.start()
        else:
            self._work = threading.Thread(target=_serve, args=(job, there), name="salience-feeder", daemon=True)
            self._work.start()
        self.close = weakref.finalize(self, _close, self._here, self._work, os.getpid())

    @property
    def alive(self) -> bool:
        return self.close.alive and self._work.is_alive()

    def end(self) -> None:
        """Close, and wait until everybody has been told: the next feeder must not be taken for this one."""
        self.close()
        if self._watch is not None:
            self._watch.join()

    def send(self, window: Window) -> None:
        with contextlib.suppress(OSError):  # it died, which those who wait are told
            self._here.send(window)

    def warnings(self) -> list[str]:
        found: list[str] = []
        with contextlib.suppress(EOFError, OSError):
            while self._here.poll():
                found.append(self._here.recv())
        return found


def _serve(job: Job, inbox: Any, theirs: Any = None, parent: int | None = None) -> None:
    """What the process does."""
    if parent is not None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # the training process is told
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        theirs.close()

    def warn(text: str) -> None:
        with contextlib.suppress(OSError):
            inbox.send(text)

    source = job.source
    try:
        reader = source.reader.for_feeder(job.workers)
        tiers = open_tiers(job.disk, job.redis, source.index, source.url, warn)
        feeder = Feeder(job.shared, reader, job.open_policy, tiers, job.limits, job.budget)
        if parent is not None:
            signal.signal(signal.SIGTERM, feeder.end)  # which Python sends to such processes when it exits
        feeder.serve(inbox, parent)
    except SalienceError as error:
        job.shared.fail(str(error))
    except Exception as error:
        job.shared.fail(f"The feeder failed: {type(error).__name__}: {error}")
    if parent is not None:
        os._exit(0)  # threads of the store's client do not always end


def _watch(ends: int, shared: Shared) -> None:
    """Tell the workers when the feeder dies, which is when `ends` can be read."""
    wait([ends])
    os.close(ends)
    if shared.failed[0] <= shared.first.max():
        shared.fail(
            "The process that reads from the store died. Go on from the last checkpoint, or begin the next window."
        )


def _close(here: Any, work: Any, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            here.send(None)  # processes forked meanwhile have this end too, so that closing it alone tells nothing
    here.close()
    if os.getpid() == owner and not isinstance(work, threading.Thread):
        work.join(2 * LAST_WRITES)
        work.kill()
        work.join()
