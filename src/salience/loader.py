"""salience.Loader: a DataLoader that knows which samples matter. With no option it observes and changes nothing."""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from salience.batches import Orders, TagCollate, Tagged, Tagging, integer_targets
from salience.config import SelectConfig
from salience.decide import Auto, Settings
from salience.errors import ConfigError, DataError, did_you_mean
from salience.events import EventLog
from salience.feed.cache import Feed
from salience.feed.dataset import FeedCollate, SourceBatch, SourceDataset
from salience.feed.options import Decode, ReadingOptions
from salience.feed.policy import OpenPolicy
from salience.feed.sizes import memory_bytes
from salience.feed.source import Source
from salience.ledger import Ledger
from salience.loading import Deciding
from salience.report.sinks import Sink
from salience.run import Select
from salience.seeds import WORKERS, torch_seed
from salience.select.reference import Opinion
from salience.select.steering import Paths
from salience.signals.scorer import Scorer
from salience.treat.config import Treat
from salience.treat.dataset import Made, TreatCollate, Treatment
from salience.treat.stages import Stage, as_stages, check_picklable
from salience.treat.treating import Treating
from salience.watch.probe import Probe, current_session

_INSTEAD = {
    "shuffle": "the plan sets the order; in observe mode it is a plain shuffle",
    "sampler": "use select= to choose samples, or salience.Selector for your own loop",
    "batch_sampler": "use batch_size= and select=",
}
_PASSED = set(inspect.signature(DataLoader.__init__).parameters) - {
    "self", "dataset", "batch_size", "collate_fn", "generator", "drop_last", *_INSTEAD,
}  # fmt: skip


