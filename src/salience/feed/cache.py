"""The cached way from a Source to the loader's workers, as the training process sees it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, DataError, StoreError
from salience.feed import apart
from salience.feed.feeder import Feeder, Ids, Limits, Window
from salience.feed.policies import policy
from salience.feed.reads import Broken, Counts, Reader
from salience.feed.shared import BROKEN, Shared, Token
from salience.feed.sizes import parse_bytes
from salience.feed.source import Source
from salience.feed.tiers import open_tiers
from salience.ledger.exchange import Group
from salience.plan import Plan

SERIAL = 32
"""Tickets are (how manieth window << SERIAL) + position in it, so that none ever comes twice."""
LEAST_AHEAD = 64 * 1024 * 1024


class Handle:
    """What a worker needs to take samples out of the shared memory."""

    def __init__(self, shared: Shared, rank: int, sizes: npt.NDArray[np.int64], views: bool) -> None:
        self.shared, self.rank, self.sizes, self.views = shared, rank, sizes, views
        self._parent = os.getpid()

    def read(self, ticket: int, ids: Sequence[int]) -> list[Any]:
        """Bytes (or views of them) of each sample of the batch, or what is wrong with it. Waits until they are there."""
        self._wait(ticket)
        return [self._one(i) for i in ids]

    def _one(self, i: int) -> Any:
        place, shared = int(self.shared.offset[i]), self.shared
        if shared.state[i] & BROKEN:
            length = int.from_bytes(shared.data[place : place + 2], "little")
            return Broken(bytes(shared.data[place + 2 : place + 2 + length]).decode())
        view = shared.data[place : place + int(self.sizes[i])]
        return view.toreadonly() if self.views else bytes(view)

    def _wait(self, ticket: int) -> None:
        shared, rank, pause = self.shared, self.rank, 0.0001
        parents = (self._parent, os.getppid())
        while shared.staged[rank] <= ticket or shared.first[rank] > ticket:
            if shared.first[rank] > ticket:
                raise DataError("This batch belongs to a window that was broken off.")
            if shared.failed[0]:
                raise StoreError(shared.failure)
            if os.getpid() != self._parent and os.getppid() != parents[1]:
                raise SystemExit  # the training process is gone
            time.sleep(pause)
            pause = min(0.002, 1.5 * pause)


class Feed:
    """Starts the feeder of the node (on its first rank), tells it the plans and what is done with."""

    def __init__(
        self,
        source: Source,
        *,
        cache: int | str,
        policy: str = "planned",
        disk: str | None = None,
        redis: str | None = None,
        views: bool = False,
        batch_size: int,
        workers: int,
        group: Group | None = None,
    ) -> None:
        self.source, self.name, self.disk, self.redis = source, policy, disk, redis
        self.budget = checked_budget(cache, source)
        self.workers = workers
        self._group = group
        ranks = [0] if group is None else group.node_ranks
        self._ranks = ranks
        self._world = 1 if group is None else group.world
        self._rank = 0 if group is None else ranks.index(group.rank)
        self.limits, capacity = _limits(source, self.budget, batch_size, workers, len(ranks))
        self.shared = _shared(group, len(source), len(ranks), capacity)
        self.handle = Handle(self.shared, self._rank, source.sizes, views)
        self._serial = 0
        self._done: set[int] = set()
        self._end = 1
        """The ticket after the last of this window."""
        self._known = np.zeros(len(source), dtype=np.float32)
        self._before = Counts()
        self._process: _Process | None = None
        self._restored: Ids | None = None
        self.resident: Ids = np.empty(0, dtype=np.int64)
        """What the cache held when the window in progress began."""
        _open_policy(self)  # a wrong name or size is said now

    def window(self, plan: Plan, delivered: set[int]) -> None:
        """A window begins; `delivered` batches of this rank are not wanted again."""
        self._serial += 1
        first = self._serial << SERIAL
        self.shared.first[self._rank] = first
        self.shared.done[self._rank] = first
        self._done = set()
        self._end = first + len(plan.shard(self._ranks[self._rank], self._world)) - len(delivered)
        skip = [delivered] if self._group is None else [set(part) for part in self._group.of_node(sorted(delivered))]
        self.resident = np.flatnonzero(self.kept)
        resident, self._restored = self._restored, None
        if self._group is not None:
            self._group.barrier()  # everybody has read what is resident before it changes
            if not self._group.leads_node:
                return
        if self._process is None or not self._process.alive:
            self.shared.state[:] = 0
            self.shared.counters[:] = 0
            self._before = Counts()
            self._process = _Process(self)
        shards = [plan.shard(rank, self._world) for rank in self._ranks]
        self._process.send(
            Window(
                batches=[[shard.ids(k) for k in range(len(shard))] for shard in shards],
                skip=skip,
                serial=self._serial,
                first=[first] * len(shards),
                importance=self._importance(plan),
                resident=resident,
            )
        )

    def ticket(self, position: int) -> int:
        """Of the batch that is the `position`th of those wanted in this window."""
        return (self._serial << SERIAL) + position

    def delivered(self, ticket: int) -> list[str]:
        """The batch was handed on and its bytes are no longer needed; warnings of the feeder since the last call."""
        self._done.add(ticket)
        done = int(self.shared.done[self._rank])
        while done in self._done:
            self._done.discard(done)
            done += 1
        self.shared.done[self._rank] = done
        return [] if self._process is None else self._process.warnings()

    def restore(self, resident: Ids) -> None:
        """What the cache of the run that is resumed held when its window began."""
        self._restored = resident

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Which samples the cache of this node keeps, bool [n]."""
        if self._restored is None:
            self._settle()
            return self.shared.kept
        kept = np.zeros(len(self.source), dtype=bool)
        kept[self._restored] = True
        return kept

    def _settle(self) -> None:
        """Wait until the cache has decided what it keeps of a window that was delivered to its end."""
        if int(self.shared.done[self._rank]) < self._end:
            return
        while self.shared.settled[0] < self._serial and not self.shared.failed[0]:
            time.sleep(0.001)

    def counts(self) -> dict[str, int]:
        return self.shared.counts()

    def take_counts(self) -> Counts:
        """What was asked of the store since the last call."""
        now = self.counts()
        names = ("bytes_used", "bytes_sent", "requests", "retried", "hedged")
        counts = Counts(samples=now["fetched_samples"], **{name: now[name] for name in names})
        new = Counts()
        new.add(counts)
        new.add(Counts(**{name: -getattr(self._before, name) for name in ("samples", *names)}))
        self._before = counts
        return new

    def _importance(self, plan: Plan) -> npt.NDArray[np.float32]:
        """Of every sample; where the plan knows only that of its own, what earlier plans said of the others."""
        if plan.ranks is not None:
            return plan.ranks.astype(np.float32)
        self._known[plan.ids] = plan.importance
        return self._known.copy()

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


