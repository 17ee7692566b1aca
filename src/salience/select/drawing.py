"""Drawing positions: at random, with given probabilities, or those of the largest values with ties broken at random."""

from __future__ import annotations

import numpy as np

from salience.select.view import Bools, Floats, Ids, Rng


def choose(rng: Rng, n: int, count: int) -> Ids:
    """`count` different positions out of `n`; every set is equally likely."""
    if count >= n:
        return np.arange(n)
    return rng.permutation(n)[:count] if 8 * count > n else rng.choice(n, count, replace=False, shuffle=False)


def choose_outside(rng: Rng, taken: Bools, count: int) -> Ids:
    """`count` different positions that are not `taken`; every set is equally likely."""
    rest = len(taken) - int(np.count_nonzero(taken))
    if 4 * count < rest:  # a few out of many: toss for each, a little too often, and put the surplus back
        share = count / rest
        share += 5 * np.sqrt(share / rest) + 5 / rest
        found = np.flatnonzero((rng.random(len(taken), dtype=np.float32) < share) & ~taken)
        if len(found) >= count:
            return np.delete(found, choose(rng, len(found), len(found) - count))
    free = np.flatnonzero(~taken)
    return free[choose(rng, len(free), count)]


def top(values: Floats, count: int, rng: Rng) -> Bools:
    """A mask of the `count` largest values; ties are broken at random, so that the order on disk does not matter."""
    mask = np.zeros(len(values), dtype=bool)
    if count >= len(values):
        mask[:] = True
    elif count > 0:
        edge = np.partition(values, len(values) - count)[len(values) - count]
        mask = values > edge
        ties = np.flatnonzero(values == edge)
        mask[ties[choose(rng, len(ties), count - int(np.count_nonzero(mask)))]] = True
    return mask


def inclusion_probabilities(size: np.ndarray, budget: int) -> np.ndarray:
    """p_i = min(1, c * size_i) with c such that they add up to `budget`, float64 [M]."""
    n = len(size)
    if budget >= n:
        return np.ones(n)
    p = np.asarray(size, dtype=np.float64)
    if not p.sum() > 0:
        return np.full(n, budget / n)
    p = p * (budget / p.sum())
    certain = np.zeros(n, dtype=bool)
    while (over := (p >= 1) & ~certain).any():  # each round makes at least one more certain; a few are enough
        certain |= over
        left = budget - np.count_nonzero(certain)
        p[certain] = 1.0
        rest = p[~certain].sum()
        if rest <= 0:
            p[~certain] = left / max(1, n - np.count_nonzero(certain))
            break
        p[~certain] *= left / rest
    return np.minimum(p, 1.0)


def systematic(rng: Rng, inclusion: np.ndarray) -> Ids:
    """Positions drawn with exactly the given probabilities, as many as their sum (Madow 1949), in random order.

    The probabilities are laid end to end in random order, and every unit mark from a random start picks
    the sample it falls on.
    """
    order = rng.permutation(len(inclusion))
    edges = np.cumsum(inclusion[order])
    total = round(float(edges[-1]))
    edges *= total / edges[-1]
    marks = rng.random() + np.arange(total)
    picks = np.minimum(np.searchsorted(edges, marks, side="right"), len(order) - 1)
    double = np.flatnonzero(picks[1:] == picks[:-1]) + 1
    if len(double):  # rounding let two marks fall on a certain sample: take others in their place
        picks[double] = np.setdiff1d(np.arange(len(order)), picks)[: len(double)]
    return order[picks]
