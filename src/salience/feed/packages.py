"""Packages: samples that lie beside each other in a shard and are both wanted come with one request."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from salience.feed.index import Index


class Packages:
    """All samples in the order of their bytes."""

    def __init__(self, index: Index, *, gap: int, most: int) -> None:
        """`gap` is what may lie between two neighbours, `most` the bytes of a package."""
        self._index, self._gap, self._most = index, gap, most
        self._order = np.lexsort((index.offset, index.shard)) if len(index.shards) else np.empty(0, dtype=np.int64)
        self._place = np.empty(len(self._order), dtype=np.int64)
        self._place[self._order] = np.arange(len(self._order))

    def beside(self, i: int, wanted: Callable[[int], bool]) -> Iterator[int]:
        """Neighbours of sample i on both sides, as long as each is `wanted` and the package is not full."""
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
