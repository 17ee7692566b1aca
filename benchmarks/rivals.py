"""Cache policies that exist to be compared with `planned`, behind the same interface and with the same bytes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from salience.errors import ConfigError, did_you_mean
from salience.feed.policy import Floats, Ids, OpenPolicy, Planned, Policy, Sizes
from salience.feed.simulate import Lru, NeverEvict


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


class Importance:
    """`impact` (2025): importance alone, whatever the plan still wants. The H-cache over all bytes, without packages."""

    def __init__(self, budget: int, sizes: Sizes) -> None:
        self._cache, self._nothing = Planned(budget, sizes), np.empty(0, dtype=np.int64)

    @property
    def used(self) -> int:
        return self._cache.used

    def window(self, importance: Floats, ids: Ids) -> None:
        self._cache.window(importance, self._nothing)

    def hit(self, i: int) -> bool:
        return self._cache.hit(i)

    def offer(self, i: int) -> Sequence[int] | None:
        return self._cache.offer(i)


class Shade:
    """`shade` (Khan et al. 2023): one cache by importance, which is known only for samples seen in this window.

    SHADE ranks a sample inside the batch it was trained in and keeps that as its priority until it comes again.
    """

    def __init__(self, budget: int, sizes: Sizes) -> None:
        self.used, self._budget, self._sizes = 0, budget, sizes
        self._resident = np.zeros(len(sizes), dtype=bool)
        self._known: Floats = np.zeros(len(sizes), dtype=np.float32)
        self._now: Floats = self._known
        self._heap: list[tuple[float, int]] = []

    def window(self, importance: Floats, ids: Ids) -> None:
        self._now = importance  # used for each sample only once it has come by

    def hit(self, i: int) -> bool:
        here = bool(self._resident[i])
        if self._known[i] != self._now[i]:
            self._known[i] = self._now[i]
            if here:  # its old entry stays in the heap and is skipped when it comes up
                heapq.heappush(self._heap, (float(self._now[i]), i))
        return here

    def offer(self, i: int) -> Sequence[int] | None:
        size, worth = int(self._sizes[i]), float(self._known[i])
        room, gone = self._budget - self.used, list[tuple[float, int]]()
        while room < size and self._least() < worth:
            least = heapq.heappop(self._heap)
            self._resident[least[1]] = False
            gone.append(least)
            room += int(self._sizes[least[1]])
        if room < size:
            for item in gone:
                heapq.heappush(self._heap, item)
                self._resident[item[1]] = True
            return None
        self.used += size - sum(int(self._sizes[old]) for _, old in gone)
        heapq.heappush(self._heap, (worth, i))
        self._resident[i] = True
        return [old for _, old in gone]

    def _least(self) -> float:
        while self._heap:
            worth, i = self._heap[0]
            if self._resident[i] and worth == float(self._known[i]):
                return worth
            heapq.heappop(self._heap)
        return np.inf


class HighLow:
    """`icache` (Chen et al. 2023): a cache for the important share, a small one for the rest.

    Samples over the `top` share of importance go to the H-cache, kept by importance; the others to the L-cache, which here
    keeps what came last in the order it came (packages replace it piece by piece). `split` is the H-cache's part of
    the bytes.
    """

    def __init__(self, budget: int, sizes: Sizes, *, split: float = 0.9, top: float = 0.7) -> None:
        self._top = top
        self._high, self._low = Importance(int(split * budget), sizes), Lru(budget - int(split * budget), sizes)
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


POLICIES: dict[str, OpenPolicy] = {
    "none": Nothing,
    "lru": Lru,
    "never_evict": NeverEvict,
    "shade": Shade,
    "icache": HighLow,
    "impact": Importance,
    "planned": Planned,
}
"""Rivals and ours, by name."""


def policy(name: str, budget: int, sizes: Sizes) -> Policy:
    if name not in POLICIES:
        raise ConfigError(f"There is no cache policy {name!r}.{did_you_mean(name, POLICIES)}")
    return POLICIES[name](budget, sizes)


def bound(share: float, power: float) -> float:
    """Bytes an importance cache must fetch per window, over the bytes of all samples:  (1 - c)^(1 + b) / (1 + b).

    With P(pick) = percentile^b and the most important share c resident, the rest is fetched when picked: the integral of
    x^b from 0 to 1 - c.
    """
    return (1 - share) ** (1 + power) / (1 + power)
