"""Student's t, the paired test (the mean of differences and the interval in which it lies), and means of what is known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean over pairs, and the ends of its confidence interval; a single pair has no ends."""

    mean: float
    low: float | None
    high: float | None
    pairs: int

    def separated(self, nothing: float) -> bool:
        """True if the interval excludes the value that would mean "no difference"."""
        return self.low is not None and self.high is not None and not self.low <= nothing <= self.high


def paired_interval(differences: Sequence[float], level: float = 0.95) -> Interval | None:
    """mean +- t(n - 1) * s / sqrt(n) of paired differences, two-sided; None without any."""
    count = len(differences)
    if not count:
        return None
    mean = statistics.fmean(differences)
    if count == 1:
        return Interval(mean=mean, low=None, high=None, pairs=1)
    reach = t_quantile(level, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return Interval(mean=mean, low=mean - reach, high=mean + reach, pairs=count)


def t_quantile(level: float, dof: int) -> float:
    """t with P(|T| <= t) = level, for Student's T with `dof` degrees of freedom."""
    if not 0 <= level < 1:
        raise ConfigError(f"level is {level}; it must be at least 0 and below 1.")
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # by halves, down to the precision of a float
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, dof) < level else (low, angle)
    return math.sqrt(dof) * math.tan((low + high) / 2)


def _within(angle: float, dof: int) -> float:
    """P(|T| <= sqrt(dof) tan(angle)): a finite sum of powers of the cosine (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    if dof < 1:
        raise ConfigError(f"Student's t has {dof} degrees of freedom; it needs at least 1.")
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = dof % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(dof // 2):
        total += term
        term *= cosine * cosine * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def known_mean(values: npt.NDArray[np.floating], axis: int = 0) -> npt.NDArray[np.float64]:
    """Mean along an axis of the numbers that are not NaN; NaN where there are none."""
    known = ~np.isnan(values)
    total = np.where(known, values, 0).sum(axis=axis, dtype=np.float64)
    return total / np.where(known.any(axis=axis), known.sum(axis=axis), np.nan)
