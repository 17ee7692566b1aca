"""Do several networks agree about the samples? Is importance a property of the data or of the model?

correlation   of the ranks that two networks give the samples by one criterion (Spearman), overall and class by class
overlap       share of the hardest samples of one that are among the hardest of the other; by chance it is that share itself
votes         labels that one network suspects, and those that most of them suspect
unsteady      samples with the largest differences in rank between networks: they are hard to rank
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from salience.errors import StateError
from salience.ledger import Ledger
from salience.registry import find
from salience.select.noise import judge
from salience.select.ranks import rank_normalise, ranks_of_known
from salience.select.view import Bools, Clock, Floats, Ids, View

CRITERIA = ("ema_loss", "el2n", "aum", "confidence", "forgetting", "variance", "grand")
"""Scores by which networks are compared, if all of their ledgers have them."""
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Shares of the hardest samples for which overlap is computed."""
HARDEST = 0.1
"""The share that texts refer to."""
MIN_OF_CLASS = 20
"""Minimum number of samples of a class for a correlation within it."""
MAINLY_DATA, MAINLY_MODEL = 0.7, 0.4
"""Importance is called mainly a property of the data from the first rank correlation on, of the model up to the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two networks compared."""

    a: str
    """Name of the first."""
    b: str
    """Name of the second."""
    correlations: Mapping[str, float]
    """Criterion -> rank correlation."""
    overlaps: Mapping[float, float]
    """Share of hardest samples -> share of these that both networks have in common, by the first criterion."""
    by_class: Mapping[int, float]
    """Class -> rank correlation within it, by the first criterion."""
    suspected: tuple[int, int, int]
    """Number of labels that the first suspects, the second, and both."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Agreement:
    """Several networks over the same data."""

    names: tuple[str, ...]
    samples: int
    pairs: tuple[Pair, ...]
    criteria: tuple[str, ...]
    """The criteria that all ledgers have; ranks are compared by the first."""
    suspected: tuple[int, ...]
    """Number of labels that each network suspects."""
    voted: int
    """Number of labels that more than half of the networks suspect."""
    alone: int
    """Number of labels that only one network suspects."""
    found: Mapping[str, float]
    """If the wrong labels are known: network, "mean rank" or "mean probability" -> AUROC for them."""
    unsteady: Ids
    """Samples with the largest differences in rank between networks, the most unsteady first."""
    spread: Floats
    """Standard deviation of their ranks over the networks, in the same order."""

    @property
    def correlation(self) -> float:
        """Mean rank correlation over the pairs, by the first criterion."""
        return float(np.mean([pair.correlations[self.criteria[0]] for pair in self.pairs]))

    @property
    def overlap(self) -> float:
        """Mean overlap of the hardest tenth over the pairs."""
        return float(np.mean([pair.overlaps[HARDEST] for pair in self.pairs]))

    @property
    def verdict(self) -> str:
        """Whether importance is a property of the data or of the model, in a word."""
        if self.correlation >= MAINLY_DATA:
            return "mainly of the data"
        return "mainly of the model" if self.correlation <= MAINLY_MODEL else "of both the data and the model"


def criterion(ledger: Ledger, name: str) -> Floats:
    """A score by name, for a ledger outside a run, float32 [n]; NaN where nothing is known."""
    last = int(ledger.last_seen.max(initial=-1))
    return np.asarray(find("scores", name)(View(ledger, Clock(window=last + 1, windows=last + 1))), dtype=np.float32)


def agreement(ledgers: Mapping[str, Ledger], *, wrong: Bools | None = None) -> Agreement:
    """Compare every pair of networks; `wrong` says which labels are known to be wrong, bool [n]."""
    names, all_of = tuple(ledgers), list(ledgers.values())
    if len(all_of) < 2:
        raise StateError("There is one ledger and nothing to compare it with; give at least two.")
    sizes = sorted({ledger.n for ledger in all_of})
    if len(sizes) > 1:
        raise StateError(f"Ledgers over {sizes} samples cannot be compared; they must come from the same data set.")
    scores = {name: [criterion(ledger, name) for ledger in all_of] for name in CRITERIA}
    criteria = tuple(name for name in CRITERIA if all(np.isfinite(one).any() for one in scores[name]))
    if not criteria:
        raise StateError("The ledgers have no losses in common; compare those of runs that called loader.loss().")
    judged = [judge(ledger) for ledger in all_of]
    suspects = [one.suspects() for one in judged]
    label = np.max([ledger.label for ledger in all_of], axis=0)
    pairs: list[Pair] = []
    for i, j in itertools.combinations(range(len(all_of)), 2):
        a, b = scores[criteria[0]][i], scores[criteria[0]][j]
        pairs.append(
            Pair(
                a=names[i], b=names[j],
                correlations={name: rank_correlation(scores[name][i], scores[name][j]) for name in criteria},
                overlaps={share: overlap(a, b, share) for share in SHARES},
                by_class={
                    int(c): rank_correlation(a[label == c], b[label == c])
                    for c in np.unique(label[label >= 0])
                    if np.count_nonzero(label == c) >= MIN_OF_CLASS
                },
                suspected=(int(suspects[i].sum()), int(suspects[j].sum()), int((suspects[i] & suspects[j]).sum())),
            )
        )  # fmt: skip
    ranks = np.stack([ranks_of_known(one) for one in scores[criteria[0]]])
    known = np.isfinite(ranks).all(axis=0)
    spread = np.where(known, ranks.std(axis=0), -1).astype(np.float32)
    order = np.argsort(-spread, kind="stable")[: int(known.sum())]
    votes = np.sum(suspects, axis=0)
    found: dict[str, float] = {}
    if wrong is not None and wrong.any() and not wrong.all():
        by = "aum" if "aum" in criteria else criteria[0]
        each = np.stack([ranks_of_known(one) for one in scores[by]])
        both = np.isfinite(each).all(axis=0)
        found = {name: auroc(row[both], wrong[both]) for name, row in zip(names, each, strict=True)}
        found["all together"] = auroc(each.mean(axis=0)[both], wrong[both])
    return Agreement(
        names=names, samples=sizes[0], pairs=tuple(pairs), criteria=criteria,
        suspected=tuple(int(one.sum()) for one in suspects), voted=int((2 * votes > len(all_of)).sum()),
        alone=int((votes == 1).sum()), found=found, unsteady=order.astype(np.int64), spread=spread[order],
    )  # fmt: skip


def rank_correlation(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating]) -> float:
    """Spearman's rho over the samples known to both; 0 if one of them ranks all samples equally."""
    both = np.isfinite(a) & np.isfinite(b)
    if both.sum() < 2:
        return 0.0
    x, y = rank_normalise(a[both]).astype(np.float64), rank_normalise(b[both]).astype(np.float64)
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm > 0 else 0.0


def overlap(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating], share: float) -> float:
    """Share of the samples with the highest `a` that are also among those with the highest `b`, over samples known to both."""
    both = np.flatnonzero(np.isfinite(a) & np.isfinite(b))
    count = max(1, round(share * len(both)))
    top = [set(both[np.argsort(-one[both], kind="stable")[:count]].tolist()) for one in (a, b)]
    return len(top[0] & top[1]) / count


def auroc(score: npt.NDArray[np.floating], positive: Bools) -> float:
    """How often a positive scores above a negative; ties count half. NaN if there are none of one kind."""
    count = int(positive.sum())
    if not 0 < count < len(positive):
        return float("nan")
    ranks = rank_normalise(score).astype(np.float64) * len(score) + 0.5
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(positive) - count)))
