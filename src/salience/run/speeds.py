"""What is known about the speeds of the ranks, and the parts of a batch with which all of them take equally long.

A step of n units of work takes rank r    pace[r] * (fixed[r] + n)    seconds: some of it does not shrink with the part, such as
the optimizer's step. Proportional parts leave that out, and a slow rank pays it in full. `fixed` shows when a rank's work has
changed and its seconds less, or more, than in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]

SMOOTHING = 0.5
"""Weight of the last measurement of a rank against what was known before."""
MOVED = 0.25
"""Share by which a rank's work must have changed to tell fixed work from the rest."""
MOST_FIXED = 2.0
"""Fixed work is at most this multiple of an equal part."""
BOUND = 16.0
"""A rank takes at least this fraction, and at most this multiple, of an equal part."""


@dataclass(slots=True)
class Speeds:
    """Speeds of all ranks, smoothed over measurements; arrays [ranks]."""

    work: Array
    """Units of work per step in the last measurement."""
    seconds: Array
    """Seconds that such a step took."""
    fixed: Array
    """Units of work that a step takes whatever the part."""

    @classmethod
    def first(cls, work: Array, seconds: Array) -> Speeds:
        """From one measurement, which cannot tell fixed work from the rest."""
        return cls(work, seconds, np.zeros(len(work)))

    @property
    def pace(self) -> Array:
        """Seconds per unit of work."""
        return self.seconds / (self.fixed + self.work)

    def learn(self, work: Array, seconds: Array) -> None:
        """Take in one more measurement."""
        change, slower = work - self.work, seconds - self.seconds
        telling = (np.abs(change) > MOVED * self.work) & (slower / np.where(change == 0, 1.0, change) > 0)
        slope = np.where(telling, slower, 1.0) / np.where(telling, change, 1.0)
        found = np.clip(seconds / slope - work, 0.0, MOST_FIXED * work.mean())
        self.fixed = np.where(telling, found, self.fixed)
        pace = self.pace ** (1 - SMOOTHING) * (seconds / (self.fixed + work)) ** SMOOTHING
        self.work, self.seconds = work, pace * (self.fixed + work)

    def slowest(self, parts: Array) -> float:
        """Seconds of a step with these units of work on each rank."""
        return float((self.pace * (self.fixed + parts)).max())

    def parts(self) -> Array:
        """The same total work, divided so that all ranks take equally long, within bounds."""
        total, equal, pace = self.work.sum(), self.work.mean(), self.pace

        def in_time(seconds: float) -> Array:
            return np.clip(seconds / pace - self.fixed, equal / BOUND, equal * BOUND)

        low, high = 0.0, float(((self.fixed + total) * pace).max())
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if in_time(middle).sum() < total else (low, middle)
        parts = in_time(high)
        return parts * (total / parts.sum())

    def state_dict(self) -> dict[str, Any]:
        names = ("work", "seconds", "fixed")
        return {name: torch.from_numpy(getattr(self, name).copy()) for name in names}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Speeds:
        return cls(*(state[name].numpy().copy() for name in ("work", "seconds", "fixed")))
