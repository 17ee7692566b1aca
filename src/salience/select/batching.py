"""Whole batches: a window that selects is a whole number of equal batches.

A short last batch is a step at full learning rate on a few samples, with batch-norm statistics of a few samples, once per
window; with short windows it costs more than good selection gains. Equal shapes also suit `torch.compile`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from salience.select.view import Bools, Floats, Ids, Rng


@dataclass(frozen=True, kw_only=True, slots=True)
class Batching:
    """How the visits of a selecting window become optimizer steps."""

    size: int
    """Samples per step over all ranks in a full window."""
    world: int = 1
    constant: bool = False
    """True if every window has as many steps as a full one, with batches that shrink with its visits."""
    drop_last: bool = False

    def batch(self, granted: int, population: int) -> int:
        """Samples per step over all ranks in a window with `granted` visits; never more than there are samples."""
        size = self.size
        if self.constant:  # as many on every rank
            size = self.world * max(1, round(size * granted / population / self.world))
        return min(size, max(self.world, population))

    def steps(self, granted: int, population: int, *, last: bool) -> int:
        """Number of whole batches nearest to `granted` visits; of everything, rounded down, but up in the last window."""
        batch = self.batch(granted, population)
        most = population // batch
        if granted < population:
            return max(1, min(round(granted / batch), most))
        return max(1, -(-population // batch) if last and not self.drop_last else most)

    def visits(self, granted: int, population: int, *, last: bool) -> int:
        return self.steps(granted, population, last=last) * self.batch(granted, population)


def members(n: int, epoch: int, piece: int, pieces: int) -> range:
    """The samples of one of the `pieces` windows of an epoch: every `pieces`-th one.

    Every sample belongs to one window of each epoch, whatever the order of classes on disk, and no list is stored.
    """
    return range((piece + epoch) % pieces, n, pieces)


def trimmed(batch: int, keep: Bools, waited: Bools, rng: Rng) -> Bools:
    """Which of m drawn samples to keep so that they fill whole batches, bool [m].

    Those left out are drawn at random from samples that are neither in `keep` nor in `waited`, if there are enough of them:
    samples left over from one full window are never left out of the next.
    """
    m = len(keep)
    over = m % batch if m > batch else 0
    stay = np.ones(m, dtype=bool)
    stay[np.lexsort((rng.random(m), waited, keep))[:over]] = False
    return stay


def filled(ids: Ids, weights: Floats, batch: int, rng: Rng) -> tuple[Ids, Floats]:
    """Complete the last batch with second visits of samples from other batches: the last window leaves nothing out."""
    over = len(ids) % batch
    if over == 0 or len(ids) < batch:
        return ids, weights
    again = rng.choice(len(ids) - over, batch - over, replace=False)
    return np.concatenate((ids, ids[again])), np.concatenate((weights, weights[again]))
