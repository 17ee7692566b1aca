"""What a run is made of, and how it speaks: events and warnings."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience._version import __version__
from salience.config import SelectConfig
from salience.events import EventLog
from salience.ledger import Ledger, Recorder
from salience.ledger.copies import Copies
from salience.plan import Plan, Shard, Trace
from salience.ranks import Ranks
from salience.select import Pipeline
from salience.select.findings import Study, study
from salience.select.redundancy import CopySearch
from salience.watch import Steps, Stopwatch


@dataclass(slots=True)
class Batch:
    """The batch delivered last."""

    window: int
    number: int
    ids: npt.NDArray[np.int64]
    hint: Tensor | None = None
    """Integer targets found in the batch."""
    kept: Tensor | None = None
    """Positions chosen by pick()."""


class Base:
    """The parts every other part of a run reads; `Windows` makes them."""

    n: int
    batch_size: int
    epochs: int | None
    seed: int
    drop_last: bool
    rank: int
    world: int
    epoch: int
    """The window in progress, or the next one between two windows."""
    events: EventLog
    watch: Stopwatch
    steps: Steps
    _config: SelectConfig | Trace | None
    _pipeline: Pipeline | None
    _offered: tuple[SelectConfig, Pipeline] | None
    """A selection that is not the user's and may be switched on."""
    _group: Ranks | None
    _ledger: Ledger
    _recorder: Recorder
    _copies: CopySearch | None
    _strict: bool
    _warned: set[str]
    _shard: Shard | None
    """This rank's part of the window in progress, or of the last one: a loop that fetches ahead is late with losses."""
    _open: bool
    _visited: int
    """Visits of the windows before."""
    _delivered: set[int]
    _study: Study | None = None
    """What was found in the ledger when it was last looked at."""
    _span: tuple[float, float]
    """Progress at the start and at the end of the window."""

    def _emit_run(self) -> None:
        self.events.emit(
            "run", salience=__version__, torch=torch.__version__, population=self.n, batch_size=self.batch_size,
            epochs=self.epochs, seed=self.seed, world=self.world, drop_last=self.drop_last,
            select=self._config.to_dict() if isinstance(self._config, SelectConfig) else self._describe(),
        )  # fmt: skip

    def _emit_plan(self, plan: Plan) -> None:
        self.events.emit(
            "plan", window=plan.window, picked=len(plan), population=plan.population, progress=self.progress,
            seconds=self.watch.seconds.get("plan", 0.0), visited=self.visits,
            filters=[{"name": n.name, "dropped": n.dropped, "forced": n.forced, "reason": n.reason} for n in plan.notes],
            by_importance=picked_by_importance(plan),
        )  # fmt: skip

    def _studied(self) -> Study:
        """What is found in the ledger as it is now; nothing is judged twice."""
        near = None if self.copies is None else (self.copies.group, self.copies.similarity)
        with self.watch("findings"):
            self._study = study(self._ledger, near, windows=self.epoch, visits=self._visited, last=self._study)
        return self._study

    def _emit_findings(self) -> None:
        before = self._study
        if self._studied() is not before:
            self.events.emit(self._studied().findings)

    def _warn(self, text: str) -> None:
        warn(self.events, text)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)

    def _describe(self) -> str:
        if self._config is None or self._offered is not None:
            return "observe"
        if isinstance(self._config, Trace):
            return "trace"
        return json.dumps(self._config.to_dict(), sort_keys=True)

    @property
    def visits(self) -> int:
        """Sample visits made so far, over all ranks."""
        if not self._open or self._shard is None:
            return self._visited
        return self._visited + sum(int(self._shard.global_sizes[number]) for number in self._delivered)

    @property
    def progress(self) -> float:
        """From 0 to 1 over the whole run, in sample visits; needs `epochs`."""
        start, end = self._span
        if not self._open or self._shard is None or not len(self._shard):
            return end
        return start + (end - start) * len(self._delivered) / len(self._shard)

    @property
    def plan(self) -> Plan | None:
        """The plan of the window in progress, or of the last one."""
        return None if self._shard is None else self._shard.plan

    @property
    def copies(self) -> Copies | None:
        """Which samples are copies of each other, as far as they were looked for."""
        return None if self._copies is None else self._copies.found


def picked_by_importance(plan: Plan, parts: int = 10) -> list[float] | None:
    """Share of the samples that is visited, by tenths of importance from the least on; None where all are alike."""
    if plan.ranks is None or plan.ranks.min() == plan.ranks.max():
        return None
    part = np.minimum((plan.ranks.astype(np.float32) * parts).astype(np.int64), parts - 1)
    visited = np.zeros(plan.population, dtype=bool)
    visited[plan.ids] = True
    every = np.bincount(part, minlength=parts)
    return (np.bincount(part[visited], minlength=parts) / np.maximum(1, every)).round(4).tolist()


def warn(events: EventLog, text: str) -> None:
    """Say it in the event log and to whoever reads the logs; a free function, so that plug-ins do not hold the run."""
    logging.getLogger("salience").warning(text)
    events.emit("warning", text=text)
