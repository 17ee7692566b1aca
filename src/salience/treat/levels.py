"""Decides which samples go through every stage and which reuse an intermediate: pure functions, used in planning."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from salience.plan import FRESH, REUSED, STORED

Ids = npt.NDArray[np.int64]
MAX_IDLE_ROUNDS = 4
"""An intermediate that is older than MAX_IDLE_ROUNDS * r_max windows and not needed now loses its slot."""


def draw_factors(count: int, r_max: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Random numbers of visits an intermediate may serve, uint8 [count]: ceil(3 r_max u), at most r_max, u uniform in (0, 1].

    So 1 to r_max - 1 have a probability of 1 / (3 r_max) each, and r_max has the rest.
    """
    return np.minimum(r_max, np.ceil(3 * r_max * (1 - rng.random(count)))).astype(np.uint8)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReuseTable:
    """Which samples have an intermediate, in which slot, and how often it was used."""

    slot: npt.NDArray[np.int32]
    """int32 [n]; -1 = none."""
    created: npt.NDArray[np.int32]
    """Window whose random draws the intermediate holds, int32 [n]; -1 = there never was one."""
    uses: npt.NDArray[np.uint8]
    """Visits made from it, including the one that created it, uint8 [n]."""

    @classmethod
    def empty(cls, n: int) -> ReuseTable:
        none = np.full(n, -1, dtype=np.int32)
        return cls(slot=none, created=none.copy(), uses=np.zeros(n, dtype=np.uint8))


def assign_slots(
    ids: Ids,
    factor: npt.NDArray[np.uint8],
    table: ReuseTable,
    *,
    slots: int,
    window: int,
    r_max: int,
    rng: np.random.Generator,
) -> tuple[npt.NDArray[np.uint8], ReuseTable]:
    """Treatment level of each planned sample, uint8 [len(ids)], and the reuse table at the end of the window.

    A sample whose intermediate was used fewer times than its `factor`, uint8 [len(ids)], reuses it. All others are made
    fresh, and free slots are drawn by lot among those that may be used again. The first intermediate of a sample counts as
    used a random number of times, so that about the same number is replaced in every window.
    """
    slot, created, uses = table.slot.copy(), table.created.copy(), table.uses.copy()
    again = (slot[ids] >= 0) & (uses[ids] < factor)
    uses[ids[again]] += 1
    slot[ids[~again]] = -1
    idle = (slot >= 0) & (created < window - MAX_IDLE_ROUNDS * r_max)
    idle[ids[again]] = False
    slot[idle] = -1
    taken = np.zeros(slots, dtype=bool)
    taken[slot[slot >= 0]] = True
    free = np.flatnonzero(~taken).astype(np.int32)
    stored = rng.permutation(np.flatnonzero(~again & (factor > 1)))[: len(free)]
    kept = ids[stored]
    slot[kept] = free[: len(kept)]
    first = created[kept] < 0
    uses[kept] = np.where(first, 1 + (rng.random(len(kept)) * factor[stored]).astype(np.uint8), 1)
    created[kept] = window
    level = np.full(len(ids), FRESH, dtype=np.uint8)
    level[again] = REUSED
    level[stored] = STORED
    return level, ReuseTable(slot=slot, created=created, uses=uses)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPoint:
    """Where the intermediate is taken: after the first `stages` stages, stored in slots of `size` bytes."""

    stages: int
    size: int
    slots: int
    """Number of slots that fit into memory."""


def choose_split(
    seconds: npt.NDArray[np.float64],
    keeping: npt.NDArray[np.float64],
    sizes: npt.NDArray[np.int64],
    allowed: npt.NDArray[np.bool_],
    *,
    memory: int,
    n: int,
) -> int | None:
    """Number of stages after which an intermediate saves most; None if none may be kept, fits, or saves anything.

    saved(k) = (seconds of reading and of the first k stages - seconds of storing and loading it) *
    min(1, memory / (n * bytes(k))): the saving per intermediate, times the share of the samples that fit. If memory is short,
    that ranks by cost saved per byte. `seconds` [1 + stages] begins with reading; the others [stages] are by k.
    """
    room = memory // np.maximum(sizes, 1)
    saved = (np.cumsum(seconds)[: len(sizes)] - keeping) * np.minimum(1.0, room / n)
    saved[~allowed | (room < 1)] = 0
    best = int(saved.argmax())
    return best if saved[best] > 0 else None
