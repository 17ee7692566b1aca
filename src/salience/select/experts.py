"""Wrong labels by several criteria and several networks: a mixture of experts whose gate is calibrated in the run.

    experts    what one network's history says about each label: confident-learning odds, AUM, loss, ..., as logits of ranks
    families   networks that judge the same labels: the model, a jury's net that trained on the sample, one that held it out
    gate       within a family, non-negative weights with which its experts predict the other families, shrunk towards
               the single best expert; between families, weight in proportion to new evidence and to how seldom each errs
    mixture    the weighted sum

The evidence is made in the run: a net that never trained on a sample cannot have learnt its wrong label by heart. A single
expert or a single network is possible: then there is nothing to weigh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, did_you_mean
from salience.registry import card
from salience.seeds import TIES, generator
from salience.select import scores
from salience.select.codes import class_codes
from salience.select.contradictions import calibrated, evidence, odds_of_wrong, sharpness
from salience.select.noise import contradictions, judge, noise
from salience.select.ranks import ranks_of_known
from salience.select.view import Floats, Verdict, View

MAX_SAMPLES_WEIGHED = 20_000
"""A gate is fitted to at most this many samples."""
PULL = 0.3
"""Strength, per sample, with which weights are shrunk towards the anchor alone: what predicts another network's opinion is not
always what identifies wrong labels (benchmarks/RESULTS.md)."""
ANCHOR, ANCHORED = "odds", 0.6
"""The expert that represents a family when another family's gate is calibrated, and its weight by default."""
MAX_STEPS = 1000
"""Maximum number of steps of the gate's regression."""
TYPICAL_RATE = 0.2
"""Mean of the soft opinions that a gate predicts: certain only at the end of the list."""
MODEL_SHARE = 1.0
"""Weight of the first family. The others share as much, less what they have in common beyond it and what they err more."""
TRAINED, HELD_OUT = "jury", "jury, held out"
"""Names of the families of a jury."""
MIN_ERROR = 0.02
"""Error rates are taken to be at least this."""
Doubles = npt.NDArray[np.float64]


def _odds(of: Any) -> Floats:
    """How much better other classes, mislabelled at the observed rates, explain the label than its own (confident learning)."""
    _, (label, vote) = class_codes(of.label, of.vote)
    found = evidence(label, vote, of.vote_p)
    columns = (label, vote, of.vote_p, of.confidence)
    return odds_of_wrong(*columns, found.transitions, sharpness(*columns, found, found.rate))


def _persistent(of: Any) -> Floats:
    """Share of the visits at which the model predicted another class: a gradient that stays high for many windows."""
    return 1 - of.right / np.maximum(of.seen, 1).astype(np.float32)


def _three_sigma(of: Any) -> Floats:
    """Number of standard deviations by which the mean loss is above the mean of its class."""
    loss, label = np.nan_to_num(of.mean_loss).astype(np.float64), np.maximum(of.label, 0)
    count = np.maximum(np.bincount(label), 1)
    mean = np.bincount(label, weights=loss) / count
    spread = np.sqrt(np.maximum(np.bincount(label, weights=loss**2) / count - mean**2, 1e-12))
    return ((loss - mean[label]) / spread[label]).astype(np.float32)


