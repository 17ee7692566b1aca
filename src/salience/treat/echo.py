"""Echo: several views of each sample that is read, in different batches. The planned number of visits with fewer reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.treat.config import MOST_VIEWS

Ids = npt.NDArray[np.int64]


def views_needed(saved: float, rest: float, compute: float, most: int = 4) -> int:
    """Views per sample with which input keeps up with the model: the least e with saved / e + rest <= compute, at most `most`.

    Arguments are seconds per batch: `saved` of reading and of the stages before the intermediate, `rest` of those after it,
    each divided by the workers, and `compute` of the loop.
    """
    if saved + rest <= compute:
        return 1
    return int(np.clip(math.ceil(saved / max(compute - rest, saved / most, 1e-12)), 1, most))


def views_of(
    importance: npt.NDArray[Any] | None, extra: npt.NDArray[np.int64], mean: int, n: int
) -> npt.NDArray[np.int64]:
    """Number of views of each sample, int64 [n]: `mean` on average, one less for the lower third of importance, one more for
    the upper third, and one more for each near-copy that was left out (`extra`)."""
    views = np.full(n, mean, dtype=np.int64)
    if mean > 1 and importance is not None and importance.min() < importance.max():
        views += (importance > 2 / 3).astype(np.int64) - (importance < 1 / 3)
    return np.clip(views + (extra if mean > 1 else 0), 1, MOST_VIEWS)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Echoed:
    """The visits of a plan as views."""

    position: npt.NDArray[np.int64]
    """Position of each visit's sample in the plan before, int64 [visits]."""
    view: npt.NDArray[np.uint8]
    count: npt.NDArray[np.int64]
    """Number of views of that sample in this window, int64 [visits]."""


def echo(views: npt.NDArray[np.int64], turn: npt.NDArray[np.int32], *, apart: int, rng: np.random.Generator) -> Echoed:
    """Spread views over as many visits T as the plan has samples; `views` and `turn` are in the plan's order.

    Samples whose `turn` (window in which they were last read) is longest ago come first, with ties in the plan's order, until
    their views fill the plan; the others wait for a later window. View v of sample number t of m stands at
    t / m * (T - (views - 1) g) + g (v + u / 2), u uniform in [0, 1), and visits are in the order of that: a shuffle buffer.
    Near the ends only one view of each sample is in play, so g = 2 (T / m) * apart keeps two views of a sample
    `apart` visits from each other. If the plan is too short for that, a sample has fewer views.
    """
    visits = len(views)
    gap = 2 * float(views.mean()) * apart
    views = np.minimum(views, max(1, int(visits // gap)))
    order = np.argsort(turn, kind="stable")
    total = np.cumsum(views[order])
    m = int(np.searchsorted(total, visits)) + 1
    chosen = np.sort(order[:m])
    count = views[chosen].copy()
    late = np.flatnonzero(chosen == order[m - 1])[0]
    count[late] -= int(total[m - 1]) - visits
    sample = np.repeat(np.arange(m), count)
    view = np.arange(visits) - np.repeat(np.cumsum(count) - count, count)
    start = np.arange(m) / m * np.maximum(0, visits - (count - 1) * gap)
    key = start[sample] + gap * (view + rng.random(visits) / 2)
    arranged = np.argsort(key, kind="stable")
    return Echoed(
        position=chosen[sample][arranged], view=view[arranged].astype(np.uint8), count=count[sample][arranged]
    )


def echo_slots(ids: Ids, view: npt.NDArray[np.uint8], slots: int) -> npt.NDArray[np.int64]:
    """The slot of each visit, int64 [visits]: in turn by first views, the same for all views of a sample."""
    first = np.flatnonzero(view == 0)
    turn = np.zeros(int(ids.max()) + 1, dtype=np.int64)
    turn[ids[first]] = np.arange(len(first))
    return turn[ids] % max(1, slots)
