"""The memory that the processes of a node share: counters, the position of each sample, and the bytes themselves.

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
"""States of a sample in memory: absent, its bytes, or the reason why it is broken."""
KEPT_FLAG = 4
"""Flag beside the state: the cache keeps the sample."""

TIERS = ("disk", "redis")
"""Names of the tiers between memory and the store, each with counters of its own."""
STORE_COUNTS = ("bytes_used", "bytes_sent", "requests", "retried", "hedged")
"""Counters of requests to the store, as in `salience.feed.reads.Counts`."""
COUNTERS = (
    "samples", "bytes",  # delivered by the plan
    "hits", "hit_bytes",  # of them, resident when their turn came
    "plain_bytes",  # what the store would have sent without a cache
    "bound_bytes",  # what any cache of this size would have had to fetch
    "fetched_samples", *STORE_COUNTS,
    *(f"{tier}_{what}" for tier in TIERS for what in ("hits", "bytes")),
    "horizon", "resident_bytes", "squeezed",  # bytes read ahead at most, bytes kept, samples dropped for want of room
)  # fmt: skip
MAX_ERROR_BYTES = 2048
"""Maximum number of bytes of an error message."""
SERIAL_SHIFT = 32
"""Tickets are (serial number of the window << SERIAL_SHIFT) + position in it, so that no ticket is used twice."""


@dataclass(frozen=True, slots=True)
class SharedToken:
    """What another process needs to open a `Shared`."""

    memory: Memory
    n: int
    ranks: int
    capacity: int


class Shared:
    """The memory as arrays. `offset` and `state` say where sample i is in `data`."""

    def __init__(self, n: int, ranks: int, capacity: int, memory: Memory | None = None) -> None:
        """`memory` has `shared_bytes(n, ranks, capacity)` bytes; None = a new block."""
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
        """Per rank, the ticket of the first batch of its window; older tickets are void."""
        self.staged: npt.NDArray[np.int64] = part(np.int64, ranks)
        """Per rank, batches with tickets below this have all their bytes in memory."""
        self.done: npt.NDArray[np.int64] = part(np.int64, ranks)
        """Per rank, set by the rank: it no longer needs the bytes of batches with tickets below this."""
        self.asked: npt.NDArray[np.int64] = part(np.int64, ranks)
        """Per rank, a ticket that a worker waits for."""
        self.settled: npt.NDArray[np.int64] = part(np.int64, 1)
        """Serial number of the last window for which the cache has decided what it keeps."""
        self.failed: npt.NDArray[np.int64] = part(np.int64, 2)
        """Two numbers: tickets below the first that are not staged yet have failed; the length of the message."""
        self.offset: npt.NDArray[np.int64] = part(np.int64, n)
        self.message: npt.NDArray[np.uint8] = part(np.uint8, MAX_ERROR_BYTES)
        self.state: npt.NDArray[np.uint8] = part(np.uint8, n)
        self.data = memoryview(memory.buffer)[_front(n, ranks) : _front(n, ranks) + token.capacity]

    def fail(self, text: str, before: int | None = None) -> None:
        """Fail all tickets below `before` that are not staged; None = those of every window that has begun."""
        words = text.encode()[:MAX_ERROR_BYTES]
        self.message[: len(words)] = np.frombuffer(words, dtype=np.uint8)
        self.failed[1] = len(words)
        fence()  # the message before the number that announces it
        self.failed[0] = int(self.first.max()) + (1 << SERIAL_SHIFT) if before is None else before

    @property
    def failure(self) -> str:
        fence()
        return self.message[: int(self.failed[1])].tobytes().decode(errors="replace")

    def counts(self) -> dict[str, int]:
        return dict(zip(COUNTERS, self.counters.tolist(), strict=True))

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Samples that the cache keeps, as of the last batch that was staged, bool [n]."""
        fence()  # read after `settled`
        return (self.state & KEPT_FLAG) > 0


def shared_bytes(n: int, ranks: int, capacity: int) -> int:
    """Bytes of memory needed in total."""
    return _front(n, ranks) + capacity


def _front(n: int, ranks: int) -> int:
    """Bytes before the samples, in whole pages."""
    size = 8 * (len(COUNTERS) + 4 * ranks + 3 + n) + MAX_ERROR_BYTES + n
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
