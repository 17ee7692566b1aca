"""How a model's predictions contradict the labels: how often, in which direction, and how likely each label is wrong.

evidence     of the predictions the model is surest of, how many contradict the label (S), and of all (D)
Transitions  how often a sample of class k carries the label y, counted there
odds         how much better other classes explain a label than its own
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.ledger.ledger import id_order
from salience.seeds import TIES, generator
from salience.select.view import Bools, Floats

MAX_SAMPLES_COUNTED = 500_000
"""Rates are counted on at most this many samples; with more, on every second, third, ... one."""
MAX_SAMPLES_TEMPERED = 50_000
"""The sharpness of predictions is chosen on at most this many samples."""
SURE_SHARE = 0.1
"""Share of the predictions of each class that count as sure."""
SHARPNESSES = np.arange(1.5, 4.01, 0.25)
"""Exponents on averaged predictions, among which the likeliest is chosen; see `sharpness`. Labels that are left out, which the
model no longer learns, would make it too low."""
MIN_LABEL_PROBABILITY = 0.02
"""Smaller probabilities of a label are treated as equal."""
TABLE_PRIOR = 20.0
"""A class's own mislabelling table has the weight n / (n + TABLE_PRIOR), where n is its number of sure predictions."""

Labels = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """How often the averaged predictions contradict the labels."""

    differs: float
    """D: share of all samples whose label is not the class they are given."""
    rate: float
    """S: the same among the surest tenth of the predictions of each class, weighted by how often each class is predicted."""
    error: float
    """Standard error of S (binomial, by class)."""
    sure: int
    """Number of predictions behind S."""
    transitions: Transitions

    @property
    def low(self) -> float:
        return max(0.0, self.rate - 2 * self.error)

    @property
    def high(self) -> float:
        return min(1.0, self.rate + 2 * self.error)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Transitions:
    """How often a sample of class k carries the label y: T[k, y], kept for the pairs that occur."""

    classes: int
    key: npt.NDArray[np.int64]
    """k * classes + y of each pair, ascending."""
    share: Floats
    base: Floats
    """The value for all other pairs of class k, float32 [classes]."""

    def of(self, k: Labels, y: Labels) -> Floats:
        """T[k, y] for arrays of pairs, k != y."""
        base = self.base[np.clip(k, 0, self.classes - 1)]
        if not len(self.key):
            return base
        wanted = k.astype(np.int64) * self.classes + y
        at = np.minimum(np.searchsorted(self.key, wanted), len(self.key) - 1)
        return np.where(self.key[at] == wanted, self.share[at], 0).astype(np.float32) + base


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rates:
    """How often predictions contradict labels, as in `Evidence`, and the surest ones behind that."""

    differs: float
    rate: float
    error: float
    classes: int
    k: Labels
    """The class that each of the surest predictions names, int64 [sure]."""
    given: Labels
    """Their labels, int64 [sure]."""
    number: Labels
    """How many name each class, int64 [classes]."""


