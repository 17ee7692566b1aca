"""Deciding: what `auto` tries, keeps and undoes between two windows."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from salience.decide.levers import AvailableLevers, Settings
from salience.errors import SalienceError
from salience.events import SettingsChanged, StepCosts
from salience.feed.sizes import memory_bytes
from salience.feed.source import Source
from salience.ledger import Ledger
from salience.plan import Shard
from salience.ranks import Ranks
from salience.run.feeding import Feeding
from salience.run.part import Part, Setup, Voice
from salience.run.planning import Planning
from salience.run.resizing import Resizing
from salience.run.staging import Staging
from salience.run.watching import Watching
from salience.watch.model import Lever, ceiling, levers
from salience.watch.probe import current_session

if TYPE_CHECKING:
    from salience.decide.auto import Auto


DEFAULT_PREFETCH = 2
"""Batches that each worker of a DataLoader makes ahead by default."""
STRETCH_SECONDS, STRETCH_STEPS = 120.0, 64
"""Inside a window it is decided after so many seconds and steps, if as many steps are left."""


class Workers(Protocol):
    """What makes batches, with a number of processes that can be changed."""

    @property
    def num_workers(self) -> int: ...

    @property
    def ahead(self) -> int:
        """Batches that may be ready before they are asked for."""
        ...

    @property
    def restarts(self) -> bool:
        """True if worker processes are started anew for every window."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the DataLoader inside, as given."""
        ...

    def restart(self, workers: int, *, prefetch: int | None = None, pin: bool | None = None) -> None:
        """Make batches with that many workers from the next window on."""


