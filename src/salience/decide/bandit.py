"""A policy that learns: settings are chosen by their predicted gain and by what earlier windows of the run gained.

Each way to switch levers on (an arm) has a gain g = log(seconds of a window without them / seconds with them), believed to be

    before       g ~ N(k log(predicted), (SPREAD + DOUBT log(predicted))^2)    k = how far predictions came true so far
    windows      g ~ N(b - mean log seconds, NOISE^2 (1/windows + 1/windows without))

and the two are combined by their precision. The arm with the highest mean + c sd is next, c falling from 1 to 0 over the
run, so that nothing is tried when it can no longer pay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from salience.decide.controller import Controller, Decision
from salience.decide.levers import AvailableLevers, Option, options
from salience.decide.settings import Settings
from salience.decide.timing import WindowTiming
from salience.decide.trial import MIN_SPEEDUP_TO_KEEP
from salience.select.steering import History
from salience.watch.model import MIN_SPEEDUP_TO_TRY, Costs, Lever, ceiling, find_bottleneck

EXPLORED_SHARE = 0.1
"""Largest share of the run's windows for settings that are not expected to be the best."""
SPREAD, DOUBT, NOISE = 0.05, 0.3, 0.06
TRUST, TRUST_SD = 0.8, 0.3
"""k before anything is known, and its standard deviation: predictions are what a lever gains at most."""
PREDICTION_SD = 0.1
"""Standard deviation of a gain around k log(predicted)."""
MIN_PLAIN_WINDOWS = 3
"""Fewest windows without any lever if the best one gains so little that it may be nothing."""


@dataclass(slots=True)
class Belief:
    """A normal distribution."""

    mean: float
    sd: float

    def with_(self, mean: float, sd: float) -> Belief:
        """This belief combined with an independent one."""
        a, b = 1 / self.sd**2, 1 / sd**2
        return Belief((a * self.mean + b * mean) / (a + b), (a + b) ** -0.5)


@dataclass(slots=True)
class Arm:
    """One way to switch levers on, and the windows under it."""

    name: str
    settings: Settings
    predicted: float
    exact: bool
    remembers: bool
    left: float = 1.0
    """Share of the samples that it visits in the windows that are left."""
    logs: list[float] = field(default_factory=list[float])
    """Logarithms of windows' seconds, as if all samples had been visited."""


def trust(seen: Sequence[tuple[float, float]]) -> float:
    """k: how far predictions came true, from pairs (log predicted, gain) by ridge regression towards TRUST."""
    above = sum(x * y for x, y in seen) / PREDICTION_SD**2 + TRUST / TRUST_SD**2
    return above / (sum(x * x for x, _ in seen) / PREDICTION_SD**2 + 1 / TRUST_SD**2)


def arms_of(costs: Costs, single: Sequence[Option], base: Settings) -> list[Arm]:
    """Every combination of levers that is worth something, each with its prediction."""
    found: list[Arm] = []
    for count in range(1, len(single) + 1):
        for parts in itertools.combinations(single, count):
            saves: dict[str, float] = {}
            settings = base
            for part in parts:
                for stage, share in part.saves.items():
                    saves[stage] = 1 - (1 - saves.get(stage, 0.0)) * (1 - share)
                changed = {
                    name: getattr(part.settings, name)
                    for name in ("workers", "cache", "treat", "select")
                    if getattr(part.settings, name) != getattr(base, name)
                }
                settings = replace(settings, **changed)
            exact = all(part.exact for part in parts)
            predicted = min(ceiling(costs, Lever(name="", exact=exact, saves=saves)).speedup, 99.0)
            found.append(
                Arm(
                    name=" + ".join(part.name for part in parts), settings=settings, predicted=predicted, exact=exact,
                    remembers=any(part.remembers for part in parts),
                )
            )  # fmt: skip
    return found


