"""Findings: labels that look wrong, the hardest clean samples, near-copies and uneven classes, each with its reason.

Pure functions over a ledger; whatever is found carries a confidence from 0 to 1 and a sentence that says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from salience.errors import StateError
from salience.files import read_npz, write_npz
from salience.ledger import Ledger
from salience.select.noise import Judgement, judge
from salience.select.view import Bools, Floats, Ids

SHOWN = 20
LIKELY = 0.5
"""A label looks wrong where that is likelier than not."""
UNEVEN = 1.25
"""A class is named when it gets so many times more or less than its share."""
COPIES_FORMAT = "salience-copies-1"

Groups = tuple[npt.NDArray[np.int32], Floats]
"""Near-copies: the group of every sample (-1: alone), int32 [n], and how alike it is to its group, float32 [n], 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """A label that looks wrong."""

    id: int
    label: int
    guess: int
    """The class the model would give it."""
    confidence: float
    """That the label is wrong."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Hard:
    """A sample that is hard and yet rightly labelled, as far as can be told."""

    id: int
    label: int
    guess: int
    mean_loss: float
    confidence: float | None
    """That the label is right; None where labels cannot be judged."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyGroup:
    """Samples so alike that one stands for all."""

    id: int
    """The one."""
    members: tuple[int, ...]
    """All of them."""
    confidence: float
    """The similarity of the least alike."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Counts over all samples, and the first few of each kind."""

    samples: int
    judged: int
    """Labels with a history to judge them by; 0 where the loss was given no logits."""
    noise_rate: float | None
    """The noise filter's estimate of the share of wrong labels."""
    suspected: int
    expected: float
    """How many of the suspected are wrong if the confidences are right: their sum."""
    weak: str
    """Why none can be said to look wrong, where the model has learnt too little for that."""
    suspects: tuple[Suspect, ...]
    hard: tuple[Hard, ...]
    groups: int | None
    """Groups of near-copies; None where nobody looked for any."""
    spare: int | None
    """Samples that another one stands for."""
    copies: tuple[CopyGroup, ...]


def findings(
    ledger: Ledger, near: Groups | None = None, *, top: int | None = SHOWN, names: Sequence[str] | None = None
) -> Findings:
    """Everything at once; `top` of each kind (None: all), classes called by their `names`."""
    judged = judge(ledger)
    suspect = suspected(ledger, judged)
    known = int(np.count_nonzero((ledger.label >= 0) & (ledger.vote_p[:, 0] > 0)))
    groups = None if near is None else _sizes(near[0])
    return Findings(
        samples=ledger.n,
        judged=known,
        noise_rate=judged.rate if known and np.isfinite(judged.rate) else None,
        suspected=int(np.count_nonzero(suspect)),
        expected=float(judged.wrong[suspect].sum(dtype=np.float64)),
        weak=judged.evidence if known and judged.verdict == "cannot tell" else "",
        suspects=tuple(suspects(ledger, judged, top=top, names=names)),
        hard=tuple(hardest(ledger, judged, top=top)),
        groups=None if groups is None else int(np.count_nonzero(groups > 1)),
        spare=None if groups is None else int(np.maximum(groups - 1, 0).sum()),
        copies=() if near is None else tuple(copies(*near, top=top)),
    )


# ---------------------------------------------------------------- labels


def suspected(ledger: Ledger, judged: Judgement) -> Bools:
    """Labels that are likelier wrong than right and that the model does not give on average: bool [n]."""
    return judged.suspects(LIKELY) & (ledger.vote[:, 0] != ledger.label)


def suspects(
    ledger: Ledger,
    judged: Judgement | None = None,
    *,
    top: int | None = None,
    names: Sequence[str] | None = None,
) -> list[Suspect]:
    """Labels that look wrong, firmest first."""
    judged = judged or judge(ledger)
    ids = _first(np.flatnonzero(suspected(ledger, judged)), judged.wrong, top)
    return [
        Suspect(
            id=i,
            label=int(ledger.label[i]),
            guess=int(ledger.vote[i, 0]),
            confidence=float(judged.wrong[i]),
            reason=f"the model says {class_name(int(ledger.vote[i, 0]), names)} with p {ledger.vote_p[i, 0]:.2f}; it gave the "
            f"label at {ledger.right[i]} of {_times(int(ledger.seen[i]), 'visit')}",
        )
        for i in ids.tolist()
    ]


def hardest(ledger: Ledger, judged: Judgement | None = None, *, top: int | None = None) -> list[Hard]:
    """The hardest samples whose labels are not suspected: by mean loss times the confidence that the label is right."""
    judged = judged or judge(ledger)
    wrong = judged.wrong
    ids = np.flatnonzero(np.isfinite(ledger.mean_loss) & ~suspected(ledger, judged))
    ids = _first(ids, ledger.mean_loss * (1 - np.nan_to_num(wrong)), top)
    return [
        Hard(
            id=i,
            label=int(ledger.label[i]),
            guess=int(ledger.guess[i]),
            mean_loss=float(ledger.mean_loss[i]),
            confidence=None if np.isnan(wrong[i]) else 1 - float(wrong[i]),
            reason=_hardness(ledger, i),
        )
        for i in ids.tolist()
    ]


def class_name(index: int, names: Sequence[str] | None) -> str:
    """What a class is called; "class 3" where it has no name."""
    return names[index] if names is not None and 0 <= index < len(names) else f"class {index}"


