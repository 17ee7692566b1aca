"""salience.Loader: a DataLoader that knows which samples matter. With no option it observes and changes nothing."""

from __future__ import annotations

import inspect
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from salience.batches import Orders, TagCollate, Tagged, Tagging, integer_targets
from salience.config import SelectConfig
from salience.decide import Auto, Reach, Settings
from salience.errors import ConfigError, DataError, SalienceError, StateError, did_you_mean
from salience.events import EventLog
from salience.feed.cache import Feed, memory_bytes
from salience.feed.dataset import Decode, Fed, FeedCollate, SourceDataset
from salience.feed.reads import Counts
from salience.feed.source import Source
from salience.feed.told import told
from salience.ledger import Ledger
from salience.plan import Plan, Shard
from salience.run import Run, Select
from salience.run.base import Batch
from salience.seeds import WORKERS, torch_seed
from salience.select.fetching import Stock
from salience.select.ranks import rank_normalise
from salience.select.reference import Opinion
from salience.select.steering import Paths
from salience.signals.scorer import Scorer
from salience.treat.config import Treat
from salience.treat.dataset import Made, TreatCollate, Treatment
from salience.treat.stages import Stage, as_stages, check_picklable
from salience.treat.told import told as treatment_told
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


class Loader(Run):
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
    `keep = "auto"` is steered. `trace` records the plans in a folder, `log` is the JSONL event log. A failing plug-in
    is switched off, named and logged; with `strict=True` it raises.

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
    is `augment`, and `select`. The event log of such a run as `auto` does the same again.
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
        max_broken: float = 0.01,
        cache: int | str | None = None,
        cache_policy: str = "planned",
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
        strict: bool = False,
        auto: bool | str | Path = False,
        **dataloader: Any,
    ) -> None:
        _check_arguments(batch_size, dataloader)
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
        self._auto = Auto(auto, baseline, epochs=epochs) if auto else None
        super().__init__(
            n, batch_size=batch_size, epochs=epochs, select=select, seed=seed, drop_last=drop_last, generator=generator,
            ledger=ledger, reference=reference, baseline=baseline, embeddings=embeddings, trace=trace, log=log, strict=strict,
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
        if cache is not None or disk is not None or redis is not None:
            if self._source is None:
                raise ConfigError(
                    f"cache=, disk= and redis= are for a salience.Source, not for a {type(dataset).__name__}."
                )
            self._set_feed(cache or 0)
        self._treating: Treating | None = None
        self._treat: Treat | None = None
        """What may be switched on, where the user left that open."""
        if stages is not None:
            if treat is None and self._auto is not None and self._auto.lossy:
                self._treat = Treat("reuse", memory=min(Treat().bytes, (memory_bytes() or 0) // 4))
            workers = dataloader.get("num_workers", 0)
            how = self._treat or Treat.of(treat)
            self._treating = Treating(dataset, stages, how, seed=seed, workers=workers, group=self._group)
        self._max_broken = max_broken
        self._broken: dict[int, str] = {}
        """Samples found broken so far, and why."""
        self._stand_ins: dict[int, list[int]] = {}
        """Batch of this window -> positions where another sample stands in."""
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
        """Of the window in progress, as far as `auto` may change them."""
        self._refused: dict[str, str] = {}
        """Levers that `auto` cannot try, and why."""
        if self._auto is not None:
            if self._auto.lossy and select is None:
                self._offer("default")
            self._auto.start(self._settings, len(self), decides=self.rank == 0)

    def _make_inner(self, options: dict[str, Any]) -> DataLoader[Any]:
        return DataLoader(
            self._tagging,
            batch_sampler=self._orders,  # pyright: ignore[reportArgumentType]
            collate_fn=self._tag_collate,  # pyright: ignore[reportArgumentType]
            generator=self._worker_generator,
            **options,
        )

    def _set_feed(self, cache: int | str | None) -> None:
        """Make a cache, or drop it."""
        assert isinstance(self.dataset, SourceDataset)
        if self._feed is not None:
            self._feed.close()
        self._feed = self.dataset.handle = None
        if cache is not None:
            self._feed = Feed(
                self.dataset.source, cache=cache, batch_size=self.batch_size, group=self._group, **self._feed_options,
                workers=max(self._options.get("num_workers", 0), 0 if self._auto is None else self._cores),
            )  # fmt: skip
            self.dataset.handle = self._feed.handle

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
        for tagged in self._arriving():
            number, ids, batch, prints, ticket, _ = tagged
            if isinstance(batch, Fed):
                batch = self._take_fed(number, ids, batch)
            elif isinstance(batch, Made):
                batch = self._take_made(number, ids, batch)
            self._deliver(number, ids.numpy(), integer_targets(batch, len(ids)), prints)
            if self._feed is not None and self.num_workers:  # with none, the batch may still be a view of the cache
                self._done_with(ticket)
            begin = time.perf_counter()
            yield (ids, batch) if self.with_ids else batch
            if self._treating is not None:
                self._treating.took(time.perf_counter() - begin)
            if self._feed is not None and not self.num_workers:
                self._done_with(ticket)
        self._emit_feed()
        if self._treating is not None:
            self.events.emit("treat", window=self.epoch, **self._treating.event())
        if self._auto is not None:
            self._auto.close(self.steps)
        self._close_window()

    def _arriving(self) -> Iterator[Tagged]:
        """The batches of the DataLoader inside, timed. A probe holds the next ones back and then releases them all."""
        steps, held = self.steps, deque[Tagged]()
        try:
            steps.ask()  # before workers start, which is part of the first wait
            batches: Iterator[Tagged] = iter(self._inner)
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

    def _work(self, tagged: Tagged) -> dict[str, float]:
        """Seconds the batch cost its worker, by stage."""
        if self._treating is None or not isinstance(tagged.batch, Made):
            return tagged.work
        seconds: list[float] = tagged.batch.note.seconds.tolist()
        return {**dict(zip(self._stage_names, seconds, strict=False)), "collate": tagged.work.get("collate", 0.0)}

    @property
    def _stage_names(self) -> tuple[str, ...]:
        stages = () if self._treating is None else self._treating.stages
        return "load" if self._source is None else "fetch", *(stage.label for stage in stages)

    def _decide(self, auto: Auto) -> None:
        """Between two windows: rank 0 hears what the last one tells, and all change what is to be changed."""
        controller = auto.controller
        if self.rank == 0:
            before = controller.verdict
            decisions = auto.edge(self.epoch, self.steps, self._reach())
            if controller.verdict is not None and controller.verdict is not before:
                found = controller.verdict
                self.events.emit(
                    "verdict",
                    window=self.epoch,
                    bound=found.kind,
                    cause=found.cause,
                    share=found.share,
                    text=found.text,
                )
            for decision in decisions:
                self.events.emit("decision", **asdict(decision))
        if self._group is not None:
            *numbers, probing = self._group.first([*controller.settings.numbers, float(controller.probing)])
            controller.settings, controller.probing = Settings.of(numbers), bool(probing)
        if controller.settings == self._settings and self._started:
            return
        before = self._settings
        try:
            self._apply(controller.settings)
        except (SalienceError, OSError) as cause:
            if self._strict or self._group is not None:  # other ranks may have done it
                raise
            self.events.emit("decision", **asdict(controller.failed(self.epoch, before, str(cause))))
            self._apply(before)
        self.events.emit("settings", window=self.epoch, **asdict(controller.settings))

    def _apply(self, settings: Settings) -> None:
        """Change what differs; only between two windows."""
        before, self._settings = self._settings, settings
        if settings.cache != before.cache:
            self._set_feed(settings.cache or None)
        if (settings.workers, settings.cache) != (before.workers, before.cache):
            self._inner = self._make_inner({**self._options, "num_workers": settings.workers})
        if settings.select != before.select:
            self._selecting(settings.select)

    def _reach(self) -> Reach:
        """What `auto` can switch: what the user left open, and has given what it takes."""
        moves, room = self._options.get("num_workers", 0) > 0, memory_bytes()
        if not moves:
            self._refused["num_workers"] = (
                "it is 0, and what a data set has opened in this process may not survive a fork; pass num_workers=1"
            )
        cores = self._cores if moves else 0
        cache, share = 0, 1.0
        if self._source is not None and room is not None and not self._settings.cache:
            whole = int(self._source.sizes.sum())
            cache = min(whole, room // 4)
            share = cache / max(1, whole)
        reusable: tuple[str, ...] = ()
        if self._treat is not None and self._treating is not None and self._treating.split is not None:
            reusable = self._stage_names[: self._treating.split.stages + 1]
        return Reach(cores=cores, cache=cache, share=share, reusable=reusable, keep=self._kept, refused=self._refused)

    @property
    def _cores(self) -> int:
        """That a rank's workers may have."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // (1 if self._group is None else len(self._group.node_ranks)))

    def evaluated(self, metric: float, **more: float) -> None:
        super().evaluated(metric, **more)
        if self._auto is not None:
            self._auto.controller.hear(float(metric), self.progress)

    def _know(self, source: Source) -> None:
        """What the index tells before anything is read: classes, sizes, byte copies."""
        if self._group is None or self._group.leads_node:
            self._ledger.set_labels(source.labels)
            self._ledger.size[:] = np.minimum(source.sizes, np.iinfo(np.uint32).max)
        if self._group is not None:
            self._group.barrier()
        if self._copies is not None:
            self._copies.prints[:] = source.index.check.view(np.int64)

    def _treated(self, plan: Plan) -> Plan:
        if self._treating is None:
            return plan
        with self.watch("rehearsal"):
            said, counts = self._treating.begin(self._options)
        if self._treat is not None:  # nobody asked for it: whatever is said is a reason not to try it
            if said:
                self._refused['treat="reuse"'] = said[-1]
            self._treating.config = self._treat if self._settings.treat else replace(self._treat, kind="fresh")
            said = []
        for text in said:
            if self._strict:
                raise ConfigError(text)
            self._warn(text)
        if self._source is not None:
            self._source.stats.add(Counts(**counts))
        ranks: npt.NDArray[Any] | None = plan.ranks
        known = np.isfinite(self._ledger.mean_loss)
        if ranks is None and known.any():  # nothing is selected: then the loss says what is important
            ranks = np.full(self.n, 0.5, dtype=np.float32)
            ranks[known] = rank_normalise(self._ledger.mean_loss[known])
        return self._treating.plan(plan, ranks, self.copies)

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
        self._feed.window(shard.plan, self._delivered)
        return self._feed.ticket(0)

    def _done_with(self, ticket: int) -> None:
        assert self._feed is not None
        for text in self._feed.delivered(ticket):
            self._warn(text)

    def _emit_feed(self) -> None:
        if self._source is None:
            return
        cached: dict[str, int] = {}
        if self._feed is not None:
            self._source.stats.add(self._feed.take_counts())
            cached = self._feed.counts()
        stats = asdict(self._source.stats)
        self.events.emit("feed", window=self.epoch, broken=len(self._broken), **stats, cache=cached)

    def _take_fed(self, number: int, ids: Tensor, fed: Fed) -> Any:
        """Note what the worker had to tell, and give the batch."""
        assert self._source is not None
        self._source.stats.add(Counts(**fed.counts))
        self._take_broken(number, ids, fed.broken)
        return fed.batch

    def _take_made(self, number: int, ids: Tensor, made: Made) -> Any:
        """The same of a batch that went through stages."""
        assert self._treating is not None
        assert self._shard is not None
        note = made.note
        if self._source is not None:
            self._source.stats.add(Counts(**note.counts))
        self._treating.take(ids.numpy(), self._shard.plan.level[self._shard.span(number)], note)
        known = np.isfinite(note.cost_us)
        self._ledger.cost_us[ids.numpy()[known]] = note.cost_us[known]
        self._take_broken(number, ids, note.broken)
        return made.batch

    def _take_broken(self, number: int, ids: Tensor, broken: dict[int, str]) -> None:
        if broken:
            self._stand_ins[number] = list(broken)
            self._plain_weights = False
        for position, reason in broken.items():
            i = int(ids[position])
            if i not in self._broken:
                self._broken[i] = reason
                self.events.emit("broken", window=self.epoch, id=i, name=self._name(i), reason=reason)
        if len(self._broken) > self._max_broken * self.n:
            raise DataError(
                f"{len(self._broken)} of {self.n} samples are broken, more than max_broken = {self._max_broken:g}:"
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
        if self._treating is not None:
            text += f"\n\n{treatment_told(self._treating)}"
        if self._source is not None:
            stats = self._source.stats
            text += (
                f"\n\nRead from {self._source.url}: {stats.bytes_sent:,} bytes in {stats.requests:,} requests for "
                f"{stats.bytes_used:,} bytes of samples; {stats.retried:,} repeated, {stats.hedged:,} doubled."
            )
        if self._feed is not None:
            text += f"\n{told(self._feed.counts(), self._feed.budget)}"
        if self._broken:
            text += f"\n\nBroken samples, stood in for with weight 0: {len(self._broken):,}{self._broken_lines(8)}"
        return text

    def state_dict(self) -> dict[str, Any]:
        broken = {"ids": list(self._broken), "reasons": list(self._broken.values())}
        state = {**super().state_dict(), "broken": broken}
        if self._feed is not None:  # when the window in progress began, or now between two windows
            kept = self._feed.resident if self._open else np.flatnonzero(self._feed.kept)
            state["resident"] = torch.from_numpy(kept.astype(np.int64))
        if self._treating is not None:
            state["treat"] = self._treating.state_dict()
        if self._auto is not None:
            state["auto"] = self._auto.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("auto") is not None:
            if self._auto is None:
                raise StateError(
                    "The state was saved with auto, whose settings this Loader lacks; resume with the same auto=."
                )
            self._auto.load_state_dict(state["auto"])
            self._apply(self._auto.controller.settings)
        if self._treating is not None:
            self._treating.load_state_dict(state.get("treat"))
        elif state.get("treat") is not None:
            raise StateError("The state was saved with stages and this Loader has none; resume with the same augment=.")
        super().load_state_dict(state)
        broken = state.get("broken") or {"ids": [], "reasons": []}
        self._broken = dict(zip(broken["ids"], broken["reasons"], strict=True))
        if self._feed is not None and state.get("resident") is not None:
            self._feed.restore(state["resident"].numpy())


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
