"""Adopt, then verify: a state machine that decides once at every window's edge.

measure -> try the best lever -> keep: measure again
   ^                          -> undo: try the next
   +-- the step time drifts by more than STEP_DRIFT
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from salience.decide.levers import AvailableLevers, Option, Settings, cache_lever, options
from salience.decide.timing import WindowTiming
from salience.decide.trial import Gain, Trial, windows_needed
from salience.events import BottleneckFound, LeverDecided, StepCosts, build
from salience.events.coding import plain
from salience.select.steering import History, band
from salience.watch.model import MIN_SPEEDUP_TO_TRY, find_bottleneck

STEP_DRIFT = 1.15
"""The run is measured again when the seconds per step change by more than this factor."""
TRIAL_SHARE = 0.3
"""Largest share of the run's windows for unsuccessful trials, once there was one."""
HELD_SHARE = 0.01
"""Largest share of the run's batches that probes may hold back."""
LOSSY_LEVERS = {"treat": 'treat="reuse"', "select": 'select="default"', "resolution": 'treat="resolution"'}


class Controller:
    """Decides by measured windows; `settings` and `probing` are for the next window."""

    def __init__(
        self,
        start: Settings,
        *,
        windows: int,
        batches: int,
        lossy: bool = False,
        histories: Sequence[History] = (),
        adopted: bool = False,
    ) -> None:
        """`adopted`: the cache in `start` is a lever that is on from the first window, which fills it."""
        self.settings = start
        self.fills = adopted
        """True if the window in progress fills a cache that is on from the start."""
        self.probing = True
        """True if the next window is to be measured with a probe."""
        self.held = 0
        """Number of batches that probes held back so far."""
        self.verdict: BottleneckFound | None = None
        """What held the run back in the last measured window, with its costs."""
        self._windows, self._batches = windows, batches
        self._lossy, self._histories = lossy or bool(histories), histories
        self._step: float | None = None
        """Seconds per step at the last measurement."""
        self._trial: Trial | None = None
        self._spent = 0.0
        """Number of windows spent on unsuccessful trials."""
        self._undone: dict[str, str] = {}
        """Lever -> the verdict under which it was undone."""
        self._banned: set[str] = set()
        """Levers that are never tried again, because the metric left the baseline's band under them, or they failed."""
        self._proven: set[str] = set()
        """Lossy levers under which the metric stayed in the baseline's band."""
        self._said: set[str] = set()
        self._result: tuple[float, float] | None = None
        self._portion = 1.0
        """Share of a window that the last measurement covers."""

    @property
    def waits(self) -> bool:
        """True if the trial in progress needs whole windows: what it tries builds up, or changes what a window visits."""
        return self.fills or (
            self._trial is not None and (self._trial.option.remembers or not self._trial.option.exact)
        )

    @property
    def allowance(self) -> int:
        """Number of batches that may still be held back."""
        return int(HELD_SHARE * self._batches) - self.held

    def evaluated(self, metric: float, progress: float) -> None:
        """Take a validation result; it counts if a lossy lever was on."""
        if self.settings.lossy:
            self._result = metric, progress

    def edge(
        self, window: int, timing: WindowTiming | None, available: AvailableLevers, *, portion: float = 1.0
    ) -> list[LeverDecided]:
        """Decide before `window`; `timing` is that of the previous window, None if it was incomplete or too short.

        A `portion` below 1 is the share of a window that was measured: the decision is made inside it.
        """
        self._portion = portion
        said = self._guard(window)
        if any(decision.action == "undo" for decision in said):  # this window says nothing of what comes
            return said
        if timing is None:
            self.fills = self.fills and not window  # later ones find much in the cache: then it stays, unjudged
            return said + self._blind(window)
        if self._trial is not None:
            return said + self._judge(window, timing, self._trial)
        if self.probing:
            if timing.costs is None:
                return said
            self.probing, self._step = False, timing.step
            self.verdict = find_bottleneck(timing.costs)
            if self.fills:
                return [*said, self._adopt(window, timing, timing.costs, available.share)]
        elif self._step is not None and abs(math.log(timing.step / self._step)) > math.log(STEP_DRIFT):
            self.probing = True
            return said
        return said + self._choose(window, timing, available)

    def _adopt(self, window: int, timing: WindowTiming, costs: StepCosts, share: float) -> LeverDecided:
        """Judge a cache that was on from the start: its trial compares the next window with the one that filled it."""
        self.fills = False
        option = Option.of(costs, cache_lever(self.settings.cache, share), self.settings, remembers=True)
        base = replace(self.settings, cache=0)
        self._trial = Trial(option=option, base=base, off=(timing.seconds,), filled=True, whole=True, windows=1)
        return _decided(window, option, "try", "on from the first window, which filled it")

    def _choose(self, window: int, timing: WindowTiming, available: AvailableLevers) -> list[LeverDecided]:
        """Switch on the best lever; levers that are not worth trying are named once."""
        assert self.verdict is not None
        assert self.verdict.costs is not None
        said = [self._skip(window, name, None, why) for name, why in available.refused.items()]
        worth: list[Option] = []
        for option in options(self.verdict.costs, self.settings, available, window):
            why = self._against(option, window)
            if why:
                said.append(self._skip(window, option.name, option.predicted, why))
            else:
                worth.append(option)
        best = max(worth, key=lambda option: (option.exact, option.predicted), default=None)
        decisions = [decision for decision in said if decision is not None]
        if best is None:
            return decisions
        self._trial = Trial.of(best, self.settings, timing)
        self.settings = best.settings
        reason = "the best exact lever" if best.exact else "the best lever left; quality unproven"
        return [*decisions, _decided(window, best, "try", reason)]

    def _against(self, option: Option, window: int) -> str:
        """Why a lever is not tried; empty if it may be."""
        needed = windows_needed(option) * self._portion
        if option.name in self._banned:
            return "it was undone for good"
        if option.predicted < MIN_SPEEDUP_TO_TRY:
            return f"it could gain less than {MIN_SPEEDUP_TO_TRY}x"
        if not option.exact and not self._lossy:
            return 'it changes training and there is no baseline to compare with; pass baseline=, or auto="lossy"'
        if self._undone.get(option.name) == self._cause:
            return "it was undone, and what holds the run back is still the same"
        if self._spent and self._spent + needed > TRIAL_SHARE * self._windows:
            share = f"{TRIAL_SHARE:.0%}"
            return f"its trial takes {needed:g} windows, more than are left of the {share} of all that trials may take"
        if window + needed >= self._windows:
            return "too few windows are left for a trial to pay"
        return ""

    def _judge(self, window: int, timing: WindowTiming, trial: Trial) -> list[LeverDecided]:
        """Add the window to the trial, and keep or undo the lever if the trial is over."""
        self._trial = trial = trial.after(timing, self.settings)
        self.settings, found = trial.next, trial.verdict
        if found is None:
            return []
        kept, reason = found
        if not kept:
            return [self._undo(window, trial, reason)]
        self._trial, self.settings = None, trial.option.settings
        self.probing = True  # at what it costs now
        if not trial.option.exact and trial.option.name not in self._proven:
            reason += "; quality unproven"
        return [_decided(window, trial.option, "keep", reason, trial.gain)]

    def _blind(self, window: int) -> list[LeverDecided]:
        """Note that a window was not measured; if this happens twice in a trial, the trial ends."""
        if self._trial is None:
            return []
        self._trial = trial = replace(self._trial, unseen=self._trial.unseen + 1, windows=self._trial.windows + 1)
        if trial.unseen < 2:
            return []
        return [self._undo(window, trial, "its windows were too short or broken off")]

    def _undo(self, window: int, trial: Trial, reason: str) -> LeverDecided:
        """End the trial and restore the settings from before it."""
        self._trial, self.settings = None, trial.base
        self.probing = trial.whole  # without its cache the run was never measured
        self._spent += trial.windows * self._portion
        self._undone[trial.option.name] = self._cause
        return _decided(window, trial.option, "undo", reason, trial.gain)

    def _guard(self, window: int) -> list[LeverDecided]:
        """Undo lossy levers if the metric is below the baseline's band at equal progress."""
        heard, self._result = self._result, None
        on = [name for field, name in LOSSY_LEVERS.items() if getattr(self.settings, field)]
        found = None if heard is None else band(self._histories, heard[1])
        if heard is None or found is None or not on:
            return []
        metric, progress = heard
        where = f"{metric:.4g} at progress {progress:.2f}, the band is {found.low:.4g} and up"
        if metric >= found.low:
            new = [name for name in on if name not in self._proven]
            self._proven.update(new)
            reason = f"the metric is in the baseline's band: {where}"
            return [LeverDecided(window=window, lever=name, action="keep", reason=reason) for name in new]
        self._banned.update(on)
        self.settings = replace(self.settings, treat=False, select=False, resolution=False)
        if self._trial is not None:
            self._spent += self._trial.windows + 1
            self._trial = None
        self.probing = True
        reason = f"the metric left the baseline's band: {where}"
        return [LeverDecided(window=window, lever=name, action="undo", reason=reason) for name in on]

    def failed(self, window: int, before: Settings, why: str) -> LeverDecided:
        """A lever could not be switched: restore the previous settings."""
        name = "settings" if self._trial is None else self._trial.option.name
        self._banned.add(name)
        self._trial, self.settings = None, before
        return LeverDecided(window=window, lever=name, action="undo", reason=f"it could not be switched: {why}")

    @property
    def _cause(self) -> str:
        return "" if self.verdict is None else f"{self.verdict.bound}: {self.verdict.cause}"

    def _skip(self, window: int, lever: str, predicted: float | None, reason: str) -> LeverDecided | None:
        """A decision to skip a lever; each lever and reason is reported once."""
        if f"{lever}: {reason}" in self._said:
            return None
        self._said.add(f"{lever}: {reason}")
        return LeverDecided(window=window, lever=lever, action="skip", predicted=predicted, reason=reason)

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": plain(self.settings), "probing": self.probing, "held": self.held, "spent": self._spent,
            "verdict": plain(self.verdict) if self.verdict else None, "step": self._step,
            "trial": plain(self._trial) if self._trial else None, "undone": dict(self._undone),
            "banned": sorted(self._banned), "proven": sorted(self._proven), "said": sorted(self._said),
            "heard": None if self._result is None else list(self._result), "fills": self.fills,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.settings, self.fills = build(Settings, state["settings"]), bool(state["fills"])
        self.probing, self.held, self._spent = bool(state["probing"]), int(state["held"]), float(state["spent"])
        self.verdict = build(BottleneckFound, state["verdict"]) if state["verdict"] else None
        self._step, self._undone = state["step"], dict(state["undone"])
        self._trial = build(Trial, state["trial"]) if state["trial"] else None
        self._banned, self._proven, self._said = (set(state[name]) for name in ("banned", "proven", "said"))
        self._result = None if state["heard"] is None else (float(state["heard"][0]), float(state["heard"][1]))
        # What was kept is gone with the process that kept it: the next window fills it again.
        if self._trial is not None and self._trial.whole:
            self._trial, self.fills, self.probing = None, True, True
        elif self._trial is not None and self._trial.option.remembers:
            self._trial = replace(self._trial, filled=False, on=())


def _decided(window: int, option: Option, action: str, reason: str, gain: Gain | None = None) -> LeverDecided:
    return LeverDecided(
        window=window, lever=option.name, action=action, predicted=option.predicted, reason=reason,
        measured=None if gain is None else gain.speedup,
        interval=None if gain is None or not gain.low else (gain.low, gain.high),  # of one pair there is none
    )  # fmt: skip
