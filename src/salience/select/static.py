"""Static selection (`mode = "static"`): one subset, chosen after a few epochs or by other runs' ledgers, to the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from salience import ledger as ledgers
from salience.errors import ConfigError
from salience.ledger import Ledger
from salience.plan import Note, Plan
from salience.seeds import STATIC, generator
from salience.select.reference import ledger_file


def again(chosen: Plan, window: int, seed: int) -> Plan:
    """The samples and weights of the plan `chosen` for a later window, in a new order."""
    order = generator(seed, STATIC, window).permutation(len(chosen))
    size = len(chosen)
    fixed = Note(
        name="static", dropped=chosen.population - size, forced=0,
        reason=f"one fixed subset of {size:,} samples, chosen in window {chosen.window}",
    )  # fmt: skip
    return replace(
        chosen, window=window, ids=chosen.ids[order], weights=chosen.weights[order],
        importance=chosen.importance[order], level=np.zeros(size, dtype=np.uint8), notes=(fixed,),
    )  # fmt: skip


def opinions_of(paths: Sequence[str], n: int) -> list[Ledger]:
    """The ledgers of other runs over the same `n` samples, by file or run folder."""
    found = [ledgers.load(ledger_file(path)) for path in paths]
    for path, ledger in zip(paths, found, strict=True):
        if ledger.n != n:
            raise ConfigError(
                f"select.ledgers: {path!r} has {ledger.n} samples, the data set {n}; they must be the same, in order."
            )
    return found
