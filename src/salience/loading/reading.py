"""A Loader that reads from a Source: the cache, what it did, and samples that are broken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience.errors import ConfigError, DataError
from salience.feed.cache import Feed, cache_summary
from salience.feed.dataset import SourceBatch, SourceDataset
from salience.feed.reads import Counts
from salience.feed.source import Source
from salience.plan import Plan, Shard
from salience.run import Run
from salience.run.base import Batch
from salience.select.fetching import Stock


class Reading(Run):
    """Samples of a Source on their way to the batch."""

    dataset: Any
    _source: Source | None
    _feed: Feed | None
    _feed_options: dict[str, Any]
    _max_broken: float
    _broken: dict[int, str]
    """Samples found broken so far, and why."""
    _stand_ins: dict[int, list[int]]
    """Batch of this window -> positions where another sample stands in."""

    def _set_feed(self, cache: int | str | None, workers: int) -> None:
        """Make a cache, or drop it."""
        if not isinstance(self.dataset, SourceDataset):
            name = type(self.dataset).__name__
            raise ConfigError(f"cache=, disk= and redis= are for a salience.Source, not for a {name}.")
        if self._feed is not None:
            self._feed.close()
        self._feed = self.dataset.handle = None
        if cache is not None:
            self._feed = Feed(
                self.dataset.source, cache=cache, batch_size=self.batch_size, group=self._group, workers=workers,
                **self._feed_options,
            )  # fmt: skip
            self.dataset.handle = self._feed.handle

    def _know(self, source: Source) -> None:
        """What the index tells before anything is read: classes, sizes, byte copies."""
        if self._group is None or self._group.leads_node:
            self._ledger.set_labels(source.labels)
            self._ledger.size[:] = np.minimum(source.sizes, np.iinfo(np.uint32).max)
        if self._group is not None:
            self._group.barrier()
        if self._copies is not None:
            self._copies.prints[:] = source.index.check.view(np.int64)

    def _stock(self) -> Stock | None:
        if self._feed is None or self._source is None:
            return None
        resident, layout = self._feed.kept, self._source.layout
        if self._group is not None:  # every node has a cache of its own; plans go by that of the first
            self._group.share(resident)
        return Stock(resident=resident, shard=layout.shard, offset=layout.offset)

    def _begin_feed(self, shard: Shard) -> int | None:
        """Tell the cache what this window wants; the ticket of its first batch."""
        if self._feed is None:
            return None
        self._feed.window(shard.plan, self._delivered, self._unread(shard.plan))
        return self._feed.ticket(0)

    def _unread(self, plan: Plan) -> npt.NDArray[np.bool_] | None:
        """Visits whose bytes nobody will ask the cache for, bool [visits]; None = there are none."""
        return None

    def _done_with(self, ticket: int) -> None:
        assert self._feed is not None
        for text in self._feed.delivered(ticket):
            self._warn(text)

    def _emit_feed(self, rivals: Mapping[str, int] | None = None) -> None:
        if self._source is None:
            return
        cached: dict[str, int] = {}
        if self._feed is not None:
            self._source.stats.add(self._feed.take_counts())
            cached = {**self._feed.counts(), **(rivals or {})}
        stats = asdict(self._source.stats)
        self.events.emit("feed", window=self.epoch, broken=len(self._broken), **stats, cache=cached)

    def _take_fed(self, number: int, ids: npt.NDArray[np.int64], fed: SourceBatch) -> Any:
        """Note what the worker had to tell, and give the batch."""
        assert self._source is not None
        self._source.stats.add(Counts(**fed.counts))
        self._take_broken(number, ids, fed.broken)
        return fed.batch

    def _take_broken(self, number: int, ids: npt.NDArray[np.int64], broken: dict[int, str]) -> None:
        if broken:
            self._stand_ins[number] = list(broken)
            self._plain_weights = False
        for position, reason in broken.items():
            i = int(ids[position])
            if i not in self._broken:
                self._broken[i] = reason
                self.events.emit("broken", window=self.epoch, id=i, name=self._name(i), reason=reason)
        if self._group is None:
            self._check_broken(len(self._broken))

    def _agree_on_broken(self) -> None:
        """With several ranks: how many are broken on all of them. One that stopped by itself would leave the others waiting."""
        if self._group is not None and self._source is not None:
            self._check_broken(len({i for found in self._group.of_all(sorted(self._broken)) for i in found}))

    def _check_broken(self, count: int) -> None:
        if count > self._max_broken * self.n:
            raise DataError(
                f"{count} of {self.n} samples are broken, more than max_broken = {self._max_broken:g}:"
                f"{self._broken_lines(3)}\nMend or remove them, or raise max_broken."
            )

    def _name(self, i: int) -> str:
        return "" if self._source is None else self._source.names[i]

    def _weights_of(self, batch: Batch, device: torch.device) -> Tensor:
        weights = super()._weights_of(batch, device)
        positions = self._stand_ins.get(batch.number)
        if positions:
            weights = weights.clone()
            weights[positions] = 0
        return weights

    def _broken_lines(self, shown: int) -> str:
        lines = [f"\n  sample {i:>8} {self._name(i)!r}: {why}" for i, why in sorted(self._broken.items())[:shown]]
        return "".join(lines) + ("" if len(self._broken) <= shown else f"\n  and {len(self._broken) - shown} more")

    def report(self) -> str:
        """What the run taught us so far as text, also written to the event log; with what was read and was broken."""
        text = super().report()
        if self._source is not None:
            stats = self._source.stats
            text += (
                f"\n\nRead from {self._source.url}: {stats.bytes_sent:,} bytes in {stats.requests:,} requests for "
                f"{stats.bytes_used:,} bytes of samples; {stats.retried:,} with wrong bytes, {stats.hedged:,} doubled."
            )
        if self._feed is not None:
            rivals: dict[str, int] = {}
            if self._trace is not None and self.rank == 0:
                self._emit_feed(rivals := self._feed.rival_bytes(self._trace, self._unread))
            text += f"\n{cache_summary({**self._feed.counts(), **rivals}, self._feed.budget)}"
        if self._broken:
            text += f"\n\nBroken samples, stood in for with weight 0: {len(self._broken):,}{self._broken_lines(8)}"
        return text

    def state_dict(self) -> dict[str, Any]:
        broken = {"ids": list(self._broken), "reasons": list(self._broken.values())}
        state = {**super().state_dict(), "broken": broken}
        if self._feed is not None:  # when the window in progress began, or now between two windows
            kept = self._feed.resident if self._open else np.flatnonzero(self._feed.kept)
            state["resident"] = torch.from_numpy(kept.astype(np.int64))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        broken = state.get("broken") or {"ids": [], "reasons": []}
        self._broken = dict(zip(broken["ids"], broken["reasons"], strict=True))
        if self._feed is not None and state.get("resident") is not None:
            self._feed.restore(state["resident"].numpy())
