"""How much to keep, from a short pilot: a few cheap runs at different shares, and a curve through their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError

POWERS = np.geomspace(0.05, 8, 1000)
"""Candidates for c: from nearly logarithmic to a sharp knee."""
CONFIDENCE = 0.9
TELLING = 0.25
"""An interval wider than this cannot tell."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pilot:
    """What a pilot found: the share to keep, how sure that is, and the curve metric = a - b * share^(-c)."""

    share: float
    """Smallest share predicted to lose at most the tolerance against everything; never below the smallest one tried."""
    low: float
    high: float
    """Where that share lies with 90% confidence, inside what was tried."""
    tells: bool
    """False: the results are too few or too noisy to choose by; `reason` says which."""
    reason: str
    a: float
    b: float
    c: float
    shares: tuple[float, ...]
    metrics: tuple[float, ...]
    outlier: int | None = None
    """Position of a result that was left out, because all others agree on a curve without it."""


def pilot(
    train: Callable[[float], float],
    budgets: Sequence[float] = (0.15, 0.25, 0.4, 0.6, 0.8, 1.0),
    *,
    tolerance: float = 0.002,
) -> Pilot:
    """Train a few short runs and say what share to keep.

    `train(share)` runs the pilot at that share of its visits and returns a metric, higher is better. A share may stand
    in `budgets` several times (with another seed each time, say). `tolerance` is in units of the metric.
    """
    metrics: list[float] = []
    for share in _checked(budgets, tolerance):
        metrics.append(float(train(share)))
        if not math.isfinite(metrics[-1]):
            raise ConfigError(
                f"train({share}) returned {metrics[-1]}; a pilot needs a finite metric, higher is better."
            )
    return choose_share(budgets, metrics, tolerance)


def choose_share(shares: Sequence[float], metrics: Sequence[float], tolerance: float = 0.002) -> Pilot:
    """The smallest share s that loses at most `tolerance` by the fit: b * (s^-c - 1) = tolerance.

    That is s = (1 + tolerance / b)^(-1 / c), held between the smallest share tried and 1.
    Least squares over a, b >= 0 and a grid of c. The interval holds the shares of all (b, c) that fit about as well,
    RSS <= RSS_min * (1 + t^2 / dof) with Student's t. A result is left out when the others fit so much better without it
    that its studentised residual is beyond chance, at 1% for all results together.
    """
    _checked(shares, tolerance)
    x, y = np.asarray(shares, dtype=np.float64), np.asarray(metrics, dtype=np.float64)
    if x.shape != y.shape:
        raise ConfigError(f"There are {len(x)} shares and {len(y)} metrics; they must be as many.")
    outlier = _outlier(x, y)
    kept = np.arange(len(x)) != (-1 if outlier is None else outlier)
    x, y = x[kept], y[kept]
    dof = len(x) - 3
    fit = _fit(x, y)
    best = int(np.argmin(fit.error))
    smallest = float(x.min())

    def needed(b: Floats, c: Floats) -> Floats:
        # b near 0: the metric does not depend on the share, and the smallest one will do
        return np.clip((1 + tolerance / np.maximum(b, 1e-12)) ** (-1 / c), smallest, 1.0)

    share = float(needed(fit.b[best : best + 1], POWERS[best : best + 1])[0])
    low, high = smallest, 1.0
    if dof > 0:
        room = fit.error[best] * (1 + student(dof, CONFIDENCE) ** 2 / dof) - fit.error
        near = room >= 0
        reach = np.sqrt(np.maximum(room[near], 0) / fit.spread[near])
        ends = needed(np.maximum(np.stack((fit.b[near] - reach, fit.b[near] + reach)), 0), POWERS[near])
        low, high = float(ends.min()), float(ends.max())
    if dof < 1 or len(np.unique(x)) < 4:
        tells, reason = False, f"{len(np.unique(x))} different shares are too few for a curve; try five or more"
    elif high - low > TELLING:
        tells, reason = False, f"the results allow any share from {low:.2f} to {high:.2f}; repeat runs with other seeds"
    else:
        tells, reason = True, f"{share:.2f} loses at most {tolerance:g} against everything ({low:.2f} to {high:.2f})"
    return Pilot(
        share=share, low=low, high=high, tells=tells, reason=reason, a=float(fit.a[best]), b=float(fit.b[best]),
        c=float(POWERS[best]), shares=tuple(map(float, shares)), metrics=tuple(map(float, metrics)), outlier=outlier,
    )  # fmt: skip


def student(dof: int, level: float) -> float:
    """t with P(|T| <= t) = level for Student's T: with T = sqrt(dof) * tan(angle), the angle has density ~ cos^(dof-1)."""
    angle = np.linspace(0, math.pi / 2, 20_001)
    mass = np.cumsum(np.cos(angle) ** (dof - 1))
    return math.sqrt(dof) * math.tan(float(np.interp(level, mass / mass[-1], angle)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Fit:
    """For each c of POWERS: the best a and b, the squared error, and how fast it grows away from that b."""

    a: Floats
    b: Floats
    error: Floats
    spread: Floats


def _fit(x: Floats, y: Floats) -> _Fit:
    """Least squares of y = a - b * x^(-c) for every c at once, b held at 0 or more."""
    z = x[None, :] ** -POWERS[:, None]
    centred = z - z.mean(axis=1, keepdims=True)
    spread = np.maximum((centred**2).sum(axis=1), 1e-300)
    b = np.maximum(0, -(centred @ y) / spread)
    a = y.mean() + b * z.mean(axis=1)
    error = ((y - a[:, None] + b[:, None] * z) ** 2).sum(axis=1)
    return _Fit(a=a, b=b, error=error, spread=spread)


def _outlier(x: Floats, y: Floats) -> int | None:
    """The result whose removal helps most, if its studentised residual is beyond chance (1% over all results)."""
    dof = len(x) - 4
    if dof < 1:
        return None
    whole = _fit(x, y).error.min()
    without = np.array([_fit(np.delete(x, k), np.delete(y, k)).error.min() for k in range(len(x))])
    worst = int(np.argmin(without))
    residual = math.sqrt(max(0.0, whole - without[worst]) / max(without[worst] / dof, 1e-300))
    return worst if residual > student(dof, 1 - 0.01 / len(x)) else None


def _checked(shares: Sequence[float], tolerance: float) -> Sequence[float]:
    if not shares or any(not 0 < share <= 1 for share in shares):
        raise ConfigError(f"budgets are {tuple(shares)}; each must be above 0 and at most 1.")
    if not tolerance > 0:
        raise ConfigError(f"tolerance is {tolerance}; it must be above 0, in units of the metric.")
    return shares
