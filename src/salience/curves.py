"""Curves of validation results: their noise, and what a shorter run on all data would have lost. Is less enough?

Let m(t) be the metric at progress t, higher is better, and F(s) the end of a run that makes a share s of the visits with its
learning-rate schedule fitted to them. A run only shows m, and of F only its end: F(1) = m(1).

The difference m(1) - m(s) bounds nothing. A decaying learning rate lifts the end of a run (then the bound is too wide), and it
also stops a run that is still learning (then there is none): with a cosine, an MLP on Fashion-MNIST moved by 0.4 points in the
last quarter of 16 epochs, and runs of 12 epochs ended 4.4 points lower. What bounds F is the middle of the run. Take the metric
as what was learnt by then, less what the learning rate of the moment costs, m = P(work) - C(rate), where work is the learning
rate added up over the steps, as a share of the whole run's. With P concave (diminishing returns), C rising with the rate, and a
schedule that spends at least its mean rate in the middle (constant, linear, cosine, one-cycle, steps at half):

    F(1) - F(s)  =  P(1) - P(s)  <=  m(1 - s/2) - m(s/2)  =:  rise(s)

Where P is not concave, or the rate decays early (exponentially, or in steps from a third on), more is lost; 1.5 rise(s) has
room for most of that. The other end is measured: F(1) - F(s) >= rise(s) / 4 where that is more than twice the noise.

Checked on 1,956 pairs of runs (MLPs and a small convolutional net on parts of Fashion-MNIST, also with 30% wrong labels, and of
CIFAR-10; eight schedules, 6 to 64 epochs): 15 of the shorter runs lost more than 1.5 rise(s) and twice the noise, all of early
decay. 1,149 were said to cost accuracy, and 4 of them lost less than the noise. Fewer epochs were said to do 192 times, and 4
of those runs lost more than twice the noise. Going by m(1) - m(s) alone would have been wrong in 286 of 650. The constants were
chosen on 1,626 of the pairs (all but MAX_LOSS_PER_RISE); on the 330 made afterwards, 1 of 180 and 3 of 34 were wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MIN_SPREAD = 0.002
"""Minimum spread, as a share of the largest metric: 0.2 points if that is an accuracy of 100%."""
MIN_RESULTS = 6
"""Minimum number of validation results for an estimate."""
MIN_LAST_PROGRESS = 0.9
"""Progress that the last result must have reached."""
MIN_LOSS_PER_RISE = 0.25
"""Minimum loss of a shorter run, as a share of the rise in the middle, if the run is still learning."""
MAX_LOSS_PER_RISE = 1.5
"""Maximum loss of a shorter run, as a share of the rise in the middle."""
SPREADS_TO_BE_CERTAIN = 2.0
"""Number of spreads that the minimum loss must exceed before we say that fewer visits will cost accuracy."""
LEVEL_BANDWIDTH = 0.15
"""Progress on either side from which a level is estimated."""
MAX_SHARE_WORTH_SAYING = 0.9
"""A shorter run is mentioned only if it needs at most this share of the epochs."""
MIN_SHARE_OF_EPOCHS = 0.2
"""Minimum share of the epochs that may be called enough."""
UNFINISHED_FALL = 0.1
"""Without validation results, a run is unfinished if its training loss fell by this share over the last fifth of the visits."""
MAX_LENGTHS_TRIED = 200
"""Maximum number of run lengths to try."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class History:
    """The validation results of one run."""

    progress: npt.NDArray[np.float64]
    """Ascending, [k]."""
    metric: npt.NDArray[np.float64]
    """Higher is better, [k]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shorter:
    """What a shorter run on all data would have lost compared with this one; losses and noise are in units of the metric."""

    share: float = 1.0
    """Share of the visits that the shorter run makes."""
    loss_low: float | None = None
    """Smallest loss to expect from a run with that share; None if there is no estimate."""
    loss_high: float | None = None
    """Largest loss to expect; None if there is no estimate."""
    metric_noise: float | None = None
    """Standard deviation of the results around a smooth curve."""
    enough_epochs: int | None = None
    """Number of epochs with which a fitted run would end within the noise; None if that saves too little to mention."""
    moved: float | None = None
    """How much the remaining epochs changed the metric."""
    rising: bool = False
    """True if a run with that share would lose more than the noise, because this run was still learning."""
    points: bool = False
    """True if every result is a share from 0 to 1, so that differences read as percentage points."""
    cannot_say: str = ""
    """Why there is no estimate; empty if there is one."""


def shorter(
    progress: Sequence[float] | Floats,
    metric: Sequence[float] | Floats,
    *,
    share: float,
    epochs: int,
    fall: float | None = None,
) -> Shorter:
    """Estimate what a run with `share` of the visits would lose, and how few of the `epochs` would be enough.

    `progress` and `metric` are float [k], in the order of the results; higher is better. `fall` is that of the training loss
    (`training_fall`), used if there are no results.
    """
    history = curve(progress, metric)
    trouble = _trouble(history, len(metric), share) if len(metric) else _no_results(fall)
    if trouble:
        return Shorter(share=share, cannot_say=trouble)
    noise = max(own_noise(history), MIN_SPREAD * float(np.abs(history.metric).max()))
    gained = max(0.0, rise(history, share))
    rising = MIN_LOSS_PER_RISE * gained > SPREADS_TO_BE_CERTAIN * noise
    enough = fewest(history, noise, epochs)
    return Shorter(
        share=share,
        loss_low=MIN_LOSS_PER_RISE * gained if rising else 0.0,
        loss_high=MAX_LOSS_PER_RISE * gained,
        metric_noise=noise,
        enough_epochs=enough,
        moved=None if enough is None else plain_rise(history, enough / epochs),
        rising=rising,
        points=bool(((history.metric >= 0) & (history.metric <= 1)).all()),
    )


def curve(progress: Sequence[float] | Floats, metric: Sequence[float] | Floats) -> History:
    """The finite results in the order of their progress; if several have the same progress, the last one."""
    t, m = np.asarray(progress, dtype=np.float64), np.asarray(metric, dtype=np.float64)
    usable = (t >= 0) & (t <= 1) & np.isfinite(m)
    t, m = t[usable][::-1], m[usable][::-1]
    t, first = np.unique(t, return_index=True)
    return History(progress=t, metric=m[first])


def own_noise(history: History) -> float:
    """Standard deviation of a single run's results around a smooth curve, from how far each is off its two neighbours.

    r_k = (m_k - line through m_{k-1} and m_{k+1}) / sqrt(1 + u^2 + v^2), u and v the neighbours' shares in the line;
    1.483 * median |r|, which the steep beginning does not move. 0 with fewer than three results.
    """
    t, m = history.progress, history.metric
    if len(m) < 3:
        return 0.0
    u = (t[2:] - t[1:-1]) / (t[2:] - t[:-2])
    v = 1 - u
    residual = (m[1:-1] - u * m[:-2] - v * m[2:]) / np.sqrt(1 + u**2 + v**2)
    return float(1.4826 * np.median(np.abs(residual)))


def level(history: History, at: float) -> float:
    """The metric at some progress, without noise: a line fitted by least squares to the nearest results, at least four.

    Weights (1 - (d / h)^3)^3 of the distance d (Cleveland 1979), h = LEVEL_BANDWIDTH or what four results take.
    """
    t, m = history.progress, history.metric
    at = min(max(at, float(t[0])), float(t[-1]))
    distance = np.abs(t - at)
    reach = max(LEVEL_BANDWIDTH, 1.01 * float(np.partition(distance, 3)[3]))
    root = np.clip(1 - (distance / reach) ** 3, 0, None) ** 1.5
    fit = np.linalg.lstsq(np.stack((root, root * (t - at)), axis=1), m * root, rcond=None)
    return float(fit[0][0])


def rise(history: History, share: float) -> float:
    """m(1 - s/2) - m(s/2): how much the metric rose over the middle 1 - s of the run."""
    return level(history, 1 - share / 2) - level(history, share / 2)


def plain_rise(history: History, share: float) -> float:
    """m(1) - m(s): how much the metric rose after a share of the run."""
    return level(history, 1.0) - level(history, share)


def fewest(history: History, noise: float, epochs: int) -> int | None:
    """The smallest number of epochs above which every length would end within the noise; None if that saves too little.

    Both rises must be within it: that of the middle, which bounds the loss, and that of the end, which the reader sees.
    """
    begun = max(MIN_SHARE_OF_EPOCHS, 2 * float(history.progress[0]))
    first, last = max(1, int(np.ceil(begun * epochs))), epochs - 1
    tried = min(MAX_LENGTHS_TRIED, last - first + 1)
    lengths = np.linspace(first, last, max(0, tried)).astype(np.int64)
    found: int | None = None
    for length in lengths[::-1].tolist():
        if max(rise(history, length / epochs), plain_rise(history, length / epochs)) > noise:
            break
        found = length
    return found if found is not None and found <= MAX_SHARE_WORTH_SAYING * epochs else None


def _no_results(fall: float | None) -> str:
    falls = (
        ""
        if fall is None or fall < UNFINISHED_FALL
        else f", and the training loss still fell by {fall:.0%} in the last fifth"
    )
    return f"no validation results{falls}; call loader.evaluated(metric)"


def _trouble(history: History, given: int, share: float) -> str:
    """Why these results say nothing about a run with that share; empty if they do."""
    t = history.progress
    if len(t) == 0:
        return f"none of the {given} validation results is a finite number"
    if t[-1] <= 0:
        return "the run does not know its length; pass epochs="
    if t[-1] < MIN_LAST_PROGRESS:
        return f"validation was last reported at {t[-1]:.0%} of the run"
    if len(t) < MIN_RESULTS:
        return f"it takes {MIN_RESULTS} validation results and there are {len(t)}; call loader.evaluated(metric) more often"
    if t[0] > share / 2:
        return f"validation was first reported at {t[0]:.0%} of the run; call loader.evaluated(metric) from its start"
    return ""
