"""Samples that one request can bring because their bytes lie beside each other in a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from salience.feed.index import Index


def coalesce(starts: Sequence[int], stops: Sequence[int], *, gap: int, longest: int) -> list[slice]:
    """Runs of ranges (sorted by start) that one request each can bring: holes <= gap, a run <= longest bytes."""
    runs: list[slice] = []
    first = 0
    for i in range(1, len(starts) + 1):
        if i == len(starts) or starts[i] - stops[i - 1] > gap or stops[i] - starts[first] > longest:
            runs.append(slice(first, i))
            first = i
    return runs


class Neighbours:
    """Samples that lie beside each other in a shard, so that one request brings several."""

    def __init__(self, index: Index, *, gap: int, most: int) -> None:
        """`gap` bytes may lie between two neighbours; a request brings at most `most` bytes."""
        self._index, self._gap, self._most = index, gap, most
        self._order = np.lexsort((index.offset, index.shard)) if len(index.shards) else np.empty(0, dtype=np.int64)
        self._place = np.empty(len(self._order), dtype=np.int64)
        self._place[self._order] = np.arange(len(self._order))

    def beside(self, i: int, wanted: Callable[[int], bool]) -> Iterator[int]:
        """Neighbours of sample i on both sides, as long as each is `wanted` and the request is not full."""
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
