"""Samplers: from importance and a budget to samples and the inclusion probability of each."""

from __future__ import annotations

import numpy as np

from salience.errors import ConfigError
from salience.registry import card
from salience.select.drawing import choose, choose_outside, inclusion_probabilities, systematic, top
from salience.select.trial import carried, on_trial
from salience.select.view import Candidates, Draw, Floats

Rng = np.random.Generator

MIN_SHARE_OVER_THRESHOLD = 0.1
"""Minimum share of the curve's budget that `threshold` visits."""


@card(unbiased=True)
def uniform(candidates: Candidates, budget: int, rng: Rng) -> Draw:
    """Any `budget` samples with equal probability: the control every rule has to beat."""
    inclusion = np.full(budget, budget / max(1, len(candidates)), dtype=np.float32)
    return Draw(positions=choose(rng, len(candidates), budget), inclusion=inclusion)


def ratio(candidates: Candidates, budget: int, rng: Rng, *, explore: float = 0.1, max_noise: float = 0.04) -> Draw:
    """The most important samples, and a share `explore` of the budget drawn at random from the rest (epsilon-greedy).

    If a noise filter estimates more than `max_noise` wrong labels, or has no estimate yet, everything is drawn at random,
    because hardness would select the wrong labels.
    """
    if not 0 <= explore <= 1:
        raise ConfigError(f"ratio: explore is {explore}; it must be from 0 to 1.")
    if candidates.noise is not None and not candidates.noise <= max_noise:
        explore = 1.0
    greedy = budget - round(explore * budget)
    best = top(candidates.importance, greedy, rng)
    return Draw(positions=np.concatenate((np.flatnonzero(best), choose_outside(rng, best, budget - greedy))))


@card(exact=False)
def threshold(candidates: Candidates, budget: int, rng: Rng, *, above: float | str = 0.5) -> Draw:
    """All samples whose score, not its rank, is over `above`: a threshold on the value, which sets its own budget.

    Samples never seen are over it. If fewer than a tenth of the curve's budget are, others drawn at random make up that
    tenth. "auto" is for scores that are losses: the loss below which the run's own probe found the gradient near zero;
    until there is one, all samples are visited.
    """
    if above != "auto" and (isinstance(above, (str, bool)) or not np.isfinite(above)):
        raise ConfigError(f"threshold: above is {above!r}; it must be a finite number or 'auto'.")
    value = candidates.view.clock.learnt_loss if above == "auto" else float(above)
    if value is None:
        return Draw(positions=np.arange(len(candidates)), note="not calibrated yet: all of them")
    over = ~(candidates.raw <= value)
    count = int(np.count_nonzero(over))
    fill = max(0, round(MIN_SHARE_OVER_THRESHOLD * budget) - count)
    note = f"{count:,} of {len(candidates):,} score over {value:.4g}{f', {fill:,} more at random' if fill else ''}"
    return Draw(positions=np.concatenate((np.flatnonzero(over), choose_outside(rng, over, fill))), note=note)


def lowest(candidates: Candidates, budget: int, rng: Rng) -> Draw:
    """The samples with the lowest scores: those with the highest are left out. Samples never seen count as lowest.

    The half of data fine-pruning that chooses which samples to leave out (Li et al. 2018); the curve `alternate` says when.
    """
    return Draw(positions=np.flatnonzero(top(-np.nan_to_num(candidates.raw, nan=-np.inf), budget, rng)))


@card(unbiased=True)
def probability(candidates: Candidates, budget: int, rng: Rng, *, power: float = 1.0, floor: float = 0.05) -> Draw:
    """Samples with probability proportional to max(importance, floor)^power, weighted so that the gradient is unbiased.

    Systematic sampling: exactly `budget` samples with exactly the stated inclusion probabilities.
    """
    if power < 0 or not 0 < floor <= 1:
        raise ConfigError(f"probability: power is {power} (at least 0), floor is {floor} (above 0, at most 1).")
    inclusion = inclusion_probabilities(np.maximum(candidates.importance, floor) ** power, budget)
    positions = systematic(rng, inclusion)
    return Draw(positions=positions, inclusion=inclusion[positions].astype(np.float32))


