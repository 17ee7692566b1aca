"""How a worker gets the samples of its batch: from memory, or assigned to be decoded, so that each is decoded once.

worker  take ids          feed  chunk: some are here in your form, some are yours to decode
worker  made sizes        feed  places: where to put what you decoded; -1 = nobody needs it
worker  more (written)    feed  chunk: the next ones, as they arrive, until the batch is complete
worker  rest              (what it still held is released)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from salience.feed.sharing.demand import Demand
from salience.feed.sharing.peers import Worker
from salience.feed.sharing.pool import RAW, Key, Pool

CHUNK = 8
"""Number of samples that a worker is assigned at a time, if others may decode too."""
CLAIM_SECONDS = 20.0
"""After this many seconds, a claimed sample is assigned to a second worker too."""


class Handing:
    """Claims, pins, and who waits for which sample."""

    def __init__(self, pool: Pool, demand: Demand, fetch: Callable[[list[int]], None]) -> None:
        self._pool, self._demand, self._fetch = pool, demand, fetch
        self._waiters: dict[int, set[Worker]] = {}
        """Sample -> the workers that lack it for their batch."""
        self._claimed: dict[Key, Worker] = {}
        self.broken: dict[int, str] = {}
        self.dirty: set[Worker] = set()
        """Workers for which there may be news."""
        self.published = 0
        """Number of samples that were decoded and put into memory."""
        self.sizes: dict[int, tuple[int, int]] = {}
        """Form -> total bytes and number of the decoded samples."""

    # --- what a worker says ---

    def take(self, worker: Worker, serial: int, number: int, ids: Iterable[int]) -> None:
        """The worker begins a batch."""
        job = worker.job
        self.forget(worker)
        worker.serial, worker.number, worker.failed = serial, number, ""
        worker.pending = dict.fromkeys(ids)
        worker.available = dict(worker.pending)
        for i in worker.pending:
            self._waiters.setdefault(i, set()).add(worker)
            job.samples += 1
            job.hits += self._pool.ready(job.plan.form, i) is not None
        if serial == job.serial and number < len(job.plan.batches):
            job.plan.take(number, time.monotonic())
        self._fetch([i for i in worker.pending if self._absent(job.plan.form, i)])
        self.listen(worker)

    def made(self, worker: Worker, ids: list[int], sizes: list[int], marks: list[int]) -> list[int]:
        """The worker has decoded samples; returns where to put each, or -1. A size of -1 means that it cannot be shared."""
        form, places = worker.job.plan.form, list[int]()
        for i, size, mark in zip(ids, sizes, marks, strict=True):
            self._unclaim(worker, (form, i))
            self._got(worker, i)
            worker.job.decoded += 1
            place = -1
            if size >= 0 and self._pool.get(form, i) is None:
                total, count = self.sizes.get(form, (0, 0))
                self.sizes[form] = total + size, count + 1
                soon = None if self._waiters.get(i) else self._demand.soon(i, form)
                entry = self._pool.reserve(form, i, size, soon)
                if entry is not None:
                    entry.print, place = mark, entry.offset
                    worker.filling.add((form, i))
            if place < 0:
                self.news(i)
            places.append(place)
        return places

    def written(self, worker: Worker, ids: Iterable[int]) -> None:
        """The worker's decoded samples are in memory."""
        form = worker.job.plan.form
        for i in ids:
            if (form, i) in worker.filling:
                worker.filling.discard((form, i))
                self._pool.filled(form, i)
                self.published += 1
                self._leave_bytes(i)
                self.news(i)

    def copied(self, worker: Worker) -> None:
        """The worker has copied the samples it was shown."""
        for form, i in worker.pinned:
            entry = self._pool.get(form, i)
            if entry is not None:
                entry.pins -= 1
        worker.pinned = []

    def listen(self, worker: Worker) -> None:
        """The worker waits for a chunk."""
        worker.listening, worker.since = True, time.monotonic()
        self.dirty.add(worker)

    def forget(self, worker: Worker) -> None:
        """The worker has its batch, or is gone: release everything held for it."""
        self.copied(worker)
        for key in [*worker.claims]:
            self._unclaim(worker, key)
            self.news(key[1])
        for form, i in worker.filling:
            self._pool.drop(form, i)
            self.news(i)
        worker.filling.clear()
        for i in worker.pending:
            self._leave_waiting(worker, i)
        worker.pending, worker.available, worker.listening = {}, {}, False

    # --- what happens to samples ---

    def news(self, i: int) -> None:
        """There is news of a sample: workers that wait for it must check."""
        for worker in self._waiters.get(i, ()):
            worker.available[i] = None
            self.dirty.add(worker)

    def lost(self, i: int, why: str) -> None:
        """A sample cannot be fetched."""
        for worker in self._waiters.get(i, ()):
            worker.failed = why
            self.dirty.add(worker)

    def overdue(self, now: float) -> None:
        """Assign samples that were claimed long ago to other workers too."""
        for (_, i), holder in [*self._claimed.items()]:
            if now - min(holder.claims.values(), default=now) > CLAIM_SECONDS:
                self.news(i)

    def wanted(self, i: int) -> bool:
        """True if a worker waits for the sample."""
        return i in self._waiters

    # --- answers ---

    def answer(self, worker: Worker, *, alone: bool) -> bool:
        """Send the next chunk if there is one; False if there is not."""
        if not worker.listening:
            return True
        if worker.failed:
            self._say(worker, "chunk", {"failed": worker.failed})
            return True
        form, now = worker.job.plan.form, time.monotonic()
        ready, claims, broken, absent = list[int](), list[int](), dict[str, str](), list[int]()
        for i in [*worker.available]:
            if i not in worker.pending:
                del worker.available[i]
            elif self._pool.ready(form, i) is not None:
                ready.append(i)
            elif i in self.broken:
                broken[str(i)] = self.broken[i]
            elif form != RAW and self._pool.ready(RAW, i) is not None:
                if self._may_claim((form, i), now):
                    claims.append(i)
                else:
                    del worker.available[i]  # there will be news of it
            else:
                if self._absent(form, i):
                    absent.append(i)
                del worker.available[i]
        if absent:
            self._fetch(absent)
        whole = len(ready) + len(broken) + len(claims) >= len(worker.pending)
        if not claims and not whole and not broken:
            return False  # what only has to be copied is copied at once, when all of it is there
        if not whole and len(claims) < CHUNK and now - worker.since < 0.01:
            return False
        self._hand_over(worker, ready, claims[: None if alone else CHUNK], broken)
        return True

    def _hand_over(self, worker: Worker, ready: list[int], claims: list[int], broken: dict[str, str]) -> None:
        form, now = worker.job.plan.form, time.monotonic()
        rows, work = list[int](), list[int]()
        for i in ready:
            entry = self._pool.ready(form, i)
            assert entry is not None
            entry.pins += 1
            worker.pinned.append((form, i))
            rows += [i, entry.offset, entry.size, entry.print]
            self._got(worker, i)
        for i in claims:
            entry = self._pool.ready(RAW, i)
            assert entry is not None
            entry.pins += 1
            worker.claims[form, i] = now
            self._claimed[form, i] = worker
            worker.available.pop(i, None)
            work += [i, entry.offset, entry.size]
        for i in map(int, broken):
            self._got(worker, i)
        self._say(worker, "chunk", {"broken": broken}, ready=rows, claims=work)

    def _absent(self, form: int, i: int) -> bool:
        """True if a sample is neither in memory nor on its way there."""
        return self._pool.get(RAW, i) is None and self._pool.get(form, i) is None

    def _say(self, worker: Worker, kind: str, words: dict[str, object], **arrays: list[int]) -> None:
        worker.listening = False
        worker.peer.tell(kind, words, **arrays)

    def _may_claim(self, key: Key, now: float) -> bool:
        holder = self._claimed.get(key)
        return holder is None or now - holder.claims.get(key, now) > CLAIM_SECONDS

    def _got(self, worker: Worker, i: int) -> None:
        """The worker has the sample, and its job does not need it again for this batch."""
        if i in worker.pending:
            del worker.pending[i]
            worker.available.pop(i, None)
            self._leave_waiting(worker, i)
            if worker.serial == worker.job.serial:
                worker.job.plan.handed(i, worker.number)

    def _leave_waiting(self, worker: Worker, i: int) -> None:
        waiting = self._waiters.get(i)
        if waiting is not None:
            waiting.discard(worker)
            if not waiting:
                del self._waiters[i]

    def _unclaim(self, worker: Worker, key: Key) -> None:
        """Withdraw the worker's claim to decode this sample."""
        if worker.claims.pop(key, None) is None:
            return
        if self._claimed.get(key) is worker:
            del self._claimed[key]
        entry = self._pool.get(RAW, key[1])
        if entry is not None:
            entry.pins -= 1

    def _leave_bytes(self, i: int) -> None:
        """Drop the bytes of a sample once every form in use has it."""
        entry = self._pool.get(RAW, i)
        if entry is None or entry.pins or not entry.ready:
            return
        if all(self._pool.get(form, i) is not None for form in self._demand.forms()):
            self._pool.drop(RAW, i)
