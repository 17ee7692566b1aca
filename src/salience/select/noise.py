"""Wrong labels, from the training history alone: are there any, which ones, how certain is that? Needs no clean holdout.

    votes        each sample's predictions, averaged over its visits (`Ledger.vote`, `vote_p`)
    evidence     of the predictions the model is surest of, how many contradict the label (S), and of all (D)
    are there?   correct labels: S falls much faster than D as the model learns; wrong ones: S does not
    which?       labels that other classes, mislabelled at that rate, explain at least as well as their own

The filter, the findings and the report share one judgement: `judge`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from salience.errors import ConfigError
from salience.registry import card
from salience.select.codes import class_codes
from salience.select.contradictions import (
    Evidence,
    Labels,
    Rates,
    calibrated,
    evidence,
    odds_of_wrong,
    rates,
    sharpness,
)
from salience.select.view import Bools, Floats, Verdict, View

PASSES_TO_JUDGE = 3.0
"""Average number of visits before there is a verdict."""
RATE_OF_NOTE = 0.08
"""A lower rate of wrong labels cannot be told from hard samples, and leaving them out would gain little."""
MAX_CONTRADICTED = 0.5
"""If the surest predictions contradict this share of the labels, the model is at fault rather than the labels."""
PASSES_TO_ACT = 4.0
"""Average number of visits before labels are called wrong."""
MIN_CLEAN_SLOPE = 2.4
"""With correct labels, S falls about as D to the power of 2.5 to 6; with wrong ones, to the power of 0.8 to 2."""
DOUBT, DOUBT_BEFORE = 2.33, 1.64
"""Standard errors by which S must fall slower than that for an alarm, now and in the window before (if that could tell). The
test is repeated in every window: with 300 sure predictions and S falling as D to the power of 2.5, 36% of simulated runs of
twenty windows had an alarm at 1.64, 5% at 2.33 and 2% with the window before; at the power of 1.5, 97% had one."""
ALARMS_TO_LIST = 3
"""Number of windows with an alarm that are needed to list labels that the model has learnt by heart since."""
FEWEST_OF_CLASS, LEAST_VOTED, MOST_OF_CLASS = 50, 0.5, 0.8
"""A class is left alone if it has fewer samples than the first, if the model predicts it for less than the second as a share of
the samples with that label, or if it would lose more than the third."""

Course = Sequence[tuple[float, float, float, float]]
"""One row per window: D, S, the number of sure predictions, and the share left out for their labels in the window before."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Judgement:
    """What the history says about the labels."""

    wrong: Floats
    """Probability that each label is wrong, float32 [n]; NaN where nothing is known or nothing can be told."""
    verdict: str
    """"wrong labels", "no sign of wrong labels" or "cannot tell"."""
    rate: float
    """Share of wrong labels; 0 if there is no sign of any worth acting on, NaN if it cannot be told."""
    evidence: str
    """The reasons for the verdict, in words."""
    spared: Bools
    """Samples of classes that are left alone, bool [n]: too small, too poorly learnt, or losing too much."""
    firm: bool = False
    """True if labels called wrong may be left out: the model's current predictions support the verdict."""

    def suspects(self, over: float = 0.5) -> Bools:
        """Labels wrong with a probability above `over`, outside classes left alone, bool [n]; none if nothing can be told."""
        return (np.nan_to_num(self.wrong) > over) & ~self.spared


def contradictions(history: Any) -> Rates:
    """How often the predictions in a ledger (or a view of one) contradict its labels now."""
    _, (label, guess) = class_codes(history.label, history.vote[:, 0])
    return rates(label, guess, history.vote_p[:, 0])


