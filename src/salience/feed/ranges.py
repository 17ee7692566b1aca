"""Samples that one request can fetch because their bytes are adjacent in a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from salience.feed.index import Index

TAR_GAP_BYTES = 2048
"""Maximum number of bytes that `salience pack` puts between two samples with short names."""


def coalesce(starts: Sequence[int], stops: Sequence[int], *, gap: int, longest: int) -> list[slice]:
    """Group ranges (sorted by start) into runs of one request each: holes <= gap, a run <= longest bytes."""
    runs: list[slice] = []
    first = 0
    for i in range(1, len(starts) + 1):
        if i == len(starts) or starts[i] - stops[i - 1] > gap or stops[i] - starts[first] > longest:
            runs.append(slice(first, i))
            first = i
    return runs


def feeder_gap(mean_size: float) -> int:
    """Largest gap between two samples that a feeder includes in a request: what a tar puts between neighbours, never a sample.

    That is a header, a class with its header, and padding: 2 KiB, up to twice as much with long names. Samples of a few kB
    would fit into a larger gap.
    """
    return int(min(max(TAR_GAP_BYTES, mean_size / 2), 2 * TAR_GAP_BYTES))


class Neighbours:
    """Finds samples that are adjacent in a shard, so that one request fetches several."""

    def __init__(self, index: Index, *, gap: int, most: int) -> None:
        """At most `gap` bytes may be between two neighbours; a request fetches at most `most` bytes."""
        self._index, self._gap, self._most = index, gap, most
        self._order = np.lexsort((index.offset, index.shard)) if len(index.shards) else np.empty(0, dtype=np.int64)
        self._place = np.empty(len(self._order), dtype=np.int64)
        self._place[self._order] = np.arange(len(self._order))

    def sent_bytes(self, ids: Sequence[int], gap: int) -> int:
        """Bytes that a store sends for these samples if requests include gaps of at most `gap` bytes."""
        index, some = self._index, np.unique(np.asarray(ids, dtype=np.int64))
        total = int(index.size[some].sum())
        if not len(self._order):
            return total
        some = self._order[np.sort(self._place[some])]
        shard, start, stop = index.shard[some], index.offset[some], index.offset[some] + index.size[some]
        holes = (start[1:] - stop[:-1])[(shard[1:] == shard[:-1]) & (shard[1:] >= 0)]
        return total + int(holes[(holes > 0) & (holes <= gap)].sum())

    def beside(self, i: int, wanted: Callable[[int], bool]) -> Iterator[int]:
        """Neighbours of sample i on both sides, while each is `wanted` and the request is not full."""
        if not len(self._order):
            return
        index, total = self._index, int(self._index.size[i])
        for step in (1, -1):
            k, last = int(self._place[i]) + step, i
            while 0 <= k < len(self._order) and total < self._most:
                j = int(self._order[k])
                near, far = (last, j) if step > 0 else (j, last)
                hole = int(index.offset[far]) - int(index.offset[near]) - int(index.size[near])
                if index.shard[j] != index.shard[i] or hole > self._gap or not wanted(j):
                    break
                yield j
                total += int(index.size[j])
                k, last = k + step, j
