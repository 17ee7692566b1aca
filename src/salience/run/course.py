"""How far a run has come: the window in progress, the batches delivered, visits, and progress from 0 to 1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from salience.plan import Shard


class Course:
    """Counts windows, batches and visits. A window is open from when it is planned until it is closed."""

    def __init__(self, steps: int | None = None) -> None:
        self.steps = steps
        """Batches of the whole run; None where it is counted in epochs."""
        self.window = 0
        """The window in progress, or the next one between two windows."""
        self.shard: Shard | None = None
        """This rank's part of the window in progress, or of the last one, since loops that fetch ahead pass losses late."""
        self.open = False
        self.pending = False
        """True while this process has handed out no batch of the open window."""
        self.resumed = False
        """True from a resume until a window is planned."""
        self.started = False
        """True once a window was planned, in this process or in the one that was resumed."""
        self.delivered: set[int] = set()
        self.left = 0
        """Batches of the open window that were not delivered."""
        self.visits_expected: int | None = None
        """Sample visits of the whole run, over all ranks, as far as they can be known now; None without `epochs`."""
        self._visited = self._batches = 0
        """Visits and batches of the windows that are closed."""
        self._span = (0.0, 0.0)

    def begin(self, shard: Shard, later: int | None) -> None:
        """Enter a new window, after which `later` visits are expected."""
        visits, start = len(shard.plan), self._span[1]
        self.shard, self.open, self.delivered, self.left = shard, True, set(), len(shard)
        self.pending = self.started = True
        self.resumed = False
        end = start
        if later is not None:
            self.visits_expected = self._visited + visits + later
            end = min(1.0, start + (1 - start) * visits / (visits + later))
        self._span = start, end

    def resume(self, shard: Shard, delivered: Iterable[int]) -> None:
        """Enter a window that was saved in progress."""
        self.shard, self.open, self.pending, self.delivered = shard, True, True, set(delivered)
        self.resumed, self.left = True, len(shard) - len(self.delivered)

    def replace(self, shard: Shard) -> None:
        """Plan the pending window anew, with as many visits."""
        self.shard, self.left = shard, len(shard)

    def deliver(self, number: int) -> None:
        """A batch reaches the loop."""
        self.delivered.add(number)
        self.pending, self.left = False, self.left - 1

    def end(self, windows: int | None = None) -> bool:
        """Leave the window; True if it was the last one of a run of so many `windows`, or of its `steps`."""
        before, self._visited, self._batches = self._batches, self.visits, self.batches
        self.open, self.pending, self.delivered, self.left = False, False, set(), 0
        self._span = self._span[1], self._span[1]
        self.window += 1
        return self.window == windows if self.steps is None else before < self.steps <= self._batches

    @property
    def complete(self) -> bool:
        """True once every batch of the open window was delivered."""
        return self.open and not self.left

    @property
    def visits_before(self) -> int:
        """Sample visits of the windows that are closed, over all ranks."""
        return self._visited

    @property
    def visits(self) -> int:
        """Sample visits made so far, over all ranks."""
        if not self.open or self.shard is None:
            return self._visited
        return self._visited + int(self.shard.global_sizes[list(self.delivered)].sum())

    @property
    def batches(self) -> int:
        """Batches delivered so far."""
        return self._batches + len(self.delivered)

    @property
    def steps_left(self) -> int | None:
        """Batches until the run is over, below 0 past its end; None where it is counted in epochs."""
        return None if self.steps is None else self.steps - self.batches

    @property
    def progress(self) -> float:
        """From 0 to 1 over the whole run: in batches if its `steps` are given, in sample visits if its `epochs` are."""
        if self.steps is not None:
            return min(1.0, self.batches / self.steps)
        start, end = self._span
        if not self.open or self.shard is None or not len(self.shard):
            return end
        return start + (end - start) * len(self.delivered) / len(self.shard)

    def state_dict(self) -> dict[str, Any]:
        return {
            "window": self.window, "visited": self._visited, "span": list(self._span),
            "visits_expected": self.visits_expected, "delivered": sorted(self.delivered),
            "started": self.started, "batches": self._batches,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        start, end = state["span"]
        self.window, self._visited, self._span = int(state["window"]), int(state["visited"]), (float(start), float(end))
        self._batches = int(state.get("batches", 0))
        self.visits_expected = state["visits_expected"]
        self.started, self.resumed = bool(state["started"]), True
        self.shard, self.open, self.pending, self.delivered, self.left = None, False, False, set(), 0
