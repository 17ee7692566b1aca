"""Simulates what a store would have sent with another cache by replaying plans; no bytes are read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from salience.feed.policy import Floats, Ids, Policy, Sizes


class Lru:
    """`lru`: evicts the least recently used. Useless over epochs, in which the next sample is the one used longest ago."""

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
    """`never_evict`: keeps what came first. If each sample is visited once per epoch, no policy has more hits."""

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


def fetched(chosen: Policy, plans: Iterable[tuple[Ids, Floats]], sizes: Sizes) -> list[int]:
    """Bytes the store would send for each window; plans are (ids in order, importance of every sample)."""
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


def rival_bytes(windows: Iterable[Ids], budget: int, sizes: Sizes) -> dict[str, int]:
    """Bytes that caches of `budget` bytes without knowledge of the plan would have fetched; `windows` are ids in order."""
    rivals = {"lru_bytes": Lru(budget, sizes), "never_evict_bytes": NeverEvict(budget, sizes)}
    total = dict.fromkeys(rivals, 0)
    unknown = np.zeros(len(sizes), dtype=np.float32)
    for ids in windows:  # read once, since a trace may be long
        for name, rival in rivals.items():
            total[name] += fetched(rival, [(ids, unknown)], sizes)[0]
    return total