class Loader(Deciding):
    """Iterates over the planned batches of a map-style data set.

        loader = salience.Loader(train_set, batch_size=128, epochs=30, select="default")
        for epoch in range(loader.epoch, 30):
            for x, y in loader:
                losses = F.cross_entropy(model(x), y, reduction="none")
                loader.loss(losses).backward(); ...

    `select` unset = observe: the batches of `DataLoader(shuffle=True, generator=g)` with g seeded by `seed` (or the
    `generator` given), and the ledger fills. DataLoader's other arguments pass through. `with_ids=True` delivers
    `(ids, batch)`, for loops that fetch ahead. `ledger` starts from what another run learnt, `reference` is what
    other models think of the samples (for `rho`, `proxy`, `cscore`), `baseline` the event logs of earlier runs, by which
    `keep = "auto"` is steered. `trace` records the plans in a folder, `log` is the JSONL event log, `sinks` are other
    places for its figures ("tensorboard:runs/tb", "wandb:project", "mlflow:uri", or a function of each event). A failing
    plug-in is switched off, named and logged; with `strict=True` it raises.

    A `salience.Source` is read batch by batch and delivers `(decode(data), label)`, `decode` being yours: bytes to sample. A
    sample that cannot be read or decoded is stood in for by another one of the batch, with loss weight 0, and named in
    the report; more than `max_broken` of all samples stop the run. With `cache` ("4GiB", or bytes), `disk` ("/nvme/x:200GiB")
    or `redis` ("redis://host"), one process a node reads ahead of the plan and keeps what it will want again. `views`
    gives `decode` a read-only view of the cache's memory instead of bytes: one copy less, but it must not outlive the
    batch.

    `augment` is a list of stages that run behind the data set, in the workers (behind `decode` where there is one), with
    random numbers that depend on seed, window and sample alone. `treat` says which samples get all of them fresh: "reuse",
    "echo", "auto" or a `salience.Treat`.

    `auto=True` measures the run, tries at window edges what could make it faster and was not given (workers, cache), keeps
    what does, and logs every decision. With a `baseline` or `auto="lossy"` also what changes training: `treat` where there
    is `augment`, and `select`. The event log of such a run as `auto` does the same again. `policy="bandit"` tries what is
    expected to gain most instead of testing levers one by one; "bandit:FILE" remembers for the next run what came of it.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        epochs: int | None = None,
        select: Select = None,
        seed: int = 0,
        with_ids: bool = False,
        drop_last: bool = False,
        collate_fn: Any = None,
        decode: Decode | None = None,
        augment: Sequence[Stage | Callable[..., Any]] | None = None,
        treat: Treat | str | None = None,
        max_broken: float | None = None,
        cache: int | str | None = None,
        cache_policy: str | OpenPolicy | None = None,
        disk: str | None = None,
        redis: str | None = None,
        views: bool = False,
        generator: torch.Generator | None = None,
        ledger: Ledger | str | Path | None = None,
        reference: Opinion | Sequence[Opinion] | None = None,
        baseline: Paths | None = None,
        embeddings: npt.ArrayLike | None = None,
        trace: str | Path | None = None,
        log: EventLog | str | Path | None = None,
        sinks: Sequence[str | Sink] = (),
        strict: bool = False,
        auto: bool | str | Path = False,
        policy: str = "heuristic",
        **dataloader: Any,
    ) -> None:
        _check_arguments(batch_size, dataloader)
        reading = dataset.reading if isinstance(dataset, Source) else ReadingOptions()
        decode, views = decode or reading.decode, views or reading.views
        disk, redis = disk or reading.disk, redis or reading.redis
        cache = reading.cache if cache is None else cache
        cache_policy = reading.policy if cache_policy is None else cache_policy
        max_broken = reading.max_broken if max_broken is None else max_broken
        stages = None
        if augment is not None or treat is not None:
            stages = as_stages(() if augment is None else augment)
            if isinstance(dataset, Source) and decode is not None:
                stages = Stage(decode, random=False, name="decode"), *stages
            check_picklable(stages, dataloader)
        if isinstance(dataset, Source):
            dataset = SourceDataset(dataset, decode if stages is None else None)
        elif decode is not None:
            raise ConfigError(f"decode= is for a salience.Source; a {type(dataset).__name__} decodes by itself.")
        if not 0 <= max_broken <= 1:
            raise ConfigError(f"max_broken is {max_broken}; it must be a share from 0 to 1.")
        n = _length(dataset)
        self._auto = Auto(auto, baseline, epochs=epochs, policy=policy) if auto else None
        if self._auto is None and policy != "heuristic":
            raise ConfigError(f"policy={policy!r} is how auto decides; pass auto=True with it.")
        super().__init__(
            n, batch_size=batch_size, epochs=epochs, select=select, seed=seed, drop_last=drop_last, generator=generator,
            ledger=ledger, reference=reference, baseline=baseline, embeddings=embeddings, trace=trace, log=log, sinks=sinks,
            strict=strict,
        )  # fmt: skip
        self.dataset = dataset
        self.with_ids = with_ids
        self.probe: Probe | None = None
        """Measures the loader alone and the loop alone now and then; None unless somebody asked."""
        if (session := current_session()) is not None:
            workers = dataloader.get("num_workers", 0)
            ahead = workers * (dataloader.get("prefetch_factor") or 2)
            self.probe = session.probe_for(self.steps, workers, ahead)
        self._source = dataset.source if isinstance(dataset, SourceDataset) else None
        self._options = dataloader
        self._feed: Feed | None = None
        self._feed_options: dict[str, Any] = {"policy": cache_policy, "disk": disk, "redis": redis, "views": views}
        adopted = 0 if cache is not None or disk is not None or redis is not None else self._first_cache()
        cache = adopted or cache
        if cache is not None or disk is not None or redis is not None:
            self._set_feed(cache or 0, self._feed_workers)
        self._treating: Treating | None = None
        self._treat: Treat | None = None
        if stages is not None:
            if treat is None and self._auto is not None and self._auto.lossy:
                self._treat = Treat("reuse", memory=min(Treat().bytes, (memory_bytes() or 0) // 4))
            workers = dataloader.get("num_workers", 0)
            how = self._treat or Treat.of(treat)
            self._treating = Treating(dataset, stages, how, seed=seed, workers=workers, group=self._group)
        self._max_broken = max_broken
        self._broken: dict[int, str] = {}
        self._stand_ins: dict[int, list[int]] = {}
        if self._source is not None:
            self._know(self._source)
        if self._feed is None and isinstance(self._config, SelectConfig) and self._config.fetch is not None:
            self._warn(
                "select has a [fetch] table and the Loader no cache: pass cache=, or nothing can be saved in reading."
            )
        self._collate = collate_fn or default_collate
        collate: Any = self._collate
        if self._treating is not None:
            collate = TreatCollate(self._collate, self._treating.stages[-1].label)
        elif self._source is not None:
            collate = FeedCollate(self._collate)
        self._orders = Orders()
        self._worker_generator = torch.Generator()
        self._tagging, self._tag_collate = (
            Tagging(self._treating.staged if self._treating else dataset),
            TagCollate(collate),
        )
        self._inner = self._make_inner(dataloader)
        self._settings = Settings(
            workers=self.num_workers, cache=0 if self._feed is None else max(1, self._feed.budget)
        )
        self._refused: dict[str, str] = {}
        if self._auto is not None:
            if self._auto.lossy and select is None:
                self._offer("default")
            self._auto.start(self._settings, len(self), decides=self.rank == 0, adopted=bool(adopted))

    def _make_inner(self, options: dict[str, Any]) -> DataLoader[Any]:
        return DataLoader(
            self._tagging,
            batch_sampler=self._orders,  # pyright: ignore[reportArgumentType]
            collate_fn=self._tag_collate,  # pyright: ignore[reportArgumentType]
            generator=self._worker_generator,
            **options,
        )

    def _make_scorer(self, model: nn.Module, device: torch.device | str) -> Scorer:
        data, collate = self._inner.dataset, TagCollate(self._collate)
        return Scorer(model, data, collate, n=self.n, batch_size=self.batch_size, device=device)

    @property
    def num_workers(self) -> int:
        return self._inner.num_workers

    def __iter__(self) -> Iterator[Any]:
        """One window: batches as the user's collate made them, or `(ids, batch)` with `with_ids`."""
        now = _length(self.dataset)
        if now != self.n:
            raise DataError(
                f"The data set had {self.n} samples and now has {now}; make a new Loader when the data set changes."
            )
        self._agree_on_broken()
        if self._auto is not None and not self._resumed:
            self._decide(self._auto)
        # Persistent workers keep the seed of the first window, as in a plain DataLoader.
        seeds = not (self._started and self._inner.persistent_workers)
        shard = self._open_window(draws_worker_seed=seeds)
        if self._config is None:
            self._worker_generator.set_state(self._shuffle_state)
        else:
            self._worker_generator.manual_seed(torch_seed(self.seed, WORKERS, self.epoch, self.rank))
        self._stand_ins = {}
        treatment = None if self._treating is None else self._treating.treatment(shard)
        if treatment is not None and self._treat is not None and not self._settings.treat:
            treatment = _undivided(treatment)
        self._orders.set(shard, self._delivered, self._begin_feed(shard), treatment)
        if self._auto is not None and current_session() is None:
            planned = self.watch.seconds.get("plan", 0.0) - self.watch.seconds.get("rehearsal", 0.0)
            ahead, restarts = self.num_workers * (self._inner.prefetch_factor or 2), not self._inner.persistent_workers
            self.probe = self._auto.open(self.steps, len(shard), ahead=ahead, planned=planned, restarts=restarts)
        yield from self._batches()
        self._agree_on_broken()
        self._emit_feed()
        if self._treating is not None:
            self.events.emit("treat", window=self.epoch, **self._treating.event())
        if self._auto is not None:
            self._auto.close(self.steps)
        self._close_window()

    def _batches(self) -> Iterator[Any]:
        """The batches of this window as the loop gets them."""
        for number, ids, batch, prints, ticket, _ in self._timed():
            if isinstance(batch, SourceBatch):
                batch = self._take_fed(number, ids, batch)
            elif isinstance(batch, Made):
                batch = self._take_made(number, ids, batch)
            self._deliver(number, ids, integer_targets(batch, len(ids)), prints)
            begin = time.perf_counter()
            yield (torch.from_numpy(ids), batch) if self.with_ids else batch
            if self._treating is not None:
                self._treating.took(time.perf_counter() - begin)
            if self._feed is not None and not self._copied:
                self._done_with(ticket)

    @property
    def _copied(self) -> bool:
        """Whether a batch, once it is here, holds nothing of the cache's memory."""
        return self.num_workers > 0 or not self._feed_options["views"]

    def _arriving(self) -> Iterator[Tagged]:
        """The batches of the DataLoader inside; the cache gets its memory back at once, also where a probe holds them."""
        feed, serial = self._feed, 0 if self._feed is None else self._feed.serial
        whole, batches = False, iter(self._inner)  # held by this frame: waiting workers are let go before it ends them
        try:
            for tagged in batches:
                if self._feed is not None and self._copied:
                    self._done_with(tagged.ticket)
                yield tagged
            whole = True
        finally:
            if feed is not None and not whole:
                feed.break_off(serial)

    def _timed(self) -> Iterator[Tagged]:
        """Those batches, timed. A probe holds the next ones back and then releases them all."""
        steps, held = self.steps, deque[Tagged]()
        try:
            steps.ask()  # before workers start, which is part of the first wait
            batches = self._arriving()
            while True:
                if self.probe is not None and not held:
                    self.probe.check(steps)
                    if self.probe.due(steps.count):
                        held.extend(self.probe.hold(batches))
                released = bool(held)
                try:
                    tagged = held.popleft() if held else next(batches)
                except StopIteration:
                    return
                steps.got(self._work(tagged), held=released)
                yield tagged
                steps.ask()
        finally:
            steps.pause()


def _undivided(treatment: Callable[[slice], Treatment]) -> Callable[[slice], Treatment]:
    """The same without a split, whose two sides draw apart: as if reuse had never been thought of."""
    return lambda span: treatment(span)._replace(split=0, size=0)


def _length(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset):
        raise DataError("An IterableDataset has no ids; salience needs a map-style data set (__getitem__ and __len__).")
    try:
        n = len(dataset)
    except TypeError as cause:
        raise DataError(f"{type(dataset).__name__} has no length; salience needs __getitem__ and __len__.") from cause
    if n == 0:
        raise DataError(f"The data set ({type(dataset).__name__}) is empty; there is nothing to train on.")
    return n


def _check_arguments(batch_size: Any, dataloader: dict[str, Any]) -> None:
    if not isinstance(batch_size, int) or isinstance(batch_size, bool):
        raise ConfigError(f"batch_size is {batch_size!r}; it must be an integer of at least 1.")
    for name in dataloader:
        if name in _INSTEAD:
            raise ConfigError(f"salience.Loader takes no {name!r}: {_INSTEAD[name]}.")
        if name not in _PASSED:
            raise ConfigError(f"salience.Loader has no argument {name!r}.{did_you_mean(name, _PASSED)}")
