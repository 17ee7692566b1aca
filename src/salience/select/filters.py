"""Filters: which samples may, and which must, be visited in a window; each says why."""

from __future__ import annotations

import numpy as np

from salience.errors import ConfigError
from salience.ledger.copies import places
from salience.registry import card
from salience.select.codes import class_codes
from salience.select.drawing import top
from salience.select.view import Verdict, View


def warmup(view: View, *, visits: int = 1) -> Verdict:
    """Forces samples seen fewer than `visits` times: nothing can be said about them yet."""
    return Verdict(force=view.seen < visits, reason=f"seen fewer than {visits} times")


def age_cap(view: View, *, windows: int = 10) -> Verdict:
    """Forces samples that have waited `windows` windows or more, so that no judgement is final."""
    if windows < 1:
        raise ConfigError(f"age_cap: windows is {windows}; it must be at least 1.")
    return Verdict(force=view.age >= windows, reason=f"not visited for {windows} windows")


def class_floor(view: View, *, share: float = 0.05) -> Verdict:
    """Forces `share` of every class in turn, so that no class is starved and every sample gets its turn.

    The members of a class form a circle; each window forces the next ceil(share * size) of them. In classes with more than
    20 / share samples, members are drawn at random, wherever they are on disk, and the share is approximate.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"class_floor: share is {share}; it must be above 0 and at most 1.")
    classes, (label,) = class_codes(view.label)
    if classes < 1:
        return Verdict(reason="no classes are known")
    small = _class_sizes(label, classes) < 20 / share
    small[0] = False  # class -1: not known
    force = np.zeros(view.n, dtype=bool)
    # Samples of large classes have their turn at random, once every 1/share windows, which needs no sorting.
    period = max(1, round(1 / share))
    phase = view.rng("class_floor").integers(0, period, view.n, dtype=np.uint8 if period <= 256 else np.uint32)
    turn = np.flatnonzero(phase == view.clock.window % period)
    force[turn] = ~small[label[turn] + 1] & (label[turn] >= 0)
    if small.any():
        members = np.flatnonzero(small[label + 1])
        force[_next_in_turn(members, label[members], share, view.clock.window)] = True
    return Verdict(force=force, reason=f"{share:.0%} of every class in turn")


def _class_sizes(label: np.ndarray, classes: int) -> np.ndarray:
    """Number of samples of class -1, 0, 1, ...; piece by piece, since NumPy counts in 64-bit copies."""
    sizes = np.zeros(classes + 1, dtype=np.int64)
    for start in range(0, len(label), 1 << 22):
        sizes += np.bincount(label[start : start + (1 << 22)] + 1, minlength=classes + 1)
    return sizes


def _next_in_turn(members: np.ndarray, label: np.ndarray, share: float, window: int) -> np.ndarray:
    """The `members` whose turn it is: the next ceil(share * size) in the circle of each class."""
    size = np.bincount(label)[label]
    quota = np.ceil(share * size).astype(np.int64)
    return members[(places(label) - window * quota) % size < quota]


def tail(view: View, *, share: float = 0.02) -> Verdict:
    """Leaves out the `share` of samples with the highest mean loss: more often wrong labels than useful ones.

    Does nothing in windows that visit everything.
    """
    if not 0 <= share < 1:
        raise ConfigError(f"tail: share is {share}; it must be at least 0 and below 1.")
    unknown = np.isnan(view.mean_loss)
    count = int(share * (view.n - int(np.count_nonzero(unknown))))
    if count == 0 or view.clock.keep >= 1:
        return Verdict(reason="nothing to leave out")
    highest = top(np.where(unknown, -np.inf, view.mean_loss), count, view.rng("tail", view.clock.window))
    return Verdict(keep=~highest, reason=f"highest {share:.1%} of mean loss")


@card(needs=("reference",), exact=False)
def coarse(view: View, *, drop: float = 0.3) -> Verdict:
    """Leaves out the `drop` of every class that other models found easiest, in every window.

    Of a class with m samples, the floor(drop * m) with the lowest mean rank (`view.hardness`, in 16 bits) are left out, with
    ties broken in the same way in every window; unknown ranks count as hardest and stay. It starts when the classes are
    known: at once, or when every sample has been seen. Samples that have no class by then form a class of their own.
    """
    if not 0 <= drop < 1:
        raise ConfigError(f"coarse: drop is {drop}; it must be at least 0 and below 1.")
    classes, (label,) = class_codes(view.label)
    if (view.unseen & (label < 0)).any():
        return Verdict(reason="waits until every sample was seen and its class is known")
    sizes = _class_sizes(label, classes)
    # The easiest first, unknown ones last. 16 bits, since NumPy sorts those by radix, many times faster.
    rank = np.nan_to_num(view.hardness * 65534, nan=65535).astype(np.uint16)
    order = view.rng("coarse").permutation(view.n)
    order = order[np.argsort(rank[order], kind="stable")]
    group = (label + 1).astype(np.uint16 if len(sizes) < 2**16 else np.int32)[order]
    keep = np.empty(view.n, dtype=bool)
    keep[order] = places(group) >= np.floor(drop * sizes)[group]
    return Verdict(keep=keep, reason=f"easiest {drop:.0%} of its class by the reference")