class Deciding(Part):
    """Changes settings of other parts at the edges of windows, and undoes what does not help."""

    name = "deciding"

    def __init__(
        self,
        setup: Setup,
        voice: Voice,
        auto: Auto,
        *,
        workers: Workers,
        feeding: Feeding,
        planning: Planning,
        staging: Staging | None,
        watching: Watching,
        resizing: Resizing | None = None,
    ) -> None:
        self._setup, self._voice, self.auto = setup, voice, auto
        self._workers, self._feeding, self._planning = workers, feeding, planning
        self._staging, self._watching, self._resizing = staging, watching, resizing
        self._given_workers = workers.num_workers
        cached = 0 if feeding.feed is None else max(1, feeding.feed.budget)
        self.settings = Settings(workers=workers.num_workers, cache=cached)
        """Settings of the window in progress that `auto` may change."""
        self._refused: dict[str, str] = {}
        """Lever -> the reason why it cannot be tried."""
        self._at = 0.0, 0
        """When the stretch in progress began, and the number of steps before it."""
        self._announced = False
        """True once the settings of the run were written to the event log."""

    def prepare(self, window: int, ledger: Ledger) -> None:
        """At the edges of epochs: rank 0 decides by the measurements of the last window, and all ranks apply that."""
        window, piece = divmod(window, self._setup.pieces)  # decisions count epochs
        if piece:
            return
        controller, ranks = self.auto.controller, self._setup.ranks
        if self._setup.rank == 0:
            before = controller.verdict
            decisions = self.auto.edge(window, self._watching.steps, self._available())
            if controller.verdict is not None and controller.verdict is not before:
                costs = controller.verdict.costs
                found = [] if costs is None else [ceiling(costs, one) for one in self._levers(costs)]
                self._voice.events.emit(replace(controller.verdict, window=window, levers=tuple(found)))
            for decision in decisions:
                self._voice.events.emit(decision)
        if ranks is not None:
            said = [*controller.settings.numbers, float(controller.probing), float(controller.fills)]
            *numbers, probing, fills = ranks.broadcast(said)
            controller.settings, controller.probing, controller.fills = Settings.of(numbers), bool(probing), bool(fills)
        if controller.settings == self.settings and self._announced:
            return
        before = self.settings
        try:
            self._apply(controller.settings)
        except (SalienceError, OSError) as cause:
            if self._voice.strict or ranks is not None:  # other ranks may have done it
                raise
            self._voice.events.emit(controller.failed(window, before, str(cause)))
            self._apply(before)
        self._announced = True
        self._voice.events.emit(SettingsChanged(window=window, **asdict(controller.settings)))

    def due(self, delivered: int, left: int) -> bool:
        """True if the open window is long enough to decide inside it: about how batches are made, which changes no plan."""
        auto, steps = self.auto, self._watching.steps.count - self._at[1]
        if time.monotonic() - self._at[0] < STRETCH_SECONDS or steps < STRETCH_STEPS or left < STRETCH_STEPS:
            return False
        if self._watching.probe is not None and not self._watching.probe.inputs:
            return False  # it has not measured yet
        alone = self._setup.ranks is None and self._feeding.feed is None and self._staging is None
        return alone and not auto.replays and not auto.controller.waits and current_session() is None

    def inside(self, shard: Shard, done: frozenset[int]) -> bool:
        """Decide inside a window; True if its remaining batches must be made anew, since settings have changed."""
        controller, before = self.auto.controller, self.settings
        window = shard.plan.window // self._setup.pieces
        self.auto.close(self._watching.steps)
        portion = (self._watching.steps.count - self._at[1]) / max(1, len(shard))
        everything = self._available()
        only = replace(everything, cache=0, reusable=(), keep=(), pixels=())
        for decision in self.auto.edge(window, self._watching.steps, only, portion=portion):
            self._voice.events.emit(decision)
        if controller.settings != before:
            self._apply(controller.settings)
            self._voice.events.emit(SettingsChanged(window=window, **asdict(controller.settings)))
        self.open(shard, done)
        return controller.settings != before

    def _apply(self, settings: Settings) -> None:
        """Change what differs; only between two windows."""
        before, self.settings = self.settings, settings
        if settings.cache != before.cache:
            self._feeding.set_cache(settings.cache or None, self.feed_workers)
        made = [(one.workers, one.cache, one.prefetch, one.pin) for one in (settings, before)]
        if made[0] != made[1]:
            self._workers.restart(settings.workers, prefetch=settings.prefetch, pin=settings.pin)
        if settings.select != before.select:
            self._planning.switch(settings.select)
        if self._staging is not None and self._staging.optional is not None:
            self._staging.reuses = settings.treat
        if self._resizing is not None and self._resizing.optional:
            self._resizing.on = settings.resolution

    def _available(self) -> AvailableLevers:
        """The levers that can be switched on: those the user left open and has given what they need."""
        moves = self._given_workers > 0
        if not moves:
            self._refused["num_workers"] = (
                "it is 0, and what a data set has opened in this process may not survive a fork; pass num_workers=1"
            )
        cache, share, source = 0, 1.0, self._feeding.source
        if source is not None:
            cache = 0 if self.settings.cache else roomy_cache(source)
            share = min(1.0, (cache or self.settings.cache) / max(1, int(source.sizes.sum())))
        reusable: tuple[str, ...] = ()
        if self._staging is not None and self._staging.optional is not None:
            if self._staging.refused:
                self._refused['treat="reuse"'] = self._staging.refused
            split = self._staging.treating.split
            names = self._staging.stage_names("load" if source is None else "fetch")
            reusable = () if split is None else names[: split.stages + 1]
        cores = cores_of(self._setup.ranks) if moves else 0
        resizing = self._resizing
        images = resizing is not None and resizing.optional and resizing.found_images
        return AvailableLevers(
            cores=cores, cache=cache, share=share, reusable=reusable, keep=self._planning.offered_shares,
            prefetch=0 if self._workers.options.get("prefetch_factor") or not moves else DEFAULT_PREFETCH,
            pin="pin_memory" not in self._workers.options and torch.cuda.is_available(),
            pixels=resizing.costs if resizing is not None and images else (), refused=self._refused,
        )  # fmt: skip

    def _levers(self, costs: StepCosts) -> list[Lever]:
        """What a verdict names as levers: not those that are on already."""
        on = ("select=" if self._planning.config is not None else "", 'treat="reuse"' if self.settings.treat else "")
        found = levers(costs, cores=cores_of(self._setup.ranks), cached=self.settings.cache > 0)
        return [one for one in found if not one.name.startswith(tuple(filter(None, on)))]

    @property
    def feed_workers(self) -> int:
        """Workers the cache must be able to serve: those there are, or as many as `auto` may start."""
        return max(self._given_workers, cores_of(self._setup.ranks))

    def open(self, shard: Shard, done: frozenset[int]) -> None:
        self._at = time.monotonic(), self._watching.steps.count
        if current_session() is not None:
            return  # a profile has a probe of its own
        if self._watching.steps.trying:
            self._watching.probe = None  # salience.sync is measuring: one at a time
            return
        seconds = self._voice.watch.seconds
        self._watching.probe = self.auto.open(
            self._watching.steps, len(shard), ahead=self._workers.ahead, restarts=self._workers.restarts,
            planned=seconds.get("plan", 0.0) - seconds.get("rehearsal", 0.0),
        )  # fmt: skip

    def close(self, *, finished: bool) -> None:
        if finished:
            self.auto.close(self._watching.steps)

    def evaluated(self, metric: float, progress: float) -> None:
        """Take a validation result, by which lossy levers are judged."""
        self.auto.controller.evaluated(metric, progress)

    def state_dict(self) -> dict[str, Any]:
        return {"auto": self.auto.state_dict(), "announced": self._announced}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.auto.load_state_dict(state["auto"])
        self._announced = bool(state["announced"])
        self._apply(self.auto.controller.settings)


def cores_of(ranks: Ranks | None) -> int:
    """Cores that the workers of one rank may have."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // (1 if ranks is None else len(ranks.node_ranks)))


def roomy_cache(source: Source) -> int:
    """Bytes of a cache to try: the whole source, or a quarter of the memory; 0 if that is not known."""
    return min(int(source.sizes.sum()), (memory_bytes() or 0) // 4)


def first_cache(auto: Auto | None, source: Source | None, ranks: Ranks | None) -> int:
    """Bytes of a cache from the first window on: `auto` would try it anyway, and filling it later would cost one more window.

    0 unless the source is reached over a network: the system itself keeps local files in memory. The same on every rank.
    """
    if auto is None or auto.replays or source is None or not source.reader.store.far:
        return 0
    size = roomy_cache(source)
    return size if ranks is None else int(ranks.broadcast([size])[0])
