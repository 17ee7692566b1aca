"""Redundancy filter: of samples that are copies of each other, one is visited per window, in turn."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from salience.errors import ConfigError
from salience.ledger.copies import Copies, byte_copies, connected, merged
from salience.ledger.embeddings import Embeddings
from salience.registry import card
from salience.select.neighbours import comparisons, nearest
from salience.select.view import Verdict, View

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

SURROUNDING_NEIGHBOURS = 12
"""The distance to the neighbour of this rank measures how dense the surroundings are."""
SEARCH_OPTIONS = ("ratio", "visits")
"""Options of a plug-in that needs copies; they are passed on to `CopySearch`."""
CHANCE_FINDS = 0.1
"""Share of the samples said to have a copy that may be expected to have one by chance."""
COMPARED_PER_VISIT = 70
"""Number of pairs of vectors that may be compared per visit of a sample: 6 ns each, 0.4 microseconds in total."""


@card(needs=("copies",), exact=False)
def redundancy(view: View, *, ratio: float = 0.78, visits: float = 6.0, full: bool = True) -> Verdict:
    """Leaves out all but one of each group of near-copies; which one is visited changes from window to window.

    Copies are found by features (`loader.attach(model)`, once samples were visited `visits` times on average, and again
    as that grows) or by your own `embeddings=`, and by bytes if the data set has fingerprints. `ratio`: a copy is closer
    than this share of the distance to the 12th neighbour (see `near_copies`). With `full=False` nothing is left out of
    windows that visit everything, such as the last ones.
    """
    if not 0 < ratio < 1 or visits < 1:
        raise ConfigError(f"redundancy: ratio is {ratio} (between 0 and 1), visits is {visits} (at least 1).")
    if view.copies is None:
        return Verdict(reason="nothing to compare yet; features come with loader.attach(model) or embeddings=")
    if not full and view.clock.keep >= 1:
        return Verdict(reason="this window visits everything")
    return Verdict(keep=view.copies.turn(view.clock.window), reason="a copy of it is visited in its place")


def near_copies(embeddings: Embeddings, label: npt.NDArray[np.int32], *, ratio: float = 0.78) -> Copies:
    """Samples of one class that are much closer to each other than to their surroundings, and closer than by chance:

        d(i, j) < ratio * min(D_i, D_j)   and   chance(i, j) <= t,   D = distance to the 12th neighbour

    Distances are in units of the scatter from augmentation and training (see `in_units_of_scatter`). A relative test needs
    no scale (after Lowe's ratio test, 2004). `chance` is that of the less striking side (see `chances`), and t the largest
    value at which at most a share CHANCE_FINDS of the samples found is expected without copies (Benjamini and Hochberg,
    1995). So where there are no copies, none are found. Samples with different labels are left alone: one of the labels is
    wrong, and the noise filter decides which.
    """
    z = in_units_of_scatter(embeddings)
    known = np.flatnonzero(embeddings.visits > 0)
    distance, where = nearest(z[known], SURROUNDING_NEIGHBOURS)
    around, within = np.where(np.isfinite(distance[:, -1]), distance[:, -1], 0)[:, None], distance[:, :-1]
    chance, crowded = chances(distance)
    given = np.where(where < 0, -1, label[known][where])
    same = given == label[known][:, None]
    rows, places = np.nonzero(same[:, :-1] & ((within < ratio * around) | crowded[:, None]))
    columns, chance = where[rows, places], chance[rows, places]
    one_sided = crowded[rows] & crowded[columns]  # of many copies, each has some of the others among its neighbours
    rows, columns, chance = _from_both_sides(
        np.concatenate((rows, columns[one_sided])),
        np.concatenate((columns, rows[one_sided])),
        np.concatenate((chance, chance[one_sided])),
    )
    # A neighbour by chance has the same label as often as the others have.
    found = chance <= _bound(rows, columns, chance, len(known) * float(same[:, 1:].mean()))
    rows, columns = known[rows[found]], known[columns[found]]
    cosine = np.einsum("ij,ij->i", z[rows], z[columns]) / np.maximum(
        np.linalg.norm(z[rows], axis=1) * np.linalg.norm(z[columns], axis=1), 1e-12
    )
    similarity = np.zeros(embeddings.n, dtype=np.float32)
    np.maximum.at(similarity, rows, np.clip(cosine, 0, 1).astype(np.float32))
    np.maximum.at(similarity, columns, np.clip(cosine, 0, 1).astype(np.float32))
    return Copies(group=connected(embeddings.n, rows, columns), similarity=similarity)


def chances(distance: Floats) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """How probable it is without copies that the k-th neighbour is as close as it is, [n, 11]; and whether all 12 are copies.

    Where samples lie evenly, the parts (d_k / d_12)^D of the volume that the 11 nearer neighbours reach are those of
    11 random numbers: P = P(Binomial(11, (d_k / d_12)^D) >= k). D is the dimension of the surroundings after Levina and
    Bickel (2004): log(d_12 / d_j) is (1/j + ... + 1/11) / D on average; the mean over the neighbours from the 4th on (the
    first ones may be copies); the sample's own or the median sample's, whichever is lower, and at least half of the latter.
    A sample is crowded if all its 12 neighbours lie in a millionth of the median sample's volume: they are copies too.
    """
    last = SURROUNDING_NEIGHBOURS - 1
    far, inner = distance[:, -1:].astype(np.float64), distance[:, 3:-1]
    usable = np.isfinite(far[:, 0]) & (inner[:, 0] > 0)
    if not usable.any():
        return np.ones((len(distance), last)), np.isfinite(far[:, 0])
    harmonic = np.mean([sum(1 / i for i in range(j, last + 1)) for j in range(4, last + 1)])
    own = np.full(len(distance), np.inf)
    own[usable] = harmonic / np.maximum(np.log(far[usable] / inner[usable]).mean(axis=1), 1e-9)
    typical = float(np.median(own[usable]))
    own = np.clip(np.where(usable, own, 0), typical / 2, typical)[:, None]
    finite = np.where(np.isfinite(far), far, 0)
    volume = np.clip(distance[:, :-1] / np.maximum(far, 1e-30), 0, 1) ** own
    chance = np.stack([_at_least(k + 1, volume[:, k], last) for k in range(last)], axis=1)
    crowded = (finite[:, 0] / np.median(finite[usable])) ** typical < 1e-6
    chance[crowded] = 0
    return chance, crowded & np.isfinite(far[:, 0])


def _bound(rows: Ids, columns: Ids, chance: npt.NDArray[np.float64], tried: float) -> float:
    """The largest chance up to which at most CHANCE_FINDS of the samples found are expected by chance, of `tried`; or -1."""
    least = np.ones(int(max(rows.max(initial=0), columns.max(initial=0))) + 1)
    for side in (rows, columns):
        np.minimum.at(least, side, chance)
    striking = np.sort(least[least < 1])
    enough = np.flatnonzero(striking * tried <= CHANCE_FINDS * np.arange(1, len(striking) + 1))
    return float(striking[enough[-1]]) if len(enough) else -1.0


def _at_least(k: int, p: npt.NDArray[np.float64], n: int) -> npt.NDArray[np.float64]:
    """P(Binomial(n, p) >= k)."""
    return sum((math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1)), np.zeros_like(p))


def _from_both_sides(
    rows: Ids, columns: Ids, chance: npt.NDArray[np.float64]
) -> tuple[Ids, Ids, npt.NDArray[np.float64]]:
    """The pairs that are in the lists of both of their samples, once, with the larger of the two chances."""
    low, high = np.minimum(rows, columns), np.maximum(rows, columns)
    order = np.lexsort((high, low))
    low, high, chance = low[order], high[order], chance[order]
    twice = np.flatnonzero((low[1:] == low[:-1]) & (high[1:] == high[:-1]))
    return low[twice], high[twice], np.maximum(chance[twice], chance[twice + 1])


def in_units_of_scatter(embeddings: Embeddings) -> Floats:
    """z = (m - mean of all) W^(-1/2), float32 [n, kept]: directions in which the visits of a sample scatter count less.

    W = covariance of single visits around their sample's mean: the effect of augmentation and training. The means of two
    copies differ only by that, times sqrt(2 / visits); others differ most in directions in which visits do not (Fisher's
    discriminant, with every sample as a class). Directions with no more spread between samples than visits explain are
    left out. Vectors given by the user have no scatter and stay unchanged.
    """
    m = embeddings.mean.astype(np.float32)
    m -= m.mean(axis=0)
    if embeddings.weight < embeddings.width:
        return m
    # By torch, whose threads the user sets: beside the training NumPy would take all of the machine.
    values, axes = torch.linalg.eigh(torch.from_numpy(embeddings.scatter / embeddings.weight))
    scale = torch.sqrt(values + 0.05 * values.mean().clamp_min(1e-12))
    z = ((torch.from_numpy(m) @ axes.float()) / scale.float()).numpy()
    wide = z.var(axis=0) > 1.5 / max(embeddings.typical_visits, 1)
    return np.ascontiguousarray(z[:, wide]) if wide.any() else z


def pause(n: int, visits: float) -> float:
    """Average visits per sample between a search after `visits` of them and the next, between 0.5 and 1.5 times `visits`:
    searching then takes about a hundredth of a run that trains for 40 microseconds per sample."""
    return float(np.clip(comparisons(n) / COMPARED_PER_VISIT, 0.5 * visits, 1.5 * visits))


class CopySearch:
    """Gathers features and fingerprints, and searches for copies from time to time, in parallel with the training.

    At a window's edge `look` takes the result of the search prepared at the previous edge, waiting for it if necessary, and
    prepares the next one if it is due; `begin` starts it. So plans do not depend on speed. Counts decide when a search is
    due: the number of comparisons per sample stays in proportion to visits.
    """

    def __init__(
        self,
        n: int,
        *,
        ratio: float = 0.78,
        visits: float = 6.0,
        given: npt.ArrayLike | None = None,
        known: Copies | None = None,
    ) -> None:
        """`known` are copies found before the run, which are added to those that are found during it."""
        self._known = known
        self.given = None if given is None else zlib.crc32(np.ascontiguousarray(given).tobytes())
        """Checksum of the user's vectors."""
        self.ratio = ratio if given is None else 0.9 * ratio
        """Lower for vectors given by the user, which do not scatter."""
        self.next_look = 0.0 if given is not None else visits
        """Average visits per sample at which to search next."""
        self.embeddings = None if given is None else Embeddings.given(given, n)
        self.prints = np.zeros(n, dtype=np.int64)
        """Fingerprints of the samples' bytes; 0 = not known."""
        self.found: Copies | None = known
        self._near: Copies | None = None
        self._search: Callable[[], Copies] | None = None
        """The search that the last edge prepared and the next one takes; once begun, calling it waits for the result."""
        self._begun = False
        self._looked = 0.0
        """Average visits per sample at the last search."""
        self._printed = 0
        self._waited = False

    def wants(self, window: int) -> bool:
        """True if features of this window's samples are wanted: in every window at first, later in one of four."""
        return self.given is None and (self._near is None or window % 4 == 0)

    def begin(self) -> None:
        """Start the search that `look` prepared, if any: cheap, for every step; worker processes are running by then.

        No thread may start while processes are forked, since they would inherit the locks it holds.
        """
        if self._search is not None and not self._begun:
            pool = ThreadPoolExecutor(1, thread_name_prefix="salience")
            self._search, self._begun = pool.submit(self._search).result, True
            pool.shutdown(wait=False)

    def look(self, label: npt.NDArray[np.int32], *, last: bool = False) -> bool:
        """Take the result of the last search, and prepare the next if it is due; returns True if anything may have changed.

        At the end of a run (`last`) the result is complete when this returns, and fewer visits are enough. The same holds for
        vectors given by the user, which exist before the first window.
        """
        if (label < 0).all() and not self._waited:  # classes are known after the first window, if at all
            self._waited = True
            return False
        changed = self._take()
        if self.embeddings is not None and (visits := self.embeddings.typical_visits) >= self._due(last):
            at_once = last or self.given is not None
            of = self.embeddings if at_once else self.embeddings.copy()
            # It reads nothing that changes meanwhile, and spends its time where Python lets other threads run.
            self._prepare(partial(near_copies, of, label if at_once else label.copy(), ratio=self.ratio))
            self._looked, self.next_look = visits, visits + pause(self.embeddings.n, visits)
            if at_once:
                changed = self._take()
        known = int(np.count_nonzero(self.prints))
        if not changed and known == self._printed:
            return False
        self._printed = known
        same = byte_copies(self.prints, label) if known else None
        self.found = merged([copies for copies in (self._near, same, self._known) if copies is not None])
        return True

    def _due(self, last: bool) -> float:
        """Average visits per sample at which the next search is due."""
        if not last:
            return self.next_look
        return min(self.next_look, 3.0 if self._near is None else max(1.4 * self._looked, self._looked + 1))

    def _prepare(self, search: Callable[[], Copies] | None) -> None:
        self._search, self._begun = search, False

    def _take(self) -> bool:
        """Wait for the result of the prepared search, if any; a search that was never begun runs now."""
        search, self._search = self._search, None
        if search is not None:
            self._near = search()
        return search is not None

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        state: dict[str, npt.NDArray[Any]] = {
            "prints": self.prints.copy(),
            "looked": np.array([self.next_look, self._printed, self._waited, self._looked]),
        }
        coming = None if self._search is None else self._search()
        self._prepare(None if coming is None else lambda: coming)
        for name, copies in (("found", self.found), ("near", self._near), ("coming", coming)):
            if copies is not None:
                state |= {f"{name}_group": copies.group.copy(), f"{name}_similarity": copies.similarity.copy()}
        if self.embeddings is not None:
            state |= self.embeddings.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self.prints[:] = state["prints"]
        self.next_look = float(state["looked"][0])
        self._printed, self._waited = int(state["looked"][1]), bool(state["looked"][2])
        self._looked = float(state["looked"][3]) if len(state["looked"]) > 3 else 0.0
        self.found, self._near, coming = (
            Copies(group=state[f"{name}_group"], similarity=state[f"{name}_similarity"])
            if f"{name}_group" in state
            else None
            for name in ("found", "near", "coming")
        )
        self._prepare(None if coming is None else lambda: coming)
        self.embeddings = Embeddings.from_state(state) if "mean" in state else self.embeddings
