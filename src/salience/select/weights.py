"""Loss weights from inclusion probabilities, in this one place."""

from __future__ import annotations

import numpy as np

from salience.select.view import Bools, Floats


def loss_weights(inclusion: Floats | None, drawn: int, population: int) -> Floats:
    """w_i = (drawn / population) / p_i, so that sum(w * l) / drawn estimates the mean loss over the population.

    E[w] = 1. Without inclusion probabilities (a rule that means to be biased) every weight is 1.
    """
    if inclusion is None:
        return np.ones(drawn, dtype=np.float32)
    return (np.float32(drawn / max(1, population)) / inclusion).astype(np.float32)


def muted_weights(weights: Floats, mute: Bools) -> Floats:
    """Weight 0 where `mute`, the others scaled so that the mean stays what it was."""
    loud = len(weights) - int(np.count_nonzero(mute))
    if loud == 0 or loud == len(weights):
        return weights
    return np.where(mute, np.float32(0), weights * np.float32(len(weights) / loud))
