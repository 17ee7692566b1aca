"""From measured seconds to one sentence: what holds the run back, and what each lever could gain at most.

step time        T = (d^g + c^g)^(1/g)     d = input alone, c = compute alone; g = 1: one after the other, g -> inf: overlapped
ceiling          T / T with the stage's cost at 0 (Amdahl), inside the bracket [max(d, c), d + c]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from salience.events import BottleneckFound, LeverCeiling, StepCosts

MAX_WAIT_WHEN_FINE, MIN_WAIT_WHEN_BOUND = 0.05, 0.20
"""Shares of a step spent waiting for input: below the first, input is no problem; above the second, the run is input-bound."""
MAX_WORK_WHEN_AHEAD = 0.5
"""Workers that need less than this share of the loop's time are ahead of it: the loop only waits for transfers."""
MIN_SPEEDUP_TO_TRY = 1.05
"""Levers that promise less are not worth trying."""
MAX_SPEEDUP = 99.0
"""Limit on a ceiling: a stage that takes a whole step could be sped up without bound."""
MAX_STEEPNESS = 16.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """Something that can be switched on, and the largest share of each stage that it can save."""

    name: str
    """Its name as the user writes it."""
    exact: bool
    """True if the result of training stays exactly the same."""
    saves: Mapping[str, float]
    """Stage -> share of its cost that is saved; "input" stands for everything the loader does."""


SYNC = Lever(name='sync(mode="auto")', exact=False, saves={"sync": 1.0})
"""The lever that exchanges gradients in another way, or less often."""


def combined(d: float, c: float, g: float) -> float:
    """(d^g + c^g)^(1/g), without overflow."""
    top, low = max(d, c), min(d, c)
    return top * (1 + (low / top) ** g) ** (1 / g) if top > 0 else 0.0


def fitted(step: float, d: float, c: float) -> float:
    """The g for which `combined` gives the measured step, by bisection between 1 (a sum) and MAX_STEEPNESS (a maximum)."""
    if min(d, c) <= 0 or step >= d + c:
        return 1.0
    if step <= combined(d, c, MAX_STEEPNESS):
        return MAX_STEEPNESS
    low, high = 1.0, MAX_STEEPNESS
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if combined(d, c, middle) > step else (low, middle)
    return (low + high) / 2


def ceiling(costs: StepCosts, lever: Lever) -> LeverCeiling:
    """Speed-up if the lever saves as much as it can, with the bracket of the two extreme models."""
    d, c = without(costs, lever.saves)
    g = fitted(costs.step, costs.input, costs.compute)
    before, after = combined(costs.input, costs.compute, g), combined(d, c, g)
    pairs = [(max(costs.input, costs.compute), max(d, c)), (costs.input + costs.compute, d + c)]
    low, high = sorted(_ratio(*pair) for pair in pairs)
    speedup = min(max(_ratio(before, after), low), high)
    return LeverCeiling(
        name=lever.name, exact=lever.exact, speedup=speedup, low=low, high=high, worth=speedup >= MIN_SPEEDUP_TO_TRY
    )


def without(costs: StepCosts, saves: Mapping[str, float]) -> tuple[float, float]:
    """Input and compute seconds after the savings; a stage in the workers counts by its share of their work."""
    total = sum(costs.work.values())
    saved = saves.get("input", 0.0)
    if total > 0:
        saved += sum(share * costs.work.get(stage, 0.0) / total for stage, share in saves.items() if stage != "input")
    compute = (costs.compute - saves.get("sync", 0.0) * costs.sync) * (1 - saves.get("compute", 0.0))
    return costs.input * max(0.0, 1 - saved), max(0.0, compute)


