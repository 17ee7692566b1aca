"""A Loader that decides for itself: what `auto` tries, keeps and undoes between two windows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch.utils.data import DataLoader

from salience.decide import Auto, Reach, Settings
from salience.errors import SalienceError, StateError
from salience.feed.cache import memory_bytes
from salience.feed.source import Source
from salience.loading.staging import Staging
from salience.watch.model import ceiling, levers, told


class Deciding(Staging):
    """Settings that change at the edges of windows."""

    _auto: Auto | None
    _inner: DataLoader[Any]

    def _make_inner(self, options: dict[str, Any]) -> DataLoader[Any]:
        """The DataLoader inside."""
        raise NotImplementedError

    def _decide(self, auto: Auto) -> None:
        """Between two windows: rank 0 hears what the last one tells, and all change what is to be changed."""
        controller = auto.controller
        if self.rank == 0:
            before = controller.verdict
            decisions = auto.edge(self.epoch, self.steps, self._reach())
            if controller.verdict is not None and controller.verdict is not before:
                costs = controller.costs
                found = [] if costs is None else [ceiling(costs, lever) for lever in levers(costs, cores=self._cores)]
                self.events.emit("verdict", window=self.epoch, **told(controller.verdict, costs, found))
            for decision in decisions:
                self.events.emit("decision", **asdict(decision))
        if self._group is not None:
            said = [*controller.settings.numbers, float(controller.probing), float(controller.fills)]
            *numbers, probing, fills = self._group.broadcast(said)
            controller.settings, controller.probing, controller.fills = Settings.of(numbers), bool(probing), bool(fills)
        if controller.settings == self._settings and self._started:
            return
        before = self._settings
        try:
            self._apply(controller.settings)
        except (SalienceError, OSError) as cause:
            if self._strict or self._group is not None:  # other ranks may have done it
                raise
            self.events.emit("decision", **asdict(controller.failed(self.epoch, before, str(cause))))
            self._apply(before)
        self.events.emit("settings", window=self.epoch, **asdict(controller.settings))

    def _apply(self, settings: Settings) -> None:
        """Change what differs; only between two windows."""
        before, self._settings = self._settings, settings
        if settings.cache != before.cache:
            self._set_feed(settings.cache or None, self._feed_workers)
        if (settings.workers, settings.cache) != (before.workers, before.cache):
            self._inner = self._make_inner({**self._options, "num_workers": settings.workers})
        if settings.select != before.select:
            self._selecting(settings.select)

    def _reach(self) -> Reach:
        """What `auto` can switch: what the user left open, and has given what it takes."""
        moves = self._options.get("num_workers", 0) > 0
        if not moves:
            self._refused["num_workers"] = (
                "it is 0, and what a data set has opened in this process may not survive a fork; pass num_workers=1"
            )
        cores = self._cores if moves else 0
        cache, share = 0, 1.0
        if self._source is not None:
            cache = 0 if self._settings.cache else _roomy_cache(self._source)
            share = min(1.0, (cache or self._settings.cache) / max(1, int(self._source.sizes.sum())))
        reusable: tuple[str, ...] = ()
        if self._treat is not None and self._treating is not None and self._treating.split is not None:
            reusable = self._stage_names[: self._treating.split.stages + 1]
        return Reach(cores=cores, cache=cache, share=share, reusable=reusable, keep=self._kept, refused=self._refused)

    def _first_cache(self) -> int:
        """Bytes of a cache from the first window on: `auto` would try it anyway, and filling it later costs a window more.

        Where a network lies between; elsewhere the system keeps files in memory too. The same on every rank.
        """
        if self._auto is None or self._auto.replays or self._source is None or not self._source.reader.store.far:
            return 0
        size = _roomy_cache(self._source)
        return size if self._group is None else int(self._group.broadcast([size])[0])

    @property
    def _cores(self) -> int:
        """That a rank's workers may have."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // (1 if self._group is None else len(self._group.node_ranks)))

    @property
    def _feed_workers(self) -> int:
        """Workers the cache must be able to serve: those there are, or all that `auto` may make."""
        return max(self._options.get("num_workers", 0), 0 if self._auto is None else self._cores)

    def evaluated(self, metric: float, **more: float) -> None:
        super().evaluated(metric, **more)
        if self._auto is not None:
            self._auto.controller.hear(float(metric), self.progress)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state if self._auto is None else {**state, "auto": self._auto.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("auto") is not None:
            if self._auto is None:
                raise StateError(
                    "The state was saved with auto, whose settings this Loader lacks; resume with the same auto=."
                )
            self._auto.load_state_dict(state["auto"])
            self._apply(self._auto.controller.settings)
        super().load_state_dict(state)


def _roomy_cache(source: Source) -> int:
    """Bytes: the whole source, or a quarter of the memory; 0 where that is not known."""
    return min(int(source.sizes.sum()), (memory_bytes() or 0) // 4)
