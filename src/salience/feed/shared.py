"""What the processes of a node share: counters, where each sample lies, and the bytes themselves.

One anonymous memory file holds it all. It has no name and needs no room in /dev/shm, so nothing is left behind by a crash and
small containers have no trouble; other processes open it through the one that made it.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ABSENT, WHOLE, BROKEN = 0, 1, 2
"""States of a sample: not here, its bytes are here, here is only what is wrong with it."""
KEPT = 4
"""Flag beside the state: the cache means to keep it."""

COUNTERS = (
    "samples", "bytes",  # delivered by the plan
    "hits", "hit_bytes",  # of them, resident when their turn came
    "bound_bytes",  # what any cache of this size would have had to fetch
    "fetched_samples", "bytes_used", "bytes_sent", "requests", "retried", "hedged",  # what was asked of the store
    "disk_hits", "disk_bytes", "redis_hits", "redis_bytes",
    "horizon", "resident_bytes", "squeezed",  # bytes read ahead at most, bytes kept, samples dropped for want of room
)  # fmt: skip
MESSAGE = 2048
"""Bytes for the words of an error."""
SERIAL = 32
"""Tickets are (how manieth window << SERIAL) + position in it, so that none ever comes twice."""


@dataclass(frozen=True, slots=True)
class Token:
    """How another process of the node opens the file, as long as its maker lives."""

    path: str
    n: int
    ranks: int
    capacity: int


class Shared:
    """The file, mapped. `offset` and `state` say where sample i lies in `data`."""

    def __init__(self, n: int, ranks: int, capacity: int) -> None:
        fd = _anonymous(_front(n, ranks) + capacity)
        weakref.finalize(self, os.close, fd)  # until then others can open it by its number
        self.token = Token(f"/proc/{os.getpid()}/fd/{fd}", n, ranks, capacity)
        self._map(fd)

    @classmethod
    def open(cls, token: Token) -> Shared:
        self = object.__new__(cls)
        self.__setstate__(token)
        return self

    def __getstate__(self) -> Token:
        return self.token

    def __setstate__(self, token: Token) -> None:
        self.token = token
        fd = os.open(token.path, os.O_RDWR)
        try:
            self._map(fd)
        finally:
            os.close(fd)

    def _map(self, fd: int) -> None:
        n, ranks = self.token.n, self.token.ranks
        whole = mmap.mmap(fd, _front(n, ranks) + self.token.capacity)
        start = 0

        def part(dtype: Any, count: int) -> npt.NDArray[Any]:
            nonlocal start
            array = np.frombuffer(whole, dtype=dtype, count=count, offset=start)
            start += array.nbytes
            return array

        self.counters: npt.NDArray[np.int64] = part(np.int64, len(COUNTERS))
        self.first: npt.NDArray[np.int64] = part(np.int64, ranks)
        """Of each rank, the ticket of the first batch of its window: older ones are for nobody."""
        self.staged: npt.NDArray[np.int64] = part(np.int64, ranks)
        """Tickets below this have their bytes here, until..."""
        self.done: npt.NDArray[np.int64] = part(np.int64, ranks)
        """...the rank sets this above them."""
        self.asked: npt.NDArray[np.int64] = part(np.int64, ranks)
        """Of each rank, a ticket that somebody waits for."""
        self.settled: npt.NDArray[np.int64] = part(np.int64, 1)
        """How manieth window the cache has decided all of what it keeps."""
        self.failed: npt.NDArray[np.int64] = part(np.int64, 2)
        """Tickets below the first number that are not staged will never be; the second is the length of the message."""
        self.offset: npt.NDArray[np.int64] = part(np.int64, n)
        self.message: npt.NDArray[np.uint8] = part(np.uint8, MESSAGE)
        self.state: npt.NDArray[np.uint8] = part(np.uint8, n)
        self.data = memoryview(whole)[_front(n, ranks) :]

    def fail(self, text: str, before: int | None = None) -> None:
        """Tell those who wait for a ticket `before` this one, or of a window that has begun, that it will not come."""
        words = text.encode()[:MESSAGE]
        self.message[: len(words)] = np.frombuffer(words, dtype=np.uint8)
        self.failed[1] = len(words)
        self.failed[0] = int(self.first.max()) + (1 << SERIAL) if before is None else before

    @property
    def failure(self) -> str:
        return self.message[: int(self.failed[1])].tobytes().decode(errors="replace")

    def counts(self) -> dict[str, int]:
        return dict(zip(COUNTERS, self.counters.tolist(), strict=True))

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Which samples the cache holds, as far as the plan was worked off; bool [n]."""
        return (self.state & KEPT) > 0


def _front(n: int, ranks: int) -> int:
    """Bytes before the samples', in whole pages."""
    size = 8 * (len(COUNTERS) + 4 * ranks + 3 + n) + MESSAGE + n
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _anonymous(size: int) -> int:
    """A file without a name, in memory; only pages that are written to take room."""
    if sys.platform == "linux":
        fd = os.memfd_create("salience")
    else:
        fd, name = tempfile.mkstemp(prefix="salience-")
        os.unlink(name)
    os.ftruncate(fd, size)
    return fd
