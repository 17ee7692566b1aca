"""How ids travel with their batch: from the plan through the worker and the collate function to the training loop."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, get_worker_info

from salience.errors import DataError
from salience.feed.dataset import Samples, SourceDataset
from salience.treat.dataset import StagedDataset, Treatment

BATCHES_LOOKED_AT = 16
"""Number of batches of a collate function that must be in order before it is trusted."""
ORDERS_MADE_TOGETHER = 64
"""To make many at once takes a fraction of the time that it takes to make each between two training steps."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


class Order(NamedTuple):
    """A request to a worker: one batch of the plan."""

    number: int
    ids: npt.NDArray[np.int64]
    ticket: int = -1
    """Place of the batch in the queue of the cache; -1 without a cache."""
    treatment: Treatment | None = None
    """How each sample is to be treated; None without stages."""


class Fetched(NamedTuple):
    """A worker's result: the samples of an order."""

    order: Order
    samples: Any
    prints: npt.NDArray[np.int64] | None
    """Fingerprints of the samples' bytes; None if the data set has none."""
    work: dict[str, float]
    """Seconds of the worker by stage: those that a Source reports, and "load" for the rest."""


class BatchEnvelope(NamedTuple):
    """A batch as it arrives in the training process: the user's batch with its number and ids."""

    number: int
    ids: npt.NDArray[np.int64]
    """An array rather than a tensor, which would need its own shared memory file to be transferred."""
    batch: Any
    prints: npt.NDArray[np.int64] | None
    ticket: int
    work: dict[str, float]
    """Seconds of the worker, by stage."""


class Collated(NamedTuple):
    """What a collate function returns if it drops, repeats or reorders samples: the batch, and which sample each row is.

    def collate(samples):
        keep = [k for k, sample in enumerate(samples) if sample is not None]
        return salience.Collated(default_collate([samples[k] for k in keep]), keep)
    """

    batch: Any
    positions: Sequence[int] | npt.NDArray[Any] | Tensor
    """For each row of the batch, the position of its sample in the list that the collate function was given."""


class Reordered(NamedTuple):
    """A batch whose rows are not in the order of the samples, and whose collate function did not say so."""

    batch: Any


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
        return iter(()) if self._make is None else _made(self._make, self._count)

    def __len__(self) -> int:
        return self._count


def _made(make: Callable[[int], Order], count: int) -> Iterator[Order]:
    for first in range(0, count, ORDERS_MADE_TOGETHER):
        yield from [make(place) for place in range(first, min(first + ORDERS_MADE_TOGETHER, count))]


class WorkerInit:
    """Runs in each worker before its first batch: `get_worker_info().dataset` is the user's, then the user's own function."""

    def __init__(self, dataset: Any, then: Callable[[int], Any] | None) -> None:
        self._dataset, self.then = dataset, then

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None:  # frozen, and would name the wrapper inside
            object.__setattr__(info, "dataset", self._dataset)
        if self.then is not None:
            self.then(worker)


class EnvelopeDataset(Dataset[Any]):
    """The user's data set, read a whole Order at once.

    Reads nothing of a user's object except what PyTorch reads, and `salience_fingerprints(ids) -> int64 [B]`: a data set with
    this method gives fingerprints of the samples it has just read, so that byte copies are found without a second read.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._many = callable(getattr(dataset, "__getitems__", None))
        self._prints = _fingerprints(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, order: Order) -> Fetched:
        begin = time.perf_counter()
        ids: list[int] = order.ids.tolist()
        try:
            if isinstance(self.dataset, (SourceDataset, StagedDataset)):
                samples = self.dataset.take(order)
            else:
                samples = self.dataset.__getitems__(ids) if self._many else [self.dataset[i] for i in ids]
        except StopIteration as cause:
            raise _ends_too_early("The data set", ids) from cause
        prints = None if self._prints is None else self._prints(ids)
        work = {"load": time.perf_counter() - begin}
        if isinstance(samples, Samples):
            work["load"] += samples.seconds.get("load", 0.0) - sum(samples.seconds.values())
            work = {**samples.seconds, **work}
        return Fetched(order, samples, prints, work)


def _ends_too_early(who: str, ids: list[int]) -> DataError:
    """A loop would take the StopIteration for the end of its epoch, and the samples after it would never be seen."""
    return DataError(
        f"{who} raised StopIteration for the samples {ids[:8]}{' and more' if len(ids) > 8 else ''}, which would end the epoch "
        "unnoticed; raise another exception for a sample that cannot be read."
    )


def _fingerprints(dataset: Any) -> Callable[[list[int]], Any] | None:
    """The data set's own method, looked for also behind stages and under torch's Subset."""
    if isinstance(dataset, StagedDataset):
        return _fingerprints(dataset.dataset)
    if isinstance(dataset, Subset):
        inner, indices = _fingerprints(dataset.dataset), dataset.indices
        return None if inner is None else functools.partial(_of_subset, inner, indices)
    if isinstance(dataset, SourceDataset):
        return dataset.fingerprints
    return getattr(dataset, "salience_fingerprints", None)


def _of_subset(inner: Any, indices: Any, ids: list[int]) -> npt.NDArray[np.int64]:
    return inner([int(indices[i]) for i in ids])


class EnvelopeCollate:
    """The user's collate function, which puts its result into an envelope with number and ids."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, fetched: Fetched) -> BatchEnvelope:
        begin = time.perf_counter()
        order, samples, prints, work = fetched
        try:
            batch = self.collate(samples)
        except StopIteration as cause:
            raise _ends_too_early("The collate function", order.ids.tolist()) from cause
        work["collate"] = time.perf_counter() - begin
        return BatchEnvelope(order.number, order.ids.copy(), batch, prints, order.ticket, work)


