"""Feeding: samples on their way from a Source. The cache, what was read, and samples that are broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from salience.errors import ConfigError, DataError
from salience.feed.dataset import SourceDataset
from salience.feed.options import ReadingOptions
from salience.feed.reads import Counts
from salience.feed.source import Source
from salience.ledger import Ledger
from salience.plan import Plan, Shard, Trace
from salience.run.part import Batch, Part, Setup, Voice
from salience.select.fetching import Stock

if TYPE_CHECKING:
    from salience.feed.cache import Feed
    from salience.feed.sharing.job import JobFeed
    from salience.feed.sharing.shared import SharedFeed

Unread = Callable[[Plan], npt.NDArray[np.bool_] | None]
"""Visits of a plan that do not need the cache, bool [visits]; None = there are none."""


class Feeding(Part):
    """The data set's bytes, where it is a Source, and the account of broken samples of any data set."""

    name = "feeding"

    def __init__(
        self, setup: Setup, voice: Voice, dataset: Any, reading: ReadingOptions, shared: SharedFeed | None = None
    ) -> None:
        self._setup, self._voice, self._dataset, self._reading = setup, voice, dataset, reading
        self.shared = shared
        """The feed that this job shares with others; None = it has a cache of its own, or none."""
        self.source: Source | None = dataset.source if isinstance(dataset, SourceDataset) else None
        self.feed: Feed | JobFeed | None = None
        """The cache, or this job's end of a shared feed; None = every batch is read by its worker."""
        self.unread: npt.NDArray[np.bool_] | None = None
        """Visits of the next window that do not need the cache, bool [visits]; None = there are none. The Run sets it."""
        self.stages = False
        """True if the data set has stages, in which samples may turn out to be broken."""
        self.workers = 0
        """Worker processes of the DataLoader inside, which sets this."""
        self._rivals: Mapping[str, int] = {}
        """Bytes that other caches would have fetched, as of the last report."""
        self.broken: dict[int, str] = {}
        """Samples found broken so far, and why."""
        self._window = 0
        self.first_ticket: int | None = None
        """The ticket of the first batch still wanted in this window; None without a cache."""

    @property
    def in_use(self) -> bool:
        return self.source is not None or self.stages

    def set_cache(self, cache: int | str | None, workers: int) -> None:
        """Make a cache that serves up to `workers` workers, or with None drop it; only between two windows."""
        dataset = self._dataset
        if not isinstance(dataset, SourceDataset):
            name = type(dataset).__name__
            raise ConfigError(f"cache=, disk= and redis= are for a salience.Source, not for a {name}.")
        if self.feed is not None:
            self.feed.close()
        self.feed = dataset.handle = None
        if self.shared is not None:
            self.feed = self.shared.open(dataset.decode, workers=workers)
            dataset.handle = self.feed.handle
        elif cache is not None:
            from salience.feed.cache import Feed

            reading = self._reading
            self.feed = Feed(
                dataset.source, cache=cache, batch_size=self._setup.rank_batch, ranks=self._setup.ranks, workers=workers,
                policy=reading.cache_policy, disk=reading.disk, redis=reading.redis, views=reading.views,
            )  # fmt: skip
            dataset.handle = self.feed.handle

    def resize(self) -> None:
        """Make the cache anew, for batches of another size."""
        if self.feed is not None and self.shared is None:
            self.set_cache(self.feed.budget, self.feed.workers)

    @property
    def _frees_on_arrival(self) -> bool:
        """True if a batch that has arrived in this process no longer refers to the cache's memory."""
        return self.workers > 0 or not self._reading.views

    def enter_index(self, ledger: Ledger) -> None:
        """Enter into the ledger what the index says before anything is read: classes and sizes."""
        ranks = self._setup.ranks
        if self.source is None:
            return
        if ranks is None or ranks.leads_node:
            ledger.set_labels(self.source.labels)
            ledger.size[:] = np.minimum(self.source.sizes, np.iinfo(np.uint32).max)
        if ranks is not None:
            ranks.barrier()

    def stock(self) -> Stock | None:
        """Where the bytes of the samples are, the same on every rank; None where that is not known."""
        if self.feed is None or self.source is None:
            return None
        resident, index = self.feed.kept, self.source.index
        if self._setup.ranks is not None:  # every node has a cache of its own; plans go by that of the first
            self._setup.ranks.broadcast_array(resident)
        return Stock(resident=resident, shard=index.shard, offset=index.offset)

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Count what was asked of the Source."""
        if self.source is not None:
            self.source.stats.add(Counts(**counts))

    # --- a window ---

    def prepare(self, window: int, ledger: Ledger) -> None:
        self._agree_on_broken()

    def open(self, shard: Shard, done: frozenset[int]) -> None:
        self._window, self.first_ticket = shard.plan.window, None
        if self.feed is not None:
            self.feed.window(shard, set(done), self.unread)
            self.first_ticket = self.feed.ticket(0)

    def arrived(self, batch: Batch) -> None:
        """A batch is in this process: the cache gets its memory back, also where a probe holds the batch."""
        if self._frees_on_arrival:
            self._release(batch)

    def hand_over(self, batch: Batch) -> None:
        self.add_counts(batch.counts)
        for position, reason in batch.broken.items():
            i = int(batch.planned_ids[position])
            if i not in self.broken:
                self.broken[i] = reason
                self._voice.events.emit("broken", window=batch.window, id=i, name=self._name(i), reason=reason)
        if self._setup.ranks is None:
            self._check_broken(len(self.broken))

    def take_back(self, batch: Batch) -> None:
        if not self._frees_on_arrival:
            self._release(batch)

    def _release(self, batch: Batch) -> None:
        if self.feed is not None:
            for text in self.feed.delivered(batch.ticket):
                self._voice.warn(text)

    def close(self, *, finished: bool) -> None:
        self.first_ticket = None
        if finished:
            self._agree_on_broken()
        self._emit()

    def _emit(self) -> None:
        if self.source is None:
            return
        cached: dict[str, int] = {}
        if self.feed is not None:
            self.source.stats.add(self.feed.take_counts())
            cached = {**self.feed.counts(), **self._rivals}
        self._voice.events.emit(
            "feed", window=self._window, broken=len(self.broken), **asdict(self.source.stats), cache=cached
        )

    def compare(self, trace: Trace | None, unread: Unread | None) -> None:
        """Before a report: simulate what other caches would have fetched for the plans of `trace`, where one was recorded."""
        if self.feed is not None and trace is not None and self._setup.rank == 0:
            self._rivals = self.feed.rival_bytes(trace, unread or _all_read)
            self._emit()

    # --- broken samples ---

    def _agree_on_broken(self) -> None:
        """Check the number of broken samples over all ranks, so that they stop together and none waits for the others."""
        ranks = self._setup.ranks
        if ranks is not None and self.source is not None:
            self._check_broken(len({i for found in ranks.gather_objects(sorted(self.broken)) for i in found}))

    def _check_broken(self, count: int) -> None:
        if count > self._reading.max_broken * self._setup.n:
            raise DataError(
                f"{count} of {self._setup.n} samples are broken, more than max_broken = {self._reading.max_broken:g}:"
                f"{self._broken_lines(3)}\nRepair or remove them, or raise max_broken."
            )

    def _broken_lines(self, shown: int) -> str:
        lines = [f"\n  sample {i:>8} {self._name(i)!r}: {why}" for i, why in sorted(self.broken.items())[:shown]]
        return "".join(lines) + ("" if len(self.broken) <= shown else f"\n  and {len(self.broken) - shown} more")

    def _name(self, i: int) -> str:
        return "" if self.source is None else self.source.names[i]

    # --- in words, and saved ---

    def report(self) -> str:
        text = ""
        if self.source is not None:
            stats = self.source.stats
            text = (
                f"Read from {self.source.url}: {stats.bytes_sent:,} bytes in {stats.requests:,} requests for "
                f"{stats.bytes_used:,} bytes of samples; {stats.retried:,} with wrong bytes, {stats.hedged:,} hedged."
            )
        if self.feed is not None:
            text += f"\n{self.feed.summary(self._rivals)}"
        if self.broken:
            text += f"\n\nBroken samples, stood in for with weight 0: {len(self.broken):,}{self._broken_lines(8)}"
        return text.strip()

    def state_dict(self) -> dict[str, Any]:
        broken = self.broken
        if self._setup.ranks is not None and self.source is not None:
            broken = {i: why for part in self._setup.ranks.gather_objects([*broken.items()]) for i, why in part}
        state: dict[str, Any] = {"broken": {"ids": list(broken), "reasons": list(broken.values())}}
        if self.feed is not None:  # when the window in progress began, or now between two windows
            kept = np.flatnonzero(self.feed.kept) if self.first_ticket is None else self.feed.resident
            state["resident"] = torch.from_numpy(kept.astype(np.int64))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.broken = dict(zip(state["broken"]["ids"], state["broken"]["reasons"], strict=True))
        if self.feed is not None and state.get("resident") is not None:
            self.feed.restore(state["resident"].numpy())


def _all_read(plan: Plan) -> None:
    """Every visit of `plan` asks for its bytes."""
