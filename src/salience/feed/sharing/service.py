"""The process of a shared feed: it reads for all jobs on a node, in the order of the union of their plans.

It runs none of their code: the job that needs a sample first decodes it and puts the result into memory for the others
(`handing`). Claims and pins belong to a connection and end with it, so that nothing is held by a process that has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from salience._version import __version__
from salience.feed.fetcher import Fetcher
from salience.feed.ranges import Neighbours
from salience.feed.reads import Broken, Reader
from salience.feed.sharing.config import FeedConfig
from salience.feed.sharing.demand import Demand, JobPlan
from salience.feed.sharing.handing import Handing
from salience.feed.sharing.peers import Job, Peer, Worker, user_of, watch_end
from salience.feed.sharing.pool import RAW, Pool
from salience.feed.sharing.wire import Message, read_message
from salience.feed.tiers import Tier
from salience.memory import Memory

TICK_SECONDS = 0.05
"""Seconds between two checks of which job waits for which."""
REQUESTS_AT_ONCE = 8
"""Number of requests assumed in flight when their size is chosen."""
PACKAGE_BYTES = 256 * 1024
"""Size of a request with neighbours that are needed later."""


class Service:
    """Serves jobs and workers over connections; `run` ends when told to, or when there were no jobs for a while."""

    def __init__(self, config: FeedConfig, identity: str, reader: Reader, tiers: Sequence[Tier]) -> None:
        self.config, self.identity, self.index = config, identity, reader.index
        self.demand = Demand(len(reader.index), config.pace_ratio)
        self.memory = Memory(config.capacity)
        self._mean_bytes = float(reader.index.size.mean()) if len(reader.index) else 1.0
        self._data = memoryview(self.memory.buffer)
        self.pool = Pool(config.capacity, config.budget, self.demand)
        self.fetcher = Fetcher(reader, tiers, reader.index.size, self._arrived, self._lost)
        self.handing = Handing(self.pool, self.demand, self._fetch)
        self.jobs: dict[int, Job] = {}
        self._workers: set[Worker] = set()
        self._forms: dict[str, int] = {"": RAW}
        """Signature of a decode -> number of its form."""
        self._along = Neighbours(reader.index, gap=reader.gap, most=PACKAGE_BYTES)
        self._starved: dict[int, None] = {}
        """Samples that a worker waits for but for which there was no memory."""
        self._last_job = 0
        self._wake, self._over = asyncio.Event(), asyncio.Event()
        self._timed = False
        self._last_used = time.monotonic()

    async def run(self, path: str, begun: Callable[[], None]) -> None:
        """Serve on this socket; `begun` is called once jobs can connect."""
        server = await asyncio.start_unix_server(self._connected, path)
        os.chmod(path, 0o600)
        begun()
        while not self._over.is_set():
            self._wake.clear()
            self._look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_SECONDS if self.jobs else 0.5)
            idle = time.monotonic() - self._last_used
            if self.jobs:
                self._last_used = time.monotonic()
            elif self.config.linger is not None and idle > self.config.linger:
                break
        server.close()
        with contextlib.suppress(OSError):
            os.unlink(path)
        await self.fetcher.close()

    def stop(self) -> None:
        """Stop, from any thread."""
        self.fetcher.reader.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        for job in self.jobs.values():
            job.peer.tell("over")
        self._over.set()
        self._wake.set()

    # --- connections ---

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(writer)
        try:
            if user_of(writer) in (None, os.getuid()):
                hello = await read_message(reader)
                await {"job": self._job, "worker": self._worker, "ask": self._asked}[str(hello.words["role"])](
                    hello, peer, reader
                )
        except (asyncio.IncompleteReadError, ConnectionError, KeyError, ValueError):
            pass  # it is gone, or speaks no language of ours
        finally:
            writer.close()

    async def _job(self, hello: Message, peer: Peer, reader: asyncio.StreamReader) -> None:
        refusal = self._refusal(hello)
        if refusal:
            return peer.tell("refused", {"text": refusal})
        self._last_job += 1
        form = self._forms.setdefault(str(hello.words["form"]), len(self._forms))
        plan = JobPlan(len(self.index), form)
        job = Job(
            self._last_job,
            peer,
            int(hello.words["pid"]),
            str(hello.words["name"]),
            plan,
            ahead=int(hello.words["ahead"]),
        )
        self.jobs[job.number], self.demand.jobs[job.number] = job, plan
        peer.tell("welcome", {"job": job.number})
        stop = watch_end(job.pid, lambda: self._left(job))
        try:
            while True:
                message = await read_message(reader)
                job.heard = time.monotonic()
                if message.kind == "plan":
                    self._planned(job, message)
                elif message.kind == "counts":
                    peer.tell("counts", self._counts(job))
                await peer.writer.drain()
        finally:
            stop()
            self._left(job)

    async def _worker(self, hello: Message, peer: Peer, reader: asyncio.StreamReader) -> None:
        job = self.jobs.get(int(hello.words["job"]))
        if job is None:
            return peer.tell("refused", {"text": "this job is not known here"})
        peer.tell("welcome", asdict(self.memory.token))
        worker, handing = Worker(peer, job), self.handing
        self._workers.add(worker)
        try:
            while True:
                message = await read_message(reader)
                handing.copied(worker)
                handing.written(worker, message.array("written").tolist())
                if message.kind == "take":
                    ids = message.array("ids")
                    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self.index):
                        return
                    handing.take(worker, int(message.words["serial"]), int(message.words["number"]), ids.tolist())
                elif message.kind == "made":
                    columns = (message.array(name).tolist() for name in ("ids", "sizes", "prints"))
                    peer.tell("places", places=handing.made(worker, *columns))
                elif message.kind == "more":
                    handing.listen(worker)
                elif message.kind == "rest":
                    handing.forget(worker)
                self._flush()
                self._wake.set()
        finally:
            self._workers.discard(worker)
            handing.forget(worker)
            handing.dirty.discard(worker)
            self._flush()

    async def _asked(self, hello: Message, peer: Peer, reader: asyncio.StreamReader) -> None:
        if hello.words["what"] == "stop":
            self._end()
        elif hello.words["what"] == "fits":
            peer.tell("fits", {"text": self._refusal(hello)})
        peer.tell("status", self.status())
        await peer.writer.drain()

    def _refusal(self, hello: Message) -> str:
        """The reason why a job cannot use this feed; empty if it can."""
        name, words = self.config.name, hello.words
        if words["version"] != __version__:
            return (
                f"The feed {name!r} is run by salience {__version__} and this job is salience {words['version']}: give this "
                f"job's feed another name, or stop that one when its jobs are done (`salience feed stop {name}`)."
            )
        if words["identity"] != self.identity:
            return (
                f"There is a feed {name!r} on this machine already, and it reads other data ({self.config.url}): give this "
                f"job's feed another name, or stop that one when its jobs are done (`salience feed stop {name}`)."
            )
        return ""

    def _planned(self, job: Job, message: Message) -> None:
        """A job begins a window."""
        ends = message.array("ends").tolist()
        batches = np.split(message.array("ids"), ends[:-1]) if ends else []
        worth = message.array("importance")
        job.serial, job.window, job.waited = int(message.words["serial"]), int(message.words["window"]), 0.0
        job.plan.begin(batches, str(message.words["group"]), (worth / 1e6).astype(np.float32) if len(worth) else None)
        if not self.demand.joined(job.plan, self._most_lead(job)):
            self._tell_demoted(job)
        self.handing.broken.clear()  # what is broken is fetched again, once per window
        self._wake.set()

    def _left(self, job: Job) -> None:
        """A job has ended: release what it held."""
        if self.jobs.pop(job.number, None) is None:
            return
        self.demand.jobs.pop(job.number, None)
        for worker in [one for one in self._workers if one.job is job]:
            self.handing.forget(worker)
            worker.peer.writer.close()
        self._wake.set()

    # --- reading ---

    def _look(self) -> None:
        """Read ahead for every job as far as allowed, and answer workers that wait."""
        self.handing.overdue(time.monotonic())
        self._fetch([i for i in self._starved if self.handing.wanted(i)])
        held = self._held()
        while (plan := self.demand.next_to_stage(self._ahead, held)) is not None:
            if not self._stage(plan):
                break
        self._flush()

    def _ahead(self, plan: JobPlan) -> int:
        """Bytes to read ahead for a job: four times the bytes in flight on a busy link, and what its workers hold."""
        bandwidth, latency = self.fetcher.link()
        room = (self.config.capacity - self.config.budget) // max(1, len(self.jobs))
        job = next(one for one in self.jobs.values() if one.plan is plan)
        least = (job.ahead + 1) * int(plan.batch_size * self._mean_bytes)
        return int(min(max(room, least), max(least, 4 * bandwidth * latency)))

    def _stage(self, plan: JobPlan) -> bool:
        """Fetch the missing samples of a job's next batch; False if there is no memory for them now."""
        pool, number = self.pool, plan.staged
        lacking = [
            i for i in plan.batches[number].tolist() if pool.get(plan.form, i) is None and pool.get(RAW, i) is None
        ]
        got = list[int]()
        for i in dict.fromkeys(lacking):
            if pool.reserve(RAW, i, int(self.index.size[i]), self.demand.soon(i, None)) is None:
                break
            got.append(i)
        enough = len(got) == len(set(lacking))
        if enough:
            plan.staged += 1
            plan.owed[number] = sum(int(self.index.size[i]) for i in got)
            got += self._neighbours(got)
        self.fetcher.start(got)
        return enough

    def _neighbours(self, ids: list[int]) -> list[int]:
        """Neighbours in their shards that are needed later, as far as there is unused memory.

        None if requests for single samples keep the link busy: reading more would delay this batch.
        """
        along = list[int]()
        bandwidth, latency = self.fetcher.link()
        if self._mean_bytes * REQUESTS_AT_ONCE > bandwidth * latency:
            return along
        for i in ids:
            for j in self._along.beside(i, self._lacks):
                if (
                    self.pool.free < self.config.capacity // 8
                    or self.pool.reserve(RAW, j, int(self.index.size[j]), 0.0) is None
                ):
                    return along
                along.append(j)
        return along

    def _lacks(self, i: int) -> bool:
        """True if a job needs sample i and it is in memory in no form."""
        return any(plan.wants(i) and self.pool.get(plan.form, i) is None for plan in self.demand.jobs.values()) and (
            self.pool.get(RAW, i) is None
        )

    def _fetch(self, ids: Iterable[int]) -> None:
        """Fetch samples that a worker waits for."""
        now = list[int]()
        for i in ids:
            self._starved.pop(i, None)
            if self.pool.get(RAW, i) is not None:
                continue
            if self.pool.reserve(RAW, i, int(self.index.size[i])) is not None:
                now.append(i)
            elif self.pool.fits(int(self.index.size[i])):
                self._starved[i] = None
            else:
                self.handing.lost(i, "")
        self.fetcher.start(now)

    def _arrived(self, i: int, data: bytes | Broken) -> None:
        entry = self.pool.get(RAW, i)
        if entry is None or entry.ready:
            return
        if isinstance(data, Broken):
            self.handing.broken[i] = data.reason
            self.pool.drop(RAW, i)
        else:
            self._data[entry.offset : entry.offset + len(data)] = data
            self.pool.filled(RAW, i)
        self.handing.news(i)
        self._soon()

    def _lost(self, ids: Sequence[int], why: str) -> None:
        for i in ids:
            entry = self.pool.get(RAW, i)
            if entry is not None and not entry.ready:
                self.pool.drop(RAW, i)
                self.handing.lost(i, why)
        self._soon()

    # --- answering ---

    def _soon(self) -> None:
        """Answer in a moment, so that samples that arrive together are delivered together."""
        if not self._timed:
            self._timed = True
            asyncio.get_running_loop().call_later(0.003, self._flush_timed)

    def _flush_timed(self) -> None:
        self._timed = False
        self._flush()
        self._wake.set()

    def _flush(self) -> None:
        handing, held = self.handing, set(map(id, self._held()))
        alone = len(self.jobs) < 2
        waiting, handing.dirty = handing.dirty, set()
        for worker in waiting:
            if id(worker.job.plan) in held and worker.number >= worker.job.plan.taken - 1:
                handing.dirty.add(worker)
            elif not handing.answer(worker, alone=alone) and worker.available:
                handing.dirty.add(worker)
                self._soon()

    # --- who waits for whom ---

    def _most_lead(self, job: Job) -> float:
        """How many batches a job may be ahead of the slowest with the same plan: as many as fit into half of the memory."""
        total, count = self.handing.sizes.get(job.plan.form, (0, 0))
        mean = total / count if count else self._mean_bytes
        if mean * len(self.index) <= self.config.budget:
            return float("inf")  # everything stays: nobody has to wait
        return max(4.0 + job.ahead, 0.5 * self.config.budget / max(1.0, mean * job.plan.batch_size))

    def _held(self) -> list[JobPlan]:
        """Plans of jobs that wait for slower ones; the slowest is demoted once they have waited long enough."""
        held, now = list[JobPlan](), time.monotonic()
        for job in self.jobs.values():
            slow = self.demand.slowest(job.plan)
            if slow is None or self.demand.lead(job.plan) < self._most_lead(job):
                job.held_since = 0.0
                continue
            held_for = now - job.held_since if job.held_since else 0.0
            job.waited, job.plan.held, job.held_since = job.waited + held_for, job.plan.held + held_for, now
            if job.waited < self.config.patience:
                held.append(job.plan)
                continue
            slow.demoted, job.waited = True, 0.0
            self._tell_demoted(next(one for one in self.jobs.values() if one.plan is slow))
        return held

    def _tell_demoted(self, job: Job) -> None:
        job.peer.tell(
            "warning",
            {
                "text": f"This job is behind others with the same plan on the feed {self.config.name!r}, and they no longer "
                "wait for it: what memory does not hold any more is read and decoded again. A larger cache= avoids that."
            },
        )

    # --- in numbers ---

    def _counts(self, job: Job) -> dict[str, int]:
        """Counts of what this job asked for, and of what the feed has done for all jobs since it began."""
        return {"samples": job.samples, "hits": job.hits, "decoded": job.decoded, **self.fetcher.counts()}

    def status(self) -> dict[str, Any]:
        """The state of the feed, for `salience feed status`."""
        jobs = [
            {
                "pid": job.pid, "name": job.name, "window": job.window,
                "batch": job.plan.taken, "batches": len(job.plan.batches),
                "samples": job.samples, "hits": job.hits, "decoded": job.decoded, "demoted": job.plan.demoted,
                "silent": round(time.monotonic() - job.heard, 1),
            }
            for job in self.jobs.values()
        ]  # fmt: skip
        return {
            "name": self.config.name, "url": self.config.url, "pid": os.getpid(), "version": __version__,
            "cache": self.config.budget, "used": self.pool.used, "held": len(self.pool), "evicted": self.pool.evicted,
            "published": self.handing.published, "claims": sum(len(one.claims) for one in self._workers),
            "pins": sum(len(one.pinned) for one in self._workers), "jobs": jobs, **self.fetcher.counts(),
        }  # fmt: skip
