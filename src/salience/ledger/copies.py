"""Which samples are copies of each other: groups, and which member of each is visited next."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Groups = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Copies:
    """Which samples are copies of each other."""

    group: Groups
    """Group of each sample, int32 [n]: samples with the same number are copies; -1 = no copies."""
    similarity: Floats
    """Similarity to the nearest copy, float32 [n]: 1 if the bytes are equal, otherwise the cosine; 0 without copies."""

    @property
    def size(self) -> npt.NDArray[np.int64]:
        """Size of each sample's group, itself included, int64 [n]; a visited sample stands for all of them."""
        sizes = np.bincount(self.group[self.group >= 0], minlength=1)
        return np.where(self.group >= 0, sizes[self.group], 1)

    def turn(self, window: int) -> npt.NDArray[np.bool_]:
        """The sample whose turn it is in each group, and every sample without copies, bool [n]."""
        mask = self.group < 0
        members = self.group[~mask]
        mask[~mask] = places(members) == window % self.size[~mask]
        return mask


def places(groups: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """Number of elements of the same group before each element, int64 [m]."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    place = np.empty(len(groups), dtype=np.int64)
    place[order] = np.arange(len(groups)) - np.repeat(first, np.diff(np.append(first, len(groups))))
    return place


def byte_copies(prints: npt.NDArray[np.int64], label: npt.NDArray[np.int32]) -> Copies:
    """Copies by bytes: samples of one class with the same fingerprint; 0 = not known."""
    known = np.flatnonzero(prints)
    order = known[np.lexsort((label[known], prints[known]))]
    same = (prints[order[1:]] == prints[order[:-1]]) & (label[order[1:]] == label[order[:-1]])
    group = connected(len(prints), order[:-1][same], order[1:][same])
    return Copies(group=group, similarity=(group >= 0).astype(np.float32))


def both(one: Copies, two: Copies) -> Copies:
    """Copies by either criterion; groups that share a sample become one."""
    n = len(one.group)
    edges = [_chain(found.group) for found in (one, two)]
    rows, columns = (np.concatenate([edge[side] for edge in edges]) for side in (0, 1))
    return Copies(group=connected(n, rows, columns), similarity=np.maximum(one.similarity, two.similarity))


def connected(n: int, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> Groups:
    """Group of each sample if rows[k] and columns[k] belong together, numbered by smallest member; -1 = none."""
    lowest = np.arange(n)
    while True:
        low = np.minimum(lowest[rows], lowest[columns])
        before = lowest.copy()
        np.minimum.at(lowest, rows, low)
        np.minimum.at(lowest, columns, low)
        lowest = lowest[lowest]
        if np.array_equal(before, lowest):
            break
    size = np.bincount(lowest, minlength=n)
    return np.where(size[lowest] > 1, lowest, -1).astype(np.int32)


def _chain(group: Groups) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pairs of neighbours in each group, enough to connect it."""
    members = np.flatnonzero(group >= 0)
    members = members[np.argsort(group[members], kind="stable")]
    same = group[members[1:]] == group[members[:-1]]
    return members[:-1][same], members[1:][same]


def merged(found: Sequence[Copies]) -> Copies | None:
    """Copies by any of these criteria; None if there are none."""
    return functools.reduce(both, found) if found else None
