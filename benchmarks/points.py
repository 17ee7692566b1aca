"""Small sets of points for elsewhere.py, on which a preference for hard samples could do harm, or should help.

overlap       five classes that overlap: about a quarter of the outcomes is chance, for ever
concentrated  twenty classes, and 40% wrong labels in three of them alone: too few (6%) to be noticed overall
rare          two classes, one of 2%, and 1% of the labels drawn by lot
many          two hundred classes of unequal size
parity        one half is easy, the other the parity of four bits: hard, and all of it can be learnt
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Points(NamedTuple):
    """Inputs and labels for training and for the test, and the width of the model."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    width: int
    epochs: int


def overlap(seed: int) -> Points:
    rng = np.random.default_rng((seed, 4))
    y = rng.integers(0, 5, 12_000)
    return _halves(_around(rng, 0.45 * rng.normal(size=(5, 20)), y), y, y, width=64, epochs=15)


def concentrated(seed: int) -> Points:
    rng = np.random.default_rng((seed, 5))
    y = rng.integers(0, 20, 16_000)
    given = np.where((y < 3) & (rng.random(len(y)) < 0.4), (y + 7) % 20, y)
    return _halves(_around(rng, 0.8 * rng.normal(size=(20, 30)), y), given, y, width=128, epochs=20)


def rare(seed: int) -> Points:
    rng = np.random.default_rng((seed, 6))
    y = (rng.random(24_000) < 0.02).astype(np.int64)
    x = _around(rng, np.stack((np.zeros(30), rng.normal(0, 0.4, 30))), y)
    x[:, :6] *= np.where(y > 0, 0.5, 1.0)[:, None]
    given = np.where(rng.random(len(y)) < 0.01, rng.integers(0, 2, len(y)), y)
    return _halves(x, given, y, width=64, epochs=12)


def many(seed: int) -> Points:
    rng = np.random.default_rng((seed, 7))
    size = np.arange(1, 201) ** -0.7
    y = rng.choice(200, 16_000, p=size / size.sum())
    return _halves(_around(rng, 0.7 * rng.normal(size=(200, 40)), y), y, y, width=256, epochs=15)


def parity(seed: int) -> Points:
    rng = np.random.default_rng((seed, 8))
    x = rng.normal(size=(16_000, 16))
    y = np.where(x[:, 0] > 0, x[:, 1] > 0, (x[:, 2:6] > 0).sum(axis=1) % 2).astype(np.int64)
    return _halves(x, y, y, width=128, epochs=30)


def _around(rng: np.random.Generator, centres: np.ndarray, y: np.ndarray) -> np.ndarray:
    return centres[y] + rng.normal(size=(len(y), centres.shape[1]))


def _halves(x: np.ndarray, given: np.ndarray, true: np.ndarray, *, width: int, epochs: int) -> Points:
    """The first half to train on, with the labels given; the second to test, with the true ones."""
    half = len(x) // 2
    return Points(x[:half], given[:half], x[half:], true[half:], width, epochs)


POINTS: dict[str, Callable[[int], Points]] = {
    "overlap": overlap, "concentrated": concentrated, "rare": rare, "many": many, "parity": parity,
}  # fmt: skip