def judge(history: Any) -> Judgement:
    """Judge the labels by a ledger (or a view of one)."""
    course: Course = history.course
    n = len(history.label)
    _, (label, vote) = class_codes(history.label, history.vote)
    known = (label >= 0) & (history.vote_p[:, 0] > 0)
    nothing = np.full(n, np.nan, dtype=np.float32)
    none = np.zeros(n, dtype=bool)
    if not known.any():
        return Judgement(
            wrong=nothing, verdict="cannot tell", rate=float("nan"), evidence="no predictions", spared=none
        )
    found = evidence(label, vote, history.vote_p)
    said = (
        f"the model differs from {found.differs:.1%} of the labels, and from {found.rate:.1%} of them "
        f"({found.low:.1%} to {found.high:.1%}) where it is surest"
    )
    verdict, why, firm = _verdict(found, course, float(history.seen.mean()))
    if verdict == "cannot tell":
        return Judgement(wrong=nothing, verdict=verdict, rate=float("nan"), evidence=f"{said}; {why}", spared=none)
    if verdict == "no sign of wrong labels":
        return Judgement(
            wrong=np.where(known, np.float32(0), nothing),
            verdict=verdict,
            rate=0.0,
            evidence=f"{said}; {why}",
            spared=none,
        )
    rate = rate_of(found, course)
    columns = (label, vote, history.vote_p, history.confidence)
    odds = odds_of_wrong(*columns, found.transitions, sharpness(*columns, found, rate))
    wrong = np.where(known, calibrated(odds, known, rate), np.float32(np.nan)).astype(np.float32)
    spared = spared_classes(label, vote[:, 0], np.nan_to_num(wrong) > 0.5)
    return Judgement(wrong=wrong, verdict=verdict, rate=rate, evidence=f"{said}; {why}", spared=spared, firm=firm)


def _verdict(found: Evidence, course: Course, passes: float) -> tuple[str, str, bool]:
    """The verdict on the labels, the reason for it, and True if it is certain enough to leave labels out."""
    if passes < PASSES_TO_JUDGE:
        return (
            "cannot tell",
            f"samples were seen {passes:.1f} times on average, fewer than {PASSES_TO_JUDGE:.0f}",
            False,
        )
    if found.rate >= MAX_CONTRADICTED:
        return "cannot tell", "the model has learnt too little to judge any label", False
    if course and course[-1][3] > 0:
        return _still(found, course)
    if _alarm(course, passes, found.low):
        slope, _ = fall(course)
        return (
            "wrong labels",
            f"that falls as the {slope:.1f}th power of the former, slower than with right labels",
            True,
        )
    if learnt_by_heart(course, passes):
        why = "that was more, and hardly fell, before the model learnt such labels by heart"
        return "wrong labels", why, False
    if found.high < RATE_OF_NOTE:
        before = rate_of(found, course)
        if before > RATE_OF_NOTE:
            why = f"that was {before:.1%} before: hard samples, or wrong labels learnt by heart"
            return "cannot tell", why, False
        return "no sign of wrong labels", f"that is under {RATE_OF_NOTE:.0%}", False
    if not np.isfinite(fall(course)[0]):
        return "cannot tell", "it is too early to see whether that falls as the model learns", False
    return "cannot tell", "that still falls as the model learns, as it does with right labels that are hard", False


def _alarm(course: Course, passes: float, low: float) -> bool:
    """True if S is at least `low` and falls slower with D than with correct labels, and did so in the window before."""
    now, before = margin(course), margin(course[:-1])
    return bool(passes >= PASSES_TO_ACT and low > RATE_OF_NOTE and now > DOUBT and not before <= DOUBT_BEFORE)


def margin(course: Course) -> float:
    """Standard errors by which S falls slower than with correct labels; NaN if that cannot be told."""
    slope, error = fall(course)
    return (MIN_CLEAN_SLOPE - slope) / error


