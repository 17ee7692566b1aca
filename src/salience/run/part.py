"""What every part of a run has in common, and the few values parts pass to each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience.errors import ConfigError, PluginError
from salience.events import EventLog
from salience.events.log import log_warning
from salience.ledger import Ledger
from salience.plan import Shard
from salience.ranks import Ranks
from salience.treat.dataset import BatchReport
from salience.watch import Stopwatch

if TYPE_CHECKING:
    from salience.run.visits import Visits

COUNT_UNITS = {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The sizes of a run, its seed and its ranks. Only a resume with another number of ranks changes them."""

    n: int
    """Samples of the data set."""
    batch_size: int
    """Samples per batch on each rank, as given."""
    epochs: int | None
    """Passes over the data; with `steps`, as many as these are expected to take."""
    seed: int
    drop_last: bool
    ranks: Ranks | None
    """The ranks of a distributed run; None in a single process."""
    window: int | None = None
    """Samples that are planned at once; None = a whole epoch."""
    steps: int | None = None
    """Batches of the whole run on each rank; None where it is counted in epochs."""
    stream: bool = False
    """True if samples come from a stream: `n` is the number of keys so far, and `epochs` is not known to the run."""
    mean_batch: float | None = None
    """Samples per batch on each rank, on average, where batches are measured in tokens; None = `batch_size`."""
    rank: int = field(init=False)
    world: int = field(init=False)
    global_batch: int = field(init=False)
    """Samples per optimizer step, over all ranks."""
    rank_batch: int = field(init=False)
    """Samples per batch on a rank, where all take equal parts of the global batch."""
    piece_size: int = field(init=False)
    """Samples per window: whole batches, so that an epoch has the same batches as one that is planned at once."""
    pieces: int = field(init=False)
    """Windows per epoch."""
    windows: int | None = field(init=False)
    """Windows of the whole run; None where the number of epochs is not known."""
    short_tail: bool = field(init=False)
    """True if a plain epoch ends with a batch that is smaller than the others."""

    def __post_init__(self) -> None:
        for name, value in (
            ("n", self.n),
            ("batch_size", self.batch_size),
            ("epochs", self.epochs),
            ("steps", self.steps),
            ("seed", self.seed),
        ):
            if not isinstance(value, (int, np.integer)) and not (name in ("epochs", "steps") and value is None):
                raise ConfigError(f"{name} is {value!r}; it must be an integer.")
        if self.n < 1:
            raise ConfigError(f"The data set has {self.n} samples; there must be at least one.")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}; it must be at least 1.")
        if self.epochs is not None and self.epochs < 1:
            raise ConfigError(f"epochs is {self.epochs}; it must be at least 1.")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps is {self.steps}; it must be at least 1.")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"epochs={self.epochs} and steps={self.steps} both say how long the run is; leave one of them out."
            )
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must be at least 0.")
        rank, world = (0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.world)
        self._set(rank=rank, world=world)
        self.keep_batches_of(self.batch_size * world if self.mean_batch is None else 1)
        if self.steps is not None:
            self.count_epochs(-(-self.steps // max(1, self.steps_in(self.n))))

    def count_epochs(self, epochs: int) -> None:
        """Set the number of epochs that the `steps` of a run are expected to take."""
        self._set(epochs=epochs, windows=epochs * self.pieces)

    def steps_in(self, visits: int, batch: int | None = None) -> int:
        """Batches on each rank that so many visits make; a tail with fewer samples than ranks joins the batch before it."""
        whole, tail = divmod(visits, batch or self.global_batch)
        return whole + (not self.drop_last and tail >= self.world)

    def keep_batches_of(self, batch: int) -> None:
        """Set the number of samples per step over all ranks, and what follows from it."""
        size = self.n
        if self.window is not None and self.window < batch:
            raise ConfigError(
                f"window is {self.window} samples; it must be at least one batch over all ranks, {batch}."
            )
        if self.window is not None and self.window < self.n:
            size = self.window // batch * batch
        pieces = -(-self.n // size)
        self._set(
            global_batch=batch, piece_size=size, pieces=pieces,
            rank_batch=-(-batch // self.world) if self.mean_batch is None else max(1, round(self.mean_batch)),
            short_tail=self.n % batch > 0 and not self.drop_last,
            windows=None if self.epochs is None else self.epochs * pieces,
        )  # fmt: skip

    @property
    def plan_world(self) -> int:
        """Ranks that a step of the plan is divided among; where batches are measured in tokens, they are cut afterwards."""
        return self.world if self.mean_batch is None else 1

    def in_steps(self, visits: int, steps: int) -> int:
        """`steps`, or where batches are measured in tokens, about how many these visits make."""
        return steps if self.mean_batch is None else max(1, math.ceil(visits / (self.mean_batch * self.world)))

    def grow(self, n: int) -> None:
        """The data set has `n` samples now."""
        object.__setattr__(self, "n", n)
        self.keep_batches_of(self.global_batch)

    def _set(self, **derived: int | None) -> None:
        for name, value in derived.items():
            object.__setattr__(self, name, value)


def _empty() -> dict[Any, Any]:
    """`dict[int, str]()` takes several times as long."""
    return {}


@dataclass(slots=True)
class Batch:
    """One batch on its way to the training loop; each part may look at it or change it."""

    window: int
    number: int
    """Position among this rank's batches of the window."""
    ids: npt.NDArray[np.int64]
    """The sample of each row."""
    rows: npt.NDArray[np.int64] | None = None
    """Position of each row's sample in the planned batch; None = all of them, in order."""
    reordered: bool = False
    """True if its rows are not in the order of its samples, and their order is not known."""
    planned: npt.NDArray[np.int64] | None = None
    """Ids as they were planned; None = `ids`."""
    content: Any = None
    """What the loop receives."""
    as_delivered: bool = True
    """False if the classes given to loss() are computed from its targets and need not be those that were delivered."""
    columns: Sequence[Tensor] = ()
    """Tensors delivered with it that have as many numbers as it has samples: its targets may be among them."""
    prints: npt.NDArray[np.int64] | None = None
    """Fingerprints of the samples' bytes; None if the data set has none."""
    ticket: int = -1
    """Place of the batch in the queue of the cache."""
    broken: Mapping[int, str] = field(default_factory=_empty)
    """Position of each broken sample -> why; another sample stands in for it, with loss weight 0."""
    counts: Mapping[str, int] = field(default_factory=_empty)
    """Counts of requests to a Source for this batch."""
    report: BatchReport | None = None
    """What the stages did; None without stages."""
    work: Mapping[str, float] = field(default_factory=_empty)
    """Seconds of its worker, by stage."""
    held: bool = False
    """True if a probe held it back."""
    features: bool = False
    """True if features of its samples help the search for near-copies."""
    copied: torch.cuda.Event | None = None
    """Happens when the content is on its device; None if nothing is under way."""
    kept: Tensor | None = None
    """Positions chosen by pick()."""
    picks: float = 1.0
    """Share of the batch that pick() was asked to choose."""
    visits: Visits = field(default=cast("Any", None), repr=False)
    """Weights and records of its window; set when the batch is handed over."""

    @property
    def planned_ids(self) -> npt.NDArray[np.int64]:
        """The samples of the planned batch, which need not be the rows of its content."""
        return self.ids if self.planned is None else self.planned


class BatchSource(Protocol):
    """Makes the planned batches: the workers of a DataLoader, or ids alone."""

    @property
    def has_workers(self) -> bool: ...

    @property
    def keeps_workers(self) -> bool:
        """True if worker processes, and with them their seeds, are kept from window to window."""
        ...

    @property
    def ahead(self) -> int:
        """Batches that may be ready before they are asked for."""
        ...

    def start(self, shard: Shard, done: frozenset[int]) -> Iterator[Batch]:
        """The batches of `shard` but for those in `done`; an exception from one of them does not end it."""
        ...

    def peek(self, order: npt.NDArray[np.int64], size: int, seeds: Tensor) -> Iterator[Any]:
        """What the loop would receive for these ids, in batches of `size` that do not count.

        `seeds` is the state of the generator that workers are seeded from.
        """
        ...


class Part(Protocol):
    """One concern of a run. What it needs from other parts is in the Shard or the Batch, or is passed to it. Only Deciding
    changes the settings of other parts."""

    name: str

    @property
    def in_use(self) -> bool:
        """False while it has nothing to do: then only its state is saved and loaded."""
        return True

    def flush(self, window: int) -> None:
        """Enter what was recorded into the ledger. Collective with several ranks."""

    def prepare(self, window: int, ledger: Ledger) -> None:
        """Before `window` is planned: take in what was learnt in the last one. Collective with several ranks."""

    def open(self, shard: Shard, done: frozenset[int]) -> None:
        """A window begins; the batches in `done` were delivered before a resume. May be called again before the first batch."""

    def hand_over(self, batch: Batch) -> None:
        """A batch is about to reach the training loop."""

    def on_loss(self, batch: Batch, losses: Tensor, kept: Tensor | None, targets: Tensor | None) -> None:
        """The losses of a batch were passed to `loss()`, [B], or those at the positions `kept`; the backward pass follows.

        `targets` are their classes; None unless each sample has one.
        """

    def take_back(self, batch: Batch) -> None:
        """The loop asks for the next batch: it no longer uses this one."""

    def close(self, *, finished: bool) -> None:
        """The window is over; `finished` is False if it was broken off."""

    def report(self) -> str:
        """A paragraph for the text report; empty if there is nothing to say."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume this part."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned."""


class Voice:
    """What parts report through: events, warnings, failures that training survives, and the seconds they took (`watch`)."""

    def __init__(self, events: EventLog, *, strict: bool) -> None:
        self.events, self.strict, self.watch = events, strict, Stopwatch()
        self._said: set[str] = set()

    def warn(self, text: str) -> None:
        """Write a warning to the event log and to Python's logging."""
        log_warning(text)
        self.events.emit("warning", text=text)

    def warn_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.warn(text)

    def failed(self, text: str, cause: BaseException) -> None:
        """Warn that something optional failed and is off now; raise instead if the run is strict."""
        if self.strict:
            raise PluginError(text) from cause
        self.warn(text)


def parse_count(text: int | str) -> int:
    """A number of samples: 1_000_000, "1M", "100k"."""
    if isinstance(text, int):
        return text
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f'window is {text!r}; write a number of samples, such as 500_000, "500k" or "1M".')
    number, unit = (text[:-1], text[-1]) if text[-1:] in COUNT_UNITS else (text, "")
    try:
        return round(float(number) * COUNT_UNITS[unit])
    except ValueError as cause:
        raise ConfigError(f'window is {text!r}; write a number of samples, such as 500_000, "500k" or "1M".') from cause