def rates(label: Labels, guess: Labels, guess_p: npt.NDArray[Any]) -> Rates:
    """Count how often the likeliest class of each averaged prediction, [n], contradicts the label."""
    some = slice(None, None, max(1, len(label) // MAX_SAMPLES_COUNTED))
    classes = int(max(label.max(initial=0), guess.max(initial=0))) + 1
    y, guess, p = label[some], guess[some].astype(np.int64), guess_p[some]
    known = (y >= 0) & (p > 0)
    y, guess, p = y[known].astype(np.int64), guess[known], p[known]
    sure = surest(guess, p)
    k, given = guess[sure], y[sure]
    number = np.bincount(k, minlength=classes)
    off = np.bincount(k, weights=k != given, minlength=classes) / np.maximum(number, 1)
    weight = np.bincount(guess, minlength=classes) / max(1, len(guess))
    error = float(np.sqrt((weight**2 * off * (1 - off) / np.maximum(number, 1)).sum()))
    differs = float((guess != y).mean()) if len(y) else 0.0
    return Rates(
        differs=differs, rate=float(weight @ off), error=error, classes=classes, k=k, given=given, number=number
    )


def evidence(label: Labels, vote: Labels, vote_p: npt.NDArray[Any]) -> Evidence:
    """Count how often the averaged predictions contradict the labels, and in which direction; see `Evidence`."""
    counted = rates(label, vote[:, 0], vote_p[:, 0])
    k, given, number, classes, rate = counted.k, counted.given, counted.number, counted.classes, counted.rate
    key, count = np.unique((k * classes + given)[k != given], return_counts=True)
    even = evenness(key // max(1, classes), count, classes)
    own = (1 - even) * number / (number + TABLE_PRIOR)
    share = (own[key // classes] * count / number[key // classes]).astype(np.float32)
    base = ((1 - own) * rate / max(1, classes - 1)).astype(np.float32)
    table = Transitions(classes=classes, key=key, share=share, base=base)
    return Evidence(differs=counted.differs, rate=rate, error=counted.error, sure=len(k), transitions=table)


def evenness(k: Labels, count: Labels, classes: int) -> float:
    """How evenly wrong labels spread over the classes: 1 = equally over all others, 0 = from each class to only one other.

    `count[i]` labels of one other class were found on samples of class `k[i]`. The entropy of where they go, corrected for
    few counts (Miller 1955), divided by that of an even spread; 1 if there are too few to tell.
    """
    total = np.bincount(k, weights=count)
    share = count / total[k]
    entropy = np.bincount(k, weights=-share * np.log(share)) + (np.bincount(k) - 1) / (2 * np.maximum(total, 1))
    most = np.log(np.clip(total, 1, max(1, classes - 1)))
    return float(np.clip((total @ entropy) / (total @ most), 0, 1)) if total @ most > 0 else 1.0


def surest(guess: npt.NDArray[np.int64], p: npt.NDArray[Any]) -> Bools:
    """The share SURE_SHARE of the predictions of each class with the highest p, at least one per class, bool [n].

    p has half precision, as in the ledger, so many values are equal, above all near 1: ties are broken at random. In the
    order on disk, in which classes are often sorted, labels of other classes would come first.
    """
    falling = 0xFFFF - p.astype(np.float16).view(np.uint16)  # bits of positive numbers are in the order of the numbers
    order = _lots(len(p))
    order = order[np.argsort(falling[order], kind="stable")]  # 16 bits, which NumPy sorts by radix
    order = order[id_order(guess[order])]
    ordered = guess[order]
    first = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    sizes = np.diff(np.append(first, len(ordered)))
    place = np.arange(len(ordered)) - np.repeat(first, sizes)
    mask = np.zeros(len(guess), dtype=bool)
    mask[order[place < np.ceil(SURE_SHARE * np.repeat(sizes, sizes))]] = True
    return mask


@functools.lru_cache(maxsize=1)
def _lots(n: int) -> npt.NDArray[np.int64]:
    """The order in which ties are broken, int64 [n]."""
    order = generator(0, TIES).permutation(n)
    order.setflags(write=False)
    return order


def odds_of_wrong(
    label: Labels, vote: Labels, vote_p: npt.NDArray[Any], confidence: npt.NDArray[Any], table: Transitions,
    power: float = 2.0,
) -> Floats:  # fmt: skip
    """Odds that each label belongs to a sample of another class rather than of its own, float32 [n]:

        o_i = sum over k != y of T[k, y] (t_k / q_y)^b

    t is the sample's averaged prediction, q_y that of its label, b its `sharpness`, T as in confident learning (Northcutt
    et al. 2021), but from the surest predictions alone. If wrong labels are spread evenly, the order is nearly that of q_y
    (self-confidence); otherwise the direction adds information.
    """
    label_p = np.nan_to_num(confidence.astype(np.float32)) + np.float32(MIN_LABEL_PROBABILITY)
    odds = np.zeros(len(label), dtype=np.float32)
    for slot in range(vote.shape[1]):
        k = vote[:, slot]
        part = (vote_p[:, slot].astype(np.float32) / label_p) ** np.float32(power) * table.of(k, label)
        odds += np.where(k == label, np.float32(0), part)
    return odds


def sharpness(
    label: Labels, vote: Labels, vote_p: npt.NDArray[Any], confidence: npt.NDArray[Any], found: Evidence, rate: float
) -> float:
    """The exponent b that calibrates averaged predictions, allowing for wrong labels.

    Averaged predictions lag behind the model and are underconfident to a degree that differs from run to run. As in
    temperature scaling (Guo et al. 2017), b maximises the likelihood of the labels, here with

        P(y | x) = (1 - rate) t_y^b + sum over k != y of T[k, y] t_k^b,  over the sum of all t^b

    Only the surest third of the predictions is used, since wrong labels are found by these; unsure ones would need another b.
    """
    some = slice(None, None, max(1, len(label) // MAX_SAMPLES_TEMPERED))
    y, k, p = label[some], vote[some], vote_p[some].astype(np.float32)
    known = (y >= 0) & (p[:, 0] > 0)
    if not known.any():
        return float(SHARPNESSES[0])
    known &= p[:, 0] >= np.quantile(p[known, 0], 2 / 3)
    y, k, p = y[known], k[known], p[known]
    own = k == y[:, None]
    listed = own.any(axis=1)
    outside = np.minimum(np.nan_to_num(confidence[some][known].astype(np.float32)), p[:, -1])
    q = np.where(listed, (own * p).sum(axis=1), outside) + np.float32(MIN_LABEL_PROBABILITY / 4)
    unlisted = np.maximum(found.transitions.classes - p.shape[1] - ~listed, 0)
    rest = np.maximum(1 - p.sum(axis=1), 0) / np.maximum(unlisted, 1)
    moved = np.stack([found.transitions.of(k[:, slot], y) for slot in range(k.shape[1])], axis=1)
    likelihood: list[float] = []
    for power in SHARPNESSES:
        others = np.where(own, 0, p**power)
        mine = q**power
        total = mine + others.sum(axis=1) + unlisted * rest**power
        likelihood.append(float(np.log(((1 - rate) * mine + (others * moved).sum(axis=1)) / total + 1e-9).mean()))
    return float(SHARPNESSES[int(np.argmax(likelihood))])


def calibrated(odds: Floats, known: Bools, rate: float) -> Floats:
    """P_i = c o_i / (1 + c o_i) with c such that the mean over the known samples is the rate, float32 [n]."""
    o = np.log(np.maximum(odds, 1e-6))
    some = o[known][:: max(1, int(known.sum()) // MAX_SAMPLES_COUNTED)]
    low, high = -20.0, 20.0
    for _ in range(30):
        middle = (low + high) / 2
        if (1 / (1 + np.exp(-np.clip(some + middle, -30, 30)))).mean() < rate:
            low = middle
        else:
            high = middle
    return (1 / (1 + np.exp(-np.clip(o + low, -30, 30)))).astype(np.float32)
