"""Copies of the tensors of several batches: an operation on many batches at once costs as much as on one."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

ON_HOST, ON_DEVICE = (128, 4 << 20), (16, 16 << 20)
"""Most batches and bytes to collect. On the host it is many: what comes first after a training step finds nothing of its code
and data in the processor's caches, what comes next does."""
MEASURED = 8
"""One in so many batches is measured; others have about as many bytes."""
JOINED_ON_HOST = 32, 1 << 20
"""Most batches and bytes to join on the host, where they should still be in the cache when they are used."""

Parts = Sequence[Tensor | None]
Kind = TypeVar("Kind", bound=Hashable)
Label = TypeVar("Label")


class Collected(Generic[Kind, Label]):
    """Batches to be handled together: each is a few tensors of one row per sample, the first always, with a label."""

    def __init__(self, most: int | None = None) -> None:
        """Collect at most so many batches; by default as many as are worth it."""
        self._most = most
        self._batches: list[tuple[Kind, Label, Parts]] = []
        self._bytes = self._size = 0

    def add(self, label: Label, parts: Parts, kind: Kind) -> bool:
        """Copy, since the caller may modify these in place. Returns True if what was collected should be taken now.

        Only batches of the same `kind` are joined.
        """
        first = parts[0]
        assert first is not None
        if len(self._batches) % MEASURED == 0:
            self._size = _size(parts)
        self._bytes += self._size
        batches, limit = ON_HOST if first.is_cpu else ON_DEVICE
        full = len(self._batches) + 1 >= (self._most or batches) or self._bytes + self._size > limit
        if self._batches or not full:  # else it is taken at once, as it is
            parts = [
                None if part is None else part.data.clone() for part in parts
            ]  # detach() takes twice as long as that
        self._batches.append((kind, label, parts))
        return full

    def clear(self) -> None:
        """Drop what was collected."""
        self._batches, self._bytes = [], 0

    def take(self) -> Iterator[tuple[Kind, list[Label], list[Tensor | None]]]:
        """Kind, labels and joined tensors of what was collected, once per group of batches that are joined; start again."""
        batches = self._batches
        self.clear()
        for _, run in itertools.groupby(batches, key=_joinable):
            rest = list(run)
            while rest:
                count = _together(rest[0][2])
                some, rest = rest[:count], rest[count:]
                columns = zip(*(parts for _, _, parts in some), strict=True)
                yield some[0][0], [label for _, label, _ in some], [_joined(column) for column in columns]


def _size(parts: Parts) -> int:
    size = 0
    for part in parts:
        if part is not None:
            size += part.nbytes
    return size


def _together(parts: Parts) -> int:
    """How many batches like this one to join."""
    if parts[0] is not None and not parts[0].is_cpu:
        return ON_DEVICE[0]
    batches, limit = JOINED_ON_HOST
    return max(1, min(batches, limit // max(1, _size(parts))))


def _joinable(batch: tuple[Hashable, object, Parts]) -> tuple[object, ...]:
    """Equal for batches that can be joined."""
    kind, _, parts = batch
    return kind, *(None if part is None else (part.dtype, part.device, part.shape[1:]) for part in parts)


def _joined(parts: Parts) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return None if not tensors else tensors[0] if len(tensors) == 1 else torch.cat(tensors)
