"""A Source as a PyTorch data set: a whole batch in one read, and broken samples replaced so that ids still match."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from salience.errors import DataError, SalienceError
from salience.feed.index import fingerprint
from salience.feed.options import Decode
from salience.feed.reads import Broken, Counts
from salience.feed.sharing.handle import SharedHandle, Taken
from salience.feed.source import Source

if TYPE_CHECKING:
    from salience.feed.cache import Handle

MOST_PRINTS = 4096
"""Maximum number of fingerprints kept until they are asked for."""


class SourceBatch(NamedTuple):
    """A collated batch, with the worker's notes on reading it."""

    batch: Any
    broken: dict[int, str]
    """Position in the batch -> the reason why the sample that belongs there is broken."""
    counts: dict[str, int]
    """Fields of `Counts`: requests to the store for this batch."""


class Samples(list[Any]):
    """The samples of one batch, with notes on reading them."""

    broken: dict[int, str]
    counts: dict[str, int]
    seconds: dict[str, float]
    """Seconds per stage: "fetch" and "decode"."""


class SourceDataset(Dataset[Any]):
    """Sample i is `(decode(data), label)`, or only `decode(data)` if the source has no classes."""

    def __init__(self, source: Source, decode: Decode | None = None) -> None:
        self.source, self.decode = source, decode
        self.handle: Handle | SharedHandle | None = None
        """Access to the cache, or to a feed that jobs share; None without one."""
        self._prints: dict[int, int] = {}
        """Fingerprints of the samples this process read last, if the index has no checksums."""

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> Any:
        return self.__getitems__([int(i)])[0]

    def __getitems__(self, ids: Sequence[int]) -> Samples:
        return self._samples(ids, self.decoded(ids))

    def take(self, order: Any) -> Samples:
        """Read a batch of the plan, from the cache if it has been told about this batch."""
        ids: list[int] = order.ids.tolist()
        return self._samples(ids, self.decoded(ids, order.ticket))

    def decoded(self, ids: Sequence[int], ticket: int = -1) -> Taken:
        """Decoded samples; a `ticket` of 0 or more says which batch they are for."""
        handle = self.handle if ticket >= 0 else None
        if isinstance(handle, SharedHandle):
            taken = handle.take(ticket, ids, self._decoded)
            self._remember(taken.prints)
            return taken
        begin = time.perf_counter()
        data, counts = self.source.read_counted(ids) if handle is None else (handle.read(ticket, ids), Counts())
        fetching = time.perf_counter() - begin
        self.note(ids, data)
        begin = time.perf_counter()
        samples = [self._decoded(part) for part in data]
        return Taken(samples, {}, counts, fetching, time.perf_counter() - begin)

    def _samples(self, ids: Sequence[int], taken: Taken) -> Samples:
        decoded = taken.samples
        broken = {k: part.reason for k, part in enumerate(decoded) if isinstance(part, Broken)}
        labels = self.source.labels[np.asarray(ids, dtype=np.int64)]
        if len(broken) == len(ids):
            raise DataError(
                f"All {len(ids)} samples of a batch are broken; the first, {self.source.names[ids[0]]!r}: {broken[0]}."
            )
        for k in broken:
            decoded[k] = decoded[substitute(k, labels, broken)]
        samples = Samples(zip(decoded, labels.tolist(), strict=True) if self.source.classes else decoded)
        samples.broken, samples.counts = broken, asdict(taken.counts)
        samples.seconds = {"fetch": taken.fetching, "decode": taken.decoding}
        return samples

    def note(self, ids: Sequence[int], data: Sequence[Any]) -> None:
        """Store fingerprints of bytes that were just read, if the index has no checksums."""
        check = self.source.index.check
        self._remember(
            {
                i: fingerprint(part)
                for i, part in zip(ids, data, strict=True)
                if not check[i] and not isinstance(part, Broken)
            }
        )

    def _remember(self, prints: dict[int, int]) -> None:
        if len(self._prints) > MOST_PRINTS:
            self._prints.clear()
        self._prints |= prints

    def fingerprints(self, ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Checksums from the index, or fingerprints of what this process has just read, int64 [B]; 0 = not known."""
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


def substitute(position: int, labels: npt.NDArray[np.int32], broken: dict[int, str]) -> int:
    """The position of the sample that replaces a broken one: the first good one of its class, otherwise the first good one."""
    good = [k for k in range(len(labels)) if k not in broken]
    return next((k for k in good if labels[k] == labels[position]), good[0])


class FeedCollate:
    """Wraps the user's collate function and returns its result as a SourceBatch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Samples) -> SourceBatch:
        return SourceBatch(self.collate(samples), samples.broken, samples.counts)