@card(needs=("trial",))
def unsure(
    candidates: Candidates,
    budget: int,
    rng: Rng,
    *,
    floor: float = 0.1,
    power: float = 1.0,
    temper: float = 0.5,
    carry: float = 0.75,
) -> Draw:
    """Prefers what the model is unsure of, if a trial in this run has shown that to be safe: the sampler of `default`.

    If hard samples that were left out for a window gained at least `carry` of what visited ones gained, the model learns hard
    samples along with the others: then p ~ max(score, floor)^power with loss weights p^-temper, half-way between unbiased
    and hard-first. If they gained less, if no trial has shown anything yet, or if labels are or were called wrong, samples
    are drawn at random. If no filter judges the labels (without logits, say), hard samples are preferred with unbiased
    weights. Meant for scores from 0 to 1, such as `unsureness`; a sample never seen counts as 1.
    """
    if not 0 < floor <= 1 or power < 0 or not 0 <= temper <= 1 or not 0 <= carry <= 1:
        raise ConfigError(
            f"unsure: floor is {floor} (above 0, at most 1), power {power} (at least 0), temper {temper} (0 to 1), "
            f"carry {carry} (0 to 1)."
        )
    view, ids = candidates.view, candidates.ids
    chance = np.maximum(np.nan_to_num(candidates.raw, nan=1.0), floor) ** power
    if candidates.noise is None:
        inclusion = inclusion_probabilities(chance, budget)
        positions = systematic(rng, inclusion)
        return Draw(positions=positions, inclusion=inclusion[positions].astype(np.float32), temper=1.0)
    rests, visited = (np.isin(ids, some) for some in on_trial(view.trial, view.clock.window))
    if np.count_nonzero(visited) > budget / 2 or np.count_nonzero(~rests) < budget:
        rests, visited = np.zeros_like(rests), np.zeros_like(visited)  # too small a budget for a trial
    gained = carried(view.trial)
    free, left = np.flatnonzero(~rests & ~visited), budget - int(np.count_nonzero(visited))
    doubted = any(left_out > 0 for *_, left_out in view.course)
    if candidates.noise > 0 or doubted or not gained >= carry:
        waited = (view.age[ids[free]] > 1).astype(np.float32)  # not in the last window: so that visits stay even
        drawn = top(waited + rng.random(len(free), dtype=np.float32), left, rng)
        positions = np.concatenate((np.flatnonzero(visited), free[drawn]))
        return Draw(positions=positions, note=f"{_outcome(candidates.noise, gained, doubted=doubted)}: drawn at random")
    inclusion = visited.astype(np.float64)
    inclusion[free] = inclusion_probabilities(chance[free], left)
    positions = systematic(rng, inclusion)
    note = f"{_outcome(candidates.noise, gained)}: the unsure are preferred"
    return Draw(positions=positions, inclusion=inclusion[positions].astype(np.float32), temper=temper, note=note)


def _outcome(noise: float, gained: float, *, doubted: bool = False) -> str:
    """The outcome of trials of hard samples, in words."""
    if noise > 0:
        return "labels are wrong"
    if doubted:
        return "labels were called wrong before"
    if np.isnan(gained):
        return "no trial of hard samples has shown anything yet"
    return f"hard samples that rested gained {gained:.0%} of what others did"


@card(unbiased=True, exact=False)
def prune_rescale(candidates: Candidates, budget: int, rng: Rng, *, drop: float = 0.5, start: float = 3.0) -> Draw:
    """InfoBatch: of the samples scoring under the mean, a share `drop` is left out; the kept ones weigh 1/(1-drop).

    Qin et al. 2024. Scores start at `start`; the rule sets its own budget.
    """
    if not 0 <= drop < 1:
        raise ConfigError(f"prune_rescale: drop is {drop}; it must be at least 0 and below 1.")
    score = np.where(np.isnan(candidates.raw), start, candidates.raw)
    under = score < score.mean()
    easy = np.flatnonzero(under)
    keep = len(easy) - int(drop * len(easy))
    kept = easy[choose(rng, len(easy), keep)]
    hard = np.flatnonzero(~under)
    inclusion = np.ones(len(hard) + keep, dtype=np.float32)
    inclusion[len(hard) :] = keep / max(1, len(easy))
    return Draw(positions=np.concatenate((hard, kept)), inclusion=inclusion)


