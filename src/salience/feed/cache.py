"""The cache of a node, seen from the training process: it starts the feeder, sends it the plans, and delivers bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, DataError, StoreError
from salience.feed.disk import parse_disk
from salience.feed.options import checked_budget
from salience.feed.policy import Ids, OpenPolicy
from salience.feed.process import FeederArguments, Process
from salience.feed.ranges import feeder_gap
from salience.feed.reads import Broken, Counts
from salience.feed.schedule import FeedWindow, Limits, in_order
from salience.feed.shared import BROKEN, SERIAL_SHIFT, STORE_COUNTS, TIERS, WHOLE, Shared, shared_bytes
from salience.feed.simulate import rival_bytes
from salience.feed.sizes import memory_bytes, size
from salience.feed.source import Source
from salience.feed.tiers import open_tiers
from salience.memory import fence, node_memory
from salience.plan import Plan, Shard, Trace
from salience.ranks import Ranks

MIN_READ_AHEAD_BYTES = 64 * 1024 * 1024
"""The feeder may always read at least this far ahead, however small the batches are."""


class Handle:
    """Takes samples out of the shared memory, in a loader worker."""

    def __init__(self, shared: Shared, rank: int, sizes: npt.NDArray[np.int64], views: bool) -> None:
        self.shared, self.rank, self.sizes, self.views = shared, rank, sizes, views
        self._parent = os.getpid()

    def read(self, ticket: int, ids: Sequence[int]) -> list[Any]:
        """Wait for a batch and return the bytes of each sample (or a view of them), or a Broken with the reason."""
        self._wait(ticket)
        fence()  # the ticket before the bytes
        return [self._one(i) for i in ids]

    def _one(self, i: int) -> Any:
        place, shared = int(self.shared.offset[i]), self.shared
        if shared.state[i] & BROKEN:
            length = int.from_bytes(shared.data[place : place + 2], "little")
            return Broken(bytes(shared.data[place + 2 : place + 2 + length]).decode())
        if not shared.state[i] & WHOLE:
            raise DataError(f"The cache was not told that sample {i} belongs to this batch.")
        view = shared.data[place : place + int(self.sizes[i])]
        return view.toreadonly() if self.views else bytes(view)

    def _wait(self, ticket: int) -> None:
        shared, rank, pause = self.shared, self.rank, 0.0001
        parents = (self._parent, os.getppid())
        while shared.staged[rank] <= ticket or shared.first[rank] > ticket:
            if shared.first[rank] > ticket:
                raise DataError("This batch belongs to a window that was broken off.")
            if shared.failed[0] > ticket:
                raise StoreError(shared.failure)
            shared.asked[rank] = max(ticket, shared.asked[rank])
            if os.getpid() != self._parent and os.getppid() != parents[1]:
                raise SystemExit  # the training process is gone
            time.sleep(pause)
            pause = min(0.002, 1.5 * pause)


class Feed:
    """Starts the feeder of the node (on its first rank) and tells it the plans and which batches are finished."""

    def __init__(
        self,
        source: Source,
        *,
        cache: int | str,
        policy: str | OpenPolicy = "planned",
        disk: str | None = None,
        redis: str | None = None,
        views: bool = False,
        batch_size: int,
        workers: int,
        ranks: Ranks | None = None,
    ) -> None:
        self.source, self.budget = source, checked_budget(cache, source.sizes)
        self._ranks, self.workers = ranks, workers
        node_ranks = [0] if ranks is None else ranks.node_ranks
        self._node_ranks = node_ranks
        self._world = 1 if ranks is None else ranks.world
        self._rank = 0 if ranks is None else node_ranks.index(ranks.rank)
        limits, capacity = _limits(source, self.budget, batch_size, workers, len(node_ranks))
        _check_tiers(disk, redis, source)
        self.shared = _shared(ranks, len(source), len(node_ranks), capacity)
        self._arguments = FeederArguments(
            shared=self.shared, source=source, policy=policy, budget=self.budget, limits=limits, workers=workers,
            disk=disk, redis=redis,
        )  # fmt: skip
        self._arguments.open_policy()  # report a wrong name or size now
        self.handle = Handle(self.shared, self._rank, source.sizes, views)
        self._owner = os.getpid()
        self._serial = 0
        self._windows: dict[int, None] = {}
        """Windows planned since this cache was created."""
        self._done: set[int] = set()
        self._end = 1
        """One more than the last ticket of this window."""
        self._known = np.zeros(len(source), dtype=np.float32)
        self._before: dict[str, int] = {}
        self._process: Process | None = None
        self._restored: Ids | None = None
        self.resident: Ids = np.empty(0, dtype=np.int64)
        """Samples the cache held when the window in progress began."""

    def window(self, shard: Shard, delivered: set[int], unread: npt.NDArray[np.bool_] | None = None) -> None:
        """Begin a window of which this rank takes `shard`.

        Batches of this rank in `delivered` are not needed again, and visits in `unread` need no bytes.
        """
        if os.getpid() != self._owner:  # two feeders would write into one memory
            raise ConfigError("The cache belongs to the process that made the Loader; make one in each that iterates.")
        self.resident = np.flatnonzero(self.kept)
        resident, self._restored = self._restored, None
        self._serial += 1
        plan = shard.plan
        self._windows[plan.window] = None
        first = self._serial << SERIAL_SHIFT
        self.shared.first[self._rank] = first
        self.shared.done[self._rank] = first
        self._done = set()
        self._end = first + len(shard) - len(delivered)
        skip = (
            [delivered] if self._ranks is None else [set(part) for part in self._ranks.node_gather(sorted(delivered))]
        )
        if self._ranks is not None:
            self._ranks.barrier()  # let every rank read what is resident before it changes
            if not self._ranks.leads_node:
                return
        if self._process is None or not self._process.alive:
            if self._process is not None:
                self._process.end()
                self.shared.failed[0] = 0  # reported by the old feeder, perhaps after this window had begun
            self.shared.state[:] = 0
            resident = self.resident
            self._process = Process(self._arguments)
        self._process.send(
            FeedWindow(
                batches=self._batches(shard, unread),
                skip=skip,
                serial=self._serial,
                first=[first] * len(self._node_ranks),
                importance=self._importance(plan),
                resident=resident,
            )
        )

    def ticket(self, position: int) -> int:
        """The ticket of the batch at `position` among those wanted in this window."""
        return (self._serial << SERIAL_SHIFT) + position

    def delivered(self, ticket: int) -> list[str]:
        """Release the memory of a delivered batch; returns the feeder's warnings since the last call."""
        self._done.add(ticket)
        done = int(self.shared.done[self._rank])
        while done in self._done:
            self._done.discard(done)
            done += 1
        fence()  # finish reading before the memory is freed
        self.shared.done[self._rank] = done
        return [] if self._process is None else self._process.warnings()

    @property
    def serial(self) -> int:
        """Index of the window in progress; never reused."""
        return self._serial

    def break_off(self, serial: int) -> None:
        """End a window early and release workers that wait for one of its batches."""
        if serial == self._serial:
            self.shared.first[self._rank] = (serial + 1) << SERIAL_SHIFT

    def restore(self, resident: Ids) -> None:
        """Start with what the cache of the resumed run held when its window began."""
        self._restored = resident

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Samples that the cache of this node keeps between two windows, bool [n]."""
        if self._restored is None:
            if self._settled():
                return self.shared.kept
            self._restored = np.flatnonzero(self.shared.kept)  # the next window starts from there
        kept = np.zeros(len(self.source), dtype=bool)
        kept[self._restored] = True
        return kept

    def _settled(self) -> bool:
        """Wait until the cache has decided what it keeps of the last window; False if that window was broken off."""
        while self.shared.settled[0] < self._serial:
            if int(self.shared.done[self._rank]) < self._end or self.shared.failed[0] >= self._end:
                return False
            time.sleep(0.001)
        return True

    def counts(self) -> dict[str, int]:
        """Counters of the node since the cache was created."""
        return self.shared.counts()

    def rival_bytes(self, trace: Trace, unread: Callable[[Plan], npt.NDArray[np.bool_] | None]) -> dict[str, int]:
        """Bytes that LRU and never-evict would have fetched for the windows of this run, simulated from its trace."""
        plans = map(trace.read, self._windows)
        windows = (self._batches(plan.shard(world=self._world), unread(plan)) for plan in plans)
        return rival_bytes((np.concatenate(in_order(batches)) for batches in windows), self.budget, self.source.sizes)

    def _batches(self, shard: Shard, unread: npt.NDArray[np.bool_] | None) -> list[list[Ids]]:
        """For each rank of the node, the samples of its batches whose bytes are needed."""
        shards = [shard.of(rank) for rank in self._node_ranks]
        return [[read_ids(shard, k, unread) for k in range(len(shard))] for shard in shards]

    def take_counts(self) -> Counts:
        """Requests to the store since the last call."""
        now = self.counts()
        counts = {"samples": now["fetched_samples"], **{name: now[name] for name in STORE_COUNTS}}
        before, self._before = self._before, counts
        return Counts(**{name: count - before.get(name, 0) for name, count in counts.items()})

    def _importance(self, plan: Plan) -> npt.NDArray[np.float32]:
        """Importance of every sample; for samples whose importance this plan does not have, from earlier plans."""
        if plan.importance_of_all is not None:
            return plan.importance_of_all.astype(np.float32)
        self._known[plan.ids] = plan.importance
        return self._known.copy()

    def summary(self, rivals: Mapping[str, int]) -> str:
        """What the cache did, in words."""
        return cache_summary({**self.counts(), **rivals}, self.budget)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


def read_ids(shard: Shard, k: int, unread: npt.NDArray[np.bool_] | None) -> Ids:
    """Samples of batch k whose bytes are needed."""
    return shard.ids(k) if unread is None else shard.ids(k)[~unread[shard.span(k)]]


def _check_tiers(disk: str | None, redis: str | None, source: Source) -> None:
    """Raise at once if a tier is misspelt or refuses access; the feeder opens them later."""
    if disk is not None:
        parse_disk(disk)
    for tier in open_tiers(None, redis, source.index, source.url, lambda text: None):
        tier.close()


def _limits(source: Source, budget: int, batch_size: int, workers: int, ranks: int) -> tuple[Limits, int]:
    """How far to read ahead, and the size of the memory: cache, read-ahead, and a sixteenth for fragmentation."""
    sizes = source.sizes
    mean = float(sizes.mean()) if len(sizes) else 0.0
    count = min(batch_size, len(sizes))
    largest = int(np.partition(sizes, len(sizes) - count)[len(sizes) - count :].sum()) if count else 0
    least = int((workers + 2) * count * mean) * ranks
    memory = memory_bytes()
    if memory is not None and least + largest * ranks > memory:
        raise ConfigError(
            f"Batches of {count:,} samples take up to {largest:,} bytes by the index and are read ahead of {workers} workers; "
            f"this machine has {memory:,} bytes of memory. Make the batches smaller, or the index again."
        )
    most = max(2 * least, MIN_READ_AHEAD_BYTES)
    along = most // 4
    grains = 128 * 2 * (count * (workers + 2) * ranks + len(sizes))
    total = budget + budget // 16 + most + largest * ranks + along + grains
    whole = int(sizes.sum()) + grains + largest * ranks
    gap = source.reader.gap
    limits = Limits(least=least, most=most, along=along, gap=min(gap, feeder_gap(mean)), plain_gap=gap)
    return limits, min(total, 2 * whole)


def _shared(ranks: Ranks | None, n: int, on_node: int, capacity: int) -> Shared:
    """The shared memory, created by the first rank of the node and opened by the others."""
    if ranks is None:
        return Shared(n, on_node, capacity)
    shared = Shared(n, on_node, capacity, node_memory(ranks, shared_bytes(n, on_node, capacity)))
    ranks.barrier()
    return shared


def cache_summary(counts: Mapping[str, int], budget: int) -> str:
    """What a cache did, in words: all bytes the store sent, and those of samples alone, compared with other caches."""
    rivals = ""
    if "lru_bytes" in counts:
        rivals = (
            f", {size(counts['lru_bytes'])} with LRU, {size(counts['never_evict_bytes'])} with one that never evicts"
        )
    text = (
        f"Cache of {size(budget)}: {counts['hits']:,} of {counts['samples']:,} samples were in it. The store sent "
        f"{size(counts['bytes_sent'])}; without a cache it would have sent {size(counts['plain_bytes'])}. Without what lies "
        f"between samples that is {size(counts['bytes_used'])} instead of {size(counts['bytes'])}{rivals}; no cache of this "
        f"size could have done with less than {size(counts['bound_bytes'])} for these plans."
    )
    for tier in TIERS:
        if counts[f"{tier}_bytes"]:
            text += f" {size(counts[f'{tier}_bytes'])} came from {tier}."
    again = counts["bytes_used"] - counts["bytes"]
    return f"{text} {size(again)} were read more than once, since the run was interrupted." if again > 0 else text
