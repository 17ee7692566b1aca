"""Ledgers as files: written atomically as npz, never pickled; ledgers of several runs and models can be merged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from salience.errors import StateError
from salience.files import read_npz, write_npz
from salience.ledger.columns import COLUMNS, COUNT_LIMIT
from salience.ledger.keys import Keys
from salience.ledger.ledger import Ledger
from salience.stats import known_mean

FORMAT = "salience-ledger-1"
COUNTERS = ("seen", "trained", "right", "forgotten", "bad")


def save(ledger: Ledger, path: str | Path) -> None:
    """Write every column, and the keys of the samples if they have any; the file appears whole or not at all."""
    keys = {} if ledger.keys is None else {"keys": ledger.keys.array()}
    write_npz(path, {"format": np.array(FORMAT), **ledger.state_dict(), **keys})


def load(path: str | Path) -> Ledger:
    arrays = read_npz(path, FORMAT, "ledger")
    if "seen" not in arrays or arrays["seen"].ndim != 1 or not len(arrays["seen"]):
        raise StateError(f"{str(path)!r} is not a ledger: it has no column 'seen' with a number per sample.")
    ledger, keys = Ledger(len(arrays["seen"])), arrays.pop("keys", None)
    try:
        ledger.load_state_dict(arrays)
        if keys is not None:
            ledger.keys = Keys.from_array(keys)
            if len(ledger.keys) != ledger.n:
                raise StateError(f"It has {len(ledger.keys)} keys for {ledger.n} samples.")
    except StateError as cause:
        raise StateError(f"{str(path)!r} cannot be loaded. {cause}") from cause
    return ledger


def merge(ledgers: Sequence[Ledger]) -> Ledger:
    """Merge the ledgers of runs over one data set: counters are added, statistics averaged over the runs that have them.

    Where the runs guessed different classes, the most frequent guess wins. `last_seen` is reset, since
    windows of different runs cannot be compared.
    """
    if not ledgers:
        raise StateError("There is nothing to merge; give at least one ledger.")
    sizes = sorted({ledger.n for ledger in ledgers})
    if len(sizes) > 1:
        raise StateError(f"Ledgers over {sizes} samples cannot be merged; they must come from the same data set.")
    merged = Ledger(sizes[0])
    for name in COLUMNS:
        stack = np.stack([ledger[name] for ledger in ledgers])
        if name in COUNTERS:
            merged[name][:] = np.minimum(stack.sum(axis=0, dtype=np.int64), COUNT_LIMIT)
        elif name == "margin_sum":
            merged[name][:] = stack.sum(axis=0)
        elif name in ("guess", "other"):
            merged[name][:] = _majority(stack)
        elif name == "label":
            merged[name][:] = _agreed_labels(stack)
        elif name == "size":
            merged[name][:] = stack.max(axis=0)
        elif name != "last_seen":
            merged[name][:] = known_mean(stack)
    return merged


def _majority(stack: np.ndarray) -> np.ndarray:
    """The most frequent value of each column of [runs, n]; the earliest run wins a tie, -1 never wins over a value."""
    votes = np.stack([(stack == row).sum(axis=0) * (row >= 0) for row in stack])
    return np.take_along_axis(stack, votes.argmax(axis=0)[None], axis=0)[0]


def _agreed_labels(stack: np.ndarray) -> np.ndarray:
    best = stack.max(axis=0)
    clash = int(((stack != best) & (stack >= 0)).any(axis=0).sum())
    if clash:
        raise StateError(f"The ledgers disagree on the class of {clash} samples; they come from different data sets.")
    return best
