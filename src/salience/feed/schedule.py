"""Decides what to read next from the plan of a window, a cache policy and the free memory. It moves no bytes.

The schedule follows the plan, not time. Which samples to keep is decided in the order of the plan, so that the same plans keep
the same samples however fast the store is. A batch is *staged* when each of its samples has a place in memory; it is *ready*
when their bytes have arrived, and its samples stay until its rank has finished with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from salience.errors import StoreError
from salience.feed.arena import Arena
from salience.feed.index import Index
from salience.feed.policy import Ids, Policy
from salience.feed.ranges import Neighbours


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FeedWindow:
    """What a window asks of the feeder."""

    batches: list[list[Ids]]
    """The batches of each rank of the node."""
    skip: list[set[int]]
    """Per rank, batches delivered before the run was interrupted: the policy sees them, but nobody needs them."""
    serial: int
    """Window index within this run; never reused."""
    first: list[int]
    """Per rank, the ticket of its first batch that is needed."""
    importance: npt.NDArray[np.float32]
    """Importance of every sample, float32 [n]."""
    resident: Ids | None = None
    """Samples that the cache held when this window began, if the run was resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bytes the feeder may read ahead."""

    least: int
    """Minimum: what loader workers hold at a time, plus one batch."""
    most: int
    """Maximum of the horizon."""
    along: int
    """Bytes for neighbours in a shard that are needed later in the window and fetched by the same request."""
    gap: int
    """Largest gap between two samples of a shard that a request includes."""
    plain_gap: int
    """The same for workers that read by themselves, without a cache."""
    package: int = 256 * 1024
    """Bytes of one such request: a batch waits for what is read along with it."""


@dataclass(slots=True)
class ScheduleCounts:
    """Counts of what the plan asked for and what the cache had."""

    samples: int = 0
    bytes: int = 0
    hits: int = 0
    """Samples that were resident when they were visited."""
    hit_bytes: int = 0
    plain_bytes: int = 0
    """Bytes that the store would have sent without a cache, with every batch read separately."""
    bound_bytes: int = 0
    """Bytes that any cache of this size would have had to fetch."""
    resident_bytes: int = 0
    """Bytes of the samples that the cache keeps now."""
    squeezed: int = 0
    """Samples dropped because the memory was in pieces."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What to read for the batch that was staged last."""

    places: dict[int, int]
    """Sample -> its place in memory."""
    along: list[int]
    """Neighbours to read along; their memory is reserved."""


@dataclass(slots=True, eq=False)
class _Batch:
    rank: int
    ticket: int
    """-1 if it was delivered before the run was interrupted."""
    ids: list[int]
    owed: int = 0
    """Bytes that were read for this batch."""
    missing: set[int] = field(default_factory=set)


def in_order(batches: Sequence[Sequence[Ids]]) -> list[Ids]:
    """Batches of the ranks of a node in the order in which they are read: the first of every rank, the second, ..."""
    return [ids for turn in zip_longest(*batches) for ids in turn if ids is not None]


def horizon(bandwidth: float, latency: float, limits: Limits) -> int:
    """Bytes to read ahead: four times latency * bandwidth (the bytes in flight on a busy link), within limits."""
    return int(min(limits.most, max(limits.least, 4 * bandwidth * latency)))


