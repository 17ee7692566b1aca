"""Noise filter: from the training history alone, which labels are wrong, as opposed to hard? No clean holdout needed.

is there noise?     of the samples the model is surest of, how many carry another label: more than its errors explain?
which labels?       margins against the label, and the direction in which labels of two classes went astray
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError
from salience.registry import card
from salience.select.view import Bools, Floats, Verdict, View

ENOUGH = 500_000
"""Samples from which rates are counted; beyond, every second, third, ... is taken."""

LOWEST = 0.75
"""No label counts as wrong below this suspicion."""

MANY_CLASSES = 4096
"""With more classes than this, pairs of classes are too rare to count."""

Labels = npt.NDArray[np.integer[Any]]
Table = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Judgement:
    """What the history says of the labels."""

    suspicion: Floats
    """float32 [n], NaN where nothing is known: 0 = undecided, 1 = as sure of another class as it usually is of the label."""
    rate: float
    """Estimated share of wrong labels; 0 where there is no sign of any, NaN where one cannot tell."""
    edge: float
    """Suspicion above which a label counts as wrong."""
    evidence: str
    """In words, what the rate was estimated from."""

    @property
    def suspects(self) -> Bools:
        """bool [n]; all False where there is no sign of wrong labels."""
        if not self.rate > 0:
            return np.zeros(len(self.suspicion), dtype=bool)
        return self.suspicion > self.edge


def judge(history: Any, *, before: float = 0.0, floor: float = 0.01, lowest: float = LOWEST) -> Judgement:
    """What a ledger (or a view of one) says of its labels.

    `before` is the rate estimated a window ago, NaN where one could not tell. Labels found wrong and left out are looked
    at less often, so that the model seems less sure of them: the rate is remembered, falls by 1% a window, and is at
    most 6/5 of what still looks wrong. Whether there is noise is asked again only when it is under `floor`; until then
    margins are compared with those of their time.
    """
    label, guess, p = history.label, history.guess, history.guess_p
    plain = contradiction(history.margin, label, history.last_seen if before >= floor else None)
    wrong, wrong_where_sure = disagreement(label, guess, p)
    evidence = f"the model differs from {wrong:.1%} of the labels, from {wrong_where_sure:.1%} where it is surest"
    rate = before if before >= floor else noise_rate(wrong, wrong_where_sure, floor, doubted=bool(np.isnan(before)))
    if not rate > 0:
        return Judgement(suspicion=plain, rate=rate, edge=np.inf, evidence=evidence)
    astray = direction(label, history.other, transitions(label, guess, p))
    s: Floats = (plain + 1.5 * astray).astype(np.float32, copy=False)
    if before >= floor:
        looks_wrong = float(np.count_nonzero(s > LOWEST) / max(1, np.count_nonzero(~np.isnan(s))))
        rate = max(wrong_where_sure, min(0.99 * before, 1.2 * looks_wrong))
        if rate < floor:
            return Judgement(suspicion=plain, rate=0.0, edge=np.inf, evidence=evidence)
    return Judgement(suspicion=s, rate=rate, edge=edge_of(s, rate, lowest), evidence=evidence)


def disagreement(label: Labels, guess: Labels, guess_p: npt.NDArray[Any]) -> tuple[float, float]:
    """Share of samples whose label the model does not give, of all and of the tenth it is surest of (in each class)."""
    some = slice(None, None, max(1, len(label) // ENOUGH))
    label, guess, guess_p = label[some], guess[some], guess_p[some]
    known = (guess >= 0) & (label >= 0) & ~np.isnan(guess_p)
    if not known.any():
        return 0.0, 0.0
    label, guess = label[known], guess[known].astype(np.int64)
    # Sorting by (class, p) is slow; counting them in 2048 steps of p is not, and float16 knows no more near 1.
    step = (guess_p[known].astype(np.float32) * 2047).astype(np.int64)
    classes = int(guess.max()) + 1
    counts = np.bincount(guess * 2048 + step, minlength=classes * 2048).reshape(classes, 2048)
    above = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]
    lowest = 2047 - np.argmax(above[:, ::-1] >= 0.1 * above[:, :1], axis=1)
    differs = label != guess
    sure = step >= lowest[guess]
    return float(differs.mean()), float(differs[sure].mean())


def noise_rate(wrong: float, wrong_where_sure: float, floor: float, *, doubted: bool = True) -> float:
    """Share of wrong labels; 0 where there is no sign of any, NaN where one cannot tell.

    A model that differs from a share d of right labels differs from at most about 1.7 d^3 of them where it is surest: what
    is hard is what it is unsure of (on clean CIFAR-10 1.2 to 1.8 d^3 for a small network, d from 0.26 to 0.57, and 0 to
    1.1 d^3 for ResNet-9, d from 0.14 to 0.26). Wrong labels it contradicts with certainty, so that where it is surest it
    differs from as many as are wrong. With r = differing where sure / differing at all: r over 1.7 d^2 + 0.06 is noise,
    if it is over 0.25 as well, or over 0.17 where the labels were doubted a window ago (hard samples that were just
    learnt leave r up to 0.22 behind on clean data). Less is no sign of noise, if the model has learnt enough (d at most
    0.35) for that to mean something.
    """
    ratio = wrong_where_sure / max(wrong, 1e-9)
    if ratio > max(0.17 if doubted else 0.25, 1.7 * wrong**2 + 0.06) and (wrong > 0.35 or wrong_where_sure >= floor):
        return wrong_where_sure
    return 0.0 if wrong <= 0.35 else float("nan")


def contradiction(margin: Floats, label: Labels, last_seen: Labels | None = None) -> Floats:
    """How much the model prefers another class to the label, in units of how much it usually prefers the label:

        c_i = -margin_i / M,   M = mean of the margins above 0

    The margin is the exponential mean of z_label - max other z (the sign and averaging over visits after AUM, Pleiss et
    al. 2020), which told wrong from right labels best of all columns; one M for all classes did so better than one
    a class. Hard samples hover around 0, wrong labels around 1. NaN where nothing is known. float32 [n].

    Margins grow as the model gets surer, and those of samples that are left out are old: with `last_seen`, M is that of
    the samples seen last in the same window (of all, where there are fewer than 50 of them).
    """
    some = margin[:: max(1, len(margin) // ENOUGH)]
    right = some[some > 0]
    typical = np.float32(max(float(right.mean()) if len(right) else 1.0, 1e-6))
    scale: Any = typical
    if last_seen is not None:
        sure = margin > 0
        count = np.bincount(last_seen[sure] + 1, minlength=int(last_seen.max()) + 2)
        total = np.bincount(last_seen[sure] + 1, weights=margin[sure], minlength=len(count))
        scale = np.where(count < 50, typical, total / np.maximum(count, 1)).astype(np.float32)[last_seen + 1]
    return np.where(label < 0, np.float32(np.nan), -margin / scale).astype(np.float32, copy=False)


def transitions(label: Labels, guess: Labels, guess_p: npt.NDArray[Any], prior: float = 5.0) -> Table | None:
    """T[t, y]: how often a sample of class t carries label y, float32 [classes, classes]; None with too many classes.

    Counted among the samples the model is surer of than on average of their class, where its guess may stand for the
    truth: the confident joint of confident learning (Northcutt et al. 2021). `prior` right labels are added a class.
    """
    some = slice(None, None, max(1, len(label) // ENOUGH))
    label, guess, guess_p = label[some], guess[some], guess_p[some]
    classes = int(max(label.max(), guess.max())) + 1
    if classes < 2 or classes > MANY_CLASSES:
        return None
    known = (label >= 0) & (guess >= 0)
    truth, given, p = guess[known].astype(np.int64), label[known], guess_p[known].astype(np.float32)
    mean = np.bincount(truth, weights=p, minlength=classes) / np.maximum(np.bincount(truth, minlength=classes), 1)
    sure = p >= mean[truth]
    counts = np.bincount(truth[sure] * classes + given[sure], minlength=classes * classes).reshape(classes, classes)
    table = counts + prior * np.eye(classes)
    return (table / table.sum(axis=1, keepdims=True)).astype(np.float32)


def direction(label: Labels, other: Labels, table: Table | None) -> Floats:
    """Which way labels went astray between the label y and the strongest other class o:

        d_i = log((T[o, y] + 0.1) / (T[y, o] + 0.1))

    Where o is often labelled y but y hardly ever o (class-dependent noise), the model learns the habit and its margins say
    little: the direction then tells the wrong from the right. With noise that is as frequent both ways it is 0.
    """
    if table is None:
        return np.zeros(len(label), dtype=np.float32)
    o = np.clip(other, 0, len(table) - 1)
    y = np.clip(label, 0, len(table) - 1)
    ratio = np.log((table + np.float32(0.1)) / (table.T + np.float32(0.1)))
    return np.where((other < 0) | (label < 0), np.float32(0), ratio[o, y]).astype(np.float32, copy=False)


def edge_of(s: Floats, rate: float, lowest: float = LOWEST) -> float:
    """Suspicion above which a label counts as wrong: `lowest`, or higher where more than 5/4 of the rate would be suspected."""
    known = s[:: max(1, len(s) // ENOUGH)]
    known = known[~np.isnan(known)]
    if not len(known) or 1.25 * rate >= 1:
        return lowest
    return max(lowest, float(np.quantile(known, 1 - 1.25 * rate)))


@card(needs=("margin",), exact=False)
def noise(
    view: View,
    *,
    start: float = 0.3,
    floor: float = 0.01,
    lowest: float = LOWEST,
    revisit: int = 3,
    keep: float = 0.65,
    limit: float = 0.6,
    weight: float = 0.0,
) -> Verdict:
    """Leaves out samples whose label the training history contradicts, and looks at them again every few windows.

    As soon as samples were seen twice on average, samplers prefer hard samples only where there is no sign of wrong labels.
    From `start` of the run on, labels that look wrong are left out. A sample that was left out for more than
    `revisit` windows comes back with weight 0: it is judged anew by a model that was not trained on it, and re-admitted if
    it was misjudged. Since a visit buys less among wrong labels, the window visits at least four times the noise rate, up
    to the share `keep`. More than `limit` suspected: the filter refuses, since then the model is at fault rather than the
    labels. `floor` is the noise rate that is not worth the trouble, `lowest` the least suspicion that counts. With `weight`
    above 0, suspected samples are not left out but weigh that much.
    """
    shares = {"start": start, "floor": floor, "keep": keep, "limit": limit, "weight": weight}
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"noise: {name} is {value}; it must be from 0 to 1.")
    if lowest <= 0 or revisit < 1:
        raise ConfigError(f"noise: lowest is {lowest} (above 0), revisit is {revisit} (at least 1).")
    if view.seen.mean() < 1.9:  # two passes, less the batches dropped at their ends
        return Verdict(noise=float("nan"), reason="waits until samples were seen twice")
    found = judge(view, before=view.clock.noise, floor=floor, lowest=lowest)
    if not found.rate > 0:
        reason = "no sign of wrong labels" if found.rate == 0 else "cannot tell yet whether labels are wrong"
        return Verdict(noise=found.rate, reason=f"{reason}: {found.evidence}")
    if view.clock.time < start:
        return Verdict(
            noise=float("nan"), reason=f"labels may be wrong, waits until {start:.0%} of the run: {found.evidence}"
        )
    share = min(keep, 4 * found.rate)
    suspect = found.suspects
    doubted = np.count_nonzero(suspect) / max(1, np.count_nonzero(~np.isnan(found.suspicion)))
    if doubted > limit:
        reason = f"refused: {doubted:.0%} of all samples are suspected, more than {limit:.0%}"
        return Verdict(noise=found.rate, share=share, reason=reason)
    reason = f"label contradicted (suspicion over {found.edge:.2f}; estimated noise {found.rate:.1%}: {found.evidence})"
    if weight > 0:
        factor = np.where(suspect, np.float32(weight), np.float32(1))
        return Verdict(factor=factor, noise=found.rate, share=share, reason=reason)
    again = suspect & (view.age > revisit)
    factor = np.where(again, np.float32(0), np.float32(1))
    return Verdict(keep=~suspect, force=again, factor=factor, noise=found.rate, share=share, reason=reason)
