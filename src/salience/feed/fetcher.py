"""Fetches samples from the nearest tier that has them, otherwise from the store, and stores them in nearer tiers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.errors import SalienceError
from salience.feed.reads import Broken, Reader
from salience.feed.shared import TIERS
from salience.feed.tiers import Tier

MAX_WAITING_WRITES = 64 * 1024 * 1024
"""Maximum number of bytes waiting to be written to tiers; further samples are not written."""
LAST_WRITES = 3.0
"""Maximum seconds for waiting writes at the end of a run."""
MIN_ARRIVALS_FOR_BANDWIDTH = 8
"""Number of samples that must have arrived for a bandwidth estimate."""


class Fetcher:
    """Starts reads and reports each sample: `arrived(i, data)` on arrival, or `lost(ids, why)` if it cannot be fetched."""

    def __init__(
        self,
        reader: Reader,
        tiers: Sequence[Tier],
        sizes: npt.NDArray[np.int64],
        arrived: Callable[[int, bytes | Broken], None],
        lost: Callable[[Sequence[int], str], None],
    ) -> None:
        self.reader, self.tiers, self._sizes, self._arrived, self._lost = reader, tiers, sizes, arrived, lost
        self._tier_counts = {f"{tier}_{what}": 0 for tier in TIERS for what in ("hits", "bytes")}
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=512)
        """Arrival time and bytes of the last samples from the store."""
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="salience-tiers") if tiers else None
        self._reads: set[asyncio.Task[None]] = set()
        self._writes: set[asyncio.Task[None]] = set()
        self._writing = 0

    def start(self, ids: list[int]) -> None:
        """Fetch these samples in the background."""
        if ids:
            _start(self._fetch(ids), self._reads)

    def link(self) -> tuple[float, float]:
        """Recent bytes per second, and seconds for an answer that does not have to queue."""
        latency = self.reader.latency()
        if len(self._arrivals) < MIN_ARRIVALS_FOR_BANDWIDTH:
            return 0.0, latency
        (begin, _), (end, _) = self._arrivals[0], self._arrivals[-1]
        return sum(size for _, size in self._arrivals) / max(end - begin, 1e-3), latency

    def counts(self) -> dict[str, int]:
        """Requests to the store, and hits in the tiers."""
        store = asdict(self.reader.counts)
        return {"fetched_samples": store.pop("samples"), **store, **self._tier_counts}

    async def close(self) -> None:
        """Cancel reads and give writes a few seconds to finish."""
        for task in self._reads:
            task.cancel()
        if self._writes:
            await asyncio.wait(self._writes, timeout=LAST_WRITES)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for tier in self.tiers:
            tier.close()

    async def _fetch(self, ids: list[int]) -> None:
        loop = asyncio.get_running_loop()
        try:
            for k, tier in enumerate(self.tiers):
                if not ids:
                    return
                found = await loop.run_in_executor(self._pool, tier.get, ids)
                found = {i: data for i, data in found.items() if len(data) == self._sizes[i]}
                self._tier_counts[f"{tier.name}_hits"] += len(found)
                self._tier_counts[f"{tier.name}_bytes"] += sum(map(len, found.values()))
                for i, data in found.items():
                    self._arrived(i, data)
                self._write(self.tiers[:k], found)
                ids = [i for i in ids if i not in found]
            await self.reader.stream(ids, self._from_store)
        except SalienceError as error:
            self._lost(ids, str(error))
        except Exception as error:  # anything else must not leave the workers waiting
            self._lost(ids, f"The feeder failed: {type(error).__name__}: {error}")

    def _from_store(self, i: int, data: bytes | Broken) -> None:
        self._arrivals.append((time.monotonic(), 0 if isinstance(data, Broken) else len(data)))
        self._arrived(i, data)
        if isinstance(data, bytes):
            self._write(self.tiers, {i: data})

    def _write(self, tiers: Sequence[Tier], found: Mapping[int, bytes]) -> None:
        """Write samples to tiers, in threads; skip them if the tiers cannot keep up."""
        size = sum(map(len, found.values()))
        if not tiers or not found or self._writing + size > MAX_WAITING_WRITES:
            return
        self._writing += size
        loop, pool = asyncio.get_running_loop(), self._pool

        async def write() -> None:
            try:
                for tier in tiers:
                    await loop.run_in_executor(pool, tier.put, found)
            finally:
                self._writing -= size

        _start(write(), self._writes)


def _start(work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> None:
    task = asyncio.ensure_future(work)
    among.add(task)
    task.add_done_callback(among.discard)
