"""The only place that computes loss weights from inclusion probabilities, and the weight of the early-learning term."""

from __future__ import annotations

import numpy as np

from salience.select.view import Floats

MAX_HARMLESS_NOISE, MIN_FULL_NOISE, MAX_STRENGTH = 0.15, 0.35, 2.0
"""The automatic strength is 0 up to the first estimated share of wrong labels, and MAX_STRENGTH from the second one on."""


def robust_strength(setting: float | str, noise: float | None) -> float:
    """lambda of `early_learning`: the number given; with "auto" it follows the share of wrong labels (0 if unknown)."""
    if not isinstance(setting, str):
        return float(setting)
    if noise is None or noise != noise:
        return 0.0
    share = (noise - MAX_HARMLESS_NOISE) / (MIN_FULL_NOISE - MAX_HARMLESS_NOISE)
    return MAX_STRENGTH * min(1.0, max(0.0, share))


def loss_weights(inclusion: Floats | None, drawn: int, population: int, temper: float = 1.0) -> Floats:
    """w_i = (drawn / population) / p_i, so that sum(w * l) / drawn estimates the mean loss over the population.

    E[w] = 1. Without inclusion probabilities (a rule that is biased on purpose) every weight is 1. A `temper` below 1 is an
    exponent on these weights, scaled to mean 1: between unbiased and preferring samples drawn often.
    """
    if inclusion is None:
        return np.ones(drawn, dtype=np.float32)
    weights = (np.float32(drawn / max(1, population)) / inclusion).astype(np.float32)
    if temper == 1:
        return weights
    weights = weights ** np.float32(temper)
    return (weights / max(float(weights.mean()), 1e-9)).astype(np.float32) if drawn else weights


def scaled_weights(weights: Floats, factor: Floats) -> Floats:
    """Weights times `factor`, scaled so that the mean stays the same; unchanged if every factor is 0."""
    scaled = weights * factor
    total, wanted = float(scaled.sum()), float(weights.sum())
    return weights if total <= 0 else (scaled * np.float32(wanted / total)).astype(np.float32, copy=False)