def learnt_by_heart(course: Course, passes: float) -> bool:
    """True if several earlier windows gave an alarm and no label was left out; in long runs, a hundred windows are checked."""
    if any(row[3] > 0 for row in course):
        return False
    alarms = 0
    for end in range(len(course) - 1, 0, -max(1, len(course) // 100)):
        _, rate, sure, _ = course[end - 1]
        low = rate - 2 * (rate * (1 - rate) / max(1.0, sure)) ** 0.5
        alarms += _alarm(course[:end], passes * end / len(course), low)
    return alarms >= ALARMS_TO_LIST


def _still(found: Evidence, course: Course) -> tuple[str, str, bool]:
    """The verdict while labels are left out: what was seen since must support the alarm, or they return."""
    now, before = since_left_out(course)[0], since_left_out(course[:-1])[0]
    borne_out = not (now >= MIN_CLEAN_SLOPE and before >= MIN_CLEAN_SLOPE)  # one window may be chance
    if borne_out and found.low > RATE_OF_NOTE / 2:
        return "wrong labels", "that was so before they were left out, and still is", True
    return (
        "cannot tell",
        "since labels were left out, the model contradicts fewer of them, as it does with right ones",
        False,
    )


def rate_of(found: Evidence, course: Course) -> float:
    """Share of wrong labels: S now. Late in a run that learns its labels by heart, S falls below the true rate, so if no label
    was left out, it is at least the value at 70% of the windows so far."""
    if len(course) < 4 or course[-1][3] > 0:
        return found.rate
    return max(found.rate, course[int(0.7 * len(course))][1])


def fall(course: Course) -> tuple[float, float]:
    """Slope of log S over log D in the windows that left nothing out, and its standard error.

    NaN if D hardly fell. Only windows with a D of at most 1.25 times the current one count.
    """
    return _slope([row for row in course if row[3] == 0 and row[0] <= 1.25 * course[-1][0]])


def since_left_out(course: Course) -> tuple[float, float]:
    """The same slope over the windows since labels are left out, except the first, in which sampling changes and S jumps."""
    start = len(course)
    while start > 0 and course[start - 1][3] > 0:
        start -= 1
    return _slope(course[start + 1 :])


def _slope(rows: Course) -> tuple[float, float]:
    """Slope and standard error by least squares, weighted by the binomial variance of log S.

    Over eleven runs on 3,000 clean photographs, slopes had a standard deviation of 0.2 to 0.8 and stated errors of 0.3 to
    0.9: they are valid although windows share samples.
    """
    rows = [row for row in rows if row[0] > 0]
    if len(rows) < 3:
        return float("nan"), float("nan")
    d, s, count, _ = np.array(rows).T
    s = np.maximum(s, 1 / np.maximum(count, 1))
    x, y = np.log(d), np.log(s)
    if x.max() - x.min() < 0.08:
        return float("nan"), float("nan")
    weight = s * count / (1 - np.minimum(s, 0.95))
    x = x - np.average(x, weights=weight)
    spread = float(weight @ x**2)
    slope = float(weight @ (x * (y - np.average(y, weights=weight))) / spread)
    return slope, spread**-0.5


def spared_classes(label: Labels, guess: Labels, suspect: Bools) -> Bools:
    """Samples of classes in which nothing may be left out, bool [n]: see FEWEST_OF_CLASS."""
    has = label >= 0
    y = np.where(has, label, 0)
    count = int(max(y.max(initial=0), guess.max(initial=0))) + 1
    size = np.bincount(y[has], minlength=count)
    voted = np.bincount(np.maximum(guess, 0)[has], minlength=count)
    lost = np.bincount(y[has & suspect], minlength=count)
    spare = (size < FEWEST_OF_CLASS) | (voted < LEAST_VOTED * size) | (lost > MOST_OF_CLASS * size)
    return spare[y] | ~has


@card(needs=("margin",), exact=False)
def noise(view: View, *, start: float = 0.3, over: float = 0.5, revisit: int = 3, weight: float = 0.0) -> Verdict:
    """Leaves out samples whose label the training history contradicts, and checks them again every few windows.

    If it cannot be told whether there are wrong labels, nothing is left out, and samplers draw at random. After the share
    `start` of the run, labels that are wrong with a probability above `over` are left out, class by class: a class that is
    too small, too poorly learnt or would lose too much is left alone. A sample that has waited `revisit` windows is visited
    with weight 0 and judged again by a model that was not trained on it. The judgement is repeated from scratch in every
    window; samples no longer suspected return at once. With `weight` above 0, suspects stay in with that loss weight.
    """
    for name, value in (("start", start), ("over", over), ("weight", weight)):
        if not 0 <= value <= 1:
            raise ConfigError(f"noise: {name} is {value}; it must be from 0 to 1.")
    if revisit < 1:
        raise ConfigError(f"noise: revisit is {revisit}; it must be at least 1.")
    found = view.judged or judge(view)
    reason = f"{found.verdict}: {found.evidence}"
    if not found.rate > 0:
        return Verdict(noise=found.rate, reason=reason)
    if not found.firm:
        return Verdict(noise=found.rate, reason=f"listed, not left out: {reason}")
    if view.clock.time < start:
        return Verdict(noise=found.rate, reason=f"waits until {start:.0%} of the run: {reason}")
    suspect = found.suspects(over)
    if weight > 0:
        factor = np.where(suspect, np.float32(weight), np.float32(1))
        return Verdict(factor=factor, noise=found.rate, reason=reason)
    again = suspect & (view.age >= revisit) & (view.clock.window < view.clock.windows - 1)
    factor = np.where(again, np.float32(0), np.float32(1))
    return Verdict(keep=~suspect, force=again, factor=factor, noise=found.rate, reason=reason)