class _Process:
    """The feeder, in a process of its own (or in a thread, where a fork would not do)."""

    def __init__(self, feed: Feed) -> None:
        shared = feed.shared
        self._here, there = multiprocessing.Pipe()
        self._thread: threading.Thread | None = None
        if not apart.needed():
            self._thread = threading.Thread(target=_serve, args=(feed, there, None, None), daemon=True)
            self._thread.start()
            self.close = weakref.finalize(self, self._here.close)
            return
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_serve, args=(feed, there, self._here, os.getpid()), daemon=True)
        process.start()
        there.close()
        self._process = process
        watch = threading.Thread(target=_watch, args=(process.sentinel, weakref.ref(shared)), daemon=True)
        watch.start()
        self.close = weakref.finalize(self, _close, self._here, process, os.getpid())

    @property
    def alive(self) -> bool:
        if not self.close.alive:
            return False
        return self._thread.is_alive() if self._thread is not None else self._process.is_alive()

    def send(self, window: Window) -> None:
        self._here.send(window)

    def warnings(self) -> list[str]:
        found: list[str] = []
        with contextlib.suppress(EOFError, OSError):
            while self._here.poll():
                found.append(self._here.recv())
        return found


def _serve(feed: Feed, inbox: Any, theirs: Any, parent: int | None) -> None:
    """What the process does."""
    import signal

    if parent is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process is told
        theirs.close()

    def warn(text: str) -> None:
        with contextlib.suppress(OSError):
            inbox.send(text)

    source = feed.source
    try:
        terms = source.reader.terms
        # Bytes are what is scarce here: holes are read over only where they are as small as the headers of a tar.
        terms = replace(terms, concurrency=terms.concurrency * max(1, feed.workers), gap=min(terms.gap, 4096))
        reader = Reader(source.reader.store, source.index, terms)
        reader.threads = True
        tiers = open_tiers(feed.disk, feed.redis, source.index, source.url, warn)
        Feeder(feed.shared, reader, _open_policy(feed), tiers, feed.limits, feed.budget).serve(inbox, parent)
    except Exception as error:
        feed.shared.fail(f"The feeder failed: {type(error).__name__}: {error}")
    if parent is not None:
        os._exit(0)  # threads of the store's client do not always end


