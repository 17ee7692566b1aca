"""Cache policies: which samples' bytes stay in memory.

A policy never sees bytes. It is told the importance of every sample when a window begins, asked whether a sample is
resident, and offered each sample that was fetched; it answers which samples to evict to make room.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, did_you_mean

Floats = npt.NDArray[np.float32]
Sizes = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int64]


class Policy(Protocol):
    """Decides what a cache keeps."""

    @property
    def used(self) -> int:
        """Bytes of the resident samples."""
        ...

    def window(self, importance: Floats, ids: Ids) -> None:
        """Begin a window with the importance of every sample, float32 [n], and the ids it visits, in order."""
        ...

    def hit(self, i: int) -> bool:
        """True if sample i, which is visited now, is resident."""
        ...

    def offer(self, i: int) -> Sequence[int] | None:
        """Sample i was fetched: the ids to evict for it, or None not to keep it."""
        ...


OpenPolicy = Callable[[int, Sizes], Policy]
"""Makes a policy for a cache with this many bytes and samples of these sizes."""


class Planned:
    """`planned`: importance decides, but nothing that this window still needs is evicted.

    The value of a sample is importance + [it is needed later in this window]. A sample is kept while there is room, or by
    evicting samples with a lower value, the lowest first. A min-heap finds those in O(log n). At the start of a window the
    heap of the new values is built beside the old one (the shadow heap) and replaces it in one assignment, so that look-ups
    never wait and nothing is evicted by a stale order.
    """

    def __init__(self, budget: int, sizes: Sizes) -> None:
        self.used, self.budget, self._sizes = 0, budget, sizes
        self.resident = np.zeros(len(sizes), dtype=bool)
        """Samples in the cache, bool [n]."""
        self._importance: Floats = np.zeros(len(sizes), dtype=np.float32)
        self._wanted = np.zeros(len(sizes), dtype=bool)
        self._heap: list[tuple[float, int]] = []

    def window(self, importance: Floats, ids: Ids) -> None:
        wanted = np.zeros(len(importance), dtype=bool)
        wanted[ids] = True
        here = np.flatnonzero(self.resident)
        shadow = list(zip((importance + wanted)[here].tolist(), here.tolist(), strict=True))
        heapq.heapify(shadow)
        self._importance, self._wanted, self._heap = importance, wanted, shadow

    def hit(self, i: int) -> bool:
        here = bool(self.resident[i])
        if here and self._wanted[i]:  # its old entry stays in the heap and is skipped when it comes up
            heapq.heappush(self._heap, (float(self._importance[i]), i))
        self._wanted[i] = False
        return here

    def offer(self, i: int) -> Sequence[int] | None:
        size, worth = int(self._sizes[i]), float(self._importance[i])
        room, gone = self.budget - self.used, list[tuple[float, int]]()
        while room < size and self._least() < worth:
            least = heapq.heappop(self._heap)
            self.resident[least[1]] = False
            gone.append(least)
            room += int(self._sizes[least[1]])
        if room < size:  # what would have to go is worth more: put it back
            for item in gone:
                heapq.heappush(self._heap, item)
                self.resident[item[1]] = True
            return None
        self.used += size - sum(int(self._sizes[old]) for _, old in gone)
        heapq.heappush(self._heap, (worth, i))
        self.resident[i] = True
        return [old for _, old in gone]

    def _least(self) -> float:
        """The value of the least valuable resident sample; infinity if there is none."""
        while self._heap:
            worth, i = self._heap[0]
            if self.resident[i] and worth == float(self._importance[i] + self._wanted[i]):
                return worth
            heapq.heappop(self._heap)
        return np.inf


POLICIES: dict[str, OpenPolicy] = {"planned": Planned}


def open_policy(which: str | OpenPolicy, budget: int, sizes: Sizes) -> Policy:
    """The policy with this name, or made by this function, for a cache of `budget` bytes."""
    if isinstance(which, str) and which not in POLICIES:
        raise ConfigError(f"There is no cache policy {which!r}.{did_you_mean(which, POLICIES)}")
    if budget < 0:
        raise ConfigError(f"The cache has {budget} bytes; it must be at least 0.")
    if len(sizes) and 0 < budget < int(sizes.min()):
        raise ConfigError(f"A cache of {budget:,} bytes holds no sample; the smallest has {int(sizes.min()):,} bytes.")
    return (POLICIES[which] if isinstance(which, str) else which)(budget, sizes)
