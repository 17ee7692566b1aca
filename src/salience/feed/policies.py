"""Cache policies: which samples' bytes stay in memory. One small interface, so that comparisons are honest.

A policy never sees bytes. It is told of each window's importance, asked whether a sample is resident, and after a miss
offered the sample; it answers with what has to go to make room.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, did_you_mean

Floats = npt.NDArray[np.float32]
Sizes = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int64]


class Policy(Protocol):
    """What a cache asks."""

    @property
    def used(self) -> int:
        """Bytes of what is resident."""
        ...

    def window(self, importance: Floats, ids: Ids) -> None:
        """A window begins: importance of every sample, float32 [n], and the ids it visits."""
        ...

    def hit(self, i: int) -> bool:
        """Sample i is wanted: is it resident?"""
        ...

    def offer(self, i: int) -> Sequence[int] | None:
        """Sample i was fetched: ids that make room for it, or None to leave it out."""
        ...


class Nothing:
    """`none`: everything is fetched every time."""

    def __init__(self, budget: int, sizes: Sizes) -> None:
        self.used = 0

    def window(self, importance: Floats, ids: Ids) -> None:
        pass

    def hit(self, i: int) -> bool:
        return False

    def offer(self, i: int) -> Sequence[int] | None:
        return None


class Lru:
    """`lru`: the least recently used goes first. Useless over epochs: what comes next is what was used longest ago."""

    def __init__(self, budget: int, sizes: Sizes) -> None:
        self.used, self._budget, self._sizes = 0, budget, sizes
        self._order: OrderedDict[int, None] = OrderedDict()

    def window(self, importance: Floats, ids: Ids) -> None:
        pass

    def hit(self, i: int) -> bool:
        if i in self._order:
            self._order.move_to_end(i)
            return True
        return False

    def offer(self, i: int) -> Sequence[int] | None:
        size = int(self._sizes[i])
        if size > self._budget:
            return None
        gone: list[int] = []
        while self.used + size > self._budget:
            old, _ = self._order.popitem(last=False)
            self.used -= int(self._sizes[old])
            gone.append(old)
        self._order[i] = None
        self.used += size
        return gone


class NeverEvict:
    """`never_evict`: what came first stays. With each sample once an epoch no policy has more hits: the cache's share."""

    def __init__(self, budget: int, sizes: Sizes) -> None:
        self.used, self._budget, self._sizes = 0, budget, sizes
        self._resident = np.zeros(len(sizes), dtype=bool)

    def window(self, importance: Floats, ids: Ids) -> None:
        pass

    def hit(self, i: int) -> bool:
        return bool(self._resident[i])

    def offer(self, i: int) -> Sequence[int] | None:
        size = int(self._sizes[i])
        if self.used + size > self._budget:
            return None
        self._resident[i] = True
        self.used += size
        return ()


class Heap:
    """Importance alone: a sample comes in while there is room, or while it is more important than what it puts out.

    A min-heap finds the least important in O(log n). On a refresh the heap of the new importances is built beside the
    old one (the shadow heap) and takes its place in one assignment: look-ups never wait, and nothing is evicted by
    a stale order afterwards.
    """

    def __init__(self, budget: int, sizes: Sizes) -> None:
        self.used, self.budget, self._sizes = 0, budget, sizes
        self.resident = np.zeros(len(sizes), dtype=bool)
        self.importance: Floats = np.zeros(len(sizes), dtype=np.float32)
        self._heap: list[tuple[float, int]] = []

    def window(self, importance: Floats, ids: Ids) -> None:
        here = np.flatnonzero(self.resident)
        shadow = list(zip(importance[here].tolist(), here.tolist(), strict=True))
        heapq.heapify(shadow)
        self.importance, self._heap = importance, shadow

    def hit(self, i: int) -> bool:
        return bool(self.resident[i])

    def offer(self, i: int) -> Sequence[int] | None:
        size, worth = int(self._sizes[i]), float(self.importance[i])
        room, gone = self.budget - self.used, list[tuple[float, int]]()
        while room < size and self._skip_old() and self._heap[0][0] < worth:
            least = heapq.heappop(self._heap)
            self.resident[least[1]] = False
            gone.append(least)
            room += int(self._sizes[least[1]])
        if room < size:  # what would have to go is worth more: put it back
            for item in gone:
                heapq.heappush(self._heap, item)
                self.resident[item[1]] = True
            return None
        self.used -= sum(int(self._sizes[old]) for _, old in gone)
        heapq.heappush(self._heap, (worth, i))
        self.resident[i] = True
        self.used += size
        return [old for _, old in gone]

    def _skip_old(self) -> bool:
        """Drop entries at the top that no longer stand for anything; whether one is left."""
        return bool(self._heap)