class WatchedCollate:
    """The user's collate function. Its first batches are checked, to notice one that silently reorders samples."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate, self._looks = collate, BATCHES_LOOKED_AT

    def __call__(self, samples: Any) -> Any:
        if not self._looks or not isinstance(samples, list):
            return self.collate(samples)
        given = list(cast("list[Any]", samples))  # it may be sorted in place
        batch = self.collate(samples)
        in_order = None if isinstance(batch, Collated) else keeps_order(given, batch)
        self._looks -= in_order is True
        return Reordered(batch) if in_order is False else batch


def keeps_order(samples: list[Any], batch: Any) -> bool | None:
    """True if a field of the batch has the numbers of its samples in order, False if only in another order.

    None if no field has them, or if they are all equal.
    """
    found = None
    for key, column in _fields(batch).items():
        if not isinstance(column, Tensor) or column.device.type != "cpu" or column.layout != torch.strided:
            continue
        if column.is_quantized or column.is_complex():
            continue
        given = [] if column.numel() != len(samples) else [_number(_part(sample, key)) for sample in samples]
        if len(set(given)) < 2 or None in given:
            continue
        expected, numbers = torch.tensor(given, dtype=torch.float32), column.detach().reshape(-1).float()
        if torch.equal(expected, numbers):
            return True
        if torch.equal(expected.sort().values, numbers.sort().values):
            found = False
    return found


def _fields(batch: Any) -> dict[Any, Any]:
    """The parts of a batch by name or position; a batch without parts is a part by itself."""
    if isinstance(batch, dict):
        return dict(
            dict.items(cast("dict[Any, Any]", batch))
        )  # what it holds, where a subclass makes values when asked
    return dict(enumerate(cast("Sequence[Any]", batch))) if isinstance(batch, (tuple, list)) else {None: batch}


def _part(sample: Any, key: Any) -> Any:
    """The part of a sample with a name or position; None if there is none."""
    if isinstance(sample, dict):
        return dict.get(cast("dict[Any, Any]", sample), key)
    if isinstance(sample, (tuple, list)):
        return sample[key] if isinstance(key, int) and key < len(cast("Sequence[Any]", sample)) else None
    return sample if key is None else None


def _number(value: Any) -> float | None:
    if (isinstance(value, Tensor) and value.numel() == 1) or (isinstance(value, np.ndarray) and value.size == 1):
        value = cast("Any", value).item()
    return float(value) if isinstance(value, Real) else None


def taken_apart(batch: Any, ids: npt.NDArray[np.int64], key: str | None) -> tuple[Any, npt.NDArray[np.int64] | None]:
    """The batch without its row information, and that: positions in `ids`, or None for all of them in order.

    A collate function gives it by `Collated`, or, if `key` names the ids of a batch, by its own ids under that key.
    """
    if isinstance(batch, Reordered):
        batch = batch.batch
    if isinstance(batch, Collated):
        batch, rows = batch.batch, np.asarray(batch.positions, dtype=np.int64)
        wrong = (rows < 0) | (rows >= len(ids))
        if rows.ndim != 1 or wrong.any():
            raise DataError(
                f"Collated.positions are {rows.tolist()}; they must be positions from 0 to {len(ids) - 1} among the samples "
                "that the collate function was given, one per row."
            )
    elif key is not None and isinstance(batch, dict) and key in batch:
        given = np.asarray(batch[key], dtype=np.int64)  # pyright: ignore[reportUnknownArgumentType]
        match = given[:, None] == ids
        if not match.any(1).all():
            raise DataError(
                f"The collate function put {given.tolist()} under {key!r}, and the batch is of the samples {ids.tolist()}; "
                "put the ids of these there, one per row, or choose another ids_key."
            )
        rows = match.argmax(1)
    else:
        return batch, None
    return batch, None if np.array_equal(rows, np.arange(len(ids))) else rows


def with_ids_inside(batch: Any, ids: Tensor, key: str) -> Any:
    """The batch with its ids under `key` if it is a mapping, or as a last field if it is a tuple or a list."""
    if isinstance(batch, MutableMapping):
        batch[key] = ids
        return cast("Any", batch)
    if type(batch) in (tuple, list):
        return type(batch)((*batch, ids))
    raise DataError(
        f"ids_key={key!r} puts ids into batches that are dicts, tuples or lists; this one is a {type(batch).__name__}. "
        "Use with_ids=True instead, which delivers (ids, batch)."
    )


def columns(batch: Any, count: int) -> list[Tensor]:
    """The tensors in a tuple, list or dict batch that have `count` numbers: its targets may be among them."""
    if isinstance(batch, dict):
        parts: Any = dict.values(
            cast("dict[Any, Any]", batch)
        )  # what it holds, where a subclass makes values when asked
    elif isinstance(batch, (tuple, list)):
        parts = cast("Sequence[Any]", batch)
    else:
        return []
    return [part for part in parts if isinstance(part, Tensor) and part.numel() == count]


def comparable(columns: Iterable[Tensor], count: int) -> list[Tensor]:
    """Those of the columns whose numbers can be compared with targets: one real number per sample, on the host."""
    return [
        part for part in columns
        if not part.is_nested and part.layout == torch.strided  # nested ones have no such shape
        and part.shape in ((count,), (count, 1)) and part.device.type == "cpu"
        and not part.is_complex() and not part.is_quantized
    ]  # fmt: skip


def integer_targets(columns: Iterable[Tensor]) -> Tensor | None:
    """The one column of integers, which must be the targets of its batch; None if there are several."""
    found = [part for part in columns if part.dtype in INTEGERS and part.dim() == 1]
    return found[0] if len(found) == 1 else None
