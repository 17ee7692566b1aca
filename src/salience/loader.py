"""salience.Loader: a DataLoader that knows which samples matter. With no option it observes and changes nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate
from typing_extensions import TypeVar

from salience.batches import EnvelopeCollate
from salience.config import SelectConfig
from salience.door import Door
from salience.errors import ConfigError, DataError, did_you_mean
from salience.events import EventLog
from salience.feed.dataset import SourceDataset
from salience.feed.sharing.shared import SharedFeed
from salience.feed.sizes import memory_bytes
from salience.feed.source import Source
from salience.large.growth import Growth
from salience.ledger import Ledger
from salience.ledger.copies import Copies
from salience.ledger.keys import Keys
from salience.ledger.sharing import Board
from salience.report.sinks import Sink
from salience.run import Run
from salience.run.deciding import Deciding, cores_of, first_cache
from salience.run.feeding import Feeding
from salience.run.grading import quality_of
from salience.run.growing import grow
from salience.run.iterating import BatchIterator
from salience.run.lengths import lengths_of
from salience.run.moving import Moving
from salience.run.naming import KeysGiven, keys_of
from salience.run.opening import check_stream, is_stream, lengths_for, open_stream, shared_stages, with_reading
from salience.run.order import Generators
from salience.run.part import Setup
from salience.run.parts import Parts
from salience.run.planned import PlannedBatches, PlannedSampler
from salience.run.resizing import Resizing
from salience.run.selection import Select
from salience.run.staging import Staging
from salience.run.workers import WorkerSource
from salience.select.reference import Opinion
from salience.select.steering import Paths
from salience.signals.scorer import Scorer
from salience.treat.config import Treat
from salience.treat.stages import Stage, as_stages, check_picklable
from salience.treat.treating import Treating

T = TypeVar("T", default=Any)
"""What a batch is, for type checkers."""

_INSTEAD = {
    "sampler": "use select= to choose samples, or salience.Selector for your own loop",
    "batch_sampler": "use batch_size= and select=",
}
_PASSED = set(inspect.signature(DataLoader.__init__).parameters) - {
    "self", "dataset", "batch_size", "shuffle", "collate_fn", "generator", "drop_last", *_INSTEAD,
}  # fmt: skip


class Loader(Door, Generic[T]):
    """Iterates over the planned batches of a map-style data set, or of a stream.

        loader = salience.Loader(train_set, batch_size=128, epochs=30, select="default")
        for epoch in range(loader.epoch, 30):
            for x, y in loader:
                losses = F.cross_entropy(model(x), y, reduction="none")
                loader.loss(losses).backward(); ...

    `epochs` or `steps` (batches on each rank) say how long the run is. `select` unset = observe: the batches of
    `DataLoader(shuffle=True, generator=g)` with g seeded by `seed` (or the given `generator`; "global" does what a
    DataLoader without a generator does), and the ledger fills. `shuffle=False` observes in the order of the data set.
    DataLoader's other arguments pass through. `with_ids=True` delivers `(ids, batch)`, for loops that fetch ahead;
    `ids_key="_ids"` puts the ids into dict batches under that key, or at the end of tuples. `device` moves batches to a
    device, on CUDA from pinned memory and one batch ahead. `even=True` gives every epoch the same number of batches, the
    mean of what `select` keeps, for frameworks that ask for `len` once. `window` ("1M") is how many samples are planned at
    once, if an epoch is too large for that. `ledger` starts from what another run learnt (a `SharedLedger`, or "share" over
    a `SharedFeed`: from what other jobs have learnt, and they from this one), `reference` is the opinion of other models on
    the samples (for `rho`, `proxy`, `cscore`), `baseline` the event logs of earlier runs, which steer `keep = "auto"`.
    `trace` records the plans in a folder, `log` is the JSONL event log, `sinks` are other places for its figures
    ("tensorboard:runs/tb", "wandb:project", "mlflow:uri", or a function of each event). A failing plug-in is switched off,
    named and logged; with `strict=True` it raises.

    A `salience.Source` is read batch by batch and delivers `(decode(data), label)`. Options for reading, caching and decoding
    belong to the source; those given here (`decode`, `cache`, `disk`, `redis`, `max_broken`, `views`) are passed on. A
    `salience.SharedFeed` is a source that several jobs on a node read together.

    `augment` is a list of stages that run after the data set, in the workers (after `decode` if there is one), with random
    numbers that depend only on seed, window and sample. `treat` says which samples get all of them fresh: "reuse", "echo",
    "auto" or a `salience.Treat`. "resolution" shows smaller images in a part of the run.

    `auto=True` measures the run, tries at window edges what could make it faster and was not given (workers, cache), keeps
    what does, and logs every decision. With a `baseline` or `auto="lossy"` it also tries what changes training: `treat` if
    there is `augment`, and `select`. Pass the event log of such a run as `auto` to repeat its decisions.

    With several ranks, `balance=True` gives each a part of every batch in proportion to its measured speed, and `costs` (a
    number per sample, such as its length) divides every batch so that long samples go together and all ranks take equally long.

    `batch_tokens` instead of `batch_size` makes batches of samples of similar length, of at most that many tokens per rank with
    padding; `lengths` are the tokens of every sample, as an array or the name of a column (None: the data set's `lengths`, or
    one pass that measures them). Every sample counts alike, whatever batch it is in.

    `keys` name the samples: a column or field, "positions" in the innermost data set, "content", a function of a sample, or a
    sequence. With keys, a `ledger` of another run is matched by name, so that samples may have been added or removed since, and
    the data set may grow at its end between two epochs.

    `quality` is a number per sample, high = good, as an array or the name of a column: in the first half of the run everything
    may be visited, in the second half the better half; the filter `quality` in `select` may say otherwise. `copies` are
    near-duplicates found before the run, as `salience.select.duplicates.near_duplicates(texts)` finds them.

    A stream (an `IterableDataset`, a streaming data set of Hugging Face, a WebDataset pipeline, anything that can be iterated
    over anew) is read `window` samples at a time, which are planned among themselves; a `for` loop is one pass. Its `keys` are
    a field of the samples, a function or, by default, "__key__" or the content. Samples never seen are all visited.
    `grow` (a `salience.large.Growth`) makes batches larger where the learning rate would fall.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool | None = True,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        select: Select = None,
        seed: int = 0,
        with_ids: bool = False,
        ids_key: str | None = None,
        device: torch.device | str | None = None,
        even: bool = False,
        drop_last: bool = False,
        window: int | str | None = None,
        collate_fn: Any = None,
        augment: Sequence[Stage | Callable[..., Any]] | None = None,
        treat: Treat | str | None = None,
        generator: Generators = None,
        ledger: Ledger | Board | str | Path | None = None,
        reference: Opinion | Sequence[Opinion] | None = None,
        baseline: Paths | None = None,
        embeddings: npt.ArrayLike | None = None,
        trace: str | Path | None = None,
        log: EventLog | str | Path | None = None,
        sinks: Sequence[str | Sink] = (),
        strict: bool = False,
        auto: bool | str | Path = False,
        balance: bool = False,
        costs: npt.ArrayLike | None = None,
        batch_tokens: int | None = None,
        lengths: npt.ArrayLike | str | None = None,
        keys: KeysGiven = None,
        quality: npt.ArrayLike | str | None = None,
        copies: Copies | None = None,
        grow: Growth | None = None,
        **dataloader: Any,
    ) -> None:
        shared = dataset if isinstance(dataset, SharedFeed) else None
        dataset, reading = with_reading(dataset, dataloader)
        _check_arguments(batch_size, dataloader)
        if grow is not None and (reading.cached or shared is not None):
            raise ConfigError(
                "grow= changes the size of batches, which a cache has fixed places for; leave one of them out."
            )
        if with_ids and ids_key is not None:
            raise ConfigError(f"with_ids=True and ids_key={ids_key!r} are two ways to deliver ids; choose one.")
        in_order = shuffle is not None and not shuffle  # DataLoader forwards None as its default, and takes 0 for False
        if in_order and select is not None:
            raise ConfigError(
                "shuffle=False observes in the order of the data set, and select= plans its own; leave one out."
            )
        if isinstance(ledger, str) and ledger == "share":
            if shared is None:
                raise ConfigError('ledger="share" needs a SharedFeed; without one, pass ledger=SharedLedger(folder).')
            ledger = shared.shared_ledger()
        stages = None
        resolution = None if treat is None or Treat.of(treat).kind != "resolution" else Treat.of(treat)
        if resolution is not None:
            treat = None
        if augment is not None or treat is not None:
            stages = as_stages(() if augment is None else augment)
            if shared is not None:
                reading, stages = shared_stages(reading, stages)
            elif reading.decode is not None:
                stages = Stage(reading.decode, random=False, name="decode"), *stages
            check_picklable(stages, dataloader)
        if isinstance(dataset, Source):
            dataset = SourceDataset(dataset, reading.decode if stages is None or shared is not None else None)
        stream = is_stream(dataset)
        if stream:
            check_stream({
                "augment": augment, "treat": treat or resolution, "generator": generator, "reference": reference,
                "baseline": baseline, "embeddings": embeddings, "auto": auto, "balance": balance, "costs": costs, "even": even,
                "trace": trace, "batch_tokens": batch_tokens, "lengths": lengths, "quality": quality, "copies": copies,
                "steps": steps, "grow": grow,
            })  # fmt: skip
        sizes = (
            None
            if stream
            else lengths_for(dataset, batch_tokens, lengths, batch_size=batch_size, treat=treat or resolution)
        )
        named = Keys() if stream else None if keys is None else Keys.of(keys_of(dataset, keys))
        parts = Parts(
            1 if stream else _length(dataset), batch_size=batch_size, epochs=None if stream else epochs, steps=steps,
            select=select, seed=seed, drop_last=drop_last, window=None if stream else window, stream=stream, keys=named,
            generator=generator, shuffle=not in_order, even=even, ledger=ledger,
            reference=reference, baseline=baseline, embeddings=embeddings, trace=trace, log=log, sinks=sinks, strict=strict,
            balance=balance, costs=costs, lengths=sizes, batch_tokens=batch_tokens, copies=copies, grow=grow,
            quality=None if quality is None else quality_of(dataset, quality), alike={"auto": str(auto)},
        )  # fmt: skip
        chooser = None
        if auto:
            from salience.decide.auto import Auto

            chooser = Auto(auto, baseline, epochs=parts.setup.epochs)
        self.dataset, self.with_ids, self.ids_key, self.generator = dataset, with_ids, ids_key, generator
        self._keys, self._lengths = keys, lengths
        self.device = None if device is None else _device(device)
        streaming = None
        if stream:
            streaming = open_stream(parts, dataset, keys, window=window, epochs=epochs, options=dataloader)
            dataset = streaming.buffer
        ranks, workers = parts.setup.ranks, dataloader.get("num_workers", 0)
        feeding = Feeding(parts.setup, parts.voice, dataset, reading, shared)
        adopted = 0 if reading.cached or shared is not None else first_cache(chooser, feeding.source, ranks)
        if reading.cached or adopted or shared is not None:
            feeding.set_cache(reading.cache or adopted, workers if chooser is None else max(workers, cores_of(ranks)))
        elif isinstance(parts.planning.config, SelectConfig) and parts.planning.config.fetch is not None:
            parts.voice.warn(
                "select has a [fetch] table and the source no cache: make it with cache=, or nothing can be saved in reading."
            )
        feeding.enter_index(parts.recording.ledger)
        if feeding.source is not None:
            parts.copying.enter_index(feeding.source.index.check.view(np.int64))
        staging = None
        if stages is not None:
            feeding.stages = True
            optional = None
            if treat is None and resolution is None and chooser is not None and chooser.lossy:
                optional = Treat("reuse", memory=min(Treat().bytes, (memory_bytes() or 0) // 4))
            treating = Treating(
                dataset, stages, optional or Treat.of(treat), seed=seed, workers=workers, ranks=ranks,
                windows=parts.setup.windows,
            )  # fmt: skip
            staging = Staging(parts.voice, parts.recording.ledger, treating, optional=optional)
        source = WorkerSource(
            dataset, collate_fn or default_collate, dataloader, with_ids=with_ids, ids_key=ids_key,
            moving=None if self.device is None else Moving(self.device, ahead=workers > 0 or not _has_state(dataset)),
            planning=parts.planning, feeding=feeding, watching=parts.watching, staging=staging,
        )  # fmt: skip
        parts.watching.profile(workers, source.ahead)
        resizing = None
        if resolution is not None or (treat is None and chooser is not None and chooser.lossy):
            resizing = Resizing(
                parts.setup, parts.voice, resolution or Treat("resolution"), by_itself=True, optional=resolution is None
            )
        deciding = None
        if chooser is not None:
            if chooser.lossy and select is None:
                parts.copying.offer(parts.planning.offer("default"))
            deciding = Deciding(
                parts.setup, parts.voice, chooser, workers=source, feeding=feeding, planning=parts.planning,
                staging=staging, watching=parts.watching, resizing=resizing,
            )  # fmt: skip
        run = Run(
            parts,
            source,
            feeding=feeding,
            staging=staging,
            deciding=deciding,
            streaming=streaming,
            resizing=resizing,
            options=source.options,
        )
        if deciding is not None:
            deciding.auto.start(
                deciding.settings,
                parts.planning.expected(0).steps,
                decides=parts.setup.rank == 0,
                adopted=bool(adopted),
            )
        super().__init__(run, functools.partial(_scorer, source, parts.setup))
        self._source = source

    def __iter__(self) -> BatchIterator:
        """An iterator over one epoch: batches as made by `collate_fn`, or `(ids, batch)` with `with_ids`."""
        if self._run.streaming is not None:
            return super().__iter__()
        now = _length(self.dataset)
        if now != self._run.setup.n and self._keys is not None and not self._run.course.open:
            lengths = None if self._run.by_length is None else lengths_of(self.dataset, self._lengths)
            grow(self._run, keys_of(self.dataset, self._keys), lengths)
        if now != self._run.setup.n:
            raise DataError(
                f"The data set had {self.n} samples and now has {now}; make a new Loader when the data set changes, or "
                "pass keys=, with which it may grow between two epochs."
            )
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue as if the run had never stopped. With several ranks, every rank must call it.

        A data set with its own `state_dict` and `load_state_dict` is saved too, unless worker processes read it.
        """
        state = super().state_dict()
        if self._run.streaming is not None:
            return state  # which has what the stream needs
        if _has_state(self.dataset) and self.num_workers == 0:
            state["dataset"] = self.dataset.state_dict()
        elif _has_state(self.dataset):
            self._run.voice.warn_once(
                "The data set has a state of its own, and it is the worker processes that change theirs: it is not saved. Use "
                "num_workers=0, or a data set whose samples depend on their index alone."
            )
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict()` was taken: the next iteration delivers the rest of that window."""
        super().load_state_dict(state)
        if "dataset" in state and _has_state(self.dataset):
            self.dataset.load_state_dict(state["dataset"])

    def close(self) -> None:
        """Leave a shared feed, or release the cache. Only for a Loader that is not used any more."""
        if self._run.feeding is not None and self._run.feeding.feed is not None:
            self._run.feeding.feed.close()

    # --- what else code reads off a DataLoader, or sets on it ---

    @property
    def num_workers(self) -> int:
        """Worker processes, as given or as `auto` set them."""
        return self._source.num_workers

    @property
    def collate_fn(self) -> Callable[[Any], Any]:
        """The function that makes a batch of samples; a new one takes effect at the next iter()."""
        return self._source.collate

    @property
    def sampler(self) -> PlannedSampler:
        """The ids of the window in progress."""
        return PlannedSampler(self._run)

    @property
    def batch_sampler(self) -> PlannedBatches:
        """The batches of ids of the window in progress."""
        return PlannedBatches(self._run)

    def __setattr__(self, name: str, value: Any) -> None:
        """As on a DataLoader, options of the batches can be set and take effect at the next iter(); the data set cannot."""
        if "_source" in vars(self) and name in _fixed():
            raise ConfigError(f"{name} cannot be set once a Loader is made; make a new one with {name}=.")
        if "_source" in vars(self) and (name in _PASSED or name == "collate_fn"):
            self._source.change(name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """`pin_memory`, `timeout`, `prefetch_factor`, `persistent_workers`, ..."""
        if name in _PASSED and "_source" in vars(self):
            return self._source.option(name)
        raise AttributeError(
            f"A Loader has no attribute {name!r}.{did_you_mean(name, (known for known in dir(type(self)) if known[0] != '_'))}"
        )


def _device(given: torch.device | str) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as cause:
        raise ConfigError(
            f'device is {given!r}; it must be a torch.device or its name, such as "cuda" or "cpu".'
        ) from cause


def _scorer(source: WorkerSource, setup: Setup, model: nn.Module, device: torch.device | str) -> Scorer:
    collate = EnvelopeCollate(source.collate)
    return Scorer(model, source.inner.dataset, collate, n=setup.n, batch_size=setup.batch_size, device=device)


def _has_state(dataset: Any) -> bool:
    """True if the data set has both methods of what torch calls Stateful."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def _length(dataset: Any) -> int:
    if isinstance(dataset, DataLoader):
        raise DataError("A DataLoader is no data set: pass what it reads, Loader(dataloader.dataset, batch_size=...).")
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
    for name, value in [*dataloader.items()]:
        if name in _INSTEAD and value is None:
            del dataloader[name]  # DataLoader's defaults, which code forwards
        elif name in _INSTEAD:
            raise ConfigError(f"salience.Loader takes no {name!r}: {_INSTEAD[name]}.")
        elif name not in _PASSED:
            raise ConfigError(f"salience.Loader has no argument {name!r}.{did_you_mean(name, _known())}")


@functools.cache
def _fixed() -> frozenset[str]:
    """Names of arguments that are fixed once a Loader is created."""
    return frozenset(_known() - (_PASSED - {"persistent_workers"}) - {"collate_fn"} | {"dataset", *_INSTEAD})


def _known() -> set[str]:
    """Names of all arguments: those of the Loader, and those that pass through."""
    return _PASSED | set(inspect.signature(Loader.__init__).parameters) - {"self", "dataset", "dataloader"}
