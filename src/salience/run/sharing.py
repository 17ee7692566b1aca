"""Sharing: a job leaves what it has learnt for others at the end of every window, and says what it started from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from salience.ledger import Ledger
from salience.ledger.sharing import Board, Known, learnt_here
from salience.run.part import Part, Voice
from salience.run.state import arrays, tensors


class Sharing(Part):
    """One job's end of a shared ledger."""

    name = "sharing"

    def __init__(self, voice: Voice, board: Board, known: Known, ledger: Ledger) -> None:
        self._voice, self._board, self._ledger = voice, board, ledger
        self.known = known
        self._due = False
        """True between the end of a window and the moment at which its losses are in the ledger."""

    def close(self, *, finished: bool) -> None:
        self._due = True

    def flush(self, window: int) -> None:
        if not self._due:
            return
        self._due = False
        try:
            self._board.give(learnt_here(self._ledger, self.known.ledger))
        except Exception as cause:  # whatever a disk or an actor does: others only learn less
            self._voice.warn_once(
                f"What this job learns cannot be given to others ({type(cause).__name__}: {cause}); it goes on alone."
            )

    def state_dict(self) -> dict[str, Any]:
        """What it started from, and the name under which it gives: a resumed job is the same job."""
        known = self.known
        return {
            "job": self._board.job, "jobs": known.jobs, "comparison": known.comparison,
            "columns": {} if known.ledger is None else tensors(known.ledger.state_dict()),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ledger = None
        if state["columns"]:
            ledger = Ledger(self._ledger.n)
            ledger.load_state_dict(arrays(state["columns"]))
        self._board.job = str(state["job"])
        self.known = Known(ledger=ledger, jobs=int(state["jobs"]), comparison=str(state["comparison"]))

    def report(self) -> str:
        known, also = self.known, f", as did every job of the comparison {self.known.comparison!r}"
        if known.ledger is None:
            begin = "This run shares its ledger and started from nothing"
        else:
            begin = f"This run started from what {known.jobs} other {'job' if known.jobs == 1 else 'jobs'} had learnt "
            begin += f"({known.digest}), without a warm-up"
        if known.comparison:
            return f"{begin}{also}."
        return f"{begin}. It is in no comparison: jobs that started at other times knew more or less than this one."