EXPERTS: dict[str, Callable[[Any], Floats]] = {
    "odds": _odds, "aum": scores.aum, "margin": scores.margin, "loss": scores.ema_loss, "el2n": scores.el2n,
    "variance": scores.variance, "forgetting": scores.forgetting, "persistent": _persistent, "three_sigma": _three_sigma,
}  # fmt: skip
"""Name -> function from a ledger or a view of one to a number per sample, float32 [n]; higher = likelier wrong."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mixture:
    """The combined opinion of the experts."""

    logit: Doubles
    """Evidence that each label is wrong, float64 [n]; its order and its differences are meaningful."""
    weights: Mapping[str, Mapping[str, float]]
    """Family -> expert -> weight of the gate within the family."""
    shares: Mapping[str, float]
    """Family -> weight of the gate between families."""

    @property
    def text(self) -> str:
        """The weights in words, without those of 0."""
        return "; ".join(
            f"{family} {self.shares[family]:.2f} ("
            + ", ".join(f"{name} {w:.2f}" for name, w in of.items() if w >= 0.005)
            + ")"
            for family, of in self.weights.items()
        )


def mixture_of(families: Mapping[str, Any], *, experts: Sequence[str] = (ANCHOR,)) -> Mixture:
    """Weight the experts of each family (a ledger, or a view of one) by the other families, and families by new evidence."""
    for name in experts:
        if name not in EXPERTS:
            raise ConfigError(f"There is no expert {name!r}.{did_you_mean(name, EXPERTS)}")
    if not experts or not families:
        raise ConfigError("A mixture needs at least one expert and one network.")
    anchor = ANCHOR if ANCHOR in experts else experts[0]
    alone = np.array([ANCHORED * (one == anchor) for one in experts])
    said = {name: np.stack([logit_ranks(EXPERTS[one](of)) for one in experts], axis=1) for name, of in families.items()}
    n = len(next(iter(said.values())))
    some = np.arange(n)
    if n > MAX_SAMPLES_WEIGHED:
        some = generator(0, TIES, n).choice(n, MAX_SAMPLES_WEIGHED, replace=False)
    everyone = np.ones(n, dtype=bool)
    at = experts.index(anchor)
    opinion = {name: calibrated(np.exp(columns[:, at]), everyone, TYPICAL_RATE) for name, columns in said.items()}
    weights: dict[str, dict[str, float]] = {}
    voices: list[Doubles] = []
    for name, columns in said.items():
        others = [opinion[other] for other in said if other != name]
        gate = alone
        if others and len(experts) > 1:  # else there is nothing to weigh, or nobody to weigh it by
            gate = weights_of(columns[some], np.mean(others, axis=0)[some], prior=alone)
        weights[name] = dict(zip(experts, gate.tolist(), strict=True))
        voice = columns @ gate
        voices.append(voice / max(float(voice.std()), 1e-12))
    shares = news([voice[some] for voice in voices], errors_of(families))
    total = sum((share * voice for share, voice in zip(shares, voices, strict=True)), np.zeros(n))
    return Mixture(logit=total, weights=weights, shares=dict(zip(said, shares, strict=True)))


def errors_of(families: Mapping[str, Any]) -> list[float]:
    """How often each network would err on samples that it was not trained on and whose label is right; at least MIN_ERROR.

    (D - S) / (1 - S), where D is the share of the labels that its averaged predictions contradict, and S, the same where the
    first network is surest, the share of the labels that are wrong. A network that has learnt its labels by heart contradicts
    none: with a jury, what its two voices differ by is added to the model's, and both have that of the voice held out.
    """
    found = {name: contradictions(of) for name, of in families.items()}
    rate = next(iter(found.values())).rate
    errors = {name: max(0.0, one.differs - rate) / max(1 - rate, MIN_ERROR) for name, one in found.items()}
    if TRAINED in errors and HELD_OUT in errors:
        by_heart = max(0.0, errors[HELD_OUT] - errors[TRAINED])
        errors = {name: e + by_heart for name, e in errors.items()} | dict.fromkeys(
            (TRAINED, HELD_OUT), errors[HELD_OUT]
        )
    return [max(MIN_ERROR, e) for e in errors.values()]


def news(voices: Sequence[Doubles], errors: Sequence[float]) -> list[float]:
    """Weights of standardised opinions; that of the first is MODEL_SHARE.

    The others share MODEL_SHARE times 1 - c, where c is their correlation beyond what the first explains (the mean partial
    correlation, 0 to 1): what they have in common and the first lacks is a weakness of theirs rather than new evidence. Each
    weighs less by the square of how much more often it errs than the first, as measurements by their variance.
    """
    count = len(voices) - 1
    if not count:
        return [MODEL_SHARE]
    r: Doubles = np.asarray(np.corrcoef(np.stack(voices)), dtype=np.float64)
    partial = [
        (r[i, j] - r[0, i] * r[0, j]) / np.sqrt(max((1 - r[0, i] ** 2) * (1 - r[0, j] ** 2), 1e-12))
        for i in range(1, count + 1)
        for j in range(i + 1, count + 1)
    ]
    alike = float(np.clip(np.nan_to_num(np.mean(partial)), 0, 1)) if partial else 0.0
    return [MODEL_SHARE, *(MODEL_SHARE * (1 - alike) / count * min(1.0, errors[0] / e) ** 2 for e in errors[1:])]


def logit_ranks(score: npt.NDArray[Any]) -> Doubles:
    """log(r / (1 - r)) of each value's rank r: comparable between experts, however skewed; 0 where nothing is known."""
    ranks = np.clip(np.nan_to_num(ranks_of_known(np.asarray(score)), nan=0.5).astype(np.float64), 1e-4, 1 - 1e-4)
    return np.log(ranks / (1 - ranks))