def _watch(sentinel: int, shared: weakref.ref[Shared]) -> None:
    """Tell the workers when the feeder dies."""
    from multiprocessing.connection import wait

    with contextlib.suppress(OSError, ValueError):
        wait([sentinel])
    found = shared()
    if found is not None and not found.failed[0]:
        found.fail(
            "The process that reads from the store died. Go on from the last checkpoint, or begin the next window."
        )


def _close(here: Any, process: Any, owner: int) -> None:
    here.close()
    if os.getpid() == owner:
        process.join(1)
        process.kill()
        process.join()


def _open_policy(feed: Feed) -> Any:
    return policy(feed.name, feed.budget, feed.source.sizes)


def checked_budget(cache: int | str, source: Source) -> int:
    """Bytes of the cache: at most those of the source, and not more than there is memory."""
    budget = parse_bytes(cache) if isinstance(cache, str) else int(cache)
    if budget < 0:
        raise ConfigError(f"cache is {budget} bytes; it must be at least 0.")
    budget = min(budget, int(source.sizes.sum()))
    memory = memory_bytes()
    if memory is not None and budget > memory:
        raise ConfigError(
            f"cache is {budget:,} bytes and this machine has {memory:,} of memory; use disk= for the rest."
        )
    return budget


def memory_bytes() -> int | None:
    """Bytes of memory of this machine or container; None where it cannot be told."""
    if sys.platform != "linux":
        return None
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(path).read_text()))
    return min(found)


def _limits(source: Source, budget: int, batch_size: int, workers: int, ranks: int) -> tuple[Limits, int]:
    """How far to read ahead, and bytes of the memory: the cache, what is read ahead, and a sixteenth for odd pieces."""
    sizes = source.sizes
    mean = float(sizes.mean()) if len(sizes) else 0.0
    count = min(batch_size, len(sizes))
    largest = int(np.partition(sizes, len(sizes) - count)[len(sizes) - count :].sum()) if count else 0
    least = int((workers + 2) * count * mean) * ranks
    most = max(2 * least, LEAST_AHEAD)
    along = most // 4
    grains = 128 * 2 * (count * (workers + 2) * ranks + len(sizes))
    total = budget + budget // 16 + most + largest * ranks + along + grains
    whole = int(sizes.sum()) + grains + largest * ranks
    return Limits(least=least, most=most, along=along), min(total, 2 * whole)


def _shared(group: Group | None, n: int, ranks: int, capacity: int) -> Shared:
    """Made by the node's first rank and opened by its others."""
    if group is None:
        return Shared(n, ranks, capacity)
    mine = Shared(n, ranks, capacity) if group.leads_node else None
    path = group.of_leader("" if mine is None else mine.token.path)
    shared = mine or Shared.open(Token(path, n, ranks, capacity))
    group.barrier()
    return shared
