"""How suspected, hard and easy samples developed, epoch by epoch, and what separates wrong labels from hard samples.

    groups        suspected labels; the hardest of the others; the easiest half of the others
    course        mean loss, variance of the loss, times forgotten, share right: per group and window
    separation    how well each of them ranks wrong labels above hard samples, window by window (AUROC)

The groups are made at the end of the run and followed from its beginning. If the wrong labels are known, they replace the
suspected ones, and separation is measured; otherwise it shows what made the run suspect them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from salience.ledger import Ledger
from salience.ledger.history import History
from salience.select.agreement import auroc
from salience.select.noise import judge
from salience.select.view import Bools
from salience.stats import known_mean

HARD, EASY = 0.1, 0.5
"""Shares of the unsuspected samples that count as hard and as easy, by mean loss."""

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Contrast:
    """Three groups of samples, followed through a history."""

    windows: tuple[int, ...]
    sizes: Mapping[str, int]
    """Group -> number of its samples."""
    course: Mapping[str, Mapping[str, Doubles]]
    """Quantity -> group -> mean per window, float64 [windows]; NaN where nothing is known."""
    separation: Mapping[str, Doubles]
    """Quantity -> AUROC of the first group against the hard one, float64 [windows]; above 0.5 = higher in the first."""
    known: bool
    """True if the first group has labels known to be wrong."""

    @property
    def first(self) -> str:
        """Name of the first group."""
        return "wrong" if self.known else "suspected"

    def best(self) -> tuple[str, int, float] | None:
        """The quantity and the window that separate best, with the AUROC; None if nothing separates."""
        found = [
            (name, self.windows[i], float(value))
            for name, values in self.separation.items()
            for i, value in enumerate(values)
            if np.isfinite(value)
        ]
        return max(found, key=lambda one: abs(one[2] - 0.5), default=None)


def groups_of(ledger: Ledger, wrong: Bools | None = None) -> dict[str, Bools]:
    """The three groups over all samples, bool [n] each."""
    first = judge(ledger).suspects() if wrong is None else wrong
    rest = np.flatnonzero(~first & np.isfinite(ledger.mean_loss))
    order = rest[np.argsort(ledger.mean_loss[rest], kind="stable")]
    found = {"suspected" if wrong is None else "wrong": first}
    for name, part in (
        ("hard", order[len(order) - round(HARD * len(order)) :]),
        ("easy", order[: round(EASY * len(order))]),
    ):
        mask = np.zeros(ledger.n, dtype=bool)
        mask[part] = True
        found[name] = mask
    return found


def contrast(history: History, groups: Mapping[str, Bools], *, known: bool = False) -> Contrast:
    """Follow the groups through a history; the first is compared with the hard one."""
    mine = {name: mask[history.ids] for name, mask in groups.items()}
    values = {
        "loss": history["last_loss"].astype(np.float64),
        "variance": history["var_loss"].astype(np.float64),
        "forgotten": history["forgotten"].astype(np.float64),
        "right": history["right"].astype(np.float64),
    }
    if not np.isfinite(history["confidence"].astype(np.float64)).any():  # no logits: nothing is right or forgotten
        del values["forgotten"], values["right"]
    first, hard = next(iter(mine)), "hard"
    among = mine[first] | mine[hard]
    return Contrast(
        windows=tuple(history.windows),
        sizes={name: int(mask.sum()) for name, mask in mine.items()},
        course={
            quantity: {name: known_mean(rows[:, mask], axis=1) for name, mask in mine.items()}
            for quantity, rows in values.items()
        },
        separation={
            quantity: np.array([_apart(row[among], mine[first][among]) for row in rows]) for quantity, rows in values.items()
        },
        known=known,
    )  # fmt: skip


def _apart(row: Doubles, first: Bools) -> float:
    known = np.isfinite(row)
    return auroc(row[known], first[known])
