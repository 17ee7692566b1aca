"""Remembering: after every window, what the ledger says of a few samples goes into the history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from salience.ledger import Ledger
from salience.ledger.history import History
from salience.run.part import Part, Setup


class Remembering(Part):
    """The history of a run; the same on every rank, since the ledger is."""

    name = "remembering"

    def __init__(self, setup: Setup, ledger: Ledger) -> None:
        self._ledger = ledger
        self.history = History(setup.n, setup.seed)

    def prepare(self, window: int) -> None:
        """The window before is over, and what it taught is in the ledger."""
        self.note(window - 1)

    def note(self, window: int) -> None:
        """Keep what the ledger says after `window`, unless nothing was recorded yet."""
        if window >= 0 and self._ledger.seen.any() and (not len(self.history) or self.history.windows[-1] < window):
            self.history.note(self._ledger, window)

    def state_dict(self) -> dict[str, Any]:
        return {name: torch.from_numpy(column.copy()) for name, column in self.history.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history.load_state_dict({name: column.numpy() for name, column in state.items()})
