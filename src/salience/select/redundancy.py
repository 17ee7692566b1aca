"""Redundancy filter: of samples that are copies of each other, one is visited per window, in turn."""

from __future__ import annotations

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

SURROUNDING_NEIGHBOURS = 12
"""The distance to the neighbour of this rank measures how dense the surroundings are."""
SEARCH_OPTIONS = ("ratio", "visits")
"""Options of a plug-in that needs copies; they are passed on to `CopySearch`."""
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
    """Samples of one class that are much closer to each other than to their surroundings:

        d(i, j) < ratio * min(D_i, D_j),   D = distance to the 12th neighbour

    Distances are in units of the scatter from augmentation and training (see `in_units_of_scatter`). A relative test needs
    no scale (after Lowe's ratio test, 2004); if neighbours are that close by chance, the ratio is lower (see `by_chance`).
    Samples with different labels are left alone: one of the labels is wrong, and the noise filter decides which.
    """
    z = in_units_of_scatter(embeddings)
    known = np.flatnonzero(embeddings.visits > 0)
    distance, where = nearest(z[known], SURROUNDING_NEIGHBOURS)
    ratio = min(ratio, by_chance(distance))
    around = distance[:, -1]
    around = np.where(np.isfinite(around), around, 0)
    rows, columns = np.repeat(np.arange(len(known)), SURROUNDING_NEIGHBOURS - 1), where[:, :-1].ravel()
    apart = distance[:, :-1].ravel()
    close = (columns >= 0) & (apart < ratio * np.minimum(around[rows], around[columns]))
    close |= (columns >= 0) & (apart <= 0.25 * np.median(around))  # in groups that fill their own surroundings
    rows, columns = known[rows[close]], known[columns[close]]
    same = label[rows] == label[columns]
    rows, columns = rows[same], columns[same]
    cosine = np.einsum("ij,ij->i", z[rows], z[columns]) / np.maximum(
        np.linalg.norm(z[rows], axis=1) * np.linalg.norm(z[columns], axis=1), 1e-12
    )
    similarity = np.zeros(embeddings.n, dtype=np.float32)
    np.maximum.at(similarity, rows, np.clip(cosine, 0, 1).astype(np.float32))
    np.maximum.at(similarity, columns, np.clip(cosine, 0, 1).astype(np.float32))
    return Copies(group=connected(embeddings.n, rows, columns), similarity=similarity)


def by_chance(distance: Floats, chance: float = 0.1) -> float:
    """The ratio d_1 / d_12 that a share `chance` of samples without copies falls below: (chance / 11)^(1 / D).

    A tenth is a lot, but a pair has to pass from both sides: precision was 0.86 on rendered digits (D = 14), up from 0.66,
    and 0.97 on features of CIFAR-10 (D = 18). D is the dimension of the surroundings, after Levina and Bickel
    (2004): the mean of log(d_12 / d_j) over the neighbours from the 4th on (the first ones may be copies) is 0.555 / D,
    0.555 being the mean of 1/j + ... + 1/11; the median over all samples.
    """
    outer, inner = distance[:, -1:], distance[:, 3:-1]
    usable = np.isfinite(outer[:, 0]) & (inner[:, 0] > 0)
    if not usable.any():
        return 1.0
    thinning = np.log(outer[usable] / inner[usable]).mean(axis=1)
    return float((chance / 11) ** (np.median(thinning) / 0.555))


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

    def __init__(self, n: int, *, ratio: float = 0.78, visits: float = 6.0, given: npt.ArrayLike | None = None) -> None:
        self.given = None if given is None else zlib.crc32(np.ascontiguousarray(given).tobytes())
        """Checksum of the user's vectors."""
        self.ratio = ratio if given is None else 0.9 * ratio
        """Lower for vectors given by the user, which do not scatter."""
        self.next_look = 0.0 if given is not None else visits
        """Average visits per sample at which to search next."""
        self.embeddings = None if given is None else Embeddings.given(given, n)
        self.prints = np.zeros(n, dtype=np.int64)
        """Fingerprints of the samples' bytes; 0 = not known."""
        self.found: Copies | None = None
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
        self.found = merged([copies for copies in (self._near, same) if copies is not None])
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
