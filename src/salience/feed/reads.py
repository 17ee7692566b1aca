"""Reading samples from a store: neighbours in one request, slow requests hedged, and bytes checked."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from salience.errors import StoreError
from salience.feed import isolated
from salience.feed.index import Index, hasher
from salience.feed.ranges import coalesce
from salience.feed.retry import RetryPolicy, hedge_delay, may_hedge

if TYPE_CHECKING:
    from salience.feed.stores import Store

MISSING = "it is not there"
NO_RANGES = "the server does not answer range requests"
SERVE_RANGES = "Serve the files by one that does, such as nginx or an object store; Python's http.server does not."
"""Why a sample cannot be read from it, ever."""
MEASURED_REQUESTS = 128
"""Number of requests that the running median covers."""
MIN_REQUESTS_TO_HEDGE = 8
"""Minimum number of measured requests before one counts as slow."""


class ReadFailed(Exception):
    """A request and all its repetitions failed. `broken`: the object is at fault, not the connection."""

    def __init__(self, reason: str, *, broken: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.broken = reason, broken


@dataclass(frozen=True, slots=True)
class Broken:
    """A sample that cannot be read, with the reason."""

    reason: str


@dataclass(slots=True)
class Counts:
    """Requests to a store and the bytes it sent."""

    samples: int = 0
    """Samples that were asked for."""
    bytes_used: int = 0
    """Bytes of samples that were delivered."""
    bytes_sent: int = 0
    """Bytes of all complete answers, including gaps between samples, hedged requests and wrong bytes."""
    requests: int = 0
    """Requests, including hedged ones and those for wrong bytes, but not what obstore repeats by itself."""
    retried: int = 0
    """Samples that were asked for again because their bytes were wrong."""
    hedged: int = 0
    """Second requests sent because the first was slow."""

    def add(self, other: Counts) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True, slots=True)
class _Span:
    """A range of bytes of one object, and the samples in it."""

    path: str
    start: int
    stop: int
    ids: tuple[int, ...]


class _Live:
    """State that all reads of a process share: the event loop, free slots, and how long requests take."""

    def __init__(self, concurrency: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.slots = asyncio.Semaphore(concurrency)
        self.seconds: deque[tuple[float, int]] = deque(maxlen=MEASURED_REQUESTS)
        """Duration in seconds and bytes of the last requests."""
        self.sent = self.hedged = 0
        threading.Thread(target=_run, args=(self.loop,), name="salience-reads", daemon=True).start()
        weakref.finalize(self, _stop, self.loop, os.getpid())

    def slow_after(self, size: int, policy: RetryPolicy) -> float | None:
        """Seconds after which a request for `size` bytes is slow; None until enough were measured."""
        if len(self.seconds) < MIN_REQUESTS_TO_HEDGE:
            return None
        seconds, sizes = zip(*self.seconds, strict=True)
        return hedge_delay(size, statistics.median(seconds), statistics.median(sizes), policy)


class Reader:
    """Reads samples of an index from a store: `read(ids)` from any thread, after a fork, and in spawned workers.

    Requests run on an event loop in a thread, which each process starts when it first reads. At most `concurrency` are in
    flight at a time. Samples of a shard with at most `gap` bytes between them are fetched by one request of at most `longest`
    bytes. With `threads`, local files are read in threads.
    """

    def __init__(
        self,
        store: Store,
        index: Index,
        retry: RetryPolicy | None = None,
        *,
        concurrency: int = 32,
        gap: int = 64 * 1024,
        longest: int = 8 * 1024 * 1024,
        threads: bool = False,
    ) -> None:
        self.store, self.index, self.retry = store, index, retry or RetryPolicy()
        self.concurrency, self.gap, self.longest, self.threads = concurrency, gap, longest, threads
        self.counts = Counts()
        self._hash = hasher() if len(index) and bool(index.check.any()) else None
        self._live: dict[int, _Live] = {}  # by process
        self._apart: isolated.Isolated[Sequence[int], tuple[list[bytes | Broken], Counts]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        names = ("store", "index", "retry", "concurrency", "gap", "longest", "threads")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def for_feeder(self, workers: int, gap: int) -> Reader:
        """A reader for one process that reads for `workers` others, with smaller gaps, since bytes are scarce there."""
        return Reader(
            self.store, self.index, self.retry, concurrency=self.concurrency * max(1, workers),
            gap=gap, longest=self.longest, threads=True,
        )  # fmt: skip

    def read(self, ids: Sequence[int]) -> list[bytes | Broken]:
        """The bytes of each sample, or a Broken. Raises StoreError if the store cannot be reached."""
        wrong = [i for i in ids if not 0 <= i < len(self.index)]
        if wrong:
            raise IndexError(f"sample {wrong[0]} of {len(self.index)}")
        if self.store.far and isolated.needed():
            data, counts = self._beside(ids)
            self.counts.add(counts)
            return data
        return self._read_here(ids)

    def _beside(self, ids: Sequence[int]) -> tuple[list[bytes | Broken], Counts]:
        """Read in a separate process, so that this one can still fork loader workers."""
        if self._apart is None or not self._apart.alive:
            here = weakref.proxy(self)  # what the process holds must not keep this reader
            self._apart = isolated.Isolated[Sequence[int], tuple[list[bytes | Broken], Counts]](
                lambda ids: (here._read_here(ids), here.take_counts())
            )
        return self._apart(ids)

    def _read_here(self, ids: Sequence[int]) -> list[bytes | Broken]:
        future = asyncio.run_coroutine_threadsafe(self._read(sorted(set(ids))), self._here.loop)
        try:
            found = future.result()
        except BaseException:
            future.cancel()
            raise
        return [found[i] for i in ids]

    async def stream(self, ids: Sequence[int], got: Callable[[int, bytes | Broken], None]) -> None:
        """Read samples and pass each to `got` on arrival. Must be awaited inside `loop`."""

        async def one(span: _Span) -> None:
            for i, data in (await self._read_span(span)).items():
                self.counts.samples += 1
                self.counts.bytes_used += len(data) if isinstance(data, bytes) else 0
                got(i, data)

        spans = self._spans(sorted(set(ids)))
        for i in ids:
            if self.index.size[i] == 0:
                got(i, b"")
        tasks = [asyncio.ensure_future(one(span)) for span in spans]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which reads run in this process."""
        return self._here.loop

    def latency(self) -> float:
        """Seconds for an answer without queueing: the fastest tenth of the last requests."""
        seconds = [taken for taken, _ in self._here.seconds]
        return statistics.quantiles(seconds, n=10)[0] if len(seconds) > 1 else 0.0

    def take_counts(self) -> Counts:
        """Counts of this process since the last call."""
        taken, self.counts = self.counts, Counts()
        return taken

    @property
    def _here(self) -> _Live:
        process = os.getpid()
        if process not in self._live:
            self.counts = Counts()
            self._live.setdefault(process, _Live(self.concurrency))  # two threads may get here at once
        return self._live[process]

    async def _read(self, ids: list[int]) -> dict[int, bytes | Broken]:
        found: dict[int, bytes | Broken] = dict.fromkeys(ids, b"")
        spans = self._spans(ids)
        if not self.store.far:  # one after the other: local reads never wait, and tasks would cost more
            for span in spans:
                found.update(await self._read_span(span))
        else:
            tasks = [asyncio.ensure_future(self._read_span(span)) for span in spans]
            try:
                for part in await asyncio.gather(*tasks):
                    found.update(part)
            finally:
                for task in tasks:
                    task.cancel()
        self.counts.samples += len(found)
        self.counts.bytes_used += sum(len(data) for data in found.values() if isinstance(data, bytes))
        return found

    def _spans(self, ids: list[int]) -> list[_Span]:
        """The requests that fetch these samples; an empty sample needs none."""
        index, chosen = self.index, np.array(ids, dtype=np.int64)
        chosen = chosen[index.size[chosen] > 0]
        alone = chosen[index.shard[chosen] < 0]
        spans = [_Span(index.path(i), 0, int(index.size[i]), (i,)) for i in alone.tolist()]
        for shard in np.unique(index.shard[chosen][index.shard[chosen] >= 0]).tolist():
            inside = chosen[index.shard[chosen] == shard]
            inside = inside[np.argsort(index.offset[inside], kind="stable")]
            starts: list[int] = index.offset[inside].tolist()
            stops: list[int] = (index.offset[inside] + index.size[inside]).tolist()
            for run in coalesce(starts, stops, gap=self.gap, longest=self.longest):
                spans.append(
                    _Span(index.shards[shard], starts[run.start], max(stops[run]), tuple(inside[run].tolist()))
                )
        return spans

    async def _read_span(self, span: _Span) -> dict[int, bytes | Broken]:
        data = await self._fetch(span)
        found: dict[int, bytes | Broken] = {}
        if isinstance(data, Broken):  # which samples are broken must not depend on which ones were read together
            for i in span.ids:
                found.update({i: data} if len(span.ids) == 1 else await self._read_span(self._alone(span, i)))
            return found
        for i in span.ids:
            start = 0 if self.index.shard[i] < 0 else int(self.index.offset[i]) - span.start
            part = data[start : start + int(self.index.size[i])]
            found[i] = part if self._right(i, part) else await self._once_more(span, i)
        return found

    async def _once_more(self, span: _Span, i: int) -> bytes | Broken:
        """Request one sample with wrong bytes again: they may have been damaged on the way."""
        self.counts.retried += 1
        data = await self._fetch(self._alone(span, i))
        if isinstance(data, Broken) or self._right(i, data):
            return data
        return Broken("its bytes do not have the checksum of the index")

    def _alone(self, span: _Span, i: int) -> _Span:
        start = 0 if self.index.shard[i] < 0 else int(self.index.offset[i])
        return _Span(span.path, start, start + int(self.index.size[i]), (i,))

    def _right(self, i: int, data: bytes) -> bool:
        check = int(self.index.check[i])
        return not check or self._hash is None or self._hash(data).intdigest() == check

    async def _fetch(self, span: _Span) -> bytes | Broken:
        """One answer, or why the object is broken. Raises StoreError if the store does not answer by the deadline."""
        try:
            if not self.store.far:
                return await self._request(span)
            async with self._here.slots, asyncio.timeout(self.retry.deadline):
                return await self._hedged(span)
        except ReadFailed as failed:
            if failed.broken:
                return Broken(failed.reason)
            reason = failed.reason
        except TimeoutError:
            reason = "it took too long"
        advice = "Nothing is wrong with the run: go on from its last checkpoint when the store answers."
        if reason == NO_RANGES:
            advice = SERVE_RANGES
        raise StoreError(f"{span.path!r} in {self.store.url} cannot be read: {reason}. {advice}")

    async def _hedged(self, span: _Span) -> bytes:
        """One request, and a second one if it is slow; the first answer wins and the other request is cancelled."""
        tasks = [asyncio.ensure_future(self._request(span))]
        try:
            here = self._here
            slow_after = here.slow_after(span.stop - span.start, self.retry)
            if slow_after is not None:
                done, _ = await asyncio.wait(tasks, timeout=slow_after)
                if not done and may_hedge(here.hedged, here.sent, self.retry):
                    here.hedged += 1
                    self.counts.hedged += 1
                    tasks.append(asyncio.ensure_future(self._request(span)))
            waiting = set(tasks)
            while True:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.exception() is None or not waiting:
                        return task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _request(self, span: _Span) -> bytes:
        clock = asyncio.get_running_loop().time
        begin = clock()
        self._here.sent += 1
        self.counts.requests += 1
        ask = self.store.get_range(span.path, span.start, span.stop)
        data = await (asyncio.to_thread(asyncio.run, ask) if self.threads and not self.store.far else ask)
        self.counts.bytes_sent += len(data)
        if len(data) != span.stop - span.start:
            raise ReadFailed(f"it is cut off: {len(data)} bytes of {span.stop - span.start}", broken=True)
        self._here.seconds.append((clock() - begin, len(data)))
        return data


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, process: int) -> None:
    if process == os.getpid() and not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
