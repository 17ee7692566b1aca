"""Free bytes of an arena, against a model that marks every grain."""

from __future__ import annotations

import numpy as np
import pytest

from salience.feed.space import SLOT_GRAIN_BYTES, Space, slot


@pytest.mark.parametrize("seed", range(5))
def test_slots_never_overlap_and_all_is_free_and_in_one_piece_at_the_end(seed):
    rng = np.random.default_rng(seed)
    space = Space(200 * SLOT_GRAIN_BYTES + 7)
    taken = np.zeros(200, dtype=bool)
    held: list[tuple[int, int]] = []
    refused = 0
    for _ in range(3000):
        if held and rng.random() < 0.5:
            offset, size = held.pop(int(rng.integers(len(held))))
            space.give(offset, size)
            taken[offset // SLOT_GRAIN_BYTES : (offset + slot(size)) // SLOT_GRAIN_BYTES] = False
        else:
            size = int(
                rng.choice([0, 1, SLOT_GRAIN_BYTES, SLOT_GRAIN_BYTES + 1, int(rng.integers(1, 40 * SLOT_GRAIN_BYTES))])
            )
            offset = space.take(size)
            edges = np.flatnonzero(np.diff(np.concatenate(([1], taken, [1]))))
            largest = int(np.diff(edges)[::2].max(initial=0)) * SLOT_GRAIN_BYTES  # the longest run of free grains
            assert (offset is None) == (slot(size) > largest)
            if offset is None:
                refused += 1
                continue
            part = taken[offset // SLOT_GRAIN_BYTES : (offset + slot(size)) // SLOT_GRAIN_BYTES]
            assert offset % SLOT_GRAIN_BYTES == 0
            assert len(part) * SLOT_GRAIN_BYTES == slot(size)
            assert not part.any()
            part[:] = True
            held.append((offset, size))
        assert space.free == int((~taken).sum()) * SLOT_GRAIN_BYTES
    assert refused
    for offset, size in held:
        space.give(offset, size)
    assert space.take(200 * SLOT_GRAIN_BYTES) == 0
    assert space.take(1) is None


def test_the_smallest_block_that_is_large_enough_is_taken():
    space = Space(20 * SLOT_GRAIN_BYTES)
    places = [space.take(size * SLOT_GRAIN_BYTES) for size in (5, 1, 3, 1, 10)]
    space.give(places[0], 5 * SLOT_GRAIN_BYTES)
    space.give(places[2], 3 * SLOT_GRAIN_BYTES)
    assert space.take(3 * SLOT_GRAIN_BYTES) == places[2]
    assert space.take(4 * SLOT_GRAIN_BYTES) == places[0]


def test_an_arena_without_bytes_gives_nothing():
    assert Space(0).take(0) is None
    assert Space(SLOT_GRAIN_BYTES - 1).take(1) is None
