"""Allocator of byte ranges: best fit; adjacent free blocks are merged."""

from __future__ import annotations

from bisect import bisect_left, insort

SLOT_GRAIN_BYTES = 64
"""Sizes of blocks are multiples of this number of bytes."""


class Space:
    """`take(size)` allocates, `give(offset, size)` frees; both O(log n), except for moving the elements of a list."""

    def __init__(self, size: int) -> None:
        self.size = self.free = size // SLOT_GRAIN_BYTES * SLOT_GRAIN_BYTES
        self._by_size: list[tuple[int, int]] = []
        self._at: dict[int, int] = {}
        """Free block: offset -> size."""
        self._ends: dict[int, int] = {}
        """Free block: its end -> offset."""
        if self.free:
            self._add(0, self.free)

    def take(self, size: int) -> int | None:
        """Offset of `size` bytes; None if no free block is large enough."""
        size = slot(size)
        k = bisect_left(self._by_size, (size, -1))
        if k == len(self._by_size):
            return None
        block, offset = self._by_size[k]
        self._remove(offset, block)
        if block > size:
            self._add(offset + size, block - size)
        self.free -= size
        return offset

    def give(self, offset: int, size: int) -> None:
        size = slot(size)
        self.free += size
        if (before := self._ends.get(offset)) is not None:
            length = self._at[before]
            self._remove(before, length)
            offset, size = before, size + length
        if (length := self._at.get(offset + size)) is not None:
            self._remove(offset + size, length)
            size += length
        self._add(offset, size)

    def _add(self, offset: int, size: int) -> None:
        insort(self._by_size, (size, offset))
        self._at[offset] = size
        self._ends[offset + size] = offset

    def _remove(self, offset: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        del self._at[offset]
        del self._ends[offset + size]


def slot(size: int) -> int:
    """Bytes allocated for a sample of `size` bytes."""
    return max(SLOT_GRAIN_BYTES, -(-size // SLOT_GRAIN_BYTES) * SLOT_GRAIN_BYTES)
