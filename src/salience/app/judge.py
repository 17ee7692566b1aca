"""What a run of `salience train` needs of a search that it is a trial of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from salience.ledger.sharing import Board
from salience.loader import Loader


class Judge(Protocol):
    """Whoever started this run as one of several, and may end it between two epochs."""

    @property
    def ledger(self) -> Board | None:
        """Through which it shares what it learns."""
        ...

    def follow(self, loader: Loader) -> None:
        """The run has its loader now."""
        ...

    def report(self, metrics: Mapping[str, float]) -> None:
        """An epoch is over, and its checkpoint written; if this raises, the run ends."""
        ...
