"""salience.Loader: a DataLoader that knows which samples matter. With no option it observes and changes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from salience.batches import Orders, TagCollate, Tagged, Tagging, integer_targets
from salience.errors import ConfigError, DataError, did_you_mean
from salience.events import EventLog
from salience.ledger import Ledger
from salience.run import Run, Select
from salience.seeds import WORKERS, torch_seed
from salience.select.reference import Opinion
from salience.select.steering import Paths
from salience.signals.scorer import Scorer

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
        generator: torch.Generator | None = None,
        ledger: Ledger | str | Path | None = None,
        reference: Opinion | Sequence[Opinion] | None = None,
        baseline: Paths | None = None,
        embeddings: npt.ArrayLike | None = None,
        trace: str | Path | None = None,
        log: EventLog | str | Path | None = None,
        strict: bool = False,
        **dataloader: Any,
    ) -> None:
        _check_arguments(batch_size, dataloader)
        n = _length(dataset)
        super().__init__(
            n, batch_size=batch_size, epochs=epochs, select=select, seed=seed, drop_last=drop_last, generator=generator,
            ledger=ledger, reference=reference, baseline=baseline, embeddings=embeddings, trace=trace, log=log, strict=strict,
        )  # fmt: skip
        self.dataset = dataset
        self.with_ids = with_ids
        self._orders = Orders()
        self._worker_generator = torch.Generator()
        self._inner: DataLoader[Any] = DataLoader(
            Tagging(dataset),
            batch_sampler=self._orders,  # pyright: ignore[reportArgumentType]
            collate_fn=TagCollate(collate_fn or default_collate),  # pyright: ignore[reportArgumentType]
            generator=self._worker_generator,
            **dataloader,
        )

    def _make_scorer(self, model: nn.Module, device: torch.device | str) -> Scorer:
        inner = self._inner
        return Scorer(model, inner.dataset, inner.collate_fn, n=self.n, batch_size=self.batch_size, device=device)

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
        # Persistent workers keep the seed of the first window, as in a plain DataLoader.
        seeds = not (self._started and self._inner.persistent_workers)
        shard = self._open_window(draws_worker_seed=seeds)
        if self._config is None:
            self._worker_generator.set_state(self._shuffle_state)
        else:
            self._worker_generator.manual_seed(torch_seed(self.seed, WORKERS, self.epoch, self.rank))
        self._orders.set(shard, self._delivered)
        tagged: Tagged
        for tagged in self._inner:
            number, ids, batch, prints = tagged
            self._deliver(number, ids.numpy(), integer_targets(batch, len(ids)), prints)
            yield (ids, batch) if self.with_ids else batch
        self._close_window()


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
