"""What a framework has and wants: a Loader made from a DataLoader, and one that may be iterated and measured at any time.

as_loader    the DataLoader of somebody else's loop as a Loader, in its order where nothing is selected
Batches      a Loader for a loop that calls iter() and len() whenever it likes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from salience.errors import ConfigError
from salience.loader import Loader
from salience.ranks import current_ranks
from salience.run.iterating import BatchIterator

PASSED = (
    "batch_size", "collate_fn", "drop_last", "generator", "num_workers", "pin_memory", "timeout", "worker_init_fn",
    "multiprocessing_context", "prefetch_factor", "persistent_workers",
)  # fmt: skip
"""What a Loader takes over from a DataLoader."""

LOSSLESS = 8
"""At the batch of this number a loop that has recorded no loss is told so."""

ENDED = 1 - 1e-9
"""Progress of a run that is over, but for rounding."""


def as_loader(loader: Any, **options: Any) -> Loader:
    """A Loader over the data set of a DataLoader, with its arguments; a Loader is returned as it is.

    Where nothing is selected, the order stays that of the DataLoader: its generators, of several processes those it was
    given, or the order of the data set.
    """
    if isinstance(loader, Loader):
        if options:
            raise ConfigError(
                f"{sorted(options)} belong to the salience.Loader that train_dataloader() returns; say it there."
            )
        return loader
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"train_dataloader() returns a {type(loader).__name__}; return a DataLoader or a salience.Loader."
        )
    sampler, observes = loader.sampler, options.get("select") is None
    in_order = isinstance(sampler, SequentialSampler)
    shuffles = isinstance(sampler, RandomSampler) and (
        not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )
    if not (shuffles or (in_order and observes)) or loader.batch_size is None:
        own = "does not shuffle" if in_order else "draws its own samples"
        raise ConfigError(
            f"The training DataLoader {own} ({type(sampler).__name__}), and the plan sets the order: use shuffle=True, "
            "or salience.Observer to record only."
        )
    if observes and "seed" not in options:
        options.setdefault("generator", generators_of(loader))
    options.setdefault("shuffle", not in_order)
    return Loader(loader.dataset, **{name: getattr(loader, name) for name in PASSED} | options)


def generators_of(loader: DataLoader[Any]) -> Any:
    """What the DataLoader draws from, as `generator` of a Loader: several processes draw alike, so not from their own."""
    if current_ranks() is not None:
        return loader.generator
    first, second = loader.generator or "global", getattr(loader.sampler, "generator", None)
    return first if second is None or second is first else (first, second)


class Batches:
    """A Loader for a loop that calls iter() and len() whenever it likes: until a batch is taken, all share one iterator."""

    def __init__(self, loader: Loader, on_no_loss: Callable[[], None]) -> None:
        self.loader, self._on_no_loss = loader, on_no_loss
        self.varies = loader.epochs is not None and loader.total_steps != loader.epochs * len(loader)
        """True if epochs may differ in length."""
        self.in_epoch = False
        """True from the first batch of an epoch to its end; an iter() in between is a peek, as with a Loader."""
        self._now: BatchIterator | None = None
        self._taken = False

    def __iter__(self) -> Iterator[Any]:
        if self._taken and self.in_epoch:
            return iter(self.loader)
        self._open()
        return self._take()

    def __len__(self) -> int:
        if self.varies and not self.in_epoch and self.loader.progress < ENDED:
            self._open()  # planned, and so exact
        return len(self.loader)

    def _open(self) -> None:
        if self._taken:
            self._now, self._taken = None, False  # let go of it, or the next one would be a peek
        if self._now is None:
            self._now = iter(self.loader)

    def _take(self) -> Iterator[Any]:
        while self._now is not None:
            self._taken = self.in_epoch = True
            try:
                batch = next(self._now)
            except StopIteration:
                return
            if self.loader.steps.count == LOSSLESS and not self.loader.steps.losses:
                self._on_no_loss()
            yield batch

    def end_epoch(self) -> None:
        """Exhaust the iterator as other loops do: Lightning counts batches and stops before the end."""
        self.in_epoch = False
        if self._now is not None and self._taken and self._now.complete:
            next(self._now, None)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the callback saves the loader. Having it tells Lightning that this can be resumed inside an epoch."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the callback has loaded it already."""
