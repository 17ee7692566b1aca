"""Plans that are cheap to fetch (`select="io"`): unimportant samples are exchanged for others whose bytes are at hand.

When a window begins, the planner knows what the cache holds and where samples are in their shards, so the exchange is part
of the plan: frozen, replayable, the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.config import Fetching
from salience.ledger.copies import places
from salience.plan import Note, Plan
from salience.select.codes import class_codes
from salience.select.ranks import rank_normalise
from salience.select.view import Bools, Floats, Ids, Rng, View

RESIDENT_FIRST_BATCHES = 8
"""Number of batches at the start of a window made of resident samples, while the others are being read."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stock:
    """Where the bytes of the samples are when a window begins."""

    resident: Bools
    """Samples in the cache, bool [n]."""
    shard: npt.NDArray[np.int32]
    """Shard of each sample, int32 [n]; -1 if the sample is an object of its own."""
    offset: npt.NDArray[np.int64]
    """First byte of each sample in its shard, int64 [n]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Swap:
    """Samples of a plan that were exchanged, and their replacements."""

    out: Ids
    """Samples that leave the plan."""
    taken: Ids
    """Samples that replace them, in the same order."""
    overdue: int
    """Number of samples taken because they had waited longer than `max_age`."""
    resident: int
    """Number of samples taken because the cache holds them."""
    packaged: int
    """Number of samples taken because they are adjacent, so that one request fetches several."""


def refresh_set(view: View, picked: Bools, allowed: Bools | None, share: float, rng: Rng) -> Ids:
    """The `share` of the unpicked samples whose rank is least certain, int64 [k].

    A rank is less certain the longer ago the sample was seen and the more its loss varies:

        u_i = age_i + rank(variance_i) in [0, 1]
    """
    free = ~picked if allowed is None else allowed & ~picked
    ids = np.flatnonzero(free)
    count = round(share * len(ids))
    if not count:
        return np.empty(0, dtype=np.int64)
    spread = np.nan_to_num(rank_normalise(view.var_loss[ids]), nan=1.0)
    u = view.age[ids] + spread + 1e-3 * rng.random(len(ids))
    return ids[np.argpartition(-u, count - 1)[:count]]


def swap(
    ids: Ids,
    importance: Floats,
    stock: Stock,
    *,
    label: npt.NDArray[Any],
    age: npt.NDArray[Any],
    forced: Bools | None,
    allowed: Bools | None,
    how: Fetching,
    rng: Rng,
) -> Swap:
    """Exchange unimportant samples that would have to be fetched one by one.

    Only the least important share 1 - top of the samples may leave or enter, so that important samples are chosen as before.
    Samples that have waited longer than `max_age` windows enter first; then resident samples, the longest waiting first,
    class by class; then adjacent samples. The number of samples per class changes by at most `tolerance` of those exchanged.
    A sample without a partner stays. Samples that have waited equally long are in random order.
    """
    n = len(importance)
    low = importance <= np.float32(1 - how.top)
    picked = np.zeros(n, dtype=bool)
    picked[ids] = True
    spare = low & ~picked
    if allowed is not None:
        spare &= allowed
    dear = picked & low & ~stock.resident & (age <= how.max_age)
    if forced is not None:
        dear &= ~forced
    out = rng.permutation(np.flatnonzero(dear))
    count, (classes,) = class_codes(label)
    classes = np.maximum(classes, 0).astype(np.int64)
    room = np.bincount(classes[out], minlength=max(1, count))
    slack = int(how.tolerance * len(out))

    overdue = _oldest(np.flatnonzero(spare & (age > how.max_age)), age, rng)[: len(out)]
    room = room - np.bincount(classes[overdue], minlength=len(room))
    spare[overdue] = False

    here = _within(_oldest(np.flatnonzero(spare & stock.resident), age, rng), classes, room, 0)
    here = here[: len(out) - len(overdue)]
    room = room - np.bincount(classes[here], minlength=len(room))
    spare[here] = False

    left = len(out) - len(overdue) - len(here)
    beside = np.empty(0, dtype=np.int64)
    if left > 0 and len(stock.shard) and (stock.shard >= 0).any():
        pool = (spare & ~stock.resident) | dear
        beside = _within(_runs(pool, age, stock, left, rng), classes, np.maximum(room, 0), slack)[:left]
    stays = np.zeros(n, dtype=bool)
    stays[beside[picked[beside]]] = True  # already picked, and cheap to read
    beside = beside[~picked[beside]]
    out = out[~stays[out]]
    taken = np.concatenate((overdue, here, beside))[: len(out)]
    # Classes that get a sample in return give one first, so that class counts stay the same.
    order = _matched(classes[out], classes[taken])
    return Swap(
        out=out[order], taken=taken, overdue=min(len(overdue), len(taken)), resident=len(here), packaged=len(beside)
    )


def resident_first(plan: Plan, resident: Bools) -> Plan:
    """The plan with resident samples in its first batches; nothing but the order of its visits changes.

    At most RESIDENT_FIRST_BATCHES batches and a tenth of the plan are moved; the rest keeps its random order. The last batch
    stays as it is: in a run's last window, second visits fill it up, of samples that are in other batches.
    """
    count = min(RESIDENT_FIRST_BATCHES * plan.batch_size, len(plan) // 10)
    first = np.flatnonzero(resident[plan.ids[: -plan.batch_size]])[:count]
    rest = np.ones(len(plan), dtype=bool)
    rest[first] = False
    return plan.taken(np.concatenate((first, np.flatnonzero(rest))))


def swap_note(found: Swap | None, refreshed: int, age: npt.NDArray[Any], how: Fetching) -> Note:
    """A note on the exchange, and on how long samples wait."""
    within = float((age <= how.max_age).mean())
    waits = f"the longest waiting was seen {int(age.max(initial=0))} windows ago, {within:.1%} within {how.max_age}"
    if found is None:
        return Note(name="fetch", dropped=0, forced=refreshed, reason=f"{refreshed} looked at again; {waits}")
    reason = (
        f"{len(found.out)} unimportant samples exchanged for {found.resident} resident, {found.packaged} beside each other "
        f"and {found.overdue} overdue; {refreshed} looked at again; {waits}"
    )
    return Note(name="fetch", dropped=len(found.out), forced=refreshed, reason=reason)


def _oldest(ids: Ids, age: npt.NDArray[Any], rng: Rng) -> Ids:
    """Ids sorted by waiting time, the longest first, with ties in random order."""
    ids = rng.permutation(ids)
    return ids[np.argsort(-age[ids], kind="stable")]


def _within(ids: Ids, classes: Ids, room: npt.NDArray[np.int64], slack: int) -> Ids:
    """The first of `ids` per class, at most `room` of the class plus `slack`."""
    own = classes[ids]
    return ids[places(own) < room[own] + slack]


def _runs(pool: Bools, age: npt.NDArray[Any], stock: Stock, count: int, rng: Rng) -> Ids:
    """At least `count` samples of `pool` in runs of neighbours; runs with the highest sum of ages come first, with ties in
    random order."""
    order = np.lexsort((stock.offset, stock.shard))
    inside = pool[order] & (stock.shard[order] >= 0)
    shard = stock.shard[order]
    begins = inside & ~(np.concatenate(([False], inside[:-1])) & np.concatenate(([False], shard[1:] == shard[:-1])))
    run = np.cumsum(begins) - 1
    ids, run = order[inside], run[inside]
    if not len(ids):
        return ids
    worth = np.bincount(run, weights=np.maximum(age[ids], 1))
    best = rng.permutation(len(worth))
    best = best[np.argsort(-worth[best], kind="stable")]
    rank = np.empty(len(best), dtype=np.int64)
    rank[best] = np.arange(len(best))
    order = np.argsort(rank[run], kind="stable")
    ends = np.cumsum(np.bincount(run)[best])
    whole = int(ends[min(int(np.searchsorted(ends, count)), len(ends) - 1)])
    return ids[order][:whole]


def _matched(given: Ids, wanted: Ids) -> npt.NDArray[np.int64]:
    """A position in `given` for each of `wanted`: of the same class if there is one left, otherwise any."""
    keys = (np.stack((classes, places(classes))) for classes in (given, wanted))
    keys = [key[0] * (len(given) + len(wanted)) + key[1] for key in keys]
    _, here, there = np.intersect1d(*keys, assume_unique=True, return_indices=True)
    found = np.full(len(wanted), -1, dtype=np.int64)
    found[there] = here
    rest = np.flatnonzero(found < 0)
    found[rest] = np.setdiff1d(np.arange(len(given)), here)[: len(rest)]
    return found