def _hardness(ledger: Ledger, i: int) -> str:
    said = f"mean loss {ledger.mean_loss[i]:.2g}"
    if ledger.guess[i] < 0:
        return f"{said} at {_times(int(ledger.seen[i]), 'visit')}"
    said += f", right at {ledger.right[i]} of {_times(int(ledger.seen[i]), 'visit')}"
    return said + (f", forgotten {_times(int(ledger.forgotten[i]), 'time')}" if ledger.forgotten[i] else "")


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _first(ids: Ids, value: Floats, top: int | None) -> Ids:
    """The `top` of `ids` with the largest `value`, largest first, the lower id on a tie."""
    if top is not None and top < len(ids):
        edge = -np.partition(-value[ids], top - 1)[top - 1] if top else np.inf
        ids = ids[value[ids] >= edge]
    return ids[np.argsort(-value[ids], kind="stable")][:top]


# ---------------------------------------------------------------- near-copies


def copies(group: npt.NDArray[np.int32], similarity: Floats, *, top: int | None = None) -> list[CopyGroup]:
    """Groups of near-copies, the largest first, of equal ones the firmest; the most similar member stands for its group."""
    _check_groups(group, similarity)
    sizes = _sizes(group)
    numbers = np.flatnonzero(sizes > 1)
    least = np.ones(len(sizes), dtype=np.float32)
    np.minimum.at(least, group[group >= 0], similarity[group >= 0])
    numbers = numbers[np.lexsort((-least[numbers], -sizes[numbers]))][:top]
    ids = np.flatnonzero(np.isin(group, numbers))
    ids = ids[np.lexsort((-similarity[ids], group[ids]))]  # stable: the lower id on a tie
    ends = np.cumsum(np.bincount(group[ids], minlength=len(sizes)))
    return [
        CopyGroup(
            id=int(ids[ends[g] - sizes[g]]),
            members=tuple(sorted(ids[ends[g] - sizes[g] : ends[g]].tolist())),
            confidence=float(least[g]),
            reason="byte-identical" if least[g] == 1 else f"features agree to {min(float(least[g]), 0.9999):.4g}",
        )
        for g in numbers.tolist()
    ]


def save_copies(path: str | Path, group: npt.NDArray[np.int32], similarity: Floats) -> None:
    """Write the groups of near-copies; the file appears whole or not at all."""
    _check_groups(group, similarity)
    arrays = {"group": group.astype(np.int32), "similarity": similarity.astype(np.float32)}
    write_npz(path, {"format": np.array(COPIES_FORMAT), **arrays})


def load_copies(path: str | Path, n: int) -> Groups:
    """What `save_copies` wrote for a data set of `n` samples."""
    arrays = read_npz(path, COPIES_FORMAT, "file of near-copies")
    try:
        group, similarity = arrays["group"], arrays["similarity"]
        _check_groups(group, similarity)
    except (KeyError, StateError) as cause:
        raise StateError(f"{str(path)!r} is not a file of near-copies: {cause}") from cause
    if len(group) != n:
        raise StateError(f"{str(path)!r} is of {len(group)} samples, the ledger of {n}; they belong to different runs.")
    return group, similarity


def _check_groups(group: np.ndarray, similarity: np.ndarray) -> None:
    whole = group.dtype.kind == "i" and group.ndim == 1 and group.shape == similarity.shape
    if not whole or not ((group >= -1).all() and (group < max(1, len(group))).all()):
        raise StateError(
            f"group is {group.dtype} {group.shape} and similarity {similarity.shape}; both must be [n], group integers "
            "from -1 (alone) to n - 1."
        )
    if not ((similarity >= 0) & (similarity <= 1))[group >= 0].all():
        raise StateError("Some similarities are not between 0 and 1; clip them first.")


def _sizes(group: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Members of every group, by its number."""
    return np.bincount(group[group >= 0])


# ---------------------------------------------------------------- classes


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """What a class has and what it got."""

    label: int
    samples: float
    """Its share of the samples that have a class,"""
    visits: float | None
    """and of the visits that went into a gradient; None before there were any."""
    reason: str
    """Why the two differ, where they do by a quarter or more; else empty."""


def balance(ledger: Ledger) -> list[Balance]:
    """The share every class has in the samples and in the visits trained on."""
    has = ledger.label >= 0
    label = ledger.label[has]
    if not len(label):
        return []
    size = np.bincount(label)
    visits = np.bincount(label, weights=ledger.trained[has])
    known = np.isfinite(ledger.mean_loss[has])
    loss = np.bincount(label[known], weights=ledger.mean_loss[has][known], minlength=len(size))
    losses = loss / np.maximum(1, np.bincount(label[known], minlength=len(size)))
    suspect = np.bincount(label, weights=suspected(ledger, judge(ledger))[has]) / np.maximum(1, size)
    overall = loss.sum() / max(1, int(known.sum())), float((suspect * size).sum() / size.sum())
    total = visits.sum()
    found: list[Balance] = []
    for c in np.flatnonzero(size).tolist():
        share, got = float(size[c] / size.sum()), float(visits[c] / total) if total else None
        reason = "" if got is None else _unevenness(got / share, (float(losses[c]), float(suspect[c])), overall)
        found.append(Balance(label=c, samples=share, visits=got, reason=reason))
    return found


def _unevenness(ratio: float, own: tuple[float, float], overall: tuple[float, float]) -> str:
    """Why a class was visited `ratio` times its share, from (mean loss, share of suspected labels) of it and of all."""
    if 1 / UNEVEN < ratio < UNEVEN:
        return ""
    reason = f"visited {ratio:.2g}x its share: mean loss {own[0]:.2g} against {overall[0]:.2g} overall"
    if ratio < 1 and own[1] > UNEVEN * overall[1]:
        reason += f", {own[1]:.0%} of its labels look wrong against {overall[1]:.0%}"
    return reason
