"""A trial on hard samples: does visiting one teach the model more about it than visiting the others does?

In every window some hard samples, drawn at random, rest (are left out), and as many others are visited; in the next window all
of them are visited. Their gains in between are compared, as in any trial with a control group:

    gain       p(label) at the visit that ends the trial, less that at the visit before the trial
    carried    mean gain of those that rested / mean gain of those that were visited

If the others carry a sample along (carried near 1), hard samples are learnt as the model learns, and preferring them is safe.
If only its own visits teach a sample (carried near 0), it is learnt by heart: visits to it are taken from the others and do
not generalise.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from salience.ledger import Ledger
from salience.seeds import TRIAL, generator

Rows = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

WINDOW, ID, RESTS, SEEN, BEFORE, AFTER = range(6)
"""Columns of `Ledger.trial`: when the trial began, its sample, whether that rests, its visits so far, and p(label) before and
after; NaN until the trial is over."""
HARD_UNDER = 0.5
"""A sample is hard if its label has less than this probability."""
SHARE_ON_TRIAL, FEWEST_ON_TRIAL, MOST_ON_TRIAL = 0.1, 30, 4000
"""Share of the hard samples that rests in a window: at least FEWEST samples (or there is no trial), at most MOST."""
WINDOWS_POOLED = 3
"""Trials that began in this many windows are judged together."""


def advance(ledger: Ledger, window: int, seed: int) -> None:
    """Before `window` is planned: end the trial from two windows ago and begin a new one."""
    rows = ledger.trial[(ledger.trial[:, WINDOW] >= window - 1 - WINDOWS_POOLED) & (ledger.trial[:, WINDOW] < window)]
    ending = (rows[:, WINDOW] == window - 2) & np.isnan(rows[:, AFTER])
    ended = rows[ending]
    ids = ended[:, ID].astype(np.int64)
    visits = ended[:, SEEN] + np.where(ended[:, RESTS] == 1, 1, 2)
    as_drawn = (ledger.seen[ids] == visits) & (ledger.last_seen[ids] == window - 1) & np.isfinite(ledger.last_loss[ids])
    ended[:, AFTER] = np.exp(-ledger.last_loss[ids].astype(np.float64))
    ledger.trial = np.concatenate((rows[~ending], ended[as_drawn], _begun(ledger, window, seed)))


def _begun(ledger: Ledger, window: int, seed: int) -> Rows:
    """The rows of a new trial: hard samples that are in no other trial, half of which rest."""
    free = np.isfinite(ledger.last_loss) & (ledger.confidence < HARD_UNDER)
    free[ledger.trial[ledger.trial[:, WINDOW] == window - 1, ID].astype(np.int64)] = False
    hard = np.flatnonzero(free)
    count = min(MOST_ON_TRIAL, int(SHARE_ON_TRIAL * len(hard)))
    if count < FEWEST_ON_TRIAL:
        return np.empty((0, 6))
    ids = generator(seed, TRIAL, window).choice(hard, 2 * count, replace=False)
    rows = np.full((2 * count, 6), np.nan)
    rows[:, WINDOW], rows[:, ID], rows[:, RESTS] = window, ids, np.arange(2 * count) < count
    rows[:, SEEN], rows[:, BEFORE] = ledger.seen[ids], np.exp(-ledger.last_loss[ids].astype(np.float64))
    return rows


def on_trial(rows: Rows, window: int) -> tuple[Ids, Ids]:
    """The samples that rest in `window`, and those that must be visited in it."""
    now, last, rests = rows[:, WINDOW] == window, rows[:, WINDOW] == window - 1, rows[:, RESTS] == 1
    ids = rows[:, ID].astype(np.int64)
    return ids[now & rests], ids[now & ~rests | last]


def carried(rows: Rows) -> float:
    """Mean gain of samples that rested divided by that of visited ones; NaN if too few were tried, or nothing was gained."""
    over = rows[~np.isnan(rows[:, AFTER])]
    gain, rested = over[:, AFTER] - over[:, BEFORE], over[:, RESTS] == 1
    if min(np.count_nonzero(rested), np.count_nonzero(~rested)) < FEWEST_ON_TRIAL:
        return float("nan")
    taught = float(gain[~rested].mean())
    return float(gain[rested].mean()) / taught if taught > 0 else float("nan")
