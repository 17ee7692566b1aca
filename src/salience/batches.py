"""How ids travel with their batch: from the plan through the worker and collate back to the training loop."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, get_worker_info

from salience.treat.dataset import StagedDataset, Treatment


class Order(NamedTuple):
    """What a worker is asked for: one batch of the plan."""

    number: int
    ids: npt.NDArray[np.int64]
    ticket: int = -1
    """Place of the batch in the queue of the cache; -1 without a cache."""
    treatment: Treatment | None = None
    """How each sample is to be treated; None without stages."""


class Fetched(NamedTuple):
    """What a worker found: the samples of an order."""

    order: Order
    samples: Any
    prints: npt.NDArray[np.int64] | None
    """Fingerprints of the samples' bytes; None if the data set has none."""
    work: dict[str, float]
    """Seconds of the worker by stage: those that the data set reports (`samples.seconds`), and "load" for the rest."""


class BatchEnvelope(NamedTuple):
    """What arrives in the training process: the user's batch with its number and ids."""

    number: int
    ids: npt.NDArray[np.int64]
    """An array rather than a tensor, which would need a shared memory file of its own on its way."""
    batch: Any
    prints: npt.NDArray[np.int64] | None
    ticket: int
    work: dict[str, float]
    """Seconds of the worker, by stage."""


class Orders:
    """The batch sampler of the DataLoader inside.

    PyTorch may call iter() on it at any time and more than once; each iterator stays with the window it began with.
    """

    def __init__(self) -> None:
        self._make: Callable[[int], Order] | None = None
        self._count = 0

    def set(self, make: Callable[[int], Order], count: int) -> None:
        """The next iterator goes through make(0) to make(count - 1)."""
        self._make, self._count = make, count

    def __iter__(self) -> Iterator[Order]:
        return iter(()) if self._make is None else map(self._make, range(self._count))

    def __len__(self) -> int:
        return self._count


class WorkerInit:
    """Runs in each worker before its first batch: `get_worker_info().dataset` is the user's, then the user's own function."""

    def __init__(self, dataset: Any, then: Callable[[int], Any] | None) -> None:
        self._dataset, self._then = dataset, then

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None:  # frozen, and would name the wrapper inside
            object.__setattr__(info, "dataset", self._dataset)
        if self._then is not None:
            self._then(worker)


class EnvelopeDataset(Dataset[Any]):
    """The user's data set, asked for a whole Order at once.

    A data set with `takes_orders` is given the order itself (`take(order)`). One with a method `fingerprints(ids) -> int64 [B]`
    is asked for those of the samples it has just read, so that byte copies are found without reading anything twice.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._many = callable(getattr(dataset, "__getitems__", None))
        self._whole = bool(getattr(dataset, "takes_orders", False))
        self._prints = _fingerprints(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, order: Order) -> Fetched:
        begin = time.perf_counter()
        ids: list[int] = order.ids.tolist()
        if self._whole:
            samples = self.dataset.take(order)
        else:
            samples = self.dataset.__getitems__(ids) if self._many else [self.dataset[i] for i in ids]
        prints = None if self._prints is None else self._prints(ids)
        stages: dict[str, float] = getattr(samples, "seconds", {})
        rest = time.perf_counter() - begin - sum(stages.values())
        return Fetched(order, samples, prints, {**stages, "load": stages.get("load", 0.0) + rest})


def _fingerprints(dataset: Any) -> Callable[[list[int]], Any] | None:
    """The data set's own method, looked for also behind stages and under torch's Subset."""
    if isinstance(dataset, StagedDataset):
        return _fingerprints(dataset.dataset)
    if isinstance(dataset, Subset):
        inner, indices = _fingerprints(dataset.dataset), dataset.indices
        return None if inner is None else functools.partial(_of_subset, inner, indices)
    found = getattr(dataset, "fingerprints", None)
    return found if callable(found) else None


def _of_subset(inner: Any, indices: Any, ids: list[int]) -> npt.NDArray[np.int64]:
    return inner([int(indices[i]) for i in ids])


class EnvelopeCollate:
    """The user's collate function, which puts its result into an envelope with number and ids."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, fetched: Fetched) -> BatchEnvelope:
        begin = time.perf_counter()
        order, samples, prints, work = fetched
        batch = self.collate(samples)
        work = {**work, "collate": time.perf_counter() - begin}
        return BatchEnvelope(order.number, order.ids.copy(), batch, prints, order.ticket, work)


def integer_targets(batch: Any, count: int) -> Tensor | None:
    """The one integer tensor [count] in a tuple, list or dict batch, which must be its targets; None if there are several."""
    parts: Sequence[Any]
    if isinstance(batch, Mapping):
        parts = list(batch.values())  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    elif isinstance(batch, (tuple, list)):
        parts = batch  # pyright: ignore[reportUnknownVariableType]
    else:
        return None
    found = [p for p in parts if isinstance(p, Tensor) and p.dtype == torch.int64 and p.shape == (count,)]
    return found[0] if len(found) == 1 else None
