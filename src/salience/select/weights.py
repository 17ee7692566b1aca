"""Loss weights from inclusion probabilities, in this one place."""

from __future__ import annotations

import numpy as np

from salience.select.view import Floats


def loss_weights(inclusion: Floats | None, drawn: int, population: int) -> Floats:
    """w_i = (drawn / population) / p_i, so that sum(w * l) / drawn estimates the mean loss over the population.

    E[w] = 1. Without inclusion probabilities (a rule that means to be biased) every weight is 1.
    """
    if inclusion is None:
        return np.ones(drawn, dtype=np.float32)
    return (np.float32(drawn / max(1, population)) / inclusion).astype(np.float32)


def scaled_weights(weights: Floats, factor: Floats) -> Floats:
    """Weights times `factor`, scaled so that the mean stays what it was; as they are where every factor is 0."""
    scaled = weights * factor
    total, wanted = float(scaled.sum()), float(weights.sum())
    return weights if total <= 0 else (scaled * np.float32(wanted / total)).astype(np.float32, copy=False)
