"""Watching: what the loop and salience do with their time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from salience.errors import ConfigError
from salience.plan import Shard
from salience.report.sinks import Sink, guarded, sink
from salience.run.part import Batch, Part, Setup, Voice
from salience.watch import Steps
from salience.watch.probe import Probe, current_session
from salience.watch.usage import UsageRecord
from salience.watch.waiting import time_wait


class Watching(Part):
    """Timers of the training loop, and how busy the machine is. The seconds of salience itself are in the Voice."""

    name = "watching"

    def __init__(self) -> None:
        self.steps = Steps()
        self.probe: Probe | None = None
        """Measures the loader alone and the loop alone now and then; None unless it was asked for."""
        self.usage: UsageRecord | None = None
        """How busy the machine is; made with the first window."""
        self._opened_at = 0.0

    def profile(self, workers: int, ahead: int) -> None:
        """Take the probe of a `salience profile` session, if this process runs under one."""
        if (session := current_session()) is not None:
            self.probe = session.probe_for(self.steps, workers, ahead)

    def open(self, shard: Shard, done: frozenset[int]) -> None:
        self.usage = self.usage or UsageRecord()
        self.usage.begin()
        self._opened_at = time.perf_counter()
        self.steps.pause()  # the time since the last window belongs to no step
        self.steps.ask()  # before workers start, which is part of the first wait

    def take_back(self, batch: Batch) -> None:
        timed = self.steps.count > 0  # a Selector's batches cost nothing to get, and are not timed
        if timed:
            self.steps.ask()
        if self.usage is not None and self.usage.note() and timed:
            self.steps.ask()  # that look at the machine belongs neither to the step before nor to the wait

    def spent(self) -> dict[str, Any]:
        """Fields of the `window` event: seconds of the window and of its steps; learning rate, machine."""
        return {
            "seconds": time.perf_counter() - self._opened_at,
            "steps": self.steps.spent(),
            "lr": self.steps.lr,
            "usage": () if self.usage is None else self.usage.taken(),
        }


class TimingWaits(Part):
    """Times how long a rank waits for the gradients of the others."""

    name = "timing_waits"

    def __init__(self, setup: Setup, steps: Steps) -> None:
        self._setup, self._steps = setup, steps

    @property
    def in_use(self) -> bool:
        return self._setup.world > 1

    def on_loss(self, batch: Batch, losses: Tensor, kept: Tensor | None, targets: Tensor | None) -> None:
        if losses.requires_grad:
            time_wait(losses, self._steps.waited)


def open_sinks(setup: Setup, voice: Voice, sinks: Sequence[str | Sink]) -> None:
    """Have the event log feed `sinks`, on rank 0; one that cannot be opened stops all ranks."""
    if isinstance(sinks, str):
        raise ConfigError(f"sinks is {sinks!r}; it must be a list: sinks=[{sinks!r}].")
    trouble: Exception | None = None
    try:
        for given in sinks if setup.rank == 0 else ():
            voice.events.listen(guarded(sink(given), voice.warn, strict=voice.strict))
    except Exception as error:
        if setup.ranks is None:
            raise
        trouble = error
    if sinks and setup.ranks is not None:
        setup.ranks.agree(trouble, ConfigError("A sink cannot be opened on rank 0; its message says why."))
