"""Class by class and visit by visit: what a ledger says about shares, losses and how often samples were trained on."""

from __future__ import annotations

import numpy as np

from salience.events import ClassFinding, Confusion, VisitFinding
from salience.ledger import Ledger
from salience.select.view import Bools

UNEVEN_RATIO = 1.25
"""A class gets an explanation if it has this many times more or fewer visits than its share."""
LEARNT_PROBABILITY = 0.9
"""A sample counts as learnt if the mean probability of its label is higher."""
MAX_BINS = 24
"""Maximum number of bins of a histogram."""
MAX_CLASSES_LISTED = 1000
"""Maximum number of classes listed."""
MAX_CONFUSIONS = 12
"""Maximum number of pairs of classes listed."""


def class_findings(ledger: Ledger, suspect: Bools) -> tuple[int, tuple[ClassFinding, ...]]:
    """The number of classes, and a finding for each; with more than MAX_CLASSES_LISTED, the hardest. `suspect` is bool [n]."""
    has = ledger.label >= 0
    if not has.any():
        return 0, ()
    present, label = np.unique(ledger.label[has], return_inverse=True)
    known, guess = np.isfinite(ledger.mean_loss[has]), ledger.guess[has]
    losses = np.where(known, ledger.mean_loss[has], 0).astype(np.float64)

    def total(values: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(label, values, minlength=len(present))

    size, visits, known_of = total(), total(ledger.trained[has].astype(np.float64)), total(known)
    loss = total(losses) / np.maximum(1, known_of)
    guessed, right = total(guess >= 0), total((guess >= 0) & (guess == ledger.label[has]))
    suspected = total(suspect[has]) / size
    sure = np.nan_to_num(ledger.confidence[has].astype(np.float32)) > LEARNT_PROBABILITY
    learnt = total(sure) / size
    overall = float(losses.sum() / max(1, int(known.sum()))), float(suspect[has].mean()), float(sure.mean())
    shown = np.arange(len(present))
    if len(present) > MAX_CLASSES_LISTED:
        shown = np.sort(np.argsort(-loss, kind="stable")[:MAX_CLASSES_LISTED])
    found: list[ClassFinding] = []
    for c in shown.tolist():
        share, got = float(size[c] / size.sum()), float(visits[c] / visits.sum()) if visits.any() else None
        found.append(
            ClassFinding(
                label=int(present[c]),
                samples=int(size[c]),
                share=share,
                visits=got,
                mean_loss=float(loss[c]) if known_of[c] else None,
                accuracy=float(right[c] / guessed[c]) if guessed[c] else None,
                reason="" if got is None else _unevenness(got / share, (loss[c], suspected[c], learnt[c]), overall),
            )
        )
    return len(present), tuple(found)


def confusions(ledger: Ledger) -> tuple[Confusion, ...]:
    """The most frequent pairs (class, class the model gave last), largest first; on a tie, the lower classes first."""
    wrong = (ledger.label >= 0) & (ledger.guess >= 0) & (ledger.guess != ledger.label)
    pairs, counts = np.unique(np.stack([ledger.label[wrong], ledger.guess[wrong]]), axis=1, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:MAX_CONFUSIONS]
    return tuple(
        Confusion(label=label, guess=guess, samples=count, share=count / int(np.count_nonzero(ledger.label == label)))
        for (label, guess), count in zip(pairs[:, most].T.tolist(), counts[most].tolist(), strict=True)
    )


def _unevenness(ratio: float, own: tuple[float, float, float], overall: tuple[float, float, float]) -> str:
    """Why a class was visited `ratio` times its share, from its mean loss, share of suspected labels and share of learnt
    labels, compared with those of all samples."""
    if 1 / UNEVEN_RATIO < ratio < UNEVEN_RATIO:
        return ""
    reason = f"visited {ratio:.2g}x its share: mean loss {own[0]:.2g} against {overall[0]:.2g} overall"
    if ratio < 1 and own[1] > UNEVEN_RATIO * overall[1]:
        reason += f", {own[1]:.0%} of its labels look wrong against {overall[1]:.0%}"
    more = own[2] > UNEVEN_RATIO * overall[2] if ratio < 1 else UNEVEN_RATIO * own[2] < overall[2]
    if more:
        reason += f", {own[2]:.0%} of it is learnt (p(label) over {LEARNT_PROBABILITY}) against {overall[2]:.0%}"
    return reason


def visit_findings(ledger: Ledger, *, windows: int, visits: int) -> VisitFinding:
    """How often samples were trained on in `windows` windows with `visits` visits, and how hard they are."""
    times = ledger.trained.astype(np.int64)
    edges, (often, seldom) = _losses(ledger, (2 * times > windows, 2 * times <= windows))
    return VisitFinding(
        counted=int(times.sum()) <= visits,
        always=int((times >= windows).sum()),
        sometimes=int(((times > 0) & (times < windows)).sum()),
        never=int((times == 0).sum()),
        times=_times(times),
        loss_edges=edges,
        often=often,
        seldom=seldom,
    )


def _times(times: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """Histogram of how often samples were visited, in at most MAX_BINS steps of equal width."""
    width = -(-(int(times.max()) + 1) // MAX_BINS)
    counts = np.bincount(times // width)
    return tuple((i * width, (i + 1) * width - 1, count) for i, count in enumerate(counts.tolist()))


def _losses(ledger: Ledger, groups: tuple[np.ndarray, ...]) -> tuple[tuple[float, ...], tuple[tuple[int, ...], ...]]:
    known = np.isfinite(ledger.mean_loss)
    if not known.any():
        return (), ((), ())
    loss = np.maximum(ledger.mean_loss, 1e-6)
    low, high = np.quantile(loss[known], 0.005), loss[known].max()
    edges = np.geomspace(low, max(high, low * 1.1), MAX_BINS + 1)
    at = np.clip(loss, edges[0], edges[-1])
    counts = tuple(tuple(np.histogram(at[known & group], edges)[0].tolist()) for group in groups)
    return tuple(edges.tolist()), counts
