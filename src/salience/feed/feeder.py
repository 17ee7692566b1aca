"""The feeder: one process a node that reads what the plan names, ahead of time and in its order, into shared memory.

It follows the plan, not the clock: which samples stay is decided in the plan's order, so that the same plans keep the same
samples however fast the store is. A batch is *staged* when all its bytes are here; they stay until its rank is done
with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.errors import SalienceError
from salience.feed.arena import Arena
from salience.feed.packages import Packages
from salience.feed.policy import Policy
from salience.feed.reads import Broken, Reader
from salience.feed.shared import COUNTERS, Shared
from salience.feed.tiers import Tier

Ids = npt.NDArray[np.int64]

POLL, IDLE = 0.002, 0.5
"""Seconds between two looks at what the ranks are done with; and where there is nothing to do."""
AT_ONCE = 0.01
"""Seconds that batches are staged for before the first of them is handed on."""
WRITES = 64 * 1024 * 1024
"""Bytes that wait to be written to slower tiers; beyond, they are not."""
LAST_WRITES = 3.0
"""Seconds for those when the run is over."""
AT = {name: k for k, name in enumerate(COUNTERS)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Window:
    """What a window asks of the feeder."""

    batches: list[list[Ids]]
    """Of each rank of the node, its batches."""
    skip: list[set[int]]
    """Of each rank, batches delivered before the run was interrupted: the cache has seen them, nobody wants them."""
    serial: int
    """How manieth window it is."""
    first: list[int]
    """Of each rank, the ticket of its first batch that is wanted."""
    importance: npt.NDArray[np.float32]
    resident: Ids | None = None
    """What the cache held when this window began, in the run that is resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bytes the feeder may read ahead."""

    least: int
    """What loader workers hold at a time, and a batch more."""
    most: int
    along: int
    """For neighbours in a shard that are wanted later in the window and are read along."""
    package: int = 256 * 1024
    """Bytes of one such range: a batch waits for what is read along with it."""


def in_order(batches: Sequence[Sequence[Ids]]) -> list[Ids]:
    """Batches of each rank of a node in the order in which they are read: the first of every rank, the second, ..."""
    return [ids for turn in zip_longest(*batches) for ids in turn if ids is not None]


def horizon(bandwidth: float, latency: float, limits: Limits) -> int:
    """Bytes to read ahead: four times latency * bandwidth (what is under way when the link is busy), within limits."""
    return int(min(limits.most, max(limits.least, 4 * bandwidth * latency)))


@dataclass(slots=True, eq=False)
class _Batch:
    rank: int
    ticket: int
    ids: list[int]
    owed: int = 0
    """Bytes read for it that nobody else keeps."""
    missing: set[int] = field(default_factory=set)


class Feeder:
    """The work of the process: messages come in by `inbox`, everything else goes through `shared`."""

    def __init__(
        self,
        shared: Shared,
        reader: Reader,
        open_policy: Callable[[], Policy],
        tiers: Sequence[Tier],
        limits: Limits,
        budget: int,
    ) -> None:
        self.shared, self.reader, self.tiers, self.limits = shared, reader, tiers, limits
        self._open_policy, self.policy = open_policy, open_policy()
        self._before = shared.counters.copy()
        """What was counted when this feeder began in the place of one that died."""
        shared.counters[[AT["horizon"], AT["resident_bytes"]]] = 0
        sizes = reader.index.size
        self._sizes = sizes
        self._arena = Arena(shared, sizes)
        self._packages = Packages(reader.index, gap=reader.gap, most=limits.package)
        n = len(sizes)
        self._wanted = np.zeros(n, dtype=bool)
        """In this window's plan and not staged yet."""
        self._waiting: dict[int, list[_Batch]] = {}
        """Sample under way -> the staged batches that wait for it."""
        self._todo: deque[_Batch] = deque()
        self._ahead: list[deque[_Batch]] = [deque() for _ in range(shared.token.ranks)]
        """Of each rank, batches staged and not done."""
        self._next = np.zeros(shared.token.ranks, dtype=np.int64)
        """Of each rank, the first ticket that is not staged."""
        self._unsaid: list[deque[_Batch]] = [deque() for _ in range(shared.token.ranks)]
        """Those of them whose bytes are not all here, as far as the rank was told."""
        self._owed = self._writing = 0
        self._budget = budget
        self._seen = np.zeros(n, dtype=np.int64)
        """Window in which each was last wanted."""
        self._again = 0
        """Bytes wanted in this window that were wanted in one before."""
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=512)
        self._wake = asyncio.Event()
        self._reads: set[asyncio.Task[None]] = set()
        self._writes: set[asyncio.Task[None]] = set()
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="salience-tiers") if tiers else None
        self._inbox: deque[Any] = deque()
        self._over = self._failed = False
        self._serial = self._end = 0

    def serve(self, inbox: Any, parent: int | None) -> None:
        """Until the inbox closes or the parent is gone."""
        loop = self.reader.loop
        listener = threading.Thread(target=self._listen, args=(inbox, loop), daemon=True)
        listener.start()
        asyncio.run_coroutine_threadsafe(self._pump(parent), loop).result()

    def end(self, *_: Any) -> None:
        """Stop, from any thread or as the handler of a signal."""
        self._inbox.append(None)
        self.reader.loop.call_soon_threadsafe(self._wake.set)

    def _listen(self, inbox: Any, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                message = inbox.recv()
            except (EOFError, OSError):
                message = None
            self._inbox.append(message)
            try:
                loop.call_soon_threadsafe(self._wake.set)
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
            if parent is not None and time.monotonic() - checked > IDLE:
                checked = time.monotonic()
                self._over = self._over or os.getppid() != parent
            if self._over:
                break
            self._release()
            self._advance()
            self._publish()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL if self._todo or any(self._ahead) else IDLE)
        self.shared.fail(
            "Reading was ended by a signal or by the first rank of this node; let that wait for the others."
        )
        for task in self._reads:
            task.cancel()
        if self._writes:
            await asyncio.wait(self._writes, timeout=LAST_WRITES)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for tier in self.tiers:
            tier.close()

    async def _take(self, message: Window | None) -> None:
        if message is None:
            self._over = True
            return
        self._serial, self._again, self._failed = message.serial, 0, False
        self._todo.clear()
        for batches, unsaid in zip(self._ahead, self._unsaid, strict=True):  # of a window that was broken off
            for batch in batches:
                self._unpin(batch)
            batches.clear()
            unsaid.clear()
        self._arena.leave_all()
        self._waiting = {i: [] for i in self._waiting}
        self._seen[[*self._waiting]] = self._serial  # no cache has to fetch those twice
        if message.resident is not None:
            self._restore(message.resident)
        planned = [ids for batches in message.batches for ids in batches]
        ids = np.concatenate(planned) if planned else np.empty(0, dtype=np.int64)
        self._wanted[:] = False
        # The heap of the new importances is built beside the old one; what is under way goes on arriving meanwhile.
        await asyncio.get_running_loop().run_in_executor(None, self.policy.window, message.importance, ids)
        next_ticket = list(message.first)
        for number in range(max(map(len, message.batches), default=0)):
            for rank, batches in enumerate(message.batches):
                if number < len(batches):
                    ticket = -1
                    if number not in message.skip[rank]:
                        ticket = next_ticket[rank]
                        next_ticket[rank] += 1
                        self._wanted[batches[number]] = True
                    self._todo.append(_Batch(rank, ticket, batches[number].tolist()))
        self._next[:], self._end = message.first, max(next_ticket)
        self.shared.staged[:] = message.first

    def _restore(self, resident: Ids) -> None:
        """The cache of the run that is resumed, as far as it can be told: what it means to keep, not the bytes."""
        if np.array_equal(np.flatnonzero(self.shared.kept), resident):
            return
        self.policy = self._open_policy()
        self._arena.forget()
        self.shared.counters[AT["resident_bytes"]] = 0
        for i in resident.tolist():
            self._keep(i)
        self._arena.tidy_all()

    def _advance(self) -> None:
        """Stage batches as far as the horizon and the room allow."""
        if self._failed:
            return
        far, until = horizon(*self._link(), self.limits), time.monotonic() + AT_ONCE
        self.shared.counters[AT["horizon"]] = far
        while self._todo:
            if time.monotonic() > until:
                return self._wake.set()
            batch = self._todo[0]
            if batch.ticket >= 0 and self._owed > far and not (self.shared.asked >= self._next).any():
                return
            if not self._stage(batch):
                return
            self._todo.popleft()

    def _stage(self, batch: _Batch) -> bool:
        """Pin what is here, read what is not; whether there was room."""
        if batch.ticket < 0:  # delivered before: only the cache's memory of it
            for i in batch.ids:
                if not self.policy.hit(i):
                    self._keep(i)
            return True
        places = self._room(batch)
        if places is None:
            return False
        for i, place in places.items():
            self.shared.offset[i] = place
            self._waiting[i] = []
        for i in batch.ids:  # all of them before one has its turn, which may put another out of the cache
            self._arena.pin(i)
            self._wanted[i] = False
            if i in self._waiting:
                batch.missing.add(i)
        for i in batch.ids:
            self._visit(i, i not in places)
        for i in batch.missing:
            self._waiting[i].append(batch)
        batch.owed = sum(int(self._sizes[i]) for i in places)
        self._owed += batch.owed
        along = self._read_along([*places])
        self._next[batch.rank] = batch.ticket + 1
        self._ahead[batch.rank].append(batch)
        self._unsaid[batch.rank].append(batch)
        if places:
            _start(self._fetch([*places, *along]), self._reads)
        return True

    def _visit(self, i: int, here: bool) -> None:
        """Sample i has its turn: what the cache makes of it."""
        size = int(self._sizes[i])
        self._count("samples", 1)
        self._count("bytes", size)
        self._count_bound(i, size)
        if not self.policy.hit(i):
            self._keep(i)
        elif here:  # and not only in the memory of a run that was resumed
            self._count("hits", 1)
            self._count("hit_bytes", size)

    def _count_bound(self, i: int, size: int) -> None:
        """At least what was never seen has to come, and of what was seen whatever is more than a cache can hold."""
        seen, self._seen[i] = self._seen[i], self._serial
        if seen == self._serial:
            return
        if seen:
            more = self._again + size - self._budget
            self._again, size = self._again + size, min(size, max(0, more))
        self._count("bound_bytes", size)

    def _keep(self, i: int) -> None:
        gone = self.policy.offer(i)
        if gone is None:
            return
        self._arena.keep(i, True)
        self._count("resident_bytes", int(self._sizes[i]))
        for old in gone:
            self._arena.keep(old, False)
            self._count("resident_bytes", -int(self._sizes[old]))

    def _room(self, batch: _Batch) -> dict[int, int] | None:
        """A place for each of its samples that is not here, or None: then something else has to be done with first.

        Where nothing is, and the memory is in pieces, what no batch holds goes; at last even what this one wants of it.
        """
        for spared in ({*batch.ids}, set[int]()):
            if not spared:
                self._count("squeezed", self._arena.squeeze(batch.ids)[1])
            places: dict[int, int] = {}
            for i in dict.fromkeys(batch.ids):
                if i in self._waiting or self._arena.has(i):
                    continue
                place = self._arena.take(i)
                if place is None and not self._under_way():
                    place, gone = self._arena.squeeze(self._arena.others(spared), i)
                    self._count("squeezed", gone)
                if place is None:
                    break
                places[i] = place
            else:
                return places
            for i, place in places.items():
                self._arena.give(i, place)
            if self._under_way():
                return None
        self._fail(
            f"A batch of {len(batch.ids)} samples does not fit into the memory of the cache ({self._arena.size:,} bytes); "
            "make the batch smaller or the cache larger."
        )
        return None

    def _under_way(self) -> bool:
        """Whether room will come of itself: batches before this one are not done."""
        return any(self._ahead) or any(not waiting for waiting in self._waiting.values())

    def _read_along(self, ids: list[int]) -> list[int]:
        """Neighbours of `ids` that are wanted later in this window, and a place for each, as far as there is room."""
        along: list[int] = []
        for i in ids:
            for j in self._packages.beside(i, self._missing):
                place = None
                if self._arena.along_bytes + int(self._sizes[j]) <= self.limits.along:
                    place = self._arena.take(j)
                if place is None:
                    return along
                self._arena.read_along(j, place)
                self._waiting[j] = []
                along.append(j)
        return along

    def _missing(self, i: int) -> bool:
        """Whether it is wanted later, and neither here nor under way."""
        return bool(self._wanted[i]) and i not in self._waiting and not self._arena.has(i)

    async def _fetch(self, ids: list[int]) -> None:
        loop = asyncio.get_running_loop()
        try:
            for k, tier in enumerate(self.tiers):
                if not ids:
                    return
                found = await loop.run_in_executor(self._pool, tier.get, ids)
                found = {i: data for i, data in found.items() if len(data) == self._sizes[i]}
                self._count(f"{tier.name}_hits", len(found))
                self._count(f"{tier.name}_bytes", sum(map(len, found.values())))
                for i, data in found.items():
                    self._arrived(i, data)
                self._write(self.tiers[:k], found)
                ids = [i for i in ids if i not in found]
            await self.reader.stream(ids, self._from_store)
        except SalienceError as error:
            self._give_up(ids, str(error))
        except Exception as error:  # anything else must not leave the workers waiting
            self._give_up(ids, f"The feeder failed: {type(error).__name__}: {error}")

    def _give_up(self, ids: list[int], why: str) -> None:
        """Nobody is going to bring these any more: the window fails if a batch waits for one."""
        for i in ids:
            waiting = self._waiting.pop(i, None)
            if waiting is None:
                continue
            self._arena.give(i)
            self._arena.leave(i)
            if waiting:
                self._fail(why)

    def _fail(self, why: str) -> None:
        """Of this window: what was asked for in one before it is no trouble of this one."""
        if not self._failed:
            self._failed = True
            self.shared.fail(why, self._end)

    def _from_store(self, i: int, data: bytes | Broken) -> None:
        self._arrivals.append((time.monotonic(), 0 if isinstance(data, Broken) else len(data)))
        self._arrived(i, data)
        if isinstance(data, bytes):
            self._write(self.tiers, {i: data})

    def _write(self, tiers: Sequence[Tier], found: dict[int, bytes]) -> None:
        """Hand samples to slower tiers, in threads; when those cannot keep up, they go without."""
        size = sum(map(len, found.values()))
        if not tiers or not found or self._writing + size > WRITES or self._pool is None:
            return
        self._writing += size
        loop, pool = asyncio.get_running_loop(), self._pool

        async def write() -> None:
            try:
                for tier in tiers:
                    await loop.run_in_executor(pool, tier.put, found)
            finally:
                self._writing -= size

        _start(write(), self._writes)

    def _arrived(self, i: int, data: bytes | Broken) -> None:
        waiting = self._waiting.pop(i, None)
        if waiting is None:
            return
        for batch in waiting:
            batch.missing.discard(i)
        self._arena.put(i, data)
        self._wake.set()

    def _release(self) -> None:
        """Unpin the batches whose rank is done with them."""
        for rank, batches in enumerate(self._ahead):
            done = int(self.shared.done[rank])
            while batches and batches[0].ticket < done:
                self._unpin(batches.popleft())

    def _unpin(self, batch: _Batch) -> None:
        self._owed -= batch.owed
        for i in batch.ids:
            self._arena.unpin(i)

    def _publish(self) -> None:
        counts, base = self.reader.counts, self._before
        self.shared.counters[AT["fetched_samples"]] = base[AT["fetched_samples"]] + counts.samples
        for name in ("bytes_used", "bytes_sent", "requests", "retried", "hedged"):
            self.shared.counters[AT[name]] = base[AT[name]] + getattr(counts, name)
        if not self._todo:
            self.shared.settled[0] = self._serial
        for rank, batches in enumerate(self._unsaid):  # last: who has his batch may look at the counters
            while batches and not batches[0].missing:
                self.shared.staged[rank] = batches.popleft().ticket + 1

    def _link(self) -> tuple[float, float]:
        """Bytes a second that arrive lately, and seconds an answer takes when it does not have to queue."""
        latency = self.reader.latency()
        if len(self._arrivals) < 8:
            return 0.0, latency
        (begin, _), (end, _) = self._arrivals[0], self._arrivals[-1]
        return sum(size for _, size in self._arrivals) / max(end - begin, 1e-3), latency

    def _count(self, name: str, by: int) -> None:
        self.shared.counters[AT[name]] += by


def _start(work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> None:
    task = asyncio.ensure_future(work)
    among.add(task)
    task.add_done_callback(among.discard)
