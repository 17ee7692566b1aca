"""A Source as a PyTorch data set: a whole batch in one read, and broken samples replaced so that ids still match."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from salience.errors import DataError, SalienceError
from salience.feed.cache import Handle
from salience.feed.options import Decode
from salience.feed.reads import Broken, Counts
from salience.feed.source import Source

MOST_PRINTS = 4096
"""Fingerprints kept until they are asked for."""


class SourceBatch(NamedTuple):
    """A collated batch, with what the worker noted while reading it."""

    batch: Any
    broken: dict[int, str]
    """Position in the batch -> what is wrong with the sample that belongs there."""
    counts: dict[str, int]
    """Fields of `Counts`: requests that this batch made to the store."""


class Samples(list[Any]):
    """The samples of one batch, with notes on reading them."""

    broken: dict[int, str]
    counts: dict[str, int]
    seconds: dict[str, float]
    """Seconds per stage: "fetch" and "decode"."""


class SourceDataset(Dataset[Any]):
    """Sample i is `(decode(data), label)`, or `decode(data)` alone where the source knows no classes."""

    def __init__(self, source: Source, decode: Decode | None = None) -> None:
        self.source, self.decode = source, decode
        self.handle: Handle | None = None
        """Access to the cache; None without one."""
        self._prints: dict[int, int] = {}
        """Fingerprints of samples that this process read last and whose index has no checksums."""

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> Any:
        return self.__getitems__([int(i)])[0]

    def __getitems__(self, ids: Sequence[int]) -> Samples:
        begin = time.perf_counter()
        data, counts = self.source.read_counted(ids)
        return self._samples(ids, data, counts, time.perf_counter() - begin)

    def take(self, order: Any) -> Samples:
        """Read a batch of the plan, from the cache if it was told of this batch."""
        ids: list[int] = order.ids.tolist()
        if self.handle is None or order.ticket < 0:
            return self.__getitems__(ids)
        begin = time.perf_counter()
        data = self.handle.read(order.ticket, ids)
        return self._samples(ids, data, Counts(), time.perf_counter() - begin)

    def _samples(self, ids: Sequence[int], data: Sequence[Any], counts: Counts, fetching: float) -> Samples:
        self.note(ids, data)
        begin = time.perf_counter()
        decoded = [self._decoded(part) for part in data]
        decoding = time.perf_counter() - begin
        broken = {k: part.reason for k, part in enumerate(decoded) if isinstance(part, Broken)}
        labels = self.source.labels[np.asarray(ids, dtype=np.int64)]
        if len(broken) == len(ids):
            raise DataError(
                f"All {len(ids)} samples of a batch are broken; the first, {self.source.names[ids[0]]!r}: {broken[0]}."
            )
        for k in broken:
            decoded[k] = decoded[substitute(k, labels, broken)]
        samples = Samples(zip(decoded, labels.tolist(), strict=True) if self.source.classes else decoded)
        samples.broken, samples.counts = broken, asdict(counts)
        samples.seconds = {"fetch": fetching, "decode": decoding}
        return samples

    def note(self, ids: Sequence[int], data: Sequence[Any]) -> None:
        """Take the fingerprints of bytes that were just read, where the index has no checksums."""
        check = self.source.index.check
        if len(self._prints) > MOST_PRINTS:
            self._prints.clear()
        self._prints |= {
            i: fingerprint(part)
            for i, part in zip(ids, data, strict=True)
            if not check[i] and not isinstance(part, Broken)
        }

    def fingerprints(self, ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Checksums of the index, or fingerprints of what this process has just read, int64 [B]; 0 = not known."""
        check = self.source.index.check[np.asarray(ids, dtype=np.int64)].view(np.int64)
        read = np.array([self._prints.get(i, 0) for i in ids], dtype=np.int64)
        return np.where(check == 0, read, check)

    def _decoded(self, data: bytes | memoryview | Broken) -> Any:
        if isinstance(data, Broken):
            return data
        if self.decode is None:
            return bytes(data)
        try:
            return self.decode(data)
        except SalienceError:  # a missing package, for example
            raise
        except Exception as error:  # a decoder may raise anything when it is fed garbage
            return Broken(f"it cannot be decoded ({type(error).__name__}: {str(error)[:200]})")


def fingerprint(data: bytes | memoryview) -> int:
    """63 bits of the SHA-1 of a sample, never 0. Costs a few percent of decoding it."""
    return int.from_bytes(hashlib.sha1(data, usedforsecurity=False).digest()[:8], "little") >> 1 or 1


def substitute(position: int, labels: npt.NDArray[np.int32], broken: dict[int, str]) -> int:
    """The position whose data replace a broken sample: the first good one of its class, else the first good one."""
    good = [k for k in range(len(labels)) if k not in broken]
    return next((k for k in good if labels[k] == labels[position]), good[0])


class FeedCollate:
    """Wraps the user's collate function and returns its result as a SourceBatch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Samples) -> SourceBatch:
        return SourceBatch(self.collate(samples), samples.broken, samples.counts)