class Bandit(Controller):
    """A Controller that chooses among combinations of levers by what it has learnt."""

    learns = True

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
        super().__init__(
            start, windows=windows, batches=batches, lossy=lossy, histories=histories, adopted=adopted
        )  # fmt: skip
        self._base, self._plain = start, list[float]()
        """Settings without levers, and logarithms of the seconds of windows under them."""
        self._arms: list[Arm] = []
        self._filling = adopted
        """The window in progress fills a cache."""
        self._explored = 0
        self._kept: set[str] = set()
        """Arms that were reported to stay."""
        self._cache = (0, 1.0)
        """What a cache could have, and the share of the source that fits."""

    def edge(self, window: int, timing: WindowTiming | None, available: AvailableLevers) -> list[Decision]:
        said = self._guard(window)
        if any(decision.action == "undo" for decision in said):  # straight to the best of what is left
            self._filling, self.probing = False, self.costs is None
            return said + self._choose_arm(window)
        if timing is None:
            if window:
                self._filling = self.fills = False
            return said
        if self.fills and timing.costs is not None:
            self.fills, self.verdict = False, find_bottleneck(timing.costs)
            lever, why = (
                f"cache={self.settings.cache}",
                "on from the first window, which filled it; part of every setting",
            )
            said.append(Decision(window=window, lever=lever, action="try", reason=why))
        elif self.probing and timing.costs is not None and self.settings == self._base and not self._filling:
            self.probing, self.costs = False, timing.costs
            self.verdict = find_bottleneck(timing.costs)
        self._observe(
            timing, available.keep[window - 1] if self.settings.select and len(available.keep) >= window else 1.0
        )
        if self.costs is None:
            return said
        if available.cache:
            self._cache = available.cache, available.share
        available = replace(available, cache=self._cache[0], share=self._cache[1])  # also where the cache is on
        return said + self._reachable(window, available, self.costs) + self._choose_arm(window)

    def _reachable(self, window: int, available: AvailableLevers, costs: Costs) -> list[Decision]:
        """The arms of this window: a selection's depend on how much of its curve is left."""
        single: list[Option] = []
        refused = [self._skip(window, name, None, why) for name, why in available.refused.items()]
        for option in options(costs, self._base, available, window):
            why = ""
            if not option.exact and not self._lossy:
                why = 'it changes training and there is no baseline to compare with; pass baseline=, or auto="lossy"'
            if why:
                refused.append(self._skip(window, option.name, option.predicted, why))
            else:
                single.append(option)
        known = {arm.settings: arm for arm in self._arms}
        keep = available.keep[window:]
        for arm in arms_of(costs, single, self._base):
            old = known.get(arm.settings)
            if old is None and arm.predicted >= MIN_SPEEDUP_TO_TRY:
                known[arm.settings] = old = arm
            if old is not None:
                old.predicted, old.left = arm.predicted, sum(keep) / len(keep) if arm.settings.select and keep else 1.0
        self._arms = list(known.values())
        return [decision for decision in refused if decision is not None]

    def _observe(self, timing: WindowTiming, share: float) -> None:
        """Count the window that is over, which visited a share of the samples, unless it filled something."""
        filling, self._filling = self._filling, False
        if filling:
            return
        if self.settings == self._base:
            self._plain.append(math.log(timing.seconds))
            return
        arm = self._arm(self.settings)
        if arm is not None and self._plain:
            arm.logs.append(math.log(timing.seconds / share))

    def _arm(self, settings: Settings) -> Arm | None:
        return next((arm for arm in self._arms if arm.settings == settings), None)

    def _gain(self, arm: Arm) -> float:
        """The gain of an arm by the windows under it, with the visits that it leaves out."""
        return sum(self._plain) / len(self._plain) - sum(arm.logs) / len(arm.logs) - math.log(arm.left)

    def belief(self, arm: Arm) -> Belief:
        """The belief in the gain of an arm."""
        x = max(0.0, math.log(arm.predicted))
        own = [
            (math.log(other.predicted), self._gain(other)) for other in self._arms if other.logs and other is not arm
        ]
        belief = Belief(trust(own) * x, SPREAD + DOUBT * x)
        if arm.logs and self._plain:
            sd = NOISE * math.sqrt(1 / len(arm.logs) + 1 / len(self._plain))
            belief = belief.with_(self._gain(arm), sd)
        return belief

    def _choose_arm(self, window: int) -> list[Decision]:
        if not self._plain or not self._arms:
            return []
        left = max(0.0, 1 - window / max(1, self._windows))
        may = [arm for arm in self._arms if not self._banned & {arm.name, *arm.name.split(" + ")}]
        beliefs = {arm.name: self.belief(arm) for arm in may}
        best = max(may, key=lambda arm: beliefs[arm.name].mean, default=None)
        if best is None or beliefs[best.name].mean <= math.log(MIN_SPEEDUP_TO_KEEP):
            return self._go(window, None, f"nothing is expected to gain {MIN_SPEEDUP_TO_KEEP}x", {})
        found = beliefs[best.name]
        if best.logs and found.mean - found.sd < math.log(MIN_SPEEDUP_TO_KEEP) and len(self._plain) < MIN_PLAIN_WINDOWS:
            return self._go(window, None, "it gains little, if anything: a window without it to compare", {})
        hoped = max(may, key=lambda arm: beliefs[arm.name].mean + left * beliefs[arm.name].sd)
        chosen, why = best, "the highest expected gain"
        if hoped is not best and beliefs[hoped.name].mean > 0 and self._explored + 1 <= EXPLORED_SHARE * self._windows:
            chosen, why = hoped, f"it may gain more than {best.name}; exploring"
            self._explored += 1
        return self._go(window, chosen, why, beliefs)

    def _go(self, window: int, arm: Arm | None, why: str, beliefs: Mapping[str, Belief]) -> list[Decision]:
        """Switch to an arm, or to none, and say so where that is a change."""
        before, now = self._arm(self.settings), self._base if arm is None else arm.settings
        if now == self.settings:
            return self._stays(window, arm, beliefs)
        said: list[Decision] = []
        if before is not None:
            measured = math.exp(self._gain(before)) if before.logs else None
            said.append(
                Decision(
                    window=window, lever=before.name, action="undo", predicted=before.predicted, measured=measured,
                    reason=why if arm is None else f"{arm.name} is next: {why}",
                )
            )  # fmt: skip
        if arm is not None:
            gained = (now.cache and not self.settings.cache) or (now.treat and not self.settings.treat)
            self._filling = bool(gained)
            belief = beliefs[arm.name]
            ends = math.exp(belief.mean - 2 * belief.sd), math.exp(belief.mean + 2 * belief.sd)
            reason = why if arm.exact else f"{why}; quality unproven"
            said.append(
                Decision(
                    window=window, lever=arm.name, action="try", predicted=math.exp(belief.mean), interval=ends, reason=reason
                )
            )  # fmt: skip
        self.settings = now
        return said

    def _stays(self, window: int, arm: Arm | None, beliefs: Mapping[str, Belief]) -> list[Decision]:
        """Report once that an arm stays, when two of its windows are known."""
        if arm is None or len(arm.logs) < 2 or arm.name in self._kept:
            return []
        self._kept.add(arm.name)
        belief = beliefs[arm.name]
        ends = math.exp(belief.mean - 2 * belief.sd), math.exp(belief.mean + 2 * belief.sd)
        reason = "the highest expected gain, by this run's own windows too" + (
            "" if arm.exact else "; quality unproven"
        )
        return [
            Decision(
                window=window, lever=arm.name, action="keep", predicted=arm.predicted, measured=math.exp(self._gain(arm)),
                interval=ends, reason=reason,
            )
        ]  # fmt: skip

    def failed(self, window: int, before: Settings, why: str) -> Decision:
        arm = self._arm(self.settings)
        self._filling = False
        found = super().failed(window, before, why)
        if arm is None:
            return found
        self._banned.add(arm.name)
        return replace(found, lever=arm.name)

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "bandit": {
                "plain": list(self._plain), "filling": self._filling,
                "explored": self._explored, "base": self._base.numbers, "cache": list(self._cache), "kept": sorted(self._kept),
                "arms": [
                    [arm.name, arm.settings.numbers, arm.predicted, arm.exact, arm.remembers, arm.left, list(arm.logs)]
                    for arm in self._arms
                ],
            },
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        own = state["bandit"]
        self._kept = set(own["kept"])
        self._filling = bool(self.settings.cache or self.settings.treat)  # what was kept is gone with its process
        self._cache = int(own["cache"][0]), float(own["cache"][1])
        self._plain, self._explored, self._base = list(own["plain"]), int(own["explored"]), Settings.of(own["base"])
        self._arms = [
            Arm(
                name=name, settings=Settings.of(numbers), predicted=predicted, exact=exact, remembers=remembers,
                left=left, logs=list(logs),
            )
            for name, numbers, predicted, exact, remembers, left, logs in own["arms"]
        ]  # fmt: skip