def levers(costs: StepCosts, *, cores: int, cached: bool = False) -> list[Lever]:
    """Levers that could be tried; exact ones come first. `cached` = there is a cache already."""
    stages = [name for name in costs.work if name != "fetch"]
    found: list[Lever] = []
    if (lever := more_workers(costs, cores)) is not None:
        found.append(lever)
    if costs.work.get("fetch", 0.0) > 0 and not cached:
        found.append(Lever(name="cache=", exact=True, saves={"fetch": 1.0}))
    if stages:
        found.append(Lever(name='treat="reuse"', exact=False, saves=dict.fromkeys(stages, 0.75)))
    if costs.work.get("fetch", 0.0) > 0:
        found.append(Lever(name='select="io"', exact=False, saves={"fetch": 0.7, "compute": 0.3}))
        found.append(Lever(name='treat="echo"', exact=False, saves={"fetch": 0.5}))
    found.append(Lever(name='select="default"', exact=False, saves={"input": 0.42, "compute": 0.42}))
    if costs.sync > 0:
        found.append(SYNC)
    return found


def more_workers(costs: StepCosts, cores: int) -> Lever | None:
    """The number of workers that keep pace with the loop, at most one per core; None if there are already that many."""
    pace = min(cores, math.ceil(sum(costs.work.values()) / costs.compute)) if costs.compute > 0 else cores
    if pace <= costs.workers:
        return None
    saved = 1 - max(1, costs.workers) / pace
    return Lever(name=f"num_workers={pace}", exact=True, saves=dict.fromkeys(costs.work, saved))


def find_bottleneck(costs: StepCosts, ceilings: Sequence[LeverCeiling] = ()) -> BottleneckFound:
    """Name what holds the run back, in one sentence."""
    waiting = costs.waiting
    if (sync := _sync_bound(costs, ceilings)) is not None:
        return sync
    total = sum(costs.work.values())
    ahead = costs.workers > 0 and 0 < total / costs.workers < MAX_WORK_WHEN_AHEAD * costs.compute
    bound = (
        "compute" if waiting < MAX_WAIT_WHEN_FINE or ahead else "input" if waiting > MIN_WAIT_WHEN_BOUND else "mixed"
    )
    cause, share = "the loader", 1.0
    if bound == "compute":
        cause = "backward" if costs.backward > costs.forward else "forward"
        share = max(costs.backward, costs.forward) / max(costs.forward + costs.backward, 1e-12)
    elif total > 0:
        cause = max(costs.work, key=lambda name: costs.work[name])
        share = costs.work[cause] / total
    head = {"input": "Input-bound", "mixed": "Partly input-bound", "compute": "Compute-bound"}[bound]
    text = f"{head}: the accelerator waits {waiting:.0%} of each step (utilisation {1 - waiting:.0%})"
    if bound != "compute":
        gain = max(1.0, _ratio(costs.step, costs.compute))
        text += f"; {cause} causes {share:.0%} of the wait. Ceiling if input cost nothing: {gain:.2f}x"
    elif waiting >= MAX_WAIT_WHEN_FINE:
        text += "; workers are ahead, the wait is for handing batches over"
    best = max((c for c in ceilings if c.worth), key=lambda c: (c.exact, c.speedup or 0.0), default=None)
    text += "." if best is None else f". Try: {best.name} (at most {best.speedup:.2f}x)."
    return BottleneckFound(text=text, bound=bound, cause=cause, share=share, costs=costs, levers=tuple(ceilings))


def _sync_bound(costs: StepCosts, ceilings: Sequence[LeverCeiling]) -> BottleneckFound | None:
    """The verdict for ranks that mostly wait for gradients."""
    syncing = costs.sync / costs.step if costs.step > 0 else 0.0
    if syncing < max(MIN_WAIT_WHEN_BOUND, costs.waiting):
        return None
    rest = costs.step - costs.sync
    worth = any(one.name == SYNC.name and one.worth for one in ceilings)
    text = (
        f"Sync-bound: {syncing:.0%} of each step goes to waiting for gradients of other ranks; without that a step would take "
        f"{1000 * rest:.1f} ms. Ceiling if they cost nothing: {_ratio(costs.step, rest):.2f}x."
    ) + (f" Try: salience.{SYNC.name}." if worth else "")
    return BottleneckFound(
        text=text, bound="sync", cause="gradient sync", share=syncing, costs=costs, levers=tuple(ceilings)
    )


def _ratio(before: float, after: float) -> float:
    if after > 0:
        return min(before / after, MAX_SPEEDUP)
    return MAX_SPEEDUP if before > 0 else 1.0
