"""What the processes of a node share: counters, where each sample lies, and the bytes themselves.

One piece of shared memory (`salience.memory`) holds it all.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.memory import Memory, fence

ABSENT, WHOLE, BROKEN = 0, 1, 2
"""States of a sample: not here, its bytes are here, here is only what is wrong with it."""
KEPT_FLAG = 4
"""Flag beside the state: the cache is going to keep the sample."""

COUNTERS = (
    "samples", "bytes",  # delivered by the plan
    "hits", "hit_bytes",  # of them, resident when their turn came
    "plain_bytes",  # what the store would have sent without a cache
    "bound_bytes",  # what any cache of this size would have had to fetch
    "fetched_samples", "bytes_used", "bytes_sent", "requests", "retried", "hedged",  # what was asked of the store
    "disk_hits", "disk_bytes", "redis_hits", "redis_bytes",
    "horizon", "resident_bytes", "squeezed",  # bytes read ahead at most, bytes kept, samples dropped for want of room
)  # fmt: skip
MAX_ERROR_BYTES = 2048
"""Most bytes of an error message."""
SERIAL_SHIFT = 32
"""Tickets are (serial number of the window << SERIAL_SHIFT) + position in it, so that no ticket is used twice."""


@dataclass(frozen=True, slots=True)
class SharedToken:
    """What makes a `Shared` of a piece of memory."""

    memory: Memory
    n: int
    ranks: int
    capacity: int


class Shared:
    """The memory, as arrays. `offset` and `state` say where sample i lies in `data`."""

    def __init__(self, n: int, ranks: int, capacity: int, memory: Memory | None = None) -> None:
        """`memory` has `shared_bytes(n, ranks, capacity)` bytes; None = memory of its own."""
        self.__setstate__(SharedToken(memory or Memory(shared_bytes(n, ranks, capacity)), n, ranks, capacity))

    def __getstate__(self) -> SharedToken:
        return self.token

    def __setstate__(self, token: SharedToken) -> None:
        self.token = token
        memory, n, ranks = token.memory, token.n, token.ranks
        start = 0

        def part(dtype: Any, count: int) -> npt.NDArray[Any]:
            nonlocal start
            array = memory.array(dtype, count, start)
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
        """Serial number of the last window for which the cache has decided everything that it keeps."""
        self.failed: npt.NDArray[np.int64] = part(np.int64, 2)
        """Tickets below the first number that are not staged will never be; the second is the length of the message."""
        self.offset: npt.NDArray[np.int64] = part(np.int64, n)
        self.message: npt.NDArray[np.uint8] = part(np.uint8, MAX_ERROR_BYTES)
        self.state: npt.NDArray[np.uint8] = part(np.uint8, n)
        self.data = memoryview(memory.buffer)[_front(n, ranks) : _front(n, ranks) + token.capacity]

    def fail(self, text: str, before: int | None = None) -> None:
        """Tell those who wait for a ticket `before` this one, or of a window that has begun, that it will not come."""
        words = text.encode()[:MAX_ERROR_BYTES]
        self.message[: len(words)] = np.frombuffer(words, dtype=np.uint8)
        self.failed[1] = len(words)
        fence()  # the words before the number that says they are there
        self.failed[0] = int(self.first.max()) + (1 << SERIAL_SHIFT) if before is None else before

    @property
    def failure(self) -> str:
        fence()
        return self.message[: int(self.failed[1])].tobytes().decode(errors="replace")

    def counts(self) -> dict[str, int]:
        return dict(zip(COUNTERS, self.counters.tolist(), strict=True))

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Which samples the cache holds, as far as the plan was worked off; bool [n]."""
        fence()  # behind the number that says how far
        return (self.state & KEPT_FLAG) > 0


def shared_bytes(n: int, ranks: int, capacity: int) -> int:
    """Bytes of memory for all of it."""
    return _front(n, ranks) + capacity


def _front(n: int, ranks: int) -> int:
    """Bytes before the samples', in whole pages."""
    size = 8 * (len(COUNTERS) + 4 * ranks + 3 + n) + MAX_ERROR_BYTES + n
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
