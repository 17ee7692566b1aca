"""Memory for the bytes of samples: where each sample is, which batches hold it, and when its memory is freed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from salience.feed.reads import Broken
from salience.feed.shared import ABSENT, BROKEN, KEPT_FLAG, WHOLE, Shared
from salience.feed.space import Space

HERE = WHOLE | BROKEN


class Arena:
    """Allocates memory for samples. Memory is freed once no batch holds the sample, and it is neither read along nor kept."""

    def __init__(self, shared: Shared, sizes: npt.NDArray[np.int64]) -> None:
        self.shared, self.sizes = shared, sizes
        self._space = Space(shared.token.capacity)
        self._pins = np.zeros(len(sizes), dtype=np.int32)
        self._along = np.zeros(len(sizes), dtype=bool)
        """True for samples read along with a neighbour and not staged yet, bool [n]; each counts as a pin."""
        self.along_bytes = 0
        self._lengths: dict[int, int] = {}
        """Broken sample -> bytes of the reason that is stored in its place."""

    @property
    def size(self) -> int:
        return self._space.size

    def has(self, i: int) -> bool:
        """True if its bytes, or the reason why it is broken, are in memory."""
        return bool(self.shared.state[i] & HERE)

    def take(self, i: int) -> int | None:
        """Reserve memory for a sample and return its offset; None if no free block is large enough."""
        return self._space.take(int(self.sizes[i]))

    def give(self, i: int, place: int | None = None) -> None:
        """Free memory that was reserved but not filled."""
        self._space.give(int(self.shared.offset[i]) if place is None else place, int(self.sizes[i]))

    def put(self, i: int, data: bytes | Broken) -> None:
        """Store the bytes of a sample, or the reason why it is broken, in the memory reserved for it."""
        shared, place = self.shared, int(self.shared.offset[i])
        if isinstance(data, bytes):
            shared.data[place : place + len(data)] = data
            shared.state[i] |= WHOLE
        else:
            self._space.give(place, int(self.sizes[i]))
            words = data.reason.encode()[:1000]
            room = self._space.take(len(words) + 2)
            if room is None:  # the shortest reason fits wherever a sample did
                room, words = self._space.take(2) or 0, b""
            self._lengths[i] = len(words) + 2
            shared.data[room : room + len(words) + 2] = len(words).to_bytes(2, "little") + words
            shared.offset[i] = room
            shared.state[i] |= BROKEN
        self.tidy(i)

    def pin(self, i: int) -> None:
        """Note that a batch holds the sample; it no longer counts as read along."""
        self._pins[i] += 1
        self.leave(i)

    def unpin(self, i: int) -> None:
        self._pins[i] -= 1
        self.tidy(i)

    def read_along(self, i: int, place: int) -> None:
        self.shared.offset[i] = place
        self._along[i] = True
        self._pins[i] += 1
        self.along_bytes += int(self.sizes[i])

    def leave(self, i: int) -> None:
        """Stop counting the sample as read along."""
        if self._along[i]:
            self._along[i] = False
            self._pins[i] -= 1
            self.along_bytes -= int(self.sizes[i])

    def leave_all(self) -> None:
        for i in np.flatnonzero(self._along).tolist():
            self.leave(i)
            self.tidy(i)

    def keep(self, i: int, on: bool) -> None:
        """Set whether the cache keeps the sample."""
        if on:
            self.shared.state[i] |= KEPT_FLAG
        else:
            self.shared.state[i] &= ~KEPT_FLAG & 0xFF
            self.tidy(i)

    def forget(self) -> None:
        """Mark nothing as kept. Call `tidy_all` after marking what the cache keeps now."""
        self.shared.state &= ~KEPT_FLAG & 0xFF

    def tidy_all(self) -> None:
        for i in np.flatnonzero(self.shared.state & HERE).tolist():
            self.tidy(i)

    def tidy(self, i: int) -> None:
        """Free the memory of a sample if nobody needs it. A broken one is never kept, so that it is fetched again."""
        state = self.shared.state[i]
        if not self._pins[i] and (state & BROKEN or not state & KEPT_FLAG):
            self._drop(i)

    def squeeze(self, ids: Iterable[int], wanted: int | None = None) -> tuple[int | None, int]:
        """Drop samples that no batch holds until `wanted` fits; returns its offset, or None, and how many were dropped."""
        gone = 0
        for i in ids:
            if self.has(i) and self._pins[i] == self._along[i]:
                self.leave(i)
                self._drop(i)
                gone += 1
                place = None if wanted is None else self.take(wanted)
                if place is not None:
                    return place, gone
        return None, gone

    def others(self, spared: set[int]) -> list[int]:
        """Samples in memory that are not in `spared`."""
        return [i for i in np.flatnonzero(self.shared.state & HERE).tolist() if i not in spared]

    def _drop(self, i: int) -> None:
        state = self.shared.state
        if state[i] & HERE:
            size = self._lengths.pop(i) if state[i] & BROKEN else int(self.sizes[i])
            self._space.give(int(self.shared.offset[i]), size)
            state[i] = ABSENT | (state[i] & KEPT_FLAG)