def weights_of(columns: Doubles, target: npt.NDArray[np.floating], *, prior: Doubles, pull: float = PULL) -> Doubles:
    """Non-negative weights of a logistic regression of `target` (0 to 1, [n]) on the columns [n, k], shrunk towards `prior`.

    Minimises the mean cross-entropy + pull / 2 * |weights - prior|^2 by projected gradient descent, with a free intercept: an
    expert may be ignored, but not reversed.
    """
    x = np.column_stack((columns, np.ones(len(columns))))
    strength, centre = np.append(np.full(len(prior), pull), 0.0), np.append(prior, 0.0)
    rate = 1 / (np.linalg.eigvalsh(x.T @ x / len(x))[-1] / 4 + pull)
    b = centre
    for _ in range(MAX_STEPS):
        p = 1 / (1 + np.exp(-np.clip(x @ b, -30, 30)))
        before, b = b, b - rate * (x.T @ (p - target) / len(x) + strength * (b - centre))
        b[:-1] = np.maximum(b[:-1], 0)
        if np.abs(b - before).max() < 1e-7:
            break
    return b[:-1]


def families_of(view: View) -> dict[str, Any]:
    """The networks whose history a view has: the model, and its jury if there is one."""
    found: dict[str, Any] = {"model": view}
    if view.jury is not None:
        trained, held_out = view.jury
        if (held_out.vote_p[:, 0] > 0).any() and (trained.vote_p[:, 0] > 0).any():
            found |= {TRAINED: trained, HELD_OUT: held_out}
    return found


@card(needs=("margin",), exact=False)
def panel(
    view: View,
    *,
    experts: Sequence[str] = (ANCHOR,),
    start: float = 0.3,
    over: float = 0.5,
    revisit: int = 3,
    weight: float = 0.0,
) -> Verdict:
    """Like `noise`, with several networks and criteria to find wrong labels: a mixture of experts calibrated in the run.

    Whether there are wrong labels, and how many, is judged as by `noise`, and the other options are the same. `experts` are the
    criteria to use; the jury of `attach(model, jury=[...])` adds its opinion and calibrates the gate. Without a jury only the
    first criterion is used. The weights are part of the reason.
    """
    found = view.judged or judge(view)
    if not found.rate > 0:
        return noise(view, start=start, over=over, revisit=revisit, weight=weight)
    mixed = mixture_of(families_of(view), experts=experts)
    known = np.isfinite(found.wrong)
    stated = calibrated(np.exp(np.clip(2 * mixed.logit, -13, 13)).astype(np.float32), known, found.rate)
    mine = copy(view)
    mine.judged = replace(found, wrong=np.where(known, stated, np.float32(np.nan)).astype(np.float32))
    said = noise(mine, start=start, over=over, revisit=revisit, weight=weight)
    return replace(said, reason=f"{said.reason}; experts: {mixed.text}")
