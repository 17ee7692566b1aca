"""How ids travel with their batch: from the plan through the worker and collate back to the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from salience.plan import Shard


class Order(NamedTuple):
    """What a worker is asked for: one batch of the plan."""

    number: int
    ids: npt.NDArray[np.int64]


class Fetched(NamedTuple):
    """What a worker found: the samples of an order."""

    order: Order
    samples: Any


class Tagged(NamedTuple):
    """What arrives: the user's batch with its number and ids."""

    number: int
    ids: Tensor
    batch: Any


class Orders:
    """The batch sampler of the DataLoader inside: the batches of the current shard that were not delivered yet.

    PyTorch may call iter() on it at any time and more than once; each call starts from the same list.
    """

    def __init__(self) -> None:
        self.shard: Shard | None = None
        self.done: frozenset[int] = frozenset()

    def set(self, shard: Shard, done: set[int]) -> None:
        self.shard, self.done = shard, frozenset(done)

    def __iter__(self) -> Iterator[Order]:
        if self.shard is not None:
            for number in range(len(self.shard)):
                if number not in self.done:
                    yield Order(number, self.shard.ids(number))

    def __len__(self) -> int:
        return 0 if self.shard is None else len(self.shard) - len(self.done)


class Tagging(Dataset[Any]):
    """The user's data set, asked for a whole Order at once."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._many = callable(getattr(dataset, "__getitems__", None))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, order: Order) -> Fetched:
        ids: list[int] = order.ids.tolist()
        return Fetched(order, self.dataset.__getitems__(ids) if self._many else [self.dataset[i] for i in ids])


class TagCollate:
    """The user's collate function, with number and ids put beside its result."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, fetched: Fetched) -> Tagged:
        return Tagged(fetched.order.number, torch.from_numpy(fetched.order.ids.copy()), self.collate(fetched.samples))


def integer_targets(batch: Any, count: int) -> Tensor | None:
    """The one integer tensor [count] in a tuple, list or dict batch, which can only be its targets; None if unclear."""
    parts: Sequence[Any]
    if isinstance(batch, Mapping):
        parts = list(batch.values())  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    elif isinstance(batch, (tuple, list)):
        parts = batch  # pyright: ignore[reportUnknownVariableType]
    else:
        return None
    found = [p for p in parts if isinstance(p, Tensor) and p.dtype == torch.int64 and p.shape == (count,)]
    return found[0] if len(found) == 1 else None