class Shade(Heap):
    """`shade` (Khan et al. 2023): one cache by importance, but importance is known of what was seen in this window alone.

    SHADE ranks a sample inside the batch it was trained in and keeps that as its priority until it comes again.
    """

    def __init__(self, budget: int, sizes: Sizes) -> None:
        super().__init__(budget, sizes)
        self._now: Floats = self.importance

    def window(self, importance: Floats, ids: Ids) -> None:
        self._now = importance  # of each sample used only once it has come by

    def hit(self, i: int) -> bool:
        here = bool(self.resident[i])
        if self.importance[i] != self._now[i]:
            self.importance[i] = self._now[i]
            if here:  # its old entry stays in the heap and is skipped when it comes up
                heapq.heappush(self._heap, (float(self._now[i]), i))
        return here

    def _skip_old(self) -> bool:
        while self._heap:
            worth, i = self._heap[0]
            if self.resident[i] and worth == float(self.importance[i]):
                return True
            heapq.heappop(self._heap)
        return False


class Planned(Heap):
    """`planned`: importance, and what the plan says: whoever still has its turn in this window stays until it had it.

    A sample is worth importance + [it is wanted later in this window]. Only what had its turn, or has none, makes room,
    the least important first, and only for what is more important.
    """

    def __init__(self, budget: int, sizes: Sizes) -> None:
        super().__init__(budget, sizes)
        self._wanted = np.zeros(len(sizes), dtype=bool)

    def window(self, importance: Floats, ids: Ids) -> None:
        wanted = np.zeros(len(importance), dtype=bool)
        wanted[ids] = True
        here = np.flatnonzero(self.resident)
        shadow = list(zip((importance + wanted)[here].tolist(), here.tolist(), strict=True))
        heapq.heapify(shadow)
        self.importance, self._wanted, self._heap = importance, wanted, shadow

    def hit(self, i: int) -> bool:
        here = bool(self.resident[i])
        if here and self._wanted[i]:  # its old entry stays in the heap and is skipped when it comes up
            heapq.heappush(self._heap, (float(self.importance[i]), i))
        self._wanted[i] = False
        return here

    def _skip_old(self) -> bool:
        while self._heap:
            worth, i = self._heap[0]
            if self.resident[i] and worth == float(self.importance[i] + self._wanted[i]):
                return True
            heapq.heappop(self._heap)
        return False


class HighLow:
    """`icache` (Chen et al. 2023) and `impact` (2025): a cache for the important share, a small one for the rest.

    Samples over the `top` share of importance go to the H-cache, kept by importance; the others to the L-cache, which here
    keeps what came last in the order it came (packages replace it piece by piece). `split` is the H-cache's part of
    the bytes.
    """

    def __init__(self, budget: int, sizes: Sizes, *, split: float = 0.9, top: float = 0.7) -> None:
        if not 0 <= split <= 1 or not 0 < top <= 1:
            raise ConfigError(f"cache: split is {split}, top is {top}; both are shares from 0 to 1.")
        self._top = top
        self._high, self._low = Heap(int(split * budget), sizes), Lru(budget - int(split * budget), sizes)
        self._important = np.ones(len(sizes), dtype=bool)

    @property
    def used(self) -> int:
        return self._high.used + self._low.used

    def window(self, importance: Floats, ids: Ids) -> None:
        count = len(importance) - int(self._top * len(importance))
        edge = np.partition(importance, count)[count] if count < len(importance) else np.inf
        self._important = importance >= edge
        self._high.window(importance, ids)

    def hit(self, i: int) -> bool:
        return self._high.hit(i) or self._low.hit(i)

    def offer(self, i: int) -> Sequence[int] | None:
        return self._high.offer(i) if self._important[i] else self._low.offer(i)


POLICIES: dict[str, Callable[[int, Sizes], Policy]] = {
    "none": Nothing,
    "lru": Lru,
    "never_evict": NeverEvict,
    "shade": Shade,
    "icache": HighLow,
    "impact": Heap,
    "planned": Planned,
}
"""By name; `impact` is the H-cache over all bytes where nothing is loaded in packages."""


def policy(name: str, budget: int, sizes: Sizes) -> Policy:
    if name not in POLICIES:
        raise ConfigError(f"There is no cache policy {name!r}.{did_you_mean(name, POLICIES)}")
    if budget < 0:
        raise ConfigError(f"The cache has {budget} bytes; it must be at least 0.")
    if name != "none" and len(sizes) and 0 < budget < int(sizes.min()):
        raise ConfigError(f"A cache of {budget:,} bytes holds no sample; the smallest has {int(sizes.min()):,} bytes.")
    return POLICIES[name](budget, sizes)


def fetched(chosen: Policy, plans: Sequence[tuple[Ids, Floats]], sizes: Sizes) -> list[int]:
    """Bytes the store would send for each window: plans are (ids in order, importance of every sample)."""
    sent: list[int] = []
    for ids, importance in plans:
        chosen.window(importance, ids)
        total = 0
        for i in ids.tolist():
            if not chosen.hit(i):
                total += int(sizes[i])
                chosen.offer(i)
        sent.append(total)
    return sent


def bound(share: float, power: float) -> float:
    """Bytes an importance cache must fetch in a window, over the bytes of all samples:  (1 - c)^(1 + b) / (1 + b).

    With P(pick) = percentile^b and the most important share c resident, the rest is fetched when picked: the integral of
    x^b from 0 to 1 - c.
    """
    return (1 - share) ** (1 + power) / (1 + power)
