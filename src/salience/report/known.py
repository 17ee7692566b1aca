"""What a ledger tells of a run when it is over: how often samples were trained on, how hard they are, class by class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from salience.ledger import Ledger
from salience.select.findings import balance

BINS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Class:
    """One class: what it has, what it got, how it fares."""

    label: int
    samples: int
    share: float
    """Of the samples,"""
    visits: float | None
    """and of the visits trained on."""
    mean_loss: float | None
    accuracy: float | None
    """Of the model's last guesses, each at the sample's last visit in training."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A ledger in a few numbers."""

    counted: bool
    """Whether its visits are those of this run alone; else how often samples were selected is not known."""
    always: int
    sometimes: int
    never: int
    """Samples trained on in every window, in some, in none."""
    times: tuple[tuple[int, int, int], ...]
    """(from, to, samples trained on that often)."""
    edges: tuple[float, ...]
    """Of the mean loss, spaced evenly in its logarithm,"""
    losses: tuple[tuple[int, ...], ...]
    """and the samples between them: those trained on in more than half of the windows, and the others."""
    classes: tuple[Class, ...]
    not_finite: int
    """Losses that were NaN or infinite."""


def know(ledger: Ledger, *, windows: int, visits: int) -> Known:
    """Read a ledger after `windows` windows with `visits` visits."""
    times = ledger.trained.astype(np.int64)
    counted = windows > 0 and int(times.sum()) <= visits
    groups = (times >= windows, (times > 0) & (times < windows), times == 0)
    edges, losses = _losses(ledger, (2 * times > windows, 2 * times <= windows))
    return Known(
        counted=counted,
        always=int(groups[0].sum()),
        sometimes=int(groups[1].sum()),
        never=int(groups[2].sum()),
        times=_times(times),
        edges=edges,
        losses=losses,
        classes=_classes(ledger),
        not_finite=int(ledger.bad.sum(dtype=np.int64)),
    )


def _times(times: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """How many samples came how often, in at most BINS steps of equal width."""
    width = -(-(int(times.max()) + 1) // BINS)
    counts = np.bincount(times // width)
    return tuple((i * width, (i + 1) * width - 1, count) for i, count in enumerate(counts.tolist()))


def _losses(ledger: Ledger, groups: tuple[np.ndarray, ...]) -> tuple[tuple[float, ...], tuple[tuple[int, ...], ...]]:
    known = np.isfinite(ledger.mean_loss)
    if not known.any():
        return (), ()
    loss = np.maximum(ledger.mean_loss, 1e-6)
    low, high = np.quantile(loss[known], 0.005), loss[known].max()
    edges = np.geomspace(low, max(high, low * 1.1), BINS + 1)
    at = np.clip(loss, edges[0], edges[-1])
    counts = tuple(tuple(np.histogram(at[known & group], edges)[0].tolist()) for group in groups)
    return tuple(edges.tolist()), counts


def _classes(ledger: Ledger) -> tuple[Class, ...]:
    shares = balance(ledger)
    if not shares:
        return ()
    has = ledger.label >= 0
    label = ledger.label[has]
    size = np.bincount(label)
    known = np.isfinite(ledger.mean_loss[has])
    guessed = ledger.guess[has] >= 0
    with np.errstate(invalid="ignore", divide="ignore"):
        loss = np.bincount(label[known], ledger.mean_loss[has][known], len(size)) / np.bincount(
            label[known], None, len(size)
        )
        right = np.bincount(label, guessed & (ledger.guess[has] == label)) / np.bincount(label, guessed)
    return tuple(
        Class(
            label=one.label,
            samples=int(size[one.label]),
            share=one.samples,
            visits=one.visits,
            mean_loss=None if np.isnan(loss[one.label]) else float(loss[one.label]),
            accuracy=None if np.isnan(right[one.label]) else float(right[one.label]),
            reason=one.reason,
        )
        for one in shares
    )
