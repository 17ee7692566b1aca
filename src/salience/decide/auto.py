"""The interface of this room for a run: the controller, and the measurement of each window for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from salience.decide.controller import Controller
from salience.decide.levers import AvailableLevers, Settings, recorded
from salience.decide.timing import MIN_STEPS, WindowTiming, measure_window
from salience.errors import ConfigError
from salience.events import LeverDecided
from salience.select.steering import Paths, read_histories
from salience.watch.probe import WARMUP_STEPS, Probe
from salience.watch.steps import Step, Steps

PROBE_WITHIN = 128
"""A probe comes within the first batches of a window, however long that is."""
MAX_TIMED_BATCHES = 8
"""Maximum number of batches that a probe times."""


class Auto:
    """Measures windows, and asks the controller between them."""

    def __init__(self, what: bool | str | Path, baseline: Paths | None, *, epochs: int | None) -> None:
        if epochs is None:
            raise ConfigError(
                "auto needs epochs=: the number of passes you will make, so that trials stay a small share."
            )
        self._epochs = epochs
        self._recorded = recorded(what) if isinstance(what, (str, Path)) and what != "lossy" else None
        self._baseline = baseline
        self.lossy = what == "lossy" or baseline is not None
        """True if levers that change training may be tried."""
        if self._recorded is not None:
            self.lossy = any(settings.lossy for settings in self._recorded.values())
        self.controller = Controller(Settings(), windows=epochs, batches=0)
        self._probe: Probe | None = None
        self._mark = 0
        """Number of steps before the window in progress."""
        self._batches = self._ahead = 0
        self._planned = self._lead = 0.0
        self._restarts, self._whole, self._first = True, False, True

    @property
    def replays(self) -> bool:
        """True if the decisions of an earlier run are replayed."""
        return self._recorded is not None

    def start(self, settings: Settings, batches: int, *, decides: bool = True, adopted: bool = False) -> None:
        """Start, with `batches` per window. The deciding rank reads the baseline. `adopted`: the cache is a lever, and on."""
        if self._recorded is not None:
            self.controller = Controller(settings, windows=0, batches=0)
            self.controller.probing = False
            return
        histories = read_histories(self._baseline) if self._baseline is not None and decides else ()
        self.controller = Controller(
            settings, windows=self._epochs, batches=self._epochs * batches, lossy=self.lossy, histories=histories,
            adopted=adopted,
        )  # fmt: skip

    def open(self, steps: Steps, batches: int, *, ahead: int, planned: float, restarts: bool) -> Probe | None:
        """A window begins; returns the probe for it, if one is wanted and fits."""
        self._first, self._mark, self._batches, self._ahead = steps.count == 0, steps.count, batches, ahead
        self._lead, self._planned = planned - self._planned, planned
        self._restarts, self._whole, self._probe = restarts, False, None
        controller, depth = self.controller, max(2, ahead + 1)
        timed = min(MAX_TIMED_BATCHES, controller.allowance - depth)
        room = batches - depth - timed - ahead - WARMUP_STEPS - MIN_STEPS
        alone = controller.settings.workers or controller.settings.cache  # else waiting is the loader alone
        if controller.probing and not controller.fills and alone and timed >= 2 and room >= 0:
            first = self._mark + WARMUP_STEPS + min(room, PROBE_WITHIN) // 2
            self._probe = Probe(depth=depth, timed=timed, first=first, times=1)
        return self._probe

    def close(self, steps: Steps) -> None:
        """The window was delivered to its end."""
        self._whole = True
        self.controller.held += sum(step.held for step in self._steps(steps))

    def edge(
        self, window: int, steps: Steps, available: AvailableLevers, *, portion: float = 1.0
    ) -> list[LeverDecided]:
        """Between two windows: the controller's decisions on the last one; a replay repeats those of the earlier run.

        Inside a window, `portion` is the share of it that was measured.
        """
        if self._recorded is not None:
            first = max((one for one in self._recorded if one <= window), default=None)
            self.controller.settings = self.controller.settings if first is None else self._recorded[first]
            return []
        return self.controller.edge(window, self._timing(steps), available, portion=portion)

    def _timing(self, steps: Steps) -> WindowTiming | None:
        whole, self._whole = self._whole, False
        if not whole:
            return None
        return measure_window(
            self._steps(steps), batches=self._batches, lead=self._lead, ahead=self._ahead, first=self._first,
            inputs=() if self._probe is None else self._probe.inputs, workers=self.controller.settings.workers,
            restarts=self._restarts, fills=self.controller.fills,
        )  # fmt: skip

    def _steps(self, steps: Steps) -> list[Step]:
        return list(steps.steps)[-(steps.count - self._mark) :] if steps.count > self._mark else []

    def state_dict(self) -> dict[str, Any]:
        return self.controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.controller.load_state_dict(state)
