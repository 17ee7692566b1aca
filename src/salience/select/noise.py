"""Noise filter: from the training history alone, which labels are wrong, as opposed to hard? No clean holdout needed."""

from __future__ import annotations

import numpy as np

from salience.errors import ConfigError
from salience.registry import card
from salience.select.view import Floats, Verdict, View

ENOUGH = 500_000
"""Samples from which the typical margins of the classes are averaged; beyond, every second, third, ... is taken."""

LOWEST = 0.75
"""The edge does not fall below this suspicion, however much noise there is."""


def suspicion(margin: Floats, label: np.ndarray, guess: np.ndarray) -> Floats:
    """How much the model prefers its guess to the label, in units of how much it prefers right labels of that class.

        s_i = -margin_i / M_g,   M_g = mean margin of the samples labelled g that the model calls g,   g = guess_i

    A class-conditional threshold in the spirit of confident learning (Northcutt et al. 2021), on the exponential mean
    of the margin (z_label - max other z; the sign and summing over visits after AUM, Pleiss et al. 2020), which told
    wrong from right labels best of all columns. s > 1: the model is surer of the other class than it is on
    average of that class's own samples. Hard samples hover around 0. NaN where nothing is known. float32 [n].
    """
    classes = int(max(label.max(), guess.max())) + 1
    if classes < 1:
        return np.full(len(margin), np.nan, dtype=np.float32)
    some = slice(None, None, max(1, len(margin) // ENOUGH))
    sure = (guess[some] == label[some]) & (margin[some] > 0) & (label[some] >= 0)
    right, sizes = label[some][sure], margin[some][sure]
    count = np.bincount(right, minlength=classes)
    total = np.bincount(right, weights=sizes, minlength=classes)
    overall = total.sum() / max(1, count.sum())
    # A class with few right samples borrows the mean of all, as if it had five samples of it.
    typical = ((total + 5 * overall) / (count + 5)).astype(np.float32)
    s = margin / -np.maximum(typical, 1e-6)[guess]  # guess -1 takes the last class, and its margin is NaN anyway
    s[label < 0] = np.nan
    return s


def noise_rate(s: Floats) -> float:
    """Estimated share of wrong labels: samples with suspicion over 3/4.

    Crude and steady: what it counts of hard samples and what it misses of wrong ones about cancel out from a third of
    training on; with no wrong labels at all it still counts a few hard samples, and fewer as training goes on.
    """
    known = np.count_nonzero(~np.isnan(s))
    return float(np.count_nonzero(s > 0.75) / max(1, known))


def threshold(rate: float, lowest: float = LOWEST) -> float:
    """Suspicion above which a label counts as wrong: the more noise there is, the less a single proof must weigh."""
    return max(lowest, 1.0 - 1.5 * rate)


@card(needs=("margin",), exact=False)
def noise(
    view: View,
    *,
    start: float = 0.3,
    floor: float = 0.04,
    lowest: float = LOWEST,
    revisit: int = 3,
    keep: float = 0.65,
    limit: float = 0.6,
) -> Verdict:
    """Leaves out samples whose label the training history contradicts, and looks at them again every few windows.

    From `start` of the run on. A sample that was left out comes back every `revisit` windows with weight 0: it is
    judged anew by a model that was not trained on it, and re-admitted if it was misjudged. Where the estimated
    noise rate is over `floor`, samplers stop preferring hard samples; and since a visit then buys less, the window
    visits at least four times the noise rate, up to the share `keep`. More than `limit` suspected: the filter
    refuses, since then the model is at fault rather than the labels.
    """
    if not (0 <= start <= 1 and 0 <= floor < 1 and lowest > 0 and revisit >= 1 and 0 < keep <= 1 and 0 < limit <= 1):
        raise ConfigError(
            f"noise: start is {start}, floor {floor}, keep {keep}, limit {limit} (each from 0 to 1), "
            f"lowest {lowest} (above 0), revisit {revisit} (at least 1)."
        )
    if view.clock.time < start:
        return Verdict(noise=float("nan"), reason=f"waits until {start:.0%} of the run")
    s = suspicion(view.margin, view.label, view.guess)
    rate = noise_rate(s)
    edge = threshold(rate, lowest)
    suspect = s > edge
    if rate >= floor:
        # Margins grow as the model gets surer, so an old one looks smaller than it was: what was left out stays out
        # until it has been looked at again.
        suspect |= (s > 0) & (view.age > 1)
    share = np.count_nonzero(suspect) / max(1, np.count_nonzero(~np.isnan(s)))
    if share > limit:
        return Verdict(noise=rate, reason=f"refused: {share:.0%} of all samples are suspected, more than {limit:.0%}")
    again = suspect & (view.age > revisit)
    return Verdict(
        keep=~suspect,
        force=again,
        mute=again,
        noise=rate,
        share=min(keep, 4 * rate),
        reason=f"label contradicted (suspicion over {edge:.2f}; estimated noise {rate:.1%})",
    )
