"""Batches made by the workers of a DataLoader."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, default_collate

from salience.batches import (
    BatchEnvelope,
    EnvelopeCollate,
    EnvelopeDataset,
    Order,
    Orders,
    Reordered,
    WatchedCollate,
    WorkerInit,
    columns,
    taken_apart,
    with_ids_inside,
)  # fmt: skip
from salience.errors import StateError
from salience.feed.dataset import FeedCollate, SourceBatch
from salience.plan import Shard
from salience.run.feeding import Feeding
from salience.run.moving import Moving
from salience.run.part import Batch
from salience.run.planning import Planning
from salience.run.staging import Staging
from salience.run.watching import Watching
from salience.treat.dataset import StagedBatch, TreatCollate


class WorkerSource:
    """A DataLoader whose batch sampler is the plan; replaced by a new one when its options change."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        options: dict[str, Any],
        *,
        with_ids: bool,
        ids_key: str | None = None,
        moving: Moving | None = None,
        planning: Planning,
        feeding: Feeding,
        watching: Watching,
        staging: Staging | None,
    ) -> None:
        self._with_ids, self._ids_key = with_ids, ids_key
        self.moving = moving
        self._dataset = dataset
        self._planning, self._feeding, self._watching, self._staging = planning, feeding, watching, staging
        self.options = {**options, "worker_init_fn": WorkerInit(dataset, options.get("worker_init_fn"))}
        if moving is not None and moving.device.type == "cuda":
            self.options.setdefault("pin_memory", True)
        self._deeper: dict[str, Any] = {}
        self._pinned: dict[str, Any] = {}
        self._data = EnvelopeDataset(staging.treating.staged if staging else dataset)
        self.collate, self._collate = collate, self._whole_collate(collate)
        self._orders, self._generator = Orders(), torch.Generator()
        self.inner = self._make(self.options)

    def _whole_collate(self, collate: Callable[[Any], Any]) -> EnvelopeCollate:
        """The user's collate function with what stages or a Source add to it."""
        if collate is not default_collate:  # which keeps the order
            collate = WatchedCollate(collate)
        if self._staging is not None:
            return EnvelopeCollate(TreatCollate(collate, self._staging.treating.stages[-1].label))
        return EnvelopeCollate(collate if self._feeding.source is None else FeedCollate(collate))

    def _make(self, options: dict[str, Any]) -> DataLoader[Any]:
        made: DataLoader[Any] = DataLoader(
            self._data,
            batch_sampler=self._orders,  # pyright: ignore[reportArgumentType]
            collate_fn=self._collate,  # pyright: ignore[reportArgumentType]
            generator=self._generator,
            **options,
        )
        self._feeding.workers = made.num_workers
        return made

    # --- how many workers ---

    @property
    def num_workers(self) -> int:
        return self.inner.num_workers

    @property
    def has_workers(self) -> bool:
        return self.inner.num_workers > 0

    @property
    def ahead(self) -> int:
        """Batches that may be ready before they are asked for."""
        return self.num_workers * (self.inner.prefetch_factor or 2)

    @property
    def restarts(self) -> bool:
        """True if worker processes are started anew for every window."""
        return not self.inner.persistent_workers

    def restart(self, workers: int, *, prefetch: int | None = None, pin: bool | None = None) -> None:
        """Make batches with that many workers from the next window on; `prefetch` and `pin` replace what was left open."""
        self._deeper = self._deeper if prefetch is None else {"prefetch_factor": prefetch} if prefetch else {}
        self._pinned = self._pinned if pin is None else {"pin_memory": True} if pin else {}
        deeper = self._deeper if workers else {}
        self.inner = self._make({**self.options, "num_workers": workers, **deeper, **self._pinned})

    def change(self, name: str, value: Any) -> None:
        """Set an option of the DataLoader inside, or its collate function, from the next iter() on."""
        if name == "collate_fn":
            self.collate, self._collate = value, self._whole_collate(value)
        elif name == "worker_init_fn":
            value = WorkerInit(self._dataset, value)
        options = self.options if name == "collate_fn" else {**self.options, name: value}
        self.inner = self._make(options)  # refuses what cannot be
        self.options.update(options)

    def option(self, name: str) -> Any:
        """An option as the user gave it."""
        return self.options["worker_init_fn"].then if name == "worker_init_fn" else getattr(self.inner, name)

    @property
    def keeps_workers(self) -> bool:
        """True if worker processes, and with them their seeds, are kept from window to window."""
        return self.inner.persistent_workers

    # --- batches ---

    def start(self, shard: Shard, done: frozenset[int]) -> Arrivals:
        """The batches of `shard` but for those in `done`."""
        wanted: list[int] = np.setdiff1d(np.arange(len(shard)), list(done)).tolist()
        first, treatment = self._feeding.first_ticket, None if self._staging is None else self._staging.treatment

        def order(place: int) -> Order:
            number = wanted[place]
            ticket = -1 if first is None else first + place
            return Order(
                number, shard.ids(number), ticket, None if treatment is None else treatment(shard.span(number))
            )

        self._orders.set(order, len(wanted))
        self._planning.seed_workers(self._generator, shard.plan.window)
        try:
            batches = iter(self.inner)
        except RuntimeError as trouble:
            if worker_died(trouble):  # between two windows: none of its batches is lost
                self.restart(self.num_workers)
            raise
        return Arrivals(self, batches, shard.plan.window, self._feeding, self._watching)

    def peek(self, order: npt.NDArray[np.int64], size: int, seeds: torch.Tensor) -> Iterator[Any]:
        """Batches of `size` of these ids beside the run: by workers of their own, without the cache, and recorded nowhere."""
        orders = Orders()
        parts = np.split(order, range(size, len(order), size))
        orders.set(lambda number: Order(number, parts[number]), len(parts))
        options = {**self.options, "num_workers": self.num_workers, "persistent_workers": False}
        generator = torch.Generator()
        generator.set_state(seeds)
        made: DataLoader[Any] = DataLoader(
            self._data, batch_sampler=orders, collate_fn=self._collate, generator=generator, **options,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        return map(self._peeked, iter(made))

    def _peeked(self, envelope: BatchEnvelope) -> Any:
        """What the loop receives of a batch that does not count."""
        batch = self.batch(envelope, window=-1)
        if self.moving is not None:
            self.moving.begin(batch)
            self.moving.finish(batch)
        return self.contents(batch)

    def batch(self, envelope: BatchEnvelope, window: int) -> Batch:
        """The contents of an envelope as a Batch."""
        content, ids, work = envelope.batch, envelope.ids, envelope.work
        batch = Batch(window, envelope.number, ids, prints=envelope.prints, ticket=envelope.ticket)
        if isinstance(content, SourceBatch):
            content, batch.broken, batch.counts = content
        elif isinstance(content, StagedBatch):
            content, batch.report = content
            batch.broken, batch.counts = batch.report.broken, batch.report.counts
            work = self._stage_work(batch.report.seconds.tolist(), work.get("collate", 0.0))
        batch.work = work
        batch.content, batch.rows = taken_apart(content, ids, self._ids_key)
        if batch.rows is not None:
            batch.ids, batch.planned = ids[batch.rows], ids
        else:
            batch.reordered = isinstance(content, Reordered)
        batch.columns = columns(batch.content, len(batch.ids))
        return batch

    def contents(self, batch: Batch) -> Any:
        """What the loop receives: the content, and if they were asked for the ids, which stay on the host."""
        if self._with_ids:
            return torch.from_numpy(batch.ids.copy()), batch.content
        if self._ids_key is not None:
            return with_ids_inside(batch.content, torch.from_numpy(batch.ids.copy()), self._ids_key)
        return batch.content

    def _stage_work(self, seconds: list[float], collating: float) -> dict[str, float]:
        """Seconds that a batch cost its worker, by stage."""
        assert self._staging is not None
        names = self._staging.stage_names("load" if self._feeding.source is None else "fetch")
        return {**dict(zip(names, seconds, strict=False)), "collate": collating}


def worker_died(trouble: RuntimeError) -> bool:
    """True if that is how torch says that a worker process has died; it has no class for it."""
    return str(trouble).startswith("DataLoader worker (pid")


class Arrivals(Iterator[Batch]):
    """The batches of one window as they arrive, timed. A probe holds back the next ones and then releases them all at once."""

    def __init__(
        self,
        source: WorkerSource,
        batches: Iterator[BatchEnvelope],
        window: int,
        feeding: Feeding,
        watching: Watching,
    ) -> None:
        self._source, self._window, self._feeding, self._watching = source, window, feeding, watching
        self._batches: Iterator[BatchEnvelope] | None = batches
        feed = feeding.feed
        self._break_off = None if feed is None else functools.partial(feed.break_off, feed.serial)
        self._held: deque[Batch] = deque()
        self._next: Batch | None = None
        """The next batch, on its way to the device."""
        self._trouble: Exception | None = None
        """An exception from a batch behind others that have arrived; raised when these are delivered."""
        self._lost = False
        """True once a worker process has died: torch would wait for its batches forever."""

    def __next__(self) -> Batch:
        steps, probe = self._watching.steps, self._watching.probe
        if probe is not None and not self._held:
            probe.check(steps)
            if probe.due(steps.count):
                self._held.extend(probe.hold(self._taken()))
        held = bool(self._held)
        batch = self._held.popleft() if held else self._take()
        if batch is None:
            self._break_off = None  # nothing is left to give up
            raise StopIteration
        batch.held = held
        steps.got(batch.work, held=held)
        return batch

    def _taken(self) -> Iterator[Batch]:
        try:
            while (batch := self._take()) is not None:
                yield batch
        except Exception as trouble:
            self._trouble = trouble

    def _take(self) -> Batch | None:
        """The next batch, on its device; None at the window's end."""
        moving = self._source.moving
        if moving is None or not moving.ahead:
            batch = self._from_worker()
            if moving is not None and batch is not None:
                moving.begin(batch)
                moving.finish(batch)
        else:
            batch = self._next or self._from_worker()
            if batch is None:
                return None
            if self._next is None:
                moving.begin(batch)
            self._copy_next()
            moving.finish(batch)
        if batch is not None:
            batch.content = self._source.contents(batch)
        return batch

    def _copy_next(self) -> None:
        """Begin to copy the batch after the one that is delivered now."""
        self._next = None
        try:
            following = self._from_worker()
        except Exception as trouble:
            self._trouble = trouble
            return
        if following is not None:
            assert self._source.moving is not None
            self._source.moving.begin(following)
            self._next = following

    def _from_worker(self) -> Batch | None:
        """The next batch as it comes from the workers; None at the window's end."""
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            raise trouble
        if self._lost:
            raise StateError(
                "A worker process has died, and its batches with it. To go on with the rest of this window, call "
                "load_state_dict(state_dict()) and then iter(loader); iter(loader) alone starts the next window."
            )
        try:
            envelope = None if self._batches is None else next(self._batches, None)
        except RuntimeError as trouble:
            if worker_died(trouble):
                self._lost = True
                self._source.restart(self._source.num_workers)
            raise
        if envelope is None:
            return None
        batch = self._source.batch(envelope, self._window)
        if self._feeding.feed is not None:
            self._feeding.arrived(batch)
        return batch

    def close(self) -> None:
        """Give up the remaining batches; workers that wait for the cache are released before they are ended."""
        break_off, self._break_off = self._break_off, None
        if break_off is not None:
            break_off()
        self._batches = self._next = None
