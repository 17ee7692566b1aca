"""The memory of a shared feed: samples in several forms, and which of them are evicted when room is needed.

Form 0 is the bytes of a sample; other forms are the results of a `decode`. The sample wanted last is evicted first (`demand`);
a sample that is being read or filled stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from salience.feed.sharing.demand import Demand
from salience.feed.space import Space, slot

RAW = 0
"""The form that is the sample's bytes."""
FEWEST_VICTIMS = 64
"""Minimum number of samples ranked for eviction at a time."""

Key = tuple[int, int]
"""Form and sample."""


@dataclass(slots=True)
class Entry:
    """A sample in memory."""

    offset: int
    size: int
    pins: int = 0
    """Number of readers and writers that hold it."""
    ready: bool = False
    """True once its bytes are in memory."""
    print: int = 0
    """Fingerprint of the bytes it was decoded from; 0 = not known."""


class Pool:
    """Samples by form and id, in `capacity` bytes; at most `budget` of them for decoded ones."""

    def __init__(self, capacity: int, budget: int, demand: Demand) -> None:
        self.capacity, self.budget, self._demand = capacity, budget, demand
        self._space = Space(capacity)
        self._entries: dict[Key, Entry] = {}
        self._victims: list[tuple[float, Key]] = []
        """Samples ranked for eviction: those wanted last are at the end."""
        self.decoded_bytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used(self) -> int:
        """Bytes in use."""
        return self._space.size - self._space.free

    @property
    def free(self) -> int:
        """Bytes not in use."""
        return self._space.free

    def fits(self, size: int) -> bool:
        """True if there could be memory for a sample of this size."""
        return slot(size) <= self._space.size

    def get(self, form: int, i: int) -> Entry | None:
        return self._entries.get((form, i))

    def ready(self, form: int, i: int) -> Entry | None:
        """The sample in this form, if its bytes are in memory."""
        entry = self._entries.get((form, i))
        return entry if entry is not None and entry.ready else None

    def reserve(self, form: int, i: int, size: int, soon: float | None = None) -> Entry | None:
        """Reserve memory for a sample; None if there is none. The sample is pinned until it is `filled`.

        `soon`: seconds until it is wanted; only samples wanted later may be evicted. None = any sample that nobody holds.
        """
        if not self.fits(size):
            return None
        fresh = False
        while True:
            within = form == RAW or self.decoded_bytes + size <= self.budget
            offset = self._space.take(size) if within else None
            if offset is not None:
                break
            victim = self._victim(decoded=not within)
            if victim is None and not fresh:
                self._rank()
                fresh = True
                continue
            if victim is None or (soon is not None and victim[0] <= soon):
                if victim is not None:
                    self._victims.append(victim)
                return None
            self.drop(*victim[1])
            self.evicted += 1
        entry = self._entries[form, i] = Entry(offset, size, pins=1)
        self.decoded_bytes += size if form != RAW else 0
        return entry

    def filled(self, form: int, i: int) -> None:
        """The bytes of the sample are in memory."""
        entry = self._entries[form, i]
        entry.ready = True
        entry.pins -= 1

    def drop(self, form: int, i: int) -> None:
        """Free the memory of a sample, even if it is held."""
        entry = self._entries.pop((form, i))
        self._space.give(entry.offset, entry.size)
        self.decoded_bytes -= entry.size if form != RAW else 0

    def _victim(self, decoded: bool) -> tuple[float, Key] | None:
        """The ranked sample that is wanted last and not held; only a decoded one if `decoded`."""
        spared: list[tuple[float, Key]] = []
        found = None
        while self._victims and found is None:
            one = self._victims.pop()
            entry = self._entries.get(one[1])
            if entry is None or entry.pins:
                continue
            if decoded and one[1][0] == RAW:
                spared.append(one)
            else:
                found = one
        self._victims.extend(reversed(spared))
        return found

    def _rank(self) -> None:
        """Rank samples that are not held by when they are wanted."""
        self._victims = []
        free = [key for key, entry in self._entries.items() if not entry.pins]
        for form in {form for form, _ in free}:
            ids = np.array([i for one, i in free if one == form], dtype=np.int64)
            soon = self._demand.wanted_in(ids, None if form == RAW else form)
            most = max(FEWEST_VICTIMS, len(ids) // 10)
            last = np.argsort(soon, kind="stable")[-most:]
            self._victims += [(float(soon[k]), (form, int(ids[k]))) for k in last]
        self._victims.sort(key=lambda one: one[0])
