"""Findings: labels that look wrong, the hardest clean samples, near-copies and uneven classes, each with its reason.

    study(ledger, near)  ->  judge once  ->  Study(judged, findings)      again only after the ledger has changed

Pure functions over a ledger; every finding carries a confidence from 0 to 1 and a sentence that says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from salience.errors import StateError
from salience.events import CopyGroup, Findings, Hard, Suspect
from salience.files import read_npz, write_npz
from salience.ledger import Ledger
from salience.select.classes import class_findings, confusions, visit_findings
from salience.select.noise import Judgement, judge
from salience.select.view import Bools, Floats, Ids

SAMPLES_SHOWN = 24
"""Maximum number of samples listed of each kind."""
MIN_SUSPECT_PROBABILITY = 0.5
"""A label looks wrong if this probability is exceeded: more likely than not."""
COPIES_FORMAT = "salience-copies-1"

Groups = tuple[npt.NDArray[np.int32], Floats]
"""Near-copies: the group of every sample (-1: alone), int32 [n], and how similar it is to its group, float32 [n], 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Study:
    """What one examination of a ledger found."""

    judged: Judgement
    """The judgement of the labels."""
    findings: Findings
    """The findings as an event."""
    key: tuple[int, ...]
    """Identifies the state of the ledger: visits, and near-copies."""


def study(
    ledger: Ledger, near: Groups | None = None, *, windows: int = 0, visits: int = 0, last: Study | None = None
) -> Study:
    """Examine a ledger after `windows` windows with `visits` visits; returns `last` if nothing has changed since."""
    grouped = (-1, 0) if near is None else (int((near[0] >= 0).sum()), int(near[0].sum(dtype=np.int64)))
    key = (windows, int(ledger.seen.sum(dtype=np.int64)), int(ledger.trained.sum(dtype=np.int64)), *grouped)
    if last is not None and last.key == key:
        return last
    judged = judge(ledger)
    found = findings(ledger, near, windows=windows, visits=visits, judged=judged)
    return Study(judged=judged, findings=found, key=key)


def findings(
    ledger: Ledger,
    near: Groups | None = None,
    *,
    top: int | None = SAMPLES_SHOWN,
    names: Sequence[str] | None = None,
    windows: int = 0,
    visits: int = 0,
    judged: Judgement | None = None,
) -> Findings:
    """All findings: `top` of each kind (None: all), with classes called by their `names`.

    Without the number of `windows`, `visits` is None in the result, since it is not known what counts as often.
    """
    judged = judged or judge(ledger)
    suspect = suspected(ledger, judged)
    known = int(np.count_nonzero((ledger.label >= 0) & (ledger.vote_p[:, 0] > 0)))
    sizes = None if near is None else _sizes(near[0])
    class_count, classes = class_findings(ledger, suspect)
    return Findings(
        samples=ledger.n,
        judged=known,
        noise_rate=judged.rate if known and np.isfinite(judged.rate) else None,
        suspected=int(np.count_nonzero(suspect)),
        expected=float(judged.wrong[suspect].sum(dtype=np.float64)),
        weak=judged.evidence if known and judged.verdict == "cannot tell" else "",
        suspects=tuple(suspects(ledger, judged, top=top, names=names)),
        hard=tuple(hardest(ledger, judged, top=top)),
        groups=None if sizes is None else int(np.count_nonzero(sizes > 1)),
        spare=None if sizes is None else int(np.maximum(sizes - 1, 0).sum()),
        copies=() if near is None else tuple(copies(*near, top=top)),
        class_count=class_count,
        classes=classes,
        confusions=confusions(ledger),
        visits=visit_findings(ledger, windows=windows, visits=visits) if windows else None,
        not_finite=int(ledger.bad.sum(dtype=np.int64)),
    )


def suspected(ledger: Ledger, judged: Judgement) -> Bools:
    """Labels that are more likely wrong than right, and that are not the model's average prediction, bool [n]."""
    return judged.suspects(MIN_SUSPECT_PROBABILITY) & (ledger.vote[:, 0] != ledger.label)


def suspects(
    ledger: Ledger,
    judged: Judgement | None = None,
    *,
    top: int | None = None,
    names: Sequence[str] | None = None,
) -> list[Suspect]:
    """Labels that look wrong, most certain first."""
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
            guess_p=float(ledger.vote_p[i, 0]),
            right=int(ledger.right[i]),
            seen=int(ledger.seen[i]),
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
    """The name of a class; "class 3" if it has none."""
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
    """The `top` of `ids` with the largest `value`, largest first; on a tie, the lower id first."""
    if top is not None and top < len(ids):
        edge = -np.partition(-value[ids], top - 1)[top - 1] if top else np.inf
        ids = ids[value[ids] >= edge]
    return ids[np.argsort(-value[ids], kind="stable")][:top]


# ---------------------------------------------------------------- near-copies


def copies(group: npt.NDArray[np.int32], similarity: Floats, *, top: int | None = None) -> list[CopyGroup]:
    """Groups of near-copies, the largest first, ties by similarity; the most similar member represents its group."""
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