@card(needs=("confidence",), exact=False)
def hide(candidates: Candidates, budget: int, rng: Rng, *, confidence: float = 0.7) -> Draw:
    """KAKURENBO: hides the lowest losses that the budget leaves out, but only those predicted correctly with confidence.

    Thao Nguyen et al. 2023. Of the len - budget samples with the lowest raw score, those the model got wrong or predicted
    with less than `confidence` are visited. The published rule also raises the learning rate by n / drawn.
    """
    view, raw = candidates.view, candidates.raw
    lowest = ~top(np.where(np.isnan(raw), np.inf, raw).astype(np.float32), budget, rng)
    ids = candidates.ids
    sure = (view.guess[ids] == view.label[ids]) & (view.confidence[ids] >= confidence)
    return Draw(positions=np.flatnonzero(~(lowest & sure)))


@card(exact=False)
def window(
    candidates: Candidates, budget: int, rng: Rng, *, drop: float = 0.1, groups: int = 5, width: float = 0.9
) -> Draw:
    """SeTa: a random 1 - drop of the samples, grouped by loss, with a window of groups that slides from easy to hard.

    Zhou et al. 2025. One-dimensional k-means puts the losses into `groups`; the window spans width * groups of them
    and moves from the easiest to the hardest, then starts again. Sets its own budget.
    """
    if not 0 <= drop < 1 or groups < 1 or not 0 < width <= 1:
        raise ConfigError(f"window: drop is {drop} (0 to 1), groups {groups} (at least 1), width {width} (0 to 1).")
    kept = choose(rng, len(candidates), len(candidates) - int(drop * len(candidates)))
    raw = np.nan_to_num(candidates.raw[kept], nan=0.0)
    group = _kmeans_1d(raw, groups)
    span = max(1, round(width * groups))
    turns = max(1, groups - span + 1)
    first = candidates.view.clock.window % turns
    inside = (group >= first) & (group < first + span)
    return Draw(positions=kept[inside] if inside.any() else kept)  # losses that are all alike make one group


def slide(candidates: Candidates, budget: int, rng: Rng, *, begin: float = 0.0, until: float = 0.8) -> Draw:
    """A window of `budget` samples over the ranks of importance, from the lowest at `begin` of the run to the highest.

    first = round((M - budget) * t),  t = (time - begin) / (until - begin) in [0, 1];  ranks first to first + budget - 1.
    Our own simple curriculum: easy to hard, with the score as the hardness.
    """
    if not 0 <= begin < until <= 1:
        raise ConfigError(f"slide: begin is {begin}, until {until}; they must be from 0 to 1, begin before until.")
    t = min(1.0, max(0.0, (candidates.view.clock.time - begin) / (until - begin)))
    first = round((len(candidates) - budget) * t)
    last = first + budget - 1
    mixed = rng.permutation(len(candidates))  # so that equal ranks are cut at random
    return Draw(positions=mixed[np.argpartition(candidates.importance[mixed], (first, last))[first : last + 1]])


def _kmeans_1d(values: Floats, groups: int, rounds: int = 10) -> np.ndarray:
    """Group of each value, 0 = lowest, by Lloyd's rule from quantiles."""
    centres = np.quantile(values, (np.arange(groups) + 0.5) / groups)
    for _ in range(rounds):
        group = np.searchsorted((centres[1:] + centres[:-1]) / 2, values)
        count = np.bincount(group, minlength=groups)
        total = np.bincount(group, weights=values, minlength=groups)
        centres = np.sort(np.where(count > 0, total / np.maximum(count, 1), centres))
    return np.searchsorted((centres[1:] + centres[:-1]) / 2, values)