class Schedule:
    """Stages the batches of a window one by one, as far as the horizon and memory allow."""

    def __init__(
        self,
        index: Index,
        open_policy: Callable[[], Policy],
        room: Arena,
        limits: Limits,
        *,
        budget: int,
        ranks: int,
    ) -> None:
        self.room, self.limits, self.counts = room, limits, ScheduleCounts()
        self.policy, self._open_policy, self._budget = open_policy(), open_policy, budget
        self._sizes, self._neighbours = index.size, Neighbours(index, gap=limits.gap, most=limits.package)
        self._wanted = np.zeros(len(index), dtype=bool)
        """Samples of this window that are not staged yet."""
        self._waiting: dict[int, list[_Batch]] = {}
        """Sample in flight -> the staged batches that wait for it."""
        self._todo: deque[_Batch] = deque()
        self._staged: list[deque[_Batch]] = [deque() for _ in range(ranks)]
        """Per rank, batches that are staged and not finished."""
        self._unsaid: list[deque[_Batch]] = [deque() for _ in range(ranks)]
        """Per rank, staged batches that it was not yet told are ready."""
        self._next = np.zeros(ranks, dtype=np.int64)
        """Per rank, the first ticket that is not staged."""
        self._owed = self._serial = self._again = 0
        self._seen = np.zeros(len(index), dtype=np.int64)
        """Serial number of the window in which each sample was last needed."""
        self.end = 0
        """The ticket after the last of this window."""

    @property
    def all_staged(self) -> bool:
        """True if the cache has decided what it keeps of this window."""
        return not self._todo

    @property
    def busy(self) -> bool:
        """True if there are batches to stage, or ranks have not finished staged ones."""
        return bool(self._todo) or any(self._staged)

    def leave(self, serial: int) -> None:
        """End the window before `serial`, finished or not, and unpin what it held."""
        self._serial, self._again = serial, 0
        self._todo.clear()
        for batches, unsaid in zip(self._staged, self._unsaid, strict=True):
            for batch in batches:
                self._unpin(batch)
            batches.clear()
            unsaid.clear()
        self.room.leave_all()
        self._waiting = {i: [] for i in self._waiting}
        self._seen[[*self._waiting]] = serial  # samples under way count as seen: no cache fetches them twice
        self._wanted[:] = False

    def restore(self, resident: Ids) -> None:
        """Keep the samples that the cache of the resumed run kept; their bytes are fetched when they are needed."""
        self.policy = self._open_policy()
        self.room.forget()
        self.counts.resident_bytes = 0
        for i in resident.tolist():
            self._keep(i)
        self.room.tidy_all()

    def tell_policy(self, window: FeedWindow) -> None:
        """Tell the cache policy what a window visits. This may take long: it can run in a thread while samples still arrive."""
        planned = [ids for batches in window.batches for ids in batches]
        self.policy.window(window.importance, np.concatenate(planned) if planned else np.empty(0, dtype=np.int64))

    def enter(self, window: FeedWindow) -> None:
        """Queue the batches of a window, those of the ranks in turn."""
        tickets = list(window.first)
        for number, turn in enumerate(zip_longest(*window.batches)):
            for rank, ids in enumerate(turn):
                if ids is None:
                    continue
                batch = _Batch(rank, -1, ids.tolist())
                if number not in window.skip[rank]:
                    batch.ticket, tickets[rank] = tickets[rank], tickets[rank] + 1
                    self._wanted[ids] = True
                self._todo.append(batch)
        self._next[:], self.end = window.first, max(tickets)

    def next(self, ahead: int, asked: npt.NDArray[np.int64]) -> Staged | None:
        """Stage the next batch and say what to read for it; None if there is none, or if it has to wait.

        It waits while there is no room, and while more than `ahead` bytes are read ahead, unless a rank waits for a ticket
        (`asked`, int64 [ranks]) that is not staged. Raises StoreError if there can never be room for it.
        """
        if not self._todo:
            return None
        batch = self._todo[0]
        if batch.ticket < 0:
            for i in batch.ids:
                if not self.policy.hit(i):
                    self._keep(i)
            self._todo.popleft()
            return Staged({}, [])
        if self._owed > ahead and not (asked >= self._next).any():
            return None
        places = self._make_room(batch)
        if places is None:
            return None
        self._todo.popleft()
        return Staged(places, self._stage(batch, places))

    def _stage(self, batch: _Batch, places: dict[int, int]) -> list[int]:
        """Pin the samples of a batch and note which are missing; returns the neighbours to read along."""
        for i in places:
            self._waiting[i] = []
        for i in batch.ids:  # all of them first, since a visit may evict another one
            self.room.pin(i)
            self._wanted[i] = False
            if i in self._waiting:
                batch.missing.add(i)
        self._count_bound(batch.ids)
        self.counts.plain_bytes += self._neighbours.sent_bytes(batch.ids, self.limits.plain_gap)
        for i in batch.ids:
            self._visit(i, i not in places)
        for i in batch.missing:
            self._waiting[i].append(batch)
        batch.owed = int(self._sizes[[*places]].sum())
        self._owed += batch.owed
        self._next[batch.rank] = batch.ticket + 1
        self._staged[batch.rank].append(batch)
        self._unsaid[batch.rank].append(batch)
        return self._read_along([*places])

    def _visit(self, i: int, here: bool) -> None:
        """Count a visit to sample i and let the policy decide about it."""
        size = int(self._sizes[i])
        self.counts.samples += 1
        self.counts.bytes += size
        if not self.policy.hit(i):
            self._keep(i)
        elif here:  # and not only in the memory of a run that was resumed
            self.counts.hits += 1
            self.counts.hit_bytes += size

    def _keep(self, i: int) -> None:
        gone = self.policy.offer(i)
        if gone is None:
            return
        self.room.keep(i, True)
        self.counts.resident_bytes += int(self._sizes[i])
        for old in gone:
            self.room.keep(old, False)
            self.counts.resident_bytes -= int(self._sizes[old])

    def _count_bound(self, ids: list[int]) -> None:
        """Count what any cache has to fetch: samples never seen before, and what exceeds its budget of the others."""
        visited = np.unique(np.asarray(ids, dtype=np.int64))
        visited = visited[self._seen[visited] != self._serial]
        old = self._seen[visited] > 0
        before, self._again = self._again, self._again + int(self._sizes[visited[old]].sum())
        self.counts.bound_bytes += int(self._sizes[visited[~old]].sum())
        self.counts.bound_bytes += max(0, self._again - self._budget) - max(0, before - self._budget)
        self._seen[visited] = self._serial

    def _make_room(self, batch: _Batch) -> dict[int, int] | None:
        """Reserve memory for each of its samples that is not in memory; None if an earlier batch must finish first.

        If none is in progress and the memory is fragmented, samples that no batch holds are dropped, in the end even those
        that this batch needs.
        """
        for spared in ({*batch.ids}, set[int]()):
            if not spared:
                self.counts.squeezed += self.room.squeeze(batch.ids)[1]
            places: dict[int, int] = {}
            for i in dict.fromkeys(batch.ids):
                if i in self._waiting or self.room.has(i):
                    continue
                place = self.room.take(i)
                if place is None and not self._room_will_come():
                    place, gone = self.room.squeeze(self.room.others(spared), i)
                    self.counts.squeezed += gone
                if place is None:
                    break
                places[i] = place
            else:
                return places
            for i, place in places.items():
                self.room.give(i, place)
            if self._room_will_come():
                return None
        raise StoreError(
            f"A batch of {len(batch.ids)} samples does not fit into the memory of the cache ({self.room.size:,} bytes); "
            "make the batch smaller or the cache larger."
        )

    def _room_will_come(self) -> bool:
        """True if memory will be freed: earlier batches are not finished, or samples that nobody waits for are in flight."""
        return any(self._staged) or any(not waiting for waiting in self._waiting.values())

    def _read_along(self, ids: list[int]) -> list[int]:
        """Neighbours of `ids` that are needed later in this window, as far as there is room for them."""
        along: list[int] = []
        for i in ids:
            for j in self._neighbours.beside(i, self._not_here):
                place = None
                if self.room.along_bytes + int(self._sizes[j]) <= self.limits.along:
                    place = self.room.take(j)
                if place is None:
                    return along
                self.room.read_along(j, place)
                self._waiting[j] = []
                along.append(j)
        return along

    def _not_here(self, i: int) -> bool:
        """True if sample i is needed later and is neither in memory nor in flight."""
        return bool(self._wanted[i]) and i not in self._waiting and not self.room.has(i)

    def arrived(self, i: int) -> bool:
        """Note that sample i has arrived; False if it was not in flight."""
        waiting = self._waiting.pop(i, None)
        for batch in waiting or ():
            batch.missing.discard(i)
        return waiting is not None

    def lost(self, ids: Iterable[int]) -> bool:
        """Give up samples that could not be fetched; True if a batch waits for one of them."""
        waited_for = False
        for i in ids:
            waiting = self._waiting.pop(i, None)
            if waiting is not None:
                self.room.give(i)
                self.room.leave(i)
                waited_for = waited_for or bool(waiting)
        return waited_for

    def release(self, done: npt.NDArray[np.int64]) -> None:
        """Unpin the batches with tickets below `done`, int64 [ranks]."""
        for batches, until in zip(self._staged, done.tolist(), strict=True):
            while batches and batches[0].ticket < until:
                self._unpin(batches.popleft())

    def ready(self) -> Iterator[tuple[int, int]]:
        """Ranks and tickets of batches whose bytes have all arrived, each once and in order."""
        for rank, batches in enumerate(self._unsaid):
            while batches and not batches[0].missing:
                yield rank, batches.popleft().ticket

    def _unpin(self, batch: _Batch) -> None:
        self._owed -= batch.owed
        for i in batch.ids:
            self.room.unpin(i)
