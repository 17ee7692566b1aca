"""The feeder: one process per node that reads the samples of the plan ahead of time, in order, into shared memory.

The schedule says what to read next, the fetcher reads it, and the counters are derived from both. The feeder itself only
listens: to the training process for new windows, and to the ranks for batches they have finished.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from salience.errors import StoreError
from salience.feed.arena import Arena
from salience.feed.fetcher import Fetcher
from salience.feed.policy import Policy
from salience.feed.reads import Broken, Reader
from salience.feed.schedule import FeedWindow, Limits, Schedule, horizon
from salience.feed.shared import COUNTERS, Shared
from salience.feed.tiers import Tier
from salience.memory import fence

POLL_SECONDS, IDLE_SECONDS = 0.002, 0.5
"""Seconds between two checks of the ranks, with and without work."""
STAGING_SECONDS = 0.01
"""Maximum seconds of staging before batches that are ready are published."""
GAUGES = ("horizon", "resident_bytes")
"""Counters that hold a current value instead of a sum."""


class Feeder:
    """The work of the process: messages arrive through `inbox`, everything else goes through `shared`."""

    def __init__(
        self,
        shared: Shared,
        reader: Reader,
        open_policy: Callable[[], Policy],
        tiers: Sequence[Tier],
        limits: Limits,
        budget: int,
    ) -> None:
        self.shared, self.limits = shared, limits
        self._arena = Arena(shared, reader.index.size)
        self.schedule = Schedule(
            reader.index, open_policy, self._arena, limits, budget=budget, ranks=shared.token.ranks
        )
        self.fetcher = Fetcher(reader, tiers, reader.index.size, self._arrived, self._lost)
        self._before = shared.counters.copy()
        """Counters of a dead feeder that this one replaces."""
        self._before[[COUNTERS.index(name) for name in GAUGES]] = 0
        self._loop = reader.loop
        self._wake = asyncio.Event()
        self._inbox: deque[FeedWindow | None] = deque()
        self._over = self._failed = False
        self._serial = self._horizon = 0

    def serve(self, inbox: Any, parent: int | None) -> None:
        """Work until the inbox closes or the parent dies."""
        threading.Thread(target=self._listen, args=(inbox,), daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._pump(parent), self._loop).result()

    def end(self, *_: Any) -> None:
        """Stop, from any thread or as the handler of a signal."""
        self._inbox.append(None)
        self._loop.call_soon_threadsafe(self._wake.set)

    def _listen(self, inbox: Any) -> None:
        message: FeedWindow | None
        while True:
            try:
                message = inbox.recv()
            except (EOFError, OSError):
                message = None
            self._inbox.append(message)
            try:
                self._loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:
                return
            if message is None:
                return

    async def _pump(self, parent: int | None) -> None:
        checked = time.monotonic()
        while True:
            self._wake.clear()
            while self._inbox:
                await self._take(self._inbox.popleft())
            if parent is not None and time.monotonic() - checked > IDLE_SECONDS:
                checked = time.monotonic()
                self._over = self._over or os.getppid() != parent
            if self._over:
                break
            self.schedule.release(self.shared.done)
            self._advance()
            self._publish()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_SECONDS if self.schedule.busy else IDLE_SECONDS)
        self.shared.fail(
            "Reading was ended by a signal or by the first rank of this node; let that rank wait for the others."
        )
        await self.fetcher.close()

    async def _take(self, window: FeedWindow | None) -> None:
        """Begin a window; None ends the feeder."""
        if window is None:
            self._over = True
            return
        self._serial, self._failed = window.serial, False
        self.schedule.leave(window.serial)
        if window.resident is not None and not np.array_equal(np.flatnonzero(self.shared.kept), window.resident):
            self.schedule.restore(window.resident)
        await asyncio.get_running_loop().run_in_executor(None, self.schedule.tell_policy, window)
        self.schedule.enter(window)
        self.shared.staged[:] = window.first

    def _advance(self) -> None:
        """Stage batches as far as the horizon and memory allow, and fetch what they lack."""
        if self._failed:
            return
        self._horizon, until = horizon(*self.fetcher.link(), self.limits), time.monotonic() + STAGING_SECONDS
        try:
            while (staged := self.schedule.next(self._horizon, self.shared.asked)) is not None:
                for i, place in staged.places.items():
                    self.shared.offset[i] = place
                self.fetcher.start([*staged.places, *staged.along])
                if time.monotonic() > until:
                    return self._wake.set()
        except StoreError as error:
            self._fail(str(error))

    def _arrived(self, i: int, data: bytes | Broken) -> None:
        if self.schedule.arrived(i):
            self._arena.put(i, data)
            self._wake.set()

    def _lost(self, ids: Sequence[int], why: str) -> None:
        """Fail the window if one of its batches waits for these samples."""
        if self.schedule.lost(ids):
            self._fail(why)

    def _fail(self, why: str) -> None:
        """Fail this window; a failure of an earlier one does not concern it."""
        if not self._failed:
            self._failed = True
            self.shared.fail(why, self.schedule.end)

    def _publish(self) -> None:
        """Publish the counters and then the batches that are ready, so that the counters of a delivered batch can be read."""
        now = {**asdict(self.schedule.counts), **self.fetcher.counts(), "horizon": self._horizon}
        self.shared.counters[:] = self._before + np.array([now[name] for name in COUNTERS])
        fence()  # the bytes before the ticket
        if self.schedule.all_staged:
            self.shared.settled[0] = self._serial
        for rank, ticket in self.schedule.ready():
            self.shared.staged[rank] = ticket + 1
